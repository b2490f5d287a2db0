"""Which families of transformers can be measured, and how exactly: tiny random models against their eager attention.

    python benchmarks/families.py [--out benchmarks/families.json]

Prints the families and writes the same as JSON, with the versions it was made with. Errors are the largest over all
real tokens, with and without left padding: of the logits, and of each head's attention to the first real token.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from gatelab.diagnose.recorder import Recorder
from gatelab.files import write_atomically
from gatelab.interop.probe import attach_hugging_face

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "interop"))
from family_comparison import compare
from tiny_families import FAMILIES, REFUSED, build


def measured(family: str) -> dict[str, Any]:
    """One row: the layers with softmax attention, those left out, and the larger error of the two paddings."""
    both = [compare(family, left_padded) for left_padded in (False, True)]
    return {
        "family": family,
        "layers": both[0].num_layers,
        "layers_seen": both[0].seen,
        "layers_left_out": both[0].skipped,
        "gate": both[0].gate,
        "logit_error": max(one.logit_error for one in both),
        "mass_error": max(one.mass_error for one in both),
    }


def refused(family: str) -> dict[str, str]:
    """One row: why the family cannot be measured."""
    try:
        with attach_hugging_face(build(family), Recorder()):
            raise AssertionError(f"{family} was not refused")
    except ValueError as error:
        return {"family": family, "reason": str(error)}


def table(rows: list[dict[str, Any]]) -> Table:
    """The measured families for a terminal."""
    shown = Table("family", "layers seen", "left out", "gate", "logit error", "mass error")
    for row in rows:
        left_out = ", ".join(sorted(set(row["layers_left_out"].values())))
        errors = [f"{row[name]:.1e}" for name in ("logit_error", "mass_error")]
        shown.add_row(row["family"], f"{len(row['layers_seen'])}/{row['layers']}", left_out, row["gate"], *errors)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    out = parser.parse_args().out
    transformers.logging.set_verbosity_error()
    rows, reasons = [measured(family) for family in FAMILIES], [refused(family) for family in REFUSED]
    console = Console()
    console.print(table(rows))
    for row in reasons:
        console.print(f"refused: {row['reason']}", highlight=False)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    write_atomically(out, json.dumps({"versions": versions, "measured": rows, "refused": reasons}, indent=2) + "\n")


if __name__ == "__main__":
    main()
