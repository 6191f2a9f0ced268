# mypy: disable-error-code="import-untyped"
"""Ahead-of-time compilation of the registry's variants and the measurement of what they use.

Needs Triton and the ptxas inside its wheel (the one for Blackwell: the other refuses this PTX version),
no driver and no GPU.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtier_kernels.spec import AotVariant, KernelSpec

# Must be in place before any kernel module is imported; see the kernels.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

CAPABILITY = 90
_PTXAS_SECONDS = 120


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel uses. smem and spills in bytes; counts are occurrences in the PTX."""

    registers: int
    spill_stores: int
    spill_loads: int
    smem: int
    cp_async: int
    mma: int
    wgmma: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class AotError(RuntimeError):
    """A kernel did not compile, or ptxas answered something unexpected."""


def compile_variant(spec: KernelSpec, variant: AotVariant) -> Resources:
    """Compiles one variant for sm_90a. Raises AotError."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if os.environ.get("TRITON_INTERPRET") == "1":
        raise AotError("TRITON_INTERPRET=1 is set: kernels would be interpreted, not compiled")
    fn: Any = getattr(importlib.import_module(spec.aot_module), variant.kernel)
    names = list(variant.signature)
    signature = dict(variant.signature) | dict.fromkeys(variant.constants, "constexpr")
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in variant.divisible}
    source: Any = ASTSource(fn, signature, dict(variant.constants), attrs)
    kernel: Any = triton.compile(
        source,
        target=GPUTarget("cuda", CAPABILITY, 32),
        options={"num_warps": variant.num_warps, "num_stages": variant.num_stages},
    )
    ptx = str(kernel.asm["ptx"])
    registers, stores, loads = _ptxas(ptx)
    return Resources(
        registers=registers,
        spill_stores=stores,
        spill_loads=loads,
        smem=int(kernel.metadata.shared),
        cp_async=ptx.count("cp.async.c"),
        mma=len(re.findall(r"(?<!wg)mma\.sync", ptx)),
        wgmma=ptx.count("wgmma.mma_async"),
    )


def missing(variant: AotVariant, got: Resources) -> list[str]:
    """Instructions that the variant must contain and does not."""
    have = {"cp.async": got.cp_async, "mma": got.mma, "wgmma": got.wgmma}
    return [name for name in variant.must_contain if not have[name]]


def _ptxas(ptx: str) -> tuple[int, int, int]:
    import triton

    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas-blackwell"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        done = subprocess.run(
            [str(ptxas), "-v", "--gpu-name=sm_90a", str(source), "-o", str(Path(folder) / "kernel.cubin")],
            capture_output=True,
            text=True,
            timeout=_PTXAS_SECONDS,
            check=False,
        )
    if done.returncode:
        raise AotError(f"ptxas: {done.stderr.strip()}")
    used = re.search(r"Used (\d+) registers", done.stderr)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    if used is None or spills is None:
        raise AotError(f"ptxas said nothing about registers or spills: {done.stderr.strip()}")
    return int(used[1]), int(spills[1]), int(spills[2])
