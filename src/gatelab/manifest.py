"""What is written beside the tensors of a checkpoint: of what model they are, and the checksum of every file.

``model.json`` has the layout of the gates and the model's settings, ``manifest.json`` the number of steps and the
SHA-256 of ``model.json`` and of every safetensors file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gatelab.files import parse_json, sha256, write_atomically

SCHEMA_VERSION = 2
MODEL, MANIFEST = "model.json", "manifest.json"


class Manifest(NamedTuple):
    """The number of steps after which a checkpoint was saved, and its files' checksums by name."""

    step: int
    checksums: Mapping[str, str]

    def text(self) -> str:
        """The file, byte for byte."""
        values = {"schema_version": SCHEMA_VERSION, "step": self.step, "sha256": dict(self.checksums)}
        return json.dumps(values, indent=1) + "\n"


def write_manifest(
    folder: Path, step: int, layout: str, settings: Mapping[str, Any], checksums: Mapping[str, str]
) -> None:
    """Complete a checkpoint whose tensors are written and have these checksums."""
    write_atomically(folder / MODEL, json.dumps({"gate_layout": layout, "settings": settings}, indent=1) + "\n")
    write_atomically(folder / MANIFEST, Manifest(step, {MODEL: sha256(folder / MODEL), **checksums}).text())


def verify(folder: Path, part: int = 0, num_parts: int = 1) -> int:
    """Compare every byte of a checkpoint with what was written, and return its number of steps.

    The files whose checksums are compared are one of ``num_parts`` parts of all. Raises ``ValueError`` that names the
    file: the manifest by its text, the others by their checksums.
    """
    step, checksums = _read(folder)
    files = {file.name for file in folder.iterdir() if file.suffix == ".safetensors"} | {MODEL}
    for name in sorted(checksums.keys() | files):
        if name not in checksums:
            raise ValueError(f"{folder / MANIFEST} does not list {folder / name}, or is damaged; {_way_out(folder)}")
        if not (folder / name).is_file() or name not in files:
            raise ValueError(f"{folder / name} is missing, and {MANIFEST} lists it; {_way_out(folder)}")
    for name in list(checksums)[part::num_parts]:
        if sha256(folder / name) != checksums[name]:
            raise ValueError(f"{folder / name} is damaged, or its checksum in {MANIFEST} is; {_way_out(folder)}")
    return step


def read_model(folder: Path) -> tuple[object, dict[str, Any]]:
    """The gate layout and the model's settings as ``model.json`` has them; ``ValueError`` when it has not."""
    file = folder / MODEL
    try:
        stored = parse_json(file.read_text(encoding="utf-8"))
        return stored["gate_layout"], dict(stored["settings"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file} does not say what model the weights beside it are of; {_way_out(folder)}") from None


def _read(folder: Path) -> Manifest:
    file = folder / MANIFEST
    try:
        text = file.read_bytes().decode()
        stored = parse_json(text)
        version, manifest = stored["schema_version"], Manifest(stored["step"], dict(stored["sha256"]))
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{file} is missing or damaged; {_way_out(folder)}") from None
    if version != SCHEMA_VERSION:
        raise ValueError(f"{file} has schema version {version}, this GateLab reads {SCHEMA_VERSION}")
    if text != manifest.text():
        raise ValueError(f"{file} is missing or damaged; {_way_out(folder)}")
    return manifest


def _way_out(folder: Path) -> str:
    return f"take the checkpoint before it, as a run does once {folder} is deleted"
