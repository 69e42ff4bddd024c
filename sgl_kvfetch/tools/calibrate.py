"""``kvfetch calibrate``: measures a model for ``klt``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.processes import map_large_blocks
from sgl_kvfetch.prompts import CONTEXT_TOKENS, CONTINUATION_TOKENS, NUM_WINDOWS
from sgl_kvfetch.stores import PROFILES
from sgl_kvfetch.tools.profiles import SUMMARY, lines_of, save_and_publish, summary_of
from sgl_kvfetch.tools.target import run_on_store
from sgl_kvfetch.tools.terminal import (
    STORE_HELP,
    KeyFileOption,
    StoreAccess,
    json_flag,
    make_console,
    make_progress,
    option,
    show,
)

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
    if out is not None:
        folder = os.path.join(out.absolute().parent, "")  # with the slash, no file is one
        if (out.exists() and not out.is_file()) or not os.access(folder, os.W_OK):
            raise ConfigError(f"--out {out}: expected a file in an existing directory that this user may write to")
    keys = StoreKeys.read(key_file)
    if publish is not None:
        run_on_store(publish, access, lambda opened: opened.notes(PROFILES))  # before the work, whether it can be asked
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
    options = CalibrationOptions(context, tp_size=tp_size, worst_of=tuple(worst_of or ()))
    unfinished = None if out is None else out.with_name(f".{out.name}.unfinished")
    profile = calibrate_model(loaded, ids, layers, describe, options, _progress, unfinished)
    where = save_and_publish(profile, out, publish, access, keys)
    summary = summary_of(profile)
    show(summary, as_json, [*lines_of(profile, summary), *where])


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
