"""The operators of one iteration, over a flat batch of N tokens. This file knows tensors, and nothing of models or requests.

Where an operator is more than a line of torch it stands here up to three times, side by side: `op_ref` is the definition, in
plain torch; `_op_kernel` is Triton, for GPUs; `op` is what the model calls, and picks what is fast on the machine at hand.

The cache. One layer's keys and values live in `kv` (2, n_row, D): plane 0 is K, plane 1 is V, a row is one head's vector of
one token. A page (one token's K and V) owns n_kv_head rows in each plane. Head h of a page whose first row is `row` lies at

    row + h * stride        stride = 1: the page lies alone, its heads side by side        (grow: page by page)
                            stride = n: n pages lie together, head after head, so that     (reserve: a whole request)
                                        one head's context is one contiguous block

and so both allocation policies, and every kernel, share one address formula.
"""
import ctypes
import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
    HAS_TRITON = True
except ImportError:  # plain torch everywhere: the kernels below are read as Python functions, and nobody launches them
    triton, tl, HAS_TRITON = SimpleNamespace(jit=lambda kernel: kernel), SimpleNamespace(constexpr=None), False

BLOCK_ROWS = 128  # query rows of a chunk that attend in one call: smaller wastes less above the diagonal, larger runs faster
ALIGN = 32  # softmax is a quarter slower on rows that are no multiple of so many scores
FEW_ROWS = 8  # up to so many rows a request streams its context from memory (a decode, a verification); beyond, it multiplies (a chunk)


if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):  # glibc hands large blocks back to the system when they are
    for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD   # freed, and each iteration would fault its activations in
        ctypes.CDLL(None).mallopt(parameter, 2**31 - 1)                # again, a tenth of its time: keep them


# ---------------------------------------------------------------- where the Triton kernels run

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter: every kernel as written, on a CPU, slowly


def on_gpu(device):
    """Whether the Triton kernels run on this device."""
    return HAS_TRITON and (device.type == "cuda" or INTERPRET)


def fused(x):
    """Whether they run on x: one flat batch (N, C) on a GPU. Whole sequences (B, T, C), for training and the oracle, are torch's."""
    return x.dim() == 2 and on_gpu(x.device)


def launch(kernel, grid, *args, **constants):
    """kernel[grid](*args): the one door to the GPU, where tests see what goes through."""
    kernel[grid](*args, **constants)


def pow2(n):
    """The smallest power of two that is at least n: tiles have such sides, and mask what is too much."""
    return 1 << (max(int(n), 1) - 1).bit_length()


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


# ---------------------------------------------------------------- between the matrices: residual and norm, activation

def add_norm_ref(x, y, weight, bias, eps):
    """The residual x + y (y None: x) and its RMSNorm, or LayerNorm where there is a bias, over the last dimension. -> both"""
    x, weight = x if y is None else x + y, weight.to(x.dtype)
    if bias is None:
        return x, F.rms_norm(x, weight.shape, weight, eps)
    return x, F.layer_norm(x, weight.shape, weight, bias.to(x.dtype), eps)


@triton.jit
def _add_norm_kernel(x, y, weight, bias, total, out, eps, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """One program, one token: its C numbers are read once, summed, rounded as torch would, normalized, written twice."""
    c = tl.arange(0, BLOCK_C)
    there = c < C
    at = tl.program_id(0).to(tl.int64) * C + c
    r = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    if y is not None:
        r = (r + tl.load(y + at, mask=there, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at, r, mask=there)
        r = r.to(tl.float32)
    if bias is not None:
        r = tl.where(there, r - tl.sum(r) / C, 0.0)
    r = r * tl.rsqrt(tl.sum(r * r) / C + eps) * tl.load(weight + c, mask=there, other=0.0).to(tl.float32)
    if bias is not None:
        r += tl.load(bias + c, mask=there, other=0.0).to(tl.float32)
    tl.store(out + at, r, mask=there)


def add_norm(x, y, weight, bias, eps):
    """x, y (N, C) or y None, weight and bias (C,) or bias None -> x + y and its norm, each (N, C)."""
    if not fused(x):
        return add_norm_ref(x, y, weight, bias, eps)
    N, C = x.shape
    total, out, block = x if y is None else torch.empty_like(x), torch.empty_like(x), pow2(C)
    launch(_add_norm_kernel, (N,), x, y, weight, bias, total, out, eps, C=C, BLOCK_C=block, num_warps=min(16, max(4, block // 512)))
    return total, out


def activate_ref(h, gated):
    """SwiGLU of h (..., 2 I), gate and up side by side -> (..., I); not gated: GELU of h (..., I), by tanh as GPT-2 does."""
    if gated:
        gate, up = h.chunk(2, -1)
        return F.silu(gate) * up
    return F.gelu(h, approximate="tanh")


@triton.jit
def _activate_kernel(h, out, I, GATED: tl.constexpr, BLOCK_I: tl.constexpr):
    """One program, BLOCK_I numbers of one token."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    if GATED:
        x = tl.load(h + 2 * row * I + i, mask=i < I, other=0.0).to(tl.float32)
        y = x * tl.sigmoid(x) * tl.load(h + (2 * row + 1) * I + i, mask=i < I, other=0.0).to(tl.float32)
    else:
        x = tl.load(h + row * I + i, mask=i < I, other=0.0).to(tl.float32)
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # (1 + tanh z) / 2 = sigmoid(2 z), z = sqrt(2 / pi) (...)
    tl.store(out + row * I + i, y, mask=i < I)


def activate(h, gated):
    """h (N, 2 I) gated, else (N, I) -> (N, I)"""
    if not fused(h):
        return activate_ref(h, gated)
    N, I = h.size(0), h.size(1) // (2 if gated else 1)
    out = h.new_empty(N, I)
    launch(_activate_kernel, (N, -(-I // 1024)), h, out, I, GATED=gated, BLOCK_I=1024)
    return out


# ---------------------------------------------------------------- rotary positions

def rope_angles(positions, inv_freq, dtype):
    """positions (N,), inv_freq (D/2,) -> cos, sin (N, 1, D); sin carries the sign of the half that `rotate` adds it to."""
    angle = positions[:, None].float() * inv_freq  # (N, D/2)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1)[:, None].to(dtype), torch.cat([-sin, sin], -1)[:, None].to(dtype)


def rotate(x, cos, sin):
    """Rotate x (..., N, heads, D) by its positions; element i pairs with i + D/2, as in Hugging Face checkpoints."""
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, -1), sin)


def heads(qkv, rope, n_head, n_kv_head):
    """qkv (..., N, (H + 2 Hk) D) -> q (..., N, H, D), k and v (..., N, Hk, D); q and k rotated, unless rope is None."""
    qk, v = qkv.unflatten(-1, (n_head + 2 * n_kv_head, -1)).split([n_head + n_kv_head, n_kv_head], -2)
    q, k = (qk if rope is None else rotate(qk, *rope)).split([n_head, n_kv_head], -2)
    return q, k, v


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


@dataclass
class Pages:
    """What segments are to a CPU: who attends to what, and where it lies. int32 in the GPU's memory, so that launches depend on
    none of the values. A tile is BLOCK_M neighbouring rows of one request, row = token * G + head of the group; a tile of a
    request of n = 0 is empty, as a padded batch may need."""
    rows: torch.Tensor  # (N, 2) the first cache row and the stride of each new token's page
    spans: torch.Tensor  # (B, 6) per request: its first row in the batch, n, n_past, first cache row, stride, first entry in table
    table: torch.Tensor  # (T,) the first rows of all pages of all requests whose pages lie alone
    few: torch.Tensor  # (n_tile, 2) tiles of requests that feed up to FEW_ROWS tokens: request, first row
    many: torch.Tensor  # (n_tile, 2) tiles of chunks
    n_few: int  # tokens in tiles `few`; they lead the batch
    block_few: int  # BLOCK_M of tiles `few`
    block_many: int  # and of tiles `many`

    @classmethod
    def of(cls, tables, strides, n_past, n, group, dtype, device):
        """Per request: the first cache rows of its pages (a list of B arrays), their stride, its cached and its new tokens, each
        (B,), requests of few tokens first. group: query heads per kv head; dtype: the cache's. One copy to the device."""
        strides, n_past, n = (np.asarray(x, np.int32) for x in (strides, n_past, n))
        ends, scattered, few = n_past + n, strides == 1, n <= FEW_ROWS
        assert (np.diff(few.astype(int)) <= 0).all(), "requests of few tokens lead the batch"
        listed = np.where(scattered, ends, 0)
        spans = np.stack([np.cumsum(n) - n, n, n_past, [t[0] for t in tables], strides, np.cumsum(listed) - listed], 1)
        rows = np.stack([np.concatenate([t[a:b] for t, a, b in zip(tables, n_past, ends)]), np.repeat(strides, n)], 1)
        table = np.concatenate([np.empty(0, np.int32), *(t[:m] for t, m in zip(tables, listed) if m)])
        block_many = 32 if dtype == torch.float32 else 128  # what registers and shared memory hold
        block_few = min(64, block_many, max(16, pow2(n[few].max(initial=1) * group)))  # 16: a tensor core's least
        parts = [rows, spans, table, tiles(few, n * group, block_few), tiles(~few, n * group, block_many)]
        sizes = [-(-x.size // 4) * 4 for x in parts]  # 16-byte borders: a kernel is compiled for aligned pointers once
        flat = np.zeros(sum(sizes), np.int32)
        for x, size, end in zip(parts, sizes, np.cumsum(sizes)):
            flat[end - size:end - size + x.size] = x.ravel()
        flat = torch.from_numpy(flat).to(device, non_blocking=True).split(sizes)
        return cls(*(t[:x.size].view(x.shape) for t, x in zip(flat, parts)), int(n[few].sum()), block_few, block_many)


def tiles(chosen, n_row, block):
    """(n_tile, 2) request and first row of each tile of `block` rows, of the chosen (B,) requests of n_row (B,) rows each."""
    requests = np.flatnonzero(chosen)
    count = -(-n_row[requests] // block)
    first = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return np.stack([np.repeat(requests, count), first * block], 1)[::-1]  # a chunk's last rows see most: the longest work first


def rotate_write_ref(qkv, rope, kv, rows, segments, n_head, n_kv_head):
    """Rotate q and k, write k and v into their pages. qkv (N, (H + 2 Hk) D) -> q (N, H, D)"""
    q, k, v = heads(qkv, rope, n_head, n_kv_head)
    if isinstance(segments, Pages):  # all tokens one by one
        rows, segments = rows[:, :1].long() + rows[:, 1:].long() * torch.arange(n_kv_head, device=rows.device), []
    write_kv(kv, k, v, rows, segments)
    return q


@triton.jit
def _rotate_write_kernel(qkv, cos, sin, q, kv, rows, plane, H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr,
                         BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program, BLOCK_H of one token's heads, q, k and v alike: the first H go to q, the rest to the page's rows.

        qkv of a token   q0 q1 q2 q3 | k0 k1 | v0 v1        q0..q3 ──▶ q        k0 ──▶ kv[0, row]  k1 ──▶ kv[0, row + stride]
                         └───rotated───────┘                                    v0 ──▶ kv[1, row]  v1 ──▶ kv[1, row + stride]
    """
    t, d = tl.program_id(0), tl.arange(0, BLOCK_D)[None]
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    there = (head < H + 2 * HK) & (d < D)
    token = qkv + t.to(tl.int64) * ((H + 2 * HK) * D) + head * D
    x = tl.load(token + d, mask=there, other=0.0)
    if cos is not None:
        turned = tl.load(token + (d + D // 2) % D, mask=there, other=0.0).to(tl.float32)
        c, s = tl.load(cos + t * D + d, mask=d < D, other=0.0), tl.load(sin + t * D + d, mask=d < D, other=0.0)
        x = tl.where(head < H + HK, x.to(tl.float32) * c.to(tl.float32) + turned * s.to(tl.float32), x.to(tl.float32))
    tl.store(q + (t.to(tl.int64) * H + head) * D + d, x, mask=there & (head < H))
    row, stride, other = tl.load(rows + 2 * t), tl.load(rows + 2 * t + 1), tl.maximum(head - H, 0)
    cell = (row + other % HK * stride).to(tl.int64) * D + (other // HK).to(tl.int64) * plane
    tl.store(kv + cell + d, x, mask=there & (head >= H))


def rotate_write(qkv, rope, kv, rows, segments, n_head, n_kv_head):
    """qkv (N, (H + 2 Hk) D), rope as rope_angles says or None, kv (2, n_row, D): k and v go to rows and segments as write_kv says,
    or to Pages and their rows. -> q (N, H, D)"""
    if not isinstance(segments, Pages):
        return rotate_write_ref(qkv, rope, kv, rows, segments, n_head, n_kv_head)
    (N, D), (cos, sin) = (len(qkv), kv.size(-1)), rope or (None, None)
    q, n = qkv.new_empty(N, n_head, D), n_head + 2 * n_kv_head
    block = min(16, pow2(n))
    launch(_rotate_write_kernel, (N, -(-n // block)), qkv, cos, sin, q, kv, rows, kv.stride(0), H=n_head, HK=n_kv_head, D=D,
           BLOCK_H=block, BLOCK_D=pow2(D))
    return q


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


@triton.jit
def _attention_kernel(q, kv, out, lse, spans, table, tiles, n_out, q_stride, plane, scale, H: tl.constexpr, G: tl.constexpr,
                      D: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program, one tile of one kv head: BLOCK_M rows (a token's G heads side by side share the loads) against one split of the
    context. A chunk has many tiles and one split, a decode one tile and many splits; the sum is the same.

                   context: n_past cached tokens, n new ones               for each BLOCK_N tokens of the split:
                   ├── split 0 ──┼── split 1 ──┼── split 2 ┤                 their pages' rows: row + j, or from the table
        rows of    ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■                     K there (BLOCK_N, D), scores, what lies ahead hidden
        the tile   ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■                   old sums shrink to the new maximum [FlashAttention]
                   ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■                 V there (BLOCK_N, D), weighted, added
    """
    h, split, m = tl.program_id(1), tl.program_id(2), tl.load(tiles + 2 * tl.program_id(0) + 1) + tl.arange(0, BLOCK_M)
    span = spans + 6 * tl.load(tiles + 2 * tl.program_id(0))
    start, n, n_past = tl.load(span), tl.load(span + 1), tl.load(span + 2)
    row, stride, first = tl.load(span + 3), tl.load(span + 4), tl.load(span + 5)
    d, real, last = tl.arange(0, BLOCK_D)[None], m < n * G, n_past + m // G  # last: the last token that each row sees
    at = (start + m // G) * H + h * G + m % G  # (BLOCK_M,) token and head in the batch
    x = tl.load(q + (start + m // G)[:, None] * q_stride + (h * G + m % G)[:, None] * D + d, mask=real[:, None] & (d < D), other=0.0)

    end = tl.max(tl.where(real, last + 1, 0))
    share = tl.cdiv(tl.cdiv(end, tl.num_programs(2)), BLOCK_N) * BLOCK_N  # whole blocks: none is in two splits
    end = tl.minimum(end, (split + 1) * share)
    top, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for block in range(split * share, end, BLOCK_N):
        j = block + tl.arange(0, BLOCK_N)
        page = tl.where(stride > 1, row + j, tl.load(table + first + j, mask=(j < end) & (stride == 1), other=0))
        cell = (page + h * stride).to(tl.int64)[:, None] * D + d  # (BLOCK_N, BLOCK_D)
        there = (j < end)[:, None] & (d < D)
        k = tl.load(kv + cell, mask=there, other=0.0)
        s = tl.dot(x, tl.trans(k), input_precision="tf32x3") * scale
        s = tl.where(j[None] <= last[:, None], s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        shift = tl.where(new == float("-inf"), 0.0, new)  # a row that has seen nothing yet, in a split ahead of it
        p, shrink = tl.exp2(s - shift[:, None]), tl.exp2(top - shift)
        v = tl.load(kv + plane + cell, mask=there, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="tf32x3")
        top, total = new, total * shrink + tl.sum(p, 1)

    seen = real & (total > 0)
    if SPLIT:
        at += split * n_out
        tl.store(lse + at, tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf")), mask=real)
    y = acc / tl.where(seen, total, 1.0)[:, None]
    tl.store(out + at.to(tl.int64)[:, None] * D + d, y, mask=seen[:, None] & (d < D))


@triton.jit
def _combine_kernel(parts, lse, out, n_out, D: tl.constexpr, N_SPLIT: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program, one head of one token: the mean of its splits' results, each weighted by the sum of its scores' exponentials."""
    at, d = tl.program_id(0) + n_out * tl.arange(0, N_SPLIT), tl.arange(0, BLOCK_D)[None]
    w = tl.load(lse + at)
    w = tl.exp2(w - tl.max(w, 0))
    y = tl.load(parts + at.to(tl.int64)[:, None] * D + d, mask=(w > 0)[:, None] & (d < D), other=0.0)  # unseen splits hold anything
    y = tl.sum(w[:, None] * y, 0)[None] / tl.sum(w, 0)
    tl.store(out + tl.program_id(0).to(tl.int64) * D + d, y, mask=d < D)


def attention_pages(q, kv, pages, n_kv_head, n_split=0):
    """q (N, H, D), kv (2, n_row, D), Pages -> (N, H, D). n_split: into how many parts a decode's context is cut, a power of two;
    0: as many as fill the GPU. At most three launches, whose grids depend on the numbers of tiles alone."""
    N, H, D = q.shape
    out = q.new_empty(N, H, D)

    def attend(tiles, block, n_split, out, lse, n_out):
        scale = D ** -0.5 * 1.4426950408889634  # log2(e): a GPU's own exponential is 2 ** x
        launch(_attention_kernel, (len(tiles), n_kv_head, n_split), q, kv, out, lse, pages.spans, pages.table, tiles, n_out, q.stride(0),
               kv.stride(0), scale, H=H, G=H // n_kv_head, D=D, SPLIT=n_split > 1, BLOCK_M=block,
               BLOCK_N=32 if q.dtype == torch.float32 else 64, BLOCK_D=pow2(D), num_warps=4 if block == 16 else 8, num_stages=2)

    if len(pages.many):
        attend(pages.many, pages.block_many, 1, out, None, 0)
    if len(pages.few):
        n_split = n_split or min(32, pow2(2 * n_processors(q.device) / (len(pages.few) * n_kv_head)))
        if n_split == 1:
            attend(pages.few, pages.block_few, 1, out, None, 0)
        else:
            n_out = pages.n_few * H
            parts, lse = (torch.empty(n_split, n_out, size, dtype=torch.float32, device=q.device) for size in (D, 1))
            attend(pages.few, pages.block_few, n_split, parts, lse, n_out)
            launch(_combine_kernel, (n_out,), parts, lse, out, n_out, D=D, N_SPLIT=n_split, BLOCK_D=pow2(D))
    return out


@lru_cache
def n_processors(device):
    """The GPU's streaming multiprocessors, or a few for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def attention(q, kv, segments, n_kv_head):
    """q (N, H, D), kv (2, n_row, D), segments (or Pages) that cover the N rows -> (N, H, D). Contexts that lie together are read
    in place."""
    if isinstance(segments, Pages):
        return attention_pages(q, kv, segments, n_kv_head)
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


# ---------------------------------------------------------------- verification: row m gave p for the token that its draft m guesses

def accept(p, q, draft, u):
    """Lossless rejection sampling [SmartSpec §2; arXiv 2211.17192]: each row keeps its draft x with probability min(1, p(x) / q(x)).
    p (M, V) the target's distribution; q (M, V) the one x was drawn from, None: x was certain; draft (M,), -1: none; u (M,) -> (M,) bool"""
    x = draft.clamp(min=0)[:, None]
    return (draft >= 0) & (u * (1.0 if q is None else q.gather(1, x).squeeze(1)) < p.gather(1, x).squeeze(1))


def residual(p, q, draft):
    """(M, V) what a row draws from once its draft was turned down: max(0, p - q), not normalized; p where there was no draft."""
    there = (draft >= 0)[:, None]
    rest = p.scatter(1, draft.clamp(min=0)[:, None], 0.0) if q is None else (p - q).clamp_(min=0)
    return torch.where(there & (rest.sum(-1, keepdim=True) > 0), rest, p)  # p = q but for rounding: nothing is left


def run_ends(accepted, first):
    """accepted (M,) bool, false in every request's last row; first (B,) their first rows -> (B,) the row where each one's run of
    accepted drafts ends: the one that gives its next token."""
    rows = torch.arange(len(accepted), device=accepted.device).masked_fill_(accepted, len(accepted))
    return rows.flip(0).cummin(0).values.flip(0)[first]  # the nearest row from here on that is not accepted
