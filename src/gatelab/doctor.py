"""What this machine has for GateLab, and what is missing for which command. Measures for a second or two."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from gatelab.model.attention import fused_attention
from gatelab.report.tables import Column, Table
from gatelab.train.parallel.compilation import attention_kernel, has_cpp_compiler
from gatelab.train.throughput import measure_peak

Status = Literal["ok", "note", "warning", "missing"]

LEAST_PYTHON = (3, 11)
LITTLE_DISK = 10e9
ALLOCATORS = ("tcmalloc", "jemalloc", "mimalloc")
_TOUCHED_BYTES = 64 << 20


class Finding(NamedTuple):
    """One thing that was looked at; ``missing`` means that GateLab does not run."""

    name: str
    value: str
    status: Status
    advice: str = ""


class Extra(NamedTuple):
    """Packages of an optional part of the installation, each with its least version, and what they are for."""

    packages: Mapping[str, str]
    purpose: str


REQUIRED: dict[str, str] = {
    "torch": "2.13",
    "numpy": "2.0",
    "scipy": "1.13",
    "safetensors": "0.5",
    "tokenizers": "0.21",
    "jaxtyping": "0.3.2",
    "pydantic": "2.11",
    "PyYAML": "6.0",
    "typer": "0.20",
    "rich": "13.9",
    "filelock": "3.16",
    "altair": "5.5",
    "vl-convert-python": "1.8",
    "jinja2": "3.1",
}
EXTRAS: dict[str, Extra] = {
    "hf": Extra(
        {"transformers": "5.24", "datasets": "4.0", "accelerate": "1.10", "gguf": "0.17"},
        "diagnose, eval, convert, add-gate, stream, prune on Hugging Face and GGUF models; hub data sets",
    ),
    "eval": Extra({"lm-eval": "0.4.13", "nltk": "3.9.1", "wonderwords": "3.0.1"}, "eval --tasks, ruler"),
    "tune": Extra({"peft": "0.21", "trl": "1.16"}, "tuning converted models with peft and trl"),
    "reasoning": Extra({"reasoning-gym": "0.1.25"}, "make-chats"),
    "vision": Extra({"scikit-learn": "1.5"}, "recipe vision_tiny, study open/encoder_vision"),
    "quant": Extra({"torchao": "0.18"}, "int8 weights of converted models"),
    "ray": Extra({"ray": "2.60"}, "study --executor ray"),
    "track": Extra({"tensorboard": "2.19"}, "train.tensorboard=true"),
}


def examine(folder: Path) -> list[Finding]:
    """Everything in the order of the table; ``folder`` is where runs would be written."""
    return [
        *_interpreter(),
        *_packages(),
        *_processor(),
        _allocator(),
        _disk(folder),
        _compiler(),
        _attention(),
        *_accelerators(),
        _distributed(),
    ]


def is_usable(findings: Iterable[Finding]) -> bool:
    """Whether nothing that is required is missing."""
    return all(finding.status != "missing" for finding in findings)


def doctor_table(findings: Iterable[Finding]) -> Table:
    """The findings for a terminal."""
    columns = [Column("name", "what"), Column("status", "status"), Column("value", "found")]
    rows = [
        finding._asdict() | {"value": f"{finding.value}; {finding.advice}" if finding.advice else finding.value}
        for finding in findings
    ]
    return Table(columns, rows)


def to_mapping(findings: Iterable[Finding]) -> dict[str, Any]:
    """The findings for programs, and whether GateLab runs here."""
    findings = list(findings)
    return {"usable": is_usable(findings), "findings": [finding._asdict() for finding in findings]}


def installed_version(package: str) -> str | None:
    """The version of an installed package, ``None`` without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_older(version: str, floor: str) -> bool:
    """Whether a version is below another, by the numbers of their releases: 2.9.1 < 2.13, 2.13.0+cpu = 2.13."""
    return _release(version) < _release(floor)


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _interpreter() -> list[Finding]:
    is_new = sys.version_info[:2] >= LEAST_PYTHON
    advice = "" if is_new else f"install Python {'.'.join(map(str, LEAST_PYTHON))} or newer"
    return [
        Finding("Python", platform.python_version(), "ok" if is_new else "missing", advice),
        Finding("system", platform.platform(terse=True), "ok"),
    ]


def _packages() -> list[Finding]:
    """The required packages that are wrong, or one line that none is; a line for each extra."""
    wrong = [finding for name, floor in REQUIRED.items() if (finding := _required(name, floor)) is not None]
    whole = Finding("packages", f"all {len(REQUIRED)} required, torch {torch.__version__}", "ok")
    return [*(wrong or [whole]), *(_extra(name, extra) for name, extra in EXTRAS.items())]


def _required(name: str, floor: str) -> Finding | None:
    version = installed_version(name)
    if version is not None and not is_older(version, floor):
        return None
    return Finding(name, version or "not installed", "missing", f"pip install '{name}>={floor}'")


def _extra(name: str, extra: Extra) -> Finding:
    versions = {package: installed_version(package) for package in extra.packages}
    lacking = [package for package, version in versions.items() if version is None]
    old = [
        f"{package} {version} (needs {extra.packages[package]})"
        for package, version in versions.items()
        if version is not None and is_older(version, extra.packages[package])
    ]
    if not lacking and not old:
        return Finding(f"extra {name}", "installed", "ok")
    value = "; ".join([*(f"without {package}" for package in lacking), *old])
    advice = f"pip install 'gatelab[{name}]' for {extra.purpose}"
    return Finding(f"extra {name}", value, "warning" if old else "note", advice)


def _processor() -> list[Finding]:
    cores = _usable_cores()
    threads = torch.get_num_threads()
    too_many = threads > cores
    advice = f"set OMP_NUM_THREADS={cores} or train.threads={cores}: more threads than cores wait for each other"
    return [
        Finding("processor", f"{cores} usable cores, {torch.backends.cpu.get_cpu_capability()}", "ok"),
        Finding("threads", str(threads), "warning" if too_many else "ok", advice if too_many else ""),
        judge_bfloat16(measure_peak(torch.float32, 512, 8), measure_peak(torch.bfloat16, 512, 8)),
    ]


def judge_bfloat16(float32_flops: float, bfloat16_flops: float) -> Finding:
    """What two measured speeds of matrix products on the processor say about ``train.precision``."""
    ratio = bfloat16_flops / float32_flops
    value = f"{bfloat16_flops / 1e9:,.0f} GFLOP/s against {float32_flops / 1e9:,.0f} in float32: {ratio:.2f}x"
    if ratio >= 1:
        return Finding("bfloat16 on the processor", value, "ok")
    advice = "train with train.precision=float32 here; this processor has no fast bfloat16 products"
    return Finding("bfloat16 on the processor", value, "warning", advice)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _allocator() -> Finding:
    """Which allocator is loaded, and what touching fresh memory costs: every eager step frees and takes tensors."""
    fresh, again = _touch_seconds()
    cost = f"first touch of 64 MiB {1e3 * fresh:.0f} ms, second {1e3 * again:.0f} ms"
    maps = Path("/proc/self/maps")
    loaded = maps.read_text(encoding="utf-8", errors="replace") if maps.exists() else ""
    name = next((allocator for allocator in ALLOCATORS if allocator in loaded), None)
    if name is not None:
        return Finding("allocator", f"{name}; {cost}", "ok")
    advice = "a faster one may speed up training on a processor: LD_PRELOAD=libtcmalloc_minimal.so.4 (same results)"
    return Finding("allocator", f"the system's; {cost}", "note", advice)


def _touch_seconds() -> tuple[float, float]:
    memory = torch.empty(_TOUCHED_BYTES, dtype=torch.uint8)
    seconds = []
    for value in (1, 2):
        began = time.perf_counter()
        memory.fill_(value)
        seconds.append(time.perf_counter() - began)
    return seconds[0], seconds[1]


def _disk(folder: Path) -> Finding:
    existing = next(place for place in [folder, *folder.absolute().parents] if place.exists())
    free = shutil.disk_usage(existing).free
    value = f"{free / 1e9:,.1f} GB free"
    if not os.access(existing, os.W_OK):
        return Finding("disk", f"{value}, read-only", "warning", f"runs can't be written under {existing}; use --out")
    if free < LITTLE_DISK:
        return Finding("disk", value, "warning", "a checkpoint takes 12 bytes a parameter; free some space")
    return Finding("disk", value, "ok")


def _compiler() -> Finding:
    if has_cpp_compiler():
        return Finding("C++ compiler", "found, with Python's headers", "ok")
    advice = "install g++ and Python's headers for train.compile=true; without them training is slower"
    return Finding("C++ compiler", "not found, or without Python's headers", "warning", advice)


def _attention() -> Finding:
    """Which kernel compiled bfloat16 runs compute attention with; it is built here if it was not before."""
    name = "attention in bfloat16"
    if not has_cpp_compiler():
        return Finding(name, "PyTorch's kernel", "note", "GateLab's own needs a C++ compiler")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel = attention_kernel()
    if kernel is not fused_attention:
        return Finding(name, "GateLab's kernel, built for this processor", "ok")
    if caught:
        return Finding(name, "PyTorch's kernel", "warning", str(caught[0].message))
    return Finding(name, "PyTorch's kernel", "note", "GateLab's own needs a processor with AVX512_BF16")


def _accelerators() -> list[Finding]:
    if not torch.cuda.is_available():
        return [Finding("GPU", "none", "note", "everything runs on the processor")]
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [
        Finding(
            f"GPU {number}", f"{gpu.name}, {gpu.total_memory / 1e9:,.0f} GB, capability {gpu.major}.{gpu.minor}", "ok"
        )
        for number, gpu in enumerate(found)
    ]


def _distributed() -> Finding:
    if not dist.is_available():
        return Finding("distributed", "not built into this torch", "note", "train.parallel needs it")
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return Finding("distributed", ", ".join(name for name, has in backends.items() if has) or "no backend", "ok")
