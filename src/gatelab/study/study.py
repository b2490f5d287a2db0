"""What a study compares, written down before its first run."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from gatelab.recipes.table import resolve
from gatelab.settings import Settings, nearest
from gatelab.train.settings import RunSettings


class Arm(Settings):
    """One way to train: ``key=value`` words on top of the study's recipe."""

    name: str = Field(pattern=r"^[\w.-]+$", description="also the name of its folder")
    assignments: tuple[str, ...] = ()


class Study(Settings):
    """A question, and the arms whose differences answer it. Everything that no arm assigns is equal between them."""

    name: str = Field(pattern=r"^[\w.-]+$")
    question: str
    recipe: str
    assignments: tuple[str, ...] = Field(default=(), description="words on top of the recipe, for every arm")
    arms: tuple[Arm, ...] = Field(min_length=2)
    baseline: str = Field(description="the arm that the others are compared with")

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [arm.name for arm in self.arms]
        if len(set(names)) < len(names):
            raise ValueError(f"two arms of study {self.name} have the same name: {', '.join(names)}")
        if self.baseline not in names:
            raise ValueError(
                f"baseline {self.baseline!r} is no arm of study {self.name}; {nearest(self.baseline, names)}"
            )
        seen: dict[str, str] = {}
        for arm in self.arms:
            twin = seen.setdefault(self.settings_of(arm).to_yaml(), arm.name)
            if twin != arm.name:
                raise ValueError(f"arms {twin} and {arm.name} of study {self.name} have equal settings; drop one")
        return self

    def settings_of(self, arm: Arm) -> RunSettings:
        """The resolved settings of one arm."""
        return resolve(self.recipe, (*self.assignments, *arm.assignments))
