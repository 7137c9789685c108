"""The data a block is trained on."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma.errors import JomaError
from joma.theory import _checks
from joma.theory._checks import Array


@dataclass(frozen=True, eq=False)
class Samples:
    """The data of Eqn 2: token frequencies, and what drives the hidden nodes.

    Attributes:
        x: frequency of each token in each sample, shape (N, M), ≥ 0.
        gradient: g_k, the gradient each hidden node receives (Eqn 9), shape (N,) or (N, K).
        labels: instead of `gradient`, the class of each sample, shape (N,), for cross-entropy;
            hidden node k is then the score of class k.
        query: the query token of each sample, shape (N,), any whole numbers ≥ 0; None for one
            query. Afterwards the position of each in `query_tokens`.
        probability: weight of each sample in the expectation, shape (N,); None for equal ones.
        classes: number of classes; one more than the largest label if None.
        query_tokens: the different queries, in increasing order.
    """

    x: ArrayLike
    gradient: ArrayLike | None = None
    labels: ArrayLike | None = None
    query: ArrayLike | None = None
    probability: ArrayLike | None = None
    classes: int | None = None
    query_tokens: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        x = _checks.shape("x", _checks.non_negative("x", self.x), (None, None))
        n = x.shape[0]
        if n == 0:
            raise JomaError("x must have at least one sample, got none")
        if (self.gradient is None) == (self.labels is None):
            raise JomaError("give either gradient or labels, and not both")
        self._keep("x", x)
        if self.gradient is not None:
            g = _checks.at_least_1d("gradient", self.gradient)
            g = _checks.shape("gradient", g[:, None] if g.ndim == 1 else g, (n, None))
            self._keep("gradient", g)
        if self.labels is not None:
            self._keep("labels", self._whole("labels", self.labels))
            largest = int(np.max(np.asarray(self.labels))) + 1
            classes = largest if self.classes is None else self.classes
            if _checks.whole("classes", classes, 1) < largest:
                raise JomaError(f"classes must exceed the largest label {largest - 1}")
            object.__setattr__(self, "classes", int(classes))
        if self.query is not None:
            tokens, position = np.unique(self._whole("query", self.query), return_inverse=True)
            self._keep("query", position)
            self._keep("query_tokens", tokens)
        else:
            self._keep("query_tokens", np.zeros(1, dtype=np.int64))
        share = np.full(n, 1 / n) if self.probability is None else self.probability
        share = _checks.shape("probability", _checks.at_least_1d("probability", share), (n,))
        self._keep("probability", _checks.distribution("probability", share))

    @property
    def tokens(self) -> int:
        """M, the number of contextual tokens."""
        return np.shape(self.x)[1]

    @property
    def nodes(self) -> int:
        """K, the number of hidden nodes."""
        if self.gradient is not None:
            return np.shape(self.gradient)[1]
        assert self.classes is not None
        return self.classes

    @property
    def queries(self) -> int:
        """The number of different queries."""
        return len(self.query_tokens)

    def _whole(self, name: str, value: ArrayLike) -> NDArray[np.int64]:
        whole = _checks.integers(name, value, 0)
        if whole.shape != (len(np.asarray(self.x)),):
            raise JomaError(
                f"{name} must have shape ({len(np.asarray(self.x))},), got {whole.shape}"
            )
        return whole

    def _keep(self, name: str, value: Array | NDArray[np.int64]) -> None:
        """Keeps a copy that cannot be written to: what was checked stays what it was."""
        object.__setattr__(self, name, _checks.frozen(value))
