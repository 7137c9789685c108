"""Ways in which a monitor could harm a training or another run, found by attacking it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import joma
from joma.errors import JomaError
from joma.runs import Run


def trained(folder: Path | str, steps: int, **options: object) -> joma.Monitor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    options = {"inputs": torch.ones(1, 4), "every": 1, "budget": None, **options}
    with joma.Monitor(model, run=folder, **options) as monitor:  # type: ignore[arg-type]
        for _ in range(steps):
            monitor.step(model(torch.ones(1, 4)).sum())
    return monitor


def last_step(folder: Path) -> int:
    return int(Run.open(folder).metrics.read("loss")["step"].max())


def test_a_run_that_only_has_a_similar_name_is_not_resumed(tmp_path: Path) -> None:
    trained(tmp_path / "lr", 3)
    trained(tmp_path / "lr-20", 9)
    monitor = trained(tmp_path / "lr", 1, step=2)
    assert monitor.run is not None
    assert monitor.run.path == tmp_path / "lr"
    assert last_step(tmp_path / "lr-20") == 9


def test_the_newest_run_made_instead_of_another_is_resumed(tmp_path: Path) -> None:
    trained(tmp_path / "mine", 3)
    trained(tmp_path / "mine", 5)
    monitor = trained(tmp_path / "mine", 1, step=4)
    assert monitor.run is not None
    assert monitor.run.path == tmp_path / "mine-2"
    assert "mine-2" in monitor.summary()
    assert last_step(tmp_path / "mine") == 3
    assert last_step(tmp_path / "mine-2") == 5


def test_a_run_that_somebody_else_writes_is_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path / "live", 6)

    def refuse(run: Run) -> None:
        raise JomaError(f"run folder {run.path} is in use by another process")

    monkeypatch.setattr(Run, "locked", refuse)
    with pytest.raises(JomaError, match="in use"):
        trained(tmp_path / "live", 1, step=2)
    assert last_step(tmp_path / "live") == 6


def test_a_damaged_run_is_left_alone_and_a_new_one_made(tmp_path: Path) -> None:
    trained(tmp_path / "mine", 3)
    (part,) = (tmp_path / "mine" / "metrics").glob("part-*.parquet")
    part.write_bytes(part.read_bytes()[:-40])
    monitor = trained(tmp_path / "mine", 2, step=3)
    assert monitor.run is not None
    assert monitor.run.path == tmp_path / "mine-2"
    assert "the earlier run not resumed" in monitor.summary()


class Collecting(nn.Module):
    """Collects auxiliary losses in a list and in a list within a dict, as mixtures do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.losses: list[Tensor] = []
        self.by_name: dict[str, list[Tensor]] = {"balance": []}

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.losses.append(x.square().mean())
        self.by_name["balance"].append(x.mean())
        return self.attention(x, x, x)[0]


@pytest.mark.parametrize("watched", [False, True])
def test_losses_collected_in_lists_are_the_trainings_own(watched: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Collecting()
    monitor = joma.Monitor(model, every=1, budget=None, run=tmp_path / "run") if watched else None
    for _ in range(3):
        model(torch.randn(2, 4, 8))
        assert len(model.losses) == len(model.by_name["balance"]) == 1
        loss = model.losses[0] + model.by_name["balance"][0]
        if monitor is not None:
            monitor.step(loss)
        assert model.losses[0] + model.by_name["balance"][0] == loss
        assert len(model.losses) == len(model.by_name["balance"]) == 1
        model.losses.clear()
        model.by_name["balance"].clear()
    if monitor is not None:
        assert monitor.run is not None
        assert len(monitor.run.metrics.read("attention_entropy")["step"])
        monitor.close()


class Attention(nn.Module):
    """Attention of one's own."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        made = self.qkv(x).view(*x.shape[:2], self.num_heads, self.head_dim, 3)
        q, k, v = made.permute(4, 0, 2, 1, 3)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.fc1, self.fc2 = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.fc2(torch.relu(self.fc1(x)))


def test_activity_of_mlps_is_seen_where_attention_is_not(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 8, 16)
    with joma.Monitor(model, every=1, budget=None, run=tmp_path / "run") as monitor:
        loss = model(x).square().mean()
        loss.backward()
        monitor.step(loss)
    assert monitor.run is not None
    assert len(monitor.run.metrics.read("mlp_dead")["step"]) == 2
    assert "mlp_dead not measured" not in monitor.summary()
