"""Keys and values of the tokens seen so far, for decoding."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from gatelab.model.masks import PADDING


class GrowingTensor:
    """Rows (B T ...) that get more along T: room for ``capacity`` of them at first, twice as much when it is full.

    For tensors without gradients, because what is there is written to in place.
    """

    def __init__(self, capacity: int = 0):
        self._capacity, self._length = capacity, 0
        self._storage: Tensor | None = None

    @property
    def filled(self) -> Shaped[Tensor, "B S ..."] | None:
        """All S so far, a view; ``None`` before the first."""
        return None if self._storage is None else self._storage[:, : self._length]

    def extend(self, newest: Shaped[Tensor, "B T ..."]) -> Shaped[Tensor, "B S ..."]:
        """Add the newest and return a view of all S so far, which later calls leave as it is."""
        start, stop = self._length, self._length + newest.shape[1]
        if self._storage is None or stop > self._storage.shape[1]:
            room = max(stop, self._capacity if self._storage is None else 2 * self._storage.shape[1])
            larger = newest.new_empty(len(newest), room, *newest.shape[2:])
            if self._storage is not None:
                larger[:, :start] = self._storage[:, :start]
            self._storage = larger
        self._storage[:, start:stop] = newest
        self._length = stop
        return self._storage[:, :stop]


class LayerKeysValues:
    """One layer's part of a :class:`KVCache`.

    Latent attention without a gate on keys or values keeps its latents (B S 1 r) in the place of keys and its rotated
    keys (B S 1 R) in that of values.
    """

    def __init__(self, capacity: int = 0) -> None:
        self._keys, self._values = GrowingTensor(capacity), GrowingTensor(capacity)

    @property
    def keys(self) -> Float[Tensor, "B S K C"] | None:
        """The keys so far; ``None`` before the first."""
        return self._keys.filled

    @property
    def values(self) -> Float[Tensor, "B S K Cv"] | None:
        """The values so far; ``None`` before the first."""
        return self._values.filled

    def extend(
        self, keys: Float[Tensor, "B T K C"], values: Float[Tensor, "B T K Cv"]
    ) -> tuple[Float[Tensor, "B S K C"], Float[Tensor, "B S K Cv"]]:
        """Add the newest keys and values and return all S so far."""
        return self._keys.extend(keys), self._values.extend(values)


class KVCache:
    """What a decoder remembers between calls; start with an empty one and pass it to each call.

    With a ``capacity`` in tokens memory is taken once, at the first call; without, or beyond it, what is there doubles.
    ``documents`` (B S) numbers the document of every token so far, with padding as in :mod:`gatelab.model.masks`; it
    stays ``None`` as long as no call gave any. Call the decoder without gradients.
    """

    def __init__(self, num_layers: int, capacity: int = 0):
        self.layers = [LayerKeysValues(capacity) for _ in range(num_layers)]
        self.length = 0
        self._documents = GrowingTensor(capacity)

    @property
    def documents(self) -> Int[Tensor, "B S"] | None:
        """The document of every token so far."""
        return self._documents.filled

    def extend_documents(
        self, documents: Int[Tensor, "B T"] | None, ids: Int[Tensor, "B T"]
    ) -> Int[Tensor, "B S"] | None:
        """Note the newest tokens; without document numbers they continue the last document of their row.

        Tokens from before the first numbers count as document 0. Raises ``ValueError`` where padding would go on.
        """
        past = self.documents
        if documents is not None and past is None and self.length:
            self._documents.extend(torch.zeros(len(ids), self.length, dtype=torch.int64, device=ids.device))
        elif documents is None and past is not None:
            if bool((past[:, -1] == PADDING).any()):
                raise ValueError("a row of the cache ends in padding: give the document numbers of the new tokens")
            documents = past[:, -1:].expand_as(ids)
        self.length += ids.shape[1]
        return None if documents is None else self._documents.extend(documents)
