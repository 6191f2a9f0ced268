"""Edits through a driver: what a client does beside its frames."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvtier_core.edits.requests import EditAnswer, EditRequest, ForkRequest, Operation
from tests.unit.core.builders import Driver, Rows


def edit(driver: Driver, operation: Operation, epoch: int = 0) -> EditAnswer:
    """Edits the session and lets the driver go on where its next row stands."""
    answer = driver.engine.edit_session(
        EditRequest(driver.handle.session_id, driver.handle.generation, operation, position_epoch=epoch)
    )
    driver.position = answer.next_position
    return answer


def fork(driver: Driver, rows: Rows | None = None) -> Driver:
    """A driver of the fork, which goes on with `rows` where the parent stands. Its steps count from 1, since
    a first step of 0 would state that no row is committed."""
    handle = driver.engine.fork_session(ForkRequest(driver.handle.session_id, driver.handle.generation))
    return dataclasses.replace(
        driver, handle=handle, rows=rows or driver.rows, answers=[], step=1, position=driver.position
    )


def spliced(first: Rows, at: int, second: Rows) -> Rows:
    """`first` up to row `at`, then `second` from there."""

    def join(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat((a[:, :at], b[:, at:]), dim=1)

    return Rows(join(first.k, second.k), join(first.v, second.v), join(first.q, second.q))
