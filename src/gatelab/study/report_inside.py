"""What was measured inside the models of a study, as sections of its report: after training, and on the way."""

from __future__ import annotations

from collections.abc import Sequence

from gatelab.report.page import Figure, Section
from gatelab.report.tables import Table
from gatelab.study import report_figures as figures
from gatelab.study.findings import Findings, Quantity
from gatelab.study.report_run_tables import inside_table
from gatelab.study.run_curves import RunCurve

HIDDEN_DEFINITION = "Largest absolute value of a layer's output over all tokens and channels, before the final norm."
KURTOSIS_DEFINITION = "The kurtosis of a token's values is 3 where they are normally distributed."
HEADS_DEFINITION = (
    "Of what the output projection reads of one head, over all tokens, the mean taken off: exp of the entropy of the "
    "singular values, scaled to sum to 1. Attention entropy: -sum A log A over keys, mean over queries. Both are means "
    "over heads, then layers."
)
GATE_DEFINITION = "Mean over layers, tokens, heads and, for an elementwise gate, channels."
GATE_ENTROPY_DEFINITION = (
    "Entropy of a score s: -s log s - (1 - s) log(1 - s), 0.69 at 0.5, 0 where a gate is shut or open. Of the "
    "histogram: that of 20 equal bins, 0 where all scores are alike. The correlation is over the heads and queries of "
    "a layer. Means over layers."
)

Content = list[Figure | Table | None]


def inside_sections(findings: Findings, curves: Sequence[RunCurve]) -> list[Section]:
    """First-token attention, hidden values, what heads write, and gates; each empty where nothing was measured."""
    return [_attention(findings, curves), _hidden(findings), _heads(findings, curves), _gates(findings, curves)]


def _known(findings: Findings, *names: str) -> list[Quantity]:
    """The figures of these names, those of the first in front.

    In a model of one layer a mean over layers is its maximum: of figures that are equal in every run there is one.
    """
    found: dict[tuple[float | None, ...], Quantity] = {}
    for one in sorted(findings.quantities, key=lambda one: one.name != names[0]):
        if one.name in names:
            found.setdefault(tuple(one.of(result) for result in findings.results), one)
    return list(found.values())


def _attention(findings: Findings, curves: Sequence[RunCurve]) -> Section:
    names = (
        "first_token_attention_worst_layer",
        "first_token_attention",
        "delimiter_attention",
        "learned_sink_attention",
    )
    attention = _known(findings, *names)
    drawn = [findings.metric] if findings.metric in attention else attention[:1]
    drawn += [one for one in attention if one in [absolute.over_floor for absolute in drawn]]
    return _section(
        "First-token attention",
        "A sink is attention parked on the first token whatever the query. A figure means something only against the "
        "uniform floor of the same queries.",
        [
            inside_table(findings, attention, "Attention to single tokens after training."),
            *figures.attention_figures(findings, curves, drawn),
        ],
    )


def _hidden(findings: Findings) -> Section:
    hidden = _known(
        findings, "largest_activation", "mean_activation_maximum", "activation_ratio", "activation_kurtosis"
    )
    has_kurtosis = any(one.name == "activation_kurtosis" for one in hidden)
    definition = f"{HIDDEN_DEFINITION} {KURTOSIS_DEFINITION}" if has_kurtosis else HIDDEN_DEFINITION
    content: Content = [inside_table(findings, hidden, definition)]
    for one in hidden[:1]:
        content += figures.quantity_figure(findings, one, "Largest hidden value", HIDDEN_DEFINITION)
    return _section("Hidden states", "", content)


def _heads(findings: Findings, curves: Sequence[RunCurve]) -> Section:
    heads = _known(findings, "gated_output_effective_rank", "attention_entropy")
    text = (
        "Value and output projection of a head are one linear map of low rank. What stands between them shows in the "
        "rank of what the output projection reads, not in that of the weights."
    )
    content: Content = [inside_table(findings, heads, f"After training. {HEADS_DEFINITION}")]
    for one in heads:
        content += figures.figures_on_the_way(findings, curves, one, HEADS_DEFINITION)
    return _section("What heads write", text, content)


def _gates(findings: Findings, curves: Sequence[RunCurve]) -> Section:
    means = _known(findings, "gate_mean")
    entropies = _known(findings, "gate_binary_entropy", "gate_histogram_entropy", "gate_attention_entropy_correlation")
    content: Content = [
        inside_table(findings, means, f"Gate scores after training. {GATE_DEFINITION}"),
        inside_table(findings, entropies, f"After training. {GATE_ENTROPY_DEFINITION}"),
    ]
    for one in means[:1]:
        content += figures.quantity_figure(findings, one, "Mean gate score", GATE_DEFINITION)
        content += figures.figures_on_the_way(findings, curves, one, GATE_DEFINITION)
    for one in entropies:
        if one.key != "gate_histogram_entropy":
            content += figures.figures_on_the_way(findings, curves, one, GATE_ENTROPY_DEFINITION)
    return _section("Gates", "", content)


def _section(title: str, text: str, content: Content) -> Section:
    return Section(title, text, [item for item in content if item is not None])
