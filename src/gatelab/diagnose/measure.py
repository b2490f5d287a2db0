"""Passes over one model, one result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gatelab.diagnose.attention import attend, widened
from gatelab.diagnose.calls import AttentionCall, Visibility
from gatelab.diagnose.measurement import LayerMeasurement, Measurement
from gatelab.diagnose.query_sets import require_query_sets
from gatelab.diagnose.recorder import EMBEDDING, Recorder

__all__ = ["Attach", "Forward", "LayerMeasurement", "Measurement", "attach_decoder", "measure"]


@runtime_checkable
class Forward(Protocol):
    """One pass of an attached model up to its final norm: logits are not measured, and long ones take gigabytes."""

    def __call__(
        self, tokens: Int[Tensor, "B T"], real: Bool[Tensor, "B T"] | None, documents: Int[Tensor, "B T"] | None
    ) -> object:
        """Read ``tokens``; ``real`` is False for padding, ``documents`` numbers the document of each token."""
        ...


Attach = Callable[[nn.Module, Recorder], AbstractContextManager[Forward]]
_PADDING_DOCUMENT = -1


@torch.no_grad()
def measure(
    model: nn.Module,
    tokens: Int[Tensor, "N T"],
    attach: Attach | None = None,
    *,
    full: bool = False,
    batch_size: int = 1,
    padding_mask: Bool[Tensor, "N T"] | None = None,
    documents: Int[Tensor, "N T"] | None = None,
    first_tokens: int = 4,
    skipped_queries: Sequence[int] = (1, 64),
    delimiters: Mapping[str, Sequence[int]] | None = None,
    query_sets: Mapping[str, Tensor] | None = None,
) -> Measurement:
    """Run the model once over ``tokens``, ``batch_size`` rows at a time, and measure every layer on the way.

    The figures are defined in :mod:`~gatelab.diagnose.sinks`, :mod:`~gatelab.diagnose.patterns`,
    :mod:`~gatelab.diagnose.gate_scores`, :mod:`~gatelab.diagnose.activations` and :mod:`~gatelab.diagnose.rank`; those
    of a core set cost little beside the forward pass, and ``full`` gives them all; ``delimiters``, token ids by name,
    add those of :mod:`~gatelab.diagnose.patterns` without it. ``padding_mask`` is False for padding, which enters no
    figure. ``query_sets`` gives :mod:`~gatelab.diagnose.query_sets` for the queries that are
    True, under the name of each set.

    A GateLab decoder is attached by itself, and may be given ``documents``, the document of each token. A foreign model
    needs ``attach``: ``attach(model, recorder)`` is a context manager that connects the recorder to it and gives the
    function that runs it. Nothing of the model changes, and a compiled one runs uncompiled.
    """
    num_sequences, num_tokens = tokens.shape
    if num_tokens < 2:
        raise ValueError(f"sequences of {num_tokens} token say nothing about attention; measure at least 2")
    if attach is not None and documents is not None:
        raise ValueError("documents are known to GateLab decoders alone; measure a foreign model without documents=")
    query_sets = query_sets or {}
    require_query_sets(query_sets, tokens.shape)
    real = None if padding_mask is None else padding_mask.bool()
    if real is not None and not real.any():
        raise ValueError("the padding mask leaves no token to measure")
    recorder = Recorder(full, first_tokens, skipped_queries, delimiters)
    with (
        _in_eval_mode(model),
        (attach or attach_decoder)(model, recorder) as forward,
        torch.compiler.set_stance("force_eager"),
    ):
        for start in range(0, num_sequences, batch_size):
            rows = slice(start, start + batch_size)
            real_batch, document_batch = (None if one is None else one[rows] for one in (real, documents))
            sets = {name: members[rows] for name, members in query_sets.items()}
            recorder.start(tokens[rows], real_batch, document_batch, sets)
            forward(tokens[rows], real_batch, document_batch)
    measured = _conclude(model, recorder, tokens, real, documents is not None, batch_size)
    return replace(measured, query_sets=tuple(query_sets), delimiters=tuple(delimiters or ()))


def _conclude(
    model: nn.Module, recorder: Recorder, tokens: Tensor, real: Tensor | None, has_documents: bool, batch_size: int
) -> Measurement:
    layers, embedding = recorder.measurements()
    with_attention = [layer for layer in layers if layer.figures]
    if missing := recorder.missing_layers():
        raise ValueError(
            f"{type(model).__name__} let its attention be observed in {len(with_attention)} of "
            f"{recorder.expected_layers} layers; nothing came from {', '.join(map(str, missing))}"
        )
    if not with_attention:
        if recorder.skipped:
            raise ValueError(f"{type(model).__name__} has no softmax attention to measure")
        raise ValueError(f"no attention layer of {type(model).__name__} could be observed; pass attach=")
    num_sequences, num_tokens = tokens.shape
    num_real = tokens.numel() if real is None else int(real.sum())
    parameter = next(model.parameters(), None)
    context = {
        "num_sequences": num_sequences,
        "tokens_per_sequence": num_tokens,
        "tokens": num_real,
        "padding": tokens.numel() - num_real,
        "documents": has_documents,
        "batch_size": batch_size,
        "full": recorder.full,
        "dtype": None if parameter is None else str(parameter.dtype).removeprefix("torch."),
        "torch": str(torch.__version__),
    }
    return Measurement(
        layers=with_attention,
        context=context,
        embedding=embedding,
        other_layers=[layer for layer in layers if not layer.figures],
        skipped=dict(recorder.skipped),
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
    """An attention module of ours: ``kernel`` computes its attention, and ``recorder`` is shown its tensors."""

    layer: int
    window: int | None
    kernel: Any
    recorder: Any
    gates: Any
    o_proj: Any

    def value_weight(self) -> Tensor:
        """The matrix (K Cv, D) that makes values of the hidden state, up to a factor of each token's own."""
        ...


@runtime_checkable
class LearnedSink(Protocol):
    """The key that no token has, of an attention module of ours: its logits, and its value if it is not 0."""

    value: Any

    def logits_for(self, query: Float[Tensor, "B T H C"], scale: float) -> Float[Tensor, "#B H #T"]:
        """Its logit for each query."""
        ...


@contextmanager
def attach_decoder(model: nn.Module, recorder: Recorder) -> Iterator[Forward]:
    """Connect a recorder to every recordable attention module and to the layer that holds it, then let go.

    Before each pass with padding or documents, :meth:`Recorder.start` has to say which.
    """
    without_head = getattr(model, "hidden", model)

    def forward(tokens: Tensor, real: Tensor | None, documents: Tensor | None) -> None:
        if real is not None:
            numbers = torch.zeros_like(tokens) if documents is None else documents
            documents = torch.where(real, numbers, _PADDING_DOCUMENT)
        if documents is None:
            without_head(tokens)
        else:
            without_head(tokens, documents=documents)

    with ExitStack() as stack:
        for parent in model.modules():
            for attention in parent.children():
                if isinstance(attention, Recordable):
                    probe = _Probe(attention, recorder)
                    for name in ("kernel", "recorder"):
                        stack.callback(setattr, attention, name, getattr(attention, name))
                    attention.kernel, attention.recorder = probe.attend, probe
                    stack.callback(parent.register_forward_hook(_hidden_hook(attention.layer, recorder)).remove)
                    if attention.layer == 0:
                        stack.callback(parent.register_forward_pre_hook(_embedding_hook(recorder)).remove)
        yield forward


class _Probe:
    """Stands in an attention module for its kernel, so that log-sum-exp costs nothing extra, and for its recorder."""

    def __init__(self, attention: Recordable, recorder: Recorder):
        self.attention, self.recorder = attention, recorder
        self.scale, self.visibility, self.lse = 1.0, Visibility(0, 0), torch.zeros(0)
        self.learned_sinks: Tensor | None = None

    def attend(
        self,
        query: Float[Tensor, "B T H C"],
        key: Float[Tensor, "B S K C"],
        value: Float[Tensor, "B S K Cv"],
        mask: Bool[Tensor, "#B 1 T S"] | None,
        causal: bool,
        sink: LearnedSink | None = None,
    ) -> Float[Tensor, "B T H Cv"]:
        """The layer's attention; ``mask`` is only checked to be one that the recorder was told of, windows aside."""
        real, documents = self.recorder.real, self.recorder.documents
        num_queries, num_keys, window = query.shape[1], key.shape[1], self.attention.window
        is_told, is_windowed = real is not None or documents is not None, window is not None and window < num_keys
        is_masked = mask is not None and num_queries == num_keys
        if is_told != is_masked and (is_told or not is_windowed):
            raise ValueError("this pass has other padding or documents than Recorder.start was told of")
        self.visibility = Visibility(num_queries, num_keys, causal, window, real, documents)
        self.scale = query.shape[-1] ** -0.5
        self.learned_sinks = None if sink is None else sink.logits_for(widened(query), self.scale)
        output, self.lse = attend(
            query,
            key,
            value,
            scale=self.scale,
            visibility=self.visibility,
            learned_sinks=self.learned_sinks,
            sink_value=None if sink is None else sink.value,
        )
        return output

    def record(self, layer: int, tensors: Mapping[str, Tensor], scores: Mapping[str, Tensor]) -> None:
        """Hand one layer's tensors over."""
        specs = {position: gate.spec for position, gate in self.attention.gates.items()}
        call = AttentionCall(
            layer=layer,
            query=tensors["query"],
            key=tensors["key"],
            value=tensors["value"],
            output=tensors["output"],
            lse=self.lse,
            scale=self.scale,
            visibility=self.visibility,
            learned_sinks=self.learned_sinks,
            scores=scores,
            activations={position: spec.activation for position, spec in specs.items()},
            added=frozenset(position for position, spec in specs.items() if spec.operation == "add"),
            gated_output=tensors["gated_output"],
            output_weight=self.attention.o_proj.weight,
            value_weight=self.attention.value_weight() if self.recorder.full else None,
        )
        self.recorder.record(call)


def _hidden_hook(layer: int, recorder: Recorder) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        recorder.record_hidden(layer, output[0] if isinstance(output, tuple) else output)

    return hook


def _embedding_hook(recorder: Recorder) -> Callable[[nn.Module, Any], None]:
    def hook(module: nn.Module, inputs: Any) -> None:
        recorder.record_hidden(EMBEDDING, inputs[0])

    return hook
