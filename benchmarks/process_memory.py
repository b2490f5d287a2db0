"""What a process holds in memory, from Linux's own count of its pages.

``getrusage`` does not serve here: the peak that it gives a new program begins with that of the program that started it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

_STATUS, _FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_bytes(what: Literal["VmRSS", "VmHWM", "RssAnon"]) -> int | None:
    """Bytes resident now, the most since :func:`forget_peak`, or those now without pages of mapped files.

    ``None`` where the system has no such count.
    """
    if not _STATUS.exists():
        return None
    lines = _STATUS.read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(what)))


def forget_peak() -> None:
    """Let the peak start anew at what is resident now."""
    if _FORGET.exists():
        _FORGET.write_text("5")
