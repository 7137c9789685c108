"""One case trained under a monitor."""

import importlib
import importlib.util
import math
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.findings._case import STEPS, Case
from benchmarks.findings._data import LENGTH, Batch, Language, make_batch
from benchmarks.findings._models import TASKS, build, logits_of
from benchmarks.findings._plant import Plant, plant
from benchmarks.findings._store import store
from joma import Monitor
from joma.common.quiet import quietly

EVERY = 100
VALIDATIONS = 10
"""How often in a training the validation loss is taken."""
LORA_TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "encoder": ["linear1", "linear2"],
    "t5": ["q", "k", "v", "o", "wi", "wo"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
}


class CannotTrainError(Exception):
    """A case that cannot be trained here; the message says why."""


def train(case: Case, folder: Path, device: str = "cpu") -> dict[str, Any]:
    """Train a case, store it in a folder of its name, and return what is known of it.

    Raises:
        CannotTrainError: A package that the case needs is not installed.
    """
    began = time.process_time()
    language = Language(case.vocabulary, case.language, changed=0.3 if case.lora else 0.0)
    with quietly():
        model = (_adapted(case) if case.lora else build(case)).to(device)
        what = plant(case, model)
    model.train()
    data = _Batches(case, language, what, device)
    validation = _validation(case, language).to(device)
    losses: list[float] = []
    seen: list[float] = []
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = _optimizer(case, [one for one in trained if one not in what.left_out])
    inputs = {name: tensor[:16] for name, tensor in validation.inputs.items()}
    run = folder / case.name
    shutil.rmtree(run, ignore_errors=True)  # of a training that broke off
    monitor = Monitor(model, optimizer, run=run, every=EVERY, budget=None, inputs=inputs)
    for step in range(1, case.steps + 1):
        rate = case.rate * _schedule(case, step) * what.rate(step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        losses.append(_step(case, model, optimizer, data, step, what))
        monitor.step(losses[-1])
        optimizer.zero_grad()
        what.after(step)
        if step % max(case.steps // VALIDATIONS, 1) == 0:
            seen.append(evaluate(model, validation))
            if case.validation:
                monitor.record_validation(seen[-1])
    monitor.close()
    assert monitor.run is not None, "a folder could be made"
    unigram = language.unigram_entropy()
    tail = losses[-max(case.steps // 20, 1) :]
    facts = {
        "unigram_entropy": unigram,
        "first_loss": losses[0],
        "train_loss": float(np.mean(tail)),
        "validation_loss": seen[-1],
        "best_validation_loss": min(seen, key=lambda one: one if math.isfinite(one) else math.inf),
        "seconds": time.process_time() - began,
    }
    store(monitor.run, case, facts)
    return facts


def evaluate(model: nn.Module, batch: Batch) -> float:
    """Return the loss of a batch in evaluation mode."""
    model.eval()
    with torch.no_grad():
        loss = _loss(model, batch)
    model.train()
    return float(loss)


def _step(
    case: Case,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: "_Batches",
    step: int,
    what: Plant,
) -> float:
    """Make one optimizer step; return the loss."""
    total = 0.0
    for _ in range(case.accumulate):
        batch = data.next(garbage=what.garbage(step))
        with torch.autocast(batch.targets.device.type, torch.bfloat16, enabled=case.autocast):
            loss = _loss(model, batch)
        (loss * what.sign(step) / case.accumulate).backward()
        total += float(loss.detach()) / case.accumulate
    if case.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
    optimizer.step()
    return total


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = logits_of(model, batch.inputs).float()
    return functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())


def _optimizer(case: Case, trained: list[nn.Parameter]) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(trained, case.rate, momentum=0.9, weight_decay=case.decay / 100)
    return torch.optim.AdamW(trained, case.rate, weight_decay=case.decay, fused=True)


def _schedule(case: Case, step: int) -> float:
    """Return the factor on the learning rate at a step."""
    if case.schedule == "constant":
        return 1.0
    warm = max(case.steps // 10, 1)
    if step <= warm:
        return step / warm
    if case.schedule == "warmup":
        return 1.0
    done = (step - warm) / max(case.steps - warm, 1)
    return 0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2


class _Batches:
    """The training batches of a case, from its seed alone."""

    def __init__(self, case: Case, language: Language, what: Plant, device: str = "cpu") -> None:
        self._case, self._what, self._device = case, what, device
        self._task, self._size = TASKS[case.architecture], case.batch // case.accumulate
        self._masks = torch.Generator().manual_seed(case.seed)
        generator = np.random.default_rng([case.seed, 1])
        count = what.sequences or case.batch * case.steps
        self._tokens = language.draw(count, generator, LENGTH + 1)
        self._order = torch.Generator().manual_seed(case.seed)
        self._next = 0

    def next(self, *, garbage: bool) -> Batch:
        """Return the next batch; random tokens if it is to be garbage."""
        words = self._case.vocabulary
        if self._what.sequences:
            which = torch.randint(len(self._tokens), (self._size,), generator=self._order)
        else:
            which = torch.arange(self._next, self._next + self._size)
            self._next += self._size
        tokens = self._tokens[which]
        if garbage:
            tokens = torch.randint(words, tokens.shape, generator=self._order)
        batch = make_batch(self._task, tokens, words, self._masks).to(self._device)
        if not self._what.noise:
            return batch
        shape = batch.targets.shape
        noisy = (torch.rand(shape, generator=self._order) < self._what.noise).to(self._device)
        noise = torch.randint(words, shape, generator=self._order).to(self._device)
        targets = torch.where(noisy & (batch.targets >= 0), noise, batch.targets)
        return Batch(batch.inputs, targets)


def _validation(case: Case, language: Language, count: int = 128) -> Batch:
    """Return sequences of another draw than any that is trained on, the same for all seeds."""
    tokens = language.draw(count, np.random.default_rng([12345, 2]), LENGTH + 1)
    masks = torch.Generator().manual_seed(12345)
    return make_batch(TASKS[case.architecture], tokens, case.vocabulary, masks)


def _adapted(case: Case) -> nn.Module:
    """Return a model that was trained on another language, with adapters on its layers."""
    if importlib.util.find_spec("peft") is None:
        raise CannotTrainError("peft is not installed")
    peft = importlib.import_module("peft")

    model = build(case)
    earlier = replace(case, lora=False, steps=STEPS[case.architecture] * 3 // 2)
    data = _Batches(earlier, Language(case.vocabulary, case.language), Plant())
    optimizer = torch.optim.AdamW(model.parameters(), case.rate)
    for step in range(1, earlier.steps + 1):
        _step(earlier, model, optimizer, data, step, Plant())
        optimizer.zero_grad()
    config = peft.LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=LORA_TARGETS[case.architecture],
        fan_in_fan_out=case.architecture == "gpt2",
    )
    return peft.get_peft_model(model, config)
