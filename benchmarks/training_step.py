"""A training step beside what users would pick instead, and beside the machine's limit.

    python benchmarks/training_step.py [--shapes 4M 15M 60M] [--rounds 15] [--threads 2] [--peers FOLDER]
        [--allocator LIBRARY] [--eager] [--out benchmarks/results/training_step]

Each contender trains a decoder of the shape on random tokens in a process of its own, all in turns (``side_by_side``):
matrix products in bfloat16, compiled, AdamW, gradients clipped. GateLab keeps float32 weights. A peer keeps bfloat16,
the fastest way, and with "float32 weights" as ours. FLOPs are those of the matrices and of visible keys, three forward
passes a step, for a gated decoder of the shape; the limit is the speed of twenty bfloat16 products of size 2,048 cubed,
and a share is the median over rounds of that within a round. ``--peers`` is the folder that ``peers.py`` makes; without
it only what is installed takes part. Writes ``training_step.json`` and a page after each shape, where shapes that were
run before stay.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contenders.gatelab_decoder import run_settings
from peers import PEERS, python_of
from rich.console import Console
from side_by_side import (
    Contender,
    apart_from_limit,
    command_line,
    limit_share,
    limit_speeds,
    machine,
    measure,
    options,
    ratios,
    read_options,
)
from training_step_page import table_of, training_step_page

from gatelab.files import write_atomically
from gatelab.model.accounting import count_parameters, flops_per_token_training
from gatelab.report.page import write_page
from gatelab.report.tables import to_terminal

HEADS = {"vocab_size": 4096, "num_layers": 8, "num_heads": 6, "num_kv_heads": 2}
SHAPES: dict[str, dict[str, int]] = {
    "4M": HEADS | {"width": 192, "head_size": 32, "feedforward_width": 576, "context": 256, "sequences": 16},
    "15M": HEADS | {"width": 384, "head_size": 64, "feedforward_width": 1024, "context": 512, "sequences": 8},
    "60M": HEADS
    | {"width": 768, "num_heads": 12, "num_kv_heads": 4, "head_size": 64}
    | {"feedforward_width": 2048, "context": 1024, "sequences": 4},
}
GATE = "gate=sdpa_elementwise"
RESULTS = "training_step.json"
OURS, BASELINE = "GateLab, gated", "transformers Qwen3-Next, gated"


def contenders(shape: dict[str, int], compiled: bool, peers: Path | None) -> Iterator[Contender]:
    """The limit, GateLab with and without its gate, and the peers that are there."""
    common: dict[str, Any] = {"shape": shape, "compile": compiled}
    yield Contender("limit", "peak", {})
    yield Contender(OURS, "gatelab_decoder", common | {"words": [GATE]})
    yield Contender("GateLab, ungated", "gatelab_decoder", common | {"words": []})
    if compiled:
        for trick, without in (("PyTorch's attention", "plain_attention"), ("products kept", "kept_products")):
            yield Contender(f"{OURS}, {trick}", "gatelab_decoder", common | {"words": [GATE], without: True})
    for name, module, gated in (
        (BASELINE, "transformers_qwen3", True),
        ("transformers Qwen3", "transformers_qwen3", False),
        ("plain PyTorch, gated", "plain_decoder", True),
    ):
        yield Contender(name, module, common | {"gated": gated, "weights": "bfloat16"})
        if gated:
            yield Contender(f"{name}, float32 weights", module, common | {"gated": gated, "weights": "float32"})
    if peers is not None:
        for peer in PEERS:
            settings = common | {"gated": peer.gated, "weights": "bfloat16"}
            yield Contender(peer.name, peer.module, settings, python_of(peers, peer))


def rows_of(shape_name: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """What every contender reached at one shape."""
    shape, console = SHAPES[shape_name], Console()
    entries = list(contenders(shape, not given.eager, given.peers))
    measured = measure(entries, given.rounds, given.threads, given.allocator, watch=console.print)
    limit, running = apart_from_limit(measured)
    over_baseline, over_ours = ratios(running, BASELINE), ratios(running, OURS)
    run = run_settings({"shape": shape, "words": [GATE]})
    flops = flops_per_token_training(run.model, shape["context"]) * run.tokens_per_step
    for row in running:
        seconds = statistics.median(row["seconds"])
        row |= {
            "shape": shape_name,
            "tokens_per_second": run.tokens_per_step / seconds,
            "limit_share": limit_share(flops, row, limit),
            "baseline_over_this": {
                "value": 1 / over_baseline[row["name"]]["value"],
                "low": 1 / over_baseline[row["name"]]["high"],
                "high": 1 / over_baseline[row["name"]]["low"],
            },
            "this_over_ours": over_ours[row["name"]],
            "limit_flops": statistics.median(limit_speeds(limit)),
            "gated_parameters": count_parameters(run.model).total,
        }
    return running


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/training_step"))
    given = read_options(parser)
    given.out.mkdir(parents=True, exist_ok=True)
    conditions = {
        "machine": machine(given.threads, given.allocator),
        "rounds": given.rounds,
        "compiled": not given.eager,
    }
    command = command_line("training_step.py", parser, given)
    rows = kept_rows(given.out / RESULTS, conditions)
    for name in given.shapes:
        rows = [row for row in rows if row["shape"] != name] + rows_of(name, given)
        shapes = {name: shape for name, shape in SHAPES.items() if any(row["shape"] == name for row in rows)}
        found = conditions | {"shapes": shapes, "rows": sorted(rows, key=lambda row: list(SHAPES).index(row["shape"]))}
        write_atomically(given.out / RESULTS, json.dumps(found, indent=1) + "\n")
        write_page(training_step_page(found, command), given.out / "report.html")
    Console().print(to_terminal(table_of(rows)))


def kept_rows(file: Path, conditions: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an earlier run under the same conditions: ratios are within a shape, so shapes may be run apart."""
    if not file.exists():
        return []
    found = json.loads(file.read_text(encoding="utf-8"))
    return found["rows"] if all(found[name] == value for name, value in conditions.items()) else []


if __name__ == "__main__":
    main()
