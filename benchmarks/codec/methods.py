"""Lists all methods, selects them by name, and fits those that must be fitted to a model before they encode."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from tqdm import tqdm

from benchmarks.codec.baselines import attention, baselines
from benchmarks.codec.baselines.attention import AttentionMethod
from benchmarks.codec.baselines.block_gtq import block_gtq_methods
from benchmarks.codec.baselines.kvtc.calibration import calibrate
from benchmarks.codec.baselines.kvtc.method import Kvtc, kvtc_methods
from benchmarks.codec.baselines.oscar import oscar_methods
from benchmarks.codec.kv_model import KVModel
from benchmarks.codec.method import Method
from benchmarks.codec.ours import our_methods
from benchmarks.codec.windows import windows_of
from sgl_kvfetch.codec.quant.profile import Profile
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.prompts import read_texts

_CALIBRATED = ("kvtc", "block-gtq", "oscar")
_NEEDS = (("klt", "--profile"), *((family, "--calibrate-text") for family in _CALIBRATED))


def all_methods(profile: Profile | None, *, can_calibrate: bool = False) -> list[Method]:
    """Return all methods. ``can_calibrate``: include those that must go through ``fit`` before they encode."""
    methods = [*our_methods(profile), *baselines()]
    if can_calibrate:
        methods += [*kvtc_methods(), *block_gtq_methods(), *oscar_methods()]
    assert len({method.name for method in methods}) == len(methods)
    return methods


def select(methods: Sequence[Method], patterns: Sequence[str]) -> list[Method]:
    """Return the methods with names that match a shell-style pattern; all if there are no patterns.

    Raises ConfigError for a pattern that matches none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(method.name, pattern) for method in methods):
            names = ", ".join(method.name for method in methods)
            hints = [f"; {family} needs {option}" for family, option in _NEEDS if pattern.startswith(family)]
            raise ConfigError(f"no method matches {pattern!r}; known are {names}{''.join(hints)}")
    return [m for m in methods if not patterns or any(fnmatchcase(m.name, pattern) for pattern in patterns)]


def fit(
    methods: Sequence[Method], model: KVModel, text: Path | None, part: str, num_windows: int, window_tokens: int
) -> bool:
    """Fit methods to windows of a text, and return whether any of ``methods`` needed it. Raises ConfigError."""
    kvtc = [method for method in methods if isinstance(method, Kvtc)]
    fitted_to_attention = [method for method in methods if isinstance(method, AttentionMethod)]
    if not kvtc and not fitted_to_attention:
        return False
    assert text is not None, "these methods need a text; ``all_methods`` lists them only if there is one"
    windows = windows_of(model, read_texts(text), part, num_windows, window_tokens)
    with tqdm(unit="step", desc="calibration", disable=not sys.stderr.isatty()) as bar:
        if kvtc:
            found = calibrate(model, windows, sorted({method.ratio for method in kvtc}), lambda _: bar.update())
            for method in kvtc:
                method.fit = found
        if fitted_to_attention:
            statistics = attention.gather(model, windows, lambda _: bar.update())
            for attentive in fitted_to_attention:
                attentive.statistics = statistics
    return True
