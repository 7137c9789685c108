"""Predictors of the neurons and heads that matter, and the file they are kept in.

A predictor is a network of two layers and low rank, d → r → outputs. It is given a hidden state and
returns one score for each output; those with the largest scores are computed.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional

from joma.common.files import replacing
from joma.errors import JomaError, printable

FORMAT = "joma sparsify 1"
_PARTS = ("first", "shift", "second", "bias")
_DTYPES = {
    str(it).removeprefix("torch."): it
    for it in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}
_MOST_LAYERS = 10_000
_AT_ONCE = 2**22
_PRIME = 65521


@dataclass(frozen=True, eq=False)
class Predictor:
    """One predictor: second · (first · x̂ + shift) + bias, x̂ the hidden state by its rms.

    There is no nonlinearity between: on two layers of SmolLM2-135M a ReLU kept no more energy.

    Attributes:
        first: (r, d).
        shift: (r,).
        second: (outputs, r).
        bias: (outputs,).
    """

    first: Tensor
    shift: Tensor
    second: Tensor
    bias: Tensor

    def __call__(self, state: Tensor) -> Tensor:
        """Return the scores of a hidden state, (..., outputs)."""
        inner = functional.linear(normed(state), self.first, self.shift)
        return functional.linear(inner, self.second, self.bias)

    def to(self, *where: Any) -> "Predictor":
        """Return it on another device or in another type."""
        return Predictor(*(getattr(self, name).to(*where) for name in _PARTS))

    @property
    def rank(self) -> int:
        """The width r of the layer between."""
        return self.first.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes read for one token."""
        return sum(getattr(self, name).nbytes for name in _PARTS)


def normed(state: Tensor) -> Tensor:
    """Return hidden states divided by their root mean square."""
    return functional.rms_norm(state, state.shape[-1:], eps=1e-6)


@dataclass(frozen=True)
class SparsityFacts:
    """What a file of predictors is of, and how they were fitted.

    Attributes:
        fingerprint: Of the model, see `model_fingerprint`.
        model_class: The name of the model's class.
        source: The model as the user named it.
        dtype: The type the model computed in, "float32".
        layers: How many blocks it has.
        width: Width d of its residual stream.
        neurons: Neurons of each MLP.
        heads: Heads of each layer; 0 where none were fitted.
        gated: Whether its MLPs have gates.
        mlp_sparsity: Share of the neurons the predictors were fitted to leave out.
        heads_sparsity: The same of heads, None where they stay dense.
        rank_ratio: The rank of the predictors divided by the width.
        tokens: How many tokens they were fitted on.
        corpus: What text that was.
    """

    fingerprint: str
    model_class: str
    source: str
    dtype: str
    layers: int
    width: int
    neurons: tuple[int, ...]
    heads: int
    gated: bool
    mlp_sparsity: float
    heads_sparsity: float | None
    rank_ratio: float
    tokens: int
    corpus: str = ""

    @property
    def rank(self) -> int:
        """The rank of every predictor."""
        return rank_of(self.rank_ratio, self.width)


def rank_of(rank_ratio: float, width: int) -> int:
    """Return the rank of predictors of a model of this width."""
    return max(1, round(rank_ratio * width))


@dataclass(frozen=True, eq=False)
class Predictors:
    """The predictors of a model, and what its controls need.

    Attributes:
        facts: What they are of.
        mlp: One for each layer.
        heads: One for each layer from 1 on, by layer; empty where heads stay dense.
        importance: By layer, mean of each neuron's share of its token's scores, (N,).
        thresholds: By layer the 0%, 1%, … 100% quantiles of |act(gate)| over tokens and neurons.
    """

    facts: SparsityFacts
    mlp: list[Predictor]
    heads: dict[int, Predictor] = field(default_factory=dict)
    importance: list[Tensor] = field(default_factory=list)
    thresholds: list[Tensor] = field(default_factory=list)

    def threshold(self, layer: int, sparsity: float) -> float:
        """Return below what |act(gate)| lies at this share of the corpus, for a layer."""
        quantiles = self.thresholds[layer].float()
        place = sparsity * (len(quantiles) - 1)
        low = min(int(place), len(quantiles) - 2)
        return float(torch.lerp(quantiles[low], quantiles[low + 1], place - low))

    @property
    def nbytes(self) -> int:
        """Bytes of all predictors."""
        return sum(one.nbytes for one in (*self.mlp, *self.heads.values()))

    def save(self, path: str | Path) -> Path:
        """Write them to a safetensors file, whole or not at all, and return its path."""
        tensors: dict[str, Tensor] = {}
        for layer, one in enumerate(self.mlp):
            tensors |= {f"mlp.{layer}.{name}": getattr(one, name) for name in _PARTS}
            tensors[f"importance.{layer}"] = self.importance[layer]
            tensors[f"thresholds.{layer}"] = self.thresholds[layer]
        for layer, one in self.heads.items():
            tensors |= {f"heads.{layer}.{name}": getattr(one, name) for name in _PARTS}
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        metadata = {"format": FORMAT, "facts": json.dumps(asdict(self.facts))}
        with replacing(Path(path)) as file:
            file.write(save(tensors, metadata=metadata))
        return Path(path)


def load_predictors(path: str | Path, device: str | torch.device = "cpu") -> Predictors:
    """Read predictors from the file `Predictors.save` wrote; nothing in it is executed.

    Args:
        path: The file.
        device: Where its tensors are put.

    Raises:
        JomaError: In one sentence, why the file cannot be used.
    """
    path = Path(path)
    if not path.is_file():
        raise JomaError(f"{path} is no file of predictors: there is no such file")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise JomaError(f"{path} holds no predictors: joma sparsify fit writes such files")
            facts = _facts(metadata.get("facts", ""), path)
            shapes = _shapes(facts)
            names = set(file.keys())
            if names != set(shapes):
                odd = sorted(names ^ set(shapes))[0]
                raise JomaError(f"{path} is damaged: {printable(odd, 60)!r} is missing or unknown")
            for name, shape in shapes.items():
                found = tuple(file.get_slice(name).get_shape())
                if found != shape:
                    raise JomaError(f"{path} is damaged: {name} must be {shape}, is {found}")
            tensors = {name: file.get_tensor(name) for name in shapes}
    except (SafetensorError, OSError) as error:
        raise JomaError(f"{path} is no safetensors file that can be read ({error})") from error
    for name, tensor in tensors.items():
        wanted = torch.float32 if name.startswith(("imp", "thr")) else _DTYPES[facts.dtype]
        if tensor.dtype != wanted:
            raise JomaError(f"{path} is damaged: {name} must be {wanted}, is {tensor.dtype}")
        if not torch.isfinite(tensor).all():
            raise JomaError(f"{path} is damaged: {name} holds NaN or infinity")
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}

    def predictor(kind: str, layer: int) -> Predictor:
        return Predictor(*(tensors[f"{kind}.{layer}.{name}"] for name in _PARTS))

    layers = range(facts.layers)
    return Predictors(
        facts,
        [predictor("mlp", layer) for layer in layers],
        {layer: predictor("heads", layer) for layer in layers[1:]} if facts.heads else {},
        [tensors[f"importance.{layer}"] for layer in layers],
        [tensors[f"thresholds.{layer}"] for layer in layers],
    )


def _facts(written: str, path: Path) -> SparsityFacts:
    """Return the facts of a file, each of the type and in the range it must have."""
    wrong = JomaError(f"{path} is damaged: what its predictors are of cannot be read")
    try:
        found: Mapping[str, Any] = json.loads(written)
        if set(found) != {it.name for it in fields(SparsityFacts)}:
            raise wrong
        facts = SparsityFacts(**{**found, "neurons": tuple(found["neurons"])})
    except (ValueError, TypeError, RecursionError) as error:
        raise wrong from error
    words = (facts.fingerprint, facts.model_class, facts.source, facts.dtype, facts.corpus)
    numbers = (facts.layers, facts.width, facts.heads, facts.tokens, *facts.neurons)
    shares = (facts.mlp_sparsity, facts.rank_ratio, facts.heads_sparsity or 0.0)
    right = (
        all(isinstance(it, str) for it in words)
        and all(type(it) is int and 0 <= it < 2**40 for it in numbers)
        and all(isinstance(it, float | int) and 0 <= it <= 16 for it in shares)
        and facts.dtype in _DTYPES
        and 1 <= facts.layers == len(facts.neurons) <= _MOST_LAYERS
        and facts.width > 0
    )
    if not right:
        raise wrong
    return facts


def _shapes(facts: SparsityFacts) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of all tensors that a file with these facts must have."""
    rank, shapes = facts.rank, dict[str, tuple[int, ...]]()

    def add(kind: str, layer: int, outputs: int) -> None:
        every = ((rank, facts.width), (rank,), (outputs, rank), (outputs,))
        shapes.update(
            {f"{kind}.{layer}.{name}": of for name, of in zip(_PARTS, every, strict=True)}
        )

    for layer, neurons in enumerate(facts.neurons):
        add("mlp", layer, neurons)
        shapes[f"importance.{layer}"] = (neurons,)
        shapes[f"thresholds.{layer}"] = (101,)
        if facts.heads and layer:
            add("heads", layer, facts.heads)
    return shapes


def model_fingerprint(model: nn.Module) -> str:
    """Return a SHA-256 over the model's class and its parameters: names, shapes, types, checksums.

    The checksums are exact sums of whole numbers, so that they agree on a CPU and a GPU, and every
    byte counts in them: a weight that is changed changes one. They tell models apart that are
    confused by mistake; they are no protection against somebody who builds a collision.
    """
    digest = hashlib.sha256(f"{type(model).__name__}\n".encode())
    for name, parameter in sorted(model.named_parameters(), key=lambda pair: pair[0]):
        shape, dtype = tuple(parameter.shape), str(parameter.dtype)
        plain, weighted = _sums(parameter.detach())
        digest.update(f"{name}\0{shape}\0{dtype}\0{plain}\0{weighted}\n".encode())
    return digest.hexdigest()


def _sums(tensor: Tensor) -> tuple[int, int]:
    """Return the sum of a tensor's bits as whole numbers, and one weighted by their places."""
    if tensor.is_meta or tensor.numel() == 0:
        return 0, 0
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.contiguous().view(-1).view(kinds[tensor.element_size()])
    plain = weighted = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(bits), _AT_ONCE):
        part = bits[start : start + _AT_ONCE].long()
        places = torch.arange(start, start + len(part), device=tensor.device) % _PRIME + 1
        plain, weighted = plain + part.sum(), weighted + (part * places).sum()
    return int(plain), int(weighted)
