"""Fixtures that several parts' tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chromium import Chromium, OpenedPage, find_chromium
from command_line import Command, command_in_process


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """One headless browser for all tests of pages."""
    executable = find_chromium()
    if executable is None:
        pytest.skip("there is no Chromium on this machine (Debian: apt-get install chromium)")
    with Chromium(executable, tmp_path_factory.mktemp("chromium_profile")) as browser:
        yield browser


@pytest.fixture
def open_page(chromium: Chromium) -> Iterator[Callable[..., OpenedPage]]:
    """``open_page(path, width=1280, height=900, dark=False)`` gives a report page after its charts were drawn."""
    opened: list[OpenedPage] = []

    def open_(*arguments: object, **options: object) -> OpenedPage:
        opened.append(chromium.open(*arguments, **options))
        return opened[-1]

    yield open_
    for page in opened:
        page.close()


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """``command(*words)`` runs ``gatelab`` in an empty folder; gives exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    return command_in_process(monkeypatch, capsys)
