"""The Triton kernels: against their definitions, in Triton's interpreter (in another process, where
TRITON_INTERPRET is set before Triton is imported), and compiled for GPUs that are not here."""
import os
import re
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch

import kernels
from kernels import FEW_ROWS, Batch, Sites, cdiv

triton = pytest.importorskip("triton")
in_interpreter = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1",
                                    reason="runs in the interpreter's process")
HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
SHARED = {80: 166912, 86: 101376, 90: 232448}  # bytes of shared memory that a program may use
torch.manual_seed(0)

def assert_near(a, b):
    tolerance = 3e-5 if b.dtype == FLOAT else 4e-3
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))

def packed(entries, lengths):
    """Spans or sites with padding, table (random pages, gaps), n_few, max_few, max_chunk"""
    n = sum(lengths) + len(lengths)
    table = torch.randperm(2 * n)[:n].int()
    entries = [entry + [sum(lengths[:i]) + i] for i, entry in enumerate(entries)]
    rows = [entry[1] for entry in entries]
    n_few = sum(n <= FEW_ROWS for n in rows)
    padding = [[10**6, 0] + [10**6] * (len(entries[0]) - 2)]
    tensor = torch.tensor(entries[:n_few] + padding + entries[n_few:] + padding).int()
    return tensor, table, n_few + 1, max([0, *rows[:n_few]]), max([0, *rows[n_few:]])

def batch_of(shapes):
    """shapes: (rows, n_past) of each request, few rows first."""
    lengths = [sum(shape) for shape in shapes]
    entries = [[sum(n for n, _ in shapes[:i]), *shapes[i]] for i in range(len(shapes))]
    spans, table, *sizes = packed(entries, lengths)
    return Batch(None, None, None, spans, table, None, *sizes, max(lengths))

def sites_of(shapes, n_in, modules, W, widen=1):
    """shapes: (first row, rows, module, rank of A) of each site; modules: their columns of y."""
    lengths = [rank * max(cdiv(n_in, W), widen * cdiv(modules[j], W)) for _, _, j, rank in shapes]
    entries = [[row, n, sum(modules[:j]), modules[j], rank, widen * rank, j]
               for row, n, j, rank in shapes]
    max_rank = cdiv(max(rank for _, _, _, rank in shapes), 16) * 16
    return Sites(*packed(entries, lengths), len(modules), max_rank)

def cache_of(table, Hk, D, dtype):
    """A cache for a table: NaN on pages that it does not list."""
    kv = torch.full((2, 2 * len(table), Hk, D), float("nan"), dtype=dtype)
    kv[:, table.long()] = torch.randn(2, len(table), Hk, D, dtype=dtype)
    return kv

@in_interpreter
@pytest.mark.parametrize("C, has_y, has_bias, dtype", [
    (1, 1, 0, FLOAT), (48, 0, 1, HALF), (100, 1, 1, FLOAT), (100, 0, 0, FLOAT), (1024, 1, 0, HALF)])
def test_add_norm(C, has_y, has_bias, dtype):
    x, y, bias, weight = torch.randn(4, 3, C, dtype=dtype)
    args = x, y if has_y else None, weight[0], bias[0] if has_bias else None, 1e-5
    for ours, expected in zip(kernels.add_norm(*args), kernels.add_norm_ref(*args)):
        assert_near(ours, expected)

@in_interpreter
@pytest.mark.parametrize("D, H, Hk, dtype, rotated", [
    (64, 2, 2, FLOAT, 1), (80, 4, 1, HALF, 0), (96, 8, 2, FLOAT, 1), (128, 9, 3, HALF, 1)])
def test_rotate_write(D, H, Hk, dtype, rotated):
    qkv = torch.randn(3, (H + 2 * Hk) * D, dtype=dtype)
    cos, sin = torch.randn(2, 3, D // 2) if rotated else (None, None)
    pages = torch.tensor([7, 0, 3], dtype=torch.int32)
    kv = torch.randn(2, 9, Hk, D, dtype=dtype)
    kv_ref = kv.clone()
    q = kernels.rotate_write(qkv, cos, sin, kv, pages, H, Hk)
    assert_near(q, kernels.rotate_write_ref(qkv, cos, sin, kv_ref, pages, H, Hk))
    assert_near(kv, kv_ref)

@in_interpreter
@pytest.mark.parametrize("D, H, Hk, dtype, n_split, shapes", [
    (64, 2, 2, HALF, 1, [(1, 0), (1, 63), (1, 64), (8, 57), (127, 0), (128, 1), (129, 70)]),
    (64, 8, 1, FLOAT, 2, [(1, 127), (1, 128), (2, 127), (8, 300), (9, 5)]),
    (80, 4, 4, FLOAT, 4, [(1, 14), (1, 15), (1, 16), (7, 200), (16, 0), (17, 0)]),
    (96, 8, 2, HALF, 8, [(1, 254), (1, 255), (1, 256), (5, 11), (31, 3), (32, 3), (33, 3)]),
    (128, 8, 1, HALF, 32, [(8, 1100), (1, 0)]), (128, 4, 4, FLOAT, 1, [(20, 13), (150, 0)])])
def test_attention(D, H, Hk, dtype, n_split, shapes, monkeypatch):
    monkeypatch.setattr(kernels, "n_splits", lambda *_: n_split)
    batch = batch_of(shapes)
    q = torch.randn(sum(n for n, _ in shapes) + 3, H, D, dtype=dtype)  # 3 padding rows
    kv = cache_of(batch.table, Hk, D, dtype)
    out = kernels.attention_triton(q, kv, batch)
    assert_near(out[:-3], kernels.attention_ref(q, kv, batch)[:-3])

@in_interpreter
@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize("W, n_in, modules, widen, shapes", [
    (64, 100, (64, 130, 20), 1, [
        (0, 1, 0, 1), (0, 1, 1, 8), (2, 5, 0, 16), (2, 5, 2, 40), (8, 8, 1, 128), (8, 8, 2, 3)]),
    (48, 192, (64, 48), 1, [(0, 8, 0, 17), (0, 8, 1, 5), (9, 9, 1, 3), (20, 63, 1, 33),
                            (83, 64, 0, 16), (147, 65, 0, 64), (147, 65, 1, 1)]),
    (256, 130, (513,), 1, [(0, 1, 0, 100), (2, 2, 0, 1)]),
    (64, 64, (65, 20), 2, [(0, 3, 0, 1), (0, 3, 1, 20), (4, 64, 0, 40), (4, 64, 1, 7)])])
def test_lora(W, n_in, modules, widen, shapes, dtype):
    """widen 2: as with two devices, B has twice the rank of A and xa is widened between them."""
    exchange = None if widen == 1 else lambda xa: torch.stack([xa, 2 * xa], -1).flatten(1)
    sites = sites_of(shapes, n_in, modules, W, widen)
    x = torch.randn(220, n_in, dtype=dtype) / 16
    y = torch.randn(220, sum(modules), dtype=dtype)
    y_ref = y.clone()
    kv = cache_of(sites.table, 1, W, dtype)
    kernels.lora(y, x, kv, sites, exchange, "triton")
    kernels.lora(y_ref, x, kv, sites, exchange, "torch")
    assert_near(y, y_ref)

def test_every_kernel_in_the_interpreter():
    run = subprocess.run([sys.executable, "-m", "pytest", "-qx", "-k", "not every", __file__],
                         capture_output=True, text=True,
                         env={**os.environ, "TRITON_INTERPRET": "1"})
    assert run.returncode == 0 and "23 passed" in run.stdout, run.stdout[-5000:] + run.stderr

@pytest.mark.parametrize("arch, dtype, D, H, Hk, n_few, rank", [
    (80, BF16, 128, 32, 32, 1, 16), (86, BF16, 128, 32, 8, 8, 64), (90, BF16, 128, 64, 8, 8, 128),
    (80, HALF, 80, 20, 1, 1, 8), (86, HALF, 64, 12, 12, 1, 256), (90, HALF, 96, 16, 16, 4, 32),
    (80, FLOAT, 64, 32, 4, 3, 16), (86, FLOAT, 128, 16, 16, 8, 64), (90, FLOAT, 80, 8, 8, 1, 128)])
def test_every_launch_compiles(arch, dtype, D, H, Hk, n_few, rank, monkeypatch, tmp_path):
    """For a GPU that is not here: no register spills, and shared memory suffices."""
    driver = Mock(get_current_device=lambda: arch)
    driver.get_current_target.return_value = triton.backends.compiler.GPUTarget("cuda", arch, 32)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(kernels, "backend", lambda *_: "triton")
    made = []
    monkeypatch.setattr(triton.JITFunction, "__getitem__", lambda kernel, grid: (
        lambda *args, **options: made.append(kernel.warmup(*args, grid=grid, **options))))
    columns = H * D, Hk * D, Hk * D
    x = torch.randn(9, H * D, dtype=dtype)
    qkv = torch.randn(9, sum(columns), dtype=dtype)
    kv = torch.randn(2, 9, Hk, D, dtype=dtype)
    cos, sin = torch.randn(2, 9, D // 2)
    kernels.add_norm(x, x, x[0], x[0] if dtype == HALF else None, 1e-5)
    kernels.rotate_write(qkv, cos, sin, kv, torch.arange(9).int(), H, Hk)
    kernels.attention_triton(x.view(9, H, D), kv, batch_of([(n_few, 600), (200, 0)]))
    for rows in (n_few, 200):
        sites = sites_of([(0, rows, 0, rank), (0, rows, 2, 1)], H * D, columns, Hk * D)
        kernels.lora(qkv, x, kv, sites, chosen="triton")
    assert len(made) == 8
    cuobjdump = triton.knobs.nvidia.cuobjdump.path
    cubin = tmp_path / "kernel.cubin"
    for kernel in made:
        cubin.write_bytes(kernel.asm["cubin"])
        usage = subprocess.check_output([cuobjdump, "-res-usage", cubin], text=True)
        print(kernel.metadata.name, *re.findall(r"REG:\d+", usage), kernel.metadata.shared)
        assert "STACK:0" in usage  # spilled registers would lie there
        assert kernel.metadata.shared <= SHARED[arch]
