"""Turns what a person wrote (a YAML mapping, ``--set key=value``) into a frozen dataclass, or into one list of all problems.

A settings class is a frozen dataclass whose fields are made by :func:`setting`. In files a field is written in
camelCase (``checkpoint_every`` is ``checkpointEvery``), nested dataclasses as nested mappings.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from training.errors import BadInput

T = TypeVar("T")


class _Loader(yaml.SafeLoader):
    """Reads 1e-6 as a number, as YAML 1.2 and JSON do; for PyYAML it is a text, and a model's configuration would hold that text."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789"))


def setting(
    default: Any = dataclasses.MISSING,
    doc: str = "",
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    choices: tuple[str, ...] = (),
    key: str | None = None,
) -> Any:
    """A field of a settings class: its default (none: required), what it means (unit and why), its bounds, its name in files if not the usual one."""
    metadata = {"doc": doc, "at_least": at_least, "above": above, "at_most": at_most, "choices": choices, "key": key}
    if isinstance(default, (dict, list)) or dataclasses.is_dataclass(default):
        return dataclasses.field(default_factory=lambda: default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def file_key(name: str) -> str:
    """``checkpoint_every`` -> ``checkpointEvery``."""
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


def _key(field: dataclasses.Field[Any]) -> str:
    return field.metadata.get("key") or file_key(field.name)


def parse(cls: type[T], raw: Mapping[str, Any], where: str = "settings") -> T:
    """``raw`` as an instance of ``cls``.

    Raises BadInput with every problem at once, one a line, each naming the key, its value and the way out.
    """
    problems: list[str] = []
    value = _parse(cls, raw, "", problems)
    if not problems:
        try:
            return typing.cast(T, value())
        except BadInput as error:
            problems.append(str(error))
    raise BadInput(_joined(where, problems))


def collect(cls: type[T], raw: Any, prefix: str, problems: list[str]) -> T | None:
    """:func:`parse` for one part of a bigger whole: what is wrong is appended to ``problems``, its keys named with ``prefix``; None if anything was."""
    before = len(problems)
    value = _parse(cls, raw, prefix, problems)
    if len(problems) > before:
        return None
    try:
        return typing.cast(T, value())
    except BadInput as error:
        problems.append(f"{prefix.rstrip('.')}: {error}")
        return None


def _joined(where: str, problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return f"{where}: {problems[0]}"
    return f"{where}: {len(problems)} problems\n" + "\n".join(f"  - {line}" for line in problems)


def _parse(cls: type, raw: Any, prefix: str, problems: list[str]) -> Any:
    """A function that makes the instance, for it may be made only when no part of it has a problem."""
    if not isinstance(raw, Mapping):
        problems.append(f"{prefix.rstrip('.') or 'the file'} must be a mapping of keys to values, not {_shown(raw)}")
        return lambda: None
    hints = typing.get_type_hints(cls)
    fields = {_key(f): f for f in dataclasses.fields(cls)}
    arguments: dict[str, Any] = {}
    for key, value in raw.items():
        if not isinstance(key, str) or key not in fields:
            problems.append(_unknown(f"{prefix}{key}", str(key), prefix, fields))
            continue
        field = fields[key]
        before = len(problems)
        converted = _convert(hints[field.name], field, value, prefix + key, problems)
        if len(problems) == before:
            arguments[field.name] = converted
    for key, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and key not in raw:
            problems.append(f"{prefix}{key} is missing: {field.metadata['doc']}")
    return lambda: cls(**{name: value() if callable(value) else value for name, value in arguments.items()})


def _unknown(full: str, key: str, prefix: str, fields: Mapping[str, Any]) -> str:
    plain = {re.sub("[^a-z0-9]", "", name.lower()): name for name in fields}
    near = difflib.get_close_matches(re.sub("[^a-z0-9]", "", key.lower()), plain, n=1, cutoff=0.6)
    if near:
        return f"{full} is no setting; did you mean {prefix}{plain[near[0]]}?"
    return f"{full} is no setting; known: {', '.join(sorted(fields))}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _convert(hint: Any, field: dataclasses.Field[Any], value: Any, key: str, problems: list[str]) -> Any:
    options = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    if value is None:
        if type(None) not in options:
            problems.append(f"{key} is empty; give it a value or leave the line out")
        return None
    expected: list[str] = []
    for option in options:
        if option is type(None):
            continue
        if dataclasses.is_dataclass(option):
            return _parse(typing.cast(type, option), value, key + ".", problems)
        ok, converted = _simple(option, field, value)
        if ok:
            problem = _out_of_bounds(field, converted)
            if problem:
                problems.append(f"{key} = {_shown(value)}: {problem}")
            return converted
        expected.append(_name(option))
    choices = field.metadata["choices"]
    # YAML makes numbers of unquoted versions and account ids (1.30 becomes 1.3, 0123 becomes 83).
    quotes = "; put it in quotes" if str in options and isinstance(value, (int, float)) and not isinstance(value, bool) and not choices else ""
    problems.append(f"{key} = {_shown(value)}: {'one of ' + ', '.join(choices) if choices else ' or '.join(expected)} expected{quotes}")
    return None


def _name(option: Any) -> str:
    if typing.get_origin(option) is tuple:
        return "a list of texts"
    if typing.get_origin(option) is dict:
        return "a mapping"
    return {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}[option]


def _simple(option: Any, field: dataclasses.Field[Any], value: Any) -> tuple[bool, Any]:
    choices = field.metadata["choices"]
    if choices:
        # YAML reads a bare yes/no as a boolean.
        if isinstance(value, bool):
            value = "yes" if value else "no"
        return (isinstance(value, str) and value in choices), value
    if option is bool:
        return isinstance(value, bool), value
    if option is int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return isinstance(value, int) and not isinstance(value, bool), value
    if option is float:
        if isinstance(value, str):  # YAML reads 1e-4 (no dot) as a text
            try:
                value = float(value)
            except ValueError:
                return False, value
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and math.isfinite(value), float(value) if number else value
    if option is str:
        return isinstance(value, str) and value != "", value
    if typing.get_origin(option) is tuple:
        if isinstance(value, str):
            value = [value]
        return isinstance(value, list) and bool(value) and all(isinstance(v, str) and v for v in value), tuple(value) if isinstance(value, list) else value
    if typing.get_origin(option) is dict:
        return isinstance(value, Mapping) and all(isinstance(k, str) for k in value), value
    raise TypeError(f"no rule for a setting of type {option}")


def _out_of_bounds(field: dataclasses.Field[Any], value: Any) -> str | None:
    m = field.metadata
    if m["at_least"] is not None and value < m["at_least"]:
        return f"must be at least {m['at_least']}"
    if m["above"] is not None and value <= m["above"]:
        return f"must be more than {m['above']}"
    if m["at_most"] is not None and value > m["at_most"]:
        return f"must be at most {m['at_most']}"
    return None


def read_file(path: str) -> dict[str, Any]:
    """The YAML (or JSON) mapping in the file at ``path``. Raises BadInput where there is none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise BadInput(f"--config {path}: can't be read ({reason}); give the path of a YAML file") from error
    try:
        raw = yaml.load(text, _Loader)  # noqa: S506 (it is a SafeLoader)
    except yaml.YAMLError as error:
        raise BadInput(f"--config {path}: not valid YAML: {' '.join(str(error).split())}") from error
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise BadInput(f"--config {path}: must be a mapping of keys to values, not {_shown(raw)}")
    return raw


def apply_overrides(raw: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """``raw`` with each ``key=value`` (``model.random=tiny``; the value is read as YAML) laid over it."""
    result: dict[str, Any] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in raw.items()}
    for override in overrides:
        key, sign, text = override.partition("=")
        if not sign or not key:
            raise BadInput(f"--set {override}: write it as key=value, for example --set steps=100")
        try:
            value = yaml.load(text, _Loader) if text else None  # noqa: S506
        except yaml.YAMLError as error:
            raise BadInput(f"--set {override}: the value is not valid YAML: {' '.join(str(error).split())}") from error
        *parents, last = key.split(".")
        place = result
        for parent in parents:
            below = place.get(parent)
            if not isinstance(below, dict):
                below = {}
            place[parent] = dict(below)
            place = place[parent]
        place[last] = value
    return result


def as_mapping(value: Any) -> dict[str, Any]:
    """The inverse of :func:`parse`: a settings instance as plain data under its file keys (JSON can hold it)."""
    result: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if dataclasses.is_dataclass(item):
            item = as_mapping(item)
        elif isinstance(item, tuple):
            item = list(item)
        result[_key(field)] = item
    return result


def describe(cls: type, prefix: str = "") -> list[tuple[str, str, str]]:
    """(key, default, meaning) of every setting of ``cls``, nested ones with dotted keys: what ``--help-settings`` prints."""
    hints = typing.get_type_hints(cls)
    rows: list[tuple[str, str, str]] = []
    for field in dataclasses.fields(cls):
        key = prefix + _key(field)
        nested = next((h for h in (hints[field.name], *typing.get_args(hints[field.name])) if dataclasses.is_dataclass(h)), None)
        if nested is not None:
            rows += describe(typing.cast(type, nested), key + ".")
            continue
        default = "required" if field.default is dataclasses.MISSING else str(field.default)
        choices = field.metadata["choices"]
        meaning = field.metadata["doc"] + (f" One of: {', '.join(choices)}." if choices else "")
        rows.append((key, default, meaning))
    return rows
