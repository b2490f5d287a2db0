"""Every command of the README is run, in its order and in one folder, at toy size where it trains or measures."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^gatelab .*?(?= +#|$)", README, flags=re.MULTILINE)
CORPUS = "data.train={name: python_standard_library, max_bytes: 900000, heldout_fraction: 0.3}"
SHORTER = {
    "train": ["train.steps=2", "train.schedule.warmup_steps=1", CORPUS, "--cache", "cache"],
    "add-gate": ["--train-steps", "2", CORPUS, "--cache", "cache"],
    "sft": ["--epochs", "0.1", "train.sequences_per_step=2", "--cache", "cache"],
    "eval": ["--lengths", "500", "--max-new-tokens", "4"],
    "extend": ["--train-tokens", "4096", "--texts", "2", "--cache", "cache"],
    "ruler": ["--tasks", "mini_single", "--samples", "2", "--cache", "cache"],
    "stream": ["--text", "text.txt", "--window", "32", "--tokens", "200"],
    "prune": ["--text", "text.txt", "--context", "64", "--continuation", "8", "--samples", "2", "--presses", "h2o"],
    "quantise": ["--text", "text.txt", "--length", "64", "--samples", "3", "--calibration", "2"],
    "diagnose": ["--text", "text.txt", "--length", "64", "--samples", "2"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where all the commands run, with a text to look at and chats to learn from."""
    folder = tmp_path_factory.mktemp("newcomer")
    (folder / "text.txt").write_text(README)
    says = [{"role": "user", "content": "What opens?"}, {"role": "assistant", "content": "The gate."}]
    chats = [{"messages": [{**says[0], "content": f"{number}: what opens?"}, says[1]]} for number in range(90)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return folder


def test_the_readme_has_commands():
    assert len(COMMANDS) == 16


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, folder):
    words = shlex.split(command)[1:]
    done = subprocess.run(
        [sys.executable, "-m", "gatelab", *words, *SHORTER.get(words[0], [])],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_every_folder_and_file_of_the_tree_exists():
    tree = README.split("## The house")[1].split("```")[1]
    names = re.findall(r"^  (\S+)", tree, flags=re.MULTILINE)
    assert len(names) > 8
    assert all((ROOT / "src" / "gatelab" / name).exists() for name in names)
