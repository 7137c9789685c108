"""README and docs speak of what exists."""

import importlib
import inspect
import pkgutil
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from joma import theory
from joma.experiments import EXPERIMENTS
from joma.experiments.claims import CLAIMS, errata
from joma.experiments.claims.errata import ERRATA
from joma.experiments.theory_figures import cooccurrence
from joma.runs import RunState
from joma.train.findings import KINDS
from joma.train.language import Config
from joma.train.monitor import METRICS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
THEORY_PAGES = {
    page.stem: page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("docs/theory/*.md"))
}
IDS = {claim.id for claim in CLAIMS}


def test_counts_are_current():
    assert f"{len(CLAIMS)} claims are checked, as printed and as derived." in README
    grouped = errata.group(ERRATA)
    assert list(grouped[errata.TALK]) == ["theorem-2-sqrt2"]
    drafts = sum(map(len, grouped[errata.NOTE].values()))
    assert (
        f"The JoMA preprint has {errata.count(errata.PREPRINT, ERRATA)}; the talk repeats one slip "
        "of the preprint and has none of its own; an unpublished draft note "
        f"has {drafts}."
    ) in " ".join(README.split())


def test_the_errata_page_is_what_the_tool_writes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool = importlib.import_module("errata_page")
    assert (ROOT / "docs" / "errata.md").read_text(encoding="utf-8") == tool.page()


def test_commands_name_what_exists():
    blocks = "".join(re.findall(r"```console\n(.*?)```", README, flags=re.DOTALL))
    commands = re.findall(r"joma (verify|reproduce) ([^#\n]*)", blocks)
    assert commands
    for command, rest in commands:
        words = shlex.split(rest)
        if command == "reproduce":
            assert set(words) <= {*EXPERIMENTS, "--list"}, rest
        elif "--claim" in words:
            assert words[words.index("--claim") + 1] in IDS, rest


def test_the_examples_of_learning_a_hierarchy_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # they leave a run folder
    page = (ROOT / "docs" / "latents.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(examples) == 2
    exec(compile("\n".join(examples), "docs/latents.md", "exec"), {})
    assert (tmp_path / "runs" / "latents" / "metrics").is_dir()


def test_the_examples_of_measuring_a_model_run(capsys):
    page = (ROOT / "docs" / "probes.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(examples) == 7
    exec(compile("\n".join(examples), "docs/probes.md", "exec"), {})
    assert "attention_entropy 0 0" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")  # of the trainers, which are other people's
def test_the_examples_of_watching_a_training_run(tmp_path, monkeypatch, capsys):
    for package in ("accelerate", "lightning", "tensorboard"):
        pytest.importorskip(package, reason=f"the page's examples need {package}")
    monkeypatch.chdir(tmp_path)  # they leave run folders
    page = (ROOT / "docs" / "monitor.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(examples) == 8
    exec(compile("\n".join(examples), "docs/monitor.md", "exec"), {"__name__": "page"})
    said = capsys.readouterr().out
    assert said.count("steps watched") == 3
    assert "stopped: " in said
    for folder in ("runs/watched", "runs/lightning", "out/monitor"):
        assert (tmp_path / folder / "findings.json").is_file()
    assert list((tmp_path / "runs" / "board").iterdir())


def test_the_examples_of_run_folders_run(tmp_path, monkeypatch, capsys, pictures):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(examples) == 4
    exec(compile("\n".join(examples), "docs/runs.md", "exec"), {"__name__": "page"})
    said = capsys.readouterr().out
    assert "runs/mine ended 40" in said
    assert "[0, 1]" in said
    assert (tmp_path / "runs" / "mine" / "figures" / "training.png").is_file()
    states = re.findall(r"^\| (\w+) \| ", page, flags=re.MULTILINE)[1:8]
    assert set(states) == set(get_args(RunState))


@pytest.mark.filterwarnings("ignore")  # of the trainers, which are other people's
def test_the_examples_of_training_with_galore_run(tmp_path, monkeypatch, capsys):
    for package in ("accelerate", "lightning"):
        pytest.importorskip(package, reason=f"the page's examples need {package}")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "galore.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(examples) == 8
    exec(compile("\n".join(examples), "docs/galore.md", "exec"), {"__name__": "page"})
    said = capsys.readouterr()
    assert "model.layers.0.self_attn.q_proj.weight (32, 32) right 8 1" in said.out
    sentence = re.search(r"says `(GaLore projects.*?)`", " ".join(page.split()))
    assert sentence is not None
    assert sentence[1] in said.err
    (settings,) = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    Config.of({"model": {"type": "llama"}, **tomllib.loads(settings)})


def test_the_page_of_the_monitor_names_what_it_measures_and_finds():
    page = (ROOT / "docs" / "monitor.md").read_text(encoding="utf-8")
    assert [name for name in METRICS if f"`{name}" not in page] == []
    assert [kind for kind in KINDS if f"| `{kind}` |" not in page] == []


def _python(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def _run_page(page: Path) -> None:
    """Run the Python of a page in its order, as somebody does who pastes all of it."""
    code = "\n".join(_python(page))
    exec(compile(code, page.name, "exec"), {"__name__": "page"})


@pytest.mark.filterwarnings("ignore")  # of the trainer, which is other people's
def test_the_examples_of_the_readme_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    monkeypatch.chdir(tmp_path)  # they leave run folders
    assert len(_python(ROOT / "README.md")) == 3
    _run_page(ROOT / "README.md")
    said = capsys.readouterr().out
    assert "The learning rate 0.029 is too high" in said
    assert said.count("steps watched") == 2
    assert (tmp_path / "out" / "monitor" / "findings.json").is_file()


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_the_examples_of_the_tutorial_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # they leave run folders
    _run_page(ROOT / "docs" / "tutorial.md")
    said = capsys.readouterr().out
    assert "The learning rate 0.03 is too high" in said
    assert (tmp_path / "runs" / "low" / "model" / "config.json").is_file()


TRIED_APART = {"latents", "probes", "monitor", "galore", "tutorial", "runs"}
"""Pages whose examples have a test of their own."""
OTHER_PAGES = [
    page
    for page in sorted(ROOT.glob("docs/**/*.md"))
    if page.stem not in TRIED_APART and _python(page)
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", OTHER_PAGES, ids=lambda page: page.stem)
def test_the_examples_of_other_pages_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # each page in a folder of its own
    _run_page(page)


def test_examples_of_two_pages_never_write_to_the_same_run():
    owners: dict[str, str] = {}
    for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))):
        written = re.findall(r'(?:run|out)=\s*"(runs/[\w-]+)"', "\n".join(_python(page)))
        for name in set(written):
            assert owners.setdefault(name, page.name) == page.name, name


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/**/*.md")), ids=lambda p: p.name)
def test_pages_reference_claims_that_exist(page):
    for name in re.findall(r"--claim (\S+)", page.read_text(encoding="utf-8")):
        assert name in IDS


@pytest.mark.parametrize("page", THEORY_PAGES)
def test_pages_are_in_the_navigation(page):
    assert f"theory/{page}.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert f"(theory/{page}.md)" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


def test_errata_boxes_link_to_every_erratum():
    pages = "".join(THEORY_PAGES.values())
    linked = re.findall(r"\(\.\./errata\.md#([a-z0-9-]+)\)", pages)
    assert set(linked) - {"clarifications"} == {erratum.id for erratum in ERRATA}


@pytest.mark.parametrize("page", THEORY_PAGES)
def test_theory_pages_end_with_their_errata(page):
    box = THEORY_PAGES[page].partition('!!! note "Errata"\n')[2]
    assert box
    assert all(line.startswith("    ") or not line for line in box.splitlines())


def _public() -> Iterator[tuple[str, object]]:
    """The functions and classes of the theory, under every public name they have."""
    for found in pkgutil.iter_modules(theory.__path__, "joma.theory."):
        name = found.name.rpartition(".")[2]
        if name.startswith("_") or name == "as_printed":
            continue
        module = importlib.import_module(found.name)
        listed = getattr(module, "__all__", None)
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or not (
                inspect.isfunction(value) or inspect.isclass(value)
            ):
                continue
            if value.__module__ == found.name if listed is None else attribute in listed:
                yield f"{found.name}.{attribute}", value


def test_every_theory_function_is_linked_from_a_theory_page():
    linked = set(re.findall(r"\[(joma\.theory\.[\w.]+)\]", "".join(THEORY_PAGES.values())))
    public = list(_public())
    reached = {id(value) for name, value in public if name in linked}
    assert len(public) > 100
    assert [name for name, value in public if id(value) not in reached] == []


def test_pictures_say_what_they_show():
    for page in ROOT.glob("docs/**/*.md"):
        for words in re.findall(r"!\[(.*?)\]\(", page.read_text(encoding="utf-8")):
            assert len(words) > 20, page


def test_hierarchy_table_is_what_the_figure_draws():
    data = cooccurrence.compute(seed=0)
    rows = dict(re.findall(r"^\| ([^|]+?) \| (.*) \|$", THEORY_PAGES["hblt"], flags=re.MULTILINE))

    def numbers(label: str) -> list[str]:
        return [cell.strip() for cell in rows[label].split("|")]

    def written(values: np.ndarray, digits: int) -> list[str]:
        return [f"{value:.{digits}f}" for value in values]

    assert numbers("derived") == written(data.derived, 4)
    assert numbers(r"with $\rho_0$ as printed") == written(data.printed, 4)
    sampled = numbers(f"{cooccurrence.SAMPLES:,} sampled trees (standard error)")
    errors = [f" ({1000 * error:.0f})" for error in data.standard_error]
    assert sampled == [a + b for a, b in zip(written(data.sampled, 3), errors, strict=True)]
