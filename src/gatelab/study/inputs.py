"""The files that a study's runs start from and read, looked at before any work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from gatelab.data.chats import read_chats
from gatelab.study.presets import command_that_leaves
from gatelab.train.settings import RunSettings
from gatelab.train.source import require_fitting_tokenizer
from gatelab.train.start import require_start


def require_inputs(runs: Iterable[RunSettings]) -> None:
    """Raise ``ValueError`` for a start, a tokenizer or a file of chats of any run that is missing or unfit.

    The sentence is that of training. Where the file is one that a preset's study leaves, it names the command too.
    """
    looked_at: set[tuple[Any, ...]] = set()

    def look(require: Callable[..., object], path: str, *fitting: Any) -> None:
        if (require, path, *fitting) in looked_at:
            return
        looked_at.add((require, path, *fitting))
        try:
            require(Path(path), *fitting)
        except ValueError as error:
            command = None if Path(path).exists() else command_that_leaves(Path(path))
            raise ValueError(f"{error}; it is made by: {command}" if command else str(error)) from None

    for run in runs:
        model, data = run.model, run.data
        if run.train.start_from is not None:
            look(require_start, run.train.start_from, model)
        if data.tokenizer.path is not None and data.synthetic is None and data.images is None:
            look(require_fitting_tokenizer, data.tokenizer.path, data, model.vocab_size)
        if data.chats is not None:
            look(read_chats, data.chats.path)
