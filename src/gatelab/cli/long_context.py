"""The commands of long context: extend, RULER, streaming, pruning."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gatelab.cli.arguments import DEFAULT_CACHE, MODEL, Cache


def extend(
    run: Annotated[str, typer.Argument(help="run folder of a model that was trained on text")],
    context: Annotated[int, typer.Option(help="tokens, more than the run was trained at")],
    assignments: Annotated[
        list[str] | None, typer.Argument(help="settings of the training, train.* only", metavar="[KEY=VALUE]...")
    ] = None,
    rope_base: Annotated[float | None, typer.Option(help="rotary base, such as 1e6; as before if not given")] = None,
    train_tokens: Annotated[
        int | None, typer.Option(help="tokens to train on; a tenth of the run's own when left out", min=1)
    ] = None,
    yarn: Annotated[float | None, typer.Option(help="scale by YaRN with this factor, and train nothing")] = None,
    texts: Annotated[int, typer.Option(help="held-out texts that the report reads", min=1)] = 16,
    out: Annotated[Path | None, typer.Option(help="new run folder; runs/extend/NAME-CONTEXT when left out")] = None,
    cache: Cache = DEFAULT_CACHE,
) -> None:
    """Give a trained run a longer context, by training on or by YaRN, and report loss by position before and after."""
    from gatelab.files import default_folder
    from gatelab.longcontext.extend import Extension, extend
    from gatelab.longcontext.extend_report import write_extension_report
    from gatelab.report.progress import TrainingProgress

    console, folder = Console(), out or default_folder("extend", [f"{Path(run).name}-{context}"])
    extension = Extension.parse({
        "context": context, "rope_base": rope_base, "train_tokens": train_tokens, "yarn": yarn, "texts": texts
    })  # fmt: skip
    with TrainingProgress(console) as progress:
        extended = extend(run, extension, folder, cache.expanduser(), assignments or [], progress)
    page = write_extension_report(folder, extended, shlex.join(["gatelab", *sys.argv[1:]]))
    console.print(f"Run folder: {folder.resolve()}", soft_wrap=True, markup=False)
    console.print(f"Report: {page.resolve()}", soft_wrap=True, markup=False)


def stream(
    model: Annotated[str, typer.Argument(help=MODEL)],
    compare: Annotated[str | None, typer.Option(help="a second model, on the same text")] = None,
    window: Annotated[int, typer.Option(help="newest tokens that a layer remembers")] = 256,
    kept: Annotated[list[int] | None, typer.Option(help="first tokens that it keeps; 0 and 4 when left out")] = None,
    text: Annotated[Path | None, typer.Option(help="read this text (.txt, .jsonl, .parquet)")] = None,
    corpus: Annotated[str | None, typer.Option(help="or the held-out part of this corpus, by name")] = None,
    tokens: Annotated[int, typer.Option(help="of each text")] = 20_000,
    samples: Annotated[int, typer.Option(help="texts, one after another in the source")] = 1,
    out: Annotated[Path | None, typer.Option(help="folder to write; runs/streaming/NAME when left out")] = None,
    cache: Cache = DEFAULT_CACHE,
) -> None:
    """Read a text longer than what the model remembers, with its first tokens kept and without."""
    from gatelab.data.settings import CorpusSettings
    from gatelab.evaluate.diagnosis import require_replaceable
    from gatelab.evaluate.texts import file_text
    from gatelab.files import default_folder
    from gatelab.longcontext.streaming import StreamingTest, stream_models
    from gatelab.longcontext.streaming_report import finding, streaming_table, write_streaming
    from gatelab.report.tables import to_terminal

    if text is not None and corpus is not None:
        raise ValueError(f"--text {text} and --corpus {corpus} are two texts; give one of them")
    source = CorpusSettings.parse({"name": corpus} if corpus else {}) if text is None else file_text(text)
    test = StreamingTest(source, cache.expanduser(), window, tuple(kept or (0, 4)), tokens, samples)
    names = [model] if compare is None else [model, compare]
    folder, console = out or default_folder("streaming", names), Console()
    require_replaceable(folder)
    models = stream_models(names, test, lambda sentence: console.print(sentence, markup=False, highlight=False))
    page = write_streaming(folder, models, shlex.join(["gatelab", *sys.argv[1:]]))
    for one in models:
        console.print(finding(one), markup=False, highlight=False)
    console.print(to_terminal(streaming_table(models)))
    console.print(f"Report: {page.resolve()}", soft_wrap=True, markup=False)
