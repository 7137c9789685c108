"""What a smaller cache would cost: the words, the payload, and the section in a browser."""

import math
import re

import pytest

from joma.errors import JomaError
from joma.report.cache_cost import columns_of, quality, read_costs, sentence, speed
from joma.report.html import page, payload
from joma.runs import Run
from tests.report._browser import DARK, DESKTOP, PHONE, launched, opened, violations
from tests.report._runs import HOSTILE, cache_row, cache_run, made_run


class TestWords:
    @pytest.mark.parametrize(
        ("cost", "error", "word"),
        [
            (0.12, 0.02, "worse"),
            (-0.12, 0.02, "better"),
            (0.03, 0.02, "no difference measured"),
            (0.0, 0.0, "no difference measured"),
            (0.5, math.nan, "too few for an error"),
            (math.nan, math.nan, "not measured"),
        ],
    )
    def test_quality_follows_from_the_error(self, cost, error, word):
        said = quality(cache_row("window:n=8", text_cost=cost, text_error=error))
        assert word in said
        assert ("worse" in said) == (word == "worse")

    @pytest.mark.parametrize(
        ("low", "high", "word"),
        [
            (1.1, 1.4, "times as fast"),
            (0.7, 0.9, "times the full cache's time"),
            (0.9, 1.2, "no difference"),
        ],
    )
    def test_a_speed_is_stated_only_where_its_interval_leaves_one_out(self, low, high, word):
        row = cache_row("window:n=8", speed=(low + high) / 2, speed_low=low, speed_high=high)
        assert word in speed(row)
        assert ("fast" in speed(row)) == (low > 1)

    def test_a_single_round_has_no_interval(self):
        row = cache_row("window:n=8", speed=1.3, speed_low=math.nan, speed_high=math.nan)
        assert speed(row) == "1.30 times as fast in a single round, which has no error"

    def test_what_was_not_measured(self):
        row = cache_row("window:n=8", timed=0, speed=math.nan, text_tokens=0)
        assert "speed not measured" in sentence(row)
        assert "the full cache's continuation" in sentence(row)


class TestTable:
    def test_read_back_with_the_full_cache_first(self, tmp_path):
        run = Run.create("generate", {}, out=tmp_path / "run")
        rows = [cache_row("window:n=8"), cache_row("full", keys=math.nan, share=1.0)]
        run.write_table("cache_cost", columns_of(rows))
        full, window = read_costs(run)
        assert full["cache"] == "full"
        assert math.isnan(full["keys"])
        assert window == rows[0]

    def test_a_table_of_another_form(self, tmp_path):
        run = Run.create("generate", {}, out=tmp_path / "run")
        run.write_table("cache_cost", {"cache": ["full"]})
        with pytest.raises(JomaError, match="has no column 'policy'"):
            read_costs(run)

    def test_payload(self, tmp_path):
        record = payload(cache_run(tmp_path / "run"))
        assert len(record["cache"]["rows"]) == 10
        assert len(record["cache"]["sentences"]) == 9
        assert record["cache"]["rows"][0]["keys"] is None
        assert payload(made_run(tmp_path / "other"))["cache"] is None
        assert "What a smaller cache would cost" in page([record])


@pytest.fixture(scope="module")
def browser():
    with launched() as started:
        yield started


def test_section_in_a_browser(browser, tmp_path):
    run = cache_run(tmp_path / "run")
    columns = run.read_table("cache_cost")
    names = ["full", HOSTILE, *columns["cache"][2:]]
    run.write_table("cache_cost", {**columns, "cache": names})
    path = tmp_path / "page.html"
    path.write_text(page([payload(run)]), encoding="utf-8")
    for options in (DESKTOP, PHONE, DARK):
        with opened(browser, path.as_uri(), **options) as shown:
            assert shown.text_content("#cache h2") == "What a smaller cache would cost"
            assert shown.locator("#cache .cache-figure > svg title").count() == 9
            assert shown.locator("#cache tbody tr").count() == 10
            assert shown.text_content("#cache tbody tr:nth-child(2) th") == HOSTILE
            before = shown.get_attribute("#cache .path", "stroke")
            shown.click("#theme")
            assert shown.get_attribute("#cache .path", "stroke") != before
            # Lower on the page is a smaller cost.
            places = shown.evaluate(
                "[...document.querySelectorAll('#cache .path')].map((it) => it.getAttribute('d'))"
            )
            for path_of_policy in places:
                heights = [float(y) for y in re.findall(r" ([\d.]+)", path_of_policy)]
                assert heights == sorted(heights)
            wide = shown.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0
            assert violations(shown) == []


def test_one_cache_has_no_chart(browser, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page([payload(cache_run(tmp_path / "run", rows=1))]), encoding="utf-8")
    with opened(browser, path.as_uri(), **DESKTOP) as shown:
        assert shown.locator("#cache .cache-figure").count() == 0
        assert shown.locator("#cache tbody tr").count() == 2
        assert "+4.000 ± 0.020" in shown.text_content("#cache")
