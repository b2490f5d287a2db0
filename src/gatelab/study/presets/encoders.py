"""Open questions of models that read in both directions: do gates take attention off [CLS] and [SEP]?"""

from __future__ import annotations

from gatelab.study.presets.arms import compose, gated, run_of, ungated
from gatelab.study.scales import Scale
from gatelab.study.study import Study

_GATES = ("sdpa_headwise", "sdpa_elementwise")


def encoder_text(scale: Scale) -> Study:
    """Hidden tokens found from both sides, as BERT does, gated against ungated.

    Attention to the first token is that to [CLS]; attention to all [SEP] of a window is measured beside it.
    """
    run = run_of(scale, "dense")
    if run.data.synthetic is not None:
        raise ValueError(
            f"preset open/encoder_text hides tokens of a text, and scale {scale.name} is a synthetic task; choose a "
            "larger scale"
        )
    vocab_size = max(run.model.vocab_size, run.data.tokenizer.vocab_size + 2)
    words = (
        "model.causal=False",
        "data.masking={}",
        "data.bos_in_every_window=True",
        f"model.vocab_size={vocab_size}",
    )
    question = "Does a gate help an encoder to find hidden tokens, and does it rest less on [CLS] and [SEP] with one?"
    arms = [ungated(), *map(gated, _GATES)]
    return compose(scale, "dense", "encoder_text", question, arms, assignments=words)
