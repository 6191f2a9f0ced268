"""Finding and building the control plane, with a stand-in for the Go toolchain that counts its calls."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.cluster.kvtier_localplane.build import (
    KUBERNETES_VERSION,
    BuildError,
    ControlPlaneBinaries,
    build,
    cache_key,
    find_binaries,
)

FAKE_GO = """#!/bin/sh
echo "$@" >> "{log}"
case "$1" in
env) echo "${{FAKE_GO_VERSION:-go1.26.8}}" ;;
mod) ;;
list) printf 'a\\nb\\nc\\n' ;;
build)
  echo a >&2
  {trouble}
  while [ "$1" != -o ]; do shift; done
  printf '#!/bin/sh\\necho Kubernetes %s\\n' "{version}" > "$2"
  chmod 755 "$2" ;;
esac
"""


class Toolchain:
    """A folder with a `go` in it, and what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.log = folder / "go.log"
        self.log.touch()
        self.install()

    def install(self, *, trouble: str = ":", version: str = KUBERNETES_VERSION) -> None:
        go = self.bin / "go"
        go.write_text(FAKE_GO.format(log=self.log, trouble=trouble, version=version))
        go.chmod(0o755)

    def builds(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if line.startswith("build")]


@pytest.fixture
def toolchain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toolchain:
    made = Toolchain(tmp_path)
    monkeypatch.setenv("PATH", f"{made.bin}:/usr/bin:/bin")
    return made


@pytest.fixture
def module(tmp_path: Path) -> Path:
    folder = tmp_path / "module"
    folder.mkdir()
    for name in ("go.mod", "go.sum", "main.go"):
        (folder / name).write_text(name)
    return folder


def test_a_build_is_done_once_and_stamped(tmp_path: Path, toolchain: Toolchain, module: Path) -> None:
    said: list[str] = []
    first = build(tmp_path / "cache", module_dir=module, say=said.append)
    again = build(tmp_path / "cache", module_dir=module, say=said.append)
    assert first == again
    assert {path.name for path in first.iterdir()} == {"controlplane", "etcd", "kube-apiserver"}
    assert len(toolchain.builds()) == 1
    stamped = toolchain.builds()[0]
    assert f"version.gitVersion={KUBERNETES_VERSION}" in stamped
    assert "-trimpath" in stamped
    assert any("built in" in line for line in said)


def test_two_builders_compile_once(tmp_path: Path, toolchain: Toolchain, module: Path) -> None:
    go_on = tmp_path / "go-on"
    started = tmp_path / "started"
    toolchain.install(trouble=f"touch {started}; while [ ! -e {go_on} ]; do sleep 0.02; done")
    waiting = threading.Event()
    results: list[Path] = []

    def builder() -> None:
        results.append(
            build(
                tmp_path / "cache",
                module_dir=module,
                say=lambda line: waiting.set() if "another build" in line else None,
            )
        )

    threads = [threading.Thread(target=builder) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert waiting.wait(20)
    go_on.touch()
    for thread in threads:
        thread.join(20)
    assert started.exists()
    assert len(results) == 2
    assert results[0] == results[1]
    assert len(toolchain.builds()) == 1


@pytest.mark.parametrize(
    "trouble, version, message",
    [
        pytest.param(
            "echo no space left >&2; exit 1", KUBERNETES_VERSION, "no space left", id="compiler-fails"
        ),
        pytest.param(":", "v0.0.0", "calls itself 'Kubernetes v0.0.0'", id="stamp-is-missing"),
    ],
)
def test_a_failed_build_leaves_nothing_that_looks_finished(
    tmp_path: Path, toolchain: Toolchain, module: Path, trouble: str, version: str, message: str
) -> None:
    toolchain.install(trouble=trouble, version=version)
    with pytest.raises(BuildError, match=message):
        build(tmp_path / "cache", module_dir=module, say=lambda _: None)
    assert [path.name for path in (tmp_path / "cache").iterdir() if not path.name.startswith(".lock")] == []
    toolchain.install()
    assert (build(tmp_path / "cache", module_dir=module, say=lambda _: None) / "etcd").exists()


def test_the_key_follows_sources_and_toolchain(module: Path) -> None:
    keys = {cache_key(module, "go1.26.8"), cache_key(module, "go1.27.0")}
    (module / "go.sum").write_text("changed")
    keys.add(cache_key(module, "go1.26.8"))
    assert len(keys) == 3


def test_assets_of_the_user_come_first(tmp_path: Path, toolchain: Toolchain, module: Path) -> None:
    assets = tmp_path / "assets"
    assets.mkdir()
    for name in ("etcd", "kube-apiserver"):
        (assets / name).touch(mode=0o755)
    environ = {"KUBEBUILDER_ASSETS": str(assets), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    found = find_binaries(environ, module_dir=module, say=lambda _: None)
    assert found == ControlPlaneBinaries(assets / "etcd", assets / "kube-apiserver", "assets")
    assert toolchain.log.read_text() == ""

    (assets / "etcd").unlink()
    said: list[str] = []
    found = find_binaries(environ, module_dir=module, say=said.append)
    assert found.origin == "built"
    assert found.etcd.is_relative_to(tmp_path / "cache" / "kvtier" / "controlplane")
    assert "lacks etcd or kube-apiserver" in said[0]


def test_a_go_that_is_too_old_is_named(
    tmp_path: Path, toolchain: Toolchain, module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_GO_VERSION", "go1.25.9")
    with pytest.raises(BuildError, match=r"go1\.25\.9 is installed; the control plane needs Go 1\.26"):
        build(tmp_path / "cache", module_dir=module, say=lambda _: None)
    assert toolchain.builds() == []


def test_without_go_the_message_says_what_to_do(
    tmp_path: Path, module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"install Go 1\.26 or later, or set KUBEBUILDER_ASSETS"):
        build(tmp_path / "cache", module_dir=module, say=lambda _: None)
