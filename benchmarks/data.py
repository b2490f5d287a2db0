"""What a run's data costs: tokenizing, drawing a batch, and memory against the size of the corpus.

    python benchmarks/data.py [--rounds 15] [--threads 2] [--allocator LIBRARY] [--cache ~/.cache/gatelab]
        [--text 4] [--corpora 8 32 128] [--shards 16777216 1048576] [--layers 8]
        [--out benchmarks/results/data]

The text is the demo's, Wikipedia introductions (downloaded to the cache once), again and again until it has the size
asked for, as JSON Lines of a title and a text; MB are 10^6 bytes of UTF-8. The tokenizer has 4,096 entries.

In turns (``side_by_side``), each in a process of its own: ``--text`` MB to token shards as ``gatelab`` prepares a
corpus (lines parsed, split by title, tokenized, written, checksums), on one core and on ``--threads``; the bare
tokenizer on the same texts in memory on one core; 100 batches of the loader; and a training step of the 15M shape of
``training_step.py``, gated elementwise, bfloat16 products, compiled. The loader's share is the time of one of its
batches over that of the step in the same round.

Memory (Linux only): each size of ``--corpora``, in MB, is prepared by one process, its tokenizer trained on the first
10 MB, and by another opened, verified and read once in batches; once for each number of tokens per shard in
``--shards``. The figure is the most that the process held above what it held before it began. Pages of mapped shards
count as held while they are mapped, though the system may drop them at any time; what is held without them at the
end stands beside it. Growth is that between the two largest sizes. Writes ``data.json`` and a page.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

from data_page import data_page, memory_table, speed_table
from goals import goal, goals_text
from rich.console import Console
from side_by_side import Contender, command_line, machine, measure, median, options, ratios, read_options
from training_step import GATE, SHAPES

from gatelab.data.corpora import documents
from gatelab.data.settings import CorpusSettings
from gatelab.data.tokenizer import train_tokenizer
from gatelab.files import write_atomically
from gatelab.report.page import write_page
from gatelab.report.tables import to_terminal

MEGABYTE = 10**6
BATCHES = 100
STEP, LOADER, ONE_CORE = "a training step", "100 batches", "to shards, one core"
TOKENIZER_BYTES = 10 * MEGABYTE
LEAST_SPEED, LARGEST_SHARE, MOST_GROWTH = 1.5, 0.01, 0.1


def write_corpus(file: Path, num_bytes: int, cache: Path) -> int:
    """Write the demo's documents, repeated under new titles, until their text has so many bytes; how many it has."""
    written = 0
    with file.open("w", encoding="utf-8") as stream:
        for repetition in count():
            for document in documents(CorpusSettings(heldout_fraction=0.0), "train", cache):
                row = {"title": f"{document.title}, {repetition}", "text": document.text}
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
                written += len(document.text.encode())
                if written >= num_bytes:
                    return written
    raise AssertionError("a repeated text has no end")


def data_settings(corpus: Path, tokens_per_shard: int, tokenizer: Path | None = None) -> dict[str, Any]:
    """Settings of a run on the corpus in a file, with an existing tokenizer or one that is trained."""
    train = {"name": "files", "path": str(corpus), "title_field": "title", "heldout_fraction": 0.01}
    context = SHAPES["15M"]["context"]
    found = {"train": train, "tokens_per_shard": tokens_per_shard, "context": context}
    return found if tokenizer is None else found | {"tokenizer": {"path": str(tokenizer)}}


def speeds(given: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    """Tokenizing in MB/s and the loader's share of a step, in turns."""
    corpus, tokenizer, shape = folder / "text.jsonl", folder / "tokenizer.json", SHAPES["15M"]
    write_corpus(corpus, given.text * MEGABYTE, given.cache)
    beginning = documents(CorpusSettings(max_bytes=TOKENIZER_BYTES), "train", given.cache)
    tokenizer.write_text(train_tokenizer((one.text for one in beginning), shape["vocab_size"]).to_text())
    data = {"data": data_settings(corpus, given.shards[0], tokenizer)}
    batches = {"cache": str(folder / "cache"), "sequences": shape["sequences"], "batches": BATCHES}
    step = {"shape": shape | {"num_layers": given.layers}, "compile": True, "words": [GATE]}
    contenders = [
        Contender(ONE_CORE, "tokenizing", data | {"cores": 1, "bare": False}),
        Contender(f"to shards, {given.threads} cores", "tokenizing", data | {"cores": given.threads, "bare": False}),
        Contender("the bare tokenizer, one core", "tokenizing", data | {"cores": 1, "bare": True}),
        Contender(LOADER, "loading", data | batches),
        Contender(STEP, "gatelab_decoder", step),
    ]
    rows = measure(contenders, given.rounds, given.threads, given.allocator, watch=console.print)
    for row in rows:
        if "bytes" in row["figures"]:
            text = row["figures"]["bytes"] / MEGABYTE
            row["megabytes_per_second"] = median([text / seconds for seconds in row["seconds"]])
    share = ratios(rows, STEP)[LOADER]
    return {"rows": rows, "loader_share": {end: value / BATCHES for end, value in share.items()}}


def memory(given: argparse.Namespace, folder: Path, console: Console) -> list[dict[str, Any]]:
    """What preparing and reading each corpus takes, each in a process of its own."""
    rows = []
    for megabytes in given.corpora:
        corpus = folder / f"{megabytes}.jsonl"
        num_bytes = write_corpus(corpus, megabytes * MEGABYTE, given.cache)
        for tokens_per_shard in given.shards:
            data = data_settings(corpus, tokens_per_shard)
            settings = {"data": data, "cache": str(folder / "cache"), "sequences": SHAPES["15M"]["sequences"]}
            for work in ("preparing", "reading"):
                name = f"{work} {megabytes} MB, shards of {tokens_per_shard:,d} tokens"
                contender = Contender(name, work, settings)
                (row,) = measure([contender], 1, given.threads, given.allocator, warm_up=0, watch=console.print)
                rows.append(
                    {
                        "work": work,
                        "tokens_per_shard": tokens_per_shard,
                        "text_bytes": num_bytes,
                        "peak_bytes": row["peak_bytes"][0] - row["start"]["empty_bytes"],
                        "own_bytes": row["figures"].get("own_bytes"),
                        "seconds": row["seconds"][0],
                    }
                )
        corpus.unlink()
    return rows


def goals_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The speed on one core, the loader's share, and by how much memory grows between the two largest corpora."""
    one_core = next(row for row in found["rows"] if row["name"] == ONE_CORE)
    goals = [
        goal("MB/s of text to shards on one core", one_core["megabytes_per_second"], "at least", LEAST_SPEED),
        goal("the loader's share of a training step", found["loader_share"], "at most", LARGEST_SHARE),
    ]
    kinds = dict.fromkeys((row["work"], row["tokens_per_shard"]) for row in found["memory"])
    for kind in kinds:
        rows = [row for row in found["memory"] if (row["work"], row["tokens_per_shard"]) == kind]
        if len(rows) > 1:  # the smallest may not even fill what its tokenizer is trained on
            small, large = sorted(rows, key=lambda row: row["text_bytes"])[-2:]
            growth = (large["peak_bytes"] - small["peak_bytes"]) / (large["text_bytes"] - small["text_bytes"])
            name = f"bytes of memory for a further byte of text, {kind[0]}, shards of {kind[1]:,d} tokens"
            goals.append(goal(name, {"value": growth, "low": growth, "high": growth}, "at most", MOST_GROWTH))
    return goals


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/gatelab"))
    parser.add_argument("--text", type=int, default=4, help="MB that are tokenized in a turn")
    parser.add_argument("--corpora", type=int, nargs="+", default=[8, 32, 128], help="MB of each corpus for memory")
    parser.add_argument("--shards", type=int, nargs="+", default=[16_777_216, 1_048_576], help="tokens in a shard")
    parser.add_argument("--layers", type=int, default=SHAPES["15M"]["num_layers"], help="of the step's model")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/data"))
    given = read_options(parser)
    given.cache = given.cache.expanduser()
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "machine": machine(given.threads, given.allocator),
            "rounds": given.rounds,
            "text_megabytes": given.text,
            "batches": BATCHES,
            **speeds(given, Path(folder), console),
            "memory": memory(given, Path(folder), console),
        }
    found["goals"] = goals_of(found)
    command = command_line("data.py", parser, given)
    given.out.mkdir(parents=True, exist_ok=True)
    write_atomically(given.out / "data.json", json.dumps(found, indent=1) + "\n")
    write_page(data_page(found, command), given.out / "report.html")
    for table in (speed_table(found), memory_table(found)):
        console.print(to_terminal(table))
    console.print(goals_text(found["goals"], "\n"), markup=False)


if __name__ == "__main__":
    main()
