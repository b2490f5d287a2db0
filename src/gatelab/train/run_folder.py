"""A run's folder: what it was asked, where it ran, what it read, what came out.

``settings.yaml`` (runs it again), ``environment.json``, ``data.json``, ``metrics.jsonl``, ``checkpoints/``, and at the
end ``measurement.json``, ``heldout_documents.safetensors`` and, last of all, ``result.json``.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch

import gatelab
from gatelab.files import write_atomically
from gatelab.settings import difference
from gatelab.train.settings import RunSettings

CHANGEABLE = ("train.checkpoint.", "train.evaluation.", "train.tensorboard")
DECIDES_BITS = ("torch", "instruction_set", "threads", "compiled")


class RunFolder:
    """Reads and writes one run's folder, and refuses to mix two runs in it."""

    def __init__(self, path: Path):
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.measurement = path / "measurement.json"
        self.documents = path / "heldout_documents.safetensors"

    @property
    def is_started(self) -> bool:
        """Whether a run was begun here."""
        return (self.path / "settings.yaml").exists()

    @property
    def settings(self) -> RunSettings:
        """The settings that the run was begun with."""
        return RunSettings.from_yaml((self.path / "settings.yaml").read_text(encoding="utf-8"))

    @property
    def result(self) -> dict[str, Any] | None:
        """The figures of a finished run; ``None`` while it is not."""
        file = self.path / "result.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

    def begin(self, settings: RunSettings, environment: dict[str, Any], data: dict[str, Any]) -> None:
        """Write what decides the run, or check that it is what is already here.

        Raises ``ValueError`` that shows the difference in settings, data or environment.
        """
        if self.is_started:
            self._require_equal(settings, environment, data)
        self._write_json("environment.json", environment)
        self._write_json("data.json", data)
        write_atomically(self.path / "settings.yaml", settings.to_yaml())

    def finish(self, result: dict[str, Any]) -> None:
        """Write the final figures: from now on the run is finished."""
        self._write_json("result.json", result)

    def _require_equal(self, settings: RunSettings, environment: dict[str, Any], data: dict[str, Any]) -> None:
        changed = {
            path: values
            for path, values in difference(self.settings, settings).items()
            if not path.startswith(CHANGEABLE)
        }
        if changed:
            raise ValueError(_refusal(self.path, "settings", changed, "choose another folder for the changed run"))
        before = self._read_json("data.json")
        if before["fingerprint"] != data["fingerprint"]:
            values = (before["fingerprint"][:16], data["fingerprint"][:16])
            way_out = "restore the text that it was begun with, or choose another folder"
            raise ValueError(_refusal(self.path, "data", {"fingerprint": values}, way_out))
        before = self._read_json("environment.json")
        moved = {key: (before[key], environment[key]) for key in DECIDES_BITS if before[key] != environment[key]}
        if moved and settings.train.checkpoint.same_environment:
            way_out = "set train.checkpoint.same_environment=false if the result may differ in its last bits"
            raise ValueError(_refusal(self.path, "environment", moved, way_out))

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        write_atomically(self.path / name, json.dumps(content, indent=1) + "\n")

    def _read_json(self, name: str) -> dict[str, Any]:
        return json.loads((self.path / name).read_text(encoding="utf-8"))


def describe_environment(compiled: bool) -> dict[str, Any]:
    """Versions and machine; ``torch``, ``instruction_set``, ``threads`` and ``compiled`` decide the last bits."""
    return {
        "gatelab": gatelab.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "compiled": compiled,
        "system": platform.platform(terse=True),
    }


def _refusal(folder: Path, what: str, changed: dict[str, tuple[Any, Any]], way_out: str) -> str:
    lines = [f"  {path}: {before!r} in the folder, {after!r} now" for path, (before, after) in changed.items()]
    return "\n".join([f"{folder} holds a run with other {what}; {way_out}:", *lines])
