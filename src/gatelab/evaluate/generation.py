"""Greedy text generation in batches, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gatelab.data.tokenizer import Tokenizer
from gatelab.evaluate.models import OpenedModel
from gatelab.model.cache import KVCache
from gatelab.model.decoder import Decoder
from gatelab.model.fused.packed_weights import packed_weights, repays_packing
from gatelab.model.masks import PADDING

PREFILL_CHUNK = 512


class Batch(NamedTuple):
    """Prompts that end together: padded on the left, where ``is_real`` is false."""

    ids: Int[Tensor, "B T"]
    is_real: Bool[Tensor, "B T"]


def generate(
    opened: OpenedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    prefill_chunk: int = PREFILL_CHUNK,
) -> list[list[int]]:
    """The most probable next token of each prompt, and again, until ``max_new_tokens`` or one of ``stop_ids``.

    The prompts are read side by side and may differ in length; nothing is put in front of them, so BOS has to be in
    them. Returns the new tokens of each, without the stop token. Prompts are read ``prefill_chunk`` tokens at a time,
    so that no mask has more than that times all tokens. A model of transformers runs in its own ``generate``, greedily
    whatever its generation settings say. A row's tokens are those that it would have alone, but for ties within the
    rounding of the dtype, since sums over other shapes round otherwise.

    Raises ``ValueError``, before anything is read, for an empty prompt, a number below 1, a prompt that leaves no room
    for ``max_new_tokens`` in the model's context (the last of them is never read), and a model that sees later tokens.
    """
    _require_room(opened, prompts, max_new_tokens, prefill_chunk)
    if not prompts:
        return []
    batch = _pad(prompts, next(opened.model.parameters()).device)
    if isinstance(opened.model, Decoder):
        rows = _decode(opened.model, batch, max_new_tokens, stop_ids, prefill_chunk)
    else:
        rows = _generate_with_transformers(opened.model, batch, max_new_tokens, stop_ids, prefill_chunk)
    return [_before_stop(row, stop_ids) for row in rows.tolist()]


def stop_ids_of(opened: OpenedModel) -> frozenset[int]:
    """The tokens at which a text of this model ends: the BOS of the next document in a run's packed text, else EOS as
    the tokenizer and the model's generation settings name it."""
    source = opened.tokenizer.source
    if isinstance(source, Tokenizer):
        return frozenset([source.bos_id])
    settings = getattr(opened.model, "generation_config", None)
    named = getattr(settings, "eos_token_id", None)
    found = [getattr(source, "eos_token_id", None), *(named if isinstance(named, list) else [named])]
    return frozenset(token for token in found if token is not None)


def _require_room(
    opened: OpenedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, prefill_chunk: int
) -> None:
    for name, number in (("max_new_tokens", max_new_tokens), ("prefill_chunk", prefill_chunk)):
        if number < 1:
            raise ValueError(f"{name}={number} generates nothing; take at least 1")
    opened.require_causal("generate")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {number} is empty; start it with BOS")
        needed = len(prompt) + max_new_tokens - 1
        if opened.max_context is not None and needed > opened.max_context:
            raise ValueError(
                f"prompt {number} of {len(prompt)} tokens and {max_new_tokens} new ones need {needed} tokens of "
                f"context, and {opened.name} was made for {opened.max_context}; shorten it, or see gatelab extend"
            )


def _pad(prompts: Sequence[Sequence[int]], device: torch.device) -> Batch:
    longest = max(map(len, prompts))
    gaps = [longest - len(prompt) for prompt in prompts]
    ids = torch.tensor([[0] * gap + list(prompt) for gap, prompt in zip(gaps, prompts, strict=True)])
    is_real = torch.arange(longest) >= torch.tensor(gaps)[:, None]
    return Batch(ids.to(device), is_real.to(device))


@torch.inference_mode()
def _decode(
    decoder: Decoder, batch: Batch, max_new_tokens: int, stop_ids: Collection[int], prefill_chunk: int
) -> Int[Tensor, "B N"]:
    """The new tokens; what a row has after a stop token means nothing."""
    num_rows, num_tokens = batch.ids.shape
    cache = KVCache(decoder.settings.num_layers, capacity=num_tokens + max_new_tokens - 1)
    state = _read_prompts(decoder, batch, cache, prefill_chunk)
    stops = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=batch.ids.device)
    stopped = torch.zeros(num_rows, 1, dtype=torch.bool, device=batch.ids.device)
    chosen: list[Tensor] = []
    with packed_weights(decoder, num_rows) if repays_packing(decoder, max_new_tokens) else nullcontext():
        while True:
            chosen.append(decoder.logits(state).max(dim=-1).indices)  # several times as fast as argmax on a CPU
            stopped |= torch.isin(chosen[-1], stops)
            if len(chosen) == max_new_tokens or (stop_ids and bool(stopped.all())):
                return torch.cat(chosen, dim=1)
            state = decoder.hidden(chosen[-1], cache=cache).state


def _read_prompts(decoder: Decoder, batch: Batch, cache: KVCache, prefill_chunk: int) -> Float[Tensor, "B 1 D"]:
    """The state after the last token of each prompt."""
    ids = batch.ids.split(prefill_chunk, dim=1)
    documents: Sequence[Tensor | None] = [None] * len(ids)
    if not bool(batch.is_real.all()):
        documents = torch.where(batch.is_real, 0, PADDING).split(prefill_chunk, dim=1)
    for part, numbers in zip(ids[:-1], documents, strict=False):
        decoder.hidden(part, numbers, cache)
    return decoder.hidden(ids[-1], documents[-1], cache).state[:, -1:]


def _generate_with_transformers(
    model: Any, batch: Batch, max_new_tokens: int, stop_ids: Collection[int], prefill_chunk: int
) -> Int[Tensor, "B N"]:
    """As :func:`_decode`. A model with a recurrent state reads prompts whole: between pieces Jamba's layers lose it."""
    from transformers import GenerationConfig

    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        use_cache=True,
        eos_token_id=sorted(stop_ids) or None,
        pad_token_id=0,
        prefill_chunk_size=None if model._is_stateful else prefill_chunk,
    )
    with _generation_config(model, config):
        ids = model.generate(batch.ids, attention_mask=batch.is_real.long())
    return ids[:, batch.ids.shape[1] :]


@contextmanager
def _generation_config(model: Any, config: Any) -> Iterator[None]:
    """Only this one counts: to one that is passed as an argument transformers adds what the model's own says."""
    own = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = own


def _before_stop(row: Sequence[int], stop_ids: Collection[int]) -> list[int]:
    end = next((place for place, token in enumerate(row) if token in stop_ids), len(row))
    return list(row[:end])
