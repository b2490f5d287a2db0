"""The command ``gatelab`` in the tests' own process, which has paid for its imports."""

from __future__ import annotations

import sys
from collections.abc import Callable

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
