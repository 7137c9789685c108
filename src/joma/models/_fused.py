"""How queries, keys and values share one matrix: which of its rows are whose."""

from collections.abc import Mapping
from dataclasses import dataclass

from joma.models._weight import Rows

_ALTERNATING = ("query_key_value",)
"""Names of fused modules whose parts alternate by head."""
_ALTERNATING_CLASSES = ("DisentangledSelfAttention", "DebertaSelfAttention", "GPTBigCodeAttention")
_CODEGEN = "CodeGenAttention"
_CODEGEN_PIECES = 4


@dataclass(frozen=True)
class Layout:
    """One way to read a fused matrix.

    Args:
        name: "one after the other", "by head", "in four pieces".
        rows: those of each role.
        heads: of the queries.
        key_heads: of the keys.
    """

    name: str
    rows: Mapping[str, Rows]
    heads: int
    key_heads: int


def layouts(
    out: int, heads: int, width: int, *, name: str = "", class_name: str = ""
) -> list[Layout]:
    """Return the ways a matrix of `out` rows may hold queries, keys and values, likeliest first.

    The number of heads of the keys follows: out = (heads + 2·key_heads)·width.

    Args:
        out: rows of the matrix.
        heads: of the queries.
        width: rows of one head.
        name: what the module is called.
        class_name: the class of the attention that holds it.
    """
    rest = out - heads * width
    if rest <= 0 or rest % (2 * width):
        return []
    key_heads = rest // (2 * width)
    if heads % key_heads:
        return []
    each = heads // key_heads
    queries, keys = heads * width, key_heads * width
    after = Layout(
        "one after the other",
        {
            "query": Rows(0, queries, out),
            "key": Rows(queries, queries + keys, out),
            "value": Rows(queries + keys, out, out),
        },
        heads,
        key_heads,
    )
    group = (each + 2) * width
    by_head = Layout(
        "by head",
        {
            "query": Rows(0, each * width, group),
            "key": Rows(each * width, (each + 1) * width, group),
            "value": Rows((each + 1) * width, group, group),
        },
        heads,
        key_heads,
    )
    ways = [after] if key_heads == 1 else [after, by_head]  # with one head of keys both are one
    if name.lower() in _ALTERNATING or class_name in _ALTERNATING_CLASSES:
        ways.reverse()
    if heads == key_heads and heads % _CODEGEN_PIECES == 0:
        piece = queries // _CODEGEN_PIECES
        pieces = Layout(
            "in four pieces",
            {
                "query": Rows(0, piece, 3 * piece),
                "value": Rows(piece, 2 * piece, 3 * piece),
                "key": Rows(2 * piece, 3 * piece, 3 * piece),
            },
            heads,
            key_heads,
        )
        ways = [pieces, *ways] if class_name == _CODEGEN else [*ways, pieces]
    return ways
