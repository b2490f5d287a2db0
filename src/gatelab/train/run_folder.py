"""A run's folder: what it was asked, where it ran, what it read, what came out.

``settings.yaml`` (runs it again), ``environment.json``, ``data.json``, ``tokenizer.json`` (of a run on text),
``metrics.jsonl``, ``checkpoints/``, and at the end ``measurement.json``, ``heldout_documents.safetensors`` and, last of
all, ``result.json``.
"""

from __future__ import annotations

import errno
import json
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import gatelab
from gatelab.data.chat_template import TEMPLATE_FILE, ChatTemplate
from gatelab.data.tokenizer import Tokenizer
from gatelab.files import parse_json, require_folder, write_atomically
from gatelab.model.attention import fused_attention
from gatelab.settings import difference
from gatelab.train.checkpoint import checkpoints
from gatelab.train.parallel.compilation import attention_kernel
from gatelab.train.parallel.mesh import CPU
from gatelab.train.settings import RunSettings

CHANGEABLE = (
    "train.checkpoint.",
    "train.evaluation.",
    "train.tensorboard",
    "train.device",
    "train.parallel.",
    "train.on_nonfinite",
    "train.max_nonfinite",
    "data.num_processes",
)
DECIDES_BITS = ("torch", "instruction_set", "device", "threads", "compiled", "tiled_attention")
STUDY_FILE = "study.yaml"
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
SHAPES: dict[str, dict[str, type]] = {
    "environment.json": {},
    "data.json": {"fingerprint": str, "heldout": list, "attributions": list},
    "result.json": {"heldout": dict, "measurement": dict},
}


class RunFolder:
    """Reads and writes one run's folder, and refuses to mix two runs in it."""

    def __init__(self, path: Path):
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.tokenizer = path / "tokenizer.json"
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
    def chat_template(self) -> ChatTemplate | None:
        """The template that a run on chats keeps, ``None`` of one on text; ``ValueError`` when it can't be read."""
        if not (self.path / TEMPLATE_FILE).is_file():
            return None
        return ChatTemplate.load(self.path, self.settings.data.tokenizer.bos_token)

    @property
    def environment(self) -> dict[str, Any]:
        """Where the run was begun or continued last."""
        return self._read_json("environment.json")

    @property
    def data(self) -> dict[str, Any]:
        """What the run reads: ``fingerprint``, names of the ``heldout`` domains, ``attributions``; a run that does not
        start from random weights has the checksum of its ``start_weights``."""
        return self._read_json("data.json")

    @property
    def result(self) -> dict[str, Any] | None:
        """The figures of a finished run; ``None`` while it is not."""
        return self._read_json("result.json") if (self.path / "result.json").exists() else None

    @contextmanager
    def explained(self, cache: Path) -> Iterator[None]:
        """Turn the system's error for a disk that is full or read-only into a sentence that says what is kept."""
        try:
            yield
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            saved = checkpoints(self.checkpoints)
            kept = f"the last good checkpoint is {saved[-1]}" if saved else "there is no checkpoint yet"
            raise OSError(
                f"{error.filename or f'{self.path} or {cache}'} can't be written: {error.strerror}; {kept}. Free some "
                "space or make the folder writable, and the same command goes on from there"
            ) from error

    def require_whole(self) -> None:
        """Raise ``ValueError`` when no run can begin or go on here: a study, leftovers, a missing or damaged file."""
        require_folder(self.path)
        if (self.path / STUDY_FILE).exists():
            raise ValueError(
                f"{self.path} holds a study, whose runs are in folders of their own; choose another folder"
            )
        if self.checkpoints.exists() and not self.checkpoints.is_dir():
            raise ValueError(f"{self.checkpoints} is a file where a run keeps its checkpoints; choose another folder")
        if not self.is_started:
            strays = [path for path in (self.checkpoints, self.metrics, self.path / "result.json") if path.exists()]
            if strays:
                raise ValueError(
                    f"{self.path} has {strays[0].name} of a run but no settings.yaml to go on with; "
                    "restore it or choose another folder"
                )
            return
        self._require_inside()
        for name in SHAPES:
            if name != "result.json" or (self.path / name).exists():
                self._read_json(name)
        if checkpoints(self.checkpoints) and not self.metrics.is_file():
            raise ValueError(
                f"{self.metrics} is missing and the checkpoints beside it can't go on without; "
                "restore it or choose another folder"
            )

    def _require_inside(self) -> None:
        """Raise ``ValueError`` for a file that is a link out of the folder: a run that goes on would write there."""
        whole = self.path.resolve()
        for path in [*self.path.iterdir(), *(self.checkpoints.iterdir() if self.checkpoints.is_dir() else ())]:
            if not path.resolve().is_relative_to(whole):
                raise ValueError(f"{path} is a link out of the run's folder; put the file itself there")

    def require_same_settings(self, settings: RunSettings) -> None:
        """Raise ``ValueError`` that shows the difference when a run with other settings was begun here.

        What is watched and saved on the way may differ: it changes nothing that is trained. So may what is done about
        a step that is not finite, or a run that it stopped could not go on.
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
        """Raise ``ValueError`` that shows the difference when a run on other data, or weights, was begun here."""
        if not self.is_started:
            return
        before = self.data
        for key, what, kept in (("fingerprint", "data", "text"), ("start_weights", "start weights", "weights")):
            if before.get(key) != data.get(key):
                values = (before.get(key, "")[:16], data.get(key, "")[:16])
                way_out = f"restore the {kept} that it was begun with, or choose another folder"
                raise ValueError(_refusal(self.path, what, {key: values}, way_out))

    def begin(
        self,
        settings: RunSettings,
        environment: dict[str, Any],
        data: dict[str, Any],
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None = None,
    ) -> None:
        """Write down what decides the run; ``ValueError`` that shows the difference when it goes on elsewhere.

        The tokenizer is kept so that the model can be used where the prepared text is not, and so is a chat template.
        """
        if self.is_started and settings.train.checkpoint.same_environment:
            before = self.environment
            moved = {key: (before.get(key), environment[key]) for key in DECIDES_BITS}
            moved = {key: values for key, values in moved.items() if values[0] != values[1]}
            if moved:
                way_out = (
                    "set train.checkpoint.same_environment=false if the result may differ in its last bits, "
                    "or choose another folder"
                )
                raise ValueError(_refusal(self.path, "environment", moved, way_out))
        self._write_json("environment.json", environment)
        self._write_json("data.json", data)
        if tokenizer is not None:
            write_atomically(self.tokenizer, tokenizer.to_text())
        for name, content in ({} if template is None else template.files()).items():
            write_atomically(self.path / name, content)
        write_atomically(self.path / "settings.yaml", settings.to_yaml())

    def finish(self, result: dict[str, Any]) -> None:
        """Write the final figures: from now on the run is finished."""
        self._write_json("result.json", result)

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        write_atomically(self.path / name, json.dumps(content, indent=1, allow_nan=False) + "\n")

    def _read_json(self, name: str) -> dict[str, Any]:
        """A mapping of the shape in ``SHAPES``; ``ValueError`` names a file that is missing or holds something else."""
        file, way_out = self.path / name, "restore it or choose another folder"
        try:
            content = parse_json(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"{file} of the run is missing; {way_out}") from None
        except ValueError as error:
            raise ValueError(f"{file} is unreadable: {error}; {way_out}") from None
        if not isinstance(content, dict):
            raise ValueError(f"{file} is unreadable: it holds no mapping; {way_out}")
        for key, kind in SHAPES[name].items():
            if not isinstance(content.get(key), kind):
                raise ValueError(f"{file} is unreadable: its {key!r} is no {kind.__name__}; {way_out}")
        return content


def describe_environment(compiled: bool, device: torch.device = CPU) -> dict[str, Any]:
    """Versions and machine; of these, ``DECIDES_BITS`` decide the last bits."""
    return {
        "gatelab": gatelab.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "compiled": compiled,
        "tiled_attention": compiled and device.type == "cpu" and attention_kernel() is not fused_attention,
        "system": platform.platform(terse=True),
    }


def _refusal(folder: Path, what: str, changed: dict[str, tuple[Any, Any]], way_out: str) -> str:
    lines = [f"  {path}: {before!r} in the folder, {after!r} now" for path, (before, after) in changed.items()]
    return "\n".join([f"{folder} holds a run with other {what}; {way_out}:", *lines])
