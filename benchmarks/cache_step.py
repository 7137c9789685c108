"""One decoding step with a small cache next to one with a full cache, in one command.

    python -m benchmarks.cache_step [--context 32768] [--batch 1 16] [--budget 0.1] [--json]

A model of 24 layers, 2048 wide, 16 heads of 128, in bfloat16 with random weights. On a GPU every
side that can be is one CUDA graph (transformers' DynamicCache changes its shapes and cannot). The
sides of a whole step are timed one after the other, since two full caches do not fit into memory;
those of one layer in turn. Caches are filled with random keys instead of reading the context. On
a machine without a GPU, smaller sizes by default and no graphs.

Prints tokens per second, cache bytes next to the formula, and the peak; then, for one layer,
heavy-hitter's attention with its scores and eviction over `scaled_dot_product_attention` on as many
keys.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from joma.inference import HeavyHitter, Policy, Streaming, cache, cache_bytes
from joma.kernels.heavy_hitter import heavy_hitter_step

ROUNDS = 7
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def build(layers: int, width: int, heads: int) -> Any:
    """Return a model with random weights."""
    config = LlamaConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=4 * width,
        vocab_size=32_000,
        max_position_embeddings=2**20,
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model: Any = LlamaForCausalLM(config)
    return model.to(torch.bfloat16 if GPU else torch.float32).eval()


def captured(step: Callable[[], Any]) -> Callable[[], Any]:
    """Return a step as a CUDA graph; without a GPU, the step."""
    if not GPU:
        step()
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def milliseconds(steps: dict[str, Callable[[], Any]], count: int) -> dict[str, float]:
    """Return the median time of each step, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            step()
            if GPU:
                torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(count):
                step()
            if GPU:
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - began) / count * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def filled(model: Any, kv: Any, batch: int, context: int) -> None:
    """Fill a cache of joma as if `context` tokens had been read."""
    ids = torch.randint(0, 32_000, (batch, 2), device=DEVICE)
    model(ids, past_key_values=kv)
    for layer in kv.layers:
        store, budget = layer.store, layer.policy.budget
        extra = budget + 1 - store.slots
        shape = (*store.keys.shape[:2], extra, store.keys.shape[-1])
        keys, values = (torch.randn(shape, device=DEVICE, dtype=store.keys.dtype) for _ in "kv")
        first = torch.arange(2, budget // 2, device=DEVICE)
        last = torch.arange(context - extra + len(first), context, device=DEVICE)
        store.add(keys, values, torch.cat((first, last)).expand(batch, -1))
        if store.received is not None:
            store.received.uniform_()
        store.seen.fill_(context)
        layer.count = context
        store.shrink(layer.policy, layer.kind.index)


def stepper(model: Any, kv: Any, batch: int, at: int) -> Callable[[], Any]:
    """Return a function that reads one token of each row."""
    ids = torch.zeros(batch, 1, dtype=torch.int64, device=DEVICE)
    place = torch.full((batch, 1), at, device=DEVICE)
    return lambda: model(ids, past_key_values=kv, position_ids=place).logits


def own_bytes(kv: Any) -> int:
    """Return the bytes of the keys and values of transformers' caches."""
    return sum(it.nbytes for layer in kv.layers for it in (layer.keys, layer.values))


def whole(model: Any, batch: int, context: int, budget: int, count: int) -> list[dict[str, Any]]:
    """Return the speed and the bytes of a step of the whole model with each cache."""
    sides: list[Policy | str] = [
        "full, growing",
        "full, preallocated",
        Streaming(budget - 4, 4),
        HeavyHitter(budget // 2, budget // 2),
    ]
    return [one_side(model, it, batch, context, count) for it in sides]


@torch.no_grad()
def one_side(
    model: Any, side: Policy | str, batch: int, context: int, count: int
) -> dict[str, Any]:
    """Return the speed and the bytes of a step with one cache.

    The cache is freed on return: steps and graphs hold it, and a full one leaves no room for
    another.
    """
    if GPU:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    formula = None
    if isinstance(side, str):
        name = side
        kv: Any = _full(model, name, batch, context, (count + 1) * ROUNDS + 16)
        step = stepper(model, kv, batch, context)
        run = step if name.endswith("growing") else captured(step)
        found = milliseconds({name: run}, count)[name]
        size = own_bytes(kv)
    else:
        name = side.name
        with cache(model, side) as kv:
            filled(model, kv, batch, context)
            step = captured(stepper(model, kv, batch, context))
            found = milliseconds({name: step}, count)[name]
            size = kv.nbytes
        formula = cache_bytes(model, side, tokens=context, batch=batch)
    return {
        "cache": name,
        "batch": batch,
        "ms": found,
        "tokens_per_s": batch * 1e3 / found,
        "cache_bytes": size,
        "formula_bytes": formula,
        "peak_bytes": torch.cuda.max_memory_allocated() if GPU else None,
    }


def _full(model: Any, name: str, batch: int, context: int, room: int) -> Any:
    config = model.config
    if name.endswith("preallocated"):
        kv: Any = StaticCache(config=config, max_cache_len=context + room)
        model(torch.zeros(batch, 1, dtype=torch.int64, device=DEVICE), past_key_values=kv)
        for layer in kv.layers:
            layer.keys.normal_()
            layer.values.normal_()
            layer.cumulative_length.fill_(context)
        return kv
    kv = DynamicCache(config=config)
    shape = (batch, config.num_key_value_heads, context, config.head_dim)
    for index in range(config.num_hidden_layers):
        keys, values = (torch.randn(shape, device=DEVICE, dtype=model.dtype) for _ in "kv")
        kv.update(keys, values, index)
    return kv


@torch.no_grad()
def one_layer(model: Any, batch: int, budget: int, count: int) -> dict[str, Any]:
    """Return heavy-hitter's attention, scores and eviction over attention on as many keys."""
    config = model.config
    heads, size = config.num_attention_heads, config.head_dim

    def drawn(tokens: int) -> Tensor:
        return torch.randn(batch, heads, tokens, size, device=DEVICE, dtype=model.dtype)

    query, key, value, keys, values = (drawn(it) for it in (1, 1, 1, budget + 1, budget + 1))
    position = torch.arange(budget + 1, dtype=torch.int32, device=DEVICE)
    store = {
        "keys": keys.clone(),
        "values": values.clone(),
        "position": position.expand(batch, heads, -1).contiguous(),
        "seen": torch.full((batch,), 10 * budget, device=DEVICE),
        "received": torch.rand(batch, heads, budget + 1, device=DEVICE),
        "empty": torch.zeros(batch, heads, dtype=torch.int64, device=DEVICE),
    }
    how = {"scale": size**-0.5, "recent": budget // 2}
    steps = {
        "heavy": captured(lambda: heavy_hitter_step(query, key, value, None, **store, **how)),
        "sdpa": captured(lambda: scaled_dot_product_attention(query, keys, values)),
    }
    found = milliseconds(steps, count)
    return {"batch": batch, "keys": budget, **found, "ratio": found["heavy"] / found["sdpa"]}


def main() -> None:
    """Time everything and print it."""
    parser = argparse.ArgumentParser(description="One decoding step with small and full caches")
    parser.add_argument("--layers", type=int, default=24 if GPU else 4)
    parser.add_argument("--width", type=int, default=2048 if GPU else 512)
    parser.add_argument("--heads", type=int, default=16 if GPU else 4)
    parser.add_argument("--context", type=int, default=32_768 if GPU else 4096)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16] if GPU else [1, 4])
    parser.add_argument("--budget", type=float, default=0.1)
    parser.add_argument("--count", type=int, default=20 if GPU else 4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model = build(options.layers, options.width, options.heads)
    budget = 2 * round(options.budget * options.context / 2)
    rows, layers = [], []
    for batch in options.batch:
        rows += whole(model, batch, options.context, budget, options.count)
        layers.append(one_layer(model, batch, budget, 5 * options.count))
    if options.json:
        print(json.dumps({"device": DEVICE, "steps": rows, "one_layer": layers}, indent=1))
        return
    name = torch.cuda.get_device_name() if GPU else "CPU, no graphs"
    print(f"{name}, context {options.context}, budget {budget} keys, {torch.__version__}")
    for row in rows:
        formula = "" if row["formula_bytes"] is None else f" (formula {row['formula_bytes']})"
        peak = "" if row["peak_bytes"] is None else f", peak {row['peak_bytes'] / 2**30:.1f} GiB"
        print(
            f"batch {row['batch']:>3} {row['cache']:<20} {row['ms']:8.2f} ms "
            f"{row['tokens_per_s']:9.1f} tokens/s, cache {row['cache_bytes']} B{formula}{peak}"
        )
    for row in layers:
        print(
            f"batch {row['batch']:>3}, one layer, {row['keys']} keys: heavy-hitter "
            f"{row['heavy']:.3f} ms, attention alone {row['sdpa']:.3f} ms: {row['ratio']:.2f} ×"
        )


if __name__ == "__main__":
    main()
