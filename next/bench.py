"""The papers' tables and figures, measured on this machine or simulated on hardware you lack.

    python bench.py --chunk 256                      ceilings, Table 2 and Table 4 on this machine
    python bench.py fig9 --hardware a6000 --plot .   one figure, simulated: a table and a picture
    python bench.py scoreboard                       every number of the papers beside ours

In reading order: claims; experiments; places, where experiments run; workloads; the experiments,
paper by paper; the scoreboard; tables, pictures and traces; the command line.

An experiment is a generator of points (panel, series, x, ours). The papers' numbers are CLAIMS.
Tables, JSON, pictures and the scoreboard derive from both.
"""
import argparse
import csv
import json
import math
import os
import platform
import re
import sys
import tempfile
import textwrap
import time
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, product
from statistics import fmean, median
from typing import Callable, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from kernels import FEW_ROWS, linear, pack
from model import GPT, Adapter, is_fast, load_model, preset
from sarathi import (GPUS, CostModel, EarlyAbort, Engine, IterationStats, Pipeline, Request,
                     Sarathi, SarathiServe, Scheduler, Span, add_model_flags, check_choice,
                     check_range, cluster, fcfs, lcfs, run_command_line)

def time_plan(engine, plan):
    """Seconds of a made-up iteration."""
    for request, _ in plan:
        engine.pool.reserve(request, request.max_len)
        engine.adapters.acquire(request.adapter)
    start = time.perf_counter()
    engine.runner.run(plan)
    seconds = time.perf_counter() - start
    for request, _ in plan:
        engine.pool.release(request)
        engine.adapters.release(request.adapter)
    return seconds

# -----------------------------------------------------------------------------
# claims: every number of the papers, as data

class Claim(NamedTuple):
    """A number of a paper. fit: a constant of the cost model was chosen on it."""
    paper: float
    kind: str  # "value", "gain" over a baseline, "at least", "at most"
    fit: bool

    @property
    def is_bound(self):
        return self.kind.startswith("at")

    def holds(self, ours):
        """Values within 15 %, gains within 30 % of what they gain, bounds as they say."""
        if self.kind == "at least":
            return ours >= self.paper
        if self.kind == "at most":
            return ours <= self.paper
        if self.kind == "gain":
            return abs((ours - 1) / (self.paper - 1) - 1) <= 0.30
        return abs(ours / self.paper - 1) <= 0.15

# experiment | kind | panel | series | x=paper ...; behind a number, * says that it is a fit.
# Left out: what follows from other rows (in Table 2 totals and 1.2 ms per decode, 1.28 in Fig. 12,
# +32 % in Fig. 7), and vLLM-packed [S-LoRA Table 3], a system that is not simulated.
CLAIM_TABLE = """
table2       | value    | linear (ms)          | prefill-only        | 224.8*
table2       | value    | linear (ms)          | decode-only         | 44.28*
table2       | value    | linear (ms)          | decode-maximal      | 223.2*
table2       | value    | attn (ms)            | prefill-only        | 10.0*
table2       | value    | attn (ms)            | decode-only         | 5.68*
table2       | value    | attn (ms)            | decode-maximal      | 15.2*
table4       | gain     | decode speedup       |                     | 1024=5.45 2048=3.26 3072=2.51
table4       | gain     | throughput           |                     | 1024=1.33 2048=1.26 3072=1.22
table4       | gain     | decode speedup       | LLaMA-33B, A100     | 1024=3.83 2048=4.25 3072=3.51
table4       | gain     | throughput           | LLaMA-33B, A100     | 1024=1.25 2048=1.22 3072=1.14
fig3         | value    | decode over prefill  |                     | 1=200 2=100 18=16.7
fig3         | at most  | share of others      |                     | 0.05*
fig4         | value    | prefill (tokens/ms)  |                     | 1024=180
fig4         | value    | prefill at 256       | over the peak       | 0.875
fig4         | value    | decode batch         | at 95 % of the peak | 256
fig4         | at least | intensity            | prefill over decode | 100
fig7         | value    | iteration (ms)       |                     | 128=55* 256=69.8* 257=92.33*
fig8         | gain     | decode speedup       | largest             | 10
fig8         | gain     | decode speedup       | smallest            | 2.8
fig8         | value    | largest batch        | L = 1024            | 18*
fig8         | value    | largest batch        | L = 2048            | 10*
fig8         | value    | largest batch        | L = 3072            | 6*
fig9         | gain     | peak at L = 1024     | C = 256             | 1.27
fig9         | gain     | peak at L = 2048     | C = 256             | 1.25
fig9         | gain     | peak at L = 3072     | C = 256             | 1.23
fig9         | gain     | peak at L = 1024     | C = 512             | 1.23
fig9         | gain     | peak at L = 1024     | Orca, best          | 1.11
fig9         | value    | peak at L = 1024     | Orca, worst         | 1
fig9         | value    | P:D of the peak      | C = 256             | 14
fig9         | value    | P:D of the peak      | C = 512             | 28
fig9         | at least | C = 256              | over C = 128        | 1
fig9         | at least | P:D of Orca's peak   | over C = 256        | 1
fig10        | gain     | ffn                  | smallest            | 1.3
fig10        | gain     | ffn                  | largest             | 1.6
fig10        | gain     | projections          | smallest            | 1.05
fig10        | gain     | projections          | largest             | 1.38
fig12        | gain     | bubble time, median  | Orca over SARATHI   | 6.29
fig12        | gain     | completion           | Orca over SARATHI   | 1.91
fig12        | gain     | completion           | TP over SARATHI     | 1.48
fig12        | value    | largest batch        | TP8 x PP8           | 27*
fig12        | value    | largest batch        | TP8                 | 11*
fig13        | value    | attention            | worst               | 64=3
fig13        | value    | prefill              | worst               | 64=5 128=2
fig13        | at most  | prefill              | worst               | 256=1.25 512=1.111
fig13        | value    | end to end           | best                | 64=1
fig13        | gain     | end to end           | best                | 128=1.16
fig13        | at least | C = 256              | over C = 320        | 1
slora_table3 | value    | S1                   | S-LoRA              | 5=8.05* 100=7.99
slora_table3 | value    | S1                   | S-LoRA              | 1000=7.64 2000=7.61
slora_table3 | value    | S2                   | S-LoRA              | 5=7.48 100=7.29
slora_table3 | value    | S2                   | S-LoRA              | 1000=6.69* 2000=6.71
slora_table3 | value    | S4                   | S-LoRA              | 2=4.49 100=4.28* 1000=3.96
slora_table3 | value    | S1                   | PEFT                | 5=0.88* 100=0.25*
slora_table3 | value    | S2                   | PEFT                | 5=0.74 100=0.24
slora_table3 | value    | S4                   | PEFT                | 2=0.54 100=0.13*
slora_fig5   | value    | a100                 | S-LoRA              | 400=4.06
slora_fig5   | value    | a100                 | no-unify            | 400=2.64*
slora_fig5   | value    | a100                 | bmm                 | 400=0.173*
slora_fig5   | value    | a10g                 | S-LoRA              | 200=1.576
slora_fig5   | value    | a10g                 | no-unify            | 200=1.194
slora_fig5   | value    | a10g                 | bmm                 | 200=0.253
slora_fig6   | value    | requests/s           | S-LoRA              | 1=.942 2=1.838 4=3.539
slora_fig6   | value    | requests/s           | S-LoRA              | 6=4.012 8=4.017
slora_fig6   | value    | latency (s)          | S-LoRA              | 1=15.32* 2=17.18 4=23.03
slora_fig6   | value    | latency (s)          | S-LoRA              | 6=86.26 8=163.2
slora_fig6   | value    | first token (s)      | S-LoRA              | 1=.364 2=.499 4=.74
slora_fig6   | value    | first token (s)      | S-LoRA              | 6=60.02 8=136.5
slora_fig6   | value    | attainment           | S-LoRA              | 1=1 2=1 4=1 6=.102 8=.059
slora_fig8   | at least | 4 GPUs over 2        | S5                  | 2
slora_fig8   | at least | 4 GPUs over 2        | S6                  | 2
slora_fig9   | value    | alpha = 1            | merge               | 1=1.587 2=1.15 5=.733
slora_fig9   | value    | alpha = 1            | S-LoRA              | 1=1.412 2=1.442 5=1.421
slora_fig9   | value    | alpha = 0.1          | merge               | 5=.949
slora_fig9   | value    | alpha = 0.1          | S-LoRA              | 5=1.409
slora_fig10  | value    | attainment           | early abort         | 1=.72 2=.72 4=.69 6=.66 8=.56
slora_fig10  | value    | attainment           | last come first     | 1=.7 2=.7 4=.59 6=.57 8=.45
slora_fig10  | value    | attainment           | first come first    | 1=.1 2=.1 4=.1 6=.28 8=.14
clustering   | value    | requests/s           | S-LoRA              | 1=1.733 2=1.693 4=1.677
clustering   | value    | requests/s           | S-LoRA              | 8=1.71 32=1.635
clustering   | value    | attainment           | S-LoRA              | 1=.846 2=.838 4=.792
clustering   | value    | attainment           | S-LoRA              | 8=.85 32=.679
spec_fig1    | value    | no gain beyond rate  | k = 3               | 16
spec_fig1    | value    | no gain beyond rate  | k = 5               | 12*
spec_fig1    | at least | best k at rate 4     |                     | 3
spec_fig1    | at least | goodput              | lowest rate         | 1.2
spec_fig1    | at most  | goodput              | most                | 3.2
spec_fig1    | at least | goodput              | least               | 1
spec_fig5    | at least | best k               |                     | 1=5
spec_fig5    | at most  | best k               |                     | 512=0
spec_fig12   | at least | goodput              | lowest rate         | 1.2
spec_fig12   | at most  | goodput              | most                | 3.2
spec_fig12   | at least | goodput              | least               | 1
spec_fig16   | at least | goodput              | over 1,1,1          | 1
tng          | gain     | chunked prefill      | over prefill_first  | 1.5
fidelity     | at most  | iteration error (%)  | median              | 10
fidelity     | at most  | throughput error (%) | largest             | 10
"""

def parse_claims(table):
    """{experiment: {(panel, series, x): Claim}}"""
    claims = defaultdict(dict)
    for line in table.strip().splitlines():
        name, kind, panel, series, cells = [part.strip() for part in line.split("|")]
        for cell in cells.split():
            x, _, number = cell.rpartition("=")
            claim = Claim(float(number.rstrip("*")), kind, number.endswith("*"))
            claims[name][panel, series, int(x) if x else ""] = claim
    return claims

CLAIMS = parse_claims(CLAIM_TABLE)

# -----------------------------------------------------------------------------
# experiments

class Point(NamedTuple):
    """One number of an experiment. spread: half the distance between the quartiles of rounds."""
    panel: str
    series: str
    x: object  # a number, a word, or ""
    ours: float
    spread: float = None

@dataclass
class Experiment:
    """A generator of points, and how they are shown."""
    run: Callable  # Place -> points
    x: str = ""  # label of the x axis; its last word stands in tables
    y: str = ""
    on: tuple = ("llama-13b", "a6000", 1)  # the paper's model, GPU and tensor parallelism
    only: str = ""  # "measured" or "simulated", if it cannot be both

    @property
    def about(self):
        return " ".join(self.run.__doc__.split())

    def rows(self, place):
        """The points as dicts with the papers' numbers. The claims of a simulated place hold for
        the paper's model and GPU only."""
        name = self.run.__name__
        claims = {} if place.simulated and place.on != self.on else CLAIMS[name]
        for point in self.run(place):
            panel, series, x, ours, spread = Point(*point)
            paper_x = place.paper_length(x) if self.x.endswith(" L") else x
            claim = claims.get((panel, series, paper_x))
            what = ": ".join(part for part in (panel, series) if part)
            if x != "":
                what += f", {self.x.split()[-1]} = {x}" if self.x else f", {x}"
            if claim and paper_x != x:
                what += f" (paper: {paper_x})"
            if claim and claim.is_bound:
                what += f" ({claim.kind})"
            yield dict(experiment=name, what=what, at=[panel, series, x], ours=ours, spread=spread,
                       paper=claim.paper if claim else None,
                       source="simulated" if place.simulated else "measured")

EXPERIMENTS = {}

def experiment(x="", y="", **options):
    """Register a function as an experiment, under its own name."""
    def register(run):
        EXPERIMENTS[run.__name__] = Experiment(run, x, y, **options)
        return run
    return register

# -----------------------------------------------------------------------------
# places, where experiments run

class Tape(list):
    """The first iterations of an engine, for pictures and traces."""
    def __init__(self, name):
        self.name = name

    def append(self, iteration):
        if len(self) < 20000:
            super().append(iteration)

class Place:
    """This machine, or simulated hardware. It answers four questions: iteration(), operators(),
    serve() and rounds()."""
    def __init__(self, args, model, lengths, full):
        self.args = args
        self.model = model  # a GPT or a CostModel
        self.lengths = args.lengths or lengths  # tokens per request
        self.chunk = args.chunk
        self.B = args.max_batch or 6  # requests in a batch [SARATHI Table 4]
        self.full = args.size == "full" if args.size else full
        self.tapes = []
        longest = model.config.block_size
        check_range("lengths", max(self.lengths), 8, longest)

    def grid(self, small, full):
        """Sizes of an experiment: small ones, or the paper's [--size]."""
        return full if self.full else small

    def paper_grid(self, small, full):
        """The same, for grids that are always full where they are simulated."""
        return full if self.full or self.simulated else small

    def sizes(self):
        """[(L, B)]: the paper's largest batches, or this place's first length."""
        return self.paper_grid([(self.lengths[0], self.B)], list(MAX_B.items()))

    def tape(self, name, always=False):
        """A list for an engine's iterations; None if they are not asked for."""
        if not self.args.trace and not always:
            return None
        self.tapes.append(Tape(name))
        return self.tapes[-1]

    def engine(self, B, n_page, name="", **options):
        defaults = dict(scheduler=self.args.scheduler, chunk=self.chunk, seed=self.args.seed,
                        max_batch=B, n_page=n_page)
        if "record" not in options:
            options["record"] = self.tape(name)
        return Engine(self.model, **(defaults | options))

    def serve(self, jobs, B, clients=0, name="", n_page=0, **options):
        """Serve jobs in batches of up to B requests. Returns a Run."""
        longest = max(job.prompt + job.output for job in jobs)
        name = name or str(options.get("scheduler", self.args.scheduler))
        return serve(self.engine(B, n_page or B * longest, name, **options), jobs, clients)

    def seconds(self, *functions):
        """The median of each function's seconds in interleaved rounds."""
        return [median(times) for times in self.rounds(*functions)]

class Simulated(Place):
    """A CostModel of hardware you lack."""
    simulated = True

    def __init__(self, args, model, gpu, tp=1, system="sarathi", **change):
        self.on = (model, gpu, tp)
        self.source = f"{model} on {tp} x {gpu}, simulated"
        config = replace(preset(model), **change)
        cost = CostModel.roofline(config, gpu, tp, system=system)
        super().__init__(args, cost, [1024, 2048, 3072], True)

    def elsewhere(self, model="", gpu="", **options):
        """Another model, GPU or serving system, with the same flags."""
        tp = options.pop("tp", self.on[2])
        return Simulated(self.args, model or self.on[0], gpu or self.on[1], tp, **options)

    def one_layer(self):
        return self.elsewhere(n_layer=1)

    def paper_length(self, x):
        return x

    def rounds(self, *functions, n=0):
        """[[seconds]] of each function: a simulator needs one round."""
        return [[function()] for function in functions]

    def iteration(self, decodes=0, context=0, chunk=0, past=0, last=True):
        """A function that returns the seconds of an iteration: so many decodes, each after
        `context` cached tokens, and a chunk after `past`. last: all sample a token."""
        entries = made_up_entries(decodes, context, chunk, past, last)
        return lambda: self.model.time_of(entries)

    def operators(self, decodes=0, context=0, chunk=0, past=0):
        """{operator: seconds} of an iteration"""
        entries = made_up_entries(decodes, context, chunk, past, True)
        return self.model.split(self.model.stats(entries))

def made_up_entries(decodes, context, chunk, past, last):
    """An iteration as IterationStats.of takes it."""
    entries = [(context, 1, last, 0)] * decodes
    return entries + [(past, chunk, last, 0)] if chunk else entries

class Machine(Place):
    """This machine, and a model on it."""
    simulated = False

    def __init__(self, args, model, name):
        self.name = name
        self.source = f"{name}, {str(model.dtype)[6:]}, on {machine_name(model.device)}"
        super().__init__(args, model, [256, 512, 768], False)

    def one_layer(self):
        config = replace(self.model.config, n_layer=1)
        model = GPT.from_preset(config, self.model.dtype, str(self.model.device))
        return Machine(self.args, model, self.name)

    def paper_length(self, x):
        """The paper's length that a length of ours stands for."""
        return dict(zip(self.lengths, (1024, 2048, 3072))).get(x, x)

    def rounds(self, *functions, n=0):
        """[[seconds]] of each function. The functions take turns, so that a machine that becomes
        slower does so for all. The first round warms up."""
        n = 1 + (n or self.args.rounds)
        results = [[] for _ in functions]
        for i in tqdm(range(n), "rounds", leave=False, delay=5):
            order = range(len(functions))
            for j in reversed(order) if i % 2 else order:
                results[j].append(functions[j]())
        return [values[1:] for values in results]

    def iteration(self, decodes=0, context=0, chunk=0, past=0, last=True):
        """As of Simulated: a function that runs an iteration and returns its seconds."""
        plan = made_up_plan(decodes, context, chunk, past, last)
        n_page = sum(request.max_len for request, _ in plan)
        engine = Engine(self.model, max_batch=len(plan), n_page=n_page, chunk=max(1, chunk))
        engine.runner.kv.normal_()
        return partial(time_plan, engine, plan)

    def operators(self, decodes=0, context=0, chunk=0, past=0, n=5):
        """{operator: seconds} of an iteration, the mean of n runs"""
        plan = made_up_plan(decodes, context, chunk, past, True)
        runner = Engine(self.model, n_page=sum(r.max_len for r, _ in plan)).runner
        spans = []
        for request, n_new in plan:
            runner.engine.pool.reserve(request, request.n_past + n_new)
            spans.append(Span(request, request.n_past, request.prompt[request.n_past:], 1))
        batch = runner.pack(spans).to(self.model.device)
        seconds = Counter()
        for i in range(1 + n):
            if i == 1:
                seconds.clear()  # the first run warms up
            stopwatch = Stopwatch(seconds, self.model.device)
            self.model.forward(batch, runner.kv, stopwatch)
        return {operator: t / n for operator, t in seconds.items()}

class Stopwatch:
    """GPT.forward's mark: adds the time since the last call to an operator's seconds."""
    def __init__(self, seconds, device):
        self.seconds = seconds
        self.is_cuda = device.type == "cuda"
        self.last = time.perf_counter()

    def __call__(self, operator):
        if self.is_cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[operator] += now - self.last
        self.last = now

def made_up_plan(decodes, context, chunk, past, last):
    """The plan of an iteration, of requests that were never added."""
    plan = []
    for n_past, n in [(context, 1)] * decodes + [(past, chunk)] * bool(chunk):
        request = Request([1] * (n_past + n + (not last)), 1)
        request.n_past = n_past
        plan.append((request, n))
    return plan

def machine_name(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            found = re.search(r"model name\s*: (.*)", file.read())
        name = found[1] if found else name
    return f"{name}, {torch.get_num_threads()} threads"

# -----------------------------------------------------------------------------
# workloads, and how they were served

class Job(NamedTuple):
    """A request that will come."""
    arrival: float  # seconds
    prompt: int  # tokens
    output: int
    adapter: str = None

def gamma_jobs(rate, seconds, cv=1.0, n_adapter=0, alpha=1.0, prompt=(8, 511), output=(8, 511),
               seed=42):
    """Jobs with Gamma distributed gaps, Poisson for cv = 1; lengths are uniform; the popularity of
    adapters is a power law [S-LoRA §7.2]."""
    rng = np.random.RandomState(seed)
    n = max(1, int(rate * seconds))
    names = [None] * n
    if n_adapter:
        names = (rng.power(alpha, n) * n_adapter).astype(int).astype(str).tolist()
    prompts = rng.randint(prompt[0], prompt[1] + 1, n).tolist()
    outputs = rng.randint(output[0], output[1] + 1, n).tolist()
    arrivals = np.cumsum(rng.gamma(1 / cv ** 2, cv ** 2 / rate, n)).tolist()
    return [Job(*job) for job in zip(arrivals, prompts, outputs, names)]

def zipf_jobs(n, low=1024, high=4096):
    """Jobs of low .. high tokens, the k-th shortest with a chance of k^-0.4, P:D = 10 [SARATHI
    §5.3]."""
    weights = np.arange(1, high - low + 2) ** -0.4
    rng = np.random.default_rng(0)
    lengths = rng.choice(np.arange(low, high + 1), n, p=weights / weights.sum())
    return [Job(0.0, *halves(L, 10)) for L in lengths.tolist()]

def read_jobs(path):
    """Jobs from a CSV file with the columns arrival, prompt and output. ValueError for others."""
    jobs = []
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            try:
                jobs.append(Job(float(row["arrival"]), int(row["prompt"]), int(row["output"])))
            except (KeyError, TypeError, ValueError):
                raise ValueError(f"{path}: {row}: must have arrival, prompt, output") from None
    check_range(f"requests in {path}", len(jobs), 1)
    return sorted(jobs)

class Run(NamedTuple):
    """Requests that have been served."""
    requests: list
    start: float

    @property
    def done(self):
        return [r for r in self.requests if r.state in ("length", "stop")]

    @property
    def seconds(self):
        return max((r.times[-1] for r in self.done), default=math.inf) - self.start

    @property
    def requests_per_second(self):
        return len(self.done) / self.seconds

    @property
    def tokens_per_second(self):
        return sum(r.max_len for r in self.done) / self.seconds

    @property
    def latency(self):
        """Mean seconds from arrival to the last token."""
        return fmean([r.times[-1] - r.arrival for r in self.done] or [math.nan])

    @property
    def ttfts(self):
        return [r.ttft for r in self.done]

    @property
    def tpots(self):
        return [r.tpot for r in self.done]

    @property
    def stalls(self):
        """Each request's longest gap between two tokens."""
        return [max(np.diff(r.times), default=0.0) for r in self.done]

    def attainment(self, slo=6.0):
        """Share of all requests with a first token within the SLO [S-LoRA §4.3]."""
        return sum(ttft < slo for ttft in self.ttfts) / len(self.requests)

def serve(engine, jobs, clients=0, start=None):
    """Serve jobs until all have ended. clients: so many are there at once, and the next one comes
    when one has ended; 0: they come at their arrival. Returns a Run."""
    start = engine.clock.now() if start is None else start
    requests = []
    left = jobs[::-1]
    while left or engine.requests:
        while left and (not clients or len(engine.requests) < clients):
            job = left.pop()
            arrival = None if clients else start + job.arrival
            prompt = made_up_prompt(engine, job.prompt, len(requests))
            requests.append(Request(prompt, job.output, job.adapter, arrival=arrival))
            engine.add(requests[-1])
        engine.step()
    return Run(requests, start)

def made_up_prompt(engine, n, seed):
    """n random tokens; the simulator only looks at their number."""
    if isinstance(engine, Pipeline) or engine.simulated:
        return range(n)
    return np.random.default_rng(seed).integers(0, engine.model.config.vocab_size, n).tolist()

def halves(L, pd=0, chunk=0, B=1):
    """Cut L tokens into (prompt, output) with a ratio of P:D. pd = 0: chunk / (B - 1), where
    decodes piggyback perfectly [SARATHI §4.4]. The prompt is whole chunks, if some are near."""
    pd = pd or chunk / max(1, B - 1)
    P = max(1, L - max(1, round(L / (1 + pd))))
    piece = chunk - (B - 1)
    whole = piece * round(P / piece) if piece > 0 else 0
    if 0 < whole < L and abs(whole - P) <= max(1, 0.02 * L):
        P = whole
    return P, L - P

def middle(values):
    """(median, half the distance between the quartiles) of the rounds"""
    low, high = np.quantile(values, (0.25, 0.75))
    return median(values), float(high - low) / 2 if len(values) > 1 else None

# -----------------------------------------------------------------------------
# the main job

@experiment()
def ceilings(place):
    """This machine's matrix products and memory: how many tokens does one weight read pay for?"""
    if place.simulated:
        flops, bandwidth = place.model.flops, place.model.bandwidth
    else:
        flops, bandwidth = measure_ceilings(place)
    yield "matrix products (TFLOP/s)", "", "", flops / 1e12
    yield "weights read (GB/s)", "", "", bandwidth / 1e9
    ridge = flops * place.model.dtype.itemsize / 2 / bandwidth
    yield "ridge point (tokens)", "", "", ridge

def measure_ceilings(place):
    """(FLOP/s, bytes/s): one matrix times many rows, and more weights than caches hold times one
    row."""
    model = place.model
    on_cpu = model.device.type == "cpu"
    C, N = (1024, 512) if on_cpu else (4096, 4096)
    options = dict(dtype=model.dtype, device=model.device)
    weights = [pack(torch.randn(4 * C, C, **options)) for _ in range(48)]
    few = torch.randn(1, C, **options)
    many = torch.randn(N, C, **options)
    stream = partial(time_products, few, weights)
    multiply = partial(time_products, many, weights[:1] * 4)
    reading, multiplying = place.seconds(stream, multiply)
    n_bytes = 48 * 4 * C * C * model.dtype.itemsize
    return 4 * 2 * N * 4 * C * C / multiplying, n_bytes / reading

def time_products(x, weights):
    start = time.perf_counter()
    for weight in weights:
        linear(x, weight)
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start

@experiment()
def table2(place):
    """[SARATHI Table 2] a prefill-only, a decode-only and a decode-maximal batch, by operator."""
    L = max(n for n in place.lengths if n <= 1024)
    d = 3
    batches = {"prefill-only": (0, 0, L), "decode-only": (d + 1, L - 1, 0),
               "decode-maximal": (d, L - 1, L - d)}
    functions = [place.iteration(*batch) for batch in batches.values()]
    *rounds, alone = place.rounds(*functions, place.iteration(0, 0, L - d))
    for (name, batch), times in zip(batches.items(), rounds):
        operators = place.operators(*batch)
        total, spread = middle(times)
        attention = total * operators["attn"] / sum(operators.values())
        yield "linear (ms)", name, "", (total - attention) * 1e3
        yield "attn (ms)", name, "", attention * 1e3
        yield "total (ms)", name, "", total * 1e3, spread and spread * 1e3
    marginal = [(a - b) / d * 1e3 for a, b in zip(times, alone)]
    yield "per decode (ms)", name, "", *middle(marginal)

@experiment("tokens per request, L", "times")
def table4(place):
    """[SARATHI Table 4] decode speedup, and throughput over request-level batching, at the P:D
    where decodes piggyback perfectly."""
    cases = [("", place, L, place.B, 0) for L in place.lengths]
    if place.simulated:
        other = place.elsewhere("llama-33b", "a100")
        sizes = ((1024, 10, 28), (2048, 5, 63), (3072, 3, 127))
        cases += [("LLaMA-33B, A100", other, *size) for size in sizes]
    for name, own, L, B, pd in cases:
        yield "decode speedup", name, L, *decode_speedup(own, L, B)
        ways = {"ours": own.args.scheduler}
        ratios = gains(own, ways, *halves(L, pd, own.chunk, B), B)["ours"]
        yield "throughput", name, L, *middle(ratios)

def decode_speedup(place, L, B):
    """How many times cheaper a decode is beside a chunk than in a batch of B decodes [SARATHI
    §5.1]. Returns (median, spread), or (None, None) if its cost is lost in noise."""
    d = B - 1
    chunk = min(place.chunk, L) - d
    decodes, both, alone = place.rounds(place.iteration(B, L - 1),
                                        place.iteration(d, L - 1, chunk),
                                        place.iteration(0, 0, chunk))
    marginal = [(a - b) / d for a, b in zip(both, alone)]
    if median(marginal) <= 0:
        return None, None
    _, spread = middle(marginal)
    speedup = median(decodes) / B / median(marginal)
    return speedup, spread and speedup * spread / median(marginal)

def gains(place, ways, P, D, B):
    """{name: [how many times as fast as request-level batching, in each round]} for equal requests
    of P + D tokens."""
    # simulated: what eight batches take beyond four; a run's begin and end say little of a server
    counts = (8 * B, 4 * B) if place.simulated else (place.args.requests,)

    def seconds(scheduler):
        runs = [place.serve([Job(0.0, P, D)] * n, B, scheduler=scheduler) for n in counts]
        return runs[0].seconds - sum(run.seconds for run in runs[1:])

    schedulers = ["static", *ways.values()]
    baseline, *others = place.rounds(*(partial(seconds, way) for way in schedulers))
    return {name: [a / b for a, b in zip(baseline, times)] for name, times in zip(ways, others)}

def explain(place, rows):
    """One paragraph: what limits the gain on this machine."""
    ours = {(row["experiment"], *row["at"]): row["ours"] for row in rows}
    ridge = ours["ceilings", "ridge point (tokens)", "", ""]
    attention = ours["table2", "attn (ms)", "decode-only", ""]
    attention /= ours["table2", "total (ms)", "decode-only", ""]
    config = place.model.config
    head = config.vocab_size * config.n_embd
    head /= head + config.n_layer * sum(math.prod(width) for width in config.widths.values())
    throughput = [ours["table4", "throughput", "", L] for L in place.lengths]
    return (
        f"On {place.source}, the ridge point is {ridge:.0f} tokens: reading a weight takes as long "
        f"as multiplying it with so many. A batch of {place.B} decodes reads every weight for "
        f"{place.B} tokens; beside a chunk of {place.chunk} tokens they are read once for both. "
        f"So decodes can become at most about {max(1, ridge / place.B):.1f} times cheaper, by this "
        f"machine's ridge point. Two parts of a decode do not become cheaper: attention, "
        f"{attention:.0%} of a batch of decodes, and the output head, {head:.0%} of the weights. "
        f"Throughput is {min(throughput):.2f} to {max(throughput):.2f} times that of request-level "
        f"batching.")

# -----------------------------------------------------------------------------
# SARATHI's figures

MAX_B = {1024: 18, 2048: 10, 3072: 6}  # L -> the largest batch that fits [SARATHI §5.1]
PD_RATIOS = (1, 2, 3, 5, 7, 10, 20, 40, 50, 64, 80, 100, 128, 160, 200)

@experiment("decodes in the batch, B", "times")
def fig3(place):
    """[SARATHI Fig. 3] the cost of a decoded token over that of a prefilled one."""
    L = place.lengths[0]
    sizes = place.paper_grid((1, 2, place.B), (1, 2, 4, 8, 12, 18))
    functions = [place.iteration(B, L - 1) for B in sizes]
    prefill, *decodes = place.seconds(place.iteration(0, 0, L), *functions)
    for B, seconds in zip(sizes, decodes):
        yield "decode over prefill", "", B, seconds / B / (prefill / L)
    operators = place.operators(0, 0, L)
    yield "share of others", "", "", operators["others"] / sum(operators.values())

@experiment("tokens, or decodes, N", "tokens/ms of one layer")
def fig4(place):
    """[SARATHI Fig. 4] one layer: prefills need some hundred tokens, decodes as many requests."""
    own = place.one_layer()
    L = place.lengths[0]
    tokens = [n for n in (64, 128, 256, 512, 1024) if n <= L]
    seconds = own.seconds(*(own.iteration(0, 0, n, last=False) for n in tokens))
    prefill = {n: n / t / 1e3 for n, t in zip(tokens, seconds)}
    batches = [2 ** i for i in range(place.paper_grid(6, 10))]
    seconds = own.seconds(*(own.iteration(n, L - 1, last=False) for n in batches))
    decode = {n: n / t / 1e3 for n, t in zip(batches, seconds)}
    for n, rate in prefill.items():
        yield "prefill (tokens/ms)", "", n, rate
    for n, rate in decode.items():
        yield "decode (tokens/ms)", "", n, rate
    yield "prefill at 256", "over the peak", "", prefill[256] / max(prefill.values())
    enough = min(n for n, rate in decode.items() if rate > 0.95 * max(decode.values()))
    yield "decode batch", "at 95 % of the peak", "", enough
    n_in, n_out = place.model.config.widths["ffn_ln1"]
    ratio = intensity(L, n_in, n_out) / intensity(1, n_in, n_out)
    yield "intensity", "prefill over decode", "", ratio

def intensity(n, n_in, n_out):
    """FLOP per number read or written, for n rows times a matrix."""
    return 2 * n * n_in * n_out / (n * n_in + n_in * n_out + n * n_out)

@experiment("tokens in the batch, N", "ms")
def fig7(place):
    """[SARATHI Fig. 7] tile quantization: prefills of whole tiles, and of one token more."""
    small = (32, 64, 96, 128, 192, 256, 384, 512)
    sizes = [n for n in place.paper_grid(small, range(128, 1025, 128)) if n < max(place.lengths)]
    sizes = sorted([*sizes, *(n + 1 for n in sizes)])
    seconds = place.seconds(*(place.iteration(0, 0, n, last=False) for n in sizes))
    for n, t in zip(sizes, seconds):
        yield "iteration (ms)", "", n, t * 1e3

def pick_chunk(place, rows):
    """The chunk size for a P:D of 50, from the rows of fig7 [SARATHI §4.2, §4.4]: a prompt token
    costs its share of a chunk, and of the decodes that the chunks leave over."""
    B = place.B
    pd = 50
    seconds = {row["at"][2]: row["ours"] / 1e3 for row in rows}
    decode, = place.seconds(place.iteration(B, max(place.lengths) // 2))

    def cost(chunk):
        left_over = max(0.0, 1 / pd - (B - 1) / chunk)
        return seconds[chunk] / chunk + left_over * decode / B

    return min((n for n in seconds if n > B and n % 32 == 0), key=cost)

@experiment("batch size, B", "times")
def fig8(place):
    """[SARATHI Fig. 8] decode speedup over batch size and length, and the batches that fit."""
    speedups = []
    for L, most in place.sizes():
        for B in range(2, most + 1, 2):
            speedup, spread = decode_speedup(place, L, B)
            yield "decode speedup by B", f"L = {L}", B, speedup, spread
            speedups.append(speedup or 1.0)
    yield "decode speedup", "largest", "", max(speedups)
    yield "decode speedup", "smallest", "", min(speedups)
    for L in MAX_B if place.simulated else ():
        config = replace(place.model.config, block_size=L)
        cost = CostModel.roofline(config, *place.on[1:])
        yield "largest batch", f"L = {L}", "", Engine(cost, max_batch=0).max_batch

@experiment("ratio of prompt to output, P:D", "times")
def fig9(place):
    """[SARATHI Fig. 9, 11] throughput over request-level batching by P:D ratio, for chunk sizes and
    for Orca's best and worst case."""
    peaks = {}
    chunks = place.paper_grid([place.chunk], [128, 256, 512])
    for L, B in place.sizes():
        ways = {f"C = {C}": Sarathi(C) for C in chunks}
        ways |= {"Orca, best": Sarathi(L + B), "Orca, worst": "orca"}
        shapes = {halves(L, pd) for pd in place.grid((5, 50), PD_RATIOS)}
        shapes |= {halves(L, 0, C, B) for C in chunks}
        for P, D in sorted(shapes):
            for name, ratios in gains(place, ways, P, D, B).items():
                gain, spread = middle(ratios)
                yield f"gain at L = {L}, B = {B}", name, round(P / D, 2), gain, spread
                peaks[name, L] = max(peaks.get((name, L), (0.0, 0.0)), (gain, P / D))
    for (name, L), (gain, _) in peaks.items():
        yield f"peak at L = {L}", name, "", gain
    if len(place.sizes()) > 1:
        first = {name: peak for (name, L), peak in peaks.items() if L == min(MAX_B)}
        for name in ("C = 128", "C = 256", "C = 512", "Orca, best"):
            yield "P:D of the peak", name, "", first[name][1]
        yield "C = 256", "over C = 128", "", first["C = 256"][0] / first["C = 128"][0]
        yield "P:D of Orca's peak", "over C = 256", "", first["Orca, best"][1] / first["C = 256"][1]

@experiment("", "time over SARATHI's", only="simulated")
def fig10(place):
    """[SARATHI Fig. 10] seconds by operator, request-level batching over SARATHI, where decodes
    piggyback perfectly."""
    ratios = defaultdict(list)
    for C, (L, most) in product((256, 512), MAX_B.items()):
        for B in sorted({2, 6, most}):
            P, D = halves(L, 0, C, B)
            chunk = C - B + 1
            mixed = place.operators(B - 1, L - 1, chunk, P // 2)
            prefill = place.operators(0, 0, P)
            decode = place.operators(B, L - D // 2)
            for name in ("preproj", "attn", "postproj", "ffn_ln1"):
                alone = prefill[name] + D * decode[name] / B
                ratio = alone / (mixed[name] * P / chunk)
                ratios[name].append(ratio)
                yield f"C = {C}", name, f"L {L}, B {B}", ratio
    projections = ratios["preproj"] + ratios["postproj"]
    for name, values in (("ffn", ratios["ffn_ln1"]), ("projections", projections)):
        yield name, "smallest", "", min(values)
        yield name, "largest", "", max(values)

@experiment("", "times", on=("gpt3-175b", "a100", 8), only="simulated")
def fig12(place):
    """[SARATHI Fig. 12] GPT-3 on 64 A100: a pipeline of eight nodes with Orca and with SARATHI, and
    eight nodes without a pipeline. The picture shows the pipelines' stages."""
    roofline = partial(CostModel.roofline, preset("gpt3-175b"), "a100", tp=8)
    jobs = zipf_jobs(place.grid(300, 10000))
    seconds = {}
    bubbles = {}
    for name, scheduler in (("Orca", Sarathi(4096 + 27)), ("SARATHI", Sarathi(256))):
        line = Pipeline(roofline(nodes=8), 8, record=place.tape(name, always=True),
                        scheduler=scheduler, max_batch=27, n_page=27 * 4096)
        run = serve(line, jobs, start=0.0)
        seconds[name] = run.seconds
        bubbles[name] = median(line.bubble_of[request.id] for request in run.requests)
        for kind, idle in line.bubbles.items():
            yield "idle share of the stages", name, kind, idle / 8 / run.seconds
    engines = [Engine(roofline(), Sarathi(4096 + 11), max_batch=11, n_page=11 * 4096)
               for _ in range(8)]
    alone = max(serve(engine, jobs[i::8]).seconds for i, engine in enumerate(engines))
    yield "bubble time, median", "Orca over SARATHI", "", bubbles["Orca"] / bubbles["SARATHI"]
    yield "completion", "Orca over SARATHI", "", seconds["Orca"] / seconds["SARATHI"]
    yield "completion", "TP over SARATHI", "", alone / seconds["SARATHI"]
    yield "largest batch", "TP8 x PP8", "", Engine(roofline(nodes=8), max_batch=0).max_batch // 8
    yield "largest batch", "TP8", "", Engine(roofline(), max_batch=0).max_batch

@experiment("chunk size, C", "times")
def fig13(place):
    """[SARATHI Fig. 13] what chunks cost attention and prefill, and what they gain end to end."""
    panels = defaultdict(list)  # (panel, C) -> ratios, one per length
    for (L, B), C in product(place.sizes(), place.paper_grid((64, 128), range(64, 513, 64))):
        whole = prefill_in_chunks(place, L, L)
        parts = prefill_in_chunks(place, L, C)
        ratios = gains(place, {"ours": Sarathi(C)}, *halves(L, 0, C, B), B)["ours"]
        panels["attention", C].append(parts[1] / whole[1])
        panels["prefill", C].append(parts[0] / whole[0])
        panels["end to end", C].append(median(ratios))
        for panel in ("attention", "prefill", "end to end"):
            yield panel, f"L = {L}", C, panels[panel, C][-1]
    for (panel, C), ratios in panels.items():
        yield panel, "best" if panel == "end to end" else "worst", C, max(ratios)
    if ("prefill", 320) in panels:
        best = {C: max(panels["end to end", C]) for C in (256, 320)}
        yield "C = 256", "over C = 320", "", best[256] / best[320]

def prefill_in_chunks(place, L, C):
    """(seconds of all, of attention) for a prompt of L tokens in chunks of C"""
    shapes = [(0, 0, min(C, L - past), past) for past in range(0, L, C)]
    total = sum(place.seconds(*(place.iteration(*shape, last=False) for shape in shapes)))
    operators = Counter()
    for shape in shapes:
        operators.update(place.operators(*shape))
    return total, total * operators["attn"] / sum(operators.values())

# -----------------------------------------------------------------------------
# S-LoRA's figures: the authors' systems, simulated

SETTINGS = {  # [S-LoRA Table 1]: model, ranks dealt in turns
    "S1": ("llama-7b", (8,)),
    "S2": ("llama-7b", (64, 32, 16, 8)),
    "S4": ("llama-13b", (64, 32, 16)),
    "S5": ("llama-33b", (32,)),
    "S6": ("llama-70b", (64,)),
}
POOLS = {  # tokens that the authors' servers had room for, adapters included
    ("llama-7b", "a100"): 125000, ("llama-13b", "a100"): 65000,
    ("llama-7b", "a10g"): 14500, ("llama-7b", "a100-40"): 14500,
}
SPLIT_POOLS = {  # the same, if adapters have a pool of their own
    ("a100", "no-unify"): 35000, ("a100", "bmm"): 35000,
    ("a10g", "no-unify"): 9000, ("a10g", "bmm"): 8000,
}
A100_13B = ("llama-13b", "a100", 1)

class Lightllm(Scheduler):
    """The server that S-LoRA is built on: whole prompts, alone. It looks at the queue every ten
    iterations, and starts as many requests as will fit at their peak, since lengths are known."""
    def start(self, engine):
        self.engine = engine
        self.n_page = engine.pool.n_page
        self.since = 0  # iterations since the last prefill

    def plan(self, running, waiting):
        new = []
        if not running or self.since >= 10:
            new = self.fitting(running, waiting)
        self.since = 0 if new else self.since + 1
        return [(request, request.n_todo) for request in new or running]

    def fitting(self, running, waiting):
        """The waiting requests up to the first one with which the batch would outgrow the pool, or
        with which the new prompts take more than a sixth of it."""
        store = self.engine.adapters
        unified = store.pool is self.engine.pool
        batch = [(r.max_len - r.n_tokens, r.n_tokens) for r in running]
        adapters = {r.adapter for r in running}
        new = []
        n_token = 0
        for request in waiting:
            batch.append((request.max_new_tokens, len(request.prompt)))
            adapters.add(request.adapter)
            n_token += len(request.prompt)
            # when the i-th request to end ends, i requests are left
            left, tokens = np.array(sorted(batch, reverse=True)).T
            peak = (left * np.arange(1, len(left) + 1) + np.cumsum(tokens)).max()
            if unified:
                peak += sum(store.n_page[name] for name in adapters)
            if peak > self.n_page or new and n_token > self.n_page / 6:
                break
            new.append(request)
        return new

class AdapterBatches:
    """The order of a server on top of PEFT: all requests that have come, adapter by adapter, in
    batches of one adapter; then all that have come meanwhile."""
    def __init__(self, size):
        self.size = size
        self.batches = []

    def __call__(self, waiting, running, now):
        if running:
            return []
        if not self.batches:
            groups = defaultdict(list)
            for request in waiting:
                groups[request.adapter].append(request)
            for group in groups.values():
                self.batches += [group[i:i + self.size] for i in range(0, len(group), self.size)]
        return self.batches.pop(0)

def slora(setting, n, rate, seconds, variant="S-LoRA", gpu="a100", cv=1.0, alpha=1.0, **options):
    """Serve a setting of [S-LoRA Table 1] with n adapters by one of the paper's systems. Returns a
    Run."""
    model, ranks = SETTINGS[setting]
    system = "transformers" if variant == "PEFT" else "lightllm"
    cost = CostModel.roofline(preset(model), gpu, system=system)
    n_page = SPLIT_POOLS.get((gpu, variant), POOLS[model, gpu])
    options = dict(alloc="grow", n_page=n_page) | options
    if variant == "PEFT":
        size = 50 if model == "llama-7b" else 35
        options |= dict(scheduler="static", max_batch=size, order=AdapterBatches(size))
    else:
        options |= dict(scheduler=Lightllm(), max_batch=1000)
    if variant in ("no-unify", "bmm"):
        options["adapter_pages"] = n_page // 4
    if variant in ("bmm", "merge"):
        options["lora"] = variant
    engine = Engine(cost, **options)
    jobs = gamma_jobs(rate, seconds, cv, n, alpha)
    add_adapters(engine, ranks, jobs)
    return serve(engine, jobs)

def add_adapters(engine, ranks, jobs):
    for name in {job.adapter for job in jobs} - {None}:
        engine.add_adapter(name, ranks[int(name) % len(ranks)])

@experiment("adapters, n", "requests/s", on=A100_13B, only="simulated")
def slora_table3(place):
    """[S-LoRA Table 3] requests per second with few and with thousands of adapters."""
    for setting, variant, n in CLAIMS["slora_table3"]:
        rate = 6 if (setting, variant) == ("S4", "PEFT") else 10
        run = slora(setting, n, rate, place.grid(20, 120), variant)
        yield setting, variant, n, run.requests_per_second

@experiment("adapters, n", "requests/s", on=A100_13B, only="simulated")
def slora_fig5(place):
    """[S-LoRA Fig. 5, §7.2] what the unified pool and the kernels are worth."""
    for gpu, variant, n in CLAIMS["slora_fig5"]:
        setting, rate = ("S4", 6) if gpu == "a100" else ("S2", 2)
        seconds = 30 if (gpu, variant) == ("a100", "bmm") else place.grid(30, 300)
        run = slora(setting, n, rate, seconds, variant, gpu)
        yield gpu, variant, n, run.requests_per_second

@experiment("arrival rate (requests/s), R", "", on=A100_13B, only="simulated")
def slora_fig6(place):
    """[S-LoRA Fig. 6] throughput, latency, first token and SLO attainment by arrival rate."""
    for rate in (1, 2, 4, 6, 8):
        run = slora("S4", 400, rate, place.grid(30, 300))
        yield "requests/s", "S-LoRA", rate, run.requests_per_second
        yield "latency (s)", "S-LoRA", rate, run.latency
        yield "first token (s)", "S-LoRA", rate, fmean(run.ttfts)
        yield "attainment", "S-LoRA", rate, run.attainment()

@experiment("GPUs", "requests/s", on=("llama-33b", "a100-40", 2), only="simulated")
def slora_fig8(place):
    """[S-LoRA Fig. 8] tensor parallelism: with adapters, without sending their x A, and for the
    base model alone."""
    for setting, gpu, n in (("S5", "a100-40", 100), ("S6", "a100", 10)):
        rates = {}
        for tp, part in product((2, 4), ("S-LoRA", "no messages", "base model")):
            model, ranks = SETTINGS[setting]
            cost = CostModel.roofline(preset(model), gpu, tp)
            cost.exchanges = part == "S-LoRA"
            engine = Engine(cost, Lightllm(), max_batch=1000, alloc="grow",
                            n_page=int(cost.memory // cost.page_bytes))
            jobs = gamma_jobs(12, place.grid(10, 60), n_adapter=n)
            add_adapters(engine, ranks, jobs)
            if part == "base model":
                jobs = [job._replace(adapter=None) for job in jobs]
            rates[tp, part] = serve(engine, jobs).requests_per_second
            yield setting, part, tp, rates[tp, part]
        yield "4 GPUs over 2", setting, "", rates[4, "S-LoRA"] / rates[2, "S-LoRA"]

@experiment("adapters, n", "requests/s", on=("llama-7b", "a10g", 1), only="simulated")
def slora_fig9(place):
    """[S-LoRA Fig. 9] an adapter merged into the weights, beside x A B on the fly."""
    for panel, variant, n in CLAIMS["slora_fig9"]:
        alpha = float(panel.split()[-1])
        run = slora("S2", n, 2, 60, variant, "a10g", alpha=alpha)
        yield panel, variant, n, run.requests_per_second

@experiment("coefficient of variation, cv", "share within the SLO", on=A100_13B, only="simulated")
def slora_fig10(place):
    """[S-LoRA Fig. 10] SLO attainment by how uneven the arrivals are, for three orders."""
    for panel, name, cv in CLAIMS["slora_fig10"]:
        order = {"last come first": lcfs, "first come first": fcfs}.get(name)
        run = slora("S4", 400, 6, place.grid(30, 300), cv=cv, order=order or EarlyAbort(6.0))
        yield panel, name, cv, run.attainment()

@experiment("adapters in a batch, d", "", on=("llama-7b", "a100-40", 1), only="simulated")
def clustering(place):
    """[S-LoRA App. A] adapter clustering: throughput and attainment, if a batch keeps to d
    adapters."""
    for d in (1, 2, 4, 8, 32):
        run = slora("S2", 32, 2, place.grid(30, 120), gpu="a100-40", order=cluster(d))
        yield "requests/s", "S-LoRA", d, run.requests_per_second
        yield "attainment", "S-LoRA", d, run.attainment()

@experiment("", "tokens/s", only="measured")
def slora_here(place):
    """The cost of adapters here: no adapter, S-LoRA and its baselines, on the same requests. 100
    and 2,000 adapters of mixed ranks; 40 of them differ, to save host memory."""
    ranks = SETTINGS["S2"][1]
    config = place.model.config
    distinct = [Adapter.random(config, ranks[i % 4], i, place.model.dtype) for i in range(40)]
    pages = 4 * max(adapter.n_page for adapter in distinct)
    L = place.lengths[0]
    cases = {"no adapter": (0, {}), "S-LoRA": (100, {}), "S-LoRA, n = 2000": (2000, {}),
             "no-unify": (100, {"adapter_pages": pages}), "bmm": (100, {"lora": "bmm"}),
             "merge and swap": (100, {"lora": "merge"})}

    def tokens_per_second(n, options):
        lengths = dict(prompt=(8, L // 2), output=(8, L // 2))
        jobs = gamma_jobs(1, 2 * place.args.requests, n_adapter=n, **lengths)
        jobs = [job._replace(arrival=0.0) for job in jobs]
        engine = place.engine(place.B, place.B * L + pages, alloc="grow", **options)
        for name in range(n):
            engine.add_adapter(str(name), distinct[name % 40])
        return serve(engine, jobs).tokens_per_second

    rounds = place.rounds(*(partial(tokens_per_second, *case) for case in cases.values()), n=3)
    for name, rates in zip(cases, rounds):
        yield "throughput (tokens/s)", name, "", *middle(rates)

# -----------------------------------------------------------------------------
# SmartSpec's figures

A100_7B = ("llama-7b", "a100", 1)
CHOICES = ("off", 1, 3, 5, "goodput")  # [SmartSpec §7]

def spec_name(spec):
    return f"k = {spec}" if isinstance(spec, int) else spec

def spec_latency(place, rate, choices=CHOICES, draft="llama-160m", alpha=0.7, P=128, D=128):
    """{choice: mean seconds of a request}, for Poisson arrivals at the authors' system, vLLM."""
    own = place.elsewhere(system="vllm")
    if draft != "ngram":
        draft = CostModel.roofline(preset(draft), place.on[1], system="vllm")
    B = min(256, int(0.9 * own.model.memory / own.model.page_bytes) // (P + D))
    jobs = gamma_jobs(rate, place.grid(10, 60), prompt=(P, P), output=(D, D))
    seconds = {}
    for spec in choices:
        options = dict(scheduler="prefill_first", alloc="grow")
        if spec != "off":
            options |= dict(draft=draft, spec=spec, alpha=alpha)
        seconds[spec] = own.serve(jobs, B, **options).latency
    return seconds

def goodput_claims(gains):
    """gains: {rate: latency without drafts over goodput's}"""
    yield "goodput", "lowest rate", "", gains[min(gains)]
    yield "goodput", "most", "", max(gains.values())
    yield "goodput", "least", "", min(gains.values())

@experiment("arrival rate (requests/s), R", "times", on=A100_7B, only="simulated")
def spec_fig1(place):
    """[SmartSpec Fig. 1, 11, 14] how many times shorter latency becomes with k drafts, with
    goodput's choice, and with an oracle's; acceptance 0.7."""
    faster = defaultdict(dict)  # choice -> {rate: times}
    for rate in place.grid((1, 4, 12, 20), (1, 4, 8, 10, 12, 14, 16, 18, 20)):
        seconds = spec_latency(place, rate, (*CHOICES, "oracle"))
        for spec in seconds:
            yield "latency (s)", spec_name(spec), rate, seconds[spec]
            if spec != "off":
                faster[spec][rate] = seconds["off"] / seconds[spec]
                yield "times as fast as off", spec_name(spec), rate, faster[spec][rate]
    for k in (3, 5):
        yield "no gain beyond rate", f"k = {k}", "", last_crossing(faster[k])
    yield "best k at rate 4", "", "", max((1, 3, 5), key=lambda k: faster[k][4])
    yield from goodput_claims(faster["goodput"])

def last_crossing(curve):
    """The x at which {x: y} falls below 1 for the last time, between two points in proportion."""
    points = list(curve.items())
    crossing = points[-1][0] if points[-1][1] >= 1 else points[0][0]
    for (x, y), (next_x, next_y) in zip(points, points[1:]):
        if y >= 1 > next_y:
            crossing = x + (next_x - x) * (y - 1) / (y - next_y)
    return crossing

@experiment("batch size, B", "drafts per request", on=A100_7B, only="simulated")
def spec_fig5(place):
    """[SmartSpec Fig. 5] the number of drafts with the most goodput, by batch size; acceptance 0.7,
    context 192."""
    alpha = 0.7
    target = place.elsewhere(system="vllm").model
    draft = CostModel.roofline(preset("llama-160m"), place.on[1], system="vllm")
    for B in [2 ** i for i in range(10)]:
        stats = IterationStats(B, B, B, 192 * B)
        goodput = []
        for k in range(9):
            tokens = (1 - alpha ** (k + 1)) / (1 - alpha)  # [SmartSpec Eq. 8]
            seconds = target.seconds(stats.with_drafts(B * k)) + k * draft.seconds(stats)
            goodput.append(B * tokens / seconds)
        yield "best k", "", B, int(np.argmax(goodput))

@experiment("arrival rate (requests/s), R", "latency (s)", on=A100_7B, only="simulated")
def spec_fig12(place):
    """[SmartSpec Fig. 12] latency by arrival rate with prompt lookup; acceptance 0.35, prompts of
    512 tokens."""
    faster = {}
    for rate in place.grid((1, 6, 12), (1, 2, 4, 6, 8, 10, 12)):
        seconds = spec_latency(place, rate, draft="ngram", alpha=0.35, P=512)
        for spec in seconds:
            yield "latency", spec_name(spec), rate, seconds[spec]
        faster[rate] = seconds["off"] / seconds["goodput"]
    yield from goodput_claims(faster)

@experiment("arrival rate (requests/s), R", "latency (s)", on=A100_7B, only="simulated")
def spec_fig16(place):
    """[SmartSpec Fig. 16] latency by arrival rate with Medusa's heads: one candidate each, fixed
    trees, and goodput's tree; acceptance 0.5."""
    choices = ("off", "1,1,1", "2,2,1", "3,2,2", "goodput_tree")
    for rate in place.grid((1, 20), (1, 4, 8, 12, 16, 20)):
        seconds = spec_latency(place, rate, choices, "ngram", 0.5)
        for spec in seconds:
            yield "latency", spec, rate, seconds[spec]
    yield "goodput", "over 1,1,1", "", seconds["1,1,1"] / seconds["goodput_tree"]

@experiment("batch size, B", "tokens/s", only="measured")
def spec_here(place):
    """The worth of drafts here: a random draft model of one layer with acceptance forced to 0.7,
    and prompt lookup in a prompt that repeats itself, truly verified."""
    c = place.model.config
    small = replace(c, n_layer=1, n_head=1, n_kv_head=1, n_embd=c.head_dim, n_inner=4 * c.head_dim)
    draft = GPT.from_preset(small, place.model.dtype, str(place.model.device), seed=1)
    P = 64
    cases = [("draft model", B, dict(draft=draft, alpha=0.7)) for B in (1, place.B, 4 * place.B)]
    cases.append(("prompt lookup", 1, dict(draft="ngram")))
    D = 64
    prompt = list(range(1, 17)) * (P // 16)

    def tokens_per_second(B, options):
        engine = place.engine(B, B * (P + D), scheduler="prefill_first", **options)
        engine.generate([prompt] * B, D)
        return B * D / engine.clock.now()

    for name, B, drafts in cases:
        ways = [{} if spec == "off" else dict(drafts, spec=spec) for spec in CHOICES]
        rounds = place.rounds(*(partial(tokens_per_second, B, way) for way in ways))
        for spec, rates in zip(CHOICES, rounds):
            yield name, spec_name(spec), B, *middle(rates)

# -----------------------------------------------------------------------------
# TNG, and online serving

@experiment("", "", only="")
def timeline(place):
    """[TNG] the same six requests with static batching, prefill-first and chunked prefill, on
    a time axis."""
    L = max(place.lengths)
    unit, = place.seconds(place.iteration(0, 0, L))  # arrivals are in prefills of L tokens
    sizes = ((0, L // 8, 24), (0, L // 4, 12), (0, L // 8, 36), (0.6, L * 3 // 4, 16),
             (1.5, L // 2, 10), (2.2, L // 4, 12))
    jobs = [Job(arrival * unit, P, D) for arrival, P, D in sizes]
    for name in ("static", "prefill_first", "sarathi"):
        run = place.serve(jobs, 4, scheduler=name, record=place.tape(name, always=True))
        place.tapes[-1].arrivals = {request.id: request.arrival for request in run.requests}
        yield "TTFT, mean (s)", name, "", fmean(run.ttfts)
        yield "TPOT, mean (s)", name, "", fmean(run.tpots)
        yield "longest stall (s)", name, "", max(run.stalls)
        yield "all done (s)", name, "", run.seconds

@experiment("concurrent requests, n", "", on=("llama-7b", "h100", 1))
def tng(place):
    """[TNG] TTFT, TPOT and throughput by the number of concurrent requests, for schedulers and
    chunk sizes; and the gain of chunks if all requests are of equal size."""
    if place.simulated:
        place = place.elsewhere(system="vllm")
    chunks = place.grid((64, 256), (512, 1024, 2048))
    schedulers = {"static": "static", "prefill_first": "prefill_first"}
    schedulers |= {f"C = {C}": SarathiServe(C) for C in chunks}
    L = place.lengths[0]
    for n in place.grid((1, 4, 12), (1, 2, 4, 8, 16, 32, 64, 128)):
        jobs = gamma_jobs(1, place.grid(2, 4) * max(n, 3), prompt=(8, L // 2), output=(4, L // 8))
        for name, scheduler in schedulers.items():
            run = place.serve(jobs, n, clients=n, name=name, scheduler=scheduler)
            yield "throughput (tokens/s)", name, n, run.tokens_per_second
            yield "TTFT, median (s)", name, n, median(run.ttfts)
            yield "TPOT, median (s)", name, n, median(run.tpots)
    if not place.simulated:
        return
    ratios = []
    for n, pd in product((8, 32, 128), (4, 16, 64)):
        jobs = [Job(0.0, *halves(L, pd))] * (6 * n)
        base = place.serve(jobs, n, scheduler="prefill_first").tokens_per_second
        for scheduler in [way for way in schedulers.values() if isinstance(way, SarathiServe)]:
            ratios.append(place.serve(jobs, n, scheduler=scheduler).tokens_per_second / base)
    yield "chunked prefill", "over prefill_first", "", max(ratios)

@experiment()
def online(place):
    """Online serving: what users wait for under each scheduler. Flags: --rate, --cv, --prompt,
    --output, --jobs."""
    args = place.args
    L = max(place.lengths)
    if args.jobs:
        jobs = read_jobs(args.jobs)
    else:
        n = place.grid(2, 20) * args.requests
        jobs = gamma_jobs(1.0, n, args.cv, prompt=args.prompt or (8, L // 2),
                          output=args.output or (4, max(4, L // 16)), seed=args.seed)
        at_once = [job._replace(arrival=0.0) for job in jobs]
        # without --rate, 0.7 of what can be served
        rate = args.rate or 0.7 * place.serve(at_once, 2 * place.B).requests_per_second
        jobs = [job._replace(arrival=job.arrival / rate) for job in jobs]
    for name in ("static", "orca", "prefill_first", "sarathi", "sarathi_serve", "autopilot"):
        run = place.serve(jobs, 2 * place.B, scheduler=name)
        yield "throughput (requests/s)", name, "", run.requests_per_second
        waits = {"TTFT": run.ttfts, "TPOT": run.tpots, "longest stall": run.stalls}
        for (what, values), q in product(waits.items(), (50, 90, 99)):
            yield f"{what} (s)", name, f"p{q}", float(np.percentile(values, q))
        for what, values in waits.items():
            for q in range(0, 101, 5):
                x = float(np.percentile(values, q))
                yield f"CDF of {what} (s)", name, x, q / 100

# -----------------------------------------------------------------------------
# autopilot, and how far the simulator and the engine can be trusted

WORKLOADS = (  # prompt, output (give or take a half), load, acceptance, TPOT target over a decode's
    (256, 256, 0.2, 0.8, 0), (256, 256, 0.8, 0.3, 2), (256, 256, 1.2, 0.8, 0),
    (512, 100, 0.5, 0.3, 0), (1024, 128, 0.2, 0.3, 2), (1024, 128, 0.8, 0.8, 2),
    (1024, 128, 1.2, 0.3, 0), (1300, 40, 0.8, 0.8, 0), (1300, 26, 0.5, 0.8, 2),
    (1300, 26, 1.0, 0.3, 1.5), (1300, 13, 1.2, 0.8, 0), (1300, 7, 0.2, 0.3, 0),
    (1300, 7, 0.8, 0.8, 2), (1300, 7, 1.2, 0.3, 2))

@experiment("", "latency over the best fixed setting's", on=A100_13B, only="simulated")
def autopilot(place):
    """Autopilot beside 30 fixed settings of chunk size and drafts: mean latency over that of the
    best one that meets the TPOT target, on workloads that differ in P:D, load and acceptance."""
    draft = CostModel.roofline(preset("llama-160m"), place.on[1])
    draft.config = replace(draft.config, block_size=place.model.config.block_size)
    grid = place.grid(((128, "off"), (512, 3)),
                      [*product((64, 128, 256, 512, 1024, 2048), ("off", 1, 3, 5, 7))])
    ratios = []
    for P, D, load, alpha, slow in place.grid(WORKLOADS[1:4:2], WORKLOADS):
        lengths = dict(prompt=(P // 2, P * 3 // 2), output=(D // 2, D * 3 // 2))
        jobs = gamma_jobs(1.0, place.grid(20, 160), seed=place.args.seed, **lengths)
        at_once = [job._replace(arrival=0.0) for job in jobs]
        capacity = place.serve(at_once, 48, alloc="grow").requests_per_second
        jobs = [job._replace(arrival=job.arrival / load / capacity) for job in jobs]
        target = slow * place.model.time(1, P + D // 2)
        best = math.inf
        for chunk, spec in grid:
            options = dict(draft=draft, spec=spec, alpha=alpha) if spec != "off" else {}
            run = place.serve(jobs, 48, alloc="grow", scheduler=SarathiServe(chunk), **options)
            if not target or np.quantile(run.tpots, 0.9) <= target:
                best = min(best, run.latency)
        run = place.serve(jobs, 48, alloc="grow", scheduler="autopilot", spec="goodput",
                          draft=draft, alpha=alpha, tpot=target)
        if best < math.inf:
            ratios.append(run.latency / best)
            yield "latency over the best", "autopilot", f"{P} + {D}, load {load}", ratios[-1]
    yield "all workloads", "mean", "", fmean(ratios)
    yield "all workloads", "worst", "", max(ratios)

@experiment(only="measured")
def fidelity(place):
    """[SmartSpec Fig. 13, SARATHI §5.3] the simulator beside this machine: the same requests, with
    costs from the one-time profile; every iteration's seconds, and throughput."""
    cost = CostModel.profile(place.model)
    yield "error of the profile (%)", "", "", 100 * cost.error
    L = max(place.lengths) // 2
    jobs = gamma_jobs(1, 4 * place.B, prompt=(8, L), output=(4, max(8, L // 8)))
    jobs = [job._replace(arrival=0.0) for job in jobs]
    names = ("static", "orca", "prefill_first", "sarathi")

    def durations(model, name):
        record = []
        options = dict(chunk=place.chunk, max_batch=place.B, n_page=place.B * 2 * L)
        serve(Engine(model, name, record=record, **options), jobs)
        return [iteration.end - iteration.start for iteration in record]

    measured = place.rounds(*(partial(durations, place.model, name) for name in names), n=3)
    worst = 0.0
    errors = []
    for name, rounds in zip(names, measured):
        real = np.median(rounds, 0)
        ours = np.array(durations(cost, name))
        errors += list(abs(ours / real - 1))
        yield "iteration error (%)", name, "", 100 * float(np.median(abs(ours / real - 1)))
        throughput = 100 * abs(real.sum() / ours.sum() - 1)
        yield "throughput error (%)", name, "", float(throughput)
        worst = max(worst, float(throughput))
    yield "iteration error (%)", "median", "", 100 * float(np.median(errors))
    yield "throughput error (%)", "largest", "", worst

@experiment("tokens or requests, n", "share of the ceiling", only="measured")
def roofline(place):
    """How near iterations come to this machine's ceilings: the seconds that their FLOPs or bytes
    take at the ceilings, whichever is more, over the measured ones."""
    flops, bandwidth = measure_ceilings(place)
    L = place.lengths[0]
    cases = [("prefill", n, (0, 0, n)) for n in (32, 128, 512)]
    cases += [("decode", n, (n, L - 1, 0)) for n in (1, 4, 16)]
    cases += [("chunk of 256 and decodes", n, (n, L - 1, 256 - n)) for n in (1, 4, 16)]
    seconds = place.seconds(*(place.iteration(*batch) for _, _, batch in cases))
    for (name, n, batch), t in zip(cases, seconds):
        operations, n_bytes = demand(place.model, *batch)
        yield "share of the ceiling", name, n, max(operations / flops, n_bytes / bandwidth) / t
        yield "tokens/s", name, n, (batch[0] + batch[2]) / t

def demand(model, decodes, context, chunk):
    """(FLOPs, bytes of weights and cache) of an iteration"""
    c = model.config
    itemsize = model.dtype.itemsize
    layers = c.n_layer * sum(math.prod(width) for width in c.widths.values())
    head = c.vocab_size * c.n_embd
    pairs = decodes * (context + 1) + chunk * (chunk + 1) / 2  # of a query and a key
    operations = 2 * (decodes + chunk) * layers + 2 * (decodes + bool(chunk)) * head
    operations += 4 * c.n_layer * c.n_head * c.head_dim * pairs
    n_token = decodes * (context + 1) + chunk
    return operations, (layers + head) * itemsize + n_token * c.page_bytes(itemsize)

@experiment("", "tokens/s, prompts too", only="measured")
def peers(place):
    """transformers' generate(), and PEFT's mixed batch of adapters, beside this engine, in
    interleaved rounds."""
    cases = (("512 + 1", 1, 512, 1, False), ("256 + 32, B = 1", 1, 256, 32, False),
             ("256 + 32, B = 8", 8, 256, 32, False),
             ("256 + 32, B = 8, adapters", 8, 256, 32, True))
    with tempfile.TemporaryDirectory() as folder:
        place.model.save_pretrained(folder)
        names = [f"{folder}/adapter{i}" for i in range(4)]
        for i, name in enumerate(names):
            os.mkdir(name)
            Adapter.random(place.model.config, 16, i, place.model.dtype).save_pretrained(name)
        for name, B, P, D, adapted in cases:
            theirs = peer(place, folder, names if adapted else [])
            engine = place.engine(B, B * (P + D) + 1000)
            for adapter in names:
                engine.add_adapter(adapter, adapter)
            prompts = np.random.default_rng(0).integers(0, 256, (B, P)).tolist()
            chosen = [adapter for adapter, _ in zip(cycle(names if adapted else [None]), prompts)]
            ours = partial(time_call, engine.generate, prompts, D, chosen)
            rounds = place.rounds(ours, partial(time_call, theirs, prompts, D, chosen))
            for system, times in zip(("sarathi", "PEFT" if adapted else "transformers"), rounds):
                yield "throughput", system, name, *middle([B * (P + D) / t for t in times])

def time_call(function, *arguments):
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start

def peer(place, folder, adapters):
    """A function like Engine.generate, by transformers or by PEFT."""
    import transformers
    transformers.utils.logging.set_verbosity_error()
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=place.model.dtype).to(place.model.device).eval()
    if adapters:
        import peft
        options = dict(autocast_adapter_dtype=False)
        first = os.path.basename(adapters[0])
        model = peft.PeftModel.from_pretrained(model, adapters[0], first, **options).eval()
        for path in adapters[1:]:
            model.load_adapter(path, os.path.basename(path), **options)

    @torch.inference_mode()
    def generate(prompts, n, names):
        ids = torch.tensor(prompts, device=place.model.device)
        options = dict(max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0)
        if adapters:
            options["adapter_names"] = [os.path.basename(name) for name in names]
        return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)

    return generate

# -----------------------------------------------------------------------------
# the scoreboard

NOTES = {  # (experiment, beginning of a row) -> what was seen where we miss, or what to know
    ("table4", "decode speedup: LLaMA-33B"): "the paper's A100 reads the cache at 0.5 to 0.6 of "
                                             "its bandwidth, its A6000 at 0.8; we have one share",
    ("fig10", ""): "all linear operators gain alike in a roofline; the paper's FFN gains more and "
                   "its projections less",
    ("fig12", "bubble"): "SARATHI's pipeline has next to no bubbles here; the paper does not say "
                         "where its bubbles are",
    ("fig12", "completion: Orca"): "our iterations are shorter, so Orca's bubbles weigh more; no "
                                   "start-up delay was picked to change that",
    ("fig13", "prefill: worst, C = 64"): "5 times would be 73 ms for 64 tokens; the paper's own "
                                         "128 tokens take 55 ms",
    ("slora_fig6", "first token"): "0.12 to 0.25 s less than the paper's, perhaps its HTTP server "
                                   "and tokenizer",
    ("slora_fig10", ""): "a few bursts decide, and how long the queue is when each comes",
    ("clustering", ""): "a batch holds more than 8 of the 32 adapters at all times, so d = 1 .. 8 "
                        "order the queue alike; the paper's differences are as large as noise",
    ("fig13", "prefill: worst, C = 256"): "26 % more time, by the tile of the last chunk",
    ("slora_table3", "S2: PEFT"): "one host time for all ranks; the paper loads larger ones slower",
    ("slora_fig5", "a10g: bmm"): "the A10G's host gathers an adapter in 0.4 ms per layer, the "
                                 "A100's in 0.5; we have one constant",
    ("slora_fig6", "latency"): "as first tokens: 3 s less at R = 4, where batches are largest",
    ("tng", ""): "the workload behind +50 % is not told; chunks save little if whole prompts "
                 "already fill the GPU",
}

def note_of(experiment, what):
    notes = [note for (name, start), note in NOTES.items()
             if name == experiment and what.startswith(start)]
    return notes[-1] if notes else ""

def scoreboard_rows(args, name):
    """The rows of one experiment that have a claim, each judged."""
    torch.set_num_threads(1)
    what = EXPERIMENTS[name]
    rows = []
    for row in what.rows(Simulated(args, *what.on)):
        claim = CLAIMS[name].get(tuple(row["at"]))
        if claim:
            kind = "bound" if claim.is_bound else claim.kind
            row |= dict(kind=kind, fit=claim.fit, inside=bool(claim.holds(row["ours"])))
            shown = name == "clustering" or not row["inside"]
            rows.append(row | dict(note=note_of(name, row["what"]) if shown else ""))
    return rows

def scoreboard(args):
    """Every number of the papers beside ours, simulated with one set of constants. Returns rows."""
    names = [name for name in CLAIMS if EXPERIMENTS[name].only != "measured"]
    slow_first = sorted(names, key=("fig12", "fig9", "slora_fig10").__contains__, reverse=True)
    with ProcessPoolExecutor(max(1, os.cpu_count())) as executor:
        parts = dict(zip(slow_first, executor.map(partial(scoreboard_rows, args), slow_first)))
    rows = [row for name in names for row in parts[name]]
    print(table(rows, ("experiment", "what", "paper", "ours", "kind", "fit", "inside", "note")))
    print("\nValues within 15 %, gains within 30 % of what they gain, bounds as they say:\n")
    for fit, kind in product((False, True), ("value", "gain", "bound")):
        inside = [row["inside"] for row in rows if row["kind"] == kind and row["fit"] == fit]
        if inside:
            role = "fitted" if fit else "predicted"
            print(f"- {role} {kind}s: {sum(inside)} of {len(inside)} ({fmean(inside):.0%})")
    print()
    return rows

# -----------------------------------------------------------------------------
# tables, pictures and traces

def cell(value):
    """Three significant digits; a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"

def table(rows, columns=("what", "paper", "ours", "spread", "source")):
    """Rows as a Markdown table, without the curves of CDFs."""
    rows = [row for row in rows if not row["what"].startswith("CDF")]
    columns = [name for name in columns if any(row.get(name) is not None for row in rows)]
    lines = [columns] + [[cell(row.get(name)) for name in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    text = [" | ".join(value.ljust(width) for value, width in zip(line, widths)) for line in lines]
    text.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in text)

COLORS = {  # the same thing has the same color in every picture
    "static": "#7f7f7f", "orca": "#e07b2a", "Orca, best": "#e07b2a", "Orca, worst": "#f5b78a",
    "prefill_first": "#8c564b", "sarathi": "#2a78c2", "sarathi_serve": "#17a0a8",
    "autopilot": "#1b9e87", "off": "#7f7f7f", "k = 1": "#93c4ea", "k = 3": "#2a78c2",
    "k = 5": "#123a73", "goodput": "#e07b2a", "goodput_tree": "#e07b2a", "oracle": "#1b9e87",
    "1,1,1": "#93c4ea", "2,2,1": "#2a78c2", "3,2,2": "#123a73", "C = 64": "#1b9e87",
    "C = 128": "#93c4ea", "C = 256": "#2a78c2", "C = 512": "#123a73", "L = 1024": "#c77fd0",
    "L = 2048": "#9340a8", "L = 3072": "#571b6e", "preproj": "#b5cf6b", "attn": "#d6477e",
    "postproj": "#7fa136", "ffn_ln1": "#55701f", "chunk": "#1b9e87", "decode": "#f2c14e",
    "waiting": "#e4e4e4", "stall": "#e8583f", "bubble": "#e8583f"}

def draw(rows, x_label, y_label):
    """A Figure: a panel per panel, a line or bars per series; hollow marks are the paper's."""
    from matplotlib.figure import Figure
    groups = defaultdict(list)
    for row in rows:
        if row["ours"] is not None:
            groups[row["at"][0]].append(row)
    panels = {name: part for name, part in groups.items() if len(part) > 1}
    if not panels:
        return None
    n_column = min(3, len(panels))
    n_row = -(-len(panels) // n_column)
    figure = Figure((max(6, 4 * n_column), 3.4 * n_row), layout="constrained")
    axes = figure.subplots(n_row, n_column, squeeze=False).flat
    for (name, part), ax in zip(panels.items(), axes):
        xs = {row["at"][2] for row in part}
        is_bars = len(xs) == 1 or any(isinstance(x, str) for x in xs)
        draw_bars(ax, part) if is_bars else draw_lines(ax, part)
        ax.set(title=name, ylabel=y_label, xlabel="" if is_bars else x_label)
        ax.grid(alpha=0.25)
        ax.set_axisbelow(True)
    for ax in list(figure.axes)[len(panels):]:
        ax.remove()
    add_legend(figure)
    return figure

def draw_lines(ax, rows):
    for i, series in enumerate(dict.fromkeys(row["at"][1] for row in rows)):
        mine = sorted((row["at"][2], row["ours"]) for row in rows if row["at"][1] == series)
        color = COLORS.get(series, f"C{i}")
        style = "-" if rows[0]["source"] == "simulated" else "--"
        ax.plot(*zip(*mine), style, marker=".", color=color, label=series or "ours")
        paper = [(row["at"][2], row["paper"]) for row in rows
                 if row["at"][1] == series and row["paper"] is not None]
        if paper:
            ax.plot(*zip(*paper), "o", mfc="white", mec=color, mew=1.6, ms=7, zorder=3)
    # logarithmic axes for numbers that differ by more than 15 times
    xs = [row["at"][2] for row in rows]
    ys = [row["ours"] for row in rows]
    for axis, values, scale in ((ax.xaxis, xs, ax.set_xscale), (ax.yaxis, ys, ax.set_yscale)):
        if min(values) > 0 and max(values) > 15 * min(values):
            scale("log")
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")

def draw_bars(ax, rows):
    names = list(dict.fromkeys(row["at"][2] for row in rows))
    series = list(dict.fromkeys(row["at"][1] for row in rows))
    if len(names) == 1:  # one bar per series
        names, series = series, [""]
        rows = [row | dict(at=["", "", row["at"][1]]) for row in rows]
    width = 0.8 / len(series)
    for i, name in enumerate(series):
        mine = [row for row in rows if row["at"][1] == name]
        xs = [names.index(row["at"][2]) + (i - (len(series) - 1) / 2) * width for row in mine]
        colors = [COLORS.get(name or row["at"][2], f"C{i}") for row in mine]
        ax.bar(xs, [row["ours"] for row in mine], width, color=colors, label=name or None)
        paper = [(x, row["paper"]) for x, row in zip(xs, mine) if row["paper"] is not None]
        if paper:
            ax.plot(*zip(*paper), "o", mfc="white", mec="black", mew=1.6, ms=7, zorder=3)
    ax.set_xticks(range(len(names)), names, fontsize=8, rotation=90 if len(names) > 3 else 0)

def add_legend(figure):
    """One legend under all panels, each label once."""
    from matplotlib.lines import Line2D
    labels = {}
    for ax in figure.axes:
        for handle, text in zip(*ax.get_legend_handles_labels()):
            labels[text] = handle
    if any(line.get_marker() == "o" for ax in figure.axes for line in ax.lines):
        labels["paper"] = Line2D([], [], ls="", marker="o", mfc="white", mec="black", mew=1.6)
    columns = max(1, min(int(figure.get_figwidth() / 1.3), len(labels)))
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=columns,
                  fontsize=8, frameon=False)

class Piece(NamedTuple):
    """A request, or a stage of a pipeline, does one thing for a while."""
    row: int
    kind: str  # chunk, decode; between them waiting, stall or, in a stage, bubble
    start: float
    end: float
    tokens: int = 0

def pieces(tape):
    """The iterations of a tape as Pieces, with the gaps between them."""
    staged = any(iteration.stage for iteration in tape)
    last = dict(getattr(tape, "arrivals", {}))  # row -> the end of its last piece
    started = set()
    for start, end, entries, stage in tape:
        rows = {stage: entries} if staged else {entry[0]: [entry] for entry in entries}
        for row, mine in rows.items():
            if start > last.get(row, start) + 1e-9:
                gap = "bubble" if staged else "stall" if row in started else "waiting"
                yield Piece(row, gap, last[row], start)
            kind = "chunk" if any(n > FEW_ROWS for _, _, n, *_ in mine) else "decode"
            yield Piece(row, kind, start, end, sum(n for _, _, n, *_ in mine))
            last[row] = end
            started.add(row)

def draw_tapes(tapes):
    """A Figure with one time axis: a panel per tape, a row per request or stage. Of a pipeline, a
    stretch of fifty iterations from the middle."""
    from matplotlib.figure import Figure
    staged = any(iteration.stage for iteration in tapes[0])
    word = "stage" if staged else "request"
    figure = Figure((10, 0.7 + 1.7 * len(tapes)), layout="constrained")
    width = max(tape[-1].end for tape in tapes)
    if staged:
        width = 50 * median(iteration.end - iteration.start for iteration in tapes[0])
    axes = figure.subplots(len(tapes), 1, sharex=True, squeeze=False)[:, 0]
    for tape, ax in zip(tapes, axes):
        first = tape[-1].end / 2 if staged else 0.0
        bars = defaultdict(list)
        for piece in pieces(tape):
            start = max(piece.start - first, 0.0)
            end = min(piece.end - first, width)
            if start < end:
                bars[piece.kind, piece.row].append((start, end - start))
        for (kind, row), spans in bars.items():
            ax.broken_barh(spans, (row - 0.4, 0.8), facecolor=COLORS[kind], edgecolor="white",
                           lw=0.4, label=kind)
        rows = sorted({row for _, row in bars})
        ax.set(title=tape.name, ylabel=word, yticks=rows, xlim=(0, 1.005 * width),
               ylim=(max(rows) + 0.6, min(rows) - 0.6))
    ax.set_xlabel("seconds")
    add_legend(figure)
    return figure

def save_picture(place, name, rows, folder):
    """NAME_PLACE.png and the rows as JSON."""
    what = EXPERIMENTS[name]
    tapes = [tape for tape in place.tapes if tape]
    is_tape = name in ("timeline", "fig12") and tapes
    figure = draw_tapes(tapes) if is_tape else draw(rows, what.x, what.y)
    where = place.on[1] if place.simulated else place.model.device.type
    path = os.path.join(folder, f"{name}_{where}")
    if figure:
        title = textwrap.fill(f"{what.about} {place.source}", int(15 * figure.get_figwidth()))
        figure.suptitle(title, fontsize=9)
        figure.savefig(path + ".png", dpi=110)
    with open(path + ".json", "w") as file:
        file.write(report(place, [name], rows))

def write_trace(path, tapes):
    """Chrome's trace format, for ui.perfetto.dev: a process per engine, a thread per request or
    stage; microseconds."""
    events = []
    for pid, tape in enumerate(tapes):
        events.append(dict(ph="M", name="process_name", pid=pid, args=dict(name=tape.name)))
        for piece in pieces(tape):
            events.append(dict(ph="X", name=piece.kind, pid=pid, tid=piece.row,
                               ts=piece.start * 1e6, dur=(piece.end - piece.start) * 1e6,
                               args=dict(tokens=piece.tokens)))
    with open(path, "w") as file:
        json.dump(dict(traceEvents=events), file)

# -----------------------------------------------------------------------------
# command line

def length_range(text):
    """--prompt and --output: 256, or 8..512"""
    if not re.fullmatch(r"[1-9]\d*(\.\.[1-9]\d*)?", text):
        raise argparse.ArgumentTypeError(f"{text!r}: must be like 256 or 8..512")
    numbers = [int(number) for number in text.split("..")]
    return min(numbers), max(numbers)

def length_list(text):
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: must be like 256,512,768")
    return [int(number) for number in text.split(",")]

def chunk_size(text):
    if text != "auto" and not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of tokens, or auto")
    return text if text == "auto" else int(text)

def positive(kind):
    """A type of argparse: a positive int or float."""
    def number(text):
        if not 0 < kind(text) < math.inf:
            raise ValueError
        return kind(text)
    number.__name__ = f"positive {kind.__name__}"
    return number

def parse_arguments(words=None):
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], allow_abbrev=False, conflict_handler="resolve",
        formatter_class=argparse.RawDescriptionHelpFormatter, epilog=__doc__.split("\n\n")[1])
    flag = parser.add_argument
    flag("experiments", nargs="*", help="names from `list`, or all, list, scoreboard; default: "
         "ceilings table2 table4")
    add_model_flags(parser, None)
    flag("--chunk", type=chunk_size, default=256, help="tokens of a prefill chunk; auto: a profile "
         "picks it [SARATHI §4.2]; default: 256")
    flag("--hardware", choices=GPUS, help="simulate this GPU instead of measuring")
    flag("--lengths", type=length_list, help="tokens per request, prompt and output; default: "
         "256,512,768 here, 1024,2048,3072 simulated")
    flag("--max-batch", type=positive(int), help="requests in a batch; default: 6")
    flag("--requests", type=positive(int), default=16, help="requests in a measured run")
    flag("--rounds", type=positive(int), default=10, help="interleaved rounds of a measurement")
    flag("--size", choices=("small", "full"), help="grid of an experiment; default: small if "
         "measured, full if simulated")
    flag("--rate", type=positive(float), help="online: requests/s; default: 0.7 of what is served")
    flag("--cv", type=positive(float), default=1.0, help="online: coefficient of variation of the "
         "gaps between arrivals; 1: Poisson")
    flag("--prompt", type=length_range, help="online: tokens of a prompt, like 8..512")
    flag("--output", type=length_range, help="online: tokens of an output, like 8..512")
    flag("--jobs", help="online: a CSV file with columns arrival (s), prompt, output (tokens)")
    flag("--plot", metavar="FOLDER", help="save each experiment's picture and rows there")
    flag("--trace", metavar="FILE", help="save every iteration for ui.perfetto.dev")
    return parser.parse_args(words)

def choose_place(args, what, machines):
    """Where an experiment runs. machines: a list that keeps the Machine for the next one."""
    if args.hardware and what.only == "measured":
        raise ValueError(f"{what.run.__name__} can only be measured: leave out --hardware")
    if args.hardware or what.only == "simulated":
        model, gpu, tp = what.on
        if args.hardware:
            gpu, tp = args.hardware, args.tp
        return Simulated(args, args.model or model, gpu, tp)
    if not machines:
        on_cpu = args.device == "cpu"
        name = args.model or ("llama-30m" if on_cpu else "llama-7b")
        dtype = getattr(torch, args.dtype) if args.dtype else None
        model, _ = load_model(name, dtype, args.device, args.seed)
        machines.append(Machine(args, model, name))
    machines[0].tapes.clear()
    return machines[0]

def run_experiment(place, what):
    """All rows of an experiment, and whether Ctrl-C ended it."""
    rows = []
    try:
        for row in tqdm(what.rows(place), what.run.__name__, leave=False, delay=3):
            rows.append(row)
    except KeyboardInterrupt:
        return rows, True
    return rows, False

def report(place, names, rows):
    """A run as one line of JSON."""
    return json.dumps(dict(experiment=" ".join(names), rows=rows, seed=place.args.seed,
                           machine=place.source, torch=torch.__version__,
                           date=time.strftime("%Y-%m-%d")))

def run_experiments(args, names):
    """Run experiments, print their tables, and save what the flags ask for."""
    rows = []
    tapes = []
    machines = []
    late = []  # tables of the main job, printed behind its explanation
    is_main = not args.experiments
    for name in names:
        what = EXPERIMENTS[name]
        place = choose_place(args, what, machines)
        if place.chunk == "auto":
            place.chunk = 256
            fig7_rows, _ = run_experiment(place, EXPERIMENTS["fig7"])
            place.chunk = pick_chunk(place, fig7_rows)
            print(f"### fig7\n\n{table(fig7_rows)}\n\nchunk: {place.chunk} tokens\n", flush=True)
        part, interrupted = run_experiment(place, what)
        rows += part
        tapes += [tape for tape in place.tapes if tape]
        late.append(f"### {name}: {what.about}\n{place.source}\n\n{table(part)}\n")
        if args.plot and part:
            save_picture(place, name, part, args.plot)
        if interrupted:
            print("interrupted: the tables hold what was measured so far", file=sys.stderr)
            break
        if not is_main:
            print(late.pop(), flush=True)
    if is_main and not interrupted:
        print(explain(place, rows) + "\n")
    print("\n".join(late))
    if args.trace:
        write_trace(args.trace, tapes)
    print(report(place, names, rows))

def main():
    args = parse_arguments()
    names = args.experiments or ["ceilings", "table2", "table4"]
    if args.plot:
        os.makedirs(args.plot, exist_ok=True)
    if names == ["list"]:
        for name, what in EXPERIMENTS.items():
            print(f"{name:13} {what.about}")
        return
    if names == ["scoreboard"]:
        rows = scoreboard(args)
        print(json.dumps(dict(experiment="scoreboard", rows=rows, date=time.strftime("%Y-%m-%d"))))
        return
    if names == ["all"]:
        names = [name for name, what in EXPERIMENTS.items()
                 if not (args.hardware and what.only == "measured")]
    for name in names:
        check_choice("experiment", name, [*EXPERIMENTS, "all", "list", "scoreboard"])
    run_experiments(args, names)

if __name__ == "__main__":
    run_command_line(main)
