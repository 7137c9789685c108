"""Where what is made once and used often is kept."""

import os
from pathlib import Path

CACHE = "JOMA_CACHE"
"""The environment variable that moves the cache."""


def cache_folder() -> Path:
    """Return the cache folder: JOMA_CACHE, else `joma` in the user's cache folder.

    The user's cache folder is what XDG_CACHE_HOME names, or ~/.cache. Nothing is made here.
    """
    own = os.environ.get(CACHE)
    if own:
        return Path(own).expanduser()
    users = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The standard says that a relative path there counts as none.
    return (users if users.is_absolute() else Path("~/.cache").expanduser()) / "joma"
