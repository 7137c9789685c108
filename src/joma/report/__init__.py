"""Pictures and pages, from run folders and theory alone.

The house style lives here, and whatever draws more than one experiment's numbers. What is drawn
comes in as plain numbers or records; nothing here computes a result.
"""

from joma.report import claims, figures

__all__ = ["claims", "figures"]
