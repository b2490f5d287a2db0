"""The six layouts, row by row, against loops written from their definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gatelab.gates.spec import AttentionShape, Granularity
from gatelab.interop.layouts import FUSED, WITH_KEYS_AND_VALUES, FusedLayout, GateRows, expand_headwise, merge, split

WIDTH = 5
PAIRS = [(layout, granularity) for granularity, layouts in FUSED.items() for layout in layouts]


@st.composite
def shapes(draw: st.DrawFn) -> AttentionShape:
    """MHA, MQA and everything between."""
    groups, per_group = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return AttentionShape(
        width=WIDTH, num_heads=groups * per_group, num_kv_heads=groups, head_size=draw(st.integers(1, 5))
    )


def random_rows(shape: AttentionShape, granularity: Granularity, bias: bool) -> GateRows:
    """Rows that are all different."""
    queries, keys = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    gates = queries if granularity == "elementwise" else shape.num_heads
    counts = (queries, gates, keys, keys)
    total = sum(counts)
    values = torch.arange(float(total)) if bias else torch.arange(float(total * WIDTH)).view(total, WIDTH)
    return GateRows(*values.split(counts))


def fused_by_loops(rows: GateRows, layout: FusedLayout, granularity: Granularity, shape: AttentionShape) -> Tensor:
    """The fused tensor, written from the words of the definitions."""
    assert rows.key is not None and rows.value is not None
    size, per_group = shape.head_size, shape.num_heads // shape.num_kv_heads

    def query_of(head: int) -> list[Tensor]:
        return [rows.query[head * size + channel] for channel in range(size)]

    def gate_of(head: int) -> list[Tensor]:
        if granularity == "headwise":
            return [rows.gate[head]]
        return [rows.gate[head * size + channel] for channel in range(size)]

    found: list[Tensor] = []
    if layout == "L2":
        for head in range(shape.num_heads):
            found += query_of(head) + gate_of(head)
    elif layout == "L6":
        for head in range(shape.num_heads):
            found += query_of(head)
        for head in range(shape.num_heads):
            found += gate_of(head)
    else:
        for group in range(shape.num_kv_heads):
            heads = range(group * per_group, (group + 1) * per_group)
            for head in heads:
                found += query_of(head)
            if layout != "L5":
                for head in heads:
                    found += gate_of(head)
            if layout != "L3":
                found += [rows.key[group * size + channel] for channel in range(size)]
                found += [rows.value[group * size + channel] for channel in range(size)]
        if layout == "L5":
            for head in range(shape.num_heads):
                found += gate_of(head)
    return torch.stack(found)


def known_by(layout: FusedLayout, rows: GateRows) -> list[Tensor]:
    """The rows that a layout holds."""
    return [part for part in (rows if layout in WITH_KEYS_AND_VALUES else rows[:2]) if part is not None]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize(("layout", "granularity"), PAIRS)
@settings(max_examples=30, deadline=None)
@given(shape=shapes(), bias=st.booleans())
def test_rows_stand_where_the_definition_says(
    layout: FusedLayout, granularity: Granularity, shape: AttentionShape, bias: bool
) -> None:
    rows = random_rows(shape, granularity, bias)
    fused = merge(rows, layout, granularity, shape)
    assert torch.equal(fused, fused_by_loops(rows, layout, granularity, shape))
    again = split(fused, layout, granularity, shape)
    assert same(known_by(layout, again), known_by(layout, rows))
    assert (again.key is None) == (layout not in WITH_KEYS_AND_VALUES)


@pytest.mark.parametrize("granularity", ["elementwise", "headwise"])
@settings(max_examples=20, deadline=None)
@given(shape=shapes(), data=st.data())
def test_any_chain_of_layouts_gives_the_same_bits(
    granularity: Granularity, shape: AttentionShape, data: st.DataObject
) -> None:
    rows = random_rows(shape, granularity, bias=False)
    current = rows
    for layout in data.draw(st.lists(st.sampled_from(FUSED[granularity]), min_size=1, max_size=5)):
        through = split(merge(current, layout, granularity, shape), layout, granularity, shape)
        current = through if through.key is not None else through._replace(key=rows.key, value=rows.value)
    assert same(known_by("L4", current), known_by("L4", rows))


@settings(max_examples=40, deadline=None)
@given(shape=shapes())
def test_head_and_group_interleaving_agree_without_grouping_alone(shape: AttentionShape) -> None:
    rows = random_rows(shape, "elementwise", bias=False)
    by_head, by_group = (merge(rows, layout, "elementwise", shape) for layout in ("L2", "L3"))
    assert by_head.shape == by_group.shape
    assert torch.equal(by_head, by_group) == (shape.num_heads == shape.num_kv_heads)


@settings(max_examples=20, deadline=None)
@given(shape=shapes())
def test_expanded_rows_give_each_channel_its_heads_logit(shape: AttentionShape) -> None:
    gate = random_rows(shape, "headwise", bias=False).gate
    expanded = expand_headwise(gate, shape.head_size)
    assert len(expanded) == shape.num_heads * shape.head_size
    for head in range(shape.num_heads):
        for channel in range(shape.head_size):
            assert torch.equal(expanded[head * shape.head_size + channel], gate[head])


SHAPE = AttentionShape(width=WIDTH, num_heads=6, num_kv_heads=2, head_size=8)


@pytest.mark.parametrize(
    ("layout", "granularity", "possible"),
    [("L2", "headwise", "L3, L5"), ("L4", "headwise", "L3, L5"), ("L5", "elementwise", "L2, L3, L4, L6")],
)
def test_a_layout_without_such_gates(layout: FusedLayout, granularity: Granularity, possible: str) -> None:
    message = f"{layout} does not hold {granularity} gates fused; they can be in {possible}"
    with pytest.raises(ValueError, match=message):
        split(torch.zeros(96, WIDTH), layout, granularity, SHAPE)


def test_rows_of_another_number() -> None:
    with pytest.raises(
        ValueError, match=r"54 rows is no elementwise gate in layout L3: with 6 query heads, 2 .* size 8 it has 96 rows"
    ):
        split(torch.zeros(54, WIDTH), "L3", "elementwise", SHAPE)
    rows = random_rows(SHAPE, "elementwise", bias=False)
    with pytest.raises(ValueError, match=r"rows \[48, 6\] do not fit the attention shape, which has \[48, 48\]"):
        merge(rows._replace(gate=rows.gate[:6]), "L2", "elementwise", SHAPE)
    with pytest.raises(ValueError, match="layout L4 fuses key and value rows too; give them"):
        merge(rows._replace(value=None), "L4", "elementwise", SHAPE)
