"""Pages for a browser: one self-contained file of one run or several, live or not.

A page is made of a template, a style sheet, our script and uPlot, all in `assets`, and of the
payloads of its runs as JSON. It loads nothing from anywhere. What may live here is what turns run
folders into such pages; the script shows, and computes nothing that is not on the page.

- `payload`: everything a page shows of a run, ready for JSON; `damaged_payload` of one that cannot
  be read.
- `page`: the HTML of one run or several; `index_page`: that of a list of runs, `index_row` what it
  shows of one.
- `read_reference`: recorded curves from a CSV file, to be drawn next to those of a run.
- `is_report`: whether a file is such a page.
- `run_titles`: what runs are called, so that they can be told apart.
"""

from joma.report.html._page import index_page, index_row, is_report, page, run_titles
from joma.report.html._payload import damaged_payload, payload
from joma.report.html._reference import read_reference

__all__ = [
    "damaged_payload",
    "index_page",
    "index_row",
    "is_report",
    "page",
    "payload",
    "read_reference",
    "run_titles",
]
