from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.reader import open_reader
from batchgen.data.run_folder import RunFolder
from batchgen.job import InputSection, Job
from batchgen.records import Completion, FinishReason, RowFault


@pytest.fixture
def write(tmp_path):
    """Write a Parquet file below tmp_path: write("in/a.parquet", {"x": [1, 2]})."""

    def write(name, columns, **options) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **options)
        return path

    return write


@pytest.fixture
def read_input():
    def read_input(path, **settings):
        return open_reader(InputSection(path=path if isinstance(path, list) else str(path), **settings))

    return read_input


@pytest.fixture
def make_job(tmp_path):
    def make_job(path, *, columns=None, **output) -> Job:
        return Job.model_validate(
            {
                "model": {"path": "m"},
                "input": {"path": str(path), "columns": columns},
                "prompt": {"text": "x"},
                "output": {"path": str(tmp_path / "run"), **output},
            }
        )

    return make_job


@pytest.fixture
def folder(tmp_path):
    with RunFolder(tmp_path / "run") as folder:
        folder.begin({}, {})
        yield folder


@pytest.fixture
def answer():
    def answer(row, sample_index=0, text=None, fault=None) -> Completion:
        if fault is not None:
            return Completion(row, sample_index, fault=RowFault(fault, f"row {row}: {fault}"))
        tokens = np.arange(row % 5 + 1, dtype=np.int32)
        text = f"answer {row}.{sample_index}" if text is None else text
        return Completion(row, sample_index, tokens, text, FinishReason.STOP, num_prompt_tokens=7)

    return answer
