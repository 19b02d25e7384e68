"""llama.cpp's server as a peer: the same weights as float32 in a GGUF file, requests over HTTP on this machine.

The server batches by slots and keeps each slot's prompt; its KV memory is one pool for all slots. Its further cache of
prompts outside that pool is off, as the others have none.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from batchgen.bench.peers import bare
from batchgen.bench.systems import Run, SystemFailed
from batchgen.bench.workloads import BLOCK_SIZE, Workload
from batchgen.models.files import packaged_gguf

SLOTS = (4, 8, 16, 32)
START_SECONDS = 120
UNLIKELY_TOKEN = 3  # SmolLM2's <repo_name>; the comparison of tokens would show if a model gives it


def server_path() -> str:
    """`llama-server` from PATH or $LLAMA_SERVER. SystemFailed if there is none."""
    path = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")
    if path is None:
        raise SystemFailed("not installed; put llama-server on the PATH, or its path into LLAMA_SERVER")
    return path


def write_float32(source: Path, target: Path) -> None:
    """The GGUF file again, its tensors as float32: the values that batchgen computes with.

    No token ends an answer in it: llama.cpp bans end tokens where it is to ignore them, and would give other tokens than the
    rest. It knows them by number and by text, so those are others here; prompts come as ids.
    """
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, dequantize

    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        value: Any = field.contents()
        if field.name == "general.file_type":
            value = int(LlamaFileType.ALL_F32)
        if field.name in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"):
            value = UNLIKELY_TOKEN
        if field.name == "tokenizer.ggml.tokens":
            value = [f"[{text}]" if text.startswith("<|") else text for text in value]
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, field.types[0], inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCppSystem:
    """A fresh server for every run, started outside its time: so its memory is the workload's, and its caches are empty."""

    def __init__(self, model: str, threads: int) -> None:
        self.server, self.threads, self.slots = server_path(), threads, SLOTS[1]
        if not model.endswith(".gguf") and not model.startswith("packaged:"):
            raise SystemFailed("llama.cpp reads GGUF files only")
        self.folder = tempfile.TemporaryDirectory(prefix="batchgen-llama-cpp-")
        self.gguf = Path(self.folder.name) / "float32.gguf"
        write_float32(packaged_gguf(model) if model.startswith("packaged:") else Path(model), self.gguf)

    def calibrate(self, workload: Workload) -> str:
        requests = workload.requests()
        trial = bare(workload, requests[: SLOTS[-1]])
        seconds = {}
        for self.slots in [n for n in SLOTS if n <= len(trial.prompts)] or [len(trial.prompts)]:
            seconds[self.slots] = self.run(trial).seconds
        self.slots = min(seconds, key=lambda n: seconds[n])
        trials = ", ".join(f"{n}: {s:.1f} s" for n, s in seconds.items())
        return f"{self.slots} slots ({len(trial.prompts)} requests took {trials})"

    def run(self, workload: Workload) -> Run:
        prompts = [p.tolist() for p in workload.requests()]
        num_tokens = workload.num_blocks * BLOCK_SIZE
        longest = max(map(len, prompts)) + workload.max_tokens
        slots = max(1, min(self.slots, len(prompts), num_tokens // longest))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [
            *(self.server, "--model", str(self.gguf), "--host", "127.0.0.1", "--port", str(port), "--offline"),
            *("--ctx-size", str(num_tokens), "--parallel", str(slots), "--kv-unified", "--cache-ram", "0"),
            *("--cache-type-k", "f32", "--cache-type-v", "f32", "--batch-size", "1024", "--ubatch-size", "512"),
            *("--threads", str(self.threads), "--threads-batch", str(self.threads), "--no-context-shift"),
        ]
        null = subprocess.DEVNULL
        server = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, preexec_fn=die_with_parent)
        try:
            wait_for(server, port)

            def ask(prompt: list[int]) -> dict[str, Any]:
                body = {"prompt": prompt, "n_predict": workload.max_tokens, "temperature": 0}
                return post(port, body | {"cache_prompt": True, "return_tokens": True})

            begin = time.perf_counter()
            with ThreadPoolExecutor(slots) as pool:
                answers = list(pool.map(ask, prompts))
            seconds = time.perf_counter() - begin
        finally:
            server.terminate()
            server.wait()
        computed = sum(a["timings"]["prompt_n"] for a in answers)
        return Run(seconds, [a["tokens"] for a in answers], computed, {"slots": slots})


def die_with_parent() -> None:
    """In the child: be killed when the parent is, as it is when it takes too long (Linux: prctl PR_SET_PDEATHSIG)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(1, signal.SIGKILL)


def wait_for(server: subprocess.Popen[bytes], port: int) -> None:
    until = time.perf_counter() + START_SECONDS
    while time.perf_counter() < until and server.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise SystemFailed(f"llama-server did not start within {START_SECONDS} s (exit code {server.poll()})")


def post(port: int, body: dict[str, Any]) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer: dict[str, Any] = json.loads(response.read())
    if response.status != 200:
        raise RuntimeError(f"llama-server: {answer}")
    return answer
