"""Loading a decoder from a folder of any known family, or from a checkpoint of ours."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gatelab.files import parse_json
from gatelab.interop import megatron
from gatelab.interop.families import FAMILIES, Checkpoint, read_checkpoint
from gatelab.interop.form import MODEL_TYPE, SCHEMA_VERSION
from gatelab.interop.layouts import Layout
from gatelab.interop.official import GATE_KEYS, choose_layout
from gatelab.interop.tensor_files import SINGLE, TensorFiles, open_parts, open_tensors
from gatelab.interop.tensor_names import Made, itself, our_tensors
from gatelab.manifest import MANIFEST, read_model, verify
from gatelab.model.decoder import Decoder
from gatelab.model.settings import ModelSettings

CONFIG = "config.json"
# Keys of the paper's code and of gates, which no stock class of an ungated family reads.
UNREAD_BY_TRANSFORMERS = (*GATE_KEYS, "gating", "qkv_bias")
POSSIBLE = (
    "a folder with config.json and safetensors (GateLab's own, or one of the families "
    f"{', '.join(FAMILIES)}), or a GateLab checkpoint (a folder step_00000200)"
)


def load(path: str | Path, layout: Layout | None = None) -> Decoder:
    """The decoder of a checkpoint, in eval mode and in the dtype of its files: ids (B T) to logits (B T V).

    ``layout`` names where the output gate's rows are, for files that do not say so themselves. Raises ``ValueError``
    for whatever is no checkpoint, is damaged, or would be computed wrongly, and says why.
    """
    return build_decoder(open_checkpoint(Path(path), layout))


def build_decoder(checkpoint: Checkpoint) -> Decoder:
    """Read all tensors of a checkpoint into a decoder."""
    with torch.device("meta"):
        decoder = Decoder(checkpoint.settings)
    state = {name: tensor.clone() for name, tensor in checkpoint.tensors.items()}
    decoder.load_state_dict(state, assign=True)
    return decoder.eval()


def open_checkpoint(path: Path, layout: Layout | None = None) -> Checkpoint:
    """Settings, layout and tensors of a checkpoint, none of them read yet; errors as for :func:`load`."""
    if (path / CONFIG).is_file():
        config = read_config(path)
        files = open_tensors(path)
        if config.get("model_type") in (MODEL_TYPE, megatron.MODEL_TYPE):
            return _ours(config, files, layout)
        return read_checkpoint(config, files, layout)
    if (path / MANIFEST).is_file():
        verify(path)
        layout_there, settings = read_model(path)
        files = open_tensors(path) if (path / SINGLE).is_file() else open_parts(path)
        config = {"model_type": MODEL_TYPE, "gatelab": settings, "gate_layout": layout_there}
        return _ours(config, files, layout)
    if (path / SINGLE).is_file():
        files = open_tensors(path)
        if "model" in files.metadata:
            settings = parse_json(files.metadata["model"])
            return _ours({"model_type": MODEL_TYPE, "gatelab": settings}, files, layout)
    raise ValueError(f"{path} is no checkpoint that GateLab loads: that is {POSSIBLE}")


def is_ours_to_load(path: Path) -> bool:
    """Whether a folder holds what transformers would load wrongly or not at all: a form of ours, or one of a family
    whose code there has no gate, with a key that declares one or something else that it does not read."""
    try:
        config = read_config(path)
    except (OSError, ValueError):
        return False
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return config.get("model_type") in (MODEL_TYPE, megatron.MODEL_TYPE)
    return family.gate is None and (any(map(config.get, UNREAD_BY_TRANSFORMERS)) or config.get("use_qk_norm") is False)


def read_config(path: Path) -> dict[str, Any]:
    """The config.json of a folder; ``ValueError`` when it is no JSON mapping."""
    try:
        config = parse_json((path / CONFIG).read_text(encoding="utf-8"))
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ValueError(f"{path / CONFIG} is damaged: it is no JSON mapping")
    return config


def _ours(config: Mapping[str, Any], files: TensorFiles, layout: Layout | None) -> Checkpoint:
    """A model whose settings are written out, with our names and layout L1, or with Megatron's and L4 or L5."""
    version = config.get("gatelab_schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise ValueError(f"config.json has gatelab_schema_version={version}, this GateLab reads {SCHEMA_VERSION}")
    if not isinstance(config.get("gatelab"), Mapping):
        raise ValueError("config.json has no mapping 'gatelab' with the model's settings")
    settings = ModelSettings.parse(config["gatelab"])
    is_megatron = config["model_type"] == megatron.MODEL_TYPE
    declared = {
        "the layout argument": layout,
        "config.json": config.get("gate_layout"),
        "the files": files.metadata.get("gate_layout"),
    }
    possible: Layout = megatron.layout_of(settings) if is_megatron else "L1"
    layout = choose_layout(declared, rule=None if is_megatron else "L1", possible=[possible], key=config["model_type"])
    ways = partial(megatron.ways, settings=settings) if is_megatron else _as_it_is
    return Checkpoint(settings, layout, our_tensors(files, settings, ways))


def _as_it_is(name: str) -> list[Made]:
    return [Made((name,), itself)]
