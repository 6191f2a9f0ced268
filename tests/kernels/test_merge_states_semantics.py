"""What is particular to merging states: whether one of them is estimated is carried by who passes them."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier_kernels.ops.merge_states.spec import merge_states_spec

SPEC = merge_states_spec()


@pytest.fixture(params=tuple(SPEC.implementations))
def run(request: pytest.FixtureRequest) -> Any:
    return SPEC.implementations[request.param]()


@pytest.mark.parametrize("case", ["empty", "single", "two"])
@pytest.mark.parametrize("estimated", [False, True], ids=["exact", "estimated"])
def test_what_is_merged_of_an_estimate_is_one(run: Any, case: str, estimated: bool) -> None:
    inputs = SPEC.make_inputs(SPEC.case(case))
    assert run(**(inputs | {"estimated": estimated})).estimated is estimated


def test_who_passes_states_must_say_so(run: Any) -> None:
    inputs = SPEC.make_inputs(SPEC.case("two"))
    del inputs["estimated"]
    with pytest.raises(TypeError, match="estimated"):
        run(**inputs)
