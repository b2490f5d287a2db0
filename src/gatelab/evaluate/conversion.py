"""Converting what a user names: any checkpoint, or a run with its newest checkpoint and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gatelab.data.tokenizer import Tokenizer
from gatelab.evaluate.language_model import hugging_face_form
from gatelab.interop.convert import MAX_SHARD_BYTES, Conversion, convert
from gatelab.interop.layouts import Layout
from gatelab.interop.model_card import ModelCard, write_model_card
from gatelab.interop.targets import To
from gatelab.train.checkpoint import checkpoints, step_of
from gatelab.train.run_folder import RunFolder


def convert_model(
    source: Path,
    destination: Path,
    to: To,
    layout: Layout | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    expand: bool = False,
) -> Conversion:
    """:func:`gatelab.interop.convert` for a folder that it takes, or for a run folder.

    A run gives its newest checkpoint, its tokenizer in the form that transformers opens, with one BOS in front of each
    text as in training and the chat template of a run on chats, and for ``gatelab`` a model card. Raises ``ValueError``
    for a run without a checkpoint too.
    """
    if not (source / "settings.yaml").is_file():
        return convert(source, destination, to, layout, max_shard_bytes, expand)
    run = RunFolder(source)
    saved = checkpoints(run.checkpoints)
    if not saved:
        raise ValueError(f"the run in {source} has no checkpoint yet; train it until it has saved one")
    with TemporaryDirectory() as folder:
        if run.tokenizer.is_file():
            tokenizer = Tokenizer.load(run.tokenizer, run.settings.data.tokenizer.bos_token)
            form = hugging_face_form(tokenizer, run.chat_template)
            form.save_pretrained(folder)
            _generation(form).save_pretrained(folder)
        done = convert(saved[-1], destination, to, layout, max_shard_bytes, expand, beside=Path(folder))
    if to == "gatelab":
        write_model_card(destination, done.settings, _card(run, step_of(saved[-1])))
    return done


def _generation(tokenizer: Any) -> Any:
    """What ``generate`` stops at and pads with, which it reads from no tokenizer."""
    from transformers import GenerationConfig

    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return GenerationConfig(**{name: getattr(tokenizer, name) for name in names})


def _card(run: RunFolder, step: int) -> ModelCard:
    """What a run knows of itself; a run that is not finished has no results."""
    settings, result = run.settings, run.result
    tokens = step * settings.tokens_per_step
    data = "; ".join(run.data["attributions"])
    results: dict[str, float | str] = {}
    if result is not None:
        results = {f"held-out perplexity, {name}": figures["perplexity"] for name, figures in result["heldout"].items()}
        measured = {name: value for name, value in result["measurement"].items() if value is not None}
        results |= {name.replace("_", " "): value for name, value in measured.items()}
    recipe = (
        f"gatelab train, {step:,} steps of {settings.tokens_per_step:,} tokens ({tokens:,}), as in its settings.yaml"
    )
    return ModelCard(name=run.path.resolve().name, recipe=recipe, data=data, results=results)
