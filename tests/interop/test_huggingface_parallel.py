"""The tensor-parallel plan on two ranks: logits and gradients of the whole model, gates included."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from tiny_hugging_face import MODELS, WHOLE, tiny_pair, token_ids

from gatelab.interop.huggingface import GateLabForCausalLM


def compare_on_rank(rank: int, port: int, folder: Path) -> None:
    """Run by each rank: every saved model, split over two ranks, against the whole one."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        for name in [name for name in MODELS if name not in WHOLE]:
            compare_one(folder / name)
        for name in sorted(WHOLE):
            with pytest.raises(ValueError, match="has no `tp_plan`"):
                load_split(folder / name)
    finally:
        dist.destroy_process_group()


def load_split(folder: Path) -> Any:
    from transformers.distributed import DistributedConfig

    return GateLabForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))


def compare_one(folder: Path) -> None:
    split, whole = load_split(folder), GateLabForCausalLM.from_pretrained(folder)
    assert split.model.layers[0].self_attn.q_proj.weight.to_local().shape[0] == 24
    with torch.no_grad():
        torch.testing.assert_close(split(token_ids()).logits, whole(token_ids()).logits, atol=1e-11, rtol=0)
    for model in (split, whole):
        model.train()
        model(token_ids(), labels=token_ids()).loss.backward()
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for name, parameter in split.named_parameters():
        gradient = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        assert (gradient - expected[name]).abs().max() < 1e-11, f"{folder.name}: {name}"


@pytest.mark.slow
def test_two_ranks_compute_what_one_does(tmp_path: Path) -> None:
    for name in MODELS:
        tiny_pair(name, torch.float64)[1].save_pretrained(tmp_path / name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(compare_on_rank, (port, tmp_path), nprocs=2)
