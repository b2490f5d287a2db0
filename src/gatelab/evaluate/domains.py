"""Perplexity over the six domains that the gated-attention paper averages (arXiv 2505.06708, table 1).

The paper names the domains and not the texts. Each is mapped onto one that can be had: two without a network but for a
package registry, four from the Hugging Face hub. A domain whose text can't be had is reported as missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gatelab.data.corpora import attribution, identity
from gatelab.data.settings import CorpusSettings
from gatelab.evaluate.model_tokenizer import ModelTokenizer
from gatelab.evaluate.task_results import Figure, TaskResult, finite, standard_error
from gatelab.evaluate.texts import file_text, read_windows
from gatelab.model.perplexity import mean_perplexity, perplexity, token_nats
from gatelab.settings import nearest

SUITE = "paper_perplexity"
VERSION = "1"
DEFAULT_LENGTH = 4096
DEFAULT_WINDOWS = 64


def _hub(path: str, **keywords: Any) -> CorpusSettings:
    return CorpusSettings(name="hugging_face", path=path, heldout_fraction=1.0, **keywords)


DOMAINS: dict[str, CorpusSettings] = {
    "english": CorpusSettings(name="wikipedia_introductions"),
    "chinese": _hub("wikimedia/wikipedia", config="20231101.zh", title_field="title"),
    "code": CorpusSettings(name="python_standard_library"),
    "mathematics": _hub("open-web-math/open-web-math"),
    "law": _hub("common-pile/caselaw_access_project"),
    "literature": _hub("emozilla/pg19", split="test"),
}


class DomainReading(NamedTuple):
    """How much of each domain is read: windows of ``length`` tokens, the first ``windows`` of them."""

    length: int
    windows: int
    cache: Path


class WindowScores(NamedTuple):
    """Summed cross-entropy of each window in nats, float64, and the tokens scored in each: all but the first."""

    nats: Float[Tensor, "N"]
    num_tokens: int


def domain_corpora(texts: Mapping[str, str]) -> dict[str, CorpusSettings]:
    """The corpus of each domain; ``texts`` puts local files in the place of some. ``ValueError`` for other domains."""
    for name in texts:
        if name not in DOMAINS:
            raise ValueError(f"there is no domain {name!r} to give a text for; {nearest(name, DOMAINS)}")
    return {name: file_text(Path(texts[name])) if name in texts else corpus for name, corpus in DOMAINS.items()}


def domain_task(name: str) -> str:
    """The name under which a domain stands among tasks."""
    return f"{SUITE}/{name}"


def domain_key(corpus: CorpusSettings, reading: DomainReading) -> dict[str, Any]:
    """What decides a domain's figures beside the model."""
    return {
        "version": VERSION,
        "corpus": corpus.to_mapping(),
        "identity": identity(corpus),
        "length": reading.length,
        "windows": reading.windows,
    }


def score_domain(
    name: str, corpus: CorpusSettings, model: nn.Module, tokenizer: ModelTokenizer, reading: DomainReading
) -> tuple[TaskResult, list[dict[str, Any]]]:
    """Perplexity and nats a token of one domain, and its windows.

    Each window begins with BOS if the model has one; its first token is not scored. The standard error of the nats is
    that of the mean over windows, as tokens of one window depend on each other; that of the perplexity is p times it.
    A text that can't be had gives a result that says so.
    """
    try:
        windows = read_windows(corpus, tokenizer, reading.cache, length=reading.length, samples=reading.windows)
    except (OSError, ValueError) as error:
        return TaskResult(task=domain_task(name), missing=str(error).partition("\n")[0]), []
    scores = score_windows(model, windows.tokens)
    means = (scores.nats / scores.num_tokens).tolist()
    total, count = float(scores.nats.sum()), scores.num_tokens * len(means)
    value, error = perplexity(total, count), standard_error(means)
    figures = (
        Figure(
            metric="perplexity",
            value=finite(value),
            stderr=None if error is None else finite(value * error),
            higher_is_better=False,
        ),
        Figure(metric="nats", value=finite(total / count), stderr=error, higher_is_better=False),
    )
    result = TaskResult(task=domain_task(name), figures=figures, version=VERSION, samples=len(means))
    context = {**windows.context, "attribution": attribution(corpus)}
    return result, [{"window": number, "nats": mean, **context} for number, mean in enumerate(means)]


@torch.no_grad()
def score_windows(model: nn.Module, tokens: Int[Tensor, "N T"]) -> WindowScores:
    """Score every token but the first of each window, one window at a time."""
    device = next(model.parameters()).device
    nats = torch.zeros(len(tokens), dtype=torch.float64)
    for number, row in enumerate(tokens.to(device)):
        output = model(row[None])
        logits = output if isinstance(output, Tensor) else output.logits
        nats[number] = token_nats(logits[:, :-1], row[None, 1:]).double().sum()
    return WindowScores(nats, tokens.shape[1] - 1)


def average_domains(results: Sequence[TaskResult]) -> TaskResult:
    """The arithmetic mean of the six perplexities, as in the paper; it is missing when one of them is."""
    absent = [result.task for result in results if not result.figures]
    if absent:
        return TaskResult(task=SUITE, missing=f"no average, because of {', '.join(absent)}")
    parts = [result.figures[0] for result in results]
    values = [part.value for part in parts]
    errors = [part.stderr for part in parts]
    mean = None if None in values else mean_perplexity(value for value in values if value is not None)
    error = None if None in errors else sum(error**2 for error in errors if error is not None) ** 0.5 / len(errors)
    figure = Figure(metric="perplexity", value=mean, stderr=error, higher_is_better=False)
    samples = sum(result.samples for result in results)
    return TaskResult(task=SUITE, figures=(figure,), version=VERSION, samples=samples)
