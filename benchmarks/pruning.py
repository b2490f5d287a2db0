"""Pruning curves of several models on one text: ``python benchmarks/pruning.py OUT MODEL [MODEL...]``.

Writes one folder a model, as ``gatelab prune`` does, with all presses that the model has the gates for.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from gatelab.data.settings import CorpusSettings
from gatelab.evaluate.models import open_model
from gatelab.gates.gate import Gate
from gatelab.longcontext.kv_pruning.judge import DEFAULT_PRESSES, judge
from gatelab.longcontext.kv_pruning.report import write_pruning
from gatelab.longcontext.kv_pruning.trial import Trial

CACHE = Path("~/.cache/gatelab").expanduser()
GATED = ("gated_attention", "self_gate", "h2o@heads", "h2o@layers", "h2o@both", "gated_attention@heads")


def presses_for(name: str) -> tuple[str, ...]:
    """Presses that the model's gates allow; those of models of transformers count as ungated here."""
    gates = [module for module in open_model(name).model.modules() if isinstance(module, Gate)]
    positions = {gate.spec.position for gate in gates if gate.spec.operation == "multiply"}
    found = (*DEFAULT_PRESSES.split(","), "oracle")
    if "value" in positions:
        found += ("value_gate",)
    return found + GATED if "sdpa_output" in positions else found


def main(out: str, *names: str) -> None:
    """Judge every model in turn."""
    for name in names:
        trial = Trial(CorpusSettings.parse({}), CACHE, presses_for(name), context=384, continuation=128, samples=16)
        verdict = judge(name, trial, print)
        command = shlex.join(["python", "benchmarks/pruning.py", out, *names])
        print(write_pruning(Path(out) / Path(name).name, verdict, command))


if __name__ == "__main__":
    main(*sys.argv[1:])
