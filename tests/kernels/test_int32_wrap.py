"""Index arithmetic past 2^31: each kernel without its widening to int64 gives a wrong answer on its far case.

So the far cases can fail: an id times a stride that wraps lands on rows of other values.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvtier_kernels.compare import findings
from kvtier_kernels.spec import Hazard, KernelSpec
from kvtier_kernels.testing.interp_bf16 import correct_bf16
from tests.kernels.harness import DEVICE, SPECS, want

FAR = [
    pytest.param(spec, id=spec.name)
    for spec in SPECS
    if "triton" in spec.implementations and Hazard.FAR not in spec.exempt and DEVICE == "cpu"
]


def narrowed(module: str, folder: Path) -> ModuleType:
    """The module with every widening to int64 inside it taken out."""
    found = importlib.util.find_spec(module)
    assert found is not None and found.origin is not None
    text, widenings = re.subn(r"\.to\(tl\.int64\)", "", Path(found.origin).read_text())
    assert widenings
    file = folder / f"narrow_{module.replace('.', '_')}.py"
    file.write_text(text)
    loader = importlib.util.spec_from_file_location(file.stem, file)
    assert loader is not None and loader.loader is not None
    built = importlib.util.module_from_spec(loader)
    sys.modules[file.stem] = built
    loader.loader.exec_module(built)
    return built


@pytest.mark.parametrize("spec", FAR)
def test_a_kernel_that_multiplies_ids_in_int32_is_caught(spec: KernelSpec, tmp_path: Path) -> None:
    implementation = spec.implementations["triton"]()
    assert implementation.__module__ == spec.aot_module
    narrow = getattr(narrowed(spec.aot_module, tmp_path), implementation.__name__)
    caught = 0
    for case in (c for c in spec.cases if Hazard.FAR in c.traits):
        inputs = spec.make_inputs(case)
        with correct_bf16():
            got = spec.outputs(narrow(**inputs))
        caught += bool(findings(spec.comparisons, inputs, got, want(spec, inputs)))
    assert caught
