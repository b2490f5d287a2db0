"""Compiled runs: equal bits when resumed, no compilation more than needed, and none left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import Recording, assert_same_run, tiny_model, tiny_run
from torch import Tensor

from gatelab.gates.variants import VARIANTS
from gatelab.model.decoder import Decoder
from gatelab.train.loop import build, train
from gatelab.train.metrics import read_metrics
from gatelab.train.parallel import compilation

pytestmark = [
    pytest.mark.compile,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # PyTorch looks at it
    pytest.mark.skipif(not compilation.has_cpp_compiler(), reason="there is no C++ compiler with Python's headers"),
]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every graph that is traced; they run as they are, which spares the C++ compiler."""
    traced: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        traced.append(graph)
        return graph.forward

    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **options: compile_with(*a, **{**options, "backend": backend}))
    return traced


@pytest.mark.slow
def test_a_compiled_run_resumed_equals_the_uninterrupted_one(tmp_path: Path, cache: Path) -> None:
    """Two threads: without deterministic kernels the embedding's gradient alone makes such runs differ."""
    settings = tiny_run("train.compile=true", "train.steps=8", "train.threads=2", "train.precision=bfloat16")
    train(settings, tmp_path / "whole", cache)
    with pytest.raises(KeyboardInterrupt):
        train(settings, tmp_path / "stopped", cache, Recording(7))
    train(settings, tmp_path / "stopped", cache)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / "environment.json").read_text())["compiled"] is True
    train(tiny_run("train.steps=8", "train.threads=2", "train.precision=bfloat16"), tmp_path / "eager", cache)
    losses = [
        [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl", "step")] for name in ("whole", "eager")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


def test_measuring_and_scoring_compile_nothing(tmp_path: Path, cache: Path, graphs: list[Any]) -> None:
    """Two layers share one graph, the head with its loss is the other; what is watched runs beside them."""
    watched = ["train.evaluation.every=1", "train.evaluation.measure_every=1", "train.checkpoint.every=2"]
    train(tiny_run("train.compile=true", *watched, gate="sdpa_and_value"), tmp_path / "run", cache)
    assert len(graphs) == 2
    train(tiny_run("train.compile=true", "train.recompute=true", *watched), tmp_path / "recomputed", cache)
    assert len(graphs) == 4


def test_a_compiled_run_goes_on_where_there_is_no_compiler_only_if_allowed(
    tmp_path: Path, cache: Path, graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tiny_run("train.compile=true"), tmp_path / "run", cache, Recording(6))
    monkeypatch.setattr(compilation, "has_cpp_compiler", lambda: False)
    with pytest.raises(ValueError, match=r"other environment.*\n  compiled: True in the folder, False now"):
        train(tiny_run("train.compile=true"), tmp_path / "run", cache)


def test_the_tenth_arm_in_a_process_is_compiled_like_the_first(graphs: list[Any]) -> None:
    """PyTorch keeps eight graphs of one function and runs the ninth decoder as it is, unless it starts afresh."""
    ids = torch.zeros(2, 19, dtype=torch.long)
    for number, gate in enumerate(list(VARIANTS)[:10], start=1):
        decoder, sum_of_nats = build(tiny_run("train.compile=true", gate=gate), compiled=True)
        sum_of_nats(decoder.hidden(ids).state, ids)
        assert len(graphs) == 2 * number, gate


def test_layers_of_one_kind_share_a_graph(graphs: list[Any]) -> None:
    gate = VARIANTS["sdpa_headwise"].gates[0].model_copy(update={"layers": (1, 3)})
    decoder = Decoder(tiny_model(num_layers=5, gates=(gate,)))
    compilation.compile_layers(decoder)
    decoder(torch.zeros(2, 19, dtype=torch.long))
    assert len(graphs) == 2


@pytest.mark.slow
def test_an_elementwise_gate_keeps_its_logits_alone_for_the_backward_pass() -> None:
    """Its product with the output is taken again for the gradient of the projection that reads it."""
    kept = {}
    for gate in ("none", "sdpa_elementwise"):
        settings = tiny_run("train.compile=true", "train.precision=bfloat16", gate=gate)
        decoder, _ = build(settings, compiled=True)
        own = {parameter.data_ptr() for parameter in decoder.parameters()}
        sizes: dict[int, int] = {}

        def keep(tensor: Tensor, own: set[int] = own, sizes: dict[int, int] = sizes) -> Tensor:
            if tensor.data_ptr() not in own and tensor.dtype == torch.bfloat16:
                sizes[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            state = decoder.hidden(torch.zeros(3, settings.data.context, dtype=torch.long)).state
        kept[gate] = sum(sizes.values())
        state.sum().backward()
    model, tokens = settings.model, 3 * settings.data.context
    of_a_layer = tokens * model.num_heads * model.head_size
    assert kept["sdpa_elementwise"] - kept["none"] == model.num_layers * of_a_layer
