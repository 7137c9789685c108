"""The kernels for a GPU against plain operations, which other tests hold to torch's encoder."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from joma.models import LanguageConfig
from joma.models.full_speed import FastLanguageModel
from joma.models.full_speed.language import fused_block
from joma.models.language import Dropout, LanguageBlock
from joma.optim import StackedAdam
from joma.train import Ensemble

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CONFIG = LanguageConfig(vocabulary=1100, layers=2, width=40, hidden=48, length=9)
SEEDS, STEP = (3, 2**40 + 5), 2**33 + 7


def draw(*shape: int, seed: int = 0) -> Tensor:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=dice).cuda().requires_grad_()


def same(found: Tensor, expected: Tensor, inputs: list[Tensor], tolerance: float) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    dy = draw(*found.shape, seed=9).detach()
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, dy), torch.autograd.grad(expected, inputs, dy),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("share", [0.0, 0.2])
class TestKernels:
    @pytest.fixture
    def drops(self, share: float) -> tuple[object, Callable[[Tensor, str], Tensor]]:
        from joma.models.full_speed import _dropping_kernel as kernels

        seeds, step = torch.tensor(SEEDS).cuda(), torch.tensor(STEP).cuda()
        return kernels.Drop(seeds, step, share), Dropout(seeds, step, share)

    def test_sum_norm(self, drops) -> None:
        from joma.models.full_speed import _row_kernels as kernels

        x, residual = draw(2, 5, 9, 40), draw(2, 5, 9, 40, seed=1)
        weight, bias = draw(2, 40, seed=2), draw(2, 40, seed=3)
        linear = draw(2, 1, 40, seed=4)
        found = kernels.sum_norm(x, linear, residual, weight, bias, drops[0], "somewhere")
        total = residual + drops[1](x + linear.unsqueeze(1), "somewhere")
        normal = torch.nn.functional.layer_norm(total, (40,))
        expected = normal * weight[:, None, None] + bias[:, None, None]
        same(found, expected, [x, linear, residual, weight, bias], 1e-4)

    def test_relu(self, drops) -> None:
        from joma.models.full_speed import _row_kernels as kernels

        x, bias = draw(2, 5, 9, 48), draw(2, 1, 48, seed=1)
        expected = drops[1]((x + bias.unsqueeze(1)).relu(), "a")
        same(kernels.relu(x, bias, drops[0], "a"), expected, [x, bias], 1e-4)

    def test_placed(self, drops) -> None:
        from joma.models.full_speed import _language_kernels as kernels

        x, waves = draw(2, 5, 9, 40), draw(9, 40, seed=1).detach()
        found = kernels.placed(x, waves, torch.float32, drops[0], "b")
        same(found, drops[1](x * 40**0.5 + waves, "b"), [x], 1e-5)

    @pytest.mark.parametrize("length", [9, 35, 64])
    def test_attended(self, drops, length: int) -> None:
        from joma.models.full_speed import _short_attention_kernel as kernels

        joined, bias = draw(2, 5, length, 120), draw(2, 1, 120, seed=1)
        found = kernels.attended(joined, bias, drops[0], "c")
        q, k, v = (joined + bias.unsqueeze(1)).unflatten(-1, (3, 40)).unbind(3)
        later = torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1)
        weights = (q @ k.mT * 40**-0.5).masked_fill(later, -torch.inf).softmax(-1)
        expected = drops[1](weights.unsqueeze(2), "c").squeeze(2) @ v
        same(found, expected, [joined, bias], 5e-2)  # the kernel multiplies in tf32


def pair() -> tuple[FastLanguageModel, FastLanguageModel]:
    """The same networks in bfloat16 on the GPU and in float64 on the CPU."""
    fused = FastLanguageModel(CONFIG, SEEDS, device="cuda")
    plain = FastLanguageModel(CONFIG, SEEDS, dtype=torch.float64)
    plain.load_state_dict(fused.state_dict())
    optimizer = StackedAdam(fused.named_parameters(), 1e-3)
    optimizer.to_bfloat16_with_master_weights(fused.products())
    fused.compute = torch.bfloat16
    return plain, fused


@pytest.mark.parametrize("step", [None, STEP])
def test_losses_and_gradients(step: int | None) -> None:
    plain, fused = pair()
    dice = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(1100, (6, 9), generator=dice) for _ in range(2))
    weights = torch.rand(6, 9, generator=dice)
    weights = weights / weights.sum()
    expected = plain.losses(tokens, targets, weights_BT=weights, step=step)
    expected.sum().backward()
    on_gpu = None if step is None else torch.tensor(step).cuda()
    found = fused.loss_and_backward(tokens.cuda(), targets.cuda(), weights.cuda(), on_gpu)
    torch.testing.assert_close(found.cpu(), expected.detach(), atol=5e-3, rtol=0)
    for (name, theirs), ours in zip(plain.named_parameters(), fused.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        error = (ours.grad.double().cpu() - theirs.grad).norm() / theirs.grad.norm()
        assert float(error) < 0.12, name  # bfloat16, and nodes that it moves across ReLU's corner


def test_evaluate() -> None:
    model = FastLanguageModel(CONFIG, SEEDS, device="cuda")
    plain = FastLanguageModel(CONFIG, SEEDS, dtype=torch.float64)
    plain.load_state_dict(model.state_dict())
    dice = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(1100, (7, 9), generator=dice) for _ in range(2))
    weights = torch.rand(7, 9, generator=dice)
    expected = plain.evaluate(tokens, targets, weights)
    found = model.evaluate(tokens.cuda(), targets.cuda(), weights.cuda())
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu().double(), theirs, atol=2e-3, rtol=1e-3)  # of tf32


def test_evaluate_of_too_long_or_diverged_networks() -> None:
    model = FastLanguageModel(CONFIG, SEEDS, device="cuda").requires_grad_(False)
    long = torch.zeros(2, CONFIG.length + 1, dtype=torch.int64, device="cuda")
    with pytest.raises(ValueError, match="at most 9 positions, got 10"):
        model.evaluate(long, long, torch.ones_like(long))
    model.blocks[1].get_parameter("queries_keys_values.weight")[1] = torch.nan
    losses, entropies = model.evaluate(long[:, :9], long[:, :9], torch.ones_like(long[:, :9]))
    assert losses.isnan().tolist() == [False, True]
    assert entropies.isnan().tolist() == [[False, False], [False, True]]


def test_an_ensemble_learns_the_same_in_bfloat16() -> None:
    streams = torch.randint(1100, (6, 100), generator=torch.Generator().manual_seed(2))

    def trained(device: str, precision: str) -> Tensor:
        text = streams.to(device)
        model = FastLanguageModel(CONFIG, (5, 6, 7), device=device)
        places = torch.arange(10, device=device)

        def batch(step: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
            rows = text.index_select(1, places + 9 * (step % 10))
            weights = torch.full((6, 9), 1 / 54, device=device)
            return rows[:, :-1], rows[:, 1:], weights

        ensemble = Ensemble(
            model,
            StackedAdam(model.named_parameters(), (1e-4, 3e-4, 1e-3), clip=0.5),
            batch,
            loss=lambda model, given, step: model.loss_and_backward(
                given[0], given[1], given[2], step
            ),
            precision=precision,
            restart_every=10,
        )
        curves = []
        for _ in range(3):
            ensemble.advance(20)
            curves.append(ensemble.losses()[1])
        return torch.cat(curves)

    slow, fast = trained("cpu", "float32"), trained("cuda", "bfloat16")
    assert slow[-10:, 2].mean() < slow[:10, 2].mean() - 0.1
    torch.testing.assert_close(fast, slow, atol=0.05, rtol=0)


def test_a_block_without_kernels_is_the_same() -> None:
    _, fused = pair()
    block = fused.blocks[0]
    assert isinstance(block, LanguageBlock)
    x = draw(2, 6, 9, 40).detach().bfloat16()
    seeds, step = fused.seeds_E, torch.tensor(STEP).cuda()
    from joma.models.full_speed import _dropping_kernel as kernels

    with torch.no_grad():
        found = fused_block(block, x, kernels.Drop(seeds, step, 0.2), 0, None)
        expected = block(x, Dropout(seeds, step, 0.2), 0, None)
    torch.testing.assert_close(found, expected, atol=0.06, rtol=0.02)
