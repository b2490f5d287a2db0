"""What each scheme costs a model: the same held-out texts read before and after, so that differences are paired."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from gatelab.data.settings import CorpusSettings
from gatelab.data.text_files import text_files
from gatelab.evaluate.intervals import Interval, mean_interval
from gatelab.evaluate.models import OpenedModel, open_model, short_names
from gatelab.evaluate.quantisation.inputs import LinearInput, measure_inputs
from gatelab.evaluate.quantisation.layers import Place, linear_layers, require_roundable
from gatelab.evaluate.quantisation.schemes import find_scheme
from gatelab.evaluate.quantisation.simulated import quantised, require_calibration
from gatelab.evaluate.texts import Windows, read_windows
from gatelab.model.perplexity import perplexity, token_nats

FEWEST_SAMPLES = 2
Say = Callable[[str], object]


@dataclass(frozen=True)
class QuantisationTrial:
    """With which schemes and on what text models are quantised; ``ValueError`` for values without a meaning.

    ``samples`` windows of ``length`` tokens are scored, and as many as ``calibration`` says, after them in the text,
    give static ranges. Without ``gates`` their linear layers stay as they are.
    """

    text: CorpusSettings
    cache: Path
    schemes: tuple[str, ...]
    length: int = 512
    samples: int = 16
    calibration: int = 8
    gates: bool = True

    def __post_init__(self) -> None:
        if not self.schemes:
            raise ValueError("nothing would be quantised; name at least one scheme")
        for name in self.schemes:
            find_scheme(name)
        if self.samples < FEWEST_SAMPLES:
            raise ValueError(f"samples={self.samples} gives no interval; take at least {FEWEST_SAMPLES}")
        if self.calibration < 1:
            raise ValueError(f"calibration={self.calibration} measures no range; take at least 1 window")
        if self.text.name == "files":
            text_files(str(self.text.path))


class SchemeLoss(NamedTuple):
    """A model's loss on each text under a scheme, nats a token, and the share of clipped inputs by linear layer.

    ``scheme`` is ``None`` for the model as it is.
    """

    scheme: str | None
    nats: list[float]
    clipped: dict[Place, float]


class QuantisedModel(NamedTuple):
    """All that was measured of one model; the first loss is that of the model as it is."""

    name: str
    context: dict[str, Any]
    losses: list[SchemeLoss]
    inputs: list[LinearInput]

    @property
    def plain(self) -> SchemeLoss:
        """The loss of the model as it is."""
        return self.losses[0]

    def perplexity(self, loss: SchemeLoss) -> float:
        """Over all texts, which are equally long."""
        return perplexity(math.fsum(loss.nats), len(loss.nats))

    def cost(self, loss: SchemeLoss) -> Interval:
        """What a scheme adds to the loss, in nats a token, with its paired interval over texts."""
        return mean_interval(_differences(loss.nats, self.plain.nats))


def quantise_models(
    names: Sequence[str], trial: QuantisationTrial, say: Say = lambda line: None
) -> list[QuantisedModel]:
    """Quantise each model in every way of the trial; ``say`` is told of each figure.

    All models are opened, their texts read and their layers checked before the first is measured. Raises ``ValueError``
    with one sentence for two models of one name, what :func:`open_model`, :func:`read_windows` and
    :func:`linear_layers` refuse, a text too short for two samples and the calibration, and a layer that a scheme can't
    round.
    """
    if len(set(names)) < len(names):
        raise ValueError(f"{names[0]} would be compared with itself; name another model, or leave out --compare")
    opened = [open_model(name) for name in names]
    schemes = [find_scheme(name) for name in trial.schemes]
    for one in opened:
        one.require_causal("be scored on the next token")
        layers = linear_layers(one.model, trial.gates)
        for scheme in schemes:
            require_roundable(layers, scheme)
    texts = [_read(one, trial) for one in opened]
    for one, text in zip(opened, texts, strict=True):
        for scheme in schemes:
            if scheme.activations is not None and scheme.needs_calibration:
                require_calibration(linear_layers(one.model, trial.gates), scheme.activations, text.calibration)
    return [_measure(*each, trial, say) for each in zip(short_names(names), opened, texts, strict=True)]


def cost_difference(model: QuantisedModel, other: QuantisedModel, scheme: str) -> Interval | None:
    """What a scheme costs ``model`` less what it costs ``other``, paired by text; below zero the first is easier to
    quantise. ``None`` where the two read different tokens.
    """
    if model.context["tokens_sha256"] != other.context["tokens_sha256"]:
        return None
    costs = []
    for one in (model, other):
        loss = next(loss for loss in one.losses if loss.scheme == scheme)
        costs.append(_differences(loss.nats, one.plain.nats))
    return mean_interval(_differences(*costs))


@torch.no_grad()
def text_losses(model: nn.Module, tokens: Int[Tensor, "N T"]) -> list[float]:
    """The mean cross-entropy of each window in nats a token, all but its first; each window is read at once."""
    losses = []
    for window in tokens:
        output = model(window[None])
        logits = output if isinstance(output, Tensor) else output.logits
        losses.append(float(token_nats(logits[:, :-1], window[None, 1:]).double().mean()))
    return losses


def scheme_losses(
    model: nn.Module,
    schemes: Sequence[str],
    tokens: Int[Tensor, "N T"],
    calibration: Int[Tensor, "M S"],
    gates: bool = True,
) -> Iterator[SchemeLoss]:
    """The loss of the model as it is, then under each scheme."""
    yield SchemeLoss(None, text_losses(model, tokens), {})
    for name in schemes:
        with quantised(model, find_scheme(name), calibration, gates) as clipped:
            losses = text_losses(model, tokens)
        yield SchemeLoss(name, losses, {place: share.value for place, share in clipped.items()})


def _read(opened: OpenedModel, trial: QuantisationTrial) -> Windows:
    windows = read_windows(
        trial.text,
        opened.tokenizer,
        trial.cache,
        length=trial.length,
        samples=trial.samples,
        calibration_samples=trial.calibration,
        max_context=opened.max_context,
    )
    if len(windows.tokens) < FEWEST_SAMPLES:
        raise ValueError(
            f"the text {trial.text.label} is too short for {FEWEST_SAMPLES} samples of {trial.length} tokens beside "
            f"{trial.calibration} to calibrate on; give a longer text or a smaller length"
        )
    return windows


def _measure(name: str, opened: OpenedModel, windows: Windows, trial: QuantisationTrial, say: Say) -> QuantisedModel:
    assert windows.calibration is not None
    layers = linear_layers(opened.model, trial.gates)
    inputs = measure_inputs(opened.model, layers, windows.tokens)
    losses = []
    for loss in scheme_losses(opened.model, trial.schemes, windows.tokens, windows.calibration, trial.gates):
        losses.append(loss)
        say(f"{name}: {math.fsum(loss.nats) / len(loss.nats):.4f} nats a token, {loss.scheme or 'as it is'}")
    context = {**windows.context, "family": opened.family, "step": opened.step, **opened.description}
    context |= {"calibration_samples": len(windows.calibration), **_rounded_part(opened.model, layers, trial)}
    return QuantisedModel(name, context, losses, inputs)


def _rounded_part(
    model: nn.Module, layers: Mapping[Place, nn.Linear], trial: QuantisationTrial
) -> dict[str, int | float | bool]:
    rounded = sum(parameter.numel() for parameter in {linear.weight for linear in layers.values()})
    total = sum(parameter.numel() for parameter in model.parameters())
    return {"linear_layers": len(layers), "share_of_parameters_rounded": rounded / total, "gates_rounded": trial.gates}


def _differences(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(values, others, strict=True)]
