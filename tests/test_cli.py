"""The command line as a user meets it."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from command_line import command_as_process
from gatelab.cli import app


def invoke(*words):
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


def test_help_imports_neither_torch_nor_transformers():
    code = (
        "import sys, gatelab.cli\ntry: gatelab.cli.app(['--help'])\nexcept SystemExit: pass\nprint(sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "demo" in done.stdout
    loaded = done.stdout.splitlines()[-1]
    assert "'torch'" not in loaded and "'transformers'" not in loaded


def test_variants_as_json():
    rows = json.loads(invoke("variants", "--json").stdout)
    by_name = {row["name"]: row for row in rows}
    assert len(rows) >= 36
    assert by_name["sdpa_elementwise"]["parameters"] == 201_326_592
    assert by_name["sdpa_headwise"]["initial_scores"] == [0.5]


def test_params_as_json():
    cost = json.loads(invoke("params", "paper_dense_28l", "gate=sdpa_elementwise", "match=parameters", "--json").stdout)
    assert cost["parameters"] == cost["active_parameters"] == 1_728_177_152
    assert cost["flops_per_token"] == 3 * cost["flops_per_token_forward"]
    assert cost["training_state_bytes"] == 16 * cost["parameters"]


def test_settings_are_printed_as_yaml_that_can_be_read_again():
    from gatelab.train.settings import RunSettings

    text = invoke("settings", "moe_tiny", "gate=value_headwise", "train.steps=77").stdout
    assert RunSettings.from_yaml(text).train.steps == 77


def test_recipes_are_listed():
    assert "paper_moe_15a2b" in invoke("recipes").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "dense_tny"], "recipe 'dense_tny' is unknown; did you mean 'dense_tiny'?"),
        (["train", "dense_tiny", "gate=sdpa_elementwize"], "did you mean 'sdpa_elementwise'?"),
        (["train", "dense_tiny", "train.stepz=3"], "did you mean 'steps'?"),
        (["train", "dense_tiny", "match=parameter"], "match cannot be 'parameter'; did you mean 'parameters'?"),
        (["train", "dense_tiny", "data.context=512"], "data.context=512 exceeds model.max_context=256"),
        (["train", "dense_tiny", "model.num_kv_heads=3"], "num_heads=4 is not divisible by num_kv_heads=3"),
        (
            ["train", "dense_tiny", "model.vocab_size=300"],
            "model.vocab_size=300 is smaller than the data's vocabulary of 2048",
        ),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(words, message, tmp_path, command):
    code, output, errors = command(*words)
    assert (code, output) == (2, "")
    assert message in errors
    assert list(tmp_path.iterdir()) == []


def test_an_empty_corpus_is_refused_before_training(tmp_path, command):
    (tmp_path / "empty.txt").write_text("")
    words = ["data.train={name: files, path: empty.txt}", "--cache", "cache", "--out", "run"]
    code, _, errors = command("train", "dense_tiny", *words)
    assert code == 2 and "empty.txt" in errors


def test_train_writes_a_run_folder_and_names_it(tmp_path):
    words = ["train.steps=3", "train.schedule.warmup_steps=1", "train.threads=1", "--out", "run", "--cache", "cache"]
    done = command_as_process("train", "backcopy", "gate=sdpa_headwise", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "run") in done.stdout
    assert (tmp_path / "run" / "result.json").exists()
    assert "step 3/3" in done.stdout
