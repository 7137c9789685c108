"""Searches for a point at which a claim fails, over domains wider than the checks of `joma verify`.

A module holds a topic: for each claim the domain of its free parameters and a measure at one point,
registered by `over`. `twins.py` has wrong formulas, which the searches must find.
"""
