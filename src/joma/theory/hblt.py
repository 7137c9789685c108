"""Hierarchical binary latent trees, HBLT(ρ) (JoMA §5 and appendix A.5).

A class label y₀ stands at the root. Below it are L levels of binary variables: the top latents,
drawn given the class, and under them the levels down to the leaves (the tokens), each node a
noisy copy of its parent. A node's height counts from the leaves: a leaf has height 0, a top
latent L − 1, the class L. Index 0 of a probability is "off" (y = 0), index 1 is "on".
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma.errors import JomaError
from joma.theory import _checks
from joma.theory._checks import frozen, generator, one

Array = _checks.Array
Node: TypeAlias = tuple[int, int]
"""A binary variable of a tree: (level, place in the level), level 0 at the top."""


def transition(rho: ArrayLike) -> Array:
    """Definition 1, Eqn 89: M(ρ) = ½[[1+ρ, 1−ρ], [1−ρ, 1+ρ]], columns given the parent's value.

    Args:
        rho: uncertainty parameters in [−1, 1], shape (...).

    Returns:
        Shape (..., 2, 2).
    """
    rho = _checks.within("rho", rho, -1, 1)
    same, other = (1 + rho) / 2, (1 - rho) / 2
    return np.stack([np.stack([same, other], -1), np.stack([other, same], -1)], -2)


def p(rho: ArrayLike) -> Array:
    """Definition 1: ½(1+ρ, 1−ρ), the distribution of a binary variable.

    Args:
        rho: 2P[y=0] − 1, in [−1, 1], shape (...).

    Returns:
        Shape (..., 2).
    """
    rho = _checks.within("rho", rho, -1, 1)
    return np.stack([(1 + rho) / 2, (1 - rho) / 2], -1)


def path(rhos: ArrayLike) -> Array:
    """Lemmas 8 and 9: M(ρ₁)M(ρ₂)…M(ρₙ) = M(ρ₁ρ₂…ρₙ), along the edges of a descending path.

    Args:
        rhos: the edges' uncertainty parameters, shape (..., n); their order does not matter.

    Returns:
        P[descendant | ancestor], shape (..., 2, 2).
    """
    rhos = _checks.at_least_1d("rhos", rhos)
    return transition(np.prod(_checks.within("rhos", rhos, -1, 1), axis=-1))


def root_uncertainty(class_probs: ArrayLike, child_off_probs: ArrayLike) -> Array:
    """Theorem 5's ρ₀ = Σ_k p₀(k)(2P[y=0|k] − 1), that is 2P[y=0] − 1 of a top latent.

    Args:
        class_probs: p₀, the distribution of the class, shape (..., C).
        child_off_probs: P[y=0|k] of a top latent for every class k, shape (..., C).

    Returns:
        ρ₀ in [−1, 1], one for each entry of the leading axes.
    """
    class_probs, child_off_probs = _checks.class_arguments(class_probs, child_off_probs)
    return np.clip(np.sum(class_probs * (2 * child_off_probs - 1), axis=-1), -1, 1)


def latent_distribution(
    rho_to_top: ArrayLike, class_probs: ArrayLike, child_off_probs: ArrayLike
) -> Array:
    """Eqn 103: p_c = p(ρ_{c|1} ρ₀), the distribution of a latent c below a top latent.

    Args:
        rho_to_top: ρ_{c|1}, the product of ρ along the edges from the top latent down to c.
        class_probs: p₀, shape (..., C).
        child_off_probs: P[y=0|k] of that top latent, shape (..., C).

    Returns:
        (P[y_c=0], P[y_c=1]), shape (..., 2).
    """
    rho_to_top = _checks.within("rho_to_top", rho_to_top, -1, 1)
    root = root_uncertainty(class_probs, child_off_probs)
    return p(rho_to_top * root)


def cooccurrence(height: ArrayLike, depth: ArrayLike, rho: ArrayLike, rho0: ArrayLike) -> Array:
    """Theorem 5: P[y_l=1 | y_m=1] = ½(1 + ρ^{2H} − 2ρ^{L−1}ρ₀)/(1 − ρ^{L−1}ρ₀).

    The arguments broadcast. Good to rounding also at ρ and ρ₀ close to 1, where the fraction as
    it stands loses its digits.

    Args:
        height: H, of the tokens' common latent ancestor; 0 ≤ H ≤ L − 1. Tokens that share no
            latent but only the class are not covered, see `Tree.joint`.
        depth: L, the number of levels below the class.
        rho: ρ of every edge between binary variables, in [−1, 1].
        rho0: ρ₀ of the top latent above both tokens, see `root_uncertainty`.

    Raises:
        ValueError: also where ρ^{L−1}ρ₀ = 1, as the token m then never occurs.
    """
    from scipy.special import xlogy  # here: `import joma.train` does not wait for SciPy

    height, depth = _checks.heights(height, depth)
    rho = _checks.within("rho", rho, -1, 1)
    rho0 = _checks.within("rho0", rho0, -1, 1)
    # 1 − xⁿ and 1 − xy from their logarithms and complements: nothing cancels near 1.
    size, size0 = np.abs(rho), np.abs(rho0)
    log_power = xlogy(depth - 1, size)
    same_sign = np.where(depth % 2 == 1, rho0 > 0, rho * rho0 > 0)
    token_on_twice = np.where(
        same_sign,
        (1 - size0) - size0 * np.expm1(log_power),
        1 + size0 * np.exp(log_power),
    )
    if np.any(token_on_twice == 0):
        raise JomaError(
            "rho0 must not give rho**(depth - 1) * rho0 = 1, where the token never occurs"
        )
    return 1 + np.expm1(xlogy(2 * height, size)) / (2 * token_on_twice)


def cooccurrence_near_one(height: ArrayLike, depth: ArrayLike, epsilon: ArrayLike) -> Array:
    """Eqn 8, ρ = ρ₀ = 1 − ε: P[y_l=1 | y_m=1] = 1 − H/L + H(2H−L)/(2L)·ε + O(ε²).

    Returns the right side without its O(ε²); the arguments broadcast as in `cooccurrence`.
    """
    height, depth = _checks.heights(height, depth)
    epsilon = _checks.within("epsilon", epsilon, 0, 1)
    return 1 - height / depth + height * (2 * height - depth) / (2 * depth) * epsilon


def dissociation_bound(height: ArrayLike, depth: ArrayLike, epsilon: ArrayLike) -> Array:
    """New, after Theorem 5: P[y_l=0 | y_m=1] ≤ min(Hε, ½)(1 + 1/(Lε)) for ρ = ρ₀ = 1 − ε.

    That is H/L + Hε where Hε ≤ ½. The remark after the theorem gives the limit alone. It follows
    from 1 − ρ^{2H} ≤ min(2Hε, 1) and (1 − ε)^L ≤ 1/(1 + Lε), for every 0 ≤ ε ≤ 1. It is attained
    for Lε → 0 and at most 2.0541 times too large, which is approached at Hε = ½, Lε = 1.793 for
    ε → 0. So a deep hierarchy and a shallow ancestor, H ≪ L, make the tokens co-occur surely only
    if Hε ≪ 1.
    """
    height, depth = _checks.heights(height, depth)
    epsilon = _checks.within("epsilon", epsilon, 0, 1)
    flips = height * epsilon
    deep = depth * np.where(flips > 0.5, epsilon, 1.0)
    return np.where(flips > 0.5, 0.5 + 0.5 / deep, height / depth + flips)


@dataclass(frozen=True, eq=False)
class Tree:
    """Definition 2: an HBLT of any shape, with its own ρ on every edge.

    Level 0 holds the top latents, level L − 1 the leaves. Given the class the top latents are
    independent; every other node equals its parent with probability ½(1+ρ) of its own edge.

    Attributes:
        class_probs: p₀, the distribution of the class, shape (C,).
        child_off_probs: P[y=0|k] of every top latent, shape (top latents, C).
        parents: for each level below the top, the place of every node's parent in the level
            above, shape (nodes,).
        rhos: for each level below the top, ρ of the edge to every node's parent, shape (nodes,).
    """

    class_probs: Array
    child_off_probs: Array
    parents: tuple[NDArray[np.int64], ...] = ()
    rhos: tuple[Array, ...] = ()

    def __post_init__(self) -> None:
        class_probs, off = _checks.class_arguments(self.class_probs, self.child_off_probs)
        if class_probs.ndim != 1:
            raise JomaError(f"class_probs must have one axis, got shape {class_probs.shape}")
        if off.ndim != 2 or off.shape[0] == 0:
            raise JomaError(
                f"child_off_probs must have shape (top latents, {class_probs.size}), "
                f"got {off.shape}"
            )
        for name in ("parents", "rhos"):
            if not isinstance(getattr(self, name), list | tuple):
                raise JomaError(f"{name} must be a list of arrays, got {getattr(self, name)!r}")
        if len(self.parents) != len(self.rhos):
            raise JomaError(
                f"rhos must hold one array for each of the {len(self.parents)} levels of parents, "
                f"got {len(self.rhos)}"
            )
        parents: list[NDArray[np.int64]] = []
        rhos: list[Array] = []
        above = off.shape[0]
        for level, (parent, rho) in enumerate(zip(self.parents, self.rhos, strict=True), start=1):
            name = f"parents of level {level}"
            parent = _checks.integers(name, parent, 0)
            if parent.ndim != 1 or parent.size == 0 or np.any(parent >= above):
                raise JomaError(f"{name} must be one axis of places below {above}, got {parent}")
            name = f"rhos of level {level}"
            rho = _checks.shape(name, _checks.within(name, rho, -1, 1), parent.shape)
            parents.append(frozen(parent))
            rhos.append(frozen(rho))
            above = parent.size
        object.__setattr__(self, "class_probs", frozen(class_probs))
        object.__setattr__(self, "child_off_probs", frozen(off))
        object.__setattr__(self, "parents", tuple(parents))
        object.__setattr__(self, "rhos", tuple(rhos))

    @classmethod
    def regular(
        cls,
        depth: int,
        branching: int,
        rho: float,
        class_probs: ArrayLike,
        child_off_probs: ArrayLike,
    ) -> "Tree":
        """Definition 2: HBLT(ρ), where every latent has equally many children and ρ is one number.

        Args:
            depth: L, the number of levels below the class.
            branching: children of every binary latent.
            rho: ρ of every edge between binary variables.
            class_probs: p₀, shape (C,).
            child_off_probs: P[y=0|k] of the top latents, shape (top latents, C); (C,) for one.
        """
        levels = _checks.whole("depth", depth, 1)
        children = _checks.whole("branching", branching, 1)
        rho = float(one("rho", _checks.within("rho", rho, -1, 1)))
        class_probs, off = _checks.class_arguments(class_probs, child_off_probs)
        off = np.atleast_2d(off)
        sizes = [off.shape[0] * children**level for level in range(levels)]
        return cls(
            class_probs,
            off,
            tuple(np.arange(size, dtype=np.int64) // children for size in sizes[1:]),
            tuple(np.full(size, rho) for size in sizes[1:]),
        )

    @property
    def depth(self) -> int:
        """L, the number of levels below the class."""
        return 1 + len(self.parents)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many nodes each level has, top latents first."""
        return (self.child_off_probs.shape[0], *(parent.size for parent in self.parents))

    def sample(
        self, n: int, rng: np.random.Generator | int
    ) -> tuple[NDArray[np.int64], list[NDArray[np.int8]]]:
        """Definition 2: draws the whole tree n times, from the class down.

        Args:
            n: how many samples.
            rng: a generator, or the seed of one.

        Returns:
            The class labels, shape (n,), and one array of 0 and 1 for each level from the top
            latents to the leaves, shape (n, nodes of the level).
        """
        n = _checks.whole("n", n, 1)
        rng = generator(rng)
        labels = rng.choice(self.class_probs.size, size=n, p=self.class_probs)
        value = rng.random((n, self.sizes[0])) >= self.child_off_probs.T[labels]
        levels = [value.astype(np.int8)]
        for parent, rho in zip(self.parents, self.rhos, strict=True):
            flipped = rng.random((n, parent.size)) >= (1 + rho) / 2
            value = value[:, parent] ^ flipped
            levels.append(value.astype(np.int8))
        return labels, levels

    def off_probs(self, level: int) -> Array:
        """Eqn 101 below the top: P[y=0|k] of every node of a level, shape (nodes, C)."""
        self._check("level", (level, 0))
        uncertainty = 2 * self.child_off_probs - 1
        for parent, rho in zip(self.parents[:level], self.rhos[:level], strict=True):
            uncertainty = rho[:, None] * uncertainty[parent]
        return (1 + uncertainty) / 2

    def marginal(self, level: int, node: int) -> Array:
        """Eqns 99–103: (P[y=0], P[y=1]) of one node, mixed over the classes."""
        self._check("node", (level, node))
        top, rho = self._climb((level, node), 0)
        return latent_distribution(rho, self.class_probs, self.child_off_probs[top])

    def joint(self, a: Node, b: Node) -> Array:
        """Eqns 93–96: P[y_a=i, y_b=j] at [i, j], exactly, for any two nodes of any two levels.

        Eqn 94 where the nodes share a latent, M(ρ_{a|c}) diag(P[y_c]) M(ρ_{b|c})ᵀ. Where they
        share only the class, they are independent given it: Σ_k p₀(k) P[y_a|k] P[y_b|k]ᵀ.
        """
        ancestor = self.common_ancestor(a, b)
        if ancestor is None:
            given_class_a, given_class_b = (self._given_class(node) for node in (a, b))
            return (given_class_a * self.class_probs) @ given_class_b.T
        down_a, down_b = (transition(self._climb(node, ancestor[0])[1]) for node in (a, b))
        return (down_a * self.marginal(*ancestor)) @ down_b.T

    def conditional(self, a: Node, b: Node) -> Array:
        """Eqns 89 and 104: P[y_a=i | y_b=j] at [i, j]; each column sums to one.

        Raises:
            ValueError: where y_b never takes one of its two values.
        """
        joint = self.joint(a, b)
        given = self.marginal(*b)
        if np.any(given == 0):
            raise JomaError(f"b must take both values to be conditioned on, node {b} is {given}")
        return joint / given

    def common_ancestor(self, a: Node, b: Node) -> Node | None:
        """The common latent ancestor (CLA): the lowest node above both; None if only the class is.

        A node counts as above itself, so the CLA of a node and its descendant is that node.
        """
        self._check("a", a)
        self._check("b", b)
        (level_a, node_a), (level_b, node_b) = a, b
        while (level_a, node_a) != (level_b, node_b):
            if level_a >= level_b:
                level_a, node_a = level_a - 1, self._parent(level_a, node_a)
            else:
                level_b, node_b = level_b - 1, self._parent(level_b, node_b)
            if level_a < 0:
                return None
        return level_a, node_a

    def height(self, node: Node | None) -> int:
        """H of Theorem 5: how many edges a node stands above the leaves; L for the class, None."""
        if node is None:
            return self.depth
        self._check("node", node)
        return self.depth - 1 - node[0]

    def path_rho(self, descendant: Node, ancestor: Node) -> float:
        """Lemma 9: ρ_{γ|α}, the product of ρ along the edges from an ancestor down to a node."""
        if self.common_ancestor(descendant, ancestor) != tuple(ancestor):
            raise JomaError(f"ancestor must stand above {descendant}, got {ancestor}")
        return self._climb(descendant, ancestor[0])[1]

    def _parent(self, level: int, node: int) -> int:
        return int(self.parents[level - 1][node]) if level else 0

    def _climb(self, node: Node, to_level: int) -> tuple[int, float]:
        """The ancestor's place in a level and the product of ρ on the way up to it."""
        level, place = node
        rho = 1.0
        for step in range(level, to_level, -1):
            rho *= float(self.rhos[step - 1][place])
            place = self._parent(step, place)
        return place, rho

    def _given_class(self, node: Node) -> Array:
        """P[y|k] of one node, shape (2, C)."""
        top, rho = self._climb(node, 0)
        return p(rho * (2 * self.child_off_probs[top] - 1)).T

    def _check(self, name: str, node: Node) -> None:
        level, place = node
        if not 0 <= level < self.depth:
            raise JomaError(f"{name} must have a level from 0 to {self.depth - 1}, got {level}")
        if not 0 <= place < self.sizes[level]:
            raise JomaError(
                f"{name} must be one of the {self.sizes[level]} nodes of level {level}, got {place}"
            )


def descent(tree: Tree, descendant: Node, ancestor: Node) -> Array:
    """Lemma 9, Eqn 91: P_{γ|α} = P_{γ|β_k} P_{β_k|β_{k−1}} … P_{β₁|α} = M(ρ_{γ|α}).

    The chain α ≻ β₁ ≻ … ≻ β_k ≻ γ descends, so the factor next to γ is that of its parent β_k.

    Returns:
        P[y_γ=i | y_α=j] at [i, j].
    """
    return transition(tree.path_rho(descendant, ancestor))


def posteriors(tree: Tree, leaves: ArrayLike) -> tuple[Array, ...]:
    """Definition 2 turned around: P[y = 1 | leaves] of every latent, and P[class | leaves].

    Args:
        tree: that the leaves come from.
        leaves: samples of all leaves, 0 or 1, shape (S, leaves).

    Returns:
        For each level from just above the leaves up to the top latents, shape (S, latents); last
        the class, shape (S, C). That is the order of `joma.data.Batch.latents`.
    """
    on = _checks.finite("leaves", leaves)
    if on.ndim != 2 or on.shape[1] != tree.sizes[-1] or not np.isin(on, (0, 1)).all():
        raise JomaError(
            f"leaves must be 0 or 1 and of shape (samples, {tree.sizes[-1]}), got shape {on.shape}"
        )
    # From the leaves up. Node first: (nodes, S, value). What is below a node, given its value,
    # counts up to a factor, so that no product of many becomes too small to differ from 0.
    below = [np.stack([on.T == 0, on.T == 1], -1).astype(float)]
    messages: list[Array] = []  # what is below a node, given its parent's value
    for level in range(tree.depth - 1, 0, -1):
        messages.append(below[-1] @ transition(tree.rhos[level - 1]))
        product = np.zeros((tree.sizes[level - 1], *below[-1].shape[1:]))
        np.add.at(product, tree.parents[level - 1], _log(messages[-1]))
        below.append(_scaled(product))
    top_given_class = np.stack([tree.child_off_probs, 1 - tree.child_off_probs], 1)
    given_class = below[-1] @ top_given_class
    label = _scaled(_log(given_class).sum(0) + _log(tree.class_probs))
    label /= label.sum(-1, keepdims=True)

    # And down again: what is below a node is in its parent's belief already, and is taken out.
    belief = below[-1] * (_ratio(label, given_class) @ top_given_class.mT)
    beliefs = [belief]
    for level, (message, under) in enumerate(
        zip(messages[:0:-1], below[-2:0:-1], strict=True), start=1
    ):
        above = belief[tree.parents[level - 1]]
        belief = under * (_ratio(above, message) @ transition(tree.rhos[level - 1]).mT)
        beliefs.append(belief)
    # A tree of one level has leaves alone, which are known.
    latents = beliefs[: tree.depth - 1][::-1]
    return (*(each[..., 1].T for each in latents), label)


def _log(values: Array) -> Array:
    with np.errstate(divide="ignore"):  # what cannot be is −∞
        return np.log(values)


def _scaled(logarithms: Array) -> Array:
    """Likelihoods, the largest of each sample 1."""
    largest = logarithms.max(-1, keepdims=True)
    if not np.isfinite(largest).all():
        raise JomaError("leaves must be ones that the tree can have, got a sample that it cannot")
    return np.exp(logarithms - largest)


def _ratio(joint: Array, part: Array) -> Array:
    """Their ratio; where the part is 0 the joint is too, and so is what comes of it."""
    shape = np.broadcast_shapes(joint.shape, part.shape)
    return np.divide(joint, part, out=np.zeros(shape), where=part > 0)
