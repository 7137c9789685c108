"""One tiny random model of every architecture with a map, alike in nothing a map could confuse."""

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from joma.common.quiet import quietly

VOCABULARY, WIDTH, HIDDEN, LAYERS, HEADS, CONTEXT = 61, 24, 40, 3, 4, 32

_SIZES = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "n_embd"), WIDTH),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head"), HEADS),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), CONTEXT),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    "num_key_value_heads": 2,
    "head_dim": WIDTH // HEADS,
}
_WIDE = {"head_dim": 8}

CASES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("gpt2", "gpt_neox", "llama", "mistral", "smollm3", "bert")},
    "opt": {"pad_token_id": 1, "word_embed_proj_dim": WIDTH},
    "opt projected": {
        "pad_token_id": 1,
        "word_embed_proj_dim": 12,
        "do_layer_norm_before": False,
    },
    "gemma": _WIDE,
    "gemma2": {**_WIDE, "query_pre_attn_scalar": 8},
    "gemma3": {**_WIDE, "query_pre_attn_scalar": 8},
}
"""What each sets on top of the sizes."""


def tiny(name: str, seed: int = 0) -> Any:
    """The model of a case, in evaluation mode, every parameter of it random."""
    model_type = "gemma3_text" if name == "gemma3" else name.split()[0]
    auto = (
        transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    )
    with torch.random.fork_rng(devices=[]), quietly():
        torch.manual_seed(seed)
        default = transformers.AutoConfig.for_model(model_type).to_dict()
        sizes = {key: size for key, size in _SIZES.items() if key in default}
        config = transformers.AutoConfig.for_model(model_type, **(sizes | CASES[name]))
        model = auto.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # what starts at 0 or 1 would hide a mistake
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def tokens(batch: int = 2, length: int = 7, seed: int = 1) -> torch.Tensor:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (batch, length), generator=generator)


def word_tokenizer(words: list[str], template: str = "", **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of words, the first of which stands for all others.

    Args:
        words: The vocabulary.
        template: What it adds to a text, as "<s> $A".
        special: Names of special tokens, such as `bos_token`.
    """
    fast = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, words[0]))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    if template:
        added = [(word, words.index(word)) for word in template.split() if word != "$A"]
        fast.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=template, pair=f"{template} $B", special_tokens=added
        )
    return PreTrainedTokenizerFast(tokenizer_object=fast, unk_token=words[0], **special)
