"""The command that compares arms."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from gatelab.cli.arguments import DEFAULT_CACHE, Cache

if TYPE_CHECKING:
    from gatelab.study.study import Study


def study(
    name: Annotated[str, typer.Argument(help="a preset, a study.yaml; or status, report, compare, archive")],
    words: Annotated[
        list[str] | None,
        typer.Argument(help="KEY=VALUE for every arm; after status and the like: the folder", metavar="[WORD]..."),
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
    from gatelab.study.study import STEP_SECONDS

    if name == "archive":
        from gatelab.study.archive import archive_study

        if words is None or len(words) != 1 or out is None:
            raise ValueError("archive takes one study's folder, and --out for the new one")
        typer.echo(f"Report: {archive_study(Path(words[0]), out).resolve()}")
        return
    if name in ("status", "report", "compare"):
        for folder in words or ["."]:
            _look_at_study(name, Path(folder))
        return
    planned = plan(name, scale).changed(words or [], seeds)
    folder = out or Path("runs") / "study" / "-".join(filter(None, (planned.name, planned.scale)))
    console = Console()
    if planned.metric == STEP_SECONDS:
        if budget_hours is not None or workers is not None:
            raise ValueError(
                f"study {planned.name} times its arms in turns in this process; leave out --budget-hours and --workers"
            )
        _time_arms(planned, folder, console)
        return
    console.print(to_terminal(cost_table(planned, budget_hours)))
    for warning in planned.warnings:
        console.print(warning, markup=False)
    with StudyObserver(console) as observer:
        conduct(planned, folder, cache.expanduser(), open_executor(executor, workers), observer)
    _look_at_study("report", folder)


def _time_arms(study: Study, folder: Path, console: Console) -> None:
    from gatelab.report.page import write_page
    from gatelab.report.tables import to_terminal
    from gatelab.study.overhead import measure_overhead, overhead_page, overhead_table

    with console.status("warming up") as status:
        overhead = measure_overhead(study, folder, lambda done, rounds: status.update(f"round {done} of {rounds}"))
    console.print(to_terminal(overhead_table(overhead)))
    write_page(overhead_page(overhead, shlex.join(["gatelab", *sys.argv[1:]])), folder / "report.html")
    console.print(f"Report: {(folder / 'report.html').resolve()}", soft_wrap=True, markup=False)


def _look_at_study(what: str, folder: Path) -> None:
    from gatelab.report.tables import to_terminal
    from gatelab.study.findings import read_findings
    from gatelab.study.report import write_study_report
    from gatelab.study.report_interactions import interaction_table
    from gatelab.study.report_tables import result_table
    from gatelab.study.status import status

    console = Console()
    console.print(status(folder).summary(), markup=False)
    if what == "status":
        return
    findings = read_findings(folder)
    for table in (result_table(findings), interaction_table(findings)):
        if table is not None:
            console.print(to_terminal(table))
    if what == "report":
        console.print(f"Report: {write_study_report(folder).resolve()}", soft_wrap=True, markup=False)
