"""What a monitor at its default cadence costs a training, and whether the losses stay the same.

    python -m benchmarks.monitor [--device cuda] [--steps 2000] [--plain 2000] [--json]

A GPT-NeoX is trained by a plain loop without a monitor, with one and without again, from the same
weights on the same random tokens. The share of the time is taken twice: from the clocks of whole
trainings, a step of one against a step of the other, and from the time inside `monitor.step`, which
on a quiet machine is the sharper of the two. The plain ones may be shorter; losses are compared as
far as they go. On a GPU the model is that of the preset neox-wikitext2, on a CPU that of small.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from joma import Monitor
from joma.train.language import PRESETS

EVERY = 100
"""Steps between measurements, the default of a monitor."""


def make(device: str) -> tuple[nn.Module, Tensor]:
    """A model and the tokens of 16 batches."""
    preset = PRESETS["neox-wikitext2" if device == "cuda" else "small"]
    data, words = preset["data"], preset["data"].get("vocabulary", 28_782)
    sizes = {name: value for name, value in preset["model"].items() if name != "type"}
    torch.manual_seed(0)
    with torch.device(device):
        model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=words, **sizes))
    return model.train(), torch.randint(words, (16, data["batch"], data["window"])).to(device)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def train(device: str, steps: int, *, watched: bool) -> dict[str, Any]:
    """Losses of a training, the seconds it took, and those inside each call of the monitor."""
    model, tokens = make(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    losses, inside = [], []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        monitor = Monitor(model, optimizer, run=run, every=EVERY) if watched else None

        def advance(step: int) -> None:
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                batch = tokens[step % len(tokens)]
                loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            if monitor is not None:
                if step < 2 or (step + 1) % EVERY < 2:  # where it measures
                    synchronize(device)
                before = time.perf_counter()
                monitor.step(loss)
                inside.append(time.perf_counter() - before)
            optimizer.zero_grad()
            losses.append(loss.detach())

        if monitor is None:
            for step in range(3):  # kernels are chosen and loaded
                advance(step)
            model_0, _ = make(device)
            model.load_state_dict(model_0.state_dict())
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
            losses.clear()
        synchronize(device)
        start = time.perf_counter()
        for step in range(steps):
            advance(step)
        synchronize(device)
        seconds = time.perf_counter() - start
        if monitor is not None:
            monitor.close()
    return {"losses": torch.stack(losses).tolist(), "seconds": seconds, "inside": inside}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--steps", type=int, default=2000)
    arguments.add_argument("--plain", type=int, help="steps without a monitor; default: --steps")
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    short = min(given.plain or given.steps, given.steps)
    plain, watched, again = (
        train(given.device, steps, watched=is_watched)
        for steps, is_watched in ((short, False), (given.steps, True), (short, False))
    )
    least = min(plain["seconds"], again["seconds"]) / short
    inside = watched["inside"]
    usual = statistics.median(inside)
    measured = [(step + 1, seconds) for step, seconds in enumerate(inside) if seconds > 20 * usual]
    outside = watched["seconds"] - sum(inside)
    result = {
        "device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu",
        "steps": given.steps,
        "seconds": watched["seconds"],
        "ms a step, plain": least * 1e3,
        "plain, the other time": max(plain["seconds"], again["seconds"]) / least / short - 1,
        "overhead by the clock": watched["seconds"] / given.steps / least - 1,
        "overhead inside step": sum(inside) / outside,
        "without the first measurement": (sum(inside) - inside[0]) / outside,
        "measurements": len(measured),
        "first measurement s": inside[0],
        "median measurement s": statistics.median(seconds for _, seconds in measured),
        "us of a step without a measurement": usual * 1e6,
        "same losses": plain["losses"] == watched["losses"][:short],
        "same losses without, twice": plain["losses"] == again["losses"],
        "measured at": " ".join(f"{step}: {seconds:.3f} s" for step, seconds in measured),
    }
    if given.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:28s} {value:.4g}" if isinstance(value, float) else f"{name:28s} {value}")


if __name__ == "__main__":
    main()
