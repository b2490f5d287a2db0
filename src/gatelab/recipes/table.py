"""Recipes by name, and a command line's words turned into settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

from gatelab.gates.variants import find_variant
from gatelab.model.matching import Match, matched, with_gate
from gatelab.model.rivals import find_rival, with_rival
from gatelab.recipes.paper import dense_70b, paper_dense_28l, paper_dense_48l, paper_moe_15a2b
from gatelab.recipes.small import backcopy, demo, dense_tiny, moe_tiny
from gatelab.settings import nearest
from gatelab.train.settings import RunSettings

Recipe = Callable[..., RunSettings]
_OF_GATES = ("model.gates", "model.control")

RECIPES: dict[str, Recipe] = {
    recipe.__name__: recipe
    for recipe in (demo, dense_tiny, moe_tiny, backcopy, paper_dense_28l, paper_dense_48l, paper_moe_15a2b, dense_70b)
}


def resolve(name: str, assignments: Sequence[str] = ()) -> RunSettings:
    """The settings of a recipe with ``key=value`` words applied.

    ``gate=NAME``, ``rival=NAME`` and ``match=none|parameters|active`` go with every recipe; words with dots are paths
    of its settings (``train.optimizer.learning_rate=1e-3``). Whatever their order, the model's shape is settled first,
    then its gates, and last of all the feed-forward is matched. Raises ``ValueError`` with the nearest name for a
    mistake.
    """
    if name not in RECIPES:
        raise ValueError(f"recipe {name!r} is unknown; {nearest(name, RECIPES)}")
    options, overrides = {"gate": "none", "rival": "none", "match": "none"}, []
    given = set()
    for word in assignments:
        key, separator, value = word.partition("=")
        if not separator:
            raise ValueError(f"{word!r} is not an assignment: write key=value")
        if "." in key:
            overrides.append(word)
        elif key not in options:
            paths = [*options, *(f"{field}." for field in RunSettings.model_fields)]
            raise ValueError(f"{key!r} is no word for recipe {name}; {nearest(key, paths)}")
        elif key in given:
            raise ValueError(f"{key} is given twice; once is possible")
        else:
            options[key] = value
            given.add(key)
    match = _require_match(options["match"])
    of_gates = [word for word in overrides if word.startswith(_OF_GATES)]
    plain = RECIPES[name]()
    rival = plain.model_copy(update={"model": with_rival(plain.model, find_rival(options["rival"]))})
    run = rival.with_overrides(word for word in overrides if word not in of_gates)
    gated = run.model_copy(update={"model": with_gate(run.model, find_variant(options["gate"]))})
    gated = gated.with_overrides(of_gates)
    return RunSettings.parse({**gated.to_mapping(), "model": matched(gated.model, match).to_mapping()})


def _require_match(match: str) -> Match:
    for choice in get_args(Match):
        if match == choice:
            return choice
    raise ValueError(f"match cannot be {match!r}; {nearest(match, get_args(Match))}")
