"""One sample of a task, and JSON lines of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Sample(NamedTuple):
    """The fields of a line of NVIDIA's generators, in their order.

    ``length`` counts the tokens of ``input`` as they do, without BOS, and the tokens that may be generated. For ``vt``
    that is a few tokens off, since the example in front is counted before its names are drawn anew.
    """

    index: int  # pyright: ignore[reportIncompatibleMethodOverride]  # the reference names it so
    input: str
    outputs: list[str]
    length: int


def to_lines(samples: Iterable[Sample]) -> str:
    """JSON lines, byte for byte as NVIDIA's generators write them."""
    return "".join(f"{json.dumps(sample._asdict())}\n" for sample in samples)


def read_samples(path: Path) -> list[Sample]:
    """The samples of a file of JSON lines; ``ValueError`` names the file when it has others."""
    try:
        return [Sample(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    except (TypeError, ValueError):
        raise ValueError(
            f"{path} holds no samples: each line needs exactly the fields {', '.join(Sample._fields)}"
        ) from None


def answer_depth(sample: Sample) -> float:
    """Where in the input the last mention of its first answer begins, from 0 to 1 in characters: a needle's depth."""
    found = sample.input.rfind(sample.outputs[0])
    assert found >= 0, "the input holds its answer"
    return found / len(sample.input)
