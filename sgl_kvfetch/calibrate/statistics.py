"""What calibration gathers from windows of text: how K and V vary, and how much an error in them costs.

The cost is the Fisher information of the next tokens' distributions in K and V. With g the gradient of the summed log
probabilities of tokens *drawn from the model itself*, E[g g^T] is the Hessian of the KL divergence between the
distributions before and after a small error e (Amari, "Natural gradient works efficiently in learning", 1998, section
2): KL = e^T E[g g^T] e / 2. Errors of different tokens are independent, so only the block of one token's channels is
needed, averaged over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sgl_kvfetch.calibrate.model import KVModel
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.quant.rope import Rope, rotate, unrotate
from sgl_kvfetch.types import TENSORS, TensorName


@dataclass(slots=True)
class BlockMoments:
    """Sums over tokens for every block of channels. Float64; ``blocks`` of ``size`` channels in each layer.

    first: ``(layers, blocks, size)``; second: ``(layers, blocks, size, size)``, of the values;
    fisher: ``(layers, blocks, size, size)``, of the gradients.
    """

    first: torch.Tensor
    second: torch.Tensor
    fisher: torch.Tensor
    num_values: int = 0
    num_gradients: int = 0

    @classmethod
    def zeros(cls, num_layers: int, num_blocks: int, size: int) -> BlockMoments:
        square = (num_layers, num_blocks, size, size)
        return cls(
            torch.zeros(square[:3], dtype=torch.float64),
            torch.zeros(square, dtype=torch.float64),
            torch.zeros(square, dtype=torch.float64),
        )

    def add_values(self, values: torch.Tensor) -> None:
        """``(tokens, layers, heads, dim)``."""
        x = self._blocks(values)
        self.first += x.sum(2).cpu()
        self.second += (x.transpose(2, 3) @ x).cpu()
        self.num_values += x.shape[2]

    def add_gradients(self, gradients: torch.Tensor) -> None:
        """``(tokens, layers, heads, dim)``."""
        g = self._blocks(gradients)
        self.fisher += (g.transpose(2, 3) @ g).cpu()
        self.num_gradients += g.shape[2]

    def _blocks(self, x: torch.Tensor) -> torch.Tensor:
        """``(layers, blocks, tokens, size)`` float64."""
        num_layers, num_blocks, size = self.first.shape
        return x.reshape(x.shape[0], num_layers, num_blocks, size).permute(1, 2, 0, 3).double()

    @property
    def mean(self) -> torch.Tensor:
        """``(layers, blocks, size)``."""
        return self.first / self.num_values

    @property
    def covariance(self) -> torch.Tensor:
        """``(layers, blocks, size, size)``."""
        mean = self.mean
        return self.second / self.num_values - mean[..., :, None] * mean[..., None, :]

    @property
    def information(self) -> torch.Tensor:
        """``(layers, blocks, size, size)``: one token's share of the KL divergence a next token, twice."""
        return self.fisher / self.num_gradients


def gather(
    model: KVModel,
    window: torch.Tensor,
    num_context: int,
    rope: Rope | None,
    moments: dict[TensorName, BlockMoments],
    generator: torch.Generator,
    draws: int = 2,
) -> None:
    """Add one window: ``num_context`` tokens whose K and V are looked at, and the tokens after them that judge.

    Each of the ``draws`` is one backward pass through the continuation. Raises ConfigError for a model that overflows.
    """
    k, v = model.kv(window[:num_context])
    turn = _turns(rope, num_context, k.device)
    plain = {"k": turn(k.float(), back=True), "v": v.float()}
    for tensor in TENSORS:
        moments[tensor].add_values(plain[tensor])
    for _ in range(draws):
        leaves = {tensor: plain[tensor].clone().requires_grad_(True) for tensor in TENSORS}
        log_p = model.log_probabilities(turn(leaves["k"], back=False), leaves["v"], window[num_context:])
        if bool(log_p.isnan().any()):
            raise ConfigError(f"the model's predictions are not numbers in {model.model.dtype}; try float32")
        drawn = torch.multinomial(log_p.detach().exp().cpu(), 1, generator=generator).to(log_p.device)
        # Scores of different positions are uncorrelated, so one gradient of their sum serves for all; divided so that
        # its square is the mean over positions.
        score = log_p.gather(1, drawn).sum() / log_p.shape[0] ** 0.5
        for tensor, gradient in zip(TENSORS, torch.autograd.grad(score, [leaves[t] for t in TENSORS]), strict=True):
            moments[tensor].add_gradients(gradient)


class _Turn(Protocol):
    def __call__(self, k: torch.Tensor, *, back: bool) -> torch.Tensor: ...


def _turns(rope: Rope | None, num_tokens: int, device: torch.device) -> _Turn:
    """The rotation of the first ``num_tokens`` tokens, and back; neither where the rotation is not known."""
    if rope is None:
        return lambda k, *, back: k
    table = rope.table(0, num_tokens, device)
    return lambda k, *, back: (unrotate if back else rotate)(k, table, rope)


def block_heads(num_heads: int, head_dim: int, max_channels: int, tp_size: int) -> int:
    """Heads in a block: as many as ``max_channels`` hold, a divisor of what each of ``tp_size`` ranks has."""
    heads_per_rank = max(1, num_heads // tp_size)
    fitting: Sequence[int] = [
        n for n in range(1, heads_per_rank + 1) if heads_per_rank % n == 0 and n * head_dim <= max_channels
    ]
    return max(fitting, default=1)
