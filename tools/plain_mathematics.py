"""Mathematics in plain characters, as the command line prints it, turned into TeX.

`joma verify` prints formulas such as `v̇ = Δ∘exp(v²/2)/A`; the pages show the same texts with
equations. `mark` finds the formulas of a sentence and `tex` translates one.
"""

import re
import unicodedata

_ACCENTS = {"\u0307": "dot", "\u0308": "ddot", "\u0304": "bar", "\u0302": "hat"}
_SIGNS = {
    "−": "-",
    "∘": r"\circ ",
    "·": r"\cdot ",
    "×": r"\times ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "≪": r"\ll ",
    "≫": r"\gg ",
    "≈": r"\approx ",
    "∝": r"\propto ",
    "∼": r"\sim ",
    "~": r"\sim ",
    "±": r"\pm ",
    "∓": r"\mp ",
    "→": r"\to ",
    "↦": r"\mapsto ",
    "⟹": r"\Longrightarrow ",
    "∞": r"\infty ",
    "∂": r"\partial ",
    "∠": r"\angle ",
    "∫": r"\int ",
    "∏": r"\prod ",
    "∈": r"\in ",
    "∇": r"\nabla ",
    "ℓ": r"\ell ",
    "…": r"\dots ",
    "½": r"\tfrac{1}{2}",
    "¼": r"\tfrac{1}{4}",
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "∥": r"\parallel ",
    "∪": r"\cup ",
    "{": r"\{",
    "}": r"\}",
    "%": r"\%",
    "#": r"\#",
    "&": r"\&",
}
_GREEK = {
    letter: rf"\{name} "
    for letter, name in (
        ("α", "alpha"), ("β", "beta"), ("γ", "gamma"), ("δ", "delta"), ("ε", "varepsilon"),
        ("ζ", "zeta"), ("η", "eta"), ("θ", "theta"), ("κ", "kappa"), ("λ", "lambda"),
        ("μ", "mu"), ("ν", "nu"), ("ξ", "xi"), ("π", "pi"), ("ρ", "rho"), ("σ", "sigma"),
        ("τ", "tau"), ("φ", "varphi"), ("χ", "chi"), ("ψ", "psi"), ("Δ", "Delta"),
        ("Φ", "Phi"), ("Π", "Pi"), ("Λ", "Lambda"), ("Γ", "Gamma"), ("Θ", "Theta"),
        ("Ω", "Omega"), ("Ψ", "Psi"), ("Ξ", "Xi"), ("ω", "omega"),
    )
}  # fmt: skip
_FUNCTIONS = {"exp", "ln", "log", "cos", "sin", "sinh", "cosh", "max", "min", "sup", "inf", "diag"}
_NAMED = {"erf", "erfinv", "erfc", "corr", "Cov", "sign", "softmax"}
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ᵀʳʸˡᵏ"
_LOWERED = "₀₁₂₃₄₅₆₇₈₉₊₋"
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def tex(plain: str) -> str:
    """Return a formula in plain characters as TeX."""
    made = _Reader(plain).all()
    made = re.sub(r" +(?=[_^})' ]|$)|(?<=[({]) +|(?<=[A-Za-z]) (?=[(/|])", "", made)
    return re.sub(r"([_^])\{(\w)\}(?![A-Za-z0-9])", r"\1\2", made).strip()


class _Reader:
    """Reads a formula from left to right."""

    def __init__(self, plain: str) -> None:
        self.text = unicodedata.normalize("NFD", plain.replace("½", "\ue000"))
        self.text = self.text.replace("\ue000", "½").replace("=\u0338", "≠")
        self.at = 0

    def all(self) -> str:
        pieces: list[str] = []
        while self.at < len(self.text):
            pieces.append(self.piece())
        return "".join(pieces)

    def piece(self) -> str:
        rest = self.text[self.at :]
        if script := re.match(rf"[{_RAISED}]+", rest):
            self.at += script.end()
            return "^{" + _script(script[0]) + "}"
        if script := re.match(rf"[{_LOWERED}]+(?:\.[{_LOWERED}]+)?", rest):
            self.at += script.end()
            lowered = _script(script[0])
            if following := re.match(rf"[{_RAISED}]+", self.text[self.at :]):
                self.at += following.end()
                return "_{" + lowered + "}^{" + _script(following[0]) + "}"
            return "_{" + lowered + "}"
        if rest[0] in "_^":
            self.at += 1
            return rest[0] + "{" + self.scripted(rest[0]) + "}"
        if rest[0] == "√":
            self.at += 1
            return r"\sqrt{" + self.rooted() + "}"
        return self.atom()

    def atom(self) -> str:
        rest = self.text[self.at :]
        if word := re.match(r"[A-Za-z]+", rest):
            if word[0] in _FUNCTIONS:
                self.at += word.end()
                return rf"\{word[0]} " if word[0] != "diag" else r"\operatorname{diag}"
            if word[0] in _NAMED:
                self.at += word.end()
                return rf"\operatorname{{{word[0]}}}"
            if len(word[0]) > 3 and not re.match(r"[_^]", rest[word.end() :]):
                self.at += word.end()
                return rf"\text{{{word[0]}}}"
        if power := re.match(r"([\d.]+)e(-?\d+)", rest):
            self.at += power.end()
            factor = "" if power[1] == "1" else rf"{power[1]}\cdot "
            return f"{factor}10^{{{power[2]}}}"
        sign = rest[0]
        self.at += 1
        if sign == "Σ":
            return r"\sum "
        if sign == "‖":
            opens = self.text[: self.at].count("‖") % 2
            return r"\lVert " if opens else r"\rVert "
        if sign == "E" and self.text[self.at : self.at + 1] == "[":
            return r"\mathbb{E}"
        if sign == "P" and self.text[self.at : self.at + 1] in ("[", "("):
            return r"\mathbb{P}"
        if sign == "*" and self.at > 1:
            return "^{*}"
        if sign in "′'":
            return "'"
        if sign == "±" and re.search(r"[a-z]±(?:[\s),]|$)", self.text[self.at - 2 : self.at + 1]):
            return r"_{\pm}"
        made = _GREEK.get(sign) or _SIGNS.get(sign) or sign
        if self.at < len(self.text) and self.text[self.at] in _ACCENTS:
            accent = _ACCENTS[self.text[self.at]]
            self.at += 1
            return rf"\{accent}{{{made.strip()}}}"
        return made

    def scripted(self, kind: str) -> str:
        """What a sign of sub- or superscript takes: braces, or letters that stand together."""
        rest = self.text[self.at :]
        if rest.startswith("{"):
            return tex(self.bracketed()[1:-1])
        if kind == "^":
            found = re.match(r"[+−]?[^\s]", rest)
            assert found
            self.at += found.end()
            return tex(found[0])
        found = re.match(r"(?:[α-ωΑ-Ω]+|[A-Z]?[a-z0-9]*)′?", rest)
        assert found
        self.at += found.end()
        word = found[0]
        return rf"\text{{{word}}}" if word in ("min", "max", "steps", "th") else tex(word)

    def rooted(self) -> str:
        rest = self.text[self.at :]
        if rest.startswith("("):
            return tex(self.bracketed()[1:-1])
        found = re.match(r"\d+|.", rest)
        assert found
        self.at += found.end()
        return tex(found[0])

    def bracketed(self) -> str:
        """The text from an opening bracket to the one that closes it."""
        start, depth = self.at, 0
        while self.at < len(self.text):
            sign = self.text[self.at]
            self.at += 1
            depth += (sign in _CLOSING) - (sign in _CLOSING.values())
            if not depth:
                break
        return self.text[start : self.at]


def _script(raised_or_lowered: str) -> str:
    plain = unicodedata.normalize("NFKD", raised_or_lowered)
    return plain.replace("−", "-").replace("T", r"\top ")


_STRONG = re.compile(
    r"[α-ωΑ-ΩΣ∘·√∫∂∞≤≥≈∝‖½¼ᵀ′∠ℓ⟨⟩→↦±×≠]|[₀-₉₊₋]|[²³⁴-⁹⁻⁺]|[a-z]\*|\b[A-Za-z]_[A-Za-z{]|\^|[\u0302\u0304\u0307\u0308]"
)
_ATOM = r"(?:(?:ln|exp|diag|erf|max|min|sup|P|E)|\d*[A-Za-z]{1,2}|\d+|…)"
_COMPACT = re.compile(rf"−?[(\[]*{_ATOM}?(?:[/()\[\]−+|=]+{_ATOM}?)+")
"""A word that is a formula though its characters are those of prose: H/L, p(u), 2(L, −r."""
_WEAK = re.compile(
    r"[=<>+−–≤≥≈→∼~∝±/∈|∥∪≪≫≠]|[(\[]*[A-Za-z](?:[(\[][^\s]*)?[)\]]*|[(\[]*−?[\d.,]+(?:e-?\d+)?[)\]]*"
    r"|(?:ln|max|min|sup|exp|erf|cos|dt|dv|dx|du|dy|ds|diag)|2P"
)
_JOINS = re.compile(r"[=<>+−≤≥≈→∼~∝±/|∈∘·×∥∪≪≫≠]")


def mark(sentence: str) -> str:
    """Return a sentence with its formulas as TeX between dollar signs."""
    words = sentence.split(" ")
    made: list[str] = []
    at = 0
    while at < len(words):
        if _opens_prose(words, at):
            made.append("(")
            words[at] = words[at][1:]
        end = _formula_end(words, at)
        if end == at:
            made.append(_escaped(words[at]))
            at += 1
            continue
        formula = " ".join(words[at:end])
        before, formula, after = _trimmed(formula)
        made.append(f"{before}${tex(formula)}${after}")
        at = end
    return " ".join(made).replace("( ", "(")


def _opens_prose(words: list[str], at: int) -> bool:
    """Whether a bracket opens at a word that closes in a later one, with prose between."""
    if not words[at].startswith("(") or _unbalanced(words[at]) < 1:
        return False
    depth = 0
    for end in range(at, len(words)):
        depth += _unbalanced(words[end])
        if depth <= 0:
            inside = words[at : end + 1]
            return any(re.fullmatch(r"\(?[A-Za-z]{4,}[),.;:]*|of|at", word) for word in inside)
    return False


def _formula_end(words: list[str], start: int) -> int:
    """The index after the formula that starts at a word, or that word's if it starts none."""
    at, depth, strong = start, 0, False
    end = start
    while at < len(words):
        word = words[at]
        bare = _bare(word, depth)
        known = _is_formula(bare)
        joins = bool(_JOINS.fullmatch(bare))
        if depth <= 0 and not known and not joins and not _WEAK.fullmatch(bare):
            break
        if depth <= 0 and not known and at == start and (bare in ("a", "A", "I") or not bare):
            following = words[at + 1] if at + 1 < len(words) else ""
            if not _JOINS.fullmatch(following):
                break
        depth += _unbalanced(word)
        strong = strong or known or joins
        at += 1
        if depth <= 0:
            if not joins:
                end = at
            if word != bare:  # a comma or full stop ends it
                break
            following = words[at] if at < len(words) else ""
            if not joins and not _continues(following, known):
                break
    single = end == start + 1 and bool(re.fullmatch(r"[B-HJ-Zb-z]", _bare(words[start], 0)))
    lettered = re.search(r"[^\W\d_]|[½¼√]", " ".join(words[start:end]))
    return end if lettered and (strong or single) else start


def _continues(following: str, known: bool) -> bool:
    """Whether a formula goes on with the next word."""
    bare = _bare(following, 0)
    if _JOINS.fullmatch(bare):
        return True
    if bare in ("a", "A", "I", ""):
        return False
    return _is_formula(bare) or (known and bool(re.fullmatch(r"[A-Zb-z][)\]]*|d[tvxuys]", bare)))


def _bare(word: str, depth: int) -> str:
    """A word without punctuation and without a bracket that closes the sentence's own."""
    bare = word.rstrip(",.;:")
    while bare.endswith(")") and depth + _unbalanced(bare) < 0:
        bare = bare[:-1].rstrip(",.;:")
    return bare


def _is_formula(word: str) -> bool:
    """Whether a word alone shows that it is mathematics."""
    if word in ("ln", "ln ln"):
        return True
    if re.fullmatch(r"[(\[]?[A-Za-z0-9]+[)\]]?|[a-z]{3,}_\w+", word):
        return False
    return bool(_STRONG.search(unicodedata.normalize("NFD", word)) or _COMPACT.fullmatch(word))


def _trimmed(formula: str) -> tuple[str, str, str]:
    """Split off punctuation, and brackets that belong to the sentence."""
    before = after = ""
    while formula and (formula[-1] in ",.;:" or (_unbalanced(formula) < 0 and formula[-1] in ")]")):
        after = formula[-1] + after
        formula = formula[:-1]
    while formula and formula[0] in "([" and _unbalanced(formula) > 0:
        before += formula[0]
        formula = formula[1:]
    return before, formula, after


def _unbalanced(text: str) -> int:
    return sum(text.count(s) for s in "([{⟨") - sum(text.count(s) for s in ")]}⟩")


def _escaped(text: str) -> str:
    return re.sub(r"([_*|$])", r"\\\1", text)
