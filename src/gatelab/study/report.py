"""The report of a study, from the files of its folder alone, finished or half-finished."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gatelab.files import write_atomically
from gatelab.report.page import Page, Section, write_page
from gatelab.report.tables import Table, markdown_text, to_markdown
from gatelab.study import report_figures as figures
from gatelab.study import report_run_tables as run_tables
from gatelab.study import report_tables as tables
from gatelab.study.conditions import conditions_table
from gatelab.study.findings import LOSS, Comparison, Findings, Quantity, compare, mean_over_seeds, read_findings
from gatelab.study.jobs import JobResult
from gatelab.study.report_inside import inside_sections
from gatelab.study.report_interactions import interactions_section
from gatelab.study.report_start import Movement, movements, start_section
from gatelab.study.run_curves import RunCurve, read_curve
from gatelab.study.study import HELDOUT_ERROR
from gatelab.train.run_folder import RunFolder

PAPER_TEXT = (
    "The paper's figures (arXiv 2505.06708) are of one run each, of models that are far larger, so only the direction "
    "of a difference from the baseline can be compared. It agrees or disagrees where our interval leaves 0 out; an arm "
    "with a verdict in a figure goes by that."
)

PROBED_TEXT = (
    "What rounding and bfloat16 do to the model in the last checkpoint of each run, on held-out text that all arms "
    "share. Rounding: nats per token that are added to the loss when the weights of linear layers, and what these "
    "layers read, are rounded to a scheme's levels. Precision: the error of the logits in the narrow dtype relative to "
    "those in the wide one, at equal weights.\n\nExploratory figures beside the study's own metric: estimates and no "
    "verdicts. Each interval misses the true difference in 1 of 20 studies."
)

_PARTS = ("changed", "plain", "difference")
_OF_MOVEMENT = ("before", "after", "movement", "beyond_baseline")


def write_study_report(folder: Path, command: str | None = None) -> Path:
    """Write ``report.html``, ``report.md`` and ``comparisons.json`` (every mean and difference) into a study's folder.

    Returns the page's path. Raises ``ValueError`` as :func:`study_report` does.
    """
    findings = read_findings(folder)
    curves = _curves(findings)
    page, values = _page(findings, curves, command), _comparisons(findings, movements(findings, curves))
    write_atomically(folder / tables.COMPARISONS, json.dumps(values, indent=1, allow_nan=False) + "\n")
    write_atomically(folder / "report.md", page_as_markdown(page))
    write_page(page, folder / "report.html")
    return folder / "report.html"


def study_report(folder: Path, command: str | None = None) -> Page:
    """The report on what is finished of the study in a folder; its links hold where ``report.html`` is beside the runs.

    ``command`` is the one that redoes it, that which runs ``study.yaml`` in a new folder when ``None``. Raises
    ``ValueError`` when the folder holds no study, or a file of it is damaged.
    """
    findings = read_findings(folder)
    return _page(findings, _curves(findings), command)


def page_as_markdown(page: Page) -> str:
    """The page's text and tables as Markdown; of a figure there is its caption."""
    parts = [f"# {markdown_text(page.title)}", page.lead, f"```sh\n{page.command}\n```"]
    for section in page.sections:
        parts += [f"## {section.title}", section.text]
        parts += [
            to_markdown(item) if isinstance(item, Table) else f"*Figure, in the page:* {item.caption}"
            for item in section.content
        ]
    if page.environment:
        lines = [f"- {name}: {markdown_text(str(value))}" for name, value in page.environment.items()]
        parts += ["## Environment", "\n".join(lines)]
    if page.notes:
        parts += ["## Notes", "\n".join(f"- {markdown_text(note)}" for note in page.notes)]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _curves(findings: Findings) -> list[RunCurve]:
    """The curves of the runs that were begun and are compared, each arm at its own rate."""
    return [
        read_curve(one.job, findings.folder)
        for one in findings.status.jobs
        if one.job.purpose == "comparison"
        and one.step
        and one.job.learning_rate == (findings.rates or {}).get(one.job.arm)
    ]


def _page(findings: Findings, curves: Sequence[RunCurve], command: str | None) -> Page:
    study, folder = findings.study, findings.folder.resolve()
    others = [one for one in findings.quantities if one.key in (LOSS, HELDOUT_ERROR) and one.key != findings.metric.key]
    sections = [
        _section(
            "Result",
            "",
            [
                tables.result_table(findings),
                *figures.difference_figure(findings),
                tables.size_table(findings),
                tables.equal_rate_table(findings),
                run_tables.inside_table(findings, others, "What was held out, in another figure."),
            ],
        ),
        _section("What the seeds can tell", "", [tables.verdict_table(findings), tables.power_table(findings)]),
        interactions_section(findings),
        start_section(movements(findings, curves), study.baseline),
        _section("Rounding and precision", PROBED_TEXT, tables.probed_tables(findings)),
        _section("The paper's numbers beside ours", PAPER_TEXT, tables.paper_tables(findings)),
        _section("Learning", "", figures.learning_figures(findings, curves)),
        _section("Learning rates", "", [run_tables.rate_table(findings), *figures.rate_figures(findings)]),
        *inside_sections(findings, curves),
        _section("Stability", "", [run_tables.stability_table(findings, curves), run_tables.events_table(curves)]),
        _section("Cost", "", [run_tables.cost_so_far(findings)]),
        _conditions(findings),
        _section("Runs", "", [run_tables.runs_table(findings, curves)] if findings.results else []),
    ]
    environment, notes = _environment(findings)
    return Page(
        title=study.question,
        lead=_lead(findings),
        command=command or f"gatelab study {folder.name}/study.yaml --out {folder.name}_again",
        sections=[section for section in sections if section.content],
        environment=environment,
        notes=[*study.warnings, *notes],
    )


def _section(title: str, text: str, content: Sequence[Any]) -> Section:
    """A section of what there is of its content."""
    return Section(title, text, [item for item in content if item is not None])


def _lead(findings: Findings) -> str:
    study, metric = findings.study, findings.metric
    parts = []
    if study.smallest_difference is not None:
        smallest = f"{study.smallest_difference:.4g} {metric.unit}"
        parts.append(f"Smallest difference that matters, set before the runs: {smallest}.")
    if findings.status.count("waiting") or findings.status.count("running"):
        parts.append(f"Not finished. {findings.status.summary()}.")
    judged = [one for one in findings.comparisons.values() if one.is_judged]
    if judged:
        sentences = [_verdict_sentence(findings, one) for one in judged]
        parts.append(" ".join([*sentences, *(["The intervals hold together at 95 %."] if len(judged) > 1 else [])]))
    elif study.confirmatory:
        parts.append(
            f"No verdict yet: {', '.join(study.confirmatory)} were declared in advance, and get one when all "
            f"{len(study.seeds)} seeds are done."
        )
    else:
        parts.append("Exploratory: no contrast was declared in advance, so there are estimates and no verdicts.")
    parts.append(_estimates(findings, [one for one in findings.comparisons.values() if not one.is_judged]))
    base, over_floor = findings.compared[study.baseline], metric.over_floor
    average, times = (mean_over_seeds([one.of(run) for run in base]) for one in (metric, over_floor))
    if average is not None and times is not None:
        means = {arm: mean_over_seeds([over_floor.of(run) for run in runs]) for arm, runs in findings.compared.items()}
        highest, most = max(((arm, one.value) for arm, one in means.items() if one is not None), key=lambda one: one[1])
        parts.append(
            f"{study.baseline}: {metric.title} {average.value:{metric.format}}, {times.value:.1f} times what uniform "
            f"attention gives. Highest: {highest}, {most:.1f} times."
        )
    return "\n\n".join(part for part in parts if part)


def _verdict_sentence(findings: Findings, comparison: Comparison) -> str:
    contrast, metric = comparison.contrast, findings.metric
    assert contrast is not None and contrast.judgement is not None
    sentence, interval = contrast.sentence(), contrast.judgement.interval
    if interval is None:
        return f"{comparison.arm}: {sentence}."
    value, low, high = (f"{one:+{metric.format}}".replace("-", "−") for one in interval)
    return (
        f"{comparison.arm}: {sentence}. Its {metric.title} differs from that of {findings.study.baseline} by {value} "
        f"({low} to {high}, {comparison.num_pairs} seeds)."
    )


def _estimates(findings: Findings, comparisons: Sequence[Comparison]) -> str:
    """Where the intervals of the exploratory arms lie."""
    known = [(one.arm, one.difference) for one in comparisons if one.difference is not None and one.over == "seeds"]
    if not known:
        is_of_text = any(one.over == "documents" for one in comparisons)
        return "One seed: the intervals are of the held-out text alone." if is_of_text else ""
    sides = {
        "below 0": [arm for arm, one in known if one.high < 0],
        "above 0": [arm for arm, one in known if one.low > 0],
        "around 0": [arm for arm, one in known if one.low <= 0 <= one.high],
    }
    found = "; ".join(f"{side}: {', '.join(arms)}" for side, arms in sides.items() if arms)
    return (
        f"Intervals of the exploratory differences in {findings.metric.title} from {findings.study.baseline} lie "
        f"{found}. None is a verdict: each misses the true difference in 1 of 20 studies"
        f"{f', so among {len(known)} some may' if len(known) > 1 else ''}."
    )


def _conditions(findings: Findings) -> Section:
    if not findings.conditions:
        return Section("Equal conditions")
    equal = conditions_table(findings.study, findings.conditions)
    content = [replace(equal, columns=equal.columns[:-1]), run_tables.differences_table(findings)]
    text = (
        "Checked before the first run, on the initial weights and on the batches themselves. The seeds, the arms, the "
        "smallest difference that matters and what gets a verdict were written to study.yaml at the same time."
    )
    return _section("Equal conditions", text, content)


def _environment(findings: Findings) -> tuple[dict[str, Any], list[str]]:
    """The environment that runs share, values that differ side by side, and what their data ask to be said."""
    environments, notes = [], []
    for one in findings.results:
        run = RunFolder(findings.folder / one.folder)
        environments.append(run.environment)
        notes += run.data["attributions"]
    keys = dict.fromkeys(key for one in environments for key in one)
    shared = {key: ", ".join(dict.fromkeys(str(one.get(key)) for one in environments)) for key in keys}
    return shared, list(dict.fromkeys(notes))


def _comparisons(findings: Findings, moved: Mapping[Quantity, Sequence[Movement]]) -> dict[str, Any]:
    """Every mean over seeds and every difference of the report, as plain values."""

    def plain(estimate: Any) -> Any:
        if estimate is None:
            return None
        return {name: None if math.isnan(value) else value for name, value in estimate._asdict().items()}

    def figures_of(runs: Sequence[JobResult]) -> dict[str, Any]:
        return {one.key: plain(mean_over_seeds([one.of(run) for run in runs])) for one in findings.quantities}

    arms: dict[str, Any] = {}
    equal = findings.at_equal_rate or {}
    compared_equal = compare(findings.study, equal, findings.metric.of) if equal else {}
    for arm, runs in findings.compared.items():
        found = {one.key: findings.in_quantity(one).get(arm) for one in findings.quantities}
        contrast = findings.comparisons[arm].contrast if arm in findings.comparisons else None
        arms[arm] = {
            "runs": [one.folder for one in runs],
            "mean": figures_of(runs),
            "difference": {key: plain(one.difference) for key, one in found.items() if one is not None},
            "verdict": tables.verdict(findings, arm),
            "contrast": None if contrast is None else contrast.to_mapping(),
        }
        if equal:
            arms[arm]["mean_at_equal_rate"] = figures_of(equal[arm])
        if arm in compared_equal:
            arms[arm]["difference_at_equal_rate"] = {findings.metric.key: plain(compared_equal[arm].difference)}
    before_and_after = {
        quantity.key: {one.arm: {part: plain(getattr(one, part)) for part in _OF_MOVEMENT} for one in of_arms}
        for quantity, of_arms in moved.items()
    }
    return {
        "study": findings.study.name,
        "metric": findings.metric.key,
        "arms": arms,
        "interactions": [
            {"name": one.name, "figure": quantity.key, **{part: plain(getattr(one, part)) for part in _PARTS}}
            for quantity in findings.quantities
            for one in findings.dependences(quantity)
            if one.difference is not None
        ],
        **({"before_and_after": before_and_after} if moved else {}),
    }
