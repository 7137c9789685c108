"""Training steps on the CPU, and what torch's profiler sees them allocate.

Used by `python -m benchmarks.memory --cpu`. The profiler hears of every allocation from the
allocator itself, those inside an operation included.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

STEPS = 2


def measure_on_cpu(
    model: nn.Module, make_optimizer: Callable[[], torch.optim.Optimizer], batch: int, window: int
) -> int:
    """Return the most bytes that two training steps allocate, weights and buffers included.

    Args:
        model: A model with numbers, on the CPU.
        make_optimizer: Makes the optimizer.
        batch: Number of sequences.
        window: Length of a sequence.
    """
    optimizer = make_optimizer()

    def train() -> None:
        for _ in range(STEPS):
            tokens = torch.randint(model.config.vocab_size, (batch, window))  # type: ignore[union-attr,arg-type]
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()

    return profiled_peak(train) + sum(one.nbytes for one in (*model.parameters(), *model.buffers()))


def profiled_peak(work: Callable[[], Any]) -> int:
    """Return the most bytes that are allocated at once while something runs.

    Args:
        work: What to run.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    profiler: Any = recorded.profiler
    events = [one for one in profiler.kineto_results.events() if one.name() == "[memory]"]
    now = peak = 0
    for one in sorted(events, key=lambda event: event.start_ns()):
        now += one.nbytes()
        peak = max(peak, now)
    return peak
