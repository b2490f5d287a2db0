from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gatelab.data.corpora import documents
from gatelab.data.settings import CorpusSettings
from gatelab.data.text_files import Document, text_files

ROWS = [{"text": "ein Tor", "name": "A"}, {"text": "ein Abfluss", "name": "B"}, {"text": "schließt", "name": "C"}]
TITLED = [Document("A", "ein Tor"), Document("B", "ein Abfluss"), Document("C", "schließt")]


def read(path: Path | str, name: str = "files", **fields: str) -> list[Document]:
    corpus = CorpusSettings.parse({"name": name, "path": str(path), "heldout_fraction": 0.0, **fields})
    return list(documents(corpus, "train", Path("unused")))


def write_jsonl(path: Path) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in ROWS))
    return path


def write_parquet(path: Path) -> Path:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is optional")
    import pyarrow

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


def test_text_files_are_whole_documents_titled_by_name_and_sorted(tmp_path: Path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_bytes(b"zeile\r\n")
    (tmp_path / "a.txt").write_text("erste")
    (tmp_path / "notes.md").write_text("not read")
    expected = [Document("a.txt", "erste"), Document("b/one.txt", "zeile\r\n")]
    assert read(tmp_path) == expected
    assert [document.text for document in read(f"{tmp_path}/**/*.txt")] == ["erste", "zeile\r\n"]
    assert read(tmp_path / "a.txt") == expected[:1]


def test_json_lines_and_parquet_give_the_same_documents(tmp_path: Path):
    assert read(write_jsonl(tmp_path / "rows.jsonl"), title_field="name") == TITLED
    assert read(write_parquet(tmp_path / "rows.parquet"), title_field="name") == TITLED
    assert read(tmp_path / "rows.jsonl", text_field="name") == [Document(None, name) for name in "ABC"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"body": "b"}\n', "rows.jsonl, row 2 has no field 'text'; its fields are: body"),
        ('{"text": "a"}\n{"text": \n', "rows.jsonl, line 2 is not JSON"),
        ('["a"]\n', "rows.jsonl, row 1 is a list, not an object with a field 'text'"),
        ('{"text": 3}\n', "rows.jsonl, row 1: field 'text' holds int, not text"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, content: str, message: str):
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        read(tmp_path)


def test_files_that_are_not_text_are_named(tmp_path: Path):
    (tmp_path / "latin.txt").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"latin.txt is not UTF-8 text \(byte 2\)"):
        read(tmp_path)
    (tmp_path / "false.parquet").write_bytes(b"no parquet here")
    pytest.importorskip("pyarrow", reason="pyarrow is optional")
    with pytest.raises(ValueError, match=r"false\.parquet is not a readable Parquet file"):
        read(tmp_path / "false.parquet")


def test_a_path_without_text_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no \.txt, \.jsonl, \.parquet file at .*; give a file, a folder or a glob"):
        text_files(str(tmp_path / "nothing"))


def test_a_parquet_file_without_the_column_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"rows.parquet, row 1 has no field 'body'"):
        read(write_parquet(tmp_path / "rows.parquet"), text_field="body")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "rows.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"needs the package pyarrow: install gatelab\[hf\], or use .jsonl files"):
        read(tmp_path)


def test_hugging_face_without_datasets_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs the package datasets: install gatelab\[hf\], or use name=files"):
        read("some/dataset", name="hugging_face")


def test_hugging_face_streams_local_files_and_folders(tmp_path: Path):
    pytest.importorskip("datasets", reason="datasets is optional")
    folder = tmp_path / "set"
    folder.mkdir()
    file = write_jsonl(folder / "train.jsonl")
    assert read(file, name="hugging_face", title_field="name") == TITLED
    assert read(folder, name="hugging_face", title_field="name") == TITLED
    assert read(write_parquet(tmp_path / "rows.parquet"), name="hugging_face", title_field="name") == TITLED


def test_hugging_face_errors_name_the_dataset(tmp_path: Path):
    pytest.importorskip("datasets", reason="datasets is optional")
    with pytest.raises(ValueError, match=r"the dataset '.*' \(config None, split train\) can't be opened"):
        read(tmp_path, name="hugging_face")
    file = write_jsonl(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match=r"split validation\) can't be opened"):
        read(file, name="hugging_face", split="validation")
    with pytest.raises(ValueError, match=r"row 1 has no field 'body'; its fields are: text, name"):
        read(file, name="hugging_face", text_field="body")
