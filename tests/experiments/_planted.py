"""A model of one layer whose nodes answer to what was put into them, and a text for it.

The text has topics of three tokens each among fillers; a window has one topic. Whatever the query,
attention goes to the topic's tokens alone. Each node answers to the tokens of one topic that are
attended to, except the first, which answers to two topics that have no token in common.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from joma.models import NO_SPECIAL_TOKENS, Loaded

TOPICS, PER_TOPIC, FILLERS, LENGTH, WINDOWS_EACH = 24, 3, 20, 20, 20
SALIENT = TOPICS * PER_TOPIC
TOKENS = SALIENT + FILLERS
WIDTH = 192
NODES = 120
SUPERPOSED = 0
TWO = (5, 17)
"""The topics of the node that has two."""


class Numbers:
    """A tokenizer whose words are numbers."""

    size = TOKENS
    special_tokens = NO_SPECIAL_TOKENS

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(f" {token}" for token in tokens)


def topic(number: int) -> list[int]:
    return list(range(PER_TOPIC * number, PER_TOPIC * (number + 1)))


def planted() -> Loaded:
    assert WIDTH >= 2 * TOKENS
    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=WIDTH,
        intermediate_size=NODES,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 1e12},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    block: Any = model.model.layers[0]
    for matrix in (*block.self_attn.parameters(), *block.mlp.parameters()):
        matrix.zero_()
    model.model.embed_tokens.weight.copy_(torch.eye(TOKENS, WIDTH))
    slow = WIDTH - 1  # turned least by the positions
    block.self_attn.q_proj.weight[slow, :TOKENS] = 1.0
    block.self_attn.k_proj.weight[slow, :SALIENT] = 1.0
    for token in range(TOKENS):  # what is attended to stands next to the token itself
        block.self_attn.v_proj.weight[TOKENS + token, token] = 1.0
    block.self_attn.o_proj.weight.copy_(torch.eye(WIDTH))
    for node in range(NODES):
        for number in TWO if node == SUPERPOSED else (node % TOPICS,):
            for token in topic(number):
                block.mlp.gate_proj.weight[node, TOKENS + token] = 1.0
                block.mlp.up_proj.weight[node, TOKENS + token] = 1.0
    return Loaded(model, Numbers(), "planted", LENGTH)


def text(seed: int = 0) -> Tensor:
    """Windows in random order, (W, T)."""
    generator = torch.Generator().manual_seed(seed)
    windows = []
    for number in range(TOPICS):
        for _ in range(WINDOWS_EACH):
            window = SALIENT + torch.randint(FILLERS, (LENGTH,), generator=generator)
            places = 1 + torch.randperm(7, generator=generator)[:PER_TOPIC]
            window[places] = torch.tensor(topic(number))
            windows.append(window)
    order = torch.randperm(len(windows), generator=generator)
    return torch.stack(windows)[order]
