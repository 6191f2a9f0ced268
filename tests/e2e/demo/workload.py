"""An inference engine's process: SmolLM2 answering tenants' prompts through kvtier.

Started by the demo as a child; talks JSON lines. It serves traffic round-robin
over the agents' sockets, runs the probe set once per candidate, and obeys
commands between requests: ``long`` (one long generation whose every token is
announced), ``replay`` (given prompts, tokens returned), ``reference`` (the same
by DynamicCache), ``pause``, ``resume``, ``stop``. It knows no Kubernetes: what it needs is in its arguments.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from kvtier_client.client import AttentionClient
from kvtier_client.errors import KvtierError
from kvtier_client.hf import KvtierCache, attach
from tests.e2e.demo.tasks import Task, make_tasks
from tests.engine.smollm2 import load_smollm2

TENANTS = ("alpha", "beta", "gamma", "delta")
# Requests of one window at full speed, of each engine: what a step of the demo's rollouts takes, and some.
# Others come too, but leave the processors to whoever else has work.
ENOUGH = 70
PACE_SECONDS = 0.5


def tell(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, "t": time.time(), **facts}), flush=True)


@dataclass(frozen=True)
class Answer:
    """Tokens of one request with what the receipts said about their steps."""

    tokens: list[int]
    arm: str
    exactness: list[str]
    approximate_by: list[str]  # manifest digests that computed approximate steps
    tiers: dict[str, int]
    seconds: float
    per_token: float | None
    transport: str  # what carried its frames


class Engine:
    """The model and one client per agent."""

    def __init__(self, sockets: dict[str, Path], namespace: str, cache: str) -> None:
        self.model, self.tokenizer = load_smollm2()
        self.attachment = attach(self.model)
        self.clients = {node: AttentionClient(path) for node, path in sockets.items()}
        self.namespace, self.cache = namespace, cache
        self.fingerprint = (
            next(iter(self.clients.values())).describe_cache(namespace, cache).model_fingerprint
        )

    @torch.no_grad()
    def reference(self, prompts: list[str], new_tokens: int) -> list[list[int]]:
        """Greedy tokens by transformers' DynamicCache and sdpa: what "exact" is compared with."""
        self.attachment.detach()
        rows = []
        for prompt in prompts:
            step = self.tokenizer(prompt, return_tensors="pt").input_ids
            cache, tokens = DynamicCache(config=self.model.config), []
            while len(tokens) < new_tokens:
                logits = self.model(step, cache=cache, use_cache=True, logits_to_keep=1).logits
                tokens.append(int(logits[0, -1].argmax()))
                step = torch.tensor([[tokens[-1]]])
            rows.append(tokens)
        self.attachment = attach(self.model)
        return rows

    @torch.no_grad()
    def generate(
        self,
        node: str,
        prompt: str,
        new_tokens: int,
        *,
        tenant: str,
        root: str | None = None,
        forced_arm: str | None = None,
        announce: str | None = None,
    ) -> tuple[Answer, KvtierCache]:
        """Greedy generation, one forward pass per token; the cache is still open."""
        ids = self.tokenizer(prompt, return_tensors="pt").input_ids
        started = time.monotonic()
        cache = KvtierCache(
            self.clients[node],
            namespace=self.namespace,
            name=self.cache,
            model_fingerprint=self.fingerprint,
            config=self.model.config,
            tenant=tenant,
            request_class="chat",
            session_root_id=root or uuid.uuid4().hex,
            probe=forced_arm is not None,
            forced_arm=forced_arm,
            max_tokens=ids.shape[1] + new_tokens,
        )
        tokens: list[int] = []
        exactness: list[str] = []
        approximate_by: set[str] = set()
        tiers: dict[str, int] = {}
        first = last = None
        step = ids
        while len(tokens) < new_tokens:
            logits = self.model(step, cache=cache, use_cache=True, logits_to_keep=1).logits
            token = int(logits[0, -1].argmax())
            last = time.monotonic()
            first = first or last
            tokens.append(token)
            receipts = cache.take_receipts()
            exactness.append(weakest([r.exactness for r in receipts]))
            for receipt in receipts:
                if receipt.exactness == "APPROXIMATE":
                    approximate_by.add(receipt.manifest_digest)
                for tier, size in receipt.bytes_by_tier.items():
                    tiers[tier] = tiers.get(tier, 0) + size
            if announce is not None:
                tell("token", request=announce, index=len(tokens), exactness=exactness[-1], arm=cache.arm)
            step = torch.tensor([[token]])
        assert first is not None
        assert last is not None
        per_token = (last - first) / (len(tokens) - 1) if len(tokens) > 1 else None
        answer = Answer(
            tokens,
            cache.arm,
            exactness,
            sorted(approximate_by),
            tiers,
            last - started,
            per_token,
            cache.transport,
        )
        return answer, cache


def weakest(classes: list[str]) -> str:
    """The class of a whole step: that of its weakest layer."""
    for kind in ("APPROXIMATE", "EXACT_OVER_APPROXIMATE_HISTORY"):
        if kind in classes:
            return kind
    return "EXACT"


class Workload:
    """Traffic, probes and commands, one at a time: a single engine thread."""

    def __init__(self, engine: Engine, options: argparse.Namespace) -> None:
        self.engine, self.options = engine, options
        self.nodes = list(engine.clients)
        self.tasks = make_tasks(options.seed, 4096)
        part, parts = (int(n) for n in options.probe_part.split("/"))
        self.probes = make_tasks(options.probe_seed, options.probe_count)[part::parts]
        self.rng = random.Random(options.seed)
        self.served = 0
        self.paused = options.paused
        self.probed: set[str] = set()
        self.window, self.served_in_window = "", 0
        self.commands: queue.Queue[dict[str, Any]] = queue.Queue(maxsize=1000)

    def read_commands(self) -> None:
        for line in sys.stdin:
            self.commands.put(json.loads(line))
        self.commands.put({"do": "stop"})

    def run(self) -> None:
        threading.Thread(target=self.read_commands, daemon=True).start()
        while True:
            try:
                command = self._next_command()
            except queue.Empty:
                command = None
            if command is not None:
                if command["do"] == "stop":
                    return
                self.obey(command)
            elif not self.paused:
                self.look_and_probe()
                self.serve_one()

    def _next_command(self) -> dict[str, Any]:
        """Raises queue.Empty when it is time for another request."""
        if self.paused:
            return self.commands.get(timeout=0.2)
        if not self.window or self.served_in_window >= ENOUGH:
            return self.commands.get(timeout=PACE_SECONDS)
        return self.commands.get_nowait()

    def obey(self, command: dict[str, Any]) -> None:
        match command["do"]:
            case "pause":
                self.paused = True
                tell("paused")
            case "resume":
                self.paused = False
            case "long":
                self.long_request(command)
            case "replay":
                self.replay(command)
            case "reference":
                tokens = self.engine.reference(command["prompts"], command["new_tokens"])
                tell("reference", tokens=tokens)

    # --- traffic -----------------------------------------------------------

    def serve_one(self) -> None:
        node = self.nodes[self.served % len(self.nodes)]
        task = self.tasks[self.served % len(self.tasks)]
        tenant = TENANTS[self.rng.randrange(len(TENANTS))]
        self.served += 1
        self.served_in_window += 1
        try:
            answer, cache = self.engine.generate(node, task.prompt, self.options.new_tokens, tenant=tenant)
        except KvtierError as error:
            tell("refused", node=node, reason=error.reason, message=str(error))
            return
        cache.report_outcome()
        cache.close()
        self._tell_request(node, tenant, answer)

    def _tell_request(self, node: str, tenant: str, answer: Answer) -> None:
        tell(
            "request",
            node=node,
            tenant=tenant,
            arm=answer.arm,
            tokens=len(answer.tokens),
            exactness=answer.exactness,
            approximateBy=answer.approximate_by,
            tiers=answer.tiers,
            seconds=answer.seconds,
            per_token=answer.per_token,
            transport=answer.transport,
        )

    # --- probes ------------------------------------------------------------

    def look_and_probe(self) -> None:
        """Which window it is now; scores this engine's part of the probe set on both arms, once per
        (candidate, attempt)."""
        node = self.nodes[0]
        about = self.engine.clients[node].describe_cache(self.engine.namespace, self.engine.cache)
        window = str(about.window) if about.candidate_digest else ""
        if window != self.window:
            self.window, self.served_in_window = window, 0
        if not about.candidate_digest:
            return
        key = f"{about.candidate_digest}/{about.window.rollout_uid}/{about.attempt}"
        if key in self.probed:
            return
        differences = []
        for task in self.probes:
            try:
                exact, cache = self._scored(node, task, "baseline")
                cache.close()
                candidate, cache = self._scored(node, task, "candidate")
            except KvtierError as error:
                tell("probeRefused", reason=error.reason, message=str(error))
                return
            cache.report_outcome(
                probe_gate=self.options.probe_gate,
                probe_set_digest=self.options.probe_digest,
                prompt_digest=task.digest,
                difference=exact - candidate,
            )
            cache.close()
            differences.append(exact - candidate)
        self.probed.add(key)
        tell("probed", candidate=about.candidate_digest, prompts=len(differences), drop=_mean(differences))

    def _scored(self, node: str, task: Task, arm: str) -> tuple[float, KvtierCache]:
        wanted = self.engine.tokenizer(task.answer, add_special_tokens=False).input_ids
        answer, cache = self.engine.generate(node, task.prompt, len(wanted), tenant="probe", forced_arm=arm)
        hits = sum(int(a == b) for a, b in zip(answer.tokens, wanted, strict=True))
        return hits / len(wanted), cache

    # --- commands ----------------------------------------------------------

    def long_request(self, command: dict[str, Any]) -> None:
        """One generation whose every token is announced as it is made."""
        answer, cache = self.engine.generate(
            command.get("node", self.nodes[0]),
            command["prompt"],
            command["new_tokens"],
            tenant=command["tenant"],
            root=command.get("root"),
            announce=command["id"],
        )
        cache.report_outcome()
        cache.close()
        tell("longDone", id=command["id"], tokens=answer.tokens, exactness=answer.exactness, arm=answer.arm)

    def replay(self, command: dict[str, Any]) -> None:
        """Answer given prompts and return their tokens, receipts' classes and tiers."""
        rows = []
        for i, prompt in enumerate(command["prompts"]):
            node = self.nodes[i % len(self.nodes)]
            answer, cache = self.engine.generate(
                node, prompt, command["new_tokens"], tenant=command.get("tenant", "alpha")
            )
            cache.report_outcome()
            cache.close()
            rows.append({"tokens": answer.tokens, "exactness": answer.exactness, "tiers": answer.tiers})
        tell("replayed", id=command["id"], rows=rows)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agent", action="append", required=True, help="NODE=SOCKET, repeatable")
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--cache", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=3)
    parser.add_argument("--probe-part", default="0/1", help="I/N: this engine scores each Nth probe from I")
    parser.add_argument("--probe-seed", type=int, default=1234)
    parser.add_argument("--probe-count", type=int, default=12)
    parser.add_argument("--probe-gate", default="quality")
    parser.add_argument("--probe-digest", default="")
    parser.add_argument("--paused", action="store_true", help="serve nothing until told to resume")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sockets = {node: Path(path) for node, path in (a.split("=", 1) for a in options.agent)}
    engine = Engine(sockets, options.namespace, options.cache)
    tell("ready", nodes=list(sockets))
    Workload(engine, options).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
