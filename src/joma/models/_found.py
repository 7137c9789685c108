"""What was found in a model: its weights, attentions, MLPs and blocks, and what is missing."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from joma.models._weight import Weight


@dataclass(frozen=True)
class Attention:
    """One module that computes attention, and the weights it does so with.

    Args:
        module: its path.
        layer: the number of its block.
        query: makes the queries.
        key: makes the keys; None where the layer uses another layer's.
        value: makes the values.
        output: is applied to what was gathered.
        heads: how many heads the queries have; None where that is not known.
        key_heads: how many the keys have.
        latent: whether queries and keys are made from compressed vectors (MLA), so that the
            product of `query` and `key` is not that of the scores.
        checked: whether a traced forward pass saw these weights make the queries and keys.
    """

    module: str
    layer: int | None
    query: Weight | None = None
    key: Weight | None = None
    value: Weight | None = None
    output: Weight | None = None
    heads: int | None = None
    key_heads: int | None = None
    latent: bool = False
    checked: bool = False

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Those it has, in the order query, key, value, output."""
        every = (self.query, self.key, self.value, self.output)
        return tuple(weight for weight in every if weight is not None)

    @property
    def has_scores(self) -> bool:
        """Whether the matrix WqᵀWk of every head can be made from `query` and `key`."""
        both = self.query is not None and self.key is not None
        return both and bool(self.heads) and bool(self.key_heads) and not self.latent


@dataclass(frozen=True)
class Mlp:
    """One MLP, or one expert of a mixture.

    Args:
        module: its path; for experts stored as one parameter, "…experts[3]".
        layer: the number of its block.
        lower: the first matrix; in a gated MLP the gate.
        up: the gate's partner.
        down: the second matrix.
        expert: its number within a mixture.
        down_path: the module whose input is the hidden activations; None where there is no such
            module (experts stored as one parameter).
    """

    module: str
    layer: int | None
    lower: Weight | None = None
    up: Weight | None = None
    down: Weight | None = None
    expert: int | None = None
    down_path: str | None = None

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Those it has, in the order lower, up, down."""
        return tuple(it for it in (self.lower, self.up, self.down) if it is not None)


@dataclass(frozen=True)
class Block:
    """One block of a tower; its output is the residual stream.

    Args:
        module: its path.
        layer: its number.
    """

    module: str
    layer: int | None


@dataclass(frozen=True)
class Found:
    """What was found in a model.

    Args:
        embeddings: the token embeddings; several where towers have their own.
        attentions: in the order of the model's modules.
        mlps: the same, experts one by one.
        blocks: the same.
        missing: why something is not among them: by role ("query") where the model has none that
            was recognised, by module path where one cannot be measured.
        unrecognised: names of the matrices in the blocks that have no role, such as a router's.
    """

    embeddings: tuple[Weight, ...] = ()
    attentions: tuple[Attention, ...] = ()
    mlps: tuple[Mlp, ...] = ()
    blocks: tuple[Block, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    unrecognised: tuple[str, ...] = ()

    @property
    def weights(self) -> tuple[Weight, ...]:
        """All weights: the embeddings first, then attention and MLPs block by block."""
        inside = [*self.attentions, *self.mlps]
        place = {block.module: at for at, block in enumerate(self.blocks)}

        def block_of(part: Attention | Mlp) -> int:
            path = part.module
            while path:
                if path in place:
                    return place[path]
                path = path.rpartition(".")[0]
            return -1

        inside.sort(key=block_of)  # stable: attention before the MLP
        return self.embeddings + tuple(weight for part in inside for weight in part.weights)

    def of_roles(self, roles: Iterable[str]) -> Iterator[Weight]:
        """The weights of some roles, in the same order."""
        wanted = set(roles)
        return (weight for weight in self.weights if weight.role in wanted)
