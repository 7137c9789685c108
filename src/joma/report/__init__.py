"""Figures and pages, from run folders and theory alone.

`figures` has the house style, and how a figure is made and saved; every other module draws one kind
of figure from plain numbers or records, `html` makes pages of runs for a browser and `laboratory`
the page of the theorems. Nothing here computes a result.

Pages need no matplotlib: import the module that is needed, as in `from joma.report import figures`.
"""
