"""The bits of chunk_state depend on the query and the rows it sees, and on nothing else.

Every comparison here is torch.equal. This is idea 4 of the architecture as a test: exact answers do
not depend on placement, batch, alignment or layout, bit for bit.
"""

from __future__ import annotations

import pytest
import torch

from kvtier_kernels.ops.chunk_attention import chunk_state
from kvtier_kernels.state import AttentionState, merge_ascending

SHAPES = [
    pytest.param(hq, hk, d, id=f"Hq{hq}-Hk{hk}-d{d}")
    for hq, hk, d in [
        (9, 3, 64),
        (3, 3, 64),
        (4, 2, 64),
        (8, 1, 64),
        (5, 1, 128),
        (8, 2, 128),
        (12, 2, 128),
        (7, 1, 64),
        (2, 2, 128),
        (16, 2, 64),
    ]
]
FILLS = [1, 2, 3, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 144, 191, 192, 240, 255, 256]


@pytest.fixture(autouse=True)
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tensors(nq: int, rows: int, hq: int, hk: int, d: int, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed * 1000 + hq * 100 + hk * 10 + d)
    q = torch.randn(nq, hq, d, generator=g) * 2
    return [q, torch.randn(rows, hk, d, generator=g), torch.randn(rows, hk, d, generator=g)]


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q0: int, r0: int = 0) -> AttentionState:
    return chunk_state(q, k, v, scale=q.shape[2] ** -0.5, q_pos0=q0, row_pos0=r0)


def same(a: AttentionState, b: AttentionState) -> bool:
    return torch.equal(a.m, b.m) and torch.equal(a.l, b.l) and torch.equal(a.u, b.u)


def part(s: AttentionState, lo: int, hi: int) -> AttentionState:
    return AttentionState(s.m[lo:hi], s.l[lo:hi], s.u[lo:hi], s.frame)


@pytest.mark.parametrize(("hq", "hk", "d"), SHAPES)
def test_a_query_does_not_feel_its_block(hq: int, hk: int, d: int) -> None:
    """Blocks of 1..256 queries over a sealed chunk before them."""
    q, k, v = tensors(256, 256, hq, hk, d)
    whole = run(q, k, v, 256)
    for size in (1, 2, 3, 5, 64, 100, 255):
        for lo in range(0, 256, size)[:12]:
            hi = min(256, lo + size)
            assert same(run(q[lo:hi], k, v, 256 + lo), part(whole, lo, hi)), (size, lo)


@pytest.mark.parametrize(("hq", "hk", "d"), SHAPES)
def test_causal_block_equals_one_query_at_a_time_over_an_open_chunk(hq: int, hk: int, d: int) -> None:
    """Prefill of a block against decode of the same tokens: the chunk then holds fewer rows."""
    q, k, v = tensors(256, 256, hq, hk, d, seed=1)
    whole = run(q, k, v, 0)
    for fill in FILLS:
        i = fill - 1
        assert same(run(q[i : i + 1], k[:fill], v[:fill], i), part(whole, i, i + 1)), fill


@pytest.mark.parametrize(("hq", "hk", "d"), SHAPES[:1])
def test_chunks_longer_than_the_default_keep_the_promise(hq: int, hk: int, d: int) -> None:
    """chunkTokens may be up to 4,096: fills around the blocks in which values are summed."""
    q, k, v = tensors(1025, 1025, hq, hk, d, seed=6)
    whole = run(q, k, v, 0)
    for fill in (257, 384, 385, 511, 512, 513, 1000, 1024, 1025):
        i = fill - 1
        assert same(run(q[i : i + 1], k[:fill], v[:fill], i), part(whole, i, i + 1)), fill


@pytest.mark.parametrize(("hq", "hk", "d"), SHAPES)
@pytest.mark.parametrize("fill", FILLS)
def test_layout_and_alignment_change_no_bit(hq: int, hk: int, d: int, fill: int) -> None:
    q, k, v = tensors(3, fill, hq, hk, d, seed=2)
    want = run(q, k, v, fill)

    def head_major(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    def shifted(x: torch.Tensor) -> torch.Tensor:
        flat = torch.empty(x.numel() + 1)
        out = flat[1:].view(x.shape)
        out.copy_(x)
        return out

    def inside(x: torch.Tensor) -> torch.Tensor:
        big = torch.full((fill + 7, hk, d + 16), torch.nan)
        big[3 : 3 + fill, :, :d] = x
        return big[3 : 3 + fill, :, :d]

    def channel_last(x: torch.Tensor) -> torch.Tensor:
        return x.permute(2, 0, 1).contiguous().permute(1, 2, 0)

    for layout in (head_major, shifted, inside, channel_last):
        assert same(run(q, layout(k), layout(v), fill), want), layout.__name__
        assert same(run(layout_q(q), layout(k), v, fill), want), layout.__name__


def layout_q(q: torch.Tensor) -> torch.Tensor:
    """The same queries as a strided slice of something larger."""
    big = torch.full((q.shape[0], q.shape[1] + 1, q.shape[2] + 3), torch.nan)
    big[:, 1:, 2:-1] = q
    return big[:, 1:, 2:-1]


@pytest.mark.parametrize(("hq", "hk", "d"), SHAPES)
def test_a_kv_head_does_not_feel_the_other_heads(hq: int, hk: int, d: int) -> None:
    q, k, v = tensors(4, 192, hq, hk, d, seed=3)
    whole = run(q, k, v, 300)
    group = hq // hk
    for h in range(hk):
        heads = slice(h * group, (h + 1) * group)
        one = run(q[:, heads], k[:, h : h + 1], v[:, h : h + 1], 300)
        assert torch.equal(one.u, whole.u[:, heads])
        assert torch.equal(one.l, whole.l[:, heads])


@pytest.mark.parametrize(("hq", "hk", "d"), SHAPES[:4])
def test_copies_between_tiers_change_no_bit(hq: int, hk: int, d: int, tmp_path: object) -> None:
    """Rows that went through a file and a pinned-like buffer answer like rows that never moved."""
    q, k, v = tensors(2, 700, hq, hk, d, seed=4)
    resident = [run(q, k[lo : lo + 256], v[lo : lo + 256], 800, lo) for lo in range(0, 700, 256)]
    moved = []
    for lo in range(0, 700, 256):
        raw = torch.stack([k[lo : lo + 256], v[lo : lo + 256]]).numpy().tobytes()
        buf = bytearray(b"\0" * 12 + raw)
        rows = min(256, 700 - lo)
        kv = torch.frombuffer(buf, dtype=torch.float32, offset=12).view(2, rows, hk, d)
        moved.append(run(q, kv[0], kv[1], 800, lo))
    assert same(merge_ascending(moved), merge_ascending(resident))


def test_the_library_really_has_the_hazard() -> None:
    """Raw products do change bits with the number of rows; if not, the padding tests nothing here.

    Not a promise of the library: it fails only if no shape at all shows the hazard on this machine,
    and then the padding costs time for nothing and should be looked at again.
    """
    g = torch.Generator().manual_seed(5)
    seen = 0
    for rows in range(16, 257, 16):
        p, v = torch.rand(3, 12, 256, generator=g), torch.randn(3, 256, 64, generator=g)
        p[:, :, rows:] = 0
        seen += not torch.equal(torch.bmm(p, v), torch.bmm(p[:, :, :rows].contiguous(), v[:, :rows]))
        seen += not torch.equal(p.sum(-1), p[:, :, :rows].contiguous().sum(-1))
        seen += not torch.equal(torch.bmm(p[:, :1], v), torch.bmm(p, v)[:, :1])
    assert seen > 0
