"""Arms with equally many parameters: the feed-forward pays for the gates, as in the paper. Nothing imports torch."""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from typing import Literal

from gatelab.gates.variants import Variant
from gatelab.model.settings import ModelSettings

Match = Literal["none", "parameters", "active"]


def with_gate(settings: ModelSettings, variant: Variant, match: Match = "none") -> ModelSettings:
    """The ungated baseline with a variant's gates, its feed-forward narrowed to pay for them by :func:`matched`."""
    gated = settings.model_copy(update={"gates": variant.gates, "control": variant.control})
    return matched(ModelSettings.parse(gated.to_mapping()), match)


def matched(settings: ModelSettings, match: Match) -> ModelSettings:
    """The model with its feed-forward narrowed by what its gates and control hold.

    F' = F - gate parameters / (3 D L), rounded up to ``settings.matching_multiple`` (128 gives the paper's 5,504 and
    6,144). With a mixture of experts it is the experts' width, divided further by the E experts for "parameters" or by
    the k that a token sees for "active", and L counts the layers that have them. Sinks and sandwich norms, about a
    channel's worth, are not paid for. Raises ``ValueError`` when nothing would be left of the feed-forward.
    """
    if match == "none":
        return settings
    in_gates = sum(_gate_parameters(settings, layer) for layer in range(settings.num_layers))
    mixture, multiple = settings.mixture, settings.matching_multiple
    experts = 1 if mixture is None else mixture.num_experts if match == "parameters" else mixture.experts_per_token
    width = settings.feedforward_width if mixture is None else mixture.expert_width
    paying = sum(settings.mixture_on_layer(layer) == mixture for layer in range(settings.num_layers))
    exact = width - Fraction(in_gates, 3 * settings.width * paying * experts)
    narrowed = min(width, ceil(exact / multiple) * multiple)
    if narrowed <= 0:
        raise ValueError(
            f"match={match} would leave a feed-forward of width {float(exact):.0f} from {width}: the gates hold more "
            "parameters than it; use match=none or a wider feed-forward"
        )
    changes: dict[str, object] = {"drawn_feedforward_width": max(width, settings.drawn_feedforward_width or 0)}
    if mixture is None:
        changes["feedforward_width"] = narrowed
    else:
        changes["mixture"] = mixture.model_copy(update={"expert_width": narrowed}).to_mapping()
    return ModelSettings.parse({**settings.to_mapping(), **changes})


def _gate_parameters(settings: ModelSettings, layer: int) -> int:
    """What the gates and the control of one layer hold."""
    own = Variant(gates=settings.gates_on_layer(layer), control=settings.control, origin="one layer")
    return own.num_parameters(settings.shape_on_layer(layer))
