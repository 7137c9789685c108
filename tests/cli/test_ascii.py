"""Signs spelled out where a terminal does not have them."""

import io

import pytest

from joma.cli import _show


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("✓ 1 ≤ 2", "ok 1 <= 2"),
        ("ρ₀ = 1 − H/L", "rho0 = 1 - H/L"),
        ("ΔW", "DeltaW"),
        ("10⁻⁶", "10^-6"),
        ("x̄²", "x^2"),
        ("½", "1/2"),
        ("é", "e"),
        ("猫", "?"),
    ],
)
def test_spelled(text: str, expected: str):
    assert _show.spelled(text) == expected


def test_a_stream_spells_only_what_it_cannot_encode():
    _show.spell_out_what_streams_lack()
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="latin-1", errors=_show.SPELLED)
    stream.write("é ≤ 10⁻⁶")
    stream.flush()
    assert raw.getvalue().decode("latin-1") == "é <= 10^-6"
