"""Maps of architectures in files."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from joma.errors import JomaError
from joma.models import Architecture, Part, Place, Rows, find_weights, load_map

TOML = """
name = "own"
prefixes = ["", "body."]
embedding = "table"
layer = "blocks.{layer}"
attention = "blocks.{layer}"
mlp_down = "blocks.{layer}.second"
heads = 2
[query]
name = "blocks.{layer}.mix"
part = { index = 0, of = 3, by_head = true }
[key]
name = "blocks.{layer}.mix"
part = { index = 1, of = 3, by_head = true }
[value]
name = "blocks.{layer}.mix"
part = { start = 4, stop = 6, of = 6 }
[mlp_lower]
name = "blocks.{layer}.first"
transposed = true
"""
MAP: dict[str, Any] = tomllib.loads(TOML)


def _written(folder: Path, contents: Any, name: str = "map.json") -> Path:
    path = folder / name
    path.write_text(contents if isinstance(contents, str) else json.dumps(contents))
    return path


def test_json_and_toml_make_the_same_map(tmp_path: Path):
    expected = Architecture(
        name="own",
        model_types=(),
        prefixes=("", "body."),
        embedding=Place("table"),
        query=Place("blocks.{layer}.mix", Part(0, 3, by_head=True)),
        key=Place("blocks.{layer}.mix", Part(1, 3, by_head=True)),
        value=Place("blocks.{layer}.mix", Rows(4, 6, 6)),
        mlp_lower=Place("blocks.{layer}.first", transposed=True),
        layer="blocks.{layer}",
        attention="blocks.{layer}",
        mlp_down="blocks.{layer}.second",
        heads=2,
    )
    assert load_map(_written(tmp_path, MAP)) == expected
    assert load_map(_written(tmp_path, TOML, "map.toml")) == expected


def test_a_map_finds_what_reading_the_tree_does_not(tmp_path: Path):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Parameter(torch.randn(12, 4))
            self.first = nn.Parameter(torch.randn(4, 6))
            self.second = nn.Linear(6, 4)

    body = nn.Module()
    body.table = nn.Parameter(torch.randn(9, 4))
    body.blocks = nn.ModuleList(Block() for _ in range(2))
    model = nn.Module()
    model.body = body
    block: Any = model.get_submodule("body.blocks.1")
    assert "query" in find_weights(model).missing
    found = find_weights(model, architecture=load_map(_written(tmp_path, MAP)))
    attention, mlp = found.attentions[1], found.mlps[1]
    heads = block.mix.unflatten(0, (2, 3, 2))
    assert torch.equal(attention.weights[0].of(model), heads[:, 0].flatten(0, 1))
    assert attention.module == "body.blocks.1"
    assert torch.equal(mlp.weights[0].of(model), block.first.T)
    assert mlp.down_path == "body.blocks.1.second"
    assert found.missing == {"output": "the map of own does not name it"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"querry": "x"}, "entries among .*got 'querry'"),
        ({"query": 3}, "query must be a name or a table of name, part, transposed, got 3"),
        ({"query": {"nam": "x"}}, "query must have entries among name, part, transposed"),
        ({"query": {"name": "a.{layer}", "transposed": 1}}, "transposed must be true or false"),
        ({"query": {"name": "a.{layer}", "part": {"index": 3, "of": 3}}}, "0 <= index < of"),
        (
            {"query": {"name": "a.{layer}", "part": {"start": 3, "stop": 2, "of": 3}}},
            "start < stop",
        ),
        ({"embedding": "a.{layer}"}, "embedding must not have"),
        ({"prefixes": "model."}, "prefixes must be a list of names"),
        ({"heads": 0}, "heads must be a number or an attribute"),
    ],
)
def test_mistakes_are_reported_in_one_sentence(
    change: dict[str, Any], message: str, tmp_path: Path
):
    path = _written(tmp_path, MAP | change)
    with pytest.raises(JomaError, match=message) as refused:
        load_map(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("map.json", "{", "must be a JSON file"),
        ("map.json", "[1]", "must hold a table of entries, got a list"),
        ("map.json", "[" * 100_000, "must be a JSON file"),
        ("map.toml", "a = ", "must be a TOML file"),
        ("map.yaml", "a: 1", r"must be a \.json or \.toml file"),
        ("map.json", "{}", "must have embedding, query, key, mlp_lower, layer, attention"),
    ],
)
def test_files_that_hold_no_map(name: str, contents: str, message: str, tmp_path: Path):
    with pytest.raises(JomaError, match=message) as refused:
        load_map(_written(tmp_path, contents, name))
    assert "\n" not in str(refused.value)


def test_the_example_of_the_documentation(tmp_path: Path):
    page = Path(__file__).parents[2] / "docs" / "probes.md"
    (example,) = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = load_map(_written(tmp_path, example, "map.toml"))
    assert found.name == "map"
    assert found.query == Place("blocks.{layer}.mix.qkv.weight", Part(0, 3, by_head=True))
