"""Uninstalling: the order, the deadline, what may be dropped and what is never touched, and what is told."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubectl_kvtier.cli import main
from kubectl_kvtier.completion import complete
from kubectl_kvtier.outcomes import Exit, Failure, Forbidden
from kubectl_kvtier.printing import Out
from kubectl_kvtier.uninstall import retiring
from kubectl_kvtier.uninstall.holds import CACHES, FINALIZERS, ROLLOUTS, Held, lease_wait
from kubectl_kvtier.uninstall.uninstaller import Order, uninstall
from kvtier_operator import ports
from kvtier_operator.reconcile import kvcache
from kvtier_operator.rollout import moves, spec
from tests.unit.kubectl.uninstall_world import World

OURS = ["kvrollouts/quest kvtier.dev/rollout", "kvcaches/chat kvtier.dev/cache"]


def served(operator: float | None = None) -> World:
    world = World(operator)
    world.rollout(status={"phase": "Progressing"})
    world.add("kvcaches", "chat")
    return world


async def test_with_an_operator_all_goes_by_itself_rollouts_first() -> None:
    world = served(operator=5.0)
    assert await world.run() is Exit.OK
    assert world.titles("delete") == ["kvrollouts/quest", "kvcaches/chat"]
    first, second = world.times("delete")
    assert second >= first + 5.0, "the candidate is revoked first"
    assert world.titles("drop") == [] and world.objects == {}
    told = world.stream.getvalue()
    assert "deleted: KVRollout serving/quest, in Progressing" in told
    assert "gone: KVRollout serving/quest, after" in told
    assert "2 objects gone, 2 by themselves" in told


async def test_without_an_operator_finalizers_are_dropped_at_the_deadline_and_not_before() -> None:
    world = served()
    assert await world.run(60.0) is Exit.NEGATIVE
    assert world.titles("drop") == OURS and world.objects == {}
    assert all(60.0 <= at < 62.0 for at in world.times("drop"))
    assert world.times("delete")[1] == pytest.approx(30.0, abs=2), (
        "a cache waits for half of the time at most"
    )
    told = world.stream.getvalue()
    assert (
        "waiting for 1 KVRollout, 1 KVCache (KVRollout serving/quest, KVCache serving/chat), of an op" in told
    )
    assert "dropped kvtier.dev/rollout of KVRollout serving/quest" in told and "by themselves" in told
    assert "keep its rows until an operator tells them to forget it" in told


@pytest.mark.parametrize("seconds", [22.0, 23.0, 300.0], ids=["the-least", "a-little-more", "the-default"])
async def test_whatever_legal_deadline_leaves_nothing_of_ours(seconds: float) -> None:
    """Also the least one, though the deletion takes its time until it is sent."""
    world = served()
    assert await world.run(seconds) is Exit.NEGATIVE
    assert world.now - 1000.0 <= seconds + retiring.CLOSING_SECONDS


@pytest.mark.parametrize(
    "build,legal,why",
    [
        pytest.param(lambda w: w.rollout(lease="20s"), "22s", "KVRollout serving/quest", id="ten-percent"),
        pytest.param(lambda w: w.rollout(lease="5s"), "6s", "under leases of 5 s", id="at-least-a-second"),
        pytest.param(
            lambda w: w.rollout(lease="20s", status={"rollback": {"leaseTTL": "2m"}}),
            "132s", "under leases of 120 s", id="of-another-spec",
        ),
        pytest.param(
            lambda w: w.rollout(status={"revoking": {"leaseTTL": "nonsense"}}),
            "3960s", "under leases of 3600 s", id="not-readable",
        ),
        pytest.param(lambda w: w.add("kvcaches", "chat"), "66s", "they count as 60 s", id="no-rollout"),
        pytest.param(
            lambda w: w.add("kvcaches", "chat", status={"approved": {"rollout": "lost"}}),
            "3960s", "its KVRollout lost, which would say", id="approved-by-what-is-gone",
        ),
        pytest.param(
            lambda w: w.rollout("lost") and w.add(
                "kvcaches", "chat", status={"approved": {"rollout": "lost", "evidence": "u9/1/sha256:a"}}
            ),
            "3960s", "its KVRollout lost, which would say", id="approved-by-another-of-its-name",
        ),
        pytest.param(
            lambda w: w.rollout("lost") and w.add(
                "kvcaches", "chat", status={"approved": {"rollout": "lost", "evidence": "u1/1/sha256:a"}}
            ),
            "22s", "under leases of 20 s", id="approved-by-what-is-there",
        ),
    ],
)  # fmt: skip
async def test_a_deadline_shorter_than_a_lease_is_refused_before_anything_is_written(
    build: Callable[[World], object], legal: str, why: str
) -> None:
    world = World()
    build(world)
    with pytest.raises(Failure, match=f"The least is --deadline {legal}$") as caught:
        await world.run(float(legal[:-1]) - 0.5)
    assert caught.value.status is Exit.USAGE and why in str(caught.value)
    assert world.writes == []
    assert await world.run(float(legal[:-1]), dry_run=True) is Exit.OK


def test_finalizers_and_leases_are_those_of_the_operator() -> None:
    assert FINALIZERS == {ROLLOUTS: ports.ROLLOUT_FINALIZER, CACHES: ports.CACHE_FINALIZER}
    assert lease_wait(spec.DEFAULT_LEASE_TTL) == kvcache.REMOVAL_GRACE
    for ttl in (1.0, 9.0, 10.0, 60.0, spec.MAX_LEASE_TTL):
        assert lease_wait(ttl) == pytest.approx(ttl + max(ttl * (moves.LEASE_GRACE - 1), moves.MIN_GRACE))


OTHER = "example.com/audit"


@pytest.mark.parametrize("mine", [0, 1], ids=["before-the-other", "after-the-other"])
async def test_finalizers_of_others_are_named_and_never_touched(mine: int) -> None:
    world = World()
    both = [OTHER]
    both.insert(mine, "kvtier.dev/cache")
    cache = world.add("kvcaches", "chat", finalizers=both)
    assert await world.run(70.0) is Exit.TIMED_OUT
    assert world.titles("drop") == ["kvcaches/chat kvtier.dev/cache"]
    assert cache["metadata"]["finalizers"] == [OTHER]
    assert (
        f"left: KVCache serving/chat: held by {OTHER}, which is not kvtier's to drop"
        in world.stream.getvalue()
    )


async def test_a_missing_right_to_patch_is_named_and_the_rest_goes() -> None:
    world = served()
    world.denied = {("patch", "kvcaches")}
    assert await world.run() is Exit.FAILED
    assert world.titles("drop") == OURS[:1]
    told = world.stream.getvalue()
    assert "the right to patch kvcaches.kvtier.dev is missing (ClusterRole kvtier-uninstaller" in told


@pytest.mark.parametrize("verb", ["list", "delete"])
async def test_any_other_missing_right_ends_it_at_once(verb: str) -> None:
    world = served()
    world.denied = {(verb, "kvrollouts")}
    with pytest.raises(Forbidden, match=f"the right to {verb} kvrollouts.kvtier.dev is missing"):
        await world.run()
    assert world.now < 1002.0


async def test_another_object_of_the_same_name_keeps_its_finalizer() -> None:
    world = World()
    world.add("kvcaches", "chat")

    def recreated() -> None:
        world.add("kvcaches", "chat")

    world.before_patch = [recreated]
    assert await world.run(70.0) is Exit.TIMED_OUT
    assert world.titles("drop") == []
    assert world.objects["kvcaches", "serving", "chat"]["metadata"]["finalizers"] == ["kvtier.dev/cache"]
    assert "appeared meanwhile: KVCache serving/chat" in world.stream.getvalue()
    assert "left: KVCache serving/chat: not deleted: it appeared too late" in world.stream.getvalue()


async def test_what_appears_meanwhile_goes_too() -> None:
    world = served(operator=3.0)
    world.at(4.0, lambda: world.rollout("second") and None)
    assert await world.run() is Exit.OK
    assert sorted(world.titles("delete")) == ["kvcaches/chat", "kvrollouts/quest", "kvrollouts/second"]


async def test_what_appears_late_is_left_while_agents_may_hold_its_candidate() -> None:
    """Its cache, too: nothing of it is dropped before the longest lease has ended."""
    world = served()
    world.at(50.0, lambda: world.rollout("second", lease="10m") and None)
    assert await world.run() is Exit.TIMED_OUT
    assert world.titles("drop") == OURS[:1]
    told = world.stream.getvalue()
    assert "left: KVRollout serving/second: held by kvtier.dev/rollout: agents may hold its candidate" in told
    assert "left: KVCache serving/chat: held by kvtier.dev/cache: agents may hold its candidate" in told
    # A second run goes on.
    assert await world.run(700.0) is Exit.NEGATIVE and world.objects == {}


async def test_a_lease_that_ends_soon_after_the_deadline_is_waited_for() -> None:
    world = served()
    world.at(50.0, lambda: world.rollout("second", lease="30s") and None)
    assert await world.run() is Exit.NEGATIVE
    assert 50.0 + 33.0 <= world.times("drop")[-1] <= 60.0 + retiring.CLOSING_SECONDS


async def test_a_longer_lease_that_its_status_told_of_first_counts_on() -> None:
    world = World()
    one = world.rollout(lease="20s", status={"revoking": {"leaseTTL": "50s"}})
    world.at(1.0, lambda: one["status"].clear())
    world.at(45.0, lambda: world.rollout("late", status={"revoking": {"leaseTTL": "40s"}}) and None)
    world.at(47.0, lambda: world.objects["kvrollouts", "serving", "late"]["status"].clear())
    assert await world.run(55.0) is Exit.NEGATIVE
    assert world.times("drop")[-1] >= 45.0 + 44.0


async def test_what_is_made_again_without_end_ends_with_the_closing_seconds() -> None:
    world = World()

    def again() -> None:
        if ("kvselectors", "serving", "quest-64") not in world.objects:
            world.add("kvselectors", "quest-64")
        world.at(0.1, again)

    again()
    assert await world.run(5.0, rest=True) is Exit.TIMED_OUT
    assert world.now - 1000.0 <= 5.0 + retiring.CLOSING_SECONDS + 1.0


@pytest.mark.parametrize("everywhere", [False, True], ids=["a-namespace", "everywhere"])
async def test_on_request_the_rest_goes_when_no_cache_needs_its_agents(everywhere: bool) -> None:
    world = served()
    for plural, name in (("agentpools", "pool"), ("kvselectors", "quest-64"), ("tierclasses", "cpu")):
        world.add(plural, name)
    world.add("kvcaches", "other", namespace="elsewhere")
    assert await world.run(70.0, rest=True, everywhere=everywhere) is Exit.NEGATIVE
    dropped_at = world.times("drop")[-1]
    rest = [
        (at - 1000.0, what) for at, verb, what in world.writes if verb == "delete" and at > dropped_at + 1000
    ]
    assert [what for _, what in rest] == [
        "kvselectors/quest-64",
        "agentpools/pool",
        *(["tierclasses/cpu"] if everywhere else []),
    ]
    assert len(world.objects) == (0 if everywhere else 2)


@pytest.mark.parametrize("down", [30.0, 75.0], ids=["before-the-deadline", "over-the-deadline"])
async def test_a_server_that_is_away_is_asked_again(down: float) -> None:
    world = served()
    world.at(5.0, lambda: setattr(world, "down", 1000.0 + down))
    assert await world.run() is Exit.NEGATIVE
    assert "asked again: no answer from the API server" in world.stream.getvalue()


async def test_a_server_that_stays_away_ends_it_all_the_same() -> None:
    world = served()
    world.at(5.0, lambda: setattr(world, "down", 1e9))
    with pytest.raises(Failure, match=r"no answer from the API server.*run it again"):
        await world.run()
    assert world.now - 1000.0 <= 60.0 + retiring.CLOSING_SECONDS + 20.0
    assert "2 left" in world.stream.getvalue()


async def test_interrupted_it_says_so_and_drops_nothing() -> None:
    world = served()
    run = asyncio.ensure_future(world.run())
    world.at(10.0, lambda: run.cancel() and None)
    with pytest.raises(asyncio.CancelledError):
        await run
    assert "interrupted: 2 objects are left; run it again to go on" in world.stream.getvalue()
    assert world.titles("drop") == []
    assert await world.run() is Exit.NEGATIVE, "the second run goes on"


async def test_of_nothing_nothing_is_said_but_that() -> None:
    world = World()
    assert await world.run() is Exit.OK
    assert world.stream.getvalue() == "nothing to delete, in 0s\n"


async def test_a_dry_run_writes_nothing_and_tells_the_order_and_the_least_deadline() -> None:
    world = served()
    world.namespace = "serving"
    assert await world.run(dry_run=True) is Exit.OK
    assert world.stream.getvalue().splitlines() == [
        "KVRollout serving/quest would be deleted, in Progressing, held by kvtier.dev/rollout",
        "KVCache serving/chat would be deleted, held by kvtier.dev/cache",
        "2 objects; the least --deadline is 22s; nothing was written",
    ]
    assert world.writes == []


async def test_the_account_as_json() -> None:
    world = World()
    world.add(
        "kvcaches", "chat", spec={"deletion": {"cryptoErase": True}}, finalizers=["kvtier.dev/cache", OTHER]
    )
    stream = io.StringIO()
    order = Order(everywhere=False, rest=False, seconds=66.0)
    assert (
        await uninstall(world, order, Out(stream, True, lambda: world.now), world.watch()) is Exit.TIMED_OUT
    )
    told = json.loads(stream.getvalue())
    assert (told["outcome"], told["deadlineSeconds"], told["gone"]) == ("TIMED_OUT", 66.0, [])
    [dropped], [left] = told["dropped"], told["left"]
    assert (dropped["finalizer"], dropped["uid"], dropped["gone"]) == ("kvtier.dev/cache", "u1", False)
    assert "its keys are not erased, and there is no receipt" in dropped["means"]
    assert left["finalizers"] == [OTHER] and OTHER in left["why"]


@pytest.mark.parametrize(
    "words,said",
    [
        ((), "-n NAMESPACE or -A"),
        (("-A", "-n", "serving"), "-n NAMESPACE or -A"),
        (("-A", "--deadline", "soon"), "'soon' is not a duration"),
        (("-A", "--deadline", "25h"), "from 1ms to 24h"),
    ],
    ids=["no-scope", "two-scopes", "no-duration", "too-long"],
)
def test_wrong_usage(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["uninstall", *words])
    assert ended.value.code == Exit.USAGE and said in capsys.readouterr().err


def test_its_options_are_completed() -> None:
    from kubectl_kvtier.cli import make_parser

    assert complete(make_parser(), ["unin"], lambda plural: [])[0] == "uninstall"
    assert complete(make_parser(), ["uninstall", "--d"], lambda plural: []) == [
        "--deadline",
        "--dry-run",
        ":4",
    ]


def test_an_object_is_quiet_from_the_answer_that_showed_it_deleted() -> None:
    """It may have been alive, and renewed, until the server answered."""
    gone = Held(ROLLOUTS, "serving", "quest", "u1", deleting=True, lease=20.0)
    seen = retiring.observe(retiring.begin(0.0, 60.0), [gone], 10.0, 15.0)
    assert seen.known["u1"].quiet == 15.0
    lives = retiring.observe(retiring.begin(0.0, 60.0), [], 0.0, 1.0)
    lives = retiring.observe(lives, [Held(ROLLOUTS, "serving", "quest", "u1", lease=20.0)], 2.0, 3.0)
    assert lives.known["u1"].quiet is None
    assert retiring.observe(lives, [], 10.0, 15.0).known["u1"].quiet == 15.0


# --- the core against everything that may happen -----------------------------------------------------------


@dataclass
class Life:
    """One object of a made-up history. lives, ours, other: from when, until when, in seconds of the run."""

    plural: str
    lease: float
    appears: float
    released: float
    other_goes: float
    deleted: float
    ours: bool = True
    uid: str = ""
    drops: list[float] = field(default_factory=list)

    def here(self, now: float) -> bool:
        return now >= self.appears and not (self.deleted <= now and not self.finalizers(now))

    def finalizers(self, now: float) -> tuple[str, ...]:
        released = now >= self.deleted + self.released
        mine = (FINALIZERS[self.plural],) if self.ours and not released else ()
        return ((OTHER,) if now < self.other_goes else ()) + mine

    def held(self, now: float) -> Held:
        return Held(
            plural=self.plural,
            namespace="serving",
            name=self.uid,
            uid=self.uid,
            deleting=self.deleted <= now,
            finalizers=self.finalizers(now),
            cache="chat" if self.plural == ROLLOUTS else self.uid,
            lease=self.lease if self.plural == ROLLOUTS else 0.0,
        )


FOREVER = st.just(1e9)
LIVES = st.builds(
    Life,
    plural=st.sampled_from([ROLLOUTS, CACHES]),
    lease=st.sampled_from([1.0, 12.0, 60.0, 300.0]),
    appears=st.one_of(st.just(0.0), st.floats(0, 400)),
    released=st.one_of(FOREVER, st.floats(0, 200)),
    other_goes=st.one_of(st.just(0.0), st.just(0.0), st.floats(0, 400), FOREVER),
    # By somebody else.
    deleted=st.one_of(st.just(float("inf")), st.floats(0, 400)),
)


@given(
    lives=st.lists(LIVES, min_size=1, max_size=6),
    extra=st.floats(0, 200),
    pauses=st.lists(st.floats(0.1, 20), min_size=1, max_size=20),
    answers=st.lists(st.floats(0.01, 9), min_size=1, max_size=20),
)
def test_whatever_happens_it_ends_and_drops_only_what_is_ours_when_no_lease_runs(
    lives: list[Life], extra: float, pauses: list[float], answers: list[float]
) -> None:
    for number, life in enumerate(lives):
        life.uid = "chat" if life.plural == CACHES and number == 0 else f"o{number}"
    found = [life.held(0.0) for life in lives if life.here(0.0)]
    seconds = retiring.least_deadline(found)[0] + extra + 1.0
    progress, now, look = retiring.begin(0.0, seconds), 0.0, 0
    by_uid = {life.uid: life for life in lives}
    while True:
        asked, now = now, now + answers[look % len(answers)]
        found = [one.held(now) for one in lives if one.here(now)]
        progress = retiring.observe(progress, found, asked, now)
        step = retiring.decide(progress, now)
        for held in step.delete:
            life = by_uid[held.uid]
            assert life.appears < seconds + max(answers)
            if held.plural == CACHES and now < seconds * retiring.CACHES_SHARE:
                # The candidate is revoked first.
                assert not any(
                    held.name == "chat" and one.plural == ROLLOUTS and one.ours is not None for one in found
                )
            life.deleted = min(life.deleted, now)
            progress = retiring.deleted(progress, held, now)
        for held in step.drop:
            life = by_uid[held.uid]
            assert now >= seconds and held.deleting and held.ours is not None
            assert held.finalizers[held.ours] == FINALIZERS[held.plural]
            # The truth: a live rollout is renewed until it is deleted, whatever was seen of it.
            for one in lives:
                bound = one is life or (held.name == "chat" and one.plural == ROLLOUTS)
                if bound and one.plural == ROLLOUTS and one.appears <= now:
                    assert now >= one.deleted + lease_wait(one.lease)
            life.ours = False
            progress = retiring.dropped(progress, held)
        if step.over:
            break
        now += pauses[look % len(pauses)]
        look += 1
    assert now <= seconds + retiring.CLOSING_SECONDS + max(pauses) + max(answers)
    assert all(life.finalizers(now)[:1] == (OTHER,) for life in lives if now < life.other_goes)
    left = {one.held.uid for one in progress.here}
    assert {life.uid for life in lives if life.here(now)} == left
