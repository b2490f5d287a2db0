"""The end of a run: all held-out text scored, the model measured, the cost added up."""

from __future__ import annotations

import json
import statistics
from typing import Any

import torch
from safetensors.torch import save_file

from gatelab.diagnose.measurement import Measurement
from gatelab.files import atomic_path, write_atomically
from gatelab.model.accounting import count_parameters, flops_per_token_forward, flops_per_token_training
from gatelab.model.decoder import Decoder
from gatelab.model.perplexity import mean_perplexity
from gatelab.train.divergence import require_finite
from gatelab.train.evaluation import Score, measure_heldout, score
from gatelab.train.metrics import count_spikes, read_metrics, spikes_per_10k_steps
from gatelab.train.parallel.mesh import ALONE, Ranks
from gatelab.train.parallel.placement import whole_decoder
from gatelab.train.run_folder import RunFolder
from gatelab.train.settings import RunSettings
from gatelab.train.source import Source


def conclude(
    run: RunFolder,
    settings: RunSettings,
    decoder: Decoder,
    source: Source,
    peak_flops: float,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """Score every held-out token, measure sinks and gates, write the run's last files and return ``result.json``.

    The ranks share the scoring; the first measures the whole model and writes.
    """
    scores = {name: score(decoder, domain, ranks=ranks) for name, domain in source.heldout.items()}
    heldout = {name: one.figures() for name, one in scores.items()}
    for name, figures in heldout.items():
        require_finite(run, settings.train.steps, f"held-out {name}", figures)
    whole = whole_decoder(decoder, ranks)
    if whole is not None:
        _save_documents(run, scores, source)
        measurement = _measure_whole(run, settings, whole, source)
        result = {
            "heldout": heldout,
            "mean_perplexity": mean_perplexity(figures["perplexity"] for figures in heldout.values()),
            "measurement": measurement.summary(),
            **_cost(run, settings, peak_flops),
        }
        run.finish(result)
    ranks.wait()
    assert run.result is not None
    return run.result


def _measure_whole(run: RunFolder, settings: RunSettings, decoder: Decoder, source: Source) -> Measurement:
    measurement = measure_heldout(decoder, source, settings.train.evaluation.final_measured_windows)
    require_finite(run, settings.train.steps, "the last measurement", measurement.summary())
    write_atomically(run.measurement, json.dumps(measurement.to_mapping(), indent=1, allow_nan=False) + "\n")
    return measurement


def _save_documents(run: RunFolder, scores: dict[str, Score], source: Source) -> None:
    """Cross-entropy, tokens and UTF-8 bytes of every held-out document: what a bootstrap over documents draws from."""
    tensors = {}
    for name, one in scores.items():
        text_bytes = source.heldout[name].document_text_bytes
        if text_bytes is not None:
            tensors[f"{name}/nats"] = one.document_nats
            tensors[f"{name}/tokens"] = one.document_tokens
            tensors[f"{name}/bytes"] = torch.from_numpy(text_bytes).double()
    with atomic_path(run.documents) as temporary:
        save_file(tensors, temporary)


def _cost(run: RunFolder, settings: RunSettings, peak_flops: float) -> dict[str, Any]:
    """Parameters, operations, seconds and spikes, from the settings and from what the run recorded."""
    rows = read_metrics(run.metrics)
    steps = [row for row in rows if row["kind"] == "step"]
    training_seconds = sum(row["seconds"] for row in steps)
    flops = flops_per_token_training(settings.model, settings.data.context, settings.train.recompute)
    tokens_per_second = settings.tokens_per_step / statistics.median(row["seconds"] for row in steps)
    curve = [row["step"] for row in steps], [row["loss"] for row in steps]
    counts = count_parameters(settings.model)
    return {
        "parameters": counts.total,
        "active_parameters": counts.active,
        "gate_parameters": counts.gates,
        "tokens": settings.tokens_per_step * len(steps),
        "flops_per_token_forward": flops_per_token_forward(settings.model, settings.data.context),
        "flops_per_token_training": flops,
        "tokens_per_second": tokens_per_second,
        "peak_flops": peak_flops,
        "peak_share": tokens_per_second * flops / peak_flops,
        "training_seconds": training_seconds,
        "evaluation_seconds": sum(row["seconds"] for row in rows if row["kind"] == "evaluation"),
        "measurement_seconds": sum(row["seconds"] for row in rows if row["kind"] == "measurement"),
        "nonfinite_steps": [row for row in rows if row["kind"] == "event"],
        "loss_spikes": count_spikes(*curve),
        "loss_spikes_per_10k_steps": spikes_per_10k_steps(*curve),
    }
