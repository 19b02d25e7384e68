"""The job file: every trap is named, with its key and the way out, and all of a file's problems come at once."""

import json
import os
import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from batchgen.errors import JobFileError
from batchgen.job import Job, job_json_schema, load_job

JOBS = Path(__file__).parents[1] / "jobs"

GOOD = """
model: {path: org/model}
input: {path: rows.parquet}
prompt: {user: "{{ question }}"}
output: {path: runs/x}
"""


@pytest.fixture
def write(tmp_path):
    def write(text, name="job.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def problems(path, *overrides):
    with pytest.raises(JobFileError) as caught:
        load_job(path, overrides)
    return [line.replace(f"{path}: ", "") for line in str(caught.value).splitlines()]


def test_defaults(write):
    job = load_job(write(GOOD))
    assert (job.sampling.max_tokens, job.sampling.temperature, job.sampling.n, job.sampling.stop) == (256, 0.0, 1, [])
    assert (job.output.commit_rows, job.output.commit_seconds, job.output.rows_per_file) == (256, 30.0, 1_000_000)
    assert (job.engine.block_size, job.engine.kv_memory, job.engine.prefix_cache) == (16, "auto", True)
    with pytest.raises(Exception, match="frozen"):
        job.sampling.seed = 3


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ("engine: {block_sise: 4}", "engine.block_sise: unknown key; did you mean block_size?"),
        ("sampling: {block_size: 4}", "sampling.block_size: unknown key; did you mean engine.block_size?"),
        ("samplin: {}", "samplin: unknown key; did you mean sampling?"),
        ("sampling: {temperature: 1e-5}", "sampling.temperature: .*1e-5 as text; write 1.0e-5"),
        ("sampling: {temperature: 1.5e2}", "sampling.temperature: .*write 1.5e\\+2"),
        ("sampling: {max_tokens: 010}", r"sampling.max_tokens: YAML reads 010 as 8 \(octal\); write 10"),
        ("sampling: {max_tokens: 1:30}", r"sampling.max_tokens: YAML reads 1:30 as 90 \(base 60\)"),
        ("sampling: {stop: [no]}", r'sampling.stop\[0\]: must be text, not false: .*write "no"'),
        ("sampling: {stop: ['a', '']}", "sampling.stop: item 1 is an empty text"),
        ("sampling: {on: 1}", "sampling.on: a key must be text"),
        ("sampling: {seed: true}", "sampling.seed: must be a whole number, not true"),
        ("sampling: {seed: 1.0}", "sampling.seed: must be a whole number, not 1.0"),
        ("sampling: {seed: '1'}", 'sampling.seed: must be a whole number, not the text "1"'),
        ("sampling: {temperature: .nan}", "sampling.temperature: must be a finite number"),
        ("sampling: {temperature: -0.1}", "sampling.temperature: must be at least 0.*, not -0.1"),
        ("sampling: {top_p: 0}", "sampling.top_p: must be more than 0.*, not 0"),
        ("sampling: {top_p: 1.01}", "sampling.top_p: must be at most 1.*, not 1.01"),
        ("sampling: {min_p: -0.1}", "sampling.min_p: must be at least 0.*, not -0.1"),
        ("sampling: {min_p: 1.5}", "sampling.min_p: must be at most 1.*, not 1.5"),
        ("sampling: {n: 0}", "sampling.n: must be at least 1, not 0"),
        ("engine: {device: tpu}", 'engine.device: must be auto, cpu, cuda or cuda:N .*"tpu"'),
        ("engine: {dtype: int4}", "engine.dtype: must be 'auto', 'float32', 'bfloat16', 'float16' or 'int8'"),
        ("engine: {kv_memory: 2gig}", "engine.kv_memory: must be auto, a number of bytes, or a size such as 512MiB"),
        ("engine: {kv_memory: 12}", "engine.kv_memory: must be at least 1024 or 'auto', not 12"),
        ("engine: {threads: many}", "engine.threads: must be a whole number or 'auto', not the text \"many\""),
        ("engine: 3", "engine: must be a section"),
        ("engine:\n  threads: 1\n  threads: 2", "engine.threads: given twice, in lines 7 and 8; keep one"),
        ("engine: {threads: 1}\nengine: {}", "engine: given twice, in lines 6 and 7; keep one"),
    ],
)
def test_one_problem_is_one_line_with_key_and_way_out(write, added, said):
    (line,) = problems(write(GOOD + added))
    assert re.match(said, line), line


@pytest.mark.parametrize("value", ["101%", "-1", "0.1", "true", "[1]", "five"])
def test_max_failed_rows(write, value):
    job = load_job(write(GOOD), ["output.max_failed_rows=5.5%"])
    assert [job.output.max_failed(rows) for rows in (0, 18, 19, 100)] == [0, 0, 1, 5]
    assert load_job(write(GOOD), ["output.max_failed_rows=7"]).output.max_failed(3) == 7
    with pytest.raises(JobFileError, match=r"output.max_failed_rows: must be a number of rows, a share of them such as 5%"):
        load_job(write(GOOD), [f"output.max_failed_rows={value}"])


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("prompt: {user: {{ question }}}", "prompt.user: text that begins with {{ must be in quotes"),
        ("prompt: {}", "prompt: give exactly one of user, messages, text; found none"),
        ('prompt: {user: "a", text: "b"}', "prompt: give exactly one of .*; found user and text"),
        ('prompt: {text: "a", system: "b"}', "prompt: system has no effect with text"),
        ('prompt: {text: "a", chat_template: "b{{"}', "prompt: chat_template has no effect with text"),
        ('prompt: {user: "a", continue_final_message: true}', "prompt: continue_final_message needs messages"),
        ('prompt: {user: "a", files: {a-b: c}}', 'prompt.files: "a-b" cannot be a name'),
        ('prompt: {user: "a", on_too_long: cut}', "prompt.on_too_long: must be 'error', 'truncate_left'"),
        ("model: {path: no}", "model.path: must be text, not false: YAML reads no as false"),
        ("model: {path: ''}", "model.path: must be text that is not empty"),
        ("model: {}", "model.path: required"),
        ("input: {path: [a, 1]}", r"input.path\[1\]: must be text, not 1"),
        ("input: {path: []}", "input.path: must be .*a list that is not empty"),
        ("input: {path: a, columns: [a, b, a]}", "input.columns: a is listed twice"),
        ("output: {path: 2024-01-01}", "output.path: must be text, not 2024-01-01: YAML reads 2024-01-01 as a date"),
        ("output: {path: a, extract: {pattern: '('}}", "output.extract.pattern: not a regular expression"),
        ("output: {path: a, extract: {pattern: a, patern: b}}", "output.extract.patern: unknown key; did you mean pattern"),
        ("output: {path: a, extract: {pattern: a, as_: text}}", "output.extract.as_: unknown key; did you mean as"),
    ],
)
def test_problems_of_a_required_section(write, section, said):
    name = section.partition(":")[0]
    kept = "".join(line for line in GOOD.splitlines(keepends=True) if not line.startswith(name))
    (line,) = problems(write(kept + section))
    assert re.match(said, line), line


def test_all_problems_of_a_file_and_of_set_at_once(write):
    path = write(GOOD + "engine: {block_sise: 4, threads: 1, threads: 2}\nsampling: {seed: x}\n")
    lines = problems(path, "engine.devise=cpu", "sampling.n=0")
    assert sorted(line.split(": ")[0] for line in lines) == [
        "--set engine.devise=cpu",
        "--set sampling.n=0",
        "engine.block_sise",
        "engine.threads",
        "sampling.seed",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a job file has sections"),
        ("- 1", "a job file has sections"),
        ("a: [", "line 1, column 5: not valid YAML"),
        ("a: !!python/object:os.system x", "must be|unknown key|not valid YAML|.*could not determine a constructor"),
        ("a: &x [*x]", "a.*alias that contains itself"),
        ("model: {path: \0}", "not valid YAML: .*character"),
        ("a: " + "[" * 5000, "not valid YAML: nested too deeply|.*line 1"),
        (
            "a: &a [1, 1, 1, 1, 1, 1, 1, 1]\n"
            + "".join(f"{new}: &{new} [{', '.join([f'*{old}'] * 8)}]\n" for old, new in zip("abcdefgh", "bcdefghi")),
            "not valid YAML: more than 100,000 values",
        ),
    ],
)
def test_files_that_are_no_job(write, text, said):
    assert re.match(said, problems(write(text))[0])


def test_missing_file(tmp_path):
    assert problems(tmp_path / "none.yaml") == ["cannot read the job file: No such file or directory"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("engine.block_sise=4", "--set engine.block_sise=4: unknown key; did you mean block_size?"),
        ("engin.block_size=4", "--set engin.block_size=4: unknown key; did you mean engine?"),
        ("engine.block_size.x=4", "--set engine.block_size.x=4: block_size is a value, not a section"),
        ("engine.block_size", "--set engine.block_size: write --set section.key=value"),
        ("sampling.temperature=1e-5", "--set .*: sampling.temperature: .*write 1.0e-5"),
        ("sampling.max_tokens=010", r"--set .*: YAML reads 010 as 8 \(octal\)"),
        ("output.extract={patern: a}", "--set .*: output.extract.pattern: required"),
    ],
)
def test_set_names_itself_as_the_place(write, override, said):
    assert re.match(said, problems(write(GOOD), override)[0])


def test_set_values_are_yaml(write):
    job = load_job(
        write(GOOD),
        [
            "engine.block_size=4",
            'sampling.stop=["END", "no"]',
            "prompt.user={{ other }}",
            "prompt.files.a=b.txt",
            "prompt.chat_template_kwargs.think=false",
            "input.where=document | length < 1300",
            "output.extract.pattern=a",
            "output.extract.as=number",
            "engine.kv_memory=1.5GiB",
        ],
    )
    assert (job.engine.block_size, job.sampling.stop, job.prompt.user) == (4, ["END", "no"], "{{ other }}")
    assert job.output.extract is not None and (job.output.extract.pattern, job.output.extract.as_) == ("a", "number")
    assert job.input.where == "document | length < 1300"
    assert job.engine.kv_memory == 1.5 * 2**30
    assert job.prompt.chat_template_kwargs == {"think": False}


def test_set_null_takes_a_key_away(write):
    job = load_job(write(GOOD + "sampling: {n: 2}"), ["prompt.user=null", "prompt.text=x", "input.limit=null"])
    assert (job.prompt.user, job.prompt.text, job.input.limit) == (None, "x", None)


def test_paths_in_the_file_are_relative_to_it_and_those_of_set_to_the_current_folder(tmp_path, monkeypatch):
    jobs, here = tmp_path / "jobs", tmp_path / "here"
    for folder in (jobs, here):
        folder.mkdir()
    (jobs / "local_model").mkdir()
    (jobs / "job.yaml").write_text(
        "model: {path: local_model, tokenizer: org/other}\n"
        "input: {path: [data/*.parquet, /abs/x.parquet, 's3://bucket/x']}\n"
        "prompt: {user: a, chat_template: t.jinja, files: {p: p.txt}}\n"
        "output: {path: runs/x}\n"
    )
    monkeypatch.chdir(here)
    job = load_job("../jobs/job.yaml")
    assert (job.model.path, job.model.tokenizer) == (str(jobs / "local_model"), "org/other")
    assert job.input.path == [str(jobs / "data/*.parquet"), "/abs/x.parquet", "s3://bucket/x"]
    assert job.prompt.chat_template == str(jobs / "t.jinja")
    assert job.prompt.files == {"p": str(jobs / "p.txt")}
    assert job.output.path == "runs/x"
    job = load_job("../jobs/job.yaml", ["input.path=a.parquet", "prompt.files.p=q.txt", "model.path=local_model"])
    assert (job.input.path, job.prompt.files) == (str(here / "a.parquet"), {"p": str(here / "q.txt")})
    assert job.model.path == "local_model"  # no such folder here, so a hub id
    assert load_job("../jobs/job.yaml", ["model.path=x.gguf"]).model.path == str(here / "x.gguf")
    assert load_job("../jobs/job.yaml", ["model.path=packaged:smollm2"]).model.path == "packaged:smollm2"


def test_settings_that_change_answers(write, tmp_path):
    (tmp_path / "p.txt").write_text("one")
    path = write(GOOD.replace("prompt: {", "prompt: {files: {p: p.txt}, "))
    base = load_job(path).settings_that_change_answers()
    json.dumps(base)

    def changed(*overrides):
        new = load_job(path, overrides).settings_that_change_answers()
        return {key for key in base.keys() | new.keys() if base.get(key, "-") != new.get(key, "-")}

    harmless = ["engine.device=cpu", "engine.block_size=4", "engine.threads=2", "engine.max_running_requests=3"]
    harmless += [
        "output.path=y",
        "output.max_failed_rows=5%",
        "output.commit_rows=1",
        "output.extract.pattern=a",
        "engine.kv_memory=1GiB",
    ]
    assert changed(*harmless) == set()
    answers = ("sampling.seed=1", "model.path=b/c", "prompt.user=x", "input.limit=3", "engine.dtype=float32")
    for override in (*answers, "engine.kv_dtype=fp8", "engine.batch_invariant=true"):
        assert changed(override) == {override.partition("=")[0]}
    (tmp_path / "p.txt").write_text("two")
    assert changed() == {"prompt.files.p"}


def test_prompt_files_keep_their_bytes(write, tmp_path):
    (tmp_path / "p.txt").write_bytes("é\r\n\n".encode())
    assert load_job(write(GOOD), [f"prompt.files.p={tmp_path}/p.txt"]).prompt.read_files() == {"p": "é\r\n\n"}
    with pytest.raises(JobFileError, match=r"prompt.files.p: .*none.txt: cannot read"):
        load_job(write(GOOD), [f"prompt.files.p={tmp_path}/none.txt"]).prompt.read_files()


def keys_of(model: type[BaseModel], above: str = ""):
    for name, field in model.model_fields.items():
        key = above + (field.alias or name)
        yield key
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from keys_of(part, f"{key}.")


def keys_in(data, above=""):
    for name, value in data.items():
        yield above + name
        if isinstance(value, dict):
            yield from keys_in(value, f"{above}{name}.")


def test_eval_job_shows_and_explains_every_key():
    text = (JOBS / "eval.yaml").read_text()
    assert set(keys_in(yaml.safe_load(text))) - {"prompt.files.prefix"} == set(keys_of(Job))
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            assert re.search(r"  ?# \w", line), f"not explained: {line}"


def test_eval_job_states_true_defaults():
    """A line that says `# default.` shows the default; one that says `# default:` names it and sets another or null."""
    data = yaml.safe_load((JOBS / "eval.yaml").read_text())
    required = {"model": "path", "input": "path", "prompt": "text", "output": "path"}
    minimal = {section: {key: data[section][key]} for section, key in required.items()}
    defaults = Job.model_validate(minimal).model_dump(by_alias=True)
    section = ""
    for line in (JOBS / "eval.yaml").read_text().splitlines():
        if match := re.match(r"(\w+):", line):
            section = match[1]
        elif (match := re.match(r"  (\w+):.*# default\. ", line)) and section:
            assert data[section][match[1]] == defaults[section][match[1]], line


@pytest.mark.parametrize("name", ["demo.yaml", "eval.yaml"])
def test_shipped_jobs_load_and_their_files_exist(name):
    job = load_job(JOBS / name)
    assert isinstance(job.input.path, str) and os.path.exists(job.input.path)
    job.prompt.read_files()


def test_demo_takes_the_questions_of_the_20_shortest_documents():
    import jinja2
    import pyarrow.parquet as pq

    job = load_job(JOBS / "demo.yaml")
    assert job.input.where is not None
    where = jinja2.Environment().compile_expression(job.input.where)
    rows = pq.read_table(job.input.path).to_pylist()
    chosen = {row["doc_id"] for row in rows if where(**row)}
    by_length = sorted({row["doc_id"]: len(row["document"]) for row in rows}.items(), key=lambda item: item[1])
    assert chosen == {name for name, _ in by_length[:20]}
    assert sum(bool(where(**row)) for row in rows) == 120


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("4 + 5 = 9. So the answer is 9.", "9"),
        ("the answer is $1,080.50.", "1,080.50"),
        ("answer is -3\n", "-3"),
        ("9", None),
    ],
)
def test_eval_pattern(answer, value):
    from batchgen.data.extract import extract_value

    extract = load_job(JOBS / "eval.yaml").output.extract
    assert extract is not None and extract_value(answer, extract) == value


def test_json_schema_describes_every_key():
    schema = job_json_schema()
    sections = [definition for definition in schema["$defs"].values() if definition.get("type") == "object"]
    assert len(sections) == 7
    for definition in [schema, *sections]:
        assert definition["additionalProperties"] is False
        for key, value in definition["properties"].items():
            assert value.get("description"), key
    assert "as" in schema["$defs"]["ExtractSection"]["properties"]
