"""The parts of a decoder's shape: rotation, latents, sink, experts, what single layers have otherwise, as data."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gatelab.settings import Settings

_OF_ALL = {"kind", "factor"}
_OF_KIND = {
    "linear": _OF_ALL,
    "ntk": _OF_ALL,
    "llama3": _OF_ALL | {"original_context", "low_frequency_factor", "high_frequency_factor"},
    "yarn": _OF_ALL
    | {"original_context", "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"},
}
_NEEDED = {
    "yarn": ("original_context",),
    "llama3": ("original_context", "low_frequency_factor", "high_frequency_factor"),
}


class RopeScaling(Settings):
    """How rotary frequencies change for contexts beyond the one that was trained at; see :mod:`gatelab.model.rope`.

    The first three are positional interpolation (Chen et al. 2306.15595), the NTK-aware base, fixed for all lengths,
    and YaRN (Peng et al. 2309.00071); ``llama3`` is that of Llama 3.1.
    """

    kind: Literal["linear", "ntk", "yarn", "llama3"]
    factor: float = Field(ge=1, description="s, how many times longer the context is to be")
    original_context: int | None = Field(
        default=None, gt=0, description="yarn, llama3: the tokens that were trained at before scaling, L"
    )
    attention_factor: float | None = Field(
        default=None, gt=0, description="yarn: factor on cosines and sines; 0.1 ln s + 1 when left out"
    )
    mscale: float | None = Field(
        default=None, gt=0, description="yarn: with mscale_all_dim, the ratio (0.1 m ln s + 1) / (0.1 a ln s + 1)"
    )
    mscale_all_dim: float | None = Field(default=None, gt=0, description="yarn: a in the ratio of mscale")
    beta_fast: float = Field(default=32.0, gt=0, description="yarn: pairs with more turns over L are left as they are")
    beta_slow: float = Field(default=1.0, gt=0, description="yarn: pairs with fewer turns over L are interpolated")
    truncate: bool = Field(default=True, description="yarn: round the bounds of the ramp to whole pairs")
    low_frequency_factor: float | None = Field(
        default=None, gt=0, description="llama3: pairs with fewer turns over L are interpolated; 1 in Llama 3.1"
    )
    high_frequency_factor: float | None = Field(
        default=None, gt=0, description="llama3: pairs with more turns over L are left as they are; 4 in Llama 3.1"
    )

    @model_validator(mode="after")
    def _check(self) -> RopeScaling:
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name not in _OF_KIND[self.kind] and value != field.default:
                raise ValueError(f"{name}={value} has no meaning with kind={self.kind}; leave it out")
        for name in _NEEDED.get(self.kind, ()):
            if getattr(self, name) is None:
                raise ValueError(f"kind={self.kind} needs {name}, which has no safe default")
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError("mscale and mscale_all_dim make one ratio; give both, or attention_factor")
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast={self.beta_fast:g} is not above beta_slow={self.beta_slow:g}")
        low, high = self.low_frequency_factor, self.high_frequency_factor
        if low is not None and high is not None and high <= low:
            raise ValueError(f"high_frequency_factor={high:g} is not above low_frequency_factor={low:g}")
        return self


class RopeSettings(Settings):
    """Rotary position embedding: channel pair i of R rotated channels turns by position * base**(-2i/R), or scaled."""

    base: float = Field(default=10_000.0, gt=1)
    fraction: float = Field(default=1.0, gt=0, le=1, description="share of each head's channels that rotate, the first")
    scaling: RopeScaling | None = None

    def rotated_channels(self, head_size: int) -> int:
        """R, the number of rotated channels of a head."""
        return int(head_size * self.fraction)


class LatentSettings(Settings):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434); see :mod:`gatelab.model.latent`.

    Every head has its own keys and values, but all are made of one latent of the token, and of one rotated key.
    """

    query_rank: int | None = Field(
        default=None, gt=0, le=2**20, description="channels of the latent that queries are made of; none when left out"
    )
    key_value_rank: int = Field(gt=0, le=2**20, description="channels of the latent that keys and values are made of")
    unrotated_size: int = Field(gt=0, le=2**20, description="channels of a query or key head that never rotate")
    rotated_size: int = Field(gt=0, le=2**20, description="those after them, which rotate; all heads share this key")
    value_size: int = Field(gt=0, le=2**20, description="Cv, channels of a value head and of a head's output")
    norm_epsilon: float = Field(
        default=1e-6, gt=0, description="of the latents' norms; that of DeepSeek's code, whatever its other norms have"
    )


class SinkSettings(Settings):
    """A key that no token has on every layer, the rival of a gate; see :class:`gatelab.model.sink.Sink`."""

    kind: Literal["learned_logit", "off_by_one", "learned_key_value"] = Field(
        description="a learned logit for each query head, the logit 0, or a learned key and value for each key head"
    )


class MixtureSettings(Settings):
    """A mixture of experts in place of each feed-forward layer: top-k of the router's scores, no token dropped.

    The scores are the softmax over all experts, or the sigmoid of each expert's own logit (DeepSeek-V3, 2412.19437).
    """

    num_experts: int = Field(gt=0, le=65_536, description="E")
    experts_per_token: int = Field(gt=0, description="k")
    expert_width: int = Field(gt=0, le=2**20, description="feed-forward width of one expert")
    renormalize: bool = Field(default=True, description="divide the k chosen scores by their sum")
    shared_width: int | None = Field(
        default=None, gt=0, le=2**20, description="width of an expert that sees every token"
    )
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

    num_heads: int | None = Field(default=None, gt=0, le=2**20, description="H, query heads of this layer")
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


class PatchSettings(Settings):
    """Images in place of tokens: a sequence is [CLS] and patches, each the number that its pixels make.

    The number of a patch is sum_k pixel_k ``levels``^k, that of [CLS] the next one after the largest.
    """

    pixels: int = Field(default=1, gt=0, description="P, pixels of a patch")
    levels: int = Field(default=17, ge=2, description="brightness of a pixel goes from 0, black, to one less than this")

    @property
    def cls_id(self) -> int:
        """The number of [CLS]."""
        return self.levels**self.pixels

    @model_validator(mode="after")
    def _check(self) -> PatchSettings:
        if self.cls_id >= 2**62:
            raise ValueError(f"patches of {self.pixels} pixels in {self.levels} levels have no number of 64 bits")
        return self
