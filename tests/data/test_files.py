"""From input.path to files of one format, and what their folders' names say."""

import pytest

from batchgen.data.files import find_files
from batchgen.errors import InputError

SUFFIXES = {".parquet": "parquet", ".jsonl": "jsonl", ".json": "jsonl", ".jsonl.gz": "jsonl", ".csv": "csv"}


@pytest.fixture
def touch(tmp_path):
    def touch(*names):
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()

    return touch


def test_a_folder_takes_every_file_whose_suffix_tells_its_format(touch, tmp_path):
    touch("in/a.jsonl", "in/x/b.JSONL.gz", "in/README.md", "in/_tmp/c.jsonl", "in/LICENSE")
    files, format = find_files(str(tmp_path / "in"), SUFFIXES)
    assert ([file.source for file in files], format) == (["a.jsonl", "x/b.JSONL.gz"], "jsonl")


def test_files_of_two_formats_are_both_named(touch, tmp_path):
    touch("in/a.csv", "in/b.parquet", "in/c.csv")
    said = r"files of two formats: .*a.csv \(csv\) and .*b.parquet \(parquet\).* or set input.format"
    for path in ("in", "in/*"):
        with pytest.raises(InputError, match=said):
            find_files(str(tmp_path / path), SUFFIXES)
    files, format = find_files(str(tmp_path / "in"), SUFFIXES, "csv")
    assert ([file.source for file in files], format) == (["a.csv", "c.csv"], "csv")


def test_json_beside_data_describes_it(touch, tmp_path):
    touch("in/a.parquet", "in/dataset_info.json", "only/x.json")
    assert [file.source for file in find_files(str(tmp_path / "in"), SUFFIXES)[0]] == ["a.parquet"]
    assert [file.source for file in find_files(str(tmp_path / "only"), SUFFIXES)[0]] == ["x.json"]


def test_a_suffix_that_tells_nothing(touch, tmp_path):
    touch("in/part-0", "in/part-1")
    for path in ("in/part-0", "in/part-*"):
        with pytest.raises(InputError, match=r"part-0: its suffix tells no format; set input.format \(parquet, jsonl"):
            find_files(str(tmp_path / path), SUFFIXES)
        assert find_files(str(tmp_path / path), SUFFIXES, "jsonl")[1] == "jsonl"
    with pytest.raises(InputError, match=r"no \*.parquet, \*.jsonl, \*.json, \*.csv in the folder .*2 other files"):
        find_files(str(tmp_path / "in"), SUFFIXES)


def columns(reader):
    batches = [source.batch for source in reader.batches(None)]
    assert all(batch.schema.equals(reader.schema) for batch in batches)
    return {name: [v for batch in batches for v in batch.column(name).to_pylist()] for name in reader.schema.names}


def test_hive_folders_are_columns(write, read_input, tmp_path):
    write("in/lang=de/year=2024/a.parquet", {"x": [1, 2]})
    write("in/lang=fr%20CA/year=__HIVE_DEFAULT_PARTITION__/a.parquet", {"x": [3]})
    write("in/lang=007/year=-5/a.parquet", {"x": [4]})
    reader = read_input(tmp_path / "in")
    expected = {"x": [4, 1, 2, 3], "lang": ["007", "de", "de", "fr CA"], "year": [-5, 2024, 2024, None]}
    assert columns(reader) == expected
    (first, *_) = reader.batches(["year", "x"])
    assert first.batch.to_pydict() == {"year": [-5], "x": [4]}
    assert [source.batch.num_rows for source in reader.batches(["lang"])] == [1, 2, 1]
    read_input(tmp_path / "in/*/*/*.parquet", columns=["lang"])  # a column like any other
    assert "lang" not in read_input(tmp_path / "in/lang=de").schema.names  # it is not below the folder asked for


@pytest.mark.parametrize("text", ["007", "+5", "1_0", "9223372036854775808", "1.5", "٣"])
def test_a_partition_is_a_number_only_where_it_comes_out_as_written(write, read_input, tmp_path, text):
    write(f"in/k={text}/a.parquet", {"x": [1]})
    write("in/k=12/a.parquet", {"x": [1]})
    assert sorted(columns(read_input(tmp_path / "in"))["k"]) == sorted([text, "12"])


def test_hive_folders_that_do_not_fit(write, read_input, tmp_path):
    write("in/lang=de/a.parquet", {"lang": ["x"]})
    with pytest.raises(InputError, match=r"folder of lang=de/a.parquet names a column lang, which the files hold too"):
        read_input(tmp_path / "in")
    write("two/lang=de/a.parquet", {"x": [1]})
    write("two/b.parquet", {"x": [1]})
    with pytest.raises(InputError, match=r"lang=de/a.parquet lies in folders that name the columns lang, but b.parquet"):
        read_input(tmp_path / "two")
