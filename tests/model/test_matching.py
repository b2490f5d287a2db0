"""Narrower feed-forward layers that pay for gates."""

from __future__ import annotations

import pytest
from tiny_decoders import MIXTURE, tiny_settings

from gatelab.gates.spec import GateSpec
from gatelab.gates.variants import VARIANTS, Variant, find_variant
from gatelab.model.accounting import count_parameters
from gatelab.model.matching import with_gate


@pytest.mark.parametrize("gate", VARIANTS)
def test_matched_arms_are_within_one_step_of_the_baseline(gate: str) -> None:
    """Never below it, since the width is rounded up, and above it by less than the parameters of 8 channels."""
    baseline = tiny_settings(feedforward_width=200)
    matched = with_gate(baseline.model_copy(update={"matching_multiple": 8}), find_variant(gate), "parameters")
    surplus = count_parameters(matched).total - count_parameters(baseline).total
    assert 0 <= surplus < 8 * 3 * 40 * 2 or matched.feedforward_width == 200
    assert surplus >= 0


@pytest.mark.parametrize(("match", "divisor"), [("parameters", 5), ("active", 2)])
def test_experts_pay_together_or_only_those_that_a_token_meets(match: str, divisor: int) -> None:
    baseline = tiny_settings(mixture=MIXTURE)
    matched = with_gate(baseline.model_copy(update={"matching_multiple": 1}), find_variant("sdpa_elementwise"), match)  # type: ignore[arg-type]
    assert matched.mixture is not None and matched.feedforward_width == baseline.feedforward_width
    assert matched.mixture.expert_width == -((40 * 48 / (3 * 40 * divisor) - 24) // 1)  # rounded up
    assert matched.drawn_feedforward_width == 24
    field = "total" if match == "parameters" else "active"
    surplus = getattr(count_parameters(matched), field) - getattr(count_parameters(baseline), field)
    assert 0 <= surplus < 3 * 40 * divisor * 2


def test_gates_on_some_layers_are_paid_for_by_what_they_hold() -> None:
    one_layer = Variant(gates=(GateSpec(layers=(1,)),), origin="")
    exact = tiny_settings(matching_multiple=1)
    assert with_gate(exact, one_layer, "parameters").feedforward_width == 56 - 16 // 2
    assert with_gate(exact, find_variant("sdpa_elementwise"), "parameters").feedforward_width == 56 - 16


def test_without_matching_nothing_but_the_gate_changes() -> None:
    baseline, variant = tiny_settings(), find_variant("rms_norm_on_sdpa")
    assert with_gate(baseline, variant) == baseline.model_copy(update={"control": variant.control})
    assert with_gate(baseline, find_variant("none")) == baseline


def test_a_width_that_is_no_multiple_is_never_widened() -> None:
    assert (
        with_gate(tiny_settings(matching_multiple=128), find_variant("sdpa_headwise"), "parameters").feedforward_width
        == 56
    )


def test_a_feedforward_that_cannot_pay_is_refused() -> None:
    message = (
        r"^match=parameters would leave a feed-forward of width 0 from 16: the gates hold more parameters than it; "
        r"use match=none or a wider feed-forward$"
    )
    with pytest.raises(ValueError, match=message):
        with_gate(tiny_settings(feedforward_width=16), find_variant("sdpa_elementwise"), "parameters")
    with pytest.raises(ValueError, match=r"^match=active would leave a feed-forward of width -3 from 5"):
        mixture = MIXTURE.model_copy(update={"expert_width": 5})
        with_gate(tiny_settings(mixture=mixture), find_variant("sdpa_elementwise"), "active")


def test_a_gate_on_a_layer_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="a sdpa_output gate is on layer 2, but the last layer is 1"):
        with_gate(tiny_settings(), Variant(gates=(GateSpec(layers=(2,)),), origin=""))
