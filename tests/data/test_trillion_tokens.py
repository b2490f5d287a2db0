"""More tokens than any memory holds: sparse files, which take no room on a disk."""

from __future__ import annotations

import json
import resource
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from gatelab.data import shards as shards_module
from gatelab.data.loader import TrainLoader
from gatelab.data.shards import HEADER_BYTES, MAGIC, VERSION, ShardHeader, TokenShards, shard_path
from gatelab.data.window_order import KeyedPermutation, window_order

NUM_SHARDS, TOKENS = 67, 16_800_000_007  # 1.13e12 tokens in 2.25 TB


def write_sparse_shard(folder: Path, number: int, num_tokens: int, num_shards: int) -> None:
    """A shard of two documents, zeros but for its first token, 1000 + number, and its last, 2000 + number."""
    header = ShardHeader(
        VERSION, number, number == num_shards - 1, "uint16", num_tokens, 2, 3, 3000, num_tokens * number, 2 * number
    )
    path = shard_path(folder, number)
    with path.open("wb") as stream:
        stream.write(MAGIC + json.dumps(asdict(header)).encode().ljust(HEADER_BYTES - len(MAGIC)))
        stream.write(np.array([1000 + number], "<u2").tobytes())
        stream.seek(HEADER_BYTES + 2 * (num_tokens - 1))
        stream.write(np.array([2000 + number], "<u2").tobytes())
        stream.seek(header.documents_offset)
        stream.write(np.array([0, num_tokens - 5, 1, 2], "<i8").tobytes())
    path.with_name(f"{path.name}.sha256").write_text(f"{'0' * 64}  {path.name}\n")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    folder = tmp_path_factory.mktemp("trillion")
    try:
        for number in range(NUM_SHARDS):
            write_sparse_shard(folder, number, TOKENS, NUM_SHARDS)
    except OSError as error:
        pytest.skip(f"the file system has no sparse files of 34 GB: {error}")
    assert sum(path.stat().st_blocks for path in folder.iterdir()) * 512 < 50e6
    return TokenShards(folder, verify=False)


def test_the_right_tokens_at_both_ends_and_at_seams(tokens: TokenShards) -> None:
    assert len(tokens) == NUM_SHARDS * TOKENS > 1.1e12
    assert tokens[:3].tolist() == [1000, 0, 0]
    assert tokens[len(tokens) - 2 :].tolist() == [0, 2000 + NUM_SHARDS - 1]
    for shard in (1, 33, NUM_SHARDS - 1):
        seam = shard * TOKENS
        assert tokens[seam - 2 : seam + 2].tolist() == [0, 2000 + shard - 1, 1000 + shard, 0]
        assert tokens.document_ids(seam - 6, seam + 1).tolist() == [2 * shard - 2, *[2 * shard - 1] * 5, 2 * shard]


def test_batches_take_no_memory_for_the_index(tokens: TokenShards) -> None:
    loader = TrainLoader(tokens, context=4096, sequences_per_step=8, seed=3, bos_id=0)
    assert loader.num_windows == len(tokens) // 4096 > 2.7e8
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    first = loader.batch(0)
    for step in (10**6, loader.num_windows // 8, 10**9):
        loader.batch(step)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 100e6
    assert isinstance(window_order(loader.num_windows, 3, 10**9 * 8 // loader.num_windows), KeyedPermutation)
    assert np.array_equal(loader.batch(0).targets, first.targets)
    number = KeyedPermutation(loader.num_windows, "3 0")[5]
    assert first.targets[5].tolist() == tokens[number * 4096 : number * 4096 + 4096].tolist()


def test_few_shards_are_mapped_at_once(tokens: TokenShards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "MOST_MAPPED", 5)
    few = TokenShards(tokens.folder, verify=False)
    for shard in [*range(NUM_SHARDS), 0]:
        assert few[shard * TOKENS : shard * TOKENS + 1].tolist() == [1000 + shard]
        assert sum(one.is_mapped for one in few.shards) <= 5
