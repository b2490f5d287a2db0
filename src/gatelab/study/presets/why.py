"""What the paper leaves to be explained: what in a gate matters, and on what else its gain depends."""

from __future__ import annotations

from gatelab.study.presets.arms import (
    NO_WEIGHT_DECAY,
    QK_NORM_OFF,
    UNGATED,
    compose,
    gated,
    other_bos,
    require_text,
    run_of,
    ungated,
)
from gatelab.study.presets.gates import TABLE_3, TABLE_4
from gatelab.study.scales import Scale
from gatelab.study.study import Arm, Interaction, Study

_GATE = "sdpa_elementwise"
_ELSEWHERE = ("value_elementwise", "sdpa_head_shared")  # Where a gate is and who shares it are questions of table 1.


def why(scale: Scale) -> Study:
    """Tables 3 and 4 in one study, and whether q/k norm, BOS or weight decay is what makes a gate worth having.

    Non-linear, sparse, dependent on the query: each arm between value and output projection has some of the three. The
    gate without saturation (bilinear) is in neither table. Each change is made to an ungated and a gated arm, and asks
    whether it moves the difference between them.
    """
    run = run_of(scale, "variants")
    require_text(run, "open/why", "varies BOS of a text", scale)
    rows = {gate: row for gate, row in {**TABLE_3, **TABLE_4}.items() if gate not in _ELSEWHERE}
    arms = [ungated("T4 r1"), *(gated(gate, row) for gate, row in rows.items()), gated("sdpa_identity")]
    interactions = []
    for name, words in {**QK_NORM_OFF, **other_bos(run), **NO_WEIGHT_DECAY}.items():
        without, with_gate = (
            Arm(name=f"{arm.name}_{name}", assignments=(*arm.assignments, *words)) for arm in (ungated(), gated(_GATE))
        )
        arms += [without, with_gate]
        changed = (with_gate.name, without.name)
        interactions.append(Interaction(name=name, changed=changed, plain=(_GATE, UNGATED)))
    question = (
        "Is it the non-linearity or the sparsity of a gate that helps, and does its gain depend on q/k norm, BOS or "
        "weight decay?"
    )
    return compose(scale, "variants", "why", question, arms, interactions=tuple(interactions))
