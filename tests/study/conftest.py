"""What the tests of studies share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from gatelab.train import throughput


@pytest.fixture(autouse=True, scope="module")
def no_waiting() -> Iterator[None]:
    """Flushing to disk matters after a power cut alone, and measuring the machine's peak costs more than a tiny run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(throughput, "measure_peak", lambda dtype, **_: 1e12)
        yield
