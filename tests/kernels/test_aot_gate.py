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

from kvtier_kernels.aot.__main__ import BASELINES, main
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
        timeout=500,
        env=env,
        check=False,
    )


def test_the_checked_in_baselines_hold() -> None:
    done = aot("--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was timed" in done.stdout


def test_a_doctored_baseline_fails_with_a_line_for_each_change(tmp_path: Path) -> None:
    name, variant = "finalize_state", "d128-bf16"
    baseline = json.loads((BASELINES / f"{name}.json").read_text())
    row = baseline["variants"][variant]
    before = dict(row)
    row |= {"registers": 8, "cp_async": 3}
    baseline["variants"]["gone"] = before
    (tmp_path / f"{name}.json").write_text(json.dumps(baseline))
    failed = aot("--check", "--op", name, "--baselines", str(tmp_path))
    assert failed.returncode == 1
    lines = [line for line in failed.stdout.splitlines() if "->" in line]
    now = before["registers"]
    assert [line.split() for line in lines] == [
        f"FAIL {name}/{variant} registers 8 -> {now} {(now / 8 - 1) * 100:+.1f} %, limit +10 %".split(),
        f"{name}/{variant} cp_async 3 -> 0 -100.0 %".split(),
        f"FAIL {name}/gone variant 1 -> - in the baseline, not in the registry".split(),
    ]


def test_an_op_without_compilations_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["--check", "--op", "no_such_op"])
    assert refused.value.code == 2
    assert "no_such_op" in capsys.readouterr().err


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


def test_what_no_block_has_fails_even_when_it_is_recorded() -> None:
    row = ROW | {"smem": (227 << 10) + 1}
    (finding,) = judge("op", {"v": row}, {"v": row}, {})
    assert finding.fails
    assert "232448 bytes" in str(finding)


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
