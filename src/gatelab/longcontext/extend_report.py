"""What extending a context did: loss by position before and after, first-token attention beside it, as one page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gatelab.diagnose.measure import measure
from gatelab.evaluate.models import OpenedModel
from gatelab.evaluate.position_loss import Bucket, by_position, difference_by_position, position_losses
from gatelab.files import write_atomically
from gatelab.longcontext.extend import BEFORE, Extended
from gatelab.report.charts import Reference, line_chart
from gatelab.report.folder import to_csv
from gatelab.report.page import Figure, Page, Section, write_page
from gatelab.report.tables import Column, Table
from gatelab.settings import difference
from gatelab.train.checkpoint import step_of
from gatelab.train.run_folder import describe_environment
from gatelab.train.start import weights_checksum

SCHEMA_VERSION = 1
PAGE, NUMBERS, BY_POSITION = "report.html", "extension.json", "loss_by_position.csv"
MEASURED_TEXTS = 2
_MODEL = Column("model", "model")
_START = Column("start", "position, from", ",d")
_STOP = Column("stop", "to below", ",d")
_LAYER = Column("layer", "layer", "d")
COLUMNS: tuple[str, ...] = (
    "model", "start", "stop", "tokens", "nats", "low", "high", "difference", "difference_low", "difference_high",
)  # fmt: skip


class Findings(NamedTuple):
    """Tidy rows: loss of each model by position, and first-token attention by model, length and layer."""

    positions: list[dict[str, Any]]
    attention: list[dict[str, Any]]


def examine(extended: Extended) -> Findings:
    """Read the held-out texts with every model, up to the new context; differences are from the model as it was."""
    length, texts = extended.extension.context, extended.texts
    losses = {name: position_losses(model, texts.rows, length) for name, model in extended.models.items()}
    positions: list[dict[str, Any]] = []
    for name, one in losses.items():
        differences = difference_by_position(one, losses[BEFORE]) if name != BEFORE else []
        by_start = {bucket.start: bucket for bucket in differences}
        positions += [_position_row(name, bucket, by_start.get(bucket.start)) for bucket in by_position(one)]
    lengths = (extended.base.settings.data.context, length)
    attention = [
        row
        for name, model in extended.models.items()
        for tokens in lengths
        for row in _attention_rows(name, model, torch.tensor([row[:tokens] for row in texts.rows[:MEASURED_TEXTS]]))
    ]
    return Findings(positions, attention)


def write_extension_report(folder: Path, extended: Extended, command: str) -> Path:
    """Examine the models and write the page and its numbers into the run folder; returns the path of the page."""
    findings = examine(extended)
    base = extended.base
    numbers = {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "asked": extended.extension.to_mapping(),
        "from": {
            "run": str(base.folder.path),
            "step": step_of(base.checkpoint),
            "weights_sha256": weights_checksum(base.decoder.state_dict()),
        },
        "changed_settings": difference(base.settings, extended.settings),
        "texts": {"number": len(extended.texts.rows), "are_documents": extended.texts.are_documents},
        "loss_by_position": findings.positions,
        "first_token_attention": findings.attention,
    }
    write_atomically(folder / NUMBERS, json.dumps(numbers, indent=1, allow_nan=False) + "\n")
    write_atomically(folder / BY_POSITION, to_csv(COLUMNS, findings.positions))
    write_page(extension_page(extended, findings, command), folder / PAGE)
    return folder / PAGE


def extension_page(extended: Extended, findings: Findings, command: str) -> Page:
    """The whole report."""
    return Page(
        title=f"{extended.base.folder.path.name}, extended to {extended.extension.context:,} tokens",
        lead=_lead(extended, findings),
        command=command,
        sections=[
            _loss_section(extended, findings),
            _attention_section(extended, findings),
            _settings_section(extended),
        ],
        environment=describe_environment(compiled=False),
        notes=extended.base.folder.data["attributions"],
    )


def position_table(findings: Findings) -> Table:
    """Perplexity by position, a column for each model, so that what a change costs at short lengths stands first."""
    names = list(dict.fromkeys(row["model"] for row in findings.positions))
    starts = list(dict.fromkeys((row["start"], row["stop"]) for row in findings.positions))
    cells = {(row["model"], row["start"]): row["perplexity"] for row in findings.positions}
    rows = [{"start": start, "stop": stop, **{name: cells[name, start] for name in names}} for start, stop in starts]
    columns = [_START, _STOP, *(Column(name, name, ".2f") for name in names)]
    return Table(columns, rows, "Perplexity of the tokens at these positions of held-out texts.")


def _position_row(name: str, bucket: Bucket, change: Bucket | None) -> dict[str, Any]:
    row = {
        "model": name,
        **bucket._asdict(),
        "difference": None if change is None else change.nats,
        "difference_low": None if change is None else change.low,
        "difference_high": None if change is None else change.high,
    }
    perplexities = {"perplexity": bucket.nats, "perplexity_low": bucket.low, "perplexity_high": bucket.high}
    return row | {key: None if nats is None else math.exp(min(nats, 700)) for key, nats in perplexities.items()}


def _attention_rows(name: str, opened: OpenedModel, tokens: torch.Tensor) -> Iterator[dict[str, Any]]:
    measurement = measure(opened.model, tokens, attach=opened.attach)
    for layer, share in zip(measurement.layers, measurement.layer_means("first_token_attention"), strict=True):
        floor = layer.floor("first_token_attention")
        yield {"model": name, "length": tokens.shape[1], "layer": layer.layer, "share": share, "floor": floor}


def _lead(extended: Extended, findings: Findings) -> str:
    """Perplexity in the last bucket, which lies beyond the old context, and in the one at its end."""
    trained, context = extended.base.settings.data.context, extended.extension.context
    within = [row for row in findings.positions if row["stop"] <= trained][-1]["start"]
    last = findings.positions[-1]["start"]
    sentences = []
    for start, where in ((within, "within the old context"), (last, "at the end of the new one")):
        rows = [row for row in findings.positions if row["start"] == start]
        figures = ", ".join(f"{row['perplexity']:.2f} ({row['model']})" for row in rows)
        sentences.append(f"At positions {start:,} to {rows[0]['stop']:,}, {where}, perplexity is {figures}.")
    return f"Trained at {trained:,} tokens, extended to {context:,}. " + " ".join(sentences)


def _loss_section(extended: Extended, findings: Findings) -> Section:
    trained, texts = extended.base.settings.data.context, extended.texts
    what = "the beginnings of documents that are longer than the new context"
    if not texts.are_documents:
        what = (
            "rows of documents one after another, because fewer than two are as long as the new context: so far-away "
            "tokens are of other documents, and a model gains little by reading them"
        )
    names = list(extended.models)
    model = Column("model", "model", names=names)
    rows = [row | {"floor": None} for row in findings.positions]
    interval = ("perplexity_low", "perplexity_high") if len(texts.rows) > 1 else None
    curve = line_chart(
        rows, _START, Column("perplexity", "perplexity", ".2f"), model, "Perplexity by position",
        log_x=True, log_y=True, band=interval,
    )  # fmt: skip
    changed = [row for row in findings.positions if row["model"] != BEFORE]
    change = line_chart(
        changed, _START, Column("difference", "cross-entropy, less that before", ".3f", "nats per token"), model,
        "Change by position", log_x=True, band=("difference_low", "difference_high") if interval else None,
        reference=Reference("as before", 0.0),
    )  # fmt: skip
    definition = (
        "exp of the mean cross-entropy of all tokens in a bucket of positions (powers of two); a position counts the "
        "tokens before it. BOS is not scored. Bands: 95 %, by drawing texts with replacement."
    )
    context = f"{len(texts.rows)} held-out texts; the old context ends at {trained:,}."
    caption = f"Each point begins its bucket. Beyond {trained:,} the model as it was reads more than it was trained at."
    paired = "Below zero is better than before. Paired: both models read the same tokens."
    return Section(
        "Loss by position",
        f"The texts are {what}. Scaling by YaRN is the same at all lengths, so it changes short texts too.",
        [
            Figure(curve, caption, definition, context),
            Figure(change, paired, "Mean difference of the cross-entropies of each token.", context),
            position_table(findings),
        ],
    )


def _attention_section(extended: Extended, findings: Findings) -> Section:
    context = extended.extension.context
    rows = [row for row in findings.attention if row["length"] == context]
    model = Column("model", "model", names=list(extended.models))
    share = Column("share", "attention to the first token", ".3f")
    floor = Reference("uniform attention", rows[0]["floor"])
    chart = line_chart(rows, _LAYER, share, model, f"First-token attention at {context} tokens", reference=floor)
    columns = [
        _MODEL,
        Column("length", "tokens", ",d"),
        Column("mean", "mean over layers", ".4f"),
        Column("worst", "worst layer", ".4f"),
        Column("floor", "uniform attention", ".4f"),
    ]
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in findings.attention:
        groups.setdefault((row["model"], row["length"]), []).append(row)
    table = [
        {
            "model": name,
            "length": length,
            "mean": sum(row["share"] for row in group) / len(group),
            "worst": max(row["share"] for row in group),
            "floor": group[0]["floor"],
        }
        for (name, length), group in groups.items()
    ]
    number = min(MEASURED_TEXTS, len(extended.texts.rows))
    definition = "Mean over queries, then heads, of the attention probability on token 0."
    figure = Figure(chart, "One point for each layer.", definition, f"On {number} of the texts.")
    return Section("First-token attention", "", [figure, Table(columns, table, "At the old context and at the new.")])


def _settings_section(extended: Extended) -> Section:
    rows = [
        {"path": path, "before": _setting_text(before), "after": _setting_text(after)}
        for path, (before, after) in difference(extended.base.settings, extended.settings).items()
    ]
    columns = [Column("path", "setting"), Column("before", "before"), Column("after", "after")]
    train = extended.settings.train
    text = "Nothing was trained: the weights are those of the run."
    if extended.extension.yarn is None:
        tokens = train.steps * extended.settings.tokens_per_step
        text = (
            f"Trained on for {tokens:,} tokens in {train.steps:,} steps of {train.sequences_per_step} rows of "
            f"{extended.settings.data.context:,}, at a peak learning rate of {train.optimizer.learning_rate:g}, with a "
            f"new optimizer state and a {train.schedule.kind.replace('_', ' ')} schedule. More training lowers the "
            "loss at all positions; what it did to those within the old context is not the longer context's doing."
        )
    return Section("What was changed", text, [Table(columns, rows, "Settings that differ from the run's.")])


def _setting_text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "–" if value is None else str(value)
