"""The operators of one iteration over a flat batch of N tokens.

In reading order: how a batch is described (Batch, Sites), how C++ is compiled and called, and
the operators linear, add_norm, activate, rotate_write, attention, lora, and sampling with
verification. An operator stands here up to four times: `op_ref` is its definition in plain
torch, `_op_kernel` is Triton for GPUs, SOURCE at the end is C++ for CPUs, and `op` picks one.

The cache. The keys and values of one layer are `kv` (2, n_page, Hk, D): plane 0 is K, plane 1 is
V. A page is one vector of width W = Hk * D in each plane. It holds one token, or rows of an
adapter [S-LoRA §5.1]. A page table lists the pages of a request in the order of its tokens:

    page            0       1       2       3       4       5       6       7
    K plane     | k of 0 | A row 0 | k of 1 | A row 1 | k of 2 |   free  | ...
    V plane     | v of 0 | B row 0 | v of 1 | B row 1 | v of 2 |   free  | ...

    page table of the request: 0 2 4        page table of the adapter: 1 3
"""
import ctypes
import hashlib
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # the Triton kernels stay plain functions that are never called
    triton = SimpleNamespace(jit=lambda kernel: kernel)
    tl = SimpleNamespace(constexpr=None)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FEW_ROWS = 8  # requests with at most this many rows read their context in place
CHUNK_ROWS = 256  # rows of a chunk that attend in one matrix product [SARATHI Fig. 6]

# glibc returns large blocks to the system when they are freed, so that every iteration would
# fault its activations in again. Keep blocks of up to 2 GB.
if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
    for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        ctypes.CDLL(None).mallopt(parameter, 2**31 - 1)

# -----------------------------------------------------------------------------
# batches

class OnDevice:
    """Base of dataclasses that hold tensors."""
    def to(self, device):
        """A copy on the device. The CPU does not wait for the copies."""
        copies = {}
        for name, value in vars(self).items():
            if isinstance(value, dict):
                copies[name] = {key: sites.to(device) for key, sites in value.items()}
            if isinstance(value, Tensor):
                if torch.device(device).type == "cuda":
                    value = value.pin_memory()
                copies[name] = value.to(device, non_blocking=True)
        return replace(self, **copies)

@dataclass
class Sites(OnDevice):
    """Where adapters act in one operator: S sites, one per (request, module), few rows first."""
    sites: Tensor  # (S, 8) int32: first row, rows, first column of y, columns, rank of A,
    #                rank of B, module number, first entry in table
    table: Tensor  # (n,) int32: pages of the adapters
    n_few: int  # sites[:n_few] have at most FEW_ROWS rows, the others more
    max_few: int  # most rows of a site among the first n_few, 0 if there is none
    max_chunk: int  # most rows of a site among the others, 0 if there is none
    n_module: int  # modules of the operator (q, k, v: 3)
    max_rank: int  # largest rank of A, rounded up to 16
    way: str = "batched"  # or "bmm", the baseline: copy, pad, batched matrix products

@dataclass
class Batch(OnDevice):
    """One iteration: N tokens of R requests, a request's rows side by side, few rows first."""
    tokens: Tensor  # (N,) int64
    positions: Tensor  # (N,) int64
    pages: Tensor  # (N,) int32: the page to which K and V of each token are written
    spans: Tensor  # (R, 4) int32: first row, rows, n_past, first entry in table
    table: Tensor  # (n,) int32: page tables of all requests; n_past + rows entries each
    logit_rows: Tensor  # (M,) int64: rows for which next-token logits are computed
    n_few: int  # spans[:n_few] have at most FEW_ROWS rows, the others more
    max_few: int  # most rows of a request among the first n_few, 0 if there is none
    max_chunk: int  # most rows of a request among the others, 0 if there is none
    max_context: int  # largest n_past + rows
    adapters: dict = field(default_factory=dict)  # operator name -> Sites

def cdiv(n, unit):
    """n / unit, rounded up."""
    return -(-n // unit)

# -----------------------------------------------------------------------------
# where an operator runs: Triton, C++ (compiled at first use, called through ctypes) or torch

def backend(x, *others):
    """"triton" on a GPU, and anywhere in Triton's interpreter; on a CPU "cpp" if the tensors are
    contiguous, of one dtype, and have rows of a multiple of 16 numbers; else "torch"."""
    if (x.is_cuda or INTERPRETED) and hasattr(triton, "cdiv"):
        return "triton"
    if not x.is_cpu or x.requires_grad or x.size(-1) % 16 or x.dtype not in library():
        return "torch"
    for tensor in (x, *others):
        if tensor is not None and (tensor.dtype != x.dtype or not tensor.is_contiguous()):
            return "torch"
    return "cpp"

def cpp(name, x, *arguments):
    """Run a C++ operator of the dtype of x. None is passed as null."""
    values = [ctypes.c_void_p(x.data_ptr())]
    for value in arguments:
        if isinstance(value, Tensor):
            value = ctypes.c_void_p(value.data_ptr())
        elif isinstance(value, float):
            value = ctypes.c_float(value)
        values.append(value)
    library()[x.dtype][name](*values)

@lru_cache
def library():
    """{dtype: {name: C++ function}}, empty if there is no compiler: then the definitions serve."""
    names = re.findall(r"template <class T>\s+void (\w+)\(", SOURCE)
    dtypes = {torch.float32: "float", torch.bfloat16: "bf16"}
    source = SOURCE
    for c_type in dtypes.values():
        for name in names:
            source += f'extern "C" {{ auto {name}_{c_type} = {name}<{c_type}>; }}\n'
    try:
        shared = ctypes.CDLL(build(source))
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"C++ operators not compiled, plain torch is slower: {error}", file=sys.stderr)
        return {}
    function = ctypes.CFUNCTYPE(None)
    functions = {}
    for dtype, c_type in dtypes.items():
        functions[dtype] = {n: function.in_dll(shared, f"{n}_{c_type}") for n in names}
    return functions

def build(source):
    """Compile C++ in about 2 seconds, once per source and processor. -> path of the library"""
    compiler = os.environ.get("CXX", "g++").split() + ["-march=native", "-x", "c++"]
    macros = [*compiler, "-dM", "-E", "/dev/null"]
    target = subprocess.run(macros, capture_output=True, check=True).stdout
    lanes = 16 if b"__AVX512F__" in target else 8
    flags = f"-DLANES={lanes} -O3 -fopenmp -shared -fPIC -Wno-psabi -fno-math-errno"
    flags += " -ffinite-math-only -fno-signed-zeros -fno-trapping-math"
    key = hashlib.sha256(target + flags.encode() + source.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sarathi"
    path = cache / f"operators-{key}.so"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        command = [*compiler, *flags.split(), "-", "-o", unfinished]
        subprocess.run(command, input=source.encode(), capture_output=True, check=True)
        unfinished.rename(path)  # atomic: other processes may build it too
    return path

def n_splits(n_program, most):
    """How many times to split n_program programs for about 256 in all: a power of two."""
    return triton.next_power_of_2(max(1, min(256 // n_program, most)))

@triton.jit
def load4(numbers):
    return (tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3))

# -----------------------------------------------------------------------------
# linear: x weight^T + bias

def pack(weight):
    """weight (n_out, n_in) in oneDNN's blocked layout if this CPU has kernels for it."""
    if not weight.is_cpu or not torch.backends.mkldnn.is_available():
        return weight
    fast = weight.dtype == torch.float32
    if weight.dtype == torch.bfloat16:
        fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.ops.mkldnn._reorder_linear_weight(weight, None) if fast else weight

def linear_ref(x, weight, bias=None):
    """x (..., n_in), weight (n_out, n_in), packed or plain, of any dtype -> (..., n_out)"""
    weight = weight.to_dense() if weight.is_mkldnn else weight
    bias = None if bias is None else bias.to(x.dtype)
    return F.linear(x, weight.to(x.dtype), bias)

def linear(x, weight, bias=None):
    """x (..., n_in), weight (n_out, n_in) as returned by pack -> (..., n_out)"""
    if x.dtype != weight.dtype:
        return linear_ref(x, weight, bias)
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)

# -----------------------------------------------------------------------------
# add_norm: residual sum and normalization

def add_norm_ref(x, y, weight, bias, eps):
    """total = x + y (y None: x) and its RMSNorm; its LayerNorm if there is a bias. -> both"""
    total = x if y is None else x + y
    weight = weight.to(total.dtype)
    if bias is None:
        return total, F.rms_norm(total, weight.shape, weight, eps)
    return total, F.layer_norm(total, weight.shape, weight, bias.to(total.dtype), eps)

@triton.jit
def _add_norm_kernel(x, y, weight, bias, total, out, eps, C, BLOCK: tl.constexpr):
    """One program: one token. LayerNorm subtracts the mean first and adds the bias at the end.

        total = x + y           out = total / sqrt(mean(total^2) + eps) * weight
    """
    c = tl.arange(0, BLOCK)
    mask = c < C
    at = tl.program_id(0).to(tl.int64) * C + c
    r = tl.load(x + at, mask, 0.0).to(tl.float32)
    if y is not None:
        r += tl.load(y + at, mask, 0.0)
        tl.store(total + at, r, mask)
    if bias is not None:
        r = tl.where(mask, r - tl.sum(r) / C, 0.0)
    r *= tl.rsqrt(tl.sum(r * r) / C + eps)
    r *= tl.load(weight + c, mask)
    if bias is not None:
        r += tl.load(bias + c, mask)
    tl.store(out + at, r, mask)

def add_norm(x, y, weight, bias, eps):
    """x, y (N, C); weight, bias (C,); y and bias may be None -> x + y and its norm, each (N, C)"""
    chosen = backend(x, y, weight, bias)
    if chosen == "torch":
        return add_norm_ref(x, y, weight, bias, eps)
    N, C = x.shape
    total = x if y is None else torch.empty_like(x)
    out = torch.empty_like(x)
    if chosen == "cpp":
        cpp("add_norm", x, y, weight, bias, total, out, N, C, float(eps))
        return total, out
    block = triton.next_power_of_2(C)
    warps = min(16, max(4, block // 512))
    _add_norm_kernel[(N,)](x, y, weight, bias, total, out, eps, C, block, num_warps=warps)
    return total, out

# -----------------------------------------------------------------------------
# activate: SwiGLU or GELU

def activate_ref(h, gated):
    """gated: SwiGLU of h (..., 2 I), gate and up side by side; else tanh-GELU. -> (..., I)"""
    if gated:
        gate, up = h.chunk(2, -1)
        return F.silu(gate) * up
    return F.gelu(h, approximate="tanh")

@triton.jit
def _activate_kernel(h, out, I, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """One program: BLOCK numbers of one token."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < I
    if GATED:
        gate = tl.load(h + 2 * row * I + i, mask).to(tl.float32)
        up = tl.load(h + (2 * row + 1) * I + i, mask)
        y = gate * tl.sigmoid(gate) * up
    else:
        x = tl.load(h + row * I + i, mask).to(tl.float32)
        z = 0.7978845608 * (x + 0.044715 * x * x * x)  # sqrt(2 / pi) (x + ...)
        y = x * tl.sigmoid(2 * z)  # sigmoid(2 z) = (1 + tanh(z)) / 2
    tl.store(out + row * I + i, y, mask)

def activate(h, gated):
    """h (N, 2 I) if gated, else (N, I) -> (N, I)"""
    N, I = h.shape
    I = I // 2 if gated else I
    out = h.new_empty(N, I)
    chosen = backend(h, out)
    if chosen == "triton":
        _activate_kernel[(N, cdiv(I, 1024))](h, out, I, gated, BLOCK=1024)
    elif chosen == "cpp" and I % 16 == 0:
        cpp("activate", h, out, N, I, gated)
    else:
        out = activate_ref(h, gated)
    return out

# -----------------------------------------------------------------------------
# rotate_write: rotary positions, and K and V to the cache

def rotate_ref(x, cos, sin):
    """Rotate x (..., heads, D): element d pairs with d + D / 2. cos, sin (..., D / 2)"""
    cos = cos[..., None, :]
    sin = sin[..., None, :]
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

def rotate_write_ref(qkv, cos, sin, kv, pages, n_head, n_kv_head):
    """Rotate q and k, unless cos is None; write k and v to their pages. -> q (N, H, D)"""
    qkv = qkv.unflatten(-1, (n_head + 2 * n_kv_head, -1))  # (N, H + 2 Hk, D)
    q, k, v = qkv.split([n_head, n_kv_head, n_kv_head], 1)
    if cos is not None:
        q = rotate_ref(q, cos, sin)
        k = rotate_ref(k, cos, sin)
    kv[0, pages.long()] = k
    kv[1, pages.long()] = v
    return q.contiguous()

@triton.jit
def _rotate_write_kernel(qkv, cos, sin, q, kv, pages, plane, H: tl.constexpr, HK: tl.constexpr,
                         D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program: BLOCK_H of the heads of one token.

        qkv   | q 0 | q 1 | ... | k 0 | ... | v 0 | ... |     k and v: to the planes of kv
                rotate            rotate      copy
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None]
    mask = (head < H + 2 * HK) & (d < D)
    vectors = qkv + (token * (H + 2 * HK) + head) * D
    x = tl.load(vectors + d, mask)
    if cos is not None:
        # element d rotates together with element d + D / 2
        partner = tl.load(vectors + (d + D // 2) % D, mask)
        angle = token * (D // 2) + d % (D // 2)
        c = tl.load(cos + angle, d < D)
        s = tl.load(sin + angle, d < D)
        rotated = x * c + partner * tl.where(d < D // 2, -s, s)
        x = tl.where(head < H + HK, rotated.to(x.dtype), x)
    tl.store(q + (token * H + head) * D + d, x, mask & (head < H))
    page = tl.load(pages + token).to(tl.int64)
    cell = (head - H) // HK * plane + (page * HK + (head - H) % HK) * D
    tl.store(kv + cell + d, x, mask & (head >= H))

def rotate_write(qkv, cos, sin, kv, pages, n_head, n_kv_head):
    """qkv (N, (H + 2 Hk) D), cos and sin (N, D / 2) float32 or None, kv (2, n_page, Hk, D),
    pages (N,) -> q (N, H, D)"""
    chosen = backend(kv, qkv)
    N = len(qkv)
    D = kv.size(3)
    if chosen == "torch" or (chosen == "cpp" and D % 32):
        return rotate_write_ref(qkv, cos, sin, kv, pages, n_head, n_kv_head)
    q = qkv.new_empty(N, n_head, D)
    if chosen == "cpp":
        cpp("rotate_write", qkv, cos, sin, q, kv, pages, N, kv.size(1), n_head, n_kv_head, D)
        return q
    grid = N, cdiv(n_head + 2 * n_kv_head, 8)
    _rotate_write_kernel[grid](qkv, cos, sin, q, kv, pages, kv.stride(0), n_head, n_kv_head, D,
                               BLOCK_H=8, BLOCK_D=triton.next_power_of_2(D))
    return q

# -----------------------------------------------------------------------------
# attention over the paged cache

def attention_ref(q, kv, batch):
    """Row j of a request attends to the first n_past + j + 1 tokens of its request."""
    out = torch.zeros_like(q)
    group = q.size(1) // kv.size(2)  # query heads per kv head
    for start, n, n_past, first in batch.spans.tolist():
        pages = batch.table[first:first + n_past + n].long()
        k, v = kv[:, pages].float().repeat_interleave(group, 2)  # (context, H, D) each
        rows = q[start:start + n].float()  # (n, H, D)
        scores = torch.einsum("nhd,chd->hnc", rows, k) * q.size(-1) ** -0.5
        seen = torch.ones_like(scores[0], dtype=torch.bool).tril(n_past)  # (n, context)
        p = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[start:start + n] = torch.einsum("hnc,chd->nhd", p, v).to(q.dtype)
    return out

@triton.jit
def _attention_kernel(q, kv, out, lse, spans, table, plane, scale, n_out,
                      H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr,
                      BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program: a tile of query rows of one kv head against one split of the context. A row of
    the tile is one query head of one token: the G = H / Hk heads of a kv head share its loads.

                     |----- split 0 -----|----- split 1 -----|    context: cached tokens, then own
        token 0, G x   x x x x x x x x x x x x x x x x x          x: visible. for each BLOCK_N
        token 1, G x   x x x x x x x x x x x x x x x x x x        tokens: load K and V from their
        token 2, G x   x x x x x x x x x x x x x x x x x x x      pages, online softmax
    """
    G: tl.constexpr = H // HK
    tile = tl.program_id(0) * BLOCK_M
    kv_head = tl.program_id(1) % HK
    first_row, n_row, n_past, first_entry = load4(spans + 4 * (tl.program_id(1) // HK))
    if tile >= n_row * G:
        return

    m = tile + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)[None]
    token = m // G
    at = (first_row + token).to(tl.int64) * H + kv_head * G + m % G
    mask = (token < n_row)[:, None] & (d < D)
    queries = tl.load(q + at[:, None] * D + d, mask, 0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    end = n_past + tl.minimum(n_row, (tile + BLOCK_M - 1) // G + 1)
    size = tl.cdiv(tl.cdiv(end, tl.num_programs(2)), BLOCK_N) * BLOCK_N
    begin = tl.program_id(2) * size
    for start in range(begin, tl.minimum(begin + size, end), BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        page = tl.load(table + first_entry + j, j < end, 0).to(tl.int64)
        cells = kv + (page * HK + kv_head)[:, None] * D + d
        cells_mask = (j < end)[:, None] & (d < D)
        k = tl.load(cells, cells_mask, 0.0)
        v = tl.load(cells + plane, cells_mask, 0.0)
        scores = tl.dot(queries, k.T, input_precision="ieee") * scale
        scores = tl.where(j[None] - n_past <= token[:, None], scores, -1e30)
        new_top = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        top = new_top
    total = tl.maximum(total, 1e-30)  # the split may be empty
    at += tl.program_id(2) * n_out
    if lse is not None:
        tl.store(lse + at, (top + tl.log2(total)) * 0.6931471806, token < n_row)
    tl.store(out + at[:, None] * D + d, acc / total[:, None], mask)

def attention_triton(q, kv, batch):
    """Few rows: contexts are split to fill the GPU, then combined [flash-decoding]. Then chunks."""
    N, H, D = q.shape
    Hk = kv.size(2)
    out = torch.empty_like(q)
    n = min(N, batch.n_few * batch.max_few)  # at least the rows of all requests with few rows
    block_d = triton.next_power_of_2(D)
    block_n = min(64, 8192 // (block_d * q.element_size()))
    most = 128 if q.element_size() == 2 else 16
    scale = D ** -0.5 * 1.4426950408889634  # exp(x) = exp2(x log2(e))

    def attend(spans, max_rows, n_split, out, lse):
        n_query = max_rows * H // Hk
        block_m = min(most, max(16, triton.next_power_of_2(n_query)))
        grid = cdiv(n_query, block_m), Hk * len(spans), n_split
        _attention_kernel[grid](q, kv, out, lse, spans, batch.table, kv.stride(0), scale, n * H,
                                H, Hk, D, block_m, block_n, block_d,
                                num_warps=8 if block_m == most else 4, num_stages=5)

    if batch.max_few > 0:
        n_split = n_splits(batch.n_few * Hk, min(32, batch.max_context // 128))
        parts = q.new_empty(n_split, n, H, D, dtype=torch.float32)
        lse = q.new_empty(n_split, n, H, 1, dtype=torch.float32)  # log of the sum of exp(scores)
        attend(batch.spans[:batch.n_few], batch.max_few, n_split, parts, lse)
        out[:n] = (parts * lse.softmax(0)).sum(0)
    if batch.max_chunk > 0:
        attend(batch.spans[batch.n_few:], batch.max_chunk, 1, out, None)
    return out

def attention_cpp(q, kv, batch):
    """Few rows: contexts read in place. Chunks: gathered, then matrix products."""
    _, H, D = q.shape
    Hk = kv.size(2)
    out = torch.empty_like(q)
    if batch.n_few:
        cpp("attend", q, *kv, batch.spans, batch.table, out, batch.n_few, H, Hk, D)
    for start, n, n_past, first in batch.spans[batch.n_few:].tolist():
        pages = batch.table[first:first + n_past + n]
        attend_chunk(q[start:start + n], kv, pages, out[start:start + n])
    return out

def attend_chunk(q, kv, pages, out):
    """q (n, H, D) attends to the tokens on `pages`, the last n of which are its own. Rows and
    context are padded to multiples of 32, because oneDNN compiles a kernel for each shape."""
    n, H, D = q.shape
    Hk = kv.size(2)
    n_past = len(pages) - n
    pages = torch.cat([pages, pages[-1:].expand(-len(pages) % 32)])
    k = kv[0].index_select(0, pages).transpose(0, 1).contiguous()  # (Hk, context, D)
    v = kv[1].index_select(0, pages).transpose(0, 1).contiguous()  # (Hk, context, D)
    for first in range(0, n, CHUNK_ROWS):
        own = out[first:first + CHUNK_ROWS]
        rows = F.pad(q[first:first + CHUNK_ROWS], (0, 0, 0, 0, 0, -len(own) % 32))  # (m, H, D)
        rows = rows.unflatten(1, (Hk, -1)).transpose(0, 1).contiguous()  # (Hk, m, G, D)
        context = cdiv(n_past + first + len(own), 32) * 32
        scores = torch.bmm(rows.flatten(1, 2), k[:, :context].transpose(1, 2))
        totals = torch.empty(*rows.shape[:3], 1)
        sizes = *rows.shape[:3], context, n_past + first
        cpp("causal_softmax", scores, totals, *sizes, D ** -0.5)
        values = torch.bmm(scores, v[:, :context]).view_as(rows) / totals
        own.view(-1, Hk, H // Hk, D).copy_(values.transpose(0, 1)[:len(own)])

def attention(q, kv, batch):
    """q (N, H, D), kv (2, n_page, Hk, D) -> (N, H, D)"""
    chosen = backend(q, kv)
    if chosen == "triton":
        return attention_triton(q, kv, batch)
    if chosen == "cpp":
        return attention_cpp(q, kv, batch)
    return attention_ref(q, kv, batch)

# -----------------------------------------------------------------------------
# lora: y += x A B, for each row the A and B of its own adapter [S-LoRA §5.3]

def adapter_rows(plane, table, first, rank, width):
    """The rows of A or B from their pages: plane (n_page, Hk, D) -> (rank, width)"""
    plane = plane.flatten(1)  # (n_page, W)
    pages = table[first:first + rank * cdiv(width, plane.size(1))]
    return plane.index_select(0, pages).view(rank, -1)[:, :width]

def lora_ref(y, x, kv, sites, exchange=None, n_few=0):
    """xa = x A (N, n_module * max_rank) float32, module j from column j * max_rank on; y += xa B.
    C++ takes the first n_few sites and reads the rows of A and B in place."""
    W = kv.size(2) * kv.size(3)
    xa = x.new_zeros(len(x), sites.n_module * sites.max_rank, dtype=torch.float32)
    few = sites.sites, sites.table  # of the sites that C++ takes
    chunks = [site for site in sites.sites[n_few:].tolist() if site[1] > 0]
    if n_few:
        cpp("shrink", x, kv[0], *few, xa, n_few, x.size(1), W, sites.n_module, sites.max_rank)
    for start, n, _, _, rank, _, module, first in chunks:
        a = adapter_rows(kv[0], sites.table, first, rank, x.size(1))
        column = module * sites.max_rank
        xa[start:start + n, column:column + rank] = x[start:start + n] @ a.T
    if exchange is not None:
        xa = exchange(xa)
    stride = xa.size(1) // sites.n_module
    if n_few:
        cpp("expand", y, kv[1], *few, xa, n_few, y.size(1), W, sites.n_module, stride)
    for start, n, column, columns, _, rank, module, first in chunks:
        b = adapter_rows(kv[1], sites.table, first, rank, columns)
        own = xa[start:start + n, module * stride:module * stride + rank]
        y[start:start + n, column:column + columns].addmm_(own.to(y.dtype), b)

def lora_bmm(y, x, kv, sites):
    """The baseline of [S-LoRA §7.3]: copy A, B and x to padded tensors, then batched products."""
    entries = [site for site in sites.sites.tolist() if site[1] > 0]
    rows = x.new_zeros(len(entries), max(sites.max_few, sites.max_chunk), x.size(1))
    a = x.new_zeros(len(entries), sites.max_rank, x.size(1))
    b = x.new_zeros(len(entries), sites.max_rank, y.size(1))
    for s, (start, n, column, columns, rank, _, _, first) in enumerate(entries):
        rows[s, :n] = x[start:start + n]
        a[s, :rank] = adapter_rows(kv[0], sites.table, first, rank, x.size(1))
        own = b[s, :rank, column:column + columns]
        own.copy_(adapter_rows(kv[1], sites.table, first, rank, columns))
    product = rows @ a.mT @ b  # (S, rows, n_out)
    for (start, n, *_), own in zip(entries, product):
        y[start:start + n] += own[:n]

@triton.jit
def _shrink_kernel(x, a, xa, sites, table, width, stride, C: tl.constexpr, W: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr):
    """One program: xa = x A for BLOCK_M rows of one site.

        x, a row    |  0  |  1  |  2  |  3  |  4  |     blocks of BLOCK_K numbers, which
        A, row 0    |  page 81  |  page 7   | 40  |     begin anew with each page
        A, row 1    |  page 5   |  page 82  | 41  |
    """
    site = sites + 8 * tl.program_id(1)
    first_row, n_row, _, _ = load4(site)
    rank, _, module, first_entry = load4(site + 4)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    if tl.program_id(0) * BLOCK_M >= n_row:
        return

    r = tl.arange(0, BLOCK_R)
    row = (first_row + m).to(tl.int64)
    n_page = tl.cdiv(C, W)  # pages of a row of A
    n_block = tl.cdiv(W, BLOCK_K)  # blocks of a page
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for block in range(n_page * n_block):
        i = block // n_block
        k = block % n_block * BLOCK_K + tl.arange(0, BLOCK_K)[None]
        mask = (k < W) & (i * W + k < C)
        page = tl.load(table + first_entry + r * n_page + i, r < rank, 0).to(tl.int64)
        w = tl.load(a + page[:, None] * W + k, (r < rank)[:, None] & mask, 0.0)
        v = tl.load(x + row * C + i * W + k, (m < n_row) & mask, 0.0)
        acc = tl.dot(v, w.T, acc, input_precision="ieee")
    tl.store(xa + row * width + module * stride + r[None], acc, (m < n_row) & (r < rank)[None])

@triton.jit
def _expand_kernel(y, b, xa, sites, table, width, stride, C, W: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """One program: y += xa B for BLOCK_M rows of one site and BLOCK_N columns that lie in the
    same page of each row of B."""
    site = sites + 8 * tl.program_id(1)
    first_row, n_row, first_column, n_column = load4(site)
    _, rank, module, first_entry = load4(site + 4)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    i = tl.program_id(2) // tl.cdiv(W, BLOCK_N)  # page of the row
    k = tl.program_id(2) % tl.cdiv(W, BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)[None]
    if (tl.program_id(0) * BLOCK_M >= n_row) | (i * W >= n_column):
        return

    row = (first_row + m).to(tl.int64)
    mask = (k < W) & (i * W + k < n_column)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, rank, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        at = xa + row * width + module * stride + r[None]
        v = tl.load(at, (m < n_row) & (r < rank)[None], 0.0)
        entry = first_entry + r * tl.cdiv(n_column, W) + i
        page = tl.load(table + entry, r < rank, 0).to(tl.int64)
        w = tl.load(b + page[:, None] * W + k, (r < rank)[:, None] & mask, 0.0)
        acc = tl.dot(v.to(w.dtype), w, acc, input_precision="ieee")
    at = y + row * C + first_column + i * W + k
    acc += tl.load(at, (m < n_row) & mask, 0.0)
    tl.store(at, acc, (m < n_row) & mask)

def lora_triton(y, x, kv, sites, exchange=None):
    """Tiles of 64 rows [MBGMM]; if all sites have few rows, of 16 [MBGMV]."""
    W = kv.size(2) * kv.size(3)
    block = max(16, min(256 // x.element_size(), triton.next_power_of_2(W)))
    block_r = max(16, triton.next_power_of_2(sites.max_rank))
    block_k = min(block, 128 * block // block_r)
    block_m = 64 if sites.max_chunk > 0 else 16
    warps = max(4, block_m // 8)
    grid = cdiv(max(sites.max_few, sites.max_chunk), block_m), len(sites.sites)
    xa = x.new_empty(len(x), sites.n_module * sites.max_rank, dtype=torch.float32)
    _shrink_kernel[grid](
        x, kv[0], xa, sites.sites, sites.table, xa.size(1), sites.max_rank, x.size(1), W,
        block_m, block_r, block_k, num_warps=warps, num_stages=6)
    if exchange is not None:
        xa = exchange(xa)
    n_block = cdiv(y.size(1), W) * cdiv(W, block)
    _expand_kernel[(*grid, n_block)](
        y, kv[1], xa, sites.sites, sites.table, xa.size(1), xa.size(1) // sites.n_module,
        y.size(1), W, block_m, 32, block, num_warps=warps, num_stages=5)

def lora(y, x, kv, sites, exchange=None):
    """y (N, n_out) += x (N, n_in) A B in place. exchange: all-gather or all-reduce of x A."""
    chosen = backend(x, y, kv)
    if sites.way == "bmm":
        assert exchange is None, "the bmm baseline runs on one device"
        lora_bmm(y, x, kv, sites)
    elif chosen == "triton":
        lora_triton(y, x, kv, sites, exchange)
    else:
        in_place = chosen == "cpp" and kv[0, 0].numel() % 16 == 0
        lora_ref(y, x, kv, sites, exchange, sites.n_few if in_place else 0)

# -----------------------------------------------------------------------------
# sampling and verification; gpt-fast's convention: p of the target model, q of the draft model

def probabilities(logits, temperature, top_k, top_p):
    """logits (M, V), the others (M,) -> p (M, V) float32. temperature 0: all on the argmax;
    top_k 0: no limit; top_p 1: no limit, else the fewest tokens that together have top_p."""
    greedy = temperature == 0
    logits = logits.float()
    scaled = logits / temperature.masked_fill(greedy, 1)[:, None]
    if ((top_k > 0) | (top_p < 1)).any():
        V = logits.size(1)
        k = top_k.masked_fill(top_k == 0, V)[:, None]
        ordered, order = scaled.topk(min(int(k.max()), V))
        rank = torch.arange(order.size(1), device=logits.device)
        ordered = ordered.masked_fill(rank >= k, float("-inf"))
        p = ordered.softmax(-1)
        before = p.cumsum(-1) - p  # probability of the tokens that rank higher
        limit = top_p.masked_fill(top_p == 1, 2)[:, None]
        ordered = ordered.masked_fill((before >= limit) & (rank > 0), float("-inf"))
        scaled = torch.full_like(scaled, float("-inf")).scatter(1, order, ordered)
    best = logits.max(-1, keepdim=True).indices
    one_hot = torch.zeros_like(logits).scatter_(1, best, 1)
    return torch.where(greedy[:, None], one_hot, scaled.softmax(-1))

def sample(p, u):
    """Inverse CDF: weights p (M, V), need not sum to 1; u (M,) uniform in [0, 1) -> (M,)"""
    cdf = p.double().cumsum(-1)
    total = cdf[:, -1:]
    token = torch.searchsorted(cdf, u.double()[:, None] * total, right=True)
    last = torch.searchsorted(cdf, total.clone())  # of all tokens with a weight; u may be near 1
    return torch.minimum(token, last)[:, 0]

def verify(p, q, drafts, n_drafts, u):
    """Lossless rejection sampling [SmartSpec §2]: accept draft d with probability p[d] / q[d]; at
    the first rejection sample from max(p - q, 0), after the last draft from p.

    Request r has n_drafts[r] of drafts (K,) and n_drafts[r] + 1 rows of p (K + R, V). q (K, V), or
    None for drafts that were not sampled. u (K + R,) uniform -> n_accepted (R,), tokens (R,)"""
    K = len(drafts)
    first_draft = n_drafts.cumsum(0) - n_drafts
    first_row = first_draft + torch.arange(len(n_drafts), device=p.device)
    request = torch.repeat_interleave(n_drafts, output_size=K)  # (K,)
    draft = torch.arange(K, device=p.device)
    p_draft = p[draft + request, drafts]
    q_draft = 1 if q is None else q[draft, drafts]
    accepted = u[:K] * q_draft < p_draft

    # the first rejected draft of each request, counted within the request
    place = torch.where(accepted, n_drafts[request], draft - first_draft[request])
    n_accepted = n_drafts.scatter_reduce(0, request, place, "amin")
    weights = p[first_row + n_accepted]  # (R, V)
    rejected = torch.nonzero(n_accepted < n_drafts)[:, 0]
    at = (first_draft + n_accepted)[rejected]
    if q is None:
        weights[rejected, drafts[at]] = 0
    else:
        weights[rejected] = (weights[rejected] - q[at]).clamp_(min=0)
    return n_accepted, sample(weights, u[K:])

# -----------------------------------------------------------------------------
# the C++ operators

SOURCE = r"""
// GCC's vector extensions compile to what the processor has: AVX-512 (LANES 16), AVX2 or NEON (8).
// Widths and head dimensions are multiples of 16.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#include <omp.h>

typedef uint16_t bf16;
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES)));
const float LOG2E = 1.44269504f, MASKED = -1e30f;

static inline vec load(const float* p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline vec load(const bf16* p) {
    hvec h;
    memcpy(&h, p, sizeof h);
    return (vec)(__builtin_convertvector(h, uvec) << 16);
}
static inline void store(float* p, vec v) { memcpy(p, &v, sizeof v); }
static inline void store(bf16* p, vec v) {  // rounds to the nearest, ties to even
    uvec u = (uvec)v;
    hvec h = __builtin_convertvector((u + 0x7fff + (u >> 16 & 1)) >> 16, hvec);
    memcpy(p, &h, sizeof h);
}

// 2 LANES numbers, in bf16 first the even, then the odd ones, because that costs few instructions
struct Pair { vec a, b; };
static inline Pair load_pair(const float* p) { return {load(p), load(p + LANES)}; }
static inline Pair load_pair(const bf16* p) {
    uvec u;
    memcpy(&u, p, sizeof u);
    return {(vec)(u << 16), (vec)(u & 0xffff0000)};
}
static inline void store_pair(float* p, Pair v) { memcpy(p, &v, sizeof v); }
static inline void store_pair(bf16* p, Pair v) {  // rounds to the nearest, ties up
    uvec u = ((uvec)v.a + 0x8000) >> 16 | (((uvec)v.b + 0x8000) & 0xffff0000);
    memcpy(p, &u, sizeof u);
}

static inline ivec lanes() {  // 0, 1, 2 ...
    ivec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    return lane;
}
// One step of a sum over lanes: lane i adds two lanes of a, or of b if `bit` of i is set.
template <int bit> static inline vec fold(vec a, vec b) {
    const ivec from = (lanes() & bit) != 0 ? lanes() + LANES : lanes();
    return __builtin_shuffle(a, b, from) + __builtin_shuffle(a, b, from ^ bit);
}
template <int n = LANES / 2> static inline vec sums(vec* v) {  // lane i: the sum of v[i]
    for (int i = 0; i < n; i++) v[i] = fold<n>(v[i], v[i + n]);
    if constexpr (n > 1) return sums<n / 2>(v);
    return v[0];
}
template <int n = LANES / 2> static inline float sum(vec v) {
    v = fold<n>(v, v);
    if constexpr (n > 1) return sum<n / 2>(v);
    return v[0];
}
static inline vec larger(vec a, vec b) { return a > b ? a : b; }
static inline float largest(vec v) {
    for (int n = LANES / 2; n > 0; n /= 2) v = larger(v, __builtin_shuffle(v, lanes() ^ n));
    return v[0];
}

// 2^x = 2^n 2^f with a whole n and |f| <= 1/2, for x < 127; relative error 3e-6
static inline vec exp2(vec x) {
    x = larger(x, vec{} - 126.0f);
    ivec n = __builtin_convertvector(x + 126.5f, ivec) - 126;
    vec f = x - __builtin_convertvector(n, vec);
    vec p = vec{} + 9.5701014e-3f;
    for (float c : {5.591786e-2f, 0.24024745f, 0.69312181f, 0.99999926f}) p = p * f + c;
    return (vec)((ivec)p + (n << 23));
}

// total = x + y, out = norm(total) * weight (+ bias: LayerNorm, else RMSNorm); each (N, C)
template <class T>
void add_norm(const T* x, const T* y, const T* weight, const T* bias, T* total, T* out, int N,
              int C, float eps) {
    #pragma omp parallel for if (N > 8)
    for (int64_t i = 0; i < N; i++) {
        const T* row = (y ? total : x) + i * C;
        vec all = {}, squares = {};
        for (int c = 0; c < C; c += LANES) {
            if (y) store(total + i * C + c, load(x + i * C + c) + load(y + i * C + c));
            vec v = load(row + c);
            all += v;
            squares += v * v;
        }
        const float mean = bias ? sum(all) / C : 0;
        const float variance = std::max(0.0f, sum(squares) / C - mean * mean);
        const float scale = 1 / std::sqrt(variance + eps);
        for (int c = 0; c < C; c += LANES) {
            vec v = (load(row + c) - mean) * scale * load(weight + c);
            store(out + i * C + c, bias ? v + load(bias + c) : v);
        }
    }
}

// h (N, 2 I) -> SwiGLU, or h (N, I) -> tanh-GELU; out (N, I)
template <class T> void activate(const T* h, T* out, int N, int I, int gated) {
    #pragma omp parallel for if (N > 8)
    for (int64_t i = 0; i < N; i++)
        for (int c = 0; c < I; c += LANES) {
            vec x = load(h + (gated ? 2 * i : i) * I + c);
            vec z = gated ? x : 1.59576912f * (x + 0.044715f * x * x * x);
            z = larger(LOG2E * z, vec{} - 126.0f);
            vec y = x / (1 + exp2(-z));  // (1 + tanh(z / 2)) / 2 = 1 / (1 + exp(-z))
            store(out + i * I + c, gated ? y * load(h + (2 * i + 1) * I + c) : y);
        }
}

// Rotate q and k, unless cos is null; write k and v to their pages. qkv (N, (H + 2 Hk) D),
// cos and sin (N, D / 2), kv (2, n_page, Hk, D), pages (N,) -> q (N, H, D)
template <class T>
void rotate_write(const T* qkv, const float* cos, const float* sin, T* q, T* kv,
                  const int32_t* pages, int N, int n_page, int H, int Hk, int D) {
    #pragma omp parallel for if (N > 8)
    for (int64_t i = 0; i < N; i++) {
        const T* from = qkv + i * (H + 2 * Hk) * D;
        T* k = kv + (int64_t)pages[i] * Hk * D;
        for (int h = 0; h < H + Hk; h++, from += D) {
            T* to = h < H ? q + (i * H + h) * D : k + (h - H) * D;
            if (!cos) memcpy(to, from, D * sizeof(T));
            for (int d = 0; cos && d < D / 2; d += LANES) {
                vec c = load(cos + i * D / 2 + d), s = load(sin + i * D / 2 + d);
                vec a = load(from + d), b = load(from + D / 2 + d);
                store(to + d, a * c - b * s);
                store(to + D / 2 + d, b * c + a * s);
            }
        }
        memcpy(k + (int64_t)n_page * Hk * D, from, Hk * D * sizeof(T));
    }
}

// One step of an online softmax: the query q (D) attends to the first `seen` of BLOCK tokens with
// keys k[t] and values v[t]. state: the maximum score, in units of log2, the sum of the weights,
// and from state + LANES on the weighted sum of the values (D).
const int BLOCK = 2 * LANES;
template <class T>
void attend_block(const float* q, T* const* k, T* const* v, int seen, int D, float* state) {
    vec s[2];
    for (int half = 0; half < 2; half++) {
        vec dot[LANES] = {};
        for (int d = 0; d < D; d += LANES)
            for (int t = 0; t < LANES; t++) dot[t] += load(q + d) * load(k[LANES * half + t] + d);
        s[half] = lanes() + LANES * half < seen ? sums(dot) : vec{} + MASKED;
    }
    const float top = std::max(state[0], largest(larger(s[0], s[1])));
    const float shrink = top == state[0] ? 1 : std::exp2(state[0] - top);
    for (vec& x : s) x = exp2(x - top);
    state[0] = top;
    state[1] = state[1] * shrink + sum(s[0] + s[1]);
    const float* weight = (const float*)s;
    float* value = state + LANES;
    for (int d = 0; d < D; d += 4 * LANES) {  // four sums at a time: their additions overlap
        vec acc[4];
        const int n = std::min(4, (D - d) / LANES);
        for (int i = 0; i < n; i++) acc[i] = load(value + d + LANES * i) * shrink;
        for (int t = 0; n == 4 && t < BLOCK; t++)
            for (int i = 0; i < 4; i++) acc[i] += weight[t] * load(v[t] + d + LANES * i);
        for (int t = 0; n < 4 && t < BLOCK; t++)
            for (int i = 0; i < n; i++) acc[i] += weight[t] * load(v[t] + d + LANES * i);
        for (int i = 0; i < n; i++) store(value + d + LANES * i, acc[i]);
    }
}

// The queries of one request attend to its tokens begin .. end - 1, BLOCK tokens of one kv head at
// a time. q (rows, H, D), states (rows, H, LANES + D).
template <class T>
void attend_part(const T* q, T* K, T* V, const int32_t* pages, int rows, int n_past, int begin,
                 int end, int H, int Hk, int D, float* states) {
    const int G = H / Hk;
    std::vector<vec> scratch((rows * H + 2 * BLOCK) * D / LANES);  // vec: aligned
    float *copies = (float*)scratch.data(), *queries = copies + 2 * BLOCK * D;
    float *kf[BLOCK], *vf[BLOCK];
    T *k[BLOCK], *v[BLOCK];
    for (int i = 0; i < rows * H * D; i += LANES)
        store(queries + i, load(q + i) * (LOG2E / std::sqrt((float)D)));
    for (; begin < end; begin += BLOCK)
        for (int h = 0; h < Hk; h++) {
            for (int t = 0; t < BLOCK; t++) {
                const int64_t page = pages[std::min(begin + t, end - 1)];
                const int64_t later = pages[std::min(begin + t + BLOCK, end - 1)];
                const int64_t next = h + 1 < Hk ? page * Hk + h + 1 : later * Hk;  // to prefetch
                for (int d = 0; d < D; d += 64 / sizeof(T)) {
                    __builtin_prefetch(K + next * D + d);
                    __builtin_prefetch(V + next * D + d);
                }
                k[t] = K + (page * Hk + h) * D;
                v[t] = V + (page * Hk + h) * D;
                kf[t] = copies + t * D;
                vf[t] = kf[t] + BLOCK * D;
                for (int d = 0; rows * G > 1 && d < D; d += LANES) {  // once for several queries
                    store(kf[t] + d, load(k[t] + d));
                    store(vf[t] + d, load(v[t] + d));
                }
            }
            for (int i = 0; i < rows * G; i++) {
                const int query = i / G * H + h * G + i % G;
                const int seen = std::min(end, n_past + i / G + 1) - begin;
                float *x = queries + query * D, *state = states + query * (LANES + D);
                if (rows * G > 1)
                    attend_block(x, kf, vf, seen, D, state);
                else
                    attend_block(x, k, v, seen, D, state);
            }
        }
}

// Attention of requests with few rows, the cache read in place. Contexts are cut into parts, so
// that all threads have work; the parts are combined at the end [flash-decoding].
// q, out (N, H, D); K and V (n_page, Hk, D); spans (R, 4): first row, rows, n_past, first entry of
// table. Row j of a request sees its first n_past + j + 1 tokens.
template <class T>
void attend(const T* q, T* K, T* V, const int32_t* spans, const int32_t* table, T* out, int R,
            int H, int Hk, int D) {
    int64_t n_context = 0, longest = 0, N = 0;
    for (const int32_t* span = spans; span < spans + 4 * R; span += 4) {
        if (span[1] == 0) continue;  // padding
        n_context += span[1] + span[2];
        longest = std::max<int64_t>(longest, span[1] + span[2]);
        N = std::max<int64_t>(N, span[0] + span[1]);
    }
    const int64_t size = std::max<int64_t>(128, n_context / (4 * omp_get_max_threads()));
    const int64_t n_part = (longest + size - 1) / size, stride = LANES + D;
    std::vector<vec> memory(n_part * N * H * stride / LANES);
    float* states = (float*)memory.data();
    for (int64_t i = 0; i < n_part * N * H; i++) states[i * stride] = MASKED;
    #pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (int p = 0; p < n_part; p++)
        for (int r = 0; r < R; r++) {
            const int32_t* span = spans + 4 * r;
            const int end = std::min<int64_t>(span[1] + span[2], (p + 1) * size);
            if (span[1] > 0 && p * size < end)
                attend_part(q + span[0] * H * D, K, V, table + span[3], span[1], span[2], p * size,
                            end, H, Hk, D, states + (p * N + span[0]) * H * stride);
        }
    #pragma omp parallel for if (N * H > 1024)
    for (int64_t i = 0; i < N * H; i++) {
        const float* state = states + i * stride;
        const int64_t step = N * H * stride;  // to the next part
        float top = MASKED, total = 0;
        for (int p = 0; p < n_part; p++) top = std::max(top, state[p * step]);
        for (int p = 0; p < n_part; p++)
            total += state[p * step + 1] * std::exp2(state[p * step] - top);
        for (int d = 0; d < D; d += LANES) {
            vec acc = {};
            for (int p = 0; p < n_part; p++)
                acc += std::exp2(state[p * step] - top) * load(state + p * step + LANES + d);
            store(out + i * D + d, acc / total);
        }
    }
}

// Softmax in place of scores (Hk, n, G, context), without the division by totals (Hk, n, G). Row j
// sees the first n_past + j + 1 columns, the others become 0; context is a multiple of 32.
template <class T>
void causal_softmax(T* scores, float* totals, int Hk, int n, int G, int context, int n_past,
                    float scale) {
    scale *= LOG2E;
    T mask[4 * LANES] = {};  // zeros, then MASKED
    store_pair(mask + 2 * LANES, {vec{} + MASKED, vec{} + MASKED});
    #pragma omp parallel for
    for (int64_t row = 0; row < Hk * n * G; row++) {
        T* s = scores + row * context;
        const int seen = std::min(context, n_past + (int)row / G % n + 1);
        const int last = (seen - 1) & -2 * LANES;  // the pair in which the context ends
        Pair x = load_pair(s + last), m = load_pair(mask + 2 * LANES + last - seen);
        store_pair(s + last, {x.a + m.a, x.b + m.b});
        vec top = vec{} + MASKED, total = {};
        for (int c = 0; c <= last; c += 2 * LANES) {
            x = load_pair(s + c);
            top = larger(top, larger(x.a, x.b));
        }
        const float highest = largest(top) * scale;
        for (int c = 0; c <= last; c += 2 * LANES) {
            x = load_pair(s + c);
            x = {exp2(x.a * scale - highest), exp2(x.b * scale - highest)};
            total += x.a + x.b;
            store_pair(s + c, x);
        }
        totals[row] = sum(total);
        memset(s + seen, 0, (context - seen) * sizeof(T));
    }
}

// xa (N, n_module * max_rank) = x (N, n_in) A for sites with few rows, A (n_page, W) read in place
template <class T>
void shrink(const T* x, const T* A, const int32_t* sites, const int32_t* table, float* xa, int S,
            int n_in, int W, int n_module, int max_rank) {
    const int n_page = (n_in + W - 1) / W;  // pages of a row of A
    #pragma omp parallel for collapse(2) schedule(dynamic, 16)
    for (int s = 0; s < S; s++)
        for (int i = 0; i < max_rank; i++) {
            const int32_t* site = sites + 8 * s;
            const int32_t* pages = table + site[7] + i * n_page;
            const int end = i < site[4] ? site[0] + site[1] : 0;
            for (int64_t row = site[0]; row < end; row++) {
                vec dot = {};
                for (int p = 0; p < n_page; p++) {
                    const T *a = A + (int64_t)pages[p] * W, *part = x + row * n_in + p * W;
                    for (int c = 0; c < std::min(W, n_in - p * W); c += LANES)
                        dot += load(a + c) * load(part + c);
                }
                xa[(row * n_module + site[6]) * max_rank + i] = sum(dot);
            }
        }
}

// y (N, n_out) += xa (N, n_module * stride) B for sites with few rows, B (n_page, W) read in place
template <class T>
void expand(T* y, const T* B, const int32_t* sites, const int32_t* table, const float* xa, int S,
            int n_out, int W, int n_module, int stride) {
    #pragma omp parallel for schedule(dynamic, 1)
    for (int s = 0; s < S; s++) {
        const int32_t* site = sites + 8 * s;
        const int columns = site[3], rank = site[5], n_page = (columns + W - 1) / W;
        if (site[1] == 0) continue;
        std::vector<float> total(columns + LANES);
        for (int64_t row = site[0]; row < site[0] + site[1]; row++) {
            const float* weight = xa + (row * n_module + site[6]) * stride;
            T* own = y + row * n_out + site[2];
            for (int c = 0; c < columns; c += LANES) {
                T part[LANES] = {};
                memcpy(part, own + c, std::min(LANES, columns - c) * sizeof(T));
                store(&total[c], load(part));
            }
            for (int p = 0; p < n_page; p++)
                for (int i = 0; i < rank; i += 4) {  // four rows of B at a time
                    const int last = std::min(4, rank - i) - 1;
                    const T* b[4];
                    float w[4];
                    for (int j = 0; j < 4; j++) {
                        const int entry = site[7] + (i + std::min(j, last)) * n_page + p;
                        b[j] = B + (int64_t)table[entry] * W;
                        w[j] = j > last ? 0 : weight[i + j];
                    }
                    float* to = &total[p * W];
                    for (int c = 0; c < std::min(W, columns - p * W); c += LANES)
                        store(to + c, load(to + c) + w[0] * load(b[0] + c) + w[1] * load(b[1] + c)
                                          + w[2] * load(b[2] + c) + w[3] * load(b[3] + c));
                }
            for (int c = 0; c < columns; c += LANES) {
                T part[LANES];
                store(part, load(&total[c]));
                memcpy(own + c, part, std::min(LANES, columns - c) * sizeof(T));
            }
        }
    }
}
"""
