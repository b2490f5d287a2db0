"""The commands that train a decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gatelab.cli.arguments import DEFAULT_CACHE, Assignments, Cache, Recipe


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


def train(
    recipe: Recipe,
    assignments: Assignments = None,
    out: Annotated[Path | None, typer.Option(help="the run's folder; runs/RECIPE when left out")] = None,
    cache: Cache = DEFAULT_CACHE,
) -> None:
    """Train one decoder; run again to continue where it was. Under torchrun its ranks share the run."""
    from gatelab.recipes.table import resolve
    from gatelab.report.progress import TrainingProgress
    from gatelab.train.loop import train as train_run
    from gatelab.train.parallel.mesh import is_first_process
    from gatelab.train.run_folder import RunFolder

    settings = resolve(recipe, assignments or [])
    folder = out or Path("runs") / Path(recipe).stem
    with TrainingProgress(Console(quiet=not is_first_process())) as progress:
        result = train_run(settings, folder, cache.expanduser(), progress)
    if not is_first_process():
        return
    typer.echo(json.dumps({"heldout": result["heldout"], "measurement": result["measurement"]}, indent=1))
    typer.echo("\n".join(RunFolder(folder).data["attributions"]))
    typer.echo(f"Run folder: {folder.resolve()}")
