"""The command ``gatelab``. Commands import what they need when they run, so that ``--help`` answers at once."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    typer.Argument(help="key=value words: gate=NAME, match=parameters, train.steps=500", metavar="[KEY=VALUE]..."),
]
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
    model: Annotated[str, typer.Argument(help="run folder, Hugging Face folder, hub name or GGUF file")],
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
    from gatelab.report.tables import safe_for_terminal, to_terminal

    if text is not None and corpus is not None:
        raise ValueError(f"--text {text} and --corpus {corpus} are two texts; give one of them")
    source = CorpusSettings.parse({"name": corpus} if corpus else {}) if text is None else file_text(text)
    examination = diagnosis.Examination(source, cache.expanduser(), length, samples, full, clamp, precision, dtype)
    names = [model] if compare is None else [model, compare]
    folder = out or diagnosis.default_folder(names)
    diagnosis.require_replaceable(folder)
    diagnoses = diagnosis.diagnose(names, examination)
    page = diagnosis.write_diagnosis(folder, diagnoses, shlex.join(["gatelab", *sys.argv[1:]]))
    console = Console()
    for result, mapping in diagnoses:
        for line in (result.name, *mapping["verdict"]["sentences"]):
            console.print(safe_for_terminal(line), markup=False, highlight=False)
    console.print(to_terminal(verdict_table([one.result for one in diagnoses])))
    console.print(f"Report: {page.resolve()}", soft_wrap=True, markup=False)


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
