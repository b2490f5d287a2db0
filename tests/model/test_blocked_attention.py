"""Attention by batched products in blocks of queries, against loops and the fused kernel."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from gatelab.model.attention import fused_attention
from gatelab.model.fused import blocked_attention as blocks
from gatelab.model.fused.blocked_attention import blocked_attention, causal_attention_in_blocks

B, T, H, K, C, VALUE_SIZE = 3, 17, 6, 2, 8, 5
SHORT = 7  # tokens of a block in these tests: 17 are two blocks and a shorter one


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", SHORT)


def drawn(dtype: torch.dtype = torch.float64, num_tokens: int = T, scale: float = 1.0) -> list[Tensor]:
    """Queries, keys, values and a gradient of the output."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((H, C), (K, C), (K, VALUE_SIZE), (H, VALUE_SIZE))
    return [
        scale * torch.randn(B, num_tokens, *shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in shapes
    ]


def by_loops(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One query of one head at a time."""
    rows = []
    for row in range(query.shape[0]):
        for token in range(query.shape[1]):
            for head in range(query.shape[2]):
                own = head * key.shape[2] // query.shape[2]
                logits = key[row, : token + 1, own] @ query[row, token, head] / query.shape[-1] ** 0.5
                rows.append(torch.softmax(logits, dim=0) @ value[row, : token + 1, own])
    return torch.stack(rows).view(*query.shape[:3], value.shape[-1])


def with_gradients(function: object, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The output for the first three tensors, and their gradients for the last as its gradient."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    assert callable(function)
    output = function(*leaves)
    output.backward(tensors[3])
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("num_tokens", [1, SHORT - 1, SHORT, T])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_output_and_gradients_equal_loops(num_tokens: int, scale: float) -> None:
    """Logits of some thousands at the larger scale, which overflow without the maximum taken off."""
    tensors = drawn(num_tokens=num_tokens, scale=scale)
    for found, expected in zip(
        with_gradients(causal_attention_in_blocks, tensors), with_gradients(by_loops, tensors), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10 * scale)


def test_in_bfloat16_it_is_as_near_to_float64_as_the_fused_kernel() -> None:
    tensors = drawn(torch.bfloat16)
    exact = with_gradients(by_loops, [tensor.double() for tensor in tensors])

    def errors(function: object) -> list[float]:
        found = with_gradients(function, tensors)
        return [float((one.double() - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True)]

    ours = errors(causal_attention_in_blocks)
    fused = errors(lambda query, key, value: fused_attention(query, key, value, None, True))
    assert all(one < 1.5 * other for one, other in zip(ours, fused, strict=True)), (ours, fused)
    assert all(error > 0 for error in ours)


def is_in_blocks(*tensors: Tensor, mask: Tensor | None = None, causal: bool = True) -> bool:
    """Whether compiled code computes it in blocks."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    torch.compile(blocked_attention, backend=backend)(*tensors, mask, causal)
    names = " ".join(str(node.target) for graph in graphs for node in graph.graph.nodes)
    assert ("scaled_dot_product_attention" in names) != ("autograd_function" in names), names
    return "autograd_function" in names


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # PyTorch looks at it
def test_only_the_causal_triangle_in_bfloat16_is_computed_in_blocks() -> None:
    query, key, value, _ = (tensor.requires_grad_() for tensor in drawn(torch.bfloat16))
    assert is_in_blocks(query, key, value)
    assert not is_in_blocks(query, key, value, causal=False)
    assert not is_in_blocks(query, key, value, mask=torch.ones(B, 1, T, T, dtype=torch.bool))
    assert not is_in_blocks(query.detach()[:, -SHORT:], key, value, mask=torch.ones(B, 1, SHORT, T, dtype=torch.bool))
    assert not is_in_blocks(*(tensor.float() for tensor in (query, key, value)))


def test_uncompiled_it_is_the_fused_kernel() -> None:
    query, key, value, _ = drawn(torch.bfloat16)
    assert torch.equal(blocked_attention(query, key, value, None, True), fused_attention(query, key, value, None, True))
