"""One tiny random model of every architecture with a map, alike in nothing a map could confuse."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from joma.common.quiet import quietly

VOCABULARY, WIDTH, HIDDEN, LAYERS, HEADS, CONTEXT = 61, 24, 40, 3, 4, 32

_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GROUPED: dict[str, Any] = {**_SHARED, "num_key_value_heads": 2}
_GEMMA: dict[str, Any] = {**_GROUPED, "head_dim": 8}
_OPT = {name: value for name, value in _SHARED.items() if name != "intermediate_size"}
_OPT |= {"ffn_dim": HIDDEN, "pad_token_id": 1}

CASES: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=WIDTH,
            n_inner=HIDDEN,
            n_layer=LAYERS,
            n_head=HEADS,
            n_positions=CONTEXT,
            bos_token_id=None,
            eos_token_id=None,
        )
    ),
    "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**_SHARED)),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(**_OPT, word_embed_proj_dim=WIDTH)
    ),
    "opt projected": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(**_OPT, word_embed_proj_dim=12, do_layer_norm_before=False)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_GROUPED)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**_GROUPED)),
    "smollm3": lambda: transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**_GROUPED)),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**_SHARED)),
    "gemma": lambda: transformers.GemmaForCausalLM(transformers.GemmaConfig(**_GEMMA)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**_GEMMA, query_pre_attn_scalar=8)
    ),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**_GEMMA, query_pre_attn_scalar=8)
    ),
}


def tiny(name: str, seed: int = 0) -> Any:
    """The model of a case, in evaluation mode, every parameter of it random."""
    with torch.random.fork_rng(devices=[]), quietly():
        torch.manual_seed(seed)
        model = CASES[name]().eval()
        with torch.no_grad():
            for parameter in model.parameters():  # what starts at 0 or 1 would hide a mistake
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def tokens(batch: int = 2, length: int = 7, seed: int = 1) -> torch.Tensor:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (batch, length), generator=generator)
