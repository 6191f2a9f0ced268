"""The gate on compiled kernels: the checked-in baseline holds, and the gate can fail.

Compilation for sm_90a without a GPU proves resources and instructions, never speed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier_kernels.aot.gate import judge

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


def test_the_checked_in_baseline_holds_and_a_smaller_one_fails(tmp_path: Path) -> None:
    done = aot("--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was timed" in done.stdout

    import kvtier_kernels.aot

    baseline = json.loads(Path(kvtier_kernels.aot.__file__).with_name("baseline_sm90.json").read_text())
    assert all(v["spill_stores"] == v["spill_loads"] == 0 for v in baseline["variants"].values())
    name = "paged_decode/split-bf16-g8-d128"
    baseline["variants"][name]["registers"] = 10
    shrunk = tmp_path / "baseline.json"
    shrunk.write_text(json.dumps(baseline))
    failed = aot("--check", "--baseline", str(shrunk))
    assert failed.returncode == 1
    assert f"FAIL {name}" in failed.stdout
    assert "limit +10 %" in failed.stdout


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
    findings = judge({"v": ROW}, {"v": ROW | change}, {"v": absent})
    assert any(f.fails for f in findings) is fails
    assert (text is None and not findings) or any(text in str(f) for f in findings if text)


def test_gate_wants_the_same_variants_on_both_sides() -> None:
    assert [f.fails for f in judge({"old": ROW}, {}, {})] == [True]
    assert [f.fails for f in judge({}, {"new": ROW}, {})] == [True]
