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
        ("corr(z_α, f_k)", r"\operatorname{corr}(z_{\alpha}, f_k)"),
        ("σ′ ≠ 0", r"\sigma' \ne 0"),
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


def _row(tools, tex: str) -> str:
    pytest.importorskip("latex2mathml", reason="it makes MathML")
    return tools("mathml_hook").mathml(tex, displayed=False)


def test_a_power_of_a_function_stays_a_power(tools):
    assert "<msup><mi>ln</mi><mn>2</mn></msup>" in _row(tools, r"c \ln^2(t)")


def test_a_prime_stands_next_to_its_letter(tools):
    made = _row(tools, r"h'_k")
    assert made.count("<msub>") == 1
    assert '<mrow><mi>h</mi><mo lspace="0" rspace="0">′</mo></mrow><mi>k</mi>' in made


@pytest.mark.parametrize(
    ("tex", "prefixes"), [(r"s \to -\infty", 1), ("a - b", 0), ("(-1, -1)", 2)]
)
def test_a_sign_at_the_start_of_a_term_is_not_spaced(tools, tex: str, prefixes: int):
    assert _row(tools, tex).count('form="prefix"') == prefixes


def test_bars_of_an_absolute_value_are_not_those_of_a_condition(tools):
    assert _row(tools, r"\max|x|").count("lspace") == 2
    assert "lspace" not in _row(tools, r"\mathbb{P}[y|k]")


def test_the_vector_of_ones_is_bold(tools):
    assert "font-weight: bold" in _row(tools, r"\mathbf{1}")


def test_punctuation_stays_with_its_formula(tools):
    pytest.importorskip("latex2mathml", reason="it makes MathML")
    hook = tools("mathml_hook")
    page = SimpleNamespace(meta={})
    made = hook.on_page_content(hook.on_page_markdown("Let ($v$), then", page=page), page=page)
    assert made.startswith('Let <span class="together">(<math ')
    assert made.endswith("</math>),</span> then")
