"""Lengths at which RULER's texts can be made at all: below them lm-eval would look for a text that fits forever."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MARGIN = 1.1  # texts are drawn; others are a little longer
LONGEST_EXAMPLE = 500  # of ruler_vt, fixed in lm-eval

CountTokens = Callable[[str], int]


def require_room_for_texts(name: str, count_tokens: CountTokens, lengths: Sequence[int]) -> None:
    """Raise ``ValueError`` if RULER's task of that name can't make its shortest text within the least of ``lengths``.

    Other tasks than ``ruler_vt`` and ``ruler_cwe`` end by themselves.
    """
    shortest = min(lengths)
    if name == "ruler_vt":
        example, text = _tracked_variables(count_tokens)
        if example > LONGEST_EXAMPLE:
            raise ValueError(
                f"the task ruler_vt can't be made: its example may have {LONGEST_EXAMPLE} tokens and takes {example} "
                "with this model's tokenizer; use a tokenizer with a larger vocabulary"
            )
        _require_length(name, example + text, shortest)
    elif name == "ruler_cwe":
        _require_length(name, _common_words(count_tokens, shortest), shortest)


def _require_length(name: str, needed: int, shortest: int) -> None:
    if needed > shortest:
        raise ValueError(
            f"the task {name} needs texts of about {needed} tokens with this model's tokenizer, and is asked for "
            f"{shortest}; set --lengths to {needed} or more, on a model that reads as much"
        )


def _tracked_variables(count_tokens: CountTokens) -> tuple[int, int]:
    """Tokens of the shortest example and of the shortest text of ``ruler_vt``, answers included."""
    from lm_eval.tasks.ruler import vt_utils

    found = []
    for sentences, is_example in ((5, True), (10, False)):
        text, answer = vt_utils.generate_input_output(sentences, num_chains=1, num_hops=4, is_icl=is_example)
        found.append(int(MARGIN * count_tokens(f"{text} {answer}")) + 30)
    return found[0], found[1]


def _common_words(count_tokens: CountTokens, length: int) -> int:
    """Tokens of the shortest text of ``ruler_cwe`` with its example and answer."""
    from lm_eval.tasks.ruler import cwe_utils

    example, text, answer = cwe_utils.generate_input_output(10, length)
    return int(MARGIN * count_tokens(f"{example}\n{text} {' '.join(answer)} {'10. ' * len(answer)}")) + 120
