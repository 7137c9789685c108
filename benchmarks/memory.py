"""`joma memory` against trainings: predicted and measured peaks.

    python -m benchmarks.memory [--cpu] [--only N ...] [--json]

Each configuration makes real steps on random tokens. On a GPU the measured peak is
`torch.cuda.max_memory_allocated`, of the forward and backward pass and of the step of the
optimizer; with `--cpu` smaller trainings are measured by torch's profiler against the prediction
for the CPU (one process for each, `--only N`: profiles stay in memory). The prediction is made
before, on the meta device. GaLore chooses its subspaces in every step.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from joma.models import enable_checkpointing
from joma.models.blank import PRESETS, preset_config
from joma.optim import AdamW8bit, GaLoreAdamW
from joma.train.memory import ProjectionSettings, TrainingSetup, estimate_memory

GIB = 2**30
STEPS = 3
TOLERANCE = 0.05
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


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
    dtype: Literal["bf16", "fp32"] = "bf16"
    device: Literal["cuda", "cpu"] = "cuda"

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
        passes = self.batch, self.window, self.checkpointing
        return TrainingSetup(*passes, self.dtype, self.clip, self.device)

    def words(self) -> str:
        """Return the settings in words."""
        more = [f"{self.batch} × {self.window}"]
        more += ["fp32"] if self.dtype == "fp32" else []
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
CPU_CASES = tuple(
    replace(case, device="cpu")
    for case in (
        Case("llama-60m", "adamw", 4, 256, dtype="fp32"),
        Case("llama-60m", "sgd", 4, 256),
        Case("llama-60m", "adamw-8bit", 8, 256),
        Case("llama-60m", "lora", 4, 256, rank=64),
        Case("llama-60m", "galore-adamw", 4, 256),
        Case("llama-60m", "galore-adamw", 1, 256, dtype="fp32", clip=True),
        Case("llama-60m", "galore-adamw", 1, 128, projector_bits=8, clip=True, **EIGHT),
        Case("llama-130m", "adamw", 4, 256, True),
        Case("llama-130m", "sgd", 1, 128, dtype="fp32"),
        Case("llama-130m", "adamw-8bit", 1, 128, dtype="fp32"),
        Case("llama-130m", "galore-adamw", 4, 128, dtype="fp32"),
        Case("llama-130m", "galore-adamw", 4, 256, True, **EIGHT),
        Case("llama-350m", "adamw", 1, 128),
        Case("llama-350m", "lora", 1, 256, rank=64, dtype="fp32"),
        Case("llama-350m", "galore-adamw", 1, 128),
        Case("llama-350m", "galore-adamw", 1, 256, True, projector_bits=8, **EIGHT),
        Case("llama-1b", "lora", 1, 128, True, rank=64),
    )
)


def build(case: Case) -> nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    dtype = DTYPES[case.dtype]
    with torch.device(case.device):
        model = AutoModelForCausalLM.from_config(preset_config(case.model), dtype=dtype).train()
    return prepared(case, model)


def prepared(case: Case, model: nn.Module) -> nn.Module:
    """Return the model with LoRA, if that is to be trained, and with checkpointing."""
    if case.optimizer == "lora":
        import peft

        lora = peft.LoraConfig(r=case.projection.rank, target_modules="all-linear")
        model = peft.get_peft_model(model, lora)  # type: ignore[arg-type]
    if case.checkpointing:
        enable_checkpointing(model)
    return model


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
        gap=1,  # as the prediction has it: a step in which subspaces are chosen
        bits=wanted.bits,
        projector_bits=wanted.projector_bits,
        per_layer=wanted.per_layer,
        clip_norm=1.0 if case.clip else None,
        verbose=False,
    )


def measure(case: Case) -> dict[str, Any]:
    """Train on a GPU and return the peak of each phase, in GiB."""
    model = build(case)
    optimizer = optimizer_of(case, model)
    peaks = {"backward": 0, "step": 0}
    losses = []

    def phase(name: str, work: Callable[[], Any]) -> Any:
        torch.cuda.reset_peak_memory_stats()
        result = work()
        torch.cuda.synchronize()
        peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated())
        return result

    for _ in range(STEPS):
        tokens = torch.randint(32000, (case.batch, case.window), device=case.device)
        given = {"input_ids": tokens, "labels": tokens, "use_cache": False}
        loss = phase("backward", lambda given=given: model(**given).loss)
        phase("backward", loss.backward)
        losses.append(float(loss.detach()))
        del loss
        phase("step", optimizer.step)
        optimizer.zero_grad()
    found = {name: size / GIB for name, size in peaks.items()}
    return {"total_gib": max(found.values()), "peaks_gib": found, "losses": losses}


def measure_on_cpu(case: Case) -> dict[str, Any]:
    """Train on the CPU and return the peak that torch's profiler hears of from the allocator."""
    model = build(case)
    optimizer = optimizer_of(case, model)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        for _ in range(STEPS):
            tokens = torch.randint(32000, (case.batch, case.window))
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    profiler: Any = recorded.profiler
    events = [one for one in profiler.kineto_results.events() if one.name() == "[memory]"]
    now = peak = 0
    for one in sorted(events, key=lambda event: event.start_ns()):
        now += one.nbytes()
        peak = max(peak, now)
    weights = sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
    return {"total_gib": (peak + weights) / GIB}


def clean() -> None:
    gc.collect()
    if not torch.cuda.is_available():
        return
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()


def compare(case: Case, measure: Callable[[Case], dict[str, Any]]) -> dict[str, Any]:
    start = time.perf_counter()
    [predicted] = estimate_memory(case.model, case.setup, case.projection, [case.optimizer])
    seconds = time.perf_counter() - start
    clean()
    before = torch.cuda.memory_allocated() / GIB if torch.cuda.is_available() else 0.0
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
        for phase, size in one["measured"].get("peaks_gib", {}).items()
    )
    total = one["measured"]["total_gib"]
    line = f"{name} {one['predicted_gib']:8.3f} {total:8.3f} {one['error']:+7.2%}  {peaks}"
    print(line.rstrip(), flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--cpu", action="store_true", help="smaller trainings on the CPU")
    arguments.add_argument("--only", type=int, nargs="*", help="numbers of configurations, from 0")
    arguments.add_argument("--json", action="store_true", help="print JSON after the table")
    given = arguments.parse_args()
    if not (given.cpu or torch.cuda.is_available()):
        sys.exit("measuring needs a GPU; --cpu works without")
    print(f"GiB: predicted, measured, error; predicted/measured of each phase ({STEPS} steps)")
    answer: dict[str, Any] = {"torch": torch.__version__, "cases": []}
    answer["device"] = "cpu" if given.cpu else torch.cuda.get_device_name()
    for number, case in enumerate(CPU_CASES if given.cpu else CASES):
        if given.only is None or number in given.only:
            answer["cases"].append(compare(case, measure_on_cpu if given.cpu else measure))
            print_case(answer["cases"][-1])
    errors = [abs(one["error"]) for one in answer["cases"] if one["error"] is not None]
    within = sum(error <= TOLERANCE for error in errors)
    print(f"{within} of {len(errors)} configurations are within {TOLERANCE:.0%}")
    if given.json:
        print(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
