"""The scoring operations on the CPU against their references at shapes and lengths nobody chose."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_kernels.compare import findings
from kvtier_kernels.registry import entry
from kvtier_kernels.spec import Case

# Sizes of an op's own axes, as (least, most).
OWN = {
    "sparq_score": {"r": (1, 8)},
    "sparq_alpha": {"r": (1, 8)},
    "pq_lut": {"m": (1, 4), "C": (1, 256)},
    "pq_score": {"m": (1, 5), "C": (1, 256)},
    "centroid_score": {},
    "centroid_estimate": {},
    "lsh_hash": {"L": (1, 9), "K": (1, 16)},
    "lsh_collide": {"L": (3, 9), "K": (1, 6), "h": (1, 3), "cap": (1, 30)},
    "int8_scan": {"K": (1, 4)},
    "int8_select": {"K": (1, 5), "k": (0, 12), "cap": (1, 30)},
}
TRAITS = ("duplicate", "poison", "zero-query", "starved", "distinct", "near", "by-rows")


@settings(max_examples=12)
@given(data=st.data())
@pytest.mark.parametrize("name", OWN)
def test_equals_the_reference_at_any_shape(name: str, data: Any) -> None:
    spec = entry(name)
    hk, group, width = (data.draw(st.integers(*r)) for r in ((1, 3), (1, 5), (2, 9)))
    own = {axis: data.draw(st.integers(*r)) for axis, r in OWN[name].items()}
    d = own["m"] * width if name.startswith("pq") else 2 * max(width, own.get("r", 1))
    lens = tuple(data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=3)))
    traits = frozenset(data.draw(st.sets(st.sampled_from(TRAITS), max_size=1)))
    dtype = data.draw(st.sampled_from(spec.dtypes))
    case = Case(
        "drawn",
        {"Hq": hk * group, "Hk": hk, "d": d, **own},
        lens,
        dtype,
        traits,
        data.draw(st.integers(0, 99)),
    )
    inputs = spec.make_inputs(case)
    got = spec.outputs(spec.implementations["torch"]()(**inputs))
    want = spec.outputs(spec.reference(**inputs))
    assert not findings(spec.comparisons, inputs, got, want)
