"""The proofs for sarathi.py: tokens equal a naive loop under everything at once, sampled speculation
is lossless, pages are conserved, the simulator plans as the engine does, and schedulers, orders,
policies and cost models behave as the papers say."""
import itertools
import random
from dataclasses import replace
from functools import cache

import pytest
import torch

import sarathi
from model import Adapter
from sarathi import SCHEDULERS, CostModel, Engine, Request
from test_model import LLAMA, random_model

torch.set_num_threads(1)  # the models are tiny
TINY = replace(LLAMA, n_embd=128, head_dim=32, n_inner=160, vocab_size=61, block_size=160)
COST = CostModel.roofline(TINY, "a10g")


@cache
def target():
    return random_model(TINY)


@cache
def draft(noise):
    """The target with noise added to its weights. Its drafts are accepted now and then; with much
    noise it is another model, and they are not."""
    model = random_model(TINY)
    torch.manual_seed(0)
    for name, weight in model.weights.items():
        weight = weight.to_dense()
        model.weights[name] = weight + noise * weight.std() * torch.randn_like(weight)
    model.find_layers()
    sarathi.PROFILES[model] = CostModel.roofline(TINY, "h200")  # so that nothing is timed
    return model


def prompt(n, seed=0):
    """Random tokens with repetitions, so that prompt lookup finds something"""
    rng = random.Random(seed)
    words = [[rng.randrange(61) for _ in range(4)] for _ in range(3)]
    tokens = [token for _ in range(n) for token in rng.choice(words)]
    return tokens[:n]


ADAPTERS = {  # name -> {module: rank}
    "q": {"self_attn.q_proj": 4},
    "ffn": {"mlp.up_proj": 3, "mlp.down_proj": 2, "self_attn.o_proj": 5},
    "all": {"self_attn.q_proj": 2, "self_attn.k_proj": 9, "self_attn.v_proj": 1, "mlp.gate_proj": 4},
}


@cache
def adapter(name):
    weights = Adapter.random(TINY, ADAPTERS[name], seed=len(name))
    weights.planes *= 4
    return weights


@cache
def naive(n_prompt, seed, name, n):
    """n greedy tokens by the oracle, over the growing sequence"""
    model = random_model(TINY)
    model.merge(name and adapter(name))
    tokens = prompt(n_prompt, seed)
    for _ in range(n):
        tokens.append(int(model.logits(tokens)[-1].argmax()))
    return tokens[n_prompt:]


def n_preempted(record):
    """How often a request's n_past went back to 0"""
    cached = {}
    n = 0
    for iteration in record:
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
    "pool": ["roomy", "tight"],
    "adapters": [(None,), (None, "q"), (None, "q", "ffn", "all")],
    "drafts": [("none", "off"), *itertools.product(["ngram", "draft", "wrong"], SPECS)],
    "sampled": [False, True],
    "aborted": [False, True],
}


def pairs_of(case):
    return set(itertools.combinations(enumerate(case), 2))


def pairwise_cover(values, seed=0):
    """Cases in which every pair of values of two factors occurs: of random candidates that hold a
    missing pair, always the one with the most."""
    rng = random.Random(seed)
    missing = set()
    for (i, first), (j, second) in itertools.combinations(enumerate(values), 2):
        missing |= {((i, a), (j, b)) for a in first for b in second}
    cases = []
    while missing:
        wanted = dict(min(missing, key=str))
        candidates = []
        for _ in range(30):
            case = [wanted.get(i, rng.choice(choices)) for i, choices in enumerate(values)]
            candidates.append(tuple(case))
        cases.append(max(candidates, key=lambda case: len(pairs_of(case) & missing)))
        missing -= pairs_of(cases[-1])
    return cases


CASES = pairwise_cover(FACTORS.values())


def serve_case(case):
    """Serve six requests -> (engine, greedy requests with their oracle's arguments, record)"""
    scheduler, chunk, alloc, pool, names, (source, spec), sampled, aborted = case
    record = []
    source = {"ngram": "ngram", "draft": draft(0.3), "wrong": draft(9.0)}.get(source)
    engine = Engine(target(), scheduler, chunk, max_batch=4, n_page=80 if pool == "tight" else 400,
                    alloc=alloc, draft=source, spec=spec, cost=COST, record=record)
    for name in names[1:]:
        engine.add_adapter(name, adapter(name))
    greedy = []
    for i, (n_prompt, n) in enumerate([(21, 18), (5, 12), (34, 9), (2, 16), (13, 14), (40, 1)]):
        name = names[i % len(names)]
        greedy.append((Request(prompt(n_prompt, i), n, name), (n_prompt, i, name, n)))
    others = []
    if sampled:
        others.append(Request(prompt(9), 20, names[-1], temperature=1.0))
    if aborted:
        others.append(Request(prompt(11), 30, names[-1]))
    for request in [*others, *(request for request, _ in greedy)]:
        engine.add(request)
    for _ in range(5):
        engine.step()
    if aborted:
        engine.abort(others[-1].id)
    engine.run()
    return engine, greedy, record


def test_the_matrix_holds_every_pair():
    assert len(CASES) >= 60
    values = [*FACTORS.values()]
    expected = sum(len(a) * len(b) for a, b in itertools.combinations(values, 2))
    assert len(set().union(*map(pairs_of, CASES))) == expected


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_greedy_tokens_equal_the_naive_loop(scheduler):
    preemptions = 0
    accepted = dict.fromkeys(("ngram", "draft"), 0)
    for case in CASES:
        if case[0] != scheduler:
            continue
        engine, greedy, record = serve_case(case)
        for request, key in greedy:
            assert request.output == naive(*key), case
        assert engine.pool.n_free + engine.adapters.n_idle_page() == engine.pool.n_page, case
        preemptions += n_preempted(record)
        if engine.speculator:
            accepted[case[5][0]] = accepted.get(case[5][0], 0) + engine.speculator.n_accepted
    assert preemptions > 3
    assert accepted["ngram"] > 5 and accepted["draft"] > 5
