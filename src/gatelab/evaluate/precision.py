"""What bfloat16 costs: the error of one forward and backward pass against a wider dtype at equal weights.

The paper explains the stability of gated models by smaller activations, which bfloat16 rounds more finely; this
measures it. Both passes use the same weights, rounded to the narrow dtype first, so that the error is that of the
arithmetic alone. An error is relative: ||narrow - wide|| / ||wide||, Euclidean, over all values that it speaks of.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gatelab.evaluate.rows import Subject
from gatelab.model.perplexity import token_nats

QUERY_RANGES = {"all": slice(None), "first_token": slice(0, 1), "rest": slice(1, None)}


class SquaredError:
    """Sums in float64 behind one relative error, over several tensors."""

    def __init__(self) -> None:
        self.error = self.size = 0.0
        self.count = 0

    def add(self, narrow: Tensor, wide: Tensor) -> None:
        """Count the values of two tensors of one shape."""
        wide = wide.double()
        self.error += float((narrow.double() - wide).square().sum())
        self.size += float(wide.square().sum())
        self.count += wide.numel()

    @property
    def relative(self) -> float:
        """||narrow - wide|| / ||wide||; 0 where both are zero."""
        return 0.0 if self.error == 0 else (self.error / self.size) ** 0.5 if self.size else float("inf")


def probe_precision(
    model: nn.Module,
    tokens: Int[Tensor, "N T"],
    subject: Subject,
    *,
    narrow: torch.dtype = torch.bfloat16,
    wide: torch.dtype = torch.float32,
) -> list[dict[str, Any]]:
    """Relative errors of logits, of each layer's output and of each layer's gradient, as tidy rows.

    Metrics, each with the two dtypes in brackets: ``logits_error``; ``hidden_error`` (by layer; query ranges ``all``,
    ``first_token``, ``rest``, because a massive first token outweighs all others); ``gradient_error`` (by layer, over
    its parameters; without a layer over all parameters). The gradient is that of the mean next-token cross-entropy of
    one window; errors pool all windows. The model itself is not changed; two copies of it and their gradients are held
    at a time. Works for a GateLab decoder and for any model whose output has ``logits``.
    """
    narrow_model, wide_model = _copy(model, narrow, narrow), _copy(model, narrow, wide)
    errors: dict[tuple[str, int | None, str | None], SquaredError] = defaultdict(SquaredError)
    for window in tokens:
        passes = [_pass(one, window[None]) for one in (narrow_model, wide_model)]
        (narrow_logits, narrow_hidden), (wide_logits, wide_hidden) = passes
        errors["logits_error", None, None].add(narrow_logits, wide_logits)
        for layer, states in enumerate(zip(narrow_hidden, wide_hidden, strict=True)):
            for name, positions in QUERY_RANGES.items():
                errors["hidden_error", layer, name].add(*(state[:, positions] for state in states))
        _add_gradients(errors, narrow_model, wide_model)
    dtypes = "_against_".join(str(dtype).removeprefix("torch.") for dtype in (narrow, wide))
    return [
        subject.row(f"{metric}[{dtypes}]", error.relative, error.count, layer=layer, query_range=query_range)
        for (metric, layer, query_range), error in errors.items()
    ]


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The model's stack of layers: of all its module lists the one with most parameters, as no part of it has more."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of layers, so no error can be told by layer")
    return max(lists, key=lambda layers: sum(parameter.numel() for parameter in layers.parameters()))


def _copy(model: nn.Module, rounded: torch.dtype, dtype: torch.dtype) -> nn.Module:
    """A copy in eval mode with weights rounded to one dtype and held in another; buffers, such as the frequencies of
    rotary embeddings, keep their own."""
    copied = copy.deepcopy(model).eval()
    for parameter in copied.parameters():
        parameter.data = parameter.data.to(rounded).to(dtype)
        parameter.requires_grad_(True)
    return copied


def _pass(model: nn.Module, tokens: Int[Tensor, "1 T"]) -> tuple[Float[Tensor, "1 T V"], list[Float[Tensor, "1 T D"]]]:
    """Logits and layer outputs of one window; its gradients are left in the model."""
    model.zero_grad()
    with _layer_outputs(model) as hidden:
        output = model(tokens)
    logits = output if isinstance(output, Tensor) else output.logits
    token_nats(logits[:, :-1], tokens[:, 1:]).mean().backward()
    return logits.detach(), hidden


@contextmanager
def _layer_outputs(model: nn.Module) -> Iterator[list[Tensor]]:
    """A list that fills with what the layers return, in their order."""
    collected: list[Tensor] = []

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        collected.append((output[0] if isinstance(output, tuple) else output).detach())

    handles = [layer.register_forward_hook(note) for layer in decoder_layers(model)]
    try:
        yield collected
    finally:
        for handle in handles:
            handle.remove()


def _add_gradients(errors: dict[Any, SquaredError], narrow_model: nn.Module, wide_model: nn.Module) -> None:
    layers = enumerate(decoder_layers(narrow_model))
    layer_of = {parameter: index for index, layer in layers for parameter in layer.parameters()}
    for narrow, wide in zip(narrow_model.parameters(), wide_model.parameters(), strict=True):
        if narrow.grad is not None and wide.grad is not None:
            for layer in {None, layer_of.get(narrow)}:
                errors["gradient_error", layer, None].add(narrow.grad, wide.grad)
