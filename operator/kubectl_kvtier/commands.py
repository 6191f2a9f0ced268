"""What each subcommand reads, and how it ends. Thin: what is shown is decided in pure modules."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TextIO

from kubectl_kvtier import history, intents, manifests, top, traces
from kubectl_kvtier.explain import explain, explain_cache
from kubectl_kvtier.lint.files import lint, parse, read
from kubectl_kvtier.lint.findings import Severity
from kubectl_kvtier.outcomes import Exit, Failure, Unavailable
from kubectl_kvtier.ports import Api
from kubectl_kvtier.printing import Out
from kubectl_kvtier.rollouts import Unread, read_as, read_rollout, readable, status_of
from kubectl_kvtier.tables import table
from kubectl_kvtier.tree import Look, drawable, tree
from kubectl_kvtier.uninstall.holds import CACHES, DEFAULT_LEASE, ROLLOUTS, lease_wait, read_held
from kubectl_kvtier.uninstall.uninstaller import Order, uninstall
from kvtier_crds.models import KVCache, KVNode, KVRollout
from kvtier_crds.models.common import short_digest
from kvtier_crds.models.rolloutstatus import Phase

_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_NEGATIVE = (Phase.ROLLED_BACK, Phase.ROLLING_BACK, Phase.INVALID)
_ENDED = (Phase.ROLLED_BACK, Phase.COMPLETED, Phase.INVALID)


@asynccontextmanager
async def cluster(arguments: argparse.Namespace) -> AsyncIterator[Api]:
    # The client takes most of a second to load, and lint and completion need none.
    from kubectl_kvtier.cluster import connect

    async with connect(
        kubeconfig=arguments.kubeconfig,
        context=arguments.context,
        namespace=arguments.namespace,
        seconds=arguments.request_timeout,
    ) as api:
        yield api


async def run(arguments: argparse.Namespace, stdout: TextIO, stdin: TextIO) -> Exit:
    """Failure for what did not work."""
    out = Out(stdout, arguments.output == "json", time.time)
    if arguments.command == "lint":
        return lint_files(arguments.filename, arguments.namespace, stdin, out)
    if arguments.command == "trace" and _TRACE_ID.fullmatch(arguments.name):
        return await show_trace(arguments.name, arguments, out)
    async with cluster(arguments) as api:
        return await in_cluster(api, arguments, out)


async def in_cluster(api: Api, arguments: argparse.Namespace, out: Out) -> Exit:
    match arguments.command:
        case "status" if arguments.name is None:
            if arguments.watch or arguments.timeout is not None:
                raise Failure(Exit.USAGE, "--watch follows one rollout: it needs a NAME")
            return await list_rollouts(api, arguments.all_namespaces, out)
        case "status":
            return await show_status(api, arguments, out)
        case "explain":
            return await show_reason(api, arguments.name, out)
        case "history":
            return await show_history(api, arguments.name, out)
        case "diff":
            return await show_diff(api, arguments.name, arguments.revisions, out)
        case "top":
            return await show_top(api, arguments.what, arguments.all_namespaces, out)
        case "trace":
            rollout = read_rollout(await api.get(intents.PLURAL, arguments.name))
            found = status_of(rollout).trace_id
            if not found:
                raise Failure(Exit.NOT_FOUND, f"{arguments.name} has no trace yet")
            return await show_trace(found, arguments, out)
        case "uninstall":
            order = Order(
                arguments.all_namespaces, arguments.all_kinds, arguments.deadline, arguments.dry_run
            )
            return await uninstall(api, order, out)
    return await command(api, arguments, out)


async def list_rollouts(api: Api, everywhere: bool, out: Out) -> Exit:
    """FAILED when some cannot be read; the others are listed all the same."""
    now = out.clock()
    found, lost = readable(
        await api.list(intents.PLURAL, everywhere=everywhere), lambda one: _facts(read_rollout(one), now)
    )
    facts = sorted(found, key=lambda one: (one["namespace"], one["name"]))
    if not facts and not lost and not out.as_json:
        out.lines([f"no rollouts in {'any namespace' if everywhere else f'namespace {api.namespace}'}"])
        return Exit.OK
    head = ("NAMESPACE", "NAME", "CACHE", "PHASE", "STAGE", "STEP", "VERDICT", "CANDIDATE", "BASELINE")
    rows = [
        (
            one["namespace"],
            one["name"],
            one["cache"],
            one["phase"] or "-",
            one["stage"] or "-",
            str(one["step"]),
            one["verdict"] or "-",
            short_digest(one["candidate"]) or "-",
            short_digest(one["baseline"]) or "-",
        )
        for one in facts
    ]
    out.write([*facts, *(one.facts() for one in lost)], [*table(head, rows), *(one.line for one in lost)])
    return Exit.FAILED if lost else Exit.OK


async def show_status(api: Api, arguments: argparse.Namespace, out: Out) -> Exit:
    """NEGATIVE for a rollout that was not released, TIMED_OUT for one that goes on when the watch has to end.
    Watching in JSON gives a document at each change."""
    if arguments.all_namespaces:
        raise Failure(Exit.USAGE, f"a rollout by its name is of one namespace: {arguments.name} or -A")
    if arguments.timeout is not None and not arguments.watch:
        raise Failure(Exit.USAGE, "--timeout is of a watch: status NAME --watch --timeout 30m")
    look = Look(colour=out.colour, unicode=not arguments.ascii and drawable(out.stream.encoding))
    if arguments.watch:
        rollout = await _watched(api, arguments.name, arguments.timeout, look, out)
    else:
        rollout = read_rollout(await api.get(intents.PLURAL, arguments.name))
        nodes, lost = readable(await api.list("kvnodes"), _node)
        lines = tree(rollout, nodes, out.clock(), look)
        out.write(_facts(rollout, out.clock()), [*lines, *(one.line for one in lost)])
    return Exit.NEGATIVE if status_of(rollout).phase in _NEGATIVE else Exit.OK


async def _watched(api: Api, name: str, seconds: float | None, look: Look, out: Out) -> KVRollout:
    """Drawn at each change, until it has ended: that one. seconds: None for as long as that takes."""
    rollout: KVRollout | None = None
    nodes: list[KVNode] = []
    try:
        async with asyncio.timeout(seconds):
            async for document in api.follow(intents.PLURAL, name):
                rollout = read_rollout(document)
                try:
                    nodes, lost = readable(await api.list("kvnodes"), _node)
                    notes = [one.line for one in lost]
                except Unavailable as failure:
                    # The rollout has changed, and that is what is waited for.
                    notes = [f"nodes as they were last seen: {failure}"]
                out.clear()
                out.write(_facts(rollout, out.clock()), [*tree(rollout, nodes, out.clock(), look), *notes])
                if status_of(rollout).phase in _ENDED:
                    return rollout
    except TimeoutError:
        pass
    why = explain(rollout, out.clock()).sentence if rollout is not None else "the API server has not answered"
    raise Failure(Exit.TIMED_OUT, f"{name} has not ended within {seconds or 0:g} s: {why}")


async def show_reason(api: Api, name: str, out: Out) -> Exit:
    if name.startswith("cache/"):
        document = await api.get(CACHES, name.removeprefix("cache/"))
        cache = read_held(CACHES, document)
        held = [read_held(ROLLOUTS, one) for one in await api.list(ROLLOUTS)]
        leases = [lease_wait(one.lease) for one in held if one.cache == cache.name]
        waits = max([lease_wait(DEFAULT_LEASE), *leases])
        found = explain_cache(read_as(KVCache, document), waits, out.clock())
    else:
        found = explain(read_rollout(await api.get(intents.PLURAL, name)), out.clock())
    out.write(dataclasses.asdict(found), [found.sentence])
    return Exit.NEGATIVE if found.negative else Exit.OK


async def show_history(api: Api, name: str, out: Out) -> Exit:
    if name.startswith("cache/"):
        cache = read_as(KVCache, await api.get("kvcaches", name.removeprefix("cache/")))
        rollouts, lost = readable(await api.list(intents.PLURAL), read_rollout)
        mine = [one for one in rollouts if one.spec.cache_ref.name == cache.metadata.name]
        past = history.rollout_facts(mine)
        revisions = history.revision_facts(await api.revisions(cache.metadata.uid))
        out.write(
            {"rollouts": [*past, *(one.facts() for one in lost)], "revisions": revisions},
            [
                *history.rollout_table(past),
                *(one.line for one in lost),
                "",
                *history.revision_table(revisions),
            ],
        )
        return Exit.FAILED if lost else Exit.OK
    rollout = read_rollout(await api.get(intents.PLURAL, name))
    past = history.rollout_facts([rollout])
    events = history.event_facts(await api.events(rollout.KIND, name))
    out.write(
        {"rollouts": past, "events": events}, [*history.rollout_table(past), "", *history.event_table(events)]
    )
    return Exit.OK


async def show_diff(api: Api, name: str, wanted: Sequence[str], out: Out) -> Exit:
    """NEGATIVE when they differ, as diff(1) says 1."""
    if name.startswith("cache/"):
        if len(wanted) != 2:
            raise Failure(Exit.USAGE, f"diff {name} needs two revisions, by name or digest")
        cache_name, pair = name.removeprefix("cache/"), (wanted[0], wanted[1])
    else:
        if wanted:
            raise Failure(Exit.USAGE, f"revisions are of a cache: diff cache/NAME {' '.join(wanted)}")
        rollout = read_rollout(await api.get(intents.PLURAL, name))
        status = status_of(rollout)
        if status.baseline is None or status.candidate is None:
            raise Failure(Exit.NOT_FOUND, f"{name} has no baseline and candidate yet")
        cache_name, pair = rollout.spec.cache_ref.name, (status.baseline.digest, status.candidate.digest)
    cache = read_as(KVCache, await api.get("kvcaches", cache_name))
    revisions = await api.revisions(cache.metadata.uid)
    old, new = (manifests.manifest_of(manifests.pick(revisions, one)) for one in pair)
    found = manifests.changes(old, new)
    out.write([dataclasses.asdict(one) for one in found], manifests.lines(found) or ["no difference"])
    return Exit.NEGATIVE if found else Exit.OK


async def show_top(api: Api, what: str | None, everywhere: bool, out: Out) -> Exit:
    """FAILED when some cannot be read."""
    facts: dict[str, Any] = {}
    lines: list[str] = []
    unread: list[Unread] = []
    if what in (None, "nodes"):
        nodes, lost = readable(await api.list("kvnodes"), _node)
        unread += lost
        facts["nodes"] = top.node_facts(sorted(nodes, key=lambda one: one.metadata.name))
        lines += top.node_table(facts["nodes"])
        facts["nodes"] += [one.facts() for one in lost]
    if what in (None, "caches"):
        caches, lost = readable(
            await api.list("kvcaches", everywhere=everywhere), lambda one: read_as(KVCache, one)
        )
        unread += lost
        facts["caches"] = top.cache_facts(
            sorted(caches, key=lambda one: (one.metadata.namespace, one.metadata.name))
        )
        lines += [*([""] if lines else []), *top.cache_table(facts["caches"])]
        facts["caches"] += [one.facts() for one in lost]
    out.write(facts, [*lines, *(one.line for one in unread)])
    return Exit.FAILED if unread else Exit.OK


async def show_trace(trace_id: str, arguments: argparse.Namespace, out: Out) -> Exit:
    if arguments.jaeger:
        spans = await traces.fetch_jaeger(arguments.jaeger, trace_id, arguments.request_timeout)
    else:
        try:
            spans = traces.from_otlp(arguments.file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise Failure(Exit.USAGE, f"--file: {error}") from error
    mine = [span for span in spans if span.trace_id == trace_id]
    if not mine:
        raise Failure(Exit.NOT_FOUND, f"no span of trace {trace_id} among {len(spans)}")
    out.write([dataclasses.asdict(span) for span in mine], [f"trace {trace_id}", *traces.tree(mine)])
    return Exit.OK


async def command(api: Api, arguments: argparse.Namespace, out: Out) -> Exit:
    """NEGATIVE when the operator refuses the intent, TIMED_OUT when nobody answers it."""
    intent, _ = await intents.send(api, arguments.name, arguments.verb, dry_run=arguments.dry_run)
    if arguments.dry_run:
        where = f"{intent['expectedStage']} step {intent['expectedStep']}, attempt {intent['attempt']}"
        out.write(
            intent, [f"{arguments.name}: {intent['verb']} seq {intent['seq']} of {where} would be written"]
        )
        return Exit.OK
    if arguments.no_wait:
        out.write(intent, [f"{arguments.name}: {intent['verb']} seq {intent['seq']} written"])
        return Exit.OK
    last = await intents.answer(api, arguments.name, intent["seq"], arguments.timeout)
    out.write(
        last.model_dump(mode="json", by_alias=True), [intents.judged(arguments.name, intent["seq"], last)]
    )
    return Exit.OK


def lint_files(paths: Sequence[Path], namespace: str, stdin: TextIO, out: Out) -> Exit:
    """NEGATIVE when something would be refused; notes alone are no findings. Failure USAGE for a path without
    objects."""
    documents = []
    for path in paths:
        here = parse("-", _given(stdin)) if str(path) == "-" else read([path])
        if not here:
            # A path that was mistyped must not let a pipeline pass.
            raise Failure(Exit.USAGE, f"{path}: no objects in it")
        documents += here
    found = lint(documents, namespace)
    errors = [one for one in found if one.severity is Severity.ERROR]
    lines = [f"{one.severity}: {one.where}: {one.message}" for one in found]
    lines.append(f"{len(documents)} objects, {len(errors)} errors, {len(found) - len(errors)} notes")
    out.write([dataclasses.asdict(one) for one in found], lines)
    return Exit.NEGATIVE if errors else Exit.OK


def _given(stdin: TextIO) -> str:
    try:
        return stdin.read()
    except UnicodeDecodeError as error:
        raise Failure(Exit.USAGE, f"-: {error}") from error


def _node(document: dict[str, Any]) -> KVNode:
    return read_as(KVNode, document)


def _facts(rollout: KVRollout, now: float) -> dict[str, Any]:
    status = status_of(rollout)
    return {
        "namespace": rollout.metadata.namespace,
        "name": rollout.metadata.name,
        "cache": rollout.spec.cache_ref.name,
        "phase": str(status.phase or ""),
        "stage": str(status.stage or ""),
        "step": status.step or 0,
        "attempt": status.attempt or 1,
        "fence": status.fence or 0,
        "verdict": str(status.verdict or ""),
        "candidate": status.candidate.digest if status.candidate else "",
        "baseline": status.baseline.digest if status.baseline else "",
        "nodes": status.nodes or 0,
        "nodesTotal": status.nodes_total or 0,
        "gates": [gate.model_dump(mode="json", by_alias=True, exclude_none=True) for gate in status.gates],
        "cause": str(status.rollback.cause) if status.rollback else "",
        "explanation": explain(rollout, now).sentence,
    }
