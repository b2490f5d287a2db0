"""The words that RULER draws: the lists of wonderwords, whose release decides every prompt."""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_right
from collections.abc import Sequence
from importlib import resources
from itertools import accumulate
from typing import overload

RELEASE = "3.0.1"
SHA256 = {
    "nounlist.txt": "8d88b3ebc2e2969ed92ebe49cdb0c8a87c2ad3b27493d7afdff608f2e51c5bc9",
    "adjectivelist.txt": "66814d46b7e292c83e839d12fe2fa083c8f66779b14b294e1be4e1342c5d4131",
    "verblist.txt": "9fbf5e4e69b8869aebd88e6d545312ff9f878a747327ede5f6dbbba5c27b08ad",
}


class WordPairs(Sequence[str]):
    """All different ``adjective-noun`` in sorted order, without holding the six million of them.

    Pairs with one adjective follow one another in the order of the nouns, unless its ``adjective-`` begins another
    (``old-`` and ``old-fashioned-``): the pairs of such adjectives mix, and are held sorted.
    """

    def __init__(self, adjectives: Sequence[str], nouns: Sequence[str]):
        self._nouns = sorted(set(nouns))
        self._blocks: list[tuple[str, Sequence[str]]] = []
        beginnings = sorted(f"{adjective}-" for adjective in set(adjectives))
        while beginnings:
            first = beginnings[0]
            mixed = [beginning for beginning in beginnings if beginning.startswith(first)]
            beginnings = beginnings[len(mixed) :]
            if len(mixed) == 1:
                self._blocks.append((first, self._nouns))
            else:
                self._blocks.append(("", sorted({f"{beginning}{noun}" for beginning in mixed for noun in self._nouns})))
        self._ends = list(accumulate(len(words) for _, words in self._blocks))

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        block = bisect_right(self._ends, index)
        beginning, words = self._blocks[block]
        return beginning + words[index - self._ends[block] + len(words)]


def needle_words() -> WordPairs:
    """The words that needles are about."""
    return WordPairs(_read("adjectivelist.txt"), _read("nounlist.txt"))


def listed_words(seed: int) -> list[str]:
    """The words of ``cwe``, shuffled by the seed."""
    words = sorted({word for name in SHA256 for word in _read(name)})
    random.Random(seed).shuffle(words)
    return words


def _read(name: str) -> list[str]:
    try:
        content = resources.files("wonderwords").joinpath("assets", name).read_bytes()
    except ImportError:
        raise ValueError(f"RULER's words come from wonderwords=={RELEASE}: install gatelab[eval]") from None
    if hashlib.sha256(content).hexdigest() != SHA256[name]:
        raise ValueError(
            f"the installed wonderwords has another {name} than release {RELEASE}, which gives other prompts; "
            f"install wonderwords=={RELEASE}"
        )
    return [word.rstrip() for word in content.decode("utf-8").splitlines()]
