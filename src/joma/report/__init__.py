"""Figures and pages, from run folders and theory alone.

`figures` has the house style, and how a figure is made and saved; every other module draws one kind
of figure from plain numbers or records, and `html` makes pages for a browser. Nothing here computes
a result.
"""

from joma.report import claims, figures, html, probe, series, superposition, training

__all__ = ["claims", "figures", "html", "probe", "series", "superposition", "training"]
