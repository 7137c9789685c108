"""Kernels (Triton), each next to its reference in torch: the only room that launches any.

Another room calls a function of this one with tensors on any device. `choice` decides, in one
place, whether a kernel or torch's operations compute it.
"""
