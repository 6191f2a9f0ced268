"""Single guards behind what others' users complained of (docs/release.md): each is one comparison, and whole
rollouts have others behind it that would hide its absence."""

from __future__ import annotations

import pytest

from kvtier_operator.ports import Conflict
from kvtier_operator.queue import Backoff
from kvtier_operator.rollout.agentwatch import holds
from kvtier_operator.rollout.effects import Subject, adoption, write_status
from kvtier_operator.rollout.inputs import AgentView
from kvtier_operator.rollout.state import CandidateRef, ManifestRef, RolloutState
from kvtier_operator.rollout.vocabulary import CandidateClass
from tests.unit.rollout.rollout_world import World, copied

CANDIDATE = CandidateRef("sha256:c", "chat-c", CandidateClass.EXACT)
STATE = RolloutState(fence=3, candidate=CANDIDATE, baseline=ManifestRef("sha256:b", "chat-b"))


async def test_a_status_is_written_over_the_version_that_was_read_and_no_other() -> None:
    world = World()
    await world.until("Progressing", "Shadow")
    read = copied(world.api.objects[world.rollout])
    world.edit(progressDeadline="2h")
    with pytest.raises(Conflict):
        await write_status(world.api, Subject(world.rollout, read, world.cache_key, None), STATE, 0.0)


async def test_a_baseline_is_replaced_only_where_it_is_the_one_that_was_measured_against() -> None:
    world = World()
    with pytest.raises(Conflict):
        await world.api.compare_and_swap(world.cache_key, adoption(STATE, world.cache_status))
    assert world.cache_status["baseline"]["digest"] == world.baseline


@pytest.mark.parametrize(
    ("fence", "digest", "counts"),
    [(3, "sha256:c", True), (2, "sha256:c", False), (3, "sha256:older", False), (0, "", False)],
    ids=["of-this", "of-an-older-fence", "of-another-candidate", "of-none"],
)
def test_only_who_holds_this_candidate_under_this_fence_counts(fence: int, digest: str, counts: bool) -> None:
    agent = AgentView("node-0", True, granted_fence=fence, candidate_digest=digest)
    assert holds(agent, STATE) is counts


def test_an_error_is_tried_again_within_a_second_and_never_later_than_a_minute() -> None:
    assert Backoff().delay(1, 1.0) < 1.0
    assert Backoff().delay(40, 1.0) <= 60.0
