"""Selection, slots, plan and copies over many steps: every implementation ends with the same bits."""

from __future__ import annotations

import torch

from kvtier_kernels.ops.swap_in.triton_impl import copy_kernel
from tests.kernels.harness import DEVICE, SPECS, run, unlike

ROWS, UNITS, SLOTS, WANT, HOST = 2, 30, 12, 9, 80
OPS = {spec.name: spec for spec in SPECS}
STATE = ("slot_tok", "age", "loc", "epoch")


def start(g: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "slot_tok": torch.full((ROWS, SLOTS), -1, dtype=torch.int32),
        "age": torch.zeros(ROWS, SLOTS, dtype=torch.int16),
        "loc": torch.full((ROWS, UNITS), -1, dtype=torch.int32),
        "epoch": torch.full((ROWS,), 2**15 - 3, dtype=torch.int32),
        "pool": torch.zeros(ROWS * SLOTS, 8),
        "host": torch.randn(HOST, 8, generator=g),
        "host_row": torch.stack([torch.randperm(HOST, generator=g)[:UNITS] for _ in range(ROWS)]).int(),
    }


def step(backend: str, state: dict[str, torch.Tensor], score: torch.Tensor, pin: torch.Tensor) -> None:
    """Each row wants its best units; the epochs pass the limit of int16 on the way."""
    lens, k = torch.full((ROWS,), UNITS).int(), torch.full((ROWS,), WANT).int()
    lists = run(OPS["topk_units"], backend, {"score": score, "valid_len": lens, "k": k, "max_k": WANT})
    want = lists["units"].view(ROWS, WANT)
    got = run(OPS["bucket_lru"], backend, {n: state[n] for n in STATE} | {"want": want, "pin": pin})
    state |= {n: got[n] for n in STATE}
    lists = {"miss": got["miss"], "victim": got["victim"], "host_row": state["host_row"], "slots": SLOTS}
    plan = run(OPS["swap_in_plan"], backend, lists)
    copies = {n: plan[n] for n in ("src", "dst", "copies")} | {"host": state["host"], "pool": state["pool"]}
    state["pool"] = run(OPS["swap_in_apply"], backend, copies)["out"]
    state["epoch"] = state["epoch"] + 1


def test_every_implementation_ends_with_the_same_slots() -> None:
    g = torch.Generator().manual_seed(11)
    ours = start(g)
    theirs = dict(ours)
    for _ in range(7):
        score = (torch.randn(ROWS, UNITS, generator=g) * 2).round()
        pin = torch.rand(ROWS, SLOTS, generator=g) < 0.15
        step("torch", ours, score, pin)
        step("triton", theirs, score, pin)
        assert not unlike(ours, theirs)
    for r in range(ROWS):
        for slot, unit in enumerate(ours["slot_tok"][r].tolist()):
            if unit >= 0:
                assert torch.equal(ours["pool"][r * SLOTS + slot], ours["host"][ours["host_row"][r, unit]])
    assert int(ours["epoch"].max()) < 300


def test_copies_outside_the_pools_are_left_out() -> None:
    """What the launcher refuses on the CPU must not write anywhere on a GPU, where it cannot look."""
    # The pools lie inside larger ones, so that a wrong read or write is seen and harms nobody.
    host, pool = torch.ones(6, 16, device=DEVICE), torch.zeros(6, 16, device=DEVICE)
    src = torch.tensor([0, -1, 4, 1, 2, 3], dtype=torch.int32, device=DEVICE)
    dst = torch.tensor([0, 1, 2, -1, 3, 4], dtype=torch.int32, device=DEVICE)
    copies = torch.tensor([6], dtype=torch.int32, device=DEVICE)
    copy_kernel[(2,)](host[1:5], pool[1:5], src, dst, copies, 16, 4, 4, 16, 16, T=16, R=4)
    assert pool[:, 0].tolist() == [0, 1, 0, 0, 1, 0]
