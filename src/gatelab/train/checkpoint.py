"""Checkpoints that are complete or absent, and known by checksum.

A checkpoint is a folder ``step_00000200`` of safetensors files, which hold weights in layout L1 by their names and what
the optimizer keeps as ``optimizer.NAME.KEY``, beside :mod:`gatelab.manifest`'s two files. A single process writes
``model.safetensors`` and ``optimizer.safetensors``; ranks write a file of parts each
(:mod:`gatelab.train.parallel.shard_files`). Any number of ranks reads either. A checkpoint is written under a temporary
name and renamed, so that a kill at any moment leaves the one before it.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from gatelab.files import atomic_path, parse_json, require_free_space, sha256, temporary_beside
from gatelab.manifest import MANIFEST, MODEL, read_model, verify, write_manifest
from gatelab.model.decoder import Decoder
from gatelab.model.settings import ModelSettings
from gatelab.train.parallel.mesh import ALONE, Ranks

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

LAYOUT = "L1"
WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
OF_OPTIMIZER = "optimizer."


def save_checkpoint(folder: Path, step: int, decoder: Decoder, optimizer: torch.optim.Optimizer, keep: int) -> Path:
    """Save the state after ``step`` steps under ``folder`` and remove all but the ``keep`` newest checkpoints.

    Raises ``OSError``, with nothing half-written, when the disk is full.
    """
    return save_state(folder, step, decoder.settings, training_state(decoder, optimizer), keep)


def save_state(folder: Path, step: int, settings: ModelSettings, state: Mapping[str, Tensor], keep: int) -> Path:
    """The same for a whole :func:`training_state` of a model with these settings."""
    require_room(folder, state)
    target = path_of_step(folder, step)
    weights = {name: value for name, value in state.items() if not name.startswith(OF_OPTIMIZER)}
    with atomic_path(target) as temporary:
        temporary.mkdir()
        try:
            _save_tensors(temporary / WEIGHTS, weights, settings)
            save_file({name: state[name].contiguous() for name in state if name not in weights}, temporary / OPTIMIZER)
        except (SafetensorError, RuntimeError) as error:
            raise OSError(f"{target} could not be written; is the disk full? {error}") from error
        checksums = {name: sha256(temporary / name) for name in (WEIGHTS, OPTIMIZER)}
        complete(temporary, step, settings, checksums)
    remove_old(folder, keep)
    return target


def training_state(decoder: Decoder, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The weights and what the optimizer keeps of each, by name; on ranks, this rank's parts of them."""
    kept = {name: optimizer.state[parameter] for name, parameter in decoder.named_parameters()}
    return _weights(decoder) | _of_optimizer(kept)


def load_checkpoint(path: Path, decoder: Decoder, optimizer: torch.optim.Optimizer, ranks: Ranks = ALONE) -> int:
    """Restore weights and optimizer, on ranks this rank's parts of them, and return the number of steps done.

    All ranks call this together. Rates and decays of the optimizer's groups stay as they are. Raises ``ValueError``
    that names the file when one is missing, damaged, or of another schema, layout or model.
    """
    _verified_model(path, ranks)
    stored = _stored_tensors(path)
    kept = _empty_optimizer_state(path, stored, decoder)
    _fill(path, stored, _weights(decoder) | _of_optimizer(kept), ranks)
    parameters = dict(decoder.named_parameters())
    optimizer.state.clear()
    optimizer.state.update({parameters[name]: values for name, values in kept.items()})
    return step_of(path)


def load_decoder(path: Path) -> Decoder:
    """The decoder of a checkpoint in one piece, float32 and in eval mode; errors as for :func:`load_checkpoint`."""
    decoder = Decoder(_verified_model(path))
    stored = {name: one for name, one in _stored_tensors(path).items() if not name.startswith(OF_OPTIMIZER)}
    _fill(path, stored, _weights(decoder), ALONE)
    return decoder.eval()


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first."""
    return sorted(folder.glob("step_" + 8 * "[0-9]"))


def path_of_step(folder: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` steps is."""
    return folder / f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The number of steps after which a checkpoint was saved."""
    return int(path.name.removeprefix("step_"))


def require_room(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Raise ``OSError`` when the disk has no room for one more checkpoint of this state, whole."""
    require_free_space(folder, sum(value.numel() * value.element_size() for value in state.values()), "a checkpoint")


def complete(folder: Path, step: int, settings: ModelSettings, checksums: Mapping[str, str]) -> None:
    """Write of what model a checkpoint is, and the manifest, beside its tensors."""
    write_manifest(folder, step, LAYOUT, settings.model_dump(mode="json"), checksums)


def remove_old(folder: Path, keep: int) -> None:
    """Remove all but the ``keep`` newest checkpoints."""
    for old in checkpoints(folder)[:-keep]:
        leaving = old.replace(temporary_beside(old))
        shutil.rmtree(leaving)


def write_weights(path: Path, decoder: Decoder) -> None:
    """Write a decoder's weights, with layout and settings in the metadata, as one safetensors file."""
    _save_tensors(path, decoder.state_dict(), decoder.settings)


def stored_settings(path: Path) -> ModelSettings:
    """The settings of the model whose weights a file holds; ``ValueError`` for a file that does not say."""
    text = _metadata(path).get("model")
    if text is None:
        raise ValueError(f"{path} does not say what model its weights are of; it was not written by GateLab's training")
    return ModelSettings.parse(parse_json(text))


def require_layout(path: Path) -> None:
    """Raise ``ValueError`` for a file of weights in a layout of gates other than ours."""
    _require_ours(path, _metadata(path).get("gate_layout"))


def load_weights(path: Path, decoder: Decoder) -> None:
    """Fill a decoder from a safetensors file; ``ValueError`` for one in another layout or of another model."""
    require_layout(path)
    try:
        decoder.load_state_dict(load_file(path))
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the model: {str(error).splitlines()[-1].strip()}") from None


def _weights(decoder: Decoder) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in decoder.state_dict().items()}


def _of_optimizer(kept: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What an optimizer keeps, given by parameter and key, under the names that files have for it."""
    return {f"{OF_OPTIMIZER}{name}.{key}": value for name, values in kept.items() for key, value in values.items()}


def _save_tensors(path: Path, weights: Mapping[str, Tensor], settings: ModelSettings) -> None:
    metadata = {"format": "pt", "gate_layout": LAYOUT, "model": settings.model_dump_json()}
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path, metadata)


def _require_ours(file: Path, layout: object) -> None:
    if layout != LAYOUT:
        raise ValueError(f"{file} has gate layout {layout}, this GateLab trains on with {LAYOUT}")


def _metadata(path: Path) -> dict[str, str]:
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is no readable safetensors file: {error}") from None


def _verified_model(path: Path, ranks: Ranks = ALONE) -> ModelSettings:
    """The settings of the model of a checkpoint, whose every byte is compared with what was written, by all ranks."""
    step = verify(path, ranks.number, ranks.size)
    if step != step_of(path):
        raise ValueError(
            f"{path / MANIFEST} is damaged or of another folder: it says step {step}; call the folder after its step "
            f"again, or take the checkpoint before it, as a run does once {path} is deleted"
        )
    layout, settings = read_model(path)
    _require_ours(path / MODEL, layout)
    return ModelSettings.parse(settings)


def _stored_tensors(path: Path) -> dict[str, TensorStorageMetadata]:
    """Size and dtype of every whole tensor of a checkpoint, by name."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        stored = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    except (SafetensorError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"{path} holds a file that is no part of a checkpoint: {error}") from None
    return {name: one for name, one in stored.items() if isinstance(one, TensorStorageMetadata)}


def _empty_optimizer_state(
    path: Path, stored: Mapping[str, TensorStorageMetadata], decoder: Decoder
) -> dict[str, dict[str, Tensor]]:
    """Tensors to be filled, for each parameter's name: of the parameter's shape, and spread as it is, or scalars."""
    parameters = dict(decoder.named_parameters())
    state: dict[str, dict[str, Tensor]] = {}
    for full_name, one in stored.items():
        if not full_name.startswith(OF_OPTIMIZER):
            continue
        name, _, key = full_name.removeprefix(OF_OPTIMIZER).rpartition(".")
        if name not in parameters:
            raise ValueError(f"{path} does not fit the model: it has {full_name}, the model has no such parameter")
        parameter = parameters[name]
        is_spread = one.size == parameter.shape
        dtype, device = one.properties.dtype, parameter.device
        empty = torch.zeros_like(parameter) if is_spread else torch.zeros(one.size, dtype=dtype, device=device)
        state.setdefault(name, {})[key] = empty.detach()
    return state


def _fill(path: Path, stored: Mapping[str, TensorStorageMetadata], state: dict[str, Any], ranks: Ranks) -> None:
    """Read the named tensors in place, of each what this rank has; ``ValueError`` when they are not those stored."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.api import CheckpointException

    _require_same_names(path, stored, state)
    for name, value in state.items():
        if stored[name].size != value.shape:
            shapes = f"{list(stored[name].size)} there, {list(value.shape)} here"
            raise ValueError(f"{path} does not fit the model: {name} has another shape ({shapes})")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        reader = checkpoint.HuggingFaceStorageReader(str(path))
        try:
            checkpoint.load(state, storage_reader=reader, no_dist=ranks.mesh is None)
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise ValueError(f"{path} holds a file that is no part of a checkpoint: {cause}") from None


def _require_same_names(path: Path, stored: Iterable[str], wanted: Iterable[str]) -> None:
    missing, strange = sorted(set(wanted) - set(stored)), sorted(set(stored) - set(wanted))
    if missing or strange:
        what = f"it has no {missing[0]}" if missing else f"the model has no {strange[0]}"
        raise ValueError(f"{path} does not fit the model: {what}")
