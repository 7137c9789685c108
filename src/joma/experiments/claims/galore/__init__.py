"""GaLore's convergence: contraction with a fixed projection, where it stalls, and beyond."""
