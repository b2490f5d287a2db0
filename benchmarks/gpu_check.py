"""What an accelerator makes of GateLab, in four minutes at most and without a network.

    python benchmarks/gpu_check.py [--size paper|toy] [--seconds 60] [--compile] [--out FILE.json]

- **Correctness.** Every named gate in a small decoder, bfloat16 against float64 with the same weights: relative error
  of logits and of the whole gradient, |x - y| / |y| over all numbers. Below ``LARGEST_ERROR`` it passes.
- **Step.** A training step (forward, backward, AdamW) at the layer shapes of the paper's 1.7B model, four of its
  layers, without a gate and with two; arms take turns, so that a ratio is that of one moment. Median ratio with a 95 %
  interval; share of the peak, which is the best of 20 matrix products in the same run.
- **Memory.** The highest allocation of a step beside what ``gatelab plan`` would say (accelerators alone).
- **Log-sum-exp.** Which fused kernel gives it for which dtype, and its error against the plain formula in float64.

Exit code 1 when something is wrong. The toy size is for processors and tests.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gatelab.diagnose.attention import attend
from gatelab.diagnose.calls import Visibility
from gatelab.diagnose.kernels import find_kernel
from gatelab.files import write_atomically
from gatelab.gates.variants import VARIANTS, find_variant
from gatelab.model.accounting import flops_per_token_training
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.perplexity import token_nats
from gatelab.model.settings import ModelSettings
from gatelab.recipes.table import resolve
from gatelab.study.overhead import MIN_ROUNDS, median_ratio
from gatelab.train.memory import memory_per_rank
from gatelab.train.optimizer import build_optimizer
from gatelab.train.parallel.compilation import compile_layers
from gatelab.train.settings import OptimizerSettings, RunSettings

ARMS = ("none", "sdpa_headwise", "sdpa_elementwise")
LARGEST_ERROR = 0.05
LARGEST_LSE_ERROR = 2e-2
WARM_UP_STEPS = 3
MOST_ROUNDS = 100


class Size(NamedTuple):
    """How large everything is."""

    step_words: tuple[str, ...]
    matrix: int
    probe_tokens: int


SIZES = {
    "paper": Size(("model.num_layers=4", "train.sequences_per_step=2"), 8192, 2048),
    "toy": Size(
        (
            "model.num_layers=2",
            "model.width=64",
            "model.head_size=8",
            "model.feedforward_width=96",
            "model.vocab_size=300",
            "data.tokenizer.vocab_size=300",
            "data.context=48",
            "train.sequences_per_step=2",
        ),
        64,
        50,
    ),
}


def check(size: Size, device: torch.device, seconds: float, compiled: bool = False) -> dict[str, Any]:
    """All figures; ``passed`` says whether every error is small. Steps stop after ``seconds``."""
    variants = [variant_errors(name, device) for name in VARIANTS]
    probes = [probe_lse(dtype, device, size.probe_tokens) for dtype in (torch.bfloat16, torch.float32)]
    peak = measure_peak(device, size.matrix)
    steps = time_steps(size, device, seconds, peak, compiled)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "compiled": compiled,
        "passed": all(row["passed"] for row in [*variants, *probes]),
        "peak_tflops": peak / 1e12,
        "variants": variants,
        "log_sum_exp": probes,
        "steps": steps,
    }


def variant_errors(name: str, device: torch.device) -> dict[str, Any]:
    """Relative errors of logits and gradient of a decoder with this gate, bfloat16 against float64."""
    variant = find_variant(name)
    settings = ModelSettings.parse(
        {
            "vocab_size": 97,
            "width": 64,
            "num_layers": 2,
            "num_heads": 6,
            "num_kv_heads": 2,
            "head_size": 16,
            "feedforward_width": 88,
            "max_context": 64,
            "init_std": 0.125,
            "gates": [gate.to_mapping() for gate in variant.gates],
            "control": None if variant.control is None else variant.control.to_mapping(),
        }
    )
    expected = _logits_and_gradient(settings, torch.float64, device)
    found = _logits_and_gradient(settings, torch.bfloat16, device)
    logits, gradient = (relative_error(x, y) for x, y in zip(found, expected, strict=True))
    passed = logits < LARGEST_ERROR and gradient < LARGEST_ERROR
    return {"variant": name, "logits": logits, "gradient": gradient, "passed": passed}


def relative_error(x: Tensor, y: Tensor) -> float:
    """|x - y| / |y| over all numbers; NaN counts as infinite."""
    error = float((x.double() - y.double()).norm() / y.double().norm())
    return error if error == error else float("inf")


def _logits_and_gradient(settings: ModelSettings, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    decoder = Decoder(settings)
    initialize(decoder, seed=0)
    decoder.to(device, torch.promote_types(dtype, torch.float32))
    decoder.activation_dtype = dtype
    ids = torch.randint(settings.vocab_size, (3, 50), generator=torch.Generator().manual_seed(1)).to(device)
    logits = decoder(ids[:, :-1])
    token_nats(logits, ids[:, 1:]).mean().backward()
    gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in decoder.parameters()]
    return logits.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def probe_lse(dtype: torch.dtype, device: torch.device, num_tokens: int) -> dict[str, Any]:
    """The kernel found for this dtype, and the largest error of its log-sum-exp at the paper's head sizes."""
    generator = torch.Generator().manual_seed(2)
    query, key, value = (
        torch.randn(1, num_tokens, heads, 128, generator=generator).to(device, dtype) for heads in (16, 8, 8)
    )
    kernel = find_kernel(device.type, dtype)
    scale = 128**-0.5
    _, lse = attend(query, key, value, scale=scale, visibility=Visibility(num_tokens, num_tokens))
    keys = key.double().repeat_interleave(2, 2)
    logits = torch.einsum("bthc,bshc->bhts", query.double(), keys) * scale
    logits.masked_fill_(~torch.ones_like(logits[0, 0], dtype=torch.bool).tril(), -torch.inf)
    error = float((lse.double() - logits.logsumexp(-1)).abs().max())
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "kernel": kernel.__name__.strip("_") if kernel else "plain formula",
        "largest_error": error,
        "passed": error < LARGEST_LSE_ERROR,
    }


def measure_peak(device: torch.device, size: int, repetitions: int = 20) -> float:
    """Operations a second of bfloat16 matrix products: the best of 20."""
    a = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    torch.mm(a, a)
    return 2 * size**3 / min(_seconds_of(lambda: torch.mm(a, a), device) for _ in range(repetitions))


def time_steps(
    size: Size, device: torch.device, seconds: float, peak: float, compiled: bool = False
) -> list[dict[str, Any]]:
    """A row for each arm: median time, its ratio to the ungated arm's, share of the peak, memory."""
    runs = {name: resolve("paper_dense_28l", [f"gate={name}", *size.step_words]) for name in ARMS}
    memory = {name: _memory(run, device) for name, run in runs.items()}
    steppers = {name: _stepper(run, device, compiled) for name, run in runs.items()}
    for _ in range(WARM_UP_STEPS):
        for stepper in steppers.values():
            _seconds_of(stepper, device)
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    began = time.perf_counter()
    for number in range(MOST_ROUNDS):
        if number >= MIN_ROUNDS and time.perf_counter() - began > seconds:
            break
        for name in sorted(ARMS, key=lambda name: (ARMS.index(name) + number) % len(ARMS)):
            times[name].append(_seconds_of(steppers[name], device))
    rows = []
    for name, run in runs.items():
        ratio, median = median_ratio(times[name], times["none"]), sorted(times[name])[len(times[name]) // 2]
        flops = run.tokens_per_step * flops_per_token_training(run.model, run.data.context)
        rows.append(
            {
                "gate": name,
                "rounds": len(times[name]),
                "milliseconds": 1e3 * median,
                "tokens_per_second": run.tokens_per_step / median,
                "ratio": ratio.value,
                "ratio_low": ratio.low,
                "ratio_high": ratio.high,
                "peak_share": flops / median / peak,
                **memory[name],
            }
        )
    return rows


def _memory(run: RunSettings, device: torch.device) -> dict[str, float | None]:
    """Bytes that were allocated at most in a first step alone on the device, and those of a plan."""
    planned = memory_per_rank(run, 1).total
    if device.type != "cuda":
        return {"planned_bytes": planned, "peak_bytes": None}
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    step = _stepper(run, device, compiled=False)
    step()
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return {"planned_bytes": planned, "peak_bytes": float(torch.cuda.max_memory_allocated(device) - before)}


def _stepper(run: RunSettings, device: torch.device, compiled: bool) -> Callable[[], object]:
    """One training step on random tokens."""
    decoder = Decoder(run.model)
    initialize(decoder, seed=0)
    decoder.to(device)
    decoder.activation_dtype = torch.bfloat16
    optimizer = build_optimizer(decoder, OptimizerSettings())
    size = (run.train.sequences_per_step, run.data.context + 1)
    ids = torch.randint(run.model.vocab_size, size, generator=torch.Generator().manual_seed(3)).to(device)
    if compiled:
        compile_layers(decoder)

    def step() -> None:
        token_nats(decoder(ids[:, :-1]), ids[:, 1:]).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _seconds_of(call: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    began = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> int:
    """Check, print, write; 0 when everything passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--size", choices=SIZES, default="paper" if has_gpu else "toy")
    parser.add_argument("--seconds", type=float, default=60.0, help="for the rounds of steps")
    parser.add_argument("--compile", action="store_true", help="compile the layers of the timed steps")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if has_gpu else "cpu")
    figures = check(SIZES[arguments.size], device, arguments.seconds, arguments.compile)
    text = json.dumps(figures, indent=1)
    if arguments.out is not None:
        write_atomically(arguments.out, text + "\n")
    print(text)
    return 0 if figures["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
