"""Weights in one file and in many, read one tensor at a time."""

from __future__ import annotations

import json
import tracemalloc
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gatelab.interop.tensor_files import INDEX, SINGLE, open_tensors, write_tensors

METADATA = {"format": "pt", "gate_layout": "L1"}


def tensors() -> dict[str, Tensor]:
    """A few of several dtypes and sizes; 40, 60, 24 and 20 bytes."""
    generator = torch.Generator().manual_seed(0)
    return {
        "model.a": torch.randn(2, 5, generator=generator),
        "model.b": torch.randn(5, 6, generator=generator).bfloat16(),
        "model.c": torch.randn(3, generator=generator, dtype=torch.float64),
        "model.d": torch.randn(10, generator=generator).half(),
    }


@pytest.mark.parametrize(
    ("limit", "shards"), [(1_000, 1), (100, 2), (84, 3), (39, 4)], ids=["one", "two", "three", "all above"]
)
def test_what_is_written_is_read(tmp_path: Path, limit: int, shards: int) -> None:
    assert write_tensors(tmp_path, tensors(), METADATA, limit) == 144
    assert len(list(tmp_path.glob("*.safetensors"))) == shards
    assert (tmp_path / SINGLE).exists() == (shards == 1) != (tmp_path / INDEX).exists()
    found = open_tensors(tmp_path)
    assert found.metadata == METADATA
    assert list(found) == list(tensors())
    for name, tensor in tensors().items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == found.dtype(name) == tensor.dtype
        assert found.shape(name) == tensor.shape


def test_the_index_counts_bytes_and_names_files(tmp_path: Path) -> None:
    write_tensors(tmp_path, tensors(), METADATA, 100)
    index = json.loads((tmp_path / INDEX).read_text())
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert index == {
        "metadata": {"total_size": 144},
        "weight_map": {"model.a": first, "model.b": first, "model.c": second, "model.d": second},
    }


class Counted(Mapping[str, Tensor]):
    """Notes how many of its tensors were alive at once."""

    def __init__(self, count: int):
        self.count, self.alive, self.most = count, 0, 0

    def __getitem__(self, name: str) -> Tensor:
        tensor = torch.zeros(100, dtype=torch.float32)
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(tensor, self._gone)
        return tensor

    def _gone(self) -> None:
        self.alive -= 1

    def __iter__(self) -> Iterator[str]:
        return (f"t{number}" for number in range(self.count))

    def __len__(self) -> int:
        return self.count


def test_one_shard_is_held_at_a_time(tmp_path: Path) -> None:
    counted = Counted(20)
    write_tensors(tmp_path, counted, METADATA, 4 * 400)
    assert len(list(tmp_path.glob("*.safetensors"))) == 5
    assert counted.most <= 5


def test_opening_reads_no_tensor(tmp_path: Path) -> None:
    save_file({"model.a": torch.zeros(1_000_000)}, tmp_path / SINGLE)
    tracemalloc.start()
    found = open_tensors(tmp_path)
    assert found.shape("model.a") == (1_000_000,)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_a_compiled_model_is_no_other(tmp_path: Path) -> None:
    save_file({"_orig_mod.model.a": torch.ones(3), "model._orig_mod.b": torch.zeros(2)}, tmp_path / SINGLE)
    found = open_tensors(tmp_path)
    assert set(found) == {"model.a", "model.b"}
    assert torch.equal(found["model.a"], torch.ones(3))


def test_views_are_written_whole(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    write_tensors(tmp_path, {"transposed": base.t()}, METADATA, 1_000)
    assert torch.equal(open_tensors(tmp_path)["transposed"], base.t())


def test_damage_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has neither model.safetensors nor .*; GateLab reads safetensors alone"):
        open_tensors(tmp_path)
    write_tensors(tmp_path, tensors(), METADATA, 84)
    index = json.loads((tmp_path / INDEX).read_text())

    def with_map(weight_map: dict[str, object]) -> None:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    with_map(index["weight_map"] | {"model.e": "model-00001-of-00003.safetensors"})
    with pytest.raises(ValueError, match=r"says that model.e is in model-00001-of-00003.safetensors, but it is not"):
        open_tensors(tmp_path)
    with_map(index["weight_map"] | {"model.e": "../outside.safetensors"})
    with pytest.raises(ValueError, match=r"names the file '../outside.safetensors', which is not one of its folder"):
        open_tensors(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(ValueError, match="is damaged: it has no weight_map"):
        open_tensors(tmp_path)
    with_map(index["weight_map"])
    shard = tmp_path / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"model-00002-of-00003.safetensors is damaged or no safetensors file"):
        open_tensors(tmp_path)
    shard.unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00003.safetensors is missing, though .* names it"):
        open_tensors(tmp_path)


def test_shards_that_contradict_each_other(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "1.safetensors", {"gate_layout": "L1"})
    save_file({"b": torch.ones(1)}, tmp_path / "2.safetensors", {"gate_layout": "L2"})
    weight_map = {"a": "1.safetensors", "b": "2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"2.safetensors says gate_layout='L2' in its metadata, another shard 'L1'"):
        open_tensors(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "2.safetensors", {"gate_layout": "L1"})
    with pytest.raises(ValueError, match=r"2.safetensors holds a a second time; it was in .*1.safetensors already"):
        open_tensors(tmp_path)


def test_a_quantised_tensor(tmp_path: Path) -> None:
    save_file({"model.a": torch.zeros(2, 2).to(torch.float8_e4m3fn)}, tmp_path / SINGLE)
    with pytest.raises(ValueError, match=r"holds model.a as F8_E4M3; .* take an unquantised checkpoint"):
        open_tensors(tmp_path)["model.a"]


@pytest.mark.parametrize("size", [0, -1])
def test_shards_of_no_size(tmp_path: Path, size: int) -> None:
    with pytest.raises(ValueError, match=f"max_shard_bytes={size} is not a size"):
        write_tensors(tmp_path, tensors(), METADATA, size)
    assert not list(tmp_path.iterdir())
