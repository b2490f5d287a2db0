"""The training loop: one function that reads from top to bottom, and the step it repeats."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from gatelab.diagnose.measure import measure
from gatelab.files import require_free_space
from gatelab.model.accounting import training_state_bytes
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.perplexity import token_nats
from gatelab.train import parallel
from gatelab.train.checkpoint import checkpoints, clean, load_checkpoint, save_checkpoint
from gatelab.train.evaluation import score
from gatelab.train.metrics import MetricsLog
from gatelab.train.optimizer import build_optimizer, set_learning_rate
from gatelab.train.result import conclude
from gatelab.train.run_folder import RunFolder, describe_environment
from gatelab.train.schedule import rate_factor
from gatelab.train.settings import RunSettings
from gatelab.train.source import Source, open_source
from gatelab.train.step import SumOfNats, take_step
from gatelab.train.throughput import Clock
from gatelab.train.watch import Unwatched, Watch


def train(settings: RunSettings, folder: Path, cache: Path, watch: Watch | None = None) -> dict[str, Any]:
    """Train one decoder in one folder and return its final figures; what is already there is continued.

    Killed at any moment and called again, it ends with the same bits as if it had never stopped (in deterministic mode,
    on the same torch, instruction set and threads). A finished run is returned at once. ``cache`` holds downloads and
    token shards. Raises ``ValueError`` before any work when the folder holds a run with other settings, data or
    environment, and :class:`DivergedError` when the loss or the gradient is no longer finite.
    """
    watch = watch or Unwatched()
    run = RunFolder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with _only_process_in(folder), parallel.deterministic_kernels(settings.train.deterministic):
        _require_resumable(run, settings)
        source = open_source(settings, cache, lambda stage, num_bytes: watch.message(stage) if not num_bytes else None)
        decoder, sum_of_nats, compiled = build(settings, watch)
        optimizer = build_optimizer(decoder, settings.train.optimizer)
        run.begin(settings, describe_environment(compiled), _describe_data(source))
        if run.result is not None:
            return run.result

        steps, evaluation = settings.train.steps, settings.train.evaluation
        done = _resume(run, decoder, optimizer)
        log = MetricsLog(run.metrics, done, settings.train.tensorboard)
        clock = Clock(settings)
        watch.start_run(folder.name, steps, done)
        if done == 0:
            _log_measurement(log, 0, decoder, source.measured_tokens(evaluation.measured_windows))
        while done < steps:
            clock.start()
            set_learning_rate(optimizer, rate_factor(done, steps, settings.train.schedule))
            loss, norm = take_step(decoder, optimizer, source.train.batch(done), sum_of_nats, settings.train)
            if not math.isfinite(loss) or not math.isfinite(norm):
                raise DivergedError(done + 1, loss, norm, run)
            done += 1
            seconds = clock.stop()
            rate = optimizer.param_groups[0]["lr"]
            log.write("step", done, loss=loss, gradient_norm=norm, learning_rate=rate, seconds=seconds)
            watch.update(done, loss, clock.tokens_per_second, clock.peak_share)
            if done % evaluation.every == 0 or done == steps:
                _log_evaluation(log, done, decoder, source, evaluation.windows)
            if done % evaluation.measure_every == 0 or done == steps:
                _log_measurement(log, done, decoder, source.measured_tokens(evaluation.measured_windows))
            if done % settings.train.checkpoint.every == 0 or done == steps:
                save_checkpoint(run.checkpoints, done, decoder, optimizer, settings.train.checkpoint.keep)
        log.close()
        result = conclude(run, settings, decoder, source, clock.peak_flops)
        watch.finish_run(_summary(result))
        return result


def build(settings: RunSettings, watch: Watch | None = None) -> tuple[Decoder, SumOfNats, bool]:
    """The initialised decoder of a run, its loss function, and whether they are compiled.

    Without a C++ compiler they are not, and ``watch`` is told so.
    """
    if settings.train.threads:
        torch.set_num_threads(settings.train.threads)
    parallel.keep_freed_memory()
    dtype = getattr(torch, settings.train.precision)
    decoder = Decoder(settings.model)
    initialize(decoder, settings.train.seed)
    decoder.to(torch.promote_types(dtype, torch.float32))
    decoder.activation_dtype = dtype

    def sum_of_nats(state: Tensor, targets: Tensor) -> Tensor:
        return token_nats(decoder.logits(state), targets).sum()

    if settings.train.recompute:
        parallel.recompute_layers(decoder)
    compiled = settings.train.compile and parallel.has_cpp_compiler()
    if settings.train.compile and not compiled and watch is not None:
        watch.message("No C++ compiler was found, so nothing is compiled; training is slower and its result the same.")
    if not compiled:
        return decoder, sum_of_nats, False
    parallel.compile_layers(decoder)
    return decoder, parallel.compile_loss(sum_of_nats), True


class DivergedError(ArithmeticError):
    """The loss or the gradient of a step is not finite; the weights are those of the step before."""

    def __init__(self, step: int, loss: float, norm: float, run: RunFolder):
        saved = checkpoints(run.checkpoints)
        where = f"the last good checkpoint is {saved[-1]}" if saved else "no checkpoint was saved before it"
        super().__init__(
            f"step {step} has loss {loss} and gradient norm {norm}: training stopped; {where}. "
            "A lower train.optimizer.learning_rate or a longer warm-up often helps"
        )
        self.step = step


def _only_process_in(folder: Path) -> Any:
    try:
        return FileLock(folder / ".lock").acquire(timeout=0)
    except Timeout:
        raise ValueError(f"another process is training in {folder}; wait for it or choose another folder") from None


def _require_resumable(run: RunFolder, settings: RunSettings) -> None:
    resume = settings.train.checkpoint.resume
    if resume == "never" and run.is_started:
        raise ValueError(f"{run.path} already holds a run and train.checkpoint.resume is never; choose another folder")
    if resume == "required" and not run.is_started:
        raise ValueError(f"{run.path} holds no run to continue and train.checkpoint.resume is required; set it to auto")
    clean(run.checkpoints)
    missing = settings.train.checkpoint.keep + 1 - len(checkpoints(run.checkpoints))
    require_free_space(run.path, missing * training_state_bytes(settings.model) * 3 // 4, "the checkpoints of this run")


def _resume(run: RunFolder, decoder: Decoder, optimizer: torch.optim.Optimizer) -> int:
    saved = checkpoints(run.checkpoints)
    return load_checkpoint(saved[-1], decoder, optimizer) if saved else 0


def _describe_data(source: Source) -> dict[str, Any]:
    domains = list(source.heldout)
    return {"fingerprint": source.fingerprint, "heldout": domains, "attributions": list(source.attributions)}


def _log_evaluation(log: MetricsLog, done: int, decoder: Decoder, source: Source, num_windows: int) -> None:
    began = time.perf_counter()
    for name, domain in source.heldout.items():
        figures = score(decoder, domain, num_windows).figures()
        log.write("evaluation", done, domain=name, **figures, seconds=time.perf_counter() - began)


def _log_measurement(log: MetricsLog, done: int, decoder: Decoder, tokens: Tensor) -> None:
    began = time.perf_counter()
    summary = measure(decoder, tokens, causal=decoder.settings.causal).summary()
    log.write("measurement", done, **summary, seconds=time.perf_counter() - began)


def _summary(result: dict[str, Any]) -> str:
    name, figures = next(iter(result["heldout"].items()))
    return f"{name}: held-out perplexity {figures['perplexity']:.2f}, {result['tokens_per_second']:,.0f} tokens/s"
