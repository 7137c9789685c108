"""Hierarchical binary latent trees (Section 5, Appendix A.5): Theorem 5 and its limits."""
