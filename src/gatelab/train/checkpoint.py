"""Checkpoints that are complete or absent, and known by checksum.

A checkpoint is a folder ``step_00000200``: ``model.safetensors`` (weights in layout L1, named in its metadata),
``optimizer.pt`` (readable with ``weights_only``) and ``manifest.json`` with the SHA-256 of both. It is written under a
temporary name and renamed, so that a kill at any moment leaves the one before it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from gatelab.files import atomic_path, remove_leftovers, require_free_space, sha256
from gatelab.model.decoder import Decoder
from gatelab.model.settings import ModelSettings

SCHEMA_VERSION = 1
LAYOUT = "L1"
WEIGHTS, OPTIMIZER, MANIFEST = "model.safetensors", "optimizer.pt", "manifest.json"


def save_checkpoint(folder: Path, step: int, decoder: Decoder, optimizer: torch.optim.Optimizer, keep: int) -> Path:
    """Save the state after ``step`` steps under ``folder`` and remove all but the ``keep`` newest checkpoints."""
    num_bytes = 3 * sum(p.numel() * p.element_size() for p in decoder.parameters())
    require_free_space(folder, num_bytes, "a checkpoint")
    target = folder / f"step_{step:08d}"
    with atomic_path(target) as temporary:
        temporary.mkdir()
        save_weights(temporary / WEIGHTS, decoder)
        torch.save(optimizer.state_dict(), temporary / OPTIMIZER)
        checksums = {name: sha256(temporary / name) for name in (WEIGHTS, OPTIMIZER)}
        manifest = {"schema_version": SCHEMA_VERSION, "step": step, "sha256": checksums}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def save_weights(path: Path, decoder: Decoder) -> None:
    """Write the decoder's weights as safetensors, with the gate layout and the model's settings in the metadata."""
    metadata = {"format": "pt", "gate_layout": LAYOUT, "model": decoder.settings.model_dump_json()}
    save_file({name: tensor.contiguous() for name, tensor in decoder.state_dict().items()}, path, metadata)


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first."""
    return sorted(path.parent for path in folder.glob(f"step_*/{MANIFEST}"))


def load_checkpoint(path: Path, decoder: Decoder, optimizer: torch.optim.Optimizer) -> int:
    """Restore weights and optimizer and return the number of steps done.

    Raises ``ValueError`` that names the file when one is missing, damaged or of another schema.
    """
    step = _verify(path)
    _load_weights(path / WEIGHTS, decoder)
    optimizer.load_state_dict(torch.load(path / OPTIMIZER, weights_only=True))
    return step


def load_decoder(path: Path, settings: ModelSettings) -> Decoder:
    """The decoder of a checkpoint, in eval mode; errors as for :func:`load_checkpoint`."""
    _verify(path)
    decoder = Decoder(settings)
    _load_weights(path / WEIGHTS, decoder)
    return decoder.eval()


def clean(folder: Path) -> None:
    """Remove what an interrupted save left behind."""
    if folder.exists():
        remove_leftovers(folder)


def _verify(path: Path) -> int:
    way_out = f"delete {path} to continue from the checkpoint before it"
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        version, step, checksums = manifest["schema_version"], int(manifest["step"]), manifest["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{path / MANIFEST} is unreadable; {way_out}") from None
    if version != SCHEMA_VERSION:
        raise ValueError(f"{path / MANIFEST} has schema version {version}, this GateLab reads {SCHEMA_VERSION}")
    for name in (WEIGHTS, OPTIMIZER):
        file = path / name
        if not file.exists():
            raise ValueError(f"{file} is missing; {way_out}")
        if sha256(file) != checksums.get(name):
            raise ValueError(f"{file} is damaged: its checksum is not that of the manifest; {way_out}")
    return step


def _load_weights(path: Path, decoder: Decoder) -> None:
    try:
        decoder.load_state_dict(load_file(path))
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{path} does not fit the model: {str(error).splitlines()[-1].strip()}") from None
