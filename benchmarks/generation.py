"""Greedy generation beside transformers': the same weights, prompts and tokens, in turns in one process.

    python benchmarks/generation.py [--rounds 3] [--out benchmarks/results/generation]

A random Qwen3 of 16 million parameters (6 layers of 6 query and 2 key heads) and GateLab's decoder with its weights,
float32. Both read the same prompts, one of 256 tokens or 16 of 128 to 256, and generate 64 tokens for each; the first
round warms up and is left out. ``first_token`` is the time until the first one is there, which is mostly reading;
``per_token`` that of each following step of the whole batch. Medians over rounds; the ratio is transformers' time over
ours. It fails if the two generate other tokens. Writes ``generation.json``.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from gatelab.evaluate.generation import generate
from gatelab.evaluate.model_tokenizer import ModelTokenizer
from gatelab.evaluate.models import OpenedModel
from gatelab.files import write_atomically
from gatelab.model.decoder import Decoder
from gatelab.model.settings import ModelSettings

NEW, LONGEST, CONTEXT, VOCABULARY = 64, 256, 512, 8192
BATCHES = (1, 16)
SIZES = {"width": 384, "num_layers": 6, "num_heads": 6, "num_kv_heads": 2, "head_size": 64, "feedforward_width": 1024}
THEIR_NAMES = {
    "width": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "feedforward_width": "intermediate_size",
}


def build_pair() -> dict[str, OpenedModel]:
    """Both models on equal weights; the head is not tied, so that they say more than their last token again."""
    torch.manual_seed(0)
    sizes = {THEIR_NAMES[name]: size for name, size in SIZES.items()}
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, tie_word_embeddings=False, rope_parameters=rope, **sizes
    )
    theirs = transformers.Qwen3ForCausalLM(config).eval()
    ours = Decoder(ModelSettings.parse({"vocab_size": VOCABULARY, "max_context": CONTEXT, "tied_head": False, **SIZES}))
    ours.load_state_dict(theirs.state_dict())
    tokenizer = ModelTokenizer(lambda text: [], lambda ids: "", bos_id=0, num_bos_added=0, vocab_size=VOCABULARY)
    return {
        name: OpenedModel(name, name, model, tokenizer, CONTEXT)
        for name, model in (("gatelab", ours.eval()), ("transformers", theirs))
    }


def random_prompts(num_rows: int) -> list[list[int]]:
    """Prompts of 128 to 256 tokens, the first of them the longest."""
    generator = torch.Generator().manual_seed(num_rows)
    lengths = [LONGEST, *torch.randint(LONGEST // 2, LONGEST, (num_rows - 1,), generator=generator).tolist()]
    return [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def compare(pair: dict[str, OpenedModel], num_rows: int, rounds: int) -> dict[str, Any]:
    """Medians of both at one batch size, and the ratios."""
    prompts = random_prompts(num_rows)
    first: dict[str, list[float]] = {name: [] for name in pair}
    whole: dict[str, list[float]] = {name: [] for name in pair}
    for _ in range(rounds + 1):
        tokens = []
        for name, opened in pair.items():
            times = []
            for count in (1, NEW):
                began = time.perf_counter()
                found = generate(opened, prompts, count)
                times.append(time.perf_counter() - began)
            first[name].append(times[0])
            whole[name].append(times[1])
            tokens.append(found)
        if tokens[0] != tokens[1]:
            raise SystemExit(f"batch {num_rows}: the two generate other tokens, so their times compare nothing")
    seconds = {
        name: {
            "first_token": statistics.median(first[name][1:]),
            "per_token": statistics.median(
                (total - one) / (NEW - 1) for one, total in zip(first[name][1:], whole[name][1:], strict=True)
            ),
            "all": statistics.median(whole[name][1:]),
        }
        for name in pair
    }
    ratios = {part: seconds["transformers"][part] / seconds["gatelab"][part] for part in seconds["gatelab"]}
    rates = {name: num_rows * NEW / seconds[name]["all"] for name in pair}
    return {
        "batch": num_rows,
        "prompt_tokens": sum(map(len, prompts)),
        "new_tokens": num_rows * NEW,
        "seconds": seconds,
        "new_tokens_per_second": rates,
        "ratio": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "generation")
    options = parser.parse_args()
    pair = build_pair()
    found = {
        "machine": {
            "processor": platform.processor(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "parameters": sum(parameter.numel() for parameter in pair["gatelab"].model.parameters()),
        "rounds": options.rounds,
        "batches": [compare(pair, num_rows, options.rounds) for num_rows in BATCHES],
    }
    write_atomically(options.out / "generation.json", json.dumps(found, indent=1) + "\n")
    for batch in found["batches"]:
        ratios = ", ".join(f"{part} {ratio:.2f}x" for part, ratio in batch["ratio"].items())
        print(f"batch {batch['batch']}: transformers' time over ours: {ratios}")


if __name__ == "__main__":
    main()
