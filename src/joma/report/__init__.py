"""Figures and pages, from run folders and theory alone.

`figures` has the house style, and how a figure is made and saved; every other module draws one kind
of figure from plain numbers or records, `html` makes pages of runs for a browser and `laboratory`
the page of the theorems. Nothing here computes a result.

Modules are imported when they are used: pages need no matplotlib.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from joma.report import (
        cache_cost,
        claims,
        figures,
        html,
        laboratory,
        probe,
        series,
        superposition,
        training,
    )

__all__ = [
    "cache_cost",
    "claims",
    "figures",
    "html",
    "laboratory",
    "probe",
    "series",
    "superposition",
    "training",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import importlib

        return importlib.import_module(f"joma.report.{name}")
    raise AttributeError(f"module 'joma.report' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
