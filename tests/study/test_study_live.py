"""The terminal's view of a running study."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from tiny_studies import synthetic_study

from gatelab.study.jobs import comparison_jobs
from gatelab.study.live import StudyObserver, running_table, status_table
from gatelab.study.runner import conduct
from gatelab.study.status import JobStatus, StudyStatus


def standing() -> StudyStatus:
    """Of two arms and two seeds: one done, one diverged, one running, one waiting."""
    jobs = comparison_jobs(synthetic_study(seeds=[0, 1]))
    figures = [("done", 3, 1.5, 60.0, 0.0), ("diverged", 2, 9.0, 30.0, 0.0), ("running", 1, 2.25, 20.0, 40.0)]
    states = [JobStatus(job, *one) for job, one in zip(jobs, [*figures, ("waiting", 0, None, 0.0, 60.0)], strict=True)]
    return StudyStatus("tiny", states, False, 100.0)


def shown(observer: StudyObserver, console: Console) -> str:
    with console.capture() as capture:
        console.print(observer._view())
    return capture.get()


def test_an_arm_has_its_jobs_by_state_and_its_time() -> None:
    assert status_table(standing()).cells() == [
        ["ungated", "1", "1", "0", "0", "1:20", "0:40"],
        ["gated", "0", "0", "1", "1", "0:30", "1:00"],
    ]
    running = running_table(standing())
    assert running is not None and running.cells() == [["ungated/seed_1", "1/3", "2.2500", "0:40"]]


def test_time_that_is_not_known_is_left_open() -> None:
    status = standing()
    unknown = [one._replace(seconds_left=None) if one.state == "waiting" else one for one in status.jobs]
    table = status_table(status._replace(jobs=unknown, seconds_left=None))
    assert [cells[-1] for cells in table.cells()] == ["0:40", "–"]
    assert running_table(status._replace(jobs=status.jobs[:2])) is None


def test_the_tables_are_drawn_in_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with StudyObserver(console) as observer:
        assert shown(observer, console).strip() == ""
        observer.update(standing())
        text = shown(observer, console)
    for part in ("ungated/seed_1", "2.2500", "diverged", "1 done, 1 diverged, 1 running, 1 waiting of 4 jobs"):
        assert part in text


def test_a_log_gets_a_line_now_and_then() -> None:
    now, stream = [0.0], io.StringIO()
    with StudyObserver(Console(file=stream, width=200), line_every_seconds=60, clock=lambda: now[0]) as observer:
        for now[0] in (0.0, 30.0, 59.0, 61.0, 62.0):
            observer.update(standing())
        observer.update(standing()._replace(seconds_left=0.0))
        over = [one._replace(state="done", seconds_left=0.0) for one in standing().jobs]
        observer.update(standing()._replace(jobs=over, seconds_left=0.0))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0] == "tiny: 1 done, 1 diverged, 1 running, 1 waiting of 4 jobs, about 2 min left"
    assert lines[2] == "tiny: 4 done, 0 diverged, 0 running, 0 waiting of 4 jobs"


@pytest.mark.parametrize("terminal", [True, False])
def test_it_looks_on_while_a_study_runs(tmp_path: Path, terminal: bool) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=120)
    study = synthetic_study(question="Does \x1b[31mit\x07 hold?")
    with StudyObserver(console) as observer:
        conduct(study, tmp_path / "study", tmp_path / "cache", observer=observer)
    text = stream.getvalue()
    assert "\x1b[31mit" not in text and "\x07" not in text and "hold?" in text
    assert "initial weights in common" in text and "2 done, 0 diverged, 0 running, 0 waiting of 2 jobs" in text
    assert "model.gates" not in text
