"""The estimate of memory against real trainings of tiny models on the CPU."""

import json
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, GPT2Config, LlamaConfig

from joma.errors import JomaError
from joma.models import enable_checkpointing
from joma.models.blank import PRESETS, blank_model
from joma.models.loading import class_of
from joma.optim import AdamW8bit, GaLoreAdamW
from joma.train.memory import (
    OPTIMIZERS,
    PARTS,
    ProjectionSettings,
    TrainingSetup,
    card_memory,
    default_rank,
    estimate_memory,
    parameter_costs,
)
from joma.train.memory._estimate import DTYPES
from joma.train.memory._lora import add_lora
from joma.train.memory._passes import training_passes

RANK, BATCH, WINDOW, VOCABULARY = 24, 2, 64, 1000
CUBLAS = 2 * 32 * 2**20
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
    config = type(LLAMA if "llama" in (folder / "config.json").read_text() else GPT2)
    config = config.from_pretrained(folder)
    torch.manual_seed(0)
    return class_of(config)(config).to(dtype).train()


def tokens():
    return torch.randint(VOCABULARY, (BATCH, WINDOW), generator=torch.Generator().manual_seed(0))


def loss_of(model):
    return model(input_ids=tokens(), labels=tokens(), use_cache=False).loss


def bytes_of_state(optimizer):
    """Bytes of the state that grows with the parameters: of bases, and of all else."""
    bases = rest = 0
    for state in optimizer.state_dict()["state"].values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                if name.startswith("basis"):
                    bases += value.nbytes
                else:
                    rest += value.nbytes
    return rest, bases


def trained(model, optimizer):
    loss_of(model).backward()
    optimizer.step()
    return bytes_of_state(optimizer)


def estimated_states(folder, name, projection=None, dtype=torch.bfloat16):
    costs = parameter_costs(
        blank_model(folder, dtype), name, projection or ProjectionSettings(RANK)
    )
    return sum(one.states for one in costs.values()), sum(one.projectors for one in costs.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "sgd", "adamw-8bit"])
def test_states_are_those_of_the_optimizer(folder, name, dtype):
    make = {
        "adamw": lambda one: torch.optim.AdamW(one.parameters()),
        "sgd": lambda one: torch.optim.SGD(one.parameters(), momentum=0.9),
        "adamw-8bit": lambda one: AdamW8bit(one.parameters()),
    }[name]
    model = real_model(folder, dtype)
    assert estimated_states(folder, name, dtype=dtype) == trained(model, make(model))


@pytest.mark.parametrize(
    ("folder", "side", "bits", "projector_bits"),
    [
        (LLAMA, "short", None, None),
        (LLAMA, "left", 8, None),
        (LLAMA, "right", 8, 8),
        (LLAMA, "smallest", None, 8),
        (GPT2, "short", 8, None),
        (GPT2, "smallest", None, None),
    ],
    indirect=["folder"],
)
def test_states_of_galore_are_those_of_the_optimizer(folder, side, bits, projector_bits):
    settings = {"side": side, "bits": bits, "projector_bits": projector_bits}
    model = real_model(folder, torch.bfloat16)
    real = trained(model, GaLoreAdamW(model, rank=RANK, verbose=False, **settings))
    assert estimated_states(folder, "galore-adamw", ProjectionSettings(RANK, **settings)) == real
    assert real[1] > 0


def test_lora_is_that_of_peft(folder):
    dtype = torch.bfloat16
    blank = blank_model(folder, dtype)
    add_lora(blank, RANK)
    config = peft.LoraConfig(r=RANK, target_modules="all-linear", fan_in_fan_out=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **more: None)
        real = peft.get_peft_model(real_model(folder, dtype), config)
    optimizer = torch.optim.AdamW(one for one in real.parameters() if one.requires_grad)
    saved = training_passes(blank, BATCH, WINDOW).saved
    assert saved == pytest.approx(_saved_bytes(real), rel=0.02)
    assert trained(real, optimizer)[0] == sum(
        one.states for one in parameter_costs(blank, "lora", ProjectionSettings(RANK)).values()
    )
    sizes = [sum(one.nbytes for one in model.parameters()) for model in (blank, real)]
    assert sizes[0] == sizes[1]


def _saved_bytes(model):
    """Bytes of the storages that autograd keeps after a forward pass, without logits."""
    known = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(model)
    total = sum(
        one.untyped_storage().nbytes()
        for place, one in kept.items()
        if place not in known and one.is_floating_point() and one.shape[-1:] != (VOCABULARY,)
    )
    assert loss.requires_grad
    return total


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_activations_are_what_autograd_saves(folder, dtype):
    kind = DTYPES[dtype]
    found = training_passes(blank_model(folder, kind), BATCH, WINDOW)
    assert found.saved == pytest.approx(_saved_bytes(real_model(folder, kind)), rel=0.02)


def test_dropout_saves_a_byte_for_each_number(tmp_path):
    rates = {**NO_DROPOUT, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
    saved = []
    for name, rate in (("plain", NO_DROPOUT), ("dropout", rates)):
        GPT2Config(**{**GPT2.to_dict(), **rate}).save_pretrained(tmp_path / name)
        model = blank_model(tmp_path / name, torch.bfloat16)
        saved.append(training_passes(model, BATCH, WINDOW).saved)
    assert saved[1] - saved[0] == 5 * BATCH * WINDOW * 96


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_peak_of_the_passes_is_that_of_the_allocator(llama, dtype, checkpointing):
    passes = training_passes(
        blank_model(llama, DTYPES[dtype]), BATCH, WINDOW, checkpointing=checkpointing
    )
    peak = max(one.activations + one.logits for one in passes.moments)
    assert peak == pytest.approx(_allocated_peak(llama, DTYPES[dtype], checkpointing), rel=0.02)


def _allocated_peak(folder, dtype, checkpointing):
    """The most bytes that are allocated while gradients are dropped."""
    model = real_model(folder, dtype)
    if checkpointing:
        enable_checkpointing(model)

    def drop(parameter):
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(drop)
    return profiled_peak(lambda: loss_of(model).backward())


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


def estimates(folder, *names, projection=None, **setup) -> Any:
    setup = {"batch": BATCH, "window": WINDOW, **setup}
    found = estimate_memory(
        folder, TrainingSetup(**setup), projection or ProjectionSettings(RANK), names or OPTIMIZERS
    )
    return found[0] if len(names) == 1 else found


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("adamw", {}),
        ("sgd", {}),
        ("adamw-8bit", {}),
        ("galore-adamw", {}),
        ("galore-adamw", {"per_layer": True, "bits": 8}),
        ("galore-adamw", {"per_layer": True, "projector_bits": 8, "clip": True}),
        ("galore-adamw", {"clip": True}),
    ],
)
def test_the_peak_of_a_training_step_is_that_of_the_allocator(llama, name, settings):
    """All but the weights, in two steps of a real training in float32."""
    clip = settings.pop("clip", False)
    model = real_model(llama)
    parameters = list(model.parameters())
    make: Any = {
        "adamw": lambda: torch.optim.AdamW(parameters, fused=True),
        "sgd": lambda: torch.optim.SGD(parameters, momentum=0.9, fused=True),
        "adamw-8bit": lambda: AdamW8bit(parameters),
        "galore-adamw": lambda: GaLoreAdamW(
            model,
            rank=RANK,
            gap=1,
            refresh="gap",
            clip_norm=1.0 if clip else None,
            verbose=False,
            **settings,
        ),
    }[name]
    optimizer = make()

    def train():
        for _ in range(2):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()

    measured = profiled_peak(train)
    projection = ProjectionSettings(RANK, **settings)
    found = estimates(llama, name, projection=projection, dtype="fp32", clip=clip)
    assert found.total - found.parts["weights"] - CUBLAS == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize(
    ("name", "dtype", "clip"),
    [
        ("adamw", "bf16", False),
        ("galore-adamw", "bf16", False),
        ("galore-adamw", "fp32", False),
        ("galore-adamw", "fp32", True),
    ],
)
def test_the_estimate_for_the_cpu_is_what_is_allocated_there(tmp_path, name, dtype, clip):
    """Heads that share keys, copies to float32 of products in bfloat16, copies of norms."""
    grouped = LlamaConfig(**{**LLAMA.to_dict(), "num_key_value_heads": 1})
    grouped.save_pretrained(tmp_path)
    model = class_of(grouped)(grouped).to(DTYPES[dtype]).train()
    settings: Any = {"rank": RANK, "gap": 1, "clip_norm": 1.0 if clip else None, "verbose": False}
    optimizer: Any = (
        torch.optim.AdamW(model.parameters(), fused=True)
        if name == "adamw"
        else GaLoreAdamW(model, **settings)
    )

    def train():
        for _ in range(2):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()

    weights = sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
    found = estimates(tmp_path, name, dtype=dtype, clip=clip, device="cpu")
    assert found.total == pytest.approx(profiled_peak(train) + weights, rel=0.02)


def test_the_norm_of_a_whole_gradient_takes_a_copy_in_float64(llama):
    model = blank_model(llama, torch.bfloat16)
    costs = parameter_costs(model, "galore-adamw", ProjectionSettings(RANK), clip=True)
    embedding = next(one for one in costs if one.shape == (VOCABULARY, 96))
    assert costs[embedding].workspace >= 8 * embedding.numel()


def test_parts_add_up_and_the_peak_is_the_largest_phase(folder):
    for found in estimates(folder):
        assert tuple(found.parts) == PARTS
        assert found.total == found.peaks[found.phase] == max(found.peaks.values())
        assert (found.parts["projectors"] > 0) == (found.optimizer == "galore-adamw")


def test_weights_and_all_gradients_of_the_step(llama):
    found = estimates(llama, "adamw")
    weights = sum(one.nbytes for one in real_model(llama, torch.bfloat16).parameters())
    assert found.parts["weights"] == pytest.approx(weights, rel=0.001)
    assert found.peaks["step"] - CUBLAS == pytest.approx(4 * weights, rel=0.001)


def test_per_layer_keeps_no_gradients_but_the_one_that_arrived(llama):
    long = {"window": 8, "batch": 1}  # activations are small
    whole = estimates(llama, "galore-adamw", **long)
    layer = estimates(
        llama, "galore-adamw", projection=ProjectionSettings(RANK, per_layer=True), **long
    )
    largest = max(one.nbytes for one in blank_model(llama, torch.bfloat16).parameters())
    assert whole.parts["gradients"] > 2 * largest
    assert layer.parts["gradients"] <= largest
    assert layer.total < whole.total


def test_clipping_per_layer_keeps_projected_gradients(llama):
    projection = ProjectionSettings(RANK, per_layer=True)
    found = estimates(llama, "galore-adamw", projection=projection, clip=True)
    model = real_model(llama, torch.bfloat16)
    optimizer = GaLoreAdamW(model, rank=RANK, per_layer=True, clip_norm=1.0, verbose=False)
    loss_of(model).backward()
    kept = sum(state["grad_of_step"].nbytes for state in optimizer.state.values())
    step = found.peaks["step"] - sum(found.parts[one] for one in ("weights", "states"))
    step -= found.parts["projectors"] + CUBLAS
    costs = parameter_costs(model, "galore-adamw", projection, clip=True)
    assert step - max(one.workspace for one in costs.values()) == kept


def test_the_workspace_is_what_a_real_step_allocates():
    weight = nn.Parameter(torch.zeros(512, 512))
    optimizer = AdamW8bit([weight])
    weight.grad = torch.ones(512, 512)
    optimizer.step()
    peak = profiled_peak(optimizer.step)
    model = nn.Linear(512, 512, bias=False, device="meta")
    [cost] = parameter_costs(model, "adamw-8bit", ProjectionSettings(RANK)).values()
    assert cost.workspace == pytest.approx(peak, rel=0.05)


def test_checkpointing_saves_activations(folder):
    plain, again = (estimates(folder, "adamw", checkpointing=one) for one in (False, True))
    assert again.saved < 0.4 * plain.saved
    assert again.total < plain.total


def test_a_longer_batch_costs_in_proportion(llama):
    one, two = (estimates(llama, "adamw", batch=batch) for batch in (1, 2))
    assert two.saved == pytest.approx(2 * one.saved, rel=0.02)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("60m", 58), ("130m", 134), ("350m", 368), ("1b", 1339), ("7b", 6738)],
)
def test_presets_have_the_sizes_of_the_paper(name, millions):
    model = blank_model(f"llama-{name}", torch.bfloat16)
    assert round(sum(one.numel() for one in model.parameters()) / 10**6) == millions
    assert all(one.is_meta for one in model.parameters())
    assert len(PRESETS) == 5


@pytest.mark.parametrize(
    ("bits", "projector_bits", "least"), [(None, None, 0.65), (8, None, 0.78), (8, 8, 0.82)]
)
def test_states_of_the_7b_model_are_smaller_than_those_of_adamw(bits, projector_bits, least):
    model = blank_model("llama-7b", torch.bfloat16)
    projection = ProjectionSettings(1024, bits=bits, projector_bits=projector_bits)  # type: ignore[arg-type]
    galore = parameter_costs(model, "galore-adamw", projection).values()
    adamw = parameter_costs(model, "adamw", projection).values()
    kept = sum(one.states + one.projectors for one in galore)
    assert kept <= (1 - least) * sum(one.states for one in adamw)
    assert sum(one.is_projected for one in galore) == 224


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
        assert found.total == sum(found.parts.values()) > CUBLAS + found.saved


def test_experts_are_multiplied_in_float32_too(tmp_path):
    experts = {"num_local_experts": 4, "hidden_size": 96, "intermediate_size": 272}
    made = AutoConfig.for_model(
        "mixtral",
        **experts,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )
    made.save_pretrained(tmp_path)
    saved = [estimates(tmp_path, "adamw", dtype=one).saved for one in ("bf16", "fp32")]
    assert 1.5 * saved[0] < saved[1] <= 2.1 * saved[0]


def test_a_model_without_a_loss_is_followed(tmp_path):
    LlamaConfig(**{**LLAMA.to_dict(), "architectures": ["LlamaModel"]}).save_pretrained(tmp_path)
    found = estimates(tmp_path, "adamw")
    assert found.parts["logits"] == 0 < found.saved


def test_cards():
    assert card_memory("rtx-4090") == card_memory("RTX-4090") == 24
    assert card_memory("22.5") == 22.5
    for wrong in ("voodoo", "-1", "nan", "inf"):
        with pytest.raises(JomaError, match="card must be a number of GiB or one of"):
            card_memory(wrong)


def test_default_ranks(llama):
    assert default_rank("llama-130m") == 256
    assert default_rank(llama) == 96 // 4


def test_what_is_refused(llama, tmp_path, monkeypatch):
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
    with pytest.raises(
        JomaError, match=r"neither a folder nor a hub id.*joma itself has llama-60m"
    ):
        blank_model("no such model")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({"model_type": "nonesuch"}))
    with pytest.raises(JomaError, match="model_type that the installed transformers knows"):
        blank_model(tmp_path / "other")
