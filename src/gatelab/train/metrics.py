"""The record of a run: one JSON object a line, and the count of loss spikes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from gatelab.files import write_atomically

SPIKE_WINDOW, SPIKE_THRESHOLD, SPIKE_FIRST_STEP = 101, 0.1, 2000


class MetricsLog:
    """``metrics.jsonl``: a row for each event, with its ``kind`` ("step", "evaluation", "measurement") and ``step``.

    ``step`` counts completed steps. Opening a log keeps the rows up to ``completed`` and drops what a run that was
    killed wrote after its last checkpoint, so that every step is recorded exactly once. With ``tensorboard`` every
    figure goes there too; ``ValueError`` when the package is absent.
    """

    def __init__(self, path: Path, completed: int = 0, tensorboard: bool = False):
        kept = [row for row in read_metrics(path) if row["step"] <= completed] if completed else []
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._stream: TextIO = path.open("a", encoding="utf-8")
        self._events = _event_writer(path.parent / "tensorboard", completed) if tensorboard else None

    def write(self, kind: str, step: int, **figures: Any) -> None:
        """Append one row and hand it to the system at once."""
        self._stream.write(json.dumps({"kind": kind, "step": step, **figures}) + "\n")
        self._stream.flush()
        if self._events is not None:
            for name, value in figures.items():
                if isinstance(value, int | float):
                    self._events.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Close the files; nothing may be written afterwards."""
        self._stream.close()
        if self._events is not None:
            self._events.close()


def _event_writer(folder: Path, completed: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "train.tensorboard=true needs the package tensorboard: install gatelab[track], or set it to false"
        ) from None
    return SummaryWriter(str(folder), purge_step=completed + 1)


def read_metrics(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The rows of a metrics file, of one kind or all; a last line without its end is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if kind is None or row["kind"] == kind]


def running_median(values: Sequence[float], window: int = SPIKE_WINDOW) -> np.ndarray:
    """Median of the ``window`` values centred on each, of fewer at both ends."""
    array, half = np.asarray(values, dtype=np.float64), window // 2
    padded = np.pad(array, half, constant_values=np.nan)
    return np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1)


def count_spikes(
    steps: Sequence[int],
    losses: Sequence[float],
    threshold: float = SPIKE_THRESHOLD,
    first_step: int = SPIKE_FIRST_STEP,
) -> int:
    """Points after ``first_step`` that lie more than ``threshold`` nats over the centred running median of 101 points.

    The rule that counts 124 and 0 on the paper's published curves. Curves that are sampled differently compare by
    :func:`spikes_per_10k_steps`.
    """
    excess = np.asarray(losses) - running_median(losses)
    return int(((excess > threshold) & (np.asarray(steps) > first_step)).sum())


def spikes_per_10k_steps(num_spikes: int, num_points: int) -> float:
    """Spikes for every 10,000 recorded points."""
    return 1e4 * num_spikes / num_points


class SpikeMonitor:
    """The same count while a run is under way, against the trailing median of the last 101 losses."""

    def __init__(self, threshold: float = SPIKE_THRESHOLD, first_step: int = SPIKE_FIRST_STEP):
        self.threshold, self.first_step = threshold, first_step
        self.count = 0
        self._recent: list[float] = []

    def add(self, step: int, loss: float) -> bool:
        """Note a loss and say whether it is a spike."""
        is_spike = (
            bool(self._recent) and step > self.first_step and loss - float(np.median(self._recent)) > self.threshold
        )
        self._recent = [*self._recent[-(SPIKE_WINDOW - 1) :], loss]
        self.count += is_spike
        return is_spike
