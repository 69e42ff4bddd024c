"""Principal components of feature vectors. There may be fewer vectors than features."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_RANK = 10_000  # appendix B.14
_EXACT_SIZE = 8192
_ITERATIONS = 8  # section 3.1
_SMALLEST_VARIANCE = 1e-7  # relative to the largest; below it, float32 holds only rounding errors


@dataclass(frozen=True, slots=True)
class Components:
    """mean: ``(features,)``. basis: ``(features, rank)``, orthonormal columns by decreasing variance. Float32."""

    mean: torch.Tensor
    basis: torch.Tensor

    @property
    def rank(self) -> int:
        return self.basis.shape[1]

    def coefficients(self, values: torch.Tensor, count: int) -> torch.Tensor:
        """Return the first ``count`` coefficients of each row, float32 ``(rows, count)``, from ``(rows, features)``."""
        return (values - self.mean) @ self.basis[:, :count]

    def restore(self, coefficients: torch.Tensor) -> torch.Tensor:
        """Restore float32 ``(rows, features)`` from the first coefficients of each row, ``(rows, count)``."""
        return coefficients @ self.basis[:, : coefficients.shape[1]].T + self.mean


def principal_components(samples: torch.Tensor, max_rank: int = MAX_RANK, exact_size: int = _EXACT_SIZE) -> Components:
    """Fit to ``samples``, float32 ``(rows, features)``, which are centred in place.

    The rank is at most ``max_rank``, and less if the samples span less. The components are eigenvectors of the smaller
    Gram matrix, rows by rows or features by features. With more than ``exact_size`` rows and features, they come from a
    randomised SVD (Halko et al., 2011).
    """
    num_rows, num_features = samples.shape
    mean = samples.mean(0)
    samples -= mean
    rank = min(max_rank, num_features, max(1, num_rows - 1))
    if min(samples.shape) > exact_size:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Components(mean, torch.svd_lowrank(samples, q=rank, niter=_ITERATIONS)[2])
    if num_features <= num_rows:
        variances, vectors = torch.linalg.eigh((samples.T @ samples).double())
        return Components(mean, vectors.flip(1)[:, :rank].float().contiguous())
    variances, vectors = torch.linalg.eigh((samples @ samples.T).double())
    variances, vectors = variances.flip(0)[:rank], vectors.flip(1)[:, :rank]
    kept = variances > _SMALLEST_VARIANCE * variances[0]
    variances, vectors = variances[kept], vectors[:, kept]
    return Components(mean, (samples.T @ (vectors / variances.sqrt()).float()).contiguous())
