"""The operators of kernels.py against their definitions, on the CPU."""
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kernels
from kernels import Batch, Sites, cdiv

TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 3e-2}
PADDING = (10**6, 0, *[10**6] * 6)
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)

@pytest.fixture(autouse=True)
def used(monkeypatch):
    """Fixed numbers, no gradients. -> the set of C++ operators that were used"""
    torch.manual_seed(0)
    names = set()
    cpp = kernels.cpp

    def recorded(name, *arguments, **options):
        names.add(name)
        cpp(name, *arguments, **options)

    monkeypatch.setattr(kernels, "cpp", recorded)
    with torch.inference_mode():
        yield names

def close(actual, expected, dtype):
    torch.testing.assert_close(actual.float(), expected.float(), atol=TOLERANCE[dtype],
                               rtol=TOLERANCE[dtype])

def cache(n_page, Hk, D, dtype):
    return torch.randn(2, n_page, Hk, D).to(dtype)

def batch_of(spans, n_page):
    """A Batch of requests (rows, n_past), each with pages of its own in random order."""
    order = torch.randperm(n_page).int()
    entries = []
    start = 0
    first = 0
    for rows, n_past in spans:
        entries.append((start, rows, n_past, first) if rows else PADDING[:4])
        start += rows
        first += rows + n_past
    assert first <= n_page
    few = [rows for rows, _ in spans if rows <= kernels.FEW_ROWS]
    many = [rows for rows, _ in spans if rows > kernels.FEW_ROWS]
    empty = torch.zeros(start, dtype=torch.int64)
    return Batch(empty, empty, order[:start], torch.tensor(entries).int(), order[:first], empty,
                 len(few), max(few, default=0), max(many, default=0), max(map(sum, spans)))

@DTYPES
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("N, C", [(1, 16), (3, 48), (9, 768), (33, 1040)])
def test_add_norm(N, C, bias, dtype, used):
    x, y = torch.randn(2, N, C).to(dtype) + 1
    weight, bias = torch.randn(C).to(dtype), torch.randn(C).to(dtype) if bias else None
    for other in (y, None):
        total, norm = kernels.add_norm(x, other, weight, bias, 1e-5)
        expected = kernels.add_norm_ref(x, other, weight, bias, 1e-5)
        assert torch.equal(total, expected[0])
        close(norm, expected[1], dtype)
    assert "add_norm" in used

@DTYPES
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("N, I", [(1, 16), (8, 48), (9, 2048)])
def test_activate(N, I, gated, dtype, used):
    h = 5 * torch.randn(N, 2 * I if gated else I).to(dtype)
    close(kernels.activate(h, gated), kernels.activate_ref(h, gated), dtype)
    assert "activate" in used

@DTYPES
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("N, H, Hk, D", [(1, 4, 4, 32), (8, 4, 1, 64), (21, 8, 2, 96)])
def test_rotate_write(N, H, Hk, D, rotated, dtype, used):
    qkv = torch.randn(N, (H + 2 * Hk) * D).to(dtype)
    angles = torch.rand(N, D // 2) * 6
    rope = (angles.cos(), angles.sin()) if rotated else (None, None)
    pages = torch.randperm(40)[:N].int()
    kv = cache(40, Hk, D, dtype)
    expected_kv = kv.clone()
    q = kernels.rotate_write(qkv, *rope, kv, pages, H, Hk)
    close(q, kernels.rotate_write_ref(qkv, *rope, expected_kv, pages, H, Hk), dtype)
    close(kv, expected_kv, dtype)
    assert "rotate_write" in used

SPANS = {
    "one token": [(1, 0)],
    "decodes": [(1, 15), (1, 16), (1, 31), (1, 32), (1, 300), (1, 0)],
    "verifications": [(n, 30 + 3 * n) for n in range(1, 9)],
    "long and short": [(3, 700), (1, 2), (8, 0)],
    "padded": [(1, 40), (2, 0), (0, 0), (0, 0), (17, 3)],
    "small chunks": [(9, 0), (15, 0), (16, 16), (17, 1), (31, 33), (33, 0)],
    "chunks": [(1, 5), (127, 0), (128, 1), (129, 130)],
    "blocks": [(255, 0), (257, 64), (300, 40)],
}

@DTYPES
@pytest.mark.parametrize("H, Hk, D", [(2, 2, 64), (4, 1, 16), (8, 1, 80), (8, 2, 128)], ids=str)
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_attention(spans, H, Hk, D, dtype, used):
    batch = batch_of(spans, 1200)
    kv = cache(1200, Hk, D, dtype)
    q = 2 * torch.randn(sum(rows for rows, _ in spans), H, D).to(dtype)
    close(kernels.attention(q, kv, batch), kernels.attention_ref(q, kv, batch), dtype)
    assert "causal_softmax" in used or not batch.max_chunk

# rows of each request and, for each of its sites, module and rank
MIXED = {
    "decodes": [(1, {0: 1}), (1, {}), (1, {0: 16, 1: 5, 2: 128}), (1, {2: 7})],
    "verifications": [(8, {1: 64}), (3, {0: 8, 2: 8}), (0, {0: 4})],
    "chunks": [(1, {0: 3}), (9, {0: 16, 1: 16}), (40, {2: 33})],
}

def sites_of(requests, widths, n_in, W, n_page, way):
    """Sites of the requests' adapters, their rows on random pages."""
    order = torch.randperm(n_page).int()
    entries = []
    start = 0
    first = 0
    for rows, ranks in requests:
        for module, rank in ranks.items():
            columns = widths[module]
            site = (start, rows, sum(widths[:module]), columns, rank, rank, module, first)
            entries.append(site if rows else PADDING)
            first += rank * max(cdiv(n_in, W), cdiv(columns, W))
        start += rows
    assert first <= n_page
    rows = [entry[1] for entry in entries]
    few = [n for n in rows if n <= kernels.FEW_ROWS]
    max_rank = cdiv(max(entry[4] for entry in entries if entry[1]), 16) * 16
    return Sites(torch.tensor(entries).int(), order[:first], len(few), max(few, default=0),
                 max(rows), len(widths), max_rank, way)

@DTYPES
@pytest.mark.parametrize("way", ["batched", "bmm"])
@pytest.mark.parametrize("W, n_in, widths", [(64, 64, (64, 32, 32)), (48, 160, (176, 88, 40))])
@pytest.mark.parametrize("requests", MIXED.values(), ids=MIXED)
def test_lora(requests, W, n_in, widths, way, dtype, used):
    sites = sites_of(requests, widths, n_in, W, 1200, way)
    kv = cache(1200, 1, W, dtype)
    N = sum(rows for rows, _ in requests)
    x = torch.randn(N, n_in).to(dtype) / n_in ** 0.5
    y = torch.randn(N, sum(widths)).to(dtype)
    expected = y.double()
    for start, n, column, columns, rank, _, _, first in sites.sites.tolist():
        if n == 0:
            continue
        a = kernels.adapter_rows(kv[0], sites.table, first, rank, n_in).double()
        b = kernels.adapter_rows(kv[1], sites.table, first, rank, columns).double()
        expected[start:start + n, column:column + columns] += x[start:start + n].double() @ a.T @ b
    defined = y.clone()
    kernels.lora(defined, x, kv, replace(sites, way="batched"), chosen="torch")
    kernels.lora(y, x, kv, sites)
    scale = expected.abs().max()
    close(y / scale, expected / scale, dtype)
    close(defined / scale, expected / scale, dtype)
    assert way == "bmm" or not sites.n_few or "expand" in used

def test_lora_all_gather():
    """Two devices hold half of A's rows each; expand reads x A in the order of B's rows."""
    requests, N = [(1, {0: 6, 1: 4}), (12, {1: 2})], 13
    whole = sites_of(requests, (64, 32), 64, 64, 60, "batched")
    kv = cache(60, 1, 64, torch.float32)
    x, y = torch.randn(N, 64), torch.randn(N, 96)
    expected = y.clone()
    kernels.lora(expected, x, kv, whole, chosen="torch")
    gathered = torch.full((N, 2, 32), float("nan"))
    kernels.lora(y.clone(), x, kv, whole, lambda xa: gathered[:, :, :16].copy_(
        xa.view(N, 2, -1)).flatten(1), "torch")
    whole.sites[:, 4] //= 2  # this device computes half of the ranks, the exchange adds the rest
    kernels.lora(y, x, kv, whole, lambda half: gathered.flatten(1))
    close(y, expected, torch.float32)

@DTYPES
def test_linear(dtype):
    weight, bias = torch.randn(48, 32).to(dtype), torch.randn(48).to(dtype)
    packed = kernels.pack(weight)
    for x in (torch.randn(5, 32).to(dtype), torch.randn(1, 32), torch.randn(2, 3, 32)):
        for b in (bias, None):
            expected = kernels.linear_ref(x, weight, b)
            close(kernels.linear(x, packed, b), expected, dtype)
            close(kernels.linear(x, weight, b), expected, dtype)

def test_verify_greedy():
    """With one-hot p, drafts are accepted up to the first wrong one, which p replaces."""
    best = torch.tensor([3, 1, 4, 1, 5, 2, 6])
    p = torch.eye(8)[best]
    drafts, n_drafts = torch.tensor([3, 1, 0, 5]), torch.tensor([2, 0, 1, 1])
    p = torch.cat([p[:3], p[3:4], p[4:6], p[5:7]])  # rows of the four requests
    for q in (None, torch.eye(8)[drafts]):
        for u in (torch.zeros(8), torch.full((8,), 1 - 2 ** -24)):
            accepted, tokens = kernels.verify(p, q, drafts, n_drafts, u)
            assert accepted.tolist() == [2, 0, 0, 0]
            assert tokens.tolist() == [4, 1, 5, 2]

@pytest.mark.parametrize("q, expected", [([0.9, 0.1, 0], 1), ([0.5, 0.1, 0.4], 0), (None, 1)])
def test_verify_rejects(q, expected):
    """u = 0.8 accepts draft 0 if 0.8 q < p = 0.6; else max(p - q, 0) is all on token 1."""
    p = torch.tensor([[0.6, 0.4, 0], [0, 0, 1]])
    q = None if q is None else torch.tensor([q])
    for u in (0.01, 0.99):
        numbers = torch.tensor([0.8, u])
        accepted, tokens = kernels.verify(p, q, torch.tensor([0]), torch.tensor([1]), numbers)
        assert accepted.item() == (expected == 0)
        assert tokens.item() == (expected or 2)

def test_probabilities():
    logits = torch.tensor([[1.0, 3, 2, 0]] * 4).log_softmax(-1)
    settings = [torch.tensor(x) for x in ([0.0, 1, 1, 1], [0, 0, 2, 0], [1.0, 1, 1, 0.65])]
    p = kernels.probabilities(logits, *settings)
    expected = logits.exp()
    expected[0] = torch.tensor([0, 1, 0, 0])
    expected[2:, [0, 3]] = 0
    expected[3] = expected[2]
    close(p, expected / expected.sum(-1, keepdim=True), torch.float32)
    assert kernels.sample(p[1:2], torch.tensor([0.999999])).tolist() == [3]
    assert kernels.sample(p[2:3], torch.tensor([1.0])).tolist() == [2]

@pytest.mark.parametrize("compiler", ["/missing/g++", "false"])
def test_without_a_compiler(compiler, tmp_path):
    """The definitions serve, and one line on stderr says so."""
    code = ("import torch, kernels; x = torch.ones(2, 32)\n"
            "for _ in range(2): y = kernels.add_norm(x, x, x[0], None, 1e-5)\n"
            "assert torch.equal(y[0], x + x); print(kernels.activate(x, True).sum().item())")
    environment = os.environ | {"CXX": compiler, "XDG_CACHE_HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True,
                            text=True, cwd=Path(__file__).parent)
    assert result.returncode == 0, result.stderr
    assert abs(float(result.stdout) - 2 * 16 * 0.7310586) < 1e-4
    assert result.stderr.count("\n") == 1 and "C++" in result.stderr
