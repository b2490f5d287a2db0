"""Images as sequences: the embedding and the whole model against loops, what places do, and what is refused."""

from __future__ import annotations

import pytest
import torch
from decoder_by_loops import decoder_by_loops
from tiny_decoders import B, T, tiny_decoder, tiny_settings
from torch import Tensor

from gatelab.model.accounting import count_parameters, flops_per_token_forward
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.settings import ModelSettings, PatchSettings

CLASSES, PIXELS, LEVELS = 11, 3, 5
CLS = LEVELS**PIXELS


def image_settings(gate: str = "none", **changes: object) -> ModelSettings:
    patches = PatchSettings(pixels=PIXELS, levels=LEVELS)
    own = {"vocab_size": CLASSES, "causal": False, "tied_head": False, "patches": patches}
    return tiny_settings(gate, **{**own, **changes})


def sequences() -> Tensor:
    """[CLS] and patches, the blackest and the whitest among them."""
    ids = torch.randint(CLS, (B, T), generator=torch.Generator().manual_seed(3))
    ids[:, 0] = CLS
    ids[0, 4], ids[1, 7] = 0, CLS - 1
    return ids


@pytest.mark.parametrize("gate", ["none", "sdpa_elementwise", "sdpa_headwise"])
def test_the_model_of_images_is_that_of_loops(gate: str) -> None:
    """Logits of all tokens, and the gradient of the loss of classes at [CLS]."""
    decoder, ids = tiny_decoder(image_settings(gate)), sequences()
    classes = torch.tensor([7, 0, 10])
    expected = decoder_by_loops(decoder, ids)
    torch.testing.assert_close(decoder(ids), expected, rtol=1e-10, atol=1e-10)
    nats = [expected[row, 0].exp().sum().log() - expected[row, 0, classes[row]] for row in range(B)]
    gradients = torch.autograd.grad(torch.stack(nats).mean(), list(decoder.parameters()))
    torch.nn.functional.cross_entropy(decoder(ids)[:, 0], classes).backward()
    for (name, parameter), wanted in zip(decoder.named_parameters(), gradients, strict=True):
        assert parameter.grad is not None and wanted.abs().max() > 0, name
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-8, atol=1e-11, msg=name)


def test_black_and_white_are_opposite_and_cls_has_no_pixels() -> None:
    embedding = tiny_decoder(image_settings()).model.embed_tokens
    black, white, cls = (embedding(torch.full((1, T), number)) for number in (0, CLS - 1, CLS))
    torch.testing.assert_close(black + white, 2 * cls)
    places = dict(embedding.named_parameters())["positions"]
    assert torch.equal(cls[0], places[:T]) and not torch.equal(black, white)


def test_nothing_but_the_learned_places_tells_patches_apart() -> None:
    """With one place for all patches their order leaves [CLS] as it is: there is no rotation."""
    decoder, ids = tiny_decoder(image_settings()), sequences()
    order = torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.randperm(T - 1)])
    assert not torch.allclose(decoder(ids)[:, 0], decoder(ids[:, order])[:, 0])
    with torch.no_grad():
        dict(decoder.named_parameters())["model.embed_tokens.positions"][1:] = 0.3
        torch.testing.assert_close(decoder(ids)[:, 0], decoder(ids[:, order])[:, 0])
    assert all(decoder.settings.rope_on_layer(layer) is None for layer in range(2))


def test_counts_take_patches_places_and_the_head() -> None:
    settings = image_settings()
    counts = count_parameters(settings)
    width, places = settings.width, settings.max_context
    assert counts.embedding == PIXELS * width + places * width + CLASSES * width
    tokens = tiny_settings(vocab_size=CLASSES, causal=False, tied_head=False)
    assert counts.total - count_parameters(tokens).total == PIXELS * width + places * width - CLASSES * width
    assert flops_per_token_forward(settings, T) - flops_per_token_forward(tokens, T) == 2 * PIXELS * width


def test_initial_weights_are_shared_between_gates_and_depend_on_the_seed() -> None:
    decoders = [Decoder(image_settings(gate)) for gate in ("none", "sdpa_headwise", "none")]
    for decoder, seed in zip(decoders, (1, 1, 2), strict=True):
        initialize(decoder, seed)
    for name in ("model.embed_tokens.weight", "model.embed_tokens.positions", "lm_head.weight"):
        plain, gated, other = (dict(decoder.named_parameters())[name] for decoder in decoders)
        assert torch.equal(plain, gated) and not torch.equal(plain, other)
        assert plain.std().item() == pytest.approx(0.2, rel=0.25)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"causal": True}, r"causal=True with patches is impossible: \[CLS\] comes first and would see no patch"),
        (
            {"tied_head": True},
            "tied_head=True with patches is impossible: no patch stands for a class; set it to False",
        ),
        ({"embedding_scale": 2.0}, "embedding_scale=2.0 is of tokens, and patches have none; set it to 1"),
        ({"patches": {"pixels": 16, "levels": 17}}, "patches of 16 pixels in 17 levels have no number of 64 bits"),
        ({"patches": {"levels": 1}}, "patches.levels cannot be 1"),
    ],
)
def test_models_that_can_not_read_images_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelSettings.parse({**image_settings().to_mapping(), **changes})


def test_more_patches_than_places_are_refused() -> None:
    decoder = tiny_decoder(image_settings(max_context=T - 1))
    with pytest.raises(ValueError, match=f"{T} tokens exceed max_context={T - 1} of the model"):
        decoder(sequences())
    assert decoder(sequences()[:, :-1]).shape == (B, T - 1, CLASSES)
