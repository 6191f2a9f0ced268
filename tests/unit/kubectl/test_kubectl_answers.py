"""What becomes of a command where the API server, a proxy before it or the kubeconfig is not as it should be:
one line that says so, and its exit status."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kubectl_kvtier import cluster, kubeconfig
from kubectl_kvtier.cli import main
from kubectl_kvtier.outcomes import Exit
from kvtier_operator import execlogin
from tests.unit.kubectl.kubectl_samples import document

Answer = Callable[[BaseHTTPRequestHandler], None]
FORBIDDEN = 'kvrollouts.kvtier.dev "x" is forbidden: User "u" cannot get resource'


def whole(body: bytes, status: int = 200) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def refused(status: int, message: str, **details: str) -> Answer:
    return whole(json.dumps({"kind": "Status", "message": message, "details": details}).encode(), status)


def broken_off(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "5000")
    handler.end_headers()
    handler.wfile.write(b'{"a":')


@contextmanager
def serving(answer: Answer, folder: Path) -> Iterator[str]:
    """The kubeconfig of a server that answers so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        do_PATCH = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "serving"}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "current-context": "x",
        }
        path = folder / "config"
        path.write_text(json.dumps(config), encoding="utf-8")
        yield str(path)
        server.shutdown()


@pytest.mark.parametrize(
    "answer,status,said",
    [
        (refused(403, FORBIDDEN, name="x", kind="kvrollouts"), Exit.FAILED, "is forbidden"),
        (refused(401, "Unauthorized"), Exit.FAILED, "Unauthorized"),
        (refused(404, 'kvrollouts.kvtier.dev "x" not found', name="x"), Exit.NOT_FOUND, '"x" not found'),
        (whole(b"404 page not found\n", 404), Exit.FAILED, "are its CRDs installed?"),
        (refused(404, "the server could not find the requested resource"), Exit.FAILED, "are its CRDs"),
        (whole(b"<html>log in</html>"), Exit.FAILED, "this is no API server, it answered '<html>log in"),
        (whole(b"[1]"), Exit.FAILED, "this is no API server, it answered list"),
        (broken_off, Exit.FAILED, "no answer from the API server: "),
        (whole(b"no gateway", 502), Exit.FAILED, "no gateway"),
    ],
    ids=["forbidden", "unauthorized", "missing", "no-group", "no-kind", "html", "list", "cut", "proxy"],
)
def test_an_answer_of_no_is_one_line(
    answer: Answer, status: Exit, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(answer, tmp_path) as config:
        assert main(["explain", "x", "--kubeconfig", config]) == status
    told = capsys.readouterr()
    assert told.out == "" and said in told.err and told.err.count("\n") <= 2


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        pytest.param(["promote", "quest-on-chat"], "resourceVersion", id="promote"),
        pytest.param(["abort", "quest-on-chat"], "resourceVersion", id="abort"),
        pytest.param(["abort", "quest-on-chat"], "uid", id="abort-by-uid"),
        pytest.param(["status", "quest-on-chat", "-w"], "resourceVersion", id="watch"),
    ],
)
def test_an_object_that_no_server_stores_is_one_line(
    words: list[str], missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = document()
    del half["metadata"][missing]

    def answer(handler: BaseHTTPRequestHandler) -> None:
        listed = "/kvnodes" in handler.path
        whole(b'{"metadata": {}, "items": []}' if listed else json.dumps(half).encode())(handler)

    with serving(answer, tmp_path) as config:
        assert main([*words, "--kubeconfig", config]) == Exit.FAILED
    told = capsys.readouterr().err
    assert f"KVRollout quest-on-chat came without metadata.{missing}" in told and told.count("\n") == 1


def test_a_list_that_is_none_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(whole(b'{"kind": "KVRolloutList"}'), tmp_path) as config:
        assert main(["status", "--kubeconfig", config]) == Exit.FAILED
    told = capsys.readouterr().err
    assert "this is no API server, it answered no list" in told and told.count("\n") == 1


def test_a_server_that_answers_half_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    over = threading.Event()

    def half(handler: BaseHTTPRequestHandler) -> None:
        broken_off(handler)
        over.wait(60)

    with serving(half, tmp_path) as config:
        ended = main(["explain", "x", "--kubeconfig", config, "--request-timeout", "0.5"])
        over.set()
    assert ended == Exit.FAILED and "no answer from the API server: timed out" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["cut", "expired"])
def test_a_watch_that_ends_is_begun_anew(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "PAUSE_SECONDS", 0.0)
    seen: list[str] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        seen.append(handler.path)
        if "watch=true" in handler.path:
            broken = {"type": "ERROR", "object": {"kind": "Status", "code": 410}}
            (broken_off if how == "cut" else whole(json.dumps(broken).encode() + b"\n"))(handler)
        elif "/kvnodes" in handler.path:
            whole(b'{"metadata": {}, "items": []}')(handler)
        else:
            watches = sum("watch=true" in path for path in seen)
            whole(json.dumps(completed() if watches > 1 else document()).encode())(handler)

    with serving(answer, tmp_path) as config:
        ended = main(["status", "quest-on-chat", "-w", "-o", "json", "--kubeconfig", config])
    assert ended == Exit.OK
    told = capsys.readouterr().out
    # One document at each change: none where a new watch begins with what was seen; and no end before the
    # rollout's.
    assert told.count('"phase": "Progressing"') == 1 == told.count('"phase": "Completed"')
    assert told.index("Progressing") < told.index('"phase": "Completed"')


def completed() -> dict[str, Any]:
    made = document(phase="Completed", stage="Full")
    made["metadata"]["resourceVersion"] = "8"
    return made


@pytest.mark.parametrize("back", [True, False], ids=["comes-back", "stays-away"])
def test_a_watch_outlives_an_api_server_that_is_away_for_a_while(
    back: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(cluster, "PATIENCE_SECONDS", 60.0 if back else 0.0)
    away: list[str] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if "/kvnodes" in handler.path:
            whole(b'{"metadata": {}, "items": []}')(handler)
        elif "watch=true" in handler.path or (away and (len(away) < 4 or not back)):
            away.append(handler.path)
            refused(503, "starting")(handler)
        else:
            whole(json.dumps(completed() if away else document()).encode())(handler)

    with serving(answer, tmp_path) as config:
        ended = main(["status", "quest-on-chat", "-w", "--kubeconfig", config])
    told = capsys.readouterr()
    assert ended == (Exit.OK if back else Exit.FAILED)
    assert ("is complete" in told.out) is back and ("starting" in told.err) is not back


def test_an_intent_that_was_written_is_told_though_its_answer_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[str] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if handler.command == "PATCH":
            written.append(handler.path)
        lost = bool(written) and handler.command == "GET"
        (refused(503, "shutting down") if lost else whole(json.dumps(document()).encode()))(handler)

    with serving(answer, tmp_path) as config:
        assert main(["pause", "quest-on-chat", "--kubeconfig", config]) == Exit.FAILED
    told = capsys.readouterr().err
    assert "the intent is written as seq 1; " in told and "shutting down" in told


@pytest.mark.parametrize("name", ["", "a/b", "../kvcaches/chat"])
def test_what_is_no_name_is_not_asked_for(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(whole(json.dumps(document()).encode()), tmp_path) as config:
        assert main(["explain", name, "--kubeconfig", config]) == Exit.USAGE
    assert "is no name of an object" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("x", "-A"), ("-w",)], ids=["name-and-all", "watch-of-all"])
def test_what_would_be_ignored_is_refused(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(whole(json.dumps(document()).encode()), tmp_path) as config:
        assert main(["status", *words, "--kubeconfig", config]) == Exit.USAGE
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("text", ["", "word", "foo: [", "contexts: 3"], ids=["empty", "word", "yaml", "int"])
def test_a_file_that_is_no_kubeconfig_is_told(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config"
    path.write_text(text, encoding="utf-8")
    assert main(["status", "--kubeconfig", str(path)]) == Exit.FAILED
    told = capsys.readouterr().err
    assert "no cluster: " in told and told.count("\n") == 1


def test_in_a_pod_its_own_namespace_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubeconfig, "SERVICE_ACCOUNT_NAMESPACE", tmp_path / "namespace")
    assert kubeconfig._own_namespace() == "default"
    (tmp_path / "namespace").write_text("serving\n", encoding="utf-8")
    assert kubeconfig._own_namespace() == "serving"


def logging_in(config: str, folder: Path, body: str) -> None:
    """The kubeconfig's user is who this program says; it may count its runs as $n."""
    program = folder / "log-in"
    program.write_text(
        'n=$(($(cat "$0.runs" 2>/dev/null || echo 0) + 1)); echo $n > "$0.runs"\n' + body, encoding="utf-8"
    )
    known = json.loads(Path(config).read_text(encoding="utf-8"))
    known["users"][0]["user"] = {
        "exec": {"apiVersion": execlogin.VERSIONS[0], "command": "sh", "args": [str(program)]}
    }
    Path(config).write_text(json.dumps(known), encoding="utf-8")


TOKEN = f"""echo '{{"apiVersion": "{execlogin.VERSIONS[0]}", "status": {{"token": "'t$n'"}}}}'"""


def test_who_is_not_believed_any_more_logs_in_anew_and_is_heard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execlogin, "PAUSE_SECONDS", 0.0)
    seen: list[tuple[str, str]] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        seen.append((handler.command, str(handler.headers["Authorization"])))
        # The token is taken back between the two requests of one command.
        ended = handler.command == "PATCH" and seen[-1][1] == "Bearer t1"
        (refused(401, "Unauthorized") if ended else whole(json.dumps(document()).encode()))(handler)

    with serving(answer, tmp_path) as config:
        logging_in(config, tmp_path, TOKEN)
        assert main(["pause", "quest-on-chat", "--no-wait", "--kubeconfig", config]) == Exit.OK
    assert seen == [("GET", "Bearer t1"), ("PATCH", "Bearer t1"), ("PATCH", "Bearer t2")]
    assert "Pause seq 1 written" in capsys.readouterr().out


def test_who_is_never_believed_is_told_so_after_two_tries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execlogin, "PAUSE_SECONDS", 0.0)
    seen: list[str] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        seen.append(str(handler.headers["Authorization"]))
        refused(401, "Unauthorized")(handler)

    with serving(answer, tmp_path) as config:
        logging_in(config, tmp_path, TOKEN)
        assert main(["explain", "quest-on-chat", "--kubeconfig", config]) == Exit.FAILED
    assert seen == ["Bearer t1", "Bearer t2"]
    assert "Unauthorized" in capsys.readouterr().err


def test_a_program_that_cannot_log_in_is_told_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(whole(json.dumps(document()).encode()), tmp_path) as config:
        logging_in(config, tmp_path, "echo 'who are you?' >&2; exit 3")
        assert main(["explain", "quest-on-chat", "--kubeconfig", config]) == Exit.FAILED
    told = capsys.readouterr().err
    assert "no cluster: not logged in: sh ended with status 3: who are you?" in told
    assert told.count("\n") == 1
