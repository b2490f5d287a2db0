"""The prompts of RULER, word for word, and the two ways of putting them to a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from gatelab.evaluate.model_tokenizer import ModelTokenizer

PromptName = Literal["base", "chat"]
_CONTENT = "GATELAB-CONTENT"


class Wording(NamedTuple):
    """A question around its ``{context}``, how the answer begins, and the tokens that may follow."""

    template: str
    answer_prefix: str
    generated: int


NIAH = Wording(
    "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. I will quiz "
    "you about the {type_needle_v} afterwards.\n{context}\nWhat are all the special magic {type_needle_v} for {query} "
    "mentioned in the provided text?",
    " The special magic {type_needle_v} for {query} mentioned in the provided text are",
    128,
)
VARIABLE_TRACKING = Wording(
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find "
    "all variables that are assigned the value {query} in the text above.",
    " Answer: According to the chain(s) of variable assignment in the text above, {num_v} variables are assgined the "
    "value {query}, they are: ",
    30,
)
COMMON_WORDS = Wording(
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?",
    " Answer: The top 10 words that appear most often in the list are:",
    120,
)
FREQUENT_WORDS = Wording(
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text?",
    " Answer: According to the coded text above, the three most frequently appeared words are:",
    50,
)
QUESTION_ANSWERING = Wording(
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}\n\nAnswer the question based on the given documents. Only give me "
    "the answer and do not output any other words.\n\nQuestion: {query}",
    " Answer:",
    32,
)


@dataclass(frozen=True)
class Prompt:
    """What stands before and after a question; the beginning of the answer follows it.

    ``base`` adds nothing: question and answer prefix are one text. ``chat`` puts the question into a user's turn of the
    model's own chat template, and the answer prefix begins the assistant's turn.
    """

    name: PromptName = "base"
    before: str = ""
    after: str = ""

    def wrap(self, question: str, answer_prefix: str) -> str:
        return f"{self.before}{question}{self.after}{answer_prefix}"


def open_prompt(name: PromptName, tokenizer: ModelTokenizer) -> Prompt:
    """The prompt of that name for a model; ``ValueError`` for ``chat`` when its tokenizer has no chat template.

    A BOS that the template begins with is taken off, because whoever runs the model puts exactly one in front.
    """
    if name == "base":
        return Prompt()
    if getattr(tokenizer.source, "chat_template", None) is None:
        raise ValueError("prompt=chat needs a tokenizer with a chat template, and this one has none; use prompt=base")
    turns = [{"role": "user", "content": _CONTENT}]
    text = tokenizer.source.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    before, content, after = text.partition(_CONTENT)
    if not content:
        raise ValueError("prompt=chat: the tokenizer's chat template drops or changes the user's text; use prompt=base")
    if tokenizer.bos_id is not None:
        before = before.removeprefix(tokenizer.decode_one(tokenizer.bos_id))
    return Prompt("chat", before, after)
