"""A gate added to a trained decoder: trained on with it and, for comparison, without it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gatelab.data.settings import DataSettings
from gatelab.files import require_folder, write_atomically
from gatelab.gates.variants import Variant, find_variant
from gatelab.interop.add_gate import GatedStart, add_gate
from gatelab.interop.loading import load
from gatelab.model.decoder import Decoder
from gatelab.study.gate_movement import GateMovement, gate_movement
from gatelab.study.runner import ArmRun, read_arm
from gatelab.train.checkpoint import checkpoints, load_decoder
from gatelab.train.evaluation import measure_heldout, score
from gatelab.train.loop import build, train
from gatelab.train.parallel.process import cpu_threads, deterministic_kernels
from gatelab.train.run_folder import RunFolder
from gatelab.train.settings import RunSettings
from gatelab.train.source import Source, open_source
from gatelab.train.start import keep_start
from gatelab.train.training_on import started_from, training_on
from gatelab.train.watch import Watch

WITHOUT, WITH = "without_gate", "with_gate"
STARTS, BEFORE, START, MOVEMENT = "starts", "before.json", "start.json", "movement.json"


class Base(NamedTuple):
    """A trained decoder and the settings of the run that trained it."""

    decoder: Decoder
    settings: RunSettings


class AddedGate(NamedTuple):
    """What came of it. ``before`` has ``heldout`` and ``measurement`` of the decoder as it was, on the arms' text.

    ``starts`` says of each gate how it was added (``gate``, ``score``, ``score_error``, ``logit_error``).
    """

    gate: str
    starts: list[dict[str, Any]]
    before: dict[str, Any]
    without: ArmRun
    gated: ArmRun
    movement: list[GateMovement]


def open_base(name: str) -> Base:
    """A run's newest checkpoint with the run's settings, or any other model that GateLab loads, in float32.

    A model without a run is trained on with the default settings, and with its own ``tokenizer.json``; what they should
    be instead (``data.train``, ``data.tokenizer.bos_token``) goes to :func:`continuation`. Raises ``ValueError`` for a
    run without a checkpoint, and as :func:`gatelab.interop.loading.load` does.
    """
    run = RunFolder(Path(name))
    if not run.is_started:
        decoder = load(name).float()
        context = min(DataSettings().context, decoder.settings.max_context)
        data = {"tokenizer": {"path": name}, "context": context}
        return Base(decoder, RunSettings.parse({"model": decoder.settings.to_mapping(), "data": data}))
    saved = checkpoints(run.checkpoints)
    if not saved:
        raise ValueError(f"the run in {name} has no checkpoint yet; train it until it has saved one")
    return Base(load_decoder(saved[-1]), run.settings)


def continuation(settings: RunSettings, steps: int, gate_rate_scale: float, words: Sequence[str] = ()) -> RunSettings:
    """Settings as :func:`training_on` has them.

    Gates have ``gate_rate_scale`` times the others' learning rate and no weight decay. ``words`` are assignments such
    as ``train.sequences_per_step=8``, applied last. Raises ``ValueError`` for one that changes the model or the start.
    """
    for word in words:
        if word.startswith(("model.", "train.start_from")):
            raise ValueError(f"{word!r} would change what the gate is added to; only data.* and train.* can be set")
    if steps < 1 or gate_rate_scale <= 0:
        raise ValueError(f"steps={steps} with gate_rate_scale={gate_rate_scale:g} trains nothing; both are above 0")
    data = settings.to_mapping() | {"train": training_on(settings.train, steps).to_mapping()}
    optimizer = data["train"]["optimizer"]
    optimizer |= {"gate_learning_rate": gate_rate_scale * optimizer["learning_rate"], "gate_weight_decay": 0.0}
    return RunSettings.parse(data).with_overrides(words)


def start_with_gate(decoder: Decoder, gate: str, seed: int = 0) -> list[GatedStart]:
    """Add the gates of a named variant, one after the other: the last start's decoder has them all.

    Raises ``ValueError`` for ``none``, for a control, and as :func:`add_gate` does.
    """
    variant = find_variant(gate)
    _require_gates(gate, variant)
    starts: list[GatedStart] = []
    for one in variant.gates:
        starts.append(add_gate(starts[-1].decoder if starts else decoder, one, seed))
    return starts


def write_starts(base: Base, gate: str, folder: Path, seed: int = 0) -> list[GatedStart]:
    """Write what both arms start from: ``starts/without_gate``, ``starts/with_gate`` and ``start.json``.

    Each is a folder that ``train.start_from`` and :func:`gatelab.interop.loading.load` take. Raises ``ValueError`` as
    :func:`start_with_gate` does, and when the folder holds a run or other weights to start from.
    """
    require_folder(folder)
    if RunFolder(folder).is_started:
        raise ValueError(f"{folder} holds a run; choose another folder for what is trained from it")
    starts = start_with_gate(base.decoder, gate, seed)
    keep_start(folder / STARTS / WITHOUT, base.decoder)
    keep_start(folder / STARTS / WITH, starts[-1].decoder)
    _write_json(folder / START, {"gate": gate, "starts": [_facts(start) for start in starts]})
    return starts


def add_and_train(
    base: Base, gate: str, settings: RunSettings, folder: Path, cache: Path, watch: Watch | None = None
) -> AddedGate:
    """Train the decoder on, without and with a gate, from equal weights on equal batches; again to continue.

    ``settings`` are those of :func:`continuation`. Writes what :func:`write_starts` does, a run folder for each arm,
    ``before.json`` and ``movement.json``. Raises ``ValueError``, before any training, as :func:`write_starts` and
    :func:`gatelab.train.loop.train` do.
    """
    require_folder(cache)
    starts = write_starts(base, gate, folder, settings.train.seed)
    without = _arm(settings, base.decoder, folder / STARTS / WITHOUT)
    train(without, folder / WITHOUT, cache, watch)
    train(_arm(settings, starts[-1].decoder, folder / STARTS / WITH), folder / WITH, cache, watch)
    source = open_source(without, cache)
    before = examine(without, source)
    after = load_decoder(checkpoints(RunFolder(folder / WITH).checkpoints)[-1])
    windows = source.measured_windows(settings.train.evaluation.final_measured_windows)
    movement = gate_movement(starts[-1].decoder, after, windows)
    _write_json(folder / BEFORE, before)
    _write_json(folder / MOVEMENT, [one._asdict() for one in movement])
    arms = read_arm(folder / WITHOUT), read_arm(folder / WITH)
    return AddedGate(gate, [_facts(start) for start in starts], before, *arms, movement)


def _arm(settings: RunSettings, decoder: Decoder, start: Path) -> RunSettings:
    return started_from(settings.model_copy(update={"model": decoder.settings}), start)


def _require_gates(name: str, variant: Variant) -> None:
    if variant.control is not None:
        raise ValueError(f"{name} is a control without a gate, and changes the model from its first step; name a gate")
    if not variant.gates:
        raise ValueError(f"gate {name!r} adds nothing; name a gate, such as sdpa_elementwise_identity_start")


def examine(settings: RunSettings, source: Source) -> dict[str, Any]:
    """Held-out figures and measurement of the weights before the first step, as the end of a run has them."""
    with deterministic_kernels(settings.train.deterministic), cpu_threads(settings.train.threads):
        decoder, _ = build(settings, compiled=False)
        heldout = {name: score(decoder, domain).figures() for name, domain in source.heldout.items()}
        measurement = measure_heldout(decoder, source, settings.train.evaluation.final_measured_windows)
    return {"heldout": heldout, "measurement": measurement.to_mapping()}


def _facts(start: GatedStart) -> dict[str, Any]:
    figures = {name: getattr(start, name) for name in ("score", "score_error", "logit_error")}
    return {"gate": start.gate.to_mapping(), **figures}


def _write_json(path: Path, content: Any) -> None:
    write_atomically(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
