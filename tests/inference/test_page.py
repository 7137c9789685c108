"""The policy that the documentation writes: it does what the page says."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from joma.inference import Held, cache

PAGE = Path(__file__).parents[2] / "docs" / "inference.md"


@pytest.fixture(scope="module")
def names() -> dict:
    """What the examples of the page define."""
    found: dict = {"__name__": "page", "print": lambda *_: None}
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL))
    exec(compile(code, PAGE.name, "exec"), found)
    return found


def test_is_at_most_thirty_lines():
    (code,) = re.findall(r"```python\n(from dataclasses.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(code.splitlines()) <= 30


def test_keeps_the_last_and_an_even_sample_of_the_others(names):
    policy = names["Spread"](spread=8, recent=4)
    held = list(range(13))
    for seen in range(13, 400):
        position = torch.tensor(held, dtype=torch.int32)[None, None]
        slots = Held(position, torch.tensor([[[seen]]]), None, 0)
        held.pop(int(policy.priority(slots)[0, 0].argmin()))
        held.append(seen)
        assert {*range(seen - 3, seen)} <= set(held)
    older = sorted(held)[:8]
    gaps = {later - one for one, later in pairwise(older)}
    assert older[0] == 0
    assert max(gaps) <= 2 * min(gaps)


def test_with_room_for_all_changes_nothing(names):
    model, ids = names["model"], names["ids"]
    settings = {"max_new_tokens": 12, "do_sample": False}
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    with cache(model, names["Spread"](spread=60, recent=30)) as kv:
        assert torch.equal(model.generate(ids, past_key_values=kv, **settings), plain)
    with cache(model, names["Spread"](spread=4, recent=4)) as kv:
        model.generate(ids, past_key_values=kv, **settings)
        assert kv.held == [8, 8]


def test_what_the_page_prints(names):
    assert names["kv"].held == [16, 16]
    assert names["limited"] < 17 * 2 * (2 * 2 * 8 * 4 + 16) + 100
    assert (names["second"].shape[1], len(names["first"][0])) == (88, 68)
