"""What a run reads, with one face for text and synthetic tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from gatelab.data.loader import Batch, TrainLoader, heldout_batches
from gatelab.data.prepare import PreparedData, prepare
from gatelab.data.synthetic import BigramBackcopy
from gatelab.train.settings import RunSettings

SYNTHETIC_HELDOUT_BATCHES = 8


@dataclass(frozen=True)
class HeldoutDomain:
    """One held-out text: its batches in reading order, and what bits per byte and a bootstrap over documents need.

    ``num_whole_windows`` are filled with text; they come first. ``document_text_bytes`` is ``None`` for a synthetic
    task, which has no text.
    """

    batches: Callable[[], Iterator[Batch]]
    num_whole_windows: int
    document_text_bytes: np.ndarray | None


@dataclass(frozen=True)
class Source:
    """Training batches as a function of the step, and the held-out domains by name."""

    train: TrainLoader | BigramBackcopy
    heldout: dict[str, HeldoutDomain]
    fingerprint: str
    attributions: tuple[str, ...]

    def measured_tokens(self, num_windows: int) -> Int[Tensor, "B T"]:
        """The first whole windows of the first held-out domain, for measuring sinks and gates."""
        domain = next(iter(self.heldout.values()))
        num_windows = min(num_windows, domain.num_whole_windows)
        windows: list[Tensor] = []
        for batch in domain.batches():
            windows.extend(batch.inputs)
            if len(windows) >= num_windows:
                break
        return torch.stack(windows[:num_windows])


def open_source(settings: RunSettings, cache: Path, on_progress: Callable[[str, int], None] | None = None) -> Source:
    """Prepare the run's data under ``cache``, or reuse it.

    Raises ``ValueError`` when the model's vocabulary is too small or a text is shorter than one window.
    """
    train, data = settings.train, settings.data
    if data.synthetic is not None:
        task = BigramBackcopy(
            data.synthetic, context=data.context, sequences_per_step=train.sequences_per_step, seed=train.seed
        )
        num_windows = SYNTHETIC_HELDOUT_BATCHES * train.sequences_per_step
        domain = HeldoutDomain(partial(task.heldout_batches, SYNTHETIC_HELDOUT_BATCHES), num_windows, None)
        return Source(task, {"synthetic": domain}, task.fingerprint, ())
    prepared = prepare(data, cache, on_progress)
    prepared.train.require_vocabulary(settings.model.vocab_size)
    return _text_source(settings, prepared)


def _text_source(settings: RunSettings, prepared: PreparedData) -> Source:
    train, data = settings.train, settings.data
    bos_id = prepared.tokenizer.bos_id if data.bos_in_every_window else None
    loader = TrainLoader(
        prepared.train,
        context=data.context,
        sequences_per_step=train.sequences_per_step,
        seed=train.seed,
        bos_id=bos_id,
        document_masks=data.document_masks,
    )
    heldout = {}
    for name, tokens in prepared.heldout.items():
        tokens.require_vocabulary(settings.model.vocab_size)
        batches = partial(
            heldout_batches,
            tokens,
            context=data.context,
            sequences=train.sequences_per_step,
            bos_id=bos_id,
            document_masks=data.document_masks,
        )
        num_whole_windows = (len(tokens) - (bos_id is None)) // data.context
        heldout[name] = HeldoutDomain(batches, num_whole_windows, tokens.document_text_bytes)
    measured = next(iter(heldout))
    if not heldout[measured].num_whole_windows:
        raise ValueError(
            f"the held-out text {measured} is shorter than one window of context={data.context}, so that attention "
            "can't be measured on it; hold out more text or take a smaller context"
        )
    return Source(loader, heldout, prepared.fingerprint, prepared.attributions)
