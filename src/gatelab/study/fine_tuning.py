"""A trained decoder fine-tuned on chats: the same model, asked and answering, before and after."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gatelab.data.chat_template import TEMPLATE_FILE, token_of, tokenizer_config
from gatelab.data.chat_windows import prepare_chats
from gatelab.data.settings import ChatSettings
from gatelab.files import require_folder, write_atomically
from gatelab.study.gate_adding import BEFORE, Base, examine, open_base
from gatelab.study.runner import ArmRun, read_arm
from gatelab.train.loop import train
from gatelab.train.run_folder import RunFolder
from gatelab.train.settings import RunSettings
from gatelab.train.source import open_source
from gatelab.train.start import keep_start
from gatelab.train.training_on import started_from, training_on
from gatelab.train.watch import Watch

START_WEIGHTS = "start"
MOST_STEPS = 1_000_000_000  # until the windows are counted


class FineTuned(NamedTuple):
    """What came of it. ``before`` has ``heldout`` and ``measurement`` of the model as it was, on the same chats."""

    name: str
    chats: ChatSettings
    before: dict[str, Any]
    after: ArmRun


def fine_tuning(name: str, base: Base, chats: Path, epochs: float, words: Sequence[str] = ()) -> RunSettings:
    """The settings of the run, not yet with the weights that it starts from.

    It has the model's tokenizer and the chat template beside it (a plain one where there is none), and trains as
    :func:`training_on` has it. ``words`` are assignments to ``data.*`` and ``train.*``, applied last. Raises
    ``ValueError``, before any training, for a model without a tokenizer, a word that changes the model, the start or
    the steps, and as :func:`prepare_chats` does.
    """
    for word in words:
        if not word.startswith(("data.", "train.")) or word.startswith(("train.start_from", "train.steps")):
            raise ValueError(
                f"{word!r} can't be set: only data.* and train.* can, without start_from and steps (--epochs)"
            )
    if epochs <= 0:
        raise ValueError(f"--epochs {epochs:g} trains nothing; give a number above 0")
    settings = base.settings
    if settings.data.synthetic is not None:
        raise ValueError(f"the run in {name} was trained on a synthetic task and knows no text to answer with")
    data = settings.to_mapping()
    data["data"] = {**_beside(Path(name), settings), "context": settings.data.context, "document_masks": True}
    data["data"]["chats"]["path"] = str(chats)

    def run_of(steps: int) -> RunSettings:
        changes = training_on(settings.train, steps).to_mapping()
        return RunSettings.parse(data | {"train": changes}).with_overrides(words)

    endless = run_of(MOST_STEPS)
    num_windows = len(prepare_chats(endless.data).train)
    return run_of(math.ceil(epochs * num_windows / endless.train.sequences_per_step))


def fine_tune(
    name: str,
    chats: Path,
    folder: Path,
    cache: Path,
    epochs: float = 2.0,
    words: Sequence[str] = (),
    watch: Watch | None = None,
) -> FineTuned:
    """Fine-tune a run's newest checkpoint, or another model that GateLab loads, into the run folder ``folder``.

    Called again, it continues. The folder is a run's like any other, with ``start`` (the weights before the first step)
    and ``before.json`` in it. Raises ``ValueError``, before any training, as :func:`open_base`, :func:`fine_tuning` and
    :func:`gatelab.train.loop.train` do.
    """
    require_folder(cache)
    require_folder(folder)
    if folder.resolve() == Path(name).resolve():
        raise ValueError(f"{folder} is the model that is fine-tuned; choose another folder")
    base = open_base(name)
    settings = fine_tuning(name, base, chats, epochs, words)
    start = folder / START_WEIGHTS
    settings = started_from(settings, start)
    RunFolder(folder).require_same_settings(settings)
    keep_start(start, base.decoder)
    train(settings, folder, cache, watch)
    before = examine(settings, open_source(settings, cache))
    write_atomically(folder / BEFORE, json.dumps(before, indent=1, allow_nan=False) + "\n")
    assert settings.data.chats is not None
    return FineTuned(name, settings.data.chats, before, read_arm(folder))


def _beside(folder: Path, settings: RunSettings) -> dict[str, dict[str, str | None]]:
    """The tokenizer and the chat template that stand beside a model's weights; a run has its own BOS."""
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} has no tokenizer.json, without which no chat can be read; copy the model's there")
    config = tokenizer_config(folder)
    bos_token = token_of(config, "bos_token") or settings.data.tokenizer.bos_token
    has_template = (folder / TEMPLATE_FILE).is_file() or config.get("chat_template") is not None
    return {
        "chats": {"template": str(folder) if has_template else None},
        "tokenizer": {"path": str(folder / "tokenizer.json"), "bos_token": bos_token},
    }
