"""A selector's declaration as JSON text, as a manifest holds it.

Why it exists: who evaluates selectors declares them outside a cluster, and must mean what a manifest means.
It must not know families.
"""

from __future__ import annotations

from pydantic import ValidationError

from kvtier_core.errors import CoreError, Reason
from kvtier_crds.manifest import Selector


def declared(text: str) -> Selector:
    """The selector of a manifest's JSON. MANIFEST_INVALID names the first field that is wrong."""
    try:
        return Selector.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CoreError(Reason.MANIFEST_INVALID, f"selector.{where}: {first['msg']}") from error
