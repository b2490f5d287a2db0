"""A checkpoint that ranks write together: each rank its own parts of the tensors, in one safetensors file.

The format is that of PyTorch's distributed checkpoint for safetensors, without its pickled ``.metadata``: a file's
header says where in the whole tensor each part lies. All ranks must see one file system.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter, async_save, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from gatelab.files import sha256


def save_parts(folder: Path, state: dict[str, Tensor], complete: Callable[[dict[str, str]], None]) -> None:
    """Write what every rank has of a state, then let the first ``complete`` it, given checksums by file name.

    All ranks call this together and leave it when the checkpoint is complete. Raises what failed first on any of them;
    nothing is left under ``folder`` then.
    """
    try:
        save(state, storage_writer=_PartsWriter(folder, complete))
    except CheckpointException as error:
        raise _cleaned_up(folder, error) from error


def start_saving_parts(
    folder: Path, state: dict[str, Tensor], complete: Callable[[dict[str, str]], None], group: dist.ProcessGroup
) -> Future[None]:
    """The same, from a copy of the state and while the caller goes on; ``group`` is used for nothing else meanwhile."""
    saving = async_save(state, storage_writer=_PartsWriter(folder, complete), process_group=group)
    assert isinstance(saving, Future)
    done: Future[None] = Future()

    def finish(saved: Future[object]) -> None:
        error = saved.exception()
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(_cleaned_up(folder, error))

    saving.add_done_callback(finish)
    return done


@dataclass(frozen=True)
class _CheckedResult(WriteResult):
    """What was written of one tensor, and the SHA-256 of the file that it is in."""

    checksum: str


class _PartsWriter(HuggingFaceStorageWriter):
    """One save: every rank checks its file as it is written, and the first hears of all files when all are there."""

    def __init__(self, folder: Path, complete: Callable[[dict[str, str]], None]):
        super().__init__(str(folder), save_distributed=True)
        self._folder, self._complete = folder, complete

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        results = super().write_data(plan, planner).wait()
        checksums = {name: sha256(self._folder / name) for name in {_file_of(one) for one in results}}
        checked: TorchFuture[list[WriteResult]] = TorchFuture()
        checked.set_result([_CheckedResult(**vars(one), checksum=checksums[_file_of(one)]) for one in results])
        return checked

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        checked = [one for of_rank in results for one in of_rank if isinstance(one, _CheckedResult)]
        self._complete({_file_of(one): one.checksum for one in checked})


def _file_of(result: WriteResult) -> str:
    return str(result.storage_data.relative_path)


def _cleaned_up(folder: Path, error: BaseException) -> BaseException:
    """What failed on the first rank that says so, once nothing is left of the checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)
    if isinstance(error, CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error
