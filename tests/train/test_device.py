"""Training away from the processor: every tensor of a step is where the model is.

Tensors on the meta device stand in for those of an accelerator: operations refuse to mix them with the processor's.
"""

from __future__ import annotations

import pytest
import torch
from tiny_runs import tiny_model, tiny_run

from gatelab.data.loader import Batch
from gatelab.model.decoder import Decoder
from gatelab.model.moe import RouterStatistics
from gatelab.model.perplexity import token_nats
from gatelab.model.settings import MixtureSettings
from gatelab.train.parallel.mesh import find_device
from gatelab.train.run_folder import describe_environment
from gatelab.train.settings import TrainSettings
from gatelab.train.step import router_loss

MIXTURE = MixtureSettings(num_experts=4, experts_per_token=2, expert_width=16)


@pytest.mark.parametrize("gate", ["none", "sdpa_elementwise", "sdpa_and_value", "sdpa_ns_sigmoid", "sdpa_from_value"])
@pytest.mark.parametrize("mixture", [None, MIXTURE], ids=["dense", "mixture"])
def test_forward_and_backward_mix_no_devices(gate: str, mixture: object) -> None:
    decoder = Decoder(tiny_model(gate, mixture=mixture, width=32)).to("meta")
    decoder.activation_dtype = torch.bfloat16
    ids = torch.zeros(2, 9, dtype=torch.int64)
    batch = Batch(ids, ids, documents=ids).to("meta")
    hidden = decoder.hidden(batch.inputs, batch.documents)
    loss = token_nats(decoder.logits(hidden.state), batch.targets).sum()
    if mixture is not None:
        assert isinstance(hidden.router, RouterStatistics)
        loss = loss + router_loss(hidden.router, hidden.router, TrainSettings())
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.is_meta for parameter in decoder.parameters())


def test_a_batch_left_behind_is_noticed() -> None:
    """What the test above stands on."""
    decoder = Decoder(tiny_model()).to("meta")
    with pytest.raises(RuntimeError, match="Tensor on device cpu is not on the expected device meta"):
        decoder.hidden(torch.zeros(2, 9, dtype=torch.int64))


def test_cuda_is_taken_where_it_is_and_refused_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto") == find_device("cpu") == "cpu"
    with pytest.raises(ValueError, match=r"train\.device=cuda, but this PyTorch finds no CUDA device; install"):
        find_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (find_device("auto"), find_device("cuda"), find_device("cpu")) == ("cuda", "cuda", "cpu")


def test_the_device_is_written_down() -> None:
    assert describe_environment(compiled=False)["device"] == "cpu"
    assert tiny_run().train.device == "auto"
