"""The formulas of saved activations against the bytes that autograd's saved-tensor hooks count."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_decoders import ARCHITECTURES, MIXTURE, B, T, V, tiny_settings
from torch import Tensor

from gatelab.gates.variants import VARIANTS
from gatelab.model.activations import Piece, activation_bytes, head_activations, layer_activations, loss_working_bytes
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.perplexity import token_nats
from gatelab.model.settings import ModelSettings

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def counted_bytes(settings: ModelSettings, dtype: torch.dtype, sequences: int = B, context: int = T) -> int:
    """Bytes of every storage that autograd keeps after a forward pass with loss, the weights' own apart.

    Weights have the activations' dtype, so that no cast of them is among what is kept.
    """
    decoder = Decoder(settings)
    initialize(decoder, 0)
    decoder.to(dtype)
    return bytes_kept(decoder, lambda: loss_of(decoder, sequences, context))


def loss_of(decoder: Decoder, sequences: int, context: int) -> Tensor:
    ids = torch.randint(V, (sequences, context), generator=torch.Generator().manual_seed(1))
    return token_nats(decoder(ids), ids).sum()


def bytes_kept(decoder: Decoder, forward: Callable[[], Tensor]) -> int:
    own = {tensor.untyped_storage().data_ptr() for tensor in [*decoder.parameters(), *decoder.buffers()]}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for pointer, tensor in kept.items() if pointer not in own)


def planned_bytes(settings: ModelSettings, dtype: torch.dtype, sequences: int = B, context: int = T) -> float:
    return activation_bytes(settings, Piece(sequences, context, dtype.itemsize))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_keeps_what_its_formula_says(name: str, dtype: torch.dtype) -> None:
    settings = ARCHITECTURES[name]
    assert planned_bytes(settings, dtype) == pytest.approx(counted_bytes(settings, dtype), rel=0.01)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_gate_keeps_what_its_formula_says(name: str) -> None:
    settings = tiny_settings(name)
    assert planned_bytes(settings, torch.bfloat16) == pytest.approx(counted_bytes(settings, torch.bfloat16), rel=0.01)


@pytest.mark.parametrize(("sequences", "context"), [(1, 61), (7, 5), (2, 33)])
@pytest.mark.parametrize("gate", ["none", "sdpa_and_value"])
def test_other_batches_and_deeper_mixtures(gate: str, sequences: int, context: int) -> None:
    settings = tiny_settings(gate, mixture=MIXTURE, num_layers=3)
    counted = counted_bytes(settings, torch.bfloat16, sequences, context)
    assert planned_bytes(settings, torch.bfloat16, sequences, context) == pytest.approx(counted, rel=0.01)


def test_what_a_gate_adds_by_hand() -> None:
    """An elementwise gate keeps its scores and the gated output; a headwise one a score for each head."""
    piece = Piece(B, T)
    none, elementwise, headwise = (
        sum(layer_activations(tiny_settings(gate), 0, piece).values())
        for gate in ("none", "sdpa_elementwise", "sdpa_headwise")
    )
    assert elementwise - none == 2 * B * T * 6 * 8 * 2
    assert headwise - none == B * T * (6 * 8 + 6) * 2


def test_one_layer_by_hand() -> None:
    """The formula of the module's text: N tokens, D 40, H 6, K 2, C 8, F 56, bfloat16."""
    n = B * T
    norms = 2 * (n * 40 * 4 + n * 4 + n * 40 * 2) + n * 8 * 8 * (4 + 2) + n * 8 * 4
    attention = n * 40 * 2 + n * (2 * 6 + 2 * 2) * 8 * 2 + n * 6 * 4
    swiglu = n * 40 * 2 + 4 * n * 56 * 2
    assert sum(layer_activations(tiny_settings(), 0, Piece(B, T)).values()) == norms + attention + swiglu
    assert loss_working_bytes(tiny_settings(), Piece(B, T)) == n * V * 10


def test_recomputed_layers_keep_their_inputs_and_one_layer() -> None:
    settings, piece = tiny_settings("sdpa_elementwise", num_layers=5), Piece(B, T)
    layer, head = (
        sum(layer_activations(settings, 3, piece).values()),
        sum(head_activations(settings, piece).values()),
    )
    assert activation_bytes(settings, piece, recompute=True) == 5 * B * T * 40 * 2 + layer + head
    assert activation_bytes(settings, piece) == pytest.approx(5 * layer + head)


def test_tensor_ranks_share_heads_and_width_alone() -> None:
    """Two key/value heads on four ranks: each rank has one."""
    settings = tiny_settings(num_heads=8)
    whole, quarter = (layer_activations(settings, 0, Piece(B, T, tensor=tensor)) for tensor in (1, 4))
    assert quarter["query rotated"] * 4 == whole["query rotated"]
    assert quarter["key rotated"] * 2 == whole["key rotated"]
    assert quarter["feed-forward product"] * 4 == whole["feed-forward product"]
    assert quarter["attention input"] == whole["attention input"]
