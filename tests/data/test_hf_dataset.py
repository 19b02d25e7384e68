"""Hugging Face data sets: order, splits, indices, fingerprints, and what to do when one cannot be had."""

import json
import shutil

import pyarrow as pa
import pytest

from batchgen.errors import InputError

datasets = pytest.importorskip("datasets")
ROWS = {"x": list(range(10)), "messages": [[{"role": "user", "content": str(i)}] for i in range(10)]}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture
def saved(tmp_path):
    made = datasets.Dataset.from_dict(ROWS)
    made.save_to_disk(tmp_path / "saved", num_shards=3)
    return tmp_path / "saved"


def values(reader, column="x", batch_rows=1024):
    found = []
    for source in reader.batches([column], batch_rows):
        assert source.row == len(found) and source.batch.num_rows <= batch_rows
        assert source.batch.schema.field(0).equals(reader.schema.field(column))
        found += source.batch.column(0).to_pylist()
    return found


def test_a_folder_that_save_to_disk_wrote(saved, read_input):
    reader = read_input(saved)
    assert (reader.num_rows, reader.schema.names) == (10, ["x", "messages"])
    for batch_rows in (1, 3, 100):
        assert values(reader, "x", batch_rows) == ROWS["x"]
    assert values(reader, "messages") == ROWS["messages"]
    assert sum(source.batch.num_rows for source in reader.batches([], 3)) == 10


def write_indices(folder, indices):
    """As versions before 1.16 left a data set that was selected or shuffled from another."""
    table = pa.table({"indices": pa.array(indices, pa.uint64())})
    with pa.ipc.new_stream(folder / "indices.arrow", table.schema) as writer:
        writer.write_table(table)
    state = json.loads((folder / "state.json").read_text())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (folder / "state.json").write_text(json.dumps(state))


def test_an_indices_file_selects_and_orders_rows(saved, read_input):
    before = read_input(saved).fingerprint()
    write_indices(saved, [7, 1, 1, 9])
    reader = read_input(saved)
    assert (reader.num_rows, values(reader), values(reader, "x", 1)) == (4, [7, 1, 1, 9], [7, 1, 1, 9])
    assert reader.fingerprint() != before


def test_a_shuffled_data_set_is_read_as_it_was_saved(tmp_path, read_input):
    made = datasets.Dataset.from_dict(ROWS).shuffle(seed=1).select(range(5))
    made.save_to_disk(tmp_path / "saved")
    assert values(read_input(tmp_path / "saved")) == made["x"][:]


def test_splits(tmp_path, read_input):
    made = datasets.Dataset.from_dict(ROWS)
    both = datasets.DatasetDict({"train": made.select(range(8)), "test": made.select([9, 8])})
    both.save_to_disk(tmp_path / "both")
    assert values(read_input(tmp_path / "both", split="test")) == [9, 8]
    for split, said in ((None, "has several splits"), ("dev", "has no split dev")):
        with pytest.raises(InputError, match=rf"input.split: .*both {said}; choose one of train, test"):
            read_input(tmp_path / "both", split=split)
    datasets.DatasetDict({"only": made}).save_to_disk(tmp_path / "one")
    assert values(read_input(tmp_path / "one")) == ROWS["x"]
    with pytest.raises(InputError, match=r"input.config: has no effect on .*one, which save_to_disk wrote"):
        read_input(tmp_path / "one", config="c")


def test_a_copy_has_the_same_fingerprint_and_a_change_another(saved, tmp_path, read_input):
    shutil.copytree(saved, tmp_path / "elsewhere")
    one = read_input(saved).fingerprint()
    assert read_input(tmp_path / "elsewhere").fingerprint() == one
    datasets.Dataset.from_dict(ROWS).save_to_disk(tmp_path / "one shard", num_shards=1)
    assert read_input(tmp_path / "one shard").fingerprint() == one, "the same rows in other files"
    changed = ROWS | {"x": [*range(9), 99]}
    datasets.Dataset.from_dict(changed).save_to_disk(tmp_path / "other")
    assert read_input(tmp_path / "other").fingerprint() != one


def test_a_local_folder_that_load_dataset_takes(write, read_input, tmp_path):
    write("folder/data/train-00000-of-00002.parquet", {"x": [1, 2]})
    write("folder/data/train-00001-of-00002.parquet", {"x": [3]})
    write("folder/data/test-00000-of-00001.parquet", {"x": [4]})
    assert values(read_input(tmp_path / "folder", format="hf", split="train")) == [1, 2, 3]
    assert values(read_input(tmp_path / "folder", format="hf", split="train[1:]")) == [2, 3]
    with pytest.raises(InputError, match=r"has several splits; choose one of train, test"):
        read_input(tmp_path / "folder", format="hf")
    with pytest.raises(InputError, match=r"folder: the data set cannot be loaded: .*[Uu]nknown split"):
        read_input(tmp_path / "folder", format="hf", split="dev")
    with pytest.raises(InputError, match=r"none: the data set cannot be loaded: Couldn't find"):
        read_input(tmp_path / "none", format="hf")
    assert values(read_input(tmp_path / "folder")) == [4, 1, 2, 3], "without it, all files in the order of their names"


@pytest.mark.parametrize("name", ["nobody/nothing", "nobody/nothing@main", "nothing/"])
def test_a_hub_that_cannot_be_reached(read_input, name):
    with pytest.raises(InputError, match=r"nothing.*: the data set cannot be loaded: .*HF_HUB_OFFLINE is set.* load it"):
        read_input(f"hf://datasets/{name}")


def test_what_the_hub_is_asked_for(monkeypatch, read_input):
    asked = []

    def load_dataset(*args, **options):
        asked.append((*args, *options.values()))
        return datasets.DatasetDict({"train": datasets.Dataset.from_dict(ROWS)})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    read_input("hf://datasets/org/name")
    read_input("hf://datasets/org/name@v1", config="main")
    read_input("hf://datasets/org/name", revision="abc")
    assert asked == [("org/name", None, None, None), ("org/name", "main", None, "v1"), ("org/name", None, None, "abc")]


def test_keys_of_data_sets_are_refused_for_files(write, read_input):
    path = write("a.parquet", {"x": [1]})
    for key in ("config", "split", "revision"):
        with pytest.raises(InputError, match=rf"input.{key}: has no effect on files"):
            read_input(path, **{key: "x"})
    with pytest.raises(InputError, match="a list of paths cannot be read as a data set"):
        read_input([str(path)], format="hf")


def test_damaged(saved, read_input):
    (saved / "data-00001-of-00003.arrow").write_bytes(b"nonsense")
    with pytest.raises(InputError, match=r"saved: the data set cannot be loaded"):
        read_input(saved)
