"""Memory that probing the weights of a file takes beyond the imports, for a file made for it, 1 GB.

    python -m benchmarks.low_memory [--dtype float32|bfloat16] [--json]

One Llama block of width 4,096 with an MLP of 16,384 nodes; the largest tensor is a quarter of the
file. What `joma probe --low-memory` does runs in a process of its own, whose largest resident size
is compared with that before it began.
"""

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

WIDTH, HIDDEN = 4096, 16384


def make(folder: Path, dtype: str) -> None:
    """A checkpoint in Hugging Face layout."""
    import torch
    from safetensors.torch import save_file

    shapes = {"model.embed_tokens.weight": (1000, WIDTH)}
    for name in ("q", "k", "v", "o"):
        shapes[f"model.layers.0.self_attn.{name}_proj.weight"] = (WIDTH, WIDTH)
    shapes["model.layers.0.mlp.gate_proj.weight"] = (HIDDEN, WIDTH)
    shapes["model.layers.0.mlp.up_proj.weight"] = (HIDDEN, WIDTH)
    shapes["model.layers.0.mlp.down_proj.weight"] = (WIDTH, HIDDEN)
    dice = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    tensors = {name: torch.empty(shape, dtype=kind) for name, shape in shapes.items()}
    for tensor in tensors.values():
        for rows in tensor.split(256):  # in pieces, for the random numbers are float32
            rows.copy_(torch.randn(rows.shape, generator=dice))
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 1000,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def measure(folder: Path, answer: Any) -> None:
    """Probes the weights and says what that took."""
    import torch

    from joma.models.weight_files import WeightFiles
    from joma.probes import probe_weights, stable_rank

    stable_rank(torch.randn(300, 300), method="lanczos")  # what libraries take once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    files = WeightFiles(folder)
    found = probe_weights(files)
    answer.put(
        {
            "file MB": files.bytes / 1e6,
            "largest tensor MB": max(t.bytes for t in files.tensors.values()) / 1e6,
            "beyond imports MB": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
            * 1024
            / 1e6,
            "weights": len(found),
            "seconds": time.perf_counter() - start,
            "largest bound": max(one.bound / one.value for one in found if one.bound is not None),
        }
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        maker = spawn.Process(target=make, args=(Path(folder), given.dtype))
        maker.start()
        maker.join()
        answer = spawn.Queue()
        child = spawn.Process(target=measure, args=(Path(folder), answer))
        child.start()
        result = answer.get()
        child.join()
    result["times the largest"] = result["beyond imports MB"] / result["largest tensor MB"]
    if given.json:
        print(json.dumps(result, indent=1))
    else:
        print(", ".join(f"{name} {value:.4g}" for name, value in result.items()))


if __name__ == "__main__":
    main()
