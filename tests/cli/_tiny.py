"""Tiny models on disk: a Llama with a tokenizer, and a training of it."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch

WORDS = ("the", "a", "cat", "dog", "runs", "sleeps", "and", "then", "slowly", "home")
TEXT = " ".join(WORDS[(i * i + i // 3) % len(WORDS)] for i in range(400))
LAYERS, HEADS, CONTEXT = 2, 4, 64


def make_tokenizer(folder: Path, words: Iterable[str] = WORDS, above: int = 0) -> None:
    """A tokenizer of whole words, saved as transformers does; its ids begin after `above`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    padding = [f"<{number}>" for number in range(above)]
    vocabulary = {word: number for number, word in enumerate(["<unk>", *padding, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def make_model(folder: Path, *, tokenizer: bool = True, seed: int = 0) -> Path:
    """A Llama of two layers whose attention has a shape, in Hugging Face layout."""
    _model(seed).save_pretrained(folder)
    if tokenizer:
        make_tokenizer(folder)
    return folder


def make_series(folder: Path, steps: Iterable[int]) -> Path:
    """Checkpoints of a walk through weights, as a training leaves them."""
    model, generator = _model(0), torch.Generator().manual_seed(1)
    for step in steps:
        model.save_pretrained(folder / f"step{step}")
        make_tokenizer(folder / f"step{step}")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return folder


def _model(seed: int):
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=len(WORDS) + 1,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.4)
    return model
