"""Simulates adaptive fetching on links and GPUs that we do not have.

    python -m benchmarks.adaptive --trace FILE --json OUT

See ``--help``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from rich.console import Console
from tqdm import tqdm

from benchmarks.adaptive.judge import Judged, judge
from benchmarks.adaptive.options import Options, parse_options
from benchmarks.adaptive.plot import plot_speedup, plot_timelines
from benchmarks.adaptive.published import PUBLISHED
from benchmarks.adaptive.report import print_summaries, to_json
from benchmarks.adaptive.scenarios import (
    Group,
    grid,
    one_fetch,
    paper_scene,
    random_traces,
    several_fetches,
    trace_file,
    wrong_profile,
)
from benchmarks.report import write_json
from sgl_kvfetch.adapt.decode_profile import DecodeProfile, load_decode_profile
from sgl_kvfetch.errors import KVFetchError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
_TABLE_WIDTH = 160
# Bounds of the oracle's exhaustive search. Where link and decoders are equally fast, even more nodes prove nothing.
_MAX_NODES, _MAX_NODES_OF_MANY = 1000, 30


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return the exit code: 0, or 2 on an error."""
    options = parse_options(sys.argv[1:] if argv is None else argv)
    console = Console(highlight=False)
    console.width = max(console.width, _TABLE_WIDTH)
    try:
        return _benchmark(options, console)
    except KVFetchError as e:
        console.print(f"error: {e}", style="red", markup=False, soft_wrap=True)
        return EXIT_ERROR
    except KeyboardInterrupt:
        console.print("interrupted")
        return EXIT_INTERRUPTED


def _benchmark(options: Options, console: Console) -> int:
    started_s = time.monotonic()
    profiles = [PUBLISHED[name] for name in options.devices] + [load_decode_profile(path) for path in options.profiles]
    groups = _groups(options, profiles)
    judged: list[tuple[Group, list[Judged]]] = []
    total = sum(len(group.scenarios) for group in groups)
    with tqdm(total=total, unit="scenario", disable=not sys.stderr.isatty()) as bar:
        for group in groups:
            max_nodes = _MAX_NODES if len(group.scenarios) <= 30 else _MAX_NODES_OF_MANY
            found = []
            for scenario in group.scenarios:
                found.append(judge(scenario, max_nodes=max_nodes))
                bar.update()
            judged.append((group, found))
    duration_s = time.monotonic() - started_s
    print_summaries(judged, console)
    if options.json_path is not None:
        write_json(options.json_path, to_json(judged, profiles, options, duration_s))
        console.print(f"wrote {options.json_path}")
    if options.plots is not None:
        _plot(options, judged, profiles[0], console)
    console.print(f"simulated {total} scenarios in {duration_s:.0f} s")
    return 0


def _groups(options: Options, profiles: list[DecodeProfile]) -> list[Group]:
    """Return the groups to simulate, that of the user's trace file first."""
    sessions = options.sessions
    groups = [trace_file(options.trace, profiles, sessions)] if options.trace is not None else []
    if options.only_trace:
        return groups
    groups.append(paper_scene(profiles[0], sessions))
    if options.random:
        groups.append(random_traces(profiles, options.random, options.seed, sessions))
    groups.append(several_fetches(profiles, sessions))
    groups += [wrong_profile(profiles, factor, sessions) for factor in (2.0, 0.5)]
    return groups + [grid(profile, sessions) for profile in profiles]


def _plot(
    options: Options, judged: Sequence[tuple[Group, list[Judged]]], profile: DecodeProfile, console: Console
) -> None:
    assert options.plots is not None
    options.plots.mkdir(parents=True, exist_ok=True)
    grids = {found[0].scenario.profile.device: found for group, found in judged if group.name.startswith("grid ")}
    if grids:
        plot_speedup(options.plots / "adaptive_speedup.png", grids)
        console.print(f"wrote {options.plots / 'adaptive_speedup.png'}")
    scene = paper_scene(profile, options.sessions).scenarios[1]
    match = one_fetch(f"20 Gbps, {profile.device}, 12 chunks", profile, [20.0], 12, options.sessions)
    plot_timelines(
        options.plots / "adaptive_timeline.png", [judge(s, max_nodes=_MAX_NODES_OF_MANY) for s in (scene, match)]
    )
    console.print(f"wrote {options.plots / 'adaptive_timeline.png'}")


if __name__ == "__main__":
    sys.exit(main())
