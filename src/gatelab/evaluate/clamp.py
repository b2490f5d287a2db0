"""What gates do that a constant would not: perplexity with every score held at its mean.

If perplexity stays when each score is replaced by its mean over tokens, the gate is a rescaling that could be folded
into a weight; what is lost is what it owes to its dependence on the query's token. Compare the paper's section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gatelab.evaluate.rows import Subject
from gatelab.gates.gate import Gate
from gatelab.model.perplexity import perplexity, token_nats

Replace = Callable[[str, Float[Tensor, "#B #T N C1"]], Float[Tensor, "#B #T N C1"]]
AVERAGED_OVER: dict[str, tuple[int, ...]] = {"layer_mean": (0, 1), "head_mean": (1,), "channel_mean": ()}


@torch.no_grad()
def probe_clamping(
    decoder: nn.Module, tokens: Int[Tensor, "N T"], calibration: Int[Tensor, "M S"], subject: Subject
) -> list[dict[str, Any]]:
    """Perplexity of ``tokens`` as trained and with all gates clamped, as tidy rows ``clamped_perplexity[HOW]``.

    HOW is ``as_trained``; ``layer_mean``, ``head_mean``, ``channel_mean`` (each gate's mean over the ``calibration``
    tokens, with one value for a layer, for each head, for each channel of each head); ``neutral`` (1 for a gate that
    multiplies, 0 for one that adds: as if there were no gate). ``n`` is the number of scored tokens; the first of each
    window is not one. Raises ``ValueError`` for a model without GateLab's gates or a window that is in both texts.
    """
    gates = dict(_gates(decoder))
    if not gates:
        raise ValueError(f"{subject.model} has no gates of GateLab's, so there is nothing to clamp")
    _require_disjoint(tokens, calibration)
    means = calibrate(decoder, calibration)
    arms: dict[str, Replace] = {"as_trained": lambda name, scores: scores}
    for how, dims in AVERAGED_OVER.items():
        held = {name: mean.mean(dims, keepdim=True) if dims else mean for name, mean in means.items()}
        arms[how] = partial(_hold, held)
    neutral = {name: torch.tensor(1.0 if gate.spec.operation == "multiply" else 0.0) for name, gate in gates.items()}
    arms["neutral"] = partial(_hold, neutral)
    rows = []
    for how, replace in arms.items():
        with replaced_scores(decoder, replace):
            nats, num_tokens = _score(decoder, tokens)
        rows.append(subject.row(f"clamped_perplexity[{how}]", perplexity(nats, num_tokens), num_tokens))
    return rows


@torch.no_grad()
def calibrate(decoder: nn.Module, tokens: Int[Tensor, "M T"]) -> dict[str, Float[Tensor, "N C1"]]:
    """The mean score over tokens of each gate, by the gate's module name, for each head and channel in float64."""
    sums: dict[str, Tensor] = {}

    def add(name: str, scores: Tensor) -> Tensor:
        sums[name] = sums.get(name, 0) + scores.double().mean((0, 1))
        return scores

    with replaced_scores(decoder, add):
        for window in tokens:
            decoder(window[None])
    return {name: total / len(tokens) for name, total in sums.items()}


@contextmanager
def replaced_scores(decoder: nn.Module, replace: Replace) -> Iterator[None]:
    """While it lasts, every gate applies ``replace(name, scores)`` in place of its scores."""
    with ExitStack() as stack:
        for name, gate in _gates(decoder):

            def hook(module: nn.Module, inputs: tuple[Tensor, Tensor], name: str = name) -> tuple[Tensor, Tensor]:
                y, scores = inputs
                return y, replace(name, scores)

            stack.callback(gate.register_forward_pre_hook(hook).remove)
        yield


def _gates(decoder: nn.Module) -> Iterator[tuple[str, Gate]]:
    return ((name, module) for name, module in decoder.named_modules() if isinstance(module, Gate))


def _hold(held: Mapping[str, Tensor], name: str, scores: Tensor) -> Tensor:
    return held[name].to(scores).expand_as(scores)


def _score(decoder: nn.Module, tokens: Int[Tensor, "N T"]) -> tuple[float, int]:
    nats = sum(float(token_nats(decoder(row[None])[:, :-1], row[None, 1:]).double().sum()) for row in tokens)
    return nats, tokens[:, 1:].numel()


def _require_disjoint(tokens: Int[Tensor, "N T"], calibration: Int[Tensor, "M S"]) -> None:
    measured = {tuple(row) for row in tokens.tolist()}
    if any(tuple(row) in measured for row in calibration.tolist()):
        raise ValueError("a window to calibrate on is also measured; gates must be calibrated on other text")
