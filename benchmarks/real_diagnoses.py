"""Diagnoses of real models, kept in docs/results: SmolLM2-135M, Gemma-3-270M and the three arms of the demo.

    make demo && python benchmarks/real_diagnoses.py [--demo runs/demo] [--cache ~/.cache/gatelab] [--out docs/results]

The real models read 4 samples of 320 tokens of SQuAD paragraphs, the demo's arms 4 samples of their held-out text. Each
folder has the page, its numbers, and the charts that the how-to page shows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from kept import keep
from real_models import GEMMA3, SMOLLM2, squad_text

from gatelab.data.settings import CorpusSettings
from gatelab.evaluate.diagnosis import Examination, diagnose, write_diagnosis
from gatelab.evaluate.texts import file_text

KEPT_FIGURES = ("every-head", "by-layer.", "largest-and-median", "gate")


def keep_diagnosis(names: Sequence[str], examination: Examination, target: Path) -> None:
    """Diagnose, and put what is kept in place of the folder ``target``."""
    diagnoses = diagnose(names, examination)
    keep(lambda folder: write_diagnosis(folder, diagnoses, "python benchmarks/real_diagnoses.py"), target, _left_out)


def _left_out(folder: str, names: list[str]) -> set[str]:
    if Path(folder).name != "figures":
        return set()
    return {name for name in names if not (name.endswith(".png") and any(part in name for part in KEPT_FIGURES))}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--demo", type=Path, default=Path("runs/demo"))
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/gatelab"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    cache = options.cache.expanduser()
    squad = Examination(file_text(squad_text(cache)), cache, length=320, full=True)
    keep_diagnosis([str(model.file(cache)) for model in (SMOLLM2, GEMMA3)], squad, options.out / "real-models")
    heldout = Examination(CorpusSettings(), cache, full=True, clamp=True)
    for arm in ("headwise", "elementwise"):
        keep_diagnosis([str(options.demo / "ungated"), str(options.demo / arm)], heldout, options.out / f"demo-{arm}")


if __name__ == "__main__":
    main()
