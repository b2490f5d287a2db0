"""Fixtures that several parts' tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from chromium import Chromium, OpenedPage, find_chromium


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
