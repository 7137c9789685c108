"""Remarks for readers of the papers where nothing needs to be changed; they are not counted."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Clarification:
    """A condition, a reading or a slip of the pen that a careful reader sees through.

    Attributes:
        document: document in which the place is.
        place: section and equation.
        text: the remark.
        claims: ids of the claims that measure it, if any.
    """

    document: str
    place: str
    text: str
    claims: tuple[str, ...] = ()


CLARIFICATIONS: tuple[Clarification, ...] = (
    Clarification(
        "JoMA preprint",
        "Theorem 1, softmax attention",
        "In ½ Σ_k v_k² − ‖v_k‖² b̄ the sum and the ½ cover both terms, as in Eqn 18 and in the"
        " caption of Fig. 2. In the condition a transpose is missing on the last E[…].",
        ("thm1-softmax",),
    ),
    Clarification(
        "JoMA preprint",
        "Theorem 2, remarks",
        "Under Eqn 20 with constant A and Assumption 1 the winner reaches infinity at a finite"
        " time; the others converge as that time is approached. The remark on softmax attention"
        " holds for the reduced equation with b̄ kept equal for all tokens; in a softmax block b̄"
        " does not stay so once z moves.",
        ("thm2-blowup", "thm2-losers", "thm2-softmax"),
    ),
    Clarification(
        "JoMA preprint",
        "Section 4, after Eqn 6 and after Theorem 4; caption of Fig. 4",
        "The factor called exp(v²) in the text is the exp(v²/2) of Eqn 6, and the attention that"
        " belongs to it is softmax(v²/2); the figure's entropy is that of softmax(v²).",
        ("eqn6",),
    ),
    Clarification(
        "JoMA preprint",
        "Section 4, last paragraph",
        "The rank that drops and bounces back is the stable rank, which Section 6 measures. The"
        " rank in the strict sense does not change.",
        ("sec4-rank",),
    ),
    Clarification(
        "JoMA preprint",
        "Eqns 57-59",
        "y± is θ₁(r±), not its inverse. Eqn 58 is sufficient, as the paper says; with equality, a"
        " density with a kink at 0 can be without critical points. That ratios lie in (½, 1) ∪ (1,"
        " 2) is for the range θ₁ ≥ ½ to which the paper restricts itself there. Critical points"
        " with s₋ < 0, of which Section A.4 speaks, may have ratios outside.",
        ("eqn58", "eqn59"),
    ),
    Clarification(
        "JoMA preprint",
        "Section A.4, first remark",
        "That r₊ > 0 > r₋ is “often” the case depends on the family and on the distance of the"
        " clusters.",
        ("a4-signs",),
    ),
    Clarification(
        "JoMA preprint",
        "Section A.4, pattern superposition",
        "Orthogonal patterns do not disturb one another on inputs along one of them. On every"
        " input from the tokens of one pattern they do not if the patterns are on disjoint sets of"
        " tokens. v_m stands for U_C v_m.",
        ("superposition",),
    ),
    Clarification(
        "JoMA preprint",
        "Theorem 3 and Eqns 72-74",
        "The sign s_μ is part of C in the theorem and of β₁, β₂ in the proof; it is meant once.",
    ),
    Clarification(
        "JoMA preprint",
        "Theorem 5, remarks",
        "P[y_l=1|y_m=1] → 1 needs ρ → 1, as the paper says; depth alone does not give it.",
        ("thm5-remark",),
    ),
    Clarification(
        "JoMA preprint",
        "Lemma 9, Eqn 103",
        "In Eqn 91 the β are counted from γ upwards, after it from α downwards. Eqn 103 is the"
        " vector p(·), as the sentence before Eqn 100 has it.",
        ("lemma9", "eqn103"),
    ),
    Clarification(
        "talk",
        "Slide “JoMA Dynamics”",
        "The joint dynamics does work for any learning rates; at unequal ones the sums over v_k²"
        " of Theorem 1 carry the factor η_Z/η_W.",
        ("thm1-rates",),
    ),
    Clarification(
        "talk",
        "Slide “What if we have more nodes (K > 1)?”",
        "“Low rank” is a statement on the stable rank; the rank of V in the strict sense is that"
        " of Δ.",
        ("talk-rank", "talk-gradient-rank"),
    ),
    Clarification(
        "talk",
        "Scan&Snap, “(a) ż < 0 for common token l”",
        "It holds for a token that is equally common in all classes, as in the slide's picture"
        " with one common token. A token that is much more frequent in one class than in another"
        " may rise where there are several common tokens.",
        ("scan-snap-common-falls",),
    ),
    Clarification(
        "talk",
        "Scan&Snap, Theorem 3",
        "The lower bound on χ belongs to the limit η_Y ≫ η_Z, which the talk names among its"
        " assumptions. At a finite ratio of the rates ln χ may fall short of it or exceed it,"
        " depending on the sign of a constant of the corpus, by a share of about the order"
        " η_Z/η_Y.",
        ("scan-snap-gain-full", "scan-snap-gain-bounds", "scan-snap-gain-early"),
    ),
    Clarification(
        "talk",
        "Scan&Snap, Theorem 4",
        "The order ln ln t of B is right. The slide's constant is not that of the population flow,"
        " which depends on the numbers of common and distinct tokens; the slide states no premises"
        " for it.",
        ("scan-snap-snapping",),
    ),
    Clarification(
        "talk",
        "GaLore, “Convergence Analysis on Fixed Projection”",
        "The 1/N in M belongs to a gradient with 1/N before its sums. For the sum on the slide,"
        " with constant coefficients, the bound is true and N times too slow.",
        ("galore-fixed-projection",),
    ),
    Clarification(
        "talk",
        "GaLore, “Convergence Analysis on Fixed Projection”, varying A, B and C",
        "The slide has − L_A − L_B L_C D² and does not define L_A, L_B, L_C and D; the text of the"
        " GaLore paper was not at hand. If the L are Lipschitz constants in W and D is the largest"
        " ‖W‖, what follows instead is − L_Ai − D(L_Bi sup‖C_i‖ + L_Ci sup‖B_i‖) in the sum over"
        " i: L_B L_C D² is zero if only one of B and C depends on W, and the scalar G = A − (2 −"
        " w)w on 0 ≤ w ≤ ½ contracts at the rate 1, not 3/2. With other meanings of these constants"
        " the printed form may be right up to a factor of 2.",
        ("galore-varying-coefficients", "galore-varying-attained"),
    ),
    Clarification(
        "CDAG draft note",
        "Proof of Theorem 1",
        "w_jk stands for its rate of change; the note remarks itself that w_jk is a function of"
        " time.",
        ("cdag-backward", "cdag-trained-network"),
    ),
    Clarification(
        "CDAG draft note",
        "After Theorem 1",
        "“We should be able to get” a large corr(z_β, σ′_k g_k): it needs agreement of z_β and g_k"
        " to outweigh disagreement by more than σ′_max/σ′_min.",
        ("cdag-recursion",),
    ),
    Clarification(
        "CDAG draft note",
        "Eqn 3",
        "The weights P[z_α = 1] and P[z_α = 0] belong to E[g|z_α = 1] = −E[g|z_α = 0], as for the"
        " logistic loss at w = 0. A gradient that sums to zero weighs both classes equally.",
        ("cdag-eqn-3",),
    ),
)
