"""Reads our metrics, from a server's ``/metrics`` or of this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from harness.engine import SGLangServer
from harness.waiting import WAIT_S, wait_until
from sgl_kvfetch.tools.sglang_server import total


def read_metric(text: str, name: str, **labels: str) -> float:
    """Return the sum of all samples with this name and these labels, over all ranks; 0 if there are none.

    ``name`` is the sample's name, which ends in ``_total`` for a counter.
    """
    families = text_string_to_metric_families(text)
    return total((sample for family in families for sample in family.samples), name, **labels)


def own_metric(name: str, **labels: str) -> float:
    """Do the same for the metrics of this process."""
    return read_metric(generate_latest().decode(), name, **labels)


@contextmanager
def written(server: SGLangServer, num_pages: int) -> Iterator[None]:
    """Wait at the block's end until it has brought ``num_pages`` more pages to the store.

    For a server that has written before: `wait_until_written` could not tell a write that is not queued yet from one
    that has ended. Before the block, wait for what is queued: it would count as the block's.
    """
    wait_until_written(server, 0)
    before = written_pages(server)
    yield
    wait_until_written(server, before + num_pages)


def wait_until_written(server: SGLangServer, num_pages: float, timeout_s: float = WAIT_S) -> None:
    """Wait until at least ``num_pages`` pages, of all ranks together, are in the store and no write is queued.

    Raises TimeoutError, with both counts and the end of the server's log, after ``timeout_s``.
    """
    text, queued_bytes = "", 0.0

    def is_written() -> bool:
        nonlocal text, queued_bytes
        text = server.metrics()
        queued_bytes = read_metric(text, "sgl_kvfetch_queued_bytes", queue="write")
        return _written_pages(text) >= num_pages and queued_bytes == 0

    def found() -> str:
        dropped = [line for line in text.splitlines() if line.startswith("sgl_kvfetch_written_pages_total")]
        counts = f"{_written_pages(text):g} of {num_pages:g} pages written, {queued_bytes:g} bytes queued"
        return "\n".join([counts, *dropped, server.log_tail()])

    wait_until(is_written, timeout_s=timeout_s, poll_s=0.1, found=found)


def written_pages(server: SGLangServer) -> float:
    """The pages that are in the store because of this server, of all ranks together."""
    return _written_pages(server.metrics())


def _written_pages(text: str) -> float:
    results = ("stored", "known")  # the others are pages that were dropped
    return sum(read_metric(text, "sgl_kvfetch_written_pages_total", result=result) for result in results)


def bytes_read(before: str, after: str) -> int:
    """Return the bytes that a server received between two texts of ``/metrics``, as they are on the wire."""
    wire_bytes = [read_metric(text, "sgl_kvfetch_wire_bytes_total", direction="read") for text in (before, after)]
    return round(wire_bytes[1] - wire_bytes[0])
