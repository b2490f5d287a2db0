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
        """The settings that the run was begun with; ``ValueError`` when their file is damaged."""
        file = self.path / "settings.yaml"
        try:
            return RunSettings.from_yaml(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is unreadable: {error}") from None

    @property
    def result(self) -> dict[str, Any] | None:
        """The figures of a finished run; ``None`` while it is not."""
        return self._read_json("result.json") if (self.path / "result.json").exists() else None

    def require_same_settings(self, settings: RunSettings) -> None:
        """Raise ``ValueError`` that shows the difference when a run with other settings was begun here.

        What is watched and saved on the way may differ: it changes nothing that is trained.
        """
        if not self.is_started:
            return
        changed = {
            path: values
            for path, values in difference(self.settings, settings).items()
            if not path.startswith(CHANGEABLE)
        }
        if changed:
            raise ValueError(_refusal(self.path, "settings", changed, "choose another folder for the changed run"))

    def require_same_data(self, data: dict[str, Any]) -> None:
        """Raise ``ValueError`` that shows the difference when a run on other data was begun here."""
        if not self.is_started:
            return
        before = self._read_json("data.json")["fingerprint"]
        if before != data["fingerprint"]:
            values = (before[:16], data["fingerprint"][:16])
            way_out = "restore the text that it was begun with, or choose another folder"
            raise ValueError(_refusal(self.path, "data", {"fingerprint": values}, way_out))

    def begin(self, settings: RunSettings, environment: dict[str, Any], data: dict[str, Any]) -> None:
        """Write down what decides the run; ``ValueError`` that shows the difference when it goes on elsewhere."""
        if self.is_started and settings.train.checkpoint.same_environment:
            before = self._read_json("environment.json")
            moved = {key: (before.get(key), environment[key]) for key in DECIDES_BITS}
            moved = {key: values for key, values in moved.items() if values[0] != values[1]}
            if moved:
                way_out = "set train.checkpoint.same_environment=false if the result may differ in its last bits"
                raise ValueError(_refusal(self.path, "environment", moved, way_out))
        self._write_json("environment.json", environment)
        self._write_json("data.json", data)
        write_atomically(self.path / "settings.yaml", settings.to_yaml())

    def finish(self, result: dict[str, Any]) -> None:
        """Write the final figures: from now on the run is finished."""
        self._write_json("result.json", result)

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        write_atomically(self.path / name, json.dumps(content, indent=1, allow_nan=False) + "\n")

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{self.path / name} is unreadable: {error}") from None


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
