"""Every named rival of a gate: the simpler fix that a reader asks for, one line each. Nothing here imports torch.

A gate that reads the value state is a rival too, and a gate: ``sdpa_from_value`` of :mod:`gatelab.gates.variants`.
"""

from __future__ import annotations

from gatelab.model.settings import ModelSettings, SinkSettings
from gatelab.settings import Settings, nearest


class Rival(Settings):
    """What a decoder has in the place of a gate: a sink or norms, and its origin."""

    sink: SinkSettings | None = None
    sandwich_norm: bool = False
    origin: str


# fmt: off
RIVALS: dict[str, Rival] = {
    "none": Rival(origin="the decoder as it is"),
    "learned_logit": Rival(sink=SinkSettings(kind="learned_logit"), origin="gpt-oss, arXiv 2508.10925"),
    "off_by_one": Rival(sink=SinkSettings(kind="off_by_one"), origin="softmax over one zero more, Miller 2023"),
    "learned_key_value": Rival(sink=SinkSettings(kind="learned_key_value"), origin="arXiv 2402.17762, section 4.3"),
    "sandwich_norm": Rival(sandwich_norm=True, origin="T2: sandwich norm, no gate"),
}
# fmt: on


def find_rival(name: str) -> Rival:
    """The rival with this name; a ``ValueError`` with the nearest name and the list for any other."""
    if name not in RIVALS:
        raise ValueError(f"rival {name!r} is unknown; {nearest(name, RIVALS)}")
    return RIVALS[name]


def with_rival(settings: ModelSettings, rival: Rival) -> ModelSettings:
    """The decoder with a rival; what it has of its own already stays."""
    changes = {"sink": rival.sink or settings.sink, "sandwich_norm": rival.sandwich_norm or settings.sandwich_norm}
    return settings.model_copy(update=changes)
