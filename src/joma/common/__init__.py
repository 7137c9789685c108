"""Helpers that several rooms use and that know nothing of transformers or of their mathematics.

Whole-file reads and writes (`files`, `json_files`), checks of arguments (`checks`), text for
messages (`text`), shared type names (`types`), the precision of float32 products (`float32`),
SIGTERM as an exception (`signals`), and other libraries without their log lines (`quiet`). A helper
that one room alone uses stays in that room. Importing this package loads nothing else.
"""
