"""What a gate is, as data: orthogonal axes, validated. Nothing here imports torch.

Notation: B batch, T queries, D model width, H query heads, K key/value heads, C head size, Cv the size of a value head,
which is C but for latent attention. The paper is "Gated Attention for Large Language Models" (arXiv 2505.06708); its
positions G1 to G5 stand beside our words.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from gatelab.settings import Settings

SCHEMA_VERSION = 1

Position = Literal["sdpa_output", "value", "key", "query", "dense_output"]
Granularity = Literal["elementwise", "headwise"]
Activation = Literal["sigmoid", "silu", "identity", "ns_sigmoid", "double_sigmoid", "softplus", "tanh"]
Source = Literal["hidden", "prefix", "parameter", "value", "attention_output"]
Placement = Literal["before_norm", "after_norm", "after_rope"]

POSITIVE_ACTIVATIONS: frozenset[Activation] = frozenset({"sigmoid", "ns_sigmoid", "double_sigmoid", "softplus"})


class AttentionShape(Settings):
    """The sizes of one attention block that a gate needs to know its own."""

    width: int = Field(gt=0, description="D")
    num_heads: int = Field(gt=0, description="H, query heads")
    num_kv_heads: int = Field(gt=0, description="K, key/value heads")
    head_size: int = Field(gt=0, description="C, channels of a query and a key head")
    value_size: int = Field(
        default_factory=lambda sizes: sizes.get("head_size", 1),
        gt=0,
        description="Cv, channels of a value head and of a head's output; C when left out",
    )

    @model_validator(mode="after")
    def _check_groups(self) -> AttentionShape:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}; "
                "each key/value head serves equally many query heads"
            )
        return self


class GateSpec(Settings):
    """One gate: scores s = activation(source W), and y' = y * s (multiply) or y + s (add) on one tensor y.

    The gated tensor y has N heads of size C: N = H for ``sdpa_output`` (the paper's G1) and ``query`` (G4), N = K for
    ``value`` (G2) and ``key`` (G3); ``dense_output`` (G5) is one head of size D. Of values and outputs C means Cv.
    """

    schema_version: Literal[1] = Field(default=SCHEMA_VERSION, description="version of these fields and their meaning")
    position: Position = Field(default="sdpa_output", description="the gated tensor; G1, G2, G3, G4, G5 in this order")
    granularity: Granularity = Field(
        default="elementwise", description="one score for each head and channel (N C), or one for each head (N)"
    )
    sharing: Literal["head_specific", "head_shared"] = Field(
        default="head_specific",
        description="head_shared averages the scores of a full projection over the gated tensor's own heads",
    )
    averaging: Literal["after_activation", "before_activation"] = Field(
        default="after_activation",
        description="head_shared averages activated scores (the paper), or logits",
    )
    operation: Literal["multiply", "add"] = Field(default="multiply", description="y * s, or y + s")
    activation: Activation = Field(
        default="sigmoid",
        description="ns_sigmoid = 0.5 + 0.5 sigmoid (the paper's non-sparse one), double_sigmoid = 2 sigmoid",
    )
    source: Source = Field(
        default="hidden",
        description="what the scores are computed from: the pre-norm hidden state that also feeds q, k and v (D); its "
        "first prefix_channels channels; a learned parameter (input-independent); the token's own value states before "
        "any value gate (K C); or the SDPA output before any gate on it (H C)",
    )
    prefix_channels: int | None = Field(default=None, gt=0, description="for source=prefix: how many channels are read")
    placement: Placement | None = Field(
        default=None,
        description="for query and key gates: against q/k norm and rotation; after_norm when left out. Without q/k "
        "norm before_norm and after_norm are the same place",
    )
    layers: tuple[int, ...] | None = Field(default=None, description="layers that have this gate; all when left out")
    rank: int | None = Field(default=None, gt=0, le=2**20, description="inner size of a two-matrix projection")
    initialization: Literal["normal", "zeros"] = Field(
        default="normal",
        description="weights from normal(0, init_std) as the rest, or zeros (with a rank: the second matrix alone)",
    )
    bias: float | None = Field(
        default=None, allow_inf_nan=False, description="start value of a learned bias on the logits"
    )
    score_dtype: Literal["activation", "float32"] = Field(
        default="activation",
        description="dtype in which the activation and its product with y are computed from the projected logits "
        "(float32 at least: float64 stays); the gated tensor comes back in its own dtype",
    )

    @model_validator(mode="after")
    def _refuse_impossible_pairs(self) -> GateSpec:
        for axis, value, other, other_value, reason in self._impossible_pairs():
            raise ValueError(f"{axis}={value} with {other}={other_value} is impossible: {reason}")
        if self.position in ("query", "key") and self.placement is None:
            object.__setattr__(self, "placement", "after_norm")
        return self

    def _impossible_pairs(self) -> list[tuple[str, object, str, object, str]]:
        """The pairs of axis values that contradict each other, documented in docs/gates.md and tested one by one."""
        position, source = self.position, self.source
        # fmt: off
        rules = [
            (position == "dense_output" and self.granularity == "headwise", "position", "granularity",
             "the output of the dense layer has no heads"),
            (position == "dense_output" and self.sharing == "head_shared", "position", "sharing",
             "the output of the dense layer has no heads"),
            (position not in ("query", "key") and self.placement is not None, "position", "placement",
             "only query and key gates stand beside the q/k norm and the rotation"),
            (source == "attention_output" and position in ("value", "key", "query"), "source", "position",
             "the attention output is computed from that tensor"),
            (source == "parameter" and self.rank is not None, "source", "rank", "a parameter has no projection"),
            (source == "parameter" and self.bias is not None, "source", "bias", "a parameter is its own bias"),
            (source == "parameter" and self.initialization == "normal", "source", "initialization",
             "the input-independent gate starts at zero logits; write initialization=zeros"),
            (source == "prefix" and self.prefix_channels is None, "source", "prefix_channels",
             "say how many channels the prefix has"),
            (source != "prefix" and self.prefix_channels is not None, "source", "prefix_channels",
             "only source=prefix reads a prefix"),
            (self.sharing == "head_specific" and self.averaging == "before_activation", "sharing", "averaging",
             "nothing is averaged"),
            (self.layers is not None and len(set(self.layers)) != len(self.layers), "position", "layers",
             "a layer is named twice"),
            (self.layers == (), "position", "layers", "the gate would be on no layer; leave it out instead"),
            (self.layers is not None and any(layer < 0 for layer in self.layers), "position", "layers",
             "layers are numbered from 0"),
        ]
        # fmt: on
        return [(a, getattr(self, a), b, getattr(self, b), reason) for holds, a, b, reason in rules if holds]

    def cancels_under_norm(self) -> bool:
        """Whether RMSNorm of q/k undoes this gate: a positive factor that is equal on all channels of a head.

        Such a gate is a no-op in a model with q/k norm (up to the norm's epsilon), although its weights are there.
        """
        return (
            self.placement == "before_norm"
            and self.granularity == "headwise"
            and self.operation == "multiply"
            and self.activation in POSITIVE_ACTIVATIONS
        )

    def gated_shape(self, shape: AttentionShape) -> tuple[int, int]:
        """Heads N and head size of the tensor that this gate acts on."""
        if self.position == "dense_output":
            return 1, shape.width
        heads = shape.num_kv_heads if self.position in ("value", "key") else shape.num_heads
        return heads, shape.head_size if self.position in ("query", "key") else shape.value_size

    def source_width(self, shape: AttentionShape) -> int:
        """Channels that the projection reads: D, the prefix, K Cv or H Cv."""
        widths = {
            "hidden": shape.width,
            "prefix": self.prefix_channels or 0,
            "value": shape.num_kv_heads * shape.value_size,
            "attention_output": shape.num_heads * shape.value_size,
            "parameter": 0,
        }
        return widths[self.source]

    def parameter_shapes(self, shape: AttentionShape) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every parameter of this gate on one layer; rows are head-major (storage layout L1).

        ``projection.weight`` (N C or N, source width); with a rank ``projection.down.weight`` (rank, source width) and
        ``projection.up.weight`` (N C or N, rank); the bias beside the last weight; ``logits`` (N, C or 1) alone for an
        input-independent gate.
        """
        heads, head_size = self.gated_shape(shape)
        channels = head_size if self.granularity == "elementwise" else 1
        if self.source == "parameter":
            return {"logits": (heads, channels)}
        rows, columns = heads * channels, self.source_width(shape)
        last = "projection" if self.rank is None else "projection.up"
        shapes: dict[str, tuple[int, ...]] = {f"{last}.weight": (rows, self.rank or columns)}
        if self.rank is not None:
            shapes["projection.down.weight"] = (self.rank, columns)
        if self.bias is not None:
            shapes[f"{last}.bias"] = (rows,)
        return shapes

    def num_parameters(self, shape: AttentionShape) -> int:
        """Parameters of this gate on one layer."""
        return sum(math.prod(sizes) for sizes in self.parameter_shapes(shape).values())

    def initial_score(self) -> float:
        """The score at zero logits plus bias: what a fresh gate gives up to the spread of its random weights."""
        logit = 0.0 if self.bias is None else self.bias
        sigmoid = 0.5 + 0.5 * math.tanh(logit / 2)
        return {
            "sigmoid": sigmoid,
            "silu": logit * sigmoid,
            "identity": logit,
            "ns_sigmoid": 0.5 + 0.5 * sigmoid,
            "double_sigmoid": 2 * sigmoid,
            "softplus": max(logit, 0.0) + math.log1p(math.exp(-abs(logit))),
            "tanh": math.tanh(logit),
        }[self.activation]

    def on_layer(self, layer: int) -> bool:
        """Whether the layer with this number, from 0, has the gate."""
        return self.layers is None or layer in self.layers


class OutputControl(Settings):
    """A gate-free control on the SDPA output: the non-linearities of the paper's table 3.

    ``rms_norm`` normalises each head by itself with a learned weight of the head size that belongs to that head
    (H C weights); the paper calls it "SDPA GroupNorm". ``silu`` is x * sigmoid(x) and has no parameters.
    """

    operation: Literal["rms_norm", "silu"]
