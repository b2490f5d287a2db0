"""What a model is asked: tasks, and how they are put to it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from gatelab.evaluate.task_plan import TaskSource
from gatelab.settings import Settings

LONGEST_MADE_UP_TEXT = 4096


class Evaluation(Settings):
    """``tasks`` are names of tasks, tags, groups and suites of lm-eval, and ``paper_perplexity``."""

    tasks: tuple[str, ...] = Field(min_length=1)
    shots: int | None = Field(default=None, ge=0, description="examples in each prompt; what the task says when None")
    limit: int | None = Field(default=None, gt=0, description="no more samples of a task, or windows of a domain")
    lengths: tuple[int, ...] = Field(
        default=(), description="tokens of the texts that RULER makes up; 4096, or the model's context if that is less"
    )
    max_new_tokens: int | None = Field(default=None, gt=0, description="generate no more than this for a sample")
    batch_size: int = Field(default=8, gt=0)
    seed: int = Field(default=1234, ge=0, description="draws the examples of a prompt and the texts of RULER")
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    device: str = "cpu"
    allow_code_execution: bool = Field(default=False, description="run programs that the model writes (HumanEval)")
    task_folder: str | None = Field(default=None, description="folder of your own task definitions for lm-eval")
    data_folder: str | None = Field(default=None, description="folder of local data files, under their hub names")
    texts: dict[str, str] = Field(default={}, description="local texts for domains of paper_perplexity, by domain")

    @property
    def source(self) -> TaskSource:
        """Where definitions and data come from."""
        return TaskSource(
            definitions=None if self.task_folder is None else Path(self.task_folder),
            data=None if self.data_folder is None else Path(self.data_folder),
            allow_code_execution=self.allow_code_execution,
        )

    def lengths_for(self, max_context: int | None) -> list[int]:
        """The lengths of made-up texts for a model of that context."""
        return list(self.lengths) or [min(LONGEST_MADE_UP_TEXT, max_context or LONGEST_MADE_UP_TEXT)]
