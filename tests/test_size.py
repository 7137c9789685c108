"""The package stays as small as `pyproject.toml` says."""

import ast
import io
import tokenize
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(text: str) -> int:
    """Return the number of lines with code: no blank lines, comments or docstrings."""
    strings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - strings)


def test_code_lines_are_counted_as_said():
    assert code_lines('"""Doc."""\n\n# why\nvalue = (\n    1\n)\n') == 3


def test_the_package_does_not_outgrow_its_budget():
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["joma"]
    files = sorted((ROOT / "src").rglob("*.py"))
    lines = sum(code_lines(file.read_text(encoding="utf-8")) for file in files)
    said = "raise it in pyproject.toml, with the reason in the commit, or remove something"
    assert lines <= limits["code_lines"], said
    assert len(files) <= limits["modules"], said
