"""Payloads in fewer characters: words and steps that many series share are written once."""

from typing import Any

_WORDS = ("name", "metric", "module", "kind")


def packed(payload: dict[str, Any]) -> dict[str, Any]:
    """Return a payload in the form that `unpack` of the page's script reads.

    Args:
        payload: What `payload` returns.
    """
    words: dict[str, int] = {}
    grids: dict[tuple[int, ...], int] = {}

    def word(text: str | None) -> int | None:
        return None if text is None else words.setdefault(text, len(words))

    def row(series: dict[str, Any]) -> list[Any]:
        return [
            *(word(series[key]) for key in _WORDS),
            series["layer"],
            series["head"],
            series["member"],
            word(series["role"]),
            grids.setdefault(tuple(series["steps"]), len(grids)),
            series["values"],
            series["marks"] or 0,
            series["total"] if series["thinned"] else None,
            series.get("bound"),
        ]

    drawn = [
        {
            **{k: v for k, v in chart.items() if k != "series"},
            "packed": list(map(row, chart["series"])),
        }
        for chart in payload["charts"]
    ]
    return {**payload, "charts": drawn, "words": list(words), "grids": list(map(list, grids))}
