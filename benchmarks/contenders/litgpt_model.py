"""litgpt's GPT with the sizes of a Qwen3; it has no attention gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from litgpt import GPT, Config

from contenders.training import cross_entropy, training_step


def prepare(settings: Mapping[str, Any]) -> Callable[[], dict[str, float]]:
    """A training step of this model; litgpt does not tie its head, which costs no further operation."""
    shape = settings["shape"]
    model = GPT(
        Config(
            block_size=shape["context"],
            n_layer=shape["num_layers"],
            n_embd=shape["width"],
            vocab_size=shape["vocab_size"],
            padded_vocab_size=shape["vocab_size"],
            n_head=shape["num_heads"],
            n_query_groups=shape["num_kv_heads"],
            head_size=shape["head_size"],
            intermediate_size=shape["feedforward_width"],
            norm_class_name="RMSNorm",
            norm_qk=True,
            mlp_class_name="LLaMAMLP",
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
        )
    )
    return training_step(model, cross_entropy(model), settings)
