"""The command ``gatelab study``: planned, run, looked at, run again."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_studies import synthetic_study

from command_line import Command, command_as_process


def test_a_study_from_a_file_is_run_and_looked_at(tmp_path: Path, command: Command) -> None:
    (tmp_path / "study.yaml").write_text(synthetic_study().to_yaml())
    words = ("study", "study.yaml", "--seeds", "2", "--executor", "serial", "--out", "out", "--cache", "cache")
    done = command_as_process(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Hours at" in done.stdout and "4 done" in done.stdout
    assert f"Report: {tmp_path / 'out' / 'report.html'}" in done.stdout
    assert (tmp_path / "out" / "gated" / "seed_1" / "result.json").exists()
    finished = (tmp_path / "out" / "gated" / "seed_1" / "result.json").stat().st_mtime_ns
    again = command_as_process(*words, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "out" / "gated" / "seed_1" / "result.json").stat().st_mtime_ns == finished
    code, looked, _ = command("study", "status", "out")
    assert code == 0 and looked.startswith("tiny: 4 done, 0 diverged, 0 running, 0 waiting of 4")
    code, compared, _ = command("study", "compare", "out")
    assert code == 0 and "ungated" in compared


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("paper/position",), "did you mean 'paper/positions'?"),
        (
            ("paper/overhead", "--workers", "2"),
            "study overhead times its arms in turns in this process; leave out --budget-h",
        ),
        (("paper/switch_heads",), "is left out: table 6 needs Switch-Head"),
        (("rivals", "--scale", "mikro"), "scale 'mikro' is unknown; did you mean 'micro'?"),
        (("rivals", "--scale", "small", "--budget-hours", "0.01"), "more than the budget of 0.01; choose a smaller"),
        (("mechanism", "--seeds", "2"), "confirmatory"),
        (("status", "nowhere"), "nowhere"),
    ],
)
def test_a_mistake_is_one_sentence_before_any_run(
    words: tuple[str, ...], message: str, tmp_path: Path, command: Command
) -> None:
    code, _, errors = command("study", *words)
    assert code == 2 and message in errors
    assert list(tmp_path.iterdir()) == []
