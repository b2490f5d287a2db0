"""The list of named gates, and the table in docs/gates.md that is written from it by running this file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from gatelab.cli.catalogue import variant_table
from gatelab.gates.catalogue import list_variants
from gatelab.gates.spec import AttentionShape
from gatelab.gates.variants import VARIANTS
from gatelab.report.tables import to_markdown

DOCUMENT = Path(__file__).parents[2] / "docs" / "gates.md"
COMMAND = "python tests/gates/test_catalogue.py"
BEGIN, END = f"<!-- written by `{COMMAND}` -->\n", "<!-- end of the written table -->\n"
SHAPE_15A2B = AttentionShape(width=2048, num_heads=32, num_kv_heads=4, head_size=128)
ROWS = {row.name: row for row in list_variants(SHAPE_15A2B, num_layers=24)}


def with_fresh_table(text: str) -> str:
    """The document with the table between its two marks written anew."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + "\n" + to_markdown(variant_table(ROWS.values())) + "\n" + END + after


def test_table_in_the_document_is_the_generated_one() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == with_fresh_table(text), f"the table in docs/gates.md is out of date; run: {COMMAND}"


def test_rows_follow_the_names() -> None:
    assert list(ROWS) == list(VARIANTS)
    assert [row.origin for row in ROWS.values()] == [variant.origin for variant in VARIANTS.values()]


def test_row_as_json() -> None:
    row = json.loads(json.dumps(ROWS["sdpa_headwise_open"].to_mapping()))
    assert row.pop("initial_scores") == pytest.approx([1 / (1 + math.exp(-10))])
    assert row == {
        "name": "sdpa_headwise_open",
        "axes": [{"granularity": "headwise", "initialization": "zeros", "bias": 10.0}],
        "control": None,
        "origin": "x-transformers: open at the start",
        "parameters": 24 * 32 * 2049,
        "cancels_under_norm": False,
    }
    cancelling = [name for name, row in ROWS.items() if row.cancels_under_norm]
    assert cancelling == ["query_headwise_before_norm", "key_headwise_before_norm"]
    assert ROWS["rms_norm_on_sdpa"].to_mapping()["control"] == {"operation": "rms_norm"}


def test_axes_in_words() -> None:
    words = {name: row.describe_axes() for name, row in ROWS.items()}
    assert words["none"] == "no gate"
    assert words["sdpa_elementwise"] == "defaults"
    assert words["key_headwise"] == "position=key, granularity=headwise, placement=after_norm"
    assert words["sdpa_and_value"] == "defaults with position=value"
    assert words["silu_on_sdpa"] == "control=silu"


def test_table_has_a_line_for_each_row() -> None:
    lines = to_markdown(variant_table(ROWS.values())).splitlines()
    assert len(lines) == 2 + len(VARIANTS)
    assert {line.count("|") for line in lines} == {6}
    assert "| value_headwise | position=value, granularity=headwise | T1 r11, T6 (G2) | 196,608 | 0.5 |" in lines


if __name__ == "__main__":
    DOCUMENT.write_text(with_fresh_table(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
