"""Recipes by name, and a command line's words turned into settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from gatelab.gates.variants import find_variant
from gatelab.model.matching import Match, matched, with_gate
from gatelab.model.rivals import find_rival, with_rival
from gatelab.recipes.paper import dense_70b, paper_dense_28l, paper_dense_48l, paper_moe_15a2b
from gatelab.recipes.small import backcopy, demo, dense_tiny, encoder_tiny, latent_tiny, moe_tiny, vision_tiny
from gatelab.settings import nearest
from gatelab.train.settings import RunSettings

Recipe = Callable[..., RunSettings]
_WORDS = ("gate", "rival", "match")
_OF_GATES = ("model.gates", "model.control")

RECIPES: dict[str, Recipe] = {
    recipe.__name__: recipe
    for recipe in (
        demo,
        dense_tiny,
        moe_tiny,
        latent_tiny,
        encoder_tiny,
        vision_tiny,
        backcopy,
        paper_dense_28l,
        paper_dense_48l,
        paper_moe_15a2b,
        dense_70b,
    )
}


def resolve(name: str, assignments: Sequence[str] = ()) -> RunSettings:
    """The settings of a recipe, or of a ``settings.yaml`` such as a run's, with ``key=value`` words applied.

    ``gate=NAME``, ``rival=NAME`` and ``match=none|parameters|active`` go with every recipe; words with dots are paths
    of its settings (``train.optimizer.learning_rate=1e-3``). Whatever their order, the model's shape is settled first,
    then its gates, and last of all the feed-forward is matched. Raises ``ValueError`` with the nearest name for a
    mistake, and for a file that holds no settings.
    """
    plain = _settings_in(Path(name)) if name.endswith(".yaml") else _recipe(name)
    options: dict[str, str] = {}
    overrides = []
    for word in assignments:
        key, separator, value = word.partition("=")
        if not separator:
            raise ValueError(f"{word!r} is not an assignment: write key=value")
        if "." in key:
            overrides.append(word)
        elif key not in _WORDS:
            paths = [*_WORDS, *(f"{field}." for field in RunSettings.model_fields)]
            raise ValueError(f"{key!r} is no word for recipe {name}; {nearest(key, paths)}")
        elif key in options:
            raise ValueError(f"{key} is given twice; once is possible")
        else:
            options[key] = value
    match = _require_match(options.get("match", "none"))
    of_gates = [word for word in overrides if word.startswith(_OF_GATES)]
    rival = plain.model
    if "rival" in options:
        rival = with_rival(rival, find_rival(options["rival"]))
    run = plain.model_copy(update={"model": rival}).with_overrides(word for word in overrides if word not in of_gates)
    gated = run.model
    if "gate" in options:
        gated = with_gate(gated, find_variant(options["gate"]))
    run = run.model_copy(update={"model": gated}).with_overrides(of_gates)
    return RunSettings.parse({**run.to_mapping(), "model": matched(run.model, match).to_mapping()})


def _recipe(name: str) -> RunSettings:
    if name not in RECIPES:
        raise ValueError(f"recipe {name!r} is unknown; {nearest(name, RECIPES)}, or a path of a settings.yaml")
    return RECIPES[name]()


def _settings_in(file: Path) -> RunSettings:
    try:
        return RunSettings.from_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} can't be read: {error.strerror}; name a recipe or a settings.yaml") from None
    except ValueError as error:
        raise ValueError(f"{file} holds no settings of a run: {error}") from None


def _require_match(match: str) -> Match:
    for choice in get_args(Match):
        if match == choice:
            return choice
    raise ValueError(f"match cannot be {match!r}; {nearest(match, get_args(Match))}")
