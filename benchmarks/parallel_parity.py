"""Training spread over gloo ranks beside the same training on one rank.

    python benchmarks/parallel_parity.py [--out benchmarks/results/parallel_parity.json]

Each row is a model, a way to spread it, and the largest errors: of losses, gradient norms and weights of ten float64
steps (absolute), and of the first float32 gradients (over the largest entry of each). Batches have padding, and rows
with 1 to T - 1 targets. Writes JSON and prints the table as Markdown. With ``--variants`` every gate under tensor
parallelism with 8 query and 2 key/value heads on 4 ranks, else a choice of models and layouts.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from gatelab.data.loader import IGNORED, Batch, rows_in_pieces
from gatelab.files import write_atomically
from gatelab.gates.spec import GateSpec
from gatelab.gates.variants import VARIANTS, find_variant
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.masks import PADDING
from gatelab.model.perplexity import token_nats
from gatelab.model.settings import LatentSettings, LayerSettings, MixtureSettings, ModelSettings, SinkSettings
from gatelab.train.optimizer import build_optimizer, set_learning_rate
from gatelab.train.parallel.mesh import ALONE, Ranks, running_ranks
from gatelab.train.parallel.placement import place
from gatelab.train.settings import TrainSettings
from gatelab.train.step import take_step

MIXTURE = MixtureSettings(num_experts=8, experts_per_token=2, expert_width=24, shared_width=28, shared_gate=True)
SIGMOID = MixtureSettings(num_experts=4, experts_per_token=2, expert_width=20, router="sigmoid", selection_bias=True)
B, T, V = 8, 13, 29


def on_ranks(num_ranks: int, function: Callable[..., None], *arguments: object) -> None:
    """Call ``function(rank, *arguments)`` in so many processes that know each other, with one thread each."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        torch.multiprocessing.spawn(_rank, (num_ranks, str(meeting), function, arguments), nprocs=num_ranks)


def _rank(rank: int, num_ranks: int, meeting: str, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=num_ranks)
    try:
        function(rank, *arguments)
    finally:
        dist.destroy_process_group()


def spread_model(gate: str = "none", **changes: object) -> ModelSettings:
    """Two layers with 8 query and 2 key/value heads."""
    variant = find_variant(gate)
    sizes = {
        "vocab_size": V,
        "width": 40,
        "num_layers": 2,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_size": 6,
        "feedforward_width": 56,
        "max_context": 21,
        "init_std": 0.2,
        "gates": variant.gates,
        "control": variant.control,
    }
    return ModelSettings(**{**sizes, **changes})  # type: ignore[arg-type]


def spread_latents(query_rank: int | None, **changes: object) -> ModelSettings:
    """The same with latent attention."""
    latent = LatentSettings(query_rank=query_rank, key_value_rank=12, unrotated_size=7, rotated_size=4, value_size=9)
    return spread_model(num_kv_heads=8, head_size=11, qk_norm=False, latent=latent, **changes)


def train_settings(precision: str = "float64", **changes: object) -> TrainSettings:
    """A global batch of 8 sequences, and clipping that bites."""
    optimizer = {"learning_rate": 3e-3, "clip_norm": 0.5}
    return TrainSettings.parse({"sequences_per_step": B, "precision": precision, "optimizer": optimizer, **changes})


def uneven_batch(step: int) -> Batch:
    """A global batch with padding, whose rows have from 1 to T - 1 targets."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(V, (B, T + 1), generator=generator)
    inputs, targets, documents = ids[:, :-1], ids[:, 1:].clone(), torch.zeros(B, T, dtype=torch.long)
    for row in range(B):
        length = 1 + (row * 5 + step) % (T - 1)
        targets[row, length:] = IGNORED
        documents[row, length // 2 :] = 1
        documents[row, length + 1 :] = PADDING
    return Batch(inputs, targets, documents)


def rows_of(batch: Batch, ranks: Ranks, pieces: int = 1) -> Batch:
    """What one data-parallel rank reads of a global batch."""
    rows = rows_in_pieces(len(batch.inputs), ranks.data_rank, ranks.num_data_ranks, pieces)
    assert batch.documents is not None
    return Batch(batch.inputs[rows], batch.targets[rows], batch.documents[rows])


class Trained(NamedTuple):
    """What a few steps leave behind."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def train_tiny(model: ModelSettings, settings: TrainSettings, num_steps: int, ranks: Ranks = ALONE) -> Trained:
    """Losses and norms of every step, first-step gradients before clipping, and last weights, all whole."""
    decoder = Decoder(model)
    initialize(decoder, settings.seed)
    dtype = getattr(torch, settings.precision)
    decoder.to(torch.promote_types(dtype, torch.float32))
    decoder.activation_dtype = dtype
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            generator = torch.Generator().manual_seed(len(name) + parameter.numel())
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(
                parameter.dtype
            )
    place(decoder, settings, ranks, compiled=False)

    def sum_of_nats(state: Tensor, targets: Tensor) -> Tensor:
        return token_nats(decoder.logits(state), targets).sum()

    optimizer = build_optimizer(decoder, settings.optimizer)
    set_learning_rate(optimizer, 1.0)
    gradients: dict[str, Tensor] = {}

    def keep_gradients(*_: object) -> None:
        if not gradients:
            gradients.update({name: whole(p.grad) for name, p in decoder.named_parameters() if p.grad is not None})

    optimizer.register_step_pre_hook(keep_gradients)
    figures = []
    for step in range(num_steps):
        batch = rows_of(uneven_batch(step), ranks, settings.accumulation)
        figures.append(take_step(decoder, optimizer, batch, sum_of_nats, settings, ranks))
    return Trained(
        [f.loss for f in figures],
        [f.gradient_norm for f in figures],
        gradients,
        {name: whole(value) for name, value in decoder.state_dict().items()},
    )


def whole(tensor: Tensor) -> Tensor:
    """A copy of all of a tensor that may be spread over ranks."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def largest_errors(model: ModelSettings, parallel: dict[str, Any], **changes: object) -> dict[str, float]:
    """Of ten float64 steps against one rank's, and of the first float32 gradients, relative to the largest entry."""
    one, many = train_settings(**changes), train_settings(parallel=parallel, **changes)
    with running_ranks(many.parallel) as ranks:
        found = train_tiny(model, many, 10, ranks)
        narrow = train_tiny(model, train_settings("float32", parallel=parallel, **changes), 1, ranks)
        errors: dict[str, float] = {}
        if ranks.is_first:
            expected = train_tiny(model, one, 10)
            wide = train_tiny(model, train_settings("float32", **changes), 1)
            errors = {
                "loss": largest(zip(found.losses, expected.losses, strict=True)),
                "norm": largest(zip(found.norms, expected.norms, strict=True)),
                "weights": _largest(found.weights, expected.weights),
                "float32 gradients": _relative(narrow.gradients, wide.gradients),
            }
        ranks.wait()
    return errors


def _relative(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest error of a gradient over its largest entry; one that is 0 but for rounding counts as a thousandth."""
    assert found.keys() == expected.keys()
    top = max(float(gradient.abs().max()) for gradient in expected.values())
    return max(
        float((found[name] - gradient).abs().max()) / max(float(gradient.abs().max()), 1e-3 * top)
        for name, gradient in expected.items()
    )


def largest(pairs: Any) -> float:
    """The largest distance of two numbers."""
    return max(abs(a - b) for a, b in pairs)


def _largest(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - value).abs().max()) for name, value in right.items())


class Case(NamedTuple):
    """A model, and how it is spread."""

    name: str
    num_ranks: int
    parallel: dict[str, Any]
    model: ModelSettings
    accumulation: int = 1
    recompute: bool = False


def variant_cases() -> list[Case]:
    """Every gate on four tensor ranks, which outnumber the two key/value heads."""
    return [Case(name, 4, {"tensor": 4}, spread_model(name, num_layers=1)) for name in VARIANTS]


def layout_cases() -> list[Case]:
    """Each way to spread a model, and each part of a model that ranks share in its own way."""
    two_heads = (LayerSettings(num_heads=4, window=5), LayerSettings(num_heads=12))
    odd_gates = (GateSpec(position="dense_output", source="value", rank=3, bias=0.5), GateSpec(rank=5, bias=0.1))
    shared = (GateSpec(position="value", source="value", sharing="head_shared", bias=0.2),)
    logits = (GateSpec(position="key", source="parameter", sharing="head_shared", initialization="zeros"),)
    from_output = (GateSpec(position="dense_output", source="attention_output"),)
    on_latents = (GateSpec(source="value"), GateSpec(position="value", granularity="headwise"), *logits)
    biased = {"biased_projections": ("q", "k", "v", "o"), "qk_norm": False, "tied_head": False}
    return [
        Case("gated", 2, {"shard": 2}, spread_model("sdpa_elementwise")),
        Case("gated", 2, {"replicate": 2}, spread_model("sdpa_elementwise", sandwich_norm=True)),
        Case("accumulated mixture", 2, {"shard": 2}, spread_model(mixture=MIXTURE), accumulation=2),
        Case("mixture", 2, {"shard": 2, "expert": 2}, spread_model("sdpa_headwise", mixture=MIXTURE)),
        Case("whole key/value heads", 2, {"tensor": 2}, spread_model("sdpa_from_value", centred_norms=True)),
        Case("recomputed", 2, {"shard": 2}, spread_model("sdpa_headwise", mixture=MIXTURE), recompute=True),
        Case("recomputed", 2, {"tensor": 2}, spread_model("value_headwise"), recompute=True),
        Case("latents", 2, {"tensor": 2}, spread_latents(None)),
        Case("latents, elementwise gate", 2, {"tensor": 2}, spread_latents(10, gates=(GateSpec(),))),
        Case("gated latents", 2, {"tensor": 2}, spread_latents(10, gates=on_latents)),
        Case("gated", 4, {"shard": 4}, spread_model("sdpa_headwise")),
        Case("gated", 4, {"replicate": 2, "shard": 2}, spread_model("query_headwise")),
        Case("gated", 4, {"shard": 2, "tensor": 2}, spread_model("sdpa_and_value_headwise")),
        Case("mixture", 4, {"shard": 2, "tensor": 2}, spread_model("value_headwise", mixture=MIXTURE)),
        Case("mixture", 4, {"tensor": 4}, spread_model("sdpa_head_shared", mixture=SIGMOID)),
        Case("mixture", 4, {"shard": 4, "expert": 2}, spread_model(mixture=SIGMOID), accumulation=2),
        Case("mixture", 4, {"replicate": 2, "shard": 2, "expert": 2}, spread_model(mixture=MIXTURE)),
        Case("learned sink logits", 4, {"tensor": 4}, spread_model(sink=SinkSettings(kind="learned_logit"))),
        Case("learned sink pair", 4, {"tensor": 4}, spread_model(sink=SinkSettings(kind="learned_key_value"))),
        Case("biases, no q/k norm", 4, {"tensor": 4}, spread_model("sdpa_elementwise", **biased)),
        Case("layers with other heads", 4, {"tensor": 4}, spread_model("sdpa_headwise", layers=two_heads)),
        Case("low-rank gates", 4, {"tensor": 4}, spread_model(gates=odd_gates)),
        Case("shared gate from values", 4, {"tensor": 4}, spread_model(gates=shared)),
        Case("shared key logits", 4, {"tensor": 4}, spread_model(gates=logits)),
        Case("dense gate from output", 4, {"tensor": 4}, spread_model(gates=from_output)),
    ]


def measured(cases: Iterable[Case]) -> list[dict[str, Any]]:
    """One row for each case; the cases of each number of ranks share their processes."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        cases = list(cases)
        for num_ranks in sorted({case.num_ranks for case in cases}):
            file = Path(folder) / f"{num_ranks}.json"
            on_ranks(num_ranks, _write_rows, [case for case in cases if case.num_ranks == num_ranks], str(file))
            rows += json.loads(file.read_text())
    return rows


def _write_rows(rank: int, cases: list[Case], file: str) -> None:
    rows = []
    for case in cases:
        changes = {"accumulation": case.accumulation, "recompute": case.recompute}
        errors = largest_errors(case.model, case.parallel, **changes)
        rows.append({"model": case.name, "ranks": case.num_ranks, "parallel": case.parallel, **changes, **errors})
    if rank == 0:
        Path(file).write_text(json.dumps(rows))


def to_markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    lines = ["| model | ranks | spread | loss | norm | weights | float32 gradients |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        spread = ", ".join(f"{name} {value}" for name, value in row["parallel"].items())
        if row["accumulation"] > 1:
            spread += f", accumulation {row['accumulation']}"
        errors = " | ".join(f"{row[name]:.0e}" for name in ("loss", "norm", "weights", "float32 gradients"))
        lines.append(f"| {row['model']} | {row['ranks']} | {spread} | {errors} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/parallel_parity.json"))
    parser.add_argument("--variants", action="store_true")
    arguments = parser.parse_args()
    rows = measured(layout_cases() + (variant_cases() if arguments.variants else []))
    write_atomically(arguments.out, json.dumps({"torch": str(torch.__version__), "rows": rows}, indent=1) + "\n")
    print(to_markdown(rows))


if __name__ == "__main__":
    main()
