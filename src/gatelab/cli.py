"""The command ``gatelab``. Commands import what they need when they run, so that ``--help`` answers at once."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

if TYPE_CHECKING:
    from gatelab.gates.catalogue import VariantRow
    from gatelab.report.tables import Table

app = typer.Typer(
    name="gatelab",
    help="A workbench for gated attention: design a gate, train with it, compare it, look inside.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Recipe = Annotated[str, typer.Argument(help="name of a recipe, see `gatelab recipes`")]
Assignments = Annotated[
    list[str] | None,
    typer.Argument(
        help="key=value words: gate=NAME or rival=NAME, match=parameters, train.steps=500", metavar="[KEY=VALUE]..."
    ),
]
MODEL = "run folder, Hugging Face folder, hub name or GGUF file"
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for programs")]
Cache = Annotated[Path, typer.Option(help="folder for downloads and token shards")]
DEFAULT_CACHE = Path("~/.cache/gatelab")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="folder of the three runs and the report")] = Path("runs/demo"),
    cache: Cache = DEFAULT_CACHE,
) -> None:
    """Train an ungated and two gated decoders on real text and write a report; run again to continue."""
    from gatelab.report.page import write_page
    from gatelab.report.progress import TrainingProgress
    from gatelab.report.tables import to_terminal
    from gatelab.study.page import result_table, study_page
    from gatelab.study.presets import DEMO
    from gatelab.study.runner import compare_with_baseline, run_study

    console = Console()
    with TrainingProgress(console) as progress:
        runs = run_study(DEMO, out, cache.expanduser(), progress)
    differences = compare_with_baseline(DEMO, runs)
    report = out / "report.html"
    write_page(study_page(DEMO, runs, differences, f"gatelab demo --out {out}"), report)
    console.print(to_terminal(result_table(runs, differences)))
    console.print(*runs[0].attributions, sep="\n")
    console.print(f"Report: {report.resolve()}", soft_wrap=True)


@app.command()
def train(
    recipe: Recipe,
    assignments: Assignments = None,
    out: Annotated[Path | None, typer.Option(help="the run's folder; runs/RECIPE when left out")] = None,
    cache: Cache = DEFAULT_CACHE,
) -> None:
    """Train one decoder; run again to continue where it was."""
    from gatelab.recipes.table import resolve
    from gatelab.report.progress import TrainingProgress
    from gatelab.train.loop import train as train_run
    from gatelab.train.run_folder import RunFolder

    settings = resolve(recipe, assignments or [])
    folder = out or Path("runs") / recipe
    with TrainingProgress(Console()) as progress:
        result = train_run(settings, folder, cache.expanduser(), progress)
    typer.echo(json.dumps({"heldout": result["heldout"], "measurement": result["measurement"]}, indent=1))
    typer.echo("\n".join(RunFolder(folder).data["attributions"]))
    typer.echo(f"Run folder: {folder.resolve()}")


@app.command()
def diagnose(
    model: Annotated[str, typer.Argument(help=MODEL)],
    compare: Annotated[str | None, typer.Option(help="a second model, side by side on shared scales")] = None,
    text: Annotated[Path | None, typer.Option(help="measure on this text (.txt, .jsonl, .parquet)")] = None,
    corpus: Annotated[str | None, typer.Option(help="or on the held-out part of this corpus, by name")] = None,
    length: Annotated[int | None, typer.Option(help="tokens of a sample; 4096, or what the model can read")] = None,
    samples: Annotated[int, typer.Option(help="number of samples")] = 4,
    full: Annotated[bool, typer.Option("--full", help="add entropy, distance, top keys, delimiters, ranks")] = False,
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


@app.command(name="eval")
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


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="run folder, checkpoint, or Hugging Face folder of a known family")],
    destination: Annotated[Path, typer.Argument(help="new folder")],
    to: Annotated[
        Literal["gatelab", "qwen3", "qwen3_next", "official", "megatron"], typer.Option(help="what to write")
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


@app.command(name="add-gate")
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


@app.command()
def study(
    name: Annotated[str, typer.Argument(help="a preset as paper/positions, a study.yaml; or status, report, compare")],
    words: Annotated[
        list[str] | None,
        typer.Argument(help="KEY=VALUE for every arm; after status, report, compare: the folder", metavar="[WORD]..."),
    ] = None,
    scale: Annotated[str | None, typer.Option(help="of a preset: mechanism, micro, mini, small or paper")] = None,
    seeds: Annotated[int | None, typer.Option(help="how many; the preset's when left out", min=1)] = None,
    executor: Annotated[
        Literal["serial", "processes", "ray"], typer.Option(help="one run after another, side by side, on a cluster")
    ] = "processes",
    workers: Annotated[int | None, typer.Option(help="runs side by side; one for each core when left out")] = None,
    budget_hours: Annotated[float | None, typer.Option(help="refuse a study that would take longer")] = None,
    out: Annotated[Path | None, typer.Option(help="the study's folder; runs/study/NAME-SCALE when left out")] = None,
    cache: Cache = DEFAULT_CACHE,
) -> None:
    """Compare arms under equal conditions; run again to continue."""
    from gatelab.report.tables import to_terminal
    from gatelab.study.cost import cost_table
    from gatelab.study.executors import open_executor
    from gatelab.study.live import StudyObserver
    from gatelab.study.presets import plan
    from gatelab.study.runner import conduct

    if name in ("status", "report", "compare"):
        for folder in words or ["."]:
            _look_at_study(name, Path(folder))
        return
    planned = plan(name, scale).changed(words or [], seeds)
    folder = out or Path("runs") / "study" / "-".join(filter(None, (planned.name, planned.scale)))
    console = Console()
    console.print(to_terminal(cost_table(planned, budget_hours)))
    for warning in planned.warnings:
        console.print(warning, markup=False)
    with StudyObserver(console) as observer:
        conduct(planned, folder, cache.expanduser(), open_executor(executor, workers), observer)
    _look_at_study("report", folder)


def _look_at_study(what: str, folder: Path) -> None:
    from gatelab.report.tables import to_terminal
    from gatelab.study.findings import read_findings
    from gatelab.study.report import write_study_report
    from gatelab.study.report_tables import result_table
    from gatelab.study.status import status

    console = Console()
    console.print(status(folder).summary(), markup=False)
    if what == "status":
        return
    console.print(to_terminal(result_table(read_findings(folder))))
    if what == "report":
        console.print(f"Report: {write_study_report(folder).resolve()}", soft_wrap=True, markup=False)


@app.command()
def variants(
    as_json: AsJson = False,
    width: Annotated[int, typer.Option(help="D, for the added parameters")] = 2048,
    heads: Annotated[int, typer.Option(help="H, query heads")] = 32,
    kv_heads: Annotated[int, typer.Option(help="K, key/value heads")] = 4,
    head_size: Annotated[int, typer.Option(help="C")] = 128,
    layers: Annotated[int, typer.Option(help="L", min=1)] = 24,
) -> None:
    """List every named gate: axes, origin, added parameters (default shape: the paper's 15A2B), initial value."""
    from gatelab.gates.catalogue import list_variants
    from gatelab.gates.spec import AttentionShape
    from gatelab.report.tables import to_terminal

    shape = AttentionShape.parse({"width": width, "num_heads": heads, "num_kv_heads": kv_heads, "head_size": head_size})
    rows = list_variants(shape, layers)
    if as_json:
        typer.echo(json.dumps([row.to_mapping() for row in rows], indent=1))
        return
    Console().print(to_terminal(variant_table(rows)))


def variant_table(rows: Iterable[VariantRow]) -> Table:
    """The named gates as a table, for the terminal and for docs/gates.md."""
    from gatelab.report.tables import Column, Table

    columns = [
        Column("name", "name"),
        Column("axes", "axes that differ"),
        Column("origin", "origin"),
        Column("parameters", "added parameters", ",d"),
        Column("initial", "initial score", align="right"),
    ]
    cells = [
        {
            "name": row.name,
            "axes": row.describe_axes(),
            "origin": row.origin,
            "parameters": row.parameters,
            "initial": row.describe_initial_scores(),
        }
        for row in rows
    ]
    return Table(columns, cells)


@app.command()
def recipes() -> None:
    """List the recipes."""
    from gatelab.recipes.table import RECIPES

    for name, recipe in RECIPES.items():
        typer.echo(f"{name:18} {(recipe.__doc__ or '').strip().splitlines()[0]}")


@app.command()
def settings(recipe: Recipe, assignments: Assignments = None) -> None:
    """Print the resolved settings of a recipe as YAML."""
    from gatelab.recipes.table import resolve

    typer.echo(resolve(recipe, assignments or []).to_yaml(), nl=False)


@app.command()
def params(recipe: Recipe, assignments: Assignments = None, as_json: AsJson = False) -> None:
    """Count parameters, floating point operations and training memory without building the model."""
    import inspect

    from gatelab.model.accounting import describe_cost
    from gatelab.recipes.table import RECIPES, resolve

    run = resolve(recipe, assignments or [])
    cost = describe_cost(run.model, run.data.context, run.train.recompute)
    if as_json:
        typer.echo(json.dumps(cost, indent=1))
        return
    typer.echo(f"{inspect.getdoc(RECIPES[recipe])}\n")
    for name, value in cost.items():
        typer.echo(f"{name:24} {value:>22,.0f}")


def main() -> None:
    """Run the command; a mistake of the user or the system is one sentence and exit code 2."""
    try:
        app()
    except (ValueError, OSError) as error:
        sys.exit(_fail(str(error), 2))
    except ArithmeticError as error:
        sys.exit(_fail(str(error), 1))
    except KeyboardInterrupt:
        sys.exit(_fail("stopped; the same command continues where it was", 130))


def _fail(message: str, code: int) -> int:
    print(f"gatelab: {message}", file=sys.stderr)
    return code
