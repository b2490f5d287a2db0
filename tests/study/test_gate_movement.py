"""Movement of gates against plain sums over what the gates gave."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from gatelab.data.loader import Batch
from gatelab.gates.gate import Gate
from gatelab.gates.spec import GateSpec
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.settings import ModelSettings
from gatelab.study.gate_movement import gate_movement, mean_score_change

SIZES = {
    "vocab_size": 97,
    "width": 40,
    "num_layers": 3,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_size": 8,
    "feedforward_width": 56,
    "max_context": 64,
    "init_std": 0.2,
}
GATES = (
    GateSpec(activation="double_sigmoid", initialization="zeros"),
    GateSpec(position="value", granularity="headwise", bias=0.5, layers=(0, 2)),
)


def decoders() -> tuple[Decoder, Decoder]:
    """A decoder, and a copy whose every weight moved."""
    before = Decoder(ModelSettings.parse({**SIZES, "gates": [gate.to_mapping() for gate in GATES]}))
    initialize(before, 3)
    after = copy.deepcopy(before)
    generator = torch.Generator().manual_seed(5)
    for parameter in after.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return before, after


def windows(documents: bool = False) -> Batch:
    ids = torch.randint(97, (3, 17), generator=torch.Generator().manual_seed(9))
    return Batch(ids, ids, torch.tensor([[0] * 7 + [1] * 10] * 3) if documents else None)


def outputs_of_gates(decoder: Decoder, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Scores in the order in which gates computed them, all rows in one pass."""
    computed: list[Tensor] = []
    plain = Gate.scores

    def scores(self: Gate, sources: dict[str, Tensor]) -> Tensor:
        computed.append(plain(self, sources))
        return computed[-1]

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(Gate, "scores", scores)
        decoder.hidden(batch.inputs, batch.documents)
    return computed


@pytest.mark.parametrize("documents", [False, True])
def test_figures_are_those_of_loops(documents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = decoders()
    batch = windows(documents)
    # A layer's value gate comes before the gate on its output.
    places = [(0, "value"), (0, "sdpa_output"), (1, "sdpa_output"), (2, "value"), (2, "sdpa_output")]
    old, new = (outputs_of_gates(one, batch, monkeypatch) for one in (before, after))
    found = {(one.layer, one.position): one for one in gate_movement(before, after, batch)}
    assert set(found) == set(places) and [layer for layer, _ in found] == [0, 0, 1, 2, 2]
    for place, was, now in zip(places, old, new, strict=True):
        changes = [abs(a - b) for a, b in zip(now.flatten().tolist(), was.flatten().tolist(), strict=True)]
        one = found[place]
        assert one.score_before == pytest.approx(sum(was.flatten().tolist()) / len(changes), rel=1e-5)
        assert one.score_after == pytest.approx(sum(now.flatten().tolist()) / len(changes), rel=1e-5)
        assert one.mean_change == pytest.approx(sum(changes) / len(changes), rel=1e-4) and one.mean_change > 0.01
        assert one.share_moved == pytest.approx(sum(change > 0.1 for change in changes) / len(changes), abs=0.01)
        name = f"model.layers.{place[0]}.self_attn.gates.{place[1]}.projection.weight"
        weights = [decoder.state_dict()[name].flatten().tolist() for decoder in (before, after)]
        assert one.norm_before == pytest.approx(sum(x * x for x in weights[0]) ** 0.5)
        assert one.norm_after == pytest.approx(sum(x * x for x in weights[1]) ** 0.5)
        difference = [b - a for a, b in zip(*weights, strict=True)]
        assert one.norm_of_change == pytest.approx(sum(x * x for x in difference) ** 0.5)
        query = after.state_dict()[f"model.layers.{place[0]}.self_attn.q_proj.weight"].flatten().tolist()
        assert one.norm_of_query == pytest.approx(sum(x * x for x in query) ** 0.5)
    assert mean_score_change(list(found.values())) == pytest.approx(sum(o.mean_change for o in found.values()) / 5)


def test_what_did_not_move() -> None:
    before, _ = decoders()
    for one in gate_movement(before, copy.deepcopy(before), windows()):
        assert one.mean_change == one.share_moved == one.norm_of_change == 0.0 and one.score_before == one.score_after
        assert one.position == "value" or one.score_before == 1.0


def test_nothing_stays_attached() -> None:
    before, after = decoders()
    gate_movement(before, after, windows())
    assert not any(module._forward_pre_hooks for one in (before, after) for module in one.modules())


def test_an_input_independent_gate_counts_once_a_window() -> None:
    gate = GateSpec(source="parameter", initialization="zeros")
    before = Decoder(ModelSettings.parse({**SIZES, "gates": [gate.to_mapping()]}))
    initialize(before, 3)
    after = copy.deepcopy(before)
    for layer in after.model.layers:
        layer.get_parameter("self_attn.gates.sdpa_output.logits").data.fill_(1.0)
    for one in gate_movement(before, after, windows()):
        assert (one.score_before, one.share_moved) == (0.5, 1.0)
        assert one.mean_change == pytest.approx(torch.tensor(1.0).sigmoid().item() - 0.5)
