"""Tiny random models of the architectures that sparse inference supports."""

from typing import Any

import torch
import transformers

from joma.common.quiet import quietly
from tests.inference.models import CONFIGS

VOCABULARY, WIDTH, NEURONS, LAYERS = 97, 32, 48, 3


def tiny(name: str, seed: int = 0) -> Any:
    """Return a model in evaluation mode, every parameter of it random."""
    config = CONFIGS[name]()
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, 0, None
    with torch.random.fork_rng(devices=[]), quietly():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model.eval().requires_grad_(False)


def tokens(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    """Return random tokens, none of them padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (rows, length), generator=generator)
