"""What an agent process was told at its start: checked once, then immutable.

Every refusal names the flag, so that a person can act on the message. Knows no socket and no cluster.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvtier_agent.keyfiles import KeyDirectory
from kvtier_core.errors import CoreError
from kvtier_crds.quantity import QuantityError, parse_bytes, parse_decimal, parse_fraction

_NODE_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
SIMULATED_DEVICE_KIND = "simulated"
PROCESS = "process"
# As a TierClass spells them; what is kept outlives the agent's process.
PERSISTENCE = (PROCESS, "node", "durable")
TIER_FIELDS = {
    *("className", "medium", "deviceKind", "capacity", "device", "reserve"),
    *("persistence", "endurance", "queueDepth", "readBytesPerSecond", "writeBytesPerSecond"),
}
MAX_QUEUE_DEPTH = 65536


class ConfigError(Exception):
    """A start-up argument that cannot be used; the text names the flag and the legal values."""


class Medium(StrEnum):
    GPU = "gpu"
    CPU = "cpu"
    NVME = "nvme"


class KubernetesMode(StrEnum):
    NONE = "none"
    IN_CLUSTER = "inCluster"
    KUBECONFIG = "kubeconfig"


@dataclass(frozen=True)
class TierConfig:
    """One `--tier`: the devices behind one TierClass on this node. Sizes in bytes."""

    class_name: str
    medium: Medium
    device_kind: str
    capacity_bytes: int
    reserve_bytes: int
    path: Path | None
    cuda_index: int | None
    persistence: str = PROCESS
    drive_writes_per_day: Decimal | None = None
    """As rated; None: the flash is not spared."""
    write_share: Decimal = Decimal(1)
    """Of the rated writes, what caches may use."""
    queue_depth: int | None = None
    read_rate: int | None = None
    """Bytes a second, as `write_rate`; None: as fast as it goes."""
    write_rate: int | None = None

    @property
    def simulated(self) -> bool:
        """A GPU tier that runs on the CPU device."""
        return self.medium is Medium.GPU and self.device_kind == SIMULATED_DEVICE_KIND

    @classmethod
    def parse(cls, text: str) -> TierConfig:
        """Reads {"className","medium","deviceKind","capacity","device":{"path"|"cudaIndex"},"reserve",
        "persistence","endurance":{"driveWritesPerDay","targetFraction"},"queueDepth","readBytesPerSecond",
        "writeBytesPerSecond"}."""
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"--tier is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ConfigError("--tier must be a JSON object")
        unknown = sorted(set(fields) - TIER_FIELDS)
        if unknown:
            raise ConfigError(f"--tier: unknown fields {unknown}; legal are {sorted(TIER_FIELDS)}")
        name = fields.get("className")
        if not isinstance(name, str) or not _NODE_NAME.fullmatch(name):
            raise ConfigError(f"--tier: className {name!r} must be the name of a TierClass")
        legal = [medium.value for medium in Medium]
        if fields.get("medium") not in legal:
            raise ConfigError(f"--tier {name}: medium {fields.get('medium')!r} must be one of {legal}")
        medium = Medium(fields["medium"])
        device = fields.get("device") or {}
        if not isinstance(device, dict) or set(device) - {"path", "cudaIndex"}:
            raise ConfigError(f"--tier {name}: device must hold path or cudaIndex")
        path = device.get("path")
        if medium is Medium.NVME and not (isinstance(path, str) and path.startswith("/")):
            raise ConfigError(f"--tier {name}: an nvme tier needs device.path, an absolute path")
        cuda_index = device.get("cudaIndex")
        if cuda_index is not None and (not isinstance(cuda_index, int) or cuda_index < 0):
            raise ConfigError(f"--tier {name}: device.cudaIndex {cuda_index!r} must be a number from 0")
        kind = fields.get("deviceKind") or (SIMULATED_DEVICE_KIND if medium is Medium.GPU else "")
        if not isinstance(kind, str):
            raise ConfigError(f"--tier {name}: deviceKind must be text")
        persistence = fields.get("persistence") or PROCESS
        kept = PERSISTENCE if medium is Medium.NVME else (PROCESS,)
        if persistence not in kept:
            raise ConfigError(f"--tier {name}: persistence {persistence!r} must be one of {list(kept)}")
        rated, share = _endurance(name, medium, fields.get("endurance"))
        return cls(
            class_name=name,
            medium=medium,
            device_kind=kind,
            capacity_bytes=_size(f"--tier {name}: capacity", fields.get("capacity"), minimum=1),
            reserve_bytes=_size(f"--tier {name}: reserve", fields.get("reserve") or 0, minimum=0),
            path=Path(path) if isinstance(path, str) else None,
            cuda_index=cuda_index,
            persistence=persistence,
            drive_writes_per_day=rated,
            write_share=share,
            queue_depth=_queue_depth(name, fields.get("queueDepth")),
            read_rate=_rate(name, medium, "readBytesPerSecond", fields),
            write_rate=_rate(name, medium, "writeBytesPerSecond", fields),
        )


@dataclass(frozen=True)
class TlsFiles:
    certificate: Path
    key: Path
    ca: Path


@dataclass(frozen=True)
class Limits:
    """Bounds and deadlines; all of them can be met by the tests in seconds."""

    max_sessions: int = 512
    stream_in_flight: int = 64
    agent_in_flight: int = 512
    frame_deadline_seconds: float = 60.0
    control_deadline_seconds: float = 30.0
    session_idle_seconds: float = 600.0
    drain_seconds: float = 20.0
    end_seconds: float = 8.0
    max_message_bytes: int = 16 * 1024 * 1024


@dataclass(frozen=True)
class AgentConfig:
    """Everything of the command line. `node_uid` is empty until it was looked up in the cluster."""

    node_name: str
    node_uid: str
    pool_namespace: str
    pool_name: str
    state_dir: Path
    run_dir: Path
    listen: str
    advertise: str
    tls: TlsFiles
    operator_name: str
    tiers: tuple[TierConfig, ...]
    kubernetes: KubernetesMode
    kubeconfig: Path | None
    otlp_endpoint: str
    metrics_port: int
    log_level: str
    limits: Limits
    key_dir: Path | None = None
    key_secrets: Path | None = None
    index_share: float = 0.25
    """Of one processor, for building selectors' indexes."""
    index_memory: int = 1 << 30
    """Bytes of indexes and of rows that wait for them."""

    @property
    def socket_path(self) -> Path:
        return self.run_dir / self.node_name / "engine.sock"

    @property
    def channels_path(self) -> Path:
        """The folder of local channels, one folder in it for each namespace."""
        return self.run_dir / self.node_name / "channels"

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> AgentConfig:
        """Raises ConfigError naming the flag."""
        if not _NODE_NAME.fullmatch(arguments.node_name):
            raise ConfigError(f"--node-name {arguments.node_name!r} is not a DNS subdomain name")
        _check_uid(arguments)
        namespace, slash, pool = arguments.pool.partition("/")
        if not (slash and namespace and pool):
            raise ConfigError(f"--pool {arguments.pool!r} must be NAMESPACE/NAME")
        _check_address("--listen", arguments.listen)
        advertise = arguments.advertise or arguments.listen
        _check_address("--advertise", advertise)
        tls = TlsFiles(Path(arguments.tls_cert), Path(arguments.tls_key), Path(arguments.tls_ca))
        for flag, file in (("--tls-cert", tls.certificate), ("--tls-key", tls.key), ("--tls-ca", tls.ca)):
            if not file.is_file():
                raise ConfigError(f"{flag} {file}: no such file")
        if not 0 < len(arguments.operator_name) <= 253:
            raise ConfigError("--operator-name must have 1 to 253 characters")
        if arguments.operator_name == arguments.node_name:
            raise ConfigError(f"--operator-name {arguments.operator_name!r} is this node's own name")
        tiers = tuple(TierConfig.parse(text) for text in arguments.tier)
        names = [tier.class_name for tier in tiers]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ConfigError(f"--tier: className {repeated} given twice")
        if not 0 <= arguments.metrics_port <= 65535:
            raise ConfigError(f"--metrics-port {arguments.metrics_port} must be in [0, 65535]")
        socket_path = Path(arguments.run_dir) / arguments.node_name / "engine.sock"
        if len(str(socket_path).encode()) > 100:
            raise ConfigError(f"--run-dir: the socket path {socket_path} is longer than 100 bytes")
        mode = KubernetesMode.IN_CLUSTER
        if arguments.no_kubernetes:
            mode = KubernetesMode.NONE
        elif arguments.kubeconfig:
            mode = KubernetesMode.KUBECONFIG
            if not Path(arguments.kubeconfig).is_file():
                raise ConfigError(f"--kubeconfig {arguments.kubeconfig}: no such file")
        for flag, seconds in (("--session-idle", arguments.session_idle), ("--drain", arguments.drain)):
            if seconds <= 0:
                raise ConfigError(f"{flag} {seconds} must be above 0 seconds")
        return cls(
            node_name=arguments.node_name,
            node_uid=arguments.node_uid,
            pool_namespace=namespace,
            pool_name=pool,
            state_dir=Path(arguments.state_dir),
            run_dir=Path(arguments.run_dir),
            listen=arguments.listen,
            advertise=advertise,
            tls=tls,
            operator_name=arguments.operator_name,
            tiers=tiers,
            kubernetes=mode,
            kubeconfig=Path(arguments.kubeconfig) if arguments.kubeconfig else None,
            otlp_endpoint=arguments.otlp_endpoint,
            metrics_port=arguments.metrics_port,
            log_level=arguments.log_level,
            key_dir=_key_dir(arguments.key_dir),
            key_secrets=Path(arguments.key_secrets) if arguments.key_secrets else None,
            limits=Limits(session_idle_seconds=arguments.session_idle, drain_seconds=arguments.drain),
            index_share=_share(arguments.index_cpu_share),
            index_memory=_bytes("--index-memory", arguments.index_memory),
        )


def _share(text: str) -> float:
    try:
        share = parse_decimal(text, "--index-cpu-share")
    except QuantityError as error:
        raise ConfigError(str(error)) from error
    if not 0 < share <= 1:
        raise ConfigError(f"--index-cpu-share {text} must be above 0 and at most 1")
    return float(share)


def _bytes(flag: str, text: str) -> int:
    try:
        return parse_bytes(text, flag)
    except QuantityError as error:
        raise ConfigError(str(error)) from error


def _key_dir(text: str) -> Path | None:
    if not text:
        return None
    try:
        KeyDirectory(Path(text)).check()
    except CoreError as error:
        raise ConfigError(f"--key-dir: {error.message}") from error
    return Path(text)


def _check_uid(arguments: argparse.Namespace) -> None:
    uid = arguments.node_uid
    if not uid:
        if arguments.no_kubernetes:
            raise ConfigError("--node-uid is required with --no-kubernetes: there is no Node to ask for it")
    elif not UID.fullmatch(uid):
        raise ConfigError(f"--node-uid {uid!r} is not a uid")
    elif uid == arguments.node_name and not arguments.no_kubernetes:
        # An owner reference with a uid that does not exist lets the garbage collector delete the KVNode.
        raise ConfigError(f"--node-uid {uid!r} is the node's name; leave it out and the Node is asked")


def _check_address(flag: str, address: str) -> None:
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdigit() and int(port) <= 65535):
        raise ConfigError(f"{flag} {address!r} must be HOST:PORT")


def _endurance(name: str, medium: Medium, given: Any) -> tuple[Decimal | None, Decimal]:
    if given is None:
        return None, Decimal(1)
    where = f"--tier {name}: endurance"
    if medium is not Medium.NVME:
        raise ConfigError(f"{where} is only for medium nvme")
    if not isinstance(given, dict) or set(given) != {"driveWritesPerDay", "targetFraction"}:
        raise ConfigError(f"{where} must hold driveWritesPerDay and targetFraction")
    try:
        rated = parse_decimal(str(given["driveWritesPerDay"]), f"{where}.driveWritesPerDay")
        share = parse_fraction(str(given["targetFraction"]), f"{where}.targetFraction")
    except QuantityError as error:
        raise ConfigError(str(error)) from error
    return rated, share


def _queue_depth(name: str, given: Any) -> int | None:
    if given is None:
        return None
    if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= MAX_QUEUE_DEPTH:
        raise ConfigError(f"--tier {name}: queueDepth {given!r} must be in [1, {MAX_QUEUE_DEPTH}]")
    return given


def _rate(name: str, medium: Medium, field: str, fields: dict[str, Any]) -> int | None:
    given = fields.get(field)
    if given is None:
        return None
    if medium is not Medium.NVME:
        raise ConfigError(f"--tier {name}: {field} is only for medium nvme")
    return _size(f"--tier {name}: {field}", given, minimum=1)


def _size(where: str, value: Any, minimum: int) -> int:
    try:
        size = parse_bytes(value if isinstance(value, int) else str(value), where)
    except QuantityError as error:
        raise ConfigError(f"{where} {value!r} is not a quantity such as 64Mi") from error
    if size < minimum:
        raise ConfigError(f"{where} {value!r} must be at least {minimum} bytes")
    return size
