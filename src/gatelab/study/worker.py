"""The process that runs one job after another and ends with the process that started it."""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import suppress
from io import FileIO
from pathlib import Path
from queue import SimpleQueue

from gatelab.study.jobs import run_job
from gatelab.train.settings import RunSettings

REFUSED = 2


def main() -> None:
    """Run the jobs that standard input's lines name, on one core, until an empty line.

    A line is JSON with ``settings``, ``folder``, ``cache`` and ``core``. When standard input ends, so does the process
    at once: a killed driver leaves no worker behind. A refusal is one sentence on standard error and exit status 2.
    """
    # Unbuffered: at its end Python waits for the lock of a buffer that a thread still reads from.
    stream = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)  # noqa: SIM115
    lines = SimpleQueue[bytes]()
    threading.Thread(target=_read, args=(stream, lines), daemon=True).start()
    while line := lines.get().strip():
        job = json.loads(line)
        if hasattr(os, "sched_setaffinity"):
            with suppress(OSError):
                os.sched_setaffinity(0, {job["core"]})
        try:
            run_job(RunSettings.parse(job["settings"]), Path(job["folder"]), Path(job["cache"]))
        except (ValueError, OSError) as error:
            print(error, file=sys.stderr)
            sys.exit(REFUSED)


def _read(stream: FileIO, lines: SimpleQueue[bytes]) -> None:
    for line in stream:
        lines.put(line)
    os._exit(1)


if __name__ == "__main__":
    main()
