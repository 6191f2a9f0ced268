"""Commands over objects in memory: intents and their answers, history, diff, top, exit statuses."""

from __future__ import annotations

import hashlib
import io
import json
from typing import Any

import pytest

from kubectl_kvtier import commands, intents
from kubectl_kvtier.cli import main, make_parser
from kubectl_kvtier.outcomes import Exit, Failure, Unavailable
from kvtier_crds.models.kvrollout import Verb
from tests.unit.crds.crds_samples import example
from tests.unit.kubectl.kubectl_samples import NOW, MemoryApi, at, document


def api_with(operator: Any = None, **status: Any) -> MemoryApi:
    made = MemoryApi(operator)
    made.put("kvrollouts", document(**status))
    return made


async def ran(api: MemoryApi, *words: str) -> tuple[Exit, str]:
    stream = io.StringIO()
    arguments = make_parser().parse_args(words)
    out = commands.Out(stream, arguments.output == "json", lambda: NOW)
    return await commands.in_cluster(api, arguments, out), stream.getvalue()


def answers(result: str, message: str = "") -> Any:
    def operator(stored: dict[str, Any]) -> None:
        intent = stored["spec"]["intent"]
        stored["status"]["lastIntent"] = {
            "seq": intent["seq"], "verb": intent["verb"], "result": result, "message": message,
        }  # fmt: skip

    return operator


@pytest.mark.parametrize("verb", list(Verb), ids=str)
async def test_an_intent_names_what_the_person_saw(verb: Verb) -> None:
    api = api_with(answers("Accepted"), lastIntent={"seq": 6, "verb": "Pause", "result": "Replayed"})
    status, text = await ran(api, verb.value.lower(), "quest-on-chat")
    assert status is Exit.OK and "seq 7 accepted" in text
    assert api.patches[0][-1]["value"] == {
        "seq": 7, "verb": verb.value, "attempt": 1, "expectedStage": "Canary", "expectedStep": 0,
    }  # fmt: skip
    assert [one["path"] for one in api.patches[0] if one["op"] == "test"] == [
        "/metadata/uid",
        "/metadata/resourceVersion",
    ]


async def test_nothing_is_sent_to_what_no_operator_has_looked_at() -> None:
    """It would be refused there, and the person told that much later."""
    api = MemoryApi()
    made = document()
    del made["status"]
    api.put("kvrollouts", made)
    with pytest.raises(Failure, match="no operator has looked at quest-on-chat yet") as caught:
        await ran(api, "abort", "quest-on-chat")
    assert caught.value.status is Exit.NEGATIVE
    assert api.patches == []


async def test_a_refused_intent_is_an_answer_of_no() -> None:
    with pytest.raises(Failure, match="WrongStage: it is in Ramp") as caught:
        await ran(api_with(answers("WrongStage", "it is in Ramp")), "promote", "quest-on-chat")
    assert caught.value.status is Exit.NEGATIVE


@pytest.mark.parametrize(
    "status", [{}, {"lastIntent": {"seq": 6, "verb": "Abort", "result": "Accepted"}}], ids=["none", "earlier"]
)
async def test_an_intent_that_nobody_answers_is_told_after_its_time(status: dict[str, Any]) -> None:
    with pytest.raises(Failure, match="no operator has answered") as caught:
        await ran(api_with(**status), "abort", "quest-on-chat", "--timeout", "0.05")
    assert caught.value.status is Exit.TIMED_OUT


async def test_no_wait_ends_at_the_write() -> None:
    status, text = await ran(api_with(), "pause", "quest-on-chat", "--no-wait")
    assert status is Exit.OK and "Pause seq 1 written" in text


async def test_a_status_that_moved_within_the_step_does_not_stop_an_intent() -> None:
    api = api_with(answers("Accepted"))
    api.before_patch = [lambda stored: stored["metadata"].update(resourceVersion="8")]
    status, _ = await ran(api, "pause", "quest-on-chat")
    assert status is Exit.OK and len(api.patches) == 1


async def test_a_step_that_was_passed_meanwhile_stops_it() -> None:
    api = api_with(answers("Accepted"))

    def moves(stored: dict[str, Any]) -> None:
        stored["metadata"]["resourceVersion"] = "8"
        stored["status"]["stage"] = "Ramp"

    api.before_patch = [moves]
    with pytest.raises(Failure, match="went from Canary step 0 to Ramp step 0") as caught:
        await ran(api, "promote", "quest-on-chat")
    assert caught.value.status is Exit.NEGATIVE and api.patches == []


async def test_a_rollout_that_never_holds_still_is_given_up() -> None:
    api = api_with()

    def moves(stored: dict[str, Any]) -> None:
        stored["metadata"]["resourceVersion"] += "x"

    api.before_patch = [moves] * intents.TRIES
    with pytest.raises(Failure, match="nothing was sent"):
        await ran(api, "pause", "quest-on-chat")


@pytest.mark.parametrize(
    "status,code",
    [
        ({}, Exit.OK),
        ({"phase": "Completed", "stage": "Full"}, Exit.OK),
        ({"phase": "RolledBack", "stage": "ExactBaseline"}, Exit.NEGATIVE),
        ({"phase": "Invalid", "stage": "Off"}, Exit.NEGATIVE),
    ],
    ids=["progressing", "completed", "rolled-back", "invalid"],
)
@pytest.mark.parametrize("command", ["status", "explain"])
async def test_exit_statuses_tell_scripts(command: str, status: dict[str, Any], code: Exit) -> None:
    found, text = await ran(api_with(**status), command, "quest-on-chat", "-o", "json")
    assert found is code and isinstance(json.loads(text), dict)


async def test_watching_ends_with_the_rollout() -> None:
    found, text = await ran(api_with(phase="Completed", stage="Full"), "status", "quest-on-chat", "-w")
    assert found is Exit.OK and "is complete" in text


async def test_a_watch_ends_with_its_time_and_says_what_is_waited_for() -> None:
    with pytest.raises(Failure, match=r"has not ended within 0.05 s: .* 800 of 18000") as caught:
        await ran(api_with(), "status", "quest-on-chat", "-w", "--timeout", "50ms")
    assert caught.value.status is Exit.TIMED_OUT


@pytest.mark.parametrize("words", [("quest-on-chat", "--timeout", "5m"), ("--timeout", "5m")], ids=str)
async def test_a_time_without_a_watch_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(Failure, match="watch") as caught:
        await ran(api_with(), "status", *words)
    assert caught.value.status is Exit.USAGE


async def test_a_watch_goes_on_where_nodes_cannot_be_read() -> None:
    api = api_with(phase="Completed", stage="Full")

    async def away(plural: str, *, everywhere: bool = False) -> list[dict[str, Any]]:
        raise Unavailable("shutting down")

    api.list = away  # type: ignore[method-assign]
    found, text = await ran(api, "status", "quest-on-chat", "-w")
    assert found is Exit.OK and "is complete" in text
    assert "nodes as they were last seen: shutting down" in text


async def test_a_dry_run_is_judged_and_not_written() -> None:
    api = api_with()
    found, text = await ran(api, "promote", "quest-on-chat", "--dry-run")
    assert found is Exit.OK and api.patches == [] and len(api.judged) == 1
    assert text == "quest-on-chat: Promote seq 1 of Canary step 0, attempt 1 would be written\n"
    assert "intent" not in api.objects["kvrollouts", "quest-on-chat"]["spec"]


@pytest.mark.parametrize(
    "text,seconds", [("30", 30.0), ("0.5s", 0.5), ("5m", 300.0), ("1h", 3600.0), ("250ms", 0.25)]
)
def test_times_are_given_as_to_kubectl(text: str, seconds: float) -> None:
    parsed = make_parser().parse_args(["abort", "x", "--timeout", text, "--request-timeout", text])
    assert (parsed.timeout, parsed.request_timeout) == (seconds, seconds)


@pytest.mark.parametrize(
    "given,name",
    [
        ("kvrollout.kvtier.dev/x", "x"),
        ("kvr/x", "x"),
        ("kvcache.kvtier.dev/x", "cache/x"),
        ("cache/x", "cache/x"),
        ("pod/x", "pod/x"),
        ("kvr/a/b", "a/b"),
    ],
)
def test_a_name_as_kubectl_prints_it_is_one(given: str, name: str) -> None:
    assert make_parser().parse_args(["explain", given]).name == name


async def test_what_an_event_says_does_not_steer_the_terminal() -> None:
    api = api_with()
    note = "\x1b]0;title\x07\x1b[2Jgone\r\x9b1A"
    api.kept_events = [{"eventTime": at(-1), "type": "Normal", "reason": "R", "note": note, "metadata": {}}]
    _, text = await ran(api, "history", "quest-on-chat")
    assert r"\x1b]0;title\x07\x1b[2Jgone\x0d\x9b1A" in text
    assert not set(text) & set("\x1b\x07\r\x9b")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "name,value,coloured,cleared",
    [("NO_COLOR", "", True, True), ("NO_COLOR", "1", False, True), ("TERM", "dumb", False, False)],
    ids=["colour", "no-color", "dumb"],
)
async def test_a_terminal_is_asked_for_what_it_can(
    name: str, value: str, coloured: bool, cleared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv(name, value)
    stream = Terminal()
    out = commands.Out(stream, False, lambda: NOW)
    arguments = make_parser().parse_args(["status", "quest-on-chat", "-w", "--timeout", "50ms"])
    with pytest.raises(Failure, match="has not ended"):
        await commands.in_cluster(api_with(), arguments, out)
    text = stream.getvalue()
    assert ("\x1b[32mPass" in text) is coloured and text.startswith("\x1b[H\x1b[2J") is cleared
    assert ("\x1b" in text) is (coloured or cleared)


async def test_a_list_has_a_line_a_rollout() -> None:
    found, text = await ran(api_with(), "status")
    assert found is Exit.OK and "quest-on-chat" in text.splitlines()[1]
    _, empty = await ran(MemoryApi(), "status")
    assert empty == "no rollouts in namespace serving\n"


def with_unreadable() -> MemoryApi:
    """One rollout, cache and node each that another version has written, beside others."""
    api = api_with()
    other = document()
    other["metadata"]["name"] = "of-tomorrow"
    other["status"]["phase"] = "Dreaming"
    api.put("kvrollouts", other)
    for plural, kind, spec in (
        ("kvcaches", "KVCache", {"pageTokens": "many"}),
        ("kvnodes", "KVNode", {"address": 3}),
    ):
        metadata = {
            "name": f"{plural}-of-tomorrow",
            "namespace": "serving",
            "uid": "u",
            "resourceVersion": "1",
        }
        api.put(
            plural, {"apiVersion": "kvtier.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}
        )
    return api


async def test_one_that_cannot_be_read_hides_no_other() -> None:
    found, text = await ran(with_unreadable(), "status")
    assert found is Exit.FAILED
    assert "quest-on-chat" in text.splitlines()[1]
    assert "KVRollout of-tomorrow cannot be read by this version: status.phase" in text.splitlines()[2]
    found, text = await ran(with_unreadable(), "status", "-o", "json")
    good, bad = json.loads(text)
    assert found is Exit.FAILED and good["name"] == "quest-on-chat"
    assert bad["name"] == "of-tomorrow" and "status.phase" in bad["unreadable"]
    found, text = await ran(with_unreadable(), "top")
    assert found is Exit.FAILED
    assert "kvcaches-of-tomorrow cannot be read" in text and "kvnodes-of-tomorrow cannot be read" in text


async def test_a_node_that_cannot_be_read_does_not_hide_the_rollout() -> None:
    found, text = await ran(with_unreadable(), "status", "quest-on-chat")
    assert found is Exit.OK
    assert "quest-on-chat" in text and "kvnodes-of-tomorrow cannot be read" in text


def revision(name: str, number: int, **manifest: Any) -> dict[str, Any]:
    data = json.dumps(manifest)
    digest = "sha256:" + hashlib.sha256(data.encode()).hexdigest()
    return {
        "metadata": {"name": name, "labels": {"kvtier.dev/role": "candidate"}},
        "revision": number,
        "data": {"manifest": data, "digest": digest},
    }


def with_revisions() -> tuple[MemoryApi, list[str]]:
    kept = [
        revision("chat-a", 1, tiers=[{"name": "dram", "budget": 1}], selector=None),
        revision("chat-b", 2, tiers=[{"name": "dram", "budget": 2}], selector={"family": "quest"}),
    ]
    digests = [one["data"]["digest"] for one in kept]
    api = api_with(baseline={"digest": digests[0]}, candidate={"digest": digests[1], "class": "approximate"})
    cache = example("KVCache", "chat")
    cache["metadata"]["uid"] = "u-2"
    api.put("kvcaches", cache)
    api.kept_revisions = kept
    return api, digests


async def test_a_diff_names_fields_and_says_no_when_they_differ() -> None:
    api, digests = with_revisions()
    found, text = await ran(api, "diff", "quest-on-chat")
    assert found is Exit.NEGATIVE
    assert text.splitlines() == [
        '+ selector.family: "quest"',
        "- tiers[dram].budget: 1",
        "+ tiers[dram].budget: 2",
    ]
    same, said = await ran(api, "diff", "cache/chat", "chat-a", digests[0][:20])
    assert same is Exit.OK and said == "no difference\n"


@pytest.mark.parametrize(
    "words,status,message",
    [
        (("cache/chat", "chat-a"), Exit.USAGE, "needs two revisions"),
        (("quest-on-chat", "chat-a"), Exit.USAGE, "diff cache/NAME chat-a"),
        (("cache/chat", "chat-a", "abc"), Exit.NOT_FOUND, "there are: chat-a, chat-b"),
    ],
    ids=["one", "of-a-rollout", "unknown"],
)
async def test_a_diff_of_what_is_not_there(words: tuple[str, ...], status: Exit, message: str) -> None:
    with pytest.raises(Failure, match=message) as caught:
        await ran(with_revisions()[0], "diff", *words)
    assert caught.value.status is status


async def test_a_damaged_revision_is_not_shown() -> None:
    api, _ = with_revisions()
    api.kept_revisions[1]["data"]["manifest"] += " "
    with pytest.raises(Failure, match="is damaged"):
        await ran(api, "diff", "quest-on-chat")


async def test_history_is_in_order_of_time() -> None:
    api, _ = with_revisions()
    older = document(
        phase="RolledBack", stage="ExactBaseline", rollback={"cause": "IntentAbort", "fromStage": "Ramp"}
    )
    older["metadata"] |= {"name": "before", "creationTimestamp": at(-90000)}
    api.put("kvrollouts", older)
    _, text = await ran(api, "history", "cache/chat")
    lines = text.splitlines()
    assert lines[1].startswith("before") and "IntentAbort in Ramp" in lines[1]
    assert lines[2].startswith("quest-on-chat") and lines[-1].startswith("chat-b")
    api.kept_events = [
        {"eventTime": at(-10), "type": "Normal", "reason": "StageEntered", "note": "Canary", "metadata": {}},
        {"eventTime": at(-99), "type": "Normal", "reason": "StageEntered", "note": "Shadow", "metadata": {}},
    ]
    _, events = await ran(api, "history", "quest-on-chat")
    assert [line.split()[-1] for line in events.splitlines()[-2:]] == ["Shadow", "Canary"]


async def test_top_counts_bytes_by_tier() -> None:
    api = MemoryApi()
    node = example("KVNode", "node-a")
    node["status"] = {
        "tiers": [
            {"class": "gpu-sim", "medium": "gpu", "simulated": True, "capacity": 1 << 30, "used": 1 << 29}
        ]
    }
    cache = example("KVCache", "chat")
    cache["status"] = {
        "servingNodes": 2,
        "ledger": [{"tierClassName": "gpu-sim", "budget": 1 << 29, "used": 1 << 28}],
    }
    api.put("kvnodes", node)
    api.put("kvcaches", cache)
    _, text = await ran(api, "top")
    nodes, caches = text.split("\n\n")
    assert "gpu (simulated)" in nodes and "512MiB" in nodes and "50%" in nodes
    assert "256MiB" in caches and "25%" in caches
    _, facts = await ran(api, "top", "nodes", "-o", "json")
    assert json.loads(facts)["nodes"][0]["used"] == 1 << 29


@pytest.mark.parametrize(
    "words",
    [(), ("status", "--timeout"), ("promote", "x", "--timeout", "-1"), ("trace", "x"), ("lint",)],
    ids=str,
)
def test_wrong_usage_is_2(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2 and "usage:" in capsys.readouterr().err


def test_no_cluster_is_a_failure_with_a_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["status", "--kubeconfig", "/nonexistent/config"]) == Exit.FAILED
    assert "no cluster" in capsys.readouterr().err


@pytest.mark.parametrize(
    "age,finalizers,said",
    [
        (None, ["kvtier.dev/cache"], "chat in serving: no operator has seen it."),
        (30, ["kvtier.dev/cache"], "forget it; a node that does not answer is waited for 1m42s more."),
        (732, ["kvtier.dev/cache"], "ended 10m00s ago; `kubectl kvtier uninstall` needs no operator."),
        (5, ["example.com/audit"], "deleted for 5s: example.com/audit holds it, not kvtier's to drop."),
    ],
    ids=["lives", "waits-for-a-node", "no-operator", "held-by-others"],
)  # fmt: skip
async def test_of_a_cache_that_is_being_deleted_it_says_who_holds_it(
    age: float | None, finalizers: list[str], said: str
) -> None:
    """Nodes are waited for by the longest lease of its rollouts."""
    api = api_with()
    api.objects["kvrollouts", "quest-on-chat"]["spec"]["leaseTTL"] = "2m"
    cache = example("KVCache", "chat")
    cache["metadata"] |= {"uid": "c-1", "finalizers": finalizers}
    if age is not None:
        cache["metadata"]["deletionTimestamp"] = at(-age)
    api.put("kvcaches", cache)
    status, told = await ran(api, "explain", "cache/chat")
    assert status is Exit.OK and said in told
