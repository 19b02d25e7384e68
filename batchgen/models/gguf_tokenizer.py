"""The tokenizer inside a GGUF file -> tokenizer.json, tokenizer_config.json and chat_template.jinja.

A GGUF file stores vocabulary and merges, but of the pre-tokenizer only a name; each known name is one row here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from batchgen.errors import ModelError

QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    # Each digit alone. transformers' own GGUF conversion leaves this out, and then differs on whitespace before a digit
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


PRE_TOKENIZERS: dict[str, Any] = {  # tokenizer.ggml.pre -> how the text is cut before byte-pair merging
    "gpt-2": _gpt2,
    "smollm": _digits_then_gpt2,
    "starcoder": _digits_then_gpt2,
    "refact": _digits_then_gpt2,
    "qwen2": lambda: _split(QWEN2),
    "llama-bpe": lambda: _split(LLAMA3),
}


def write_tokenizer(path: Path, metadata: dict[str, Any], folder: Path) -> None:
    """Write the tokenizer files; ModelError that names a tokenizer model or pre-tokenizer which is not known."""

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    if get("model") != "gpt2":
        raise ModelError(f"{path}: tokenizer model {get('model')!r} is not supported; there is gpt2 (byte-level BPE)")
    pre = get("pre")
    if pre not in PRE_TOKENIZERS:
        said = "is missing (an old file, whose tokens would be a guess)" if pre is None else f"{pre!r} is not supported"
        raise ModelError(f"{path}: tokenizer.ggml.pre {said}; there are {', '.join(PRE_TOKENIZERS)}")
    tokens, types = get("tokens"), get("token_type") or []
    merges = [tuple(merge.split(" ")) for merge in get("merges") or []]
    bpe = models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=pre == "llama-bpe")
    tokenizer = Tokenizer(bpe)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    for i, kind in enumerate(types):  # in the order of their ids
        if kind in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(tokens[i], special=kind == CONTROL, normalized=False)])
    bos = get("bos_token_id")
    add_bos = bool(get("add_bos_token", pre == "llama-bpe")) and bos is not None
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A $B", special_tokens=[(tokens[bos], bos)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    eos, unk = get("eos_token_id"), get("unknown_token_id")
    ids = {"bos": bos, "eos": eos, "unk": unk, "pad": get("padding_token_id", eos)}
    config: dict[str, Any] = {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "add_bos_token": add_bos}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), "utf-8")
    template = metadata.get("tokenizer.chat_template")
    if template:
        (folder / "chat_template.jinja").write_text(template, "utf-8")
