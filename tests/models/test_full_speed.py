"""The kernels of experiments' networks: in Triton's interpreter, compiled, and on a GPU."""

from copy import deepcopy

import pytest
import torch

from joma.data import LatentHierarchy
from joma.models import Transformer, TransformerConfig
from joma.models.full_speed import FastTransformer
from joma.optim import StackedAdam
from joma.train import Ensemble
from tests.without_gpu import needs_triton, printed

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def small(outputs: int = 5, vocabulary: int = 12) -> TransformerConfig:
    return TransformerConfig(vocabulary, outputs, width=64, hidden=272)


@needs_triton
@pytest.mark.parametrize(
    "arguments", [(), pytest.param(("--all",), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_the_kernels_agree_with_float64(arguments):
    found = printed("tests.models.interpreted_blocks", *arguments)
    assert {case["of"] for case in found} == {"sum_norm", "relu", "attention", "network"}
    for case in found:
        if case["of"] == "network":
            # bfloat16 moves nodes across ReLU's corner, with kernels as without.
            assert case["kernels"][0] < 2e-2, case
            assert case["kernels"][1] < 0.12, case
        else:
            assert case["error"] < (1e-6 if "float32" in case["type"] else 6e-3), case


@pytest.mark.slow
@needs_triton
def test_the_kernels_compile_for_a_gpu_that_is_not_there():
    """The interpreter takes programs that the compiler refuses, and knows of no registers."""
    found = printed("tests.models.compiled_blocks", interpret=False)
    assert len({case["kernel"] for case in found}) == 8
    assert [case for case in found if case["spilled"]] == []
    # A maximum that is no NaN would hide that a network diverged; the interpreter has no such one.
    maxima = {tuple(case["maxima"]) for case in found if case["kernel"] == "_relu"}
    assert maxima == {("max.NaN.f32",)}


def test_without_a_gpu_it_is_the_plain_network():
    config = small()
    tokens = torch.randint(12, (2, 6, 7), generator=torch.Generator().manual_seed(0))
    fast, plain = FastTransformer(config, (3, 4)), Transformer(config, (3, 4))
    assert torch.equal(fast(tokens, leading=3), plain(tokens, leading=3))


@gpu
@pytest.mark.parametrize("depths", [None, (1, 3)])
def test_losses_and_gradients_on_a_gpu(depths):
    config = small()
    tokens = torch.randint(12, (2, 6, 7), generator=torch.Generator().manual_seed(0))
    exact = Transformer(config, (3, 4), depths=depths, dtype=torch.float64)
    expected = exact(tokens, leading=3)
    expected.square().sum().backward()
    fast = FastTransformer(config, (3, 4), depths=depths, device="cuda")
    optimizer = StackedAdam(fast.named_parameters(), 1e-3)
    optimizer.to_bfloat16_with_master_weights(fast.products())
    fast.compute = torch.bfloat16
    found = fast(tokens.cuda(), leading=3)
    found.square().sum().backward()
    torch.testing.assert_close(found.double().cpu(), expected, atol=3e-2, rtol=0)
    for (name, theirs), ours in zip(exact.named_parameters(), fast.parameters(), strict=True):
        if theirs.grad is not None:
            assert ours.grad is not None
            error = (ours.grad.double().cpu() - theirs.grad).norm() / theirs.grad.norm()
            assert float(error) < 0.12, name


@gpu
def test_a_training_with_kernels_is_that_without():
    """Captured, on the data of Table 1: losses differ by less than bfloat16 moves them."""
    data = LatentHierarchy(20, 2, (10, 20), seeds=(1, 2, 3), device="cuda")
    config = small(20, data.vocabulary)
    first = FastTransformer(config, (1, 2, 3), device="cuda")
    losses = []
    for uses_kernels, precision in ((True, "bfloat16"), (False, "bfloat16"), (False, "float32")):
        model = deepcopy(first)
        model.uses_kernels = uses_kernels
        adam = StackedAdam(model.named_parameters(), 1e-3, 1e-4)
        ensemble = Ensemble(model, adam, lambda step: data.distinct(128, step), precision=precision)
        ensemble.advance(100)
        losses.append(ensemble.losses()[1])
    kernels, operations, exact = losses
    moved = float((operations - exact).abs().mean())
    assert float((kernels - exact).abs().mean()) < 2 * moved
    assert float(exact[-1].mean()) < 0.7 * float(exact[0].mean())
