"""The design's "may import" table as data, held against the source: layers, cycles, and what must start fast."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGINE_HOST = [
    *(
        "engine.admission",
        "engine.scheduler",
        "engine.block_pool",
        "engine.memory_forecast",
        "engine.batch_state",
        "engine.prefix_groups",
        "engine.step",
    ),
]

# layer -> (modules below batchgen, what they may import besides the standard library and themselves)
# The longest module prefix that fits decides the layer of a file.
EVERYTHING_BELOW_RUNNER = {
    *("errors", "records", "prefix", "job", "plan", "data", "text", "engine_host", "engine", "models", "kernels"),
    *("runner", "cluster", "report", "bench", "signals"),
    *("torch", "numpy", "pyarrow", "transformers", "datasets", "tqdm", "fsspec", "safetensors", "xxhash", "jinja2", "yaml"),
    *("gguf", "matplotlib", "vllm"),
}
LAYERS: dict[str, tuple[list[str], set[str]]] = {
    "base": ([""], set()),
    "errors": (["errors", "environment"], {"numpy", "xxhash"}),
    "signals": (["signals"], {"errors"}),
    "records": (["records"], {"errors", "numpy", "xxhash"}),
    "prefix": (["prefix"], {"errors", "records", "numpy", "xxhash"}),
    "job": (["job", "job_errors", "job_paths", "strict_yaml"], {"errors", "records", "yaml", "pydantic"}),
    "plan": (["plan"], {"errors", "records", "prefix", "numpy", "pyarrow"}),
    "data": (["data"], {"base", "errors", "records", "job", "numpy", "pyarrow", "datasets", "fsspec", "xxhash"}),
    "text": (["text"], {"errors", "records", "job", "numpy", "pyarrow", "transformers", "tokenizers", "jinja2", "xxhash"}),
    "engine_host": (ENGINE_HOST, {"errors", "records", "prefix", "numpy"}),
    "models": (
        ["models"],
        {
            *("errors", "kernels", "numpy", "torch", "transformers", "tokenizers", "safetensors", "gguf"),
            *("huggingface_hub", "filelock"),
        },
    ),
    "engine": (
        ["engine"],
        {"errors", "records", "prefix", "engine_host", "models", "kernels", "numpy", "torch", "xxhash"},
    ),
    "runner": (
        ["runner", "prompts", "answering", "planner", "cluster", "report", "bench"],
        EVERYTHING_BELOW_RUNNER | {"base", "prompts", "answering"},
    ),
    "cli": (["cli", "__main__"], {"base", "errors", "job", "typer", "click"}),
}
# Where the table says "inside functions", imports in function bodies are free; elsewhere they count too.
FREE_INSIDE_FUNCTIONS = {"cli"}
KERNELS_MAY = {"torch", "triton", "numpy"}


def module_files() -> dict[str, Path]:
    """Module below batchgen ("" for the package itself) -> file."""
    files = {}
    for path in sorted((ROOT / "batchgen").rglob("*.py")):
        steps = path.relative_to(ROOT / "batchgen").with_suffix("").parts
        files[".".join(steps[:-1] if steps[-1] == "__init__" else steps)] = path
    return files


def layer_of(module: str) -> str:
    best, length = "", -1
    for layer, (prefixes, _) in LAYERS.items():
        for prefix in prefixes:
            fits = module == prefix or module.startswith(prefix + ".")
            if fits and len(prefix) > length:
                best, length = layer, len(prefix)
    return best


def imports_of(source: str, top_level_only: bool = False) -> list[tuple[int, str]]:
    """(line, dotted name) of each import; `if TYPE_CHECKING:` is not one."""
    found: list[tuple[int, str]] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.extend((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write it in full"
            found.extend((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return  # only the type checker sees it
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and top_level_only:
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return found


def resolve(name: str, modules: set[str]) -> str | None:
    """`batchgen.data.reader.open_reader` -> `data.reader`; None if it is no module of batchgen."""
    if name != "batchgen" and not name.startswith("batchgen."):
        return None
    steps = name.split(".")[1:]
    while steps and ".".join(steps) not in modules:
        steps.pop()
    return ".".join(steps)


def violations(module: str, source: str, modules: set[str]) -> list[str]:
    layer = layer_of(module)
    allowed = LAYERS[layer][1]
    wrong = []
    for line, name in imports_of(source, top_level_only=layer in FREE_INSIDE_FUNCTIONS):
        target = resolve(name, modules)
        if target is not None:
            other = layer_of(target)
        elif name.split(".")[0] == "batchgen_kernels":
            other = "kernels"
        else:
            other = name.split(".")[0]
            if other in sys.stdlib_module_names:
                continue
        if other != layer and other not in allowed:
            wrong.append(f"batchgen/{module.replace('.', '/')}.py:{line}: layer {layer} may not import {name}")
    return wrong


@pytest.mark.parametrize("module", sorted(module_files()))
def test_a_file_imports_what_its_layer_may(module):
    files = module_files()
    assert violations(module, files[module].read_text(), set(files)) == []


def test_kernels_know_only_tensors():
    for path in sorted((ROOT / "kernels/batchgen_kernels").rglob("*.py")):
        for line, name in imports_of(path.read_text()):
            package = name.split(".")[0]
            fine = package in KERNELS_MAY or package == "batchgen_kernels" or package in sys.stdlib_module_names
            assert fine, f"{path.relative_to(ROOT)}:{line}: a kernel may not import {name}"


@pytest.mark.parametrize(
    ("module", "line", "is_wrong"),
    [
        ("engine.scheduler", "import torch", True),
        ("engine.block_pool", "from batchgen.models import inputs", True),
        ("engine.model_runner", "import torch", False),
        ("models.decoder", "from batchgen.engine import scheduler", True),
        ("plan.order", "def f():\n    import torch", True),
        ("job", "import pyarrow", True),
        ("data.merge", "from batchgen.text import template", True),
        ("data.merge", "import pyarrow.parquet as pq", False),
        ("text.template", "from batchgen import engine", True),
        ("cli", "import torch", True),
        ("cli", "def f():\n    import torch", False),
        ("cli", "from batchgen.runner import run_job", True),
        ("runner", "from batchgen import cli", True),
        ("records", "import torch", True),
    ],
)
def test_the_checker_sees_what_it_should(module, line, is_wrong):
    modules = set(module_files()) | {"cli", "runner", "text.template", "engine.scheduler", "models.inputs"}
    assert bool(violations(module, line, modules)) is is_wrong


def import_graph() -> dict[str, set[str]]:
    files = module_files()
    return {
        module: {
            target for _, name in imports_of(path.read_text(), top_level_only=True) if (target := resolve(name, set(files)))
        }
        - {module}
        for module, path in files.items()
    }


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    done: set[str] = set()

    def walk(module: str, trail: list[str]) -> list[str]:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in done:
            return []
        for target in sorted(graph.get(module, ())):
            if cycle := walk(target, [*trail, module]):
                return cycle
        done.add(module)
        return []

    return next((cycle for module in sorted(graph) if (cycle := walk(module, []))), [])


def test_no_cycles():
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert find_cycle(import_graph()) == []


HEAVY = ["torch", "transformers", "datasets", "pandas", "triton"]


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import batchgen.job", [*HEAVY, "pyarrow", "numpy"]),
        ("import batchgen.cli", HEAVY),
        ("import batchgen.data.status", [*HEAVY, "pyarrow"]),
        ("import batchgen.cluster.status, batchgen.cluster.submit", HEAVY),
        ("import batchgen.data.merge, batchgen.data.writer", ["torch", "transformers", "datasets"]),
        ("import batchgen.engine.scheduler", HEAVY),
        ("import batchgen.engine.block_pool", HEAVY),
    ],
)
def test_what_must_start_fast_loads_nothing_heavy(statement, forbidden):
    code = f"import sys; {statement}; print([name for name in {forbidden} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", f"{statement} loads {done.stdout}"
