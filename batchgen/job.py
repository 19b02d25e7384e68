"""The job file: what may be in it, its defaults, and how it is read. Imports only YAML and pydantic, so it is quick.

A key is described once, here; `job_json_schema` and the test over jobs/eval.yaml hold the other places to it.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from batchgen.errors import JobFileError
from batchgen.job_errors import describe, unknown_key
from batchgen.job_paths import is_template_text, resolve_paths
from batchgen.strict_yaml import Path as KeyPath
from batchgen.strict_yaml import parse_yaml

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def _bytes(value: Any) -> Any:
    """`2GiB` -> 2147483648. Other values pass, for the type check to judge."""
    if not isinstance(value, str) or value == "auto":
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)B", value.strip().upper())
    if match is None:
        raise ValueError(f'must be auto, a number of bytes, or a size such as 512MiB or 2GiB, not "{value}"')
    return int(float(match[1]) * _UNITS[match[2]])


def _rows_or_share(value: Any) -> Any:
    is_share = isinstance(value, str) and re.fullmatch(_SHARE, value)
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if value is None or is_share or is_count:
        return value
    raise ValueError(f"must be a number of rows, a share of them such as 5%, or null, not {value!r}")


def _can_be_a_file(path: str) -> str:
    """Neither NUL, nor what this locale cannot write, such as half of a surrogate pair."""
    try:
        if b"\0" not in os.fsencode(path):
            return path
    except UnicodeEncodeError:
        pass
    known = "the character NUL ends a name" if "\0" in path else f"the locale's names are {sys.getfilesystemencoding()}"
    raise ValueError(f"no file can have the name {path!a}: {known}")


_SHARE = r"^(100|\d{1,2}(\.\d+)?)%$"
Text = Annotated[str, Field(min_length=1)]
FileName = Annotated[Text, AfterValidator(_can_be_a_file)]
PositiveOrAuto = Annotated[int, Field(ge=1)] | Literal["auto"]
FailedRows = Annotated[
    int | str | None,
    BeforeValidator(_rows_or_share),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": _SHARE}, {"type": "null"}]}),
]
ByteSize = Annotated[
    Annotated[int, Field(ge=1024)] | Literal["auto"],
    BeforeValidator(_bytes),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1024}, {"type": "string", "pattern": "^(auto|[0-9.]+ ?[KMGT]i?B)$"}]}
    ),
]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    """Which model answers."""

    path: FileName = Field(description="Hub id, local folder, .gguf file, or packaged:smollm2")
    revision: Text | None = Field(None, description="Branch, tag or commit of a hub id; null takes the default branch")
    tokenizer: FileName | None = Field(None, description="Hub id or folder of another tokenizer; null takes the model's own")
    max_model_len: int | None = Field(
        None, ge=1, description="Prompt and answer together, in tokens; null takes the model's limit"
    )


class InputSection(Section):
    """Which rows are asked."""

    path: FileName | Annotated[list[FileName], Field(min_length=1)] = Field(
        description="File, folder (read with its subfolders) or glob, or a list of these; relative to the job file. Or a "
        "data set, hf://datasets/ORG/NAME, or - for standard input"
    )
    format: Literal["auto", "parquet", "jsonl", "csv", "arrow", "hf", "openai-batch"] = Field(
        "auto",
        description="auto takes what the suffix of the files says; hf, what load_dataset makes of a local folder; "
        "openai-batch, lines of {custom_id, method, url, body}",
    )
    config: Text | None = Field(None, description="Configuration of a data set")
    split: Text | None = Field(None, description="Split of a data set, such as test; null takes the only one")
    revision: Text | None = Field(None, description="Branch, tag or commit of a data set on the hub")
    columns: list[Text] | None = Field(None, description="Input columns carried to the output; null carries all")
    id_column: Text | None = Field(
        None, description="Column that names a row: unique, never null. Seeds follow it, not the position"
    )
    where: Text | None = Field(
        None, description="Jinja expression over the columns; rows for which it is false are not in the job"
    )
    limit: int | None = Field(None, ge=1, description="Take the first rows only (counted after where)")

    @field_validator("path", mode="before")
    @classmethod
    def _standard_input(cls, path: Any) -> Any:
        """`-` is no file name, though paths have been made absolute by now, and a bare one is a list of nothing in YAML."""
        return "-" if path == [None] or (isinstance(path, str) and os.path.basename(path) == "-") else path

    @field_validator("columns")
    @classmethod
    def _no_column_twice(cls, columns: list[str] | None) -> list[str] | None:
        for name in columns or []:
            if (columns or []).count(name) > 1:
                raise ValueError(f"{name} is listed twice; keep one")
        return columns


class PromptSection(Section):
    """How a row becomes a prompt. Exactly one of user, messages and text."""

    user: Text | None = Field(None, description="Jinja template of the user's turn, over the columns")
    messages: Text | None = Field(None, description="Column that holds lists of {role, content}")
    text: Text | None = Field(None, description="Jinja template of a raw prompt; no chat template is applied")
    system: Text | None = Field(None, description="Jinja template of the system turn; with user or messages")
    files: dict[str, FileName] = Field(
        default_factory=dict, description="Name -> text file whose content templates see under that name"
    )
    chat_template: Text | None = Field(None, description="Jinja text, or path of a file with it; null takes the model's own")
    chat_template_kwargs: dict[str, JsonValue] = Field(
        default_factory=dict, description="Further variables for the chat template"
    )
    continue_final_message: bool = Field(
        False, description="Go on with the last message of messages instead of opening a new turn"
    )
    control_tokens: bool = Field(
        False,
        description="Whether the text of a control token inside a row's content becomes that token (else it stays text)",
    )
    on_too_long: Literal["error", "truncate_left", "truncate_right", "truncate_middle"] = Field(
        "error", description="What happens to a prompt that does not fit: an error row, or which end of it is cut away"
    )

    @field_validator("files")
    @classmethod
    def _names_that_templates_can_say(cls, files: dict[str, str]) -> dict[str, str]:
        for name in files:
            if not name.isidentifier():
                raise ValueError(f'"{name}" cannot be a name in a template; use letters, digits and _')
        return files

    @model_validator(mode="after")
    def _one_form(self) -> PromptSection:
        given = [name for name in ("user", "messages", "text") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of user, messages, text; found {' and '.join(given) or 'none'}")
        if self.text is not None:
            for name in ("system", "chat_template", "chat_template_kwargs"):
                if getattr(self, name):
                    raise ValueError(f"{name} has no effect with text, which is a raw prompt; use user, or remove {name}")
        if self.continue_final_message and self.messages is None:
            raise ValueError("continue_final_message needs messages: there is no final message to continue")
        return self

    def read_files(self) -> dict[str, str]:
        """Name -> content of each of `files`. Raises JobFileError for one that is missing or not UTF-8."""
        return {name: _read_text(path, f"prompt.files.{name}") for name, path in self.files.items()}

    def read_chat_template(self) -> str | None:
        """The Jinja text of the job's own chat template. Raises JobFileError if it is a file that cannot be read."""
        if self.chat_template is None or is_template_text(self.chat_template):
            return self.chat_template
        return _read_text(self.chat_template, "prompt.chat_template")


class SamplingSection(Section):
    """How an answer is drawn and when it ends."""

    max_tokens: int = Field(256, ge=1, le=10_000_000, description="Longest answer, in tokens")
    temperature: float = Field(
        0.0, ge=0, le=10, description="0 takes the likeliest token (greedy); 1 samples the model's own distribution"
    )
    top_k: int = Field(0, ge=0, description="Sample among the k likeliest tokens; 0 is off")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Sample among the likeliest tokens that together hold this probability; 1 is off"
    )
    min_p: float = Field(
        0.0, ge=0, le=1, description="Sample among tokens at least this times as likely as the likeliest; 0 is off"
    )
    seed: int = Field(0, ge=0, le=2**63 - 1, description="Same seed, same draws, at any batch size and after any restart")
    stop: list[str] = Field(default_factory=list, description="Texts that end an answer; the answer is cut before them")
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(
        default_factory=list, description="Token ids that end an answer, besides the model's own"
    )
    ignore_eos: bool = Field(False, description="Do not stop at the model's own end tokens (for measurements)")
    n: int = Field(1, ge=1, le=10_000, description="Answers for each row; they share the prompt's computation")

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, stop: list[str]) -> list[str]:
        if "" in stop:
            raise ValueError(f"item {stop.index('')} is an empty text, which would end every answer at once; remove it")
        return stop


class ExtractSection(Section):
    """A value taken out of the answer by a regular expression, and compared if asked."""

    pattern: Text = Field(description="Python regular expression; group 1 is taken if there is one, else the whole match")
    take: Literal["first", "last"] = Field("last", description="Which match counts")
    column: Text = Field("extracted", description="Name of the new column")
    expected: Text | None = Field(
        None, description="Input column with the right value; adds the column correct and an accuracy"
    )
    as_: Literal["text", "number"] = Field(
        "text", alias="as", description="How to compare; number drops commas and a trailing dot and compares values"
    )

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return pattern


class OutputSection(Section):
    """Where answers go and how often they are made safe."""

    path: FileName = Field(description="The run folder; relative to the current folder")
    commit_rows: int = Field(256, ge=1, le=10_000_000, description="Commit after so many answers")
    commit_seconds: float = Field(
        30.0, gt=0, le=86_400, description="Commit after so many seconds, if there is anything to commit"
    )
    checkpoint_seconds: float | None = Field(
        60.0,
        gt=0,
        le=86_400,
        description="Save the tokens of unfinished answers at most so often; null saves whole answers only",
    )
    max_failed_rows: FailedRows = Field(
        None, description="Stop when more rows have failed: a number, or a share of all rows such as 5%; null never stops"
    )
    format: Literal["parquet", "jsonl", "openai-batch"] = Field(
        "parquet", description="Of results/: Parquet, JSON lines, or OpenAI's batch output and errors"
    )
    push_to: FileName | None = Field(
        None, description="Folder or URL (s3://bucket/folder, gs://...) that gets a copy of results/ at the end of a run"
    )
    rows_per_file: int | None = Field(1_000_000, ge=1, description="Rows in one file of results/; null for a single file")
    compression: Literal["zstd", "snappy", "none"] = Field("zstd", description="Of all Parquet files written")
    prefix: str = Field("", description="Put before the names of the columns that batchgen adds")
    extract: ExtractSection | None = Field(None, description="Take a value out of each answer; null for none")

    def max_failed(self, num_rows: int) -> int | None:
        """max_failed_rows of a job of `num_rows`, as a number of rows."""
        if not isinstance(self.max_failed_rows, str):
            return self.max_failed_rows
        return int(num_rows * float(self.max_failed_rows.removesuffix("%")) / 100)


class EngineSection(Section):
    """How it is computed. Nothing here changes an answer, except dtype, kv_dtype and batch_invariant."""

    device: Text = Field("auto", description="auto, cpu, cuda or cuda:N; auto takes a GPU if there is one")
    backend: Literal["auto", "torch", "triton"] = Field(
        "auto", description="Whose kernels; auto takes triton on a GPU and torch on a CPU"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = Field(
        "auto",
        description="auto is bfloat16 on a GPU and float32 on a CPU; int8 multiplies in 8 bits, on a CPU only",
    )
    kv_dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="auto is that of dtype; fp8 keeps keys and values in 8 bits: half the memory or less",
    )
    batch_invariant: bool = Field(
        False,
        description="Compute a token to the same bits whatever else is in its step; on a GPU, at the cost of shared reads",
    )
    block_size: int = Field(16, ge=1, le=256, description="Tokens in one KV block")
    kv_memory: ByteSize = Field("auto", description="Memory of the KV cache: auto, bytes, or a size such as 2GiB")
    max_num_batched_tokens: PositiveOrAuto = Field("auto", description="Tokens computed in one step, at most")
    max_running_requests: PositiveOrAuto = Field("auto", description="Requests that run at the same time, at most")
    prefix_cache: bool = Field(True, description="Compute a prefix that prompts share only once")
    threads: PositiveOrAuto = Field("auto", description="CPU threads")
    replicas: PositiveOrAuto = Field(
        1, description="Processes with a model each that share the job; auto is one for each GPU, and one on a CPU"
    )
    step_timeout: float | None = Field(
        600.0, gt=0, le=86_400, description="End the process when a step takes more seconds than that; null never does"
    )

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise ValueError(f'must be auto, cpu, cuda or cuda:N such as cuda:0, not "{device}"')
        return device


class Job(Section):
    """One job file."""

    model: ModelSection = Field(description="Which model answers")
    input: InputSection = Field(description="Which rows are asked")
    prompt: PromptSection = Field(description="How a row becomes a prompt")
    sampling: SamplingSection = Field(default_factory=SamplingSection, description="How an answer is drawn and when it ends")
    output: OutputSection = Field(description="Where answers go")
    engine: EngineSection = Field(default_factory=EngineSection, description="How it is computed")

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_openai_batch(cls, job: Any) -> Any:
        """Requests bring their ids and prompts along."""
        source = job.get("input") if isinstance(job, dict) else None
        if isinstance(source, dict) and source.get("format") == "openai-batch":
            job = {"prompt": {"messages": "messages"}} | job | {"input": {"id_column": "custom_id"} | source}
        return job

    @model_validator(mode="after")
    def _openai_batch_goes_with_its_kind(self) -> Job:
        if self.input.format == "openai-batch" and (
            self.prompt.user is not None or self.prompt.messages not in (None, "messages")
        ):
            raise ValueError(
                "prompt: requests of an OpenAI batch file have their own; leave it out for chat completions, or set "
                'prompt.text to "{{ prompt }}" for completions'
            )
        if self.output.format == "openai-batch":
            if self.input.format != "openai-batch":
                raise ValueError("output.format: openai-batch needs input.format: openai-batch")
            for key, value in (("input.columns", self.input.columns), ("output.extract", self.output.extract)):
                if value is not None:
                    raise ValueError(
                        f"{key}: has no place in OpenAI's batch output; remove it, or take another output.format"
                    )
        return self

    def settings_that_change_answers(self) -> dict[str, Any]:
        """Dotted key -> value of every setting that a resumed run may not change; templates and files by content.

        Left out: how it is computed (engine, but for what rounds otherwise), when it is saved, and extract, which merge does
        anew. Also left out is input.path: the reader's fingerprint of the content stands for it.
        """
        sections = self.model_dump(include={"model", "prompt", "sampling", "input", "engine"})
        sections["input"].pop("path")
        rounds = ("dtype", "kv_dtype", "batch_invariant")
        sections["engine"] = {name: value for name, value in sections["engine"].items() if name in rounds}
        sections["prompt"]["chat_template"] = self.prompt.read_chat_template()
        sections["prompt"]["files"] = {
            name: f"sha256:{hashlib.sha256(content.encode()).hexdigest()}"
            for name, content in self.prompt.read_files().items()
        }
        return {f"{section}.{key}": value for section, values in sections.items() for key, value in _flat(values)}


def load_job(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Job:
    """Read the job file at `path`, then apply `overrides` such as "engine.block_size=4" (--set, values in YAML).

    Paths in the file are relative to its folder, those in overrides and output.path to the current folder.
    Raises JobFileError with one line for each problem of the file and of the overrides.
    """
    place = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise JobFileError(f"{place}: cannot read the job file: {getattr(error, 'strerror', None) or error}") from None
    parsed = parse_yaml(text)
    data = parsed.value
    if not parsed.problems and not isinstance(data, dict):
        parsed.problems.append(((), "a job file has sections (model, input, prompt, output); this one has none"))
    if not isinstance(data, dict):
        raise JobFileError("\n".join(_line(place, *problem) for problem in parsed.problems))
    resolve_paths(data, os.path.dirname(os.path.abspath(path)))

    problems = [(place, *problem) for problem in parsed.problems]
    notes = dict(parsed.notes)
    set_paths: dict[KeyPath, str] = {}
    for override in overrides:
        for message in _apply(override, data, set_paths, notes):
            problems.append((f"--set {override}", (), message))

    job = None
    try:
        job = Job.model_validate(data)
    except ValidationError as error:
        told = {key_path for _, key_path, _ in problems}
        for key_path, message in describe(error, Job, data, notes):
            if key_path not in told:
                problems.append((_place_of(key_path, set_paths, place), key_path, message))
    if problems or job is None:
        raise JobFileError("\n".join(_line(*problem) for problem in problems))
    return job


def job_json_schema() -> dict[str, Any]:
    """The JSON Schema of a job file, for editors."""
    schema = Job.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "batchgen job file"}


def _apply(override: str, data: dict[str, Any], set_paths: dict[KeyPath, str], notes: dict[KeyPath, str]) -> list[str]:
    """Put one --set into `data`; returns what is wrong with it."""
    name, equals, text = override.partition("=")
    keys = tuple(name.strip().split("."))
    if not equals or not all(keys):
        return ["write --set section.key=value"]
    if message := unknown_key(keys, Job):
        return [message]
    if text.lstrip().startswith(("{{", "{%")):  # a template, which no YAML value begins like
        value: Any = text
    else:
        parsed = parse_yaml(text)
        if parsed.problems:
            return [message for _, message in parsed.problems]
        value = parsed.value
        notes.update({(*keys, *at): note for at, note in parsed.notes.items()})
    nested = value
    for key in reversed(keys):
        nested = {key: nested}
    resolve_paths(nested, os.getcwd())
    target = data
    for key in keys[:-1]:
        if target.get(key) is None:
            target[key] = {}
        target, nested = target[key], nested[key]
        if not isinstance(target, dict):
            return [f"{key} is not a section in the job file"]
    target[keys[-1]] = nested[keys[-1]]
    set_paths[keys] = f"--set {override}"
    return []


def _read_text(path: str, key: str) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8")  # not read_text: it would change \r\n
    except (OSError, UnicodeDecodeError) as error:
        raise JobFileError(f"{key}: {path}: cannot read it as text: {getattr(error, 'strerror', None) or error}") from None


def _flat(values: dict[str, Any], above: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in values.items():
        pairs += _flat(value, f"{above}{key}.") if isinstance(value, dict) else [(above + key, value)]
    return pairs


def _place_of(key_path: KeyPath, set_paths: dict[KeyPath, str], place: str) -> str:
    return next((said for keys, said in set_paths.items() if key_path[: len(keys)] == keys), place)


def _line(place: str, key_path: KeyPath, message: str) -> str:
    key = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in key_path).lstrip(".")
    return f"{place}: {key}: {message}" if key else f"{place}: {message}"
