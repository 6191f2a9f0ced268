"""A program says who asks: when it is asked again, how often at most, and what becomes of one that hangs."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kvtier_operator.execlogin import EARLY_SECONDS, MAX_BYTES, PAUSE_SECONDS, VERSIONS, ExecLogin, LoginError

NOW = 1_800_000_000.0
PATIENCE = 60.0


@dataclass
class Program:
    """Gives one credential after the other, each for `lives` seconds of `wall`, and counts its runs."""

    folder: Path
    wall: float = NOW
    steady: float = 100.0
    lives: float = 3600.0
    body: str = ""

    @property
    def runs(self) -> int:
        path = self.folder / "runs"
        return int(path.read_text(encoding="utf-8")) if path.exists() else 0

    def writes(self, **status: Any) -> str:
        """A body that does; `$n` in a value is the number of the run."""
        credential = {"apiVersion": VERSIONS[0], "kind": "ExecCredential", "status": status}
        return "cat <<END\n" + json.dumps(credential) + "\nEND\n"

    def install(self) -> None:
        body = self.body or self.writes(token="t$n", expirationTimestamp=at(self.wall + self.lives))
        script = "#!/bin/sh\nn=$(($(cat runs 2>/dev/null || echo 0) + 1)); echo $n > runs\n"
        path = self.folder / "log-in"
        path.write_text(f"{script.replace('runs', str(self.folder / 'runs'))}{body}", encoding="utf-8")
        path.chmod(0o755)

    def login(self, *, seconds: float = PATIENCE, **config: Any) -> ExecLogin:
        self.install()
        return ExecLogin(
            {"apiVersion": VERSIONS[0], "command": "./log-in", **config},
            self.folder,
            {"server": "https://here", "certificate-authority": "ca.crt"},
            seconds=seconds,
            now=lambda: self.wall,
            monotonic=lambda: self.steady,
        )

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds
        self.install()


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


def at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_it_is_asked_again_when_what_it_gave_has_ended(program: Program) -> None:
    login = program.login()
    assert login() == ""
    await login.ready()
    assert login() == "Bearer t1"
    program.passes(3600 - EARLY_SECONDS - 1)
    await login.ready()
    assert (login(), program.runs) == ("Bearer t1", 1)
    program.passes(EARLY_SECONDS + 1)
    await login.ready()
    assert (login(), program.runs) == ("Bearer t2", 2)


async def test_shortly_before_its_end_nobody_waits_for_the_next_one(program: Program) -> None:
    login = program.login()
    await login.ready()
    program.body = f"while [ ! -e {program.folder / 'go'} ]; do sleep 0.01; done\n" + program.writes(
        token="new"
    )
    program.passes(3600 - EARLY_SECONDS)
    for _ in range(3):
        await login.ready()
    assert login() == "Bearer t1"
    (program.folder / "go").touch()
    await until(lambda: login() == "Bearer new")
    assert program.runs == 2


async def test_all_who_ask_at_once_share_a_run(program: Program) -> None:
    login = program.login()
    await asyncio.gather(*(login.ready() for _ in range(20)))
    assert program.runs == 1


async def test_a_credential_without_an_end_is_renewed_when_it_is_refused(program: Program) -> None:
    program.body = program.writes(token="t$n")
    login = program.login()
    await login.ready()
    program.passes(10 * 24 * 3600)
    await login.ready()
    assert login() == "Bearer t1"
    login.forget()
    await login.ready()
    assert login() == "Bearer t2"


async def test_one_that_goes_on_being_refused_is_asked_for_at_a_pace(program: Program) -> None:
    login = program.login()
    for _ in range(10):
        await login.ready()
        login.forget()
    assert program.runs == 1
    program.passes(PAUSE_SECONDS)
    for _ in range(10):
        await login.ready()
        login.forget()
    assert program.runs == 2


async def test_a_failure_is_told_to_all_and_tried_again_at_a_pace(program: Program) -> None:
    program.body = "echo 'no ticket' >&2; exit 7"
    login = program.login()
    for _ in range(5):
        with pytest.raises(LoginError, match="ended with status 7: no ticket"):
            await login.ready()
    assert program.runs == 1
    program.body = ""
    program.passes(PAUSE_SECONDS)
    await login.ready()
    assert login() == "Bearer t2"


async def test_while_the_old_one_serves_a_failure_stops_nobody(program: Program) -> None:
    login = program.login()
    await login.ready()
    program.body = "exit 1"
    program.passes(3600 - EARLY_SECONDS)
    await login.ready()
    await until(lambda: program.runs == 2)
    await until(lambda: login._run is None)
    await login.ready()
    assert login() == "Bearer t1"
    program.passes(EARLY_SECONDS)
    with pytest.raises(LoginError, match="status 1"):
        await login.ready()


async def test_who_gives_up_leaves_the_run_to_the_others(program: Program) -> None:
    program.body = f"while [ ! -e {program.folder / 'go'} ]; do sleep 0.01; done\n" + program.writes(
        token="t"
    )
    login = program.login()
    hasty, patient = (asyncio.create_task(login.ready()) for _ in range(2))
    await until(lambda: program.runs == 1)
    hasty.cancel()
    (program.folder / "go").touch()
    await patient
    assert login() == "Bearer t"
    assert program.runs == 1


async def test_a_program_that_hangs_is_ended_with_all_that_it_started(program: Program) -> None:
    pids = program.folder / "pids"
    program.body = f"sleep 900 & echo $! > {pids}.new; mv {pids}.new {pids}; sleep 900"
    login = program.login()
    asking = asyncio.create_task(login.ready())
    await until(pids.exists)
    await asyncio.wait_for(login.close(), PATIENCE)
    with pytest.raises(asyncio.CancelledError):
        await asking
    child = int(pids.read_text(encoding="utf-8"))
    await until(lambda: ended(child))


async def test_a_program_that_has_only_just_started_is_ended_with_all_that_it_started(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids, real = program.folder / "pids", asyncio.create_subprocess_exec
    program.body = f"sleep 900 & echo $! > {pids}.new; mv {pids}.new {pids}; sleep 900"
    closing = asyncio.Event()

    async def slowly(*words: Any, **options: Any) -> Any:
        made = await real(*words, **options)
        await closing.wait()
        return made

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slowly)
    login = program.login()
    asking = asyncio.create_task(login.ready())
    await until(pids.exists)
    ending = asyncio.create_task(login.close())
    await asyncio.sleep(0)
    closing.set()
    await asyncio.wait_for(ending, PATIENCE)
    with pytest.raises(asyncio.CancelledError):
        await asking
    child = int(pids.read_text(encoding="utf-8"))
    await until(lambda: ended(child))


def ended(pid: int) -> bool:
    """Or nobody has asked yet how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def test_a_run_has_a_deadline(program: Program) -> None:
    program.body = "sleep 900"
    with pytest.raises(LoginError, match=r"gave no credential within 0\.05 s"):
        await program.login(seconds=0.05).ready()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        pytest.param("echo '<html>'", "wrote no ExecCredential", id="no-json"),
        pytest.param("echo '[1]'", "wrote no ExecCredential", id="no-object"),
        pytest.param("echo '{}'", "wrote no ExecCredential", id="empty"),
        pytest.param(
            """echo '{"apiVersion": "v2", "status": {"token": "x"}}'""", "of v2, not of", id="version"
        ),
        pytest.param("WRITES:{}", "neither a token nor a certificate", id="nothing"),
        pytest.param('WRITES:{"clientCertificateData": "c"}', "certificate with its key", id="no-key"),
        pytest.param(
            'WRITES:{"token": "secret", "expirationTimestamp": "2020-01-01T00:00:00Z"}',
            "had ended at 2020-01-01T00:00:00Z",
            id="over",
        ),
        pytest.param(
            'WRITES:{"token": "secret", "expirationTimestamp": "soon"}', "no ExecCredential", id="no-time"
        ),
        pytest.param(f"head -c {MAX_BYTES + 10} /dev/zero", "wrote more than", id="too-much"),
    ],
)
async def test_what_is_no_credential_is_said_without_it(program: Program, body: str, said: str) -> None:
    wanted = body.removeprefix("WRITES:")
    program.body = program.writes(**json.loads(wanted)) if wanted != body else body
    with pytest.raises(LoginError, match=said) as caught:
        await program.login().ready()
    assert "secret" not in str(caught.value)


async def test_a_program_that_is_not_there_is_said_with_the_hint(program: Program) -> None:
    login = program.login(command="no-such-program-here", installHint="install it from the shelf")
    with pytest.raises(LoginError, match=r"no-such-program-here: No such file.*install it from the shelf"):
        await login.ready()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        pytest.param({"apiVersion": "client.authentication.k8s.io/v9"}, "v9", id="version"),
        pytest.param({"command": ""}, "exec.command is missing", id="no-command"),
        pytest.param({"interactiveMode": "Always"}, "wants to ask a person", id="asks-a-person"),
    ],
)
def test_what_cannot_be_run_is_said_at_once(program: Program, config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        program.login(**config)


async def test_it_is_told_what_it_asks_for(program: Program) -> None:
    """As kubectl tells it: the environment, and the cluster where it wants to know."""
    (program.folder / "ca.crt").write_text("pem", encoding="utf-8")
    told = program.folder / "told"
    program.body = f'echo "$KUBERNETES_EXEC_INFO" > {told}\n' + program.writes(token="$WHO-$1")
    login = program.login(
        args=["dev"], env=[{"name": "WHO", "value": "me"}], provideClusterInfo=True, interactiveMode="Never"
    )
    await login.ready()
    assert login() == "Bearer me-dev"
    info = json.loads(told.read_text(encoding="utf-8"))
    assert (info["apiVersion"], info["kind"]) == (VERSIONS[0], "ExecCredential")
    assert info["spec"] == {
        "interactive": False,
        "cluster": {
            "server": "https://here",
            "certificate-authority-data": base64.b64encode(b"pem").decode(),
        },
    }


async def test_a_certificate_with_its_key_will_do(program: Program) -> None:
    program.body = program.writes(clientCertificateData="c$n", clientKeyData="k")
    login = program.login()
    await login.ready()
    assert (login(), login.credential.certificate, login.credential.key) == ("", b"c1", b"k")
    assert "b'k'" not in repr(login.credential)
