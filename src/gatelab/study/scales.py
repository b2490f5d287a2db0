"""The sizes at which a preset can be run, from a synthetic task in seconds to the paper's own.

Below the paper's size initial weights have the standard deviation 1 / sqrt(width), which the paper's 0.02 is at its
width of 2,048, and every window starts with BOS. Parameters are counted outside the embedding, and of a mixture those
that one token meets. A matched arm has the baseline's parameters to 0.5 %, at the paper's size to 0.9 %: there widths
are multiples of 128, which the paper's are, or of 8, which the experts' kernel needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from gatelab.settings import nearest

ShapeName = Literal["variants", "dense", "deep", "mixture"]


class Shape(NamedTuple):
    """A model of one scale: a recipe and the words that give it its sizes."""

    recipe: str
    assignments: tuple[str, ...] = ()


class Scale(NamedTuple):
    """A size of model with the training that goes with it.

    ``assignments`` are the training's words, common to all shapes; ``tokens`` is what one run reads, up to a step.
    ``shapes``: "variants" for tables 1, 3 and 4, "dense" and "deep" for table 2, "mixture" for the controls that need
    experts. ``learning_rate`` is that of studies that don't tune, the recipe's when ``None``; ``learning_rates`` the
    grid of those that do, and ``wide_learning_rates`` the grid that goes on to divergence.
    """

    name: str
    description: str
    tokens: int
    assignments: tuple[str, ...]
    shapes: Mapping[ShapeName, Shape]
    learning_rate: float | None
    learning_rates: tuple[float, ...]
    wide_learning_rates: tuple[float, ...]


def find_scale(name: str) -> Scale:
    """The scale with this name; a ``ValueError`` with the nearest name and the list for any other."""
    if name not in SCALES:
        raise ValueError(f"scale {name!r} is unknown; {nearest(name, SCALES)}")
    return SCALES[name]


def _shapes(dense: Shape, deep: Shape, feedforward_width: int) -> dict[ShapeName, Shape]:
    """Variants on the dense shape, and a mixture as active as it: 4 of 32 experts of a quarter of the width."""
    mixture = f"{{num_experts: 32, experts_per_token: 4, expert_width: {feedforward_width // 4}}}"
    return {
        "variants": dense,
        "dense": dense,
        "deep": deep,
        "mixture": Shape(dense.recipe, (*dense.assignments, f"model.mixture={mixture}")),
    }


def _decoder(layers: int, width: int, heads: int, head_size: int, feedforward_width: int, multiple: int = 2) -> Shape:
    """A decoder with half as many key/value heads as query heads, and q/k norm."""
    sizes = {
        "num_layers": layers,
        "width": width,
        "num_heads": heads,
        "num_kv_heads": heads // 2,
        "head_size": head_size,
        "feedforward_width": feedforward_width,
        "matching_multiple": multiple,
        "init_std": round(width**-0.5, 3),
    }
    return Shape("dense_tiny", tuple(f"model.{name}={value}" for name, value in sizes.items()))


def _training(tokens: int, context: int, sequences: int, vocab_size: int) -> tuple[str, ...]:
    """Words for a run over this many tokens that is evaluated 8 times on its way and measured 16 times."""
    steps = tokens // (context * sequences)
    values = {
        "model.vocab_size": vocab_size,
        "model.max_context": context,
        "data.tokenizer.vocab_size": vocab_size,
        "data.context": context,
        "train.steps": steps,
        "train.sequences_per_step": sequences,
        "train.schedule.warmup_steps": min(steps // 10, 1000),
        "train.evaluation.every": steps // 8,
        "train.evaluation.measure_every": steps // 16,
        "train.checkpoint.every": steps // 8,
    }
    return tuple(f"{path}={value}" for path, value in values.items())


_WIKIPEDIA = ("data.train.name=wikipedia_introductions",)
_WEB_TEXT = (
    "data.train.name=hugging_face",
    "data.train.path=HuggingFaceFW/fineweb-edu",
    "data.train.config=sample-10BT",
    "data.train.max_bytes=3_000_000_000",
    "data.train.heldout_fraction=0.001",
)
_SMALL_HEADS = tuple(
    f"model.{name}={value}"
    for name, value in {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "matching_multiple": 1}.items()
)

SCALES: dict[str, Scale] = {
    scale.name: scale
    for scale in (
        Scale(
            name="mechanism",
            description="one layer on Bigram-Backcopy, the smallest functional sink",
            tokens=8_192_000,
            assignments=("train.steps=2000",),
            shapes=_shapes(
                Shape("backcopy", _SMALL_HEADS), Shape("backcopy", (*_SMALL_HEADS, "model.num_layers=3")), 256
            ),
            learning_rate=8e-3,
            learning_rates=(1e-3, 2e-3, 4e-3, 8e-3),
            wide_learning_rates=(1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
        ),
        Scale(
            name="micro",
            description="1M parameters, 1M tokens of Wikipedia introductions, context 256",
            tokens=1_000_000,
            assignments=(*_WIKIPEDIA, *_training(1_000_000, 256, 8, 4096)),
            shapes=_shapes(_decoder(6, 128, 4, 32, 352), _decoder(16, 64, 4, 16, 256), 352),
            learning_rate=6e-3,
            learning_rates=(3e-3, 6e-3, 1.2e-2, 2.4e-2),
            wide_learning_rates=(1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
        ),
        Scale(
            name="mini",
            description="4M parameters, 4M tokens of Wikipedia introductions, context 512",
            tokens=4_000_000,
            assignments=(*_WIKIPEDIA, *_training(4_000_000, 512, 4, 4096)),
            shapes=_shapes(_decoder(8, 192, 6, 32, 640), _decoder(24, 128, 4, 32, 304), 640),
            learning_rate=3e-3,
            learning_rates=(1.5e-3, 3e-3, 6e-3, 1.2e-2),
            wide_learning_rates=(1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
        ),
        Scale(
            name="small",
            description="35M parameters, 500M tokens of FineWeb-Edu, context 2,048: the smallest with published gains",
            tokens=500_000_000,
            assignments=(*_WEB_TEXT, *_training(500_000_000, 2048, 8, 32_768)),
            shapes=_shapes(_decoder(12, 512, 8, 64, 1408, 8), _decoder(24, 384, 6, 64, 896, 8), 1408),
            learning_rate=1e-3,
            learning_rates=(5e-4, 1e-3, 2e-3, 4e-3),
            wide_learning_rates=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
        ),
        Scale(
            name="paper",
            description="the paper's 1.7B and 15A2B models, 400B tokens, context 4,096; the text is a stand-in",
            tokens=419_430_400_000,
            assignments=(),
            shapes={
                "variants": Shape("paper_moe_15a2b", ("model.matching_multiple=8",)),
                "dense": Shape("paper_dense_28l"),
                "deep": Shape("paper_dense_48l", ("model.matching_multiple=32",)),
                "mixture": Shape("paper_moe_15a2b", ("model.matching_multiple=8",)),
            },
            learning_rate=None,
            learning_rates=(2e-3, 4e-3, 8e-3),
            wide_learning_rates=(2e-3, 4e-3, 8e-3, 1.6e-2),
        ),
    )
}
