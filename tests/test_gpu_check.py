"""The accelerator's check at toy size on a processor, and that it would notice a gate that is missing."""

import json

import gpu_check
import pytest
import torch
from gpu_check import ARMS, LARGEST_ERROR, SIZES, check, probe_lse, relative_error, variant_errors

from gatelab.gates.gate import ACTIVATIONS, Gate
from gatelab.gates.variants import VARIANTS

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "variants", [["none", "sdpa_elementwise", "key_headwise"], pytest.param(list(VARIANTS), marks=pytest.mark.long)]
)
def test_the_whole_check_passes_at_toy_size(variants, monkeypatch):
    monkeypatch.setattr(gpu_check, "VARIANTS", variants)
    figures = json.loads(json.dumps(check(SIZES["toy"], CPU, seconds=0)))
    assert figures["passed"]
    assert [row["variant"] for row in figures["variants"]] == variants
    assert [row["gate"] for row in figures["steps"]] == list(ARMS)
    for row in figures["steps"]:
        assert row["rounds"] == 6 and row["milliseconds"] > 0 and row["peak_share"] > 0
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert row["planned_bytes"] > 0 and row["peak_bytes"] is None
    assert figures["steps"][0]["ratio"] == 1


@pytest.mark.parametrize("name", ["sdpa_elementwise", "value_headwise", "key_elementwise", "dense_output_elementwise"])
def test_a_gate_that_bfloat16_drops_is_noticed(name, monkeypatch):
    plain = Gate.forward

    def forward(self, y, scores):
        return y if y.dtype == torch.bfloat16 else plain(self, y, scores)

    monkeypatch.setattr(Gate, "forward", forward)
    row = variant_errors(name, CPU)
    assert not row["passed"] and max(row["logits"], row["gradient"]) > 2 * LARGEST_ERROR


def test_another_activation_is_noticed(monkeypatch):
    def sigmoid(x):
        return torch.nn.functional.silu(x) if x.dtype == torch.bfloat16 else torch.sigmoid(x)

    monkeypatch.setitem(ACTIVATIONS, "sigmoid", sigmoid)
    assert not variant_errors("sdpa_elementwise", CPU)["passed"]


def test_the_probe_notices_a_wrong_log_sum_exp(monkeypatch):
    plain = gpu_check.attend
    monkeypatch.setattr(gpu_check, "attend", lambda *tensors, **options: (None, plain(*tensors, **options)[1] + 0.1))
    row = probe_lse(torch.float32, CPU, 23)
    assert not row["passed"] and row["largest_error"] == pytest.approx(0.1, rel=1e-3)


def test_numbers_that_are_not_finite_are_an_error():
    assert relative_error(torch.tensor([1.0, torch.nan]), torch.ones(2)) == float("inf")
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 4.0])) == 0.75
