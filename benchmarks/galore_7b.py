"""LLaMA-7B trained by GaLore in little memory: losses, peak and states, next to `joma memory`.

    python -m benchmarks.galore_7b [--device cuda|cpu] [--setting NAME ...] [--steps 10] [--json]

The model has bfloat16 weights that are drawn at random, checkpointing, moments in eight bits and
updates during the backward pass. It is trained on bytes of Python's documentation, a new passage
for every sequence. On a GPU the peak is `torch.cuda.max_memory_allocated`. On a CPU it is by how
much the largest resident size of the process grows, which includes what the allocator and libraries
keep. "short" was run on two cores with 24 GiB, with MALLOC_ARENA_MAX=1 and
MALLOC_MMAP_THRESHOLD_=262144 against fragmentation: seven minutes a step.
"""

import argparse
import json
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory import GIB, Case, build, clean, optimizer_of
from joma.data import BYTES, corpus
from joma.optim import GaLoreAdamW
from joma.train.memory import estimate_memory

MODEL = "llama-7b"
RATE, SCALE, GAP = 1e-3, 0.25, 200


@dataclass(frozen=True)
class Setting:
    """A batch, where bases are stored, and the peak that is not to be exceeded, in GiB."""

    batch: int
    window: int
    mark: float
    projector_bits: Any = None

    def case(self, model: str, device: Any) -> Case:
        """Return the configuration for `benchmarks.memory`."""
        given = {"bits": 8, "projector_bits": self.projector_bits, "per_layer": True}
        return Case(model, "galore-adamw", self.batch, self.window, True, device=device, **given)


SETTINGS = {
    "long": Setting(1, 2048, 20.5),
    "long-bases8": Setting(1, 2048, 19.6, 8),
    "batch": Setting(16, 256, 22.8),
    "short": Setting(1, 256, 20.5),
}
DEFAULT = ["long", "long-bases8", "batch"]
"""What is compared with marks; "short" is for a CPU."""


def passages(setting: Setting, steps: int) -> torch.Tensor:
    """Return tokens for every step, (steps, batch, window), none of them twice."""
    text = torch.tensor(BYTES.encode(corpus("embedded").read("train")))
    needed = steps * setting.batch * setting.window
    if needed > len(text):
        raise SystemExit(f"{steps} steps need {needed:,} tokens; the text has {len(text):,}")
    return text[:needed].view(steps, setting.batch, setting.window).long()


def resident() -> int:
    """Return the bytes of the process that are in memory now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def train(case: Case, tokens: torch.Tensor, report: Any = print) -> dict[str, Any]:
    """Train, one step for each batch of tokens, and return losses, seconds, peak and states."""
    before = resident()
    model = build(case)
    report(f"built, {resident() / GIB:.2f} GiB resident")
    optimizer = optimizer_of(case, model)
    assert isinstance(optimizer, GaLoreAdamW)
    for group in optimizer.param_groups:
        group.update(lr=RATE, scale=SCALE, gap=GAP)
    losses, seconds = [], []

    def step(batch: torch.Tensor) -> None:
        start = time.perf_counter()
        batch = batch.to(case.device)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - start)
        done = f"step {len(losses)}: loss {losses[-1]:.4f}, {seconds[-1]:.1f} s"
        report(f"{done}, {resident() / GIB:.2f} GiB resident")

    on_gpu = case.device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for batch in tokens:
        step(batch)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated() if on_gpu else largest - before
    values = (value for state in optimizer.state.values() for value in state.values())
    return {
        "losses": losses,
        "seconds": seconds,
        "peak_gib": peak / GIB,
        "states_gib": sum(one.nbytes for one in values if torch.is_tensor(one) and one.ndim) / GIB,
    }


def compare(case: Case, mark: float, tokens: torch.Tensor, report: Any = print) -> dict[str, Any]:
    """Return what `train` measures, next to what `joma memory` predicts."""
    both = ["adamw", case.optimizer]
    plain, predicted = estimate_memory(case.model, case.setup, case.projection, both)
    adamw = plain.parts["states"] / GIB
    computed = (predicted.parts["states"] + predicted.parts["projectors"]) / GIB
    found = train(case, tokens, report)
    clean()
    return {
        "model": case.model,
        "setting": case.words(),
        "device": case.device,
        "mark_gib": mark,
        "predicted_gib": predicted.total / GIB,
        "computed_states_gib": computed,
        "adamw_states_gib": adamw,
        "states_less": 1 - found["states_gib"] / adamw,
        **found,
    }


def words(row: dict[str, Any]) -> str:
    """Return a result in words."""
    first, last = row["losses"][0], row["losses"][-1]
    return "\n".join(
        (
            f"{row['model']} on {row['device']}, {row['setting']}",
            f"  loss {first:.3f} → {last:.3f} in {len(row['losses'])} steps",
            f"  peak {row['peak_gib']:.3f} GiB (mark {row['mark_gib']}), predicted "
            f"{row['predicted_gib']:.3f} ({row['predicted_gib'] / row['peak_gib'] - 1:+.2%})",
            f"  states {row['states_gib']:.3f} GiB, computed {row['computed_states_gib']:.3f}, "
            f"{row['states_less']:.1%} less than AdamW in bfloat16",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=device)
    parser.add_argument("--setting", nargs="*", choices=tuple(SETTINGS), default=DEFAULT)
    parser.add_argument("--model", default=MODEL, help="a smaller preset, to try the command")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = []
    for name in given.setting:
        setting = SETTINGS[name]
        case, tokens = setting.case(given.model, given.device), passages(setting, given.steps)
        quiet: Any = (lambda line: None) if given.json else (lambda line: print(line, flush=True))
        rows.append(compare(case, setting.mark, tokens, quiet))
        if not given.json:
            print(words(rows[-1]), flush=True)
    if given.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
