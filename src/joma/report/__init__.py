"""Figures and pages, from run folders and theory alone.

`figures` has the house style, and how a figure is made and saved; every other module draws one kind
of figure from plain numbers or records. Nothing here computes a result.
"""

from joma.report import claims, figures, probe, series, superposition

__all__ = ["claims", "figures", "probe", "series", "superposition"]
