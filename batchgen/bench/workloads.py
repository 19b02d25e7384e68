"""What is measured: job files of this repository, changed as their overrides say, as token ids. Knows no system.

The prompts come through the product's own reader, templates and tokenizer, and every system gets the same ids.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchgen.errors import UsageError
from batchgen.job import load_job
from batchgen.plan.window import plan_window
from batchgen.prompts import make_token_store, open_inputs
from batchgen.records import Window
from batchgen.report.progress import Progress

JOBS = Path(__file__).parents[2] / "jobs"
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Workload:
    """Prompts in file order, each answered `num_samples` times with exactly `max_tokens` tokens, end tokens or not.

    A request is one sample of one row: request i asks for `prompts[i // num_samples]`.
    """

    name: str
    about: str
    prompts: list[np.ndarray]  # int32 ids
    row_keys: np.ndarray  # [n] uint64
    max_tokens: int
    num_samples: int = 1
    num_blocks: int = 0  # the KV memory that each system gets, in blocks of BLOCK_SIZE tokens; 0: not set yet

    def requests(self) -> list[np.ndarray]:
        """The prompt of every request: what a system is given that takes no number of samples."""
        return [prompt for prompt in self.prompts for _ in range(self.num_samples)]

    def window(self) -> Window:
        """The plan of all rows."""
        lengths = np.array([len(p) for p in self.prompts], np.int32)
        return plan_window(lambda i: self.prompts[i], np.arange(len(self.prompts)), lengths, BLOCK_SIZE)

    def take(self, rows: np.ndarray) -> Workload:
        """Only these rows, in this order."""
        return replace(self, prompts=[self.prompts[i] for i in rows], row_keys=self.row_keys[rows])

    @property
    def num_prompt_tokens(self) -> int:
        """Of all requests."""
        return sum(map(len, self.prompts)) * self.num_samples

    def memory_settings(self) -> dict[str, int]:
        """KV blocks by setting: `ample` holds every request whole, `scarce` a tenth of the prompts' tokens.

        (Scarce holds the longest request too, or it could not be answered.)
        """
        whole = [-(-(len(p) + self.max_tokens) // BLOCK_SIZE) for p in self.prompts]
        tenth = self.num_prompt_tokens // 10 // BLOCK_SIZE
        return {"ample": sum(whole) * self.num_samples, "scarce": max(tenth, max(whole) + 1)}


@dataclass(frozen=True)
class Recipe:
    """A job file, what is changed in it for so many rows, and the sizes of a full and of a quick run."""

    about: str
    job: str
    overrides: Callable[[Path, int], list[str]]  # (folder of the job files, rows)
    rows: int
    quick_rows: int
    max_tokens: int
    quick_max_tokens: int
    num_samples: int = 1
    shuffled: bool = False  # where the file keeps together what rows share, and real input would not


def _docqa(jobs: Path, rows: int) -> list[str]:
    """Whole documents, the shortest first, so that fewer rows share as much as many do."""
    table = pq.read_table(jobs / "data/docqa.parquet", columns=["doc_id", "document"])
    lengths = pc.utf8_length(table.column("document")).to_numpy()
    longest = int(np.sort(lengths)[min(rows, len(lengths)) - 1])
    return [f"input.where=document | length <= {longest}"]


def _gsm8k(jobs: Path, rows: int) -> list[str]:
    prefix = (jobs / "data/gsm8k_8shot_prefix.txt").read_text("utf-8")
    text = f"{{% raw %}}{prefix}{{% endraw %}}Question: {{{{ question }}}}\nAnswer:"
    return ["prompt.files={}", f"prompt.text={json.dumps(text)}"]


def _gsm8k_alone(jobs: Path, rows: int) -> list[str]:
    return ["prompt.files={}", 'prompt.text="{{ question }}"']


def _other_data(jobs: Path, file: str, **prompt: str | None) -> list[str]:
    """The demo's chat over another file: its system and user prompts are replaced by `prompt`."""
    path = json.dumps(str(jobs / "data" / file))
    given: dict[str, str | None] = {"system": None, "user": None, **prompt}
    return [
        f"input.path={path}",
        "input.where=null",
        "output.prefix=batchgen_",
        *(f"prompt.{key}={json.dumps(text)}" for key, text in given.items()),
    ]


def _orderlines(jobs: Path, rows: int) -> list[str]:
    instruction = (jobs / "data/orderlines_instruction.txt").read_text("utf-8").strip()
    fields = ("product", "options", "price", "status", "country")
    user = "\n".join(f"{field}: {{{{ {field} }}}}" for field in fields)
    return _other_data(jobs, "orderlines.parquet", system=instruction, user=user)


def _tool_chat(jobs: Path, rows: int) -> list[str]:
    return _other_data(jobs, "tool_chat.parquet", messages="messages")


def _humaneval(jobs: Path, rows: int) -> list[str]:
    user = "Complete this Python function. Reply with code only.\n\n{{ prompt }}"
    return _other_data(jobs, "humaneval.parquet", user=user)


RECIPES = {
    "gsm8k-8shot": Recipe("8 worked examples before each question, raw text", "eval.yaml", _gsm8k, 64, 16, 32, 16),
    "docqa": Recipe("6 questions on each of some documents, shuffled, as a chat", "demo.yaml", _docqa, 72, 18, 32, 16),
    "orderlines": Recipe("table rows after one long instruction, as a chat", "demo.yaml", _orderlines, 64, 16, 32, 16),
    "tool-chat": Recipe(
        "chats whose system prompts are lists of tools, shuffled", "demo.yaml", _tool_chat, 20, 8, 32, 16, shuffled=True
    ),
    "humaneval-n10": Recipe(
        "10 answers to each function to complete, as a chat", "demo.yaml", _humaneval, 12, 3, 48, 16, num_samples=10
    ),
    "gsm8k-0shot": Recipe("the bare questions: nothing in common", "eval.yaml", _gsm8k_alone, 64, 24, 48, 16),
}


def load_workload(
    name: str, model: str, rows: int | None = None, max_tokens: int | None = None, quick: bool = False, jobs: Path = JOBS
) -> Workload:
    """Read, render and tokenize. UsageError for an unknown name, or where the job files are not there."""
    if name not in RECIPES:
        raise UsageError(f"unknown workload {name}; there are {', '.join(RECIPES)}")
    if not (jobs / "demo.yaml").is_file():
        raise UsageError(f"no job files in {jobs}; run this in a checkout of the repository, or name the folder with --jobs")
    recipe = RECIPES[name]
    rows = rows or (recipe.quick_rows if quick else recipe.rows)
    overrides = [f"model.path={json.dumps(model)}", f"input.limit={rows}", *recipe.overrides(jobs, rows)]
    inputs = open_inputs(load_job(jobs / recipe.job, overrides), with_weights=False)
    with tempfile.TemporaryDirectory() as folder:
        store = make_token_store(inputs, Path(folder) / "tokens.arrow", Progress(io.StringIO()))
        if faults := store.faults():
            raise UsageError(f"workload {name}: {len(faults)} rows have no prompt: {next(iter(faults.values())).message}")
        prompts = [store.tokens(i).copy() for i in range(store.num_rows)]
        keys = store.row_keys.copy()
    limit = max_tokens or (recipe.quick_max_tokens if quick else recipe.max_tokens)
    workload = Workload(name, recipe.about, prompts, keys, limit, recipe.num_samples)
    return workload.take(np.random.default_rng(0).permutation(len(prompts))) if recipe.shuffled else workload
