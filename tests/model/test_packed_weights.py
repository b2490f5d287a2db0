"""Weights packed for decoding: equal logits, and everything as before afterwards."""

from __future__ import annotations

import pytest
import torch
from tiny_decoders import ARCHITECTURES, MIXTURE, tiny_decoder, tiny_settings, token_ids

from gatelab.gates.variants import VARIANTS
from gatelab.model.decoder import Decoder
from gatelab.model.fused.packed_weights import can_pack, packed_weights, repays_packing
from gatelab.model.settings import ModelSettings

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="this PyTorch has no oneDNN")


def plain_and_packed(decoder: Decoder) -> tuple[torch.Tensor, torch.Tensor]:
    ids = token_ids()
    with torch.inference_mode():
        plain = decoder(ids)
        with packed_weights(decoder, len(ids)):
            return plain, decoder(ids)


@pytest.mark.parametrize("gate", VARIANTS)
def test_logits_stay_for_every_gate(gate: str) -> None:
    plain, packed = plain_and_packed(tiny_decoder(tiny_settings(gate), torch.float32))
    torch.testing.assert_close(packed, plain, rtol=0, atol=1e-4)


@pytest.mark.parametrize("settings", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_logits_stay_for_every_architecture(settings: ModelSettings) -> None:
    plain, packed = plain_and_packed(tiny_decoder(settings, torch.float32))
    torch.testing.assert_close(packed, plain, rtol=0, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_the_copies_are_what_is_multiplied_with(tied: bool) -> None:
    """Weights that change meanwhile change nothing until the end; then they count again."""
    decoder = tiny_decoder(tiny_settings("sdpa_elementwise", tied_head=tied), torch.float32)
    ids = token_ids()
    with torch.inference_mode():
        embedded = decoder.model.embed_tokens(ids)
        before = decoder.logits(embedded), decoder.model.layers[0].mlp.gate_proj(embedded)
        with packed_weights(decoder, len(ids)):
            for parameter in decoder.parameters():
                parameter.mul_(2)
            during = decoder.logits(embedded), decoder.model.layers[0].mlp.gate_proj(embedded)
        after = decoder.logits(embedded), decoder.model.layers[0].mlp.gate_proj(embedded)
    for one, packed, changed in zip(before, during, after, strict=True):
        torch.testing.assert_close(packed, one, rtol=0, atol=1e-5)
        torch.testing.assert_close(changed, 2 * one, rtol=0, atol=1e-5)


@pytest.mark.skipif(not can_pack(CPU, torch.bfloat16), reason="no bfloat16 kernels on this processor")
def test_what_reads_float32_in_a_bfloat16_pass_still_does() -> None:
    """The router's logits are float32 whatever the activations are."""
    settings = tiny_settings("sdpa_elementwise", mixture=MIXTURE)
    decoder = tiny_decoder(settings, torch.float32)
    decoder.activation_dtype = torch.bfloat16
    router = decoder.model.layers[0].mlp.gate
    x = torch.randn(3, 40)
    with torch.inference_mode(), packed_weights(decoder, 3):
        assert torch.equal(router(x), x @ router.weight.T)
        assert router(x.bfloat16()).dtype == torch.bfloat16
    plain, packed = plain_and_packed(decoder)
    assert packed.dtype == torch.bfloat16
    torch.testing.assert_close(packed, plain, rtol=0.05, atol=0.1)


def test_float64_is_left_alone() -> None:
    plain, packed = plain_and_packed(tiny_decoder(tiny_settings("sdpa_elementwise"), torch.float64))
    assert torch.equal(plain, packed)


@pytest.mark.parametrize(
    ("processor", "dtype", "num_steps", "repays"),
    [
        ("Intel Xeon", torch.float32, 64, False),
        ("Intel Xeon", torch.bfloat16, 64, True),
        ("AMD EPYC", torch.float32, 64, True),
        ("AMD EPYC", torch.float32, 2, False),
    ],
)
def test_where_plain_weights_are_read_faster_they_stay(
    processor: str, dtype: torch.dtype, num_steps: int, repays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": processor})
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    decoder = tiny_decoder(tiny_settings("sdpa_elementwise"), dtype)
    assert repays_packing(decoder, num_steps) is repays
