"""The heavy-hitter kernel: in Triton's interpreter, and on a GPU where there is one."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from joma.inference import HeavyHitter, Streaming, cache
from tests.inference.models import tiny

ROOT = Path(__file__).parents[2]
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, for its interpreter"
)
def test_the_kernel_does_what_torch_operations_do():
    """All scores, one and several queries per key, sizes that are no powers of two, padding."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.inference.interpreted"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 16
    for case in found:
        assert case["same_slots"], case
        assert case["result"] < 1e-5, case
        assert case["received"] < 1e-5, case


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton's compiler")
def test_the_kernels_compile_for_a_gpu_that_is_not_there():
    """The interpreter takes programs that the compiler refuses, and knows of no registers."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.inference.compiled"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {it["kernel"] for it in found} == {"_parts", "_joined"}
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
