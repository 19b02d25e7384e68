"""OpenAI batch files in and out: every request once, in the input's order, in the output file or in the errors file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import WarmServer, results, write_job, write_rows

QUESTIONS = ["what is 1", "tell me of 2", "what is 3"]


def request(custom_id: Any, body: Any, **more: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body} | more


def chat(text: str, **parameters: Any) -> dict[str, Any]:
    return {"model": "some-model", "messages": [{"role": "user", "content": text}], **parameters}


def write(path: Path, lines: list[Any]) -> None:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


@pytest.fixture
def job(here: Path) -> Path:
    return write_job(
        here, input={"path": "batch.jsonl", "format": "openai-batch"}, prompt=None,
        output={"path": "out", "format": "openai-batch"}, sampling={"max_tokens": 8, "n": 2},
    )  # fmt: skip


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_requests_are_answered_in_openais_shapes(here: Path, server: WarmServer, job: Path) -> None:
    lines = [
        request("a", chat(QUESTIONS[0], max_tokens=8, temperature=0, n=2, stream=False, user="me", seed=None)),
        request("hot", chat(QUESTIONS[0], temperature=0.7)),
        "{broken",
        request("b", chat(QUESTIONS[1], max_completion_tokens=8)),
        request("embed", {"model": "m", "input": "x"}, url="/v1/embeddings"),
        request(None, chat("who")),
        request("tools", chat("who", tools=[{"type": "function"}])),
        request("none", {"model": "m"}),
        request("c", chat(QUESTIONS[2])),
    ]
    write(here / "batch.jsonl", lines)
    outcome = server.run("run", job, cwd=here)
    assert outcome.code == 3, outcome
    answered, failed = read(here / "out/results/output.jsonl"), read(here / "out/results/errors.jsonl")
    assert [line["custom_id"] for line in answered] == ["a", "b", "c"]
    codes = [(line["custom_id"], line["error"]["code"]) for line in failed]
    assert codes == [
        ("hot", "unsupported_parameter"), (None, "bad_json"), ("embed", "unsupported_url"), (None, "bad_request"),
        ("tools", "unsupported_parameter"), ("none", "null_prompt"),
    ]  # fmt: skip
    assert "temperature is 0.7, and the job's sampling.temperature is 0.0" in failed[0]["error"]["message"]
    assert all(line["response"] is None for line in failed) and len({line["id"] for line in answered + failed}) == 9
    body = answered[0]["response"]["body"]
    assert answered[0]["error"] is None and answered[0]["response"]["status_code"] == 200
    assert (body["object"], body["model"], len(body["choices"])) == ("chat.completion", "some-model", 2)
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] and usage["completion_tokens"] > 2

    (here / "batch.yaml").write_text(job.read_text())
    write_rows(here / "rows.parquet", {"q": QUESTIONS})
    plain = write_job(here, sampling={"max_tokens": 8, "n": 2}, output={"path": "plain"})
    assert server.run("run", plain, cwd=here).code == 0
    rows = results(here / "plain").to_pylist()
    choices = [choice for line in answered for choice in line["response"]["body"]["choices"]]
    assert [(c["message"]["content"], c["finish_reason"]) for c in choices] == [
        (row["generated_text"], row["finish_reason"]) for row in rows
    ]
    before = {path.name: path.read_bytes() for path in (here / "out/results").iterdir()}
    assert set(before) == {"output.jsonl", "errors.jsonl"}
    assert server.run("merge", "out", cwd=here).code == 0
    assert {path.name: path.read_bytes() for path in (here / "out/results").iterdir()} == before
    pushed = here / "elsewhere/deep"
    assert server.run("run", here / "batch.yaml", "--set", f"output.push_to={pushed}", cwd=here).code == 3
    assert {path.name: path.read_bytes() for path in pushed.iterdir() if path.name != "manifest.json"} == before


def test_completions_are_raw_prompts(here: Path, server: WarmServer) -> None:
    job = write_job(
        here, input={"path": "batch.jsonl", "format": "openai-batch"}, prompt={"text": "{{ prompt }}"},
        output={"path": "out", "format": "openai-batch"},
    )  # fmt: skip
    write(here / "batch.jsonl", [
        request("a", {"model": "m", "prompt": QUESTIONS[0]}, url="/v1/completions"),
        request("b", {"model": "m", "prompt": ["x", "y"]}, url="/v1/completions"),
        request("c", chat("x")),
    ])  # fmt: skip
    assert server.run("run", job, cwd=here).code == 3
    (line,) = read(here / "out/results/output.jsonl")
    assert line["response"]["body"]["object"] == "text_completion" and isinstance(
        line["response"]["body"]["choices"][0]["text"], str
    )
    codes = [line["error"]["code"] for line in read(here / "out/results/errors.jsonl")]
    assert codes == ["unsupported_parameter", "unsupported_url"]


def test_what_cannot_be_a_batch_is_refused(here: Path, server: WarmServer, job: Path) -> None:
    write(here / "batch.jsonl", [request("a", chat("x")), request("b", chat("x")), request("a", chat("y"))])
    refused = server.run("run", job, cwd=here)
    assert refused.code == 2 and 'custom_id "a" is in row 0 and in row 2' in refused.error
    write(here / "batch.jsonl", [request("a", chat("x"))])
    for changes, told in (
        (["prompt.user=hello"], "requests of an OpenAI batch file have their own"),
        (["input.format=jsonl", "prompt.messages=messages"], "openai-batch needs input.format: openai-batch"),
        (["input.columns=[url]"], "has no place in OpenAI's batch output"),
    ):
        refused = server.run("run", job, *(word for change in changes for word in ("--set", change)), cwd=here)
        assert refused.code == 2 and told in refused.stderr, (changes, refused)
