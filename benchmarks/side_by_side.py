"""Contenders in turns: each in its own process and, where it needs one, its own environment, one at work at a time.

Machines drift by more than programs differ, so only figures of one run are compared: in every round each contender
takes its turns once, in an order drawn anew, and a ratio is the median over rounds of the ratios within a round, with
the interval of order statistics. All contenders have the same threads, allocator and, as far as they can, dtypes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gatelab.study.overhead import MIN_ROUNDS, median_ratio

LANE = Path(__file__).with_name("lane.py")


class Contender(NamedTuple):
    """What takes part: a module of ``contenders``, its settings, and the interpreter of its environment."""

    name: str
    module: str
    settings: Mapping[str, Any]
    python: str = sys.executable


class Lane:
    """A contender at work."""

    def __init__(self, contender: Contender, threads: int, warm_up: int, preload: str | None):
        self.contender = contender
        settings = {**contender.settings, "threads": threads, "warm_up": warm_up}
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)} | ({"LD_PRELOAD": preload} if preload else {})
        self._process = subprocess.Popen(
            [contender.python, "-B", str(LANE), contender.module, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self.start = self._read()

    def take_turn(self) -> dict[str, Any]:
        """The seconds of a turn and its figures."""
        assert self._process.stdin is not None
        self._process.stdin.write("turn\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.contender.name} ended with status {self._process.wait()}; its words stand above")
        return json.loads(line)


def measure(
    contenders: Sequence[Contender],
    rounds: int,
    threads: int,
    preload: str | None = None,
    warm_up: int = 3,
    watch: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """A row for each contender: how it started, seconds and peak of its turn in each round, figures after the last."""
    with ExitStack() as stack:
        lanes = []
        for contender in contenders:
            lane = stack.enter_context(closing(Lane(contender, threads, warm_up, preload)))
            watch(f"{contender.name}: ready after {lane.start['ready']:.0f} s")
            lanes.append(lane)
        rows = {
            lane: {"name": lane.contender.name, "start": lane.start, "seconds": [], "peak_bytes": [], "figures": {}}
            for lane in lanes
        }
        draw = random.Random(0)
        for _ in range(rounds):
            for lane in draw.sample(lanes, len(lanes)):
                found = lane.take_turn()
                rows[lane]["seconds"].append(found["seconds"])
                rows[lane]["peak_bytes"].append(found["peak_bytes"])
                rows[lane]["figures"] = found["figures"]
    return list(rows.values())


def ratios(rows: Sequence[Mapping[str, Any]], baseline: str) -> dict[str, dict[str, float]]:
    """Each contender's time over the baseline's: the median over rounds and its 95 % interval."""
    base = next(row["seconds"] for row in rows if row["name"] == baseline)
    return {row["name"]: median_ratio(row["seconds"], base)._asdict() for row in rows}


def apart_from_limit(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The row of the bare products, a contender named "limit", and the others."""
    limit = next(row for row in rows if row["name"] == "limit")
    return limit, [row for row in rows if row is not limit]


def limit_speeds(limit: Mapping[str, Any]) -> list[float]:
    """FLOPs a second of the bare products (``contenders/peak.py``) in each round."""
    return [limit["figures"]["flops"] / seconds for seconds in limit["seconds"]]


def limit_share(flops: float, row: Mapping[str, Any], limit: Mapping[str, Any]) -> float:
    """Turns of so many FLOPs against the bare products of the same round: the median over rounds."""
    shares = [flops / seconds / speed for seconds, speed in zip(row["seconds"], limit_speeds(limit), strict=True)]
    return statistics.median(shares)


def median(values: Sequence[float]) -> dict[str, float]:
    """The median over rounds and its 95 % interval."""
    return median_ratio(list(values), [1.0] * len(values))._asdict()


def machine(threads: int, preload: str | None) -> dict[str, Any]:
    """What all contenders ran on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "allocator": Path(preload).name if preload else "the C library's",
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(),
    }


def options(description: str | None, rounds: int = 15) -> argparse.ArgumentParser:
    """A benchmark's parser with what all contenders have in common."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--allocator", help="a library to preload for every contender, such as tcmalloc")
    return parser


def read_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What the command line says; too few rounds for an interval end the program."""
    given = parser.parse_args()
    if given.rounds < MIN_ROUNDS:
        parser.error(f"--rounds {given.rounds}: an interval of a median takes at least {MIN_ROUNDS}")
    return given


def command_line(script: str, parser: argparse.ArgumentParser, given: argparse.Namespace) -> str:
    """The command as others may type it: what was not left at its default, without this machine's folders."""
    words = ["python", f"benchmarks/{script}"]
    for name, value in vars(given).items():
        if name not in ("out", "cache") and value != parser.get_default(name):
            shown = Path(value).name if name in ("allocator", "peers") else value
            values = [] if shown is True else shown if isinstance(shown, list) else [shown]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return shlex.join(words)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    lines = info.read_text(encoding="utf-8").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
