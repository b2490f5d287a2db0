"""From data settings to a prepared folder: tokenizer, token shards of every split, and a manifest.

The folder is named by a hash of everything that decides the tokens, so equal settings share one folder and changed
settings never meet old tokens. An interrupted preparation goes on where it was, and gives the same bytes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations
from pathlib import Path
from typing import Any

from filelock import FileLock

from gatelab.data import retrieval
from gatelab.data.checksums import WAY_OUT, digest, recorded_checksum, verify_checksum, write_with_checksum
from gatelab.data.corpora import Split, attribution, documents, estimated_bytes, identity, local_files
from gatelab.data.settings import CorpusSettings, DataSettings
from gatelab.data.shard_writing import write_shards
from gatelab.data.shards import MissingShardError, TokenShards
from gatelab.data.tokenizer import Tokenizer, tokenizer_file, train_tokenizer
from gatelab.files import kept_if_used, parse_json, remove_leftovers, require_folder, require_free_space, sha256

VERSION = 1
Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class PreparedData:
    """Everything a run reads. ``heldout`` holds the training corpora's own held-out splits first, by corpus label;
    ``mixture`` the further training corpora in their order.

    ``fingerprint`` is a SHA-256 over the tokenizer and all tokens; two runs with equal fingerprints saw equal data.
    """

    folder: Path
    tokenizer: Tokenizer
    train: TokenShards
    heldout: dict[str, TokenShards]
    fingerprint: str
    attributions: tuple[str, ...]
    mixture: dict[str, TokenShards]


def prepare(settings: DataSettings, cache: Path, on_progress: Progress | None = None) -> PreparedData:
    """Tokenize what the settings name into a folder under ``cache``, or verify and reuse the one that is there.

    A file that was deleted is made again. ``on_progress`` gets a stage's name and the UTF-8 bytes of text it has
    handled. Only one process prepares at a time; others wait and reuse the result. Raises ``ValueError`` or ``OSError``
    with one clear sentence: for a source that is missing or empty, training text that is also held out, a failed
    download, a damaged file, or too little free space (checked first). Text that is refused leaves nothing behind.
    """
    if settings.synthetic is not None:
        raise ValueError("a synthetic task has no text to prepare; build BigramBackcopy from data.synthetic")
    report = on_progress or (lambda stage, num_bytes: None)
    require_folder(cache)
    _require_apart(settings)
    recipe = _recipe(settings)
    folder = cache / "prepared" / digest(recipe)[:16]
    lock = folder.with_suffix(".lock")
    with kept_if_used(folder, lock, lock=FileLock(lock)):
        prepared = _open_if_complete(settings, folder)
        if prepared is None:
            _require_space(settings, folder)
            _build(settings, folder, cache, report)
            prepared = _open(settings, folder)
        if (folder / "manifest.json").exists():
            _require_manifest(prepared)
        else:
            _write_manifest(prepared, recipe)
        return prepared


def _require_apart(settings: DataSettings) -> None:
    """Raise ``ValueError`` when a training corpus and another one read the same file under two names.

    Two splits of one dataset may lie in the same files, and are told apart by the dataset.
    """
    corpora = settings.training_corpora
    pairs = [(train, heldout, "held-out", "heldout") for train in corpora for heldout in settings.heldout]
    pairs += [(one, other, "training", "mixture") for one, other in combinations(corpora, 2)]
    for train, other, kind, field in pairs:
        if other.name == train.name == "hugging_face":
            continue
        trained = {path.resolve() for path in local_files(train)}
        shared = [path for path in local_files(other) if path.resolve() in trained]
        if shared:
            raise ValueError(
                f"{shared[0]} is read by the training corpus {train.label} and by the {kind} corpus "
                f"{other.label}; move it out of one of them, or drop {other.label} from {field}"
            )


def _open_if_complete(settings: DataSettings, folder: Path) -> PreparedData | None:
    """What was prepared before, or ``None`` when some of it is not there."""
    if not all((folder / name).exists() for name in ("manifest.json", "tokenizer.json")):
        return None
    try:
        return _open(settings, folder)
    except MissingShardError:
        return None


def _recipe(settings: DataSettings) -> dict[str, Any]:
    """What decides the tokens: the settings without those of the windows, and the identity of every source."""
    path = settings.tokenizer.path
    corpora = (*settings.training_corpora, *settings.heldout)
    decisive = settings.model_dump(mode="json", include={"train", "heldout", "tokenizer", "tokens_per_shard"})
    if settings.mixture:
        decisive["mixture"] = [mixed.corpus.to_mapping() for mixed in settings.mixture]
    return {
        "version": VERSION,
        "settings": decisive,
        "sources": [identity(corpus) for corpus in corpora],
        "retrieval_version": retrieval.VERSION,
        "tokenizer_sha256": None if path is None else sha256(tokenizer_file(Path(path))),
    }


def _build(settings: DataSettings, folder: Path, cache: Path, report: Progress) -> None:
    """Write what is not there yet; text that is refused takes everything made of it along."""
    is_new = not any(folder.iterdir())
    try:
        tokenizer = _tokenizer(settings, folder, cache, report)
        for name, corpus, split in _splits(settings):
            write_shards(
                folder / name,
                _texts(corpus, split, cache),
                tokenizer,
                tokens_per_shard=settings.tokens_per_shard,
                num_processes=settings.num_processes,
                on_progress=partial(report, f"tokenizing {name}"),
            )
    except ValueError:
        if is_new:
            shutil.rmtree(folder)
        raise


def _splits(settings: DataSettings) -> list[tuple[str, CorpusSettings, Split]]:
    """Folder, corpus and split of all that is tokenized: first the held-out corpora, which are small, then training."""
    own = [corpus for corpus in settings.training_corpora if corpus.heldout_fraction]
    return [
        *((f"heldout/{corpus.label}", corpus, "heldout") for corpus in (*own, *settings.heldout)),
        *((f"mixture/{mixed.corpus.label}", mixed.corpus, "train") for mixed in settings.mixture),
        ("train", settings.train, "train"),
    ]


def _texts(corpus: CorpusSettings, split: Split, cache: Path) -> Iterator[str]:
    """The text of one split's documents; ``ValueError`` when there is none."""
    is_empty = True
    for document in documents(corpus, split, cache):
        is_empty = False
        yield document.text
    if is_empty:
        raise ValueError(
            f"the {split} split of {corpus.label} is empty at heldout_fraction={corpus.heldout_fraction}: "
            "take more documents or another fraction"
        )


def _tokenizer(settings: DataSettings, folder: Path, cache: Path, report: Progress) -> Tokenizer:
    """The tokenizer in the folder, if a complete one is there; else the existing one, or one trained now."""
    wanted, target = settings.tokenizer, folder / "tokenizer.json"
    remove_leftovers(folder)
    if not target.exists():
        if wanted.path is not None:
            tokenizer = Tokenizer.load(Path(wanted.path), wanted.bos_token)
        else:
            report("training the tokenizer", 0)
            tokenizer = train_tokenizer(_tokenizer_texts(settings, cache), wanted.vocab_size, wanted.bos_token)
        write_with_checksum(target, tokenizer.to_text())
    return _verified_tokenizer(settings, folder)


def _tokenizer_texts(settings: DataSettings, cache: Path) -> Iterator[str]:
    """The beginnings of all training corpora, equally long whatever the weights: other weights need no new tokens."""
    num_bytes = settings.tokenizer.training_bytes // len(settings.training_corpora)
    return chain.from_iterable(
        _first_bytes(_texts(corpus, "train", cache), num_bytes) for corpus in settings.training_corpora
    )


def _verified_tokenizer(settings: DataSettings, folder: Path) -> Tokenizer:
    verify_checksum(folder / "tokenizer.json")
    return Tokenizer.load(folder / "tokenizer.json", settings.tokenizer.bos_token)


def _first_bytes(texts: Iterator[str], num_bytes: int) -> Iterator[str]:
    """Texts until ``num_bytes`` UTF-8 bytes are reached; the one that reaches them is still among them."""
    for text in texts:
        yield text
        num_bytes -= len(text.encode())
        if num_bytes <= 0:
            return


def _require_space(settings: DataSettings, folder: Path) -> None:
    """A token takes two to four bytes and stands for about three of text; with downloads, less than twice the text."""
    sizes = [estimated_bytes(corpus) for corpus in (*settings.training_corpora, *settings.heldout)]
    require_free_space(folder, 2 * sum(size for size in sizes if size is not None), "preparing the data")


def _open(settings: DataSettings, folder: Path) -> PreparedData:
    """Open the shards and the tokenizer, each verified."""
    tokenizer = _verified_tokenizer(settings, folder)
    names = [name for name, _, _ in _splits(settings)]
    shards = {name: TokenShards(folder / name) for name in names}
    parts = [recorded_checksum(folder / "tokenizer.json"), *(f"{name} {shards[name].fingerprint}" for name in names)]
    return PreparedData(
        folder=folder,
        tokenizer=tokenizer,
        train=shards["train"],
        heldout=_below("heldout/", shards),
        fingerprint=digest(parts),
        attributions=tuple(attribution(corpus) for corpus in (*settings.training_corpora, *settings.heldout)),
        mixture=_below("mixture/", shards),
    )


def _below(prefix: str, shards: dict[str, TokenShards]) -> dict[str, TokenShards]:
    return {name.removeprefix(prefix): of_name for name, of_name in shards.items() if name.startswith(prefix)}


def _write_manifest(prepared: PreparedData, recipe: dict[str, Any]) -> None:
    """Written last: a folder with a manifest is complete."""
    splits = {"train": prepared.train}
    splits |= {f"mixture/{label}": shards for label, shards in prepared.mixture.items()}
    splits |= {f"heldout/{label}": shards for label, shards in prepared.heldout.items()}
    manifest = {
        **recipe,
        "attributions": prepared.attributions,
        "vocab_size": prepared.tokenizer.vocab_size,
        "splits": {
            name: {
                "num_documents": shards.num_documents,
                "num_tokens": len(shards),
                "num_text_bytes": shards.num_text_bytes,
                "fingerprint": shards.fingerprint,
            }
            for name, shards in splits.items()
        },
        "fingerprint": prepared.fingerprint,
    }
    write_with_checksum(prepared.folder / "manifest.json", json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")


def _require_manifest(prepared: PreparedData) -> None:
    """Raise ``ValueError`` when the folder holds other data than its manifest says."""
    path = prepared.folder / "manifest.json"
    verify_checksum(path)
    manifest = parse_json(path.read_bytes())
    if not isinstance(manifest, dict) or manifest.get("fingerprint") != prepared.fingerprint:
        raise ValueError(f"{prepared.folder} holds other data than its manifest.json says; {WAY_OUT}")
