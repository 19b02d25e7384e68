"""What is measured: job files of this repository, changed as their overrides say, as token ids. Knows no system.

The prompts come through the product's own reader, templates and tokenizer, and every system gets the same ids.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchgen.errors import UsageError
from batchgen.job import load_job
from batchgen.models.loader import eos_token_ids
from batchgen.plan.window import plan_window
from batchgen.records import Window
from batchgen.report.progress import Progress
from batchgen.runner import make_token_store, open_inputs

JOBS = Path(__file__).parents[2] / "jobs"
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Workload:
    """Prompts in file order. A row ends at the first of `end_token_ids`, or with `max_tokens` tokens."""

    name: str
    about: str
    prompts: list[np.ndarray]  # int32 ids
    row_keys: np.ndarray  # [n] uint64
    max_tokens: int
    end_token_ids: tuple[int, ...] = ()  # none: every row gets exactly max_tokens tokens

    def up_to_end(self, answer: list[int]) -> list[int]:
        """`answer` without what follows its first end token: a static batch pads the rows that are done."""
        ends = [i for i, token in enumerate(answer) if token in self.end_token_ids]
        return answer[: ends[0] + 1] if ends else answer

    def is_whole(self, answer: list[int]) -> bool:
        return len(answer) == self.max_tokens or (len(answer) > 0 and answer[-1] in self.end_token_ids)

    def window(self) -> Window:
        """The plan of all rows."""
        lengths = np.array([len(p) for p in self.prompts], np.int32)
        return plan_window(lambda i: self.prompts[i], np.arange(len(self.prompts)), lengths, BLOCK_SIZE)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


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
    natural_end: bool  # whether rows end where the model ends them, as a chat does


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


def _no_sharing(jobs: Path, rows: int) -> list[str]:
    return ["prompt.files={}", 'prompt.text="{{ question }}"']


RECIPES = {
    "docqa": Recipe(
        "6 questions on each of some documents, shuffled, as a chat", "demo.yaml", _docqa, 120, 30, 48, 32, True
    ),
    "gsm8k-8shot": Recipe("8 worked examples before each question, raw text", "eval.yaml", _gsm8k, 96, 16, 64, 32, False),
    "no-sharing": Recipe("the bare questions: nothing in common", "eval.yaml", _no_sharing, 96, 32, 64, 32, False),
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
    ends = tuple(sorted(eos_token_ids(inputs.files))) if recipe.natural_end else ()
    return Workload(name, recipe.about, prompts, keys, limit, ends)
