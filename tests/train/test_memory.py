"""The estimate of memory against real trainings of tiny models on the CPU."""

import json
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, GPT2Config, LlamaConfig

from joma.errors import JomaError
from joma.models import enable_checkpointing
from joma.models.blank import blank_model
from joma.models.loading import class_of
from joma.optim import AdamW8bit, GaLoreAdamW
from joma.train.memory import (
    CUBLAS_BYTES,
    DTYPES,
    OPTIMIZERS,
    PARTS,
    ProjectionSettings,
    TrainingSetup,
    card_memory,
    default_rank,
    estimate_memory,
)

RANK, BATCH, WINDOW, VOCABULARY = 24, 2, 64, 1000
LLAMA = LlamaConfig(
    hidden_size=96,
    intermediate_size=272,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=VOCABULARY,
    tie_word_embeddings=False,
    architectures=["LlamaForCausalLM"],
)
NO_DROPOUT: Any = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2 = GPT2Config(
    n_embd=96,
    n_layer=2,
    n_head=4,
    vocab_size=VOCABULARY,
    architectures=["GPT2LMHeadModel"],
    **NO_DROPOUT,
)


@pytest.fixture(params=[LLAMA, GPT2], ids=["llama", "gpt2"])
def folder(request, tmp_path):
    request.param.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def llama(tmp_path):
    LLAMA.save_pretrained(tmp_path)
    return tmp_path


def real_model(folder, dtype=torch.float32):
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    return class_of(config)(config).to(dtype).train()


def loss_of(model):
    tokens = torch.randint(VOCABULARY, (BATCH, WINDOW), generator=torch.Generator().manual_seed(0))
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def trained(model, optimizer):
    """Bytes of the state that grows with the parameters after a step: bases, and all else."""
    loss_of(model).backward()
    optimizer.step()
    bases = rest = 0
    for state in optimizer.state_dict()["state"].values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                bases += value.nbytes if name.startswith("basis") else 0
                rest += 0 if name.startswith("basis") else value.nbytes
    return rest, bases


def estimates(folder, *names, projection=None, **setup) -> Any:
    setup = {"batch": BATCH, "window": WINDOW, **setup}
    found = estimate_memory(
        folder, TrainingSetup(**setup), projection or ProjectionSettings(RANK), names or OPTIMIZERS
    )
    return found[0] if len(names) == 1 else found


def states(found):
    return found.parts["states"], found.parts["projectors"]


EIGHT = {"bits": 8, "projector_bits": 8}
MAKERS: dict[str, Any] = {
    "adamw": lambda model, **_: torch.optim.AdamW(model.parameters(), fused=True),
    "sgd": lambda model, **_: torch.optim.SGD(model.parameters(), momentum=0.9, fused=True),
    "adamw-8bit": lambda model, **_: AdamW8bit(model.parameters()),
    "galore-adamw": lambda model, **settings: GaLoreAdamW(
        model, rank=RANK, gap=1, verbose=False, **settings
    ),
}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("adamw", {}),
        ("sgd", {}),
        ("adamw-8bit", {}),
        ("galore-adamw", {"side": "left", "bits": 8}),
        ("galore-adamw", {"side": "right", **EIGHT}),
        ("galore-adamw", {"side": "smallest", "projector_bits": 8}),
    ],
)
def test_states_are_those_of_the_optimizer(folder, name, settings):
    model = real_model(folder, torch.bfloat16)
    real = trained(model, MAKERS[name](model, **settings))
    assert states(estimates(folder, name, projection=ProjectionSettings(RANK, **settings))) == real


def saved_bytes(model):
    """Bytes of the storages that autograd keeps after a forward pass, without logits."""
    known = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_of(model)
    return sum(
        one.untyped_storage().nbytes()
        for place, one in kept.items()
        if place not in known and one.is_floating_point() and one.shape[-1:] != (VOCABULARY,)
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_activations_are_what_autograd_keeps(folder, dtype):
    found = estimates(folder, "adamw", dtype=dtype)
    assert found.saved == pytest.approx(saved_bytes(real_model(folder, DTYPES[dtype])), rel=0.02)


def test_lora_is_that_of_peft(folder):
    import peft

    config = peft.LoraConfig(r=RANK, target_modules="all-linear", fan_in_fan_out=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **more: None)
        real = peft.get_peft_model(real_model(folder, torch.bfloat16), config)
    found = estimates(folder, "lora")
    assert found.saved == pytest.approx(saved_bytes(real), rel=0.02)
    weights = sum(one.nbytes for one in (*real.parameters(), *real.buffers()))
    assert found.parts["weights"] == weights
    optimizer = torch.optim.AdamW(one for one in real.parameters() if one.requires_grad)
    assert states(found) == trained(real, optimizer)


def profiled_peak(work):
    """The most bytes that torch's profiler sees allocated on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    profiler: Any = recorded.profiler
    events = [one for one in profiler.kineto_results.events() if one.name() == "[memory]"]
    live = peak = 0
    for one in sorted(events, key=lambda event: event.start_ns()):
        live += one.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize(
    ("name", "settings", "setup"),
    [
        ("adamw", {}, {"dtype": "fp32"}),
        ("adamw", {}, {"dtype": "bf16"}),
        ("adamw", {}, {"dtype": "fp32", "checkpointing": True}),
        ("sgd", {}, {"dtype": "fp32"}),
        ("adamw-8bit", {}, {"dtype": "fp32"}),
        ("galore-adamw", {}, {"dtype": "fp32"}),
        ("galore-adamw", {}, {"dtype": "fp32", "clip": True}),
        ("galore-adamw", {"per_layer": True, "bits": 8}, {"dtype": "fp32"}),
        ("galore-adamw", {"per_layer": True, "projector_bits": 8}, {"dtype": "fp32", "clip": True}),
    ],
)
def test_the_peak_is_within_five_per_cent_of_the_allocators(llama, name, settings, setup):
    """In two steps of a real training on the CPU."""
    model = real_model(llama, DTYPES[setup["dtype"]])
    if setup.get("checkpointing"):
        enable_checkpointing(model)
    clip = {"clip_norm": 1.0} if setup.get("clip") else {}
    optimizer = MAKERS[name](model, **clip, **settings)

    def train():
        for _ in range(2):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()

    projection = ProjectionSettings(RANK, **settings)
    found = estimates(llama, name, projection=projection, device="cpu", **setup)
    measured = profiled_peak(train) + found.parts["weights"]
    assert found.total == pytest.approx(measured, rel=0.05)


def test_parts_add_up_and_the_peak_is_the_largest_phase(folder):
    for found in estimates(folder):
        assert tuple(found.parts) == PARTS
        assert found.total == found.peaks[found.phase] == max(found.peaks.values())
        assert (found.parts["projectors"] > 0) == (found.optimizer == "galore-adamw")
    cpu = estimates(folder, "adamw", device="cpu")
    assert estimates(folder, "adamw").total == cpu.total + CUBLAS_BYTES


def test_per_layer_keeps_no_gradients_but_the_one_that_arrived(llama):
    long = {"window": 8, "batch": 1}  # activations are small
    per_layer = ProjectionSettings(RANK, per_layer=True)
    whole = estimates(llama, "galore-adamw", **long)
    layer = estimates(llama, "galore-adamw", projection=per_layer, **long)
    largest = max(one.nbytes for one in blank_model(llama, torch.bfloat16).parameters())
    assert whole.parts["gradients"] > 2 * largest
    assert layer.parts["gradients"] <= largest
    assert layer.total < whole.total


@pytest.mark.parametrize(
    ("name", "setup", "projection", "simulated"),
    [
        ("adamw", {"batch": 16, "window": 256}, None, 2.580),
        ("galore-adamw", {"batch": 1, "window": 2048}, None, 1.420),
    ],
)
def test_known_peaks_of_the_60m_model(name, setup, projection, simulated):
    """GiB of a simulation that ran the real optimizers on tensors without numbers."""
    found = estimates("llama-60m", name, projection=ProjectionSettings(128), **setup)
    assert found.total / 2**30 == pytest.approx(simulated, rel=0.05)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("mistral", {"num_key_value_heads": 2, "sliding_window": 16}),
        ("bert", {"architectures": ["BertForMaskedLM"]}),
        ("mixtral", {"num_key_value_heads": 2, "num_local_experts": 4}),
        ("t5", {"d_kv": 24, "architectures": ["T5ForConditionalGeneration"]}),
    ],
)
def test_other_architectures_are_followed(tmp_path, kind, settings):
    widths = {"hidden_size": 96, "intermediate_size": 272, "num_hidden_layers": 2}
    made = AutoConfig.for_model(
        kind, **widths, num_attention_heads=4, vocab_size=VOCABULARY, **settings
    )
    made.save_pretrained(tmp_path)
    for found in estimates(tmp_path, "adamw", "lora"):
        assert found.saved > BATCH * WINDOW * 96 * 2 * 10
        assert found.total == sum(found.parts.values()) > CUBLAS_BYTES + found.saved


def test_cards_and_default_ranks(llama):
    assert card_memory("rtx-4090") == card_memory("RTX-4090") == 24
    assert card_memory("22.5") == 22.5
    for wrong in ("voodoo", "-1", "nan", "inf"):
        with pytest.raises(JomaError, match="card must be a number of GiB or one of"):
            card_memory(wrong)
    assert default_rank("llama-130m") == 256
    assert default_rank(llama) == 96 // 4


def test_what_is_refused(llama, tmp_path):
    with pytest.raises(JomaError, match="the rank must be below the shorter side"):
        estimates(llama, "galore-adamw", projection=ProjectionSettings(96))
    with pytest.raises(JomaError, match="window must be at most 2048"):
        estimates(llama, "adamw", window=4096)
    with pytest.raises(JomaError, match="optimizer must be"):
        estimates(llama, "lion")
    with pytest.raises(JomaError, match="dtype must be"):
        TrainingSetup(dtype="fp8")  # type: ignore[arg-type]
    (tmp_path / "empty").mkdir()
    with pytest.raises(JomaError, match="has no config"):
        blank_model(tmp_path / "empty")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({"model_type": "nonesuch"}))
    with pytest.raises(JomaError, match="model_type that the installed transformers knows"):
        blank_model(tmp_path / "other")
