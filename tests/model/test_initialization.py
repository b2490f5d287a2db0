"""Initial weights: reproducible, shared between arms, cut from the baseline's where matching narrows them."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_decoders import MIXTURE, tiny_settings

from gatelab.gates.gate import Gate
from gatelab.gates.spec import GateSpec
from gatelab.gates.variants import VARIANTS, find_variant
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import generator_for, initialize
from gatelab.model.matching import with_gate
from gatelab.model.settings import MixtureSettings, ModelSettings

Weights = dict[str, torch.Tensor]


def initial_weights(settings: ModelSettings, seed: int = 0) -> Weights:
    decoder = Decoder(settings)
    initialize(decoder, seed)
    return decoder.state_dict()


def test_same_seed_same_bits_and_another_seed_others() -> None:
    settings = tiny_settings("sdpa_elementwise", mixture=MIXTURE, tied_head=False)
    first, again, other = (initial_weights(settings, seed) for seed in (7, 7, 8))
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        assert ("norm" in name) == torch.equal(weight, other[name])


def test_each_parameter_has_numbers_of_its_own_whatever_the_depth() -> None:
    shallow, deep = initial_weights(tiny_settings(num_layers=1)), initial_weights(tiny_settings(num_layers=3))
    assert shallow.keys() < deep.keys()
    assert all(torch.equal(weight, deep[name]) for name, weight in shallow.items())
    matrices = [weight for weight in deep.values() if weight.ndim > 1]
    first_numbers = {tuple(weight.flatten()[:4].tolist()) for weight in matrices}
    assert len(first_numbers) == len(matrices)


def test_initialize_draws_nothing_from_the_global_generator() -> None:
    decoder = Decoder(tiny_settings())
    state = torch.get_rng_state()
    initialize(decoder, 0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("mixture", [None, MIXTURE], ids=["dense", "mixture"])
def test_all_variants_share_all_common_weights(mixture: MixtureSettings | None) -> None:
    baseline = initial_weights(tiny_settings(mixture=mixture))
    for gate in VARIANTS:
        weights = initial_weights(tiny_settings(gate, mixture=mixture))
        assert all(torch.equal(weight, weights[name]) for name, weight in baseline.items()), gate
        added = weights.keys() - baseline.keys()
        assert all(".gates." in name or name.endswith(".control.weight") for name in added), gate
        assert bool(added) == (gate not in ("none", "silu_on_sdpa")), gate


def test_matched_dense_arms_start_from_slices_of_the_baseline() -> None:
    settings = tiny_settings()
    matched = with_gate(settings, find_variant("sdpa_elementwise"), "parameters")
    width, narrowed = settings.feedforward_width, matched.feedforward_width
    assert 0 < narrowed < width
    baseline, weights = initial_weights(settings), initial_weights(matched)
    for name, weight in baseline.items():
        expected = weight
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            expected = weight[:narrowed]
        elif name.endswith("down_proj.weight"):
            expected = weight[:, :narrowed]
        assert torch.equal(weights[name], expected), name


@pytest.mark.parametrize("match", ["parameters", "active"])
def test_matched_experts_start_from_slices_of_the_baseline(match: str) -> None:
    settings = tiny_settings(mixture=MIXTURE)
    matched = with_gate(settings.model_copy(update={"matching_multiple": 2}), find_variant("sdpa_elementwise"), match)  # type: ignore[arg-type]
    assert matched.mixture is not None
    narrowed = matched.mixture.expert_width
    assert narrowed == {"parameters": 22, "active": 16}[match]
    baseline, weights = initial_weights(settings), initial_weights(matched)
    for name, weight in baseline.items():
        expected = weight
        if name.endswith("experts.gate_up_proj"):
            gate, up = weight.chunk(2, dim=1)
            expected = torch.cat((gate[:, :narrowed], up[:, :narrowed]), dim=1)
        elif name.endswith("experts.down_proj"):
            expected = weight[:, :, :narrowed]
        assert torch.equal(weights[name], expected), name


def test_values_depend_on_neither_dtype_nor_pytorchs_defaults() -> None:
    settings = tiny_settings("sdpa_elementwise", mixture=MIXTURE)
    expected = initial_weights(settings)
    double, half = Decoder(settings).double(), Decoder(settings).bfloat16()
    initialize(half, 0)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):  # a default device that holds no numbers
            initialize(double, 0)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, weight in expected.items():
        assert torch.equal(double.state_dict()[name], weight.double())
        assert torch.equal(half.state_dict()[name], weight.bfloat16())


def test_matrices_are_normal_and_norms_are_one() -> None:
    settings = tiny_settings("sdpa_elementwise", width=200, feedforward_width=296, init_std=0.02, control=None)
    for name, weight in initial_weights(settings).items():
        if "norm" in name:
            assert (weight == 1).all()
            continue
        count = weight.numel()
        assert abs(weight.mean().item()) < 5 * 0.02 / math.sqrt(count), name
        assert weight.std().item() == pytest.approx(0.02, rel=5 / math.sqrt(2 * count)), name
        share_within_one = (weight.abs() < 0.02).double().mean().item()
        assert share_within_one == pytest.approx(0.6827, abs=5 * 0.5 / math.sqrt(count)), name
    control = initial_weights(tiny_settings("rms_norm_on_sdpa"))["model.layers.0.self_attn.control.weight"]
    assert (control == 1).all()


def gate_of(**axes: object) -> Gate:
    spec = GateSpec.parse(axes)
    decoder = Decoder(tiny_settings(gates=(spec,)))
    initialize(decoder, 0)
    gate = decoder.model.layers[1].self_attn.gates[spec.position]
    assert isinstance(gate, Gate)
    return gate


def test_gates_start_as_specified() -> None:
    assert gate_of().projection.weight.std().item() == pytest.approx(0.2, rel=0.1)
    zeros = gate_of(initialization="zeros", bias=1.5)
    assert (zeros.projection.weight == 0).all() and (zeros.projection.bias == 1.5).all()
    spread = gate_of(bias=-2.0)
    assert (spread.projection.weight != 0).all() and (spread.projection.bias == -2.0).all()
    low_rank = gate_of(initialization="zeros", rank=3, bias=0.5)
    down, up = low_rank.projection.down, low_rank.projection.up
    assert (down.weight != 0).all() and (up.weight == 0).all() and (up.bias == 0.5).all()
    assert (gate_of(source="parameter", initialization="zeros").logits == 0).all()


@pytest.mark.parametrize("gate", [name for name, variant in VARIANTS.items() if variant.gates])
def test_fresh_scores_are_near_the_promised_initial_score(gate: str) -> None:
    decoder = Decoder(tiny_settings(gate, init_std=0.02)).double()
    initialize(decoder, 0)
    x = torch.randn(3, 17, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sources = {"hidden": x, "value": x[..., :16], "attention_output": torch.cat((x, x[..., :8]), -1)}
    for module in decoder.modules():
        if isinstance(module, Gate):
            scores = module.scores(sources)
            assert scores.mean().item() == pytest.approx(module.spec.initial_score(), abs=0.02)
            if module.spec.initialization == "zeros":
                assert (scores == scores.flatten()[0]).all()
                assert scores.flatten()[0].item() == pytest.approx(module.spec.initial_score(), abs=1e-15)


def test_generators_depend_on_seed_and_name_alone() -> None:
    """Pinned, since stored runs and the arms of published studies rely on them."""
    assert generator_for(0, "model.embed_tokens.weight").initial_seed() == 7445581213768331534
    seeds = {generator_for(seed, name).initial_seed() for seed in (0, 1, 10) for name in ("a", "0:a", "b")}
    assert len(seeds) == 9
