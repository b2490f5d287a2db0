"""Names and shapes of a checkpoint are a contract: they are stored in the tree and change only on purpose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_decoders import MIXTURE, tiny_settings

from gatelab.gates.spec import GateSpec
from gatelab.model.decoder import Decoder
from gatelab.model.settings import ModelSettings, PatchSettings

GOLDEN = Path(__file__).parent.parent / "golden" / "state_dict_keys.json"
EVERY_GATE = (
    GateSpec(),
    GateSpec(position="value", granularity="headwise", bias=1.0),
    GateSpec(position="key", rank=3, layers=(1,)),
    GateSpec(position="query", source="parameter", initialization="zeros"),
    GateSpec(position="dense_output"),
)
DECODERS: dict[str, ModelSettings] = {
    "dense": tiny_settings(gates=EVERY_GATE, sandwich_norm=True),
    "mixture": tiny_settings("rms_norm_on_sdpa", mixture=MIXTURE, tied_head=False, num_layers=1),
    "patches": tiny_settings(patches=PatchSettings(pixels=4), causal=False, tied_head=False, num_layers=1),
}


@pytest.mark.parametrize("name", DECODERS)
def test_names_and_shapes_are_the_stored_ones(name: str) -> None:
    found = {key: list(weight.shape) for key, weight in Decoder(DECODERS[name]).state_dict().items()}
    assert found == json.loads(GOLDEN.read_text())[name]
