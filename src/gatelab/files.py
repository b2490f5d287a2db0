"""Writing so that a reader never sees half a file, folders that nothing is left in, their names, and checksums."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path`` to write to; on success it is flushed to disk and renamed to ``path``.

    Works for a file or a folder (a folder must not exist yet under the final name). Whatever fails inside, ``path``
    keeps what it had and the temporary is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    try:
        yield temporary
        publish(temporary, path)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def publish(temporary: Path, path: Path) -> None:
    """Give a file or folder that is complete its final name, once it is on the disk."""
    _flush_tree(temporary)
    temporary.replace(path)
    _flush(path.parent)


def temporary_beside(path: Path, of_all: bool = False) -> Path:
    """A name for something that is not to be read: :func:`remove_leftovers` removes what a kill left under it.

    It is a new one every time, or the one that all processes find which write ``path`` together.
    """
    tag = 8 * "0" if of_all else uuid.uuid4().hex[:8]
    return path.with_name(f".{path.name}.{tag}.tmp")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a whole file so that it is there complete or not at all; text is UTF-8."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def sha256(path: Path) -> str:
    """The file's SHA-256 as 64 hexadecimal digits, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def require_free_space(folder: Path, num_bytes: int, purpose: str) -> None:
    """Raise ``OSError`` before any work when the disk under ``folder`` can't take ``num_bytes`` more."""
    existing = next(place for place in [folder, *folder.absolute().parents] if place.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise OSError(
            f"{purpose} needs about {num_bytes / 1e6:,.0f} MB but only {free / 1e6:,.0f} MB are free under {existing}; "
            "free some space or choose another folder"
        )


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


def remove_leftovers(folder: Path) -> None:
    """Remove what an interrupted :func:`atomic_path` left in a folder, and nothing else."""
    for leftover in folder.glob(".*.tmp"):
        if not _TEMPORARY.fullmatch(leftover.name):
            continue
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _flush_tree(path: Path) -> None:
    """Wait until a file, or a folder with all that is in it, is on the disk."""
    for part in [path, *path.rglob("*")] if path.is_dir() else [path]:
        _flush(part)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def default_folder(kind: str, names: Sequence[str]) -> Path:
    """``runs/KIND/NAME``, after the last part of each path or hub name."""
    parts = [re.sub(r"[^\w.-]+", "_", Path(name).name).strip("._-") or "model" for name in names]
    return Path("runs") / kind / "-and-".join(parts)


def parse_json(text: str | bytes) -> Any:
    """The value of JSON text from outside; ``json.JSONDecodeError``, a ``ValueError``, for whatever can't be read."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("it is nested too deeply", "", 0) from None
    except ValueError as error:  # no UTF-8, or a number of thousands of digits
        raise json.JSONDecodeError(str(error), "", 0) from None
