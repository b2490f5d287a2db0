"""The mixture of experts against loops over tokens and experts; the grouped kernel against the plain product."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gatelab.model import moe
from gatelab.model.moe import (
    MixtureOfExperts,
    balance_loss,
    grouped_linear,
    move_rows,
    place,
    router_z_loss,
    weighted_sum_of_experts,
)
from gatelab.model.settings import MixtureSettings

B, T, D, E, K, F_EXPERT = 3, 17, 40, 5, 2, 24


def random_mixture(dtype: torch.dtype = torch.float64, **changes: object) -> MixtureOfExperts:
    settings = MixtureSettings(**{"num_experts": E, "experts_per_token": K, "expert_width": F_EXPERT, **changes})  # type: ignore[arg-type]
    mixture = MixtureOfExperts(settings, D).to(dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in [*mixture.parameters(), *mixture.buffers()]:
        parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return mixture


def random_states(dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    opened = gate @ x
    return down @ (opened / (1 + torch.exp(-opened)) * (up @ x))


def mixture_by_loops(mixture: MixtureOfExperts, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output (B T D), balance loss, z-loss and chosen experts (B T k), one token and one expert at a time."""
    outputs, probabilities, log_partitions, chosen = [], [], [], []
    for token in x.flatten(0, 1):
        logits = torch.stack([row @ token for row in mixture.gate.weight])
        exponentials = torch.exp(logits)
        is_softmax = mixture.router == "softmax"
        scores = exponentials / exponentials.sum() if is_softmax else 1 / (1 + 1 / exponentials)
        order = scores if mixture.selection_bias is None else scores + mixture.selection_bias
        best = sorted(range(E), key=lambda e: -order[e].item())[: mixture.experts_per_token]
        total = sum(scores[e] for e in best) if mixture.renormalize else 1.0
        output = torch.zeros_like(token)
        for e in best:
            gate, up = mixture.experts.gate_up_proj[e][:F_EXPERT], mixture.experts.gate_up_proj[e][F_EXPERT:]
            weight = mixture.routed_scale * scores[e] / total
            output = output + weight * swiglu(token, gate, up, mixture.experts.down_proj[e])
        if mixture.shared_expert is not None:
            shared = mixture.shared_expert
            weights = (shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight)
            update = swiglu(token, *weights)
            if mixture.shared_expert_gate is not None:
                update = update / (1 + torch.exp(-mixture.shared_expert_gate.weight[0] @ token))
            output = output + update
        outputs.append(output)
        probabilities.append(scores / scores.sum())
        log_partitions.append(torch.log(exponentials.sum()))
        chosen.append(best)
    num_tokens = len(outputs)
    balance = sum(
        sum(e in best for best in chosen) / num_tokens * sum(p[e] for p in probabilities) / num_tokens for e in range(E)
    )
    z_loss = sum(log_partition**2 for log_partition in log_partitions) / num_tokens
    assert isinstance(balance, Tensor) and isinstance(z_loss, Tensor)
    choices = torch.tensor(chosen).view(B, T, -1)
    return torch.stack(outputs).view_as(x), E / mixture.experts_per_token * balance, z_loss, choices


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"renormalize": False},
        {"shared_width": 28},
        {"experts_per_token": 1},
        {"experts_per_token": E},
        {"shared_width": 28, "shared_gate": True},
        {"router": "sigmoid"},
        {"router": "sigmoid", "renormalize": False, "routed_scale": 2.5},
        {"router": "sigmoid", "selection_bias": True, "routed_scale": 0.5},
        {"selection_bias": True},
    ],
    ids=[
        "renormalised",
        "not renormalised",
        "shared expert",
        "top-1",
        "all experts",
        "gated shared expert",
        "sigmoid",
        "sigmoid, not renormalised",
        "sigmoid, biased choice",
        "biased choice",
    ],
)
def test_outputs_losses_and_all_gradients_equal_loops(changes: dict[str, object]) -> None:
    mixture, x = random_mixture(**changes), random_states().requires_grad_()
    output, statistics = mixture(x)
    statistics = type(statistics)(*(rows[None] for rows in statistics))  # one layer
    balance, z_loss = balance_loss(statistics), router_z_loss(statistics)
    expected, expected_balance, expected_z_loss, choices = mixture_by_loops(mixture, x)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(balance, expected_balance, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(z_loss, expected_z_loss, rtol=1e-10, atol=1e-10)
    assert statistics.assignments[0].tolist() == [(choices == e).sum().item() for e in range(E)]
    assert statistics.num_tokens.tolist() == [B * T]

    upstream = random_states(seed=2)
    wanted = [x, *mixture.parameters()]
    actual_gradients = torch.autograd.grad((output * upstream).sum() + 3 * balance + 2 * z_loss, wanted)
    expected_gradients = torch.autograd.grad(
        (expected * upstream).sum() + 3 * expected_balance + 2 * expected_z_loss, wanted
    )
    for actual, wished in zip(actual_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(actual, wished, rtol=1e-9, atol=1e-9)


def test_the_selection_bias_chooses_and_weighs_nothing() -> None:
    mixture, x = random_mixture(router="sigmoid", selection_bias=True), random_states()
    bias = mixture.selection_bias
    assert bias is not None and "selection_bias" in mixture.state_dict()
    bias.copy_(torch.tensor([0.0, 9.0, 0.0, 0.0, 8.0]))
    output, statistics = mixture(x)
    assert statistics.assignments.tolist() == [0, B * T, 0, 0, B * T]
    bias += 100
    assert torch.equal(mixture(x)[0], output), "an equal bias for all changes nothing"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_sigmoid_scores_that_vanish_do_no_harm(dtype: torch.dtype) -> None:
    mixture = random_mixture(dtype, router="sigmoid")
    mixture.gate.weight.data.fill_(-100.0)
    x = random_states(dtype).abs().requires_grad_()
    output, statistics = mixture(x)
    (output.sum() + statistics.probabilities.sum()).backward()
    assert x.grad is not None and output.isfinite().all() and x.grad.isfinite().all()


@pytest.fixture
def grouped_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Row counts of the calls of the grouped kernel."""
    calls, kernel = [], F.grouped_mm

    def counted(x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        calls.append(tuple(offs.tolist()))
        return kernel(x, weight, offs=offs)

    monkeypatch.setattr(moe.F, "grouped_mm", counted)
    return calls


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_grouped_kernel_equals_the_loop(
    dtype: torch.dtype, tolerance: float, grouped_calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 16 bytes take the kernel; it is compared with float64, which never does."""
    monkeypatch.setattr(moe, "_MULTIPLE", 2)
    mixture = random_mixture(dtype)
    exact = random_mixture()
    exact.load_state_dict(mixture.state_dict())
    x = random_states(dtype).requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    chosen = torch.randn(B * T, E, generator=torch.Generator().manual_seed(0)).topk(K).indices
    weights = torch.rand(B * T, K, generator=torch.Generator().manual_seed(1)).to(dtype)
    upstream = random_states(dtype, seed=2)

    output = weighted_sum_of_experts(mixture.experts, x.flatten(0, 1), weights, chosen, range(E), E).view_as(x)
    assert len(grouped_calls) == 2 and len(set(grouped_calls)) == 1
    if dtype == torch.bfloat16:
        assert all(end % 2 == 0 for end in grouped_calls[0])
    else:
        assert grouped_calls[0] == tuple(chosen.flatten().bincount(minlength=E).cumsum(0).tolist())
    expected = weighted_sum_of_experts(exact.experts, exact_x.flatten(0, 1), weights.double(), chosen, range(E), E)
    expected = expected.view_as(x)
    assert len(grouped_calls) == 2
    wanted = ["experts.gate_up_proj", "experts.down_proj"]
    ours = torch.autograd.grad(output, [x, *(mixture.get_parameter(name) for name in wanted)], upstream)
    theirs = torch.autograd.grad(expected, [exact_x, *(exact.get_parameter(n) for n in wanted)], upstream.double())
    for actual, wished in zip([output, *ours], [expected, *theirs], strict=True):
        assert actual.dtype == dtype
        assert ((actual - wished).abs().max() / wished.abs().max()).item() < tolerance


def placed_by_loops(chosen: Tensor, own: range, multiple: int) -> tuple[list[int], list[int]]:
    """The choice of each row, -1 for none, and the groups' ends."""
    choices, ends = [], []
    for expert in own:
        group = [number for number, choice in enumerate(chosen.flatten().tolist()) if choice == expert]
        choices += group + [-1] * (-len(group) % multiple)
        ends.append(len(choices))
    return choices, ends


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("own", [range(6), range(2), range(2, 5), range(5, 6)], ids=str)
def test_choices_are_placed_by_expert_and_in_their_order(own: range, multiple: int) -> None:
    chosen = torch.randn(23, 6, generator=torch.Generator().manual_seed(0)).topk(2).indices
    chosen[chosen == 3] = 5  # an expert without tokens
    choices, ends = placed_by_loops(chosen, own, multiple)
    placement = place(chosen, own, 6, multiple)
    num_rows = len(placement.choices)
    if len(own) == 6 and multiple > 1:
        assert num_rows == 48 + 6 * multiple and placement.ends[-1] == num_rows, "known before choices are"
        choices += [-1] * (num_rows - len(choices))
        ends[-1] = num_rows
    assert placement.ends.tolist() == ends
    assert placement.choices.tolist() == [choice if choice >= 0 else chosen.numel() for choice in choices]
    for choice, row in enumerate(placement.rows.flatten().tolist()):
        assert row == (choices.index(choice) if choice in choices else num_rows)


@pytest.mark.parametrize("own", [range(E), range(1, 3), range(3, 4)], ids=str)
def test_moved_rows_and_their_gradient_equal_indexing(own: range) -> None:
    chosen = torch.randn(B * T, E, generator=torch.Generator().manual_seed(0)).topk(K).indices
    chosen[chosen == 3] = 4  # so that the only expert of one case has no rows
    placement = place(chosen, own, E, multiple=4)
    x = random_states().flatten(0, 1).requires_grad_()
    with_zero = torch.cat([x, x.new_zeros(1, D)])
    moved = move_rows(x, placement.choices // K, placement.rows)
    expected = with_zero[placement.choices // K]
    assert torch.equal(moved, expected)
    upstream = torch.randn(moved.shape, generator=torch.Generator().manual_seed(1)).double()
    torch.testing.assert_close(*(torch.autograd.grad(out, x, upstream)[0] for out in (moved, expected)))
    back = move_rows(moved, placement.rows.flatten(), placement.choices[:, None])
    is_own = ((chosen >= own.start) & (chosen < own.stop)).flatten()
    assert torch.equal(back, x.repeat_interleave(K, 0) * is_own[:, None])
    assert torch.autograd.gradcheck(
        lambda rows: move_rows(rows, placement.rows.flatten(), placement.choices[:, None]),
        moved.detach().requires_grad_(),
    )


@pytest.mark.parametrize(
    ("num_inputs", "num_outputs", "dtype"),
    [(40, 54, torch.float32), (42, 48, torch.float32), (12, 16, torch.bfloat16), (40, 48, torch.float64)],
)
def test_sizes_that_the_kernel_refuses_take_the_loop(
    num_inputs: int, num_outputs: int, dtype: torch.dtype, grouped_calls: list[tuple[int, ...]]
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, num_inputs, generator=generator).to(dtype)
    weight = torch.randn(3, num_outputs, num_inputs, generator=generator).to(dtype)
    product = grouped_linear(x, weight, torch.tensor([4, 4, 9], dtype=torch.int32))
    assert not grouped_calls
    assert torch.equal(product, torch.cat([x[:4] @ weight[0].T, x[4:] @ weight[2].T]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_no_token_is_dropped_when_all_choose_one_expert(dtype: torch.dtype) -> None:
    """And the gradient of the experts without tokens is exactly zero."""
    mixture = random_mixture(dtype, experts_per_token=1)
    mixture.gate.weight.data.fill_(-1.0)[3] = 1.0
    x = random_states(dtype).abs()
    output, statistics = mixture(x)
    assert statistics.assignments.tolist() == [0, 0, 0, B * T, 0]
    gate, up = mixture.experts.gate_up_proj[3].chunk(2)
    expected = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), mixture.experts.down_proj[3])
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
    assert (output != 0).any(-1).all()
    output.sum().backward()
    for weight in (mixture.experts.gate_up_proj, mixture.experts.down_proj):
        assert weight.grad is not None
        moved = weight.grad.flatten(1).abs().amax(1)
        assert moved[3] > 0 and (moved[[0, 1, 2, 4]] == 0).all()


def test_one_expert_is_a_feedforward_layer() -> None:
    mixture, x = random_mixture(num_experts=1, experts_per_token=1), random_states()
    gate, up = mixture.experts.gate_up_proj[0].chunk(2)
    expected = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), mixture.experts.down_proj[0])
    torch.testing.assert_close(mixture(x)[0], expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_router_probabilities_are_float32_at_least(dtype: torch.dtype) -> None:
    output, statistics = random_mixture(dtype)(random_states(dtype))
    assert output.dtype == dtype
    assert {rows.dtype for rows in statistics} == {torch.promote_types(dtype, torch.float32)}
    assert statistics.probabilities.sum().item() == pytest.approx(B * T, rel=1e-6)


@pytest.mark.compile
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own, at graph breaks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_mixture_equals_the_plain_one(dtype: torch.dtype) -> None:
    """Compiled graphs hold the grouped kernel in bfloat16 alone; in float32 it runs between them."""
    mixture, x = random_mixture(dtype), random_states(dtype)
    plain, compiled = mixture(x)[0], torch.compile(mixture, dynamic=False)(x)[0]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    upstream = random_states(dtype, seed=2)
    wanted = list(mixture.parameters())
    ours = torch.autograd.grad(compiled, wanted, upstream)
    theirs = torch.autograd.grad(plain, wanted, upstream)
    for actual, wished in zip([compiled, *ours], [plain, *theirs], strict=True):
        assert ((actual - wished).abs().max() / wished.abs().max()).item() < tolerance
