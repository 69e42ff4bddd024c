"""Reads our metrics from a server's ``/metrics``."""

from __future__ import annotations

import time

from prometheus_client.parser import text_string_to_metric_families

from harness.engine import SGLangServer


def read_metric(text: str, name: str, **labels: str) -> float:
    """Return the sum of all samples with this name and these labels, over all ranks; 0 if there are none.

    ``name`` is the sample's name, which ends in ``_total`` for a counter.
    """
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and all(sample.labels.get(key) == value for key, value in labels.items())
    )


def wait_until_written(server: SGLangServer, num_pages: int, timeout_s: float = 60.0) -> None:
    """Wait until at least ``num_pages`` pages, of all ranks together, are written and no write is queued.

    Raises TimeoutError, with both counts, after ``timeout_s``.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        text = server.metrics()
        written = read_metric(text, "sgl_kvfetch_written_pages_total")
        queued_bytes = read_metric(text, "sgl_kvfetch_queued_bytes", queue="write")
        if written >= num_pages and queued_bytes == 0:
            return
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{written:g} of {num_pages} pages written, {queued_bytes:g} bytes queued")
        time.sleep(0.1)
