"""Compares the bits and accuracy of KV cache codecs.

    python -m benchmarks.codec --model PATH --text FILE --json out.json

See ``--help``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from tqdm import tqdm

from benchmarks.codec.measure import Measured, measure
from benchmarks.codec.method import Method
from benchmarks.codec.methods import all_methods, select
from benchmarks.codec.options import Options, parse_options
from benchmarks.codec.plot import plot_rates
from benchmarks.codec.ready import fit
from benchmarks.codec.report import print_methods, print_table, to_json
from benchmarks.codec.windows import windows_of
from benchmarks.report import write_json
from sgl_kvfetch.calibrate.model import KVModel, fractions_of, read_text
from sgl_kvfetch.errors import ConfigError, KVFetchError
from sgl_kvfetch.quant.profile import Profile, load_profile

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
_TABLE_WIDTH = 140  # wide enough that no row wraps


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return the exit code: 0, or 2 on an error."""
    options = parse_options(sys.argv[1:] if argv is None else argv)
    console = Console(soft_wrap=True, highlight=False)
    console.width = max(console.width, _TABLE_WIDTH)
    try:
        return _benchmark(options, console)
    except KVFetchError as e:
        console.print(f"error: {e}", style="red", markup=False)
        return EXIT_ERROR
    except KeyboardInterrupt:
        console.print("interrupted")
        return EXIT_INTERRUPTED


def _benchmark(options: Options, console: Console) -> int:
    started_s = time.monotonic()
    profile = load_profile(options.profile) if options.profile is not None else None
    methods = select(all_methods(profile, can_calibrate=options.calibrate_text is not None), options.methods)
    if options.list_methods:
        print_methods([(method.name, method.source) for method in methods], console)
        return 0
    assert options.model is not None
    assert options.text is not None
    texts = read_text(options.text)
    model = KVModel(options.model, device=_device(options.device))
    if profile is not None:
        _require_profile_of(profile, model)
    length = options.context_tokens + options.continuation_tokens
    windows = windows_of(model, texts, options.part, options.windows, length + 1)  # the last is only predicted
    has_kvtc = fit(methods, model, options.calibrate_text, options.calibrate_part, options.calibrate_windows, length)
    measured = _measure(model, windows, methods, options)
    duration_s = time.monotonic() - started_s
    print_table(measured, console)
    if profile is not None and _was_calibrated_on(profile, options.text, options.part):
        note = f"{options.profile} was calibrated on text that is measured here, so klt looks too good; see --part"
        console.print(note, style="yellow", markup=False)
    if has_kvtc and options.calibrate_text == options.text and _overlap(options.part, options.calibrate_part):
        note = "KVTC was calibrated on text that is measured here, so it looks too good; see --calibrate-part"
        console.print(note, style="yellow", markup=False)
    if options.json_path is not None:
        write_json(options.json_path, to_json(measured, options, model.device, duration_s))
        console.print(f"wrote {options.json_path}")
    if options.plot_path is not None:
        subtitle = (
            f"{Path(options.model).name} on {options.text.name}: {options.windows} windows, "
            f"{options.context_tokens:,} tokens of context, {options.continuation_tokens:,} of continuation"
        )
        plot_rates(options.plot_path, measured.rows, subtitle)
        console.print(f"wrote {options.plot_path}")
    console.print(f"took {duration_s:.0f} s")
    return 0


def _measure(model: KVModel, windows: Sequence[torch.Tensor], methods: Sequence[Method], options: Options) -> Measured:
    with tqdm(total=len(windows) * len(methods), unit="run", disable=not sys.stderr.isatty()) as bar:

        def on_step(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update()

        return measure(model, windows, options.context_tokens, methods, on_step)


def _require_profile_of(profile: Profile, model: KVModel) -> None:
    found = (profile.grid.num_layers, profile.grid.num_heads, profile.k_head_dim, profile.v_head_dim)
    expected = (model.num_layers, model.num_heads, model.k_head_dim, model.v_head_dim)
    if found != expected:
        raise ConfigError(
            f"the profile is for a model of {found[0]} layers, {found[1]} heads of {found[2]} (K) and {found[3]} (V); "
            f"{model.path} has {expected[0]}, {expected[1]}, {expected[2]} and {expected[3]}"
        )


def _was_calibrated_on(profile: Profile, text: Path, part: str) -> bool:
    """Return whether the profile was calibrated on this part of the text, judged by the file's name."""
    return text.name in profile.calibration.text.split(", ") and _overlap(part, profile.calibration.part or "0:1")


def _overlap(part: str, other: str) -> bool:
    (first, end), (other_first, other_end) = fractions_of(part), fractions_of(other)
    return first < other_end and other_first < end


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as e:
        raise ConfigError(f"--device {name}: {str(e).splitlines()[0]}") from e
    return name


if __name__ == "__main__":
    sys.exit(main())
