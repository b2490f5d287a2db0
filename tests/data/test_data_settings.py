from __future__ import annotations

import re
import subprocess
import sys

import pytest

from gatelab.data.settings import DataSettings


def test_defaults_are_the_default_corpus_with_bos_in_every_window():
    settings = DataSettings()
    assert (settings.train.name, settings.tokenizer.vocab_size, settings.context) == (
        "wikipedia_introductions",
        4096,
        512,
    )
    assert settings.bos_in_every_window and not settings.document_masks and settings.synthetic is None


def test_dotted_overrides_choose_a_corpus_and_a_synthetic_task():
    changed = DataSettings().with_overrides(["train.name=files", "train.path=texts/*.txt", "context=64"])
    assert (changed.train.name, changed.train.path, changed.context) == ("files", "texts/*.txt", 64)
    task = DataSettings().with_overrides(["synthetic={num_triggers: 5}"])
    assert task.synthetic is not None and task.synthetic.num_triggers == 5 and task.synthetic.vocab_size == 67


def test_settings_survive_yaml():
    settings = DataSettings.parse({"heldout": [{"name": "state_of_the_union", "heldout_fraction": 1.0}]})
    assert DataSettings.from_yaml(settings.to_yaml()) == settings


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.name=wikipedia"], "did you mean 'wikipedia_introductions'?"),
        (["train.name=files"], "name=files needs a path to read from"),
        (["train.name=hugging_face"], "name=hugging_face needs a path to read from"),
        (["train.path=x"], "name=wikipedia_introductions has a fixed source; path=x goes with files or hugging_face"),
        (["train.revision=main"], "revision=main goes with name=hugging_face, not with wikipedia_introductions"),
        (["train.heldout_fraction=1"], "train.heldout_fraction=1.0 leaves nothing to train on"),
        (["train.heldout_fraction=0"], "train.heldout_fraction=0.0 leaves nothing held out; name a corpus in heldout"),
        (["heldout=[{}]"], "heldout names the training corpus wikipedia_introductions"),
        (["heldout=[{name: state_of_the_union, heldout_fraction: 0}]"], "nothing of it is held out"),
        (
            ["heldout=[{name: files, path: a/x.txt}, {name: files, path: b/x.txt}]"],
            "two held-out corpora are called x.txt",
        ),
        (["context=1"], "context cannot be 1"),
        (["tokenizer.vocab_size=256"], "tokenizer.vocab_size cannot be 256"),
        (["tokens_per_shard=0"], "tokens_per_shard cannot be 0"),
        (["synthetic={}", "document_masks=true"], "document_masks=True with synthetic is impossible"),
        (["synthetic={}", "bos_in_every_window=false"], "bos_in_every_window=False with synthetic is impossible"),
        (["synthetic={vocab_size: 7, num_triggers: 5}"], "leaves fewer than two plain tokens at vocab_size=7"),
    ],
)
def test_contradictions_are_refused_with_both_values(overrides: list[str], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        DataSettings().with_overrides(overrides)


def test_labels_are_short_and_fit_for_folders():
    corpus = DataSettings.parse({"train": {"name": "hugging_face", "path": "some/Data set", "split": "test"}}).train
    assert corpus.label == "Data_set_test"
    assert DataSettings().train.label == "wikipedia_introductions"
    assert DataSettings.parse({"train": {"name": "files", "path": "texts/*.txt"}}).train.label == "txt"


def test_settings_load_without_torch_and_without_the_tokenizers_library():
    code = "import sys, gatelab.data.settings; print([m for m in ('torch', 'numpy', 'tokenizers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
