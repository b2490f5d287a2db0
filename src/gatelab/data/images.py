"""Images of handwritten digits as sequences of patches, to be told apart: targets are classes, at [CLS] alone.

Notation: P the pixels of a patch, T = 1 + patches of an image. A patch is one number, sum_k pixel_k L^k for its pixels
in reading order, each of L = 17 levels from 0 (black) to 16; [CLS], which comes first, is L^P. A patch of 0 is
background. The model reads the pixels back from the number: :mod:`gatelab.model.patches`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gatelab.data.loader import IGNORED, Batch, Epochs, rows_in_pieces
from gatelab.data.settings import ImageSettings

BACKGROUND = 0


@dataclass(frozen=True)
class Images:
    """Sequences of one split, (N T), and their classes, (N); both int64."""

    sequences: np.ndarray
    classes: np.ndarray

    def __len__(self) -> int:
        return len(self.classes)

    def batch(self, numbers: Sequence[int]) -> Batch:
        """The images of these numbers."""
        targets = np.full((len(numbers), self.sequences.shape[1]), IGNORED)
        targets[:, 0] = self.classes[list(numbers)]
        return Batch(torch.from_numpy(self.sequences[list(numbers)]), torch.from_numpy(targets))


@dataclass(frozen=True)
class PreparedImages:
    """The images that a run reads; ``fingerprint`` is a SHA-256 over both splits."""

    train: Images
    heldout: Images
    fingerprint: str
    attribution: str


class ImageLoader:
    """Training batches of images: ``batch(step)`` depends on the images, the seed and the step alone.

    Each epoch reads every image once, in an order drawn from (seed, epoch), as :class:`TrainLoader` does.
    """

    def __init__(self, images: Images, *, sequences_per_step: int, seed: int):
        self.context = images.sequences.shape[1]
        self.sequences_per_step = sequences_per_step
        self._images = images
        self._epochs = Epochs(len(images), seed)

    def batch(self, step: int, rank: int = 0, num_ranks: int = 1, pieces: int = 1) -> Batch:
        """The sequences of one rank at one step, as :meth:`TrainLoader.batch` gives them."""
        rows = rows_in_pieces(self.sequences_per_step, rank, num_ranks, pieces)
        return self._images.batch(self._epochs.windows_at([step * self.sequences_per_step + row for row in rows]))


def heldout_image_batches(images: Images, sequences: int) -> Iterator[Batch]:
    """All images in their order, in batches of one fixed shape, the last filled up with images that score nothing."""
    for first in range(0, len(images), sequences):
        numbers = [min(first + row, len(images) - 1) for row in range(sequences)]
        batch = images.batch(numbers)
        batch.targets[len(images) - first :] = IGNORED
        yield batch


def prepare_images(settings: ImageSettings) -> PreparedImages:
    """Scikit-learn's digits (UCI, Alpaydin and Kaynak 1998; CC BY 4.0), cut into patches, and split by the seed.

    Raises ``ValueError`` without scikit-learn.
    """
    try:
        from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError("images of digits need the package scikit-learn: install gatelab[vision]") from None
    digits: Any = load_digits()
    sequences = sequences_of(digits.images.astype(np.int64), settings)
    order = np.random.default_rng([settings.seed]).permutation(len(sequences))
    num_heldout = round(settings.heldout_fraction * len(sequences))
    if not 0 < num_heldout < len(sequences):
        raise ValueError(
            f"data.images.heldout_fraction={settings.heldout_fraction:g} of {len(sequences):,} images leaves a split "
            "empty; choose another fraction"
        )
    heldout, train = (
        Images(sequences[numbers], digits.target[numbers].astype(np.int64))
        for numbers in (np.sort(order[:num_heldout]), np.sort(order[num_heldout:]))
    )
    found = hashlib.sha256()
    for split in (train, heldout):
        found.update(split.sequences.astype("<i8").tobytes() + split.classes.astype("<i8").tobytes())
    attribution = (
        f"handwritten digits of UCI (Alpaydin and Kaynak 1998, CC BY 4.0), as scikit-learn carries them: "
        f"{len(train):,} images to train on, {len(heldout):,} held out"
    )
    return PreparedImages(train, heldout, found.hexdigest(), attribution)


def sequences_of(images: np.ndarray, settings: ImageSettings) -> np.ndarray:
    """[CLS] and the numbers of all patches in reading order, (N T), from brightness (N side side), int64."""
    size, side = settings.patch_size, settings.side
    rows = images.reshape(len(images), side // size, size, side // size, size)
    patches = rows.transpose(0, 1, 3, 2, 4).reshape(len(images), settings.num_patches, size * size)
    ids = patches @ settings.levels ** np.arange(size * size)
    return np.concatenate([np.full((len(images), 1), settings.cls_id), ids], axis=1)
