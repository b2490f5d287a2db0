"""Bytes that autograd keeps between a forward and a backward pass, from the shapes. Nothing here imports torch.

Every formula is one tensor that the eager operations of :mod:`gatelab.model` save; a tensor that two of them save has
one name and counts once. N = B T tokens computed at once, a bytes of an activation (2 in bfloat16), w = max(a, 4) bytes
of what is computed in float32 at least. One layer keeps, without gates and for a < 4:

    each RMSNorm over M numbers in R rows    M w (its input in float32) + R w + M a
    attention    N D a (input) + norms of q and k + N (2 H + 2 K) C a (q, k, v, output) + N H w (log-sum-exp)
    latents      of r and r' channels: norms over both, N (D + r + r') a (inputs), N H w (log-sum-exp), and
                 N H (4 C + Cv) a where values are smaller than keys (q, k, v and output as large as keys, output)
    SwiGLU       N D a (input) + 4 N F a (both projections, silu, their product)
    mixture      N k (2 D + 4 F) a + about N (2 E w + 28 k), on top of the router's input
    head         N D a + N V w (log-softmax)

With a = w a norm's input is the tensor itself. Weights cast to the activations' dtype are kept too, but belong to the
weights (:mod:`gatelab.train.memory`). Compiled layers keep less, because what is cheap is computed twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gatelab.gates.spec import GateSpec
from gatelab.model.settings import LatentSettings, MixtureSettings, ModelSettings, RopeSettings

INDEX_BYTES = 8


@dataclass(frozen=True)
class Piece:
    """What one rank computes at once: B ``sequences`` of T = ``context`` tokens, split over ``tensor`` ranks.

    ``element_bytes`` is a. A rank of a tensor-parallel group has H / tensor query heads, max(K / tensor, 1) key/value
    heads, F / tensor channels of a dense feed-forward and, on average, k / tensor rows of a token for its experts; the
    residual stream, the norms over D and the head are whole, and so are logits that are averaged over heads.
    """

    sequences: int
    context: int
    element_bytes: int = 2
    tensor: int = 1

    @property
    def num_tokens(self) -> int:
        """N = B T."""
        return self.sequences * self.context

    @property
    def wide_bytes(self) -> int:
        """w, bytes of a number that is computed in float32 at least."""
        return max(self.element_bytes, 4)


def layer_activations(settings: ModelSettings, layer: int, piece: Piece) -> dict[str, int | float]:
    """Name -> bytes of every tensor that one layer keeps for its backward pass."""
    return _Layer(settings, layer, piece).saved()


def head_activations(settings: ModelSettings, piece: Piece) -> dict[str, int | float]:
    """Name -> bytes of what is kept outside the layers: token ids, rotations, the last norm, the head with its loss."""
    ropes: list[RopeSettings] = []
    for rope in map(settings.rope_on_layer, range(settings.num_layers)):
        if rope is not None and rope not in ropes:
            ropes.append(rope)
    angles = sum(rope.rotated_channels(settings.rotary_size) for rope in ropes)
    saved = _Saved(settings, piece)
    saved.keep("token ids", INDEX_BYTES / piece.element_bytes)
    saved.tensors["rotations"] = 2 * piece.context * angles * piece.element_bytes
    saved.norm("residual", settings.width)
    saved.keep("final state", settings.width)
    saved.keep_wide("log-softmax", settings.vocab_size)
    return saved.tensors


def activation_bytes(settings: ModelSettings, piece: Piece, recompute: bool = False) -> int | float:
    """Most bytes kept at one moment of a step: all layers and the head; or with recomputed layers every layer's input,
    the head, and the largest layer, whose activations exist again while its backward pass runs."""
    layers = _bytes_of_layers(settings, piece)
    head = sum(head_activations(settings, piece).values())
    if not recompute:
        return sum(layers) + head
    inputs = settings.num_layers * piece.num_tokens * settings.width * piece.element_bytes
    return inputs + max(layers) + head


def _bytes_of_layers(settings: ModelSettings, piece: Piece) -> list[int | float]:
    """Bytes of each layer; layers that are alike are computed once."""
    known: list[tuple[object, int | float]] = []
    result = []
    for layer in range(settings.num_layers):
        kind = (settings.on_layer(layer), settings.gates_on_layer(layer))
        found = next((num_bytes for other, num_bytes in known if other == kind), None)
        if found is None:
            found = sum(layer_activations(settings, layer, piece).values())
            known.append((kind, found))
        result.append(found)
    return result


def loss_working_bytes(settings: ModelSettings, piece: Piece) -> int | float:
    """Bytes that the loss's backward pass takes on top of what is kept: two gradients of the logits in float32 at least
    and one in the activations' dtype, N V (2 w + a)."""
    return piece.num_tokens * settings.vocab_size * (2 * piece.wide_bytes + piece.element_bytes)


@dataclass
class _Saved:
    """The tensors kept so far. Sizes are numbers of elements for each token; ``views`` has those of what a tensor is a
    part of, which is kept whole."""

    settings: ModelSettings
    piece: Piece
    tensors: dict[str, int | float] = field(default_factory=dict)
    views: dict[str, int | float] = field(default_factory=dict)

    def keep(self, name: str, elements: int | float) -> None:
        """A tensor in the activations' dtype."""
        self.tensors[name] = self.piece.num_tokens * self.views.get(name, elements) * self.piece.element_bytes

    def keep_wide(self, name: str, elements: int | float) -> None:
        """A tensor in float32 at least."""
        self.tensors[name] = self.piece.num_tokens * self.views.get(name, elements) * self.piece.wide_bytes

    def keep_in_float32(self, name: str, elements: int | float) -> None:
        """The tensor of this name as float32: a copy, or itself where it is no narrower."""
        is_copied = self.piece.element_bytes < self.piece.wide_bytes
        self.keep_wide(f"{name} in float32" if is_copied else name, elements)

    def norm(self, name: str, elements: int | float, rows: int | float = 1, centred: bool | None = None) -> None:
        """An RMSNorm of the tensor of this name; what uses its output keeps that."""
        centred = self.settings.centred_norms if centred is None else centred
        self.keep_in_float32(name, elements)
        self.keep_wide(f"1 / rms of {name}", rows)
        (self.keep_wide if centred else self.keep)(f"{name} / rms", elements)


class _Layer(_Saved):
    """One layer, operation by operation in the order of its forward pass."""

    def __init__(self, settings: ModelSettings, layer: int, piece: Piece):
        super().__init__(settings, piece)
        self.shape = settings.shape_on_layer(layer)
        self.mixture = settings.mixture_on_layer(layer)
        self.rotates = settings.rope_on_layer(layer) is not None
        window = settings.on_layer(layer).window
        self.has_mask = window is not None and window < piece.context
        self.gates = {gate.position: gate for gate in settings.gates_on_layer(layer)}
        self.heads = self.shape.num_heads / piece.tensor
        self.kv_heads = max(self.shape.num_kv_heads / piece.tensor, 1)

    def saved(self) -> dict[str, int | float]:
        """Attention, then the feed-forward."""
        width = self.settings.width
        self.norm("residual before attention", width)
        self.keep("attention input", width)
        self._attention()
        if self.settings.sandwich_norm:
            self.norm("attention branch", width)
        self.norm("residual before feed-forward", width)
        self.keep("feed-forward input", width)
        if self.mixture is None:
            self._swiglu("feed-forward", self.settings.feedforward_width / self.piece.tensor)
        else:
            self._mixture(self.mixture)
        if self.settings.sandwich_norm:
            self.norm("feed-forward branch", width)
        return self.tensors

    def _attention(self) -> None:
        size, latent = self.shape.value_size, self.settings.latent
        if latent is not None:
            self._latents(latent)
        value = self._gate("value", "value", self.kv_heads, size)
        query = self._rotated("query", self.heads)
        key = self._rotated("key", self.kv_heads)
        output = self._softmax_attention(query, key, value)
        output = self._control(output)
        output = self._gate("sdpa_output", output, self.heads, size)
        self.keep(f"joined {output}" if output in self.views else output, self.heads * size)
        self._gate("dense_output", "dense output", 1, self.settings.width)

    def _latents(self, latent: LatentSettings) -> None:
        """What queries, keys and values are made of, and what these are then parts of."""
        rank, heads = latent.key_value_rank, self.heads
        self.views = {
            "latents": rank + latent.rotated_size,
            "value": heads * (latent.unrotated_size + latent.value_size),
        }
        if latent.value_size < self.shape.head_size:
            self.views["attention output"] = heads * self.shape.head_size
        self.norm("latents", rank)
        self.keep("latent", rank)
        if latent.query_rank is not None:
            self.norm("query latents", latent.query_rank)
            self.keep("query latent", latent.query_rank)

    def _rotated(self, name: str, heads: int | float) -> str:
        """Gates, norm and rotation of queries or keys; the name of the tensor that comes out."""
        size = self.shape.head_size
        found = self._gate(name, name, heads, size, "before_norm")
        if self.settings.qk_norm:
            self.norm(found, heads * size, heads)
            found = f"{name} normed"
        found = self._gate(name, found, heads, size, "after_norm")
        if self.rotates:
            found = f"{name} rotated"
        return self._gate(name, found, heads, size, "after_rope")

    def _softmax_attention(self, query: str, key: str, value: str) -> str:
        """The fused kernel's inputs, output and log-sum-exp; with a sink, copies that are a key longer; where keys and
        values have other sizes, copies with the larger."""
        size, sink, context = self.shape.head_size, self.settings.sink, self.piece.context
        channels, rows, prefix = max(size, self.shape.value_size), 1.0, ""
        if size > self.shape.value_size:
            value = f"padded {value}"
        if sink is not None:
            channels = -(-(size + 1) // 8) * 8 if sink.kind == "learned_logit" else size
            rows, prefix = 1 + 1 / context, "extended "
        query_rows = rows if sink is not None and self.settings.causal and not self.has_mask else 1.0
        is_copied = channels != size or query_rows != 1
        self.keep(f"extended {query}" if is_copied else query, self.heads * channels * query_rows)
        self.keep(prefix + key, self.kv_heads * channels * rows)
        self.keep(prefix + value, self.kv_heads * channels * rows)
        name = "attention output" if sink is None or channels == size else "extended attention output"
        self.keep(name, self.heads * channels * query_rows)
        self.keep_wide("log-sum-exp", self.heads * query_rows)
        if sink is not None and sink.kind == "learned_key_value":
            self.keep(query, self.heads * size)
        if self.has_mask:
            self.tensors["mask"] = context * context * rows * self.piece.element_bytes
        return "attention output"

    def _control(self, output: str) -> str:
        """The control between attention and the gate; the name of what comes out."""
        control, elements = self.settings.control, self.heads * self.shape.value_size
        if control is None:
            return output
        if control.operation == "rms_norm":
            self.norm(output, elements, self.heads, centred=True)
        else:
            self.keep(output, elements)
        return "controlled output"

    def _gate(self, position: str, name: str, heads: int | float, size: int, placement: str | None = None) -> str:
        """The gate of this position and placement, if there is one; the name of what comes out."""
        gate = self.gates.get(position)  # type: ignore[call-overload]
        if gate is None or gate.placement != placement:
            return name
        channels = size if gate.granularity == "elementwise" else 1
        all_heads = gate.gated_shape(self.shape)[0]
        self._scores(gate, all_heads if gate.sharing == "head_shared" else heads, channels)
        if gate.operation == "multiply":
            self.keep(name, heads * size)
        if gate.source == "attention_output":
            self._keep_source("attention output", self.shape.num_heads)
        if gate.source == "value":
            self._keep_source("value", self.shape.num_kv_heads)
        return f"{name} gated"

    def _keep_source(self, name: str, heads: int) -> None:
        """What a gate's projection reads: all heads, joined where they don't lie together, or ranks have some each."""
        is_joined = self.piece.tensor > 1 or name in self.views
        self.keep(f"{name} of all heads" if is_joined else name, heads * self.shape.value_size)

    def _scores(self, gate: GateSpec, heads: int | float, channels: int) -> None:
        """What the activation keeps (its input, or its result), and the scores if they are a factor of a product."""
        keep = self.keep_wide if gate.score_dtype == "float32" else self.keep
        name, share = f"{gate.position} gate", 1.0
        if gate.source == "parameter":
            share = 1 / self.piece.num_tokens
        if gate.rank is not None:
            self.keep(f"{name}'s low rank", gate.rank)
        averaged = gate.sharing == "head_shared"
        logits = channels * share * (1 if averaged and gate.averaging == "before_activation" else heads)
        scores = channels * share * (1 if averaged else heads)
        if gate.activation in ("silu", "softplus"):
            keep(f"{name}'s logits", logits)
        elif gate.activation in ("ns_sigmoid", "double_sigmoid"):
            keep(f"{name}'s sigmoid", logits)
        elif gate.activation in ("sigmoid", "tanh"):
            keep(f"{name}'s activation", logits)
        is_result = gate.activation in ("sigmoid", "tanh") and not (averaged and gate.averaging == "after_activation")
        if gate.operation == "multiply" and not is_result:
            keep(f"{name}'s scores", scores)

    def _swiglu(self, name: str, width: int | float) -> None:
        for tensor in ("gate", "up", "silu", "product"):
            self.keep(f"{name} {tensor}", width)

    def _mixture(self, mixture: MixtureSettings) -> None:
        """Router, k rows for each token through the experts, the shared expert."""
        chosen, width = mixture.experts_per_token, self.settings.width
        rows = chosen / self.piece.tensor
        self.keep_wide("router logits", mixture.num_experts)
        self.keep_wide("router scores", mixture.num_experts)
        self.keep_wide("router statistics", 2 + (mixture.router == "sigmoid"))
        if mixture.renormalize:
            self.keep_wide("chosen scores and their sum", chosen + 1)
        self.tensors["expert indices"] = self.piece.num_tokens * 3 * chosen * INDEX_BYTES
        self.keep("expert weights of tokens", chosen)
        self.keep("expert inputs", rows * width)
        self._swiglu("expert", rows * mixture.expert_width)
        self.keep("expert outputs", rows * width)
        if mixture.shared_width is not None:
            self._swiglu("shared expert", mixture.shared_width / self.piece.tensor)
        if mixture.shared_gate:
            self.keep("shared expert's output and score", width + 1)
