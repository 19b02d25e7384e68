"""A stand-in for the job file's prompt section."""

from types import SimpleNamespace
from typing import Any


def section(**fields: Any) -> Any:
    defaults: dict[str, Any] = dict(user=None, system=None, messages=None, text=None, chat_template=None)
    defaults |= dict(chat_template_kwargs={}, continue_final_message=False, control_tokens=False, files={})
    return SimpleNamespace(**defaults | fields)
