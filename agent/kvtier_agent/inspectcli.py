"""`kvtier-agent inspect`: what is where and why, of a running agent or of a store without one.

Why it exists: an operator asks a cache or a disk without a client, without a model, and offline without
changing a byte. Status 0: all is well; 1: something is wrong, and the output says what; 2: a wrong argument.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kvtier_agent.inspectreport import Report

EXIT_WRONG = 1
EXIT_BAD_ARGUMENT = 2
_KEY_HEX = 64
_EXAMPLES = """examples:
  totals of a cache, from a running agent
    kvtier-agent inspect --socket /run/kvtier/node-a/engine.sock --cache serving/chat
  what a tenant's blocks are and where they lie
    kvtier-agent inspect --socket ... --cache serving/chat --tenant team-a --limit 20
  why a key hits, misses or was evicted
    kvtier-agent inspect --socket ... --cache serving/chat --tenant team-a --key 5b0c...
  verify every block of every store below a folder, while no agent has it
    kvtier-agent inspect --store /mnt/kv
  the same for encrypted stores, for a script
    kvtier-agent inspect --store /mnt/kv --key-dir /etc/kvtier/keys --json

status: 0 all is well; 1 something is wrong, or cannot be asked; 2 a wrong argument
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvtier-agent inspect",
        description="Says what blocks are where, at which generation, and why; or verifies a store offline.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--socket", metavar="FILE", help="engine socket of a running agent")
    what.add_argument("--store", metavar="PATH", help="a store file, or a folder: every store below it")
    add = parser.add_argument
    add("--cache", default="", metavar="NAMESPACE/NAME", help="with --socket: the KVCache")
    add("--tenant", default="", help="with --socket: list this tenant's blocks")
    add("--key", default="", metavar="HEX", help="with --socket and --tenant: explain this block")
    add("--limit", type=int, default=50, help="blocks that are listed at most (default: 50)")
    add("--timeout", type=float, default=10.0, metavar="SECONDS", help="with --socket (default: 10)")
    add("--key-dir", default="", metavar="DIR", help="with --store: keys of encrypted stores")
    add("--json", action="store_true", help="one JSON object in place of text")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Prints the report; returns the exit status."""
    parser = build_parser()
    parsed = parser.parse_args(arguments)
    _check(parser, parsed)
    report = _store(parsed) if parsed.store else _live(parsed)
    sys.stdout.write(json.dumps(report.facts, indent=2) + "\n" if parsed.json else report.text)
    return EXIT_WRONG if report.wrong else 0


def _check(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    if parsed.socket:
        namespace, slash, name = parsed.cache.partition("/")
        if not (slash and namespace and name):
            parser.error("--socket needs --cache NAMESPACE/NAME")
        if parsed.key_dir:
            parser.error("--key-dir goes with --store: a running agent has its own")
        if parsed.key and not parsed.tenant:
            parser.error("--key needs --tenant: a block is a tenant's")
        if parsed.key and (
            len(parsed.key) != _KEY_HEX or not all(at in "0123456789abcdef" for at in parsed.key.lower())
        ):
            parser.error(f"--key has {_KEY_HEX} hex digits")
    elif parsed.cache or parsed.tenant or parsed.key:
        parser.error("--cache, --tenant and --key go with --socket")
    if not 1 <= parsed.limit <= 1000:
        parser.error("--limit must be in [1, 1000]")
    if parsed.timeout <= 0:
        parser.error("--timeout must be above 0")


def _store(parsed: argparse.Namespace) -> Report:
    from kvtier_agent.inspectstore import verify

    keys = Path(parsed.key_dir) if parsed.key_dir else None
    return verify(Path(parsed.store), keys, parsed.limit)


def _live(parsed: argparse.Namespace) -> Report:
    from kvtier_agent.inspectlive import ask

    namespace, _, name = parsed.cache.partition("/")
    return ask(
        Path(parsed.socket),
        namespace,
        name,
        tenant=parsed.tenant,
        key=bytes.fromhex(parsed.key),
        limit=parsed.limit,
        timeout=parsed.timeout,
    )
