"""How exactly checkpoints go in and out: tiny random models of each family, against transformers and the paper's code.

    python benchmarks/checkpoint_families.py [--out benchmarks/checkpoint_families.json]

``in``: saved by transformers (the paper's: by its public code), loaded by us. ``out``: converted by us to each target
that can express the model, loaded by the stock class where there is one, else by our own reader. Errors are the largest
over all logits, with grouped key/value heads and with a key/value head for each query head, in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from gatelab.files import write_atomically
from gatelab.interop import convert, load
from gatelab.interop.targets import To
from gatelab.report.tables import Column, Table, to_terminal

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "interop"))
from tiny_checkpoints import FAMILIES, saved, token_ids

TESTS = Path(__file__).parents[1] / "tests"
STOCK: tuple[To, ...] = ("qwen3", "qwen3_next")


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max())


def ways_out(folder: Path, ids: Tensor, expected: Tensor) -> Iterator[tuple[str, float]]:
    """Each target that can express the model in ``folder``, and the error of what was written."""
    for target in get_args(To):
        with TemporaryDirectory() as temporary:
            written = Path(temporary) / target
            try:
                convert(folder, written, target)
            except ValueError as error:
                if "can't be written as" not in str(error):
                    raise
                continue
            if target in STOCK:
                model: Any = transformers.AutoModelForCausalLM.from_pretrained(written).eval()
                yield f"out: {target} (stock class)", difference(model(ids).logits, expected)
            else:
                yield f"out: {target}", difference(load(written)(ids), expected)


def errors_of_family(name: str) -> Iterator[tuple[str, float]]:
    """Directions and errors of one family, twice: grouped heads, and all heads with keys of their own."""
    ids, sizes = token_ids(), FAMILIES[name][1]
    for changes in ({}, {"num_key_value_heads": sizes["num_attention_heads"]}):
        if changes and any(
            "heads" in key and key.startswith(("num_sliding", "num_attention_heads_per")) for key in sizes
        ):
            continue  # layers with heads of another number have no common number of keys
        with TemporaryDirectory() as temporary:
            folder = Path(temporary)
            expected = saved(name, folder, changes)(ids).logits
            yield "in", difference(load(folder)(ids), expected)
            yield from ways_out(folder, ids, expected)


def errors_of_paper(name: str) -> Iterator[tuple[str, float]]:
    """The same for what the paper's public code wrote and computed."""
    folder = TESTS / "golden" / "official" / name
    expected = load_file(folder / "expected.safetensors")
    yield "in", difference(load(folder)(expected["input_ids"]), expected["logits"])
    yield from ways_out(folder, expected["input_ids"], expected["logits"])


@torch.no_grad()
def all_rows() -> list[dict[str, Any]]:
    """One row for each family and direction, with the largest error."""
    sources = {f"the paper's {name}": errors_of_paper(name) for name in ("baseline", "headwise", "elementwise")}
    sources |= {name: errors_of_family(name) for name in FAMILIES}
    rows = []
    for family, errors in sources.items():
        largest: dict[str, float] = {}
        for direction, error in errors:
            largest[direction] = max(error, largest.get(direction, 0.0))
        rows += [{"family": family, "direction": way, "largest_error": error} for way, error in largest.items()]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    out = parser.parse_args().out
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = all_rows()
    columns = [Column("family", "family"), Column("direction", "direction"), Column("largest_error", "error", ".1e")]
    Console().print(to_terminal(Table(columns, rows)))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    write_atomically(out, json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
