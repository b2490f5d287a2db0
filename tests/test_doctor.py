"""What the doctor looks at, what it makes of it, and its exit code."""

from __future__ import annotations

import json
import re
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gatelab import doctor
from gatelab.cli import app
from gatelab.doctor import EXTRAS, LEAST_PYTHON, REQUIRED, Finding, examine, is_older, judge_bfloat16
from gatelab.model.attention import AttentionKernel, fused_attention

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def floors(requirements: list[str]) -> dict[str, str]:
    found = [re.match(r"([\w-]+)[>=]=([\d.]+)", requirement) for requirement in requirements]
    return {match[1]: match[2] for match in found if match is not None}


def invoke(*words: str):
    return CliRunner().invoke(app, ["doctor", *words], catch_exceptions=False)


def pretend(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    real = doctor.installed_version
    monkeypatch.setattr(doctor, "installed_version", lambda name: versions.get(name, real(name)))


def test_floors_are_those_of_the_package() -> None:
    assert floors(PROJECT["dependencies"]) == REQUIRED
    stated = {name: floors(needed) for name, needed in PROJECT["optional-dependencies"].items() if name != "dev"}
    assert {name: extra.packages for name, extra in EXTRAS.items()} == stated
    assert PROJECT["requires-python"] == ">=" + ".".join(map(str, LEAST_PYTHON))


def test_this_machine_is_usable_and_everything_is_looked_at() -> None:
    done = invoke("--json")
    content = json.loads(done.stdout)
    assert done.exit_code == 0 and content["usable"]
    names = {finding["name"] for finding in content["findings"]}
    assert {"Python", "packages", "threads", "bfloat16 on the processor", "allocator", "disk", "C++ compiler"} <= names
    assert {f"extra {name}" for name in EXTRAS} <= names
    assert any(name.startswith("GPU") for name in names)


def test_a_missing_requirement_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch="2.9.1")
    done = invoke("--json")
    (finding,) = [finding for finding in json.loads(done.stdout)["findings"] if finding["name"] == "torch"]
    assert done.exit_code == 1
    assert (finding["value"], finding["status"], finding["advice"]) == ("2.9.1", "missing", "pip install 'torch>=2.13'")


def test_a_missing_extra_is_a_note_and_an_old_one_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {**dict.fromkeys(EXTRAS["ray"].packages), "peft": "0.20.9", "trl": "1.0"}
    monkeypatch.setattr(doctor, "installed_version", lambda name: missing.get(name, "99"))
    by_name = {finding.name: finding for finding in examine(Path())}
    assert by_name["extra ray"].status == "note"
    assert by_name["extra ray"].advice == "pip install 'gatelab[ray]' for study --executor ray"
    assert by_name["extra tune"].status == "warning"
    assert by_name["extra tune"].value == "peft 0.20.9 (needs 0.21); trl 1.0 (needs 1.16)"
    assert by_name["extra hf"].status == "ok"


@pytest.mark.parametrize(
    ("version", "floor", "older"),
    [
        ("2.9.1", "2.13", True),
        ("2.13.0+cpu", "2.13", False),
        ("2.13", "2.13.0", False),
        ("3.0rc1", "2.13", False),
        ("2.12.9.post1", "2.13", True),
        ("unknown", "0.1", True),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, floor: str, older: bool) -> None:
    assert is_older(version, floor) == older


def test_slow_bfloat16_is_a_warning() -> None:
    slow, fast = judge_bfloat16(90e9, 30e9), judge_bfloat16(90e9, 220e9)
    assert (slow.status, fast.status) == ("warning", "ok")
    assert "train.precision=float32" in slow.advice and "0.33x" in slow.value


def test_threads_beyond_the_cores_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.torch, "get_num_threads", lambda: 10_000)
    (threads,) = [finding for finding in examine(Path()) if finding.name == "threads"]
    assert threads.status == "warning" and threads.advice.startswith("set OMP_NUM_THREADS=")


def test_a_full_disk_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "LITTLE_DISK", 1e30)
    (disk,) = [finding for finding in examine(tmp_path / "new" / "runs") if finding.name == "disk"]
    assert disk.status == "warning" and "free some space" in disk.advice


def test_a_machine_without_compiler_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    (compiler,) = [finding for finding in examine(Path()) if finding.name == "C++ compiler"]
    assert compiler.status == "warning" and "train.compile=true" in compiler.advice
    assert attention() == ("attention in bfloat16", "PyTorch's kernel", "note", "GateLab's own needs a C++ compiler")


def attention() -> Finding:
    (found,) = [finding for finding in examine(Path()) if finding.name == "attention in bfloat16"]
    return found


def test_which_kernel_computes_attention_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> AttentionKernel:
        warnings.warn("it can't be built: no space left", stacklevel=2)
        return fused_attention

    monkeypatch.setattr(doctor, "has_cpp_compiler", lambda: True)
    for kernel, status, words in (
        (failing, "warning", "no space left"),
        (lambda: fused_attention, "note", "AVX512_BF16"),
        (lambda: blank_kernel, "ok", "built for this processor"),
    ):
        monkeypatch.setattr(doctor, "attention_kernel", kernel)
        found = attention()
        assert found.status == status and words in f"{found.value} {found.advice}"


def blank_kernel(*_: object) -> torch.Tensor:
    raise AssertionError("never called")


def test_the_table_shows_advice() -> None:
    shown = invoke().stdout
    assert "allocator" in shown and "status" in shown
