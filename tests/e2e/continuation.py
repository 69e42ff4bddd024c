"""Transformers as the judge: what an engine should answer that goes on from quantised KV, and engines that do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.engine import SGLangServer, device_args, hicache_args
from harness.metrics import read_metric, wait_until_written
from harness.store_process import StoreProcess
from sgl_kvfetch.codec import CalibrationOptions, calibrate_model, map_layers
from sgl_kvfetch.codec.calibrate.layers import KV, LayeredModel
from sgl_kvfetch.codec.fingerprint import fingerprint_model
from sgl_kvfetch.codec.quant.base import Quantiser
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.profile import Calibration, Profile
from tests.e2e.conftest import PAGE_SIZE, ask, from_storage, make_prompt, same_answer
from tests.segments import there_and_back


@torch.no_grad()
def continue_by_layers(
    model_path: Path, prompt: list[int], num_cached: int, quantiser: Quantiser | None, output: list[int]
) -> tuple[list[int], list[float]]:
    """The most likely tokens, and logprobs of ``output``, where the first ``num_cached`` tokens' K and V are quantised
    in the layers that a profile is of, or else in all. What other layers keep is as it was."""
    model = LayeredModel(str(model_path))
    following = torch.tensor([*prompt[num_cached:], *output[:-1]])
    calls, after_calls = model.calls(num_cached), model.calls(len(following), num_cached)
    passed = []
    hidden = model.embed(torch.tensor(prompt[:num_cached]))
    for number in range(model.num_layers):
        with model.layer(number) as layer:
            hidden, past = layer.forward(hidden, calls)
        passed.append(past)
    if quantiser is not None:
        coded: Sequence[int] = range(model.num_layers)
        if isinstance(quantiser, KltQuantiser):
            coded = quantiser.profile.layers.coded
        pairs = [past for number in coded if isinstance(past := passed[number], KV)]
        k, v = (torch.stack(x, dim=1) for x in zip(*((each.k, each.v) for each in pairs), strict=True))
        restored = there_and_back(quantiser, {"k": k, "v": v})
        for index, number in enumerate(coded):
            passed[number] = KV(restored["k"][:, index], restored["v"][:, index], pairs[index].indexer)
    after = model.embed(following)
    for number, past in enumerate(passed):
        with model.layer(number) as layer:
            after = layer.after(after, after_calls, past)
    log_p = model.log_probabilities(after)[-len(output) :]
    return log_p.argmax(-1).tolist(), log_p[range(len(output)), output].tolist()


def calibrated(model: Path) -> Profile:
    """Write a model's profile beside it."""
    loaded = LayeredModel(str(model))
    layers, notes = map_layers(loaded)
    assert not notes
    windows = [torch.tensor(make_prompt(seed, 320)) for seed in range(100, 106)]
    describe = Calibration(model.name, fingerprint_model(str(model)), "words", len(windows), 256, 64)
    profile = calibrate_model(loaded, {"text": windows}, layers, describe, CalibrationOptions(num_context=256))
    profile.save(model.with_suffix(".profile"))
    return profile


Serve = Callable[..., AbstractContextManager[SGLangServer]]  # with the mode, and keys of the config


def started(model: Path, store: StoreProcess, flags: list[str], env: dict[str, str]) -> Serve:
    """Return what starts a server for each mode."""

    def serve(mode: str, /, **config: Any) -> SGLangServer:
        mode_args = hicache_args if mode == "host" else device_args
        return SGLangServer(model, extra_args=[*flags, *mode_args(store.url, **config)], env=env)

    return serve


def goes_on_in_both_modes(
    model: Path,
    profile: Profile,
    serve: Serve,
    page_size: int = PAGE_SIZE,
    num_tokens: int = 256,
    num_compared: int | None = None,
) -> None:
    """Store a prompt of ``num_tokens`` in host mode, and go on from it with a longer one in both modes, as transformers
    does. ``num_compared``: how many tokens transformers is to answer alike; None for all."""
    target_kl = profile.curve[2].kl
    config: dict[str, Any] = {"profile": str(model.with_suffix(".profile")), "target_kl": target_kl}
    start = make_prompt(0, num_tokens)
    longer = start + make_prompt(1, 64)
    with serve("host", **config) as server:
        assert from_storage(ask(server, start)) == 0
        wait_until_written(server, len(start) // page_size)
    answers = []
    for mode in ("host", "device"):
        with serve(mode, **config | {"mode": "read_only"}) as server:
            answers.append(ask(server, longer))
            assert read_metric(server.metrics(), "sgl_kvfetch_misses_total") == 0
    answer, again = answers
    assert from_storage(answer) == from_storage(again) == len(start)
    assert same_answer(again, answer)
    quantiser = KltQuantiser(profile, target_kl)
    tokens, logprobs = continue_by_layers(model, longer, len(start), quantiser, answer.output_ids)
    assert answer.output_ids[:num_compared] == tokens[:num_compared]
    assert answer.logprobs[:num_compared] == pytest.approx(logprobs[:num_compared], abs=5e-3)
    _, exact = continue_by_layers(model, longer, len(start), None, answer.output_ids)
    assert answer.logprobs[:num_compared] != pytest.approx(exact[:num_compared], abs=1e-5)  # quantising was at work
