"""A row -> its prompt text: the job's own Jinja templates, then the model's chat template. Knows no tokens but by text.

What goes wrong in one row is a RowFault in that row's Prompt; what is wrong for all rows is an exception before the first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchgen.errors import JobFileError, ModelError, UsageError
from batchgen.records import Prompt, RowFault
from batchgen.text.control_tokens import ControlTokenGuard, restore
from batchgen.text.tokenizer import Tokenizer


class PromptSection(Protocol):
    """The `prompt` section of a job. Exactly one of user, messages and text is set."""

    @property
    def user(self) -> str | None: ...  # Jinja template over the row's columns
    @property
    def system(self) -> str | None: ...  # Jinja template; with `messages`, for rows that do not begin with a system message
    @property
    def messages(self) -> str | None: ...  # column that holds a list of {role, content}
    @property
    def text(self) -> str | None: ...  # Jinja template of the raw prompt; no chat template
    @property
    def chat_template(self) -> str | None: ...  # instead of the model's: a template, or the path of one
    @property
    def chat_template_kwargs(self) -> Mapping[str, Any]: ...
    @property
    def continue_final_message(self) -> bool: ...  # go on with a last message of the assistant instead of answering it
    @property
    def control_tokens(self) -> bool: ...  # whether control-token text in a row is that control token
    @property
    def files(self) -> Mapping[str, str]: ...  # name -> path; templates see the content under that name


class NullColumnError(jinja2.UndefinedError):
    """A template used a column whose value is null in this row."""


class NullColumn(jinja2.StrictUndefined):
    """Stands for null: an error when used, but `is defined` and `default(...)` let a template provide for it."""

    @property
    def _undefined_message(self) -> str:
        name = self._undefined_name
        return f"column {name!r} is null; the template can provide for it: {{{{ {name} | default('') }}}}"


class PromptRenderer:
    """Renders rows of one job. Raises JobFileError or ModelError for what no row could be rendered with."""

    def __init__(self, prompt_section: PromptSection, tokenizer: Tokenizer) -> None:
        section = prompt_section
        if sum(value is not None for value in (section.user, section.messages, section.text)) != 1:
            raise JobFileError("prompt: exactly one of prompt.user, prompt.messages and prompt.text must be set")
        if section.text is not None and section.system is not None:
            raise JobFileError("prompt.system: a raw prompt.text has no system message; write it into the text")
        self.section = section
        self.environment = user_environment()
        self.files = {name: _read(f"prompt.files.{name}", path) for name, path in section.files.items()}
        sources = {"user": section.user, "system": section.system, "text": section.text}
        self.templates: dict[str, jinja2.Template] = {}
        self.columns: set[str] = {section.messages} if section.messages is not None else set()
        for name, source in sources.items():
            if source is not None:
                self.templates[name], used = _compile(self.environment, f"prompt.{name}", source)
                self.columns |= used - set(self.files)
        self.chat_template = None if section.text is not None else _chat_template(section.chat_template, tokenizer)
        self.special_tokens_map = tokenizer.special_tokens_map
        tokens = () if section.control_tokens else tokenizer.control_tokens
        trusted = [*self.files.values(), *(s for s in sources.values() if s), self.chat_template or ""]
        self.guard = ControlTokenGuard(tokens, "".join(trusted))

    @property
    def add_special_tokens(self) -> bool:
        """How the prompts are to be encoded: a raw text gets the tokenizer's BOS, a chat template has written its own."""
        return self.section.text is not None

    def render(self, row: dict[str, Any], row_pos: int, row_key: int) -> Prompt:
        """row: column -> Python value, at least `columns`. Never raises for what is in the row."""
        hidden, stand_ins = self.guard.hide({name: row[name] for name in self.columns if name in row})
        try:
            text = self._render_text(hidden) if self.section.text is not None else self._render_chat(hidden)
        except _Fault as e:
            return Prompt(row_pos, row_key, fault=RowFault(e.code, restore(e.message, stand_ins)))
        except NullColumnError as e:
            return Prompt(row_pos, row_key, fault=RowFault("null_prompt", str(e)))
        except Exception as e:  # a template is a program: it can raise anything
            message = " ".join(str(e).split()) or type(e).__name__
            return Prompt(row_pos, row_key, fault=RowFault("template_error", restore(message, stand_ins)))
        if not text.strip():
            return Prompt(row_pos, row_key, fault=RowFault("empty_prompt", "the prompt renders to nothing"))
        if not stand_ins:
            return Prompt(row_pos, row_key, text=text)
        return Prompt(row_pos, row_key, segments=self.guard.segments(text, stand_ins))

    def _render(self, name: str, row: dict[str, Any]) -> str:
        values = {k: NullColumn(name=k, exc=NullColumnError) if v is None else v for k, v in row.items()}
        return self.templates[name].render(values | self.files)

    def _render_text(self, row: dict[str, Any]) -> str:
        return self._render("text", row)

    def _render_chat(self, row: dict[str, Any]) -> str:
        if self.section.messages is not None:
            messages = checked_messages(self.section.messages, row.get(self.section.messages))
        else:
            user = self._render("user", row)
            if not user.strip():
                raise _Fault("empty_prompt", "prompt.user renders to nothing")
            messages = [{"role": "user", "content": user}]
        if "system" in self.templates and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._render("system", row)}, *messages]
        return self._apply_chat_template(messages)

    def _apply_chat_template(self, messages: list[dict[str, Any]]) -> str:
        # transformers' own function, so that the text is the one of apply_chat_template in every corner
        from transformers.utils.chat_template_utils import render_jinja_template

        go_on = self.section.continue_final_message and messages[-1]["role"] == "assistant"
        rendered, _ = render_jinja_template(
            conversations=[messages],
            chat_template=self.chat_template,
            continue_final_message=go_on,
            add_generation_prompt=not go_on,
            **self.special_tokens_map | dict(self.section.chat_template_kwargs),
        )
        return rendered[0]


class RowFilter:
    """`input.where`: a Jinja expression over the row's columns, such as `label is none and length > 10`."""

    def __init__(self, expression: str) -> None:
        environment = user_environment()
        try:
            self.expression = environment.compile_expression(expression, undefined_to_none=False)
        except jinja2.TemplateSyntaxError as e:
            raise JobFileError(f"input.where: {e.message}; expected an expression such as score > 0.5") from e
        used = jinja2.meta.find_undeclared_variables(environment.parse(f"{{{{ {expression} }}}}"))
        self.columns: set[str] = used - set(environment.globals)

    def keeps(self, row: dict[str, Any]) -> bool | RowFault:
        """Whether the row is part of the job; a RowFault where the expression cannot be computed for it. Null is none."""
        try:
            return bool(self.expression(**row))
        except Exception as e:  # comparisons with null, a missing column, arithmetic on text
            return RowFault("template_error", f"input.where: {' '.join(str(e).split())}")


def checked_messages(column: str, value: Any) -> list[dict[str, Any]]:
    """The messages of a row as transformers normalizes them (keys that are null are dropped), or the row's fault."""
    if value is None:
        raise _Fault("null_prompt", f"column {column!r} is null")
    if not isinstance(value, (list, tuple)):
        raise _Fault("bad_messages", f"column {column!r} holds {type(value).__name__}, not a list of messages")
    if not value:
        raise _Fault("empty_prompt", f"column {column!r} is an empty list of messages")
    messages = []
    for i, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise _Fault(
                "bad_messages", f"message {i} of column {column!r} is {type(message).__name__}, not a role and content"
            )
        kept = {key: item for key, item in message.items() if item is not None}
        if not isinstance(kept.get("role"), str):
            raise _Fault("bad_messages", f"message {i} of column {column!r} has no role")
        if "content" not in kept and "tool_calls" not in kept:
            raise _Fault("bad_messages", f"message {i} of column {column!r} has no content")
        if not isinstance(kept.get("content", ""), (str, list, tuple)):
            raise _Fault("bad_messages", f"message {i} of column {column!r} has a content that is neither text nor parts")
        messages.append(kept)
    return messages


def user_environment() -> jinja2.Environment:
    """Jinja as chat templates have it, but strict: a name that is no column is an error, not an empty string."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


class _Fault(Exception):
    """Carries a RowFault up to `render`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own escapes for HTML
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, default=str, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _compile(environment: jinja2.Environment, place: str, source: str) -> tuple[jinja2.Template, set[str]]:
    try:
        used = jinja2.meta.find_undeclared_variables(environment.parse(source)) - set(environment.globals)
        return environment.from_string(source), used
    except jinja2.TemplateSyntaxError as e:
        raise JobFileError(f"{place}: line {e.lineno}: {e.message}") from e


def _chat_template(own: str | None, tokenizer: Tokenizer) -> str:
    kind: type[UsageError]
    if own is not None:
        template = own if "{" in own else _read("prompt.chat_template", own)
        place, kind = "prompt.chat_template", JobFileError
    elif tokenizer.chat_template is not None:
        template = tokenizer.chat_template
        place, kind = "the model's own chat template (prompt.chat_template takes another)", ModelError
    else:
        raise ModelError("the model has no chat template; set prompt.chat_template, or write a raw prompt.text")
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template(conversations=[[{"role": "user", "content": ""}]], chat_template=template)
    except jinja2.TemplateSyntaxError as e:
        raise kind(f"{place}: cannot be compiled: line {e.lineno}: {e.message}") from e
    except Exception:  # it compiles; whether it takes a row's messages is that row's matter
        return template
    return template


def _read(place: str, path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise JobFileError(f"{place}: {path} cannot be read: {e}") from e
