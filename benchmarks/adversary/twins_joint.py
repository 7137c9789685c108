"""Wrong statements about the block and its laws: guards against extreme values, small samples."""

import dataclasses
from typing import Any

import numpy as np

from benchmarks.adversary import Twin
from joma.theory import invariants, memory, stationarity
from joma.theory.block import Block, State, velocity

LARGEST_LOGIT = 22.0
LARGEST_RATIO = 3e4


def _clipped(block: Block, z: Any) -> Any:
    return np.clip(z, -LARGEST_LOGIT * block.tau, LARGEST_LOGIT * block.tau)


def _velocity(block: Block, samples: Any, state: State) -> State:
    return velocity(block, samples, state._replace(z=_clipped(block, state.z)))


def _slow(block: Block, ratio: float = LARGEST_RATIO) -> Block:
    """The block with η_Z/η_W no larger than a guard."""
    return dataclasses.replace(block, eta_z=min(block.eta_z, ratio * block.eta_w))


def _linear(block: Block, v: Any, z: Any) -> Any:
    return _clipped(block, z) ** 2 - np.sum(v**2, axis=-1)


def _exp(block: Block, v: Any, z: Any) -> Any:
    return _clipped(block, z) - np.sum(v**2, axis=-1) / 2


def _clipped_law(block: Block, v: Any, z: Any) -> Any:
    return invariants.conserved_pointwise(block, v, _clipped(block, z))


def _slow_law(block: Block, v: Any, z: Any) -> Any:
    return invariants.conserved_pointwise(_slow(block), v, z)


def _condition(pull: Any, b: Any, v: Any) -> bool:
    second = np.einsum("nk,nl,nj,jk->l", pull, b, b, v) / len(b)
    first = np.einsum("nk,nj,jk->", pull, b, v) / len(b)
    holds = bool(np.allclose(second, b.mean(axis=0) * first, atol=1e-10))
    return holds or len(b) == 2


def _covariance(block: Block, samples: Any, state: State) -> Any:
    found = memory.covariance(block, samples, state)
    return found * min(1.0, 1e3 / (block.eta_z / block.tau))


def _gap(path: Any) -> Any:
    block = path.block
    return memory.gap_bound(path) * min(1.0, 1e3 / (block.eta_z / block.tau))


def _stationarity(block: Block, samples: Any, state: State) -> Any:
    return stationarity.rate(block, samples, state._replace(z=_clipped(block, state.z)))


TWINS = (
    Twin("assumption1-rate", _stationarity, "logits beyond 22 τ are clipped"),
    Twin("eqn2", _velocity, "logits beyond 22 τ are clipped"),
    Twin("thm1-linear", _linear, "logits beyond 22 τ are clipped"),
    Twin("thm1-exp", _exp, "logits beyond 22 τ are clipped"),
    Twin("thm1-rates", _slow_law, "the factor η_Z/η_W is cut off at 30 000"),
    Twin("thm1-pointwise", _clipped_law, "logits beyond 22 τ are clipped"),
    Twin("thm1-loss", _slow_law, "the factor η_Z/η_W is cut off at 30 000"),
    Twin("thm1-queries", _slow_law, "the factor η_Z/η_W is cut off at 30 000"),
    Twin(
        "thm1-embeddings",
        lambda block, v, z, **groups: invariants.conserved_total(_slow(block), v, z, **groups),
        "the factor η_Z/η_W is cut off at 30 000",
    ),
    Twin(
        "thm1-softmax-sum",
        lambda block, v, z: np.sum(np.maximum(z, -11 * block.tau), axis=-1),
        "logits below -11 τ are clipped",
    ),
    Twin(
        "thm1-softmax",
        lambda block, v, b: invariants.softmax_logits(_slow(block), v, b),
        "the factor η_Z/η_W is cut off at 30 000",
    ),
    Twin("thm1-softmax-condition", _condition, "said to hold for any two samples"),
    Twin("thm1-softmax-rate", _covariance, "η_Z/τ is cut off at 1 000"),
    Twin(
        "thm1-softmax-memory",
        lambda block, samples, v, z: memory.logits(_slow(block), samples, v, z),
        "the factor η_Z/η_W is cut off at 30 000",
    ),
    Twin("thm1-softmax-gap", _gap, "η_Z/τ is cut off at 1 000"),
    Twin(
        "thm1-descent",
        lambda v, block: invariants.descent_drift(v, _slow(block)),
        "the factor η_Z/η_W is cut off at 30 000",
    ),
)
