"""How a training step's time and memory grow with context, width and depth.

    python benchmarks/scaling.py [--rounds 6] [--threads 2] [--allocator LIBRARY] [--tokens 8192]
        [--contexts 512 1024 2048 4096 8192] [--widths 192 384 576 768] [--depths 4 8 16]
        [--out benchmarks/results/scaling]

GateLab's decoder, gated elementwise and ungated: bfloat16 products, float32 weights, compiled, deterministic, AdamW, on
``--tokens`` random tokens a step. Width 384, 8 layers and context 512 but for the one that varies; heads of 64
channels, width/64 of them for queries and a third as many for keys and values; feed-forward 8/3 of the width;
vocabulary 4,096. The sizes of one axis and model take turns (``side_by_side``), each in a process of its own. An
exponent is the slope of the logarithms by least squares, fitted in each round; its interval is over rounds. Beside that
of the time stands that of the operations (matrices and visible keys). Memory (Linux only) is the most that the process
held during the step above what it held before its model was made: weights, gradients, optimizer, activations, and what
compilation left. An axis without sizes is left out. Writes ``scaling.json`` and a page after each axis and model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from contenders.gatelab_decoder import run_settings
from rich.console import Console
from scaling_page import fits_table, scaling_page
from side_by_side import Contender, command_line, machine, measure, median, options, read_options
from training_step import GATE

from gatelab.files import write_atomically
from gatelab.model.accounting import flops_per_token_training
from gatelab.report.page import write_page
from gatelab.report.tables import to_terminal

WIDTH, DEPTH, CONTEXT, HEAD = 384, 8, 512, 64
MODELS = {"gated": [GATE], "ungated": []}
AXES = ("context", "width", "depth")


def shape_of(tokens: int, context: int = CONTEXT, width: int = WIDTH, depth: int = DEPTH) -> dict[str, int]:
    """The shape with these sizes; ``ValueError`` for tokens or a width that can't be divided."""
    if tokens % context:
        raise ValueError(f"{tokens} tokens a step are no whole number of sequences of {context}; change one of them")
    heads = width // HEAD
    if width % HEAD or (heads > 1 and heads % 3):
        raise ValueError(
            f"width {width} has no heads of {HEAD} in groups of 3; take {HEAD} or a multiple of {3 * HEAD}"
        )
    return {
        "vocab_size": 4096,
        "width": width,
        "num_layers": depth,
        "num_heads": heads,
        "num_kv_heads": max(1, heads // 3),
        "head_size": HEAD,
        "feedforward_width": 8 * (width // 3),
        "context": context,
        "sequences": tokens // context,
    }


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The power of the size that values go with: the slope of their logarithms by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def exponents(rows: Sequence[dict[str, Any]], key: str) -> dict[str, float]:
    """The median over rounds of the exponent of one figure, ``key``, of each size, and its 95 % interval."""
    sizes = [row["size"] for row in rows]
    return median([exponent(sizes, values) for values in zip(*(row[key] for row in rows), strict=True)])


def rows_of(axis: str, model: str, given: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """Times and memory of one model at every size of an axis."""
    shapes = {size: shape_of(given.tokens, **{axis: size}) for size in getattr(given, f"{axis}s")}
    contenders = [
        Contender(
            f"{model}, {axis} {size}", "gatelab_decoder", {"shape": shape, "compile": True, "words": MODELS[model]}
        )
        for size, shape in shapes.items()
    ]
    measured = measure(contenders, given.rounds, given.threads, given.allocator, watch=console.print)
    for (size, shape), row in zip(shapes.items(), measured, strict=True):
        run = run_settings({"shape": shape, "words": MODELS[model]})
        empty = row["start"]["empty_bytes"]
        memory_bytes = None if empty is None else [peak - empty for peak in row["peak_bytes"]]
        yield row | {
            "axis": axis,
            "model": model,
            "size": size,
            "flops": flops_per_token_training(run.model, run.data.context) * run.tokens_per_step,
            "time": median(row["seconds"]),
            "memory_bytes": memory_bytes,
            "memory": memory_bytes and median([number / 1e6 for number in memory_bytes]),
        }


def fit_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The exponents of one model along one axis."""
    sizes = [row["size"] for row in rows]
    return {
        "axis": rows[0]["axis"],
        "model": rows[0]["model"],
        "time": exponents(rows, "seconds"),
        "flops": exponent(sizes, [row["flops"] for row in rows]),
        "memory": None if rows[0]["memory_bytes"] is None else exponents(rows, "memory_bytes"),
    }


def parsed() -> tuple[argparse.Namespace, str]:
    """What was asked for, and the command; an impossible size ends the program before anything is measured."""
    parser = options(__doc__, rounds=6)
    parser.add_argument("--tokens", type=int, default=8192, help="in a step, whatever the context")
    parser.add_argument("--contexts", type=int, nargs="*", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--widths", type=int, nargs="*", default=[192, 384, 576, 768])
    parser.add_argument("--depths", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/scaling"))
    given = read_options(parser)
    for axis in AXES:
        sizes = getattr(given, f"{axis}s")
        if len(sizes) == 1:
            parser.error(f"--{axis}s {sizes[0]}: an exponent takes two sizes or more")
        try:
            for size in sizes:
                shape_of(given.tokens, **{axis: size})
        except ValueError as error:
            parser.error(str(error))
    return given, command_line("scaling.py", parser, given)


def main() -> None:
    (given, command), console = parsed(), Console()
    given.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        "machine": machine(given.threads, given.allocator),
        "rounds": given.rounds,
        "tokens": given.tokens,
        "rows": [],
        "fits": [],
    }
    for axis in (axis for axis in AXES if getattr(given, f"{axis}s")):
        for model in MODELS:
            rows = list(rows_of(axis, model, given, console))
            found["rows"] += rows
            found["fits"].append(fit_of(rows))
            write_atomically(given.out / "scaling.json", json.dumps(found, indent=1) + "\n")
            write_page(scaling_page(found, command), given.out / "report.html")
    console.print(to_terminal(fits_table(found)))


if __name__ == "__main__":
    main()
