"""The README.md of a saved model: what it is, where it comes from, and what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from pydantic import Field

import gatelab
from gatelab.files import write_atomically
from gatelab.gates.spec import GateSpec
from gatelab.model.settings import ModelSettings
from gatelab.report.tables import markdown_text
from gatelab.settings import Settings

UNKNOWN = "not stated"


class ModelCard(Settings):
    """What a model card says beyond the model's settings; results are names of figures and their values."""

    name: str | None = None
    recipe: str | None = Field(default=None, description="the command or recipe that trained the model")
    data: str | None = Field(default=None, description="what it was trained on")
    license: str | None = None
    results: dict[str, float | str] = Field(default={}, description="name of a figure -> its value")


def write_model_card(folder: Path, settings: ModelSettings, card: ModelCard | None = None) -> None:
    """Write ``README.md`` into the folder of a saved model; one that is there stays unless a card is given."""
    file = folder / "README.md"
    if card is not None or not file.exists():
        write_atomically(file, render_model_card(settings, card or ModelCard()))


def render_model_card(settings: ModelSettings, card: ModelCard) -> str:
    """The card as Markdown, with the front matter that model hubs read."""
    front = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["gated-attention", "gatelab"]}
    if card.license is not None:
        front["license"] = card.license
    gates = [f"- {describe_gate(gate)}" for gate in settings.gates] or ["- none"]
    rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in card.results.items()]
    results = ["| figure | value |", "| --- | --- |", *rows] if rows else [UNKNOWN]
    lines = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {markdown_text(card.name or 'GateLab model')}",
        f"A decoder with gated attention, saved by GateLab {gatelab.__version__} (gate layout L1).",
        "## Gates",
        "\n".join(gates),
        "## Training",
        f"- recipe: {markdown_text(card.recipe or UNKNOWN)}\n- data: {markdown_text(card.data or UNKNOWN)}",
        "## Results",
        "\n".join(results),
        "## Use",
        "```python\nimport gatelab.interop\nfrom transformers import AutoModelForCausalLM\n\n"
        'gatelab.interop.register()\nmodel = AutoModelForCausalLM.from_pretrained("path/to/this/folder")\n```',
        "## Settings",
        f"```json\n{json.dumps(settings.model_dump(mode='json', exclude_defaults=True), indent=1)}\n```",
    ]
    return "\n\n".join(lines) + "\n"


def describe_gate(gate: GateSpec) -> str:
    """One line for a gate: its position, granularity and activation, and what else differs from the default."""
    main = f"{gate.position}, {gate.granularity}, {gate.activation}, {gate.operation}"
    shown = {"position", "granularity", "activation", "operation", "schema_version"}
    rest = gate.model_dump(exclude_defaults=True, exclude=shown)
    return main + "".join(f", {name}={value}" for name, value in rest.items())


def _cell(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else markdown_text(str(value))
