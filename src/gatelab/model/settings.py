"""The shape of a decoder, as data. Nothing here imports torch."""

from __future__ import annotations

from collections import Counter

from pydantic import Field, model_validator

from gatelab.gates.spec import AttentionShape, GateSpec, OutputControl
from gatelab.settings import Settings


class RopeSettings(Settings):
    """Rotary position embedding: channel pair i of R rotated channels turns by position * base**(-2i/R)."""

    base: float = Field(default=10_000.0, gt=1)
    fraction: float = Field(default=1.0, gt=0, le=1, description="share of each head's channels that rotate, the first")

    def rotated_channels(self, head_size: int) -> int:
        """R, the number of rotated channels of a head."""
        return int(head_size * self.fraction)


class MixtureSettings(Settings):
    """A mixture of experts in place of each feed-forward layer: softmax router, top-k, no token dropped."""

    num_experts: int = Field(gt=0, description="E")
    experts_per_token: int = Field(gt=0, description="k")
    expert_width: int = Field(gt=0, description="feed-forward width of one expert")
    renormalize: bool = Field(default=True, description="divide the k chosen probabilities by their sum")
    shared_width: int | None = Field(default=None, gt=0, description="width of an expert that sees every token")

    @model_validator(mode="after")
    def _check(self) -> MixtureSettings:
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token={self.experts_per_token} exceeds num_experts={self.num_experts}")
        return self


class ModelSettings(Settings):
    """A pre-norm decoder in the shape of Qwen3, its gates included."""

    vocab_size: int = Field(gt=0, description="V")
    width: int = Field(gt=0, description="D")
    num_layers: int = Field(gt=0, description="L")
    num_heads: int = Field(gt=0, description="H, query heads")
    num_kv_heads: int = Field(gt=0, description="K, key/value heads; H/K query heads share one")
    head_size: int = Field(gt=0, description="C; H C need not equal D")
    feedforward_width: int = Field(gt=0, description="F of SwiGLU; with a mixture its experts have their own width")
    max_context: int = Field(gt=0, description="longest sequence that the rotary embedding is meant for, in tokens")
    tied_head: bool = Field(default=True, description="the output head is the embedding matrix")
    qk_norm: bool = Field(default=True, description="RMSNorm of queries and keys, per head, before the rotation")
    sandwich_norm: bool = Field(default=False, description="RMSNorm also after attention and after the feed-forward")
    norm_epsilon: float = Field(default=1e-6, gt=0)
    causal: bool = True
    rope: RopeSettings = RopeSettings()
    mixture: MixtureSettings | None = None
    gates: tuple[GateSpec, ...] = ()
    control: OutputControl | None = None
    init_std: float = Field(default=0.02, gt=0, description="standard deviation of every initial weight matrix")
    matching_multiple: int = Field(
        default=8, gt=0, description="a feed-forward narrowed to match parameters has a width that this divides"
    )
    drawn_feedforward_width: int | None = Field(
        default=None,
        description="width at which initial feed-forward matrices are drawn before they are cut to size, so that a "
        "parameter-matched arm starts from the baseline's weights",
    )

    @property
    def attention_shape(self) -> AttentionShape:
        """The sizes that gates depend on."""
        return AttentionShape.parse({name: getattr(self, name) for name in AttentionShape.model_fields})

    def gates_on_layer(self, layer: int) -> tuple[GateSpec, ...]:
        """The gates of one layer, at most one for each position."""
        return tuple(gate for gate in self.gates if gate.on_layer(layer))

    @model_validator(mode="after")
    def _check_sizes(self) -> ModelSettings:
        _ = self.attention_shape
        rotated = self.head_size * self.rope.fraction
        if rotated != int(rotated) or int(rotated) % 2:
            raise ValueError(
                f"head_size={self.head_size} with rope.fraction={self.rope.fraction} rotates {rotated:g} channels; "
                "the rotation needs an even number of them"
            )
        drawn = self.drawn_feedforward_width
        width = self.mixture.expert_width if self.mixture else self.feedforward_width
        if drawn is not None and drawn < width:
            raise ValueError(
                f"drawn_feedforward_width={drawn} is below the feed-forward width {width} that is cut from it"
            )
        return self

    @model_validator(mode="after")
    def _check_gates(self) -> ModelSettings:
        for gate in self.gates:
            if gate.prefix_channels is not None and gate.prefix_channels > self.width:
                raise ValueError(f"a gate reads prefix_channels={gate.prefix_channels} of width={self.width} channels")
            for layer in gate.layers or ():
                if layer >= self.num_layers:
                    raise ValueError(
                        f"a {gate.position} gate is on layer {layer}, but the last layer is {self.num_layers - 1}"
                    )
        for layer in range(self.num_layers):
            for position, count in Counter(gate.position for gate in self.gates_on_layer(layer)).items():
                if count > 1:
                    raise ValueError(f"layer {layer} has {count} gates at position {position}; one is possible")
        return self
