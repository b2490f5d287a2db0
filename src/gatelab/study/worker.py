"""The process that runs one job and ends with the process that started it."""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import suppress
from io import FileIO
from pathlib import Path

from gatelab.study.jobs import run_job
from gatelab.train.settings import RunSettings

REFUSED = 2


def main() -> None:
    """Read a job from the first line of standard input, and run it on one core.

    The line is JSON with ``settings``, ``folder``, ``cache`` and ``core``. When standard input ends, so does the
    process: a killed driver leaves no worker behind. A refusal is one sentence on standard error and exit status 2.
    """
    # Unbuffered: at its end Python waits for the lock of a buffer that a thread still reads from.
    stream = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)  # noqa: SIM115
    job = json.loads(stream.readline())
    threading.Thread(target=_end_with, args=(stream,), daemon=True).start()
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            os.sched_setaffinity(0, {job["core"]})
    try:
        run_job(RunSettings.parse(job["settings"]), Path(job["folder"]), Path(job["cache"]))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(REFUSED)


def _end_with(stream: FileIO) -> None:
    stream.read(1)
    os._exit(1)


if __name__ == "__main__":
    main()
