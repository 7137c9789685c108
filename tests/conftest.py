"""Two test processes on two cores: each computes with one thread, or they wait for one another."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
