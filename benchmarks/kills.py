"""SIGKILL at random moments of tiny runs, which are started again until they are finished.

    python benchmarks/kills.py [--kills 200] [--seed 0] [--out benchmarks/results/kills.json]

Three kinds of work are killed in turn: a run on a synthetic task, a run that first writes the shards of its text, and a
study of two arms. Each kill waits for a phase drawn at random (training, evaluation, measurement, saving, the end of a
run, shard writing, or any moment) and comes a little later. What is finished in the end must equal undisturbed work
file by file: weights, optimizer state, every row of the metrics, scores, measurements, shards; times are left out. A
last round is finished without kills. Writes JSON: kills by kind of work and phase, rounds, and what differed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from gatelab.data import shard_writing
from gatelab.files import write_atomically
from gatelab.study.runner import conduct
from gatelab.study.study import Study
from gatelab.train import loop, saver, throughput

PHASES = ("between", "training", "evaluation", "measurement", "saving", "ending", "shard writing")
IN_RUNS = ("any", "training", "evaluation", "measurement", "saving", "ending")
TARGETS = {"run": IN_RUNS, "text": ("any", "shard writing", "training", "saving"), "study": IN_RUNS}
LONGEST_WAIT, LATEST_OCCURRENCE = 0.02, 5
PATIENCE_SECONDS = 120
TIMES = {
    "seconds",
    "tokens_per_second",
    "peak_flops",
    "peak_share",
    "training_seconds",
    "evaluation_seconds",
    "measurement_seconds",
}
UNCOMPARED = {".lock", ".html"}
TINY = (
    "model.width=16",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.head_size=8",
    "model.feedforward_width=24",
    "data.context=16",
    "train.sequences_per_step=4",
    "train.steps=12",
    "train.threads=1",
    "train.schedule.warmup_steps=1",
    "train.evaluation={every: 4, windows: 3, measure_every: 3, final_measured_windows: 3}",
    "train.checkpoint.every=2",
)


def tiny_study() -> Study:
    """Ungated against one elementwise gate, twelve steps each."""
    arms = [{"name": "ungated"}, {"name": "gated", "assignments": ["gate=sdpa_elementwise"]}]
    about = {"name": "kills", "question": "Does a kill change anything?", "recipe": "backcopy"}
    return Study.parse({**about, "assignments": list(TINY), "arms": arms, "baseline": "ungated"})


def work(kind: str, folder: Path) -> None:
    """Do one kind of work in a folder, or go on with it there; all it needs is made in the folder."""
    study, cache = tiny_study(), folder / "cache"
    if kind == "study":
        conduct(study, folder / "study", cache)
        return
    settings = study.settings_of(study.arms[1])
    if kind == "text":
        source = {"name": "files", "path": str(folder.parent / "text.jsonl"), "heldout_fraction": 0.2}
        overrides = ["data.synthetic=null", f"data.train={json.dumps(source)}", "data.tokenizer.vocab_size=300"]
        settings = settings.with_overrides([*overrides, "model.vocab_size=300", "data.tokens_per_shard=1024"])
    loop.train(settings, folder / "run", cache)


def write_text(file: Path) -> None:
    """Made-up documents, whose tokens fill a dozen shards."""
    lines = [{"text": f"Document {n} says {n * n} and {n % 7}, then rests. " * (1 + n % 5)} for n in range(300)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def work_to_be_killed(kind: str, folder: Path, phase: Any) -> None:
    """The same in a process of its own, which shows the phase that it is in."""
    os.fsync = lambda descriptor: None  # matters after a power cut alone
    throughput.measure_peak = lambda dtype, **_: 1e12
    for owner, name, number in (
        (loop, "take_step", 1),
        (loop, "score", 2),
        (loop, "measure_heldout", 3),
        (saver, "save_state", 4),
        (loop, "conclude", 5),
        (shard_writing._Writer, "close_shard", 6),
    ):
        setattr(owner, name, _shown(getattr(owner, name), number, phase))
    work(kind, folder)


def _shown(function: Callable[..., Any], number: int, phase: Any) -> Callable[..., Any]:
    @wraps(function)
    def showing(*arguments: Any, **options: Any) -> Any:
        before, phase.value = phase.value, number
        try:
            return function(*arguments, **options)
        finally:
            phase.value = before

    return showing


def kill_once(context: ForkServerContext, kind: str, folder: Path, moments: random.Random) -> str | None:
    """Start or go on with the work and kill it in a random phase; the phase it died in, or ``None`` at its end."""
    phase = context.RawValue("i", 0)
    process = context.Process(target=work_to_be_killed, args=(kind, folder, phase))
    process.start()
    target = moments.choice(TARGETS[kind])
    if target == "any":
        process.join(moments.uniform(0.0, 1.0))
    else:
        occurrences = 0
        wanted, until = moments.randint(1, LATEST_OCCURRENCE), time.monotonic() + PATIENCE_SECONDS
        was_in = False
        while process.is_alive() and occurrences < wanted:
            assert time.monotonic() < until, f"{kind} in {folder} is stuck"
            is_in = phase.value == PHASES.index(target)
            occurrences += is_in and not was_in
            was_in = is_in
            time.sleep(0.0003)
        time.sleep(moments.uniform(0.0, LONGEST_WAIT))
    process.kill()
    process.join()
    if process.exitcode == -signal.SIGKILL:
        return PHASES[phase.value]
    assert process.exitcode == 0, f"{kind} in {folder} failed with exit status {process.exitcode}"
    return None


def finish(context: ForkServerContext, kind: str, folder: Path) -> None:
    """Do the work, or what is left of it, undisturbed."""
    process = context.Process(target=work_to_be_killed, args=(kind, folder, context.RawValue("i", 0)))
    process.start()
    process.join(PATIENCE_SECONDS)
    process.kill()
    assert process.exitcode == 0, f"{kind} in {folder} failed with exit status {process.exitcode}"


def contents(folder: Path) -> dict[str, str]:
    """A digest of every file under a folder, without times; tensors by value."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix not in UNCOMPARED and path.name not in UNCOMPARED:
            found[str(path.relative_to(folder))] = hashlib.sha256(_timeless(path)).hexdigest()
    return found


def _timeless(path: Path) -> bytes:
    if path.name == "manifest.json" and path.parent.name.startswith("step_"):
        return b""  # checksums of the files beside it, which are compared by value
    if path.suffix in (".json", ".jsonl"):
        lines = path.read_text(encoding="utf-8").splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        return json.dumps([_without_times(json.loads(line)) for line in lines], sort_keys=True).encode()
    if path.suffix == ".safetensors":
        return _bytes_of(load_file(path))
    return path.read_bytes()


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_times(part) for name, part in value.items() if name not in TIMES}
    return [_without_times(part) for part in value] if isinstance(value, list) else value


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return repr((value.dtype, value.shape)).encode() + value.numpy().tobytes()
    if isinstance(value, dict):
        return b"".join(repr(name).encode() + _bytes_of(part) for name, part in sorted(value.items(), key=str))
    if isinstance(value, list):
        return b"".join(map(_bytes_of, value))
    return repr(value).encode()


def differences(folder: Path, undisturbed: Path) -> list[str]:
    """The files that only one of two folders has, or that are not equal."""
    left, right = contents(folder), contents(undisturbed)
    return sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))


def kill(num_kills: int, seed: int, root: Path) -> dict[str, Any]:
    """Kill so many times, finish what is left, and compare every round with undisturbed work."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gatelab.study.runner", "gatelab.data.prepare"])
    moments, kinds = random.Random(seed), list(TARGETS)
    write_text(root / "text.jsonl")
    for kind in kinds:
        finish(context, kind, root / f"{kind}_undisturbed")
    kills: Counter[tuple[str, str]] = Counter()
    rounds, differing = Counter[str](), list[str]()
    while kills.total() < num_kills:
        kind = kinds[rounds.total() % len(kinds)]
        folder = root / f"{kind}_{rounds[kind]}"
        most = kills.total() + max(4, num_kills // 12)
        while kills.total() < min(most, num_kills) and (died_in := kill_once(context, kind, folder, moments)):
            kills[kind, died_in] += 1
        finish(context, kind, folder)
        differing += [f"{folder.name}/{name}" for name in differences(folder, root / f"{kind}_undisturbed")]
        rounds[kind] += 1
    by_kind = {kind: {phase: kills[kind, phase] for phase in PHASES if kills[kind, phase]} for kind in kinds}
    return {
        "kills": kills.total(),
        "seed": seed,
        "kills_by_work_and_phase": by_kind,
        "rounds": dict(rounds),
        "files_compared_in_a_round": {kind: len(contents(root / f"{kind}_undisturbed")) for kind in kinds},
        "differing_files": differing,
        "passed": not differing,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kills.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = kill(arguments.kills, arguments.seed, Path(folder))
    write_atomically(arguments.out, json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    if not found["passed"]:
        raise SystemExit("the killed work differs from the undisturbed")


if __name__ == "__main__":
    main()
