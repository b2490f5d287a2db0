"""Models of a second or less: a run, Hugging Face folders, a GGUF file, and the text that they read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from gatelab.data.settings import DataSettings
from gatelab.gates.variants import find_variant
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.settings import ModelSettings
from gatelab.train.settings import RunSettings, TrainSettings

VOCABULARY = 320
SENTENCES = [f"The gate number {number} opens {number % 7} times and the sink stays dry. " for number in range(40)]


def write_text(path: Path, num_sentences: int = 400) -> Path:
    """A plain text, 25 tokens or so for each sentence."""
    path.write_text("".join(SENTENCES[number % 40] for number in range(num_sentences)), encoding="utf-8")
    return path


def tiny_settings(gate: str = "sdpa_elementwise", **changes: Any) -> ModelSettings:
    """A decoder of distinct sizes with the named gate."""
    sizes = {
        "vocab_size": VOCABULARY,
        "width": 24,
        "num_layers": 3,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_size": 10,
        "feedforward_width": 36,
        "max_context": 131,
        "gates": find_variant(gate).gates,
    }
    return ModelSettings(**{**sizes, **changes})


def tiny_decoder(gate: str = "sdpa_elementwise", dtype: torch.dtype = torch.float32, **changes: Any) -> Decoder:
    """An initialised decoder whose scores vary from token to token."""
    decoder = Decoder(tiny_settings(gate, **changes))
    initialize(decoder, seed=5)
    torch.manual_seed(3)
    for name, parameter in decoder.named_parameters():
        if "gates" in name or "embed" in name:
            parameter.data.normal_(std=0.7)
    return decoder.to(dtype).eval()


def tiny_run(corpus: Path, **train: Any) -> RunSettings:
    """Two steps on a local text."""
    data = {
        "train": {"name": "files", "path": str(corpus), "title_field": "title", "heldout_fraction": 0.3},
        "tokenizer": {"vocab_size": VOCABULARY},
        "context": 19,
    }
    options = {"steps": 2, "sequences_per_step": 3, "precision": "float32", "threads": 1, **train}
    options["schedule"] = {"warmup_steps": 1}
    return RunSettings(model=tiny_settings(), data=DataSettings.parse(data), train=TrainSettings.parse(options))


def write_corpus(path: Path) -> Path:
    """Titled documents as JSON Lines."""
    rows = [{"title": str(number), "text": sentence} for number, sentence in enumerate(SENTENCES * 3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def train_backend(bos: str | None = "<s>", times_added: int = 0) -> Tokenizer:
    """A byte-level BPE of ``VOCABULARY`` entries that puts BOS in front so many times."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[bos or "<pad>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    if bos and times_added:
        single = " ".join([bos] * times_added + ["$A"])
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=[(bos, 0)])
    return backend


def save_tokenizer(folder: Path, bos: str | None = "<s>", times_added: int = 0) -> None:
    """A ``tokenizer.json`` and its configuration, as transformers reads them."""
    train_backend(bos, times_added).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"bos_token": bos} if bos else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def save_llama(folder: Path, **changes: Any) -> Path:
    """A random Llama in a folder, without a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "max_position_embeddings": 97,
        "bos_token_id": 0,
        "eos_token_id": None,
    }
    torch.manual_seed(11)
    LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).save_pretrained(folder)
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    """Change some keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes), encoding="utf-8")
