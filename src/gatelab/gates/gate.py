"""The only code that gates. It runs outside the attention kernel, so no kernel can forget it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gatelab.gates.linear import Linear
from gatelab.gates.spec import Activation, AttentionShape, GateSpec, OutputControl, Placement, Position


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

    Parameters carry the names and head-major shapes of :meth:`GateSpec.parameter_shapes`.
    """

    def __init__(self, spec: GateSpec, shape: AttentionShape):
        super().__init__()
        self.spec = spec
        num_heads, head_size = spec.gated_shape(shape)
        self.channels = head_size if spec.granularity == "elementwise" else 1
        if spec.source == "parameter":
            self.logits = nn.Parameter(torch.zeros(num_heads, self.channels))
        else:
            self.projection = _projection(spec, spec.source_width(shape), num_heads * self.channels)

    def scores(self, sources: Mapping[str, Float[Tensor, "B T _"]]) -> Float[Tensor, "#B #T N C1"]:
        """Activated scores: N = heads or 1 (head-shared), C1 = head size or 1 (headwise).

        ``sources`` holds ``hidden`` (B T D), ``value`` (B T K C) flattened over heads and, once it exists,
        ``attention_output`` (B T H C) flattened. An input-independent gate has B = T = 1.
        """
        logits = self._logits(sources)
        if self.spec.score_dtype == "float32":
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
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
            return self.logits.to(sources["hidden"].dtype)[None, None]
        if self.spec.source == "prefix":
            x = sources["hidden"][..., : self.spec.prefix_channels]
        else:
            x = sources[self.spec.source]
        return self.projection(x).unflatten(-1, (-1, self.channels))

    def extra_repr(self) -> str:
        changed = self.spec.model_dump(exclude_defaults=True)
        return ", ".join(f"{name}={value}" for name, value in changed.items())


class Gating:
    """One pass through a layer with gates: what these may read, and the scores of those that were met so far.

    ``gates`` holds at most one :class:`Gate` for each position. Add ``attention_output`` to ``sources`` once it exists.
    """

    def __init__(self, gates: nn.ModuleDict, hidden: Float[Tensor, "B T D"], value: Float[Tensor, "B T K C"]):
        self._gates = gates
        self.sources: dict[str, Tensor] = {"hidden": hidden, "value": value.flatten(2)}
        self.scores: dict[str, Tensor] = {}

    def apply(
        self, position: Position, y: Float[Tensor, "B T N C"], placement: Placement | None = None
    ) -> Float[Tensor, "B T N C"]:
        """``y`` gated, if there is a gate at this position and placement, whose scores are then noted."""
        if position not in self._gates:
            return y
        gate = self._gates[position]
        assert isinstance(gate, Gate)
        if gate.spec.placement != placement:
            return y
        self.scores[position] = gate.scores(self.sources)
        return gate(y, self.scores[position])


def _projection(spec: GateSpec, num_inputs: int, num_outputs: int) -> nn.Module:
    has_bias = spec.bias is not None
    if spec.rank is None:
        return Linear(num_inputs, num_outputs, bias=has_bias)
    down, up = Linear(num_inputs, spec.rank, bias=False), Linear(spec.rank, num_outputs, bias=has_bias)
    return nn.Sequential(OrderedDict(down=down, up=up))


class HeadNorm(nn.Module):
    """The RMSNorm control: y / rms(y) over each head's channels, times a weight for each of them (H C)."""

    def __init__(self, shape: AttentionShape, epsilon: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.num_heads, shape.value_size))
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
