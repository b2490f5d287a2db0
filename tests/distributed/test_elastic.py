"""A rank that dies is started again by torchrun, and the run goes on from its last checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from parallel_parity import on_ranks
from test_parallel_runs import rows_of, run_settings, train_on_rank, whole_state

from gatelab.train.checkpoint import checkpoints
from gatelab.train.parallel.mesh import running_ranks
from gatelab.train.settings import ParallelSettings, RunSettings

LIMIT_SECONDS = 300
STEPS = ("train.steps=8", "train.checkpoint.every=2", "train.evaluation.every=8", "train.evaluation.measure_every=8")
SLOW_RUN = """
import sys, time
from pathlib import Path
from gatelab.train import loop
from gatelab.train.settings import RunSettings

take_step = loop.take_step

def slow_step(*arguments):
    time.sleep(0.3)
    return take_step(*arguments)

loop.take_step = slow_step
folder = Path(sys.argv[1])
loop.train(RunSettings.from_yaml((folder / "asked.yaml").read_text()), folder / "run", folder / "cache")
"""


def settings_of(*words: str) -> RunSettings:
    return run_settings("train.parallel.shard=all", *STEPS, *words)


def processes_of_ranks(agent: int) -> dict[int, int]:
    """Process numbers of the ranks that an agent of torchrun has started, by rank."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == agent:
                environment = (folder / "environ").read_bytes().split(b"\0")
                ranks = [int(one[5:]) for one in environment if one.startswith(b"RANK=")]
                found |= {rank: int(folder.name) for rank in ranks}
        except OSError:
            continue
    return found


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run of two ranks, of which the second was killed between two checkpoints."""
    (tmp_path / "asked.yaml").write_text(settings_of().to_yaml())
    (tmp_path / "slow_run.py").write_text(SLOW_RUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", str(tmp_path / "slow_run.py"), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        run, until = tmp_path / "run", time.monotonic() + LIMIT_SECONDS
        while not (saved := checkpoints(run / "checkpoints")) and time.monotonic() < until:
            assert agent.poll() is None, agent.stdout and agent.stdout.read()
            time.sleep(0.05)
        assert saved, "no checkpoint in time"
        before = processes_of_ranks(agent.pid)
        os.kill(before[1], signal.SIGKILL)
        output, _ = agent.communicate(timeout=LIMIT_SECONDS)
        assert agent.returncode == 0, output[-3000:]
        assert "exitcode: -9" in output, "torchrun saw the kill"
        yield run
    finally:
        agent.kill()


def test_restarts_that_would_meet_the_dead_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    started = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    refused = pytest.raises(ValueError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
    with refused, running_ranks(ParallelSettings(shard="all")):
        pass


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the processes of Linux")
def test_a_killed_rank_costs_only_the_steps_since_the_last_checkpoint(killed: Path, tmp_path: Path) -> None:
    """Bit for bit the run of two ranks that nobody killed, and the batches and losses of one rank."""
    whole, alone = tmp_path / "whole", tmp_path / "alone"
    on_ranks(2, train_on_rank, settings_of(), whole, tmp_path / "cache")
    kinds = ("step", "evaluation", "measurement")
    rows = [[{**row, "seconds": 0} for row in rows_of(folder) if row["kind"] in kinds] for folder in (killed, whole)]
    assert rows[0] == rows[1]
    states = [whole_state(folder / "checkpoints" / "step_00000008") for folder in (killed, whole)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())
    on_ranks(1, train_on_rank, settings_of(), alone, tmp_path / "cache")
    losses = [[row["loss"] for row in rows_of(folder) if row["kind"] == "step"] for folder in (killed, alone)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)
