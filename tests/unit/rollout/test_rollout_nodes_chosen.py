"""Which agents may hold the candidate: at most `maxNodes`, none that is cordoned, and they stay."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_operator.ports import AgentTarget, NodeView
from kvtier_operator.rollout.inputs import AgentView
from kvtier_operator.rollout.observe import choose

STATES = st.sampled_from(("able", "able", "able", "cordoned", "draining", "dead", "excluded"))


def member(name: str, state: str) -> NodeView:
    return NodeView(
        target=AgentTarget(name, f"uid-{name}", "127.0.0.1:1", "boot"),
        live=state != "dead",
        cordoned=state == "cordoned",
        draining=state == "draining",
        lease_renewed=None,
        lease_seconds=10.0,
        raw={},
    )


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(STATES, st.booleans()), max_size=12), st.integers(0, 6))
def test_exactly_the_nodes_of_the_radius(pool: list[tuple[str, bool]], max_nodes: int) -> None:
    members = [member(f"n{i}", state) for i, (state, _) in enumerate(pool)]
    views = [
        AgentView(f"n{i}", True, granted_rollout="uid" if holds else "") for i, (_, holds) in enumerate(pool)
    ]
    excluded = {f"n{i}" for i, (state, _) in enumerate(pool) if state == "excluded"}
    able = {f"n{i}" for i, (state, _) in enumerate(pool) if state == "able"}
    got = choose(members, views, "uid", max_nodes, excluded)
    assert got <= able
    assert len(got) == (min(max_nodes, len(able)) if max_nodes else len(able))
    holders = {f"n{i}" for i, (_, holds) in enumerate(pool) if holds} & able
    assert holders <= got or got <= holders, "holders come first"
    assert choose(members[::-1], views[::-1], "uid", max_nodes, excluded) == got, (
        "whatever the order of the pool"
    )
    if max_nodes:
        assert got <= choose(members, views, "uid", max_nodes + 1, excluded), "a wider radius keeps its nodes"
