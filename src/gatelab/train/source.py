"""What a run reads, with one face for text, images and synthetic tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from gatelab.data.chat_template import ChatTemplate
from gatelab.data.chat_windows import ChatLoader, heldout_chat_batches, prepare_chats
from gatelab.data.images import BACKGROUND, ImageLoader, heldout_image_batches, prepare_images
from gatelab.data.loader import Batch, MixedLoader, TrainLoader, heldout_batches
from gatelab.data.masking import MaskedLoader, Vocabulary, masked_heldout_batches
from gatelab.data.prepare import PreparedData, prepare
from gatelab.data.settings import DataSettings, ImageSettings
from gatelab.data.shards import TokenShards
from gatelab.data.synthetic import BigramBackcopy
from gatelab.data.tokenizer import Tokenizer
from gatelab.train.settings import RunSettings

SYNTHETIC_HELDOUT_BATCHES = 8


@dataclass(frozen=True)
class HeldoutDomain:
    """One held-out text: its batches in reading order, and what bits per byte and a bootstrap over documents need.

    ``num_whole_windows`` are filled with text; they come first. ``document_text_bytes`` is ``None`` for a synthetic
    task and for images, which have no text. Where tokens are hidden not the ``whole_text`` is scored, and bits per byte
    mean nothing.
    """

    batches: Callable[[], Iterator[Batch]]
    num_whole_windows: int
    document_text_bytes: np.ndarray | None
    whole_text: bool = True


@dataclass(frozen=True)
class Source:
    """Training batches as a function of the step, and the held-out domains by name.

    A synthetic task and images have no tokenizer, and only chats have a template. ``delimiters`` are the tokens, by
    name, to which attention is measured.
    """

    train: TrainLoader | MixedLoader | MaskedLoader | ChatLoader | ImageLoader | BigramBackcopy
    heldout: dict[str, HeldoutDomain]
    fingerprint: str
    attributions: tuple[str, ...]
    tokenizer: Tokenizer | None = None
    chat_template: ChatTemplate | None = None
    delimiters: Mapping[str, list[int]] = field(default_factory=dict)

    def measured_windows(self, num_windows: int) -> Batch:
        """The first whole windows of the first held-out domain, for measuring sinks and gates."""
        domain = next(iter(self.heldout.values()))
        num_windows = min(num_windows, domain.num_whole_windows)
        batches: list[Batch] = []
        for batch in domain.batches():
            batches.append(batch)
            if sum(len(one.inputs) for one in batches) >= num_windows:
                break
        documents = [batch.documents for batch in batches if batch.documents is not None]
        return Batch(
            inputs=torch.cat([batch.inputs for batch in batches])[:num_windows],
            targets=torch.cat([batch.targets for batch in batches])[:num_windows],
            documents=torch.cat(documents)[:num_windows] if documents else None,
        )

    def query_sets(self, inputs: Int[Tensor, "B T"]) -> dict[str, Bool[Tensor, "B T"]]:
        """The queries that are measured by themselves: those of a synthetic task, none of text."""
        return self.train.query_sets(inputs) if isinstance(self.train, BigramBackcopy) else {}


def open_source(settings: RunSettings, cache: Path, on_progress: Callable[[str, int], None] | None = None) -> Source:
    """Prepare the run's data under ``cache``, or reuse it.

    Raises ``ValueError`` when the model's vocabulary is too small (before any text is read, for an existing tokenizer)
    or a text is shorter than one window.
    """
    train, data = settings.train, settings.data
    if data.synthetic is not None:
        task = BigramBackcopy(
            data.synthetic, context=data.context, sequences_per_step=train.sequences_per_step, seed=train.seed
        )
        num_windows = SYNTHETIC_HELDOUT_BATCHES * train.sequences_per_step
        domain = HeldoutDomain(partial(task.heldout_batches, SYNTHETIC_HELDOUT_BATCHES), num_windows, None)
        return Source(task, {"synthetic": domain}, task.fingerprint, ())
    if data.images is not None:
        return _image_source(settings, data.images)
    if data.tokenizer.path is not None:
        require_fitting_tokenizer(Path(data.tokenizer.path), data, settings.model.vocab_size)
    if data.chats is not None:
        return _chat_source(settings, data.chats.label)
    prepared = prepare(data, cache, on_progress)
    for tokens in (prepared.train, *prepared.mixture.values()):
        tokens.require_vocabulary(settings.model.vocab_size)
    return _text_source(settings, prepared)


def require_fitting_tokenizer(path: Path, data: DataSettings, vocab_size: int) -> None:
    """Raise ``ValueError`` for a tokenizer that can't be read, or that a model's vocabulary doesn't hold."""
    tokenizer = Tokenizer.load(path, data.tokenizer.bos_token)
    if data.masking is not None:
        Vocabulary.of(tokenizer, vocab_size)
    elif tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"model.vocab_size={vocab_size} is smaller than the vocabulary of {tokenizer.vocab_size} of the tokenizer "
            f"at {path}; "
            "choose a model.vocab_size that holds it, or another tokenizer"
        )


def _chat_source(settings: RunSettings, label: str) -> Source:
    train = settings.train
    chats = prepare_chats(settings.data)
    loader = ChatLoader(chats.train, sequences_per_step=train.sequences_per_step, seed=train.seed)
    batches = partial(heldout_chat_batches, chats.heldout, train.sequences_per_step)
    domain = HeldoutDomain(batches, len(chats.heldout), chats.heldout_text_bytes)
    return Source(loader, {label: domain}, chats.fingerprint, (chats.attribution,), chats.tokenizer, chats.template)


def _image_source(settings: RunSettings, wanted: ImageSettings) -> Source:
    images, train = prepare_images(wanted), settings.train
    loader = ImageLoader(images.train, sequences_per_step=train.sequences_per_step, seed=train.seed)
    batches = partial(heldout_image_batches, images.heldout, train.sequences_per_step)
    domain = HeldoutDomain(batches, len(images.heldout), None)
    delimiters = {"background": [BACKGROUND]}
    return Source(loader, {wanted.name: domain}, images.fingerprint, (images.attribution,), delimiters=delimiters)


def _text_source(settings: RunSettings, prepared: PreparedData) -> Source:
    train, data = settings.train, settings.data
    ids = None if data.masking is None else Vocabulary.of(prepared.tokenizer, settings.model.vocab_size)
    loader = _training_loader(settings, prepared)
    attributions = prepared.attributions
    if isinstance(loader, MixedLoader):
        epochs = ", ".join(f"{label} {number:.2f}" for label, number in loader.epochs(train.steps).items())
        attributions += (f"training windows are mixed by weight; epochs of each corpus in the whole run: {epochs}",)
    heldout = {}
    for name, tokens in prepared.heldout.items():
        tokens.require_vocabulary(settings.model.vocab_size)
        heldout[name] = _heldout_text(settings, prepared.tokenizer, tokens)
    measured = next(iter(heldout))
    if not heldout[measured].num_whole_windows:
        raise ValueError(
            f"the held-out text {measured} is shorter than one window of context={data.context}, so that attention "
            "can't be measured on it; hold out more text or take a smaller context"
        )
    known = (heldout, prepared.fingerprint, attributions, prepared.tokenizer)
    if data.masking is None or ids is None:
        return Source(loader, *known)
    return Source(MaskedLoader(loader, data.masking, ids, train.seed), *known, delimiters={"SEP": [ids.sep]})


def _heldout_text(settings: RunSettings, tokenizer: Tokenizer, tokens: TokenShards) -> HeldoutDomain:
    data, sequences = settings.data, settings.train.sequences_per_step
    if data.masking is not None:
        ids = Vocabulary.of(tokenizer, settings.model.vocab_size)
        batches = partial(masked_heldout_batches, tokens, data.masking, ids, context=data.context, sequences=sequences)
        num_windows = len(tokens) // data.text_context
        return HeldoutDomain(batches, num_windows, tokens.document_text_bytes, whole_text=False)
    bos_id = tokenizer.bos_id if data.bos_in_every_window else None
    batches = partial(
        heldout_batches,
        tokens,
        context=data.context,
        sequences=sequences,
        bos_id=bos_id,
        document_masks=data.document_masks,
    )
    return HeldoutDomain(batches, (len(tokens) - (bos_id is None)) // data.context, tokens.document_text_bytes)


def _training_loader(settings: RunSettings, prepared: PreparedData) -> TrainLoader | MixedLoader:
    """The loader of a run's text: of masked windows what is between [CLS] and [SEP]."""
    train, data = settings.train, settings.data
    loaders = {
        label: TrainLoader(
            tokens,
            context=data.text_context,
            sequences_per_step=train.sequences_per_step,
            seed=train.seed,
            bos_id=prepared.tokenizer.bos_id if data.bos_in_every_window else None,
            document_masks=data.document_masks,
        )
        for label, tokens in ({data.train.label: prepared.train} | prepared.mixture).items()
    }
    if not data.mixture:
        return loaders[data.train.label]
    return MixedLoader(loaders, [1.0, *(mixed.weight for mixed in data.mixture)], train.seed)
