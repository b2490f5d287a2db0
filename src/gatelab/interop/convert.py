"""Checkpoints from one form to another, tensor by tensor, and compared with the source when they are written."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gatelab.files import atomic_path, require_folder, require_free_space
from gatelab.interop.families import Checkpoint
from gatelab.interop.layouts import Layout, expand_headwise
from gatelab.interop.loading import CONFIG, open_checkpoint, read_config
from gatelab.interop.streaming import streamed_logits
from gatelab.interop.targets import TOKEN_IDS, To, plan
from gatelab.interop.tensor_files import write_tensors
from gatelab.interop.tensor_names import EMBEDDING, GATE, LazyTensors, Made, itself, layer_of, output_gate
from gatelab.model.settings import ModelSettings

MAX_SHARD_BYTES = 5_000_000_000
# Largest difference of logits, as a share of the largest logit, that is no more than rounding of stored weights.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
BESIDE_WEIGHTS = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


class Conversion(NamedTuple):
    """What a conversion did.

    ``num_bytes`` are those of the written tensors. ``error`` is the largest difference between a logit of the source
    and one of the result, both computed in float32 from the stored weights on random tokens; ``largest_logit`` is
    what to compare it with.
    """

    settings: ModelSettings
    source_layout: Layout
    target_layout: Layout
    num_bytes: int
    error: float
    largest_logit: float


def convert(
    source: str | Path,
    destination: str | Path,
    to: To,
    layout: Layout | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    expand: bool = False,
    beside: Path | None = None,
) -> Conversion:
    """Write the checkpoint ``source`` as the new folder ``destination`` in another form, its dtypes kept.

    About one shard is in memory at a time, and one layer while source and result are compared. ``layout`` is that of
    the source, where it does not say; ``expand`` first makes headwise gates elementwise, which has no way back. The
    tokenizer's files come along from the folder ``beside``, the source itself when left out. Raises ``ValueError``,
    with nothing written, for a source that does not load, a model that the target can't express, a destination that
    exists, and a result that computes something else.
    """
    source, destination = Path(source), Path(destination)
    if destination.exists():
        raise ValueError(f"{destination} exists already; choose a new folder")
    require_folder(destination.parent)
    if max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} is not a size; give a positive number of bytes")
    checkpoint = open_checkpoint(source, layout)
    if expand:
        checkpoint = expanded(checkpoint)
    dtype = checkpoint.tensors[EMBEDDING].dtype
    target = plan(checkpoint.settings, to, str(dtype).removeprefix("torch."), _token_ids(source))
    num_bytes = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    require_free_space(destination, num_bytes, "the converted checkpoint")
    with atomic_path(destination) as folder:
        folder.mkdir()
        (folder / CONFIG).write_text(json.dumps(target.config, indent=2) + "\n", encoding="utf-8")
        metadata = {"format": "pt", "gate_layout": target.layout}
        written = LazyTensors(_LastKept(checkpoint.tensors), target.tensors)
        num_bytes = write_tensors(folder, written, metadata, max_shard_bytes)
        for name in BESIDE_WEIGHTS:
            if ((beside or source) / name).is_file():
                shutil.copyfile((beside or source) / name, folder / name)
        error, largest = _difference(checkpoint, open_checkpoint(folder))
        if not math.isfinite(largest):
            raise ValueError(
                f"{source} computes logits that are not finite; its weights hold NaN, inf or too large numbers"
            )
        if not error <= TOLERANCES[dtype] * largest:
            raise ValueError(
                f"{source} converted to {to} computes something else: logits up to {largest:.3g} differ by "
                f"{error:.3g}; nothing was written"
            )
    return Conversion(checkpoint.settings, checkpoint.layout, target.layout, num_bytes, error, largest)


def expanded(checkpoint: Checkpoint) -> Checkpoint:
    """The same model with each headwise gate on the attention output made elementwise, row by row repeated."""
    settings = checkpoint.settings
    if not any(gate.position == "sdpa_output" and gate.granularity == "headwise" for gate in settings.gates):
        raise ValueError("the model has no headwise gate on the attention output to expand")
    if any(gate.position == "sdpa_output" and (gate.rank or gate.source == "parameter") for gate in settings.gates):
        raise ValueError("only a headwise gate with a single projection can be expanded; convert without --expand")
    gates = [
        {**gate.to_mapping(), "granularity": "elementwise"} if gate.position == "sdpa_output" else gate.to_mapping()
        for gate in settings.gates
    ]
    made = {
        name: Made((name,), _Expansion(settings.value_size) if _is_headwise_gate(name, settings) else itself)
        for name in checkpoint.tensors
    }
    settings = ModelSettings.parse({**settings.to_mapping(), "gates": gates})
    return Checkpoint(settings, checkpoint.layout, LazyTensors(checkpoint.tensors, made))


def _is_headwise_gate(name: str, settings: ModelSettings) -> bool:
    gate = output_gate(settings, layer_of(name)) if f".{GATE}." in name else None
    return gate is not None and gate.granularity == "headwise"


class _Expansion(NamedTuple):
    head_size: int

    def __call__(self, gate: Tensor) -> Tensor:
        return expand_headwise(gate, self.head_size)


class _LastKept(Mapping[str, Tensor]):
    """Keeps the tensor that was read last, so that the experts of one layer are stacked once."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors = tensors
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = (name, self._tensors[name])
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _token_ids(source: Path) -> dict[str, object]:
    config = read_config(source) if (source / CONFIG).is_file() else {}
    config = {**(config.get("text_config") or {}), **config}
    return {key: config[key] for key in TOKEN_IDS if config.get(key) is not None}


def _difference(source: Checkpoint, result: Checkpoint) -> tuple[float, float]:
    """The largest difference of logits on random tokens, and the largest logit."""
    settings = source.settings
    shape = (2, min(32, settings.max_context))
    ids = torch.randint(settings.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    expected = streamed_logits(settings, source.tensors, ids)
    found = streamed_logits(result.settings, result.tensors, ids)
    return (found - expected).abs().max().item(), expected.abs().max().item()
