"""Signs spelled out for a terminal that does not have them: "<=" for ≤, "rho" for ρ."""

import codecs
import itertools
import sys
import unicodedata

from joma import errors

SPELLED = "joma-spelled"
"""Name of the error handler of a stream that spells out what it cannot encode."""

_SIGNS = {
    "✓": "ok",
    "✗": "NO",
    "≤": "<=",
    "≥": ">=",
    "≪": "<<",
    "≫": ">>",
    "→": "->",
    "∞": "inf",
    "−": "-",
    "–": "-",
    "·": "*",
    "×": "x",
    "±": "+-",
    "′": "'",
    "‖": "||",
    "√": "sqrt",
    "⁄": "/",
}


def register() -> None:
    """Makes the error handler known to Python."""
    codecs.register_error(SPELLED, _handle)


def printable(text: str) -> str:
    """`text` as standard output will show it, so that a table can be laid out for it.

    What a terminal would act on, such as ESC in the name of a module, is escaped.
    """
    text = errors.printable(text, limit=None)
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return spelled(text)
    return text


def spelled(text: str) -> str:
    """`text` in ASCII; what has no spelling becomes a question mark."""
    pieces: list[str] = []
    for raised, signs in itertools.groupby(text, _raised):
        word = "".join(map(_spell, signs))
        pieces.append(f"^{word}" if raised else word)
    return "".join(pieces)


def _spell(sign: str) -> str:
    if sign.isascii():
        return sign
    if sign in _SIGNS:
        return _SIGNS[sign]
    if unicodedata.combining(sign):
        return ""
    kind, _, letter = unicodedata.name(sign, "").partition(" LETTER ")
    if kind.startswith("GREEK") and letter.isalpha():
        return letter.capitalize() if "CAPITAL" in kind else letter.lower()
    parts = unicodedata.normalize("NFKD", sign)
    return "?" if parts == sign else spelled(parts)


def _raised(sign: str) -> bool:
    return unicodedata.decomposition(sign).startswith("<super>")


def _handle(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return spelled(error.object[error.start : error.end]), error.end
