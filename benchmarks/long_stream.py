"""A long stream through a model: does the memory stay, and does quality depend on the place?

    python -m benchmarks.long_stream MODEL [--tokens 100000] [--json] [--threads 1]

First the model writes a text of its own with `Streaming`, token by token; the bytes of the cache
and the memory of the process are noted. Then a passage of 10,000 tokens of that text is read after
1,000 other tokens and after 90,000, in float32 and bfloat16, with sinks and with a window alone.
With positions in the cache the passage's last logits would be the same at both places, if numbers
had infinitely many digits: what differs is rounding.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from joma.inference import Policy, Streaming, Window, cache
from joma.models import load

SINKS, WINDOW = 4, 252
EARLY, CHUNK = 1_000, 512


def resident() -> float:
    """Return the memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def write(model: Any, first: list[int], count: int, *, policy: Policy) -> tuple[Tensor, list[dict]]:
    """Return a text the model draws, and what was noted while it was written."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.empty(count, dtype=torch.int64)  # before the first note: the ids are not the cache
    ids[: len(first)] = torch.tensor(first)
    notes: list[dict] = []
    began = time.perf_counter()
    with torch.inference_mode(), cache(model, policy) as kv:
        logits = model(ids[None, : len(first)], past_key_values=kv).logits[0, -1]
        for at in range(len(first), count):
            ids[at] = torch.multinomial(logits.softmax(-1), 1, generator=generator)[0]
            logits = model(ids[None, at : at + 1], past_key_values=kv).logits[0, -1]
            if at % 5000 == 0 or at == count - 1:
                took = time.perf_counter() - began
                notes.append(
                    {"token": at, "cache": kv.nbytes, "resident_mb": resident(), "s": took}
                )
                print(f"{at:>8} cache {kv.nbytes} B, {resident():.1f} MB", file=sys.stderr)
    return ids, notes


def read(model: Any, ids: Tensor, passage: int, policy: Policy) -> tuple[float, Tensor]:
    """Return the loss over the last `passage` tokens of a text, and the last logits."""
    losses: list[Tensor] = []
    with torch.inference_mode(), cache(model, policy) as kv:
        logits = torch.empty(0)
        for part in ids.split(CHUNK):
            at = kv.seen
            logits = model(part[None], past_key_values=kv).logits[0].float()
            target = ids[at + 1 : at + 1 + len(part)]
            found = torch.nn.functional.cross_entropy(
                logits[: len(target)], target, reduction="none"
            )
            losses.append(found)
    return float(torch.cat(losses)[-passage:].mean()), logits[-1]


def places(model: Any, ids: Tensor, passage: int) -> list[dict]:
    """Return the loss of a passage early and late in a stream."""
    rows: list[dict] = []
    text, filler = ids[-passage:], ids[:-passage]
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        for policy in (Streaming(WINDOW, SINKS), Window(SINKS + WINDOW)):
            early, first = read(model, torch.cat((filler[:EARLY], text)), passage, policy)
            late, last = read(model, ids, passage, policy)
            row = {
                "policy": policy.spec,
                "dtype": str(dtype).removeprefix("torch."),
                "early_nats": early,
                "late_nats": late,
                "relative": late / early - 1,
                "largest_logit_difference": float((first - last).abs().max()),
                "largest_logit": float(first.abs().max()),
            }
            rows.append(row)
            print(row, file=sys.stderr)
    model.to(torch.float32)
    return rows


def main() -> None:
    """Write a text, place a passage, print what was found."""
    parser = argparse.ArgumentParser(description="A long stream through a model")
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--passage", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load(options.model)
    model: Any = loaded.model
    first = loaded.encode("Once upon a time", special=True)
    ids, notes = write(model, first, options.tokens, policy=Streaming(WINDOW, SINKS))
    rows = places(model, ids, options.passage)
    if options.json:
        print(json.dumps({"writing": notes, "places": rows}, indent=1))
        return
    settled = next(it for it in notes if it["token"] >= min(5000, options.tokens - 1))
    end = notes[-1]
    print(f"cache: {settled['cache']} B at token {settled['token']}, {end['cache']} B at the end")
    print(
        f"memory of the process since then: {end['resident_mb'] - settled['resident_mb']:+.2f} MB"
    )
    print(f"{options.tokens / end['s']:.0f} tokens/s on {options.threads} thread(s)")
    for row in rows:
        print(
            f"{row['policy']:<45} {row['dtype']:<9} {row['early_nats']:.4f} early, "
            f"{row['late_nats']:.4f} late ({row['relative']:+.2%}); logits differ by "
            f"{row['largest_logit_difference']:.2g} of {row['largest_logit']:.3g}"
        )


if __name__ == "__main__":
    main()
