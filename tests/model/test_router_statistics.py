"""What is counted, by whom, and how often: balance losses, padding, pieces of a batch, recomputation."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from operator import add

import pytest
import torch
from tiny_decoders import MIXTURE, tiny_decoder, tiny_settings, token_ids
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gatelab.model.decoder import Decoder
from gatelab.model.masks import PADDING
from gatelab.model.moe import (
    MixtureOfExperts,
    RouterStatistics,
    balance_loss,
    pooled_balance_loss,
    router_z_loss,
)
from gatelab.model.settings import MixtureSettings

E, K = MIXTURE.num_experts, MIXTURE.experts_per_token


def statistics_of(decoder: Decoder, ids: Tensor, documents: Tensor | None = None) -> RouterStatistics:
    router = decoder.hidden(ids, documents).router
    assert router is not None
    return router


def sum_of(statistics: Iterable[RouterStatistics]) -> RouterStatistics:
    total, *rest = statistics
    for one in rest:
        total = RouterStatistics(*map(add, total, one))
    return total


def assert_equal_statistics(actual: RouterStatistics, expected: RouterStatistics) -> None:
    assert torch.equal(actual.assignments, expected.assignments)
    assert torch.equal(actual.num_tokens, expected.num_tokens)
    torch.testing.assert_close(actual.probabilities, expected.probabilities, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(actual.squared_log_partition, expected.squared_log_partition, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("experts_per_token", [1, 2, 3])
def test_balance_loss_is_one_at_perfect_balance(experts_per_token: int) -> None:
    """Token t prefers expert t, then t + 1 and so on, so each expert is chosen equally often."""
    settings = MixtureSettings(num_experts=E, experts_per_token=experts_per_token, expert_width=8)
    mixture = MixtureOfExperts(settings, width=E).double()
    torch.nn.init.eye_(mixture.gate.weight)
    preferences = torch.stack([torch.arange(E, 0, -1, dtype=torch.float64).roll(t) for t in range(E)])
    for weight in mixture.experts.parameters():
        torch.nn.init.zeros_(weight)
    one_layer = mixture(preferences[None])[1]
    statistics = RouterStatistics(*(torch.stack((rows, rows)) for rows in one_layer))
    assert balance_loss(statistics).item() == pytest.approx(1.0, abs=1e-12)
    assert pooled_balance_loss(statistics).item() == pytest.approx(experts_per_token, abs=1e-12)
    tilted = statistics._replace(assignments=statistics.assignments * torch.tensor([2.0, 1, 1, 1, 0]))
    skewed = tilted._replace(probabilities=statistics.probabilities * torch.tensor([2.0, 1, 1, 1, 0]))
    assert balance_loss(skewed).item() > 1.3


def test_each_layer_is_balanced_by_itself() -> None:
    """Two layers that lean on opposite experts are balanced when pooled, and far from it each by itself."""
    shares = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    tokens = torch.tensor([10.0, 10.0], dtype=torch.float64)
    statistics = RouterStatistics(10 * shares, 10 * shares, tokens, tokens)
    assert balance_loss(statistics).item() == 2.0
    assert pooled_balance_loss(statistics).item() == 1.0


def test_losses_equal_loops_over_layers_and_experts() -> None:
    statistics = statistics_of(tiny_decoder(tiny_settings(mixture=MIXTURE, num_layers=3)), token_ids())
    num_tokens = 3 * 17
    per_layer = [
        E
        / K
        * sum(
            (statistics.assignments[layer, e] / num_tokens * statistics.probabilities[layer, e] / num_tokens).item()
            for e in range(E)
        )
        for layer in range(3)
    ]
    assert balance_loss(statistics).item() == pytest.approx(sum(per_layer) / 3, rel=1e-12)
    assert len({round(loss, 3) for loss in per_layer}) == 3
    z_losses = [(statistics.squared_log_partition[layer] / num_tokens).item() for layer in range(3)]
    assert router_z_loss(statistics).item() == pytest.approx(sum(z_losses) / 3, rel=1e-12)


def test_statistics_of_parts_add_up_to_those_of_the_whole() -> None:
    decoder, ids = tiny_decoder(tiny_settings("sdpa_headwise", mixture=MIXTURE)), token_ids()
    whole = statistics_of(decoder, ids)
    parts = [statistics_of(decoder, rows) for rows in ids.split([1, 2])]
    assert_equal_statistics(sum_of(parts), whole)


def test_global_frequencies_make_the_loss_of_pieces_that_of_the_whole() -> None:
    """Frequencies over the global batch, probabilities of each piece: mean loss and gradients are the whole batch's."""
    decoder, ids = tiny_decoder(tiny_settings(mixture=MIXTURE)), token_ids(num_rows=4)
    routers = [layer.mlp.gate.weight for layer in decoder.model.layers]
    whole = statistics_of(decoder, ids)
    expected = balance_loss(whole)
    frequencies = whole.assignments / whole.num_tokens[:, None]
    pieces = [statistics_of(decoder, rows) for rows in ids.split(2)]
    actual = sum(balance_loss(piece, frequencies) for piece in pieces) / 2
    assert isinstance(actual, Tensor)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    local = sum(balance_loss(piece) for piece in pieces) / 2
    assert abs(local.item() - expected.item()) > 1e-3, "the pieces' own frequencies give another loss"
    for ours, theirs in zip(torch.autograd.grad(actual, routers), torch.autograd.grad(expected, routers), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_padding_is_never_counted() -> None:
    decoder, ids = tiny_decoder(tiny_settings("sdpa_headwise", mixture=MIXTURE)), token_ids()
    lengths = (3, 17, 9)
    documents = torch.tensor([[PADDING] * (17 - length) + [0] * length for length in lengths])
    solo = sum_of(statistics_of(decoder, ids[row : row + 1, 17 - n :]) for row, n in enumerate(lengths))
    assert_equal_statistics(statistics_of(decoder, ids, documents), solo)
    assert solo.num_tokens.tolist() == [29, 29] and solo.assignments.sum(1).tolist() == [58, 58]


def test_a_batch_of_nothing_but_padding_costs_nothing() -> None:
    decoder, ids = tiny_decoder(tiny_settings(mixture=MIXTURE)), token_ids()
    statistics = statistics_of(decoder, ids, torch.full_like(ids, PADDING))
    losses = (balance_loss(statistics), pooled_balance_loss(statistics), router_z_loss(statistics))
    assert [loss.item() for loss in losses] == [0.0, 0.0, 0.0]


def test_padding_has_no_part_in_the_gradient_of_the_losses() -> None:
    decoder, ids = tiny_decoder(tiny_settings(mixture=MIXTURE)), token_ids()
    documents = torch.tensor([[0] * 12 + [PADDING] * 5]).expand_as(ids)
    parameters = list(decoder.parameters())

    def gradients(*arguments: Tensor) -> tuple[Tensor, ...]:
        statistics = statistics_of(decoder, *arguments)
        loss = balance_loss(statistics) + router_z_loss(statistics)
        return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)

    for padded, plain in zip(gradients(ids, documents), gradients(ids[:, :12]), strict=True):
        torch.testing.assert_close(padded, plain, rtol=1e-9, atol=1e-12)


def test_recomputation_counts_nothing_twice() -> None:
    """Layers whose forward pass runs again in the backward pass: same statistics, losses and gradients, bit for bit."""

    def step(decoder: Decoder) -> tuple[RouterStatistics, dict[str, Tensor]]:
        hidden = decoder.hidden(token_ids())
        assert hidden.router is not None
        loss = hidden.state.square().mean() + 3 * balance_loss(hidden.router) + 2 * router_z_loss(hidden.router)
        loss.backward()
        return hidden.router, {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}

    settings = tiny_settings("sdpa_elementwise", mixture=MIXTURE)
    plain, recomputed = tiny_decoder(settings, torch.float32), tiny_decoder(settings, torch.float32)
    calls = []
    for layer in recomputed.model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, arguments: calls.append(module))
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    statistics, gradients = step(recomputed)
    expected_statistics, expected_gradients = step(plain)
    assert len(calls) == 4, "each of the two layers ran twice"
    assert all(map(torch.equal, statistics, expected_statistics))
    assert gradients.keys() == expected_gradients.keys()
    assert all(torch.equal(gradients[name], expected_gradients[name]) for name in gradients)


def test_decoders_without_experts_have_no_statistics() -> None:
    assert tiny_decoder(tiny_settings()).hidden(token_ids()).router is None
