"""A decoder that sees both sides, through the loss of hidden tokens: against loops, gradients too."""

from __future__ import annotations

import pytest
import torch
from decoder_by_loops import decoder_by_loops
from tiny_decoders import B, T, V, tiny_decoder, tiny_settings, token_ids
from torch import Tensor

from gatelab.data.loader import IGNORED, Batch
from gatelab.data.masking import Vocabulary, masked_window
from gatelab.data.settings import MaskingSettings
from gatelab.model.decoder import Decoder
from gatelab.model.perplexity import token_nats
from gatelab.train.settings import TrainSettings
from gatelab.train.step import take_step

IDS = Vocabulary(cls=0, sep=V - 2, mask=V - 1, num_text_ids=V - 2)


def masked_batch() -> Batch:
    texts = token_ids(num_tokens=T - 2).clamp(1, V - 3).numpy()
    settings = MaskingSettings(probability=0.4)
    windows = [masked_window(text, settings, IDS, [row]) for row, text in enumerate(texts)]
    return Batch(*(torch.stack([torch.from_numpy(window[part]) for window in windows]) for part in (0, 1)))


def loss_by_loops(decoder: Decoder, batch: Batch) -> Tensor:
    """The mean of -ln p over the targets, one by one."""
    logits, nats = decoder_by_loops(decoder, batch.inputs), []
    for row in range(B):
        for place in range(T):
            target = int(batch.targets[row, place])
            if target != IGNORED:
                exps = [logits[row, place, word].exp() for word in range(V)]
                nats.append(torch.stack(exps).sum().log() - logits[row, place, target])
    return torch.stack(nats).mean()


@pytest.mark.parametrize("gate", ["none", "sdpa_elementwise", "sdpa_headwise"])
def test_the_loss_of_hidden_tokens_and_its_gradients_are_those_of_loops(gate: str) -> None:
    decoder, batch = tiny_decoder(tiny_settings(gate, causal=False)), masked_batch()
    expected = loss_by_loops(decoder, batch)
    gradients = torch.autograd.grad(expected, list(decoder.parameters()))
    token_nats(decoder(batch.inputs), batch.targets).sum().div((batch.targets != IGNORED).sum()).backward()
    for (name, parameter), wanted in zip(decoder.named_parameters(), gradients, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-9, atol=1e-12, msg=name)
    decoder.zero_grad()

    def sum_of_nats(state: Tensor, targets: Tensor) -> Tensor:
        return token_nats(decoder.logits(state), targets).sum()

    optimizer = torch.optim.SGD(decoder.parameters(), lr=0.0)
    figures = take_step(decoder, optimizer, batch, sum_of_nats, TrainSettings(sequences_per_step=B))
    assert figures.loss == pytest.approx(expected.item(), rel=1e-12)
    assert figures.gradient_norm == pytest.approx(torch.stack([g.norm() for g in gradients]).norm().item(), rel=1e-6)


def test_the_causal_triangle_gives_another_loss() -> None:
    batch = masked_batch()
    losses = [loss_by_loops(tiny_decoder(tiny_settings(causal=causal)), batch).item() for causal in (True, False)]
    assert abs(losses[0] - losses[1]) > 1e-2
