"""``kvfetch profile``: measure how fast this machine decodes."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.table import Table

from sgl_kvfetch.codec import PLANES, Codec, Decoders, HevcCodec, get_codec, open_current_nvdec, region_layout
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.plane import DecodeProfile, Sample, measure_profile
from sgl_kvfetch.tools.encoding.targets import Target, make_targets
from sgl_kvfetch.tools.options import JsonOption, make_console
from sgl_kvfetch.tools.tables import make_table
from sgl_kvfetch.tools.units import format_size

Device = Literal["auto", "cpu", "nvdec"]


def profile(
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Where to write the decode profile.")
    ] = None,
    codecs: Annotated[str, typer.Option(metavar="NAMES", help="One or more, such as hevc,zstd.")] = "hevc,zstd",
    resolutions: Annotated[
        str, typer.Option(metavar="NAMES", help="Picture sizes for the video codecs.")
    ] = "240p,480p,640p,1080p",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens in the decoded chunk.")] = 1024,
    heads: Annotated[int, typer.Option(min=1, help="Heads in the chunk.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Values per head.")] = 128,
    device: Annotated[
        Device,
        typer.Option(help="What decodes video; auto is NVDEC if it can decode one of the codecs, or else the CPU."),
    ] = "auto",
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, help="Most chunks decoded at once.", show_default="cores; with NVDEC two per video engine"
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Chunks per session; the figures are medians.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed for the chunk's integers.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure how long this machine takes to decode a chunk, for each codec and resolution.

    Measures one chunk alone, and then several at once. NVDEC leaves frames in GPU memory, as in device mode. Codecs
    that it cannot decode are measured on the CPU, with the same number of sessions. The chunk is synthetic: three
    layers of integers that are distributed like transform coefficients. Its size says little about real chunks; their
    manifests give theirs. Stop other programs before you measure: they make the figures worse.

    Example:

        kvfetch profile --out decode-profile.json
    """
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out {out}: the directory {out.parent} does not exist")
    progress = make_console(stderr=True)
    names = codecs.split(",")
    targets = make_targets(names, resolutions.split(","))
    sessions, device_name, decodes, about = _set_up(names, device, concurrency)
    progress.print(about)
    integers = _integers(tokens, PLANES * heads * head_dim, seed)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a session is one thread, as in the decode pool
    try:
        measured = measure_profile(
            list(_samples(integers, targets)),
            sessions,
            device=device_name,
            source=f"kvfetch profile, {today}, {decodes}, {rounds} rounds, synthetic integers, seed {seed}",
            chunk_values=integers.numel(),
            rounds=rounds,
            on_step=lambda name: progress.print(f"measuring {name}"),
        )
    finally:
        torch.set_num_threads(threads)
    if as_json:
        typer.echo(measured.encode(), nl=False)
    else:
        console = make_console()
        console.print(_table(measured))
        console.print(f"a pool of {measured.num_sessions} sessions decodes the most chunks per second")
    if out is not None:
        try:
            out.write_bytes(measured.encode())
        except OSError as e:
            raise ConfigError(f"--out {out}: {e}") from e
        progress.print(f"wrote {out}")


def _set_up(codecs: Sequence[str], device: Device, concurrency: int | None) -> tuple[Sequence[Decoders], str, str, str]:
    """Open the sessions. Also return the device's name, what decodes on what, and a sentence for the user. Raises
    ConfigError if NVDEC is required but missing, or if it decodes none of the codecs."""
    cpu = platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0))
    if device == "cpu":
        return [{}] * (concurrency or cores), cpu, "CPU", "measuring the CPU"
    nvdec, about = open_current_nvdec()
    on_nvdec = [] if nvdec is None else [name for name in codecs if name in nvdec.codecs]
    if nvdec is not None and on_nvdec:
        nvdec.surfaces.limit_bytes = None  # measure the engines themselves, without a server's memory limit
        sessions = [nvdec.open_session() for _ in range(concurrency or 2 * nvdec.num_engines)]
        decodes = f"{', '.join(on_nvdec)} on NVDEC ({nvdec.num_engines} engines), all else on the CPU"
        return sessions, f"{torch.cuda.get_device_name()}, {cpu}", decodes, about
    if device == "nvdec":
        raise ConfigError(f"--device nvdec: this machine's NVDEC decodes none of {', '.join(codecs)} ({about})")
    return [{}] * (concurrency or cores), cpu, "CPU", f"measuring the CPU ({about})"


def _samples(integers: torch.Tensor, targets: Sequence[Target]) -> Iterator[Sample[Decoders]]:
    """Yield a sample for each video codec at each resolution, and one for each fast codec, which has no pictures."""
    seen = set()
    for target in targets:
        codec = get_codec(target.codec)
        name = f"{target.codec} {target.resolution}" if isinstance(codec, HevcCodec) else target.codec
        if name in seen:
            continue
        seen.add(name)
        layout = region_layout(integers.shape[0], integers.shape[1], target.resolution)
        bitstream = codec.encode(layout.to_frames(integers))
        shape = layout.num_frames(tuple(integers.shape)), layout.height, layout.width
        yield Sample(name, len(bitstream), partial(_decode, codec, bitstream, shape))


def _decode(codec: Codec, bitstream: bytes, shape: tuple[int, int, int], session: Decoders) -> None:
    """Decode one chunk. Raises ConfigError if NVDEC fell back to the CPU, whose time must not count as NVDEC's."""
    if (decoder := session.get(codec.name)) is None:
        codec.decode(bitstream, shape)
    elif not decoder.decode(bitstream, shape).is_on_device:
        raise ConfigError(f"NVDEC did not decode {codec.name} of {shape[2]}x{shape[1]}; try a lower --concurrency")


def _integers(num_tokens: int, num_coefficients: int, seed: int) -> torch.Tensor:
    """Return uint8 ``(coefficients, tokens)`` around 128, with a falling spread, as after a transform."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(1, -1, num_coefficients)[:, None]
    normal = torch.randn(num_coefficients, num_tokens, generator=generator)
    return (normal * spread + 128).round().clamp(0, 255).to(torch.uint8)


def _table(profile: DecodeProfile) -> Table:
    columns = [f"{k} at once" for k in range(1, profile.max_concurrency + 1)]
    table = make_table(("variant",), ("size", *columns, "switch"))
    table.title = "Seconds a chunk"
    for v in profile.variants:
        times = [f"{t:.4f}" for t in v.decode_s]
        table.add_row(v.name, format_size(v.size_bytes), *times, f"{v.switch_s:.4f}")
    return table
