"""Running programs that a model wrote, for tasks that are scored by tests (HumanEval, arXiv 2107.03374).

The program runs in a process of its own: Python's isolated mode, an empty environment, a temporary folder, limits on
time, memory and file sizes. That stops accidents. It is no wall against malice: run strange models in a container.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

TIMEOUT_SECONDS = 10.0
MEMORY_BYTES = 2 << 30
FILE_BYTES = 16 << 20
REACHED_THE_END = 77  # a program that leaves early, with sys.exit(0) say, ends with another code
RUNNER = f"""
import os, resource, sys
for limit, value in (("AS", {MEMORY_BYTES}), ("FSIZE", {FILE_BYTES}), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (value, value))
exec(sys.stdin.read(), {{"__name__": "__main__"}})
os._exit({REACHED_THE_END})
"""


def passes(program: str, timeout_seconds: float = TIMEOUT_SECONDS) -> bool:
    """Whether a Python program reaches its end in time and without an error."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", RUNNER],
            cwd=folder,
            env={},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.communicate(program.encode("utf-8", "replace"), timeout_seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(process)
    return process.returncode == REACHED_THE_END


def pass_at_1(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Whether one greedy completion of a HumanEval problem passes its tests, as lm-eval asks for it."""
    program = f"{doc['prompt']}{results[0]}\n\n{doc['test']}\ncheck({doc['entry_point']})\n"
    return {"pass@1": float(passes(program))}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the program and whatever it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(BrokenPipeError):
        process.communicate()
