"""GGUF files: converted once into a folder in Hugging Face's layout (float32 safetensors, tokenizer, configs) and cached.

The cache is $BATCHGEN_CACHE, else $XDG_CACHE_HOME/batchgen, else ~/.cache/batchgen; a folder in it is named by the file's
sha256. A file whose architecture, quantization or pre-tokenizer is not known exactly is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file

from batchgen.errors import ModelError
from batchgen.models.gguf_tokenizer import write_tokenizer

CONVERTER_VERSION = 1  # part of the cache key: raise it when the output of convert changes
MAX_SHARD_BYTES = 2 << 30
ARCHITECTURES = ("llama", "qwen2", "qwen3")
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """The folder for everything that batchgen computes once."""
    if cache_dir is not None:
        return Path(cache_dir)
    if os.environ.get("BATCHGEN_CACHE"):
        return Path(os.environ["BATCHGEN_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchgen"


def convert_gguf(path: Path, cache_dir: str | Path | None = None) -> Path:
    """The converted folder of a GGUF file, made on the first call. Safe when several processes ask at once."""
    target = cache_root(cache_dir) / "gguf" / f"{sha256_of(path, cache_dir)[:32]}-float32-v{CONVERTER_VERSION}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_suffix(".lock")):
            if target.is_dir():  # another process made it while this one waited
                return target
            for leftover in target.parent.glob(f"{target.name}.tmp-*"):  # of a process that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            # A name of its own and a rename: right even where the file system ignores locks
            aside = target.with_name(f"{target.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
            try:
                convert(path, aside)
                _sync(aside)
                os.replace(aside, target)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    except OSError as e:
        if target.is_dir():
            return target
        raise ModelError(f"{path}: cannot be converted into {target.parent}: {e}; BATCHGEN_CACHE sets another folder") from e
    return target


def sha256_of(path: Path, cache_dir: str | Path | None = None) -> str:
    """The file's sha256, remembered by path, size and modification time so that a large file is read once."""
    stat = path.stat()
    identity = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    note = cache_root(cache_dir) / "gguf" / "sha256" / hashlib.sha256(identity.encode()).hexdigest()[:32]
    if note.is_file() and len(known := note.read_text()) == 64:
        return known
    with path.open("rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        aside = note.with_name(f"{note.name}.{os.getpid()}")
        aside.write_text(digest)
        os.replace(aside, note)
    except OSError:  # a cache that cannot be written only costs the time to hash again
        pass
    return digest


def convert(path: Path, folder: Path) -> None:
    """Write config.json, generation_config.json, the tokenizer and float32 safetensors into the new `folder`."""
    try:
        reader = GGUFReader(path)
    except (ValueError, KeyError, IndexError) as e:
        raise ModelError(f"{path}: not a readable GGUF file: {e}") from e
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(f"{path}: GGUF architecture {arch!r} is not supported; there are {', '.join(ARCHITECTURES)}")
    folder.mkdir(parents=True)
    names = {tensor.name for tensor in reader.tensors}
    config = hf_config(path, arch, metadata, names)
    _dump(folder / "config.json", config)
    token_ids = {key: value for key, value in config.items() if key.endswith("_token_id")}
    _dump(folder / "generation_config.json", token_ids | {"do_sample": False})
    write_tokenizer(path, metadata, folder)
    save_shards(hf_tensors(path, arch, reader, config), folder)


def hf_config(path: Path, arch: str, metadata: dict[str, Any], tensor_names: set[str]) -> dict[str, Any]:
    """config.json of the model; ModelError for a feature that would change its results and is not understood."""

    def need(key: str) -> Any:
        if f"{arch}.{key}" not in metadata:
            raise ModelError(f"{path}: the GGUF key {arch}.{key} is missing")
        return metadata[f"{arch}.{key}"]

    def have(key: str, default: Any = None) -> Any:
        return metadata.get(f"{arch}.{key}", default)

    hidden, heads = need("embedding_length"), need("attention.head_count")
    head_dim = have("attention.key_length", hidden // heads)
    sizes = {head_dim, have("rope.dimension_count", head_dim), have("attention.value_length", head_dim)}
    if have("expert_count", 0) or len(sizes) > 1:
        raise ModelError(f"{path}: experts, partial rotary embedding or value heads of another size are not supported")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": have("rope.freq_base", 10000.0)}
    scaling = have("rope.scaling.type", "none")
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": have("rope.scaling.factor", 1.0)}
    elif scaling != "none":
        raise ModelError(f"{path}: rope scaling {scaling!r} in a GGUF file is not supported; use the model's safetensors")
    window = have("attention.sliding_window")
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    eos = sorted({metadata[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in metadata})
    ids = {"bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"), "eos_token_id": eos or None}
    ids["pad_token_id"] = metadata.get("tokenizer.ggml.padding_token_id", eos[0] if eos else None)
    config = {
        "model_type": "mistral" if arch == "llama" and window else arch,
        "vocab_size": len(tokens),
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": have("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": need("context_length"),
        "hidden_act": "silu",
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "dtype": "float32",
    }
    if arch != "qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensor_names
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensor_names
    if window:
        config |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
    return config | {key: value for key, value in ids.items() if value is not None}


def hf_tensors(path: Path, arch: str, reader: GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face's name, float32 array), tensor by tensor."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        base, _, suffix = tensor.name.rpartition(".")
        part = base.split(".")[-1]
        name = TOP.get(base)
        if name is None and base.startswith("blk.") and base.count(".") == 2 and part in LAYER:
            name = f"model.layers.{base.split('.')[1]}.{LAYER[part]}"
        if name is None:
            raise ModelError(f"{path}: tensor {tensor.name} has no known place in a {arch} model")
        try:
            array = dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as e:
            raise ModelError(f"{path}: tensor {tensor.name}: quantization {tensor.tensor_type.name} is not supported") from e
        if arch == "llama" and part in heads:
            array = unpermute(array, heads[part])
        yield f"{name}.{suffix}", np.ascontiguousarray(array, dtype=np.float32)


def unpermute(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaving of the two rotary halves in each head; rows of a matrix, or a bias. Llama files only."""
    halves = array.reshape(num_heads, array.shape[0] // num_heads // 2, 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def save_shards(tensors: Iterator[tuple[str, np.ndarray]], folder: Path, max_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write safetensors files of about `max_bytes` and their index, holding one shard in memory."""
    weight_map: dict[str, str] = {}
    shard: dict[str, np.ndarray] = {}

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, array in tensors:
        if shard and sum(a.nbytes for a in shard.values()) + array.nbytes > max_bytes:
            flush()
        shard[name] = array
    flush()
    _dump(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _dump(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), "utf-8")


def _sync(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
