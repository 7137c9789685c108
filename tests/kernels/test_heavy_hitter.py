"""The heavy-hitter kernel: in Triton's interpreter, and on a GPU where there is one."""

import pytest
import torch

from joma.inference import HeavyHitter, Streaming, cache
from tests.inference.models import tiny
from tests.without_gpu import needs_triton, printed

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_triton
def test_the_kernel_does_what_torch_operations_do():
    """All scores, one and several queries per key, sizes that are no powers of two, padding."""
    found = printed("tests.kernels.interpreted_heavy_hitter")
    assert len(found) == 16
    for case in found:
        assert case["same_slots"], case
        assert case["error"] < 1e-5, case


@pytest.mark.slow
@needs_triton
def test_the_kernels_compile_for_a_gpu_that_is_not_there():
    """The interpreter takes programs that the compiler refuses, and knows of no registers."""
    found = printed("tests.kernels.compiled_heavy_hitter", interpret=False)
    assert {it["kernel"] for it in found} == {"_attend_slots", "_join_and_choose"}
    for it in found:
        assert it["spilled"] == 0, it
        assert it["registers"] <= 128, it  # of 65,536 of a multiprocessor: four programs fit


@gpu
@pytest.mark.parametrize("policy", [HeavyHitter(4, 4), HeavyHitter(6, 0, "decay"), Streaming(6, 2)])
def test_a_gpu_reads_what_the_cpu_reads(policy):
    ids = torch.randint(0, 97, (2, 60), generator=torch.Generator().manual_seed(0))
    found = []
    for device in ("cpu", "cuda"):
        model = tiny("llama").to(device)
        with torch.no_grad(), cache(model, policy) as kv:
            parts = [model(it.to(device), past_key_values=kv).logits for it in ids.split(1, 1)]
        found.append(torch.cat(parts, 1).cpu())
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-3)


@gpu
@pytest.mark.parametrize("policy", [HeavyHitter(4, 4), Streaming(6, 2)])
def test_a_captured_graph_steps_on(policy):
    model = tiny("llama").cuda()
    ids = torch.randint(0, 97, (2, 40)).cuda()
    token, place = ids[:, :1].clone(), torch.zeros(2, 1, dtype=torch.int64, device="cuda")

    def step(kv):
        return model(token, past_key_values=kv, position_ids=place).logits

    with torch.no_grad(), cache(model, policy) as kv:
        plain = [model(it, past_key_values=kv).logits for it in ids.split(1, 1)][-5:]
        kv.reset()
        for at in range(32):
            token.copy_(ids[:, at : at + 1])
            place.fill_(at)
            step(kv)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for at in range(32, 35):
                token.copy_(ids[:, at : at + 1])
                place.fill_(at)
                step(kv)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step(kv)
        for at, expected in zip(range(35, 40), plain, strict=True):
            token.copy_(ids[:, at : at + 1])
            place.fill_(at)
            graph.replay()
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)
