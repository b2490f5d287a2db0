"""What a run reads: the corpora, the tokenizer, how tokens are packed into windows. Nothing here imports torch."""

from __future__ import annotations

import re
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from gatelab.settings import Settings

CorpusName = Literal[
    "wikipedia_introductions", "python_standard_library", "state_of_the_union", "files", "hugging_face"
]


class CorpusSettings(Settings):
    """One body of text: a built-in corpus by name, local files, or a Hugging Face dataset.

    A document is in the held-out split when a hash of its title falls below ``heldout_fraction``, else in the training
    split; the whole corpus is held out at 1.0. Documents without a title are split by a hash of their text.
    """

    name: CorpusName = "wikipedia_introductions"
    path: str | None = Field(
        default=None,
        description="for files: a file, a folder or a glob of .txt (one document each), .jsonl or .parquet; for "
        "hugging_face: a dataset's hub name, or a local folder or file that datasets.load_dataset takes",
    )
    text_field: str = Field(
        default="text", description="the column that holds the text (.jsonl, .parquet, hugging_face)"
    )
    title_field: str | None = Field(
        default=None, description="the column whose hash decides the split; the text when None"
    )
    config: str | None = Field(default=None, description="for hugging_face: the dataset's configuration")
    split: str | None = Field(
        default=None, description="for hugging_face: the dataset's own split to read; train when None"
    )
    revision: str | None = Field(default=None, description="for hugging_face: commit or tag; pin it to fix the text")
    max_documents: int | None = Field(
        default=None, gt=0, description="read no more documents than this, both splits together"
    )
    max_bytes: int | None = Field(
        default=None, gt=0, description="stop before exceeding these UTF-8 bytes, both splits together"
    )
    heldout_fraction: float = Field(
        default=0.02, ge=0, le=1, description="share of the titles that is never trained on"
    )
    retrieval_share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of the training text, in bytes, that is made-up retrieval tasks, mixed in",
    )
    retrieval_characters: int = Field(default=1600, ge=400, description="characters of the longest of these tasks")

    @property
    def label(self) -> str:
        """A short name for tables and folders: the corpus's name, or the last part of its path."""
        if self.path is None:
            return self.name
        parts = [self.path.rstrip("/").rsplit("/", 1)[-1], self.config, self.split]
        return re.sub(r"[^\w.-]+", "_", "_".join(part for part in parts if part)).strip("._") or self.name

    @property
    def text_source(self) -> tuple[str | None, ...]:
        """What two settings share when they read the same text."""
        return self.name, self.path, self.config, self.split

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if self.name in ("files", "hugging_face"):
            if not self.path:
                raise ValueError(f"name={self.name} needs a path to read from")
        elif self.path is not None:
            raise ValueError(f"name={self.name} has a fixed source; path={self.path} goes with files or hugging_face")
        if self.name != "hugging_face":
            for field in ("config", "split", "revision"):
                value = getattr(self, field)
                if value is not None:
                    raise ValueError(f"{field}={value} goes with name=hugging_face, not with {self.name}")
        return self


class MixedCorpus(Settings):
    """A further training corpus and its share of the training windows."""

    corpus: CorpusSettings
    weight: float = Field(gt=0, description="training windows of this corpus for each one of data.train")


class TokenizerSettings(Settings):
    """A byte-level BPE trained on the training split, or an existing ``tokenizer.json``."""

    path: str | None = Field(
        default=None, description="an existing tokenizer.json, or a folder that has one; trained if None"
    )
    vocab_size: int = Field(
        default=4096, ge=257, description="entries of the trained tokenizer: 256 bytes, the document start, and merges"
    )
    training_bytes: int = Field(
        default=10_000_000,
        gt=0,
        description="UTF-8 bytes of training text, from its beginning (of each corpus of a mixture equally many), that "
        "the merges are counted on",
    )
    bos_token: str = Field(default="<|bos|>", description="the special token that starts each document")


class ChatSettings(Settings):
    """Chats of one ``.jsonl`` file, of which the assistant's answers are learned."""

    path: str = Field(min_length=1, description="lines such as {messages: [{role: user, content: ...}, ...]}")
    template: str | None = Field(
        default=None,
        description="a chat_template.jinja, a tokenizer_config.json or a folder with one; a plain one when None",
    )
    heldout_fraction: float = Field(
        default=0.1, gt=0, lt=1, description="share of the chats, by a hash of their text, that is never trained on"
    )
    too_long: Literal["refuse", "cut"] = Field(
        default="refuse", description="what is done about chats longer than data.context; cut ones are counted"
    )

    @property
    def label(self) -> str:
        """A short name for tables: the file's, without its ending."""
        name = self.path.rsplit("/", 1)[-1].removesuffix(".jsonl")
        return re.sub(r"[^\w.-]+", "_", name).strip("._") or "chats"


class MaskingSettings(Settings):
    """Some tokens of a text are hidden, to be found from both sides (BERT, Devlin et al. 1810.04805, section 3.1).

    Of the chosen tokens ``masked`` are read as [MASK], ``random`` as any token of the tokenizer's, and the rest as they
    are. A window is [CLS] text [SEP], with [SEP] between documents too: :mod:`gatelab.data.masking`.
    """

    probability: float = Field(default=0.15, gt=0, lt=1, description="chance that a token is chosen, to be found")
    masked: float = Field(default=0.8, ge=0, le=1, description="share of the chosen tokens that [MASK] replaces")
    random: float = Field(default=0.1, ge=0, le=1, description="share that a random token replaces; the rest is kept")

    @model_validator(mode="after")
    def _leave_a_share(self) -> Self:
        if self.masked + self.random > 1:
            raise ValueError(
                f"masked={self.masked} and random={self.random} are together more than all chosen tokens; "
                "give shares whose sum is at most 1"
            )
        return self


class ImageSettings(Settings):
    """Handwritten digits of 8 x 8 pixels in 17 levels, of 10 classes, in patches (:mod:`gatelab.data.images`)."""

    name: Literal["digits"] = "digits"
    patch_size: Literal[1, 2] = Field(default=1, description="pixels of a patch's side: 64 patches of an image, or 16")
    heldout_fraction: float = Field(default=0.2, gt=0, lt=1, description="share of the images, never trained on")
    seed: int = Field(default=0, ge=0, description="decides which images are held out, whatever the run's seed")

    side: ClassVar[int] = 8
    levels: ClassVar[int] = 17
    num_classes: ClassVar[int] = 10

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return (self.side // self.patch_size) ** 2

    @property
    def cls_id(self) -> int:
        """The number of [CLS], one above that of a white patch."""
        return self.levels ** (self.patch_size**2)


class BigramBackcopySettings(Settings):
    """The synthetic task of Guo et al. (arXiv 2410.13835): a bigram chain with back-copying triggers.

    ``vocab_size`` counts the BOS token (id 0). Tokens 1 to ``num_triggers`` are the triggers; they have the largest
    weights, as the paper's triggers are the most frequent characters. ``seed`` draws the bigram table, not the samples.
    """

    vocab_size: int = Field(default=67, ge=4)
    num_triggers: int = Field(default=3, ge=1)
    concentration: float = Field(
        default=3.0,
        gt=0,
        description="of the Dirichlet that draws each row: small values make sharper, more unequal rows",
    )
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _leave_plain_tokens(self) -> Self:
        if self.num_triggers > self.vocab_size - 3:
            raise ValueError(
                f"num_triggers={self.num_triggers} leaves fewer than two plain tokens at vocab_size={self.vocab_size}: "
                f"at most {self.vocab_size - 3}"
            )
        return self


class DataSettings(Settings):
    """Everything that decides a run's tokens and how they are packed; the batches follow from it, a seed and a step."""

    train: CorpusSettings = Field(default_factory=CorpusSettings)
    mixture: tuple[MixedCorpus, ...] = Field(
        default=(), description="further training corpora, mixed in by weight; each one's held-out split is measured"
    )
    heldout: tuple[CorpusSettings, ...] = Field(
        default=(), description="further held-out domains; the training corpora's own held-out splits come first"
    )
    tokenizer: TokenizerSettings = Field(default_factory=TokenizerSettings)
    context: int = Field(default=512, ge=2, description="tokens in a window, T")
    bos_in_every_window: bool = Field(
        default=True, description="start every window with BOS; at small scale the strongest lever for attention sinks"
    )
    document_masks: bool = Field(
        default=False, description="packed documents don't see each other; plain packing when False"
    )
    tokens_per_shard: int = Field(default=16_777_216, gt=0, description="a shard closes at the next document end")
    num_processes: int = Field(
        default=1, ge=1, le=256, description="processes that tokenize; the tokens are the same with any number"
    )
    synthetic: BigramBackcopySettings | None = Field(
        default=None, description="train on this task instead of text; corpora and tokenizer are then unused"
    )
    chats: ChatSettings | None = Field(
        default=None, description="train on the answers of chats instead of text; corpora are then unused"
    )
    masking: MaskingSettings | None = Field(
        default=None, description="train an encoder to find hidden tokens of the text instead of the next token"
    )
    images: ImageSettings | None = Field(
        default=None, description="train an encoder to tell images apart; corpora and tokenizer are then unused"
    )

    @property
    def training_corpora(self) -> tuple[CorpusSettings, ...]:
        """``train``, and what is mixed in."""
        return self.train, *(mixed.corpus for mixed in self.mixture)

    @property
    def num_special_ids(self) -> int:
        """Ids at the end of the model's vocabulary that the tokenizer must leave free: those of [SEP] and [MASK]."""
        return 0 if self.masking is None else 2

    @property
    def text_context(self) -> int:
        """Tokens of the text in a window: all, or those between [CLS] and [SEP]."""
        return self.context if self.masking is None else self.context - 2

    @property
    def vocab_size_needed(self) -> int:
        """The least vocabulary of a model, as far as the settings tell: classes for images, else ids of tokens."""
        if self.images is not None:
            return self.images.num_classes
        if self.synthetic is not None:
            return self.synthetic.vocab_size
        return (self.tokenizer.vocab_size if self.tokenizer.path is None else 0) + self.num_special_ids

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if self.images is not None:
            self._refuse_contradictions_with_images(self.images)
            return self
        if self.masking is not None:
            self._refuse_contradictions_with_masking()
        if self.chats is not None:
            self._refuse_contradictions_with_chats()
            return self
        if self.synthetic is not None:
            if self.mixture:
                raise ValueError("mixture with synthetic is impossible: a synthetic task is the whole of a run's data")
            if self.document_masks:
                raise ValueError("document_masks=True with synthetic is impossible: a synthetic window is one document")
            if not self.bos_in_every_window:
                raise ValueError("bos_in_every_window=False with synthetic is impossible: its windows begin with BOS")
            return self
        self._refuse_impossible_training()
        labels = [corpus.label for corpus in self.training_corpora if corpus.heldout_fraction]
        if not labels and not self.heldout:
            raise ValueError("train.heldout_fraction=0.0 leaves nothing held out; name a corpus in heldout")
        for corpus in self.heldout:
            if corpus.text_source in {trained.text_source for trained in self.training_corpora}:
                raise ValueError(
                    f"heldout names the training corpus {corpus.label}, whose held-out split is always measured"
                )
            if corpus.heldout_fraction == 0:
                raise ValueError(
                    f"the held-out corpus {corpus.label} has heldout_fraction=0.0: nothing of it is held out"
                )
            if corpus.label in labels:
                raise ValueError(f"two held-out corpora are called {corpus.label}; give their files different names")
            labels.append(corpus.label)
        return self

    def _refuse_impossible_training(self) -> None:
        """A training corpus that is all held out, or that two of them can't be told apart."""
        if self.train.heldout_fraction == 1:
            raise ValueError("train.heldout_fraction=1.0 leaves nothing to train on; choose a smaller fraction")
        labels: list[str] = []
        for corpus in self.training_corpora:
            if corpus.heldout_fraction == 1:
                raise ValueError(f"heldout_fraction=1.0 leaves nothing of {corpus.label} to train on; choose less")
            if corpus.label in labels:
                raise ValueError(f"two training corpora are called {corpus.label}; mix in a corpus once, by its weight")
            labels.append(corpus.label)

    def _refuse_contradictions_with_chats(self) -> None:
        if self.synthetic is not None or self.mixture or self.heldout:
            other = "synthetic" if self.synthetic is not None else "mixture" if self.mixture else "heldout"
            raise ValueError(
                f"chats with {other} is impossible: chats are the whole of a run's data; leave {other} out"
            )
        if not self.document_masks:
            raise ValueError("chats need document_masks=True: those in one window must not see each other")
        if not self.bos_in_every_window:
            raise ValueError("bos_in_every_window=False with chats is impossible: every chat begins with BOS")
        if self.tokenizer.path is None:
            raise ValueError("chats need tokenizer.path, the tokenizer of the model that learns to answer")

    def _refuse_contradictions_with_masking(self) -> None:
        if self.synthetic is not None or self.chats is not None:
            other = "synthetic" if self.synthetic is not None else "chats"
            raise ValueError(f"masking with {other} is impossible: tokens of a text are hidden; leave {other} out")
        if self.document_masks:
            raise ValueError(
                "document_masks=True with masking is impossible: [CLS] and [SEP] belong to a whole window; "
                "set document_masks=False"
            )
        if not self.bos_in_every_window:
            raise ValueError("bos_in_every_window=False with masking is impossible: every window begins with [CLS]")
        if self.context < 3:
            raise ValueError(f"context={self.context} with masking leaves no text between [CLS] and [SEP]; give more")

    def _refuse_contradictions_with_images(self, images: ImageSettings) -> None:
        for other in ("synthetic", "chats", "masking", "mixture", "heldout", "document_masks"):
            if getattr(self, other):
                raise ValueError(f"images with {other} is impossible: an image is no text; leave {other} out")
        if self.context != 1 + images.num_patches:
            raise ValueError(
                f"context={self.context} with images is impossible: [CLS] and {images.num_patches} patches of "
                f"patch_size={images.patch_size} are {1 + images.num_patches} tokens; set it to that"
            )
