"""One optimizer step against naive oracles: pieces, unequal targets, clipping, experts, recomputation, divergence."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tiny_runs import MIXTURE, tiny_model
from torch import Tensor

from gatelab.data.loader import IGNORED, Batch
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.masks import PADDING
from gatelab.model.moe import RouterStatistics, balance_loss, router_z_loss
from gatelab.model.perplexity import token_nats
from gatelab.train.optimizer import build_optimizer, set_learning_rate
from gatelab.train.parallel import compilation
from gatelab.train.settings import TrainSettings
from gatelab.train.step import SumOfNats, take_step

B, T, V = 4, 17, 29


class Capturing(torch.optim.SGD):
    """Keeps the gradients that a step would use and changes nothing."""

    def __init__(self, decoder: Decoder):
        super().__init__(decoder.parameters(), lr=0.0)
        self.gradients: list[Tensor] = []

    def step(self, closure: None = None) -> None:
        self.gradients = [p.grad.clone() for group in self.param_groups for p in group["params"]]


def make_decoder(gate: str = "sdpa_elementwise", seed: int = 0, **changes: object) -> Decoder:
    decoder = Decoder(tiny_model(gate, init_std=0.2, **changes)).double()
    initialize(decoder, seed)
    return decoder


def make_batch(seed: int = 2) -> Batch:
    ids = torch.randint(V, (B, T + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(ids[:, :-1], ids[:, 1:].clone())


def loss_of(decoder: Decoder) -> SumOfNats:
    return lambda state, targets: token_nats(decoder.logits(state), targets).sum()


def make_settings(**changes: object) -> TrainSettings:
    return TrainSettings.parse({"sequences_per_step": B, "optimizer": {"clip_norm": None}, **changes})


def gradients_of(decoder: Decoder, batch: Batch, settings: TrainSettings) -> tuple[float, float, list[Tensor]]:
    optimizer = Capturing(decoder)
    figures = take_step(decoder, optimizer, batch, loss_of(decoder), settings)
    return figures.loss, figures.gradient_norm, optimizer.gradients


def naive_loss(decoder: Decoder, batch: Batch) -> Tensor:
    """-ln p of each scored target, sequence by sequence, over their number."""
    nats = []
    for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
        log_probabilities = decoder(inputs[None])[0].log_softmax(-1)
        nats += [-log_probabilities[t, target] for t, target in enumerate(targets.tolist()) if target != IGNORED]
    return torch.stack(nats).sum() / len(nats)


def assert_equal_gradients(found: list[Tensor], expected: list[Tensor] | tuple[Tensor, ...]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def with_targets(counts: list[int]) -> Batch:
    """A batch whose sequences have so many targets."""
    batch = make_batch()
    for row, count in enumerate(counts):
        batch.targets[row, count:] = IGNORED
    return batch


@pytest.mark.parametrize("counts", [[T] * B, [5, 0, 1, 0], [0, 0, 0, 3]], ids=["equal", "5 and 1", "one piece has all"])
@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_pieces_have_the_loss_and_gradients_of_the_whole(accumulation: int, counts: list[int]) -> None:
    decoder, batch = make_decoder(), with_targets(counts)
    expected = naive_loss(decoder, batch)
    gradients = torch.autograd.grad(expected, list(decoder.parameters()))
    loss, norm, found = gradients_of(decoder, batch, make_settings(accumulation=accumulation))
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    assert_equal_gradients(found, gradients)
    assert norm == pytest.approx(math.sqrt(sum(g.square().sum().item() for g in gradients)), rel=1e-12)


def test_documents_stay_with_their_pieces() -> None:
    """Document masks change the loss, and each piece has its own."""
    decoder, batch = make_decoder(), make_batch()
    documents = torch.stack([(torch.arange(T) >= start).long() for start in (3, 8, 11, 16)])
    masked = Batch(batch.inputs, batch.targets, documents)
    whole = gradients_of(decoder, masked, make_settings())
    pieces = gradients_of(decoder, masked, make_settings(accumulation=4))
    assert pieces[0] == pytest.approx(whole[0], rel=1e-12)
    assert_equal_gradients(pieces[2], whole[2])
    assert abs(whole[0] - gradients_of(decoder, batch, make_settings())[0]) > 1e-4


@pytest.mark.parametrize("clip_norm", [0.01, 1e3])
def test_gradients_are_clipped_by_their_global_norm(clip_norm: float) -> None:
    decoder, batch = make_decoder(), make_batch()
    _, norm, free = gradients_of(decoder, batch, make_settings())
    _, reported, clipped = gradients_of(decoder, batch, make_settings(optimizer={"clip_norm": clip_norm}))
    assert reported == norm, "the norm before clipping is reported"
    factor = min(1.0, clip_norm / (norm + 1e-6))
    assert (factor < 1) == (clip_norm < 1)
    assert_equal_gradients(clipped, [factor * gradient for gradient in free])


def infinite_loss(nats: Tensor) -> Tensor:
    return nats * math.inf


def infinite_gradient(nats: Tensor) -> Tensor:
    """The loss itself, whose gradient is not finite: that of a square root at 0."""
    return nats + (nats - nats.detach()).sqrt()


@pytest.mark.parametrize("spoil", [infinite_loss, infinite_gradient])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_nothing_is_updated_when_loss_or_gradient_is_not_finite(spoil: object, accumulation: int) -> None:
    decoder = make_decoder()
    settings = make_settings(accumulation=accumulation, optimizer={})
    optimizer = build_optimizer(decoder, settings.optimizer)
    set_learning_rate(optimizer, 1.0)
    nats = loss_of(decoder)
    assert take_step(decoder, optimizer, make_batch(), nats, settings).loss > 0
    weights = copy.deepcopy(decoder.state_dict())
    state = copy.deepcopy(optimizer.state_dict()["state"])

    def spoiled(hidden: Tensor, targets: Tensor) -> Tensor:
        return spoil(nats(hidden, targets))  # type: ignore[operator]

    figures = take_step(decoder, optimizer, make_batch(3), spoiled, settings)
    assert math.isfinite(figures.loss) == (spoil is infinite_gradient)
    assert not math.isfinite(figures.gradient_norm)
    assert all(torch.equal(weights[name], value) for name, value in decoder.state_dict().items())
    for number, before in state.items():
        after = optimizer.state_dict()["state"][number]
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in decoder.parameters())
    assert take_step(decoder, optimizer, make_batch(4), nats, settings).gradient_norm > 0
    assert any(not torch.equal(weights[name], value) for name, value in decoder.state_dict().items())


def mixture_settings(**changes: object) -> TrainSettings:
    return make_settings(balance_loss_weight=0.7, router_z_loss_weight=0.3, **changes)


def test_a_mixture_adds_its_losses_over_the_whole_batch() -> None:
    decoder, batch = make_decoder(mixture=MIXTURE), make_batch()
    router = decoder.hidden(batch.inputs).router
    assert router is not None
    loss = naive_loss(decoder, batch) + 0.7 * balance_loss(router) + 0.3 * router_z_loss(router)
    gradients = torch.autograd.grad(loss, list(decoder.parameters()))
    logged, _, found = gradients_of(decoder, batch, mixture_settings())
    assert_equal_gradients(found, gradients)
    assert logged == pytest.approx(naive_loss(decoder, batch).item(), rel=1e-12), "cross-entropy alone is logged"


@pytest.mark.parametrize("accumulation", [2, 4])
def test_pieces_of_a_mixture_are_balanced_by_all_that_was_routed_so_far(accumulation: int) -> None:
    """Expert frequencies are buffered over the step's pieces; the loop below keeps them token by token."""
    decoder, batch = make_decoder(mixture=MIXTURE), make_batch()
    E, k, rows = MIXTURE.num_experts, MIXTURE.experts_per_token, B // accumulation
    total = torch.zeros((), dtype=torch.float64)
    counts = torch.zeros(2, E, dtype=torch.float64)
    for first in range(0, B, rows):
        router = decoder.hidden(batch.inputs[first : first + rows]).router
        assert router is not None
        counts += router.assignments
        num_routed, num_here = (first + rows) * T, rows * T
        for layer in range(2):
            for expert in range(E):
                frequency = counts[layer, expert] / num_routed
                total = (
                    total + 0.7 * E / k * frequency * router.probabilities[layer, expert] / num_here / 2 / accumulation
                )
            total = total + 0.3 * router.squared_log_partition[layer] / num_here / 2 / accumulation
    gradients = torch.autograd.grad(naive_loss(decoder, batch) + total, list(decoder.parameters()))
    _, _, found = gradients_of(decoder, batch, mixture_settings(accumulation=accumulation))
    assert_equal_gradients(found, gradients)
    _, _, whole = gradients_of(decoder, batch, mixture_settings())
    assert any((a - b).abs().max() > 1e-6 for a, b in zip(found, whole, strict=True)), "the first pieces know less"


def test_pieces_with_unequal_padding_weigh_as_much_as_their_tokens() -> None:
    """The z-loss is a mean over tokens, so in pieces it equals that of the whole batch; one piece is all padding."""
    decoder, batch = make_decoder(mixture=MIXTURE), make_batch()
    documents = torch.zeros_like(batch.inputs)
    documents[0, :5] = PADDING
    documents[1] = PADDING
    padded = Batch(batch.inputs, batch.targets.masked_fill(documents == PADDING, IGNORED), documents)
    whole = gradients_of(decoder, padded, make_settings(router_z_loss_weight=0.3, balance_loss_weight=0.0))
    pieces = gradients_of(
        decoder, padded, make_settings(router_z_loss_weight=0.3, balance_loss_weight=0.0, accumulation=B)
    )
    assert_equal_gradients(pieces[2], whole[2])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_recomputation_counts_nothing_twice(accumulation: int) -> None:
    """The same loss, weights and router statistics bit for bit, although every layer ran twice as often."""
    seen: list[RouterStatistics] = []
    results = []
    for recompute in (False, True):
        decoder = make_decoder("sdpa_headwise", mixture=MIXTURE)
        calls: list[int] = []
        for layer in decoder.model.layers:
            layer.mlp.register_forward_pre_hook(lambda module, arguments, calls=calls: calls.append(1))
        if recompute:
            compilation.recompute_layers(decoder)
        settings = mixture_settings(accumulation=accumulation, optimizer={})
        optimizer = build_optimizer(decoder, settings.optimizer)
        set_learning_rate(optimizer, 1.0)
        losses = [take_step(decoder, optimizer, make_batch(seed), loss_of(decoder), settings) for seed in range(3)]
        router = decoder.hidden(make_batch().inputs).router
        assert router is not None
        seen.append(router)
        results.append((losses, decoder.state_dict(), len(calls)))
    (losses, weights, calls_without), (recomputed_losses, recomputed_weights, calls_with) = results
    forward_calls = 3 * accumulation * 2
    assert (calls_without, calls_with) == (forward_calls + 2, 2 * forward_calls + 2)
    assert losses == recomputed_losses
    assert all(torch.equal(weights[name], recomputed_weights[name]) for name in weights)
    assert all(map(torch.equal, *seen))


def test_the_learning_rate_of_the_step_is_reported() -> None:
    decoder = make_decoder()
    settings = make_settings(optimizer={"learning_rate": 0.02, "gate_learning_rate": 0.5})
    optimizer = build_optimizer(decoder, settings.optimizer)
    set_learning_rate(optimizer, 0.25)
    assert take_step(decoder, optimizer, make_batch(), loss_of(decoder), settings).learning_rate == 0.005
