"""Weights in safetensors files: one, many with an index, or parts that ranks wrote; read and written by tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gatelab.files import parse_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
COMPILED = "_orig_mod."
OF_OPTIMIZER, SHARDING_KEY = "optimizer.", "DCP_SHARDING_INFO"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class _Part(NamedTuple):
    """One block of a tensor, and where in the whole it begins."""

    file: Path
    stored_name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def place(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + length) for start, length in zip(self.offset, self.shape, strict=True))


class _Entry(NamedTuple):
    parts: tuple[_Part, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def file(self) -> Path:
        return self.parts[0].file


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of a folder by name; each is read from disk when it is asked for, and kept by nobody here.

    Names lack the ``_orig_mod.`` that a compiled model writes. ``metadata`` is that of all files together.
    """

    def __init__(self, entries: Mapping[str, _Entry], metadata: Mapping[str, str]):
        self._entries = dict(entries)
        self.metadata = dict(metadata)

    def __getitem__(self, name: str) -> Tensor:
        entry, dtype = self._entries[name], self.dtype(name)
        read = {part: _read(part) for part in entry.parts}
        if len(read) == 1:
            return next(iter(read.values()))
        whole = torch.empty(entry.shape, dtype=dtype)
        for part, values in read.items():
            whole[part.place] = values
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, without reading it."""
        return self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """The tensor's dtype, without reading it; a quantised one is a ``ValueError``."""
        entry = self._entries[name]
        if entry.dtype not in DTYPES:
            raise ValueError(
                f"{entry.file} holds {name} as {entry.dtype}; GateLab reads {', '.join(DTYPES)}: "
                "take an unquantised checkpoint"
            )
        return DTYPES[entry.dtype]


def open_tensors(folder: Path) -> TensorFiles:
    """The weights of a folder: ``model.safetensors``, or the shards of ``model.safetensors.index.json``.

    Raises ``ValueError`` when there are none, when a shard or one of its tensors is missing, when a file is damaged,
    and when two files say different things in their metadata.
    """
    if (folder / INDEX).is_file() and (folder / SINGLE).is_file():
        raise ValueError(
            f"{folder} has both {SINGLE} and {INDEX}, which may hold different weights; remove the stale one"
        )
    if (folder / INDEX).is_file():
        files, expected = indexed_files(folder)
    elif (folder / SINGLE).is_file():
        files, expected = [folder / SINGLE], None
    else:
        raise ValueError(
            f"{folder} has neither {SINGLE} nor {INDEX}; GateLab reads safetensors alone, no pickled weights"
        )
    entries: dict[str, _Entry] = {}
    metadata: dict[str, str] = {}
    for file in files:
        _add_file(file, entries, metadata)
    for name, file in (expected or {}).items():
        name = name.replace(COMPILED, "")
        if name not in entries or entries[name].file != file:
            raise ValueError(f"{folder / INDEX} says that {name} is in {file.name}, but it is not")
    return TensorFiles(entries, metadata)


def open_parts(folder: Path) -> TensorFiles:
    """The weights of a training checkpoint that ranks wrote together, without what the optimizer keeps.

    Each file holds the parts of one rank, and says in its header where they lie (PyTorch's distributed checkpoint).
    Raises ``ValueError`` when a file is damaged or parts do not make a whole.
    """
    parts: dict[str, list[_Part]] = {}
    dtypes: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                where = parse_json((opened.metadata() or {})[SHARDING_KEY])
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    if not name.startswith(OF_OPTIMIZER):
                        tensor, offset = opened.get_slice(name), tuple(map(int, where[name]["saved_offsets"]))
                        part = _Part(file, name, offset, tuple(tensor.get_shape()))
                        parts.setdefault(name, []).append(part)
                        dtypes[name] = tensor.get_dtype()
        except (SafetensorError, LookupError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{file} is no part of a checkpoint that ranks wrote: {error}") from None
    return TensorFiles({name: _whole(tuple(found), dtypes[name]) for name, found in parts.items()}, {})


def write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], max_shard_bytes: int
) -> int:
    """Write a mapping in its order and return the bytes of its tensors, holding one shard in memory at a time.

    One file, or shards with an index when there is more than ``max_shard_bytes``; a tensor above that has a shard of
    its own. The folder must exist; wrap it in :func:`gatelab.files.atomic_path`. Raises ``OSError`` when a file can't
    be written.
    """
    if max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} is not a size; give a positive number of bytes")
    shard: dict[str, Tensor] = {}
    shards: list[list[str]] = []
    total = held = 0
    for name in tensors:
        tensor = tensors[name].contiguous()
        if shard and held + tensor.nbytes > max_shard_bytes:
            shards.append(_write_shard(folder / _unfinished(len(shards)), shard, metadata))
            shard, held = {}, 0
        shard[name] = tensor
        held += tensor.nbytes
        total += tensor.nbytes
        del tensor
    shards.append(_write_shard(folder / _unfinished(len(shards)), shard, metadata))
    _name_shards(folder, shards, total)
    return total


def indexed_files(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """The files of an index, and which tensor it says is in which; ``ValueError`` for one outside of the folder."""
    try:
        weight_map = dict(parse_json((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{folder / INDEX} is damaged: it has no weight_map") from None
    expected = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{folder / INDEX} names the file {file!r}, which is not one of its folder")
        expected[name] = folder / file
    return sorted(set(expected.values())), expected


def _read(part: _Part) -> Tensor:
    with safe_open(part.file, framework="pt") as file:
        return file.get_tensor(part.stored_name)


def _whole(parts: tuple[_Part, ...], dtype: str) -> _Entry:
    """What parts make together; ``ValueError`` when they overlap or leave a hole."""
    dims = {len(part.offset) for part in parts} | {len(part.shape) for part in parts}
    if len(dims) == 1 and min(min(part.offset, default=0) for part in parts) == 0:
        stops = [[place.stop for place in part.place] for part in parts]
        shape = tuple(max(ends) for ends in zip(*stops, strict=True))
        if sum(math.prod(part.shape) for part in parts) == math.prod(shape):
            return _Entry(parts, shape, dtype)
    raise ValueError(f"the parts of {parts[0].stored_name} in {parts[0].file.parent} do not make a whole tensor")


def _add_file(path: Path, entries: dict[str, _Entry], metadata: dict[str, str]) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is missing, though {INDEX} names it; the checkpoint is incomplete")
    try:
        with safe_open(path, framework="pt") as file:
            found = dict(file.metadata() or {})
            for stored_name in file.keys():  # noqa: SIM118 - it is no mapping
                tensor = file.get_slice(stored_name)
                name = stored_name.replace(COMPILED, "")
                if name in entries:
                    raise ValueError(f"{path} holds {name} a second time; it was in {entries[name].file} already")
                shape = tuple(tensor.get_shape())
                entries[name] = _Entry((_Part(path, stored_name, (0,) * len(shape), shape),), shape, tensor.get_dtype())
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from None
    for key, value in found.items():
        if metadata.setdefault(key, value) != value:
            raise ValueError(f"{path} says {key}={value!r} in its metadata, another shard {metadata[key]!r}")


def _write_shard(path: Path, shard: dict[str, Tensor], metadata: Mapping[str, str]) -> list[str]:
    try:
        save_file(shard, path, dict(metadata))
    except SafetensorError as error:
        raise OSError(f"{path} could not be written; is the disk full? {error}") from error
    return list(shard)


def _unfinished(number: int) -> str:
    return f"shard-{number}.safetensors"


def _name_shards(folder: Path, shards: list[list[str]], total: int) -> None:
    """Give shards their final names, which say how many there are, and write the index of more than one."""
    if len(shards) == 1:
        (folder / _unfinished(0)).rename(folder / SINGLE)
        return
    weight_map = {}
    for number, names in enumerate(shards):
        final = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / _unfinished(number)).rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
