"""Documents from local text, JSON Lines and Parquet files, and from Hugging Face datasets, row by row."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gatelab.data.settings import CorpusSettings
from gatelab.files import parse_json

SUFFIXES = (".txt", ".jsonl", ".parquet")
LOCAL_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}


@dataclass(frozen=True)
class Document:
    """One document: its title, by whose hash corpora are split (its text if ``None``), and its text."""

    title: str | None
    text: str


def well_formed(text: str) -> str:
    """The text with unpaired surrogates, which JSON can carry and UTF-8 cannot, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def text_files(path: str) -> list[tuple[Path, str]]:
    """The readable files that a path means (a file, a folder's tree, or a glob) with their relative names, sorted.

    Raises ``ValueError`` when there is none.
    """
    place = Path(path)
    if place.is_dir():
        found = {file.relative_to(place).as_posix(): file for file in place.rglob("*")}
    elif place.is_file():
        found = {place.name: place}
    else:
        found = {Path(name).as_posix(): Path(name) for name in glob.glob(path, recursive=True)}  # noqa: PTH207
    readable = sorted((name, file) for name, file in found.items() if file.suffix in SUFFIXES and file.is_file())
    if not readable:
        raise ValueError(
            f"no {', '.join(SUFFIXES)} file at {path!r}; give a file, a folder or a glob such as 'texts/**/*.jsonl'"
        )
    return [(file, name) for name, file in readable]


def read_file(path: Path, name: str, settings: CorpusSettings) -> Iterator[Document]:
    """The documents of one file: a whole .txt file titled ``name``, or each row of a .jsonl or .parquet file."""
    if path.suffix == ".txt":
        yield Document(name, _decoded(path.read_bytes(), str(path)))
        return
    rows = (row for _, row in json_lines(path)) if path.suffix == ".jsonl" else _parquet_rows(path, settings)
    for number, row in enumerate(rows, start=1):
        yield from _document(row, settings, f"{path}, row {number}")


def read_hugging_face(settings: CorpusSettings) -> Iterator[Document]:
    """The rows of a Hugging Face dataset, streamed; ``path`` may also be a local folder or data file."""
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"the dataset {settings.path!r} needs the package datasets: install gatelab[hf], or use name=files"
        ) from None
    assert settings.path is not None, "the settings demand a path for this corpus"
    is_file = Path(settings.path).is_file()
    split = settings.split or "train"
    try:
        rows = datasets.load_dataset(
            LOCAL_BUILDERS.get(Path(settings.path).suffix, settings.path) if is_file else settings.path,
            name=settings.config,
            data_files=settings.path if is_file else None,
            split=split,
            revision=settings.revision,
            streaming=True,
        )
    except (OSError, ValueError, RuntimeError) as error:  # the last for a dataset that is a script
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"the dataset {settings.path!r} (config {settings.config}, split {split}) can't be opened: {reason}"
        ) from None
    wanted = [field for field in (settings.text_field, settings.title_field) if field is not None]
    if set(wanted) <= set(rows.column_names or ()):
        rows = rows.select_columns(wanted)  # nothing decodes images, sound or documents that nobody asked for
    for number, row in enumerate(rows, start=1):
        yield from _document(row, settings, f"{settings.path}, row {number}")


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Number, from 1, and value of each line that is not blank; ``ValueError`` names one that is no JSON."""
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                try:
                    yield number, parse_json(_decoded(line, f"{path}, line {number}"))
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}, line {number} is not JSON: {error.msg}") from None


def _parquet_rows(path: Path, settings: CorpusSettings) -> Iterator[Any]:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ValueError(f"{path} needs the package pyarrow: install gatelab[hf], or use .jsonl files") from None
    try:
        file = ParquetFile(path)
    except ArrowInvalid as error:
        raise ValueError(f"{path} is not a readable Parquet file: {str(error).partition(':')[0]}") from None
    wanted = {settings.text_field, settings.title_field} & set(file.schema_arrow.names)
    with file:
        for batch in file.iter_batches(columns=sorted(wanted) or None):
            yield from batch.to_pylist()


def _document(row: Any, settings: CorpusSettings, where: str) -> Iterator[Document]:
    """The document in one row; none when its text is null."""
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} is a {type(row).__name__}, not an object with a field {settings.text_field!r}")
    for field in (settings.text_field, settings.title_field):
        if field is not None and field not in row:
            raise ValueError(f"{where} has no field {field!r}; its fields are: {', '.join(map(str, row))}")
    text = row[settings.text_field]
    if text is None:
        return
    if not isinstance(text, str):
        raise ValueError(f"{where}: field {settings.text_field!r} holds {type(text).__name__}, not text")
    yield Document(None if settings.title_field is None else str(row[settings.title_field]), text)


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text (byte {error.start}); convert it first") from None
