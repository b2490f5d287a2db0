"""Bytes that each rank of a run takes, from the shapes; what is held at one moment adds up.

P parameters of a rank's tensor-parallel part, S ranks that share them, s bytes of a stored number (4; 8 in float64), a
bytes of an activation, P_layer parameters of the largest layer (with a rank's own experts alone, where the S ranks
share them), P_rest of embedding, last norm and head.

    weights, gradients           s P / S each
    optimizer                    2 s P / S (AdamW's two moments)
    gathered weights             several data-parallel ranks: a (P_rest + 2 P_layer), the layer at work and the one
                                 fetched meanwhile; one, and a < s: a P, the casts that autograd keeps, or with
                                 recomputed layers a (P_rest + P_layer)
    gathered gradients           several data-parallel ranks: (a + s) max(P_layer, P_rest), as computed and as summed
    activations                  gatelab.model.activations
    loss                         gradients of the logits, gatelab.model.activations.loss_working_bytes
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

import torch

from gatelab.model.activations import Piece, activation_bytes, loss_working_bytes
from gatelab.model.decoder import Decoder
from gatelab.model.settings import ModelSettings
from gatelab.train.parallel.mesh import mesh_shape, require_divisible
from gatelab.train.settings import ParallelSettings, RunSettings

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_GATE = re.compile(r"self_attn\.gates\.(\w+)\.(.+)")
_EXPERTS = re.compile(r"mlp\.experts\.")
_BY_HEADS = re.compile(r"self_attn\.(q_proj\.|q_b_proj\.|kv_b_proj\.|o_proj\.weight|control\.|sink\.logits)")
_BY_KV_HEADS = re.compile(r"self_attn\.(k_proj\.|v_proj\.|sink\.(key|value))")
_BY_WIDTH = re.compile(r"mlp\.(shared_expert\.)?(gate|up|down)_proj\.weight")
_ELEMENT_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


class MemoryPerRank(NamedTuple):
    """Bytes of each kind on one rank."""

    weights: int | float
    gradients: int | float
    optimizer: int | float
    gathered_weights: int | float
    gathered_gradients: int | float
    activations: int | float
    loss: int | float

    @property
    def total(self) -> int | float:
        """All of them: a little above the true peak, because not all are largest at the same moment."""
        return sum(self)


class RankParameters(NamedTuple):
    """Numbers of parameters of one tensor-parallel rank: those that its shard group stores between its ranks, those of
    the largest layer as it is gathered on a rank, and those outside of layers."""

    total: int | float
    largest_layer: int | float
    outside_layers: int | float


@functools.cache
def count_rank_parameters(settings: ModelSettings, parallel: ParallelSettings) -> RankParameters:
    """The parameters that each rank of a tensor-parallel group has."""
    stored, gathered = [0.0] * settings.num_layers, [0.0] * settings.num_layers
    outside = 0.0
    with torch.device("meta"):
        decoder = Decoder(settings)
    for name, parameter in decoder.named_parameters():
        found = _LAYER.match(name)
        if found is None:
            outside += parameter.numel()
        else:
            layer, short = int(found[1]), name[found.end() :]
            own = parameter.numel() / _num_holders(settings, layer, short, parallel.tensor)
            stored[layer] += own
            gathered[layer] += own / parallel.expert if _EXPERTS.match(short) else own
    return RankParameters(sum(stored) + outside, max(gathered), outside)


def _num_holders(settings: ModelSettings, layer: int, name: str, tensor: int) -> int:
    """Among how many tensor ranks a layer's parameter is split, as ``gatelab.train.parallel.tensor`` does it."""
    for_kv_heads = tensor if tensor <= settings.num_kv_heads else 1
    if _EXPERTS.match(name) or _BY_HEADS.match(name) or _BY_WIDTH.match(name):
        return tensor
    if _BY_KV_HEADS.match(name):
        return for_kv_heads
    gate = _GATE.match(name)
    if gate is None or gate[1] == "dense_output" or "down" in gate[2]:
        return 1
    spec = next(spec for spec in settings.gates_on_layer(layer) if spec.position == gate[1])
    if gate[2] == "logits" and spec.sharing == "head_shared":
        return 1
    return for_kv_heads if gate[1] in ("key", "value") else tensor


def sequences_at_once(run: RunSettings, num_gpus: int) -> int:
    """Sequences that one rank computes at once; ``ValueError`` when a step's batch can't be dealt out evenly."""
    replicate, shard, _ = mesh_shape(run.train.parallel, num_gpus)
    pieces = replicate * shard * run.train.accumulation
    if run.train.sequences_per_step % pieces:
        raise ValueError(
            f"train.sequences_per_step={run.train.sequences_per_step} can't be dealt out evenly to {replicate * shard} "
            f"data-parallel ranks with train.accumulation={run.train.accumulation}; make it a multiple of {pieces}"
        )
    return run.train.sequences_per_step // pieces


def memory_per_rank(run: RunSettings, num_gpus: int) -> MemoryPerRank:
    """Bytes on one of ``num_gpus`` ranks; ``ValueError`` when the run can't be spread over so many."""
    parallel, element = run.train.parallel, _ELEMENT_BYTES[run.train.precision]
    stored = max(element, 4)
    replicate, shard, _ = mesh_shape(parallel, num_gpus)
    require_divisible(run.model, parallel)
    parameters = count_rank_parameters(run.model, parallel)  # pyright: ignore[reportArgumentType]: frozen, so hashable
    piece = Piece(sequences_at_once(run, num_gpus), run.data.context, element, parallel.tensor)
    share, gathered, gradients = stored * parameters.total / shard, 0.0, 0.0
    if replicate * shard > 1:
        gathered = element * (parameters.outside_layers + 2 * parameters.largest_layer)
        gradients = (element + stored) * max(parameters.largest_layer, parameters.outside_layers)
    elif element < stored:
        kept = parameters.outside_layers + parameters.largest_layer if run.train.recompute else parameters.total
        gathered = element * kept
    return MemoryPerRank(
        weights=share,
        gradients=share,
        optimizer=2 * share,
        gathered_weights=gathered,
        gathered_gradients=gradients,
        activations=activation_bytes(run.model, piece, run.train.recompute),
        loss=loss_working_bytes(run.model, piece),
    )
