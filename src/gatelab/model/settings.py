"""The shape of a decoder, as data. Nothing here imports torch."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from pydantic import Field, model_validator

from gatelab.gates.spec import AttentionShape, GateSpec, OutputControl
from gatelab.model.layer_settings import (
    LatentSettings,
    LayerSettings,
    MixtureSettings,
    PatchSettings,
    RopeScaling,
    RopeSettings,
    SinkSettings,
)
from gatelab.settings import Settings

__all__ = [
    "LatentSettings",
    "LayerSettings",
    "MixtureSettings",
    "ModelSettings",
    "PatchSettings",
    "RopeScaling",
    "RopeSettings",
    "SinkSettings",
]


class ModelSettings(Settings):
    """A pre-norm decoder, its gates included: the shape of Qwen3, and by its options that of families like it."""

    vocab_size: int = Field(gt=0, le=2**24, description="V; of a model of images its classes")
    width: int = Field(gt=0, le=2**20, description="D")
    num_layers: int = Field(gt=0, le=4096, description="L")
    num_heads: int = Field(gt=0, le=2**20, description="H, query heads")
    num_kv_heads: int = Field(gt=0, le=2**20, description="K, key/value heads; H/K query heads share one")
    head_size: int = Field(gt=0, le=2**20, description="C, of queries and keys; H C need not equal D")
    feedforward_width: int = Field(
        gt=0, le=2**20, description="F of SwiGLU; with a mixture its experts have their own width"
    )
    max_context: int = Field(
        gt=0, le=2**40, description="longest sequence that the rotary embedding is meant for, in tokens"
    )
    tied_head: bool = Field(default=True, description="the output head is the embedding matrix")
    qk_norm: bool = Field(default=True, description="RMSNorm of queries and keys, per head, before the rotation")
    sandwich_norm: bool = Field(default=False, description="RMSNorm also after attention and after the feed-forward")
    centred_norms: bool = Field(
        default=False, description="every RMSNorm multiplies by 1 + weight, in float32 (Gemma, Qwen3-Next)"
    )
    norm_epsilon: float = Field(default=1e-6, gt=0)
    biased_projections: tuple[Literal["q", "k", "v", "o"], ...] = Field(
        default=(), description="the projections of attention that have a bias"
    )
    embedding_scale: float = Field(default=1.0, gt=0, description="factor on the embedding, not on a tied head")
    causal: bool = True
    patches: PatchSettings | None = Field(
        default=None, description="reads images in place of tokens, with learned positions and no rotation"
    )
    rope: RopeSettings = RopeSettings()
    layers: tuple[LayerSettings, ...] = Field(default=(), description="one for each layer, or none: all layers alike")
    latent: LatentSettings | None = Field(
        default=None, description="latent attention in the place of grouped-query attention, on all layers"
    )
    mixture: MixtureSettings | None = None
    sink: SinkSettings | None = None
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
    def value_size(self) -> int:
        """Cv, channels of a value head and of a head's output."""
        return self.head_size if self.latent is None else self.latent.value_size

    @property
    def rotary_size(self) -> int:
        """Channels of a query or key head of which ``rope.fraction`` is a share."""
        return self.head_size if self.latent is None else self.latent.rotated_size

    @property
    def attention_shape(self) -> AttentionShape:
        """The sizes that gates depend on, of a layer that has none of its own."""
        return AttentionShape.parse({name: getattr(self, name) for name in AttentionShape.model_fields})

    def on_layer(self, layer: int) -> LayerSettings:
        """What the layer with this number, from 0, has otherwise than the model."""
        return self.layers[layer] if self.layers else LayerSettings()

    def shape_on_layer(self, layer: int) -> AttentionShape:
        """The sizes that gates depend on, of one layer."""
        num_heads = self.on_layer(layer).num_heads or self.num_heads
        return AttentionShape.parse({**self.attention_shape.to_mapping(), "num_heads": num_heads})

    def rope_on_layer(self, layer: int) -> RopeSettings | None:
        """The rotation of one layer, ``None`` for a layer that does not rotate, as none of a model of images does."""
        if self.patches is not None:
            return None
        own = self.on_layer(layer)
        return (own.rope or self.rope) if own.rotary else None

    @property
    def long_rope(self) -> RopeSettings:
        """The rotation of the layers that see the whole context, which extending the context changes.

        Raises ``ValueError`` where there is none, or more than one.
        """
        layers = [layer for layer in range(self.num_layers) if self.on_layer(layer).window is None]
        found: list[RopeSettings] = []
        for rope in map(self.rope_on_layer, layers):
            if rope is not None and rope not in found:
                found.append(rope)
        if len(found) != 1:
            raise ValueError(
                f"the layers without a window have {len(found)} different rotations; the context is extended by "
                "changing the one that they share"
            )
        return found[0]

    def with_rope(self, rope: RopeSettings, max_context: int) -> ModelSettings:
        """The same model with another rotation in the layers without a window, for other contexts.

        Layers with a window keep their rotation: distances don't grow inside it. Raises ``ValueError`` as
        :attr:`long_rope`, and for a share of rotated channels other than before.
        """
        if rope.fraction != self.long_rope.fraction:
            raise ValueError(
                f"rope.fraction={rope.fraction} differs from the {self.long_rope.fraction} that was trained with"
            )
        layers = [layer.to_mapping() for layer in self.layers]
        for number, layer in enumerate(self.layers):
            kept = self.rope_on_layer(number) if layer.window is not None else None
            layers[number]["rope"] = None if kept is None else kept.to_mapping()
        changes = {"rope": rope.to_mapping(), "max_context": max_context, "layers": layers}
        return ModelSettings.parse({**self.to_mapping(), **changes})

    def mixture_on_layer(self, layer: int) -> MixtureSettings | None:
        """The mixture of experts of one layer, ``None`` for a dense one."""
        return self.mixture if self.on_layer(layer).mixture else None

    def gates_on_layer(self, layer: int) -> tuple[GateSpec, ...]:
        """The gates of one layer, at most one for each position."""
        return tuple(gate for gate in self.gates if gate.on_layer(layer))

    @model_validator(mode="after")
    def _check_sizes(self) -> ModelSettings:
        _ = self.attention_shape
        self._check_rope(self.rope, "rope")
        if repeated := [name for name, count in Counter(self.biased_projections).items() if count > 1]:
            raise ValueError(f"biased_projections names {repeated[0]!r} twice")
        drawn = self.drawn_feedforward_width
        width = self.mixture.expert_width if self.mixture else self.feedforward_width
        if drawn is not None and drawn < width:
            raise ValueError(
                f"drawn_feedforward_width={drawn} is below the feed-forward width {width} that is cut from it"
            )
        return self

    def _check_rope(self, rope: RopeSettings, name: str) -> None:
        rotated = self.rotary_size * rope.fraction
        if rotated != int(rotated) or int(rotated) % 2:
            size = "head_size" if self.latent is None else "latent.rotated_size"
            raise ValueError(
                f"{size}={self.rotary_size} with {name}.fraction={rope.fraction} rotates {rotated:g} channels; "
                "the rotation needs an even number of them"
            )
        if rope.scaling is not None and rope.scaling.kind == "ntk" and rotated == 2:
            raise ValueError(f"{name}.scaling.kind=ntk changes the base of slower pairs, and only one pair rotates")

    @model_validator(mode="after")
    def _check_patches(self) -> ModelSettings:
        if self.patches is None:
            return self
        if self.causal:
            raise ValueError("causal=True with patches is impossible: [CLS] comes first and would see no patch")
        if self.tied_head:
            raise ValueError("tied_head=True with patches is impossible: no patch stands for a class; set it to False")
        if self.embedding_scale != 1:
            raise ValueError(f"embedding_scale={self.embedding_scale} is of tokens, and patches have none; set it to 1")
        return self

    @model_validator(mode="after")
    def _check_latent(self) -> ModelSettings:
        if self.latent is not None:
            for setting, reason in self._unlike_latents(self.latent):
                raise ValueError(f"{setting} does not go with latent attention: {reason}")
        return self

    def _unlike_latents(self, latent: LatentSettings) -> list[tuple[str, str]]:
        """Settings that contradict latent attention, or that it is not built with, and the way out."""
        size, own = latent.unrotated_size + latent.rotated_size, "leave them to grouped-query attention (latent=null)"
        ropes = {"rope": self.rope} | {f"layers.{number}.rope": layer.rope for number, layer in enumerate(self.layers)}
        found = [
            (self.num_kv_heads != self.num_heads, f"num_kv_heads={self.num_kv_heads}",
             f"each head has its own keys and values; set num_kv_heads={self.num_heads}"),
            (self.head_size != size, f"head_size={self.head_size}",
             f"queries and keys have unrotated_size={latent.unrotated_size} and rotated_size={latent.rotated_size} "
             f"channels; set head_size={size}"),
            (self.qk_norm, "qk_norm=True", "its norms are those of the latents; set qk_norm=False"),
            (bool(self.biased_projections), f"biased_projections={list(self.biased_projections)}",
             f"its projections have no biases; {own}"),
            (self.sink is not None, f"sink.kind={self.sink and self.sink.kind}",
             f"sinks are built for keys and values of one size; {own}"),
        ]  # fmt: skip
        found += [
            (layer.num_heads not in (None, self.num_heads), f"layers.{number}.num_heads={layer.num_heads}",
             f"its layers have equally many heads; set it to {self.num_heads}")
            for number, layer in enumerate(self.layers)
        ]  # fmt: skip
        found += [
            (rope is not None and rope.fraction != 1, f"{name}.fraction={rope and rope.fraction}",
             f"latent.rotated_size says how many channels rotate; set {name}.fraction=1")
            for name, rope in ropes.items()
        ]  # fmt: skip
        found += [
            (gate.placement == "before_norm", f"a {gate.position} gate with placement=before_norm",
             "no norm stands on its heads; choose after_norm, before the rotation, or after_rope")
            for gate in self.gates
        ]  # fmt: skip
        return [(setting, reason) for holds, setting, reason in found if holds]

    @model_validator(mode="after")
    def _check_layers(self) -> ModelSettings:
        if self.layers and len(self.layers) != self.num_layers:
            raise ValueError(
                f"layers has {len(self.layers)} entries, but num_layers={self.num_layers}; give each layer one, or none"
            )
        for number, layer in enumerate(self.layers):
            if layer.num_heads is not None and layer.num_heads % self.num_kv_heads:
                raise ValueError(
                    f"layers.{number}.num_heads={layer.num_heads} is not divisible by num_kv_heads="
                    f"{self.num_kv_heads}; each key/value head serves equally many query heads"
                )
            if layer.rope is not None:
                self._check_rope(layer.rope, f"layers.{number}.rope")
            if layer.window is not None and not self.causal:
                raise ValueError(
                    f"layers.{number}.window={layer.window} with causal=False is impossible: a window looks back"
                )
        if self.mixture is not None and self.layers and not any(layer.mixture for layer in self.layers):
            raise ValueError("mixture is given, but all layers have mixture=False; leave mixture out")
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
