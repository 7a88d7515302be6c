"""The operators of one iteration, over a flat batch of N tokens. This file knows tensors, and nothing of models or requests.

Where an operator is more than a line of torch it stands here twice, side by side: `op_ref` is the definition, in plain
torch and float32; `op` is what the model calls, and picks what is fast on the machine at hand.

The cache. One layer's keys and values live in `kv` (2, n_row, D): plane 0 is K, plane 1 is V, a row is one head's vector of
one token. A page (one token's K and V) owns n_kv_head rows in each plane. Head h of a page whose first row is `row` lies at

    row + h * stride        stride = 1: the page lies alone, its heads side by side        (grow: page by page)
                            stride = n: n pages lie together, head after head, so that     (reserve: a whole request)
                                        one head's context is one contiguous block

and so both allocation policies, and every kernel, share one address formula.
"""
import ctypes
import sys
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

BLOCK_ROWS = 128  # query rows of a chunk that attend in one call: smaller wastes less above the diagonal, larger runs faster
ALIGN = 32  # softmax is a quarter slower on rows that are no multiple of so many scores
FEW_ROWS = 8  # up to so many rows a request streams its context from memory (a decode, a verification); beyond, it multiplies (a chunk)


if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):  # glibc hands large blocks back to the system when they are
    for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD   # freed, and each iteration would fault its activations in
        ctypes.CDLL(None).mallopt(parameter, 2**31 - 1)                # again, a tenth of its time: keep them


# ---------------------------------------------------------------- linear: every weight read once for all N tokens

def pack(weight):
    """weight (C_out, C_in), reordered once into the blocks this CPU's matrix units want; unchanged where there are none."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return weight
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)


def linear_ref(x, weight, bias=None):
    """x (..., C_in) @ weightᵀ + bias in x's own dtype, whatever the weight is stored as."""
    weight = (weight.to_dense() if weight.is_mkldnn else weight).to(x.dtype)
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


def linear(x, weight, bias=None):
    """x (..., C_in), weight (C_out, C_in) as `pack` left it -> (..., C_out)."""
    if x.dtype != weight.dtype:  # the float32 oracle over bfloat16 weights
        return linear_ref(x, weight, bias)
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


# ---------------------------------------------------------------- rotary positions

def rope_angles(positions, inv_freq, dtype):
    """positions (N,), inv_freq (D/2,) -> cos, sin (N, 1, D); sin carries the sign of the half that `rotate` adds it to."""
    angle = positions[:, None].float() * inv_freq  # (N, D/2)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1)[:, None].to(dtype), torch.cat([-sin, sin], -1)[:, None].to(dtype)


def rotate(x, cos, sin):
    """Rotate x (..., N, heads, D) by its positions; element i pairs with i + D/2, as in Hugging Face checkpoints."""
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, -1), sin)


# ---------------------------------------------------------------- attention over the cache

@dataclass
class Segment:
    """R neighbouring requests that each feed n tokens: a block of a chunk's rows (R = 1) or a run of decodes (n = 1).

    Both are the same sum: n rows against a context of up to `ctx` tokens, causal from the diagonal on [SARATHI Fig. 6]."""
    start: int  # first of its R * n rows in the flat batch
    R: int
    n: int
    ctx: int  # tokens in the longest context, its own rows included, and `pad` more that nobody sees
    row: int = 0  # first cache row of the first request
    stride: int = 0  # rows between two heads; the R requests' heads follow one another at this stride
    index: torch.Tensor | None = None  # (Hk * ctx,) rows to gather, where the pages do not lie together
    mask: torch.Tensor | None = None  # (R, 1, n * G, w) added to the scores of the last w tokens of ctx: causal_mask
    pad: int = 0  # as context_pad says


def write_kv(kv, k, v, rows, segments):
    """Put the new k and v (N, Hk, D) into kv (2, n_row, D): the first m tokens one by one at rows (m, Hk), and the blocks of
    chunks behind them as the blocks they are."""
    m, (_, Hk, D) = len(rows), k.shape
    for plane, x in zip(kv, (k, v)):
        if m:
            plane[rows] = x[:m]
        for s in segments:
            if s.start >= m:
                first = plane.storage_offset() + (s.row + s.ctx - s.pad - s.n) * D
                plane.as_strided((Hk, s.n, D), (s.stride * D, D, 1), first).copy_(x[s.start:s.start + s.n].transpose(0, 1))


def copies(dtype, device):
    """Whether torch.bmm copies operands that are not one contiguous block: in bfloat16 on a CPU (oneDNN)."""
    return dtype == torch.bfloat16 and device.type == "cpu"


def context_pad(ctx, n, stride, dtype, device):
    """How many tokens beyond ctx n rows should attend to, masked, for speed; the owner's pages end at `stride` tokens. They must
    have been zeroed, or what is in them could be no number."""
    if n > FEW_ROWS:
        return min(-ctx % ALIGN, stride - ctx)
    return stride - ctx if copies(dtype, device) and stride <= 2 * ctx else 0  # reading it all in place beats copying half of it


@lru_cache(maxsize=256)  # the same few shapes come back in every iteration
def causal_mask(ahead, n, group, pad, dtype, device):
    """What to add to the last columns of the scores. ahead: each request's cached tokens beyond the shortest one's, a tuple of R
    ints. -> (R, 1, n * group, w), w = max(ahead) + n + pad, of 0 and -inf; columns before these w are seen by every row; None for
    one row."""
    width = max(ahead) + n + pad
    if width == 1:
        return None
    last = torch.tensor(ahead)[:, None] + torch.arange(n).repeat_interleave(group)  # (R, n * group) the last of them each row sees
    hidden = torch.arange(width) > last[..., None]
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))[:, None].to(device)


def attention_ref(q, kv, tables):
    """The definition. q (N, H, D); kv (2, n_row, D); tables: one (rows (ctx, Hk), n) per request, in the order of the batch:
    its n newest rows attend to all ctx tokens up to themselves. -> (N, H, D)"""
    out, start = [], 0
    for rows, n in tables:
        ctx, Hk = rows.shape
        k, v = kv[:, rows].float().repeat_interleave(q.size(1) // Hk, 2)  # (ctx, H, D) each
        scores = torch.einsum("nhd,chd->hnc", q[start:start + n].float(), k) * q.size(-1) ** -0.5
        hidden = torch.arange(ctx) > (ctx - n + torch.arange(n))[:, None]
        p = scores.masked_fill(hidden.to(scores.device), float("-inf")).softmax(-1)
        out.append(torch.einsum("hnc,chd->nhd", p, v))
        start += n
    return torch.cat(out).to(q.dtype)


def attention(q, kv, segments, n_kv_head):
    """q (N, H, D), kv (2, n_row, D), segments that cover the N rows -> (N, H, D). Contexts that lie together are read in place."""
    N, H, D = q.shape
    G = H // n_kv_head  # the G heads of a group share the loads of one K and V
    out, q = torch.empty_like(q), q * D ** -0.5
    for s in segments:
        rows = slice(s.start, s.start + s.R * s.n)
        qs = q[rows].view(s.R, s.n, n_kv_head, G, D).transpose(1, 2).reshape(s.R * n_kv_head, s.n * G, D)
        y = _attend(qs, _context(kv[0], s, n_kv_head), _context(kv[1], s, n_kv_head), s.mask)
        out[rows].view(s.R, s.n, n_kv_head, G, D).copy_(y.view(s.R, n_kv_head, s.n, G, D).transpose(1, 2))
    return out


def _context(plane, s, n_kv_head):
    """plane (n_row, D): the segment's keys or values (R * Hk, ctx, D), a view unless its pages are scattered."""
    D = plane.size(-1)
    if s.index is not None:
        return plane.index_select(0, s.index).view(-1, s.ctx, D)
    return plane.as_strided((s.R * n_kv_head, s.ctx, D), (s.stride * D, D, 1), plane.storage_offset() + s.row * D)


def _attend(q, k, v, mask):
    """q (B, n, D) scaled, k and v (B, ctx, D), mask (R, 1, n, w) over the last w columns or None -> (B, n, D)"""
    if q.size(1) <= FEW_ROWS:  # K streams past q: the faster way round where memory is the limit
        scores = torch.bmm(k, q.transpose(1, 2)).transpose(1, 2).contiguous()  # (B, n, ctx)
    else:
        if copies(k.dtype, k.device):
            k = k.contiguous()  # bmm would do it by itself, but transposed, and five times slower
        scores = torch.bmm(q, k.transpose(1, 2))
    if mask is not None:
        scores.view(len(mask), -1, *scores.shape[1:])[..., -mask.size(-1):].add_(mask)
    return torch.bmm(scores.softmax(-1), v)


# ---------------------------------------------------------------- sampling

def target_probs(logits, temperature, top_k, top_p):
    """The distribution that is sampled from. logits (M, V); temperature > 0, top_k (0: all), top_p, each (M,) -> (M, V) float32.
    Kept are the top_k likeliest tokens and, of these, the fewest whose probabilities reach top_p."""
    p, order = (logits.float() / temperature[:, None]).softmax(-1).sort(-1, descending=True)
    rank = torch.arange(p.size(1), device=p.device)
    p = p.masked_fill((top_k[:, None] > 0) & (rank >= top_k[:, None]), 0.0)
    p = p / p.sum(-1, keepdim=True)
    p = p.masked_fill(p.cumsum(-1) - p >= top_p[:, None], 0.0)
    return torch.zeros_like(p).scatter_(1, order, p / p.sum(-1, keepdim=True))


def sample(p, u):
    """One token per row by inverting the cumulative distribution: p (M, V), u (M,) uniform in [0, 1) -> (M,)"""
    cdf = p.double().cumsum(-1)
    return torch.searchsorted(cdf, (u * cdf[:, -1])[:, None], right=True).squeeze(1).clamp_(max=p.size(1) - 1)
