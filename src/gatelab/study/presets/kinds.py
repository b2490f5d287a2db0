"""A question that the paper leaves open: do gates gain alike whatever attention shares between its heads?"""

from __future__ import annotations

from math import ceil

from gatelab.model.accounting import count_parameters
from gatelab.model.settings import ModelSettings
from gatelab.recipes.table import resolve
from gatelab.study.presets.arms import compose, run_of, words_of
from gatelab.study.scales import Scale
from gatelab.study.study import Arm, Interaction, Study

_GATES = {"headwise": "sdpa_headwise", "elementwise": "sdpa_elementwise"}
# A width is rounded for the kind and again for its gate, so multiples are finer than the paper's 128.
_LARGEST_MULTIPLE = 32


def attention_kinds(scale: Scale) -> Study:
    """Grouped queries, heads with keys of their own, one key head, and latents; each ungated and with two gates.

    Every arm has the parameters of ungated grouped queries: the feed-forward pays for attention and gate, and all are
    cut from the draw of the widest, so that they start alike. The latents have the proportions of DeepSeek-V2-Lite
    (arXiv 2405.04434): D/4 channels, C unrotated and C/2 rotated ones of a query, values of C; in the place of q/k norm
    they have their own. Interactions: what a gate gains within a kind, less what it gains with grouped queries.
    """
    model = run_of(scale, "dense").model
    finer = (f"model.matching_multiple={_LARGEST_MULTIPLE}",) if model.matching_multiple > _LARGEST_MULTIPLE else ()
    kinds = {
        "grouped": (),
        "multi_head": (f"model.num_kv_heads={model.num_heads}",),
        "multi_query": ("model.num_kv_heads=1",),
        "latent": _latent(model),
    }
    widths = {kind: _paid_width(scale, finer, words) for kind, words in kinds.items()}
    arms = []
    for kind, words in kinds.items():
        words = (*words, f"model.feedforward_width={widths[kind]}") if words else ()
        arms.append(Arm(name=kind, assignments=words))
        arms += [
            Arm(name=f"{kind}_{name}", assignments=(*words, f"gate={gate}", "match=parameters"))
            for name, gate in _GATES.items()
        ]
    first, *others = kinds
    interactions = tuple(
        Interaction(name=f"{kind}_{gate}", changed=(f"{kind}_{gate}", kind), plain=(f"{first}_{gate}", first))
        for kind in others
        for gate in _GATES
    )
    question = "Does a gate gain as much with multi-head, multi-query and latent attention as with grouped queries?"
    common = (*finer, f"model.drawn_feedforward_width={max(widths.values())}")
    return compose(scale, "dense", "attention_kinds", question, arms, assignments=common, interactions=interactions)


def _latent(model: ModelSettings) -> tuple[str, ...]:
    """The words that turn a decoder's attention into that of latents."""
    size, rotated = model.head_size, model.head_size // 2
    sizes = {"key_value_rank": model.width // 4, "unrotated_size": size, "rotated_size": rotated, "value_size": size}
    latent = ", ".join(f"{name}: {value}" for name, value in sizes.items())
    words = (f"model.latent={{{latent}}}", f"model.num_kv_heads={model.num_heads}", f"model.head_size={size + rotated}")
    return (*words, "model.qk_norm=False") if model.qk_norm else words


def _paid_width(scale: Scale, common: tuple[str, ...], words: tuple[str, ...]) -> int:
    """The width of feed-forward with which a kind of attention has the baseline's parameters, rounded up to the
    multiple that matching has; the baseline's own stays as it is."""
    recipe, common = scale.shapes["dense"].recipe, (*words_of(scale, "dense"), *common)
    baseline, model = (resolve(recipe, (*common, *own)).model for own in ((), words))
    surplus = count_parameters(model).total - count_parameters(baseline).total
    if surplus == 0:
        return model.feedforward_width
    exact = model.feedforward_width - surplus / (3 * model.width * model.num_layers)
    return ceil(exact / model.matching_multiple) * model.matching_multiple
