"""Whose certificate may command an agent, by the names that TLS has verified."""

from __future__ import annotations

import pytest

from kvtier_agent.caller import OperatorOnly
from kvtier_core.errors import CoreError, Reason


class Peer:
    def __init__(self, **names: list[bytes]) -> None:
        self._names = names

    def auth_context(self) -> dict[str, list[bytes]]:
        return self._names


@pytest.mark.parametrize(
    "peer",
    [
        Peer(x509_common_name=[b"kvtier-operator"]),
        Peer(x509_common_name=[b"x"], x509_subject_alternative_name=[b"a.example", b"kvtier-operator"]),
    ],
    ids=["common-name", "dns-name"],
)
def test_the_operator_is_admitted(peer: Peer) -> None:
    OperatorOnly("kvtier-operator")(peer)


@pytest.mark.parametrize(
    ("peer", "says"),
    [
        pytest.param(Peer(), "no name", id="no-certificate"),
        pytest.param(Peer(x509_common_name=[b"node-b"]), "'node-b'", id="another-agent"),
        pytest.param(Peer(x509_common_name=[b"kvtier-operator-2"]), "'kvtier-operator-2'", id="prefix"),
        pytest.param(Peer(x509_common_name=[b"KVTIER-OPERATOR"]), "'KVTIER-OPERATOR'", id="case"),
        pytest.param(Peer(transport_security_type=[b"kvtier-operator"]), "no name", id="another-property"),
        pytest.param(Peer(x509_common_name=[b"\xff"]), "'\N{REPLACEMENT CHARACTER}'", id="not-utf-8"),
    ],
)
def test_others_are_refused_by_name(peer: Peer, says: str) -> None:
    with pytest.raises(CoreError) as refused:
        OperatorOnly("kvtier-operator")(peer)
    assert refused.value.reason is Reason.CALLER_NOT_OPERATOR
    assert says in refused.value.message
