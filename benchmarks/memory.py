"""`joma memory` against trainings: predicted and measured peaks, and sizes of states.

    python -m benchmarks.memory [--simulated | --cpu | --states] [--only N ...] [--json]

On a GPU each configuration makes three real steps on random tokens. The measured peak is
`torch.cuda.max_memory_allocated`, the largest of the forward pass, the backward pass and the step
of the optimizer; the prediction is made before, on the meta device. Without a GPU there are two
substitutes: `--simulated` makes the same steps on tensors without numbers
(`benchmarks.memory_simulated` says what it assumes), and `--cpu` measures real, smaller trainings
on the CPU against the prediction for the CPU. GaLore chooses its subspaces in every step.

With `--states` the states of GaLore are compared with those of AdamW in bfloat16; they are measured
on a GPU, and without one for the models that fit the CPU.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
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
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SMALL = ("llama-60m", "llama-130m", "llama-350m")
"""Models whose states are measured on the CPU if there is no GPU."""


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
STATES = {
    "bf16": ProjectionSettings(1),
    "8-bit moments": ProjectionSettings(1, bits=8),
    "8-bit moments and bases": ProjectionSettings(1, bits=8, projector_bits=8),
}


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
    peaks = {"forward": 0, "backward": 0, "step": 0}
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
        loss = phase("forward", lambda given=given: model(**given).loss)
        phase("backward", loss.backward)
        losses.append(float(loss.detach()))
        del loss
        phase("step", optimizer.step)
        optimizer.zero_grad()
    found = {name: size / GIB for name, size in peaks.items()}
    return {"total_gib": max(found.values()), "peaks_gib": found, "losses": losses}


def measure_without_gpu(case: Case) -> dict[str, Any]:
    """Train on the CPU, or on tensors without numbers, and return the peak in GiB."""
    if case.device == "cpu":
        from benchmarks.memory_cpu import measure_on_cpu

        model = build(case)
        peak = measure_on_cpu(model, lambda: optimizer_of(case, model), case.batch, case.window)
    else:
        from benchmarks.memory_simulated import simulate

        peak = simulate(
            blank_model(case.model, DTYPES[case.dtype]),
            lambda model: optimizer_of(case, model),
            case.batch,
            case.window,
            checkpointing=case.checkpointing,
            prepare=lambda model: prepared(replace(case, checkpointing=False), model),
        )
    return {"total_gib": peak / GIB}


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


def computed_states(model: nn.Module, case: Case) -> int:
    costs = parameter_costs(model, case.optimizer, case.projection).values()
    return sum(one.states + one.projectors for one in costs)


def measured_states(case: Case) -> int:
    """Bytes of the state after a step with short sequences."""
    model = build(case)
    optimizer = optimizer_of(case, model)
    tokens = torch.randint(32000, (1, 64), device=case.device)
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    return state_bytes(optimizer)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors of the state, without single numbers."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(one.nbytes for one in values if isinstance(one, torch.Tensor) and one.ndim)


def states() -> list[dict[str, Any]]:
    rows = []
    device: Any = "cuda" if torch.cuda.is_available() else "cpu"
    for name, preset in PRESETS.items():
        model = blank_model(name, torch.bfloat16)
        plain = Case(name, "adamw", 1, 64, device=device)
        is_measured = device == "cuda" or name in SMALL
        adamw = computed_states(model, plain)
        measured_adamw = measured_states(plain) if is_measured and name != "llama-7b" else adamw
        for kind, wanted in STATES.items():
            bits, bases = wanted.bits, wanted.projector_bits
            case = replace(plain, optimizer="galore-adamw", rank=preset.rank, per_layer=True)
            case = replace(case, bits=bits, projector_bits=bases)
            row = {"model": name, "rank": preset.rank, "states": kind, "adamw_gib": adamw / GIB}
            row["computed_gib"] = computed_states(model, case) / GIB
            row["computed_less"] = 1 - row["computed_gib"] / row["adamw_gib"]
            if is_measured:
                row["measured_gib"] = measured_states(case) / GIB
                row["measured_less"] = 1 - row["measured_gib"] * GIB / measured_adamw
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
    kinds = arguments.add_mutually_exclusive_group()
    kinds.add_argument("--simulated", action="store_true", help="on tensors without numbers")
    kinds.add_argument("--cpu", action="store_true", help="real trainings on the CPU")
    kinds.add_argument("--states", action="store_true", help="sizes of states alone")
    arguments.add_argument("--only", type=int, nargs="*", help="numbers of configurations, from 0")
    arguments.add_argument("--json", action="store_true", help="print JSON after the tables")
    given = arguments.parse_args()
    answer: dict[str, Any] = {"torch": torch.__version__}
    if given.states:
        answer["states"] = states()
        print_states(answer["states"])
    elif not (given.cpu or given.simulated or torch.cuda.is_available()):
        sys.exit("measuring needs a GPU; --simulated, --cpu and --states work without")
    else:
        without = given.cpu or given.simulated
        kind = (
            "simulated" if given.simulated else "measured on the CPU" if given.cpu else "measured"
        )
        phases = "" if without else f"; predicted/measured of each phase ({STEPS} steps)"
        print(f"GiB: predicted, {kind}, error{phases}")
        answer["device"] = "cpu" if without else torch.cuda.get_device_name()
        answer["cases"] = []
        for number, case in enumerate(CPU_CASES if given.cpu else CASES):
            if given.only is None or number in given.only:
                answer["cases"].append(compare(case, measure_without_gpu if without else measure))
                print_case(answer["cases"][-1])
        errors = [abs(one["error"]) for one in answer["cases"] if one["error"] is not None]
        within = sum(error <= TOLERANCE for error in errors)
        print(f"{within} of {len(errors)} configurations are within {TOLERANCE:.0%}")
        if errors:
            print(f"median error {statistics.median(errors):.2%}, worst {max(errors):.2%}")
    if given.json:
        print(json.dumps(answer, indent=1))


if __name__ == "__main__":
    assert {case.optimizer for case in CASES} == set(OPTIMIZERS)
    main()
