"""The kernels of a language model's step, on a GPU and in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from joma.models import LanguageConfig, LanguageModel
from joma.optim import StackedAdam
from joma.train import Ensemble
from tests.kernels.compared import SEEDS, STEP, cases
from tests.without_gpu import needs_triton, printed

CONFIG = LanguageConfig(vocabulary=1100, layers=2, width=40, hidden=48, length=9)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_triton
def test_kernels_are_torchs_operations_in_the_interpreter() -> None:
    found = {row["case"]: row["distance"] for row in printed("tests.kernels.compared")}
    assert len(found) == 16
    assert {name: apart for name, apart in found.items() if not apart < 1e-4} == {}


@needs_gpu
def test_kernels_are_torchs_operations_on_a_gpu() -> None:
    found = dict(cases("cuda"))
    assert {name: apart for name, apart in found.items() if not apart < 1e-3} == {}


@needs_gpu
def test_losses_and_gradients_in_bfloat16() -> None:
    fused = LanguageModel(CONFIG, SEEDS, device="cuda")
    plain = LanguageModel(CONFIG, SEEDS, dtype=torch.float64)
    plain.load_state_dict(fused.state_dict())
    optimizer = StackedAdam(fused.named_parameters(), 1e-3)
    optimizer.to_bfloat16_with_master_weights(fused.products())
    fused.compute = torch.bfloat16
    dice = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(1100, (6, 9), generator=dice) for _ in range(2))
    weights = torch.rand(6, 9, generator=dice)
    weights = weights / weights.sum()
    expected = plain.losses(tokens, targets, weights_BT=weights, step=STEP)
    expected.sum().backward()
    found = fused.losses(
        tokens.cuda(), targets.cuda(), weights_BT=weights.cuda(), step=torch.tensor(STEP).cuda()
    )
    found.sum().backward()
    torch.testing.assert_close(found.cpu(), expected, atol=5e-3, rtol=0)
    for (name, theirs), ours in zip(plain.named_parameters(), fused.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        error = (ours.grad.double().cpu() - theirs.grad).norm() / theirs.grad.norm()
        assert float(error) < 0.12, name  # bfloat16, and nodes that it moves across ReLU's corner


@needs_gpu
def test_evaluate_of_diverged_networks() -> None:
    model = LanguageModel(CONFIG, SEEDS, device="cuda").requires_grad_(False)
    plain = LanguageModel(CONFIG, SEEDS, dtype=torch.float64)
    plain.load_state_dict(model.state_dict())
    dice = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(1100, (7, 9), generator=dice) for _ in range(2))
    weights = torch.rand(7, 9, generator=dice)
    expected = plain.evaluate(tokens, targets, weights)
    found = model.evaluate(tokens.cuda(), targets.cuda(), weights.cuda())
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu().double(), theirs, atol=2e-3, rtol=1e-3)  # of tf32
    model.blocks[1].get_parameter("queries_keys_values.weight")[1] = torch.nan
    losses, entropies = model.evaluate(tokens.cuda(), targets.cuda(), weights.cuda())
    assert losses.isnan().tolist() == [False, True]
    assert entropies.isnan().tolist() == [[False, False], [False, True]]


@needs_gpu
def test_an_ensemble_learns_the_same_in_bfloat16() -> None:
    streams = torch.randint(1100, (6, 100), generator=torch.Generator().manual_seed(2))

    def trained(device: str, precision: str) -> Tensor:
        text = streams.to(device)
        model = LanguageModel(CONFIG, (5, 6, 7), device=device)
        places = torch.arange(10, device=device)

        def batch(step: int | Tensor) -> tuple[Tensor, Tensor]:
            rows = text.index_select(1, places + 9 * (step % 10))
            return rows[:, :-1], rows[:, 1:]

        ensemble = Ensemble(
            model,
            StackedAdam(model.named_parameters(), (1e-4, 3e-4, 1e-3), clip=0.5),
            batch,
            loss=lambda model, given, step: model.losses(*given, step=step),
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
