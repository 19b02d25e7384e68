"""The columns of an answer, in one fixed, versioned Arrow schema. Results put the input's columns before them.

None of them tells how the answer was computed: results are the same bytes however often a run was broken off, and by
however many workers it was done.

row                int64         position of the row in the whole input, from 0
sample_index       int32         0 .. n-1
status             string        ok | error | skipped
error_code         string        why there is no answer, for programs; null if ok
error_message      string        the same for people
generated_text     string        null if there is no answer
finish_reason      string        stop | length | error
stop_reason        string        the stop string, or the id of the end token
num_prompt_tokens  int32
num_output_tokens  int32
token_ids          list<int32>   the answer, with its end token
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from batchgen.errors import UsageError
from batchgen.job import Job, OutputSection
from batchgen.records import Completion

SCHEMA_VERSION = 2  # raised when ANSWER_SCHEMA changes; 2: without the columns that differ from run to run
METADATA = {b"batchgen.schema_version": str(SCHEMA_VERSION).encode()}

ANSWER_SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        ("error_code", pa.string()),
        ("error_message", pa.string()),
        ("generated_text", pa.string()),
        ("finish_reason", pa.string()),
        ("stop_reason", pa.string()),
        ("num_prompt_tokens", pa.int32()),
        ("num_output_tokens", pa.int32()),
        ("token_ids", pa.list_(pa.int32())),
    ],
    metadata=METADATA,
)
RUN_FIELDS = [pa.field("num_cached_tokens", pa.int32()), pa.field("num_preemptions", pa.int32())]


def completions_to_table(completions: Sequence[Completion]) -> pa.Table:
    """One row a completion, sorted by (row, sample_index), in ANSWER_SCHEMA and RUN_FIELDS."""
    ordered = sorted(completions, key=lambda one: (one.row, one.sample_index))
    faults = [one.fault for one in ordered]
    columns = {
        "row": [one.row for one in ordered],
        "sample_index": [one.sample_index for one in ordered],
        "status": [one.status.value for one in ordered],
        "error_code": [fault and fault.code for fault in faults],
        "error_message": [fault and _utf8(fault.message) for fault in faults],
        "generated_text": [_utf8(one.text) for one in ordered],
        "finish_reason": [one.finish_reason.value for one in ordered],
        "stop_reason": [_utf8(one.stop_reason) for one in ordered],
        "num_prompt_tokens": [one.num_prompt_tokens for one in ordered],
        "num_output_tokens": [len(one.token_ids) for one in ordered],
    }
    arrays = [pa.array(values, ANSWER_SCHEMA.field(name).type) for name, values in columns.items()]
    arrays.append(_token_lists([one.token_ids for one in ordered]))
    arrays.append(pa.array([one.num_cached_tokens for one in ordered], pa.int32()))
    arrays.append(pa.array([one.num_preemptions for one in ordered], pa.int32()))
    return pa.Table.from_arrays(arrays, schema=pa.schema([*ANSWER_SCHEMA, *RUN_FIELDS], metadata=METADATA))


def _token_lists(token_ids: Sequence[np.ndarray]) -> pa.ListArray:
    """int32 arrays -> list<int32>, without a Python object for each token."""
    offsets = np.zeros(len(token_ids) + 1, np.int32)
    np.cumsum([len(ids) for ids in token_ids], out=offsets[1:])
    values = np.concatenate([np.empty(0, np.int32), *token_ids]).astype(np.int32, copy=False)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def results_schema(input_schema: pa.Schema, job: Job) -> pa.Schema:
    """Input columns as the job carries them, then batchgen's columns, then those of output.extract.

    Raises UsageError that names output.prefix if two would have the same name; call it before any work starts.
    """
    output = job.output
    carried = [input_schema.field(name) for name in carried_columns(input_schema, job)]
    added = [field.with_name(output.prefix + field.name) for field in ANSWER_SCHEMA] + extract_fields(output)
    names = [field.name for field in carried]
    for field in added:
        if field.name in names:
            raise UsageError(
                f"output.prefix: the column {field.name} would be in the output twice; set output.prefix to a text "
                'such as "batchgen_", which is put before the names of all columns that batchgen adds, or rename the column'
            )
        names.append(field.name)
    return pa.schema(carried + added, metadata=METADATA)


def extract_fields(output: OutputSection) -> list[pa.Field]:
    if output.extract is None:
        return []
    fields = [pa.field(output.prefix + output.extract.column, pa.string())]
    if output.extract.expected is not None:
        fields.append(pa.field(output.prefix + "correct", pa.bool_()))
    return fields


def carried_columns(input_schema: pa.Schema, job: Job) -> list[str]:
    return list(input_schema.names if job.input.columns is None else job.input.columns)


def _utf8(text: str | None) -> str | None:
    """Half a surrogate pair cannot be written as UTF-8; it becomes U+FFFD."""
    if text is None or text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
