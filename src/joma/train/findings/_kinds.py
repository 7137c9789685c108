"""The kinds of findings there are."""

KINDS = (
    "attention_bounce",
    "attention_collapse",
    "bad_initialisation",
    "dead_layer",
    "dead_mlp",
    "diverged_loss",
    "frozen_layer",
    "label_noise",
    "learning_rate_too_high",
    "learning_rate_too_low",
    "loss_spike",
    "not_finite",
    "not_optimized",
    "overfitting",
    "rank_collapse",
    "tied_layer",
)
"""Every `Finding.kind` that `judge` may return; each is either judged or listed as not judged."""
