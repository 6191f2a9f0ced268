"""Boxes of paged keys: smallest and largest value of each channel of a page, kept as rows arrive.

page_minmax(k_cache [N,P,Hk,d], page_ids, first, count i32 [W], kmin, kmax [N,Hk,d], sealed u8 [N])
-> (kmin, kmax, sealed), written in place: the rows in slots [first, first + count) of each page listed.
first 0 starts the box anew, whatever it held, since a page that is used again must not inherit its last
tenant's; any other first widens it. A page is sealed once its last slot is in. A negative id is padding; an
entry that is there twice counts once; two different entries of one page are refused (on a GPU: undefined).
count 0 with first 0 gives the empty box (inf, -inf). A NaN in a key makes its channel of the box NaN.
page_minmax_build(k_cache, page_ids, filled, kmin, kmax, sealed) and
page_minmax_append(k_cache, page_ids, slots, kmin, kmax, sealed) are its two common uses: whole pages, and
one row each. k_cache, kmin and kmax have one dtype; min and max are exact in it.
The Triton module is imported by who runs it, since Triton is an optional dependency.
"""

from kvtier_kernels.ops.page_minmax.ref import page_minmax_ref
from kvtier_kernels.ops.page_minmax.torch_impl import (
    Boxes,
    page_minmax_append_torch,
    page_minmax_build_torch,
    page_minmax_torch,
)

__all__ = [
    "Boxes",
    "page_minmax_append_torch",
    "page_minmax_build_torch",
    "page_minmax_ref",
    "page_minmax_torch",
]
