"""What a diagnosis costs: its core and full set beside a plain forward pass, and beside whole attention maps.

    python benchmarks/diagnosis.py [--rounds 5] [--cache ~/.cache/gatelab] [--out benchmarks/results/diagnosis]

Four ways of running the same model up to its final norm, float32 and batch 1:

- ``sdpa``: the plain forward pass, with PyTorch's fused attention;
- ``core``: ``measure(model, tokens)``: first-token attention, gates, largest hidden values;
- ``full``: ``measure(model, tokens, full=True)``: all figures;
- ``maps``: transformers' ``output_attentions=True``, which only gathers the maps from which figures would be computed.

Times: the ways take turns in one process; medians and extremes. Memory: each way in a process of its own, the highest
resident size over what the process held after loading and a short warm-up; the allocator gives back every freed block
above 64 KiB at once, so that resident is what is in use (glibc). Writes ``diagnosis.json`` and a page.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from diagnosis_page import cost_page, cost_table, maps_table, slope_table
from process_memory import forget_peak, resident_bytes
from real_models import SMOLLM2

from gatelab.diagnose.attention import attend, key_mass
from gatelab.diagnose.calls import Visibility
from gatelab.diagnose.measure import Attach, measure
from gatelab.evaluate.models import open_model
from gatelab.files import atomic_path, write_atomically
from gatelab.gates.variants import find_variant
from gatelab.interop.probe import attach_hugging_face
from gatelab.model.decoder import Decoder
from gatelab.model.initialization import initialize
from gatelab.model.settings import ModelSettings
from gatelab.report.page import write_page
from gatelab.report.tables import to_terminal

WAYS = ("sdpa", "core", "full", "maps")
LENGTH = 4096
LONG_LENGTHS = (4096, 8192, 16384, 32768)
WARM_UP_TOKENS = 128


class Subject(NamedTuple):
    """A model that is run, and what connects a recorder to it."""

    model: nn.Module
    vocab_size: int
    attach: Attach | None = None


def smollm2(cache: Path) -> Subject:
    """SmolLM2-135M: 30 layers, 9 query and 3 key heads; kept as safetensors, because GGUF files open slowly."""
    import transformers

    folder = cache / "models" / SMOLLM2.name / "safetensors"
    if not folder.exists():
        opened: Any = open_model(str(SMOLLM2.file(cache))).model
        settings = {key: value for key, value in opened.config.to_dict().items() if key != "quantization_config"}
        plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
        plain.load_state_dict(opened.state_dict())
        with atomic_path(folder) as temporary:
            plain.save_pretrained(temporary)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.config.use_cache = False
    return Subject(model, model.config.vocab_size, attach_hugging_face)


def gatelab_30m(cache: Path) -> Subject:
    """30 million parameters with the paper's elementwise gate: 7 layers, 8 query and 2 key heads."""
    return _decoder(vocab_size=16_384, num_layers=7)


def eight_layers(cache: Path) -> Subject:
    """8 layers of 8 heads, all with keys of their own, and a gate."""
    return _decoder(vocab_size=4_096, num_layers=8, num_kv_heads=8)


def _decoder(**sizes: int) -> Subject:
    shape = {"width": 512, "num_heads": 8, "num_kv_heads": 2, "head_size": 64, "feedforward_width": 1_536} | sizes
    settings = ModelSettings.parse(
        {**shape, "max_context": LONG_LENGTHS[-1], "gates": find_variant("sdpa_elementwise").gates}
    )
    decoder = Decoder(settings).eval()
    initialize(decoder, seed=0)
    return Subject(decoder, settings.vocab_size)


def narrow_llama(cache: Path) -> Subject:
    """A model of transformers in which attention is most of the work: 4 layers of 8 heads of 64, feed-forward 512."""
    import transformers

    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    config = transformers.LlamaConfig(vocab_size=4_096, max_position_embeddings=LENGTH, use_cache=False, **sizes)
    return Subject(transformers.LlamaForCausalLM(config).eval(), config.vocab_size, attach_hugging_face)


SUBJECTS: dict[str, Callable[[Path], Subject]] = {
    "SmolLM2-135M": smollm2,
    "GateLab 30M": gatelab_30m,
    "narrow Llama": narrow_llama,
    "8 layers x 8 heads": eight_layers,
}


@torch.no_grad()
def run(subject: Subject, way: str, tokens: Tensor) -> None:
    """One pass of the model in one of the four ways."""
    model: Any = subject.model
    if way in ("core", "full"):
        measure(model, tokens, subject.attach, full=way == "full", delimiters={"seven": [7]})
    elif subject.attach is None:
        model.hidden(tokens)
    else:
        model.set_attn_implementation("eager" if way == "maps" else "sdpa")
        model.get_decoder()(tokens, output_attentions=way == "maps")


def random_tokens(subject: Subject, length: int) -> Tensor:
    return torch.randint(subject.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))


def seconds(name: str, ways: list[str], length: int, rounds: int, cache: Path) -> dict[str, list[float]]:
    """Seconds of each way, which take turns; the first round warms up and is left out."""
    subject = SUBJECTS[name](cache)
    tokens = random_tokens(subject, length)
    found: dict[str, list[float]] = {way: [] for way in ways}
    for way in ways:
        run(subject, way, tokens[:, :WARM_UP_TOKENS])
    for _ in range(rounds + 1):
        for way in ways:
            began = time.perf_counter()
            run(subject, way, tokens)
            found[way].append(time.perf_counter() - began)
    return {way: values[1:] for way, values in found.items()}


def memory(name: str, way: str, length: int, cache: Path) -> dict[str, int]:
    """Bytes of one way: the highest resident size, and that over what the process held before (Linux only)."""
    subject = SUBJECTS[name](cache)
    tokens = random_tokens(subject, length)
    run(subject, way, tokens[:, :WARM_UP_TOKENS])
    before = resident_bytes("VmRSS")
    forget_peak()
    run(subject, way, tokens)
    peak = resident_bytes("VmHWM")
    weights = sum(parameter.numel() * parameter.element_size() for parameter in subject.model.parameters())
    return {"peak": peak, "extra": peak - before, "weights": weights}


# Case -> scale of the logits, how far queries point to the first key, and how long that is.
LOGITS = {"no sink": (1 / 8, 0.0, 0.0), "a sink": (1 / 8, 0.6, 1.2), "a sink, logits up to 45": (3 / 8, 1 / 8, 3.0)}


@torch.no_grad()
def largest_error(case: str, dtype: torch.dtype, length: int) -> float:
    """Largest error of first-token attention against eager softmax in float64 of the same rounded tensors.

    9 query and 3 key heads of 64 channels from normal distributions; a sink is a first key that queries point to.
    """
    scale, towards, size = LOGITS[case]
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, length, heads, 64, generator=generator) for heads in (9, 3, 3))
    if size:
        direction = torch.randn(64, generator=generator)
        query, key[:, 0] = query + direction * towards, direction * size
    query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    visibility = Visibility(length, length)
    _, lse = attend(query, key, value, scale=scale, visibility=visibility)
    mass = key_mass(query, key, lse, scale, torch.zeros(1, 1, dtype=torch.int64))
    error = 0.0
    for head in range(9):
        logits = query[0, :, head].double() @ key[0, :, head // 3].double().T * scale
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        exact = logits.masked_fill(hidden, -torch.inf).softmax(-1)[:, 0]
        error = max(error, float((mass[0, head].double() - exact).abs().max()))
    return error


def all_errors() -> list[dict[str, Any]]:
    """Errors for every case, dtype and length."""
    return [
        {"case": case, "dtype": str(dtype).removeprefix("torch."), "length": length}
        | {"largest_error": largest_error(case, dtype, length)}
        for case in LOGITS
        for dtype in (torch.float32, torch.bfloat16)
        for length in (513, LENGTH)
    ]


def in_process(what: str, *arguments: object) -> Any:
    """The result of one part of this benchmark, run in a new process."""
    command = [sys.executable, __file__, "--part", json.dumps([what, *arguments])]
    allocator = {"MALLOC_MMAP_THRESHOLD_": "65536"} if what == "memory" else {}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | allocator)
    return json.loads(done.stdout.splitlines()[-1])


def machine() -> dict[str, object]:
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    return {
        "processor": cpu or platform.processor(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "dtype": "float32",
        "batch": 1,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def all_costs(rounds: int, cache: Path) -> dict[str, Any]:
    """Every part, one after the other."""
    place = str(cache)
    costs = []
    for name in ("SmolLM2-135M", "GateLab 30M", "narrow Llama"):
        ways = WAYS[:3] if name.startswith("GateLab") else WAYS
        times = in_process("seconds", name, WAYS[:3], LENGTH, rounds, place)
        if "maps" in ways:
            both = in_process("seconds", name, ["core", "maps"], LENGTH, max(rounds // 2, 1), place)
            times |= {"maps": both["maps"], "core beside maps": both["core"]}
        for way in ways:
            bytes_of_way = in_process("memory", name, way, LENGTH, place)
            costs.append({"model": name, "way": way, "length": LENGTH, **bytes_of_way, "seconds": times[way]})
            if way == "maps":
                costs[-1]["core_seconds"] = times["core beside maps"]
    slope = [
        {"model": "8 layers x 8 heads", "way": way, "length": length}
        | in_process("memory", "8 layers x 8 heads", way, length, place)
        for way in WAYS[:3]
        for length in LONG_LENGTHS
        if way != "full" or length < LONG_LENGTHS[-1]  # a quarter of an hour on two cores
    ]
    return {"machine": machine(), "rounds": rounds, "costs": costs, "slope": slope, "errors": all_errors()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/gatelab"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "diagnosis")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        what, *arguments, cache = json.loads(options.part)
        print(json.dumps({"seconds": seconds, "memory": memory}[what](*arguments, Path(cache))))
        return
    found = all_costs(options.rounds, options.cache.expanduser())
    options.out.mkdir(parents=True, exist_ok=True)
    write_atomically(options.out / "diagnosis.json", json.dumps(found, indent=1) + "\n")
    write_page(
        cost_page(found, f"python benchmarks/diagnosis.py --rounds {options.rounds}"), options.out / "report.html"
    )
    for table in (cost_table(found), maps_table(found), slope_table(found)):
        Console().print(to_terminal(table))


if __name__ == "__main__":
    main()
