"""Equal conditions: what the arms of a study have in common, checked on the weights and batches themselves."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.settings import ModelSettings
from gatelab.report.tables import Column, Table
from gatelab.settings import difference
from gatelab.study.study import Arm, Study
from gatelab.train.settings import RunSettings
from gatelab.train.source import open_source
from gatelab.train.start import weights_checksum

SAMPLED_STEPS = 32
DECIDES_WEIGHTS = ("model.init_std", "train.start_from")
DECIDES_BATCHES = ("data.", "train.sequences_per_step", "train.steps")
DECIDES_SCHEDULE = ("train.steps", "train.schedule.", "train.optimizer.")
_OF_AN_ARM = (".gates.", ".control.", ".sink.")


class Conditions(NamedTuple):
    """What one arm begins with and reads.

    ``differences``: each path of the settings that is not the baseline's, with the baseline's value and the arm's.
    ``weights``: by seed, the SHA-256 of the initial weights that all arms have, of which there are
    ``common_parameters``; the part of a feed-forward that the narrowest arm has too counts, gates and sinks don't.
    ``batches``: by seed, the SHA-256 of 32 training batches evenly spread over the run. ``fingerprint`` is the data's.
    """

    arm: str
    differences: dict[str, list[Any]]
    common_parameters: int
    weights: dict[int, str]
    batches: dict[int, str]
    fingerprint: str

    def declares(self, paths: tuple[str, ...]) -> bool:
        """Whether the arm differs from the baseline in one of these settings."""
        return _declares(self.differences, paths)

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Conditions:
        """The record read from JSON, whose keys are text."""
        weights, batches = (
            {int(seed): digest for seed, digest in data[name].items()} for name in ("weights", "batches")
        )
        return cls(**{**data, "weights": weights, "batches": batches})


def check_conditions(study: Study, cache: Path) -> list[Conditions]:
    """The conditions of every arm, in their order; prepares the data.

    Raises ``ValueError`` for data that can't be read, and when an arm differs from the baseline in settings that no
    word of it declares, in initial weights although neither scale nor start is declared, or in batches although neither
    data nor batch is.
    """
    baseline = study.arm(study.baseline)
    differences = {arm.name: _declared_differences(study, arm, baseline) for arm in study.arms}
    runs = {arm.name: {seed: study.settings_of(arm, seed) for seed in study.seeds} for arm in study.arms}
    reader = _Reader(cache)
    read = {name: {seed: reader.read(one) for seed, one in of_arm.items()} for name, of_arm in runs.items()}
    num_common, weights = common_weights(study)
    _require_equal("initial weights", weights, study.baseline, differences, DECIDES_WEIGHTS)
    batches = {name: {seed: one.batches for seed, one in of_arm.items()} for name, of_arm in read.items()}
    _require_equal("training batches", batches, study.baseline, differences, DECIDES_BATCHES)
    first = study.seeds[0]
    return [
        Conditions(name, differences[name], num_common, weights[name], batches[name], of_arm[first].fingerprint)
        for name, of_arm in read.items()
    ]


def common_weights(study: Study) -> tuple[int, dict[str, dict[int, str]]]:
    """How many initial weights all arms have in common, and their SHA-256 by arm and seed."""
    models = {arm.name: study.settings_of(arm).model for arm in study.arms}
    sizes = _common_sizes(list(models.values()))
    digests = {
        name: {seed: _weights_digest(model, seed, sizes) for seed in study.seeds} for name, model in models.items()
    }
    return sum(math.prod(size) for size in sizes.values()), digests


def _require_equal(
    what: str,
    digests: Mapping[str, dict[int, str]],
    baseline: str,
    differences: Mapping[str, dict[str, list[Any]]],
    deciding: tuple[str, ...],
) -> None:
    """Raise ``ValueError`` for an arm with other digests than the baseline that declares none of ``deciding``."""
    for arm, own in digests.items():
        if own != digests[baseline] and not _declares(differences[arm], deciding):
            raise ValueError(
                f"arm {arm} has other {what} than {baseline}, which it does not declare; assign one of "
                f"{', '.join(deciding)} if it is meant to, or compare on another version of GateLab"
            )


def conditions_table(study: Study, conditions: Iterable[Conditions]) -> Table:
    """A row for each arm: what is equal, and what it declares to be otherwise."""
    conditions = list(conditions)
    base = next(one for one in conditions if one.arm == study.baseline)
    columns = [
        Column("arm", "arm"),
        Column("weights", "initial weights in common"),
        Column("batches", "training batches"),
        Column("schedule", "steps, schedule, optimizer"),
        Column("differences", f"differs from {study.baseline} in"),
    ]
    rows = [
        {
            "arm": one.arm,
            "weights": "equal" if one.weights == base.weights else "other, as declared",
            "batches": "equal" if one.batches == base.batches else "other, as declared",
            "schedule": "other, as declared" if one.declares(DECIDES_SCHEDULE) else "equal",
            "differences": ", ".join(one.differences) or None,
        }
        for one in conditions
    ]
    seeds = ", ".join(f"{seed}: {digest[:8]}" for seed, digest in base.weights.items())
    orders = ", ".join(f"{seed}: {digest[:8]}" for seed, digest in base.batches.items())
    caption = (
        f"{base.common_parameters:,} initial weights are common to all arms. Checksums by seed, of the baseline's: "
        f"weights {seeds}; batches {orders}."
    )
    return Table(columns, rows, caption)


def _declares(differences: Iterable[str], paths: tuple[str, ...]) -> bool:
    return any(path.startswith(paths) for path in differences)


def _declared_differences(study: Study, arm: Arm, baseline: Arm) -> dict[str, list[Any]]:
    """Where two arms' settings differ; ``ValueError`` for a path that their words don't name.

    A word with a dot names its path, one without (``gate=``, ``match=``) anything of the model.
    """
    words = [word.partition("=")[0].strip() for word in (*arm.assignments, *baseline.assignments)]
    shared = [word.partition("=")[0].strip() for word in study.assignments]
    named = {word if "." in word else "model" for word in words} | {"model" for word in shared if "." not in word}
    changed = difference(study.settings_of(baseline), study.settings_of(arm))
    for path, (before, now) in changed.items():
        if not any(f"{path}.".startswith(f"{name}.") for name in named):
            raise ValueError(
                f"arm {arm.name} differs from {baseline.name} in {path} ({now!r}, not {before!r}), which no word of it "
                "declares; declare it, or make it equal in the study's assignments"
            )
    return {path: list(values) for path, values in changed.items()}


def _common_sizes(models: Iterable[ModelSettings]) -> dict[str, tuple[int, ...]]:
    """Shapes, cut to the narrowest feed-forward, of the weights that all models have, by name."""
    shapes: list[dict[str, tuple[int, ...]]] = []
    for model in models:
        with torch.device("meta"):
            weights = Decoder(model).state_dict()
        shapes.append({name: tuple(_unfolded(name, weight).shape) for name, weight in weights.items()})
    common: dict[str, tuple[int, ...]] = {}
    for name in shapes[0]:
        of_all = {one[name] for one in shapes if name in one}
        if any(name not in one for one in shapes) or any(part in name for part in _OF_AN_ARM):
            continue
        if len(of_all) == 1 or (".mlp." in name and len({len(shape) for shape in of_all}) == 1):
            common[name] = tuple(min(sizes) for sizes in zip(*of_all, strict=True))
    return common


def _weights_digest(model: ModelSettings, seed: int, sizes: Mapping[str, tuple[int, ...]]) -> str:
    decoder = Decoder(model)
    initialize(decoder, seed)
    weights = decoder.state_dict()
    return weights_checksum({name: _cut(_unfolded(name, weights[name]), size) for name, size in sizes.items()})


def _unfolded(name: str, weight: Tensor) -> Tensor:
    """Experts' fused gate and up projections, (E 2F D), as (E 2 F D), so that a narrower one is a part of them."""
    return weight.unflatten(1, (2, -1)) if name.endswith(".experts.gate_up_proj") else weight


def _cut(weight: Tensor, sizes: tuple[int, ...]) -> Tensor:
    for dimension, size in enumerate(sizes):
        weight = weight.narrow(dimension, 0, size)
    return weight.contiguous()


class _Read(NamedTuple):
    """What a run reads: the digest of its batches, the fingerprint of its data."""

    batches: str
    fingerprint: str


class _Reader:
    """What runs read, opened once for all that read the same."""

    def __init__(self, cache: Path):
        self._cache = cache
        self._known: dict[tuple[object, ...], _Read] = {}

    def read(self, settings: RunSettings) -> _Read:
        """The digest of 32 batches of the run, from the first to the last."""
        train = settings.train
        key = (settings.data.to_yaml(), train.seed, train.sequences_per_step, train.steps)
        if key not in self._known:
            self._known[key] = self._digest(settings)
        return self._known[key]

    def _digest(self, settings: RunSettings) -> _Read:
        source, last = open_source(settings, self._cache), settings.train.steps - 1
        digest = hashlib.sha256()
        for step in np.linspace(0, last, min(last + 1, SAMPLED_STEPS)).round().astype(int).tolist():
            batch = source.train.batch(step)
            for part in (batch.inputs, batch.targets, batch.documents):
                if part is not None:
                    digest.update(f"{step} {list(part.shape)}\n".encode() + part.contiguous().numpy().tobytes())
        return _Read(digest.hexdigest(), source.fingerprint)
