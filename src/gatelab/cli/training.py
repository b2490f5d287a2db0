"""The commands that train a decoder."""

from __future__ import annotations

import json
import shlex
import sys
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


def sft(
    model: Annotated[str, typer.Argument(help="run folder, checkpoint, or Hugging Face folder of a known family")],
    chats: Annotated[Path, typer.Option(help="JSON lines: {messages: [{role: user, content: ...}, ...]}")],
    assignments: Annotated[
        list[str] | None, typer.Argument(help="settings, data.* and train.* only", metavar="[KEY=VALUE]...")
    ] = None,
    epochs: Annotated[float, typer.Option(help="how often the chats are read")] = 2.0,
    out: Annotated[Path | None, typer.Option(help="new run folder; runs/sft/NAME-and-CHATS when left out")] = None,
    cache: Cache = DEFAULT_CACHE,
) -> None:
    """Fine-tune a model on the answers of chats and report it before and after; run again to continue."""
    from gatelab.files import default_folder
    from gatelab.report.page import write_page
    from gatelab.report.progress import TrainingProgress
    from gatelab.report.tables import to_terminal
    from gatelab.study.fine_tuning import fine_tune
    from gatelab.study.fine_tuning_page import fine_tuning_page, fine_tuning_table

    console, folder = Console(), out or default_folder("sft", [model, chats.stem])
    with TrainingProgress(console) as progress:
        tuned = fine_tune(model, chats, folder, cache.expanduser(), epochs, assignments or [], progress)
    write_page(fine_tuning_page(tuned, shlex.join(["gatelab", *sys.argv[1:]])), folder / "report.html")
    console.print(to_terminal(fine_tuning_table(tuned)))
    console.print(*tuned.after.attributions, sep="\n", markup=False, soft_wrap=True)
    console.print(f"Run folder: {folder.resolve()}", soft_wrap=True, markup=False)
    console.print(f"Report: {(folder / 'report.html').resolve()}", soft_wrap=True, markup=False)


def make_chats(
    out: Annotated[Path, typer.Argument(help="file to write, JSON lines")],
    tasks: Annotated[str, typer.Option(help="names of reasoning-gym's tasks, with commas")] = "chain_sum,gsm_symbolic",
    count: Annotated[int, typer.Option(help="chats of each task")] = 1000,
    seed: Annotated[int, typer.Option(help="draws the questions")] = 0,
) -> None:
    """Write chats with made-up questions and their answers, from reasoning-gym (gatelab[reasoning])."""
    from gatelab.data.reasoning_chats import write_reasoning_chats

    num_chats = write_reasoning_chats(out, list(filter(None, tasks.split(","))), count, seed)
    typer.echo(f"{out}: {num_chats:,} chats")
