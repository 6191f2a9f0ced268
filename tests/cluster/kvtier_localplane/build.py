"""Finds or builds the control plane's binaries: etcd, kube-apiserver and, on demand, kube-controller-manager.

Tests and the demo need a real API server on machines where no prebuilt one can be had, so it is compiled from
the Go module in ``tests/cluster/controlplane`` once and kept in a cache folder outside the checkout.
Controllers are a second program of that module with a cache entry of its own: who needs none never pays.

Standard library only, and runnable as a script: ``make`` starts the build with the system's Python while the
virtual environment is still being made. It must not know what a cluster is used for.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MODULE_DIR = Path(__file__).resolve().parents[1] / "controlplane"
HELM_DIR = MODULE_DIR.with_name("helm")
ARGO_DIR = MODULE_DIR.with_name("argorollouts")
KUBERNETES_VERSION = "v1.36.3"
HELM_VERSION = "v4.2.4"
ARGO_VERSION = "v1.10.1"
ARGO_MODULE = "github.com/argoproj/argo-rollouts"
BUILD_DEADLINE_S = 1800.0
PROGRESS_INTERVAL_S = 10.0
MINIMUM_GO = (1, 26)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Target:
    """One program that is built from a Go module.

    module: its folder. package: what of it is built. sources: what that is compiled from beside go.mod and
    go.sum. tools: the names it is called by. version: of what is built. stamps: what the linker sets.
    asks: a call that answers with `answer`, to see that the stamps are in.
    """

    name: str
    module: Path
    package: str
    sources: tuple[str, ...]
    tools: tuple[str, ...]
    version: str
    stamps: tuple[tuple[str, str], ...]
    asks: tuple[str, ...]
    answer: str

    @property
    def program(self) -> str:
        """The file's name: never one of the tools."""
        return self.name.replace(" ", "")

    def __str__(self) -> str:
        return " and ".join(self.tools)


def _kubernetes(name: str, package: str, *tools: str) -> Target:
    """A target of the control plane's module; the last of its tools answers ``--version``."""
    stamp = "k8s.io/component-base/version"
    major, minor = KUBERNETES_VERSION.removeprefix("v").split(".")[:2]
    return Target(
        name,
        MODULE_DIR,
        package,
        (f"{package}/main.go".removeprefix("./"),),
        tools,
        KUBERNETES_VERSION,
        (
            (f"{stamp}.gitVersion", KUBERNETES_VERSION),
            (f"{stamp}.gitMajor", major),
            (f"{stamp}.gitMinor", minor),
        ),
        (tools[-1], "--version"),
        f"Kubernetes {KUBERNETES_VERSION}",
    )


CONTROL_PLANE = _kubernetes("control plane", ".", "etcd", "kube-apiserver")
CONTROLLER_MANAGER = _kubernetes("controller manager", "./controllermanager", "kube-controller-manager")
HELM = Target(
    "helm binary",
    HELM_DIR,
    "helm.sh/helm/v4/cmd/helm",
    (),
    ("helm",),
    HELM_VERSION,
    (("helm.sh/helm/v4/internal/version.version", HELM_VERSION),),
    ("helm", "version", "--template={{.Version}}"),
    HELM_VERSION,
)


# Another release controller, which benches run beside ours; no test needs it.
ARGO_ROLLOUTS = Target(
    "argo rollouts",
    ARGO_DIR,
    f"{ARGO_MODULE}/cmd/rollouts-controller",
    (),
    ("rollouts-controller",),
    ARGO_VERSION,
    (
        # All three, or it does not call itself a release.
        (f"{ARGO_MODULE}/utils/version.gitCommit", ARGO_VERSION),
        (f"{ARGO_MODULE}/utils/version.gitTag", ARGO_VERSION),
        (f"{ARGO_MODULE}/utils/version.gitTreeState", "clean"),
    ),
    ("rollouts-controller", "--version"),
    ARGO_VERSION,
)


class BuildError(RuntimeError):
    """The binaries are neither given nor could be built; the message says what to do."""


@dataclass(frozen=True)
class ControlPlaneBinaries:
    """Paths of the programs, and where they came from (``assets`` or ``built``), all from the same place.

    kube_controller_manager: None unless it was asked for.
    """

    etcd: Path
    kube_apiserver: Path
    origin: str
    kube_controller_manager: Path | None = None


def say_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def find_binaries(
    environ: Mapping[str, str] | None = None,
    *,
    controller_manager: bool = False,
    module_dir: Path | None = None,
    say: Say = say_to_stderr,
) -> ControlPlaneBinaries:
    """Returns the binaries of KUBEBUILDER_ASSETS when it holds all that are asked for, else built ones.

    The two are never mixed: a controller manager must not be newer than its API server. Raises BuildError
    when KUBEBUILDER_ASSETS is not usable and Go is missing, too old, or fails.
    """
    env = os.environ if environ is None else environ
    targets = (CONTROL_PLANE, CONTROLLER_MANAGER) if controller_manager else (CONTROL_PLANE,)
    if assets := env.get("KUBEBUILDER_ASSETS"):
        wanted = [tool for one in targets for tool in one.tools]
        lacking = [tool for tool in wanted if not os.access(Path(assets) / tool, os.X_OK)]
        if not lacking:
            return _binaries([Path(assets)] * len(targets), "assets")
        say(f"control plane: KUBEBUILDER_ASSETS={assets} lacks {' and '.join(lacking)}; using the built one")
    folders = [build(cache_root(env), target=one, module_dir=module_dir, say=say) for one in targets]
    return _binaries(folders, "built")


def find_helm(environ: Mapping[str, str] | None = None, *, say: Say = say_to_stderr) -> Path:
    """The pinned helm, built once per machine; never the one that the machine happens to have."""
    return build(cache_root(os.environ if environ is None else environ), target=HELM, say=say) / "helm"


def find_argo_rollouts(
    environ: Mapping[str, str] | None = None, *, say: Say = say_to_stderr
) -> tuple[Path, Path]:
    """The pinned controller of Argo Rollouts, built once per machine, and the folder of its CRDs, which are
    in its Go module."""
    root = cache_root(os.environ if environ is None else environ)
    program = build(root, target=ARGO_ROLLOUTS, say=say) / "rollouts-controller"
    out = subprocess.run(
        ["go", "mod", "download", "-json", ARGO_MODULE],
        cwd=ARGO_DIR,
        env=_go_env(),
        capture_output=True,
        text=True,
        timeout=BUILD_DEADLINE_S,
    )
    if out.returncode != 0:
        raise BuildError(f"the module of {ARGO_ROLLOUTS.name} cannot be had: {out.stderr.strip()}")
    return program, Path(json.loads(out.stdout)["Dir"]) / "manifests" / "crds"


def _binaries(folders: Sequence[Path], origin: str) -> ControlPlaneBinaries:
    """folders: the control plane's and, where it was asked for, the controller manager's."""
    manager = folders[1] / "kube-controller-manager" if len(folders) > 1 else None
    return ControlPlaneBinaries(folders[0] / "etcd", folders[0] / "kube-apiserver", origin, manager)


def cache_root(env: Mapping[str, str]) -> Path:
    """The folder outside the checkout that outlives a clone: ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    base = env.get("XDG_CACHE_HOME") or str(Path(env.get("HOME") or "~").expanduser() / ".cache")
    return Path(base) / "kvtier" / "controlplane"


def cache_key(module_dir: Path, go_version: str, target: Target = CONTROL_PLANE) -> str:
    """Names a build by everything that shapes it: the module's files, the target's own sources, the version
    stamp and the toolchain. Another target's sources do not move it."""
    digest = hashlib.sha256()
    for name in ("go.mod", "go.sum", *target.sources):
        digest.update(name.encode() + b"\0" + (module_dir / name).read_bytes() + b"\0")
    digest.update("\0".join((target.version, go_version)).encode())
    return digest.hexdigest()[:20]


def build(
    root: Path,
    *,
    target: Target = CONTROL_PLANE,
    module_dir: Path | None = None,
    say: Say = say_to_stderr,
) -> Path:
    """Returns a folder with the target's tools; compiles them when it is not there yet. module_dir stands in
    for the target's own module.

    Two builders do not race: one holds a lock, the other waits and finds the result. The folder appears by a
    rename, so a killed build leaves nothing that looks finished.
    """
    module_dir = module_dir or target.module
    key = cache_key(module_dir, _go_version(target), target)
    folder = root / key
    if _complete(folder, target):
        return folder
    root.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + BUILD_DEADLINE_S
    with _lock(root / f".lock-{key}", target, deadline, say):
        if _complete(folder, target):
            return folder
        for stale in root.glob(f".build-{key}-*"):
            shutil.rmtree(stale, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=f".build-{key}-", dir=root))
        try:
            _compile(module_dir, target, staging / target.program, deadline, say)
            for tool in target.tools:
                (staging / tool).symlink_to(target.program)
            _check_version(target, staging)
            shutil.rmtree(folder, ignore_errors=True)
            staging.chmod(0o755)
            staging.rename(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return folder


def _complete(folder: Path, target: Target) -> bool:
    return all(os.access(folder / tool, os.X_OK) for tool in target.tools)


def _go_version(target: Target) -> str:
    needed = f"Go {MINIMUM_GO[0]}.{MINIMUM_GO[1]} or later"
    if shutil.which("go") is None:
        instead = f", or set KUBEBUILDER_ASSETS to a folder with {target}" if target is not HELM else ""
        raise BuildError(
            f"Go is not installed, so the {target.name} cannot be built: install {needed}{instead}"
        )
    out = subprocess.run(
        ["go", "env", "GOVERSION"], capture_output=True, text=True, timeout=60, env=_go_env()
    )
    if out.returncode != 0:
        raise BuildError(f"go env failed: {out.stderr.strip()}")
    version = out.stdout.strip()
    numbers = re.match(r"go(\d+)\.(\d+)", version)
    if numbers and tuple(map(int, numbers.groups())) < MINIMUM_GO:
        raise BuildError(f"{version} is installed; the {target.name} needs {needed}")
    return version


def _go_env() -> dict[str, str]:
    return {**os.environ, "CGO_ENABLED": "0", "GOWORK": "off", "GOTOOLCHAIN": "local"}


def _ldflags(target: Target) -> str:
    return "-s -w " + " ".join(f"-X {variable}={value}" for variable, value in target.stamps)


def _compile(module_dir: Path, target: Target, program: Path, deadline: float, say: Say) -> None:
    flags = ["-trimpath", "-buildvcs=false", "-mod=readonly"]
    started = time.monotonic()

    def tell(line: str) -> None:
        say(f"{target.name}: {line}")

    tell(f"building {target} {target.version} from source, once per machine")
    _run_with_progress(["go", "mod", "download"], module_dir, deadline, tell, lambda _: "fetching modules")
    listed = subprocess.run(
        ["go", "list", "-deps", *flags, target.package],
        cwd=module_dir,
        env=_go_env(),
        capture_output=True,
        text=True,
        timeout=max(1.0, deadline - time.monotonic()),
    )
    if listed.returncode != 0:
        raise BuildError(f"go list failed:\n{listed.stderr[-4000:]}")
    total = len(listed.stdout.split())
    _run_with_progress(
        ["go", "build", "-v", *flags, "-ldflags", _ldflags(target), "-o", str(program), target.package],
        module_dir,
        deadline,
        tell,
        lambda done: f"compiled {done} packages (of at most {total}; those in Go's cache do not count)",
    )
    tell(f"built in {time.monotonic() - started:.0f} s, {program.stat().st_size >> 20} MiB")


def _run_with_progress(
    argv: list[str], cwd: Path, deadline: float, say: Say, describe: Callable[[int], str]
) -> None:
    """Runs argv and reports every PROGRESS_INTERVAL_S how many lines it has printed; keeps the last ones."""
    started = time.monotonic()
    process = subprocess.Popen(
        argv, cwd=cwd, env=_go_env(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    lines: list[str] = []
    count = 0

    def drain() -> None:
        nonlocal count
        assert process.stderr is not None
        for line in process.stderr:
            count += 1
            lines.append(line)
            del lines[:-40]

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    try:
        while True:
            try:
                process.wait(PROGRESS_INTERVAL_S)
                break
            except subprocess.TimeoutExpired:
                say(f"{describe(count)}, {time.monotonic() - started:.0f} s")
                if time.monotonic() > deadline:
                    raise BuildError(f"{' '.join(argv[:2])} passed its deadline") from None
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)
    reader.join(30)
    if process.returncode != 0:
        raise BuildError(f"{' '.join(argv[:2])} failed ({process.returncode}):\n{''.join(lines)}")


def _check_version(target: Target, folder: Path) -> None:
    tool, *words = target.asks
    out = subprocess.run([folder / tool, *words], capture_output=True, text=True, timeout=120)
    if out.stdout.strip() != target.answer:
        raise BuildError(f"the built {tool} calls itself {out.stdout.strip()!r}: {out.stderr[-1000:]}")


@contextlib.contextmanager
def _lock(path: Path, target: Target, deadline: float, say: Say) -> Iterator[None]:
    with path.open("w") as handle:
        announced = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not announced:
                    say(f"{target.name}: another build is running; waiting for its result")
                    announced = True
                if time.monotonic() > deadline:
                    raise BuildError(f"the build that holds {path} did not end in time") from None
                time.sleep(0.5)
        yield


def main(argv: list[str] | None = None) -> int:
    """Builds when needed and prints the paths of the programs."""
    parser = argparse.ArgumentParser(description="Find or build what tests and demo run.")
    parser.add_argument(
        "what",
        nargs="?",
        choices=("plane", "controllers", "helm", "argo"),
        default="plane",
        help="plane: etcd and kube-apiserver; controllers: and kube-controller-manager; argo: for the bench",
    )
    what = parser.parse_args(argv).what
    try:
        if what == "helm":
            print(find_helm())
            return 0
        if what == "argo":
            print(*find_argo_rollouts(), sep="\n")
            return 0
        found = find_binaries(controller_manager=what == "controllers")
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for program in (found.etcd, found.kube_apiserver, found.kube_controller_manager):
        if program is not None:
            print(program)
    return 0


if __name__ == "__main__":
    sys.exit(main())
