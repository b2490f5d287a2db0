"""The command ``gatelab``: in the tests' own process, which has paid for its imports, and as a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gatelab.cli import main

Command = Callable[..., tuple[object, str, str]]


def command_in_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """``command(*words)`` runs ``gatelab``; gives exit code, output and errors."""

    def run(*words: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["gatelab", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return run


def command_as_process(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What ``gatelab`` with these words gave back, run from ``cwd``."""
    return subprocess.run([sys.executable, "-m", "gatelab", *words], capture_output=True, text=True, cwd=cwd)
