"""Who sees whom, in O(T) answers, against loops over all pairs."""

from __future__ import annotations

import pytest
import torch
from attention_maps import CASES, B, naive_visible
from hypothesis import given, settings
from hypothesis import strategies as st

from gatelab.diagnose.calls import Segment, Visibility


@st.composite
def sights(draw: st.DrawFn) -> tuple[Visibility, int]:
    """Any visibility of a few samples, with holes in the padding and documents in any order too."""
    num_samples, num_keys = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    row = st.lists(st.integers(-1, 2), min_size=num_keys, max_size=num_keys)
    rows = st.lists(row, min_size=num_samples, max_size=num_samples)
    window = draw(st.none() | st.integers(1, num_keys + 2))
    real = torch.tensor(draw(rows)) >= 0 if draw(st.booleans()) else None
    documents = torch.tensor(draw(rows)) if draw(st.booleans()) else None
    num_queries = draw(st.integers(1, num_keys))
    return Visibility(num_queries, num_keys, draw(st.booleans()), window, real, documents), num_samples


@given(sights(), st.data())
@settings(deadline=None, max_examples=150)
def test_rows_are_those_of_a_loop(drawn: tuple[Visibility, int], data: st.DataObject) -> None:
    sight, num_samples = drawn
    start = data.draw(st.integers(0, sight.num_queries - 1))
    stop = data.draw(st.integers(start + 1, sight.num_queries))
    expected = naive_visible(sight, num_samples)
    found = sight.rows(start, stop)
    assert torch.equal(found.expand(num_samples, 1, -1, -1)[:, 0], expected[:, start:stop])
    first, last = sight.key_range(start, stop)
    assert not expected[:, start:stop, :first].any() and not expected[:, start:stop, last:].any()


@given(sights())
@settings(deadline=None, max_examples=300)
def test_counts_and_sums_are_those_of_a_loop(drawn: tuple[Visibility, int]) -> None:
    sight, num_samples = drawn
    visible = naive_visible(sight, num_samples)
    shape = (num_samples, sight.num_queries)
    number = visible.sum(-1)
    assert torch.equal(sight.num_visible().expand(shape), number)
    places = torch.arange(sight.past, sight.num_keys)
    real = torch.ones(shape).bool() if sight.real is None else sight.real[:, sight.past :]
    counted = real & (number > 0)
    assert torch.equal(sight.counted().expand(shape), counted)
    for key in range(sight.num_keys):
        assert torch.equal(sight.sees(torch.tensor([[key]])).expand(shape), visible[..., key])
    assert not sight.sees(torch.tensor([[sight.num_keys]])).any()
    columns = (visible / number.clamp(min=1)[..., None].double() * counted[..., None]).sum(1)
    torch.testing.assert_close(sight.uniform_columns().expand(num_samples, -1), columns, rtol=0, atol=1e-12)
    if sight.causal:
        back = places[:, None] - torch.arange(sight.num_keys)
        distance = (visible * back).sum(-1) / number.clamp(min=1).double()
        torch.testing.assert_close(sight.uniform_distance().expand(shape), distance, rtol=0, atol=1e-12)


@given(sights())
@settings(deadline=None, max_examples=150)
def test_the_first_key_is_the_first_real_one_of_the_own_document(drawn: tuple[Visibility, int]) -> None:
    sight, num_samples = drawn
    found = sight.first_key().expand(num_samples, sight.num_queries)
    for sample in range(num_samples):
        for query in range(sight.num_queries):
            place = sight.past + query
            keys = [
                key
                for key in range(sight.num_keys)
                if (sight.real is None or sight.real[sample, key])
                and (sight.documents is None or sight.documents[sample, key] == sight.documents[sample, place])
            ]
            assert not keys or found[sample, query] == keys[0]


@given(sights())
@settings(deadline=None, max_examples=300)
def test_segments_say_the_same_or_nothing(drawn: tuple[Visibility, int]) -> None:
    sight, num_samples = drawn
    segments = sight.segments()
    if segments is None:
        assert not sight.is_plain
        return
    found = torch.zeros(num_samples, sight.num_keys, sight.num_keys, dtype=torch.bool)
    for samples, start, stop in segments:
        piece = torch.ones(stop - start, stop - start, dtype=torch.bool)
        found[samples, start:stop, start:stop] = piece.tril() if sight.causal else piece
    real = torch.ones(num_samples, sight.num_keys).bool() if sight.real is None else sight.real
    assert torch.equal(found, naive_visible(sight, num_samples) & real[:, :, None])


@pytest.mark.parametrize("name", ["left_padding", "right_padding", "documents", "padded_documents", "wide_window"])
def test_padding_and_documents_are_made_of_plain_pieces(name: str) -> None:
    assert CASES[name].sight.segments() is not None


@pytest.mark.parametrize("name", ["window", "documents_alternating", "earlier_keys"])
def test_what_is_not_made_of_plain_pieces(name: str) -> None:
    assert CASES[name].sight.segments() is None


def test_plain_attention_is_one_piece_of_all_samples() -> None:
    assert Visibility(5, 5).segments() == [Segment(slice(None), 0, 5)] and B > 1
