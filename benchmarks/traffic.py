"""Reads from a server's metrics how many bytes our backend transferred."""

from __future__ import annotations

from dataclasses import dataclass

from harness.metrics import read_metric


@dataclass(frozen=True)
class Traffic:
    """Bytes between store and server: on the wire, and in the pool's format."""

    wire_bytes: int
    raw_bytes: int


def kvfetch_traffic(before: str, after: str, direction: str = "read") -> Traffic:
    """Return the bytes transferred between two texts of ``/metrics``."""

    def moved(name: str) -> int:
        return round(read_metric(after, name, direction=direction) - read_metric(before, name, direction=direction))

    return Traffic(moved("sgl_kvfetch_wire_bytes_total"), moved("sgl_kvfetch_raw_bytes_total"))
