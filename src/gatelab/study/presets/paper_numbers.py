"""The paper's own figures (arXiv 2505.06708), row by row, to stand beside ours.

"T1 r5" is row 5 of table 1. Perplexity is the mean over six held-out domains. The benchmarks' columns are left out:
models of the scales below the paper's answer them by chance.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class PaperRow(NamedTuple):
    """One published row; ``None`` where the paper gives no figure.

    ``added_millions``: parameters beyond the baseline's. ``first_token_attention``, ``largest_activation`` (the mean
    over layers of each layer's largest hidden value) and ``mean_gate`` are table 4's.
    """

    method: str
    perplexity: float | None
    added_millions: float | None = None
    first_token_attention: float | None = None
    largest_activation: float | None = None
    mean_gate: float | None = None


def paper_difference(row: str, baseline: str) -> float | None:
    """The paper's difference in nats per token, ln(perplexity / perplexity of the baseline's row)."""
    ours, theirs = PAPER_NUMBERS[row].perplexity, PAPER_NUMBERS[baseline].perplexity
    return None if ours is None or theirs is None else math.log(ours / theirs)


# fmt: off
PAPER_NUMBERS: dict[str, PaperRow] = {
    # Table 1: the 15A2B mixture of experts, 400B tokens.
    "T1 r1": PaperRow("baseline, 32 query and 4 key/value heads", 6.026, 0),
    "T1 r2": PaperRow("8 key/value heads", 5.979, 50),
    "T1 r3": PaperRow("48 query heads", 5.953, 201),
    "T1 r4": PaperRow("4 more experts", 5.964, 400),
    "T1 r5": PaperRow("SDPA elementwise (G1)", 5.761, 201),
    "T1 r6": PaperRow("value elementwise (G2)", 5.820, 25),
    "T1 r7": PaperRow("key elementwise (G3)", 6.016, 25),
    "T1 r8": PaperRow("query elementwise (G4)", 5.981, 201),
    "T1 r9": PaperRow("dense output (G5)", 6.017, 100),
    "T1 r10": PaperRow("SDPA headwise (G1)", 5.792, 1.6),
    "T1 r11": PaperRow("value headwise (G2)", 5.808, 0.2),
    "T1 r12": PaperRow("SDPA head-shared (G1)", 5.801, 201),
    "T1 r13": PaperRow("value head-shared (G2)", 5.867, 25),
    "T1 r14": PaperRow("SDPA additive, SiLU (G1)", 5.821, 201),
    "T1 r15": PaperRow("SDPA elementwise, SiLU (G1)", 5.822, 201),
    # Table 2: dense models of 1.7B parameters, matched by a narrower feed-forward.
    "T2 r1": PaperRow("28 layers, 400B tokens, batch 1,024, rate 4e-3: baseline", 7.499),
    "T2 r2": PaperRow("28 layers, 400B tokens, batch 1,024, rate 4e-3: SDPA elementwise", 7.404),
    "T2 r3": PaperRow("28 layers, 3.5T tokens, batch 2,048, rate 4.5e-3: baseline", 6.180),
    "T2 r4": PaperRow("28 layers, 3.5T tokens, batch 2,048, rate 4.5e-3: SDPA elementwise", 6.130),
    "T2 r5": PaperRow("48 layers, 400B tokens, batch 1,024, rate 4e-3: baseline", 7.421),
    "T2 r6": PaperRow("48 layers, 400B tokens, batch 1,024, rate 8e-3: baseline", 9.195),
    "T2 r7": PaperRow("48 layers, 400B tokens, batch 1,024, rate 8e-3: baseline with sandwich norm", 7.407),
    "T2 r8": PaperRow("48 layers, 400B tokens, batch 1,024, rate 4e-3: SDPA elementwise", 7.288),
    "T2 r9": PaperRow("48 layers, 400B tokens, batch 1,024, rate 4e-3: SDPA headwise", 7.370),
    "T2 r10": PaperRow("48 layers, 400B tokens, batch 1,024, rate 8e-3: SDPA elementwise", 7.325),
    "T2 r11": PaperRow("48 layers, 1T tokens, batch 4,096, rate 5.3e-3: baseline", 7.363),
    "T2 r12": PaperRow("48 layers, 1T tokens, batch 4,096, rate 8e-3: baseline, which diverges", None),
    "T2 r13": PaperRow("48 layers, 1T tokens, batch 4,096, rate 5.3e-3: SDPA elementwise", 7.101),
    "T2 r14": PaperRow("48 layers, 1T tokens, batch 4,096, rate 8e-3: SDPA elementwise", 7.078),
    # Table 3: what is non-linear between the value and the output projection; the model of table 1.
    "T3 r1": PaperRow("baseline", 6.026),
    "T3 r2": PaperRow("SDPA elementwise gate", 5.761),
    "T3 r3": PaperRow("value elementwise gate", 5.820),
    "T3 r4": PaperRow("SDPA additive gate, SiLU", 5.821),
    "T3 r5": PaperRow("RMSNorm of each head's SDPA output", 5.847),
    "T3 r6": PaperRow("SiLU of the SDPA output", 5.975),
    "T3 r7": PaperRow("SDPA additive gate, identity", 5.882),
    # Table 4: how sparse the gate is, first-token attention, largest hidden values; the model of table 1.
    "T4 r1": PaperRow("baseline", 6.026, 0, 0.467, 1053),
    "T4 r2": PaperRow("SDPA elementwise", 5.761, 201, 0.048, 94, 0.116),
    "T4 r3": PaperRow("SDPA headwise", 5.792, 1.6, 0.073, 98, 0.172),
    "T4 r4": PaperRow("SDPA elementwise, head-shared", 5.801, 201, 0.301, 286, 0.271),
    "T4 r5": PaperRow("value elementwise", 5.820, 25, 0.297, 125, 0.221),
    "T4 r6": PaperRow("SDPA input-independent", 5.917, None, 0.364, 471, 0.335),
    "T4 r7": PaperRow("SDPA elementwise, NS-sigmoid", 5.900, 201, 0.451, 892, 0.653),
    # Table 6: Switch-Head on the model of table 1.
    "T6 r1": PaperRow("switch key and value, 8 experts, top 8", 5.847, 38),
    "T6 r2": PaperRow("switch key and value, 4 experts, top 4", 5.935, 13),
    "T6 r3": PaperRow("switch value, 4 experts, top 4", 5.820, 13),
    "T6 r4": PaperRow("switch value, 8 experts, top 2", 5.870, 25),
    "T6 r5": PaperRow("switch value, 1 expert: the value headwise gate", 5.808, 3),
}
# fmt: on
