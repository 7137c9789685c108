"""Which parameters GaLore projects."""

import gc

import pytest
import torch
import transformers
from torch import nn

from joma.errors import JomaError
from joma.optim import GaLoreAdamW
from joma.optim.galore.subspace import GradientMatrix, find_basis, orthonormal

TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama(**settings):
    config = transformers.LlamaConfig(
        **TINY, intermediate_size=48, num_key_value_heads=1, **settings
    )
    return transformers.LlamaForCausalLM(config)


def projected(model, **settings):
    made = GaLoreAdamW(model, **({"rank": 8, "verbose": False} | settings))
    return {matrix.name: matrix for matrix in made.projected}


@pytest.mark.parametrize("tied", [False, True])
def test_llama_without_embedding_and_head(tied):
    found = projected(llama(tie_word_embeddings=tied))
    assert len(found) == 14
    assert not [name for name in found if "embed" in name or "lm_head" in name]


def test_conv1d_of_gpt2():
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    found = projected(transformers.GPT2LMHeadModel(config))
    assert len(found) == 8
    assert found["transformer.h.0.attn.c_attn.weight"].shape == (32, 96)
    assert found["transformer.h.0.attn.c_attn.weight"].side == "left"


def test_attention_of_torch():
    found = projected(nn.TransformerEncoderLayer(32, 2, 64))
    assert set(found) == {
        "self_attn.in_proj_weight",
        "self_attn.out_proj.weight",
        "linear1.weight",
        "linear2.weight",
    }


class Named(nn.Module):
    """Layers whose names have those of heads and embeddings in them."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(99, 32)
        self.multi_head_attention = nn.Linear(32, 32)
        self.head_proj = nn.Linear(32, 32)
        self.embedding_hidden_mapping_in = nn.Linear(32, 32)
        self.classifier = nn.Linear(32, 20)
        self.positions = nn.Embedding(32, 32)
        self.output = nn.Linear(32, 99)


def test_names_are_compared_whole_and_output_layers_known_by_their_size():
    inside = {
        "multi_head_attention.weight",
        "head_proj.weight",
        "embedding_hidden_mapping_in.weight",
    }
    model = Named()
    assert set(projected(model)) == inside
    named = list(model.named_parameters())
    assert set(projected(named)) == inside
    del model  # only names are left
    gc.collect()
    assert set(projected(named)) == inside | {"output.weight", "positions.weight"}


def test_the_first_group_that_matches_decides():
    groups = [
        {"match": r"layers\.0\.mlp", "rank": 4},
        {"match": "mlp", "rank": None},
        {"match": "embed_tokens", "rank": 5},
    ]
    found = projected(llama(), groups=groups)
    assert {one.rank for name, one in found.items() if "layers.0.mlp" in name} == {4}
    assert not [name for name in found if "layers.1.mlp" in name]
    assert {one.rank for name, one in found.items() if "attn" in name} == {8}
    assert found["model.embed_tokens.weight"].rank == 5


def decay_groups(model, *, named):
    """Groups as trainers make them: matrices decay, the rest does not."""
    entries = list(model.named_parameters())
    chosen = [
        [one if named else one[1] for one in entries if (one[1].ndim == 2) == matrix]
        for matrix in (True, False)
    ]
    return [{"params": chosen[0], "weight_decay": 0.1}, {"params": chosen[1], "weight_decay": 0.0}]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_groups_without_a_rank_take_that_of_the_optimizer(tied, named):
    model = llama(tie_word_embeddings=tied)
    made = GaLoreAdamW(decay_groups(model, named=named), rank=8, verbose=False)
    assert {one.name: one for one in made.projected} == projected(model)
    decay = {
        id(one): group["weight_decay"] for group in made.param_groups for one in group["params"]
    }
    assert decay == {id(one): 0.1 if one.ndim == 2 else 0.0 for one in model.parameters()}


def test_parameters_without_names_are_known_by_their_model():
    model = llama()
    assert projected(model.parameters()).keys() == projected(model).keys()
    found = projected(model.parameters(), groups=[{"match": "mlp", "rank": 4}])
    assert {one.rank for name, one in found.items() if "mlp" in name} == {4}


def test_of_parameters_that_no_model_has_every_matrix_is_projected():
    loose = [nn.Parameter(torch.zeros(32, 16)), nn.Parameter(torch.zeros(32))]
    assert list(projected(loose)) == ["parameter 0"]
    assert list(projected([{"params": loose, "weight_decay": 0.1}])) == ["parameter 0"]


def test_groups_with_a_rank_decide_alone():
    model = llama()
    groups = decay_groups(model.model.layers[0], named=True)
    groups += [{"params": [("head", model.lm_head.weight)], "rank": 8}]
    assert list(projected(groups)) == ["head"]
    groups[2].pop("rank")
    with pytest.raises(JomaError, match="no rank was given"):
        projected(groups, rank=None)


def test_frozen_parameters_are_left_out():
    model = llama()
    model.model.layers[0].requires_grad_(False)
    assert len(projected(model)) == 7


def test_a_model_without_matrices_is_refused():
    with pytest.raises(JomaError, match="no matrix of a linear layer was found"):
        projected(nn.Sequential(nn.Embedding(64, 32), nn.LayerNorm(32)))


def test_a_rank_of_at_least_the_shorter_side_skips_a_matrix():
    found = projected(llama(), rank=16)  # keys and values have 16 rows
    assert not [name for name in found if "k_proj" in name or "v_proj" in name]
    assert len(found) == 10


SPECTRA = {
    "power law": lambda index: 1 / index,
    "exponential": lambda index: torch.exp(-index / 2),
    "one direction": lambda index: torch.where(index == 1, 1e6, 1.0),
    "rank three": lambda index: (index <= 3).float(),
    "flat": torch.ones_like,
}


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("start", ["random", "old", "useless"])
def test_one_power_iteration_finds_the_subspace(name, side, start):
    random = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(160, 96, generator=random))[0]
    right = torch.linalg.qr(torch.randn(96, 96, generator=random))[0]
    values = SPECTRA[name](torch.arange(1.0, 97.0))
    matrix = (left * values) @ right.mT
    directions = left if side == "left" else right
    old = {"random": None, "old": directions[:, 4:28], "useless": directions[:, 48:72]}[start]
    basis = find_basis(GradientMatrix(matrix), side, 24, old, random)
    assert torch.allclose(basis.mT @ basis, torch.eye(24), atol=1e-5)
    inside = GradientMatrix(matrix).project(basis, side).square().sum() / matrix.square().sum()
    best = values[:24].square().sum() / values.square().sum()
    assert inside > 0.98 * best


@pytest.mark.parametrize("shape", [(300, 130), (200, 7), (150, 128)])
def test_columns_of_many_sizes_become_orthonormal(shape):
    columns = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    columns *= torch.logspace(0, -6, shape[1])
    one = orthonormal(columns)
    assert torch.allclose(one.mT @ one, torch.eye(shape[1]), atol=1e-5)
    assert torch.allclose(one @ (one.mT @ columns), columns, atol=1e-5)


def test_columns_that_are_not_finite_are_refused():
    with pytest.raises(JomaError, match="not finite"):
        orthonormal(torch.full((8, 3), float("nan")))
