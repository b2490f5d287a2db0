"""How long RULER's samples take to make: all 13 tasks, first with an empty cache and then from it.

    python benchmarks/ruler_samples.py [--lengths 256 512 1024 2048 4096] [--samples 500] [--tokenizer DIR] [--out FILE]

Tokens are those of the samples made, without those to generate, over the seconds of their task. A task that does not
fit into a length is listed with that sentence; finding the least length that would do is part of its seconds.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

from gatelab.evaluate.model_tokenizer import ModelTokenizer
from gatelab.evaluate.ruler.sample_sets import sample_set
from gatelab.evaluate.ruler.tasks import RULER_TASKS, Task
from gatelab.evaluate.ruler.texts import Texts
from gatelab.evaluate.ruler.tokens import open_tokenizer
from gatelab.files import write_atomically

DOWNLOADS = Path("~/.cache/gatelab/downloads").expanduser()
GPT2 = Path(__file__).parents[1] / "tests" / "golden" / "ruler" / "tokenizer_gpt2"


def measure(task: Task, tokenizer: ModelTokenizer, length: int, count: int, texts: Texts) -> dict[str, Any]:
    """Seconds and tokens of one task at one length."""
    start = time.perf_counter()
    row: dict[str, Any] = {"task": task.name, "length": length}
    try:
        samples = sample_set(task, tokenizer, length, 42, count, texts).samples
    except ValueError as error:
        return row | {"seconds": time.perf_counter() - start, "tokens": 0, "refused": str(error)}
    seconds = time.perf_counter() - start
    tokens = sum(sample.length - task.generated for sample in samples)
    return row | {"seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--tokenizer", default=str(GPT2))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ruler_samples.json"))
    arguments = parser.parse_args()
    tokenizer = open_tokenizer(arguments.tokenizer)
    result: dict[str, Any] = {"samples": arguments.samples, "machine": platform.processor() or platform.machine()}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "downloads").symlink_to(DOWNLOADS)
        for state in ("cold", "cached"):
            texts = Texts(Path(folder))
            rows = [
                measure(task, tokenizer, length, arguments.samples, texts)
                for length in arguments.lengths
                for task in RULER_TASKS.values()
                if state == "cold" or not any(_is_refused(row, task, length) for row in result["cold"]["rows"])
            ]
            result[state] = {"seconds": sum(row["seconds"] for row in rows), "rows": rows}
            print(f"{state}: {result[state]['seconds']:.1f} s, {sum(row['tokens'] for row in rows):,} tokens")
    write_atomically(arguments.out, json.dumps(result, indent=1) + "\n")


def _is_refused(row: dict[str, Any], task: Task, length: int) -> bool:
    return row["task"] == task.name and row["length"] == length and "refused" in row


if __name__ == "__main__":
    main()
