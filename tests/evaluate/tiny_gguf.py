"""A random Llama in a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tiny_models import VOCABULARY, train_backend

WIDTH, HEADS, KV_HEADS, HEAD_SIZE, FEEDFORWARD, LAYERS, CONTEXT = 24, 6, 2, 4, 36, 3, 97


def write_gguf(path: Path, architecture: str = "llama") -> Path:
    """Write the file: float32 tensors under llama.cpp's names, and a byte-level BPE that adds one BOS."""
    import gguf

    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEEDFORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_vocab_size(VOCABULARY)
    _add_tokenizer(writer)
    for name, array in tensors().items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors() -> dict[str, np.ndarray]:
    """The weights of the file."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCABULARY, WIDTH),
        "output_norm.weight": (WIDTH,),
        "output.weight": (VOCABULARY, WIDTH),
    }
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_q.weight": (HEADS * HEAD_SIZE, WIDTH),
            f"blk.{layer}.attn_k.weight": (KV_HEADS * HEAD_SIZE, WIDTH),
            f"blk.{layer}.attn_v.weight": (KV_HEADS * HEAD_SIZE, WIDTH),
            f"blk.{layer}.attn_output.weight": (WIDTH, HEADS * HEAD_SIZE),
            f"blk.{layer}.attn_norm.weight": (WIDTH,),
            f"blk.{layer}.ffn_norm.weight": (WIDTH,),
            f"blk.{layer}.ffn_gate.weight": (FEEDFORWARD, WIDTH),
            f"blk.{layer}.ffn_up.weight": (FEEDFORWARD, WIDTH),
            f"blk.{layer}.ffn_down.weight": (WIDTH, FEEDFORWARD),
        }
    random = np.random.default_rng(8)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def _add_tokenizer(writer: object) -> None:
    model = json.loads(train_backend().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")  # type: ignore[attr-defined]
    writer.add_token_list(tokens)  # type: ignore[attr-defined]
    writer.add_token_types([3] + [1] * (len(tokens) - 1))  # type: ignore[attr-defined]
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])  # type: ignore[attr-defined]
    writer.add_bos_token_id(0)  # type: ignore[attr-defined]
    writer.add_eos_token_id(0)  # type: ignore[attr-defined]
    writer.add_add_bos_token(True)  # type: ignore[attr-defined]
