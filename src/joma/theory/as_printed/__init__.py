"""Formulas as the papers print them, where derivation or measurement says otherwise.

Nothing here should be used to compute: these exist so that `joma verify` can measure how far the
printed form is from the truth. Each has its corrected twin in the module of the same name one level
up; bounds that are true but loose stand here too.
"""
