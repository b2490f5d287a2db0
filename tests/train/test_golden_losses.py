"""Same maths, same loss: the curves stored in the tree are those that training gives today."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent.parent / "golden"
MAKER = runpy.run_path(str(GOLDEN / "make_loss_curves.py"))
STORED = json.loads((GOLDEN / "loss_curves.json").read_text())


@pytest.mark.parametrize("name", MAKER["CURVES"])
def test_loss_curve_is_the_stored_one(name: str) -> None:
    found, expected = MAKER["loss_curve"](name), STORED["curves"][name]
    assert len(found) == len(expected) == 20
    assert found == pytest.approx(expected, rel=1e-9), (
        f"the loss of {name} has changed (stored with {STORED['environment']}, now {MAKER['environment']()}). If the "
        "mathematics was meant to change, run python tests/golden/make_loss_curves.py and say why in the commit"
    )


def test_curves_tell_their_models_apart() -> None:
    curves = list(STORED["curves"].values())
    assert STORED["curves"].keys() == MAKER["CURVES"].keys() and len({curve[-1] for curve in curves}) == len(curves)
    assert all(curve[-1] < curve[0] - 0.1 for curve in curves), "they learn"
