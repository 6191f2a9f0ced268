"""The file behind --external-metrics: which sources there are, and where their secrets lie.

Secrets are named by file only (a mounted Secret), so no right to read Secrets is needed. It must not open a
connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvtier_operator.external.prometheus import PrometheusOptions
from kvtier_operator.external.reading import Pace


@dataclass(frozen=True)
class OtlpOptions:
    """Where pushes are received. cert_file, key_file: TLS of the port; absent only on a loopback address."""

    port: int
    token_file: Path
    host: str = "0.0.0.0"
    cert_file: Path | None = None
    key_file: Path | None = None


@dataclass(frozen=True)
class ExternalOptions:
    prometheus: PrometheusOptions | None = None
    otlp: OtlpOptions | None = None
    pace: Pace = field(default_factory=Pace)


_KEYS = {
    "": {"prometheus", "otlp", "scrapeSeconds", "lagSeconds"},
    "prometheus": {"url", "caFile", "tokenFile", "timeoutSeconds", "maxResponseBytes"},
    "otlp": {"host", "port", "tokenFile", "certFile", "keyFile"},
}


def load(path: Path) -> ExternalOptions:
    """Raises ValueError naming what is wrong, and OSError when the file cannot be read."""
    try:
        raw = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {error}") from error
    return parse(raw)


def parse(raw: Any) -> ExternalOptions:
    top = _section(raw, "")
    prometheus, otlp = top.get("prometheus"), top.get("otlp")
    return ExternalOptions(
        None if prometheus is None else _prometheus(_section(prometheus, "prometheus")),
        None if otlp is None else _otlp(_section(otlp, "otlp")),
        Pace(_seconds(top, "scrapeSeconds", 30.0), _seconds(top, "lagSeconds", 15.0)),
    )


def _prometheus(raw: Mapping[str, Any]) -> PrometheusOptions:
    return PrometheusOptions(
        url=str(raw.get("url", "")),
        ca_file=_file(raw, "caFile"),
        token_file=_file(raw, "tokenFile"),
        timeout_seconds=_seconds(raw, "timeoutSeconds", 5.0),
        max_bytes=int(_seconds(raw, "maxResponseBytes", 8 << 20)),
    )


def _otlp(raw: Mapping[str, Any]) -> OtlpOptions:
    token, cert, key = _file(raw, "tokenFile"), _file(raw, "certFile"), _file(raw, "keyFile")
    host = str(raw.get("host", "0.0.0.0"))
    if token is None:
        raise ValueError("otlp.tokenFile: whoever may push decides gates, so a token is needed")
    if (cert is None) != (key is None):
        raise ValueError("otlp.certFile and otlp.keyFile go together")
    if cert is None and host not in ("127.0.0.1", "::1", "localhost"):
        raise ValueError("otlp.certFile: a token is received over TLS only, or on a loopback address")
    return OtlpOptions(int(raw.get("port", 4318)), token, host, cert, key)


def _section(raw: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        raise ValueError(f"{name or 'the file'}: a mapping is expected")
    if unknown := set(raw) - _KEYS[name]:
        raise ValueError(f"{name or 'the file'}: unknown {sorted(unknown)}; legal: {sorted(_KEYS[name])}")
    return raw


def _file(raw: Mapping[str, Any], name: str) -> Path | None:
    return Path(str(raw[name])) if raw.get(name) else None


def _seconds(raw: Mapping[str, Any], name: str, default: float) -> float:
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{name}: {value!r} is not a number over 0")
    return float(value)
