"""What is counted and told of indexes: sessions by stage, bytes, and what building them took.

Why it exists: the operator and dashboards ask while steps run. It must not know locks, queues or jobs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvtier_core.selectors.lifecycle.life import LayerLife, Stage
from kvtier_core.selectors.lifecycle.names import Name


@dataclass(slots=True)
class Counted:
    """Since start, of one selector of one cache. Hidden seconds were spent on builds that no query asked for;
    exposed ones are those during which queries asked and were answered exactly, and those of builds that ran
    in a step's own time. refusals: by reason."""

    builds: int = 0
    appends: int = 0
    failures: int = 0
    hidden_seconds: float = 0.0
    exposed_seconds: float = 0.0
    refusals: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class IndexState:
    """Of one selector of one cache: sessions by stage now, bytes of published indexes and of rows that wait,
    and what was counted since start."""

    name: Name
    ready: int
    building: int
    refused: int
    index_bytes: int
    waiting_bytes: int
    counted: Counted


@dataclass(slots=True, eq=False)
class SessionLives:
    """The layers of one session. spare: it gives way to others. taken: bytes that they hold of the memory, by
    layer."""

    name: Name
    lives: list[LayerLife]
    spare: bool = False
    taken: dict[int, int] = field(default_factory=dict)

    @property
    def stage(self) -> Stage:
        stages = {life.stage for life in self.lives}
        for one in (Stage.REFUSED, Stage.BUILDING):
            if one in stages:
                return one
        return Stage.READY

    def added(self, to: IndexState) -> IndexState:
        """With this one counted, too."""
        stage = self.stage
        return replace(
            to,
            ready=to.ready + (stage is Stage.READY),
            building=to.building + (stage is Stage.BUILDING),
            refused=to.refused + (stage is Stage.REFUSED),
            index_bytes=to.index_bytes + sum(sum(life.held.values()) for life in self.lives),
            waiting_bytes=to.waiting_bytes + sum(life.waiting_bytes for life in self.lives),
        )
