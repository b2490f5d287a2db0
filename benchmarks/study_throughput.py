"""How much of a study's time its training steps took, from the files of a study that ran in one go.

    python benchmarks/study_throughput.py STUDY_FOLDER [--workers 2] [--out benchmarks/results/study_throughput]

The study's time is that from its conditions, written when data are prepared and compared and before the first run, to
its last result, for each worker. Pure training is a run's steps alone, its first at the median of the others, since
that one compiles. What separates the two is starting processes, loading, compiling, evaluating, measuring and saving.
Run it before the folder is copied: the times are those of its files. Writes ``NAME.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from side_by_side import machine

from gatelab.files import write_atomically
from gatelab.study.runner import CONDITIONS, read_results
from gatelab.study.status import open_study
from gatelab.train.metrics import read_metrics
from gatelab.train.run_folder import RunFolder


def parts_of(folder: Path) -> dict[str, Any]:
    """Seconds of one run by what they were spent on; ``whole`` is from its settings to its result."""
    run = RunFolder(folder)
    steps = [entry["seconds"] for entry in read_metrics(run.metrics) if entry["kind"] == "step"]
    typical, result = statistics.median(steps[1:]), run.result
    assert result is not None
    return {
        "run": f"{folder.parent.name}/{folder.name}",
        "pure_training": sum(steps[1:]) + typical,
        "first_step_extra": steps[0] - typical,
        "evaluation": result["evaluation_seconds"],
        "measurement": result["measurement_seconds"],
        "whole": _written(folder / "result.json") - _written(folder / "settings.yaml"),
    }


def throughput_of(folder: Path, workers: int) -> dict[str, Any]:
    """The study's seconds, its runs' parts, and how many times its pure training it took."""
    results = read_results(folder)
    runs = [parts_of(folder / one.folder) for one in results]
    whole = max(_written(folder / one.folder / "result.json") for one in results) - _written(folder / CONDITIONS)
    return {
        "study": open_study(folder).name,
        "machine": machine(1, None),
        "workers": workers,
        "seconds": whole,
        "times_pure_training": whole * workers / sum(run["pure_training"] for run in runs),
        "runs": runs,
    }


def _written(file: Path) -> float:
    return file.stat().st_mtime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/study_throughput"))
    given = parser.parse_args()
    found = throughput_of(given.folder, given.workers)
    given.out.mkdir(parents=True, exist_ok=True)
    write_atomically(given.out / f"{found['study']}.json", json.dumps(found, indent=1) + "\n")
    print(
        f"{len(found['runs'])} runs, {found['seconds']:.0f} s: {found['times_pure_training']:.2f} times pure training"
    )
    for part in ("pure_training", "first_step_extra", "evaluation", "measurement", "whole"):
        print(f"{part}: median {statistics.median(run[part] for run in found['runs']):.1f} s a run")


if __name__ == "__main__":
    main()
