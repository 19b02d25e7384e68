"""Bytes cut off, overwritten, added, removed, or of another format: a sentence or rows, never anything else."""

import gzip
import io
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.rows import iter_rows
from batchgen.errors import InputError

ROWS = 60
TABLE = pa.table(
    {
        "x": range(ROWS),
        "t": [f"é {i}" * 3 for i in range(ROWS)],
        "messages": [[{"role": "user", "content": str(i)}] for i in range(ROWS)],
    }
)


def ipc(open_writer, **options):
    stream = io.BytesIO()
    with open_writer(stream, TABLE.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(TABLE, max_chunksize=20)
    return stream.getvalue()


def parquet():
    stream = io.BytesIO()
    pq.write_table(TABLE, stream, row_group_size=20)
    return stream.getvalue()


LINES = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in TABLE.to_pylist())
RECORDS = b"x,t\n" + b"".join(b'%d,"text, ""%d"""\n' % (i, i) for i in range(ROWS))
FILES = {
    "a.jsonl": LINES,
    "a.jsonl.gz": gzip.compress(LINES),
    "a.jsonl.zst": pa.compress(LINES, "zstd", asbytes=True),
    "a.csv": RECORDS,
    "a.tsv.gz": gzip.compress(RECORDS),
    "file.arrow": ipc(pa.ipc.new_file),
    "stream.arrow": ipc(pa.ipc.new_stream),
    "packed.arrow": ipc(pa.ipc.new_stream, compression="zstd"),
    "a.parquet": parquet(),
}


def damaged(image, chance):
    found = bytearray(image)
    at = chance.randrange(len(found))
    kind = chance.randrange(5)
    if kind == 0:
        del found[at:]
    elif kind == 1:
        for _ in range(chance.randrange(1, 20)):
            found[chance.randrange(len(found))] = chance.randrange(256)
    elif kind == 2:
        found[at:at] = chance.randbytes(chance.randrange(1, 50))
    elif kind == 3:
        del found[at : at + chance.randrange(1, 200)]
    else:
        found = bytearray(chance.choice([chance.randbytes(chance.randrange(400)), *FILES.values()]))
    return bytes(found)


@pytest.mark.parametrize("name", FILES)
def test_damage(name, tmp_path, read_input):
    chance = random.Random(name)
    told = 0
    for _ in range(60):
        (tmp_path / name).write_bytes(damaged(FILES[name], chance))
        try:
            reader = read_input(tmp_path / name)
            rows = [row for source in reader.batches(None) for row in iter_rows(source.batch, reader.schema.names)]
            assert len(rows) == reader.num_rows
        except InputError as error:
            assert name in str(error) and "\n" not in str(error)
            told += 1
    assert told > 5
