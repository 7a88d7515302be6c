"""The serving engine: SARATHI, S-LoRA and SmartSpec in one loop.

In reading order: requests; the engine, one iteration of it in `Engine.step`; memory (pages and
adapters); schedulers; orders of the queue; speculation (policies and proposers); the runner, which
carries plans out on a model; the simulator (cost models, a runner that moves a clock, a pipeline);
figures of a run; checks; the command line.

A plan says how many tokens of which request are fed next: [(request, n)]. A prefill chunk, a decode
and a verification of drafts are the same thing. The engine knows requests, pages and plans, and no
tensors; tensors begin in ModelRunner.pack, attention is in model.py and kernels.py.
"""
from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
from array import array
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, count, groupby, islice, product
from numbers import Integral, Real
from operator import index, mul
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary, proxy

# kernels before torch: it sets how torch's threads wait
from kernels import (FEW_ROWS, LORA_ROWS, Batch, Sites, cdiv, has_triton, probabilities, sample,
                     send, verify)
from model import (GPT, PRESETS, ROW_PARALLEL, Adapter, GPTConfig, World, load_model,
                   load_tokenizer, stop_tokens)

import numpy as np
import torch
from tqdm import tqdm

MASK = 2**64 - 1  # seeds and random numbers have 64 bits

# -----------------------------------------------------------------------------
# requests

@dataclass(eq=False)
class Request:
    """One user's request and how far it has come.

    |<--------- prompt --------->|<---- output ---->|
    |<------ n_past: cached ------>|<--- n_todo --->|<-- drafts -->|"""
    # from the user
    prompt: list[int]
    max_new_tokens: int = 32
    adapter: str | None = None  # a name given to Engine.add_adapter
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    stop: tuple[int, ...] = ()  # tokens that end the output; a token or None will do
    arrival: float | None = None  # seconds on the engine's clock; None: now
    seed: int | None = None  # of sampled tokens; None: of the engine's seed and the id
    alpha: float | None = None  # forced chance of its drafts; None: the engine's alpha
    # of the engine
    id: int = -1  # given by Engine.add
    state: str = "waiting"  # -> running -> length, stop or aborted
    version: int = 0  # of the adapter, the newest when the request is added
    output: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # seconds at which each output token came
    n_past: int = 0  # tokens with K and V in the cache
    # of speculation
    n_draft_past: int = 0  # tokens with K and V in the cache of a draft model
    may_draft: bool = True  # False: a draft model leaves this request out
    drafts: list[int] = field(default_factory=list)  # guessed tokens, within an iteration
    tree: tuple[int, ...] = ()  # candidates per level of the drafts; real drafts have one per level
    draft_probs: list = field(default_factory=list)  # (1, V) for each sampled draft: its q
    acceptance: float | None = None  # estimated rate of its drafts; at first that of all requests

    @property
    def n_tokens(self):
        return len(self.prompt) + len(self.output)

    @property
    def n_todo(self):
        return len(self.prompt) + len(self.output) - self.n_past

    @property
    def max_len(self):
        return len(self.prompt) + self.max_new_tokens

    @property
    def end(self):
        """"stop" or "length" if the output is complete, else ""."""
        if self.output and self.output[-1] in self.stop:
            return "stop"
        return "length" if len(self.output) == self.max_new_tokens else ""

    @property
    def ttft(self):
        """Seconds from arrival to the first token."""
        return self.times[0] - self.arrival

    @property
    def tpot(self):
        """Seconds per token after the first one."""
        return (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1)

    def tokens(self, start, end):
        """The known tokens start .. end - 1, as a list."""
        n = len(self.prompt)
        return [*self.prompt[start:end], *self.output[max(0, start - n):max(0, end - n)]]

    def append(self, tokens, now):
        """Append tokens up to the end of the output. Returns those appended."""
        for n, token in enumerate(tokens, 1):
            self.times.append(now)
            self.output.append(token)
            if self.end:
                return tokens[:n]
        return tokens

    def forget(self):
        """Nothing is cached any more: wait to be recomputed."""
        self.n_past = 0
        self.n_draft_past = 0
        self.drop_drafts()
        self.state = "waiting"

    def drop_drafts(self):
        self.drafts = []
        self.tree = ()
        self.draft_probs = []

class Event(NamedTuple):
    """New tokens of a request."""
    request: Request
    tokens: list[int]
    finished: str  # "length", "stop", or "aborted" by the order, if they are the last; else ""

class Entry(NamedTuple):
    """What an iteration computes for one request."""
    id: int  # of the request
    n_past: int
    n_row: int  # tokens, drafts included
    n_logits: int  # rows with logits
    version: int = 0  # of the adapter
    n_weight: int = 0  # of the adapter

class Iteration(NamedTuple):
    start: float  # seconds
    end: float
    entries: list[Entry]
    stage: int = 0  # of a simulated pipeline

# -----------------------------------------------------------------------------
# the engine

class Engine:
    """Serves requests with one model, one iteration per step().

    model: a GPT; or a CostModel: the simulator, with a virtual clock
    scheduler: a name in SCHEDULERS, or a Scheduler
    chunk: tokens of an iteration that feeds a prefill chunk, its decodes included
    max_batch: requests that run at once; 0: as many as fit [SARATHI §4.3]
    n_page: pages of the cache, one per token; 0: for max_batch requests and an adapter of rank 256,
        if memory has room
    alloc: "reserve" a request's maximum length at its start, or "grow" page by page
    draft: None, "ngram", a smaller GPT or CostModel, or a Proposer
    spec: "off", a number of drafts, a name in POLICIES, or a Policy; None: three, if draft is given
    seed: of the sampled tokens of requests without a seed of their own
    alpha: if not 0, each draft is accepted with this forced chance
    order: a function (waiting, running, now) -> list
    lora: "batched", or the baselines "bmm" and "merge" [S-LoRA §7]
    adapter_pages: pages of a pool for adapters alone (the no-unify baseline); 0: one pool
    tpot: autopilot's target, seconds per token; 0: none
    cost: prices for the policies; None: a profile of this machine, made if a policy asks
    record: a list to which every Iteration is appended"""
    def __init__(self, model: GPT | CostModel, scheduler: str | Scheduler = "sarathi",
                 chunk: int = 256, max_batch: int = 8, n_page: int = 0, alloc: str = "reserve",
                 draft: str | GPT | CostModel | Proposer | None = None,
                 spec: str | int | Policy | None = None, seed: int = 0, alpha: float = 0.0,
                 order: Callable | None = None, lora: str = "batched", adapter_pages: int = 0,
                 tpot: float = 0.0, cost: CostModel | None = None, record: list | None = None):
        self.model = check_type("model", model, (GPT, CostModel), "a GPT or a CostModel")
        self.simulated = isinstance(model, CostModel)
        self.chunk = check_range("chunk", chunk, 1)
        self.alloc = check_choice("alloc", alloc, ("reserve", "grow"))
        self.lora = check_choice("lora", lora, ("batched", "bmm", "merge"))
        self.alpha = check_range("alpha", alpha, 0.0, 1.0)
        self.tpot = check_range("tpot", tpot, 0.0)
        self.seed = check_range("seed", seed, 0, 2**63)
        self.record = record

        # requests, from their arrival to their end
        self.requests = {}  # id -> request, from add to its end
        self.pending = []  # requests that have not arrived, the next one first
        self.waiting = []  # preempted requests first, then by arrival
        self.running = []  # the most recently started last
        self.ordered = []  # the waiting requests, as the order gave them last
        self.undelivered = []  # that were not handed on yet
        self.full = False  # a waiting request had no room, and nothing has changed since
        self.ids = count()

        # policies, and the prices that they ask for
        self.scheduler = make_scheduler(scheduler)
        self.order = check_type("order", order or fcfs, Callable, "a function like lcfs")
        if lora == "merge":
            self.order = one_adapter(self.order)
        self.cost = cost or (model if self.simulated else None)
        policy = make_policy(spec, draft, self)
        if self.cost is None and (self.scheduler.needs_price or policy and policy.needs_price):
            self.cost = CostModel.profile(model)

        # memory and the runner. Parts refer to the engine weakly: without a cycle, its cache is
        # freed as soon as the engine is
        n_page, self.max_batch = size_pool(self, draft, n_page, adapter_pages, max_batch)
        self.pool = PagePool(n_page)
        adapter_pool = PagePool(adapter_pages, first=n_page) if adapter_pages else self.pool
        self.adapters = AdapterStore(adapter_pool, Adapter(model.config, {}))
        self.merged = 0  # the version in the weights, if lora is "merge"
        self.clock = VirtualClock() if self.simulated else WallClock()
        engine = proxy(self)
        self.runner = CostRunner(engine, model) if self.simulated else ModelRunner(engine, model)
        self.adapters.start_copy = self.runner.copy_adapter
        self.speculator = Speculator(engine, draft, policy) if policy else None
        self.scheduler.start(engine)

    def step(self) -> list[Event]:
        """One iteration. Returns its events; none if nothing can run now. After any exception, all
        requests wait again, and the engine serves on."""
        try:
            self.arrive()
            self.aborted = []  # events of requests that the order ends
            planned = self.scheduler.plan([*self.running], self.queue())  # policy [SARATHI §4.3]
            plan = self.admit(planned)  # memory: pages, adapters, preemption [S-LoRA §5.1]
            if not plan:
                return self.idle(planned)
            if self.speculator:
                self.speculator.add_drafts(plan)  # drafts behind the decodes [SmartSpec §5]
            start = self.clock.now()
            new_tokens = self.runner.run(plan)  # one flat batch [SARATHI §4.3] [S-LoRA §5.3]
            if self.record is not None:
                self.record.append(Iteration(start, self.clock.now(), entries_of(plan, self)))
            return self.commit(plan, new_tokens)  # advance, drop rejected drafts, finish
        except BaseException:
            self.recover()
            raise

    def warm(self):
        """Compile kernels and record CUDA graphs for all iterations of up to a chunk, so that no
        request waits for them. On a CPU and in the simulator there is nothing to do."""
        start = time.perf_counter()
        self.runner.warm()
        if self.speculator:
            self.speculator.proposer.warm()
        seconds = time.perf_counter() - start
        if seconds > 1:
            print(f"compiled kernels and recorded CUDA graphs in {seconds:.0f} s", file=sys.stderr)

    # requests and adapters come and go

    def add_adapter(self, name: str, source: str | Adapter | int):
        """Make an adapter known. source: a PEFT folder, an Adapter, or a rank (random weights).
        Under a used name it replaces the other one: requests that were added before keep that.
        FileNotFoundError or ValueError for a folder that is missing or does not fit."""
        self.adapters.add(name, read_adapter(name, source, self))
        self.drop_versions()
        # the other ranks call add_adapter too, or are in ModelRunner.follow(), which adds a folder.
        # broadcast returns what rank 0 gives it
        source = None if isinstance(source, Adapter) else source
        values = self.model.world.broadcast(("hold", (name, source, {*self.adapters.known})))[1]
        theirs, _, versions = values
        assert theirs == name, f"adapter {name!r}: rank 0 adds {theirs!r} at this point"
        self.adapters.keep(versions)  # the other ranks have no requests

    def remove_adapter(self, name: str):
        """Forget an adapter. Requests that were added before keep it. KeyError if it is unknown."""
        names = [name for name in self.adapters.newest if name is not None]
        del self.adapters.newest[check_choice("adapter", name, names)]
        self.drop_versions()

    def drop_versions(self):
        """Forget replaced and removed adapters that no request needs: other ranks do so when an
        adapter is added."""
        store = self.adapters
        if self.model.world.rank == 0 and len(store.known) > len(store.newest):
            needed = {request.version for request in self.requests.values()}
            store.keep(needed.union(store.newest.values()))

    def add(self, request: Request) -> int:
        """Queue a request. Returns its id. ValueError or KeyError if it could never be served."""
        check_request(request, self)
        request.id = next(self.ids)
        if request.arrival is None:
            request.arrival = self.clock.now()
        if request.alpha is None:
            request.alpha = self.alpha
        if request.seed is None:
            request.seed = ((self.seed << 24) + request.id) & MASK
        request.version = self.adapters.newest[request.adapter]
        self.requests[request.id] = request
        insort(self.pending, request, key=lambda request: request.arrival)
        return request.id

    def generate(self, prompts: list[list[int]], max_new_tokens: int = 32,
                 adapter: str | list | None = None, **options) -> list[list[int]]:
        """Serve prompts (lists of tokens). Returns the list of outputs. adapter: a name for all, or
        a list of names; options: other fields of Request."""
        names = adapter if isinstance(adapter, list) else [adapter] * len(prompts)
        check_range("names in adapter", len(names), len(prompts), len(prompts))
        requests = [Request(prompt, max_new_tokens, name, **options)
                    for prompt, name in zip(prompts, names)]
        undelivered, self.undelivered = self.undelivered, []  # of a run that has called this
        try:
            for request in requests:
                self.add(request)
            self.run()
        finally:  # after an exception, these requests leave the engine
            left = [self.requests.pop(request.id, None) for request in requests]
            if any(left):
                self.recover()
            self.undelivered = undelivered + self.undelivered
        return [request.output for request in requests]

    def run(self, on_event: Callable[[Event], None] = lambda event: None) -> Run:
        """Step until every request has ended; on_event gets the tokens one by one. Returns the Run
        of requests not aborted. If on_event fails, the next run hands on the other events."""
        start = self.clock.now()
        finished = []
        while self.requests or self.undelivered:
            if not self.undelivered:
                for request, tokens, end in self.step():
                    self.undelivered += [Event(request, [token], "") for token in tokens[:-1]]
                    self.undelivered.append(Event(request, tokens[-1:], end))
            while self.undelivered:
                event = self.undelivered.pop(0)
                if event.finished in ("length", "stop"):
                    finished.append(event.request)
                on_event(event)
        return Run(finished, start)

    def abort(self, id: int):
        """End a request now; tokens that run() has not handed on are dropped. KeyError if the id is
        unknown or the request has ended."""
        left = [event for event in self.undelivered if event.request.id == id and event.tokens]
        request = left[0].request if left else self.requests.get(id)
        if request is None:
            raise KeyError(f"no request with id {id} is waiting or running")
        self.undelivered = [event for event in self.undelivered if event not in left]
        n = len(request.output) - len(left)
        del request.output[n:], request.times[n:]
        if id in self.requests:
            self.finish(request, "aborted")
        request.state = "aborted"

    def preempt(self, request: Request):
        """Take the pages of a running request: it waits in front, and is recomputed later."""
        assert request in self.running, f"preempt: {short(request)} is not running"
        self.release(request)
        request.forget()
        self.waiting.insert(0, request)

    def recover(self):
        """Begin again from self.requests: all wait, and all pages are free."""
        self.adapters.clear()
        self.pool.clear()
        self.full = False
        self.undelivered = []
        if self.lora == "merge":
            self.merged = 0
            self.runner.merge(None)
        for request in [*self.requests.values()]:
            del request.times[len(request.output):]  # append() was stopped between the two
            state = request.end or request.state
            request.forget()
            if state not in ("waiting", "running"):
                request.state = state
                del self.requests[request.id]
        self.ordered = []
        # in place: the lanes of a Pipeline share these lists
        self.running.clear()
        self.waiting.clear()
        self.pending[:] = sorted(self.requests.values(), key=lambda request: request.arrival)

    # the parts of an iteration

    def arrive(self):
        """Queue the requests that have arrived. If there are no others, wait for the next."""
        if self.pending and not self.running and not self.waiting:
            self.clock.wait_until(self.pending[0].arrival)
        while self.pending and self.pending[0].arrival <= self.clock.now():
            self.waiting.append(self.pending.pop(0))
            self.full = False

    def queue(self):
        """The next waiting requests: as many as max_batch has room for; none if memory is full."""
        n_free = self.max_batch - len(self.running)
        if not self.waiting or n_free <= 0 or self.full:
            return []
        ordered = self.order([*self.waiting], [*self.running], self.clock.now())
        assert isinstance(ordered, list), f"the order gives {short(ordered)}: must be a list"
        self.ordered = ordered
        if len(ordered) < len(self.waiting):  # thousands may wait: no scan without need
            for request in [r for r in self.waiting if r.state == "aborted"]:
                self.finish(request, "aborted")  # by the order [S-LoRA §4.3]
                self.aborted.append(Event(request, [], "aborted"))
        return ordered[:n_free]

    def admit(self, plan):
        """Start the plan's waiting requests, up to the first one that has no room, and reserve
        pages for the running ones' tokens. Returns the part of the plan that can run."""
        self.check_plan(plan)
        # a request that is preempted below waits again, and must not start at once
        new = {request for request, _ in plan if request.state != "running"}
        room = True
        for request, n in plan:
            if request in new:
                room = room and self.start(request)
                self.full = not room
            else:
                self.grow(request, request.n_past + n)
        if len(self.adapters.known) > 1:
            self.prefetch()
        return [(request, n) for request, n in plan if request.state == "running"]

    def check_plan(self, plan):
        """AssertionError that names a mistake of the scheduler or of the order."""
        name = type(self.scheduler).__name__
        good = isinstance(plan, list) and all(isinstance(entry, tuple) for entry in plan)
        assert good, f"{name} plans {short(plan)}: must be [(request, n)]"
        planned = {request for request, _ in plan}
        good = len(planned) == len(plan) and len(planned.union(self.running)) <= self.max_batch
        assert good, f"{name} plans a request twice, or more than max_batch = {self.max_batch}"
        for request, n in plan:
            good = request.state == "running" or request in self.waiting
            assert good, f"{name} or the order plans {short(request)}: is not waiting or running"
            good = n in range(1, request.n_todo + 1)
            assert good, (f"{name} plans {n} tokens of request {request.id}: must be in 1 .. "
                          f"{request.n_todo}")

    def start(self, request):
        """Acquire a waiting request's adapter and pages. Returns False if one has no room."""
        n = request.max_len if self.alloc == "reserve" else request.n_tokens
        spare = 0 if self.alloc == "reserve" else len(self.running)  # a page for each next token
        version = request.version
        swap = self.lora == "merge" and version != self.merged
        if swap and self.running:  # they need the weights as they are
            return False
        if not self.adapters.acquire(version):
            return False
        if not self.adapters.reserve(self.pool, request, n, spare):
            self.adapters.release(version)
            return False
        self.adapters.loaded[version]()  # wait for its copy
        if swap:
            self.merged = version
            self.runner.merge(self.adapters.known[version] if version else None)
        self.waiting.remove(request)
        self.running.append(request)
        request.state = "running"
        return True

    def prefetch(self, n=32):
        """Load the adapters of the next n requests to start [S-LoRA §5.2], if these have room
        beside all that the running ones may still need."""
        spare = sum(r.max_len - len(self.pool.tables[r]) for r in self.running)
        shared = self.adapters.pool is self.pool
        acquired = []  # until all are loaded, so that none evicts another one
        waiting = (request for request in self.ordered if request.state == "waiting")
        for request in islice(waiting, n):
            spare += request.n_tokens
            if not self.adapters.acquire(request.version, spare if shared else 0):
                break
            acquired.append(request.version)
        for version in acquired:
            self.adapters.release(version)

    def grow(self, request, n):
        """Reserve n pages for a running request. If too few are free, preempt the last to start."""
        while request.state == "running" and not self.adapters.reserve(self.pool, request, n):
            self.preempt(self.running[-1])

    def release(self, request):
        self.running.remove(request)
        self.pool.release(request)
        self.adapters.release(request.version)
        self.full = False

    def finish(self, request, end):
        """End a request: "length", "stop" or "aborted"."""
        self.full = False
        if request.state == "running":
            self.release(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            self.pending.remove(request)
        request.state = end
        del self.requests[request.id]
        self.drop_versions()

    def commit(self, plan, new_tokens):
        """Advance the planned requests by what the runner did. Returns the events."""
        now = self.clock.now()
        events = self.aborted
        for request, n in plan:
            request.n_past += n
            verified = new_tokens.get(request)
            if verified is None:  # a part of the prompt
                continue
            # accepted drafts are cached too; K and V of rejected ones are overwritten later
            request.n_past += len(verified) - 1
            request.n_draft_past = min(request.n_draft_past, request.n_past)
            tokens = request.append(verified, now)
            if self.speculator:
                # a stop token may have cut accepted drafts off
                self.speculator.count(request, min(len(tokens), len(verified) - 1), len(tokens))
                request.drop_drafts()
            end = request.end
            events.append(Event(request, tokens, end))
            if end:
                self.finish(request, end)
        return events

    def idle(self, planned):
        """Nothing can run: the planned requests have no room. Wait for the next arrival."""
        stuck = self.running or (self.waiting and not self.pending)
        assert planned or not stuck, f"{type(self.scheduler).__name__} or the order serves nothing"
        if self.waiting and not self.running:
            self.clock.wait_until(self.pending[0].arrival)
        return self.aborted

def entries_of(plan, engine):
    """The Entry of each request in a plan."""
    entries = []
    for request, n in plan:
        n_draft = len(request.drafts)
        n_logits = 1 + n_draft if n == request.n_todo else 0
        n_weight = engine.adapters.known[request.version].n_params
        entries.append(Entry(request.id, request.n_past, n + n_draft, n_logits, request.version,
                             n_weight))
    return entries

# -----------------------------------------------------------------------------
# memory: pages and adapters

class PagePool:
    """Pages of a cache: each holds a token's K and V, or a row of A and B [S-LoRA §5.1]."""
    def __init__(self, n_page, first=0):
        self.n_page = n_page
        self.first = first
        self.clear()

    def clear(self):
        """Take all pages back."""
        self.free = array("i", range(self.first, self.first + self.n_page))  # a stack
        self.tables = {}  # owner -> its pages, in the order of its tokens or rows

    def reserve(self, owner, n):
        """Let owner have n pages in all. Returns False, changing nothing, if too few are free."""
        n_more = n - len(self.tables.get(owner, ()))
        if n_more > len(self.free):
            return False
        table = self.tables.setdefault(owner, array("i"))
        if n_more > 0:
            table.extend(self.free[-n_more:])
            del self.free[-n_more:]
        return True

    def release(self, owner):
        self.free.extend(self.tables.pop(owner))

class AdapterStore:
    """All adapters in host memory, and some loaded into pages: those of running requests, and idle
    ones as long as no request needs their pages [S-LoRA §5]. Version 0 is the base model."""
    def __init__(self, pool, base):
        self.pool = pool
        self.start_copy = None  # the runner's (version, pages) -> function that waits for the copy
        self.n_version = 1  # so many were made
        self.newest = {None: 0}  # name -> version
        self.known = {0: base}  # version -> Adapter
        self.max_rank = {}  # operator -> largest rank of all adapters so far, a power of two
        # version -> function that waits for its copy; the least recently used first
        self.loaded = {}
        self.n_users = Counter()  # version -> running requests
        self.clear()

    def clear(self):
        """Take all adapters off their pages. No request runs."""
        for wait in self.loaded.values():
            wait()
        self.pool.clear()
        self.loaded = {0: lambda: None}
        self.n_users = Counter([0])  # version 0 is never idle

    def add(self, name, adapter):
        self.newest[name] = self.n_version
        self.known[self.n_version] = adapter
        self.n_version += 1
        for op, sites in adapter.sites.items():
            if len(sites):
                rank = power_of_two(max(16, *sites[:, RANK].tolist()))
                self.max_rank[op] = max(rank, self.max_rank.get(op, 0))

    def keep(self, versions):
        """Forget all other versions."""
        for version in self.known.keys() - versions:
            if version in self.loaded:
                self.evict(version)
            del self.known[version]
            del self.n_users[version]

    def evict(self, version):
        self.loaded[version]()  # a copy in flight must not overwrite the next owner's pages
        del self.loaded[version]
        self.pool.release(version)

    def reserve(self, pool, owner, n, spare=0):
        """Reserve n pages of a pool for owner; idle adapters are evicted for them, the least
        recently used first. Returns False if, beside these, `spare` more could not be free."""
        if not spare and pool.reserve(owner, n):
            return True
        n_more = n - len(pool.tables.get(owner, ()))
        if n_more + spare > len(pool.free):
            idle = [version for version in self.loaded if not self.n_users[version]]
            n_idle = sum(self.known[version].n_page for version in idle)
            if pool is not self.pool or n_more + spare > len(pool.free) + n_idle:
                return False
            while n_more > len(pool.free):
                self.evict(idle.pop(0))
        return pool.reserve(owner, n)

    def acquire(self, version, spare=0):
        """Count a user of an adapter; start to copy it to pages, if it is not loaded. Returns False
        if too few pages are free or idle."""
        if version not in self.loaded:
            if not self.reserve(self.pool, version, self.known[version].n_page, spare):
                return False
            pages = self.pool.tables[version]  # none if adapters are merged into the weights
            self.loaded[version] = self.start_copy(version, pages) if pages else self.loaded[0]
        self.loaded[version] = self.loaded.pop(version)  # now the most recently used
        self.n_users[version] += 1
        return True

    def release(self, version):
        self.n_users[version] -= 1

def read_adapter(name, source, engine):
    """An Adapter from a PEFT folder, an Adapter, or a rank: random weights, in a simulator none."""
    kinds = (str, os.PathLike, Adapter, int)
    check_type("adapter", source, kinds, "a PEFT folder, an Adapter, or a rank")
    model = engine.model
    adapter = source
    if isinstance(source, (str, os.PathLike)):
        weights = {} if engine.simulated else model.weights
        adapter = Adapter.from_pretrained(source, model.config, model.dtype, weights)
    elif isinstance(source, int):
        rank = check_range("rank", source, 1)
        adapter = Adapter(model.config, rank)
        if not engine.simulated:
            adapter = Adapter.random(model.config, rank, engine.adapters.n_version, model.dtype)
    ours, theirs = [(c.n_layer, c.operators) for c in (model.config, adapter.config)]
    fits = engine.simulated or (ours == theirs and adapter.planes is not None)
    if name is None or not fits:
        raise ValueError(f"adapter {name!r}: must have a name and weights, made for this model")
    if engine.lora == "merge":  # into the weights: it takes no pages, and nothing more is read
        adapter = copy(adapter)
        adapter.n_page = 0
        adapter.n_params = 0
    if model.world.rank == 0:  # the pool holds the adapter, and a request of two tokens
        shared = engine.adapters.pool is engine.pool
        option = "n_page" if shared else "adapter_pages"
        check_range(f"for adapter {name!r}: {option}", engine.adapters.pool.n_page,
                    adapter.n_page + 2 * shared)
    return adapter

def size_pool(engine, draft, n_page, adapter_pages, max_batch):
    """Returns (n_page, max_batch) without zeros: B = floor((M_G - M_S) / (L m_kv)) [SARATHI §4.3].
    A draft model's cache has as many pages as the target's [SmartSpec §6]."""
    check_range("n_page", n_page, 0)
    check_range("max_batch", max_batch, 0)
    model = engine.model
    L = model.config.block_size
    if not n_page:
        models = [m for m in (model, draft) if isinstance(m, (GPT, CostModel))]
        page = sum(m.config.page_bytes(m.dtype.itemsize) for m in models)
        if engine.simulated:
            free = model.memory - sum(m.n_bytes for m in models[1:])
        else:
            # the largest iteration, and as much for graphs. Schedulers that feed whole prompts may
            # feed as many tokens as the cache holds: each of its pages pays for one
            n_logits = (max_batch or 256) * (FEW_ROWS if draft else 1)
            chunk = engine.scheduler.chunk or engine.chunk
            free = free_memory(model.device)
            free -= 2 * model.iteration_bytes(chunk + n_logits, n_logits)
            if not isinstance(engine.scheduler, (Sarathi, SarathiServe)):
                page += model.iteration_bytes(1, 0)
        wide = Adapter(model.config, dict.fromkeys(model.config.modules, 256))
        n_page = (max_batch or 256) * L + (0 if adapter_pages else wide.n_page)
        n_page = min(int(free // page) - adapter_pages, n_page)
    check_range("pages that fit the memory", n_page, 1)
    return n_page, max_batch or max(1, min(256, n_page // L))

def free_memory(device):
    """Bytes for a cache: 90 % of a GPU's free memory, or a quarter of the computer's."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of engines that have ended
        return 0.9 * torch.cuda.mem_get_info(device)[0]
    return 0.25 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

@cache
def check_gpu(device, head_dim):
    """ValueError if the kernels do not run on this GPU. One line if there are none."""
    check_range("head_dim on a GPU", head_dim, 1, 256)
    major, minor = torch.cuda.get_device_capability(device)
    check_range("compute capability of the GPU", major + minor / 10, 8.0)
    if not has_triton():
        print("Triton is missing: plain torch operators, slower and without CUDA graphs",
              file=sys.stderr)

# -----------------------------------------------------------------------------
# schedulers: how many tokens of which request are fed next

TILE = 128  # rows of a matrix product's block: fewer take as long [SARATHI Fig. 7]

class Scheduler:
    """Subclass it and write plan(). chunk: None takes the engine's."""
    needs_price = False  # whether it needs engine.cost
    chunk = None

    def __init__(self, chunk: int | None = None):
        self.chunk = chunk

    def start(self, engine: Engine):
        """Called once, before the first iteration."""
        self.engine = engine
        self.chunk = self.chunk or engine.chunk

    def plan(self, running: list[Request],
             waiting: list[Request]) -> list[tuple[Request, int]]:
        """running: requests with pages, the oldest first. waiting: those that max_batch has room
        for; none while memory is full. Returns [(request, n)] with 1 <= n <= request.n_todo.
        Called once per step. It may call self.engine.preempt(request), and then plan any request
        of self.engine.waiting."""
        raise NotImplementedError(f"{type(self).__name__} has no plan()")

    def drafts(self, decodes):
        """How many drafts to expect behind the decodes of a plan."""
        speculator = self.engine.speculator
        return speculator.expected(decodes) if speculator else 0

    def budget(self, decodes):
        """How many prompt tokens go beside a plan's decodes and their drafts: up to the chunk; if
        these alone fill it, up to the next whole tile [SARATHI §4.4]."""
        n = len(decodes) + self.drafts(decodes)
        if n < self.chunk:
            return self.chunk - n
        tile = min(TILE, self.chunk)
        return cdiv(n + 1, tile) * tile - n

class Static(Scheduler):
    """Request-level batching (FasterTransformer): fill a batch, run it until all have ended."""
    def plan(self, running, waiting):
        return [(request, request.n_todo) for request in running or waiting]

class Orca(Scheduler):
    """Iteration-level batching: whole prompts join the running decodes [SARATHI §4.5]."""
    def plan(self, running, waiting):
        return [(request, request.n_todo) for request in running + waiting]

class PrefillFirst(Scheduler):
    """Continuous batching as in vLLM and TGI: new prompts run at once, decodes wait [TNG]."""
    def plan(self, running, waiting):
        return [(request, request.n_todo) for request in waiting or running]

class Sarathi(Scheduler):
    """Decode-maximal batching: one prefill chunk, every other slot a decode [SARATHI §4.3]."""
    def plan(self, running, waiting):
        decodes, prefills = decodes_and_prefills(running, waiting)
        return decodes + prefill_chunks(prefills[:1], self.budget(decodes))

class SarathiServe(Scheduler):
    """A budget of tokens per iteration: decodes first, then prefill chunks (Sarathi-Serve)."""
    def plan(self, running, waiting):
        decodes, prefills = decodes_and_prefills(running, waiting)
        return decodes + prefill_chunks(prefills, self.budget(decodes))

class Autopilot(Scheduler):
    """Takes the chunk with the most work per second: a prompt token counts what it costs at best,
    the decodes what they cost alone. Goodput does so for drafts [SARATHI §6, SmartSpec §4.1]."""
    needs_price = True

    def start(self, engine):
        super().start(engine)
        cost = engine.cost
        sizes = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 2048, 4096)
        self.sizes = [n for n in sizes if n % cost.tile == 0]  # of batches, in tokens
        # seconds per prompt token, at best
        stats = [cost.stats([Entry(-1, 0, n, 0)]) for n in self.sizes]
        self.prefill_price = min(cost.seconds(s) / s.n_tokens for s in stats)

    def plan(self, running, waiting):
        cost = self.engine.cost
        decodes, prefills = decodes_and_prefills(running, waiting)
        if not prefills:
            return decodes
        stats = cost.stats(entries_of(decodes, self.engine)).with_drafts(self.drafts(decodes))
        alone = cost.seconds(stats) if decodes else 0.0
        limit = self.time_limit(decodes, alone)
        # a decode is worth less beside waiting prompts: once they are fed, the same iteration
        # decodes for all of them, at nearly the same cost
        decode_work = alone * len(decodes) / (len(decodes) + len(prefills))
        # sizes: prompt tokens to choose from. Beside 8 decodes, prompts of 100 and 300 tokens have
        # the ends 100, 400 and the sizes 8 (16 - 8), 24, 56, ... 376 (384 - 8), 100, 400
        ends = list(accumulate(request.n_todo for request in prefills))
        sizes = ends  # no decodes wait: whole prompts
        if decodes:
            sizes = [n - stats.n_tokens for n in self.sizes]
            sizes = [n for n in sizes if 0 < n <= ends[-1]] + ends
        rates = {}  # prompt tokens -> seconds of work done per second
        for n in sizes:
            chunks = entries_of(prefill_chunks(prefills, n), self.engine)
            seconds = cost.seconds(cost.stats(chunks, stats))
            if seconds <= limit:
                rates[n] = (n * self.prefill_price + decode_work) / seconds
        if not rates:  # the target leaves no time for prompts
            return decodes
        # of the sizes nearly as good as the best: the one nearest to the end of the first prompt,
        # in the example 100, if 120 is the best
        good = [n for n, rate in rates.items() if rate > 0.97 * max(rates.values())]
        return decodes + prefill_chunks(prefills, min(good, key=lambda n: abs(n - ends[0])))

    def time_limit(self, decodes, alone):
        """The longest iteration that keeps requests within their TPOT target, if the decodes alone
        take so many seconds. Requests ahead of it leave time for prompts; those that cannot meet
        it any more are ignored, without a target all."""
        slacks = [math.inf]
        for request, _ in decodes:
            if request.output:
                elapsed = self.engine.clock.now() - request.times[0]
                n_left = request.max_new_tokens - len(request.output)
                allowed = self.engine.tpot * (request.max_new_tokens - 1)
                slacks.append(allowed - elapsed - n_left * alone)
        # half of the time is for the next prompts
        return alone + min(slack for slack in slacks if slack >= 0) / 2

def decodes_and_prefills(running, waiting):
    """Returns the decodes as entries of a plan, and the requests with a prompt to feed."""
    decodes = []
    prefills = []
    for request in running:
        if request.n_todo == 1:
            decodes.append((request, 1))
        else:
            prefills.append(request)
    return decodes, prefills + waiting

def prefill_chunks(prefills, budget):
    """Cut budget tokens from the prompts, one prompt after the other. Returns [(request, n)]."""
    plan = []
    for request in prefills:
        if budget > 0:
            plan.append((request, min(request.n_todo, budget)))
            budget -= request.n_todo
    return plan

def make_scheduler(scheduler):
    """A Scheduler by its name; or a copy of one, because engines may be given the same object."""
    if isinstance(scheduler, str):
        return SCHEDULERS[check_choice("scheduler", scheduler, SCHEDULERS)]()
    return copy(check_type("scheduler", scheduler, Scheduler, "an object like Sarathi()"))

SCHEDULERS = {"static": Static, "orca": Orca, "prefill_first": PrefillFirst, "sarathi": Sarathi,
              "sarathi_serve": SarathiServe, "autopilot": Autopilot}

# -----------------------------------------------------------------------------
# orders of the queue: functions (waiting, running, now) -> list. waiting: preempted requests first,
# then by arrival. A request that is left out waits, or ends if its state is set to "aborted".

def fcfs(waiting, running, now):
    return waiting

def lcfs(waiting, running, now):
    """Last come, first served [S-LoRA §4.3], behind requests that were preempted with output."""
    return sorted(waiting, key=lambda request: (not request.output, -request.arrival))

def cluster(d, inner=fcfs):
    """As soon as a batch holds d adapters, requests for these go first [S-LoRA §4.2, App. A]."""
    def order(waiting, running, now):
        adapters = {request.adapter for request in running} | {None}
        ordered = inner(waiting, running, now)
        for request in ordered:
            if len(adapters) <= d:
                adapters.add(request.adapter)
        return sorted(ordered, key=lambda request: request.adapter not in adapters)
    return order

def one_adapter(inner=fcfs, patience=30):
    """For merged weights: only requests of the running adapter. If more than `patience` requests of
    other adapters come first, no more of it start, and the adapter changes [S-LoRA §7]. A steady
    stream of one adapter may keep the others waiting."""
    def order(waiting, running, now):
        ordered = inner(waiting, running, now)
        adapter = (running or ordered or waiting)[0].adapter
        same = [request for request in ordered if request.adapter == adapter]
        return same if same and ordered.index(same[0]) <= patience else []
    return order

class EarlyAbort:
    """An order that aborts requests too late for their first token [S-LoRA §4.3, App. B]. The
    newest go first if more have come since the last start than start at once (moving averages)."""
    def __init__(self, slo, margin=1 / 12):
        self.latest = (1 - margin) * slo  # seconds of waiting; a margin for the first run
        self.alive = []  # of the last call
        self.n_new = 0  # requests that came since the last start
        self.n_come = 1.0  # the average of n_new at a start
        self.n_start = 1.0  # the average of requests started at once

    def __call__(self, waiting, running, now):
        n_left = sum(request.state == "waiting" for request in self.alive)
        n_started = len(self.alive) - n_left
        if n_started:
            self.n_come += 0.7 * (self.n_new - self.n_come)
            self.n_start += 0.7 * (n_started - self.n_start)
            self.n_new = 0
        self.n_new += len(waiting) - n_left
        for request in waiting:
            if now - request.arrival >= self.latest and not request.output:
                request.state = "aborted"
        self.alive = [request for request in waiting if request.state == "waiting"]
        grows = 0.7 * self.n_new + 0.3 * self.n_come >= self.n_start
        return lcfs(self.alive, running, now) if grows else [*self.alive]

# -----------------------------------------------------------------------------
# speculation: how many drafts (policies), which ones (proposers), and how many were accepted

MAX_DRAFTS = FEW_ROWS - 1  # V in [SmartSpec Alg. 2]; a verification still has few rows

@cache
def tree_size(tree):
    """Drafts in a tree with so many candidates per level: (3, 2, 2) has 3 + 6 + 12 = 21."""
    return sum(accumulate(tree, mul))

def chance(alpha, n_candidate):
    """That one of a level's candidates is accepted, if each has the chance alpha."""
    return 1 - (1 - alpha) ** n_candidate

ACCEPT, TOKEN, DRAFT = range(3)  # random numbers for a position: verify, sample, propose

def hash_of(seed, position, use):
    """A random number in 0 .. 2^64 - 1. Of integers; or of arrays of np.uint64. The low 24 bits
    are for use and position; the seed's upper 24, which the shift drops, are folded in."""
    x = ((seed + (seed >> 40)) << 24) + (use << 22) + position & MASK
    x = (x * 0x9E3779B97F4A7C15 ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31

def uniform(places, use):
    """Random numbers in [0, 1) for places [(seed, position)], the same on every device -> (M,)"""
    seeds, positions = np.array(places, np.uint64).reshape(-1, 2).T
    return torch.from_numpy((hash_of(seeds, positions, use) >> 11) * 2.0**-53)

def forced_acceptance(request, tree):
    """How many levels of drafts are accepted if each draft has the chance request.alpha. The seed
    and the position decide, so that numbers of drafts can be compared."""
    for level, n_candidate in enumerate(tree):
        x = hash_of(request.seed, request.n_tokens + level, ACCEPT)
        if x >= 2**64 * chance(request.alpha, n_candidate):
            return level
    return len(tree)

class Policy:
    """How many drafts each decode gets. Subclass it and write lengths()."""
    needs_price = False  # whether lengths() calls price
    threshold = 0.0  # a draft model stops behind a draft with no more than this probability
    trees = [(1,) * MAX_DRAFTS]  # of drafts, to choose from

    def lengths(self, requests: list[Request], limits: list[int], acceptance: float,
                price: Callable[[list[int]], float]) -> list[int] | list[tuple[int, ...]]:
        """requests: the decodes; limits: the most drafts for each; acceptance: the estimated rate
        of all. price(drafts) -> seconds of an iteration whose drafting step i makes drafts[i]
        drafts, of all requests together. Returns a number for each; in the simulator it may be a
        tree, candidates per level: (1, 1, 1) is three drafts in a row."""
        raise NotImplementedError

class Fixed(Policy):
    """The same drafts for all requests and steps: Fixed(3) is three, Fixed(3, 2, 2) a tree."""
    def __init__(self, *tree):
        self.trees = [tree if len(tree) > 1 else (1,) * tree[0]]

    def lengths(self, requests, limits, acceptance, price):
        return [self.trees[0][:limit] for limit in limits]

class Goodput(Policy):
    """One k for all decodes of a step: the most generated tokens per second [SmartSpec Alg. 1]."""
    # differs from [SmartSpec Alg. 2]: the scheduler decides which requests run, not the policy
    needs_price = True
    trees = [(1,) * k for k in range(MAX_DRAFTS + 1)]

    def lengths(self, requests, limits, acceptance, price):
        tokens, seconds = self.expectation(acceptance, limits, price)
        best = self.trees[np.argmax(tokens / seconds)]
        return [best[:limit] for limit in limits]

    def expectation(self, acceptance, limits, price):
        """Expected tokens and seconds of the iteration with each of the trees: two arrays."""
        # differs from [SmartSpec Eq. 10]: as printed it lacks the token that comes even if no draft
        # is accepted, and a level fails with 1 - a whatever its number of candidates

        # requests that have room for each level
        room = [sum([limit > level for limit in limits]) for level in range(max(limits))]
        outcomes = []
        for tree in self.trees:
            chances = accumulate([chance(acceptance, n) for n in tree], mul)
            # of a request by levels: 1, 1 + a, 1 + a + a^2, ... tokens [SmartSpec Eq. 8, 9]
            tokens = len(limits) + sum(map(mul, room, chances))
            widths = accumulate(tree, mul)  # drafts per level
            outcomes.append((tokens, price([*map(mul, room, widths)])))
        return np.array(outcomes).T

class GoodputTree(Goodput):
    """Simulator: the tree of drafts with the most tokens per second [SmartSpec Eq. 10]. Medusa has
    three heads, and each proposes one to three candidates."""
    trees = [*product((1, 2, 3), repeat=3)]

class GoodputGlobal(Goodput):
    """One k for all requests and all steps: the best over everything so far [SmartSpec §3.3]."""
    totals = np.zeros((2, 1))  # tokens and seconds, for each tree

    def expectation(self, acceptance, limits, price):
        self.totals = self.totals + super().expectation(acceptance, limits, price)
        return self.totals

class GoodputRequest(Goodput):
    """Each request its own k [SmartSpec §3.3]. Draft j of a request is worth alpha^j tokens. The
    drafts worth most are taken first, as many as give the most tokens per second."""
    def lengths(self, requests, limits, acceptance, price):
        drafts = []  # (expected tokens, level, request)
        for i, (request, limit) in enumerate(zip(requests, limits)):
            drafts += [(request.acceptance ** j, j, i) for j in range(1, limit + 1)]
        drafts.sort(key=lambda draft: -draft[0])  # those worth the same stay in their order
        rates = {}  # number of drafts -> tokens per second
        for n in np.linspace(0, len(drafts), 17).astype(int).tolist():
            tokens = sum((value for value, _, _ in drafts[:n]), len(limits))
            n_step = Counter(level for _, level, _ in drafts[:n])
            rates[n] = tokens / price([*n_step.values()])
        best = max(rates, key=rates.get)
        chosen = Counter(i for _, _, i in drafts[:best])
        return [chosen[i] for i in range(len(limits))]

class Confidence(Goodput):
    """Goodput's k at most: a draft model stops behind a draft it was not sure of."""
    # differs from [SmartSpec Alg. 3]: goodput chooses before drafting; all drafts made are verified
    threshold = 0.4

class Oracle(Goodput):
    """Knows how many drafts will be accepted [SmartSpec Fig. 14]; needs a forced alpha."""
    def lengths(self, requests, limits, acceptance, price):
        accepted = [forced_acceptance(request, (1,) * limit)
                    for request, limit in zip(requests, limits)]
        return super().lengths(requests, accepted, 1.0, price)

POLICIES = {"goodput": Goodput, "goodput_global": GoodputGlobal, "goodput_request": GoodputRequest,
            "goodput_tree": GoodputTree, "confidence": Confidence, "oracle": Oracle}

class Proposer:
    """Subclass it and write draft()."""
    context = math.inf  # the most tokens from which it can draft

    def warm(self):
        """Called by Engine.warm()."""

    def draft(self, request: Request, k: int) -> list[int]:
        """Up to k tokens that may follow the request's known ones."""
        raise NotImplementedError

    def propose(self, plan, lengths, threshold):
        """Set the drafts of the requests in lengths {request: k}. threshold: the policy's."""
        for request, k in lengths.items():
            request.drafts = self.draft(request, k) if k else []

    def seconds(self, drafts, context):
        """Seconds to make drafts[i] drafts in step i, each behind context tokens."""
        return 1e-5 * max(drafts, default=0)  # one lookup per request

class Zeros(Proposer):
    """The simulator's prompt lookup: every token is 0."""
    def draft(self, request, k):
        return [0] * k

class Ngram(Proposer):
    """Prompt lookup: what followed the last occurrence of the last three, two or one tokens."""
    def __init__(self):
        self.text = WeakKeyDictionary()  # request -> its tokens, each as a character

    def draft(self, request, k):
        text = self.text.get(request, "")
        text += "".join(map(chr, request.tokens(len(text), request.n_tokens)))
        self.text[request] = text
        for n in (3, 2, 1):
            at = text.rfind(text[-n:], 0, -1)
            if at >= 0:
                following = text[at + n:at + n + k] * k  # near the end: repeated
                return list(map(ord, following[:k]))
        return []

class DraftModel(Proposer):
    """A smaller model with the same page tables, fed the same chunks [SmartSpec §6]. If decodes
    rarely get drafts, it leaves out new requests [§5], but for 16 of 128, to notice a change."""
    def __init__(self, runner, cost, context=math.inf):
        self.runner = runner
        self.cost = cost
        self.context = context
        self.idle_share = 0.0  # of recent steps: in which no decode was worth a draft

    def warm(self):
        self.runner.warm()

    def propose(self, plan, lengths, threshold):
        wanted = [k for request, k in lengths.items() if request.may_draft]
        if wanted:
            # a moving average over about fifty steps
            self.idle_share += 0.02 * ((max(wanted) == 0) - self.idle_share)
        feeds = []
        for request, n in plan:
            left_out = self.idle_share > 0.7 and request.id % 128 >= 16
            if request.n_past == 0 and (left_out or request.n_tokens > self.context):
                request.may_draft = False
            k = lengths.get(request, 0)
            # a decode without drafts is fed later, with its next drafts
            if request.may_draft and (request.n_todo > 1 or k):
                end = request.n_past + n
                tokens = request.tokens(request.n_draft_past, end)
                feeds.append(Feed(request, request.n_draft_past, tokens, min(k, 1)))
                request.n_draft_past = end
        while feeds:
            drafted = self.runner.draft(feeds, threshold)
            feeds = []
            for request, token, sure in drafted:
                request.drafts.append(token)
                if sure and len(request.drafts) < lengths[request]:
                    feeds.append(Feed(request, request.n_draft_past, [token], 1))
                    request.n_draft_past += 1

    def seconds(self, drafts, context):  # [SmartSpec Eq. 5]
        seconds = 0.0
        for n, n_step in Counter(drafts).items():
            stats = IterationStats(n_tokens=n, n_logits=n, decodes=n, context=n * context)
            seconds += n_step * self.cost.seconds(stats)
        return seconds

def make_policy(spec, draft, engine):
    """A Policy from a number, a tree like "3,2,2", a name or an object; None from "off"."""
    if spec == "off" or (spec is None and draft is None):
        return None
    if draft is None:
        raise ValueError(f"spec = {short(spec)}: needs a draft, ngram or a model")
    text = "3" if spec is None else str(spec)
    if isinstance(spec, Policy):
        policy = spec
    elif text.replace(",", "").isdecimal():
        policy = Fixed(*[check_range("spec", int(n), 1) for n in text.split(",")])
    elif text in POLICIES:
        policy = POLICIES[text]()
    else:
        valid = ", ".join(POLICIES)
        raise KeyError(f"unknown spec {short(spec)}: one of off, a number, {valid}")
    if engine.alpha == 0 and (engine.simulated or isinstance(policy, Oracle)):
        raise ValueError("alpha = 0: a simulator and an oracle need a forced acceptance rate")
    if engine.simulated and policy.threshold:
        raise ValueError(f"spec = {short(spec)}: drafts of a simulator have no probabilities")
    if not engine.simulated and max(sum(policy.trees, ())) > 1:
        raise ValueError(f"spec = {policy.trees}: trees of drafts are for the simulator")
    return policy

def make_proposer(draft, engine, needs_price):
    """A Proposer from "ngram", a model, or an object. ValueError or KeyError for anything else."""
    if isinstance(draft, Proposer):
        return draft
    if isinstance(draft, CostModel) and engine.simulated:
        return DraftModel(CostRunner(engine, draft), draft, draft.config.block_size)
    if isinstance(draft, GPT) and not engine.simulated:
        V = engine.model.config.vocab_size
        n = min(256, V // 4)  # the most that may be padding
        check_range("vocabulary of the draft model", draft.config.vocab_size, V - n, V + n)
        cost = CostModel.profile(draft) if needs_price else None
        return DraftModel(ModelRunner(engine, draft), cost, draft.config.block_size)
    kind = "a CostModel" if engine.simulated else "a GPT"
    if draft != "ngram":
        raise KeyError(f"unknown draft {short(draft)}: one of ngram, {kind}, a Proposer")
    return Zeros() if engine.simulated else Ngram()

class Speculator:
    """Adds drafts to an engine's plans, and counts how many are accepted [SmartSpec §5]."""
    def __init__(self, engine, draft, policy):
        self.engine = engine
        self.policy = policy
        self.most = max(map(len, policy.trees))  # levels of drafts
        self.proposer = make_proposer(draft, engine, policy.needs_price)
        self.acceptance = PRIOR  # alpha, a moving average over all requests [SmartSpec §4.4]
        self.trees = {}  # decode of the last iteration -> its tree of drafts
        self.n_drafted = 0
        self.n_accepted = 0

    def expected(self, decodes):
        """Drafts that these decodes will get: each its last tree, a new one the largest of all."""
        largest = max(self.trees.values(), key=tree_size, default=())
        trees = [self.trees.get(request, largest)[:self.limit(request)] for request, _ in decodes]
        return sum(map(tree_size, trees))

    def limit(self, request):
        """The most levels of drafts that its output, and the proposer's context, have room for."""
        n = request.n_tokens
        limit = min(self.most, request.max_len - n - 1, max(0, self.proposer.context - n + 1))
        return limit if request.may_draft else 0

    def add_drafts(self, plan):
        """Give the plan's decodes drafts, if pages are free for them [SmartSpec §6]."""
        for request, _ in plan:
            if request.acceptance is None:
                request.acceptance = self.acceptance
        decodes = [request for request, _ in plan if request.n_todo == 1]
        if decodes:
            self.trees = dict(zip(decodes, self.choose(plan, decodes)))
        lengths = {}
        for request in decodes:
            request.tree = self.trees[request]
            k = tree_size(request.tree)
            has_room = self.engine.pool.reserve(request, request.n_tokens + k)
            lengths[request] = k if has_room else 0
        self.proposer.propose(plan, lengths, self.policy.threshold)
        V = self.engine.model.config.vocab_size
        for request, k in lengths.items():
            good = len(request.drafts) <= k and all(0 <= token < V for token in request.drafts)
            assert good, f"drafts {request.drafts}: must be up to {k} tokens below {V}"
            request.tree = request.tree[:len(request.drafts)]  # fewer than wanted may be made

    def choose(self, plan, decodes):
        """The policy's tree of drafts for each decode."""
        cost = self.engine.cost
        stats = cost.stats(entries_of(plan, self.engine)) if self.policy.needs_price else None

        def price(drafts):  # [SmartSpec Eq. 4]
            name = type(self.policy).__name__
            assert stats, f"{name} calls price: set needs_price = True in it"
            assert isinstance(drafts, list), f"{name} calls price({drafts}): must be a list"
            drafting = self.proposer.seconds(drafts, stats.context / len(decodes))
            return cost.seconds(stats.with_drafts(sum(drafts))) + drafting
        limits = [self.limit(request) for request in decodes]
        given = self.policy.lengths(decodes, limits, self.acceptance, price)
        trees = []
        for k in given if isinstance(given, list) else []:
            trees.append((1,) * k if isinstance(k, Integral) and k >= 0 else k)
        widest = math.inf if self.engine.simulated else 1
        good = len(trees) == len(limits) and all(
            isinstance(tree, tuple) and len(tree) <= limit and max(tree, default=1) <= widest
            for tree, limit in zip(trees, limits))
        assert good, (f"{type(self.policy).__name__} gives {given} for {len(limits)} decodes: must "
                      f"be whole numbers in 0 .. {limits}")
        return trees

    def count(self, request, n_accepted, n_new):
        """Update the acceptance rates. Only the accepted levels of drafts and the first rejected
        one were tried."""
        tried = request.tree[:n_new]
        self.acceptance = rate_after(self.acceptance, PRIOR, 0.01, tried, n_accepted)
        request.acceptance = rate_after(request.acceptance, self.acceptance, 0.05, tried,
                                        n_accepted)
        self.n_drafted += len(request.drafts)
        self.n_accepted += n_accepted

PRIOR = 0.7  # the acceptance rate before any draft

def rate_after(rate, prior, weight, tried, n_accepted):
    """An acceptance rate after n_accepted of the tried levels of drafts were accepted.
    A decode without drafts counts as 1 % of a draft with the prior's chance: where drafts do not
    pay, now and then one is tried, for less than 1 % of the time."""
    if not tried:
        return rate + 0.01 * weight * (prior - rate)
    return rate + weight * (n_accepted - sum([chance(rate, n_candidate) for n_candidate in tried]))

# -----------------------------------------------------------------------------
# the runner: carries out a plan on a model

class WallClock:
    def __init__(self):
        self.start = time.perf_counter()

    def now(self):
        return time.perf_counter() - self.start

    def wait_until(self, t):
        time.sleep(max(0.0, t - self.now()))

ROW, N_ROW, COLUMN, N_COLUMN, RANK, _, _, ENTRY = range(8)  # columns of Sites.sites

class Feed(NamedTuple):
    """The tokens of a request that a model is fed in one iteration."""
    request: Request
    n_past: int
    tokens: list
    n_logits: int  # how many of the last rows need logits

class ModelRunner:
    """Runs plans on a model: packs them into one flat batch, verifies drafts and samples. With
    tensor parallelism every rank has an engine: rank 0 runs, the runners of the others follow()."""
    def __init__(self, engine, model):
        self.engine = engine
        self.model = model
        self.merge = model.merge  # the merge-and-swap baseline [S-LoRA §7]
        if engine.lora != "batched" and model.world.size > 1:
            raise ValueError(f"lora = {engine.lora!r}: the baselines run on one device")
        pools = {engine.pool, engine.adapters.pool}
        n_page = model.world.broadcast(sum(pool.n_page for pool in pools))  # rank 0's
        self.copies = None  # the stream that copies adapters
        self.graphs = None
        if model.device.type == "cuda":
            check_gpu(model.device, model.config.head_dim)
            self.copies = torch.cuda.Stream()
        self.kv = model.new_cache(n_page + 1)  # the last page is for padding rows
        if self.copies and has_triton() and model.world.size == 1:
            self.graphs = CudaGraphs(engine, model, self.kv)

    def warm(self):
        """Record all graphs, and load what samples."""
        if self.graphs:
            self.graphs.warm()
            logits = torch.zeros(1, self.model.config.vocab_size, device=self.model.device)
            p = probabilities(logits, *torch.tensor([[1.0], [2], [0.5]]))
            sample(p, p[:, 0])

    def run(self, plan):
        """Carry out a plan. Returns {request: accepted drafts and one more token}."""
        feeds = []
        for request, n in plan:
            tokens = request.tokens(request.n_past, request.n_past + n) + request.drafts
            n_logits = 1 + len(request.drafts) if n == request.n_todo else 0
            feeds.append(Feed(request, request.n_past, tokens, n_logits))
        feeds, logits = self.forward(feeds)
        sampling = [feed.request for feed in feeds if feed.n_logits]
        if self.engine.alpha or all(request.temperature == 0 for request in sampling):
            return self.verify_greedy(sampling, logits)
        return self.verify_sampled(sampling, logits)

    def forward(self, feeds):
        """One iteration of the model. Returns the feeds in the order of the batch, few rows first
        and those of an adapter side by side, and logits (M, V), feed after feed."""
        feeds = sorted(feeds, key=lambda feed: (len(feed.tokens) > FEW_ROWS, feed.request.version))
        merged = self.engine.merged if self.model is self.engine.model else 0
        adapter = self.engine.adapters.known[merged] if merged else None
        if self.model.merged is not adapter:  # another engine has used the model
            self.model.merge(adapter)
        return feeds, self.tell("compute", self.pack(feeds))

    def compute(self, batch):
        for op in batch.adapters.keys() & ROW_PARALLEL:
            # the sites hold rank 0's columns; shift them to this rank's [S-LoRA §6]
            sites = batch.adapters[op].sites
            sites[:, COLUMN] += self.model.world.rank * sites[:, N_COLUMN]
        if self.graphs and self.graphs.fits(batch):
            return self.graphs.replay(batch)
        return self.model.forward(batch.to(self.model.device), self.kv)

    def pack(self, feeds):
        """Feeds as one flat Batch, on the host."""
        tokens = []
        positions = []
        logit_rows = []
        spans = []  # of the Batch
        pages = array("i")
        table = array("i")  # pages of the requests, then of their adapters
        for request, n_past, new, n_logits in feeds:
            end = n_past + len(new)
            own = self.engine.pool.tables[request][:end]
            spans.append((len(tokens), len(new), n_past, len(table)))
            tokens += new
            positions += range(n_past, end)
            logit_rows += range(len(tokens) - n_logits, len(tokens))
            pages += own[n_past:]
            table += own
        adapters = self.pack_adapters(feeds, spans, table)
        # a draft model may lack the target's last tokens
        tokens = int32(tokens).clamp(max=self.model.config.vocab_size - 1)
        return Batch(tokens=tokens, positions=int32(positions), pages=int32(pages),
                     spans=int32(spans), table=int32(table), logit_rows=int32(logit_rows),
                     adapters=adapters, **row_counts([n for _, n, _, _ in spans]))

    def pack_adapters(self, feeds, spans, table):
        """The adapters of the batch: {operator: Sites} [S-LoRA §4.1]. Adjacent rows of an adapter
        share a site, so that it is read once. Appends their pages to the batch's table."""
        if self.model is not self.engine.model:
            return {}
        store = self.engine.adapters
        places = []  # (version, (first row, rows, first entry in table))
        for version, group in groupby(zip(feeds, spans), lambda pair: pair[0].request.version):
            if store.known[version].n_page:
                own = [span for _, span in group]
                first_row = own[0][0]
                n_row = sum(n for _, n, _, _ in own)
                most = n_row
                if self.graphs:  # a program's: no larger site makes others launch idle ones
                    most = LORA_ROWS[max(n for _, n, _, _ in spans) > FEW_ROWS]
                for start in range(0, n_row, most):
                    rows = first_row + start, min(most, n_row - start)
                    places.append((version, (*rows, len(table))))
                table += store.pool.tables[version]
        if not places:
            return {}
        places.sort(key=lambda place: place[1][1] > FEW_ROWS)
        where = [place for _, place in places]
        table = int32(table)
        packed = {}
        for op in store.max_rank:
            parts = [store.known[version].sites[op] for version, _ in places]
            sites = np.concatenate(parts)
            if len(sites):
                # in Adapter.sites rows are 0, and entries count from the adapter's first page
                sites[:, [ROW, N_ROW, ENTRY]] += np.repeat(where, list(map(len, parts)), 0)
                packed[op] = make_sites(self.engine, op, sites, table)
        return packed

    def verify_greedy(self, sampling, logits):
        """Accept the drafts that equal the argmax; or, with a forced alpha, as many as it says."""
        best = logits.max(-1).indices.tolist()
        new_tokens = {}
        for request in sampling:
            drafts = request.drafts
            n = 0
            while n < len(drafts) and drafts[n] == best[n]:
                n += 1
            if self.engine.alpha:
                n = forced_acceptance(request, request.tree)
            new_tokens[request] = drafts[:n] + [best[n]]
            best = best[len(drafts) + 1:]
        return new_tokens

    def verify_sampled(self, sampling, logits):
        """Rejection sampling: the output is distributed as without drafts [SmartSpec §2]."""
        p = self.distributions([r for r in sampling for _ in range(1 + len(r.drafts))], logits)
        u = uniform([(r.seed, r.n_tokens) for r in sampling], TOKEN)
        drafts = [draft for request in sampling for draft in request.drafts]
        if not drafts:
            tokens = sample(p, send(u, p.device)).tolist()
            return {request: [token] for request, token in zip(sampling, tokens)}
        q = [row for request in sampling for row in request.draft_probs]
        q = torch.cat(q) if q else None  # None: drafts are deterministic
        places = [(r.seed, r.n_tokens + j) for r in sampling for j in range(len(r.drafts))]
        u = torch.cat([uniform(places, ACCEPT), u])
        drafts = torch.tensor(drafts)
        n_drafts = torch.tensor([len(request.drafts) for request in sampling])
        drafts, n_drafts, u = (send(x, p.device) for x in (drafts, n_drafts, u))
        ends = torch.stack(verify(p, q, drafts, n_drafts, u), 1).tolist()
        return {r: r.drafts[:n] + [token] for r, (n, token) in zip(sampling, ends)}

    def distributions(self, requests, logits):
        """The distributions (M, V) that rows of logits are sampled from. requests: of each row."""
        settings = torch.tensor([(r.temperature, r.top_k, r.top_p) for r in requests])
        return probabilities(logits, *settings.unbind(1))

    def draft(self, feeds, threshold):
        """A draft for every feed with a logit row: [(request, token, is it above threshold)]."""
        V = self.engine.model.config.vocab_size
        feeds, logits = self.forward(feeds)
        logits = logits[:, :V]  # no token that the target lacks
        requests = [feed.request for feed in feeds if feed.n_logits]
        tokens = logits.max(-1).indices
        # if one request samples, all get distributions, also when it needs no more drafts
        greedy = all(r.temperature == 0 and not r.draft_probs for r in requests)
        if not self.engine.alpha and not greedy:
            q = self.distributions(requests, logits)
            places = [(r.seed, r.n_tokens + len(r.drafts)) for r in requests]
            tokens = sample(q, send(uniform(places, DRAFT), q.device))
            q = torch.nn.functional.pad(q, (0, V - q.size(1)))  # none of a token that it lacks
            for request, row in zip(requests, q.split(1)):
                request.draft_probs.append(row)
        sure = [True] * len(requests)
        if threshold:
            probability = logits.float().softmax(-1).gather(1, tokens[:, None])[:, 0]
            sure = (probability > threshold).tolist()
        return list(zip(requests, tokens.tolist(), sure))

    def copy_adapter(self, version, pages):
        """Start to copy an adapter to its pages. Returns a function that waits for the copy."""
        if self.copies is None:
            self.tell("write", version, pages)
            return lambda: None
        self.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copies):
            self.tell("write", version, pages)
            done = self.copies.record_event()
        return lambda: torch.cuda.current_stream().wait_event(done)

    def write(self, version, pages):
        self.engine.adapters.known[version].write(self.kv, pages)

    def hold(self, name, source, versions):
        """The other ranks: add an adapter, and forget all but these versions."""
        self.engine.adapters.add(name, read_adapter(name, source, self.engine))
        self.engine.adapters.keep(versions)

    def tell(self, method, *values):
        """Call a method of this runner, and of the runners of all other ranks."""
        self.model.world.broadcast((method, values))
        return getattr(self, method)(*values)

    def follow(self):
        """The other ranks: do what rank 0 tells, until it stops."""
        method = None
        while method != "stop":
            method, values = self.model.world.broadcast(None)
            getattr(self, method)(*values)

    def stop(self):
        """The last call that rank 0 tells."""

def int32(values):
    if isinstance(values, array):
        return torch.frombuffer(values, dtype=torch.int32)
    return torch.tensor(values, dtype=torch.int32)

def make_sites(engine, op, sites, table):
    """The Sites of an operator. sites: (S, 8)"""
    columns = np.array([*engine.model.config.operators[op].columns.values()])
    return Sites(sites=torch.from_numpy(sites), table=table, n_module=len(columns),
                 max_rank=engine.adapters.max_rank[op], wide=not (columns % 16).any(),
                 columns=int(columns[:, 1].max()), way=engine.lora, **row_counts(sites[:, N_ROW]))

def row_counts(counts):
    """n_few, max_few and max_chunk of a Batch or of Sites. counts: rows of each span or site."""
    n = np.array(counts)
    few = n <= FEW_ROWS
    return dict(n_few=int(few.sum()), max_few=int((n * few).max(initial=0)),
                max_chunk=int((n * ~few).max(initial=0)))

class CudaGraphs:
    """Iterations that a GPU replays without waiting for Python: all of up to a chunk. Batches are
    padded, so that few graphs serve all, and warm() can record each of them:

        decodes alone                 rows, requests: 1, 2, 4 ... max_batch
        with drafts, or ends of       requests: 1, 2, 4 ... max_batch; rows: 8 times as many, up to
        prompts of up to 8 tokens     a tile; above it powers of two
        with prefill chunks           rows: whole tiles up to the chunk; one chunk, or several

    Padding rows belong to no span and write to the spare page. In an engine with adapters all
    graphs but those of decodes apply them."""
    def __init__(self, engine, model, kv):
        self.engine = engine
        self.model = model
        self.kv = kv
        self.graphs = {}  # sizes -> (graph, inputs, logits)
        self.pool = torch.cuda.graph_pool_handle()  # one memory for the activations of all graphs

    def fits(self, batch):
        rows = FEW_ROWS if self.engine.speculator else 1
        most = self.engine.scheduler.chunk
        if not batch.max_chunk:
            most = max(most, rows * self.engine.max_batch)
        return len(batch.tokens) <= most and self.engine.lora == "batched"

    def warm(self):
        """Record all graphs, from batches of padding alone. They change no page."""
        max_batch = self.engine.max_batch
        chunk = self.engine.scheduler.chunk
        sizes = []  # rows, requests with few rows, chunks
        for i in range(power_of_two(max_batch).bit_length()):
            n = min(1 << i, max_batch)
            sizes += [(n * rows, n, 0) for rows in (1, 2, 4, FEW_ROWS)]
        for N in range(TILE, chunk + TILE, TILE):
            sizes += [(min(N, chunk), 0, n_chunk) for n_chunk in (1, min(2, max_batch))]
        for N, n_few, n_chunk in sizes:
            zeros = torch.zeros(N, dtype=torch.int32)
            spans = zeros.new_zeros(n_few + n_chunk, 4)
            batch = Batch(zeros, zeros, zeros + self.kv.size(2) - 1, spans, zeros[:0], zeros[:1],
                          n_few, N // max(1, n_few), N if n_chunk else 0)
            if self.fits(batch):
                for adapters in ({}, self.adapters({}, zeros[:0], N, n_few, n_chunk)):
                    self.recorded(self.pad(replace(batch, adapters=adapters)))

    def replay(self, batch):
        padded = self.pad(batch)
        graph, inputs, logits = self.recorded(padded)
        flat = padded.flat()
        if inputs.is_cuda:
            flat = flat.pin_memory()
        inputs[:len(flat)].copy_(flat, non_blocking=True)
        graph.replay()
        return logits[:len(batch.logit_rows)]

    def recorded(self, padded):
        """The (graph, inputs, logits) of a padded batch, recorded when first needed"""
        ranks = tuple((op, sites.max_rank) for op, sites in padded.adapters.items())
        key = len(padded.tokens), padded.n_few, len(padded.spans), padded.max_few, ranks
        if key not in self.graphs:
            self.graphs[key] = self.record(padded)
        return self.graphs[key]

    def pad(self, batch):
        """The batch with padding rows, empty spans and empty sites, so that few sizes occur."""
        N = len(batch.tokens)
        n_chunk = len(batch.spans) - batch.n_few
        n_few = power_of_two(batch.n_few)
        max_few = FEW_ROWS
        n_request = n_few
        if n_chunk:
            tile = max(TILE, power_of_two(N) // 8)
            N = min(cdiv(N, tile) * tile, self.engine.scheduler.chunk)
            n_few = n_request = self.engine.max_batch
            n_chunk = 1 if n_chunk == 1 else n_few
        elif batch.max_few > 1:
            N = max(power_of_two(N), min(TILE, FEW_ROWS * n_few))
        else:
            N = n_few
            max_few = 1
        adapters = batch.adapters
        if adapters or max_few > 1:
            adapters = self.adapters(adapters, batch.table, N, n_request, n_chunk)
        n_logits = min(N, n_request * FEW_ROWS) if self.engine.speculator else n_request
        spans = pad(batch.spans[:batch.n_few], n_few), pad(batch.spans[batch.n_few:], n_chunk)
        return replace(batch, tokens=pad(batch.tokens, N), positions=pad(batch.positions, N),
                       pages=pad(batch.pages, N, self.kv.size(2) - 1), spans=torch.cat(spans),
                       logit_rows=pad(batch.logit_rows, n_logits), n_few=n_few, max_few=max_few,
                       max_chunk=N if n_chunk else 0, adapters=adapters)

    def adapters(self, own, table, N, n_request, n_chunk):
        """The batch's own Sites with padding, and empty ones of all other operators that an adapter
        of the engine changes"""
        adapters = {}
        if self.model is not self.engine.model:
            return adapters
        most = LORA_ROWS[n_chunk > 0]
        none = np.zeros((0, 8), np.int32)
        for op in self.engine.adapters.max_rank:
            sites = own.get(op) or make_sites(self.engine, op, none, table)
            n = (n_request + N // most) * sites.n_module
            adapters[op] = replace(sites, sites=pad(sites.sites, n), n_few=n, max_few=most,
                                   max_chunk=0)
        return adapters

    def record(self, batch):
        flat = batch.flat()
        # the table may become as long as the cache
        inputs = pad(flat, len(flat) + self.kv.size(2)).to(self.kv.device)
        static = batch.over(inputs)
        self.model.forward(static, self.kv)  # compiles the kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # a graph of a dead engine must not be destroyed during the recording: that ends it
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                logits = self.model.forward(static, self.kv)
        finally:
            if collects:
                gc.enable()
        return graph, inputs, logits

def power_of_two(n):
    return 1 << (n - 1).bit_length()

def pad(x, n, value=0):
    """x (m, ...) with rows of value behind it: (n, ...)"""
    return torch.cat([x, x.new_full((n - len(x), *x.shape[1:]), value)])

# -----------------------------------------------------------------------------
# the simulator's cost models: how long an iteration takes

@dataclass
class IterationStats:
    """All that the time of an iteration depends on: the features of a Profile."""
    n_tokens: int = 0  # through the linear operators
    n_logits: int = 0  # rows that need the output head
    decodes: int = 0  # requests with at most FEW_ROWS rows
    context: int = 0  # cached tokens that decodes read
    context_again: float = 0  # what drafts read besides, if each reads its context itself
    chunks: int = 0  # requests with more rows
    pairs: float = 0  # (query, key) pairs of chunks, in whole tiles of rows
    chunk_context: int = 0  # cached tokens that chunks read again [SARATHI §4.2]
    adapted: int = 0  # rows of decodes with an adapter
    adapted_chunks: int = 0  # chunks with one
    lora_read: int = 0  # adapter weights; requests with the same adapter read it once
    lora_pairs: int = 0  # (row, adapter weight) pairs of decodes
    lora_chunk_pairs: int = 0  # the same of chunks

    def with_drafts(self, n):
        """The same iteration with n drafts, spread over its decodes."""
        d = max(1, self.decodes)
        context = self.context + n
        return replace(self, n_tokens=self.n_tokens + n, n_logits=self.n_logits + n,
                       context=context, context_again=self.context_again + n * context / d,
                       adapted=self.adapted * (1 + n / d),
                       lora_pairs=self.lora_pairs * (1 + n / d))

class GPU(NamedTuple):
    flops: float  # dense 16-bit tensor cores that add in 32 bits, 1/s
    bandwidth: float  # memory, bytes/s
    memory: float  # GiB
    link: float  # to a neighbour in the node, one way, bytes/s

GPUS = {
    "a10g": GPU(70e12, 600e9, 24, 32e9),
    "a6000": GPU(154.8e12, 768e9, 48, 56e9),
    "a100-40": GPU(312e12, 1555e9, 40, 300e9),
    "a100": GPU(312e12, 2039e9, 80, 300e9),
    "h100": GPU(989e12, 3350e9, 80, 450e9),
    "h200": GPU(989e12, 4800e9, 141, 450e9),
    "b200": GPU(2250e12, 8000e9, 180, 900e9),
    "a40": GPU(149.7e12, 696e9, 48, 56e9),
    "l4": GPU(121e12, 300e9, 24, 32e9),
    "l40s": GPU(362e12, 864e9, 48, 32e9),
    "rtx-3090": GPU(71e12, 936e9, 24, 56e9),
    "rtx-4090": GPU(165.2e12, 1008e9, 24, 32e9),
    "rtx-5090": GPU(209.5e12, 1792e9, 32, 64e9),
}

def data_sheet(gpu):
    """A GPU by its name in GPUS, or of a JSON file with a GPU's fields: "my-gpu.json"."""
    if not str(gpu).endswith(".json"):
        return GPUS[check_choice("hardware (or FILE.json)", str(gpu).lower(), GPUS)]
    try:
        fields = json.loads(Path(gpu).read_text())
        sheet = GPU(*(1.0 * fields[name] for name in GPU._fields))
    except (ValueError, KeyError, TypeError) as error:
        example = json.dumps(GPUS["a100"]._asdict())
        raise ValueError(f"{gpu}: {error}: must be like {example}") from None
    for name, value, least in zip(GPU._fields, sheet, (1e9, 1e9, 1.0, 1e6)):
        check_range(f"{name} of {gpu}", value, least, 1e4 if name == "memory" else 1e20)
    return sheet

# shares of the data sheet that kernels reach, for every GPU and model; fitted to the cited cells
GEMM_FLOPS = 0.77  # [SARATHI Table 2] prefill-only, linear
GEMM_BANDWIDTH = 0.76  # [SARATHI Table 2] decode-only, linear
CHUNK_FLOPS = 0.30  # [SARATHI Table 2] prefill-only, attn
DECODE_BANDWIDTH = 0.80  # [SARATHI Table 2] decode-only, attn
ATTENTION_CALL = 19e-6  # seconds per layer and kernel [SARATHI Table 2] decode-maximal, attn
LORA_BANDWIDTH = 0.5  # [S-LoRA Table 3] S4, n = 100
ELEMENTWISE = 6  # reads and writes of a token's vector per layer: "others" < 5 % [SARATHI §3.1]
SKINNY = 32  # up to so many rows, products use smaller blocks [SARATHI Table 2]
# not fitted: usual values
LINK = 0.75  # share of a link's bandwidth that NCCL reaches
LINK_DELAY = 25e-6  # seconds before a message begins
INFINIBAND = 25e9  # bytes/s to the next node
PCIE = 32e9  # bytes/s from host memory

class System(NamedTuple):
    """Seconds that a serving system's host and its kernels of adapters add, each fitted to the cell
    beside it, and what it does otherwise."""
    layer: float = 0.0  # to launch the kernels of a layer
    token: float = 0.0  # per sampled or verified token
    # per layer, to launch the kernels of adapters; not fitted: an H200 took 79e-6, for ranks of 16
    # and 64 alike; this is predicted for sums in 8 parts, and no programs without work
    lora: float = 33e-6
    row: float = 0.0  # per layer, row and rank of an adapter: products of vectors
    load: float = 0.0  # per layer, to start the copies of an adapter
    resize: float = 0.0  # per layer, to resize a pool for adapters alone
    gather: float = ATTENTION_CALL  # per layer and request, to gather an adapter for a bmm
    eager: bool = False  # host and GPU wait for each other: their times add up
    expand: bool = False  # every draft is verified as a request of its own
    usable: float = 0.84  # share of the memory for weights and cache [SARATHI Fig. 8, §5.3]

SYSTEMS = {
    "sarathi": System(),  # this engine
    "lightllm": System(  # S-LoRA is built on it
        layer=1.36e-3,  # [S-LoRA Fig. 6] S4, R = 1, latency
        row=0.115e-6,  # [S-LoRA Table 3] S4, n = 2
        load=0.6e-3,  # [S-LoRA Table 3] S2, n = 1000
        resize=2.2e-3,  # [S-LoRA Fig. 5] no-unify, A100-80, n = 400
        gather=0.505e-3,  # [S-LoRA Fig. 5] bmm, A100-80, n = 400
        usable=0.92),  # 125,000 tokens beside 7B on an A100-80, in the authors' scripts
    "transformers": System(
        layer=1.8e-3,  # [S-LoRA Table 3] PEFT, S1 and S4, n = 100
        token=0.95e-3,  # [S-LoRA Table 3] PEFT, S1, n = 5
        eager=True),
    "vllm": System(
        token=0.036e-3,  # [SmartSpec Fig. 1] k = 5 is no gain beyond 12 requests/s
        expand=True),  # BatchExpansionTop1Scorer, until version 0.6
}

class CostModel:
    """Seconds of an iteration [SmartSpec Eq. 7, SARATHI Fig. 7]. time() and operators() take
    numbers of tokens, seconds() and split() take stats(). Subclasses write parts()."""
    system = SYSTEMS["sarathi"]
    world = World()  # one process simulates all
    tile = 1

    def __init__(self, config, dtype):
        self.config = config
        self.dtype = dtype
        self.n_bytes = config.n_params * dtype.itemsize
        self.page_bytes = config.page_bytes(dtype.itemsize)
        self.n_weights = {name: config.n_layer * op.n_in * op.n_out
                          for name, op in config.operators.items()}
        self.rank_params = Adapter(config, 1).n_params  # of an adapter, per rank

    @staticmethod
    def profile(model: GPT) -> CostModel:
        """The costs of a model on this machine, measured once, in 10 to 15 seconds."""
        if model not in PROFILES:
            print(f"measuring what iterations of a model with {model.config.n_params / 1e6:.0f} M "
                  "parameters cost on this machine, 15 s at most", file=sys.stderr)
            PROFILES[model] = Profile(model)
        return PROFILES[model]

    @staticmethod
    def roofline(config: GPTConfig, gpu: str, tp: int = 1, nodes: int = 1,
                 system: str = "sarathi") -> CostModel:
        """The costs of a model on GPUs, from their data sheet: see Roofline."""
        return Roofline(config, gpu, tp, nodes, system)

    def time(self, n_tokens: int, n_context: float = 0) -> float:
        """Seconds of an iteration of n_tokens, with decodes that read n_context cached tokens."""
        return sum(self.operators(n_tokens, n_context).values())

    def operators(self, n_tokens: int, n_context: float = 0) -> dict[str, float]:
        """The same by operator [SARATHI Table 1]: {"preproj": seconds, "attn": ..., ...}."""
        check_range("n_tokens", n_tokens, 1)
        check_range("n_context", n_context, 0.0)
        return self.split(IterationStats(n_tokens, 1, int(n_context > 0), n_context))

    def stats(self, entries: list[Entry], others=IterationStats()) -> IterationStats:
        """Stats of an iteration with these entries and the others' stats."""
        s = copy(others)
        adapters = {}  # version -> weights
        vectors = self.system.row and not self.multiplies(entries)
        for _, n_past, n, n_logits, version, n_weight in entries:
            s.n_tokens += n
            s.n_logits += n_logits
            adapters[version] = n_weight
            if n <= FEW_ROWS:
                s.decodes += 1
                s.context += n_past + n
                s.context_again += (n - 1) * (n_past + n)
                s.adapted += n * (n_weight > 0)
            else:
                s.chunks += 1
                s.pairs += cdiv(n, self.tile) * self.tile * (n_past + n / 2)
                s.chunk_context += n_past + n
                s.adapted_chunks += n_weight > 0
            if n <= FEW_ROWS or vectors:
                s.lora_pairs += n * n_weight
            else:
                s.lora_chunk_pairs += n * n_weight
        s.lora_read += sum(adapters.values())
        return s

    def multiplies(self, entries):
        """Whether S-LoRA's server runs MBGMM on these prompts, and not the decodes' MBGMV."""
        # its condition: at least two requests, 200 tokens in one, and a rank of 64
        is_long = any(entry.n_row >= 200 for entry in entries)
        is_wide = any(entry.n_weight >= 64 * self.rank_params for entry in entries)
        return len(entries) > 1 and is_long and is_wide

    def seconds(self, stats: IterationStats, lora: str = "batched") -> float:
        return sum(self.split(stats, lora).values())

    def parts(self, stats: IterationStats, lora: str) -> tuple[float, float, float, float]:
        """Seconds of the linear operators, attention, all others, and adapters."""
        raise NotImplementedError

    def split(self, stats: IterationStats, lora: str = "batched") -> dict[str, float]:
        """Seconds by operator. host: seconds that the host adds to the device's."""
        linear, attention, others, adapters = self.parts(stats, lora)
        linear /= sum(self.n_weights.values())
        seconds = {op: linear * n for op, n in self.n_weights.items()}
        seconds |= dict(attn=attention, others=others, lora=adapters)
        host = self.config.n_layer * self.system.layer
        if not self.system.eager:
            host = max(0.0, host - sum(seconds.values()))
        seconds["host"] = host + self.system.token * stats.n_logits
        return seconds

    def load_seconds(self, n_params, resize):
        """Seconds of (host, link) to load an adapter. resize: into a pool for adapters alone."""
        host = self.config.n_layer * (self.system.load + self.system.resize * resize)
        return host, n_params * self.dtype.itemsize / (LINK * PCIE)

    def merge_seconds(self):
        """Seconds to swap the merged adapter, W - A1 B1 + A2 B2 of q, k, v and o."""
        n = self.n_weights["preproj"] + self.n_weights["postproj"]
        return 2 * 4 * n * self.dtype.itemsize / self.bandwidth  # reads and writes W and A B

class Roofline(CostModel):
    """Products and the attention of chunks take the 2-norm of their computing and their reading
    time, other operators a sum. gpu: a name in GPUS, or a file NAME.json. tp: GPUs that share every
    layer. nodes: such groups in a Pipeline. system: a name in SYSTEMS."""
    tile = TILE

    def __init__(self, config, gpu, tp=1, nodes=1, system="sarathi"):
        check_type("config", config, GPTConfig, "a GPTConfig, like preset(name)")
        config.shard_of(0, check_range("tp", tp, 1))  # ValueError if tp does not divide the heads
        sheet = data_sheet(gpu)
        super().__init__(config, torch.bfloat16)
        self.system = SYSTEMS[check_choice("system", system, SYSTEMS)]
        self.tp = tp
        self.exchanges = True  # x A of adapters is sent; False shows its cost [S-LoRA Fig. 8]
        self.link = LINK * sheet.link
        self.flops = tp * sheet.flops
        self.peak_bandwidth = tp * sheet.bandwidth
        self.bandwidth = GEMM_BANDWIDTH * self.peak_bandwidth  # of matrix products
        memory = self.system.usable * tp * nodes * sheet.memory * 2**30
        self.memory = memory - self.n_bytes  # for the cache
        if self.memory <= 0:
            missing = -self.memory / 1e9
            raise ValueError(f"the weights need {missing:.1f} GB more than {tp * nodes} x {gpu} "
                             "can give: take a larger tp, another GPU or model")

    def parts(self, s, lora):
        c = self.config
        # the linear operators, and an all-reduce after two of them [SARATHI §2.3]
        linear = self.product(s.n_tokens, sum(self.n_weights.values()))
        if self.tp > 1:
            linear += 2 * self.message(2 * (self.tp - 1) / self.tp * s.n_tokens * c.n_embd)
        # attention: chunks compute and read, decodes read
        page_seconds = self.page_bytes / (DECODE_BANDWIDTH * self.peak_bandwidth)
        flops = 4 * c.n_layer * c.n_head * c.head_dim * s.pairs
        chunks = math.hypot(flops / (CHUNK_FLOPS * self.flops), s.chunk_context * page_seconds)
        context = s.context + s.context_again * self.system.expand
        calls = c.n_layer * ATTENTION_CALL * ((s.chunks > 0) + (s.decodes > 0))
        attention = chunks + context * page_seconds + calls
        # norms, activations and residuals; the output head for the rows that need it
        passes = ELEMENTWISE * s.n_tokens * c.n_layer * c.n_embd * self.dtype.itemsize
        head = self.product(s.n_logits, c.vocab_size * c.n_embd) if s.n_logits else 0.0
        adapters = self.lora(s, lora) if s.lora_read else 0.0
        return linear, attention, passes / self.bandwidth + head, adapters

    def product(self, n, n_weights):
        """n rows times n_weights weights: whole tiles are computed, every weight is read once."""
        rows = n if n <= SKINNY else cdiv(n, TILE) * TILE
        compute = 2 * rows * n_weights / (GEMM_FLOPS * self.flops)
        return math.hypot(compute, self.dtype.itemsize * n_weights / self.bandwidth)

    def lora(self, s, way):
        """x A B: each adapter is read once, then multiplied, by matrices or by vectors. bmm: it is
        gathered and padded first."""
        pairs = s.lora_pairs + s.lora_chunk_pairs
        multiply = 2 * pairs / (CHUNK_FLOPS * self.flops)
        read = s.lora_read * self.dtype.itemsize / (LORA_BANDWIDTH * self.peak_bandwidth)
        layer = self.system.lora + self.system.row * s.lora_pairs / self.rank_params / self.tp
        if way == "bmm":
            read *= 3
            layer = self.system.gather * (s.adapted + s.adapted_chunks)
        seconds = multiply + read + self.config.n_layer * layer
        if self.tp > 1 and self.exchanges:
            # x A is exchanged: 5 (N - 1) B r / N numbers per layer in two messages [S-LoRA §6]
            numbers = pairs / self.rank_params  # B r
            seconds += 2 * self.message(5 / 2 * (self.tp - 1) / self.tp * numbers)
        return seconds

    def message(self, numbers):
        """Seconds to send so many numbers in every layer."""
        return self.config.n_layer * (numbers * self.dtype.itemsize / self.link + LINK_DELAY)

    def send(self, n):
        """Seconds to send n tokens to the next stage of a pipeline, in the next node."""
        n_bytes = n * self.config.n_embd * self.dtype.itemsize / self.tp
        return n_bytes / (LINK * INFINIBAND) + LINK_DELAY

class Profile(CostModel):
    """Least squares over random iterations of a model on this machine."""
    def __init__(self, model, n=120, budget=12.0):
        super().__init__(model.config, model.dtype)
        if model.world.size > 1:
            raise ValueError("with tensor parallelism, give the policies' prices: cost=...")
        self.memory = free_memory(model.device)
        # its cache takes at most half of the free memory
        L = min(model.config.block_size, 1024, max(64, int(self.memory / self.page_bytes / 40)))
        adapters = [Adapter.random(model.config, rank, rank, model.dtype) for rank in (8, 64)]
        n_page = 17 * (L + 8) + sum(adapter.n_page for adapter in adapters)
        engine = Engine(model, max_batch=17, n_page=n_page)
        for name, adapter in enumerate(adapters):
            engine.add_adapter(name, adapter)
        rng = np.random.default_rng(0)
        plans = [random_plan(rng, L, adapted=i > n // 4) for i in range(n)]
        # four subsets of all sizes, the small ones first: some CPUs are slower after a large one
        plans.sort(key=lambda plan: self.stats(entries_of(plan, engine)).n_tokens)
        order = [i for first in range(4) for i in range(first, n, 4)]
        times = [[] for _ in plans]
        end = time.perf_counter() + budget
        for n_done, i in enumerate(tqdm(order * 3, "costs of this machine", leave=False,
                                             disable=None)):
            if n_done >= n // 4 and time.perf_counter() > end:
                break
            times[i].append(time_plan(engine, plans[i]))
        relative = []
        for plan, seconds in zip(plans, times):
            if seconds:
                stats = self.stats(entries_of(plan, engine))
                relative.append(np.array([1, *vars(stats).values()]) / np.median(seconds))
        relative = np.array(relative)
        tested = np.arange(len(relative)) % 6 == 5  # the fit does not see them
        self.coefficients = least_squares(relative[~tested])  # a constant, and per feature
        self.error = float(np.median(np.abs(relative[tested] @ self.coefficients - 1)))

    def parts(self, stats, lora):
        constant, *per_feature = self.coefficients
        s = IterationStats(*map(mul, per_feature, vars(stats).values()))  # now in seconds
        attention = s.decodes + s.context + s.context_again + s.chunks + s.pairs + s.chunk_context
        adapters = s.adapted + s.adapted_chunks + s.lora_read + s.lora_pairs + s.lora_chunk_pairs
        return constant + s.n_tokens, attention, s.n_logits, adapters

def random_plan(rng, L, adapted):
    """The plan of a random iteration: decodes that all have as many drafts, a chunk, or both."""
    k = min(rng.choice((0, 0, 0, 1, 3, 7)), L // 2 - 2)
    decodes = [1] * rng.choice((0, 1, 2, 4, 8, 16))
    chunk = min(int(2 ** rng.uniform(4, 9)), L // 2)
    plan = []
    for n in decodes + [chunk] * (rng.random() < 0.5 or not decodes):
        most = math.log2(max(1, L - n - 8))
        n_past = int(2 ** rng.uniform(min(2, most), most))
        version = rng.integers(3) if adapted else 0
        request = Request([1] * (n_past + n), 8, version=int(version), n_past=n_past)
        request.drafts = [1] * k if n == 1 else []
        plan.append((request, n))
    return plan

def time_plan(engine, plan):
    """Seconds of the faster one of two equal iterations: a server's caches are warm as well."""
    for request, _ in plan:
        engine.pool.reserve(request, request.max_len)
        engine.adapters.acquire(request.version)
    times = [time.perf_counter()]
    for _ in range(2):
        engine.runner.run(plan)
        times.append(time.perf_counter())
    for request, _ in plan:
        engine.pool.release(request)
        engine.adapters.release(request.version)
    return min(np.diff(times))

def least_squares(A):
    """min |A x - 1| with x >= 0, by coordinate descent."""
    x = np.zeros(A.shape[1])
    for j in list(range(len(x))) * 2000:
        column = A[:, j]
        x[j] = max(0.0, x[j] + column @ (1 - A @ x) / (column @ column + 1e-30))
    return x.tolist()

PROFILES = WeakKeyDictionary()  # model -> Profile

# -----------------------------------------------------------------------------
# the simulator: a runner that moves a clock, and a pipeline

class VirtualClock:
    t = 0.0  # simulated seconds

    def now(self):
        return self.t

    def wait_until(self, t):
        self.t = max(self.t, t)

class CostRunner:
    """The simulator: moves a clock by what the cost model says. Every token is 0."""
    def __init__(self, engine, cost):
        self.engine = engine
        self.cost = cost
        self.flow = None  # a Pipeline's
        self.clock = engine.clock
        self.link_free_at = 0.0  # seconds; when the copies from host memory are done

    def warm(self):
        """Nothing to compile"""

    def run(self, plan):
        """Pass the time of a plan. Returns {request: its new tokens}."""
        engine = self.engine
        start = self.clock.t
        entries = entries_of(plan, engine)
        self.clock.t += self.cost.seconds(self.cost.stats(entries), engine.lora)
        if self.flow:
            self.clock.t = self.flow(plan, start, self.clock.t)
        return {request: [0] * (1 + forced_acceptance(request, request.tree))
                for (request, _), entry in zip(plan, entries) if entry.n_logits}

    def draft(self, feeds, threshold):
        entries = [Entry(f.request.id, f.n_past, len(f.tokens), f.n_logits) for f in feeds]
        self.clock.t += self.cost.seconds(self.cost.stats(entries))
        return [(feed.request, 0, True) for feed in feeds if feed.n_logits]

    def merge(self, adapter):
        self.clock.t += self.cost.merge_seconds()

    def copy_adapter(self, version, pages):
        """Copies follow one another on the link, while iterations run [S-LoRA §5.2]."""
        store = self.engine.adapters
        n_params = store.known[version].n_params
        host, transfer = self.cost.load_seconds(n_params, store.pool is not self.engine.pool)
        self.clock.t += host
        self.link_free_at = max(self.link_free_at, self.clock.t) + transfer
        arrival = self.link_free_at
        return lambda: self.clock.wait_until(arrival)

class Pipeline:
    """The layers of a model spread over n_stage stages, with as many micro-batches in flight
    [SARATHI §5.3]. A lane is an engine with pages and running requests of its own; all share one
    queue. cost: a roofline of all nodes. options: of a lane, with max_batch and n_page.

    A stage that idles between two micro-batches makes a bubble [SARATHI §3.2]. PB1: their prefills
    differ in length. PB2: one has a prefill, the other none. PB3: only their contexts differ."""
    run = Engine.run  # works on requests, clock and step(), which a pipeline has too

    def __init__(self, cost, n_stage, record=None, **options):
        self.record = record
        self.free_at = [0.0] * n_stage  # seconds at which each stage has done its micro-batches
        self.n_prompt = None  # prompt tokens of the last micro-batch
        self.bubbles = dict.fromkeys(("PB1", "PB2", "PB3"), 0.0)  # seconds, all stages
        self.bubble_of = Counter()  # request id -> seconds
        self.lanes = deque(Engine(cost, **options) for _ in range(n_stage))
        first = self.lanes[0]
        for lane in self.lanes:
            lane.runner.flow = self.flow
            lane.requests = first.requests
            lane.pending = first.pending
            lane.waiting = first.waiting
        self.requests = first.requests
        self.undelivered = []
        self.add = first.add
        self.clock = first.clock

    def step(self):
        """One iteration of the next lane that has work. Returns its events."""
        for lane in [*self.lanes]:
            self.lanes.rotate(-1)
            if lane.running or lane.waiting:
                break
        return lane.step()

    def flow(self, plan, t, end):
        """Move a micro-batch, planned at t, through the stages. end: if it never waited. Returns
        when it has left the last one."""
        busy = (end - t) / len(self.free_at)
        send = self.lanes[0].model.send(sum(n for _, n in plan))
        entries = entries_of(plan, self.lanes[0])
        idle = 0.0
        for stage, free_at in enumerate(self.free_at):
            start = max(t, free_at)
            idle += start - free_at
            done = start + busy
            self.free_at[stage] = done
            if self.record is not None:
                self.record.append(Iteration(start, done, entries, stage))
            t = done + send  # only the next stage waits for a message

        # count the bubbles by kind, and for each request
        before = self.n_prompt
        self.n_prompt = sum(n for _, n in plan if n > FEW_ROWS)
        if before is not None:
            kind = "PB1" if before and self.n_prompt else "PB2"
            self.bubbles["PB3" if before == self.n_prompt else kind] += idle
            for request, _ in plan:
                self.bubble_of[request.id] += idle
        return done

# -----------------------------------------------------------------------------
# what users feel

class Run:
    """How requests were served. Seconds; lists have an entry per finished request, those of tpots
    and stalls only for two tokens or more."""
    def __init__(self, requests, start):
        done = [r for r in requests if r.state in ("length", "stop")]
        self.requests = requests
        self.start = start
        self.ends = sorted(r.times[-1] for r in done)
        self.seconds = max(1e-9, max(self.ends, default=math.inf) - start)
        self.requests_per_second = len(done) / self.seconds
        self.tokens_per_second = sum(r.n_tokens for r in done) / self.seconds  # prompts too
        self.latencies = [r.times[-1] - r.arrival for r in done]
        self.ttfts = [r.ttft for r in done]
        streams = [r for r in done if len(r.times) > 1]  # one token has no time per token after it
        self.tpots = [r.tpot for r in streams]
        self.stalls = [max(np.diff(r.times)) for r in streams]  # longest gap between tokens

    @property
    def figures(self):
        """{name: number}; p50 and p99: percentiles over the finished requests."""
        figures = {"requests": len(self.ends), "tokens/s": self.tokens_per_second}
        for name, times in (("TTFT", self.ttfts), ("TPOT", self.tpots), ("stall", self.stalls)):
            for q in (50, 99):
                seconds = np.percentile(times or [math.nan], q)
                figures[f"{name} p{q} ms"] = 1e3 * float(seconds)
        return figures

    def __str__(self):
        return compare({"run": self})

def compare(runs):
    """A Markdown table with the figures of runs {name: Run}."""
    lines = [[name, *run.figures.values()] for name, run in runs.items()]
    return table(["", *next(iter(runs.values())).figures], lines)

def table(heads, lines):
    """A Markdown table. Numbers have three significant digits; None is a dash."""
    texts = [heads, *(list(map(cell, line)) for line in lines)]
    widths = [max(map(len, column)) for column in zip(*texts)]
    texts.insert(1, ["-" * width for width in widths])
    padded = [map(str.ljust, line, widths) for line in texts]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)

def cell(value):
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "-" if value is None else str(value)

# -----------------------------------------------------------------------------
# checks of what users give

def check_choice(name, value, choices):
    """Returns value. KeyError that lists the choices if it is none of them."""
    if value not in choices:
        valid = ", ".join(map(str, choices)) or "none, there is none yet"
        raise KeyError(f"unknown {name} {value!r}: one of {valid}")
    return value

def check_range(name, value, low, high=math.inf):
    """Returns value, as low's type. ValueError if it is not such a number in low .. high."""
    kind = type(low)
    good = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if not good or not low <= value <= high:
        raise ValueError(f"{name} = {short(value)}: must be in {low} .. {high} ({kind.__name__})")
    return kind(value)

def check_type(name, value, kind, valid):
    """Returns value. ValueError if it is not of this class, or of one of these."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} = {short(value)}: must be {valid}")
    return value

def check_tokens(name, tokens):
    """Returns tokens as a list; bytes as they are. ValueError if they are no whole numbers."""
    try:
        if bool in map(type, tokens):
            raise TypeError
        return tokens if isinstance(tokens, bytes) else [index(token) for token in tokens]
    except TypeError:
        raise ValueError(f"{name} = {short(tokens)}: must be a list of tokens, like [1, 2, 3]; "
                         "encode a text, and give generate() a list of prompts") from None

def short(value):
    return " ".join(repr(value).split())[:60]

def check_request(r, engine):
    """Put a request's fields in their normal form. ValueError or KeyError if it was added before,
    or could never be served."""
    check_type("request", r, Request, "a Request")
    new = vars(Request(r.prompt))
    names = list(new)
    for name in names[names.index("id"):]:  # the fields that a user must not set
        if repr(getattr(r, name)) != repr(new[name]):
            raise ValueError(f"{name} = {short(getattr(r, name))}: add a Request only once, as new")
    r.prompt = check_tokens("prompt", r.prompt)
    limits = {"max_new_tokens": (1, 10**9), "temperature": (0.0, 1e9), "top_k": (0, 10**9),
              "top_p": (1e-9, 1.0), "arrival": (0.0, 1e9), "seed": (0, MASK), "alpha": (0.0, 1.0)}
    for name, (low, high) in limits.items():
        value = getattr(r, name)
        if value is not None or name not in ("arrival", "seed", "alpha"):
            setattr(r, name, check_range(name, value, low, high))
    if r.alpha is not None and not engine.alpha:
        raise ValueError(f"alpha = {r.alpha}: of a request, needs an engine with an alpha")
    stop = (r.stop,) if isinstance(r.stop, Integral) else r.stop
    r.stop = tuple(check_tokens("stop", () if stop is None else stop))
    check_type("adapter", r.adapter, (str, Integral, type(None)), "a name")
    config = engine.model.config
    check_range("tokens in the prompt", len(r.prompt), 1)
    if not engine.simulated:
        for token in (min(r.prompt), max(r.prompt)):
            check_range("token", token, 0, config.vocab_size - 1)
    check_range("prompt + max_new_tokens", r.max_len, 2, config.block_size)
    # the request and its adapter must have room at once
    store = engine.adapters
    if r.adapter is not None:
        check_choice("adapter", r.adapter, [name for name in store.newest if name is not None])
    adapter = store.known[store.newest[r.adapter]]
    n_page = r.max_len + (adapter.n_page if store.pool is engine.pool else 0)
    check_range("pages of the request and its adapter", n_page, 1, engine.pool.n_page)

# -----------------------------------------------------------------------------
# command line

NVIDIA_DRIVER = "/proc/driver/nvidia/version"

def add_model_flags(parser, model):
    """Flags of both command lines: what to run, and where."""
    flag = parser.add_argument
    flag("--model", default=model,
         help=f"a Hugging Face folder, a name on its Hub (owner/name), or one of "
         f"{', '.join(PRESETS)} (random weights, except tiny, which `python model.py` trains)")
    flag("--dtype", choices=("float32", "bfloat16", "float16"),
         help="of weights and cache; none given: the folder's, or bfloat16 where it is fast")
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    if torch.version.cuda and devices == ["cpu"] and os.path.exists(NVIDIA_DRIVER):
        print("no GPU is used: its driver is too old, or broken, for torch's CUDA "
              f"{torch.version.cuda}", file=sys.stderr)
    flag("--device", default=devices[0], choices=devices, help="where the model runs")
    flag("--tp", type=int, default=1, help="processes that share every layer, started by torchrun")
    flag("--scheduler", default="sarathi", choices=SCHEDULERS, help="how batches are filled")
    flag("--chunk", type=int, default=256,
         help="tokens of an iteration that feeds a prompt, decodes included")
    flag("--seed", type=int, default=0, help="of random weights, samples and arrivals")

def parse_arguments():
    parser = argparse.ArgumentParser(
        description="Generate text with the sarathi engine.", allow_abbrev=False,
        usage=argparse.SUPPRESS,  # a mistake is one line
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog='example: python sarathi.py --prompt "def fib(" --draft ngram --max-new-tokens 200')
    add_model_flags(parser, "tiny")
    flag = parser.add_argument
    prompt = parser.add_mutually_exclusive_group(required=True).add_argument
    prompt("--prompt", help="text to continue, or to answer if the model has a chat template")
    prompt("--tokens", type=token_ids, metavar="1,2,3", help="or the prompt as token ids")
    prompt("--explain", action="store_true",
           help="or follow two small requests through every iteration: plans, batches, pages")
    flag("--raw", action="store_true", help="feed the prompt as it is, without a chat template")
    flag("--adapter", help="a PEFT folder with LoRA weights")
    flag("--draft", help="where drafts come from: ngram, draft (trained beside tiny), or a model")
    flag("--spec", help="how many drafts: a number, 3 if none is given; or goodput, "
         "goodput_request, goodput_global, confidence, which first profile this machine")
    flag("--temperature", type=float, default=0.6, help="0: greedy")
    flag("--top-k", type=int, default=0, help="0: off")
    flag("--top-p", type=float, default=1.0, help="1: off")
    flag("--max-new-tokens", type=int,
         help="most tokens of the output; default: 256, or as many as fit the context")
    args = parser.parse_args()
    given = {name for name, value in vars(args).items() if value != parser.get_default(name)}
    if args.explain and given - {"explain", "scheduler", "seed"}:
        raise ValueError("--explain runs an example of its own: only --scheduler and --seed fit it")
    return args

def token_ids(text):
    try:
        return [int(token) for token in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be like 1,2,3") from None

def generate_text(args):
    """Stream one request's text, or tokens, to stdout; then its figures to stderr."""
    world = World.start(args.tp, args.device)
    options = args.adapter, args.temperature, args.top_k, args.top_p
    request = Request(args.tokens, args.max_new_tokens, *options)
    text_of = lambda tokens: "".join(f"{token} " for token in tokens)
    question = None
    if args.tokens:
        request.stop = stop_tokens(args.model)
    else:
        tokenizer = load_tokenizer(args.model)
        question = None if args.raw else tokenizer.chat(args.prompt)
        request.prompt = question or tokenizer.encode(args.prompt)
        request.stop = tokenizer.stop
        text_of = tokenizer.stream(request.prompt)
    model = load_model(args.model, args.dtype, str(world.device), args.seed, world)
    if args.max_new_tokens is None:
        room = model.config.block_size - len(request.prompt)
        request.max_new_tokens = max(1, min(256, room))
    draft = None if world.rank else args.draft
    if draft not in (None, "ngram"):
        draft = load_model(draft, model.dtype, str(model.device))
    adapter = Adapter(model.config, {})
    if args.adapter:
        adapter = Adapter.from_pretrained(args.adapter, model.config, model.dtype, model.weights)
    engine = Engine(model, args.scheduler, args.chunk, max_batch=1, seed=args.seed, draft=draft,
                    spec=None if world.rank else args.spec, adapter_pages=adapter.n_page)
    if args.adapter:
        engine.add_adapter(args.adapter, adapter)
    if world.rank:
        engine.runner.follow()
        return
    engine.warm()
    engine.add(request)
    if question:
        print("the prompt is in the model's chat template; --raw feeds it as it is",
              file=sys.stderr)
    print(args.prompt or "", end="\n" if question else "", flush=True)

    def on_event(event):
        print(text_of(event.tokens), end="", flush=True)
    engine.run(on_event)
    engine.runner.tell("stop")
    print()
    print_figures(request, engine.speculator)

def print_figures(request, speculator):
    """The figures of one request, to stderr."""
    rate = len(request.output) / (request.times[-1] - request.arrival)
    figures = (f"{len(request.prompt)} + {len(request.output)} tokens, {rate:.0f} tokens/s, "
               f"TTFT {request.ttft * 1e3:.1f} ms, TPOT {request.tpot * 1e3:.1f} ms")
    if speculator:
        figures += f", {speculator.n_accepted} of {speculator.n_drafted} drafts accepted"
    print(figures, file=sys.stderr)

def explain(args):
    """Print what every iteration does with two requests, one of them with an adapter."""
    model = GPT.from_preset("tiny", torch.float32, seed=args.seed)
    engine = Engine(model, args.scheduler, chunk=8, max_batch=2, n_page=160, alloc="grow",
                    draft="ngram", spec=2)
    engine.add_adapter("a", 1)
    engine.add(Request([5, 6, 7, 8, 5, 6, 7, 8, 5, 6], 6))
    engine.add(Request([9, 9, 9, 9, 9, 9, 9], 4, adapter="a"))
    print("random weights; 8 tokens at most beside a prompt, 2 drafts for a decode; request 0: 10 "
          "tokens and 6 to generate; request 1: 7 and 4, adapter 'a'")
    run = engine.runner.run
    iterations = count(1)

    def run_and_tell(plan):
        n_token = sum(n + len(request.drafts) for request, n in plan)
        print(f"\niteration {next(iterations)}: {n_token} tokens, {len(engine.waiting)} requests "
              f"wait, {len(engine.pool.free)} of {engine.pool.n_page} pages are free")
        for request, n in plan:
            end = request.n_past + n + len(request.drafts)
            fed = request.tokens(request.n_past, request.n_past + n)
            pages = engine.pool.tables[request][request.n_past:end].tolist()
            kind = "decode" if request.output else "prefill chunk"
            print(f"  request {request.id}, {kind}: feed tokens {fed}, drafts {request.drafts}\n"
                  f"    positions {request.n_past} .. {end - 1} on pages {pages}")
            if request.adapter:
                pages = engine.adapters.pool.tables[request.version]
                print(f"    adapter {request.adapter!r} on pages {pages.tolist()}")
        new_tokens = run(plan)
        for request, tokens in new_tokens.items():
            print(f"  request {request.id}: {len(tokens) - 1} of {len(request.drafts)} drafts "
                  f"accepted, new tokens {tokens}")
        return new_tokens
    engine.runner.run = run_and_tell
    engine.run()

def run_command_line(main):
    """Call main(). A mistake of the user ends in one line on stderr and exit status 2."""
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads on: `bench.py list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
        sys.exit(141)
    except (ValueError, KeyError, OSError, ImportError, torch.OutOfMemoryError) as error:
        message = error.args[0] if isinstance(error, KeyError) else error
        if isinstance(error, torch.OutOfMemoryError):
            needed = str(error).partition(" Including")[0]
            message = (f"{needed} Take another --model or --dtype, or a smaller --chunk, in "
                       "bench.py also --max-batch or --lengths")
        print(f"{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(file=sys.stderr)  # ends the line that was being written
        sys.exit(130)

def main():
    args = parse_arguments()
    if args.explain:
        explain(args)
    else:
        generate_text(args)

if __name__ == "__main__":
    run_command_line(main)
