"""Checkpoints that are complete or absent, and known by checksum.

A checkpoint is a folder ``step_00000200``: ``model.safetensors`` (weights in layout L1; the metadata names the layout
and the model's settings), ``optimizer.pt`` (readable with ``weights_only``) and ``manifest.json`` with the SHA-256 of
both. It is written under a temporary name and renamed, so that a kill at any moment leaves the one before it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from gatelab.files import atomic_path, parse_json, require_free_space, sha256, temporary_beside
from gatelab.model.decoder import Decoder
from gatelab.model.settings import ModelSettings

SCHEMA_VERSION = 1
LAYOUT = "L1"
WEIGHTS, OPTIMIZER, MANIFEST = "model.safetensors", "optimizer.pt", "manifest.json"


def save_checkpoint(folder: Path, step: int, decoder: Decoder, optimizer: torch.optim.Optimizer, keep: int) -> Path:
    """Save the state after ``step`` steps under ``folder`` and remove all but the ``keep`` newest checkpoints.

    Raises ``OSError``, with nothing half-written, when the disk is full.
    """
    num_bytes = 3 * sum(p.numel() * p.element_size() for p in decoder.parameters())
    require_free_space(folder, num_bytes, "a checkpoint")
    target = path_of_step(folder, step)
    with atomic_path(target) as temporary:
        temporary.mkdir()
        try:
            write_weights(temporary / WEIGHTS, decoder)
            torch.save(optimizer.state_dict(), temporary / OPTIMIZER)
        except (SafetensorError, RuntimeError) as error:
            raise OSError(f"{target} could not be written; is the disk full? {error}") from error
        checksums = {name: sha256(temporary / name) for name in (WEIGHTS, OPTIMIZER)}
        (temporary / MANIFEST).write_text(_manifest(step, checksums), encoding="utf-8")
    for old in checkpoints(folder)[:-keep]:
        leaving = old.replace(temporary_beside(old))
        shutil.rmtree(leaving)
    return target


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first."""
    return sorted(folder.glob("step_" + 8 * "[0-9]"))


def path_of_step(folder: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` steps is."""
    return folder / f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The number of steps after which a checkpoint was saved."""
    return int(path.name.removeprefix("step_"))


def load_checkpoint(path: Path, decoder: Decoder, optimizer: torch.optim.Optimizer) -> int:
    """Restore weights and optimizer and return the number of steps done.

    Raises ``ValueError`` that names the file when one is missing, damaged, or of another schema, layout or model.
    """
    _verify(path)
    load_weights(path / WEIGHTS, decoder)
    try:
        optimizer.load_state_dict(torch.load(path / OPTIMIZER, weights_only=True))
    except UnpicklingError:
        raise ValueError(f"{path / OPTIMIZER} holds more than tensors and plain values, and is not opened") from None
    return step_of(path)


def load_decoder(path: Path) -> Decoder:
    """The decoder of a checkpoint, float32 and in eval mode; errors as for :func:`load_checkpoint`."""
    _verify(path)
    decoder = Decoder(stored_settings(path / WEIGHTS))
    load_weights(path / WEIGHTS, decoder)
    return decoder.eval()


def write_weights(path: Path, decoder: Decoder) -> None:
    """Write a decoder's weights, with layout and settings in the metadata, as one safetensors file."""
    metadata = {"format": "pt", "gate_layout": LAYOUT, "model": decoder.settings.model_dump_json()}
    save_file({name: tensor.contiguous() for name, tensor in decoder.state_dict().items()}, path, metadata)


def stored_settings(path: Path) -> ModelSettings:
    """The settings of the model whose weights a file holds; ``ValueError`` for a file that does not say."""
    text = _metadata(path).get("model")
    if text is None:
        raise ValueError(f"{path} does not say what model its weights are of; it was not written by GateLab's training")
    return ModelSettings.parse(parse_json(text))


def require_layout(path: Path) -> None:
    """Raise ``ValueError`` for weights in a layout of gates other than ours."""
    layout = _metadata(path).get("gate_layout")
    if layout != LAYOUT:
        raise ValueError(f"{path} has gate layout {layout}, this GateLab trains on with {LAYOUT}")


def load_weights(path: Path, decoder: Decoder) -> None:
    """Fill a decoder from a safetensors file; ``ValueError`` for one in another layout or of another model."""
    require_layout(path)
    try:
        decoder.load_state_dict(load_file(path))
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the model: {str(error).splitlines()[-1].strip()}") from None


def _metadata(path: Path) -> dict[str, str]:
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is no readable safetensors file: {error}") from None


def _manifest(step: int, checksums: dict[str, str]) -> str:
    return json.dumps({"schema_version": SCHEMA_VERSION, "step": step, "sha256": checksums}, indent=1) + "\n"


def _verify(path: Path) -> None:
    """Compare every byte of a checkpoint with what was written: the manifest's text, the other files' checksums."""
    way_out = f"delete {path} to continue from the checkpoint before it"
    file = path / MANIFEST
    try:
        text = file.read_bytes().decode()
        manifest = parse_json(text)
        version, checksums = manifest["schema_version"], dict(manifest["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{file} is missing or damaged; {way_out}") from None
    if version != SCHEMA_VERSION:
        raise ValueError(f"{file} has schema version {version}, this GateLab reads {SCHEMA_VERSION}")
    if text != _manifest(step_of(path), checksums) or list(checksums) != [WEIGHTS, OPTIMIZER]:
        raise ValueError(f"{file} is missing or damaged; {way_out}")
    for name, checksum in checksums.items():
        file = path / name
        if not file.exists():
            raise ValueError(f"{file} is missing; {way_out}")
        if sha256(file) != checksum:
            raise ValueError(f"{file} is damaged, or its checksum in {MANIFEST} is; {way_out}")
