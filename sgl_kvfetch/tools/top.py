"""``kvfetch top``: watch what a store does."""

from __future__ import annotations

import contextlib
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Annotated

import typer
from msgspec import Struct
from rich.table import Table
from rich.text import Text

from sgl_kvfetch.errors import ConfigError, StoreError
from sgl_kvfetch.log import printable
from sgl_kvfetch.stores import Route
from sgl_kvfetch.tools.terminal import (
    TokenFileOption,
    TokenOption,
    format_size,
    json_flag,
    make_console,
    option,
    read_token,
    show,
)

_TIMEOUT_S = 10.0
_PREFIX = "kvfetch_server_"


class StoreMetrics(Struct, frozen=True):
    """A sample of the store's metrics. A key is a metric's name without its prefix, and the value of one label."""

    at_s: float
    values: Mapping[tuple[str, str], float]


class Activity(Struct, frozen=True):
    """What a store holds, and its rates a second. ``None``: nothing to divide by, or no limit."""

    stored_bytes: float
    capacity_bytes: float | None
    segments: float
    requests_in_flight: float
    requests: float
    errors: dict[str, float]  # by HTTP status
    lookups: float
    pages_found: float | None  # the share of those that were looked up
    lookup_p99_s: float | None  # 99% of lookups took at most this long
    sent_bytes: float
    received_bytes: float
    evicted_segments: float


def top(
    store: Annotated[str, typer.Argument(metavar="STORE", help="http://HOST:PORT or https://... of kvfetch serve.")],
    interval_s: Annotated[float, option("SECONDS", "Time between two samples.", "--interval", min=0.1)] = 2.0,
    once: Annotated[bool, option(None, "Print one interval and exit.", "--once")] = False,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    as_json: Annotated[
        bool,
        json_flag(
            "an object with stored_bytes, capacity_bytes, segments, requests_in_flight, errors by status, pages_found "
            "(a share), lookup_p99_s and, a second, requests, lookups, sent_bytes, received_bytes, evicted_segments"
        ),
    ] = False,
) -> None:
    """Show what a store holds and does, until Ctrl-C.

    Without a terminal, or with --json, one interval is printed. The numbers are those of the store's /metrics.

    Examples:

        kvfetch top http://127.0.0.1:8700

        kvfetch top http://127.0.0.1:8700 --json --interval 10
    """
    if not store.startswith(("http://", "https://")):
        raise ConfigError(f"{store}: expected http://HOST:PORT or https://... of kvfetch serve")
    secret = read_token(token, token_file)
    console = make_console()
    last = read_metrics(store, secret)
    if once or as_json or not console.is_terminal:
        time.sleep(interval_s)
        now = read_metrics(store, secret)
        rate = activity(last, now)
        show(rate, as_json, [screen(store, rate, now)])
        return
    from rich.live import Live

    look = screen(store, activity(last, last), last)
    with contextlib.suppress(KeyboardInterrupt), Live(look, console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            try:
                now = read_metrics(store, secret)
            except StoreError as e:
                live.update(Text(f"{store}\n\n{e}"), refresh=True)
                continue
            live.update(screen(store, activity(last, now), now), refresh=True)
            last = now


def read_metrics(url: str, token: str | None) -> StoreMetrics:
    """Read the store's metrics. Raises StoreError."""
    request = urllib.request.Request(f"{url.rstrip('/')}/metrics")
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            text = answer.read().decode(errors="replace")
    except urllib.error.HTTPError as e:
        from sgl_kvfetch.stores import status_error

        e.close()
        raise status_error(e.code, f"{url}/metrics: {printable(str(e))}") from e
    except (OSError, http.client.HTTPException) as e:
        raise StoreError("refused", f"{url}/metrics: {getattr(e, 'reason', e)}") from e
    try:
        values = parse(text)
    except (ValueError, KeyError) as e:
        raise StoreError("protocol", f"{url}/metrics is not what kvfetch serve answers") from e
    return StoreMetrics(time.monotonic(), values)


def parse(text: str) -> dict[tuple[str, str], float]:
    """Parse the text of /metrics into a `StoreMetrics`' values. Raises ValueError or KeyError for another server's."""
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            if name == f"{_PREFIX}request_seconds_bucket" and labels["route"] != Route.LOOKUP:
                continue
            label = labels.get("le") or labels.get("result") or labels.get("status") or ""
            key = name.removeprefix(_PREFIX), label
            values[key] = values.get(key, 0.0) + value
    for gauge in ("stored_bytes", "segments", "requests_in_flight"):
        _ = values[gauge, ""]
    return values


def activity(before: StoreMetrics | None, now: StoreMetrics) -> Activity:
    """Return the rates between two samples; without the first, the totals since the store's start."""
    elapsed_s = 1.0 if before is None else max(now.at_s - before.at_s, 1e-9)
    past = {} if before is None else before.values
    if any(value < past.get(key, 0.0) for key, value in now.values.items() if key[0].endswith("_total")):
        past = {}  # the store was restarted

    def rates(name: str) -> dict[str, float]:
        return {key[1]: (value - past.get(key, 0.0)) / elapsed_s for key, value in now.values.items() if key[0] == name}

    pages, requests = rates("lookup_pages_total"), rates("requests_total")
    capacity = now.values.get(("capacity_bytes", ""), float("inf"))
    return Activity(
        now.values["stored_bytes", ""],
        None if capacity == float("inf") else capacity,
        now.values["segments", ""],
        now.values["requests_in_flight", ""],
        sum(requests.values()),
        {status: rate for status, rate in requests.items() if status >= "400" and rate > 0},
        sum(rates("lookups_total").values()),
        pages.get("hit", 0.0) / sum(pages.values()) if sum(pages.values()) else None,
        _p99(rates("request_seconds_bucket")),
        sum(rates("sent_bytes_total").values()),
        sum(rates("received_bytes_total").values()),
        sum(rates("evicted_segments_total").values()),
    )


def _p99(buckets: Mapping[str, float]) -> float | None:
    """Return the least upper bound of 99% of the samples, or None without any. ``buckets``: cumulative, by bound."""
    in_order = sorted((float(bound), count) for bound, count in buckets.items())
    if not in_order or not in_order[-1][1]:
        return None
    return next(bound for bound, count in in_order if count >= 0.99 * in_order[-1][1])


def screen(url: str, rate: Activity, now: StoreMetrics) -> Table:
    """Return a table of the last interval's activity beside the totals since the store's start."""
    total = activity(None, now)
    full = "" if rate.capacity_bytes is None else f" of {format_size(int(rate.capacity_bytes))}"
    table = Table(title=url, title_justify="left", box=None, padding=(0, 3, 0, 0))
    table.add_column("")
    table.add_column("now", justify="right")
    table.add_column("since its start", justify="right")
    table.add_row("stored", f"{format_size(int(rate.stored_bytes))}{full}")
    table.add_row("segments", f"{rate.segments:,.0f}")
    table.add_row("evicted", f"{rate.evicted_segments:,.1f}/s", f"{total.evicted_segments:,.0f}")
    table.add_row("lookups", f"{rate.lookups:,.1f}/s", f"{total.lookups:,.0f}")
    table.add_row("pages found", *(_share(each.pages_found) for each in (rate, total)))
    table.add_row("99% of lookups within", *(_duration(each.lookup_p99_s) for each in (rate, total)))
    for name in ("sent_bytes", "received_bytes"):
        what = name.removesuffix("_bytes")
        table.add_row(what, f"{format_size(int(getattr(rate, name)))}/s", format_size(int(getattr(total, name))))
    table.add_row("requests", f"{rate.requests:,.1f}/s", f"{total.requests:,.0f}")
    table.add_row("in flight", f"{rate.requests_in_flight:,.0f}")
    for status, number in sorted(total.errors.items()):
        table.add_row(f"answered {status}", f"{rate.errors.get(status, 0.0):,.1f}/s", f"{number:,.0f}")
    return table


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _duration(seconds: float | None) -> str:
    return "-" if seconds is None else "more" if seconds == float("inf") else f"{1000 * seconds:g} ms"
