"""Measures what audits find of a real model's values: the ratio of sound hits, and of faults.

python -m benchmarks.audits --windows 8

A window is a prompt that was stored, of which all but the last 128 tokens are served. The model computes those behind
what was restored, as a server does, and an audit compares (`plane/audit.py`). Of each fault, the table has the least
ratio of all windows; of sound hits, the median and the largest. Beyond 4, the default of ``audit.most``, it is found.
"""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.codec.kv_model import KVModel
from benchmarks.prose import prose
from benchmarks.real_model import real_model
from benchmarks.real_profile import real_profile
from benchmarks.report import make_parser, no_traceback, whole_number
from sgl_kvfetch.codec import CellValues, KltQuantiser, Quantiser, load_profile, make_quantiser
from sgl_kvfetch.codec.quant.profile import MeasuredStep, Profile
from sgl_kvfetch.keys import HeadSlice, Namespace
from sgl_kvfetch.plane.audit import Compared, compare, places_of

_AUDITED = 128
_PAGE = 16
_LIES = (10, 100, 1000)  # how much smaller the curve says that errors are
_NOISE = (0.01, 0.03, 0.1)  # of changed weights, as shares of each

Fault = Callable[[CellValues], CellValues]


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("benchmarks.audits", __doc__)
    parser.add_argument("--model", help="a folder; by default SmolLM2-135M, with its profile")
    parser.add_argument("--profile", type=Path, help="of --model")
    parser.add_argument("--windows", type=whole_number, default=8, help="prompts")
    parser.add_argument("--context", type=whole_number, default=700, help="tokens of a prompt before those audited")
    parser.add_argument("--sound", action="store_true", help="no faults: more windows in the same time")
    args = parser.parse_args(argv)
    with no_traceback():
        folder, profile = args.model or str(real_model()), args.profile or real_profile()
        _Bench(folder, load_profile(profile), args.windows, args.context).run(with_faults=not args.sound)
    return 0


class _Bench:
    def __init__(self, model: str, profile: Profile, num_windows: int, context: int) -> None:
        self.model = KVModel(model, dtype=torch.bfloat16)
        self.context = context
        self.profile = profile
        ids, length = self.model.tokenise(prose()), context + _AUDITED + 1
        step = max(1, (len(ids) // 2 - length) // num_windows)  # the profile is of the second half
        self.windows = [ids[i * step : i * step + length] for i in range(num_windows)]

    def run(self, *, with_faults: bool) -> None:
        quantisers: dict[str, Quantiser] = {
            "exact": make_quantiser("exact"),
            "klt": KltQuantiser(self.profile),
            "klt 1e-2": KltQuantiser(self.profile, 1e-2),
        }
        exact = [self._kv(self.model, ids[1:]) for ids in self.windows]
        for name, quantiser in quantisers.items():
            ratios = [self._audit(quantiser, window, kv) for window, kv in zip(self.windows, exact, strict=True)]
            found = [each.ratio for each in ratios]
            _say(name, "sound", f"median {statistics.median(found):.2f}, largest {max(found):.2f}")
            if not with_faults:
                continue
            faults = {"layers off by one": _other_layers, "pages of 15 tokens": _other_pages}
            for what, fault in faults.items():
                self._say_least(name, what, quantiser, [fault(kv) for kv in exact])
            self._say_least(name, "position off by one", quantiser, [self._further(ids) for ids in self.windows])
            for share in _NOISE:
                other = self._changed(share)
                stored = [self._kv(other, ids[1:]) for ids in self.windows]
                self._say_least(name, f"weights changed by {share:.0%}", quantiser, stored)
            self._say_least(name, "the last token not restored", quantiser, exact, _without_last)
        for lies in _LIES if with_faults else ():
            curve = tuple(MeasuredStep(p.step, p.kl / lies, p.bits_per_value) for p in self.profile.curve)
            target = min(self.profile.default_target_kl, curve[-1].kl)  # that of a server without one
            lying = KltQuantiser(replace(self.profile, curve=curve), target)
            self._say_least("klt", f"a curve that says {lies} times less", lying, exact)

    def _say_least(
        self, name: str, what: str, quantiser: Quantiser, stored: Sequence[CellValues], restore: Fault | None = None
    ) -> None:
        each = [self._audit(quantiser, *pair, restore) for pair in zip(self.windows, stored, strict=True)]
        least = min(each, key=lambda found: found.ratio)
        _say(name, what, f"least {least.ratio:.3g} ({least.where})")

    def _audit(
        self, quantiser: Quantiser, ids: torch.Tensor, stored: CellValues, restore: Fault | None = None
    ) -> Compared:
        """Audit a hit of a prompt, of which ``stored`` is what a server has stored."""
        heads = self._heads(quantiser)
        restored = CellValues(*map(torch.empty_like, stored))
        for layers, block, place in places_of(quantiser, heads, range(len(stored.k))):
            cell = quantiser.quantise(stored.cell(layers, block), place)
            for whole, x in zip(
                restored.cell(layers, block), quantiser.dequantise(cell, stored.k.dtype, place), strict=True
            ):
                whole.copy_(x)
        if restore is not None:
            restored = restore(restored)
        before, after = (restored.tokens(x) for x in (slice(self.context), slice(self.context, None)))
        computed = self._kv(self.model, ids[1 + self.context :], before)
        return compare(computed, after, quantiser, heads, range(self.context, self.context + _AUDITED))

    def _heads(self, quantiser: Quantiser) -> HeadSlice:
        m = self.model
        namespace = Namespace(
            model="m", model_dtype="", attention="mha", kv_dtype="bfloat16", page_size=_PAGE, num_layers=m.num_layers,
            first_layer=0, num_heads=m.num_heads, k_head_dim=m.k_head_dim, v_head_dim=m.v_head_dim,
            quantiser=quantiser.identity,
        )  # fmt: skip
        return HeadSlice(namespace, range(m.num_heads))

    @torch.no_grad()
    def _kv(self, model: KVModel, ids: torch.Tensor, before: CellValues | None = None) -> CellValues:
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

    def _further(self, ids: torch.Tensor) -> CellValues:
        """Return the values of a prompt that stands one position further."""
        return self._kv(self.model, ids).tokens(slice(1, None))

    def _changed(self, share: float) -> KVModel:
        changed = copy.copy(self.model)
        changed.model = copy.deepcopy(self.model.model)
        noise = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for x in changed.model.parameters():
                x.mul_(1 + share * torch.randn(x.shape, generator=noise).to(x.dtype))
        return changed


def _other_layers(values: CellValues) -> CellValues:
    return CellValues(*(x.roll(1, dims=1) for x in values))


def _other_pages(values: CellValues) -> CellValues:
    """As if each page had a token less than it should have."""
    which = [page * (_PAGE - 1) + i for page in range(-(-len(values.k) // _PAGE)) for i in range(_PAGE)]
    return CellValues(*(x[which[: len(x)]] for x in values))


def _without_last(values: CellValues) -> CellValues:
    return CellValues(*(torch.cat((x[:-1], torch.zeros_like(x[:1]))) for x in values))


def _say(quantiser: str, what: str, ratio: str) -> None:
    print(f"{quantiser:9} {what:34} {ratio}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
