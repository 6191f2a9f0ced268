"""Quest's page boxes and scores (Tang et al., "Quest", ICML 2024, algorithm 1), grouped for GQA.

It exists to rank pages without reading them. It must not know which pages are mandatory or how many
may be read; and since the bound is loose, a score is a ranking, never a certificate.
"""

from __future__ import annotations

import torch
from torch import Tensor


def quest_boxes(k: Tensor, page_tokens: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each key channel in each page.

    k: float32 [R, Hk, d]. Returns (kmin, kmax), each [ceil(R / page_tokens), Hk, d]; the last page may
    be short. A NaN in a key makes its channel of the box NaN. Raises ValueError.
    """
    if k.dim() != 3 or page_tokens < 1:
        raise ValueError(f"want k [R,Hk,d] and page_tokens >= 1, got {tuple(k.shape)} and {page_tokens}")
    rows, heads, d = k.shape
    full = rows // page_tokens
    pages = k[: full * page_tokens].reshape(full, page_tokens, heads, d)
    if full == 0:
        lows, highs = [], []
    else:
        low, high = torch.aminmax(pages, dim=1)
        lows, highs = [low], [high]
    if rows % page_tokens:
        low, high = torch.aminmax(k[full * page_tokens :], dim=0, keepdim=True)
        lows.append(low)
        highs.append(high)
    if not lows:
        return k.new_empty(0, heads, d), k.new_empty(0, heads, d)
    return torch.cat(lows), torch.cat(highs)


def quest_score(q: Tensor, kmin: Tensor, kmax: Tensor) -> Tensor:
    """Upper bound on q.k (unscaled) over each page, the largest of a group's query heads.

    q: float32 [Hq, d]; kmin, kmax: [P, Hk, d]; returns [Hk, P]. Formula, for finite boxes:
    sum_c max(q_c kmin_c, q_c kmax_c) = relu(q).kmax - relu(-q).kmin. In float32 the bound holds up to
    rounding: within d * 2^-23 * sum_c |q_c| max(|kmin_c|, |kmax_c|). Raises ValueError.
    """
    if q.dim() != 2 or kmin.shape != kmax.shape or kmin.dim() != 3 or kmin.shape[2] != q.shape[1]:
        raise ValueError(
            f"want q [Hq,d], kmin and kmax [P,Hk,d], got {tuple(q.shape)}, {tuple(kmin.shape)}, "
            f"{tuple(kmax.shape)}"
        )
    hq, d = q.shape
    hk = kmin.shape[1]
    if hk == 0 or hq % hk:
        raise ValueError(f"{hq} query heads do not divide over {hk} KV heads")
    groups = q.view(hk, hq // hk, d)
    upper = torch.bmm(groups.clamp_min(0), kmax.permute(1, 2, 0))
    upper += torch.bmm(groups.clamp_max(0), kmin.permute(1, 2, 0))
    return upper.amax(1)
