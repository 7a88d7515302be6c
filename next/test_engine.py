"""The proofs of sarathi.py: tokens equal a naive loop with everything at once, sampled speculation is
lossless, pages are conserved, the simulator plans as the engine does, and schedulers, orders,
policies and cost models behave as the papers say."""
import os
import random
import re
import socket
import subprocess
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


@cache
def target():
    return random_model()


@cache
def draft(noise):
    """The target with noise. Its drafts are accepted now and then; with much noise hardly ever."""
    model = random_model(noise=noise)
    sarathi.PROFILES[model] = CostModel.roofline(TINY, "h200")  # so that nothing is timed
    return model


@cache
def adapter(name, config=TINY):
    weights = Adapter.random(config, RANKS[name], seed=len(name))
    weights.planes *= 4
    return weights


def prompt(n, seed=0):
    """Random tokens with repetitions, so that prompt lookup finds some"""
    rng = random.Random(seed)
    words = np.array([rng.randrange(61) for _ in range(12)]).reshape(3, 4)
    return np.concatenate([words[rng.randrange(3)] for _ in range(n)])[:n].tolist()


def mixed(names=(None,), n=6, **fields):
    """Requests of several lengths, with the adapters in turn"""
    return [Request(prompt(3 + 11 * i % 40, i), 4 + 5 * i % 17, names[i % len(names)], **fields)
            for i in range(n)]


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
    model.merge(name and adapter(name))
    return greedy_loop(model.logits, tokens, n)


def check_tokens(requests, case=None):
    for r in requests:
        assert r.output == naive(tuple(r.prompt), r.adapter, r.max_new_tokens), case


def serve(model, requests, adapters=(), scheduler="sarathi", **options):
    """Serve requests -> the engine, with its record and its events"""
    engine = Engine(model, scheduler, record=[], **options)
    for name in adapters:
        engine.add_adapter(name, adapter(name))
    for request in requests:
        engine.add(request)
    engine.events = []
    engine.run(engine.events.append)
    return engine


def n_preempted(engine):
    """How often a request's n_past went back to 0"""
    cached = {}
    n = 0
    for iteration in engine.record:
        for id, n_past, _, _ in iteration.entries:
            n += n_past == 0 < cached.get(id, 0)
            cached[id] = n_past
    return n


# -----------------------------------------------------------------------------
# greedy tokens, with everything at once

SPECS = ["2", "goodput", "goodput_request", "goodput_global", "confidence"]
FACTORS = {
    "scheduler": list(SCHEDULERS),
    "chunk": [1, 7, 16, 37, 100],
    "alloc": ["reserve", "grow"],
    "n_page": [75, 400],
    "adapters": [(None,), (None, "q"), (None, "q", "ffn", "all")],
    "drafts": [(None, "off"), *product(["ngram", 0.3, 9.0], SPECS)],  # source or noise, spec
    "temperature": [0.0, 1.0],  # of a neighbour
    "abort": [0, 4],  # step in which a neighbour is aborted, if not 0
}


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


CASES = pairwise_cover(FACTORS.values())


def test_the_matrix_holds_every_pair():
    n_pair = sum(len(a) * len(b) for a, b in combinations(FACTORS.values(), 2))
    assert len(set().union(*map(pairs, CASES))) == n_pair
    assert len(CASES) >= 60


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_greedy_tokens_equal_the_naive_loop(scheduler):
    preemptions = 0
    accepted = Counter()
    for case in [case for case in CASES if case[0] == scheduler]:
        _, chunk, alloc, n_page, names, (source, spec), temperature, abort = case
        engine = Engine(target(), scheduler, chunk, 4, n_page, alloc, spec=spec, cost=COST, record=[],
                        draft=draft(source) if isinstance(source, float) else source)
        for name in names[1:]:
            engine.add_adapter(name, adapter(name))
        greedy = mixed(names)
        others = [Request(prompt(11), 30, names[-1]),
                  Request(prompt(9), 20, names[-1], temperature=temperature)]
        for request in others + greedy:
            engine.add(request)
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
         dict(r=3, lora_alpha=6, target_modules=["k_proj", "down_proj"], rank_pattern={"k_proj": 5})]


@torch.no_grad()
def test_tokens_equal_pefts(tmp_path):
    """A mixed batch of PEFT's adapters, of several ranks and modules, and none, by every scheduler"""
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
    for scheduler in SCHEDULERS:
        engine = Engine(model, scheduler, chunk=13, max_batch=3, cost=COST)
        for i in range(len(LORAS)):
            engine.add_adapter(i, tmp_path / str(i))
        assert engine.generate(prompts, 12, [None, 0, 1, 2]) == expected, scheduler


# -----------------------------------------------------------------------------
# sampled speculation

FALSE_ALARM = 1e-7  # chance that a right implementation fails one comparison


def p_value(counts, p):
    """Chi-square: the chance of counts at least as far from the probabilities p as these. Cells in
    which fewer than five are expected become one."""
    expected = p.double() / p.double().sum() * counts.sum()
    small = expected < 5
    if counts[expected < 1e-9].any():
        return 0.0
    counts = torch.cat([counts[~small], counts[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]]).clamp(min=1e-9)
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2), statistic / 2).item()


def always_accept(p, q, drafts, n_drafts, u):
    """A broken rule: every draft that is possible is accepted."""
    u = torch.cat([torch.zeros(len(drafts)), u[len(drafts):]])
    return kernels.verify(p, q, drafts, n_drafts, u)


def forget_residual(p, q, drafts, n_drafts, u):
    """A broken rule: behind a rejected draft the token is sampled from p, not from max(p - q, 0)."""
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
    K = 3
    V = 12
    torch.manual_seed(1)
    p = torch.rand(K + 1, V) ** 4 * (torch.rand(K + 1, V) > 0.2)
    p = p / p.sum(1, keepdim=True)
    drafts = p.topk(2).indices[torch.arange(K), torch.tensor([0, 0, 1])].repeat(R, 1)  # (R, K)
    q = None
    if source == "draft model":
        q = (torch.rand(K, V) ** 2 * (torch.rand(K, V) > 0.2)).repeat(R, 1)
        q = q / q.sum(1, keepdim=True)
        drafts = torch.multinomial(q, 1).view(R, K)
    n_drafts = torch.full((R,), K)
    u = torch.rand(R * K + R)
    n_accepted, tokens = RULES[rule](p.repeat(R, 1), q, drafts.flatten(), n_drafts, u)
    chances = []
    for j in range(K + 1):  # the token at place j, of requests that came so far
        token = torch.where(n_accepted > j, drafts[:, min(j, K - 1)], tokens)
        counts = torch.bincount(token[n_accepted >= j], minlength=V)
        chances.append(p_value(counts, p[j]))
    assert (min(chances) > FALSE_ALARM) == (rule == "right"), chances
    assert (n_accepted == K).sum() > R / 100


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("source", ["ngram", "draft model"])
def test_sampled_speculation_end_to_end(source, rule, monkeypatch):
    """The first three tokens of 6,000 equal requests are distributed as the oracle says."""
    monkeypatch.setattr(sarathi, "verify", RULES[rule])
    config = replace(TINY, vocab_size=8)
    model = random_model(config)
    other = GPT.from_preset(config, torch.float32, seed=5)
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
# memory


def check_pages(engine):
    """Every page is free or has one owner. Owners are running requests and loaded adapters."""
    store = engine.adapters
    pools = {engine.pool, store.pool}
    for pool in pools:
        owned = [page for table in pool.tables.values() for page in table.tolist()]
        free = pool.free[:pool.n_free].tolist()
        assert len({*owned, *free}) == len(owned) + len(free) == pool.n_page
    owners = {owner for pool in pools for owner in pool.tables}
    assert owners == {*engine.running, *store.loaded}
    for request in engine.running:
        n = len(engine.pool.tables[request])
        assert n == request.max_len if engine.alloc == "reserve" else n >= request.n_past
    for name in store.loaded:
        assert len(store.pool.tables[name]) == store.n_page[name]
    users = Counter(r.adapter for r in engine.running if r.adapter is not None)
    assert +store.n_users == users and set(users) <= set(store.loaded)


@pytest.mark.parametrize("model, alloc, own_pool, n, n_adapter", [
    ("simulated", "grow", 0, 1000, 300), ("simulated", "reserve", 0, 300, 100),
    ("simulated", "grow", 900, 300, 100), ("real", "grow", 0, 60, 12)])
def test_pages_are_conserved(model, alloc, own_pool, n, n_adapter):
    """Random requests and aborts, with adapters that compete for a small pool"""
    rng = random.Random(0)
    engine = Engine(target() if model == "real" else COST, "sarathi_serve", 40, 24, 700, alloc,
                    order="lcfs", adapter_pages=own_pool, draft="ngram", spec=3, alpha=0.6, record=[])
    for name in range(n_adapter):
        engine.add_adapter(name, rng.choice([2, 3, 8]))
    for _ in range(n):
        name = rng.choice([None, rng.randrange(n_adapter), rng.randrange(5)])
        engine.add(Request(prompt(rng.randint(1, 60)), rng.randint(1, 60), name))
    n_aborted = 0
    n_evicted = 0
    loaded = set()
    while engine.requests:
        if rng.random() < 0.1:
            engine.abort(rng.choice([*engine.requests]))
            n_aborted += 1
        engine.step()
        check_pages(engine)
        n_evicted += len(loaded - set(engine.adapters.loaded))
        loaded = set(engine.adapters.loaded)
    assert engine.running == [] and set(engine.adapters.idle()) == loaded
    assert n_aborted > n / 20 and n_evicted > n_adapter / 3
    assert alloc == "reserve" or n_preempted(engine) > n / 20


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("options", [
    dict(alloc="reserve", n_page=150), dict(alloc="grow", n_page=75),
    dict(alloc="grow", n_page=75, spec="goodput", alpha=0.6, draft="free"),
    dict(alloc="reserve", spec=3, alpha=0.8, draft="model")], ids=str)
def test_the_simulator_plans_as_the_engine(scheduler, options):
    records = []
    for model, small in ((target(), draft(0.3)), (COST, CostModel.roofline(TINY, "h200"))):
        source = {"free": sarathi.ModelFree(), "model": small}.get(options.get("draft"))
        requests = mixed([None, *RANKS], 12, arrival=0.0)
        engine = serve(model, requests, RANKS, scheduler, chunk=20, max_batch=4, cost=COST,
                       **dict(options, draft=source))
        records.append([iteration.entries for iteration in engine.record])
    assert records[0] == records[1]
    assert options["alloc"] == "reserve" or n_preempted(engine)


@pytest.mark.parametrize("options", [
    dict(lora="batched"), dict(lora="bmm"), dict(lora="merge"), dict(adapter_pages=45),
    dict(adapter_pages=25, alloc="grow", n_page=60), dict(order=sarathi.cluster(2))], ids=str)
def test_every_way_to_compute_adapters_gives_the_same_tokens(options):
    requests = mixed([None, "q", "ffn", "all", "ffn", "q"], 12)
    serve(random_model(), requests, RANKS, chunk=16, max_batch=3, **options)
    check_tokens(requests)


def test_the_least_recently_used_adapter_is_evicted():
    engine = Engine(target(), max_batch=1, n_page=3 * 8 + 6)
    for name in "abcd":
        engine.add_adapter(name, adapter("q"))
    loaded = []
    for name in "abcacda":
        engine.generate([[1, 2]], 3, name)
        loaded.append("".join(sorted(engine.adapters.loaded)))
    assert loaded == ["a", "ab", "abc", "abc", "abc", "acd", "acd"]
    engine.generate([[1] * 10], 19)  # a request needs all pages but one
    assert engine.adapters.loaded == {}


def test_adapters_of_the_queue_are_copied_while_others_run():
    seconds = {}
    for prefetch in (True, False):
        engine = Engine(A100, "orca", max_batch=4, n_page=4 * 500 + 60 * 256)
        if not prefetch:
            engine.adapters.prefetch = lambda waiting: None
        for name in range(60):
            engine.add_adapter(name, 64)
            engine.add(Request([0] * 400, 20, name))
        engine.run()
        seconds[prefetch] = engine.clock.now()
    copy = A100.load(engine.adapters.known[0].n_params, False)[1]
    assert seconds[False] - seconds[True] == pytest.approx(56 * copy, rel=0.05)  # all but the first


# -----------------------------------------------------------------------------
# requests


def test_events_stop_tokens_and_times():
    requests = mixed()
    expected = naive(tuple(requests[3].prompt), None, 19)
    requests[3].stop = (expected[9],)
    engine = serve(target(), requests, max_batch=3, chunk=16, draft=draft(0.3), spec=3)
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
    engine = Engine(COST, "orca", max_batch=4, record=[])
    requests = [Request([0] * 9, 3, arrival=t) for t in (5.0, 2.0, 2.0, 900.0)]
    ids = [engine.add(request) for request in requests]
    engine.abort(ids[2])  # before it arrives
    engine.run()
    starts = {}
    for iteration in engine.record:
        starts.setdefault(iteration.entries[0][0], iteration.start)
    assert starts == {ids[1]: 2.0, ids[0]: 5.0, ids[3]: 900.0}  # the engine is idle in between
    engine.add(requests[2])
    late = Request([0], 1)
    engine.add(late)
    assert late.arrival == engine.clock.now() > 900


STATES = {
    "not arrived": lambda r: True,
    "waiting": lambda r: r.state == "waiting" and not r.output,
    "in its prompt": lambda r: 0 < r.n_past < len(r.prompt) and not r.output,
    "decoding": lambda r: r.state == "running" and len(r.output) > 3,
    "preempted": lambda r: r.state == "waiting" and r.output,
}


@pytest.mark.parametrize("state", STATES)
def test_abort_in_every_state(state):
    engine = Engine(target(), chunk=10, max_batch=4, n_page=75, alloc="grow", draft="ngram", spec=3)
    engine.add_adapter("q", adapter("q"))
    others = [Request(prompt(12, i), 25, arrival=0.0) for i in range(2)]
    victim = Request(prompt(25), 25, "q", arrival=1e9 if state == "not arrived" else 0.0)
    ids = [engine.add(request) for request in [*others, victim]]
    engine.step()
    while not STATES[state](victim):
        engine.step()
    engine.abort(ids[2])
    n = len(victim.output)
    check_pages(engine)
    engine.run()
    assert (victim.state, len(victim.output)) == ("aborted", n)
    check_tokens(others)
    for id in (ids[0], ids[2], 99):
        with pytest.raises(KeyError, match=f"no request with id {id} is waiting or running"):
            engine.abort(id)


OTHER = GPT.from_preset(replace(TINY, vocab_size=8), torch.float32)
BAD = {  # message -> options of the engine, or fields of a request
    "unknown scheduler 'fast'.* static, orca": dict(scheduler="fast"),
    "unknown order 'sjf'.* fcfs, lcfs": dict(order="sjf"),
    "unknown alloc 'lazy'.* reserve, grow": dict(alloc="lazy"),
    "unknown lora 'padded'.* bmm": dict(lora="padded"),
    "unknown spec 'best'.* goodput": dict(spec="best", draft="ngram"),
    "unknown draft 'tree'.* ngram": dict(spec=2, draft="tree"),
    "vocabulary of the draft model = 8.* 61": dict(spec=2, draft=OTHER),
    "oracle": dict(spec="oracle", draft="ngram"),
    "spec = 0": dict(spec=0, draft="ngram"),
    "chunk = 0": dict(chunk=0),
    "max_batch = -1": dict(max_batch=-1),
    "n_page = -5": dict(n_page=-5),
    "alpha = 1.5": dict(alpha=1.5),
    "tokens in the prompt = 0": dict(prompt=[]),
    "token = 61: must be in 0 .. 60": dict(prompt=[1, 61]),
    "token = -1": dict(prompt=[-1]),
    "max_new_tokens = 0": dict(max_new_tokens=0),
    "temperature = nan": dict(temperature=float("nan")),
    "top_k = -1": dict(top_k=-1),
    "top_p = 0": dict(top_p=0),
    "unknown adapter 'none'.* ffn": dict(adapter="none"),
    "prompt . max_new_tokens = 161: must be in 2 .. 160": dict(max_new_tokens=160),
    "pages of the request and its adapter = 81.* 80": dict(max_new_tokens=61, adapter="ffn"),
    "pages of the adapter = 96.* 80": dict(adapter="large"),
}


def test_bad_input_is_one_line_and_harms_no_other():
    engine = Engine(target(), max_batch=2, n_page=80, spec=2, draft="ngram")
    engine.add_adapter("ffn", adapter("ffn"))
    engine.add_adapter("large", 12)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        engine.add_adapter("lost", "nowhere")
    good = Request(prompt(12), 25, "ffn")
    engine.add(good)
    for message, fields in BAD.items():
        with pytest.raises((ValueError, KeyError), match=message) as raised:
            if set(fields) <= set(vars(good)):
                engine.add(Request(**dict(dict(prompt=[1]), **fields)))
            else:
                Engine(target(), **dict(dict(max_batch=2, n_page=80), **fields))
        assert "\n" not in str(raised.value)
        engine.step()
    with pytest.raises(ValueError):
        engine.generate([[1], [2]], 3, adapter=["ffn"])
    engine.run()
    check_tokens([good])
    outputs = engine.generate([prompt(12), prompt(5)], 9, [None, "ffn"])
    assert outputs == [naive(tuple(prompt(12)), None, 9), naive(tuple(prompt(5)), "ffn", 9)]
