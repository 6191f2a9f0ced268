"""An exception that is no refusal: a bug costs an answer, never the capacity that its frame held."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvtier_core.attend import Attention
from kvtier_core.tiers.nvme import NvmeTier
from tests.unit.core.builders import CHUNK, LAYERS, Driver, Rows, engine, gpu, nvme

PLACES = {
    "attending": (Attention, "exact", 2 * LAYERS),
    "moving a chunk down": (NvmeTier, "write", 2 * LAYERS),
    "sealing into storage": (NvmeTier, "write", LAYERS),
    "validating in storage": (NvmeTier, "validate", LAYERS),
}


@pytest.mark.parametrize(("owner", "name", "slots"), PLACES.values(), ids=PLACES.keys())
def test_a_defect_in_a_frame_costs_no_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, slots: int
) -> None:
    rows = Rows.random(2 * CHUNK + 2)

    def fail(*_: object) -> None:
        raise RuntimeError("a defect")

    with engine(tmp_path / "a", [gpu(slots), nvme(2 * LAYERS)]) as built:
        driver = Driver.open(built, rows)
        driver.forward(2)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            # What leaked would fill the tiers, and the refusal would be another.
            for _ in range(2 * LAYERS + slots):
                with pytest.raises(RuntimeError, match="a defect"):
                    driver.forward(2 * CHUNK, block=2 * CHUNK)
        out = driver.forward(2 * CHUNK, block=2 * CHUNK)
    with engine(tmp_path / "b", [gpu(64)]) as built:
        assert torch.equal(out, Driver.open(built, rows).forward(2 * CHUNK + 2)[:, 2:])
