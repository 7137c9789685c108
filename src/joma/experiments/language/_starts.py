"""The networks as the recorded runs began them: what torch draws after `torch.manual_seed`."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from joma.experiments.language._groups import FIRST_SEED
from joma.models import LanguageModel
from joma.models.language import FIRST_RANGE


def torch_seeds(seed: int, count: int) -> list[int]:
    """Those of the networks of each cell; seed 0 has the recorded ones."""
    return [(FIRST_SEED + seed * count + number) % 2**63 for number in range(count)]


@torch.no_grad()
def begin(model: LanguageModel, seeds: Sequence[int]) -> None:
    """Gives each member the parameters of a network that torch makes from a seed.

    Torch draws on the CPU, whatever the device of the model.

    Args:
        model: whose parameters are written to.
        seeds: one for each member.
    """
    drawn = {seed: _drawn(model, seed) for seed in set(seeds)}
    for member, seed in enumerate(seeds):
        for name, parameter in model.named_parameters():
            parameter[member].copy_(drawn[seed][name])


def _drawn(model: LanguageModel, seed: int) -> dict[str, Tensor]:
    """The parameters of one network by name, drawn in the order of the usual script.

    Embeddings and output weights are drawn twice, the second time as they stay.
    """
    config = model.config
    kind = {"device": "cpu", "dtype": torch.float32}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # that of the CPU alone, as manual_seed does it
        layer = nn.TransformerEncoderLayer(config.width, config.heads, config.hidden, **kind)
        embedding = nn.Embedding(config.vocabulary, config.width, **kind)
        output = nn.Linear(config.width, config.vocabulary, **kind)
        embedding.weight.uniform_(-FIRST_RANGE, FIRST_RANGE)
        output.weight.uniform_(-FIRST_RANGE, FIRST_RANGE)
    weight = torch.zeros(config.width, config.columns, **kind)
    weight[:, : config.vocabulary] = output.weight.T
    block = _block(layer)
    blocks = {
        f"blocks.{number}.{name}": value
        for number in range(config.layers)
        for name, value in block.items()
    }
    return {
        "embedding.weight": embedding.weight,
        **blocks,
        "output.weight": weight,
        "output.bias": torch.zeros(1, config.columns, **kind),
    }


def _block(layer: nn.TransformerEncoderLayer) -> dict[str, Tensor]:
    """Torch's layer by the names of ours, whose matrices are (in, out)."""
    attention = layer.self_attn
    linear = {
        "queries_keys_values": (attention.in_proj_weight, attention.in_proj_bias),
        "projection": (attention.out_proj.weight, attention.out_proj.bias),
        "lower": (layer.linear1.weight, layer.linear1.bias),
        "upper": (layer.linear2.weight, layer.linear2.bias),
    }
    norms = {"norm_attention": layer.norm1, "norm_mlp": layer.norm2}
    return {
        **{f"{name}.weight": weight.T for name, (weight, _) in linear.items()},
        **{f"{name}.bias": bias.view(1, -1) for name, (_, bias) in linear.items()},
        **{f"{name}.weight": norm.weight for name, norm in norms.items()},
        **{f"{name}.bias": norm.bias for name, norm in norms.items()},
    }
