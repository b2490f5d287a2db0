"""The commands about machines: what a run would take, and what this machine has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gatelab.cli.arguments import AsJson, Assignments, Recipe


def plan(
    recipe: Recipe,
    assignments: Assignments = None,
    gpus: Annotated[int, typer.Option(help="number of accelerators, one rank each", min=1)] = 8,
    gpu: Annotated[str, typer.Option(help="a100, h100 or h200")] = "h100",
    parallel: Annotated[
        str | None,
        typer.Option(help="words of train.parallel, such as shard=64,tensor=8; what fits is searched when left out"),
    ] = None,
    tokens: Annotated[
        float | None, typer.Option(help="tokens of the whole run; those of its steps when left out")
    ] = None,
    peak_share: Annotated[float, typer.Option(help="assumed share of the peak, communication included")] = 0.4,
    memory_share: Annotated[float, typer.Option(help="share of an accelerator's memory that may be filled")] = 0.9,
    price: Annotated[float | None, typer.Option(help="dollars for a GPU-hour; a round number when left out")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="also build the shard of every rank, without memory")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Memory of each rank, time and cost of a run on many GPUs; refuses what doesn't fit and says what would."""
    from gatelab.recipes.table import resolve
    from gatelab.report.tables import to_terminal
    from gatelab.train.hardware import find_gpu
    from gatelab.train.plan import Assumptions, find_plan, plan_as_set, plan_table

    words = [f"train.parallel.{word}" for word in parallel.split(",")] if parallel is not None else []
    run = resolve(recipe, [*(assignments or []), *words])
    found = (find_plan if parallel is None else plan_as_set)(
        run, find_gpu(gpu), gpus, tokens, Assumptions(peak_share, memory_share, price)
    )
    figures = found.to_mapping()
    if dry_run:
        from gatelab.train.dry_run import build_shards

        figures["stored_parameters"] = [shard.parameters for shard in build_shards(found.run, gpus)]
    if as_json:
        typer.echo(json.dumps(figures, indent=1))
        return
    Console().print(to_terminal(plan_table(found)))
    if dry_run:
        stored = figures["stored_parameters"]
        typer.echo(f"All {gpus} shards were built: {min(stored):,d} to {max(stored):,d} parameters on a rank.")


def doctor(as_json: AsJson = False) -> None:
    """Look at this machine: versions, speed, memory, disk, GPU, what is missing for which command."""
    from gatelab.doctor import doctor_table, examine, is_usable, to_mapping
    from gatelab.report.tables import to_terminal

    findings = examine(Path())
    if as_json:
        typer.echo(json.dumps(to_mapping(findings), indent=1))
    else:
        Console().print(to_terminal(doctor_table(findings)))
    if not is_usable(findings):
        raise typer.Exit(1)
