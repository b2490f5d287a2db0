"""Studies of two tiny arms on a synthetic task or on a few made-up documents."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from gatelab.study.study import Study

SYNTHETIC = (
    "model.width=16",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.head_size=8",
    "model.feedforward_width=24",
    "data.context=16",
    "train.sequences_per_step=4",
    "train.steps=3",
    "train.schedule.warmup_steps=1",
)
TEXT = (
    "data.synthetic=null",
    "data.tokenizer.vocab_size=300",
    "data.context=32",
    "model.vocab_size=300",
    "train.sequences_per_step=3",
)


def synthetic_study(*words: str, **changes: Any) -> Study:
    """Ungated against one elementwise gate, three steps each; ``words`` go with both."""
    values = {
        "name": "tiny",
        "question": "?",
        "recipe": "backcopy",
        "assignments": [*SYNTHETIC, *words],
        "arms": [{"name": "ungated"}, {"name": "gated", "assignments": ["gate=sdpa_elementwise"]}],
        "baseline": "ungated",
    }
    return Study.parse(values | changes)


def text_study(folder: Path, *words: str, **changes: Any) -> Study:
    """The same on made-up documents, which are written to the folder, a fifth of them held out."""
    file = folder / "documents.jsonl"
    lines = [{"text": f"Document {n} says {n * n} and {n % 7}, then rests. " * (1 + n % 5)} for n in range(300)]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    corpus = f"data.train={{name: files, path: {file}, heldout_fraction: 0.2}}"
    return synthetic_study(*TEXT, corpus, *words, **changes)


def pid_working_in(folder: Path, seconds: float = 60.0) -> int:
    """The process that has the metrics of a job's folder open, waited for."""
    until, file = time.monotonic() + seconds, (folder / "metrics.jsonl").resolve()
    while time.monotonic() < until:
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it, or its file, is gone by now
                if any(link.readlink() == file for link in (process / "fd").iterdir()):
                    return int(process.name)
        time.sleep(0.02)
    raise AssertionError(f"nobody works in {folder}")
