"""Find what attention adds to the residual stream in a decoder layer.

Layers do different things with attention's output before they add it: most nothing, Gemma 2 and OLMo 2 norm it, Granite
scales it, Bloom's attention adds the stream itself, and in Cohere or Phi attention and MLP stand side by side. Errors
in K and V cost what reaches the stream, so it must be known behind all that. Names of modules do not tell it; what
depends on what does:

    hidden ──────────────────────────────────────┬──────────────────────────> (+) ──> output of the layer
      └─> norm ─> attention(K, V) ─> [norm] ─> (scale) ─> (+) ─┬────────────────┘
                                                               └─> norm ─> MLP

In a small pass, the cache gives the layer zeros for all K and V. So attention is zero, whatever the queries are, and
what comes of it depends on K and V, and not on the layer's input; not even a gradient passes through the queries. The
stream itself depends on the layer's input. So the *addend* is the output of the last module that depends on K and V
alone. Modules that run later belong to the MLP: their inputs contain the stream.

What is done to the addend outside of modules, such as scaling, is a factor for each channel of the stream. A second
pass measures it: gradients from the layer's output to the addend, while the modules behind the addend, which are the
MLP's, pass none.

Layers where that fails norm the stream itself (post-norm), or mix it otherwise. There, the layer's whole output stands
for what attention adds: an error costs what it changes there, through the MLP as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

_MOST_UNEQUAL = 1e-3  # relative difference of a channel's factors between tokens, which differ by rounding alone


@dataclass(frozen=True)
class Addend:
    """What attention adds is the output of ``module`` at its call number ``call`` of a pass, times ``factor``, float32
    ``(hidden,)``."""

    module: torch.nn.Module
    call: int
    factor: torch.Tensor

    @contextmanager
    def taken(self, take: Callable[[torch.Tensor], None]) -> Iterator[None]:
        """Call ``take`` with what attention adds, ``(1, tokens, hidden)``, whenever the layer computes it."""
        num_calls = 0

        def hook(module: Any, args: Any, output: Any) -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls == self.call + 1:
                take(main_output(output) * self.factor)

        handle = self.module.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()


class SmallPass(NamedTuple):
    """A pass of a layer whose K and V are all zeros. ``kv``: the zeros, of which gradients are taken. ``output``:
    ``(1, tokens, hidden)``."""

    kv: Sequence[torch.Tensor]
    output: torch.Tensor


def find_addend(
    layer: torch.nn.Module, hidden: torch.Tensor, run: Callable[[torch.Tensor], SmallPass]
) -> Addend | None:
    """Return what attention adds to the stream in ``layer``, or None if only the layer's whole output tells it.

    ``hidden``: a few tokens, ``(1, tokens, hidden)``. ``run`` passes them through the layer.
    """
    outputs: list[tuple[torch.nn.Module, torch.Tensor]] = []  # of modules, in the order in which they end

    def record(module: torch.nn.Module, output: torch.Tensor) -> torch.Tensor:
        outputs.append((module, output))
        return output.clone()  # which the layer may change in place

    hidden = hidden.detach().requires_grad_(True)
    with _outputs_changed(layer, record):
        kv = run(hidden).kv
    of_attention = [
        i
        for i, (_, x) in enumerate(outputs)
        if x.shape == hidden.shape and _depends(x, kv) and not _depends(x, [hidden])
    ]
    if not of_attention:
        return None
    last = of_attention[-1]
    module = outputs[last][0]
    factor = _factor(layer, last, hidden.detach(), run)
    call = sum(other is module for other, _ in outputs[:last])
    return None if factor is None else Addend(module, call, factor)


def main_output(output: Any) -> torch.Tensor:
    """Return the hidden states of what a module returned."""
    hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def _factor(
    layer: torch.nn.Module, index: int, hidden: torch.Tensor, run: Callable[[torch.Tensor], SmallPass]
) -> torch.Tensor | None:
    """Return what multiplies the addend, the output number ``index`` of the pass, before it is in the layer's output.

    None if it gets there otherwise than multiplied channel by channel, or not alone.
    """
    num_outputs = 0
    addend: torch.Tensor | None = None

    def change(module: torch.nn.Module, output: torch.Tensor) -> torch.Tensor:
        nonlocal num_outputs, addend
        num_outputs += 1
        if num_outputs == index + 1:
            addend = output.detach().requires_grad_(True)
            return addend.clone()
        is_elementary = next(module.children(), None) is None  # others may contain the addition
        return output.detach() if is_elementary and num_outputs > index + 1 else output

    with _outputs_changed(layer, change):
        kv, output = run(hidden)
    if addend is None or output.shape != addend.shape or not output.requires_grad or _depends(output, kv):
        return None
    # Of a matrix that is not diagonal, random signs would show the sums of other channels.
    signs = torch.randint(0, 2, output.shape, generator=torch.Generator().manual_seed(0)).to(output) * 2 - 1
    (gradient,) = torch.autograd.grad(output, addend, signs, allow_unused=True)
    if gradient is None or not bool(gradient.isfinite().all()):
        return None
    factors = (gradient * signs)[0]
    mean = factors.mean(0)
    if not bool(mean.any()) or bool(((factors - mean).abs() > _MOST_UNEQUAL * mean.abs().max()).any()):
        return None
    return mean


def _depends(x: torch.Tensor, inputs: Sequence[torch.Tensor]) -> bool:
    """Return whether ``x`` depends on any of the ``inputs``, to first order."""
    if not x.requires_grad:
        return False
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
    found = torch.autograd.grad(x, inputs, direction, retain_graph=True, allow_unused=True)
    return any(gradient is not None and bool(gradient.any()) for gradient in found)


@contextmanager
def _outputs_changed(
    layer: torch.nn.Module, change: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Replace the outputs of all modules inside ``layer`` by what ``change`` makes of them, where they are floats."""

    def hook(module: torch.nn.Module, args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(hidden, torch.Tensor) or not hidden.is_floating_point():
            return output
        changed = change(module, hidden)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    handles = [module.register_forward_hook(hook) for module in layer.modules() if module is not layer]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
