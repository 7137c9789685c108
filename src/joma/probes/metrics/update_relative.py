"""Relative size of single steps."""

from joma.probes.metrics._metric import Metric

METRIC = Metric(
    name="update_relative",
    order=160,
    sentence="‖ΔW‖/‖W‖ of one single step; `frozen` is 1 where it did not move the weight at all",
    per="weight",
    column="update",
    needs="step",
    probed=False,
    monitored="one step after every measurement",
)
