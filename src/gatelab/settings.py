"""The base of every settings record: frozen, strict about names, written and read as YAML.

A settings record is plain data. It never holds a callable and never reads the environment, so the file that a run
saves says everything that decided its outcome.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

MOST_CHARACTERS = 1_000_000
MOST_MISTAKES = 20
MOST_DEPTH = 50


class Settings(BaseModel):
    """A frozen record whose unknown keys and impossible values are refused with the nearest right name.

    Build one from outside data with :meth:`parse`, :meth:`from_yaml` or :meth:`with_overrides`: they raise a
    ``ValueError`` of one readable line per mistake.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Self:
        """Build the record from nested mappings; a ``ValueError`` names each wrong key or value and the way out."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            details = error.errors(include_url=False)
            lines = [_explain(detail, cls) for detail in details[:MOST_MISTAKES]]
            if len(details) > MOST_MISTAKES:
                lines.append(f"and {len(details) - MOST_MISTAKES} mistakes more")
            raise ValueError("\n".join(lines)) from None

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """Read the record from YAML text, as :meth:`to_yaml` writes it."""
        try:
            data = _read_yaml(text)
        except ValueError as error:
            raise ValueError(f"a {cls.__name__} file is not readable as YAML: {error}") from None
        if not isinstance(data, Mapping):
            raise ValueError(f"a {cls.__name__} file holds a mapping of names to values, not {type(data).__name__}")
        return cls.parse(data)

    def to_mapping(self) -> dict[str, Any]:
        """The record as nested plain values (dict, list, str, int, float, bool, None)."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """The record as YAML text, every field written out, in the order of its definition."""
        return yaml.safe_dump(self.to_mapping(), sort_keys=False)

    def with_overrides(self, overrides: Iterable[str]) -> Self:
        """A copy with ``dotted.path=value`` assignments applied; values are read as YAML.

        List entries are addressed by number (``model.gates.0.activation=silu``). A record that is set as a mapping gets
        its defaults, so that later assignments can go into it. Raises ``ValueError`` for a path that does not exist,
        with the nearest one, and for a value that does not fit.
        """
        data = self.to_mapping()
        for override in overrides:
            path, separator, text = override.partition("=")
            if not separator:
                raise ValueError(f"{override!r} is not an assignment: write dotted.path=value")
            value = _read_value(text, override)
            _assign(data, path.strip(), _completed(value, _annotation_at(type(self), path.strip().split("."))))
        return type(self).parse(data)


def difference(left: Settings, right: Settings) -> dict[str, tuple[Any, Any]]:
    """Every dotted path at which two records differ, with both values; a side that lacks the path holds ``None``."""
    left_leaves, right_leaves = _leaves(left.to_mapping()), _leaves(right.to_mapping())
    return {
        path: (left_leaves.get(path), right_leaves.get(path))
        for path in left_leaves | right_leaves
        if left_leaves.get(path) != right_leaves.get(path)
    }


def nearest(name: str, choices: Iterable[str]) -> str:
    """A sentence for a name that is not among the choices: the nearest one, if any is near, and the whole list."""
    choices = list(choices)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    guess = f"did you mean {close[0]!r}? " if close else ""
    return f"{guess}the choices are: {', '.join(choices)}"


class _PlainLoader(yaml.SafeLoader):
    """YAML without tags and aliases: a few lines of aliases can stand for more than memory holds."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        if self.depth > MOST_DEPTH:
            raise yaml.YAMLError("it is nested too deeply")
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"settings have no aliases, but there is one at *{event.anchor}; write the value out")
        if event.tag is not None:
            raise yaml.YAMLError(f"settings have no tags, but there is one: {event.tag}; write the plain value")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _read_yaml(text: str) -> Any:
    """The plain value of YAML text; ``ValueError`` for whatever is none, too long, or nested without measure."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it has {len(text):,} characters, more than the {MOST_CHARACTERS:,} that are read")
    try:
        return yaml.load(text, _PlainLoader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(str(error)) from None


def _read_value(text: str, override: str) -> Any:
    try:
        return _read_yaml(text)
    except ValueError:
        raise ValueError(f"the value in {override!r} is not readable as YAML; quote it if it is text") from None


def _assign(data: Any, path: str, value: Any) -> None:
    """Set one leaf in nested dicts and lists, walking the dotted path."""
    *parents, last = path.split(".")
    node, walked = data, []
    for part in [*parents, last]:
        where = ".".join(walked) or "the settings"
        if node is None or not isinstance(node, dict | list):
            raise ValueError(f"{path!r}: {where} is {node!r} and has no field {part!r}; set {where} itself first")
        if isinstance(node, list):
            if not part.isdecimal() or int(part) >= len(node):
                raise ValueError(f"{path!r}: {where} has {len(node)} entries, numbered from 0, not {part!r}")
            key: Any = int(part)
        else:
            if part not in node:
                raise ValueError(f"{path!r} is unknown: {where} has no field {part!r}; {nearest(part, node)}")
            key = part
        if len(walked) == len(parents):
            node[key] = value
        else:
            node = node[key]
            walked.append(part)


def _completed(value: Any, annotation: Any) -> Any:
    """A mapping with the defaults of the record it is for; any other value, and one that does not fit, as it is."""
    if annotation is None or not isinstance(value, dict):
        return value
    adapter = TypeAdapter(annotation)
    try:
        return adapter.dump_python(adapter.validate_python(value), mode="json")
    except ValidationError:
        return value


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        entries: Sequence[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, list):
        entries = list(enumerate(value))
    else:
        return {path: value}
    return {p: v for key, item in entries for p, v in _leaves(item, f"{path}.{key}".lstrip(".")).items()}


def _explain(detail: ErrorDetails, owner: type[BaseModel]) -> str:
    """One line for one pydantic error: where, what was given, what is possible."""
    parts = [str(part) for part in detail["loc"]]
    where = ".".join(parts) or owner.__name__
    given = detail["input"]
    if detail["type"] == "extra_forbidden":
        return f"{where!r} is unknown; {nearest(parts[-1][:100], _fields_at(owner, parts[:-1]))}"
    if detail["type"] == "literal_error":
        choices = detail.get("ctx", {})["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        return f"{where} cannot be {_shown(given)}; {nearest(str(given)[:100], choices)}"
    if detail["type"] == "missing":
        return f"{where} is missing: it has no default"
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "value_error":
        return f"{where}: {message}" if parts else message
    return f"{where} cannot be {_shown(given)}: {message[0].lower()}{message[1:]}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _fields_at(owner: type[BaseModel], parts: Sequence[str]) -> list[str]:
    """The field names of the record reached by the given path from ``owner`` (list positions are stepped over)."""
    model: type[BaseModel] = owner
    for part in parts:
        if part in model.model_fields:
            model = _record_type(model.model_fields[part].annotation) or model
    return list(model.model_fields)


def _annotation_at(owner: type[BaseModel], parts: Sequence[str]) -> Any:
    """The type of the field at this path from ``owner``, or of an entry at a list position; ``None`` for no field."""
    model: type[BaseModel] | None = owner
    annotation = None
    for part in parts:
        if part.isdecimal():
            annotation = model
        elif model is not None and part in model.model_fields:
            annotation = model.model_fields[part].annotation
            model = _record_type(annotation)
        else:
            return None
    return annotation


def _record_type(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _record_type(argument)
        if found is not None:
            return found
    return None
