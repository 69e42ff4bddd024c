"""The work of ``kvfetch profile``."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import typer
from rich.table import Table

from sgl_kvfetch.adapt.measure import Sample, measure_profile
from sgl_kvfetch.adapt.profile import DecodeProfile
from sgl_kvfetch.cli.options import make_console
from sgl_kvfetch.cli.tables import make_table
from sgl_kvfetch.cli.units import format_size
from sgl_kvfetch.cli.video_engines import open_current_nvdec
from sgl_kvfetch.codecs import get_codec
from sgl_kvfetch.codecs.base import Codec, Decoders
from sgl_kvfetch.codecs.hevc import HevcCodec
from sgl_kvfetch.encode.targets import Target, make_targets
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.layout.frames import PLANES
from sgl_kvfetch.layout.regions import region_layout


@dataclass(frozen=True)
class Request:
    """The command's options."""

    out: Path | None
    codecs: tuple[str, ...]
    resolutions: tuple[str, ...]
    tokens: int
    heads: int
    head_dim: int
    device: Literal["auto", "cpu", "nvdec"]
    concurrency: int | None  # None: as many as may help
    rounds: int
    seed: int
    as_json: bool


def run(request: Request) -> None:
    """Measure, print, write. Raises ConfigError."""
    if request.out is not None and not request.out.parent.is_dir():
        raise ConfigError(f"--out {request.out}: there is no directory {request.out.parent}")
    progress = make_console(stderr=True)
    targets = make_targets(request.codecs, request.resolutions)
    setup = _set_up(request)
    progress.print(setup.about)
    samples = list(_samples(request, targets))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a session is one thread, as in the decode pool
    try:
        profile = measure_profile(
            samples,
            setup.sessions,
            device=setup.device,
            source=_source(request, setup.decodes),
            chunk_values=_num_values(request),
            rounds=request.rounds,
            on_step=lambda name: progress.print(f"measuring {name}"),
        )
    finally:
        torch.set_num_threads(threads)
    if request.as_json:
        typer.echo(profile.encode(), nl=False)
    else:
        console = make_console()
        console.print(_table(profile))
        console.print(f"a pool of {profile.num_sessions} decodes most chunks a second")
    if request.out is not None:
        try:
            request.out.write_bytes(profile.encode())
        except OSError as e:
            raise ConfigError(f"--out {request.out}: {e}") from e
        progress.print(f"wrote {request.out}")


@dataclass(frozen=True)
class _SetUp:
    """What is measured. ``decodes`` and ``about`` say so."""

    device: str
    decodes: str
    about: str
    sessions: Sequence[Decoders]


def _set_up(request: Request) -> _SetUp:
    """Raises ConfigError for an NVDEC that is not there, or decodes none of the codecs."""
    cpu = platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0))
    if request.device == "cpu":
        return _SetUp(cpu, "CPU", "measuring the CPU", [{}] * (request.concurrency or cores))
    nvdec, about = open_current_nvdec()
    codecs = [] if nvdec is None else [name for name in request.codecs if name in nvdec.codecs]
    if nvdec is not None and codecs:
        nvdec.surfaces.limit_bytes = None  # engines are measured, whatever a server lets them have
        sessions = [nvdec.open_session() for _ in range(request.concurrency or 2 * nvdec.num_engines)]
        decodes = f"{', '.join(codecs)} on NVDEC ({nvdec.num_engines} engines), all else on the CPU"
        return _SetUp(f"{torch.cuda.get_device_name()}, {cpu}", decodes, about, sessions)
    if request.device == "nvdec":
        raise ConfigError(f"--device nvdec: it decodes none of {', '.join(request.codecs)} here ({about})")
    return _SetUp(cpu, "CPU", f"measuring the CPU ({about})", [{}] * (request.concurrency or cores))


def _num_values(request: Request) -> int:
    return request.tokens * PLANES * request.heads * request.head_dim


def _source(request: Request, decodes: str) -> str:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return f"kvfetch profile, {today}, {decodes}, {request.rounds} rounds, synthetic integers, seed {request.seed}"


def _samples(request: Request, targets: Sequence[Target]) -> Iterator[Sample[Decoders]]:
    """Each video codec at each resolution; a fast codec, to which pictures are nothing, once."""
    integers = _integers(request)
    seen = set()
    for target in targets:
        codec = get_codec(target.codec)
        name = f"{target.codec} {target.resolution}" if isinstance(codec, HevcCodec) else target.codec
        if name in seen:
            continue
        seen.add(name)
        layout = region_layout(len(integers), request.tokens, target.resolution)
        bitstream = codec.encode(layout.to_frames(integers))
        shape = layout.num_frames(tuple(integers.shape)), layout.height, layout.width
        yield Sample(name, len(bitstream), partial(_decode, codec, bitstream, shape))


def _decode(codec: Codec, bitstream: bytes, shape: tuple[int, int, int], session: Decoders) -> None:
    """Raises ConfigError where NVDEC does not do what it was found to do: the CPU's time is not to pass for its."""
    if (decoder := session.get(codec.name)) is None:
        codec.decode(bitstream, *shape)
    elif not decoder.decode(bitstream, *shape).is_on_device:
        raise ConfigError(f"NVDEC did not decode {codec.name} of {shape[2]}x{shape[1]}; try a lower --concurrency")


def _integers(request: Request) -> torch.Tensor:
    """uint8 ``(coefficients, tokens)``: spread around 128, the first coefficients widely, the last hardly, as those of
    a transform are."""
    generator = torch.Generator().manual_seed(request.seed)
    spread = torch.logspace(1, -1, PLANES * request.heads * request.head_dim)[:, None]
    normal = torch.randn(len(spread), request.tokens, generator=generator)
    return (normal * spread + 128).round().clamp(0, 255).to(torch.uint8)


def _table(profile: DecodeProfile) -> Table:
    columns = [f"{k} at once" for k in range(1, profile.max_concurrency + 1)]
    table = make_table(("variant",), ("size", *columns, "switch"))
    table.title = "Seconds a chunk"
    for v in profile.variants:
        times = [f"{t:.4f}" for t in v.decode_s]
        table.add_row(v.name, format_size(v.size_bytes), *times, f"{v.switch_s:.4f}")
    return table
