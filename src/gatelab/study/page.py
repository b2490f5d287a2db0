"""The report of a study: one table, one page."""

from __future__ import annotations

from statistics import mean
from typing import Any

from gatelab.report.charts import Reference, bar_chart, dot_interval_chart, heat_map, histogram, line_chart
from gatelab.report.page import Figure, Page, Section
from gatelab.report.tables import Column, Table, transposed
from gatelab.study.runner import ArmRun
from gatelab.study.statistics import TextDifference
from gatelab.study.study import Study
from gatelab.train.metrics import running_median

Differences = dict[str, TextDifference]
_STEP = Column("step", "training step", ",d")
_SMOOTHING = 15


def result_table(runs: list[ArmRun], differences: Differences) -> Table:
    """One column for each arm: how well it predicts, and what its attention does."""
    columns = [
        _arm(runs),
        Column("parameters", "parameters", ",d"),
        Column("perplexity", "held-out perplexity", ".2f"),
        Column("relative", "against baseline", "+.1%"),
        Column("interval", "95 %, text only", "+.1%"),
        Column("bits_per_byte", "bits per byte", ".4f"),
        Column("first_token", "first-token attention", ".4f"),
        Column("largest", "largest |h|", ".1f"),
        Column("gate", "mean gate", ".3f"),
    ]
    floor = _measured_summary(runs[0])["first_token_attention_floor"]
    caption = (
        f"First-token attention is that of the worst layer; uniform attention gives {floor:.4f}. One seed: the "
        "intervals are of the held-out text alone."
    )
    rows = [_result_row(run, differences.get(run.name)) for run in runs]
    return transposed(Table(columns, rows, caption), "after training")


def _result_row(run: ArmRun, difference: TextDifference | None) -> dict[str, Any]:
    heldout, measured = _heldout(run), _measured_summary(run)
    relative = None if difference is None else difference.relative_perplexity
    return {
        "arm": run.name,
        "parameters": run.result["parameters"],
        "perplexity": heldout["perplexity"],
        "relative": None if relative is None else relative.value,
        "interval": None if relative is None else (relative.low, relative.high),
        "bits_per_byte": heldout["bits_per_byte"],
        "first_token": measured["first_token_attention_worst_layer"],
        "largest": measured["largest_activation"],
        "gate": measured["gate_mean"],
    }


def study_page(study: Study, runs: list[ArmRun], differences: Differences, command: str) -> Page:
    """The whole report; every figure comes from the files of the arms' folders."""
    return Page(
        title=study.question,
        lead=_lead(study, runs, differences),
        command=command,
        sections=[
            Section("Result", _result_text(runs), [result_table(runs, differences)]),
            _learning(runs),
            _quality(study, runs, differences),
            _attention(runs),
            _activations(runs),
            *_gates(runs),
            _cost(runs),
        ],
        environment=runs[0].environment,
        notes=runs[0].attributions,
    )


def _lead(study: Study, runs: list[ArmRun], differences: Differences) -> str:
    relative = ", ".join(f"{name} {one.relative_perplexity.value:+.1%}" for name, one in differences.items())
    measured = {run.name: _measured_summary(run) for run in runs}
    attention = ", ".join(f"{name} {one['first_token_attention_worst_layer']:.3f}" for name, one in measured.items())
    largest = ", ".join(f"{name} {one['largest_activation']:.0f}" for name, one in measured.items())
    floor = _measured_summary(runs[0])["first_token_attention_floor"]
    text = (
        f"Held-out perplexity against {study.baseline}: {relative}. First-token attention in the worst layer: "
        f"{attention}; uniform attention would give {floor:.3f}. Largest hidden value: {largest}.\n\n"
        "Each arm was trained once, with the same seed, initial weights and batches. The intervals say how far the "
        "choice of held-out text moves a difference; they say nothing about other seeds. One seed shows how the "
        "measurements are read; it does not show that a gate helps."
    )
    return text


def _result_text(runs: list[ArmRun]) -> str:
    heldout = _heldout(runs[0])
    domain = next(iter(runs[0].result["heldout"]))
    return (
        f"Held-out text: {domain}, {heldout['tokens']:,} tokens of documents that no arm was trained on, each scored "
        "once. The arms differ in what the settings in their folders say, and in nothing else."
    )


def _learning(runs: list[ArmRun]) -> Section:
    training = [
        {"arm": run.name, "step": row["step"], "loss": smooth}
        for run in runs
        for row, smooth in _smoothed([row for row in run.metrics if row["kind"] == "step"])
    ]
    heldout = [
        {"arm": run.name, "step": row["step"], "loss": row["loss"]}
        for run in runs
        for row in run.metrics
        if row["kind"] == "evaluation"
    ]
    loss = Column("loss", "cross-entropy", ".3f", "nats per token")
    content = [
        Figure(
            line_chart(training, _STEP, loss, _arm(runs), "Training loss"),
            "All arms read the same batches in the same order.",
            f"Mean cross-entropy over a step's target tokens; running median of {_SMOOTHING} steps.",
        )
    ]
    if heldout:
        content.append(
            Figure(
                line_chart(heldout, _STEP, loss, _arm(runs), "Held-out loss on the way"),
                "Scored on the first windows of the held-out text only; the table above has all of it.",
            )
        )
    return Section("Learning", "", content)


def _smoothed(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], float]]:
    medians = running_median([row["loss"] for row in rows], _SMOOTHING)
    return list(zip(rows, map(float, medians), strict=True))


def _quality(study: Study, runs: list[ArmRun], differences: Differences) -> Section:
    columns = [
        _arm(runs),
        Column("perplexity", "relative perplexity", "+.2%"),
        Column("perplexity_interval", "95 % (text only)", "+.2%"),
        Column("bits", "bits per byte", "+.4f"),
        Column("bits_interval", "95 % (text only)", "+.4f"),
    ]
    rows = []
    for name, (relative, bits) in differences.items():
        row = {"arm": name, "perplexity": relative.value, "perplexity_interval": (relative.low, relative.high)}
        rows.append({**row, "bits": bits.value, "bits_interval": (bits.low, bits.high)})
    drawn = [{"arm": name, **relative._asdict()} for name, (relative, _) in differences.items()]
    chart = dot_interval_chart(
        drawn,
        _arm(runs),
        Column("value", f"held-out perplexity against {study.baseline}", "+.1%"),
        ("low", "high"),
        "Difference in held-out perplexity",
        reference=Reference("no difference", 0.0),
    )
    definition = (
        "Perplexity is exp of the mean cross-entropy; bits per byte is nats / (ln 2 x UTF-8 bytes), so it compares "
        "across tokenizers. The start of a document is context, never scored. Intervals: paired bootstrap over the "
        "held-out documents, 2,000 resamples, percentiles 2.5 and 97.5."
    )
    figure = Figure(
        chart, "Left of zero the arm predicts better. One seed: the interval is of the text alone.", definition
    )
    return Section(f"Against {study.baseline}", "", [figure, Table(columns, rows)])


def _attention(runs: list[ArmRun]) -> Section:
    measured = _measured(runs)
    floor = runs[0].measurement["floor"]
    way = [
        {"arm": run.name, "step": row["step"], "share": row["first_token_attention_worst_layer"]}
        for run in runs
        for row in run.metrics
        if row["kind"] == "measurement"
    ]
    heads = [
        {"arm": run.name, "layer": layer, "head": head, "share": share}
        for run in runs
        for layer, one in enumerate(run.measurement["layers"])
        for head, share in enumerate(one["first_token"])
    ]
    share = Column("share", "attention to the first token", ".3f")
    uniform = Reference("uniform attention", floor)
    definition = (
        "Mean over queries 0 to T-1 of the attention probability on token 0, query 0 sees itself alone. "
        "Uniform attention gives the mean of 1/(t+1), the floor."
    )
    return Section(
        "First-token attention",
        "A sink is attention parked on the first token whatever the query. A figure means something only against the "
        "uniform floor at the same length.",
        [
            Figure(
                line_chart(way, _STEP, share, _arm(runs), "Worst layer while training", reference=uniform),
                "The layer with most first-token attention, mean over its heads, measured on a few held-out windows.",
                definition,
            ),
            Figure(
                heat_map(
                    heads,
                    Column("head", "head", "d"),
                    Column("layer", "layer", "d"),
                    share,
                    "Every head after training",
                    panel=_arm(runs),
                    floor=uniform,
                ),
                "Heads at or under the floor look alike.",
                definition,
                measured,
            ),
        ],
    )


def _activations(runs: list[ArmRun]) -> Section:
    rows = [
        {"arm": run.name, "layer": layer, "largest": one["hidden"]["value"], "median": one["hidden"]["median"]}
        for run in runs
        for layer, one in enumerate(run.measurement["layers"])
    ]
    chart = line_chart(
        rows,
        Column("layer", "layer", "d"),
        Column("largest", "largest |h|", ".1f"),
        _arm(runs),
        "Hidden-state maxima",
        log_y=True,
    )
    definition = "Largest absolute value of a layer's output over all tokens and channels, before the final norm."
    return Section("Hidden states", "", [Figure(chart, "One point for each layer.", definition, _measured(runs))])


def _gates(runs: list[ArmRun]) -> list[Section]:
    gated = [run for run in runs if _measured_summary(run)["gate_mean"] is not None]
    if not gated:
        return []
    layers = [
        {"arm": run.name, "layer": layer, "mean": mean(gate["mean"] for gate in one["gates"].values())}
        for run in gated
        for layer, one in enumerate(run.measurement["layers"])
        if one["gates"]
    ]
    bins = [
        {"arm": run.name, "low": number / len(shares), "high": (number + 1) / len(shares), "share": share}
        for run in gated
        for shares in [_histogram(run)]
        for number, share in enumerate(shares)
    ]
    score, share = Column("low", "gate score", ".2f"), Column("share", "share of scores", ".1%")
    layer, mean_score = Column("layer", "layer", "d"), Column("mean", "mean gate score", ".3f")
    return [
        Section(
            "Gates",
            "A score of 1 lets the head's output pass, 0 shuts it. A fresh sigmoid gate starts at 0.5.",
            [
                Figure(
                    histogram(bins, score, "high", share, _arm(runs), "All gate scores"),
                    "Over all layers, tokens, heads and, for elementwise gates, channels.",
                    context=_measured(runs),
                ),
                Figure(
                    line_chart(layers, layer, mean_score, _arm(runs), "Mean gate score by layer"),
                    "Mean over tokens and heads.",
                ),
            ],
        )
    ]


def _histogram(run: ArmRun) -> list[float]:
    counts = [gate["histogram"] for layer in run.measurement["layers"] for gate in layer["gates"].values()]
    totals = [sum(column) for column in zip(*counts, strict=True)]
    return [count / sum(totals) for count in totals]


def _cost(runs: list[ArmRun]) -> Section:
    columns = [
        _arm(runs),
        Column("parameters", "parameters", ",d"),
        Column("gate_parameters", "in gates", ",d"),
        Column("tokens", "training tokens", ",d"),
        Column("megaflops", "training MFLOP per token", ".1f"),
        Column("tokens_per_second", "tokens/s", ",.0f"),
        Column("peak_share", "of matrix-product peak", ".0%"),
        Column("training_seconds", "training", ".0f", "s"),
        Column("evaluation_seconds", "evaluation", ".1f", "s"),
        Column("measurement_seconds", "measuring", ".1f", "s"),
    ]
    rows = [{"arm": run.name, "megaflops": run.result["flops_per_token_training"] / 1e6, **run.result} for run in runs]
    speeds = [{"arm": run.name, "tokens_per_second": run.result["tokens_per_second"]} for run in runs]
    chart = bar_chart(speeds, _arm(runs), Column("tokens_per_second", "tokens/s", ",.0f"), "Training speed")
    text = (
        "Speed is the median over steps; the arms ran one after another, so a difference of a few percent may be the "
        "machine's. The peak is the best of twenty matrix products of size 1,024 in the same process."
    )
    return Section("Cost", text, [Table(columns, rows), Figure(chart, "Median over the steps of each arm.")])


def _measured(runs: list[ArmRun]) -> str:
    context = runs[0].measurement["context"]
    return (
        f"After training, on {context['num_sequences']} held-out windows of T = {context['tokens_per_sequence']} "
        "tokens, without padding."
    )


def _measured_summary(run: ArmRun) -> dict[str, Any]:
    return run.measurement["summary"]


def _heldout(run: ArmRun) -> dict[str, Any]:
    return next(iter(run.result["heldout"].values()))


def _arm(runs: list[ArmRun]) -> Column:
    """The column that names the arm, which has one colour on the whole page."""
    return Column("arm", "arm", names=[run.name for run in runs])
