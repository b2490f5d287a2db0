"""Tidy rows of a made-up model: every metric, with values that are a plain function of their place."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from gatelab.diagnose.results import NamedResult

LENGTH = 4096
FLOOR = sum(1 / (query + 1) for query in range(LENGTH)) / LENGTH
CONTEXT = {
    "tokens_per_sequence": LENGTH,
    "num_sequences": 4,
    "tokens": 4 * LENGTH,
    "bos": "one in front of every sample",
    "padding": 0,
    "dtype": "float32",
    "torch": "2.13.0",
}


def row(metric: str, value: float | None, **place: Any) -> dict[str, Any]:
    empty = {"model": "m", "step": None, "layer": None, "head": None, "channel": None, "query_range": "all"}
    return {**empty, "floor": None, "n": LENGTH, **place, "metric": metric, "value": value}


def made_up_result(
    name: str = "model",
    *,
    num_layers: int = 5,
    num_heads: int = 3,
    gates: bool = True,
    sink: float = 0.6,
    delimiters: tuple[str, ...] = (".", "\n"),
) -> NamedResult:
    """A model with a sink that comes and goes with depth, and a gate (or none) that is more open in later layers."""
    rows = [
        *_attention_rows(num_layers, num_heads, sink, delimiters),
        *_hidden_rows(num_layers),
        *(_gate_rows(num_layers, num_heads) if gates else []),
    ]
    return NamedResult(name, [{**one, "model": name} for one in rows], CONTEXT)


def _attention_rows(num_layers: int, num_heads: int, sink: float, delimiters: tuple[str, ...]) -> Iterator[dict]:
    for layer in range(num_layers):
        depth = math.sin(math.pi * (layer + 0.5) / num_layers)
        for head in range(num_heads):
            place = {"layer": layer, "head": head}
            share = FLOOR + sink * depth * (0.55 + 0.45 * math.sin(7 * head + layer))
            yield row("first_token_attention", share, floor=FLOOR, **place)
            yield row("first_token_attention", 0.98 * share, floor=0.6 * FLOOR, query_range="from_64", **place)
            yield row("first_4_attention", 1.05 * share, floor=3.1 * FLOOR, **place)
            yield row("first_real_key_attention", share, floor=FLOOR, **place)
            for number, token in enumerate(delimiters):
                yield row(f"delimiter_attention[{token}]", 0.04 + 0.01 * number, floor=0.03, **place)
            yield row("top_key", 0 if share > 0.1 else 17 + head, **place)
            yield row("top_key_attention", max(share, 0.02), **place)
            yield row("effective_sink", 0.2 * share, **place)
            yield row("attention_entropy", 6.5 * (1 - share), floor=7.3, **place)
            yield row("attention_distance", 600 + 1400 * share, floor=1023.5, **place)
            yield row("largest_logit", 12 + 20 * share, **place)
            yield row("vo_effective_rank", 50 + 3 * layer + head % 5, **place)
            yield row("vo_stable_rank", 12 + layer / 2 + head % 3, **place)


def _hidden_rows(num_layers: int) -> Iterator[dict]:
    for layer in range(-1, num_layers):
        largest = 22_000.0 if 0 < layer < num_layers - 1 else 35.0
        for number, name in enumerate(("largest", "second", "third")):
            yield row(f"{name}_activation", largest / (number + 1), layer=layer, channel=378 + number)
            yield row(f"{name}_activation_token", 0, layer=layer, channel=378 + number)
        yield row("median_activation", 0.4 + 0.02 * layer, layer=layer)
        yield row("residual_norm", 30.0 + 8 * layer, layer=layer)
        yield row("share_above_100", 0.002 if largest > 100 else 0.0, layer=layer)
        yield row("share_above_1000_medians", 0.001 if largest > 1000 else 0.0, layer=layer)
        yield row("activation_kurtosis", 3.0 + largest / 50, layer=layer)


def _gate_rows(num_layers: int, num_heads: int) -> Iterator[dict]:
    for layer in range(num_layers):
        for head in range(num_heads):
            place, at = {"layer": layer, "head": head}, "[sdpa_output]"
            mean = 0.05 + 0.4 * (layer + 1) / num_layers * (1 + math.sin(3 * head)) / 2
            yield row(f"gate_mean{at}", mean, **place)
            yield row(f"gate_mean{at}", 0.5 * mean, query_range="first_token", **place)
            yield row(f"gate_mean{at}", mean, query_range="rest", **place)
            for limit, share in (("below_0.01", 0.1), ("below_0.1", 0.3), ("above_0.9", 0.04)):
                yield row(f"gate_{limit}{at}", share, **place)
            yield row(f"gate_shut{at}", int(mean < 0.051), **place)
            yield row(f"gate_sparse{at}", int(mean < 0.06), **place)
            yield row(f"gate_binary_entropy{at}", 0.21, **place)
            yield row(f"gate_sink_correlation{at}", -0.3, **place)
            yield row(f"gate_attention_entropy_correlation{at}", 0.17, **place)
        for number in range(20):
            yield row(f"gate_histogram{at}", 400 - 19 * number + layer, layer=layer, channel=number)
        yield row("output_magnitude", 0.3 + 0.01 * layer, layer=layer)
        yield row("gated_output_magnitude", 0.05 + 0.01 * layer, layer=layer)
        yield row("output_effective_rank", 120.0 + layer, layer=layer)
        yield row("gated_output_effective_rank", 210.0 + layer, layer=layer)


def probe_rows(num_layers: int = 5) -> Iterator[dict]:
    for arm, perplexity in (("as_trained", 21.5), ("layer_mean", 26.0), ("head_mean", 24.1), ("neutral", 310.0)):
        yield row(f"clamped_perplexity[{arm}]", perplexity, query_range=None)
    at = "[bfloat16_against_float32]"
    yield row(f"logits_error{at}", 0.012, query_range=None)
    yield row(f"gradient_error{at}", 0.03, query_range=None)
    for layer in range(num_layers):
        yield row(f"gradient_error{at}", 0.02 + 0.001 * layer, layer=layer, query_range=None)
        for query_range, error in (("all", 0.004), ("first_token", 0.002), ("rest", 0.01)):
            yield row(f"hidden_error{at}", error * (1 + layer), layer=layer, query_range=query_range)
