"""Weights that a run starts from in place of random ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from gatelab.files import atomic_path, parse_json, require_free_space
from gatelab.model.decoder import Decoder
from gatelab.model.settings import ModelSettings
from gatelab.settings import difference
from gatelab.train.checkpoint import WEIGHTS, load_weights, require_layout, stored_settings, write_weights

_OF_THE_DRAW = ("init_std", "matching_multiple", "drawn_feedforward_width")
_OF_A_GATES_DRAW = (".initialization", ".bias")


def save_start(folder: Path, decoder: Decoder) -> None:
    """Write a folder that ``train.start_from`` takes: ``model.safetensors`` with the model's settings in it.

    The folder appears whole or not at all; it must not exist yet. Raises ``OSError`` when the disk is full.
    """
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in decoder.state_dict().values())
    require_free_space(folder.parent, num_bytes, "saving the weights to start from")
    with atomic_path(folder) as temporary:
        temporary.mkdir()
        write_weights(temporary / WEIGHTS, decoder)


def keep_start(folder: Path, decoder: Decoder) -> None:
    """Save weights to start from, or make sure that these are there: ``ValueError`` where others are."""
    if not folder.exists():
        save_start(folder, decoder)
        return
    require_start(folder, decoder.settings)
    if start_checksum(folder) != weights_checksum(decoder.state_dict()):
        raise ValueError(f"{folder} holds the start of another experiment; choose another folder")


def require_start(folder: Path, settings: ModelSettings) -> None:
    """Raise ``ValueError`` unless the folder holds weights of a model with these settings, before any work.

    What decides fresh weights alone may differ: ``init_std``, the width that feed-forward matrices are drawn at, and
    the initialization and start bias of gates.
    """
    file = folder / WEIGHTS
    if not file.is_file():
        raise ValueError(
            f"train.start_from={folder} has no {WEIGHTS}; name a checkpoint, such as RUN/checkpoints/step_00000200, or "
            "another folder with the weights in one file (of a run on several ranks, gatelab convert makes one)"
        )
    require_layout(file)
    changed = {
        path: values for path, values in difference(_settings_in(folder), settings).items() if not _is_of_a_draw(path)
    }
    if changed:
        lines = [f"  model.{path}: {before!r} there, {now!r} here" for path, (before, now) in changed.items()]
        raise ValueError("\n".join([f"train.start_from={folder} holds the weights of another model:", *lines]))


def start_checksum(folder: Path) -> str:
    """The :func:`weights_checksum` of the weights that a run starts from."""
    return weights_checksum(load_file(folder / WEIGHTS))


def weights_checksum(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and values.

    Files of equal weights may differ, because safetensors writes its metadata in any order.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load_start(folder: Path, decoder: Decoder) -> None:
    """Fill the decoder with the folder's weights, in the decoder's own dtype."""
    load_weights(folder / WEIGHTS, decoder)


def _settings_in(folder: Path) -> ModelSettings:
    """The model's settings: of GateLab's entry in a ``config.json``, else of the weights' own metadata."""
    config = folder / "config.json"
    if not config.is_file():
        return stored_settings(folder / WEIGHTS)
    try:
        return ModelSettings.parse(parse_json(config.read_text(encoding="utf-8"))["gatelab"])
    except (KeyError, TypeError, json.JSONDecodeError):
        raise ValueError(
            f"{config} has no settings of a GateLab model; convert the model to GateLab's form first"
        ) from None


def _is_of_a_draw(path: str) -> bool:
    return path in _OF_THE_DRAW or (path.startswith("gates.") and path.endswith(_OF_A_GATES_DRAW))
