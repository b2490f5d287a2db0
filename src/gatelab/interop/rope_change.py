"""Another rotation for a model of transformers that is already built.

Setting ``model.config.rope_parameters`` changes nothing: frequencies were computed when the model was built.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gatelab.interop.form import MODEL_TYPE
from gatelab.interop.rope_dialects import BASE, KIND, ORIGINAL

NEEDS_ORIGINAL = ("yarn", "llama3", "longrope")


def change_rope(model: Any, parameters: Mapping[str, Any], max_context: int) -> None:
    """Rebuild the rotary embeddings of a transformers model, in place, from other ``rope_parameters``.

    ``parameters`` are in the dialect of transformers 5, flat or by layer type, and complete: nothing is taken from the
    old ones. Either all of it takes effect, in the configuration too, or nothing. Raises ``ValueError`` for parameters
    without ``rope_theta`` or the original length, for which transformers has silent defaults, for a model whose rotary
    embedding is not known here, and where no frequency and no attention factor would change.
    """
    config = model.config.get_text_config()
    if config.model_type == MODEL_TYPE:
        raise ValueError(
            "a GateLab model computes its rotation from its settings; change its decoder with "
            "gatelab.model.decoder.with_rope and convert that"
        )
    _require_complete(parameters)
    places = _rotary_embeddings(model, config)
    changed = copy.deepcopy(config)
    changed.rope_parameters, changed.max_position_embeddings = copy.deepcopy(dict(parameters)), max_context
    changed.standardize_rope_params()
    changed.validate_rope()
    rebuilt = {name: _rebuilt(module, changed) for name, module in places.items()}
    if all(_state(rebuilt[name]) == _state(module) for name, module in places.items()):
        raise ValueError(f"rope_parameters={dict(parameters)} change no frequency of this {config.model_type} model")
    config.rope_parameters, config.max_position_embeddings = changed.rope_parameters, max_context
    for name, module in rebuilt.items():
        module.config = config
        model.set_submodule(name, module)


def _require_complete(parameters: Mapping[str, Any]) -> None:
    by_type = {kind: value for kind, value in parameters.items() if isinstance(value, Mapping)}
    for kind, values in (by_type or {"": parameters}).items():
        where = f"rope_parameters of {kind}" if kind else "rope_parameters"
        if values.get(BASE) is None:
            raise ValueError(f"{where} lack {BASE!r}, for which transformers would take a default; write the model's")
        if values.get(KIND) in NEEDS_ORIGINAL and values.get(ORIGINAL) is None:
            raise ValueError(
                f"{where} with the rope type {values[KIND]!r} lack {ORIGINAL!r}, for which transformers would take the "
                "extended length; write the length that was trained at before"
            )


def _rotary_embeddings(model: Any, config: Any) -> dict[str, nn.Module]:
    """The modules that hold frequencies, by name; each must be one that transformers builds from a configuration."""
    places = {
        name: module
        for name, module in model.named_modules()
        if any(buffer.endswith("inv_freq") for buffer, _ in module.named_buffers(recurse=False))
    }
    known = [getattr(module, "config", None) is config for module in places.values()]
    if not places or not all(known):
        raise ValueError(
            f"this {config.model_type} model has no rotary embedding that is known here; if it rotates at all, write "
            "rope_parameters into its config.json and load it again"
        )
    return places


def _rebuilt(module: nn.Module, config: Any) -> nn.Module:
    """A new rotary embedding of the same class, on the same device."""
    device = next(module.buffers()).device
    with torch.device(device):
        return type(module)(config).to(device)


def _state(module: nn.Module) -> dict[str, Any]:
    """All that decides a rotation: frequencies, attention factors, rope types."""
    state: dict[str, Any] = {name: _plain(tensor) for name, tensor in module.named_buffers()}
    return state | {name: value for name, value in vars(module).items() if name.endswith(("scaling", "rope_type"))}


def _plain(tensor: Tensor) -> list[float]:
    return tensor.double().tolist()
