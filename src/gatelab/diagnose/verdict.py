"""What a measurement says in plain words: the one place where a figure becomes a yes or a no."""

from __future__ import annotations

from typing import Literal, NamedTuple

from gatelab.diagnose.results import NamedResult

SINK_ATTENTION = 0.3
SINK_FLOORS = 5.0
MASSIVE_VALUE = 100.0
MASSIVE_MEDIANS = 1000.0

Answer = Literal["yes", "in some heads", "weak", "no"]


class SinkVerdict(NamedTuple):
    """Attention parked on the first token; ``mean`` and ``floor`` are over heads, then layers, of all queries."""

    answer: Answer
    share_of_heads: float
    mean: float
    floor: float
    worst_layer: int
    worst_layer_mean: float


class MassiveVerdict(NamedTuple):
    """The layer outputs with massive activations, and the largest |h| of all with its place."""

    layers: list[int]
    num_layers: int
    largest: float
    median: float | None
    layer: int
    token: int | None
    channel: int | None
    mean_of_maxima: float


class GateVerdict(NamedTuple):
    """How open the gates of one position are; ``shut`` is ``None`` where too few tokens were seen to say."""

    position: str
    mean: float
    num_gates: int
    shut: int | None
    sparse: int | None


class Verdict(NamedTuple):
    """The plain reading of one model's rows, ``None`` or empty where nothing was measured. The whole rule:

    **Sink.** A head has one where its attention to the first token, the mean over samples and queries, exceeds 0.3
    (Gu et al. 2410.10781). The model's answer is "yes" where at least one head has one *and* the mean over heads and
    layers is at least 5 times its uniform floor; "in some heads" where only the first holds, "weak" where only the
    second holds, else "no". Below about 80 tokens the second is the harder one, because the floor is high there.

    **Massive activations.** A layer's output has one where its largest \\|h\\| exceeds 100 and exceeds 1,000 times the
    median \\|h\\| of that output (Sun et al. 2402.17762). One layer is enough for a "yes".

    **Gates.** Shut and sparse gates are counted from the flags ``gate_shut`` and ``gate_sparse`` of the heads (of the
    layers, where all heads share a gate): a gate is shut where 99.9 % of its scores are below 0.05 over at least 10,000
    tokens, sparse where 95 % of them are; only activations with bounds are judged.
    """

    sink: SinkVerdict | None
    massive: MassiveVerdict | None
    gates: list[GateVerdict]

    def sentences(self) -> list[str]:
        """One sentence for each part, for a terminal and the top of a page."""
        return [_sink_sentence(self.sink), _massive_sentence(self.massive), *_gate_sentences(self.gates)]


def verdict_of(result: NamedResult) -> Verdict:
    """Apply the rule of :class:`Verdict` to a model's rows."""
    return Verdict(_sink_verdict(result), _massive_verdict(result), _gate_verdicts(result))


def _sink_verdict(result: NamedResult) -> SinkVerdict | None:
    heads = result.by_head("first_token_attention")
    layers = result.by_layer("first_token_attention")
    mean, floor = result.mean("first_token_attention"), result.mean("first_token_attention", column="floor")
    if not heads or mean is None or floor is None:
        return None
    share = sum(value > SINK_ATTENTION for value in heads.values()) / len(heads)
    answers: dict[tuple[bool, bool], Answer] = {
        (True, True): "yes",
        (True, False): "in some heads",
        (False, True): "weak",
        (False, False): "no",
    }
    worst = max(layers, key=lambda layer: layers[layer])
    answer = answers[share > 0, mean >= SINK_FLOORS * floor]
    return SinkVerdict(answer, share, mean, floor, worst, layers[worst])


def _massive_verdict(result: NamedResult) -> MassiveVerdict | None:
    maxima, medians = result.by_layer("largest_activation"), result.by_layer("median_activation")
    if not maxima:
        return None
    massive = [
        layer
        for layer, value in maxima.items()
        if value > MASSIVE_VALUE and layer in medians and value > MASSIVE_MEDIANS * medians[layer]
    ]
    top = max(maxima, key=lambda layer: maxima[layer])
    token = result.by_layer("largest_activation_token").get(top)
    channel = next(row["channel"] for row in result.select("largest_activation") if row["layer"] == top)
    return MassiveVerdict(
        layers=massive,
        num_layers=len(maxima),
        largest=maxima[top],
        median=medians.get(top),
        layer=top,
        token=None if token is None else int(token),
        channel=channel,
        mean_of_maxima=sum(maxima.values()) / len(maxima),
    )


def _gate_verdicts(result: NamedResult) -> list[GateVerdict]:
    verdicts = []
    for position in result.arguments("gate_mean"):
        mean = result.mean(f"gate_mean[{position}]")
        if mean is None:
            continue
        shut, sparse = (_by_gate(result, f"gate_{flag}[{position}]") for flag in ("shut", "sparse"))
        verdicts.append(
            GateVerdict(
                position=position,
                mean=mean,
                num_gates=len(shut) or len(_by_gate(result, f"gate_mean[{position}]")),
                shut=sum(map(bool, shut)) if shut else None,
                sparse=sum(map(bool, sparse)) if sparse else None,
            )
        )
    return verdicts


def _by_gate(result: NamedResult, metric: str) -> list[float]:
    """A value of each head's gate, or of each layer's where all heads share one."""
    return list(result.by_head(metric).values()) or list(result.by_layer(metric).values())


def _sink_sentence(sink: SinkVerdict | None) -> str:
    if sink is None:
        return "Sink: not measured."
    percent = 100 * sink.share_of_heads
    share = "under 1" if 0 < percent < 1 else f"{percent:.0f}"
    heads = f"{share} % of heads above {SINK_ATTENTION}"
    return f"Sink: {sink.answer}, {heads}; mean {sink.mean:.3f}, uniform floor {sink.floor:.2g}."


def _massive_sentence(massive: MassiveVerdict | None) -> str:
    if massive is None:
        return "Massive activations: not measured."
    answer = f"yes, in {len(massive.layers)} of {massive.num_layers} layers" if massive.layers else "no"
    place = f"layer {massive.layer}"
    if massive.token is not None:
        place += f", token {massive.token}"
    if massive.channel is not None:
        place += f", channel {massive.channel}"
    times = f", {massive.largest / massive.median:,.0f} times the layer's median" if massive.median else ""
    return f"Massive activations: {answer}; largest |h| {massive.largest:,.1f} ({place}){times}."


def _gate_sentences(gates: list[GateVerdict]) -> list[str]:
    if not gates:
        return ["Gates: none."]
    sentences = []
    for gate in gates:
        if gate.shut is None:
            flags = "none judged shut or not, for lack of tokens or bounds"
        else:
            flags = f"{gate.shut:,} of {gate.num_gates:,} shut, {gate.sparse or 0:,} sparse"
        sentences.append(f"Gates at {gate.position}: mean score {gate.mean:.3f}; {flags}.")
    return sentences
