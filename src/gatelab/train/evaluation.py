"""A model on held-out text: every token scored once, summed by document, and the first windows measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gatelab.data.loader import IGNORED, Batch, rows_of_rank
from gatelab.diagnose.measure import measure
from gatelab.diagnose.measurement import Measurement
from gatelab.model.decoder import Decoder
from gatelab.model.masks import PADDING
from gatelab.model.perplexity import bits_per_byte, perplexity, token_nats
from gatelab.train.parallel.mesh import ALONE, Ranks
from gatelab.train.source import HeldoutDomain, Source


@dataclass
class Score:
    """Summed cross-entropy of one domain, and its parts by document (in the order of the held-out text), float64.

    ``num_right`` counts the targets that the model finds likeliest. ``num_bytes`` counts the UTF-8 bytes of the scored
    text, and is ``None`` when only part of it was scored or the domain has no text.
    """

    document_nats: Float[Tensor, "N"]
    document_tokens: Float[Tensor, "N"]
    nats: float = 0.0
    num_tokens: int = 0
    num_right: int = 0
    num_bytes: int | None = None

    def figures(self) -> dict[str, Any]:
        """Loss in nats a token, perplexity, bits per byte, accuracy, and the counts that they stand on."""
        return {
            "loss": self.nats / self.num_tokens,
            "perplexity": perplexity(self.nats, self.num_tokens),
            "bits_per_byte": None if self.num_bytes is None else bits_per_byte(self.nats, self.num_bytes),
            "accuracy": self.num_right / self.num_tokens,
            "tokens": self.num_tokens,
            "bytes": self.num_bytes,
        }


@torch.no_grad()
def score(decoder: Decoder, domain: HeldoutDomain, num_windows: int | None = None, ranks: Ranks = ALONE) -> Score:
    """Score a domain, or its first ``num_windows`` windows (rounded up to whole batches).

    Data-parallel ranks share each batch's rows, call this together and get the same sums, which are taken in float64.
    A compiled decoder runs uncompiled here, and every batch has the same shape.
    """
    text_bytes = domain.document_text_bytes
    num_documents = 0 if text_bytes is None else len(text_bytes)
    device = _device_of(decoder)
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    by_document = torch.zeros(2, num_documents, dtype=torch.float64, device=device)
    with torch.compiler.set_stance("force_eager"):
        for batch in _first_windows(domain.batches(), num_windows):
            own = rows_of_rank(len(batch.inputs), ranks.data_rank, ranks.num_data_ranks)
            _add(totals, by_document, decoder, batch.rows(own).to(device))
    nats, num_tokens, num_right = ranks.sum_over_data(totals).tolist()
    document_nats, document_tokens = ranks.sum_over_data(by_document).cpu()
    result = Score(document_nats, document_tokens, nats, int(num_tokens), int(num_right))
    if text_bytes is not None and num_windows is None and domain.whole_text:
        result.num_bytes = int(text_bytes.sum())
    return result


def measure_heldout(decoder: Decoder, source: Source, num_windows: int) -> Measurement:
    """Measure a decoder on the first windows of the first held-out domain, with the source's queries and delimiters."""
    windows = source.measured_windows(num_windows)
    device = _device_of(decoder)
    sets = {name: queries.to(device) for name, queries in source.query_sets(windows.inputs).items()}
    windows = windows.to(device)
    documents = windows.documents
    real = None if documents is None or bool((documents != PADDING).all()) else documents != PADDING
    return measure(
        decoder,
        windows.inputs,
        padding_mask=real,
        documents=documents,
        query_sets=sets,
        delimiters=source.delimiters,
    )


def _device_of(decoder: Decoder) -> torch.device:
    return next(decoder.parameters()).device


def _add(totals: Tensor, by_document: Tensor, decoder: Decoder, batch: Batch) -> None:
    """Add cross-entropy, number and right guesses of a batch's targets to their sums (3), the first two also to those
    by document (2 N)."""
    logits = decoder(batch.inputs, batch.documents)
    nats = token_nats(logits, batch.targets).double()
    scored = batch.targets != IGNORED
    right = _is_likeliest(logits, batch.targets.clamp(min=0))
    figures = torch.stack([nats, torch.ones_like(nats), right.double()])[:, scored]
    totals += figures.sum(dim=1)
    if batch.document_ids is not None:
        by_document.index_add_(1, batch.document_ids[scored], figures[:2])


def _is_likeliest(logits: Float[Tensor, "B T V"], tokens: Int[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Whether a token is the argmax, the first of the likeliest.

    PyTorch's argmax takes ten times as long on a CPU as the maximum, so it is asked only where a token reaches that.
    """
    likely = logits.gather(-1, tokens[..., None])[..., 0] == logits.amax(-1)
    likely[likely.clone()] = logits[likely].argmax(-1) == tokens[likely]
    return likely


def _first_windows(batches: Iterable[Batch], num_windows: int | None) -> Iterable[Batch]:
    seen = 0
    for batch in batches:
        if num_windows is not None and seen >= num_windows:
            return
        seen += len(batch.inputs)
        yield batch
