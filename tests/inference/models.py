"""Tiny random models of the architectures that caches are tested on."""

from typing import Any

import torch
import transformers

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 97,
}
_LLAMA = {**_SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
_NEOX: dict[str, Any] = {**_SIZES, "rotary_pct": 0.5}
_GEMMA: dict[str, Any] = {
    **_LLAMA,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 8,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**_LLAMA),
    "qwen3": lambda: transformers.Qwen3Config(**_LLAMA),
    "mistral": lambda: transformers.MistralConfig(**_LLAMA, sliding_window=7),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(
        **_NEOX, intermediate_size=48, max_position_embeddings=512
    ),
    "gemma3_text": lambda: transformers.Gemma3TextConfig(**_GEMMA),
    "opt": lambda: transformers.OPTConfig(
        **_SIZES, ffn_dim=48, max_position_embeddings=64, word_embed_proj_dim=32
    ),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=32, n_layer=3, n_head=4, vocab_size=97, n_positions=64
    ),
}


def tiny(name: str, *, attention: str = "sdpa", dtype=torch.float32, sharpness: float = 6.0):
    """Return a tiny model with attention far from uniform."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config._attn_implementation = attention
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, key, None if key == "eos_token_id" else 0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in path and "wte" not in path:
                weight.mul_(sharpness)
    return model
