"""An ensemble is its members: each follows the trajectory it would have alone."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from joma.common.float32 import float32_is_coarse
from joma.train import Ensemble
from tests.common.test_float32 import as_torch_begins, set_in_torch
from tests.models.test_transformer import plain_copy
from tests.train._small import DECAYS, RATES, SEEDS, ensemble, hierarchy, losses

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_member_follows_the_trajectory_it_has_alone():
    together = losses(ensemble(), 200)
    for member, settings in enumerate(zip(SEEDS, RATES, DECAYS, strict=True)):
        alone = losses(ensemble(*([setting] for setting in settings)), 200)
        torch.testing.assert_close(together[:, member], alone[:, 0], rtol=0, atol=1e-9)
    assert bool((together[-1] < 0.5 * together[0]).all())  # it was a trajectory worth comparing


def test_a_member_follows_the_trajectory_of_a_plain_network():
    """The plain network sees all sequences with all paddings, under torch's own Adam.

    A batch of 100: shares of it are no binary fractions.
    """
    data = hierarchy()
    trained = ensemble(batches=lambda step: data.distinct(100, step))
    plain = [plain_copy(trained.model, member) for member in range(3)]
    adams = [
        torch.optim.Adam(network.parameters(), rate, weight_decay=decay)
        for network, rate, decay in zip(plain, RATES, DECAYS, strict=True)
    ]
    curves = losses(trained, 200)
    for step in range(200):
        batch = data.sample(100, step)
        for member, (network, adam) in enumerate(zip(plain, adams, strict=True)):
            loss = functional.cross_entropy(network(batch.tokens[member]), batch.labels[member])
            adam.zero_grad()
            loss.backward()
            adam.step()
            assert float(curves[step, member]) == pytest.approx(loss.item(), abs=1e-6)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_members_do_not_hear_one_another(precision):
    before = ensemble(precision=precision)
    after = ensemble((5, 1, 9), (1e-3, 0.5, 1e-2), (1e-4, 1.0, 1e-2), precision=precision)
    curves = [losses(trained, 60) for trained in (before, after)]
    for member, same in enumerate((True, False, True)):
        assert torch.equal(curves[0][:, member], curves[1][:, member]) is same
        for one, two in zip(before.model.parameters(), after.model.parameters(), strict=True):
            if one.ndim == 3:
                assert torch.equal(one[member], two[member]) is same


def test_a_state_is_resumed_where_it_was():
    straight = ensemble()
    curve = losses(straight, 70)
    stopped = ensemble()
    losses(stopped, 30)
    state = {name: tensor.clone() for name, tensor in stopped.state()}
    losses(stopped, 45)  # and further: the state is not touched by that
    again = ensemble()
    again.load_state(30, state, stopped.about())
    assert torch.equal(losses(again, 70), curve[30:])


def test_a_state_of_other_networks_is_refused():
    state = dict(ensemble().state())
    with pytest.raises(ValueError, match=r"state must be of seeds \[5, 0, 8\], got \[5, 0, 9\]"):
        ensemble((5, 0, 8)).load_state(0, state, {})
    less = {name: part for name, part in state.items() if name != "step"}
    with pytest.raises(ValueError, match="state must be of these networks"):
        ensemble().load_state(0, less, {})
    state["model.embedding.weight"] = state["model.embedding.weight"].float()
    with pytest.raises(ValueError, match=r"in torch.float32, but must be \(3, 21, 16\) in torch.f"):
        ensemble().load_state(0, state, {})


def test_precision_is_checked_and_comes_back():
    with pytest.raises(ValueError, match="precision must be one of float32, float64, tf32"):
        ensemble(precision="half")
    with pytest.raises(ValueError, match="precision tf32 is for a CUDA device, not cpu"):
        ensemble(precision="tf32")
    trained = ensemble()
    with pytest.raises(ValueError, match=r"does not fit parameters in torch\.float64"):
        Ensemble(trained.model, trained.optimizer, trained.batches, precision="float32")
    with as_torch_begins():
        torch.set_float32_matmul_precision("medium")
        with trained.computing():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"


def test_it_computes_the_same_whichever_switch_was_used():
    plain = losses(ensemble(precision="float32"), 5)
    with as_torch_begins():
        backends: Any = torch.backends
        backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision = "tf32", "bf16"
        before = set_in_torch()
        trained = ensemble(precision="float32")
        assert torch.equal(losses(trained, 5), plain)
        with trained.evaluating():
            assert not float32_is_coarse()
        assert set_in_torch() == before


@needs_cuda
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_the_captured_step_is_the_plain_one(precision):
    on_cpu = losses(ensemble(precision="float32"), 60)
    on_gpu = losses(ensemble(device="cuda", precision=precision), 60)
    tolerance = {"float32": 2e-4, "tf32": 2e-2, "bfloat16": 0.1}[precision]
    torch.testing.assert_close(on_gpu, on_cpu, rtol=tolerance, atol=tolerance)
    assert torch.equal(on_gpu, losses(ensemble(device="cuda", precision=precision), 60))
