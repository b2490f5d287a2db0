"""How often a study finds a difference that is not there: identical arms trained for real, and simulated studies.

    python benchmarks/null_studies.py [--pairs 40] [--seeds 5] [--workers 2] [--folder runs/null_studies]
        [--cache ~/.cache/gatelab] [--simulated 10000] [--out benchmarks/results/null_studies.json]

A pair is a study of two arms with equal settings and different seeds, so any difference found is a false one. Each is
judged as a study's confirmatory contrast is. Beside it, the same runs one against one by a bootstrap over held-out
documents alone, which knows nothing of seeds: how often that finds a difference is what a single seed is worth. And the
same runs again, drawn at random into many more pairs: few pairs leave a wide interval, and this one, which speaks of
these runs' losses alone, says whether they are normal enough for Student's t.

Every run has its folder; what is finished is not repeated, so the command goes on where it was stopped. Runs train on
one thread each, ``--workers`` of them side by side. Writes the rates with exact 95 % intervals, and every loss.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from rich.console import Console
from rich.table import Table
from simulated_studies import rate, simulate

from gatelab.files import write_atomically
from gatelab.recipes.table import resolve
from gatelab.study.contrasts import MIN_SEEDS, compare_arms
from gatelab.study.jobs import read_documents
from gatelab.study.statistics import LEVEL, DocumentScores, compare_on_documents, difference_p_values
from gatelab.train.loop import train
from gatelab.train.run_folder import RunFolder
from gatelab.train.settings import RunSettings

RECIPE = "dense_tiny"
WORDS = (
    "model.vocab_size=512",
    "model.width=32",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.head_size=16",
    "model.feedforward_width=88",
    "data.tokenizer.vocab_size=512",
    "data.train.max_bytes=1000000",
    "data.train.heldout_fraction=0.1",
    "data.context=64",
    "train.steps=60",
    "train.sequences_per_step=16",
    "train.schedule.warmup_steps=10",
    "train.precision=float32",
    "train.threads=1",
    "train.evaluation.every=60",
    "train.evaluation.measure_every=60",
)
"""33,000 parameters on 61,440 tokens of the Python standard library, a few seconds a run."""
ARMS = ("first", "second")
SMALLEST_DIFFERENCE = 0.05


class NullRun(NamedTuple):
    """One run: ``seed`` is its own, that no other run has."""

    pair: int
    arm: str
    seed: int

    def path(self, folder: Path) -> Path:
        """Its folder."""
        return folder / f"pair_{self.pair}" / self.arm / f"seed_{self.seed}"


def plan(num_pairs: int, num_seeds: int) -> list[NullRun]:
    """All runs, pair after pair; a larger plan begins with the runs of a smaller one of as many seeds."""
    places = [(pair, arm) for pair in range(num_pairs) for arm in ARMS for _ in range(num_seeds)]
    return [NullRun(pair, arm, seed) for seed, (pair, arm) in enumerate(places)]


def settings_of(run: NullRun, words: Sequence[str] = ()) -> RunSettings:
    """The settings of one run; nothing but the seed differs between runs."""
    return resolve(RECIPE, (*WORDS, *words, f"train.seed={run.seed}"))


def train_all(runs: Sequence[NullRun], folder: Path, cache: Path, workers: int, words: Sequence[str] = ()) -> None:
    """Train what is not finished: the first run alone, which prepares the text, the others side by side."""
    _train_one(runs[0], folder, cache, words)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        jobs = [pool.submit(_train_one, run, folder, cache, words) for run in runs[1:]]
        try:
            for done, job in enumerate(as_completed(jobs), start=2):
                job.result()
                print(f"\r{done} of {len(runs)} runs", end="", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    print()


def _train_one(run: NullRun, folder: Path, cache: Path, words: Sequence[str]) -> None:
    train(settings_of(run, words), run.path(folder), cache)


class Scored(NamedTuple):
    """What a finished run scored on held-out text: nats a token, and its documents one by one."""

    loss: float
    documents: DocumentScores


def read_scored(run: NullRun, folder: Path) -> Scored:
    """The scores of a finished run, from its files."""
    files = RunFolder(run.path(folder))
    assert files.result is not None, f"{files.path} is finished"
    figures = next(iter(files.result["heldout"].values()))
    return Scored(figures["loss"], next(iter(read_documents(files).values())))


def summarize(scored: dict[NullRun, Scored], num_redrawn: int) -> dict[str, Any]:
    """The verdict on each pair, and how often a difference was found: over seeds, over documents, in redrawn pairs."""
    rows, on_documents = [], []
    for pair in sorted({run.pair for run in scored}):
        arms = [[one for run, one in scored.items() if (run.pair, run.arm) == (pair, arm)] for arm in ARMS]
        on_documents += [differ_on_documents(*runs) for runs in zip(*arms, strict=True)]
        losses = {arm: [run.loss for run in runs] for arm, runs in zip(ARMS, arms, strict=True)}
        values = {arm: np.array(of_arm) for arm, of_arm in losses.items()}
        contrast = compare_arms(values, ARMS[0], ARMS[1:], SMALLEST_DIFFERENCE)[0]
        rows.append({"pair": pair, "losses": losses, **contrast.to_mapping()})
    found = [row["seeds"]["p_value"] <= LEVEL for row in rows]
    verdicts = [row["judgement"]["verdict"] for row in rows]
    redrawn = redraw(np.array([one.loss for one in scored.values()]), len(rows[0]["losses"][ARMS[0]]), num_redrawn)
    return {
        "over_seeds": share(sum(found), len(found)),
        "verdicts": {verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))},
        "smallest_difference": SMALLEST_DIFFERENCE,
        "over_documents": share(sum(on_documents), len(on_documents)),
        "redrawn": share(redrawn, num_redrawn),
        "pairs": rows,
    }


def differ_on_documents(first: Scored, second: Scored) -> bool:
    """Whether the interval over documents of one run against another leaves out 0."""
    interval = compare_on_documents(second.documents, first.documents).relative_perplexity
    return not interval.low <= 0 <= interval.high


def redraw(losses: Float[np.ndarray, "N"], num_seeds: int, num_pairs: int) -> int:
    """How many of ``num_pairs`` pairs, each of 2 ``num_seeds`` of the runs drawn at random, differ by the t-test.

    From few runs too many do: what one arm was not given, the other was.
    """
    order = np.random.default_rng(0).random((num_pairs, len(losses))).argsort(axis=1)
    drawn = losses[order[:, : 2 * num_seeds]]
    return int((difference_p_values(drawn[:, :num_seeds] - drawn[:, num_seeds:]) <= LEVEL).sum())


def share(false: int, number: int) -> dict[str, Any]:
    """Counts, their ratio and its exact interval."""
    return {"false": int(false), "of": number, **rate(int(false), number)._asdict()}


def table(result: dict[str, Any]) -> Table:
    """The rates for a terminal."""
    shown = Table("differences found where none is", "false", "of", "rate", "95 % interval")
    names = {
        "over_seeds": "identical arms trained, over seeds",
        "redrawn": "the same runs, drawn into other pairs",
        "over_documents": "the same runs one by one, over documents",
    }
    rows = [(text, result["trained"][name]) for name, text in names.items()]
    rows += [(f"simulated, {row['case']}: {row['false_verdict']}", row) for row in result["simulated"]]
    for text, row in rows:
        interval = f"{row['low']:.1%} to {row['high']:.1%}"
        shown.add_row(text, f"{row['false']:,}", f"{row['of']:,}", f"{row['value']:.1%}", interval)
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=MIN_SEEDS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--simulated", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, default=Path("runs/null_studies"))
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "gatelab")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "null_studies.json")
    parser.add_argument("words", nargs="*", help="assignments on top of the tiny run, such as train.steps=20")
    options = parser.parse_args(arguments)
    if options.pairs < 1 or options.seeds < MIN_SEEDS:
        parser.error(f"--pairs is at least 1 and --seeds at least {MIN_SEEDS}, as for a confirmatory contrast")
    runs = plan(options.pairs, options.seeds)
    train_all(runs, options.folder, options.cache, options.workers, options.words)
    result = {
        "settings": settings_of(runs[0], options.words).to_mapping(),
        "torch": torch.__version__,
        "trained": summarize({run: read_scored(run, options.folder) for run in runs}, options.simulated),
        "simulated": simulate(options.simulated),
    }
    write_atomically(options.out, json.dumps(result, indent=1, allow_nan=False) + "\n")
    Console().print(table(result))


if __name__ == "__main__":
    main()
