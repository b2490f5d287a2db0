"""One way to open a decoder, wherever it comes from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gatelab
from gatelab.data.tokenizer import Tokenizer
from gatelab.diagnose.measure import Attach
from gatelab.evaluate import hugging_face
from gatelab.evaluate.memory import require_memory
from gatelab.evaluate.model_tokenizer import ModelTokenizer, from_gatelab
from gatelab.interop import register
from gatelab.interop.loading import build_decoder, is_ours_to_load, open_checkpoint
from gatelab.interop.probe import attach_hugging_face
from gatelab.model.accounting import count_parameters
from gatelab.model.decoder import Decoder
from gatelab.train.checkpoint import checkpoints, load_decoder, step_of
from gatelab.train.run_folder import RunFolder

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
FOUR_POSSIBILITIES = (
    "a GateLab run folder (settings.yaml and checkpoints), a Hugging Face folder (config.json), a GGUF file, or a "
    "model on the Hugging Face hub (owner/name)"
)


@dataclass(frozen=True)
class OpenedModel:
    """A decoder in eval mode, ready to be measured: ``measure(opened.model, tokens, attach=opened.attach)``.

    ``attach`` is ``None`` for GateLab decoders. ``family`` is transformers' model type, or ``gatelab``. ``max_context``
    is the longest sequence that it was made for, ``None`` if unknown; ``step`` is that of a run's checkpoint.
    ``description`` is context for reports: plain values for JSON.
    """

    name: str
    family: str
    model: nn.Module
    tokenizer: ModelTokenizer
    max_context: int | None
    attach: Attach | None = None
    step: int | None = None
    description: dict[str, Any] = field(default_factory=dict)

    def require_causal(self, purpose: str) -> None:
        """Raise ``ValueError`` for a decoder whose tokens see later ones; ``purpose`` is what that rules out."""
        if isinstance(self.model, Decoder) and not self.model.settings.causal:
            raise ValueError(
                f"{self.name} sees later tokens (causal=False), so it can't {purpose}; open a causal model"
            )


def open_model(name: str, dtype: torch.dtype = torch.float32) -> OpenedModel:
    """Open what ``name`` is; the first that fits of: a folder with ``settings.yaml`` is a GateLab run (its newest
    checkpoint), one with ``config.json`` a GateLab model in Hugging Face form, one with the paper's gate keys, or any
    other Hugging Face model, a ``.gguf`` file or a folder with one of them a GGUF
    model; a name that is no path is looked up on the Hugging Face hub.

    Weights and activations have ``dtype``. No code that comes with a model is ever run. Raises ``ValueError`` with one
    sentence for a name that is none of these, and for a model that needs remote code, has no softmax attention, lacks
    its tokenizer or weights, or does not fit into memory.
    """
    path = Path(name)
    if (path / "settings.yaml").is_file():
        return _open_run(path, name, dtype)
    if is_ours_to_load(path):
        return _open_decoder(path, name, dtype)
    if (path / "config.json").is_file():
        return _from_transformers(name, "Hugging Face folder", hugging_face.load(name, dtype), dtype)
    files = [path] if path.is_file() and path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise ValueError(f"{name} holds {len(files)} GGUF files; name one of them, such as {files[0]}")
    if files:
        loaded = hugging_face.load(str(files[0].parent), dtype, gguf_file=files[0].name)
        return _from_transformers(name, "GGUF file", loaded, dtype)
    if path.exists() or not HUB_NAME.fullmatch(name):
        raise ValueError(f"{name} is not {FOUR_POSSIBILITIES}")
    unreadable = f"it is no file or folder here, and the hub gave nothing readable; a model is {FOUR_POSSIBILITIES}"
    loaded = hugging_face.load(name, dtype, unreadable=unreadable)
    return _from_transformers(name, "Hugging Face hub", loaded, dtype)


def _open_run(folder: Path, name: str, dtype: torch.dtype) -> OpenedModel:
    run = RunFolder(folder)
    settings, saved = run.settings, checkpoints(run.checkpoints)
    if not saved:
        raise ValueError(f"the run in {name} has no checkpoint yet; train it until it has saved one")
    num_bytes = count_parameters(settings.model).total * max(dtype.itemsize, 4)
    require_memory(num_bytes, f"loading the run in {name}", "free some memory, or open a smaller model")
    tokenizer = _run_tokenizer(run, name)
    decoder = load_decoder(saved[-1]).to(dtype)
    return OpenedModel(
        name=name,
        family="gatelab",
        model=decoder,
        tokenizer=from_gatelab(tokenizer),
        max_context=settings.model.max_context,
        step=step_of(saved[-1]),
        description=_describe("GateLab run folder", decoder, dtype),
    )


def _open_decoder(folder: Path, name: str, dtype: torch.dtype) -> OpenedModel:
    """A folder in the Hugging Face form of a GateLab model, or with a gate that the paper's keys declare."""
    register()
    tokenizer = hugging_face.load_tokenizer(name)
    checkpoint = open_checkpoint(folder)
    num_bytes = count_parameters(checkpoint.settings).total * max(dtype.itemsize, 4)
    require_memory(num_bytes, f"loading {name}", "free some memory, or open a smaller model")
    decoder = build_decoder(checkpoint).to(dtype)
    layout = {"gate_layout": checkpoint.layout} if checkpoint.settings.gates else {}
    return OpenedModel(
        name=name,
        family="gatelab",
        model=decoder,
        tokenizer=tokenizer,
        max_context=checkpoint.settings.max_context,
        description=_describe("checkpoint folder", decoder, dtype) | layout,
    )


def _run_tokenizer(run: RunFolder, name: str) -> Tokenizer:
    settings = run.settings.data
    if settings.synthetic is not None or settings.images is not None:
        kind = "a synthetic task" if settings.images is None else "images"
        raise ValueError(f"the run in {name} was trained on {kind} and has no tokenizer for a text")
    if not run.tokenizer.exists():
        raise ValueError(
            f"the run in {name} has no {run.tokenizer.name}; copy it there from the folder of its prepared data"
        )
    return Tokenizer.load(run.tokenizer, settings.tokenizer.bos_token)


def _from_transformers(name: str, origin: str, loaded: hugging_face.Loaded, dtype: torch.dtype) -> OpenedModel:
    import transformers

    return OpenedModel(
        name=name,
        family=loaded.config.model_type,
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        max_context=getattr(loaded.config, "max_position_embeddings", None),
        attach=attach_hugging_face,
        description=_describe(origin, loaded.model, dtype) | {"transformers": transformers.__version__},
    )


def _describe(origin: str, model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "origin": origin,
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "gatelab": gatelab.__version__,
    }


def short_names(names: Sequence[str]) -> list[str]:
    """The last part of each path, if that tells them apart; a hub name is whole."""
    short = [Path(name).resolve().name if Path(name).exists() else name for name in names]
    return short if len(set(short)) == len(short) else list(names)
