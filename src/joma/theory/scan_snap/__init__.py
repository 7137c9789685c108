"""Scan&Snap: one attention layer without residual, next-token prediction, sequences T → ∞.

The data is a `ScanSnapCorpus`; `flow` and `evolve` are the population dynamics of the attention
logits z and the decoder Y, `train_on_samples` the same by stochastic gradient on sequences of
finite length. `Balanced` is the case that can be solved.
"""

from joma.theory.scan_snap._flow import (
    ScanSnapCorpus,
    ScanSnapTrajectory,
    attention,
    b_rate,
    evolve,
    feature,
    finite_length_bias,
    flow,
    objective,
    sample_gradient,
    sample_sequences,
    train_on_samples,
)
from joma.theory.scan_snap._laws import (
    Balanced,
    critical_margin,
    deciding_time,
    decoder_rate_turn,
    early_log_gain,
    full_log_gain_bounds,
    growth_factor,
    initial_fate,
    initial_pull,
    late_b,
    late_decoder_rate_effect,
    log_gain_bounds,
    margin_time,
    relative_gain_rate,
    rescaled_time,
    rise_ratio,
    snapping_time,
)

__all__ = [
    "Balanced",
    "ScanSnapCorpus",
    "ScanSnapTrajectory",
    "attention",
    "b_rate",
    "critical_margin",
    "deciding_time",
    "decoder_rate_turn",
    "early_log_gain",
    "evolve",
    "feature",
    "finite_length_bias",
    "flow",
    "full_log_gain_bounds",
    "growth_factor",
    "initial_fate",
    "initial_pull",
    "late_b",
    "late_decoder_rate_effect",
    "log_gain_bounds",
    "margin_time",
    "objective",
    "relative_gain_rate",
    "rescaled_time",
    "rise_ratio",
    "sample_gradient",
    "sample_sequences",
    "snapping_time",
    "train_on_samples",
]
