import pytest
import torch

from sgl_kvfetch.codec.calibrate.fit import cell_grid, transform_of
from sgl_kvfetch.codec.calibrate.sweep import MOST_SINKS, Moments, count_sinks
from sgl_kvfetch.codec.quant.base import CellValues
from sgl_kvfetch.codec.quant.klt import features as features_of, fit_log_cost, log_cost
from sgl_kvfetch.types import CellGrid

SIZES = (4, 8)


def random_moments() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A covariance and the blocks of an information matrix, that share no axes."""
    return _random_moment(sum(SIZES), -2.0, 0), [_random_moment(n, -1.0, i + 1) for i, n in enumerate(SIZES)]


def _random_moment(size: int, low: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    axes = torch.linalg.qr(torch.randn((size, size), generator=generator, dtype=torch.float64)).Q
    return (axes * torch.logspace(low, 0, size, dtype=torch.float64)) @ axes.T


def test_coefficients_do_not_vary_together_and_errors_in_them_cost_alike() -> None:
    covariance, information = random_moments()
    made = transform_of(covariance, information)
    cost = made.inverse @ torch.block_diag(*made.weights) @ made.inverse.T
    assert torch.allclose(cost, torch.eye(len(cost), dtype=torch.float64), atol=1e-9)
    forward = torch.linalg.inv(made.inverse)
    coefficients = forward.T @ covariance @ forward
    assert torch.allclose(coefficients, made.variances.diag(), atol=1e-9)
    assert (made.variances.diff() <= 0).all()


def test_what_does_not_matter_has_a_transform_all_the_same() -> None:
    """A pruned head: its errors cost nothing."""
    covariance, information = random_moments()
    information[0].zero_()
    made = transform_of(covariance, information)
    assert torch.isfinite(made.inverse).all()
    assert torch.linalg.inv(made.inverse).isfinite().all()
    ignored, counted = made.inverse[:, : SIZES[0]], made.inverse[:, SIZES[0] :]
    assert ignored.abs().max() > 100 * counted.abs().max()  # very coarse steps


def test_moments_of_windows_are_those_of_all() -> None:
    """Of the second of two layer groups, with two head blocks. The first tokens are in no moment but their own."""
    grid = CellGrid(num_layers=4, num_heads=4, cell_layers=3, cell_heads=2)
    generator = torch.Generator().manual_seed(1)
    windows = [CellValues(*(torch.randn((30, 4, 4, dim), generator=generator) + 1 for dim in (6, 4))) for _ in range(2)]
    moments = Moments(grid, 1, 6, 4, num_windows=2, num_context=30)
    for i, window in enumerate(windows):
        gradients = CellValues(*(3 * x[:, 3] for x in window))
        moments.add_gradients(3, i, [gradients, CellValues(*(2 * x for x in gradients))])
        moments.add_values(i, window.cell(grid.layers(1), range(4)))
    k, v = (torch.cat([w[i][MOST_SINKS:] for w in windows]).double() for i in range(2))

    cell = torch.cat((k[:, 3:, 2:].flatten(1), v[:, 3:, 2:].flatten(1)), dim=1)
    assert torch.allclose(moments.mean(1), cell.mean(0))
    assert torch.allclose(moments.covariance(1), torch.cov(cell.T, correction=0))
    mean_square = 9 * (1 + 4) / 2
    for found, x in zip(moments.weights_of(1), (k, v), strict=True):
        block = x[:, 3, 2:].flatten(1)
        assert torch.allclose(found, mean_square * block.T @ block / len(block))
    for found, x in zip(moments.usual_costs, (k, v), strict=True):
        assert torch.allclose(found, mean_square * x[:, 3:].square().sum(-1).mean(0))
    tokens = torch.cat([moments._kept[0], 30 + moments._kept[1]])
    for sample, costs, i in zip(moments.values, moments.costs, range(2), strict=True):
        x = torch.cat([w[i] for w in windows])[tokens][:, 3:]
        torch.testing.assert_close(sample.float(), x, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(costs, mean_square * x.square().sum(-1))


@pytest.mark.parametrize("num_sinks", [0, 1, 3, MOST_SINKS])
def test_the_first_tokens_that_cost_far_more_than_others_are_sinks(num_sinks: int) -> None:
    grid = CellGrid(num_layers=3, num_heads=2, cell_layers=3, cell_heads=2)
    generator = torch.Generator().manual_seed(num_sinks)
    moments = Moments(grid, 0, 4, 4, num_windows=3, num_context=40)
    for window in range(3):
        for layer in range(3):
            gradients = CellValues(*(torch.randn((40, 2, 4), generator=generator) for _ in range(2)))
            for x in gradients:
                x[:num_sinks] *= 30  # 900 times the cost
            moments.add_gradients(layer, window, [gradients])
    assert count_sinks(moments.head_costs) == num_sinks


def test_costs_are_told_from_features() -> None:
    """Costs that grow with one feature out of three, and scatter."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn((4000, 3), generator=generator) * torch.tensor([0.1, 1.0, 10.0])
    scatter = torch.randn((4000, 2), generator=generator).square().mean(1)
    weights = fit_log_cost(features, 5 * (2 * features[:, 1]).clamp_max(5).exp() * scatter)
    told = features @ weights[:-1] + weights[-1]
    assert float(torch.corrcoef(torch.stack((told, features[:, 1])))[0, 1]) > 0.95
    assert float((weights[:-1] * features.std(0)).abs().argmax()) == 1


def test_costs_that_nothing_tells_give_every_token_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn((4000, 3), generator=generator)
    told = features @ (weights := fit_log_cost(features, torch.full((4000,), 7.0)))[:-1] + weights[-1]
    assert torch.allclose(told, torch.zeros(4000), atol=0.01)


def test_rounding_in_coefficients_that_hardly_vary_does_not_change_costs() -> None:
    """Costs follow them in calibration, as any costs follow some of a thousand coefficients by chance."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.tensor([100.0, 3.0, 1e-2, 0.0])
    coefficients = torch.randn((4000, 4), generator=generator) * spread
    norms = torch.ones((4000, 1))
    told_from = features_of(coefficients, spread, norms)
    costs = (coefficients[:, :3] / spread[:3]).sum(1).exp()
    weights = fit_log_cost(told_from, costs)
    rounding = 0.05 * torch.randn((4000, 4), generator=generator)
    moved = log_cost(features_of(coefficients + rounding, spread, norms), weights)
    assert float((moved - log_cost(told_from, weights)).square().mean().sqrt()) < 0.1  # of a scale's step of 0.35


@pytest.mark.parametrize(
    ("shape", "max_channels", "tp_size", "expected"),
    [
        ((32, 8, 256), 1536, 1, (3, 2)),  # Llama-3.1-8B
        ((32, 8, 256), 1536, 8, (6, 1)),  # a head a rank: more layers
        ((30, 3, 128), 1536, 1, (3, 3)),  # SmolLM2-135M
        ((30, 3, 128), 100, 1, (3, 1)),  # never less than three layers of a head
        ((80, 1, 128), 1536, 1, (12, 1)),
        ((32, 8, 256), 1536, 16, (6, 1)),  # more ranks than heads
    ],
)
def test_cells_are_as_wide_as_allowed(
    shape: tuple[int, int, int], max_channels: int, tp_size: int, expected: tuple[int, int]
) -> None:
    num_layers, num_heads, head_channels = shape
    grid = cell_grid(num_layers, num_heads, head_channels, max_channels, tp_size)
    assert (grid.num_layers, grid.num_heads) == (num_layers, num_heads)
    assert (grid.cell_layers, grid.cell_heads) == expected
