"""How transformers learn: joint dynamics of MLP and attention, from theory to measurement.

`joma.theory` has the closed forms and exact laws of JoMA, Scan&Snap and GaLore; `joma verify`
checks every claim of the papers; `joma reproduce` makes their figures again; `joma.Monitor` watches
a model of one's own learn. Importing `joma` loads nothing heavy: a room is loaded when it is first
used.
"""

from typing import TYPE_CHECKING, Any

from joma.errors import JomaError

if TYPE_CHECKING:
    from joma import (
        analysis,
        data,
        experiments,
        inference,
        integrations,
        models,
        optim,
        probes,
        random,
        report,
        runs,
        server,
        theory,
        train,
    )
    from joma.runs import read
    from joma.train.monitor import Monitor

    __version__: str

__all__ = [
    "JomaError",
    "Monitor",
    "__version__",
    "analysis",
    "citation",
    "data",
    "experiments",
    "inference",
    "integrations",
    "models",
    "optim",
    "probes",
    "random",
    "read",
    "report",
    "runs",
    "server",
    "theory",
    "train",
]

_ROOMS = frozenset(__all__) - {"JomaError", "Monitor", "__version__", "citation", "read"}


def citation() -> str:
    """Return what to cite, as BibTeX: the JoMA, Scan&Snap and GaLore papers and this software."""
    from importlib import resources

    text = resources.files("joma").joinpath("citations.bib").read_text(encoding="utf-8")
    return text.replace("VERSION", _version())


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("joma")
    except metadata.PackageNotFoundError:
        return "0+source"  # imported from a source tree that was not installed


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name == "Monitor":
        from joma.train.monitor import Monitor

        return Monitor
    if name == "read":
        from joma.runs import read

        return read
    if name in _ROOMS:
        import importlib

        return importlib.import_module(f"joma.{name}")
    raise AttributeError(f"module 'joma' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
