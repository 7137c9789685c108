"""Names of types that many modules use."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
"""An array of double-precision numbers."""

Record = Mapping[str, Any]
"""Values by name, as JSON has them."""
