"""The families of decoders whose checkpoints load, by the model type in their config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from gatelab.gates.spec import GateSpec
from gatelab.interop import family_settings
from gatelab.interop.config_keys import ConfigKeys
from gatelab.interop.family_settings import Fields
from gatelab.interop.latents import ways_from_pairs
from gatelab.interop.layouts import Layout
from gatelab.interop.official import choose_layout, declared_gate
from gatelab.interop.tensor_files import TensorFiles
from gatelab.interop.tensor_names import GATE, LazyTensors, Renames, our_tensors, ways_of_families
from gatelab.model.settings import ModelSettings


class Checkpoint(NamedTuple):
    """A checkpoint of any family: our settings, the layout it was stored in, and our tensors, not yet read."""

    settings: ModelSettings
    layout: Layout
    tensors: LazyTensors


@dataclass(frozen=True)
class Family:
    """How one model type is read.

    ``fields`` gives the fields of :class:`ModelSettings` but the gates. ``gate`` gives the one that the family's code
    always has, in ``layout``; without it, keys declare the gate. ``ignored`` is a pattern of names of tensors that
    are no part of the text decoder.
    """

    fields: Callable[[ConfigKeys], Fields]
    gate: Callable[[ConfigKeys], GateSpec] | None = None
    layout: Layout = "L1"
    dialects: Sequence[Renames] = ({},)
    ignored: str = r"(.*\.)?rotary_emb\.inv_freq$"


def read_checkpoint(config: Mapping[str, Any], files: TensorFiles, layout: Layout | None = None) -> Checkpoint:
    """Settings and tensors of a checkpoint; the layout by the rules of :mod:`gatelab.interop.official`.

    Raises ``ValueError`` for an unknown family, for whatever in the configuration our decoder can't compute or does
    not know, and for tensors that don't fit it, each by name.
    """
    config = _text_part(config)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise ValueError(
            f"config.json has model_type={config.get('model_type')!r}; GateLab loads the families {', '.join(FAMILIES)}"
        )
    keys = ConfigKeys(config)
    try:
        fields = family.fields(keys)
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ValueError(
            f"the config.json of this {keys.family} model has a value of the wrong kind ({error}); compare it with one "
            "that transformers wrote"
        ) from None
    if family.gate is None:
        gate, layout = declared_gate(config, keys, files, layout)
    else:
        gate = family.gate(keys)
        layout = choose_layout(
            {"the layout argument": layout, "the files": files.metadata.get("gate_layout")},
            rule=family.layout,
            possible=[family.layout],
            key=keys.family,
        )
    keys.finish()
    settings = ModelSettings.parse({**fields, "gates": () if gate is None else (gate.to_mapping(),)})
    if settings.num_layers > len(files):
        raise ValueError(
            f"config.json has {settings.num_layers} layers, but the files have {len(files)} tensors in all; "
            "they are not of this model"
        )
    if settings.latent is not None and layout != "L1":
        raise ValueError(
            f"the gate layout {layout} has the gate's rows among those of q_proj; with latent attention only a gate "
            "that has a projection of its own (L1) is read"
        )
    ways = partial(ways_of_families, settings=settings, layout=layout, dialects=family.dialects)
    if settings.latent is not None and config.get("rope_interleave", True):
        ways = partial(ways_from_pairs, ways, settings)
    ignored = "|".join([family.ignored, *_predicting_ahead(config, settings)])
    return Checkpoint(settings, layout, our_tensors(files, settings, ways, ignored))


def _predicting_ahead(config: Mapping[str, Any], settings: ModelSettings) -> list[str]:
    """Patterns of the layers after the last one, which predict further tokens and take no part in the logits."""
    extra = config.get("num_nextn_predict_layers") or 0
    return [rf"model\.layers\.{settings.num_layers + number}\." for number in range(extra)]


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text decoder's keys of a model that sees images too; others as they are."""
    inner = {"qwen3_5": "qwen3_5_text", "step3p7": "step3p5"}.get(str(config.get("model_type")))
    if inner is None or not isinstance(config.get("text_config"), Mapping):
        return config
    text = {**config["text_config"], "model_type": inner}
    if "tie_word_embeddings" in config:
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    return text


AFMOE_NAMES = {
    "after_attention_norm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "after_feedforward_norm": "post_mlp_layernorm",
    "mlp.gate.weight": "mlp.router.gate.weight",
    "mlp.selection_bias": "mlp.expert_bias",
    "mlp.shared_expert.": "mlp.shared_experts.",
    GATE: "gate_proj",
}
LAGUNA_NAMES = {GATE: "g_proj", "mlp.selection_bias": "mlp.experts.e_score_correction_bias"}
IN_MEMORY_NAMES = {
    GATE: "g_proj",
    "mlp.selection_bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared_expert.": "mlp.shared_experts.",
}
STEP_NAMES = {
    GATE: "g_proj",
    "mlp.gate.weight": "moe.gate.weight",
    "mlp.selection_bias": "moe.router_bias",
    "mlp.shared_expert.": "share_expert.",
}
DEEPSEEK: tuple[Renames, ...] = tuple(
    {
        "mlp.selection_bias": "mlp.gate.e_score_correction_bias",
        "mlp.shared_expert.": "mlp.shared_experts.",
        GATE: gate,
    }
    for gate in ("g_proj", "gate_proj")
)
BESIDE_IMAGES = {"model.": "model.language_model."}
DECLARED: tuple[Renames, ...] = ({}, {GATE: "gate_proj"}, {GATE: "g_proj"})
NO_TEXT = r"(.*\.)?rotary_emb\.inv_freq$|model\.visual\.|mtp\.|vision_model\.|vit_large_projector\."

# Model type of transformers -> how it is read.
FAMILIES: dict[str, Family] = {
    "qwen2": Family(family_settings.qwen2, dialects=DECLARED),
    "llama": Family(family_settings.llama, dialects=DECLARED),
    "qwen3": Family(family_settings.qwen3, dialects=DECLARED),
    "qwen3_moe": Family(family_settings.qwen3_moe, dialects=DECLARED),
    "deepseek_v3": Family(family_settings.deepseek_v3, dialects=DEEPSEEK),
    "qwen3_next": Family(family_settings.qwen3_next, family_settings.elementwise_in_q_proj, "L2", ignored=NO_TEXT),
    "qwen3_5_text": Family(
        family_settings.full_attention, family_settings.elementwise_in_q_proj, "L2", ({}, BESIDE_IMAGES), NO_TEXT
    ),
    "afmoe": Family(family_settings.afmoe, lambda keys: GateSpec(), "L1", (AFMOE_NAMES,)),
    "laguna": Family(family_settings.laguna, family_settings.laguna_gate, "L1", (LAGUNA_NAMES, IN_MEMORY_NAMES)),
    "step3p5": Family(
        family_settings.step,
        family_settings.step_gate,
        "L1",
        (STEP_NAMES, IN_MEMORY_NAMES, BESIDE_IMAGES | IN_MEMORY_NAMES),
        NO_TEXT,
    ),
}
