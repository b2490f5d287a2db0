"""What rounding costs a real model that has a sink, kept in docs/results: SmolLM2-135M.

    python benchmarks/real_quantisation.py [--cache ~/.cache/gatelab] [--out docs/results]

It reads 16 windows of 512 tokens of the held-out Wikipedia introductions, and half as many more give the static ranges.
``--samples`` and ``--schemes`` shorten that for a trial.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kept import PNG_ONLY, keep
from real_models import SMOLLM2
from side_by_side import command_line

from gatelab.data.settings import CorpusSettings
from gatelab.evaluate.quantisation.report import write_quantisation
from gatelab.evaluate.quantisation.schemes import SCHEMES, parse_schemes
from gatelab.evaluate.quantisation.trial import QuantisationTrial, quantise_models


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/gatelab"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    options = parser.parse_args()
    cache, samples = options.cache.expanduser(), options.samples
    schemes = parse_schemes(options.schemes)
    trial = QuantisationTrial(CorpusSettings(), cache, schemes, samples=samples, calibration=max(1, samples // 2))
    models = quantise_models([str(SMOLLM2.file(cache))], trial, print)
    command = command_line("real_quantisation.py", parser, options)
    keep(lambda folder: write_quantisation(folder, models, command), options.out / "quantisation-smollm2", PNG_ONLY)


if __name__ == "__main__":
    main()
