"""Writes the tables of metrics in the docs from the registry: `python tools/metrics_table.py`.

A table stands between `<!-- metrics: probe -->` or `<!-- metrics: monitor -->` and the next
`<!-- end -->`.
"""

import re
from pathlib import Path

from joma.probes.metrics import MONITORED, PROBED

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ("probes.md", "monitor.md")
_MARKED = re.compile(r"(<!-- metrics: (\w+) -->\n\n).*?(\n<!-- end -->)", re.DOTALL)


def table(which: str) -> str:
    """Return the table of the metrics that a "probe" or a "monitor" can measure."""
    rows = ["| metric | per | is | measured |", "|---|---|---|---|"]
    for name, metric in (PROBED if which == "probe" else MONITORED).items():
        when = "by default" if metric.by_default else "on request"
        if which == "monitor":
            when = str(metric.monitored)
        sentence = metric.sentence.replace("|", "\\|")
        rows.append(f"| `{name}` | {metric.per} | {sentence} | {when} |")
    return "\n".join(rows) + "\n"


def page(name: str) -> str:
    """Return a page of the docs with its tables as the registry has them."""
    text = (DOCS / name).read_text(encoding="utf-8")
    return _MARKED.sub(lambda found: found[1] + table(found[2]) + found[3], text)


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(page(name), encoding="utf-8")
