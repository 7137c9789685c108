"""Hook of mkdocs: TeX between dollar signs becomes MathML when the pages are built.

The pages then need neither a script nor a network to show an equation. `$…$` stands in a line,
`$$…$$` is displayed. Code is left alone.
"""

import re
from typing import Any

from latex2mathml.converter import convert

_CODE_OR_TEX = re.compile(
    r"(?P<fence>^(?P<indent> *)(?P<ticks>```+).*?^(?P=indent)(?P=ticks) *$)"
    r"|(?P<code>(?P<tick>`+)(?!`).+?(?<!`)(?P=tick)(?!`))"
    r"|\$\$(?P<displayed>.+?)\$\$"
    r"|(?<![\\$])\$(?!\s)(?P<inline>[^$\n]*(?:\n[^$\n]+)*?)(?<![\s\\])\$(?!\d)",
    flags=re.DOTALL | re.MULTILINE,
)
_NAME = r"<m[io]>([a-z]{2,})</m[io]>"
_OPENS = r"(?:<mo[^>]*>(?:&#x00028;|\(|\[|&#x0007B;)|<mspace|</m)"
_ENDS = r"(</m[in]>|</msub>|</msup>|</msubsup>|</msqrt>|</mfrac>|&#x00029;</mo>|\]</mo>)"
_LONG = 60
"""Characters of TeX from which on a formula in a line may be wider than a phone."""
_SPACE = '<mspace width="0.167em" />'


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace TeX by placeholders, so that Markdown does not read it."""
    found: list[str] = []

    def keep(match: re.Match[str]) -> str:
        if match["fence"] or match["code"]:
            return match[0]
        found.append(mathml(match["displayed"] or match["inline"], bool(match["displayed"])))
        return f"xMATHMLx{len(found) - 1}x"

    text = _CODE_OR_TEX.sub(keep, markdown)
    page.meta["mathml"] = found
    return text


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Put the equations where their placeholders are."""
    found = page.meta.get("mathml", [])
    return re.sub(r"xMATHMLx(\d+)x", lambda match: found[int(match[1])], html)


def mathml(tex: str, displayed: bool) -> str:
    """Return TeX as MathML, with the spacing and alignment that browsers do not infer.

    Args:
        tex: TeX without its dollar signs.
        displayed: Whether the equation stands on a line of its own.
    """
    made = convert(" ".join(tex.split()), display="block" if displayed else "inline")
    made = re.sub(_NAME, r"<mi>\1</mi>", made)
    made = re.sub(rf"(<mi>[a-z]{{2,}}</mi>)(?!{_OPENS})", rf"\1{_SPACE}", made)
    made = re.sub(rf"{_ENDS}(<mi>[a-z]{{2,}}</mi>)", rf"\1{_SPACE}\2", made)
    made = re.sub(r'columnalign="(\w+)"', r'class="\1"', made)
    made = made.replace("<mover><mi>", '<mover accent="true"><mi>')
    made = made.replace("<mover><mrow><mi>", '<mover accent="true"><mrow><mi>')
    made = re.sub(r'<mo stretchy="true">&#x000AF;</mo>', "<mo>&#x000AF;</mo>", made)
    if displayed:
        return f'<div class="equation">{made}</div>'
    return f'<span class="formula">{made}</span>' if len(tex) > _LONG else made
