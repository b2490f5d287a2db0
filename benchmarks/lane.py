"""One contender of a benchmark in a process of its own: takes turns when it is asked to. See ``side_by_side.py``.

    python lane.py CONTENDER SETTINGS

CONTENDER is a module of ``contenders`` with ``prepare(settings) -> turn``; ``turn()`` does the work once and returns
figures of it (a dictionary, possibly empty). SETTINGS is a JSON mapping: ``threads``, ``warm_up`` (turns before the
first counted one), and what the contender reads. Each line on standard input asks for a turn; the answer is one JSON
line with its seconds, its figures and the most bytes that the process held during it (``None`` outside of Linux);
``empty_bytes`` is what it held with everything imported and nothing prepared. Nothing of GateLab is imported here, so
that a peer can run in an environment of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any, TextIO

import torch
from process_memory import forget_peak, resident_bytes


def serve(name: str, settings: dict[str, Any], answers: TextIO) -> None:
    """Prepare, say so, and take turns until standard input ends."""

    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    torch.set_num_threads(settings["threads"])
    began = time.perf_counter()
    contender = importlib.import_module(f"contenders.{name}")
    empty_bytes = resident_bytes("VmRSS")
    turn = contender.prepare(settings)
    for _ in range(settings["warm_up"]):
        turn()
    ready = time.perf_counter() - began
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    answer({"ready": ready, **versions, "empty_bytes": empty_bytes})
    for _ in sys.stdin:
        forget_peak()
        began = time.perf_counter()
        figures = turn()
        seconds = time.perf_counter() - began
        answer({"seconds": seconds, "figures": figures, "peak_bytes": resident_bytes("VmHWM")})


if __name__ == "__main__":
    # What a contender prints must not be read as an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.argv[1], json.loads(sys.argv[2]), answers)
