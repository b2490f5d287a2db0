"""Arms with equally many parameters: the feed-forward pays for the gates, as in the paper. Nothing imports torch."""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from typing import Literal

from gatelab.gates.variants import Variant
from gatelab.model.settings import ModelSettings

Match = Literal["none", "parameters", "active"]


def with_gate(settings: ModelSettings, variant: Variant, match: Match = "none", multiple: int = 8) -> ModelSettings:
    """The ungated baseline with a variant's gates, its feed-forward narrowed to pay for them.

    F' = F - gate parameters / (3 D L), rounded up to a multiple (128 gives the paper's 5,504 and 6,144). With a mixture
    of experts it is the experts' width, divided further by the E experts (``match="parameters"``) or by the k that a
    token sees (``match="active"``). Raises ``ValueError`` when nothing would be left of the feed-forward.
    """
    gated = settings.model_copy(update={"gates": variant.gates, "control": variant.control})
    if match == "none":
        return ModelSettings.parse(gated.to_mapping())
    per_layer = [
        variant.model_copy(update={"gates": gated.gates_on_layer(layer)}).num_parameters(settings.attention_shape)
        for layer in range(settings.num_layers)
    ]
    mixture = settings.mixture
    experts = 1 if mixture is None else mixture.num_experts if match == "parameters" else mixture.experts_per_token
    width = settings.feedforward_width if mixture is None else mixture.expert_width
    exact = width - Fraction(sum(per_layer), 3 * settings.width * settings.num_layers * experts)
    narrowed = min(width, ceil(exact / multiple) * multiple)
    if narrowed <= 0:
        raise ValueError(
            f"match={match} would leave a feed-forward of width {float(exact):.0f} from {width}: the gates hold more "
            "parameters than it; use match=none or a wider feed-forward"
        )
    changes: dict[str, object] = {"drawn_feedforward_width": width}
    if mixture is None:
        changes["feedforward_width"] = narrowed
    else:
        changes["mixture"] = mixture.model_copy(update={"expert_width": narrowed}).to_mapping()
    return ModelSettings.parse({**gated.to_mapping(), **changes})
