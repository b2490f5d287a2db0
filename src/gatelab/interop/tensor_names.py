"""Tensors under other names and in other layouts, computed one at a time when they are asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gatelab.gates.spec import AttentionShape, GateSpec, Granularity
from gatelab.interop.layouts import FusedLayout, Layout, split
from gatelab.interop.tensor_files import TensorFiles
from gatelab.model.decoder import Decoder
from gatelab.model.settings import ModelSettings

GATE = "gates.sdpa_output.projection"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Part of one of our names -> what stands in its place.
Renames = Mapping[str, str]


class Made(NamedTuple):
    """How one tensor comes from others: ``build`` of the tensors named ``sources``."""

    sources: tuple[str, ...]
    build: Callable[..., Tensor]


class LazyTensors(Mapping[str, Tensor]):
    """Tensors made from those of another mapping at the moment they are asked for."""

    def __init__(self, source: Mapping[str, Tensor], made: Mapping[str, Made]):
        self._source, self._made = source, dict(made)

    def __getitem__(self, name: str) -> Tensor:
        sources, build = self._made[name]
        return build(*(self._source[source] for source in sources))

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


def itself(tensor: Tensor) -> Tensor:
    """The tensor unchanged."""
    return tensor


def shapes_of(settings: ModelSettings) -> dict[str, torch.Size]:
    """Name and shape of every tensor of our decoder, in its order."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in Decoder(settings).state_dict().items()}


def output_gate(settings: ModelSettings, layer: int) -> GateSpec | None:
    """The gate on the attention output of a layer."""
    return next((gate for gate in settings.gates_on_layer(layer) if gate.position == "sdpa_output"), None)


def layer_of(name: str) -> int:
    """The number of the layer that a tensor of ours belongs to."""
    return int(name.split(".")[2])


def renamed(name: str, renames: Renames) -> str:
    """One of our names with all its parts replaced at once, so that names may change places."""
    if not renames:
        return name
    return re.sub("|".join(map(re.escape, renames)), lambda part: renames[part[0]], name)


def our_tensors(
    files: TensorFiles, settings: ModelSettings, ways: Callable[[str], Sequence[Made]], ignored: str = r"(?!)"
) -> LazyTensors:
    """Our decoder's tensors from those of files that have them under other names.

    ``ways`` gives, for one of our names, all that a file may make it of; the first whose sources are there is taken.
    Names that match ``ignored`` are no part of the decoder. Raises ``ValueError`` that names what is missing, what is
    left over and what has the wrong shape, before any layer is read.
    """
    made = {}
    for name in shapes_of(settings):
        possible = ways(name)
        found = next((way for way in possible if all(source in files for source in way.sources)), None)
        if found is None:
            raise ValueError(f"the checkpoint has no tensor {possible[0].sources[0]}, which its config.json asks for")
        made[name] = found
    used = {source for way in made.values() for source in way.sources}
    left = [name for name in files if name not in used and not re.match(ignored, name)]
    if settings.tied_head and len(left) == 1 and left[0].endswith(HEAD):
        _require_tied(files, made[EMBEDDING].sources[0], left[0])
    elif left:
        more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
        raise ValueError(
            f"the checkpoint has tensors that its config.json does not tell of: {left[0]}{more}; "
            "their part in the model is not known"
        )
    _require_shapes(files, made, settings)
    return LazyTensors(files, made)


def ways_of_families(name: str, settings: ModelSettings, layout: Layout, dialects: Sequence[Renames]) -> list[Made]:
    """What a Hugging Face checkpoint may make one of our tensors of, dialect by dialect.

    Experts may be stacked or single, and a tied head may be saved as the embedding, as the head or as both. In a
    layout other than L1 the gate is in ``q_proj``.
    """
    return [way for renames in dialects for way in _ways(name, settings, layout, renames)]


def _ways(name: str, settings: ModelSettings, layout: Layout, renames: Renames) -> list[Made]:
    theirs = renamed(name, renames)
    if name == EMBEDDING and settings.tied_head:
        return [Made((theirs,), itself), Made((renamed(HEAD, renames),), itself)]
    if ".mlp.experts." in name:
        return _ways_of_experts(theirs, settings)
    fused = re.fullmatch(rf"(.*self_attn\.)(q_proj|{re.escape(GATE)})\.(weight|bias)", name)
    gate = output_gate(settings, layer_of(name)) if fused else None
    if fused is None or gate is None or layout == "L1":
        return [Made((theirs,), itself)]
    stem, projection, kind = fused.groups()
    part = "query" if projection == "q_proj" else "gate"
    rows = partial(gate_rows, part, layout, gate.granularity, settings.shape_on_layer(layer_of(name)))
    return [Made((renamed(f"{stem}q_proj.{kind}", renames),), rows)]


def gate_rows(part: str, layout: FusedLayout, granularity: Granularity, shape: AttentionShape, fused: Tensor) -> Tensor:
    """The rows of ``query``, ``gate``, ``key`` or ``value`` in a fused tensor."""
    return getattr(split(fused, layout, granularity, shape), part)


def _ways_of_experts(theirs: str, settings: ModelSettings) -> list[Made]:
    """Stacked under our name; one by one; stacked with gate and up apart, as Step keeps them."""
    assert settings.mixture is not None
    stem, projection = theirs.rsplit(".", 1)
    singles = [f"{stem}.{expert}" for expert in range(settings.mixture.num_experts)]
    apart = stem.replace("mlp.experts", "moe")
    if projection == "down_proj":
        return [
            Made((theirs,), itself),
            Made(tuple(f"{single}.down_proj.weight" for single in singles), _stack),
            Made((f"{apart}.down_proj.weight",), itself),
        ]
    names = tuple(f"{single}.{half}_proj.weight" for half in ("gate", "up") for single in singles)
    return [
        Made((theirs,), itself),
        Made(names, _stack_pairs),
        Made((f"{apart}.gate_proj.weight", f"{apart}.up_proj.weight"), _join),
    ]


def _stack(*experts: Tensor) -> Tensor:
    return torch.stack(experts)


def _stack_pairs(*experts: Tensor) -> Tensor:
    """E gate projections, then E up projections."""
    half = len(experts) // 2
    return torch.cat((torch.stack(experts[:half]), torch.stack(experts[half:])), dim=1)


def _join(gate: Tensor, up: Tensor) -> Tensor:
    return torch.cat((gate, up), dim=1)


def _require_tied(files: TensorFiles, embedding: str, head: str) -> None:
    if not torch.equal(files[embedding], files[head]):
        raise ValueError(
            f"config.json says tie_word_embeddings, but {head} differs from {embedding}; "
            "set tie_word_embeddings to false if both are meant"
        )


def _require_shapes(files: TensorFiles, made: Mapping[str, Made], settings: ModelSettings) -> None:
    """Compare shapes; of tensors that are split or stacked, by making them on the meta device."""
    for name, shape in shapes_of(settings).items():
        way = made[name]
        empty = (torch.empty(files.shape(source), device="meta") for source in way.sources)
        try:
            found = tuple(way.build(*empty).shape)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{way.sources[0]} does not fit config.json: {error}") from None
        if found != tuple(shape):
            raise ValueError(f"{way.sources[0]} gives {name} the shape {found}, config.json asks for {tuple(shape)}")
