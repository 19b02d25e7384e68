"""Random bad inputs for test_fuzz.py: each kind is a function that lays one out in an empty folder, from a seeded chance.

It writes rows, job file, model and what else it needs, spoils something, and says which command to run and what an error
must name. Nothing here knows what is wrong with what it made: some of it is even right.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from commands import write_job, write_rows

from batchgen.job import Job

ROWS = 8
ONE_TOKEN = {"max_tokens": 1, "ignore_eos": True}


class Bad(NamedTuple):
    args: list[str]
    names: list[str]  # an error names one of these


class Scene(NamedTuple):
    """What the kinds begin with, made once: a toy model and a finished run of it."""

    toy: Path
    gguf: Path
    finished: Path
    dataset: Path


def table() -> pa.Table:
    return pa.table(
        {
            "q": [f"é {i}" for i in range(ROWS)],
            "n": range(ROWS),
            "m": [[{"role": "user", "content": str(i)}] for i in range(ROWS)],
            "d": pa.array([f"{i % 2}" for i in range(ROWS)]).dictionary_encode(),
        }
    )


def spoiled(image: bytes, chance: Random) -> bytes:
    """Cut off, overwritten, flipped, longer, shorter, zeros, twice, or nothing."""
    found = bytearray(image)
    at = chance.randrange(len(found)) if found else 0
    kind = chance.randrange(8)
    if kind == 0:
        del found[at:]
    elif kind == 1:
        for _ in range(chance.randrange(1, 12)):
            found[chance.randrange(len(found))] = chance.randrange(256)
    elif kind == 2:
        found[at] ^= 1 << chance.randrange(8)
    elif kind == 3:
        found[at:at] = chance.randbytes(chance.randrange(1, 50))
    elif kind == 4:
        del found[at : at + chance.randrange(1, 100)]
    elif kind == 5:
        end = min(len(found), at + chance.randrange(1, 64))
        found[at:end] = bytes(end - at)
    elif kind == 6:
        found[at:at] = found[: chance.randrange(1, 200)]
    else:
        found = bytearray(chance.randbytes(chance.choice([0, 1, 4, 400])))
    return bytes(found)


def spoil(path: Path, chance: Random) -> None:
    path.write_bytes(spoiled(path.read_bytes(), chance))


def run(folder: Path, names: list[str], command: str = "run", **sections: Any) -> Bad:
    """A job over rows that answers with one token."""
    write_job(folder, **{"sampling": ONE_TOKEN, "prompt": {"text": "{{ q }}"}} | sections)
    return Bad([command, "job.yaml"], names)


# ---- the bytes of input files -------------------------------------------------------------------------------------


def parquet_bytes(here: Path, scene: Scene, chance: Random) -> Bad:
    options = {
        "compression": chance.choice(["none", "zstd", "snappy"]),
        "row_group_size": chance.choice([3, 100]),
        "use_dictionary": chance.random() < 0.5,
        "data_page_version": chance.choice(["1.0", "2.0"]),
    }
    pq.write_table(table(), here / "rows.parquet", **options)
    spoil(here / "rows.parquet", chance)
    return run(here, ["rows.parquet"], prompt=chance.choice([{"text": "{{ q }}"}, {"messages": "m"}]))


def json_bytes(here: Path, scene: Scene, chance: Random) -> Bad:
    lines = b"".join(json.dumps(row, ensure_ascii=chance.random() < 0.5).encode() + b"\n" for row in table().to_pylist())
    kind, packed = chance.choice(
        [(".jsonl", lines), (".jsonl.gz", gzip.compress(lines)), (".json.zst", pa.compress(lines, "zstd", asbytes=True))]
    )
    (here / f"rows{kind}").write_bytes(spoiled(packed, chance))
    return run(here, [f"rows{kind}", "{{ q }}", "column q"], input={"path": f"rows{kind}"})


def csv_bytes(here: Path, scene: Scene, chance: Random) -> Bad:
    records = b"q,n\r\n" + b"".join(b'"text, ""%d""\n\xc3\xa9",%d\r\n' % (i, i) for i in range(ROWS))
    kind, packed = chance.choice([(".csv", records), (".tsv.gz", gzip.compress(records.replace(b",", b"\t")))])
    (here / f"rows{kind}").write_bytes(spoiled(packed, chance))
    return run(here, [f"rows{kind}", "column q", "input has no column"], input={"path": f"rows{kind}"})


def arrow_bytes(here: Path, scene: Scene, chance: Random) -> Bad:
    open_writer = chance.choice([pa.ipc.new_file, pa.ipc.new_stream])
    options = pa.ipc.IpcWriteOptions(compression=chance.choice([None, "zstd", "lz4"]))
    with open_writer(str(here / "rows.arrow"), table().schema, options=options) as writer:
        writer.write_table(table(), max_chunksize=chance.choice([3, 100]))
    spoil(here / "rows.arrow", chance)
    return run(here, ["rows.arrow", "column q", "output.prefix", "input.columns"], input={"path": "rows.arrow"})


def dataset_bytes(here: Path, scene: Scene, chance: Random) -> Bad:
    shutil.copytree(scene.dataset, here / "rows")
    path = chance.choice(sorted(path for path in (here / "rows").rglob("*") if path.is_file()))
    path.unlink() if chance.random() < 0.2 else spoil(path, chance)
    return run(here, ["rows", "input has no column"], input={"path": "rows"})


# ---- schemas -------------------------------------------------------------------------------------------------------

COLUMNS: dict[str, Callable[[], pa.Array]] = {
    "nulls": lambda: pa.nulls(ROWS),
    "nested": lambda: pa.array([[[{"a": [{"b": i}]}]] for i in range(ROWS)]),
    "deep": lambda: pa.array([eval("[" * 40 + "1" + "]" * 40)] * ROWS),
    "empty struct": lambda: pa.array([{}] * ROWS, pa.struct([])),
    "bytes": lambda: pa.array([b"\xff\x00"] * ROWS),
    "not utf8": lambda: pa.array([b"\xff\xfe", b"ok"] * (ROWS // 2)).view(pa.string()),
    "surrogate": lambda: pa.array([b"\xed\xa0\xbd"] * ROWS).view(pa.string()),
    "huge": lambda: pa.array(["x" * 2**20] * ROWS),
    "far dates": lambda: pa.array([2**62] * ROWS, pa.timestamp("s")),
    "durations": lambda: pa.array([2**62] * ROWS, pa.duration("s")),
    "month intervals": lambda: pa.array([(1, 2, 3)] * ROWS, pa.month_day_nano_interval()),
    "times": lambda: pa.array([2**40] * ROWS, pa.time64("ns")),
    "decimal256": lambda: pa.array([None] * ROWS, pa.decimal256(70, 3)),
    "dense union": lambda: pa.UnionArray.from_dense(
        pa.array([0] * ROWS, pa.int8()), pa.array(range(ROWS), pa.int32()), [pa.array(range(ROWS))]
    ),
    "run ends": lambda: pa.RunEndEncodedArray.from_arrays([ROWS], ["x"]),
    "views": lambda: pa.array(["a long text that is no inline view"] * ROWS, pa.string_view()),
    "list views": lambda: pa.array([[1]] * ROWS, pa.list_view(pa.int8())),
    "maps": lambda: pa.array([[("k", i), ("k", None)] for i in range(ROWS)], pa.map_(pa.string(), pa.int8())),
    "nan": lambda: pa.array([float("nan"), float("-inf")] * (ROWS // 2)),
    "null dictionary": lambda: pa.DictionaryArray.from_arrays(
        pa.array([0] * ROWS, pa.int8()), pa.array([None], pa.string())
    ),
    "number dictionary": lambda: pa.array([i % 3 for i in range(ROWS)]).dictionary_encode(),
    "messages of other keys": lambda: pa.array([[{"rôle": "user", "text": i}] for i in range(ROWS)]),
    "messages of numbers": lambda: pa.array([[{"role": i, "content": i}] for i in range(ROWS)]),
    "messages": lambda: pa.array([[{"role": "user", "content": "a", "tool_calls": None}], None, []] + [[None]] * (ROWS - 3)),
    "booleans": lambda: pa.array([True, None] * (ROWS // 2)),
    "uuids": lambda: pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"x" * 16] * ROWS, pa.binary(16))),
}
NAMES = ["q", "q", "a b", "a.b", "", "row", "status", "é\n", "loop", "class", "{{ q }}", "messages", "x" * 300]


def schemas(here: Path, scene: Scene, chance: Random) -> Bad:
    """Columns of odd types and names, in one file or in two that may differ."""
    form = chance.choice(["parquet", "parquet", "arrow"])
    names = chance.sample(NAMES, chance.choice([0, 1, 2, 4]))
    if chance.random() < 0.7:
        names = ["q", *(name for name in names if name != "q" or chance.random() < 0.1)]
    files = []
    for number in range(chance.choice([1, 1, 2])):
        if not number or chance.random() < 0.2:
            kinds = [chance.choice(list(COLUMNS)) for _ in names]
        odd = pa.Table.from_arrays([COLUMNS[kind]() for kind in kinds], names=names)
        if number and chance.random() < 0.3:
            odd = odd.rename_columns([chance.choice(NAMES) for _ in names])
        if chance.random() < 0.1:
            odd = odd.slice(0, 0)
        files.append(f"{number}.{form}")
        try:
            if form == "parquet":
                pq.write_table(odd, here / files[-1])
        except pa.ArrowException:  # there are types that it has not
            form, files[-1] = "arrow", f"{number}.arrow"
        if form == "arrow":
            with pa.ipc.new_stream(str(here / files[-1]), odd.schema) as writer:
                writer.write_table(odd)
    source: dict[str, Any] = {"path": files}
    if chance.random() < 0.2:
        source["id_column"] = chance.choice(names or NAMES)
    if chance.random() < 0.2:
        source["where"] = chance.choice(["q", "q > 1", "q is none", "q | length", "loop", "status == 'x'", "q[0]"])
    if chance.random() < 0.2:
        source["columns"] = names[:1]
    prompt = chance.choice(
        [{"text": "{{ q }}"}] * 3 + [{"text": "fixed"}, {"messages": "q"}, {"messages": "q"}, {"user": "{{ q }} {{ row }}"}]
    )
    told = [*files, "input.", "output.", "prompt:", "has no column", "job.yaml"]
    output = {"path": "out", "prefix": chance.choice(["", "bg_", "bg_"])}
    if chance.random() < 0.2:
        output |= {
            "extract": {"pattern": ".", "expected": chance.choice(names or NAMES), "as": chance.choice(["text", "number"])}
        }
    return run(here, told, chance.choice(["run", "run", "plan"]), input=source, prompt=prompt, output=output)


# ---- job files -----------------------------------------------------------------------------------------------------


def job_bytes(here: Path, scene: Scene, chance: Random) -> Bad:
    write_rows(here / "rows.parquet", table())
    bad = run(here, [])
    spoil(here / "job.yaml", chance)
    return bad


VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 10**30, 0.5, -0.0, 1e400, float("nan"), "", " ", "x", "-", "0", "1e-5", "auto", "no",
    [], [[]], [None], ["x", "x"], {}, {"x": {}}, {"path": []}, "\0", "a\0b", "\ud83d", "é" * 300, "x" * 5000, "/", ".", "..",
    "~", "~nobody/x", "/dev/null", "/dev/zero", "/proc/self/mem", "://", "s3://x/y", "file:///", "nope://x", "http://[",
    "*", "[", "**/*", "%", "{{", "{{ x }}", "{% if %}", "{{ q.__class__.__mro__ }}", "{{ range(10**9) | list }}",
    "{{ q ~ 1/0 }}", "(", "(a+)+$", "5%", "200%", "1KB", "9999999TiB", "cuda:99", "packaged:nothing",
]  # fmt: skip


def keys() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for section, field in Job.model_fields.items():
        found += [(section,)] + [(section, one.alias or name) for name, one in field.annotation.model_fields.items()]
    return (
        found
        + [("output", "extract", name) for name in ("pattern", "take", "column", "expected", "as")]
        + [("prompt", "files", "x")]
    )


def job_values(here: Path, scene: Scene, chance: Random) -> Bad:
    """A wrong value at a key, or a key that there is none of, in the file or by --set."""
    write_rows(here / "rows.parquet", table())
    path = chance.choice(keys())
    if chance.random() < 0.1:
        path = (*path, chance.choice(["x", "pat", "", "é", "0"]))
    value = chance.choice(VALUES)
    bad = run(here, [path[0], path[-1], "job.yaml", *([value] if isinstance(value, str) and value.strip() else [])])
    if path == ("output", "path") and (value in ("/", ".", "..", "~") or value == "file:///"):
        value = "job.yaml"  # nothing outside may be touched
    if chance.random() < 0.3:
        text = (
            yaml.safe_dump(value, allow_unicode=True).removesuffix("\n...\n").strip()
            if not isinstance(value, str)
            else value
        )
        return Bad([*bad.args, "--set", f"{'.'.join(path)}={text}".replace("\0", "").replace("\ud83d", "")], bad.names)
    job = yaml.safe_load((here / "job.yaml").read_text())
    at = job
    for key in path[:-1]:
        at = at.setdefault(key, {})
        if not isinstance(at, dict):
            return bad
    if path[0] == "prompt" and path[-1] in ("user", "messages", "text"):
        at.clear()
    if path[:2] == ("output", "extract") and len(path) > 2:
        at.setdefault("pattern", "x")
    at[path[-1]] = value
    (here / "job.yaml").write_text(json.dumps(job) if chance.random() < 0.2 else yaml.dump(job))
    return bad


def paths(here: Path, scene: Scene, chance: Random) -> Bad:
    """Files that are missing, folders, too long names, broken links, devices, in every place where a job names one."""
    write_rows(here / "rows.parquet", table())
    (here / "folder").mkdir()
    (here / "loop").symlink_to("loop")
    (here / "broken").symlink_to("nowhere")
    (here / "empty").touch()
    os.mkfifo(here / "fifo")
    shutil.copytree(here / "folder", here / "naïve \U0001f468 x")
    names = [
        "nowhere",
        "folder",
        "loop",
        "broken",
        "empty",
        "fifo",
        "naïve \U0001f468 x",
        "x" * 300,
        "rows.parquet/x",
        "/dev/null",
        "rows.parquet",
        "",
        "job.yaml",
    ]
    name = chance.choice(names)
    place = chance.choice(
        ["job", "input", "model", "tokenizer", "files", "chat", "output", "status", "show", "merge", "only"]
    )
    if name == "fifo" and place not in ("input", "model", "output"):
        name = "folder"  # waiting for what a pipe will bring is right there
    told = [name or "not a run folder", "path", "KEYFILE", "model", "tokenizer", "job file", "prompt."]
    if place in ("status", "show", "merge"):
        return Bad([place, name], told)
    if place == "job":
        run(here, [])
        return Bad(["run", name if name != "job.yaml" else "folder"], told)
    if place == "only":
        return Bad([*run(here, []).args, "--only", name], [*told, "job.json"])
    sections: dict[str, Any] = {
        "input": {"input": {"path": name, "format": chance.choice(["auto", "jsonl", "csv", "arrow", "parquet"])}},
        "model": {"model": {"path": name}},
        "tokenizer": {"model": {"path": "toy", "tokenizer": name}},
        "files": {"prompt": {"text": "{{ f }}", "files": {"f": name}}},
        "chat": {"prompt": {"user": "{{ q }}", "chat_template": name}},
        "output": {"output": {"path": name}},
    }[place]
    return run(here, told, **sections)


# ---- models --------------------------------------------------------------------------------------------------------


def model_bytes(here: Path, scene: Scene, chance: Random) -> Bad:
    """A damaged, missing or replaced file of a model, in Hugging Face's layout or as GGUF."""
    write_rows(here / "rows.parquet", table())
    prompt = {"user": "{{ q }}"}
    if chance.random() < 0.25:
        (here / "model.gguf").write_bytes(spoiled(scene.gguf.read_bytes(), chance))
        return run(here, ["model.gguf", "model", "tokenizer"], model={"path": "model.gguf"}, prompt=prompt)
    shutil.copytree(scene.toy, here / "model")
    path = chance.choice(sorted((here / "model").iterdir()))
    if chance.random() < 0.2:
        path.unlink()
    elif chance.random() < 0.1:
        path.unlink(), path.mkdir()
    else:
        spoil(path, chance)
    return run(here, ["model", path.name, "tokenizer"], model={"path": "model"}, prompt=prompt)


def model_values(here: Path, scene: Scene, chance: Random) -> Bad:
    """A wrong value at some key of a model's JSON."""
    write_rows(here / "rows.parquet", table())
    shutil.copytree(scene.toy, here / "model")
    path = (
        here
        / "model"
        / chance.choice(["config.json", "config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
    )
    content = json.loads(path.read_text())
    at = content
    while True:
        key = chance.choice(list(at) if isinstance(at, dict) else range(len(at)))
        if not isinstance(at[key], (dict, list)) or not at[key] or chance.random() < 0.3:
            break
        at = at[key]
    if chance.random() < 0.2:
        del at[key]
    else:
        at[key] = chance.choice(
            [None, True, 0, -1, 1, 3, 7, 10**9, 10**30, 0.5, 1e300, "", "x", "silu", [], [0], {}, {"x": 1}, [-1], [10**12]]
        )
    path.write_text(json.dumps(content))
    return run(
        here, ["model", path.name, "tokenizer", "config.json", "engine"], model={"path": "model"}, prompt={"user": "{{ q }}"}
    )


# ---- run folders ---------------------------------------------------------------------------------------------------


def run_folder(here: Path, scene: Scene, chance: Random) -> Bad:
    """A finished run, damaged somewhere; then a command that meets it."""
    for name in ("out", "rows.parquet", "job.yaml"):
        (shutil.copytree if name == "out" else shutil.copy)(scene.finished / name, here / name)
    path = chance.choice(sorted(path for path in (here / "out").rglob("*")))
    if chance.random() < 0.25 or (path.is_dir() and chance.random() < 0.5):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        if chance.random() < 0.3:
            path.mkdir()
    elif path.is_dir():
        (path / chance.choice(["part-000001.parquet", "x", "part-x.parquet"])).write_bytes(chance.randbytes(9))
    elif path.name == "job.json" and chance.random() < 0.6:
        record = json.loads(path.read_text())
        key = chance.choice(list(record))
        record[key] = chance.choice([None, 0, "x", [], {}, 10**30])
        path.write_text(json.dumps(record))
    else:
        spoil(path, chance)
    command = chance.choice(
        [["run", "job.yaml"]] * 3 + [["status", "out"], ["status", "out", "--json"], ["show", "out"], ["merge", "out"]]
    )
    if command[0] == "run" and chance.random() < 0.3:
        command = [*command, *chance.choice([["--only", "failed"], ["--only", "truncated"], ["--restart"]])]
    return Bad(command, ["out", path.name])


KINDS: dict[str, Callable[[Path, Scene, Random], Bad]] = {
    make.__name__: make
    for make in (
        parquet_bytes, json_bytes, csv_bytes, arrow_bytes, dataset_bytes, schemas, job_bytes, job_values, paths, model_bytes,
        model_values, run_folder,
    )
}  # fmt: skip
