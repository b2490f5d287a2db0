"""Where checkpoints keep the rows of an output gate: six layouts, and exact conversion between them.

A gate on the attention output has N rows: H C (elementwise) or H (headwise). H query heads in K groups of H/K, head
size C; a row is an output feature of a projection. The layouts:

- L1: the gate has a weight of its own, head-major. This is what our files hold, and what :class:`GateRows` is.
- L2: ``q_proj`` head by head: C query rows, C gate rows (Qwen3-Next, Qwen3.5).
- L3: ``q_proj`` group by group: the query rows of its heads, then their gate rows (the paper's public code).
- L4: Megatron's ``linear_qkv`` group by group: query rows, gate rows, C key rows, C value rows.
- L5: Megatron's ``linear_qkv`` without the gate (query, key and value rows group by group), then H gate rows.
- L6: ``q_proj`` with all query rows, then all gate rows. No known checkpoint has it; it is read when it is named.

L2, L3 and L6 of one elementwise gate have equal shapes and different meaning, so nothing here guesses.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gatelab.gates.spec import AttentionShape, Granularity

Layout = Literal["L1", "L2", "L3", "L4", "L5", "L6"]
FusedLayout = Literal["L2", "L3", "L4", "L5", "L6"]

FUSED: dict[Granularity, tuple[FusedLayout, ...]] = {"elementwise": ("L2", "L3", "L4", "L6"), "headwise": ("L3", "L5")}
WITH_KEYS_AND_VALUES: tuple[FusedLayout, ...] = ("L4", "L5")


class GateRows(NamedTuple):
    """Rows of one layer's projections, each head-major: weights (rows D), or biases (rows).

    ``key`` and ``value`` are there for the layouts that fuse them, L4 and L5, and ``None`` for the others.
    """

    query: Float[Tensor, "HC *D"]
    gate: Float[Tensor, "N *D"]
    key: Float[Tensor, "KC *D"] | None = None
    value: Float[Tensor, "KC *D"] | None = None


def row_order(layout: FusedLayout, granularity: Granularity, shape: AttentionShape) -> Int[Tensor, "rows"]:
    """The layout itself: row i of the fused tensor is row ``order[i]`` of query, gate, key and value rows end to end.

    Raises ``ValueError`` for a layout that the granularity does not have.
    """
    if layout not in FUSED[granularity]:
        raise ValueError(
            f"layout {layout} does not hold {granularity} gates fused; they can be in {', '.join(FUSED[granularity])}"
        )
    groups, per_group, head_size = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, shape.head_size
    counts = _row_counts(granularity, shape)
    starts = [sum(counts[:part]) for part in range(4)]
    parts = [torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    query = parts[0].view(groups, per_group, head_size)
    gate = parts[1].view(groups, per_group, -1)
    key, value = parts[2].view(groups, head_size), parts[3].view(groups, head_size)
    pieces = {
        "L2": lambda: [torch.cat((query, gate), dim=2)],
        "L3": lambda: [torch.cat((query.flatten(1), gate.flatten(1)), dim=1)],
        "L4": lambda: [torch.cat((query.flatten(1), gate.flatten(1), key, value), dim=1)],
        "L5": lambda: [torch.cat((query.flatten(1), key, value), dim=1), gate],
        "L6": lambda: [query, gate],
    }[layout]()
    return torch.cat([piece.flatten() for piece in pieces])


def split(
    fused: Float[Tensor, "rows *D"], layout: FusedLayout, granularity: Granularity, shape: AttentionShape
) -> GateRows:
    """The rows of a fused weight or bias, head-major; the inverse of :func:`merge`, bit for bit.

    Raises ``ValueError`` for a number of rows that the layout does not have.
    """
    order = row_order(layout, granularity, shape)
    if len(fused) != len(order):
        raise ValueError(
            f"a tensor of {len(fused)} rows is no {granularity} gate in layout {layout}: with {shape.num_heads} query "
            f"heads, {shape.num_kv_heads} key/value heads and head size {shape.head_size} it has {len(order)} rows"
        )
    rows = fused[order.argsort()]
    counts = _row_counts(granularity, shape)[: 4 if layout in WITH_KEYS_AND_VALUES else 2]
    return GateRows(*rows.split(counts))


def merge(rows: GateRows, layout: FusedLayout, granularity: Granularity, shape: AttentionShape) -> Tensor:
    """One fused weight or bias from head-major rows.

    Raises ``ValueError`` for rows that do not fit the shape, and where L4 or L5 lack keys or values.
    """
    order = row_order(layout, granularity, shape)
    given = list(rows) if layout in WITH_KEYS_AND_VALUES else [rows.query, rows.gate]
    parts = [part for part in given if part is not None]
    if len(parts) != len(given):
        raise ValueError(f"layout {layout} fuses key and value rows too; give them")
    counts = _row_counts(granularity, shape)[: len(parts)]
    if [len(part) for part in parts] != counts:
        raise ValueError(f"rows {[len(part) for part in parts]} do not fit the attention shape, which has {counts}")
    return torch.cat(parts)[order]


def expand_headwise(gate: Float[Tensor, "H *D"], head_size: int) -> Float[Tensor, "HC *D"]:
    """Elementwise gate rows that compute the same as headwise ones: each row C times. There is no way back."""
    return gate.repeat_interleave(head_size, dim=0)


def _row_counts(granularity: Granularity, shape: AttentionShape) -> list[int]:
    """Rows of query, gate, key and value."""
    queries, keys = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    return [queries, queries if granularity == "elementwise" else shape.num_heads, keys, keys]
