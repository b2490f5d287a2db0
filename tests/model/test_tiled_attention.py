"""Attention by the kernel of our own, against loops in float64 and PyTorch's kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gatelab.model.attention import AttentionKernel, fused_attention
from gatelab.model.fused.tiled_attention import SOURCE, tiled_attention
from gatelab.train.parallel import compilation
from gatelab.train.parallel.native import build_library

pytestmark = pytest.mark.skipif(
    not compilation.has_cpp_compiler() or torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="there is no C++ compiler, or no processor that the kernel is for",
)

B, H, K, C, VALUE_SIZE = 3, 6, 2, 8, 10
# Of a tile's 64 queries and 256 keys: less than one, an odd number, one, several with a rest.
LENGTHS = (2, 17, 64, 333)


@pytest.fixture(scope="module")
def kernel() -> AttentionKernel:
    built = tiled_attention(build_library(SOURCE))
    if built is None:
        pytest.skip("the processor has no bfloat16 products")
    return built


def drawn(num_tokens: int, scale: float = 1.0) -> list[Tensor]:
    """Queries, keys, values and a gradient of the output."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((H, C), (K, C), (K, VALUE_SIZE), (H, VALUE_SIZE))
    return [
        (scale * torch.randn(B, num_tokens, *shape, generator=generator, dtype=torch.float64)).to(torch.bfloat16)
        for shape in shapes
    ]


def by_loops(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One query at a time, in float64."""
    rows = []
    for row in range(query.shape[0]):
        for token in range(query.shape[1]):
            for head in range(query.shape[2]):
                own = head * key.shape[2] // query.shape[2]
                logits = key[row, : token + 1, own] @ query[row, token, head] / query.shape[-1] ** 0.5
                rows.append(torch.softmax(logits, dim=0) @ value[row, : token + 1, own])
    return torch.stack(rows).view(*query.shape[:3], value.shape[-1])


def with_gradients(function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The output for the first three tensors, and their gradients for the last as its gradient."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, tensors[3])]


def own(kernel: AttentionKernel, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The kernel's output and gradients on the causal triangle."""
    return with_gradients(lambda *three: kernel(*three, None, True), tensors)


def errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    return [float((one.double() - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True)]


@pytest.mark.parametrize("scale", [1.0, 5.0])
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_it_is_as_near_to_loops_in_float64_as_pytorchs_kernel(
    kernel: AttentionKernel, num_tokens: int, scale: float
) -> None:
    """Logits of some hundreds at the larger scale, where rounding inputs' products weighs more."""
    tensors = drawn(num_tokens, scale)
    exact = with_gradients(by_loops, [tensor.double() for tensor in tensors])
    ours = errors(own(kernel, tensors), exact)
    theirs = errors(with_gradients(lambda *three: fused_attention(*three, None, True), tensors), exact)
    assert all(0 < error < 0.004 * scale for error in ours), ours
    assert all(one < 1.2 * other for one, other in zip(ours, theirs, strict=True)), (ours, theirs)


def test_channels_need_not_lie_side_by_side_nor_tokens_one_after_another(kernel: AttentionKernel) -> None:
    tensors = drawn(17)
    expected = own(kernel, tensors)
    wide = torch.cat((*tensors[1:3], tensors[1]), dim=-1)  # keys and values are parts of one tensor
    parts = [tensors[0].transpose(-1, -2).contiguous().transpose(-1, -2), wide[..., :C], wide[..., C : C + VALUE_SIZE]]
    assert not any(part.is_contiguous() for part in parts)
    found = own(kernel, [*parts, tensors[3]])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_no_later_token_is_seen(kernel: AttentionKernel) -> None:
    query, key, value, _ = drawn(333)
    before = kernel(query, key, value, None, True)
    for tensor in (query, key, value):
        tensor[:, 200:] = 1e4
    assert torch.equal(kernel(query, key, value, None, True)[:, :200], before[:, :200])


def test_what_is_not_finite_stays_so(kernel: AttentionKernel) -> None:
    """And is forgotten by the next call, whose memory may be the same."""
    tensors = drawn(333)
    expected = own(kernel, tensors)
    for number in range(4):
        spoiled = [tensor.clone() for tensor in tensors]
        spoiled[number][0, 0] = float("nan")
        found = own(kernel, spoiled)
        assert found[number].isnan().any() if number < 3 else found[1].isnan().any()
        assert not any(tensor[1:].isnan().any() for tensor in found)
    for one, other in zip(own(kernel, tensors), expected, strict=True):
        assert torch.equal(one, other)


def test_bits_do_not_depend_on_threads(kernel: AttentionKernel) -> None:
    tensors, before = drawn(333), torch.get_num_threads()
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(own(kernel, tensors))
    torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_operators_keep_pytorchs_contract(kernel: AttentionKernel) -> None:
    """Shapes without values, gradients, and no hidden changes, as torch.compile relies on."""
    tensors = [tensor.requires_grad_() for tensor in drawn(17)[:3]]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.gatelab.tiled_attention.default, tuple(tensors), test_utils=tests)


def test_what_is_not_its_own_is_pytorchs(kernel: AttentionKernel) -> None:
    query, key, value, _ = drawn(17)
    odd = value[..., :5]
    mask = torch.ones(B, 1, 17, 17, dtype=torch.bool)
    cases: list[tuple[Any, ...]] = [
        (query, key, value, None, False),
        (query, key, value, mask, True),
        (query[:, -1:], key, value, None, True),
        (query, key, odd, None, True),
        (query.float(), key.float(), value.float(), None, True),
    ]
    for case in cases:
        assert torch.equal(kernel(*case), fused_attention(*case))
    assert not torch.equal(kernel(query, key, value, None, True), fused_attention(query, key, value, None, True))


class TestBuilding:
    def test_it_is_built_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
        source = tmp_path / "answer.cpp"
        source.write_text('extern "C" int answer() { return 42; }\n')
        first = build_library(source)
        written = first.stat().st_mtime_ns
        assert build_library(source) == first and first.stat().st_mtime_ns == written
        source.write_text('extern "C" int answer() { return 43; }\n')
        assert build_library(source) != first

    def test_the_compilers_words_are_shown(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
        source = tmp_path / "wrong.cpp"
        source.write_text("int answer() { return nothing; }\n")
        with pytest.raises(RuntimeError, match=r"g\+\+ .* ended with status 1:\n[^$]*nothing. was not declared"):
            build_library(source)
        assert not list((tmp_path / "gatelab").glob("*wrong*"))

    def test_where_it_cannot_be_built_attention_is_pytorchs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(source: Path) -> Path:
            raise RuntimeError("g++ ended with status 1:\nno space left")

        monkeypatch.setattr(compilation, "build_library", fail)
        with pytest.warns(UserWarning, match=r"attention is left to PyTorch's slower kernel, .*\nno space left"):
            assert compilation.attention_kernel.__wrapped__() is fused_attention
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
        assert compilation.attention_kernel.__wrapped__() is fused_attention
