"""Helpers that several rooms use and that know nothing of transformers or of their mathematics.

Whole-file reads and writes (`files`, `json_files`), the precision of float32 products (`float32`),
SIGTERM as an exception (`signals`), and other people's libraries kept quiet (`quiet`). A helper
that one room alone uses stays in that room. Importing this package loads nothing else.
"""
