"""The record of a run: one JSON object a line, and the count of loss spikes."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from gatelab.files import parse_json, write_atomically

SPIKE_WINDOW, SPIKE_THRESHOLD, SPIKE_FIRST_STEP = 101, 0.1, 2000


class MetricsLog:
    """``metrics.jsonl``: a row for each thing done, with its ``kind`` and ``step``, which counts completed steps.

    Kinds are "step", "evaluation", "measurement", and "event": a step without an update, because its loss or gradient
    was not finite; it has no row "step". Opening a log keeps the rows up to ``completed`` and drops what a run that was
    killed wrote after its last checkpoint, so that every step is recorded exactly once; ``ValueError`` when rows are
    missing. With ``tensorboard`` every figure goes there too; ``ValueError`` when the package is absent.
    """

    def __init__(self, path: Path, completed: int = 0, tensorboard: bool = False):
        self._events = _event_writer(path.parent / "tensorboard", completed) if tensorboard else None
        kept = [row for row in read_metrics(path) if row["step"] <= completed] if completed else []
        if [row["step"] for row in kept if row["kind"] in ("step", "event")] != list(range(1, completed + 1)):
            raise ValueError(f"{path} does not hold steps 1 to {completed}, each once; begin again in another folder")
        write_atomically(path, "".join(_to_line(row) for row in kept))
        self._stream: TextIO = path.open("a", encoding="utf-8")

    def write(self, kind: str, step: int, **figures: Any) -> None:
        """Append one row of finite figures and hand it to the system at once."""
        self._stream.write(_to_line({"kind": kind, "step": step, **figures}))
        self._stream.flush()
        if self._events is not None:
            for name, value in figures.items():
                if isinstance(value, int | float):
                    self._events.add_scalar(f"{kind}/{name}", value, step)

    def flush_to_disk(self) -> None:
        """Wait until all rows are on the disk: a checkpoint stands on them."""
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the files; nothing may be written afterwards."""
        self._stream.close()
        if self._events is not None:
            self._events.close()


class UnwrittenLog:
    """The log of a rank that writes none."""

    def write(self, kind: str, step: int, **figures: Any) -> None: ...
    def flush_to_disk(self) -> None: ...
    def close(self) -> None: ...


Log = MetricsLog | UnwrittenLog


def _to_line(row: dict[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _event_writer(folder: Path, completed: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "train.tensorboard=true needs the package tensorboard: install gatelab[track], or set it to false"
        ) from None
    return SummaryWriter(str(folder), purge_step=completed + 1 if completed else 0)


def read_metrics(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The rows of a metrics file, of one kind or all; a last line without its end is left out."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        try:
            row = parse_json(line)
            if kind is None or row["kind"] == kind:
                rows.append(row)
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} is damaged at line {number}; begin again in another folder") from None
    return rows


def running_median(values: Sequence[float], window: int = SPIKE_WINDOW) -> np.ndarray:
    """Median of the ``window`` values centred on each, of fewer at both ends."""
    array, half = np.asarray(values, dtype=np.float64), window // 2
    return np.array([np.median(array[max(0, i - half) : i + half + 1]) for i in range(len(array))])


def count_spikes(steps: Sequence[int], losses: Sequence[float], threshold: float = SPIKE_THRESHOLD) -> int:
    """Points after step 2,000 that lie more than 0.1 nats over the centred running median of 101 points.

    The rule that counts 124 and 0 on the paper's published curves.
    """
    excess = np.asarray(losses) - running_median(losses)
    return int(((excess > threshold) & (np.asarray(steps) > SPIKE_FIRST_STEP)).sum())


def spikes_per_10k_steps(steps: Sequence[int], losses: Sequence[float]) -> float | None:
    """Spikes for every 10,000 of the points that can be one, so that curves sampled differently compare.

    ``None`` where no point is after step 2,000.
    """
    num_candidates = sum(step > SPIKE_FIRST_STEP for step in steps)
    return 1e4 * count_spikes(steps, losses) / num_candidates if num_candidates else None


class SpikeMonitor:
    """A count while a run is under way, by the trailing rule: the median is that of the 101 losses before each.

    It knows no later loss, so it need not equal :func:`count_spikes`, whose median is centred. ``rows`` are those of
    the steps done before, when the run is resumed.
    """

    def __init__(self, rows: Sequence[dict[str, Any]] = ()):
        self.count: int = rows[-1]["loss_spikes_live"] if rows else 0
        self._recent = deque((row["loss"] for row in rows[-SPIKE_WINDOW:]), maxlen=SPIKE_WINDOW)

    def add(self, step: int, loss: float) -> bool:
        """Note a loss and say whether it is a spike."""
        is_late = step > SPIKE_FIRST_STEP and len(self._recent) > 0
        is_spike = is_late and loss - float(np.median(self._recent)) > SPIKE_THRESHOLD
        self._recent.append(loss)
        self.count += is_spike
        return is_spike
