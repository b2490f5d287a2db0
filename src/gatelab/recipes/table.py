"""Recipes by name, and a command line's words turned into settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import get_args

from gatelab.model.matching import Match
from gatelab.recipes.paper import paper_dense_28l, paper_dense_48l, paper_moe_15a2b
from gatelab.recipes.small import backcopy, demo, dense_tiny, moe_tiny
from gatelab.settings import nearest
from gatelab.train.settings import RunSettings

Recipe = Callable[..., RunSettings]

RECIPES: dict[str, Recipe] = {
    recipe.__name__: recipe
    for recipe in (demo, dense_tiny, moe_tiny, backcopy, paper_dense_28l, paper_dense_48l, paper_moe_15a2b)
}


def resolve(name: str, assignments: Sequence[str] = ()) -> RunSettings:
    """The settings of a recipe with ``key=value`` words applied.

    Words without a dot are arguments of the recipe (``gate=sdpa_elementwise``, ``match=parameters``), words with dots
    are paths of its settings (``train.learning_rate=1e-3``). Raises ``ValueError`` with the nearest name for any other.
    """
    if name not in RECIPES:
        raise ValueError(f"recipe {name!r} is unknown; {nearest(name, RECIPES)}")
    recipe = RECIPES[name]
    parameters = inspect.signature(recipe).parameters
    arguments, overrides = {}, []
    for word in assignments:
        key, separator, value = word.partition("=")
        if not separator:
            raise ValueError(f"{word!r} is not an assignment: write key=value")
        if "." in key:
            overrides.append(word)
        elif key in parameters:
            arguments[key] = value
        else:
            paths = [*parameters, *(f"{field}." for field in RunSettings.model_fields)]
            raise ValueError(f"{key!r} is no argument of recipe {name}; {nearest(key, paths)}")
    _require_match(arguments.get("match", "none"))
    return recipe(**arguments).with_overrides(overrides)


def _require_match(match: str) -> None:
    if match not in get_args(Match):
        raise ValueError(f"match cannot be {match!r}; {nearest(match, get_args(Match))}")
