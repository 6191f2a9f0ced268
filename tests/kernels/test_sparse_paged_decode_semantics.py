"""What is particular to sparse paged decode: all units are paged decode, scopes agree, weights are counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvtier_kernels.ops.sparse_paged_decode.spec import bytes_moved, flops
from kvtier_kernels.registry import entry
from tests.kernels.harness import run, unlike

SPEC = entry("sparse_paged_decode")
PAGED = entry("paged_decode")
BACKENDS = list(SPEC.implementations)


def all_units(case: str, *, unit: int = 16, scope: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs of paged decode and of sparse paged decode over all its units, in `scope` equal lists."""
    plain = PAGED.make_inputs(PAGED.case(case))
    lists = [(n, torch.arange(-(-n // unit))) for n in plain["seq_lens"].tolist() for _ in range(scope)]
    last = [n - (u.numel() - 1) * unit if n else 0 for n, u in lists]
    sparse = {n: plain[n] for n in ("q", "k_cache", "v_cache", "page_table", "scale")} | {
        "indptr": torch.tensor([0] + [u.numel() for _, u in lists]).cumsum(0).int(),
        "units": torch.cat([u for _, u in lists]).int(),
        "last_unit_len": torch.tensor(last, dtype=torch.int32),
        "log_weight": None,
        "unit_tokens": unit,
    }
    return plain, sparse


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("case", "unit"), [("page-edges", 16), ("gqa2", 1), ("gqa2", 64)])
def test_all_units_are_paged_decode(backend: str, case: str, unit: int) -> None:
    plain, sparse = all_units(case, unit=unit)
    got, want = run(SPEC, backend, sparse), run(PAGED, backend, plain)
    if backend == "triton":
        assert not unlike(got, want)
    torch.testing.assert_close(got["o"], want["o"], rtol=0, atol=5e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scope", [2, 4], ids=["kv-heads", "query-heads"])
def test_equal_lists_per_head_are_one_list_for_the_request(backend: str, scope: int) -> None:
    """Two KV heads, four query heads."""
    _, one = all_units("d256")
    _, many = all_units("d256", scope=scope)
    got, want = run(SPEC, backend, many), run(SPEC, backend, one)
    torch.testing.assert_close(got["lse"], want["lse"], rtol=0, atol=5e-6)
    torch.testing.assert_close(got["o"], want["o"], rtol=0, atol=5e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_log_weight_of_ln_2_is_a_unit_listed_twice(backend: str) -> None:
    """Sampled rows stand for 1/p of them: the weight is the importance correction of the estimate."""
    _, sparse = all_units("three-splits")
    units, last = sparse["units"], sparse["last_unit_len"]
    twice = torch.cat((units[:1], units))
    doubled = sparse | {"units": twice, "indptr": torch.tensor([0, twice.numel()], dtype=torch.int32)}
    weight = torch.zeros(units.numel())
    weight[0] = math.log(2)
    a = run(SPEC, backend, doubled)
    b = run(SPEC, backend, sparse | {"log_weight": weight})
    assert last.numel() == 1
    torch.testing.assert_close(a["lse"], b["lse"], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(a["o"], b["o"], rtol=0, atol=5e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_last_place_alone_is_short(backend: str) -> None:
    """Length 5 at the last place: the answer of 21 tokens."""
    plain, sparse = all_units("page-edges")
    b = 4  # the request of 17 tokens: two units
    pick = {n: sparse[n][b : b + 1] for n in ("q", "page_table")}
    two = torch.tensor([0, 1], dtype=torch.int32)
    one = sparse | pick | {"indptr": two * 2, "units": two, "last_unit_len": torch.tensor([5]).int()}
    lens = torch.tensor([21], dtype=torch.int32)
    want = run(PAGED, backend, plain | pick | {"seq_lens": lens})
    torch.testing.assert_close(run(SPEC, backend, one)["o"], want["o"], rtol=0, atol=5e-6)


def test_costs_count_a_shared_list_once_a_kv_head() -> None:
    _, request = all_units("three-splits")
    _, kv = all_units("three-splits", scope=3)
    _, query = all_units("three-splits", scope=9)
    rows = 3 * 589 * 2 * 64 * 4
    state = 9 * 64 * 4 + 9 * 66 * 4
    assert bytes_moved(request) == rows + 37 * 4 + state
    assert bytes_moved(kv) == rows + 3 * 37 * 4 + state
    assert bytes_moved(query) == 3 * rows + 9 * 37 * 4 + state
    assert flops(request) == flops(kv) == flops(query) == 4 * 9 * 589 * 64


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("case", "estimated"), [("empty", False), ("log-weight", True)])
def test_a_weighted_state_says_that_it_is_an_estimate(backend: str, case: str, estimated: bool) -> None:
    """Its l is no lower bound of the true one."""
    state = SPEC.implementations[backend]()(**SPEC.make_inputs(SPEC.case(case)))
    assert state.estimated is estimated
