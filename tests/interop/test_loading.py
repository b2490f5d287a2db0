"""Loading what GateLab itself has written, and telling what is none of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gatelab.gates.spec import GateSpec
from gatelab.interop import load
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.settings import ModelSettings
from gatelab.train.checkpoint import save_checkpoint

SETTINGS = ModelSettings(
    vocab_size=97, width=40, num_layers=2, num_heads=6, num_kv_heads=2, head_size=8, feedforward_width=56,
    max_context=64, gates=(GateSpec(granularity="headwise"), GateSpec(position="value", activation="silu")),
)  # fmt: skip
IDS = torch.randint(97, (3, 17), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def decoder() -> Decoder:
    """A decoder with random weights."""
    decoder = Decoder(SETTINGS)
    initialize(decoder, seed=0)
    return decoder.eval()


def hugging_face_form(decoder: Decoder, folder: Path, **changes: object) -> Path:
    """The least that a folder in our Hugging Face form holds."""
    config = {
        "model_type": "gatelab", "gatelab": SETTINGS.to_mapping(), "gate_layout": "L1", "gatelab_schema_version": 1,
        "hidden_size": 40,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | changes))
    save_file(decoder.state_dict(), folder / "model.safetensors", {"format": "pt", "gate_layout": "L1"})
    return folder


@torch.no_grad()
def test_our_hugging_face_form(decoder: Decoder, tmp_path: Path) -> None:
    loaded = load(hugging_face_form(decoder, tmp_path))
    assert torch.equal(loaded(IDS), decoder(IDS))
    assert loaded.settings == SETTINGS
    assert not loaded.training


@torch.no_grad()
def test_a_checkpoint_of_training(decoder: Decoder, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, 3, decoder, torch.optim.AdamW(decoder.parameters()), keep=1)
    assert torch.equal(load(folder)(IDS), decoder(IDS))
    weights = load_file(folder / "model.safetensors")
    metadata = {"gate_layout": "L1", "model": SETTINGS.model_dump_json()}
    save_file({name: tensor + 1 for name, tensor in weights.items()}, folder / "model.safetensors", metadata)
    with pytest.raises(ValueError, match=r"model.safetensors is damaged, or its checksum in manifest.json is; take"):
        load(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"schema_version": 1}))
    with pytest.raises(ValueError, match=r"manifest.json has schema version 1, this GateLab reads 2"):
        load(folder)
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match=r"manifest.json is missing or damaged; take the checkpoint before it"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gatelab_schema_version": 2}, "gatelab_schema_version=2, this GateLab reads 1"),
        ({"gate_layout": "L2"}, "declared twice: config.json says L2, the files says L1, the code of gatelab says L1"),
        ({"gatelab": None}, "no mapping 'gatelab' with the model's settings"),
        ({"gatelab": SETTINGS.to_mapping() | {"widht": 3}}, "'widht' is unknown; did you mean 'width'"),
        ({"gatelab": SETTINGS.to_mapping() | {"gates": []}}, "does not tell of: model.layers.0.self_attn.gates.sdpa"),
    ],
)
def test_what_is_refused(changes: dict[str, object], message: str, decoder: Decoder, tmp_path: Path) -> None:
    folder = hugging_face_form(decoder, tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_no_layout_but_l1_is_ours(decoder: Decoder, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"declared twice: the layout argument says L3, config.json says L1, the"):
        load(hugging_face_form(decoder, tmp_path), layout="L3")


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_damaged_configuration(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config.json is damaged: it is no JSON mapping"):
        load(tmp_path)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no checkpoint that GateLab loads: that is a folder with config.json and"):
        load(tmp_path / "absent")
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"qwen2, llama, qwen3, .*, or a GateLab checkpoint \(a folder step_00000200"):
        load(tmp_path)
