"""Every erratum once, and the slip that it follows from."""

from collections.abc import Callable
from dataclasses import dataclass

from joma.errors import JomaError
from joma.experiments.claims.errata import examples

PREPRINT, TALK, NOTE = "JoMA preprint", "talk", "CDAG draft note"

DOCUMENTS = (PREPRINT, TALK, NOTE)
"""The documents that were checked, in the order in which errata are listed."""


@dataclass(frozen=True)
class Erratum:
    """One place in print that should be changed.

    Attributes:
        id: anchor of the entry on the errata page.
        title: the place and the slip in a few words.
        document: document in which it stands, one of `DOCUMENTS`.
        place: section and equation.
        printed: what is printed.
        corrected: what should be there.
        derivation: why, in a few lines.
        consequence: what follows from the correction, and what does not.
        quantity: what the relative error is of, in a few words.
        example: the case in which the relative error is quoted.
        relative_error: returns the error of the printed statement in that case.
        claims: ids of the claims that measure it.
        root: id of the erratum that it follows from; empty for a slip of its own.
    """

    id: str
    title: str
    document: str
    place: str
    printed: str
    corrected: str
    derivation: str
    consequence: str
    quantity: str
    example: str
    relative_error: Callable[[], float]
    claims: tuple[str, ...]
    root: str = ""

    def __post_init__(self) -> None:
        if self.document not in DOCUMENTS:
            raise JomaError(f"document must be one of {', '.join(DOCUMENTS)}, got {self.document}")


ERRATA: tuple[Erratum, ...] = (
    Erratum(
        id="theorem-1-softmax-condition",
        title="Theorem 1: softmax condition not per node",
        document=PREPRINT,
        place="Section 3, Theorem 1 (softmax attention); Appendix A.2, before Eqn 17",
        printed="E[Σ_k g_k h′_k b bᵀ] = b̄ E[Σ_k g_k h′_k b]",
        corrected="E[g_k h′_k b bᵀ] = b̄ E[g_k h′_k b]ᵀ for every node k; it is enough that Σ_k"
        " E[g_k h′_k b bᵀ] v_k = b̄ Σ_k E[g_k h′_k b]ᵀ v_k",
        derivation="By Eqn 10 with L = diag(b) − bbᵀ, ż = Σ_k v̇_k∘v_k − Σ_k E[g_k h′_k b bᵀ] v_k."
        " The v_k stand inside the sum over k, so a condition on the sum without them does not"
        " give Eqn 17 for more than one node.",
        consequence="For one hidden node the condition is right as printed. For several the"
        " printed one can hold where Eqn 17 fails: with linear activation and the cross-entropy of"
        " Figs. 2 and 3, Σ_k g_k = 0 on every sample, and both sides vanish whatever b is.",
        quantity="velocity of z, two nodes",
        example="by Eqn 17, g₁ = 1 and g₂ = −1, samples b = (0.6, 0.3, 0.1) and (0.1, 0.3, 0.6),"
        " v₁ − v₂ = (1, 0, −1)",
        relative_error=examples.softmax_velocity,
        claims=("thm1-softmax-condition",),
    ),
    Erratum(
        id="theorem-2-sqrt2",
        title="Theorem 2: erf(v/2) for erf(v/√2)",
        document=PREPRINT,
        place="Section 3.1, Theorem 2 (Eqn 4); Appendix A.2, Eqn 22",
        printed="erf(v_l/2)/Δ_l is the same for all tokens l",
        corrected="erf(v_l/√2)/Δ_l is the same for all tokens l",
        derivation="Eqn 21 separates into e^{−v²/2} dv/Δ, and ∫₀^v e^{−x²/2} dx = √(π/2)"
        " erf(v/√2).",
        consequence="The remarks stand: the most salient token outgrows all others, which stay"
        " finite. Their limits are √2 erfinv(Δ_l/Δ_max), not √2 times that.",
        quantity="limit of the other tokens",
        example="Δ_l = Δ_max/2",
        relative_error=examples.loser_limit,
        claims=("thm2", "thm2-softmax"),
    ),
    Erratum(
        id="lemma-1-scale",
        title="Lemma 1: distance not divided by ‖v‖",
        document=PREPRINT,
        place="Appendix A.3.1, Lemma 1 (Eqn 23); the step from Eqn 31 to Eqns 33 and 38",
        printed="E[ψ] = θ₁(r)/‖v‖ and E[xψ] = θ₁(r)/‖v‖ x̄ + θ₂(r)/‖v‖³ RRᵀv, r = v·x̄ + ξ, where"
        " θ₁ and θ₂ do not depend on v",
        corrected="E[ψ] = θ₁(s) and E[xψ] = θ₁(s) x̄ + θ₂(s) RRᵀv/‖v‖ with s = r/‖v‖, for v in the"
        " span of R and ψ(x) = 1[x > 0]",
        derivation="y′ = v·x′ is ‖v‖ times a coordinate u of x′. Eqn 31 is right; its inner"
        " integral is the density of u at y′/‖v‖, and Eqn 33 takes it at y′. (If p_n is the"
        " density of y′, as the text says, the 1/‖v‖ is one too many and p_n depends on v.) With"
        " u, ψ(y′ + r) = ψ(u + s) for the step function, and E[ψ] = ∫ψ(u + s) p(u) du = θ₁(s).",
        consequence="As printed a probability, E[ψ], can exceed 1. Only s enters, so the length of"
        " v does not matter for which side of the hyperplane a cluster is on, and the distance"
        " between the clusters, s₊ − s₋, cannot be tuned by ‖v‖: after Eqn 59, a ratio a₊/a₋ in S"
        " gives a critical point only at a distance that belongs to it.",
        quantity="a probability, 1.68 for 0.98",
        example="P[v·x + ξ > 0] for a standard Gaussian, ‖v‖ = ½, ξ = 1",
        relative_error=examples.firing_probability,
        claims=("lemma1",),
    ),
    Erratum(
        id="lemma-2-scale",
        title="Lemma 2: velocity of v and ξ",
        document=PREPRINT,
        place="Appendix A.3.1, Lemma 2 (Eqns 42-43) and Eqn 50",
        printed="v̇ = Σ a_j θ₁(r_j) x̄_j/‖v‖ + Σ a_j θ₂(r_j) v/‖v‖³, ξ̇ = Σ a_j θ₁(r_j)/‖v‖",
        corrected="v̇ = Σ a_j θ₁(s_j) x̄_j + Σ a_j θ₂(s_j) v/‖v‖, ξ̇ = Σ a_j θ₁(s_j)",
        derivation="Lemma 1 summed over the clusters.",
        consequence="The rate does not change with the length of (v, ξ), so that rest points form"
        " rays.",
        quantity="velocity of ξ",
        example="Gaussian clusters, a = (1, −½), v·x̄ = (2, 0), ξ = −1, ‖v‖ = 2",
        relative_error=examples.bias_velocity,
        claims=("lemma2",),
        root="lemma-1-scale",
    ),
    Erratum(
        id="eqn-53-scale",
        title="Eqn 53: velocity along v",
        document=PREPRINT,
        place="Appendix A.3.1, proof of Lemma 4, Eqns 51-53",
        printed="‖v‖ v·v̇ = Σ a_j F(r_j) − ‖v‖ ξξ̇",
        corrected="v·v̇ = ‖v‖ Σ a_j F(s_j) − ξξ̇",
        derivation="v·x̄_j = ‖v‖s_j − ξ in Lemma 2, and F(s) = θ₂(s) + s θ₁(s).",
        consequence="The argument of the proof is not affected, only its variable.",
        quantity="velocity along (v, ξ)",
        example="v·v̇ + ξξ̇, in the example of Lemma 2",
        relative_error=examples.radial_velocity,
        claims=("eqn53",),
        root="lemma-1-scale",
    ),
    Erratum(
        id="lemma-4-scale",
        title="Lemma 4: balance at a stationary point",
        document=PREPRINT,
        place="Appendix A.3.1, Lemma 4 (Eqns 54-55)",
        printed="a stationary point satisfies Σ a_j F(r_j) = 0",
        corrected="a stationary point satisfies Σ a_j F(s_j) = 0",
        derivation="v̇ = 0 and ξ̇ = 0 in the corrected Eqn 53.",
        consequence="Eqns 56 to 59 are to be read in s as well.",
        quantity="share that is not balanced",
        example="of a₊F(r₊), at a rest point of Laplace clusters one apart, ‖v‖ = 2",
        relative_error=examples.balance,
        claims=("lemma4",),
        root="lemma-1-scale",
    ),
    Erratum(
        id="theorem-3-jacobian",
        title="Theorem 3: eigenvalues of C(μ)",
        document=PREPRINT,
        place="Appendix A.4, proof of Theorem 3, Eqns 73-74",
        printed="C has a₊‖x̄₊‖θ₁(r₊)/‖μ‖² across μ and a₊‖x̄₊‖(ξ θ₁′(r₊) − θ₁(r₊))/‖μ‖² along μ",
        corrected="a₊‖x̄₊‖θ₁(s₊)/‖μ‖ across μ and ξ²(a₋p(s₋) − a₊p(s₊))/‖μ‖³ along μ",
        derivation="Eqns 73-74 are the exact derivative of Eqn 50, and change with it: along μ, s₊"
        " = ‖x̄₊‖ + ξ/‖v‖ and s₋ = ξ/‖v‖ both have the derivative −ξ/‖v‖², and d(θ₂ + sθ₁)/ds ="
        " θ₁.",
        consequence="The form β₁I + β₂μμᵀ stands, and the correction is in the paper's favour: for"
        " ξ < 0, its own case, the printed C is negative along μ, so that Theorem 3's condition"
        " for stability is never met; the corrected C is positive definite wherever a₋p(s₋) >"
        " a₊p(s₊), as for t₃ clusters.",
        quantity="eigenvalue along μ, −2.31 for 0.87",
        example="t₃ clusters two apart, ‖μ‖ = 1",
        relative_error=examples.longitudinal_eigenvalue,
        claims=("thm3-jacobian",),
        root="lemma-1-scale",
    ),
    Erratum(
        id="lemma-5-sign",
        title="Lemma 5: c₋ + c₊ for c₊ − c₋",
        document=PREPRINT,
        place="Appendix A.4, Lemma 5 (Eqn 61)",
        printed="dθ₁/dr = (c₋ + c₊) p(r), dθ₂/dr = −(c₋ + c₊) r p(r)",
        corrected="dθ₁/dr = (c₊ − c₋) p(r), dθ₂/dr = −(c₊ − c₋) r p(r)",
        derivation="φ′ = c₋1[x < 0] + c₊1[x > 0] (printed with φ for φ′) jumps at 0 by c₊ − c₋,"
        " and θ₁(r) = ∫φ′(y + r) p(y) dy.",
        consequence="None for ReLU, where c₋ = 0, and none for Theorem 3, which uses only that the"
        " slopes are bounded and in the ratio −r. It matters for leaky ReLU; for linear φ, c₋ ="
        " c₊, the printed slope is not zero.",
        quantity="slope of θ₁, leaky ReLU",
        example="slope 0.1 below zero",
        relative_error=examples.leaky_slope,
        claims=("lemma5",),
    ),
    Erratum(
        id="eqn-56-sufficient",
        title="Eqn 56: called sufficient",
        document=PREPRINT,
        place="Appendix A.3.1, Eqn 56",
        printed="F(r₊)/F(r₋) = θ₁(r₊)/θ₁(r₋) = a₋/a₊ is sufficient and necessary for (v, ξ) to be"
        " a critical point",
        corrected="necessary; sufficient together with v ∥ x̄₊ − x̄₋",
        derivation="With Eqn 56, ξ̇ = 0 and v·v̇ = 0, two equations of M_C + 1. What is left of v̇"
        " = a₊θ₁(s₊)(x̄₊ − x̄₋) + (…) v is its part across v, which vanishes only if v is along"
        " x̄₊ − x̄₋.",
        consequence="Theorem 3 has the condition, as μ ∝ x̄₊ with x̄₋ = 0, and the existence"
        " argument after Eqn 57 may choose such a v.",
        quantity="velocity left at a tilt of 30°",
        example="‖v̇‖ over a₊θ₁‖x̄₊ − x̄₋‖ where Eqn 56 holds",
        relative_error=examples.tilted_velocity,
        claims=("eqn56",),
    ),
    Erratum(
        id="theorem-4-threshold",
        title="Theorem 4: threshold, exp(−μ²) for exp(μ²/2)",
        document=PREPRINT,
        place="Section 4, Theorem 4, last sentence",
        printed="|Λ| ≪ 1 when δ_k ≪ exp[−(√(2π) + 2) exp(−μ_k²)]",
        corrected="|Λ| ≪ 1 when ln(1/δ_k) ≫ (√(2π) + 2) exp(+μ_k²/2)",
        derivation="Λ = λ e^{μ_k²/2}/ln(1/δ_k) with |λ| ≤ √(2π) + 2, as the theorem says itself."
        " Both the sign of the exponent and the ½ are lost in its last sentence.",
        consequence="The ratio of rates settles later than printed, the more so the larger μ_k."
        " The ratio e^{μ_j²/2}/e^{μ_k²/2} is right.",
        quantity="threshold of ln δ, −0.08 for −33",
        example="μ_k = 2",
        relative_error=examples.settling_threshold,
        claims=("thm4-threshold",),
    ),
    Erratum(
        id="theorem-4-leading",
        title="After Eqn 88: exp(−μ²) for exp(−μ²/2)",
        document=PREPRINT,
        place="Appendix A.4.1, after Eqn 88",
        printed="F(r, μ) → e^{−μ²} ln(1/(1 − r)), and ρ = F − e^{−μ²} ln(1/δ) lies in (0, √(π/2) +"
        " 1)",
        corrected="e^{−μ²/2} in both places, as in Eqn 88",
        derivation="Eqns 87 and 88 have e^{−μ²/2}. With e^{−μ²} the difference grows without"
        " bound, as (e^{−μ²/2} − e^{−μ²}) ln(1/δ).",
        consequence="None for Eqn 7, which follows from Eqn 88. The missing ½ is that of the"
        " theorem's last sentence.",
        quantity="factor of ln(1/δ)",
        example="μ = 1",
        relative_error=examples.leading_coefficient,
        claims=("thm4-leading",),
        root="theorem-4-threshold",
    ),
    Erratum(
        id="superposition-sign",
        title="Superposition: −ξ for +ξ",
        document=PREPRINT,
        place="Appendix A.4, pattern superposition",
        printed="w = v_{m₁} − ξ_{m₁}u_{m₁} + v_{m₂} − ξ_{m₂}u_{m₂}",
        corrected="w = v_{m₁} + ξ_{m₁}u_{m₁} + v_{m₂} + ξ_{m₂}u_{m₂}, as in Eqn 60",
        derivation="With query m the node receives w·f = v_m·b + (factor of u_m), and by Eqn 60"
        " that factor is +ξ_m, with ξ_m < 0.",
        consequence="With −ξ_m > 0 the node is active without any pattern, which is what the"
        " negative bias of the paragraph before prevents. The idea of superposition is not"
        " affected.",
        quantity="input of the node, 1.5 for 0.5",
        example="its pattern gives v·b = 1, and ξ = −½",
        relative_error=examples.superposed_activation,
        claims=("superposition",),
    ),
    Erratum(
        id="theorem-5-rho0",
        title="Theorem 5: ρ₀ from P for 2P − 1",
        document=PREPRINT,
        place="Section 5, Theorem 5 (definition of p_{·|0}); Appendix A.5, Eqns 101-102",
        printed="ρ₀ = Σ_k P[y₀=k] P[y_l=0|y₀=k]",
        corrected="ρ₀ = Σ_k P[y₀=k] (2P[y_l=0|y₀=k] − 1)",
        derivation="Eqn 101 writes P[y₁=0|y₀=k] as ½(1 + p_{k|0}), so that p_{k|0} is 2P − 1,"
        " while the theorem defines it as P. Then ρ_c = 2P[y_c=0] − 1 needs the former.",
        consequence="With this ρ₀ Theorem 5 is exact. If one of D equal classes switches a latent"
        " on, ρ₀ is 1 − 2/D, not 1 − 1/D; the remark that it is close to 1 for many classes"
        " stands.",
        quantity="probability of co-occurrence",
        example="L = 4, H = 1, ρ = 0.9, one of 10 equal classes: ρ₀ = 0.9 for 0.8",
        relative_error=examples.cooccurrence,
        claims=("rho0", "thm5", "thm5-exact"),
    ),
    Erratum(
        id="eqn-8-order",
        title="Eqn 8: O(ε²) for O(ε)",
        document=PREPRINT,
        place="Section 5, Eqn 8",
        printed="P[y_l=1|y_m=1] = 1 − H/L + O(ε²)",
        corrected="P[y_l=1|y_m=1] = 1 − H/L + O(ε), more precisely + H(2H − L)/(2L) ε + O(ε²)",
        derivation="Numerator and denominator of Eqn 8 are 2(L − H)ε + O(ε²) and Lε + O(ε²), so"
        " that their ratio is known to O(ε).",
        consequence="The limit 1 − H/L is right, and all that the text concludes from it.",
        quantity="probability of co-occurrence",
        example="ε = 0.05, L = 10, H = 1",
        relative_error=examples.near_one,
        claims=("eqn8",),
    ),
    Erratum(
        id="talk-theorem-2-sqrt2",
        title="Theorem 2 on the slide: erf(v/2) for erf(v/√2)",
        document=TALK,
        place="slide “JoMA for Linear Activation”, Theorem 2",
        printed="erf(v_l/2)/Δ_l = erf(v_l′/2)/Δ_l′",
        corrected="erf(v_l/√2)/Δ_l = erf(v_l′/√2)/Δ_l′",
        derivation="The preprint's Eqn 4, repeated.",
        consequence="As in the preprint.",
        quantity="limit of the other tokens",
        example="Δ_l = Δ_max/2",
        relative_error=examples.loser_limit,
        claims=("thm2",),
        root="theorem-2-sqrt2",
    ),
    Erratum(
        id="note-theorem-1-angles",
        title="Theorem 1: three correlations called sufficient",
        document=NOTE,
        place="Section 1.2, Theorem 1",
        printed="corr(z_α, σ′_j g_j) > C₁ > 0, corr(z_β, f_k) > C₂ > 0 and |corr(z_α, z_β)| > C₃ >"
        " 0 make corr(z_β, g_{j→k}) > C₄ > 0",
        corrected="it is positive if the three angles θ₁, θ₂, θ₃ of these correlations sum to less"
        " than π/2; if z_β = f_k it is a square",
        derivation="By the note's own gradient rule corr(z_β, g_{j→k}) = corr(f_k, σ′_j g_j)"
        " corr(z_β, σ′_j g_j). σ′_j g_j can be θ₁ + θ₃ from z_β and θ₁ + θ₂ + θ₃ from f_k. For z_β"
        " = f_k the two factors are equal, and their product is a square.",
        consequence="The note is a draft that calls its proof approximate. Its case of a latent"
        " that is itself an input, z_β = x_k, is right.",
        quantity="correlation, > 0 for −¼",
        example="σ′_j g_j, z_α and z_β at 60°, 0° and −60° in a plane, f_k at 0°",
        relative_error=examples.correlation_sign,
        claims=("cdag-theorem-1",),
    ),
)
