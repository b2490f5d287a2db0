"""The commands that take a model: look inside, quantise, evaluate, convert, add a gate."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from gatelab.cli.arguments import DEFAULT_CACHE, MODEL, Cache


def diagnose(
    model: Annotated[str, typer.Argument(help=MODEL)],
    compare: Annotated[str | None, typer.Option(help="a second model, side by side on shared scales")] = None,
    text: Annotated[Path | None, typer.Option(help="measure on this text (.txt, .jsonl, .parquet)")] = None,
    corpus: Annotated[str | None, typer.Option(help="or on the held-out part of this corpus, by name")] = None,
    length: Annotated[int | None, typer.Option(help="tokens of a sample; 4096, or what the model can read")] = None,
    samples: Annotated[int, typer.Option(help="number of samples")] = 4,
    full: Annotated[bool, typer.Option("--full", help="add distance, top keys, delimiters, ranks of weights")] = False,
    clamp: Annotated[bool, typer.Option("--clamp", help="add perplexity with the gates held at their means")] = False,
    precision: Annotated[bool, typer.Option("--precision", help="add the error of bfloat16 against float32")] = False,
    out: Annotated[Path | None, typer.Option(help="folder to write; runs/diagnosis/NAME when left out")] = None,
    dtype: Annotated[str, typer.Option(help="of weights and activations")] = "float32",
    cache: Cache = DEFAULT_CACHE,
) -> None:
    """Look inside a model: attention sinks, massive activations, gates, rank; writes a page and its numbers."""
    from gatelab.data.settings import CorpusSettings
    from gatelab.diagnose.page import verdict_table
    from gatelab.evaluate import diagnosis
    from gatelab.evaluate.texts import file_text
    from gatelab.files import default_folder
    from gatelab.report.tables import safe_for_terminal, to_terminal

    if text is not None and corpus is not None:
        raise ValueError(f"--text {text} and --corpus {corpus} are two texts; give one of them")
    source = CorpusSettings.parse({"name": corpus} if corpus else {}) if text is None else file_text(text)
    examination = diagnosis.Examination(source, cache.expanduser(), length, samples, full, clamp, precision, dtype)
    names = [model] if compare is None else [model, compare]
    folder = out or default_folder("diagnosis", names)
    diagnosis.require_replaceable(folder)
    diagnoses = diagnosis.diagnose(names, examination)
    page = diagnosis.write_diagnosis(folder, diagnoses, shlex.join(["gatelab", *sys.argv[1:]]))
    console = Console()
    for result, mapping in diagnoses:
        for line in (result.name, *mapping["verdict"]["sentences"]):
            console.print(safe_for_terminal(line), markup=False, highlight=False)
    console.print(to_terminal(verdict_table([one.result for one in diagnoses])))
    console.print(f"Report: {page.resolve()}", soft_wrap=True, markup=False)


def quantise(
    model: Annotated[str, typer.Argument(help=MODEL)],
    compare: Annotated[str | None, typer.Option(help="a second model, on the same text")] = None,
    schemes: Annotated[
        str, typer.Option(help="names with commas; docs/quantisation.md has them")
    ] = "w8a8,w8a8_per_token,w4a4,fp8,int8_weights",
    text: Annotated[Path | None, typer.Option(help="measure on this text (.txt, .jsonl, .parquet)")] = None,
    corpus: Annotated[str | None, typer.Option(help="or on the held-out part of this corpus, by name")] = None,
    length: Annotated[int, typer.Option(help="tokens of a sample")] = 512,
    samples: Annotated[int, typer.Option(help="texts that are scored, one after another in the source")] = 16,
    calibration: Annotated[int, typer.Option(help="texts after them that give static ranges")] = 8,
    keep_gates: Annotated[
        bool, typer.Option("--keep-gates", help="leave the linear layers of gates as they are")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="folder to write; runs/quantisation/NAME when left out")] = None,
    cache: Cache = DEFAULT_CACHE,
) -> None:
    """Round weights and activations to few levels in several simulated ways and report what each costs."""
    from gatelab.data.settings import CorpusSettings
    from gatelab.evaluate.quantisation.report import FILES, quantisation_table, write_quantisation
    from gatelab.evaluate.quantisation.schemes import parse_schemes
    from gatelab.evaluate.quantisation.trial import QuantisationTrial, quantise_models
    from gatelab.evaluate.texts import file_text
    from gatelab.files import default_folder
    from gatelab.report.folder import require_replaceable
    from gatelab.report.tables import to_terminal

    if text is not None and corpus is not None:
        raise ValueError(f"--text {text} and --corpus {corpus} are two texts; give one of them")
    source = CorpusSettings.parse({"name": corpus} if corpus else {}) if text is None else file_text(text)
    trial = QuantisationTrial(
        source, cache.expanduser(), parse_schemes(schemes), length, samples, calibration, gates=not keep_gates
    )
    names = [model] if compare is None else [model, compare]
    folder, console = out or default_folder("quantisation", names), Console()
    require_replaceable(folder, FILES)
    models = quantise_models(names, trial, lambda line: console.print(line, markup=False, highlight=False))
    page = write_quantisation(folder, models, shlex.join(["gatelab", *sys.argv[1:]]))
    console.print(to_terminal(quantisation_table(models)))
    console.print(f"Report: {page.resolve()}", soft_wrap=True, markup=False)


def evaluate(
    model: Annotated[str, typer.Argument(help=MODEL)],
    tasks: Annotated[str, typer.Option(help="lm-eval's names with commas, or paper, ruler_offline, paper_perplexity")],
    out: Annotated[Path | None, typer.Option(help="folder of the results; runs/evaluation/NAME when left out")] = None,
    shots: Annotated[int | None, typer.Option(help="examples in each prompt; what the task says when left out")] = None,
    limit: Annotated[int | None, typer.Option(help="no more samples of a task than this")] = None,
    lengths: Annotated[list[int] | None, typer.Option(help="tokens of RULER's texts; may be given again")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="generate no more than this for a sample")] = None,
    batch_size: Annotated[int, typer.Option(help="samples at a time")] = 8,
    seed: Annotated[int, typer.Option(help="draws the examples of a prompt and RULER's texts")] = 1234,
    dtype: Annotated[str, typer.Option(help="of weights and activations")] = "float32",
    device: Annotated[str, typer.Option(help="where the model runs")] = "cpu",
    allow_code_execution: Annotated[
        bool, typer.Option("--allow-code-execution", help="run programs that the model writes (HumanEval)")
    ] = False,
    task_folder: Annotated[Path | None, typer.Option(help="folder of your own task definitions for lm-eval")] = None,
    data_folder: Annotated[Path | None, typer.Option(help="folder of local data files, under their hub names")] = None,
    text: Annotated[list[str] | None, typer.Option(help="DOMAIN=PATH: a local text for paper_perplexity")] = None,
    cache: Cache = DEFAULT_CACHE,
) -> None:
    """Run standard benchmarks on a model through lm-eval; run again to continue."""
    from gatelab.evaluate.evaluation import Evaluation
    from gatelab.evaluate.harness import evaluate_tasks
    from gatelab.evaluate.task_results import missing_sentences, result_table
    from gatelab.files import default_folder
    from gatelab.report.tables import to_terminal

    if wrong := [word for word in text or () if "=" not in word]:
        raise ValueError(f"--text {wrong[0]} names no domain; write DOMAIN=PATH")
    evaluation = Evaluation.parse({
        "tasks": tuple(filter(None, tasks.split(","))),
        "shots": shots,
        "limit": limit,
        "lengths": tuple(lengths or ()),
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "seed": seed,
        "dtype": dtype,
        "device": device,
        "allow_code_execution": allow_code_execution,
        "task_folder": None if task_folder is None else str(task_folder),
        "data_folder": None if data_folder is None else str(data_folder),
        "texts": dict(word.split("=", 1) for word in text or ()),
    })  # fmt: skip
    console = Console()
    folder = out or default_folder("evaluation", [model])
    results = evaluate_tasks(
        model, evaluation, folder, cache.expanduser(), lambda one: console.print(f"{one.task} done", markup=False)
    )
    console.print(to_terminal(result_table(results)))
    for sentence in missing_sentences(results):
        console.print(sentence, markup=False, soft_wrap=True)
    console.print(f"Results: {folder.resolve()}", soft_wrap=True, markup=False)


def convert(
    source: Annotated[Path, typer.Argument(help="run folder, checkpoint, or Hugging Face folder of a known family")],
    destination: Annotated[Path, typer.Argument(help="new folder")],
    to: Annotated[
        Literal["gatelab", "qwen3", "qwen3_next", "deepseek_v3", "official", "megatron"],
        typer.Option(help="what to write"),
    ] = "gatelab",
    layout: Annotated[
        Literal["L1", "L2", "L3", "L4", "L5", "L6"] | None,
        typer.Option(help="where the source's gate rows are, if it does not say"),
    ] = None,
    expand: Annotated[
        bool, typer.Option("--expand", help="make headwise gates elementwise; there is no way back")
    ] = False,
    shard_gb: Annotated[float, typer.Option(help="largest file, in GB", min=0.001)] = 5.0,
) -> None:
    """Write a checkpoint in another form and compare its logits with the source's."""
    from gatelab.evaluate.conversion import convert_model

    done = convert_model(source, destination, to, layout, round(shard_gb * 1e9), expand)
    typer.echo(
        f"{destination}: {done.num_bytes / 1e9:.3g} GB, layout {done.source_layout} to {done.target_layout}; on random "
        f"tokens logits up to {done.largest_logit:.3g} differ by {done.error:.2g} at most"
    )


def add_gate(
    run: Annotated[str, typer.Argument(help="run folder, checkpoint, or Hugging Face folder of a known family")],
    assignments: Annotated[
        list[str] | None, typer.Argument(help="settings of the continued training", metavar="[KEY=VALUE]...")
    ] = None,
    gate: Annotated[
        str, typer.Option(help="name of a gate, see `gatelab variants`")
    ] = "sdpa_elementwise_identity_start",
    train_steps: Annotated[int, typer.Option(help="steps to train on with the gate and without", min=0)] = 200,
    gate_rate_scale: Annotated[float, typer.Option(help="the gate's learning rate over that of the rest")] = 10.0,
    out: Annotated[Path | None, typer.Option(help="new folder; runs/add-gate/NAME when left out")] = None,
    cache: Cache = DEFAULT_CACHE,
) -> None:
    """Add a gate that changes nothing at first to a trained model, train on with it and without, and report both."""
    from gatelab.files import default_folder
    from gatelab.report.page import write_page
    from gatelab.report.progress import TrainingProgress
    from gatelab.report.tables import to_terminal
    from gatelab.study.gate_adding import add_and_train, continuation, open_base, write_starts
    from gatelab.study.gate_adding_page import added_gate_page, added_gate_table

    console, folder = Console(), out or default_folder("add-gate", [run])
    base = open_base(run)
    if train_steps == 0:
        for start in write_starts(base, gate, folder):
            typer.echo(f"{start.gate.position}: score {start.score:.6g}, logits differ by {start.logit_error:.2g}")
    else:
        settings = continuation(base.settings, train_steps, gate_rate_scale, assignments or [])
        with TrainingProgress(console) as progress:
            added = add_and_train(base, gate, settings, folder, cache.expanduser(), progress)
        console.print(to_terminal(added_gate_table(added)))
        write_page(added_gate_page(added, shlex.join(["gatelab", *sys.argv[1:]])), folder / "report.html")
    console.print(f"Folder: {folder.resolve()}", soft_wrap=True, markup=False)
