"""Tensors that cannot be computed with: each function refuses them by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from joma.errors import JomaError
from joma.probes import (
    activation_statistics,
    effective_rank,
    embedding_overlap,
    energy,
    held_out,
    ncorr,
    shuffled,
    singular_values,
    stable_rank,
    stable_ranks,
)

PLAIN = torch.eye(4)

ODD: dict[str, Callable[[], Any]] = {
    "sparse": lambda: PLAIN.to_sparse(),
    "meta": lambda: PLAIN.to("meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized": lambda: torch.quantize_per_tensor(PLAIN, 0.1, 0, torch.qint8),
    "complex": lambda: PLAIN * 1j,
    "nothing": lambda: None,
}

CALLS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "ncorr of latents": ("latents", lambda x: ncorr(x, PLAIN)),
    "ncorr of nodes": ("activations", lambda x: ncorr(PLAIN, x)),
    "held_out": ("latents", lambda x: held_out(x, PLAIN)),
    "shuffled": ("activations", lambda x: shuffled(PLAIN, x)),
    "activation_statistics": ("activations", activation_statistics),
    "stable_rank": ("matrix", stable_rank),
    "stable_ranks": ("matri", lambda x: stable_ranks([x])),
    "singular_values": ("matrix", lambda x: singular_values(x, 1)),
    "energy": ("matrix", lambda x: energy(x, 1)),
    "effective_rank": ("matrix", effective_rank),
    "embedding_overlap": ("embeddings", embedding_overlap),
}


@pytest.mark.filterwarnings("ignore")  # that torch means to change quantized and nested tensors
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("odd", ODD)
def test_refused_in_one_sentence(odd: str, call: str) -> None:
    name, function = CALLS[call]
    with pytest.raises(JomaError, match=name) as refused:
        function(ODD[odd]())
    assert "\n" not in str(refused.value)


def test_float8_is_read() -> None:
    eighth = PLAIN.to(torch.float8_e4m3fn)
    assert ncorr(PLAIN, eighth).values.tolist() == pytest.approx([1.0] * 4)
    assert stable_rank(eighth).value == pytest.approx(4)
    assert activation_statistics(eighth).zero == pytest.approx(12 / 16)
