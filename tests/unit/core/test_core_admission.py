"""Admission as the specification's numbers say: C10.01 to C10.08, the seven fallbacks, F18."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from kvtier_core.admission import (
    UNAVAILABLE,
    Admission,
    AdmissionPolicy,
    AdmissionReason,
    Budget,
    Fallback,
    FallbackChoice,
    FreeCredits,
    LinkModel,
    OffloadDemand,
    TransferRequest,
    admit,
    choose_fallback,
    ordered,
    refuse_offload,
)
from kvtier_core.credits import PINNED, QUEUE, STAGING, Ledger, Limit, LinkStage, Unit, link
from kvtier_core.errors import CoreError, Reason

MS = 1e-3
FREE = FreeCredits(Budget(16384, 4096), Budget(32768, 20480), Budget(16384, 6144), Budget(4, 2))
LINK = LinkModel(0.2 * MS, 0.1 * MS, 4096 / MS, 0.3 * MS)


def request(
    name: str, unit: bytes, size: int, deadline: float, *, exact: bool, numa: bool
) -> TransferRequest:
    return TransferRequest(name, unit, size, size, deadline * MS, LINK.seconds(size, numa_remote=numa), exact)


ARRIVED = [
    request("alpha", b"u1", 4096, 6.0, exact=True, numa=False),
    request("gamma", b"u2", 6144, 2.0, exact=False, numa=False),
    request("beta", b"u1", 4096, 2.5, exact=True, numa=True),
    request("delta", b"u3", 8192, 1.5, exact=True, numa=False),
]
FIFO, EDF, EDC = AdmissionPolicy


def test_c10_01_free_credits() -> None:
    free = [FREE.pinned.free, FREE.staging.free, FREE.link.free, FREE.queue.free]
    assert free == [12288, 12288, 10240, 2]


@pytest.mark.parametrize(
    ("total", "taken"), [pytest.param(4, 5, id="n10-13-to-15"), pytest.param(4, -1, id="negative")]
)
def test_more_taken_than_there_is_is_no_budget(total: int, taken: int) -> None:
    with pytest.raises(CoreError) as refused:
        Budget(total, taken)
    assert refused.value.reason is Reason.BAD_ARGUMENT


def test_c10_02_estimates() -> None:
    assert [one.estimate / MS for one in ARRIVED] == pytest.approx([1.3, 1.8, 1.6, 2.3], abs=1e-9)
    with pytest.raises(CoreError):
        LinkModel(0, 0, 0.0, 0).seconds(1, numa_remote=False)


@pytest.mark.parametrize(
    ("policy", "admitted", "backend", "staging", "refused"),
    [
        pytest.param(
            FIFO,
            ("alpha", "gamma"),
            10240,
            10240,
            {"beta": AdmissionReason.QUEUE_FULL, "delta": AdmissionReason.DEADLINE},
            id="c10.03-fifo",
        ),
        pytest.param(
            EDF,
            ("gamma", "beta"),
            10240,
            10240,
            {"alpha": AdmissionReason.QUEUE_FULL, "delta": AdmissionReason.DEADLINE},
            id="c10.04-edf",
        ),
        pytest.param(
            EDC,
            ("beta", "alpha"),
            4096,
            8192,
            {"gamma": AdmissionReason.QUEUE_FULL, "delta": AdmissionReason.DEADLINE},
            id="c10.05-coalescing",
        ),
    ],
)
def test_c10_03_to_05_admitted_sets(
    policy: AdmissionPolicy,
    admitted: tuple[str, ...],
    backend: int,
    staging: int,
    refused: dict[str, AdmissionReason],
) -> None:
    got = admit(policy, ARRIVED, FREE)
    assert (got.admitted, got.backend_bytes, got.staging_bytes) == (admitted, backend, staging)
    assert dict(got.refused) == refused


def test_c10_06_coalescing_saves_backend_bytes_and_no_staging() -> None:
    got = admit(EDC, ARRIVED, FREE)
    assert (8192 - got.backend_bytes, got.staging_bytes) == (4096, 8192)


@pytest.mark.parametrize("policy", list(AdmissionPolicy))
def test_what_is_admitted_the_ledger_grants(policy: AdmissionPolicy) -> None:
    """The pure decision and the ledger charge alike, unit by unit (C10.03 to C10.06)."""
    read = link(LinkStage.STORAGE_READ)
    ledger = Ledger({PINNED: Limit(12288), STAGING: Limit(12288), read: Limit(10240), QUEUE: Limit(2)})
    by_id = {one.id: one for one in ARRIVED}
    got = admit(policy, ARRIVED, FREE)
    for name in got.admitted:
        one = by_id[name]
        key = one.unit if policy is EDC else one.unit + name.encode()
        ledger.acquire(
            {STAGING: one.staging_bytes, QUEUE: 1},
            1,
            unit=Unit(key, {PINNED: one.backend_bytes, read: one.backend_bytes}),
        )
    assert ledger.granted(PINNED) == ledger.granted(read) == got.backend_bytes
    assert (ledger.granted(STAGING), ledger.granted(QUEUE)) == (got.staging_bytes, len(got.admitted))


def test_c10_07_delta_cannot_be_fetched_in_time_but_recomputed() -> None:
    delta = ARRIVED[3]
    assert delta.estimate > delta.deadline
    assert (
        choose_fallback(FallbackChoice(slack=delta.deadline, recompute=0.8 * MS)) is Fallback.RECOMPUTE_EXACT
    )


@pytest.mark.parametrize(
    ("policy", "name", "recompute", "retry", "action"),
    [
        pytest.param(FIFO, "beta", 9, 1.0, Fallback.POSTPONE_FOR_EXACT_RETRY, id="fifo-beta"),
        pytest.param(EDF, "alpha", 9, 1.0, Fallback.POSTPONE_FOR_EXACT_RETRY, id="edf-alpha"),
        pytest.param(EDC, "gamma", 9, UNAVAILABLE, Fallback.ACCEPT_DECLARED_DEGRADED, id="edc-gamma"),
        pytest.param(FIFO, "delta", 0.8, UNAVAILABLE, Fallback.RECOMPUTE_EXACT, id="fifo-delta"),
        pytest.param(EDF, "delta", 0.8, UNAVAILABLE, Fallback.RECOMPUTE_EXACT, id="edf-delta"),
        pytest.param(EDC, "delta", 0.8, UNAVAILABLE, Fallback.RECOMPUTE_EXACT, id="edc-delta"),
    ],
)
def test_c10_08_what_the_others_do(
    policy: AdmissionPolicy, name: str, recompute: float, retry: float, action: Fallback
) -> None:
    assert name in dict(admit(policy, ARRIVED, FREE).refused)
    one = next(item for item in ARRIVED if item.id == name)
    choice = FallbackChoice(
        slack=one.deadline,
        recompute=recompute * MS,
        retry=retry * MS,
        exact=one.exact,
        approximation_allowed=not one.exact,
    )
    assert choose_fallback(choice) is action


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"staging_bytes": 12289}, AdmissionReason.CREDIT_PRESSURE, id="n10-21-staging"),
        pytest.param(
            {"backend_bytes": 10241}, AdmissionReason.CREDIT_PRESSURE, id="n10-20-link-below-pinned"
        ),
        pytest.param({"deadline": 1.2 * MS}, AdmissionReason.DEADLINE, id="n10-26-late"),
        pytest.param({"deadline": -1.0}, AdmissionReason.DEADLINE, id="n10-25-past"),
    ],
)
def test_one_request_that_does_not_fit(change: dict[str, float], reason: AdmissionReason) -> None:
    alpha = ARRIVED[0]
    assert admit(FIFO, [alpha], FREE).admitted == ("alpha",)
    got = admit(FIFO, [replace(alpha, **change)], FREE)  # type: ignore[arg-type]
    assert got == Admission((), 0, 0, (("alpha", reason),))


@pytest.mark.parametrize(
    "requests",
    [
        pytest.param([ARRIVED[0], ARRIVED[0]], id="n10-27-twice"),
        pytest.param([replace(ARRIVED[0], backend_bytes=-1)], id="n10-12-negative"),
        pytest.param([replace(ARRIVED[0], staging_bytes=-1)], id="negative-staging"),
    ],
)
def test_requests_make_sense(requests: list[TransferRequest]) -> None:
    with pytest.raises(CoreError) as refused:
        admit(FIFO, requests, FREE)
    assert refused.value.reason is Reason.BAD_ARGUMENT


def test_orders_of_the_three_policies() -> None:
    names = [[one.id for one in ordered(policy, ARRIVED)] for policy in AdmissionPolicy]
    assert names == [
        ["alpha", "gamma", "beta", "delta"],
        ["delta", "gamma", "beta", "alpha"],
        ["delta", "beta", "alpha", "gamma"],
    ]


def test_fifo_and_edf_charge_a_shared_unit_twice() -> None:
    """N.10.34: only the third policy coalesces."""
    shared = [replace(ARRIVED[0], id=name) for name in "ab"]
    assert [admit(policy, shared, FREE).backend_bytes for policy in AdmissionPolicy] == [8192, 8192, 4096]


# B.8.

BASE = FallbackChoice(
    slack=5,
    fetch=9,
    recompute=9,
    exact=False,
    approximation_allowed=True,
    uncertain=False,
    widened=False,
    can_widen=True,
)


@pytest.mark.parametrize(
    ("change", "action"),
    [
        pytest.param({}, Fallback.ACCEPT_APPROXIMATE, id="1"),
        pytest.param({"uncertain": True}, Fallback.WIDEN_SEARCH, id="2"),
        pytest.param({"uncertain": True, "widened": True, "fetch": 4}, Fallback.FULL_EXACT_FETCH, id="3"),
        pytest.param({"uncertain": True, "widened": True, "recompute": 4}, Fallback.RECOMPUTE_EXACT, id="4"),
        pytest.param({"exact": True, "retry": 3}, Fallback.POSTPONE_FOR_EXACT_RETRY, id="5"),
        pytest.param({"uncertain": True, "widened": True}, Fallback.ACCEPT_DECLARED_DEGRADED, id="6"),
        pytest.param({"exact": True}, Fallback.REJECT_NO_LEGAL_PATH, id="7"),
    ],
)
def test_c9_17_each_fallback_is_reached(change: dict[str, float], action: Fallback) -> None:
    assert choose_fallback(replace(BASE, **change)) is action  # type: ignore[arg-type]


def test_c9_18_an_exact_request_never_publishes_what_is_approximate() -> None:
    cases = list(
        itertools.product(
            (False, True),
            (False, True),
            (False, True),
            (4, 9),
            (4, 9),
            (3, UNAVAILABLE),
            (False, True),
            (False, True),
        )
    )
    assert len(cases) == 256
    for exact, widened, can_widen, fetch, recompute, retry, allowed, uncertain in cases:
        action = choose_fallback(
            FallbackChoice(5, fetch, recompute, retry, exact, allowed, uncertain, widened, can_widen)
        )
        if exact or not allowed:
            assert action not in (Fallback.ACCEPT_APPROXIMATE, Fallback.ACCEPT_DECLARED_DEGRADED)
        if widened or exact:
            assert action is not Fallback.WIDEN_SEARCH


# F18.

NEED = OffloadDemand(60, 70, 20, 10.0, 5.0, 2)
HAVE = OffloadDemand(64, 100, 32, 24.0, 20.0, 4)


def test_vg_01_the_base_is_admitted() -> None:
    refuse_offload(NEED, HAVE, support_recoverable=True)


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        pytest.param("gpu_bytes", Reason.NO_DESTINATION_CAPACITY, id="gpu"),
        pytest.param("host_bytes", Reason.NO_DESTINATION_CAPACITY, id="host"),
        pytest.param("pinned_bytes", Reason.ADMISSION_PINNED, id="n3-21-pinned"),
        pytest.param("h2d_bytes_per_second", Reason.CREDIT_PRESSURE, id="h2d"),
        pytest.param("d2h_bytes_per_second", Reason.CREDIT_PRESSURE, id="d2h"),
        pytest.param("jobs", Reason.QUEUE_FULL, id="jobs"),
        pytest.param(None, Reason.SUPPORT_GAP, id="support"),
    ],
)
def test_vg_01_each_single_violation_is_refused(field: str | None, reason: Reason) -> None:
    need = NEED if field is None else replace(NEED, **{field: getattr(HAVE, field) + 1})
    with pytest.raises(CoreError) as refused:
        refuse_offload(need, HAVE, support_recoverable=field is not None)
    assert refused.value.reason is reason
