"""Entropy of attention and of gate scores, and how they go together, against loops over full maps and single scores."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from attention_maps import CASES, B, H, T, make_truth, naive_map, naive_visible
from torch import Tensor

from gatelab.diagnose.calls import Visibility
from gatelab.diagnose.correlation import CorrelationTotals
from gatelab.diagnose.entropy import attention_entropy, binary_entropy, histogram_entropy
from gatelab.diagnose.gate_scores import GateStatistics, GateTotals
from gatelab.diagnose.measure import measure
from gatelab.gates.variants import find_variant
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.settings import ModelSettings

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-5}


def loop_entropy(weights: list[float]) -> float:
    """-sum p log p of one query's weights; a sink takes what is missing to 1."""
    parts = [*weights, max(1 - sum(weights), 0.0)]
    return -sum(part * math.log(part) for part in parts if part > 1e-15)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_entropy_of_every_query_is_that_of_its_row_of_the_map(name: str, dtype: torch.dtype) -> None:
    truth = make_truth(name, dtype)
    found = attention_entropy(truth.call)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for b, t in truth.counted.nonzero().tolist():
        expected = [loop_entropy(truth.weights[b, h, t].tolist()) for h in range(H)]
        assert found[b, :, t].tolist() == pytest.approx(expected, abs=TOLERANCE[dtype])
    assert max(found[b, :, t].max() for b, t in truth.counted.nonzero().tolist()) > 0.5


def test_entropy_of_scores() -> None:
    scores = [0.0, 0.05, 0.5, 0.8, 1.0]
    found = binary_entropy(torch.tensor(scores).double()).tolist()
    assert found == pytest.approx([loop_entropy([score]) for score in scores]) and found[2] == math.log(2)
    counts = torch.tensor([[5, 0, 0, 0], [3, 3, 3, 3], [1, 0, 6, 2], [0, 0, 0, 0]])
    expected = [0.0, math.log(4), loop_entropy([1 / 9, 6 / 9, 2 / 9]), 0.0]
    assert histogram_entropy(counts).tolist() == pytest.approx(expected)


def statistics_of(scores: Tensor, activation: str | None, is_added: bool = False) -> GateStatistics:
    totals = GateTotals(activation, is_added)
    for rows in (slice(0, 1), slice(1, 3)):
        totals.add(scores[rows], torch.ones(len(scores[rows]), T).bool(), torch.arange(T)[None] == 0, len(scores[rows]))
    found = totals.statistics()
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_entropies_of_a_gate_are_those_of_its_scores(dtype: torch.dtype) -> None:
    logits = 2.5 * torch.randn(B, T, H, 7, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    scores = logits.sigmoid().to(dtype)
    found = statistics_of(scores, "sigmoid")
    for one, chosen in [(found.whole, scores), *zip(found.by_head, scores.split(1, dim=2), strict=True)]:
        values = chosen.double().flatten().tolist()
        expected = statistics.fmean(loop_entropy([value]) for value in values)
        assert one.binary_entropy == pytest.approx(expected, abs=1e-6)
        counts = [0] * 20
        for value in values:
            counts[min(int(value * 20), 19)] += 1
        assert one.histogram_entropy == pytest.approx(loop_entropy([count / len(values) for count in counts]))


def test_only_shares_have_entropies() -> None:
    scores = torch.rand(B, T, H, 1, generator=torch.Generator().manual_seed(6))

    def entropies(scores: Tensor, activation: str | None, is_added: bool = False) -> set[bool]:
        whole = statistics_of(scores, activation, is_added).whole
        return {whole.binary_entropy is None, whole.histogram_entropy is None}

    for activation in ("sigmoid", "ns_sigmoid", None):
        assert entropies(scores, activation) == {False}
        assert entropies(scores, activation, is_added=True) == {True}
    for activation in ("silu", "tanh", "identity", "softplus", "double_sigmoid"):
        assert entropies(scores, activation) == {True}
    assert entropies(1.5 * scores, None) == {True}


def test_correlations_by_head_and_over_all_heads() -> None:
    """Heads that each rise with the score, at levels that fall with it, correlate the other way together."""
    generator = torch.Generator().manual_seed(8)
    level = torch.arange(H).double()[:, None]
    x = level + torch.rand(B, H, T, generator=generator, dtype=torch.float64)
    y = x - 2 * level + 0.1 * torch.rand(B, H, T, generator=generator, dtype=torch.float64)
    x[:, 2] = 2.5
    counted = torch.arange(T) >= torch.tensor([[1], [4], [10]])
    totals = CorrelationTotals()
    assert totals.correlation() is None
    for rows in (slice(0, 2), slice(2, 3)):
        totals.add(x[rows], y.masked_fill(~counted[:, None], math.nan)[rows], counted[rows])
    found = totals.correlation()
    assert found is not None and found.queries == counted.sum() and found.by_head[2] is None
    pairs = [(x[:, h][counted].tolist(), y[:, h][counted].tolist()) for h in range(H)]
    for h in (0, 1, 3, 4, 5):
        assert found.by_head[h] == pytest.approx(statistics.correlation(*pairs[h]), abs=1e-9) and found.by_head[h] > 0.9
    together = statistics.correlation(*([value for pair in pairs for value in pair[side]] for side in (0, 1)))
    assert found.whole == pytest.approx(together, abs=1e-9) and found.whole < -0.5


def make_decoder(gate: str) -> tuple[Decoder, Tensor]:
    variant = find_variant(gate)
    sizes = {"width": 40, "num_layers": 2, "num_heads": H, "num_kv_heads": 2, "head_size": 8, "feedforward_width": 24}
    fields = {"vocab_size": 29, "max_context": T, "init_std": 0.3, "gates": variant.gates, "control": variant.control}
    decoder = Decoder(ModelSettings(**sizes, **fields)).double()  # type: ignore[arg-type]
    initialize(decoder, 0)
    return decoder, torch.randint(29, (B, T), generator=torch.Generator().manual_seed(4))


class Keeping:
    """Keeps the tensors of one layer."""

    def record(self, layer: int, tensors: dict[str, Tensor], scores: dict[str, Tensor]) -> None:
        self.tensors, self.scores = tensors, scores


@pytest.mark.parametrize("gate", ["sdpa_elementwise", "value_headwise"])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_measured_model_has_the_figures_of_loops(gate: str, batch_size: int) -> None:
    """Rank of what the output projection reads, entropy, and its correlation with scores, without ``full``."""
    decoder, tokens = make_decoder(gate)
    kept = [Keeping() for _ in decoder.model.layers]
    for layer, keeper in zip(decoder.model.layers, kept, strict=True):
        layer.self_attn.recorder = keeper
    with torch.no_grad():
        decoder(tokens)
    visible, ranks, entropies, correlations = naive_visible(Visibility(T, T), B), [], [], []
    for keeper in kept:
        weights = naive_map(keeper.tensors["query"], keeper.tensors["key"], 8**-0.5, visible)
        (scores,) = keeper.scores.values()
        pairs = []
        for h in range(H):
            read = keeper.tensors["gated_output"][:, :, h].flatten(0, 1)
            values = torch.linalg.svdvals(read - read.mean(0)).tolist()
            ranks.append(math.exp(loop_entropy([value / sum(values) for value in values])))
            for b, t in torch.cartesian_prod(torch.arange(B), torch.arange(T)).tolist():
                entropies.append(loop_entropy(weights[b, h, t].tolist()))
                score = scores[b, t, h * scores.shape[2] // H].mean().item()
                pairs += [(score, entropies[-1])] if t else []
        correlations.append(statistics.correlation(*zip(*pairs, strict=True)))
    found = measure(decoder, tokens, batch_size=batch_size)
    summary = found.summary()
    assert summary["gated_output_effective_rank"] == pytest.approx(statistics.fmean(ranks), rel=1e-6)
    assert summary["attention_entropy"] == pytest.approx(statistics.fmean(entropies), abs=1e-9)
    assert summary["gate_attention_entropy_correlation"] == pytest.approx(statistics.fmean(correlations), abs=1e-9)
    for layer, expected in zip(found.layers, correlations, strict=True):
        (gate_statistics,) = layer.gates.values()
        assert gate_statistics.entropy_correlation is not None
        assert gate_statistics.entropy_correlation.whole == pytest.approx(expected, abs=1e-9)
        assert gate_statistics.entropy_correlation.queries == B * (T - 1)
    assert min(abs(one) for one in correlations) > 1e-3 and min(ranks) < 0.99 * max(ranks)


@pytest.mark.parametrize(
    ("gate", "has_scores", "varies"),
    [
        ("none", False, False),
        ("rms_norm_on_sdpa", False, False),
        ("sdpa_input_independent", True, False),
        ("sdpa_ns_sigmoid", True, True),
        ("sdpa_identity", False, True),
        ("sdpa_additive_silu", False, True),
    ],
)
def test_what_a_model_has_not_is_left_empty(gate: str, has_scores: bool, varies: bool) -> None:
    summary = measure(*make_decoder(gate)).summary()
    assert (summary["gate_binary_entropy"] is not None) == has_scores
    assert (summary["gate_histogram_entropy"] is not None) == has_scores
    assert (summary["gate_attention_entropy_correlation"] is not None) == varies
    assert summary["gated_output_effective_rank"] is not None and summary["attention_entropy"] is not None
