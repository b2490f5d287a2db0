"""Digits as sequences of patches: against loops over pixels, the split, and batches as pure functions."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
import torch

from gatelab.data.images import ImageLoader, Images, PreparedImages, heldout_image_batches, prepare_images, sequences_of
from gatelab.data.loader import IGNORED
from gatelab.data.settings import DataSettings, ImageSettings

COUNT, HELDOUT = 1797, 359


@pytest.fixture(scope="module")
def prepared() -> PreparedImages:
    pytest.importorskip("sklearn")
    return prepare_images(ImageSettings())


def sequence_by_loops(image: np.ndarray, size: int) -> list[int]:
    """[CLS], then each patch's pixels row by row, the first counting least."""
    found = [17 ** (size * size)]
    for top in range(0, 8, size):
        for left in range(0, 8, size):
            pixels = [int(image[top + row, left + column]) for row in range(size) for column in range(size)]
            found.append(sum(pixel * 17**place for place, pixel in enumerate(pixels)))
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_sequences_are_those_of_loops(size: int) -> None:
    images = np.random.default_rng(0).integers(17, size=(5, 8, 8))
    images[2] = 16
    settings = ImageSettings.parse({"patch_size": size})
    found = sequences_of(images, settings)
    assert found.tolist() == [sequence_by_loops(image, size) for image in images]
    assert found.shape == (5, 1 + settings.num_patches) and found.max() == settings.cls_id
    assert found[2, 1] == settings.cls_id - 1, "a white patch is the number before [CLS]"


def test_every_digit_is_in_one_split_by_the_seed(prepared: PreparedImages) -> None:
    assert (len(prepared.train), len(prepared.heldout)) == (COUNT - HELDOUT, HELDOUT)
    both = np.concatenate([prepared.train.sequences, prepared.heldout.sequences])
    classes = np.concatenate([prepared.train.classes, prepared.heldout.classes])
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    pairs = zip(digits.images, digits.target, strict=True)
    known = {(*image.astype(int).ravel().tolist(), int(label)) for image, label in pairs}
    assert {(*row[1:].tolist(), int(label)) for row, label in zip(both, classes, strict=True)} == known
    again, other = prepare_images(ImageSettings()), prepare_images(ImageSettings(seed=1))
    assert again.fingerprint == prepared.fingerprint != other.fingerprint
    assert not np.array_equal(other.heldout.sequences, prepared.heldout.sequences)
    assert set(prepared.heldout.classes.tolist()) == set(range(10))
    assert prepared.attribution.endswith("1,438 images to train on, 359 held out")


def test_batches_are_pure_functions_of_seed_and_step(prepared: PreparedImages) -> None:
    loader = ImageLoader(prepared.train, sequences_per_step=4, seed=3)
    assert loader.context == 65
    whole = [loader.batch(step) for step in range(400)]
    again = ImageLoader(prepared.train, sequences_per_step=4, seed=3).batch(371)
    assert torch.equal(again.inputs, whole[371].inputs) and torch.equal(again.targets, whole[371].targets)
    parts = [loader.batch(371, rank, 2, 2) for rank in range(2)]
    assert torch.equal(torch.cat([part.inputs for part in parts])[[0, 2, 1, 3]], whole[371].inputs)
    other = ImageLoader(prepared.train, sequences_per_step=4, seed=4).batch(371)
    assert not torch.equal(other.inputs, again.inputs)
    seen = torch.cat([batch.inputs for batch in whole])[: len(prepared.train)].tolist()
    assert sorted(seen) == sorted(prepared.train.sequences.tolist()), "an epoch has every image once"


def test_the_class_is_the_only_target_and_stands_at_cls() -> None:
    images = Images(np.arange(30).reshape(5, 6), np.array([3, 1, 4, 1, 5]))
    batch = images.batch([4, 0])
    assert batch.inputs.tolist() == [[24, 25, 26, 27, 28, 29], [0, 1, 2, 3, 4, 5]]
    assert batch.targets.tolist() == [[5, *[IGNORED] * 5], [3, *[IGNORED] * 5]]
    batches = list(heldout_image_batches(images, 3))
    assert [batch.targets[:, 0].tolist() for batch in batches] == [[3, 1, 4], [1, 5, IGNORED]]
    assert all(batch.inputs.shape == (3, 6) for batch in batches)


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(
        ValueError, match=r"^images of digits need the package scikit-learn: install gatelab\[vision\]$"
    ):
        prepare_images(ImageSettings())


def test_a_split_without_images_is_refused() -> None:
    pytest.importorskip("sklearn")
    with pytest.raises(ValueError, match=r"^data.images.heldout_fraction=0.0001 of 1,797 images leaves a split empty"):
        prepare_images(ImageSettings(heldout_fraction=1e-4))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["images={}"], "context=512 with images is impossible: [CLS] and 64 patches of patch_size=1 are 65 tokens"),
        (["images={patch_size: 2}", "context=65"], "[CLS] and 16 patches of patch_size=2 are 17 tokens"),
        (["images={patch_size: 3}", "context=65"], "images.patch_size cannot be 3; the choices are: 1, 2"),
        (["images={name: letters}", "context=65"], "images.name cannot be 'letters'"),
        (["images={heldout_fraction: 1}", "context=65"], "images.heldout_fraction cannot be 1"),
        (["images={}", "context=65", "masking={}"], "images with masking is impossible: an image is no text"),
        (["images={}", "context=65", "synthetic={}"], "images with synthetic is impossible"),
        (["images={}", "context=65", "document_masks=true"], "images with document_masks is impossible"),
    ],
)
def test_impossible_images_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        DataSettings().with_overrides(overrides)
