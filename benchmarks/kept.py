"""Reports of real models, kept in docs/results."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path


def keep(write: Callable[[Path], object], target: Path, left_out: Callable[[str, list[str]], Iterable[str]]) -> None:
    """Put what ``write`` writes into a new folder in place of ``target``, but what ``left_out`` names of each folder.

    ``left_out`` is as :func:`shutil.copytree` takes it.
    """
    with tempfile.TemporaryDirectory() as temporary:
        written = Path(temporary) / "report"
        write(written)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(written, target, ignore=left_out)


PNG_ONLY = shutil.ignore_patterns("*.svg", "*.pdf")
