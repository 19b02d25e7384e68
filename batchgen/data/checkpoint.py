"""checkpoint.arrow: the tokens of answers that are not finished yet, so that a crash costs seconds of decoding, not answers.

An Arrow IPC stream and the xxh3-128 of its bytes behind it, written aside and put in place as a whole. Whoever an entry
belongs to is found as for a committed answer: by row key and prompt hash. What it says is never needed: a file that is
damaged, or of another job, is told and ignored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from batchgen.data.durable import explain_os_errors, write_atomically
from batchgen.data.job_rows import JobRows
from batchgen.data.run_folder import INPUT_FILE

NAME = "checkpoint.arrow"
SCHEMA = pa.schema(
    [
        ("row_key", pa.uint64()),
        ("prompt_hash", pa.uint64()),
        ("sample_index", pa.int32()),
        ("token_ids", pa.list_(pa.int32())),
    ]
)
DIGEST_BYTES = 16
Request = tuple[int, int]  # a row (what it stands for is the caller's), and one of its samples
Owner = tuple[int, int, int]  # row key, prompt hash, sample index


class Checkpoint:
    """What an earlier run of the job left in `folder`, and what this one leaves there at most every `seconds`.

    fingerprint: the job's; all of it counts but the input's files. seconds None: nothing is written. With `ignore` nothing
    is read either. others: folders in which other workers of the job have left theirs. `fault` is a sentence if a file was
    there and is of no use.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: Mapping[str, Any],
        seconds: float | None,
        ignore: bool = False,
        others: Iterable[Path] = (),
    ) -> None:
        self.path, self.seconds = folder / NAME, None if ignore else seconds
        settings = {key: value for key, value in fingerprint.items() if not key.startswith(INPUT_FILE)}
        self._job = xxhash.xxh3_64_hexdigest(json.dumps(settings, sort_keys=True).encode())
        self._found: dict[Owner, np.ndarray] = {}  # of rows whose turn has not come in this run
        self.fault: str | None = None
        self._last_saved = time.monotonic()
        for path in () if ignore else (*(other / NAME for other in others), self.path):
            if path.exists():
                self._read(path)

    def _read(self, path: Path) -> None:
        try:
            image = path.read_bytes()
            body, digest = image[:-DIGEST_BYTES], image[-DIGEST_BYTES:]
            if xxhash.xxh3_128_digest(body) != digest:
                raise ValueError("its checksum differs")
            table = pa.ipc.open_stream(body).read_all()
            if not table.schema.equals(SCHEMA):
                raise ValueError("it has other columns")
            if (table.schema.metadata or {}).get(b"job") != self._job.encode():
                raise ValueError("it is of another job")
        except (OSError, ValueError) as error:  # pa.ArrowInvalid is a ValueError
            self.fault = f"{path}: {error}; unfinished answers begin anew"
            return
        columns = [column.to_pylist() for column in table.columns]
        self._found |= {(key, hashed, sample): np.array(ids, np.int32) for key, hashed, sample, ids in zip(*columns)}

    def forget_answered(self, rows: JobRows, is_answered: np.ndarray) -> None:
        """Drop what rows that have been committed since have left. is_answered: [number of rows] bool."""
        if self._found and len(rows):
            keys, hashes, _ = np.array(list(self._found), np.uint64).T
            at = rows.find(keys, hashes)
            gone = (at >= 0) & is_answered[at]
            self._found = {owner: ids for (owner, ids), out in zip(self._found.items(), gone) if not out}

    def take(self, keys: np.ndarray, hashes: np.ndarray, num_samples: int, limit: int) -> dict[Request, np.ndarray]:
        """The tokens of those rows ([n] uint64 each), fewer than `limit`, by (index into the arrays, sample): now the
        caller's, who gives them back with `save` while they are not finished."""
        taken = {}
        if self._found:
            for i, (key, prompt_hash) in enumerate(zip(keys.tolist(), hashes.tolist())):
                for sample in range(num_samples):
                    ids = self._found.pop((key, prompt_hash, sample), None)
                    if ids is not None and 0 < len(ids) < limit:
                        taken[i, sample] = ids
        return taken

    def save_if_due(self, save: Callable[[], None]) -> None:
        """Call `save`, which calls our `save`, if the interval has passed."""
        if self.seconds is not None and time.monotonic() - self._last_saved >= self.seconds:
            save()
            self._last_saved = time.monotonic()  # not before: what takes long to save must not be saved all the time

    def save(self, keys: np.ndarray, hashes: np.ndarray, unfinished: Mapping[Request, np.ndarray]) -> None:
        """Replace the file by `unfinished`, whose rows are indices into the arrays, and what was found and not yet taken.

        Raises BatchgenError if the disk refuses.
        """
        if self.seconds is None:
            return
        entries = dict(self._found)
        for (i, sample), ids in unfinished.items():
            if len(ids):
                entries[int(keys[i]), int(hashes[i]), sample] = ids
        if not entries:
            return
        image = self._encode(entries)
        write_atomically(self.path, lambda file: file.write(image))

    def _encode(self, entries: Mapping[Owner, np.ndarray]) -> bytes:
        offsets = np.zeros(len(entries) + 1, np.int32)
        np.cumsum([len(ids) for ids in entries.values()], out=offsets[1:])
        token_ids = pa.ListArray.from_arrays(offsets, np.concatenate(list(entries.values())).astype(np.int32, copy=False))
        owners = [pa.array(values, field.type) for values, field in zip(zip(*entries), SCHEMA)]
        sink = pa.BufferOutputStream()
        schema = SCHEMA.with_metadata({"job": self._job})
        with pa.ipc.new_stream(sink, schema) as writer:
            writer.write_batch(pa.record_batch([*owners, token_ids], schema=schema))
        body = sink.getvalue().to_pybytes()
        return body + xxhash.xxh3_128_digest(body)

    def remove(self) -> None:
        """Every answer is committed."""
        if self.path.exists():
            with explain_os_errors(self.path):
                self.path.unlink()
