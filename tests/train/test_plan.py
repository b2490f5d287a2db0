"""A plan's bytes against what ranks really hold, its arithmetic by hand, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny_runs import tiny_model, tiny_run
from torch import Tensor
from torch.distributed.tensor import DTensor
from typer.testing import CliRunner

from gatelab.cli import app
from gatelab.gates.variants import VARIANTS
from gatelab.model.accounting import count_parameters
from gatelab.model.activations import Piece, activation_bytes, layer_activations
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.perplexity import token_nats
from gatelab.model.settings import LatentSettings, MixtureSettings
from gatelab.recipes.table import resolve
from gatelab.train.dry_run import build_shards, fake_process_group
from gatelab.train.hardware import GPUS, Gpu, find_gpu
from gatelab.train.memory import count_rank_parameters, memory_per_rank, sequences_at_once
from gatelab.train.parallel.compilation import recompute_layers
from gatelab.train.parallel.mesh import running_ranks
from gatelab.train.parallel.placement import place
from gatelab.train.plan import Assumptions, find_plan, plan_as_set
from gatelab.train.settings import ParallelSettings, RunSettings

MIXTURE = MixtureSettings(num_experts=8, experts_per_token=2, expert_width=24, shared_width=28)
SMALL = Gpu("toy", peak_flops=1e9, memory_bytes=1e6, dollars_per_hour=2.0)


def spread_run(*words: str, gate: str = "none", **model: object) -> RunSettings:
    """A tiny run whose 8 query and 2 key/value heads go over 4 ranks."""
    return tiny_run("train.sequences_per_step=64", *words, gate=gate, num_heads=8, **model)


def kept_bytes(decoder: Decoder, sequences: int, context: int) -> int:
    """Bytes of every storage that autograd keeps, the weights' own apart."""
    own = {_local(parameter).untyped_storage().data_ptr() for parameter in decoder.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        local = _local(tensor)
        kept.setdefault(local.untyped_storage().data_ptr(), local)
        return tensor

    ids = torch.randint(decoder.settings.vocab_size, (sequences, context))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = token_nats(decoder(ids), ids).sum()
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for pointer, tensor in kept.items() if pointer not in own)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("gate", VARIANTS)
def test_a_tensor_rank_keeps_the_planned_activations(gate: str) -> None:
    """Rank 1 of four: its collectives do nothing, but every tensor has its size."""
    run = spread_run("train.parallel.tensor=4", gate=gate)
    with fake_process_group(4, 1), running_ranks(run.train.parallel) as ranks:
        decoder = Decoder(run.model)
        initialize(decoder, 0)
        place(decoder, run.train, ranks, compiled=False)
        counted = kept_bytes(decoder, 3, 17)
    assert activation_bytes(run.model, Piece(3, 17, 4, tensor=4)) == pytest.approx(counted, rel=0.1)


@pytest.mark.parametrize("gate", ["none", "value_elementwise"])
def test_recomputed_layers_keep_the_planned_bytes(gate: str) -> None:
    settings = tiny_model(gate, num_layers=6)
    decoder = Decoder(settings)
    initialize(decoder, 0)
    recompute_layers(decoder)
    piece = Piece(3, 17, 4)
    planned = activation_bytes(settings, piece, recompute=True) - sum(layer_activations(settings, 0, piece).values())
    assert planned == pytest.approx(kept_bytes(decoder, 3, 17), rel=0.05)


@pytest.mark.parametrize("gate", VARIANTS)
def test_a_rank_stores_the_planned_weights(gate: str) -> None:
    run = spread_run("train.parallel.tensor=4", gate=gate)
    planned = count_rank_parameters(run.model, run.train.parallel).total
    assert {shard.parameters for shard in build_shards(run, 4)} == {planned}


@pytest.mark.parametrize("gate", ["none", "sdpa_elementwise", "sdpa_from_value", "value_elementwise", "key_headwise"])
@pytest.mark.parametrize("query_rank", [None, 11])
def test_a_rank_of_latent_attention_stores_and_keeps_what_is_planned(query_rank: int | None, gate: str) -> None:
    """Heads are split over four ranks, latents and the shared key are whole on each."""
    sizes = {"key_value_rank": 12, "unrotated_size": 6, "rotated_size": 4, "value_size": 7}
    latent = LatentSettings(query_rank=query_rank, **sizes)
    run = spread_run("train.parallel.tensor=4", gate=gate, num_kv_heads=8, qk_norm=False, latent=latent)
    planned = count_rank_parameters(run.model, run.train.parallel).total
    assert {shard.parameters for shard in build_shards(run, 4)} == {planned}
    split = 12 * 8 * (6 + 7) + (24 if query_rank is None else 11) * 8 * 10 + 8 * 7 * 24 + 3 * 24 * 36
    whole = 24 * (12 + 4) + 12 + 2 * 24 + (0 if query_rank is None else 24 * 11 + 11)
    gates = 0 if gate == "none" else sum(p.numel() for n, p in Decoder(run.model).named_parameters() if "gates" in n)
    assert planned == 2 * (split / 4 + whole) + gates / 4 + 24 + 29 * 24
    with fake_process_group(4, 1), running_ranks(run.train.parallel) as ranks:
        decoder = Decoder(run.model)
        initialize(decoder, 0)
        place(decoder, run.train, ranks, compiled=False)
        counted = kept_bytes(decoder, 3, 17)
    assert activation_bytes(run.model, Piece(3, 17, 4, tensor=4)) == pytest.approx(counted, rel=0.1)


@pytest.mark.parametrize("words", [["tensor=4"], ["shard=4", "expert=4"], ["shard=4", "expert=2"]], ids=str)
def test_experts_are_shared_as_planned(words: list[str]) -> None:
    """However many share the experts, the shard group stores each once; what a rank gathers gets less."""
    run = spread_run(*(f"train.parallel.{word}" for word in words), mixture=MIXTURE)
    shards = build_shards(run, 4)
    planned = memory_per_rank(run, 4).weights / 4
    assert sum(shard.parameters for shard in shards) / 4 == pytest.approx(planned, rel=1e-9)
    experts = 3 * 8 * 24 * 24
    whole = count_rank_parameters(run.model, ParallelSettings()).largest_layer
    parallel = run.train.parallel
    if parallel.expert > 1:
        gathered = count_rank_parameters(run.model, parallel).largest_layer
        assert whole - gathered == experts * (1 - 1 / parallel.expert)


def test_sixty_four_ranks_build_every_shard() -> None:
    run = spread_run("train.parallel.shard=16", "train.parallel.tensor=4", gate="sdpa_and_value", num_layers=1)
    shards = build_shards(run, 64)
    assert [shard.rank for shard in shards] == list(range(64))
    of_tensor_ranks = [sum(shard.parameters for shard in shards[first::4]) for first in range(4)]
    assert set(of_tensor_ranks) == {count_rank_parameters(run.model, run.train.parallel).total}
    assert not dist.is_initialized()


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("paper_dense_28l", ["shard=64"]),
        ("paper_dense_48l", ["shard=32", "tensor=2"]),
        ("paper_moe_15a2b", ["shard=64", "expert=8"]),
        ("dense_70b", ["shard=8", "tensor=8"]),
    ],
)
def test_large_models_are_split_over_64_ranks(recipe: str, words: list[str]) -> None:
    run = resolve(recipe, ["gate=sdpa_elementwise", *(f"train.parallel.{word}" for word in words)])
    planned = memory_per_rank(run, 64).weights / 4
    for shard in build_shards(run, 64, [0, 63]):
        assert shard.parameters == pytest.approx(planned, rel=0.01)


def test_memory_by_hand() -> None:
    run = spread_run("train.precision=bfloat16", "train.parallel.shard=4", "train.accumulation=8", gate="none")
    numbers = sum(parameter.numel() for parameter in Decoder(run.model).parameters())
    outside = 29 * 24 + 24
    layer = (numbers - outside) / 2
    memory = memory_per_rank(run, 4)
    assert sequences_at_once(run, 4) == 2
    assert memory.weights == memory.gradients == numbers
    assert memory.optimizer == 2 * numbers
    assert memory.gathered_weights == 2 * (outside + 2 * layer)
    assert memory.gathered_gradients == 6 * layer
    assert memory.total == sum(memory)


def test_one_rank_keeps_casts_of_its_weights() -> None:
    numbers = sum(parameter.numel() for parameter in Decoder(tiny_model()).parameters())
    wide, narrow = (
        memory_per_rank(tiny_run(f"train.precision={dtype}", gate="none"), 1) for dtype in ("float32", "bfloat16")
    )
    assert (wide.gathered_weights, narrow.gathered_weights) == (0, 2 * numbers)
    assert wide.gathered_gradients == narrow.gathered_gradients == 0
    assert memory_per_rank(tiny_run("train.precision=float64", gate="none"), 1).weights == 8 * numbers


def test_time_and_cost_by_hand() -> None:
    run = resolve("paper_dense_28l")
    plan = find_plan(run, find_gpu("h100"), 64, tokens=1e12, assumptions=Assumptions(peak_share=0.5))
    counts = 1_720_837_120 - 28 * (2 * 2048 + 2 * 128) - 2048
    per_token = 3 * (2 * counts + 4 * 28 * 16 * 128 * 4097 / 2)
    assert plan.flops == pytest.approx(1e12 * per_token, rel=1e-9)
    assert plan.hours == pytest.approx(1e12 * per_token / (64 * 989e12 * 0.5) / 3600)
    assert plan.dollars == pytest.approx(plan.hours * 64 * 2.5)
    dear = find_plan(run, find_gpu("h100"), 64, 1e12, Assumptions(peak_share=0.5, dollars_per_hour=5.0))
    assert dear.dollars == pytest.approx(2 * plan.dollars)


def test_the_search_prefers_no_recomputation_then_few_tensor_ranks_then_little_accumulation() -> None:
    train = find_plan(resolve("paper_dense_28l"), GPUS["h100"], 64).run.train
    assert (train.parallel, train.recompute) == (ParallelSettings(shard=64), False)
    assert train.accumulation > 1
    less = train.model_copy(update={"accumulation": train.accumulation // 2})
    with pytest.raises(ValueError, match=f"this fits: train.parallel.shard=64 train.accumulation={train.accumulation}"):
        plan_as_set(resolve("paper_dense_28l").model_copy(update={"train": less}), GPUS["h100"], 64)


def test_a_large_model_needs_recomputation() -> None:
    assert find_plan(resolve("dense_70b"), GPUS["h100"], 256).run.train.recompute


def test_more_gpus_are_named_when_no_plan_fits() -> None:
    with pytest.raises(
        ValueError, match=r"^no plan fits: the smallest, .* takes .* GB on each of 8 A100 .*; \d+ of them"
    ):
        find_plan(resolve("dense_70b"), GPUS["a100"], 8)
    with pytest.raises(
        ValueError, match=r"no number of them does; shorten data\.context or take a GPU with more memory$"
    ):
        find_plan(tiny_run("train.sequences_per_step=4"), SMALL._replace(memory_bytes=100.0), 2)


@pytest.mark.parametrize(
    ("run", "num_gpus", "message"),
    [
        (tiny_run(), 3, "3 GPUs can't share train.sequences_per_step=4 sequences evenly; choose a number of GPUs that"),
        (tiny_run(), 8, "8 GPUs can't share"),
    ],
)
def test_a_search_needs_an_even_share(run: RunSettings, num_gpus: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_plan(run.model_copy(update={"model": tiny_model(num_heads=5, num_kv_heads=1)}), SMALL, num_gpus)


@pytest.mark.parametrize(
    ("words", "num_gpus", "message"),
    [
        (["train.parallel.shard=8"], 8, "sequences_per_step=4 can't be dealt out evenly to 8 data-parallel ranks"),
        (
            ["train.parallel.shard=2"],
            8,
            "train.parallel asks for replicate=1 x shard=2 x tensor=1 = 2 ranks, but 8 run",
        ),
        (["train.parallel.tensor=4"], 4, "train.parallel.tensor=4 does not divide the 6 query heads of layer 0"),
    ],
)
def test_impossible_plans_are_refused(words: list[str], num_gpus: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_as_set(tiny_run(*words), SMALL, num_gpus)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "h10"], "gpu 'h10' is unknown; did you mean 'h100'?"),
        (["--peak-share", "40"], "peak_share=40 is no share; give a number above 0 and at most 1"),
        (["--memory-share", "0"], "memory_share=0 is no share"),
        (["--price", "-1"], "a price of -1 per hour is negative; give 0 or more"),
        (["--tokens", "0"], "a run of 0 tokens trains nothing; give a positive number"),
        (["--parallel", "shards=8"], "train.parallel has no field 'shards'; did you mean 'shard'?"),
        (["--parallel", "shard=8"], "this fits: train.parallel.shard=8 train.accumulation="),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        CliRunner().invoke(app, ["plan", "paper_dense_28l", *words], catch_exceptions=False)
    assert message in str(caught.value)


@pytest.mark.parametrize("tokens", ["4e11", "3.5e12"])
@pytest.mark.parametrize("recipe", ["paper_dense_28l", "paper_dense_48l", "paper_moe_15a2b", "dense_70b"])
def test_the_command_plans_the_large_models(recipe: str, tokens: str) -> None:
    words = ["plan", recipe, "--gpus", "256", "--gpu", "h200", "--tokens", tokens, "--json"]
    figures = json.loads(CliRunner().invoke(app, words, catch_exceptions=False).stdout)
    memory = figures["memory_per_rank"]
    assert memory["total"] < memory["usable"] == 0.9 * 141e9
    assert figures["tokens"] == float(tokens)
    assert figures["gpu_hours"] == pytest.approx(256 * figures["hours"])


def test_the_command_prints_a_table_and_builds_the_shards() -> None:
    words = ["plan", "dense_tiny", "--gpus", "4", "--parallel", "shard=2,tensor=2", "--dry-run"]
    shown = CliRunner().invoke(app, words, catch_exceptions=False).stdout
    assert "4 x H100 80GB SXM" in shown and "All 4 shards were built" in shown


def test_the_page_says_what_a_gate_adds_at_70b() -> None:
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    table = page.split("## What a gate adds at 70B\n")[1].split("\n## ")[0]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.splitlines() if "B |" in line]
    assert [row[0] for row in rows[:2]] == ["none", "sdpa_headwise"] and len(rows) == 5
    machines = {
        "h100": ["train.parallel.shard=512", "train.recompute=true"],
        "h200": ["train.parallel.shard=128", "train.parallel.tensor=4", "train.accumulation=8"],
    }
    least = None
    for name, parameters, share, operations, *figures in rows:
        gate, *match = name.replace("`", "").split(", ")
        plans = [
            plan_as_set(resolve("dense_70b", [f"gate={gate}", *match, *own]), GPUS[gpu], 512, 3.5e12)
            for gpu, own in machines.items()
        ]
        counts, flops = count_parameters(plans[0].run.model), plans[0].to_mapping()["flops"]
        least = least or flops
        assert parameters == f"{counts.total / 1e9:.2f}B"
        for said, true in ((share, counts.gates / counts.total), (operations, flops / least - 1)):
            assert float(said.removesuffix(" %") or 0) == pytest.approx(100 * true, abs=0.06)
        found = [(plan.memory.total / 1e9, plan.to_mapping()["hours"] / 24) for plan in plans]
        assert figures == [text for memory, days in found for text in (f"{memory:.2f}", f"{days:.1f}")]
