"""Counts of the paper's models, exact to the parameter, and operations against PyTorch's own counter."""

from __future__ import annotations

import pytest
import torch
from tiny_decoders import ARCHITECTURES, MIXTURE, SINKS, B, T, tiny_settings, token_ids
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gatelab.gates.variants import VARIANTS, find_variant
from gatelab.model.accounting import (
    count_parameters,
    flops_per_token_forward,
    flops_per_token_training,
    training_state_bytes,
)
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.matching import with_gate
from gatelab.model.settings import LayerSettings, MixtureSettings, ModelSettings

DENSE_28L = ModelSettings(
    matching_multiple=128,
    vocab_size=152_064,
    width=2048,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_size=128,
    feedforward_width=6144,
    max_context=4096,
)
DENSE_48L = DENSE_28L.model_copy(update={"width": 1536, "num_layers": 48, "feedforward_width": 4608})
MOE_15A2B = DENSE_28L.model_copy(
    update={
        "num_layers": 24,
        "num_heads": 32,
        "num_kv_heads": 4,
        "tied_head": False,
        "mixture": MixtureSettings(num_experts=128, experts_per_token=8, expert_width=768),
    }
)


def test_dense_28_layers() -> None:
    counts = count_parameters(DENSE_28L)
    assert counts.total == counts.active == 1_720_837_120
    assert counts.embedding == 152_064 * 2048
    assert counts.gates == 0


def test_dense_28_layers_gated_and_matched_as_published() -> None:
    headwise = with_gate(DENSE_28L, find_variant("sdpa_headwise"), "parameters")
    assert headwise.feedforward_width == 6144
    assert count_parameters(headwise).total == 1_721_754_624
    elementwise = with_gate(DENSE_28L, find_variant("sdpa_elementwise"), "parameters")
    assert elementwise.feedforward_width == 5504
    assert count_parameters(elementwise).total == 1_728_177_152
    assert count_parameters(elementwise).gates == 28 * 2048 * 2048


def test_dense_48_layers() -> None:
    assert count_parameters(DENSE_48L).total == 1_705_932_288


@pytest.mark.parametrize(("vocab_size", "total"), [(151_936, 15_577_227_264), (152_064, 15_577_751_552)])
def test_mixture_15a2b(vocab_size: int, total: int) -> None:
    counts = count_parameters(MOE_15A2B.model_copy(update={"vocab_size": vocab_size}))
    assert counts.total == total
    idle_experts = 24 * 120 * 3 * 768 * 2048
    assert counts.active == total - idle_experts
    assert round(counts.active / 1e9, 2) == 1.99
    assert counts.embedding == 2 * vocab_size * 2048


@pytest.mark.parametrize(
    ("gate", "millions"),
    [
        ("sdpa_elementwise", 201.327),
        ("value_elementwise", 25.166),
        ("key_elementwise", 25.166),
        ("query_elementwise", 201.327),
        ("dense_output_elementwise", 100.663),
        ("sdpa_headwise", 1.573),
        ("value_headwise", 0.197),
        ("sdpa_head_shared", 201.327),
        ("value_head_shared", 25.166),
        ("sdpa_additive_silu", 201.327),
        ("sdpa_silu", 201.327),
    ],
)
def test_added_parameters_of_table_1(gate: str, millions: float) -> None:
    gated = count_parameters(with_gate(MOE_15A2B, find_variant(gate)))
    added = gated.total - count_parameters(MOE_15A2B).total
    assert round(added / 1e6, 3) == millions
    assert gated.gates == added == find_variant(gate).num_parameters(MOE_15A2B.attention_shape) * 24
    assert gated.active - count_parameters(MOE_15A2B).active == added


@pytest.mark.parametrize(
    ("changes", "millions"),
    [
        ({"num_kv_heads": 8}, 50.332),
        ({"num_heads": 48}, 201.327),
        ({"mixture": MixtureSettings(num_experts=132, experts_per_token=8, expert_width=768)}, 453.181),
    ],
)
def test_added_parameters_of_table_1_without_gates(changes: dict[str, object], millions: float) -> None:
    """Four more experts are 452.98 M of weights and 0.2 M of router; the paper rounds to 400."""
    added = count_parameters(MOE_15A2B.model_copy(update=changes)).total - count_parameters(MOE_15A2B).total
    assert round(added / 1e6, 3) == millions


def test_matching_the_active_parameters_of_a_mixture() -> None:
    baseline = count_parameters(MOE_15A2B)
    in_eights = MOE_15A2B.model_copy(update={"matching_multiple": 8})
    matched = with_gate(in_eights, find_variant("sdpa_elementwise"), "active")
    assert matched.mixture is not None and matched.mixture.expert_width == 600  # 768 - 170.67, rounded up to 8
    counts = count_parameters(matched)
    assert 0 <= counts.active - baseline.active < 8 * 3 * 2048 * 24 * 8
    assert counts.total < baseline.total
    exactly = MOE_15A2B.model_copy(update={"matching_multiple": 1})
    by_total = with_gate(exactly, find_variant("sdpa_elementwise"), "parameters")
    assert by_total.mixture is not None and by_total.mixture.expert_width == 758  # 768 - 10.67


@pytest.mark.parametrize("gate", VARIANTS)
def test_counted_gates_are_the_promised_ones(gate: str) -> None:
    settings = tiny_settings(gate)
    counts = count_parameters(settings)
    promised = find_variant(gate).num_parameters(settings.attention_shape) * settings.num_layers
    assert counts.gates == promised == counts.total - count_parameters(tiny_settings()).total


def test_counts_of_a_mixture_are_those_of_the_weights() -> None:
    settings = tiny_settings("sdpa_headwise", mixture=MIXTURE, tied_head=False)
    counts, decoder = count_parameters(settings), Decoder(settings)
    assert counts.total == sum(weight.numel() for weight in decoder.state_dict().values())
    experts = sum(weight.numel() for name, weight in decoder.state_dict().items() if ".experts." in name)
    assert counts.active == counts.total - experts * 3 // 5
    assert training_state_bytes(settings) == 16 * counts.total


def counted_flops(settings: ModelSettings, backward: bool) -> int:
    """Operations that PyTorch counts, with attention as two plain products, which compute the whole square."""
    decoder = Decoder(settings).double()
    initialize(decoder, 0)
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        logits = decoder(token_ids())
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in SINKS])
def test_operations_equal_pytorchs_counter(name: str) -> None:
    """To the last operation, but for three things that PyTorch computes and we leave out.

    The half of the causal square that is masked, the router's statistics, two products of ones with (N E), and the
    zeros that make the keys and values of latent attention equally large.
    """
    settings = ARCHITECTURES[name]
    layers = settings.layers or (LayerSettings(),) * settings.num_layers
    hidden_keys = [T - sum(min(i, layer.window or T) for i in range(1, T + 1)) / T for layer in layers]
    heads = [layer.num_heads or settings.num_heads for layer in layers]
    sizes = (settings.head_size, settings.value_size)
    masked = 2 * sum(sizes) * sum(h * keys for h, keys in zip(heads, hidden_keys, strict=True))
    masked += 2 * (max(sizes) - min(sizes)) * sum(heads) * T
    routers = sum(layer.mixture for layer in layers) if settings.mixture else 0
    statistics = 2 * 2 * settings.mixture.num_experts * routers if settings.mixture else 0
    forward, training = flops_per_token_forward(settings, context=T), flops_per_token_training(settings, context=T)
    assert counted_flops(settings, backward=False) == round(B * T * (forward + masked + statistics))
    assert counted_flops(settings, backward=True) == round(B * T * (training + 3 * masked + statistics))


def test_operations_without_causality_are_the_whole_square() -> None:
    settings = tiny_settings("sdpa_elementwise", causal=False)
    assert counted_flops(settings, backward=False) == B * T * flops_per_token_forward(settings, context=T)


def test_recomputed_layers_cost_their_forward_pass_once_more() -> None:
    settings = tiny_settings("sdpa_elementwise", mixture=MIXTURE, tied_head=False)
    forward, head = flops_per_token_forward(settings, T), 2 * 97 * 40
    assert flops_per_token_training(settings, T) == 3 * forward
    assert flops_per_token_training(settings, T, recompute=True) == 4 * forward - head


def test_operations_of_the_papers_model() -> None:
    """6 N plus attention: the share of attention at the paper's context is small, and no embedding is counted."""
    flops = flops_per_token_training(DENSE_28L, context=4096)
    norms = 28 * (2 * 2048 + 2 * 128) + 2048
    attention = 3 * 4 * 2048 * 4097 / 2 * 28
    assert flops == 6 * (1_720_837_120 - norms) + attention


def test_counting_takes_no_memory() -> None:
    before = torch.get_default_device()
    counts = count_parameters(MOE_15A2B.model_copy(update={"num_layers": 240}))
    assert counts.total > 1.4e11
    assert torch.get_default_device() == before
