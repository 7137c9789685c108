"""All cases trained, in parallel processes with one thread each."""

import fnmatch
import multiprocessing
import time
import traceback
import warnings
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path

import numpy as np

from benchmarks.findings._case import ARCHITECTURES, Case
from benchmarks.findings._cases import (
    BEST,
    Best,
    healthy,
    large,
    large_sweep,
    planted,
    small,
    sweep,
)
from benchmarks.findings._store import read_all, store
from joma.runs import Run


def run(
    folder: Path,
    *,
    workers: int,
    only: str,
    scale: str,
    seconds: float | None,
    device: str = "cpu",
) -> int:
    """Train all cases that the folder does not hold yet; return how many are left.

    The sweep comes first: it sets the learning rates of all others.

    Args:
        folder: Where each case gets a file as soon as it is trained.
        workers: Parallel processes.
        only: Pattern of names, "*" for all.
        scale: "small", "full" or "large".
        seconds: No training goes on after these, None for no limit.
        device: Where models are trained.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end = None if seconds is None else time.monotonic() + seconds
    if scale == "small":
        return _train_all(small(), folder, workers, only, end, device)
    first = large_sweep() if scale == "large" else sweep()
    left = _train_all(first, folder, workers, only, end, device)
    best = best_of(folder)
    for name, one in best.items():
        print(f"{name}: best rate {one.rate:g}, loss {one.loss:.4f} ± {one.spread:.4f}; {one.sgd=}")
    then = large(best) if scale == "large" else planted(best) + healthy(best)
    return left + _train_all(then, folder, workers, only, end, device)


def best_of(folder: Path) -> dict[str, Best]:
    """Return the best of the sweep in a folder, or what is known of an architecture without."""
    losses: dict[tuple[str, str, float], list[float]] = {}
    for stored in read_all(folder, "sweep-*"):
        if stored.columns:
            case = stored.case
            of = losses.setdefault((case.architecture, case.optimizer, case.rate), [])
            of.append(stored.facts["validation_loss"])
    found = dict(BEST)
    for architecture in ARCHITECTURES:
        means = {
            (optimizer, rate): float(np.mean(ones))
            for (name, optimizer, rate), ones in losses.items()
            if name == architecture and np.isfinite(ones).all()
        }
        adamw = {rate: mean for (optimizer, rate), mean in means.items() if optimizer == "adamw"}
        sgd = {rate: mean for (optimizer, rate), mean in means.items() if optimizer == "sgd"}
        if not adamw:
            continue
        rate = min(adamw, key=lambda one: adamw[one])
        ones = losses[architecture, "adamw", rate]
        plain = min(sgd, key=lambda one: sgd[one]) if sgd else found[architecture].sgd
        found[architecture] = Best(rate, adamw[rate], max(ones) - min(ones), plain)
    return found


def _cost(case: Case) -> float:
    """Return about how long a case takes, to train the longest first."""
    earlier = 300 if case.lora else 0
    one = (1 + case.layers) * case.accumulate * (0.5 + case.batch / 32)
    return (case.steps + earlier) * one * (2 if case.autocast else 1)


def _train_all(
    cases: Sequence[Case],
    folder: Path,
    workers: int,
    only: str,
    end: float | None,
    device: str,
) -> int:
    chosen = [case for case in cases if fnmatch.fnmatch(case.name, only)]
    there = {stored.case.name for stored in read_all(folder)}
    chosen = [case for case in chosen if case.name not in there]
    chosen.sort(key=_cost, reverse=True)
    if not chosen:
        return 0
    began = time.monotonic()
    pool = ProcessPoolExecutor(
        min(workers, len(chosen)), multiprocessing.get_context("spawn"), initializer=_prepare
    )
    waiting = {pool.submit(_train_one, case, folder, device) for case in chosen}
    done = 0
    try:
        while waiting:
            left = None if end is None else max(end - time.monotonic(), 0)
            finished, waiting = wait(waiting, left, FIRST_COMPLETED)
            if not finished:
                break
            for future in finished:
                done += 1
                print(f"{done}/{len(chosen)} {time.monotonic() - began:.0f} s {future.result()}")
    finally:
        # What runs past the limit is stopped: files are put in place only when they are whole.
        running = list((pool._processes or {}).values()) if waiting else []
        pool.shutdown(wait=False, cancel_futures=True)
        for process in running:
            process.terminate()
    return len(chosen) - done


def _prepare() -> None:
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")


def _train_one(case: Case, folder: Path, device: str) -> str:
    """Train a case and write its file; return a line about it."""
    from benchmarks.findings._train import CannotTrainError, train

    try:
        facts = train(case, folder, device)
    except CannotTrainError as reason:
        store(Run.create("case", {}, out=folder / case.name), case, {"skipped": str(reason)})
        return f"{case.name}: skipped, {reason}"
    except Exception:  # trained again next time
        return f"{case.name}: {traceback.format_exc()}"
    return f"{case.name}: {facts['seconds']:.1f} s, loss {facts['validation_loss']:.3f}"
