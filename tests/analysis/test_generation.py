"""Parts of generation: errors of means, intervals of speeds, budgets, streamed text."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from joma.analysis.caches import AskedCaches
from joma.analysis.generation import TextStream, block_error, speed_interval
from joma.errors import JomaError


def test_errors_of_neighbours_that_depend_on_each_other():
    """Two standard errors hold the mean about as often as the documentation says."""
    rng = np.random.default_rng(0)
    for correlation, most in ((0.0, 0.07), (0.3, 0.11)):
        noise = rng.normal(size=(400, 178))
        for place in range(1, 178):
            noise[:, place] += correlation * noise[:, place - 1]
        wrong = [abs(row.mean()) > 2 * block_error(row) for row in noise[:, 50:]]
        assert 0.01 < np.mean(wrong) < most
    assert math.isnan(block_error(np.zeros(31)))


def test_interval_of_a_speed():
    value, low, high = speed_interval([2.0, 2.0, 0.5])
    assert value == pytest.approx(2 ** (1 / 3))
    # By hand: deviation of the logarithms ln 2 · 2/√3, over √3, times 4.303.
    half = math.log(2) * 2 / 3 * 4.302653
    assert (math.log(low), math.log(high)) == pytest.approx(
        (math.log(value) - half, math.log(value) + half), rel=1e-5
    )
    assert math.isnan(speed_interval([])[0])
    assert math.isnan(speed_interval([1.5])[1])


def test_budgets():
    """Keys per head, as a number or as a share of a text of 101 tokens."""

    def keys(*caches: str, **asked: str) -> dict[str, float]:
        return {it.kind: it.keys for it in AskedCaches(caches, **asked).of_text(101)}

    assert keys("window", budget="20%") == {"window": 20}
    swept = ("window", "streaming", "heavy-hitter", "random")
    assert keys(sweep="9") == dict.fromkeys(swept, 9)
    assert keys("window:n=8", "full", "window:n=8") == {"window": 8}
    assert keys(budget="mass:64") == {"heavy-hitter": 64}
    with pytest.raises(JomaError, match="one key or more"):
        keys(budget="0.1%")


def test_text_comes_in_whole_characters():
    """Bytes as tokens: a character of three bytes comes when all of them are there."""
    decode = SimpleNamespace(decode=lambda tokens: bytes(tokens).decode(errors="replace"))
    stream = TextStream(SimpleNamespace(tokenizer=decode), list(b"before"))  # type: ignore[arg-type]
    text = "a ≤ b, naïve 日本 " * 5
    pieces = [stream.add(byte) for byte in text.encode()]
    assert "".join(pieces) == text
    assert "\ufffd" not in pieces
    stream.add("日".encode()[0])
    assert stream.rest() == "\ufffd"
