"""The only code that gates. It runs outside the attention kernel, so no kernel can forget it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gatelab.gates.spec import Activation, AttentionShape, GateSpec, OutputControl


def ns_sigmoid(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """0.5 + 0.5 sigmoid(x), the paper's non-sparse sigmoid with values in [0.5, 1]."""
    return 0.5 + 0.5 * torch.sigmoid(x)


def double_sigmoid(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """2 sigmoid(x): exactly 1 at x = 0, so zero weights start as no gate at all."""
    return 2 * torch.sigmoid(x)


def identity(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """x itself."""
    return x


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "identity": identity,
    "ns_sigmoid": ns_sigmoid,
    "double_sigmoid": double_sigmoid,
    "softplus": F.softplus,
    "tanh": torch.tanh,
}


class Gate(nn.Module):
    """One gate on one layer: ``gate(y, gate.scores(sources))`` gates the tensor y (the paper's equation 5).

    Parameters carry the names and head-major shapes of :meth:`GateSpec.parameter_shapes`. They are computed with in
    the dtype of what they meet: float32 weights serve a bfloat16 forward pass.
    """

    def __init__(self, spec: GateSpec, shape: AttentionShape):
        super().__init__()
        self.spec = spec
        self.num_heads, self.head_size = spec.gated_shape(shape)
        for name, sizes in spec.parameter_shapes(shape).items():
            self.register_parameter(name, nn.Parameter(torch.zeros(sizes)))

    def scores(self, sources: Mapping[str, Float[Tensor, "B T _"]]) -> Float[Tensor, "#B #T N C1"]:
        """Activated scores: N = heads or 1 (head-shared), C1 = head size or 1 (headwise).

        ``sources`` holds ``hidden`` (B T D), ``value`` (B T K C) flattened over heads and, once it exists,
        ``attention_output`` (B T H C) flattened. An input-independent gate has B = T = 1.
        """
        logits = self._logits(sources)
        if self.spec.score_dtype == "float32":
            logits = logits.float()
        activation = ACTIVATIONS[self.spec.activation]
        if self.spec.sharing == "head_specific":
            return activation(logits)
        if self.spec.averaging == "before_activation":
            return activation(logits.mean(dim=2, keepdim=True))
        return activation(logits).mean(dim=2, keepdim=True)

    def forward(self, y: Float[Tensor, "B T H C"], scores: Float[Tensor, "#B #T N C1"]) -> Float[Tensor, "B T H C"]:
        """``y * scores`` or ``y + scores``, in the dtype of ``y``."""
        gated = y * scores if self.spec.operation == "multiply" else y + scores
        return gated.to(y.dtype)

    def _logits(self, sources: Mapping[str, Tensor]) -> Tensor:
        if self.spec.source == "parameter":
            parameter = self.get_parameter("logits")
            return parameter.to(sources["hidden"].dtype)[None, None]
        x = sources["hidden" if self.spec.source == "prefix" else self.spec.source]
        if self.spec.source == "prefix":
            x = x[..., : self.spec.prefix_channels]
        names = ["weight"] if self.spec.rank is None else ["down", "up"]
        for name in names:
            x = F.linear(x, self.get_parameter(name).to(x.dtype))
        if self.spec.bias is not None:
            x = x + self.get_parameter("bias").to(x.dtype)
        return x.unflatten(-1, (self.num_heads, -1))

    def extra_repr(self) -> str:
        changed = self.spec.model_dump(exclude_defaults=True)
        return ", ".join(f"{name}={value}" for name, value in changed.items())


class HeadNorm(nn.Module):
    """The RMSNorm control: y / rms(y) over each head's channels, times a weight of the head size per head (H C)."""

    def __init__(self, shape: AttentionShape, epsilon: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.num_heads, shape.head_size))
        self.epsilon = epsilon

    def forward(self, y: Float[Tensor, "B T H C"]) -> Float[Tensor, "B T H C"]:
        """The normalised tensor; the statistic is computed in float32 at least."""
        wide = y if y.dtype == torch.float64 else y.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (normed * self.weight.to(wide.dtype)).to(y.dtype)


def build_control(control: OutputControl | None, shape: AttentionShape, epsilon: float) -> nn.Module:
    """The module that stands between attention and the gate: a control of table 3, or nothing."""
    if control is None:
        return nn.Identity()
    return HeadNorm(shape, epsilon) if control.operation == "rms_norm" else nn.SiLU()
