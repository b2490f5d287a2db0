"""Tables 1, 3 and 4: where the gate is, how fine, through which function, and how sparse.

On the dense model below the paper's scale, on its mixture of experts there; ``moe`` has the mixture at every scale.
"""

from __future__ import annotations

from gatelab.study.presets.arms import both_ways, compose, gated, larger_controls, ungated
from gatelab.study.scales import Scale
from gatelab.study.study import Arm, Study

TABLE_3 = {
    "sdpa_elementwise": "T3 r2",
    "value_elementwise": "T3 r3",
    "sdpa_additive_silu": "T3 r4",
    "rms_norm_on_sdpa": "T3 r5",
    "silu_on_sdpa": "T3 r6",
    "sdpa_additive_identity": "T3 r7",
}
TABLE_4 = {
    "sdpa_elementwise": "T4 r2",
    "sdpa_headwise": "T4 r3",
    "sdpa_head_shared": "T4 r4",
    "value_elementwise": "T4 r5",
    "sdpa_input_independent": "T4 r6",
    "sdpa_ns_sigmoid": "T4 r7",
}


def positions(scale: Scale) -> Study:
    """Table 1, rows 1 to 9: five positions, matched and with surplus, and ungated models that are larger on purpose."""
    rows = {
        "sdpa_elementwise": "T1 r5",
        "value_elementwise": "T1 r6",
        "key_elementwise": "T1 r7",
        "query_elementwise": "T1 r8",
        "dense_output_elementwise": "T1 r9",
    }
    gates = [arm for gate, row in rows.items() for arm in both_ways(scale, "variants", gate, row)]
    question = "At which position does a gate help, and more than as many parameters would elsewhere?"
    arms = [ungated("T1 r1"), *larger_controls(scale, "variants"), *gates]
    return compose(scale, "variants", "positions", question, arms)


def granularity(scale: Scale) -> Study:
    """Table 1, rows 10 to 13: one score for each head, or scores shared by the heads, beside rows 5 and 6."""
    rows = {
        "sdpa_elementwise": "T1 r5",
        "value_elementwise": "T1 r6",
        "sdpa_headwise": "T1 r10",
        "value_headwise": "T1 r11",
        "sdpa_head_shared": "T1 r12",
        "value_head_shared": "T1 r13",
    }
    question = "Must a gate have a score for each channel, and must each head have its own?"
    return compose(scale, "variants", "granularity", question, [ungated("T1 r1"), *_gated(rows)])


def activation(scale: Scale) -> Study:
    """Table 1, rows 14 and 15: SiLU added or multiplied, beside the sigmoid of row 5."""
    rows = {"sdpa_elementwise": "T1 r5", "sdpa_additive_silu": "T1 r14", "sdpa_silu": "T1 r15"}
    question = "Must a gate multiply, and by a sigmoid?"
    return compose(scale, "variants", "activation", question, [ungated("T1 r1"), *_gated(rows)])


def nonlinearity(scale: Scale) -> Study:
    """Table 3: whatever is non-linear between the value and the output projection."""
    question = "Is it enough that something non-linear stands between the value and the output projection?"
    return compose(scale, "variants", "nonlinearity", question, [ungated("T3 r1"), *_gated(TABLE_3)])


def sparsity(scale: Scale) -> Study:
    """Table 4: gates that are less sparse or see no input, with first-token attention, hidden maxima, gate scores."""
    question = "Do only gates that are sparse and depend on the query lower first-token attention and hidden maxima?"
    arms = [ungated("T4 r1"), *_gated(TABLE_4)]
    return compose(scale, "variants", "sparsity", question, arms, metric="first_token_attention")


def _gated(rows: dict[str, str]) -> list[Arm]:
    return [gated(gate, row) for gate, row in rows.items()]
