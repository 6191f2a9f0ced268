"""Which wanted units are in slots, and which slots the others get: least recently used, by bucket.

bucket_lru(want int32 [R,W], slot_tok int32 [R,HOT], age int16 [R,HOT], loc int32 [R,U], pin bool [R,HOT],
epoch int32 [R]) -> BucketLru. A row is a request and KV head; slot_tok: the unit in a slot, -1 free; age:
epoch of its last use; loc: the slot of a unit, below 0 none; epoch: of this call, at least 1 and at least
every age. State is written in place: slot_tok, age, loc and epoch.

A slot's bucket: 0 when it is pinned or was used in this epoch (never a victim), else
min(epoch - age, BUCKETS - 2), and BUCKETS - 1 when free. Victims: every slot of the highest buckets, and of
the last bucket needed the lowest slots; in ascending order they go to the missing units in the order of want.
So no slot is a victim twice, none overwrites a hit, and where slots run out the last wanted get none (victim
-1). A unit wanted twice counts once; ids below 0 are padding. Ages further than BUCKETS - 2 epochs back are
equal. An epoch past EPOCH_LIMIT is rebased to BUCKETS - 1, ages with it, which changes no bucket. The caller
pins a slot while a copy into it is in flight, and that of the current token always. Raises ShapeError; ids
past U are refused on the CPU, padding on a GPU.
"""

from kvtier_kernels.ops.bucket_lru.ref import bucket_lru_ref
from kvtier_kernels.ops.bucket_lru.torch_impl import BUCKETS, EPOCH_LIMIT, BucketLru, bucket_lru_torch

bucket_lru = bucket_lru_torch

__all__ = ["BUCKETS", "EPOCH_LIMIT", "BucketLru", "bucket_lru", "bucket_lru_ref", "bucket_lru_torch"]
