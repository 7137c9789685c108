import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from joma.probes.gradient import gradient_rank


class Small(nn.Module):
    """Embedding, dropout, batch norm and two matrices, one frozen; and one that nothing reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, sparse=True)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.3)
        self.first = nn.Linear(6, 9)
        self.second = nn.Linear(9, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(3, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.dropout(self.norm(self.embedding(tokens)))
        return self.frozen(self.second(torch.relu(self.first(hidden))))


def made() -> tuple[Small, Tensor, Tensor]:
    torch.manual_seed(0)
    return Small(), torch.arange(20) % 11, torch.arange(20) % 4


def by_svd(gradient: Tensor) -> tuple[float, Tensor]:
    """Stable rank, and the energy in the top r directions for every r."""
    squares = torch.linalg.svdvals(gradient.double()) ** 2
    return float(squares.sum() / squares[0]), squares.cumsum(0) / squares.sum()


def test_against_the_svd_of_the_gradients_of_a_backward_pass():
    model, tokens, labels = made()

    def loss() -> Tensor:
        return nn.functional.cross_entropy(model(tokens), labels)

    state = torch.get_rng_state()
    loss().backward()
    torch.set_rng_state(state)
    result = gradient_rank(model, loss, ranks=(1, 2, 3, 100))
    assert set(result) == {"embedding.weight", "first.weight", "second.weight", "unused.weight"}
    for name in ("embedding.weight", "first.weight", "second.weight"):
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        stable, shares = by_svd(gradient)
        found = result[name]
        assert found.name == name
        assert found.shape == tuple(gradient.shape)
        assert found.norm == pytest.approx(float(gradient.norm()), rel=1e-5)
        assert abs(found.stable_rank.value - stable) <= found.stable_rank.bound + 1e-5
        assert list(found.energy) == [1, 2, 3]  # there are not 100 directions
        for rank, share in found.energy.items():
            assert abs(share.value - float(shares[rank - 1])) <= share.bound + 1e-5
    unused = result["unused.weight"]
    assert (unused.norm, unused.stable_rank.value) == (0, 0)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_found(training: bool):
    model, tokens, labels = made()
    model.train(training)
    model.dropout.eval()
    model.first.weight.grad = torch.ones_like(model.first.weight)
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()

    def loss() -> Tensor:
        model.train()  # whatever the loss does with the model's modes and buffers
        return nn.functional.cross_entropy(model(tokens), labels)

    with torch.no_grad():
        gradient_rank(model, loss)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model.first.weight.grad, torch.ones_like(model.first.weight))
    assert all(p.grad is None for n, p in model.named_parameters() if n != "first.weight")
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    loss()
    assert not torch.equal(model.norm.running_mean, before["norm.running_mean"])  # type: ignore[arg-type]


def test_what_a_loss_that_fails_changed_is_put_back():
    model, tokens, _ = made()
    before = copy.deepcopy(model.state_dict())

    def loss() -> Tensor:
        model(tokens)
        raise RuntimeError("out of data")

    with pytest.raises(RuntimeError, match="out of data"):
        gradient_rank(model, loss)
    assert torch.equal(model.state_dict()["norm.running_mean"], before["norm.running_mean"])


def test_a_loss_given_as_a_number_can_still_be_sent_backward():
    model, tokens, labels = made()
    loss = nn.functional.cross_entropy(model(tokens), labels)
    result = gradient_rank(model, loss, ["second.weight"], ranks=(2,))
    assert model.second.weight.grad is None
    loss.backward()
    assert model.second.weight.grad is not None
    stable, shares = by_svd(model.second.weight.grad)
    found = result["second.weight"]
    assert found.stable_rank.value == pytest.approx(stable, rel=2e-3)
    assert found.energy[2].value == pytest.approx(float(shares[1]), rel=2e-3)


def test_one_sample_gives_rank_one_and_a_tiny_gradient_loses_no_digits():
    torch.manual_seed(1)
    model = nn.Linear(7, 5, bias=False)
    row = torch.randn(1, 7)
    result = gradient_rank(model, lambda: 1e-30 * model(row).square().sum())["weight"]
    assert 0 < result.norm < 1e-28
    assert result.stable_rank.value == pytest.approx(1, abs=1e-3)
    assert result.energy[1].value == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameters": ["third.weight"]}, "parameters must be among the model's .*'third.weight'"),
        ({"parameters": ["first.bias"]}, "parameters must be matrices that train, got 'first.bias"),
        ({"parameters": ["frozen.weight"]}, "which does not"),
        ({"parameters": []}, "at least one"),
        ({"ranks": (0,)}, "ranks must be a whole number from 1"),
        ({"loss": lambda: 3.0}, "loss must give a torch.Tensor, got a float"),
        ({"loss": torch.tensor(1.0)}, "without a graph"),
        ({"loss": torch.ones(2, requires_grad=True)}, "one number"),
    ],
)
def test_bad_input(changes: dict[str, Any], message: str):
    model, tokens, _ = made()
    arguments: dict[str, Any] = {"loss": lambda: model(tokens).square().mean()} | changes
    with pytest.raises(ValueError, match=message):
        gradient_rank(model, **arguments)


def test_a_gradient_that_is_not_finite_is_named():
    model, tokens, _ = made()
    with pytest.raises(ValueError, match=r"gradient of .*weight must be finite"):
        gradient_rank(model, lambda: model(tokens).square().sum() * torch.inf)
    with pytest.raises(ValueError, match="a matrix that trains"):
        gradient_rank(nn.BatchNorm1d(3), lambda: torch.zeros(()))
