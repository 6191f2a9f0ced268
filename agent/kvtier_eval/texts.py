"""Prose that every Python has: the docstrings of its standard library, as filler between the facts of a task.

Why it exists: an evaluation that downloads nothing can be repeated anywhere, and its text can be named by
version and digest. It must not know tasks or models. The text may have been seen in training; facts that
tasks ask for are drawn from seeds and were not.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import io
import platform
from collections.abc import Iterator
from dataclasses import dataclass

MODULES = (
    "argparse", "ast", "asyncio", "base64", "bisect", "calendar", "cmd", "codecs", "collections",
    "concurrent.futures", "configparser", "contextlib", "copy", "csv", "dataclasses", "datetime",
    "decimal", "difflib", "dis", "email.message", "enum", "fileinput", "fractions", "ftplib", "functools",
    "glob", "gzip", "heapq", "http.client", "imaplib", "inspect", "ipaddress", "itertools", "json",
    "logging", "mailbox", "multiprocessing", "optparse", "os", "pathlib", "pickle", "random", "re",
    "sched", "shelve", "shutil", "smtplib", "socket", "sqlite3", "statistics", "string", "subprocess",
    "tarfile", "tempfile", "textwrap", "threading", "traceback", "unittest", "urllib.request", "zipfile",
)  # fmt: skip
_SHORTEST = 80


@dataclass(frozen=True, slots=True)
class Corpus:
    """text: documents one after the other. digest: SHA-256 of it. python: the version that it came with."""

    text: str
    digest: str
    python: str


def stdlib_corpus(modules: tuple[str, ...] = MODULES) -> Corpus:
    """The same text for the same version of Python."""
    seen: set[str] = set()
    documents = []
    for name in modules:
        for document in _documents(name):
            if len(document) >= _SHORTEST and document not in seen:
                seen.add(document)
                documents.append(document)
    text = "\n\n".join(documents)
    return Corpus(text, hashlib.sha256(text.encode()).hexdigest(), platform.python_version())


def _documents(name: str) -> Iterator[str]:
    with contextlib.redirect_stdout(io.StringIO()):
        module = importlib.import_module(name)
    yield inspect.getdoc(module) or ""
    for _, member in _members(module):
        if not (inspect.isclass(member) or inspect.isroutine(member)):
            continue
        if getattr(member, "__module__", None) != name:
            continue
        yield inspect.getdoc(member) or ""
        if inspect.isclass(member):
            for _, part in _members(member):
                if inspect.isroutine(part):
                    yield inspect.getdoc(part) or ""


def _members(owner: object) -> list[tuple[str, object]]:
    """By name, so that the order is nobody's choice."""
    return [(name, value) for name, value in sorted(vars(owner).items()) if not name.startswith("_")]
