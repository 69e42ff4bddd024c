"""Fits those methods that must be fitted to a model before they encode."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks.codec.baselines.kvtc.calibration import calibrate
from benchmarks.codec.baselines.kvtc.method import Kvtc
from benchmarks.codec.method import Method
from benchmarks.codec.windows import windows_of
from sgl_kvfetch.calibrate.model import KVModel, read_text


def fit(
    methods: Sequence[Method], model: KVModel, text: Path | None, part: str, num_windows: int, window_tokens: int
) -> bool:
    """Fit KVTC to windows of a text, and return whether it is among ``methods``. Raises ConfigError."""
    to_fit = [method for method in methods if isinstance(method, Kvtc)]
    if not to_fit:
        return False
    assert text is not None, "KVTC needs a text; ``all_methods`` lists it only if there is one"
    windows = windows_of(model, read_text(text), part, num_windows, window_tokens)
    with tqdm(unit="step", disable=not sys.stderr.isatty()) as bar:

        def on_step(what: str) -> None:
            bar.set_postfix_str(f"KVTC: {what}")
            bar.update()

        found = calibrate(model, windows, sorted({method.ratio for method in to_fit}), on_step)
    for method in to_fit:
        method.fit = found
    return True
