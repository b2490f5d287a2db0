"""A training step of a mixture of experts beside a dense model of equal work and beside transformers' Qwen3-MoE.

    python benchmarks/mixture_step.py [--rounds 15] [--threads 2] [--allocator LIBRARY]
        [--layers 8] [--context 512] [--sequences 8] [--experts 16] [--experts-per-token 2] [--expert-width 512]
        [--out benchmarks/results/mixture_step]

The 15M shape of ``training_step.py`` on random tokens, each contender in a process of its own, all in turns
(``side_by_side``): products in bfloat16, AdamW, gradients clipped. The dense model's feed-forward is as wide as the
experts of one token together, so both do the same work but for the router. GateLab's models are gated elementwise,
with float32 weights, compiled, deterministic, and have a loss for balance and one for the router's logits;
Qwen3-MoE has neither gate nor those losses, and each way of computing its experts takes part: grouped products and a
loop, with bfloat16 weights or with float32 ones by autocast, grouped ones compiled as well (a compiled loop compiles
anew at each new size of a group). FLOPs are those of the matrices that a token meets and of visible keys, three forward
passes a step, each contender's own. Writes ``mixture_step.json`` and a page.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from contenders.gatelab_decoder import run_settings
from goals import goal, goals_text
from mixture_step_page import mixture_step_page, table_of
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
from training_step import GATE, SHAPES

from gatelab.files import write_atomically
from gatelab.model.accounting import count_parameters, flops_per_token_training
from gatelab.report.page import write_page
from gatelab.report.tables import to_terminal

MIXTURE, UNGATED, DENSE = "GateLab mixture, gated", "GateLab mixture, ungated", "GateLab dense, gated"
PEER = "Qwen3-MoE"
MOST_OVER_DENSE, LEAST_OVER_PEER = 1.3, 1.5
WAYS = (("grouped_mm", True), ("grouped_mm", False), ("eager", False))


def contenders(shape: Mapping[str, int], mixture: Mapping[str, int]) -> Iterator[Contender]:
    """The limit, GateLab's mixture and dense model, and Qwen3-MoE in every way that trains."""
    words = mixture_words(mixture)
    common: dict[str, Any] = {"shape": shape, "compile": True}
    yield Contender("limit", "peak", {})
    yield Contender(MIXTURE, "gatelab_decoder", common | {"words": [GATE, *words]})
    yield Contender(UNGATED, "gatelab_decoder", common | {"words": words})
    yield Contender(DENSE, "gatelab_decoder", common | {"words": [GATE]})
    for (experts, compiled), weights in product(WAYS, ("bfloat16", "float32")):
        way = f"{'grouped' if experts == 'grouped_mm' else 'loop'}, {'compiled' if compiled else 'eager'}"
        settings = {"shape": shape, "compile": compiled, "mixture": mixture, "experts": experts, "weights": weights}
        yield Contender(f"{PEER}, {way}, {weights}", "qwen3_moe", settings)


def mixture_words(mixture: Mapping[str, int]) -> list[str]:
    """The mixture as assignments to a recipe's settings."""
    sizes = ", ".join(f"{name}: {size}" for name, size in mixture.items())
    return [f"model.mixture={{{sizes}}}"]


def work_of(contender: Contender, mixture: Mapping[str, int]) -> dict[str, Any]:
    """FLOPs of a step, those of its router, and parameters; a peer's are those of the ungated mixture."""
    words = contender.settings.get("words", mixture_words(mixture))
    run = run_settings({"shape": contender.settings["shape"], "words": words})
    model, tokens = run.model, run.tokens_per_step
    router = 0 if model.mixture is None else 6 * model.width * model.mixture.num_experts * model.num_layers * tokens
    counts = count_parameters(model)
    return {
        "tokens": tokens,
        "flops": flops_per_token_training(model, run.data.context) * tokens,
        "router_flops": router,
        "parameters": counts.total,
        "active_parameters": counts.active,
    }


def found_in(entries: list[Contender], measured: list[dict[str, Any]], mixture: Mapping[str, int]) -> dict[str, Any]:
    """What every contender reached, and the goals."""
    limit, running = apart_from_limit(measured)
    over_dense, over_mixture = ratios(running, DENSE), ratios(running, MIXTURE)
    by_name = {entry.name: entry for entry in entries}
    rows = []
    for row in running:
        work, seconds = work_of(by_name[row["name"]], mixture), statistics.median(row["seconds"])
        rows.append(
            row
            | work
            | {
                "tokens_per_second": work["tokens"] / seconds,
                "limit_share": limit_share(work["flops"], row, limit),
                "over_dense": over_dense[row["name"]],
                "over_mixture": over_mixture[row["name"]],
            }
        )
    fastest = max((row for row in rows if row["name"].startswith(PEER)), key=lambda row: row["tokens_per_second"])
    goals = [
        goal("time of the mixture over that of the dense model", over_dense[MIXTURE], "at most", MOST_OVER_DENSE),
        goal(f"speed over that of {fastest['name']}", fastest["over_mixture"], "at least", LEAST_OVER_PEER),
    ]
    return {"limit_flops": statistics.median(limit_speeds(limit)), "goals": goals, "rows": rows}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--layers", type=int, default=SHAPES["15M"]["num_layers"])
    parser.add_argument("--context", type=int, default=SHAPES["15M"]["context"])
    parser.add_argument("--sequences", type=int, default=SHAPES["15M"]["sequences"])
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--experts-per-token", type=int, default=2)
    parser.add_argument("--expert-width", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/mixture_step"))
    given = read_options(parser)
    mixture = {
        "num_experts": given.experts,
        "experts_per_token": given.experts_per_token,
        "expert_width": given.expert_width,
    }
    shape = SHAPES["15M"] | {
        "num_layers": given.layers,
        "context": given.context,
        "sequences": given.sequences,
        "feedforward_width": given.experts_per_token * given.expert_width,
    }
    console = Console()
    entries = list(contenders(shape, mixture))
    measured = measure(entries, given.rounds, given.threads, given.allocator, watch=console.print)
    found = {
        "machine": machine(given.threads, given.allocator) | {"transformers": version("transformers")},
        "rounds": given.rounds,
        "shape": shape,
        "mixture": mixture,
        **found_in(entries, measured, mixture),
    }
    command = command_line("mixture_step.py", parser, given)
    given.out.mkdir(parents=True, exist_ok=True)
    write_atomically(given.out / "mixture_step.json", json.dumps(found, indent=1) + "\n")
    write_page(mixture_step_page(found, command), given.out / "report.html")
    console.print(to_terminal(table_of(found["rows"])))
    console.print(goals_text(found["goals"], "\n"), markup=False)


if __name__ == "__main__":
    main()
