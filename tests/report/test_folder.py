"""Report folders: whole, in place of their own kind alone, with every chart beside the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from example_page import example_page

from gatelab.report.folder import require_replaceable, to_csv, write_report
from gatelab.report.page import Figure

FILES = {"numbers.json": "{}\n", "numbers.csv": "a\n1\n"}


def test_a_report_is_written_whole_and_in_place_of_an_earlier_one(tmp_path: Path) -> None:
    page, folder = replace(example_page(), sections=example_page().sections[:1]), tmp_path / "deep" / "report"
    assert write_report(folder, page, FILES) == folder / "report.html"
    (folder / "figures" / "stale.png").write_text("x", encoding="utf-8")
    write_report(folder, page, FILES)
    assert {path.name for path in folder.iterdir()} == {*FILES, "report.html", "figures"}
    assert (folder / "numbers.csv").read_text(encoding="utf-8") == FILES["numbers.csv"]
    figures = [item for section in page.sections for item in section.content if isinstance(item, Figure)]
    names = sorted(path.name for path in (folder / "figures").iterdir())
    assert len(names) == 3 * len(figures) and names[0].startswith("01-") and "stale.png" not in names


def test_other_files_stay(tmp_path: Path) -> None:
    require_replaceable(tmp_path / "new", FILES)
    (tmp_path / "numbers.json").write_text("x", encoding="utf-8")
    require_replaceable(tmp_path, FILES)
    (tmp_path / "mine.txt").write_text("x", encoding="utf-8")
    with pytest.raises(ValueError, match=r"holds other files \(mine.txt\); name a new folder with --out"):
        require_replaceable(tmp_path, FILES)
    with pytest.raises(ValueError, match="is a file; name a folder with --out"):
        require_replaceable(tmp_path / "mine.txt", FILES)


def test_csv_has_the_named_columns_alone() -> None:
    assert to_csv(("b", "a"), [{"a": 1, "b": None, "c": 3}, {"a": "x,y", "b": 0.5}]) == 'b,a\n,1\n0.5,"x,y"\n'
