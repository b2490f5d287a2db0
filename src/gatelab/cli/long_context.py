"""The commands of long context: extend, RULER, streaming, pruning."""

from __future__ import annotations
