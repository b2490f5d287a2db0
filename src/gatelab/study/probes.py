"""Probes of finished runs: what bfloat16 and few levels do to the model that a run left in its last checkpoint.

They read whole windows of the first held-out domain, which BOS may begin and documents may share; all arms read the
same ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from gatelab.evaluate.precision import probe_precision
from gatelab.evaluate.quantisation.layers import linear_layers, require_roundable
from gatelab.evaluate.quantisation.schemes import find_scheme
from gatelab.evaluate.quantisation.simulated import require_calibration
from gatelab.evaluate.quantisation.trial import scheme_losses
from gatelab.evaluate.rows import Subject
from gatelab.files import write_atomically
from gatelab.model.decoder import Decoder
from gatelab.study.jobs import PROBED, Job, JobResult, read_result
from gatelab.study.study import LOGITS_ERROR, PROBES, QUANTISATION_COST, Study
from gatelab.train.checkpoint import checkpoints, load_decoder
from gatelab.train.run_folder import RunFolder
from gatelab.train.settings import RunSettings
from gatelab.train.source import open_source

SCHEMES_PROBED = ("w8a8", "w8a8_per_token", "w4a4", "fp8", "int8_weights")


class ProbedText(NamedTuple):
    """Windows that are scored, and as many after them that give static ranges."""

    tokens: Int[Tensor, "N T"]
    calibration: Int[Tensor, "N T"]


def schemes_of(study: Study) -> tuple[str, ...]:
    """The schemes that a study's runs are probed with: the usual ones, and its metric's."""
    name, _, scheme = study.metric.removesuffix("]").partition("[")
    return tuple(dict.fromkeys([*SCHEMES_PROBED, *([scheme] if name == QUANTISATION_COST else [])]))


def require_probeable(study: Study, cache: Path) -> None:
    """Raise ``ValueError`` for a layer of any arm that a scheme can't round, then for too little held-out text."""
    if not study.settings_of(study.arm(study.baseline)).model.causal:
        raise ValueError(
            f"metric {study.metric} is measured with the loss of the next token, which models with causal=False see; "
            "choose another metric"
        )
    schemes = [find_scheme(name) for name in schemes_of(study)]
    with torch.device("meta"):
        arms = [linear_layers(Decoder(study.settings_of(arm).model)) for arm in study.arms]
    for layers, scheme in product(arms, schemes):
        require_roundable(layers, scheme)
    text = probed_text(study.settings_of(study.arm(study.baseline)), cache)
    for layers, scheme in product(arms, schemes):
        if scheme.activations is not None and scheme.needs_calibration:
            require_calibration(layers, scheme.activations, text.calibration)


def probe_runs(study: Study, jobs: Sequence[Job], folder: Path, cache: Path) -> list[JobResult]:
    """Probe each finished run that is not probed yet, and return the results of all with what was found.

    A run's figures are written to ``probes.json`` in its folder, so what is there is never measured again.
    """
    for job in jobs:
        if not is_probed(study, read_result(job, folder)):
            found = _probe(RunFolder(folder / job.folder), probed_text(job.settings, cache), schemes_of(study))
            write_atomically(folder / job.folder / PROBED, json.dumps(found, indent=1, allow_nan=False) + "\n")
    return [read_result(job, folder) for job in jobs]


def is_probed(study: Study, result: JobResult) -> bool:
    """Whether a result has all that it will have; a run that diverged or tuned is never probed."""
    if study.metric not in PROBES or result.purpose == "tuning" or result.measurement is None:
        return True
    return study.metric in result.measurement


def probed_text(settings: RunSettings, cache: Path) -> ProbedText:
    """The first whole held-out windows, half of them to score: as many as the run's last measurement reads.

    Raises ``ValueError`` for fewer than two whole windows.
    """
    windows = open_source(settings, cache).measured_windows(2 * settings.train.evaluation.final_measured_windows).inputs
    if len(windows) < 2:
        raise ValueError(
            f"the held-out text has {len(windows)} whole windows of context={settings.data.context}; probes score one "
            "and calibrate on another, so hold out more text or take a smaller context"
        )
    half = len(windows) // 2
    return ProbedText(windows[:half], windows[half : 2 * half])


def _probe(run: RunFolder, text: ProbedText, schemes: Sequence[str]) -> dict[str, float]:
    saved = checkpoints(run.checkpoints)
    if not saved:
        raise ValueError(f"{run.path} has no checkpoint left to probe; restore it, or run the study in a new folder")
    decoder = load_decoder(saved[-1])
    rows = probe_precision(decoder, text.tokens[:1], Subject(run.path.name))
    found = {LOGITS_ERROR: next(row["value"] for row in rows if row["metric"] == LOGITS_ERROR)}
    plain, *losses = scheme_losses(decoder, schemes, text.tokens, text.calibration)
    return found | {f"{QUANTISATION_COST}[{one.scheme}]": fmean(one.nats) - fmean(plain.nats) for one in losses}
