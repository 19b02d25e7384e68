"""YAML as a job file means it: the traps of YAML 1.1 are named instead of silently obeyed. Knows no job.

Refused where they stand: a key given twice, `010` (8 in octal), `1:30` (90), a key that is not text, an unquoted `{{ x }}`.
Noted, and told if the value then has the wrong type: `1e-5` (text), `no` (false), `2024-01-01` (a date).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]

_OCTAL = re.compile(r"[-+]?0[0-7_]+")
_MAX_VALUES = 100_000  # aliases of aliases make billions of a few lines
_TRUTH_WORDS = {"yes", "no", "on", "off", "y", "n"}


@dataclass
class Parsed:
    value: Any = None
    problems: list[tuple[Path, str]] = field(default_factory=list)  # what must be changed
    notes: dict[Path, str] = field(default_factory=dict)  # why a value may not be what it looks like


def parse_yaml(text: str) -> Parsed:
    """The value of one YAML document. Faults are collected in `problems`; nothing is raised."""
    parsed = Parsed()
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is not None:
            parsed.value = _Walk(loader, parsed).value(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        parsed.problems.append(((), f"{where}not valid YAML: {error.problem or error.context}"))
    except yaml.YAMLError as error:
        parsed.problems.append(((), f"not valid YAML: {' '.join(str(error).split())}"))
    except RecursionError:
        parsed.problems.append(((), "not valid YAML: nested too deeply"))
    finally:
        if loader is not None:
            loader.dispose()
    return parsed


class _Walk:
    """Nodes to values. PyYAML's own constructor forgets lines and lets the last of two equal keys win."""

    def __init__(self, loader: yaml.SafeLoader, parsed: Parsed):
        self.loader = loader
        self.parsed = parsed
        self.open_nodes: set[int] = set()
        self.num_values = 0

    def value(self, node: yaml.Node, path: Path) -> Any:
        self.num_values += 1
        if self.num_values > _MAX_VALUES:
            raise yaml.YAMLError(f"more than {_MAX_VALUES:,} values, counting those of aliases each time")
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        if id(node) in self.open_nodes:
            self.problem(path, f"line {node.start_mark.line + 1}: an alias that contains itself")
            return None
        self.open_nodes.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
            assert isinstance(node, yaml.MappingNode)
            return self.mapping(node, path)
        finally:
            self.open_nodes.discard(id(node))

    def mapping(self, node: yaml.MappingNode, path: Path) -> Any:
        if any(isinstance(key, yaml.MappingNode) for key, _ in node.value):
            self.problem(path, "text that begins with {{ must be in quotes, or YAML takes the braces for a mapping")
            return "{{ }}"
        seen: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            name = str(key.value)
            if name in seen and name != "<<":
                where = f"line {line}" if seen[name] == line else f"lines {seen[name]} and {line}"
                self.problem((*path, name), f"given twice, in {where}; keep one")
            seen[name] = line
        self.loader.flatten_mapping(node)  # merge keys: <<: *anchor
        result = {}
        for key, value in node.value:
            name = str(key.value)
            if key.tag != "tag:yaml.org,2002:str":
                self.problem((*path, name), f"a key must be text, and YAML does not read {name} as text; put it in quotes")
            result[name] = self.value(value, (*path, name))
        return result

    def scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        text, kind = node.value, node.tag.rpartition(":")[2]
        plain = node.style is None
        if plain and kind == "int" and _OCTAL.fullmatch(text):
            self.problem(path, f"YAML reads {text} as {int(text, 8)} (octal); write {int(text)}, or put text in quotes")
            return int(text)
        if plain and kind in ("int", "float") and ":" in text:
            seconds = self.loader.construct_object(node)
            self.problem(path, f"YAML reads {text} as {seconds} (base 60); put it in quotes if it is text")
            return seconds
        if plain and kind == "bool" and text.lower() in _TRUTH_WORDS:
            truth = str(self.loader.construct_object(node)).lower()
            self.parsed.notes[path] = f'YAML reads {text} as {truth}; write "{text}" for the text'
        elif plain and kind == "timestamp":
            self.parsed.notes[path] = f'YAML reads {text} as a date; write "{text}" for the text'
        elif plain and kind == "str" and _is_number(text):
            self.parsed.notes[path] = f"YAML reads {text} as text; write {_as_yaml_number(text)}"
        try:
            return self.loader.construct_object(node)
        except ValueError as error:  # such as the date 2024-13-45
            self.problem(path, f"line {node.start_mark.line + 1}: {text}: {error}; put it in quotes if it is text")
            return text

    def problem(self, path: Path, message: str) -> None:
        self.parsed.problems.append((path, message))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text.strip("+-")[:1].isdigit() or text.strip("+-")[:1] == "."


def _as_yaml_number(text: str) -> str:
    """`1e-5` as YAML 1.1 wants it: a dot in the mantissa and a sign in the exponent."""
    mantissa, e, exponent = text.lower().partition("e")
    if not e:
        return text.lstrip("0") or "0"
    sign = "" if exponent[:1] in "+-" else "+"
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{sign}{exponent}"
