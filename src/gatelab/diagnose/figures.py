"""What a diagnosis page shows and says: its curves over layers as data, its definitions, the text of its sections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gatelab.diagnose.results import ALL_QUERIES


@dataclass(frozen=True)
class Curve:
    """A line chart over layers.

    ``metrics`` maps what a line shows to the metric that it draws; the label is empty where the model's name says it
    all. ``heading`` and ``format`` are those of the vertical axis.
    """

    title: str
    heading: str
    format: str
    metrics: Mapping[str, str]
    caption: str
    definition: str
    query_range: str = ALL_QUERIES
    log: bool = False


VERDICT_TEXT = (
    "A head has a sink where its mean attention to the first token exceeds 0.3. The model's answer is yes where at "
    "least one head has one and the mean over heads and layers is at least 5 times the uniform floor; in some heads "
    "where only the first holds, weak where only the second does. A layer has massive activations where its largest "
    "|h| exceeds both 100 and 1,000 times its median |h|."
)
SINK_TEXT = (
    "A sink is attention parked on the first token whatever the query. The shorter the text, the higher the floor that "
    "uniform attention alone gives."
)
TARGET_TEXT = (
    "A sink need not be the first token: a model trained without BOS may park attention on the first delimiter, and "
    "some have a learned sink that is no token at all. Attention that reaches the output is what counts in the end: "
    "a small value vector or a shut gate can leave a large attention without effect."
)
HIDDEN_TEXT = (
    "Sinks come with massive activations: a few channels of a few tokens, constant across texts, that rise in an early "
    "layer and fall in the last ones."
)
GATE_TEXT = "A sigmoid gate passes a head's output at a score of 1 and shuts it at 0; a fresh one starts at 0.5."
RANK_TEXT = (
    "Value and output projection of a head are one linear map of low rank. A gate does not change the rank of the "
    "weights; it shows in the rank of what the output projection reads."
)
SPREAD_TEXT = "How widely a head looks, and how sure it is. A strong sink lowers entropy and raises distance at once."
PROBE_TEXT = "What the model does when it is changed: measured by running it again."
CONTEXT_TEXT = "What the figures depend on. Compare models at the same length, on the same text."

BAND = "Line: mean over heads; band: from the least to the most of any head."
FIRST_TOKEN = (
    "Mean over samples and queries of the attention probability on token 0. Uniform attention gives the mean of "
    "1 / (keys that the query sees): the floor. Queries that cannot see token 0 count in neither."
)
LATER_QUERIES = "Without the first queries, which see few keys and so attend to token 0 whatever they do."
HIDDEN_VALUE = (
    "|h|, the absolute value of one channel of one token, over all samples, tokens and channels of a layer's output, "
    "before the final norm."
)
GATE_SCORE = "Mean over samples and tokens, and over the channels of an elementwise gate."

CONTEXT_TEXTS = {
    "tokens_per_sequence": "T = {:,}",
    "num_sequences": "{:,} samples",
    "tokens": "{:,} tokens",
    "text": "text: {}",
    "bos": "BOS: {}",
    "padding": "{:,} tokens of padding left out",
    "dtype": "{}",
    "torch": "torch {}",
    "transformers": "transformers {}",
}
"""The keys of a context that stand under every chart, and how."""
GATE_FLAGS = (
    "Shut: 99.9 % of a head's scores are below 0.05 over at least 10,000 tokens. Sparse: 95 % of them are. Only "
    "activations with bounds are judged."
)

_RANK = "exp of the entropy of the singular values, scaled to sum to 1: between 1 and the number of singular values."
_LAYER_OUTPUT = "Over all samples and tokens of a layer's output h, before the final norm."

TARGET_CURVES = (
    Curve(
        "Attention to a learned sink",
        "attention",
        ".4f",
        {"": "learned_sink_attention"},
        "The sink is a logit of its own beside those of the keys; it takes attention and gives nothing.",
        "Mean over samples and queries of exp(s - LSE), where s is the head's learned logit and LSE includes it.",
    ),
    Curve(
        "Effective sink",
        "share of the head's output",
        ".4f",
        {"": "effective_sink"},
        "The first token's part in what a head writes, after the gate. Far below the attention, the sink is idle.",
        "Length of key 0's part of the head's gated output over the length of all of it, both after the output "
        "projection; the lengths are summed over the queries that see key 0.",
    ),
)
HIDDEN_CURVES = (
    Curve(
        "Channels with large values",
        "share of channels",
        ".2%",
        {"above 100": "share_above_100", "above 1,000 medians": "share_above_1000_medians"},
        "A massive activation is above both limits at once.",
        f"Share of the channels with |h| above the limit at some token. {_LAYER_OUTPUT}",
    ),
    Curve(
        "Norm of the residual stream",
        "mean norm",
        ",.1f",
        {"": "residual_norm"},
        "It grows with depth in a pre-norm decoder.",
        f"Euclidean norm of h over its channels, mean over tokens. {_LAYER_OUTPUT}",
        log=True,
    ),
    Curve(
        "Kurtosis of the hidden values",
        "kurtosis",
        ",.1f",
        {"": "activation_kurtosis"},
        "Heavy tails are what makes activations hard to quantise; a normal distribution has 3.",
        f"Fourth central moment over the squared variance of a token's channels, mean over tokens. {_LAYER_OUTPUT}",
        log=True,
    ),
)
GATE_CURVES = (
    Curve(
        "Attention output before and after the gate",
        "mean magnitude",
        ".4f",
        {"before": "output_magnitude", "after": "gated_output_magnitude"},
        "What the gate leaves of the heads' outputs.",
        "Mean absolute value over tokens and channels, then heads.",
    ),
)
RANK_CURVES = (
    Curve(
        "Effective rank of value and output projection",
        "effective rank",
        ".1f",
        {"": "vo_effective_rank"},
        f"Of each head's product W_V W_O. {BAND}",
        f"Effective rank: {_RANK}",
    ),
    Curve(
        "Stable rank of value and output projection",
        "stable rank",
        ".2f",
        {"": "vo_stable_rank"},
        f"Of each head's product W_V W_O. {BAND}",
        "Squared Frobenius norm over the squared largest singular value.",
    ),
    Curve(
        "Effective rank of what the output projection reads",
        "effective rank",
        ".1f",
        {"before the gate": "output_effective_rank", "after": "gated_output_effective_rank"},
        "Of each head's outputs over all tokens, their mean taken off; mean over heads.",
        f"Effective rank: {_RANK}",
    ),
)
SPREAD_CURVES = (
    Curve(
        "Attention entropy",
        "entropy (nats)",
        ".2f",
        {"": "attention_entropy"},
        f"Low where heads look at few keys. {BAND}",
        "Minus the sum over keys of A log A, mean over samples and queries. Uniform attention has log(visible keys).",
    ),
    Curve(
        "Attended distance",
        "distance (tokens)",
        ",.0f",
        {"": "attention_distance"},
        f"Attention to the first token is far away by definition. {BAND}",
        "Mean of |i - j| over keys j, weighted by the attention A(i, j); mean over samples and queries i.",
    ),
    Curve(
        "Largest attention logit",
        "logit",
        ",.1f",
        {"": "largest_logit"},
        f"Logits that grow without bound make training diverge. {BAND}",
        "The largest scaled product of a query and a visible key, after a softcap if there is one.",
    ),
)

CLAMP_CAPTION = "As long as perplexity stays, the gates could be folded into the weights."
CLAMP_DEFINITION = (
    "exp of the mean cross-entropy with every gate score held at its mean over other text: one mean for a layer, for "
    "each head, for each channel; neutral is no gate at all. The first token of a sample is not scored."
)


def precision_curves(dtypes: str) -> tuple[Curve, Curve]:
    """The errors by layer of one dtype against another; ``dtypes`` is the argument of the metrics' names."""
    against = dtypes.replace("_", " ")
    definition = "||narrow - wide|| / ||wide||, Euclidean, over all values of a layer, at equal weights."
    return (
        Curve(
            "Error of the hidden states",
            "relative error",
            ".2e",
            {"": f"hidden_error[{dtypes}]"},
            f"{against}, without the first token, whose massive activations would outweigh all others.",
            definition,
            query_range="rest",
        ),
        Curve(
            "Error of the gradients",
            "relative error",
            ".2e",
            {"": f"gradient_error[{dtypes}]"},
            f"{against}, of the mean next-token cross-entropy, over a layer's parameters.",
            definition,
        ),
    )
