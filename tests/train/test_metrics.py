"""The record of a run, row by row, and the count of loss spikes."""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gatelab.train.metrics import (
    MetricsLog,
    SpikeMonitor,
    count_spikes,
    read_metrics,
    running_median,
    spikes_per_10k_steps,
)

PUBLISHED = Path(__file__).parent.parent / "golden" / "loss_curves"


def published(name: str) -> tuple[list[int], list[float]]:
    table = np.loadtxt(PUBLISHED / f"{name}.csv.gz", delimiter=",", skiprows=1)
    return table[:, 0].astype(int).tolist(), table[:, 1].tolist()


def write_steps(log: MetricsLog, steps: range, losses: float = 1.0) -> None:
    for step in steps:
        log.write("step", step, loss=losses, loss_spikes_live=0)


class TestSpikes:
    def test_the_papers_curves(self) -> None:
        """124 spikes without the gate and none with it; the counts at other thresholds are published too."""
        baseline, gate = published("baseline"), published("gate")
        assert (len(baseline[0]), len(gate[0])) == (10_000, 19_986)
        assert (count_spikes(*baseline), count_spikes(*gate)) == (124, 0)
        assert (count_spikes(*baseline, threshold=0.3), count_spikes(*gate, threshold=0.05)) == (41, 4)
        late = sum(step > 2000 for step in baseline[0])
        assert spikes_per_10k_steps(*baseline) == pytest.approx(124e4 / late) == pytest.approx(124.7, abs=0.05)
        assert spikes_per_10k_steps(*gate) == 0.0

    @given(
        values=st.lists(st.floats(-10, 10), max_size=30),
        half=st.integers(0, 8),
    )
    def test_the_running_median_is_centred(self, values: list[float], half: int) -> None:
        expected = []
        for center in range(len(values)):
            near = [value for index, value in enumerate(values) if abs(index - center) <= half]
            expected.append(statistics.median(near))
        assert running_median(values, 2 * half + 1).tolist() == expected

    def test_a_spike_is_more_than_a_tenth_above_the_median_and_late(self) -> None:
        steps = list(range(1951, 2151))
        losses = [2.0] * 200
        for step, excess in ((1990, 1.0), (2000, 1.0), (2001, 0.11), (2100, 0.09), (2140, 0.2)):
            losses[steps.index(step)] += excess
        assert count_spikes(steps, losses) == 2
        assert spikes_per_10k_steps(steps, losses) == 2 * 10_000 / 150

    def test_the_median_looks_ahead_so_a_rise_that_stays_is_no_spike(self) -> None:
        steps = list(range(3001, 3401))
        losses = [2.0] * 200 + [2.5] * 200
        assert count_spikes(steps, losses) == 0
        monitor = SpikeMonitor()
        assert [monitor.add(step, loss) for step, loss in zip(steps, losses, strict=True)] == [
            200 <= index < 251 for index in range(400)
        ], "the trailing median of 101 follows after 51 of them"

    def test_runs_too_short_for_a_spike_have_no_rate(self) -> None:
        assert spikes_per_10k_steps(range(1, 2001), [1.0, 9.0] * 1000) is None
        assert count_spikes(range(1, 2001), [1.0, 9.0] * 1000) == 0

    def test_the_monitor_compares_with_the_losses_before(self) -> None:
        generator = np.random.default_rng(0)
        losses = (2 + 0.1 * generator.standard_normal(400)).tolist()
        monitor, found, expected = SpikeMonitor(), [], []
        for index, loss in enumerate(losses):
            step = 1901 + index
            found.append(monitor.add(step, loss))
            before = losses[max(0, index - 101) : index]
            expected.append(step > 2000 and loss - statistics.median(before) > 0.1)
        assert found == expected
        assert monitor.count == sum(expected) > 20

    def test_the_first_loss_of_all_is_no_spike(self) -> None:
        assert not SpikeMonitor().add(5000, 100.0)

    @pytest.mark.parametrize("stop", [1, 60, 300])
    def test_a_resumed_monitor_goes_on(self, stop: int) -> None:
        """On a curve that falls by more than a threshold within the window, so that every loss in it counts."""
        losses = (9 - 0.02 * np.arange(400) + 2 * np.random.default_rng(1).standard_normal(400)).tolist()
        whole, rows, flags = SpikeMonitor(), [], []
        for index, loss in enumerate(losses):
            flags.append(whole.add(1990 + index, loss))
            rows.append({"loss": loss, "loss_spikes_live": whole.count})
        resumed = SpikeMonitor(rows[:stop])
        assert [resumed.add(1990 + stop + i, loss) for i, loss in enumerate(losses[stop:])] == flags[stop:]
        assert resumed.count == whole.count


class TestLog:
    def test_rows_are_read_back_by_kind(self, tmp_path: Path) -> None:
        log = MetricsLog(tmp_path / "metrics.jsonl")
        log.write("measurement", 0, gate_mean=None)
        log.write("step", 1, loss=0.1 + 0.2, loss_spikes_live=0)
        log.write("evaluation", 1, domain="ünï", loss=3.0)
        assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3, "rows are there at once"
        log.close()
        assert read_metrics(tmp_path / "metrics.jsonl", "step") == [
            {"kind": "step", "step": 1, "loss": 0.30000000000000004, "loss_spikes_live": 0}
        ]
        assert read_metrics(tmp_path / "metrics.jsonl", "evaluation")[0]["domain"] == "ünï"

    def test_reopening_rewinds_to_the_checkpoint(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        log = MetricsLog(path)
        write_steps(log, range(1, 8), losses=1.0)
        log.write("evaluation", 5, loss=2.0)
        log.write("evaluation", 7, loss=3.0)
        log.close()
        log = MetricsLog(path, completed=5)
        write_steps(log, range(6, 10), losses=4.0)
        log.close()
        rows = read_metrics(path, "step")
        assert [row["step"] for row in rows] == list(range(1, 10))
        assert [row["loss"] for row in rows] == [1.0] * 5 + [4.0] * 4
        assert [row["step"] for row in read_metrics(path, "evaluation")] == [5]

    def test_a_run_without_checkpoint_begins_anew(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"kind": "measurement", "step": 0}\n{"kind": "step", "st')
        MetricsLog(path, completed=0).close()
        assert path.read_text() == ""

    def test_a_torn_last_line_is_left_out(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        log = MetricsLog(path)
        write_steps(log, range(1, 4))
        log.close()
        whole = path.read_text()
        for length in range(len(whole.splitlines()[0]) + 1, len(whole)):
            path.write_text(whole[:length])
            complete = whole[:length].count("\n")
            assert [row["step"] for row in read_metrics(path)] == list(range(1, complete + 1))
        path.write_text(whole[:-5])
        MetricsLog(path, completed=2).close()
        assert path.read_text() == "".join(whole.splitlines(keepends=True)[:2])

    @pytest.mark.parametrize("line", ["{", "[]", "{}", '"step"', "\x00"])
    def test_damage_in_the_middle_is_named(self, tmp_path: Path, line: str) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text(f'{{"kind": "step", "step": 1}}\n{line}\n{{"kind": "step", "step": 2}}\n')
        with pytest.raises(ValueError, match=r"metrics\.jsonl is damaged at line 2; begin again in another folder"):
            read_metrics(path, "step")

    def test_missing_or_doubled_steps_are_named(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        for steps in ([1, 3], [1, 2, 2, 3], [1, 2]):
            path.write_text("".join(json.dumps({"kind": "step", "step": step}) + "\n" for step in steps))
            with pytest.raises(ValueError, match=r"metrics\.jsonl does not hold steps 1 to 3, each once"):
                MetricsLog(path, completed=3)

    @pytest.mark.parametrize("figure", [math.nan, math.inf])
    def test_only_finite_figures_are_written(self, tmp_path: Path, figure: float) -> None:
        log = MetricsLog(tmp_path / "metrics.jsonl")
        with pytest.raises(ValueError, match="not JSON compliant"):
            log.write("step", 1, loss=figure)
        log.close()
        assert (tmp_path / "metrics.jsonl").read_text() == ""


class FakeWriter:
    """Stands for TensorBoard's writer, whose own import costs seconds."""

    def __init__(self, folder: str, purge_step: int):
        self.folder, self.purge_step = folder, purge_step
        self.scalars: list[tuple[str, Any, int]] = []
        self.closed = False

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        self.scalars.append((name, value, step))

    def close(self) -> None:
        self.closed = True


class TestTensorBoard:
    def test_figures_go_there_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        module = type(sys)("torch.utils.tensorboard")
        writers: list[FakeWriter] = []
        module.SummaryWriter = lambda *a, **k: writers.append(FakeWriter(*a, **k)) or writers[-1]  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
        log = MetricsLog(tmp_path / "metrics.jsonl", tensorboard=True)
        log.write("measurement", 0, gate_mean=None, sink_rate=0.5)
        log.write("step", 1, loss=1.5, loss_spikes_live=0)
        log.write("evaluation", 1, domain="text", loss=2.5)
        log.close()
        MetricsLog(tmp_path / "metrics.jsonl", completed=1, tensorboard=True).close()
        assert [writer.purge_step for writer in writers] == [0, 2], "what is trained again replaces what was shown"
        assert writers[0].folder == str(tmp_path / "tensorboard") and all(writer.closed for writer in writers)
        assert writers[0].scalars == [
            ("measurement/sink_rate", 0.5, 0),
            ("step/loss", 1.5, 1),
            ("step/loss_spikes_live", 0, 1),
            ("evaluation/loss", 2.5, 1),
        ]

    def test_its_absence_is_one_sentence(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
        with pytest.raises(ValueError, match=r"install gatelab\[track\], or set it to false"):
            MetricsLog(tmp_path / "metrics.jsonl", tensorboard=True)
        assert not (tmp_path / "metrics.jsonl").exists()

    def test_the_real_one_writes_events(self, tmp_path: Path) -> None:
        pytest.importorskip("tensorboard")
        log = MetricsLog(tmp_path / "metrics.jsonl", tensorboard=True)
        write_steps(log, range(1, 3))
        log.close()
        (events,) = (tmp_path / "tensorboard").iterdir()
        assert b"step/loss" in events.read_bytes()
