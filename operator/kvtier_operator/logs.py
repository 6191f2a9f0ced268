"""JSON logs, one object a line, with the ids of the current span. Formats; decides nothing."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from opentelemetry import trace

_OWN = frozenset(vars(logging.LogRecord("", 0, "", 0, "", None, None))) | {"message", "asctime", "taskName"}
_PLAIN = (str, int, float, bool, type(None))


class JsonFormatter(logging.Formatter):
    """`extra` fields become members; anything that is not a plain value is left out."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            line["trace_id"] = f"{context.trace_id:032x}"
            line["span_id"] = f"{context.span_id:016x}"
        for name, value in vars(record).items():
            if name not in _OWN and isinstance(value, _PLAIN):
                line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure(level: str) -> None:
    """Replaces the root's handlers: everything goes to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # kopf tells of every object and every reconnect at INFO; its warnings are enough.
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
    logging.getLogger("kopf.activities").setLevel(logging.WARNING)
