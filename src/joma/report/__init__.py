"""Figures and pages, from run folders and theory alone.

`figures` has the house style, and how a figure is made and saved; every other module draws one kind
of figure from plain numbers or records. `laboratory` is a page with sliders. Nothing here computes
a result of an experiment.
"""

from joma.report import claims, figures, laboratory, probe, series, superposition

__all__ = ["claims", "figures", "laboratory", "probe", "series", "superposition"]
