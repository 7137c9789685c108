"""`joma memory` against trainings on a GPU: predicted and measured peaks, and sizes of states.

    python -m benchmarks.memory [--states] [--only N ...] [--json]

Each configuration makes three real steps on random tokens. The measured peak is
`torch.cuda.max_memory_allocated`, the largest of the forward pass, the backward pass and the step
of the optimizer; the prediction is made before, on the meta device. With `--states` the states of
GaLore are compared with those of AdamW in bfloat16; without a GPU they are computed alone.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from joma.models import enable_checkpointing
from joma.models.blank import PRESETS, blank_model, preset_config
from joma.optim import AdamW8bit, GaLoreAdamW
from joma.train.memory import (
    OPTIMIZERS,
    ProjectionSettings,
    TrainingSetup,
    estimate_memory,
    parameter_costs,
)

GIB = 2**30
STEPS = 3
TOLERANCE = 0.05


@dataclass(frozen=True)
class Case:
    """A configuration to train."""

    model: str
    optimizer: str
    batch: int
    window: int
    checkpointing: bool = False
    rank: int | None = None
    bits: Literal[8] | None = None
    projector_bits: Literal[8] | None = None
    per_layer: bool = False
    clip: bool = False

    @property
    def projection(self) -> ProjectionSettings:
        """Settings of GaLore, of which LoRA takes the rank."""
        rank = self.rank or PRESETS[self.model].rank
        return ProjectionSettings(
            rank, bits=self.bits, projector_bits=self.projector_bits, per_layer=self.per_layer
        )

    @property
    def setup(self) -> TrainingSetup:
        """How the model is trained."""
        return TrainingSetup(self.batch, self.window, self.checkpointing, clip=self.clip)

    def words(self) -> str:
        """Return the settings in words."""
        more = [f"{self.batch} × {self.window}"]
        more += ["checkpointing"] if self.checkpointing else []
        if self.optimizer in ("galore-adamw", "lora"):
            more.append(f"rank {self.projection.rank}")
        more += ["8 bits"] if self.bits else []
        more += ["bases 8 bits"] if self.projector_bits else []
        more += ["per layer"] if self.per_layer else []
        more += ["clip"] if self.clip else []
        return ", ".join(more)


EIGHT: Any = {"bits": 8, "per_layer": True}
CASES = (
    Case("llama-60m", "adamw", 16, 256),
    Case("llama-60m", "galore-adamw", 1, 2048),
    Case("llama-130m", "sgd", 16, 256),
    Case("llama-130m", "adamw-8bit", 1, 2048),
    Case("llama-350m", "galore-adamw", 16, 256, **EIGHT),
    Case("llama-350m", "adamw", 1, 2048, True),
    Case("llama-350m", "lora", 1, 2048, rank=64),
    Case("llama-1b", "adamw", 16, 256, True),
    Case("llama-1b", "galore-adamw", 1, 2048),
    Case("llama-1b", "galore-adamw", 1, 2048, True, per_layer=True, clip=True),
    Case("llama-1b", "lora", 1, 2048, True, rank=64),
    Case("llama-7b", "sgd", 1, 2048, True),
    Case("llama-7b", "adamw-8bit", 1, 2048, True),
    Case("llama-7b", "galore-adamw", 1, 2048, True, **EIGHT),
    Case("llama-7b", "galore-adamw", 16, 256, True, **EIGHT),
    Case("llama-7b", "galore-adamw", 1, 2048, True, projector_bits=8, **EIGHT),
)
STATES = {
    "bf16": ProjectionSettings(1),
    "8-bit moments": ProjectionSettings(1, bits=8),
    "8-bit moments and bases": ProjectionSettings(1, bits=8, projector_bits=8),
}


def build(name: str, device: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        return AutoModelForCausalLM.from_config(preset_config(name), dtype=torch.bfloat16).train()


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    trained = [one for one in model.parameters() if one.requires_grad]
    if case.optimizer in ("adamw", "lora"):
        return torch.optim.AdamW(trained, 1e-4, fused=True)
    if case.optimizer == "sgd":
        return torch.optim.SGD(trained, 1e-3, momentum=0.9, fused=True)
    if case.optimizer == "adamw-8bit":
        return AdamW8bit(trained, 1e-4)
    wanted = case.projection
    return GaLoreAdamW(
        model,
        1e-4,
        rank=wanted.rank,
        bits=wanted.bits,
        projector_bits=wanted.projector_bits,
        per_layer=wanted.per_layer,
        clip_norm=1.0 if case.clip else None,
        verbose=False,
    )


def measure(case: Case, device: str = "cuda") -> dict[str, Any]:
    """Train and return the peak of each phase, in GiB."""
    torch.manual_seed(0)
    model = build(case.model, device)
    if case.optimizer == "lora":
        import peft

        lora = peft.LoraConfig(r=case.projection.rank, target_modules="all-linear")
        model = peft.get_peft_model(model, lora)  # type: ignore[arg-type]
    if case.checkpointing:
        enable_checkpointing(model)
    optimizer = optimizer_of(case, model)
    peaks = {"forward": 0, "backward": 0, "step": 0}
    losses = []

    def phase(name: str, work: Callable[[], Any]) -> Any:
        torch.cuda.reset_peak_memory_stats()
        result = work()
        torch.cuda.synchronize()
        peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated())
        return result

    for _ in range(STEPS):
        tokens = torch.randint(32000, (case.batch, case.window), device=device)
        given = {"input_ids": tokens, "labels": tokens, "use_cache": False}
        loss = phase("forward", lambda given=given: model(**given).loss)
        phase("backward", loss.backward)
        losses.append(float(loss.detach()))
        del loss
        phase("step", optimizer.step)
        optimizer.zero_grad()
    found = {name: size / GIB for name, size in peaks.items()}
    return {"total_gib": max(found.values()), "peaks_gib": found, "losses": losses}


def clean() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()


def compare(case: Case) -> dict[str, Any]:
    start = time.perf_counter()
    [predicted] = estimate_memory(case.model, case.setup, case.projection, [case.optimizer])
    seconds = time.perf_counter() - start
    clean()
    before = torch.cuda.memory_allocated() / GIB
    measured: dict[str, Any]
    try:
        measured = measure(case)
    except (ImportError, torch.OutOfMemoryError) as error:
        measured = {"error": str(error).splitlines()[0]}
    clean()
    total = predicted.total / GIB
    return {
        "model": case.model,
        "optimizer": case.optimizer,
        "setting": case.words(),
        "predicted_gib": total,
        "parts": {name: size / GIB for name, size in predicted.parts.items()},
        "predicted_peaks_gib": {name: size / GIB for name, size in predicted.peaks.items()},
        "measured": measured,
        "error": total / measured["total_gib"] - 1 if "total_gib" in measured else None,
        "allocated_before_gib": before,
        "prediction_seconds": seconds,
    }


def print_case(one: dict[str, Any]) -> None:
    name = f"{one['model']:<10} {one['optimizer']:<12} {one['setting']:<58}"
    if one["error"] is None:
        print(f"{name} {one['predicted_gib']:7.2f}  not measured: {one['measured']['error']}")
        return
    peaks = " ".join(
        f"{phase} {one['predicted_peaks_gib'][phase]:.2f}/{size:.2f}"
        for phase, size in one["measured"]["peaks_gib"].items()
    )
    total = one["measured"]["total_gib"]
    print(f"{name} {one['predicted_gib']:7.2f} {total:7.2f} {one['error']:+7.1%}   {peaks}")
    sys.stdout.flush()


def computed_states(model: nn.Module, case: Case) -> int:
    costs = parameter_costs(model, case.optimizer, case.projection).values()
    return sum(one.states + one.projectors for one in costs)


def measured_states(case: Case) -> int:
    """Bytes of the state after a step with short sequences."""
    model = build(case.model, "cuda")
    optimizer = optimizer_of(case, model)
    tokens = torch.randint(32000, (1, 64), device="cuda")
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(one.nbytes for one in values if isinstance(one, torch.Tensor) and one.ndim)


def states() -> list[dict[str, Any]]:
    rows = []
    for name, preset in PRESETS.items():
        model = blank_model(name, torch.bfloat16)
        adamw = computed_states(model, Case(name, "adamw", 1, 64))
        for kind, wanted in STATES.items():
            bits, bases = wanted.bits, wanted.projector_bits
            case = Case(name, "galore-adamw", 1, 64, False, preset.rank, bits, bases, True)
            row = {"model": name, "rank": preset.rank, "states": kind, "adamw_gib": adamw / GIB}
            row["computed_gib"] = computed_states(model, case) / GIB
            row["computed_less"] = 1 - row["computed_gib"] / row["adamw_gib"]
            if torch.cuda.is_available():
                row["measured_gib"] = measured_states(case) / GIB
                row["measured_less"] = 1 - row["measured_gib"] / row["adamw_gib"]
                clean()
            rows.append(row)
    return rows


def print_states(rows: list[dict[str, Any]]) -> None:
    print("states of GaLore, bases included, and how much less than AdamW in bf16")
    for row in rows:
        line = f"{row['model']:<10} rank {row['rank']:<5} {row['states']:<24}"
        line += f" AdamW {row['adamw_gib']:7.3f} GiB, computed {row['computed_gib']:7.3f} GiB"
        line += f" ({row['computed_less']:.1%} less)"
        if "measured_gib" in row:
            line += f", measured {row['measured_gib']:7.3f} GiB ({row['measured_less']:.1%} less)"
        print(line)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--states", action="store_true", help="sizes of states alone")
    arguments.add_argument("--only", type=int, nargs="*", help="numbers of configurations, from 0")
    arguments.add_argument("--json", action="store_true", help="print JSON after the tables")
    given = arguments.parse_args()
    answer: dict[str, Any] = {"torch": torch.__version__}
    if given.states:
        answer["states"] = states()
        print_states(answer["states"])
    elif not torch.cuda.is_available():
        sys.exit("measuring needs a GPU; --states works without")
    else:
        print(f"GiB: predicted, measured, error; predicted/measured of each phase ({STEPS} steps)")
        answer["gpu"] = torch.cuda.get_device_name()
        answer["cases"] = []
        for number, case in enumerate(CASES):
            if given.only is None or number in given.only:
                answer["cases"].append(compare(case))
                print_case(answer["cases"][-1])
        errors = [abs(one["error"]) for one in answer["cases"] if one["error"] is not None]
        within = sum(error <= TOLERANCE for error in errors)
        print(f"{within} of {len(errors)} configurations are within {TOLERANCE:.0%}")
    if given.json:
        print(json.dumps(answer, indent=1))


if __name__ == "__main__":
    assert {case.optimizer for case in CASES} == set(OPTIMIZERS)
    main()
