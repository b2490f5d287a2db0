"""How far training moved the gates of a decoder: their scores on one text, and their weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gatelab.data.loader import Batch
from gatelab.gates.gate import Gate
from gatelab.model.decoder import Decoder

MOVED_BY = 0.1
_Place = tuple[int, str]


class GateMovement(NamedTuple):
    """One gate of one layer before and after.

    Scores are over all tokens, heads and channels of the same text: their means, the mean of |after - before|, and the
    share that moved by more than 0.1. Norms are Frobenius norms over all the gate's parameters but biases,
    ``norm_of_change`` that of their difference; ``norm_of_query``, for scale, that of the layer's query weights after.
    """

    layer: int
    position: str
    score_before: float
    score_after: float
    mean_change: float
    share_moved: float
    norm_before: float
    norm_after: float
    norm_of_change: float
    norm_of_query: float


@torch.no_grad()
def gate_movement(before: Decoder, after: Decoder, windows: Batch) -> list[GateMovement]:
    """The movement of every gate, layer by layer, between two decoders with the same settings."""
    assert before.settings == after.settings
    sums: dict[_Place, Tensor] = {}
    for row in range(len(windows.inputs)):
        ids = windows.inputs[row : row + 1]
        documents = None if windows.documents is None else windows.documents[row : row + 1]
        old, new = _scores(before, ids, documents), _scores(after, ids, documents)
        for place, score in new.items():
            change = (score - old[place]).abs()
            parts = (old[place].sum(), score.sum(), change.sum(), (change > MOVED_BY).sum(), change.numel())
            sums[place] = sums.get(place, torch.zeros(5, dtype=torch.float64)) + torch.tensor(
                [float(part) for part in parts], dtype=torch.float64
            )
    return [_movement(before, after, place, sums[place]) for place in _gates(after)]


def mean_score_change(movement: Sequence[GateMovement]) -> float:
    """The mean of |after - before| over layers and positions, each weighing the same."""
    return sum(one.mean_change for one in movement) / len(movement)


def _scores(decoder: Decoder, ids: Int[Tensor, "1 T"], documents: Int[Tensor, "1 T"] | None) -> dict[_Place, Tensor]:
    """Every gate's scores in one pass, in float64."""
    with _watched(decoder) as seen:
        decoder.hidden(ids, documents)
    return seen


@contextmanager
def _watched(decoder: Decoder) -> Iterator[dict[_Place, Tensor]]:
    seen: dict[_Place, Tensor] = {}

    def hook(place: _Place) -> Any:
        def remember(gate: nn.Module, arguments: tuple[Tensor, Tensor]) -> None:
            seen[place] = arguments[1].double()

        return remember

    handles = [gate.register_forward_pre_hook(hook(place)) for place, gate in _gates(decoder).items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _gates(decoder: Decoder) -> dict[_Place, Gate]:
    """The gates of a decoder by layer and position."""
    found = {}
    for number, layer in enumerate(decoder.model.layers):
        for position, gate in layer.get_submodule("self_attn.gates").named_children():
            assert isinstance(gate, Gate)
            found[number, position] = gate
    return found


def _movement(before: Decoder, after: Decoder, place: _Place, sums: Float[Tensor, "5"]) -> GateMovement:
    layer, position = place
    old, new = (_weights(_gates(decoder)[place]) for decoder in (before, after))
    query = after.model.layers[layer].get_parameter("self_attn.q_proj.weight").double()
    score_before, score_after, mean_change, share_moved = (sums[:4] / sums[4]).tolist()
    return GateMovement(
        layer=layer,
        position=position,
        score_before=score_before,
        score_after=score_after,
        mean_change=mean_change,
        share_moved=share_moved,
        norm_before=float(old.norm()),
        norm_after=float(new.norm()),
        norm_of_change=float((new - old).norm()),
        norm_of_query=float(query.norm()),
    )


def _weights(gate: Gate) -> Float[Tensor, " weights"]:
    """All parameters of a gate but biases, in one vector, float64."""
    return torch.cat([p.double().flatten() for name, p in gate.named_parameters() if not name.endswith("bias")])
