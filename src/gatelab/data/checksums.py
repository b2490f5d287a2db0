"""A SHA-256 beside each file of prepared data, so that a truncated or altered one is refused by name.

`NAME.sha256` is readable by ``sha256sum --check``. It is written before the file takes its name: a file that is there
always has its checksum.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from gatelab.files import sha256, write_atomically

WAY_OUT = "delete it and prepare the data again"


def write_with_checksum(path: Path, content: str) -> None:
    """Write a text file, there complete or not at all, and its checksum beside it."""
    record_checksum(path, hashlib.sha256(content.encode()).hexdigest())
    write_atomically(path, content)


def record_checksum(path: Path, digest: str) -> None:
    """Write the SHA-256 that a file is about to have beside its path."""
    write_atomically(_checksum_path(path), f"{digest}  {path.name}\n")


def recorded_checksum(path: Path) -> str:
    """The SHA-256 recorded beside a file; ``ValueError`` names the file when there is none."""
    try:
        return _checksum_path(path).read_text(encoding="ascii").partition(" ")[0]
    except (OSError, UnicodeDecodeError):
        raise ValueError(f"{path} has no readable {_checksum_path(path).name} beside it; {WAY_OUT}") from None


def verify_checksum(path: Path) -> str:
    """The file's SHA-256, equal to the recorded one; ``ValueError`` names a file that was altered or lacks a record."""
    recorded, found = recorded_checksum(path), sha256(path)
    if recorded != found:
        raise ValueError(f"{path} does not match its checksum: it is truncated or altered; {WAY_OUT}")
    return found


def _checksum_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def digest(value: object) -> str:
    """SHA-256, as hexadecimal digits, of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
