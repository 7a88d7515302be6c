"""The proofs of sarathi.py: tokens equal a naive loop with everything at once, sampled speculation
is lossless, pages are conserved, the simulator plans as the engine does, and schedulers, orders,
policies and cost models behave as the papers say."""
import os
import random
import re
import socket
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import accumulate, combinations, pairwise, product
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

import kernels
import sarathi
from model import GPT, Adapter, GPTConfig, World, preset
from sarathi import SCHEDULERS, CostModel, Engine, Request

torch.set_num_threads(1)  # the models are tiny
TINY = GPTConfig(2, 4, 128, 160, n_kv_head=2, vocab_size=61, block_size=160)
COST = CostModel.roofline(TINY, "a10g")
A6000 = CostModel.roofline(preset("llama-13b"), "a6000")
A100 = CostModel.roofline(preset("llama-7b"), "a100")
RANKS = {  # adapter -> {module: rank}
    "q": {"self_attn.q_proj": 4},
    "ffn": {"mlp.up_proj": 3, "mlp.down_proj": 2, "self_attn.o_proj": 2},
    "all": {"self_attn.q_proj": 2, "self_attn.k_proj": 3, "mlp.gate_proj": 2},
}

def random_model(config=TINY, noise=0.0):
    """Weights so large that tokens differ, and noise on top of them"""
    model = GPT.from_preset(config, torch.float32, seed=1)
    rng = torch.Generator().manual_seed(2)
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data *= 8
            weight.data += noise * weight.std() * torch.randn(weight.shape, generator=rng)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return GPT.from_pretrained(folder)

TARGET = random_model()

@cache
def draft(noise):
    """The target with noise. Its drafts are accepted now and then; with much noise hardly ever."""
    model = random_model(noise=noise)
    sarathi.PROFILES[model] = CostModel.roofline(TINY, "h200")  # so that nothing is timed
    return model

def random_adapter(ranks, config=TINY):
    weights = Adapter.random(config, ranks)
    weights.planes *= 4
    return weights

ADAPTERS = {name: random_adapter(ranks) for name, ranks in RANKS.items()}

def prompt(n, seed=0):
    """Random tokens with repetitions, so that prompt lookup finds some"""
    rng = np.random.default_rng(seed)
    words = rng.integers(61, size=(3, 4))
    return words[rng.integers(3, size=n)].flatten()[:n].tolist()

def mixed(names=(None,), n=6, **fields):
    """Requests of several lengths, with the adapters in turn"""
    return [Request(prompt(3 + 11 * i % 40, i), 4 + 5 * i % 17, names[i % len(names)], **fields)
            for i in range(n)]

class Zeros(sarathi.Proposer):
    """Drafts for a forced acceptance rate"""

    def draft(self, request, k):
        return [0] * k

def equal_requests(n, n_prompt, n_output):
    return [Request([0] * n_prompt, n_output) for _ in range(n)]

def greedy_loop(logits_of, tokens, n):
    """n greedy tokens, by the logits of the growing sequence"""
    tokens = list(tokens)
    for _ in range(n):
        tokens.append(int(logits_of(torch.tensor(tokens))[-1].argmax()))
    return tokens[-n:]

@cache
def naive(tokens, name, n):
    """n greedy tokens by the oracle, with the weights of an adapter merged"""
    model = random_model()
    model.merge(ADAPTERS.get(name))
    return greedy_loop(model.logits, tokens, n)

def check_tokens(requests, case=None):
    for r in requests:
        assert r.output == naive(tuple(r.prompt), r.adapter, r.max_new_tokens), case

def start(model, requests, scheduler="sarathi", adapters=ADAPTERS, **options):
    """An engine with requests and adapters, and a record"""
    engine = Engine(model, scheduler, record=[], **options)
    for name in adapters:
        engine.add_adapter(name, adapters[name])
    for request in requests:
        engine.add(request)
    return engine

def serve(*args, **options):
    """Serve requests -> the engine, with its record and its events"""
    engine = start(*args, **options)
    engine.events = []
    engine.run(engine.events.append)
    return engine

def n_preempted(engine):
    """How often a request's n_past went back to 0"""
    cached = {}
    n = 0
    for iteration in engine.record:
        for id, n_past, *_ in iteration.entries:
            n += n_past == 0 < cached.get(id, 0)
            cached[id] = n_past
    return n

def check_pages(engine):
    """Every page is free or has one owner. Owners are running requests and loaded adapters."""
    store = engine.adapters
    pools = {engine.pool, store.pool}
    for pool in pools:
        pages = np.concatenate([pool.free, *pool.tables.values()])
        assert len(set(pages.tolist())) == len(pages) == pool.n_page
    loaded = {name for name in store.loaded if store.n_page[name]}
    assert {owner for pool in pools for owner, pages in pool.tables.items() if pages} == {*engine.running, *loaded}
    for request in engine.running:
        n = len(engine.pool.tables[request])
        assert n == request.max_len if engine.alloc == "reserve" else n >= request.n_past
    users = Counter([None] + [r.adapter for r in engine.running])
    assert +store.n_users == users and set(users) <= set(store.loaded)

# -----------------------------------------------------------------------------
# greedy tokens, with everything at once

SPECS = ["2", "goodput", "goodput_request", "goodput_global", "confidence"]
FACTORS = [
    list(SCHEDULERS),
    [1, 7, 16, 37, 100],  # chunk
    ["reserve", "grow"],
    [75, 400],  # pages
    [(None,), (None, "q"), (None, "q", "ffn", "all")],  # adapters
    [(None, "off"), *product(["ngram", 0.3, 9.0], SPECS)],  # source or noise of drafts, spec
    [0.0, 1.0],  # temperature of a neighbour
    [0, 4],  # step in which a neighbour is aborted, if not 0
    [("lora", "batched"), ("lora", "bmm"), ("lora", "merge"), ("adapter_pages", 45)],
    [None, sarathi.lcfs],
]

def pairs(case):
    return set(combinations(enumerate(case), 2))

def pairwise_cover(values):
    """Cases that hold every pair of values of two factors: of some random candidates that hold one
    of the missing pairs, always the one that holds most of them."""
    rng = random.Random(0)
    missing = set()
    for (i, first), (j, second) in combinations(enumerate(values), 2):
        missing |= set(product(product([i], first), product([j], second)))

    def candidate(fixed):
        return tuple(fixed.get(i, rng.choice(choices)) for i, choices in enumerate(values))

    cases = []
    while missing:
        fixed = dict(min(missing, key=str))
        candidates = [candidate(fixed) for _ in range(30)]
        cases.append(max(candidates, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(cases[-1])
    return cases

CASES = pairwise_cover(FACTORS)

def test_the_matrix_holds_every_pair():
    n_pair = sum(len(a) * len(b) for a, b in combinations(FACTORS, 2))
    assert len(set().union(*map(pairs, CASES))) == n_pair and len(CASES) >= 60

@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_greedy_tokens_equal_the_naive_loop(scheduler):
    preemptions = 0
    accepted = Counter()
    for case in [case for case in CASES if case[0] == scheduler]:
        _, chunk, alloc, n_page, names, (source, spec), temperature, abort, way, order = case
        model = random_model() if "merge" in way else TARGET
        greedy = mixed(names)
        others = [Request(prompt(11), 30, names[-1]),
                  Request(prompt(9), 20, names[-1], temperature=temperature)]
        engine = start(model, others + greedy, scheduler, chunk=chunk, alloc=alloc, n_page=n_page,
                       max_batch=4, spec=spec, cost=COST, order=order, **dict([way]),
                       draft=draft(source) if isinstance(source, float) else source)
        for _ in range(abort):
            engine.step()
        if abort:
            engine.abort(0)
        engine.run()
        check_tokens(greedy if temperature else greedy + others[1:], case)
        check_pages(engine)
        preemptions += n_preempted(engine)
        accepted[source] += engine.speculator.n_accepted if engine.speculator else 0
    assert preemptions > 0 and accepted["ngram"] > 5 and accepted[0.3] > 5

LORAS = [dict(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]),
         dict(r=20, lora_alpha=20, target_modules="all-linear", use_rslora=True),
         dict(r=3, lora_alpha=6, target_modules=["k_proj", "up_proj"], rank_pattern={"k_proj": 5})]

@torch.no_grad()
def test_tokens_equal_pefts(tmp_path):
    """A mixed batch of PEFT's adapters of several ranks and modules, by every scheduler"""
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    random_model().save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    prompts = [prompt(n, seed=n) for n in (17, 4, 29, 9)]
    logits_of = lambda known: theirs(known[None]).logits[0]
    expected = [greedy_loop(logits_of, prompts[0], 12)]
    for i, settings in enumerate(LORAS):
        wrapped = peft.get_peft_model(theirs, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
        wrapped.save_pretrained(tmp_path / str(i))
        expected.append(greedy_loop(logits_of, prompts[1 + i], 12))
        wrapped.unload()
        assert greedy_loop(logits_of, prompts[1 + i], 12) != expected[-1]
    model = GPT.from_pretrained(tmp_path)
    folders = {name: tmp_path / name for name in "012"}
    for scheduler in SCHEDULERS:
        engine = start(model, [], scheduler, folders, chunk=13, max_batch=3, cost=COST)
        assert engine.generate(prompts, 12, [None, *folders]) == expected, scheduler

# -----------------------------------------------------------------------------
# sampled speculation

FALSE_ALARM = 1e-7  # chance that a right implementation fails one comparison

def p_value(counts, p):
    """Chi-square: the chance of counts at least as far from the probabilities p as these. Cells in
    which fewer than five are expected become one."""
    expected = p.double() / p.double().sum() * counts.sum()
    if counts[expected < 1e-9].any():
        return 0.0
    small = expected < 5
    counts = torch.cat([counts[~small], counts[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]]).clamp(min=1e-9)
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2), statistic / 2).item()

def always_accept(p, q, drafts, n_drafts, u):
    """A broken rule: every draft that is possible is accepted."""
    u = torch.cat([torch.zeros(len(drafts)), u[len(drafts):]])
    return kernels.verify(p, q, drafts, n_drafts, u)

def forget_residual(p, q, drafts, n_drafts, u):
    """A broken rule: behind a rejected draft the token is sampled from p, not max(p - q, 0)."""
    n_accepted, _ = kernels.verify(p, q, drafts, n_drafts, u)
    first_row = (n_drafts + 1).cumsum(0) - n_drafts - 1
    return n_accepted, kernels.sample(p[first_row + n_accepted], u[len(drafts):])

RULES = {"right": kernels.verify, "always accept": always_accept, "no residual": forget_residual}

@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("source", ["lookup", "draft model"])
def test_verification_is_lossless(rule, source):
    """20,000 requests with three drafts each: a token is distributed as p of its row. Some tokens
    have no chance, as with top_k."""
    R = 20000
    V = 12
    torch.manual_seed(1)
    p = torch.rand(4, V) ** 4 * (torch.rand(4, V) > 0.2)
    p = p / p.sum(1, keepdim=True)
    q = None
    drafts = p[:3].argmax(1).repeat(R, 1)  # (R, 3)
    if source == "draft model":
        q = torch.rand(3, V) ** 2 * (torch.rand(3, V) > 0.2)
        q = (q / q.sum(1, keepdim=True)).repeat(R, 1)
        drafts = torch.multinomial(q, 1).view(R, 3)
    u = torch.rand(4 * R)
    n_drafts = torch.full((R,), 3)
    n_accepted, tokens = RULES[rule](p.repeat(R, 1), q, drafts.flatten(), n_drafts, u)
    chances = []
    for j in range(4):  # the token at place j, of requests that came so far
        token = torch.where(n_accepted > j, drafts[:, min(j, 2)], tokens)
        counts = torch.bincount(token[n_accepted >= j], minlength=V)
        chances.append(p_value(counts, p[j]))
    assert (min(chances) > FALSE_ALARM) == (rule == "right"), chances
    assert (n_accepted == 3).sum() > R / 100

@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("source", ["ngram", "draft model"])
def test_sampled_speculation_end_to_end(source, rule, monkeypatch):
    """The first three tokens of 6,000 equal requests are distributed as the oracle says."""
    monkeypatch.setattr(sarathi, "verify", RULES[rule])
    config = replace(TINY, vocab_size=8)
    model = random_model(config)
    other = random_model(config, noise=1.0)
    engine = Engine(model, "orca", max_batch=300, n_page=300 * 16, spec=2, seed=3,
                    draft=other if source == "draft model" else "ngram")
    tokens = [1, 2, 3, 1, 2, 4, 1, 2]
    outputs = torch.tensor(engine.generate([tokens] * 6000, 4, temperature=3.0))
    cells = torch.zeros(8, 8, 8)
    for a, b in product(range(8), repeat=2):
        p = (model.logits([*tokens, a, b]) / 3).softmax(-1)[-3:]
        cells[a, b] = p[0, a] * p[1, b] * p[2]
    counts = torch.bincount(outputs[:, :3] @ torch.tensor([64, 8, 1]), minlength=512)
    assert (p_value(counts, cells.flatten()) > FALSE_ALARM) == (rule == "right")
    assert engine.speculator.n_accepted > 500

# -----------------------------------------------------------------------------
# pages and adapters

@pytest.mark.parametrize("model, alloc, own_pool, n, n_adapter", [
    ("simulated", "grow", 0, 1000, 300), ("simulated", "reserve", 0, 300, 100),
    ("simulated", "grow", 900, 300, 100), ("real", "grow", 0, 60, 12)])
def test_pages_are_conserved(model, alloc, own_pool, n, n_adapter):
    """Random requests and aborts, with adapters that compete for a small pool"""
    rng = random.Random(0)
    requests = []
    for _ in range(n):
        name = rng.choice([None, rng.randrange(n_adapter), rng.randrange(5)])
        requests.append(Request(prompt(rng.randint(1, 60)), rng.randint(1, 60), name))
    ranks = {name: rng.choice([2, 3, 8]) for name in range(n_adapter)}
    engine = start(TARGET if model == "real" else COST, requests, "sarathi_serve", ranks, chunk=40,
                   max_batch=24, n_page=700, alloc=alloc, order=sarathi.lcfs, adapter_pages=own_pool,
                   draft="ngram", spec=3, alpha=0.6)
    n_aborted = 0
    ever_loaded = set()
    while engine.requests:
        if rng.random() < 0.1:
            engine.abort(rng.choice([*engine.requests]))
            n_aborted += 1
        engine.step()
        check_pages(engine)
        ever_loaded |= engine.adapters.loaded.keys()
    assert engine.running == [] and engine.adapters.n_users.total() == 1
    assert n_aborted > n / 20 and len(ever_loaded) > 1.5 * len(engine.adapters.loaded)
    assert alloc == "reserve" or n_preempted(engine) > n / 30

@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("options", [
    dict(alloc="reserve", n_page=150), dict(alloc="grow", n_page=75),
    dict(alloc="grow", n_page=75, spec="goodput", alpha=0.6, draft="free"),
    dict(alloc="reserve", spec=3, alpha=0.8, draft="model")], ids=str)
def test_the_simulator_plans_as_the_engine(scheduler, options):
    records = []
    for model, small in ((TARGET, draft(0.3)), (COST, CostModel.roofline(TINY, "h200"))):
        source = {"free": Zeros(), "model": small}.get(options.get("draft"))
        requests = mixed([None, *ADAPTERS], 12, arrival=0.0)
        engine = serve(model, requests, scheduler, chunk=20, max_batch=4, cost=COST,
                       **dict(options, draft=source))
        records.append([iteration.entries for iteration in engine.record])
    assert records[0] == records[1]
    assert options["alloc"] == "reserve" or n_preempted(engine)

def test_the_least_recently_used_adapter_is_evicted():
    adapters = dict.fromkeys("abcd", ADAPTERS["q"])  # of eight pages
    engine = start(TARGET, [], adapters=adapters, max_batch=1, n_page=3 * 8 + 6)
    loaded = []
    for name in "abcacda":
        engine.generate([[1, 2]], 3, name)
        loaded.append("".join(sorted(filter(None, engine.adapters.loaded))))
    assert loaded == ["a", "ab", "abc", "abc", "abc", "acd", "acd"]
    engine.generate([[1] * 10], 19)  # a request needs all pages but one
    assert [*engine.adapters.loaded] == [None]

def test_adapters_of_the_queue_are_copied_while_others_run(monkeypatch):
    seconds = []
    for _ in range(2):
        requests = [Request([0] * 400, 20, name) for name in range(60)]
        ranks = dict.fromkeys(range(60), 64)
        engine = serve(A100, requests, "orca", ranks, max_batch=4, n_page=20000)
        seconds.append(engine.clock.now())
        monkeypatch.setattr(sarathi.AdapterStore, "prefetch", lambda *_: None)
    copy = A100.load(engine.adapters.known[0].n_params, False)[1]
    assert seconds[1] - seconds[0] == pytest.approx(56 * copy, rel=0.05)  # all but the first four

# -----------------------------------------------------------------------------
# requests

def test_events_stop_tokens_and_times():
    requests = mixed()
    expected = naive(tuple(requests[3].prompt), None, 19)
    requests[3].stop = (expected[9],)
    engine = serve(TARGET, requests, max_batch=3, chunk=16, draft=draft(0.3), spec=3)
    assert engine.step() == []
    for request in requests:
        events = [event for event in engine.events if event.request is request]
        assert sum([event.tokens for event in events], []) == request.output
        assert [event.finished for event in events if event.finished] == [request.state]
        assert len(request.times) == len(request.output) and request.times == sorted(request.times)
        assert request.ttft > 0 and request.tpot >= 0
    stopped = requests.pop(3)
    assert stopped.output == expected[:expected.index(expected[9]) + 1]
    assert stopped.state == "stop" and {request.state for request in requests} == {"length"}
    check_tokens(requests)

def test_requests_start_when_they_arrive():
    requests = [Request([0] * 9, 3, arrival=t) for t in (5.0, 2.0, 2.0, 900.0)]
    engine = start(COST, requests, "orca", max_batch=4)
    engine.abort(2)  # before it arrives
    engine.run()
    starts = [(iteration.entries[0][0], iteration.start) for iteration in engine.record]
    assert starts[::3] == [(1, 2.0), (0, 5.0), (3, 900.0)]  # the engine is idle in between
    engine.add(Request([0], 1))
    assert engine.requests[4].arrival == engine.clock.now() > 900

STATES = {
    "not arrived": lambda r: True,
    "waiting": lambda r: r.state == "waiting" and not r.output,
    "in its prompt": lambda r: 0 < r.n_past < len(r.prompt) and not r.output,
    "decoding": lambda r: r.state == "running" and len(r.output) > 3,
    "preempted": lambda r: r.state == "waiting" and r.output,
}

def test_no_step_waits_for_an_aborted_request():
    engine = start(COST, [Request([0], 1, arrival=1e9)])
    engine.abort(0)
    assert engine.step() == [] and engine.clock.now() == 0

@pytest.mark.parametrize("state", STATES)
def test_abort_in_every_state(state):
    others = [Request(prompt(12, i), 25, arrival=0.0) for i in range(2)]
    victim = Request(prompt(25), 25, "q", arrival=1e9 if state == "not arrived" else 0.0)
    engine = start(TARGET, [*others, victim], chunk=10, max_batch=4, n_page=75, alloc="grow",
                   draft="ngram", spec=3)
    engine.step()
    while not STATES[state](victim):
        engine.step()
    engine.abort(2)
    n = len(victim.output)
    check_pages(engine)
    engine.run()
    assert (victim.state, len(victim.output)) == ("aborted", n) and engine.waiting == []
    check_tokens(others)
    for id in (0, 2, 99):
        with pytest.raises(KeyError, match=f"no request with id {id} is waiting or running"):
            engine.abort(id)

OTHER = GPT.from_preset(replace(TINY, vocab_size=8), torch.float32)
BAD = {  # message -> options of the engine, or fields of a request
    "unknown scheduler 'fast'.* static, orca": dict(scheduler="fast"),
    "unknown alloc 'lazy'.* reserve, grow": dict(alloc="lazy"),
    "unknown lora 'padded'.* bmm": dict(lora="padded"),
    "unknown spec 'best'.* goodput": dict(spec="best", draft="ngram"),
    "unknown draft 'tree'.* ngram": dict(spec=2, draft="tree"),
    "vocabulary of the draft model = 8.* 61": dict(spec=2, draft=OTHER),
    "oracle": dict(spec="oracle", draft="ngram"),
    "spec = 0": dict(spec=0, draft="ngram"),
    "chunk = 0": dict(chunk=0),
    "n_page = -5": dict(n_page=-5),
    "alpha = 1.5": dict(alpha=1.5),
    "tokens in the prompt = 0": dict(prompt=[]),
    "token = 61: must be in 0 .. 60": dict(prompt=[1, 61]),
    "token = -1": dict(prompt=[-1]),
    "max_new_tokens = 0": dict(max_new_tokens=0),
    "temperature = nan": dict(temperature=float("nan")),
    "top_p = 0": dict(top_p=0),
    "unknown adapter 'none'.* ffn": dict(adapter="none"),
    "prompt . max_new_tokens = 161: must be in 2 .. 160": dict(max_new_tokens=160),
    "pages of the request and its adapter = 81.* 80": dict(max_new_tokens=61, adapter="ffn"),
    "pages of the adapter = 96.* 80": dict(adapter="large"),
}

def test_bad_input_is_one_line_and_harms_no_other():
    good = Request(prompt(12), 25, "ffn")
    engine = start(TARGET, [], max_batch=2, n_page=80, spec=2, draft="ngram")
    engine.add_adapter("large", 12)
    engine.add(good)
    for message, fields in BAD.items():
        with pytest.raises((ValueError, KeyError), match=message) as raised:
            if set(fields) <= set(vars(good)):
                engine.add(Request(**dict(dict(prompt=[1]), **fields)))
            else:
                Engine(TARGET, **dict(dict(max_batch=2, n_page=80), **fields))
        assert "\n" not in str(raised.value)
        engine.step()
    with pytest.raises(ValueError):
        engine.generate([[1], [2]], 3, adapter=["ffn"])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        engine.add_adapter("lost", "nowhere")
    engine.run()
    check_tokens([good])

def test_a_tree_on_a_real_model_is_refused():
    with pytest.raises(ValueError, match="3, 2, 2"):
        Engine(TARGET, spec="3,2,2", draft="ngram")

def test_merged_weights_end_with_their_engine():
    model = random_model()
    for requests, lora in ((mixed(["q"]), "merge"), (mixed(), "batched")):
        serve(model, requests, lora=lora)
        check_tokens(requests)

# -----------------------------------------------------------------------------
# schedulers and orders, on the simulator

def test_every_scheduler_stalls_what_its_paper_says():
    """Three requests decode when a prompt of 3,000 tokens comes."""
    whole = A6000.time_of([(0, 3000, 1, 0)])
    gap = {}
    ttft = {}
    batches = {}
    for scheduler in SCHEDULERS:
        requests = equal_requests(3, 100, 60) + [Request([0] * 3000, 20, arrival=1.0)]
        engine = serve(A6000, requests, scheduler)
        gap[scheduler] = np.diff(requests[0].times).max() / whole
        ttft[scheduler] = requests[3].ttft / whole
        batches[scheduler] = [sorted(entry[2] for entry in i.entries) for i in engine.record]
    assert gap["static"] < 0.1 and ttft["static"] > 2  # the newcomer waits
    assert min(gap["orca"], gap["prefill_first"]) > 1  # the decodes wait
    for scheduler in ("sarathi", "sarathi_serve", "autopilot"):
        assert gap[scheduler] < 0.2 and ttft[scheduler] < 1.6
    assert [1, 1, 1, 3000] in batches["orca"] and [3000] in batches["prefill_first"]
    assert [1, 1, 1, 253] in batches["sarathi"] and [1, 1, 1, 253] in batches["sarathi_serve"]

@pytest.mark.parametrize("chunk, B", [(256, 18), (512, 10), (128, 6), (128, 200)])
def test_sarathi_fills_whole_tiles(chunk, B):
    """One chunk a batch. It and the decodes fill tiles of 128: with B - 1 decodes C - (B - 1)."""
    requests = equal_requests(2 * B, 550, 900)
    engine = serve(A6000, requests, chunk=chunk, max_batch=B, n_page=B * 1500)
    chunks = set()
    for iteration in engine.record:
        n_token = sum(entry[2] for entry in iteration.entries)
        prefills = [entry for entry in iteration.entries if entry[2] > 1]
        assert len(prefills) <= 1 and len(iteration.entries) <= B
        for _, n_past, n, *_ in prefills:
            if n_past + n < 550:
                assert n_token % 128 == 0 and n_token < max(chunk, B) + 128
                chunks.add(n)
    assert chunk - (B - 1) + 128 * (B == 200) in chunks

def test_figures_of_the_sarathi_paper():
    """Table 2 within 2 %, the gain of Table 4, and the largest batches [§4.3]"""
    decode = (1024, 1, 1, 0)
    cells = {234.8: [(0, 1024, 1, 0)], 49.96: [decode] * 4, 238.4: [(0, 1021, 1, 0)] + [decode] * 3}
    for milliseconds, entries in cells.items():
        assert 1e3 * A6000.time_of(entries) == pytest.approx(milliseconds, rel=0.02)
    seconds = {}
    for scheduler in ("static", "orca", "sarathi"):  # P:D = 50
        engine = serve(A6000, equal_requests(60, 1004, 20), scheduler, max_batch=6)
        seconds[scheduler] = engine.clock.now()
    assert 1.15 < seconds["static"] / seconds["sarathi"] < 1.35
    assert seconds["orca"] == pytest.approx(seconds["static"])  # its worst case
    for L, B in [(1024, 20), (2048, 10), (3072, 6)]:  # the paper says 18, 10 and 6
        cost = CostModel.roofline(replace(preset("llama-13b"), block_size=L), "a6000")
        assert Engine(cost, max_batch=0).max_batch == B

def fair(waiting, running, now):
    """An order of one's own: the adapter with the fewest running requests goes first."""
    n_running = Counter(request.adapter for request in running)
    return sorted(waiting, key=lambda request: n_running[request.adapter])

ORDERS = [  # order, adapters of waiting requests, of running ones -> positions in waiting
    (sarathi.fcfs, "Abacb", "", [0, 1, 2, 3, 4]), (sarathi.lcfs, "Abacb", "", [0, 4, 3, 2, 1]),
    (sarathi.cluster(1), "Abacb", "b", [1, 4, 0, 2, 3]),
    (sarathi.cluster(2), "Abacb", "b", [0, 1, 2, 4, 3]),
    (sarathi.cluster(2, sarathi.lcfs), "abacb", "cb", [4, 3, 1, 2, 0]),
    (sarathi.one_adapter(), "Abacb", "", [0, 2]),
    (sarathi.one_adapter(patience=1), "Abacb", "b", [1, 4]),
    (sarathi.one_adapter(patience=2), "Abacb", "c", []),  # the batch runs out
    (sarathi.EarlyAbort(3.0), "Abacb", "", [0, 4, 3, 2, 1]),  # more come than start
    (fair, "aaabb", "a", [3, 4, 0, 1, 2]),
]

def test_orders_of_the_queue():
    for order, waiting, running, expected in ORDERS:
        requests = [Request([0], adapter=c.lower(), arrival=float(i), id=i)
                    for i, c in enumerate(waiting)]
        for request, c in zip(requests, waiting):
            request.output = [7] if c.isupper() else []  # was preempted
        others = [Request([0], adapter=c) for c in running]
        assert [request.id for request in order(requests, others, 0.0)] == expected

def test_early_abort_serves_more_requests_in_time():
    """More requests than can be served [S-LoRA Fig. 10]"""
    in_time = []
    for order in (sarathi.fcfs, sarathi.lcfs, sarathi.EarlyAbort(6.0)):
        requests = [Request([0] * 500, 100, arrival=i / 18) for i in range(600)]
        serve(A100, requests, "orca", order=order, max_batch=16)
        in_time.append(sum(bool(r.times) and r.ttft < 6 for r in requests))
    assert any(request.state == "aborted" for request in requests)
    assert 2 * in_time[0] < in_time[1] < in_time[2] + 12

# -----------------------------------------------------------------------------
# speculation and autopilot

def test_forced_acceptance_is_like_coins_on_both_clocks():
    counts = []
    for model in (TARGET, COST):
        requests = [Request([1] * 5, 121) for _ in range(64)]
        engine = serve(model, requests, max_batch=32, spec=3, alpha=0.6, draft=Zeros())
        accepted = []
        for request in requests:  # the iterations in which every request has room for three drafts
            events = [event for event in engine.events if event.request is request]
            accepted += [len(event.tokens) - 1 for event in events[1:27]]
        counts.append(torch.bincount(torch.tensor(accepted)))
    assert torch.equal(*counts)
    assert p_value(counts[0], torch.tensor([0.4, 0.24, 0.144, 0.216])) > FALSE_ALARM

@pytest.mark.parametrize("alpha", [0.3, 0.7, 0.9])
def test_goodput_expects_the_papers_number_of_tokens(alpha):
    """l = (1 - alpha^(k + 1)) / (1 - alpha) [SmartSpec Eq. 8]: if k drafts cost l, every k is as
    good as any other, and the one that is a little cheaper is chosen."""
    for best in range(8):
        def price(n, n_step):
            return (1 - alpha ** (n // 3 + 1)) / (1 - alpha) - 1e-9 * (n_step == best)
        assert sarathi.Goodput().lengths([None] * 3, [7] * 3, alpha, price) == [(1,) * best] * 3

def test_policies_choose_as_the_paper_says():
    """Many drafts for small batches, none for large ones [SmartSpec Fig. 5]; the oracle never
    loses; more for requests with a higher acceptance rate; (3, 2, 2) are 21 drafts [Fig. 16]."""
    options = dict(draft="ngram", alpha=0.7)
    for B, low, high in [(1, 5, 7), (4, 5, 7), (64, 1, 4), (512, 0, 0)]:
        seconds = {}
        for spec in ["off", "1", "3", "5", "7", "goodput", "goodput_request", "oracle"]:
            engine = serve(A100, equal_requests(B, 30, 60), "orca", spec=spec, max_batch=B,
                           n_page=B * 100, **options)
            seconds[spec] = engine.clock.now()
            if spec == "goodput":
                n_draft = np.mean([entry[3] - 1 for i in engine.record[1:9] for entry in i.entries])
                assert low <= n_draft <= high, B
        assert seconds.pop("oracle") <= 1.005 * min(seconds.values())
        assert seconds["goodput"] <= 1.05 * min(seconds.values())
    policy = sarathi.GoodputRequest()
    requests = [Request([0], acceptance=alpha) for alpha in (0.9, 0.1, 0.6)]
    trees = policy.lengths(requests, [7, 7, 7], 0.5, lambda n, n_step: 1 + 0.1 * n)
    assert len(trees[0]) > len(trees[2]) > len(trees[1])
    engine = serve(A100, mixed(), spec="3,2,2", **options)
    assert max(entry[3] - 1 for i in engine.record for entry in i.entries) == 21

def test_a_draft_model_that_does_not_pay_is_spared_the_prompts():
    """If most decodes get no drafts, new requests are excluded for life [SmartSpec §5]."""
    requests = equal_requests(20, 300, 40)
    engine = start(A100, requests, max_batch=4, n_page=4000, draft=A6000, spec="goodput", alpha=0.5)
    past = {}
    engine.run(lambda event: past.setdefault(event.request, event.request.n_draft_past))
    past = [past[request] for request in requests]  # as of the first token
    assert past[:4] == [300] * 4 and past[-8:] == [0] * 8 and engine.speculator.n_drafted == 0

def test_drafts_are_those_of_the_draft_model(monkeypatch):
    """The draft model's cache follows the target's after rejections, preemptions and chunks."""
    small = draft(0.3)
    lengths_seen = set()
    propose = sarathi.DraftModel.propose

    def check(self, plan, lengths):
        propose(self, plan, lengths)
        for r in [r for r, _ in plan if r.drafts]:
            lengths_seen.add(len(r.drafts))
            assert r.drafts == greedy_loop(small.logits, r.prompt + r.output, len(r.drafts))
            assert len(engine.pool.tables[r]) >= r.n_past + 1 + len(r.drafts)  # lookahead [§6]

    monkeypatch.setattr(sarathi.DraftModel, "propose", check)
    requests = [Request(prompt(20 + i, i), 25) for i in range(6)]
    engine = start(TARGET, requests, "sarathi_serve", chunk=24, max_batch=4, n_page=90,
                   alloc="grow", draft=small, spec=3)
    engine.run()
    check_tokens(requests)
    assert n_preempted(engine) and lengths_seen == {1, 2, 3}
    assert 0 < engine.speculator.n_accepted < engine.speculator.n_drafted

def arriving(scheduler, cost, rate, n_prompt, n_output, **options):
    """60 requests with Poisson arrivals -> mean latency, worst TPOT, mean batch with a chunk"""
    rng = random.Random(0)
    times = accumulate(rng.expovariate(rate) for _ in range(60))
    requests = [Request([0] * n_prompt, n_output, arrival=t) for t in times]
    engine = serve(cost, requests, scheduler, max_batch=10, n_page=40000, **options)
    batches = [[entry[2] for entry in iteration.entries] for iteration in engine.record]
    return (np.mean([r.times[-1] - r.arrival for r in requests]), max(r.tpot for r in requests),
            np.mean([sum(batch) for batch in batches if max(batch) > 8]))

@pytest.mark.parametrize("gpu, workload", [
    ("a100", (1.2, 3000, 30)), ("a6000", (1.0, 1000, 100)), ("a6000", (0.5, 3000, 20))])
def test_autopilot_is_near_the_best_chunk_and_keeps_its_target(gpu, workload):
    cost = CostModel.roofline(preset("llama-13b"), gpu)
    fixed = [arriving("sarathi", cost, *workload, chunk=n)[:2] for n in (128, 256, 512, 1024)]
    latency, tpot, _ = arriving("autopilot", cost, *workload)
    assert latency < 1.08 * min(fixed)[0] and latency < max(fixed)[0]
    reachable = fixed[0][1]  # with the smallest chunk
    kept = arriving("autopilot", cost, *workload, tpot=reachable)[1]
    assert kept < 1.02 * reachable < tpot / 1.02
    options = dict(draft="ngram", alpha=0.7)
    goodput = arriving("autopilot", cost, *workload, spec="goodput", **options)[0]
    assert goodput < arriving("autopilot", cost, *workload, spec=1, **options)[0] < latency

def test_autopilots_chunk_grows_with_the_share_of_prompts():
    batches = [arriving("autopilot", A6000, *workload)[2]
               for workload in [(0.2, 640, 640), (0.8, 1000, 100), (1.5, 1500, 10)]]
    assert 1.1 * batches[0] < batches[1] and 1.1 * batches[1] < batches[2]

# -----------------------------------------------------------------------------
# the pipeline and tensor parallelism

def test_chunks_make_smaller_bubbles():
    """Eight stages of GPT-3 [SARATHI §5.3]"""
    cost = CostModel.roofline(preset("gpt3-175b"), "a100", tp=8, nodes=8)
    total = {}
    for scheduler in ("orca", "sarathi"):
        options = dict(scheduler=scheduler, max_batch=6, n_page=25000)
        pipeline = sarathi.Pipeline(cost, 8, record=[], **options)
        rng = random.Random(0)
        for n in [rng.randint(400, 2000) for _ in range(100)]:
            pipeline.add(Request([0] * n, n // 10))
        events = []
        pipeline.run(events.append)
        assert sum(event.finished == "length" for event in events) == 100
        idle = 0.0
        for stage in range(8):  # a stage does one thing at a time
            own = [iteration for iteration in pipeline.record if iteration.stage == stage]
            gaps = [after.start - before.end for before, after in pairwise(own)]
            assert min(gaps) > -1e-9
            idle += sum(gaps)
        total[scheduler] = sum(pipeline.bubbles.values())
        assert total[scheduler] == pytest.approx(idle) and min(pipeline.bubbles.values()) > 0
    assert total["sarathi"] < 0.7 * total["orca"]

WIDE = replace(TINY, n_head=8, n_kv_head=4, n_embd=256, n_inner=192)
SHARED = [{}, dict(draft="ngram", spec=3), dict(draft="model", spec=2), dict(names=["wide"])]

def serve_share(model, folder, names=("all", None, "ffn"), draft=None, spec="off"):
    """Serve a mixed batch, or follow rank 0 -> tokens, or None; and the bytes sent"""
    if draft == "model":
        draft = random_model(WIDE, noise=0.3)
    lead = model.world.rank == 0
    folders = {name: folder / name for name in ("all", "ffn", "wide")}
    engine = start(model, [], "sarathi", folders, chunk=20, max_batch=4, n_page=900, draft=draft,
                   spec=spec if lead else "off")
    model.world.n_bytes = 0
    tokens = None
    if lead:
        tokens = engine.generate([prompt(30 - i, i) for i in range(len(names))], 11, [*names])
        engine.runner.tell("stop")
    else:
        engine.runner.follow()
    return tokens, model.world.n_bytes

def run_rank(rank, n, port, folder):
    torch.set_num_threads(1)
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank),
                       WORLD_SIZE=str(n), LOCAL_RANK=str(rank))
    model = GPT.from_pretrained(folder, world=World.start(n))
    results = [serve_share(model, folder, **options) for options in SHARED]
    torch.save(results, folder / f"{rank}.pt")
    if rank == n - 1:
        model.forward = lambda *_: os._exit(0)  # this rank dies, and all others end with an error
    with pytest.raises(RuntimeError):
        serve_share(model, folder)
    (folder / f"{rank}.raised").touch()

@pytest.mark.parametrize("n", [2, 4])
def test_tensor_parallelism(n, tmp_path):
    model = random_model(WIDE)
    model.save_pretrained(tmp_path)
    for name, ranks in [*RANKS.items(), ("wide", 64)]:
        random_adapter(ranks, WIDE).save_pretrained(tmp_path / name)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        arguments = n, s.getsockname()[1], tmp_path
    group = torch.multiprocessing.spawn(run_rank, arguments, n, join=False, daemon=True)
    deadline = time.monotonic() + 90
    while not group.join(5):
        assert time.monotonic() < deadline, "a rank hangs"
    assert len([*tmp_path.glob("*.raised")]) == n - 1
    expected = serve_share(model, tmp_path)[0]
    for rank in (0, n - 1):
        results = torch.load(tmp_path / f"{rank}.pt")
        assert [tokens for tokens, _ in results[:3]] == [None if rank else expected] * 3
        # B = 40 tokens, h = 256, r = 64, two layers, float32 [S-LoRA §6]
        sent = 2 * (n - 1) * 40 * 256 // n * 2 + 5 * (n - 1) * 40 * 64 // n
        assert results[3][1] == 2 * 4 * sent

# -----------------------------------------------------------------------------
# the profile and the command line

def test_a_profile_of_this_machine():
    profile = CostModel.profile(random_model(replace(TINY, block_size=256)))
    assert profile.error < 0.35 and min(profile.coefficients) >= 0
    sizes = [(1, 0), (8, 0), (8, 500), (64, 500), (256, 900)]
    seconds = [profile.time(*size) for size in sizes]
    assert seconds == sorted(seconds) and 0 < seconds[0] < seconds[-1] < 1

MISTAKES = {
    "'nowhere': must be a folder": ["--model", "nowhere"],
    "has no tokenizer: use --tokens": ["--prompt", "hello"],
    "nowhere.*does not exist": ["--adapter", "nowhere"],
    "unknown spec 'best'": ["--spec", "best", "--draft", "ngram"],
    "token = 70: must be in 0 .. 60": ["--tokens", "1,70"],
    "invalid choice: 'fast'": ["--scheduler", "fast"],
    "tp = 2 needs 2 processes": ["--tp", 2],
}

def test_command_line(monkeypatch, capsys, tmp_path):
    TARGET.save_pretrained(tmp_path)
    ADAPTERS["ffn"].save_pretrained(tmp_path / "ffn")
    tokens = ["--tokens", ",".join(map(str, prompt(15)))]

    def call(flags):
        given = ["--model", tmp_path, "--max-new-tokens", 12, "--temperature", 0]
        monkeypatch.setattr(sys, "argv", ["sarathi.py", *map(str, given + flags)])
        sarathi.run_command_line(lambda: sarathi.generate_text(sarathi.parse_arguments()))
        return capsys.readouterr()

    drafts = ["--draft", tmp_path, "--spec", 3]  # of the model itself
    for name, flags in (("ffn", ["--adapter", tmp_path / "ffn"]), (None, drafts)):
        out, err = call(tokens + flags)
        assert [int(token) for token in out.split()] == naive(tuple(prompt(15)), name, 12)
        assert re.search(r"^15 \+ 12 tokens, \d+ tokens/s, TTFT .* ms, TPOT .* ms", err)
    assert re.search(r"([1-9]\d*) of \1 drafts accepted", err)
    for message, flags in MISTAKES.items():
        with pytest.raises(SystemExit) as end:
            call(flags if flags[0] in ("--tokens", "--prompt") else tokens + flags)
        out, err = capsys.readouterr()
        assert end.value.code == 2 and out == "" and "Traceback" not in err
        assert re.search(f"^sarathi.py: .*{message}", err, re.M), err

def test_padding_for_cuda_graphs_changes_no_logits():
    """Batches of decodes alone, and of decodes beside a chunk that fills the iteration"""
    engine = start(TARGET, mixed(), adapters={}, chunk=24, max_batch=4)
    runner = engine.runner
    graphs = sarathi.CudaGraphs(runner)
    compute = runner.compute
    n_padded = Counter()

    def compare(batch):
        logits = compute(batch)
        if graphs.fits(batch):
            n_padded[len(batch.spans) - batch.n_few] += 1
            torch.testing.assert_close(compute(graphs.pad(batch))[:len(logits)], logits)
        return logits

    runner.compute = compare
    engine.run()
    assert min(n_padded[0], n_padded[1]) > 0
