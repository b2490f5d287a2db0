"""The first key hidden: against attention written with loops, with a cache, and gone when the block ends."""

import pytest
import torch

from gatelab.longcontext.first_key import masked_first_key
from gatelab.model.attention import GroupedQueryAttention, fused_attention
from gatelab.model.cache import KVCache
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.settings import ModelSettings

SIZES = {
    "vocab_size": 97,
    "width": 40,
    "num_layers": 3,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_size": 8,
    "feedforward_width": 56,
    "max_context": 64,
    "init_std": 0.3,
}
LATENTS = {
    "num_kv_heads": 6,
    "head_size": 12,
    "qk_norm": False,
    "latent": {"key_value_rank": 10, "unrotated_size": 8, "rotated_size": 4, "value_size": 7},
}


def decoder_of(**changes: object) -> Decoder:
    decoder = Decoder(ModelSettings.parse({**SIZES, **changes}))
    initialize(decoder, 7)
    return decoder.double().eval()


def naive(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of (B T H C) queries in which only query 0 sees key 0."""
    output = query.new_zeros(*query.shape[:3], value.shape[3])
    for sample in range(query.shape[0]):
        for head in range(query.shape[2]):
            group = head // (query.shape[2] // key.shape[2])
            for position in range(query.shape[1]):
                seen = [0] if position == 0 else list(range(1, position + 1))
                logits = key[sample, seen, group] @ query[sample, position, head] / query.shape[3] ** 0.5
                output[sample, position, head] = logits.softmax(0) @ value[sample, seen, group]
    return output


@pytest.mark.parametrize("changes", [{}, LATENTS], ids=["grouped queries", "latents"])
@torch.no_grad()
def test_only_the_first_query_sees_the_first_key(changes: dict[str, object]) -> None:
    decoder = decoder_of(**changes)
    ids = torch.randint(97, (3, 17), generator=torch.Generator().manual_seed(1))
    seen = []

    def spy(query, key, value, mask, causal, sink=None):
        output = fused_attention(query, key, value, mask, causal, sink)
        seen.append((output, naive(query, key, value)))
        return output

    for layer in decoder.model.layers:
        layer.self_attn.kernel = spy
    with masked_first_key(decoder):
        masked = decoder(ids)
    assert len(seen) == 3
    for output, expected in seen:
        torch.testing.assert_close(output, expected)
    plain = decoder(ids)
    assert torch.equal(masked[:, 0], plain[:, 0])
    assert (masked[:, 1:] - plain[:, 1:]).abs().amax(-1).min() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, 4])
def test_decoding_with_a_cache_hides_it_too(chunk: int) -> None:
    decoder = decoder_of()
    ids = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(2))
    cache = KVCache(3)
    with masked_first_key(decoder):
        whole = decoder(ids)
        parts = [decoder(ids[:, start : start + chunk], cache=cache) for start in range(0, 12, chunk)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


@torch.no_grad()
def test_full_attention_and_windows() -> None:
    ids = torch.randint(97, (2, 11), generator=torch.Generator().manual_seed(3))
    full = decoder_of(causal=False)
    with masked_first_key(full):
        hidden = full(ids)
    changed = ids.clone()
    changed[:, 0] = (ids[:, 0] + 1) % 97
    with masked_first_key(full):
        assert torch.equal(full(changed)[:, 1:], hidden[:, 1:])
    narrow = decoder_of(layers=[{"window": 4}] * 3)
    with masked_first_key(narrow):
        torch.testing.assert_close(narrow(changed)[:, 1:], narrow(ids)[:, 1:])


def test_the_kernels_come_back_after_an_error() -> None:
    decoder = decoder_of()
    with pytest.raises(RuntimeError, match="stop"), masked_first_key(decoder):
        raise RuntimeError("stop")
    attentions = [module for module in decoder.modules() if isinstance(module, GroupedQueryAttention)]
    assert all(attention.kernel is fused_attention for attention in attentions)
