"""pydantic's findings as sentences: one for each key, with the value found and the way out. Knows the model's shape only."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from batchgen.strict_yaml import Path

_WANTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a section (key: value)",
    "model_type": "a section (key: value)",
    "model_attributes_type": "a section (key: value)",
    "finite_number": "a finite number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "string_too_short": "text that is not empty",
    "too_short": "a list that is not empty",
}


def describe(
    error: ValidationError, model: type[BaseModel], data: Any, notes: Mapping[Path, str]
) -> Iterator[tuple[Path, str]]:
    """(key path, sentence) for each key of `data` at which `model` found something; one for all branches of a union."""
    found: dict[Path, list[Any]] = {}
    for one in error.errors():
        found.setdefault(_path_in(data, one), []).append(one)
    for path, errors in found.items():
        in_union = len(path) < len(errors[0]["loc"])
        if in_union and any(len(other) > len(path) and other[: len(path)] == path for other in found):
            continue  # the branch that got further says it better
        yield path, _sentence(path, errors, model, notes.get(path))


def unknown_key(path: Path, model: type[BaseModel]) -> str | None:
    """What to say if `path` is no key of `model`; None if it is one (or lies in a free mapping such as files)."""
    for depth, key in enumerate(path):
        keys = keys_of(model)
        if key not in keys:
            return _unknown(path[: depth + 1], keys, model if depth == 0 else None)
        deeper = _model_in(keys[str(key)])
        if deeper is None:
            free = dict in _parts(keys[str(key)])
            if free or depth == len(path) - 1:
                return None
            return f"{key} is a value, not a section"
        model = deeper
    return None


def keys_of(model: type[BaseModel]) -> dict[str, Any]:
    """Key as written in the file -> its annotation."""
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _sentence(path: Path, errors: list[Any], model: type[BaseModel], note: str | None) -> str:
    first = errors[0]
    if first["type"] == "missing":
        return "required, and not there"
    if first["type"] == "extra_forbidden":
        return _explain_extra(path, model)
    own = [str(one["ctx"]["error"]) for one in errors if one["type"] == "value_error"]
    if own:
        return own[0]
    wanted = [_WANTED[one["type"]].format(**one.get("ctx", {})) for one in errors if one["type"] in _WANTED]
    if not wanted:
        return first["msg"]
    sentence = f"must be {' or '.join(dict.fromkeys(wanted))}, not {_shown(first['input'])}"
    return f"{sentence}: {note}" if note else sentence


def _explain_extra(path: Path, model: type[BaseModel]) -> str:
    owner = model
    for key in path[:-1]:
        owner = _model_in(keys_of(owner)[str(key)]) or owner
    return _unknown(path, keys_of(owner), model)


def _unknown(path: Path, keys: Mapping[str, Any], root: type[BaseModel] | None) -> str:
    name = str(path[-1])
    near = difflib.get_close_matches(name, keys, n=1, cutoff=0.6)
    if near:
        return f"unknown key; did you mean {near[0]}?"
    for section, annotation in (keys_of(root) if root else {}).items():
        inner = _model_in(annotation)
        if inner and name in keys_of(inner):
            return f"unknown key; did you mean {section}.{name}?"
    return f"unknown key; the keys here are {', '.join(keys)}"


def _path_in(data: Any, error: Any) -> Path:
    """The part of an error's location that exists in the data: pydantic puts names of union branches between."""
    path: list[str | int] = []
    for step in error["loc"]:
        inside = (isinstance(data, dict) and step in data) or (
            isinstance(data, list) and isinstance(step, int) and step < len(data)
        )
        if inside:
            data = data[step]
            path.append(step)
        elif error["type"] == "missing" and step == error["loc"][-1]:
            path.append(step)
    return tuple(path)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    return next((part for part in _parts(annotation) if isinstance(part, type) and issubclass(part, BaseModel)), None)


def _parts(annotation: Any) -> list[Any]:
    origin = getattr(annotation, "__origin__", annotation)
    return [origin] + [getattr(part, "__origin__", part) for part in get_args(annotation)]


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'the text "{value}"' if len(value) <= 40 else f'the text "{value[:37]}..."'
    if isinstance(value, dict):
        return "a section"
    return "a list" if isinstance(value, list) else str(value)
