"""Which values of a job file are paths, and how they become absolute, so that a job means the same from any folder."""

from __future__ import annotations

import os
from typing import Any


def resolve_paths(data: dict[str, Any], folder: str) -> None:
    """Make the paths in a job's raw data absolute. Values of a wrong type are left for validation to name."""

    def section(name: str) -> dict[str, Any]:
        value = data.get(name)
        return value if isinstance(value, dict) else {}

    model, source, prompt = section("model"), section("input"), section("prompt")
    for key in ("path", "tokenizer"):
        if isinstance(name := model.get(key), str) and _is_local_model(name, folder):
            model[key] = _absolute(name, folder)
    if isinstance(path := source.get("path"), str):
        source["path"] = _absolute(path, folder)
    elif isinstance(path, list):
        source["path"] = [_absolute(item, folder) if isinstance(item, str) else item for item in path]
    if isinstance(template := prompt.get("chat_template"), str) and not is_template_text(template):
        prompt["chat_template"] = _absolute(template, folder)
    if isinstance(files := prompt.get("files"), dict):
        for name, path in files.items():
            files[name] = _absolute(path, folder) if isinstance(path, str) else path


def _absolute(path: str, folder: str) -> str:
    if not path or "://" in path:
        return path
    return os.path.normpath(os.path.join(folder, os.path.expanduser(path)))


def _is_local_model(name: str, folder: str) -> bool:
    """A hub id such as `org/model` stays a hub id unless it is also a path that exists."""
    if not name or name.startswith("packaged:"):
        return False
    return name.startswith((".", "/", "~")) or name.endswith(".gguf") or os.path.exists(os.path.join(folder, name))


def is_template_text(template: str) -> bool:
    return "{" in template or "\n" in template
