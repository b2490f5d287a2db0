from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gatelab.data import loader as loader_module
from gatelab.data.loader import IGNORED, Batch, TrainLoader, heldout_batches
from gatelab.data.shards import TokenShards

TEXTS = [f"a gate {number} opens" * (1 + number % 5) for number in range(19)]
BOS = 0


@pytest.fixture(scope="module")
def tokens(make_shards: Callable[..., TokenShards]) -> TokenShards:
    return make_shards(TEXTS, 71)


def make_loader(tokens: TokenShards, **changes: object) -> TrainLoader:
    arguments = {"context": 17, "sequences_per_step": 6, "seed": 3, "bos_id": BOS, **changes}
    return TrainLoader(tokens, **arguments)


def same(left: Batch, right: Batch) -> bool:
    pairs = [(left.inputs, right.inputs), (left.targets, right.targets), (left.documents, right.documents)]
    return all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)


def concatenated(batches: list[Batch]) -> Batch:
    def joined(name: str) -> Tensor | None:
        parts = [getattr(batch, name) for batch in batches]
        return None if parts[0] is None else torch.cat(parts)

    return Batch(*(joined(name) for name in ("inputs", "targets", "documents", "document_ids")))


def naive_windows(stream: list[int], documents: list[int], context: int, bos: bool) -> list[tuple[list[int], ...]]:
    """Inputs, targets and documents of each whole window, token by token."""
    windows = []
    last_start = len(stream) - context if bos else len(stream) - context - 1
    for start in range(0, last_start + 1, context):
        inputs, targets, owners = [], [], []
        for position in range(start, start + context):
            if bos:
                inputs.append(BOS if position == start else stream[position - 1])
                targets.append(stream[position])
                owners.append(documents[start] if position == start else documents[position - 1])
            else:
                inputs.append(stream[position])
                targets.append(stream[position + 1])
                owners.append(documents[position])
        windows.append((inputs, targets, [owner - owners[0] for owner in owners]))
    return windows


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("context", [2, 17, 40])
def test_an_epoch_is_every_window_of_the_naive_oracle_once(tokens: TokenShards, bos: bool, context: int):
    loader = make_loader(
        tokens, context=context, bos_id=BOS if bos else None, sequences_per_step=1, document_masks=True
    )
    ids = tokens.document_ids(0, len(tokens)).tolist()
    expected = naive_windows(tokens[:].tolist(), ids, context, bos)
    assert loader.num_windows == len(expected)
    for epoch in range(2):
        steps = range(epoch * loader.num_windows, (epoch + 1) * loader.num_windows)
        found = []
        for step in steps:
            batch = loader.batch(step)
            assert batch.documents is not None
            found.append((batch.inputs[0].tolist(), batch.targets[0].tolist(), batch.documents[0].tolist()))
        assert sorted(found) == sorted(expected)
        if context < 40:
            assert found != expected, "the order is drawn"


@given(
    step=st.integers(0, 200),
    num_ranks=st.sampled_from([1, 2, 3, 6]),
    seed=st.integers(0, 5),
    bos=st.booleans(),
    masks=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_ranks_in_order_are_the_one_rank_batch(
    tokens: TokenShards, step: int, num_ranks: int, seed: int, bos: bool, masks: bool
):
    loader = make_loader(tokens, seed=seed, bos_id=BOS if bos else None, document_masks=masks)
    whole = loader.batch(step)
    parts = [loader.batch(step, rank, num_ranks) for rank in range(num_ranks)]
    assert same(concatenated(parts), whole)
    assert whole.inputs.shape == whole.targets.shape == (6, 17)
    assert whole.inputs.dtype == whole.targets.dtype == torch.int64
    assert (whole.documents is not None) == masks and whole.document_ids is None


@given(steps=st.lists(st.integers(0, 60), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_a_batch_depends_on_its_step_alone(tokens: TokenShards, steps: list[int]):
    """Any resume point: a used loader, in whatever order, agrees with a new one."""
    used = make_loader(tokens)
    for step in steps:
        assert same(used.batch(step), make_loader(tokens).batch(step))


def test_an_order_is_drawn_once_for_an_epoch(tokens: TokenShards, monkeypatch: pytest.MonkeyPatch):
    loader = make_loader(tokens)
    drawn: list[int] = []
    draw = loader_module.window_order
    monkeypatch.setattr(loader_module, "window_order", lambda n, s, epoch: drawn.append(epoch) or draw(n, s, epoch))
    num_steps = 3 * loader.num_windows // 6
    for step in range(num_steps):
        loader.batch(step)
    assert drawn == [0, 1, 2]


def test_seeds_and_epochs_draw_different_orders(tokens: TokenShards):
    loader = make_loader(tokens, sequences_per_step=1)
    epochs = [[loader.batch(e * loader.num_windows + s).targets.tolist() for s in range(9)] for e in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert not same(make_loader(tokens, seed=3).batch(0), make_loader(tokens, seed=4).batch(0))


def test_a_step_larger_than_the_data_spans_epochs(tokens: TokenShards):
    loader = make_loader(tokens, sequences_per_step=1)
    large = make_loader(tokens, sequences_per_step=3 * loader.num_windows)
    counts = Counter(tuple(row) for row in large.batch(0).targets.tolist())
    assert set(counts.values()) == {3}


def test_end_of_document_is_learned_in_training(tokens: TokenShards):
    loader = make_loader(tokens)
    targets = torch.cat([loader.batch(step).targets for step in range(10)])
    assert (targets == BOS).any() and not (targets == IGNORED).any()


def test_data_smaller_than_a_window_is_refused(make_shards: Callable[..., TokenShards]):
    tokens = make_shards(["ab"])
    length = len(tokens)
    assert make_loader(tokens, context=length).num_windows == 1
    with pytest.raises(ValueError, match=f"has {length} tokens, less than one window of context={length + 1}; take"):
        make_loader(tokens, context=length + 1)
    with pytest.raises(ValueError, match=f"less than one window of context={length}"):
        make_loader(tokens, context=length, bos_id=None)


def test_uneven_ranks_are_refused(tokens: TokenShards):
    with pytest.raises(ValueError, match="6 sequences can't be split evenly over 4 ranks; choose a multiple of 4"):
        make_loader(tokens).batch(0, 0, 4)


def test_a_batch_moves_to_a_device_whole(tokens: TokenShards):
    moved = make_loader(tokens, document_masks=True).batch(0).to("meta")
    assert moved.inputs.device.type == moved.targets.device.type == "meta"
    assert moved.documents is not None and moved.documents.device.type == "meta" and moved.document_ids is None


@given(
    texts=st.lists(st.text("abé ", min_size=1, max_size=30), min_size=1, max_size=12),
    context=st.integers(2, 40),
    sequences=st.sampled_from([2, 4, 6]),
    bos=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_heldout_token_is_scored_exactly_once(
    make_shards: Callable[..., TokenShards], texts: list[str], context: int, sequences: int, bos: bool
):
    tokens = make_shards(texts)
    bos_id = BOS if bos else None
    batches = list(heldout_batches(tokens, context=context, sequences=sequences, bos_id=bos_id, document_masks=True))
    scored = []
    for batch in batches:
        assert batch.documents is not None and batch.document_ids is not None
        assert batch.inputs.shape == batch.targets.shape == batch.documents.shape == (sequences, context)
        assert ((batch.targets == IGNORED) == (batch.document_ids == -1)).all()
        kept = batch.targets != IGNORED
        scored += zip(batch.document_ids[kept].tolist(), batch.targets[kept].tolist(), strict=True)
        assert (batch.documents.diff(dim=1) >= 0).all() and (batch.documents[:, 0] == 0).all()
    ids = tokens.document_ids(0, len(tokens)).tolist()
    assert scored == [pair for pair in zip(ids, tokens[:].tolist(), strict=True) if pair[1] != BOS]
    halves = [
        list(
            heldout_batches(
                tokens, context=context, sequences=sequences, bos_id=bos_id, document_masks=True, rank=r, num_ranks=2
            )
        )
        for r in (0, 1)
    ]
    assert len(halves[0]) == len(halves[1]) == len(batches)
    for whole, *parts in zip(batches, *halves, strict=True):
        joined = concatenated(parts)
        assert same(joined, whole)
        assert torch.equal(joined.document_ids, whole.document_ids)


@pytest.mark.parametrize("bos", [True, False])
def test_heldout_inputs_precede_their_targets(tokens: TokenShards, bos: bool):
    ids = tokens.document_ids(0, len(tokens)).tolist()
    windows = naive_windows(tokens[:].tolist(), ids, 17, bos)
    rows = []
    for batch in heldout_batches(tokens, context=17, sequences=4, bos_id=BOS if bos else None, document_masks=True):
        assert batch.documents is not None
        rows += zip(batch.inputs.tolist(), batch.targets.tolist(), batch.documents.tolist(), strict=True)
    for (inputs, targets, documents), expected in zip(rows, windows, strict=False):
        assert inputs == expected[0]
        assert targets == [IGNORED if target == BOS else target for target in expected[1]]
        assert documents == expected[2]


def test_heldout_batches_without_masks_have_no_documents(tokens: TokenShards):
    assert next(heldout_batches(tokens, context=17, sequences=4, bos_id=BOS)).documents is None
