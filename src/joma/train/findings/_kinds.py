"""The kinds of findings there are."""

KINDS = (
    "attention_bounce",
    "attention_collapse",
    "dead_layer",
    "diverged_loss",
    "learning_rate_too_high",
    "low_rank_gradients",
    "rank_collapse",
)
"""Every `Finding.kind` that `judge` may return; each is either judged or listed as not judged."""
