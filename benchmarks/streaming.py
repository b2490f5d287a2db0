"""Streaming curves, kept in docs/results: SmolLM2-135M, Gemma-3-270M, and the three arms of the demo.

    make demo && python benchmarks/streaming.py [--demo runs/demo] [--cache ~/.cache/gatelab] [--out docs/results]

All read with a window of 256 tokens, and 0, 1 and 4 kept ones: the real models 20,000 tokens of the held-out Wikipedia
introductions, the demo's arms 4 x 20,000. ``--tokens`` shortens that for a trial.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from kept import PNG_ONLY, keep
from real_models import GEMMA3, SMOLLM2

from gatelab.data.settings import CorpusSettings
from gatelab.longcontext.streaming.report import write_streaming
from gatelab.longcontext.streaming.stream import StreamingTest, stream_models

KEPT = (0, 1, 4)


def keep_curves(names: Sequence[str], test: StreamingTest, target: Path) -> None:
    """Stream, and put the report in place of the folder ``target``."""
    models = stream_models(names, test, print)
    command = f"python benchmarks/streaming.py --tokens {test.tokens}"
    keep(lambda folder: write_streaming(folder, models, command), target, PNG_ONLY)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--demo", type=Path, default=Path("runs/demo"))
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/gatelab"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--tokens", type=int, default=20_000)
    options = parser.parse_args()
    cache, text = options.cache.expanduser(), CorpusSettings()
    arms = StreamingTest(text, cache, kept=KEPT, tokens=options.tokens, samples=4)
    for arm in ("headwise", "elementwise"):
        pair = [str(options.demo / "ungated"), str(options.demo / arm)]
        keep_curves(pair, arms, options.out / f"streaming-demo-{arm}")
    real = StreamingTest(text, cache, kept=KEPT, tokens=options.tokens)
    keep_curves([str(model.file(cache)) for model in (SMOLLM2, GEMMA3)], real, options.out / "streaming-real-models")


if __name__ == "__main__":
    main()
