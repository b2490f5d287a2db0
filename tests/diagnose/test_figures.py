"""Every figure of an attention layer against its definition, read off the full maps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_maps import CASES, DOCUMENTS, B, Cv, H, K, T, Truth, make_truth, padded
from torch import Tensor

from gatelab.diagnose.calls import AttentionCall, Visibility
from gatelab.diagnose.head_means import HeadFigure
from gatelab.diagnose.recorder import Recorder

TOLERANCE = {torch.float64: 1e-11, torch.float32: 5e-6, torch.bfloat16: 1e-4}
TOKENS = torch.randint(7, (B, T), generator=torch.Generator().manual_seed(3))
DELIMITERS = {"two": [2], "five or six": [5, 6], "none": [99]}


def record(*calls: AttentionCall, tokens: Tensor = TOKENS, **options: Any) -> dict[tuple[str, str], HeadFigure]:
    recorder = Recorder(**{"full": True, "skipped_queries": (1, 4, 999), "delimiters": DELIMITERS, **options})
    for call in calls:
        recorder.start(tokens)
        recorder.record(call)
    layers, _ = recorder.measurements()
    assert [layer.layer for layer in layers] == [1]
    return {(figure.metric, figure.query_range): figure for figure in layers[0].figures}


def means(values: Tensor, counted: Tensor) -> list[float]:
    """Mean over counted (b, t) of (B H T) values, head by head."""
    where = counted.nonzero().tolist()
    return [sum(values[b, h, t].item() for b, t in where) / len(where) for h in range(values.shape[1])]


def first_keys(sight: Visibility) -> Tensor:
    """The first real key of each query's document, by a loop; -1 where there is none."""
    found = torch.full((B, sight.num_queries), -1)
    for b in range(B):
        for t in range(sight.num_queries):
            for s in reversed(range(T)):
                real = sight.real is None or sight.real[b, s]
                if real and (sight.documents is None or sight.documents[b, s] == sight.documents[b, sight.past + t]):
                    found[b, t] = s
    return found


def on_keys(truth: Truth, keys: Callable[[int, int], list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Attention (B H T) to the keys asked about, who counts (B T), and what is even (B 1 T)."""
    number = truth.visible.sum(-1)
    mass, even = torch.zeros(truth.weights.shape[:3], dtype=torch.float64), torch.zeros(number.shape).double()
    counted = torch.zeros_like(truth.counted)
    for b, t in truth.counted.nonzero().tolist():
        seen = [s for s in keys(b, t) if 0 <= s < T and truth.visible[b, t, s]]
        counted[b, t] = bool(seen)
        mass[b, :, t] = truth.weights[b, :, t][:, seen].sum(-1)
        even[b, t] = len(seen) / int(number[b, t])
    return mass, counted, even[:, None]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_attention_to_first_keys(name: str, dtype: torch.dtype) -> None:
    truth, tolerance = make_truth(name, dtype), TOLERANCE[dtype]
    sight = truth.call.visibility
    found = record(truth.call, full=False)
    firsts = first_keys(sight)
    since = torch.arange(sight.past, T) - firsts
    asked = {
        "first_token_attention": lambda b, t: [0],
        "first_real_key_attention": lambda b, t: [int(firsts[b, t])],
        "first_4_attention": lambda b, t: list(range(firsts[b, t], firsts[b, t] + 4)),
    }
    for metric, keys in asked.items():
        for skipped in (0, 1, 4, 999) if metric == "first_token_attention" else (0,):
            mass, counted, even = on_keys(truth, keys)
            counted = counted & (since >= skipped)
            figure = found.get((metric, f"from_{skipped}" if skipped else "all"))
            if not counted.any():
                assert figure is None
                continue
            assert figure is not None and figure.n == counted.sum() and figure.floors is not None
            assert figure.values == pytest.approx(means(mass, counted), abs=tolerance)
            assert figure.floors == pytest.approx(means(even, counted) * H, abs=1e-12)
    assert ("learned_sink_attention", "all") in found or truth.call.learned_sinks is None
    mass, counted, even = on_keys(truth, asked["first_real_key_attention"])
    samples = [b for b in range(B) if counted[b].any()]
    shares = torch.stack([mass[b][:, counted[b]].mean(-1) for b in samples])
    floors = torch.stack([even[b][:, counted[b]].mean(-1) for b in samples])
    rate = found["sink_rate", "all"]
    assert (shares - 0.3).abs().min() > 2e-5 and rate.n == len(samples)
    assert rate.values == pytest.approx((shares > 0.3).double().mean(0).tolist())
    assert rate.floors == pytest.approx([(floors > 0.3).double().mean().item()] * H)


@pytest.mark.parametrize("name", ["learned_sinks", "padding_and_sinks", "everything"])
def test_learned_sinks_stand_apart(name: str) -> None:
    truth = make_truth(name, torch.float64)
    figure = record(truth.call, full=False)["learned_sink_attention", "all"]
    even = 1 / (truth.visible.sum(-1) + 1).double()
    assert figure.values == pytest.approx(means(1 - truth.weights.sum(-1), truth.counted), abs=1e-11)
    assert figure.floors == pytest.approx(means(even[:, None], truth.counted) * H) and min(figure.values) > 0.01


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_whole_patterns(name: str, dtype: torch.dtype) -> None:
    truth, tolerance = make_truth(name, dtype), TOLERANCE[dtype]
    call, sight, weights = truth.call, truth.call.visibility, truth.weights
    found = record(call)
    number = truth.visible.sum(-1)[:, None].double()
    sink = 1 - weights.sum(-1) if call.learned_sinks is not None else torch.zeros(weights.shape[:3]).double()
    entropy = torch.special.entr(weights).sum(-1) + torch.special.entr(sink)
    figure = found["attention_entropy", "all"]
    assert figure.values == pytest.approx(means(entropy, truth.counted), abs=20 * tolerance)
    assert figure.floors == pytest.approx(means(number.clamp(min=1).log(), truth.counted) * H)
    far = (torch.arange(sight.past, T)[:, None] - torch.arange(T)).abs().double()
    distance = (weights * far).sum(-1) / weights.sum(-1).clamp(min=1e-30)
    figure = found["attention_distance", "all"]
    assert figure.values == pytest.approx(means(distance, truth.counted), abs=20 * tolerance)
    if sight.causal:
        even_distance = (truth.visible[:, None] * far).sum(-1) / number.clamp(min=1)
        assert figure.floors == pytest.approx(means(even_distance, truth.counted) * H)
    else:
        assert figure.floors is None
    columns = (weights * truth.counted[:, None, :, None]).sum((0, 2))
    even = ((truth.visible / number[:, 0].clamp(min=1)[..., None]) * truth.counted[..., None]).sum((0, 1))
    top, number_counted = columns.argmax(-1), int(truth.counted.sum())
    assert found["top_key", "all"].values == top.tolist()
    shares = (columns.amax(-1) / number_counted).tolist()
    assert found["top_key_attention", "all"].values == pytest.approx(shares, abs=tolerance)
    assert found["top_key_attention", "all"].floors == pytest.approx((even[top] / number_counted).tolist())
    seen = (truth.visible & truth.counted[..., None])[:, None]
    largest = truth.logits.masked_fill(~seen, -math.inf).amax((0, 2, 3))
    assert found["largest_logit", "all"].values == pytest.approx(largest.tolist(), abs=20 * tolerance)
    for delimiter, ids in DELIMITERS.items():
        mass, counted, even = on_keys(truth, lambda b, t, ids=ids: [s for s in range(T) if TOKENS[b, s] in ids])
        figure = found.get((f"delimiter_attention[{delimiter}]", "all"))
        assert (figure is None) == (not counted.any())
        if figure is not None:
            assert figure.n == counted.sum() and figure.floors is not None
            assert figure.values == pytest.approx(means(mass, counted), abs=tolerance)
            assert figure.floors == pytest.approx(means(even, counted) * H)


@pytest.mark.parametrize("name", ["plain", "left_padding", "window", "learned_sinks", "softcap"])
@pytest.mark.parametrize("kind", ["elementwise", "headwise", "shared", "added", "none", "recovered"])
def test_effective_sink(name: str, kind: str) -> None:
    truth = make_truth(name, torch.float64)
    call = truth.call
    scores = call.scores["sdpa_output"]
    scores = {"headwise": scores[..., :1], "shared": scores[:, :, :1]}.get(kind, scores)
    gate = torch.ones_like(scores) if kind in ("added", "none") else scores
    gated = call.output + scores if kind == "added" else call.output * gate
    changes: dict[str, Any] = {"scores": {"sdpa_output": scores}, "gated_output": gated}
    if kind == "none":
        changes = {"scores": {}, "gated_output": None}
    elif kind == "recovered":
        changes = {"scores": {}, "gated_output": gated}
    elif kind == "added":
        changes["added"] = frozenset({"sdpa_output"})
    found = record(dataclasses.replace(call, **changes))["effective_sink", "all"]
    mass, counted, _ = on_keys(truth, lambda b, t: [0])
    assert call.output_weight is not None
    expected = []
    for h in range(H):
        weight = call.output_weight[:, h * Cv : (h + 1) * Cv]
        above, below = 0.0, 0.0
        for b, t in counted.nonzero().tolist():
            score = gate.expand(-1, -1, H, Cv)[b, t, h]
            above += (weight @ (mass[b, h, t] * score * call.value[b, 0, h // (H // K)])).norm().item()
            below += (weight @ gated[b, t, h]).norm().item()
        expected.append(above / below)
    assert found.values == pytest.approx(expected, rel=1e-9) and found.n == counted.sum()


def test_key_zero_alone_is_all_of_the_output() -> None:
    truth = make_truth("plain", torch.float64)
    query = truth.call.query[:, :1], truth.call.key[:, :1], truth.call.value[:, :1]
    call = dataclasses.replace(
        truth.call,
        query=query[0],
        key=query[1],
        value=query[2],
        output=truth.call.output[:, :1],
        lse=truth.call.lse[..., :1],
        visibility=Visibility(1, 1),
        scores={},
        gated_output=None,
    )
    assert record(call, tokens=TOKENS[:, :1])["effective_sink", "all"].values == pytest.approx([1.0] * H)


@pytest.mark.parametrize("name", ["plain", "left_padding", "right_padding", "earlier_keys"])
def test_magnitudes_and_output_ranks_are_of_real_queries(name: str) -> None:
    truth = make_truth(name, torch.float64)
    call, sight = truth.call, truth.call.visibility
    assert call.gated_output is not None
    found = record(call)
    real = torch.ones(B, sight.num_queries).bool() if sight.real is None else sight.real[:, sight.past :]
    for prefix, output in (("", call.output), ("gated_", call.gated_output)):
        assert found[f"{prefix}output_magnitude", "all"].values == pytest.approx(
            [output[:, :, h][real].abs().mean().item() for h in range(H)]
        )
        effective, stable = [], []
        for h in range(H):
            rows = output[:, :, h][real]
            values = torch.linalg.svdvals(rows - rows.mean(0))
            shares = values / values.sum()
            effective.append(math.exp(-sum(p * math.log(p) for p in shares.tolist() if p > 0)))
            stable.append((values.square().sum() / values[0] ** 2).item())
        assert found[f"{prefix}output_effective_rank", "all"].values == pytest.approx(effective, rel=1e-6)
        assert found[f"{prefix}output_stable_rank", "all"].values == pytest.approx(stable, rel=1e-6)


@pytest.mark.parametrize("name", ["left_padding", "right_padding", "a_row_of_padding"])
def test_nan_in_padding_enters_nothing(name: str) -> None:
    clean, truth = make_truth(name, torch.float64).call, make_truth(name, torch.float64, poison=math.nan).call
    assert not truth.query.isfinite().all()
    blind = (~truth.visibility.real_queries())[:, :, None, None]
    spoiled = [one.masked_fill(blind, math.nan) for one in (truth.output, truth.output * 0.5)]
    scores = {"sdpa_output": truth.scores["sdpa_output"].masked_fill(blind, math.nan)}
    lse = truth.lse.masked_fill(blind[:, None, :, 0, 0], math.nan)
    changes = {"output": spoiled[0], "gated_output": spoiled[1], "scores": scores, "lse": lse}
    found = record(dataclasses.replace(truth, **changes))
    expected = record(dataclasses.replace(clean, gated_output=clean.output * 0.5))
    assert found.keys() == expected.keys()
    for key, figure in found.items():
        assert all(map(math.isfinite, figure.values)), key
        assert figure.values == pytest.approx(expected[key].values, abs=1e-12), key


def rows_of(call: AttentionCall, rows: slice) -> AttentionCall:
    """The call of some samples alone."""
    sight = call.visibility
    real, documents = (None if one is None else one[rows] for one in (sight.real, sight.documents))
    tensors = {name: getattr(call, name)[rows] for name in ("query", "key", "value", "output", "lse", "gated_output")}
    scores = {position: one[rows] for position, one in call.scores.items()}
    sight = dataclasses.replace(sight, real=real, documents=documents)
    return dataclasses.replace(call, **tensors, scores=scores, visibility=sight)


@pytest.mark.parametrize("name", CASES)
def test_batches_add_up_to_the_whole(name: str) -> None:
    call = make_truth(name, torch.float64).call
    expected = record(call)
    recorder = Recorder(full=True, skipped_queries=(1, 4, 999), delimiters=DELIMITERS)
    for rows in (slice(0, 1), slice(1, 3)):
        recorder.start(TOKENS[rows])
        recorder.record(rows_of(call, rows))
    figures = recorder.measurements()[0][0].figures
    assert len(figures) == len(expected)
    for figure in figures:
        wanted = expected[figure.metric, figure.query_range]
        assert figure.values == pytest.approx(wanted.values, rel=1e-9, abs=1e-12) and figure.n == wanted.n
        assert figure.floors is None or figure.floors == pytest.approx(wanted.floors)


def test_batches_of_other_lengths_add_up() -> None:
    """Column sums grow with the longest; a short batch after a long one, and the other way round."""
    call = make_truth("plain", torch.float64).call
    short = dataclasses.replace(
        call,
        query=call.query[:, :9],
        key=call.key[:, :9],
        value=call.value[:, :9],
        output=call.output[:, :9],
        lse=call.lse[..., :9],
        scores={},
        gated_output=None,
        visibility=Visibility(9, 9),
    )
    figures = []
    for order in ((call, short), (short, call)):
        recorder = Recorder(full=True)
        for one in order:
            recorder.start(TOKENS[:, : one.query.shape[1]])
            recorder.record(one)
        figures.append({one.metric + one.query_range: one.values for one in recorder.measurements()[0][0].figures})
    assert figures[0] == {metric: pytest.approx(values) for metric, values in figures[1].items()}


def test_core_figures_need_no_second_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gatelab.diagnose.patterns.attention_pattern", lambda call: 1 / 0)
    call = make_truth("plain", torch.float32).call
    assert ("first_token_attention", "all") in record(call, full=False, delimiters={})
    for options in ({"full": False}, {"delimiters": {}}):
        with pytest.raises(ZeroDivisionError):
            record(call, **options)


def test_delimiters_alone_give_the_figures_of_maps_and_no_more() -> None:
    call = make_truth("full", torch.float64).call
    few, all_figures = record(call, full=False), record(call)
    assert all(few[place] == all_figures[place] for place in few)
    more = {metric for metric, _ in all_figures.keys() - few.keys()}
    assert {"effective_sink", "vo_effective_rank"} <= more and not more & {"attention_distance", "top_key"}
    assert any(metric.startswith("delimiter_attention[") for metric, _ in few)


def test_documents_and_padding_of_the_cases_differ() -> None:
    assert len({row.tolist().__repr__() for row in DOCUMENTS}) == B == len(padded(0, 3, 7))
