"""The bench of kernels: parts are found, rows say what was measured, and without a GPU none is invented."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier_kernels.registry import entry, registry
from kvtier_kernels.spec import KernelSpec
from tests.bench import bench_kernels, kernels_gpu, kernels_registry
from tests.bench.timing import Floors

# Build and append are timed each on its own.
UNTIMED = {"page_minmax"}
SPECS = [pytest.param(spec, id=spec.name) for spec in registry()]


def test_parts_are_the_modules_beside_the_suite() -> None:
    known = bench_kernels.parts()
    assert {"registry", "gpu", "chunks", "paged_decode"} <= known.keys()
    assert (known["gpu"], known["paged_decode"]) == ("kernels_gpu", "bench_paged_decode")


@pytest.mark.parametrize(
    ("variable", "rows"),
    [("KVTIER_BENCH_PARTS", bench_kernels.rows), ("KVTIER_BENCH_OPS", kernels_registry.chosen_ops)],
)
def test_an_unknown_choice_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, rows: object) -> None:
    monkeypatch.setenv(variable, "bogus")
    with pytest.raises(ValueError, match=f"{variable}: bogus; there are: "):
        list(rows())  # type: ignore[operator]


@pytest.mark.parametrize("spec", SPECS)
def test_every_op_names_what_is_timed(spec: KernelSpec) -> None:
    """On both: so that no op is left out of either report."""
    assert bool(spec.bench) != (spec.name in UNTIMED)
    assert bool(spec.bench_gpu) == (bool(spec.bench) and "triton" in spec.implementations)
    ids = [case.id for case in spec.bench], [case.id for case in spec.bench_gpu]
    assert all(len(set(names)) == len(names) for names in ids)


def test_rows_of_an_op_are_time_beside_floor_bytes_flops_and_percent() -> None:
    spec = entry("paged_decode")
    case = spec.case("d128-gqa8")
    inputs = spec.make_inputs(case)
    got = {r.id: r for r in kernels_registry.op_rows(spec, case, "gpu", inputs, 4e-6, 3e-6, 90.0)}
    name = "paged_decode.gpu.d128-gqa8"
    assert got[f"{name}.time"].value == pytest.approx(4.0)
    assert got[f"{name}.time"].peer_value == pytest.approx(3.0)
    assert got[f"{name}.time"].met is None
    assert got[f"{name}.bytes"].value == spec.bytes_moved(inputs) / 1e6
    assert got[f"{name}.flops"].value == spec.flops(inputs) / 1e6
    assert got[f"{name}.of_floor"].value == pytest.approx(75.0)
    assert got[f"{name}.of_floor"].met is False


def test_an_op_that_writes_its_inputs_is_timed_on_the_same_state_each_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Swapped-in units would be hits the second time, and the copies of a full pool no work."""
    monkeypatch.setattr(kernels_registry, "CASE_SECONDS", 0.0)
    spec = entry("bucket_lru")
    inputs = spec.make_inputs(spec.case("warm"))
    misses = []

    def call(**own: torch.Tensor) -> None:
        misses.append(spec.implementations["torch"]()(**own).n_miss.tolist())

    kernels_registry._best(spec, call, inputs)
    assert len(misses) == 5
    assert all(m == misses[0] for m in misses)
    assert max(misses[0]) > 0


def test_a_floor_is_measured_once_a_size_and_grows_with_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def gb_per_s(size: int, runs: int) -> float:
        asked.append(size)
        return 10.0

    monkeypatch.setattr("tests.bench.timing.read_gb_per_s", gb_per_s)
    monkeypatch.setattr("tests.bench.timing.copy_gb_per_s", gb_per_s)
    floors = Floors()
    assert floors.seconds(1_000_000) == pytest.approx(1e-4)
    assert floors.seconds(1_048_576) == pytest.approx(1.048576e-4)
    assert floors.seconds(100) == pytest.approx(1e-8)
    assert asked == [1 << 20, 1 << 19, 64 << 10, 32 << 10]


def fake_timer(call: Callable[[], Any], before: Callable[[], None], runs: int) -> float:
    """Two runs and a millisecond, whatever is called."""
    for _ in range(2):
        before()
        call()
    return 1e-3


def test_the_gpu_part_times_every_case_and_outlives_an_op_that_fails() -> None:
    """On this machine's memory, with a timer that answers one millisecond."""

    def broken() -> Callable[..., Any]:
        def call(**inputs: Any) -> None:
            raise RuntimeError("no such instruction")

        return call

    lru = entry("bucket_lru")
    good = replace(
        lru, bench_gpu=(lru.case("warm"),), implementations={"triton": lru.implementations["torch"]}
    )
    bad = replace(good, name="broken", implementations={"triton": broken})
    rows = list(kernels_gpu.measure([bad, good], torch.device("cpu"), fake_timer, 4096))
    assert [r.id for r in rows] == [
        "memory.gpu_copy",
        "broken.gpu.warm.failed",
        "bucket_lru.gpu.warm.time",
        "bucket_lru.gpu.warm.bytes",
        "bucket_lru.gpu.warm.of_floor",
    ]
    moved = lru.bytes_moved(lru.make_inputs(lru.case("warm")))
    assert rows[0].value == pytest.approx(2 * 4096 / 1e-3 / 1e9)
    assert rows[1].broken
    assert rows[-1].value == pytest.approx(100 * moved / (2 * 4096))


def test_without_a_gpu_nothing_is_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert list(kernels_gpu.rows()) == []
    assert "nothing was timed" in capsys.readouterr().out


def test_without_a_gpu_the_script_runs_nothing(tmp_path: Path) -> None:
    """A python that answers no to every question stands for a machine without one."""
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [root / "hack" / "gpu"],
        env={"PYTHON": "false", "PATH": os.environ["PATH"], "OUT": str(tmp_path / "out")},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "nothing was run" in done.stdout
    assert not (tmp_path / "out").exists()
