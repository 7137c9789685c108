"""What the tests of both sources do on a GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from joma.data import Batch

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def tensors(batch: Batch) -> list[Tensor]:
    weights = [] if batch.weights is None else [batch.weights]
    return [batch.tokens, batch.labels, *batch.latents, *weights]


def same(a: Batch, b: Batch) -> bool:
    pairs = zip(tensors(a), tensors(b), strict=True)
    return a.leading == b.leading and all(torch.equal(one, other) for one, other in pairs)


def replays(make: Callable[[int | Tensor], Batch]) -> bool:
    """Whether a captured graph makes the batches of steps 0, 1 and 2."""
    step = torch.tensor(0, device="cuda")
    make(step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = make(step)
        step += 1
    good = []
    for number in range(3):
        graph.replay()
        good.append(same(captured, make(number)))
    return all(good)
