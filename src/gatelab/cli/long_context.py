"""The commands of long context: extend, RULER, streaming, pruning."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

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
    from gatelab.evaluate.texts import file_text
    from gatelab.files import default_folder
    from gatelab.longcontext.streaming.report import FILES, finding, streaming_table, write_streaming
    from gatelab.longcontext.streaming.stream import StreamingTest, stream_models
    from gatelab.report.folder import require_replaceable
    from gatelab.report.tables import to_terminal

    if text is not None and corpus is not None:
        raise ValueError(f"--text {text} and --corpus {corpus} are two texts; give one of them")
    source = CorpusSettings.parse({"name": corpus} if corpus else {}) if text is None else file_text(text)
    test = StreamingTest(source, cache.expanduser(), window, tuple(kept or (0, 4)), tokens, samples)
    names = [model] if compare is None else [model, compare]
    folder, console = out or default_folder("streaming", names), Console()
    require_replaceable(folder, FILES)
    models = stream_models(names, test, lambda sentence: console.print(sentence, markup=False, highlight=False))
    page = write_streaming(folder, models, shlex.join(["gatelab", *sys.argv[1:]]))
    for one in models:
        console.print(finding(one), markup=False, highlight=False)
    console.print(to_terminal(streaming_table(models)))
    console.print(f"Report: {page.resolve()}", soft_wrap=True, markup=False)


def prune(
    model: Annotated[str, typer.Argument(help=MODEL)],
    presses: Annotated[
        str | None, typer.Option(help="names with commas, @heads, @layers or @both after one: budget by gates")
    ] = None,
    budgets: Annotated[str, typer.Option(help="shares of the context's keys, with commas")] = "0.5,0.25,0.1",
    text: Annotated[Path | None, typer.Option(help="read this text (.txt, .jsonl, .parquet)")] = None,
    corpus: Annotated[str | None, typer.Option(help="or the held-out part of this corpus, by name")] = None,
    context: Annotated[int, typer.Option(help="tokens whose keys are pruned")] = 1024,
    continuation: Annotated[int, typer.Option(help="tokens after them, which are scored")] = 256,
    samples: Annotated[int, typer.Option(help="texts, one after another in the source")] = 16,
    step: Annotated[int, typer.Option(help="tokens that come between two cuts in decoding")] = 32,
    ruler_length: Annotated[int | None, typer.Option(help="ask the mini tasks too, at so many tokens")] = None,
    ruler_samples: Annotated[int, typer.Option(help="of each mini task")] = 10,
    recent: Annotated[int, typer.Option(help="newest keys that stay anyway, half of a budget at most")] = 32,
    seed: Annotated[int, typer.Option(help="of the random press and the mini tasks")] = 0,
    out: Annotated[Path | None, typer.Option(help="folder to write; runs/pruning/NAME when left out")] = None,
    cache: Cache = DEFAULT_CACHE,
) -> None:
    """Prune a model's key/value cache in several ways and report what each costs at equal budget."""
    from gatelab.data.settings import CorpusSettings
    from gatelab.evaluate.texts import file_text
    from gatelab.files import default_folder
    from gatelab.longcontext.kv_pruning.judge import judge, parse_budgets, parse_presses
    from gatelab.longcontext.kv_pruning.report import FILES, pruning_table, write_pruning
    from gatelab.longcontext.kv_pruning.trial import Trial
    from gatelab.report.folder import require_replaceable
    from gatelab.report.tables import to_terminal

    if text is not None and corpus is not None:
        raise ValueError(f"--text {text} and --corpus {corpus} are two texts; give one of them")
    source = CorpusSettings.parse({"name": corpus} if corpus else {}) if text is None else file_text(text)
    trial = Trial(
        source,
        cache.expanduser(),
        parse_presses(presses),
        parse_budgets(budgets),
        context=context,
        continuation=continuation,
        samples=samples,
        step=step,
        seed=seed,
        ruler_length=ruler_length,
        ruler_samples=ruler_samples,
        num_recent=recent,
    )
    folder, console = out or default_folder("pruning", [model]), Console()
    require_replaceable(folder, FILES)
    verdict = judge(model, trial, lambda sentence: console.print(sentence, markup=False, highlight=False))
    page = write_pruning(folder, verdict, shlex.join(["gatelab", *sys.argv[1:]]))
    console.print(to_terminal(pruning_table(verdict)))
    console.print(f"Report: {page.resolve()}", soft_wrap=True, markup=False)


def ruler_make(
    task: Annotated[str, typer.Option(help="names with commas; all are RULER's 13, mini those of our own")],
    tokenizer: Annotated[str, typer.Option(help="folder or file with a tokenizer.json, GGUF file or hub name")],
    length: Annotated[int, typer.Option(help="tokens of a sample, those to generate included and BOS not")],
    out: Annotated[Path, typer.Option(help="file to write; a folder for more than one task")],
    seed: Annotated[int, typer.Option(help="draws the samples")] = 42,
    samples: Annotated[int, typer.Option(help="of each task")] = 500,
    chat: Annotated[bool, typer.Option("--chat", help="put the question into the tokenizer's chat template")] = False,
    essays: Annotated[Path | None, typer.Option(help="your file of essays (.txt, or RULER's .json)")] = None,
    squad: Annotated[Path | None, typer.Option(help="your file of SQuAD 2.0")] = None,
    hotpotqa: Annotated[Path | None, typer.Option(help="your file of HotpotQA")] = None,
    stand_in: Annotated[bool, typer.Option("--stand-in", help="made-up text where no file is given")] = False,
    cache: Cache = DEFAULT_CACHE,
) -> None:
    """Write RULER's samples as JSON lines, byte for byte as NVIDIA's generators do."""
    from gatelab.evaluate.ruler.sample_sets import sample_table, write_sample_sets
    from gatelab.evaluate.ruler.tasks import find_tasks
    from gatelab.evaluate.ruler.texts import Texts, text_files
    from gatelab.evaluate.ruler.tokens import open_tokenizer
    from gatelab.report.tables import to_terminal

    texts = Texts(cache.expanduser(), text_files(essays, squad, hotpotqa), not stand_in)
    sets = write_sample_sets(
        find_tasks(task), open_tokenizer(tokenizer), length, seed, samples, texts, "chat" if chat else "base", out
    )
    Console().print(to_terminal(sample_table(sets)))


def ruler(
    model: Annotated[str, typer.Argument(help=MODEL)],
    lengths: Annotated[list[int], typer.Option(help="tokens of a sample with those to generate; may be given again")],
    tasks: Annotated[str, typer.Option(help="names with commas; all are RULER's 13, mini those of our own")] = "mini",
    samples: Annotated[int, typer.Option(help="of each task at each length")] = 100,
    seed: Annotated[int, typer.Option(help="draws the samples")] = 42,
    chat: Annotated[bool, typer.Option("--chat", help="put the question into the model's chat template")] = False,
    essays: Annotated[Path | None, typer.Option(help="your file of essays (.txt, or RULER's .json)")] = None,
    squad: Annotated[Path | None, typer.Option(help="your file of SQuAD 2.0")] = None,
    hotpotqa: Annotated[Path | None, typer.Option(help="your file of HotpotQA")] = None,
    stand_in: Annotated[bool, typer.Option("--stand-in", help="made-up text where no file is given")] = False,
    batch_size: Annotated[int, typer.Option(help="samples at a time")] = 8,
    dtype: Annotated[str, typer.Option(help="of weights and activations")] = "float32",
    device: Annotated[str, typer.Option(help="where the model runs")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="folder of the results; runs/ruler/NAME when left out")] = None,
    cache: Cache = DEFAULT_CACHE,
) -> None:
    """Ask a model RULER's tasks, or small ones in their manner; run again to continue."""
    from gatelab.evaluate.ruler.page import ruler_page
    from gatelab.evaluate.ruler.progress import ProgressLines
    from gatelab.evaluate.ruler.results import score_table, write_results
    from gatelab.evaluate.ruler.running import RulerSettings, evaluate_ruler
    from gatelab.evaluate.ruler.texts import Texts, text_files
    from gatelab.files import default_folder
    from gatelab.report.page import write_page
    from gatelab.report.tables import to_terminal

    settings = RulerSettings.parse({
        "tasks": tasks,
        "lengths": tuple(lengths),
        "samples": samples,
        "seed": seed,
        "prompt": "chat" if chat else "base",
        "batch_size": batch_size,
        "dtype": dtype,
        "device": device,
    })  # fmt: skip
    texts = Texts(cache.expanduser(), text_files(essays, squad, hotpotqa), not stand_in)
    folder, console = out or default_folder("ruler", [model]), Console()
    watch = ProgressLines(lambda line: console.print(line, markup=False, highlight=False))
    result = evaluate_ruler(model, settings, texts, folder, watch)
    write_results(result, folder)
    write_page(ruler_page(result, shlex.join(["gatelab", *sys.argv[1:]])), folder / "page.html")
    console.print(to_terminal(score_table(result.cells)))
    console.print(f"Report: {(folder / 'page.html').resolve()}", soft_wrap=True, markup=False)


class ModelFirst(TyperGroup):
    """``ruler MODEL`` is ``ruler run MODEL``: what is no command's name begins the arguments of ``run``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As in typer."""
        if args and args[0] not in {*self.commands, "--help"}:
            args = ["run", *args]
        return super().parse_args(ctx, args)


ruler_commands = typer.Typer(cls=ModelFirst, no_args_is_help=True, help="RULER: ask a model (run), or write samples.")
ruler_commands.command("run")(ruler)
ruler_commands.command("make")(ruler_make)
