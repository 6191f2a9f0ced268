"""Rows to square tiles and back: [B,H,S,D] <-> [B,H,ceil(S/T),ceil(D/T),T,T], a permutation with zero fill.

to_fractal(x, *, tile=16) and from_fractal(tiles, *, seq, dim). Element (s, d) of a head lies in tile
(s // T, d // T) at (s % T, d % T), tiles in row order. Any dtype, bit for bit; padding is zero bits on the
way in and never read on the way back, so whoever attends tiles masks it by S and D, not by its value: a key
of zeros would have logit 0, not -inf. Raises ShapeError.
"""

from kvtier_kernels.ops.fractal.ref import from_fractal_ref, to_fractal_ref
from kvtier_kernels.ops.fractal.torch_impl import from_fractal_torch, to_fractal_torch

to_fractal = to_fractal_torch
from_fractal = from_fractal_torch

__all__ = [
    "from_fractal",
    "from_fractal_ref",
    "from_fractal_torch",
    "to_fractal",
    "to_fractal_ref",
    "to_fractal_torch",
]
