"""How much of a study's time its training steps took, from the files of the study.

    python benchmarks/study_throughput.py STUDY_FOLDER [--after TIME] [--out benchmarks/results/study_throughput]

A run's whole time is that from its settings, written when its data are open, to its result. Pure training is its steps
alone, its first at the median of the others, since that one compiles. What separates the two is compiling, evaluating,
measuring and saving; starting a worker, once a study, comes on top. ``--after`` leaves out runs begun before a time
(ISO 8601), where a study was stopped or the machine was used by others. Run it before the folder is copied: the times
are those of its files. Writes ``NAME.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from datetime import datetime
from pathlib import Path
from typing import Any

from side_by_side import machine

from gatelab.files import write_atomically
from gatelab.study.runner import read_results
from gatelab.study.status import open_study
from gatelab.train.metrics import read_metrics
from gatelab.train.run_folder import RunFolder

PARTS = ("whole", "pure_training", "first_step_extra", "evaluation", "measurement")


def parts_of(folder: Path) -> dict[str, Any]:
    """Seconds of one run by what they were spent on."""
    run = RunFolder(folder)
    steps = [row["seconds"] for row in read_metrics(run.metrics, "step")]
    typical, result = statistics.median(steps[1:]), run.result
    assert result is not None
    return {
        "run": f"{folder.parent.name}/{folder.name}",
        "whole": _written(folder / "result.json") - _written(folder / "settings.yaml"),
        "pure_training": sum(steps[1:]) + typical,
        "first_step_extra": steps[0] - typical,
        "evaluation": result["evaluation_seconds"],
        "measurement": result["measurement_seconds"],
    }


def throughput_of(folder: Path, after: datetime) -> dict[str, Any]:
    """The parts of each run begun after a time, and how many times their pure training all runs together took."""
    folders = [folder / one.folder for one in read_results(folder)]
    runs = [parts_of(one) for one in folders if _written(one / "settings.yaml") > after.timestamp()]
    sums = {part: sum(run[part] for run in runs) for part in PARTS}
    return {
        "study": open_study(folder).name,
        "machine": machine(1, None),
        "times_pure_training": sums["whole"] / sums["pure_training"],
        "runs": runs,
    }


def _written(file: Path) -> float:
    return file.stat().st_mtime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--after", type=datetime.fromisoformat, default=datetime(1970, 1, 2))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/study_throughput"))
    given = parser.parse_args()
    found = throughput_of(given.folder, given.after)
    given.out.mkdir(parents=True, exist_ok=True)
    write_atomically(given.out / f"{found['study']}.json", json.dumps(found, indent=1) + "\n")
    print(f"{len(found['runs'])} runs took {found['times_pure_training']:.2f} times their pure training")
    for part in PARTS:
        print(f"{part}: median {statistics.median(run[part] for run in found['runs']):.1f} s a run")


if __name__ == "__main__":
    main()
