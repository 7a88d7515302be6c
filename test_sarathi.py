"""The proofs, in sections: what is refused or served; the engine with any options against a naive
loop; schedulers, memory and drafts, calculated by hand; sampled drafts by chi-square, graphs and
tensor parallelism; the simulator against the engine; models against transformers and PEFT;
operators against their definitions (C++ here, Triton in its interpreter and compiled for GPUs that
are not here); every claim of bench; command lines. SARATHI_SEED=1 pytest test_sarathi.py draws
other random tests; one that fails prints what it drew."""
import dataclasses
import gc
import gzip
import json
import math
import multiprocessing
import os
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import weakref
from array import array
from collections import Counter, defaultdict
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from copy import copy
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache, partial
from io import StringIO
from itertools import accumulate, chain, combinations, cycle, pairwise, product
from pathlib import Path
from threading import Thread
from tempfile import TemporaryDirectory
from operator import is_
from unittest.mock import DEFAULT, Mock

# kernels before torch: it sets how torch's threads wait
import bench
import kernels
import model as model_py
import sarathi
from bench import ASSETS, CLAIMS, EXPERIMENTS
from kernels import DECODE_ROWS, Batch, Segments, cdiv
from model import (FAMILIES, GPT, Adapter, GPTConfig, World, load_model, load_tokenizer, preset,
                   read_config)
from sarathi import (SCHEDULERS, CostModel, EarlyAbort, Engine, Fair, Feed, Iteration,
                     IterationStats, Request, cluster, edf, fcfs, lcfs, one_adapter,
                     run_command_line, sjf)

import matplotlib.image
import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
from pytest import approx
from safetensors.torch import load_file, save_file
from torch import bfloat16, float16, float32
from torch.utils._python_dispatch import TorchDispatchMode

torch.set_num_threads(1)  # the models are tiny
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # set by test_triton_in_its_interpreter
# with a GPU, operators are tested and small models serve there
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_TORCH = os.environ.get("SARATHI_CPU") == "torch"  # the definitions alone run
SEED = int(os.environ.get("SARATHI_SEED", 0))  # of random tests
each = pytest.mark.parametrize

@pytest.fixture(autouse=True)
def seed_is_shown():
    """pytest shows what a failed test printed."""
    print(f"SARATHI_SEED={SEED}")

# -----------------------------------------------------------------------------
# models, prompts and oracles that all sections use

TINY = GPTConfig(2, 8, 128, 192, n_kv_head=4, vocab_size=61, block_size=160)
GPT2 = GPTConfig(2, 4, 64, vocab_size=61, block_size=160, family="gpt2", tied=True, norm_eps=0.1)
QWEN3 = replace(TINY, family="qwen3", attention_bias=True, head_dim=32, norm_eps=0.1)

def random_model(config=TINY, dtype=float32, noise=0.0):
    """Weights so large that tokens differ, and noise on top of them"""
    model = GPT.from_preset(config, float32, seed=1)
    rng = torch.Generator().manual_seed(2)
    for weight in model.make_trainable():
        own, other = torch.randn(2, *weight.shape, generator=rng)
        weight.data += 0.15 * (own + noise * other)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return GPT.from_pretrained(folder, dtype, DEVICE)

@contextmanager
def reproducible(*what):
    """A failure in here says what it was about."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{error}: with {what}") from error

def prompt(n, seed=0):
    """Random tokens with repetitions, so that prompt lookup finds some"""
    rng = np.random.default_rng(seed)
    words = rng.integers(61, size=(3, 4))
    return words[rng.integers(3, size=n)].flatten()[:n].tolist()

def random_adapter(ranks, config=TINY):
    adapter = Adapter.random(config, ranks)
    adapter.planes *= 4  # so that tokens differ
    return adapter

def greedy_loop(logits_of, tokens, n):
    tokens = list(tokens)
    for _ in range(n):
        tokens.append(int(logits_of(torch.tensor(tokens))[-1].argmax()))
    return tokens[-n:]

def close(actual, expected, atol=1e-4):
    assert expected.std() > 0.1
    torch.testing.assert_close(actual.float(), expected, atol=atol, rtol=0)

TARGET = random_model()
COST = CostModel.roofline(TINY, "a10g")

A100 = CostModel.roofline(preset("llama-7b"), "a100")
SMALL = CostModel.roofline(preset("llama-160m"), "a100")
VLLM = bench.Hardware("llama-7b", "a100", system="vllm").cost()  # drafts cost the host time
ADAPTERS = {name: random_adapter(ranks) for name, ranks in {
    "q": {"self_attn.q_proj": 4},
    "ffn": {"mlp.up_proj": 3, "mlp.down_proj": 2, "self_attn.o_proj": 2},
    "all": {"self_attn.q_proj": 2, "self_attn.k_proj": 3, "mlp.gate_proj": 2},
}.items()}
LARGE = random_adapter({"self_attn.q_proj": 20})

@cache
def draft_model():
    """The target with noise. Its drafts are accepted now and then."""
    model = random_model(noise=0.3)
    model.profile = CostModel.roofline(TINY, "h200")  # so that nothing is timed
    return model

def mixed(names=(None,), n=6, **fields):
    return [Request(prompt(3 + 11 * i % 40, i), 4 + 5 * i % 17, names[i % len(names)], **fields)
            for i in range(n)]

@cache
def merged(name):
    model = random_model()
    return model.merge((ADAPTERS | {"large": LARGE})[name]) if name else model

@cache
def naive(tokens, name, n, seed=0, *settings):
    """n tokens by the oracle, an adapter merged. settings: temperature, top_k, top_p of samples"""
    model = merged(name)
    if not settings:
        return greedy_loop(model.logits, tokens, n)
    tokens = list(tokens)
    for _ in range(n):
        logits = model.logits(tokens)[-1:]
        p = kernels.probabilities(logits, *torch.tensor([settings]).T)
        u = sarathi.uniform([(seed, len(tokens))], sarathi.TOKEN)
        tokens.append(int(kernels.sample(p, u.to(p.device))))
    return tokens[-n:]

def check_tokens(requests):
    for r in requests:
        sampling = (r.seed, r.temperature, r.top_k, r.top_p) if r.temperature > 0 else ()
        assert r.output == naive(tuple(r.prompt), r.adapter, r.max_new_tokens, *sampling)

def start(model, requests, scheduler="sarathi", adapters=ADAPTERS, **options):
    engine = Engine(model, scheduler, record=[], **options)
    for name, source in adapters.items():
        engine.add_adapter(name, source)
    for request in requests:
        engine.add(request)
    return engine

def serve(*args, **options):
    """Serve requests. -> the engine, with its record and its events"""
    engine = start(*args, **options)
    engine.seen = []
    while engine.requests:
        engine.seen += engine.step()
    return engine

def rows_of(engine, place):
    """For each iteration one field of its feeds: 0 the request's id, 1 n_past, 2 rows, 3 logits"""
    return [[(feed.request.id, *feed[1:])[place] for feed in iteration.feeds]
            for iteration in engine.record]

def n_preempted(engine):
    """How often a request's first token was fed again"""
    fed = [feed.request for iteration in engine.record for feed in iteration.feeds
           if feed.n_past == 0]
    return len(fed) - len(set(fed))

def pools_of(engine):
    """{pool: its pages}; one pool may be both"""
    memory = engine.memory
    return {memory.adapter_pool: engine.adapter_pages, memory.pool: engine.n_page}

def check_pages(engine):
    """A page is free or has one owner: a running request, all of them, or a loaded adapter."""
    owners = set()
    for pool, n_page in pools_of(engine).items():
        pages = sorted(np.concatenate([pool.free, *pool.tables.values()]))
        assert pages == [*range(pages[0], pages[0] + n_page)]
        owners |= {owner for owner, pages in pool.tables.items() if len(pages)}
    running = set(engine.running)
    loaded = set(engine.memory.loaded)
    assert running <= owners <= running | loaded
    known = {r.lora_weights for r in engine.requests.values()} | {*engine.adapters.values()}
    assert loaded <= known  # others were replaced or removed
    for adapter, pages, _ in getattr(engine.runner, "in_flight", {}).values():
        assert [*engine.memory.adapter_pool.tables[adapter]] == pages
    users = engine.memory.n_pins
    assert users.total() == sum(request.lora_weights in loaded for request in running)
    for request in running:
        adapter = request.lora_weights
        assert adapter is None or adapter in loaded or not adapter.n_page
        n = len(engine.memory.pool.tables[request])
        assert n == request.max_len if engine.alloc == "reserve" else n >= request.n_past

class Linear(CostModel):
    """1 ms for each token, so that all chunks are nearly as good for autopilot"""
    ms_per_token = 1.0

    def parts(self, stats, lora):
        # an array would be the same object in all times
        return np.array(1e-3 * self.ms_per_token * stats.n_tokens), 0.0, 0.0, 0.0

class SlowCopies(sarathi.ModelRunner):
    """A copy lands when it is waited for, or else nine iterations later, whatever is there then."""
    def __init__(self, engine, model):
        super().__init__(engine, model)
        self.n = 0  # iterations
        self.in_flight = {}  # copy -> its adapter, its pages, when it was begun

    def copy_adapter(self, adapter, pages):
        pages = list(pages)
        copied = partial(adapter.write, self.kv, pages)
        self.in_flight[copied] = adapter, pages, self.n
        return copied

    def wait_for(self, copied):
        if self.in_flight.pop(copied, None):
            copied()

    def wait(self):
        for copied in [*self.in_flight]:
            self.wait_for(copied)

    def compute(self, batch):
        self.n += 1
        for copied, (_, _, start) in [*self.in_flight.items()]:
            if self.n - start >= 9:
                self.wait_for(copied)
        return super().compute(batch)

def fake_graphs(monkeypatch):
    """From now on runners record CUDA graphs. A replay computes again what was recorded, with the
    same weights, and the outputs of all other graphs become NaN, since they share memory.
    -> a list that gets the tokens of each iteration without a graph"""
    if IS_TORCH:
        pytest.skip("no GPU has graphs of the definitions, which keep lists of segments")
    calls = weakref.WeakKeyDictionary()  # graph -> model, its weights, batch, cache, logits
    recording = []
    eager = []
    forward = GPT.forward
    write = kernels.Batch.write
    init = sarathi.ModelRunner.__init__

    class Graph:
        @torch.inference_mode()
        def replay(self):
            model, weights, batch, kv, logits = calls[self]
            for _, _, other, _, others in calls.values():
                others.fill_(math.nan)
                other.hidden.fill_(math.nan)
            with monkeypatch.context() as patch:
                patch.setattr(model, "weights", weights)
                logits.copy_(forward(model, batch, kv))

    @contextmanager
    def record(graph, pool):
        assert not gc.isenabled()  # it could destroy another graph, which ends a recording
        recording.append(graph)
        yield

    def recorded_forward(model, *args):
        logits = forward(model, *args)
        if not recording:
            eager.append(len(args[0].tokens))
            return logits
        logits = logits.clone()
        calls[recording.pop()] = model, model.weights, *args, logits
        return logits

    def init_with_graphs(runner, engine, model):
        init(runner, engine, model)
        runner.graphs = sarathi.make_graphs(runner)

    def checked_write(batch, flat, sizes):
        assert all(x.size <= size for x, size in zip(batch.arrays(), sizes, strict=True))
        return write(batch, flat, sizes)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(GPT, "forward", recorded_forward)
    monkeypatch.setattr(sarathi.ModelRunner, "__init__", init_with_graphs)
    monkeypatch.setattr(sarathi, "check_gpu", lambda *_: None)
    monkeypatch.setattr(sarathi, "runs_triton", lambda *_: True)
    monkeypatch.setattr(kernels.Batch, "write", checked_write)
    return eager

@pytest.fixture
def unwritten_memory_is_nan():
    """In this mode torch fills new tensors with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)

@cache
def weights_of(n):
    """An adapter of n weights"""
    adapter = Adapter(TINY, {})
    adapter.n_params = n
    return adapter

def feed(n_past, n, n_logits, n_weight=0):
    """Of a request of its own. Those with as many adapter weights share the adapter."""
    request = Request([1], lora_weights=weights_of(n_weight) if n_weight else None)
    return Feed(request, n_past, n, n_logits)

# -----------------------------------------------------------------------------
# requests, options and calls: what is refused, and what is served

ODD = [None, True, -1, 0, 1, 3, 61, 0.5, 1.5, 1e-39, 1e300, math.nan, math.inf, 1j, "", "text",
       b"ab", [], [5, 6], {8}, {"a": 1}, [[1]], [None], range(3), np.int8(9), np.arange(4),
       np.ones(2), object]
ODD_IN_REQUESTS = [*ODD, 2**70, torch.tensor([3, 4]), torch.tensor(2), Request]
ODD_IN_ENGINES = [*ODD, "goodput", "ngram", "orca", "sjf", "merge", "grow", sarathi.Sarathi("8")]
SERVED = {  # field of a Request or an Engine -> the odd values that are served, all others are not
    "prompt": "[5,6] {8} range(0,3) [0123] tensor([3,4])", "max_new_tokens": "1 3 61 9",
    "adapter": "None", "temperature": "0 1 3 61 0.5 1.5 1e-39 9", "top_k": "0 1 3 61 9",
    "top_p": "1 0.5", "arrival": "None 0 1 3 61 0.5 1.5 1e-39 9", "seed": "None 0 1 3 61 9",
    "notes": "{'a':1}", "stop": "None True -1 0 1 3 61 b'ab' [] [5,6] {8} range(0,3) 9 [0123] "
                                f"{2**70} tensor([3,4])",
    "scheduler": "orca", "chunk": "1 3 61 9", "max_batch": "0 1 3 61 9", "n_page": "0 61",
    "alloc": "grow", "draft": "None ngram", "spec": "None 1 3 61 9 goodput",
    "alpha": "0 1 0.5 1e-39", "order": "None 0 [] sjf", "lora": "merge",
    "adapter_pages": "0 61 9"}
FIELDS, OPTIONS = [*SERVED][:10], [*SERVED][10:]  # of a Request, of an Engine

def as_text(values):
    return " ".join(filter(None, (str(value).replace(" ", "") for value in values)))

def test_odd_requests_are_refused_or_served(monkeypatch):
    """A refusal is one line. What is accepted ends, and harms no good neighbour."""
    rng = random.Random(SEED)
    engine = start(TARGET, [], max_batch=8, n_page=300, alloc="grow", draft=draft_model())
    monkeypatch.setattr(engine, "clock", sarathi.VirtualClock())
    good = mixed([None, "q"], 12)
    odd = {}
    for name, value in product(FIELDS, ODD_IN_REQUESTS):
        fields = dict(prompt=prompt(rng.randint(1, 20)), max_new_tokens=rng.randint(1, 4),
                      temperature=rng.choice([0.0, 1.0]), adapter=rng.choice([None, "ffn"]))
        odd[Request(**fields | {name: value})] = name, value
    for request in rng.sample([*good, *odd], len(good) + len(odd)):
        try:
            engine.add(request)
        except (ValueError, KeyError) as error:
            del odd[request]
            assert "\n" not in str(error)
    engine.run()
    check_tokens(good)
    check_pages(engine)
    for request in odd:
        assert request.state in ("length", "stop")
        assert all(type(token) is int for token in request.output)
    for name in FIELDS:
        served = as_text(value for field, value in odd.values() if field == name)
        assert served == SERVED[name], name

@each("name", OPTIONS)
def test_odd_options_are_refused_or_serve(name):
    served = []
    for value in ODD_IN_ENGINES:
        requests = mixed((None, "q"), 3)
        options = dict(n_page=300, max_batch=3, draft="ngram", cost=COST) | {name: value}
        try:
            engine = start(TARGET, requests, **options)
        except (ValueError, KeyError) as error:
            assert "\n" not in str(error)
            continue
        engine.run()
        served.append(value)
        if name != "alpha":  # the output depends on it
            check_tokens(requests)
    assert as_text(served) == SERVED[name]

@each("options, name, most", [
    ({}, None, 159), (dict(n_page=80), "ffn", 60),
    (dict(n_page=80, adapter_pages=45), "ffn", 79), (dict(adapter_pages=18), "ffn", 0)], ids=str)
def test_the_longest_request_that_fits_is_served(options, name, most):
    """A prompt of one token"""
    engine = start(TARGET, [], max_batch=1, **options)
    with pytest.raises(ValueError, match="exceeds the context of 160|must be in"):
        engine.add(Request([1], most + 1, name))
    assert not most or len(engine.generate([[1]], most, name)[0]) == most

WRONG = {  # a part of the line -> a call of a function, or of an engine with two requests
    "attention_bias = True: is not in .* 'qwen2'": lambda _: GPT.save_pretrained(
        Mock(config=replace(QWEN3, family="qwen2"), dtype=float32), "folder"),
    "tp = 3 needs 3 processes, there are 1: torchrun": lambda _: World.start(3),
    "tp = 8 does not divide n_kv_head = 4": lambda _: TINY.shard_of(0, 8),
    "alpha = 0: a simulator": lambda _: Engine(COST, draft="ngram"),
    "model = 'llama-7b': must be": lambda _: Engine("llama-7b"),
    "draft = .*: must be ngram, a CostModel or":
        lambda _: Engine(COST, draft=TARGET, alpha=0.5),
    "no probabilities": lambda _: Engine(COST, draft=COST, spec="confidence", alpha=0.6),
    "temperature = 0.7: with a forced alpha": lambda _: Engine(TARGET, alpha=0.5).add(
        Request([1], temperature=0.7)),
    "vocabulary of the draft model = 7: must be in 46 .. 76": lambda _: Engine(
        TARGET, draft=GPT.from_preset(replace(TINY, vocab_size=7), float32)),
    "spec = 3: needs a draft": lambda _: Engine(TARGET, spec=3),
    "token = 61: must be in 0 .. 60": lambda engine: engine.generate([[1], [1, 61]]),
    "tokens in the prompt = 0": lambda engine: engine.generate([[1], []]),
    "names in adapter = 1": lambda engine: engine.generate([[1], [2]], adapter=["ffn"]),
    "id = 0: add a Request only once": lambda engine: engine.add(engine.requests[0]),
    "99": lambda engine: engine.abort(99),
    "rank = 0": lambda engine: engine.add_adapter("lost", 0),
    "'empty': .*have weights": lambda engine: engine.add_adapter("empty", Adapter(TINY, {"qk": 4})),
    "'deep': .*made for this model": lambda engine: engine.add_adapter(
        "deep", Adapter.random(replace(TINY, n_layer=3), {"mlp.down_proj": 2})),
    "unknown adapter 'lost': one of q": lambda engine: engine.remove_adapter("lost"),
    "Request.id=1.* is not running": lambda engine: engine.preempt(engine.waiting[0]),
}

@each("message", WRONG)
def test_a_wrong_call_is_one_line_and_harms_no_other(message):
    requests = [Request([5, 6], 2, "ffn"), Request([7, 8, 9], 2, "q")]
    engine = start(TARGET, requests, max_batch=1, n_page=80)
    engine.step()
    with pytest.raises((ValueError, KeyError, sarathi.UserCodeError), match=message) as raised:
        WRONG[message](engine)
    assert "\n" not in str(raised.value) and [*engine.requests.values()] == requests
    engine.run()
    check_tokens(requests)

def test_events_stop_tokens_and_times():
    """The first token comes without drafts. Drafts after a stop token are not accepted."""
    tokens = naive(tuple(prompt(25)), None, 12)
    n = next(n for n in range(3, 8) if tokens[n - 1] not in tokens[:n - 1])
    last = tokens[n - 1]
    stopped = tokens[:n], "stop", 7, n - 1  # output, state, drafts, accepted ones
    cases = (last, stopped), ({last}, stopped), (None, (tokens, "length", 9, 9))
    for stop, (output, state, n_drafted, n_accepted) in cases:
        request = Request(prompt(25), 12, stop=stop)
        engine = serve(TARGET, [request], draft=TARGET, spec=7)
        assert request.output == sum([event.tokens for event in engine.seen], []) == output
        ends = [event.finished for event in engine.seen if event.finished]
        assert ends == [request.state] == [state]
        assert len(request.times) == len(output) and request.times == sorted(request.times)
        assert engine.speculator.n_drafted == n_drafted and engine.speculator.acceptance > 0.7
        assert engine.speculator.n_accepted == n_accepted
        assert engine.step() == []

def test_generate_ends_with_its_requests():
    """Another one comes years later. step() does not wait for it. stop may be read once."""
    engine = start(TARGET, [Request([1], arrival=1e8)])
    whole, = engine.generate([prompt(5)], 16)
    assert len(whole) == 16 and engine.step() == []
    output, = engine.generate([prompt(5)], 16, stop=iter(whole[8:9]))
    assert output == whole[:whole.index(whole[8]) + 1]

def test_requests_start_when_they_arrive():
    requests = [Request([0] * 9, 3, arrival=t) for t in (5.0, 2.0, 900.0)]
    engine = start(COST, requests, "orca")
    engine.run()
    starts = [(iteration.feeds[0].request.id, iteration.start) for iteration in engine.record]
    assert starts[::3] == [(1, 2.0), (0, 5.0), (2, 900.0)]
    with pytest.raises(ValueError, match="on the engine's clock = 2.0: must be .* 900"):
        engine.add(Request([0] * 9, 3, arrival=2.0))  # the same cell of a notebook, run again
    engine.add(Request([0] * 9, 3, arrival=engine.record[-1].start))  # a router's

# -----------------------------------------------------------------------------
# the engine: pairwise cases against a naive loop, random programs, users' code

def careless(waiting, running, now):
    """An order may change the lists that it gets."""
    ordered = waiting[::-1]
    waiting.clear()
    running.clear()
    return ordered

@dataclasses.dataclass
class Tagged(Request):
    tag: str = ""

FACTORS = {
    "scheduler": list(SCHEDULERS),
    "chunk": [5, 16, 100],
    "alloc": ["reserve", "grow"],
    "n_page": [75, 90],
    "adapters": [(None,), (None, "q"), (None, "q", "ffn", "all")],
    "draft": [None, "ngram", "model"],
    "spec": [2, "goodput_request", "confidence"],
    "temperature": [0.0, 1.0],  # of a neighbour
    "abort": [0, 4],  # step in which a neighbour is aborted, if not 0
    "lora": ["batched", "bmm", "merge"],
    "adapter_pages": [0, 45],
    "order": [careless, fcfs],
    "graphs": [False, True],
}

def pairwise_cover(factors):
    """Cases {name: value} that hold each pair of values: the best of random ones until all do"""
    rng = random.Random(SEED)
    missing = set()
    for (i, first), (j, second) in combinations(enumerate(factors.values()), 2):
        missing |= set(product(product([i], first), product([j], second)))
    cases = []
    while missing:
        candidates = [tuple(map(rng.choice, factors.values())) for _ in range(100)]
        covered = [missing.intersection(combinations(enumerate(c), 2)) for c in candidates]
        best = max(range(100), key=lambda i: len(covered[i]))
        cases.append(dict(zip(factors, candidates[best])))
        missing -= covered[best]
    return cases

def test_greedy_tokens_equal_the_naive_loop(unwritten_memory_is_nan, monkeypatch):
    """And the caches are freed when an engine ends, without Python's collector."""
    preemptions = Counter()  # scheduler -> how often
    accepted = Counter()  # drafts
    caches = weakref.WeakSet()
    new_cache = GPT.new_cache

    def remembered(*args):
        caches.add(cache := new_cache(*args))
        return cache
    monkeypatch.setattr(GPT, "new_cache", remembered)
    for case in pairwise_cover(FACTORS):
        with reproducible(case), monkeypatch.context() as patch:
            engine = serve_case(**case, patch=patch)
            preemptions[case["scheduler"]] += n_preempted(engine)
            if engine.speculator:
                accepted[case["scheduler"]] += engine.speculator.n_accepted
            gc.disable()
            del engine
            n_left = len(caches)
            gc.enable()
            assert n_left == 0
    assert sum(n > 0 for n in preemptions.values()) >= 5 and min(accepted.values()) > 0

def serve_case(adapters, draft, spec, temperature, abort, graphs, patch, **options):
    eager = None  # tokens of iterations without a graph
    if graphs and DEVICE == "cpu" and not IS_TORCH:
        eager = fake_graphs(patch)
        patch.setattr(sarathi, "TILE", 16)
        patch.setattr(sarathi, "LORA_ROWS", (8, 16))
        patch.setattr(sarathi.CudaGraphs, "MANY", 4)
    requests = mixed(adapters)
    aborted = Tagged(prompt(11), 20, adapters[-1])
    # a copy shares nothing that the engine changes, and they are compared as objects
    neighbour = replace(aborted, temperature=temperature)
    if draft == "model":
        draft = draft_model()
    engine = start(TARGET, [aborted, neighbour, *requests], max_batch=4, cost=COST, draft=draft,
                   spec=spec if draft else "off", **options)
    with check_graphs(engine, eager):
        for _ in range(abort):
            engine.step()
        if abort:
            engine.abort(aborted.id)
        engine.run()
    check_pages(engine)
    check_tokens(requests + [neighbour] * (neighbour.temperature == 0))
    assert len(neighbour.times) == len(neighbour.output)
    assert neighbour.notes is not aborted.notes
    return engine

@contextmanager
def check_graphs(engine, eager):
    """If they are faked: all are recorded by warm(), no more than 24, and serve all iterations of
    up to a chunk. A larger rank replaces those with adapters."""
    if eager is None or engine.lora != "batched":
        assert eager is None or engine.runner.graphs is None
        yield
        return
    engine.warm()
    assert gc.isenabled()
    recorded = [*engine.runner.graphs.graphs]
    # smaller ones find room in the memory of the largest
    assert recorded == sorted(recorded, reverse=True) and len(recorded) <= 24
    eager.clear()
    yield
    assert [*engine.runner.graphs.graphs] == recorded
    assert all(n > engine.chunk for n in eager)
    engine.add_adapter("large", LARGE)
    assert not any(with_adapters for *_, with_adapters in engine.runner.graphs.graphs)
    tokens, = engine.generate([prompt(9)], 3, "large")
    assert tokens == naive(tuple(prompt(9)), "large", 3)

def test_engines_share_a_model_and_parts_of_ones_own():
    """What parts count can be read: they are the first engine's. A class may set its chunk."""
    parts = [sarathi.Orca(), Fair(), sarathi.Goodput(), sarathi.Zeros()]
    one, other = [start(TARGET, [], parts[0], chunk=chunk, lora=lora, order=parts[1],
                        spec=parts[2], draft=parts[3], cost=COST)
                  for chunk, lora in ((64, "batched"), (16, "merge"))]
    own = [one.scheduler, one.order, one.policy, one.speculator.proposer]
    assert all(map(is_, own, parts)) and (one.chunk, other.chunk) == (64, 16)
    assert parts[0].engine.chunk == parts[3].engine.chunk == 64
    for engine in (other, one, other, one):
        requests = mixed((None, "q"), 4)
        for request in requests:
            engine.add(request)
        engine.run()
        check_tokens(requests)
    mine = type("Mine", (sarathi.Sarathi,), {"chunk": 12})
    for scheduler, chunk in ((mine, 12), (mine(7), 7)):
        assert Engine(COST, scheduler, chunk=64).chunk == chunk

def test_merged_weights_follow_a_training():
    model = random_model()
    engine = start(model, [], lora="merge")
    engine.generate([prompt(9)], 8, "q")  # merges
    for weight in model.make_trainable():
        weight.data *= -1
    outputs = engine.generate([prompt(9)], 8, "q")
    assert outputs == start(model, []).generate([prompt(9)], 8, "q")

PARTS = {  # what users write -> its owner in an engine
    "plan": lambda engine: engine.scheduler, "admit": lambda engine: engine.scheduler,
    "order": lambda engine: engine, "n_drafts": lambda engine: engine.speculator.policy,
    "draft": lambda engine: engine.speculator.proposer}

SPOILS = [  # of what a method gives, with an odd value
    lambda right, odd: odd,
    lambda right, odd: [*right[:-1], odd],
    lambda right, odd: [(request, odd) for request, _ in right],  # of a plan
]

SPOILS_ALONE = [
    lambda right: [], lambda right: right[1:], lambda right: 2 * right,
    lambda right: [(request, n + 1) for request, n in right],
    lambda right: [(Request([1]), 1) for _ in right]]

@each("name", PARTS)
def test_a_mistake_in_a_users_code_is_one_line_or_harmless(name):
    """One method gives something else: one line names its class, or all tokens are right."""
    prompts = [prompt(9 + i, i) for i in range(3)]
    right = [naive(tuple(tokens), None, 6) for tokens in prompts]
    ways = [partial(spoil, odd=odd) for spoil in SPOILS[:3 if name == "plan" else 2]
            for odd in [*ODD_IN_REQUESTS, Request([1])]] + SPOILS_ALONE[:5 if name == "plan" else 3]
    n_refused = 0
    for spoil in ways:
        engine = Engine(TARGET, "orca", max_batch=2, n_page=99, draft="ngram", spec=3)
        owner = PARTS[name](engine)
        method = getattr(owner, name)
        setattr(owner, name, lambda *args: spoil([*method(*args)]))
        source = "Orca|<lambda>" if owner is engine else type(owner).__name__
        engine.run_iteration = Mock(side_effect=[DEFAULT] * 50, wraps=engine.run_iteration)
        try:
            assert engine.generate(prompts, 6) == right
        except sarathi.UserCodeError as mistake:
            n_refused += 1
            assert re.fullmatch(f"({source}) .*", str(mistake))
        check_pages(engine)
        assert not engine.requests
    assert n_refused > 50

LOST = {  # message -> model, what spoils the engine
    "Orca or the memory leaves Request.id=0, .* running. out": (COST, lambda engine: setattr(
        engine.scheduler, "admit", lambda running, waiting: engine.running.clear() or waiting)),
    "Orca or the memory preempts Request.id=0, .* without end": (COST, lambda engine: setattr(
        engine.memory, "grow_or_preempt", lambda plan: engine.preempt(engine.running[0]) or [])),
    "Fixed calls price: set needs_price = True": (COST, lambda engine: setattr(
        engine.policy, "n_drafts", lambda *given: given[-1]([1]))),
    "Linear gives nan s for an iteration": (Linear(TINY, float32), lambda engine: setattr(
        engine.model, "ms_per_token", math.nan))}

@each("message", LOST)
def test_users_code_cannot_make_run_hang(message):
    model, spoil = LOST[message]
    engine = start(model, [Request([1] * 4, 3) for _ in range(3)], "orca", max_batch=2, alpha=0.5,
                   draft="ngram", spec=1)
    spoil(engine)
    engine.run_iteration = Mock(side_effect=[DEFAULT] * 3000, wraps=engine.run_iteration)
    with pytest.raises(sarathi.UserCodeError, match=message):
        engine.run()

FORMS = [list, np.array, torch.tensor, tuple, iter, lambda tokens: None]

def test_what_users_code_gives_may_be_arrays():
    """Drafts are right, and in another of the FORMS each time."""
    greedy, sampled = requests = [Request(prompt(20), 30, temperature=t) for t in (0.0, 0.8)]
    engine = start(TARGET, requests, "orca", draft=sarathi.Zeros(), spec=3)
    right = naive(tuple(prompt(20)), None, 30)

    def draft(request, k):
        n = len(request.output)
        return FORMS[len(engine.record) % len(FORMS)](right[n:n + k])
    engine.speculator.proposer.draft = draft
    engine.policy.n_drafts = lambda requests, limits, *_: iter(np.array(limits))
    engine.scheduler.plan = lambda requests: tuple((r, np.int64(r.n_todo)) for r in requests)
    engine.run()
    check_tokens([greedy])
    assert all(type(token) is int for token in sampled.output)
    assert engine.speculator.n_accepted > 9

class Heads(sarathi.Proposer):
    """Drafts by linear heads, as Medusa's: here the model's own head, which is sometimes right."""
    def observe(self, feeds, new_tokens, hidden):
        rows = iter(hidden.split(1))
        for request, _, _, n_logits in feeds:
            own = [next(rows) for _ in range(n_logits)]
            if own:  # that of the last token which is right
                request.notes["hidden"] = own[len(new_tokens[request]) - 1].clone()

    def draft(self, request, k):
        head = self.engine.runner.model.weights["head.weight"]
        return kernels.linear(request.notes["hidden"], head)[0].topk(k).indices

@each("graphs", [False, True])
def test_parts_may_be_ones_own_and_drafts_of_hidden_states(graphs, monkeypatch):
    if graphs:
        fake_graphs(monkeypatch)
    requests = mixed([None, "q", "ffn"])
    parts = SlowCopies, type("Mine", (sarathi.Speculator,), {})
    engine = serve(TARGET, requests, draft=Heads(), spec=6, runner=parts[0], speculator=parts[1],
                   alloc="grow", n_page=120)
    check_tokens(requests)
    assert (type(engine.runner), type(engine.speculator)) == parts
    assert engine.speculator.n_accepted > 0 and engine.speculator.n_drafted > 50

@each("options", [{}, dict(draft="ngram", spec=3)], ids=str)
def test_nan_and_infinity_end_their_requests_alone(options):
    """A token has an embedding that overflows, or is NaN; the request with it ends, no other."""
    model = GPT.from_preset(TINY, torch.float32, seed=1)
    for value, temperature in product((math.nan, math.inf), (0.0, 0.8)):
        model.weights["embedding.weight"][60] = value
        prompts = [1, 2, 60, 3], [1, 2, 3], [5, 6]
        broken, *others = [Request(tokens, 9, temperature=temperature, seed=5)
                           for tokens in prompts]
        engine = start(model, [broken, *others], **options)
        with pytest.raises(FloatingPointError, match="NaN or infinity in the logits of request 0"):
            engine.run()
        engine.run()
        check_pages(engine)
        assert broken.state == "aborted" and not broken.output
        assert [len(request.output) for request in others] == [9, 9]
        if not options or not temperature:
            alone = Engine(model).generate(prompts[1:], 9, temperature=temperature, seed=5)
            assert alone == [request.output for request in others]

def test_threads_take_turns():
    """Four threads generate, one adds and aborts, the main one steps. Each reaches its end."""
    engine = start(TARGET, [], n_page=300, max_batch=4, chunk=16, alloc="grow")
    ended = []

    def generate(seed):
        for i in range(6):
            tokens = prompt(3 + 4 * i, seed)
            assert engine.generate([tokens], 5) == [naive(tuple(tokens), None, 5)]
        ended.append(seed)

    def abort():
        for _ in range(30):
            id = engine.add(Request(prompt(9), 50))
            engine.abort(id)
        ended.append("abort")
    threads = [Thread(target=generate, args=(seed,)) for seed in range(4)] + [Thread(target=abort)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        engine.step()
    assert len(ended) == 5 and not engine.requests and not engine.step()
    check_pages(engine)

def test_an_adapter_stays_while_a_request_is_added(monkeypatch):
    """Another thread removes it after the request was checked."""
    engine = start(TARGET, [])
    thread = Thread(target=engine.remove_adapter, args=["ffn"])
    check = sarathi.check_request

    def slow_check(*args):
        check(*args)
        thread.start()
        thread.join(0.2)
    monkeypatch.setattr(sarathi, "check_request", slow_check)
    request = Request(prompt(9), 5, "ffn")
    engine.add(request)
    thread.join()
    engine.run()
    check_tokens([request])

class Program:
    """Random calls of a user on an engine, each interrupted at a random line. Afterwards requests,
    lists and pages agree, and no event follows an abort. The adapter that is evicted was idle
    longest. In the end each request has the tokens of the weights with which it was added, and
    nothing keeps replaced adapters."""
    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        draft = rng.choice([None, "ngram", draft_model()])
        self.engine = start(
            TARGET, [], rng.choice([*SCHEDULERS][:5]), n_page=55, adapter_pages=rng.choice([0, 30]),
            max_batch=3, chunk=10, alloc=rng.choice(["grow", "reserve"]), draft=draft,
            lora=rng.choice(["batched", "batched", "merge"]), spec=2 if draft else "off", cost=COST,
            runner=rng.choice([None, SlowCopies]))
        self.sources = {name: name for name in (None, *ADAPTERS)}  # name -> its newest weights
        self.added = {}  # request -> its weights
        self.aborted = set()
        self.versions = weakref.WeakSet()  # of adapters
        self.unpinned = weakref.WeakKeyDictionary()  # keys: adapters, the last one used last
        self.n_evicted = 0
        self.spoil(self.engine)

    def spoil(self, engine):
        """Let the user's parts preempt now and then, and interrupt what an engine does alone."""
        before(engine.scheduler, "admit", self.preempt)
        before(engine, "order", self.preempt)
        if engine.speculator:
            before(engine.policy, "n_drafts", self.preempt)
            for name in ("draft", "observe"):
                before(engine.speculator.proposer, name, self.preempt)
        before(engine.memory, "unpin", self.note_unpinned)
        before(engine.memory, "evict", self.check_evicted)
        exclusively = engine.exclusively
        engine.exclusively = lambda *call: exclusively(self.interrupt, *call)

    def preempt(self, *_):
        if len(self.engine.running) > 1 and self.rng.random() < 0.05:
            self.engine.preempt(self.rng.choice(self.engine.running))

    def note_unpinned(self, owner):
        if owner:
            self.unpinned[owner] = self.unpinned.pop(owner, True)  # now it is the last one

    def check_evicted(self, pool, owner):
        if owner in self.engine.adapters.values():  # it was not replaced
            idle = {*self.engine.memory.idle} & pool.tables.keys()
            assert owner is next(other for other in self.unpinned if other in idle)
            self.n_evicted += 1

    def interrupt(self, function, *arguments):
        outer = sys.gettrace()
        sys.settrace(self.watch)
        try:
            return function(*arguments)
        finally:
            sys.settrace(outer)

    def watch(self, frame, kind, _):
        if frame.f_code.co_filename == sarathi.__file__:
            self.n_left -= kind == "line"
            rare = frame.f_code.co_name == "append" and self.rng.random() < 0.01  # of few lines
            if kind == "line" and (self.n_left == 0 or rare):
                raise KeyboardInterrupt
            return self.watch

    def hand_on(self, event):
        assert event.request not in self.aborted
        if self.rng.random() < 0.05:
            raise KeyboardInterrupt
        if self.rng.random() < 0.05 and event.request.id in self.engine.requests:
            self.abort(event.request)

    def add(self):
        tokens = prompt(self.rng.choice([3, 9, 20]), self.rng.randrange(3))
        request = Request(tokens, self.rng.randint(1, 12), self.rng.choice([*self.sources]))
        self.added[request] = self.sources[request.adapter]
        self.engine.add(request)

    def abort(self, request=None):
        """One request, or all"""
        requests = [request] if request else [*self.engine.requests.values()]
        self.engine.abort(request and request.id)
        self.aborted.update(requests)

    def generate(self):
        tokens = prompt(7)
        assert self.engine.generate([tokens], 3) == [naive(tuple(tokens), None, 3)]

    def add_adapter(self):
        name = self.rng.choice([*ADAPTERS, "a", "b"])
        self.sources[name] = self.rng.choice([*ADAPTERS])
        self.engine.add_adapter(name, copy(ADAPTERS[self.sources[name]]))
        self.versions.add(self.engine.adapters[name])

    def remove_adapter(self):
        name = self.rng.choice([*self.sources][1:])
        del self.sources[name]
        self.engine.remove_adapter(name)

    def call(self):
        """Anything that may be called now; the more often it is listed, the more likely"""
        engine = self.engine
        calls = [engine.step_or_wait] * 6 + [self.add] * 4 + [self.add_adapter] * 2
        calls += [partial(engine.run, self.hand_on), self.generate]
        if engine.requests:
            calls.append(partial(self.abort, self.rng.choice([*engine.requests.values()])))
            calls += [self.abort] * (self.rng.random() < 0.1)
        if engine.running:
            calls.append(partial(engine.preempt, engine.running[-1]))
        if len(self.sources) > 1:
            calls.append(self.remove_adapter)
        # lines to the interruption; with 0 there is none
        self.n_left = self.rng.randint(0, self.rng.choice([0, 0, 50, 1000]))
        with suppress(KeyboardInterrupt):
            self.rng.choice(calls)()
        self.n_left = 0
        lists = engine.pending + engine.waiting + engine.running
        assert sorted(request.id for request in lists) == sorted(engine.requests)
        assert {*lists} <= {*self.added}  # those of generate have left
        assert all(len(request.times) == len(request.output) for request in lists)
        check_pages(engine)

    def check_outputs(self):
        for request, source in self.added.items():
            expected = naive(tuple(request.prompt), source, 12)
            n = len(request.output)
            assert request.output == expected[:n]
            # waiting: its add() was interrupted
            assert n == request.max_new_tokens or request.state in ("aborted", "waiting")

    def check_freed(self):
        engine = self.engine
        engine.generate([[1]], 4)  # the last iteration has no other request
        for container in (self.added, self.aborted, engine.record):
            container.clear()
        assert {*self.versions} <= {*engine.adapters.values()}
        for pool, n_page in pools_of(engine).items():
            assert pool.tables.keys() <= engine.memory.loaded.keys()
            assert engine.memory.make_room(pool, n_page)  # adapters are idle
        assert not engine.memory.n_pins  # it would keep replaced adapters in memory

def before(owner, name, action):
    """Let a method call an action first."""
    method = getattr(owner, name)

    def call(*args):
        action(*args)
        return method(*args)
    setattr(owner, name, call)

@each("seed", range(4))
def test_random_programs_with_exceptions(seed):
    n_preemption = n_evicted = 0
    for n in range(20 * seed, 20 * seed + 20):
        with reproducible("program", n + 1000 * SEED):
            program = Program(n + 1000 * SEED)
            for _ in range(60):
                program.call()
            program.rng.random = lambda: 1.0  # nothing is interrupted any more
            program.engine.run(program.hand_on)
            n_preemption += n_preempted(program.engine)
            n_evicted += program.n_evicted
            program.check_outputs()
            program.check_freed()
    assert min(n_preemption, n_evicted) > 0

# -----------------------------------------------------------------------------
# schedulers and orders

@each("scheduler, n_draft, n_first, expected", [  # n_draft: of each decode, in the last iteration
    ("static", 0, 100, [1, 1]),
    ("orca", 0, 100, [1, 1, 100, 400]),
    ("prefill_first", 0, 100, [100, 400]),
    ("sarathi", 0, 100, [1, 1, 100]),
    ("sarathi_serve", 0, 100, [1, 1, 100, 154]),
    ("autopilot", 0, 40, [1, 1, 40]),  # 3 % below the most work per second
    ("autopilot", 0, 20, [1, 1, 20, 10]),  # more than that; 32 tokens are a tile
    ("sarathi", 3, 400, [1, 1, 248]),
    ("autopilot", 30, 20, [1, 1, 20, 302]),  # 384 tokens with the drafts
])
def test_what_every_scheduler_plans(scheduler, n_draft, n_first, expected):
    """Tokens of each request in a plan: two decodes run, two prompts wait"""
    engine = Engine(Linear(TINY, float32), scheduler, n_page=1000, draft="ngram", alpha=0.5,
                    spec=max(n_draft, 1))
    decodes = [Request([0] * 9, n_past=8) for _ in range(2)]
    engine.speculator.last_k = {decodes[0]: n_draft}  # the other one is new
    prompts = [Request([0] * n_first), Request([0] * 400)]
    plan = engine.scheduler.plan(decodes + engine.scheduler.admit(decodes, prompts))
    assert [n for _, n in plan] == expected

@each("chunk, n, expected", [(200, 200, 56), (128, 128, 128), (16, 20, 12)])
def test_prompt_tokens_beside_n_decodes(chunk, n, expected):
    """They fill the chunk; only if the decodes alone do, the next tile."""
    assert Engine(COST, chunk=chunk).scheduler.budget([None] * n) == expected

def test_autopilot_keeps_its_target():
    """Half of the time that a request is ahead goes to prompts. After 0.1179 s these are 61 ms, so
    the prompt and three decodes fill a tile of 64 tokens; after 0.1181 s only one of 32. Late
    requests do not count, nor those without a token."""
    engine = Engine(Linear(TINY, float32), sarathi.Autopilot(0.01), n_page=1000)
    engine.clock.t = 0.2
    late = Request([0], 21, output=[0] * 10, n_past=10, times=[0.0])
    for elapsed, n in (0.1179, 61), (0.1181, 29):
        # ahead by 30 * 0.01 - elapsed - 20 * 0.003
        ahead = Request([0], 31, output=[0] * 11, n_past=11, times=[0.2 - elapsed])
        plan = engine.scheduler.plan([late, ahead, Request([0]), Request([0] * 400)])
        assert plan[3][1] == n

@each("order, waiting, running, expected", [  # adapters; upper case: was preempted
    (lcfs, "Abacb", "", "04321"),
    (cluster(2), "Abacb", "b", "01243"),
    (cluster(2, lcfs), "abacb", "cb", "43120"),
    (one_adapter(patience=1), "Abacb", "b", "14"),
    (one_adapter(patience=2), "Abacb", "c", ""),  # the batch runs out
    (sjf(2.5), "abacb", "", "01243"),  # three have waited this long
    (edf(2.5), "abacb", "", "13402"),  # a deadline of its own; two are late
])
def test_orders_of_the_queue(order, waiting, running, expected):
    requests = [Request([0], n, name.lower(), arrival=float(i), id=i, output=[7] * name.isupper())
                for i, (n, name) in enumerate(zip((5, 2, 9, 4, 0), waiting))]
    requests[1].notes["ttft"] = 4.25
    others = [Request([0], adapter=name) for name in running]
    ordered = order(requests, others, 5.0)
    assert "".join(str(request.id) for request in ordered) == expected

def test_a_fair_order_serves_clients_alike():
    """Clients that always wait get equally many tokens, whatever the lengths of their requests. A
    preempted request counts once. A client that comes later gets nothing for the time before."""
    rng = random.Random(SEED)
    order = Fair()
    waiting = []
    for names in "ab", "abc":
        served = Counter()  # tokens of each client
        for _ in range(60):
            waiting += [Request([0] * length, adapter=name) for _ in range(8)
                        for name, length in zip(names, (600, 200, 400))]
            for request in order([*waiting], [], 0.0)[:8]:
                before = request.n_tokens if request.output else 0
                request.output = request.output + [0] * 25
                request.state = rng.choice(["waiting", "length"])
                served[request.adapter] += request.n_tokens - before
                if request.state == "length":
                    waiting.remove(request)
            assert max(served.values()) - min(served.values()) < 1300
        assert len(served) == len(names)

def test_early_abort():
    """[S-LoRA §4.3, App. B] Of bursts, 213 requests are in time (lcfs: 200, fcfs: 17)."""
    requests = [Request([0] * 900, 1 + job.output // 4, arrival=job.arrival)
                for job in bench.gamma_jobs(16, 40, cv=3)]
    engine = serve(A100, requests, "prefill_first", order=EarlyAbort(2.0), max_batch=8, n_page=5000,
                   alloc="grow")
    assert sum(r.times[:1] <= [r.arrival + 2] for r in requests if r.times) == 213
    ended = Counter((event.request, event.finished) for event in engine.seen if event.finished)
    assert ended == Counter((request, request.state) for request in requests)
    preempted = Request([0], arrival=0.0, output=[7])
    assert EarlyAbort(2.0)([preempted], [], 9.0) == [preempted]  # it is not late

# -----------------------------------------------------------------------------
# memory

@each("options, sizes, ends, n", [
    # the third has no room, and blocks the last
    (dict(n_page=32), [(10, 3), (10, 9), (10, 7), (10, 2)], [0, 1, 3, 2], 0),
    # none starts if a running one lacks a page for its next token; preempted ones go first
    (dict(n_page=41, alloc="grow"), [(10, 10)] * 6, [0, 1, 2, 3, 4, 5], 3),
    # pages of rejected drafts are taken back before a request is preempted
    (dict(n_page=50, alloc="grow", draft="ngram", spec=7, alpha=0.01), [(20, 30), (20, 6)],
     [1, 0], 0),
])
def test_which_requests_wait_and_how_many_are_preempted(options, sizes, ends, n):
    requests = [Request([0] * n_prompt, n_output) for n_prompt, n_output in sizes]
    engine = start(COST, requests, "orca", max_batch=4, **options)
    run = engine.run()
    assert [request.id for request in run.requests] == ends
    assert run.n_preempted == n_preempted(engine) == n

@each("n_page, n_hidden", [(20000, 56), (3500, 14)])  # all copies but the first four
def test_adapters_of_the_queue_are_copied_while_others_run(n_page, n_hidden):
    """[S-LoRA §5.2] In its order. In a small pool what was copied stays: no copy is repeated."""
    seconds = []
    for n_prefetch in (32, 0):
        requests = [Request([0] * 400, 20, name) for name in range(60)]
        ranks = dict.fromkeys(range(60), 64)
        engine = start(A100, requests, "orca", ranks, max_batch=4, n_page=n_page,
                       order=lambda waiting, *_: waiting[::-1])
        engine.memory.n_prefetch = n_prefetch
        engine.runner.copy_adapter = Mock(wraps=engine.runner.copy_adapter)
        engine.run()
        seconds.append(engine.now)
        assert engine.runner.copy_adapter.call_count == 60
    copy = 2 * engine.adapters[0].n_params / 24e9  # bytes over those per second
    assert seconds[1] - seconds[0] == approx(n_hidden * copy, rel=0.05)
    ends = [engine.runner.copy_adapter(engine.adapters[0], []) for _ in range(3)]
    assert ends[2] == approx(engine.now + 3 * copy)  # after the two others

def test_the_pool_has_room_for_an_ordinary_adapter():
    """For rank 256 and whole contexts. A draft model's cache has as many pages as the target."""
    config = preset("tinyllama-1.1b")
    cost = CostModel.roofline(config, "a10g")
    n_page = 3 * 2048
    assert Engine(cost, max_batch=3, adapter_pages=7).n_page == n_page
    n_page += Adapter(config, dict.fromkeys(config.modules, 256)).n_page
    assert Engine(cost, max_batch=3).n_page == n_page
    engine = Engine(A100, draft=SMALL, alpha=0.5, max_batch=0, adapter_pages=7)
    free = A100.memory - SMALL.n_bytes
    assert engine.n_page == int(free // (A100.page_bytes + SMALL.page_bytes)) - 7
    assert engine.max_batch == engine.n_page // A100.config.block_size

@each("scheduler, lora", [("sarathi", "batched"), ("prefill_first", "batched"),
                          ("sarathi", "merge")])
def test_the_cache_leaves_room_for_iterations(scheduler, lora, monkeypatch):
    """prefill_first may feed as much as the cache holds; merged weights lie beside the others."""
    monkeypatch.setattr(GPT, "free_memory", lambda *_: 1e8)
    n = Engine(TARGET, scheduler, chunk=64, max_batch=1000, lora=lora).n_page
    used = n * TINY.page_bytes(4) + 2 * TARGET.iteration_bytes(1064, 1000)
    used += TINY.n_params * 4 * (lora == "merge")
    used += TARGET.iteration_bytes(n, 0) * (scheduler == "prefill_first")
    assert used == approx(1e8, rel=1e-3)

# -----------------------------------------------------------------------------
# drafts

@each("text, k, expected", [
    ("abcd", 3, ""),
    ("abxabyab", 3, "yab"),  # the last time
    ("1abx2aby1ab", 1, "x"),  # three tokens are better than two
    ("abcab", 8, "cabcabca"),  # what followed, again and again
    ("aaaa", 3, "aaa"),
])
def test_prompt_lookup(text, k, expected):
    drafts = sarathi.Ngram().draft(Request([*map(ord, text)]), k)
    assert "".join(map(chr, drafts)) == expected

@each("policy, alpha, per_draft, expected", [
    (sarathi.Goodput(), 0.7, 0.0, [7, 2]),
    (sarathi.Goodput(), 0.5, 0.2, [1, 1]),
    (sarathi.Goodput(), 0.7, 1.0, [0, 0]),
    (sarathi.GoodputGlobal(), 0.7, 0.1, [4, 2]),  # by both iterations, alone 3
    (sarathi.GoodputRequest(), 0.2, 0.08, [2, 1]),  # rates of their own: 0.5 and none
    (sarathi.Oracle(1.0), 0.1, 0.05, [7, 2]),  # it sees that all will be accepted
])
def test_goodput_is_expected_tokens_per_second(policy, alpha, per_draft, expected):
    """[SmartSpec Eq. 8 to 10], after an iteration with free drafts. The second takes two levels."""
    requests = [Request([1], 8, acceptance=0.5, seed=0), Request([1], 3, seed=0)]
    policy.n_drafts(requests, [7, 2], alpha, lambda takers: 1)
    price = Mock(side_effect=lambda takers: 1 + per_draft * sum(takers))
    assert policy.n_drafts(requests, [7, 2], alpha, price) == expected
    price.assert_any_call([2, 2, 1, 1, 1])  # how many take a first draft, a second one ...

def test_confidence_stops_after_unsure_drafts():
    n_drafted = []
    for spec in ("goodput", "confidence"):
        requests = mixed()
        engine = serve(TARGET, requests, cost=A100, draft=draft_model(), spec=spec)
        check_tokens(requests)
        n_drafted.append(engine.speculator.n_drafted)
    assert 0 < n_drafted[1] < 0.9 * n_drafted[0]

@each("block_size", [160, 32, 8])
def test_a_draft_models_cache_follows_the_targets(block_size):
    """A forced acceptance rate lets wrong drafts into the output. The draft model is the target, so
    all are right, also after rejections, preemptions and chunks. Its context may be shorter."""
    requests = mixed(n=9)
    draft = random_model(replace(TINY, block_size=block_size))
    draft.forward = Mock(side_effect=draft.forward)
    engine = serve(TARGET, requests, "sarathi_serve", chunk=24, max_batch=4, n_page=90,
                   alloc="grow", draft=draft, spec=3, alpha=0.7)
    check_tokens(requests)
    assert n_preempted(engine)
    assert 0 < engine.speculator.n_accepted < engine.speculator.n_drafted
    fed = [call.args[0].positions.max() for call in draft.forward.call_args_list]
    assert max(fed) < block_size

def test_forced_acceptance_is_like_coins():
    """Other ones for every request, known to an oracle; acceptance rates are estimated."""
    requests = [Request([0] * 5, 121) for _ in range(64)]
    engine = serve(COST, requests, max_batch=34, alpha=0.8, draft="ngram", spec=3)
    n_new = [len(event.tokens) for event in engine.seen]
    assert np.mean(n_new) == approx(1 + 0.8 + 0.8**2 + 0.8**3, rel=0.05)
    assert len({tuple(request.times) for request in requests}) > 60
    rates = [engine.speculator.acceptance, np.mean([request.acceptance for request in requests])]
    assert rates == approx([0.8, 0.8], abs=0.05)
    oracle = serve(COST, mixed(), alpha=0.2, draft="ngram", spec="oracle").speculator
    assert oracle.n_accepted == oracle.n_drafted > 0

@each("draft, spec, B", [("ngram", "goodput", 16), (SMALL, "goodput_request", 4)])
def test_drafts_that_do_not_pay_are_hardly_tried_until_they_do(draft, spec, B):
    """Finding out that they are wrong takes less than 1 % of the time; a draft model is spared the
    prompts, but for 16 of 128 [SmartSpec §5]. That they become right is noticed: later
    requests get more drafts than they have tokens [SmartSpec §4.4]."""
    def serve_jobs(engine, n, rate):
        rng = random.Random(0)
        for _ in range(n):
            engine.add(Request([0] * rng.randint(20, 90), rng.randint(30, 90)))
        engine.alpha = rate
        return engine.run()
    without, engine = (Engine(VLLM, max_batch=B, n_page=B * 200, draft=draft, spec=name, alpha=0.02)
                       for name in ("off", spec))
    engine.speculator.acceptance = 0.02  # it is no news that they are wrong
    engine.speculator.proposer.idle_share = 1.0
    run = serve_jobs(engine, 12 * B, 0.02)
    assert run.seconds < 1.01 * serve_jobs(without, 12 * B, 0.02).seconds
    spared = [request.id for request in run.requests if not request.notes.get("n_past")]
    assert draft == "ngram" or sorted(spared) == [*range(16, 48)]
    serve_jobs(engine, 120, 0.9)
    before = engine.speculator.n_drafted
    serve_jobs(engine, 60, 0.9)
    assert engine.speculator.n_drafted - before > 4000

# -----------------------------------------------------------------------------
# the runner: verification, adapters, graphs, tensor parallelism

@each("source, is_broken", [("ngram", False), (7, False), (10, False), (7, True)])
def test_sampled_speculation_is_lossless(source, is_broken, monkeypatch):
    """Chi-square of the first three tokens of 2,000 equal requests; two tokens have no chance. A
    number: the vocabulary of a draft model; the target's is 8. The broken rule takes the
    probabilities of other tokens, and is noticed."""
    if is_broken:
        monkeypatch.setattr(
            sarathi, "verify", lambda p, q, *others: kernels.verify(p, q.roll(1, 1), *others))
    config = replace(TINY, n_layer=1, n_embd=32, n_inner=48, vocab_size=8, block_size=16)
    model = random_model(config)
    draft = source if source == "ngram" else random_model(
        replace(config, vocab_size=source), noise=1.0)
    engine = Engine(model, "orca", max_batch=350, n_page=350 * 16, spec=2, seed=3, draft=draft)
    tokens = [1, 2, 3, 1, 2, 4, 1, 2]
    outputs = torch.tensor(engine.generate([tokens] * 2000, 4, temperature=3.0, top_k=6))
    cells = torch.zeros(8, 8, 8)
    for a, b in product(range(8), repeat=2):
        logits = model.logits([*tokens, a, b])[-3:] / 3
        worst = logits.topk(6).values[:, -1:]
        p = logits.masked_fill(logits < worst, -torch.inf).softmax(-1)
        cells[a, b] = p[0, a] * p[1, b] * p[2]
    places = outputs[:, :3] @ torch.tensor([64, 8, 1])
    counts = torch.bincount(places, minlength=512)
    expected = 2000 * cells.flatten()
    assert not counts[expected == 0].any()
    enough = expected >= 5
    statistic = ((counts - expected) ** 2 / expected)[enough].sum()
    chance = torch.special.gammaincc(enough.sum() / 2, statistic / 2)
    assert (chance < 1e-7) == is_broken  # a right rule fails once in ten million runs
    assert engine.speculator.n_accepted > 200

@each("scheduler", SCHEDULERS)
def test_sampled_tokens_depend_on_their_seed_alone(scheduler):
    """Also after preemptions. The default is of the engine's seed and the request's id."""
    requests = mixed((None, "q", "ffn"), 6, temperature=2.0)
    for i, request in enumerate(requests):
        request.seed = 2**63 // i if i % 2 else None
        request.top_k = 9 * (i % 2)
        request.top_p = 1 - 0.1 * (i % 3 == 0)
    engine = serve(TARGET, requests, scheduler, chunk=16, max_batch=4, n_page=75, alloc="grow",
                   cost=COST, seed=7)
    assert [request.seed for request in requests[::2]] == [(7 << 24) + i for i in (0, 2, 4)]
    check_tokens(requests)
    assert n_preempted(engine)

def test_random_numbers_differ():
    """Those of each position and use, and of a seed that differs in one bit"""
    seed = random.Random(SEED).getrandbits(64)
    for bit in range(64):
        keys = [*product((seed, seed ^ 1 << bit), range(20), range(3))]
        assert len({sarathi.hash_of(*key) for key in keys}) == len(keys)

def test_requests_with_the_same_adapter_share_its_segments():
    """(first row, rows): side by side. Nine rows of decodes are multiplied like a chunk's."""
    requests = [Request([1] * n, 2, name) for name, n in [
        ("q", 1), (None, 1), ("all", 2), ("q", 8), ("all", 9), ("q", 20)]]
    engine = start(TARGET, requests, "orca", max_batch=20, n_page=2000)
    engine.step()
    runner = engine.runner
    segments = runner.pack(runner.in_order(engine.record[0].feeds)).adapters["qkv_proj"]
    # "all" has q and k
    assert segments.numbers[:, :2].tolist() == 2 * [[10, 2]] + [[0, 9], [12, 20]] + 2 * [[32, 9]]
    assert (segments.n_decode, segments.max_rows) == (2, 20)

def test_a_cache_of_another_dtype(monkeypatch):
    """The definitions serve: kernels would take its bytes for numbers of the model's dtype."""
    new_cache = GPT.new_cache
    monkeypatch.setattr(GPT, "new_cache", lambda *args: new_cache(*args).double())
    requests = mixed((None, "q"), 2)
    serve(TARGET, requests, chunk=16)
    check_tokens(requests)

def test_operators_are_compiled_before_the_clock_starts(monkeypatch):
    library = Mock(side_effect=lambda *_: time.sleep(0.5))
    monkeypatch.setattr(sarathi, "library", library)
    monkeypatch.setattr(sarathi, "backend", lambda kv: "cpp")
    assert Engine(TARGET).now < 0.5
    library.assert_called_once_with(float32, 16)

def test_an_iteration_without_tokens_is_waited_for(monkeypatch):
    """Else a GPU's clock would be too early. Only reset() waits for copies of adapters, too."""
    engine = start(TARGET, [Request(prompt(40), 2)], chunk=16)
    engine.runner.copies = True
    engine.runner.graphs = None
    stream = Mock()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", Mock())
    engine.run()
    assert (stream.synchronize.call_count, torch.cuda.synchronize.call_count) == (2, 0)
    engine.reset()
    assert torch.cuda.synchronize.called

def test_what_has_no_room_in_a_graph_runs_without_one(monkeypatch):
    """Page tables of requests that share a prefix, and more drafts than usual"""
    fake_graphs(monkeypatch)
    engine = Engine(TARGET, n_page=45, max_batch=8)
    requests = [Request([1] * 40, n_past=39) for _ in range(8)]
    engine.memory.pool.tables = dict.fromkeys(requests, array("i", range(40)))
    feeds = sarathi.feeds_of([(request, 1) for request in requests])
    tokens = engine.runner.run(feeds)
    engine.runner.graphs = None
    assert tokens == engine.runner.run(feeds)
    requests = mixed()
    serve(TARGET, requests, max_batch=2, draft=sarathi.Zeros(), spec=20)
    check_tokens(requests)

@each("draft", [None, "ngram"])
def test_sampling_is_loaded_by_warm(draft, monkeypatch):
    """A GPU loads an operator when it is first run."""
    engine = Engine(TARGET, max_batch=2, draft=draft)
    launches = Launches()
    monkeypatch.setattr(sarathi, "verify_sampled", launches.around(sarathi.verify_sampled))
    sarathi.CudaGraphs.warm_sampling(engine.runner)
    warm = {*launches.counts}
    engine.generate([prompt(30)] * 3, 6, temperature=2.0, top_p=0.7, top_k=3)
    assert {*launches.counts} == warm

def test_a_profile_replays_graphs(monkeypatch):
    """In each iteration that it measures, also in one with drafts"""
    fake_graphs(monkeypatch)
    monkeypatch.setattr(kernels.Batch, "to", Mock(side_effect=AssertionError))  # without a graph
    assert sarathi.Profile(random_model(), n=24, budget=9.0).time(100, 200) > 0

@pytest.mark.skipif(not INTERPRETED, reason="test_greedy_tokens_equal_the_naive_loop has more")
def test_graphs_change_no_operator(unwritten_memory_is_nan, monkeypatch):
    fake_graphs(monkeypatch)
    monkeypatch.setattr(kernels, "cores_of", lambda device: (8, 0))
    requests = [Request(prompt(3), 4), Request(prompt(14), 4, "q")]
    serve(TARGET, requests, chunk=16, max_batch=2, draft=sarathi.Zeros(), spec=2)
    check_tokens(requests)

SHARED = [("llama", TARGET), ("gpt2", "ngram"), ("qwen3", None)]  # and the source of drafts

def serve_as_rank_0(engine, folder, world):
    """Serve, with an adapter that is replaced -> outputs; bytes sent for the last one"""
    outputs = engine.generate([prompt(30), prompt(29)], 5, ["odd", None])
    request = Request(prompt(18), 5, "odd")
    engine.add(request)
    engine.step()
    engine.add_adapter("odd", folder)  # while the request runs
    engine.reset()  # it waits again, and the old adapter is copied again
    outputs += request.output, *engine.generate([prompt(18)], 5, "odd")
    engine.remove_adapter("odd")
    engine.add_adapter("last", 64)  # random weights of its name
    n = world.size
    sent = []
    world.all_reduce = lambda x: sent.append(
        2 * (n - 1) * x.nbytes // n) or World.all_reduce(world, x)
    world.all_gather = lambda x: sent.append((n - 1) * x.nbytes) or World.all_gather(world, x)
    outputs += engine.generate([prompt(30)], 6, "last")
    return outputs, sum(sent)

def serve_share(folder, world, name, draft):
    """Serve with a share of a model, or follow rank 0 -> outputs"""
    if name == "qwen3":
        model = GPT.from_preset(QWEN3, float32, seed=4, world=world)
    else:
        model = GPT.from_pretrained(folder / name, world=world)
    odd = random_adapter(dict(zip(model.config.modules, range(1, 40, 5))), model.config)
    engine = start(model, [], adapters={"odd": odd}, chunk=20, n_page=900,
                   draft=None if world.rank else draft)
    outputs = None
    if world.rank:
        engine.runner.worker_loop()
    else:
        outputs, n_bytes = serve_as_rank_0(engine, folder / "adapter" / name, world)
        # B = 35 tokens, h = 128, r = 64, two layers, float32; two all-reduces [S-LoRA §6]
        numbers = (world.size - 1) * (4 * 35 * 128 + 5 * 35 * 64) // world.size
        assert draft or n_bytes == 2 * 4 * numbers
        if world.size > 1:
            engine.runner.broadcast_call("stop")
    with pytest.raises(ValueError, match="rank 0 adds") if world.rank else nullcontext():
        engine.add_adapter(f"of rank {world.rank}", 1)
    return outputs

def run_rank(rank, n, port, folder):
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank),
                       WORLD_SIZE=str(n), LOCAL_RANK=str(rank))
    world = World.start(n)
    for case in SHARED:
        outputs = serve_share(folder, world, *case)
        assert rank or outputs == serve_share(folder, World(), *case)
    if rank == n - 1:
        world.all_reduce = lambda x: os._exit(0)  # it dies, and all others end with an error
    with pytest.raises(RuntimeError):
        serve_share(folder, world, *SHARED[0])

def test_tensor_parallelism(tmp_path, n=4):
    for name, config in dict(llama=TINY, gpt2=GPT2, qwen3=QWEN3).items():
        random_model(config).save_pretrained(tmp_path / name)
        ranks = dict.fromkeys(config.modules, 2)
        random_adapter(ranks, config).save_pretrained(tmp_path / "adapter" / name)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        arguments = n, s.getsockname()[1], tmp_path
    multiprocessing.set_forkserver_preload([__name__])  # one process imports, the others fork it
    method = "spawn" if DEVICE == "cuda" else "forkserver"
    group = torch.multiprocessing.start_processes(run_rank, arguments, n, False, True, method)
    deadline = time.monotonic() + 180  # far more than it takes
    while not group.join(5):
        assert time.monotonic() < deadline, "a rank hangs"

# -----------------------------------------------------------------------------
# the simulator, its costs, and figures

@each("scheduler", SCHEDULERS)
@each("options", [dict(alloc="grow", n_page=75, spec="goodput", alpha=0.6), dict(alpha=0.8)],
      ids=str)
def test_the_simulator_plans_as_the_engine(scheduler, options):
    records = []
    for model, draft in (TARGET, draft_model()), (COST, CostModel.roofline(TINY, "h200")):
        requests = mixed([None, *ADAPTERS], 8, arrival=0.0)
        engine = serve(model, requests, scheduler, chunk=20, max_batch=4, cost=COST, draft=draft,
                       **options)
        records.append([rows_of(engine, place) for place in range(4)])
    assert records[0] == records[1]
    assert engine.speculator.n_accepted
    assert len(options) == 1 or n_preempted(engine)

@each("options", [dict(max_batch=0), dict(scheduler="autopilot"), dict(lora="merge"),
                  dict(draft="ngram", spec="goodput", alpha=0.6)], ids=str)
def test_a_cost_model_of_ones_own_needs_only_parts(options):
    cost = Linear(preset("llama-7b"), bfloat16)
    requests = [Request([1] * 300, 20, adapter="a") for _ in range(8)]
    engine = serve(cost, requests, adapters={"a": 8}, **options)
    seconds = 1e-3 * sum(map(sum, rows_of(engine, 2)))
    assert engine.now == approx(seconds, rel=0.02)
    assert {type(t) for request in requests for t in request.times} == {float}

def test_stats_of_an_iteration():
    """A chunk, a verification of two drafts, a decode. The first and the last share an adapter."""
    actual = A100.stats([feed(100, 64, 1, 10), feed(9, 3, 3, 20), feed(5, 1, 1, 10)])
    assert actual == IterationStats(
        n_tokens=64 + 3 + 1,
        n_logits=1 + 3 + 1,
        decodes=2,
        context=9 + 3 + 5 + 1,
        draft_context=2 * (9 + 3),
        chunks=1,
        pairs=128 * (100 + 64 / 2),  # a whole tile
        chunk_context=100 + 64,
        lora_rows=3 + 1,
        lora_chunks=1,
        lora_params=10 + 20,
        lora_macs=3 * 20 + 10,
        lora_chunk_macs=64 * 10,
    )
    decodes = A100.stats([feed(99, 1, 1, 1000)] * 10)
    assert decodes.with_drafts(30) == A100.stats([feed(99, 4, 4, 1000)] * 10)

def test_a_profile_counts_every_feature_to_its_operator():
    features = [10**i for i in range(1, 14)]  # tokens, logits, six of attention, five of adapters
    parts = sarathi.Profile.parts(Mock(coefficients=[1] * 14), IterationStats(*features), "")
    assert parts == (1 + features[0], sum(features[2:8]), features[1], sum(features[8:]))

def test_a_profile_fits_the_seconds_of_iterations(monkeypatch):
    def seconds(engine, plan):  # made up
        stats = COST.stats(sarathi.feeds_of(plan))
        return 1.0 + 0.01 * stats.n_tokens + 0.001 * stats.context
    monkeypatch.setattr(sarathi, "time_plan", seconds)
    model = random_model(replace(TINY, block_size=256))
    profile = sarathi.Profile(model)
    assert profile.error < 0.02 and min(profile.coefficients) >= 0
    assert profile.time(200, 1000) == approx(4.0, rel=0.05)
    assert Engine(profile).n_page == Engine(model).n_page

def test_data_sheets_are_plausible():
    """One read of a weight pays for 50 to 420 tokens, links are slower than memory."""
    for gpu in sarathi.GPUS.values():
        assert 50 < gpu.flops / gpu.bandwidth < 420
        assert gpu.bandwidth / 40 < gpu.link < gpu.bandwidth / 3

def test_a_gpu_of_a_file(tmp_path):
    path = tmp_path / "mine.json"
    fields = sarathi.GPUS["a100"]._asdict()
    path.write_text(json.dumps(fields))
    assert sarathi.data_sheet(path) == sarathi.GPUS["a100"]
    path.write_text(json.dumps(fields | dict(flops="x")))
    with pytest.raises(ValueError, match="mine.json.*flops"):
        sarathi.data_sheet(str(path))

def test_figures_of_a_run():
    early = Request([0], arrival=1.0, state="length", output=[1, 2, 3], times=[2.0, 3.0, 6.0])
    late = Request([0], 9, arrival=1.0, state="stop", output=[1, 2], times=[8.0, 9.0])
    one = Request([0], 1, arrival=1.0, state="length", output=[1], times=[3.0])  # has no TPOT
    aborted = Request([0], state="aborted", arrival=1.0, n_preempted=2)
    run = sarathi.Metrics([early, late, one, aborted], start=1.0)
    assert run.requests_per_second == 3 / 8 and run.n_preempted == 2 and run.latencies == [5, 8, 2]
    assert run.figures == {
        "requests": 3, "tokens/s": 9 / 8, "output tokens/s": 6 / 8,
        "TTFT p50 ms": 2000, "TTFT p99 ms": approx(6900), "TPOT p50 ms": 1500,
        "TPOT p99 ms": approx(1990), "stall p50 ms": 2000, "stall p99 ms": approx(2980)}
    assert "\n| run | 0        | 0        | 0               | nan " in f"{sarathi.Metrics([], 0.0)}"
    # targets: of each request alone, or of the half and the 99 % of all
    assert run.goodput(6.0) == 2 / 8 and run.attainment(6.0, 2.9) == 1 / 4
    assert run.meets(2.0, 3.0) and not run.meets(1.9, 3.0) and not run.meets(2.0, 2.9)
    assert not sarathi.Metrics([aborted], 0.0).meets()
    first, *_, last = run.rows()
    assert first == dict(arrival=0.0, prompt=1, output=3, adapter=None, state="length",
                         preempted=0, ttft=1.0, tpot=2.0, stall=3.0)
    assert last["stall"] is last["ttft"] is last["tpot"] is None

# -----------------------------------------------------------------------------
# models

@each("config, dtype, atol", [
    (GPT2, float32, 1e-4), (TINY, bfloat16, 0.3), (QWEN3, bfloat16, 0.3)])
def test_forward_equals_the_oracle(config, dtype, atol):
    """All logits of all iterations, drafts included"""
    model = random_model(config, dtype)
    engine = Engine(model, "sarathi_serve", chunk=18, max_batch=4, draft="ngram", spec=4)
    forward = engine.runner.forward
    numbers = []  # of logits of a request

    def checked_forward(feeds):
        feeds, logits, hidden = forward(feeds)
        parts = logits.split([feed.n_logits for feed in feeds])
        for (request, n_past, n, n_logits), rows in zip(feeds, parts):
            if n_logits:
                expected = model.logits(request.tokens(0, n_past + n))
                close(rows, expected[-n_logits:], atol)
                numbers.append(n_logits)
        return feeds, logits, hidden
    engine.runner.forward = checked_forward
    engine.generate([prompt(n, seed=n) for n in (40, 25, 9, 1)], 6)
    assert sum(numbers) >= 24 and max(numbers) > 1

def test_each_part_of_an_iteration_is_marked_when_it_is_done():
    model = random_model()
    marks = []
    model.forward = partial(model.forward, mark=marks.append)
    engine = start(model, [Request([1, 2], 1, "ffn")])
    engine.runner.graphs = None  # a replay calls no forward
    engine.run()
    layer = "others qkv_proj attn o_proj lora others gate_up_proj lora others down_proj lora"
    assert marks == [*layer.split(), *layer.split(), "others"]

def transformers_model(folder, family="llama", shard="5GB", **settings):
    """A random checkpoint, written by transformers -> its model"""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=61,
                 max_position_embeddings=160, initializer_range=0.2, intermediate_size=96,
                 num_key_value_heads=2, head_dim=16, bos_token_id=1, eos_token_id=2)
    config = transformers.AutoConfig.for_model(family, **sizes | settings)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in theirs.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter) * (parameter.dim() == 1)
    theirs.save_pretrained(folder, max_shard_size=shard)
    return theirs

@torch.no_grad()
def logits_by(theirs, tokens):
    """tokens (T,) -> logits (T, V) of a model of transformers"""
    return theirs(torch.as_tensor(tokens)[None]).logits[0]

def edit(folder, tensors=(), prefix="", **settings):
    """Change a folder: tensors (None removes one), their names, by a pattern, and settings."""
    path = min(folder.glob("*config.json"))
    settings = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    path = next(folder.glob("*.safetensors"))
    tensors = load_file(path) | dict(tensors)
    tensors = {re.sub(prefix, "", k): v for k, v in tensors.items() if v is not None}
    save_file(tensors, path, {"format": "pt"})

LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)
HEAD = torch.arange(61 * 64.).view(61, 64).sin()
NOT_USED = """v_head.summary.weight score.weight transformer.h.0.attn.bias
    transformer.h.0.attn.masked_bias model.layers.1.self_attn.rotary_emb.inv_freq"""
CHECKPOINTS = dict(  # settings -> their values; each family ignores some
    num_key_value_heads=[1, 2, 4], head_dim=[16, 64], attention_bias=[False, True],
    mlp_bias=[False, True], rms_norm_eps=[1e-6, 0.1], layer_norm_epsilon=[1e-5, 0.1],
    n_inner=[None, 80], sliding_window=[None, 80, 200], use_sliding_window=[True, True, False],
    max_window_layers=[0, 1, 2], shard=["5GB", "5GB", "30KB"])
EDITS = dict(  # of what transformers has written
    rope=[
        {}, dict(rope_parameters=LLAMA3 | dict(rope_theta=5e5), rope_theta=3.0,
                 original_max_position_embeddings=64),
        dict(rope_parameters=None, rope_theta=5e5, rope_scaling=LLAMA3),
        dict(rope_parameters=None, rope_scaling=dict(type="linear", factor=4.0))],
    windows=[{}, dict(layer_types=None), dict(max_window_layers=2)],
    settings=[{}, dict(model_type=None, hidden_act="swish"),
              dict(rms_norm_eps=None, layer_norm_epsilon=None)],
    names=[{}, dict(prefix="^(model|transformer).")],
    tensors=[
        dict(tensors={name: torch.ones(1) for name in NOT_USED.split()}),
        dict(tensors={"lm_head.weight": HEAD.double()}, tie_word_embeddings=True),
        dict(tensors={"lm_head.weight": None}, tie_word_embeddings=True),
        dict(tensors=dict.fromkeys(("model.embed_tokens.weight", "transformer.wte.weight")),
             tie_word_embeddings=True)])

def random_checkpoint(folder, family, i):
    """i = 0 to 3 take each value once or more, in random company. -> transformers' model"""
    rng = random.Random(f"{family} {SEED}")

    def one(values):
        return rng.sample(values, len(values))[i % len(values)]
    settings = {key: one(values) for key, values in CHECKPOINTS.items()}
    theirs = transformers_model(folder, family, tie_word_embeddings=False, **settings)
    changes = {key: value for values in EDITS.values() for key, value in one(values).items()}
    if settings["shard"] != "5GB":  # there is an index
        changes |= dict(tensors=(), prefix="")
    edit(folder, **changes)
    return type(theirs).from_pretrained(folder)

@each("i", range(4))
@each("family", FAMILIES)
def test_logits_equal_transformers(family, i, tmp_path, capsys):
    theirs = random_checkpoint(tmp_path, family, i)
    capsys.readouterr()
    ours = GPT.from_pretrained(tmp_path)
    kinds = getattr(theirs.config, "layer_types", "sliding_attention" * (family == "mistral"))
    context = 80 if "sliding_attention" in kinds and theirs.config.sliding_window == 80 else 160
    line = f"config.json: sliding_window = {context} limits the context to {context} tokens\n"
    assert (line in capsys.readouterr().err) == (context < 160)
    assert ours.config.block_size == context
    assert ours.config.n_params == sum(p.numel() for p in theirs.parameters())
    tokens = prompt(40)
    expected = logits_by(theirs, tokens)
    close(ours.logits(tokens), expected)
    ours.save_pretrained(tmp_path / "saved")
    assert torch.equal(GPT.from_pretrained(tmp_path / "saved").logits(tokens), ours.logits(tokens))
    saved, problems = type(theirs).from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(problems.values()) and getattr(saved.config, "sliding_window", None) is None
    close(logits_by(saved, tokens), expected)

@each("family", FAMILIES)
def test_settings_left_out_are_transformers_defaults(family, tmp_path):
    transformers = pytest.importorskip("transformers")
    heads = dict(num_attention_heads=64)
    theirs = transformers.AutoConfig.for_model(family, **heads)
    (tmp_path / "config.json").write_text(json.dumps(heads | dict(model_type=family)))
    ours, _ = read_config(tmp_path)
    assert ours.n_kv_head == getattr(theirs, "num_key_value_heads", 12)
    theirs = transformers.AutoConfig.for_model(family, use_sliding_window=True).to_dict()
    theirs |= {"use_sliding_window": False} | (theirs.get("rope_parameters") or {})
    for key, value in FAMILIES[family].items():
        assert value in (None, theirs.get(key)), key

def trained_by_peft(theirs, folder, embeddings=False, **settings):
    """Save an adapter of PEFT that is not zero to a folder, and let PEFT read it -> its model"""
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(theirs, peft.LoraConfig(**settings))
    for name, parameter in wrapped.named_parameters():
        parameter.data += 0.3 * torch.randn_like(parameter) * ("lora_" in name)
    wrapped.save_pretrained(folder, save_embedding_layers=embeddings)
    wrapped.unload()
    return peft.PeftModel.from_pretrained(theirs, folder)

def model_and_adapter(folder):
    """Our logits without and with an adapter"""
    model = GPT.from_pretrained(folder, "float32")
    adapter = Adapter.from_pretrained(folder / "adapter", model.config, base=model.weights)
    return [one.logits(prompt(9)) for one in (model, model.merge(adapter))]

Q0 = "layers.0.self_attn.q_proj"
PATTERNS = [
    # all of the same module: the first one matches nothing, the second one without a head
    {f"base_model.model.model.{Q0}": 5, f"^{Q0}": 6, f"^model.{Q0}": 7, Q0: 8},
    {"layers.1.self_attn.q_proj": 5, "q_proj": 6, "self_attn.q_proj": 7},
    {"proj": 6, "q": 5, "self.*_proj": 3},  # of whole names
    {"(q|down)_proj$": 6, "layers.(0|1).mlp.up_proj|self_attn.o_proj": 2}]
LORAS = {
    "gpt2": [dict(target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True,
                  alpha_pattern={"^transformer.h.1.mlp.c_proj": 3, "h.0.attn.c_proj": 5, "h.0": 1},
                  rank_pattern={"attn.c_attn": 6, "mlp.c_proj": 3})],
    "llama": [
        *[dict(alpha_pattern=pattern, rank_pattern=PATTERNS[i - 2], use_rslora=i > 1)
          for i, pattern in enumerate(PATTERNS)],
        *[dict(init_lora_weights=way) for way in (False, "gaussian", "orthogonal", "mica")],
        dict(target_modules=".*layers.1.*(k|v|gate)_proj", lora_dropout=0.5, fan_in_fan_out=True),
        dict(target_modules="all-linear", r=20, bias="none", modules_to_save=[])]}

@pytest.mark.filterwarnings("ignore")
@each("family", LORAS)
def test_adapters_equal_peft(family, tmp_path):
    """Of a model with a head or without, and under the names that wrappers make of PEFT's"""
    theirs = transformers_model(tmp_path, family)
    folder = tmp_path / "adapter"
    path = folder / "adapter_model.safetensors"
    cases = [*product([theirs.base_model], LORAS[family][:4]), *product([theirs], LORAS[family])]
    for (base, settings), start in zip(cases, cycle(["", "module.base_model.model._orig_mod."])):
        settings = dict(r=4, lora_alpha=12, target_modules=".*[qop]_proj|.*down_proj") | settings
        wrapped = trained_by_peft(base, folder, base is theirs, **settings)
        tensors = {re.sub("^base_model.model.(.*)(?=.weight)", rf"{start}\1.default", name): tensor
                   for name, tensor in load_file(path).items()}
        save_file(tensors, path)
        close(model_and_adapter(tmp_path)[1], logits_by(theirs, prompt(9)), 1e-3)
        wrapped.unload()
    other = {name: x + 1 for name, x in tensors.items() if re.search("embed_tokens|wte", name)}
    edit(folder, tensors=other)
    with pytest.raises(ValueError, match=f"{[*other][0]}.: embeddings in an adapter are not supp"):
        model_and_adapter(tmp_path)
    save_file({}, path)
    with pytest.raises(ValueError, match="no tensors"):
        model_and_adapter(tmp_path)

@each("family", LORAS)
def test_peft_and_a_simulator_read_our_adapters(family, tmp_path):
    peft = pytest.importorskip("peft")
    theirs = transformers_model(tmp_path, family)
    config, _ = read_config(tmp_path)
    adapter = random_adapter({module: 3 + i for i, module in enumerate(config.modules)}, config)
    adapter.save_pretrained(tmp_path / "adapter")
    peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    merged = GPT.from_pretrained(tmp_path).merge(adapter)
    close(merged.logits(prompt(9)), logits_by(theirs, prompt(9)))
    engine = Engine(CostModel.roofline(config, "a10g"))
    engine.add_adapter("ours", tmp_path / "adapter")
    assert engine.adapters["ours"].n_params == adapter.n_params

def test_every_setting_of_peft_has_its_place():
    """A field that a new PEFT adds must be decided upon. Variants of LoRA must be off."""
    peft = pytest.importorskip("peft")
    unset = peft.LoraConfig()
    for field in dataclasses.fields(unset):
        assert field.name in model_py.LORA_SETTINGS, f"{field.name}: served or refused?"
        valid = model_py.LORA_SETTINGS[field.name]
        assert valid is None or getattr(unset, field.name) in valid
        assert valid == model_py.OFF or not field.metadata.get("is_lora_variant")

# values for a file's settings, in the place of others
VALUES = [None, True, False, 0, -1, 2, 1.5, math.nan, 10**9, 10**40, "", "x", [], ["x"], [[]], {},
          {"a": 1}, "gpt2", "linear"]
# not changed: for the first two we read the tensors, of the others 0 and "" are as if left out
KEPT = {"target_modules", "layers_to_transform", "rope_parameters", "rope_type",
        "original_max_position_embeddings"}

def damage(path, rng):
    """Change a setting of a file, or its bytes, or remove it."""
    data = path.read_bytes()
    if rng.random() < 0.05:
        path.unlink()
    elif path.suffix == ".json" and rng.random() < 0.8:
        inner = []  # all dicts, the outermost one last
        json.loads(data, object_hook=lambda one: inner.append(one) or one)
        settings = rng.choice([*filter(None, inner)])
        settings[rng.choice(sorted(settings.keys() - KEPT))] = rng.choice(VALUES)
        path.write_text(json.dumps(inner[-1]))
    else:
        at = min(int(rng.expovariate(0.005)), len(data) - 1)
        flipped = data[:at] + rng.randbytes(1) + data[at + 1:]
        path.write_bytes(rng.choice([flipped, flipped, data[:at], data.replace(b"a", b"\xe9"),
                                     b"[" * 10**5]))

def model_and_adapter_of_peft(folder):
    import peft
    import transformers
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=float32)
    logits = logits_by(theirs, prompt(9))
    return logits, logits_by(peft.PeftModel.from_pretrained(theirs, folder / "adapter"), prompt(9))

@pytest.mark.filterwarnings("ignore")
@each("seed", range(4))
def test_damaged_folders_are_right_or_one_line(seed, tmp_path):
    """Each is refused, or is as the other libraries read it, or as before if they refuse it."""
    rng = random.Random(4 * SEED + seed)
    good = tmp_path / "good"
    theirs = transformers_model(good, shard="150KB", rope_parameters=LLAMA3 | dict(rope_theta=1e4))
    trained_by_peft(theirs, good / "adapter", target_modules=["q_proj", "down_proj"],
                    rank_pattern={"q_proj": 6}, alpha_pattern={"down_proj": 3})
    expected = model_and_adapter_of_peft(good)
    files = sorted(file.relative_to(good) for file in good.rglob("*.[js]*"))
    for i in range(60):
        folder = shutil.copytree(good, tmp_path / str(i))
        file = rng.choice(files)
        damage(folder / file, rng)
        with reproducible("folder", i, file):
            try:
                actual = model_and_adapter(folder)
            except (ValueError, KeyError, FileNotFoundError) as error:
                assert str(folder) in str(error) and "\n" not in str(error), error
                continue
            try:
                wanted = model_and_adapter_of_peft(folder)
            except Exception:  # they refuse it
                wanted = expected
            for one, other in zip(actual, wanted):
                assert torch.allclose(one, other, 1e-3, 1e-3, equal_nan=True)

Q = "model.layers.1.self_attn.q_proj.weight"
A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
ones = torch.ones
BAD = {  # folder -> {a part of the line: changes of the folder}
    ".": {
        **{name: {name: "odd"} for name in """model_type hidden_act quantization_config is_causal
            partial_rotary_factor full_attention add_cross_attention activation_function
            scale_attn_weights scale_attn_by_inverse_layer_idx""".split()},
        "model_type = None": dict(model_type=None, architectures=["Gemma"]),
        "yarn": dict(rope_scaling={"rope_type": "yarn"}),
        "n_kv_head = 3": dict(num_key_value_heads=3), "head_dim = 7": dict(head_dim=7),
        "layers = 1000000000": dict(num_hidden_layers=10**9),
        "sliding_window = 0": dict(model_type="mistral", sliding_window=0),
        "(3, 128)": dict(tensors={Q: ones(3, 128)}),
        "int32": dict(tensors={Q: ones(128, 128).int()}),
        "infinity": dict(tensors={Q: ones(128, 128) / 0}),
        "1 surplus tensors, as 'extra'": dict(tensors={"extra": ones(1)})},
    "adapter": {
        **{name: {name: "odd"} for name in "peft_type bias use_dora init_lora_weights new".split()},
        " r = 0": dict(r=0, rank_pattern={}), "kasa_config = {}": dict(kasa_config={}),
        **{name: dict(tensors={name: ones(8, 32)}) for name in (
            A, A.replace("q_", "z_"), A.replace("1", "7"), "vision.up_proj.weight")},
        "second": dict(tensors={A.replace("A.", "A.b."): ones(8, 128),
                                A.replace("A.", "B.b."): ones(128, 8)})}}

@each("place, word", [(place, word) for place in BAD for word in BAD[place]])
def test_a_bad_folder_is_one_line(place, word, tmp_path):
    TARGET.save_pretrained(tmp_path)
    Adapter.random(TINY, 8).save_pretrained(tmp_path / "adapter")
    edit(tmp_path / place, **BAD[place][word])
    with pytest.raises(ValueError, match=re.escape(word)) as raised:
        model_and_adapter(tmp_path)
    assert str(tmp_path) in str(raised.value) and "\n" not in str(raised.value)

def test_a_folder_is_taken_before_a_preset(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    TARGET.save_pretrained("llama-7b")
    assert load_model("llama-7b").config == TINY
    assert "'llama-7b': the folder of this name, not the preset\n" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match="'llama-7b/config.json': must be a folder"):
        load_model("llama-7b/config.json")  # no name on the Hub

def test_needed_files_come_from_the_hub(tmp_path, monkeypatch):
    """The index says where a tensor is: other shards may hold old ones, and unnamed tensors."""
    TARGET.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    path.rename(tmp_path / "a-1.safetensors")
    save_file({Q: tensors[Q] + 1, "extra": tensors[Q]}, tmp_path / "a-2.safetensors")
    shards = dict.fromkeys(tensors, "a-1.safetensors") | {"lost": "a-2.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    hub = Mock(side_effect=[tmp_path, tmp_path, OSError("offline\nlong")])
    monkeypatch.setattr(model_py, "snapshot_download", hub)
    model = load_model("owner/name", device=DEVICE)
    assert torch.equal(model.logits([1, 2]), TARGET.logits([1, 2]))
    first, second = (call.kwargs["allow_patterns"] for call in hub.call_args_list)
    names = f"""{index.name} config.json tokenizer.json tokenizer_config.json chat_template.jinja
        vocab.txt spiece.model a-1.safetensors a-2.safetensors a-3.safetensors x.bin""".split()
    wanted = [name for name in names if any(fnmatch(name, each) for each in first + second)]
    assert wanted == names[:-2] and index.name in first
    with pytest.raises(FileNotFoundError, match="other': is no folder, .* have it: offline$"):
        load_model("owner/other")
    index.write_text('{"weight_map": {"a": "../a"}}')
    with pytest.raises(ValueError, match="'../a' must be in this folder"):
        load_model(tmp_path)

def test_dtype_none_is_the_folders_if_the_machine_is_fast(tmp_path, monkeypatch):
    GPT.from_preset(TINY, bfloat16).save_pretrained(tmp_path)
    for fast, dtype in (True, bfloat16), (False, float32):
        monkeypatch.setattr(model_py, "is_fast", lambda *_: fast)
        assert GPT.from_pretrained(tmp_path).dtype == dtype
    assert model_py.stored_dtype(dict(torch_dtype="half")) == float16  # by transformers 4
    assert model_py.stored_dtype(dict(dtype="float64")) == float32

TEXTS = ["naïve café, e\u0301 東京 🙂🙃 12345  6 two  spaces\t\n\n end ", "it's WE'LL 100% ok\r\n",
         " leading (a)", "", "<tool> a<s>special</s> <tool> b"]

def tokenizer_of(name):
    """A small tokenizers.Tokenizer as a family of models has it. Of gpt2 bytes are characters. Of
    llama2 bytes are for characters that have no token, and <s> begins plain texts."""
    transformers = pytest.importorskip("transformers")
    special = ["<unk>", "<s>", "</s>"]
    if name == "gpt2":
        kind = transformers.GPT2Tokenizer
        letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        merges = "Ġ+a i+t Ã+© ð+Ł ðŁ+Ļ"
    else:
        kind = partial(transformers.LlamaTokenizer, add_bos_token=True)
        letters = [*(f"<0x{b:02X}>" for b in range(256)), *"▁é🙂", *map(chr, range(33, 127))]
        merges = "▁+a ▁+▁ i+t ▁+it"
    merges = [tuple(merge.split("+")) for merge in merges.split()]
    vocabulary = [*special, *letters, *map("".join, merges)]
    vocabulary = {token: id for id, token in enumerate(vocabulary)}
    library = kind(vocabulary, merges, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    library.add_tokens([tokenizers.AddedToken("<tool>", lstrip=True, rstrip=True)])
    return library.backend_tokenizer

@each("config, generation, stop", [
    ('{"eos_token_id": 5}', '{"eos_token_id": [1, 9]}', [1, 9]),
    ('{"eos_token_id": 0}', "{}", [0]), ('{"model_type": "llama"}', "{}", [2]),
    ('{"model_type": "llama", "eos_token_id": null}', "{}", [])])
def test_stop_tokens(config, generation, stop, tmp_path):
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "generation_config.json").write_text(generation)
    assert model_py.stop_of(tmp_path) == stop

CHATML = """<s>{% for message in messages %}
  {% if loop.first and message.role != 'system' %}<s>system {{ eos_token }}{% endif %}
    <s>{{ message['role'] }}: {{ message.content | trim }}</s>
{% endfor %}
{%- if add_generation_prompt %}<s>assistant{% endif %}{{ bos_token }} é <mark>{{ mood }}"""

@pytest.fixture(params=["gpt2", "llama2"])
def three_tokenizers(request, tmp_path):
    """-> ours, transformers', the library's. The file is as after a training on short texts."""
    transformers = pytest.importorskip("transformers")
    library = tokenizer_of(request.param)
    library.enable_truncation(4)
    library.enable_padding(length=90)
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(dict(
        tokenizer_class="PreTrainedTokenizerFast", bos_token="<s>", eos_token="</s>",
        chat_template=CHATML, extra_special_tokens=[" é", "<mark>"],
        clean_up_tokenization_spaces=request.param == "llama2",
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True)))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    return load_tokenizer(tmp_path), theirs, tokenizer_of(request.param)

def test_tokens_and_chats_are_those_of_transformers(three_tokenizers, tmp_path):
    ours, theirs, library = three_tokenizers
    assert ours.stop == [2]
    for text in TEXTS:
        assert ours.encode(text) == library.encode(text).ids
        messages = [dict(role="user", content=text)]
        assert ours.chat(text) == theirs.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False)
        messages += [dict(role="assistant", content="é"), dict(role="user", content="")]
        flags = dict(mood="sad", add_generation_prompt=False)
        rendered = theirs.apply_chat_template(messages, tokenize=False, **flags)
        tokens = theirs.apply_chat_template(messages, return_dict=False, **flags)
        assert ours.chat(messages, **flags) == tokens == ours.chat(rendered)
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path).chat("a folder without a template") is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="^.*: its tokenizer is not read by transformers.*$"):
        load_tokenizer(tmp_path)

def test_streamed_texts_are_those_of_transformers(three_tokenizers):
    """Any tokens, also bytes that are parts of characters, and spaces that are cleaned up"""
    ours, theirs, library = three_tokenizers
    rng = random.Random(SEED)
    few = "<0xC2> <0xA0> <0x20> <0xF0> </s> a ▁a ▁ Â ł Ġ".split()
    alphabets = [[id for id in map(library.token_to_id, names) if id is not None]
                 for names in (few, "▁▁▁▁'nntsmvre.,?!")]
    n = library.get_vocab_size() + 3  # a model may have more tokens than its tokenizer
    outputs = [rng.choices(tokens, k=12) for tokens in (alphabets * 9 + [range(n)]) * 60]
    for output in outputs + [*map(ours.encode, TEXTS)]:
        start = rng.choice([[], ours.encode("it's")])
        text_of = ours.stream(start)
        text = theirs.decode(start, skip_special_tokens=True)
        rest = list(output)
        while rest:
            size = rng.choice([1, 1, 1, 2, 5])
            text += text_of(rest[:size])
            rest = rest[size:]
        text += text_of([])
        assert text == theirs.decode(start + output, skip_special_tokens=True), (start, output)

def test_gpt2_without_a_tokenizer_json_has_tiktokens_encoding(tmp_path, monkeypatch):
    encoding = model_py.byte_tokenizer().encode.func.__self__  # of bytes, too
    monkeypatch.setattr(model_py.tiktoken, "get_encoding", {"gpt2": encoding}.get)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    for name in ("gpt2", "gpt3-175b", tmp_path):
        tokenizer = load_tokenizer(name)
        assert tokenizer.encode("é<|endoftext|>") == [0xc3, 0xa9, 256] and tokenizer.stop == [256]
        text_of = tokenizer.stream()
        tokens = [97], [0xc3], [300], [0xa9], [0xc3], []
        assert [*map(text_of, tokens)] == ["a", "", "", "é", "", "\ufffd"]
    (tmp_path / "vocab.json").write_text("{}")
    TARGET.save_pretrained(tmp_path / "llama")
    for folder in (tmp_path, tmp_path / "llama"):
        with pytest.raises(FileNotFoundError, match="no tokenizer.json: use --tokens .*AutoTok"):
            load_tokenizer(folder)

def test_training_lowers_the_loss_and_the_models_are_found(tmp_path, monkeypatch):
    tiny = GPTConfig(2, 2, 64, 128, vocab_size=257, tied=True)
    monkeypatch.setattr(model_py, "CACHE", tmp_path)
    monkeypatch.setattr(model_py, "PRESETS", {"tiny": tiny})
    monkeypatch.setattr(model_py, "stdlib_tokens", lambda: torch.arange(4000) % 7)
    model_py.train_tiny(steps=60, T=32)
    tokens = torch.arange(30) % 7
    for name, n_layer in (("tiny", 2), ("draft", 1)):
        model = load_model(name)
        assert model.config.n_layer == n_layer and load_tokenizer(name).encode("a") == [97]
        assert model.stop == [256]
        assert F.cross_entropy(model.logits(tokens)[:-1], tokens[1:]) < 4.5  # at first log(257)

# -----------------------------------------------------------------------------
# operators: C++ against the definitions; with TRITON_INTERPRET=1 Triton against them

TOLERANCE = {float32: 3e-5, float16: 4e-3, bfloat16: 3e-2}
DTYPES = float32, float16 if INTERPRETED else bfloat16

@pytest.fixture(params=DTYPES, ids=str)
def dtype(request, monkeypatch):
    """For tests of operators. They fail if the definitions alone run."""
    torch.manual_seed(SEED)
    monkeypatch.setattr(kernels, "cpp", Mock(side_effect=kernels.cpp))
    with torch.inference_mode(), torch.device(DEVICE):
        yield request.param
    is_triton = kernels.backend(torch.ones(1, device=DEVICE)) == "triton"
    assert kernels.cpp.called or is_triton or IS_TORCH

def near(actual, expected, scale=1.0):
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance * float(scale), rtol=tolerance,
                               check_dtype=False)

@each("n_thread", [1, 5])
@each("n_in, n_out", [
    (2, 1),
    (770, 33),
    (33, 40),  # no whole pairs of bfloat16: not packed
    (96, 70),  # by tiles where there is AMX
])
def test_operator_linear(n_in, n_out, n_thread, dtype):
    """All numbers of rows to two tiles, and a prompt's; a row does not depend on its neighbours"""
    weight = torch.randn(n_out, n_in).to(dtype)
    bias = torch.randn(n_out).to(dtype)
    x = torch.randn(300, n_in).to(dtype)
    packed = kernels.pack(weight)
    assert torch.equal(packed.to_dense(), weight)
    kernels.cpp.called |= not isinstance(packed, kernels.Packed)  # then torch serves
    torch.set_num_threads(n_thread)
    for n, shift in product((*range(1, 18), 300), (bias, None)):
        actual = kernels.linear(x[:n], packed, shift)
        near(actual, kernels.linear_ref(x[:n].double(), weight, shift), n_in**0.5)
        if isinstance(packed, kernels.Packed):
            assert torch.equal(actual[-1:], kernels.linear(x[n - 1:n], packed, shift))
    torch.set_num_threads(1)

@each("N, C, mean", [(1, 48, 1), (33, 1040, 1), (9, 768, 1000)])
def test_operator_add_norm_and_activate(N, C, mean, dtype):
    """RMSNorm and LayerNorm, of a sum that is rounded as by torch, or of none; GELU and SwiGLU"""
    x, y = torch.randn(2, N, C).to(dtype) + mean
    weight, bias = torch.randn(2, C).to(dtype)
    for added, shift in product((y, None), (bias, None)):
        # an eps that is large enough to be seen
        total, norm = kernels.add_norm(x, added, weight, shift, 0.5)
        total_ref, norm_ref = kernels.add_norm_ref(x, added, weight, shift, 0.5)
        assert torch.equal(total, total_ref)
        near(norm, norm_ref, mean**0.5)
    for gated in (True, False):
        near(kernels.activate(5 * x, gated), kernels.activate_ref(5 * x, gated))

@each("N, H, Hk, D", [
    (1, 4, 4, 64),
    (21, 8, 2, 80),
    (2, 4, 4, 5),  # not rotated
])
def test_operator_rotate_write(N, H, Hk, D, dtype):
    """With and without norms and rotation"""
    qkv = 3 * torch.randn(N, (H + 2 * Hk) * D).to(dtype)
    norms = torch.randn(2 * D).to(dtype)
    angles = 6 * torch.rand(N, D // 2)
    ropes = [(None, None), (angles.cos(), angles.sin())]
    pages = torch.randperm(40)[:N].int()
    for norm, rope in product((None, norms), ropes[:2 - D % 2]):
        kv, kv_ref = torch.zeros(2, 2, 40, Hk, D, dtype=dtype)
        q = kernels.rotate_write(qkv, *rope, kv, pages, H, Hk, norm, 0.5)
        near(q, kernels.rotate_write_ref(qkv, *rope, kv_ref, pages, H, Hk, norm, 0.5))
        near(kv, kv_ref)

def cache_of(lengths, Hk, D, dtype):
    """Runs of random pages among pages of NaN. -> the cache, the page table, each run's start"""
    n = sum(lengths)
    table = torch.randperm(2 * n)[:n].int()
    kv = torch.full((2, 2 * n, Hk, D), math.nan, dtype=dtype)
    kv[:, table.long()] = torch.randn(2, n, Hk, D).to(dtype)
    return kv, table, [0, *accumulate(lengths)][:-1]

PAST = 0, 1, 15, 16, 31, 32, 63, 64, 511
ROWS = 9, 15, 16, 17, 33, 64, 127, 128

@each("n_thread, H, Hk, D, n_few, n_many", [
    (1, 6, 1, 16, 4, 0),  # tiles begin within a token
    (1, 2, 2, 64, 2, 3),
    (1, 4, 1, 64, 2, 2),
    (1, 4, 4, 80, 3, 2),
    (1, 4, 4, 5, 2, 1),
    (5, 4, 2, 64, 0, 0),  # threads divide the heads of one request
])
def test_operator_attention(n_thread, H, Hk, D, n_few, n_many, dtype):
    """Random decodes with drafts, and chunks"""
    rng = random.Random(SEED)
    rows = [5, *rng.choices(range(1, DECODE_ROWS + 1), k=n_few), *rng.choices(ROWS, k=n_many)]
    past = [255 if n_many else 4095, *rng.choices(PAST, k=n_few + n_many)]
    if n_many > 1:  # large tiles; the contexts of some are split
        rows += 64, 128
        past += 511, 0
    kv, table, at = cache_of([n + m for n, m in zip(rows, past)], Hk, D, dtype)
    spans = [*zip(accumulate((0, *rows)), rows, past, at)]
    N = sum(rows)
    q = 2 * torch.randn(N + 3, H, D).to(dtype)  # three padding rows
    q[0] *= 8  # nearly all probabilities are 0
    tokens = kernels.zeros(N)
    batch = Batch(tokens, tokens, tokens, np.array(spans, np.int32), table.cpu().numpy(), tokens,
                  n_few + 1).to(kv, H)
    torch.set_num_threads(n_thread)
    actual = kernels.attention(q, kv, batch)
    torch.set_num_threads(1)
    near(actual[:N], kernels.attention_ref(q, kv, batch)[:N])

@each("W, n_in, columns, n_device", [
    (64, 112, (130, 20), 1),
    (48, 192, (64, 48), 1),
    (256, 144, (513,), 1),
    (64, 64, (65, 20), 2),
])
# with more threads than segments, these divide the rows of a segment
@each("n_thread", [1] if INTERPRETED else [1, 5])
def test_operator_lora(n_thread, W, n_in, columns, n_device, dtype):
    """Segments without rows are padding, as in a CUDA graph."""
    for *rows, ranks in ((0, 1, 5, 8, (1, 8, 18, 32)), (0, 1, 9, 65, (2, 16, 144))):
        places = product(zip(accumulate((0, *rows)), rows), enumerate(columns))
        segments = [[first, n, sum(columns[:j]), width, rank, n_device * rank, j]
                    for ((first, n), (j, width)), rank in zip(places, cycle(ranks))]
        lengths = [rank * max(cdiv(n_in, W), n_device * cdiv(width, W))
                   for _, _, _, width, rank, *_ in segments]
        kv, table, starts = cache_of(lengths, 1, W, dtype)
        numbers = torch.tensor([[*one, start] for one, start in zip(segments, starts)]).int()
        n_few = len(columns) * sum(n <= DECODE_ROWS for n in rows)
        wide = all(n % 16 == 0 for n in columns)
        given = Segments(numbers, table, n_few, rows[-1], len(columns), ranks[-1], wide)
        if n_device == 2:  # as from another device with twice this one's x A
            given.gather_xa = lambda xa: torch.stack([xa, 2 * xa], -1).flatten(1)
            kernels.cpp.called = True  # on a CPU the definition serves an exchange
        x = torch.randn(sum(rows) + 3, n_in).to(dtype) / 16
        y = torch.randn(sum(rows) + 3, sum(columns)).to(dtype)
        expected = y.double()
        kernels.lora_ref(expected, x.double(), kv.double(), given)
        not_padded = replace(given, numbers=numbers[len(columns):], way="bmm")
        torch.set_num_threads(n_thread)
        for own in (given, not_padded)[:3 - n_device]:
            near(kernels.lora(y.clone, x, kv, own), expected, expected.abs().max())
        torch.set_num_threads(1)

def test_tokens_are_sampled_as_defined():
    """Of equal logits the first tokens are kept, as by a stable sort; also where the mass of top_p
    is beyond the first 1,024 tokens. A row does not depend on others. A u of 0, or one
    that was rounded to 1, finds a token that has a chance."""
    torch.manual_seed(0)
    settings = torch.tensor([*product((0, 0.5, 1.0), (0, 1, 7, 5000), (1, 0.3, 0.9))]).T
    logits = torch.randn(settings.size(1), 3000).bfloat16()
    p = kernels.probabilities(logits, *settings)
    for i, (own, (temperature, k, limit)) in enumerate(zip(p, settings.T.tolist())):
        ordered, order = (logits[i].float() / (temperature or 1)).sort(descending=True, stable=True)
        share = ordered[:int(k) or 3000 if temperature else 1].softmax(-1)
        n = 1 + int((share.cumsum(-1) < limit).sum()) if limit < 1 else len(share)
        assert set(own.nonzero()[:, 0].tolist()) == set(order[:n].tolist())
        near(own[order[:n]], share[:n] / share[:n].sum())
        assert own.equal(kernels.probabilities(logits[i:i + 1], *settings[:, i:i + 1])[0])
    assert {1, 3000} < {*(p > 0).sum(-1).tolist()}
    for u in (0.0, 1.0):
        tokens = kernels.sample(p, torch.full((len(p),), u))
        assert p.gather(1, tokens[:, None]).all()

# ---- how C++ is compiled; threads and memory

no_cpp = pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="C++ does not run")

def forget_compiled():
    kernels.library.cache_clear()
    kernels.private_folder.cache_clear()

@pytest.fixture
def compiled_anew(monkeypatch):
    monkeypatch.setattr(kernels, "FLAGS", kernels.FLAGS.replace("-O3", "-O0"))
    forget_compiled()
    yield
    forget_compiled()

TILES = "-mamx-tile -mamx-bf16"
KNOW_TILES = [name for name in ("g++", "clang++")
              if not os.system(f"{name} {TILES} -E -xc++ /dev/null >/dev/null 2>&1")]

@no_cpp
@each("layout, compiler", [*((layout, None) for layout in kernels.LAYOUTS),
                           *(("amx", name) for name in KNOW_TILES)])
def test_products_of_every_layout(layout, compiler, dtype, compiled_anew, monkeypatch):
    """As on another processor. AMX is compiled for all; where Linux refuses it, vectors run."""
    monkeypatch.setenv("SARATHI_CPU", layout)
    if compiler:
        monkeypatch.setenv("CXX", compiler)
        monkeypatch.setattr(kernels, "FLAGS", f"{kernels.FLAGS} {TILES}")
    line = kernels.describe(torch.ones(1, dtype=dtype))
    runs = "torch" if layout == "torch" else f"C++ ({layout.upper()})"
    if layout == "amx" and not (dtype == bfloat16 and torch.cpu._is_amx_tile_supported()):
        runs = "C++ (AVX512BF16)"
    assert re.fullmatch(rf"{re.escape(runs)}, \d+ threads?,.* SARATHI_CPU={layout}.*", line)
    if compiler and dtype == bfloat16:
        code = subprocess.check_output(["objdump", "-d", kernels.library(dtype, 64)._name])
        assert {b"ldtilecfg", b"tileloadd", b"tdpbf16ps", b"tilestored"} < {*code.split()}
    for n_in in (96, 770):
        test_operator_linear(n_in, 70, 1, dtype)
    test_operator_attention(1, 6, 2, 64, 4, 3, dtype)

COMPILER = """#!/bin/sh
case "$*" in %s) printf '\\374\\n' >&2; exit 1;; esac
exec g++ "$@"
"""

@no_cpp
@each("fails, mode, found", [  # for which arguments, mode of the cache, head_dims that run in C++
    ("none", 0o755, [64, 80]),
    ("*-fno-loop-unroll-and-jam*", 0o777, [64, 80]),  # not kept where others could write
    ("*-fopenmp*", 0o755, [64, 80]),
    ("*-DD=80*", 0o755, [64]),  # as when it takes too long
    ("*", 0o755, []),
    (None, 0o755, []),  # it is not there
])
def test_every_compiler_and_cache(fails, mode, found, compiled_anew, monkeypatch, tmp_path, capsys):
    """One line says that operators are slower. A second process compiles nothing that was kept."""
    monkeypatch.delenv("SARATHI_CPU", raising=False)
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    monkeypatch.setattr(kernels, "CACHE", tmp_path / "cache")
    kernels.CACHE.mkdir()
    kernels.CACHE.chmod(mode)
    for also, expected in (("none", found), ("*' -o '*", found if mode == 0o755 else [])):
        if fails:
            (tmp_path / "c++").write_text(COMPILER % f"{fails}|{also}")
            (tmp_path / "c++").chmod(0o755)
        forget_compiled()
        assert [D for D in (64, 80) if kernels.library(float32, D)] == expected
        test_operator_attention(1, 4, 4, 80, 2, 1, float32)
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == (mode == 0o777) + (expected != [64, 80])
        has_threads = "no OpenMP" not in kernels.describe(torch.ones(1))
        assert has_threads == (fails != "*-fopenmp*")

WAITING = """
import time, torch, kernels
x = torch.ones(64, 1024)
kernels.activate(x, False)
start = time.process_time()
for _ in range(40):
    kernels.activate(x, False)
    time.sleep(0.01)
print(time.process_time() - start)
"""
@pytest.mark.skipif(IS_TORCH, reason="the threads of OpenMP that C++ starts")
def test_threads_that_wait_sleep_though_torch_was_imported_first():
    """0.01 s of all CPUs. By OpenMP's default, in which a thread spins for ms, 0.4"""
    env = {key: value for key, value in os.environ.items() if "OMP_" not in key}
    run = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True, env=env,
                         cwd=Path(__file__).parent)
    assert float(run.stdout) < 0.1, run.stderr

@pytest.mark.skipif(DEVICE == "cuda" or sys.platform != "linux", reason="host memory, by /proc")
def test_a_page_takes_memory_once_it_is_written():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    before = resident()
    engine = Engine(TARGET, n_page=300000)
    assert engine.runner.kv.nbytes > 3e8 and resident() - before < 1e8

def test_limits_of_control_groups(monkeypatch, tmp_path):
    """Of version 2, then also of version 1. A container may see its host's paths."""
    files = {"a/memory.max": "4096\n", "a/b/memory.max": "max\n", "a/b/cpu.max": "7500 5000\n",
             "memory/a/memory.limit_in_bytes": "7", "cpu,cpuacct/cpu.cfs_quota_us": "120000",
             "cpu,cpuacct/docker/cpu.cfs_quota_us": "-1"}
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "proc/self").mkdir(parents=True)
    monkeypatch.setattr(kernels, "Path", lambda path: Path(f"{tmp_path}{path}"))
    for groups, memory, cpus in (("0::/a/b\n", 4096, 1.5),
                                 ("4:memory:/a\n1:cpu,cpuacct:/docker/x\n0::/a/b", 7, 1.2)):
        (tmp_path / "proc/self/cgroup").write_text(groups)
        assert kernels.least_limit("memory.max", "memory.limit_in_bytes") == memory
        assert kernels.least_limit("cpu.max", "cpu.cfs_quota_us", period=100000) == cpus

# ---- Triton, for GPUs that are not here

@pytest.fixture(scope="session", autouse=True)
def interpreter(request, tmp_path_factory):
    """Operators, in a process beside the others: triton reads TRITON_INTERPRET at its import."""
    wanted = {item.name for item in request.session.items}
    if test_triton_in_its_interpreter.__name__ not in wanted:
        yield
        return
    path = tmp_path_factory.mktemp("interpreter") / "output"
    command = [sys.executable, "-m", "pytest", "-qxk", "operator and not linear", __file__]
    with open(path, "w") as file, subprocess.Popen(
            command, env=os.environ | {"TRITON_INTERPRET": "1"}, stdout=file, stderr=file) as run:
        yield run, path
        run.kill()

class Launches(TorchDispatchMode):
    """Counts the operators that run on a device, except views and new memory; and bytes."""
    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.n_bytes = 0
        self.peak = 0

    def __torch_dispatch__(self, operator, types, args=(), options=None):
        name = operator.overloadpacket.__name__
        out = operator(*args, **options or {})
        if operator.is_view or name in ("detach", "_unsafe_view"):
            return out
        if not re.match("(new_)?empty", name):
            self.counts[name] += 1
        if isinstance(out, torch.Tensor):
            storage = out.untyped_storage()
            self.take(storage.nbytes())
            weakref.finalize(storage, self.take, -storage.nbytes())
        return out

    def around(self, function):
        def counted(*args):
            with self:
                return function(*args)
        return counted

    def take(self, n_bytes):
        self.n_bytes += n_bytes
        self.peak = max(self.peak, self.n_bytes)

class FakeGPU(Launches):
    """A GPU that is not here: Triton's kernels and the products of weights compute nothing."""
    def __init__(self, monkeypatch, arch=90, memory=232448):  # bytes that a program may share
        super().__init__()
        triton = pytest.importorskip("triton")
        driver = Mock(get_current_device=lambda: arch)
        target = triton.backends.compiler.GPUTarget("cuda", arch, 32)
        driver.get_current_target.return_value = target
        self.kinds = {}  # name and kinds of arguments, for each of which Triton compiles -> how

        def at(kernel, grid):
            def launch(*args, **options):
                self.counts[kernel.__name__] += 1
                _, *kinds = kernel.device_caches[arch][-1](*args, **options)
                compile = partial(kernel.warmup, *args, grid=grid, **options)
                self.kinds.setdefault((kernel.__name__, str(kinds)), compile)
            return launch
        monkeypatch.setattr(triton.runtime.driver, "_active", driver)
        monkeypatch.setattr(triton.JITFunction, "__getitem__", at)
        monkeypatch.setattr(kernels, "cores_of", lambda device: (132, memory + 1024))
        monkeypatch.setattr(kernels, "backend", lambda *_: "triton")
        monkeypatch.setattr(model_py, "pack", lambda weight: weight)
        monkeypatch.setattr(model_py, "linear", lambda x, w, _=None: x.new_zeros(len(x), len(w)))

    def serve(self, H, Hk, D, family="llama", number=float32, spec="off", rank=16,
              scheduler="sarathi_serve", chunk=600):
        """An engine with two prompts, of 600 tokens with an adapter and of 200"""
        config = GPTConfig(1, H, 512, None, Hk, D, 61, 1024, family)
        model = GPT.from_preset(config, number)
        requests = [Request([1] * n, 20, name) for n, name in ((600, "adapter"), (200, None))]
        adapters = {"adapter": Adapter.random(config, rank, dtype=number)}
        draft = None if spec == "off" else sarathi.Zeros()
        return start(model, requests, scheduler, adapters, chunk=chunk, draft=draft, spec=spec)

@each("arch, memory, family, number, H, Hk, D, spec, rank", [
    # memory: bytes that a program may share; number: dtype; spec: drafts
    (80, 166912, "gpt2", float32, 16, 4, 256, 7, 260),
    (86, 101376, "llama", bfloat16, 32, 1, 256, 7, 64),
    (89, 101376, "llama", bfloat16, 32, 2, 64, 2, 128),
    (90, 232448, "qwen3", bfloat16, 64, 2, 128, "off", 256),
    (120, 101376, "gpt2", float16, 32, 4, 128, 2, 16),
])
def test_triton_compiles(arch, memory, family, number, H, Hk, D, spec, rank, monkeypatch,
                         tmp_path):
    """All that an engine launches on a GPU: at most three registers are spilled, shared memory
    suffices, of a core with 100 KB for two programs of attention, and 16-bit numbers are not
    loaded or stored one by one."""
    gpu = FakeGPU(monkeypatch, arch, memory)
    engine = gpu.serve(H, Hk, D, family, number, spec, rank)
    for _ in range(3):
        engine.step()
    assert len({name for name, _ in gpu.kinds}) == 7
    for (name, _), compile in gpu.kinds.items():
        compiled = compile()
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        command = [sys.modules["triton"].knobs.nvidia.cuobjdump.path, "-res-usage", cubin]
        usage = subprocess.check_output(command, text=True)
        # Triton 3.6 keeps three registers in one kernel, outside its loop
        assert int(re.search(r"STACK:(\d+)", usage)[1]) <= 16, name
        n_program = 2 if name == "_attention_kernel" and D < 256 else 1
        assert compiled.metadata.shared + 1024 <= (memory + 1024) / n_program, name
        assert not re.search(r"(ld|st)\.global[.\w]*\.[bu]16\b", compiled.asm["ptx"]), name

@each("family, H, Hk, others", [
    ("qwen3", 16, 2, "embedding mul cos sin"),
    ("gpt2", 8, 8, "embedding embedding add"),
])
def test_what_an_iteration_takes(family, H, Hk, others, monkeypatch):
    """The memory that is kept for it; for each layer of a decode ten kernels, among them four
    products and the combination of splits. The CPU waits once, and copies no tensor."""
    gpu = FakeGPU(monkeypatch)
    engine = gpu.serve(H, Hk, 64, family)
    engine.model.forward = gpu.around(engine.model.forward)
    engine.run()
    engine.add(Request([1] * 600, 3, "adapter"))
    gpu.n_bytes = gpu.peak = 0
    engine.step()
    assert 0.6 < gpu.peak / engine.model.iteration_bytes(600, 2) <= 1
    engine.run()
    engine.add(Request([1] * 300, 3))
    engine.step()
    gpu.counts.clear()
    tolist = torch.Tensor.tolist
    read = []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: read.append(x.dtype) or tolist(x))
    engine.step()
    assert read.count(torch.int64) == 1  # int32: spans, on the host
    assert gpu.counts == Counter(others.split()) + Counter(
        new_zeros=5, index=2, _add_norm_kernel=3, _rotate_write_kernel=1, _attention_kernel=1,
        _combine_kernel=1, _activate_kernel=1)

@each("H, Hk, D", [(40, 40, 128), (32, 8, 128), (71, 1, 64), (8, 4, 256), (4, 4, 16)])
def test_the_work_of_attention_fits_its_graph(H, Hk, D):
    """Tiles cover all queries and contexts, parts do not overlap, a graph has room for both."""
    rng = random.Random(SEED)
    kv = torch.zeros(2, 1, Hk, D, dtype=bfloat16)
    for N, R in (1, 1), (8, 8), (128, 128), (256, 32), (256, 256), (640, 32), (640, 640):
        room = kernels.attention_room(N, R, H, kv)
        for n, end in product((1, R, *rng.choices(range(1, R + 1)[:20], k=6)), (0, N)):
            end = max(n, end)
            starts = [0, *sorted(rng.sample(range(1, end), n - 1)), end]
            rows = {row: after - row for row, after in pairwise(starts)}
            spans = [(row, n, rng.randrange(5000), 0) for row, n in rows.items()]
            work = kernels.attention_work(spans, N, H, kv)
            done = Counter()
            parts = {}
            for key, size in zip(("small_tiles", "large_tiles"), kernels.tile_sizes(H, kv)):
                assert len(work[key]) <= len(room[key])
                for row, n, _, _, first, split, n_split, part in work[key].tolist():
                    done[row] += min(size, n * H // Hk - first) / n_split
                    assert first % size == 0 and split < n_split <= kernels.MOST_SPLITS
                    parts[row] = range(part, part + n * n_split * (n_split > 1))
            assert done == approx({row: n * H // Hk for row, n in rows.items()})
            assert sorted(chain(*parts.values())) == [*range(work["n_part"])]
            assert work["n_part"] <= room["n_part"]

@each("scheduler, spec", [("sarathi_serve", "off"), ("prefill_first", 3)])
def test_nothing_is_compiled_while_requests_are_served(scheduler, spec, monkeypatch):
    """Triton compiles a kernel again for arguments of another kind. Long prompts have no graph."""
    gpu = FakeGPU(monkeypatch)
    fake_graphs(monkeypatch)
    engine = gpu.serve(40, 40, 128, "llama", bfloat16, spec, 20, scheduler, 256)
    engine.warm()
    warm = {*gpu.kinds}
    assert len(warm) <= 16
    for i in range(15):
        name = "adapter" if i % 2 or spec == 3 else None
        engine.add(Request([1] * (7 + 97 * i % 900), 2 + i % 7, name))
    engine.run()
    assert {*gpu.kinds} == warm

def test_gpus_without_triton(monkeypatch, capsys):
    """No Triton, a GPU that is too old for it, a cache of another dtype, and too wide a head"""
    monkeypatch.setattr(sarathi, "CudaGraphs", lambda runner: "graphs")
    for device, present, capability, number, graphs in (
            ("cuda:0", False, (8, 0), bfloat16, None), ("cuda:1", True, (7, 5), bfloat16, None),
            ("cuda:2", True, (8, 0), float16, None), ("cuda:2", True, (8, 0), bfloat16, "graphs")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(kernels, "has_triton", lambda: present)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
        line = kernels.describe(Mock(is_cuda=True, is_cpu=False, device=device))
        assert line == ("triton" if device == "cuda:2" else "torch") + ", a GPU"
        assert model_py.pick_dtype(None, device) == (bfloat16 if capability > (8,) else float16)
        model = Mock(device=device, dtype=bfloat16, config=TINY, world=World())
        runner = Mock(model=model, kv=torch.empty(0, dtype=number))
        runner.engine.lora = "batched"
        for _ in range(2):  # the line comes once
            assert sarathi.make_graphs(runner) == graphs
    with pytest.raises(ValueError, match="head_dim on a GPU = 320"):
        sarathi.check_gpu(device, 320)
    kernels.runs_triton.cache_clear()
    sarathi.check_gpu.cache_clear()
    assert capsys.readouterr().err.count("plain torch operators") == 2

# -----------------------------------------------------------------------------
# bench.py: claims, measured experiments, workloads, pictures and traces

def arguments(words=""):
    return bench.parse_arguments(words.split())

def simulated(name, words="--size small"):
    return bench.simulate(arguments(words), EXPERIMENTS[name].on)

def fewer(make):
    """A maker of jobs that makes an eighth of them"""
    def jobs(*args, **options):
        made = make(*args, **options)
        return made[:1 + len(made) // 8]
    return jobs

SCOREBOARD = {(row["experiment"], *row["at"]): row for row in json.loads(
    (ASSETS / "scoreboard.json").read_text())["rows"]}
SMALL_FLAGS = {"tng": "--lengths 64", "attainment": "--schedulers prefill_first,sarathi"}
DIGESTS = {
    "users": 4.9166, "table4": 0.7680, "table2": 2.6000, "fig3": 1.6183, "fig4": 2.1900,
    "fig7": 4.2648, "fig8": 1.6162, "fig9": 0.6871, "fig10": 0.1100, "fig12": -0.0304,
    "fig13": 0.2724, "slora_table3": -0.4191, "slora_fig5": 1.1235, "slora_fig6": 0.5660,
    "slora_fig9": -1.7764, "spec_fig1": 0.4676, "spec_fig11": 0.5292, "spec_fig5": -3.0722,
    "spec_fig12": 0.2310, "spec_fig16": 0.3969, "tng": 2.9652, "slora_fig8": -0.8904,
    "slora_fig10": -0.0353, "clustering": -0.5268}

@each("name", [name for name, what in EXPERIMENTS.items() if what.only != "measured"])
def test_every_claim_has_its_point(name, monkeypatch):
    """And a table, and a picture. DIGESTS, weighted means of the numbers' logarithms, stay."""
    for make in ("gamma_jobs", "zipf_jobs"):
        monkeypatch.setattr(bench, make, fewer(getattr(bench, make)))
    place = simulated(name, f"{name} --size small {SMALL_FLAGS.get(name, '')}")
    rows = {tuple(row["at"]): row for row in EXPERIMENTS[name].rows(place)}
    claims = CLAIMS.get(name, {})
    for at, claim in claims.items():
        row = SCOREBOARD[(name, *at)]
        assert claim._asdict().items() <= row.items() and rows[at]["paper"] == claim.paper
        assert row["inside"] == claim.holds(row["ours"])
    numbers = np.array([row["ours"] for row in rows.values()])
    assert np.isfinite(numbers).all()
    digest = np.average(np.log(np.maximum(numbers, 1e-3)), weights=range(1, 1 + len(rows)))
    assert digest == approx(DIGESTS.get(name, digest), abs=3e-4)
    assert ("| paper " in bench.tables(EXPERIMENTS[name], [*rows.values()])) == bool(claims)
    check_picture(name, [*rows.values()])

def check_picture(name, rows):
    """Each row with an x is a point, and the paper's number, too."""
    what = EXPERIMENTS[name]
    drawn = [row for row in rows if not what.x or (  # no ratios
        row["at"][2] != "" and " / " not in f"{row['at']}")]
    axes = {ax.get_title(): ax for ax in bench.draw(rows, what).axes}
    assert axes.keys() == {row["at"][0] for row in drawn}
    for title, ax in axes.items():
        own = [row for row in drawn if row["at"][0] == title]
        papers = [row["paper"] for row in own if row["paper"] is not None]
        lines = [line for line in ax.lines if line.get_marker() == "."]
        marks = chain(*(line.get_ydata() for line in ax.lines if line.get_marker() == "o"))
        assert sorted(y for y in marks if y is not None) == sorted(papers)
        if not what.x:
            assert [bar.get_height() for bar in ax.patches] == [row["ours"] for row in own]
            continue
        points = chain(*(zip(line.get_xdata(), line.get_ydata()) for line in lines))
        assert sorted(points) == sorted((row["at"][2], row["ours"]) for row in own)

def test_papers_own_arithmetic():
    """5 (N - 1) B r / N numbers in every layer, in two messages [S-LoRA §6]; 3 + 6 + 12 drafts
    [SmartSpec §7.2.2], and 3 + 6 + 18 in its Fig. 8"""
    cost = CostModel.roofline(preset("llama-33b"), "a100-40", 4)
    stats = cost.stats([feed(8, 1, 1)._replace(request=Request(
        [1] * 9, lora_weights=Adapter(cost.config, 32)))] * 12)
    seconds = cost.seconds(stats)
    cost.sends_xa = False
    n_bytes = 2 * 5 * 3 * 12 * 32 / 4
    sent = 60 * (n_bytes / (0.75 * 300e9) + 2 * 25e-6)
    assert seconds - cost.seconds(stats) == approx(sent)
    assert [bench.tree_size(tree) for tree in ((1, 1, 1), (3, 2, 2), (3, 2, 3))] == [3, 21, 27]

def test_capacity_and_attainment_are_the_most_that_meets_targets():
    """At a rate 4 % higher a target is missed; chunks serve more, if not all that was tried; shares
    fall with the rate, but for noise; under a target that no iteration meets, the rate is 0."""
    words = "--hardware a100 --size small --schedulers prefill_first,sarathi --output 120..160"
    for name, is_good in (
            ("capacity", lambda run: run.meets(2, 0.1)),
            ("attainment", lambda run: run.attainment(2, 0.1) >= 0.99)):
        place = simulated(name, f"{name} {words}")
        rows = [*EXPERIMENTS[name].run(place)]
        limit, most = [row.ours for row in rows if row.x == ""]
        serve_at, tried = bench.under_load(place)
        for rate, good in ((limit, True), (1.04 * limit, False)):
            assert is_good(serve_at(rate, dict(scheduler="prefill_first"))) == good
        assert place.args.chunk == 512 and 2 * limit < most < 2 * tried
    shares = [row.ours for row in rows if row.series == "prefill_first"][:7]
    assert shares[0] > 0.9 and len({*shares}) > 4
    assert all(later <= share + 0.05 for share, later in pairwise(shares))
    place.args.tbt = 1e-4
    assert [row.ours for row in EXPERIMENTS["capacity"].run(place)] == [0, 0]

def test_scoreboard(monkeypatch):
    """Its rows are those that are kept, and so is what they count. Each miss has a reason."""
    names = ("table4", "fig3", "fig7", "spec_fig5")
    monkeypatch.setattr(bench, "CLAIMS", {name: CLAIMS[name] for name in names})
    found = {(row["experiment"], *row["at"]): row["ours"]
             for row in bench.scoreboard(arguments())}
    assert found == approx({at: SCOREBOARD[at]["ours"] for at in SCOREBOARD if at[0] in names})
    *counts, _ = bench.count_runs(SCOREBOARD.values())
    assert "\n".join(counts) in (ASSETS / "results.md").read_text(encoding="utf8")
    reasons = "ours:", "the paper contradicts itself:", "no text says why:"
    assert all(row["inside"] or row["note"].startswith(reasons) for row in SCOREBOARD.values())

def test_papers_numbers_stand_where_they_hold():
    """On their hardware, at the lengths that were run; so do the paper's batches, if they fit."""
    for gpu, paper in ("a6000", 1.33), ("h200", None):
        place = bench.simulate(arguments("--lengths 512,1024"), bench.Hardware("llama-13b", gpu))
        assert place.batches == [(512, 6), (1024, 6)]
        papers = {row["what"]: row["paper"] for row in EXPERIMENTS["table4"].rows(place)}
        assert papers["throughput, L = 512"] is None
        assert papers["throughput, L = 1024"] == paper
    place = bench.simulate(arguments(), bench.Hardware("gpt2", "a100"))
    assert place.batches == [(1024, 18)]

@cache
def tiny_place():
    config = GPTConfig(2, 4, 64, 96, n_kv_head=2, vocab_size=61, block_size=1024)
    words = "online --lengths 64,96 --seconds 0 --max-batch 4 --chunk 128 --rate 1000"
    return bench.Place(arguments(words), GPT.from_preset(config, torch.float32), "a tiny model")

@each("name", [name for name, what in EXPERIMENTS.items()  # spec_here is below
               if what.only != "simulated" and name not in ("spec_here", "ceilings")])
def test_experiment_measures(name, monkeypatch):
    place = tiny_place()
    monkeypatch.setattr(place, "jobs", fewer(place.jobs))
    monkeypatch.setattr(bench, "LONG", 0.0)
    monkeypatch.setattr(bench, "SCHEDULERS", {"sarathi": sarathi.Sarathi})
    monkeypatch.setattr(CostModel, "profile", lambda model: sarathi.Profile(model, 24, 0))
    rows = list(EXPERIMENTS[name].rows(place))
    assert rows and all(math.isfinite(row["ours"]) for row in rows)
    assert {row["source"] for row in rows} == {"measured"}

@each("words, source, prompts", [
    ("", "model", [b'"""The pap']),  # pieces of this project's files
    ("--model tiny --draft own.py:Own --prompts text", "Ngram", [b"One.", b"Two\nlines.", b"One."]),
])
def test_drafts_are_measured_on_text(words, source, prompts, monkeypatch, tmp_path):
    """With tiny and its draft, or --model and --draft. Graphs are recorded before that."""
    model = random_model(GPTConfig(1, 2, 32, 64, vocab_size=257, block_size=512))
    for name in ("tiny", "draft"):
        model.save_pretrained(tmp_path / "cache" / name)
    (tmp_path / "text").write_text("One.\n\nTwo\nlines.\n \n\n")
    (tmp_path / "own.py").write_text("from sarathi import Ngram as Own")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_py, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(CostModel, "profile", lambda model: CostModel.roofline(TINY, "h200"))
    monkeypatch.setattr(bench, "N_TEXT", (12, 9))
    monkeypatch.setattr(Engine, "warm", lambda engine: setattr(engine, "is_warm", True))
    generate = Engine.generate
    served = []
    monkeypatch.setattr(Engine, "generate", lambda engine, prompts, *args: engine.is_warm and (
        served.append(prompts) or generate(engine, prompts, *args)))
    place = bench.Place(arguments(f"spec_here --seconds 0 {words}"), model, "")
    ours = {tuple(row["at"][:2]): row["ours"] for row in EXPERIMENTS["spec_here"].rows(place)}
    assert len(ours) == 1 + 3 * 2 * 9
    assert ours["accepted, 24", "wrong, goodput"] == 0 < ours["B = 6", "wrong, goodput"]
    lookup = ours["accepted, 6", "lookup, k = 5"]  # as Own; the draft model is the same model
    assert ours["accepted, 6", f"{source}, k = 5"] == (lookup if words else 1)
    assert {*map(len, served[:10])} == {1} and {*map(len, served)} == {1, 6, 24}
    assert all(bytes(tokens).startswith(text) for tokens, text in zip(served[-1], prompts))

def test_measurements_on_a_fake_clock(monkeypatch):
    """An iteration takes 1 ms a row, the first one 100 s more. Making a request takes 5 s."""
    now = [0.0]

    def tick(seconds):
        now[0] += seconds

    def forward(model, batch, kv, mark=lambda operator: None):
        tick(0.00025 * len(batch.tokens) if now[0] else 100)
        mark("attn")
        tick(0.00075 * len(batch.tokens))
        mark("others")
        return torch.zeros(len(batch.logit_rows), 61)
    monkeypatch.setattr(GPT, "forward", forward)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(bench, "moment", lambda: now[0])
    model = GPT.from_preset(tiny_place().model.config, float32, "cpu")
    place = bench.Place(arguments("--seconds 0 --device cpu --lengths 64,96"), model, "")
    parts = place.operators(chunk=64)
    assert parts == {"attn": approx(np.full(2, 0.016)), "others": approx(np.full(2, 0.048))}
    larger = copy(place)
    monkeypatch.setattr(bench, "this_machine", lambda *_: larger)
    for seconds, expected in ((0.01, (place, 60)), (0.4, (place, 384)), (2.0, (larger, 921))):
        monkeypatch.setattr(bench, "LONG", seconds)
        assert bench.long_prompts(place) == expected
    make = bench.prompt_of
    monkeypatch.setattr(bench, "prompt_of", lambda *args: tick(5) or make(*args))
    run = bench.serve(Engine(model, n_page=100), [bench.Job(0.0, 8, 2)] * 3)
    assert max(run.ttfts) < 1

def test_a_race_takes_turns_and_keeps_what_it_has(monkeypatch):
    """Stopped in each call: the first of three rounds is left out, as are ways without a run."""
    place = tiny_place()
    monkeypatch.setattr(place.args, "seconds", 4)
    for n in range(10):
        serve = Mock(side_effect=[*range(n), KeyboardInterrupt])
        monkeypatch.setattr(place, "serve", serve)
        monkeypatch.setattr(bench.time, "perf_counter", lambda: 2 * serve.call_count)
        found = []
        with pytest.raises(KeyboardInterrupt) if n < 9 else nullcontext():
            found.extend(place.race({name: dict(name=name) for name in "abc"}, []))
        turns = "abccbaabc"[:n]
        first = 3 if n >= 6 else 0
        expected = [(name, [i for i in range(first, n) if turns[i] == name]) for name in "abc"]
        assert found == [pair for pair in expected if pair[1]], n
        assert serve.call_count == min(n + 1, 9)

@each("n_stage", [1, 3])
def test_intervals_cover_the_time_of_each_request(n_stage, tmp_path):
    """Or of each stage of a pipeline: without a gap, from an arrival on, with all tokens"""
    rng = random.Random(SEED)
    requests = [Request([1], id=id) for id in range(4)]
    record = [Iteration(0.0, 0.0, [Feed(request, 0, 0, 0) for request in requests])]
    for stage in rng.choices(range(n_stage), k=200):
        start = record[-1].end + rng.choice([0, 0.5])
        feeds = [Feed(r, 0, *rng.choice([(1, 1), (3, 3), (9, 1)])) for r in rng.sample(requests, 2)]
        record.append(Iteration(start, start + 1, feeds, stage))
    bench.write_trace(tmp_path / "trace.json", [("sarathi", record)])
    name, *events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert name["args"] == {"name": "sarathi"}
    ends = {}
    shown = Counter()  # tokens of each row so far
    for event in events:
        row, kind, start = event["tid"], event["name"], event["ts"]
        n = event["args"]["tokens"]
        idle = "bubble" if n_stage > 1 else "stall" if shown[row] else "waiting"
        assert kind == (idle if n == 0 else "prompt" if n > 6 else "decode")
        assert ends.get(row, start if n_stage > 1 else 0) == start < start + event["dur"]
        ends[row] = start + event["dur"]
        shown[row] += n
    assert shown.total() == sum(feed.n for iteration in record for feed in iteration.feeds)
    assert max(ends.values()) == 1e6 * record[-1].end

TRACES = [  # columns of arrival, prompt and output; of blocks, and how long these are
    ("Arrival", "prompt", " Output"), ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    ("Timestamp", "Request tokens", "Response tokens"),  # BurstGPT's; before it Azure's
    ("arrived_at", "num_prefill_tokens", "num_decode_tokens"),  # Vidur's
    ("timestamp", "input_length", "output_length"),  # guidellm's
    ("timestamp", "input_length", "output_length", "hash_ids", 512),  # Mooncake's, in ms
    ("timestamp", "input_length", "output_length", "hash_ids", 16, "chat_id")]  # Bailian's

UNITS = [  # how a time in ms is written
    lambda ms: ms / 1000, lambda ms: 1760000000000 + ms, lambda ms: (1760000000000 + ms) * 10**6,
    lambda ms: f"{np.datetime64('2026-11-28T23:30', 'ms') + ms}".replace("T", " ") + "-09:30"]

@each("columns", TRACES)
def test_traces_are_read_back(columns, tmp_path, capsys):
    """Random jobs of a window. A changed byte changes rows, or one line names the file."""
    rng = random.Random(f"{SEED} {columns}")
    names = [*columns[:4], *columns[5:], "Class"]
    for unit, is_json in product(UNITS, (True, False)):
        write = int if columns[-1] == 512 else unit
        ms = [*accumulate([0, 30000, 30000, *rng.choices([0, 1, 700, 30000], k=57)])]
        jobs = [(t, rng.randint(0, 40), rng.randint(0, 40)) for t in ms]
        rows = [dict(zip(names, (write(t), *others, *([7], 1)[:len(names) - 4], f"{t}")))
                for t, *others in jobs]
        lines = [json.dumps(row if is_json else [*row.values()]) for row in rows]
        if not is_json:
            lines = [",".join(names), *(line[1:-1] for line in lines)]
        data = rng.choice(["\n", "\r\n", "\n\n"]).join(lines).encode("utf-8-sig")
        path = tmp_path / rng.choice(["jobs.csv", "jobs.gz"])
        data = gzip.compress(data) if path.suffix == ".gz" else data
        path.write_bytes(data)
        window = [job for job in jobs if 60000 <= job[0] - ms[0] < 480000]
        served = [job for job in window if min(job[1:]) > 0 and sum(job[1:]) <= 70]
        found = bench.read_jobs(f"{path}", 70, (60, 480), speed=4)
        assert [(*job[1:3], job.label) for job in found] == [(p, o, f"{t}") for t, p, o in served]
        expected = [(t - served[0][0]) / 4000 for t, *_ in served]
        assert [job.arrival for job in found] == approx(expected, abs=1e-4)
        assert (f"60 rows read, {len(served)} kept, {len(window) - len(served)} skipped"
                in capsys.readouterr().err)
        assert bench.read_jobs(f"{path}", 70, (60, 480), 9, 4) == found[:9]
        if len(columns) > 3 and is_json:
            assert (found[0].blocks, found[0].size) == ((7,), columns[4])
        for i in rng.choices(range(len(data)), k=9):
            path.write_bytes(data[:i] + bytes([rng.randrange(256)]) + data[i + 1:])
            try:
                assert len(bench.read_jobs(f"{path}")) <= 61
            except ValueError as error:
                assert re.fullmatch(f".*{path.name}.*", str(error))

@each("text, needle", [
    ("a,b\n1,2\n", "row 1: a column is missing"),
    ("timestamp,input_length,output_length,hash_ids\n0,5,5,\n6,5,5,\n", "0.006 s are not pl"),
    ("timestamp,input_length,output_length\n0,5,5\n27000,5,5\n", "2.7e.04 s are not pl"),
    ("arrival,prompt,output\n0,5,5\n1,5.5,5\n", "row 2: 5.5 tokens: must be a whole number"),
    ("arrival,prompt,output\n2611281030,5,5\n", "row 1: 2611281030 as seconds since 1970"),
    ("arrival,prompt,output\n0,0,5\n0,5,0\n0,60,5\n0,-1,5\n", "no request is left to serve: 4"),
])
def test_a_wrong_trace_is_one_clear_line(text, needle):
    """Of a pipe, too, which is read once for all experiments"""
    end, pipe = os.pipe()
    os.write(pipe, text.encode())
    os.close(pipe)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"/dev/fd/{end}.*{needle}"):
            bench.read_jobs(f"/dev/fd/{end}", 64)
    bench.text_of.cache_clear()
    os.close(end)

def test_made_up_prompts_share_what_they_should():
    assert simulated("tng", "--seed 1").jobs.keywords == {"seed": 43}
    assert {job.prompt for job in bench.gamma_jobs(9, 99, prompt=(8, 64))} == {*range(8, 65)}
    for flags, n in (("", 0), ("--shared 40", 40)):
        jobs, *_ = bench.workload(simulated("online", f"online {flags}"), 9, (8, 99), (4, 4))
        prompts = [bench.prompt_of(job, i, 61) for i, job in enumerate(jobs)]
        assert [*map(len, prompts)] == [job.prompt for job in jobs]
        common = [os.path.commonprefix([prompts[0], other]) for other in prompts[1:]]
        assert [*map(len, common)] == [0] * 7 + [n]
        assert max(map(max, prompts)) < 61 and min(map(len, prompts)) >= n + 8

def test_serve_keeps_clients_and_arrivals():
    jobs = [bench.Job(5.0 * i, 9, 4 + i) for i in range(7)]
    engine = Engine(COST, max_batch=8, record=[])
    bench.serve(engine, jobs, clients=3)
    assert max(len(rows) for rows in rows_of(engine, 2) if max(rows) > 0) == 3
    engine.clock.t = 100.0
    arrivals = [request.arrival for request in bench.serve(engine, jobs).requests]
    assert arrivals == [100 + job.arrival for job in jobs]

# -----------------------------------------------------------------------------
# command lines

def command(monkeypatch, capsys, words, main=bench.main):  # -> exit status, stdout, stderr
    monkeypatch.setattr(sys, "argv", ["bench.py", *shlex.split(words)])
    status = 0
    try:
        run_command_line(main)
    except SystemExit as end:
        status = end.code
    return status, *capsys.readouterr()

@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Run sarathi.py with these flags and the model in tmp_path. -> (out, err)"""
    def call(flags):
        words = f"--model {tmp_path} --temperature 0 {flags}"
        status, *texts = command(monkeypatch, capsys, words, sarathi.main)
        assert status == 0, texts
        return texts
    return call

def test_command_line(call, tmp_path):
    TARGET.save_pretrained(tmp_path)
    ADAPTERS["ffn"].save_pretrained(tmp_path / "ffn")
    tokens = "--tokens " + ",".join(map(str, prompt(15)))
    sampled = [call(f"{tokens} --temperature 2 --seed {seed}")[0] for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    for name, flags in (
        (None, "--temperature 9 --top-k 1"),
        (None, "--temperature 9 --top-p 0.001"),
        ("ffn", f"--adapter {tmp_path}/ffn"),
        (None, f"--draft {tmp_path} --spec 3"),  # of the model itself
    ):
        out, err = call(f"{tokens} --max-new-tokens 12 {flags}")
        assert [*map(int, out.split())] == naive(tuple(prompt(15)), name, 12)
        figures = r"^15 \+ 12 tokens, \d+ output tokens/s, TTFT .* ms, TPOT .* ms"
        assert re.search(figures, err, re.M)
        assert err.startswith(f"{tmp_path}, float32, ") and (DEVICE == "cuda" or " thread" in err)
    assert re.search(r"([1-9]\d*) of \1 drafts accepted", err)
    as_fit = call(tokens)[0].split()  # by default as many as fit the context
    assert len(as_fit) == TINY.block_size - 15
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {as_fit[3]}}}')
    assert call(tokens)[0].split() == as_fit[:as_fit.index(as_fit[3]) + 1]
    GPT.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")  # as after a training
    assert GPT.from_pretrained(tmp_path / "again").stop == [int(as_fit[3])]

@each("value", ["''", "-1", "x", "1e99"])
@each("words", ["--explain", "--tokens 1,2", "online --hardware a100 --size small --seeds 1"])
def test_odd_values_of_flags(words, value, monkeypatch, capsys, tmp_path):
    """Of each flag of both command lines: exit status 0, or 2 and one line"""
    monkeypatch.chdir(tmp_path)
    TARGET.save_pretrained("model")
    main = bench.main if words.startswith("online") else sarathi.main
    monkeypatch.setattr(bench, "gamma_jobs", fewer(fewer(bench.gamma_jobs)))
    _, out, _ = command(monkeypatch, capsys, "--help", main)
    flags = re.findall(r"^  (--(?!memory)\S+) \S", out, re.M)
    assert len(flags) > 5
    for flag in flags:
        own = " --model model --max-new-tokens 3" * words.startswith("--tokens")
        line = f"{words}{own} {flag} {value}"
        status, _, err = command(monkeypatch, capsys, line, main)
        assert status == 2 * len(re.findall("^bench.py: ", err, re.M)) <= 2, (line, err)

def test_command_line_continues_a_text(call, tmp_path):
    model = random_model(replace(TINY, vocab_size=610))
    model.save_pretrained(tmp_path)
    tokenizer_of("gpt2").save(str(tmp_path / "tokenizer.json"))
    template = "({{ messages | map(attribute='content') | join('+') }}{{ '!' if loud }})"
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(tmp_path)
    own = tmp_path / "own"  # an adapter that brings its own template
    Adapter(model.config, {"self_attn.q_proj": 1}, float32).save_pretrained(own)
    shutil.copy(tmp_path / "tokenizer.json", own)
    (own / "chat_template.jinja").write_text("[7]")
    for flags, fed, start in (
            ("--raw", "7*7", "7*7"), ("", "(7*7)", "7*7\n"), (f"--adapter {own}", "[7]", "7*7\n"),
            ("--system be --template loud=False", "(be+7*7)", "7*7\n"),
            ("--template loud=yes", "(7*7!)", "7*7\n")):
        prompt = tokenizer.encode(fed)
        text_of = tokenizer.stream(prompt)
        expected = text_of(greedy_loop(model.logits, prompt, 12)) + text_of([])
        out, err = call(f"--prompt 7*7 --max-new-tokens 12 {flags}")
        assert out == f"{start}{expected}\n"
        assert ("chat template; --raw" in err) == (start != "7*7")
    with pytest.raises(ValueError, match="the chat template fails"):
        tokenizer.chat("7*7", messages=8)

def test_python_on_a_bare_machine(tmp_path):
    """No home, a terminal and files without UTF-8, no docstrings; how threads wait is set first."""
    code = """
import pwd
pwd.getpwuid = {}.__getitem__
import bench, kernels, os, sarathi
bench.make_parser()
sarathi.run_command_line(lambda: print(kernels.CACHE, os.environ["GOMP_SPINCOUNT"], "caf\\u00e9"))
"""
    environment = os.environ | dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0",
                                    PYTHONIOENCODING="ascii", TMPDIR=str(tmp_path))
    for name in ("HOME", "XDG_CACHE_HOME", "GOMP_SPINCOUNT"):
        environment.pop(name, None)
    run = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True,
                         cwd=Path(__file__).parent, env=environment)
    assert run.stdout == f"{tmp_path}/.cache/sarathi 3000 caf?\n", run.stderr

OWN = """
from sarathi import Memory, Policy, Sarathi
class Mine(Sarathi):
    pass
class One(Policy):
    def n_drafts(self, requests, limits, acceptance, price):
        return [min(1, limit) for limit in limits]
def newest(waiting, running, now):
    return waiting[::-1]
"""

@each("words, needle", [
    ("fig99", ": unknown experiment 'fig99'"),
    ("fig3 --jobs a.csv", "--jobs has no effect without online, attainment, capacity"),
    ("online --jobs a.csv --prompt 8", "--prompt has no effect with --jobs"),
    ("online --speed 2", "--speed has no effect without jobs"),
    ("fig3 --rate 3", "--rate has no effect without online"),
    ("online --seeds 3", "--seeds has no effect without hardware"),
    ("fig3 --model llama-70b --hardware a10g", "116.3 GB more than"),
    ("online --jobs a.csv --window 9", "window = [9]: must be like 3600..7200"),
    ("spec_here --hardware a100", "only be measured"),
    ("slora_fig6 --model llama-7b", "slora_fig6 has the paper's models: leave out --model"),
    ("fig3 --context 4096", "--hardware"),
    ("spec_here", "model 'tiny': is not trained yet, run `python model.py`"),
    ("online --scheduler own.py:Yours", "own.py:Yours: must be a Scheduler"),
    ("--explain --chunk 8", "--chunk has no effect with"),
    ("--tokens 1 --html x", "--html has no effect without"),
    ("--tokens 1 --template a=1", "--system and --template have no"),
])
def test_mistakes_are_one_line(monkeypatch, capsys, tmp_path, words, needle):
    monkeypatch.setattr(model_py, "CACHE", tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    main = sarathi.main if words.startswith("--") else bench.main
    status, out, err = command(monkeypatch, capsys, words, main)
    assert status == 2 and needle in err and not out
    assert re.fullmatch("bench.py: .*\n", err)

def test_how_a_command_ends(monkeypatch, capsys):
    """torch without memory is one line, another error of its is not; nor is a closed pipe."""
    text = "CUDA out of memory. Tried to allocate 20.00 GiB"
    ended = command(monkeypatch, capsys, "", Mock(side_effect=RuntimeError(text)))
    assert ended == (2, "", f"bench.py: {text}\n")
    with pytest.raises(RuntimeError):
        command(monkeypatch, capsys, "", Mock(side_effect=RuntimeError("a bug")))
    end, pipe = os.pipe()
    os.close(end)
    monkeypatch.setattr(sys, "stdout", open(pipe, "w"))
    status, _, err = command(monkeypatch, capsys, "list")
    sys.stdout.close()  # what it holds goes nowhere
    assert status == 141 and err == ""

def test_what_comes_out_of_a_run_that_is_stopped(monkeypatch, capsys, tmp_path):
    """Tables, rows, pictures and a trace of the first experiments, and what the last one has"""
    def endless(place):
        yield bench.Row("first", [1.0, 2.0, 6.0], x=1)
        yield bench.Row("second", math.nan, x=1)
        raise KeyboardInterrupt
    monkeypatch.setitem(EXPERIMENTS, "fig3", EXPERIMENTS["fig3"]._replace(run=endless))
    monkeypatch.chdir(tmp_path)
    words = "timeline fig7 fig3 fig4 --hardware a6000 --json rows --plot . --trace trace"
    status, out, _ = command(monkeypatch, capsys, words)
    assert status == 130 and [*re.findall("^### (.*)", out, re.M)] == words.split()[:3]
    assert "| 1025 " in out and "| 2 ± 1.2 (noise) " in out and "| 1.37 (off) " in out
    *others, first, second = json.loads(Path("rows").read_text())["rows"]
    assert len(others) == 15 + 24 + 2  # points, ratios of the paper
    assert (first["ours"], first["spread"]) == (2.0, (4.0 - 1.5) / 2)  # median and quartiles
    assert second["ours"] is None  # JSON has no NaN
    for name in words.split()[:3]:
        assert matplotlib.image.imread(f"{name}_a6000.png").std() > 0.05
    assert "stall" in Path("trace").read_text()

def lines_of(out):
    """The lines of the tables in a text, without the first two"""
    lines = [line.strip("| ").split("|") for line in out.splitlines() if line.startswith("| ")]
    return {line[0].strip(): [word.strip() for word in line[1:]] for line in lines[2:]}

@pytest.fixture
def online(monkeypatch, capsys):
    """Run it. -> its table; its rows; its requests; stderr"""
    def online(words):
        words = f"online --size small --hardware A100 --json - {words}"
        _, out, err = command(monkeypatch, capsys, words)
        report = json.loads(out.splitlines()[-1])
        rows = {tuple(row["at"][:2]): row for row in report["rows"] if row["at"][2] == ""}
        return lines_of(out), rows, report["requests"], err
    return online

def test_online_shows_parts_of_ones_own(online, tmp_path):
    """They run first, so that a mistake in them shows early."""
    own = tmp_path / "own.py"
    own.write_text(OWN)
    words = (f"--rate 9 --seeds 1 --schedulers sarathi,{own}:Mine --order fcfs,{own}:newest "
             f"--spec {own}:One")
    lines, *_ = online(words)
    names = ["sarathi, newest", "Mine, fcfs", "Mine, newest", "One, fcfs", "One, newest",
             "goodput, newest", "sarathi, fcfs", "goodput, fcfs"]
    assert [*lines] == names and len(lines["One, fcfs"]) == 12
    assert lines["Mine, fcfs"] == lines["sarathi, fcfs"] != lines["One, fcfs"]
    assert lines["Mine, newest"] == lines["sarathi, newest"] != lines["sarathi, fcfs"]
    for word, code in (("pass", "plan = lambda *args: {}['key']"), ("waiting[::-1]", "{}['key']")):
        own.write_text(OWN.replace(word, code))
        with pytest.raises(KeyError, match="key"):  # with a traceback: it is their code
            online(words)

def figures_of(requests):
    """Some of online's, of one run, from the rows of its requests"""
    ttfts = np.array([r["ttft"] for r in requests])
    ends = [r["arrival"] + r["ttft"] + (r["tpot"] or 0) * (r["output"] - 1) for r in requests]
    return {"TTFT p50": 1e3 * np.median(ttfts), "good": np.mean(ttfts <= 0.3),
            "tokens/s": sum(r["prompt"] + r["output"] for r in requests) / max(ends)}

@each("by, seeds, flags, line", [
    ("prompt", [7, 8, 9], "--rate 4 --prompt 64..128 --output 9",
     "32 requests over 11.27 s, prompts of 68 to 127 tokens, outputs of 9 to 9"),
    ("adapter", [7, 8, 9], "--rate 4 --adapters 3 --jobs lengths.csv --cv 0",
     "32 requests over 8 s, prompts of 64 to 64 tokens, outputs of 4 to 4"),
    ("class", [7], "--jobs trace.csv --context 20000 --window 0..20 --speed 0.5",
     "20 requests over 38 s, prompts of 11900 to 12071 tokens, outputs of 20 to 20"),
])
def test_online_says_who_pays(by, seeds, flags, line, online, monkeypatch, tmp_path):
    """Medians over the seeds, recomputed from each run's requests. A seed alone has the same."""
    monkeypatch.chdir(tmp_path)
    Path("lengths.csv").write_text("prompt,output\n" + "64,4\n" * 32)
    Path("trace.csv").write_text("arrival,prompt,output,class\n" + "".join(
        f"{i},{11900 + 9 * i},20,{i % 3}\n" for i in range(32)))
    made = Mock(side_effect=Engine)
    monkeypatch.setattr(bench, "Engine", made)
    words = f"--ttft 0.3 --tbt 9 --max-batch 3 --schedulers orca,sarathi --by {by} {flags}"
    _, rows, requests, err = online(f"{words} --seed 7 --seeds 3")
    assert err.endswith(f"{line}\n") and {call.args[3] for call in made.call_args_list} == {3}
    classes = [r["by"] for r in sorted(requests, key=lambda r: r["prompt"])]
    if by == "prompt":  # thirds
        assert classes == sorted(classes) and min(Counter(classes).values()) > 60
    for name in ("orca", "sarathi"):
        row = rows["runs", name]
        assert row["ours"] == len(seeds)
        assert row["machine"].startswith("llama-13b on 1 x a100, simulated; up to 3 requests")
        speeds = []
        for label in ("", *sorted({*classes})):
            runs = [figures_of([r for r in requests if label in ("", r["by"]) and (
                r["scheduler"], r["seed"]) == (name, seed)]) for seed in seeds]
            speeds.append([run["tokens/s"] for run in runs])
            for figure in runs[0]:
                row = rows[figure, f"{name}, {label}".removesuffix(", ")]
                low, middle, high = np.quantile([run[figure] for run in runs], (0.25, 0.5, 0.75))
                assert (row["ours"], row["spread"] or 0) == approx((middle, (high - low) / 2))
        jain = np.sum(speeds[1:], 0) ** 2 / 3 / np.square(speeds[1:]).sum(0)
        assert rows["Jain", name]["ours"] == approx(np.median(jain))
    *_, alone, _ = online(f"{words} --seed {seeds[-1]} --seeds 1")
    assert by == "prompt" or alone == [r for r in requests if r["seed"] == seeds[-1]]

def test_triton_in_its_interpreter(interpreter):
    pytest.importorskip("triton")
    run, path = interpreter
    assert run.wait() == 0, path.read_text()[-5000:]

@cache
def explained(scheduler, memory=None):
    """Of --explain: its texts, one for each iteration; its page; what its page shows"""
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()) as out:
        sarathi.explain(f"{folder}/page.html", scheduler=scheduler, memory=memory)
        page = Path(folder, "page.html").read_text(encoding="utf8")
    data = json.loads(re.search('json">(.*)</script>', page)[1])
    texts = out.getvalue().rstrip().split("\n\n")
    assert [data["title"], *(step["text"] for step in data["iterations"])] == texts
    return texts[1:], page, data["iterations"]

def test_explain_is_true_and_shows_what_the_papers_are_about():
    """A page has one owner; every token is fed in its place; outputs are those of a naive loop"""
    model = GPT.from_preset("tiny", torch.float32)
    prompt = [134, 1, 1, 8, 0, 1, 3, 2, 0, 4]
    tokens = prompt + greedy_loop(model.logits, prompt, 10)
    outputs = {"sarathi": defaultdict(list), "orca": defaultdict(list)}
    for scheduler, output in outputs.items():
        for step in explained(scheduler)[2]:
            assert sorted(chain(step["free"], *step["pages"].values())) == [*range(1, 33)]
            for feed in step["feeds"]:
                pages = step["pages"][f"request {feed['id']}"]
                assert feed["pages"] == [pages[at] for at in feed["positions"]]
                known = feed["positions"][:len(feed["tokens"])]
                assert feed["id"] or feed["tokens"] == [tokens[at] for at in known]
            for id, new, _ in step["events"]:
                output[id] += new
    assert outputs["sarathi"] == outputs["orca"] and outputs["orca"][0] == tokens[10:]
    texts, *_ = explained("sarathi")
    for what in ("starts", "is preempted", "; ends", "is loaded", "is evicted", "0, decode: feed",
                 "0 drafts accepted", "2 drafts accepted", "1, prefill chunk with adapter a: feed",
                 "the scheduler or the order",
                 "needs 11 pages (tokens 6, adapter b 4, kept free for others 1), free: 7"):
        assert what in "".join(texts)

def test_explain_takes_parts_of_ones_own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "named.py").write_text(
        "from own import Memory, Mine, newest\nMine.__name__ = 'Mine</script>'\n")
    command = [sys.executable, Path(sarathi.__file__), "--explain", "--scheduler",
               f"{tmp_path}/named.py:Mine", "--order", f"{tmp_path}/named.py:newest", "--memory",
               f"{tmp_path}/named.py:Memory", "--html", tmp_path / "page.html"]
    out = subprocess.run(command, capture_output=True, check=True).stdout
    assert b"Mine<" in out and b"iteration 4" in out  # a second module sarathi would have another
    assert out.index(b"request 3 starts") < out.index(b"request 0 starts")
    page = (tmp_path / "page.html").read_text(encoding="utf8")
    assert r"Mine\u003c/script>" in page
