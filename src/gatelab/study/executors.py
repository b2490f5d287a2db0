"""Where the jobs of a study run: in this process, side by side in processes of one core each, or on a Ray cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Protocol

from gatelab.study.jobs import is_finished, run_job
from gatelab.study.worker import REFUSED
from gatelab.train.settings import RunSettings
from gatelab.train.watch import Unwatched, Watch

MOST_DEATHS = 3
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
_POLL_SECONDS = 0.1
ExecutorName = Literal["serial", "processes", "ray"]


class Task(NamedTuple):
    """One job that is not finished, where it runs and where its data is."""

    settings: RunSettings
    folder: Path
    cache: Path


class Executor(Protocol):
    """Runs tasks that know nothing of each other; returns when all are finished.

    ``tick`` is called again and again meanwhile. A task that is refused stops all with its ``ValueError`` or
    ``OSError``; what the others have done is kept, as checkpoints.
    """

    num_workers: int

    def run(self, tasks: Sequence[Task], tick: Callable[[], None]) -> None: ...


class Serial:
    """One task after another in this process, on all of its threads; ``watch`` sees each step."""

    num_workers = 1

    def __init__(self, watch: Watch | None = None):
        self._watch = watch or Unwatched()

    def run(self, tasks: Sequence[Task], tick: Callable[[], None]) -> None:
        for task in tasks:
            run_job(task.settings, task.folder, task.cache, _Ticking(self._watch, tick))
            tick()


class _Ticking(Watch):
    """Hands on what it sees, and ticks."""

    def __init__(self, watch: Watch, tick: Callable[[], None]):
        self._tick = tick
        self.start_run, self.finish_run, self.message = watch.start_run, watch.finish_run, watch.message
        self._update = watch.update

    def update(self, step: int, loss: float, tokens_per_second: float, peak_share: float) -> None:
        self._update(step, loss, tokens_per_second, peak_share)
        self._tick()


class Processes:
    """Tasks side by side, in processes with one thread and a core of their own.

    On two cores that is faster together than one run on both. A worker that is killed is started again, up to three
    times for a task, and goes on from its last checkpoint; when this process is killed, its workers end.
    """

    def __init__(self, num_workers: int | None = None):
        """``num_workers``: as many as this process may use cores when ``None``; ``ValueError`` for more, or none."""
        cores = (
            sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
        )
        self.num_workers = len(cores) if num_workers is None else num_workers
        if not 1 <= self.num_workers <= len(cores):
            raise ValueError(
                f"{num_workers} workers can't have one core each of {len(cores)}; choose 1 to {len(cores)}"
            )
        self._cores = cores[: self.num_workers]

    def run(self, tasks: Sequence[Task], tick: Callable[[], None]) -> None:
        for task in tasks:
            _require_one_thread(task)
        waiting, workers, deaths = deque(tasks), dict[int, _Worker](), Counter[Path]()
        try:
            while waiting or workers:
                for core in self._cores:
                    if core not in workers and waiting:
                        workers[core] = _Worker(waiting.popleft(), core)
                for core, worker in list(workers.items()):
                    status = worker.exit_status()
                    if status is None:
                        if is_finished(worker.task.folder):
                            worker.begin(waiting.popleft()) if waiting else worker.end()
                        continue
                    errors = worker.errors()
                    workers.pop(core).stop()
                    if status != 0 and not is_finished(worker.task.folder):
                        deaths[worker.task.folder] += 1
                        _require_another_try(worker.task, status, errors, deaths[worker.task.folder])
                        waiting.appendleft(worker.task)
                tick()
                time.sleep(_POLL_SECONDS)
        finally:
            for worker in workers.values():
                worker.stop()


class _Worker:
    """A process that runs one task after another, so that it imports, and learns to compile, once."""

    def __init__(self, task: Task, core: int):
        self._core = core
        self._is_ending = False
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gatelab.study.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env=os.environ | ONE_THREAD,
        )
        self.begin(task)

    def begin(self, task: Task) -> None:
        """Give it a task, once those before are finished."""
        self.task = task
        self._errors.seek(0)
        self._errors.truncate()
        job = {"settings": task.settings.to_mapping(), "folder": str(task.folder), "cache": str(task.cache)}
        self._write(json.dumps(job | {"core": self._core}))

    def end(self) -> None:
        """Have it end once its task has returned."""
        if not self._is_ending:
            self._is_ending = True
            self._write("")

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has just died, which its exit status will say
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def exit_status(self) -> int | None:
        """``None`` while it runs."""
        return self._process.poll()

    def errors(self) -> str:
        """What it wrote to standard error in its last task."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()

    def stop(self) -> None:
        """End it, wait until it has, and close what it was connected by."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def _require_one_thread(task: Task) -> None:
    threads = task.settings.train.threads
    if threads not in (None, 1):
        raise ValueError(
            f"train.threads={threads} is impossible with the executor processes, which gives each job one core; "
            "leave it unset or run with the executor serial"
        )


def _require_another_try(task: Task, status: int, errors: str, deaths: int) -> None:
    """Raise the worker's error, unless it was killed for the first or second time."""
    if status == REFUSED:
        raise ValueError(errors)
    if status > 0:
        raise RuntimeError(f"the worker in {task.folder} failed with exit status {status}:\n{errors}")
    if deaths >= MOST_DEATHS:
        raise OSError(
            f"the worker in {task.folder} was killed {deaths} times, last by signal {-status}; is the memory too "
            "small? fewer workers need less"
        )


class Ray:
    """Tasks on a Ray cluster, one core each.

    Folder, cache and what the settings name by path must be on a file system that all its machines share.

    A task whose worker or machine dies is run again, up to three times, and goes on from its last checkpoint.
    """

    def __init__(self, address: str | None = None, num_workers: int | None = None):
        """The cluster at ``address`` ("auto": the one on this machine), else a local one with ``num_workers`` cores.

        Raises ``ValueError`` when Ray is not installed.
        """
        try:
            ray: Any = import_module("ray")
        except ImportError:
            raise ValueError("the executor ray needs the package ray: install gatelab[ray]") from None
        if not ray.is_initialized():
            cores = None if address else num_workers
            ray.init(address or "local", num_cpus=cores, include_dashboard=False if not address else None)
        self._ray = ray
        self.num_workers = int(ray.cluster_resources()["CPU"])

    def run(self, tasks: Sequence[Task], tick: Callable[[], None]) -> None:
        for task in tasks:
            _require_one_thread(task)
        remote = self._ray.remote(num_cpus=1, max_retries=MOST_DEATHS, runtime_env={"env_vars": ONE_THREAD})(run_job)
        running = [remote.remote(task.settings, task.folder.absolute(), task.cache.absolute()) for task in tasks]
        try:
            while running:
                finished, running = self._ray.wait(running, timeout=1.0)
                self._ray.get(finished)
                tick()
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayError as error:
            raise OSError(f"a task was lost more than {MOST_DEATHS} times: {error}") from None
        finally:
            for one in running:
                self._ray.cancel(one, force=True)


def open_executor(name: ExecutorName, num_workers: int | None = None, watch: Watch | None = None) -> Executor:
    """An executor by name; ``watch`` sees the steps of a serial one. Errors are those of its class."""
    if name == "serial":
        return Serial(watch)
    return Processes(num_workers) if name == "processes" else Ray(num_workers=num_workers)
