"""The wheel: it holds what the package needs, and works away from the checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


def test_wheel_holds_every_source_file_and_page_asset(wheel):
    packed = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    wanted = {
        str(path.relative_to(source))
        for path in source.rglob("*")
        if path.suffix in {".py", ".css", ".js", ".jinja", ".yaml"} and "__pycache__" not in path.parts
    }
    assert wanted <= packed
    assert any(name.endswith("licenses/LICENSE") for name in packed)


def test_installed_wheel_answers_away_from_the_checkout(wheel, tmp_path):
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    code = "import gatelab, sys; print(gatelab.__file__); from gatelab.cli import app; app(['recipes'])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(target)}
    )
    assert done.stdout.startswith(str(target)), done.stderr
    assert "dense_tiny" in done.stdout
