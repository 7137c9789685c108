"""`joma train` with everything on, next to loops written by hand of the same model.

    python -m benchmarks.train [--preset neox-wikitext2] [--device cuda] [--rounds 3] [--json]

Timed in turns, in one process: a hand-written eager loop; the same with model and loss compiled;
the same compiled with CUDA graphs (`mode="reduce-overhead"`, on a GPU alone); and `joma train` with
its monitor, validation, exports and checkpoints. Medians of the rounds. Hand-written loops have the
text on the device, fused AdamW and clipping, and nothing else; they are timed warm. `joma train` is
timed from a tenth of its steps on to the end of its last step, so that compiling is left out of
both. On a GPU clocks are those of the wall; on a CPU, which may be shared, tokens are counted per
second of the process, on one thread.

The losses of a compiled training are compared with those of an uncompiled one over the first steps.

Presets: those of `joma train`, and gpt2-124m, which has the size of GPT-2 small. Without WikiText-2
(`JOMA_SHARED`) give `--corpus embedded`: the vocabulary, and so the model, stays as large.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from joma.common.float32 import float32_products
from joma.runs import Run
from joma.train.language import PRESETS, Config, LanguageTraining, Processes, train

GPT2: dict[str, dict[str, Any]] = {
    "model": {
        "type": "gpt2",
        "vocab_size": 50_257,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "data": {"corpus": "wikitext-2", "tokenizer": "basic_english", "window": 1024, "batch": 16},
    "optimizer": {"learning_rate": 6e-4, "warmup": 100, "schedule": "cosine", "final": 0.1},
    "training": {"steps": 1500, "precision": "bfloat16"},
    "checkpoints": {"schedule": "pythia"},
    "validation": {"every": 500, "windows": 64},
    "monitor": {"every": 100},
}
"""The size of GPT-2 small: 124 million parameters."""

WORDS = {"neox-wikitext2": 28_782}
"""Size of the vocabulary where the corpus is another."""

COMPARED = 50
"""Steps whose losses are compared, compiled with uncompiled."""

BEGAN = time.perf_counter()

EAGER, COMPILED, GRAPHS, OURS = "eager", "compiled", "CUDA graphs", "joma train"
LOOPS = (EAGER, COMPILED, GRAPHS)


def sections(preset: str, given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The configuration of a preset on a device."""
    chosen = {
        name: dict(section) for name, section in (PRESETS | {"gpt2-124m": GPT2})[preset].items()
    }
    if given.corpus is not None:
        chosen["data"]["corpus"] = given.corpus
        if preset in WORDS:
            chosen["model"]["vocab_size"] = WORDS[preset]
    if given.device == "cpu":
        chosen["training"]["precision"] = "float32"
    if given.steps is not None:
        chosen["training"]["steps"] = given.steps
        rises = chosen["optimizer"].get("warmup", 0)
        chosen["optimizer"]["warmup"] = min(rises, given.steps)
    chosen["training"]["compile"] = {"true": True, "false": False}.get(given.compile, "auto")
    return chosen


def clock(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


class Loop:
    """A loop as one writes it by hand."""

    def __init__(self, config: Config, device: str, mode: str) -> None:
        plain = {**config.sections(), "monitor": {"off": True}}
        plain["training"]["compile"] = False
        on = Processes(device=torch.device(device))
        trainer = LanguageTraining(Config.of(plain), None, on)
        self.model, data = trainer.model, config.data
        settings: Any = self.model.config
        settings._attn_implementation = "sdpa"  # as transformers has it
        self.tokens = torch.from_numpy(trainer.text.train.astype("int64")).to(device)
        self.batch, self.inside = data.batch, torch.arange(data.window + 1, device=device)
        parameters, section = list(self.model.parameters()), config.optimizer
        decay = [
            {"params": [one for one in parameters if one.ndim >= 2], "weight_decay": 0.1},
            {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            decay, section.learning_rate, betas=(0.9, 0.95), fused=True
        )
        self.clip, self.parameters = section.clip, parameters
        half = config.training.precision == "bfloat16"
        model = self.model

        def loss(windows: Tensor) -> Tensor:
            with torch.autocast(device, torch.bfloat16, enabled=half):
                logits = model(input_ids=windows[:, :-1]).logits
            return functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())

        loss.__code__ = loss.__code__.replace()
        modes = {COMPILED: None, GRAPHS: "reduce-overhead"}
        self.loss: Callable[[Tensor], Tensor] = loss
        if mode in modes:
            self.loss = torch.compile(loss, dynamic=False, mode=modes[mode])
        self.graphs, self.device = mode == GRAPHS, device

    def advance(self, steps: int) -> None:
        """Make steps."""
        last = len(self.tokens) - len(self.inside) + 1
        for _ in range(steps):
            starts = torch.randint(last, (self.batch, 1), device=self.device)
            windows = self.tokens[starts + self.inside]
            if self.graphs:
                torch.compiler.cudagraph_mark_step_begin()
            self.loss(windows).backward()
            nn.utils.clip_grad_norm_(self.parameters, self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()


def ours(config: Config, device: str) -> dict[str, float]:
    """Seconds of a training with everything on, from a tenth of its steps on."""
    steps, seen = config.training.steps, list[tuple[int, float]]()
    first = steps // 10

    def progress(what: str, done: int, total: int) -> None:
        if done >= total or (done >= first and not seen):
            seen.append((done, clock(device)))

    with tempfile.TemporaryDirectory() as folder:
        run = Run.create("train", config.sections(), out=Path(folder) / "run", device=device)
        began = clock(device)
        trained = train(
            config, run, processes=Processes(device=torch.device(device)), progress=progress
        )
        whole = clock(device) - began
    (warm, since), (last, until) = seen[0], seen[-1]
    return {
        "seconds": (until - since) / (last - warm),
        "whole_seconds": whole,
        "monitor_seconds": trained.monitor_seconds,
        "parameters": trained.parameters,
    }


def distance(chosen: dict[str, dict[str, Any]], device: str) -> float:
    """Largest difference of the losses of a compiled training from those of an uncompiled one."""
    losses = []
    for compiled in (False, True):
        training = {**chosen["training"], "compile": compiled}
        config = Config.of({**chosen, "training": training})
        with float32_products("ieee"):
            on = Processes(device=torch.device(device))
            trainer = LanguageTraining(config, None, on)
            made = []
            for step in range(COMPARED):
                made.append(trainer.backward(step))
                trainer.update()
                trainer.drop_gradients()
        losses.append(torch.stack(made).double().cpu())
    return float((losses[0] - losses[1]).abs().max())


def measure(preset: str, given: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of every loop of a preset."""
    chosen = sections(preset, given)
    config, device = Config.of(chosen), given.device
    possible = LOOPS if device == "cuda" else (EAGER, COMPILED)
    kinds = [kind for kind in possible if kind in (given.loop or possible)]
    loops = {kind: Loop(config, device, kind) for kind in kinds}
    for kind, loop in loops.items():
        loop.advance(10)
        say(f"{preset}: {kind} is warm")
    seconds: dict[str, list[float]] = {kind: [] for kind in (*kinds, OURS)}
    rest: list[dict[str, float]] = []
    for _ in range(given.rounds):
        for kind, loop in loops.items():
            began = clock(device)
            loop.advance(given.loop_steps)
            seconds[kind].append((clock(device) - began) / given.loop_steps)
            say(f"{preset}: {kind}, {1e3 * seconds[kind][-1]:.2f} ms a step")
        rest.append(ours(config, device))
        say(f"{preset}: {OURS}, {1e3 * rest[-1]['seconds']:.2f} ms a step")
        seconds[OURS].append(rest[-1]["seconds"])
    tokens = config.data.batch * config.data.window
    speed = {kind: tokens / statistics.median(each) for kind, each in seconds.items()}
    loops.clear()
    return {
        "preset": preset,
        "device": device,
        "parameters": rest[-1]["parameters"],
        "steps": config.training.steps,
        "tokens_per_second": speed,
        "ratios": {kind: speed[OURS] / speed[kind] for kind in kinds},
        "rounds": {kind: [tokens / one for one in each] for kind, each in seconds.items()},
        "monitor_seconds": statistics.median(one["monitor_seconds"] for one in rest),
        "whole_seconds": [one["whole_seconds"] for one in rest],
        "loss_distance": None if given.no_losses else distance(chosen, device),
    }


def say(what: str) -> None:
    """Print how far it is, for those who wait: compiling takes minutes."""
    print(f"[{time.perf_counter() - BEGAN:4.0f} s] {what}", file=sys.stderr, flush=True)


def show(row: dict[str, Any]) -> None:
    """Print one preset."""
    print(f"{row['preset']}, {row['parameters'] / 1e6:.4g}M parameters, {row['steps']} steps")
    for kind, speed in row["tokens_per_second"].items():
        ratio = row["ratios"].get(kind)
        versus = "" if ratio is None else f"   joma train / this {ratio:.2f}"
        print(f"  {kind:12s} {speed:12,.0f} tokens/s{versus}")
    if row["loss_distance"] is not None:
        print(f"  losses, compiled - uncompiled, {COMPARED} steps: {row['loss_distance']:.2g}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    known = [*PRESETS, "gpt2-124m"]
    arguments.add_argument("--preset", action="append", choices=known)
    arguments.add_argument("--device", choices=("cuda", "cpu"))
    arguments.add_argument("--steps", type=int, help="steps of joma train; the preset's")
    arguments.add_argument("--loop-steps", type=int, default=100, help="steps of the other loops")
    arguments.add_argument("--loop", action="append", choices=LOOPS, help="all without it")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--corpus", help="the corpus, if not that of the preset")
    arguments.add_argument("--compile", choices=("auto", "true", "false"), default="auto")
    arguments.add_argument("--no-losses", action="store_true", help="compare no losses")
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    given.device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if given.device == "cpu":
        torch.set_num_threads(1)
    presets = given.preset or (
        ["neox-wikitext2", "gpt2-124m"] if given.device == "cuda" else ["tiny"]
    )
    rows = []
    for preset in presets:
        with float32_products("ieee"):
            rows.append(measure(preset, given))
        if not given.json:
            show(rows[-1])
    if given.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
