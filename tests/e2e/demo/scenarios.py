"""What the demo does and how each claim is checked. No outcome is wired in.

Every scenario applies objects with kubectl, waits on what a user can see, and
compares. Which selector is sane and which ruinous comes in as an argument, so a
test can swap them.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from kvtier_evidence.assignment import is_candidate
from tests.cluster.kvtier_localplane import eventually

from . import objects
from .claims import Claim, Ledger
from .observer import Observer
from .otlp_sink import OtlpSink, trace_tree
from .processes import Child
from .stack import NODES, SERVING, SYSTEM, Stack, say, until
from .tasks import make_tasks

CLAIMS = (
    Claim("ready", "The cache is Ready and both agents proved the baseline's digest"),
    Claim("exact", "Exact answers through three tiers have the tokens of transformers' DynamicCache"),
    Claim(
        "approved",
        "A sane budget went Shadow, Canary, Ramp, Full, and is approved; the baseline is unchanged",
    ),
    Claim("shadow-fail", "A ruinous budget failed in Shadow, before it had served anyone"),
    Claim("proved", "Rolled back: both agents proved the exact baseline's digest"),
    Claim("abort", "An abort in Canary took a generating request to exact steps over approximate history"),
    Claim("new-exact", "After the abort new prompts get the tokens of the exact run"),
    Claim(
        "dead-man", "With the operator killed in Canary both agents returned to the baseline within the TTL"
    ),
    Claim("resumed", "The restarted operator reported LeaseExpired and resumed or rolled back as declared"),
    Claim("trace", "One trace per attempt holds spans of the operator and of the agents"),
    Claim("trace-restart", "The restarted operator went on in the same trace"),
    Claim("quiet", "In steady state the operator writes nothing but its own Lease"),
    Claim("rbac", "The operator ran under its own ServiceAccount and was denied nothing"),
)


@dataclass
class Demo:
    """What the scenarios share."""

    stack: Stack
    observer: Observer
    sink: OtlpSink
    ledger: Ledger
    engines: list[Child]
    exact_prompts: list[str]
    exact_tokens: list[list[int]]
    served: dict[str, int] = field(default_factory=dict)  # requests by the digest that thinned their reads
    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)

    # --- helpers -----------------------------------------------------------

    def drain_events(self) -> list[dict[str, Any]]:
        """Every event that arrived from the engines since the last call; requests are recorded."""
        found = []
        for engine in self.engines:
            while not engine.events.empty():
                event = engine.events.get_nowait()
                found.append(event)
                if event["event"] == "request":
                    self.observer.take_request(event)
                    for digest in event["approximateBy"]:
                        self.served[digest] = self.served.get(digest, 0) + 1
                elif event["event"] in ("refused", "probeRefused"):
                    say(f"  engine: {event['event']} {event['reason']}: {event['message'][:100]}")
                elif event["event"] == "probed":
                    say(f"  probe set scored: {event['prompts']} prompts, mean drop {event['drop']:.3f}")
        return found

    def apply_rollout(self, name: str, selector: str) -> None:
        self.stack.apply(objects.rollout(name, selector))
        say(f"applied KVRollout {name} with KVSelector {selector}")

    def wait_rollout(self, name: str, predicate: Any, what: str, timeout: float) -> dict[str, Any]:
        """Wait until the rollout as last seen fulfils ``predicate``; engines are drained meanwhile."""

        def look() -> dict[str, Any] | None:
            self.drain_events()
            found = self.observer.rollout(name)
            return found if found and predicate(found) else None

        try:
            return until(f"{name}: {what}", look, timeout, self.stack)
        except AssertionError:
            print("\n".join(gate_lines(self.observer.rollout(name))), flush=True)
            raise

    def wait_end(self, name: str, timeout: float) -> dict[str, Any]:
        """Wait until the rollout has ended, however; the outcome is kept for the summary."""
        done = self.wait_rollout(name, phase_is("Completed", "RolledBack", "Invalid"), "an end", timeout)
        rollback = done["status"].get("rollback", {})
        self.outcomes[name] = {
            "phase": done["status"]["phase"],
            "cause": rollback.get("cause"),
            "gate": rollback.get("gate"),
            "fromStage": rollback.get("fromStage"),
            "restored": [rollback.get("agentsRestored"), rollback.get("agentsTotal")],
        }
        print("\n".join(gate_lines(done)), flush=True)
        return done

    def screen(self, title: str, *args: str) -> None:
        """What a person would see; printed and kept for the report."""
        text = self.stack.kubectl(*args)
        self.observer.seen.screens.append(
            (f"$ kubectl {' '.join(args)}" + (f"  # {title}" if title else ""), text)
        )
        print("    " + text.replace("\n", "\n    ").rstrip(), flush=True)

    def baseline_digest(self) -> str:
        return self.observer.cache()["status"]["baseline"]["digest"]


def gate_lines(rollout: dict[str, Any]) -> list[str]:
    """The gates and conditions of a rollout's status as a table for people."""
    status = rollout.get("status", {})
    lines = [
        f"    {'gate':18} {'verdict':14} {'reason':22} {'value':>10} {'bound':>10} {'limit':>8} {'n':>6}"
    ]
    for gate in status.get("gates", []):
        shown = [str(gate.get(k, "")) for k in ("value", "bound", "limit", "n")]
        head = f"    {gate['name']:18} {gate.get('verdict', ''):14} {gate.get('reason', ''):22}"
        lines.append(f"{head} {shown[0][:9]:>10} {shown[1][:9]:>10} {shown[2][:8]:>8} {shown[3]:>6}")
    for row in status.get("conditions", []):
        lines.append(f"    {row['type']}={row['status']} {row.get('reason')}: {row.get('message', '')[:140]}")
    return lines


def phase_is(*phases: str) -> Any:
    return lambda rollout: rollout.get("status", {}).get("phase") in phases


def stage_is(stage: str) -> Any:
    return lambda rollout: rollout.get("status", {}).get("stage") == stage


def sane_rollout(demo: Demo, name: str, selector: str) -> bool:
    """(a) a budget that keeps the output goes to Full and is approved beside the exact baseline."""
    before = demo.baseline_digest()
    demo.apply_rollout(name, selector)
    done = demo.wait_end(name, 600)
    stages = [s for s in demo.observer.stages_of(name) if s not in ("Off", "ExactBaseline")]
    cache = demo.observer.cache()
    approved = cache["status"].get("approved", {}).get("digest", "")
    candidate = done["status"].get("candidate", {}).get("digest", "")
    holds = (
        done["status"]["phase"] == "Completed"
        and stages == ["Shadow", "Canary", "Ramp", "Full"]
        and approved == candidate != ""
        and cache["status"]["baseline"]["digest"] == before
    )
    facts = f"phase {done['status']['phase']}, stages {stages}, approved {approved[7:19]}"
    if done["status"]["phase"] != "Completed":
        facts += f", cause {done['status'].get('rollback')}"
    demo.screen("", "get", "kvrollouts,kvcaches", "-n", SERVING, "-o", "wide")
    return demo.ledger.check("approved", holds, facts)


def ruinous_rollout(demo: Demo, name: str, selector: str) -> bool:
    """(b) a budget that ruins the output fails in Shadow; nobody was served by it."""
    baseline = demo.baseline_digest()
    demo.apply_rollout(name, selector)
    done = demo.wait_end(name, 600)
    demo.drain_events()
    rollback = done["status"].get("rollback", {})
    candidate = done["status"]["candidate"]["digest"]
    approximate = demo.served.get(candidate, 0)
    others = sum(n for digest, n in demo.served.items() if digest != candidate)
    demo.ledger.check(
        "shadow-fail",
        done["status"]["phase"] == "RolledBack"
        and rollback.get("cause") == "GateFailed"
        and rollback.get("fromStage") == "Shadow"
        and approximate == 0
        and others > 0,
        f"phase {done['status']['phase']}, cause {rollback.get('cause')} by gate {rollback.get('gate')} from "
        f"{rollback.get('fromStage')}; requests that it answered: {approximate}, "
        f"that the approved candidate answered before: {others}",
    )
    # What has ended otherwise returns no more: then the condition is looked at once.
    patience = "--timeout=60s" if done["status"]["phase"] == "RolledBack" else "--timeout=1s"
    waited = demo.stack.cluster.kubectl(
        *("wait", f"kvrollout/{name}", "-n", SERVING, "--for=condition=BaselineRestored", patience),
        check=False,
        timeout=90,
    )
    restored = (rollback.get("agentsRestored"), rollback.get("agentsTotal"))
    demo.screen("", "get", "kvrollouts", "-n", SERVING)
    return demo.ledger.check(
        "proved",
        waited.returncode == 0 and restored == (2, 2) and rollback.get("targetDigest") == baseline,
        f"kubectl wait: {waited.stdout.strip() or waited.stderr.strip()}; restored {restored}, "
        f"digest {str(rollback.get('targetDigest'))[7:19]}",
    )


def dead_man(demo: Demo, name: str, selector: str) -> bool:
    """(c) the operator dies in Canary: the agents return alone, and the next operator picks up the pieces."""
    demo.apply_rollout(name, selector)
    rollout = demo.wait_rollout(name, stage_is("Canary"), "Canary", 240)
    candidate = rollout["status"]["candidate"]["digest"]
    probe = AgentProbe(demo.stack)
    # Canary's own lease: until it is granted, agents still hold Shadow's, of the same candidate.
    everywhere = dict.fromkeys(NODES, ("Canary", candidate))
    until("both agents hold Canary's lease", lambda: probe.held() == everywhere, 60, demo.stack)
    first = demo.stack.operator
    killed = time.monotonic()
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait(10)
    say("  operator killed; no renewal from now on")

    last = 0.0

    def all_baseline() -> bool:
        nonlocal last
        demo.drain_events()
        asked = time.monotonic()
        if set(probe.held().values()) == {("Off", "")}:
            return True
        last = asked - killed
        return False

    eventually(all_baseline, timeout=objects.LEASE_TTL_S + 60, what="return to the baseline", interval=0.1)
    took = time.monotonic() - killed
    # By when a candidate was still held: an answer that comes late is not a lease that ends late.
    demo.ledger.check(
        "dead-man",
        last <= objects.LEASE_TTL_S + 1,
        f"{took:.1f} s after the kill (still held after {last:.1f} s), TTL {objects.LEASE_TTL_S} s",
    )
    say(f"  both agents returned to the baseline alone, {took:.1f} s after the kill")
    demo.stack.start_operator()
    say("  operator restarted")
    expired = demo.wait_rollout(name, lease_expired_reported, "LeaseExpired reported", 90)
    resumed = demo.wait_rollout(
        name,
        lambda r: phase_is("RolledBack", "Completed")(r) or probe.held() == everywhere,
        "resumed or rolled back",
        90,
    )
    status = resumed["status"]
    return demo.ledger.check(
        "resumed",
        status["phase"] == "Progressing" and status["stage"] == "Canary" and status["attempt"] == 1,
        f"declared {expired['spec'].get('onLeaseExpired')}; {lease_expired_reported(expired)}; then phase "
        f"{status['phase']} in stage {status['stage']}, attempt {status['attempt']}",
    )


def abort_in_canary(demo: Demo, name: str) -> bool:
    """A person aborts while a request on the candidate is generating."""
    engine = demo.engines[0]
    prompt = make_tasks(77, 1, repetitions=6)[0].prompt
    exactness: list[str] = []
    # Agents assign by a hash that anyone can compute: name a session that will be on the candidate.
    uid = demo.observer.rollout(name)["metadata"]["uid"]
    root = next(r for r in (f"root-{i}" for i in range(1000)) if is_candidate(uid, "beta", r, 0.5))
    engine.send(do="long", id="long", prompt=prompt, new_tokens=60, tenant="beta", root=root)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        event = engine.wait_for_any(("token", "longDone", "request", "refused"), 60)
        if event["event"] == "request":
            demo.observer.take_request(event)
        elif event["event"] == "longDone":
            exactness = event["exactness"]
            break
        elif event["event"] == "token" and (event["index"], event["arm"]) == (6, "candidate"):
            abort(demo, name)
    folded = [e for i, e in enumerate(exactness) if i == 0 or exactness[i - 1] != e]
    changed = folded[-2:] == ["APPROXIMATE", "EXACT_OVER_APPROXIMATE_HISTORY"]
    done = demo.wait_rollout(name, phase_is("RolledBack"), "rolled back", 90)
    cause = done["status"].get("rollback", {}).get("cause")
    demo.ledger.check("abort", changed and cause == "IntentAbort", f"steps {folded}, cause {cause}")
    demo.engines[0].send(do="replay", id="after", prompts=demo.exact_prompts, new_tokens=16)
    rows = demo.engines[0].wait_for("replayed", 180)["rows"]
    same = [row["tokens"] == wanted for row, wanted in zip(rows, demo.exact_tokens, strict=True)]
    exact = all(set(row["exactness"]) == {"EXACT"} for row in rows)
    return demo.ledger.check(
        "new-exact",
        all(same) and exact,
        f"{sum(same)} of {len(same)} prompts token-identical, all exact: {exact}",
    )


def abort(demo: Demo, name: str) -> None:
    """The abort intent as a person without the plugin would write it."""
    status = demo.observer.rollout(name)["status"]
    seq = int(status.get("lastIntent", {}).get("seq", 0)) + 1
    intent = {
        "seq": seq,
        "verb": "Abort",
        "attempt": status["attempt"],
        "expectedStage": status["stage"],
        "expectedStep": status.get("step", 0),
    }
    patch = json.dumps({"spec": {"intent": intent}})
    demo.stack.kubectl("patch", "kvrollout", name, "-n", SERVING, "--type=merge", "-p", patch)
    say("  aborted by intent while a candidate's request is generating")


def lease_expired_reported(rollout: dict[str, Any]) -> str:
    """Where the status says that a lease had ended; empty when it does not."""
    status = rollout.get("status", {})
    if status.get("rollback", {}).get("cause") == "LeaseExpired":
        return "rollback cause LeaseExpired"
    for row in status.get("conditions", []):
        if row.get("reason") == "LeaseExpired" or "LeaseExpired" in row.get("message", ""):
            return f"condition {row['type']}: {row.get('reason')}: {row.get('message')}"
    if status.get("resumes", 0):
        return f"resumes {status['resumes']}"
    return ""


class AgentProbe:
    """Asks each agent what it serves, over the socket an engine would use."""

    def __init__(self, stack: Stack) -> None:
        from kvtier_client.client import AttentionClient

        self._clients = {node: AttentionClient(stack.socket_path(node)) for node in NODES}

    def held(self) -> dict[str, tuple[str, str]]:
        """Stage and candidate digest of each node's lease; ("Off", "") where only the baseline is served."""
        found = {}
        for node, client in self._clients.items():
            about = client.describe_cache(SERVING, objects.CACHE)
            found[node] = (about.stage, about.candidate_digest) if about.candidate_digest else ("Off", "")
        return found


def traces(demo: Demo, first: str, restarted: str) -> None:
    """Check the traces of two rollouts by their traceparent."""
    trace = demo.observer.rollout(first)["status"]["traceparent"].split("-")[1]
    spans = demo.sink.spans(trace)
    services = {s.service for s in spans}
    demo.ledger.check(
        "trace",
        {"kvtier-operator", "kvtier-agent"} <= services,
        f"trace {trace[:8]}: {len(spans)} spans of {sorted(services)}",
    )
    lines = trace_tree(spans, limit=40)
    demo.observer.seen.screens.append((f"trace of {first}", "\n".join(lines)))
    print("\n".join("    " + line for line in lines), flush=True)
    trace = demo.observer.rollout(restarted)["status"]["traceparent"].split("-")[1]
    instances = {s.instance for s in demo.sink.spans(trace) if s.service == "kvtier-operator"}
    demo.ledger.check(
        "trace-restart", len(instances) >= 2, f"operator instances in one trace: {sorted(instances)}"
    )


def quiet(demo: Demo, seconds: float = 15) -> None:
    """Count the operator's writes while nothing changes, from the API server's audit log."""
    from tests.cluster.kvtier_localplane import audit

    log = demo.stack.cluster.audit_log
    user = f"system:serviceaccount:{SYSTEM}:kvtier-operator"
    if log is None:
        demo.ledger.check("quiet", False, "no audit log: not our own API server")
        demo.ledger.check("rbac", False, "no audit log: not our own API server")
        return
    started = time.time()
    eventually(lambda: time.time() - started > seconds, timeout=seconds + 5, what="a quiet interval")
    writes = [
        one.use
        for one in audit.requests(log, user)
        if one.at >= started and one.use.verb in ("create", "update", "patch", "delete")
    ]
    foreign = sorted({f"{u.verb} {u.resource}" for u in writes if u.resource != "leases"})
    demo.ledger.check(
        "quiet",
        not foreign and bool(writes),
        f"{len(writes)} Lease writes in {seconds:.0f} s, others: {foreign}",
    )
    denied = sorted({f"{r.use.verb} {r.use.resource}" for r in audit.requests(log, user) if r.refused})
    demo.ledger.check("rbac", not denied, f"denied: {denied}")
