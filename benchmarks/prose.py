"""Provides real text that every machine has: the Python language reference, which CPython ships for `help()`."""

from __future__ import annotations

from pydoc_data.topics import topics


def prose() -> str:
    """Return 460,000 characters of technical English, about 110,000 tokens. It depends on Python's version."""
    return "\n\n".join(topics[name] for name in sorted(topics))
