"""Open questions of models that read in both directions: do gates take attention off [CLS], [SEP] and background?"""

from __future__ import annotations

from gatelab.data.settings import ImageSettings
from gatelab.study.presets.arms import CONFIRMATORY_SEEDS, compose, gated, require_text, run_of, ungated
from gatelab.study.scales import Scale
from gatelab.study.study import HELDOUT_ERROR, Study

SMALLEST_ERROR_DIFFERENCE = 0.01  # a point of accuracy, 3.6 of the 359 held-out digits
_GATES = ("sdpa_headwise", "sdpa_elementwise")
_CONFIRMATORY = {"seeds": CONFIRMATORY_SEEDS, "confirmatory": _GATES}
_VISION_SCALES = ("micro", "mini")


def encoder_text(scale: Scale) -> Study:
    """Hidden tokens found from both sides, as BERT does, gated against ungated.

    Attention to the first token is that to [CLS]; attention to all [SEP] of a window is measured beside it.
    """
    run = run_of(scale, "dense")
    require_text(run, "open/encoder_text", "hides tokens of a text", scale)
    vocab_size = max(run.model.vocab_size, run.data.tokenizer.vocab_size + 2)
    words = (
        "model.causal=False",
        "data.masking={}",
        "data.bos_in_every_window=True",
        f"model.vocab_size={vocab_size}",
    )
    question = "Does a gate help an encoder to find hidden tokens, and does it rest less on [CLS] and [SEP] with one?"
    arms = [ungated(), *map(gated, _GATES)]
    return compose(scale, "dense", "encoder_text", question, arms, assignments=words, **_CONFIRMATORY)


def encoder_vision(scale: Scale) -> Study:
    """Handwritten digits told apart by a small ViT of one-pixel patches, gated against ungated.

    Attention to the first token is that to [CLS]; attention to background, patches without ink, is measured beside it.
    """
    if scale.name not in _VISION_SCALES:
        raise ValueError(
            f"preset open/encoder_vision has 1,797 images of 65 tokens, which scale {scale.name} is not made for; use "
            f"scale {' or '.join(_VISION_SCALES)}"
        )
    images, steps = ImageSettings(), 600
    patches = f"{{pixels: {images.patch_size**2}, levels: {images.levels}}}"
    values = {
        "model.causal": False,
        "model.tied_head": False,
        "model.patches": patches,
        "model.vocab_size": images.num_classes,
        "model.max_context": 1 + images.num_patches,
        "data.images": f"{{patch_size: {images.patch_size}}}",
        "data.context": 1 + images.num_patches,
        "train.sequences_per_step": 32,
        "train.steps": steps,
        "train.schedule.warmup_steps": steps // 10,
        "train.evaluation.every": steps // 8,
        "train.evaluation.measure_every": steps // 16,
        "train.checkpoint.every": steps // 8,
    }
    words = tuple(f"{path}={value}" for path, value in values.items())
    question = (
        "Does a gate help an image encoder to read digits, and does it rest less on [CLS] and background with one?"
    )
    fields = {"metric": HELDOUT_ERROR, "smallest_difference": SMALLEST_ERROR_DIFFERENCE, **_CONFIRMATORY}
    return compose(
        scale, "dense", "encoder_vision", question, [ungated(), *map(gated, _GATES)], assignments=words, **fields
    )
