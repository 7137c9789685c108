"""Every policy on every architecture: against the plain model, and against a second version."""

import pytest
import torch

from joma.errors import JomaError
from joma.inference import (
    Full,
    HeavyHitter,
    Random,
    Streaming,
    Window,
    cache,
    cache_bytes,
)
from tests.inference import reference
from tests.inference.models import CONFIGS, tiny

WIDE = [Full(), Window(500), Streaming(500), HeavyHitter(400, 100), Random(500)]
NARROW = [
    Window(5),
    Streaming(5, 2),
    Streaming(5, 2, positions="absolute"),
    HeavyHitter(3, 3),
    HeavyHitter(3, 2, "mean"),
    HeavyHitter(3, 0, "decay", 0.9),
    Random(6, 2),
]
FAST = ("llama", "gemma3_text")


def padded(rows=3, length=12, seed=1):
    """Return token ids and a mask in which the first two rows are padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 97, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[0, :5] = mask[1, :2] = 0
    ids[mask == 0] = 0
    return ids, mask


def read(model, policy, ids, mask, chunks):
    """Return logits of a batch fed in chunks, and the cache."""
    found, at = [], 0
    with torch.no_grad(), cache(model, policy) as kv:
        for size in chunks:
            extra = {}
            if model.config.model_type != "opt":  # which counts the mask itself
                place = (mask[:, : at + size].cumsum(1) - 1).clamp(min=0)
                extra["position_ids"] = place[:, at:]
            some = ids[:, at : at + size]
            seen = mask[:, : at + size]
            found.append(model(some, attention_mask=seen, past_key_values=kv, **extra).logits)
            at += size
    return torch.cat(found, 1), kv


def check_generation(name, attention, policies, **options):
    model = tiny(name, attention=attention)
    ids, mask = padded()
    options = {"max_new_tokens": 10, "do_sample": False, **options}
    expected = model.generate(ids, attention_mask=mask, **options)
    for policy in policies:
        with cache(model, policy) as kv:
            got = model.generate(ids, attention_mask=mask, past_key_values=kv, **options)
        assert torch.equal(got, expected), policy
        assert model.config._attn_implementation == attention


@pytest.mark.parametrize("name", CONFIGS)
def test_a_cache_with_room_for_all_generates_what_the_plain_model_does(name):
    check_generation(name, "sdpa", [Full(), HeavyHitter(400, 100)])


@pytest.mark.parametrize("name", FAST)
def test_beams_and_eager_attention_too(name):
    check_generation(name, "eager", WIDE, num_beams=3)


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_policy_with_room_for_all_generates_what_the_plain_model_does(name, attention, beams):
    check_generation(name, attention, WIDE, num_beams=beams, max_new_tokens=24)


def test_sampling_draws_the_same_tokens():
    model = tiny("llama")
    ids, mask = padded()
    options = {"attention_mask": mask, "do_sample": True, "top_k": 20, "max_new_tokens": 8}
    torch.manual_seed(3)
    expected = model.generate(ids, **options)
    torch.manual_seed(3)
    with cache(model, Full()) as kv:
        got = model.generate(ids, past_key_values=kv, **options)
    assert torch.equal(got, expected)


def check_rows(name, attention, policies):
    model = tiny(name, attention=attention, dtype=torch.float64)
    ids, mask = padded(length=30)
    chunks = [14, *[1] * 10, 4, 1, 1]
    for policy in policies:
        whole, kv = read(model, policy, ids, mask, chunks)
        assert kv.nbytes == cache_bytes(model, policy, tokens=30, batch=3), policy
        for row in range(3):
            skip = int((1 - mask[row]).sum())
            rest = slice(skip, None)
            some = ids[row : row + 1, rest], mask[row : row + 1, rest]
            alone, _ = read(model, policy, *some, [14 - skip, *chunks[1:]])
            torch.testing.assert_close(whole[row : row + 1, rest], alone, rtol=0, atol=1e-9)


PER_LAYER = [Window(4), HeavyHitter(2, 2), Streaming(3, 1)]


@pytest.mark.parametrize("name", FAST)
def test_each_row_of_a_padded_batch_is_read_as_if_it_were_alone(name):
    check_rows(name, "sdpa", [NARROW[1], NARROW[3], NARROW[6], PER_LAYER])


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_each_row_is_read_as_if_it_were_alone_by_every_policy(name, attention):
    check_rows(name, attention, [*NARROW, PER_LAYER])


def check_chunks(name, attention):
    model = tiny(name, attention=attention, dtype=torch.float64)
    ids, mask = padded(length=30)
    for policy in (Full(), *NARROW[:3], [Window(3), Streaming(4, 2), Full()]):
        expected, _ = read(model, policy, ids, mask, [1] * 30)
        for chunks in ([30], [7, 7, 1, 1, 7, 7], [1, 20, 9]):
            got, _ = read(model, policy, ids, mask, chunks)
            torch.testing.assert_close(got[mask == 1], expected[mask == 1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", FAST)
def test_policies_of_positions_do_not_depend_on_the_chunks(name):
    check_chunks(name, "sdpa")


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_no_architecture_depends_on_the_chunks(name, attention):
    check_chunks(name, attention)


SECOND_VERSIONS = {
    Window(5): (reference.keep_window(5), {}),
    Streaming(5, 2): (reference.keep_streaming(5, 2), {"in_cache": True}),
    Streaming(5, 2, positions="absolute"): (reference.keep_streaming(5, 2), {}),
    HeavyHitter(3, 3): (reference.keep_heavy(3, 3), {}),
    HeavyHitter(4, 1, "mean"): (reference.keep_heavy(4, 1, "mean"), {}),
    HeavyHitter(5, 0, "decay", 0.8): (reference.keep_heavy(5, 0), {"decay": 0.8}),
}


@pytest.mark.parametrize("policy", SECOND_VERSIONS, ids=lambda it: it.spec)
@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_a_second_version_of_each_policy_reads_the_same(name, policy):
    """Positions in the cache by rotating every key, as StreamingLLM describes, not the sinks."""
    model = tiny(name, dtype=torch.float64)
    ids = padded(1, 24)[0]
    keep, options = SECOND_VERSIONS[policy]
    expected = reference.logits(model, ids, keep, **options)
    mask = torch.ones_like(ids)
    got, _ = read(model, policy, ids, mask, [1] * 24)
    full, _ = read(model, Full(), ids, mask, [1] * 24)
    torch.testing.assert_close(got[0], expected, rtol=0, atol=1e-6)
    assert float((full[0] - expected).abs().max()) > 1e-3  # something was dropped, and it matters


@pytest.mark.parametrize("policy", [HeavyHitter(2, 2), HeavyHitter(9, 2)])
def test_heavy_hitters_in_a_sliding_window(policy):
    model = tiny("mistral", dtype=torch.float64)
    ids = padded(1, 24)[0]
    keep = reference.keep_heavy(policy.heavy, policy.recent, sight=7)  # out of sight goes first
    expected = reference.logits(model, ids, keep)
    got, _ = read(model, policy, ids, torch.ones_like(ids), [1] * 24)
    torch.testing.assert_close(got[0], expected, rtol=0, atol=1e-6)


def test_a_row_that_begins_late_has_sinks_of_its_own():
    """The first row has dropped tokens while the second one is still padding."""
    model = tiny("llama", dtype=torch.float64)
    ids = torch.randint(1, 97, (2, 60), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, :31] = 0
    whole, _ = read(model, Streaming(4, 3), ids, mask, [10, 10, 5, 5, *[1] * 30])
    keep = reference.keep_streaming(4, 3)
    for row, first in ((0, 0), (1, 31)):
        expected = reference.logits(model, ids[row : row + 1, first:], keep, in_cache=True)
        torch.testing.assert_close(whole[row, first:], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("policy", [HeavyHitter(4, 4), Streaming(5, 3), Random(8)])
def test_what_is_dropped_is_freed_and_nothing_moves_afterwards(policy):
    """Every tensor stays where it is, as CUDA graphs need it."""
    model = tiny("llama")
    ids = torch.randint(0, 97, (2, 46))

    def tensors(kv):
        return [it for layer in kv.layers for it in vars(layer.store).values() if it is not None]

    with torch.no_grad(), cache(model, policy) as kv:
        model(ids[:, :40], past_key_values=kv)
        size, held = kv.nbytes, [it.data_ptr() for it in tensors(kv)]
        for at in range(40, 45):
            model(ids[:, at : at + 1], past_key_values=kv)
        assert held == [it.data_ptr() for it in tensors(kv)]
        assert kv.nbytes == size
        assert kv.held == [8] * 3
        assert kv.seen == 45
        assert all(it.untyped_storage().nbytes() == it.nbytes for it in tensors(kv))


def test_two_models_at_once():
    one, two = tiny("llama", attention="eager"), tiny("gpt2", attention="sdpa")
    ids = padded(1)[0]
    with torch.no_grad():
        expected = one(ids).logits, two(ids).logits
        with cache(one, Full()) as a, cache(two, Full()) as b:
            got = one(ids, past_key_values=a).logits, two(ids, past_key_values=b).logits
    for this, that in zip(got, expected, strict=True):
        torch.testing.assert_close(this, that)


def test_a_second_turn_goes_on_from_the_first():
    model = tiny("llama")
    ids, mask = padded()
    options = {"do_sample": False, "past_key_values": None}
    with cache(model, Streaming(8, 2)) as kv:
        options["past_key_values"] = kv
        first = model.generate(ids, attention_mask=mask, max_new_tokens=4, **options)
        more = torch.cat((first, torch.randint(1, 97, (3, 5))), 1)
        grown = torch.cat((mask, torch.ones(3, 9, dtype=mask.dtype)), 1)
        second = model.generate(more, attention_mask=grown, max_new_tokens=6, **options)
        kv.reset()
        again = model.generate(more, attention_mask=grown, max_new_tokens=6, **options)
    assert torch.equal(second, again)  # streaming does not depend on how a text is fed in


def test_prefill_in_chunks_by_the_library():
    model = tiny("llama")
    ids, mask = padded(length=23)
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    with cache(model, Window(6)) as kv:
        expected = model.generate(ids, past_key_values=kv, **options)
        kv.reset()
        got = model.generate(ids, past_key_values=kv, prefill_chunk_size=5, **options)
    assert torch.equal(got, expected)


def test_beams_after_eviction_follow_their_own_rows():
    model = tiny("qwen3", dtype=torch.float64)
    ids, mask = padded(length=20)
    options = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False}
    for policy in (HeavyHitter(4, 3), Streaming(5, 2)):
        with cache(model, policy) as kv:
            whole = model.generate(ids, attention_mask=mask, past_key_values=kv, **options)
            for row in range(3):
                kv.reset()
                alone = ids[row : row + 1, int((1 - mask[row]).sum()) :]
                got = model.generate(
                    alone, attention_mask=torch.ones_like(alone), past_key_values=kv, **options
                )
                assert torch.equal(got[0, alone.shape[1] :], whole[row, ids.shape[1] :])


def test_random_is_a_uniform_sample_of_what_was_read():
    model = tiny("llama")
    counts = torch.zeros(40)
    for seed in range(40):
        with torch.no_grad(), cache(model, Random(8, seed=seed)) as kv:
            model(torch.randint(0, 97, (1, 25)), past_key_values=kv)
            for _ in range(15):
                model(torch.randint(0, 97, (1, 1)), past_key_values=kv)
            for layer in kv.layers:
                assert layer.store is not None
                kept = layer.store.position
                counts += torch.bincount(kept[kept >= 0], minlength=40)
    expected = counts.sum() / 40  # 40 seeds × 3 layers × 2 heads × 8 of 40 tokens: 48 each
    assert float(((counts - expected) ** 2 / expected).sum()) < 80  # 39 degrees of freedom


def test_the_model_is_as_it_was_after_an_error():
    model = tiny("llama")
    ids = padded()[0]
    with torch.no_grad():
        expected = model(ids).logits
        with pytest.raises(IndexError), cache(model, Window(4)) as kv:
            model(ids + 97, past_key_values=kv)
        assert torch.equal(model(ids).logits, expected)
        with pytest.raises(JomaError, match="outside of its with block"):
            model(ids, past_key_values=kv)
    assert not model.base_model._forward_pre_hooks


@pytest.mark.parametrize(
    "policy",
    [
        HeavyHitter(3, 3),
        pytest.param(Full(), marks=pytest.mark.slow),
        pytest.param(Streaming(4, 2), marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_gives_the_same(policy):
    model = tiny("llama")
    ids, mask = torch.arange(3, 27).view(2, 12), torch.ones(2, 12, dtype=torch.int64)
    mask[0, :4] = 0

    def read(reader):
        with torch.no_grad(), cache(model, policy) as kv:
            places = ((0, 8), (8, 9), (9, 10), (10, 12))
            return [
                reader(ids[:, a:b], attention_mask=mask[:, :b], past_key_values=kv).logits
                for a, b in places
            ]

    torch._dynamo.reset()
    for ours, plain in zip(read(torch.compile(model, backend="eager")), read(model), strict=True):
        torch.testing.assert_close(ours, plain)
