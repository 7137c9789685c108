"""The kernels of experiments' networks: in Triton's interpreter, compiled, and on a GPU."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from joma.data import LatentHierarchy
from joma.models import Transformer, TransformerConfig
from joma.models.full_speed import FastTransformer, transformer
from joma.models.full_speed.transformer import Projected
from joma.models.transformer import Seen, TransformerBlock
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
def test_the_check_tells_wrong_kernels_from_rounding():
    found = printed("tests.models.interpreted_check")
    assert len(found) == 4 + 5 * 3
    limits = transformer.MAX_OUTPUT_ERROR, transformer.MAX_GRADIENT_ERROR
    for case in found:
        shares = [apart / limit for apart, limit in zip(case["apart"], limits, strict=True)]
        if case["wrong"] is None:
            assert max(shares) < 0.5, case
        else:
            assert max(shares) > 2, case


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


def plain_block(block: TransformerBlock, x: Tensor, projected: Projected, seen: Seen) -> Tensor:
    """Return what the kernels give, by torch's operations."""
    x = block.norm_attention(x + block.attention.attend(*projected, seen))
    return block.norm_mlp(x + block.mlp(x, None))


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let networks take the way of a GPU, with torch's operations in place of the kernels."""
    monkeypatch.setattr(transformer, "fused_block", plain_block)
    monkeypatch.setattr(FastTransformer, "_fits", lambda model, tokens: model.uses_kernels)
    return monkeypatch


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("depths", [None, (1, 3)])
@pytest.mark.parametrize(
    "changes",
    [{}, {"vocabulary": 40}, {"readout": "all"}, {"layers": 1}, {"positions": "learned"}],
)
def test_the_way_around_the_kernels(changes: dict[str, Any], depths: tuple[int, ...] | None):
    """Rows of tokens, the last position alone, and depths, against the plain network."""
    config = replace(small(), length=9, **changes)
    depths = None if depths is None or config.layers == 1 else depths
    tokens = torch.randint(12, (2, 6, 7), generator=torch.Generator().manual_seed(0))
    leading = 3 if config.positions == "none" else 1
    found = []
    for kind in (Transformer, FastTransformer):
        model = kind(config, (3, 4), depths=depths)
        model.compute = torch.bfloat16 if kind is FastTransformer else None
        outputs = model(tokens, leading=leading)
        outputs.square().sum().backward()
        found.append(
            ([outputs.detach()], [p.grad for p in model.parameters() if p.grad is not None])
        )
    for theirs, ours in zip(*found, strict=True):
        assert transformer.distance(ours, theirs) < 0.06


class TestCheck:
    @pytest.fixture
    def model(self, on_cpu: pytest.MonkeyPatch) -> FastTransformer:
        model = FastTransformer(small(), (3, 4))
        model.compute = torch.bfloat16
        return model

    tokens = torch.randint(12, (2, 6, 7), generator=torch.Generator().manual_seed(0))

    def test_kernels_that_do_the_same_are_used(self, model, caplog):
        model.check_kernels(self.tokens, leading=3)
        assert model.uses_kernels
        assert caplog.text == ""
        assert all(p.grad is None for p in model.parameters())

    def test_kernels_that_do_something_else_are_not(self, model, on_cpu, caplog):
        def without_residual(block: TransformerBlock, x: Tensor, *rest: Any) -> Tensor:
            return plain_block(block, x.detach(), *rest)

        on_cpu.setattr(transformer, "fused_block", without_residual)
        model.check_kernels(self.tokens, leading=3)
        assert not model.uses_kernels
        assert "kernels give other outputs (0 of their size) or gradients" in caplog.text
        expected = Transformer(small(), (3, 4))
        expected.compute = torch.bfloat16
        assert torch.equal(model(self.tokens, leading=3), expected(self.tokens, leading=3))

    def test_kernels_that_cannot_be_compiled_are_not(self, model, on_cpu, caplog):
        def fails(*_: Any) -> Tensor:
            raise RuntimeError("Failed to find C compiler\nhere")

        on_cpu.setattr(transformer, "fused_block", fails)
        model.check_kernels(self.tokens)
        assert not model.uses_kernels
        assert "cannot be used (RuntimeError: Failed to find C compiler); torch's" in caplog.text


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
    fast = FastTransformer(config, (3, 4), depths=depths, device="cuda")
    exact = Transformer(config, (3, 4), depths=depths, dtype=torch.float64)
    exact.load_state_dict(fast.state_dict())  # float64 draws other numbers
    expected = exact(tokens, leading=3)
    expected.square().sum().backward()
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
