"""Nonlinear activation with attention: Eqn 6, and how entropy and rank drop and bounce back."""
