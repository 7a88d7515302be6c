"""The operators of one iteration over a flat batch of N tokens. Each has a definition in plain
torch, named `..._ref`. Read them, down to the appendix:

    the batch       Batch: what one iteration computes; Segments: where adapters act in it
    sampling        a token from a distribution; the drafts that are accepted
    the operators   linear, add_norm, activate, rotate_write, attention, lora

    appendix        where each runs; Triton kernels for GPUs; weights in panels and C++ for CPUs

The cache. Tokens and adapters compete for the same memory, so both lie in pages of the cache
[S-LoRA §5.1]. One layer of it is `kv` (2, n_page, Hk, D): plane 0 is K, plane 1 is V. A page is
one vector of width W = Hk * D in each plane, and has the same number in all layers. It holds K and
V of a token, or one rank of an adapter's module (q, k, ...): a column of A (A is stored transposed,
as rows) and a row of B. If these are longer than W, they take several pages. A page table lists
the pages of one request, or of one adapter, in order:

    page            0         1         2         3         4         5
    K plane     | token 0 | A col 0 | token 1 | A col 1 | token 2 |  free   | ...
    V plane     | token 0 | B row 0 | token 1 | B row 1 | token 2 |  free   | ...
    page tables     0 2 4 of the request, 1 3 of the adapter
"""

import ctypes
import hashlib
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

# Before torch is loaded: a thread that waits for others spins for some 10 us, then sleeps. By the
# default of OpenMP it spins for so long that another busy process makes iterations twenty times
# slower. If torch was loaded first, Sleepers (in the C++) keep threads from spinning.
if not sys.modules.get("torch"):
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

# -----------------------------------------------------------------------------
# the batch: what one iteration computes

DECODE_ROWS = 8  # a decode with its drafts has at most this many rows, a chunk usually more
TILE = 128  # rows of a tile of a GPU's matrix product: fewer take as long [SARATHI Fig. 7]

@dataclass
class Segments:
    """Where adapters act in one operator. A segment is adjacent rows of the batch with the same
    adapter, for one module. Here rows 4 to 6 have one of rank 16, for k, module 1 of q, k, v:

                    ROW  N_ROW  COLUMN  N_COLUMN  RANK  RANK_B  MODULE  TABLE_START
        numbers[0]    4      3     512       512    16      16       1           90

    RANK is A's, RANK_B is B's: they differ if devices share A's rows. Decodes come first."""
    ROW, N_ROW, COLUMN, N_COLUMN, RANK, RANK_B, MODULE, TABLE_START = range(8)

    numbers: Tensor  # (S, 8) int32
    page_tables: Tensor  # (n,) int32: that of the batch
    n_decode: int  # numbers[:n_decode] have at most DECODE_ROWS rows each, the others more

    # ---- the rest

    max_rows: int  # the most rows of a segment
    n_module: int  # modules of the operator (q, k, v: 3)
    max_rank: int  # at least the largest rank of A, a multiple of 16
    wide: bool = False  # whether the columns of all segments begin and end at multiples of 16
    max_columns: int = 0  # the most columns of a segment; 0: all of y
    way: str = "batched"  # or "bmm", the baseline: copy, pad, batched matrix products
    gather_xa: Callable | None = None  # of several devices: the whole x A [S-LoRA §6]

    @cached_property
    def lists(self):
        """The numbers as lists. Cached: the CPU waits for a GPU once, not in every layer. Not for
        CUDA graphs, because these write the tensors again."""
        return self.numbers.tolist()

@dataclass
class Batch:
    """One iteration: N tokens of R requests, decodes first, as int32. Here a decode with two drafts
    after 9 cached tokens (n_past) is next to tokens 0 to 4 of a prompt with an adapter:

        row            0    1    2  |  3    4    5    6    7    N = 8, R = 2
        tokens        t9   d1   d2  | p0   p1   p2   p3   p4
        positions      9   10   11  |  0    1    2    3    4    in their requests
        slot_mapping  20   21   22  | 30   31   32   33   34    pages to write K and V to
        spans         (0, 3, 9, 0)  | (3, 5, 0, 12)             first row, rows, n_past, table_start
        page_tables   the decode's 12 pages, the prompt's 5, then those of its adapter
        logit_rows     0    1    2  |                           the prompt has more tokens to feed
        adapters                    | ROW 3, N_ROW 5 for each module, the first at TABLE_START 17
    """
    tokens: Tensor  # (N,), those of a request side by side
    positions: Tensor  # (N,)
    slot_mapping: Tensor  # (N,)
    spans: Tensor  # (R, 4), one of each request; its pages are page_tables[table_start:]
    page_tables: Tensor  # (n,): n_past + rows pages of each request, then those of adapters
    logit_rows: Tensor  # (M,): rows for which next-token logits are computed
    n_decode: int  # spans[:n_decode] have at most DECODE_ROWS rows each, the others more
    adapters: dict = field(default_factory=dict)  # operator name -> Segments
    hidden: Tensor | None = None  # (M, C): the model's last hidden states, set by GPT.forward

    # ---- the rest
    # The work of attention in Triton, see attention_work. A program has one tile of query rows and
    # one split of the context: first row, rows, n_past, table_start of the request; first query
    # (query m of a kv head is head m % G of token m // G), split, number of splits, first part
    small_tiles: Tensor = field(default_factory=lambda: zeros(0, 8))  # (T, 8)
    large_tiles: Tensor = field(default_factory=lambda: zeros(0, 8))  # (T, 8)
    n_part: int = 0  # parts of outputs: if contexts are split, each split has its own

    @cached_property
    def lists(self):
        """The spans as lists, cached as in Segments"""
        return self.spans.tolist()

    def arrays(self):
        """All arrays but page_tables"""
        segments = [segments.numbers for segments in self.adapters.values()]
        return [*(getattr(self, name) for name in FIXED), *segments]

    def sizes(self):
        """How many numbers write() leaves for each array: whole units of 16 bytes"""
        return [cdiv(math.prod(x.shape), 4) * 4 for x in self.arrays()]

    def write(self, flat, sizes):
        """Write the arrays one after the other, zeros after each up to its size, then page_tables.
        Returns where they end."""
        end = 0
        for x, size in zip(self.arrays(), sizes):
            flat[end:end + x.size] = x.reshape(-1)
            flat[end + x.size:end + size] = 0
            end += size
        flat[end:end + len(self.page_tables)] = self.page_tables
        return end + len(self.page_tables)

    def over(self, flat):
        """The batch over a tensor that write() has filled: its arrays become views"""
        views = []
        for x, size in zip(self.arrays(), self.sizes()):
            views.append(flat[:math.prod(x.shape)].view(x.shape))
            flat = flat[size:]
        adapters = {op: replace(segments, numbers=x, page_tables=flat)
                    for (op, segments), x in zip(self.adapters.items(), views[len(FIXED):])}
        return replace(self, page_tables=flat, adapters=adapters, **dict(zip(FIXED, views)))

    def to(self, kv, H):
        """The batch as tensors on the device of a cache, by one copy, for which the CPU does not
        wait. For Triton with the work of attention with H heads."""
        batch = self
        if backend(kv) == "triton":
            batch = replace(self, **attention_work(self.lists, len(self.tokens), H, kv))
        sizes = batch.sizes()
        flat = np.empty(sum(sizes) + len(self.page_tables), np.int32)
        batch.write(flat, sizes)
        return batch.over(to_device(torch.from_numpy(flat), kv.device))

# -----------------------------------------------------------------------------
# sampling, and verification of drafts

def sample(p, u):
    """Draw tokens by the inverse CDF. p (M, V) are weights, which need not sum to 1; u (M,) is
    uniform in [0, 1). -> (M,), -1 where weights are NaN"""
    cdf = p.cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1:]
    # rounded up to the total, u would find no token. If all weights are 0, it is the last token
    at = torch.minimum(u[:, None] * total, total.nextafter(total.new_zeros(())))
    tokens = torch.searchsorted(cdf, at, right=True).clamp(max=p.size(1) - 1)
    return torch.where(total.isfinite(), tokens, -1)[:, 0]

def verify(p, q, drafts, n_drafts, u):
    """Lossless rejection sampling [SmartSpec §2]. Drafts come from q, the model has p: accept
    draft d with probability p[d] / q[d]. At the first rejection draw the token from max(p - q, 0);
    if all are accepted, draw one more from the last p.

    Request r has the next n_drafts[r] of drafts (K,), and n_drafts[r] + 1 rows of p (K + R, V).
    q (K, V); None: each draft was the only choice, so q[d] = 1. u (K + R,) uniform: K accept, R
    sample; K > 0. -> n_accepted (R,), tokens (R,)"""
    K = len(drafts)
    first_draft = n_drafts.cumsum(0) - n_drafts
    first_row = first_draft + torch.arange(len(n_drafts), device=p.device)
    owner = torch.repeat_interleave(n_drafts, output_size=K)  # (K,): the request of each draft
    i = torch.arange(K, device=p.device)
    p_draft = p[i + owner, drafts]  # row i + owner: each request before has one row more
    q_draft = 1 if q is None else q[i, drafts]
    accepted = u[:K] * q_draft < p_draft

    # a rejected draft leaves its request those before it, an accepted one all: take the least
    n_before = torch.where(accepted, n_drafts[owner], i - first_draft[owner])
    n_accepted = n_drafts.scatter_reduce(0, owner, n_before, "amin")
    weights = p[first_row + n_accepted]  # (R, V)
    rejected = n_accepted < n_drafts
    at = (first_draft + n_accepted).clamp(max=K - 1)  # its rejected draft, if there is one
    if q is None:
        residual = weights.scatter(1, drafts[at][:, None], 0)
    else:
        residual = (weights - q[at]).clamp(min=0)
    weights = torch.where(rejected[:, None], residual, weights)
    return n_accepted, sample(weights, u[K:])

# -----------------------------------------------------------------------------
# the operators

def linear_ref(x, weight, bias=None):
    """x (..., n_in), weight (n_out, n_in), packed or plain, of any dtype -> (..., n_out)"""
    bias = None if bias is None else bias.to(x.dtype)
    return F.linear(x, weight.to_dense().to(x.dtype), bias)

def add_norm_ref(x, y, weight, bias, eps):
    """total = x + y (x, if y is None), and its RMSNorm, or with a bias its LayerNorm. -> both"""
    total = x if y is None else x + y
    weight = weight.to(total.dtype)
    if bias is None:
        return total, F.rms_norm(total, weight.shape, weight, eps)
    return total, F.layer_norm(total, weight.shape, weight, bias.to(total.dtype), eps)

def activate_ref(h, gated):
    """SwiGLU of h (..., 2 I), gate and up side by side, if gated; else tanh-GELU. -> (..., I)"""
    if gated:
        gate, up = h.chunk(2, -1)
        return F.silu(gate) * up
    return F.gelu(h, approximate="tanh")

def rotate_ref(x, cos, sin):
    """Rotate x (..., heads, D), element d together with d + D / 2. cos, sin (..., D / 2)"""
    cos = cos[..., None, :]
    sin = sin[..., None, :]
    a, b = x.float().chunk(2, -1)
    first = a * cos - b * sin
    second = b * cos + a * sin
    return torch.cat([first, second], -1).to(x.dtype)

def heads_ref(qkv, cos, sin, n_head, n_kv_head, norm, eps):
    """qkv (..., (H + 2 Hk) D) -> q (..., H, D), k and v (..., Hk, D). norm (2 D,): the weights of
    q's norm, then of k's; None: no norms. cos None: no rotation"""
    heads = qkv.unflatten(-1, (n_head + 2 * n_kv_head, -1))
    q, k, v = heads.split([n_head, n_kv_head, n_kv_head], -2)
    if norm is not None:
        q_weight, k_weight = norm.to(q.dtype).chunk(2)
        q = F.rms_norm(q, q_weight.shape, q_weight, eps)
        k = F.rms_norm(k, k_weight.shape, k_weight, eps)
    if cos is not None:
        q = rotate_ref(q, cos, sin)
        k = rotate_ref(k, cos, sin)
    return q, k, v

def rotate_write_ref(qkv, cos, sin, kv, slot_mapping, n_head, n_kv_head, norm, eps):
    """The heads of qkv (N, (H + 2 Hk) D): write k and v to their pages, -> q (N, H, D)"""
    q, k, v = heads_ref(qkv, cos, sin, n_head, n_kv_head, norm, eps)
    kv[0, slot_mapping.long()] = k.to(kv.dtype)
    kv[1, slot_mapping.long()] = v.to(kv.dtype)
    return q.contiguous()

def attention_ref(q, kv, batch):
    """Row j of a request attends to the request's first n_past + j + 1 tokens: the cached ones, the
    rows before, itself. That holds for a decode, for drafts and for a chunk. q (N, H, D)"""
    out = torch.zeros_like(q)
    for row, n, n_past, table_start in batch.lists:
        pages = batch.page_tables[table_start:table_start + n_past + n].long()
        k, v = kv[:, pages].float().transpose(1, 2)  # (Hk, context, D) each
        rows = q[row:row + n].float().transpose(0, 1)  # (H, n, D)
        seen = torch.ones(n, len(pages), device=q.device).tril(n_past)
        own = F.scaled_dot_product_attention(rows, k, v, seen.bool(), enable_gqa=True)
        out[row:row + n] = own.transpose(0, 1)
    return out

def lora_ref(y, x, kv, segments):
    """Add x A B to y, two small products for each segment. x (N, n_in), y (N, n_out)"""
    x = x.to(torch_dtype(x))  # float32 where torch is slow in bfloat16
    for row, n, column, columns, rank_a, rank_b, _, table_start in segments.lists:
        if n > 0:  # 0: padding of a CUDA graph
            a = adapter_rows(kv[0], segments.page_tables, table_start, rank_a, x.size(1))
            b = adapter_rows(kv[1], segments.page_tables, table_start, rank_b, columns)
            xa = x[row:row + n] @ a.T.to(x.dtype)
            if segments.gather_xa:  # only where several devices share the model
                xa = segments.gather_xa(xa)[:, :rank_b]
            y[row:row + n, column:column + columns] += xa @ b.to(x.dtype)

def adapter_rows(plane, page_tables, table_start, rank, width):
    """A or B of a segment from its pages: plane (n_page, Hk, D) -> (rank, width)"""
    plane = plane.flatten(1)  # (n_page, W)
    pages = page_tables[table_start:table_start + rank * cdiv(width, plane.size(1))]
    rows = plane.index_select(0, pages).view(rank, -1)
    return rows[:, :width]

# =============================================================================
# appendix: where the operators run; Triton for GPUs, C++ for CPUs
# =============================================================================
# Where a change has to be made. Attention: attention_ref, _attention_kernel, attend, attend_chunk
# in C++, GPT.forward_ref in model.py, CostModel.stats in sarathi.py. The cache's layout: also
# rotate_write and lora in each language, adapter_rows, GPT.new_cache, Adapter.write. Its dtype, say
# float8 without adapters: GPT.new_cache and page_bytes; plain torch serves then.

# ---- Triton, if it is installed; small functions

try:
    import triton
    import triton.language as tl
except ImportError:  # the Triton kernels stay plain functions that are never called
    triton = SimpleNamespace(jit=lambda kernel=None, **_: kernel or (lambda kernel: kernel))
    tl = SimpleNamespace(constexpr=None)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# malloc keeps freed blocks of up to 2 GB. By default it returns large ones to the system, and each
# iteration then waits for the memory of its activations again
if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
    for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        ctypes.CDLL(None).mallopt(parameter, 2**31 - 1)

# the arrays of every Batch, in the order of Batch.write
FIXED = "tokens positions slot_mapping spans logit_rows small_tiles large_tiles".split()

def to_device(x, device):
    """x on the device. The CPU does not wait for the copy."""
    if device.type == "cpu":
        return x
    return x.pin_memory().to(device, non_blocking=True)

def zeros(*shape):
    return np.zeros(shape, np.int32)

def cdiv(n, unit):
    """n / unit, rounded up."""
    return -(-n // unit)

def power_of_two(n):
    """The first one from n on."""
    return 1 << (n - 1).bit_length()

def probabilities(logits, temperature, top_k, top_p):
    """logits (M, V), the others (M,) on the host -> p (M, V) float32. temperature 0: all on the
    argmax; top_k 0: no limit; top_p 1: no limit, else the fewest tokens that have top_p together.
    Equal logits rank in the order of their tokens. Rows with NaN or infinite logits become NaN."""
    V = logits.size(1)
    greedy = temperature < 1e-5  # dividing by 1e-37 would make logits infinite
    top_k = top_k.masked_fill(top_k == 0, V).clamp(max=V).masked_fill(greedy, 1)
    # by rounding, 1 might drop tokens; 2 drops none
    top_p = top_p.masked_fill((top_p == 1) | greedy, 2)
    settings = torch.stack([temperature.masked_fill(greedy, 1), top_k, top_p])
    temperature, k, limit = to_device(settings, logits.device)[..., None]  # (M, 1) each
    scaled = logits.float() / temperature
    unlimited = (top_k == V) & (top_p == 2)
    if unlimited.all():
        return scaled.softmax(-1)
    by_mass = (top_k == V) & (top_p < 2)
    n = int(top_k.masked_fill(top_k == V, 1).max())
    sizes = [n]  # how many tokens are ranked
    if by_mass.any():  # a CPU tries fewer first; with a GPU that would mean to wait for it
        sizes = [V] if logits.is_cuda else [min(V, max(n, 1024)), V]
    for n in sizes:
        top = scaled.topk(n).values
        share = (top - scaled.logsumexp(-1, keepdim=True)).exp()
        sums = share.cumsum(-1)
        mass = sums.gather(1, k.long().clamp(max=n) - 1).masked_fill(k > n, 1)  # of the first k
        kept = (sums - share < limit * mass) & (torch.arange(n, device=k.device) < k)
        if n == sizes[-1] or not kept[by_mass, -1].any():
            break
    n_kept = kept.sum(-1, keepdim=True).clamp(min=1)
    least = top.gather(1, n_kept - 1)
    n_equal = n_kept - (top > least).sum(-1, keepdim=True)  # this many of those equal to the least
    dropped = scaled < least
    dropped |= (scaled == least) & ((scaled == least).float().cumsum(-1) > n_equal)
    dropped &= (k < V) | (limit < 2)
    return scaled.masked_fill(dropped, float("-inf")).softmax(-1)

# ---- the limits of a container

def least_limit(*names, period=1):
    """The least number in files of these names, in the control groups (version 1 or 2) that this
    process is in, over the file's period or else this one. A container is such a group."""
    limits = [math.inf]
    for groups in Path("/proc/self").glob("cgroup"):  # of Linux
        for kind, path in re.findall(":(.*?):(.*)", groups.read_text()):
            group = Path(f"/sys/fs/cgroup/{kind}{path}")
            for folder, name in product([group, *group.parents], names):
                for file in folder.glob(name):
                    numbers = re.findall(r"\A(\d+) ?(\d*)", file.read_text())  # none: max, or -1
                    limits += [int(n) / int(own or period) for n, own in numbers]
    return min(limits)

# CPUs, as CPU time per period. More threads use it up early: then all of them stop until the next
quota = least_limit("cpu.max", "cpu.cfs_quota_us", period=100000)
if quota < torch.get_num_threads():
    torch.set_num_threads(max(1, int(quota)))

# ---- where an operator runs

def has_triton():
    return hasattr(triton, "cdiv")

@lru_cache
def runs_triton(device):
    """Whether a GPU runs the Triton kernels. Before compute capability 8.0 (a T4) it has too little
    shared memory for them, and they would use no tensor cores."""
    return has_triton() and torch.cuda.get_device_capability(device) >= (8, 0)

def backend(x, kv=None):
    """Where an operator on x, and on a cache kv, runs: "triton" on a GPU that runs it, and in its
    interpreter; "cpp" on a CPU in float32 and bfloat16 if they were compiled; else "torch", also if
    the cache has another dtype."""
    if kv is not None and kv.dtype != x.dtype:
        return "torch"
    on_triton = runs_triton(x.device) if x.is_cuda else INTERPRETED and has_triton()
    if on_triton:
        return "triton"
    head_dim = 64 if kv is None else kv.size(3)
    if x.is_cpu and library(x.dtype, head_dim) is not None:
        return "cpp"
    return "torch"

side_stream = lru_cache(torch.cuda.Stream)

def side_by_side(first, second, device):
    """Run two functions. On a GPU, what they launch runs at the same time, and the first allocates
    no memory. Returns what the second returns."""
    if device.type != "cuda":
        first()
        return second()
    stream = torch.cuda.current_stream(device)
    side = side_stream(device)
    side.wait_stream(stream)
    try:
        with torch.cuda.stream(side):
            first()
        return second()
    finally:
        stream.wait_stream(side)

CPU_SETTINGS = ("SARATHI_CPU OMP_NUM_THREADS OMP_THREAD_LIMIT OMP_DYNAMIC OMP_PROC_BIND OMP_PLACES "
                "GOMP_CPU_AFFINITY").split()

def describe(x):
    """What runs the operators on tensors like x: "triton, NVIDIA H100", "C++ (AVX2), 2 threads". It
    names the settings of threads that are set, because they may take half of a CPU's speed."""
    chosen = backend(x)
    if x.is_cuda:
        return f"{chosen}, {torch.cuda.get_device_name(x.device)}"
    n_thread = torch.get_num_threads()
    if chosen == "cpp":
        operators = library(x.dtype, 64)
        chosen = f"C++ ({LAYOUTS[operators.layout()].upper()})"
        n_thread = operators.threads()
    threads = {0: "1 thread, no OpenMP", 1: "1 thread"}.get(n_thread, f"{n_thread} threads")
    settings = [f"{key}={os.environ[key]}" for key in CPU_SETTINGS if key in os.environ]
    return ", ".join([chosen, threads, *settings])

# ---- the operators: each calls Triton, C++ or its definition

def linear(x, weight, bias=None):
    """x (..., n_in), weight (n_out, n_in) as returned by pack -> (..., n_out)"""
    if isinstance(weight, Packed):
        n_out, n_in = weight.shape
        y = x.new_empty(*x.shape[:-1], n_out)
        cpp("linear", x, weight.panels, bias, y, x.numel() // n_in, n_out, n_in)
        return y
    return F.linear(x, weight, bias)

def add_norm(x, y, weight, bias, eps):
    """x, y (N, C), weight, bias (C,); y and bias may be None -> x + y and its norm, each (N, C)"""
    chosen = backend(x)
    if chosen == "torch":
        return add_norm_ref(x, y, weight, bias, eps)
    N, C = x.shape
    total = x if y is None else torch.empty_like(x)
    out = torch.empty_like(x)
    if chosen == "cpp":
        cpp("add_norm", x, y, weight, bias, total, out, N, C, float(eps))
    elif N > 0:
        _add_norm_kernel[(N,)](
            x, y, weight, bias, total, out, eps,
            C, power_of_two(C), num_warps=8)
    return total, out

def activate(h, gated):
    """h (N, 2 I) if gated, else (N, I) -> (N, I)"""
    chosen = backend(h)
    if chosen == "torch":
        return activate_ref(h, gated)
    N, I = h.shape
    I = I // 2 if gated else I
    out = h.new_empty(N, I)
    if chosen == "cpp":
        cpp("activate", h, out, N, I, gated)
    else:
        _activate_kernel[(N, cdiv(I, 1024))](h, out, I, gated, 1024)
    return out

def rotate_write(qkv, cos, sin, kv, slot_mapping, n_head, n_kv_head, norm=None, eps=0.0):
    """qkv (N, (H + 2 Hk) D), cos and sin (N, D / 2) float32 or None, kv (2, n_page, Hk, D),
    slot_mapping (N,), norm (2 D,) or None -> q (N, H, D), as rotate_write_ref"""
    chosen = backend(qkv, kv)
    if chosen == "torch":
        return rotate_write_ref(qkv, cos, sin, kv, slot_mapping, n_head, n_kv_head, norm, eps)
    N = len(qkv)
    D = kv.size(3)
    q = qkv.new_empty(N, n_head, D)
    if chosen == "cpp":
        cpp("rotate_write", qkv, cos, sin, norm, q, *kv, slot_mapping, N, n_head, n_kv_head,
            float(eps), head_dim=D)
        return q
    grid = N, cdiv(n_head + 2 * n_kv_head, 8)
    _rotate_write_kernel[grid](
        qkv, cos, sin, norm, q, kv, slot_mapping, kv.stride(0), eps,
        n_head, n_kv_head, D, BLOCK_H=8, BLOCK_D=power_of_two(D))
    return q

def attention(q, kv, batch):
    """q (N, H, D), kv (2, n_page, Hk, D) -> (N, H, D)"""
    chosen = backend(q, kv)
    if chosen == "torch":
        return attention_ref(q, kv, batch)
    out = torch.empty_like(q)
    if chosen == "triton":
        attention_triton(q, kv, batch, out)
        return out
    if batch.n_decode:
        sizes = batch.n_decode, q.size(1), kv.size(2)
        cpp("attend", q, *kv, batch.spans, batch.page_tables, out, *sizes, head_dim=q.size(2))
    for row, n, n_past, table_start in batch.spans[batch.n_decode:].tolist():
        rows = slice(row, row + n)
        sizes = n, n_past, q.size(1), kv.size(2)
        cpp("attend_chunk", q[rows], *kv, batch.page_tables[table_start:], out[rows], *sizes,
            head_dim=q.size(2))
    return out

def lora(product, x, kv, segments):
    """product() + x A B. product() computes x W (N, n_out), on a GPU at the same time as x A. Where
    devices share a model on CPUs, the definition serves."""
    chosen = backend(x, kv)
    if chosen == "triton" and segments.way == "batched":
        return lora_triton(product, x, kv, segments)
    y = product()
    if segments.way == "bmm":
        lora_bmm(y, x, kv, segments)
    elif chosen == "torch" or segments.gather_xa:
        lora_ref(y, x, kv, segments)
    else:
        sizes = segments.n_decode, x.size(1), y.size(1), kv[0, 0].numel()
        cpp("lora", x, y, *kv, segments.numbers, segments.page_tables, *sizes)
        if segments.n_decode < len(segments.numbers):
            lora_ref(y, x, kv, replace(segments, numbers=segments.numbers[segments.n_decode:]))
    return y

def lora_bmm(y, x, kv, segments):
    """The baseline of [S-LoRA §7.3]: copy A, B and x to padded tensors, then multiply batches"""
    parts = []
    for row, n, column, columns, rank, _, _, table_start in segments.lists:
        a = adapter_rows(kv[0], segments.page_tables, table_start, rank, x.size(1))
        b = adapter_rows(kv[1], segments.page_tables, table_start, rank, columns)
        b = F.pad(b, (column, y.size(1) - column - columns))
        parts.append((x[row:row + n], a, b))
    rows, a, b = (pad_sequence(part, batch_first=True).to(torch_dtype(x)) for part in zip(*parts))
    product = rows @ a.mT @ b  # (S, rows, n_out)
    for (row, n, *_), own in zip(segments.lists, product):
        y[row:row + n] += own[:n]

# ---- weights in panels, for CPUs

def torch_dtype(x):
    """The dtype in which torch multiplies fast: some CPUs have no instructions for bfloat16"""
    slow = x.is_cpu and x.dtype == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported()
    return torch.float32 if slow else x.dtype

class Packed:
    """A weight (n_out, n_in) in the order in which the C++ product reads it. A panel holds some
    columns of the product. Their numbers are side by side, those of bfloat16 in pairs:

        columns           0       1       2     ...
        n_in 0, 1     | a0 a1 | b0 b1 | c0 c1 | ...
        n_in 2, 3     | a2 a3 | b2 b3 | c2 c3 | ...
    """

    def __init__(self, weight, n_column):
        self.shape = weight.shape
        self.dtype = weight.dtype
        rows = F.pad(weight, (0, 0, 0, -len(weight) % n_column))
        units = rows.view(torch.int32).unflatten(0, (-1, n_column))  # of 4 bytes
        self.panels = units.mT.contiguous()  # (panels, units of a row, columns)

    def numel(self):
        return self.shape.numel()

    def to_dense(self):
        rows = self.panels.mT.flatten(0, 1).contiguous().view(self.dtype)
        return rows[:self.shape[0]]

def pack(weight):
    """weight (n_out, n_in) in the layout of this CPU's fastest product; as it is for torch's"""
    if weight.is_cpu and weight.dtype in (torch.float32, torch.bfloat16):
        operators = library(weight.dtype, 64)
        if operators and weight.size(1) * weight.itemsize % 4 == 0:
            return Packed(weight, operators.panel_columns())
    return weight

# ---- Triton: add_norm, activate, rotate_write

@triton.jit
def _add_norm_kernel(x, y, weight, bias, total, out, eps,
                     C: tl.constexpr, BLOCK_C: tl.constexpr):
    """One program: one row"""
    c = tl.arange(0, BLOCK_C)
    mask = c < C
    at = tl.program_id(0).to(tl.int64) * C + c
    row = tl.load(x + at, mask, 0.0)
    if y is not None:
        row += tl.load(y + at, mask, 0.0)
        tl.store(total + at, row, mask)
    row = row.to(tl.float32)
    if bias is not None:
        row = tl.where(mask, row - tl.sum(row, 0) / C, 0.0)
    row *= 1 / tl.sqrt(tl.sum(row * row, 0) / C + eps)
    row *= tl.load(weight + c, mask, 0.0)
    if bias is not None:
        row += tl.load(bias + c, mask, 0.0)
    tl.store(out + at, row, mask)

@triton.jit
def _activate_kernel(h, out, I, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """One program: BLOCK numbers of a row. tanh-GELU: (1 + tanh(z / 2)) / 2 = sigmoid(z)"""
    row = tl.program_id(0).to(tl.int64) * I
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(h + (2 * row if GATED else row) + i, i < I, 0.0).to(tl.float32)
    if GATED:
        up = tl.load(h + 2 * row + I + i, i < I, 0.0)
        y = gate * tl.sigmoid(gate) * up
    else:
        y = gate * tl.sigmoid(1.59576912 * (gate + 0.044715 * gate * gate * gate))
    tl.store(out + row + i, y, i < I)

@triton.jit
def _rotate_write_kernel(qkv, cos, sin, norm, q, kv, slot_mapping, plane_step, eps,
                         H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr,
                         BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program: BLOCK_H of the heads of one token.

        qkv   | q 0 | q 1 | ... | k 0 | ... | v 0 | ... |     k and v: to the planes of kv
             norm, rotate      norm, rotate   copy
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None]
    mask = (head < H + 2 * HK) & (d < D)
    vectors = qkv + (token * (H + 2 * HK) + head) * D
    x = tl.load(vectors + d, mask, 0.0)
    # element d rotates together with d + D / 2
    half = D // 2
    partner_d = (d + half) % D
    partner = tl.load(vectors + partner_d, mask, 0.0)
    if norm is not None:
        wide = x.to(tl.float32)
        scale = 1 / tl.sqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
        weights = norm + (head >= H).to(tl.int32) * D
        is_qk = head < H + HK
        normed = wide * scale * tl.load(weights + d, mask & is_qk, 0.0)
        x = tl.where(is_qk, normed.to(x.dtype), x)
        partner = partner * scale * tl.load(weights + partner_d, mask & is_qk, 0.0)
    if cos is not None:
        angle = token * half + d % half
        c = tl.load(cos + angle, d < D)
        s = tl.load(sin + angle, d < D)
        s = tl.where(d < half, -s, s)
        rotated = x * c + partner * s
        x = tl.where(head < H + HK, rotated.to(x.dtype), x)
    tl.store(q + (token * H + head) * D + d, x, mask & (head < H))
    page = tl.load(slot_mapping + token).to(tl.int64)
    kv_head = (head - H) % HK
    cell = (page * HK + kv_head) * D + d
    cell += (head - H) // HK * plane_step
    tl.store(kv + cell, x, mask & (head >= H))

# ---- Triton: attention

@triton.jit
def load4(numbers, UNIT: tl.constexpr = 1):
    """Four numbers. The last two are multiples of UNIT, so 16 bytes may be moved together."""
    c = tl.multiple_of(tl.load(numbers + 2), UNIT)
    d = tl.multiple_of(tl.load(numbers + 3), UNIT)
    return tl.load(numbers), tl.load(numbers + 1), c, d

MOST_SPLITS = 32  # of a context
LARGE_ROWS = 64  # in a batch of more than TILE rows, a request with this many has large tiles

def tile_sizes(H, kv):
    """How many queries of a kv head a small tile has, and a large one"""
    most = 64 if kv.element_size() < 4 else 16  # more would not fit the registers
    return min(most, max(16, power_of_two(H // kv.size(-2)))), most

@lru_cache
def cores_of(device):
    """Cores of a GPU, and bytes of shared memory of each; an H200's, if there is no GPU"""
    if device.type != "cuda":
        return 132, 233472
    gpu = torch.cuda.get_device_properties(device)
    return gpu.multi_processor_count, gpu.shared_memory_per_multiprocessor

def most_splits(n_tile, is_large, kv):
    """Into how many splits a context is cut at most, so that n_tile tiles fill the GPU. A core runs
    5 programs of small tiles together. Fewer tiles are split to 4 programs a core, more to 16,
    because a last round of few programs takes as long as a full one."""
    cores, _ = cores_of(kv.device)
    n_program = max(1, n_tile * kv.size(-2))
    wanted = 2 if is_large else 4 if n_program <= 5 * cores else 16  # programs a core
    return max(1, min(MOST_SPLITS, wanted * cores // n_program))

def attention_work(spans, N, H, kv):
    """The tiles of spans, lists of four, in a batch of N rows, as fields of a Batch. Contexts are
    split if there are too few tiles to fill a GPU [flash-decoding]."""
    G = H // kv.size(-2)
    least = LARGE_ROWS if N > TILE else N + 1  # rows of a request with large tiles; N + 1: none
    lists = []
    n_part = 0
    for is_large, size in enumerate(tile_sizes(H, kv)):
        own = [span for span in spans if (span[1] >= least) == is_large]
        n_tile = sum([(n * G + size - 1) // size for _, n, _, _ in own])
        most = most_splits(n_tile, is_large, kv)
        tiles = []
        for row, n, n_past, table_start in own:
            # a split writes n rows of output: with at least 4 n tokens it reads more than that
            n_split = min(most, (n_past + n) // max(128, 4 * n)) or 1
            for first in range(0, n * G, size):
                for split in range(n_split):
                    tiles += row, n, n_past, table_start, first, split, n_split, n_part
            if n_split > 1:
                n_part += n * n_split
        lists.append(np.array(tiles, np.int32).reshape(-1, 8))
    return dict(small_tiles=lists[0], large_tiles=lists[1], n_part=n_part)

def attention_room(N, R, H, kv):
    """The most tiles that R requests of N rows in all may have, as fields of a batch of padding"""
    G = H // kv.size(-2)
    lists = []
    n_part = 0
    for is_large, size in enumerate(tile_sizes(H, kv)):
        most = (N // LARGE_ROWS if is_large else R) + N * G // size
        if is_large and N <= TILE:
            most = 0
        room = max([n * most_splits(n, is_large, kv) for n in range(most + 1)])
        lists.append(zeros(room, 8))
        n_part += min(MOST_SPLITS * N, room * size // G)
    return dict(small_tiles=lists[0], large_tiles=lists[1], n_part=n_part)

@triton.jit
def _attention_kernel(q, kv, out, parts, lse, tiles, page_tables, plane_step, scale,
                      H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr,
                      BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program: a tile of query rows of one kv head against one split of the context. A row is
    one head of a token: the G = H / Hk heads of a kv head share its loads. scale has log2(e) in it.
                         |----- split 0 -----|----- split 1 -----|    context: cached tokens, then
        token 0, G rows    x x x x x x x x x x x x x x x x x          own ones; x: visible
        token 1, G rows    x x x x x x x x x x x x x x x x x x
    """
    G: tl.constexpr = H // HK
    row, n_row, n_past, table_start = load4(tiles + 8 * tl.program_id(0))
    first_query, split, n_split, first_part = load4(tiles + 8 * tl.program_id(0) + 4)
    kv_head = tl.program_id(1)
    if n_row == 0:  # padding of a CUDA graph
        return
    m = first_query + tl.arange(0, BLOCK_M)  # queries of a kv head: head m % G of token m // G
    d = tl.arange(0, BLOCK_D)[None]
    token = m // G
    head = kv_head * G + m % G
    at = (row + token).to(tl.int64) * H + head
    mask = (token < n_row)[:, None] & (d < D)
    queries = tl.load(q + at[:, None] * D + d, mask, 0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.full([BLOCK_M], 1e-30, tl.float32)  # not 0: a split may be empty
    # a row that sees no token of its split keeps this: the split then gets weight 0
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    end = n_past + tl.minimum(n_row, (first_query + BLOCK_M - 1) // G + 1)  # seen by the last row
    size = tl.cdiv(end, n_split * BLOCK_N) * BLOCK_N  # tokens of a split, in whole blocks
    begin = split * size
    for start in range(begin, tl.minimum(begin + size, end), BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        page = tl.load(page_tables + table_start + j, j < end, 0).to(tl.int64)
        cells = kv + (page * HK + kv_head)[:, None] * D + d
        kv_mask = (j < end)[:, None] & (d < D)
        k = tl.load(cells, kv_mask, 0.0)
        v = tl.load(cells + plane_step, kv_mask, 0.0)
        scores = tl.dot(queries, k.T, input_precision="ieee") * scale
        scores = tl.where(j[None] - n_past <= token[:, None], scores, -1e30)
        new_top = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        top = new_top
    if n_split == 1:
        tl.store(out + at[:, None] * D + d, acc / total[:, None], mask)
    else:
        at = (first_part + token * n_split + split).to(tl.int64) * H + head
        tl.store(parts + at[:, None] * D + d, acc / total[:, None], mask)
        tl.store(lse + at, top + tl.log2(total), token < n_row)

@triton.jit(do_not_specialize=["n_small"])
def _combine_kernel(parts, lse, out, small_tiles, large_tiles, n_small, SMALL_SIZE: tl.constexpr,
                    LARGE_SIZE: tl.constexpr, H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr,
                    MOST_SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program: one head, and every n_split-th token of a tile with split contexts. A token's
    output is the mean of its parts with weights 2^lse."""
    G: tl.constexpr = H // HK
    tile = tl.program_id(0)
    is_small = tile < n_small
    size = tl.where(is_small, SMALL_SIZE, LARGE_SIZE)
    if is_small:
        tiles = small_tiles + 8 * tile
    else:
        tiles = large_tiles + 8 * (tile - n_small)
    row, n_row, _, _ = load4(tiles)
    first_query, split, n_split, first_part = load4(tiles + 4)
    if n_split < 2:
        return
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)[None]
    every = tl.arange(0, MOST_SPLITS)
    # a tile may begin within a token, so each head has its own first token
    first_token = tl.cdiv(first_query - head % G, G)
    end = tl.minimum(tl.cdiv(first_query + size - head % G, G), n_row)
    for token in range(first_token + split, end, n_split):
        at = (first_part + token * n_split).to(tl.int64) * H + head
        top = tl.max(tl.load(lse + at + every * H, every < n_split, float("-inf")), 0)
        acc = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
        total = tl.zeros([BLOCK_S], tl.float32)
        for start in range(0, n_split, BLOCK_S):
            part = start + tl.arange(0, BLOCK_S)
            cells = at + part * H
            weight = tl.exp2(tl.load(lse + cells, part < n_split, float("-inf")) - top)
            mask = (part < n_split)[:, None] & (d < D)
            acc += weight[:, None] * tl.load(parts + cells[:, None] * D + d, mask, 0.0)
            total += weight
        mean = tl.sum(acc, 0) / tl.sum(total, 0)
        cell = ((row + token).to(tl.int64) * H + head) * D + tl.arange(0, BLOCK_D)
        tl.store(out + cell, mean, tl.arange(0, BLOCK_D) < D)

def attention_triton(q, kv, batch, out):
    """Write the attention of a batch with attention_work to out."""
    _, H, D = q.shape
    Hk = kv.size(2)
    itemsize = q.element_size()
    block_d = max(16, power_of_two(D))  # the least that tl.dot takes
    scale = D ** -0.5 * 1.4426950408889634  # exp(x) = exp2(x log2(e))
    parts = q.new_empty(batch.n_part, H, D, dtype=torch.float32)
    lse = q.new_empty(batch.n_part, H, dtype=torch.float32)  # log2 of the sum of exp(scores)
    block_n = max(16, min(64, 8192 // (block_d * itemsize)))  # 8 KB of keys
    small_size, large_size = tile_sizes(H, kv)

    def attend(tiles, block_m):
        is_wide = block_m >= 64
        # bytes of keys that are loaded ahead: a core with 100 KB runs two wide programs
        size = min(32768, cores_of(q.device)[1] // 4) if is_wide else 40960
        if len(tiles):
            _attention_kernel[(len(tiles), Hk)](
                q, kv, out, parts, lse, tiles, batch.page_tables, kv.stride(0), scale,
                H, Hk, D, block_m, block_n, block_d,
                num_warps=max(4 if is_wide or itemsize > 2 else 2, block_m * block_d // 2048),
                num_stages=1 + size // (block_n * block_d * itemsize))
    if len(batch.large_tiles) == 0:
        attend(batch.small_tiles, small_size)
    else:
        side_by_side(lambda: attend(batch.large_tiles, large_size),
                     lambda: attend(batch.small_tiles, small_size), q.device)
    if batch.n_part:
        _combine_kernel[(len(batch.small_tiles) + len(batch.large_tiles), H)](
            parts, lse, out, batch.small_tiles, batch.large_tiles, len(batch.small_tiles),
            small_size, large_size, H, Hk, D, MOST_SPLITS, 4, block_d,
            num_warps=max(1, block_d // 64))

# ---- Triton: lora

@triton.jit(do_not_specialize=["width", "n_module", "n_part", "part_step"])
def _shrink_kernel(x, a, xa, segments, page_tables, width, n_module, n_part, part_step,
                   C: tl.constexpr, W: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr):
    """One program: a part of the sums xa = x A, for BLOCK_M rows of a segment and BLOCK_R of A.

        x, a row    |  0  |  1  |  2  |  3  |  4  |     blocks of BLOCK_K numbers, which
        A, row 0    |  page 81  |  page 7   | 40  |     begin again with each page
        A, row 1    |  page 5   |  page 82  | 41  |
        n_part = 2  |---- part 0 -----|- part 1 --|     programs that run at the same time
    """
    segment = segments + 8 * tl.program_id(1)
    row, n_row, _, _ = load4(segment)
    rank, _, module, table_start = load4(segment + 4)
    tile = tl.program_id(0) * BLOCK_M
    first_rank = tl.program_id(2) // n_part * BLOCK_R
    own_part = tl.program_id(2) % n_part
    if (tile >= n_row) | (first_rank >= rank):
        return

    m = tile + tl.arange(0, BLOCK_M)[:, None]
    r = first_rank + tl.arange(0, BLOCK_R)
    rows = (row + m).to(tl.int64)
    r_mask = r < rank
    n_page = tl.cdiv(C, W)  # pages of a row of A
    n_block = tl.cdiv(W, BLOCK_K)  # blocks of a page
    size = tl.cdiv(n_page * n_block, n_part)  # blocks of a part
    begin = own_part * size
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for block in range(begin, tl.minimum(begin + size, n_page * n_block)):
        i = block // n_block
        k = block % n_block * BLOCK_K + tl.arange(0, BLOCK_K)[None]
        k_mask = (k < W) & (i * W + k < C)
        page = tl.load(page_tables + table_start + r * n_page + i, r_mask, 0).to(tl.int64)
        w = tl.load(a + page[:, None] * W + k, r_mask[:, None] & k_mask, 0.0)
        v = tl.load(x + rows * C + i * W + k, (m < n_row) & k_mask, 0.0)
        acc = tl.dot(v, w.T, acc, input_precision="ieee")
    at = own_part.to(tl.int64) * part_step + rows * width + width // n_module * module + r[None]
    tl.store(xa + at, acc, (m < n_row) & r_mask[None])

@triton.jit(do_not_specialize=["width", "n_module", "n_part", "part_step"])
def _expand_kernel(y, b, xa, segments, page_tables, width, n_module, n_part, part_step, C,
                   W: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
                   UNIT: tl.constexpr, MOST_PARTS: tl.constexpr):
    """One program: y += xa B for BLOCK_M rows of a segment and BLOCK_N columns within one page of
    each row of B. The parts of xa are added in their order."""
    segment = segments + 8 * tl.program_id(1)
    row, n_row, column, columns = load4(segment, UNIT)
    _, rank, module, table_start = load4(segment + 4)
    tile = tl.program_id(0) * BLOCK_M
    n_block = tl.cdiv(W, BLOCK_N)  # blocks of a page
    i = tl.program_id(2) // n_block  # page of the row
    if (tile >= n_row) | (i * W >= columns):
        return

    m = tile + tl.arange(0, BLOCK_M)[:, None]
    k = tl.program_id(2) % n_block * BLOCK_N + tl.arange(0, BLOCK_N)[None]
    rows = (row + m).to(tl.int64)
    k_mask = (k < W) & (i * W + k < columns)
    n_page = tl.cdiv(columns, W)  # pages of a row of B
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, rank, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        r_mask = r < rank
        page = tl.load(page_tables + table_start + r * n_page + i, r_mask, 0).to(tl.int64)
        w = tl.load(b + page[:, None] * W + k, r_mask[:, None] & k_mask, 0.0)
        at = xa + rows * width + width // n_module * module + r[None]
        v = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for p in tl.static_range(MOST_PARTS):
            r_end = tl.where(p < n_part, rank, 0)
            v += tl.load(at + p * part_step, (m < n_row) & (r[None] < r_end), 0.0)
        acc = tl.dot(v.to(w.dtype), w, acc, input_precision="ieee")
    at = y + rows * C + column + i * W + k
    mask = (m < n_row) & k_mask
    acc += tl.load(at, mask, 0.0)
    tl.store(at, acc, mask)

LORA_ROWS = 16, 64  # of a program: for decodes [MBGMV], for chunks [MBGMM]
LORA_PARTS = 8, 4  # into which the sums of x A are divided: else few programs would run

def lora_triton(product, x, kv, segments):
    """One grid of programs for all segments, each as large as the largest one needs."""
    N, n_in = x.shape
    W = kv[0, 0].numel()
    is_chunk = segments.max_rows > LORA_ROWS[0]
    block_m = LORA_ROWS[is_chunk]
    block_r = 16
    if is_chunk:
        block_r = min(256 // x.element_size(), power_of_two(segments.max_rank))
    block = max(16, min(256 // x.element_size(), power_of_two(W)))  # numbers of a page
    unit = 16 if segments.wide and W % 16 == 0 else 1  # of the columns
    grid = cdiv(segments.max_rows, block_m), len(segments.numbers)
    warps = max(4, block_m // 8)
    width = segments.n_module * segments.max_rank
    # thousands of rows fill the GPU without, and parts take memory
    n_part = LORA_PARTS[is_chunk] if N * width <= 2**18 else 1
    xa = x.new_empty(n_part, N, width, dtype=torch.float32)

    def shrink():
        _shrink_kernel[(*grid, cdiv(segments.max_rank, block_r) * n_part)](
            x, kv[0], xa, segments.numbers, segments.page_tables, width, segments.n_module, n_part,
            N * width,
            n_in, W, block_m, block_r, block, num_warps=warps, num_stages=5)
    y = side_by_side(shrink, product, x.device)
    if segments.gather_xa:
        xa = segments.gather_xa(xa.sum(0))
        width = xa.size(1)
        n_part = 1
    if not is_chunk:  # a wider block: fewer programs
        block = max(16, min(512 // x.element_size(), power_of_two(W)))
    n_block = cdiv(segments.max_columns or y.size(1), W) * cdiv(W, block)
    _expand_kernel[(*grid, n_block)](
        y, kv[1], xa, segments.numbers, segments.page_tables, width, segments.n_module, n_part,
        N * width,
        y.size(1), W, block_m, 16, block, unit, LORA_PARTS[is_chunk], num_warps=warps, num_stages=3)
    return y

# ---- C++ for CPUs: compiled when it is first needed, called by ctypes

def cpp(name, x, *arguments, head_dim=64):
    """Run a C++ operator in the dtype of x. None becomes a null pointer."""
    values = []
    for value in (x, *arguments):
        if isinstance(value, Tensor):
            assert value.is_contiguous()
            value = ctypes.c_void_p(value.data_ptr())
        elif isinstance(value, float):
            value = ctypes.c_float(value)
        values.append(value)
    operator = getattr(library(x.dtype, head_dim), name)
    operator(*values)

# How weights lie for the product of a CPU: as this one multiplies fastest (see LAYOUT), or as
# SARATHI_CPU says. Every CPU runs every layout, by other vectors. "torch": no C++.
LAYOUTS = "neon avx2 avx512 avx512bf16 amx torch".split()

def forced_layout():
    """SARATHI_CPU, or None if it is not set. ValueError if there is no such layout."""
    name = os.environ.get("SARATHI_CPU") or None
    if name not in (None, *LAYOUTS):
        raise ValueError(f"SARATHI_CPU = {name!r}: must be one of {', '.join(LAYOUTS)}")
    return name

@lru_cache
def library(dtype, head_dim):
    """The C++ operators for one dtype and one head_dim, which is 64 unless it matters: in attention
    and rotate_write. None, with a line, without a compiler, and for other dtypes."""
    names = {torch.float32: "float", torch.bfloat16: "bf16"}
    layout = forced_layout()
    if dtype not in names or layout == "torch":
        return None
    definitions = [f"-DT={names[dtype]}", f"-DD={head_dim}"]
    if layout:
        definitions.append(f"-DLAYOUT={LAYOUTS.index(layout)}")
    if layout == "avx2" and IS_X86:
        definitions.append("-mno-avx512f")
    if head_dim != 64 and library(dtype, 64) is None:
        return None  # a compiler that failed is not asked again
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            return ctypes.CDLL(str(build(private_folder() or Path(folder), *definitions)))
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
        print("C++ operators not compiled, plain torch is slower:",
              (reason or str(error)).splitlines()[0], file=sys.stderr)
        return None

def build(folder, *definitions, n_missing=0):
    """Compile SOURCE, once for each kind of processor. -> path of the library"""
    flags = f"{FLAGS} {' '.join(MAY_LACK[n_missing:])}".split()
    command = [*(os.environ.get("CXX") or "g++").split(), *flags, *definitions, "-x", "c++", "-"]
    run = partial(subprocess.run, capture_output=True, check=True, timeout=300)
    try:
        target = run([*command, "-dM", "-E"], input=HEADER.encode()).stdout  # of this processor
    except subprocess.CalledProcessError:
        if n_missing == len(MAY_LACK):
            raise
        return build(folder, *definitions, n_missing=n_missing + 1)
    key = hashlib.sha256(target + f"{command}{SOURCE}".encode()).hexdigest()[:16]
    path = folder / f"operators-{key}.so"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}")
        run([*command, "-o", part], input=(HEADER + SOURCE).encode())
        part.replace(path)  # atomic, because other processes may build it too
    return path

# CACHE is a folder for compiled operators, and for the models that `python model.py` trains
try:
    HOME = Path.home()
except RuntimeError:  # neither HOME nor an entry in passwd
    HOME = Path(tempfile.gettempdir())
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or HOME / ".cache") / "sarathi"

@lru_cache
def private_folder():
    """CACHE. None, with a line, if it cannot be written, or if others could put a library there."""
    try:
        CACHE.mkdir(0o755, parents=True, exist_ok=True)
        status = CACHE.stat()
        is_private = status.st_uid == os.getuid() and not status.st_mode & 0o022
        if is_private and os.access(CACHE, os.W_OK):
            return CACHE
    except OSError:
        pass
    print(f"compiled operators are not kept: only you must be able to write to {CACHE}",
          file=sys.stderr)

# Not -ffast-math: it changes how every library of the process computes with denormal numbers. Not
# unroll-and-jam: GCC merges two passes of an outer loop, then uses no vector instructions in them.
# GCC uses vectors of 512 bits only if it is told to.
IS_X86 = platform.machine() in ("x86_64", "AMD64")
NATIVE = "-march=native -mprefer-vector-width=512" if IS_X86 else "-mcpu=native"
FLAGS = ("-O3 -std=gnu++17 -shared -fPIC -fno-math-errno -ffinite-math-only -fno-signed-zeros "
         f"-fno-trapping-math -fassociative-math {NATIVE}")
MAY_LACK = ["-fno-loop-unroll-and-jam", "-fopenmp"]  # flags that clang, or Apple's, does not know

HEADER = r"""
#ifdef _OPENMP
#include <omp.h>
extern "C" int threads() { return omp_get_max_threads(); }
#else
#define omp_get_max_threads() 1
extern "C" int threads() { return 0; }
#endif
"""

SOURCE = r"""
// Plain loops, which GCC turns into vector instructions. T is float or bf16, D is head_dim
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <vector>
#ifdef __x86_64__
#include <immintrin.h>
#endif
#ifdef __AMXBF16__  // the name in clang 14
#define __AMX_BF16__
#endif

#ifdef _OPENMP
// GOMP_SPINCOUNT is not set: torch was loaded before kernels.py could set it. With more threads
// than CPUs, GCC's OpenMP lets none of them spin, so some are started that sleep for ever
const struct Sleepers {
    Sleepers() {
        if (getenv("GOMP_SPINCOUNT")) return;
        setenv("GOMP_SPINCOUNT", "3000", 0);  // the next library starts none
        std::thread([] {
            #pragma omp parallel num_threads(omp_get_num_procs() + 1)
            for (;;) pause();
        }).detach();
    }
} sleepers;
#endif

const float LOG2E = 1.44269504f;
const float SCALE = 1 / std::sqrt(float(D));  // of scores

// The bytes at x as a V
template <class V> static inline V load(const void* x) {
    V bytes;
    memcpy(&bytes, x, sizeof bytes);
    return bytes;
}

struct bf16 {  // the upper half of a float
    uint16_t half;
    operator float() const {
        const uint32_t bits = (uint32_t)half << 16;
        return load<float>(&bits);
    }
    void operator=(float x) {  // rounds to the nearest, ties to even
        const uint32_t bits = load<uint32_t>(&x);
        half = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
};

// n / unit, rounded up
static inline int64_t cdiv(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }

// 2^x = 2^n 2^f with a whole n and |f| <= 1/2, for x < 127; relative error 3e-6. Below -100 it is
// 2^-100, which can be divided by a sum without becoming a denormal number: these are slow.
static inline float power_of_2(float x) {
    x = std::max(x, -100.0f);
    const int32_t n = (int32_t)(x + 126.5f) - 126;
    const float f = x - n;
    float p = ((9.5701014e-3f * f + 5.591786e-2f) * f + 0.24024745f) * f;
    p = (p + 0.69312181f) * f + 0.99999926f;
    const int32_t bits = load<int32_t>(&p) + n * (1 << 23);
    return load<float>(&bits);
}

static inline float sigmoid(float x) {
    return 1 / (1 + power_of_2(-LOG2E * std::max(x, -80.0f)));
}

// Softmax of SCALE p[i] for the first `seen` of n numbers; the others become 0. It computes whole
// vectors: p and the buffer e have as many elements as `seen` rounded up to a multiple of 32
template <class P> static inline void softmax(P* p, float* e, int seen, int n) {
    const int end = cdiv(seen, 32) * 32;
    float top = -1e30f, sum = 0;
    for (int i = seen; i < end; i++) p[i] = -1e30f;
    for (int i = 0; i < end; i++) top = std::max(top, (float)p[i]);
    for (int i = 0; i < end; i++) {
        e[i] = power_of_2(LOG2E * SCALE * (p[i] - top));
        sum += e[i];
    }
    const float inverse = 1 / sum;
    for (int i = 0; i < end; i++) p[i] = e[i] * inverse;
    memset(p + seen, 0, (n - seen) * sizeof(P));
}

template <class Y> static inline float dot(const float* x, const Y* y, int n) {
    float sum = 0;
    for (int i = 0; i < n; i++) sum += x[i] * y[i];
    return sum;
}

static inline void prefetch(const T* x, int n) {
    for (int i = 0; i < n; i += 64 / sizeof(T)) __builtin_prefetch(x + i, 0, 2);
}

// sum (n) += w[0] row 0 + ... of n_row <= 4 rows; row i is page pages[i * step] of kv
static inline void add_rows(float* __restrict sum, const float* w, const T* kv,
                            const int32_t* pages, int step, int n_row, int64_t W, int n) {
    const T* row[4];
    float weight[4];
    for (int i = 0; i < 4; i++) {
        row[i] = kv + pages[std::min(i, n_row - 1) * step] * W;
        weight[i] = i < n_row ? w[i] : 0;
    }
    for (int k = 0; k < n; k++)
        sum[k] += weight[0] * row[0][k] + weight[1] * row[1][k] + weight[2] * row[2][k]
                  + weight[3] * row[3][k];
}

// Products. A weight is in panels of COLUMNS columns (see Packed), and so are K and V of a chunk. A
// tile of a product is up to ROWS rows by one panel. Its sums stay in registers, or in AMX, and are
// added in the same order for any number of rows, so no row depends on its neighbours.
#ifndef LAYOUT  // the number of one in LAYOUTS
#ifdef __AMX_BF16__
#define LAYOUT 4
#elif defined(__AVX512BF16__)
#define LAYOUT 3
#elif defined(__AVX512F__)
#define LAYOUT 2
#elif defined(__AVX2__)
#define LAYOUT 1
#else
#define LAYOUT 0
#endif
#endif
const int LANES = 4 << std::min(LAYOUT, 2), VECTOR_ROWS = LAYOUT == 1 ? 6 : 8;
const int COLUMNS = 2 * LANES;
#if defined(__AMX_BF16__) && LAYOUT == 4
#define AMX
// A process has to ask Linux for AMX, the matrix unit: ARCH_REQ_XCOMP_PERM, XTILEDATA. Old kernels
// and some sandboxes refuse
const bool HAS_AMX = std::is_same_v<T, bf16> && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
const bool HAS_AMX = false;
#endif
const int ROWS = HAS_AMX ? 32 : VECTOR_ROWS;
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef std::conditional_t<LAYOUT >= 3, T, float> X;  // of the rows

#pragma GCC push_options
#pragma GCC optimize("no-associative-math")
#pragma clang fp reassociate(off)

// Of LANES columns, number i of the one float or two bf16 each
static inline vec numbers(const float* w, int i) {
    vec x;
    memcpy(&x, w, sizeof x);
    return x;
}

static inline vec numbers(const bf16* w, int i) {
    words pairs;
    memcpy(&pairs, w, sizeof pairs);
    return (vec)(i ? pairs & 0xffff0000 : pairs << 16);
}

// sums += the next one or two numbers of each row times those of the panel w
template <int M, class W>
static inline void add_products(vec (*sums)[2], const X* x, int64_t x_step, const W* w) {
    const int P = 4 / sizeof(W);
    for (int i = 0; i < P; i++) {
        const vec a = numbers(w, i), b = numbers(w + LANES * P, i);
        #pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            sums[m][0] += (float)x[m * x_step + i] * a;
            sums[m][1] += (float)x[m * x_step + i] * b;
        }
    }
}

#if defined(__AVX512BF16__) && LAYOUT >= 3
template <int M>
static inline void add_products(vec (*sums)[2], const bf16* x, int64_t x_step, const bf16* w) {
    const __m512bh a = (__m512bh)_mm512_loadu_si512(w);
    const __m512bh b = (__m512bh)_mm512_loadu_si512(w + COLUMNS);
    #pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
        const __m512bh pair = (__m512bh)_mm512_set1_epi32(load<int32_t>(x + m * x_step));
        sums[m][0] = _mm512_dpbf16_ps(sums[m][0], pair, a);
        sums[m][1] = _mm512_dpbf16_ps(sums[m][1], pair, b);
    }
}
#endif

// The first n columns of m <= M rows of y = x w + bias; x (m, K), one panel w (K, COLUMNS). With
// each row of the panel `step` bytes go to the L2 cache for later, from w + `ahead` bytes on
template <int M, class W>
static void vector_tile(int m, const X* x, int64_t x_step, const W* w, const T* bias, W* y,
                        int64_t y_step, int K, int n, int64_t ahead, int step) {
    if constexpr (M > 1)
        if (m < M) return vector_tile<M - 1>(m, x, x_step, w, bias, y, y_step, K, n, ahead, step);
    const int P = 4 / sizeof(W);
    vec sums[M][2] = {};
    const char* next = (const char*)w + ahead;
    for (int k = 0; k < K; k += P, w += COLUMNS * P, next += step) {
        if (M > 2) __builtin_prefetch(next, 0, 2);  // smaller tiles fetch nothing
        if (step > 64) __builtin_prefetch(next + 64, 0, 2);
        add_products<M>(sums, x + k, x_step, w);
    }
    #pragma GCC unroll 8
    for (int i = 0; i < M; i++) {
        float row[COLUMNS];
        memcpy(row, sums[i], sizeof row);
        for (int k = 0; bias && k < n; k++) row[k] += bias[k];
        for (int k = 0; k < n; k++) y[i * y_step + k] = row[k];
    }
}

#ifdef AMX
// AMX has eight tiles of 16 rows by 64 bytes. Here 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7
// numbers of a panel. Its pairs already have the order that AMX needs: 64 bytes of every 128
static thread_local int rows_set;

// Set the tiles of this thread for m rows; 0: release them, because other libraries set them too
static void set_tiles(int m) {
    if (m == rows_set) return;
    rows_set = m;
    if (m == 0) return _tile_release();
    const uint8_t upper = std::min(m, 16), lower = std::max(1, m - 16);
    struct { uint8_t palette, zeros[15]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {1, {},
        {64, 64, 64, 64, 64, 64, 64, 64}, {upper, upper, lower, lower, upper, lower, 16, 16}};
    // not _tile_loadconfig: GCC 12 takes it to read eight bytes, and leaves the others unwritten
    asm volatile("ldtilecfg %0" ::"m"(shape));
}

// Sum up the first 16 rows; BOTH: and the next 16
template <bool BOTH>
static void multiply(const bf16* x, int64_t x_step, const bf16* w, int K, const char* next,
                     int step) {
    asm volatile("" ::: "memory");  // GCC does not know that _tile_loadd reads x
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < K; k += 32, w += 32 * COLUMNS) {
        _tile_loadd(4, x + k, 2 * x_step);
        _tile_loadd(6, w, 128);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + COLUMNS, 128);
        _tile_dpbf16ps(1, 4, 7);
        if (BOTH) {
            _tile_loadd(5, x + 16 * x_step + k, 2 * x_step);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        for (int i = 0; i < 16 * step; i += 64, next += 64) __builtin_prefetch(next, 0, 2);
    }
}

// The same as vector_tile, for up to 32 rows
static void matrix_tile(int m, const bf16* x, int64_t x_step, const bf16* w, const bf16* bias,
                        bf16* y, int64_t y_step, int K, int n, int64_t ahead, int step) {
    alignas(64) float sums[32][COLUMNS];
    set_tiles(m);
    (m > 16 ? multiply<true> : multiply<false>)(x, x_step, w, K, (const char*)w + ahead, step);
    _tile_stored(0, sums[0], 128);
    _tile_stored(1, sums[0] + 16, 128);
    if (m > 16) {
        _tile_stored(2, sums[16], 128);
        _tile_stored(3, sums[16] + 16, 128);
    }
    for (int i = 0; i < m; i++) {
        for (int k = 0; k < n; k++) y[i * y_step + k] = bias ? sums[i][k] + bias[k] : sums[i][k];
    }
}
#else
static void set_tiles(int) {}
#endif

// The first n columns of m <= ROWS rows
template <class W>
static void tile(int m, const X* x, int64_t x_step, const W* w, const T* bias, W* y,
                 int64_t y_step, int K, int n, int64_t ahead = 0, int step = 0) {
#ifdef AMX
    if constexpr (std::is_same_v<T, bf16>)
        if (HAS_AMX && K % 32 == 0)
            return matrix_tile(m, x, x_step, w, bias, y, y_step, K, n, ahead, step);
#endif
    for (int i = 0; i < m; i += VECTOR_ROWS)
        vector_tile<VECTOR_ROWS>(std::min(VECTOR_ROWS, m - i), x + i * x_step, x_step, w, bias,
                                 y + i * y_step, y_step, K, n, ahead, step);
}

#pragma GCC pop_options
#pragma clang fp reassociate(on)

extern "C" {

int layout() { return std::min(LAYOUT, HAS_AMX ? 4 : 3); }  // the one that runs
int panel_columns() { return COLUMNS; }

// y (M, N) = x (M, K) w^T + bias, w in panels. Each block of rows reads a panel once
void linear(const T* x, const T* w, const T* bias, T* y, int M, int N, int K) {
    std::vector<X> wide;  // x as floats, if tiles take these
    const X* rows = (const X*)x;
    if (sizeof(X) > sizeof(T)) {
        wide.assign(x, x + (int64_t)M * K);
        rows = &wide[0];
    }
    // if there are few panels for the threads, blocks of rows share a panel
    const int n_panel = cdiv(N, COLUMNS), most = std::max(1, 4 * omp_get_max_threads() / n_panel);
    int n_block = std::min<int>(most, cdiv(M, ROWS));
    // AMX would wait for rows that have left the L2 cache: a block has about 1 MB
    if (HAS_AMX) n_block = std::max<int>(n_block, (int64_t)M * K >> 19);
    #pragma omp parallel
    {
        #pragma omp for collapse(2) nowait
        for (int block = 0; block < n_block; block++)
            for (int panel = 0; panel < n_panel; panel++) {
                const int64_t first = (int64_t)M * block / n_block;
                const int64_t end = (int64_t)M * (block + 1) / n_block;
                const int n = panel * COLUMNS, n_tile = cdiv(end - first, ROWS);
                // Without a prefetch the first tile of a panel waits for memory, then memory waits
                // for the other tiles. So the first few fetch the next panel, in equal parts, and a
                // single tile fetches what it reads 8 KB later. One or two rows need no prefetch.
                const int64_t size = (int64_t)COLUMNS * K * sizeof(T);
                const int n_part = std::min(n_tile, HAS_AMX ? 8 : 2);
                int64_t ahead = n_tile > 1 ? size : 8192;
                for (int64_t row = first, m; row < end; row += m, ahead += size / n_part) {
                    m = cdiv(end - row, cdiv(end - row, ROWS));  // tiles of about equal size
                    const bool fetches = end - first > 2 && ahead < 2 * size;
                    tile(m, rows + row * K, K, w + (int64_t)n * K, bias ? bias + n : bias,
                         y + row * N + n, N, K, std::min(COLUMNS, N - n), fetches ? ahead : 0,
                         fetches ? COLUMNS * 4 / n_part : 0);
                }
            }
        set_tiles(0);
    }
}

// total = x + y, out = its LayerNorm if there is a bias, else its RMSNorm; each (N, C)
void add_norm(const T* x, const T* y, const T* weight, const T* bias, T* total, T* out, int N,
              int C, float eps) {
    #pragma omp parallel for if (N > 8)
    for (int64_t i = 0; i < N; i++) {
        const T* row = (y ? total : x) + i * C;
        float sum = 0, squares = 0;
        for (int c = 0; y && c < C; c++) total[i * C + c] = x[i * C + c] + y[i * C + c];
        for (int c = 0; bias && c < C; c++) sum += row[c];
        const float mean = sum / C;
        // not squares / C - mean * mean, which is wrong if the mean is far larger than the spread
        for (int c = 0; c < C; c++) squares += (row[c] - mean) * (row[c] - mean);
        const float scale = 1 / std::sqrt(squares / C + eps);
        for (int c = 0; c < C; c++)
            out[i * C + c] = (row[c] - mean) * scale * weight[c] + (bias ? (float)bias[c] : 0);
    }
}

// h (N, 2 I) -> SwiGLU, or h (N, I) -> tanh-GELU; out (N, I)
void activate(const T* h, T* out, int N, int I, int gated) {
    #pragma omp parallel for if (N > 8)
    for (int64_t i = 0; i < N; i++) {
        const T* x = h + (gated ? 2 * i : i) * I;
        T* y = out + i * I;
        for (int c = 0; gated && c < I; c++) y[c] = x[c] * sigmoid(x[c]) * x[I + c];
        for (int c = 0; !gated && c < I; c++)  // (1 + tanh(z / 2)) / 2 = sigmoid(z)
            y[c] = x[c] * sigmoid(1.59576912f * (x[c] + 0.044715f * x[c] * x[c] * x[c]));
    }
}

// Norm q and k, unless norm is null; rotate them, unless cos is null; write k and v to their pages.
// qkv (N, (H + 2 Hk) D), cos and sin (N, D / 2), norm (2, D), K and V (n_page, Hk, D), slot_mapping
// (N,) -> q (N, H, D)
void rotate_write(const T* qkv, const float* cos, const float* sin, const T* norm, T* q, T* K,
                  T* V, const int32_t* slot_mapping, int N, int H, int Hk, float eps) {
    #pragma omp parallel for if (N > 8)
    for (int64_t i = 0; i < N; i++) {
        const T* from = qkv + i * (H + 2 * Hk) * D;
        const int64_t page = (int64_t)slot_mapping[i] * Hk * D;
        for (int h = 0; h < H + Hk; h++, from += D) {
            T* to = h < H ? q + (i * H + h) * D : K + page + (h - H) * D;
            const T* weight = norm && h >= H ? norm + D : norm;
            float x[D];
            std::copy_n(from, D, x);
            const float scale = norm ? 1 / std::sqrt(dot(x, x, D) / D + eps) : 1;
            for (int d = 0; norm && d < D; d++) x[d] = x[d] * scale * weight[d];
            for (int d = 0; !cos && d < D; d++) to[d] = x[d];
            for (int d = 0; cos && d < D / 2; d++) {
                const float c = cos[i * D / 2 + d], s = sin[i * D / 2 + d];
                to[d] = x[d] * c - x[d + D / 2] * s;
                to[d + D / 2] = x[d + D / 2] * c + x[d] * s;
            }
        }
        memcpy(V + page, from, Hk * D * sizeof(T));
    }
}

// Attention of decodes, which read the cache in place: the scores of all tokens, their softmax,
// then the sum of the values. q, out (N, H, D); K and V (n_page, Hk, D); spans (R, 4): first row,
// rows, n_past, start in page_tables. A thread takes a whole request, so that it reads pages from
// end to end. Only if there are fewer requests than threads, their heads are divided
void attend(const T* q, const T* K, const T* V, const int32_t* spans, const int32_t* page_tables,
            T* out, int R, int H, int Hk) {
    const int64_t W = Hk * D, G = H / Hk;
    const int n_part = std::min<int>(Hk, cdiv(omp_get_max_threads(), R));
    #pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (int r = 0; r < R; r++)
        for (int part = 0; part < n_part; part++) {
            const int32_t *span = spans + 4 * r, *pages = page_tables + span[3];
            const int n_past = span[2], context = span[1] + n_past;
            if (span[1] == 0) continue;  // padding
            const int first = part * Hk / n_part, end = (part + 1) * Hk / n_part;  // kv heads
            const int n = span[1] * G, n_query = n * (end - first);  // of a kv head, of all
            const int64_t stride = context + 32;  // for whole vectors, in different L1 cache sets
            std::vector<float> queries(n_query * D), sums(n_query * D);
            std::vector<float> p(n_query * stride), e(stride);
            auto place = [&](int i) {  // of query i in q and out
                return ((span[0] + i % n / G) * H + (first + i / n) * G + i % G) * D;
            };
            for (int i = 0; i < n_query; i++) std::copy_n(q + place(i), D, &queries[i * D]);
            for (int t = 0; t < context; t++) {
                const T* ahead = K + pages[std::min(t + 16, context - 1)] * W;
                for (int h = first; h < end; h++) {
                    prefetch(ahead + h * D, D);
                    float k[D];
                    std::copy_n(K + pages[t] * W + h * D, D, k);
                    for (int i = (h - first) * n; i < (h - first + 1) * n; i++)
                        p[i * stride + t] = dot(&queries[i * D], k, D);
                }
            }
            for (int i = 0; i < n_query; i++)
                softmax(&p[i * stride], &e[0], n_past + i % n / G + 1, context);
            for (int t = 0; t < context; t += 4)
                for (int h = first; h < end; h++) {
                    for (int next = t + 16; next < std::min(t + 20, context); next++)
                        prefetch(V + pages[next] * W + h * D, D);
                    for (int i = (h - first) * n; i < (h - first + 1) * n; i++)
                        add_rows(&sums[i * D], &p[i * stride + t], V + h * D, pages + t, 1,
                                 std::min(4, context - t), W, D);
                }
            for (int i = 0; i < n_query; i++) std::copy_n(&sums[i * D], D, out + place(i));
        }
}

// Attention of a chunk: n rows of one request. K and V of its tokens are copied to panels; in those
// of K a token is a column, in those of V an element of the head is. Then for ROWS queries of a kv
// head at a time: scores, softmax, values. q, out (n, H, D)
void attend_chunk(const T* q, const T* K, const T* V, const int32_t* pages, T* out, int n,
                  int n_past, int H, int Hk) {
    const int P = 4 / sizeof(X), G = H / Hk, context = n_past + n;
    // E: numbers of a query or key, filled up to pairs; F: of a value, filled up to panels
    const int E = (D + P - 1) / P * P, F = (D + 31) / 32 * 32;
    const int64_t W = Hk * D, end = cdiv(context, 32) * 32, stride = end + 32, size = end * F;
    std::unique_ptr<X[]> keys(new X[Hk * size]), values(new X[Hk * size]);
    #pragma omp parallel
    {
        X k[COLUMNS][E] = {}, v[COLUMNS][F] = {};
        #pragma omp for collapse(2)
        for (int t = 0; t < end; t += COLUMNS)
            for (int h = 0; h < Hk; h++) {
                for (int i = 0; i < COLUMNS; i++) {
                    const int64_t from = pages[std::min(t + i, context - 1)] * W + h * D;
                    std::copy_n(K + from, D, k[i]);
                    std::copy_n(V + from, D, v[i]);
                }
                X* key = &keys[h * size + t * E];
                for (int d = 0; d < E; d += P)
                    for (int i = 0; i < COLUMNS; i++, key += P) std::copy_n(&k[i][d], P, key);
                for (int d = 0; d < D; d += COLUMNS) {
                    X* value = &values[h * size + d * end + t * COLUMNS];
                    for (int i = 0; i < COLUMNS; i += P)
                        for (int c = d; c < d + COLUMNS; c++)
                            for (int j = 0; j < P; j++) *value++ = v[i + j][c];
                }
            }
        std::vector<X> x(ROWS * E), p(ROWS * stride);  // queries, then values; scores
        std::vector<float> e(end);
        #pragma omp for collapse(2) schedule(dynamic, 4)
        for (int h = 0; h < Hk; h++)
            for (int first = 0; first < n * G; first += ROWS) {
                const int m = std::min(ROWS, n * G - first);
                const int width = cdiv(n_past + (first + m - 1) / G + 1, 32) * 32;
                auto place = [&](int i) {  // of query i in q and out
                    return (((first + i) / G) * H + h * G + (first + i) % G) * D;
                };
                for (int i = 0; i < m; i++) std::copy_n(q + place(i), D, &x[i * E]);
                for (int t = 0; t < width; t += COLUMNS)
                    tile(m, &x[0], E, &keys[h * size + t * E], nullptr, &p[t], stride, E, COLUMNS);
                for (int i = 0; i < m; i++)
                    softmax(&p[i * stride], &e[0], n_past + (first + i) / G + 1, width);
                for (int d = 0; d < D; d += COLUMNS)
                    tile(m, &p[0], stride, &values[h * size + d * end], nullptr, &x[d], E, width,
                         std::min(COLUMNS, D - d));
                for (int i = 0; i < m; i++) std::copy_n(&x[i * E], D, out + place(i));
            }
        set_tiles(0);
    }
}

// y (N, n_out) += x (N, n_in) A B for the segments of decodes. Rows of a segment share one reading
// of A and B, in place (n_page, W). Only if there are fewer segments than threads, rows are divided
void lora(const T* x, T* y, const T* A, const T* B, const int32_t* segments,
          const int32_t* page_tables, int S, int n_in, int n_out, int width) {
    const int64_t W = width;
    const int n_part = cdiv(omp_get_max_threads(), std::max(1, S));
    #pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (int s = 0; s < S; s++)
        for (int part = 0; part < n_part; part++) {
            const int32_t *segment = segments + 8 * s, *pages = page_tables + segment[7];
            const int columns = segment[3], rank = segment[4];
            const int a_page = cdiv(n_in, W), b_page = cdiv(columns, W);  // of a row
            const int64_t first_row = segment[0] + part * segment[1] / n_part;
            const int n = segment[0] + (part + 1) * segment[1] / n_part - first_row;
            if (n == 0) continue;
            const T* own_x = x + first_row * n_in;
            T* own_y = y + first_row * n_out + segment[2];
            std::vector<float> in(own_x, own_x + n * n_in), xa(n * rank), sums(n * columns);
            for (int i = 0; i < rank * a_page; i++) {
                const int first = i % a_page * W, length = std::min(width, n_in - first);
                if (i + 8 < rank * a_page) prefetch(A + pages[i + 8] * W, length);
                for (int j = 0; j < n; j++)
                    xa[j * rank + i / a_page] +=
                        dot(&in[j * n_in + first], A + pages[i] * W, length);
            }
            for (int j = 0; j < n; j++) std::copy_n(own_y + j * n_out, columns, &sums[j * columns]);
            for (int p = 0; p < b_page; p++)
                for (int i = 0; i < rank; i += 4) {
                    const int32_t* rows = pages + i * b_page + p;
                    for (int next = 4; next < std::min(8, rank - i); next++)
                        prefetch(B + rows[next * b_page] * W, W);
                    for (int j = 0; j < n; j++)
                        add_rows(&sums[j * columns + p * W], &xa[j * rank + i], B, rows, b_page,
                                 std::min(4, rank - i), W, std::min(width, columns - p * width));
                }
            for (int j = 0; j < n; j++) std::copy_n(&sums[j * columns], columns, own_y + j * n_out);
        }
}

}  // extern "C"
"""
