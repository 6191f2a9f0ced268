"""From a manifest's selector to its family.

Why it exists: the one place that knows all families. It must not know what any of them does.
"""

from __future__ import annotations

from typing import Protocol

from kvtier_core.errors import CoreError, Reason
from kvtier_core.selectors.contract import Family, Shape
from kvtier_core.selectors.families.certified_scan import CertifiedScan
from kvtier_core.selectors.families.cluster_kv import ClusterKv
from kvtier_core.selectors.families.em_llm import EmLlm
from kvtier_core.selectors.families.inf_llm import InfLlm
from kvtier_core.selectors.families.infinigen import Infinigen
from kvtier_core.selectors.families.magic_pig import MagicPig
from kvtier_core.selectors.families.pqcache import Pqcache
from kvtier_core.selectors.families.quest import Quest
from kvtier_core.selectors.families.retrieval_attention import RetrievalAttention
from kvtier_core.selectors.families.retro_infer import RetroInfer
from kvtier_core.selectors.families.sparq import Sparq
from kvtier_core.selectors.families.squeezed_attention import SqueezedAttention
from kvtier_crds.manifest import Selector


class _Maker(Protocol):
    def __call__(self, selector: Selector, shape: Shape, page_tokens: int) -> Family: ...


def _retrieval_attention(selector: Selector, shape: Shape, page_tokens: int) -> Family:
    """VARIANT_UNKNOWN names the legal ones."""
    variants: dict[object, _Maker] = {
        "paper": RetrievalAttention.from_manifest,
        "retroInfer": RetroInfer.from_manifest,
    }
    maker = variants.get(selector.parameters.get("variant", "paper"))
    if maker is None:
        raise CoreError(
            Reason.VARIANT_UNKNOWN,
            "retrievalAttention.variant must be one of " + ", ".join(map(str, variants)),
        )
    return maker(selector, shape, page_tokens)


FAMILIES: dict[str, _Maker] = {
    "certifiedScan": CertifiedScan.from_manifest,
    "clusterKv": ClusterKv.from_manifest,
    "infinigen": Infinigen.from_manifest,
    "emLlm": EmLlm.from_manifest,
    "infLlm": InfLlm.from_manifest,
    "magicPig": MagicPig.from_manifest,
    "pqcache": Pqcache.from_manifest,
    "quest": Quest.from_manifest,
    "retrievalAttention": _retrieval_attention,
    "sparq": Sparq.from_manifest,
    "squeezedAttention": SqueezedAttention.from_manifest,
}


def make_family(selector: Selector, shape: Shape, page_tokens: int) -> Family:
    """The family that a manifest names. MANIFEST_INVALID names the field and what is legal."""
    maker = FAMILIES.get(selector.family)
    if maker is None:
        raise CoreError(
            Reason.MANIFEST_INVALID,
            f"selector family {selector.family!r} cannot run here; legal: {', '.join(sorted(FAMILIES))}",
        )
    return maker(selector, shape, page_tokens)
