"""What a batch holds and refuses."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from joma.data import Batch


def batch() -> Batch:
    return Batch(
        tokens=torch.zeros(2, 3, 5, dtype=torch.int64),
        labels=torch.zeros(2, 3, dtype=torch.int64),
        latents=(torch.zeros(2, 3, 4, dtype=torch.bool), torch.zeros(2, 3, 6, dtype=torch.bool)),
        weights=torch.full((2, 3), 1 / 3),
        leading=7,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", torch.zeros(3, 5)),
        ("labels", torch.zeros(2, 4)),
        ("weights", torch.zeros(2, 3, 1)),
        ("latents", (torch.zeros(2, 3, 4),)),
        ("latents", (torch.zeros(2, 4, 4, dtype=torch.bool),)),
        ("latents", (torch.zeros(2, 3, dtype=torch.bool),)),
        ("leading", 0),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, value: Any):
    with pytest.raises(ValueError, match=f"^{name} "):
        replace(batch(), **{name: value})


def test_to_moves_every_tensor():
    moved = batch().to("meta")
    assert moved.leading == 7
    assert moved.weights is not None
    for tensor in (moved.tokens, moved.labels, *moved.latents, moved.weights):
        assert tensor.device.type == "meta"
    assert replace(batch(), weights=None).to("meta").weights is None
