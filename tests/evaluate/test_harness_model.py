"""A decoder and its tokenizer as lm-eval asks for them, and what their digest covers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tiny_gguf import write_gguf
from tiny_models import tiny_decoder, train_backend

from gatelab.data.tokenizer import Tokenizer
from gatelab.evaluate.language_model import hugging_face_form, model_digest, open_tokenizer, saved_tokenizer
from gatelab.evaluate.models import open_model

transformers = pytest.importorskip("transformers")
TEXTS = ["The gate number 3 opens", "<s>", " and the sink stays dry. <s> ", "门 🚪", ""]


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer(train_backend("<s>"), "<s>")


def test_a_text_has_one_bos_in_front_and_no_other_special_token(ours: Tokenizer) -> None:
    wrapped = hugging_face_form(ours)
    for text in TEXTS:
        plain = ours.encode_batch([text])[0]
        assert wrapped.encode(text) == [ours.bos_id, *plain]
        assert wrapped.encode(text, add_special_tokens=False) == plain
        assert wrapped.decode(plain) == text
    assert wrapped.bos_token_id == wrapped.eos_token_id == wrapped.pad_token_id == ours.bos_id


def test_a_saved_tokenizer_reads_the_same(ours: Tokenizer) -> None:
    wrapped = hugging_face_form(ours)
    with saved_tokenizer(wrapped) as folder:
        again = transformers.AutoTokenizer.from_pretrained(folder)
    assert [again.encode(text) for text in TEXTS] == [wrapped.encode(text) for text in TEXTS]
    assert not Path(folder).exists()


def test_a_saved_tokenizer_names_no_code(ours: Tokenizer) -> None:
    wrapped = hugging_face_form(ours)
    wrapped.init_kwargs["auto_map"] = {"AutoTokenizer": ["stranger/code--tokenizer.Strange", None]}
    with saved_tokenizer(wrapped) as folder:
        assert "auto_map" not in json.loads((Path(folder) / "tokenizer_config.json").read_text())
        assert not list(Path(folder).glob("*.py"))


def test_the_tokenizer_of_a_run_and_of_a_folder(run: Path, llama: Path) -> None:
    for place in (run, llama):
        opened = open_model(str(place))
        ids = open_tokenizer(opened).encode("The gate")
        assert ids == [opened.tokenizer.bos_id, *opened.tokenizer.encode("The gate")]


def test_the_tokenizer_of_a_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = write_gguf(tmp_path / "tiny.gguf")
    for place in (file, tmp_path):
        opened = open_model(str(place))
        ids = open_tokenizer(opened).encode("The gate", add_special_tokens=False)
        assert ids == opened.tokenizer.encode("The gate")


def test_without_transformers_the_way_out_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_model(str(run))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"needs transformers: install gatelab\[hf\]"):
        open_tokenizer(opened)


def test_the_digest_covers_weights_settings_and_tokenizer(ours: Tokenizer, llama: Path) -> None:
    rules = ours.to_text()
    digest = model_digest(tiny_decoder(), rules)
    assert digest == model_digest(tiny_decoder(), rules)
    changed = tiny_decoder()
    with torch.no_grad():
        changed.get_parameter("model.layers.1.self_attn.gates.sdpa_output.projection.weight")[0, 0] += 1e-6
    others = [
        model_digest(changed, rules),
        model_digest(tiny_decoder(max_context=132), rules),
        model_digest(tiny_decoder(dtype=torch.bfloat16), rules),
        model_digest(tiny_decoder(), Tokenizer(train_backend("<bos>"), "<bos>").to_text()),
    ]
    assert len({digest, *others}) == 5
    opened = open_model(str(llama))
    assert model_digest(opened.model, rules) == model_digest(open_model(str(llama)).model, rules)
