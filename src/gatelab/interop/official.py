"""Which gate a configuration declares, and in which layout: the paper's checkpoints, and all that use gate keys.

Keys name a gate, not where its rows are: the paper's code fuses them into ``q_proj`` by group (L3), a third party uses
the very same keys for a projection of its own (L1), and L2, L3 and L6 have equal shapes. So the layout must be
declared, by the first of these that speaks, and they may not contradict each other:

1. the ``layout`` argument,
2. ``gate_layout`` in config.json or in the metadata of the files,
3. the paper's own code: ``model_type`` qwen3, ``architectures`` Qwen3ForCausalLM, and one of its two keys. Its class
   reads these keys in no other way (qiuzh20/gated_attention, modeling_qwen3.py), so they declare L3, as long as no
   tensor of the file is a gate projection of its own, which that code does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gatelab.gates.spec import GateSpec, Granularity
from gatelab.interop.config_keys import ConfigKeys
from gatelab.interop.layouts import FUSED, WITH_KEYS_AND_VALUES, Layout
from gatelab.interop.tensor_files import TensorFiles

OFFICIAL_KEYS: dict[str, Granularity] = {
    "headwise_attn_output_gate": "headwise",
    "elementwise_attn_output_gate": "elementwise",
}
GATE_KEYS: dict[str, Granularity] = {
    **OFFICIAL_KEYS,
    "attn_output_gate": "elementwise",
    "attention_output_gate": "elementwise",
    "use_gate": "elementwise",
    "use_head_wise_attn_gate": "headwise",
    "mla_use_output_gate": "elementwise",
}
GATINGS: dict[Any, Granularity] = {True: "headwise", "per-head": "headwise", "per-element": "elementwise"}
SEPARATE_GATES = ("self_attn.gate_proj.", "self_attn.g_proj.")


MEANINGS: dict[Layout, str] = {
    "L1": "a projection of its own",
    "L2": "q_proj head by head, query rows then gate rows (as Qwen3-Next)",
    "L3": "q_proj group by group, query rows then gate rows (the paper's code)",
    "L4": "Megatron's linear_qkv, gate rows after the query rows of each group",
    "L5": "Megatron's linear_qkv, gate rows at its end",
    "L6": "q_proj, all query rows then all gate rows",
}


def declared_gate(
    config: Mapping[str, Any], keys: ConfigKeys, files: TensorFiles, layout: Layout | None
) -> tuple[GateSpec | None, Layout]:
    """The gate that the keys of a configuration declare, ``None`` for none, and its layout by the rule above.

    Raises ``ValueError`` for keys that contradict each other, and where the layout is not declared or twice.
    """
    granularity, key = _granularity(keys)
    if granularity is None:
        if layout not in (None, "L1"):
            raise ValueError(
                f"the layout {layout} is given, but config.json declares no gate; set one of its keys to true: "
                + ", ".join(GATE_KEYS)
            )
        return None, "L1"
    separate = [name for name in files if any(part in name for part in SEPARATE_GATES)]
    is_papers_code = (
        key in OFFICIAL_KEYS
        and config.get("model_type") == "qwen3"
        and config.get("architectures") == ["Qwen3ForCausalLM"]
    )
    fused: list[Layout] = [one for one in FUSED[granularity] if one not in WITH_KEYS_AND_VALUES]
    possible: list[Layout] = [*(["L1"] if separate else fused), *(["L3"] if separate and is_papers_code else [])]
    layout = choose_layout(
        {
            "the layout argument": layout,
            "config.json": keys.get("gate_layout"),
            "the files": files.metadata.get("gate_layout"),
        },
        rule="L3" if is_papers_code and not separate else None,
        possible=possible,
        key=key,
    )
    if layout == "L1":
        has_bias = any(name.endswith(".bias") for name in separate)
    else:
        has_bias = bool(keys.get("qkv_bias") or keys.get("attention_bias"))
    return GateSpec(granularity=granularity, bias=0.0 if has_bias else None), layout


def choose_layout(
    declared: Mapping[str, str | None], rule: Layout | None, possible: Sequence[Layout], key: str
) -> Layout:
    """The layout that is declared, else that of the rule.

    ``declared`` maps the places that may name a layout to what they say. Raises ``ValueError`` that shows all
    possible layouts when nothing declares one, and when declarations contradict each other or the tensors.
    """
    told = {place: layout for place, layout in declared.items() if layout is not None}
    if told and rule is not None:
        told[f"the code of {key}"] = rule
    if len(set(told.values())) > 1:
        both = ", ".join(f"{place} says {layout}" for place, layout in told.items())
        raise ValueError(f"the gate layout is declared twice: {both}; correct the wrong one")
    chosen = next(iter(told.values()), rule)
    choices = "; ".join(f"{layout}: {MEANINGS[layout]}" for layout in possible)
    if chosen is None:
        raise ValueError(f"{key} declares a gate, but not where its rows are; name the layout with --layout. {choices}")
    for layout in possible:
        if layout == chosen:
            return layout
    raise ValueError(f"the gate layout {chosen} does not fit these tensors. Possible are {choices}")


def _granularity(keys: ConfigKeys) -> tuple[Granularity | None, str]:
    """What the gate keys say, and the key that says it."""
    keys.only("gate_attn_act_mode", "sigmoid")
    if not keys.says("kv_lora_rank"):
        keys.only("mla_use_output_gate", False)
    declared: dict[str, Granularity] = {key: kind for key, kind in GATE_KEYS.items() if keys.get(key)}
    if gating := keys.get("gating"):
        keys.only("gating", *GATINGS)
        declared["gating"] = GATINGS[gating]
    if len(set(declared.values())) > 1:
        both = " and ".join(f"{key} ({kind})" for key, kind in declared.items())
        raise ValueError(f"config.json declares gates that contradict each other, {both}; set the wrong one to false")
    for key, kind in declared.items():
        return kind, key
    return None, ""
