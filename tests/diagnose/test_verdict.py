"""The rule of the verdict, just below and just above each of its limits."""

from __future__ import annotations

import pytest
from result_rows import made_up_result, row

from gatelab.diagnose.results import NamedResult
from gatelab.diagnose.verdict import verdict_of


def of(*rows: dict) -> NamedResult:
    return NamedResult("model", rows, {})


def attention(*shares: float, floor: float = 0.01) -> list[dict]:
    return [row("first_token_attention", share, layer=0, head=head, floor=floor) for head, share in enumerate(shares)]


@pytest.mark.parametrize(
    ("shares", "floor", "answer"),
    [
        ((0.3001, 0.01, 0.01), 0.01, "yes"),
        ((0.3, 0.01, 0.01), 0.01, "weak"),
        ((0.05, 0.05), 0.01, "weak"),
        ((0.0499, 0.05), 0.01, "no"),
        ((0.3001, 0.01, 0.01), 0.03, "in some heads"),
        ((0.3, 0.01, 0.01), 0.03, "no"),
    ],
)
def test_a_sink_needs_a_head_above_its_limit_and_a_mean_of_five_floors(
    shares: tuple[float, ...], floor: float, answer: str
) -> None:
    sink = verdict_of(of(*attention(*shares, floor=floor))).sink
    assert sink is not None
    assert sink.answer == answer
    assert sink.share_of_heads == sum(share > 0.3 for share in shares) / len(shares)
    assert sink.floor == pytest.approx(floor)


def test_the_mean_is_over_heads_then_over_layers_and_leaves_other_queries_out() -> None:
    rows = [
        row("first_token_attention", 0.2, layer=0, head=0, floor=0.01),
        *(row("first_token_attention", 0.4, layer=1, head=head, floor=0.03) for head in range(3)),
        row("first_token_attention", 0.9, layer=0, head=0, floor=0.01, query_range="from_64"),
        row("first_token_attention", None, layer=2, head=0, floor=0.5),
    ]
    sink = verdict_of(of(*rows)).sink
    assert sink is not None
    assert (sink.mean, sink.floor) == (pytest.approx(0.3), pytest.approx(0.02))
    assert (sink.worst_layer, sink.worst_layer_mean) == (1, pytest.approx(0.4))
    assert sink.share_of_heads == 0.75


@pytest.mark.parametrize(
    ("largest", "median", "massive"),
    [(100.1, 0.1, True), (100.0, 0.01, False), (500.0, 0.5, False), (500.1, 0.5, True), (101.0, 0.0, True)],
)
def test_a_massive_activation_exceeds_both_limits(largest: float, median: float, massive: bool) -> None:
    rows = [
        row("largest_activation", largest, layer=3, channel=17),
        row("largest_activation_token", 5.0, layer=3, channel=17),
        row("median_activation", median, layer=3),
        row("largest_activation", 9e9, layer=-1, channel=1),
        row("median_activation", 1.0, layer=-1),
    ]
    verdict = verdict_of(of(*rows)).massive
    assert verdict is not None
    assert verdict.layers == ([3] if massive else [])
    assert (verdict.largest, verdict.layer, verdict.token, verdict.channel) == (largest, 3, 5, 17)
    assert verdict.mean_of_maxima == largest  # the embedding, layer -1, is no layer


def test_flags_of_gates_are_counted_by_head_and_not_for_the_whole_layer_too() -> None:
    rows = [row("gate_mean[value]", 0.25, layer=0)]
    rows += [row("gate_mean[value]", mean, layer=0, head=head) for head, mean in enumerate((0.01, 0.02, 0.72))]
    rows += [row("gate_shut[value]", 0.0, layer=0), row("gate_sparse[value]", 0.0, layer=0)]
    rows += [row("gate_shut[value]", flag, layer=0, head=head) for head, flag in enumerate((1.0, 0.0, 0.0))]
    rows += [row("gate_sparse[value]", flag, layer=0, head=head) for head, flag in enumerate((1.0, 1.0, 0.0))]
    (gate,) = verdict_of(of(*rows)).gates
    assert gate == ("value", 0.25, 3, 1, 2)


def test_gates_without_flags_are_not_judged() -> None:
    (gate,) = verdict_of(of(row("gate_mean[sdpa_output]", 0.4, layer=0, head=0))).gates
    assert (gate.shut, gate.sparse) == (None, None)
    assert verdict_of(of(row("gate_mean[sdpa_output]", 0.4, layer=0, head=0))).sentences()[-1] == (
        "Gates at sdpa_output: mean score 0.400; none judged shut or not, for lack of tokens or bounds."
    )


def test_the_sentences_are_plain_words() -> None:
    rows = [
        *attention(0.6, 0.1, floor=0.0133),
        row("largest_activation", 22_431.0, layer=0, channel=378),
        row("largest_activation_token", 0.0, layer=0, channel=378),
        row("median_activation", 0.5, layer=0),
    ]
    assert verdict_of(of(*rows)).sentences() == [
        "Sink: yes, 50 % of heads above 0.3; mean 0.350, uniform floor 0.013.",
        "Massive activations: yes, in 1 of 1 layers; largest |h| 22,431.0 (layer 0, token 0, channel 378), "
        "44,862 times the layer's median.",
        "Gates: none.",
    ]
    assert verdict_of(of()).sentences() == ["Sink: not measured.", "Massive activations: not measured.", "Gates: none."]


def test_a_made_up_model_has_its_sink() -> None:
    strong, weak = (verdict_of(made_up_result(sink=sink)).sink for sink in (0.6, 0.0))
    assert strong is not None and weak is not None
    assert (strong.answer, weak.answer) == ("yes", "no")
