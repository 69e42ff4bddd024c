import pytest
import torch

from sgl_kvfetch.calibrate.statistics import BlockMoments, block_heads
from sgl_kvfetch.calibrate.transform import inverse_transform


def random_moments(size: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """A covariance and an information matrix, ``(2, 3, size, size)``, that share no axes."""
    generator = torch.Generator().manual_seed(0)
    pair = []
    for low in (-2.0, -1.0):
        axes = torch.linalg.qr(torch.randn((2, 3, size, size), generator=generator, dtype=torch.float64)).Q
        pair.append((axes * torch.logspace(low, 0, size, dtype=torch.float64)) @ axes.mT)
    return pair[0], pair[1]


def test_errors_cost_alike_in_every_direction() -> None:
    covariance, information = random_moments()
    inverse = inverse_transform(covariance, information)
    floor = 0.03 * information.diagonal(dim1=-2, dim2=-1).mean(-1)
    cost = inverse @ (information + floor[..., None, None] * torch.eye(12)) @ inverse.mT
    assert torch.allclose(cost, torch.eye(12, dtype=torch.float64).expand_as(cost), atol=1e-9)


def test_coefficients_do_not_vary_together_and_fall() -> None:
    covariance, information = random_moments()
    forward = torch.linalg.inv(inverse_transform(covariance, information))
    coefficients = forward.mT @ covariance @ forward
    variances = coefficients.diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(coefficients, torch.diag_embed(variances), atol=1e-9)
    assert (variances.diff() <= 0).all()


def test_a_block_that_does_not_matter_has_a_transform_all_the_same() -> None:
    """A pruned head: its errors cost nothing."""
    covariance, information = random_moments()
    information[0, 1] = 0
    inverse = inverse_transform(covariance, information)
    assert torch.isfinite(inverse).all()
    assert torch.isfinite(torch.linalg.inv(inverse)).all()
    assert inverse[0, 1].abs().max() > 100 * inverse[0, 0].abs().max()  # very coarse steps
    assert torch.equal(inverse[1], inverse_transform(*random_moments())[1])


def entropy(covariance: torch.Tensor, information: torch.Tensor, inverse: torch.Tensor) -> float:
    """Mean bits a coefficient of a Gaussian at steps small enough, all of them as costly as the plain transform's:
    half the logarithm of the coefficients' variances, in units of what an error costs."""
    forward = torch.linalg.inv(inverse)
    variances = (forward.mT @ covariance @ forward).diagonal(dim1=-2, dim2=-1)
    costs = (inverse @ information @ inverse.mT).diagonal(dim1=-2, dim2=-1).mean()
    return float((variances * costs).log2().mean() / 2)


def test_each_idea_saves_bits_at_equal_cost() -> None:
    covariance, information = random_moments()
    bits = [
        entropy(covariance, information, inverse_transform(covariance, information, weights=w, decorrelate=d))
        for w, d in (("none", False), ("channel", False), ("layer", True), ("matrix", True))
    ]
    assert bits[3] < bits[2] < bits[0]
    assert bits[3] < bits[1] < bits[0]


def test_moments_of_batches_are_those_of_all() -> None:
    x = torch.randn((50, 2, 4, 8), generator=torch.Generator().manual_seed(1))
    moments = BlockMoments.zeros(2, 2, 16)
    for part in (x[:13], x[13:]):
        moments.add_values(part)
        moments.add_gradients(part * 3)
    block = x[:, 1, 2:].flatten(1).double()  # the second layer's second block
    assert torch.allclose(moments.mean[1, 1], block.mean(0))
    assert torch.allclose(moments.covariance[1, 1], torch.cov(block.T, correction=0))
    assert torch.allclose(moments.information[1, 1], 9 * block.T @ block / 50)


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "max_channels", "tp_size", "expected"),
    [
        (8, 128, 256, 1, 2),
        (8, 128, 256, 8, 1),
        (2, 64, 256, 1, 2),
        (6, 64, 256, 1, 3),
        (8, 256, 128, 1, 1),
        (2, 64, 256, 4, 1),
    ],
)
def test_blocks_divide_a_ranks_heads(
    num_heads: int, head_dim: int, max_channels: int, tp_size: int, expected: int
) -> None:
    assert block_heads(num_heads, head_dim, max_channels, tp_size) == expected
