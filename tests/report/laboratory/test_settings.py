"""Settings of the laboratory: their links, their Python calls, and no undefined numbers."""

import html
import re
from typing import Any

import numpy as np
import pytest

from joma.report import laboratory
from tests.report.laboratory._node import evaluate, needs_node, numbers

pytestmark = needs_node

LINKS = (
    "#theorem2",
    "#theorem2&delta=1,0.8&start=0,0.6",
    "#theorem2&delta=1,1,-0.5,0&eta_w=0.3&eta_z=2&tau=0.5&c=0.7&a=3&approach=3",
    "#theorem2&delta=0.001,1e-6,1e-12&mode=descent&step=0.02",
    "#theorem2&delta=1,0.95,0.9,-0.85&nodes=3&seed=4&c=-1&tau=2&approach=3",
    "#theorem2&delta=1,0.5&nodes=2&mode=descent&step=0.01",
    "#theorem1&end=2",
    "#theorem1&attention=linear&activation=linear&eta_z=3&eta_w=0.5&tau=2&end=1",
    "#theorem1&attention=sigmoid&activation=softplus&tokens=3&nodes=1",
    "#theorem1&attention=softmax&mode=descent&step=0.1",
    "#theorem3",
    "#theorem3&family=gaussian&distance=0.3&length=4&bias=2",
    "#theorem3&family=laplace&distance=5",
    "#eqn6",
    "#eqn6&mu=6,-2,0&end=1000&scale=0.333",
    "#hierarchies",
    "#hierarchies&rho=0.999&depth=12&classes=20&on=0&off=0.99&trees=1000",
)


@pytest.fixture(scope="module")
def computed() -> dict[str, Any]:
    return dict(zip(LINKS, evaluate([("pythonAndNumbers", [link]) for link in LINKS]), strict=True))


@pytest.mark.parametrize("link", LINKS)
def test_the_python_call_runs_and_computes_what_is_drawn(computed, link):
    answer = computed[link]
    assert answer["notes"] == []
    names: dict[str, Any] = {}
    exec(answer["python"], names)
    simulated = {"simulated": "v", "logits": "z"}
    for name, value in answer["numbers"].items():
        theirs = numbers(value)
        if name in simulated:
            trajectory = names["trajectory" if answer["section"] == "theorem1" else "simulated"]
            ours = getattr(trajectory, simulated[name]).reshape(theirs.shape)
            np.testing.assert_allclose(theirs, ours, rtol=1e-6, atol=1e-9, err_msg=name)
        else:
            np.testing.assert_allclose(theirs, names[name], rtol=1e-9, atol=1e-12, err_msg=name)


def test_the_settings_that_the_page_suggests_are_settings():
    links = [html.unescape(one) for one in re.findall(r'<li><a href="(#[^"]*)"', laboratory.page())]
    assert len(links) == 15
    for link, read in zip(links, evaluate([("fromLink", [one]) for one in links]), strict=True):
        assert read["notes"] == [], link


def test_a_link_holds_all_settings():
    (first,) = evaluate([("fromLink", ["#theorem2&delta=1,-0.5,1e-12&tau=0.37&mode=descent"])])
    (link,) = evaluate([("toLink", [first["section"], first["settings"]])])
    (again,) = evaluate([("fromLink", [link])])
    assert first["notes"] == again["notes"] == []
    assert again["settings"] == first["settings"]
    assert again["settings"]["delta"] == [1, -0.5, 1e-12]
    assert again["settings"]["tokens"] == 3


DAMAGED = (
    ("#nowhere", "theorem2", "There is no part “nowhere”."),
    ("#eqn6&tau=1", "eqn6", "There is no setting “tau”."),
    ("#eqn6&mu=1,x", "eqn6", "“x” is not a number for μ, target of each token"),
    ("#eqn6&mu=1,NaN", "eqn6", "“NaN” is not a number"),
    ("#hierarchies&rho=7", "hierarchies", "ρ of every edge: 7 became 1."),
    ("#hierarchies&depth=2&distance=38", "hierarchies", None),
    ("#theorem1&attention=none", "theorem1", "“none” is no choice for Attention σ"),
    ("#theorem2&delta=%E0%A4%A", "theorem2", "is not a number"),
    ("#theorem2&__proto__=1", "theorem2", "There is no setting “__proto__”."),
    ("#constructor", "theorem2", "There is no part “constructor”."),
)


def test_a_damaged_link_is_read_as_far_as_possible_and_says_so():
    answers = evaluate([("fromLink", [link]) for link, _, _ in DAMAGED])
    for (link, part, note), read in zip(DAMAGED, answers, strict=True):
        assert read["section"] == part
        said = any(note in one for one in read["notes"]) if note else read["notes"] == []
        assert said, (link, read["notes"])
