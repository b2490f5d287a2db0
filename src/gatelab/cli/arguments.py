"""The arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Recipe = Annotated[str, typer.Argument(help="a recipe (see `gatelab recipes`) or a settings.yaml")]
Assignments = Annotated[
    list[str] | None,
    typer.Argument(
        help="key=value words: gate=NAME or rival=NAME, match=parameters, train.steps=500", metavar="[KEY=VALUE]..."
    ),
]
MODEL = "run folder, Hugging Face folder, hub name or GGUF file"
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for programs")]
Cache = Annotated[Path, typer.Option(help="folder for downloads and token shards")]
DEFAULT_CACHE = Path("~/.cache/gatelab")
