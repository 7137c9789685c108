"""A step of the language models of Fig. 6 and 8, as an ensemble and as a plain loop, in one run.

    python -m benchmarks.language [--depths 1,2,5,10] [--steps 200] [--json]

Each group is what `joma reproduce fig6` trains together: 3 networks of 1, 2 and 10 layers, 21 of 5
layers, over 28,782 words, 20 streams of 35. The peer is one network of `nn.TransformerEncoder`,
trained by a loop as one writes it (torch's Adam, clipping, no graph). The text is random words,
which costs the same. Needs a GPU.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from joma.models import LanguageConfig, LanguageModel
from joma.optim import StackedAdam
from joma.train import Ensemble

WORDS, STREAMS, WINDOW, BATCHES = 28_782, 20, 35, 2_928
MEMBERS = {1: 3, 2: 3, 5: 21, 10: 3}
UPDATES = 20 * (BATCHES + 1)


def timed(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def ensemble(depth: int, text: Tensor) -> Ensemble:
    """The networks of a group."""
    model = LanguageModel(LanguageConfig(WORDS, depth), range(MEMBERS[depth]), device="cuda")
    places = torch.arange(WINDOW + 1, device="cuda")
    weights = torch.full((STREAMS, WINDOW), 1 / (STREAMS * WINDOW), device="cuda")

    def loss(model: LanguageModel, window: Tensor, step: Tensor) -> Tensor:
        return model.losses(window[:, :-1], window[:, 1:], weights_BT=weights, step=step)

    return Ensemble(
        model,
        StackedAdam(model.named_parameters(), 1e-4, clip=0.5),
        lambda step: text.index_select(1, places + WINDOW * (step % BATCHES)),
        loss=loss,
        precision="bfloat16",
        restart_every=BATCHES + 1,
    )


class Plain(nn.Module):
    """One network, as one writes it."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(200, 1, 200, dropout=0.2, batch_first=True)
        self.embedding = nn.Embedding(WORDS, 200)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.drop, self.output = nn.Dropout(0.2), nn.Linear(200, WORDS)
        waves = torch.randn(WINDOW, 200)
        self.register_buffer("waves", waves)
        mask = nn.Transformer.generate_square_subsequent_mask(WINDOW)
        self.register_buffer("mask", mask)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next word."""
        x = self.drop(self.embedding(tokens) * math.sqrt(200) + self.waves)
        return self.output(self.encoder(x, mask=self.mask))


def plain_loop(depth: int, text: Tensor, steps: int) -> float:
    """Milliseconds a step of one network."""
    model = Plain(depth).cuda()
    adam = torch.optim.Adam(model.parameters(), 1e-4)

    def advance(count: int) -> None:
        for step in range(count):
            window = text[:, WINDOW * step : WINDOW * (step + 1) + 1]
            logits = model(window[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
            adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            adam.step()
            loss.item()

    advance(20)
    return timed(lambda: advance(steps)) / steps * 1e3


def grouped(depth: int, text: Tensor, steps: int) -> dict[str, float]:
    """Milliseconds a step of all networks of a group, and what else it takes."""
    torch.cuda.reset_peak_memory_stats()
    networks = ensemble(depth, text)
    capture = timed(lambda: networks.advance(20))
    networks.losses()
    seconds, rounds = 0.0, max(1, steps // 100)
    for _ in range(rounds):
        seconds += timed(lambda: networks.advance(100))
        networks.losses()
    return {
        "ensemble ms": seconds / rounds * 10,
        "capture s": capture,
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30,
    }


def measure(depth: int, steps: int) -> dict[str, Any]:
    """Both sides of one depth."""
    text = torch.randint(WORDS, (STREAMS, WINDOW * BATCHES + 1), device="cuda")
    ours, members = grouped(depth, text, steps), MEMBERS[depth]
    torch.cuda.empty_cache()
    peer = plain_loop(depth, text, min(steps, 100))
    return {
        "layers": depth,
        "networks": members,
        "plain, one network ms": peer,
        "times faster": peer * members / ours["ensemble ms"],
        "whole training min": ours["ensemble ms"] * UPDATES / 60e3,
        **ours,
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--depths", default="1,2,5,10")
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    rows = []
    for depth in map(int, given.depths.split(",")):
        rows.append(measure(depth, given.steps))
        if not given.json:
            shown = (
                f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()
            )
            print(", ".join(shown), flush=True)
    if given.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
