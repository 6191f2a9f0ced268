"""Finds or builds the control plane's binaries (etcd and kube-apiserver).

Tests and the demo need a real API server on machines where no prebuilt one can be had, so it is compiled from
the Go module in ``tests/cluster/controlplane`` once and kept in a cache folder outside the checkout.

Standard library only, and runnable as a script: ``make`` starts the build with the system's Python while the
virtual environment is still being made. It must not know what a cluster is used for.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

MODULE_DIR = Path(__file__).resolve().parents[1] / "controlplane"
KUBERNETES_VERSION = "v1.36.3"
BUILD_DEADLINE_S = 1800.0
PROGRESS_INTERVAL_S = 10.0
MINIMUM_GO = (1, 26)
TOOLS = ("etcd", "kube-apiserver")

Say = Callable[[str], None]


class BuildError(RuntimeError):
    """The binaries are neither given nor could be built; the message says what to do."""


@dataclass(frozen=True)
class ControlPlaneBinaries:
    """Paths of the two programs, and where they came from (``assets`` or ``built``)."""

    etcd: Path
    kube_apiserver: Path
    origin: str


def say_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def find_binaries(
    environ: Mapping[str, str] | None = None, *, module_dir: Path = MODULE_DIR, say: Say = say_to_stderr
) -> ControlPlaneBinaries:
    """Returns the binaries of KUBEBUILDER_ASSETS when it holds both, else those built from source.

    Raises BuildError when KUBEBUILDER_ASSETS is not usable and Go is missing, too old, or fails.
    """
    env = os.environ if environ is None else environ
    if assets := env.get("KUBEBUILDER_ASSETS"):
        etcd, apiserver = Path(assets) / "etcd", Path(assets) / "kube-apiserver"
        if os.access(etcd, os.X_OK) and os.access(apiserver, os.X_OK):
            return ControlPlaneBinaries(etcd, apiserver, "assets")
        say(f"control plane: KUBEBUILDER_ASSETS={assets} lacks etcd or kube-apiserver; using the built one")
    folder = build(cache_root(env), module_dir=module_dir, say=say)
    return ControlPlaneBinaries(folder / "etcd", folder / "kube-apiserver", "built")


def cache_root(env: Mapping[str, str]) -> Path:
    """The folder outside the checkout that outlives a clone: ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    base = env.get("XDG_CACHE_HOME") or str(Path(env.get("HOME") or "~").expanduser() / ".cache")
    return Path(base) / "kvtier" / "controlplane"


def cache_key(module_dir: Path, go_version: str) -> str:
    """Names a build by everything that shapes it: the module's files, the version stamp and the toolchain."""
    digest = hashlib.sha256()
    for name in ("go.mod", "go.sum", "main.go"):
        digest.update(name.encode() + b"\0" + (module_dir / name).read_bytes() + b"\0")
    digest.update("\0".join((KUBERNETES_VERSION, go_version)).encode())
    return digest.hexdigest()[:20]


def build(root: Path, *, module_dir: Path = MODULE_DIR, say: Say = say_to_stderr) -> Path:
    """Returns a folder with ``etcd`` and ``kube-apiserver``; compiles them when it is not there yet.

    Two builders do not race: one holds a lock, the other waits and finds the result. The folder appears by a
    rename, so a killed build leaves nothing that looks finished.
    """
    key = cache_key(module_dir, _go_version())
    folder = root / key
    if _complete(folder):
        return folder
    root.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + BUILD_DEADLINE_S
    with _lock(root / f".lock-{key}", deadline, say):
        if _complete(folder):
            return folder
        for stale in root.glob(f".build-{key}-*"):
            shutil.rmtree(stale, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=f".build-{key}-", dir=root))
        try:
            _compile(module_dir, staging / "controlplane", deadline, say)
            for tool in TOOLS:
                (staging / tool).symlink_to("controlplane")
            _check_version(staging / "kube-apiserver")
            shutil.rmtree(folder, ignore_errors=True)
            staging.chmod(0o755)
            staging.rename(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return folder


def _complete(folder: Path) -> bool:
    return all(os.access(folder / tool, os.X_OK) for tool in TOOLS)


def _go_version() -> str:
    if shutil.which("go") is None:
        raise BuildError(
            "Go is not installed, so the control plane cannot be built: install Go 1.26 or later, "
            "or set KUBEBUILDER_ASSETS to a folder with etcd and kube-apiserver"
        )
    out = subprocess.run(
        ["go", "env", "GOVERSION"], capture_output=True, text=True, timeout=60, env=_go_env()
    )
    if out.returncode != 0:
        raise BuildError(f"go env failed: {out.stderr.strip()}")
    version = out.stdout.strip()
    numbers = re.match(r"go(\d+)\.(\d+)", version)
    if numbers and tuple(map(int, numbers.groups())) < MINIMUM_GO:
        raise BuildError(
            f"{version} is installed; the control plane needs Go {MINIMUM_GO[0]}.{MINIMUM_GO[1]} or later"
        )
    return version


def _go_env() -> dict[str, str]:
    return {**os.environ, "CGO_ENABLED": "0", "GOWORK": "off", "GOTOOLCHAIN": "local"}


def _ldflags() -> str:
    package = "k8s.io/component-base/version"
    major, minor = KUBERNETES_VERSION.removeprefix("v").split(".")[:2]
    stamps = {"gitVersion": KUBERNETES_VERSION, "gitMajor": major, "gitMinor": minor}
    return "-s -w " + " ".join(f"-X {package}.{name}={value}" for name, value in stamps.items())


def _compile(module_dir: Path, target: Path, deadline: float, say: Say) -> None:
    flags = ["-trimpath", "-buildvcs=false", "-mod=readonly"]
    started = time.monotonic()
    say(f"control plane: building etcd and kube-apiserver {KUBERNETES_VERSION} from source, once per machine")
    _run_with_progress(["go", "mod", "download"], module_dir, deadline, say, lambda _: "fetching modules")
    listed = subprocess.run(
        ["go", "list", "-deps", *flags, "."],
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
        ["go", "build", "-v", *flags, "-ldflags", _ldflags(), "-o", str(target), "."],
        module_dir,
        deadline,
        say,
        lambda done: f"compiled {done} packages (of at most {total}; those in Go's cache do not count)",
    )
    say(f"control plane: built in {time.monotonic() - started:.0f} s, {target.stat().st_size >> 20} MiB")


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
                say(f"control plane: {describe(count)}, {time.monotonic() - started:.0f} s")
                if time.monotonic() > deadline:
                    raise BuildError(f"{' '.join(argv[:2])} passed its deadline") from None
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)
    reader.join(30)
    if process.returncode != 0:
        raise BuildError(f"{' '.join(argv[:2])} failed ({process.returncode}):\n{''.join(lines)}")


def _check_version(apiserver: Path) -> None:
    out = subprocess.run([apiserver, "--version"], capture_output=True, text=True, timeout=120)
    if out.stdout.strip() != f"Kubernetes {KUBERNETES_VERSION}":
        raise BuildError(
            f"the built kube-apiserver calls itself {out.stdout.strip()!r}: {out.stderr[-1000:]}"
        )


@contextlib.contextmanager
def _lock(path: Path, deadline: float, say: Say) -> Iterator[None]:
    with path.open("w") as handle:
        announced = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not announced:
                    say("control plane: another build is running; waiting for its result")
                    announced = True
                if time.monotonic() > deadline:
                    raise BuildError(f"the build that holds {path} did not end in time") from None
                time.sleep(0.5)
        yield


def main(argv: list[str] | None = None) -> int:
    """Builds when needed and prints the folder of the binaries."""
    parser = argparse.ArgumentParser(description="Find or build etcd and kube-apiserver.")
    parser.parse_args(argv)
    if os.environ.get("KVTIER_KUBECONFIG"):
        say_to_stderr("control plane: KVTIER_KUBECONFIG is set, so none is built")
        return 0
    try:
        print(find_binaries().etcd.parent)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
