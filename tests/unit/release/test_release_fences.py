"""The rules of fences: what is refused, what is a repeat, and that memory never runs ahead of storage."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier_core.errors import CoreError, Reason
from kvtier_core.release.fences import CommandKind, FenceBook, FenceRecord, FileFenceStore, Judgement

UID = "11111111-2222"


def record(
    value: int, kind: CommandKind = CommandKind.GRANT, content: str = "a", uid: str = UID
) -> FenceRecord:
    return FenceRecord(uid, "serving", "chat", value, kind, content, "sha256:00", "rollout")


def book_at(tmp_path: Path, *records: FenceRecord) -> FenceBook:
    book = FenceBook(FileFenceStore(tmp_path))
    for item in records:
        book.commit(item)
    return book


@pytest.mark.parametrize(
    ("value", "kind", "content", "expected"),
    [
        pytest.param(6, CommandKind.GRANT, "b", Judgement.ADVANCE, id="higher-advances"),
        pytest.param(5, CommandKind.GRANT, "a", Judgement.REPEAT, id="same-bytes-repeat"),
        pytest.param(5, CommandKind.GRANT, "b", Reason.FENCE_CONFLICT, id="same-number-other-bytes"),
        pytest.param(5, CommandKind.REVOKE, "a", Reason.FENCE_CONFLICT, id="same-number-other-kind"),
        pytest.param(4, CommandKind.GRANT, "a", Reason.FENCE_STALE, id="lower-even-if-equal-bytes"),
        pytest.param(0, CommandKind.GRANT, "a", Reason.BAD_ARGUMENT, id="zero-is-no-fence"),
        pytest.param(-7, CommandKind.GRANT, "a", Reason.BAD_ARGUMENT, id="negative"),
    ],
)
def test_judgement(
    tmp_path: Path, value: int, kind: CommandKind, content: str, expected: Judgement | Reason
) -> None:
    book = book_at(tmp_path, record(5))
    if isinstance(expected, Judgement):
        assert book.judge(UID, value, kind, content) is expected
        return
    with pytest.raises(CoreError) as refused:
        book.judge(UID, value, kind, content)
    assert refused.value.reason is expected
    if expected in (Reason.FENCE_STALE, Reason.FENCE_CONFLICT):
        assert refused.value.facts["highest_fence"] == "5"


@pytest.mark.parametrize("uid", ["", "../escape", "a/b", "x" * 129])
def test_uid_that_is_no_uid_is_refused(tmp_path: Path, uid: str) -> None:
    with pytest.raises(CoreError) as refused:
        book_at(tmp_path).judge(uid, 1, CommandKind.APPLY, "a")
    assert refused.value.reason is Reason.BAD_ARGUMENT


@pytest.mark.parametrize("uid", ["", "../escape", "a/b"])
def test_a_uid_that_cannot_name_a_file_is_stored_nowhere(tmp_path: Path, uid: str) -> None:
    store = FileFenceStore(tmp_path / "fences")
    (tmp_path / "fences").mkdir()
    with pytest.raises(OSError, match="cannot name a file"):
        store.save(record(1, uid=uid))
    assert [path.name for path in tmp_path.rglob("*")] == ["fences"]


def test_fences_of_caches_are_independent(tmp_path: Path) -> None:
    book = book_at(tmp_path, record(9))
    assert book.judge("other-uid", 1, CommandKind.APPLY, "a") is Judgement.ADVANCE


@pytest.mark.parametrize(
    ("value", "reason"),
    [(4, Reason.FENCE_STALE), (5, None), (6, None)],
    ids=["below", "equal", "above"],
)
def test_reads_need_a_fence_at_least_as_high(tmp_path: Path, value: int, reason: Reason | None) -> None:
    book = book_at(tmp_path, record(5))
    if reason is None:
        book.check_read(UID, value)
        return
    with pytest.raises(CoreError) as refused:
        book.check_read(UID, value)
    assert refused.value.reason is reason


@pytest.mark.parametrize(
    ("stored", "value", "reason"),
    [
        pytest.param(record(5), 5, None, id="the-grant-itself"),
        pytest.param(record(5), 4, Reason.FENCE_STALE, id="an-older-grant"),
        pytest.param(record(5), 6, Reason.FENCE_CONFLICT, id="a-grant-never-seen"),
        pytest.param(record(5, CommandKind.REVOKE), 5, Reason.FENCE_CONFLICT, id="a-revocation"),
    ],
)
def test_renewal(tmp_path: Path, stored: FenceRecord, value: int, reason: Reason | None) -> None:
    book = book_at(tmp_path, stored)
    if reason is None:
        book.check_renewal(UID, value)
        return
    with pytest.raises(CoreError) as refused:
        book.check_renewal(UID, value)
    assert refused.value.reason is reason


def test_a_store_that_fails_keeps_the_old_fence_and_says_not_durable(tmp_path: Path) -> None:
    class FullDisk(FileFenceStore):
        def save(self, record: FenceRecord) -> None:
            raise OSError(28, "No space left on device")

    FenceBook(FileFenceStore(tmp_path)).commit(record(5))
    book = FenceBook(FullDisk(tmp_path))
    with pytest.raises(CoreError) as refused:
        book.commit(record(6))
    assert refused.value.reason is Reason.FENCE_NOT_DURABLE
    assert "No space left" in refused.value.message
    assert book.highest(UID) == 5


def test_a_damaged_record_refuses_every_command_of_its_cache(tmp_path: Path) -> None:
    book_at(tmp_path, record(5), record(3, uid="healthy"))
    path = tmp_path / f"{UID}.fence"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    reopened = FenceBook(FileFenceStore(tmp_path))
    with pytest.raises(CoreError) as refused:
        reopened.judge(UID, 99, CommandKind.APPLY, "a")
    assert refused.value.reason is Reason.FENCE_NOT_DURABLE
    assert reopened.highest("healthy") == 3


def test_commit_never_goes_back(tmp_path: Path) -> None:
    book = book_at(tmp_path, record(5))
    with pytest.raises(ValueError, match="commit of fence 5 at 5"):
        book.commit(record(5, content="b"))


def outcome_of(call: Callable[[], object]) -> object:
    """What the call returns, or the reason of its refusal."""
    try:
        return call()
    except CoreError as error:
        return error.reason


class FenceMachine(RuleBasedStateMachine):
    """Any order of commands, failures and restarts against a model that holds one number."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.fails = False
        machine = self

        class Flaky(FileFenceStore):
            def save(self, record: FenceRecord) -> None:
                if machine.fails:
                    raise OSError(5, "Input/output error")
                super().save(record)

        self.store = Flaky
        self.book = FenceBook(Flaky(Path(self.folder.name)))
        self.model: FenceRecord | None = None

    @rule(
        value=st.integers(1, 12),
        kind=st.sampled_from(CommandKind),
        content=st.sampled_from("ab"),
        fails=st.booleans(),
    )
    def command(self, value: int, kind: CommandKind, content: str, fails: bool) -> None:
        highest = self.model.value if self.model else 0
        used = (self.model.kind, self.model.content) if self.model else None
        judged = outcome_of(lambda: self.book.judge(UID, value, kind, content))
        if value < highest:
            assert judged is Reason.FENCE_STALE
        elif value == highest:
            assert judged is (Judgement.REPEAT if (kind, content) == used else Reason.FENCE_CONFLICT)
        else:
            assert judged is Judgement.ADVANCE
            self.fails = fails
            wanted = record(value, kind, content)
            committed = outcome_of(lambda: self.book.commit(wanted))
            self.fails = False
            assert committed is (Reason.FENCE_NOT_DURABLE if fails else None)
            self.model = self.model if fails else wanted

    @rule()
    def restart(self) -> None:
        self.book = FenceBook(self.store(Path(self.folder.name)))

    @invariant()
    def the_highest_is_the_acknowledged_one(self) -> None:
        assert self.book.highest(UID) == (self.model.value if self.model else 0)

    def teardown(self) -> None:
        self.folder.cleanup()


FenceMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestFenceMachine = FenceMachine.TestCase
