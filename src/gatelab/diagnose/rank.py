"""Low rank: of what a head can write, W_V W_O, and of what its output projection reads, before and after the gate."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gatelab.diagnose.attention import widened
from gatelab.diagnose.head_means import HeadFigure


def effective_rank(singular_values: Float[Tensor, "*N R"]) -> Float[Tensor, "*N"]:
    """exp(-sum_r p_r log p_r) with p = s / sum s: the entropy rank of Roy and Vetterli (2007); 0 for a zero matrix."""
    total = singular_values.sum(-1, keepdim=True)
    shares = singular_values / total.clamp(min=torch.finfo(singular_values.dtype).tiny)
    return torch.where(total[..., 0] > 0, torch.special.entr(shares).sum(-1).exp(), 0.0)


def stable_rank(singular_values: Float[Tensor, "*N R"]) -> Float[Tensor, "*N"]:
    """sum_r s_r^2 / max_r s_r^2, the squared Frobenius norm over the squared spectral norm; 0 for a zero matrix."""
    squares = singular_values.square()
    return squares.sum(-1) / squares.amax(-1).clamp(min=torch.finfo(squares.dtype).tiny)


def output_factors(output_weight: Float[Tensor, "D HCv"], num_heads: int) -> Float[Tensor, "H Cr Cv"]:
    """R of the thin QR of each head's columns W_O: ||x W_O^T|| = ||x R^T||."""
    columns = widened(output_weight).unflatten(1, (num_heads, -1)).transpose(0, 1)
    return torch.linalg.qr(columns, mode="r").R


def value_output_singular_values(
    value_weight: Float[Tensor, "KCv D"], output_weight: Float[Tensor, "D HCv"], num_heads: int, num_key_heads: int
) -> Float[Tensor, "H Cr"]:
    """Singular values of each head's W_O W_V (D x D, rank Cv at most), without that matrix.

    With the thin QR of W_O = Q_O R_O and W_V^T = Q_V R_V they are those of R_O R_V^T, which has Cv rows.
    """
    rows = widened(value_weight).unflatten(0, (num_key_heads, -1)).transpose(1, 2)
    value_factors = torch.linalg.qr(rows, mode="r").R.repeat_interleave(num_heads // num_key_heads, 0)
    factors = output_factors(output_weight, num_heads)
    return torch.linalg.svdvals(factors @ value_factors.transpose(1, 2))


class CovarianceTotals:
    """Running covariance (Cv x Cv, float64) of each head's output over real tokens."""

    def __init__(self) -> None:
        self.count = 0
        self.sums: Float[Tensor, "H Cv"] | None = None
        self.products: Float[Tensor, "H Cv Cv"] | None = None

    def add(self, output: Float[Tensor, "B T H Cv"], real: Bool[Tensor, "#B T"]) -> None:
        """Add one pass; what is not ``real`` is left out."""
        real = real.expand(output.shape[:2])
        heads = [output[:, :, head][real].double() for head in range(output.shape[2])]
        sums = torch.stack([one.sum(0) for one in heads]).cpu()
        products = torch.stack([one.T @ one for one in heads]).cpu()
        self.sums = sums if self.sums is None else self.sums + sums
        self.products = products if self.products is None else self.products + products
        self.count += int(real.sum())

    def figures(self, name: str) -> list[HeadFigure]:
        """``{name}_effective_rank`` and ``{name}_stable_rank`` by head.

        They are those of the head's outputs of all real tokens, mean taken off, as one tokens x Cv matrix: its singular
        values are the roots of the covariance's eigenvalues.
        """
        if self.sums is None or self.products is None or not self.count:
            return []
        means = self.sums / self.count
        covariance = self.products / self.count - means[:, :, None] * means[:, None, :]
        if not covariance.isfinite().all():
            return []
        singular_values = torch.linalg.eigvalsh(covariance).clamp(min=0).sqrt()
        return [
            HeadFigure(f"{name}_effective_rank", "all", effective_rank(singular_values).tolist(), None, self.count),
            HeadFigure(f"{name}_stable_rank", "all", stable_rank(singular_values).tolist(), None, self.count),
        ]
