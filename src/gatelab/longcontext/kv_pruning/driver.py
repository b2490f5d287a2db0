"""Reading a text through a key/value cache that is cut to a budget: once after reading, or again and again.

``with pruned(model, build_press("snapkv")) as reader:`` then ``reader.read(context)``, ``reader.cut(256)`` and
``reader.read(rest)``: the context is compressed before the rest is read. ``reader.stream(tokens, 256, step=1)`` holds
the budget while tokens come. Works for GateLab decoders and for decoders of transformers whose layers all have softmax
attention. Each key/value head keeps its own keys, at the rotation of their places in the text (nothing is re-rotated).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gatelab.diagnose.calls import AttentionCall
from gatelab.longcontext.kv_pruning.budgets import Allocation, allocate
from gatelab.longcontext.kv_pruning.cache import LayerKeys, Query
from gatelab.longcontext.kv_pruning.models import Run, connect
from gatelab.longcontext.kv_pruning.observed import Observed, Press
from gatelab.longcontext.kv_pruning.outputs import Oracle
from gatelab.longcontext.kv_pruning.presses import Fixed

NUM_RECENT = 32


@contextmanager
def pruned(
    model: nn.Module, press: Press | None, allocation: Allocation = "uniform", num_recent: int = NUM_RECENT
) -> Iterator[PrunedReader]:
    """A reader of ``model`` with an empty cache; afterwards the model is as it was.

    Every cut keeps the newest ``num_recent`` keys, but at most half of a head's budget, whatever the ``press`` says:
    with all presses alike, so that they differ in what they say of the rest. Without a press nothing can be cut.
    Raises ``ValueError`` for models that can't be pruned, and in ``read`` for a press that needs a gate which is not
    there.
    """
    reader = PrunedReader(press, allocation, num_recent)
    with connect(model, reader) as run:
        reader.run = run
        yield reader


class PrunedReader:
    """A model that reads a text piece by piece through one cache; see :func:`pruned`."""

    def __init__(self, press: Press | None, allocation: Allocation, num_recent: int):
        self.press, self.num_recent = press, num_recent
        self.allocation: Allocation = allocation
        self.layers: dict[int, LayerKeys] = {}
        self.length = 0
        self.run: Run | None = None
        self._observing = False

    @torch.no_grad()
    def read(self, tokens: Int[Tensor, "B T"], observe: bool = True) -> Float[Tensor, "B T V"]:
        """Logits of the next T tokens, whose keys the cache then holds too.

        The B texts are equally long: padding would be read, scored and kept as text. ``observe=False`` saves the scores
        of keys; nothing can be cut after it.
        """
        assert self.run is not None, "a reader reads inside the context of pruned(...)"
        self._observing = observe and self.press is not None
        logits = self.run(tokens, self.length)
        self.length += tokens.shape[1]
        for layer in self.layers.values():
            layer.forget_calls()
        return logits

    def cut(self, num_keys: int) -> None:
        """Cut the cache to ``num_keys`` keys a head on average; layers with a sliding window stay as they are."""
        if num_keys < 1:
            raise ValueError(f"a budget of {num_keys} keys leaves nothing to attend to; keep at least 1")
        if not self._observing:
            raise ValueError("the cache has no scores of its newest keys; read them with a press and observe=True")
        layers = [layer for layer in self.layers.values() if layer.window is None]
        if not layers:
            raise ValueError("all layers of the model have a sliding window; there is no cache to prune")
        held = torch.cat([torch.stack([head.held for head in layer.heads], dim=1) for layer in layers], dim=1)
        counts = torch.stack([self._allocate(layers, sample, row, num_keys) for sample, row in enumerate(held)])
        for layer, of_layer in zip(layers, counts.split([len(layer.heads) for layer in layers], dim=1), strict=True):
            layer.cut(of_layer, self.num_recent)

    def _allocate(
        self, layers: list[LayerKeys], sample: int, held: Int[Tensor, "N"], num_keys: int
    ) -> Int[Tensor, "N"]:
        """Keys for each head of one sample, those of all layers one after another."""
        gates = [layer.mean_gates[sample] for layer in layers if layer.mean_gates is not None]
        numbers = torch.arange(len(layers), device=held.device)
        of_head = numbers.repeat_interleave(torch.tensor([len(layer.heads) for layer in layers], device=held.device))
        return allocate(
            self.allocation, torch.cat(gates) if len(gates) == len(layers) else None, held, of_head, num_keys
        )

    def stream(self, tokens: Int[Tensor, "B T"], num_keys: int, step: int = 1) -> Float[Tensor, "B T V"]:
        """Read ``step`` tokens at a time and cut to ``num_keys`` after each: at most ``num_keys + step`` are ever held.

        What a press that looks at the newest queries sees are the queries of one step.
        """
        logits = []
        for piece in tokens.split(step, dim=1):
            logits.append(self.read(piece))
            self.cut(num_keys)
        return torch.cat(logits, dim=1)

    def num_held(self) -> int:
        """Keys in the cache, over all layers, heads and samples, those of layers with a sliding window left out."""
        layers = [layer for layer in self.layers.values() if layer.window is None]
        return sum(int(head.held.sum()) for layer in layers for head in layer.heads)

    def snapshot(self) -> PrunedReader:
        """The state of now, for :meth:`restore`; tensors are shared, so it costs no memory until something is cut."""
        kept = PrunedReader(self.press, self.allocation, self.num_recent)
        kept.layers = {number: layer.snapshot() for number, layer in self.layers.items()}
        kept.length, kept._observing = self.length, self._observing
        return kept

    def restore(self, kept: PrunedReader) -> None:
        """Go back to a :meth:`snapshot`."""
        self.layers = {number: layer.snapshot() for number, layer in kept.layers.items()}
        self.length, self._observing = kept.length, kept._observing

    def attend(self, layer: int, asked: Query, keys: Tensor, values: Tensor) -> Tensor:
        """For the connected model: a layer's attention over its cache."""
        output, _ = self.layers.setdefault(layer, LayerKeys()).attend(asked, keys, values, self.length)
        return output

    def observe(self, seen: AttentionCall) -> None:
        """For the connected model: score a layer's keys."""
        layer = self.layers[seen.layer]
        if self._observing and layer.window is None:
            assert self.press is not None
            layer.observe(self.press, seen)


def foresee(model: nn.Module, context: Int[Tensor, "B T"], continuation: Int[Tensor, "B T2"]) -> Fixed:
    """A press that knows what comes: the oracle's scores of the context's keys, by the queries of the continuation.

    No press that runs before the continuation can know this much. It scores one key at a time, so it is no bound.
    """
    witness = _Witness(context.shape[1])
    with pruned(model, witness) as reader:
        reader.read(context, observe=False)
        reader.read(continuation)
    return Fixed(witness.found)


class _Witness:
    """Notes what the oracle says of the first keys, head by head."""

    def __init__(self, num_keys: int):
        self.num_keys, self.oracle = num_keys, Oracle()
        self.found: dict[int, list[Float[Tensor, "B S"]]] = {}

    def score(self, observed: Observed) -> Float[Tensor, "B K S"]:
        scores = self.oracle.score(observed)
        self.found.setdefault(observed.call.layer, []).append(scores[:, 0, : self.num_keys])
        return scores
