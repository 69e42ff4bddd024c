"""``kvfetch profile``: list, get, put and remove the profiles that servers take from a store."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from msgspec import Struct
from rich.table import Table

from sgl_kvfetch.codec import StoreKeys
from sgl_kvfetch.errors import ConfigError, FormatError, KVFetchError
from sgl_kvfetch.log import printable
from sgl_kvfetch.stores import (
    PROFILES,
    AdminStore,
    ListedProfile,
    ProfileRow,
    list_profiles,
    profile_rows,
    publish_profile,
    read_profile,
)
from sgl_kvfetch.tools.target import run_on_store
from sgl_kvfetch.tools.terminal import (
    KeyFileOption,
    StoreAccess,
    StoreArgument,
    format_age,
    format_size,
    json_flag,
    make_table,
    option,
    show,
)
from sgl_kvfetch.user_files import write_file

if TYPE_CHECKING:
    from sgl_kvfetch.codec import Profile
    from sgl_kvfetch.codec.quant.profile import MeasuredKind

_FIELDS = "digest, weights, model, target_kl, num_bytes, put_s (a time), is_newest and problem (empty: none)"
SUMMARY = (  # the fields of `Calibrated`
    "an object with digest, context_kl, default_target_kl and notes; curve, a list with target_kl, step, "
    "bits_per_value, kept_share and wide_share; and kinds, a list with name, num_windows, num_held_out, counts, "
    "context_kl and kls, one for each step"
)
_WEIGHTS_DIGITS = 12


def save_and_publish(
    profile: Profile, out: Path | None, store: str | None, access: StoreAccess, keys: StoreKeys
) -> list[str]:
    """Write a profile to a file, publish it in a store, or both, and return lines that say so.

    If that fails, it stays in the file, or in one that the error names: it took time to make.
    """
    path = out or _temporary(profile)
    try:
        profile.save(path)
    except ConfigError as e:
        profile.save(kept := _temporary(profile))
        e.add_note(f"the profile is in {kept}")
        raise
    lines = [f"{path}: profile {profile.digest}, {path.stat().st_size / 1e6:.1f} MB"]
    if store is None:
        return lines
    try:
        name = run_on_store(store, access, lambda opened: publish_profile(opened, path, keys))
    except KVFetchError as e:
        e.add_note(f"the profile is in {path}; kvfetch profile put {store} {path} publishes it")
        raise
    if out is None:
        shutil.rmtree(path.parent)
        lines = []
    return [*lines, f"{store}: published {name}; servers that start with this model take it"]


def _temporary(profile: Profile) -> Path:
    return Path(tempfile.mkdtemp(prefix="kvfetch-")) / f"{profile.digest}.profile"


class TargetCost(Struct, frozen=True):
    """The cost of a ``target_kl``. The shares of all coefficients that are kept, and that need two integers."""

    target_kl: float
    step: float
    bits_per_value: float
    kept_share: float
    wide_share: float


class Calibrated(Struct, frozen=True):
    digest: str
    context_kl: float
    default_target_kl: float
    notes: tuple[str, ...]
    curve: list[TargetCost]
    kinds: tuple[MeasuredKind, ...]


def summary_of(profile: Profile) -> Calibrated:
    from sgl_kvfetch.codec import KltQuantiser

    curve = [
        TargetCost(p.kl, p.step, p.bits_per_value, *KltQuantiser(profile, step=p.step).coefficient_shares)
        for p in profile.curve
    ]
    default, notes = profile.default_target_kl, profile.calibration.notes
    return Calibrated(profile.digest, profile.context_kl, default, notes, curve, profile.kinds)


def lines_of(profile: Profile, summary: Calibrated) -> Iterator[Table | str]:
    """Describe a profile: what targets cost, and what steps cost in each kind of text."""
    table = make_table((), ("target_kl", "step", "bits per value", "bf16 is larger by", "coefficients kept", "wide"))
    for point in summary.curve:
        ratio = f"{16 / point.bits_per_value:.1f}x" if point.bits_per_value else ""
        costs = f"{point.target_kl:.2g}", f"{point.step:.3g}", f"{point.bits_per_value:.2f}"
        table.add_row(*costs, ratio, f"{point.kept_share:.0%}", f"{point.wide_share:.1%}")
    yield table
    if len(profile.kinds) > 1:
        steps = [f"step {point.step:.3g}" for point in profile.curve]
        table = make_table(("KL of each kind of text",), ("windows", "held out", "no context", *steps))
        for kind in profile.kinds:
            name = printable(kind.name) if kind.counts else f"{printable(kind.name)}, does not count"
            kls = (f"{kl:.2g}" for kl in (kind.context_kl, *kind.kls))
            table.add_row(name, str(kind.num_windows), str(kind.num_held_out), *kls)
        yield table
    grid, held_out = profile.grid, sum(kind.num_held_out for kind in profile.kinds)
    yield (
        f"Measured on {held_out} held-out windows of {printable(profile.calibration.text)}; bits are order-0 "
        "entropies. Other text may cost more."
    )
    worst = ", and more in the worst kind" if sum(kind.counts for kind in profile.kinds) > 1 else ""
    yield (
        f"Losing the context costs {profile.context_kl:.2g} nats per token. By default, a thousandth of that is lost "
        f"in the mean{worst}: the default target_kl is {profile.default_target_kl:.2g}. The first "
        f"{profile.num_sinks} tokens are kept exact."
    )
    if profile.few_tokens:
        yield f"Warning: {profile.few_tokens}."
    yield f"Cells: {grid.cell_layers} layers, {grid.cell_heads} of {grid.num_heads} heads, K and V together."


def profile(
    action: Annotated[
        Literal["list", "show", "get", "put", "rm"],
        typer.Argument(
            help="list; show DIGEST, what it promises of which text; get DIGEST --out FILE; put FILE, as the newest of "
            "its model; rm DIGEST, which withdraws it."
        ),
    ],
    store: StoreArgument,
    access: StoreAccess,
    which: Annotated[
        str | None,
        typer.Argument(metavar="[DIGEST|FILE]", help="A profile's digest, or its start; for put, its file."),
    ] = None,
    out: Annotated[Path | None, option("FILE", "With get: where to write the profile.", "--out", "-o")] = None,
    key_file: KeyFileOption = None,
    as_json: Annotated[
        bool, json_flag(f"a list of profiles (get, put, rm: of one), each with {_FIELDS}; with show {SUMMARY}")
    ] = False,
) -> None:
    """List, show, read, publish or withdraw the profiles of a store.

    A server with {"quantiser": "klt"} takes the newest profile of its model's weights when it starts: the one that was
    put last. Servers that run keep theirs until they start again. Where servers have a key_file,
    put needs it, too: servers pass over profiles that are not encrypted. A token needs the role `write` for put and rm.

    show says what a profile's steps cost in each kind of text that it was measured on, of a profile in a store, or of
    one in a file, which it takes in the place of the store.

    Withdrawing deletes the profile from the store, and new servers take the newest that is left. What was stored by it
    stays until it is evicted, and only servers that still have the profile read it. To take it back, put it again.

    Examples:

        kvfetch profile list http://127.0.0.1:8700

        kvfetch profile show http://127.0.0.1:8700 3f2a

        kvfetch profile show llama.profile

        kvfetch profile put http://127.0.0.1:8700 llama.profile --token-file token

        kvfetch profile rm http://127.0.0.1:8700 3f2a --token-file token

        kvfetch profile get http://127.0.0.1:8700 3f2a --out llama.profile
    """
    if action == "show" and which is None and "://" not in store:
        _show(Path(store), as_json)
        return
    if (which is None) != (action == "list"):
        wanted = {"list": "nothing", "put": "a FILE"}.get(action, "a DIGEST")
        raise ConfigError(f"kvfetch profile {action} expects {wanted} after the store")
    if (out is None) == (action == "get"):
        raise ConfigError("--out FILE belongs to kvfetch profile get, which needs it")
    keys = StoreKeys.read(key_file)

    async def work(opened: AdminStore) -> tuple[list[ProfileRow], str]:
        """Do what the command says. Return the profiles to show, and a line about what was done."""
        if action == "put":
            assert which is not None
            name = await publish_profile(opened, Path(which), keys)
            rows = profile_rows(await list_profiles(opened), keys)
            return [row for row in rows if f"{row.weights}/{row.digest}" == name], f"published {name}"
        listed = await list_profiles(opened)
        rows = profile_rows(listed, keys)
        if which is None:
            return rows, ""
        found = _named(listed, which)
        mine = [row for row in rows if row.digest == found.digest and row.weights == found.weights]
        if action == "rm":
            await opened.delete_note(PROFILES, found.info.name)
            left = [row for row in profile_rows(await list_profiles(opened, found.weights), keys) if row.is_newest]
            now = f"new servers take {left[0].digest}" if left else "there is no other for its weights"
            return mine, f"withdrawn: {found.info.name}; {now}"
        try:
            content = await read_profile(opened, found, keys)
        except FormatError as e:
            raise FormatError(f"profile {found.info.name} cannot be used: {e}") from e
        write_file(out or shown, content, f"profile {found.digest} to")
        return mine, f"{out}: {found.info.name}"

    with tempfile.TemporaryDirectory(prefix="kvfetch-") as folder:
        shown = Path(folder, "profile")
        rows, done = run_on_store(store, access, work)
        if action == "show":
            _show(shown, as_json)
            return
    show(rows, as_json, [done or (profiles_table(rows) if rows else "no profiles")])


def _show(path: Path, as_json: bool) -> None:
    from sgl_kvfetch.codec import load_profile

    loaded = load_profile(path)
    summary = summary_of(loaded)
    described = f"profile {loaded.digest} of {printable(loaded.calibration.model)}"
    show(summary, as_json, [described, *lines_of(loaded, summary)])


def _named(listed: Sequence[ListedProfile], digest: str) -> ListedProfile:
    """Return the profile whose digest, or WEIGHTS/DIGEST, starts so. Raises ConfigError unless there is exactly one."""
    found = [each for each in listed if (each.info.name if "/" in digest else each.digest).startswith(digest)]
    if len(found) != 1 or not digest:
        there = ", ".join(each.info.name for each in found) or "none"
        raise ConfigError(f"expected one profile with a digest that starts with {digest!r}, found {there}")
    return found[0]


def profiles_table(rows: Sequence[ProfileRow], stored_bytes: Mapping[str, int] | None = None) -> Table:
    """Return a table of profiles. ``stored_bytes``: what is stored by each, by its digest."""
    numbers = ("size", "target_kl") if stored_bytes is None else ("size", "target_kl", "stored by it")
    table = make_table(("profile", "model", "weights", "published", "state"), numbers)
    for row in rows:
        by_it = () if stored_bytes is None else (format_size(stored_bytes.get(row.digest, 0)),)
        table.add_row(
            row.digest,
            printable(row.model),
            row.weights[:_WEIGHTS_DIGITS],
            f"{format_age(time.time() - row.put_s)} ago",
            "newest: new servers take it" if row.is_newest else printable(row.problem) or "older",
            format_size(row.num_bytes),
            "-" if row.target_kl is None else f"{row.target_kl:.2g}",
            *by_it,
        )
    return table
