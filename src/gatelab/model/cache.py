"""Keys and values of the tokens seen so far, for decoding."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gatelab.model.masks import PADDING


class LayerKeysValues:
    """One layer's part of a :class:`KVCache`."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extend(
        self, keys: Float[Tensor, "B T K C"], values: Float[Tensor, "B T K C"]
    ) -> tuple[Float[Tensor, "B S K C"], Float[Tensor, "B S K C"]]:
        """Add the newest keys and values and return all S so far."""
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat((self.keys, keys), dim=1), torch.cat((self.values, values), dim=1)
        self.keys, self.values = keys, values
        return keys, values


class KVCache:
    """What a decoder remembers between calls; start with an empty one and pass it to each call.

    ``documents`` (B S) numbers the document of every token so far, with padding as in
    :mod:`gatelab.model.masks`; it stays ``None`` as long as no call gave any.
    """

    def __init__(self, num_layers: int):
        self.layers = [LayerKeysValues() for _ in range(num_layers)]
        self.documents: Tensor | None = None
        self.length = 0

    def extend_documents(
        self, documents: Int[Tensor, "B T"] | None, ids: Int[Tensor, "B T"]
    ) -> Int[Tensor, "B S"] | None:
        """Note the newest tokens; without document numbers they continue the last document of their row.

        Tokens from before the first numbers count as document 0. Raises ``ValueError`` where padding would go on.
        """
        past = self.documents
        if documents is not None and past is None and self.length:
            past = torch.zeros(len(ids), self.length, dtype=torch.int64, device=ids.device)
        elif documents is None and past is not None:
            if bool((past[:, -1] == PADDING).any()):
                raise ValueError("a row of the cache ends in padding: give the document numbers of the new tokens")
            documents = past[:, -1:].expand_as(ids)
        self.length += ids.shape[1]
        if documents is not None:
            self.documents = documents if past is None else torch.cat((past, documents), dim=1)
        return self.documents
