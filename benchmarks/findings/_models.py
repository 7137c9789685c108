"""The models that are trained, and where their parts are."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.findings._case import Case
from benchmarks.findings._data import LENGTH

HEADS = 4
TASKS = {
    "llama": "decoder",
    "neox": "decoder",
    "gpt2": "decoder",
    "encoder": "encoder",
    "t5": "encoder-decoder",
}


class MaskedEncoder(nn.Module):
    """An `nn.TransformerEncoder` with ReLU MLPs that names masked tokens."""

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.3)
        self.positions = nn.Parameter(_waves(LENGTH, width))
        layer = nn.TransformerEncoderLayer(
            width, HEADS, 2 * width, dropout, "relu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        for one in self.encoder.layers:  # copies of one layer would begin alike
            for weight in one.parameters():
                if weight.ndim > 1:
                    nn.init.xavier_uniform_(weight)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits at every place."""
        embedded = self.embedding(input_ids) + self.positions[: input_ids.shape[1]]
        return self.head(self.encoder(embedded))


def _waves(length: int, width: int) -> Tensor:
    """Return sines and cosines of places, from which neighbours are found soon."""
    place = torch.arange(length)[:, None]
    frequency = torch.exp(-math.log(100.0) * torch.arange(0, width, 2) / width)
    return torch.cat([torch.sin(place * frequency), torch.cos(place * frequency)], dim=1)


def build(case: Case) -> nn.Module:
    """Return the model of a case with random weights from its seed."""
    import transformers  # not before: judging needs no models

    torch.manual_seed(1000 + case.seed)
    words, width, layers = case.vocabulary + 2, case.width, case.layers
    relu = case.variant == "dead_mlp"
    tokens: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if case.architecture == "encoder":
        return MaskedEncoder(words, width, layers, case.dropout)
    if case.architecture == "gpt2":
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), case.dropout)
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=words,
                n_positions=LENGTH,
                n_embd=width,
                n_layer=layers,
                n_head=HEADS,
                n_inner=2 * width,
                activation_function="relu" if relu else "gelu_new",
                use_cache=False,
                **dropout,
                **tokens,
            )
        )
    if case.architecture == "t5":
        gated = case.variant == "rank_gate"
        tokens |= {"pad_token_id": words - 1, "decoder_start_token_id": words - 1}
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=words,
                d_model=width,
                d_kv=width // HEADS,
                d_ff=2 * width,
                num_layers=layers // 2,
                num_decoder_layers=layers - layers // 2,
                num_heads=HEADS,
                dropout_rate=case.dropout,
                feed_forward_proj="gated-silu" if gated else "relu",
                use_cache=False,
                **tokens,
            )
        )
        if relu:
            block: Any = blocks(model, case)[case.layer or 0]
            _add_bias(block.layer[-1].DenseReluDense)
        return model
    shared: dict[str, Any] = {
        "vocab_size": words,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "max_position_embeddings": LENGTH,
        "attention_dropout": case.dropout,
        "use_cache": False,
        **tokens,
    }
    if case.architecture == "neox":
        activation = "relu" if relu else "gelu"
        return transformers.GPTNeoXForCausalLM(
            transformers.GPTNeoXConfig(hidden_act=activation, hidden_dropout=case.dropout, **shared)
        )
    activation = "relu" if relu else "silu"
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(hidden_act=activation, mlp_bias=relu, **shared)
    )


def _add_bias(mlp: Any) -> None:
    """Give the lower layer of a T5 MLP a bias, which it has none of."""
    without = mlp.wi
    mlp.wi = nn.Linear(without.in_features, without.out_features)
    with torch.no_grad():
        mlp.wi.weight.copy_(without.weight)


def logits_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return what the model answers."""
    answer = model(**inputs)
    return answer if isinstance(answer, Tensor) else answer.logits


def blocks(model: Any, case: Case) -> nn.ModuleList:
    """Return the layers of a model, of the case's stack where there are two."""
    match case.architecture:
        case "llama":
            return model.model.layers
        case "neox":
            return model.gpt_neox.layers
        case "gpt2":
            return model.transformer.h
        case "encoder":
            return model.encoder.layers
        case "t5":
            return (model.encoder if case.stack == "encoder" else model.decoder).block


def stacks(case: Case) -> tuple[str, ...]:
    """Return the names of the stacks of layers."""
    return ("encoder", "decoder") if case.architecture == "t5" else ("",)


@dataclass(frozen=True)
class Matrix:
    """A weight matrix, or a part of a fused one.

    Attributes:
        view: Returns the part as a view on the parameter, of any shape.
    """

    view: Callable[[], Tensor]

    def get(self) -> Tensor:
        """Return a copy as a matrix."""
        view = self.view().detach()
        return view.reshape(-1, view.shape[-1]).clone()

    def set(self, matrix: Tensor) -> None:
        """Write a matrix of the same shape."""
        with torch.no_grad():
            view = self.view()
            view.copy_(matrix.reshape(view.shape))


def matrix(block: Any, architecture: str, part: str) -> Matrix:
    """Return a matrix of a layer.

    Args:
        block: The layer.
        architecture: Of the model.
        part: "q", "k", "v", "o", "gate", "up" or "down".
    """
    fused = {"q": 0, "k": 1, "v": 2}
    if architecture == "llama":
        module = block.mlp if part in ("gate", "up", "down") else block.self_attn
        return Matrix(lambda: getattr(module, f"{part}_proj").weight)
    if architecture == "neox":
        if part in fused:
            weight = block.attention.query_key_value.weight
            size = weight.shape[0] // (3 * HEADS)
            shape = (HEADS, 3, size, weight.shape[1])
            return Matrix(lambda: weight.view(shape)[:, fused[part]])
        names = {"up": block.mlp.dense_h_to_4h, "down": block.mlp.dense_4h_to_h}
        return Matrix(lambda: (names | {"o": block.attention.dense})[part].weight)
    if architecture == "encoder":
        if part in fused:
            weight = block.self_attn.in_proj_weight
            return Matrix(lambda: weight.chunk(3)[fused[part]])
        modules = {"o": block.self_attn.out_proj, "up": block.linear1, "down": block.linear2}
        return Matrix(lambda: modules[part].weight)
    if architecture == "t5":
        if part in (*fused, "o"):
            return Matrix(lambda: getattr(block.layer[0].SelfAttention, part).weight)
        mlp = block.layer[-1].DenseReluDense
        gated = hasattr(mlp, "wi_0")
        names = {"gate": "wi_0", "up": "wi_1" if gated else "wi", "down": "wo"}
        return Matrix(lambda: getattr(mlp, names[part]).weight)
    if part in fused:
        weight = block.attn.c_attn.weight
        return Matrix(lambda: weight.chunk(3, dim=1)[fused[part]])
    modules = {"o": block.attn.c_proj, "up": block.mlp.c_fc, "down": block.mlp.c_proj}
    return Matrix(lambda: modules[part].weight)


def mlp_bias(block: Any, architecture: str) -> Tensor:
    """Return the bias before the ReLU of a layer."""
    match architecture:
        case "llama":
            return block.mlp.gate_proj.bias
        case "neox":
            return block.mlp.dense_h_to_4h.bias
        case "encoder":
            return block.linear1.bias
        case "t5":
            return block.layer[-1].DenseReluDense.wi.bias
        case _:
            return block.mlp.c_fc.bias
