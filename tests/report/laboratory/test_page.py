"""The laboratory's page as text, and the command that writes it."""

import base64
import hashlib
import re
from pathlib import Path

from joma.report import laboratory
from tests.cli._command import joma, sentence


def test_the_page_is_one_small_file_that_refers_to_nothing_else():
    page = laboratory.page()
    assert len(page.encode()) < 150_000
    assert re.findall(r"\{\{[^}]*\}\}", page) == []
    addresses = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert all(one.startswith("#") or one == "data:," for one in addresses)
    assert "http:" not in page.replace('http-equiv="', "")
    assert "https:" not in page


def test_the_policy_names_the_script_and_style_of_the_page():
    page = laboratory.page()
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}(?: [^>]*)?>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in page
    assert "Content-Security-Policy" not in laboratory.page(standalone=False)


def test_links_of_a_site_are_escaped():
    page = laboratory.page(home='/?a="b"&c', errata="errata.html")
    assert 'href="/?a=&quot;b&quot;&amp;c"' in page
    assert 'href="errata.html#theorem-2-sqrt2"' in page
    assert 'class="home"' not in laboratory.page()


def test_errata_that_are_named_exist():
    errata = Path(__file__).parents[3] / "docs" / "errata.md"
    known = set(re.findall(r"\{ #([\w-]+) \}", errata.read_text(encoding="utf-8")))
    named = set(re.findall(r'errata\.html#([\w-]+)"', laboratory.page(errata="errata.html")))
    assert named
    assert named <= known


def test_the_command_writes_the_page_whole(tmp_path):
    path = tmp_path / "lab.html"
    result = joma("laboratory", "--out", str(path))
    assert result.exit_code == 0
    assert path.read_text(encoding="utf-8") == laboratory.page()
    assert [one.name for one in tmp_path.iterdir()] == ["lab.html"]
    assert "--out must name a file" in sentence(joma("laboratory", "--out", str(tmp_path)))
