"""Made-up text in the form of RULER's essays, SQuAD and HotpotQA, for when those can't be had. Public domain (CC0).

It keeps the tasks running; what a model scores on it says nothing about RULER.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, Literal

SEED = 0
NUM_SENTENCES = 60_000
NUM_PLACES = 400
NAME_STARTS = ("Al", "Bren", "Cor", "Dun", "El", "Far", "Gal", "Hol", "Is", "Kel", "Lor", "Mar", "Nor", "Ol", "Per")
NAME_MIDDLES = ("a", "be", "di", "fo", "la", "mo", "ri", "so", "ta", "ve")
NAME_ENDS = ("burg", "dale", "field", "ford", "ham", "mouth", "ness", "stead", "ton", "wick")
PEOPLE = ("the baker", "an old sailor", "my neighbour", "the clerk", "a young painter", "the miller", "our teacher")
DEEDS = ("walked to", "wrote about", "remembered", "drew a map of", "told stories of", "came back from", "dreamed of")
GOODS = ("salt", "wool", "copper", "glass", "cheese", "paper", "timber", "honey", "rope", "silk")
TIMES = ("in spring", "after the flood", "before the harvest", "every winter", "long ago", "on market days")
THOUGHTS = (
    "That took longer than anyone had thought",
    "Nobody could say why",
    "It was worth the trouble",
    "Most people would have stayed at home",
    "There is something to be learned from it",
    "We laughed about it later",
)


def text(name: Literal["essays", "squad", "hotpotqa"]) -> str:
    """The content of the file that the text stands in for."""
    if name == "essays":
        return _essays()
    facts = _facts()
    return json.dumps({"data": _articles(facts)} if name == "squad" else _two_step_questions(facts))


def sentences(essays: str) -> list[str]:
    """The sentences of the made-up essays, which all end in a full stop."""
    return [f"{sentence.removesuffix('.')}." for sentence in essays.split(". ")] if essays else []


def _essays() -> str:
    source = random.Random(SEED)
    places = _names(source)
    sentences = []
    for _ in range(NUM_SENTENCES):
        person, deed, place, time = (source.choice(words) for words in (PEOPLE, DEEDS, places, TIMES))
        sentences.append(f"{time[0].upper()}{time[1:]}, {person} {deed} {place}. {source.choice(THOUGHTS)}.")
    return " ".join(sentences)


def _names(source: random.Random) -> list[str]:
    parts: Sequence[Sequence[str]] = (NAME_STARTS, NAME_MIDDLES, NAME_ENDS)
    return sorted({"".join(source.choice(part) for part in parts) for _ in range(3 * NUM_PLACES)})[:NUM_PLACES]


def _facts() -> list[tuple[str, str, str, int]]:
    """Towns, each with a county named after another town, what it traded in, and the year of its bridge."""
    source = random.Random(SEED)
    places = _names(source)
    counties = source.sample(places, len(places))
    return [
        (place, county, source.choice(GOODS), source.randint(1200, 1899))
        for place, county in zip(places, counties, strict=True)
    ]


def _sentences(place: str, county: str, goods: str, year: int) -> list[str]:
    return [
        f"{place} is a town in the county of {county}.",
        f" Its merchants traded in {goods}, and its stone bridge was opened in {year}.",
        f" {THOUGHTS[year % len(THOUGHTS)]}, as the town's records say, and the market is held {TIMES[year % 6]}.",
    ]


def _articles(facts: list[tuple[str, str, str, int]]) -> list[dict[str, Any]]:
    articles = []
    for place, county, goods, year in facts:
        asked = {
            f"In which year was the bridge of {place} opened?": str(year),
            f"What did the merchants of {place} trade in?": goods,
            f"In which county is {place}?": county,
        }
        questions = [
            {"question": question, "is_impossible": False, "answers": [{"text": answer}]}
            for question, answer in asked.items()
        ]
        context = "".join(_sentences(place, county, goods, year))
        articles.append({"paragraphs": [{"context": context, "qas": questions}]})
    return articles


def _two_step_questions(facts: list[tuple[str, str, str, int]]) -> list[dict[str, Any]]:
    """What the town that a county is named after traded in, with the two towns among ten."""
    source = random.Random(SEED)
    by_name = {fact[0]: fact for fact in facts}
    asked = []
    for fact in facts:
        shown = {fact[0]: fact, fact[1]: by_name[fact[1]]}
        for other in source.sample(facts, 10):
            if len(shown) < 10:
                shown.setdefault(other[0], other)
        question = f"What did the merchants of the town trade in after which the county of {fact[0]} is named?"
        context = [[name, _sentences(*shown[name])] for name in sorted(shown)]
        asked.append({"question": question, "answer": by_name[fact[1]][2], "context": context})
    return asked
