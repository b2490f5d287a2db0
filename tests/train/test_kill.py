"""SIGKILL at random moments, and in the middle of a save: the run ends with the bits of one that never stopped."""

from __future__ import annotations

import multiprocessing
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from tiny_runs import MIXTURE, Recording, assert_same_run, tiny_run

from gatelab.train import checkpoint, throughput
from gatelab.train.checkpoint import checkpoints, step_of
from gatelab.train.loop import train
from gatelab.train.metrics import read_metrics
from gatelab.train.run_folder import RunFolder

SETTINGS = tiny_run("train.steps=60", "train.checkpoint.every=2", mixture=MIXTURE)
PATIENCE_SECONDS = 120

pytestmark = pytest.mark.slow


def run(folder: Path, cache: Path, announcements: Path, seconds_in_save: float) -> None:
    """What the process to be killed does; it announces when it begins or goes on, and its first step."""

    class Announcing(Recording):
        def start_run(self, name: str, total_steps: int, completed: int = 0) -> None:
            (announcements / "started").touch()

        def update(self, *figures: float) -> None:
            (announcements / "stepped").touch()

    def slow_sha256(path: Path) -> str:
        time.sleep(seconds_in_save)
        return sha256(path)

    sha256 = checkpoint.sha256
    checkpoint.sha256 = slow_sha256
    throughput.measure_peak = lambda dtype, **_: 1e12
    train(SETTINGS, folder, cache, Announcing())


class Child:
    """A process that trains in a folder. It is forked off one that has loaded PyTorch, so it starts at once."""

    def __init__(self, context: ForkServerContext, folder: Path, cache: Path, seconds_in_save: float):
        self.announcements = Path(tempfile.mkdtemp(dir=folder.parent))
        self.process = context.Process(target=run, args=(folder, cache, self.announcements, seconds_in_save))
        self.process.start()

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until it holds, or the process is at its end."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.process.is_alive() and not condition():
            assert time.monotonic() < deadline, "the process is stuck"
            time.sleep(0.002)

    def wait_until(self, announcement: str) -> None:
        self.wait_for((self.announcements / announcement).exists)

    def kill(self) -> bool:
        """Whether it was still running when it was killed."""
        self.process.kill()
        self.process.join()
        return self.process.exitcode == -signal.SIGKILL

    def finish(self) -> None:
        self.process.join(PATIENCE_SECONDS)
        assert self.process.exitcode == 0


@pytest.fixture(scope="module")
def context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gatelab.train.loop"])
    return context


@pytest.fixture
def start(context: ForkServerContext, tmp_path: Path, cache: Path) -> Iterator[Callable[[float], Child]]:
    """Starts the run in a process of its own."""
    children: list[Child] = []

    def start_(seconds_in_save: float) -> Child:
        children.append(Child(context, tmp_path / "run", cache, seconds_in_save))
        return children[-1]

    yield start_
    for child in children:
        child.kill()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    train(SETTINGS, folder, cache)
    return folder


def test_killed_at_random_moments(
    start: Callable[[float], Child], uninterrupted: Path, tmp_path: Path, cache: Path
) -> None:
    """Nine processes, killed while they load, train or save, and a last one that lives to the end."""
    moments = random.Random(20251129)
    metrics, recorded = tmp_path / "run" / "metrics.jsonl", []
    for number in range(9):
        child = start(0.02)
        child.wait_until("started" if number % 3 == 0 else "stepped")
        time.sleep(moments.uniform(0.0, 0.25))
        assert child.kill() or RunFolder(tmp_path / "run").result
        recorded.append(len(read_metrics(metrics, "step")) if metrics.exists() else 0)
    assert len(set(recorded)) > 3, "the kills came at different places"
    start(0.0).finish()
    assert_same_run(tmp_path / "run", uninterrupted)


def test_killed_in_the_middle_of_a_save(
    start: Callable[[float], Child], uninterrupted: Path, tmp_path: Path, cache: Path
) -> None:
    """Weights and optimizer are written, the manifest is not, and the process is gone."""
    saves = tmp_path / "run" / "checkpoints"
    for number in range(1, 4):
        child = start(0.2)
        child.wait_for(lambda number=number: list(saves.glob(f".step_{2 * number:08d}*.tmp/optimizer.safetensors")))
        assert child.kill(), "it died in the save"
        (leftover,) = saves.glob(".step_*.tmp")
        assert not (leftover / "manifest.json").exists()
        assert [step_of(path) for path in checkpoints(saves)] == [2 * n for n in range(1, number)][-2:]
        child = start(0.2)
        child.wait_for(lambda number=number: (saves / f"step_{2 * number:08d}").exists())
        assert child.kill() and not list(saves.glob(f"{leftover.name}*"))
    start(0.0).finish()
    assert_same_run(tmp_path / "run", uninterrupted)
    assert not list((tmp_path / "run").rglob("*.tmp"))
