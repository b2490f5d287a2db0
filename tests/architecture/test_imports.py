"""Imports go down only, and nothing heavy is loaded before it is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def loaded_after(statement: str) -> set[str]:
    """Top-level packages that a fresh interpreter has loaded after the statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(run.stdout.split())


def test_contracts_hold() -> None:
    """The floors of the house and the forbidden imports, as pyproject.toml states them."""
    pytest.importorskip("importlinter")
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    "module",
    [
        "gatelab",
        "gatelab.settings",
        "gatelab.files",
        "gatelab.gates.spec",
        "gatelab.gates.variants",
        "gatelab.model.settings",
        "gatelab.model.matching",
        "gatelab.evaluate.quantisation.schemes",
    ],
)
def test_names_load_without_torch(module: str) -> None:
    loaded = loaded_after(f"import {module}")
    assert "gatelab" in loaded
    assert loaded.isdisjoint({"torch", "numpy", "transformers"})


def test_the_model_loads_without_transformers() -> None:
    modules = sorted(path.stem for path in (ROOT / "src" / "gatelab" / "model").glob("*.py") if path.stem != "__init__")
    loaded = loaded_after("import " + ", ".join(f"gatelab.model.{module}" for module in modules))
    assert "torch" in loaded
    assert loaded.isdisjoint({"transformers", "datasets", "pandas", "altair"})
