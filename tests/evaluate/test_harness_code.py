"""Programs that a model wrote run apart, and pass only at their end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gatelab.evaluate.code_execution import pass_at_1, passes

PROBLEM = {
    "prompt": "def opened(gates):\n",
    "test": "def check(candidate):\n    assert candidate([1, 0, 1]) == 2\n",
    "entry_point": "opened",
}


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("    return sum(gates)", 1.0),
        ("    return len(gates)", 0.0),
        ("    return sum(gates", 0.0),
        ("    import sys\n    sys.exit(0)", 0.0),
        ("    raise SystemExit", 0.0),
        ("    return sum(bytearray(8 << 30)) or 2", 0.0),
    ],
)
def test_a_completion_passes_if_its_tests_do(completion: str, score: float) -> None:
    assert pass_at_1(PROBLEM, [completion]) == {"pass@1": score}


def test_a_program_that_does_not_end_fails() -> None:
    assert not passes("while True: pass", timeout_seconds=0.5)


def test_it_sees_no_environment_and_writes_nowhere_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATELAB_SECRET", "dry")
    monkeypatch.chdir(tmp_path)
    assert passes("import os\nassert 'GATELAB_SECRET' not in os.environ\nopen('written', 'w').write('x')")
    assert not (tmp_path / "written").exists() and os.environ["GATELAB_SECRET"] == "dry"


def test_what_it_started_ends_with_it(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    child = f"import time; time.sleep(0.4); open({str(alive)!r}, 'w').write('x')"
    assert passes(f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}])")
    time.sleep(0.9)
    assert not alive.exists()
