"""The paper's own checkpoints: golden outputs of its code, and where its gate rows are declared to be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gatelab.interop.loading import load, open_checkpoint

GOLDEN = Path(__file__).parent.parent / "golden" / "official"
KINDS = ("baseline", "headwise", "elementwise")
Q_PROJ, GATE_PROJ = "model.layers.{}.self_attn.q_proj.weight", "model.layers.{}.self_attn.gate_proj.weight"


class Masses:
    """A recorder that keeps the first token's attention mass of each layer, (B H T), from a whole attention map."""

    def __init__(self) -> None:
        self.by_layer: list[Tensor] = []

    def record(self, layer: int, tensors: Mapping[str, Tensor], scores: Mapping[str, Tensor]) -> None:
        """Softmax of the scaled, causal scores, written out."""
        query, key = tensors["query"], tensors["key"].repeat_interleave(3, dim=2)
        logits = torch.einsum("bthc,bshc->bhts", query, key) / query.shape[-1] ** 0.5
        future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        self.by_layer.append(logits.masked_fill(future, -torch.inf).softmax(-1)[..., 0])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_golden_outputs(kind: str) -> None:
    expected = load_file(GOLDEN / kind / "expected.safetensors")
    decoder, masses, states = load(GOLDEN / kind), Masses(), []
    assert not decoder.training
    for layer in decoder.model.layers:
        layer.self_attn.recorder = masses  # pyright: ignore
        layer.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0]))
    logits = decoder(expected["input_ids"])
    states.append(decoder.hidden(expected["input_ids"]).state)
    close(logits, expected["logits"])
    for number in range(3):
        close(states[number], expected[f"hidden.{number}"])
    close(states[-1], expected["hidden.3"])
    close(torch.stack(masses.by_layer[:3]), expected["first_token_mass"])


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_read_in_layout_l3(kind: str) -> None:
    checkpoint = open_checkpoint(GOLDEN / kind)
    assert checkpoint.layout == ("L1" if kind == "baseline" else "L3")
    assert [gate.granularity for gate in checkpoint.settings.gates] == ([] if kind == "baseline" else [kind])
    assert checkpoint.settings.tied_head


@torch.no_grad()
def test_the_rule_of_qwen3_next_would_give_another_model(tmp_path: Path) -> None:
    """L2, L3 and L6 have equal shapes; where nothing but the argument names one, that one is read."""
    expected = load_file(GOLDEN / "elementwise" / "expected.safetensors")
    folder = copy_of("elementwise", tmp_path, architectures=None)
    for layout in ("L2", "L6"):
        assert (load(folder, layout=layout)(expected["input_ids"]) - expected["logits"]).abs().max() > 0.1
    close(load(folder, layout="L3")(expected["input_ids"]), expected["logits"])
    with pytest.raises(ValueError, match=r"the layout argument says L2, the code of .* says L3; correct the wrong one"):
        load(GOLDEN / "elementwise", layout="L2")


def copy_of(kind: str, folder: Path, **changes: Any) -> Path:
    """A golden checkpoint whose configuration has changed; ``None`` removes a key."""
    shutil.copytree(GOLDEN / kind, folder, dirs_exist_ok=True)
    config = json.loads((GOLDEN / kind / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"qkv_bias": None},
        {"headwise_attn_output_gate": None},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"auto_map": {"AutoModelForCausalLM": "modeling_qwen3.Qwen3ForCausalLM"}},
    ],
    ids=["no qkv_bias", "one of the two gate keys", "rope settings of version 5", "code of its own"],
)
@torch.no_grad()
def test_other_configurations_of_the_same_model(changes: dict[str, Any], tmp_path: Path) -> None:
    expected = load_file(GOLDEN / "elementwise" / "expected.safetensors")
    folder = copy_of("elementwise", tmp_path, **changes)
    close(load(folder)(expected["input_ids"]), expected["logits"])


@torch.no_grad()
def test_qkv_bias_is_on_query_and_gate_rows(tmp_path: Path) -> None:
    folder = copy_of("headwise", tmp_path, qkv_bias=True)
    weights = load_file(folder / "model.safetensors")
    biases = {}
    for layer in range(3):
        for name, rows in (("q", 54), ("k", 16), ("v", 16)):
            biases[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = torch.arange(float(rows))
    save_file(weights | biases, folder / "model.safetensors")
    decoder = load(folder)
    attention = decoder.model.layers[1].self_attn
    assert isinstance(attention, nn.Module)
    gate = attention.get_parameter("gates.sdpa_output.projection.bias")
    assert gate.tolist() == [24.0, 25.0, 26.0, 51.0, 52.0, 53.0]
    assert attention.get_parameter("q_proj.bias")[24] == 27.0


def with_separate_gate(folder: Path, bias: bool = False) -> tuple[Path, Tensor]:
    """The elementwise model with its gate in a projection of its own, under the official keys; and its logits."""
    expected = load_file(GOLDEN / "elementwise" / "expected.safetensors")
    tensors = load_file(copy_of("elementwise", folder) / "model.safetensors")
    ours = open_checkpoint(GOLDEN / "elementwise").tensors
    for layer in range(3):
        tensors[Q_PROJ.format(layer)] = ours[Q_PROJ.format(layer)]
        gate = ours[f"model.layers.{layer}.self_attn.gates.sdpa_output.projection.weight"]
        tensors[GATE_PROJ.format(layer)] = gate
        if bias:
            tensors[GATE_PROJ.format(layer).replace("weight", "bias")] = torch.zeros(len(gate))
    save_file(tensors, folder / "model.safetensors")
    return folder, expected["logits"]


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias on the gate alone"])
@torch.no_grad()
def test_the_same_keys_with_a_projection_of_its_own(bias: bool, tmp_path: Path) -> None:
    folder, expected = with_separate_gate(tmp_path, bias)
    ids = load_file(GOLDEN / "elementwise" / "expected.safetensors")["input_ids"]
    with pytest.raises(
        ValueError,
        match=r"elementwise_attn_output_gate declares a gate, but not where its rows are; name the layout with "
        r"--layout. L1: a projection of its own; L3: q_proj group by group, .*paper's code",
    ):
        load(folder)
    decoder = load(folder, layout="L1")
    close(decoder(ids), expected)
    assert (decoder.settings.gates[0].bias is None) == (not bias)
    with pytest.raises(
        ValueError, match=r"does not tell of: model.layers.0.self_attn.gate_proj.* \(and [25] more\); their"
    ):
        load(folder, layout="L3")


@pytest.mark.parametrize(
    "changes",
    [
        {"elementwise_attn_output_gate": None, "attn_output_gate": True},
        {"architectures": ["Qwen3GatedForCausalLM"]},
        {"architectures": None},
    ],
    ids=["another key", "another class", "no class"],
)
def test_a_key_alone_declares_no_layout(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = copy_of("elementwise", tmp_path, **changes)
    with pytest.raises(ValueError, match=r"not where its rows are; name the layout .* L2: .*; L3: .*; L6: q_proj, all"):
        load(folder)
    ids = load_file(GOLDEN / "elementwise" / "expected.safetensors")["input_ids"]
    with torch.no_grad():
        assert torch.equal(load(folder, layout="L3")(ids), load(GOLDEN / "elementwise")(ids))


def test_metadata_declare_and_may_not_contradict(tmp_path: Path) -> None:
    folder = copy_of("elementwise", tmp_path, architectures=None)
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", {"gate_layout": "L3"})
    assert open_checkpoint(folder).layout == "L3"
    with pytest.raises(ValueError, match="declared twice: the layout argument says L2, the files says L3; correct"):
        open_checkpoint(folder, "L2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"headwise_attn_output_gate": True},
            r"contradict each other, headwise_attn_output_gate \(headwise\) and elementwise_attn_output_gate "
            r"\(elementwise\); set the wrong one to false",
        ),
        ({"gating": "per-head"}, r"elementwise_attn_output_gate \(elementwise\) and gating \(headwise\)"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate=True; GateLab computes qwen3 models with False"),
        ({"gate_attn_act_mode": "silu"}, "gate_attn_act_mode='silu'; GateLab computes qwen3 models with 'sigmoid'"),
    ],
)
def test_gates_that_contradict_each_other(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(copy_of("elementwise", tmp_path, **changes))


def test_query_rows_alone_are_no_fused_gate(tmp_path: Path) -> None:
    folder = copy_of("baseline", tmp_path, headwise_attn_output_gate=True)
    with pytest.raises(ValueError, match=r"q_proj.weight does not fit config.json: a tensor of 48 rows is no headwise"):
        load(folder)


def test_gate_rows_that_no_key_tells_of(tmp_path: Path) -> None:
    folder = copy_of("elementwise", tmp_path, elementwise_attn_output_gate=False)
    with pytest.raises(ValueError, match=r"q_proj.weight the shape \(96, 40\), config.json asks for \(48, 40\)"):
        load(folder)
    with pytest.raises(ValueError, match=r"layout L3 is given, but config.json declares no gate; set one of its keys"):
        load(folder, layout="L3")
