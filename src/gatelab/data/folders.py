"""Folders that a refused command doesn't leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any


def require_folder(path: Path) -> None:
    """Raise ``ValueError`` when the path can't be a folder, because it or one of its parents is a file."""
    existing = next(place for place in [path, *path.absolute().parents] if place.exists())
    if not existing.is_dir():
        raise ValueError(f"{existing} is a file where a folder is needed; choose another path")


@contextmanager
def kept_if_used(folder: Path, *unimportant: Path, lock: AbstractContextManager[Any] | None = None) -> Iterator[None]:
    """Make a folder, with its parents, and hold a lock in it.

    If it has nothing but the ``unimportant`` files in the end, they are removed, and so are the folders made here.
    """
    made = [place for place in [folder, *folder.absolute().parents] if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with lock or nullcontext():
            try:
                yield
            finally:
                if set(folder.glob("*")) <= set(unimportant):
                    for file in unimportant:
                        file.unlink(missing_ok=True)
    finally:
        for place in made:
            with suppress(OSError):
                place.rmdir()
