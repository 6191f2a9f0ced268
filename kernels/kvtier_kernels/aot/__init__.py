"""Compiles kernels for a GPU that is not here and gates what they cost: registers, spills, shared memory.

It proves resources and instruction choice, never speed.
"""
