"""Do gate scores say which keys can go? The long-context study's decoders, pruned in every way that they allow.

    python benchmarks/pruning.py [RUNS] [--stage extended] [--context 768] [--continuation 256] [--samples 8]
        [--ruler-length 512] [--ruler-samples 8] [--cache ~/.cache/gatelab] [--out docs/results/pruning]

RUNS is the folder of ``benchmarks/long_context_study.py``; every arm and seed whose stage is there is judged, as
``gatelab prune`` does it, on held-out addresses and on mini tasks. Kept once judged, in RUNS. Writes ``samples.csv``,
every sample of every model; ``summary.json``, for each arm the mean over seeds with its 95 % t interval, and the paired
difference of each press from ``random`` and of each that reads gates from the same without; and a page.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from long_context_study import ARMS
from pruning_page import pruning_page, table_of
from rich.console import Console

from gatelab.evaluate.models import open_model
from gatelab.evaluate.ruler.tasks import MINI_TASKS
from gatelab.files import write_atomically
from gatelab.gates.gate import Gate
from gatelab.longcontext.kv_pruning.judge import DEFAULT_PRESSES, judge
from gatelab.longcontext.kv_pruning.report import ABLATIONS
from gatelab.longcontext.kv_pruning.trial import ANSWERS, FOUND, Trial
from gatelab.report.folder import to_csv
from gatelab.report.page import write_page
from gatelab.report.tables import to_terminal
from gatelab.study.statistics import t_interval
from gatelab.train.run_folder import RunFolder

GATED = ("gated_attention", "self_gate", "h2o@heads", "h2o@layers", "h2o@both", "gated_attention@heads")
COLUMNS = ("arm", "seed", "press", "use", "budget", "metric", "sample", "value")
Row = dict[str, Any]


def presses_for(name: str) -> tuple[str, ...]:
    """All presses, without those that need a gate on the SDPA output where there is none."""
    gates = [module for module in open_model(name).model.modules() if isinstance(module, Gate)]
    found = (*DEFAULT_PRESSES.split(","), "oracle")
    return found + GATED if gates else found


def judged(folder: Path, arm: str, seed: int, given: argparse.Namespace) -> list[Row]:
    """Every sample's figures of one model, and the unpruned model's as the press ``none``."""
    kept = folder.parent / f"pruning_{given.stage}.json"
    if kept.exists():
        found = json.loads(kept.read_text(encoding="utf-8"))
        if found["settings"] == settings_in(given):
            return found["rows"]
    sizes = {name: value for name, value in settings_in(given).items() if name != "stage"}
    trial = Trial(RunFolder(folder).settings.data.train, given.cache, presses_for(str(folder)), **sizes)
    verdict = judge(str(folder), trial)
    figures = [("none", "prefill", 1.0, sample, "loss", value) for sample, value in enumerate(verdict.losses)]
    figures += [("none", ANSWERS, 1.0, sample, FOUND, value) for sample, value in enumerate(verdict.found)]
    figures += [(score.arm.label, *score[1:]) for score in verdict.scores]
    rows = []
    for press, use, budget, sample, metric, value in figures:
        if metric == FOUND:
            task, sample = divmod(sample, given.ruler_samples)
            metric = list(MINI_TASKS)[task]
        rows.append(dict(zip(COLUMNS, (arm, seed, press, use, budget, metric, sample, value), strict=True)))
    write_atomically(kept, json.dumps({"settings": settings_in(given), "rows": rows}) + "\n")
    return rows


def settings_in(given: argparse.Namespace) -> Row:
    """What decides the figures beside the models."""
    return {name: value for name, value in vars(given).items() if name not in ("runs", "cache", "out")}


def summarised(rows: Sequence[Row]) -> Iterator[Row]:
    """Means over seeds with intervals, for each arm, press, use, budget and metric; paired differences beside them."""
    samples: dict[tuple[Any, ...], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        key = (row["arm"], row["press"], row["use"], row["budget"], row["metric"])
        samples[key][row["seed"]].append(row["value"])
    means = {key: {seed: fmean(values) for seed, values in sorted(of.items())} for key, of in samples.items()}
    for key, of_seeds in means.items():
        arm, press, use, budget, metric = key
        row = {"arm": arm, "press": press, "use": use, "budget": budget, "metric": metric}
        row |= interval(list(of_seeds.values()))
        for name, other in (("less_random", "random"), ("less_same_without_gates", without_gates(press))):
            base = means.get((arm, other, use, budget, metric))
            if base is not None and other != press:
                differences = [of_seeds[seed] - base[seed] for seed in of_seeds if seed in base]
                row[name] = {"press": other, **interval(differences)}
        yield row


def without_gates(press: str) -> str:
    """The press that is the same but for its gates: its ablation, or even shares for heads and layers."""
    name, _, allocation = press.partition("@")
    return name if allocation else dict(ABLATIONS).get(name, name)


def interval(values: Sequence[float]) -> Row:
    """Mean and 95 % t interval over seeds; no interval from one."""
    if len(values) < 2:
        return {"mean": fmean(values), "seeds": len(values)}
    found = t_interval(np.array(values))
    return {"mean": found.value, "low": found.low, "high": found.high, "seeds": len(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?", default=Path("runs/long_context"))
    parser.add_argument("--stage", default="extended")
    for name, default in (("context", 768), ("continuation", 256), ("samples", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ruler-length", type=int, default=512)
    parser.add_argument("--ruler-samples", type=int, default=8)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/gatelab").expanduser())
    parser.add_argument("--out", type=Path, default=Path("docs/results/pruning"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    console, rows = Console(), []
    for arm in ARMS:
        for folder in sorted((given.runs / arm).glob(f"seed_*/{given.stage}")):
            seed = int(folder.parent.name.removeprefix("seed_"))
            console.print(f"{arm}, seed {seed}", markup=False)
            rows += judged(folder, arm, seed, given)
    summary = list(summarised(rows))
    given.out.mkdir(parents=True, exist_ok=True)
    write_atomically(given.out / "samples.csv", to_csv(COLUMNS, rows))
    write_atomically(
        given.out / "summary.json", json.dumps({"settings": settings_in(given), "rows": summary}, indent=1) + "\n"
    )
    for arm in dict.fromkeys(row["arm"] for row in summary):
        console.print(to_terminal(table_of(summary, arm, "prefill")))
    write_page(pruning_page(summary, settings_in(given)), given.out / "report.html")


if __name__ == "__main__":
    main()
