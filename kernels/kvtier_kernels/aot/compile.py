# mypy: disable-error-code="import-untyped"
"""Ahead-of-time compilation of the registry's variants and the measurement of what they use.

Needs Triton and the ptxas inside its wheel (the one for Blackwell: the other refuses this PTX version),
no driver and no GPU.
"""

from __future__ import annotations

import hashlib
import importlib
import json
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
_CACHED = "kvtier_resources.json"


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel uses. smem and spills in bytes; counts are occurrences in the PTX;
    narrow: strides that something is multiplied by in 32 bits."""

    registers: int
    spill_stores: int
    spill_loads: int
    smem: int
    cp_async: int
    mma: int
    wgmma: int
    narrow: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, int]:
        """What a baseline records: all but `narrow`, which must be empty."""
        return {name: value for name, value in asdict(self).items() if name != "narrow"}

    @staticmethod
    def parse(text: str) -> Resources:
        """Of what json.dumps wrote."""
        fields = json.loads(text)
        return Resources(**{**fields, "narrow": tuple(fields["narrow"])})


class AotError(RuntimeError):
    """A kernel did not compile, or ptxas answered something unexpected."""


def compile_variant(spec: KernelSpec, variant: AotVariant) -> Resources:
    """Compiles one variant for sm_90a, or reads what compiling it gave, from Triton's cache, under a key
    of all that shapes it: the kernel's source, the variant, Triton and this module. Raises AotError."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.cache import get_cache_manager

    if os.environ.get("TRITON_INTERPRET") == "1":
        raise AotError("TRITON_INTERPRET=1 is set: kernels would be interpreted, not compiled")
    fn: Any = getattr(importlib.import_module(spec.aot_module), variant.kernel)
    shape = asdict(variant) | {"divisible": sorted(variant.divisible)}
    stamp = (fn.cache_key, shape, triton.__version__, CAPABILITY, Path(__file__).read_text())
    key = hashlib.sha256(repr(stamp).encode()).hexdigest()
    cache: Any = get_cache_manager(key)
    if kept := cache.get_file(_CACHED):
        return Resources.parse(Path(kept).read_text())
    names = list(variant.signature)
    signature = dict(variant.signature) | dict.fromkeys(variant.constants, "constexpr")
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in sorted(variant.divisible)}
    source: Any = ASTSource(fn, signature, dict(variant.constants), attrs)
    kernel: Any = triton.compile(
        source,
        target=GPUTarget("cuda", CAPABILITY, 32),
        options={"num_warps": variant.num_warps, "num_stages": variant.num_stages},
    )
    ptx = str(kernel.asm["ptx"])
    registers, stores, loads = _ptxas(ptx)
    got = Resources(
        registers=registers,
        spill_stores=stores,
        spill_loads=loads,
        smem=int(kernel.metadata.shared),
        cp_async=ptx.count("cp.async.c"),
        mma=len(re.findall(r"(?<!wg)mma\.sync", ptx)),
        wgmma=ptx.count("wgmma.mma_async"),
        narrow=narrow_strides(str(kernel.asm["ttir"])),
    )
    cache.put(json.dumps(asdict(got)), _CACHED, binary=False)
    return got


def missing(variant: AotVariant, got: Resources) -> list[str]:
    """Instructions that the variant must contain and does not, and offsets that are not 64 bits wide."""
    have = {"cp.async": got.cp_async, "mma": got.mma, "wgmma": got.wgmma}
    lost = [name for name in variant.must_contain if not have[name]]
    return lost + [f"int64 {name}" for name in got.narrow]


def narrow_strides(ttir: str) -> tuple[str, ...]:
    """Arguments named stride_* that some 32-bit multiplication takes, followed through copies of a value.

    An id times a stride passes 2^31 in any pool worth having, so kernels widen one side first.
    """
    source: dict[str, str] = {}
    found: list[str] = []
    for line in ttir.splitlines():
        made = re.match(r"\s*(%\w+) = ([\w.]+) (.*)", line)
        if made is None:
            source |= {name: name[1:] for name in re.findall(r"(%stride_\w+): i32", line)}
            continue
        result, op, rest = made[1], made[2], re.sub(r"loc\(.*", "", made[3])
        strides = [source[x] for x in re.findall(r"%\w+", rest) if x in source]
        if op in ("tt.splat", "tt.broadcast", "tt.expand_dims") and strides:
            source[result] = strides[0]
        elif op == "arith.muli" and re.search(r"i32>?\s*$", rest):
            found += strides
    return tuple(sorted(set(found)))


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
