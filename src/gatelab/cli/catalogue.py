"""The commands that list: gates, recipes, a recipe's settings and cost."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from gatelab.cli.arguments import AsJson, Assignments, Recipe

if TYPE_CHECKING:
    from gatelab.gates.catalogue import VariantRow
    from gatelab.report.tables import Table


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


def recipes() -> None:
    """List the recipes."""
    from gatelab.recipes.table import RECIPES

    for name, recipe in RECIPES.items():
        typer.echo(f"{name:18} {(recipe.__doc__ or '').strip().splitlines()[0]}")


def settings(recipe: Recipe, assignments: Assignments = None) -> None:
    """Print the resolved settings of a recipe as YAML."""
    from gatelab.recipes.table import resolve

    typer.echo(resolve(recipe, assignments or []).to_yaml(), nl=False)


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
