"""Runs in every form that another library opens, and back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import SENTENCES, save_tokenizer

from gatelab.evaluate.conversion import convert_model
from gatelab.evaluate.models import open_model
from gatelab.model.decoder import Decoder
from gatelab.train.checkpoint import checkpoints, load_decoder

OFFICIAL = Path(__file__).parents[1] / "golden" / "official"

pytest.importorskip("transformers")


def test_a_run_becomes_a_folder_that_opens_as_the_same_model(run: Path, tmp_path: Path) -> None:
    done = convert_model(run, tmp_path / "converted", "gatelab")
    assert (done.source_layout, done.target_layout, done.error) == ("L1", "L1", 0.0)
    opened, expected = open_model(str(tmp_path / "converted")), load_decoder(checkpoints(run / "checkpoints")[-1])
    assert isinstance(opened.model, Decoder) and (opened.family, opened.attach) == ("gatelab", None)
    assert opened.max_context == 131 and opened.description["gate_layout"] == "L1"
    card = (tmp_path / "converted" / "README.md").read_text()
    assert "# run\n" in card and "2 steps of 57 tokens (114)" in card and "sdpa_output, elementwise, sigmoid" in card
    assert "| held-out perplexity, " in card and "| first token attention |" in card, card
    state = opened.model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.state_dict().items())


def test_the_tokenizer_of_a_run_comes_along(run: Path, tmp_path: Path) -> None:
    convert_model(run, tmp_path / "converted", "qwen3_next")
    tokenizer, own = open_model(str(tmp_path / "converted")).tokenizer, open_model(str(run)).tokenizer
    text = SENTENCES[3]
    assert tokenizer.encode(text) == own.encode(text)
    assert (tokenizer.bos_id, tokenizer.num_bos_added) == (own.bos_id, 1)


def test_a_run_without_a_checkpoint_is_refused(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(ValueError, match="has no checkpoint yet; train it until it has saved one"):
        convert_model(tmp_path / "run", tmp_path / "converted", "gatelab")
    assert not (tmp_path / "converted").exists()


@pytest.mark.parametrize("name", ["headwise", "elementwise"])
def test_the_papers_checkpoints_open_with_their_gate(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    shutil.copytree(OFFICIAL / name, folder)
    save_tokenizer(folder)
    opened = open_model(str(folder))
    expected = load_file(folder / "expected.safetensors")
    with torch.no_grad():
        logits = opened.model(expected["input_ids"])
    assert opened.description["gate_layout"] == "L3"
    assert (logits - expected["logits"]).abs().max() < 1e-5


def test_a_gate_whose_rows_could_be_elsewhere_is_refused(tmp_path: Path) -> None:
    shutil.copytree(OFFICIAL / "elementwise", tmp_path / "copy")
    save_tokenizer(tmp_path / "copy")
    config = tmp_path / "copy" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["AnotherForCausalLM"]}))
    with pytest.raises(ValueError, match=r"not where its rows are; name the layout with --layout\. L2: .*L3: .*L6: "):
        open_model(str(tmp_path / "copy"))


@pytest.mark.parametrize("key", ["attn_output_gate", "use_gate", "gating"])
def test_a_gate_that_transformers_does_not_read_is_not_dropped(key: str, tmp_path: Path) -> None:
    """The paper's elementwise model with its gate in a projection of its own, under other projects' keys."""
    from gatelab.interop.loading import open_checkpoint

    expected = load_file(OFFICIAL / "elementwise" / "expected.safetensors")
    tensors = dict(open_checkpoint(OFFICIAL / "elementwise").tensors)
    renamed = {name.replace("gates.sdpa_output.projection", "gate_proj"): tensor for name, tensor in tensors.items()}
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((OFFICIAL / "elementwise" / "config.json").read_text())
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    save_tokenizer(folder)
    del config["elementwise_attn_output_gate"], config["headwise_attn_output_gate"]
    declared = {key: "per-element" if key == "gating" else True, "gate_layout": "L1"}
    (folder / "config.json").write_text(json.dumps(config | declared))
    with torch.no_grad():
        logits = open_model(str(folder)).model(expected["input_ids"])
    assert (logits - expected["logits"]).abs().max() < 1e-5
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"weights of attention that .* leaves out, .*gate_proj.weight first"):
        open_model(str(folder))
