"""`kubectl kvtier`: what a rollout does, why it waits, and the commands that people give it.

Exit status: 0 yes, 1 the request failed, 2 wrong usage, 3 not found, 4 the answer is no (rolled back,
refused, different, findings), 5 nothing was answered in time.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kubectl_kvtier import commands
from kubectl_kvtier.completion import NAME_SECONDS, SHELLS, complete, script
from kubectl_kvtier.outcomes import Exit, Failure
from kubectl_kvtier.printing import printable
from kvtier_crds.models.kvrollout import Verb
from kvtier_crds.quantity import QuantityError, parse_duration

_ROLLOUTS = "kvrollouts"
_VERBS = {
    Verb.PROMOTE: "go to the next step now, though its time or its gates do not say so",
    Verb.PAUSE: "stay in this step, with its leases renewed, until resumed",
    Verb.RESUME: "go on from a pause",
    Verb.ABORT: "return to the exact baseline now",
    Verb.RETRY: "begin a new attempt at Shadow after the rollout has ended",
    Verb.SKIP: "leave this step without waiting for its evidence",
}


_UNINSTALL = (
    "Exit status: 0 all is gone by itself, 1 a right is missing or the server does not answer, 2 wrong usage "
    "or a deadline shorter than leases, 4 a finalizer was dropped, 5 something is left at the deadline."
)
LONGEST_DEADLINE = 86400.0
LONGEST_WATCH = 30 * 86400.0
_KINDS = {
    **dict.fromkeys(("kvr", "kvrollout", "kvrollouts", "kvrollout.kvtier.dev"), ""),
    **dict.fromkeys(("kvc", "kvcache", "kvcaches", "kvcache.kvtier.dev"), "cache/"),
}


def make_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="kubectl kvtier",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    kinds = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    cluster = _cluster_flags()
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("-o", "--output", choices=("text", "json"), default="text")

    def add(
        name: str, text: str, *parents: argparse.ArgumentParser, completes: str = ""
    ) -> argparse.ArgumentParser:
        sub = kinds.add_parser(name, help=text, description=text, parents=list(parents), allow_abbrev=False)
        sub.completes = completes  # type: ignore[attr-defined]
        return sub

    status = add("status", "a rollout as a tree; without a name, all", cluster, output, completes=_ROLLOUTS)
    status.add_argument("name", nargs="?", type=_named, help="KVRollout")
    status.add_argument("-A", "--all-namespaces", action="store_true")
    status.add_argument("-w", "--watch", action="store_true", help="draw again at each change, until it ends")
    status.add_argument(
        "--timeout",
        type=_watch_seconds,
        metavar="30m",
        help="of --watch: ends with 5 when the rollout has not ended by then (without: never)",
    )
    status.add_argument("--ascii", action="store_true", help="no characters outside ASCII")
    explain = add("explain", "why the next step has not happened", cluster, output, completes=_ROLLOUTS)
    explain.add_argument("name", type=_named, help="KVRollout, or cache/NAME")
    history = add(
        "history", "what became of a cache's rollouts, or of one", cluster, output, completes=_ROLLOUTS
    )
    history.add_argument("name", type=_named, help="KVRollout, or cache/NAME")
    diff = add("diff", "what differs between two manifests", cluster, output, completes=_ROLLOUTS)
    diff.add_argument(
        "name", type=_named, help="KVRollout (its baseline and candidate), or cache/NAME with two revisions"
    )
    diff.add_argument("revisions", nargs="*", metavar="REVISION", help="name or first digits of the digest")
    for verb, text in _VERBS.items():
        sub = add(verb.value.lower(), text, cluster, output, completes=_ROLLOUTS)
        sub.add_argument("name", type=_named, help="KVRollout")
        sub.add_argument("--dry-run", action="store_true", help="have the server judge it, and write nothing")
        sub.add_argument("--no-wait", action="store_true", help="do not wait for the operator's answer")
        sub.add_argument("--timeout", type=_seconds, default=30.0, metavar="30s", help="of that wait (30s)")
        sub.set_defaults(verb=verb)
    top = add("top", "bytes by tier", cluster, output)
    top.add_argument("what", nargs="?", choices=("nodes", "caches"), help="without: both")
    top.add_argument("-A", "--all-namespaces", action="store_true")
    trace = add("trace", "a rollout's trace as a tree", cluster, output, completes=_ROLLOUTS)
    trace.add_argument("name", type=_named, help="KVRollout, or 32 hexadecimal digits of a trace id")
    source = trace.add_mutually_exclusive_group(required=True)
    source.add_argument("--file", type=Path, help="OTLP/JSON, as a collector's file exporter writes it")
    source.add_argument(
        "--jaeger", metavar="URL", help="Jaeger's query endpoint, for example http://127.0.0.1:16686"
    )
    gone = add(
        "uninstall",
        "delete rollouts, then caches, and wait until they are gone; at the deadline drop kvtier's own "
        "finalizers that are left",
        cluster,
        output,
    )
    gone.epilog = _UNINSTALL
    gone.add_argument("-A", "--all-namespaces", action="store_true", help="or -n NAMESPACE: one of them")
    gone.add_argument(
        "--all-kinds", action="store_true", help="then KVSelectors, AgentPools and, with -A, TierClasses, too"
    )
    gone.add_argument(
        "--deadline", type=_duration, default=300.0, metavar="5m", help="until finalizers are dropped (5m)"
    )
    gone.add_argument("--dry-run", action="store_true", help="say what would be deleted, and write nothing")
    lint = add("lint", "judge files without a cluster", output)
    lint.add_argument("-f", "--filename", type=Path, action="append", required=True, help="file, folder or -")
    lint.add_argument("-n", "--namespace", default="default", help="of objects that name none")
    shell = add("completion", "a script for the shell, to be sourced")
    shell.add_argument("shell", choices=tuple(SHELLS))
    words = kinds.add_parser("__complete")
    words.add_argument("words", nargs=argparse.REMAINDER)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    _say_all()
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.command == "uninstall" and (arguments.namespace is None) is not arguments.all_namespaces:
        parser.error("uninstall: -n NAMESPACE or -A: what is deleted is not left to the kubeconfig's context")
    try:
        if arguments.command == "completion":
            print(script(arguments.shell), end="", flush=True)
            return Exit.OK
        if arguments.command == "__complete":
            return _complete(arguments.words)
        return asyncio.run(commands.run(arguments, sys.stdout, sys.stdin))
    except Failure as failure:
        print(f"kubectl kvtier: {printable(str(failure))}", file=sys.stderr)
        return failure.status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has seen enough; the interpreter must not complain when it flushes.
        sys.stderr.close()
        return Exit.OK
    except OSError as error:
        # Whoever asks a server or reads a file has told its own: this is the output, as on a full disk.
        print(f"kubectl kvtier: cannot be written: {error}", file=sys.stderr)
        _drop_output()
        return Exit.FAILED


def _say_all() -> None:
    """Whatever the locale: a name that its characters do not have must not end the command, and files are
    UTF-8 also when they come by standard input."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")


def _drop_output() -> None:
    """Or the interpreter tries to write the rest again as it ends, and says so in its own words."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


async def names_in_cluster(plural: str, words: Sequence[str]) -> list[str]:
    """Names of a kind, in the namespace and context that `words` state, asked for once and not for long."""
    known, _ = _cluster_flags().parse_known_args(list(words))
    known.request_timeout = NAME_SECONDS
    async with commands.cluster(known) as api:
        return [one["metadata"]["name"] for one in await api.list(plural)]


def _complete(words: Sequence[str]) -> int:
    def names(plural: str) -> Sequence[str]:
        try:
            return asyncio.run(names_in_cluster(plural, words))
        except Failure:
            return []

    print("\n".join(complete(make_parser(), words, names)))
    return Exit.OK


def _cluster_flags() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    made.add_argument("-n", "--namespace", help="without: that of the kubeconfig's context")
    made.add_argument("--kubeconfig", help="file; without: as kubectl finds it")
    made.add_argument("--context", help="of the kubeconfig")
    made.add_argument(
        "--request-timeout", type=_seconds, default=10.0, metavar="10s", help="of one request (10s)"
    )
    return made


def _duration(text: str) -> float:
    try:
        value = parse_duration(text, "--deadline")
    except QuantityError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not 0 < value <= LONGEST_DEADLINE:
        raise argparse.ArgumentTypeError(f"{text!r} is not from 1ms to 24h")
    return value


def _seconds(text: str) -> float:
    """As kubectl takes it: 30, 30s, 0.5s, 5m."""
    return _up_to(text, 3600.0, "an hour")


def _watch_seconds(text: str) -> float:
    return _up_to(text, LONGEST_WATCH, "30 days")


def _up_to(text: str, most: float, named: str) -> float:
    try:
        value = float(text.removesuffix("s"))
    except ValueError:
        try:
            value = parse_duration(text, "it")
        except QuantityError:
            value = 0.0
    if not 0 < value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration above 0 and up to {named}, as 30s or 5m")
    return value


def _named(text: str) -> str:
    """A name as `kubectl get -o name` prints it is one, too."""
    kind, slash, name = text.partition("/")
    return _KINDS[kind] + name if slash and kind in _KINDS else text


if __name__ == "__main__":
    sys.exit(main())
