"""One gated attention block in float64, written with plain loops: what every gate means, and what tests compare with.

Read it from top to bottom as a chapter: first the block and its steps in order, then attention, then the gates, then
the small functions. Vectors stand for channels; batch, heads, queries and keys are loops. Nothing is shared with
:mod:`gatelab.gates.gate`, activations are written out from exp, and torch differentiates all of it.

Notation: x_t hidden state (D), q_th, k_tj, v_tj query, key, value vectors (C), H query heads, K key/value heads;
positions in the sequence and heads count from 0. The paper is arXiv 2505.06708.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gatelab.gates.spec import Activation, AttentionShape, GateSpec, OutputControl, Placement, Position

Vector = Float[Tensor, " channels"]
Heads = list[Tensor]  # one vector of channels for each head
Sources = Mapping[str, Tensor]  # what gates may read of one token: a vector under each name


@dataclass(frozen=True)
class Block:
    """Sizes, weights and gates of one attention block.

    ``weights`` holds float64 tensors under the names of Hugging Face's Qwen3: ``q_proj.weight`` (H C, D),
    ``k_proj.weight`` and ``v_proj.weight`` (K C, D), ``o_proj.weight`` (D, H C); with q/k norm also ``q_norm.weight``
    and ``k_norm.weight`` (C); with the RMSNorm control ``control.weight`` (H, C). ``gates`` pairs each specification
    with its parameters, named and shaped as :meth:`GateSpec.parameter_shapes` says, at most one for each position.
    """

    shape: AttentionShape
    weights: Mapping[str, Tensor]
    gates: Sequence[tuple[GateSpec, Mapping[str, Tensor]]] = ()
    control: OutputControl | None = None
    rotary_channels: int = 0
    rope_theta: float = 10_000.0
    epsilon: float = 1e-6


@dataclass(frozen=True)
class Token:
    """One token of one sequence on its way through the block."""

    queries: Heads
    keys: Heads
    values: Heads
    sources: Sources


def attention_block(block: Block, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
    """The whole block: what is added to the residual stream, from the pre-norm hidden states."""
    sequences = []
    for sequence in hidden:
        tokens = [prepare_token(block, x, position) for position, x in enumerate(sequence)]
        outputs = [attend_and_project(block, tokens[: t + 1]) for t in range(len(tokens))]
        sequences.append(torch.stack(outputs))
    return torch.stack(sequences)


def prepare_token(block: Block, x: Vector, position: int) -> Token:
    """Queries, keys and values of one token, with their gates.

    1. Projections: q_t = W_q x_t, k_t = W_k x_t, v_t = W_v x_t, each cut into heads.
    2. The value gate (G2): v'_tj = gate(v_tj). A gate whose source is the value state reads v_t, not v'_t.
    3. The query (G4) and the key (G3), each: gate before the norm, norm, gate after it, rotation, gate after that.
    """
    head_size = block.shape.head_size
    queries = split_heads(block.weights["q_proj.weight"] @ x, block.shape.num_heads, head_size)
    keys = split_heads(block.weights["k_proj.weight"] @ x, block.shape.num_kv_heads, head_size)
    values = split_heads(block.weights["v_proj.weight"] @ x, block.shape.num_kv_heads, head_size)
    sources = {"hidden": x, "value": torch.cat(values)}
    return Token(
        queries=norm_and_rotate(block, queries, "query", position, sources),
        keys=norm_and_rotate(block, keys, "key", position, sources),
        values=apply_gate(block, values, "value", sources),
        sources=sources,
    )


def norm_and_rotate(block: Block, heads: Heads, place: Position, position: int, sources: Sources) -> Heads:
    """q' = gate(R_t gate(norm(gate(q)))), with at most one of the three gates set; the key likewise."""
    norm_weight = block.weights.get("q_norm.weight" if place == "query" else "k_norm.weight")
    heads = apply_gate(block, heads, place, sources, "before_norm")
    if norm_weight is not None:
        heads = [rms_norm(head, norm_weight, block.epsilon) for head in heads]
    heads = apply_gate(block, heads, place, sources, "after_norm")
    heads = [rotate(head, position, block.rotary_channels, block.rope_theta) for head in heads]
    return apply_gate(block, heads, place, sources, "after_rope")


def attend_and_project(block: Block, tokens: Sequence[Token]) -> Vector:
    """The block's output for the last of ``tokens``, which looks at all of them.

    4. Attention: o_h, for each query head, from key/value head h // (H / K): grouped queries.
    5. The gate-free control, if any: o_h <- RMSNorm_h(o_h) or SiLU(o_h).
    6. The gate on the SDPA output (G1): o'_h = gate(o_h).
    7. The dense layer: y = W_o concat(o'_0 ... o'_{H-1}).
    8. The gate on its output (G5): y' = gate(y).

    A gate whose source is the attention output reads o before steps 5 and 6.
    """
    query_token = tokens[-1]
    group = block.shape.num_heads // block.shape.num_kv_heads
    heads = []
    for h, query in enumerate(query_token.queries):
        keys = [token.keys[h // group] for token in tokens]
        values = [token.values[h // group] for token in tokens]
        heads.append(attend(query, keys, values))
    sources = {**query_token.sources, "attention_output": torch.cat(heads)}
    heads = apply_gate(block, apply_control(block, heads), "sdpa_output", sources)
    output = block.weights["o_proj.weight"] @ torch.cat(heads)
    return apply_gate(block, [output], "dense_output", sources)[0]


def attend(
    query: Vector, keys: Sequence[Vector], values: Sequence[Float[Tensor, " value_channels"]]
) -> Float[Tensor, " value_channels"]:
    """Softmax attention of one query over the keys up to its own position (causal).

    a_s = exp(q . k_s / sqrt(C)) / sum_r exp(q . k_r / sqrt(C));  o = sum_s a_s v_s.
    The largest logit is subtracted inside exp, which changes nothing but overflow.
    """
    logits = torch.stack([query @ key / math.sqrt(len(query)) for key in keys])
    exponentials = torch.exp(logits - logits.max().detach())
    weights = exponentials / exponentials.sum()
    output = torch.zeros_like(values[0])
    for weight, value in zip(weights, values, strict=True):
        output = output + weight * value
    return output


def apply_control(block: Block, heads: Heads) -> Heads:
    """The non-linearities without a gate of the paper's table 3, on each head of the SDPA output by itself."""
    if block.control is None:
        return heads
    if block.control.operation == "silu":
        return [silu(head) for head in heads]
    return [rms_norm(head, block.weights["control.weight"][h], block.epsilon) for h, head in enumerate(heads)]


def apply_gate(
    block: Block, heads: Heads, place: Position, sources: Sources, placement: Placement | None = None
) -> Heads:
    """The gate that stands at this place, if there is one: y'_n = y_n * s_n or y_n + s_n for each head n.

    s_n has C entries (elementwise) or a single one that serves all channels (headwise).
    """
    for spec, parameters in block.gates:
        if (spec.position, spec.placement) == (place, placement):
            scores = gate_scores(spec, parameters, sources, len(heads), len(heads[0]))
            if spec.operation == "multiply":
                heads = [head * score for head, score in zip(heads, scores, strict=True)]
            else:
                heads = [head + score for head, score in zip(heads, scores, strict=True)]
    return heads


def gate_scores(
    spec: GateSpec, parameters: Mapping[str, Tensor], sources: Sources, num_heads: int, head_size: int
) -> Heads:
    """The scores of one token: for each head of the gated tensor a vector of C entries or of one.

    head_specific: s_n = f(z_n).
    head_shared: s_n = (1/N) sum_m f(z_m) for all n, or f((1/N) sum_m z_m) where the mean comes first.
    """
    channels = head_size if spec.granularity == "elementwise" else 1
    logits = [gate_logits(spec, parameters, sources, n, channels) for n in range(num_heads)]
    activation = ACTIVATIONS[spec.activation]
    if spec.sharing == "head_specific":
        return [activation(z) for z in logits]
    if spec.averaging == "after_activation":
        shared = sum_of([activation(z) for z in logits]) / num_heads
    else:
        shared = activation(sum_of(logits) / num_heads)
    return [shared] * num_heads


def gate_logits(spec: GateSpec, parameters: Mapping[str, Tensor], sources: Sources, head: int, channels: int) -> Vector:
    """z_n: the logits of head n, from rows n * channels to (n + 1) * channels of the projection (head-major).

    z = W x + b; with a rank z = U (V x) + b; input-independent: z is a parameter, the same for every token.
    """
    if spec.source == "parameter":
        return parameters["logits"][head]
    x = sources["hidden"][: spec.prefix_channels] if spec.source == "prefix" else sources[spec.source]
    first, last = head * channels, (head + 1) * channels
    if spec.rank is None:
        logits, bias = parameters["projection.weight"][first:last] @ x, parameters.get("projection.bias")
    else:
        inner = parameters["projection.down.weight"] @ x
        logits, bias = parameters["projection.up.weight"][first:last] @ inner, parameters.get("projection.up.bias")
    return logits if bias is None else logits + bias[first:last]


def split_heads(x: Vector, num_heads: int, head_size: int) -> Heads:
    """Head n is channels n C to (n + 1) C."""
    return [x[n * head_size : (n + 1) * head_size] for n in range(num_heads)]


def rms_norm(x: Vector, weight: Vector, epsilon: float) -> Vector:
    """y_c = w_c x_c / sqrt((1/C) sum_c x_c^2 + epsilon)."""
    return weight * x / torch.sqrt((x * x).sum() / len(x) + epsilon)


def rotate(x: Vector, position: int, rotary_channels: int, theta: float) -> Vector:
    """Rotary position embedding of the first R channels; the others pass.

    Channels i and i + R/2 form a plane (half-split, as in Hugging Face's Llama and Qwen3), turned by the angle
    a_i = position * theta^(-2 i / R):

        y_i       = x_i       cos a_i - x_{i+R/2} sin a_i
        y_{i+R/2} = x_{i+R/2} cos a_i + x_i       sin a_i
    """
    half = rotary_channels // 2
    first, second, passing = x[:half], x[half:rotary_channels], x[rotary_channels:]
    angles = [position * theta ** (-2 * i / rotary_channels) for i in range(half)]
    cos, sin = x.new_tensor([math.cos(a) for a in angles]), x.new_tensor([math.sin(a) for a in angles])
    return torch.cat([first * cos - second * sin, second * cos + first * sin, passing])


def sum_of(vectors: Sequence[Vector]) -> Vector:
    """v_0 + v_1 + ..."""
    return torch.stack(list(vectors)).sum(0)


def sigmoid(z: Vector) -> Vector:
    """1 / (1 + e^-z)."""
    return 1 / (1 + torch.exp(-z))


def silu(z: Vector) -> Vector:
    """z / (1 + e^-z)."""
    return z / (1 + torch.exp(-z))


def identity(z: Vector) -> Vector:
    """z."""
    return z


def ns_sigmoid(z: Vector) -> Vector:
    """1/2 + 1 / (2 (1 + e^-z)): the paper's non-sparse sigmoid."""
    return 0.5 + 0.5 / (1 + torch.exp(-z))


def double_sigmoid(z: Vector) -> Vector:
    """2 / (1 + e^-z)."""
    return 2 / (1 + torch.exp(-z))


def softplus(z: Vector) -> Vector:
    """ln(1 + e^z)."""
    return torch.log(1 + torch.exp(z))


def tanh(z: Vector) -> Vector:
    """(e^z - e^-z) / (e^z + e^-z)."""
    return (torch.exp(z) - torch.exp(-z)) / (torch.exp(z) + torch.exp(-z))


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "sigmoid": sigmoid,
    "silu": silu,
    "identity": identity,
    "ns_sigmoid": ns_sigmoid,
    "double_sigmoid": double_sigmoid,
    "softplus": softplus,
    "tanh": tanh,
}
