"""The papers' tables and figures, measured on this machine or simulated on hardware you lack.

    python bench.py --chunk 256                      the main job: what users feel, simulated and
                                                     here, SARATHI's Tables 4 and 2, and what
                                                     this machine can do at most
    python bench.py fig9 --hardware a6000 --plot .   one figure, simulated: a table and a picture
    python bench.py online --rate 4 --prompt 8..512  online serving, four requests per second
    python bench.py online --scheduler my.py:Mine    your scheduler next to the built-in ones
                                                     (--schedulers NAMES: next to these alone)
    python bench.py scoreboard                       the papers' numbers next to ours
    python bench.py list                             all experiments, and where they run

An experiment is a function that measures something in a Place: this machine, or simulated hardware.
It yields Rows: cells of a table, points of a picture. CLAIMS are the papers' numbers for them.
Tables, JSON, pictures and the scoreboard follow from both. In reading order:

    1. an experiment    Claim, Row and Place, all that the others are written with; then jobs, the
                        requests that will come, and serve(), which has an engine serve them
    2. the main job     users, and SARATHI's Tables 4 and 2
    3. SARATHI          its figures and a pipeline, and TNG's comparison of schedulers
    4. S-LoRA           its figures; the papers' servers, as cost models and schedulers
    5. SmartSpec        its figures, trees of drafts; drafts and the simulator, measured here
    6. yours            online serving, capacity, attainment, and traces of requests
    7. what comes out   tables, pictures, JSON, the scoreboard
    8. the command line

What an experiment finds in its place:

    model                  a GPT; simulated, a CostModel
    B                      requests in a batch
    lengths                tokens per request, prompt and output: a few to try
    full                   whether to run all settings of the paper, or a few (--size)
    seconds(shape, ...)    how long iterations take: a row per shape, a column per round
    jobs(rate, seconds)    makes jobs, requests that will come
    serve(jobs, B)         serves them by an engine; Metrics says how that went
    race(variants, jobs)   serves them by several engines alternately
    rounds(f, g, ...)      calls any functions alternately, for --seconds

The shape of an iteration: decodes (how many), each after `context` cached tokens, and a chunk of a
prompt after `past` cached tokens.

    place.seconds(dict(decodes=8, context=1000, chunk=256, past=0))    # an array (1, rounds)

Paste the next function into this file, after any other experiment. `python bench.py mine` measures
it here, and simulates it with --hardware: a table with a line for each chunk.

    @experiment("tokens of a chunk, C", "ms")
    def mine(place):
        "What an iteration with one chunk takes."
        for C in (64, 128, 256):
            yield Row("prefill (ms)", 1e3 * place.seconds(dict(chunk=C))[0], x=C)

Ten exercises. Write yours in my.py, run `python bench.py` with the words below the exercise, and
beat the number. In 1, 2, 3, 7 and 8 the number is a median over five seeds. For 9 and 10 serve the
given jobs in a script of your own. Solutions: .ci/test_texts.py.
1. A scheduler with a median TTFT below 200 ms, at the same stalls (sarathi: 217 ms). What happens
   to its p99?
       online --hardware a100 --rate 3 --schedulers sarathi,my.py:Mine
2. An order of the queue that makes a share above 0.915 of the requests good (edf: 0.909, fcfs:
   0.791).
       online --hardware a100 --rate 3.3 --ttft 1 --schedulers sarathi --order edf,my.py:mine
3. A Policy with a median TPOT below 8 ms that never asks for a price (goodput asks: 7.58).
       online --hardware a100 --schedulers sarathi --spec my.py:Mine
4. A proposer whose drafts are accepted more often than those of prompt lookup (0.50 to 0.56), three
   at a time, for one request to the trained tiny model.
       spec_here --draft my.py:Mine
5. A GPU of your own: an A100 with one number doubled. It must serve at least 1.3 times as many
   requests/s as a plain one (2.08, 2.39 and 2.67 with --seed 0, 1 and 2), with each of these seeds.
   Compare equal seeds, because other arrivals alone gain as much.
       capacity --hardware my.json --schedulers sarathi_serve --seed 0
6. Attention with a sliding window of 8 tokens, in place of model.attention. The logits of a Mistral
   folder must be within 0.0001 of transformers' (without the window they differ by 0.01 and more).
   There is no command: write a script.
7. A memory that shares the pages of prompts with equal beginnings: a median TTFT below 200 ms
   (without it: 412), and the same tokens, which the solution's test compares. Requests then start
   with n_past, their cached tokens, above 0: see Memory in sarathi.py.
       online --hardware a100 --schedulers sarathi --shared 1000 --memory my.py:Mine
8. An order for that memory, where only half of the beginnings fit: a median TTFT below 800 ms
   (fcfs: 1893). n_past of a waiting request says how much of it is cached. What happens to the p99?
       online --hardware a100 --schedulers sarathi --shared 3000 --prompt 8..512 --max-batch 6
       --rate 1.5 --memory my.py:Mine --order fcfs,my.py:mine
9. A router before two simulated A100s with LLaMA-13B. The share of good requests must be higher
   than if the GPUs get requests alternately (0.84, 0.96 and 0.96 for seeds 42, 43 and 44), for each
   seed. Begin with routed() in .ci/test_texts.py.
       gamma_jobs(3.5, 285, 2, prompt=(100, 3000), output=(20, 400), seed=42)
10. Prompts on one of these GPUs, outputs on the other: a median TTFT below 270 ms with 99 % of all
   stalls within 40 ms. K and V are sent at 50 GB/s, and stay on the first GPU until the second has
   free pages. A router and chunks of 128, 256 or 512 tokens meet only one target. And at 4
   requests/s?
       gamma_jobs(2, 150, prompt=(100, 3000), output=(20, 400), seed=42)
"""
import argparse
import csv
import gzip
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from functools import cache, partial
from io import StringIO
from itertools import chain, count, cycle, islice, pairwise, product
from operator import index
from pathlib import Path
from statistics import fmean, median
from threading import RLock
from typing import NamedTuple

# kernels before torch: it sets how torch's threads wait
from kernels import linear, pack
from model import Adapter, load_model, load_tokenizer, preset, reading, what_runs
from sarathi import (DECODE_ROWS, GEMM_FLOPS, GPU, GPUS, LORA_CALL, MAX_DRAFTS, NO_ADAPTER, ORDERS,
                     SARATHI_NAMES, SCHEDULERS, CostModel, CostRunner, EarlyAbort, Engine, Feed,
                     Goodput, Iteration, IterationStats, Metrics, ModelRunner, Policy, Proposer,
                     Request, Roofline, Sarathi, SarathiServe, Scheduler, Zeros, add_model_flags,
                     cell, check_choice, check_range, cluster, edf, fcfs, feeds_of, given_flags,
                     lcfs, n_params, object_in_file, run_command_line, table)

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from tqdm import tqdm

# -----------------------------------------------------------------------------
# 1. an experiment: claims, rows, places, jobs, and how they are served

class Claim(NamedTuple):
    """A number of a paper, which an experiment should find."""
    paper: float
    kind: str  # "value", "gain" over a baseline, "at least", "at most"
    # whether a constant of the cost model was fitted to it, or to the same number in other units
    fit: bool
    paper_source: str  # the paper, and where: its text, or the logs that its authors published
    setup: list  # how a number of S-LoRA was run: arguments of slora()
    run: str  # claims on one run have the same name here
    note: str  # why ours differs, as far as we know; a miss begins with the reason

    def holds(self, ours):
        """A value holds within 15 %, a gain within 30 % of gain - 1, a bound as it says."""
        if self.kind == "at least":
            return ours >= self.paper
        if self.kind == "at most":
            return ours <= self.paper
        if self.kind == "gain":
            return abs((ours - 1) / (self.paper - 1) - 1) <= 0.30
        return abs(ours / self.paper - 1) <= 0.15

ASSETS = Path(__file__).with_name("assets")

def read_claims():
    """{experiment: {(panel, series, x): Claim}} of assets/claims.csv. Numbers that follow from
    others are left out, such as totals of Table 2, or throughput at low load, which is that of the
    arrivals. So are figures without given numbers or settings [S-LoRA Fig. 7], and vLLM-packed
    [S-LoRA Table 3], because we cannot explain its logs: 8.14, 10.08, 7.73 and 2.04 requests/s for
    1, 2, 4 and 5 processes."""
    claims = defaultdict(dict)
    with open(ASSETS / "claims.csv", newline="", encoding="utf8") as file:
        for line in csv.DictReader(file):
            at = line["panel"], line["series"], json.loads(line["x"] or '""')
            setup = [json.loads(word) if word[0].isdigit() else word
                     for word in line["setup"].split()]
            line |= dict(paper=float(line["paper"]), fit=line["fit"] == "fit", setup=setup)
            claims[line["experiment"]][at] = Claim(*(line[name] for name in Claim._fields))
    return claims

CLAIMS = read_claims()
EXPERIMENTS = {}

class Hardware(NamedTuple):
    """What is simulated."""
    model: str
    gpu: str
    tp: int = 1
    system: str = "sarathi"  # this engine; or a name in SYSTEMS

    def cost(self, config=None):
        """Its CostModel, for the model's config or another one."""
        config = config or preset(self.model)
        if self.system == "sarathi":
            return CostModel.roofline(config, self.gpu, self.tp)
        return ServingSystem(config, self.gpu, self.tp, self.system)

A6000_13B = Hardware("llama-13b", "a6000")
A100_13B = Hardware("llama-13b", "a100", 1, "lightllm")
A100_7B = Hardware("llama-7b", "a100", 1, "vllm")
MAX_B = {1024: 18, 2048: 10, 3072: 6}  # length -> the largest batch that fits [SARATHI §5.1]

class Row(NamedTuple):
    """A cell of a table. With an x it is a point of a picture, too. One of Table 4, measured in two
    rounds: Row("decode speedup", [5.4, 6.1], "", 1024)"""
    panel: str  # of the picture; most tables have a column for each
    ours: float | list  # a number, or one per round
    series: str = ""  # a line of the table, or of the picture
    x: float | str = ""

class Experiment(NamedTuple):
    """A generator of rows, and how they are shown."""
    run: Callable  # Place -> Rows
    about: str
    x: str = ""  # label of the x axis; tables have its last word alone
    y: str = ""
    on: Hardware = A6000_13B  # where the paper's numbers hold
    only: str = ""  # "measured" or "simulated", if it cannot be both
    # what a table has a column for, "panel" or "series": the table of rows with an x (curves), and
    # that of rows without (points). "": each row has a line of its own; "picture": no table
    curves: str = "panel"
    points: str = "panel"

    def rows(self, place):
        """The rows as dicts, with the paper's numbers where its hardware is simulated. Several
        rounds become their median, with half the distance between the quartiles as spread."""
        name = self.run.__name__
        claims = {}
        if place.on == self.on or self.only == "measured":
            claims = CLAIMS.get(name, {})
        for panel, ours, series, x in with_ratios(self.run(place), claims):
            low, middle, high = np.quantile(ours, (0.25, 0.5, 0.75)).tolist()
            texts = panel, series, f"{self.x.split()[-1]} = {x}" if x != "" else ""
            row = dict(experiment=name, what=", ".join(filter(None, texts)), at=[panel, series, x],
                       paper=None, ours=middle, spread=(high - low) / 2 or None,
                       source="simulated" if place.simulated else "measured",
                       machine=place.source)
            claim = claims.get((panel, series, x))
            if claim:
                row |= claim._asdict() | dict(inside=claim.holds(middle))
            yield row

def with_ratios(rows, claims):
    """Rows, then one for each claim about A / B, two series or two x: A's number over B's."""
    found = {}
    for row in rows:
        found[row.panel, row.series, str(row.x)] = row.ours
        yield row
    for at in claims:
        over, base = zip(*((str(name).split(" / ") * 2)[:2] for name in at))
        if over != base and {over, base} <= {*found}:
            panel, series, x = at
            yield Row(panel, np.divide(found[over], found[base]), series, x)

def experiment(*fields, **more):
    """Register a function as an experiment, under its own name. Fields: those of Experiment, from x
    on. The function's docstring is printed above its table."""
    def register(run):
        about = " ".join((run.__doc__ or "").split())  # none with python -OO
        EXPERIMENTS[run.__name__] = Experiment(run, about, *fields, **more)
        return run
    return register

class Job(NamedTuple):
    """A request that will come."""
    arrival: float  # seconds
    prompt: int  # tokens
    output: int
    adapter: str = None
    blocks: tuple = ()  # numbers of blocks that the prompt begins with; equal ones: equal tokens
    size: int = 8  # tokens of a block, 8 or more
    label: str = ""  # column "class" of a trace

def prompt_of(job, number, V):
    """Tokens, as bytes: the job's blocks, then a block of its own. A block is the digits of its
    number, the lowest first, then zeros. So prompts without common blocks differ early: at most
    their first two tokens are equal."""
    base = np.uint64(min(V, 256))
    numbers = np.array([n % 2**64 for n in (*job.blocks, ~number)], np.uint64)
    tokens = np.zeros((len(numbers), job.size), np.uint8)
    tokens[:, :8] = numbers[:, None] // base ** np.arange(8, dtype=np.uint64) % base
    return tokens.tobytes().ljust(job.prompt, b"\0")[:job.prompt]

def gamma_jobs(rate, seconds, cv=1.0, n_adapter=0, power=1.0,
               prompt=(8, 511), output=(8, 511), seed=42):
    """rate * seconds jobs [S-LoRA §7.2]. The times between arrivals are Gamma distributed: Poisson
    for cv = 1, equal for 0. Lengths are uniform, the popularity of adapters is a power law."""
    rng = np.random.RandomState(seed)
    n = max(1, int(rate * seconds))
    names = [None] * n
    if n_adapter:
        names = [str(int(x * n_adapter)) for x in rng.power(power, n)]
    prompts = rng.randint(prompt[0], prompt[-1] + 1, n)
    outputs = rng.randint(output[0], output[-1] + 1, n)
    pauses = np.full(n, 1 / rate)
    if cv >= 0.001:
        pauses = rng.gamma(1 / cv ** 2, cv ** 2 / rate, n)
    columns = [values.tolist() for values in (np.cumsum(pauses), prompts, outputs)]
    return list(map(Job, *columns, names))

def at_rate(jobs, rate=math.inf):
    """Jobs that arrived at one per second, at another rate, or all at time 0."""
    return [job._replace(arrival=job.arrival / rate) for job in jobs]

class Place:
    """Where experiments run: this machine, or simulated hardware."""
    def __init__(self, args, model, source, on=None):
        self.args = args
        self.model = model  # a GPT or a CostModel
        self.source = source
        self.on = on  # None: this machine
        self.simulated = isinstance(model, CostModel)
        self.rows = []  # of an experiment
        self.requests = []  # of online, for JSON
        self.timelines = {}  # scheduler -> iterations of the last run with it
        self.bar = tqdm(disable=True)  # a tick per measurement
        self.B = args.max_batch or 6  # requests in a batch [SARATHI Table 4]
        self.jobs = partial(gamma_jobs, seed=42 + args.seed)
        # grids of two sizes: the papers', and a small one
        self.full = args.size == "full" if args.size else self.simulated
        longest = model.config.block_size
        room = longest if self.simulated else min(longest, self.room / self.B)
        lengths = MAX_B if on or args.device == "cuda" else (256, 384, 512)
        self.lengths = args.lengths or [L for L in lengths if L <= room] or [longest]
        for L in self.lengths:
            check_range("--lengths", L, 64, longest)
        # (length, requests of it in a batch): of the paper, or --max-batch
        largest = {} if args.lengths or not on else MAX_B
        self.batches = [(L, largest.get(L, self.B)) for L in self.lengths]

    def limit(self, n):
        """The most requests in a batch, --max-batch or else n. The line above the table says it"""
        B = self.args.max_batch or n
        self.source += f"; up to {B} requests in a batch"
        return B

    @property
    def room(self):
        """Tokens that fit the memory; here half of it, because some experiments hold two caches."""
        memory = self.model.free_memory() / (1 if self.simulated else 2)
        return int(memory // self.model.config.page_bytes(self.model.dtype.itemsize))

    def rounds(self, *functions, factor=1, results=None):
        """Call functions alternately, so that a slow moment of the machine hits all of them: for
        `factor` times --seconds, and at least two rounds. If there are more, the first one warms up
        and does not count. A simulator needs one round. Returns a list of results per function:
        those of `results`, with the new ones."""
        results = results or [[] for _ in functions]
        start = time.perf_counter()
        for n in count(1):
            for values in results if n == 3 else ():
                del values[0]
            turns = list(zip(functions, results))
            for function, values in turns if n % 2 else reversed(turns):
                values.append(function())
                self.bar.update()
            elapsed = time.perf_counter() - start
            if self.simulated or (n >= 2 and elapsed > factor * self.args.seconds):
                return results

    def seconds(self, *shapes, last=True):
        """Seconds of iterations of these shapes (see made_up_feeds): (n_shape, n_round)."""
        # engines must live until the rounds are done, because runners do not hold theirs
        made = [made_up_feeds(self.model, **shape, last=last) for shape in shapes]
        runs = [timed(engine.runner.run, feeds, clock=engine.clock.now)
                for feeds, engine in made]
        return np.array(self.rounds(*runs))

    def operators(self, seconds=None, last=True, **shape):
        """{operator: seconds} of an iteration of this shape; measured, seconds of each round.
        seconds: of the whole iteration, if known."""
        feeds, engine = made_up_feeds(self.model, **shape, last=last)
        if self.simulated:
            return self.model.split(self.model.stats(feeds))
        kv = engine.runner.kv
        batch = engine.runner.pack(feeds).to(kv, self.model.config.n_head)
        rounds = []
        for _ in range(3):
            let_the_host_run_ahead()
            marks = [("", moment())]
            self.model.forward(batch, kv,
                               lambda operator: marks.append((operator, moment())))
            rounds.append(marks)
        wait_for_gpu()
        parts = Counter()
        for marks in rounds[1:]:  # in the first one kernels are compiled
            for (_, before), (operator, after) in pairwise(marks):
                parts[SARATHI_NAMES.get(operator, operator)] += seconds_between(before, after)
        seconds = self.seconds(shape, last=last)[0] if seconds is None else seconds
        return {operator: part * seconds / parts.total() for operator, part in parts.items()}

    def serve(self, jobs, B, clients=0, adapters=(), n_end=0,
              n_page=0, spec="off", **options):
        """Serve jobs in batches of up to B requests, by an engine with this run's flags."""
        scheduler = options.pop("scheduler", self.args.scheduler)
        if options.get("order") == "edf":
            options["order"] = edf(self.args.ttft)
        n_page = n_page or B * max(job.prompt + job.output for job in jobs)
        options.setdefault("record", self.timeline(name_of(scheduler)))
        engine = Engine(self.model, scheduler, self.args.chunk, B, n_page, spec=spec,
                        seed=self.args.seed, **options)
        return serve(engine, jobs, clients, adapters, n_end)

    def timeline(self, name):
        """What an engine records its iterations in, if a picture or a trace is wanted."""
        if self.args.plot or self.args.trace:
            self.timelines[name] = deque(maxlen=60000)
        return self.timelines.get(name)

    def race(self, variants, *loads, **common):
        """Serve lists of jobs by engines with different options, {name: options}, alternately.
        Yields (name, [Metrics]). If it is stopped, what has been served is yielded first."""
        results = [[] for _ in variants]
        try:
            for jobs in loads:
                functions = [partial(self.serve, **dict(jobs=jobs) | common | variant)
                             for variant in variants.values()]
                self.rounds(*functions, factor=3, results=results)
        finally:
            yield from filter(all, zip(variants, results))  # if it has a run

def simulate(args, on):
    """A Place of hardware you lack."""
    config = preset(on.model)
    config = replace(config, block_size=args.context or config.block_size)
    return Place(args, on.cost(config), f"{on.model} on {on.tp} x {on.gpu}, simulated", on)

load_once = cache(load_model)

def this_machine(args, model=None):
    """A Place of this machine, with --model, or this one."""
    if args.context:
        raise ValueError(f"--context {args.context}: is of simulated models, add --hardware")
    name = args.model or model or "llama-30m"
    # the paper's model, if a cache fits next to its weights
    if args.device == "cuda" and not (args.model or model):
        room = 0.3 * torch.cuda.mem_get_info()[1]  # in parameters of two bytes
        for larger in ("tinyllama-1.1b", "llama-7b", "llama-13b"):
            if preset(larger).n_params < room:
                name = larger
    model = load_once(name, args.dtype, args.device, args.seed)
    return Place(args, model, what_runs(name, model))

def choose_places(args, name):
    """Where an experiment runs: here, or on --hardware. The main job first simulates the paper's
    hardware, then measures here."""
    what = EXPERIMENTS[name]
    if args.hardware and what.only == "measured":
        raise ValueError(f"{name} can only be measured: leave out --hardware")
    if what.on.system == "lightllm" and (args.model or args.tp > 1):
        raise ValueError(f"{name} has the paper's models: leave out --model and --tp")
    if args.hardware or what.only == "simulated":
        return [simulate(args, what.on._replace(
            model=args.model or what.on.model,
            gpu=args.hardware or what.on.gpu,
            tp=max(args.tp, what.on.tp)))]
    # text needs a trained model
    here = this_machine(args, "tiny" if name == "spec_here" else None)
    if args.experiments or name == "ceilings":
        return [here]
    own_lengths = argparse.Namespace(**vars(args) | dict(lengths=None))
    return [simulate(own_lengths, what.on), here]

def timed(function, *arguments, clock=time.perf_counter, **options):
    """A function that calls this one, and returns the seconds that it took."""
    def seconds():
        start = clock()
        function(*arguments, **options)
        wait_for_gpu()
        return clock() - start
    return seconds

def wait_for_gpu():
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()

def let_the_host_run_ahead():
    """Keep a GPU busy for some 50 ms. What is launched meanwhile then runs without pauses."""
    if torch.cuda.is_initialized():
        torch.cuda._sleep(10**8)  # cycles

def moment():
    """Now, as a time or as an event of a GPU."""
    if not torch.cuda.is_initialized():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event

def seconds_between(before, after):
    if isinstance(before, float):
        return after - before
    return before.elapsed_time(after) / 1e3

def made_up_feeds(model, decodes=0, context=0, chunk=0, past=0, chunks=1, last=True):
    """(feeds, engine) of an iteration of this shape, of requests that were never added: decodes,
    each after `context` cached tokens, and chunks of `chunk` tokens, each after `past`. last:
    whether chunks end their prompts, so that all feeds sample a token."""
    sizes = [(context, 1)] * decodes
    if chunk:
        sizes += [(past, chunk)] * chunks
    n_page = sum(n_past + n + 2 for n_past, n in sizes)
    engine = Engine(model, chunk=decodes + chunk, max_batch=len(sizes), n_page=n_page)
    plan = []
    for n_past, n in sizes:
        n_prompt = n_past + n + (not last)
        request = Request([1] * n_prompt, 1, n_past=n_past)
        engine.memory.pool.reserve(request, request.max_len)
        plan.append((request, n))
    feeds = feeds_of(plan)
    if isinstance(engine.runner, ModelRunner):
        engine.runner.kv.normal_()
    if engine.model.world.device.type == "cuda":
        engine.runner.run(feeds)  # compiles kernels and records a graph
    return feeds, engine

def serve(engine, jobs, clients=0, adapters=(), n_end=0):
    """Serve jobs until all, or n_end of them, have ended, and return their Metrics. They come at
    their arrival; or with clients, each of which sends its next job when one has ended. adapters
    are dealt alternately to the jobs' names."""
    for name in {job.adapter for job in jobs} - {None}:
        engine.add_adapter(name, adapters[int(name) % len(adapters)])
    if engine.model.world.device.type == "cuda":
        warm_up(engine, jobs)
    start = engine.clock.now()
    requests = []

    def add(n):
        for job in jobs[len(requests):][:n]:
            arrival = None if clients else start + job.arrival
            prompt = prompt_of(job, len(requests), engine.model.config.vocab_size)
            request = Request(prompt, job.output, job.adapter, arrival=arrival,
                              notes={"class": job.label})
            requests.append(request)
            engine.add(request)
            if engine.record is not None:
                arrived = Feed(request, 0, 0, 0)  # marks the arrival, for pictures
                engine.record.append(Iteration(request.arrival, request.arrival, [arrived]))

    add(clients or len(jobs))
    if engine.clock.now() > start:  # making requests takes no time on a real clock
        engine.clock.start += engine.clock.now() - start
    while engine.requests:
        for event in engine.step():
            if event.finished:
                add(1)
        if n_end and len(requests) - len(engine.requests) >= n_end:
            for id in [*engine.requests]:
                engine.abort(id)
    return Metrics(requests, start)

def warm_up(engine, jobs):
    """Compile kernels, record graphs, and serve the first prompts, to fill caches."""
    engine.warm()
    first = jobs[:2 * engine.max_batch]
    n_token = min(4, *(job.output for job in first))
    prompts = [b"\1" * job.prompt for job in first]
    engine.generate(prompts, n_token, [job.adapter for job in first])
    if engine.record is not None:
        engine.record.clear()

def latency_rows(runs, *at):
    """What users feel of these runs."""
    for figure in ("tokens/s", "output tokens/s", "TTFT p50 ms", "TPOT p50 ms"):
        yield Row(figure, [run.figures[figure] for run in runs], *at)
    yield Row("longest stall ms", [1e3 * max(run.stalls) for run in runs], *at)

def name_of(part):
    """Of a scheduler, an order or a policy, for tables."""
    if type(part) in (Sarathi, SarathiServe):
        return f"C = {part.chunk}"
    return part if isinstance(part, str) else getattr(part, "__name__", type(part).__name__)

def by_scheduler(schedulers):
    """Variants for a race between schedulers (names, objects or classes)."""
    return {name_of(scheduler): dict(scheduler=scheduler) for scheduler in schedulers}

# -----------------------------------------------------------------------------
# 2. the main job

@experiment(on=Hardware("llama-13b", "a100"))
def users(place):
    """You read an answer while two long prompts arrive. Who waits, and how long? A short prompt
    with a long output comes again and again, and each time the two long ones follow. All schedulers
    get the same arrivals: static batching, prefill-first, and sarathi with chunks of --chunk, for
    long prompts of 1,024 tokens or more also of 512. A stall is the time between two tokens of an
    output. tokens/s counts prompts too. Simulated numbers are the same on every machine."""
    own, P = long_prompts(place)
    B = own.limit(6)
    prefill = dict(chunk=P)
    decodes = dict(decodes=3, context=P // 4)
    # seconds of a long prompt, and of an iteration of decodes
    unit, decode = np.median(own.seconds(prefill, decodes), 1).tolist()
    n_out = min(int(2 * unit / decode), P // 2)
    short = Job(0.0, P // 5, max(2, n_out))
    long = Job(0.0, P, 8)
    n_group = 6 if place.simulated else 2
    # the load is 0.65 of what sarathi serves when all come together
    jobs = [short, long, long] * n_group
    most = own.serve(jobs, B, scheduler="sarathi")
    period = most.seconds / n_group / 0.65
    jobs = []
    for i in range(n_group):
        jobs.append(short._replace(arrival=period * i))
        # they come during the short one's output
        later = period * i + unit / 2
        jobs += 2 * [long._replace(arrival=later)]
    jobs.append(short._replace(arrival=period * n_group))  # else the last group would be alone
    place.source = (f"{own.source}; long prompts of {P:,} tokens, a group of three requests every "
                    f"{period:.2g} s, 0.65 of what sarathi could serve")
    variants = by_scheduler(("static", "prefill_first", "sarathi"))
    if place.args.chunk != 512 and P >= 1024:
        variants["sarathi, C = 512"] = dict(scheduler=Sarathi(512))
    for name, runs in own.race(variants, jobs, B=B):
        yield from latency_rows(runs, name)
        if not own.simulated:
            yield Row("runs", len(runs), name)

LONG = 0.22  # seconds that a long prompt takes

def long_prompts(place, larger="llama-124m"):
    """(a Place, tokens) of a prompt that takes LONG. A larger model if this one is too fast."""
    P = 5 * max(place.lengths) // 8
    if place.simulated:
        return place, P
    unit = np.min(place.seconds(dict(chunk=P)))
    # a batch of them must fit
    longest = min(place.model.config.block_size * 9 // 10, place.room // place.B - 8)
    wanted = int(P * LONG / unit) // 64 * 64
    P = max(P, min(wanted, longest))
    may_change = place.args.device == "cpu" and not place.args.model
    if P == longest and larger and may_change:
        unit = np.min(place.seconds(dict(chunk=P)))
        if unit < 0.9 * LONG:
            other = this_machine(place.args, larger)
            other.bar = place.bar
            return long_prompts(other, larger=None)
    return place, P

@experiment("tokens per request, L", "times")
def table4(place):
    """[SARATHI Table 4] How much cheaper is a decode in the same iteration as a chunk, and how much
    throughput does that gain over request-level batching? Requests have the ratio of prompt to
    output (P:D) at which every iteration has a chunk and a full batch of decodes. Batches have six
    requests, or --max-batch; LLaMA-33B's ten, five and three. The gain is large where decodes take
    much of the time, as on a GPU. On a CPU they hardly do."""
    cases = [("", place, L, place.B) for L in place.lengths]
    if place.simulated:
        other = simulate(place.args, Hardware("llama-33b", "a100"))
        for L, B in (1024, 10), (2048, 5), (3072, 3):
            cases.append(("LLaMA-33B, A100", other, L, B))
    for name, own, L, B in cases:
        yield Row("decode speedup", decode_speedup(own, L, B), name, L)
        P, D = halves(L, chunk=own.args.chunk, B=B)
        gain, = gains(own, P, D, B, own.args.scheduler)
        yield Row("throughput", gain, name, L)

def decode_speedup(place, L, B):
    """How many times cheaper a decode is next to a chunk than in a batch of B [SARATHI §5.1]."""
    d = B - 1
    chunk = min(place.args.chunk, L) - d
    alone, both, prefill = place.seconds(
        dict(decodes=B, context=L - 1),
        dict(decodes=d, context=L - 1, chunk=chunk),
        dict(chunk=chunk))
    return alone / B / ((both - prefill) / d)

def gains(place, P, D, B, *schedulers):
    """How many times as fast as request-level batching schedulers serve equal requests of P + D
    tokens: (n_scheduler, n_round). Of a run count the seconds from the end of request number
    `first` to that of number `last`, because all batches are full between them. Static batches
    would need (last - first) / B times the seconds of one."""
    first = B
    last = B + 3
    if place.simulated:
        first = 3 * B
        last = 6 * B
    jobs = [Job(0.0, P, D + 1)] * (last + B)  # D decodes, because the prompt gives the first token
    functions = [partial(place.serve, jobs[:B], B, scheduler="static")]
    functions += [partial(place.serve, jobs, B, scheduler=scheduler, n_end=last)
                  for scheduler in schedulers]
    static, *others = place.rounds(*functions, factor=3)
    batch = np.array([run.seconds for run in static])
    middle = [[run.ends[last - 1] - run.ends[first - 1] for run in runs]
              for runs in others]
    return (last - first) / B * batch / middle

def halves(L, pd=0, chunk=0, B=1):
    """Cut L tokens into (prompt, output) with this ratio of P:D; 0: chunk / (B - 1), at which
    decodes piggyback perfectly [SARATHI §4.4]. The prompt is whole chunks, if some are near."""
    pd = pd or chunk / max(1, B - 1)
    D = max(1, round(L / (1 + pd)))
    P = max(1, L - D)
    piece = chunk - (B - 1)
    whole = piece * round(P / piece) if piece > 0 else 0
    near = abs(whole - P) <= max(1, 0.02 * L)
    if near and 0 < whole < L:
        P = whole
    return P, L - P

@experiment()
def table2(place):
    """[SARATHI Table 2] Where does the time of an iteration go, if it has only a prompt, only
    decodes, or both (decode-maximal)? The prompt has 1,024 tokens, or the longest length. It comes
    alone or with three decodes; without it there are four. Next to a prompt a decode costs what it
    adds."""
    L = min(1024, max(place.lengths))
    batches = {
        "prefill-only": dict(chunk=L),
        "decode-only": dict(decodes=4, context=L - 1),
        "decode-maximal": dict(decodes=3, context=L - 1, chunk=L - 3)}
    totals = place.seconds(*batches.values())
    for (name, batch), seconds in zip(batches.items(), totals):
        operators = place.operators(seconds, **batch)
        attention = operators.pop("attn")
        yield Row("linear (ms)", 1e3 * sum(operators.values()), name)
        yield Row("attn (ms)", 1e3 * attention, name)
    prefill, decode, both = 1e3 * totals
    yield Row("decode (ms)", decode / 4, "decode-only")
    yield Row("decode (ms)", (both - prefill) / 3, "decode-maximal")

@experiment()
def ceilings(place):
    """What can this machine do at most? Its matrix products limit prompts, its memory limits
    decodes. The ridge point is the number of tokens in an iteration at which computing with a
    weight takes as long as reading it."""
    flops, bandwidth = measure_ceilings(place)
    yield Row("matrix products (TFLOP/s)", flops / 1e12)
    yield Row("weights read (GB/s)", bandwidth / 1e9)
    yield Row("ridge point (tokens)", flops * place.model.dtype.itemsize / 2 / bandwidth)

def measure_ceilings(place):
    """(FLOP/s, bytes/s) of a matrix times many rows, and of weights that fit no cache times one."""
    model = place.model
    if place.simulated:
        return GEMM_FLOPS * model.flops, model.bandwidth
    C = 1024 if model.device.type == "cpu" else 4096
    N = 512 if model.device.type == "cpu" else 4096
    options = dict(dtype=model.dtype, device=model.device)
    weight = torch.randn(4 * C, C, **options)
    weights = [pack(weight.clone()) for _ in range(48)]
    one = torch.randn(1, C, **options)
    many = torch.randn(N, C, **options)

    def products(x, weights):
        for weight in weights:
            linear(x, weight)
    read = timed(products, one, weights)
    multiply = timed(products, many, weights[:4])
    reading, multiplying = np.median(place.rounds(read, multiply), 1).tolist()
    n = 4 * C * C  # weights of a matrix
    return 4 * 2 * N * n / multiplying, 48 * n * model.dtype.itemsize / reading

# -----------------------------------------------------------------------------
# 3. SARATHI's figures and a pipeline, and TNG's

@experiment("decodes in the batch, B", "times")
def fig3(place):
    """[SARATHI Fig. 3] What a decoded token costs over a prefilled one."""
    L = place.lengths[0]
    sizes = (1, 2, 4, 8, 12, 18)
    batches = [dict(decodes=B, context=L - 1) for B in sizes]
    prefill, *decodes = place.seconds(dict(chunk=L), *batches)
    for B, seconds in zip(sizes, decodes):
        yield Row("decode over prefill", median(seconds) / B / (median(prefill) / L), x=B)
    operators = place.operators(chunk=L)
    yield Row("share of others", operators["others"] / sum(operators.values()))

@experiment("tokens, or decodes, N", points="")
def fig4(place):
    """[SARATHI Fig. 4] Prefills need some hundred tokens to use a GPU well, decodes this many
    requests. Of one layer."""
    L = place.lengths[0]
    prefill = {}  # tokens of a chunk -> tokens/ms
    decode = {}  # batch size -> tokens/ms
    for n in (64, 128, 256, 512, 1024):
        if n <= L:
            prefill[n] = layer_rate(place, n, chunk=n)
            yield Row("prefill (tokens/ms)", prefill[n], x=n)
    for B in [2 ** i for i in range(10)]:
        if place.simulated or B * L <= place.room:
            decode[B] = layer_rate(place, B, decodes=B, context=L - 1)
            yield Row("decode (tokens/ms)", decode[B], x=B)
    for n in {256, 512} & {*prefill}:
        yield Row(f"prefill at {n}", prefill[n] / max(prefill.values()), "over the peak")
    high = 0.95 * max(decode.values())
    enough = [B for B, rate in decode.items() if rate > high]
    yield Row("decode batch", min(enough), "at 95 % of the peak")
    if place.simulated:  # wider matrices fill a GPU with fewer tokens [SARATHI §4.2]
        cost = CostModel.roofline(replace(preset("gpt3-175b"), n_layer=1), "a100")
        rates = {}
        for n in prefill:
            feeds = [Feed(NO_ADAPTER, 0, n, 0)]
            rates[n] = n / cost.seconds(cost.stats(feeds))
        yield Row("prefill at 256", rates[256] / max(rates.values()), "GPT-3 on an A100")

def layer_rate(place, n, **shape):
    """Tokens/ms of one layer, in an iteration of n tokens."""
    seconds = np.median(place.seconds(shape, last=False))
    return n * place.model.config.n_layer / seconds / 1e3

@experiment("tokens in the batch, N", "ms")
def fig7(place):
    """[SARATHI Fig. 7] Tile quantization: one token more than whole tiles costs another tile."""
    tiles = (32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024)
    sizes = sorted({*tiles, *(tile + 1 for tile in tiles)})
    sizes = [n for n in sizes if n <= max(place.lengths)]
    chunks = [dict(chunk=n) for n in sizes]
    rounds = place.seconds(*chunks, last=False)
    for n, seconds in zip(sizes, rounds):
        yield Row("iteration (ms)", 1e3 * seconds, x=n)

@experiment("batch size, B", "times", curves="series", points="")
def fig8(place):
    """[SARATHI Fig. 8] Decode speedup over batch size and length, and the batches that fit."""
    speedups = []
    for L, most in place.batches:
        for B in range(2, most + 1, 2):
            speedup = decode_speedup(place, L, B)
            yield Row("decode speedup by B", speedup, f"L = {L}", B)
            speedups.append(median(speedup))
    yield Row("decode speedup", max(speedups), "largest")
    yield Row("decode speedup", min(speedups), "smallest")
    for L in MAX_B if place.simulated else ():
        config = replace(place.model.config, block_size=L)
        cost = CostModel.roofline(config, place.on.gpu, place.on.tp)
        yield Row("largest batch", Engine(cost, max_batch=0).max_batch, f"L = {L}")

@experiment("ratio of prompt to output, P:D", "times request-level batching", curves="series",
            points="")
def fig9(place):
    """[SARATHI Fig. 9, 11] Throughput over request-level batching by P:D ratio, for chunk sizes and
    for Orca's best and worst case."""
    chunks = {place.args.chunk}
    if place.simulated:
        chunks = sorted(chunks | {128, 256, 512})
    ratios = (5, 50)
    if place.full:
        ratios = (1, 2, 3, 5, 7, 10, 20, 40, 50, 64, 80, 100, 128, 160, 200)
    for L, B in place.batches:
        variants = {f"C = {C}": Sarathi(C) for C in chunks}
        # Orca at best feeds one whole prompt with all decodes, at worst all prompts together
        variants |= {"Orca, best": Sarathi(L + B), "Orca, worst": "orca"}
        shapes = {halves(L, pd) for pd in ratios}
        shapes |= {halves(L, chunk=C, B=B) for C in chunks}
        curves = defaultdict(list)  # name -> (gain, P:D)
        for P, D in sorted(shapes):
            rounds = gains(place, P, D, B, *variants.values())
            for name, gain in zip(variants, rounds):
                yield Row(f"gain at L = {L}, B = {B}", gain, name, round(P / D, 2))
                curves[name].append((median(gain), P / D))
        for name, curve in curves.items():
            gain, pd = max(curve)
            yield Row(f"peak at L = {L}", gain, name)
            yield Row(f"P:D of the peak at L = {L}", pd, name)
        # at each P:D the best chunk's gain [SARATHI §5.1.3]
        of_chunks = zip(*(curves[f"C = {C}"] for C in chunks))
        middle = median(max(at)[0] for at in of_chunks)
        yield Row(f"median over P:D at L = {L}", middle, "best chunk")
        if place.simulated:
            pairs = zip(curves["C = 512"], curves["Orca, best"])
            least = min(large / orca for (large, _), (orca, _) in pairs)
            yield Row(f"least over P:D at L = {L}", least, "C = 512 / Orca")

@experiment("batch size, B", "time over SARATHI's", only="simulated", curves="series")
def fig10(place):
    """[SARATHI Fig. 10] Seconds by operator, request-level batching over SARATHI, where decodes
    piggyback perfectly, without a run's start and end. All linear operators have one line."""
    ratios = defaultdict(list)
    for C, L in product((256, 512), MAX_B):
        for B in sorted({2, 6, MAX_B[L]}):
            P, D = halves(L, chunk=C, B=B)
            chunk = C - B + 1
            ours = dict(decodes=B - 1, context=L - 1, chunk=chunk, past=P // 2)
            mixed = place.operators(**ours)
            prefill = place.operators(chunk=P, chunks=B)
            decode = place.operators(decodes=B, context=L - D // 2)
            for name in ("preproj", "attn", "postproj", "ffn_ln1"):
                alone = (prefill[name] + D * decode[name]) / B
                ratios[name].append(alone / (mixed[name] * P / chunk))
                yield Row(f"C = {C}, L = {L}", ratios[name][-1], name, B)
    for name, operator in (("ffn", "ffn_ln1"), ("projections", "preproj")):
        yield Row(name, min(ratios[operator]), "smallest")
        yield Row(name, max(ratios[operator]), "largest")

class StageRunner(CostRunner):
    """Runner of a Pipeline's lane. flow() says when an iteration has left the last stage."""
    def __init__(self, engine, model, flow):
        super().__init__(engine, model)
        self.flow = flow

    def run(self, feeds):
        start = self.clock.t
        new_tokens = super().run(feeds)
        self.clock.t = self.flow(feeds, start, self.clock.t)
        return new_tokens

class Pipeline:
    """A model whose layers are spread over n_stage stages, with as many micro-batches in flight
    [SARATHI §5.3]. A lane is an engine with pages and running requests of its own, but all lanes
    share one queue. cost: a roofline of all nodes. options: of a lane, with max_batch and n_page.

    A stage that idles between two micro-batches makes a bubble [SARATHI §3.2]. PB1: their prefills
    differ in length. PB2: one has a prefill, the other none. PB3: only their contexts differ."""
    def __init__(self, cost, n_stage, record=None, **options):
        self.model = cost
        self.record = record
        self.free_at = [0.0] * n_stage  # seconds at which each stage has done its micro-batches
        self.n_prompt = None  # prompt tokens of the last micro-batch
        self.bubbles = dict.fromkeys(("PB1", "PB2", "PB3"), 0.0)  # seconds, all stages
        self.bubble_of = Counter()  # request id -> seconds
        runner = partial(StageRunner, flow=self.flow)
        self.lanes = deque(Engine(cost, runner=runner, **options) for _ in range(n_stage))
        first = self.lanes[0]
        for lane in self.lanes:
            lane.requests = first.requests
            lane.pending = first.pending
            lane.waiting = first.waiting
        self.requests = first.requests
        self.add = first.add
        self.clock = first.clock

    def step(self):
        """Run an iteration of the next lane that has work. Returns its events."""
        for lane in [*self.lanes]:
            self.lanes.rotate(-1)
            if lane.running or lane.waiting:
                break
        return lane.step()

    def flow(self, feeds, t, end):
        """Move a micro-batch, planned at t, through the stages. end: when it would leave the last
        one if it never waited. Returns when it does."""
        busy = (end - t) / len(self.free_at)
        send = self.lanes[0].model.send_seconds(sum(feed.n for feed in feeds))
        idle = 0.0
        for stage, free_at in enumerate(self.free_at):
            start = max(t, free_at)
            idle += start - free_at
            done = start + busy
            self.free_at[stage] = done
            if self.record is not None:
                self.record.append(Iteration(start, done, feeds, stage))
            t = done + send  # only the next stage waits for a message

        # count the bubbles by kind, and for each request
        before = self.n_prompt
        self.n_prompt = sum(feed.n for feed in feeds if feed.n > DECODE_ROWS)
        if before is not None:
            kind = "PB1" if before and self.n_prompt else "PB2"
            self.bubbles["PB3" if before == self.n_prompt else kind] += idle
            for feed in feeds:
                self.bubble_of[feed.request.id] += idle
        return done

def zipf_jobs(n):
    """Jobs of 1K .. 4K tokens; the k-th shortest length has the chance k^-0.4 [SARATHI §5.3]."""
    weights = np.arange(1, 3074) ** -0.4
    rng = np.random.default_rng(0)
    lengths = 1024 + rng.choice(3073, n, p=weights / weights.sum())
    return [Job(0.0, *halves(L, 10)) for L in lengths.tolist()]

@experiment(on=Hardware("gpt3-175b", "a100", 8), only="simulated", points="")
def fig12(place):
    """[SARATHI Fig. 12] GPT-3 on 64 GPUs: a pipeline of eight nodes with Orca and with SARATHI, and
    eight nodes without a pipeline. Equal chunks leave smaller bubbles between the stages, which the
    picture shows."""
    cost = CostModel.roofline(place.model.config, place.on.gpu, place.on.tp, nodes=8)
    jobs = zipf_jobs(10000 if place.full else 300)
    for name, chunk in ("Orca", 4096 + 27), ("SARATHI", 256):
        line = Pipeline(cost, 8, place.timeline(name), scheduler=Sarathi(chunk),
                        max_batch=27, n_page=27 * 4096)
        seconds = serve(line, jobs).seconds
        yield Row("seconds", seconds, name)
        yield Row("bubble time, median (s)", median(line.bubble_of.values()), name)
        for kind, idle in line.bubbles.items():
            yield Row("idle share of the stages", idle / 8 / seconds, f"{name}, {kind}")
    alone = []
    for i in range(8):  # each node gets every eighth request
        node = Engine(place.model, Sarathi(4096 + 11), max_batch=11, n_page=11 * 4096)
        alone.append(serve(node, jobs[i::8]).seconds)
    yield Row("seconds", max(alone), "TP")
    yield Row("largest batch", Engine(cost, max_batch=0).max_batch // 8, "TP8 x PP8")
    yield Row("largest batch", Engine(place.model, max_batch=0).max_batch, "TP8")

@experiment("chunk size, C", "times", curves="series")
def fig13(place):
    """[SARATHI Fig. 13] What chunks cost attention and prefill, and what they gain end to end."""
    ratios = defaultdict(list)  # (panel, C) -> one per length
    chunks = range(64, 513 if place.simulated else 129, 64)
    for (L, B), C in product(place.batches, chunks):
        whole = prefill_in_chunks(place, L, L)
        parts = prefill_in_chunks(place, L, C)
        ours = {panel: parts[panel] / whole[panel] for panel in parts}
        P, D = halves(L, chunk=C, B=B)
        ours["end to end"] = gains(place, P, D, B, Sarathi(C))[0]
        for panel, ratio in ours.items():
            ratios[panel, C].append(np.median(ratio))
            yield Row(panel, ratio, f"L = {L}", C)
    for (panel, C), values in ratios.items():
        yield Row(panel, max(values), "best" if panel == "end to end" else "worst", C)

def prefill_in_chunks(place, L, C):
    """Seconds of attention, and of all operators, of a prompt of L tokens in chunks of C."""
    seconds = Counter()
    for past in range(0, L, C):
        chunk = min(C, L - past)
        operators = place.operators(last=False, chunk=chunk, past=past)
        for operator, t in operators.items():
            seconds[operator] += np.median(t)
    return {"attention": seconds["attn"], "prefill": seconds.total()}

@experiment()
def timeline(place):
    """Six requests under three schedulers, red where an output stalls. Those of [TNG]."""
    L = max(place.lengths)
    unit = np.median(place.seconds(dict(chunk=L)))  # arrivals are in prefills of L tokens
    jobs = [
        Job(0.0, L // 8, 24),
        Job(0.0, L // 4, 12),
        Job(0.0, L // 8, 36),
        Job(0.6 * unit, 3 * L // 4, 16),
        Job(1.5 * unit, L // 2, 10),
        Job(2.2 * unit, L // 4, 12)]
    variants = by_scheduler(("static", "prefill_first", "sarathi"))
    for name, runs in place.race(variants, jobs, B=4):
        yield from latency_rows(runs, name)

@experiment("concurrent requests, n", on=Hardware("llama-7b", "h100", 1, "vllm"))
def tng(place):
    """[TNG] TTFT, TPOT and throughput by the number of concurrent requests, for schedulers and
    chunk sizes. Simulated, also what chunks gain for requests of equal size."""
    sizes = (64, 512)
    clients = (1, 4, 12)
    n_job = 2  # per client
    if place.full:
        sizes = (512, 1024, 2048)
        clients = (1, 2, 4, 8, 16, 32, 64, 128)
        n_job = 4
    variants = by_scheduler(["static", "prefill_first", *map(SarathiServe, sizes)])
    L = place.lengths[0]
    speeds = []  # by the number of clients
    for n in clients:
        lengths = dict(prompt=(8, L // 2), output=(4, L // 8))
        jobs = place.jobs(1, n_job * max(n, 3), **lengths)
        for name, runs in place.race(variants, jobs, B=n, clients=n):
            yield from latency_rows(runs, name, n)
        speeds.append(runs[0].tokens_per_second)
    if place.simulated:
        growth = np.divide(speeds[1:], speeds[:-1])
        yield Row("twice the clients", growth[0] / growth[-1], "first over last")
        ratios = []
        for n, pd in product((8, 32, 128), (4, 16, 64)):
            jobs = [Job(0.0, *halves(L, pd))] * (6 * n)
            runs = dict(place.race(variants, jobs, B=n))
            _, base, *ours = [run.seconds for run, in runs.values()]
            ratios.append(base / min(ours))
        yield Row("chunked prefill", max(ratios), "over prefill_first")

# -----------------------------------------------------------------------------
# 4. S-LoRA's figures, by the papers' servers, simulated

# Seconds that other servers' hosts, and their kernels of adapters, add to an iteration. Each is
# fitted to the cell of a paper that its comment names. Then what these servers do differently.
SYSTEMS = {
    "lightllm": dict(  # S-LoRA is built on it
        layer=1.3e-3,  # [S-LoRA Fig. 5] the log of S4, A100-40, n = 0, latency
        layer_lora=0.06e-3,  # [S-LoRA Fig. 6] S4, R = 1, latency
        row=0.115e-6,  # [S-LoRA Table 3] S4, n = 2
        load=0.6e-3,  # [S-LoRA Table 3] S2, n = 1000
        resize=2.2e-3,  # [S-LoRA Fig. 5] no-unify, A100-80, n = 400
        gather=0.505e-3,  # [S-LoRA Fig. 5] bmm, A100-80, n = 400
        usable=0.92),  # 125,000 tokens fit next to 7B on an A100-80 in the authors' scripts
    "transformers": dict(
        layer=1.8e-3,  # [S-LoRA Table 3] PEFT, S1 and S4, n = 100
        token=0.95e-3,  # [S-LoRA Table 3] PEFT, S1, n = 5
        eager=True),
    "vllm": dict(
        token=0.036e-3,  # [SmartSpec Fig. 1] k = 5 is no gain beyond 12 requests/s
        expand=True),  # BatchExpansionTop1Scorer, until version 0.6
}

class ServingSystem(Roofline):
    """The costs of one of SYSTEMS. One more part than Roofline has: what the host adds."""
    layer = 0.0  # seconds to launch the kernels of a layer
    layer_lora = 0.0  # more, to launch those of adapters
    token = 0.0  # per sampled or verified token
    row = 0.0  # per layer, row and rank of an adapter: products of vectors
    load = 0.0  # per layer, to start the copies of an adapter
    resize = 0.0  # per layer, to resize a pool for adapters alone
    gather = 0.0  # per layer and request, to gather adapters for a bmm
    eager = False  # host and GPU wait for each other: their times add up
    expand = False  # every draft is verified as a request of its own

    def __init__(self, config, gpu, tp, system):
        vars(self).update(SYSTEMS[check_choice("system", system, SYSTEMS)])
        super().__init__(config, gpu, tp)

    def stats(self, feeds, others=None):
        s = super().stats(feeds, others)
        if self.row and not self.multiplies(feeds):  # prompts run as decodes do
            pairs = super().stats(feeds).lora_chunk_macs
            s.lora_macs += pairs
            s.lora_chunk_macs -= pairs
        return s

    def multiplies(self, feeds):
        """Whether S-LoRA's server runs MBGMM on these prompts, or MBGMV, as for decodes."""
        # its condition: at least two requests, 200 tokens in one, and a rank of 64
        is_long = any(feed.n >= 200 for feed in feeds)
        widest = max(n_params(feed.request.lora_weights) for feed in feeds)
        is_wide = widest >= 64 * self.rank_params
        return len(feeds) > 1 and is_long and is_wide

    def parts(self, s, lora):
        context = s.context + s.draft_context * self.expand
        parts = super().parts(replace(s, context=context), lora)
        launches = self.config.n_layer * (self.layer + self.layer_lora * (s.lora_params > 0))
        if not self.eager:  # the GPU computes meanwhile
            launches = max(0.0, launches - sum(parts))
        return *parts, launches + self.token * s.n_logits

    def lora_calls(self, s, way):
        if way == "bmm":
            return self.gather * (s.lora_rows + s.lora_chunks)
        return LORA_CALL + self.row * s.lora_macs / self.rank_params / self.tp

class ServerRunner(CostRunner):
    """Runner of a ServingSystem, whose host starts the copies of an adapter layer by layer."""
    def copy_adapter(self, adapter, pages):
        self.clock.t += self.model.config.n_layer * self.model.load
        return super().copy_adapter(adapter, pages)

SETTINGS = {  # [S-LoRA Table 1]: model, ranks that are dealt alternately
    "S1": ("llama-7b", (8,)),
    "S2": ("llama-7b", (64, 32, 16, 8)),
    "S4": ("llama-13b", (64, 32, 16)),
    "S5": ("llama-33b", (32,)),
    "S6": ("llama-70b", (64,))}
POOLS = {  # tokens that fit in the authors' servers, adapters included
    ("llama-7b", "a100"): 125000,
    ("llama-13b", "a100"): 65000,
    ("llama-7b", "a10g"): 14500,
    ("llama-7b", "a100-40"): 14500,
    ("llama-13b", "a100-40"): 14000,
    # the same, if adapters have a pool of their own
    ("no-unify", "a100"): 35000,
    ("bmm", "a100"): 35000,
    ("no-unify", "a10g"): 9000,
    ("bmm", "a10g"): 8000}

class Lightllm(Scheduler):
    """The server that S-LoRA is built on: whole prompts, without decodes. It looks at the queue
    every ten iterations, and starts as many requests as will fit at their peak, because it knows
    their lengths. It drops an adapter when no running request needs it. The authors' runs prefetch
    none."""
    since = 0  # iterations since the last prefill

    def start(self, engine):
        super().start(engine)
        engine.memory.n_prefetch = 0

    def admit(self, running, waiting):
        if running and self.since < 10:
            return []
        self.drop_idle()
        return self.fitting(running, waiting)

    def plan(self, requests):
        new = [request for request in requests if request.n_past == 0]
        self.since = 0 if new else self.since + 1
        return [(request, request.n_todo) for request in new or requests]

    def drop_idle(self):
        memory = self.engine.memory
        for adapter in [*memory.idle]:
            memory.evict(memory.adapter_pool, adapter)

    def fitting(self, running, waiting):
        """The first waiting requests that never outgrow the pool. Their prompts have up to a sixth
        of its tokens, or 3,072."""
        n_page = self.engine.n_page
        batch = [(r.max_len - r.n_tokens, r.n_tokens) for r in running]
        adapters = {r.lora_weights for r in running}
        n_token = 0
        for i, request in enumerate(waiting):
            batch.append((request.max_new_tokens, len(request.prompt)))
            adapters.add(request.lora_weights)
            n_token += len(request.prompt)
            # the last to end comes first: when the i-th ends, i requests still hold pages
            left, tokens = np.array(sorted(batch, reverse=True)).T
            n_running = 1 + np.arange(len(left))
            peak = max(left * n_running + np.cumsum(tokens))
            peak += sum(adapter.n_page for adapter in adapters if adapter)
            if peak > n_page or i and n_token > max(n_page / 6, 3072):
                return waiting[:i]
        return waiting

class PeftServer(Lightllm):
    """A server on top of PEFT. It serves all requests that have come, in batches of one adapter,
    then all that have come meanwhile. Unlike PEFT's, its batches are not padded."""
    def __init__(self, size):
        super().__init__()
        self.size = size  # of a batch
        self.batches = []

    def admit(self, running, waiting):
        if running:
            return []
        if not self.batches:
            groups = defaultdict(list)
            for request in waiting:
                groups[request.adapter].append(request)
            for group in groups.values():
                for i in range(0, len(group), self.size):
                    self.batches.append(group[i:i + self.size])
        return self.batches.pop(0)

    def plan(self, requests):
        return [(request, request.n_todo) for request in requests]

def slora(place, setting, n, rate, seconds, variant="S-LoRA", gpu=None, tp=1,
          cv=1.0, power=1.0, order=fcfs):
    """Serve a setting of [S-LoRA Table 1] with n adapters by one of the paper's systems."""
    gpu = gpu or place.on.gpu
    model, ranks = SETTINGS[setting]
    system = place.on.system
    options = dict(scheduler=Lightllm(), max_batch=1000, order=order)
    if variant == "PEFT":
        system = "transformers"
        size = 50 if model == "llama-7b" else 35
        options = dict(scheduler=PeftServer(size), max_batch=10000)
    cost = Hardware(model, gpu, tp, system).cost()
    cost.sends_xa = variant != "no messages"
    n_page = POOLS.get((variant, gpu)) or POOLS.get((model, gpu))
    n_page = n_page or int(cost.memory // cost.page_bytes)
    if variant in ("no-unify", "bmm"):  # the pool of tokens limits adapters all the same
        options["adapter_pages"] = n_page
        cost.load += cost.resize  # each load resizes the pool of adapters
    if variant in ("bmm", "merge"):
        options["lora"] = variant
    if not place.full:
        seconds /= 6
    jobs = place.jobs(rate, seconds, cv, n or 1, power)
    if variant == "base model" or not n:
        jobs = [job._replace(adapter=None) for job in jobs]
    engine = Engine(cost, alloc="grow", n_page=n_page, runner=ServerRunner, **options)
    return serve(engine, jobs, adapters=ranks)

def slora_claims(place, name):
    """Rows of requests/s or of seconds, for the settings of an experiment's claims."""
    for (panel, variant, n), claim in CLAIMS[name].items():
        if claim.setup:
            run = slora(place, *claim.setup)
            ours = fmean(run.latencies) if panel == "latency (s)" else run.requests_per_second
            yield Row(panel, ours, variant, n)

SLO = 6.0  # seconds to the first token [S-LoRA §4.3]

@experiment("adapters, n", "requests/s", A100_13B, "simulated", "series")
def slora_table3(place):
    """[S-LoRA Table 3, Fig. 5] Requests per second with few and with thousands of adapters, of rank
    8 (S1) or of 8 to 64 (S2) for LLaMA-7B, of 16 to 64 (S4) for LLaMA-13B."""
    place.source = (f"llama-7b (S1, S2) on 1 x {place.on.gpu}, llama-13b (S4) on 1 x "
                    f"{place.on.gpu}, simulated")
    yield from slora_claims(place, "slora_table3")

@experiment("", "requests/s", A100_13B, "simulated")
def slora_fig5(place):
    """[S-LoRA Fig. 5, §7.2] What the unified pool and the kernels are worth: LLaMA-13B with 400
    adapters (S4) on an A100, LLaMA-7B with 200 (S2) on an A10G."""
    place.source = ("llama-13b (S4) on 1 x a100, llama-13b on 1 x a100-40, llama-7b (S2) on 1 x "
                    "a10g, llama-7b on 1 x a100, simulated")
    yield from slora_claims(place, "slora_fig5")

@experiment("arrival rate (requests/s), R", "", A100_13B, "simulated")
def slora_fig6(place):
    """[S-LoRA Fig. 6] Throughput, latency, first token and SLO attainment by arrival rate."""
    for rate in (1, 2, 4, 6, 8):
        run = slora(place, "S4", 400, rate, 300)
        yield Row("requests/s", run.requests_per_second, x=rate)
        yield Row("latency (s)", fmean(run.latencies), x=rate)
        yield Row("first token (s)", fmean(run.ttfts), x=rate)
        yield Row("attainment", run.attainment(SLO), x=rate)

@experiment("GPUs, N", "requests/s", Hardware("llama-33b", "a100-40", 2, "lightllm"),
            "simulated")
def slora_fig8(place):
    """[S-LoRA Fig. 8] Requests/s with tensor parallelism: with adapters, without sending their x A,
    and of the base model alone."""
    place.source = "llama-33b (S5) on N x a100-40, llama-70b (S6) on N x a100, simulated"
    for setting, gpu, n in ("S5", "a100-40", 100), ("S6", "a100", 10):
        for part in ("base model", "no messages", "S-LoRA"):
            for tp in (2, 4):
                run = slora(place, setting, n, 12, 60, part, gpu, tp)
                yield Row(setting, run.requests_per_second, part, tp)

@experiment("adapters, n", "requests/s", Hardware("llama-7b", "a10g", 1, "lightllm"),
            "simulated", "series")
def slora_fig9(place):
    """[S-LoRA Fig. 9] An adapter merged into the weights, or x A B computed on the fly."""
    place.source = "llama-7b on 1 x a10g, simulated"
    yield from slora_claims(place, "slora_fig9")

@experiment("coefficient of variation, cv", "share within the SLO", A100_13B, "simulated")
def slora_fig10(place):
    """[S-LoRA Fig. 10] SLO attainment by how uneven the arrivals are, for three orders."""
    for name, order in ("early abort", None), ("lcfs", lcfs), ("fcfs", fcfs):
        for cv in (1, 2, 4, 6, 8):
            run = slora(place, "S4", 400, 6, 300, cv=cv, order=order or EarlyAbort(SLO))
            yield Row("attainment", run.attainment(SLO), name, cv)
            # 1 for a first token without delay, 0 for one after the SLO [S-LoRA App. B]
            worths = [max(0.0, 1 - (ttft / SLO) ** 2) for ttft in run.ttfts]
            yield Row("satisfaction", sum(worths) / len(run.requests), name, cv)

@experiment("adapters in a batch, d", "", Hardware("llama-7b", "a100-40", 1, "lightllm"),
            "simulated")
def clustering(place):
    """[S-LoRA App. A] Throughput and attainment, if a batch keeps to a cluster of d adapters."""
    for d in (1, 2, 4, 8, 32):
        run = slora(place, "S2", 32, 2, 120, order=cluster(d))
        yield Row("requests/s", run.requests_per_second, x=d)
        yield Row("attainment", run.attainment(SLO), x=d)

@experiment("", "tokens/s", only="measured")
def slora_here(place):
    """What adapters cost here, in tokens/s, prompts included: no adapter, S-LoRA and its baselines,
    for requests of the same lengths. 40 adapters of mixed ranks stand for 100 and 2,000, to save
    host memory."""
    model = place.model
    B = place.limit(6)
    adapters = [Adapter.random(model.config, rank, seed, model.dtype)
                for seed, rank in enumerate(10 * SETTINGS["S2"][1])]
    L = place.lengths[0]
    pages = 4 * max(adapter.n_page for adapter in adapters)
    halves = (8, L // 2)
    few = at_rate(place.jobs(1, 30, n_adapter=100, prompt=halves, output=halves))
    none = [job._replace(adapter=None) for job in few]
    # of 2,000 adapters no two requests have the same. Ranks are kept, because they cost the most
    many = [job._replace(adapter=str(40 * i + int(job.adapter) % 40))
            for i, job in enumerate(few)]
    variants = {
        "no adapter": dict(jobs=none),
        "S-LoRA": {},
        "S-LoRA, n = 2000": dict(jobs=many),
        "no-unify": dict(adapter_pages=pages),
        "padded (bmm)": dict(lora="bmm"),
        "merged and swapped": dict(lora="merge")}
    n_page = B * L + pages
    common = dict(B=B, n_page=n_page, alloc="grow", adapters=adapters)
    for name, runs in place.race(variants, few, **common):
        yield Row("throughput", [run.tokens_per_second for run in runs], name)

# -----------------------------------------------------------------------------
# 5. SmartSpec's figures, and trees of drafts

CHOICES = {"off": "off", "k = 1": 1, "k = 3": 3, "k = 5": 5, "goodput": "goodput"}  # [§7]

def small_model(place):
    """A draft model on the same GPU."""
    return place.on._replace(model="llama-160m", tp=1).cost()

def latencies(place, rates, choices, alpha, draft="ngram", P=128):
    """Rows of the latency by arrival rate (Poisson) for choices {name: spec}, and how many times
    shorter it is than without drafts. Returns {name: [times shorter, per rate]}."""
    n_page = 0.9 * place.model.memory / place.model.page_bytes
    B = min(256, int(n_page / (P + 128)))
    options = dict(scheduler="prefill_first", B=B, alloc="grow", draft=draft, alpha=alpha)
    seconds = 60 if place.full else 10
    times = defaultdict(list)
    for rate in rates:
        jobs = place.jobs(rate, seconds, prompt=[P], output=[128])
        latency = {}
        for name, spec in choices.items():
            run = place.serve(jobs, spec=spec, **options)
            latency[name] = fmean(run.latencies)
            times[name].append(latency["off"] / latency[name])
            yield Row("latency (s)", latency[name], name, rate)
            yield Row("times as fast as off", times[name][-1], name, rate)
    yield Row("goodput", times["goodput"][0], "lowest rate")
    yield Row("goodput", max(times["goodput"]), "most")
    yield Row("goodput", min(times["goodput"]), "least")
    return times

@experiment("arrival rate (requests/s), R", "", A100_7B, "simulated", "series", "")
def spec_fig1(place):
    """[SmartSpec Fig. 1, 11, 14] Latency with k drafts of a draft model, with goodput's choice and
    with an oracle's; acceptance 0.7."""
    rates = (1, 4, 12, 20)
    if place.full:
        rates = (1, 4, 8, 10, 12, 14, 16, 18, 20)
    choices = CHOICES | {"oracle": "oracle"}
    times = yield from latencies(place, rates, choices, 0.7, small_model(place))
    for name in ("k = 3", "k = 5"):
        # where the curve falls below 1, interpolated
        losses = np.negative(times[name])
        yield Row("no gain beyond rate", np.interp(-1, losses, rates), name)
    lost = np.divide(times["oracle"], times["goodput"])
    yield Row("oracle over goodput", min(lost), "least")
    _, *at_4 = [values[1] for values in times.values()]
    yield Row("best k at rate 4", (1, 3, 5)[np.argmax(at_4[:3])])

@experiment("", "times as fast as off", A100_7B, "simulated")
def spec_fig11(place):
    """[SmartSpec Fig. 11] Goodput's latency for larger models on several GPUs, from low to high
    load; acceptance 0.7."""
    choices = {"off": "off", "goodput": "goodput"}
    models = [("llama-33b", 4, "llama-160m"), ("llama-70b", 8, "tinyllama-1.1b")]
    place.source = "llama-33b on 4 x a100, llama-70b on 8 x a100, simulated"
    for name, tp, small in models:
        other = simulate(place.args, Hardware(name, "a100", tp, "vllm"))
        draft = Hardware(small, "a100", 1, "vllm").cost()
        for row in latencies(other, (1, 16), choices, 0.7, draft):
            if row.panel == "goodput":
                yield row._replace(panel=f"{name} on {tp} GPUs")

@experiment("batch size, B", "drafts per request", A100_7B, "simulated")
def spec_fig5(place):
    """[SmartSpec Fig. 5] The k with the most goodput by batch size; acceptance 0.7, context 192."""
    draft = small_model(place)
    for B in [2 ** i for i in range(10)]:
        stats = IterationStats(n_tokens=B, n_logits=B, decodes=B, context=192 * B)

        def price(drafts):
            verifying = place.model.seconds(stats.with_drafts(sum(drafts)))
            return verifying + len(drafts) * draft.seconds(stats)
        best = Goodput().n_drafts([None] * B, [MAX_DRAFTS] * B, 0.7, price)
        yield Row("best k", best[0], x=B)

@experiment("arrival rate (requests/s), R", "", A100_7B, "simulated", "series")
def spec_fig12(place):
    """[SmartSpec Fig. 12] Latency with prompt lookup; acceptance 0.35, prompts of 512 tokens."""
    rates = (1, 6, 12)
    if place.full:
        rates = (1, 2, 4, 6, 8, 10, 12)
    yield from latencies(place, rates, CHOICES, 0.35, P=512)

class Trees(Goodput):
    """Medusa's drafts: the one of these trees with the most tokens per second [SmartSpec Eq. 10].
    (3, 2, 2): three candidates for the first token, two after each, two after each of these."""
    drift = 0.0  # a request has no drafts only if none fits its output

    def __init__(self, *trees):
        self.trees = trees
        self.largest = []  # drafts of the largest tree, cut to 0, 1 ... levels
        for n in range(max(map(len, trees)) + 1):
            self.largest.append(max(tree_size(tree[:n]) for tree in trees))
        self.chosen = {}  # request -> its tree of the last iteration

    def n_drafts(self, requests, limits, acceptance, price):
        best = super().n_drafts(requests, limits, acceptance, price)
        self.chosen = dict(zip(requests, best))
        return [tree_size(tree) for tree in best]

    def limit(self, n):
        return self.largest[min(n, len(self.largest) - 1)]

    def chances(self, request, alpha):
        """A level is right if one of its candidates is."""
        return [chance_of(alpha, n) for n in self.chosen.get(request, ())]

    def candidates(self, requests, limits, acceptance):
        """The same tree for all requests, cut to what each may draft."""
        # differs from [SmartSpec Eq. 10]: as printed, a level fails with the chance 1 - a, however
        # many candidates it has
        rooms = [request.max_drafts for request in requests]
        for tree in self.trees:
            tokens = len(rooms)
            chance = 1.0
            steps = []
            for level, n_candidate in enumerate(tree[:max(rooms)]):
                n_request = sum(n > level for n in rooms)
                chance *= chance_of(acceptance, n_candidate)
                tokens += n_request * chance
                steps.append(n_request * math.prod(tree[:level + 1]))
            yield tokens, steps, [tree[:n] for n in rooms]

def tree_size(tree):
    """Drafts of a tree: (3, 2, 2) has 3 + 6 + 12."""
    return sum(math.prod(tree[:n + 1]) for n in range(len(tree)))

def chance_of(alpha, n_candidate):
    """The chance that one of a level's candidates is right, if each has the chance alpha."""
    return 1 - (1 - alpha) ** n_candidate

@experiment("arrival rate (requests/s), R", "", A100_7B, "simulated", "series", "")
def spec_fig16(place):
    """[SmartSpec Fig. 16] Latency with Medusa's heads: one candidate each, fixed trees, and
    goodput's tree; acceptance 0.6. Batched are the tokens that a decode feeds, at the last rate."""
    # unlike vLLM's, Medusa's drafts share one read of the context
    place.model.expand = False
    choices = {"off": "off"}
    for name in ("1,1,1", "2,2,1", "3,2,2"):
        choices[name] = Trees(tuple(map(int, name.split(","))))
    goodput = Trees(*product((1, 2, 3), repeat=3))  # three heads, one to three candidates of each
    rates = (1, 4, 8, 12, 16, 20) if place.full else (1, 20)
    choices["goodput"] = goodput
    yield from latencies(place, rates, choices, 0.6)
    seconds = 60 if place.full else 10
    jobs = place.jobs(20, seconds, prompt=[128], output=[128])
    for alpha in (0.6, 0.8):
        record = []
        place.serve(jobs, 256, scheduler="prefill_first", alloc="grow", draft="ngram",
                    alpha=alpha, spec=goodput, record=record)
        feeds = sum((iteration.feeds for iteration in record), [])
        rows = [feed.n for feed in feeds if feed.n == feed.n_logits]
        yield Row("batched tokens per request", fmean(rows), f"acceptance {alpha}")

@experiment("batch size, B", only="measured")
def spec_here(place):
    """What drafts are worth here, on real text: how many times as fast as without drafts B requests
    are served together, and the share of drafts accepted. (Without drafts: output tokens/s.) Drafts
    come from a draft model or your own proposer, from prompt lookup, or are wrong: then goodput
    settles at none, and what is left is the price of adapting. The trained tiny model continues
    pieces of this project's files, or --model and --draft the paragraphs of --prompts."""
    prompts = read_prompts(place)
    draft = place.args.draft
    if not place.args.model:  # both are trained on these files
        draft = draft or "draft"
    sources = {}
    if isinstance(draft, str):
        sources["model"] = load_model(draft, place.model.dtype, str(place.model.device))
    elif draft:
        sources[name_of(draft)] = draft
    sources["lookup"] = "ngram"
    variants = {"off": (None, "off")}
    for source, name in product(sources, [*CHOICES][1:]):
        variants[f"{source}, {name}"] = sources[source], CHOICES[name]
    variants["wrong, goodput"] = Zeros, "goodput"  # which are hardly ever right
    for variant in variants.values():  # warm up: goodput makes its profile
        continue_text(place, prompts[:1], 1, *variant)
    for B in (1, 6, 24):
        texts = prompts[:max(B, 6)]
        rounds = place.rounds(*(partial(continue_text, place, texts, B, *variant)
                                for variant in variants.values()), factor=3)
        seconds, accepted = np.moveaxis(rounds, -1, 0)  # (n_variant, n_round) each
        yield Row("tokens/s without drafts", len(texts) * N_TEXT[1] / seconds[0], x=B)
        for i, name in [*enumerate(variants)][1:]:
            yield Row(f"B = {B}", seconds[0] / seconds[i], name)
            yield Row(f"accepted, {B}", np.median(accepted[i]), name)

N_TEXT = 256, 64  # most tokens of a prompt of spec_here, and tokens of an output

def read_prompts(place):
    """24 prompts, as tokens: paragraphs of --prompts, or pieces of this project's files."""
    path = place.args.prompts
    if path:
        with reading(path):
            texts = re.split(r"\n\s*\n", Path(path).read_text(encoding="utf8").strip())
    else:
        text = "".join(ASSETS.with_name(name).read_text(encoding="utf8") for name in (
            "bench.py", "kernels.py", "model.py", "sarathi.py", "test_sarathi.py"))
        texts = textwrap.wrap(text, 1000, replace_whitespace=False, drop_whitespace=False)
    texts = texts[::max(1, len(texts) // 24)]
    tokenizer = load_tokenizer(place.args.model or "tiny")
    prompts = map(tokenizer.encode, islice(cycle(texts), 24))
    return [prompt[:N_TEXT[0]] for prompt in prompts]

def continue_text(place, prompts, B, draft, spec):
    """Continue all prompts, B together. Returns the seconds, and the share of drafts accepted."""
    engine = Engine(place.model, "prefill_first", max_batch=B, n_page=B * sum(N_TEXT),
                    draft=draft, spec=spec)
    engine.warm()
    if draft is Zeros:
        engine.generate(prompts, N_TEXT[1])  # until it has settled
    seconds = timed(engine.generate, prompts, N_TEXT[1])()
    speculator = engine.speculator
    return seconds, speculator.n_accepted / max(1, speculator.n_drafted) if speculator else 0.0

@experiment("", "%", only="measured")
def fidelity(place):
    """[SmartSpec Fig. 13, SARATHI §5.3] The simulator against this machine: the same requests,
    with costs from the one-time profile. How far off are iterations and throughput?"""
    B = place.limit(6)
    twin = Place(place.args, CostModel.profile(place.model), place.source)
    yield Row("error of the profile (%)", 100 * twin.model.error)
    L = max(place.lengths) // 2
    output = (4, max(8, L // 8))
    jobs = at_rate(place.jobs(1, 4 * B, prompt=(8, L), output=output))
    variants = by_scheduler(("static", "orca", "prefill_first", "sarathi"))
    measured = place.race(variants, jobs, B=B)
    simulated = twin.race(variants, jobs, B=B)
    for (name, runs), (_, (run,)) in zip(measured, simulated):
        real = np.median([*map(iteration_seconds, runs)], 0)
        ours = iteration_seconds(run)
        yield Row("iteration error (%)", np.median(100 * abs(ours / real - 1)), name)
        yield Row("throughput error (%)", 100 * abs(real.sum() / ours.sum() - 1), name)

def iteration_seconds(run):
    """Seconds between the ends of iterations that gave tokens, of the first since the start."""
    ends = {t for request in run.requests for t in request.times}
    return np.diff(sorted({run.start, *ends}))

# -----------------------------------------------------------------------------
# 6. yours: online serving, capacity, attainment, and traces of requests

def workload(place, n, prompt, output):
    """Lists of jobs, one per seed: the trace of --jobs; or n jobs of --prompt and --output, or else
    of these lengths. They arrive at one per second in the mean, for at_rate() to change; a trace's
    only with --rate."""
    args = place.args
    longest = min(place.model.config.block_size, place.room)
    jobs = []
    if args.jobs:
        jobs = read_jobs(args.jobs, longest, args.window or (-math.inf, math.inf), args.first,
                         args.speed or 1.0, arrivals=bool(args.window or not args.rate))
    loads = []
    for seed in range(args.seeds if place.simulated else 1):
        spaced = place.jobs(1, len(jobs) or n, args.cv, args.adapters or 0, 0.5,
                            args.prompt or prompt, args.output or output,
                            seed=42 + args.seed + seed)
        if args.shared:  # one of eight beginnings
            spaced = [job._replace(prompt=args.shared + job.prompt, blocks=(i % 8,),
                                   size=args.shared) for i, job in enumerate(spaced)]
        for i, job in enumerate(jobs):
            other = spaced[i]
            arrival = other.arrival if args.rate else job.arrival
            spaced[i] = job._replace(arrival=arrival, adapter=other.adapter)
        loads.append(spaced)
    return loads[:1] if loads[0] == loads[-1] else loads  # a trace is the same for each seed

@experiment("seconds", "share of requests", curves="picture")
def online(place):
    """How long requests wait for their first token (TTFT), for each later one (TPOT), and at their
    longest stall, the time between two tokens of an output. Medians and 99th percentiles in ms.
    tokens/s: prompts count too. Good: the share of requests that meet --ttft and --tbt as in
    `attainment`. A simulated number is the median over --seeds. --by: a row per class, of which
    tokens/s count until its own last token, and Jain's index over these. --spec adds rows with
    drafts by prompt lookup, each accepted with a chance of 0.7. Not fed: the share of prompt tokens
    that a --memory had in the cache."""
    args = place.args
    L = max(place.lengths)
    loads = workload(place, 320 if place.full else 32, (8, L // 2), (4, max(4, L // 16)))
    all_jobs = sum(loads, [])
    B = place.limit(12)
    adapters = [Adapter(place.model.config, 8).n_page] * (args.adapters or 0)
    n_page = B * max(job.prompt + job.output for job in all_jobs) + sum(adapters)
    common = dict(B=B, n_page=min(place.room, n_page), adapters=(8,))
    most = place.serve(at_rate(loads[0][:320]), scheduler="sarathi", **common)
    if args.rate or not args.jobs:
        rate = args.rate or 0.7 * most.requests_per_second
        loads = [at_rate(jobs, rate) for jobs in loads]
        place.source += f"; {rate:.3g} requests/s arrive"
    specs = {}
    if args.spec:
        specs = {name_of(spec): dict(spec=spec, draft="ngram", alpha=0.7)
                 for spec in (args.spec, "goodput")}
        place.source += f"; drafts under {name_of(args.scheduler)}"
    variants = variants_of(args, SCHEDULERS, specs)
    print(about_jobs(loads[0], most), file=sys.stderr)
    key = classes_of(all_jobs, args.by)
    for name, runs in place.race(variants, *loads, **common):
        for i, run in enumerate(runs):
            place.requests += [dict(row, scheduler=name, by=key(request),
                                    seed=args.seed + i % len(loads))
                               for row, request in zip(run.rows(), run.requests)]
        classes = defaultdict(list, {"": runs})
        for run in runs if args.by else ():
            for label, own in run.by(key).items():
                classes[f", {label}"].append(own)
        for label, own in sorted(classes.items()):
            yield from class_rows(args, name + label, own)
            if own is runs or len(classes) < 10:  # a line of panels for each
                yield from distributions_of(name, label, own)
        if args.by:
            yield Row("Jain", [run.fairness(key) for run in runs], name)

def distributions_of(name, label, runs):
    """Points of the pictures: percentiles over all requests, or over a class."""
    percents = *range(0, 100, 5), 99, 100
    for what, field in {"TTFT": "ttfts", "TPOT": "tpots", "stalls": "stalls"}.items():
        times = [np.percentile(getattr(run, field) or [math.nan], percents) for run in runs]
        for percent, x in zip(percents, np.median(times, 0).tolist()):
            yield Row(f"CDF of {what}{label}", percent / 100, name, x)

def class_rows(args, name, runs):
    """Rows of online, for all requests or a class of them."""
    targets = args.ttft, args.tbt
    figures = [run.figures for run in runs]
    for figure in [*figures[0]][1:]:  # all but the number of requests
        yield Row(figure.removesuffix(" ms"), [each[figure] for each in figures], name)
    if args.memory:
        yield Row("not fed", [share_cached(run) for run in runs], name)
    yield Row("good", [run.attainment(*targets) for run in runs], name)
    yield Row("good/s", [run.goodput(*targets) for run in runs], name)
    yield Row("preempted", [run.n_preempted for run in runs], name)
    yield Row("runs", len(runs), name)

def share_cached(run):
    """The share of prompt tokens that were in the cache when their request started."""
    cached = sum(request.notes.get("cached", 0) for request in run.requests)
    return cached / sum(len(request.prompt) for request in run.requests)

def classes_of(jobs, by):
    """A function from a request to its class: its adapter, a third of all requests by the prompt's
    length, or the trace's class; without by, all have the same."""
    bounds = np.quantile([job.prompt for job in jobs], (0.33, 0.67, 1), method="lower")

    def class_of(request):
        if by == "adapter":
            return f"adapter {request.adapter}"
        if by == "class":
            return request.notes["class"]
        i = np.searchsorted(bounds, len(request.prompt))
        return f"{'abc'[i]}: prompts of up to {bounds[i]}" if by else ""
    return class_of

def about_jobs(jobs, most):
    """A line about jobs, after one if they arrive faster than they can be served."""
    prompts = [job.prompt for job in jobs]
    outputs = [job.output for job in jobs]
    seconds = jobs[-1].arrival
    text = (f"{len(jobs)} requests over {seconds:.4g} s, prompts of {min(prompts)} to "
            f"{max(prompts)} tokens, outputs of {min(outputs)} to {max(outputs)}")
    offered = (sum(prompts) + sum(outputs)) / max(seconds, 1e-9)
    if offered > most.tokens_per_second:
        text = (f"overload: {offered:.0f} tokens/s arrive, {most.tokens_per_second:.0f} are served "
                f"at best, so the longer this lasts, the longer all wait\n{text}")
    return text

def variants_of(args, schedulers, others=None):
    """Variants for a race: --schedulers, or these and --scheduler; others; with each --order."""
    variants = by_scheduler(args.schedulers or [*schedulers, args.scheduler]) | (others or {})
    if args.order:
        variants = {f"{name}, {name_of(order)}": variant | dict(order=order)
                    for (name, variant), order in product(variants.items(), args.order)}
    if args.memory:  # without it, and with it
        variants |= {f"{name}, {name_of(args.memory)}": variant | dict(memory=args.memory)
                     for name, variant in variants.items()}

    def is_own(item):
        return any(not isinstance(value, str | float) for value in item[1].values())
    # your own run first, so that a mistake shows early
    return dict(sorted(variants.items(), key=is_own, reverse=True))

@experiment("", "requests/s", Hardware("llama-13b", "a100"))
def capacity(place):
    """Larger chunks serve more requests/s in time, until an iteration with one takes longer than a
    stall may (Sarathi-Serve). In time: half of the first tokens come within --ttft, and 99 % of the
    stalls are within --tbt. Arrivals are Poisson; prompts have 100 to 3,000 and outputs 20 to 400
    tokens, fewer if measured. 0: less than a fifth, simulated a twelfth, of what is served without
    targets."""
    variants = variants_of(place.args, ("prefill_first", "sarathi", "sarathi_serve"))
    serve_at, most = under_load(place)
    for name, variant in variants.items():
        def good(rate):
            return serve_at(rate, variant).meets(place.args.ttft, place.args.tbt)
        yield Row("requests/s", highest(good, most / 2, n_step=7 if place.simulated else 6), name)

@experiment("arrival rate (requests/s), R", "share of requests", Hardware("llama-13b", "a100"),
            curves="series")
def attainment(place):
    """The share of requests that meet both targets over the arrival rate [S-LoRA §7]: their first
    token within --ttft seconds, and 99 % of their own stalls within --tbt. And the highest rate at
    which 99 % of the requests do, a triangle in the picture. The requests are those of `capacity`,
    or of --jobs, with its bursts."""
    targets = place.args.ttft, place.args.tbt
    place.source += f"; targets: first token {targets[0]:g} s, stalls {targets[1]:g} s"
    serve_at, most = under_load(place)
    n_halving = 6 if place.simulated else 2
    halvings = np.linspace(n_halving - 1, -1, (1 + place.full) * n_halving + 1)
    rates = [float(f"{most / 2 ** i:.3g}") for i in halvings]
    variants = variants_of(place.args, SCHEDULERS)
    for name, variant in variants.items():
        def attained(rate):
            return serve_at(rate, variant).attainment(*targets)
        limit = 0.0
        for rate in rates:
            good = attained(rate)
            yield Row("", good, name, rate)
            if good >= 0.99:
                limit = rate
        if limit and place.simulated:  # between two rates
            limit = highest(lambda rate: attained(rate) >= 0.99, limit * 1.4)
        yield Row(FULL_SHARE, limit, name)

FULL_SHARE = "99 % of requests up to"

def under_load(place):
    """(a function that serves requests at a rate, by a variant, and returns their Metrics; the
    requests/s that are served without targets)."""
    n = 300 if place.full else 20
    L = max(place.lengths)
    if place.simulated:
        n = max(n, 100)  # twice as many as may run together
        L = min(3400, place.model.config.block_size)
    jobs, *_ = workload(place, n, (L // 34, L * 15 // 17), (max(2, L // 170), L * 2 // 17))
    if place.args.jobs:  # to one per second
        jobs = at_rate(jobs, max(1e-9, jobs[-1].arrival) / len(jobs))
    longest = max(L, *(job.prompt + job.output for job in jobs))
    B = place.limit(48)
    options = dict(B=B, alloc="grow", n_page=min(place.room, B * longest))

    def serve_at(rate, variant):
        return place.serve(at_rate(jobs, rate), **variant, **options)
    return serve_at, serve_at(math.inf, dict(scheduler="sarathi")).requests_per_second

def highest(good, rate, n_step=6):
    """The highest rate with good(rate), at most 3 % too low; or 0. Six steps find it within 0.4 to
    2.5 times `rate`, seven within 0.16 to 6.4 times."""
    low = 0.0
    for i in range(n_step):
        step = 1.03 ** 2 ** (n_step - 2 - i)
        if good(rate):
            low = rate
            rate *= step
        else:
            rate /= step
    return low

COLUMNS = (  # names of arrival, prompt and output: ours, Azure's, BurstGPT's, Vidur's, Mooncake's
    ("arrival", "timestamp", "arrived_at"),
    ("prompt", "contexttokens", "request tokens", "num_prefill_tokens", "input_length"),
    ("output", "generatedtokens", "response tokens", "num_decode_tokens", "output_length"))

def read_jobs(path, longest=math.inf, window=(-math.inf, math.inf), first=None, speed=1.0,
              arrivals=True):
    """The Jobs of a trace, sorted by arrival; the first one comes at 0, and all `speed` times as
    densely as in the file. Only the window is kept, in seconds since the file's first row, and of
    it up to `first` jobs. Those without prompt or output, or with more than `longest` tokens, are
    skipped. arrivals: whether the file must have them."""
    low, high = window
    jobs = []
    start = 0.0
    n_read = 0
    n_skipped = 0
    for job, unit_is_a_guess in read_trace(path, arrivals):  # noqa: B007
        start = job.arrival if n_read == 0 else start
        n_read += 1
        if low <= job.arrival - start < high:
            if min(job.prompt, job.output) > 0 and job.prompt + job.output <= longest:
                jobs.append(job)
            else:
                n_skipped += 1
        if len(jobs) == first:
            break
    if not jobs:
        raise ValueError(f"{path}: no request is left to serve: {n_read:,} rows read, "
                         f"{n_skipped:,} skipped")
    jobs.sort(key=lambda job: job.arrival)
    start = jobs[0].arrival
    seconds = jobs[-1].arrival - start
    if seconds and unit_is_a_guess and start < 1e9 and not 0.02 <= seconds / len(jobs) <= 60:
        raise ValueError(f"{path}: {len(jobs)} requests over {seconds:.4g} s are not plausible: "
                         "with input_length a timestamp is in s, with hash_ids in ms")
    print(f"{path}: {n_read:,} rows read, {len(jobs):,} kept, {n_skipped:,} skipped (no prompt, no "
          f"output, or more than {longest} tokens; simulated: --context); "
          f"{speed * len(jobs) / max(1e-9, seconds):.3g} requests/s in the mean", file=sys.stderr)
    return [job._replace(arrival=(job.arrival - start) / speed) for job in jobs]

def read_trace(path, arrivals):
    """Yields (Job, whether the unit of its arrival is a guess) for each row of a file, CSV or JSON
    lines. ValueError names the wrong row."""
    opener = gzip.open if path.endswith(".gz") else open
    n = 1
    try:
        pipe = None if os.path.isfile(path) else StringIO(text_of(path))
        with pipe or opener(path, "rt", encoding="utf-8-sig") as file:
            lines = filter(str.strip, file)
            head = next(lines, "")
            rows = csv.DictReader(chain([head], lines), skipinitialspace=True, strict=True)
            is_json = head.lstrip().startswith("{")
            names = json.loads(head) if is_json else rows.fieldnames
            if is_json:
                rows = map(json.loads, chain([head], lines))
            names = {name.strip().lower(): name for name in names or ()}
            found = [next((names[name] for name in known if name in names), None)
                     for known in COLUMNS]
            if None in found[not arrivals:]:
                raise ValueError("a column is missing")
            arrival, prompt, output = found
            is_guess = "input_length" in names and "chat_id" not in names  # else Bailian's
            unit = 0.001 if is_guess and "hash_ids" in names else 1.0  # Mooncake's: ms
            for n, row in enumerate(rows, 1):  # noqa: B007
                at = seconds_of(row[arrival], unit) if arrivals else 0.0
                blocks = tuple(map(index, row.get("hash_ids", ()))) if is_json else ()
                yield Job(at, whole(row[prompt]), whole(row[output]), None, blocks,
                          512 if is_guess else 16,
                          f"{row.get(names.get('class', 'class'), '')}"), is_guess
    except FileNotFoundError:
        raise
    except Exception as error:  # whatever a wrong row leads to
        raise ValueError(f"{path}, row {n}: {error}: must be CSV or JSON lines with columns like "
                         f"{', '.join(known[0] for known in COLUMNS)}") from None

@cache
def text_of(pipe):
    """What a pipe holds, kept because it can be read only once."""
    return Path(pipe).read_text("utf-8-sig")

def whole(text):
    """A number of tokens."""
    number = float(text)
    if number % 1 != 0:
        raise ValueError(f"{text} tokens: must be a whole number")
    return int(number)

def seconds_of(text, unit):
    """An arrival: a date like 2026-11-28 10:30, a number, or a time of today in s, ms, us or ns."""
    try:
        number = float(text)
    except ValueError:
        date, zone = re.fullmatch(r"(.+?)(Z|[+-]\d\d:\d\d)?", text.strip()).groups()
        minutes = 0 if zone in (None, "Z") else 60 * int(zone[:3]) + int(zone[0] + zone[4:])
        return float(np.datetime64(date, "ns").astype(int)) / 1e9 - 60 * minutes
    n_digit = len(f"{check_range('arrival', number, -1e19, 1e19):.0f}")
    if n_digit < 10:
        return number * unit
    # of 2001 to 2033, else a date like 20261128103000 would pass as a time in ms
    seconds = number / 1000.0 ** ((n_digit - 10) // 3)
    return check_range(f"{text} as seconds since 1970", seconds, 1e9, 2e9)

# -----------------------------------------------------------------------------
# 7. what comes out: tables, pictures, JSON, the scoreboard

def tables(what, rows):
    """Markdown tables of an experiment's rows: of those with an x, then of the others."""
    texts = []
    for is_curve, by in (True, what.curves), (False, what.points):
        part = [row for row in rows if (row["at"][2] != "") == is_curve]
        if part and by != "picture":
            texts.append(lay_out(what, part, by))
    return "\n\n".join(texts)

def lay_out(what, rows, by):
    """A table with a column for each panel or series (by), or one for all points, each followed by
    a column of the paper's numbers, if there are some."""
    lines = defaultdict(dict)  # the other keys of points -> {(head of a column, kind): text}
    for row in rows:
        keys = dict(zip(("panel", "series", "x"), row["at"]))
        column = keys.pop(by, "") or what.y or "ours"
        line = lines[tuple(keys.values())]
        line[column, "ours"] = cell(row["ours"])
        if row["spread"]:
            line[column, "ours"] += f" ± {float(format(row['spread'], '.2g')):g}"
            # measured numbers are times and ratios; a difference of two may come out below 0
            if row["spread"] > row["ours"] / 4:
                line[column, "ours"] += " (noise)"
        if not row.get("inside", True):
            line[column, "ours"] += " (off)"
        if row["paper"] is not None:
            kind = row.get("kind", "")
            line[column, "paper"] = f"{kind} " * kind.startswith("at ") + cell(row["paper"])
    used = dict.fromkeys(pair for line in lines.values() for pair in line)
    columns = dict.fromkeys(column for column, _ in used)
    shown = [pair for pair in product(columns, ("ours", "paper")) if pair in used]
    heads = [column if kind == "ours" else kind for column, kind in shown]
    # a key that no point has gets no column
    names = [""] * (len(keys) - 1) + what.x.split()[-1:]
    given = [i for i, values in enumerate(zip(*lines)) if {*values} != {""}]
    texts = []
    for key, line in lines.items():
        texts.append([key[i] for i in given] + [line.get(pair) for pair in shown])
    return table([names[i] for i in given] + heads, texts)

def misses(rows):
    """Lines of text: the claims that do not hold, and why as far as we know, each reason once."""
    of_note = defaultdict(list)
    for row in rows:
        if not row.get("inside", True):
            of_note[row["experiment"], row["note"]].append(row["what"])
    for (name, note), whats in of_note.items():
        text = f"- (off) {name}, {'; '.join(whats)}: {note}"
        yield textwrap.fill(text, 118, subsequent_indent="  ")

# the same thing has the same color in every picture
COLORS = {name: color for color, names in {
    "#93c4ea": "C = 128; k = 1",
    "#2a78c2": "C = 256; k = 3; sarathi; ours",
    "#123a73": "C = 512; k = 5; sarathi_serve",
    "#1b9e87": "C = 1024; autopilot; oracle; prompt",
    "#7b52ab": "C = 2048",
    "#e07b2a": "Orca, best; goodput",
    "#f5b78a": "Orca, worst; orca",
    "#7f7f7f": "static; off",
    "#e8583f": "prefill_first; stall; bubble",
    "#f2c14e": "decode",
    "#e4e4e4": "waiting"}.items() for name in names.split("; ")}

OWN_COLORS = "#d1259b", "#6b8e23", "#8c564b", "#00a5b8"  # of what is not in COLORS

def draw(rows, what):
    """A Figure with a panel per panel: a line per series, or bars if the experiment has no x axis.
    If it has one, rows without an x are in the table alone. Hollow marks: the papers' numbers."""
    panels = defaultdict(lambda: defaultdict(list))  # panel -> series -> [(x, ours, paper)]
    limits = {}  # series -> x that is marked
    for row in rows:
        panel, series, x = row["at"]
        numbers = row["ours"], row["paper"]
        if panel == FULL_SHARE:
            limits[series] = row["ours"]
        if not what.x:
            panels[panel]["ours"].append((series, *numbers))
        elif x != "" and " / " not in f"{series}{x}":
            panels[panel][series].append((x, *numbers))
    n_column = min(3, len(panels))
    n_row = math.ceil(len(panels) / n_column)
    figure = Figure((max(6, 3 * n_column), 3.4 * n_row), layout="constrained")
    for i, (title, groups) in enumerate(panels.items(), 1):
        ax = figure.add_subplot(n_row, n_column, i)
        ax.set(title=title, xlabel=what.x, ylabel=what.y)
        ax.grid(alpha=0.25)
        ax.set_axisbelow(True)
        ax.tick_params(labelsize=8)
        if what.x:
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_formatter("{x:.4g}")
        if title.endswith("(s)"):
            ax.set_yscale("log", base=2)
            ax.yaxis.set_major_formatter("{x:.4g}")
        for j, (name, points) in enumerate(groups.items()):
            xs, ours, papers = zip(*points)
            color = COLORS.get(name, OWN_COLORS[j % len(OWN_COLORS)])
            if what.x:
                # so that none hides another: each second one is dashed, later ones are thinner
                ax.plot(xs, ours, ".--" if j % 2 else ".-", color=color, lw=3.6 / (1 + j // 2),
                        zorder=2 + j % 2, label=name or "ours")
                if isinstance(xs[0], float):  # no counts
                    ax.xaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
            else:
                ax.bar(xs, ours, color=color, label=name)
                ax.tick_params("x", labelrotation=90 if len(xs) > 3 else 0)
            if limits.get(name):
                ax.plot(limits[name], 0.99, "v", color=color, ms=14 - j, mec="black")
            if any(paper is not None for paper in papers):
                ax.plot(xs, papers, "o", color=color, mfc="white", mew=1.6, label="paper")
    return figure

def intervals(iterations):
    """What each request, or each stage of a pipeline, does. Yields (row, kind, start, end, tokens).
    kind: prompt or decode; between them waiting or stall, in a stage bubble."""
    staged = any(iteration.stage for iteration in iterations)
    last = {}  # row -> end of its last interval, and what it does after it
    for start, end, feeds, stage in iterations:
        rows = {feed.request.id: [feed] for feed in feeds}
        if staged:
            rows = {stage: feeds}
        for row, mine in rows.items():
            n_token = sum(feed.n for feed in mine)  # 0 when a request arrives
            before, idle = last.get(row, (start, ""))
            if start > before + 1e-9:
                yield row, idle, before, start, 0
            if n_token:
                is_prompt = any(feed.n > feed.n_logits for feed in mine)
                kind = "prompt" if is_prompt else "decode"
                yield row, kind, start, end, n_token
            idle = "stall" if n_token else "waiting"
            last[row] = (end, "bubble" if staged else idle)

def draw_timelines(timelines):
    """A Figure with a panel per timeline, a row per request or stage; of a long one its middle."""
    figure = Figure((10, 0.7 + 1.7 * len(timelines)), layout="constrained")
    axes = figure.subplots(len(timelines), 1, sharex=True)
    for ax, (name, iterations) in zip(axes, timelines.items()):
        shown = list(iterations)
        if len(shown) > 1000:
            shown = shown[len(shown) // 2:][:400]
        rows = set()
        for row, kind, start, end, _ in intervals(shown):
            rows.add(row)
            left = start - shown[0].start
            ax.barh(row, end - start, left=left, color=COLORS[kind], label=kind, ec="white", lw=0.4)
        staged = any(iteration.stage for iteration in shown)
        ax.set(title=name, ylabel="stage" if staged else "request", yticks=sorted(rows))
        ax.invert_yaxis()
        ax.margins(x=0)
    ax.set_xlabel("seconds")
    return figure

def save_picture(place, name, path):
    """Save the picture of an experiment that ran in a place."""
    if name in ("timeline", "fig12"):
        figure = draw_timelines(place.timelines)
    else:
        figure = draw(place.rows, EXPERIMENTS[name])
    save_figure(figure, f"{title_of(name)} {place.source}", path)

def title_of(name):
    return re.split(r"(?<!Fig\.)(?<!App\.)(?<=[.:?]) ", EXPERIMENTS[name].about)[0]

def save_figure(figure, title, path):
    """With one legend below all panels."""
    figure.suptitle(textwrap.fill(title, int(15 * figure.get_figwidth())), fontsize=9)
    handles = {label: handle for ax in figure.axes
               for handle, label in zip(*ax.get_legend_handles_labels())}
    if len(handles) > 1:
        width = 0.6 + 0.07 * max(map(len, handles))  # inches of a column
        figure.legend(handles.values(), handles, loc="outside lower center", fontsize=8,
                      frameon=False, ncols=max(1, int(figure.get_figwidth() / width)))
    figure.savefig(path, dpi=110)

def write_trace(path, timelines):
    """In Chrome's format: a process per engine, a thread per request or stage; microseconds."""
    events = []
    for pid, (name, iterations) in enumerate(timelines):
        events.append(dict(ph="M", pid=pid, name="process_name", args=dict(name=name)))
        for row, kind, start, end, tokens in intervals(iterations):
            events.append(dict(ph="X", pid=pid, tid=row, name=kind, args=dict(tokens=tokens),
                               ts=start * 1e6, dur=(end - start) * 1e6))
    Path(path).write_text(json.dumps(dict(traceEvents=events)))

def save_json(args, **report):
    """Write --json. NaN becomes null, because JSON has none."""
    if not args.json or not report["rows"]:
        return
    git = ["git", "-C", str(ASSETS), "rev-parse", "--short", "HEAD"]
    report |= dict(date=f"{datetime.now():%Y-%m-%d}", seed=args.seed, torch=torch.__version__,
                   commit=subprocess.run(git, capture_output=True, text=True).stdout.strip())
    text = json.dumps(json.loads(json.dumps(report), parse_constant={}.get))
    if args.json == "-":
        print(text)
    else:
        Path(args.json).write_text(text)

def scoreboard(args):
    """Print every number of the papers next to ours, simulated with one set of constants. Returns
    the rows."""
    names = [name for name in CLAIMS if EXPERIMENTS[name].only != "measured"]
    # spawned, because a forked child cannot use CUDA
    spawn = multiprocessing.get_context("spawn")
    own = signal.signal(signal.SIGINT, signal.SIG_IGN)  # for children: this process ends them
    with spawn.Pool(os.cpu_count()) as pool:
        signal.signal(signal.SIGINT, own)
        runs = pool.imap(partial(scoreboard_rows, args), names)
        rows = sum(tqdm(runs, "scoreboard", len(names), leave=False, delay=3), [])
    heads = ("experiment", "what", "paper", "paper_source", "ours", "kind", "inside")
    lines = []
    for row in rows:
        shown = row | dict(kind=row["kind"] + "*" * row["fit"])
        lines.append([shown[head] for head in heads])
    print(f"{table(heads, lines)}\n\nWhat misses, and why as far as we know:\n")
    print(*misses(rows), sep="\n")
    print("\nA value is inside within 15 %, a gain within 30 % of what it gains. A run counts once,"
          "\nand holds if all of its rows do. Constants were fitted to those with a *.\n")
    print("\n".join(count_runs(rows)))
    return rows

def scoreboard_rows(args, name):
    """The rows of one experiment that have a claim, where the paper's numbers hold."""
    torch.set_num_threads(1)
    tqdm.set_lock(RLock())  # the default is shared: a process that is stopped may never release it
    what = EXPERIMENTS[name]
    rows = what.rows(simulate(args, what.on))
    return [row for row in rows if row["paper"] is not None]

def count_runs(rows):
    """Lines of text: how many runs hold, by paper and by kind of claim; and how many rows miss, by
    the reason that their notes begin with."""
    runs = defaultdict(list)  # (paper, role, run) -> whether its rows are inside
    for row in rows:
        role = {"value": "values", "gain": "gains"}.get(row["kind"], "bounds")
        role = "fitted" if row["fit"] else role
        run = row["run"] or (row["experiment"], row["what"])
        paper, *_ = row["paper_source"].split()
        runs[paper, role, run].append(row["inside"])
    counts = defaultdict(lambda: defaultdict(list))  # paper -> role -> whether runs hold
    for (paper, role, _), inside in runs.items():
        counts[paper][role].append(all(inside))
        counts["all"][role].append(all(inside))
    counts["all"] = counts.pop("all", {})  # the last line
    for paper, roles in counts.items():
        texts = [f"{role} {sum(roles[role])} of {len(roles[role])}"
                 for role in ("values", "gains", "bounds", "fitted") if role in roles]
        yield f"- {paper}: {', '.join(texts)}"
    reasons = Counter(row["note"].split(":")[0] for row in rows if not row["inside"])
    texts = [f"{reason} {n}" for reason, n in reasons.items()]
    yield f"- rows that miss: {', '.join(texts) or 'none'}"

# -----------------------------------------------------------------------------
# 8. the command line

MAIN_JOB = ["users", "table4", "table2", "ceilings"]
NEXT = """\
Next: write your own scheduler (README.md): python bench.py online --scheduler my.py:NAME
Or beat a number: ten exercises are at the top of bench.py. assets/manual.md has all other parts."""
NEEDS = {  # of flags: experiments, or another flag
    "online": ("rate", "spec", "adapters", "by", "seeds"),
    "online, attainment, capacity": ("schedulers", "order", "memory", "cv", "prompt", "output",
                                     "shared", "jobs", "window", "first"),
    "spec_here": ("draft", "prompts"),
    "jobs": ("window", "first", "speed"), "hardware": ("seeds",)}
EXCLUDES = {"jobs": ("prompt", "output", "shared"), "rate": ("speed",)}  # what a flag overrides
MINIMUM = {  # values of flags
    "chunk": 1, "tp": 1, "max_batch": 2, "context": 64, "seconds": 0.0, "rate": 0.001, "cv": 0.0,
    "tbt": 1e-4, "ttft": 1e-4, "first": 1, "speed": 1e-6, "adapters": 1, "shared": 8, "seeds": 1}

def whole_numbers(text):
    """A type of argparse: 256, or 256,512,768, or 8..512."""
    return sorted(map(int, re.split(r",|\.\.", text)))

def several(text, base, names):
    """A type of argparse: names, or objects of files, like sarathi,my.py:Mine."""
    return [object_in_file(part, base, names) for part in text.split(",")]

def make_parser():
    about, usage, *_ = (__doc__ or "\n\n").split("\n\n")
    # without its usage lines, argparse reports a mistake in one line
    parser = argparse.ArgumentParser(
        description=f"{about}\n\n{usage}", allow_abbrev=False, conflict_handler="resolve",
        formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS)
    flag = parser.add_argument
    flag("experiments", nargs="*", help=f"names; list; scoreboard; default: {' '.join(MAIN_JOB)}")
    add_model_flags(parser, None)
    flag("--chunk", type=int, help="tokens of an iteration with a chunk: a large one computes "
         "prompts faster, and stalls answers longer; default: 256, for a simulated capacity or "
         "attainment 512")
    flag("--hardware", type=lambda text: text if text.endswith(".json") else text.lower(),
         help=f"simulate this GPU: one of {', '.join(GPUS)}; or your own, a FILE.json of "
         f"{', '.join(GPU._fields)}; default: measure this machine")
    flag("--context", type=int, help="the longest context of a simulated model; default: its own")
    flag("--lengths", type=whole_numbers, help="tokens per request, prompt and output; default: "
         "256,384,512 here, 1024,2048,3072 if simulated")
    flag("--max-batch", type=int, help="the most requests in a batch; default: 6, for online 12, "
         "for capacity and attainment 48")
    flag("--seconds", type=float, default=1.2,
         help="how long to measure: longer narrows the spread; default: 1.2, for whole runs thrice")
    flag("--size", choices=("small", "full"),
         help="few settings of an experiment, or all; default: small if measured")
    flag("--plot", metavar="FOLDER", help="save the pictures there")
    flag("--json", metavar="FILE", help="save all rows at the end; -: to stdout")
    flag("--trace", metavar="FILE", help="save what each scheduler did, for ui.perfetto.dev")
    add_online_flags(parser)
    text = parser.add_argument_group("of spec_here").add_argument
    text("--draft", type=partial(object_in_file, base=Proposer),
         help="a draft model, named like --model; or FILE.py:CLASS, your own proposer")
    text("--prompts", metavar="FILE", help="a text; each paragraph is a prompt")
    return parser

def add_online_flags(parser):
    load = parser.add_argument_group("of online, attainment and capacity").add_argument
    load("--schedulers", type=partial(several, base=Scheduler, names=SCHEDULERS),
         help="which to compare, like sarathi,my.py:Mine; default: the built-in ones, --scheduler")
    load("--order", type=partial(several, base=Callable, names=ORDERS),
         help=f"orders of the queue to compare: {', '.join(ORDERS)}; or FILE.py:NAME, your own")
    load("--ttft", type=float, default=2.0, help="target: seconds to the first token; default: 2")
    load("--tbt", type=float, default=0.1, help="target: seconds that 99 %% of the stalls stay "
         "within; a stall is the time between two tokens (TBT or ITL in papers); default: 0.1")
    load("--prompt", type=whole_numbers, help="tokens of a prompt, like 256 or 8..512")
    load("--output", type=whole_numbers, help="tokens of an output")
    load("--shared", type=int, help="begin each prompt with one of eight texts of this many tokens")
    load("--cv", type=float, default=1.0,
         help="bursts: coefficient of variation of the times between arrivals; default: 1, Poisson")
    load("--jobs", metavar="FILE", help="a trace, CSV or JSON lines, .gz too: arrival (s), prompt, "
         "output (tokens), or columns of Azure, BurstGPT, Vidur, Bailian, Mooncake, guidellm")
    load("--window", type=whole_numbers, help="seconds of the trace to keep: 3600..7200")
    load("--first", type=int, help="keep this many requests of the trace, or of its window")
    online = parser.add_argument_group("of online").add_argument
    online("--rate", type=float, help="requests/s; default: 0.7 of what can be served")
    online("--seeds", type=int, default=5, help="simulate with this many different arrivals, "
           "the same for all rows, and print medians; default: 5")
    online("--speed", type=float, help="of a trace: with 4, requests arrive four times as densely")
    online("--adapters", type=int, help="requests draw from this many; half take the first quarter")
    online("--by", choices=("prompt", "adapter", "class"), help="a row for each class of requests; "
           "class: the trace's column, which your scheduler finds in request.notes['class']")
    online("--spec", type=partial(object_in_file, base=Policy),
           help="how many drafts: a number, goodput, ...; or FILE.py:CLASS, your own")

def parse_arguments(words=None):
    parser = make_parser()
    args = parser.parse_args(words)
    given = given_flags(parser, args)
    for name, low in MINIMUM.items():
        check_range(name, given.get(name, low), low)
    for owners, names in NEEDS.items():
        if not {*owners.split(", ")} & {*args.experiments, *given}:
            check_unused(names, given, f"without {owners}")
    for other, names in EXCLUDES.items():
        if other in given:
            check_unused(names, given, f"with --{other}")
    if args.window and len({*args.window}) != 2:
        raise ValueError(f"window = {args.window}: must be like 3600..7200")
    if not args.chunk:
        slow = {*args.experiments} <= {"capacity", "attainment"}
        args.chunk = 512 if args.hardware and args.experiments and slow else 256
    return args

def check_unused(names, given, where):
    for name in names:
        if name in given:
            raise ValueError(f"--{name} has no effect {where}")

def run_experiments(args, names):
    """Run experiments. Each table is printed when its experiment is done, or is stopped. At the end
    all rows are saved."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    places = {name: choose_places(args, name) for name in names}
    try:
        for name, group in places.items():
            for place in group:
                run_experiment(args, name, place, is_first=place is group[0])
    finally:
        every_place = sum(places.values(), [])
        if args.trace:
            write_trace(args.trace, chain(*(place.timelines.items() for place in every_place)))
        save_json(args, experiment=" ".join(names),
                  rows=sum((place.rows for place in every_place), []),
                  requests=sum((place.requests for place in every_place), []))

def run_experiment(args, name, place, is_first):
    """Fill a place's rows, print them as a table, and draw the picture. The first place's table
    stands below a heading."""
    what = EXPERIMENTS[name]
    try:
        with tqdm(desc=name, unit=" runs", leave=False, disable=None) as place.bar:
            place.rows.extend(what.rows(place))
    finally:
        if place.rows:
            if is_first:
                print_heading(name, what)
            texts = [textwrap.fill(place.source, 118), tables(what, place.rows),
                     "\n".join(misses(place.rows))]
            print("\n\n".join(filter(None, texts)), end="\n\n", flush=True)
        if place.rows and args.plot:
            where = Path(place.on.gpu).stem if place.on else place.model.device.type
            save_picture(place, name, os.path.join(args.plot, f"{name}_{where}.png"))

def print_heading(name, what):
    print(f"### {name}\n{textwrap.fill(what.about, 118)}")
    axes = f"By {what.x}. " * bool(what.x) + f"Numbers: {what.y}." * bool(what.y)
    if axes and what.curves != "picture":
        print(axes)

def main(words=None):
    args = parse_arguments(words)
    names = args.experiments
    for path in {args.trace, args.json} - {None, "-"}:
        open(path, "a").close()  # an error now, not after the experiments
        if os.path.isfile(path) and not os.path.getsize(path):
            os.remove(path)
    if args.plot:
        os.makedirs(args.plot, exist_ok=True)
    if names == ["list"]:
        for name, what in EXPERIMENTS.items():
            where = what.only or "here, or --hardware"
            print(textwrap.fill(f"{name:13} {where:20} {what.about}", 118,
                                subsequent_indent=35 * " "))
    elif names == ["scoreboard"]:
        save_json(args, experiment="scoreboard", rows=scoreboard(args))
    else:
        if not names:
            print("About a minute: first LLaMA-13B on a simulated A100, then this machine.\n",
                  flush=True)
            names = MAIN_JOB
        for name in names:
            check_choice("experiment", name, EXPERIMENTS)
        run_experiments(args, names)
        if names is MAIN_JOB:
            print(NEXT, file=sys.stderr)

if __name__ == "__main__":
    run_command_line(main)
