"""The CDAG note: backpropagated gradients, Theorem 1 and its recursion, Eqns 2 and 3."""
