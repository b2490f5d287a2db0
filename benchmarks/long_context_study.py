"""The paper's path to a longer context at small scale: train at 512, another rotary base at 2,048, YaRN to 8,192.

    python benchmarks/long_context_study.py [--seeds 3] [--workers 2] [--tokens 4000000] [--extension-tokens 600000]
        [--samples 16] [--folder runs/long_context] [--cache ~/.cache/gatelab] [--out docs/results/long-context]

Arms: ungated, headwise, elementwise, parameters matched; the same initial weights and batches for each seed. The text
is a quarter State of the Union addresses and three quarters made-up retrieval tasks; each token sees its own document
only, and the first layer's window is four tokens, without which the tasks take far more tokens to learn
(experiments/LOG.md). After each stage, on held-out addresses and tasks: mini needles by length, loss by position as it
is and with the first key hidden from all later queries, first-token attention, entropy and gates by layer. Every stage
is kept as it is reached, and the command goes on where it was stopped. Writes ``stages.json`` with every figure, and a
page.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch
from long_context_page import long_context_page, tables_of
from rich.console import Console

from gatelab.data.prepare import prepare
from gatelab.diagnose.measure import measure
from gatelab.evaluate.models import OpenedModel, open_model
from gatelab.evaluate.position_loss import by_position, difference_by_position, held_out_texts, position_losses
from gatelab.evaluate.ruler.running import RulerSettings, evaluate_ruler
from gatelab.evaluate.ruler.texts import Texts
from gatelab.files import write_atomically
from gatelab.longcontext.extend import Extension, extend
from gatelab.longcontext.first_key import masked_first_key
from gatelab.model.decoder import Decoder
from gatelab.recipes.table import resolve
from gatelab.report.page import write_page
from gatelab.report.tables import to_terminal
from gatelab.train.loop import train
from gatelab.train.run_folder import RunFolder
from gatelab.train.settings import RunSettings

ARMS = {"ungated": "none", "headwise": "sdpa_headwise", "elementwise": "sdpa_elementwise"}
TRAINED, EXTENDED, LONGEST = 512, 2048, 8192
STAGES = {"trained": TRAINED, "extended": EXTENDED, "yarn": LONGEST}
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
TASKS = "mini_single,mini_multi_key,mini_variables"
NUM_TEXTS = 6
WORDS = (
    "match=parameters",
    "model.num_layers=4",
    'model.layers=[{"window":4},{},{},{}]',
    "model.width=256",
    "model.num_heads=4",
    "model.num_kv_heads=4",
    "model.head_size=64",
    "model.feedforward_width=512",
    "model.matching_multiple=2",
    "model.init_std=0.06",
    f"model.max_context={TRAINED}",
    "model.vocab_size=1024",
    "data.tokenizer.vocab_size=1024",
    "data.train.name=state_of_the_union",
    "data.train.heldout_fraction=0.1",
    "data.train.retrieval_share=0.75",
    "data.train.retrieval_characters=8000",
    "data.document_masks=true",
    f"data.context={TRAINED}",
    "train.sequences_per_step=4",
    "train.optimizer.learning_rate=2e-3",
    "train.threads=1",
    "train.evaluation.every=500",
    "train.evaluation.measure_every=500",
    "train.checkpoint.every=500",
)


class Job(NamedTuple):
    """One arm with one seed, from its first step to its last stage."""

    arm: str
    seed: int
    tokens: int
    extension_tokens: int
    samples: int
    folder: Path
    cache: Path


def settings_of(job: Job) -> RunSettings:
    """The first stage's settings."""
    steps = job.tokens // (4 * TRAINED)
    words = (f"gate={ARMS[job.arm]}", f"train.seed={job.seed}", f"train.steps={steps}")
    return resolve("dense_tiny", (*WORDS, *words, f"train.schedule.warmup_steps={steps // 10}"))


def run_job(job: Job) -> str:
    """All stages of one job and the figures after each, in files that a later call finds."""
    torch.set_num_threads(1)
    folder = job.folder / job.arm / f"seed_{job.seed}"
    settings = settings_of(job)
    train(settings, folder / "trained", job.cache)
    asked = Extension.parse({"context": EXTENDED, "rope_base": 1e6, "train_tokens": job.extension_tokens})
    extend(str(folder / "trained"), asked, folder / "extended", job.cache)
    asked = Extension.parse({"context": LONGEST, "yarn": LONGEST / EXTENDED})
    extend(str(folder / "extended"), asked, folder / "yarn", job.cache)
    for stage, context in STAGES.items():
        file = folder / f"{stage}.json"
        if not file.exists():
            figures = figures_of(open_model(str(folder / stage)), job, settings, context, folder / f"{stage}_ruler")
            row = {"arm": job.arm, "seed": job.seed, "stage": stage, "context": context, **figures}
            write_atomically(file, json.dumps(row, indent=1) + "\n")
    return f"{job.arm}, seed {job.seed}"


def figures_of(opened: OpenedModel, job: Job, settings: RunSettings, context: int, ruler: Path) -> dict[str, Any]:
    """Everything that is measured after a stage."""
    assert isinstance(opened.model, Decoder)
    prepared = prepare(settings.data, job.cache)
    heldout = next(iter(prepared.heldout.values()))
    texts = held_out_texts(heldout, prepared.tokenizer.bos_id, context, NUM_TEXTS)
    losses = position_losses(opened, texts.rows, context)
    with masked_first_key(opened.model):
        masked = position_losses(opened, texts.rows, context)
    measured = measure(opened.model, torch.tensor([row[:context] for row in texts.rows[:2]]), full=True)
    lengths = tuple(length for length in LENGTHS if length <= context)
    asked = RulerSettings(tasks=TASKS, lengths=lengths, samples=job.samples)
    scores = evaluate_ruler(opened.name, asked, Texts(job.cache), ruler)
    return {
        "texts_are_documents": texts.are_documents,
        "loss": [bucket._asdict() for bucket in by_position(losses)],
        "first_key_masked": [bucket._asdict() for bucket in difference_by_position(masked, losses)],
        "summary": measured.summary(),
        "first_token_attention": measured.layer_means("first_token_attention"),
        "entropy": measured.layer_means("attention_entropy"),
        "gate_means": [
            {position: gate.whole.mean for position, gate in layer.gates.items()} for layer in measured.layers
        ],
        "mini": [
            {"task": cell.task.name, "length": cell.asked.length, "score": cell.score.mean, "samples": job.samples}
            for cell in scores.cells
        ],
        "heldout": (RunFolder(Path(opened.name)).result or {}).get("heldout"),
    }


def read_stages(folder: Path) -> Iterator[dict[str, Any]]:
    """What finished jobs and stages left, arm by arm."""
    for arm in ARMS:
        for stage in STAGES:
            for file in sorted((folder / arm).glob(f"seed_*/{stage}.json")):
                yield json.loads(file.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4_000_000)
    parser.add_argument("--extension-tokens", type=int, default=600_000)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--folder", type=Path, default=Path("runs/long_context"))
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/gatelab"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/long-context"))
    given = parser.parse_args()
    console, cache = Console(), given.cache.expanduser()
    jobs = [
        Job(arm, seed, given.tokens, given.extension_tokens, given.samples, given.folder, cache)
        for seed in range(given.seeds)
        for arm in ARMS
    ]
    prepare(settings_of(jobs[0]).data, cache)
    with ProcessPoolExecutor(given.workers, multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run_job, job) for job in jobs]):
            console.print(done.result(), markup=False)
    rows = list(read_stages(given.folder))
    given.out.mkdir(parents=True, exist_ok=True)
    write_atomically(given.out / "stages.json", json.dumps(rows, indent=1) + "\n")
    command = (
        f"python benchmarks/long_context_study.py --seeds {given.seeds} --tokens {given.tokens} "
        f"--extension-tokens {given.extension_tokens} --samples {given.samples}"
    )
    for table in tables_of(rows):
        console.print(to_terminal(table))
    write_page(long_context_page(rows, command), given.out / "report.html")


if __name__ == "__main__":
    main()
