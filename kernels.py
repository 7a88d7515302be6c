"""The operators of one iteration, over a flat batch of N tokens. This file knows tensors, the
rows that each request feeds and the pages they lie in, and nothing of models, schedulers or text.

Where an operator is more than a line of torch it stands here up to three times, side by side: `op_ref` is the definition, in
plain torch; `_op_kernel` is Triton, for GPUs; `op` is what the model calls, and picks what is fast on the machine at hand.

The cache. One layer's keys and values live in `kv` (2, n_row, D): plane 0 is K, plane 1 is V, a row is one head's vector of
one token. A page (one token's K and V) owns n_kv_head rows in each plane. Head h of a page whose first row is `row` lies at

    row + h * stride        stride = 1: the page lies alone, its heads side by side        (grow: page by page)
                            stride = n: n pages lie together, head after head, so that     (reserve: a whole request)
                                        one head's context is one contiguous block

and so both allocation policies, and every kernel, share one address formula. One exception: where torch attends, on a CPU, and a
request's n pages lie together, n a multiple of D, its K is stored in key tiles of D tokens, each transposed:

    V, and K elsewhere: row t of a tile is  v_t[0] v_t[1] ... v_t[D-1]      K: row i of a tile is  k_0[i] k_1[i] ... k_(D-1)[i]

The scores of D tokens, q[0] row 0 + q[1] row 1 + ..., are then what a value is, a sum of rows, each times a number, and one routine
computes both.
"""
import atexit
import ctypes
import os
import pickle
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from functools import cached_property, lru_cache
from itertools import islice, pairwise
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
    HAS_TRITON = True
except ImportError:  # plain torch everywhere: the kernels below are read as Python functions, and nobody launches them
    triton, tl, HAS_TRITON = SimpleNamespace(jit=lambda kernel: kernel), SimpleNamespace(constexpr=None), False

CHUNK_ROWS = 128  # query rows of a chunk that attend in one call: smaller wastes less above the diagonal, larger runs faster
ALIGN = 32  # contexts are filled up to a multiple of so many tokens: softmax is a quarter faster, and oneDNN meets few new shapes
CALL = 256  # to start an attention call takes as long as to attend to so many tokens: decodes share one as long as filling up adds no more
PART = 4 * 2**20  # bytes of K or V that are gathered at once
FEW_ROWS = 8  # up to so many rows a request streams its context from memory (a decode, a verification); beyond, it multiplies (a chunk)
MOST_CHUNKS = 8  # so many chunks a recorded iteration has room for

# glibc gives large blocks back to the system when they are freed; every iteration would fault its activations in again, a tenth of its time
if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
    for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        ctypes.CDLL(None).mallopt(parameter, 2**31 - 1)

# oneDNN keeps the kernels that it compiled for the last 1,024 shapes, those of 200 batch sizes: where more come and go, each iteration
# compiles again, a tenth of its time. Four times as many take up to 1.5 GB
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "4096")


# ---------------------------------------------------------------- where the Triton kernels run

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter: every kernel as written, on a CPU, slowly


def on_gpu(device):
    """Whether the Triton kernels run on this device."""
    return HAS_TRITON and (device.type == "cuda" or INTERPRET)


def fused(x):
    """Whether the Triton kernels compute x: one flat batch (N, C) on a GPU. Whole sequences (B, T, C), for training and the oracle, are torch's."""
    return x.dim() == 2 and on_gpu(x.device)


def launch(kernel, grid, *args, **constants):
    """kernel[grid](*args): the one door to the GPU, where tests see what goes through."""
    kernel[grid](*args, **constants)


def pow2(n):
    """The smallest power of two that is at least n: tiles have such sides, and mask what is too much."""
    return 1 << (max(int(n), 1) - 1).bit_length()


def cdiv(n, unit):
    """How many units it takes to hold n."""
    return -(-n // unit)


def round_up(n, unit):
    """The smallest multiple of unit that is at least n."""
    return cdiv(n, unit) * unit


def filled(x, n, value):
    """x (m, ...) -> (n, ...), all behind x alike"""
    return np.concatenate([x, np.broadcast_to(np.asarray(value, x.dtype), (n - len(x), *x.shape[1:]))])


def upload(homes, device, into=None):
    """Dataclasses -> (flat, copies of them), where each numpy array is an int32 tensor of its shape on the device, a view of flat: all
    by one copy. into: the flat of homes of the same sizes, to be written over."""
    names = [[f.name for f in fields(home) if isinstance(getattr(home, f.name), np.ndarray)] for home in homes]
    parts = [getattr(home, name) for home, own in zip(homes, names) for name in own]
    sizes = [round_up(x.size, 4) for x in parts]  # 16-byte borders: a kernel is compiled for aligned pointers once
    flat = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    for x, room in zip(parts, flat.split(sizes)):
        room.numpy()[:x.size] = x.ravel()
    flat = flat.to(device, non_blocking=True) if into is None else into.copy_(flat, non_blocking=True)
    views = iter([t[:x.size].view(x.shape) for t, x in zip(flat.split(sizes), parts)])
    return flat, [replace(home, **{name: next(views) for name in own}) for home, own in zip(homes, names)]


def place(x, device):
    """A numpy array as a tensor on the device, which it does not wait for."""
    x = torch.from_numpy(x)
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


def fetch(x):
    """-> a function that waits for x, but for nothing that the device is given after this: its values as lists"""
    if x.device.type != "cuda":
        return x.tolist
    host, done = x.to("cpu", non_blocking=True), torch.cuda.Event()
    done.record()
    return lambda: (done.synchronize(), host.tolist())[1]


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
    launch(_activate_kernel, (N, cdiv(I, 1024)), h, out, I, GATED=gated, BLOCK_I=1024)
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


def split_heads(qkv, rope, n_head, n_kv_head):
    """qkv (..., N, (H + 2 Hk) D) -> q (..., N, H, D), k and v (..., N, Hk, D); q and k rotated, unless rope is None."""
    qk, v = qkv.unflatten(-1, (n_head + 2 * n_kv_head, -1)).split([n_head + n_kv_head, n_kv_head], -2)
    q, k = (qk if rope is None else rotate(qk, *rope)).split([n_head, n_kv_head], -2)
    return q, k, v


# ---------------------------------------------------------------- attention over the cache

@dataclass
class Table:
    """The pages of one owner. rows[i]: where in the cache the first head of page i lies, each next head `stride` rows on (1: the page lies
    alone; n: n pages together, head after head). In key tiles this is where V lies; K is transposed there."""
    rows: np.ndarray
    stride: int
    space: np.ndarray | None = None  # the array whose filled part rows is: room to grow without a copy

    def key_tile(self, D):
        """Of how many tokens K lies together, transposed: D, if these are whole key tiles of D pages; else 1."""
        return D if self.stride > 1 and self.stride % D == 0 else 1

    def at(self, tokens, n_kv_head):
        """(n, Hk) the cache rows of these tokens."""
        return self.rows[tokens, None] + self.stride * np.arange(n_kv_head)

    def for_heads(self, n_kv_head, other):
        """The same pages in the cache of a model with `other` kv heads."""
        if n_kv_head == other:
            return self
        pages = self.rows // n_kv_head
        return Table(pages * other if self.stride == 1 else pages[0] * other + np.arange(self.stride), self.stride)


class Feed(NamedTuple):
    """What one request feeds to a batch: its tokens past .. end - 1."""
    table: Table
    past: int
    end: int
    parents: tuple | None = None  # where they form a tree: of each the place of the one it follows


@dataclass
class Segment:
    """R requests that each feed n tokens: a block of a chunk's rows (R = 1), or decodes with contexts alike (n = 1).

    Both are the same sum: n rows against a context of up to `ctx` tokens, causal from the diagonal on [SARATHI Fig. 6]."""
    start: int  # first of its R * n rows in the flat batch
    R: int
    n: int
    ctx: int  # tokens of the longest context, its own rows included, rounded up to ALIGN and key_tile; shorter ones are filled up
    key_tile: int  # tokens whose K lies together, transposed: D; or 1: K lies as V does
    index: torch.Tensor  # (2, R * Hk * ctx) int32: the cache rows to read, K's and V's, per request and head. What fills up to ctx is a row
    #                      of the request's own: another's might hold NaN, which no mask removes
    mask: torch.Tensor  # (R, 1, n * G, w) added to the scores of the last w tokens of ctx: causal_mask

    @classmethod
    def cut(cls, feeds, key_tile, n_kv_head, group, dtype, to):
        """A batch as attention calls: a chunk cut into blocks of rows; decodes that feed as many tokens each share one, as long as the
        shorter contexts are filled up with less than a call costs. group: query heads per kv head; to: an array -> a tensor"""
        segments, start, i = [], 0, 0
        while i < len(feeds):
            t, a, longest, _ = feeds[i]
            n, R, tile = longest - a, 1, t.key_tile(key_tile)
            for t, a, b, _ in islice(feeds, i + 1, None):  # of as many tokens, contexts ascend
                filled_up = R * (b - longest)  # what the R before it would read too much, to share a call with it
                if n > FEW_ROWS or b - a != n or filled_up > CALL or t.key_tile(key_tile) != tile:
                    break
                R, longest = R + 1, b
            for j in range(0, n, CHUNK_ROWS):
                segments.append(cls.of(feeds[i:i + R], start + j, j, min(CHUNK_ROWS, n - j), tile, n_kv_head, group, dtype, to))
            start, i = start + R * n, i + R
        return segments

    @classmethod
    def of(cls, feeds, start, skip, n, tile, n_kv_head, group, dtype, to):
        """n tokens of each of these requests, behind the `skip` before them; from row `start` of the batch on."""
        ends = np.array([f.past + skip + n for f in feeds])
        ctx = round_up(int(ends.max()), round_up(ALIGN, tile))
        rows = np.empty((2, len(feeds), 1, ctx), np.int32)
        for i, (f, end) in enumerate(zip(feeds, ends)):
            for row, stop in zip(rows[:, i, 0], (round_up(end, tile), end)):
                row[:stop], row[stop:] = f.table.rows[:stop], f.table.rows[0]
        heads = np.array([f.table.stride for f in feeds], np.int32)[:, None, None] * np.arange(n_kv_head, dtype=np.int32)[:, None]
        index, trees = to((rows + heads).reshape(2, -1)), tuple(f.parents for f in feeds)
        mask = causal_mask(ends - ends.min(), n, group, ctx - int(ends.max()), dtype, index.device, trees if any(trees) else ())
        return cls(start, len(feeds), n, ctx, tile, index, mask)

    @cached_property
    def bags(self):
        """index for each row, (2, R * Hk * n * G * ctx): what embedding_bag sums up, in all layers"""
        return self.index.view(2, -1, 1, self.ctx).expand(-1, -1, self.mask.size(2), -1).reshape(2, -1)

    @cached_property
    def columns(self):
        """K's index in the order that makes of key tiles Kᵀ (D, ctx), one beside the other"""
        return self.index[0].view(-1, self.ctx // self.key_tile, self.key_tile).transpose(1, 2).reshape(-1)


class Chunk(NamedTuple):
    """A chunk of a request whose pages lie together."""
    start: int  # its first row in the batch,
    n: int  # how many it has,
    past: int  # and how many tokens are before them
    row: int  # the first cache row of the request's pages,
    stride: int  # and how many they are
    key_tile: int  # as a Segment's


@dataclass
class Rows:
    """Where K and V of the N new tokens go, on a CPU: of the first n_few each to rows of its own, of a chunk all together."""
    v: torch.Tensor  # (n_few, Hk) cache rows
    k: torch.Tensor  # the same; or (n_few, Hk, D) the place in the plane of each number: key_cells
    chunks: list[Chunk] = field(default_factory=list)
    fresh: torch.Tensor | None = None  # (n, Hk) cache rows of key tiles that these tokens begin and do not fill: cleared, for they are read whole

    @classmethod
    def of(cls, feeds, key_tile, n_kv_head, D, to):
        """Of a batch; to: an array -> a tensor."""
        chunks, few, fresh, start = [], [], [], 0
        for t, a, b, _ in feeds:
            tile = t.key_tile(key_tile)
            if b - a > FEW_ROWS and t.stride > 1:
                chunks.append(Chunk(start, b - a, a, int(t.rows[0]), t.stride, tile))
            else:
                few.append((t, a, b, tile))
            if b - b % tile >= a and b % tile:
                fresh.append(t.at(slice(b - b % tile, round_up(b, tile)), n_kv_head))
            start += b - a
        fresh = to(np.concatenate(fresh)) if fresh else None
        rows = np.concatenate([np.empty((0, n_kv_head), int), *(t.at(slice(a, b), n_kv_head) for t, a, b, _ in few)])
        if all(tile == 1 for *_, tile in few):
            return cls(to(rows), to(rows), chunks, fresh)
        tokens = np.concatenate([np.arange(a, b) for _, a, b, _ in few])
        tiles = np.repeat([tile for *_, tile in few], [b - a for _, a, b, _ in few])
        return cls(to(rows), to(key_cells(rows, tokens, tiles, D)), chunks, fresh)


def key_cells(rows, t, key_tile, D):
    """Where in the plane each number of K has its place. rows (n, Hk): cache rows of tokens t (n,) of their requests; key_tile: as a
    Segment's, for all or (n,) -> (n, Hk, D)"""
    column, step = (np.asarray(x)[..., None, None] for x in (t % key_tile, key_tile))
    return (rows[..., None] - column) * D + np.arange(D) * step + column


def write(kv, k, v, rows):
    """k and v (N, Hk, D) to where Rows say."""
    n_few = len(rows.v)
    if rows.fresh is not None:
        kv[0][rows.fresh] = 0
    kv[1][rows.v] = v[:n_few]
    if rows.k.dim() == 2:
        kv[0][rows.k] = k[:n_few]
    else:
        kv[0].put_(rows.k, k[:n_few])
    for c in rows.chunks:
        _write_chunk(kv, k[c.start:c.start + c.n], v[c.start:c.start + c.n], c)


def _write_chunk(kv, k, v, c):
    """V is one copy, K up to three: to what is left of a key tile, to whole ones, and to the beginning of one."""
    (_, Hk, D), tile, past, end = k.shape, c.key_tile, c.past, c.past + c.n
    keys, values = kv[:, c.row:c.row + Hk * c.stride]
    values.view(Hk, -1, D)[:, past:end] = v.transpose(0, 1)
    whole = min(end, round_up(past, tile))
    for a, b in pairwise((past, whole, max(whole, end // tile * tile), end)):
        if a < b:
            n_tile = max(1, (b - a) // tile)
            part = k[a - past:b - past].unflatten(0, (n_tile, -1)).permute(2, 0, 3, 1)  # (Hk, tiles, D, tokens of each)
            keys.view(Hk, -1, D, tile)[:, a // tile:a // tile + n_tile, :, a % tile:a % tile + part.size(3)] = part


@lru_cache(maxsize=256)  # the same few trees grow in every iteration
def lineage(parents):
    """parents: for each of n rows the row it follows, an earlier one, or -1 -> (n, n) bool: whom each row follows, itself included."""
    sees = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            sees[row] |= sees[parent]
    return sees


@dataclass
class Pages:
    """What the Triton kernels read instead of Segments: where each request's pages are, and which rows each program computes. numpy
    arrays as `of` makes them, int32 on the GPU once uploaded; launches depend on their sizes alone, so that a recording can be
    replayed with other contents. A tile is BLOCK_M neighbouring rows of one request, row = token * G + head of the group."""
    rows: torch.Tensor  # (N, 2) the first cache row and the stride of each new token's page
    spans: torch.Tensor  # (B, 7) per request: its first row in the batch, n, n_past, first cache row, stride, first entry in table, and in
    #                      trees (-1: its tokens follow one another)
    table: torch.Tensor  # (T,) the first rows of all pages of all requests whose pages lie alone
    trees: torch.Tensor  # (T,) for each kind of tree that tokens form, (n, n): 1 where one is seen by another
    few: torch.Tensor  # (n_tile, 2) tiles of requests that feed up to FEW_ROWS tokens: request, first row
    many: torch.Tensor  # (n_tile, 2) tiles of chunks
    n_few: int  # tokens in tiles `few`; they lead the batch
    block_few: int  # BLOCK_M of tiles `few`
    block_many: int  # and of tiles `many`
    group: int  # G

    @classmethod
    def of(cls, tables, strides, n_past, n, group, dtype, parents=()):
        """Per request: the first cache rows of its pages (a list of B arrays), their stride, its cached and its new tokens, each
        (B,), requests of few tokens first. group: query heads per kv head; dtype: the cache's; parents: of the new tokens where they
        form a tree, None where they do not, or () for nobody."""
        strides, n_past, n = (np.asarray(x, np.int32) for x in (strides, n_past, n))
        ends, scattered, few = n_past + n, strides == 1, n <= FEW_ROWS
        assert (np.diff(few.astype(int)) <= 0).all(), "requests of few tokens lead the batch"
        listed = np.where(scattered, ends, 0)
        nothing, kinds = np.empty(0, np.int32), [p for p in dict.fromkeys(parents) if p]
        trees = [lineage(p).numpy().ravel().astype(np.int32) for p in kinds]
        begin = dict(zip(kinds, np.cumsum([0, *map(len, trees)]).tolist()))
        spans = np.stack([np.cumsum(n) - n, n, n_past, [t[0] for t in tables], strides, np.cumsum(listed) - listed,
                          [begin.get(p, -1) for p in parents or [None] * len(n)]], 1)
        rows = np.stack([np.concatenate([nothing, *(t[a:b] for t, a, b in zip(tables, n_past, ends))]), np.repeat(strides, n)], 1)
        table = np.concatenate([nothing, *(t[:m] for t, m in zip(tables, listed) if m)])
        part = 2 if kinds else 1  # a tree's mask takes registers, too
        block_many = (32 if dtype == torch.float32 else 128) // part  # what registers and shared memory hold
        block_few = min(64 // part, block_many, max(16, pow2(n[few].max(initial=1) * group)))  # 16: a tensor core's least
        return cls(rows, spans, table, np.concatenate([nothing, *trees]), tiles(few, n * group, block_few),
                   tiles(~few, n * group, block_many), int(n[few].sum()), block_few, block_many, group)

    def padded(self, N, n_few, has_chunks, scratch):
        """The same for N tokens, n_few of them in tiles `few`, so that all sizes follow from these numbers. Rows of nobody are written
        to the page at cache row `scratch`; tiles of nobody belong to a last request of n = 0."""
        nobody = n_few + MOST_CHUNKS
        n_many = has_chunks * (cdiv(N * self.group, self.block_many) + MOST_CHUNKS)
        n_tile = min(n_few, pow2(len(self.few) or n_few))  # not one for each token of a verification: from tiles follows how contexts are split
        return replace(self, rows=filled(self.rows, N, (scratch, 1)), spans=filled(self.spans, nobody + 1, (0, 0, 0, 0, 1, 0, -1)),
                       table=filled(self.table, table_room(self.table), 0), trees=filled(self.trees, len(self.trees) and pow2(len(self.trees)), 0),
                       few=filled(self.few, n_tile, (nobody, 0)), many=filled(self.many, n_many, (nobody, 0)), n_few=n_few)


def table_room(table):
    """How long a padded batch's table is: in few steps, for each makes a recording of its own."""
    return max(2**14, pow2(len(table)))


def tiles(chosen, n_row, block):
    """(n_tile, 2) request and first row of each tile of `block` rows, of the chosen (B,) requests of n_row (B,) rows each."""
    requests = np.flatnonzero(chosen)
    count = cdiv(n_row[requests], block)
    first = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return np.stack([np.repeat(requests, count), first * block], 1)[::-1]  # a chunk's last rows see most: the longest work first


def rotate_write_ref(qkv, rope, kv, rows, n_head, n_kv_head):
    """Rotate q and k, write k and v into their pages. qkv (N, (H + 2 Hk) D) -> q (N, H, D)"""
    q, k, v = split_heads(qkv, rope, n_head, n_kv_head)
    if isinstance(rows, Pages):
        row, stride = rows.rows.long().split(1, 1)
        row = row + stride * torch.arange(n_kv_head, device=row.device)
        rows = Rows(row, row)
    write(kv, k, v, rows)
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


def rotate_write(qkv, rope, kv, rows, n_head, n_kv_head):
    """qkv (N, (H + 2 Hk) D), rope as rope_angles says or None, kv (2, n_row, D): k and v go to it as rows, Rows or Pages, say.
    -> q (N, H, D)"""
    if not isinstance(rows, Pages):
        return rotate_write_ref(qkv, rope, kv, rows, n_head, n_kv_head)
    (N, D), (cos, sin) = (len(qkv), kv.size(-1)), rope or (None, None)
    q, n = qkv.new_empty(N, n_head, D), n_head + 2 * n_kv_head
    block = min(16, pow2(n))
    launch(_rotate_write_kernel, (N, cdiv(n, block)), qkv, cos, sin, q, kv, rows.rows, kv.stride(0), H=n_head, HK=n_kv_head, D=D,
           BLOCK_H=block, BLOCK_D=pow2(D))
    return q


@lru_cache(maxsize=16)
def stairs(n, dtype, device):
    """(n + 1, n): row i is 0 in the first i columns, and -inf behind them."""
    return torch.full((n + 1, n), float("-inf"), dtype=dtype, device=device).triu_()


def causal_mask(ahead, n, group, pad, dtype, device, trees=()):
    """What to add to the last columns of the scores. ahead (R,): each request's cached tokens beyond the shortest one's. -> (R, 1,
    n * group, w), w = max(ahead) + n + pad, of 0 and -inf; columns before these w are seen by every row. trees: where a request's
    rows do not follow one another but form a tree, their parents; else None."""
    sees, w = (ahead[:, None] + np.arange(1, n + 1)).repeat(group), int(ahead.max()) + n + pad  # (R * n * group,) how many of them
    mask = stairs(pow2(w), dtype, device)[:, :w].index_select(0, place(sees, device)).view(len(ahead), 1, -1, w)
    for rows, start, parents in zip(mask, ahead, trees):
        if parents:
            rows[0, :, start:start + n] = torch.where(lineage(parents), 0.0, float("-inf")).repeat_interleave(group, 0)
    return mask


def attention_ref(q, kv, tables):
    """The definition. q (N, H, D); kv (2, n_row, D); tables: one (rows (ctx, Hk), n) per request, in the order of the batch:
    its n newest rows attend to all ctx tokens up to themselves, or, if there is a third, their parents in a tree, to what was cached
    and those that they follow. -> (N, H, D)"""
    out, start = [], 0
    for rows, n, *parents in tables:
        ctx, Hk = rows.shape
        k, v = kv[:, rows].float().repeat_interleave(q.size(1) // Hk, 2)  # (ctx, H, D) each
        scores = torch.einsum("nhd,chd->hnc", q[start:start + n].float(), k) * q.size(-1) ** -0.5
        hidden = torch.arange(ctx) > (ctx - n + torch.arange(n))[:, None]
        if parents:
            hidden[:, ctx - n:] = ~lineage(*parents)
        p = scores.masked_fill(hidden.to(scores.device), float("-inf")).softmax(-1)
        out.append(torch.einsum("hnc,chd->nhd", p, v))
        start += n
    return torch.cat(out).to(q.dtype)


@triton.jit
def _attention_kernel(q, kv, out, lse, spans, table, trees, tiles, n_out, q_stride, plane, scale, H: tl.constexpr, G: tl.constexpr,
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
    span = spans + 7 * tl.load(tiles + 2 * tl.program_id(0))
    start, n, n_past = tl.load(span), tl.load(span + 1), tl.load(span + 2)
    row, stride, first, tree = tl.load(span + 3), tl.load(span + 4), tl.load(span + 5), tl.load(span + 6)
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
        if trees is not None:  # of the new tokens a row of a tree sees those that it follows
            drafts = (tree >= 0) & (j >= n_past) & (j < n_past + n)
            sees = tl.load(trees + tree + (m // G)[:, None] * n + (j - n_past)[None], mask=real[:, None] & drafts[None], other=1)
            s = tl.where(sees > 0, s, float("-inf"))
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
    0: as many as fill the GPU. At most three launches, whose grids depend on the numbers of tiles, n_few and n_split alone."""
    N, H, D = q.shape
    out = q.new_empty(N, H, D)

    def attend(tiles, block, n_split, out, lse, n_out):
        scale = D ** -0.5 * 1.4426950408889634  # log2(e): a GPU's own exponential is 2 ** x
        launch(_attention_kernel, (len(tiles), n_kv_head, n_split), q, kv, out, lse, pages.spans, pages.table,
               pages.trees if len(pages.trees) else None, tiles, n_out, q.stride(0), kv.stride(0), scale, H=H, G=H // n_kv_head, D=D,
               SPLIT=n_split > 1, BLOCK_M=block, BLOCK_N=32 if q.dtype == torch.float32 else 64, BLOCK_D=max(16, pow2(D)),  # tl.dot's least
               num_warps=4 if block == 16 else 8, num_stages=2)

    if len(pages.few):
        n_split = n_split or min(32, pow2(2 * n_processors(q.device) / (len(pages.few) * n_kv_head)))
        if n_split == 1:
            attend(pages.few, pages.block_few, 1, out, None, 0)
        else:
            n_out = pages.n_few * H
            parts, lse = (torch.empty(n_split, n_out, size, dtype=torch.float32, device=q.device) for size in (D, 1))
            attend(pages.few, pages.block_few, n_split, parts, lse, n_out)
            launch(_combine_kernel, (n_out,), parts, lse, out, n_out, D=D, N_SPLIT=n_split, BLOCK_D=pow2(D))
    if len(pages.many):  # after the combining, which in a padded batch does not know where the few rows end
        attend(pages.many, pages.block_many, 1, out, None, 0)
    return out


@lru_cache
def n_processors(device):
    """The GPU's streaming multiprocessors, or a few for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def attention(q, kv, segments, n_kv_head):
    """q (N, H, D), kv (2, n_row, D), segments (or Pages) that cover the N rows -> (N, H, D)"""
    if isinstance(segments, Pages):
        return attention_pages(q, kv, segments, n_kv_head)
    N, H, D = q.shape
    G = H // n_kv_head  # the G heads of a group share the loads of one K and V
    out, q = torch.empty_like(q), q * D ** -0.5
    for s in segments:
        rows = slice(s.start, s.start + s.R * s.n)
        qs = q[rows].view(s.R, s.n, n_kv_head, G, D).transpose(1, 2).reshape(s.R * n_kv_head, s.n * G, D)
        out[rows].view(s.R, s.n, n_kv_head, G, D).copy_(_attend(qs, kv, s).view(s.R, n_kv_head, s.n, G, D).transpose(1, 2))
    return out


def _attend(q, kv, s):
    """q (B, m, D) scaled, B = R Hk and m = n G, against the contexts of a segment -> (B, m, D). Few rows read the cache where it lies:
    a value is a sum of V's rows, each times a number, which is torch's embedding_bag, and so is a score, of a key tile's. To
    multiply many rows, gathering first costs less."""
    B, m, D = q.shape
    if s.key_tile > 1 and m <= FEW_ROWS:
        scores = _sums(kv[0], s.bags[0], D, q[:, :, None].expand(B, m, s.ctx // D, D)).view(B, m, s.ctx)
    else:
        scores = q.new_empty(B, m, s.ctx)
        for part, k in _contexts(kv[0], s.columns, s.ctx):
            torch.bmm(q[part], k.view(-1, D, s.ctx) if s.key_tile > 1 else k.transpose(1, 2), out=scores[part])
    scores.view(s.R, -1, m, s.ctx)[..., -s.mask.size(-1):].add_(s.mask)
    p = scores.softmax(-1)
    if m <= FEW_ROWS:
        return _sums(kv[1], s.bags[1], s.ctx, p).view(B, m, D)
    y = q.new_empty(B, m, D)
    for part, v in _contexts(kv[1], s.index[1], s.ctx):
        torch.bmm(p[part], v, out=y[part])
    return y


def _sums(plane, index, n, numbers):
    """Of each n neighbours in index the sum of the rows there, each times its number: (len(index) / n, D)"""
    return torch.embedding_bag(plane, index, _starts(len(index), n, index.device), mode=0, per_sample_weights=numbers.reshape(-1))[0]  # 0: a sum


@lru_cache(maxsize=256)
def _starts(size, n, device):
    return torch.arange(0, size, n, dtype=torch.int32, device=device)


def _contexts(plane, index, ctx):
    """plane (n_row, D) -> (slice of the R Hk contexts in index, (b, ctx, D) these), in parts that the processor's cache still has when
    they are multiplied."""
    step = max(1, PART // (ctx * plane.size(1) * plane.element_size()))
    for i in range(0, len(index) // ctx, step):
        yield slice(i, i + step), plane.index_select(0, index[i * ctx:(i + step) * ctx]).view(-1, ctx, plane.size(1))


# ---------------------------------------------------------------- adapters: to each row x of the batch its own x A B [S-LoRA §5.3]

class Site(NamedTuple):
    """Where one module's A and B lie: rows of as many pages as they are wide, A's in the K plane and B's in the V plane."""
    first: int  # the first of the module's columns in its operator's output,
    n_out: int  # how many they are,
    page: int  # and how many pages wide those before them are
    a: np.ndarray  # (rank, pages of a row); of devices that share out A's rows, this one's
    b: np.ndarray  # (rank, pages of a row)


class Factors:
    """What one adapter has at one operator: its sites, and the same pages as the flat lists that Lora strings together."""

    def __init__(self, sites, n_out):
        """n_out: pages that a row of the operator's output is wide."""
        ranks = [len(s.a) for s in sites]
        starts = np.cumsum(ranks) - ranks
        self.sites, self.ranks = sites, [slice(i, i + r) for i, r in zip(starts, ranks)]
        self.a = np.concatenate([s.a for s in sites])  # (rank, pages of x)
        self.b = np.concatenate([s.b.T.ravel() for s in sites])  # page of y after page of y, for each the rows of B
        tile = lambda numbers: np.concatenate([np.tile(n, s.b.shape[1]) for n, s in zip(numbers, sites)])
        self.b_from = tile([i + np.arange(len(s.b)) % r for i, r, s in zip(starts, ranks, sites)])  # which number of xA each is for,
        self.b_owner = tile([np.arange(len(s.b)) // r for r, s in zip(ranks, sites)])  # and which device's
        self.a_index, self.b_index = torch.from_numpy(self.a.ravel()), [torch.from_numpy(s.b.ravel()) for s in sites]
        self.n_bag = np.zeros(n_out, int)  # how many rows of B meet in each page of y
        for s in sites:
            self.n_bag[s.page:s.page + s.b.shape[1]] = len(s.b)

    @cached_property
    def listed(self):
        """What LoraPages says of a request: all pages, A's and then B's, and its row of `spans` if they alone were the table."""
        first = np.cumsum(self.n_bag) - self.n_bag
        own = np.zeros_like(self.n_bag)
        for s in self.sites:
            own[s.page:s.page + s.b.shape[1]] = len(s.a)
        outs = np.stack([self.n_bag, self.b_from[np.minimum(first, len(self.b) - 1)], self.a.size + first, own], 1)  # (pages of y, 4)
        return np.concatenate([self.a.ravel(), self.b]), np.concatenate([[0, 0, len(self.a), 0], outs.ravel()])


@dataclass
class Lora:
    """What the adapters of a batch do at one operator. Rows of few tokens multiply vectors (MBGMV), chunks matrices (MBGMM).

    On a CPU, number j of a few row's xA is the product of x and the page of A's row j, and (xA)B a sum of B's pages, each times one
    of these numbers. The sum is torch's embedding_bag, the products are its gradient; both read the pages where they lie. A row
    that is wider than a page is taken page by page. All the batch's xA is one flat tensor, the few rows' and then each chunk's: what
    devices that share out the adapters exchange [S-LoRA §6]."""
    width: int  # numbers in one plane of a page
    spans: list  # (first row, rows, Factors) of each request with an adapter, in the order of the batch
    columns: list  # (first, n_out, page) of the modules in y
    n_few: int  # rows of few tokens; they lead the batch
    a: torch.Tensor  # (n,) pages of A's rows, for each few row,
    a_bag: torch.Tensor  # (n,) and which page of x each multiplies
    b: torch.Tensor  # (m,) pages of B's rows, for each page of the few rows' y,
    b_from: torch.Tensor  # (m,) which number of xA each is multiplied with,
    b_bag: torch.Tensor  # (pages of y,) and where each page of y begins in b
    bmm: bool = False  # compute as S-LoRA-bmm does, to compare with

    @classmethod
    def of(cls, spans, n_few, n_in, columns, width, bmm=False):
        """spans, n_few, columns, width as above; n_in: numbers in a row of x."""
        n_in, n_out = cdiv(n_in, width), columns[-1][2] + cdiv(columns[-1][1], width)
        rows = [(row, f) for start, n, f in spans if n <= FEW_ROWS for row in range(start, start + n)]
        string = lambda lists: np.concatenate([np.empty(0, int), *lists])
        of_row = lambda values, sizes: np.repeat(np.array(values, int), sizes)
        a, b = string(f.a.ravel() for _, f in rows), string(f.b for _, f in rows)
        a_bag = np.arange(len(a)) % n_in + of_row([row * n_in for row, _ in rows], [f.a.size for _, f in rows])
        before = np.cumsum([0, *(len(f.a) for _, f in rows)])[:-1]
        b_from = string(f.b_from for _, f in rows) + of_row(before, [len(f.b) for _, f in rows])
        b_from += sum(len(f.a) for _, f in rows) * string(f.b_owner for _, f in rows)
        n_bag = np.zeros((n_few, n_out), int)
        for row, f in rows:
            n_bag[row] = f.n_bag
        b_bag = np.cumsum(n_bag) - n_bag.ravel()
        return cls(width, spans, columns, n_few, *map(torch.from_numpy, (a, a_bag, b, b_from, b_bag)), bmm)


@dataclass
class LoraPages:
    """What Lora is to a CPU, for GPUs: arrays as `of` makes them, int32 in their memory once uploaded, so that launches depend on none
    of the values but the largest rank. A tile is neighbouring rows of one request; a tile of a request of rank 0 is empty."""
    width: int  # numbers in one plane of a page
    rank: int  # no row has more numbers in xA, all modules of the operator together
    step: int  # a power of two that divides all of `columns`
    spans: torch.Tensor  # (B, 4 + 4 * pages of y) per request: its first row in the batch, n, numbers in xA, first entry in table;
    #                      then of each page of y: the module's rank (0: none), its first number in xA, first entry in table, and
    #                      how many of its numbers are in this device's xA
    columns: torch.Tensor  # (pages of y, 2) of each page of y: its first column in y, columns
    table: torch.Tensor  # (T,) pages of the adapters in use: A's, row after row; B's, page of y after page of y
    few: torch.Tensor  # (n_tile, 2) tiles of requests that feed up to FEW_ROWS tokens (MBGMV): request, first row. They have 16 rows,
    #                    a tensor core's least: a decode fills but one, yet what takes its time is to read A and B, once either way
    many: torch.Tensor  # (n_tile, 2) tiles of chunks (MBGMM),
    block_many: int  # of so many rows

    @classmethod
    def of(cls, spans, columns, width, dtype):
        """spans, columns and width as Lora has them, dtype: the cache's."""
        adapters = list({id(f): f for _, _, f in spans}.values())  # each is listed once, however many requests use it
        begin = dict(zip(map(id, adapters), np.cumsum([0, *(len(f.listed[0]) for f in adapters)])))
        rows = np.stack([f.listed[1] for _, _, f in spans])
        rows[:, 0], rows[:, 1] = [start for start, _, _ in spans], [n for _, n, _ in spans]
        rows[:, [3, *range(6, rows.shape[1], 4)]] += np.array([begin[id(f)] for _, _, f in spans])[:, None]
        columns = np.array([(first + i, min(width, n - i)) for first, n, _ in columns for i in range(0, n, width)])
        few, block = rows[:, 1] <= FEW_ROWS, 32 if dtype == torch.float32 else 64  # what registers hold
        return cls(width, int(rows[:, 2].max()), int(np.gcd.reduce(columns.ravel(), initial=16)), rows, columns,
                   np.concatenate([f.listed[0] for f in adapters]), tiles(few, rows[:, 1], 16), tiles(~few, rows[:, 1], block), block)

    def padded(self, N, n_few, has_chunks):
        """The same for N tokens and n_few of them in tiles `few`; the largest rank becomes a power of two."""
        nobody, n_many = n_few + MOST_CHUNKS, has_chunks * (cdiv(N, self.block_many) + MOST_CHUNKS)
        return replace(self, rank=pow2(self.rank), spans=filled(self.spans, nobody + 1, 0), table=filled(self.table, table_room(self.table), 0),
                       few=filled(self.few, n_few, (nobody, 0)), many=filled(self.many, n_many, (nobody, 0)))


def lora_ref(y, x, kv, adapters):
    """The definition, in place: y (N, C_out) += x A B, for x (N, C_in) and each request's A (rank, C_in) and B (rank, C_out)."""
    pages = kv.view(2, -1, adapters.width)
    for start, n, factors in adapters.spans:
        for s in factors.sites:
            a, b = pages[0, s.a].flatten(1)[:, :x.size(1)], pages[1, s.b].flatten(1)[:, :s.n_out]
            y[start:start + n, s.first:s.first + s.n_out] += x[start:start + n] @ a.T @ b
    return y


@triton.jit
def _shrink_kernel(x, a, xa, spans, table, tiles, xa_width, C: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr):
    """One program, one tile: BLOCK_M rows of x times BLOCK_R rows of its request's A, all modules' in one list, over one split of
    their width. a: the K plane. xa (N, splits, xa_width), xa_width a multiple of BLOCK_R.

                 ├──── split 0 ────┼──── split 1 ────┤          for each BLOCK_K numbers of the split, none across two pages:
        x        ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■ ■            which pages A's rows have there, from the table
        A  row 0 ├─ page 81 ─┼─ page 7 ──┼─ page 40 ┤            A there (BLOCK_R, BLOCK_K) and x there (BLOCK_M, BLOCK_K)
           row 1 ├─ page 5 ──┼─ page 82 ─┼─ page 41 ┤            multiplied, added
    """
    split, m = tl.program_id(2), tl.load(tiles + 2 * tl.program_id(0) + 1) + tl.arange(0, BLOCK_M)
    span = spans + (4 + 4 * P) * tl.load(tiles + 2 * tl.program_id(0))
    start, n, rank, first = tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    if tl.program_id(1) * BLOCK_R < rank:
        row, real, known = (start + m).to(tl.int64)[:, None], (m < n)[:, None], r < rank
        n_page: tl.constexpr = (C + WIDTH - 1) // WIDTH
        per_page: tl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K
        n_block: tl.constexpr = C // WIDTH * per_page + (C % WIDTH + BLOCK_K - 1) // BLOCK_K
        share = tl.cdiv(n_block, tl.num_programs(2))
        acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for block in range(split * share, tl.minimum(n_block, (split + 1) * share)):
            i, c = block // per_page, block % per_page * BLOCK_K + tl.arange(0, BLOCK_K)[None]  # page of the row, numbers in it
            there = (c < WIDTH) & (i * WIDTH + c < C)
            page = tl.load(table + first + r * n_page + i, mask=known, other=0).to(tl.int64)[:, None]
            w = tl.load(a + page * WIDTH + c, mask=known[:, None] & there, other=0.0)
            v = tl.load(x + row * C + i * WIDTH + c, mask=real & there, other=0.0)
            acc = tl.dot(v, tl.trans(w), acc, input_precision="tf32x3")
        tl.store(xa + (row * tl.num_programs(2) + split) * xa_width + r[None], acc, mask=real)


@triton.jit
def _expand_kernel(y, b, xa, spans, columns, table, tiles, xa_width, device, C: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr,
                   STEP: tl.constexpr, N_SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """One program, one tile: BLOCK_M rows of y and BLOCK_N columns of one of its P pages. b: the V plane; device: None, or numbers
    from one device's xa to the next one's, each with `own` of a module's.

        xA of a row    ├─ q: rank 8 ─┼──── v: rank 16 ────┤      nothing, where the page's module has no adapter (k). Else for
        y of a row     ├─ q 0 ─┼─ q 1 ─┼─ k ─┼─ v ─┤             each BLOCK_R of the module's numbers in xA:
                          ▲                     ▲                  the sum of their splits
        B's pages      81 5 7 ...            40 82 41 ...          times those rows of B there (BLOCK_R, BLOCK_N), added
    """
    page, m = tl.program_id(1), tl.load(tiles + 2 * tl.program_id(0) + 1) + tl.arange(0, BLOCK_M)
    span = spans + (4 + 4 * P) * tl.load(tiles + 2 * tl.program_id(0))
    start, n, of_page = tl.load(span), tl.load(span + 1), span + 4 + 4 * page
    rank, begin, first, own = tl.load(of_page), tl.load(of_page + 1), tl.load(of_page + 2), tl.load(of_page + 3)
    if rank > 0:
        column, n_column = tl.multiple_of(tl.load(columns + 2 * page), STEP), tl.multiple_of(tl.load(columns + 2 * page + 1), STEP)
        c, row, real = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)[None], (start + m).to(tl.int64)[:, None], (m < n)[:, None]
        at, there = y + row * C + column + c, real & (c < n_column)
        acc = tl.load(at, mask=there, other=0.0).to(tl.float32)
        for block in range(0, rank, BLOCK_R):
            r = block + tl.arange(0, BLOCK_R)
            rows = tl.load(table + first + r, mask=r < rank, other=0).to(tl.int64)[:, None]
            w = tl.load(b + rows * WIDTH + c, mask=(r < rank)[:, None] & (c < WIDTH), other=0.0)
            number = begin + r if device is None else begin + r % own + r // own * device
            v = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for split in tl.static_range(N_SPLIT):
                v += tl.load(xa + (row * N_SPLIT + split) * xa_width + number[None], mask=real & (r < rank)[None], other=0.0)
            acc = tl.dot(v.to(w.dtype), w, acc, input_precision="tf32x3")
        tl.store(at, acc, mask=there)


def lora_pages(y, x, kv, l, n_split=0, exchange=None):
    """y (N, C_out) += x A B, in place, for LoraPages l. n_split: into how many parts the width of x is cut, a power of two; 0: as
    many as fill the GPU. At most four launches, whose grids depend on the numbers of tiles and the largest rank alone. exchange: as
    for lora. -> y"""
    assert x.is_contiguous() and y.is_contiguous()
    P, wide, width, calls = len(l.columns), x.dtype == torch.float32, round_up(l.rank, 64), []
    both = exchange and torch.empty(len(x), 1, width, dtype=torch.float32, device=x.device)  # xA of few and many rows, sent together
    for tiles, block_m, block_r, block_k, block_n in ((l.few, 16, 32, 128, 256), (l.many, l.block_many, 64, 64, 64)):
        if len(tiles):
            block_r, block_k, block_n = (32, 32, 64) if wide else (block_r, block_k, block_n)
            block_k, block_n = (max(16, min(block, pow2(l.width))) for block in (block_k, block_n))
            n_rank, warps = cdiv(l.rank, block_r), 4 if block_m == 16 else 8
            splits = 1 if exchange else n_split or min(4, pow2(2 * n_processors(x.device) / (len(tiles) * n_rank)))
            xa = both if exchange else torch.empty(len(x), splits, width, dtype=torch.float32, device=x.device)
            launch(_shrink_kernel, (len(tiles), n_rank, splits), x, kv[0], xa, l.spans, l.table, tiles, width, C=x.size(1),
                   WIDTH=l.width, P=P, BLOCK_M=block_m, BLOCK_R=block_r, BLOCK_K=block_k, num_warps=warps, num_stages=5)
            calls.append((tiles, xa, splits, block_m, block_n, warps))
    device = None
    if exchange:
        both = exchange(both[:, 0, :l.rank].to(x.dtype).flatten()).view(-1, len(x), 1, l.rank)
        width, device = l.rank, both.stride(0)
    for tiles, xa, splits, block_m, block_n, warps in calls:
        launch(_expand_kernel, (len(tiles), P, cdiv(l.width, block_n)), y, kv[1], both if exchange else xa, l.spans, l.columns, l.table,
               tiles, width, device, C=y.size(1), WIDTH=l.width, P=P, STEP=l.step, N_SPLIT=splits, BLOCK_M=block_m, BLOCK_R=32,
               BLOCK_N=block_n, num_warps=warps, num_stages=3)
    return y


def lora(y, x, kv, adapters, exchange=None):
    """y (N, C_out) += x A B, in place. x (N, C_in), kv (2, n_row, D) with A and B in its pages, adapters: a Lora, or LoraPages where
    the kernels run. exchange: a function, this device's flat xA -> (devices, numbers), all of theirs; None: it is alone. -> y"""
    if isinstance(adapters, LoraPages):
        return lora_pages(y, x, kv, adapters, exchange=exchange)
    if adapters.bmm or x.device.type != "cpu":  # a GPU without Triton: plain torch
        return lora_bmm(y, x, kv, adapters)
    pages = kv.view(2, -1, adapters.width)
    chunks = [span for span in adapters.spans if span[1] > FEW_ROWS]
    parts = [mbgmv_shrink(x, pages, adapters)] if len(adapters.b) else []
    parts += [mbgmm_shrink(x[start:start + n], pages, factors) for start, n, factors in chunks]
    if exchange is None:
        parts = iter([part[None] for part in parts])
    else:
        parts = iter(exchange(torch.cat(parts)).split([len(part) for part in parts], 1))
    if len(adapters.b):
        mbgmv_expand(y, next(parts), pages, adapters)
    for start, n, factors in chunks:
        mbgmm_expand(y[start:start + n], next(parts).unflatten(1, (n, -1)), pages, factors)
    return y


def mbgmv_shrink(x, pages, l):
    """x A of the rows of few tokens, flat. pages (2, n_page, width); no padding, no copy of A."""
    x = x[:l.n_few] if x.size(1) % l.width == 0 else F.pad(x[:l.n_few], (0, -x.size(1) % l.width))
    n_in = x.size(1) // l.width
    xa = torch.ops.aten._embedding_bag_per_sample_weights_backward(x.view(-1, l.width), pages[0], l.a, l.b_bag, l.a_bag, 0)
    return xa if n_in == 1 else xa.view(-1, n_in).sum(1)


def mbgmv_expand(y, xa, pages, l):
    """Of the same rows: y[:n_few] += (x A) B, for xa (devices, numbers)."""
    xab = F.embedding_bag(l.b, pages[1], l.b_bag, mode="sum", per_sample_weights=xa.flatten()[l.b_from]).view(l.n_few, -1)
    if len(l.columns) > 1 and xab.size(1) == y.size(1):  # all modules side by side, and none ends inside a page
        y[:l.n_few] += xab
        return
    for first, n_out, page in l.columns:
        y[:l.n_few, first:first + n_out] += xab[:, page * l.width:page * l.width + n_out]


def mbgmm_shrink(x, pages, factors):
    """x A of one chunk (n, C_in), flat"""
    return (x @ pages[0].index_select(0, factors.a_index).view(len(factors.a), -1)[:, :x.size(1)].T).flatten()  # (n * rank,)


def mbgmm_expand(y, xa, pages, factors):
    """One chunk: y (n, C_out) += (x A) B, for xa (devices, n, rank)."""
    for s, ranks, index in zip(factors.sites, factors.ranks, factors.b_index):
        own = xa[:, :, ranks].transpose(0, 1).flatten(1)[:, :len(s.b)]  # (n, rank)
        y[:, s.first:s.first + s.n_out].addmm_(own, pages[1].index_select(0, index).view(len(s.b), -1)[:, :s.n_out])


def lora_bmm(y, x, kv, adapters):
    """As S-LoRA-bmm [S-LoRA §7.1]: every request's A and B are copied side by side, rows and ranks padded to the largest, and one
    batched GEMM multiplies them all; decodes and chunks apart, as there."""
    pages = kv.view(2, -1, adapters.width)
    for of_kind in (lambda n: n <= FEW_ROWS, lambda n: n > FEW_ROWS):
        spans = [span for span in adapters.spans if of_kind(span[1])]
        if not spans:
            continue
        start, n = (torch.tensor([span[i] for span in spans], device=x.device) for i in (0, 1))
        token = torch.arange(max(n for _, n, _ in spans), device=x.device)
        real = token < n[:, None]  # (B, n)
        rows = torch.where(real, start[:, None] + token, start[:, None])
        padded = x[rows]  # (B, n, C_in)
        for first, n_out, _ in adapters.columns:
            sites = [next((s for s in f.sites if s.first == first), None) for _, _, f in spans]
            rank = max((len(s.a) for s in sites if s), default=0)
            a, b = x.new_zeros(len(spans), rank, x.size(1)), x.new_zeros(len(spans), rank, n_out)
            for i, s in enumerate(sites):
                if s:
                    a[i, :len(s.a)] = pages[0, s.a].flatten(1)[:, :x.size(1)]
                    b[i, :len(s.b)] = pages[1, s.b].flatten(1)[:, :n_out]
            y[rows[real], first:first + n_out] += torch.bmm(torch.bmm(padded, a.transpose(1, 2)), b)[real]
    return y


# ---------------------------------------------------------------- sampling

def target_probs(logits, temperature, top_k, top_p):
    """The distribution that is sampled from. logits (M, V); temperature > 0, top_k (0: all), top_p, each (M,) -> (M, V) float32.
    Kept are the top_k likeliest tokens and, of these, the fewest whose probabilities reach top_p. A temperature below a millionth is
    one: it leaves the likeliest token, and a quotient that is finite."""
    p, order = (logits.float() / temperature.clamp(min=1e-6)[:, None]).softmax(-1).sort(-1, descending=True)
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


# ---------------------------------------------------------------- more than one device: what their processes say to each other

TIMEOUT = 300  # seconds that a rank waits for another before it gives up: a CPU may take a minute for its layers of a long prompt
LETTER = 1000  # bytes of the first message of World.agree; what is longer takes a second one


class World:
    """The processes that hold one model together, each on its device, all running the same program [SPMD]. tp neighbours share
    every layer (`part` is which share this one has), pp such groups share out the layers (`stage` is which):

        stage 0    rank 0   rank 1    all_reduce, all_gather: within a row            rank = stage * tp + part
        stage 1    rank 2   rank 3    send, receive: down a column                    here tp = 2, pp = 2

    What a rank sends is counted in `sent`, in bytes, by what it was for, as a ring sends it: (tp - 1) / tp of what is gathered, twice
    that of what is reduced. World() is a process by itself: every method gives back what it got, torch.distributed is never touched."""

    def __init__(self, tp=1, pp=1, rank=0, device="cpu"):
        self.tp, self.pp, self.rank, self.size, self.device = tp, pp, rank, tp * pp, device
        self.stage, self.part = divmod(rank, tp)
        self.last, self.is_last = tp * (pp - 1), self.stage == pp - 1  # the first rank of the last stage; whether this is of that
        self.sent, self.posted = Counter(), deque()  # bytes by purpose; messages that nobody waited for
        self.came = self.stop = False  # whether Ctrl-C came to this process, and whether all know that it is to stop

    @classmethod
    def start(cls, tp=1, pp=1, device="cpu"):
        """Join the processes that torchrun started. ValueError, with the line to type, if there are not tp * pp of them."""
        size, local = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
        if tp * pp != size:
            raise ValueError(f"tp = {tp}, pp = {pp}: needs {tp * pp} processes, there {'is' if size == 1 else 'are'} {size}: "
                             f"torchrun --nproc_per_node {tp * pp} {os.path.basename(sys.argv[0])} --tp {tp} --pp {pp} ...")
        if size == 1:
            return cls(device=device)
        if device == "cuda":
            if local >= torch.cuda.device_count():
                raise ValueError(f"device = 'cuda': process {local} has no GPU of its own, there are {torch.cuda.device_count()}")
            torch.cuda.set_device(local)
            device = f"cuda:{local}"
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))  # for what is agreed on
        world = cls(tp, pp, dist.get_rank(), device)
        backend = "nccl" if device != "cpu" else "gloo"
        group = lambda ranks: dist.new_group(ranks, timedelta(seconds=TIMEOUT), backend)
        rows = [group([*range(i * tp, (i + 1) * tp)]) for i in range(pp)] if tp > 1 else [None] * pp  # everybody makes all groups
        columns = [group([*range(i, size, tp)]) for i in range(tp)] if pp > 1 else [None] * tp
        world.row, world.column = rows[world.stage], columns[world.part]
        atexit.register(world.close)
        return world

    def agree(self, value, source=0):
        """What rank `source` says, on every rank: any value that can be pickled. The source does not wait for the others."""
        if self.size == 1:
            return value
        text = pickle.dumps(value) if self.rank == source else b""
        first = self._broadcast(len(text).to_bytes(8, "little") + text[:LETTER], 8 + LETTER, source)
        n_rest = int.from_bytes(first[:8], "little") - LETTER
        rest = self._broadcast(text[LETTER:], n_rest, source) if n_rest > 0 else b""
        return value if self.rank == source else pickle.loads(first[8:] + rest)  # which ignores what is behind the value

    def _broadcast(self, text, n, source):
        """n bytes, on rank `source` text and zeros behind it -> the same on every rank. The source does not wait for the others."""
        x = torch.frombuffer(bytearray(text.ljust(n, b"\0")), dtype=torch.uint8)
        work = self._call(dist.broadcast, x, source, async_op=True)
        if self.rank != source:
            self._call(work.wait)
            return x.numpy().tobytes()
        while self.posted and self.posted[0].is_completed():  # those that arrived are forgotten
            self.posted.popleft()
        self.posted.append(work)
        return x.numpy().tobytes()

    def spread(self, x, source):
        """Copy x of rank `source` into everybody's x. Nobody waits; what is spread arrives in the order of the calls -> a function that
        waits until this has."""
        if self.rank == source:
            works = [self._call(dist.isend, x, rank, tag=1) for rank in range(self.size) if rank != source]
        else:
            works = [self._call(dist.irecv, x, source, tag=1)]
        return lambda: [self._call(work.wait) for work in works]

    def each(self, value):
        """What every rank says, in the order of ranks."""
        return [self.agree(value, rank) for rank in range(self.size)]

    def all_reduce(self, x, what):
        """Sum x over the row, in place. -> x"""
        if self.tp > 1:
            self.sent[what] += 2 * (self.tp - 1) * x.nbytes // self.tp
            self._call(dist.all_reduce, x, group=self.row)
        return x

    def all_gather(self, x, what):
        """x of every part of the row, in order -> (tp, *x.shape)"""
        if self.tp == 1:
            return x[None]
        self.sent[what] += (self.tp - 1) * x.nbytes
        out = x.new_empty(self.tp, *x.shape)
        self._call(dist.all_gather, [*out], x.contiguous(), group=self.row)
        return out

    def send(self, x, what):
        """x to the same part of the next stage -> a function that waits until it is there."""
        self.sent[what] += x.nbytes
        work = self._call(dist.isend, x.contiguous(), self.rank + self.tp, group=self.column)
        return lambda: self._call(work.wait)

    def receive(self, shape, dtype):
        """What the stage before sends -> a function that waits for it, a tensor of this shape"""
        x = torch.empty(shape, dtype=dtype, device=self.device)
        work = self._call(dist.irecv, x, self.rank - self.tp, group=self.column)
        return lambda: (self._call(work.wait), x)[1]

    def _call(self, f, *args, **more):
        """f(...). ConnectionError, naming the rank, where another's end or silence makes it impossible."""
        try:
            return f(*args, **more)
        except RuntimeError as e:
            why = str(e).splitlines()[0].split("] ")[-1][:80]  # without the place in gloo's source
            raise ConnectionError(f"rank {self.rank} of {self.size} cannot go on: {self._missing()} ({why})") from None

    def _missing(self):
        """Who does not answer a roll call, which everybody holds who notices that something is wrong."""
        try:
            store = dist.distributed_c10d._get_default_store()
            store.add(f"alive {self.rank}", 1)
            time.sleep(1.0)
            gone = [rank for rank in range(self.size) if not store.check([f"alive {rank}"])]
        except RuntimeError:  # it lives with rank 0, or with torchrun
            gone = [0]
        return f"rank {' and '.join(map(str, gone))} died or hangs" if gone else "no rank is missing"

    @staticmethod
    def first_to_say(message):
        """Whether no other rank has said that: what is wrong on all of them is said once."""
        if not dist.is_initialized():
            return os.environ.get("RANK", "0") == "0"
        try:
            return dist.distributed_c10d._get_default_store().add(message, 1) == 1
        except RuntimeError:  # the store died with rank 0
            return True

    def close(self):
        """Wait until what was sent is there, and part."""
        for work in self.posted:
            try:
                work.wait(timedelta(seconds=5))
            except RuntimeError:  # the one who should have got it is gone
                break
        self.posted.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
