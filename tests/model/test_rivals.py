"""The named rivals of the gate."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tiny_decoders import tiny_settings

from gatelab.model.rivals import RIVALS, find_rival, with_rival
from gatelab.model.settings import ModelSettings, SinkSettings


def test_the_names_are_a_contract() -> None:
    assert list(RIVALS) == ["none", "learned_logit", "off_by_one", "learned_key_value", "sandwich_norm"]
    assert all(rival.origin for rival in RIVALS.values())


@pytest.mark.parametrize("name", RIVALS)
def test_a_rival_changes_nothing_but_its_own(name: str) -> None:
    plain = tiny_settings("sdpa_headwise")
    changed = with_rival(plain, find_rival(name))
    assert ModelSettings.parse(changed.to_mapping()) == changed
    assert changed.sandwich_norm == (name == "sandwich_norm")
    expected = None if name in ("none", "sandwich_norm") else SinkSettings.parse({"kind": name})
    assert changed.sink == expected
    assert changed.model_copy(update={"sink": None, "sandwich_norm": False}) == plain


def test_what_the_decoder_has_already_stays() -> None:
    own = tiny_settings(sandwich_norm=True, sink=SinkSettings(kind="off_by_one"))
    assert with_rival(own, find_rival("none")) == own
    assert with_rival(own, find_rival("learned_logit")).sandwich_norm


def test_an_unknown_rival_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"^rival 'off_by_on' is unknown; did you mean 'off_by_one'\? the choices are"):
        find_rival("off_by_on")


def test_rivals_load_without_torch() -> None:
    command = [sys.executable, "-c", "import sys, gatelab.model.rivals; print('torch' in sys.modules)"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout == "False\n"
