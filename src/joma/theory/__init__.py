"""The mathematics: closed forms, exact laws and their simulations, in NumPy and SciPy alone.

A function lives here if it needs nothing but numbers: no torch, no files, no printing. Each names
its equation in the first line of its docstring, computes in float64 and is vectorised over leading
axes. Where a paper's printed formula is wrong, the plain name holds the derived form and
`as_printed` keeps the printed one, so that `joma verify` can show both.

| module | what it holds |
|---|---|
| block, functions | the JoMA block in full (Eqns 1, 2, 9), simulated |
| invariants | Theorem 1 and its new laws |
| memory | the softmax law of Theorem 1 with memory, and what it leaves out |
| stationarity | Assumption 1: how far E[g x] drifts in a training |
| linear | Theorem 2, winner in finite time, many nodes, linear attention |
| marginals, clusters | Lemmas 1-5 and Theorem 3: isotropic clusters, critical points |
| nonlinear | Eqn 6 solved, Theorem 4, entropy and its rebound |
| embeddings | implicit bias, several patterns in one weight, almost orthogonal embeddings |
| spectra | rank and stable rank |
| hblt | Section 5: latent trees, Theorem 5, Eqn 8 |
| cdag | the note on computational graphs |
| scan_snap | Scan&Snap: population flow and sampled sequences |
| galore | GaLore's convergence |
"""

from importlib import import_module
from typing import Any

# Modules are loaded by `__getattr__`.
# pyright: reportUnsupportedDunderAll=false
__all__ = [
    "as_printed",
    "block",
    "cdag",
    "clusters",
    "embeddings",
    "functions",
    "galore",
    "hblt",
    "invariants",
    "linear",
    "marginals",
    "memory",
    "nonlinear",
    "scan_snap",
    "spectra",
    "stationarity",
]


def __getattr__(name: str) -> Any:
    """Loads a module when it is first asked for: `joma.theory.linear` needs no other."""
    if name not in __all__:
        raise AttributeError(f"joma.theory has no module {name!r}; it has {', '.join(__all__)}")
    return import_module(f"joma.theory.{name}")


def __dir__() -> list[str]:
    return sorted(__all__)
