"""The checks of `Reason`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness.metrics import own_metric
from sgl_kvfetch.reasons import Reason


def reasons_in(found: Any) -> list[str]:
    """The reasons in one of the objects that `kvfetch why --json` prints."""
    return [each["reason"] for each in found["findings"]]


def assert_why(found: Any, *reasons: Reason, pages: range | None = None) -> None:
    """`kvfetch why` names these reasons, and no others. ``pages``: of the first one, if they matter."""
    assert reasons_in(found) == list(reasons), found
    if pages is not None:
        assert range(found["findings"][0]["first_page"], found["findings"][0]["end_page"]) == pages


@contextmanager
def assert_counted(stage: str, reason: Reason) -> Iterator[None]:
    """The block's misses are counted under this reason in this process. For a server: `tests.e2e.faults.misses`."""

    def count() -> float:
        return own_metric("sgl_kvfetch_misses_total", stage=stage, reason=reason)

    before = count()
    yield
    assert count() > before, f"nothing was counted as {stage} {reason}"
