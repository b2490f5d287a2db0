"""Who writes a run's checkpoints: one at a time and, if asked, while training goes on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gatelab.files import publish, temporary_beside
from gatelab.model.decoder import Decoder
from gatelab.model.settings import ModelSettings
from gatelab.train.checkpoint import (
    complete,
    path_of_step,
    remove_old,
    require_room,
    save_state,
    step_of,
    training_state,
)
from gatelab.train.parallel.mesh import Ranks
from gatelab.train.parallel.shard_files import save_parts, start_saving_parts
from gatelab.train.settings import CheckpointSettings


class CheckpointSaver:
    """Saves the state of a run after some steps, as one process or as the ranks have it between them.

    Every rank has one and they call it together. With ``settings.asynchronous`` a save returns once the state is
    copied to the processor's memory; the next save, :meth:`wait` and :meth:`close` wait until it is written, and raise
    what failed.
    """

    def __init__(self, folder: Path, settings: CheckpointSettings, ranks: Ranks):
        self._folder, self._settings, self._ranks = folder, settings, ranks
        self._pending: Future[Any] | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._group: dist.ProcessGroup | None = None
        if settings.asynchronous and ranks.mesh is not None:
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)
            self._group = group

    def save(self, step: int, decoder: Decoder, optimizer: torch.optim.Optimizer) -> None:
        """Save a checkpoint; raises ``OSError``, with nothing half-written, when the disk is full."""
        self.wait()
        state, model, keep = training_state(decoder, optimizer), decoder.settings, self._settings.keep
        if self._ranks.mesh is None:
            if not self._settings.asynchronous:
                save_state(self._folder, step, model, state, keep)
                return
            copies = {name: value.to("cpu", copy=True) for name, value in state.items()}
            self._pending = self._thread.submit(save_state, self._folder, step, model, copies, keep)
            return
        require_room(self._folder, state)
        target = path_of_step(self._folder, step)
        temporary = temporary_beside(target, of_all=True)
        complete = partial(self._complete, temporary, target, model)
        if self._group is None:
            save_parts(temporary, state, complete)
        else:
            self._pending = start_saving_parts(temporary, state, complete, self._group)

    def wait(self) -> None:
        """Wait until the last save is on the disk."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the last save and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _complete(self, temporary: Path, target: Path, model: ModelSettings, checksums: dict[str, str]) -> None:
        complete(temporary, step_of(target), model, checksums)
        publish(temporary, target)
        remove_old(self._folder, self._settings.keep)
