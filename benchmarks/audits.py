"""Measures what audits find of a real model's values: the ratio of sound hits, and of faults.

python -m benchmarks.audits --windows 20

A window is a prompt that was stored, of which all but the last 128 tokens are served. The model computes those behind
what was restored, as a server does, and an audit compares (`plane/audit.py`). Of each fault, the table has the least
ratio of all windows, and the median of their typical ratios; of sound hits, the largest of both. Beyond 4, the default
of what is expected, a single audit finds it; a median of 20 beyond 1.5 is told as drift.

python -m benchmarks.audits --sound FILE --windows 100

audits sound hits alone, and many of a prompt: of three kinds of text, float32 and bfloat16, behind prefixes of any
number of pages. The model computes 512 tokens behind each prefix; the first 128 of them are those of a hit that was
cut, and others are what comes although the store has it. Parts of 128 tokens begin at every second page, so that two
in five share no token; some parts are shorter. What is stored was computed at once, with attention of the other kind
that torch has. FILE gets a line for each audit. The table is of all that it holds, so it may be filled in pieces:
``--skip`` leaves out as many prompts.

python -m benchmarks.audits --cost 20

measures the CPU time of a data plane for so many audits, of the last 128 tokens of a stored prompt.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from html.entities import html5
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from benchmarks.codec.kv_model import KVModel
from benchmarks.real_model import prose, real_model
from benchmarks.real_profile import real_profile
from benchmarks.report import make_parser, no_traceback, whole_number
from harness.store_process import StoreProcess
from sgl_kvfetch.codec import CellValues, KltQuantiser, Quantiser, load_profile
from sgl_kvfetch.codec.container.pages import RawPages
from sgl_kvfetch.codec.quant.profile import MeasuredStep, Profile
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.keys import HeadSlice, Namespace
from sgl_kvfetch.plane import audit
from sgl_kvfetch.plane.audit import Compared, compare, places_of
from sgl_kvfetch.plane.store import open_client
from sgl_kvfetch.plane.write.gather import PageBatch
from sgl_kvfetch.protocol.config import KVFetchConfig, parse_config

_AUDITED = 128
_PAGE = 16
_LIES = (10, 100, 1000)  # how much smaller the curve says that errors are
_NOISE = (0.01, 0.03, 0.1)  # of changed weights, as shares of each
_ADAPTERS = (0.1, 0.03)  # as shares of the projections
_RUN, _MOST_CONTEXT = 512, 640  # of sound hits: tokens that are computed, and of the prefix before them
_STRIDE = 32  # tokens from part to part
_SHORT = (16, 48, 80)  # tokens of shorter parts
_KINDS = ("prose", "code", "data")
_RECENT = 20  # audits whose median tells of drift
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_COST_TOKENS = 704  # of a prompt
_FIND_S = 60.0

Fault = Callable[[CellValues], CellValues]


class _Sample(msgspec.Struct, frozen=True):
    """An audit of what is sound."""

    model: str
    quantiser: str
    kind: str
    dtype: str
    first_token: int
    num_tokens: int
    is_cut: bool  # whether it is that of a hit that was cut
    ratio: float
    where: str
    typical: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("benchmarks.audits", __doc__)
    parser.add_argument("--model", help="a folder; by default SmolLM2-135M, with its profile")
    parser.add_argument("--profile", type=Path, help="of --model")
    parser.add_argument("--windows", type=whole_number, default=8, help="prompts")
    parser.add_argument("--context", type=whole_number, default=700, help="tokens of a prompt before those audited")
    parser.add_argument("--sound", type=Path, metavar="FILE", help="no faults, and many audits of a prompt")
    parser.add_argument(
        "--cost", type=whole_number, metavar="N", help="no faults: the costs of N audits by real servers"
    )
    parser.add_argument("--skip", type=int, default=0, help="with --sound: prompts that are left out")
    args = parser.parse_args(argv)
    with no_traceback():
        folder, profile = args.model or str(real_model()), load_profile(args.profile or real_profile())
        if args.cost is not None:
            model = _Model(folder, profile)
            for name, quantiser in model.quantisers.items():
                _say_cost(name, *asyncio.run(audit_cost(model, quantiser, args.cost)))
        elif args.sound is None:
            _Bench(folder, profile, args.windows, args.context).run()
        else:
            audit_sound(folder, profile, range(args.skip, args.skip + args.windows), args.sound)
    return 0


class _Model:
    """A model with its profile, which stores, restores and audits."""

    def __init__(self, model: str, profile: Profile, dtype: torch.dtype = torch.bfloat16) -> None:
        self.model = KVModel(model, dtype=dtype)
        self.profile = profile
        self.quantisers: dict[str, Quantiser] = {
            "exact": make_quantiser("exact"),
            "klt": KltQuantiser(profile),
            "klt 1e-2": KltQuantiser(profile, 1e-2),
        }

    def restore(self, quantiser: Quantiser, stored: CellValues) -> CellValues:
        """Return what a server gets of values that were stored."""
        restored = CellValues(*map(torch.empty_like, stored))
        for layers, block, place in places_of(quantiser, self.heads(quantiser), range(len(stored.k))):
            cell = quantiser.quantise(stored.cell(layers, block), place)
            for whole, x in zip(
                restored.cell(layers, block), quantiser.dequantise(cell, stored.k.dtype, place), strict=True
            ):
                whole.copy_(x)
        return restored

    def heads(self, quantiser: Quantiser) -> HeadSlice:
        m = self.model
        namespace = Namespace(
            model="m", model_dtype="", attention="mha", kv_dtype="bfloat16", page_size=_PAGE, num_layers=m.num_layers,
            first_layer=0, num_heads=m.num_heads, k_head_dim=m.k_head_dim, v_head_dim=m.v_head_dim,
            quantiser=quantiser.identity,
        )  # fmt: skip
        return HeadSlice(namespace, range(m.num_heads))

    @torch.no_grad()
    def kv(self, model: KVModel, ids: torch.Tensor, before: CellValues | None = None) -> CellValues:
        """Return K and V of some tokens, behind those that a cache has."""
        from transformers import DynamicCache

        cache, num_before = DynamicCache(), 0
        if before is not None:
            num_before = len(before.k)
            for layer in range(model.num_layers):
                cache.update(*(x[:, layer].transpose(0, 1)[None].contiguous() for x in before), layer)
        model.model(ids[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
        keys, values = ([getattr(x, which)[0].transpose(0, 1) for x in cache.layers] for which in ("keys", "values"))
        return CellValues(*(torch.stack(x, 1)[num_before:].contiguous() for x in (keys, values)))


class _Bench(_Model):
    def __init__(self, model: str, profile: Profile, num_windows: int, context: int) -> None:
        super().__init__(model, profile)
        self.context = context
        ids, start, length = self.model.tokenise(prose()), self.model.start, context + _AUDITED
        step = max(1, (len(ids) // 2 - length) // num_windows)  # the profile is of the second half
        texts = [ids[i * step : i * step + length + 1] for i in range(num_windows)]
        # The first token is for what stands a position further.
        self.windows = [torch.cat((text[:1], start, text[1:]))[: length + 1] for text in texts]

    def run(self) -> None:
        exact = [self.kv(self.model, ids[1:]) for ids in self.windows]
        for name, quantiser in self.quantisers.items():
            found = [self._audit(quantiser, window, kv) for window, kv in zip(self.windows, exact, strict=True)]
            largest, typical = max(each.ratio for each in found), max(each.typical for each in found)
            _say(name, "sound", f"most {largest:.2f}, typical at most {typical:.2f}")
            faults = {"layers off by one": _other_layers, "pages of 15 tokens": _other_pages}
            for what, fault in faults.items():
                self._say_least(name, what, quantiser, [fault(kv) for kv in exact])
            self._say_least(name, "position off by one", quantiser, [self._further(ids) for ids in self.windows])
            upper_half = self.model.num_layers // 2
            for share, first_layer in (*((share, 0) for share in _NOISE), (_NOISE[-1], upper_half)):
                other = self._changed(share, first_layer)
                stored = [self.kv(other, ids[1:]) for ids in self.windows]
                which = "upper layers" if first_layer else "weights"
                self._say_least(name, f"{which} changed by {share:.0%}", quantiser, stored)
            for share in _ADAPTERS:
                other = self._adapted(share)
                stored = [self.kv(other, ids[1:]) for ids in self.windows]
                self._say_least(name, f"an adapter of {share:.0%}, or none", quantiser, stored)
            self._say_least(name, "the last token not restored", quantiser, exact, _without_last)
            self._say_least(name, "K of half the pages, rolled", quantiser, exact, _rolled)
            self._say_least(name, "half the pages are each other's", quantiser, exact, _exchanged)
            self._say_least(name, "two heads of a layer exchanged", quantiser, exact, _other_heads)
            others = [self.restore(quantiser, kv).tokens(slice(self.context)) for kv in (*exact[1:], exact[0])]
            served = [self._audit(quantiser, *x) for x in zip(self.windows, exact, map(_served, others), strict=True)]
            self._say_found(name, "another prompt's pages served", served)
        for lies in _LIES:
            curve = tuple(MeasuredStep(p.step, p.kl / lies, p.bits_per_value) for p in self.profile.curve)
            target = min(self.profile.default_target_kl, curve[-1].kl)  # that of a server without one
            lying = KltQuantiser(replace(self.profile, curve=curve, kinds=()), target)
            self._say_least("klt", f"a curve that says {lies} times less", lying, exact)

    def _say_least(
        self, name: str, what: str, quantiser: Quantiser, stored: Sequence[CellValues], restore: Fault | None = None
    ) -> None:
        each = [self._audit(quantiser, *pair, restore) for pair in zip(self.windows, stored, strict=True)]
        self._say_found(name, what, each)

    def _say_found(self, name: str, what: str, each: Sequence[Compared]) -> None:
        least = min(each, key=lambda found: found.ratio)
        typical = statistics.median(found.typical for found in each)
        _say(name, what, f"least {least.ratio:.3g} ({least.where}), typical {typical:.3g}")

    def _audit(
        self, quantiser: Quantiser, ids: torch.Tensor, stored: CellValues, restore: Fault | None = None
    ) -> Compared:
        """Audit a hit of a prompt, of which ``stored`` is what a server has stored."""
        restored = self.restore(quantiser, stored)
        if restore is not None:
            restored = restore(restored)
        before, after = (restored.tokens(x) for x in (slice(self.context), slice(self.context, None)))
        computed = self.kv(self.model, ids[1 + self.context :], before)
        tokens = range(self.context, self.context + _AUDITED)
        return compare(computed, after, quantiser, self.heads(quantiser), tokens)

    def _further(self, ids: torch.Tensor) -> CellValues:
        """Return the values of a prompt that stands one position further."""
        return self.kv(self.model, ids).tokens(slice(1, None))

    def _changed(self, share: float, first_layer: int = 0) -> KVModel:
        """Return the model with other weights, from some layer on."""
        changed = copy.copy(self.model)
        changed.model = copy.deepcopy(self.model.model)
        noise = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, x in changed.model.named_parameters():
                layer = _LAYER.search(name)
                if (int(layer[1]) if layer else 0) >= first_layer:
                    x.mul_(1 + share * torch.randn(x.shape, generator=noise).to(x.dtype))
        return changed

    def _adapted(self, share: float) -> KVModel:
        """Return the model with an adapter of rank 8, random: so much of what the attention's projections make."""
        changed = copy.copy(self.model)
        changed.model = copy.deepcopy(self.model.model)
        noise = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, x in changed.model.named_parameters():
                if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")):
                    down, up = (torch.randn(shape, generator=noise) for shape in ((8, x.shape[1]), (x.shape[0], 8)))
                    delta = up @ down
                    x.add_((share * x.float().norm() / delta.norm() * delta).to(x.dtype))
        return changed


class _Sound(_Model):
    """Audits sound hits, many of a prompt."""

    def samples(self, kind: str, ids: torch.Tensor, context: int) -> Iterator[_Sample]:
        """Audit a prompt of which ``context`` tokens are served."""
        config = self.model.model.config
        usual = config._attn_implementation
        config._attn_implementation = "eager"
        stored = self.kv(self.model, ids)
        config._attn_implementation = usual
        for name, quantiser in self.quantisers.items():
            restored = self.restore(quantiser, stored)
            computed = self.kv(self.model, ids[context:], restored.tokens(slice(context)))
            for first, length in _parts():
                part, tokens = slice(first, first + length), range(context + first, context + first + length)
                own, other = computed.tokens(part), restored.tokens(slice(tokens.start, tokens.stop))
                found = compare(own, other, quantiser, self.heads(quantiser), tokens)
                yield _Sample(
                    model=Path(self.model.path).name, quantiser=name, kind=kind, dtype=str(own.k.dtype)[6:],
                    first_token=tokens.start, num_tokens=length, is_cut=not first, ratio=found.ratio,
                    where=found.where, typical=found.typical,
                )  # fmt: skip


def audit_sound(folder: str, profile: Profile, prompts: range, file: Path) -> None:
    """Audit sound hits of some prompts, add a line for each to a file, and print what all its lines say."""
    models = [_Sound(folder, profile, dtype) for dtype in (torch.bfloat16, torch.float32)]
    texts = {kind: models[0].model.tokenise(_text(kind)) for kind in _KINDS}
    length = _MOST_CONTEXT + _RUN
    with file.open("ab") as out:
        for number in prompts:
            kind = _KINDS[number % len(_KINDS)]
            ids, which = texts[kind], number // len(_KINDS)
            begin = which * length % max(1, len(ids) - length)
            chance = random.Random(number)
            context = chance.randrange(_AUDITED // _PAGE, _MOST_CONTEXT // _PAGE) * _PAGE
            model = models[which % len(models)]
            prompt = torch.cat((model.model.start, ids[begin : begin + length]))[: context + _RUN]
            for sample in model.samples(kind, prompt, context):
                out.write(msgspec.json.encode(sample) + b"\n")
            out.flush()
    with file.open("rb") as lines:
        _say_sound([msgspec.json.decode(line, type=_Sample) for line in lines])


async def audit_cost(model: _Model, quantiser: Quantiser, num_audits: int) -> tuple[list[float], list[float]]:
    """Return the CPU seconds of audits of a server's data plane: of each whole audit, and of its comparison alone."""
    window = model.model.tokenise(prose())[:_COST_TOKENS]
    values = model.kv(model.model, torch.cat((model.model.start, window))[:_COST_TOKENS])
    hashes = [number.to_bytes(32, "big") for number in range(_COST_TOKENS // _PAGE)]
    pages = [x.reshape(-1, _PAGE, *x.shape[1:]) for x in values]
    whole: list[float] = []
    compared: list[float] = []

    def timed(*arguments: Any) -> Compared:
        before_s = time.thread_time()
        found = compare(*arguments)
        compared.append(time.thread_time() - before_s)
        return found

    timing, unlimited = patch.object(audit, "compare", timed), patch.object(audit, "_MOST_BYTES", 1 << 40)
    with (
        tempfile.TemporaryDirectory(prefix="kvfetch-audits-") as folder,
        StoreProcess(folder) as server,
        timing,
        unlimited,
    ):
        config = parse_config({"store": server.url})
        heads = model.heads(quantiser)
        client = open_client(config, heads, quantiser)
        parts = heads, quantiser, client.finder, client.fetcher
        client.writer.add(PageBatch(0, None, hashes, [RawPages(*pages)]))
        await client.writer.drain()
        for i in range(num_audits):
            # One for each: an auditor that finds a fault, as of another model's profile, trusts the writer no more.
            file = Path(folder, f"audits{i}")
            auditor = audit.Auditor(1.0, *parts, store=client.store, writes=True, file=file)
            sources = await client.finder.find_pages(hashes, _FIND_S)
            first = auditor.served(hashes, sources)
            rest = RawPages(*(x[first:] for x in pages))
            before_s = time.process_time()
            auditor.handed_over(PageBatch(first, hashes[first - 1], hashes[first:], [rest]))
            await auditor.join()
            whole.append(time.process_time() - before_s)
            assert auditor.record.num_audits == 1
            await auditor.close()
        await client.close(_FIND_S)
    return whole, compared


def _say_cost(name: str, whole: Sequence[float], compared: Sequence[float]) -> None:
    share = KVFetchConfig.model_fields["audit_share"].default
    of = {"reading, restoring and comparing": whole, "comparing alone": compared}
    for what, seconds in of.items():
        median_ms = 1000 * statistics.median(seconds)
        print(
            f"{name}: {what} {_AUDITED} tokens takes {median_ms:.1f} ms of CPU time ({1000 * min(seconds):.1f} to "
            f"{1000 * max(seconds):.1f} in {len(seconds)}), {share * median_ms:.2f} ms a hit by default",
            flush=True,
        )


def _parts() -> Iterator[tuple[int, int]]:
    """Yield where the parts of what is computed begin, and their tokens."""
    for first in range(0, _RUN - _AUDITED + 1, _STRIDE):
        yield first, _AUDITED
    for i, length in enumerate(_SHORT):
        yield (2 * i + 1) * _AUDITED // 2 // _PAGE * _PAGE, length


def _text(kind: str) -> str:
    """Return text that the profile is not of."""
    if kind == "prose":
        return prose()[: len(prose()) // 2]
    library = Path(statistics.__file__).parent
    if kind == "code":
        return "\n\n".join(path.read_text() for path in sorted(library.glob("[a-h]*.py")))[:400_000]
    rows = [{"name": n, "text": t, "codes": list(map(ord, t))} for n, t in sorted(html5.items())]
    return json.dumps(rows)


def _say_sound(samples: Sequence[_Sample]) -> None:
    """Print a line for each model and quantiser, and how much of it is independent."""
    of: dict[tuple[str, str], list[_Sample]] = {}
    for each in samples:
        of.setdefault((each.model, each.quantiser), []).append(each)
    for (model, quantiser), some in of.items():
        ratios = sorted(each.ratio for each in some)
        at = ", ".join(f"{share:.0%} {ratios[round(share * (len(ratios) - 1))]:.2f}" for share in (0.5, 0.99, 1))
        print(
            f"{model} {quantiser}: {len(some)} audits of {sum(each.is_cut for each in some)} prompts; ratio {at}; "
            f"median of {_RECENT} at most {max(_medians(some)):.2f}",
            flush=True,
        )
    worst = max(samples, key=lambda each: each.ratio)
    disjoint = sum(each.num_tokens == _AUDITED for each in samples) * _STRIDE // _AUDITED
    print(f"{len(samples)} audits, about {disjoint} without a token in common; largest ratio {worst}")


def _medians(samples: Sequence[_Sample]) -> Iterator[float]:
    """Yield medians of what is typical of so many audits in a row, of the same kind of text and arithmetic."""
    of: dict[tuple[str, str], list[float]] = {}
    for each in samples:
        if each.num_tokens == _AUDITED:
            of.setdefault((each.kind, each.dtype), []).append(each.typical)
    for typical in of.values():
        for first in range(max(1, len(typical) - _RECENT + 1)):
            yield statistics.median(typical[first : first + _RECENT])


def _other_layers(values: CellValues) -> CellValues:
    return CellValues(*(x.roll(1, dims=1) for x in values))


def _other_pages(values: CellValues) -> CellValues:
    """As if each page had a token less than it should have."""
    which = [page * (_PAGE - 1) + i for page in range(-(-len(values.k) // _PAGE)) for i in range(_PAGE)]
    return CellValues(*(x[which[: len(x)]] for x in values))


def _without_last(values: CellValues) -> CellValues:
    return CellValues(*(torch.cat((x[:-1], torch.zeros_like(x[:1]))) for x in values))


def _audited_pages(values: CellValues, layers: slice) -> tuple[CellValues, Iterator[torch.Tensor]]:
    """Return a copy of values, and views of the audited pages of K and V in it: ``(pages, tokens, layers, ...)``."""
    changed = CellValues(*(x.clone() for x in values))
    return changed, (x[-_AUDITED:].view(-1, _PAGE, *x.shape[1:])[:, :, layers] for x in changed)


def _rolled(values: CellValues) -> CellValues:
    """K of every second page is a token further, in all layers above the first."""
    changed, (k, _) = _audited_pages(values, slice(1, None))
    k[::2] = k[::2].roll(1, 1)
    return changed


def _exchanged(values: CellValues) -> CellValues:
    """The first two pages of four are each other's, in all layers above the first."""
    changed, each = _audited_pages(values, slice(1, None))
    for x in each:
        x[::4], x[1::4] = x[1::4].clone(), x[::4].clone()
    return changed


def _other_heads(values: CellValues) -> CellValues:
    """K and V of the first two heads are each other's, in the layer in the middle."""
    middle = values.k.shape[1] // 2
    changed, each = _audited_pages(values, slice(middle, middle + 1))
    for x in each:
        if x.shape[3] > 1:
            x[:, :, :, :2] = x[:, :, :, :2].flip(3)
    return changed


def _served(other: CellValues) -> Fault:
    """Return the fault that another prompt's pages are served before those that are audited."""
    return lambda values: CellValues(*(torch.cat((x, y[len(x) :])) for x, y in zip(other, values, strict=True)))


def _say(quantiser: str, what: str, ratio: str) -> None:
    print(f"{quantiser:9} {what:34} {ratio}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
