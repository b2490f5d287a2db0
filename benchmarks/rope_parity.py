"""Rotary frequencies beside those of transformers, for the same settings.

    python benchmarks/rope_parity.py [--out benchmarks/rope_parity.json]

Prints, for each kind of scaling, base, original context, factor and share of rotated channels, the largest absolute
difference of the inverse frequencies (0 says bit-equal, in float32) and both attention factors; writes the same as
JSON. transformers' dynamic scaling is compared at the length where its factor is the one of ours.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import transformers
from rich.console import Console
from rich.table import Table
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gatelab.files import write_atomically
from gatelab.interop.rope_dialects import rope_parameters
from gatelab.model.rope import attention_factor, inverse_frequencies
from gatelab.model.settings import RopeSettings

HEAD_SIZE = 128
LLAMA3 = {"low_frequency_factor": 1.0, "high_frequency_factor": 4.0}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"kind": "linear"},
    "ntk (dynamic)": {"kind": "ntk"},
    "yarn": {"kind": "yarn"},
    "yarn, truncate=false": {"kind": "yarn", "truncate": False},
    "yarn, beta 16 and 2": {"kind": "yarn", "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, attention_factor": {"kind": "yarn", "attention_factor": 0.9},
    "yarn, mscale pair": {"kind": "yarn", "mscale": 1.0, "mscale_all_dim": 0.5},
    "llama3": {"kind": "llama3"} | LLAMA3,
}
PLACES = [(1e4, 4096, 8.0, 1.0), (1e6, 32768, 4.0, 1.0), (5e5, 8192, 8.0, 1.0), (1e4, 512, 16.0, 0.25)]


def compared() -> Iterator[dict[str, Any]]:
    """One row for each kind and place."""
    for (name, scaling), (base, original, factor, fraction) in product(KINDS.items(), PLACES):
        scaling = scaling | {"factor": factor}
        if scaling["kind"] in ("yarn", "llama3"):
            scaling["original_context"] = original
        rope = RopeSettings.parse({"base": base, "fraction": fraction, "scaling": scaling})
        parameters, length = rope_parameters(rope, HEAD_SIZE), None
        if scaling["kind"] == "ntk":
            # Its s at n tokens is f n / M - (f - 1): ours with f = 1 and n = s M.
            parameters = {"rope_type": "dynamic", "rope_theta": base, "factor": 1.0}
            length = round(factor * original)
        config = transformers.LlamaConfig(
            hidden_size=4 * HEAD_SIZE,
            num_attention_heads=4,
            head_dim=HEAD_SIZE,
            max_position_embeddings=original if length else round(factor * original),
            rope_parameters=parameters | {"partial_rotary_factor": fraction},
        )
        theirs, their_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, seq_len=length)
        yield {
            "scaling": name,
            "base": base,
            "original": original,
            "factor": factor,
            "fraction": fraction,
            "difference": float((inverse_frequencies(rope, HEAD_SIZE) - theirs).abs().max()),
            "attention_factor": attention_factor(rope.scaling),
            "their_attention_factor": their_factor,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    rows = list(compared())
    shown = Table("scaling", "base", "original", "factor", "share", "difference", "attention factor", "theirs")
    for row in rows:
        scaling, *numbers, difference, ours, theirs = row.values()
        shown.add_row(
            scaling, *(f"{number:g}" for number in numbers), f"{difference:g}", f"{ours:.6f}", f"{theirs:.6f}"
        )
    Console(width=120).print(shown)
    if out is not None:
        versions = {"transformers": transformers.__version__, "head_size": HEAD_SIZE}
        write_atomically(out, json.dumps(versions | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
