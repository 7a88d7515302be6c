"""sarathi: one engine for LLM serving research, in four files. This one turns requests into flat batches and logits into tokens.

One idea carries everything: a prefill chunk, a decode and a verification of drafts are all "feed the next n tokens of request
r". An iteration is a plan [(request, n)], packed into one flat batch of N tokens:

    waiting ──plan──▶ [(r3, 1), (r5, 1), (r7, 254)] ──admit──▶ pages ──pack──▶ ■ ■ ■■■■■■■■■■ ──model──▶ logits ──commit──▶ tokens
              │            decodes      a chunk                  │              N = 256 tokens,               r3, r5 one each;
              └ policy: a Scheduler, ten lines                   └ memory: PagePool   each weight read once   r7 when its prompt ends

`Engine.step` is that picture. What it needs comes before it; a first reading may go from the schedulers straight to the engine:

    requests, memory, adapters      what users ask for, and who owns which page of the one pool
    schedulers, orders              who feeds how many tokens, and who of the queue is first
    costs                           what an iteration takes: for drafts, for autopilot, for the simulator
    speculation, autopilot          where drafts come from, how many ride along, and chunks and drafts chosen together
    the engine                      all of it, iteration by iteration
    the simulator, many devices     the same engine with another clock, or as a pipeline of stages
    command line

Papers are cited where they are implemented: [SARATHI] arXiv 2308.16369, [S-LoRA] 2311.03285, [SmartSpec] 2406.14066, [TNG] the
article "Prefill and decode for concurrent requests" by TNG; others by their numbers.
"""
import argparse
import bisect
import copy
import gc
import heapq
import math
import os
import random
import re
import signal
import sys
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache, partial
from itertools import accumulate, chain, groupby, islice, takewhile
from numbers import Integral
from operator import mul
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from kernels import (CHUNK_ROWS, FEW_ROWS, Feed, Lora, LoraPages, Pages, Rows, Segment, Table, World, accept, cdiv, fetch, key_cells, on_gpu, place,
                     residual, round_up, run_ends, sample, target_probs)
from model import (DTYPES, GPT, PRESETS, Adapter, Batch, GPTConfig, Graphs, Heads, checked, default_dtype, load_heads, load_model, load_tokenizer, preset,
                   random_adapter)


def option(default, help, **more):
    """A dataclass field that is also a command-line flag."""
    return field(default=default, metadata=dict(help=help, **more))


@dataclass
class EngineConfig:
    """Every knob of the engine; each is a keyword of Engine and, but for those that bench.py sets itself, a flag on both command lines."""
    scheduler: str = option("sarathi", "who feeds how many tokens in an iteration: static, orca, prefill_first, sarathi, sarathi_serve or autopilot")
    chunk: int = option(256, "tokens of an iteration that has prefill: the chunk and the decodes beside it; sarathi_serve: its budget; others: no effect")
    max_batch: int = option(0, "most requests running at once; 0: as many of the longest as fit the pool, up to 256 [SARATHI §4.3.1]")
    tile: int = option(128, "chunk + decodes is a multiple of this many tokens [SARATHI §4.4]")
    alloc: str = option("reserve", "pages: a request's maximum length up front and together, or grow one by one", choices=("reserve", "grow"))
    n_page: int = option(0, "pages (tokens of K and V) in the pool; 0: max_batch times the longest context, within memory_gb")
    memory_gb: float = option(0.0, "memory for the pool; 0: 90 %% of what a GPU has left, a quarter of the RAM on a CPU")
    adapter_pages: int = option(0, "pages of the pool for adapters alone; 0: whoever needs one takes it, adapter or cache [S-LoRA §5.1]")
    lora: str = option("batched", "adapters: all at once on the fly, the same with copies and padding, or one at a time in the weights",
                       choices=("batched", "bmm", "merge"))
    order: str = option("fcfs", "who of the waiting starts first: the one that came first or last (in Python also an Order of your own)",
                        choices=("fcfs", "lcfs"))
    cluster: int = option(0, "once the batch has this many adapters, requests for these go first; 0: never [S-LoRA §4.2]")
    max_waiting: int = option(0, "most requests that may wait for a slot of the batch; more are refused as they arrive; 0: no limit")
    fair: float = option(0.0, "clients (Request.client) share the engine: who got the least goes first, a new token counts as this many of a prompt "
                              "(VTC: 2); 0: they do not")
    slo: float = option(0.0, "seconds to the first token after which a waiting request is given up; 0: never [S-LoRA §4.3]")
    tpot: float = option(0.0, "seconds per token that autopilot keeps every running request to, on the whole; 0: as it comes")
    stall: float = option(0.0, "seconds that autopilot's prefills may keep a running request waiting for its next token; 0: as it comes")
    seed: int = option(0, "random numbers of requests that bring no seed of their own")
    graph: bool = option(True, "on a GPU, replay whole iterations as CUDA graphs, each started while the one before still runs")
    alpha: float = option(0.0, "accept each draft with this probability, whatever the model says: for random weights; 0: verify")

    def __post_init__(self):
        for f in fields(self):
            value, choices = getattr(self, f.name), f.metadata.get("choices")
            if f.type in (int, float):
                low, high = 1 if f.name in ("chunk", "tile") else 0, 1 if f.name == "alpha" else math.inf
                checked(f.name, value, f.type, low, high)
            if choices and value not in choices and not (f.name == "order" and isinstance(value, Order)):
                own = ", or an Order object" if f.name == "order" else ""
                raise ValueError(f"{f.name} = {value!r}: one of {', '.join(map(repr, choices))}{own}")
        for name, why in dict(adapter_pages="no adapter is in the pool", cluster="a batch has one adapter, and others must get their turn").items():
            if self.lora == "merge" and getattr(self, name):
                raise ValueError(f"{name} = {getattr(self, name)} with lora = 'merge': {why}")


# ---------------------------------------------------------------- requests

ENDS = dict(length="has all its tokens", stop="met a stop token", abort="the user ended it, or it would be too late (slo)",
            refused="too many were waiting (max_waiting)")  # states of a request that has ended


@dataclass(eq=False)
class Request:
    """What a user asks for, and how far the engine has come with it. Its arithmetic, with tokens = prompt + output:

        |<------------- n_tokens ------------->|<- not known yet ->|
        |<---- n_past: fed, cached ---->|n_todo|                   |  max_len
                                               |drafts|               guesses, fed with the last known token to be verified;
                                                                      a tree of them is fed level by level
    """
    prompt: list = field(repr=False)
    max_new_tokens: int = option(32, "tokens to generate")
    adapter: str | None = None  # a name given to Engine.add_adapter
    temperature: float = option(0.0, "0: always the likeliest token; 1: as the model says")
    top_k: int = option(0, "draw from this many likeliest tokens only; 0: from all")
    top_p: float = option(1.0, "draw from the fewest likeliest tokens that together have this probability")
    seed: int | None = None  # None: from the engine's seed and the request's id; with drafts more numbers are drawn: other tokens, distributed alike
    stop: tuple = ()  # token ids that end the output
    arrival: float | None = None  # seconds on the engine's clock; None: when it is added
    client: str | None = None  # whose it is, where clients are to share the engine fairly
    id: int = field(default=-1, init=False)
    rng: np.random.Generator = field(default=None, init=False, repr=False)  # its own, made by Engine.add
    state: str = field(default="new", init=False)  # new -> pending -> waiting <-> running (-> landing) -> length | stop | abort, or refused
    tokens: np.ndarray = field(default=None, init=False, repr=False)  # (max_len,): n_tokens known, the last maybe to a GPU only
    n_tokens: int = field(default=0, init=False)
    n_past: int = field(default=0, init=False)
    n_preempted: int = field(default=0, init=False)
    n_draft_past: int = field(default=0, init=False)  # as n_past, in a draft model's cache
    n_drafted: int = field(default=0, init=False)  # drafts verified so far
    n_accepted: int = field(default=0, init=False)  # and of these accepted
    speculates: bool | None = field(default=None, init=False, repr=False)  # None: not decided yet [SmartSpec §5]
    q: torch.Tensor | None = field(default=None, init=False, repr=False)  # (k, V) that its drafts were drawn from; None: certain
    luck: int = field(default=0, init=False, repr=False)  # how many drafts are accepted next, where that is forced
    passes: np.ndarray | None = field(default=None, init=False, repr=False)  # (max_len + 1,) forced luck: whether a draft for token i is accepted
    tree: tuple | None = field(default=None, init=False, repr=False)  # the Tree that its drafts form; None: they follow one another
    path: list = field(default_factory=list, init=False, repr=False)  # the rows of the tree that were accepted
    tally: tuple = field(default=(0.0, 0.0), init=False, repr=False)  # drafts accepted and tried of late
    bubble: float = field(default=0.0, init=False)  # seconds that its micro-batches let pipeline stages wait [SARATHI §5.3]
    times: list = field(default_factory=list, init=False, repr=False)  # when each new token came, seconds

    @property
    def n_todo(self):
        return self.n_tokens - self.n_past

    def n_wanted(self, n):
        """Rows whose logits are wanted if n tokens are fed: none before the last known token, one more for each draft after it."""
        return max(0, n - self.n_todo + 1)

    @property
    def max_len(self):
        return len(self.prompt) + self.max_new_tokens

    @property
    def output(self):
        """The new tokens so far."""
        return [] if self.tokens is None else self.tokens[len(self.prompt):len(self.prompt) + len(self.times)].tolist()

    @property
    def done(self):
        return self.state in ENDS

    @property
    def branches(self):
        """Whether its drafts are a tree with more than one path."""
        return bool(self.tree) and self.tree.branches

    @property
    def ttft(self):
        """Seconds from arrival to the first token; nan before it."""
        return self.times[0] - self.arrival if self.times else math.nan

    @property
    def tpot(self):
        """Seconds per token after the first: 0 while there is only that, nan before it."""
        return (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1) if self.times else math.nan


def checked_prompt(prompt, vocab_size):
    """A prompt as an array (n,); ValueError for what is no list of tokens."""
    try:
        tokens = np.asarray(prompt)
    except (ValueError, TypeError):  # ragged, or no array at all
        tokens = np.empty((0, 0))
    if tokens.shape == (0,):
        raise ValueError("empty prompt: at least one token is needed")
    if isinstance(prompt, str):
        raise ValueError(f"prompt {prompt[:60]!r}: is text, must be a list of token ids (a tokenizer's encode)")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"prompt {str(prompt)[:60]}: must be a flat list of token ids in 0 .. {vocab_size - 1}")
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside):
        raise ValueError(f"token {outside[0]} in the prompt: must be in 0 .. {vocab_size - 1}")
    return tokens.astype(np.int64)


def check_numbers(r):
    """ValueError for a number of a request that can never be."""
    for name, *valid in (("max_new_tokens", int, 1), ("temperature", float, 0), ("top_k", int, 0), ("top_p", float, 1e-9, 1), ("arrival", float, 0),
                         ("seed", int, 0)):
        if name not in ("arrival", "seed") or getattr(r, name) is not None:
            checked(name, getattr(r, name), *valid)


def asking(plan):
    """Of a plan's requests those that get tokens from it -> [(request, the drafts that it feeds after its last known token)]"""
    return [(r, r.tokens[r.n_tokens:r.n_past + n].tolist()) for r, n in plan if n >= r.n_todo]


def fed(plan):
    """-> [(request id, n_past, n)] as a Span has them"""
    return [(r.id, r.n_past, n) for r, n in plan]


class Event(NamedTuple):
    """What one iteration did for one request. Every end is in one, but those that the user brought about with Engine.abort."""
    request: Request
    tokens: list  # the new ones
    finished: str | None  # None, or one of ENDS


# ---------------------------------------------------------------- memory: one pool of pages

class Stack:
    """Free pages where any will do: the one freed last is handed out first."""

    def __init__(self, first, n):
        self.pages, self.n = first + np.arange(n)[::-1], n  # pages[:self.n] are free

    def take(self, n):
        """-> (n,) pages, a view that the next `put` writes over; or None"""
        if n > self.n:
            return None
        self.n -= n
        return self.pages[self.n:self.n + n][::-1]

    take_any = take  # who asks a Stack never needs neighbours

    def put(self, pages):
        self.pages[self.n:self.n + len(pages)] = pages[::-1]
        self.n += len(pages)

    def all(self):
        """The free pages."""
        return self.pages[:self.n]


class Gaps:
    """Free pages, of which neighbours are wanted together."""

    def __init__(self, first, n):
        self.spans, self.n = [(first, first + n)] if n else [], n  # [start, end), sorted, never touching

    def take(self, n):
        """-> (n,) pages, of the first block that is large enough; or None"""
        for i, (a, b) in enumerate(self.spans):
            if b - a >= n:
                self.spans[i:i + 1] = [(a + n, b)] if a + n < b else []
                self.n -= n
                return np.arange(a, a + n)
        return None

    def take_any(self, n):
        """-> (n,) pages, together or not: the last ones, so that others find theirs together; or None"""
        if n > self.n:
            return None
        pages, self.n = [], self.n - n
        while n:
            a, b = self.spans.pop()
            m = min(n, b - a)
            pages.append(np.arange(b - m, b))
            n -= m
            if m < b - a:
                self.spans.append((a, b - m))
        return np.concatenate(pages[::-1])

    def put(self, pages):
        """Each run of neighbours is joined with the free spans it touches."""
        self.n += len(pages)
        pages = np.sort(pages)
        for run in np.split(pages, np.flatnonzero(np.diff(pages) > 1) + 1):
            a, b = int(run[0]), int(run[-1]) + 1
            i = bisect.bisect(self.spans, (a, b))
            if i < len(self.spans) and self.spans[i][0] == b:
                b = self.spans.pop(i)[1]
            if i and self.spans[i - 1][1] == a:
                i, a = i - 1, self.spans.pop(i - 1)[0]
            self.spans.insert(i, (a, b))

    def all(self):
        """The free pages."""
        return np.concatenate([np.empty(0, int), *(np.arange(a, b) for a, b in self.spans)])


class PagePool:
    """n_page pages of one token's K and V in every layer, allocated once. Two policies, one address formula (kernels.py):

    reserve: an owner's maximum length up front and together, as in [SARATHI §4.5], so that its addresses need no list.
    grow: any free page, when it is needed."""

    def __init__(self, n_page, n_kv_head, alloc, first=0):
        """first: its first page's number in the cache."""
        self.n_page, self.n_kv_head, self.alloc, self.first = n_page, n_kv_head, alloc, first
        self.unused = (Gaps if alloc == "reserve" else Stack)(first, n_page)
        self.tables = {}  # owner -> Table

    @property
    def n_free(self):
        return self.unused.n

    def need(self, owner, n, n_max):
        """How many free pages `hold` would take."""
        held = len(self.tables[owner].rows) if owner in self.tables else 0
        return 0 if held >= n else n_max if self.alloc == "reserve" else n - held

    def hold(self, owner, n, n_max):
        """Make `owner` own pages for n tokens (it will never want more than n_max). False, and nothing changed, if it cannot be."""
        need = self.need(owner, n, n_max)
        if not need:
            return True
        if need == 1 < n and self.alloc == "grow" and self.unused.n:  # a decode, by far the most frequent: without arrays
            self.unused.n -= 1
            table = self.tables[owner]
            table.space[n - 1], table.rows = self.unused.pages[self.unused.n] * self.n_kv_head, table.space[:n]
            return True
        pages = self.unused.take(need)
        if pages is None:
            return False
        if self.alloc == "reserve":  # one block, laid out head after head
            self.tables[owner] = Table(pages[0] * self.n_kv_head + np.arange(n_max), n_max)
        else:
            table = self.tables.setdefault(owner, Table(None, 1, np.empty(n_max, int)))
            table.space[n - need:n] = pages * self.n_kv_head
            table.rows = table.space[:n]
        return True

    def hold_any(self, owner, n, n_max):
        """As hold, where `owner` is new here, and pages may lie anywhere under either policy."""
        pages = self.unused.take_any(n)
        if pages is not None:
            self.tables[owner] = Table(pages * self.n_kv_head, 1)
        return pages is not None

    def free(self, owner):
        """Give back all that `owner` holds; an owner without pages is no error."""
        if owner in self.tables:
            self.unused.put(self.pages(owner))
            del self.tables[owner]

    def pages(self, owner):
        """(n,) the pages an owner holds."""
        t = self.tables[owner]
        return t.rows // self.n_kv_head if t.stride == 1 else t.rows[0] // self.n_kv_head + np.arange(t.stride)

    def check(self):
        """Our own invariant: free + owned = total, and no page has two owners."""
        every = np.sort(np.concatenate([self.unused.all(), *map(self.pages, self.tables)]))
        assert np.array_equal(every, self.first + np.arange(self.n_page)), "pages lost or owned twice"
        assert self.n_free == len(self.unused.all())


# ---------------------------------------------------------------- adapters: thousands in host memory, those in use in the pool

PREFETCH = 4  # requests at the head of the queue whose adapters are copied in ahead of time
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of a number -> a type that carries them as they are


@dataclass
class Resident:
    """An adapter in the pool."""
    factors: dict  # operator -> kernels.Factors
    ready: object  # call it before use: it returns when the copy has arrived
    n_users: int = 0  # running requests


class AdapterStore:
    """Every adapter in host memory; in the pool those of running requests and, while nobody needs the pages, others [S-LoRA §5]."""

    def __init__(self, pool, copy):
        """copy(pages, Adapter) starts a copy into the pool -> a function that waits for its end."""
        self.pool, self.copy = pool, copy
        self.known = {}  # name -> Adapter
        self.resident = {}  # name -> Resident, least recently used first

    def hold(self, name):
        """Have the adapter in the pool, evicting idle ones, the least recently used first. False if that gives too few pages."""
        if name is None:
            return True
        if name not in self.resident:
            adapter = self.known[name]
            if not self.find_room(self.pool, self.pool.hold_any, name, adapter.n_page, adapter.n_page):
                return False
            pages = self.pool.pages(name)
            try:
                self.resident[name] = Resident(adapter.at(pages), self.copy(pages, adapter))
            except BaseException:  # a GPU without the memory to copy it: its pages are nobody's
                self.pool.free(name)
                raise
        self.resident[name] = self.resident.pop(name)  # now the most recently used
        return True

    def use(self, name, n):
        """n more (or, negative, fewer) running requests use it."""
        if name is not None:
            self.resident[name].ready()
            self.resident[name].n_users += n

    def find_room(self, pool, hold, *wanted):
        """hold(*wanted), which are (owner, n, n_max), in a pool, evicting one idle adapter before each further try, if that is the pool
        they are in. False if it cannot be; nothing is evicted where all of them would be too few."""
        if hold(*wanted):
            return True
        idle = sum(self.known[name].n_page for name, r in self.resident.items() if not r.n_users)
        if pool is self.pool and pool.n_free + idle >= pool.need(*wanted):
            while self.evict():
                if hold(*wanted):
                    return True
        return False

    def evict(self):
        """Give back the pages of the least recently used adapter that is idle; False if none is."""
        name = next((name for name, r in self.resident.items() if not r.n_users), None)
        if name is not None:
            try:
                self.resident.pop(name).ready()
            finally:  # also where its copy failed
                self.pool.free(name)
        return name is not None

    def prefetch(self, requests):
        """Start to copy in what these will need, as far as pages are free [S-LoRA §5.2]."""
        for name in dict.fromkeys(r.adapter for r in requests):
            if name is not None and name not in self.resident and self.known[name].n_page <= self.pool.n_free:
                self.hold(name)


class Merging(AdapterStore):
    """For adapters that are merged into the weights: none is in the pool."""

    def hold(self, name):
        return True

    def use(self, name, n):
        pass

    def prefetch(self, requests):
        pass


class Copier:
    """Copies adapters into the cache beside iterations: on a CPU by a thread; on a GPU by a stream of its own, behind what was launched
    by then, which may still read these pages."""

    def __init__(self, kv, n_kv_head):
        self.pages = kv.view(*kv.shape[:2], -1, n_kv_head * kv.size(-1))  # (n_layer, 2, n_page, width)
        if kv.is_cuda:
            self.stream = torch.cuda.Stream(kv.device)
        else:  # numpy, which leaves the cores to the model's threads; it has no bfloat16, but may copy bits
            self.thread = ThreadPoolExecutor(1)
            self.pages = self.pages.view(BITS[kv.element_size()]).numpy()

    def __call__(self, pages, adapter):
        """Start; -> a function that waits."""
        if isinstance(self.pages, np.ndarray):
            planes = adapter.planes.view(BITS[adapter.planes.element_size()]).numpy()
            return self.thread.submit(self.pages.__setitem__, (slice(None), slice(None), pages), planes).result
        self.stream.wait_stream(torch.cuda.current_stream())  # for what zeroed or last used these pages
        with torch.cuda.stream(self.stream):
            self.pages.index_copy_(2, place(pages, self.pages.device), adapter.planes.to(self.pages.device, non_blocking=True))
            done = self.stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(done)


# ---------------------------------------------------------------- schedulers: who feeds how many tokens

class Named:
    """Subclasses are found by name, in their family's registry: class ShortestFirst is "shortest_first"."""

    def __init_subclass__(cls, named=True):
        if named:
            cls.registry[re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()] = cls


SCHEDULERS = {}  # name -> class


class Scheduler(Named, named=False):
    """Who feeds how many tokens in the next iteration. Subclass it and write `plan`; it never touches pages.

    chunk, max_batch and tile are the engine's unless given here; priced: whether it asks for engine.cost."""
    registry, priced = SCHEDULERS, False

    def __init__(self, chunk=None, max_batch=None, tile=None):
        self.chunk, self.max_batch, self.tile = chunk, max_batch, tile

    def plan(self, running, waiting):
        """running: Requests with pages, oldest first. waiting: those without, in the order that the options say (first come first);
        it has a length, costs nothing until it is looked at, and may be ().
        -> [(request, n)] with 1 <= n <= request.n_todo. A waiting request that is named is started, if its pages are there."""
        raise NotImplementedError(f"{type(self).__name__} has no plan(self, running, waiting)")

    def start(self, engine):
        """Called once, by the engine that it plans for."""

    def room(self, plan):
        """How many tokens of drafts this plan's decodes may add; no limit, unless the scheduler has a budget."""
        return math.inf

    def new(self, running, waiting):
        """The waiting requests that the batch has slots for."""
        return list(islice(waiting, max(0, self.max_batch - len(running))))


class Static(Scheduler):
    """Request-level batching (FasterTransformer): fill a batch, run it until every request ends."""

    def plan(self, running, waiting):
        return [(r, r.n_todo) for r in running or self.new(running, waiting)]


class Orca(Scheduler):
    """Iteration-level batching: whole prompts join the running decodes, any number at once [SARATHI §4.5]."""

    def plan(self, running, waiting):
        return [(r, r.n_todo) for r in [*running, *self.new(running, waiting)]]


class PrefillFirst(Scheduler):
    """Continuous batching as in vLLM and TGI: new prompts run at once and alone, running decodes wait [TNG]."""

    def plan(self, running, waiting):
        return [(r, r.n_todo) for r in self.new(running, waiting) or running]


class Sarathi(Scheduler):
    """Decode-maximal batching: one prefill chunk, every other slot a decode [SARATHI §4.3]. The chunk shrinks so that chunk +
    decodes is a multiple of the tile [§4.4]: with C = 256 and B - 1 decodes it is 256 - (B - 1)."""

    def plan(self, running, waiting):
        decodes = [(r, 1) for r in running if r.n_todo == 1]
        prefill = next((r for r in chain(running, self.new(running, waiting)) if r.n_todo > 1 or r.state == "waiting"), None)
        if prefill is None:
            return decodes
        n = self._whole(len(decodes) + 1) - len(decodes)  # never below one token of prefill
        return decodes + [(prefill, min(prefill.n_todo, n))]

    def room(self, plan):
        """Drafts fill the tile that was begun, or the chunk."""
        n = sum(n for r, n in plan)
        return self._whole(n) - n

    def _whole(self, n):
        """n rounded up to whole tiles, but no less than the chunk, rounded down to them."""
        tile = min(self.tile, self.chunk)
        return max(self.chunk // tile * tile, round_up(n, tile))


class SarathiServe(Scheduler):
    """A token budget per iteration: decodes first, then as many chunks as fit (Sarathi-Serve, arXiv 2403.02310)."""

    def plan(self, running, waiting):
        plan = [(r, 1) for r in running if r.n_todo == 1]
        budget = self.chunk - len(plan)
        for r in chain((r for r in running if r.n_todo > 1), self.new(running, waiting)):
            if budget > 0:
                plan.append((r, min(r.n_todo, budget)))
                budget -= plan[-1][1]
        return plan

    def room(self, plan):
        return self.chunk - sum(n for r, n in plan)


def make_scheduler(scheduler, **options):
    """A Scheduler from its name or like the object, with what it leaves open (None) filled in from options."""
    if isinstance(scheduler, str):
        if scheduler not in SCHEDULERS:
            raise KeyError(f"unknown scheduler {scheduler!r}: one of {', '.join(SCHEDULERS)}")
        scheduler = SCHEDULERS[scheduler]()
    if not isinstance(scheduler, Scheduler):
        raise ValueError(f"scheduler = {scheduler!r}: must be a Scheduler object, like Sarathi(), or one of {', '.join(SCHEDULERS)}")
    return fill_in(copy.copy(scheduler), **options)  # what one engine fills in is not another's


def fill_in(scheduler, **options):
    """Give a scheduler what it leaves to the engine. -> scheduler"""
    for name, value in options.items():
        if getattr(scheduler, name, None) is None:  # one of somebody's own may not call our __init__
            setattr(scheduler, name, value)
        checked(name, getattr(scheduler, name), int, 1)
    return scheduler


# ---------------------------------------------------------------- orders: who of the queue is first

class Queue:
    """The waiting requests, first come first. To take one out takes as long wherever it stands, in a queue of ten or of a million.

    by_client: client -> its own requests in the same order, for as long as it has some; n_come: how many have come."""

    def __init__(self, requests=()):
        self.all, self.by_client, self.n_come = OrderedDict(), {}, 0
        for r in requests:
            self.append(r)

    def append(self, r, returns=False):
        """returns: it was started before, and goes to the head, where it came from."""
        self.n_come += not returns
        for part in (self.all, self.by_client.setdefault(r.client, OrderedDict())):
            part[r] = None
            part.move_to_end(r, last=not returns)

    def remove(self, r):
        mine = self.by_client[r.client]
        del self.all[r], mine[r]
        if not mine:
            del self.by_client[r.client]

    def __iter__(self):
        return iter(self.all)

    def __reversed__(self):
        return reversed(self.all)

    def __len__(self):
        return len(self.all)


class View:
    """A queue in another order, worked out only as far as somebody looks: most iterations have no slot for anybody new."""

    def __init__(self, waiting, order):
        """order(): an iterator over the requests."""
        self.waiting, self.order = waiting, order

    def __iter__(self):
        return self.order()

    def __len__(self):
        return len(self.waiting)

    @property
    def by_client(self):
        """As a Queue's."""
        clients = defaultdict(list)
        for r in self:
            clients[r.client].append(r)
        return clients


class Order:
    """In which order waiting requests are offered to the scheduler, any scheduler: Engine(model, order=...). Subclass it and write
    `offer`; this one: first come first served."""
    inner = None  # the Order that this one rearranges; None: as they came

    def __init__(self, inner=None):
        self.inner = inner

    def queue(self, engine):
        """-> engine.waiting (or some of them) in this order, a Queue or a View."""
        queue = self.before(engine)
        return View(queue, lambda: self._offered(engine.running, queue))

    def _offered(self, running, queue):
        """What `offer` gives, if these are requests."""
        offered = self.offer(running, queue)
        for r in offered if isinstance(offered, Iterable) else [offered]:
            if not isinstance(r, Request):
                raise ValueError(f"{type(self).__name__}.offer gave {r!r}: must give the waiting requests, in a list or by an iterator")
            yield r

    def before(self, engine):
        """The queue that is rearranged."""
        return self.inner.queue(engine) if self.inner else engine.waiting

    def offer(self, running, queue):
        """running: the requests of the batch, oldest first; queue: those that wait, in the inner order -> the latter, rearranged: a list,
        or an iterator if it need not look at all of them"""
        return iter(queue)


class LastCome(Order):
    """Last come first served: under overload it keeps the promise to some instead of breaking it to all [S-LoRA §4.3]."""

    def offer(self, running, queue):
        """First those that gave way, at the head: they were started when they were the latest."""
        return chain(takewhile(lambda r: r.n_preempted, queue), takewhile(lambda r: not r.n_preempted, reversed(queue)))


class Cluster(Order):
    """Once a batch has d adapters, requests for these go first: fewer adapters at once, more pages for the cache [S-LoRA §4.2].
    Not fair: while requests for these keep coming as fast as they are served, those for others wait."""

    def __init__(self, inner, d):
        super().__init__(inner)
        self.d = d

    def offer(self, running, queue):
        active, last = {None, *(r.adapter for r in running)}, []  # no adapter is in every batch
        for r in queue:
            if len(active) <= self.d:
                active.add(r.adapter)
            if r.adapter in active:
                yield r
            else:
                last.append(r)
        yield from last


class Fair(Order):
    """The client that got the least goes first: a virtual token counter (VTC, Sheng et al., arXiv 2401.00588). A client's counter
    holds the tokens of its prompts and, each worth `weight` of them, the new ones. While two clients wait, their counters differ by no
    more than a batch can hold, however many requests one of them sends; turns (round-robin) would let long requests take more."""

    def __init__(self, inner, weight):
        """inner: the order of each client's own requests."""
        super().__init__(inner)
        self.weight, self.counter, self.level = weight, {}, 0.0  # client -> tokens; the least of those that wait, which a client starts with
        self.charged, self.known = {}, {}  # request -> tokens it was charged for; client -> its queue when last seen

    def queue(self, engine):
        self._charge()
        self._lift(engine.waiting.by_client)
        return super().queue(engine)

    def offer(self, running, queue):
        """Whose client has got least, as if those offered before had been started."""
        heads = [(self.counter[client], i, iter(requests)) for i, (client, requests) in enumerate(queue.by_client.items())]
        heapq.heapify(heads)
        while heads:
            tokens, i, requests = heads[0]
            r = next(requests, None)
            if r is None:
                heapq.heappop(heads)
            else:
                paid = self.charged.setdefault(r, 0.0)  # something, if it was preempted
                heapq.heapreplace(heads, (tokens if paid else tokens + len(r.prompt), i, requests))
                yield r

    def _charge(self):
        """Book what was started and generated since the last time; an offer that was not taken costs nothing."""
        for r, paid in list(self.charged.items()):
            self.charged[r] = price = self._price(r)
            self.counter[r.client] += price - paid
            if r.done or not price:
                del self.charged[r]

    def _price(self, r):
        """The whole prompt once it is started, but of one that was aborted before it gave a token only what was fed; computing again
        after a preemption is not the client's fault."""
        if r.state == "waiting" and not r.n_preempted:
            return 0.0
        return (min(r.n_past, len(r.prompt)) if r.done and not r.times else len(r.prompt)) + self.weight * len(r.times)

    def _lift(self, queues):
        """Who comes (back) to the queue starts no lower than those in it: being away earns nothing. Who left is forgotten as soon as
        that makes no difference."""
        # differs from [VTC Alg. 2]: with nobody in the queue it is the least of those that run, not the last to leave the queue
        stayed = {c for c, q in queues.items() if self.known.get(c) is q or next(iter(q)).n_preempted}  # in the queue the last time, too
        run = {r.client for r in self.charged}
        self.level = max(self.level, min((self.counter[c] for c in stayed or run), default=0.0))
        if self.known.keys() != queues.keys():
            self.counter = {c: n for c, n in self.counter.items() if c in queues or c in run or n > self.level}
        for c in queues.keys() - stayed:
            self.counter[c] = max(self.counter.get(c, 0.0), self.level)
        self.known = dict(queues)


class OneAdapter(Order):
    """For merged weights: only requests of the batch's adapter, until too many of others wait in front of them; then the batch
    runs out, and the first in the queue says which is next [S-LoRA §7.5]."""
    PATIENCE = 30  # requests, as in the paper's code

    def offer(self, running, queue):
        adapter, patience = next((r.adapter for r in chain(running, queue)), None), self.PATIENCE
        for r in queue:
            if r.adapter == adapter:
                patience = math.inf
                yield r
            elif patience == 0:
                return
            else:
                patience -= 1


class EarlyAbort(Order):
    """Give up requests that would get their first token too late, and while more come than are started, serve the newest first
    [S-LoRA §4.3, App. B]; both rates are moving averages."""
    MARGIN = 1 / 12  # of the slo, from being started to the first token: 0.5 of 6 seconds, as in the paper's code

    def __init__(self, inner, slo):
        super().__init__(inner)
        self.slo, self.n_waiting, self.n_come = slo, 0, 0
        self.come = self.started = 0.0  # requests per call that brought a change

    def queue(self, engine):
        waiting, now = engine.waiting, engine.clock.now()
        n_new = waiting.n_come - self.n_come
        n_started = self.n_waiting + n_new - len(waiting)
        if n_new or n_started:
            self.come, self.started = 0.7 * n_new + 0.3 * self.come, 0.7 * n_started + 0.3 * self.started
        late = lambda r: now - r.arrival >= (1 - self.MARGIN) * self.slo
        for r in [*takewhile(lambda r: r.n_preempted or late(r), waiting)]:  # first those that gave way, then by arrival
            if late(r) and r.n_tokens == len(r.prompt):
                engine.give_up(r)
        self.n_waiting, self.n_come = len(waiting), waiting.n_come
        return super().queue(engine) if self.come >= self.started else self.before(engine)

    def offer(self, running, queue):
        yield from sorted(queue, key=lambda r: (not r.n_preempted, -r.arrival))  # once somebody looks


# ---------------------------------------------------------------- costs: what an iteration takes

class GPU(NamedTuple):
    """A data sheet."""
    flops: float  # dense 16-bit tensor-core peak, 1/s
    bandwidth: float  # of its memory, bytes/s
    memory: float  # bytes
    link: float  # to each neighbour in its node, one way, bytes/s: NVLink where there is one


GPUS = {"a10g": GPU(70e12, 600e9, 24 * 2**30, 32e9), "a6000": GPU(154.8e12, 768e9, 48 * 2**30, 56e9), "a40": GPU(149.7e12, 696e9, 48 * 2**30, 56e9),
        "a100-40": GPU(312e12, 1555e9, 40 * 2**30, 300e9), "a100": GPU(312e12, 2039e9, 80 * 2**30, 300e9),
        "h100": GPU(989e12, 3350e9, 80 * 2**30, 450e9), "h200": GPU(989e12, 4800e9, 141 * 2**30, 450e9)}

# shares of the data sheet that kernels reach, the same for every GPU and model; each is fitted on the cells named after it
GEMM_FLOPS = 0.77  # [SARATHI Table 2] prefill-only, linear
GEMM_BANDWIDTH = 0.76  # [SARATHI Table 2] decode-only, linear
CHUNK_FLOPS = 0.30  # [SARATHI Table 2] prefill-only, attn
DECODE_BANDWIDTH = 0.80  # [SARATHI Table 2] decode-only, attn
ATTENTION_CALL = 19e-6  # seconds to start a chunk's or the decodes' attention in one layer; [SARATHI Table 2] decode-maximal, attn
ELEMENTWISE = 6  # times that norms, activations and residuals read or write a token's vector in one layer: "others" < 5 % [§3.1]
TILE = 128  # rows of a GEMM's thread block [SARATHI Fig. 7]
SKINNY = 32  # up to so many rows a GEMM takes smaller blocks: a decode-only batch pays for its own rows [SARATHI Table 2]
USABLE = 0.84  # of a GPU's memory, for weights and cache: [SARATHI Fig. 8, §5.3] batches of 18, 10, 6, 27 and 11
LORA_BANDWIDTH = 0.325  # every decode reads its adapter, shared or not: MBGMV [S-LoRA §5.3]; [S-LoRA Table 3] S4, n = 100
LINK, LINK_DELAY = 0.75, 25e-6  # share of a link's bandwidth, and seconds before the first byte: usual for NCCL on eight GPUs, not fitted
INFINIBAND = 25e9  # bytes/s from a GPU to its peer in the next node: 200 Gb/s each
PCIE = 32e9  # bytes/s from the host's memory: 16 lanes of the fourth generation


class System(NamedTuple):
    """The seconds that a serving system's host adds to the hardware's; each is fitted on the cell named in SYSTEMS."""
    layer: float = 0.0  # to launch one layer's kernels: a GPU that is faster waits
    token: float = 0.0  # between two iterations, for each token that is sampled or verified: in and out, one by one
    load: float = 0.0  # per layer, to start the copies of an adapter, also when they overlap
    resize: float = 0.0  # per layer, when the adapters have a pool of their own: to move it, as one comes or goes
    copy: float = ATTENTION_CALL  # per layer and request: to gather and pad its adapter for a batched GEMM
    eager: bool = False  # host and GPU wait for each other in every layer: their times add up
    expand: bool = False  # a verified draft is a request of its own, that reads the context once more


SYSTEMS = {
    "sarathi": System(),  # this engine: all its time is the GPU's
    "lightllm": System(layer=1.33e-3,  # [S-LoRA Fig. 6] S4, R = 1: average latency
                       token=0.085e-3,  # [S-LoRA Table 3] S1, n = 5
                       load=0.45e-3,  # [S-LoRA Table 3] S2, n = 1000
                       resize=1.25e-3,  # [S-LoRA Fig. 5] no-unify, A100-80, S4, n = 400
                       copy=0.505e-3),  # [S-LoRA Fig. 5] bmm, A100-80, S4, n = 400
    "transformers": System(layer=1.8e-3,  # [S-LoRA Table 3] PEFT, S1 and S4, n = 100
                           token=0.95e-3,  # [S-LoRA Table 3] PEFT, S1, n = 5: its cache is copied when it grows
                           eager=True),
    "vllm": System(token=0.036e-3,  # [SmartSpec Fig. 1] k = 5 is no gain beyond 12 requests/s
                   expand=True)}  # until its version 0.6, so in the paper's: BatchExpansionTop1Scorer


class Work(NamedTuple):
    """What one iteration asks of the hardware, as far as its time depends on it."""
    N: int  # tokens through the linear operators
    M: int = 0  # rows that need logits
    decodes: int = 0
    context: int = 0  # cached tokens that decodes read
    again: float = 0  # and those that a verification's rows after the first read again: where each reads for itself, on a CPU and by System.expand
    chunks: int = 0
    pairs: float = 0  # of a chunk's query with a key
    reread: int = 0  # cached tokens that chunks read, those of earlier chunks included [SARATHI §4.2]
    adapted: int = 0  # requests that have an adapter
    lora_read: int = 0  # weights of adapters that decodes read, each its own
    lora_pairs: int = 0  # of a token with a weight of its adapter: a chunk's, and the other rows of a verification

    @classmethod
    def of(cls, entries, tile):
        """entries: (n_past, n, rows whose logits are wanted, weights of its adapter) per request; a chunk's rows fill whole tiles."""
        N = M = decodes = context = again = chunks = pairs = reread = adapted = lora_read = lora_pairs = 0
        for past, n, wants, *adapter in entries:
            N += n
            M += wants
            if n <= FEW_ROWS:
                decodes += 1
                context += past + n
                again += (n - 1) * (past + n)
            else:
                chunks += 1
                pairs += round_up(n, tile) * (past + n / 2)
                reread += past + n
            if adapter and adapter[0]:
                adapted += 1
                lora_read += adapter[0] * (n <= FEW_ROWS)
                lora_pairs += adapter[0] * (n - (n <= FEW_ROWS))
        return cls(N, M, decodes, context, again, chunks, pairs, reread, adapted, lora_read, lora_pairs)


class CostModel:
    """Seconds of an iteration: T = alpha N_context + gamma ceil(N / tile) tile + delta [SmartSpec Eq. 7, SARATHI Fig. 7]. gamma and
    delta, computing N tokens and reading the weights, overlap in Roofline and add up in Fitted, where gamma changes with N; in both a
    chunk's attention pays for its query-key pairs. They say what each term is: linear, attention, others, lora, all_reduce, send, and
    the peaks these imply."""
    error = None  # of a fitted one: the median relative error on batches that the fit did not see
    version = 0  # of its prices: more once they have changed
    system = SYSTEMS["sarathi"]
    world = World()  # many simulated GPUs are one process

    def __init__(self, config, dtype, memory, name, tile=1):
        self.config, self.dtype, self.memory, self.name, self.tile = config, dtype, memory, name, tile
        self.weights = {name: a * b for name, (a, b) in config.widths.items()}  # of one layer
        self.n_weights, self.page = sum(self.weights.values()), config.page_bytes(dtype.itemsize)

    @staticmethod
    def roofline(config, gpu, tp=1, nodes=1, delay=LINK_DELAY, system="sarathi"):
        """From a GPU's data sheet. KeyError, listing the known ones, for another GPU. tp: GPUs that share every layer; nodes: so
        many of these groups share the model (and their memory), each some of the layers, as stages of a Pipeline; delay: seconds
        before an all-reduce begins; system: whose host it is, one of SYSTEMS."""
        return Roofline(config, gpu, tp, nodes, delay, system)

    @staticmethod
    def profile(model, repeats=3, between=lambda: None):
        """Fitted to iterations of the engine with this model on this machine (half a minute), timed in `repeats` rounds;
        between() is called after each, to measure something else in turns with them."""
        return Fitted(model, repeats, between)

    def time(self, n_tokens, n_context=0):
        """Seconds of an iteration that feeds n_tokens tokens and reads n_context cached ones, those of all its requests together."""
        return self.seconds(self._rough(n_tokens, n_context))

    def operators(self, n_tokens, n_context=0):
        """`time` by operator, all layers: {"preproj": seconds, "attn": ..., "others": ...}."""
        return self._operators(self._rough(n_tokens, n_context))

    def time_of(self, entries, lora="batched"):
        """Seconds of an iteration with these entries, (n_past, n, wants logits, weights of its adapter) per request; lora: how
        adapters are computed, as in EngineConfig."""
        return self.seconds(Work.of(entries, self.tile), lora)

    def operators_of(self, entries, lora="batched"):
        """`time_of` by operator, without what the host adds."""
        return self._operators(Work.of(entries, self.tile), lora)

    def load(self, n_params, resize=False):
        """Seconds that it takes the host to start copying an adapter of n_params weights in, and then the link; resize: the
        adapters have a pool of their own."""
        s = self.system
        return self.config.n_layer * (s.load + s.resize * resize), n_params * self.dtype.itemsize / (LINK * PCIE)

    def merge(self):
        """Seconds to swap the adapter in the weights: W - A1 B1 + A2 B2, each pass over q, k, v and o reads W and a product that
        was written first, and writes W."""
        n = self.config.n_layer * (self.weights["preproj"] + self.weights["postproj"])
        return 2 * 4 * n * self.dtype.itemsize / self.peaks[1]

    def _rough(self, n_tokens, n_context):
        checked("n_tokens", n_tokens, int, 1)
        return Work(n_tokens, 1, decodes=int(n_context > 0), context=checked("n_context", n_context, int, 0))

    def seconds(self, w, lora="batched"):
        """Of an iteration that asks the Work w of the hardware."""
        if self.system.expand:
            w = w._replace(context=w.context + w.again)
        device, host = self._device(w, lora) + 2 * self.all_reduce(w.N), self.config.n_layer * self.system.layer
        return (device + host if self.system.eager else max(device, host)) + self.system.token * w.M

    def _device(self, w, lora):
        """Seconds of the device alone, and not of its links."""
        return self.linear(w.N) + self.attention(w) + self.others(w) + self.lora(w, lora)

    def _operators(self, w, lora="batched"):
        linear, reduce = self.linear(w.N), self.all_reduce(w.N)  # one after each of the two row-parallel operators
        took = {name: linear * n / self.n_weights + reduce * (name in ("postproj", "ffn_ln2")) for name, n in self.weights.items()}
        adapters = {"lora": self.lora(w, lora)} if w.adapted else {}
        return dict(preproj=took.pop("preproj"), attn=self.attention(w), **took, others=self.others(w), **adapters)

    def wants(self):
        """Whether `learn` is to be told what the next iteration takes; only a Learned one ever wants to know."""
        return False

    def learn(self, w, seconds, lora="batched"):
        """An iteration took so long."""


class Roofline(CostModel):
    """Each operator's time is the 2-norm of computing and reading, at fixed shares of a data sheet's peaks."""

    def __init__(self, config, gpu, tp=1, nodes=1, delay=LINK_DELAY, system="sarathi"):
        for name, known in ((gpu, GPUS), (system, SYSTEMS)):
            if name not in known:
                raise KeyError(f"unknown {'hardware' if known is GPUS else 'system'} {name!r}: one of {', '.join(known)}")
        if not isinstance(config, GPTConfig):
            raise ValueError(f"config = {config!r}: must be a GPTConfig, like preset('llama-13b')")
        config.share(World(checked("tp", tp, int, 1)))  # ValueError if so many cannot
        self.system = SYSTEMS[system]
        self.gpu, self.tp, self.delay = GPUS[gpu], tp, delay
        self.exchanges = True  # x A of adapters is sent; False: to see what that costs
        c, dtype = config, torch.bfloat16
        left = [share * tp * nodes * self.gpu.memory - c.n_params * dtype.itemsize for share in (1, USABLE)]
        super().__init__(c, dtype, (left[0], left[1] / left[0]), f"{tp * nodes} x {gpu}" if tp * nodes > 1 else gpu, TILE)
        self.flops, self.bandwidth = tp * self.gpu.flops, tp * self.gpu.bandwidth

    def linear(self, N):
        """The four linear operators of all layers: computing whole tiles of rows, and reading the weights once."""
        return self._gemm(N, self.config.n_layer * self.n_weights)

    def attention(self, w):
        """Chunks multiply and read what came before them; decodes are bound by the keys and values they read."""
        c = self.config
        multiply = 4 * c.n_layer * c.n_head * c.head_dim * w.pairs / (CHUNK_FLOPS * self.flops)
        read = self.page / (DECODE_BANDWIDTH * self.bandwidth)
        return math.hypot(multiply, w.reread * read) + w.context * read + c.n_layer * ATTENTION_CALL * ((w.chunks > 0) + (w.decodes > 0))

    def lora(self, w, kind):
        """x A B for the rows that have an adapter: decodes are bound by the weights they read, chunks multiply at the rate of
        their attention. bmm: what is read is gathered and padded first, request by request; merge: nothing is left to do."""
        if kind == "merge" or not w.adapted:
            return 0.0
        multiply = 2 * w.lora_pairs / (CHUNK_FLOPS * self.flops)
        read = w.lora_read * self.dtype.itemsize / (LORA_BANDWIDTH * self.bandwidth)
        calls = self.system.copy * w.adapted if kind == "bmm" else ATTENTION_CALL * ((w.chunks > 0) + (w.decodes > 0))
        return multiply + read * (3 if kind == "bmm" else 1) + self.config.n_layer * calls + self.exchange(w)

    def others(self, w):
        """Norms, activations, residuals; the output head for the rows that need it."""
        c = self.config
        passes = ELEMENTWISE * w.N * c.n_layer * c.n_embd * self.dtype.itemsize / (GEMM_BANDWIDTH * self.bandwidth)
        return passes + (self._gemm(w.M, c.vocab_size * c.n_embd) if w.M else 0.0)

    def all_reduce(self, N):
        """Of N tokens' vectors over the tp GPUs of a node, in every layer [SARATHI §2.3]."""
        ring = 2 * (self.tp - 1) / self.tp * N * self.config.n_embd * self.dtype.itemsize / (LINK * self.gpu.link)
        return self.config.n_layer * (ring + self.delay) if self.tp > 1 else 0.0

    def exchange(self, w):
        """Of x A over the tp GPUs, 5 (N - 1) B r / N numbers in every layer for q, k, v and o [S-LoRA §6]: two messages, as this
        engine sends q's, k's and v's in one."""
        if self.tp == 1 or not self.exchanges:
            return 0.0
        modules = [self.config.operators[op] for op in ("preproj", "postproj")]
        width = sum(op.n_in + n_out for op in modules for _, n_out, _ in op.modules.values())  # weights per layer and unit of rank
        numbers = (len(modules[0].modules) + 2) * (self.tp - 1) / self.tp * (w.lora_read + w.lora_pairs) / width
        return numbers * self.dtype.itemsize / (LINK * self.gpu.link) + 2 * self.config.n_layer * self.delay

    def send(self, N):
        """N tokens' vectors to the next stage of a pipeline, in the next node; each of the tp GPUs sends its share."""
        return N * self.config.n_embd * self.dtype.itemsize / self.tp / (LINK * INFINIBAND) + LINK_DELAY

    @property
    def peaks(self):
        """(FLOP/s, bytes/s) that a large matrix product and a weight read reach."""
        return GEMM_FLOPS * self.flops, GEMM_BANDWIDTH * self.bandwidth

    def _gemm(self, N, n_weights):
        """N rows times n_weights weights: whole tiles are multiplied, every weight is read once."""
        rows = N if N <= SKINNY else round_up(N, TILE)
        return math.hypot(2 * rows * n_weights / (GEMM_FLOPS * self.flops), self.dtype.itemsize * n_weights / (GEMM_BANDWIDTH * self.bandwidth))


class Fitted(CostModel):
    """Least squares, of relative errors, over a designed set of real iterations; `error` is the median on others."""
    link = (0.0, 0.0)  # seconds of a message to the next stage of a pipeline, and seconds per token in it; bench.py's message_cost
    ring = (0.0, 0.0)  # the same of an all-reduce, where it was not in the iterations that were timed; bench.py's message_cost
    RANKS = 8, 64  # of the adapters in its iterations
    KNOTS = (4, 16, 64)  # tokens at which the slope of the linear operators may change: no tile, but small batches are bound by memory
    LINEAR, ATTENTION, OTHERS, LORA = slice(0, 5), slice(5, 11), slice(11, 12), slice(12, 16)  # of the features and their coefficients

    def __init__(self, model, repeats, between):
        super().__init__(model.config, model.dtype, free_memory(model.device), str(model.device))
        L, weights = min(model.config.block_size, 1024) - 2, [random_adapter(rank)(model.config).n_params for rank in self.RANKS]
        designed, unseen = designed_batches(L, weights), random_batches(L, 16, weights)
        times = time_batches(model, designed + unseen, repeats, between)
        A = np.array([self.features(Work.of(entries, 1)) for entries in designed + unseen], float)
        n = len(designed)
        self.coefficients = least_squares(A[:n] / times[:n, None], np.ones(n)).tolist()
        self.error = float(np.median(np.abs(A[n:] @ self.coefficients / times[n:] - 1)))

    def features(self, w):
        return [*self._of_linear(w.N), *self._of_attention(w), w.M, *self._of_lora(w)]

    def _device(self, w, lora):
        """The sum of all parts at once: who chooses drafts or chunks asks for it a hundred times."""
        n = self.LORA.start if lora == "merge" else self.LORA.stop
        return sum(map(mul, self.coefficients[:n], self.features(w)))

    def _of_linear(self, N):
        return 1, N, *[N - k if N > k else 0 for k in self.KNOTS]

    def _of_attention(self, w):
        return w.context, w.again, w.decodes, w.pairs, w.reread, w.chunks

    def _of_lora(self, w):
        return w.adapted > 0, w.adapted, w.lora_read, w.lora_pairs

    def linear(self, N):
        return self._sum(self.LINEAR, self._of_linear(N))

    def attention(self, w):
        return self._sum(self.ATTENTION, self._of_attention(w))

    def others(self, w):
        return self._sum(self.OTHERS, (w.M,))

    def all_reduce(self, N):
        return self.config.n_layer * (self.ring[0] + self.ring[1] * N)

    def send(self, N):
        """N tokens' vectors to the next stage of a pipeline."""
        return self.link[0] + self.link[1] * N

    def lora(self, w, kind):
        return 0.0 if kind == "merge" else self._sum(self.LORA, self._of_lora(w))

    @property
    def peaks(self):
        """(FLOP/s, bytes/s) that gamma, seconds per token of a large batch, and delta, those of reading the weights, imply."""
        n, (delta, *gamma) = self.config.n_layer * self.n_weights, self.coefficients[self.LINEAR]
        return 2 * n / max(sum(gamma), 1e-30), n * self.dtype.itemsize / max(delta, 1e-30)

    def _sum(self, part, values):
        return sum(map(mul, self.coefficients[part], values))


class Kept(dict):
    """What was computed from prices, for the next ones who ask nearly the same: to choose must cost next to nothing."""

    def recall(self, numbers, exactly, make, steps=8):
        """make(), or what it gave before, if `exactly` was equal and each number in the same of so many steps to a power of two (8: less
        than a tenth apart)."""
        key = (*(round(steps * math.log2(1 + x)) for x in numbers), *exactly)
        if key not in self:
            if len(self) > 1000:
                self.clear()
            self[key] = make()
        return self[key]


class Learned(CostModel):
    """Another cost model, corrected by what iterations really took: its price, times two factors. One is for all iterations and follows
    the machine, by RATE of each one's news, so that a slow minute does not make what happens to run look dear. The other is for iterations
    like this, in three steps, so that what was never tried is corrected by what is like it: those of its kind, with a chunk or not, with
    adapters or not; of about so many tokens, where each power of two has a factor, and one reads between; and up to FEW_ROWS tokens of this
    very number, as kernels' times go up and down there. Each step is the mean of what the steps before left unexplained. It begins with
    as many iterations without error as WEIGHT says, so that what is rare is corrected in part, and what was seen counts for less and
    less: what looked dear once, and is no longer tried, gets another chance."""
    RATE = 0.05  # of each iteration's news, that the factor for all takes
    WEIGHT = 1, 4, 16
    ROUND, KEEP = 32, 0.95  # KEEP of what was seen still counts after a ROUND of iterations
    FIRST, EVERY = 256, 3  # it learns from each of so many iterations, and from every third of the others: to learn takes time, too

    def __init__(self, base):
        self.base, self.factor, self.n_asked, self.n_learned = base, 1.0, 0, 0
        self.error, self.system = base.error, base.system  # which every CostModel has
        self.cells = {}  # (step, (with a chunk, with adapters), tokens or their log2) -> sum of log2(seconds / price), and of how many

    def __getattr__(self, name):
        if name == "base":
            raise AttributeError(name)  # a copy that is being made has none yet
        return getattr(self.base, name)

    @property
    def version(self):
        return self.n_learned // self.ROUND

    def seconds(self, w, lora="batched"):
        return self.base.seconds(w, lora) * self._correction(w)

    def _operators(self, w, lora="batched"):
        factor = self._correction(w)
        return {name: seconds * factor for name, seconds in self.base._operators(w, lora).items()}

    def _correction(self, w):
        log = 0.0
        for cell, part in self._cells(w):
            log += part * self._log(cell)
        return self.factor * 2 ** log

    def _cells(self, w):
        """The cells that such an iteration lies in, with its share in them, step by step."""
        kind, x = (w.chunks > 0, w.adapted > 0), math.log2(max(1, w.N))
        size, share = int(x), x % 1
        cells = ((0, kind, 0), 1.0), ((1, kind, size), 1 - share), ((1, kind, size + 1), share), ((2, kind, w.N), 1.0)
        return cells if w.N <= FEW_ROWS else cells[:3]

    def _log(self, cell):
        total, seen = self.cells.get(cell, (0.0, 0.0))
        return total / (self.WEIGHT[cell[0]] + seen)

    def wants(self):
        self.n_asked += 1
        return self.n_asked <= self.FIRST or self.n_asked % self.EVERY == 0

    def learn(self, w, seconds, lora="batched"):
        factor = self._correction(w)
        news = math.log2(min(2.0, max(0.5, seconds / (self.base.seconds(w, lora) * factor))))  # whatever else the machine did counts little
        left = news + math.log2(factor / self.factor)
        for _, cells in groupby(self._cells(w), lambda entry: entry[0][0]):
            was = [(cell, part, self._log(cell)) for cell, part in cells]
            left -= sum(part * log for _, part, log in was)
            for cell, part, log in was:
                total, seen = self.cells.get(cell, (0.0, 0.0))
                self.cells[cell] = total + part * (left + log), seen + part
        self.n_learned += 1
        self.factor *= 2 ** (news * max(self.RATE, 0.5 / self.n_learned))
        if self.n_learned % self.ROUND == 0:
            self.cells = {cell: (self.KEEP * total, self.KEEP * seen) for cell, (total, seen) in self.cells.items()}


def designed_batches(L, weights=()):
    """Iterations that tell the terms of a cost model apart, as entries (n_past, n, rows of logits, weights of its adapter): decodes of
    many sizes and contexts, chunks with and without a past, verifications, mixtures, some of them with adapters of so many weights;
    none beyond a context of L."""
    decodes = lambda B, context, n=1: [(max(1, context * (2 * i + B) // (2 * B) - 1), n, n) for i in range(B)]  # contexts differ, as in a server
    batches = [decodes(B, context) for B in (1, 2, 4, 8, 16) for context in (min(8, 2 * L // 3), L // 4, 2 * L // 3)]
    sizes = [n for n in (12, 24, 48, 96, 160, 256, 384, 512) if n <= L]
    batches += [[(0, n, 0)] for n in sizes] + [[(L // 2, n, 1)] for n in sizes if n <= L // 2]  # chunks without and with a past,
    batches += [[(0, n, 1)] * 4 for n in (12, 24, 40, 64, 128, 300) if n <= L]  # whole prompts
    batches += [decodes(B, context, 1 + k) for B in (1, 4, 16) for k in (1, 3, 7)  # and verifications: what their rows read again is told
                for context in (L // 40, L // 4)]  # from what those of the head cost
    for B, context, past, n in ((1, L // 2, 0, 31), (3, L // 3, L // 4, 61), (3, L // 2, 0, 125), (7, L // 3, L // 2, 57),
                                (7, L // 2, 0, 249), (15, L // 4, L // 4, 113)):
        batches.append([*decodes(B, context), (past, n, 0)])
    adapted = [decodes(B, L // 4) for B in (1, 4, 16)] + [[(0, n, 1)] for n in (24, 160, 384)]
    adapted += [[*decodes(7, L // 3), (0, 120, 0)], *(decodes(4, L // 4, 1 + k) for k in (3, 7))]
    for first in range(len(weights)):  # the first entry's weights, the next ones' are those that follow
        batches += [[(*entry, weights[i % len(weights)]) for i, entry in enumerate(entries, first)] for entries in adapted]
    return [entries for entries in batches if all(past + n <= L for past, n, *_ in entries)]


def random_batches(L, n, weights=(), seed=0):
    """n mixtures that designed_batches does not hold, every other one with adapters of so many weights, if there are some; in a third
    the decodes have drafts."""
    rng, batches = random.Random(seed), []
    for i in range(n):
        adapter = lambda: rng.choice((0, *weights[:i % 2 * len(weights)]))
        rows = 1 + (i % 3 == 2) * rng.randint(0, min(N_SPEC, L // 4))
        batches.append([(rng.randrange(1, L - rows + 1), rows, rows, adapter()) for _ in range(rng.randint(0, 10))])
        for _ in range(rng.randint(0 if batches[-1] else 1, 2)):
            past = rng.choice((0, rng.randrange(L // 2)))
            batches[-1].append((past, rng.randint(min(9, L - past), min(L - past, 300)), rng.random() < 0.5, adapter()))
    return batches


def time_batches(model, batches, repeats, between):
    """(n,) the median seconds of each batch, in rounds after a warm-up."""
    pages = max(sum(with_room(past + n, model.config) for past, n, *_ in entries) for entries in batches)
    adapters = [*map(random_adapter, Fitted.RANKS)]
    engine = Engine(model, max_batch=256, n_page=pages + sum(make(model.config).n_page for make in adapters))
    engine.kv.normal_()
    for i, make in enumerate(adapters):
        engine.add_adapter(str(i), make)
    took = []
    for i, entries in enumerate(tqdm(batches * (1 + repeats), "profiling", delay=5, leave=False), 1):
        took.append(seconds_of(engine, rehearse(engine, entries)))
        if i % len(batches) == 0:
            between()
    return np.median(np.reshape(took, (1 + repeats, -1))[1:], 0)


def least_squares(A, b):
    """min |A x - b| with x >= 0: a cost is never negative. What would be is left out, the worst first."""
    keep = list(range(A.shape[1]))
    while True:
        x = np.zeros(A.shape[1])
        scale = np.maximum(np.abs(A[:, keep]).max(0), 1e-30)
        x[keep] = np.linalg.lstsq(A[:, keep] / scale, b, rcond=None)[0] / scale
        if not keep or x.min() >= 0:
            return x
        keep.remove(min(keep, key=lambda i: x[i] * np.abs(A[:, i]).max()))


def with_room(n, config):
    """Pages of a request of n tokens that still has some to generate, whole key tiles of them."""
    return round_up(n + n // 8 + 1, config.head_dim)


def rehearse(engine, entries):
    """The plan of an iteration that nobody asked for: a request of random tokens with its pages, for each (n_past, n, rows of logits it
    wants, and perhaps the weights of its adapter, one that the engine knows); where it wants several, the tokens after the first of
    them are drafts."""
    plan, names = [], {adapter.n_params: name for name, adapter in engine.adapters.known.items()}
    for past, n, wants, *weights in entries:
        prompt = np.random.default_rng(engine.n_added).integers(0, engine.model.config.vocab_size, past + n + 1 - wants)
        r = Request(prompt, max_new_tokens=max(1, wants), adapter=names[weights[0]] if any(weights) else None)
        engine.add(r)
        room = with_room(past + n, engine.model.config)
        if not engine.pool.hold(r.id, past + n, room):
            raise ValueError(f"a pool of {engine.pool.n_page} pages is too small for an iteration that needs {room} more")
        engine.adapters.hold(r.adapter)
        engine.adapters.use(r.adapter, 0)  # when its copy has arrived
        r.n_past = past
        plan.append((r, n))
    return plan


def seconds_of(engine, plan):
    """Run a rehearsed plan once and let go of it -> seconds"""
    start = time.perf_counter()
    engine._run(plan).wait()  # for the tokens on the host: nothing is left running
    took = time.perf_counter() - start
    for r, n in plan:
        engine.abort(r.id)
    return took


# ---------------------------------------------------------------- speculation: where drafts come from

PROPOSERS = {}  # name -> class
POLICIES = {}
N_SPEC = FEW_ROWS - 1  # the longest proposal a policy tries, V in [SmartSpec Alg. 2]: with it a decode still streams its context
PRIOR = 0.7  # acceptance before any was seen; weighs as much as one draft
FADE = 0.98  # of the evidence on acceptance, per iteration: a policy that no longer proposes forgets why, and tries again
SHAPES = [(), (1,), (1, 1), (1, 1, 1), (2, 1, 1), (2, 2, 1), (3, 2, 2)]  # of trees, what goodput tries: candidates of each head
T_DRAFT_FREE = 1e-5  # seconds per request to look drafts up: C in [SmartSpec §4.3]
MADE = lambda steps: 0.0  # seconds of drafts that are there; one object, as Goodput knows what it has decided by it


class Proposer(Named, named=False):
    """Where drafts come from. Subclass it and write `propose`; `free`: drafts cost so little that all are made before the policy
    says how many of them to verify."""
    registry, free = PROPOSERS, True
    threshold = 0.0  # the policy's: a request whose last draft had no more than this probability gets no further ones

    def most(self, n_tokens):
        """The longest proposal that can follow n_tokens known ones; the policy has its own limit."""
        return math.inf

    def propose(self, requests, lengths):
        """-> per request a list of up to lengths[i] tokens (lengths (B,)). Where drafts were drawn, r.q is what from."""
        raise NotImplementedError(f"{type(self).__name__} has no propose(self, requests, lengths)")

    def seconds(self, n, n_context, steps):
        """What `steps` drafts for each of n requests with n_context cached tokens in all will take [SmartSpec Eq. 5]."""
        return T_DRAFT_FREE * n

    def keep(self, requests, hidden):
        """The states (B, C) that gave these requests their next tokens."""

    def forget(self, r):
        """The request ended."""


class Ngram(Proposer):
    """Prompt lookup: what followed the last time that the newest tokens came in this order. The index grows with the text, so a
    proposal costs the same at any length; a match that reaches the end goes on repeating, as in LZ77."""
    sizes = (3, 2)  # tokens that must agree, longest first

    def __init__(self):
        self.seen = {}  # Request -> (how many tokens are indexed, {the tokens before a place: the last such place})

    def propose(self, requests, lengths):
        return [self._continue(r, int(k)) for r, k in zip(requests, lengths)]

    def _continue(self, r, k):
        start, index = self.seen.get(r, (min(self.sizes), {}))
        first = start - max(self.sizes)
        text = r.tokens[max(0, first):r.n_tokens].tolist()
        for i in range(start, r.n_tokens):  # index what stands in front of each new place; what follows the last token is not known
            at = i - max(0, first)
            for size in self.sizes:
                if at >= size:
                    index[tuple(text[at - size:at])] = i
        self.seen[r] = max(start, r.n_tokens), index
        places = (index.get(tuple(text[-size:])) for size in self.sizes if len(text) >= size)
        place, end = next((i for i in places if i), None), r.n_tokens
        if place is None:
            return []
        follows = r.tokens[place:min(end, place + k)].tolist()
        return [follows[i % len(follows)] for i in range(k)]

    def forget(self, r):
        self.seen.pop(r, None)


class DraftModel(Proposer, named=False):
    """A smaller model, as an engine of its own whose pages are the target's: where a token's K and V lie in one cache, they lie in
    the other [SmartSpec §6]. Its requests are copies that run ahead; their first forward also catches up on what was not fed yet."""
    free, cost = False, None  # cost: where a policy asks what drafts take; what they took corrects it

    def __init__(self, engine, model):
        self.pool, self.vocab_size, self.engine = engine.pool, engine.model.config.vocab_size, self._engine(engine, model)
        self.world = engine.world

    def _engine(self, engine, model):
        c = engine.config
        return Engine(model, n_page=engine.pool.n_page, max_batch=engine.max_batch, chunk=c.chunk, tile=c.tile, graph=c.graph)

    def most(self, n_tokens):
        return self.engine.model.config.block_size - n_tokens + 1  # the last draft itself is not fed

    def propose(self, requests, lengths):
        """One forward per step, for all requests that still want a draft [SmartSpec Eq. 5]."""
        ahead, sure = [self._ahead(r) for r in requests], np.ones(len(requests))
        usual = self.cost and self.cost.wants() and max(a.n_todo for a, k in zip(ahead, lengths) if k) <= FEW_ROWS  # no prompt is fed first
        start = self.engine.clock.now() if usual else 0.0
        self._share(requests)
        index = {r.id: i for i, r in enumerate(requests)}
        for step in range(max(lengths)):
            plan = [(a, a.n_todo) for a, s, k in zip(ahead, sure, lengths) if k > step and s > self.threshold]
            if not plan:
                break
            tokens, chances = self._step(plan)
            for (a, n), token, chance in zip(plan, tokens, chances):
                a.tokens[a.n_tokens], sure[index[a.id]] = token, chance
                a.n_tokens, a.n_past = a.n_tokens + 1, a.n_past + n
        for r, a in zip(requests, ahead):
            r.n_draft_past, r.q = a.n_past, torch.stack(a.q) if a.q else None
        drafts = [a.tokens[r.n_tokens:a.n_tokens].tolist() for r, a in zip(requests, ahead)]
        if usual:
            self._learn(requests, drafts, self.world.agree(self.engine.clock.now() - start))
        return drafts

    def forget(self, r):
        self.engine.pool.tables.pop(r.id, None)

    def _share(self, requests):
        """Their pages, as the draft's engine addresses them."""
        ours, theirs = self.engine.pool, self.pool
        ours.tables = {r.id: theirs.tables[r.id].for_heads(theirs.n_kv_head, ours.n_kv_head) for r in requests}

    def _ahead(self, r):
        """A copy of r as the draft model sees it; tokens it does not know become its last."""
        a, V = copy.copy(r), self.engine.model.config.vocab_size
        a.n_past, a.adapter, a.q = min(r.n_draft_past, r.n_past), None, []  # an iteration that failed leaves drafts cached
        a.tokens = r.tokens if V >= self.vocab_size else np.minimum(r.tokens, V - 1)
        return a

    def _step(self, plan):
        """-> the plan's next tokens, and how probable each was (1 where nobody asks)"""
        logits = self.engine._forward(plan)[:, :self.vocab_size]  # none that the target does not know
        tokens, drawn = logits.max(-1).indices, [i for i, (a, n) in enumerate(plan) if a.temperature > 0]
        if drawn:
            ask = [plan[i][0] for i in drawn]
            q = target_probs(logits[drawn], *self.engine._sampling(ask))
            tokens[drawn] = sample(q, torch.tensor([a.rng.random() for a in ask], dtype=torch.float64, device=q.device))
            for a, row in zip(ask, q):
                a.q.append(row)
        chances = logits.float().softmax(-1).gather(1, tokens[:, None])[:, 0].tolist() if self.threshold else [1.0] * len(plan)
        return self.world.agree((tokens.tolist(), chances))

    def seconds(self, n, n_context, steps):
        return steps * self.cost.seconds(self._work(n, n_context))

    def _learn(self, requests, drafts, seconds):
        """These took so long: every step its share, also of catching up."""
        past = [r.n_past for r, tokens in zip(requests, drafts) if tokens]
        self.cost.learn(self._work(len(past), sum(past)), seconds / max(map(len, drafts)))

    def _work(self, n, n_context):
        """One step of n requests."""
        return Work(N=n, M=n, decodes=n, context=n_context + n)


class SimulatedDraft(DraftModel, named=False):
    """A CostModel in the draft's place: its steps only move the clock. It is always sure."""

    def _engine(self, engine, model):
        return Simulator(model, clock=engine.clock, n_page=engine.pool.n_page)

    def _share(self, requests):
        pass

    def _step(self, plan):
        self.engine._forward(plan)
        return [0] * len(plan), [1.0] * len(plan)


class Tree(NamedTuple):
    """Drafts that are guesses for the same few places [SmartSpec §4.3]: behind every row of level h - 1 stand shape[h - 1] candidates
    for the next. Row 0 is the last known token, a level's rows lie side by side, and n = sum_h prod_{i <= h} k_i are drafts:

        shape 3, 2      0 ─┬─ 1 ─┬─ 4        row      0   1  2  3   4  5  6  7  8  9
                           │     └─ 5        parent  -1   0  0  0   1  1  2  2  3  3
                           ├─ 2 ─┬─ 6        level    0   1  1  1   2  2  2  2  2  2      its position, from row 0's on
                           │     └─ 7        rank         0  1  2   0  1  0  1  0  1      which candidate it is
                           └─ 3 ─┬─ 8
                                 └─ 9
    """
    shape: tuple
    parents: tuple  # (1 + n,)
    level: np.ndarray  # (1 + n,)
    rank: np.ndarray  # (1 + n,)

    @classmethod
    @lru_cache
    def of(cls, shape):
        parents, level, rank, before = [-1], [0], [0], [0]
        for h, k in enumerate(shape, 1):
            first = len(parents)
            parents += [row for row in before for _ in range(k)]
            level, rank, before = level + [h] * k * len(before), rank + [*range(k)] * len(before), range(first, len(parents))
        return cls(shape, tuple(parents), np.array(level), np.array(rank))

    @property
    def n(self):
        return len(self.parents) - 1

    @property
    def branches(self):
        return max(self.shape, default=1) > 1

    def walk(self, drafts, best):
        """drafts (n,); best (1 + n,): the token that follows each row -> the rows of drafts that greedy decoding agrees with."""
        path = [0]
        for row, (parent, token) in enumerate(zip(self.parents[1:], drafts), 1):
            if parent == path[-1] and token == best[parent]:
                path.append(row)
        return path[1:]

    def draw(self, alpha, rng):
        """As walk, where each candidate is accepted with probability alpha."""
        path = [0]
        for k in self.shape:
            rank = next((c for c in range(k) if rng.random() < alpha), None)
            if rank is None:
                break
            path.append(self.parents.index(path[-1]) + rank)
        return path[1:]

    def tally(self, path):
        """(2, levels) candidates of each head that were accepted and tried, in their order: none after the one accepted."""
        tally = np.zeros((2, len(self.shape)))
        tally[0, :len(path)], tally[1, :len(path)] = 1, self.rank[path] + 1
        if len(path) < len(self.shape):
            tally[1, len(path)] = self.shape[len(path)]
        return tally


def fitting(shape, most, chain=False):
    """The first levels of a shape, with no more than `most` drafts in all; chain: of each level only the first candidate."""
    shape = (1,) * len(shape) if chain else shape
    return shape[:int(np.searchsorted(np.cumsum(np.cumprod(shape)), most, "right"))]


class Medusa(Proposer, named=False):
    """Trees of guesses from Heads on the target's last state: head h's first few candidates stand behind every one of head h - 1.
    Without heads, for a Simulator, only their number counts."""

    def __init__(self, heads=None, model=None):
        self.heads, self.model, self.states = heads, model, {}  # Request -> the state (C,) that gave its last known token
        self.n_head = len(heads.blocks) if heads else math.inf
        self.took = 0.0  # seconds that the heads take to guess, a moving average

    def keep(self, requests, hidden):
        self.states.update(zip(requests, hidden))
        self.took *= FADE  # who was once too slow, perhaps only the first time, is asked again

    @torch.inference_mode()
    def propose(self, requests, trees):
        """A Tree for each request -> per request its drafts, row after row."""
        if self.heads is None:
            return [[0] * tree.n for tree in trees]
        start = time.perf_counter()
        guesses = self.heads(torch.stack([self.states[r] for r in requests]), self.model.head)  # (B, n_head, V)
        guesses = guesses.topk(max(max(tree.shape) for tree in trees), -1).indices.cpu().numpy()  # (B, n_head, k)
        drafts = [ranked[tree.level[1:] - 1, tree.rank[1:]].tolist() for ranked, tree in zip(guesses, trees)]
        drafts, took = self.model.world.agree((drafts, time.perf_counter() - start))
        self.took = 0.9 * self.took + 0.1 * took if self.took else took
        return drafts

    def seconds(self, n, n_context, steps):
        """All heads guess at once, however many are asked."""
        return self.took or super().seconds(n, n_context, steps)

    def knows(self, r):
        """Whether r's last known token is the target's own: a prompt of one token has none before it."""
        return self.heads is None or r in self.states

    def forget(self, r):
        self.states.pop(r, None)


# ---------------------------------------------------------------- speculation: how many drafts

class Decodes(NamedTuple):
    """What a policy may look at: the B requests of this iteration that feed one token and may have drafts after it."""
    requests: list
    most: np.ndarray  # (B,) how many each may have
    alpha: np.ndarray  # (B,) the share of each one's drafts that is accepted
    target: Callable = None  # number of drafts in all -> seconds of the target's iteration [SmartSpec Eq. 6]; if the policy is priced
    draft: Callable = None  # number of steps -> seconds of the draft's [Eq. 5]
    edges: range = range(0)  # numbers of drafts that end a tile


class Policy(Named, named=False):
    """How many drafts each decode gets. Subclass it and write `lengths`."""
    registry, n_spec = POLICIES, N_SPEC  # the longest proposal it may want
    priced = False  # whether it asks for seconds
    per_request = False  # whether alpha is each request's own
    threshold = 0.0  # drafts are made until one is less probable than this; above 0 it is asked only then how many to verify
    tree = None  # the one tree that it wants, which only heads can make
    shapes = ()  # the trees it chooses from, where heads make the drafts; none: it does not know trees

    def lengths(self, d):
        """Decodes -> (B,) ints, none above d.most"""
        raise NotImplementedError

    def shape(self, d, alpha, shapes):
        """As lengths, for heads: one of the shapes, for all; each request gets the levels that fit. alpha: (levels,) of each head."""
        return shapes[0]


class Off(Policy):
    """No drafts: nobody asks it how many."""
    n_spec = 0


class Fixed(Policy, named=False):
    """The same k for all requests and all steps: spec=3; or the same tree: spec="3,2,2"."""

    def __init__(self, *shape):
        self.n_spec = sum(accumulate((checked("spec", k, int, 1) for k in shape), lambda n, k: n * k))
        self.tree = shape if len(shape) > 1 else None
        if self.tree and self.n_spec >= CHUNK_ROWS:
            raise ValueError(f"spec = {','.join(map(str, self.tree))}: a tree of {self.n_spec} drafts, at most {CHUNK_ROWS - 1}")

    @property
    def shapes(self):
        return [self.tree or (1,) * min(self.n_spec, CHUNK_ROWS - 1)]

    def lengths(self, d):
        return np.minimum(self.n_spec, d.most)


def acceptance(tally, guess=PRIOR):
    """alpha, the share of drafts that are accepted, from how many were (tally[0]) of those that were tried (tally[1]); arrays too."""
    return (tally[0] + guess) / (tally[1] + 1)


def expected_tokens(alpha, k):
    """l(alpha, k): the tokens that k drafts and the one after them are worth [SmartSpec Eq. 8]."""
    alpha = np.asarray(alpha, float)
    return np.where(alpha < 1, (1 - alpha ** (np.asarray(k) + 1)) / np.maximum(1 - alpha, 1e-12), np.asarray(k) + 1.0)


def tree_tokens(alpha, shape):
    """The tokens that a tree of drafts and the one after the accepted path are worth [SmartSpec Eq. 10]; alpha: of each head. In the
    sum by levels reached: a level is, if the one before it was and one of its k candidates is accepted."""
    # differs from [SmartSpec Eq. 10]: as printed it lacks i = 0 (one token comes even if no draft is accepted), and a level fails with
    # 1 - alpha whatever its k; with k = 1 from the second level on, and that term, the two agree
    return 1.0 + np.cumprod(1 - (1 - np.asarray(alpha, float)[:len(shape)]) ** np.array(shape, int)).sum()


def best_drafts(d):
    """All drafts that Decodes may have, the best first -> (S,) i V + j - 1 for the j-th of request i, V the most that one may have, and
    (S,) the tokens that it is worth: alpha_i ** j."""
    j = np.arange(1, d.most.max() + 1)
    worth = np.where(j <= d.most[:, None], d.alpha[:, None] ** j, -1.0).ravel()  # (B * V,)
    order = np.argsort(-worth, kind="stable")[:d.most.sum()]
    return order, worth[order]


class Goodput(Policy):
    """One k for the requests of a step, the one with the most generated tokens per second [SmartSpec Alg. 1, Eq. 3-9]."""
    # differs from [SmartSpec Alg. 2]: which requests run is the scheduler's word, not the best prefix of the queue
    priced, kept = True, cached_property(lambda self: Kept())
    shapes = SHAPES

    def shape(self, d, alpha, shapes):
        alike = Counter((int(most), r.temperature > 0) for r, most in zip(d.requests, d.most))

        def goodput(shape):
            fit = [(fitting(shape, *key), count) for key, count in alike.items()]
            seconds = d.target(sum(Tree.of(s).n * count for s, count in fit)) + d.draft(len(shape))
            return sum(tree_tokens(alpha, s) * count for s, count in fit) / seconds
        return max(shapes, key=goodput)

    def lengths(self, d):
        alike = d.target, d.draft, np.sort(d.most).tobytes(), (32 * d.alpha).round().tobytes()  # acceptance has hardly moved
        return np.minimum(self.kept.recall((), alike, lambda: self._best(d)), d.most)

    def _best(self, d):
        """None is priced beyond a k that would lose even if it had the tokens of the most drafts: those take longer."""
        k, best, goodput = self.each(d), 0, 0.0
        tokens = self.tokens(d, k).tolist()
        for i, seconds in enumerate(self.seconds(d, k)):
            if tokens[i] > goodput * seconds:
                best, goodput = i, tokens[i] / seconds
            if tokens[-1] < goodput * seconds:
                break
        return best

    def each(self, d):
        """(V + 1, B) the lengths for every k"""
        return np.minimum(np.arange(d.most.max() + 1)[:, None], d.most)

    def tokens(self, d, k):
        return expected_tokens(d.alpha, k).sum(1)

    def seconds(self, d, k):
        """Of every row, when it is asked for."""
        return (d.target(n) + d.draft(steps) for n, steps in zip(k.sum(1).tolist(), k.max(1).tolist()))


class GoodputGlobal(Goodput):
    """One k for all requests and all steps: the best over all that has run so far [SmartSpec Fig. 4]."""
    shapes = ()

    def __init__(self):
        self.sums = np.zeros((2, N_SPEC + 1))  # tokens, seconds, as if k had always been 0, 1, ...

    def lengths(self, d):
        k = np.minimum(np.arange(N_SPEC + 1)[:, None], d.most)
        self.sums += self.tokens(d, k), [*self.seconds(d, k)]
        return k[np.argmax(self.sums[0] / self.sums[1])]


@lru_cache(maxsize=64)
def some_of(most, edges):
    """0 .. most in sixteen steps, with both sides of the edges in it, ascending."""
    return sorted({*range(0, most, cdiv(most, 16)), most, *(n for edge in edges for n in (edge, edge + 1) if n <= most)})


class GoodputRequest(Goodput):
    """Each request its own k [SmartSpec Fig. 4]. The j-th draft of request i is worth alpha_i ** j tokens, so for a number of drafts
    the best are those worth most; only that number and the number of draft steps are left to try."""
    per_request, shapes = True, ()

    def lengths(self, d):
        B, (order, worth) = len(d.most), best_drafts(d)
        if not len(order):
            return np.zeros(B, int)
        V = int(d.most.max())
        taken = order % V < np.arange(V + 1)[:, None]  # (V + 1, S): of the best drafts, those within so many steps
        n, tokens = taken.cumsum(1), (taken * worth).cumsum(1) + B
        seconds = self._target(d, len(order))[n] + np.array([d.draft(steps) for steps in range(V + 1)])[:, None]
        steps, last = np.unravel_index(np.argmax(tokens / seconds), n.shape)
        return np.bincount(order[:last + 1][taken[steps, :last + 1]] // V, minlength=B)

    def _target(self, d, most):
        """(most + 1,) d.target of every number of drafts, read off a curve through a few and both sides of every tile's end."""
        points = some_of(most, d.edges)
        return np.interp(np.arange(most + 1), points, [*map(d.target, points)])


class Confidence(Goodput):
    """Drafts are made for as long as the draft model is sure of the last one; goodput says how many to verify [SmartSpec Alg. 3]."""
    # differs from [SmartSpec Alg. 3]: with drawn drafts in the batch k stops where one more does not pay, although where costs step
    # a longer one may. How many were made depends on their values; whether a draft is verified must not depend on its own, or
    # accepted tokens are no longer distributed as the target's. Whether a j-th pays depends on how many have one, not on what it is
    threshold, shapes = 0.4, ()

    def lengths(self, d):
        if not any(r.temperature > 0 for r in d.requests):
            return super().lengths(d)
        k = self.each(d)
        goodput = self.tokens(d, k) / [*self.seconds(d, k)]
        return k[np.argmax(np.append(np.diff(goodput) <= 0, True))]


class Oracle(Goodput):
    """Knows how many drafts will be accepted [SmartSpec Fig. 14], which only a forced alpha can tell beforehand."""
    shapes = ()

    def lengths(self, d):
        return super().lengths(d._replace(most=np.minimum(d.most, [r.luck for r in d.requests])))

    def tokens(self, d, k):
        return (k + 1).sum(1)


# ---------------------------------------------------------------- speculation: drafts into the plan, and what came of them

def make_policy(spec, scheduler=None):
    """A Policy from a name, a number of drafts or a text of one, or the object itself; scheduler: the engine's, which may be both."""
    kind = POLICIES.get(spec) if isinstance(spec, str) else type(spec)
    if kind and issubclass(kind, Scheduler) and scheduler is not None:
        if not isinstance(scheduler, kind):
            raise ValueError(f"spec = {spec!r} needs scheduler = {spec!r}: it chooses chunks and drafts together")
        return scheduler
    if isinstance(spec, Policy):
        return spec
    if kind and isinstance(spec, str):
        return kind()
    if isinstance(spec, Integral) and not isinstance(spec, bool) or isinstance(spec, str) and re.fullmatch(r"\d+(,\d+)*", spec):
        return Fixed(*map(int, str(spec).split(",")))
    raise ValueError(f"spec = {spec!r}: one of {', '.join(POLICIES)}, a number of drafts, or candidates of each head as 3,2,2")


def make_proposer(draft, engine):
    """A Proposer from a name or a draft model (a CostModel in a Simulator), or the object itself."""
    if isinstance(draft, Proposer):
        return draft
    if isinstance(draft, str) and draft in PROPOSERS:
        return PROPOSERS[draft]()
    if isinstance(draft, Heads):
        if isinstance(engine, Simulator):
            raise ValueError("draft: a simulator has no states that Heads could guess from, give Medusa()")
        if draft.n_embd != engine.model.config.n_embd:
            raise ValueError(f"draft: heads for states of {draft.n_embd} numbers, the model's have {engine.model.config.n_embd}")
        return Medusa(draft, engine.model)
    if isinstance(draft, engine.model_type):
        return (SimulatedDraft if isinstance(engine, Simulator) else DraftModel)(engine, draft)
    name = draft if isinstance(draft, (str, int, type)) else type(draft).__name__
    raise ValueError(f"draft = {name!r}: one of {', '.join(PROPOSERS)}, or a {engine.model_type.__name__}, Heads or a Proposer object")


class Speculator:
    """Drafts for the decodes of one iteration: where from (proposer), how many (policy), and what came of them. Requests that were
    new when it rarely paid to propose stay without, and spare the draft model their prompt [SmartSpec §5]."""
    idle, MOST_IDLE = 0.0, 0.7  # of recent iterations the share in which no draft was wanted; beyond that new requests never speculate

    def __init__(self, engine, proposer, policy, cost=None):
        self.engine, self.proposer, self.policy = engine, proposer, policy
        self.tally = [0.0, 0.0]  # drafts accepted and tried of late, of all requests
        self.kept = Kept()  # prices of drafts
        self.n_drafted = self.n_accepted = 0
        self.shapes = self._shapes()
        self.longest = max((Tree.of(shape).n for shape in self.shapes), default=policy.n_spec)
        self.by_head = np.zeros((2, max(map(len, self.shapes), default=0)))  # the same of each head's candidates
        if policy.threshold and proposer.free:
            raise ValueError(f"{type(policy).__name__} asks how probable each draft was, {type(proposer).__name__} cannot say: take spec = 'goodput'")
        if isinstance(policy, Oracle) and not engine.config.alpha:
            raise ValueError("spec = 'oracle': what will be accepted is known beforehand only if alpha forces it")
        proposer.threshold = policy.threshold
        if policy.priced and isinstance(proposer, DraftModel):
            proposer.cost = engine._new_cost(proposer.engine.model, cost)

    @property
    def alpha(self):
        """The share of drafts that are accepted, a moving average over all requests [SmartSpec Alg. 1]."""
        return acceptance(self.tally)

    def _shapes(self):
        """The trees of the policy that the heads can make; none where drafts follow one another."""
        policy = self.policy
        if not isinstance(self.proposer, Medusa):
            if policy.tree:
                raise ValueError(f"spec = {','.join(map(str, policy.tree))}: a tree of drafts needs Heads for a draft (--draft heads)")
            return []
        shapes = [s for s in policy.shapes if len(s) <= self.proposer.n_head]
        if not any(shapes):
            raise ValueError(f"{type(policy).__name__} has no tree for {self.proposer.n_head} heads: spec = goodput, a number of drafts, or "
                             "candidates of each head as 3,2,2")
        return shapes

    def widen(self, plan):
        """The plan with drafts after its decodes: each request's are in its tokens, and in n. They take no page that a running
        request's next token needs, and stay within what the scheduler's budget has left, shared evenly."""
        for r, n in plan:
            r.tree, r.path, r.q = None, [], None  # those of the last iteration, also of one that failed
        decodes = [i for i, (r, n) in enumerate(plan) if n == r.n_todo == 1]
        if not decodes:
            return plan
        requests = [plan[i][0] for i in decodes]
        self._draw(requests)
        drafts = self._propose(requests, self._decodes_of(plan, requests))
        for i, r, tokens in zip(decodes, requests, drafts):
            r.tokens[r.n_tokens:r.n_tokens + len(tokens)] = tokens
            plan[i] = (r, 1 + len(tokens))
        return plan

    def _draw(self, requests):
        """Where acceptance is forced: how many of each one's drafts it will be. A place has the same luck whatever k, so that numbers
        of drafts can be compared: no place is tried twice."""
        forced = self.engine.config.alpha
        for r in requests if forced else ():
            if r.passes is None:
                r.passes = np.append(r.rng.random(r.max_len) < forced, False)
            r.luck = int(r.passes[r.n_tokens:].argmin())

    def _propose(self, requests, d):
        """-> a list of drafts per request"""
        if self.shapes:
            return self._plant(requests, d)
        proposer, policy = self.proposer, self.policy
        late = proposer.free or policy.threshold  # drafts are made, and then it is said how many of them are verified
        wanted = d.most if late else np.minimum(policy.lengths(d), d.most)
        if not proposer.free:
            self.idle = FADE * self.idle + (1 - FADE) * (not wanted.any())
            for r in requests:  # asked once, before its first draft: without one the draft model's work on the prompt would be lost
                r.speculates = self.idle <= self.MOST_IDLE if r.speculates is None else r.speculates
            wanted = [self.engine._lookahead(r, int(k)) if k and r.speculates else 0 for r, k in zip(requests, wanted)]
        drafts = self._proposed(requests, wanted) if any(wanted) else [[]] * len(requests)
        if late:
            made = d._replace(most=np.array([len(tokens) for tokens in drafts]), draft=MADE)
            wanted = [self.engine._lookahead(r, int(k)) for r, k in zip(requests, np.minimum(policy.lengths(made), made.most))]
            drafts = [tokens[:k] for tokens, k in zip(drafts, wanted)]
        return drafts

    def _proposed(self, requests, wanted):
        """The proposer's drafts, whoever wrote it; ValueError for what are none."""
        drafts, who = self.proposer.propose(requests, wanted), type(self.proposer).__name__
        if not isinstance(drafts, list) or len(drafts) != len(requests):
            raise ValueError(f"{who}: {drafts!r:.60}: must be a list with a list of drafts for each request, here {len(requests)}")
        V = self.engine.model.config.vocab_size
        for r, k, tokens in zip(requests, wanted, drafts):
            if not (isinstance(tokens, list) and len(tokens) <= k and all(issubclass(t, Integral) for t in {*map(type, tokens)})
                    and min(tokens, default=0) >= 0 and max(tokens, default=0) < V):
                raise ValueError(f"{who}: {tokens!r:.60} for request {r.id}: must be a list of up to {k} drafts in 0 .. {V - 1}")
        return drafts

    def _plant(self, requests, d):
        """As _propose, in trees. A sampled request has the first candidates only: they are a chain, and the lossless rule knows chains."""
        shape, forced = self.policy.shape(d, acceptance(self.by_head), self.shapes), self.engine.config.alpha
        if shape not in self.shapes:
            raise ValueError(f"{type(self.policy).__name__}: {shape!r:.60}: must be one of the trees that it was given, {self.shapes}")
        for r, most in zip(requests, d.most):
            fits = fitting(shape, most, r.temperature > 0)
            fits = fitting(fits, self.engine._lookahead(r, Tree.of(fits).n))
            r.tree = Tree.of(fits) if fits and self.proposer.knows(r) else None
            if r.tree and forced:
                r.path = r.tree.draw(forced, r.rng)
                r.luck = len(r.path)
        grown = [r for r in requests if r.tree]
        drafts = iter(self.proposer.propose(grown, [r.tree for r in grown]) if grown else [])
        return [next(drafts) if r.tree else [] for r in requests]

    def _decodes_of(self, plan, requests):
        """What the policy gets to see."""
        share, limit = int(min(self.longest, max(0, self.engine.scheduler.room(plan)) / len(requests))), self.proposer.most
        most = np.array([max(0, min(share, len(r.tokens) - 1 - r.n_tokens, limit(r.n_tokens))) for r in requests])
        alpha = np.full(len(requests), self.alpha)
        if self.policy.per_request:
            alpha = acceptance(np.array([r.tally for r in requests]).T, alpha)
        return Decodes(requests, most, alpha, *(self._prices(plan, requests, most.sum()) if self.policy.priced else ()))

    def _prices(self, plan, requests, n_most):
        """target, draft, edges of Decodes."""
        cost, known, N, cached = self.engine.cost, self.engine.adapters.known, sum(n for r, n in plan), sum(r.n_past for r in requests)
        weights = [known[r.adapter].n_params for r in requests if r.adapter is not None]
        alike = len(requests), N, len(weights), cost, cost.version
        prices = self.kept.recall((cached, sum(weights)), alike, lambda: [*map(lru_cache, self._price(plan, requests, cached))], steps=4)
        return *prices, range(-N % cost.tile, n_most, cost.tile) if cost.tile > 1 else range(0)

    def _price(self, plan, requests, cached):
        """target: seconds of this iteration with n drafts, minus what the chunk adds to it when nobody drafts: its own time must not hide
        what drafts gain, and yet they cost what they cost in a batch that it has filled. draft: seconds of so many steps."""
        # differs from [SmartSpec Eq. 3]: which divides by the time of the whole batch, that of chunks in it, too
        cost, B = self.engine.cost, len(requests)
        seconds = partial(cost.seconds, lora=self.engine.config.lora)
        w = Work.of(self.engine._entries(plan), cost.tile)
        alone = Work.of(self.engine._entries([(r, 1) for r in requests]), cost.tile) if w.N > B else w
        chunk = seconds(w) - seconds(alone)

        def target(n):
            more = dict(N=w.N + n, M=w.M + n, context=w.context + n, again=w.again + n * (1 + (cached + n) / B),
                        lora_pairs=w.lora_pairs + n * alone.lora_read / B)
            if n > N_SPEC * B:  # trees: too many rows to stream the context past them, each is a chunk to the hardware
                pairs = w.pairs + round_up(1 + n / B, cost.tile) * (cached + (B + n) / 2)
                more |= dict(context=w.context - cached - B, again=w.again, decodes=w.decodes - B, chunks=w.chunks + B, pairs=pairs,
                             reread=w.reread + cached + B + n, lora_read=w.lora_read - alone.lora_read,
                             lora_pairs=w.lora_pairs + (1 + n / B) * alone.lora_read)
            return seconds(w._replace(**more)) - chunk
        return target, lambda steps: self.proposer.seconds(B, cached, steps) if steps else 0.0

    def observe(self, verified):
        """verified: (request, drafts, how many of them were accepted) of one iteration. A rejected draft ends a run, what stands
        after it was not tried."""
        self.by_head, (all_accepted, all_tried) = FADE * self.by_head, self.tally
        all_accepted, all_tried = FADE * all_accepted, FADE * all_tried
        for r, k, accepted in verified:
            if r.tree:
                self.by_head[:, :len(r.tree.shape)] += r.tree.tally(r.path if r.tree.branches else [*range(1, accepted + 1)])
            tried = min(accepted + 1, k)
            all_accepted, all_tried = all_accepted + accepted, all_tried + tried
            r.tally = FADE * r.tally[0] + accepted, FADE * r.tally[1] + tried
            r.n_drafted, r.n_accepted = r.n_drafted + k, r.n_accepted + accepted
            self.n_drafted, self.n_accepted = self.n_drafted + k, self.n_accepted + accepted
        self.tally = [all_accepted, all_tried]


# ---------------------------------------------------------------- autopilot: chunks and drafts by one price

class Loop(NamedTuple):
    """The load as autopilot sees it: S requests all alike, each of which comes again when it ends. Its numbers are averages of the real ones."""
    S: int  # requests
    n: int  # with those that wait for a slot
    P: float  # tokens of a prompt
    D: float  # tokens that it generates after the first one, which its prefill brings
    past: float = 0.0  # tokens that a token of a prompt finds cached
    context: float = 0.0  # and that a decode finds
    adapted: float = 0.0  # the share of requests that have an adapter
    weights: float = 0.0  # of an adapter

    @classmethod
    def of(cls, requests, n, known):
        """requests: those with a slot or for whom there is one, of n; known: {adapter's name: Adapter}. The first token is the prefill's,
        but for a hundredth: D is never 0."""
        S, P, D = len(requests), [len(r.prompt) for r in requests], [r.max_new_tokens - 0.99 for r in requests]
        users, fed, generated = [known[r.adapter].n_params for r in requests if r.adapter is not None], sum(P), sum(D)
        return cls(S, n, fed / S, generated / S, sum(map(mul, P, P)) / 2 / fed, sum(d * (p + d / 2) for p, d in zip(P, D)) / generated,
                   len(users) / S, sum(users) / max(1, len(users)))

    def work(self, c, d, k, tile):
        """An iteration that feeds c tokens of prompts, in whole tiles of rows, and d decodes with k drafts each."""
        n, chunks, read, context = d * (1 + k), int(c > 0), self.adapted * self.weights, d * (self.context + 1 + k)
        return Work(N=c + n, M=n + chunks, decodes=d, context=context, again=k * context, chunks=chunks,
                    pairs=round_up(c, tile) * (self.past + c / 2), reread=chunks * (self.past + c),
                    adapted=math.ceil(self.adapted * (d + chunks)), lora_read=d * read, lora_pairs=(c + d * k) * read)

    def flow(self, total, k, tokens):
        """total: tokens that an iteration may feed; tokens: what k drafts and the one after them are worth -> per iteration how many
        requests end, those of its tokens that are prefill, the decodes that run with it, the share of iterations that have a prefill
        at all, and how many a request takes; None if decodes alone are more. See Autopilot."""
        most = (total - 1) // (1 + k)
        d = min(self.S, most)
        for _ in range(3):  # fewer decodes leave room for more prefill, and that for more decodes
            c = min(total - d * (1 + k), self.P * max(1, self.S - d))
            n = self.P / c + (self.S == 1 and c < self.P) / 2  # nobody else fills the last chunk of a prompt that is alone
            x = min(1 / n, self.S / (max(1, n) + self.D / tokens))
            share = min(1.0, x * n)
            d = min(max(0, round(self.S - (self.S - x * self.D / tokens) / share)), most)
        return (x, c, d, share, max(1, n) + self.D / tokens) if most else None


class Autopilot(SarathiServe, Policy):
    """Prefill tokens, decodes and drafts, chosen together for every iteration: Sarathi-Serve, whose budget follows from the requests
    that are there [SARATHI §6: which chunk, if P:D is unknown], and so does the number of drafts [SmartSpec §4: which k, at which load].

    Take the S requests that have a slot as a closed loop: each feeds a prompt of P tokens, generates D, and comes again. With c tokens
    of prefill in an iteration and k drafts after each decode, worth l tokens with the one that comes anyway, a request spends P / c
    iterations in its prefill and D / l in decodes. So of an iteration, on average,

        x = min(c / P, S / (P / c + D / l))     requests end: the prefills or the slots are the bottleneck
        d = x D / l                             requests decode,
        T = x P / c t(c + d (1 + k)) + (1 - x P / c) t(d (1 + k))     seconds pass, t by the prices: it has a chunk, or there was none

    and who comes now, behind n others, has its last token after T (n / x + P / c + D / l): the queue's time and its own. The (c, k) with
    the least is best at any load: alone it is one's own latency that counts, in a long queue the throughput x / T. A prefill token and
    a draft thus have one currency, the t of their iteration. With a target the best that keeps every running request to its pace is
    taken: a request that is ahead of it lends its time to the prefills of others, one that is behind may catch up later, and one that
    cannot any more holds up nobody. No stall lasts longer than asked for, or than one tile. D is max_new_tokens: where a stop token
    ends most requests early, it is too long."""
    registry, priced, per_request = POLICIES, True, True

    def start(self, engine):
        self.engine, self.kept = engine, Kept()

    def plan(self, running, waiting):
        requests = [*running, *self.new(running, waiting)]
        if not requests:
            return []
        decodes = [r for r in running if r.n_todo == 1]
        alpha = self._alpha()
        self.worth = [*accumulate(alpha ** k for k in range(self.n_spec + 1))]  # tokens, of so many drafts: expected_tokens
        self.drafting = self._is_policy and lru_cache(maxsize=None)(self.engine.speculator.proposer.seconds)  # prices of this plan
        self.total, self.k = self._choose(requests, decodes, len(running) + len(waiting))
        self.chunk = self.total - self.k * len(decodes)
        return super().plan(running, waiting)

    def room(self, plan):
        return self.total - sum(n for r, n in plan) if self._is_policy else math.inf

    def lengths(self, d):
        """So many drafts in all, the best of those that were found: requests differ. A model makes one for each of them in a step: k for all."""
        if not self.engine.speculator.proposer.free:
            return np.minimum(self.k, d.most)
        return np.bincount(best_drafts(d)[0][:self.k * len(d.most)] // max(1, d.most.max()), minlength=len(d.most))

    def _choose(self, requests, decodes, n):
        """-> tokens of this iteration, and drafts of each decode"""
        loop, d = Loop.of(requests, n, self.engine.adapters.known), len(decodes)
        feed = [r for r in requests if r.n_todo > 1 or r.state == "waiting"]
        now = loop._replace(context=sum(r.n_past for r in decodes) / max(1, d), past=feed[0].n_past if feed else 0.0)
        todo = sum(r.n_todo for r in feed)
        alone = lambda: [self.worth[k] / self._seconds(now, 0, d, k) for k in self._ks()]  # tokens per second of each, if no prompt is fed
        keep = lambda *what: partial(self.kept.recall, (*what, self.worth[-1]), (self.engine.cost, self.engine.cost.version))
        rates = keep(d, now.context, now.adapted, now.weights)(alone) if d else [math.inf]
        least = self._seconds(now, min(max(16, self.engine.cost.tile), todo), d, 0) if feed else 0.0
        pace = self._pace(decodes, least, 1 / max(rates))
        flows = keep(*loop._replace(n=0, past=0, context=0))(lambda: self._flows(loop), steps=3) if feed else []  # P and D say what is cached
        for total, k, mean in self._rank(loop, flows):
            c = min(total - d * (1 + k), todo)
            if c > 0 and self._seconds(now, c, d, k) <= pace(k, mean):
                return total, k
        k = int(np.argmax(rates))  # nothing to feed, or no prefill that keeps the pace: decodes alone
        return d * (1 + k) or 1, k

    def _pace(self, decodes, least, soonest):
        """-> a function (k, T): seconds that the next iteration may take, with k drafts, if those after it take T on average. Two bounds:
        --stall, or `least`, what one tile takes, if that is more; and every request's last token: at --tpot per token from the first one on
        it must be in time 19 times in 20, whatever luck its drafts have (1.64 deviations). The more are to come, the more may be hoped
        for; who is late may catch up, if T allows it; and who would be late even at `soonest`, the least seconds per token, is left out."""
        c, now = self.engine.config, self.engine.clock.now()
        known = [(r.times[0] + c.tpot * (r.max_new_tokens - 1), r.max_len - r.n_tokens) for r in decodes if r.times]
        stall = max(c.stall, least) if c.stall and known else math.inf
        end, left = np.array([(end, left) for end, left in known if c.tpot and now + left * soonest <= end]).reshape(-1, 2).T

        @lru_cache
        def likely(k):  # tokens of the next iteration, of each request
            mean, j = self.worth[k], np.arange(1, k + 1)
            deviation = math.sqrt(max(0.0, (2 * j - 1) @ self._alpha() ** j - (mean - 1) ** 2))
            return np.maximum(1, mean - 1.64 * deviation * np.sqrt(mean / left))

        def seconds(k, T):
            later = min(c.tpot, T / self.worth[k]) * np.maximum(0, left - likely(k))  # what those after them will take
            return min(stall, (end - later).min(initial=math.inf) - now)
        return seconds

    @staticmethod
    def _rank(loop, flows):
        """[(tokens of an iteration, drafts of a decode, mean seconds)], the best first."""
        return [flow[:3] for latency, _, flow in sorted((T * (loop.n / x + steps), -total, (total, k, T)) for total, k, T, x, steps in flows)]

    def _flows(self, loop):
        """[(tokens of an iteration, drafts of a decode, mean seconds, requests that end with it, iterations that each takes)], up to
        the k that is best for a decode alone: in company drafts only cost more."""
        flows = []
        for k in range(1 + max(self._ks(), key=lambda k: self.worth[k] / self._seconds(loop, 0, 1, k))):
            l, T0 = self.worth[k], self._seconds(loop, 0, loop.S, k)
            for total in SIZES[:2 + bisect.bisect(SIZES, loop.S * (loop.P + 1 + k))]:  # what is larger feeds all that there is, too
                flow = loop.flow(total, k, l)
                if flow:
                    x, c, d, share, steps = flow
                    flows.append((total, k, share * self._seconds(loop, c, d, k) + (1 - share) * T0, x, steps))
        return flows

    @property
    def _is_policy(self):
        """Whether the number of drafts is ours to choose."""
        return self.engine.speculator is not None and self.engine.speculator.policy is self

    def _ks(self):
        """Numbers of drafts to choose from."""
        return range(self.n_spec + 1) if self._is_policy else (0,)

    def _alpha(self):
        return self.engine.speculator.alpha if self.engine.speculator else 0.0

    def _seconds(self, loop, c, d, k):
        drafting = self.drafting(d, d * loop.context, k) if k else 0.0
        return self.engine.cost.seconds(loop.work(c, d, k, self.engine.cost.tile), self.engine.config.lora) + drafting


SCHEDULERS["autopilot"] = Autopilot
SIZES = sorted({n for j in range(4, 14) for n in (2**j, 3 * 2**j // 2)})  # tokens of an iteration that autopilot tries


# ---------------------------------------------------------------- the engine

class WallClock:
    """Seconds since it was made. It waits for no more than a tenth of a second at a time: somebody may have pressed Ctrl-C."""

    def __init__(self):
        self.start = time.perf_counter()

    def now(self):
        return time.perf_counter() - self.start

    def wait_until(self, t):
        time.sleep(min(0.1, max(0.0, t - self.now())))


class VirtualClock:
    """Seconds that pass only when somebody says so."""

    def __init__(self):
        self.t = 0.0

    def now(self):
        return self.t

    def wait_until(self, t):
        self.t = max(self.t, t)


def make_clock(world):
    """A clock that all ranks of a world read alike."""
    return SharedClock(world) if world.size > 1 else WallClock()


class Span(NamedTuple):
    """What an engine (or a stage of a Pipeline) did from start to end, seconds: entries (request id, n_past, n). A request that
    gave up its pages is an entry that feeds no token, in a span that takes no time."""
    start: float
    end: float
    stage: int
    lane: int
    entries: list


class Flight(NamedTuple):
    """An iteration that was started and has not ended. If the next one starts before, only the device knows a request's newest token: until
    _commit writes it, its place in `tokens` holds ~i, which stands for newest[i] there (Batch.known). A request that needs no more
    is "landing": its pages are free, its last token is on the way."""
    ready: list  # its requests that get tokens, as `asking` says
    wait: Callable  # waits for its end -> the new tokens of each of them
    newest: torch.Tensor | None = None  # (B,) the same on the device, where nobody has drafts


class Engine:
    """Serve requests with one model. Options are EngineConfig's fields; scheduler may also be a Scheduler of your own. Give
    record=[] to keep a Span of every iteration and every preemption.

    draft: where drafts come from: a name in PROPOSERS, a smaller GPT, Heads, a Proposer; spec: how many: a number, a name in POLICIES,
    a Policy ("off": the draft is left aside, unread); cost: the CostModel that prices them, or two, the target's and the draft's
    (None: profiled if the policy asks)."""

    model_type, number = GPT, 0  # what it serves; the number of the lane, in a Pipeline
    ahead = 0  # iterations that may still be in flight when the next one is planned,
    behind = 0  # and when a step returns: both are 1 where a GPU's iterations overlap, in a Lane the second alone

    def __init__(self, model, draft=None, spec="off", cost=None, clock=None, record=None, **options):
        known = [f.name for f in fields(EngineConfig)]
        for name in set(options) - set(known):
            raise ValueError(f"unknown option {name!r}: one of {', '.join(known)}")
        if not isinstance(model, self.model_type):
            raise ValueError(f"model = {model!r}: must be a {self.model_type.__name__}")
        self.model, self.config = model, EngineConfig(**options)
        c = self.config
        self.scheduler = make_scheduler(c.scheduler, chunk=c.chunk, tile=c.tile)
        policy = make_policy(spec, self.scheduler)
        self.world = model.world
        if self.world.pp > 1 and not isinstance(self, Lane):
            raise ValueError(f"the model is one of pp = {self.world.pp} stages: give it to a Pipeline, or to make_engine")
        if draft is None and policy.n_spec:
            raise ValueError(f"spec = {spec!r} without a draft: give draft = {' or '.join(map(repr, PROPOSERS))}, or a model")
        draft = draft if policy.n_spec else None
        tiled = isinstance(model, GPT) and not on_gpu(model.device) and c.alloc == "reserve"
        self.key_tile = model.config.head_dim if tiled else 1  # pages of a key tile, see Table.key_tile
        n_page, self.max_batch = self._size(draft)
        fill_in(self.scheduler, max_batch=self.max_batch)
        if self.world.tp > 1 and self.config.lora == "bmm":
            raise ValueError("lora = 'bmm' is for one device, to compare with: with tp it is 'batched' or 'merge'")
        self.clock, self.record = clock or make_clock(self.world), record
        self.order = self._new_order()
        checked("adapter_pages", c.adapter_pages, int, 0, n_page - 1)
        self.pool = PagePool(n_page - c.adapter_pages, model.config.n_kv_head, c.alloc)
        own = PagePool(c.adapter_pages, model.config.n_kv_head, c.alloc, first=self.pool.n_page)  # no-unify [S-LoRA §7.1]
        costs = cost if isinstance(cost, tuple) else (cost, None)
        if len(costs) != 2:
            raise ValueError(f"cost: {len(costs)} cost models, must be one, or two of them: the target's and the draft's")
        self.speculator = None if draft is None else Speculator(self, make_proposer(draft, self), policy, costs[1])
        self.cost = self._new_cost(model, costs[0]) if policy.priced or self.scheduler.priced else None  # a profile needs memory, too
        self.kv = self._new_cache(n_page)
        self.graphs = self._new_graphs()
        self.adapters = (Merging if c.lora == "merge" else AdapterStore)(own if c.adapter_pages else self.pool, self._new_copier())
        self.merged = None, model  # (adapter, the model that has it in its weights)
        self.requests = {}  # id -> Request, from add until it ends
        self.pending = []  # a heap of (arrival, id): not arrived yet
        self.waiting = Queue()  # arrived, without pages
        self.running = []  # with pages, oldest first
        self.news = []  # Events to be told by the next step
        self.n_ended = Counter()  # one of ENDS -> requests
        self.n_added = self.n_steps = 0
        self.flights, self.landed = deque(), 0.0  # Flights, oldest first; when the last one landed, where somebody asks
        if self.graphs and not self.speculator:  # drafts continue tokens that must be known first
            self.ahead = self.behind = 1
        self.scheduler.start(self)

    @property
    def lanes(self):
        """Who takes requests from the same queue: in a Pipeline there are several."""
        return [self]

    def _size(self, draft):
        """-> (pages of the cache, most requests at once), as far as the options leave it open by what memory there is."""
        c, model, longest = self.config, self.model, round_up(self.model.config.block_size, self.key_tile)
        page, (free, share) = model.config.page_bytes(model.dtype.itemsize), self._memory(draft)
        if isinstance(draft, (GPT, CostModel)):
            page += draft.config.page_bytes(draft.dtype.itemsize)  # a draft model's cache has as many pages [SmartSpec §6]
        affordable = int(c.memory_gb * 1e9 or share * free) // page  # (M_G - M_S) / m_kv
        n_page = c.n_page or min(affordable, (c.max_batch or affordable) * longest)
        if not 1 <= n_page <= free // page:
            raise ValueError(f"n_page = {c.n_page}, memory_gb = {c.memory_gb:g}: a pool of {n_page} pages of {page} bytes, "
                             f"must have 1 .. {free // page} pages in the {free / 1e9:.1f} GB there are")
        return n_page, c.max_batch or min(256, max(1, n_page // longest))  # B = floor((M_G - M_S) / (L * m_kv)) [SARATHI §4.3.1]

    def _new_cost(self, model, cost):
        """What a model's iterations cost (None: by a profile); what is measured corrects it, for all engines that are given the same
        Learned."""
        if cost is None:
            print(f"profiling a model of {model.config.n_params / 1e6:.1f}M parameters, for the price of its iterations (up to half a minute)",
                  file=sys.stderr)
            cost = CostModel.profile(model)
        if not isinstance(cost, CostModel):
            raise ValueError(f"cost = {cost!r}: must be a CostModel, or two of them: the target's and the draft's")
        known = self.world.agree(cost)
        if not isinstance(cost, Learned):
            return Learned(known)
        vars(cost).update(vars(known))  # rank 0's, but the same object for all who were given it, here as there
        return cost

    def _memory(self, draft):
        """(bytes, the share of them that the pool takes by default): of the rank that has least, so that all pools are alike."""
        free, share = free_memory(self.model.device)
        return min(self.world.each(free)), share if self.model.device.type == "cuda" else share / self.world.size  # one RAM for all

    def _new_cache(self, n_page):
        if self.model.config.head_dim > 128 and on_gpu(self.model.device):
            raise ValueError(f"head_dim = {self.model.config.head_dim}: the Triton kernels' tiles hold at most 128")
        return self.model.new_cache(n_page + on_gpu(self.model.device))  # a page that rows of nobody are written to

    def _new_graphs(self):
        """Iterations as recordings, where Triton's kernels do all of it and one device has the model; None elsewhere."""
        c = self.config
        if not c.graph or not on_gpu(self.model.device) or self.world.size > 1 or c.lora == "bmm":
            return None
        chunk, B = min(c.chunk, self.model.config.block_size), min(self.max_batch, 512)  # a million means all, and recordings take memory
        graphs = Graphs(self.model, self.kv, c.tile, round_up(chunk + FEW_ROWS * B, c.tile))
        if self.kv.is_cuda:
            graphs.prepare(chunk, B)
        return graphs

    def _new_copier(self):
        return Copier(self.kv, self.pool.n_kv_head)

    def _new_order(self):
        """The queue's order, as the options say: each rearranges the one before; None: first come first served."""
        c = self.config
        order = c.order if isinstance(c.order, Order) else LastCome() if c.order == "lcfs" else None
        if c.slo:
            order = EarlyAbort(order, c.slo)
        if c.cluster:
            order = Cluster(order, c.cluster)
        if c.fair:
            order = Fair(order, c.fair)
        return OneAdapter(order) if c.lora == "merge" else order

    # ------------------------------------------------------------ requests in and out

    def add(self, request):
        """Queue a request -> its id. ValueError or KeyError, naming the value, for one that could never run."""
        request.tokens = self._validated(request)
        request.arrival = self.clock.now() if request.arrival is None else float(request.arrival)
        request.n_tokens, request.id, request.state = len(request.prompt), self.n_added, "pending"
        request.prompt, request.stop = request.tokens[:request.n_tokens].tolist(), tuple(request.stop)  # our own: the caller's lists may change
        seed = [self.config.seed, request.id] if request.seed is None else request.seed
        request.rng = np.random.default_rng(seed)
        self.n_added += 1
        self.requests[request.id] = request
        heapq.heappush(self.pending, (request.arrival, request.id))
        return request.id

    def add_adapter(self, name, source):
        """Let requests ask for adapter `name`. source: a PEFT folder, or random_adapter(rank). ValueError, KeyError or
        FileNotFoundError for one that does not fit the model or the pool; then nothing is kept of it."""
        if not isinstance(name, str) or name in self.adapters.known:
            raise ValueError(f"adapter {name!r}: must be a new name, {'this one is taken' if isinstance(name, str) else 'a string'}")
        adapter, most = self._load(source), self.adapters.pool.n_page
        if adapter.n_page > most and self.config.lora != "merge":
            raise ValueError(f"adapter {name!r} takes {adapter.n_page} pages: there are {most}")
        self.adapters.known[name] = adapter

    def _load(self, source):
        if not (callable(source) or isinstance(source, (str, os.PathLike))):
            raise ValueError(f"adapter {source!r}: must be a PEFT folder or random_adapter(rank)")
        if self.world.tp > 1 and self.config.lora != "merge" and self.model.device.type == "cuda" and not on_gpu(self.model.device):
            raise ValueError("adapters on GPUs with tp > 1 need Triton, which is not installed, or lora = 'merge'")
        make = source if callable(source) else partial(Adapter.from_pretrained, source)
        return make(self.model.config, dtype=self.model.dtype, pin=self.model.device.type == "cuda")

    def abort(self, request_id):
        """End a request now, wherever it is; its pages are free at once. KeyError for what is no id of a request in the engine."""
        r = self._known(request_id)
        self._end(r, "abort")
        self._let_go([r])
        self._land(self.behind)

    def _known(self, request_id):
        """The request of this id; KeyError if there is none in the engine."""
        if not isinstance(request_id, Integral) or request_id not in self.requests:
            raise KeyError(f"no request {request_id!r:.60} in the engine: must be what add returned, of a request that has not ended")
        return self.requests[request_id]

    def generate(self, prompts, max_new_tokens=32, adapter=None, seed=None, **sampling):
        """prompts: lists of token ids -> lists of new token ids, in order. sampling: temperature, top_k, top_p, stop.
        adapter: one name for all or one per prompt; seed: prompt i draws with seed + i. A request that is refused or given up
        (max_waiting, slo) has what it got. If it is ended by an error or by Ctrl-C (after the iteration under way), so are they."""
        if isinstance(prompts, str) or not isinstance(prompts, Sized) or any(isinstance(p, Integral) for p in prompts):
            raise ValueError(f"prompts = {str(prompts)[:60]!r}: must be a list of prompts, each a list of token ids")
        adapters = adapter if isinstance(adapter, (list, tuple)) else [adapter] * len(prompts)
        if len(adapters) != len(prompts):
            raise ValueError(f"{len(adapters)} adapters for {len(prompts)} prompts: give one name, or one per prompt")
        seed, now = None if seed is None else int(checked("seed", seed, int, 0)), self.clock.now()
        requests = [Request(p, max_new_tokens, a, seed=None if seed is None else seed + i, arrival=now, **sampling)
                    for i, (p, a) in enumerate(zip(prompts, adapters))]
        for r in requests:
            self._validated(r)  # all of them, before any is queued
        for r in requests:
            self.add(r)
        mine, others, left = set(requests), [], requests[::-1]

        def ended():
            while left and left[-1].done:
                left.pop()
            return not left
        try:
            self.run(lambda event: event.request in mine or others.append(event), until=ended)
            if not ended():
                raise KeyboardInterrupt
        finally:
            self.lanes[0].news[:0] = others  # to be told by the next step
            with ExitStack() as aborts:  # of all, should one of them raise
                for r in left:
                    aborts.callback(lambda r=r: r.done or self.abort(r.id))
        return [r.output for r in requests]

    def run(self, on_event=lambda event: None, until=lambda: False):
        """Step until nothing is left or until() is so, calling on_event(Event) -> the requests that ended, in order of their end.
        Ctrl-C stops it after the iteration under way; what is unfinished stays in the engine."""
        ended = []

        def tell(events):
            for i, event in enumerate(events, 1):
                try:
                    on_event(event)
                except BaseException:
                    self.lanes[0].news[:0] = events[i:]  # what is new of others is told by the next step
                    raise
                if event.finished:
                    ended.append(event.request)
        with Interruptible(self.world) as interrupt:
            while self.requests and not until() and not interrupt.seen:
                tell(self.step())
            tell(self.land())
        return ended

    def _validated(self, r):
        """The request's token array (max_len,), prompt filled in; raises for what could never run."""
        c = self.model.config
        if not isinstance(r, Request):
            raise ValueError(f"{str(r)[:60]}: must be a Request")
        if r.state != "new":
            raise ValueError(f"request {r.id} was added before: make a new Request")
        prompt = checked_prompt(r.prompt, c.vocab_size)
        check_numbers(r)
        r.max_new_tokens = int(r.max_new_tokens)  # numpy's small numbers run over
        for what, most in (("the model's context ends", c.block_size), ("the pool's pages end", self.pool.n_page)):
            if r.max_len > most:
                raise ValueError(f"prompt of {len(prompt)} tokens + max_new_tokens = {r.max_new_tokens}: {what} at {most}")
        if not isinstance(r.stop, (list, tuple)):
            raise ValueError(f"stop = {r.stop!r}: must be a list of token ids")
        for t in r.stop:
            checked("stop token", t, int, 0, c.vocab_size - 1)
        if not isinstance(r.client, str | None):
            raise ValueError(f"client = {r.client!r}: must be a name or None")
        if r.adapter is not None:
            self._check_adapter(r)
        return np.concatenate([prompt, np.zeros(r.max_new_tokens, np.int64)])

    def _check_adapter(self, r):
        known = self.adapters.known
        if not isinstance(r.adapter, str) or r.adapter not in known:
            some = ", ".join(islice(known, 8)) + (", ..." if len(known) > 8 else "")
            raise KeyError(f"unknown adapter {r.adapter!r}: " + (f"one of {some}" if known else "none was added"))
        n_page = known[r.adapter].n_page if self.adapters.pool is self.pool and self.config.lora != "merge" else 0
        if r.max_len + n_page > self.pool.n_page:
            raise ValueError(f"prompt and new tokens need {r.max_len} pages and adapter {r.adapter!r} {n_page}: the pool has {self.pool.n_page}")

    # ------------------------------------------------------------ one iteration: who runs, and on which pages

    def step(self):
        """One iteration -> [Event]. With nothing but future arrivals it waits for the next one, a tenth of a second at most, and returns [],
        as when there is nothing at all. Where a GPU would wait for Python meanwhile, iteration i + 1 is planned and started while i runs, and the
        events are those of i."""
        self._land(self.ahead)
        plan = self._plan()  # policy and memory: who feeds how many tokens, and on which pages [SARATHI §4.3] [S-LoRA §5.1]
        plan = self._widen(plan)  # speculation: decodes get drafts after them [SmartSpec §5]
        if plan:
            self._launch(plan)  # one flat batch, one forward, tokens drawn from its logits [SARATHI §4.3] [S-LoRA §5.3]
        return self.land(self.behind if plan else 0)  # commit: advance, roll back, retire

    def land(self, most=0):
        """As _land -> [Event], all that nobody has been told yet."""
        self._land(most)
        told, self.news = self.news, []
        return told

    def _land(self, most):
        """Wait for the oldest iterations, and commit them, until no more than `most` are in flight; none is left if no request is."""
        while len(self.flights) > (most if self.requests else 0):
            tokens = self.flights[0].wait()  # a Ctrl-C here leaves it in flight
            self._commit(self.flights.popleft().ready, tokens)

    def _plan(self):
        """Who feeds how many tokens next; [] if there is nothing to do. All of it has its pages."""
        self._arrive()
        queue = self.order.queue(self) if self.order else self.waiting  # which may give some of them up
        if not self.running and not self.waiting:
            return []
        plan = self._admit(self.scheduler.plan([*self.running], queue), queue)
        plan = plan or self._admit(self.scheduler.plan([*self.running], ()), ())  # nothing new fits: again with the door closed
        if not plan and (self.running or self.waiting):  # else somebody's policy has given all of them up
            order = f", offered by {type(self.order).__name__}" if self.order else ""
            raise RuntimeError(f"{type(self.scheduler).__name__} planned nothing that could run, of {len(self.running)} running requests (max_batch = "
                               f"{self.max_batch}) and {len(self.waiting)} waiting ones{order}: where no newcomer fits it must feed some that run")
        return plan

    def _widen(self, plan):
        return self.speculator.widen(plan) if self.speculator else plan

    def _arrive(self):
        """Move what has arrived by now to the queue; an idle engine waits for the first."""
        while self.pending:
            arrival, id = self.pending[0]
            if id in self.requests:  # else: aborted before it arrived
                if not self.waiting and not any(lane.running or lane.flights for lane in self.lanes):
                    self.clock.wait_until(arrival)
                if arrival > self.clock.now():
                    break
                self._enqueue(self.requests[id])
            heapq.heappop(self.pending)

    def _enqueue(self, r):
        """What has arrived waits, unless more than max_waiting would who find no slot."""
        most = self.config.max_waiting
        n_slot = sum(max(0, min(lane.max_batch, lane.scheduler.max_batch) - len(lane.running)) for lane in self.lanes)
        if most and len(self.waiting) >= n_slot + most:
            return self.give_up(r, "refused")
        r.state = "waiting"
        self.waiting.append(r)

    def give_up(self, r, state="abort"):
        """End a request that the user has not: the next step says so."""
        self._end(r, state)
        self.news.append(Event(r, [], state))
        self._let_go([r])

    def _admit(self, plan, queue):
        """Memory's word on a plan: start what is new and fits (the first that does not closes the door to all behind it, so
        the queue keeps its order), and preempt the youngest when a running request finds no page. -> the entries that run"""
        is_open = True
        for r, n in self._checked(plan):
            if r.state == "waiting":
                try:
                    is_open = is_open and len(self.running) < self.max_batch and self._hold(r, r.n_tokens)
                    if is_open:
                        self._start(r)
                finally:  # also where its adapter's copy failed: who waits has no pages
                    if r.state == "waiting":
                        self.pool.free(r.id)
            while r.state == "running" and not self._hold(r, r.n_past + n):
                self._preempt(self.running[-1])
                is_open = False  # who gave way is before all that wait
        if is_open and self.adapters.known:  # else free pages are for who is at the door
            self.adapters.prefetch(islice((r for r in queue if r.state == "waiting"), PREFETCH))
        return [(r, n) for r, n in plan if r.state == "running"]

    def _checked(self, plan):
        """A plan that can be run, whoever wrote its scheduler; ValueError for another."""
        who = type(self.scheduler).__name__
        if not (isinstance(plan, list) and all(isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], Request) for entry in plan)):
            raise ValueError(f"{who}: a plan must be a list of tuples (request, n), not {plan!r:.60}")
        mine = {r.id for r in self.running}
        for r, n in plan:
            if not (r.id in mine or r.state == "waiting" or r.done):  # done: given up while the scheduler was at work
                raise ValueError(f"{who}: a plan may name requests that run here or wait, request {r.id} is {r.state!r}")
            if not (isinstance(n, Integral) and 1 <= n <= r.n_todo):
                raise ValueError(f"{who}: a plan may feed 1 .. {r.n_todo} tokens of request {r.id}, not {n!r}")
        if len({r.id for r, n in plan}) < len(plan):
            raise ValueError(f"{who}: a plan may name a request once")
        if self.config.lora == "merge" and len({r.adapter for r, n in plan}) > 1:
            raise ValueError(f"{who}: with lora = 'merge' a plan has one adapter, not {len({r.adapter for r, n in plan})}")
        return plan

    def _lookahead(self, r, k):
        """Take pages for up to k drafts after r's last known token -> how many got one. A free page per running request is left alone, so
        that no guess takes that of another's next token [SmartSpec §6]. Idle adapters make way, as for any token."""
        lacks = self.pool.need(r.id, r.n_tokens + k, r.max_len)
        if lacks:
            wanted = lacks + len(self.running)
            self.adapters.find_room(self.pool, lambda owner, n, n_max: n <= self.pool.n_free, None, wanted, wanted)
        spare = max(0, self.pool.n_free - len(self.running))
        k -= max(0, lacks - spare)
        self.pool.hold(r.id, r.n_tokens + k, r.max_len)
        return k

    def _hold(self, r, n):
        """Pages for the first n tokens of r, and its adapter; idle adapters make way. False: no room, and a waiting r holds no page."""
        whole = round_up(r.max_len, self.key_tile)  # of key tiles, if they are within its share of the pool or add little: they attend faster
        cheap = r.max_len < whole <= max(self.pool.n_page // self.max_batch, r.max_len * 9 // 8)
        for n_max in (whole, r.max_len) if cheap else (r.max_len,):
            if self.adapters.find_room(self.pool, self.pool.hold, r.id, n, n_max) and self.adapters.hold(r.adapter):
                return True
            if r.state == "waiting":
                self.pool.free(r.id)
        return False

    def _start(self, r):
        self.adapters.use(r.adapter, 1)
        self.waiting.remove(r)
        r.state = "running"
        self.running.append(r)

    def _preempt(self, r):
        """Give up a request's pages; it goes to the head of the queue and is computed again from its tokens."""
        now = self.clock.now()
        self._log(now, now, 0, [(r.id, r.n_past, 0)])
        self._leave(r)
        r.state, r.n_past, r.n_draft_past, r.n_preempted = "waiting", 0, 0, r.n_preempted + 1
        self.waiting.append(r, returns=True)

    def _leave(self, r):
        """Out of the queue or the batch, and its pages free."""
        if r.state == "waiting":
            self.waiting.remove(r)
        if r.state == "running":
            self.running.remove(r)
            self.adapters.use(r.adapter, -1)
        self.pool.free(r.id)

    # ------------------------------------------------------------ the model: a plan as one flat batch

    def _launch(self, plan):
        """Start an iteration, which counts at once: n_past grows by what is fed (of drafts that is yet to be seen), and n_tokens by one for
        whoever has nothing left to feed; the token's value only the device may know until _commit. Who has all tokens then is "landing"
        and gives up its pages, since the device does one thing after the other."""
        self.flights.append(self._run(plan))
        for r, n in plan:
            r.n_past = min(r.n_past + n, r.n_tokens)
        for i, (r, drafts) in enumerate(self.flights[-1].ready):
            if self.ahead:
                r.tokens[r.n_tokens] = ~i  # its row in Batch.newest: no more than one iteration is fed before this one has landed
            r.n_tokens += 1
            if r.n_tokens == r.max_len:
                self._leave(r)
                r.state = "landing"

    def _run(self, plan):
        """Start one forward pass, and the choice of the next tokens of each request that has none left to feed after this plan."""
        timed = self.record is not None or self.cost is not None  # else nobody asks what time it is: on several devices that takes a message
        start, recorded = self.clock.now() if timed else None, self.graphs and len(self.graphs.recorded)
        logits, ready = self._forward(plan), asking(plan)  # in the order that the plan now has
        read, newest = self._sample(ready, logits)
        usual = not self.graphs or recorded == len(self.graphs.recorded)  # to record an iteration takes many times as long
        entries, learns = timed and fed(plan), self.cost and usual and self.cost.wants()
        work = learns and Work.of(self._entries(plan), self.cost.tile)

        def wait():
            tokens = self.world.agree(read())
            if timed:
                began, self.landed = max(start, self.landed), self.clock.now()  # not before the end of the one before
                self._log(began, self.landed, 0, entries)
                if work:
                    self.cost.learn(work, self.landed - began, self.config.lora)
            return tokens
        return Flight(ready, wait, newest)

    def _entries(self, plan):
        """The plan as its price depends on it: (n_past, n, rows of logits, weights of the adapter) per request."""
        known = self.adapters.known
        return [(r.n_past, n, r.n_wanted(n), known[r.adapter].n_params if r.adapter is not None else 0) for r, n in plan]

    def _forward(self, plan):
        """-> logits (M, V): for each entry, in the order that the plan now has, as many rows as it wants"""
        model, batch = self._prepare(plan)
        recorded = self.graphs and model is self.model  # not where an adapter is in its weights
        self.hidden = self.graphs.hidden(batch) if recorded else model.hidden(batch, self.kv)  # (M, C), what heads guess from
        return model.predict(self.hidden)

    def _prepare(self, plan):
        """-> the model, where adapters are merged with that of the plan in its weights, and the plan's Batch"""
        adapter = plan[0][0].adapter
        if self.config.lora == "merge" and adapter != self.merged[0]:
            self.merged = None, self.model  # the old weights go before the new ones are made
            if adapter is not None:
                self.merged = adapter, self.model.merged(self.adapters.known[adapter])
        return self.model if self.merged[0] is None else self.merged[1], self._pack(plan)

    def _log(self, start, end, stage, entries):
        if self.record is not None:
            self.record.append(Span(start, end, stage, self.number, entries))

    def _pack(self, plan):
        """The plan as one flat Batch. Sorted so that decodes with contexts alike stand together."""
        tables, config, Hk, device, dtype = self.pool.tables, self.model.config, self.pool.n_kv_head, self.kv.device, self.kv.dtype
        plan.sort(key=lambda entry: (entry[1], tables[entry[0].id].key_tile(self.key_tile), entry[0].n_past))
        feeds = [Feed(tables[r.id], r.n_past, r.n_past + n, r.tree.parents if r.branches else None) for r, n in plan]
        tokens = np.concatenate([r.tokens[f.past:f.end] for (r, _), f in zip(plan, feeds)])
        positions = np.concatenate([f.past + r.tree.level if r.tree else np.arange(f.past, f.end) for (r, _), f in zip(plan, feeds)])
        ends, group = accumulate(n for r, n in plan), config.n_head // Hk
        logit_rows = np.array([row for (r, n), end in zip(plan, ends) for row in range(end - r.n_wanted(n), end)], int)
        loras, newest = self._loras(plan), self.flights[-1].newest if self.flights else None
        if on_gpu(device):  # to be uploaded in one piece
            rows, strides = [f.table.rows for f in feeds], [f.table.stride for f in feeds]
            past, n = np.array([(f.past, f.end - f.past) for f in feeds]).T
            pages = Pages.of(rows, strides, past, n, group, dtype, [f.parents for f in feeds])
            return Batch(tokens, positions, None, logit_rows, pages, loras, newest=newest)
        to = partial(place, device=device)
        rows = Rows.of(feeds, self.key_tile, Hk, config.head_dim, to)
        segments = Segment.cut(feeds, self.key_tile, Hk, group, dtype, to)
        return Batch(to(tokens), to(positions), rows, to(logit_rows), segments, loras, newest=newest)

    def _loras(self, plan):
        """{operator: Lora} for the operators that some request's adapter changes."""
        starts, resident = accumulate((n for r, n in plan), initial=0), self.adapters.resident
        users = [(start, n, resident[r.adapter].factors) for start, (r, n) in zip(starts, plan) if r.adapter in resident]
        n_few = sum(n for r, n in plan if n <= FEW_ROWS)
        loras, width, bmm = {}, self.pool.n_kv_head * self.model.config.head_dim, self.config.lora == "bmm"
        for name in {name for _, _, factors in users for name in factors}:
            spans = [(start, n, factors[name]) for start, n, factors in users if name in factors]
            operator = self.model.config.operators[name]
            columns = list(operator.modules.values())
            if on_gpu(self.kv.device) and not bmm:
                loras[name] = LoraPages.of(spans, columns, width, self.kv.dtype)
            else:
                loras[name] = Lora.of(spans, n_few, operator.n_in, columns, width, bmm)
        return loras

    # ------------------------------------------------------------ the end of an iteration: tokens

    def _commit(self, ready, tokens):
        """Give every request that has no tokens left to feed its next ones: one that `_launch` counted, and of drafts those accepted.
        All that is ours is done before a proposer, which may be anybody's, hears of those that ended."""
        now, ended = self.clock.now(), []
        self.n_steps += 1
        if self.speculator:
            self.speculator.observe([(r, len(drafts), len(new) - 1) for (r, drafts), new in zip(ready, tokens) if drafts])
        for (r, drafts), new in zip(ready, tokens):
            if r.done:
                continue  # aborted, or found to be at its end, while this iteration was in flight
            new = new[:1 + next((i for i, token in enumerate(new) if token in r.stop), len(new))]
            if r.branches:
                self._move(r)
            start, n = len(r.prompt) + len(r.times), len(new)
            r.tokens[start:start + n] = new
            r.n_tokens, r.n_past = r.n_tokens + n - 1, r.n_past + n - 1  # rollback: what was cached beyond will be written over
            r.n_draft_past = min(r.n_draft_past, r.n_past)
            r.times += [now] * n
            finished = "stop" if new[-1] in r.stop else "length" if start + n == r.max_len else None
            if finished:
                self._end(r, finished)
                ended.append(r)
            self.news.append(Event(r, new, finished))
        self._let_go(ended)

    def _sample(self, ready, logits):
        """The next tokens. ready: (request, its k drafts); its last known token and they gave k + 1 rows of logits (M, V). New are the
        drafts that pass, and one more from the row where they end: the likeliest, or drawn with the request's own random numbers. -> a
        function that waits for them, and the last of each on the device (B,). Nothing here waits for the device, unless there are drafts."""
        if not ready:
            return fetch(logits), None  # no rows, so no tokens; but to be waited for
        requests, n_row = [r for r, drafts in ready], [len(drafts) + 1 for r, drafts in ready]  # rows: one for each draft, and one behind them
        ends, to = np.cumsum(n_row), partial(place, device=logits.device)
        first, draft = ends - n_row, np.array([token for r, drafts in ready for token in (*drafts, -1)])  # (M,) -1: nothing was guessed
        best, guess = logits.max(-1).indices, to(draft)
        accepted = best == guess
        drawn = [i for i, r in enumerate(requests) if r.temperature > 0]
        if drawn:
            asked, rows = [(requests[i], n_row[i]) for i in drawn], to(np.concatenate([np.arange(first[i], ends[i]) for i in drawn]))
            p = target_probs(logits[rows], *self._sampling([r for r, n in asked for _ in range(n)]))
            q, u = self._guessed(asked, p, guess[rows]), to(np.concatenate([r.rng.random(n) for r, n in asked]))
            accepted[rows] = accept(p, q, guess[rows], u)
        if self.config.alpha:
            accepted = to(np.concatenate([np.arange(n) < min(r.luck, n - 1) for r, n in zip(requests, n_row)]))
        last = run_ends(accepted, to(first))
        for i, r in enumerate(requests):
            if r.branches:
                a, b = first[i], ends[i]
                r.path = r.path if self.config.alpha else r.tree.walk(draft[a:b - 1].tolist(), best[a:b].tolist())
                last[i] = a + (r.path[-1] if r.path else 0)
        if self.speculator:
            self.speculator.proposer.keep(requests, self.hidden[last])
        token = best[last]
        if drawn:  # with the one number that accepting left over
            who = to(np.array(drawn))
            at, spare = torch.searchsorted(rows, torch.stack([last, to(ends) - 1])[:, who])
            token[who] = sample(residual(p[at], None if q is None else q[at], guess[rows][at]), u[spare])
        return partial(self._read, requests, draft, first, fetch(torch.stack([last, token]))), token

    def _read(self, requests, draft, first, word):
        """word(): the one word from the device, of each request the row where its accepted drafts (M,) end, and the token from there -> its
        new tokens"""
        last, token = word()
        rows = [a - 1 + np.array(r.path, int) if r.branches else np.arange(a, b) for r, a, b in zip(requests, first, last)]
        return [[*draft[passed].tolist(), t] for passed, t in zip(rows, token)]

    def _move(self, r):
        """K and V of the accepted path of a tree, to the pages where a chain would have left them: they were computed for these
        positions, and copying a few vectors is cheaper, and simpler, than to feed the tokens again."""
        table, c = self.pool.tables[r.id], self.model.config
        keys, values = self.kv[:, 0].flatten(1), self.kv[:, 1]
        old, new = (r.n_past - 1 + level for level in (np.array(r.path, int), 1 + np.arange(len(r.path))))  # (levels,)
        rows = [table.at(t, c.n_kv_head) for t in (old, new)]
        old, new = (torch.from_numpy(key_cells(x, t, table.key_tile(self.key_tile), c.head_dim)).to(keys.device) for x, t in zip(rows, (old, new)))
        keys[:, new] = keys[:, old]
        old, new = (torch.from_numpy(x).to(keys.device) for x in rows)
        values[:, new] = values[:, old]

    def _sampling(self, requests):
        """temperature, top_k, top_p, each (B,), as target_probs wants them"""
        to = lambda name, dtype: place(np.array([getattr(r, name) for r in requests], dtype), self.kv.device)
        return to("temperature", np.float32), to("top_k", np.int64), to("top_p", np.float32)

    def _guessed(self, asked, p, draft):
        """What the drafts (M,) of these, (request, its rows), were drawn from, (M, V) like p; None: all of them were certain."""
        known = [(r.q[:n - 1], end - n) for (r, n), end in zip(asked, np.cumsum([n for r, n in asked])) if n > 1 and r.q is not None]
        if not known:
            return None
        q, drawn_from = torch.zeros_like(p), torch.cat([rows for rows, start in known])
        q.scatter_(1, draft.clamp(min=0)[:, None], 1.0)  # certain is drawn with probability 1
        at = np.concatenate([np.arange(start, start + len(rows)) for rows, start in known])
        q[at] = torch.nn.functional.pad(drawn_from.to(q), (0, q.size(1) - drawn_from.size(1)))
        return q

    def _let_go(self, requests):
        """Tell the proposer who ended: of each, should it fail for one of them."""
        with ExitStack() as calls:
            for r in requests if self.speculator else ():
                calls.callback(self.speculator.proposer.forget, r)

    def _end(self, r, state):
        """Pages back to the pool, bookkeeping gone."""
        self._leave(r)
        r.state, r.q = state, None
        self.n_ended[state] += 1
        del self.requests[r.id]
        if not self.requests:
            self.pending.clear()  # what was aborted before it arrived


def make_engine(model, **options):
    """An Engine for a model, a Simulator for a CostModel, a Pipeline for one stage of a model."""
    kind = Simulator if isinstance(model, CostModel) else Pipeline if model.world.pp > 1 else Engine
    return kind(model, **options)


def free_memory(device):
    """(bytes, the share of them that the pool takes by default): what weights leave of a GPU; the RAM."""
    if device.type == "cuda":
        gc.collect()  # an engine is one of a cycle: what is left of it has its cache
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's allocator has it, but nobody in it
        return torch.cuda.mem_get_info(device)[0] + kept, 0.9
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 0.25


class Interruptible:
    """While it is entered, the first Ctrl-C only sets `seen`, so that an iteration is never cut in half; the second is as usual.
    In a World of several processes, all of which the terminal tells, `seen` is what rank 0 or the last stage saw: all stop after the
    same iteration."""
    came = False

    def __init__(self, world=World()):
        self.world = world

    @property
    def seen(self):
        """A pipeline does not stop to agree: the last stage's words say it."""
        return self.world.stop if self.world.pp > 1 else self.world.agree(self.came)

    def __enter__(self):
        self.came = self.world.came = self.world.stop = False
        try:
            self.previous = signal.signal(signal.SIGINT, self._interrupt)
        except ValueError:  # not the main thread: signals are somebody else's
            self.previous = None
        return self

    def _interrupt(self, *_):
        self.came = self.world.came = True
        if self.world.size == 1:  # torchrun passes on what the terminal has sent already
            signal.signal(signal.SIGINT, self.previous)

    def __exit__(self, *exc):
        if self.previous is not None:
            signal.signal(signal.SIGINT, self.previous)


# ---------------------------------------------------------------- the simulator: the engine with another clock

class Simulator(Engine):
    """An Engine whose model is a CostModel: running a plan only moves the clock, every token is 0, no page is real. A draft model
    is a CostModel too; how many drafts are accepted is drawn with alpha."""
    model_type = CostModel

    def __init__(self, model, clock=None, **options):
        super().__init__(model, clock=clock or VirtualClock(), **options)
        if self.speculator and not self.config.alpha:
            raise ValueError("alpha = 0: a simulator has no tokens to verify, give the share of drafts that are accepted")

    def _new_cost(self, model, cost):
        return model if cost in (None, model) else super()._new_cost(model, cost)

    def _memory(self, draft):
        weights = lambda m: m.config.n_params * m.dtype.itemsize
        free, share = self.model.memory  # without its weights
        drafts = weights(draft) if isinstance(draft, CostModel) else 0
        if share * free <= drafts:
            raise ValueError(f"{(weights(self.model) + drafts) / 1e9:.1f} GB of weights do not fit {self.model.name}: take a larger GPU or more "
                             "of them (tp)")
        return free - drafts, (share * free - drafts) / (free - drafts)

    def _new_cache(self, n_page):
        return None

    def _new_graphs(self):
        return None

    def _new_copier(self):
        """Copies follow one another on the link while iterations run; who needs one that has not arrived waits [S-LoRA §5.2]."""
        link = VirtualClock()

        def copy(pages, adapter):
            host, transfer = self.model.load(adapter.n_params, resize=self.config.adapter_pages > 0)
            self.clock.wait_until(self.clock.now() + host)
            link.wait_until(max(link.now(), self.clock.now()) + transfer)
            return partial(self.clock.wait_until, link.now())
        return copy

    def _load(self, source):
        if not callable(source):
            raise ValueError(f"adapter {source!r}: a simulator takes random_adapter(rank)")
        return source(self.model.config)

    def _validated(self, r):
        """As for the engine, but the array is one zero that is seen max_len times."""
        return np.ndarray(len(super()._validated(r)), np.int64, np.zeros(1, np.int64), strides=(0,))

    def _price(self, plan):
        """Seconds that the plan takes, a swap of the merged adapter included."""
        adapter = plan[0][0].adapter
        swap = self.config.lora == "merge" and adapter != self.merged[0]
        self.merged = adapter, self.model
        return self.model.time_of(self._entries(plan), self.config.lora) + (self.model.merge() if swap else 0.0)

    def _forward(self, plan):
        self.clock.wait_until(self.clock.now() + self._price(plan))

    def _move(self, r):
        pass

    def _sample(self, ready, logits):
        tokens = [[0] * (1 + min(len(drafts), r.luck)) for r, drafts in ready]
        return (lambda: tokens), None


# ---------------------------------------------------------------- many devices: one clock, a pipeline of stages

class SharedClock(WallClock):
    """Rank 0's clock, read on every rank."""

    def __init__(self, world):
        self.world, self.events = world, str(world.device) != "cpu"
        world.each(None)  # all are here: they start together
        super().__init__()
        if self.events:
            self.zero = torch.cuda.Event(enable_timing=True)
            self.zero.record()

    def now(self):
        return self.world.agree(self.own())

    def own(self):
        """This rank's own reading."""
        return super().now()

    def mark(self):
        """-> a function that says when this rank's device was done with all that it had been given by now, by its own clock"""
        if not self.events:
            t = self.own()
            return lambda: t
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return lambda: (event.synchronize(), self.zero.elapsed_time(event) / 1e3)[1]


class PipelineClock:
    """A SharedClock for a Pipeline: while micro-batches are in flight it stands at what the last stage's latest word said, so that
    to read it no stage waits for another."""

    def __init__(self, line, inner):
        self.line, self.inner, self.mark, self.t = line, inner, inner.mark, 0.0

    def now(self):
        if not any(lane.flights for lane in self.line.lanes):
            self.t = max(self.t, self.inner.now())
        return self.t

    def wait_until(self, t):
        if t > self.t:
            self.inner.wait_until(t)
            self.t = max(self.t, self.inner.now())


class Lane:
    """One of the micro-batches that a Pipeline keeps in flight: an engine with its own requests and pages, and everybody's queue."""
    behind = 1

    def __init__(self, line, number, model, **options):
        self.line, self.number = line, number
        super().__init__(model, **options)

    @property
    def lanes(self):
        return self.line.lanes

    def _plan(self):
        self.clock.wait_until(self.line.now)  # it may have had nothing to do for long
        return super()._plan()

    def _widen(self, plan):
        plan, self.line.now = super()._widen(plan), self.clock.now()
        return plan

    def _preempt(self, r):
        super()._preempt(r)
        if self.speculator:
            self.speculator.proposer.forget(r)  # another lane may start it next


class SimulatedLane(Lane, Simulator):
    """A Lane on every stage of a CostModel."""

    def _memory(self, draft):
        free, share = super()._memory(draft)
        return free / len(self.line.free), share

    def _run(self, plan):
        """Through all stages; the next iteration of this lane may start when the last stage is done."""
        line, t = self.line, self.clock.now()
        took = self._price(plan) / len(line.free)
        send, idle = self.model.send(sum(n for r, n in plan)), 0.0
        for stage, free in enumerate(line.free):
            start = max(t, free)
            t = start + took + (send if stage + 1 < len(line.free) else 0.0)  # sending keeps the stage busy
            idle += line.book(stage, start, t)
            self._log(start, t, stage, fed(plan))
        self.clock.wait_until(t)
        line.charge(plan, idle)
        ready = asking(plan)
        return Flight(ready, *self._sample(ready, None))


class StageLane(Lane, Engine):
    """A Lane on the stage that this process has of a model: the other stages are other processes, and do the same with their layers.
    Of its micro-batch in flight it keeps `work`, what there is to do here, and functions: start and end say when that was, sent and
    arrived wait for the message to the next stage and for the last one's word; and `hidden`, what that message carries."""

    def _run(self, plan):
        """Get ready for my layers of it, and work when it is my turn: stage i is i turns behind the plans, so that what comes from the
        stage before is on its way while it works on another"""
        world, self.start = self.world, self.clock.mark()
        model, batch = self._prepare(plan)
        ready = asking(plan)
        word = torch.zeros(1 + len(ready), 2 + max([len(drafts) for r, drafts in ready], default=0), dtype=torch.long)
        x = world.receive((len(batch.tokens), model.config.n_embd), model.dtype) if world.stage else None
        self.work = partial(self._work, model, batch, x, ready, word)
        self.line.queue.append(self)
        self.line.work(world.stage)
        return Flight(ready, partial(self._hear, plan, fed(plan), word))

    def _work(self, model, batch, x, ready, word):
        """My layers of a micro-batch, from the stage before to the next; the last one samples, and sends its word to all: what time it
        is, whether to stop (Ctrl-C), and of each request how many tokens, which."""
        world = self.world
        if x is not None:
            x, self.start = x(), self.clock.mark()
        self.hidden = model.hidden(batch, self.kv, x)
        if world.is_last:
            wait, _ = self._sample(ready, model.predict(self.hidden))
            for row, said in zip(word, [[int(self.clock.inner.own() * 1e9), world.came], *([len(new), *new] for new in wait())]):
                row[:len(said)] = torch.tensor(said)
        else:
            self.sent = world.send(self.hidden, "activations")
            for r, drafts in ready:  # the random numbers that the last stage takes are everybody's
                r.rng.random((len(drafts) + 1) * (r.temperature > 0))
        self.arrived, self.end = world.spread(word, world.last), self.clock.mark()

    def _hear(self, plan, entries, word):
        """Wait for the last stage's word on what is in flight -> the tokens."""
        while self in self.line.queue:
            self.line.work(len(self.line.queue) - 1)
        self.arrived()
        if not self.world.is_last:
            self.sent()  # long ago, but a message that nobody asks for is kept
        (now, stop, *_), *rows = word.tolist()
        self.clock.t, self.world.stop = max(self.clock.t, now / 1e9), self.world.stop or bool(stop)
        start, end = self.start(), self.end()
        self._log(start, end, self.world.stage, entries)
        self.line.charge(plan, self.line.book(self.world.stage, start, end))
        return [row[1:1 + row[0]] for row in rows]

    def _memory(self, draft):
        """As much for each lane; asked before the first took its own."""
        self.line.memory = self.line.memory or super()._memory(draft)
        return self.line.memory[0] / self.world.pp, self.line.memory[1]


class Pipeline:
    """Stages of equal layers and as many lanes, each with max_batch requests and n_page pages; what Engine and Simulator are to one
    device (add, step, run, ...) [SARATHI §5.3]. model: a CostModel, for n_stage stages that are simulated; or a GPT of which this
    process has a stage. A stage that idles between two micro-batches makes a bubble, charged to the second:

    PB1: their prefills differ in length; PB2: one has a prefill, the other none; PB3: only their cached lengths differ [§3.2]."""
    run, generate = Engine.run, Engine.generate

    def __init__(self, model, n_stage=None, record=None, clock=None, **options):
        self.world, simulated = model.world, isinstance(model, CostModel)
        n_stage = checked("n_stage", n_stage, int, 1) if simulated else self.world.pp
        if not simulated and n_stage == 1:
            raise ValueError("the model is whole: give it to an Engine, or load a stage of it with world=World.start(pp=...)")
        if not simulated:
            self._check(options)
            options["clock"] = PipelineClock(self, clock or make_clock(self.world))
        elif clock is not None:
            raise ValueError("clock: each stage that is simulated has its own")
        self.free, self.last = [0.0] * n_stage, None  # when each stage is; tokens of the last one's chunks
        self.now, self.bubbles = 0.0, dict(PB1=0.0, PB2=0.0, PB3=0.0)  # when the last turn was; seconds of all stages
        self.record, self.memory, self.queue = record, None, deque()  # Spans; what the lanes share; those whose turn on this stage is still to come
        self.lanes = [(SimulatedLane if simulated else StageLane)(self, i, model, record=record, **options) for i in range(n_stage)]
        first, self.turns = self.lanes[0], deque(self.lanes)
        self.add, self._validated, self.requests, self.max_batch = first.add, first._validated, first.requests, n_stage * first.max_batch
        for lane in self.lanes:
            lane.requests, lane.pending, lane.waiting, lane.order = first.requests, first.pending, first.waiting, first.order
            lane.adapters.known, lane.n_ended = first.adapters.known, first.n_ended
        self.add_adapter, self.n_ended = first.add_adapter, first.n_ended

    def _check(self, options):
        """ValueError for options that stages, of which only the last sees logits, cannot do with."""
        draft, policy = options.get("draft"), make_policy(options.get("spec", "off"))
        if isinstance(draft, (Heads, Medusa)):
            raise ValueError(f"draft = {type(draft).__name__}: heads read the last stage's states, with pp = {self.world.pp} give ngram or a model")
        if policy.priced and not options.get("cost"):
            raise ValueError(f"spec = {options['spec']!r}: a stage of pp = {self.world.pp} cannot be profiled for the price of drafts, give a number")
        if make_scheduler(options.get("scheduler", "sarathi")).priced and not options.get("cost"):
            raise ValueError(f"scheduler = {options['scheduler']!r}: a stage of pp = {self.world.pp} cannot be profiled, give cost")

    @property
    def clock(self):
        """Everybody's; simulated that of the lane that is ready last: when all that was started has left the last stage."""
        return max((lane.clock for lane in self.lanes), key=lambda clock: clock.t)

    def step(self):
        """The turn of the lane that was started first, as stages work in order -> [Event] of the iteration that it had in flight."""
        ready = [lane for lane in self.turns if lane.flights or lane.running or lane.waiting] or list(self.turns) * bool(self.lanes[0].pending)
        if not ready:
            return []
        self.turns.remove(ready[0])
        self.turns.append(ready[0])
        events = ready[0].step()
        self._forget()
        return events

    def work(self, most):
        """Do what this stage has planned, the oldest first, until it is `most` micro-batches behind."""
        while len(self.queue) > most:
            self.queue.popleft().work()

    def abort(self, request_id):
        """As Engine.abort; what is in flight goes on, and is forgotten as it lands."""
        r = self.lanes[0]._known(request_id)
        owner = next((lane for lane in self.lanes if r in lane.running), self.lanes[0])
        owner.abort(request_id)
        for lane in self.lanes:
            if lane.speculator:  # of one that was in flight nobody knows the lane
                lane.speculator.proposer.forget(r)
        self._forget()

    def land(self):
        """Wait until no lane has an iteration in flight -> their [Event]."""
        return [event for lane in self.turns for event in lane.land()]

    def _forget(self):
        """Once nothing is left nobody will ask for what aborted requests still have in flight."""
        if not self.requests:
            for lane in self.lanes:
                lane._land(0)

    def gather(self, requests=()):
        """Where stages are processes each has booked its own bubbles: add them up, for all and for these requests, and collect the
        Spans of all stages in `record`. Once, at the end, on every rank."""
        record = self.record or []
        mine = self.bubbles, [r.bubble for r in requests], [span for span in record if span.stage == self.world.stage]
        bubbles, each, spans = zip(*self.world.each(mine)[::self.world.tp])
        self.bubbles = {kind: sum(b[kind] for b in bubbles) for kind in self.bubbles}
        for r, seconds in zip(requests, zip(*each)):
            r.bubble = sum(seconds)
        record[:] = sorted(chain(*spans), key=lambda span: span.start)

    def book(self, stage, start, end):
        """A stage works from start to end -> seconds that it had idled before."""
        idle = start - self.free[stage] if self.last is not None else 0.0
        self.free[stage] = end
        return idle

    def charge(self, plan, idle):
        """Book a micro-batch's bubbles on their kind and on each of its requests."""
        before, self.last = self.last, sum(n for r, n in plan if n > FEW_ROWS)
        if before is not None:
            kind = "PB3" if before == self.last else "PB1" if before and self.last else "PB2"
            self.bubbles[kind] += idle
            for r, n in plan:
                r.bubble += idle


# ---------------------------------------------------------------- command line

class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Says the default where there is one to say."""

    def _get_help_string(self, action):
        return action.help if action.default in (None, "") else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line, and whose flags come from dataclass fields made with `option`."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=Help, allow_abbrev=False, **kwargs)

    def error(self, message):
        if message.startswith("unrecognized"):
            message += f": flags are {', '.join(flag for flag in self._option_string_actions if flag.startswith('--'))}"
        self.exit(2, f"{self.prog}: {message}\n" if World.first_to_say(message) else None)

    def add_fields(self, cls, title, **change):
        """One flag per field of cls that has a help text, under a title; change: what a flag should have otherwise, by field."""
        group = self.add_argument_group(title)
        for f in fields(cls):
            if "help" in f.metadata:
                switch = argparse.BooleanOptionalAction if f.default else "store_true"
                kind = dict(action=switch) if f.type is bool else dict(type=f.type)
                settings = dict(**kind, default=f.default, **f.metadata) | change.get(f.name, {})
                group.add_argument("--" + f.name.replace("_", "-"), **settings)

    def values(self, cls, args):
        """The parsed flags of cls, by field name."""
        return {f.name: getattr(args, f.name) for f in fields(cls) if "help" in f.metadata}


def run_cli(main):
    """Call main(). What the user got wrong is one line on stderr and exit status 2, Ctrl-C is 130, and 141 that who read our output
    stopped (`| head`), as of any program; none is a traceback."""
    try:
        try:
            main()
        finally:  # also where --help has ended it
            if sys.stdout:
                sys.stdout.flush()
    except BrokenPipeError:
        no_more_output()
        sys.exit(141)
    except (ValueError, KeyError, OSError, torch.OutOfMemoryError) as e:
        if isinstance(e, OSError):  # maybe a full disk's
            no_more_output()
        message = f"{os.path.basename(sys.argv[0])}: {e.args[0] if isinstance(e, KeyError) else e}"
        if World.first_to_say(message):
            print(message, file=sys.__stderr__)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def no_more_output():
    """What is left in the buffer of stdout goes nowhere: where it cannot be written Python would complain again as it ends."""
    if sys.__stdout__:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())


def asked():
    """The command line -> (its flags, an EngineConfig, how many drafts, a Request); what is wrong with it is said before a model is loaded."""
    parser = Parser(description="Generate text from a prompt with the sarathi engine.",
                    epilog='Example: python sarathi.py --prompt "def fib(" --max-new-tokens 200 --temperature 0.5')
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", help="text to continue")
    what.add_argument("--tokens", help="the prompt as token ids, 1,2,3 (for a model without a tokenizer)")
    parser.add_argument("--adapter", help="a PEFT folder: LoRA weights to use with the model")
    add_model_flags(parser, "tiny")
    add_draft_flags(parser)
    parser.add_fields(Request, "the request")
    parser.add_fields(EngineConfig, "the engine (here it has one request: order, cluster, fair, slo and max_waiting choose among several)")
    parser.set_defaults(temperature=0.6, max_new_tokens=256)
    args = parser.parse_args()
    config, spec = EngineConfig(**parser.values(EngineConfig, args)), draft_spec(args)
    request = Request(parse_tokens(args.tokens) if args.prompt is None else [], adapter=args.adapter, **parser.values(Request, args))
    check_numbers(request)
    for knob in ("tpot", "stall"):
        if getattr(config, knob) and args.scheduler != "autopilot":
            raise ValueError(f"{knob} = {getattr(config, knob):g} with scheduler = {args.scheduler!r}: only autopilot keeps to it")
    if args.prompt == "":
        raise ValueError("empty prompt: at least one character is needed")
    if args.adapter is not None and not os.path.isdir(args.adapter):
        raise FileNotFoundError(f"adapter folder {args.adapter} does not exist")
    return args, config, spec, request


def main():
    """python sarathi.py --prompt "...": stream one request's text, then say how fast it was."""
    args, config, spec, request = asked()
    world = join_world(args)
    model, tokenizer = load_model(args.model, args.dtype or default_dtype(args.device), world=world)
    if args.prompt is not None and tokenizer is None:
        if os.path.isdir(args.model):
            load_tokenizer(Path(args.model))  # says what is wrong
        raise ValueError(f"model {args.model!r} has no tokenizer: give --tokens 1,2,3 instead of --prompt")
    say = tokenizer.stream() if tokenizer else lambda tokens: "".join(f"{t} " for t in tokens)
    engine = make_engine(model, draft=load_draft(args.draft, model), spec=spec, **vars(config))
    if args.adapter:
        engine.add_adapter(args.adapter, args.adapter)
    if tokenizer:
        request.prompt, request.stop = request.prompt or tokenizer.encode(args.prompt), tokenizer.stop
    request.arrival = engine.clock.now()
    engine.add(request)
    print(args.prompt or "", end="", flush=True)
    engine.run(lambda event: print(say(event.tokens), end="", flush=True))
    print()
    if request.times:
        print(f"{len(request.prompt)} + {len(request.output)} tokens, {len(request.output) / (request.times[-1] - request.arrival):.0f} tokens/s, "
              f"TTFT {request.ttft * 1e3:.1f} ms, TPOT {request.tpot * 1e3:.1f} ms", file=sys.stderr)
        if args.draft and spec != "off":
            print(about_drafts(request), file=sys.stderr)
    elif request.done:
        print(f"no token: {ENDS[request.state]}", file=sys.stderr)
    if world.size > 1:
        print(about_ranks(model), file=sys.stderr)
    if not request.done:
        print("interrupted", file=sys.stderr)
        raise KeyboardInterrupt


def add_model_flags(parser, model):
    """What to run, and where: the same for both command lines."""
    parser.add_argument("--model", default=model, help=f"a Hugging Face folder, or one of {', '.join(PRESETS)} (random weights but for tiny)")
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and cache; not given: bfloat16 where it is fast, else float16 on a GPU, float32 on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"), help="where to run")
    parser.add_argument("--tp", type=int, default=1, help="devices that share every layer (tensor parallelism), a process each: see torchrun")
    parser.add_argument("--pp", type=int, default=1, help="groups of devices that share out the layers (pipeline parallelism), likewise")


def join_world(args):
    """The World of --tp and --pp, of which only rank 0 has anything to print."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device = 'cuda': this torch ({torch.__version__}) sees no GPU, take --device cpu")
    world = World.start(checked("tp", args.tp, int, 1), checked("pp", args.pp, int, 1), args.device)
    if world.rank:
        sys.stdout = sys.stderr = open(os.devnull, "w")
    return world


def add_draft_flags(parser):
    """--draft and --spec; bench.py's experiments have their own drafts."""
    parser.add_argument("--draft", help=f"where drafts come from: {', '.join(PROPOSERS)}; a draft model, named as for --model; draft or heads, those "
                                        "trained with tiny; or a folder of Heads")
    parser.add_argument("--spec", help=f"how many: a number, one of {', '.join(POLICIES)}, or the candidates of each head as 3,2,2; not given: "
                                       "goodput (or autopilot, if that is the scheduler) with a draft, off without")


def draft_spec(args):
    """What --spec means beside --draft and --scheduler; a bad value of either is said before a model is loaded."""
    own = args.scheduler if args.scheduler in POLICIES and not are_heads(args.draft) else "goodput"  # autopilot is both, but knows no trees
    spec = args.spec or (own if args.draft else "off")
    if make_policy(spec, make_scheduler(args.scheduler)).n_spec and not args.draft:
        raise ValueError(f"--spec {spec} without --draft: give {', '.join(PROPOSERS)} or a model")
    if args.draft is not None and args.draft not in ("heads", "draft", *PROPOSERS, *PRESETS) and not os.path.isdir(args.draft):
        raise FileNotFoundError(f"draft = {args.draft!r}: one of {', '.join(PROPOSERS)}, heads, draft, a preset ({', '.join(PRESETS)}) or a folder")
    return spec


def are_heads(name):
    """Whether --draft means Heads."""
    return name == "heads" or bool(name) and os.path.isfile(os.path.join(name, "heads.json"))


def load_draft(name, model):
    """--draft: None, a Proposer's name, Heads, or a model like the target in type and place."""
    tiny, c = preset("tiny"), model.config  # whose own drafts would be trained first
    if name == "heads" and c.n_embd != tiny.n_embd:
        raise ValueError(f"draft = 'heads': those are for tiny's states of {tiny.n_embd} numbers, this model's have {c.n_embd}")
    if name == "draft" and c.vocab_size != tiny.vocab_size:
        raise ValueError(f"draft = 'draft': that is for tiny's vocabulary of {tiny.vocab_size}, this model's is {c.vocab_size}: give ngram or a folder")
    if are_heads(name):
        return load_heads(name, model.dtype, str(model.device))
    if name is None or name in PROPOSERS:
        return name
    return load_model(name, model.dtype, str(model.device))[0]


def about_drafts(r):
    """One line on what drafts did: acceptance, tokens per iteration, and goodput, the tokens per second after the first one."""
    share = f", {r.n_accepted / r.n_drafted:.0%} accepted" if r.n_drafted else ""
    rate = (len(r.times) - 1) / max(1e-9, r.times[-1] - r.times[0])
    return f"{r.n_drafted} drafts{share}, {len(r.times) / len({*r.times}):.2f} tokens per iteration, goodput {rate:.0f} tokens/s"


def about_ranks(model):
    """One line on what the processes of a world have of the model, and sent."""
    world, token = model.world, model.config.page_bytes(model.dtype.itemsize)
    weights, sent = zip(*world.each((model.n_bytes, sum(world.sent.values()))))
    each = lambda sizes: ", ".join(f"{size / 1e6:.1f}" for size in sizes)
    return f"ranks 0 .. {world.size - 1}: {each(weights)} MB of weights, {token} bytes of cache per token, {each(sent)} MB sent"


def parse_tokens(text):
    """"1,2,3" -> [1, 2, 3]"""
    try:
        return [int(t) for t in text.split(",")]
    except ValueError:
        raise ValueError(f"--tokens {text!r}: must be whole numbers with commas between them") from None


if __name__ == "__main__":
    run_cli(main)
