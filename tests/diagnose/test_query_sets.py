"""Figures of named sets of queries against the full maps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_maps import CASES, B, H, T, make_truth
from torch import Tensor

from gatelab.diagnose.measure import measure
from gatelab.diagnose.recorder import Recorder
from gatelab.gates.variants import find_variant
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.settings import ModelSettings


def some_queries(num_queries: int) -> dict[str, Tensor]:
    drawn = torch.rand(B, num_queries, generator=torch.Generator().manual_seed(9)) < 0.4
    return {"drawn": drawn, "others": ~drawn, "nobody": torch.zeros_like(drawn)}


def mean_of(values: Tensor, members: Tensor) -> list[float]:
    """Mean by head of (B H T) values over the members (B T), summed one by one."""
    where = members.nonzero().tolist()
    return [sum(values[b, h, t].item() for b, t in where) / len(where) for h in range(values.shape[1])]


@pytest.mark.parametrize("name", CASES)
def test_sets_have_the_means_of_their_queries(name: str) -> None:
    truth = make_truth(name, torch.float64)
    call = truth.call
    sets = some_queries(call.visibility.num_queries)
    recorder = Recorder()
    recorder.start(torch.zeros(B, call.visibility.num_queries, dtype=torch.int64), query_sets=sets)
    recorder.record(call)
    figures = {(one.metric, one.query_range): one for one in recorder.measurements()[0][0].figures}
    assert not [key for key in figures if key[1] == "nobody"]
    even = 1 / truth.visible.sum(-1).clamp(min=1).double()
    real = torch.ones_like(truth.counted)
    if call.visibility.real is not None:
        real = call.visibility.real[:, call.visibility.past :]
    for label in ("drawn", "others"):
        members = sets[label] & truth.counted & truth.visible[..., 0]
        if members.any():
            figure = figures["first_token_attention", label]
            assert figure.values == pytest.approx(mean_of(truth.weights[..., 0], members), abs=1e-11)
            assert figure.floors == pytest.approx([even[members].mean().item()] * H)
            assert figure.n == members.sum()
        scores = call.scores["sdpa_output"].mean(-1).transpose(1, 2)
        gate = figures["gate_mean[sdpa_output]", label]
        assert gate.values == pytest.approx(mean_of(scores, sets[label] & real), abs=1e-12) and gate.floors is None
        assert (("learned_sink_attention", label) in figures) == (call.learned_sinks is not None)
        if call.learned_sinks is not None:
            members, floor = sets[label] & truth.counted, even / (1 + even)
            figure = figures["learned_sink_attention", label]
            assert figure.values == pytest.approx(mean_of(1 - truth.weights.sum(-1), members), abs=1e-11)
            assert figure.floors == pytest.approx([floor[members].mean().item()] * H)


def make_decoder(gate: str = "sdpa_elementwise") -> tuple[Decoder, Tensor]:
    sizes = {"width": 40, "num_layers": 2, "num_heads": H, "num_kv_heads": 2, "head_size": 8, "feedforward_width": 24}
    gates = find_variant(gate).gates
    decoder = Decoder(ModelSettings(vocab_size=29, max_context=T, init_std=0.3, gates=gates, **sizes))  # type: ignore[arg-type]
    initialize(decoder, 0)
    return decoder, torch.randint(29, (B, T), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_all_queries_as_a_set_have_the_figures_of_all(batch_size: int) -> None:
    decoder, tokens = make_decoder("sdpa_and_value")
    found = measure(decoder, tokens, batch_size=batch_size, query_sets={"each": torch.ones(B, T, dtype=torch.bool)})
    summary = found.summary()
    for metric in ("first_token_attention", "first_token_attention_floor", "gate_mean"):
        assert summary[f"{metric}[each]"] == pytest.approx(summary[metric], rel=1e-6)
    assert summary["learned_sink_attention[each]"] is None
    rows = found.rows("model")
    assert {row["metric"] for row in rows if row["query_range"] == "each"} == {
        "first_token_attention",
        "gate_mean[sdpa_output]",
        "gate_mean[value]",
    }
    assert "first_token_attention[each]" in found.to_mapping()["summary"]


def test_an_input_independent_gate_has_one_mean_everywhere() -> None:
    decoder, tokens = make_decoder("sdpa_input_independent")
    summary = measure(decoder, tokens, query_sets=some_queries(T)).summary()
    assert summary["gate_mean[drawn]"] == summary["gate_mean[others]"] == summary["gate_mean"] == 0.5
    assert summary["gate_mean[nobody]"] is None


def test_without_sets_nothing_is_added() -> None:
    decoder, tokens = make_decoder()
    assert not [key for key in measure(decoder, tokens).summary() if "[" in key]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({"all": torch.ones(B, T).bool()}, "^a query set can't be named 'all', which is a query range; choose another"),
        ({"from_3": torch.ones(B, T).bool()}, "^a query set can't be named 'from_3'"),
        (
            {"late": torch.ones(B, T - 1).bool()},
            rf"^query set 'late' is torch.bool of shape \(3, {T - 1}\); give a boolean of the tokens' shape \(3, ",
        ),
        ({"late": torch.ones(B, T)}, r"^query set 'late' is torch.float32 of shape"),
    ],
)
def test_sets_that_mean_nothing_are_refused(sets: dict[str, Any], message: str) -> None:
    decoder, tokens = make_decoder()
    with pytest.raises(ValueError, match=message):
        measure(decoder, tokens, query_sets=sets)
