"""Input read from, and results pushed to, where fsspec reaches: an object store (S3, from a server here), HTTP, memory."""

import functools
import http.server
import json
import threading

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.push import MANIFEST, check_target, push
from batchgen.data.reader import open_reader
from batchgen.errors import BatchgenError, InputError, UsageError
from batchgen.job import InputSection

TABLE = pa.table({"x": list(range(50)), "t": [f"text {i}" for i in range(50)]})


@pytest.fixture(scope="module")
def s3():
    """URL of a bucket of a store that is empty at first."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    patch = pytest.MonkeyPatch()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():  # fmt: skip
        patch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="bucket")
    fsspec.filesystem("s3", skip_instance_cache=True)
    yield "s3://bucket"
    server.stop()
    patch.undo()


@pytest.fixture
def web(tmp_path):
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    handler.log_message = lambda *_: None  # type: ignore[attr-defined]
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


@pytest.fixture(params=["s3", "memory"])
def store(request):
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()
    return "memory://bucket" if request.param == "memory" else request.getfixturevalue("s3")


def put(url, table):
    with fsspec.open(url, "wb") as file:
        pq.write_table(table, file, row_group_size=7)


def rows(path, **more):
    reader = open_reader(InputSection(path=path, **more))
    assert len(reader.fingerprint()) >= 1
    return [row for source in reader.batches(None) for row in source.batch.to_pylist()]


def test_files_folders_and_globs_of_a_store(store):
    put(f"{store}/in/a.parquet", TABLE.slice(0, 30))
    put(f"{store}/in/deep/b.parquet", TABLE.slice(30))
    assert rows(f"{store}/in") == TABLE.to_pylist()
    assert rows(f"{store}/in/*.parquet") == TABLE.slice(0, 30).to_pylist()
    with fsspec.open(f"{store}/lines/c.jsonl.gz", "wb", compression="gzip") as file:
        file.write("".join(json.dumps(row) + "\n" for row in TABLE.to_pylist()).encode())
    assert rows(f"{store}/lines/c.jsonl.gz") == TABLE.to_pylist()
    with pytest.raises(InputError, match=r"input.path: .*nothing.parquet does not exist"):
        open_reader(InputSection(path=f"{store}/in/nothing.parquet"))


def test_a_file_of_a_web_server(web, tmp_path):
    pq.write_table(TABLE, tmp_path / "a.parquet")
    assert rows(f"{web}/a.parquet") == TABLE.to_pylist()
    with pytest.raises(InputError, match=r"input.path: http.*b.parquet"):
        open_reader(InputSection(path=f"{web}/b.parquet"))


def test_results_are_pushed_whole_and_again(store, tmp_path):
    files = [tmp_path / f"part-0000{i}.parquet" for i in range(3)]
    for i, file in enumerate(files):
        pq.write_table(TABLE.slice(i * 10, 10), file)
    url = f"{store}/results"
    fs, folder = fsspec.core.url_to_fs(url)
    push(files, url)
    fs.pipe_file(f"{folder}/own.txt", b"not ours")
    names = {path.rpartition("/")[2] for path in fs.find(folder)}
    assert names == {*(file.name for file in files), MANIFEST, "own.txt"}
    manifest = json.loads(fs.cat_file(f"{folder}/{MANIFEST}"))["files"]
    assert [entry["name"] for entry in manifest] == [file.name for file in files]
    assert rows(f"{url}/*.parquet") == TABLE.slice(0, 30).to_pylist()
    pq.write_table(TABLE, files[0])
    push(files[:1], url)
    assert {path.rpartition("/")[2] for path in fs.find(folder)} == {files[0].name, MANIFEST, "own.txt"}
    assert rows(f"{url}/*.parquet") == TABLE.to_pylist(), "what this push did not bring is gone, what is not ours stays"


def test_what_cannot_be_reached_is_told_in_one_line(s3, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"output.push_to: nope://x: .*nope"):
        check_target("nope://x")
    pq.write_table(TABLE, tmp_path / "part-00000.parquet")
    with pytest.raises(BatchgenError, match=r"s3://missing/x: .*; the results are safe in the run folder") as error:
        push([tmp_path / "part-00000.parquet"], "s3://missing/x")
    assert "\n" not in str(error.value)
    (tmp_path / "file").touch()
    with pytest.raises(BatchgenError, match="the results are safe"):
        push([tmp_path / "part-00000.parquet"], str(tmp_path / "file"))
