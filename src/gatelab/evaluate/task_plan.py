"""Which tasks an evaluation means: names, tags, groups and suites of lm-eval, resolved before any data is read.

A definition is refused here when it needs code from a network, or runs code and was not allowed to.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from gatelab.files import sha256

TASKS = Path(__file__).parent / "tasks"
BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
GROUP_KEYS = {"group", "group_alias", "task", "aggregate_metric_list", "metadata", "tag", "include"}
NOT_ALLOWED = "it runs code that the model writes, on this machine; allow it with --allow-code-execution"


class TaskSource(NamedTuple):
    """Where definitions and data come from beside lm-eval's own: YAML files of the user, and local data files.

    ``data`` has the files of a data set under its hub name: ``cais/mmlu/astronomy/test.jsonl`` for the split ``test``
    of its configuration ``astronomy`` (.jsonl, .json, .parquet or .csv).
    """

    definitions: Path | None = None
    data: Path | None = None
    allow_code_execution: bool = False


class PlannedTask(NamedTuple):
    """One task: its definition with the suite's ``overrides`` in it, functions as their names, and its YAML file.

    ``missing`` says why a suite has to go without it.
    """

    name: str
    config: dict[str, Any]
    overrides: dict[str, Any]
    file: Path | None
    missing: str | None = None


class PlannedGroup(NamedTuple):
    """A group whose figures are averages over ``members``: lm-eval's ``aggregate_metric_list`` says which."""

    name: str
    members: tuple[str, ...]
    aggregates: list[dict[str, Any]]
    version: str


Plan = list[PlannedTask | PlannedGroup]


def require_lm_eval() -> None:
    """Raise ``ValueError`` when lm-eval or what it runs on is not installed."""
    try:
        import lm_eval.models.huggingface  # noqa: F401
    except ImportError as error:
        raise ValueError(f"tasks need the package lm_eval ({error}): install gatelab[eval]") from None


def plan_tasks(names: Sequence[str], source: TaskSource) -> Plan:
    """Every task that the names mean, once, each group after its members.

    Raises ``ValueError`` with one sentence for an unknown name (the nearest ones in it), for a suite whose tasks the
    installed lm-eval has in another version, for a task that needs code from a network, and for one that was named
    itself and runs code without permission.
    """
    if not names:
        return []
    require_lm_eval()
    resolver = _Resolver(source)
    plan: dict[tuple[type, str], PlannedTask | PlannedGroup] = {}
    for name in names:
        for part in resolver.expand(name, {}, in_suite=False):
            plan.setdefault((type(part), part.name), part)
    return list(plan.values())


def data_checksums(config: Mapping[str, Any]) -> dict[str, str]:
    """The SHA-256 of each local file that a definition reads its data from."""
    named = (config.get("dataset_kwargs") or {}).get("data_files") or []
    groups = named.values() if isinstance(named, dict) else [named]
    files = [file for group in groups for file in ([group] if isinstance(group, str) else group)]
    return {file: sha256(Path(file)) for file in files if Path(file).is_file()}


def code_checksums(task: PlannedTask) -> dict[str, str]:
    """The SHA-256 of the Python files beside a definition: its functions are among them."""
    if task.file is None:
        return {}
    return {file.name: sha256(file) for file in sorted(task.file.parent.glob("*.py"))}


class _Resolver:
    """Looks names up and walks through groups: GateLab's and the user's definitions come before lm-eval's own."""

    def __init__(self, source: TaskSource):
        from lm_eval.tasks import TaskManager

        if source.definitions is not None and not source.definitions.is_dir():
            raise ValueError(f"there is no folder {source.definitions} of task definitions")
        paths: list[str | Path] = [path for path in (TASKS, source.definitions) if path is not None]
        self._source = source
        self._own: Mapping[str, Any] = TaskManager(include_path=paths, include_defaults=False).task_index

    def expand(self, name: str, overrides: dict[str, Any], in_suite: bool) -> Iterator[PlannedTask | PlannedGroup]:
        entry = self._find(name)
        if entry.kind.name == "TAG":
            for member in sorted(entry.tags):
                yield from self.expand(member, overrides, in_suite)
        elif entry.kind.name == "GROUP":
            yield from self._expand_group(name, entry.cfg, overrides)
        else:
            yield self._plan(name, entry.cfg, overrides, entry.yaml_path, in_suite)

    def _expand_group(
        self, name: str, config: Mapping[str, Any], overrides: dict[str, Any]
    ) -> Iterator[PlannedTask | PlannedGroup]:
        metadata = config.get("metadata") or {}
        self._require_versions(name, metadata.get("versions") or {})
        overrides = {key: value for key, value in config.items() if key not in GROUP_KEYS} | overrides
        members = []
        for item in config["task"]:
            for part in self._expand_member(item, overrides):
                members += [part.name] if isinstance(part, PlannedTask) else []
                yield part
        if aggregates := config.get("aggregate_metric_list"):
            specifications = aggregates if isinstance(aggregates, list) else [aggregates]
            yield PlannedGroup(name, tuple(members), specifications, str(metadata.get("version", "")))

    def _expand_member(
        self, item: str | dict[str, Any], overrides: dict[str, Any]
    ) -> Iterator[PlannedTask | PlannedGroup]:
        """A member of a group: a name, a name with overrides, or a definition that stands in the group itself."""
        if isinstance(item, str):
            yield from self.expand(item, overrides, in_suite=True)
            return
        kind = "group" if "group" in item else "task"
        name, own = item[kind], {key: value for key, value in item.items() if key != kind}
        if name in self._own or name in _standard_index():
            yield from self.expand(name, overrides | own, in_suite=True)
        elif kind == "group":
            yield from self._expand_group(name, item, overrides)
        else:
            yield self._plan(name, item, overrides, None, in_suite=True)

    def _plan(
        self, name: str, definition: Mapping[str, Any], overrides: dict[str, Any], file: Path | None, in_suite: bool
    ) -> PlannedTask:
        config = {**definition, **overrides}
        if self._source.data is not None and "class" not in config:
            overrides = overrides | _local_data(config, self._source.data)
            config |= overrides
        _require_no_foreign_code(name, config)
        missing = NOT_ALLOWED if config.get("unsafe_code") and not self._source.allow_code_execution else None
        if missing and not in_suite:
            raise ValueError(f"the task {name} is not run: {missing}")
        return PlannedTask(name, config, overrides, file, missing)

    def _require_versions(self, suite: str, versions: Mapping[str, Any]) -> None:
        for name, wanted in versions.items():
            found = (self._find(name).cfg.get("metadata") or {}).get("version")
            if str(found) != str(wanted):
                raise ValueError(
                    f"the suite {suite} means version {wanted} of {name}, but the installed lm-eval has {found}, whose "
                    "figures can't be compared; install the lm-eval of that version, or name the tasks themselves"
                )

    def _find(self, name: str) -> Any:
        """lm-eval's entry of a name."""
        if name in self._own:
            return self._own[name]
        standard = _standard_index()
        if name in standard:
            return standard[name]
        close = difflib.get_close_matches(name, [*self._own, *standard], n=5, cutoff=0.5)
        hint = f"the nearest names are {', '.join(close)}" if close else "no name is near"
        raise ValueError(
            f"there is no task, group or tag {name!r}; {hint}; give your own definitions with --task-folder"
        )


def _local_data(config: Mapping[str, Any], data: Path) -> dict[str, Any]:
    """What points a definition to local files, if there are some for its data set."""
    place = data / str(config.get("dataset_path") or "") / str(config.get("dataset_name") or "")
    files = {file.stem: file for file in sorted(place.glob("*")) if file.suffix in BUILDERS} if place != data else {}
    builders = {BUILDERS[file.suffix] for file in files.values()}
    if len(builders) > 1:
        raise ValueError(f"{place} has data files of several kinds ({', '.join(sorted(builders))}); keep one kind")
    if not files:
        return {}
    data_files = {split: str(file.absolute()) for split, file in files.items()}
    return {"dataset_path": builders.pop(), "dataset_name": None, "dataset_kwargs": {"data_files": data_files}}


def _require_no_foreign_code(name: str, config: Mapping[str, Any]) -> None:
    if (config.get("dataset_kwargs") or {}).get("trust_remote_code"):
        raise ValueError(
            f"the task {name} asks with trust_remote_code for code that comes with the data set "
            f"{config.get('dataset_path')!r}; GateLab never runs such code"
        )
    from lm_eval.api import metrics, registry

    assert metrics is not None, "importing it fills the registry"
    for metric in config.get("metric_list") or []:
        label = str(metric.get("metric"))
        is_known = label in registry.metric_registry or "/" in label or config.get("process_results")
        if metric.get("hf_evaluate") or not is_known:
            raise ValueError(
                f"the task {name} scores with {label!r}, code that lm-eval would download; GateLab never runs such code"
            )


@cache
def _standard_index() -> Mapping[str, Any]:
    """lm-eval's own definitions; reading some thousand files takes a few seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager().task_index
