"""Adding a gate to a trained decoder so that, at first, nothing changes.

With zero weights every score is activation(b), whatever the token. The gated tensor y stays y if that is 1 (multiply)
or 0 (add), so b solves activation(b) = 1 or 0: y * 2 sigmoid(0) and y + silu(0) are y, bit for bit. sigmoid, ns_sigmoid
and tanh only approach 1, and sigmoid, softplus and 2 sigmoid only approach 0: they start at a bias far out, near to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gatelab.gates.gate import ACTIVATIONS
from gatelab.gates.spec import Activation, GateSpec
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import generator_for
from gatelab.model.settings import ModelSettings

Operation = Literal["multiply", "add"]

LARGEST_ERROR = 0.01
_NUM_SEQUENCES, _MOST_TOKENS = 2, 64
# The logit at which an activation is 1 (multiply) or 0 (add) ...
_THERE: Mapping[Operation, Mapping[Activation, float]] = {
    "multiply": {"double_sigmoid": 0.0, "identity": 1.0, "silu": 1.2784645427610738, "softplus": math.log(math.e - 1)},
    "add": {"identity": 0.0, "silu": 0.0, "tanh": 0.0},
}
# ... or is within 1e-4 of it and, in float32, still has a gradient.
_NEAR: Mapping[Operation, Mapping[Activation, float]] = {
    "multiply": {"sigmoid": 10.0, "ns_sigmoid": 10.0, "tanh": 5.0},
    "add": {"sigmoid": -10.0, "double_sigmoid": -10.0, "softplus": -10.0},
}


class GatedStart(NamedTuple):
    """A decoder with a fresh gate, and how far it is from the decoder without.

    ``gate`` is the gate as it was added: zero weights, and the bias that the start needs. Every ``score`` is the same
    at first, and ``score_error`` is its distance from 1 (multiply) or 0 (add), both in real numbers. ``logit_error``
    is the largest difference of a logit on random tokens, as a share of the largest logit; 0.0 says bit-equal.
    """

    decoder: Decoder
    gate: GateSpec
    score: float
    score_error: float
    logit_error: float


@torch.no_grad()
def add_gate(decoder: Decoder, gate: GateSpec, seed: int = 0) -> GatedStart:
    """A copy of the decoder, in its dtype and on its device, with one more gate that changes nothing at first.

    A gate that only approaches its identity starts at ``gate.bias``, or within 1e-4 of the identity; it computes its
    scores in float32, because a bfloat16 sigmoid near 1 is 1 and has no gradient. ``seed`` draws the first matrix of a
    gate with a rank. Add two gates one after the other.

    Raises ``ValueError`` for a gate without such a start (added ns_sigmoid scores are at least 0.5), for a bias that
    starts elsewhere or so far out that nothing could be learned, for a second gate at a position, and where the
    largest difference of a logit exceeds a hundredth of the largest logit.
    """
    logit, gate = _start(gate)
    settings = ModelSettings.parse(
        {
            **decoder.settings.to_mapping(),
            "gates": [one.to_mapping() for one in (*decoder.settings.gates, gate)],
        }
    )
    gated = _with_gates(decoder, settings, logit, seed)
    score = float(ACTIVATIONS[gate.activation](torch.tensor(logit, dtype=torch.float64)))
    error = _logit_error(decoder, gated)
    if not error <= LARGEST_ERROR:
        raise ValueError(
            f"a {gate.activation} gate with start bias {logit:g} moves logits by {error:.2g} of the largest one, more "
            f"than {LARGEST_ERROR:g}; {_closer(gate)}"
        )
    return GatedStart(gated, gate, score, abs(score - _neutral(gate)), error)


def _start(gate: GateSpec) -> tuple[float, GateSpec]:
    """The logit of every score at the start, and the gate that starts there."""
    neutral = _neutral(gate)
    changes: dict[str, object] = {"initialization": "zeros"}
    if gate.activation in _THERE[gate.operation]:
        logit = _THERE[gate.operation][gate.activation]
        if gate.bias is not None and not math.isclose(gate.bias, logit, abs_tol=1e-6):
            raise ValueError(
                f"bias={gate.bias:g} starts a {gate.activation} gate at scores of {gate.initial_score():.4g}, not "
                f"{neutral}; leave the bias out"
            )
    elif gate.activation in _NEAR[gate.operation]:
        logit = _NEAR[gate.operation][gate.activation] if gate.bias is None else gate.bias
        if float(ACTIVATIONS[gate.activation](torch.tensor(logit))) == neutral:
            raise ValueError(
                f"bias={logit:g} starts a {gate.activation} gate at {neutral} in float32, without a gradient; leave "
                "the bias out, or write one nearer to zero"
            )
        changes["score_dtype"] = "float32"
    else:
        raise ValueError(
            f"operation={gate.operation} with activation={gate.activation} has no start that changes nothing: its "
            f"scores never come near {neutral}; choose another activation, such as {_exact(gate)}"
        )
    if gate.source != "parameter" and (logit or gate.bias is not None):
        changes["bias"] = logit
    return logit, GateSpec.parse({**gate.to_mapping(), **changes})


def _neutral(gate: GateSpec) -> int:
    """The score that leaves the gated tensor as it is."""
    return 1 if gate.operation == "multiply" else 0


def _exact(gate: GateSpec) -> str:
    return "double_sigmoid" if gate.operation == "multiply" else "silu"


def _closer(gate: GateSpec) -> str:
    further = "write a larger bias" if gate.operation == "multiply" else "write a bias further below zero"
    return f"{further}, or activation={_exact(gate)}, which starts exactly"


def _with_gates(decoder: Decoder, settings: ModelSettings, logit: float, seed: int) -> Decoder:
    """A decoder with these settings, this decoder's weights (copied), and fresh ones for what is new in it."""
    with torch.device("meta"):
        gated = Decoder(settings)
    weights = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    like = decoder.model.embed_tokens.weight
    for name, parameter in gated.named_parameters():
        if name not in weights:
            fresh = _fresh(name, parameter.shape, logit, settings.init_std, seed)
            weights[name] = fresh.to(device=like.device, dtype=like.dtype)
    gated.load_state_dict(weights, assign=True)
    gated.activation_dtype = decoder.activation_dtype
    return gated.train(decoder.training)


def _fresh(name: str, shape: torch.Size, logit: float, init_std: float, seed: int) -> Tensor:
    """The first matrix of two as in a fresh model, biases and input-independent logits at their start, else zeros."""
    if name.endswith(".down.weight"):
        return init_std * torch.randn(shape, generator=generator_for(seed, name), dtype=torch.float64).float()
    return torch.full(shape, logit if name.endswith((".bias", ".logits")) else 0.0, dtype=torch.float64)


def _logit_error(decoder: Decoder, gated: Decoder) -> float:
    """The largest difference of a logit on random tokens, as a share of the largest logit of ``decoder``."""
    settings = decoder.settings
    shape = (_NUM_SEQUENCES, min(settings.max_context, _MOST_TOKENS))
    ids = torch.randint(settings.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    ids = ids.to(decoder.model.embed_tokens.weight.device)
    expected = decoder(ids).double()
    return float((gated(ids).double() - expected).abs().max() / expected.abs().max())
