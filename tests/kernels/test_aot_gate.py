"""The gate on compiled kernels: the checked-in baseline holds, and the gate can fail.

Compilation for sm_90a without a GPU proves resources and instructions, never speed.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier_kernels.aot.compile import narrow_strides
from kvtier_kernels.aot.gate import judge
from kvtier_kernels.registry import registry
from kvtier_kernels.spec import AotVariant, KernelSpec

ROW = {
    "registers": 100,
    "spill_stores": 0,
    "spill_loads": 0,
    "smem": 1000,
    "cp_async": 4,
    "mma": 2,
    "wgmma": 0,
}


def aot(*args: str) -> subprocess.CompletedProcess[str]:
    """In a process without the interpreter, which would not compile anything."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = Path(__file__).resolve().parents[2]
    env["PYTHONPATH"] = str(root / "kernels")
    return subprocess.run(
        [sys.executable, "-m", "kvtier_kernels.aot", *args],
        capture_output=True,
        text=True,
        timeout=300,
        env=env,
        check=False,
    )


def test_the_checked_in_baselines_hold() -> None:
    done = aot("--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was timed" in done.stdout


DOCTORED = [
    pytest.param("registers", 10, "limit +10 %", id="registers"),
    pytest.param("smem", 1000, "limit +10 %", id="smem"),
]


@pytest.mark.parametrize(("field", "value", "text"), DOCTORED)
def test_a_doctored_baseline_fails_with_a_line_that_names_it(
    tmp_path: Path, field: str, value: int, text: str
) -> None:
    import kvtier_kernels.aot

    name = "paged_decode"
    source = Path(kvtier_kernels.aot.__file__).parent / "baseline_sm90" / f"{name}.json"
    baseline = json.loads(source.read_text())
    before = baseline["variants"]["split-bf16-g8-d128"][field]
    baseline["variants"]["split-bf16-g8-d128"][field] = value
    (tmp_path / f"{name}.json").write_text(json.dumps(baseline))
    failed = aot("--check", "--op", name, "--baselines", str(tmp_path))
    assert failed.returncode == 1
    lines = [line for line in failed.stdout.splitlines() if line.startswith("FAIL")]
    assert len(lines) == 1
    assert all(word in lines[0] for word in (f"{name}/split-bf16-g8-d128", field, f"{value} -> ", text))
    assert str(before) in lines[0]


def test_an_op_without_compilations_is_refused_by_name() -> None:
    done = aot("--check", "--op", "no_such_op")
    assert done.returncode == 2
    assert "no_such_op" in done.stderr


GATE = [
    pytest.param({}, [], False, None, id="equal"),
    pytest.param({"registers": 110}, [], False, "+10.0 %", id="registers-at-the-limit"),
    pytest.param({"registers": 111}, [], True, "limit +10 %", id="registers-over"),
    pytest.param({"smem": 1101}, [], True, "limit +10 %", id="smem-over"),
    pytest.param({"smem": 10}, [], False, "-99.0 %", id="smem-shrinks"),
    pytest.param({"spill_loads": 4}, [], True, "spills", id="spill"),
    pytest.param({"cp_async": 0}, ["cp.async"], True, "promised instruction", id="no-cp-async"),
    pytest.param({"mma": 5}, [], False, "+150.0 %", id="more-mma"),
]


@pytest.mark.parametrize(("change", "absent", "fails", "text"), GATE)
def test_gate_rules(change: dict[str, int], absent: list[str], fails: bool, text: str | None) -> None:
    findings = judge("op", {"v": ROW}, {"v": ROW | change}, {"v": absent})
    assert any(f.fails for f in findings) is fails
    assert (text is None and not findings) or any(text in str(f) for f in findings if text)


def test_gate_wants_the_same_variants_on_both_sides() -> None:
    assert [f.fails for f in judge("op", {"old": ROW}, {}, {})] == [True]
    assert [f.fails for f in judge("op", {}, {"new": ROW}, {})] == [True]


PIPELINED = [
    pytest.param(spec, v, id=f"{spec.name}-{v.id}") for spec in registry() for v in spec.aot if v.must_contain
]


@pytest.mark.parametrize(("spec", "variant"), PIPELINED)
def test_what_is_compiled_is_what_is_launched(spec: KernelSpec, variant: AotVariant) -> None:
    """The gate speaks of the pipeline depth and warps that the launcher uses."""
    module = importlib.import_module(spec.aot_module)
    assert (variant.num_stages, variant.num_warps) == (module.NUM_STAGES, module.NUM_WARPS)


TTIR = """
  tt.func public @k(%x: !tt.ptr<f32> loc("x"), %stride_a: i32 {tt.divisibility = 16 : i32}, %stride_b: i32) {
    %i = tt.get_program_id x : i32 loc(#loc1)
    %a = arith.extsi %stride_a : i32 to i64 loc(#loc2)
    %w = arith.extsi %i : i32 to i64 loc(#loc2)
    %p = arith.muli %w, %a : i64 loc(#loc2)
    %s = tt.splat %stride_b : i32 -> tensor<64xi32> loc(#loc3)
    %t = arith.muli %r, %s : tensor<64xi32> loc(#loc4)
"""


def test_a_stride_multiplied_in_32_bits_is_named() -> None:
    assert narrow_strides(TTIR) == ("stride_b",)
    assert narrow_strides(TTIR.replace("tensor<64xi32>", "tensor<64xi64>")) == ()
