"""Toy models for the whole test suite: small, quick, and sensitive, so that an equality which holds by luck is unlikely.

Weights have std 0.2: at the usual 0.02 greedy output is one token repeated whatever the prompt is, and a broken cache
would pass. Norm weights are not uniform and biases not zero, so leaving one out changes every logit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGES = (("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ġ", "a"), ("e", "r"), ("o", "n"), ("1", "2"))
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def make_toy_tokenizer(folder: Path, *, add_bos: bool = False, chat_template: str | None = CHATML) -> Path:
    """A byte-level BPE tokenizer with a few merges: ids 0-255 are bytes, then merges, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, *("".join(merge) for merge in MERGES)])}
    tokenizer = Tokenizer(models.BPE(vocab, list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    if add_bos:
        bos = SPECIAL_TOKENS[0]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[1],
        pad_token=SPECIAL_TOKENS[2],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return folder


def make_toy_model(
    folder: Path,
    family: str = "llama",
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 272,
    std: float = 0.2,
    seed: int = 0,
    check_sensitivity: bool = True,
    max_shard_size: str = "5GB",
    **config: Any,
) -> Path:
    """Save a random model with its tokenizer as a folder that transformers loads. `config` overrides config fields."""
    assert vocab >= 256 + len(MERGES) + len(SPECIAL_TOKENS), "the tokenizer needs that many ids"
    config_class, model_class = CLASSES[family]
    fields: dict[str, Any] = dict(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=264,
        eos_token_id=265,
        pad_token_id=266,
    )
    if family == "qwen3":
        fields["head_dim"] = hidden // heads
    if family == "mistral":
        fields["sliding_window"] = None
    model = model_class(config_class(**fields | config)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * noise if "norm" in name else 0.5 * noise if "bias" in name else std * noise)
    if check_sensitivity:
        assert_sensitive(model)
    make_toy_tokenizer(folder)
    model.generation_config.eos_token_id = [265, 266]
    model.generation_config.do_sample = False
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def assert_sensitive(model: Any, num_prompts: int = 6) -> None:
    """An early token of the prompt must change the greedy output, and the output must not be one token repeated."""
    prompts = torch.randint(0, 256, (num_prompts, 12), generator=torch.Generator().manual_seed(1))
    altered = prompts.clone()
    altered[:, 2] = (altered[:, 2] + 1) % 256
    with torch.inference_mode():
        outputs = [
            model.generate(p, attention_mask=torch.ones_like(p), max_new_tokens=12, do_sample=False, eos_token_id=None)
            for p in (prompts, altered)
        ]
    outputs = [output[:, 12:] for output in outputs]
    changed = (outputs[0] != outputs[1]).any(1).sum().item()
    assert changed >= num_prompts - 1, f"only {changed} of {num_prompts} outputs depend on an early token: a poor oracle"
    assert outputs[0].unique().numel() > 10, "the greedy output repeats itself: a poor oracle"
