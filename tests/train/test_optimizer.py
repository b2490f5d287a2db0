"""Which parameters are decayed, which have a rate of their own, and that AdamW is AdamW."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tiny_runs import MIXTURE, tiny_model

from gatelab.gates.spec import GateSpec
from gatelab.gates.variants import VARIANTS
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.settings import SinkSettings
from gatelab.train.optimizer import build_optimizer, parameter_groups, set_learning_rate
from gatelab.train.settings import OptimizerSettings

SETTINGS = OptimizerSettings(learning_rate=0.02, gate_learning_rate=0.007, weight_decay=0.3)
MODELS = {name: tiny_model(name) for name in VARIANTS} | {
    "mixture": tiny_model("sdpa_and_value", mixture=MIXTURE),
    "sandwich, own head": tiny_model("sdpa_low_rank", sandwich_norm=True, tied_head=False),
    "sink": tiny_model(sink=SinkSettings(kind="learned_key_value")),
    "sink of logits": tiny_model(sink=SinkSettings(kind="learned_logit")),
    "gate with bias": tiny_model(gates=(GateSpec(bias=1.0), GateSpec(position="key", rank=3, bias=0.5, layers=(1,)))),
}


def kind_by_name(name: str) -> tuple[bool, bool]:
    """(of a gate, decayed), read off the name alone."""
    in_gate = ".gates." in name
    is_norm = name.endswith(("norm.weight", "control.weight"))
    return in_gate, not (is_norm or name.endswith((".bias", ".logits")))


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_in_the_group_that_its_name_asks_for(name: str) -> None:
    decoder = Decoder(MODELS[name])
    names = {id(parameter): key for key, parameter in decoder.named_parameters()}
    groups = parameter_groups(decoder, SETTINGS)
    found = [(names.pop(id(p)), group) for group in groups for p in group["params"]]  # type: ignore[attr-defined]
    assert not names, "each is in one group, and pop allows no second"
    for key, group in found:
        in_gate, is_decayed = kind_by_name(key)
        assert group["peak"] == (0.007 if in_gate else 0.02), key
        assert group["weight_decay"] == (0.3 if is_decayed else 0.0), key
    assert sum(parameter.numel() for group in groups for parameter in group["params"]) == sum(  # type: ignore[attr-defined]
        parameter.numel() for parameter in decoder.parameters()
    )
    assert groups[0]["peak"] == 0.02, "the logged learning rate is that of no gate"


def test_what_is_not_decayed_is_there_to_be_told_apart() -> None:
    undecayed = {
        key
        for name in ("gate with bias", "sdpa_input_independent", "rms_norm_on_sdpa")
        for key, _ in Decoder(MODELS[name]).named_parameters()
        if not kind_by_name(key)[1]
    }
    layer = "model.layers.1."
    assert {
        f"{layer}self_attn.gates.sdpa_output.projection.bias",
        f"{layer}self_attn.gates.key.projection.up.bias",
        f"{layer}self_attn.gates.sdpa_output.logits",
        f"{layer}self_attn.control.weight",
        f"{layer}self_attn.q_norm.weight",
        f"{layer}input_layernorm.weight",
        "model.norm.weight",
    } <= undecayed
    assert not any(key.endswith("proj.weight") or "embed" in key for key in undecayed)


def test_gates_follow_the_schedule_at_their_own_rate_or_the_common_one() -> None:
    for settings, gate_rate in ((SETTINGS, 0.007), (OptimizerSettings(learning_rate=0.02), 0.02)):
        optimizer = build_optimizer(Decoder(tiny_model("sdpa_headwise")), settings)
        set_learning_rate(optimizer, 0.25)
        assert [group["lr"] for group in optimizer.param_groups] == [0.25 * 0.02] * 2 + [0.25 * gate_rate]


@pytest.mark.parametrize("decay", [None, 0.0, 0.05])
def test_gates_are_decayed_as_the_rest_or_as_they_are_told(decay: float | None) -> None:
    decoder = Decoder(MODELS["gate with bias"])
    names = {id(parameter): key for key, parameter in decoder.named_parameters()}
    for group in parameter_groups(decoder, SETTINGS.model_copy(update={"gate_weight_decay": decay})):
        for parameter in group["params"]:  # type: ignore[attr-defined]
            in_gate, is_decayed = kind_by_name(names[id(parameter)])
            of_gates = 0.3 if decay is None else decay
            assert group["weight_decay"] == ((of_gates if in_gate else 0.3) if is_decayed else 0.0)


def test_steps_are_those_of_adamw_written_out() -> None:
    """Loshchilov and Hutter 2019, algorithm 2, for every parameter by itself in float64."""
    decoder = Decoder(tiny_model("sdpa_elementwise", gates=(GateSpec(bias=0.3),))).double()
    initialize(decoder, seed=0)
    settings = SETTINGS.model_copy(update={"betas": (0.8, 0.9), "epsilon": 1e-3})
    optimizer = build_optimizer(decoder, settings)
    expected = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    first = {name: torch.zeros_like(p) for name, p in expected.items()}
    second = {name: torch.zeros_like(p) for name, p in expected.items()}
    generator = torch.Generator().manual_seed(1)
    for step, factor in enumerate((0.5, 1.0, 0.3), start=1):
        set_learning_rate(optimizer, factor)
        for name, parameter in decoder.named_parameters():
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = gradient.clone()
            in_gate, is_decayed = kind_by_name(name)
            rate = factor * (0.007 if in_gate else 0.02)
            first[name] = 0.8 * first[name] + 0.2 * gradient
            second[name] = 0.9 * second[name] + 0.1 * gradient**2
            mean, square = first[name] / (1 - 0.8**step), second[name] / (1 - 0.9**step)
            decay = 0.3 if is_decayed else 0.0
            expected[name] -= rate * (mean / (square.sqrt() + 1e-3) + decay * expected[name])
        optimizer.step()
    for name, parameter in decoder.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-12, atol=1e-14)


def test_state_survives_a_file(tmp_path: Path) -> None:
    """Saved, loaded into a fresh optimizer, and stepped: the same bits as one that went on."""

    def steps(decoder: Decoder, optimizer: torch.optim.Optimizer, seeds: list[int]) -> None:
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            set_learning_rate(optimizer, 1 / seed)
            for parameter in decoder.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()

    decoders = [Decoder(tiny_model("sdpa_elementwise")) for _ in range(2)]
    for decoder in decoders:
        initialize(decoder, seed=5)
    optimizers = [build_optimizer(decoder, SETTINGS) for decoder in decoders]
    steps(decoders[0], optimizers[0], [1, 2])
    torch.save(optimizers[0].state_dict(), tmp_path / "optimizer.pt")
    decoders[1].load_state_dict(decoders[0].state_dict())
    optimizers[1].load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    for decoder, optimizer in zip(decoders, optimizers, strict=True):
        steps(decoder, optimizer, [3, 4])
    assert all(torch.equal(a, b) for a, b in zip(decoders[0].parameters(), decoders[1].parameters(), strict=True))


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, -0.1), (0.9, math.nan)])
def test_impossible_betas_are_refused_before_any_work(betas: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"betas\.[01] cannot be"):
        OptimizerSettings.parse({"betas": betas})
