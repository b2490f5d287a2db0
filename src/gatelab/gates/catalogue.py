"""The list of named gates as rows, for the command line and docs/gates.md. Nothing imports torch."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gatelab.gates.spec import AttentionShape, OutputControl
from gatelab.gates.variants import VARIANTS
from gatelab.settings import Settings


class VariantRow(Settings):
    """One named way to gate, described; ``to_mapping`` gives the JSON object."""

    name: str
    axes: tuple[dict[str, Any], ...] = Field(description="for each gate the axes that differ from their defaults")
    control: OutputControl | None = Field(description="the gate-free control, if any")
    origin: str = Field(description="the paper's tables and rows, or who else ships it")
    parameters: int = Field(description="what the variant adds to the whole model")
    cancels_under_norm: bool = Field(description="whether q/k norm makes it a no-op")
    initial_scores: tuple[float, ...] = Field(description="for each gate the score at zero logits plus bias")

    def describe_axes(self) -> str:
        """The gates in words: ``axis=value`` pairs, gates joined by "with"; "defaults" where no axis differs."""
        gates = [", ".join(f"{axis}={value}" for axis, value in gate.items()) or "defaults" for gate in self.axes]
        controls = [f"control={self.control.operation}"] if self.control else []
        return " with ".join(gates + controls) or "no gate"

    def describe_initial_scores(self) -> str | None:
        """The initial scores in words; ``None`` without a gate."""
        return ", ".join(f"{score:.5g}" for score in self.initial_scores) or None


def list_variants(shape: AttentionShape, num_layers: int) -> list[VariantRow]:
    """A row for every entry of ``VARIANTS``, in its order, with counts for a model of this shape and depth."""
    return [
        VariantRow(
            name=name,
            axes=tuple(gate.model_dump(mode="json", exclude_defaults=True) for gate in variant.gates),
            control=variant.control,
            origin=variant.origin,
            parameters=num_layers * variant.num_parameters(shape),
            cancels_under_norm=any(gate.cancels_under_norm() for gate in variant.gates),
            initial_scores=tuple(gate.initial_score() for gate in variant.gates),
        )
        for name, variant in VARIANTS.items()
    ]
