"""Reads our metrics, from a server's ``/metrics`` or of this process."""

from __future__ import annotations

from prometheus_client import generate_latest

from harness.engine import SGLangServer
from harness.waiting import WAIT_S, wait_until
from sgl_kvfetch.tools.sglang_server import samples_of, total


def read_metric(text: str, name: str, **labels: str) -> float:
    """Return the sum of all samples with this name and these labels, over all ranks; 0 if there are none.

    ``name`` is the sample's name, which ends in ``_total`` for a counter.
    """
    return total(samples_of(text), name, **labels)


def own_metric(name: str, **labels: str) -> float:
    """Do the same for the metrics of this process."""
    return read_metric(generate_latest().decode(), name, **labels)


def wait_until_written(server: SGLangServer, num_pages: int, timeout_s: float = WAIT_S) -> None:
    """Wait until at least ``num_pages`` pages, of all ranks together, are in the store and no write is queued.

    Raises TimeoutError, with both counts and the end of the server's log, after ``timeout_s``.
    """
    text, written, queued_bytes = "", 0.0, 0.0

    def is_written() -> bool:
        nonlocal text, written, queued_bytes
        text = server.metrics()
        results = ("stored", "known")  # the others are pages that were dropped
        written = sum(read_metric(text, "sgl_kvfetch_written_pages_total", result=result) for result in results)
        queued_bytes = read_metric(text, "sgl_kvfetch_queued_bytes", queue="write")
        return written >= num_pages and queued_bytes == 0

    def found() -> str:
        dropped = [line for line in text.splitlines() if line.startswith("sgl_kvfetch_written_pages_total")]
        counts = f"{written:g} of {num_pages} pages written, {queued_bytes:g} bytes queued"
        return "\n".join([counts, *dropped, server.log_tail()])

    wait_until(is_written, timeout_s=timeout_s, poll_s=0.1, found=found)
