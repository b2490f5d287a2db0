"""A study's raw data without what can be trained again, to be kept beside the code that it speaks of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from gatelab.files import write_atomically
from gatelab.study.jobs import is_finished
from gatelab.study.report import write_study_report
from gatelab.study.status import known_jobs, open_study
from gatelab.train.metrics import read_metrics
from gatelab.train.run_folder import STUDY_FILE

_LEFT_OUT = {"tokenizer.json", "metrics.jsonl", ".lock"}


def archive_study(folder: Path, destination: Path, every: int = 10) -> Path:
    """Copy a study's records and the files of each finished run into a new folder, and write its report there.

    Left out: checkpoints, tokenizers, and of the training steps in ``metrics.jsonl`` all but the first, the last and
    one in ``every``; every evaluation and measurement stays. Returns the page's path. Raises ``ValueError`` when the
    folder holds no study or the destination exists.
    """
    study = open_study(folder)
    if destination.exists():
        raise ValueError(f"{destination} exists already; choose a new folder to archive {folder} in")
    finished = [job.folder for job in known_jobs(study, folder) if is_finished(folder / job.folder)]
    destination.mkdir(parents=True)
    for name in (STUDY_FILE, *(path.name for path in folder.glob("*.json"))):
        shutil.copyfile(folder / name, destination / name)
    for run in finished:
        target = destination / run
        target.mkdir(parents=True)
        for path in (folder / run).iterdir():
            if path.is_file() and path.name not in _LEFT_OUT:
                shutil.copyfile(path, target / path.name)
        write_atomically(target / "metrics.jsonl", _thinned(folder / run / "metrics.jsonl", every))
    return write_study_report(destination)


def _thinned(metrics: Path, every: int) -> str:
    rows = read_metrics(metrics)
    last = max((row["step"] for row in rows if row["kind"] == "step"), default=0)
    kept = [row for row in rows if row["kind"] != "step" or row["step"] in (1, last) or row["step"] % every == 0]
    return "".join(json.dumps(row) + "\n" for row in kept)
