"""The training loop: one function that reads from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from gatelab.diagnose.measure import measure
from gatelab.files import kept_if_used, remove_leftovers, require_folder, require_free_space
from gatelab.model.accounting import training_state_bytes
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.perplexity import token_nats
from gatelab.train import parallel
from gatelab.train.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from gatelab.train.divergence import require_finite
from gatelab.train.evaluation import score
from gatelab.train.metrics import MetricsLog, SpikeMonitor, read_metrics
from gatelab.train.optimizer import build_optimizer, set_learning_rate
from gatelab.train.result import conclude
from gatelab.train.run_folder import RunFolder, describe_environment
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
    token shards. Raises ``ValueError`` before any work, and leaves nothing behind, when the folder holds a study, part
    of a run, or a run with other settings, data or environment, and
    :class:`~gatelab.train.divergence.DivergedError` when a loss, a gradient or a measured figure is no longer finite.
    """
    watch = watch or Unwatched()
    run, steps, evaluation = RunFolder(folder), settings.train.steps, settings.train.evaluation
    run.require_whole()
    require_folder(cache)
    with (
        kept_if_used(folder, folder / ".lock", lock=_only_process_in(folder)),
        parallel.deterministic_kernels(settings.train.deterministic),
        parallel.cpu_threads(settings.train.threads),
    ):
        _require_resumable(run, settings)
        source = open_source(settings, cache, lambda stage, num_bytes: watch.message(stage) if not num_bytes else None)
        data = _describe_data(source, settings.train.start_from)
        run.require_same_data(data)
        if run.result is not None:
            return run.result
        compiled = _can_compile(settings, watch)
        run.begin(settings, describe_environment(compiled), data, source.tokenizer)

        decoder, sum_of_nats = build(settings, compiled)
        optimizer = build_optimizer(decoder, settings.train.optimizer)
        done = _resume(run, decoder, optimizer)
        clock = Clock(settings)
        watch.start_run(folder.name, steps, done)
        with closing(MetricsLog(run.metrics, done, settings.train.tensorboard)) as log:
            spikes = SpikeMonitor(read_metrics(run.metrics, "step"))
            if done == 0:
                _measure(run, log, done, decoder, source, evaluation.measured_windows)
                if settings.train.start_from is not None:
                    _evaluate(run, log, done, decoder, source, evaluation.windows)
            while done < steps:
                clock.start()
                set_learning_rate(optimizer, rate_factor(done, steps, settings.train.schedule))
                figures = take_step(decoder, optimizer, source.train.batch(done), sum_of_nats, settings.train)
                seconds = clock.stop()
                require_finite(run, done, f"step {done + 1}", figures._asdict())
                done += 1
                if spikes.add(done, figures.loss):
                    watch.message(f"step {done:,} has loss {figures.loss:.3f}, spike number {spikes.count} of this run")
                log.write("step", done, **figures._asdict(), loss_spikes_live=spikes.count, seconds=seconds)
                watch.update(done, figures.loss, clock.tokens_per_second, clock.peak_share)
                if done % evaluation.every == 0 or done == steps:
                    _evaluate(run, log, done, decoder, source, evaluation.windows)
                if done % evaluation.measure_every == 0 or done == steps:
                    _measure(run, log, done, decoder, source, evaluation.measured_windows)
                if done % settings.train.checkpoint.every == 0 or done == steps:
                    log.flush_to_disk()
                    save_checkpoint(run.checkpoints, done, decoder, optimizer, settings.train.checkpoint.keep)
        result = conclude(run, settings, decoder, source, clock.peak_flops)
        watch.finish_run(_summary(result))
        return result


def build(settings: RunSettings, compiled: bool) -> tuple[Decoder, SumOfNats]:
    """A run's decoder, with its weights before the first step, and its loss function."""
    parallel.keep_freed_memory()
    dtype = getattr(torch, settings.train.precision)
    decoder = Decoder(settings.model)
    if settings.train.start_from is None:
        initialize(decoder, settings.train.seed)
    decoder.to(torch.promote_types(dtype, torch.float32))
    if settings.train.start_from is not None:
        load_start(Path(settings.train.start_from), decoder)
    decoder.activation_dtype = dtype

    def sum_of_nats(state: Tensor, targets: Tensor) -> Tensor:
        return token_nats(decoder.logits(state), targets).sum()

    if settings.train.recompute:
        parallel.recompute_layers(decoder)
    if not compiled:
        return decoder, sum_of_nats
    parallel.compile_layers(decoder)
    return decoder, parallel.compile_loss(sum_of_nats)


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
    if not parallel.has_cpp_compiler():
        watch.message(
            "Nothing is compiled, because no C++ compiler with Python's headers was found: training is slower, and "
            "its result is the same up to rounding."
        )
        return False
    return True


def _resume(run: RunFolder, decoder: Decoder, optimizer: torch.optim.Optimizer) -> int:
    saved = checkpoints(run.checkpoints)
    return load_checkpoint(saved[-1], decoder, optimizer) if saved else 0


def _describe_data(source: Source, start_from: str | None) -> dict[str, Any]:
    data = {
        "fingerprint": source.fingerprint,
        "heldout": list(source.heldout),
        "attributions": list(source.attributions),
    }
    return data if start_from is None else data | {"start_weights": start_checksum(Path(start_from))}


def _evaluate(run: RunFolder, log: MetricsLog, done: int, decoder: Decoder, source: Source, num_windows: int) -> None:
    for name, domain in source.heldout.items():
        began = time.perf_counter()
        figures = score(decoder, domain, num_windows).figures()
        require_finite(run, done, f"the evaluation on {name} after step {done}", figures)
        log.write("evaluation", done, domain=name, **figures, seconds=time.perf_counter() - began)


def _measure(run: RunFolder, log: MetricsLog, done: int, decoder: Decoder, source: Source, num_windows: int) -> None:
    began = time.perf_counter()
    windows = source.measured_windows(num_windows)
    sets = source.query_sets(windows.inputs)
    summary = measure(decoder, windows.inputs, documents=windows.documents, query_sets=sets).summary()
    require_finite(run, done, f"the measurement after step {done}", summary)
    log.write("measurement", done, **summary, seconds=time.perf_counter() - began)


def _summary(result: dict[str, Any]) -> str:
    name, figures = next(iter(result["heldout"].items()))
    return f"{name}: held-out perplexity {figures['perplexity']:.2f}, {result['tokens_per_second']:,.0f} tokens/s"
