"""The report on streamed models: a page with curves, and the numbers behind it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gatelab.longcontext.streaming.cache import WindowCache
from gatelab.longcontext.streaming.statistics import BLOCK, Mean, StreamSummary, bin_rows, summarize
from gatelab.longcontext.streaming.stream import StreamedModel
from gatelab.report.charts import Reference, line_chart
from gatelab.report.folder import to_csv, write_report
from gatelab.report.page import Figure, Page, Section
from gatelab.report.tables import Column, Table

SCHEMA_VERSION = 1
FILES = ("metrics.json", "metrics.csv")
_WIDEST = 40
_POSITION = Column("middle", "position in the text", ",.0f", "tokens")
_METHOD = (
    "A window cache (StreamingLLM, Xiao et al. 2309.17453) remembers the first n tokens of the text and the W newest, "
    "written n + W; everything between is evicted. A token's position is its place in the cache, so keys are turned "
    "anew when tokens before them go, and no distance exceeds n + W - 1 however long the text. Every token sees its "
    "own W newest tokens, itself included; a layer with a window of its own keeps the n tokens too, and no more than "
    "that window together. A model that needs its first tokens gets worse without them and recovers with a few; one "
    "that does not shows no difference.\n\n"
    f"Intervals are 95 % t intervals over blocks of {BLOCK} neighbouring tokens: of this text, for these weights. They "
    "say nothing about other seeds of training."
)
_TOKENIZERS = (
    "The two models read different tokens. Compare each with itself, not nats per token of one with the other's."
)


def write_streaming(folder: Path, models: Sequence[StreamedModel], command: str) -> Path:
    """Write ``metrics.json``, ``metrics.csv``, ``report.html`` and ``figures/``; returns the path of the page.

    The folder appears whole or not at all, in place of an earlier report; ``docs/streaming.md`` has the schema.
    """
    rows = [row for model in models for row in bin_rows(model)]
    metrics = {"schema_version": SCHEMA_VERSION, "command": command, "models": [_mapping(model) for model in models]}
    texts = json.dumps(metrics, indent=1, allow_nan=False) + "\n", to_csv(list(rows[0]), rows)
    return write_report(folder, streaming_page(models, command), dict(zip(FILES, texts, strict=True)))


def streaming_page(models: Sequence[StreamedModel], command: str) -> Page:
    """The report on one or two models, made from their losses and contexts alone."""
    curves = [_loss_figure(model) for model in models]
    costs = _cost_figures(models)
    content = [streaming_table(models), *curves]
    sections = [Section("Loss by position in the text", _METHOD, content)]
    if costs:
        sections.append(Section("What the first tokens are worth", "", costs))
    sections.append(Section("Context", "", [_context_table(models)]))
    return Page(
        title=f"Streaming of {' and '.join(model.name for model in models)}",
        lead="\n\n".join([*map(finding, models), *([_TOKENIZERS] if _read_differently(models) else [])]),
        command=command,
        sections=sections,
    )


def finding(model: StreamedModel) -> str:
    """What evicting the first tokens does to a model, in one sentence with its interval."""
    summaries = [one for one in summarize(model) if one.loss.cache is not None]
    fewest, most = summaries[0], summaries[-1]
    assert fewest.after is not None and most.after is not None
    loss = f"{fewest.after.value:.3f} nats per token with {fewest.loss.label} tokens"
    begin = f"{model.name}: once the caches evict, {loss}"
    cost = fewest.over_most_kept
    if cost is None:
        return f"{begin}."
    return (
        f"{begin}, {most.after.value:.3f} with {most.loss.label}; the difference is {cost.value:+.3f}{_within(cost)}."
    )


def streaming_table(models: Sequence[StreamedModel]) -> Table:
    """Each cache of each model, for a terminal too."""
    columns = [
        Column("model", "model"),
        Column("cache", "kept + recent"),
        Column("before", "before", ".3f"),
        Column("after", "after", ".3f"),
        Column("perplexity", "perplexity", ",.2f"),
        Column("cost", "over most kept", "+.3f"),
        Column("interval", "95 %", "+.3f"),
        Column("over_full", "over all", "+.3f"),
    ]
    rows = [_table_row(model, one) for model in models for one in summarize(model)]
    after = next(one.after for one in summarize(models[0]) if one.after is not None)
    caption = (
        f"Cross-entropy in nats per token before any cache evicts a token, and after all have ({after.num_tokens:,} "
        "tokens); its differences from the cache with the most kept tokens, and from the model that evicts nothing."
    )
    return Table(columns, rows, caption)


def _table_row(model: StreamedModel, one: StreamSummary) -> dict[str, Any]:
    cost = one.over_most_kept
    return {
        "model": model.name,
        "cache": one.loss.label,
        "before": one.before.value,
        "after": one.after.value if one.after else None,
        "perplexity": math.exp(one.after.value) if one.after else None,
        "cost": cost.value if cost else None,
        "interval": cost.interval if cost else None,
        "over_full": one.over_full.value if one.over_full else None,
    }


def _loss_figure(model: StreamedModel) -> Figure:
    loss = Column("loss", "cross-entropy", ".3f", "nats per token")
    cache = Column("cache", "kept + recent", names=[one.label for one in model.losses])
    chart = line_chart(bin_rows(model), _POSITION, loss, cache, f"Loss of {model.name}")
    return Figure(chart, "Each point is the mean of a stretch of tokens around it.", context=_text(model))


def _cost_figures(models: Sequence[StreamedModel]) -> list[Figure]:
    """One figure with a line for each cache that keeps fewer tokens than the fullest; none if there is one cache."""
    most = _most_kept(models[0])
    rows = [
        row | {"series": f"{row['model']}, {row['cache']}"}
        for model in models
        for row in bin_rows(model)
        if row["kept"] is not None and row["kept"] < most.kept
    ]
    if not rows:
        return []
    cost = Column("cost", f"loss minus that with {most.label}", "+.3f", "nats per token")
    series = Column("series", "model, kept + recent")
    chart = line_chart(
        rows, _POSITION, cost, series, "What keeping fewer tokens costs",
        band=("cost_low", "cost_high"), reference=Reference("no difference", 0.0),
    )  # fmt: skip
    shown = "; ".join(dict.fromkeys(row["series"] for row in rows))
    caption = f"Above zero, the first tokens were needed. Shown: {shown}."
    definition = f"Mean difference of the losses of the same tokens, read with fewer kept tokens and with {most.label}."
    return [Figure(chart, caption, definition, _text(models[0]))]


def _most_kept(model: StreamedModel) -> WindowCache:
    cache = model.losses[-2].cache
    assert cache is not None
    return cache


def _text(model: StreamedModel) -> str:
    context = model.context
    return f"{context['samples']} x {context['length']:,} tokens of {context['text']}; BOS: {context['bos']}."


def _read_differently(models: Sequence[StreamedModel]) -> bool:
    return len({model.context["tokens_sha256"] for model in models}) > 1


def _context_table(models: Sequence[StreamedModel]) -> Table:
    keys = dict.fromkeys(key for model in models for key in model.context)
    columns = [Column("key", ""), *(Column(str(number), model.name) for number, model in enumerate(models))]
    rows = [{"key": key} | {str(n): _short(model.context.get(key)) for n, model in enumerate(models)} for key in keys]
    return Table(columns, rows)


def _short(value: object) -> str | None:
    """What fits beside that of another model; the files have all of it."""
    text = str(value)
    return None if value is None else text if len(text) <= _WIDEST else f"{text[:_WIDEST]}..."


def _within(mean: Mean) -> str:
    return "" if mean.low is None else f" (95 %: {mean.low:+.3f} to {mean.high:+.3f})"


def _mapping(model: StreamedModel) -> dict[str, Any]:
    """A model's part of ``metrics.json``."""
    summaries = []
    for one in summarize(model):
        means = {name: getattr(one, name) for name in ("before", "after", "over_most_kept", "over_full")}
        cache = one.loss.cache
        summaries.append(
            {"cache": one.loss.label, "kept": cache and cache.kept, "window": cache and cache.window}
            | {name: mean and mean._asdict() for name, mean in means.items()}
        )
    return {"name": model.name, "context": model.context, "finding": finding(model), "caches": summaries}
