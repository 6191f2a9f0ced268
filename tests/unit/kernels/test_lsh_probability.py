"""LSH's probability is the frequency of its collisions, accurate at both ends."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor

from kvtier_kernels.ops.lsh import (
    collision_probability,
    lsh_collide_torch,
    lsh_hash_torch,
    lsh_tables,
)
from kvtier_kernels.ops.lsh.torch_impl import _log_p

I32 = torch.int32


def same(cos: float) -> float:
    return 1 - math.acos(cos) / math.pi


def log_p(p: float, bits: int, tables: int, hits: int) -> float:
    return float(_log_p(torch.tensor([p]), bits, tables, hits))


VECTORS = [
    pytest.param(0.8, 10, 150, 2, 0.9999979513, id="C7.18"),
    pytest.param(0.3, 10, 150, 2, 0.213667278, id="C7.20-two"),
    pytest.param(0.3, 10, 150, 1, 0.5789259135, id="C7.20-one"),
    pytest.param(0.0, 2, 3, 2, 10 / 64, id="C7.21"),
]


@pytest.mark.parametrize(("cos", "bits", "tables", "hits", "want"), VECTORS)
def test_vectors(cos: float, bits: int, tables: int, hits: int, want: float) -> None:
    assert collision_probability(same(cos), bits, tables, hits) == pytest.approx(want, abs=1e-9)
    assert math.exp(log_p(same(cos), bits, tables, hits)) == pytest.approx(want, abs=2e-6)


def exact_log_p(p: float, bits: int, tables: int, hits: int) -> float:
    with localcontext() as context:
        context.prec = 400
        r = Decimal(p) ** bits
        tail = sum(
            math.comb(tables, j) * r**j * (1 - r) ** (tables - j) if r < 1 else Decimal(j == tables)
            for j in range(hits, tables + 1)
        )
        return float(tail.ln()) if isinstance(tail, Decimal) else -math.inf


@pytest.mark.parametrize("hits", [1, 2, 3, 8, 16])
@pytest.mark.parametrize(("bits", "tables"), [(1, 16), (4, 40), (10, 150), (16, 60)])
def test_log_p_is_accurate_from_the_rarest_to_the_all_but_certain(bits: int, tables: int, hits: int) -> None:
    for p in (2**-20, 1e-3, 0.05, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97, 0.999, 1 - 2**-20, 1.0):
        wide = float(torch.tensor(p))  # as float32 holds it
        want = exact_log_p(wide, bits, tables, hits)
        assert log_p(wide, bits, tables, hits) == pytest.approx(want, rel=2e-6, abs=3e-6), p


def test_one_minus_the_terms_below_would_lose_what_is_rare() -> None:
    """Why the tail is summed: in float32 the textbook form gives 0, whose logarithm corrects nothing."""
    r = torch.tensor(0.003) ** 2
    textbook = 1 - (1 - r) ** 3 - 3 * r * (1 - r) ** 2
    want = exact_log_p(float(torch.tensor(0.003)), 2, 3, 2)
    assert abs(float(textbook) / math.exp(want) - 1) > 0.05
    assert log_p(0.003, 2, 3, 2) == pytest.approx(want, abs=1e-5)


def index(keys: Tensor, planes: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    n = torch.full((keys.shape[0],), keys.shape[2], dtype=I32)
    return lsh_tables(lsh_hash_torch(keys, planes, bits=bits), n, bits=bits)


def collide(
    q: Tensor, keys: Tensor, planes: Tensor, bits: int, hits: int, cap: int = 64
) -> tuple[Tensor, Tensor]:
    """(found bool [N], log_p [N]) of one query and KV head."""
    codes = lsh_hash_torch(q, planes, bits=bits)
    got = lsh_collide_torch(q, codes, keys, *index(keys, planes, bits), min_hits=hits, cap=cap)
    found, p = torch.zeros(keys.shape[2], dtype=torch.bool), torch.zeros(keys.shape[2])
    ids = got.ids[: int(got.indptr[-1])].long()
    found[ids], p[ids] = True, got.log_p[: len(ids)]
    return found, p


def test_tables_hold_each_row_once_a_table_in_its_bucket_and_ascending() -> None:
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 8, (2, 3, 50, 5), generator=g).to(torch.uint16)
    starts, ends, content = lsh_tables(codes, torch.tensor([50, 17], dtype=I32), bits=3)
    for b, n in ((0, 50), (1, 17)):
        for h in range(3):
            for t in range(5):
                seen = []
                for bucket in range(8):
                    rows = content[b, h, t, starts[b, h, t, bucket] : ends[b, h, t, bucket]].tolist()
                    assert rows == sorted(rows)
                    assert all(int(codes[b, h, r, t]) == bucket for r in rows)
                    seen += rows
                assert sorted(seen) == list(range(n))


def test_the_frequency_over_planes_is_the_probability() -> None:
    """2,000 draws of planes; five standard deviations of the mean."""
    g = torch.Generator().manual_seed(5)
    q = torch.randn(1, 1, 16, generator=g)
    keys = torch.stack([q[0, 0] * c + torch.randn(16, generator=g) for c in (2.0, 0.8, 0.2, -0.3)])[
        None, None
    ]
    draws, bits, tables = 2000, 2, 6
    planes = torch.randn(16, draws * tables * bits, generator=g)
    # A draw is a request: its codes are its own tables of one great hash.
    q_codes = lsh_hash_torch(q, planes, bits=bits).view(1, 1, draws, tables).permute(2, 0, 1, 3)[:, 0]
    codes = lsh_hash_torch(keys, planes, bits=bits).view(1, 1, 4, draws, tables).permute(3, 0, 1, 2, 4)[:, 0]
    starts, ends, content = lsh_tables(codes, torch.full((draws,), 4, dtype=I32), bits=bits)
    many = (q.expand(draws, 1, 16), q_codes, keys.expand(draws, 1, 4, 16), starts, ends, content)
    got = lsh_collide_torch(*many, min_hits=2, cap=4)
    ids = got.ids[: int(got.indptr[-1])].long()
    seen = torch.bincount(ids, minlength=4)
    p = torch.zeros(4)
    p[ids] = got.log_p[: len(ids)].exp()
    spread = (p * (1 - p) / draws).sqrt()
    assert torch.all((seen / draws - p).abs() < 5 * spread)
    assert float(p.max()) - float(p.min()) > 0.5, "the keys do not differ"


def test_weights_make_the_numerator_unbiased_and_c7_23_the_ratio_is_not() -> None:
    """C7.22 to C7.25 by enumeration: static (0, 0, u=1), a (1, 1, .4), b (.5, -1, .7)."""
    rows = {"a": (1.0, 1.0, 0.4), "b": (0.5, -1.0, 0.7)}
    numerator = ratio = 0.0
    for a in (0, 1):
        for b in (0, 1):
            weight = (0.4 if a else 0.6) * (0.7 if b else 0.3)
            drawn = [rows[n] for n, there in (("a", a), ("b", b)) if there]
            top = sum(math.exp(s - math.log(u)) * v for s, v, u in drawn)
            numerator += weight * top
            ratio += weight * top / (1 + sum(math.exp(s - math.log(u)) for s, v, u in drawn))
    assert numerator == pytest.approx(math.e - math.exp(0.5), abs=1e-12)
    assert ratio == pytest.approx(-0.0677374384, abs=1e-9)
    exact = (math.e - math.exp(0.5)) / (1 + math.e + math.exp(0.5))
    assert exact == pytest.approx(0.1992845053, abs=1e-9)


def test_c7_26_one_mean_for_all_keys_changes_no_softmax_and_two_do() -> None:
    q, mu = torch.tensor([1.0, 2]), torch.tensor([0.3, -0.4])
    k = torch.tensor([[1.0, 0], [0, 1], [0.5, 0.5]])
    whole = torch.softmax(k @ q, 0)
    torch.testing.assert_close(torch.softmax((k - mu) @ q, 0), whole)
    partly = torch.cat([k[:1] - mu, k[1:]])
    assert float((torch.softmax(partly @ q, 0) - whole).abs().max()) > 0.05


def test_sampling_ranks_wrongly_when_a_long_key_lies_at_a_modest_angle() -> None:
    """cos 0.3 and a great norm: it holds all of the mass and is found as seldom as any key at that angle."""
    assert collision_probability(same(0.3), 10, 150, 2) == pytest.approx(0.21, abs=0.01)
    g = torch.Generator().manual_seed(1)
    q = torch.zeros(1, 1, 32)
    q[..., 0] = 4.0
    keys = torch.randn(1, 1, 40, 32, generator=g)
    keys[0, 0, 7] = 0
    keys[0, 0, 7, :2] = torch.tensor([0.3, math.sqrt(1 - 0.09)]) * 60
    assert float(torch.softmax(keys[0, 0] @ q[0, 0], 0)[7]) > 0.999
    missed = 0
    for _ in range(12):
        planes = torch.randn(32, 10 * 150, generator=g)
        found, _ = collide(q, keys, planes, 10, 2)
        missed += not bool(found[7])
    assert missed > 6


def test_a_list_that_is_full_says_so() -> None:
    q = torch.ones(1, 1, 4)
    keys = torch.ones(1, 1, 9, 4)
    planes = torch.eye(4)
    codes = lsh_hash_torch(q, planes, bits=2)
    got = lsh_collide_torch(q, codes, keys, *index(keys, planes, 2), min_hits=2, cap=5)
    assert (got.total.tolist(), got.indptr.tolist(), got.ids.tolist()) == ([9], [0, 5], [0, 1, 2, 3, 4])


def test_sides_turn_only_where_the_product_is_within_rounding_of_zero() -> None:
    g = torch.Generator().manual_seed(9)
    x, planes = torch.randn(50, 64, generator=g), torch.randn(64, 80, generator=g)
    codes = lsh_hash_torch(x, planes, bits=8).long()
    bit = (codes.unsqueeze(-1) >> torch.arange(8)) & 1
    side = x.double() @ planes.double()
    wrong = bit.flatten(1) != (side > 0)
    room = 64 * 2.0**-24 * (x.abs().double() @ planes.abs().double())
    assert torch.all(side[wrong].abs() <= room[wrong])
    assert torch.all(~wrong[side.abs() > room])
