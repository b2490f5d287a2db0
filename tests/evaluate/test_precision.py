"""Errors of bfloat16, against passes written out by hand and against float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import VOCABULARY, tiny_decoder
from torch import Tensor, nn

from gatelab.evaluate.precision import SquaredError, decoder_layers, probe_precision
from gatelab.evaluate.rows import Subject

SUBJECT = Subject("tiny")
BRACKETS = "[bfloat16_against_float32]"


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (2, 29), generator=torch.Generator().manual_seed(4))


def tiny_llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(6)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=36,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,
    )
    return transformers.LlamaForCausalLM(config).eval()


def by_key(rows: list[dict[str, Any]]) -> dict[tuple[str, int | None, str | None], dict[str, Any]]:
    return {(row["metric"].partition("[")[0], row["layer"], row["query_range"]): row for row in rows}


def relative(narrow: list[Tensor], wide: list[Tensor]) -> float:
    pairs = [(a.double().flatten(), b.double().flatten()) for a, b in zip(narrow, wide, strict=True)]
    error = torch.cat([a - b for a, b in pairs]).norm()
    return float(error / torch.cat([b for _, b in pairs]).norm())


def passes_by_hand(model: nn.Module, dtype: torch.dtype, tokens: Tensor) -> list[dict[str, Any]]:
    """Logits, the residual stream after each layer and gradients of one window after another, in ``dtype``."""
    model = copy.deepcopy(model).bfloat16().to(dtype)
    found = []
    for row in tokens:
        model.zero_grad()
        x = model.model.embed_tokens(row[None])  # type: ignore[union-attr]
        rotations, masks, _ = model._where(row[None], None, None)  # type: ignore[operator]
        hidden = []
        for layer, rotation, mask in zip(model.model.layers, rotations, masks, strict=True):  # type: ignore[union-attr]
            x, _ = layer(x, rotation, mask)
            hidden.append(x.detach())
        logits = model.logits(model.model.norm(x))  # type: ignore[operator, union-attr]
        wide = logits if dtype == torch.float64 else logits.float()
        F.cross_entropy(wide[0, :-1], row[1:]).backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        found.append({"logits": logits.detach(), "hidden": hidden, "gradients": gradients})
    return found


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_errors_are_those_of_passes_by_hand(tokens: Tensor, wide: torch.dtype) -> None:
    decoder = tiny_decoder(qk_norm=False)
    rows = by_key(probe_precision(decoder, tokens, SUBJECT, wide=wide))
    narrow_passes, wide_passes = (passes_by_hand(decoder, dtype, tokens) for dtype in (torch.bfloat16, wide))

    def expected(pick: Any) -> float:
        return relative(*([tensor for one in side for tensor in pick(one)] for side in (narrow_passes, wide_passes)))

    assert rows["logits_error", None, None]["value"] == pytest.approx(expected(lambda one: [one["logits"]]), rel=1e-6)
    for layer in range(3):
        for query_range, cut in {"all": slice(None), "first_token": slice(0, 1), "rest": slice(1, None)}.items():
            value = expected(lambda one, layer=layer, cut=cut: [one["hidden"][layer][:, cut]])
            assert rows["hidden_error", layer, query_range]["value"] == pytest.approx(value, rel=1e-6)
        prefix = f"model.layers.{layer}."
        value = expected(
            lambda one, prefix=prefix: [grad for name, grad in one["gradients"].items() if name.startswith(prefix)]
        )
        assert rows["gradient_error", layer, None]["value"] == pytest.approx(value, rel=1e-6)
    value = expected(lambda one: list(one["gradients"].values()))
    assert rows["gradient_error", None, None]["value"] == pytest.approx(value, rel=1e-6)
    assert len(rows) == 1 + 3 * 3 + 3 + 1


@pytest.mark.parametrize("build", [tiny_decoder, tiny_llama])
def test_float32_is_near_float64_and_bfloat16_is_not(build: Any, tokens: Tensor) -> None:
    """bfloat16 has 8 significant bits and float32 has 24: errors differ by about 2^16."""
    model = build()
    narrow = by_key(probe_precision(model, tokens, SUBJECT, wide=torch.float64))
    middle = by_key(probe_precision(model, tokens, SUBJECT, narrow=torch.float32, wide=torch.float64))
    assert narrow.keys() == middle.keys() and len(narrow) == 14
    for key, row in narrow.items():
        assert 1e-4 < row["value"] < 0.2, key
        assert 0 < middle[key]["value"] < 1e-5, key


def test_equal_dtypes_have_no_error(tokens: Tensor) -> None:
    rows = probe_precision(tiny_decoder(), tokens, SUBJECT, narrow=torch.float32)
    assert {row["value"] for row in rows} == {0.0}


@pytest.mark.parametrize("build", [tiny_decoder, tiny_llama])
def test_the_model_is_left_as_it_was(build: Any, tokens: Tensor) -> None:
    model = build()
    before = copy.deepcopy(model.state_dict())
    probe_precision(model, tokens, SUBJECT)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_frequencies_of_rotary_embeddings_are_not_rounded(tokens: Tensor) -> None:
    """They are no weights; rounding them would turn late positions by radians."""
    model = tiny_llama()
    rows = by_key(probe_precision(model, tokens, SUBJECT))
    torch.manual_seed(0)
    rounded = copy.deepcopy(model)
    buffer = rounded.model.rotary_emb.inv_freq
    buffer.copy_(buffer.bfloat16())
    assert rows["hidden_error", 0, "all"]["value"] < 0.01
    assert not torch.equal(rounded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


def test_rows_are_tidy(tokens: Tensor) -> None:
    rows = probe_precision(tiny_decoder(), tokens, SUBJECT)
    assert {row["metric"] for row in rows} == {f"{name}_error{BRACKETS}" for name in ("logits", "hidden", "gradient")}
    found = by_key(rows)
    assert found["logits_error", None, None]["n"] == 2 * 29 * VOCABULARY
    assert found["hidden_error", 1, "all"]["n"] == 2 * 29 * 24 and found["hidden_error", 1, "rest"]["n"] == 2 * 28 * 24


def test_layers_are_the_largest_list() -> None:
    decoder = tiny_decoder()
    assert decoder_layers(decoder) is decoder.model.layers
    llama = tiny_llama()
    assert decoder_layers(llama) is llama.model.layers
    with pytest.raises(ValueError, match="Linear has no list of layers, so no error can be told by layer"):
        decoder_layers(nn.Linear(3, 5))


def test_relative_error() -> None:
    error = SquaredError()
    assert error.relative == 0.0
    error.add(torch.tensor([3.0, 1.0]), torch.tensor([0.0, 1.0]))
    error.add(torch.tensor([[4.0]]), torch.tensor([[0.0]]))
    assert (error.relative, error.count) == (5.0, 3)
