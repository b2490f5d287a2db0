"""Gates of foreign models: read where the family is known, recovered from outside everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

pytest.importorskip("transformers")

from family_comparison import listen
from tiny_families import HEAD_SIZE, HEADS, KV_HEADS, WIDTH, batch, build

from gatelab.diagnose.calls import AttentionCall
from gatelab.interop import probe
from gatelab.interop.gate_recovery import recover_gate

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def qwen_gate(projected: Tensor) -> Tensor:
    """Head by head, C rows of the query and then C of the gate."""
    return torch.sigmoid(projected.view(*projected.shape[:2], HEADS, 2, HEAD_SIZE)[..., 1, :])


def elementwise(projected: Tensor) -> Tensor:
    return torch.sigmoid(projected.view(*projected.shape[:2], HEADS, HEAD_SIZE))


# Family -> layer, projection, the projection's output to scores, the activation's name.
GATED: dict[str, tuple[int, str, Callable[[Tensor], Tensor], str]] = {
    "qwen3_next": (1, "q_proj", qwen_gate, "sigmoid"),
    "qwen3_5": (1, "q_proj", qwen_gate, "sigmoid"),
    "afmoe": (2, "gate_proj", elementwise, "sigmoid"),
    "laguna": (1, "g_proj", lambda projected: softplus(projected)[..., None], "softplus"),
    "lfm3": (2, "g_proj", lambda projected: torch.sigmoid(projected)[..., None], "sigmoid"),
}


def measured_gate(family: str, left_padded: bool) -> tuple[AttentionCall, Tensor]:
    """One layer's call, and its gate computed here from the projection's output."""
    layer, name, to_scores, _ = GATED[family]
    model = build(family)
    tokens, mask = batch(left_padded)
    seen: list[Tensor] = []
    projection = getattr(model.model.layers[layer].self_attn, name)
    projection.register_forward_hook(lambda module, inputs, output: seen.append(output))
    _, listener = listen(model, tokens, attention_mask=mask)
    return listener.calls[layer], to_scores(seen[0])


@pytest.mark.parametrize("left_padded", [False, True], ids=["unpadded", "left_padded"])
@pytest.mark.parametrize("family", GATED)
def test_known_gates_are_read(family: str, left_padded: bool) -> None:
    call, expected = measured_gate(family, left_padded)
    torch.testing.assert_close(call.scores["sdpa_output"], expected, atol=1e-7, rtol=0)
    assert call.activations == {"sdpa_output": GATED[family][-1]}


@pytest.mark.parametrize("left_padded", [False, True], ids=["unpadded", "left_padded"])
@pytest.mark.parametrize("family", GATED)
def test_unknown_gates_are_recovered(family: str, left_padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "KNOWN_GATES", {})
    call, expected = measured_gate(family, left_padded)
    scores, real = call.scores["sdpa_output"], batch(left_padded)[1].bool()
    assert scores.shape == expected.shape
    assert scores.isfinite().all()
    torch.testing.assert_close(scores[real], expected[real], atol=1e-6, rtol=1e-6)
    assert call.activations == {}
    assert call.gated_output is not None
    torch.testing.assert_close(call.gated_output[real], (call.output * expected)[real], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "opt", "deepseek_v3", "gpt_oss"])
def test_ungated_models_have_no_gate(family: str) -> None:
    _, listener = listen(build(family), batch(False)[0])
    assert [call.scores for call in listener.calls.values()] == [{}, {}, {}]
    assert [call.gated_output for call in listener.calls.values()] == [None, None, None]


def test_a_norm_before_the_output_projection_is_no_gate() -> None:
    _, listener = listen(build("bitnet"), batch(False)[0])
    call = listener.calls[1]
    assert call.scores == {}
    assert call.gated_output is not None
    square = call.gated_output.flatten(2).square().mean(-1)
    torch.testing.assert_close(square, torch.ones_like(square), atol=1e-3, rtol=0)


def attention_returns(model: Any, attention: Any) -> tuple[Tensor, AttentionCall]:
    seen: list[Tensor] = []
    attention.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    _, listener = listen(model, batch(False)[0])
    return seen[0], listener.calls[0]


def test_the_output_projection_is_found() -> None:
    llama, gpt2 = build("llama"), build("gpt2")
    returned, call = attention_returns(llama, llama.model.layers[0].self_attn)
    assert call.output_weight is not None
    assert call.value_weight is not None
    assert torch.equal(call.value_weight, llama.model.layers[0].self_attn.v_proj.weight)
    assert call.value_weight.shape == (KV_HEADS * HEAD_SIZE, WIDTH)
    torch.testing.assert_close(call.output.flatten(2) @ call.output_weight.T, returned, atol=1e-5, rtol=0)
    attention = gpt2.transformer.h[0].attn
    returned, call = attention_returns(gpt2, attention)
    assert call.output_weight is not None
    projected = call.output.flatten(2) @ call.output_weight.T + attention.c_proj.bias
    torch.testing.assert_close(projected, returned, atol=1e-5, rtol=0)
    assert call.value_weight is None


def example(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    output = torch.randn(2, 7, 3, 5, generator=generator).to(dtype)
    return output, torch.rand(2, 7, 3, 5, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_recovery_is_as_exact_as_the_dtype(dtype: torch.dtype) -> None:
    output, gate = example(dtype)
    recovered = recover_gate(output, output * gate)
    assert recovered is not None
    limit = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(recovered, gate.to(recovered.dtype), atol=0, rtol=limit)
    headwise = recover_gate(output, output * gate[..., :1])
    assert headwise is not None
    torch.testing.assert_close(headwise, gate[..., :1].to(headwise.dtype), atol=0, rtol=limit)
    assert recover_gate(output, output.clone()) is None


def test_outputs_of_zero_take_their_heads_mean() -> None:
    output, gate = example(torch.float32)
    output[0, 1, 2, 3], output[1, 2, 0] = 0.0, 0.0
    recovered = recover_gate(output, output * gate)
    assert recovered is not None
    others = torch.tensor([0, 1, 2, 4])
    torch.testing.assert_close(recovered[0, 1, 2, 3], gate[0, 1, 2, others].mean())
    assert recovered[1, 2, 0].tolist() == [1.0] * 5


def test_a_shut_gate_is_a_gate() -> None:
    output, _ = example(torch.float32)
    recovered = recover_gate(output, torch.zeros_like(output))
    assert recovered is not None
    assert recovered.shape == (2, 7, 3, 1)
    assert not recovered.any()
