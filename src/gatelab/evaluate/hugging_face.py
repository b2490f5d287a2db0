"""Loading decoders through transformers, without ever running code that comes with a model."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from gatelab.evaluate.gguf_header import require_sound_gguf
from gatelab.evaluate.memory import require_memory
from gatelab.evaluate.model_tokenizer import ModelTokenizer, from_hugging_face
from gatelab.interop.tensor_files import INDEX, indexed_files

WITHOUT_ATTENTION = {"linear_attention", "conv", "mamba", "mamba2", "recurrent", "mlp", "moe"}
# Inside the attention of a text decoder's layer; parts that see images or predict further tokens may be left out.
IN_ATTENTION = re.compile(r"^(?!.*(visual|vision|mtp|rotary)).*layers\.\d+\.(self_attn|attention|attn)\.")
IMPLEMENTATION = ("attn_implementation", "experts_implementation")


class Loaded(NamedTuple):
    """A model in eval mode with its tokenizer and its (text) configuration."""

    model: nn.Module
    tokenizer: ModelTokenizer
    config: Any


def load(
    place: str,
    dtype: torch.dtype,
    gguf_file: str | None = None,
    unreadable: str = "its configuration can't be read",
) -> Loaded:
    """Load from a folder or a hub name; with ``gguf_file`` from that file in the folder. ``unreadable`` explains why
    nothing could be read at all.

    Raises ``ValueError`` before any weight is read when the model needs remote code, has no softmax attention or does
    not fit into memory; and when weights or the tokenizer are missing.
    """
    transformers = _require_transformers(place)
    name = place if gguf_file is None else str(Path(place) / gguf_file)
    source: dict[str, Any] = {}
    if gguf_file is None:
        _require_plain_folder(Path(place))
        with _explained(name, unreadable):
            settings = dict(transformers.PreTrainedConfig.get_config_dict(place)[0])
        _require_no_foreign_code(name, settings, transformers)
    else:
        _require_gguf_packages(name)
        require_sound_gguf(Path(name))
        source["gguf_file"] = gguf_file
    with _explained(name, unreadable):
        config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False, **source)
    for key in IMPLEMENTATION:
        setattr(config, f"_{key}", None)
    _require_softmax_attention(name, config.get_text_config())
    tokenizer = load_tokenizer(place, **source)
    _require_memory_for(name, config, dtype, transformers)
    with _explained(name, "its weights can't be loaded"):
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            place,
            config=config,
            dtype=dtype,
            weights_only=True,
            use_safetensors=gguf_file is None,
            output_loading_info=True,
            trust_remote_code=False,
            **source,
        )
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"{name} lacks {len(missing)} of the model's weights, {missing[0]} first; it is incomplete")
    if ignored := sorted(filter(IN_ATTENTION.search, report["unexpected_keys"])):
        raise ValueError(
            f"{name} has {len(ignored)} weights of attention that transformers' {type(model).__name__} leaves out, "
            f"{ignored[0]} first, so another model would be measured; declare its gate in config.json"
        )
    model.config.use_cache = False
    return Loaded(model.eval(), tokenizer, config.get_text_config())


def load_tokenizer(place: str, **source: Any) -> ModelTokenizer:
    """The tokenizer of a folder or a hub name; ``ValueError`` when it can't be read."""
    transformers = _require_transformers(place)
    with _explained(
        place, "its tokenizer can't be read, without which no text can be measured; add its tokenizer.json"
    ):
        return from_hugging_face(transformers.AutoTokenizer.from_pretrained(place, trust_remote_code=False, **source))


def _require_transformers(name: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise ValueError(f"{name} needs the package transformers: install gatelab[hf]") from None
    return transformers


def _require_gguf_packages(name: str) -> None:
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise ValueError(f"{name} needs the package {' and '.join(missing)}: install gatelab[hf]")


def _require_plain_folder(folder: Path) -> None:
    """Refuse a folder whose files would have transformers read other ones, elsewhere; a hub name is no folder."""
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{folder} has an adapter_config.json, which names another model to load in its place; merge the adapter "
            "into its model and save that, or open the model without it"
        )
    if (folder / INDEX).is_file():
        indexed_files(folder)


def _require_no_foreign_code(name: str, settings: Mapping[str, Any], transformers: Any) -> None:
    """Refuse a configuration whose model transformers does not know itself, or that names kernels of a repository."""
    auto_map = settings.get("auto_map")
    if auto_map and settings.get("model_type") not in transformers.CONFIG_MAPPING:
        code = auto_map.get("AutoModelForCausalLM", auto_map) if isinstance(auto_map, dict) else auto_map
        raise ValueError(
            f"{name} needs code of its own ({code}), because transformers {transformers.__version__} does not know the "
            f"family {settings.get('model_type')!r}; GateLab never runs code that comes with a model"
        )
    for key, repository in _kernel_repositories(settings):
        raise ValueError(
            f"the config.json of {name} asks with {key} for code from the repository {repository!r}; GateLab never "
            "runs code that comes with a model: delete the key"
        )


def _kernel_repositories(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every implementation, at any depth, that is no name but a repository (``owner/kernel``)."""
    for key, value in settings.items():
        implementations = value.values() if isinstance(value, dict) else [value]
        if any(word in key for word in IMPLEMENTATION):
            yield from ((key, word) for word in implementations if isinstance(word, str) and "/" in word)
        elif isinstance(value, dict):
            yield from _kernel_repositories(value)


def _require_softmax_attention(name: str, config: Any) -> None:
    layers = getattr(config, "layer_types", None)
    if layers:
        has_attention = not WITHOUT_ATTENTION.issuperset(layers)
    else:
        has_attention = bool(getattr(config, "num_attention_heads", None))
    if not has_attention:
        raise ValueError(
            f"{name} has no softmax attention (family {config.model_type!r}), so there is no attention sink to "
            "measure; open a model with at least one layer of softmax attention"
        )


def _require_memory_for(name: str, config: Any, dtype: torch.dtype, transformers: Any) -> None:
    """Count the weights on the meta device, where they take no memory."""
    with _explained(name, "its configuration does not describe a decoder"), torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in empty.state_dict().values())
    require_memory(num_bytes, f"loading {name}", "take a smaller model, or dtype bfloat16 instead of a wider one")


@contextmanager
def _explained(name: str, what: str) -> Iterator[None]:
    """Turn whatever the library raises over a damaged or foreign file into one sentence."""
    try:
        yield
    except Exception as error:  # the kinds are those of every parser below it
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise ValueError(f"{name} can't be opened: {what} ({lines[0]})") from None
