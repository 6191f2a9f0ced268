"""Finding and building the control plane, with a stand-in for the Go toolchain that counts its calls."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.cluster.kvtier_localplane.build import (
    ARGO_ROLLOUTS,
    CONTROL_PLANE,
    CONTROLLER_MANAGER,
    HELM,
    BuildError,
    ControlPlaneBinaries,
    Target,
    build,
    cache_key,
    find_binaries,
    find_helm,
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
  printf '#!/bin/sh\\necho "%s"\\n' "{answer}" > "$2"
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

    def install(self, *, trouble: str = ":", answer: str = CONTROL_PLANE.answer) -> None:
        go = self.bin / "go"
        go.write_text(FAKE_GO.format(log=self.log, trouble=trouble, answer=answer))
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
    (folder / "controllermanager").mkdir(parents=True)
    for name in ("go.mod", "go.sum", "main.go", "controllermanager/main.go"):
        (folder / name).write_text(name)
    return folder


@pytest.mark.parametrize(
    "target, names, package",
    [
        pytest.param(CONTROL_PLANE, {"controlplane", "etcd", "kube-apiserver"}, ".", id="control-plane"),
        pytest.param(
            CONTROLLER_MANAGER,
            {"controllermanager", "kube-controller-manager"},
            "./controllermanager",
            id="controller-manager",
        ),
        pytest.param(HELM, {"helmbinary", "helm"}, "helm.sh/helm/v4/cmd/helm", id="helm"),
        pytest.param(
            ARGO_ROLLOUTS,
            {"argorollouts", "rollouts-controller"},
            "github.com/argoproj/argo-rollouts/cmd/rollouts-controller",
            id="argo-rollouts",
        ),
    ],
)
def test_a_build_is_done_once_and_stamped(
    tmp_path: Path, toolchain: Toolchain, module: Path, target: Target, names: set[str], package: str
) -> None:
    toolchain.install(answer=target.answer)
    said: list[str] = []
    first = build(tmp_path / "cache", target=target, module_dir=module, say=said.append)
    again = build(tmp_path / "cache", target=target, module_dir=module, say=said.append)
    assert first == again
    assert {path.name for path in first.iterdir()} == names
    assert len(toolchain.builds()) == 1
    stamped = toolchain.builds()[0]
    assert f"-X {target.stamps[0][0]}={target.version}" in stamped
    assert "-trimpath" in stamped
    assert stamped.split()[-1] == package
    assert any(line.startswith(f"{target.name}: built in") for line in said)


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
    assert waiting.wait(60)
    go_on.touch()
    for thread in threads:
        thread.join(60)
    assert started.exists()
    assert len(results) == 2
    assert results[0] == results[1]
    assert len(toolchain.builds()) == 1


@pytest.mark.parametrize(
    "trouble, answer, message",
    [
        pytest.param(
            "echo no space left >&2; exit 1", CONTROL_PLANE.answer, "no space left", id="compiler-fails"
        ),
        pytest.param(":", "Kubernetes v0.0.0", "calls itself 'Kubernetes v0.0.0'", id="stamp-is-missing"),
    ],
)
def test_a_failed_build_leaves_nothing_that_looks_finished(
    tmp_path: Path, toolchain: Toolchain, module: Path, trouble: str, answer: str, message: str
) -> None:
    toolchain.install(trouble=trouble, answer=answer)
    with pytest.raises(BuildError, match=message):
        build(tmp_path / "cache", module_dir=module, say=lambda _: None)
    assert [path.name for path in (tmp_path / "cache").iterdir() if not path.name.startswith(".lock")] == []
    toolchain.install()
    assert (build(tmp_path / "cache", module_dir=module, say=lambda _: None) / "etcd").exists()


@pytest.mark.parametrize(
    "changed, moves",
    [
        pytest.param("go.mod", {"control plane", "controller manager"}, id="requirements"),
        pytest.param("go.sum", {"control plane", "controller manager"}, id="hashes"),
        pytest.param("main.go", {"control plane"}, id="source-of-the-control-plane"),
        pytest.param("controllermanager/main.go", {"controller manager"}, id="source-of-the-controllers"),
    ],
)
def test_a_key_follows_what_its_own_target_is_compiled_from(
    module: Path, changed: str, moves: set[str]
) -> None:
    targets = (CONTROL_PLANE, CONTROLLER_MANAGER)
    before = {one.name: cache_key(module, "go1.26.8", one) for one in targets}
    assert len(set(before.values())) == 2
    (module / changed).write_text("changed")
    assert {one.name for one in targets if cache_key(module, "go1.26.8", one) != before[one.name]} == moves


@pytest.mark.parametrize("target", [CONTROL_PLANE, CONTROLLER_MANAGER, HELM, ARGO_ROLLOUTS], ids=str)
def test_a_key_follows_the_toolchain(module: Path, target: Target) -> None:
    assert cache_key(module, "go1.26.8", target) != cache_key(module, "go1.27.0", target)


def test_the_key_names_every_source_of_its_target() -> None:
    """A file beside main.go that is not in the key would leave a stale program in the cache."""
    for target in (CONTROL_PLANE, CONTROLLER_MANAGER):
        files = set((target.module / target.package).glob("*.go"))
        assert {target.module / source for source in target.sources} == files
        assert not any("kvtier.dev/" in file.read_text() for file in files), "another package of the module"
    for target in (HELM, ARGO_ROLLOUTS):
        others = [path.name for path in target.module.iterdir() if path.name not in ("go.mod", "go.sum")]
        assert others == [], target


@pytest.mark.parametrize("target", [HELM, ARGO_ROLLOUTS], ids=str)
def test_the_stamp_of_another_project_is_the_version_that_is_built(target: Target) -> None:
    wanted = f"{target.package.partition('/cmd/')[0]} {target.version} "
    lines = [
        line.removeprefix("require").strip() for line in (target.module / "go.mod").read_text().split("\n")
    ]
    assert any(line.startswith(wanted) for line in lines)


def test_controllers_are_built_only_when_they_are_asked_for(
    tmp_path: Path, toolchain: Toolchain, module: Path
) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    without = find_binaries(environ, module_dir=module, say=lambda _: None)
    assert without.kube_controller_manager is None
    assert len(toolchain.builds()) == 1
    having = find_binaries(environ, controller_manager=True, module_dir=module, say=lambda _: None)
    assert having.kube_controller_manager is not None and having.kube_controller_manager.exists()
    assert having.kube_apiserver == without.kube_apiserver
    assert [line.split()[-1] for line in toolchain.builds()] == [".", "./controllermanager"]


ALL = ("etcd", "kube-apiserver", "kube-controller-manager")


@pytest.mark.parametrize(
    "held, controllers, lacking",
    [
        pytest.param(ALL[:2], False, "", id="what-envtest-ships"),
        pytest.param(ALL, True, "", id="controllers-too"),
        pytest.param(ALL[1:2], False, "etcd", id="no-etcd"),
        pytest.param((), False, "etcd and kube-apiserver", id="empty"),
        # One plane never mixes versions, so all three are built.
        pytest.param(ALL[:2], True, "kube-controller-manager", id="controllers-are-not-there"),
    ],
)
def test_assets_of_the_user_come_first_when_they_hold_all_that_is_asked_for(
    tmp_path: Path, toolchain: Toolchain, module: Path, held: tuple[str, ...], controllers: bool, lacking: str
) -> None:
    assets = tmp_path / "assets"
    assets.mkdir()
    for name in held:
        (assets / name).touch(mode=0o755)
    environ = {"KUBEBUILDER_ASSETS": str(assets), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    said: list[str] = []
    found = find_binaries(environ, controller_manager=controllers, module_dir=module, say=said.append)
    if not lacking:
        manager = assets / "kube-controller-manager" if controllers else None
        assert found == ControlPlaneBinaries(assets / "etcd", assets / "kube-apiserver", "assets", manager)
        assert toolchain.log.read_text() == ""
        return
    assert f"lacks {lacking}; using the built" in said[0]
    assert found.origin == "built"
    programs = [found.etcd, found.kube_apiserver]
    programs += [found.kube_controller_manager] if found.kube_controller_manager else []
    assert len(programs) == (3 if controllers else 2)
    assert all(one.is_relative_to(tmp_path / "cache" / "kvtier" / "controlplane") for one in programs)


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


def test_without_go_no_assets_are_recommended_for_helm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError) as refused:
        find_helm({"HOME": str(tmp_path)}, say=lambda _: None)
    assert str(refused.value).endswith("the helm binary cannot be built: install Go 1.26 or later")
