from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock

from gatelab.files import kept_if_used, require_folder


def test_a_file_is_no_folder_and_has_none(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "a" / "b"):
        with pytest.raises(ValueError, match=r"/file is a file where a folder is needed; choose another path$"):
            require_folder(place)
    require_folder(tmp_path)
    require_folder(tmp_path / "new" / "one")


def test_what_is_not_used_is_removed_and_what_was_there_stays(tmp_path: Path):
    (tmp_path / "old").mkdir()
    for folder in (tmp_path / "old", tmp_path / "new" / "one"):
        lock = folder / ".lock"
        with pytest.raises(KeyError), kept_if_used(folder, lock, lock=FileLock(lock)):
            assert lock.exists()
            raise KeyError
    assert [path.name for path in tmp_path.rglob("*")] == ["old"]


def test_what_is_used_is_kept_after_an_error_too(tmp_path: Path):
    folder = tmp_path / "new" / "one"
    with pytest.raises(KeyError), kept_if_used(folder, folder / ".lock", lock=FileLock(folder / ".lock")):
        (folder / "file").write_text("content")
        raise KeyError
    assert {path.name for path in folder.iterdir()} == {".lock", "file"}
