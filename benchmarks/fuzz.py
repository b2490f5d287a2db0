"""Damaged and hostile files, a million of them, given to everything that reads a file.

    python benchmarks/fuzz.py [--inputs 1000000] [--seed 0] [--out benchmarks/results/fuzz.json]
    python benchmarks/fuzz.py --redo NUMBER [--seed 0]

Each input is a sound file with one to four mutations: bytes flipped, spans cut, doubled or moved, numbers and words
replaced by extreme ones, other files spliced in. Input NUMBER depends on the seed and its number alone; ``--redo``
runs it by itself, without catching what it raises. An input fails when it ends otherwise than with a result, a
``ValueError`` or an ``OSError`` that say something, and when it takes more than 5 seconds of processor time. The run
fails when an input does, or when memory grows by more than 256 MB. Prints a table, writes it as JSON, and ends with 1
on failure.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from gatelab.data.settings import CorpusSettings, DataSettings
from gatelab.data.shard_writing import write_shards
from gatelab.data.shards import TokenShards
from gatelab.data.text_files import read_file
from gatelab.data.tokenizer import Tokenizer, train_tokenizer
from gatelab.evaluate.gguf_header import require_sound_gguf
from gatelab.files import sha256, write_atomically
from gatelab.gates.spec import GateSpec
from gatelab.interop.families import read_checkpoint
from gatelab.interop.loading import load, read_config
from gatelab.interop.tensor_files import open_tensors
from gatelab.model.decoder import Decoder
from gatelab.model.settings import ModelSettings
from gatelab.train.checkpoint import (
    complete,
    load_decoder,
    path_of_step,
    require_layout,
    save_checkpoint,
    stored_settings,
)
from gatelab.train.parallel.shard_files import save_parts
from gatelab.train.run_folder import RunFolder

LIMIT_SECONDS = 5.0
MOST_GROWTH_BYTES = 256 << 20
TEXT = "the gate opens when a token asks for it and closes when nothing is worth reading"
WORDS = [
    b"-1", b"0", b"1e999", b"NaN", b"null", b"true", b'""', b"[]", b"{}", b"18446744073709551616", b"1000000000",
    b"2147483648", b"0.5", b"-0.0", b"9" * 5000, b"[" * 3000, b'{"a":' * 3000, b"../../etc/passwd", b"/dev/zero",
    b"!!python/object/apply:os.system ['touch MARK']", b"&a [*a, *a]", b"<<: *a", b"\x00", b"\xff\xfe", b"\xed\xa0\x80",
    b"\xe2\x80\xa8", b"<script>", b"__class__", b"object", b"\xff" * 8, b"\x00" * 8, b",", b":", b"\n", b"  ", b'"',
]  # fmt: skip
NUMBER = re.compile(rb"-?\d+(\.\d+)?")
MODEL = {
    "vocab_size": 29, "width": 24, "num_layers": 2, "num_heads": 6, "num_kv_heads": 2, "head_size": 10,
    "feedforward_width": 36, "max_context": 21, "gates": [{}],
}  # fmt: skip
CONFIG = {
    "vocab_size": 97, "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 56, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "tie_word_embeddings": False,
}  # fmt: skip
FULL = {"layer_types": ["full_attention"] * 3}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 7}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = {"shared_expert_intermediate_size": 20}
CONFIGS = [
    {"model_type": "qwen2"},
    {"model_type": "llama"},
    {"model_type": "qwen3"},
    {"model_type": "qwen3", "use_sliding_window": True, **WINDOWS},
    {"model_type": "qwen3", "elementwise_attn_output_gate": True},
    {"model_type": "qwen3_moe", **EXPERTS},
    {"model_type": "qwen3_next", **FULL, **EXPERTS, **SHARED},
    {"model_type": "qwen3_5_text", **FULL},
    {"model_type": "afmoe", "num_dense_layers": 1, **WINDOWS, **EXPERTS},
    {"model_type": "laguna", **WINDOWS, **EXPERTS, **SHARED},
    {"model_type": "step3p5", **WINDOWS, "n_routed_experts": 5, "moe_intermediate_size": 24, "share_expert_dim": 20},
]
PER_LAYER = {
    "input_layernorm": (40,), "post_attention_layernorm": (40,), "self_attn.q_proj": (48, 40),
    "self_attn.k_proj": (16, 40), "self_attn.v_proj": (16, 40), "self_attn.o_proj": (40, 48), "self_attn.q_norm": (8,),
    "self_attn.k_norm": (8,), "mlp.gate_proj": (56, 40), "mlp.up_proj": (56, 40), "mlp.down_proj": (40, 56),
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """One kind of file: sound examples, what reads one, and how many of 100 inputs are of this kind."""

    read: Callable[[bytes], Any]
    examples: list[bytes]
    share: int


@dataclass
class Outcome:
    """What became of the inputs of one target."""

    inputs: int = 0
    read: int = 0
    refused: int = 0
    slowest_seconds: float = 0.0
    slowest_input: int = -1
    failures: list[dict[str, Any]] = field(default_factory=list)
    messages: set[str] = field(default_factory=set)


class TooSlowError(BaseException):
    """Raised by the alarm; no ``except Exception`` takes it for an error of a file."""


def make_targets(folder: Path) -> dict[str, Target]:
    """All targets; their files are below ``folder``."""
    torch.manual_seed(0)
    return {
        "settings as YAML": _settings(),
        "settings by assignment": _overrides(),
        "token shard": _shard(folder / "shards"),
        "checkpoint weights": _weights(folder / "weights"),
        "checkpoint manifest": _manifest(folder / "checkpoint"),
        "checkpoint part of a rank": _part(folder / "part"),
        "index of weights": _index(folder / "index"),
        "tokenizer.json": _tokenizer(),
        "config.json": _config(folder / "config"),
        "rows of a data set": _rows(folder / "rows.jsonl"),
        "run folder": _run(folder / "run"),
        "GGUF header": _gguf(folder / "model.gguf"),
    }


def _settings() -> Target:
    data = b"train:\n  name: files\n  path: texts\n  heldout_fraction: 0.1\ncontext: 64\n"
    model = "\n".join(f"{key}: {value}" for key, value in MODEL.items()).encode()

    def read(content: bytes) -> None:
        record = DataSettings if content.startswith(b"train") else ModelSettings
        record.from_yaml(content.decode("utf-8", "replace"))

    return Target(read, [data, model], 5)


def _overrides() -> Target:
    spec = GateSpec()
    examples = [b"activation=silu", b"granularity=headwise", b"layers=[0, 1]", b"position=value", b"rank=4"]
    return Target(lambda content: spec.with_overrides([content.decode("utf-8", "replace")]), examples, 10)


def _shard(folder: Path) -> Target:
    tokenizer = train_tokenizer([TEXT], vocab_size=270)
    write_shards(folder, [TEXT, "é", TEXT[:9]], tokenizer, tokens_per_shard=10_000)
    path = folder / "00000.tokens"
    checksum = folder / "00000.tokens.sha256"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        checksum.write_text(f"{sha256(path)}  {path.name}\n")
        tokens = TokenShards(folder)
        tokens[: min(len(tokens), 99)]
        tokens.document_ids(0, min(len(tokens), 99))

    return Target(read, [path.read_bytes()], 20)


def _weights(folder: Path) -> Target:
    path = _checkpoint(folder) / "model.safetensors"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        stored_settings(path)
        require_layout(path)
        open_tensors(path.parent)

    return Target(read, [path.read_bytes()], 12)


def _manifest(folder: Path) -> Target:
    checkpoint = _checkpoint(folder)
    path = checkpoint / "manifest.json"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        load_decoder(checkpoint)

    return Target(read, [path.read_bytes()], 10)


def _part(folder: Path) -> Target:
    decoder = _decoder()
    checkpoint = path_of_step(folder, 3)
    with warnings.catch_warnings(action="ignore"):
        save_parts(checkpoint, decoder.state_dict(), lambda checksums: None)
    (path,) = checkpoint.iterdir()

    def read(content: bytes) -> None:
        path.write_bytes(content)
        complete(checkpoint, 3, decoder.settings, {path.name: sha256(path)})
        try:
            load_decoder(checkpoint)
        finally:
            load(checkpoint)

    return Target(read, [path.read_bytes()], 8)


def _decoder() -> Decoder:
    return Decoder(ModelSettings.parse(MODEL | {"width": 8, "num_layers": 1, "feedforward_width": 8}))


def _checkpoint(folder: Path) -> Path:
    decoder = _decoder()
    return save_checkpoint(folder, 3, decoder, torch.optim.AdamW(decoder.parameters()), keep=1)


def _index(folder: Path) -> Target:
    folder.mkdir()
    path = folder / "model.safetensors.index.json"
    names = {f"model.layers.{number}.weight": f"model-0000{number}-of-00002.safetensors" for number in range(1, 3)}
    for name, file in names.items():
        save_file({name: torch.zeros(2)}, folder / file)
    example = json.dumps({"metadata": {"total_size": 64}, "weight_map": names}).encode()

    def read(content: bytes) -> None:
        path.write_bytes(content)
        open_tensors(folder)

    return Target(read, [example], 8)


def _tokenizer() -> Target:
    def read(content: bytes) -> None:
        tokenizer = Tokenizer.from_text(content.decode("utf-8", "replace"))
        tokenizer.encode_batch(["the gate"])
        tokenizer.decode([0, 1])
        assert tokenizer.vocab_size > 0

    full = json.loads(train_tokenizer([TEXT], vocab_size=270).to_text())
    vocabulary = dict(list(full["model"]["vocab"].items())[:1]) | {"t": 1, "h": 2, "e": 3, "th": 4, "the": 5}
    full["model"] |= {"vocab": vocabulary, "merges": [["t", "h"], ["th", "e"]]}
    split = {"type": "Split", "pattern": {"Regex": r"\w+|\s"}, "behavior": "Isolated", "invert": False}
    return Target(read, [json.dumps(full).encode(), json.dumps(full | {"pre_tokenizer": split}).encode()], 8)


def _config(folder: Path) -> Target:
    """The files are those of the third configuration; others don't fit them, and must be told so."""
    folder.mkdir()
    shapes = {"model.embed_tokens": (97, 40), "model.norm": (40,), "lm_head": (97, 40)}
    shapes |= {f"model.layers.{layer}.{name}": shape for layer in range(3) for name, shape in PER_LAYER.items()}
    save_file({f"{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    files = open_tensors(folder)

    def read(content: bytes) -> None:
        (folder / "config.json").write_bytes(content)
        config = read_config(folder)
        read_checkpoint(config, files, "L3" if "elementwise_attn_output_gate" in config else None)

    return Target(read, [json.dumps(CONFIG | config).encode() for config in CONFIGS], 10)


def _rows(path: Path) -> Target:
    settings = CorpusSettings(name="files", path=str(path), title_field="title")
    rows = [{"title": "a", "text": TEXT}, {"title": None, "text": "\ud800"}, {"title": 3, "text": None}]

    def read(content: bytes) -> None:
        path.write_bytes(content)
        for _ in read_file(path, path.name, settings):
            pass

    return Target(read, ["".join(json.dumps(row) + "\n" for row in rows).encode()], 8)


def _run(folder: Path) -> Target:
    folder.mkdir()
    run = RunFolder(folder)
    example = json.dumps({"fingerprint": "f" * 64, "heldout": ["texts"], "attributions": ["CC0"]}).encode()

    def read(content: bytes) -> None:
        (folder / "data.json").write_bytes(content)
        assert isinstance(run.data["fingerprint"], str)

    return Target(read, [example], 3)


def _gguf(path: Path) -> Target:
    key = (5).to_bytes(8, "little") + b"a.key"
    texts = (9).to_bytes(4, "little") + (8).to_bytes(4, "little") + (2).to_bytes(8, "little")
    entry = key + texts + 2 * ((1).to_bytes(8, "little") + b"x")
    tensor = key + (1).to_bytes(4, "little") + (4).to_bytes(8, "little") + bytes(12)
    counts = (1).to_bytes(8, "little")

    def read(content: bytes) -> None:
        path.write_bytes(content)
        require_sound_gguf(path)

    return Target(read, [b"GGUF" + (3).to_bytes(4, "little") + counts + counts + entry + tensor + bytes(64)], 3)


def mutated(content: bytes, examples: list[bytes], random: Random) -> bytes:
    """The content after one to four mutations."""
    changed = bytearray(content)
    for _ in range(random.randint(1, 4)):
        # Headers come first: half of all mutations hit the first kilobyte.
        end = min(len(changed), 1024) if random.random() < 0.5 else len(changed)
        start = random.randrange(end) if end else 0
        stop = min(len(changed), start + random.choice((1, 1, 2, 4, 8, 16, 64)))
        match random.randrange(8):
            case 0 if changed:
                changed[start] ^= 1 << random.randrange(8)
            case 1:
                changed[start:stop] = random.randbytes(stop - start)
            case 2:
                del changed[start:stop]
            case 3:
                changed[start:start] = changed[start:stop] * random.choice((1, 2, 50))
            case 4:
                changed[start:stop] = random.choice(WORDS)
            case 5:
                number = NUMBER.search(changed, start)
                if number:
                    changed[number.start() : number.end()] = random.choice(WORDS[:16])
            case 6:
                other = random.choice(examples)
                place = random.randrange(len(other))
                changed[start:stop] = other[place : place + 64]
            case _:
                if random.random() < 0.2:
                    del changed[start:]
                else:
                    changed[start:start] = random.choice(WORDS)
    return bytes(changed)


def input_of(number: int, seed: int, targets: dict[str, Target]) -> tuple[str, bytes]:
    """The target and content of one input."""
    random = Random(seed << 40 | number)
    name = random.choices(list(targets), [target.share for target in targets.values()])[0]
    examples = targets[name].examples
    return name, mutated(random.choice(examples), examples, random)


def fuzz(num_inputs: int, seed: int, folder: Path, on_progress: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Run the inputs and return what became of them, for JSON."""
    targets = make_targets(folder)
    outcomes = {name: Outcome() for name in targets}
    signal.signal(signal.SIGPROF, _too_slow)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    began = time.process_time()
    for number in range(num_inputs):
        name, content = input_of(number, seed, targets)
        _try(number, targets[name], content, outcomes[name])
        if on_progress is not None and number % 10_000 == 9_999:
            on_progress(number + 1)
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    failed = sum(len(outcome.failures) for outcome in outcomes.values())
    rows = {
        name: vars(outcome) | {"messages": len(outcome.messages), "failures": outcome.failures[:20]}
        for name, outcome in outcomes.items()
    }
    return {
        "inputs": num_inputs,
        "seed": seed,
        "failed": failed,
        "cpu_seconds": round(time.process_time() - began, 1),
        "memory_growth_bytes": growth,
        "memory_is_bounded": growth <= MOST_GROWTH_BYTES,
        "limit_seconds": LIMIT_SECONDS,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "targets": rows,
    }


def _try(number: int, target: Target, content: bytes, outcome: Outcome) -> None:
    outcome.inputs += 1
    signal.setitimer(signal.ITIMER_PROF, LIMIT_SECONDS)
    began = time.process_time()
    try:
        target.read(content)
        outcome.read += 1
    except (ValueError, OSError) as error:
        message = str(error)
        outcome.refused += 1
        if len(outcome.messages) < 1000:
            outcome.messages.add(re.sub(r"\W?[\d./]+", "#", message)[:60])
        if not message:
            outcome.failures.append({"input": number, "error": type(error).__name__, "message": ""})
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        outcome.failures.append({"input": number, "error": type(error).__name__, "message": str(error)[:200]})
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    seconds = time.process_time() - began
    if seconds > outcome.slowest_seconds:
        outcome.slowest_seconds, outcome.slowest_input = round(seconds, 4), number


def _too_slow(*_: object) -> None:
    raise TooSlowError(f"more than {LIMIT_SECONDS} seconds")


def show(found: dict[str, Any]) -> None:
    """Print the outcome of all targets."""
    table = Table("file", "inputs", "read", "refused", "messages", "slowest (s)", "failed")
    for name, row in found["targets"].items():
        counts = (row["inputs"], row["read"], row["refused"], row["messages"], row["slowest_seconds"])
        table.add_row(name, *map(str, counts), str(len(row["failures"])))
    Console().print(table)
    growth = found["memory_growth_bytes"] / 1e6
    print(f"{found['inputs']} inputs, {found['failed']} failed, memory grew by {growth:.0f} MB")
    kinds = Counter((name, one["error"]) for name, row in found["targets"].items() for one in row["failures"])
    for (name, error), count in kinds.items():
        print(f"  {name}: {error} x{count}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the outcome here as JSON")
    parser.add_argument("--redo", type=int, help="run this one input alone")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.redo is not None:
            targets = make_targets(Path(folder))
            name, content = input_of(arguments.redo, arguments.seed, targets)
            print(f"{name}: {content[:2000]!r}")
            targets[name].read(content)
            return 0
        found = fuzz(arguments.inputs, arguments.seed, Path(folder), lambda done: print(f"{done} inputs", flush=True))
    show(found)
    if arguments.out is not None:
        write_atomically(arguments.out, json.dumps(found, indent=1) + "\n")
    return int(found["failed"] > 0 or not found["memory_is_bounded"])


if __name__ == "__main__":
    sys.exit(main())
