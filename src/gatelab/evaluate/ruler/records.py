"""The folder of a RULER evaluation while it runs: what was asked, and every prediction so far."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gatelab.files import remove_leftovers, require_folder, write_atomically
from gatelab.settings import Settings

SCHEMA_VERSION = 1
SETTINGS, PREDICTIONS = "settings.json", "predictions"


class Prediction(Settings):
    """What a model wrote after a sample's prompt, and how many tokens it read (BOS included) and wrote."""

    index: int
    text: str
    input_tokens: int
    new_tokens: int


class Record(Settings):
    """One task at one length so far: the predictions for the first of its samples, which have the digest
    ``samples_sha256``, and the seconds that they took."""

    task: str
    length: int
    samples_sha256: str
    predictions: tuple[Prediction, ...] = ()
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens read and written."""
        tokens = sum(one.input_tokens + one.new_tokens for one in self.predictions)
        return tokens / self.seconds if self.seconds else 0.0


class RecordFolder:
    """``settings.json`` with all that decides the predictions, and ``predictions/TASK-LENGTH.json``."""

    def __init__(self, path: Path):
        require_folder(path)
        self.path = path
        if (path / PREDICTIONS).is_dir():
            remove_leftovers(path / PREDICTIONS)

    def require_same(self, settings: Mapping[str, Any]) -> None:
        """``ValueError`` names the first setting that an evaluation in this folder had otherwise."""
        file = self.path / SETTINGS
        if not file.exists():
            return
        begun, asked = _read(file), _with_version(settings)
        for name in begun | asked:
            if begun.get(name) != asked.get(name):
                raise ValueError(
                    f"{self.path} holds an evaluation with {name}={begun.get(name)}, not {asked.get(name)}; "
                    "name another folder with --out"
                )

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Start an evaluation here, or go on with one; raises as :meth:`require_same`."""
        self.require_same(settings)
        file = self.path / SETTINGS
        if not file.exists():
            write_atomically(file, json.dumps(_with_version(settings), indent=1, ensure_ascii=False) + "\n")

    def record(self, task: str, length: int, samples_sha256: str) -> Record:
        """What is there of one task at one length, or an empty record; ``ValueError`` names a file that is damaged or
        has predictions for other samples."""
        file = self._file(task, length)
        empty = Record(task=task, length=length, samples_sha256=samples_sha256)
        if not file.exists():
            return empty
        try:
            found = Record.parse(_read(file))
        except ValueError:
            raise ValueError(f"{file} is damaged; delete it to ask {task} again") from None
        indices = [prediction.index for prediction in found.predictions]
        begun = found.model_copy(update={"predictions": (), "seconds": 0.0})
        if begun != empty or indices != list(range(len(indices))):
            raise ValueError(f"{file} has predictions for other samples; delete it to ask {task} again")
        return found

    def keep(self, record: Record) -> None:
        """Write one record in place of the last one of its task and length."""
        write_atomically(
            self._file(record.task, record.length), json.dumps(record.to_mapping(), ensure_ascii=False, indent=1) + "\n"
        )

    def _file(self, task: str, length: int) -> Path:
        return self.path / PREDICTIONS / f"{task}-{length}.json"


def _with_version(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, **settings}


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{file} is damaged; delete it, or name another folder with --out")
    return content
