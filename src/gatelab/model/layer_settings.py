"""The parts of a decoder's shape: rotation, sink, mixture of experts, what single layers have otherwise, as data."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gatelab.settings import Settings


class RopeSettings(Settings):
    """Rotary position embedding: channel pair i of R rotated channels turns by position * base**(-2i/R)."""

    base: float = Field(default=10_000.0, gt=1)
    fraction: float = Field(default=1.0, gt=0, le=1, description="share of each head's channels that rotate, the first")

    def rotated_channels(self, head_size: int) -> int:
        """R, the number of rotated channels of a head."""
        return int(head_size * self.fraction)


class SinkSettings(Settings):
    """A key that no token has on every layer, the rival of a gate; see :class:`gatelab.model.sink.Sink`."""

    kind: Literal["learned_logit", "off_by_one", "learned_key_value"] = Field(
        description="a learned logit for each query head, the logit 0, or a learned key and value for each key head"
    )


class MixtureSettings(Settings):
    """A mixture of experts in place of each feed-forward layer: top-k of the router's scores, no token dropped.

    The scores are the softmax over all experts, or the sigmoid of each expert's own logit (DeepSeek-V3, 2412.19437).
    """

    num_experts: int = Field(gt=0, description="E")
    experts_per_token: int = Field(gt=0, description="k")
    expert_width: int = Field(gt=0, description="feed-forward width of one expert")
    renormalize: bool = Field(default=True, description="divide the k chosen scores by their sum")
    shared_width: int | None = Field(default=None, gt=0, description="width of an expert that sees every token")
    shared_gate: bool = Field(
        default=False, description="the shared expert's output times a sigmoid, one score for each token (Qwen3-Next)"
    )
    router: Literal["softmax", "sigmoid"] = Field(default="softmax", description="how logits become scores")
    selection_bias: bool = Field(
        default=False,
        description="a number for each expert is added to its score where the k are chosen, and nowhere else; it is "
        "a buffer that no gradient moves",
    )
    routed_scale: float = Field(default=1.0, gt=0, description="factor on the weights of the k experts")

    @model_validator(mode="after")
    def _check(self) -> MixtureSettings:
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token={self.experts_per_token} exceeds num_experts={self.num_experts}")
        if self.shared_gate and self.shared_width is None:
            raise ValueError("shared_gate=True gates a shared expert, and there is none; set shared_width")
        return self


class LayerSettings(Settings):
    """What one layer has otherwise than the model; every default means as the model."""

    num_heads: int | None = Field(default=None, gt=0, description="H, query heads of this layer")
    window: int | None = Field(
        default=None, gt=0, description="a token sees this many tokens, itself the last; all before it when left out"
    )
    rope: RopeSettings | None = None
    rotary: bool = Field(default=True, description="whether queries and keys are rotated at all")
    mixture: bool = Field(
        default=True, description="false: a dense feed-forward of the model's width instead of its mixture of experts"
    )

    @model_validator(mode="after")
    def _check(self) -> LayerSettings:
        if self.rope is not None and not self.rotary:
            raise ValueError("rope is given although rotary=False; leave one of them out")
        return self
