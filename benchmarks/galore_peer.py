"""The losses of GaLore next to those of the package galore-torch, on the experiment's networks.

    joma reproduce galore --scale medium --out runs/galore --group tune --group seeds
    python -m benchmarks.galore_peer runs/galore [--rank 16] [--json]

Needs `pip install galore-torch` (Apache-2.0). Its AdamW trains networks that start from the same
weights and read the same text as those in the run, at the rate that was tuned for ours, with ε as
ours has it. They are kept in the run's folder `peer`, so that a second call continues.
"""

import argparse
import importlib
import importlib.util
import json
import math
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from joma.common.paired import Paired, paired
from joma.experiments import EXPERIMENTS
from joma.experiments.galore import SIZES, GaLoreNetwork
from joma.experiments.galore.results import GaloreResults, collect
from joma.experiments.galore.training import matrices, train_network
from joma.runs import Run

EPSILON = 1e-8
"""ε of `GaLoreAdamW`; the package's own default is 1e-6."""


@cache
def peer_class() -> Any:
    """AdamW of galore-torch; its package imports bitsandbytes, which this class does not use."""
    found = importlib.util.find_spec("galore_torch")
    if found is None or found.origin is None:
        sys.exit("galore-torch is not installed")
    package = types.ModuleType("galore_torch")
    package.__path__ = [str(Path(found.origin).parent)]
    before = sys.modules.get("galore_torch")
    sys.modules["galore_torch"] = package
    try:
        return importlib.import_module("galore_torch.adamw").AdamW
    finally:
        del sys.modules["galore_torch"]
        if before is not None:
            sys.modules["galore_torch"] = before


def peer_optimizer(model: nn.Module, network: GaLoreNetwork, device: str) -> torch.optim.Optimizer:
    """The package's optimizer for the matrices that ours projects."""
    del device
    inside = list(matrices(model).values())
    taken = {id(one) for one in inside}
    rest = [one for one in model.parameters() if id(one) not in taken]
    settings = {
        "rank": network.rank,
        "update_proj_gap": network.gap,
        "scale": network.rate.share,
        "proj_type": "std",
    }
    return peer_class()(
        [{"params": inside, **settings}, {"params": rest}],
        lr=network.rate.rate,
        eps=EPSILON,
        no_deprecation_warning=True,
    )


def peer_losses(run: Run, results: GaloreResults, rank: int) -> np.ndarray:
    """The last losses of the package's networks, trained unless they are done."""
    request = EXPERIMENTS["galore"].request(seed=run.config["seed"], scale=run.config["scale"])
    losses = []
    for member in range(results.size.seeds):
        network = results.size.network("svd", results.best["galore"], member, rank=rank)
        folder = run.path / "peer" / network.name
        outcome = folder / "outcome.json"
        if not outcome.exists():
            train_network(folder, network, results.size, request, make=peer_optimizer)
        losses.append(json.loads(outcome.read_text())["validation_loss"])
        print(f"{network.name}: {losses[-1]:.4f}", file=sys.stderr, flush=True)
    return np.array(losses, float)


def row(name: str, difference: Paired, level: float) -> dict[str, Any]:
    """A difference in nats per byte and as a share of the loss."""
    return {
        "difference": name,
        "seeds": difference.count,
        "mean": difference.mean,
        "standard_error": difference.error,
        "mean_share": difference.mean / level,
        "error_share": difference.error / level,
        "within_two_errors": not difference.is_clear,
    }


def main() -> None:
    """Train the package's networks and print the paired differences."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path, help="run folder of the experiment")
    parser.add_argument("--rank", type=int, help="rank; that of the experiment unless given")
    parser.add_argument("--json", action="store_true", help="print JSON")
    chosen = parser.parse_args()
    run = Run.open(chosen.run)
    size = SIZES[run.config["scale"]].with_options(run.config.get("options", {}))
    results = collect(run, size)
    if "svd" not in results.best:
        sys.exit(f"{chosen.run} has no tuned learning rates yet: run its groups tune and seeds")
    rank = chosen.rank or size.rank
    peer = peer_losses(run, results, rank)
    results = collect(run, size)  # with what the experiment has trained meanwhile
    level = float(peer.mean())
    ours = results.losses("galore", rank=rank)
    svd = results.losses("svd", rank=rank, rate=results.best["galore"])
    rows = [
        row("ours (power, staggered) − galore_torch", paired(ours, peer), level),
        row("ours (projection='svd') − galore_torch", paired(svd, peer), level),
        row("galore_torch − full rank", paired(peer, results.losses("full")), level),
    ]
    if chosen.json:
        print(json.dumps({"rank": rank, "loss": level, "rows": rows}, indent=2))
        return
    error = float(peer.std(ddof=1)) / math.sqrt(len(peer))
    print(f"galore_torch, rank {rank}: {level:.4f} ± {error:.4f}")
    for one in rows:
        print(
            f"{one['difference']}: {one['mean']:+.4f} ± {one['standard_error']:.4f} "
            f"({one['mean_share']:+.2%} ± {one['error_share']:.2%}, {one['seeds']} seeds)"
        )


if __name__ == "__main__":
    main()
