"""Independent references: numerics that share nothing with the formulas of `joma.theory`."""
