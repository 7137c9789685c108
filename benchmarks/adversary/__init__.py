"""Whether the adversary of `joma verify` sees: twins of the claims that are wrong somewhere.

    python -m benchmarks.adversary [--topic NAME] [--claim ID] [--seconds 10] [--json]

Every claim with free parameters has a twin that passes plain `joma verify` and is wrong on a small
part of the claim's domain. Some are claims that this package once made. The adversary attacks both:
the twins must fall, the claims must not. `--seconds` are those of one claim.
"""

from benchmarks.adversary._twin import Twin

__all__ = ["Twin"]
