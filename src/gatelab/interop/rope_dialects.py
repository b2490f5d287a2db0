"""The rotation in a config.json: the dialects of transformers 4 and 5, read and written.

Transformers 4 has ``rope_theta``, ``partial_rotary_factor`` and ``rope_scaling`` (its kind under ``rope_type`` or
``type``); transformers 5 has all in ``rope_parameters``, flat or one mapping for each layer type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gatelab.interop.config_keys import ConfigKeys
from gatelab.model.rope import plain_base
from gatelab.model.settings import RopeScaling, RopeSettings

KIND, BASE, FRACTION, ORIGINAL = "rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"
# Names of transformers -> fields of RopeScaling, for each kind that has the same mathematics there.
_YARN = ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate")
SCALINGS: dict[str, dict[str, str]] = {
    "linear": {"factor": "factor"},
    "yarn": {"factor": "factor", ORIGINAL: "original_context", **{name: name for name in _YARN}},
    "llama3": {
        "factor": "factor",
        ORIGINAL: "original_context",
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
    },
}
ALWAYS_KNOWN = {KIND, BASE, FRACTION, "mrope_section", "mrope_interleaved"}
# Zero means absent to transformers.
ABSENT_WHEN_ZERO = ("mscale", "mscale_all_dim", "beta_fast", "beta_slow")


def ropes(keys: ConfigKeys, kinds: Sequence[str], default_fraction: float | None = None) -> list[RopeSettings]:
    """The rotation of each layer, from any of the dialects; a family without ``default_fraction`` rotates all channels.

    Numbers beside ``rope_parameters`` may be lists with one for each layer. Raises ``ValueError`` for a rope type that
    our decoder does not compute, for one without the numbers that it needs, and where two places say different things.
    """
    parameters, scaling = keys.get("rope_parameters"), keys.get("rope_scaling")
    bases, fractions = keys.get(BASE), keys.get(FRACTION, keys.get("partial_rotary_factors"))
    if parameters is None and bases is None:
        keys.require(BASE)
    found = []
    for layer, kind in enumerate(kinds):
        beside = {BASE: _of_layer(bases, layer), FRACTION: _of_layer(fractions, layer)}
        places = {
            "config.json": _without_nulls(beside),
            "rope_scaling": _of_kind(scaling, kind, layer, "rope_scaling"),
            "rope_parameters": _of_kind(parameters, kind, layer, "rope_parameters"),
        }
        rope = _rope(_agreed(places), default_fraction or 1.0, keys)
        if default_fraction is None and rope.fraction != 1:
            raise ValueError(f"config.json has partial_rotary_factor={rope.fraction}, but {keys.family} rotates all")
        found.append(rope)
    return found


def rope_parameters(rope: RopeSettings, head_size: int) -> dict[str, Any]:
    """The rotation of all layers in the dialect of transformers 5, without the share of rotated channels.

    NTK scaling is written as the plain rotation that it is, of another base.
    """
    scaling = rope.scaling
    if scaling is None or scaling.kind == "ntk":
        return {KIND: "default", BASE: plain_base(rope, head_size)}
    numbers = {theirs: getattr(scaling, ours) for theirs, ours in SCALINGS[scaling.kind].items()}
    usual = {} if scaling.kind == "llama3" else {name: RopeScaling.model_fields[name].default for name in _YARN}
    said = {name: value for name, value in numbers.items() if name not in usual or value != usual[name]}
    return {KIND: scaling.kind, BASE: rope.base, **said}


def old_rope_keys(rope: RopeSettings, head_size: int) -> dict[str, Any]:
    """The same in the dialect of transformers 4: ``rope_theta``, and ``rope_scaling`` where there is any."""
    new = rope_parameters(rope, head_size)
    base = {BASE: new.pop(BASE)}
    return base if new[KIND] == "default" else base | {"rope_scaling": new}


def _of_kind(values: Mapping[str, Any] | None, kind: str, layer: int, place: str) -> dict[str, Any]:
    """The rope settings of one layer, from a flat mapping or one for each layer type; the kind as ``rope_type``."""
    found = dict(values or {})
    if kind in found or any(isinstance(value, Mapping) for value in found.values()):
        if kind not in found:
            raise ValueError(f"{place} in config.json has nothing for the {kind} of layer {layer}")
        found = dict(found[kind])
    found = _without_nulls(found)
    old_kind = found.pop("type", None)
    if old_kind is not None and found.setdefault(KIND, old_kind) != old_kind:
        raise ValueError(f"{place} in config.json has rope_type={found[KIND]!r} and type={old_kind!r}; remove one")
    return found


def _agreed(places: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """All settings together; ``ValueError`` where two places say different things."""
    agreed: dict[str, Any] = {}
    source: dict[str, str] = {}
    for place, values in places.items():
        for name, value in values.items():
            if agreed.setdefault(name, value) != value:
                before = "" if source[name] == "config.json" else f"in {source[name]} "
                raise ValueError(
                    f"config.json has {before}{name}={agreed[name]} and in {place} {name}={value}; remove the wrong one"
                )
            source[name] = place
    return agreed


def _rope(values: Mapping[str, Any], default_fraction: float, keys: ConfigKeys) -> RopeSettings:
    kind = values.get(KIND, "default")
    if kind == "dynamic":
        raise ValueError(
            "config.json asks for the rope type 'dynamic', whose base follows the length of each sequence; up to "
            "max_position_embeddings that is the default one, so write 'default' to load it, and extend it by YaRN"
        )
    if kind != "default" and kind not in SCALINGS:
        raise ValueError(
            f"config.json asks for the rope type {kind!r}; GateLab computes default, {', '.join(SCALINGS)}: "
            "load a checkpoint without this context extension"
        )
    names = SCALINGS.get(kind, {})
    if unknown := sorted(values.keys() - ALWAYS_KNOWN - names.keys()):
        raise ValueError(
            f"config.json has {unknown[0]}={values[unknown[0]]!r} among its rope settings, not known here with the "
            f"rope type {kind!r}"
        )
    if BASE not in values:
        raise ValueError(f"the rope settings of config.json lack {BASE!r}, which has no safe default")
    fraction = values.get(FRACTION, default_fraction)
    return RopeSettings.parse({"base": values[BASE], "fraction": fraction, "scaling": _scaling(kind, values, keys)})


def _scaling(kind: str, values: Mapping[str, Any], keys: ConfigKeys) -> dict[str, Any] | None:
    if kind == "default":
        return None
    names = SCALINGS[kind]
    if ORIGINAL in names and ORIGINAL not in values:
        raise ValueError(
            f"config.json has the rope type {kind!r} without {ORIGINAL}; transformers takes max_position_embeddings="
            f"{keys.get('max_position_embeddings')} for it, which changes all frequencies where that is the extended "
            "length; write the length that was trained at before"
        )
    required = ("factor", "low_freq_factor", "high_freq_factor")
    if missing := [name for name in required if name in names and name not in values]:
        raise ValueError(f"config.json has the rope type {kind!r} without {missing[0]!r}, which has no safe default")
    given = {name: values[name] for name in names if name in values}
    said = {names[name]: value for name, value in given.items() if value or name not in ABSENT_WHEN_ZERO}
    return {"kind": kind, **said}


def _of_layer(value: Any, layer: int) -> Any:
    return value[layer] if isinstance(value, list) else value


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
