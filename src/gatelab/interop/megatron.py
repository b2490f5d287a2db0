"""Our decoder's tensors under Megatron's names, with gate, query, key and value rows in one ``linear_qkv``.

An elementwise gate is layout L4 (Megatron-LM, ``attention_output_gate``), a headwise one L5 (its development branch,
``use_head_wise_attn_gate``). Names are those of Megatron-LM's GPT model with Transformer Engine layers, so a layer's
norms are ``linear_qkv.layer_norm_weight`` and ``linear_fc1.layer_norm_weight``; ``linear_fc1`` holds the gate rows of
SwiGLU, then the up rows. The folder's config.json is ours: model type ``gatelab_megatron``, the settings, the layout.
"""

from __future__ import annotations

import re
from functools import partial

import torch
from torch import Tensor

from gatelab.gates.spec import AttentionShape, Granularity
from gatelab.interop.layouts import FusedLayout, GateRows, merge
from gatelab.interop.tensor_names import GATE, Made, gate_rows, itself, layer_of, output_gate, renamed, shapes_of
from gatelab.model.settings import ModelSettings

MODEL_TYPE = "gatelab_megatron"
LAYOUTS: dict[Granularity, FusedLayout] = {"elementwise": "L4", "headwise": "L5"}
PARTS = {"q_proj": "query", GATE: "gate", "k_proj": "key", "v_proj": "value"}
FUSED = re.compile(rf"(.*)self_attn\.({'|'.join(map(re.escape, PARTS))})\.(weight|bias)")
RENAMES = {
    "model.embed_tokens": "embedding.word_embeddings",
    "model.layers": "decoder.layers",
    "model.norm": "decoder.final_layernorm",
    "lm_head": "output_layer",
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "post_attention_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attn.o_proj": "self_attention.linear_proj",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
    "down_proj": "linear_fc2",
}


def layout_of(settings: ModelSettings) -> FusedLayout:
    """L4 or L5; the model must have an output gate on every layer."""
    gate = output_gate(settings, 0)
    assert gate is not None
    return LAYOUTS[gate.granularity]


def ways(name: str, settings: ModelSettings) -> list[Made]:
    """What a Megatron checkpoint makes one of our tensors of."""
    if found := FUSED.fullmatch(name):
        _, projection, kind = found.groups()
        granularity, shape = _gate(settings, layer_of(name))
        rows = partial(gate_rows, PARTS[projection], LAYOUTS[granularity], granularity, shape)
        return [Made((_fused(name, "self_attention.linear_qkv", kind),), rows)]
    if half := re.search(r"mlp\.(gate|up)_proj\.weight$", name):
        return [Made((_fused(name, "mlp.linear_fc1", "weight"),), partial(_half, ("gate", "up").index(half[1])))]
    return [Made((renamed(name, RENAMES),), itself)]


def to_megatron(settings: ModelSettings) -> dict[str, Made]:
    """Megatron's tensors from ours, in the order of the layers."""
    made: dict[str, Made] = {}
    for name in shapes_of(settings):
        target = ways(name, settings)[0].sources[0]
        if found := FUSED.fullmatch(name):
            stem, _, kind = found.groups()
            granularity, shape = _gate(settings, layer_of(name))
            sources = tuple(f"{stem}self_attn.{projection}.{kind}" for projection in PARTS)
            made[target] = Made(sources, partial(_merge, LAYOUTS[granularity], granularity, shape))
        elif target.endswith("linear_fc1.weight"):
            stem = name[: name.index("mlp.")]
            made[target] = Made((f"{stem}mlp.gate_proj.weight", f"{stem}mlp.up_proj.weight"), _join)
        else:
            made[target] = Made((name,), itself)
    return made


def _fused(name: str, target: str, kind: str) -> str:
    return f"decoder.layers.{layer_of(name)}.{target}.{kind}"


def _gate(settings: ModelSettings, layer: int) -> tuple[Granularity, AttentionShape]:
    gate = output_gate(settings, layer)
    assert gate is not None
    return gate.granularity, settings.shape_on_layer(layer)


def _merge(layout: FusedLayout, granularity: Granularity, shape: AttentionShape, *rows: Tensor) -> Tensor:
    return merge(GateRows(*rows), layout, granularity, shape)


def _half(number: int, both: Tensor) -> Tensor:
    return both.chunk(2)[number]


def _join(gate: Tensor, up: Tensor) -> Tensor:
    return torch.cat((gate, up))
