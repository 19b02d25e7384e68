"""GGUF files give the logits and token ids of the safetensors model they were made from (bug log G01)."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from batchgen_kernels import select_ops
from model_driver import run_whole
from safetensors.numpy import load_file
from toy import make_toy_model
from transformers import AutoTokenizer

from batchgen.errors import ModelError
from batchgen.models import gguf as reader
from batchgen.models.loader import eos_token_ids, fingerprint, load_decoder, resolve_model

STRINGS = ["a  b", "Café — 123 😊", "1234567", " leading", "the\n\nthin  12\t", "it's <|im_end|> there", "\u0041\u030a 漢字"]
TOKENS = list(range(20, 80, 3))


def permute(array: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's conversion does to the rows of q and k (convert_hf_to_gguf, LlamaModel.permute)."""
    return array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def write_gguf(
    source: Path, path: Path, *, pre: str | None = "gpt-2", edit: Any = None, add_bos: bool | None = None
) -> Path:
    """The toy model as llama.cpp would store it, float32."""
    config = json.loads((source / "config.json").read_text())
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    arch = config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    vocab = tokenizer["model"]["vocab"] | {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = {t["content"] for t in tokenizer["added_tokens"]}
    padding = [f"[PAD{i}]" for i in range(len(tokens), config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + padding)
    writer.add_token_types([3 if t in special else 1 for t in tokens] + [5] * len(padding))
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(264)
    writer.add_eos_token_id(265)
    writer.add_eot_token_id(266)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.add_chat_template((source / "chat_template.jinja").read_text())
    names = {hf: ours for ours, hf in (reader.TOP | reader.LAYER).items()}
    for name, array in load_file(source / "model.safetensors").items():
        base, suffix = name.rsplit(".", 1)
        part = names.get(base) or names[base.split(".", 3)[3]]
        if arch == "llama" and part in ("attn_q", "attn_k"):
            array = permute(array, config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"])
        layer = "" if base in names else f"blk.{base.split('.')[2]}."
        writer.add_tensor(f"{layer}{part}.{suffix}", array)
    if edit:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_logits_and_ids_equal_safetensors(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    source = make_toy_model(tmp_path / "toy", family, check_sensitivity=False, **fields)
    path = write_gguf(source, tmp_path / "toy.gguf")
    files = resolve_model(path, cache_dir=tmp_path / "cache")
    ops = select_ops("torch")
    expected = run_whole(load_decoder(resolve_model(source), "cpu", torch.float32, ops), TOKENS)
    got = run_whole(load_decoder(files, "cpu", torch.float32, ops), TOKENS)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (files.folder, source))
    for text in STRINGS:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    chat = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)
    assert eos_token_ids(files) == {265, 266}
    assert set(fingerprint(files)) >= {"gguf", "config.json", "tokenizer.json"}


def test_digits_are_split_for_smollm(tmp_path: Path) -> None:
    """The toy has a merge of 1 and 2: only the pre-tokenizer keeps them apart."""
    source = make_toy_model(tmp_path / "toy", check_sensitivity=False)
    ids = {}
    for pre in ("gpt-2", "smollm"):
        files = resolve_model(write_gguf(source, tmp_path / f"{pre}.gguf", pre=pre), cache_dir=tmp_path / "cache")
        ids[pre] = AutoTokenizer.from_pretrained(files.folder)("x12")["input_ids"]
    assert len(ids["gpt-2"]) == 2 and len(ids["smollm"]) == 3


def test_bos_flag(tmp_path: Path) -> None:
    source = make_toy_model(tmp_path / "toy", check_sensitivity=False)
    for flag, expected in ((True, 1), (False, 0), (None, 0)):
        path = write_gguf(source, tmp_path / f"{flag}.gguf", add_bos=flag)
        files = resolve_model(path, cache_dir=tmp_path / "cache")
        assert AutoTokenizer.from_pretrained(files.folder)("x")["input_ids"].count(264) == expected


def add_q8_k_tensor(writer: gguf.GGUFWriter) -> None:
    """A type that exists, but that the gguf package cannot dequantize."""
    block = np.zeros((1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_K][1]), np.uint8)
    writer.add_tensor("blk.9.ffn_up.weight", block, raw_dtype=gguf.GGMLQuantizationType.Q8_K)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(pre=None), r"tokenizer\.ggml\.pre is missing .*gpt-2, smollm"),
        (dict(pre="viking"), r"'viking' is not supported"),
        (dict(edit=lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)), "rope scaling 'yarn'"),
        (dict(edit=lambda w: w.add_expert_count(4)), "experts"),
        (dict(edit=lambda w: w.add_tensor("rope_freqs.weight", np.ones(8, np.float32))), r"tensor rope_freqs\.weight"),
        (dict(edit=add_q8_k_tensor), "quantization Q8_K is not supported"),
    ],
    ids=["no-pre", "pre", "yarn", "experts", "rope-freqs", "quantization"],
)
def test_unknown_features_are_refused_by_name(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = make_toy_model(tmp_path / "toy", check_sensitivity=False)
    path = write_gguf(source, tmp_path / "toy.gguf", **options)
    with pytest.raises(ModelError, match=message):
        resolve_model(path, cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache" / "gguf").glob("*float32*tmp*")) == [], "nothing is left behind"


def test_unknown_architecture_and_broken_files(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="'rwkv7' is not supported; there are llama"):
        resolve_model(tmp_path / "a.gguf", cache_dir=tmp_path / "cache")
    (tmp_path / "b.gguf").write_bytes(b"GGUX" + bytes(100))
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        resolve_model(tmp_path / "b.gguf", cache_dir=tmp_path / "cache")


def test_the_cache_is_used_and_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_toy_model(tmp_path / "toy", check_sensitivity=False)
    path = write_gguf(source, tmp_path / "toy.gguf")
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    conversions: list[Path] = []
    convert = reader.convert
    monkeypatch.setattr(reader, "convert", lambda *args: (conversions.append(args[0]), convert(*args)))
    leftover: list[Path] = []

    def resolve() -> None:
        leftover.append(resolve_model(path).folder)

    threads = [threading.Thread(target=resolve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1 and len(set(leftover)) == 1 and len(leftover) == 4
    assert leftover[0].is_relative_to(tmp_path / "cache")
    moved = path.rename(tmp_path / "moved.gguf")  # known by its content, not by its name
    assert resolve_model(moved).folder == leftover[0] and len(conversions) == 1
    write_gguf(make_toy_model(tmp_path / "other", seed=1, check_sensitivity=False), moved)
    assert resolve_model(moved).folder != leftover[0] and len(conversions) == 2


def test_shards_bound_memory(tmp_path: Path) -> None:
    arrays = {f"t{i}": np.full((10, 10), i, np.float32) for i in range(5)}
    reader.save_shards(iter(arrays.items()), tmp_path, max_bytes=900)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert sorted(index) == sorted(arrays) and len(set(index.values())) == 3
    for name, file in index.items():
        assert (load_file(tmp_path / file)[name] == arrays[name]).all()


@pytest.mark.model
def test_smollm2(tmp_path: Path) -> None:
    """The packaged model: digits one by one, a sensible answer, and a second call that converts nothing."""
    files = resolve_model("packaged:smollm2")
    assert files.gguf_sha256 and files.gguf_sha256.startswith("b179c952")
    before = files.weights[0].stat().st_mtime_ns
    assert resolve_model("packaged:smollm2").weights[0].stat().st_mtime_ns == before
    tokenizer = AutoTokenizer.from_pretrained(files.folder)
    pieces = [tokenizer.decode([i]) for i in tokenizer("a  12 345")["input_ids"]]
    assert [p for p in pieces if any(c.isdigit() for c in p)] == ["1", "2", "3", "4", "5"] and pieces[1] == "  "
    assert eos_token_ids(files) == {2}
    decoder = load_decoder(files, "cpu", torch.float32, select_ops("torch"), max_model_len=256)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    answer: list[int] = []
    while len(answer) < 12 and (not answer or answer[-1] != 2):
        answer.append(int(run_whole(decoder, tokens + answer)[-1].argmax()))
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
