"""Presets by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gatelab.settings import nearest
from gatelab.study.presets.encoders import encoder_text, encoder_vision
from gatelab.study.presets.gates import activation, granularity, nonlinearity, positions, sparsity
from gatelab.study.presets.kinds import attention_kinds
from gatelab.study.presets.models import (
    dense,
    dense_deep,
    dense_deep_large_batch,
    dense_large_batch,
    moe,
    overhead,
    stability,
)
from gatelab.study.presets.post_training import sft
from gatelab.study.presets.quantisation import quantisation
from gatelab.study.presets.sinks import mechanism, rivals, sinks
from gatelab.study.presets.why import why
from gatelab.study.scales import SCALES, Scale, find_scale
from gatelab.study.study import Study

Preset = Callable[[Scale], Study]

_OF_THE_PAPER: tuple[Preset, ...] = (
    positions,
    granularity,
    activation,
    nonlinearity,
    sparsity,
    dense,
    dense_large_batch,
    dense_deep,
    dense_deep_large_batch,
    stability,
    moe,
    overhead,
    sinks,
)

PRESETS: dict[str, Preset] = {
    **{f"paper/{preset.__name__}": preset for preset in _OF_THE_PAPER},
    "mechanism": mechanism,
    "rivals": rivals,
    "open/sft": sft,
    "open/quantisation": quantisation,
    "open/attention_kinds": attention_kinds,
    "open/why": why,
    "open/encoder_text": encoder_text,
    "open/encoder_vision": encoder_vision,
}

LEFT_OUT: dict[str, str] = {
    "paper/switch_heads": "table 6 needs Switch-Head, an attention whose projections are mixtures of experts with a "
    "router for each head, and GateLab has none; its last row, one expert, is value_headwise in paper/granularity"
}


def find_preset(name: str) -> Preset:
    """The preset with this name; a ``ValueError`` with the reason for one left out, or with the nearest name."""
    if name in LEFT_OUT:
        raise ValueError(f"preset {name} is left out: {LEFT_OUT[name]}")
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is unknown; {nearest(name, PRESETS)}")
    return PRESETS[name]


def plan(name: str, scale: str | None = None) -> Study:
    """The study of a ``study.yaml``, or a preset at a scale, ``micro`` when ``None``.

    Raises ``ValueError`` for a file that is none, and as :func:`find_preset` and
    :func:`gatelab.study.scales.find_scale` do.
    """
    if name.endswith(".yaml"):
        if scale is not None:
            raise ValueError(f"{name} has its own scale; leave out --scale {scale}")
        if not Path(name).is_file():
            raise ValueError(f"{name} does not exist; give the study.yaml in a study's folder, or a preset's name")
        return Study.from_yaml(Path(name).read_text(encoding="utf-8"))
    default = "mechanism" if name == "mechanism" else "micro"
    return find_preset(name)(find_scale(scale or default))


def command_that_leaves(path: Path) -> str | None:
    """The command that makes a path inside ``runs/study/NAME-SCALE``, a preset's own folder; ``None`` elsewhere."""
    if path.parts[:2] != ("runs", "study") or len(path.parts) < 3:
        return None
    name, _, scale = path.parts[2].rpartition("-")
    preset = next((preset for preset in PRESETS if preset.rpartition("/")[2] == name), None)
    return f"gatelab study {preset} --scale {scale}" if preset is not None and scale in SCALES else None
