"""Every shard of a planned run, built without memory and without other processes.

Weights are on the meta device and collectives are PyTorch's fake ones, which do nothing: what is proven is that the
model can be split as planned, and how many numbers each rank then stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from gatelab.model.decoder import Decoder
from gatelab.train.parallel.mesh import running_ranks
from gatelab.train.parallel.placement import place
from gatelab.train.settings import RunSettings


class RankShard(NamedTuple):
    """How many numbers of the weights one rank stores."""

    rank: int
    parameters: int


def build_shards(run: RunSettings, num_ranks: int, ranks: Iterable[int] | None = None) -> list[RankShard]:
    """Build the shard of each rank in turn, of all when ``ranks`` is ``None``.

    It takes as long as building the model that many times. Raises ``ValueError`` when the run can't be spread over so
    many ranks, or a process group exists already.
    """
    if dist.is_initialized():
        raise ValueError("a dry run needs a process that trains nothing; start it without torchrun")
    return [RankShard(rank, _stored_numbers(run, num_ranks, rank)) for rank in ranks or range(num_ranks)]


def _stored_numbers(run: RunSettings, num_ranks: int, rank: int) -> int:
    with fake_process_group(num_ranks, rank), running_ranks(run.train.parallel) as ranks:
        with torch.device("meta"):
            decoder = Decoder(run.model)
        place(decoder, run.train, ranks, compiled=False)
        return sum(_local_numel(parameter) for parameter in decoder.parameters())


def _local_numel(parameter: torch.Tensor) -> int:
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()


@contextmanager
def fake_process_group(num_ranks: int, rank: int) -> Iterator[None]:
    """This process as one rank of many, whose collectives give tensors of the right size and nothing else."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
