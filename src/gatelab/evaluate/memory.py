"""How much memory is free, asked before a model is loaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

MEMORY_INFO = Path("/proc/meminfo")
CONTROL_GROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Bytes that can be taken without swapping: the machine's, or what the control group leaves if that is less.

    Where the system does not say, it is the physical memory.
    """
    try:
        found = re.search(r"^MemAvailable: +(\d+) kB$", MEMORY_INFO.read_text(), re.MULTILINE)
    except OSError:
        found = None
    machine = 1024 * int(found[1]) if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = _left_in_control_group()
    return machine if group is None else min(machine, group)


def require_memory(num_bytes: int, purpose: str, way_out: str) -> None:
    """Raise ``ValueError`` that names both sizes when ``num_bytes`` are not available."""
    available = available_bytes()
    if num_bytes > available:
        raise ValueError(
            f"{purpose} needs about {num_bytes / 1e9:,.2f} GB of memory and {available / 1e9:,.2f} GB are free; "
            f"{way_out}"
        )


def _left_in_control_group() -> int | None:
    try:
        limit = (CONTROL_GROUP / "memory.max").read_text().strip()
        used = int((CONTROL_GROUP / "memory.current").read_text())
        cached = re.search(r"^inactive_file (\d+)$", (CONTROL_GROUP / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + (int(cached[1]) if cached else 0)
