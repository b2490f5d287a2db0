"""An opened model as lm-eval's language model, its tokenizer as transformers knows tokenizers, and its digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tokenizers
import torch
from torch import nn

from gatelab.data.chat_template import ChatTemplate
from gatelab.data.tokenizer import Tokenizer
from gatelab.evaluate.models import OpenedModel
from gatelab.model.decoder import Decoder

UNIMPORTANT = ("_name_or_path", "transformers_version", "use_cache")


def hugging_face_form(tokenizer: Tokenizer, template: ChatTemplate | None = None) -> Any:
    """A GateLab tokenizer as ``PreTrainedTokenizerFast``: BOS in front of each text, as in training.

    BOS is also its EOS, because a document of packed training text ends where the BOS of the next one stands, and its
    padding, which is always masked. Text never becomes a special token. With a chat ``template`` it has that and its
    EOS; special tokens are then read in every text, because transformers gives a chat to the tokenizer as one text.
    """
    try:
        import transformers
    except ImportError:
        raise ValueError("the tokenizer's Hugging Face form needs transformers: install gatelab[hf]") from None
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_text())
    bos = tokenizer.bos_token
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=[bos, "$A"], special_tokens=[(bos, tokenizer.bos_id)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=bos if template is None else template.eos_token,
        pad_token=bos,
        split_special_tokens=template is None,
        clean_up_tokenization_spaces=False,
        chat_template=None if template is None else template.source,
    )


def open_tokenizer(opened: OpenedModel) -> Any:
    """The tokenizer of an opened model as transformers knows it."""
    source = opened.tokenizer.source
    return hugging_face_form(source) if isinstance(source, Tokenizer) else source


@contextmanager
def saved_tokenizer(tokenizer: Any) -> Iterator[str]:
    """A temporary folder that holds the tokenizer and nothing that could name code of its own.

    lm-eval's RULER tasks open a tokenizer by path and with remote code allowed.
    """
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in Path(folder).iterdir():
            if path.suffix == ".py":
                path.unlink()
        config = Path(folder) / "tokenizer_config.json"
        content = json.loads(config.read_text(encoding="utf-8"))
        content.pop("auto_map", None)
        config.write_text(json.dumps(content), encoding="utf-8")
        yield folder


def language_model(opened: OpenedModel, tokenizer: Any, batch_size: int) -> Any:
    """lm-eval's ``HFLM`` on an opened model, which runs where its parameters are."""
    from lm_eval.models.huggingface import HFLM

    model = opened.model
    if isinstance(model, Decoder):
        from gatelab.interop.huggingface import from_decoder

        tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        model = from_decoder(model, **tokens)
    options: dict[str, Any] = {"backend": "causal", "batch_size": batch_size, "max_length": opened.max_context}
    return HFLM(pretrained=model, tokenizer=tokenizer, **options)  # pyright: ignore[reportCallIssue]


def model_digest(model: nn.Module, tokenizer_rules: str) -> str:
    """SHA-256 of all that decides a model's answers: its weights, its configuration, its tokenizer."""
    digest = hashlib.sha256()
    if isinstance(model, Decoder):
        digest.update(json.dumps(model.settings.to_mapping(), sort_keys=True).encode())
    else:
        config: Any = model.config
        known = {key: value for key, value in config.to_dict().items() if key not in UNIMPORTANT}
        digest.update(json.dumps(known, sort_keys=True, default=str).encode())
    digest.update(tokenizer_rules.encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
