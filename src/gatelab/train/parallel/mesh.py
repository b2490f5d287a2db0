"""The ranks of a run: who they are, what each has, and how they agree."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gatelab.model.settings import ModelSettings
from gatelab.train.settings import ParallelSettings

CPU = torch.device("cpu")
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


@dataclass(frozen=True)
class Ranks:
    """One process's place among those of a run. Without ``mesh`` it is alone.

    ``mesh`` has the dimensions replicate, shard and tensor, and neighbours along the last one have neighbouring
    numbers: tensor ranks belong on one machine. ``expert_mesh`` has replicate, outer and expert: the shard ranks once
    more, where neighbours share experts.
    """

    device: torch.device
    mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None

    @property
    def is_first(self) -> bool:
        """Whether this process writes what the run writes once."""
        return self.number == 0

    @property
    def size(self) -> int:
        """How many processes run."""
        return 1 if self.mesh is None else dist.get_world_size()

    @property
    def number(self) -> int:
        """This process's number among them, from 0."""
        return 0 if self.mesh is None else dist.get_rank()

    @property
    def num_data_ranks(self) -> int:
        """In how many parts a global batch is read."""
        return 1 if self.mesh is None else self.mesh["replicate"].size() * self.mesh["shard"].size()

    @property
    def data_rank(self) -> int:
        """Which part of a global batch this process reads."""
        if self.mesh is None:
            return 0
        return self.mesh["replicate"].get_local_rank() * self.mesh["shard"].size() + self.mesh["shard"].get_local_rank()

    def sum_over_data(self, tensor: Tensor) -> Tensor:
        """The sum over all parts of the global batch, the same on every rank; without a gradient."""
        total = tensor.detach().clone()
        if self.mesh is not None:
            for name in ("replicate", "shard"):
                if self.mesh[name].size() > 1:
                    dist.all_reduce(total, group=self.mesh[name].get_group())
        return total

    def wait(self) -> None:
        """Wait until every rank has come here."""
        if self.mesh is not None:
            dist.barrier()


ALONE = Ranks(CPU)


def find_device(wanted: Literal["auto", "cpu", "cuda"]) -> str:
    """The type of device to train on; ``ValueError`` for CUDA where PyTorch finds none."""
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ValueError(
            "train.device=cuda, but this PyTorch finds no CUDA device; install a CUDA build on a machine that has one "
            "(gatelab doctor says what is there), or set train.device=auto"
        )
    return "cuda" if has_cuda and wanted != "cpu" else "cpu"


@contextmanager
def running_ranks(settings: ParallelSettings, device: str = "cpu") -> Iterator[Ranks]:
    """The ranks that torchrun started, for as long as the context lasts; one process by itself is alone.

    Raises ``ValueError`` when the settings ask for another number of ranks than run, or torchrun could
    not restart them.
    """
    is_started = dist.is_initialized()
    num_ranks = dist.get_world_size() if is_started else int(os.environ.get("WORLD_SIZE", "1"))
    shape = mesh_shape(settings, num_ranks)
    if num_ranks == 1:
        yield Ranks(torch.device(device))
        return
    own_device = torch.device(device)
    if device == "cuda":
        own_device = torch.device(device, int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(own_device)
    if not is_started:
        _require_new_meeting()
        dist.init_process_group(BACKENDS[device])
    try:
        mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard", "tensor"))
        expert_mesh = None
        if settings.expert > 1:
            replicate, shard, _ = shape
            expert_shape = (replicate, shard // settings.expert, settings.expert)
            expert_mesh = init_device_mesh(device, expert_shape, mesh_dim_names=("replicate", "outer", "expert"))
        yield Ranks(own_device, mesh, expert_mesh)
    finally:
        if not is_started:
            dist.destroy_process_group()


def _require_new_meeting() -> None:
    """torchrun's shared store keeps the addresses of ranks that died, where restarted ones look for each other.

    A defect of PyTorch: https://github.com/pytorch/pytorch/issues/135712.
    """
    can_restart = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if can_restart and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise ValueError(
            "torchrun --max-restarts would start ranks again that look for each other under the addresses of dead ones "
            "(pytorch/pytorch#135712); set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun starts, or leave "
            "--max-restarts out"
        )


def is_first_process() -> bool:
    """Whether this is the process of a run that speaks to the user: the only one, or torchrun's first."""
    return os.environ.get("RANK", "0") == "0"


def mesh_shape(settings: ParallelSettings, num_ranks: int) -> tuple[int, int, int]:
    """(replicate, shard, tensor) of a run on that many ranks; ``ValueError`` when they don't fit."""
    replicate, shard, tensor = settings.replicate, settings.shard, settings.tensor
    if shard == "all":
        if num_ranks % (replicate * tensor):
            raise ValueError(
                f"train.parallel.replicate={replicate} x tensor={tensor} does not divide the {num_ranks} ranks that "
                "were started; start a multiple of it with torchrun, or change train.parallel"
            )
        shard = num_ranks // (replicate * tensor)
    needed = replicate * shard * tensor
    if needed != num_ranks:
        raise ValueError(
            f"train.parallel asks for replicate={replicate} x shard={shard} x tensor={tensor} = {needed} ranks, but "
            f"{num_ranks} run; start {needed} with torchrun --nproc-per-node {needed} -m gatelab train, or change "
            "train.parallel"
        )
    if shard % settings.expert:
        raise ValueError(
            f"train.parallel.expert={settings.expert} does not divide shard={shard}, whose ranks share the experts"
        )
    return replicate, shard, tensor


def require_divisible(model: ModelSettings, settings: ParallelSettings) -> None:
    """Raise ``ValueError`` when the heads, widths or experts of a model can't be shared by so many ranks."""
    tensor = settings.tensor
    for layer in range(model.num_layers):
        shape = model.shape_on_layer(layer)
        if shape.num_heads % tensor:
            raise ValueError(
                f"train.parallel.tensor={tensor} does not divide the {shape.num_heads} query heads of layer {layer}; "
                "choose a divisor"
            )
    if model.num_kv_heads % tensor and tensor % model.num_kv_heads:
        raise ValueError(
            f"train.parallel.tensor={tensor} and num_kv_heads={model.num_kv_heads}: neither divides the other, so a "
            "rank's query heads would need parts of key/value heads; choose a divisor or a multiple"
        )
    mixtures = [model.mixture_on_layer(layer) for layer in range(model.num_layers)]
    widths = {"feedforward_width": model.feedforward_width} if None in mixtures else {}
    if model.mixture is not None:
        widths |= {"mixture.num_experts": model.mixture.num_experts}
        if model.mixture.shared_width is not None:
            widths |= {"mixture.shared_width": model.mixture.shared_width}
    for name, width in widths.items():
        if width % tensor:
            raise ValueError(f"train.parallel.tensor={tensor} does not divide model.{name}={width}; choose a divisor")
    if settings.expert > 1:
        if model.mixture is None:
            raise ValueError(
                f"train.parallel.expert={settings.expert} shares experts, and the model has none; set expert=1"
            )
        if model.mixture.num_experts % settings.expert:
            raise ValueError(
                f"train.parallel.expert={settings.expert} does not divide "
                f"model.mixture.num_experts={model.mixture.num_experts}; choose a divisor"
            )
