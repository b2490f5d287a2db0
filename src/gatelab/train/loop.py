"""The training loop: one function that reads from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from gatelab.data.loader import rows_in_pieces
from gatelab.files import kept_if_used, remove_leftovers, require_folder, require_free_space
from gatelab.model.accounting import training_state_bytes
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.perplexity import token_nats
from gatelab.train.checkpoint import checkpoints, load_checkpoint, path_of_step
from gatelab.train.divergence import NonfiniteSteps, require_finite
from gatelab.train.evaluation import measure_heldout, score
from gatelab.train.metrics import Log, MetricsLog, SpikeMonitor, UnwrittenLog, read_metrics
from gatelab.train.optimizer import build_optimizer, set_learning_rate
from gatelab.train.parallel import compilation, process
from gatelab.train.parallel.mesh import ALONE, Ranks, find_device, require_divisible, running_ranks
from gatelab.train.parallel.placement import place, whole_decoder
from gatelab.train.result import conclude
from gatelab.train.run_folder import RunFolder, describe_environment
from gatelab.train.saver import CheckpointSaver
from gatelab.train.schedule import rate_factor
from gatelab.train.settings import RunSettings
from gatelab.train.source import Source, open_source
from gatelab.train.start import load_start, require_start, start_checksum
from gatelab.train.step import SumOfNats, take_step
from gatelab.train.throughput import Clock
from gatelab.train.watch import Unwatched, Watch


def train(settings: RunSettings, folder: Path, cache: Path, watch: Watch | None = None) -> dict[str, Any]:
    """Train one decoder in one folder and return its final figures; what is already there is continued.

    Killed at any moment and called again, it ends with the same bits as if it had never stopped (in deterministic mode,
    on the same torch, instruction set and threads). A finished run is returned at once. ``cache`` holds downloads and
    token shards. Every rank that torchrun started calls this; the first alone writes, and shows ``watch`` the run.
    Raises ``ValueError`` before any work, and leaves nothing behind, when the folder holds a study, part
    of a run, or a run with other settings, data or environment; ``OSError`` when the disk is full or read-only; and
    :class:`~gatelab.train.divergence.DivergedError` when a loss, a gradient or a measured figure is no longer finite
    (for a loss or a gradient see ``train.on_nonfinite``).
    """
    with (
        running_ranks(settings.train.parallel, find_device(settings.train.device)) as ranks,
        process.deterministic_kernels(settings.train.deterministic),
        process.cpu_threads(settings.train.threads),
    ):
        watch = watch if watch is not None and ranks.is_first else Unwatched()
        run = RunFolder(folder)
        require_divisible(settings.model, settings.train.parallel)
        rows_in_pieces(settings.train.sequences_per_step, 0, ranks.num_data_ranks, settings.train.accumulation)
        with run.explained(cache), _prepared_folder(run, settings, cache) if ranks.is_first else nullcontext():
            return _train(run, settings, _open(settings, cache, watch, ranks), watch, ranks)


def _train(run: RunFolder, settings: RunSettings, source: Source, watch: Watch, ranks: Ranks) -> dict[str, Any]:
    """The run itself, on one rank, once its folder and data are ready."""
    steps, evaluation, checkpoint = settings.train.steps, settings.train.evaluation, settings.train.checkpoint
    data = _describe_data(source, settings.train.start_from)
    run.require_same_data(data)
    if run.result is not None:
        return run.result
    compiled = _can_compile(settings, watch)
    if ranks.is_first:
        environment = describe_environment(compiled, ranks.device)
        run.begin(settings, environment, data, source.tokenizer, source.chat_template)
    state = _begin(run, settings, compiled, ranks)
    done = state.done
    clock = Clock(settings, ranks.device)
    watch.start_run(run.path.name, steps, done)
    with (
        closing(_open_log(run, done, settings, ranks)) as log,
        closing(CheckpointSaver(run.checkpoints, checkpoint, ranks)) as saver,
    ):
        nonfinite = NonfiniteSteps(run, settings.train, done, saver.wait)
        spikes = SpikeMonitor(read_metrics(run.metrics, "step") if ranks.is_first else ())
        if done == 0:
            _measure(run, log, done, state.decoder, source, evaluation.measured_windows, ranks)
            if settings.train.start_from is not None:
                _evaluate(run, log, done, state.decoder, source, evaluation.windows, ranks)
        while done < steps:
            clock.start()
            set_learning_rate(state.optimizer, rate_factor(done, steps, settings.train.schedule))
            batch = source.train.batch(done, ranks.data_rank, ranks.num_data_ranks, settings.train.accumulation)
            batch = batch.to(ranks.device)
            figures = take_step(state.decoder, state.optimizer, batch, state.sum_of_nats, settings.train, ranks)
            seconds = clock.stop()
            event = nonfinite.event(done, figures._asdict())
            done += 1
            if event is not None:
                log.write("event", done, **event)
                _pass_over(run, done, event, state, watch, ranks)
            else:
                if spikes.add(done, figures.loss):
                    watch.message(f"step {done:,} has loss {figures.loss:.3f}, spike number {spikes.count} of this run")
                log.write("step", done, **figures._asdict(), loss_spikes_live=spikes.count, seconds=seconds)
                watch.update(done, figures.loss, clock.tokens_per_second, clock.peak_share)
            if done % evaluation.every == 0 or done == steps:
                _evaluate(run, log, done, state.decoder, source, evaluation.windows, ranks)
            if done % evaluation.measure_every == 0 or done == steps:
                _measure(run, log, done, state.decoder, source, evaluation.measured_windows, ranks)
            if done % checkpoint.every == 0 or done == steps:
                log.flush_to_disk()
                saver.save(done, state.decoder, state.optimizer)
    result = conclude(run, settings, state.decoder, source, clock.peak_flops, ranks)
    watch.finish_run(_summary(result))
    return result


class _State(NamedTuple):
    """What trains on this rank, after ``done`` steps."""

    decoder: Decoder
    optimizer: torch.optim.Optimizer
    sum_of_nats: SumOfNats
    done: int


def build(settings: RunSettings, compiled: bool, ranks: Ranks = ALONE) -> tuple[Decoder, SumOfNats]:
    """A run's decoder with its weights before the first step, spread over the ranks, and its loss function."""
    decoder = _first_decoder(settings).to(ranks.device)
    place(decoder, settings.train, ranks, compiled)

    def sum_of_nats(state: Tensor, targets: Tensor) -> Tensor:
        return token_nats(decoder.logits(state), targets).sum()

    return decoder, compilation.compile_loss(sum_of_nats) if compiled else sum_of_nats


def _first_decoder(settings: RunSettings) -> Decoder:
    process.keep_freed_memory()
    dtype = getattr(torch, settings.train.precision)
    decoder = Decoder(settings.model)
    if settings.train.start_from is None:
        initialize(decoder, settings.train.seed)
    decoder.to(torch.promote_types(dtype, torch.float32))
    if settings.train.start_from is not None:
        load_start(Path(settings.train.start_from), decoder)
    decoder.activation_dtype = dtype
    return decoder


def _begin(run: RunFolder, settings: RunSettings, compiled: bool, ranks: Ranks) -> _State:
    """The state before the first step, or that of the newest checkpoint."""
    decoder, sum_of_nats = build(settings, compiled, ranks)
    optimizer = build_optimizer(decoder, settings.train.optimizer)
    saved = checkpoints(run.checkpoints)
    done = load_checkpoint(saved[-1], decoder, optimizer, ranks) if saved else 0
    return _State(decoder, optimizer, sum_of_nats, done)


def _pass_over(run: RunFolder, done: int, event: dict[str, Any], state: _State, watch: Watch, ranks: Ranks) -> None:
    """Go on without the update of step ``done``, from the weights before it or those of the event's checkpoint."""
    text = f"step {done:,} has loss {event['loss']}, gradient norm {event['gradient_norm']}: its update is skipped"
    if "checkpoint" in event:
        load_checkpoint(path_of_step(run.checkpoints, event["checkpoint"]), state.decoder, state.optimizer, ranks)
        text += f", and the weights are those after step {event['checkpoint']:,} again"
    watch.message(text)


@contextmanager
def _prepared_folder(run: RunFolder, settings: RunSettings, cache: Path) -> Iterator[None]:
    """The run's folder, locked and found fit to begin or go on; it is gone again if nothing is kept in it."""
    run.require_whole()
    require_folder(cache)
    with kept_if_used(run.path, run.path / ".lock", lock=_only_process_in(run.path)):
        _require_resumable(run, settings)
        yield


def _open(settings: RunSettings, cache: Path, watch: Watch, ranks: Ranks) -> Source:
    """The run's data, which the first rank prepares for all."""
    if not ranks.is_first:
        ranks.wait()
    source = open_source(settings, cache, lambda stage, num_bytes: watch.message(stage) if not num_bytes else None)
    if ranks.is_first:
        ranks.wait()
    return source


def _open_log(run: RunFolder, done: int, settings: RunSettings, ranks: Ranks) -> Log:
    return MetricsLog(run.metrics, done, settings.train.tensorboard) if ranks.is_first else UnwrittenLog()


@contextmanager
def _only_process_in(folder: Path) -> Iterator[None]:
    try:
        lock = FileLock(folder / ".lock").acquire(timeout=0)
    except Timeout:
        raise ValueError(f"another process is training in {folder}; wait for it or choose another folder") from None
    with lock:
        yield


def _require_resumable(run: RunFolder, settings: RunSettings) -> None:
    """Refuse what can't begin or go on, before any work; remove what an interrupted process left half-written."""
    resume = settings.train.checkpoint.resume
    if resume == "never" and run.is_started:
        raise ValueError(f"{run.path} already holds a run and train.checkpoint.resume is never; choose another folder")
    if resume == "required" and not run.is_started:
        raise ValueError(f"{run.path} holds no run to continue and train.checkpoint.resume is required; set it to auto")
    run.require_same_settings(settings)
    if settings.train.start_from is not None:
        require_start(Path(settings.train.start_from), settings.model)
    remove_leftovers(run.path)
    remove_leftovers(run.checkpoints)
    if run.result is None:
        missing = settings.train.checkpoint.keep + 1 - len(checkpoints(run.checkpoints))
        width = 2 if settings.train.precision == "float64" else 1
        num_bytes = missing * width * training_state_bytes(settings.model) * 3 // 4
        require_free_space(run.path, num_bytes, "keeping the checkpoints of this run")


def _can_compile(settings: RunSettings, watch: Watch) -> bool:
    """Whether the run is compiled; a user who asked for it and has no compiler is told so."""
    if not settings.train.compile:
        return False
    if not compilation.has_cpp_compiler():
        watch.message(
            "Nothing is compiled, because no C++ compiler with Python's headers was found: training is slower, and "
            "its result is the same up to rounding."
        )
        return False
    return True


def _describe_data(source: Source, start_from: str | None) -> dict[str, Any]:
    data = {
        "fingerprint": source.fingerprint,
        "heldout": list(source.heldout),
        "attributions": list(source.attributions),
    }
    return data if start_from is None else data | {"start_weights": start_checksum(Path(start_from))}


def _evaluate(
    run: RunFolder, log: Log, done: int, decoder: Decoder, source: Source, num_windows: int, ranks: Ranks
) -> None:
    for name, domain in source.heldout.items():
        began = time.perf_counter()
        figures = score(decoder, domain, num_windows, ranks).figures()
        require_finite(run, done, f"the evaluation on {name} after step {done}", figures)
        log.write("evaluation", done, domain=name, **figures, seconds=time.perf_counter() - began)


def _measure(
    run: RunFolder, log: Log, done: int, decoder: Decoder, source: Source, num_windows: int, ranks: Ranks
) -> None:
    """Measure the whole model on the first rank, while the others wait."""
    began = time.perf_counter()
    whole = whole_decoder(decoder, ranks)
    if whole is not None:
        summary = measure_heldout(whole, source, num_windows).summary()
        require_finite(run, done, f"the measurement after step {done}", summary)
        log.write("measurement", done, **summary, seconds=time.perf_counter() - began)
    ranks.wait()


def _summary(result: dict[str, Any]) -> str:
    name, figures = next(iter(result["heldout"].items()))
    return f"{name}: held-out perplexity {figures['perplexity']:.2f}, {result['tokens_per_second']:,.0f} tokens/s"
