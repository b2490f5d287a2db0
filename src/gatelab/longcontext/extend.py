"""A trained run with a longer context: trained on with another rotary base, or by YaRN without training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from gatelab.data.prepare import prepare
from gatelab.data.tokenizer import Tokenizer
from gatelab.evaluate.models import OpenedModel, open_model
from gatelab.evaluate.position_loss import Texts, held_out_texts
from gatelab.files import atomic_path, require_folder
from gatelab.model.decoder import Decoder, with_rope
from gatelab.model.settings import RopeScaling, RopeSettings
from gatelab.settings import Settings
from gatelab.train.checkpoint import checkpoints, load_decoder, save_checkpoint, step_of
from gatelab.train.loop import train
from gatelab.train.optimizer import build_optimizer
from gatelab.train.run_folder import RunFolder
from gatelab.train.settings import RunSettings
from gatelab.train.start import keep_start, weights_checksum
from gatelab.train.training_on import started_from, training_on
from gatelab.train.watch import Watch

START = "start"
DEFAULT_SHARE = 0.1  # of the run's own tokens
BEFORE = "before"


class Extension(Settings):
    """What is asked for: with ``yarn`` a factor and no training, else training on."""

    context: int = Field(gt=0, description="tokens, more than were trained at")
    rope_base: float | None = Field(default=None, gt=1, description="rotary base to train on with; as before when None")
    train_tokens: int | None = Field(
        default=None, gt=0, description="tokens to train on; a tenth of the run's own when None"
    )
    yarn: float | None = Field(default=None, description="YaRN's factor s")
    texts: int = Field(default=16, gt=0, description="held-out texts that are read by position")


class BaseRun(NamedTuple):
    """A trained run: its newest checkpoint's decoder, and the settings that it was trained with."""

    folder: RunFolder
    checkpoint: Path
    decoder: Decoder
    settings: RunSettings


class Extended(NamedTuple):
    """What came of an extension: the run it started from and the new one, and what both are compared on.

    ``models`` are open and read ``settings.data.context`` tokens, or as many as YaRN was asked for; the first is the
    model as it was, the last the new one.
    """

    base: BaseRun
    settings: RunSettings
    extension: Extension
    texts: Texts
    models: dict[str, OpenedModel]


def open_base_run(name: str) -> BaseRun:
    """The run in a folder; ``ValueError`` for what is no run on text, or has no checkpoint yet."""
    run = RunFolder(Path(name))
    if not run.is_started:
        raise ValueError(f"{name} is no run folder of GateLab; a context is extended from what gatelab train wrote")
    saved = checkpoints(run.checkpoints)
    if not saved:
        raise ValueError(f"the run in {name} has no checkpoint yet; train it until it has saved one")
    settings = run.settings
    if not settings.model.causal:
        raise ValueError(f"{name} is an encoder, whose later tokens are seen; a decoder's context is extended")
    if settings.data.synthetic is not None:
        raise ValueError(f"the run in {name} was trained on a synthetic task; train one at the longer context instead")
    if settings.data.chats is not None:
        raise ValueError(f"the run in {name} was trained on chats; extend the run that it started from, then fine-tune")
    return BaseRun(run, saved[-1], load_decoder(saved[-1]), settings)


def extended_settings(base: BaseRun, extension: Extension, words: Sequence[str] = ()) -> RunSettings:
    """The settings of the extended run, not yet with the weights that it starts from.

    Trained on, it reads as many tokens a step as before, in rows of the new context, from the rate at which a cosine
    ends, through a warm-up of a tenth, to a tenth of it. ``words`` are assignments to ``train.*``, applied last. Raises
    ``ValueError``, before any work, for what can't be asked of this run.
    """
    settings, context = base.settings, extension.context
    trained = settings.data.context
    if context <= trained:
        raise ValueError(f"--context {context} is not above the {trained} tokens that the run was trained at")
    if extension.yarn is not None:
        if extension.rope_base is not None or extension.train_tokens is not None or words:
            raise ValueError("--yarn trains nothing; extend the run by training first, then extend the result by YaRN")
        rope = yarn_rope(base, extension.yarn, context)
        return settings.model_copy(update={"model": settings.model.with_rope(rope, context)})
    rope = settings.model.long_rope.model_copy(
        update={} if extension.rope_base is None else {"base": extension.rope_base}
    )
    model = settings.model.with_rope(rope, max(context, settings.model.max_context))
    return _trained_on(settings.model_copy(update={"model": model}), extension, words)


def yarn_rope(base: BaseRun, factor: float, context: int) -> RopeSettings:
    """The run's rotation with YaRN; ``ValueError`` for a factor that stretches nothing, or not as far as ``context``.

    The original context is the one that was trained at.
    """
    rope, trained = base.settings.model.long_rope, base.settings.data.context
    if factor <= 1:
        raise ValueError(f"--yarn {factor:g} stretches nothing; give a factor above 1, such as {context / trained:g}")
    if rope.scaling is not None:
        raise ValueError(
            f"{base.folder.path} has {rope.scaling.kind} scaling by {rope.scaling.factor:g} already; extend the run "
            "that it was made from by a larger factor"
        )
    if factor * trained < context:
        raise ValueError(
            f"--yarn {factor:g} stretches {trained} tokens to {factor * trained:g}, less than --context {context}; "
            f"give --yarn {context / trained:g}"
        )
    scaling = RopeScaling(kind="yarn", factor=factor, original_context=trained)
    return rope.model_copy(update={"scaling": scaling})


def extend(
    name: str,
    extension: Extension,
    folder: Path,
    cache: Path,
    words: Sequence[str] = (),
    watch: Watch | None = None,
) -> Extended:
    """Extend a run into the run folder ``folder`` and open it beside what it was; called again, it continues.

    The folder opens, trains on, converts and extends like any run's; one that was not trained (YaRN) has no metrics.
    Raises ``ValueError``, before long work, as :func:`extended_settings`, :func:`held_out_texts` and
    :func:`gatelab.train.loop.train` do.
    """
    base = open_base_run(name)
    settings = extended_settings(base, extension, words)
    require_folder(cache)
    require_folder(folder)
    if folder.resolve() == base.folder.path.resolve():
        raise ValueError(f"{folder} is the run that is extended; choose another folder")
    texts = _read_texts(base, extension, cache)
    changed = with_rope(base.decoder, settings.model.long_rope, settings.model.max_context)
    if extension.yarn is not None:
        _write_run(base, changed, settings, folder)
    else:
        settings = started_from(settings, folder / START)
        keep_start(folder / START, changed)
        train(settings, folder, cache, watch)
    return Extended(base, settings, extension, texts, _models(base, extension, folder))


def _trained_on(settings: RunSettings, extension: Extension, words: Sequence[str]) -> RunSettings:
    fixed = ("train.start_from", "train.steps")
    for word in words:
        if not word.startswith("train.") or word.startswith(fixed):
            raise ValueError(f"{word!r} can't be set: only train.* can, without start_from and steps (--train-tokens)")
    own = settings.train.steps * settings.tokens_per_step
    num_tokens = extension.train_tokens or round(DEFAULT_SHARE * own)
    data = settings.to_mapping()
    data["data"]["context"] = extension.context
    batch = {"sequences_per_step": max(1, settings.tokens_per_step // extension.context), "accumulation": 1}

    def run_of(steps: int) -> RunSettings:
        changes = training_on(settings.train, steps).to_mapping() | batch
        return RunSettings.parse(data | {"train": changes}).with_overrides(words)

    tokens_per_step = run_of(num_tokens).tokens_per_step
    steps = num_tokens // tokens_per_step
    if steps < 1:
        raise ValueError(
            f"--train-tokens {num_tokens} is less than one step of {tokens_per_step} tokens; give more, or a smaller "
            "train.sequences_per_step"
        )
    return run_of(steps)


def _read_texts(base: BaseRun, extension: Extension, cache: Path) -> Texts:
    """Held-out text of the run's first domain."""
    prepared = prepare(base.settings.data, cache)
    tokens = next(iter(prepared.heldout.values()))
    return held_out_texts(tokens, prepared.tokenizer.bos_id, extension.context, extension.texts)


def _write_run(base: BaseRun, decoder: Decoder, settings: RunSettings, folder: Path) -> None:
    """A run folder with one checkpoint of the same step, its optimizer at the start; or make sure that it is there."""
    run = RunFolder(folder)
    if run.is_started:
        run.require_same_settings(settings)
        there = load_decoder(checkpoints(run.checkpoints)[-1])
        if weights_checksum(there.state_dict()) != weights_checksum(decoder.state_dict()):
            raise ValueError(f"{folder} holds other weights than the run's; choose another folder for this extension")
        return
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} holds other files; choose another folder")
    tokenizer = Tokenizer.load(base.folder.tokenizer, settings.data.tokenizer.bos_token)
    with atomic_path(folder) as temporary:
        new = RunFolder(temporary)
        new.begin(settings, base.folder.environment, base.folder.data, tokenizer)
        optimizer = build_optimizer(decoder, settings.train.optimizer)
        save_checkpoint(new.checkpoints, step_of(base.checkpoint), decoder, optimizer, keep=1)


def _models(base: BaseRun, extension: Extension, folder: Path) -> dict[str, OpenedModel]:
    """The model as it was, where it was trained on also with YaRN in place of training, and the new one."""
    before, after = open_model(str(base.folder.path)), open_model(str(folder))
    ropes = {BEFORE: base.settings.model.long_rope}
    if extension.yarn is None and ropes[BEFORE].scaling is None:
        factor = extension.context / base.settings.data.context
        ropes[f"{BEFORE}, YaRN {factor:g}"] = yarn_rope(base, factor, extension.context)
    models = {label: _reading(before, rope, extension.context) for label, rope in ropes.items()}
    name = f"YaRN {extension.yarn:g}" if extension.yarn is not None else f"trained on at {extension.context}"
    return models | {name: after}


def _reading(opened: OpenedModel, rope: RopeSettings, context: int) -> OpenedModel:
    """The same weights with another rotation, reading up to ``context`` tokens."""
    assert isinstance(opened.model, Decoder)
    model: Any = with_rope(opened.model, rope, context)
    return dataclasses.replace(opened, model=model, max_context=context)
