"""One pass over one model, one result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor, nn

from gatelab.diagnose.attention import uniform_floor
from gatelab.diagnose.recorder import LayerMeasurement, Recorder

Attach = Callable[[nn.Module, Recorder], AbstractContextManager[Any]]


class Measurement(NamedTuple):
    """What one pass measured, layer by layer, with the context that the figures depend on.

    ``floor`` and ``floor_after_first`` are the first-token attention of uniform attention over the same queries.
    """

    layers: list[LayerMeasurement]
    num_sequences: int
    num_tokens: int
    floor: float
    floor_after_first: float

    @property
    def first_token(self) -> float:
        """The paper's F-Attn: mean over heads, then layers."""
        return _mean([_mean(layer.first_token) for layer in self.layers])

    @property
    def worst_layer_first_token(self) -> float:
        """The largest mean over heads of any layer."""
        return max(_mean(layer.first_token) for layer in self.layers)

    @property
    def largest_activation(self) -> float:
        """The largest |h| of any layer's output."""
        return max(layer.hidden.value for layer in self.layers if layer.hidden)

    @property
    def mean_activation_maximum(self) -> float:
        """The paper's M-Act: the largest |h| of each layer's output, averaged over layers."""
        return _mean([layer.hidden.value for layer in self.layers if layer.hidden])

    @property
    def gate_mean(self) -> float | None:
        """Mean gate score over layers and positions; ``None`` for an ungated model."""
        means = [gate.mean for layer in self.layers for gate in layer.gates.values()]
        return _mean(means) if means else None

    def summary(self) -> dict[str, float | int | None]:
        """The figures that are logged during training, by name."""
        return {
            "first_token_attention": self.first_token,
            "first_token_attention_worst_layer": self.worst_layer_first_token,
            "first_token_attention_floor": self.floor,
            "sink_rate": _mean([_mean(layer.sink_rate) for layer in self.layers]),
            "largest_activation": self.largest_activation,
            "mean_activation_maximum": self.mean_activation_maximum,
            "gate_mean": self.gate_mean,
            "measured_tokens": self.num_sequences * self.num_tokens,
        }

    def to_mapping(self) -> dict[str, Any]:
        """Everything, as plain values for JSON."""
        layers = [
            {**vars(layer), "gates": {name: gate._asdict() for name, gate in layer.gates.items()},
             "hidden": layer.hidden._asdict() if layer.hidden else None}
            for layer in self.layers
        ]  # fmt: skip
        context = {"num_sequences": self.num_sequences, "tokens_per_sequence": self.num_tokens}
        floors = {"floor": self.floor, "floor_after_first": self.floor_after_first}
        return {"summary": self.summary(), "context": context, **floors, "layers": layers}


@torch.no_grad()
def measure(
    model: nn.Module, tokens: Int[Tensor, "B T"], attach: Attach | None = None, causal: bool = True
) -> Measurement:
    """Run ``model(tokens)`` once and measure every attention layer and layer output on the way.

    ``attach(model, recorder)`` is a context manager that connects the recorder to a foreign model; a GateLab decoder
    needs none. The sequences are whole: no padding, one document each, two tokens at least. Nothing of the model
    changes, and a compiled one runs uncompiled for this pass.
    """
    num_sequences, num_tokens = tokens.shape
    if num_tokens < 2:
        raise ValueError(f"sequences of {num_tokens} token say nothing about attention; measure at least 2")
    recorder = Recorder(causal)
    with _in_eval_mode(model), (attach or attach_decoder)(model, recorder), torch.compiler.set_stance("force_eager"):
        model(tokens)
    if not recorder.layers:
        raise ValueError(f"no attention layer of {type(model).__name__} could be observed; pass attach=")
    return Measurement(
        layers=[recorder.layers[index] for index in sorted(recorder.layers)],
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        floor=uniform_floor(num_tokens, causal=causal),
        floor_after_first=uniform_floor(num_tokens, skipped=1, causal=causal),
    )


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode for a while; every module then gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


@runtime_checkable
class Recordable(Protocol):
    """An attention module that hands its tensors to its ``recorder`` when it has one."""

    layer: int
    recorder: Any


@contextmanager
def attach_decoder(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Connect a recorder to every recordable attention module and to the layer that holds it, then let go."""
    with ExitStack() as stack:
        for parent in model.modules():
            for attention in parent.children():
                if isinstance(attention, Recordable):
                    stack.callback(setattr, attention, "recorder", attention.recorder)
                    attention.recorder = recorder
                    handle = parent.register_forward_hook(_hidden_hook(attention.layer, recorder))
                    stack.callback(handle.remove)
        yield


def _hidden_hook(layer: int, recorder: Recorder) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        recorder.record_hidden(layer, output[0] if isinstance(output, tuple) else output)

    return hook


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
