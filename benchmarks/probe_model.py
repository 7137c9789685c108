"""All default probes of a model on a text against its plain forward passes, in one process.

    python -m benchmarks.probe_model MODEL [--windows 20] [--window 512] [--repeats 3] [--json]

Both read the same windows, one after the other in turns; times are the shortest of several. Then
attention entropies are compared with those of eager attention written out, on the first window.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from joma.data.text import read_text, windows
from joma.models.loading import load
from joma.probes import probe


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("model")
    arguments.add_argument("--windows", type=int, default=20)
    arguments.add_argument("--window", type=int, default=512)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    loaded = load(given.model)
    length = min(given.window, loaded.context or given.window)
    tokens = loaded.encode(read_text("embedded")[: 40 * length * given.windows])
    shown = windows(tokens, length, given.windows)

    def plain() -> None:
        with torch.inference_mode():
            for window in shown.split(max(1, 2048 // length)):
                loaded.model(window, use_cache=False)

    def probed() -> None:
        probe(loaded.model, shown, architecture=loaded.architecture)

    plain()
    pairs = [(seconds(plain), seconds(probed)) for _ in range(given.repeats)]
    forward, both = (min(times) for times in zip(*pairs, strict=True))
    result = {
        "windows": len(shown),
        "tokens each": length,
        "threads": torch.get_num_threads(),
        "forward s": forward,
        "probe s": both,
        "ratio": both / forward,
        "largest difference to eager": difference(loaded, shown[:1]),
    }
    if given.json:
        print(json.dumps(result, indent=1))
    else:
        print(", ".join(f"{name} {value:.4g}" for name, value in result.items()))


def difference(loaded: Any, window: torch.Tensor) -> float:
    """Largest difference of a head's mean entropy to that from the attention matrix."""
    found = {
        (one.layer, one.head): one.value
        for one in probe(loaded.model, window, metrics=["attention_entropy"])
        if one.head is not None
    }
    loaded.model.set_attn_implementation("eager")
    with torch.inference_mode():
        matrices = loaded.model(window, output_attentions=True, use_cache=False).attentions
    return max(
        abs(float(value) - found[layer, head])
        for layer, matrix in enumerate(matrices)
        for head, value in enumerate(torch.special.entr(matrix.double()).sum(-1).mean((0, 2)))
    )


if __name__ == "__main__":
    main()
