"""Rows that are piped in: read as often as needed, the same again on resume."""

import gzip
import io
import os
import sys
import tempfile

import pytest

from batchgen.data.reader import open_reader
from batchgen.errors import BatchgenError, InputError
from batchgen.job import InputSection, load_job

LINES = b'{"x": 1}\n{"x": 2}\n'


@pytest.fixture
def pipe(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def pipe(content):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return pipe


def values(reader):
    return [value for source in reader.batches(["x"]) for value in source.batch.column(0).to_pylist()]


def test_rows_are_kept_while_the_reader_is_and_no_longer(pipe, tmp_path):
    pipe(LINES)
    reader = open_reader(InputSection(path="-"))
    assert values(reader) == values(reader) == [1, 2]
    assert {source.source for source in reader.batches(None)} == {"-"}
    assert len(os.listdir(tmp_path)) == 1
    first = reader.fingerprint()
    del reader
    assert os.listdir(tmp_path) == []
    pipe(LINES)
    assert open_reader(InputSection(path="-")).fingerprint() == first
    pipe(LINES + LINES)
    assert open_reader(InputSection(path="-")).fingerprint() != first


def test_other_formats_and_packed_text(pipe):
    pipe(b"x\n007\n")
    assert values(open_reader(InputSection(path="-", format="csv"))) == ["007"]
    pipe(gzip.compress(LINES))
    assert values(open_reader(InputSection(path="-"))) == [1, 2]


def test_bad_input_is_told(pipe, monkeypatch, tmp_path):
    pipe(b"nonsense\n")
    with pytest.raises(InputError, match="standard input: no line of it is a JSON object"):
        open_reader(InputSection(path="-"))
    pipe(LINES)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    with pytest.raises(InputError, match=r"nothing is piped in; write: batchgen run JOB < rows.jsonl"):
        open_reader(InputSection(path="-"))
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InputError, match="nothing is piped in"):
        open_reader(InputSection(path="-"))


def test_a_full_disk_is_told(pipe, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    pipe(LINES)
    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(BatchgenError, match=r"cannot keep standard input: No space left on device; set TMPDIR"):
        open_reader(InputSection(path="-"))


@pytest.mark.parametrize("overrides", [[], ["input.path=-"]])
def test_a_dash_in_a_job_file_is_no_file_name(tmp_path, overrides):
    path = "x.jsonl" if overrides else '"-"'
    (tmp_path / "j.yaml").write_text(
        f"model: {{path: m}}\ninput: {{path: {path}}}\nprompt: {{text: x}}\noutput: {{path: o}}\n"
    )
    assert load_job(tmp_path / "j.yaml", overrides).input.path == "-"
