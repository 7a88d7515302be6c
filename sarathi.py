"""The serving engine: SARATHI, S-LoRA and SmartSpec in one loop.

Part 1 is the engine, in the order of one iteration (Loop.iterate); read it from top to bottom. The
others may be skipped: 2 more of the papers; 3 the simulator; 4 checks, figures, command line.

A plan says how many tokens of which request are fed next. Tensors begin in ModelRunner.pack.
"""
from __future__ import annotations

import argparse
import gc
import json
import math
import os
import runpy
import sys
import time
from array import array
from bisect import insort
from collections import Counter
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import accumulate, count, groupby, islice
from numbers import Integral
from operator import index, mul
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary, proxy

# kernels before torch: it sets how torch's threads wait
from kernels import (FEW_ROWS, LORA_ROWS, TILE, Batch, Sites, cdiv, has_triton, probabilities,
                     sample, send, verify)
from model import (GPT, PRESETS, ROW_PARALLEL, Adapter, GPTConfig, World, check_choice,
                   check_range, check_type, load_model, load_tokenizer, short, stop_tokens)

import numpy as np
import torch
from tqdm import tqdm

# part 1: the engine
# ---- requests. Three iterations of SARATHI, with a chunk of 8 tokens and two drafts for a decode,
# that serve a prompt a of 10 tokens and, behind it, a prompt b of 7:
#
#     plan               what is fed                               what comes out
#     [(a, 8)]           the prompt's tokens 0 .. 7                nothing: it has more tokens
#     [(a, 2)]           tokens 8 and 9, the prompt's end          a's first output token
#     [(a, 1), (b, 5)]   that token and two drafts; b's 0 .. 4     the drafts that are right and one
#                                                                  token more: 1 to 3 of a's output
# One forward pass computes all rows of an iteration: it reads the weights once [SARATHI §4.3].

@dataclass(eq=False)
class Request:
    """One user's request and how far it has come.

    |<--------- prompt --------->|<---- output ---->|<-- drafts -->|
    |<------ n_past: cached ------>|<--- n_todo --->|"""
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
    weights: Adapter | None = None  # what its adapter's name meant when it was added
    output: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # seconds at which each output token came
    n_past: int = 0  # tokens with K and V in the cache
    drafts: list[int] = field(default_factory=list)  # guessed tokens, within an iteration
    draft_probs: list = field(default_factory=list)  # (1, V) for each sampled draft: its q
    acceptance: float | None = None  # estimated rate of its drafts; None: no estimate yet

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

    def tokens(self, start, end):
        """Tokens start .. end - 1 of prompt, output and drafts, as a list."""
        n = len(self.prompt)
        behind = self.output[max(0, start - n):max(0, end - n)]
        drafts = self.drafts[max(0, start - self.n_tokens):max(0, end - self.n_tokens)]
        return [*self.prompt[start:end], *behind, *drafts]

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
        self.drafts = []
        self.draft_probs = []
        self.state = "waiting"

class Event(NamedTuple):
    """New tokens of a request."""
    request: Request
    tokens: list[int]
    finished: str  # "length", "stop" or "aborted" (by the order) if they are the last, else ""

class Feed(NamedTuple):
    """What an iteration computes of a request: tokens n_past .. n_past + n - 1, with drafts."""
    request: Request
    n_past: int
    n: int  # rows: the plan's n, and its drafts
    n_logits: int  # how many of the last rows need logits

def feeds_of(plan):
    """The Feed of each request in a plan, behind its tokens its drafts."""
    feeds = []
    for request, n in plan:
        n_logits = 1 + len(request.drafts) if n == request.n_todo else 0
        feeds.append(Feed(request, request.n_past, n + len(request.drafts), n_logits))
    return feeds

# ---- one iteration

class Loop:
    """How requests pass through an Engine, which stands with its options at the end of part 1."""
    def __init__(self):
        self.requests = {}  # id -> request, from add to its end
        self.pending = []  # requests that have not arrived, the next one first
        self.waiting = []  # preempted requests first, then by arrival
        self.running = []  # the most recently started last
        self.events = []  # since the last step
        self.ended = {}  # id -> request: those that ended in the last step
        self.ids = count()

    def step(self) -> list[Event]:
        """One iteration. Returns the events since the last one; none if nothing can run now. After
        any exception, all requests wait again, and the engine serves on."""
        try:
            self.iterate()
        except BaseException:
            recover(self)
            raise
        events = self.events
        self.events = []
        return events

    def iterate(self):
        self.arrive()
        planned = self.scheduler.plan([*self.running], self.queue())  # policy [SARATHI §4.3]
        plan = self.memory.admit(planned)  # pages, adapters, preemption [S-LoRA §5.1]
        if not plan:  # nothing is planned, or has room: next time memory.full leaves the queue out
            return wait_for_next(self, planned)
        if self.speculator:
            self.speculator.add_drafts(plan)  # drafts behind the decodes [SmartSpec §5]
        start = self.clock.now()
        feeds = feeds_of(plan)
        new_tokens = self.runner.run(feeds)  # one flat batch [SARATHI §4.3] [S-LoRA §5.3]
        if self.record is not None:
            self.record.append(Iteration(start, self.clock.now(), feeds))
        self.commit(plan, new_tokens)  # advance, drop rejected drafts, finish

    def arrive(self):
        """Queue the requests that have arrived. If there are no others, wait for the next."""
        if self.pending and not self.running and not self.waiting:
            self.clock.wait_until(self.pending[0].arrival)
        while self.pending and self.pending[0].arrival <= self.clock.now():
            self.waiting.append(self.pending.pop(0))
            self.memory.full = False

    def queue(self):
        """The next waiting requests: as many as max_batch has room for; none if memory is full."""
        n_free = self.max_batch - len(self.running)
        if not self.waiting or n_free <= 0 or self.memory.full:
            return []
        ordered = self.order([*self.waiting], [*self.running], self.clock.now())
        assert isinstance(ordered, list), f"the order gives {short(ordered)}: must be a list"
        if len(ordered) < len(self.waiting):  # thousands may wait: no scan without need
            for request in [r for r in self.waiting if r.state == "aborted"]:
                self.finish(request, "aborted")  # by the order [S-LoRA §4.3]
                self.events.append(Event(request, [], "aborted"))
        self.memory.next_requests = ordered
        return ordered[:n_free]

    def commit(self, plan, new_tokens):
        """Advance the planned requests by what the runner did. new_tokens: {request: accepted
        drafts and one token more}; a request with more of its prompt to feed is not in it."""
        now = self.clock.now()
        self.ended = {}
        for request, n in plan:
            request.n_past += n
            if request not in new_tokens:
                continue
            # accepted drafts are cached too, but not the last token: n_todo is 1 again. K and V of
            # rejected drafts are overwritten later
            n_accepted = len(new_tokens[request]) - 1
            request.n_past += n_accepted
            tokens = request.append(new_tokens[request], now)
            if self.speculator:
                # a stop token may have cut accepted drafts off
                self.speculator.count(request, min(len(tokens), n_accepted), len(tokens))
            end = request.end
            if end:
                self.finish(request, end)
                self.ended[request.id] = request
            self.events.append(Event(request, tokens, end))

    def finish(self, request, end):
        """End a request: "length", "stop" or "aborted"."""
        if request.state == "running":
            self.memory.release(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            self.pending.remove(request)
        self.memory.full = False
        request.state = end
        del self.requests[request.id]

# ---- schedulers: how many tokens of which request are fed next

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
        for; none while memory is full. Returns [(request, n)] with 1 <= n <= request.n_todo. It may
        call self.engine.preempt(request), and then plan any request of self.engine.waiting."""
        raise NotImplementedError(f"{type(self).__name__} has no plan()")

    def budget(self, decodes):
        """How many prompt tokens go beside a plan's decodes and their drafts: up to the chunk; if
        these alone fill it, up to the next whole tile [SARATHI §4.4]."""
        speculator = self.engine.speculator
        n = len(decodes) + (speculator.expected(decodes) if speculator else 0)
        if n < self.chunk:
            return self.chunk - n
        tile = min(TILE, self.chunk)
        return cdiv(n + 1, tile) * tile - n

class PrefillFirst(Scheduler):
    """Continuous batching as in vLLM and TGI: new prompts run at once, decodes wait [TNG]."""
    def plan(self, running, waiting):
        return [(request, request.n_todo) for request in waiting or running]

class Sarathi(Scheduler):
    """Decode-maximal batching: one prefill chunk, and all decodes [SARATHI §4.3]."""
    def plan(self, running, waiting):
        decodes, prefills = decodes_and_prefills(running, waiting)
        return decodes + prefill_chunks(prefills[:1], self.budget(decodes))

class SarathiServe(Scheduler):
    """A budget of tokens per iteration: decodes first, then prefill chunks (Sarathi-Serve)."""
    def plan(self, running, waiting):
        decodes, prefills = decodes_and_prefills(running, waiting)
        return decodes + prefill_chunks(prefills, self.budget(decodes))

def decodes_and_prefills(running, waiting):
    """Returns the part of a plan for the decodes, and the requests with a prompt to feed."""
    decodes = [(request, 1) for request in running if request.n_todo == 1]
    return decodes, [request for request in running if request.n_todo > 1] + waiting

def prefill_chunks(prefills, budget):
    """Cut budget tokens from the prompts, one prompt after the other. Returns [(request, n)]."""
    plan = []
    for request in prefills:
        if budget > 0:
            plan.append((request, min(request.n_todo, budget)))
            budget -= request.n_todo
    return plan

def fcfs(waiting, running, now):
    """First come, first served. An order may set a state to "aborted", and leave that one out."""
    return waiting

# ---- memory: pages, adapters, and which request starts, grows or is preempted

class PagePool:
    """Pages of a cache. A page spans all layers and holds a token's K and V, or a row of A and of B
    of an adapter [S-LoRA §5.1]: with rank 8 for q and for v at least 16 pages."""
    def __init__(self, pages):
        self.n_page = len(pages)
        self.free = array("i", pages)  # a stack
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

class Memory:
    """The pages of requests and of adapters, and which request starts, grows or is preempted. All
    adapters are in host memory, some are loaded into pages: those of running requests, and idle
    ones as long as no request needs their pages [S-LoRA §5]."""
    def __init__(self, engine, pool):
        self.engine = engine
        self.pool = pool
        self.adapter_pool = pool  # one pool for both [S-LoRA §5.1]
        self.names = {}  # name -> Adapter
        self.loaded = {}  # Adapter -> function that waits for its copy; longest unused first
        self.n_users = Counter()  # Adapter -> running requests
        self.next_requests = []  # the waiting requests, as the order gave them last
        self.n_prefetch = 32  # so many of them have their adapters loaded ahead
        self.full = False  # True: no request starts until pages, adapters or the queue change

    def admit(self, plan):
        """Start the plan's waiting requests, up to the first one that has no room, and reserve
        pages for the running ones' tokens. Returns the part of the plan that can run."""
        check_plan(plan, self.engine)
        # a request that is preempted below waits again, and must not start at once
        new = {request for request, _ in plan if request.state != "running"}
        room = True
        for request, n in plan:
            if request in new:
                room = room and self.start(request)
                self.full = not room
            else:
                self.grow(request, request.n_past + n)
        prefetch(self)
        return [(request, n) for request, n in plan if request.state == "running"]

    def start(self, request):
        """Acquire a waiting request's adapter and pages. Returns False if one has no room."""
        n = request.max_len
        spare = 0
        if self.engine.alloc == "grow":
            n = request.n_tokens
            spare = len(self.engine.running)  # a page for each running one's next token
        if not self.acquire(request.weights):
            return False
        if not self.make_room(self.pool, n, spare):
            self.release_adapter(request.weights)
            return False
        self.pool.reserve(request, n)
        if request.weights in self.loaded:
            self.loaded[request.weights]()  # what runs next waits for the copy
        self.engine.waiting.remove(request)
        self.engine.running.append(request)
        request.state = "running"
        return True

    def grow(self, request, n):
        """Let a running request have n pages in all. If too few are free, preempt the most recently
        started one, which may be the request itself: alone, every request has room."""
        while request.state == "running" and not self.pool.reserve(request, n):
            take_back(self)  # pages that requests still hold for rejected drafts
            if not self.make_room(self.pool, n - len(self.pool.tables[request])):
                self.engine.preempt(self.engine.running[-1])

    def release(self, request):
        self.engine.running.remove(request)
        self.pool.release(request)
        self.release_adapter(request.weights)
        self.full = False

    def acquire(self, adapter, spare=0):
        """Count a user of an adapter; start to copy it to pages, if it is not loaded. Returns False
        if it has no room, beside `spare` pages."""
        if adapter is None or not adapter.n_page:
            return True
        if adapter not in self.loaded:
            if not self.make_room(self.adapter_pool, adapter.n_page, spare):
                return False
            self.adapter_pool.reserve(adapter, adapter.n_page)
            pages = self.adapter_pool.tables[adapter]
            self.loaded[adapter] = self.engine.runner.copy_adapter(adapter, pages)
        self.n_users[adapter] += 1
        return True

    def release_adapter(self, adapter):
        if adapter in self.loaded:
            self.n_users[adapter] -= 1
            self.loaded[adapter] = self.loaded.pop(adapter)  # now the most recently used

    def make_room(self, pool, n, spare=0):
        """Evict idle adapters, the least recently used first, until n pages are free. Returns
        False, evicting none, if all of them together would not make n + spare pages free."""
        if n + spare <= len(pool.free):
            return True
        idle = [adapter for adapter in self.loaded if not self.n_users[adapter]]
        n_idle = sum(adapter.n_page for adapter in idle) if pool is self.adapter_pool else 0
        if n + spare > len(pool.free) + n_idle:
            return False
        while n > len(pool.free):
            self.evict(idle.pop(0))
        return True

    def evict(self, adapter):
        self.loaded.pop(adapter)()  # a copy in flight must not overwrite the next owner's pages
        self.adapter_pool.release(adapter)
        del self.n_users[adapter]  # nothing here keeps a replaced adapter in memory

# ---- drafts: how many (a policy), which ones (a proposer); the runner says which are accepted

MAX_DRAFTS = FEW_ROWS - 1  # 7: a verification has at most 8 rows, which read their context in place

class Policy:
    """How many drafts each decode gets. Subclass it and write lengths()."""
    needs_price = False  # whether lengths() calls price
    threshold = 0.0  # a draft model stops behind a draft with no more than this probability
    most = MAX_DRAFTS  # of a request

    def lengths(self, requests: list[Request], limits: list[int], acceptance: float,
                price: Callable[[list[int]], float]) -> list[int]:
        """requests: the decodes; limits: the most drafts for each; acceptance: the estimated rate
        of all. price(drafts) -> seconds of an iteration whose drafting step i makes drafts[i]
        drafts, of all requests together. Returns a number for each."""
        raise NotImplementedError

class Fixed(Policy):
    """The same number of drafts for all requests and steps."""
    def __init__(self, k: int):
        self.most = k

    def lengths(self, requests, limits, acceptance, price):
        return limits

class Proposer:
    """Which drafts: subclass it and write draft()."""
    def draft(self, request: Request, k: int) -> list[int]:
        """Up to k tokens that may follow the request's known ones."""
        raise NotImplementedError

    def limit(self, request: Request) -> float:
        """The most drafts that it can make for a request now."""
        return math.inf

    def propose(self, plan, lengths, threshold):
        """Set the drafts of the requests in lengths {request: k}. threshold: the policy's."""
        for request, k in lengths.items():
            request.drafts = self.draft(request, k) if k else []

    def seconds(self, drafts, context):
        """Seconds to make drafts[i] drafts in step i, each behind context tokens."""
        return 1e-5 * max(drafts, default=0)  # one lookup per request

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

class Speculator:
    """Adds drafts to an engine's plans, and counts how many are accepted [SmartSpec §5]."""
    def __init__(self, engine, policy, proposer):
        self.engine = engine
        self.policy = policy
        self.proposer = proposer
        self.acceptance = PRIOR  # the rate of all requests, see update_rates
        self.lengths = {}  # decode of the last iteration -> its number of drafts
        self.n_drafted = 0
        self.n_accepted = 0

    def expected(self, decodes):
        """Drafts that these decodes will get: as many as last time, new ones as many as any."""
        most = max(self.lengths.values(), default=self.policy.most)
        return sum(min(self.lengths.get(r, most), self.limit(r)) for r, _ in decodes)

    def limit(self, request):
        """The most drafts that a request's output, and the proposer, have room for."""
        room = request.max_len - request.n_tokens - 1
        return max(0, min(self.policy.most, room, self.proposer.limit(request)))

    def add_drafts(self, plan):
        """Give the plan's decodes drafts, if pages are free for them [SmartSpec §6]."""
        decodes = [request for request, _ in plan if request.n_todo == 1]
        lengths = {}
        if decodes:
            limits = [self.limit(request) for request in decodes]
            price = price_of(self, plan, len(decodes))
            given = self.policy.lengths(decodes, limits, self.acceptance, price)
            check_lengths(given, limits, self.policy)
            self.lengths = dict(zip(decodes, given))
            for request, k in self.lengths.items():
                has_room = self.engine.memory.pool.reserve(request, request.n_tokens + k)
                lengths[request] = k if has_room else 0
        self.proposer.propose(plan, lengths, self.policy.threshold)  # a draft model: prompts too
        check_drafts(lengths, self.engine.model.config.vocab_size)

    def count(self, request, n_accepted, n_new):
        """Count accepted drafts, then drop a request's drafts. n_new: its new tokens."""
        update_rates(self, request, min(len(request.drafts), n_new), n_accepted)
        self.n_drafted += len(request.drafts)
        self.n_accepted += n_accepted
        request.drafts = []
        request.draft_probs = []

# ---- the runner: carries out a plan on a model

class ModelRunner:
    """Runs feeds on a model: packs them into one flat batch, verifies drafts and samples."""
    def __init__(self, engine, model):
        self.engine = engine
        self.model = model
        self.merged = None  # the Adapter in the weights, see MergingMemory
        pools = {engine.memory.pool, engine.memory.adapter_pool}
        n_page = model.world.broadcast(sum(pool.n_page for pool in pools))  # rank 0's
        self.kv = model.new_cache(n_page + 1)  # the last page is for padding rows
        self.max_rank = {}  # operator -> the largest rank of an adapter so far, a power of two
        self.copies, self.graphs = gpu_parts(self)

    def run(self, feeds):
        """Carry out a plan. Returns {request: accepted drafts and one token more}."""
        feeds, logits = self.forward(feeds)
        sampling = [feed.request for feed in feeds if feed.n_logits]
        if not sampling and self.copies:
            torch.cuda.synchronize()  # no token waits for the GPU, but the clock must
        if self.engine.alpha or all(request.temperature == 0 for request in sampling):
            return self.verify_greedy(sampling, logits)
        return verify_sampled(sampling, logits)

    def forward(self, feeds):
        """One iteration of the model. Returns the feeds in the order of the batch, few rows first
        and those of an adapter side by side, and logits (M, V), feed after feed."""
        places = {}  # Adapter -> its place in the batch
        for feed in feeds:
            places.setdefault(feed.request.weights, len(places))
        feeds = sorted(feeds, key=lambda feed: (feed.n > FEW_ROWS, places[feed.request.weights]))
        if self.model.merged is not self.merged:  # another engine has used the model
            self.model.merge(self.merged)
        return feeds, self.compute(self.pack(feeds))

    def compute(self, batch):
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
        for request, n_past, n, n_logits in feeds:
            end = n_past + n
            request_pages = self.engine.memory.pool.tables[request][:end]
            spans.append((len(tokens), n, n_past, len(table)))
            tokens += request.tokens(n_past, end)
            positions += range(n_past, end)
            logit_rows += range(len(tokens) - n_logits, len(tokens))
            pages += request_pages[n_past:]
            table += request_pages
        adapters = self.pack_adapters(feeds, spans, table)
        return Batch(tokens=int32(tokens), positions=int32(positions), pages=int32(pages),
                     spans=int32(spans), table=int32(table), logit_rows=int32(logit_rows),
                     adapters=adapters, **row_counts([n for _, n, _, _ in spans]))

    def pack_adapters(self, feeds, spans, table):
        """{operator: Sites}: which rows of the batch use which entries of its table, to which the
        adapters' pages are appended. Adjacent rows of an adapter share a site [S-LoRA §4.1]."""
        memory = self.engine.memory
        places = []  # (Adapter, (first row, rows, first entry in table))
        for adapter, group in groupby(zip(feeds, spans), lambda pair: pair[0].request.weights):
            if adapter in memory.loaded and self.model is self.engine.model:  # not for drafts
                own = [span for _, span in group]
                n_row = sum(n for _, n, _, _ in own)
                places.append((adapter, (own[0][0], n_row, len(table))))
                table += memory.adapter_pool.tables[adapter]
        if not places:
            return {}
        places.sort(key=lambda place: place[1][1] > FEW_ROWS)
        table = int32(table)
        packed = {}
        for op in self.max_rank:
            parts = [adapter.sites[op] for adapter, _ in places]
            sites = np.concatenate(parts)
            if len(sites):
                # in Adapter.sites rows are 0, and entries count from the adapter's first page
                where = np.repeat([place for _, place in places], list(map(len, parts)), 0)
                sites[:, Sites.PLACE] += where
                packed[op] = make_sites(self, op, sites, table)
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
                n = forced_acceptance(request, [request.alpha] * len(drafts))
            new_tokens[request] = drafts[:n] + [best[n]]
            best = best[len(drafts) + 1:]
        return new_tokens

    def copy_adapter(self, adapter, pages):
        """Start to copy an adapter to its pages. Returns a function that waits for the copy."""
        if self.copies:
            return copy_on_stream(self, adapter, pages)
        adapter.write(self.kv, pages)
        return lambda: None

# ---- options, how the parts are put together, and the calls of users

@dataclass(eq=False)
class Engine(Loop):
    """Serves requests with one model, one iteration per step().
        engine = Engine(GPT.from_preset("tiny"), scheduler="sarathi", chunk=64)
        engine.add_adapter("name", "path/to/peft-folder")
        id = engine.add(Request([1, 2, 3], max_new_tokens=8, adapter="name"))
        figures = engine.run(on_event)  # or events = engine.step(), or engine.generate(prompts)
    """
    model: GPT | CostModel  # a CostModel: the simulator, with a virtual clock
    scheduler: str | Scheduler = "sarathi"  # a name in SCHEDULERS, or your own
    chunk: int = 256  # tokens of an iteration that feeds a prefill chunk, its decodes included
    max_batch: int = 8  # requests that run at once; 0: as many as fit [SARATHI §4.3]
    n_page: int = 0  # of the cache, one a token; 0: for max_batch requests and a wide adapter
    alloc: str = "reserve"  # a request's maximum length at its start; or "grow" page by page
    draft: str | GPT | CostModel | Proposer | None = None  # "ngram", a smaller model, your own
    spec: str | int | Policy | None = None  # "off", a number (None: 3), in POLICIES, your own
    seed: int = 0  # of the sampled tokens of requests without a seed of their own
    alpha: float = 0.0  # if not 0, each draft is accepted with this forced chance
    order: Callable | None = None  # a function (waiting, running, now) -> list; None: fcfs
    lora: str = "batched"  # or the baselines "bmm" and "merge" [S-LoRA §7]
    adapter_pages: int = 0  # of a pool for adapters alone, the no-unify baseline; 0: one pool
    tpot: float = 0.0  # autopilot's target, seconds per token; 0: none
    cost: CostModel | None = None  # prices for policies; None: a profile, if a policy asks
    record: list | None = None  # every Iteration is appended to it

    def __post_init__(self):
        super().__init__()
        check_options(self)
        self.simulated = isinstance(self.model, CostModel)
        self.scheduler = make_scheduler(self.scheduler)
        policy = make_policy(self)
        self.cost = price_list(self, policy)
        # parts refer to the engine weakly: without a cycle, its cache is freed with the engine
        engine = proxy(self)
        self.memory = make_memory(engine)
        self.clock = VirtualClock() if self.simulated else WallClock()
        self.runner = make_runner(engine)
        self.speculator = make_speculator(engine, policy)
        self.scheduler.start(engine)

    @property
    def pool(self):
        return self.memory.pool

    def warm(self):
        """Compile kernels and record CUDA graphs before requests wait; on a CPU nothing."""
        warm_runners(self)

    def add_adapter(self, name: str, source: str | Adapter | int):
        """Make an adapter known. source: a PEFT folder, an Adapter, or a rank (random weights).
        Under a used name it replaces the other one: requests that were added before keep that.
        FileNotFoundError or ValueError for a folder that is missing or does not fit."""
        adapter = read_adapter(name, source, self)
        hold(self.runner, name, source, adapter)
        self.memory.names[name] = adapter
        self.memory.full = False

    def remove_adapter(self, name: str):
        """Forget an adapter. Requests that were added before keep it. KeyError if it is unknown."""
        del self.memory.names[check_choice("adapter", name, self.memory.names)]

    def add(self, request: Request) -> int:
        """Queue a request. Returns its id. ValueError or KeyError if it could never be served."""
        check_request(request, self)
        request.id = next(self.ids)
        request.weights = self.memory.names.get(request.adapter)
        if request.arrival is None:
            request.arrival = self.clock.now()
        if request.alpha is None:
            request.alpha = self.alpha
        if request.seed is None:
            request.seed = ((self.seed << 24) + request.id) & MASK
        self.requests[request.id] = request
        insort(self.pending, request, key=lambda request: request.arrival)
        return request.id

    def generate(self, prompts: list[list[int]], max_new_tokens: int = 32,
                 adapter: str | list | None = None, **options) -> list[list[int]]:
        """Serve prompts (lists of tokens). Returns the list of outputs. adapter: a name for all, or
        a list of names; options: other fields of Request."""
        return generate(self, prompts, max_new_tokens, adapter, options)

    def run(self, on_event: Callable[[Event], None] | None = None) -> Run:
        """Step until all requests have ended; on_event gets the tokens one by one."""
        start = self.clock.now()
        finished = []
        while self.requests or self.events:
            for event in self.step():
                hand_on(event, on_event)
                if event.request.state in ("length", "stop"):
                    finished.append(event.request)
        return Run(finished, start)

    def abort(self, id: int):
        """End a request now. KeyError if the id is unknown or the request has ended."""
        if id in self.requests:
            self.finish(self.requests[id], "aborted")
        elif id in self.ended:  # run() has not handed on all of its tokens
            self.ended[id].state = "aborted"
        else:
            raise KeyError(f"no request with id {id} is waiting or running")

    def preempt(self, request: Request):
        """Take the pages of a running request: it waits in front, and is recomputed later."""
        assert request in self.running, f"preempt: {short(request)} is not running"
        self.memory.release(request)
        request.forget()
        self.waiting.insert(0, request)

# -----------------------------------------------------------------------------
# part 2: more of the papers, which may be skipped: schedulers, orders, memory, policies, a draft
# model, sampling, tensor parallelism, CUDA graphs

# ---- more schedulers

class Static(Scheduler):
    """Request-level batching (FasterTransformer): fill a batch, run it until all have ended."""
    def plan(self, running, waiting):
        return [(request, request.n_todo) for request in running or waiting]

class Orca(Scheduler):
    """Iteration-level batching: whole prompts join the running decodes [SARATHI §4.5]."""
    def plan(self, running, waiting):
        return [(request, request.n_todo) for request in running + waiting]

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
        stats = [cost.stats([Feed(NO_ADAPTER, 0, n, 0)]) for n in self.sizes]
        self.prefill_price = min(cost.seconds(s) / s.n_tokens for s in stats)

    def plan(self, running, waiting):
        cost = self.engine.cost
        decodes, prefills = decodes_and_prefills(running, waiting)
        if not prefills:
            return decodes
        speculator = self.engine.speculator
        n_draft = speculator.expected(decodes) if speculator else 0
        stats = cost.stats(feeds_of(decodes)).with_drafts(n_draft)
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
            chunks = feeds_of(prefill_chunks(prefills, n))
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

SCHEDULERS = {"static": Static, "orca": Orca, "prefill_first": PrefillFirst, "sarathi": Sarathi,
              "sarathi_serve": SarathiServe, "autopilot": Autopilot}

def make_scheduler(scheduler):
    """A Scheduler by its name; or a copy of one, because engines may be given the same object."""
    if isinstance(scheduler, str):
        return SCHEDULERS[check_choice("scheduler", scheduler, SCHEDULERS)]()
    return copy(check_type("scheduler", scheduler, Scheduler, "an object like Sarathi()"))

# ---- orders of the queue: functions (waiting, running, now) -> list. A request that is left out
# waits, or ends if its state is set to "aborted"

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

# ---- more of memory: making it, prefetch, merged adapters, recovery, sizes

def make_memory(engine):
    """The Memory of an engine, whose n_page and max_batch lose their zeros."""
    engine.n_page, engine.max_batch = size_pool(engine)
    kind = MergingMemory if engine.lora == "merge" else Memory
    memory = kind(engine, PagePool(range(engine.n_page)))
    if engine.adapter_pages:
        pages = range(engine.n_page, engine.n_page + engine.adapter_pages)
        memory.adapter_pool = PagePool(pages)
    return memory

def prefetch(memory):
    """Load the adapters of the next requests to start [S-LoRA §5.2], if these have room beside all
    that the running ones may still need."""
    if not memory.names:
        return
    spare = sum(r.max_len - len(memory.pool.tables[r]) for r in memory.engine.running)
    shared = memory.adapter_pool is memory.pool
    acquired = []  # until all are loaded, so that none evicts another one
    waiting = (request for request in memory.next_requests if request.state == "waiting")
    for request in islice(waiting, memory.n_prefetch):
        spare += request.n_tokens
        if not memory.acquire(request.weights, spare if shared else 0):
            break
        acquired.append(request.weights)
    for adapter in acquired:
        memory.release_adapter(adapter)

def take_back(memory):
    """Free the pages that rejected drafts have left to running requests."""
    for request in memory.engine.running:
        table = memory.pool.tables[request]
        memory.pool.free.extend(table[request.n_tokens:])
        del table[request.n_tokens:]

class MergingMemory(Memory):
    """The merge-and-swap baseline [S-LoRA §7]: a request's adapter must be in the weights."""
    def start(self, request):
        runner = self.engine.runner
        swap = request.weights is not runner.merged
        if swap and self.engine.running:  # they need the weights as they are
            return False
        started = super().start(request)
        if started and swap:
            self.merge(request.weights)
        return started

    def merge(self, adapter):
        runner = self.engine.runner
        runner.merged = adapter
        if self.engine.simulated:
            self.engine.clock.t += self.engine.model.merge_seconds()
        else:
            runner.model.merge(adapter)

def recover(engine):
    """After an exception: no page is taken, and all requests wait to be recomputed."""
    names = engine.memory.names
    for wait in engine.memory.loaded.values():
        wait()
    engine.memory = make_memory(proxy(engine))
    engine.memory.names = names
    if engine.lora == "merge":
        engine.memory.merge(None)
    engine.events = []
    engine.running.clear()
    engine.waiting.clear()
    for request in engine.requests.values():
        request.forget()
    engine.pending[:] = sorted(engine.requests.values(), key=lambda request: request.arrival)

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
            seed = 1 + len(engine.memory.names)
            adapter = Adapter.random(model.config, rank, seed, model.dtype)
    ours, theirs = [(c.n_layer, c.operators) for c in (model.config, adapter.config)]
    fits = engine.simulated or (ours == theirs and adapter.planes is not None)
    if name is None or not fits:
        raise ValueError(f"adapter {name!r}: must have a name and weights, made for this model")
    if engine.lora == "merge":  # into the weights: it takes no pages, and nothing more is read
        adapter = copy(adapter)
        adapter.n_page = 0
        adapter.n_params = 0
    if model.world.rank == 0:  # the pool holds the adapter, and a request of two tokens
        shared = not engine.adapter_pages
        option = "n_page" if shared else "adapter_pages"
        check_range(f"for adapter {name!r}: {option}", getattr(engine, option),
                    adapter.n_page + 2 * shared)
    return adapter

def size_pool(engine):
    """Returns (n_page, max_batch) without zeros: B = floor((M_G - M_S) / (L m_kv)) [SARATHI §4.3].
    A draft model's cache has as many pages as the target's [SmartSpec §6]."""
    n_page = engine.n_page
    max_batch = engine.max_batch
    draft = engine.draft
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
        n_page = (max_batch or 256) * L + (0 if engine.adapter_pages else wide.n_page)
        n_page = min(int(free // page) - engine.adapter_pages, n_page)
    check_range("pages that fit the memory", n_page, 1)
    return n_page, max_batch or max(1, min(256, n_page // L))

def free_memory(device):
    """Bytes for a cache: 90 % of a GPU's free memory, or a quarter of the computer's."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of engines that have ended
        return 0.9 * torch.cuda.mem_get_info(device)[0]
    return 0.25 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

# ---- more of drafts: policies, prices, a draft model

class Goodput(Policy):
    """One k for all decodes of a step: the most generated tokens per second [SmartSpec Alg. 1]."""
    # differs from [SmartSpec Alg. 2]: the scheduler decides which requests run, not the policy
    needs_price = True

    def lengths(self, requests, limits, acceptance, price):
        tokens, seconds = self.expectation(acceptance, limits, price)
        best = int(np.argmax(tokens / seconds))
        return [min(best, limit) for limit in limits]

    def expectation(self, acceptance, limits, price):
        """Expected tokens and seconds of the iteration with 0, 1 ... drafts: two arrays."""
        # differs from [SmartSpec Eq. 10]: as printed it lacks the token that comes even if no draft
        # is accepted
        # requests that have room for each draft
        room = [sum([limit > level for limit in limits]) for level in range(self.most)]
        # of a request: 1, 1 + a, 1 + a + a^2, ... tokens [SmartSpec Eq. 8, 9]
        gains = [n * acceptance ** level for level, n in enumerate(room, 1)]
        tokens = np.cumsum([len(limits), *gains])
        seconds = np.array([price(room[:k]) for k in range(self.most + 1)])
        return tokens, seconds

class GoodputGlobal(Goodput):
    """One k for all requests and all steps: the best over everything so far [SmartSpec §3.3]."""
    totals = np.zeros((2, 1))  # tokens and seconds, for each k

    def expectation(self, acceptance, limits, price):
        self.totals = self.totals + np.array(super().expectation(acceptance, limits, price))
        return self.totals

class GoodputRequest(Goodput):
    """Each request its own k [SmartSpec §3.3]. Draft j of a request is worth alpha^j tokens. The
    drafts worth most are taken first, as many as give the most tokens per second."""
    def lengths(self, requests, limits, acceptance, price):
        drafts = []  # (expected tokens, level, request)
        for i, (request, limit) in enumerate(zip(requests, limits)):
            rate = acceptance if request.acceptance is None else request.acceptance
            drafts += [(rate ** j, j, i) for j in range(1, limit + 1)]
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
        accepted = [forced_acceptance(request, [request.alpha] * limit)
                    for request, limit in zip(requests, limits)]
        return super().lengths(requests, accepted, 1.0, price)

POLICIES = {"goodput": Goodput, "goodput_global": GoodputGlobal, "goodput_request": GoodputRequest,
            "confidence": Confidence, "oracle": Oracle}

def make_policy(engine):
    """A Policy from a number, a name or an object; None from "off"."""
    spec = engine.spec
    if spec == "off" or (spec is None and engine.draft is None):
        return None
    if engine.draft is None:
        raise ValueError(f"spec = {short(spec)}: needs a draft, ngram or a model")
    text = "3" if spec is None else str(spec)
    if isinstance(spec, Policy):
        policy = spec
    elif text.isdecimal():
        policy = Fixed(check_range("spec", int(text), 1))
    elif text in POLICIES:
        policy = POLICIES[text]()
    else:
        valid = ", ".join(POLICIES)
        raise KeyError(f"unknown spec {short(spec)}: one of off, a number, {valid}")
    if engine.alpha == 0 and (engine.simulated or isinstance(policy, Oracle)):
        raise ValueError("alpha = 0: a simulator and an oracle need a forced acceptance rate")
    if engine.simulated and policy.threshold:
        raise ValueError(f"spec = {short(spec)}: drafts of a simulator have no probabilities")
    return policy

def price_list(engine, policy):
    """The CostModel with prices for an engine's policies, or None if they need none."""
    if engine.cost is None and engine.simulated:
        return engine.model
    if engine.cost is None and (engine.scheduler.needs_price or policy and policy.needs_price):
        return CostModel.profile(engine.model)
    return engine.cost

def price_of(speculator, plan, n_decode):
    """The function drafts -> seconds of the plan's iteration with them [SmartSpec Eq. 4]."""
    cost = speculator.engine.cost
    policy = speculator.policy
    stats = cost.stats(feeds_of(plan)) if policy.needs_price else None

    def price(drafts):
        name = type(policy).__name__
        assert stats, f"{name} calls price: set needs_price = True in it"
        assert isinstance(drafts, list), f"{name} calls price({drafts}): must be a list"
        drafting = speculator.proposer.seconds(drafts, stats.context / n_decode)
        return cost.seconds(stats.with_drafts(sum(drafts))) + drafting
    return price

PRIOR = 0.7  # the acceptance rate before any draft

def update_rates(speculator, request, n_tried, n_accepted):
    """Update the acceptance rates, moving averages [SmartSpec §4.4]. Tried are only the accepted
    drafts and the first rejected one."""
    if request.acceptance is None:
        request.acceptance = speculator.acceptance
    mean = rate_after(speculator.acceptance, PRIOR, 0.01, n_tried, n_accepted)
    speculator.acceptance = mean
    request.acceptance = rate_after(request.acceptance, mean, 0.05, n_tried, n_accepted)

def rate_after(rate, prior, weight, n_tried, n_accepted):
    """An acceptance rate after n_accepted of n_tried drafts. A decode without drafts counts as 1 %
    of a draft with the prior's chance: where drafts do not pay, now and then one is tried, for less
    than 1 % of the time."""
    if n_tried == 0:
        return rate + 0.01 * weight * (prior - rate)
    return rate + weight * (n_accepted - n_tried * rate)

class Zeros(Proposer):
    """The simulator's prompt lookup: every token is 0."""
    def draft(self, request, k):
        return [0] * k

class DraftModel(Proposer):
    """A smaller model with the same page tables, fed the same chunks [SmartSpec §6]. If decodes
    rarely get drafts, it leaves out new requests [§5], but for 16 of 128, to notice a change."""
    def __init__(self, runner, cost, context):
        self.runner = runner
        self.cost = cost
        self.context = context  # the most tokens from which it can draft
        self.n_past = WeakKeyDictionary()  # request -> tokens with K and V in its own cache
        self.left_out = WeakSet()  # requests
        self.idle_share = 0.0  # of recent steps: in which no decode was worth a draft

    def limit(self, request):
        return 0 if request in self.left_out else self.context - request.n_tokens + 1

    def propose(self, plan, lengths, threshold):
        self.leave_out(plan, lengths)
        feeds = []
        for request, n in plan:
            k = lengths.get(request, 0)
            # a decode without drafts is fed later, with its next drafts
            if request not in self.left_out and (request.n_todo > 1 or k):
                # after rejected drafts and preemption, no more is right than what the target has
                n_past = min(self.n_past.get(request, 0), request.n_past)
                end = request.n_past + n
                feeds.append(Feed(request, n_past, end - n_past, min(k, 1)))
                self.n_past[request] = end
        while feeds:
            drafted = self.runner.draft(feeds, threshold)
            feeds = []
            for request, token, sure in drafted:
                request.drafts.append(token)
                if sure and len(request.drafts) < lengths[request]:
                    feeds.append(Feed(request, self.n_past[request], 1, 1))
                    self.n_past[request] += 1

    def leave_out(self, plan, lengths):
        """Note new requests that get no drafts: too long ones, and most while few pay."""
        wanted = [k for request, k in lengths.items() if request not in self.left_out]
        if wanted:
            # a moving average over about fifty steps
            self.idle_share += 0.02 * ((max(wanted) == 0) - self.idle_share)
        for request, _ in plan:
            unlucky = self.idle_share > 0.7 and request.id % 128 >= 16
            if request.n_past == 0 and (unlucky or request.n_tokens > self.context):
                self.left_out.add(request)

    def seconds(self, drafts, context):  # [SmartSpec Eq. 5]
        seconds = 0.0
        for n, n_step in Counter(drafts).items():
            stats = IterationStats(n_tokens=n, n_logits=n, decodes=n, context=n * context)
            seconds += n_step * self.cost.seconds(stats)
        return seconds

def make_speculator(engine, policy):
    """The Speculator of an engine, None without a policy."""
    if policy is None:
        return None
    return Speculator(engine, policy, make_proposer(engine, policy))

def make_proposer(engine, policy):
    """A Proposer from "ngram", a model, or an object. ValueError or KeyError for anything else."""
    draft = engine.draft
    if isinstance(draft, Proposer):
        return draft
    if isinstance(draft, CostModel) and engine.simulated:
        return DraftModel(CostRunner(engine, draft), draft, draft.config.block_size)
    if isinstance(draft, GPT) and not engine.simulated:
        V = engine.model.config.vocab_size
        n = min(256, V // 4)  # the most that may be padding
        check_range("vocabulary of the draft model", draft.config.vocab_size, V - n, V + n)
        cost = CostModel.profile(draft) if policy.needs_price else None
        return DraftModel(DraftRunner(engine, draft), cost, draft.config.block_size)
    kind = "a CostModel" if engine.simulated else "a GPT"
    if draft != "ngram":
        raise KeyError(f"unknown draft {short(draft)}: one of ngram, {kind}, a Proposer")
    return Zeros() if engine.simulated else Ngram()

# ---- sampling, and verification of sampled drafts. Random numbers are a hash of a request's seed
# and a position, and of nothing else

MASK = 2**64 - 1  # seeds and random numbers have 64 bits
ACCEPT, TOKEN, DRAFT = range(3)  # uses of the random numbers of a position

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

def forced_acceptance(request, chances):
    """How many drafts in a row are accepted, with these chances. The seed and the position decide,
    so that numbers of drafts can be compared."""
    for j, chance in enumerate(chances):
        if hash_of(request.seed, request.n_tokens + j, ACCEPT) >= 2**64 * chance:
            return j
    return len(chances)

def verify_sampled(sampling, logits):
    """Rejection sampling: the output is distributed as without drafts [SmartSpec §2]. Returns
    {request: accepted drafts and one token more}."""
    p = distributions([r for r in sampling for _ in range(1 + len(r.drafts))], logits)
    u = uniform([(r.seed, r.n_tokens) for r in sampling], TOKEN)
    drafts = [draft for request in sampling for draft in request.drafts]
    if not drafts:
        tokens = sample(p, send(u, p.device)).tolist()
        return {request: [token] for request, token in zip(sampling, tokens)}
    q = [row for request in sampling for row in request.draft_probs]
    q = torch.cat(q) if q else None  # None: drafts are deterministic
    # the random numbers of all drafts, then those of a token for each request
    places = [(r.seed, r.n_tokens + j) for r in sampling for j in range(len(r.drafts))]
    u = torch.cat([uniform(places, ACCEPT), u])
    drafts = torch.tensor(drafts)
    n_drafts = torch.tensor([len(request.drafts) for request in sampling])
    drafts, n_drafts, u = (send(x, p.device) for x in (drafts, n_drafts, u))
    ends = torch.stack(verify(p, q, drafts, n_drafts, u), 1).tolist()
    return {r: r.drafts[:n] + [token] for r, (n, token) in zip(sampling, ends)}

def distributions(requests, logits):
    """The distributions (M, V) that rows of logits are sampled from. requests: of each row."""
    settings = torch.tensor([(r.temperature, r.top_k, r.top_p) for r in requests])
    return probabilities(logits, *settings.unbind(1))

# ---- more of the runner: making it, clocks, tensors of a batch, GPUs

def make_runner(engine):
    """The runner of an engine's model."""
    if engine.simulated:
        return CostRunner(engine, engine.model)
    if engine.model.world.size > 1:
        return ParallelRunner(engine, engine.model)
    return ModelRunner(engine, engine.model)

def copy_on_stream(runner, adapter, pages):
    """On a GPU copies run beside iterations [S-LoRA §5.2]. Returns a function that waits."""
    runner.copies.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(runner.copies):
        adapter.write(runner.kv, pages)
        done = runner.copies.record_event()
    return lambda: torch.cuda.current_stream().wait_event(done)

class WallClock:
    def __init__(self):
        self.start = time.perf_counter()

    def now(self):
        return time.perf_counter() - self.start

    def wait_until(self, t):
        time.sleep(max(0.0, t - self.now()))

def int32(values):
    if isinstance(values, array):
        return torch.frombuffer(values, dtype=torch.int32)
    return torch.tensor(values, dtype=torch.int32)

def row_counts(counts):
    """n_few, max_few and max_chunk of a Batch or of Sites. counts: rows of each span or site."""
    n = np.array(counts)
    few = n <= FEW_ROWS
    return dict(n_few=int(few.sum()), max_few=int((n * few).max(initial=0)),
                max_chunk=int((n * ~few).max(initial=0)))

def make_sites(runner, op, sites, table):
    """The Sites of an operator. sites: (S, 8)"""
    columns = np.array([*runner.model.config.operators[op].columns.values()])
    return Sites(sites=torch.from_numpy(sites), table=table, n_module=len(columns),
                 max_rank=runner.max_rank[op], wide=not (columns % 16).any(),
                 columns=int(columns[:, 1].max()), way=runner.engine.lora,
                 **row_counts(sites[:, Sites.N_ROW]))

def gpu_parts(runner):
    """On a GPU the stream that copies adapters, and CUDA graphs; None where there are none."""
    model = runner.model
    if model.device.type != "cuda":
        return None, None
    check_gpu(model.device, model.config.head_dim)
    graphs = CudaGraphs(runner) if has_triton() and model.world.size == 1 else None
    return torch.cuda.Stream(), graphs

@cache
def check_gpu(device, head_dim):
    """ValueError if the kernels do not run on this GPU. One line if there are none."""
    check_range("head_dim on a GPU", head_dim, 1, 256)
    major, minor = torch.cuda.get_device_capability(device)
    check_range("compute capability of the GPU", major + minor / 10, 8.0)
    if not has_triton():
        print("Triton is missing: plain torch operators, slower and without CUDA graphs",
              file=sys.stderr)

class DraftRunner(ModelRunner):
    """Runs a draft model."""
    def compute(self, batch):
        batch.tokens.clamp_(max=self.model.config.vocab_size - 1)  # it may lack the target's last
        return super().compute(batch)

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
            q = distributions(requests, logits)
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

# ---- tensor parallelism

def hold(runner, name, source, adapter):
    """An adapter was added to the engine."""
    for op, rank in adapter.max_rank.items():
        runner.max_rank[op] = max(rank, runner.max_rank.get(op, 0))
    if isinstance(runner, ParallelRunner):
        runner.hold(name, source, adapter)

class ParallelRunner(ModelRunner):
    """Tensor parallelism: every rank has an engine. Rank 0 runs plans, and tells the runners of the
    others, which follow()."""
    def __init__(self, engine, model):
        if engine.lora != "batched":
            raise ValueError(f"lora = {engine.lora!r}: the baselines run on one device")
        super().__init__(engine, model)
        # number -> Adapter: of rank 0 those in use, the others keep what rank 0 has in use
        self.held = {} if model.world.rank else WeakValueDictionary()
        self.n_held = 0

    def hold(self, name, source, adapter):
        """All ranks call add_adapter; or the others are in follow(), which adds a folder."""
        self.held[self.n_held] = adapter
        source = None if isinstance(source, Adapter) else source
        # broadcast returns what rank 0 gives it
        theirs, _, numbers = self.model.world.broadcast(("add", (name, source, {*self.held})))[1]
        assert theirs == name, f"adapter {name!r}: rank 0 adds {theirs!r} at this point"
        self.keep(numbers)

    def add(self, name, source, numbers):
        self.held[self.n_held] = read_adapter(name, source, self.engine)
        self.keep(numbers)

    def keep(self, numbers):
        self.n_held += 1
        for number in {*self.held} - numbers:
            del self.held[number]

    def compute(self, batch):
        self.tell("compute", batch)
        for op in batch.adapters.keys() & ROW_PARALLEL:
            # the sites hold rank 0's columns; shift them to this rank's [S-LoRA §6]
            sites = batch.adapters[op].sites
            sites[:, Sites.COLUMN] += self.model.world.rank * sites[:, Sites.N_COLUMN]
        return super().compute(batch)

    def copy_adapter(self, adapter, pages):
        number = next(n for n, held in self.held.items() if held is adapter)
        self.tell("copy_held", number, pages)
        return super().copy_adapter(adapter, pages)

    def copy_held(self, number, pages):
        super().copy_adapter(self.held[number], pages)()

    def tell(self, method, *values):
        """Rank 0: let the others call a method of their runner."""
        if self.model.world.rank == 0:
            self.model.world.broadcast((method, values))

    def follow(self):
        """The other ranks: do what rank 0 tells, until it stops."""
        method, values = self.model.world.broadcast(None)
        while method != "stop":
            getattr(self, method)(*values)
            method, values = self.model.world.broadcast(None)

# ---- CUDA graphs

def warm_runners(engine):
    """Engine.warm(); with a line on stderr if it takes over a second."""
    start = time.perf_counter()
    runners = [engine.runner]
    if engine.speculator and isinstance(engine.speculator.proposer, DraftModel):
        runners.append(engine.speculator.proposer.runner)
    for runner in runners:
        if isinstance(runner, ModelRunner) and runner.graphs:
            runner.graphs.warm()
            # load what samples
            p = probabilities(runner.kv.new_zeros(1, 2), *torch.tensor([[1.0], [1], [0.5]]))
            sample(p, p[:, 0])
    seconds = time.perf_counter() - start
    if seconds > 1:
        print(f"compiled kernels and recorded CUDA graphs in {seconds:.0f} s", file=sys.stderr)

class CudaGraphs:
    """Iterations that a GPU replays without waiting for Python: all of up to a chunk. Batches are
    padded, so that few graphs serve all, and warm() can record each of them:

        decodes alone                 rows, requests: 1, 2, 4 ... max_batch
        with drafts, or ends of       requests: 1, 2, 4 ... max_batch; rows: 8 times as many, up to
        prompts of up to 8 tokens     a tile; above it powers of two
        with prefill chunks           rows: whole tiles up to the chunk; one chunk, or several

    Padding rows belong to no span and write to the spare page. In an engine with adapters all
    graphs but those of decodes apply them."""
    def __init__(self, runner):
        self.runner = proxy(runner)
        self.engine = runner.engine
        self.model = runner.model
        self.kv = runner.kv
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
        for op in self.runner.max_rank:
            sites = own.get(op) or make_sites(self.runner, op, none, table)
            n = (n_request + N // most) * sites.n_module
            pieces = cut_rows(sites.sites, most)
            # for Triton only max_few and max_chunk count
            adapters[op] = replace(sites, sites=pad(pieces, n), n_few=n, max_few=most, max_chunk=0)
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

def cut_rows(sites, most):
    """Sites (S, 8) cut into pieces of at most `most` rows: for larger ones Triton would launch
    programs that have nothing to do beside the small ones."""
    n_piece = (sites[:, Sites.N_ROW] + most - 1) // most
    pieces = sites.repeat_interleave(n_piece, 0)
    first = torch.arange(len(pieces)) - (n_piece.cumsum(0) - n_piece).repeat_interleave(n_piece)
    pieces[:, Sites.ROW] += most * first
    pieces[:, Sites.N_ROW] -= most * first
    pieces[:, Sites.N_ROW].clamp_(max=most)
    return pieces

def power_of_two(n):
    return 1 << (n - 1).bit_length()

def pad(x, n, value=0):
    """x (m, ...) with rows of value behind it: (n, ...)"""
    return torch.cat([x, x.new_full((n - len(x), *x.shape[1:]), value)])

# -----------------------------------------------------------------------------
# part 3: the simulator, which may be skipped: what an iteration costs, by a data sheet or by a
# profile of this machine, and the runner that moves a clock

# ---- what the time of an iteration depends on

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

# ---- data sheets, and the constants that were fitted to the papers

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
        values = [fields[name] for name in GPU._fields]
    except (ValueError, KeyError, TypeError) as error:
        example = json.dumps(GPUS["a100"]._asdict())
        raise ValueError(f"{gpu}: {error}: must be like {example}") from None
    least = 1e9, 1e9, 1.0, 1e6
    most = 1e20, 1e20, 1e4, 1e20
    names = [f"{name} of {gpu}" for name in GPU._fields]
    return GPU(*map(check_range, names, values, least, most))

# constants of the roofline:
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

# ---- cost models: by a data sheet (Roofline), or measured here (Profile)

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

    def stats(self, feeds: list[Feed], others: IterationStats | None = None) -> IterationStats:
        """Stats of an iteration with these feeds and the others' stats."""
        s = copy(others) if others else IterationStats()
        vectors = self.system.row and not self.multiplies(feeds)
        for request, n_past, n, n_logits in feeds:
            n_weight = n_params(request.weights)
            s.n_tokens += n
            s.n_logits += n_logits
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
        s.lora_read += sum(map(n_params, {feed.request.weights for feed in feeds}))
        return s

    def multiplies(self, feeds):
        """Whether S-LoRA's server runs MBGMM on these prompts, and not the decodes' MBGMV."""
        # its condition: at least two requests, 200 tokens in one, and a rank of 64
        is_long = any(feed.n >= 200 for feed in feeds)
        is_wide = any(n_params(feed.request.weights) >= 64 * self.rank_params for feed in feeds)
        return len(feeds) > 1 and is_long and is_wide

    def seconds(self, stats: IterationStats, lora: str = "batched") -> float:
        seconds = sum(self.parts(stats, lora))
        return seconds + self.host(stats, seconds)

    def parts(self, stats: IterationStats, lora: str) -> tuple[float, float, float, float]:
        """Seconds of the linear operators, attention, all others, and adapters."""
        raise NotImplementedError

    def host(self, stats, seconds):
        """Seconds that the host adds to the device's."""
        launches = self.config.n_layer * self.system.layer
        if not self.system.eager:
            launches = max(0.0, launches - seconds)
        return launches + self.system.token * stats.n_logits

    def split(self, stats: IterationStats, lora: str = "batched") -> dict[str, float]:
        """Seconds by operator."""
        linear, attention, others, adapters = self.parts(stats, lora)
        share = linear / sum(self.n_weights.values())
        seconds = {op: share * n for op, n in self.n_weights.items()}
        seconds |= dict(attn=attention, others=others, lora=adapters)
        seconds["host"] = self.host(stats, sum(seconds.values()))
        return seconds

    def load_seconds(self, n_params, resize):
        """Seconds of (host, link) to load an adapter. resize: into a pool for adapters alone."""
        host = self.config.n_layer * (self.system.load + self.system.resize * resize)
        return host, n_params * self.dtype.itemsize / (LINK * PCIE)

    def merge_seconds(self):
        """Seconds to swap the merged adapter, W - A1 B1 + A2 B2 of q, k, v and o."""
        n = self.n_weights["preproj"] + self.n_weights["postproj"]
        return 2 * 4 * n * self.dtype.itemsize / self.bandwidth  # reads and writes W and A B

def n_params(adapter):
    return adapter.n_params if adapter else 0

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
        weights = [None, *engine.memory.names.values()]
        plans = [random_plan(rng, L, weights if i > n // 4 else [None]) for i in range(n)]
        # four subsets of all sizes, the small ones first: some CPUs are slower after a large one
        plans.sort(key=lambda plan: self.stats(feeds_of(plan)).n_tokens)
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
                stats = self.stats(feeds_of(plan))
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

def random_plan(rng, L, weights):
    """The plan of a random iteration: decodes that all have as many drafts, a chunk, or both.
    weights: the adapters to choose from."""
    k = min(rng.choice((0, 0, 0, 1, 3, 7)), L // 2 - 2)
    decodes = [1] * rng.choice((0, 1, 2, 4, 8, 16))
    chunk = min(int(2 ** rng.uniform(4, 9)), L // 2)
    plan = []
    for n in decodes + [chunk] * (rng.random() < 0.5 or not decodes):
        most = math.log2(max(1, L - n - 8))
        n_past = int(2 ** rng.uniform(min(2, most), most))
        adapter = weights[rng.integers(3) if len(weights) > 1 else 0]
        request = Request([1] * (n_past + n), 8, weights=adapter, n_past=n_past)
        request.drafts = [1] * k if n == 1 else []
        plan.append((request, n))
    return plan

def time_plan(engine, plan):
    """Seconds of the faster one of two equal iterations: a server's caches are warm as well."""
    for request, _ in plan:
        engine.memory.pool.reserve(request, request.max_len)
        engine.memory.acquire(request.weights)
    times = [time.perf_counter()]
    for _ in range(2):
        engine.runner.run(feeds_of(plan))
        times.append(time.perf_counter())
    for request, _ in plan:
        engine.memory.pool.release(request)
        engine.memory.release_adapter(request.weights)
    return min(np.diff(times))

def least_squares(A):
    """min |A x - 1| with x >= 0, by coordinate descent."""
    x = np.zeros(A.shape[1])
    for j in list(range(len(x))) * 2000:
        column = A[:, j]
        x[j] = max(0.0, x[j] + column @ (1 - A @ x) / (column @ column + 1e-30))
    return x.tolist()

PROFILES = WeakKeyDictionary()  # model -> Profile

# ---- the runner of a simulated engine; pipelines are in bench.py

class VirtualClock:
    t = 0.0  # simulated seconds

    def now(self):
        return self.t

    def wait_until(self, t):
        self.t = max(self.t, t)

NO_ADAPTER = Request([])  # in feeds that are only priced

class CostRunner:
    """The simulator: moves a clock by what the cost model says. Every token is 0."""
    def __init__(self, engine, cost):
        self.engine = engine
        self.cost = cost
        self.clock = engine.clock
        self.merged = None  # the Adapter in the weights
        self.max_rank = {}
        self.link_free_at = 0.0  # seconds; when the copies from host memory are done

    def run(self, feeds):
        """Pass the time of a plan. Returns {request: its new tokens}."""
        self.clock.t += self.cost.seconds(self.cost.stats(feeds), self.engine.lora)
        new_tokens = {}
        for feed in feeds:
            if feed.n_logits:
                n_accepted = self.n_accepted(feed.request) if feed.n_logits > 1 else 0
                new_tokens[feed.request] = [0] * (1 + n_accepted)
        return new_tokens

    def n_accepted(self, request):
        return forced_acceptance(request, [request.alpha] * len(request.drafts))

    def draft(self, feeds, threshold):
        alone = [Feed(NO_ADAPTER, *feed[1:]) for feed in feeds]
        self.clock.t += self.cost.seconds(self.cost.stats(alone))
        return [(feed.request, 0, True) for feed in feeds if feed.n_logits]

    def copy_adapter(self, adapter, pages):
        """Copies follow one another on the link, while iterations run [S-LoRA §5.2]."""
        resize = self.engine.adapter_pages > 0
        host, transfer = self.cost.load_seconds(adapter.n_params, resize)
        self.clock.t += host
        self.link_free_at = max(self.link_free_at, self.clock.t) + transfer
        arrival = self.link_free_at
        return lambda: self.clock.wait_until(arrival)

# -----------------------------------------------------------------------------
# part 4: what users meet, which may be skipped: figures of a run, checks of what they give, the
# command line

# ---- how an engine is run, and figures of a run

class Iteration(NamedTuple):
    """A row of an engine's record."""
    start: float  # seconds
    end: float
    feeds: list[Feed]
    stage: int = 0  # of a simulated pipeline

def wait_for_next(engine, planned):
    """Nothing can run: the planned requests have no room. Wait for the next arrival."""
    name = type(engine.scheduler).__name__
    stuck = engine.running or (engine.waiting and not engine.pending)
    assert planned or not stuck, f"{name} or the order serves nothing"
    if engine.waiting and not engine.running:
        engine.clock.wait_until(engine.pending[0].arrival)

def generate(engine, prompts, max_new_tokens, adapter, options):
    """Engine.generate()"""
    names = adapter if isinstance(adapter, list) else [adapter] * len(prompts)
    check_range("names in adapter", len(names), len(prompts), len(prompts))
    requests = [Request(prompt, max_new_tokens, name, **options)
                for prompt, name in zip(prompts, names)]
    try:
        for request in requests:
            engine.add(request)
        engine.run()
    finally:  # after an exception, these requests leave the engine
        for request in requests:
            if request.id in engine.requests:
                engine.abort(request.id)
    return [request.output for request in requests]

def hand_on(event, on_event):
    """Give a function, if there is one, the tokens of an event one by one. If it aborts the
    request, the others are dropped."""
    if on_event is None:
        return
    request, tokens, end = event
    for n, token in enumerate(tokens, 1):
        is_last = n == len(tokens)
        on_event(Event(request, [token], end if is_last else ""))
        if request.state == "aborted" and not is_last:
            del request.output[n - len(tokens):]
            del request.times[n - len(tokens):]
            return
    if not tokens:
        on_event(event)

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
        self.ttfts = [r.times[0] - r.arrival for r in done]
        streams = [r for r in done if len(r.times) > 1]  # one token has no time per token after it
        self.tpots = [(r.times[-1] - r.times[0]) / (len(r.times) - 1) for r in streams]
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

def check_tokens(name, tokens):
    """Returns tokens as a list; bytes as they are. ValueError if they are no whole numbers."""
    try:
        if bool in map(type, tokens):
            raise TypeError
        return tokens if isinstance(tokens, bytes) else [index(token) for token in tokens]
    except TypeError:
        raise ValueError(f"{name} = {short(tokens)}: must be a list of tokens, like [1, 2, 3]; "
                         "encode a text, and give generate() a list of prompts") from None

# ---- checks of what users give, and of what their code returns

def check_options(engine):
    """Put an engine's options in their normal form. ValueError or KeyError for bad ones."""
    check_type("model", engine.model, (GPT, CostModel), "a GPT or a CostModel")
    engine.chunk = check_range("chunk", engine.chunk, 1)
    engine.max_batch = check_range("max_batch", engine.max_batch, 0)
    engine.n_page = check_range("n_page", engine.n_page, 0)
    engine.adapter_pages = check_range("adapter_pages", engine.adapter_pages, 0)
    check_choice("alloc", engine.alloc, ("reserve", "grow"))
    check_choice("lora", engine.lora, ("batched", "bmm", "merge"))
    engine.alpha = check_range("alpha", engine.alpha, 0.0, 1.0)
    engine.tpot = check_range("tpot", engine.tpot, 0.0)
    engine.seed = check_range("seed", engine.seed, 0, 2**63)
    engine.order = check_type("order", engine.order or fcfs, Callable, "a function like lcfs")
    if engine.lora == "merge":
        engine.order = one_adapter(engine.order)

def check_plan(plan, engine):
    """AssertionError that names a mistake of the scheduler or of the order."""
    name = type(engine.scheduler).__name__
    good = isinstance(plan, list) and all(isinstance(entry, tuple) for entry in plan)
    assert good, f"{name} plans {short(plan)}: must be [(request, n)]"
    planned = {request for request, _ in plan}
    good = len(planned) == len(plan) and len(planned.union(engine.running)) <= engine.max_batch
    assert good, f"{name} plans a request twice, or more than max_batch = {engine.max_batch}"
    for request, n in plan:
        good = request.state == "running" or request in engine.waiting
        assert good, f"{name} or the order plans {short(request)}: is not waiting or running"
        good = n in range(1, request.n_todo + 1)
        assert good, (f"{name} plans {n} tokens of request {request.id}: must be in 1 .. "
                      f"{request.n_todo}")

def check_lengths(given, limits, policy):
    """AssertionError that names a mistake of a policy."""
    good = isinstance(given, list) and len(given) == len(limits) and all(
        isinstance(k, Integral) and 0 <= k <= limit for k, limit in zip(given, limits))
    assert good, (f"{type(policy).__name__} gives {given} for {len(limits)} decodes: must be whole "
                  f"numbers in 0 .. {limits}")

def check_drafts(lengths, V):
    """AssertionError that names a mistake of a proposer. lengths: {request: most drafts}"""
    for request, k in lengths.items():
        good = len(request.drafts) <= k and all(0 <= token < V for token in request.drafts)
        assert good, f"drafts {request.drafts}: must be up to {k} tokens below {V}"

def check_request(r, engine):
    """Put a request's fields in their normal form. ValueError or KeyError if it was added before,
    or could never be served."""
    check_type("request", r, Request, "a Request")
    new = Request(r.prompt)
    for name in ("id", "state", "n_past", "output", "times", "drafts", "acceptance"):
        value = getattr(r, name)
        if type(value) is not type(getattr(new, name)) or value != getattr(new, name):
            raise ValueError(f"{name} = {short(value)}: add a Request only once, as new")
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
    if r.max_len > config.block_size:
        raise ValueError(f"a prompt of {len(r.prompt):,} tokens + {r.max_new_tokens:,} exceeds the "
                         f"context of {config.block_size:,}")
    if r.temperature and engine.alpha and not engine.simulated:
        raise ValueError(f"temperature = {r.temperature}: with a forced alpha outputs are greedy")
    # the request and its adapter must have room at once
    memory = engine.memory
    if r.adapter is not None:
        check_choice("adapter", r.adapter, memory.names)
    n_adapter = 0
    if r.adapter is not None and not engine.adapter_pages:
        n_adapter = memory.names[r.adapter].n_page
    check_range("pages of the request and its adapter", r.max_len + n_adapter, 1, engine.n_page)

# ---- the command line

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
    flag("--scheduler", default="sarathi", type=partial(class_in_file, base=Scheduler),
         help=f"how batches are filled: {', '.join(SCHEDULERS)}; or FILE.py:CLASS, your own")
    flag("--chunk", type=int, default=256,
         help="tokens of an iteration that feeds a prompt, decodes included")
    flag("--seed", type=int, default=0, help="of random weights, samples and arrivals")

def class_in_file(text, base):
    """The class that FILE.py:CLASS names, or text as it is."""
    path, _, name = text.rpartition(":")
    if text.endswith(".py"):
        raise argparse.ArgumentTypeError(f"{text}: name its class, {text}:CLASS")
    if not path:
        return text
    sys.path.append(os.path.dirname(path))  # for files beside it
    try:
        names = runpy.run_path(path)
    except Exception as error:
        text = f"{path}: {type(error).__name__}: {error}"
        raise argparse.ArgumentTypeError(text) from None
    classes = {key: value for key, value in names.items() if isinstance(value, type)
               and value.__module__ == "<run_path>"}  # not what the file imports
    found = classes[check_choice(f"class of {path}", name, classes)]
    if not issubclass(found, base):
        raise argparse.ArgumentTypeError(f"{text}: must be a subclass of {base.__name__}")
    return found

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
    if isinstance(args.scheduler, type):
        args.scheduler = args.scheduler()
    else:
        check_choice("scheduler", args.scheduler, SCHEDULERS)
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
    if world.size > 1:
        engine.runner.tell("stop")
    print()
    print_figures(request, engine.speculator)

def print_figures(request, speculator):
    """The figures of one request, to stderr."""
    rate = len(request.output) / (request.times[-1] - request.arrival)
    ttft = request.times[0] - request.arrival
    tpot = (request.times[-1] - request.times[0]) / max(1, len(request.times) - 1)
    figures = (f"{len(request.prompt)} + {len(request.output)} tokens, {rate:.0f} tokens/s, "
               f"TTFT {ttft * 1e3:.1f} ms, TPOT {tpot * 1e3:.1f} ms")
    if speculator:
        figures += f", {speculator.n_accepted} of {speculator.n_drafted} drafts accepted"
    print(figures, file=sys.stderr)

def explain(args):
    """Print what every iteration does with two requests, one of them with an adapter."""
    model = GPT.from_preset("tiny", torch.float32, seed=args.seed)
    engine = Engine(model, args.scheduler, chunk=8, max_batch=2, n_page=160, alloc="grow",
                    draft="ngram", spec=2)
    engine.add_adapter("a", 1)
    engine.add(Request([134, 1, 1, 8, 0, 1, 3, 2, 0, 4], 6))
    engine.add(Request([9, 9, 9, 9, 9, 9, 9], 4, adapter="a"))
    print("random weights; 8 tokens at most beside a prompt, 2 drafts for a decode; request 0: 10 "
          "tokens and 6 to generate; request 1: 7 and 4, adapter 'a'")
    run = engine.runner.run
    iterations = count(1)
    pool = engine.memory.pool

    def run_and_tell(feeds):
        n_token = sum(feed.n for feed in feeds)
        print(f"\niteration {next(iterations)}: {n_token} tokens, {len(pool.free)} of "
              f"{pool.n_page} pages are free")
        for request in engine.waiting:
            print(f"  request {request.id} waits: {why_it_waits(engine)}")
        for request, n_past, n, _ in feeds:
            end = n_past + n
            fed = request.tokens(n_past, end - len(request.drafts))
            pages = pool.tables[request][n_past:end].tolist()
            kind = "decode" if request.output else "prefill chunk"
            print(f"  request {request.id}, {kind}: feed tokens {fed}, drafts {request.drafts}\n"
                  f"    positions {n_past} .. {end - 1} on pages {pages}")
            if request.adapter:
                pages = pool.tables[request.weights]
                print(f"    adapter {request.adapter!r} on pages {pages.tolist()}")
        new_tokens = run(feeds)
        for request, tokens in new_tokens.items():
            print(f"  request {request.id}: {len(tokens) - 1} of {len(request.drafts)} drafts "
                  f"accepted, new tokens {tokens}")
        return new_tokens
    engine.runner.run = run_and_tell
    while engine.requests:
        for event in engine.step():
            if event.finished:
                print(f"  request {event.request.id} ends ({event.finished}): its pages go back, "
                      f"{len(pool.free)} of {pool.n_page} are free")

def why_it_waits(engine):
    if len(engine.running) == engine.max_batch:
        return f"{engine.max_batch} requests run"
    if engine.memory.full:
        return "too few pages are free"
    return "the scheduler feeds another prompt"

def run_command_line(main):
    """Call main(). A mistake of the user ends in one line on stderr and exit status 2."""
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads on: `bench.py list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
        sys.exit(141)
    except (ValueError, KeyError, OSError, ImportError, torch.OutOfMemoryError) as error:
        place = error.__traceback__
        while place:
            if place.tb_frame.f_globals.get("__name__") == "<run_path>":
                raise  # by a class of class_in_file(): its author needs the traceback
            place = place.tb_next
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
    sys.modules["sarathi"] = sys.modules["__main__"]  # what a scheduler's file imports
    run_command_line(main)
