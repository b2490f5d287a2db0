"""One report as a folder: the page, the numbers behind it, and each chart as SVG, PDF and PNG."""

from __future__ import annotations

import csv
import io
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gatelab.files import atomic_path, write_atomically
from gatelab.report.charts import save_chart
from gatelab.report.page import Figure, Page, write_page

PAGE, FIGURES = "report.html", "figures"


def require_replaceable(folder: Path, files: Collection[str]) -> None:
    """Raise ``ValueError`` if a report with these files in ``folder`` would remove anything but an earlier one."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; name a folder with --out")
    others = sorted({path.name for path in folder.iterdir()} - {*files, PAGE, FIGURES}) if folder.is_dir() else []
    if others:
        raise ValueError(f"{folder} holds other files ({others[0]}); name a new folder with --out")


def write_report(folder: Path, page: Page, files: Mapping[str, str]) -> Path:
    """Write ``files`` (name -> text), ``report.html`` and ``figures/``; returns the path of the page.

    The folder appears whole or not at all, in place of an earlier report with the same files; see
    :func:`require_replaceable`. A figure is named by its number on the page and its title.
    """
    require_replaceable(folder, files)
    figures = [item for section in page.sections for item in section.content if isinstance(item, Figure)]
    with atomic_path(folder) as temporary:
        (temporary / FIGURES).mkdir(parents=True)
        for name, text in files.items():
            write_atomically(temporary / name, text)
        write_page(page, temporary / PAGE)
        for number, figure in enumerate(figures, start=1):
            title = re.sub(r"[^a-z0-9]+", "-", figure.chart.to_dict()["title"].lower()).strip("-")
            save_chart(figure.chart, temporary / FIGURES / f"{number:02}-{title}")
        if folder.exists():
            shutil.rmtree(folder)
    return folder / PAGE


def to_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as CSV with a header, these columns alone; ``None`` is an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
