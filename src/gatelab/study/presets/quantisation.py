"""Rounding: does a gated model bear it better?"""

from __future__ import annotations

from gatelab.study.presets.arms import CONFIRMATORY_SEEDS, SMALLEST_LOSS_DIFFERENCE, compose, gated, ungated
from gatelab.study.scales import Scale
from gatelab.study.study import Study


def quantisation(scale: Scale) -> Study:
    """Does a gate make a model easier to quantise (Bondarenko et al. 2306.12929), and bfloat16's errors smaller?"""
    question = "Does rounding weights and activations to 8 bits add less to the loss of a gated model?"
    gates = ("sdpa_headwise", "sdpa_elementwise")
    return compose(
        scale,
        "dense",
        "quantisation",
        question,
        [ungated(), *map(gated, gates)],
        seeds=CONFIRMATORY_SEEDS,
        metric="quantisation_cost[w8a8]",
        smallest_difference=SMALLEST_LOSS_DIFFERENCE,
        confirmatory=gates,
    )
