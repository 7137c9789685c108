"""Formulas in plain characters become TeX, and TeX becomes MathML."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module


@pytest.mark.parametrize(
    ("plain", "expected"),
    [
        ("v̇ = Δ∘exp(v²/2)/A", r"\dot{v} = \Delta \circ \exp(v^2/2)/A"),
        ("B̂_i = PᵀB_iP", r"\hat{B}_i = P^{\top}B_{i}P"),
        ("‖x̄₊‖", r"\lVert \bar{x}_{+}\rVert"),
        ("∫₀^v e^{−x²/2} dx", r"\int_0^v e^{-x^2/2} dx"),
        ("√(π/2) erf(v/√2)", r"\sqrt{\pi/2} \operatorname{erf}(v/\sqrt{2})"),
        ("Σ_l′ G_ll′", r"\sum_{l'} G_{ll'}"),
        ("t₃.₁", r"t_{3.1}"),
        ("E[g|l] P[y=0]", r"\mathbb{E}[g|l] \mathbb{P}[y=0]"),
    ],
)
def test_a_formula_becomes_tex(tools, plain: str, expected: str):
    assert tools("plain_mathematics").tex(plain) == expected


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("The length of v does not matter.", "The length of $v$ does not matter."),
        ("A node is at rest, a rare case.", "A node is at rest, a rare case."),
        ("with s = r/‖v‖, for v in R", r"with $s = r/\lVert v\rVert$, for $v$ in $R$"),
        ("off (t₃, D = 2: printed 5)", "off ($t_3$, $D = 2$: printed 5)"),
        ("the limit 1 − H/L is right", "the limit $1 - H/L$ is right"),
        ("see Eqns 73-74 and Fig. 2", "see Eqns 73-74 and Fig. 2"),
    ],
)
def test_formulas_of_a_sentence_are_found(tools, sentence: str, expected: str):
    assert tools("plain_mathematics").mark(sentence) == expected


def test_tex_of_a_page_becomes_mathml_and_code_stays(tools):
    pytest.importorskip("latex2mathml", reason="it makes MathML")
    hook = tools("mathml_hook")
    page = SimpleNamespace(meta={})
    text = "Let $v_k$ be\n\n$$\n\\frac{a}{b}\n$$\n\nand `$HOME`:\n\n```sh\necho $A $B\n```\n"
    marked = hook.on_page_markdown(text, page=page)
    assert "`$HOME`" in marked
    assert "echo $A $B" in marked
    made = hook.on_page_content(marked, page=page)
    assert made.count("<math ") == 2
    assert "<msub><mi>v</mi><mi>k</mi></msub>" in made
    assert '<div class="equation"><math ' in made
    assert "$v_k$" not in made
