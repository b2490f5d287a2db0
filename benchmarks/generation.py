"""Greedy generation beside transformers': the same weights, prompts and tokens, in turns in one process.

    python benchmarks/generation.py [--shapes 15M 135M] [--dtypes float32 bfloat16] [--rounds 7] [--threads 2]
        [--out benchmarks/results/generation]

A random Qwen3 of two shapes (135M: that of SmolLM2-135M) and GateLab's decoder with its weights. Both read the same
prompts, one of 256 tokens or 16 of 128 to 256, and generate 64 tokens for each, in an order drawn anew in each round;
a first round warms up. ``first_token`` is the time until the first one is there, which is mostly reading; ``per_token``
that of each following step of the whole batch. Medians over rounds; the ratio is transformers' time over ours in the
same round, with a 95 % interval. ``roofline`` is the share of its step that a batch would take if all that it must read
(each weight once, keys and values of every token so far) came at the bandwidth of a 256 MiB matrix-vector product.

Where the two generate different tokens, the gap between the two highest logits at the first of them is noted, from a
float64 pass over the same prefix; the run fails if a float32 gap is above 1e-3. Writes ``generation.json``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from side_by_side import machine

from gatelab.evaluate.generation import generate
from gatelab.evaluate.model_tokenizer import ModelTokenizer
from gatelab.evaluate.models import OpenedModel
from gatelab.files import write_atomically
from gatelab.model.decoder import Decoder
from gatelab.model.settings import ModelSettings
from gatelab.study.overhead import MIN_ROUNDS, median_ratio

NEW, LONGEST, CONTEXT = 64, 256, 512
BATCHES = (1, 16)
NAMES = ("vocab_size", "width", "num_layers", "num_heads", "num_kv_heads", "head_size", "feedforward_width")
THEIR_NAMES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
)
SHAPES = {"15M": (4096, 384, 8, 6, 2, 64, 1024), "135M": (49_152, 576, 30, 9, 3, 64, 1536)}
LARGEST_GAP = 1e-3


def build_pair(sizes: Sequence[int], dtype: torch.dtype) -> dict[str, OpenedModel]:
    """Both models on equal weights."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    config = transformers.Qwen3Config(
        **dict(zip(THEIR_NAMES, sizes, strict=True)),
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=sizes[1] ** -0.5,
        rope_parameters=rope,
    )
    theirs = transformers.Qwen3ForCausalLM(config).eval()
    ours = Decoder(ModelSettings.parse({"max_context": CONTEXT, **dict(zip(NAMES, sizes, strict=True))}))
    ours.load_state_dict({name: tensor for name, tensor in theirs.state_dict().items() if name != "lm_head.weight"})
    tokenizer = ModelTokenizer(lambda text: [], lambda ids: "", bos_id=0, num_bos_added=0, vocab_size=sizes[0])
    return {
        name: OpenedModel(name, name, model.to(dtype), tokenizer, CONTEXT)
        for name, model in (("gatelab", ours.eval()), ("transformers", theirs))
    }


def random_prompts(num_rows: int, vocab_size: int) -> list[list[int]]:
    """Prompts of 128 to 256 tokens, the first of them the longest."""
    generator = torch.Generator().manual_seed(num_rows)
    lengths = [LONGEST, *torch.randint(LONGEST // 2, LONGEST, (num_rows - 1,), generator=generator).tolist()]
    return [torch.randint(1, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def compare(pair: dict[str, OpenedModel], num_rows: int, rounds: int, bandwidth: float) -> dict[str, Any]:
    """Medians of both at one batch size, and the ratios."""
    decoder = pair["gatelab"].model
    assert isinstance(decoder, Decoder)
    prompts = random_prompts(num_rows, decoder.settings.vocab_size)
    first: dict[str, list[float]] = {name: [] for name in pair}
    whole: dict[str, list[float]] = {name: [] for name in pair}
    tokens: dict[str, list[list[int]]] = {}
    draw = random.Random(0)
    for _ in range(rounds + 1):
        for name in draw.sample(list(pair), len(pair)):
            for count, times in ((1, first), (NEW, whole)):
                began = time.perf_counter()
                tokens[name] = generate(pair[name], prompts, count)
                times[name].append(time.perf_counter() - began)
    seconds = {
        name: {
            "first_token": first[name][1:],
            "per_token": [
                (total - one) / (NEW - 1) for one, total in zip(first[name][1:], whole[name][1:], strict=True)
            ],
            "all": whole[name][1:],
        }
        for name in pair
    }
    theirs, ours = seconds["transformers"], seconds["gatelab"]
    least = bytes_of_step(decoder, sum(map(len, prompts)) + num_rows * NEW // 2) / bandwidth
    return {
        "batch": num_rows,
        "prompt_tokens": sum(map(len, prompts)),
        "new_tokens": num_rows * NEW,
        "seconds": {
            name: {part: statistics.median(times) for part, times in found.items()} for name, found in seconds.items()
        },
        "new_tokens_per_second": {name: num_rows * NEW / statistics.median(seconds[name]["all"]) for name in pair},
        "ratio": {part: median_ratio(theirs[part], ours[part])._asdict() for part in ours},
        "roofline": {name: least / statistics.median(seconds[name]["per_token"]) for name in pair},
        "differing": differing(decoder, prompts, tokens),
    }


def bytes_of_step(decoder: Decoder, cached_tokens: int) -> int:
    """What one step has to read: each weight, and keys and values of the tokens so far."""
    settings, size = decoder.settings, next(decoder.parameters()).element_size()
    weights = sum(parameter.numel() for parameter in decoder.parameters())
    cached = 2 * settings.num_layers * settings.num_kv_heads * settings.head_size * cached_tokens
    return size * (weights + cached)


def differing(decoder: Decoder, prompts: list[list[int]], tokens: dict[str, list[list[int]]]) -> list[dict[str, Any]]:
    """The rows that differ: where first, and how far the two highest logits are apart there."""
    exact = deepcopy(decoder).double()
    found = []
    for row, (prompt, ours, theirs) in enumerate(zip(prompts, tokens["gatelab"], tokens["transformers"], strict=True)):
        if ours == theirs:
            continue
        place = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        with torch.inference_mode():
            highest = exact(torch.tensor([prompt + ours[:place]]))[0, -1].topk(2).values
        found.append({"row": row, "token": place, "gap": float(highest[0] - highest[1])})
    return found


def read_bandwidth(repetitions: int = 20) -> float:
    """Bytes a second of a matrix-vector product that reads 256 MiB: the best of twenty."""
    matrix, vector = torch.ones(8192, 8192), torch.ones(8192)
    best = float("inf")
    for _ in range(repetitions):
        began = time.perf_counter()
        torch.mv(matrix, vector)
        best = min(best, time.perf_counter() - began)
    return matrix.nbytes / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "generation")
    given = parser.parse_args()
    if given.rounds < MIN_ROUNDS:
        parser.error(f"--rounds {given.rounds}: an interval of a median takes at least {MIN_ROUNDS}")
    torch.set_num_threads(given.threads)
    bandwidth = read_bandwidth()
    found: dict[str, Any] = {
        "machine": machine(given.threads, None) | {"transformers": transformers.__version__},
        "bytes_per_second": bandwidth,
        "rounds": given.rounds,
        "rows": [],
    }
    for shape in given.shapes:
        for dtype in given.dtypes:
            pair = build_pair(SHAPES[shape], getattr(torch, dtype))
            for num_rows in BATCHES:
                row = {"shape": shape, "dtype": dtype, **compare(pair, num_rows, given.rounds, bandwidth)}
                found["rows"].append(row)
                ratios = ", ".join(f"{part} {ratio['value']:.2f}x" for part, ratio in row["ratio"].items())
                gaps = [f"{one['gap']:.1e}" for one in row["differing"]]
                print(
                    f"{shape} {dtype} batch {num_rows}: transformers' time over ours: {ratios}; "
                    f"{row['roofline']['gatelab']:.0%} of the bandwidth; gaps of differing rows: {gaps}",
                    flush=True,
                )
    given.out.mkdir(parents=True, exist_ok=True)
    write_atomically(given.out / "generation.json", json.dumps(found, indent=1) + "\n")
    wide = [row for row in found["rows"] if row["dtype"] == "float32"]
    if any(one["gap"] > LARGEST_GAP for row in wide for one in row["differing"]):
        raise SystemExit(f"float32 rows differ where the two highest logits are more than {LARGEST_GAP:g} apart")


if __name__ == "__main__":
    main()
