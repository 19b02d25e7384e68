"""OpenAI's batch files: lines of {custom_id, method, url, body} in; output and errors in their shapes out.

As a table: custom_id, url, model, messages, prompt (those of the body), parameters (the rest of the body). What of a request
this job cannot do is for text/openai_request.py to say, row by row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import xxhash

from batchgen.data.durable import explain_os_errors
from batchgen.data.files import InputFile
from batchgen.data.jsonl import JsonlReader, Line
from batchgen.data.rows import JSON_VALUES
from batchgen.job import OutputSection
from batchgen.records import RowFault

OUTPUT_FILE, ERRORS_FILE = "output.jsonl", "errors.jsonl"
ID_COLUMN = "custom_id"
_SCHEMA = pa.schema(
    [
        (ID_COLUMN, pa.string()),
        ("url", pa.string()),
        ("model", pa.string()),
        *(pa.field(name, pa.string(), metadata=JSON_VALUES) for name in ("messages", "prompt", "parameters")),
    ]
)


class OpenAIBatchReader(JsonlReader):
    """A line that is no request with a custom_id is a bad row."""

    title = "an OpenAI batch file"

    def scan(self) -> tuple[pa.Schema, list[int]]:
        return _SCHEMA, [sum(1 for _ in self._lines(file)) for file in self.files]

    def _lines(self, file: InputFile) -> Iterator[Line]:
        for line in super()._lines(file):
            yield line if isinstance(line.row, RowFault) else line._replace(row=_request(line.row, line.number))


def _request(line: dict[str, Any], number: int) -> dict[str, Any] | RowFault:
    def bad(what: str) -> RowFault:
        return RowFault("bad_request", f"line {number} {what}")

    custom_id, body = line.get(ID_COLUMN), line.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        return bad("has no custom_id, a text that names it")
    if not isinstance(body, dict):
        return bad(f'("{custom_id}") has no body, an object with the request')
    if line.get("method", "POST") != "POST":
        return bad(f'("{custom_id}"): method is {json.dumps(line["method"])}; requests are POST')
    url, model = line.get("url"), body.get("model")
    rest = {name: value for name, value in body.items() if name not in ("model", "messages", "prompt")}
    return {
        ID_COLUMN: custom_id,
        "url": url if isinstance(url, str) else None,
        "model": model if isinstance(model, str) else None,
        "messages": body.get("messages"),
        "prompt": body.get("prompt"),
        "parameters": rest,
    }


class OpenAIBatchWriter:
    """Requests that were answered go to `file`, one line each with a choice a sample; the others to errors.jsonl beside it.

    Nothing in a line differs from run to run: ids are made of the custom_id, and `created` is 0.
    """

    def __init__(self, file: BinaryIO, schema: pa.Schema, output: OutputSection) -> None:
        self._file, self._prefix = file, output.prefix
        path = Path(os.fsdecode(file.name)).with_name(ERRORS_FILE)
        with explain_os_errors(path):
            self._errors = open(path, "wb")  # noqa: SIM115 (held open between writes)
        self._samples: list[dict[str, Any]] = []  # of the row that comes

    def write(self, table: pa.Table) -> None:
        named = ["custom_id", "url", "model", *(self._prefix + name for name in _ANSWER)]
        for batch in table.select(named).rename_columns(["custom_id", "url", "model", *_ANSWER]).to_batches(1024):
            for row in batch.to_pylist():
                if self._samples and self._samples[0]["row"] != row["row"]:
                    self._write_row()
                self._samples.append(row)

    def close(self) -> None:
        if self._samples:
            self._write_row()
        with self._errors as file:
            file.flush()
            os.fsync(file.fileno())

    def _write_row(self) -> None:
        samples, self._samples = self._samples, []
        failed = next((one for one in samples if one["status"] != "ok"), None)
        line = _line(samples) if failed is None else _error_line(failed)
        text = json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        (self._file if failed is None else self._errors).write(text)


_ANSWER = (
    "row", "status", "error_code", "error_message", "generated_text", "finish_reason", "num_prompt_tokens",
    "num_output_tokens",
)  # fmt: skip


def _id(row: dict[str, Any]) -> str:
    named = f"id\0{row['custom_id']}" if row["custom_id"] is not None else f"row\0{row['row']}"
    return xxhash.xxh3_128_hexdigest(named.encode("utf-8", "replace"))


def _line(samples: list[dict[str, Any]]) -> dict[str, Any]:
    first, name = samples[0], _id(samples[0])
    is_chat = str(first["url"]).endswith("/chat/completions")
    choices = []
    for i, one in enumerate(samples):
        text = one["generated_text"]
        said = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        choices.append({"index": i, **said, "logprobs": None, "finish_reason": one["finish_reason"]})
    prompt, output = first["num_prompt_tokens"], sum(one["num_output_tokens"] for one in samples)
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": 0,
        "model": first["model"],
        "choices": choices,
        "usage": {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output},
    }
    response = {"status_code": 200, "request_id": f"req_{name}", "body": body}
    return {"id": f"batch_req_{name}", "custom_id": first["custom_id"], "response": response, "error": None}


def _error_line(row: dict[str, Any]) -> dict[str, Any]:
    error = {"code": row["error_code"], "message": row["error_message"]}
    return {"id": f"batch_req_{_id(row)}", "custom_id": row["custom_id"], "response": None, "error": error}
