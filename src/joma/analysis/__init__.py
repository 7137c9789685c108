"""Studies of trained models: a probe, a series of checkpoints, superposition, generation.

Each study takes models and text, measures with `joma.probes`, and returns tables that the command
line prints and `joma.report` draws. Figures, tables and claims of the papers are in
`joma.experiments`.
"""
