"""Methods that can code at once: those that are fitted to a model are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks.codec.baselines.kvtc.calibration import calibrate
from benchmarks.codec.baselines.kvtc.method import Kvtc
from benchmarks.codec.method import Method
from benchmarks.codec.methods import all_methods, select
from benchmarks.codec.windows import windows_of
from sgl_kvfetch.calibrate.model import KVModel, read_text
from sgl_kvfetch.quant.profile import Profile


def fitted_methods(
    model: KVModel,
    patterns: Sequence[str],
    *,
    profile: Profile | None,
    calibrate_text: Path | None,
    calibrate_part: str,
    calibrate_windows: int,
    window_tokens: int,
) -> list[Method]:
    """Return the methods whose names match. KVTC needs ``calibrate_text``: it is fitted to windows of it.

    Raises ConfigError.
    """
    methods = select(all_methods(profile, can_calibrate=calibrate_text is not None), patterns)
    to_fit = [method for method in methods if isinstance(method, Kvtc)]
    if to_fit and calibrate_text is not None:
        windows = windows_of(model, read_text(calibrate_text), calibrate_part, calibrate_windows, window_tokens)
        with tqdm(unit="step", disable=not sys.stderr.isatty()) as bar:

            def on_step(what: str) -> None:
                bar.set_postfix_str(f"KVTC: {what}")
                bar.update()

            fit = calibrate(model, windows, sorted({method.ratio for method in to_fit}), on_step)
        for method in to_fit:
            method.fit = fit
    return methods
