"""``kvfetch calibrate`` and ``kvfetch decoders``: measure a model for ``klt``, and how fast a machine decodes."""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.table import Table

from sgl_kvfetch.codec import PLANES
from sgl_kvfetch.codec.layout.frames import region_layout
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.plane.fetch.pool import DecodeProfile, Sample, measure_profile
from sgl_kvfetch.processes import map_large_blocks
from sgl_kvfetch.prompts import CONTEXT_TOKENS, CONTINUATION_TOKENS, NUM_WINDOWS
from sgl_kvfetch.tools.profiles import SUMMARY, lines_of, require_store, save_and_publish, summary_of
from sgl_kvfetch.tools.terminal import (
    STORE_HELP,
    KeyFileOption,
    StoreAccess,
    format_size,
    json_flag,
    make_console,
    make_progress,
    make_table,
    option,
    show,
)
from sgl_kvfetch.user_files import write_file

if TYPE_CHECKING:  # these load torch and codecs
    import torch

    from sgl_kvfetch.codec import Codec, Decoders
    from sgl_kvfetch.tools.encoder import Target

_CHANNELS = 8 * 128  # of a layer in the cell that is measured; decode times are proportional to its integers
_WINDOWS_OF_A_KIND = 4  # by default, of which one is held out
_LINE_EVERY_S = 10.0  # between progress lines when stderr is not a terminal


def calibrate(
    model: Annotated[str, option("PATH", "Path of a model that transformers can load.")],
    access: StoreAccess,
    text: Annotated[
        list[str] | None,
        option(
            "[NAME=]FILE[:SHARE]",
            "Text like the model's traffic: plain, or JSONL with a field 'prompt'; the kind of text that it is, and "
            "its share of the windows. Repeatable.",
            show_default="text of nine kinds",
        ),
    ] = None,
    worst_of: Annotated[
        list[str] | None,
        option(
            "NAME",
            "A kind of text for which targets hold: each step's KL is that of the worst of these. Repeatable.",
            show_default="all kinds",
        ),
    ] = None,
    out: Annotated[Path | None, option("FILE", "Where to write the profile.", "--out", "-o")] = None,
    publish: Annotated[
        str | None, option("STORE", f"Put the profile into a store, where servers find it: {STORE_HELP}")
    ] = None,
    windows: Annotated[
        int | None,
        option(
            "COUNT",
            "Windows of text. Of each kind, a fifth are held out for measuring, at least one.",
            min=2,
            show_default=f"{NUM_WINDOWS}, or {_WINDOWS_OF_A_KIND} of each kind of text",
        ),
    ] = None,
    context: Annotated[
        int, option("TOKENS", "Of a window, whose KV cache is quantised; KL measures the cost of these errors.", min=16)
    ] = CONTEXT_TOKENS,
    continuation: Annotated[int, option("TOKENS", "After the context, predicted from its KV.", min=16)] = (
        CONTINUATION_TOKENS
    ),
    part: Annotated[str, option("FROM:TO", "Use this part of the text, in fractions of its tokens.")] = "0:1",
    max_channels: Annotated[
        int,
        option(
            "COUNT",
            "Channels that are transformed together: K and V of some heads and layers. More channels need fewer "
            "bits, but more time and memory to restore.",
            min=1,
        ),
    ] = 1536,
    tp_size: Annotated[
        int, option("COUNT", "The --tp-size that SGLang will run with, or a multiple of it.", min=1)
    ] = 1,
    device: Annotated[str, option("DEVICE", "cpu, cuda, or cuda:N.", show_default="cuda if there is one")] = "",
    key_file: KeyFileOption = None,
    as_json: Annotated[bool, json_flag(SUMMARY)] = False,
) -> None:
    """Measure how a model's keys and values vary and how much errors in them matter.

    Makes the profile that klt needs. With --publish, servers of the model find it in the store when they start with
    {"quantiser": "klt"}; the keys and the token are the store's, and the token needs the role `write`. With --out, the
    profile is a file: kvfetch profile put publishes it later, or SGLang's config names it, as {"profile": FILE}. The
    printed table shows how many bits each target_kl needs; the text below it names the default target_kl.

    What a step costs differs by the kind of text. So give a file of each kind that the model gets, under a name. The
    profile has the KL of each kind at each step, and a target takes the step that keeps the worst kind within it.

    Examples:

        kvfetch calibrate --model meta-llama/Llama-3.1-8B --text prompts.jsonl --publish http://127.0.0.1:8700

        kvfetch calibrate --model meta-llama/Llama-3.1-8B --text chats=a.jsonl:0.5 --text code=b.txt --out llama.profile

        kvfetch calibrate --model meta-llama/Llama-3.1-8B --text prompts.jsonl --out llama.profile --tp-size 2
    """
    import torch

    from sgl_kvfetch.codec import (
        Calibration,
        CalibrationOptions,
        LayeredModel,
        StoreKeys,
        calibrate_model,
        fingerprint_model,
        map_layers,
    )
    from sgl_kvfetch.codec.calibrate.text import read_kinds, windows_of_kinds

    if out is None and publish is None:
        raise ConfigError("give --publish STORE, --out FILE, or both")
    if out is not None and ((out.exists() and not out.is_file()) or not out.absolute().parent.is_dir()):
        raise ConfigError(f"--out {out}: expected a file in an existing directory")
    keys = StoreKeys.read(key_file)
    if publish is not None:
        require_store(publish, access)
    kinds, of_text = read_kinds(text or ())
    number = windows or max(NUM_WINDOWS, _WINDOWS_OF_A_KIND * len(kinds))
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    map_large_blocks()
    loaded = LayeredModel(model, device=device)
    if loaded.num_heads % tp_size and tp_size % loaded.num_heads:
        raise ConfigError(f"--tp-size {tp_size}: cannot divide {loaded.num_heads} KV heads evenly among the ranks")
    window_tokens = context + continuation
    most = getattr(loaded.config, "max_position_embeddings", None)
    if most is not None and window_tokens > most:
        raise ConfigError(f"--context and --continuation are {window_tokens} tokens, the model has {most} positions")
    layers, notes = map_layers(loaded)
    for note in notes:
        make_console(stderr=True).print(f"kvfetch: {note}")
    ids = windows_of_kinds(loaded.tokenizer, kinds, number, window_tokens, part)
    describe = Calibration(
        model=os.path.basename(os.path.normpath(model)),
        weights=fingerprint_model(model),
        text=of_text,
        num_windows=number,
        context_tokens=context,
        continuation_tokens=continuation,
        notes=notes,
        part=part,
    )
    options = CalibrationOptions(context, max_channels, tp_size, worst_of=tuple(worst_of or ()))
    unfinished = None if out is None else out.with_name(f".{out.name}.unfinished")
    profile = calibrate_model(loaded, ids, layers, describe, options, _progress, unfinished)
    where = save_and_publish(profile, out, publish, access, keys)
    summary = summary_of(profile)
    show(summary, as_json, [*lines_of(profile, summary), *where])


def decoders(
    out: Annotated[Path | None, option("FILE", "Where to write the decode profile.", "--out", "-o")] = None,
    codecs: Annotated[str, option("NAMES", "One or more, such as hevc,zstd.")] = "hevc,zstd",
    resolutions: Annotated[str, option("NAMES", "Picture sizes for the video codecs.")] = "240p,480p,640p,1080p",
    tokens: Annotated[int, option("COUNT", "Tokens in the decoded cell.", min=1)] = 1024,
    device: Annotated[
        Literal["auto", "cpu", "nvdec"],
        option(None, "What decodes video; auto is NVDEC if it can decode one of the codecs, or else the CPU."),
    ] = "auto",
    concurrency: Annotated[
        int | None,
        option("COUNT", "Most cells decoded at once.", min=1, max=64, show_default="cores; with NVDEC two per engine"),
    ] = None,
    rounds: Annotated[int, option("COUNT", "Cells per session; the figures are medians.", min=1)] = 5,
    as_json: Annotated[bool, json_flag("the decode profile, as --out writes it")] = False,
) -> None:
    """Measure how long this machine takes to decode a cell, for each codec and resolution.

    Measures one cell alone, and then several at once. NVDEC copies pictures to the host, as for a server. Codecs
    that it cannot decode are measured on the CPU, with the same number of sessions. The cell is synthetic: three
    layers of integers that are distributed like transform coefficients. Its size says little about real cells; their
    manifests give theirs. Stop other programs before you measure: they make the figures worse.

    Example:

        kvfetch decoders --out decode-profile.json
    """
    import torch

    from sgl_kvfetch.tools.encoder import make_targets

    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out {out}: the directory {out.parent} does not exist")
    progress = make_console(stderr=True)
    names = codecs.split(",")
    targets = make_targets(names, resolutions.split(","))
    sessions, device_name, decodes, about = _set_up(names, device, concurrency)
    progress.print(about)
    integers = _integers(tokens, PLANES * _CHANNELS)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a session is one thread, as in the decode pool
    try:
        measured = measure_profile(
            list(_samples(integers, targets)),
            sessions,
            device=device_name,
            source=f"kvfetch decoders, {today}, {decodes}, {rounds} rounds, synthetic integers",
            cell_values=integers.numel(),
            rounds=rounds,
            on_step=lambda name: progress.print(f"measuring {name}"),
        )
    finally:
        torch.set_num_threads(threads)
    best = f"a pool of {measured.num_sessions} sessions decodes the most cells per second"
    show(measured, as_json, [_profile_table(measured), best])
    if out is not None:
        write_file(out, measured.encode(), "--out")
        progress.print(f"wrote {out}")


def _progress(steps: Iterable[Any], total: int, what: str) -> Iterator[Any]:
    """Pass on ``steps``, and show a progress bar on a terminal, or else print a line every ten seconds."""
    console = make_console(stderr=True)
    if console.is_terminal:
        with make_progress(what) as progress:
            yield from progress.track(steps, total)
        return
    started_s = said_s = time.monotonic()
    for done, step in enumerate(steps, 1):
        yield step
        now_s = time.monotonic()
        if done == total or now_s - said_s >= _LINE_EVERY_S:
            left_s = (now_s - started_s) / done * (total - done)
            console.print(f"{what}: {done} of {total}, {left_s:.0f} s left")
            said_s = now_s


def _set_up(codecs: Sequence[str], device: str, concurrency: int | None) -> tuple[Sequence[Decoders], str, str, str]:
    """Open the sessions. Also return the device's name, what decodes on what, and a sentence for the user. Raises
    ConfigError if NVDEC is required but missing, or if it decodes none of the codecs."""
    import torch

    from sgl_kvfetch.codec import open_current_nvdec

    cpu = platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0))
    if device == "cpu":
        return [{}] * (concurrency or cores), cpu, "CPU", "measuring the CPU"
    nvdec, about = open_current_nvdec()
    on_nvdec = [] if nvdec is None else [name for name in codecs if name in nvdec.codecs]
    if nvdec is not None and on_nvdec:
        nvdec.surface_limit_bytes = None  # measure the engines themselves, without a server's memory limit
        sessions = [nvdec.open_session() for _ in range(concurrency or 2 * nvdec.num_engines)]
        decodes = f"{', '.join(on_nvdec)} on NVDEC ({nvdec.num_engines} engines), all else on the CPU"
        return sessions, f"{torch.cuda.get_device_name()}, {cpu}", decodes, about
    if device == "nvdec":
        raise ConfigError(f"--device nvdec: this machine's NVDEC decodes none of {', '.join(codecs)} ({about})")
    return [{}] * (concurrency or cores), cpu, "CPU", f"measuring the CPU ({about})"


def _samples(integers: torch.Tensor, targets: Sequence[Target]) -> Iterator[Sample[Decoders]]:
    """Yield a sample for each video codec at each resolution, and one for each fast codec, which has no pictures."""
    from sgl_kvfetch.codec.bitstream.registry import get_codec

    seen = set()
    for target in targets:
        codec = get_codec(target.codec)
        name = f"{target.codec} {target.resolution}" if codec.is_video else target.codec
        if name in seen:
            continue
        seen.add(name)
        layout = region_layout(integers.shape[0], integers.shape[1], target.resolution)
        bitstream = codec.encode(layout.to_frames(integers))
        shape = layout.num_frames(tuple(integers.shape)), layout.height, layout.width
        yield Sample(name, len(bitstream), partial(_decode, codec, bitstream, shape))


def _decode(codec: Codec, bitstream: bytes, shape: tuple[int, int, int], session: Decoders) -> None:
    """Decode one cell. Raises ConfigError if NVDEC fell back to the CPU, whose time must not count as NVDEC's."""
    if (decoder := session.get(codec.name)) is None:
        codec.decode(bitstream, shape)
    elif decoder.decode(bitstream, shape).on_cpu:
        raise ConfigError(f"NVDEC did not decode {codec.name} of {shape[2]}x{shape[1]}; try a lower --concurrency")


def _integers(num_tokens: int, num_coefficients: int) -> torch.Tensor:
    """Return uint8 ``(coefficients, tokens)`` around 128, with a falling spread, as after a transform."""
    import torch

    generator = torch.Generator().manual_seed(0)
    spread = torch.logspace(1, -1, num_coefficients)[:, None]
    normal = torch.randn(num_coefficients, num_tokens, generator=generator)
    return (normal * spread + 128).round().clamp(0, 255).to(torch.uint8)


def _profile_table(profile: DecodeProfile) -> Table:
    columns = [f"{k} at once" for k in range(1, profile.max_concurrency + 1)]
    table = make_table(("variant",), ("size", *columns, "switch"))
    table.title = "Seconds a cell"
    for v in profile.variants:
        times = [f"{t:.4f}" for t in v.decode_s]
        table.add_row(v.name, format_size(v.size_bytes), *times, f"{v.switch_s:.4f}")
    return table
