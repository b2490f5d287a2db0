"""Processes and Ray: the same bits as one run after another, and nothing lost or doubled by a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tiny_studies import pid_working_in, synthetic_study

from gatelab.study.executors import MOST_DEATHS, Executor, Processes, Ray, Serial, Task, open_executor
from gatelab.study.jobs import JobResult
from gatelab.study.runner import conduct
from gatelab.study.study import Study
from gatelab.train.metrics import read_metrics
from gatelab.train.parallel.process import cpu_threads

STEPS = 150
LONG = (
    f"train.steps={STEPS}",
    "train.checkpoint.every=5",
    f"train.evaluation.every={STEPS}",
    f"train.evaluation.measure_every={STEPS}",
)
DRIVER = """
import sys
from pathlib import Path
from gatelab.study.executors import Processes
from gatelab.study.runner import conduct
from gatelab.study.study import Study
folder = Path(sys.argv[1])
conduct(Study.from_yaml(Path(sys.argv[2]).read_text()), folder, folder.parent / "cache", Processes())
"""


def long_study() -> Study:
    return synthetic_study(*LONG)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[JobResult]:
    folder = tmp_path_factory.mktemp("serial")
    with cpu_threads(1):
        return conduct(long_study(), folder / "study", folder / "cache")


def assert_whole(results: Sequence[JobResult], expected: Sequence[JobResult], folder: Path) -> None:
    """Equal bits, and each step of each job recorded once."""
    for one, other in zip(results, expected, strict=True):
        assert (one.folder, one.heldout_loss, one.measurement) == (other.folder, other.heldout_loss, other.measurement)
        rows = read_metrics(folder / one.folder / "metrics.jsonl", "step")
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.02)


def wait_for_checkpoint(folder: Path) -> None:
    wait_until(lambda: any((folder / "checkpoints").glob("step_*")))


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def kill_one_worker(executor: Executor, folder: Path) -> None:
    """Have the executor's first tick with a worker in ``folder`` kill it, once."""
    real, killed = executor.run, []

    def run(tasks: Sequence[Task], tick: Callable[[], None]) -> None:
        def kill_then_tick() -> None:
            if not killed and any((folder / "checkpoints").glob("step_*")):
                killed.append(pid_working_in(folder))
                os.kill(killed[0], signal.SIGKILL)
            tick()

        real(tasks, kill_then_tick)

    executor.run = run  # type: ignore[method-assign]


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="processes are found through /proc")


@needs_proc
@pytest.mark.slow
def test_killed_driver_and_killed_worker_lose_and_double_nothing(
    uninterrupted: list[JobResult], tmp_path: Path
) -> None:
    folder, file = tmp_path / "study", tmp_path / "tiny.yaml"
    file.write_text(long_study().to_yaml())
    with subprocess.Popen([sys.executable, "-c", DRIVER, folder, file]) as driver:
        wait_for_checkpoint(folder / "ungated")
        worker = pid_working_in(folder / "ungated")
        driver.kill()
    wait_until(lambda: not is_alive(worker))
    assert not (folder / "ungated" / "result.json").exists()
    executor = Processes()
    kill_one_worker(executor, folder / "gated")
    results = conduct(long_study(), folder, tmp_path / "cache", executor)
    assert_whole(results, uninterrupted, folder)
    changed = {one.folder: (folder / one.folder / "result.json").stat().st_mtime_ns for one in results}
    conduct(long_study(), folder, tmp_path / "cache", executor)
    assert changed == {one.folder: (folder / one.folder / "result.json").stat().st_mtime_ns for one in results}


@pytest.mark.slow
def test_one_worker_runs_job_after_job_and_ends_by_itself(
    uninterrupted: list[JobResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, started = subprocess.Popen, []

    def popen(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(real(*arguments, **options))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr("gatelab.study.executors.subprocess.Popen", popen)
    results = conduct(long_study(), tmp_path / "study", tmp_path / "cache", Processes(1))
    assert_whole(results, uninterrupted, tmp_path / "study")
    assert [worker.returncode for worker in started] == [0] and len(results) > 1


@needs_proc
@pytest.mark.slow
def test_a_local_ray_cluster_loses_a_worker(
    uninterrupted: list[JobResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    executor = Ray(num_workers=2)
    try:
        assert executor.num_workers == 2
        kill_one_worker(executor, tmp_path / "study" / "ungated")
        results = conduct(long_study(), tmp_path / "study", tmp_path / "cache", executor)
        assert_whole(results, uninterrupted, tmp_path / "study")
        refused = synthetic_study("train.checkpoint.resume=required")
        with pytest.raises(ValueError, match="holds no run to continue and train"):
            conduct(refused, tmp_path / "refused", tmp_path / "cache", executor)
    finally:
        ray.shutdown()


class Stubborn(Processes):
    """Runs a given program in place of the worker."""

    def __init__(self, program: str, monkeypatch: pytest.MonkeyPatch):
        super().__init__(1)
        real = subprocess.Popen
        self.started = 0

        def popen(command: list[str], **options: object) -> subprocess.Popen[bytes]:
            self.started += 1
            read = "import sys; sys.stdin.buffer.readline(); "
            return real([sys.executable, "-S", "-c", read + program], **options)  # type: ignore[call-overload]

        monkeypatch.setattr("gatelab.study.executors.subprocess.Popen", popen)


@pytest.mark.parametrize(
    ("program", "error", "message", "starts"),
    [
        (
            "import os; os.kill(os.getpid(), 9)",
            OSError,
            "was killed 3 times, last by signal 9; is the memory",
            MOST_DEATHS,
        ),
        ("print('no such', file=sys.stderr); sys.exit(2)", ValueError, "^no such$", 1),
        ("raise TypeError('a bug')", RuntimeError, "failed with exit status 1:\n.*TypeError: a bug", 1),
    ],
)
def test_what_a_worker_can_end_with(
    program: str, error: type[Exception], message: str, starts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = Stubborn(program, monkeypatch)
    with pytest.raises(error, match=f"(?s){message}"):
        conduct(synthetic_study(), tmp_path / "study", tmp_path / "cache", executor)
    assert executor.started == starts
    assert not (tmp_path / "study").exists()


def test_a_refused_task_stops_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Stubborn("import time; time.sleep(60)", monkeypatch)
    began = time.monotonic()

    def tick() -> None:
        raise ValueError("enough")

    settings = synthetic_study().settings_of(synthetic_study().arms[0])
    with pytest.raises(ValueError, match="enough"):
        executor.run([Task(settings, tmp_path / "run", tmp_path / "cache")], tick)
    assert executor.started == 1 and time.monotonic() - began < 30


def test_more_threads_than_a_core_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.threads=2 is impossible with the executor processes, which gives"):
        conduct(synthetic_study("train.threads=2"), tmp_path / "study", tmp_path / "cache", Processes(1))
    assert not (tmp_path / "study").exists()


def test_workers_without_a_core_are_refused() -> None:
    for number in (0, 10_000):
        with pytest.raises(ValueError, match=f"{number} workers can't have one core each of .*; choose 1 to "):
            Processes(number)


def test_executors_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_executor("serial"), Serial) and open_executor("processes", 1).num_workers == 1
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"the executor ray needs the package ray: install gatelab\[ray\]"):
        open_executor("ray")
