"""Every command of the README is run, at toy size where it trains."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^gatelab .*?(?= +#|$)", README, flags=re.MULTILINE)
SHORTER = {
    "train": [
        "train.steps=2",
        "train.schedule.warmup_steps=1",
        "data.train={name: python_standard_library, max_bytes: 900000, heldout_fraction: 0.3}",
        "--cache",
        "cache",
    ]
}


def test_the_readme_has_commands():
    assert len(COMMANDS) == 4


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, tmp_path):
    words = shlex.split(command)[1:]
    done = subprocess.run(
        [sys.executable, "-m", "gatelab", *words, *SHORTER.get(words[0], [])],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_every_folder_and_file_of_the_tree_exists():
    root = Path(__file__).parents[1]
    tree = README.split("## The house")[1].split("```")[1]
    names = re.findall(r"^  (\S+)", tree, flags=re.MULTILINE)
    assert len(names) > 8
    assert all((root / "src" / "gatelab" / name).exists() for name in names)
