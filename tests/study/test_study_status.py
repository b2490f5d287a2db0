"""Where a study stands, from its files alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny_studies import synthetic_study

from gatelab.study.conditions import Conditions
from gatelab.study.executors import Serial
from gatelab.study.runner import Unobserved, conduct
from gatelab.study.status import status
from gatelab.study.study import Study
from gatelab.train.watch import Unwatched


class Look(Unwatched):
    """Asks for the status at a step, then stops the driver."""

    def __init__(self, folder: Path, step: int):
        self._folder = folder
        self._left = step
        self.seen: list[str] = []

    def update(self, step: int, loss: float, tokens_per_second: float, peak_share: float) -> None:
        self._left -= 1
        if self._left == 0:
            found = status(self._folder)
            self.seen.append(found.summary())
            running = next(one for one in found.jobs if one.state == "running")
            assert (running.step, running.loss, running.job.arm) == (step, pytest.approx(loss), "gated")
            assert running.seconds > 0 and running.seconds_left is not None
            raise KeyboardInterrupt


def test_states_while_it_runs_and_after_a_stop(tmp_path: Path) -> None:
    study, folder = synthetic_study(seeds=[0, 1]), tmp_path / "study"
    look = Look(folder, 3 + 2)
    with pytest.raises(KeyboardInterrupt):
        conduct(study, folder, tmp_path / "cache", Serial(look))
    assert look.seen == ["tiny: 1 done, 0 diverged, 1 running, 2 waiting of 4 jobs, less than a minute left"]
    stopped = status(folder, num_workers=2)
    assert [(one.state, one.step) for one in stopped.jobs] == [
        ("done", 3),
        ("waiting", 2),
        ("waiting", 0),
        ("waiting", 0),
    ]
    lefts = [one.seconds_left for one in stopped.jobs]
    done, begun = stopped.jobs[:2]
    assert lefts[0] == 0 and lefts[2] == pytest.approx(done.seconds) and None not in lefts
    assert begun.seconds_left == pytest.approx(begun.seconds / 2) and lefts[3] == pytest.approx(1.5 * begun.seconds)
    known = [left for left in lefts if left]
    assert stopped.seconds_left == pytest.approx(max(sum(known) / 2, *known))
    alone = status(folder, num_workers=100)
    assert alone.seconds_left == max(known), "no study is over before its longest job"
    conduct(study, folder, tmp_path / "cache")
    assert status(folder).count("done") == 4 and status(folder).seconds_left == 0
    (folder / "gated" / "seed_1" / "diverged.json").write_text(json.dumps({"step": 2, "reason": "?"}))
    assert [one.state for one in status(folder).jobs] == ["done", "done", "done", "diverged"]


def test_before_the_first_step_no_time_is_known(tmp_path: Path) -> None:
    class Look(Unobserved):
        def begin(self, study: Study, conditions: Sequence[Conditions]) -> None:
            found = status(tmp_path / "study")
            assert found.summary() == "tiny: 0 done, 0 diverged, 0 running, 16 waiting of 16 jobs" and found.tuning
            raise KeyboardInterrupt

    study = synthetic_study(learning_rates=[1e-5, 1e-2, 1e3], seeds=[0, 1])
    with pytest.raises(KeyboardInterrupt):
        conduct(study, tmp_path / "study", tmp_path / "cache", observer=Look())


def test_a_half_written_row_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    with pytest.raises(KeyboardInterrupt):
        conduct(synthetic_study(), folder, tmp_path / "cache", Serial(Look(folder, 5)))
    metrics = folder / "gated" / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"kind": "step", "ste')
    assert status(folder).jobs[1].step == 2


def test_a_folder_without_a_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no study; begin one there, or name the folder of another"):
        status(tmp_path)
