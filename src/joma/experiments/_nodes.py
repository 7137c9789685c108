"""What trained experiments share: hidden nodes of an ensemble, NCorr's controls, peak memory."""

from typing import Any

import torch
from torch import Tensor

from joma.data import Batch
from joma.probes import held_out, shuffled
from joma.train import Ensemble


def pooled_nodes(ensemble: Ensemble, batch: Batch) -> tuple[list[Tensor], Tensor]:
    """Hidden activations of each layer, max-pooled over the sequence, and the outputs.

    Returns:
        For each layer (E, B, hidden), and (E, B, outputs).
    """
    nodes: dict[int, Tensor] = {}

    def watch(name: str, layer: int, x: Tensor) -> None:
        if name == "hidden":
            nodes[layer] = x.amax(2)

    with ensemble.looking() as model:
        outputs = model(batch.tokens, leading=batch.leading, watch=watch)
    return [nodes[layer] for layer in sorted(nodes)], outputs


def controls(over: str, latents: Tensor, nodes: Tensor, **options: Any) -> dict[str, Tensor]:
    """NCorr's two controls over classes or samples, by the names they have in the metrics."""
    chosen = held_out(latents, nodes, **options)
    return {
        f"held_out_{over}": chosen.mean,
        f"counted_{over}": chosen.counted.double().mean(-1),
        f"shuffled_{over}": shuffled(latents, nodes, **options).mean,
    }


def peak_memory(device: str) -> float | None:
    """The most memory that tensors took on the GPU, in GiB; None on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
