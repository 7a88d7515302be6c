"""The papers' tables and figures, measured on this machine with the engine of sarathi.py, or simulated on hardware you do not
have. One registered function per table; whether it measures or simulates is only a matter of the clock.

    python bench.py --chunk 256          ceilings, Table 2 and Table 4 beside the paper's numbers (a minute and a half on 2 cores)
    python bench.py --chunk auto         first the one-time profile that picks the chunk for this model on this machine
    python bench.py table4 fig9 --hardware a6000 --model llama-13b     the same, simulated (under a minute)
    python bench.py fig9 timeline --hardware a6000 --plot pictures --trace trace.json     PNGs, and a trace for ui.perfetto.dev
    python bench.py online --arrivals poisson:0.7x --prompt 8..512 --output lognormal:40:1     users come when they like (a minute)
    python bench.py scoreboard           every number of the papers beside ours, simulated (three to fifteen minutes)
    python bench.py all --plot assets    every table and figure: PNGs, and each table's rows as JSON
    python bench.py list

Every experiment prints a Markdown table (paper | ours | source); the last line of stdout is one JSON object with all rows.

No experiment needs another: read `Bench`, then the one you want to change, and at a first reading nothing from "this machine" on.

    measuring, the main job                        Bench: rounds, iterations, operators; ceilings, Tables 2 and 4, the profile
    the paper's figures, end to end, many GPUs     [SARATHI]
    online serving, TNG, fairness                  who comes when, and what they wait for
    S-LoRA, SmartSpec, autopilot                   the other papers, and what only the composition makes possible
    the simulator, the scoreboard                  how far to believe it; every number of the papers beside ours
    this machine, pictures and traces, running     roofline and peers; PNGs; the command line
"""
import copy
import csv
import importlib.util
import json
import math
import os
import platform
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from argparse import SUPPRESS, ArgumentTypeError
from collections import ChainMap, Counter, defaultdict
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import count, cycle, islice, product
from statistics import fmean, median
from typing import Callable, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from kernels import FEW_ROWS, cdiv, linear, on_gpu, pack
from model import GPT, PRESETS, Graphs, Heads, Linear, default_dtype, load_model, preset, random_adapter
from sarathi import (GPUS, N_SPEC, CostModel, Engine, EngineConfig, Interruptible, Learned, Medusa, Parser, Pipeline, Request, Sarathi,
                     SarathiServe, Scheduler, SharedClock, Simulator, Tree, VirtualClock, WallClock, Work, add_model_flags, checked,
                     expected_tokens, free_memory, join_world, least_squares, load_draft, make_clock, make_engine, make_scheduler, option,
                     random_batches, rehearse, run_cli, seconds_of, time_batches, with_room)

EXPERIMENTS = {}  # name -> Experiment
OPERATORS = ("preproj", "attn", "postproj", "ffn_ln1", "ffn_ln2")  # [SARATHI Table 1]
BASELINES = ("static", "orca")
PEERS = ("transformers", "vllm", "llama.cpp")
LONGEST = 10**7  # tokens that a workload may ask for: more than any model's context
LENGTHS = "256 (all alike), 8..512 (each as often), zipf:THETA:LOW:HIGH (the k-th shortest as often as 1 / k^THETA) or lognormal:MEDIAN:SIGMA"
ARRIVALS = ("poisson:RATE, gamma:RATE:CV (per second; 0.7x: that share of what is served when all come at once), closed:N (N clients, each "
            "sends its next request when its last ended) or FILE.csv (columns arrival,prompt,output and perhaps adapter,client)")


class Experiment(NamedTuple):
    """A registered function and what there is to know of it; its docstring begins with what it reproduces."""
    run: Callable  # Bench -> rows, a list or a generator
    axes: tuple = ()  # (x label, y label) of each panel of its figure, the last one's again for those that follow
    only: str = ""  # simulated or measured, where it can be nothing else; "": as --hardware says
    needs: str = ""  # stages: runs only under torchrun, with --pp; one process: never under torchrun
    timeline: str = ""  # what a row of its picture is, request or stage, if that shows an engine's Spans
    beside: str = ""  # a GPU: the paper's numbers stand only beside this one, simulated; "": always

    @property
    def about(self):
        return self.run.__doc__.partition("\n")[0].rstrip(".")

    def rows(self, bench):
        comparable = self.beside in ("", bench.config.hardware)
        for r in self.run(bench):
            yield r | dict(source=r["source"] or self.only or bench.source, paper=r["paper"] if comparable else None)


def experiment(*axes, **more):
    """Register a function under its own name."""
    def register(f):
        EXPERIMENTS[f.__name__] = Experiment(f, axes, **more)
        return f
    return register


@dataclass
class BenchConfig:
    """What to run an experiment on, beyond the engine's own options."""
    lengths: str = option("", "prompt + output tokens per request, one or several lengths with commas; '': 256,512,768 on a CPU, 1024,2048,3072 on a GPU")
    pd: float = option(0.0, "prefill tokens per decode token, P:D; 0: chunk / (B - 1), where decodes piggyback perfectly [SARATHI §4.4]")
    requests: int = option(10, "requests in each end-to-end run; some experiments serve a multiple of it")
    repeats: int = option(5, "how often each thing is timed, after a warm-up, of which the median counts; whole runs: half as often, long ones once")
    hardware: str = option("", f"simulate this GPU instead of measuring: one of {', '.join(GPUS)}")
    arrivals: str = option("poisson:0.7x", f"when the requests of `online` and `tng_chunk` come: {ARRIVALS}")
    prompt: str = option("", f"prompt tokens of the requests of `online`, `tng_concurrency`, `tng_chunk`, `fairness`: {LENGTHS}; '': up to half of the longest of lengths")
    output: str = option("", "new tokens that they ask for, likewise; '': up to a sixteenth")
    schedulers: str = option("static,prefill_first,orca,sarathi,sarathi_serve", "who serves them in turn, beside --scheduler")
    targets: str = option("3,0.2", "TTFT,TPOT: seconds to the first token and per token behind it, within which a request counts as good [TNG]")
    tp: int = 1  # a flag of its own, as for sarathi.py: simulated GPUs, or processes
    scale: int = option(10000, "requests of the large simulations (fig12)")
    full: bool = option(False, "measure the paper's whole grid of sizes, too, which may take hours; a simulation always does")
    plot: str = option("", "keep in this folder each table's rows as JSON and its figure, with the paper's points beside ours, as PNG")
    trace: str = option("", "write what every iteration did to this file, in Chrome's trace format, for ui.perfetto.dev")
    peers: str = option("", "engines that `peers` measures beside ours: name=path with commas between them; transformers=, vllm=: a Python that "
                        "has it; llama.cpp=: the folder of llama-batched-bench; '': transformers, if this Python has it")
    cells: str = option("", "run only those cells of `peers` whose name holds this, '16 x' for instance; '': all")

    def __post_init__(self):
        self.paths = dict(part.partition("=")[::2] for part in self.peers.split(",") if part)
        if not all(name in PEERS and path for name, path in self.paths.items()):
            raise ValueError(f"peers = {self.peers!r}: must be name=path with commas between them, names among {', '.join(PEERS)}")
        for name, path in self.paths.items():
            what, found = ("folder", os.path.isdir) if name == "llama.cpp" else ("Python", shutil.which)
            if not found(path):
                raise ValueError(f"peers: {name}={path}: there is no such {what}")
        if not any(self.cells in cell for cell in CELLS):
            raise ValueError(f"cells = {self.cells!r}: must be part of a name among {'; '.join(CELLS)}")
        if self.hardware and self.hardware not in GPUS:
            raise KeyError(f"unknown hardware {self.hardware!r}: one of {', '.join(GPUS)}")
        for name in ("tp", "scale", "requests", "repeats"):
            checked(name, getattr(self, name), int, 1)
        checked("pd", self.pd, float, 0)
        lengths = [int(x) if x.strip().isdecimal() else 0 for x in self.lengths.split(",") if self.lengths]
        if any(x < 8 for x in lengths):
            raise ValueError(f"lengths = {self.lengths!r}: must be whole numbers of at least 8 with commas between them")
        self.lengths = lengths
        for name in self.schedulers.split(","):
            make_scheduler(name)
        self.prompt_lengths = lengths_of("prompt", self.prompt) if self.prompt else None
        self.output_lengths = lengths_of("output", self.output) if self.output else None
        self.coming = arrivals_of(self.arrivals)
        try:
            self.ttft, self.tpot = (checked("targets", float(x), float, 1e-9) for x in self.targets.split(","))
        except ValueError:
            raise ValueError(f"targets = {self.targets!r}: must be two numbers above 0 with a comma between them, seconds") from None


# ---------------------------------------------------------------- measuring

def shuffled(ways, i):
    """The ways in the order of round i, the same in every process: none should always run behind the same other."""
    ways = [*ways]
    return random.Random(i).sample(ways, len(ways))


class TurnClock(WallClock):
    """A WallClock that runs in `with clock:` alone, and on which what an idle engine waits for is there at once."""

    def __init__(self):
        super().__init__()
        self.stopped = self.start

    def __enter__(self):
        self.start += time.perf_counter() - self.stopped

    def __exit__(self, *error):
        self.stopped = time.perf_counter()

    def wait_until(self, t):
        self.start -= max(0.0, t - self.now())


class Bench:
    """What an experiment gets: the model (or the CostModel of one), the options, and the means to time things."""

    def __init__(self, model, config, options, name=""):
        self.model, self.config, self.options, self.name = model, config, options, name  # name: of a preset or a folder
        self.simulated = isinstance(model, CostModel)
        self.world = model.world
        self.clock, self.source = (VirtualClock(), "simulated") if self.simulated else (make_clock(self.world), "measured")
        self.lengths = config.lengths or ([1024, 2048, 3072] if self.simulated or model.device.type == "cuda" else [256, 512, 768])
        for knob in ("n_page", "memory_gb"):
            if getattr(options, knob):
                raise ValueError(f"{knob} = {getattr(options, knob)}: experiments choose their pools, give --max-batch or --lengths instead")
        if max(self.lengths) > model.config.block_size:
            raise ValueError(f"lengths {self.lengths}: the model's context ends at {model.config.block_size}")
        fits = 6  # as in [SARATHI Table 4]
        if self.simulated:
            fits = int(model.memory[0]) // model.page // max(self.lengths)
        elif model.device.type == "cuda":  # whole runs are compared in three engines at once, and what they compute takes room, too
            fits = int(free_memory(model.device)[0] / 4) // model.config.page_bytes(model.dtype.itemsize) // (max(self.lengths) + 128)
        self.B = options.max_batch or max(1, min(6, fits))
        self.notes = []  # sentences printed under the tables
        self.interrupt = Interruptible(self.world)
        self.doing, self.tapes, self.found = "", Tapes(), {}  # the experiment under way; what its engines did; what is shared
        self.parts = {}  # how far it is: what -> ", what i of n"
        self.spread = []  # of each thing that was timed more than once: its longest time over its shortest
        self.interrupted = False

    def engine(self, scheduler, n_page, B, **more):
        """A new engine for up to B requests at once, with n_page pages (measured: some more, see `with_tiles`)."""
        n_page = self.with_tiles(n_page, B)
        tape = self.tape(scheduler if isinstance(scheduler, str) else f"{type(scheduler).__name__}, chunk {scheduler.chunk}")
        options = vars(self.options) | dict(scheduler=scheduler, max_batch=B, n_page=n_page, record=tape) | more
        if not self.simulated and make_scheduler(scheduler).priced and more.get("cost") is None:
            options["cost"] = self.price(self.model)
        engine = make_engine(self.model, clock=self.clock, **options)
        if not self.simulated:
            engine.kv.zero_()  # a server's cache has been used before, and memory is slow the first time
        return engine

    def with_tiles(self, n_page, B):
        """Pages with which B requests that need n_page have whole key tiles of them, where it is measured (kernels.py)."""
        return n_page if self.simulated else n_page + B * (self.model.config.head_dim - 1)

    def shared(self, key, make):
        """make(), called once and remembered under `key` for all experiments."""
        if key not in self.found:
            self.found[key] = make()
        return self.found[key]

    def price(self, model):
        """A model's CostModel: itself if it is one, else its profile on this machine."""
        return model if isinstance(model, CostModel) else self.shared(model, lambda: CostModel.profile(model, self.config.repeats))

    def tape(self, what):
        """Where an engine's Spans go, if they are to be kept."""
        kept = self.config.trace or self.config.plot and self.doing in EXPERIMENTS and EXPERIMENTS[self.doing].timeline
        return self.tapes.new(f"{self.doing}: {what}") if kept else None

    def other(self, model):
        """The same options and lengths with another model, on the same clock."""
        config = copy.copy(self.config)
        config.lengths = self.lengths
        bench = Bench(model, config, self.options)
        for name in ("clock", "interrupt", "doing", "tapes", "found", "parts", "spread", "notes"):
            setattr(bench, name, getattr(self, name))
        return bench

    @property
    def runs(self):
        """How often an end-to-end run is repeated."""
        return 1 if self.simulated else max(1, self.config.repeats // 2)

    def grid(self, small, full):
        """The sizes of an experiment: the paper's where they cost nothing or were asked for."""
        return full if self.simulated or self.config.full else small

    @property
    def trained(self):
        """Whether the model's words are more than noise."""
        return not self.simulated and self.model.config.whole == preset("tiny")

    def prompts(self, n, length, seed=0):
        """n prompts of `length` tokens: of the trained model's, pieces of this file; a simulated one is a zero that is seen `length` times."""
        if self.trained:
            with open(__file__, "rb") as f:
                text = list(f.read())
            return [text[i:i + length] for i in random.Random(seed).choices(range(len(text) - length), k=n)]
        if self.simulated:
            return [np.broadcast_to(0, length)] * n
        return torch.randint(0, self.model.config.vocab_size, (n, length), generator=torch.Generator().manual_seed(seed)).tolist()

    @property
    def label(self):
        """What progress bars say."""
        return self.doing + "".join(self.parts.values())

    def each(self, what, things):
        """The things one after the other; meanwhile progress bars say which of how many."""
        for i, x in enumerate(things, 1):
            self.parts[what] = f", {what} {i} of {len(things)}"
            yield x
        del self.parts[what]

    def rounds(self, *fns, repeats=None, warm=True, patience=math.inf):
        """The times of each fn(), round by round (after a warm-up, since the first to meet a shape pays for its kernels), so that a
        machine that drifts hits all alike -> a list per fn. patience: seconds of rounds after which none is begun."""
        warm = warm and not self.simulated
        repeats = warm + (1 if self.simulated else repeats or self.config.repeats)  # every simulated time is the same
        took = [[] for _ in fns]
        ways = [way for i in range(repeats) for way in shuffled(zip(fns, took), i)]
        for i, (f, ts) in enumerate(tqdm(ways, self.label, delay=5, leave=False)):
            if i % len(fns) == 0 and sum(sum(ts[warm:]) for ts in took) > patience:
                break
            ts.append(self.once(f))
        took = [ts[warm:] for ts in took]
        self.spread += [max(ts) / max(1e-9, min(ts)) for ts in took if len(ts) > 1]
        return took

    def seconds(self, *fns):
        """The median time of each fn()."""
        return [median(ts) for ts in self.rounds(*fns)]

    def marginal(self, more, less):
        """What more() costs beyond less(): the median difference within a round, over twice the usual rounds."""
        return median(a - b for a, b in zip(*self.rounds(more, less, repeats=2 * self.config.repeats)))

    def heed(self):
        """After a Ctrl-C the next call ends the run."""
        if self.interrupt.seen:
            raise KeyboardInterrupt

    def once(self, f):
        """Seconds of one f() on the bench's clock."""
        self.heed()
        self.sync()
        start = self.clock.now()
        f()
        self.sync()
        return self.clock.now() - start

    def sync(self):
        if not self.simulated and self.model.device.type == "cuda":
            torch.cuda.synchronize()

    def iteration(self, decodes, context, chunk, past=0, last=True):
        """A function that runs one iteration: `decodes` requests that feed one token each after `context` cached ones, and one
        request that feeds `chunk` tokens after `past`. Contexts are so long on average, and differ by up to a key tile, as in a server:
        who begins one clears it. Tokens and cache are random: equal ones would run cooler, and so faster. last=False: no request has
        fed its last token by then, so none needs the output head. Where the engine would replay a recording so does this, and its
        by_operator is the same launch by launch."""
        top = self.model.config.block_size - 2  # a rehearsed request has a token or two to come
        context, chunk = min(context, top - 1), min(chunk, top - past)
        spread = min(self.model.config.head_dim // 2, context // 2, top - 1 - context)
        contexts = [context + round((2 * i + 1 - decodes) * spread / decodes) for i in range(decodes)]
        entries = [(n, 1, last) for n in contexts] + [(past, chunk, last)] * (chunk > 0)
        pages = sum(with_room(past + n, self.model.config) for past, n, _ in entries)
        engine = self.engine("orca", pages, decodes + 1, record=None, graph=False)  # which would record more than this one
        plan = rehearse(engine, entries)
        if self.simulated:
            return lambda: engine._run(plan)
        engine.kv.normal_()
        batch = engine._pack(plan)
        by_operator = lambda: self.model(batch, engine.kv)
        if not self.options.graph or not on_gpu(self.model.device) or self.world.size > 1:
            return by_operator
        graphs = Graphs(self.model, engine.kv, self.options.tile, len(batch.tokens) + self.options.tile)
        run = lambda: self.model.predict(graphs.hidden(batch))
        run.by_operator = by_operator
        return run

    def unpadded(self, *args, **more):
        """An iteration without a recording, which is padded to the tile."""
        run = self.iteration(*args, **more)
        return getattr(run, "by_operator", run)

    def operators(self, *fns, more=()):
        """Run each fn() once -> {operator of every layer, or module named in more: seconds}, by hooks on the modules' names (or on the
        cost model); seconds of all. Hooks take time: of what a whole takes they only say how it splits."""
        took = dict.fromkeys((*OPERATORS, *more), 0.0)
        unhook = (self._asked if self.simulated else self._hooked)(took)
        try:
            return took, sum(self.once(getattr(f, "by_operator", f)) for f in fns)
        finally:
            unhook()

    def _hooked(self, took):
        """A stopwatch for each operator: the time before is taken off, the time behind is put on -> what takes the hooks off."""
        def stamp(name, sign):
            def hook(*_):
                self.sync()
                took[name] += sign * time.perf_counter()
            return hook
        modules = [(path.rpartition(".")[2], module) for path, module in self.model.named_modules()]
        hooks = [hook for name, module in modules if name in took for hook in (
            module.register_forward_pre_hook(stamp(name, -1)), module.register_forward_hook(stamp(name, 1)))]
        return lambda: [h.remove() for h in hooks]

    def _asked(self, took):
        """The same for a simulated model: whenever it is asked for a time, its operators' shares are added."""
        def time_of(entries, lora="batched"):
            seconds = self.model.operators_of(entries, lora)
            for name in took:
                took[name] += seconds[name]
            return sum(seconds.values())
        self.model.time_of = time_of
        return lambda: delattr(self.model, "time_of")


def row(what, paper, ours, source=None, **more):
    """One line of a table; what is its name and unit, paper the published figure or None, source None: the bench's own.
    at=(panel, series, x) says where --plot draws it, see draw_panel."""
    return dict(what=what, paper=paper, ours=ours, source=source, **more)


# ---------------------------------------------------------------- the main job: ceilings, Table 2, Table 4; the profile

@experiment()
def ceilings(bench):
    """the machine's GEMM rate and bandwidth, and how many tokens one weight read pays for.
    From the data sheet where it is simulated. The knee: 2 N FLOP per weight take as long as reading it."""
    rate, bandwidth = bench.model.peaks if bench.simulated else measured_peaks(bench)
    knee = rate * bench.model.dtype.itemsize / 2 / bandwidth
    return [row("GEMM rate (GFLOP/s)", 154800, rate / 1e9), row("bandwidth, weights streamed (GB/s)", 768, bandwidth / 1e9),
            row("knee: tokens that one weight read pays for", 154800 / 768, knee)]


def measured_peaks(bench, *fns):
    """FLOP/s, bytes/s of this machine, and the median seconds of each fn, timed in turns with them: more weights than any cache
    holds are streamed past one row, and one matrix is multiplied by many rows."""
    c, dtype, device = bench.model.config, bench.model.dtype, bench.model.device
    C = max(c.n_embd, 512 if device.type == "cpu" else 4096)  # on a GPU smaller ones would time their launches
    random = torch.randn(4 * C, C, dtype=dtype, device=device)
    w = [pack(random.clone()) for _ in range(1 + int(5e8) // (4 * C * C * dtype.itemsize))]
    n = 512 if device.type == "cpu" else 4096
    one, many = torch.randn(1, C, dtype=dtype, device=device), torch.randn(n, C, dtype=dtype, device=device)

    def stream():
        for x in w:
            linear(one, x)

    def gemm():
        for _ in range(8):
            linear(many, w[0])
    read, multiply, *took = bench.seconds(stream, gemm, *fns)
    return 8 * 2 * n * 4 * C * C / multiply, len(w) * 4 * C * C * dtype.itemsize / read, *took


TABLE2 = {  # [SARATHI Table 2], ms, LLaMA-13B on an A6000: linear, attn, total, per token of the named phase
    "prefill-only": (224.8, 10.0, 234.8, 0.229), "decode-only": (44.28, 5.68, 49.96, 12.49), "decode-maximal": (223.2, 15.2, 238.4, 1.2)}


@experiment(("batch", "iteration (ms)"))
def table2(bench):
    """[SARATHI Table 2] the time of a prefill-only, a decode-only and a decode-maximal batch, by operator.
    A decode that rides along costs what the batch takes beyond its chunk; a dash where that drowns in noise."""
    L, d = min(1024, bench.model.config.block_size - 1, max(bench.lengths)), 3
    context = L - 1
    batches = {"prefill-only": (bench.iteration(0, 0, L), L), "decode-only": (bench.iteration(d + 1, context, 0), d + 1),
               "decode-maximal": (bench.iteration(d, context, L - d), d)}
    piggybacked = bench.marginal(batches["decode-maximal"][0], bench.iteration(0, 0, L - d)) / d
    totals = bench.seconds(*(f for f, n in batches.values()))
    rows = []
    for (name, (f, n)), total, paper in zip(batches.items(), totals, TABLE2.values()):
        took, _ = bench.operators(*[f] * 3)
        share = sum(took.values())
        linear_s, attn_s = (total * x / share for x in (share - took["attn"], took["attn"]))
        rows += [row(f"{name}: linear (ms)", paper[0], linear_s * 1e3, at=("", "linear", name)),
                 row(f"{name}: attn (ms)", paper[1], attn_s * 1e3, at=("", "attn", name)),
                 row(f"{name}: total (ms)", paper[2], total * 1e3, at=("", "total", name), operators_ms={k: v / 3 * 1e3 for k, v in took.items()})]
        each = piggybacked if name == "decode-maximal" else total / n
        rows.append(row(f"{name}: per {'prefill' if name == 'prefill-only' else 'decode'} token (ms)", paper[3], each * 1e3 if each > 0 else None))
    return rows


TABLE4 = {"LLaMA-13B, A6000": [(1024, 6, 50, 5.45, 1.33), (2048, 6, 50, 3.26, 1.26), (3072, 6, 50, 2.51, 1.22)],  # [SARATHI Table 4]:
          "LLaMA-33B, A100": [(1024, 10, 28, 3.83, 1.25), (2048, 5, 63, 4.25, 1.22), (3072, 3, 127, 3.51, 1.14)]}  # L B P:D speedup gain
PATIENCE = 4  # seconds: a round of whole runs that takes longer is not repeated
ORCA = 1.11  # [SARATHI Fig. 11] best case at 1K, over static


@experiment(("tokens per request L, batch B", "decode speedup (times)"), ("tokens per request L, batch B", "end-to-end gain (times)"))
def table4(bench):
    """[SARATHI Table 4] decode speedup and end-to-end gain over request-level batching and Orca, for three lengths.
    At P:D = C / (B - 1) unless --pd says otherwise; whole runs of every scheduler in turns. Simulated with --full: also the
    paper's second model."""
    first, second = TABLE4.values()
    known = {L: paper for L, _, _, *paper in first}
    papers = [*known.values()] + [(None, None)] * len(bench.lengths)  # other lengths stand for the paper's, in their order
    others = [f"beside L = {L} the paper's L = {its}" for L, its in zip(bench.lengths, known) if L not in known]
    bench.notes += [f"Whose figures stand where: {', '.join(others)}."] * bool(others)
    yield from table4_cases(bench, [(L, bench.B, bench.config.pd, *known.get(L, paper)) for L, paper in zip(bench.lengths, papers)])
    if bench.simulated and bench.config.full:
        for r in table4_cases(bench.other(CostModel.roofline(preset("llama-33b"), "a100")), second):
            yield r | dict(what="LLaMA-33B, A100, " + r["what"], at=(*r["at"][:2], "33B, " + r["at"][2]))


def table4_cases(bench, cases):
    """Rows for cases (L, B, P:D, the paper's speedup and gain)."""
    name = bench.options.scheduler
    schedulers = {s: s for s in (*BASELINES, name)}
    for i, (L, B, pd, speedup_paper, gain_paper) in enumerate(bench.each("length", cases)):
        speedup, piggybacked = decode_speedup(bench, L, B)
        if speedup is None and B > 1:
            bench.notes.append(f"L = {L}: no decode speedup (-), what its decodes add to a chunk's time is lost in the noise")
        P, D = halves(L, pd, bench.options.chunk, B)
        took = end_to_end(bench, schedulers, P, D, B)
        note, x = f"L = {L}, B = {B}, P:D = {P / D:.0f}", f"L {L}, B {B}"
        gain = {s: median(a / b for a, b in zip(took[s], took[name])) for s in BASELINES}  # within a round: drift cancels
        yield row(f"{note}: decode speedup", speedup_paper, speedup, decode_ms=piggybacked * 1e3, at=("decode speedup", name, x))
        yield row(f"{note}: {name} over static", gain_paper, gain["static"], seconds=took, at=("end to end", "over static", x))
        yield row(f"{note}: {name} over orca", gain_paper / ORCA if i == 0 and gain_paper else None, gain["orca"], derived=True,
                  at=("end to end", "over orca", x))


def halves(L, pd, chunk=0, B=1):
    """A request of L tokens as (P, D) at a ratio P:D (0: chunk / (B - 1), where decodes piggyback perfectly), P being whole chunks of
    chunk - (B - 1) where one is near, as in the paper: Table 4's 50, 63 and 127 are 4, 8 and 12 of them."""
    pd = pd or chunk / max(1, B - 1)
    P, part = max(1, L - max(1, round(L / (1 + pd)))), chunk - (B - 1)
    whole = part * round(P / part) if part > 0 else 0
    P = whole if 0 < whole < L and abs(whole - P) <= max(1, 0.02 * L) else P
    return P, L - P


def decode_speedup(bench, L, B):
    """How much cheaper a decode is that rides along with a chunk: (T_decode(B) / B) over its marginal time
    (T(p + d) - T(p)) / d [SARATHI §5.1] -> (speedup, marginal seconds); the speedup is None where none rides along (B = 1) or
    the difference drowns in noise."""
    d = B - 1
    p = max(1, min(bench.options.chunk, L) - d)
    (decodes,) = bench.seconds(bench.iteration(B, L - 1, 0))
    marginal = bench.marginal(bench.iteration(d, L - 1, p), bench.iteration(0, 0, p)) / max(1, d)
    return decodes / B / marginal if d and marginal > 0 else None, marginal


def end_to_end(bench, schedulers, P, D, B, requests=None):
    """The seconds each scheduler takes for the same requests of P prompt and D new tokens, run in turns -> {scheduler: [seconds]}.
    schedulers: {name: a name or a Scheduler}. A full batch and one request that joins it warm up. Simulated: what eight batches
    take beyond four, because how a run begins and ends says nothing about a server."""
    engines = [bench.engine(s, B * (P + D), B) for s in schedulers.values()]

    def rounds(n, repeats=bench.runs):
        prompts = bench.prompts(n, P, bench.options.seed)
        return bench.rounds(*(partial(e.generate, prompts, max_new_tokens=D) for e in engines), repeats=repeats, warm=False, patience=PATIENCE)
    if bench.simulated:
        took = [[a - b] for (a,), (b,) in zip(rounds(8 * B), rounds(4 * B))]
    else:
        n = requests or bench.config.requests
        rounds(min(n, B + 1), 1)
        took = rounds(n)
    return dict(zip(schedulers, took))


@experiment()
def profile(bench):
    """[SARATHI §4.2, §4.4] the one-time profile that picks chunk and tile for this model on this machine.
    Sets the chunk and the tile of the experiments that follow."""
    B, L = bench.B, max(bench.lengths)
    pd = bench.config.pd or 50.0
    sizes = [n for n in (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024) if n < L]
    if max(sizes, default=0) <= B:
        raise ValueError(f"lengths {bench.lengths}, max_batch = {B}: no chunk from 32 tokens on is larger than the batch and shorter than the longest")
    fns = [bench.unpadded(0, 0, m) for n in sizes for m in (n, n + 1)]
    (t_decode,) = bench.seconds(bench.iteration(B, L // 2, 0))
    times = bench.seconds(*fns)
    T, jump = dict(zip(sizes, times[::2])), {n: b / a for n, a, b in zip(sizes, times[::2], times[1::2])}
    steps = [t for t in (32, 64, 128) if t in jump and jump[t] > 1.08]  # one more token, a whole tile more time [Fig. 7]
    tile = max((t for t in steps if any(C > B and C % t == 0 for C in sizes)), default=1)

    def per_prefill_token(C):  # P:D prefill tokens need P/C chunks; the decodes that do not fit in beside them run alone [§4.4]
        left = max(0.0, 1 / pd - (B - 1) / C)
        return T[C] / C + left * t_decode / B
    bench.options.chunk = min((C for C in sizes if C > B and C % tile == 0), key=per_prefill_token)
    bench.options.tile = tile
    bench.notes.append(f"chosen: chunk {bench.options.chunk}, tile {tile} ({'no step in the curve' if tile == 1 else 'the step in the curve'}), "
                       f"for P:D {pd:g} and B = {B}")
    return [r for C in sizes for r in (
        row(f"C = {C}: iteration (ms)", {128: 55.0, 256: 69.8}.get(C), T[C] * 1e3),
        row(f"C = {C}: one token more, times", {256: 92.33 / 69.8}.get(C), jump[C]),
        row(f"C = {C}: all in, per prefill token (us)", None, per_prefill_token(C) * 1e6))]


# ---------------------------------------------------------------- the paper's figures; LLaMA-13B on an A6000 unless said otherwise

MAX_B = {1024: 18, 2048: 10, 3072: 6}  # [SARATHI §5.1] the largest batch that fits, by length


def batches(bench):
    """[(L, B)]: the paper's where they are simulated, else this bench's lengths and batch."""
    sizes = bench.grid([(L, bench.B) for L in bench.lengths], [*MAX_B.items()])
    return [(L, B) for L, B in sizes if L <= bench.model.config.block_size]


@experiment(("decodes in the batch, B", "decode over prefill, per token (times)"))
def fig3(bench):
    """[SARATHI Fig. 3] what a decoded token costs, in prefilled tokens, by batch size.
    At one length; also how much of a prefill is neither attention nor a linear operator."""
    L = bench.lengths[0]
    (prefill,) = bench.seconds(bench.iteration(0, 0, L))
    took, whole = bench.operators(bench.iteration(0, 0, L))
    sizes = bench.grid(sorted({1, 2, bench.B}), [1, 2, 4, 8, 12, 18])
    for B, decode in zip(sizes, bench.seconds(*(bench.iteration(B, L - 1, 0) for B in sizes))):
        yield row(f"B = {B}: decode over prefill, per token", {1: 200, 2: 100, 18: 16.7}.get(B), decode / B / (prefill / L), at=("", "decode", B))
    yield row("share of others in a prefill", 0.05, 1 - sum(took.values()) / whole, bound="at most")


@experiment(("tokens in the batch, B L", "one layer (tokens/ms)"), ("decodes in the batch, B", "one layer (tokens/ms)"),
            ("operator", "intensity (FLOP/byte)"), needs="one process")
def fig4(bench):
    """[SARATHI Fig. 4] one layer: prefill and decode throughput, and arithmetic intensity by operator.
    Without the output head, as in the paper."""
    one, L = bench.other(another(bench, n_layer=1)), bench.lengths[0]
    sizes = [n for n in (64, 128, 256, 512, 1024) if n <= max(bench.lengths)]
    rate = {n: n / t / 1e3 for n, t in zip(sizes, one.seconds(*(one.iteration(0, 0, n, last=False) for n in sizes)))}
    for n, r in rate.items():
        yield row(f"prefill, B L = {n} (tokens/ms)", 180 if n == 1024 else None, r, at=("prefill", "prefill", n))
    if 256 in rate:
        yield row("prefill throughput at 256 over the peak", 0.875, rate[256] / max(rate.values()))
    sizes = [2**i for i in range(bench.grid(7, 10))]
    rate = {B: B / t / 1e3 for B, t in zip(sizes, one.seconds(*(one.iteration(B, L - 1, 0, last=False) for B in sizes)))}
    for B, r in rate.items():
        yield row(f"decode, B = {B} (tokens/ms)", None, r, at=("decode", "decode", B))
    yield row("decode batch that reaches 95 % of the peak", 256, next(B for B, r in rate.items() if r > 0.95 * max(rate.values())))
    prefill, decode = intensity(one.model, L, L), intensity(one.model, 1, L)
    for name in prefill:
        for phase, at in (("prefill", prefill), ("decode at B = 1", decode)):
            yield row(f"intensity of {name}, {phase} (FLOP/byte)", None, at[name], source="computed", at=("intensity", phase.split()[0], name))
    yield row("intensity of ffn_ln1, prefill over decode", 100, prefill["ffn_ln1"] / decode["ffn_ln1"], source="computed", bound="at least")


def another(bench, **change):
    """The bench's model with some of its configuration changed: its cost model, or one with random weights."""
    config = replace(bench.model.config, **change)
    if bench.simulated:
        return CostModel.roofline(config, bench.config.hardware, bench.config.tp)
    return GPT.from_preset(config, dtype=bench.model.dtype, device=str(bench.model.device))


def room_of(cost):
    """Tokens whose keys and values fit beside the weights of a simulated GPU."""
    return int(math.prod(cost.memory)) // cost.page


def intensity(model, n, context):
    """{operator: FLOP per byte read or written} of a request that feeds n tokens and ends at `context`."""
    c, size = model.config, model.dtype.itemsize
    A, K = c.n_head * c.head_dim, 2 * c.n_kv_head * c.head_dim
    attn = 4 * A * n * (context - n / 2) / (size * (K * context + 2 * A * n))
    return dict(attn=attn, **{name: 2 * n * a * b / (size * (a * b + n * (a + b))) for name, (a, b) in c.widths.items()})


@experiment(("tokens in the prefill", "iteration (ms)"))
def fig7(bench):
    """[SARATHI Fig. 7] tile quantization: the time of a prefill just at a multiple of the tile, and one token beyond.
    Measured on a CPU the steps are small: there is no thread block to fill."""
    sizes = [n for n in bench.grid([128, 256, 384, 512], range(128, 1025, 128)) if n < max(bench.lengths)]
    times = bench.seconds(*(bench.unpadded(0, 0, m, last=False) for n in sizes for m in (n, n + 1)))
    for n, at, beyond in zip(sizes, times[::2], times[1::2]):
        yield row(f"{n} tokens (ms)", {128: 55.0, 256: 69.8}.get(n), at * 1e3, at=("", "prefill", n))
        yield row(f"{n + 1} tokens (ms)", {256: 92.33}.get(n), beyond * 1e3, at=("", "prefill", n + 1))
        yield row(f"one token beyond {n}, times", {256: 1.32}.get(n), beyond / at)


@experiment(("batch size, B", "decode speedup (times)"))
def fig8(bench):
    """[SARATHI Fig. 8] decode speedup over batch size and length, and the batches that fit.
    The paper gives the range and the batches that fit; B = 6 is in its Table 4 too."""
    seen, known = [], {(L, B): speedup for L, B, _, speedup, _ in TABLE4["LLaMA-13B, A6000"]}
    for L, most in batches(bench):
        for B in range(2, most + 1, 2):
            speedup, _ = decode_speedup(bench, L, B)
            seen += [speedup] if speedup else []
            yield row(f"L = {L}, B = {B}: decode speedup", known.get((L, B)), speedup, derived=True, at=("", f"L = {L}", B))
    yield row("largest decode speedup", 10.0, max(seen, default=None), at=("", None, None))
    yield row("smallest decode speedup", 2.8, min(seen, default=None), at=("", None, None))
    if bench.simulated:
        for L, most in batches(bench):
            yield row(f"L = {L}: largest batch", most, Simulator(another(bench, block_size=L)).max_batch)


# ---------------------------------------------------------------- end to end over P:D, batch and chunk

def orca_best(L, B):
    """Orca's best case, one whole prompt beside the running decodes: SARATHI with a chunk as long as any prompt [SARATHI §5.2]."""
    return Sarathi(chunk=L + B)


def gains(bench, P, D, B, chunks, orca=False):
    """How many times as fast as request-level batching the same requests are served -> {chunk or "worst" or "best": gain}"""
    schedulers = dict(base="static") | {C: Sarathi(chunk=C) for C in chunks}
    if orca:
        schedulers |= dict(worst="orca", best=orca_best(P, B))
    took = end_to_end(bench, schedulers, P, D, B=B, requests=2 * B)
    return {name: median(a / b for a, b in zip(took["base"], ts)) for name, ts in took.items() if name != "base"}


def ratios(bench):
    """The P:D ratios of a sweep."""
    return bench.grid((5, 50), (1, 2, 3, 5, 7, 10, 20, 40, 50, 64, 80, 100, 128, 160, 200))


@experiment(("P:D ratio", "throughput over static (times)"))
def fig9(bench):
    """[SARATHI Fig. 9] throughput over request-level batching, by P:D ratio and chunk size.
    A peak's P:D is where decodes piggyback perfectly: C / (B - 1)."""
    for L, B in bench.grid(batches(bench)[:1], batches(bench)):
        for C in bench.grid([bench.options.chunk], [128, 256, 512]):
            sizes = sorted({halves(L, 0, C, B), *(halves(L, pd) for pd in ratios(bench))})  # in whole chunks several of these would become one
            curve = [(P / D, gains(bench, P, D, B, [C])[C]) for P, D in sizes]
            pd, best = max(curve, key=lambda point: point[1])
            paper = {256: (1.27, 14), 512: (1.23, 28)}.get(C, (None, None)) if (L, B) == (1024, 18) else (None, None)
            yield row(f"L = {L}, B = {B}, C = {C}: peak gain", paper[0], best, curve=curve, at=(f"L = {L}, B = {B}", f"C = {C}", paper[1]))
            yield row(f"L = {L}, B = {B}, C = {C}: P:D of the peak", paper[1], pd)


@experiment(("tokens per request L, batch B", "time, static over SARATHI (times)"))
def fig10(bench):
    """[SARATHI Fig. 10] time by operator, request-level batching over SARATHI.
    At P:D = C / (B - 1), where decodes piggyback perfectly."""
    seen = defaultdict(list)  # operator -> its gains
    for C in bench.grid([bench.options.chunk], [256, 512]):
        for L, most in bench.grid(batches(bench)[:1], batches(bench)):
            for B in bench.grid([most], sorted({2, 6, most})):
                took, (P, D) = [], halves(L, 0, C, B)
                for scheduler in ("static", Sarathi(chunk=C)):
                    engine = bench.engine(scheduler, B * L, B, graph=False)
                    seconds, _ = bench.operators(partial(engine.generate, bench.prompts(8 * B, P), max_new_tokens=D))
                    took.append(seconds | {"ffn": seconds["ffn_ln1"] + seconds["ffn_ln2"]})
                for name in ("preproj", "attn", "postproj", "ffn"):
                    seen[name].append(took[0][name] / took[1][name])
                    yield row(f"L = {L}, B = {B}, C = {C}: {name}", None, seen[name][-1], at=(f"C = {C}", name, f"{L}, {B}"))
    for name, values, low, high in (("ffn", seen["ffn"], 1.3, 1.6), ("preproj and postproj", seen["preproj"] + seen["postproj"], 1.05, 1.38)):
        yield row(f"{name}: smallest gain", low, min(values), at=(None, name.split()[0], None))
        yield row(f"{name}: largest gain", high, max(values), at=(None, name.split()[0], None))


@experiment(("tokens per request L, batch B", "throughput over static (times)"), ("P:D ratio", "throughput over static (times)"))
def fig11(bench):
    """[SARATHI Fig. 11] beside Orca's worst and best case: (a) by length, (b) by P:D ratio.
    Worst case: all requests start and end together, as request-level batching; best: whole prompts beside running decodes [§4.5]."""
    for i, (L, B) in enumerate(batches(bench)):
        C = bench.options.chunk
        gain = gains(bench, *halves(L, 0, C, B), B, [C], orca=True)
        for name, paper, ours in (("Orca, worst case", None if i else 1.0, gain["worst"]), ("Orca, best case", None if i else 1.11, gain["best"]),
                                  ("SARATHI", (1.27, 1.25, 1.23)[i] if i < 3 else None, gain[C])):
            yield row(f"(a) L = {L}, B = {B}: {name}", paper, ours, at=("(a)", f"C = {C}" if name == "SARATHI" else name, f"L {L}, B {B}"))
    L, B = batches(bench)[0]
    chunks, curves = bench.grid([bench.options.chunk], [128, 256, 512]), {}
    for P, D in sorted({halves(L, pd, C, B) for C in chunks for pd in (0, *ratios(bench))}):
        for name, gain in gains(bench, P, D, B, chunks, orca=True).items():
            curves.setdefault(name, []).append((P / D, gain))
    for name, curve in curves.items():
        pd, best = max(curve, key=lambda point: point[1])
        series = f"C = {name}" if name in chunks else f"Orca, {name} case"
        yield row(f"(b) {'SARATHI, ' * (name in chunks)}{series}: peak gain (at P:D {pd:.0f})", {512: 1.23, "best": 1.11}.get(name), best,
                  curve=curve, at=("(b)", series, {512: 28}.get(name)))  # [SARATHI Fig. 9] says where, for C = 512


@experiment(("chunk size C (tokens)", "time over a full prefill's (times)"), ("chunk size C (tokens)", "time over a full prefill's (times)"),
            ("chunk size C (tokens)", "throughput over static (times)"))
def fig13(bench):
    """[SARATHI Fig. 13] what chunking costs: (a) attention, (b) prefill, (c) what is left end to end.
    Times over a full prefill's; a gain over request-level batching at P:D = C / (B - 1)."""
    attention, prefill, end = panels = "(a) attention", "(b) prefill", "(c) end to end"
    most, chunks = defaultdict(float), bench.grid([64, 128, 256], range(64, 513, 64))  # most: (panel, C) -> of all lengths
    for L, B in bench.grid(batches(bench)[:1], batches(bench)):
        whole = chunked(bench, L, L)
        for C in chunks:
            took = chunked(bench, L, C)
            gain = gains(bench, *halves(L, 0, C, B), B, [C])[C] if C > B else None
            for panel, unit, ours in zip(panels, ("times", "times", "gain"), (took[0] / whole[0], took[1] / whole[1], gain)):
                most[panel, C] = max(most[panel, C], ours or 0.0)
                yield row(f"{panel}, {unit}, L = {L}, C = {C}", None, ours, at=(panel, f"L = {L}", C))
    for panel, C, paper in ((attention, 64, 3.0), (prefill, 64, 5.0), (prefill, 128, 2.0)):
        yield row(f"{panel} at C = {C}, times", paper, most[panel, C], at=(panel, None, C))
    for C, paper in ((256, 0.8), (512, 0.9)):
        if C in chunks:
            yield row(f"(b) prefill at C = {C}: speed kept", paper, 1 / most[prefill, C])
    for C, paper in ((64, 1.0), (128, 1.16)):
        yield row(f"(c) best gain at C = {C}", paper, most[end, C], at=(end, None, C))
    if 320 in chunks:
        yield row("(c) gain at C = 256 over C = 320", 1.0, most[end, 256] / most[end, 320], bound="at least")


def chunked(bench, L, C):
    """Seconds of a prompt of L tokens fed in chunks of C -> (attention's, all)"""
    fns = [bench.iteration(0, 0, min(C, L - past), past, last=False) for past in range(0, L, C)]
    total = sum(bench.seconds(*fns))
    took, _ = bench.operators(*fns)
    return total * took["attn"] / sum(took.values()), total


# ---------------------------------------------------------------- many requests, many GPUs

def zipf_requests(n, low=1024, high=4096):
    """n simulated requests, one after the other: their lengths are low .. high, the k-th shortest with a probability in
    proportion to k^-0.4, ten prompt tokens for each new one [SARATHI §5.3]."""
    for L in zipf(0.4, low, high)(np.random.default_rng(0), n).tolist():
        P, D = halves(L, 10)
        yield Request(np.broadcast_to(0, P), max_new_tokens=D)


def feed(bench, engine, requests, clients=None):
    """Serve an iterator of requests without holding them all -> those that ended, in the order of their end. clients: so many are
    there at once, the next comes when one ended (None: a full batch and 64 more); math.inf: all are added, each comes at its own time."""
    requests, most = iter(requests), clients or 64 + engine.max_batch
    r = next(requests, None)
    while r or engine.requests:
        while r and len(engine.requests) < most:
            r.arrival = engine.clock.now() if most < math.inf else r.arrival
            engine.add(r)
            r = next(requests, None)
        bench.heed()
        yield from (event.request for event in engine.step() if event.finished)


@experiment(("median per request", "bubble time, ratio"), ("scenarios compared", "completion time, ratio"), only="simulated")
def fig12(bench):
    """[SARATHI Fig. 12] GPT-3 on 64 A100: pipeline bubbles and completion time with Orca, with SARATHI and without a pipeline.
    Always simulated, whatever the bench. The last rows ask what if an all-reduce began as late as in eager PyTorch."""
    n = bench.config.scale
    orca, sarathi, alone = clusters(bench, n)
    yield row("median bubble time per request, Orca over SARATHI", 6.29, orca["bubble"] / sarathi["bubble"],
              at=("(a) bubbles", "as simulated", "Orca over SARATHI"))
    for (name, ours), paper in zip(completions(orca, sarathi, alone).items(), (1.91, 1.48, 1.28)):
        yield row(f"completion, {name}", paper, ours, at=("(b) completion", "as simulated", name))
    for name, r in (("Orca", orca), ("SARATHI", sarathi)):
        yield row(f"TP8 x PP8, {name}: idle share of the stages", None, r["idle"], kinds=r["kinds"])
        bench.notes.append(f"TP8 x PP8, {name}: {n} requests in {r['took']:.0f} s; the median request waits {r['bubble']:.2f} s in bubbles: "
                           + ", ".join(f"{kind} {s:.0f} s" for kind, s in r["kinds"].items()) + " of all stages")
    bench.notes.append(f"8 x TP8: {n} requests in {alone['took']:.0f} s")
    yield row("largest batch, TP8 x PP8, per micro-batch", 27, Simulator(gpt3(nodes=8)).max_batch // 8)
    yield row("largest batch, TP8", 11, Simulator(gpt3()).max_batch)
    eager = f"{EAGER * 1e6:.0f} us before an all-reduce"
    for name, ours in completions(*clusters(bench, cdiv(n, 5), delay=EAGER)).items():
        yield row(f"with {eager}: completion, {name}", None, ours, at=("(b) completion", eager, name))


EAGER = 350e-6  # seconds; what brings all three completion ratios to the paper's, and not used for anything else


def completions(orca, sarathi, alone):
    """The ratios of [SARATHI Fig. 12] b."""
    return {f"{one} over {other}": a["took"] / b["took"] for one, a, other, b in (
        ("TP-PP Orca", orca, "TP-PP SARATHI", sarathi), ("TP only", alone, "TP-PP SARATHI", sarathi), ("TP-PP Orca", orca, "TP only", alone))}


def clusters(bench, n, **more):
    """n requests on 64 GPUs -> what happened with TP8 in each of 8 nodes and a pipeline across them, with Orca and with SARATHI,
    and with a replica in each node [SARATHI §5.3]"""
    replicas = [Simulator(gpt3(**more), scheduler=orca_best(4096, 11), max_batch=11, n_page=11 * 4096) for _ in range(8)]
    lines = list(pipelines(bench, 8, n, **more).values())
    for i, engine in enumerate(replicas):
        sum(1 for r in feed(bench, engine, islice(zipf_requests(n), i, None, 8)))
    return *lines, dict(took=max(engine.clock.now() for engine in replicas))


def pipelines(bench, nodes, n, **more):
    """n requests through a pipeline across nodes of TP8 -> {policy: outcome}"""
    seen = {}
    for name, scheduler in (("Orca", orca_best(4096, 27)), ("SARATHI", Sarathi(chunk=256))):
        line = Pipeline(gpt3(nodes=nodes, **more), nodes, record=bench.tape(name), scheduler=scheduler, max_batch=27, n_page=27 * 4096)
        seen[name] = outcome(line, feed(bench, line, zipf_requests(n)))
    return seen


def outcome(line, ended):
    """What a Pipeline's figures are when the last of its requests has ended."""
    bubbles, took = [r.bubble for r in ended], line.clock.now()
    idle = {kind: s / len(line.lanes) / took for kind, s in line.bubbles.items()}  # shares of the stages
    return dict(took=took, n=len(bubbles), bubble=median(bubbles), kinds=line.bubbles, shares=idle, idle=sum(idle.values()))


@experiment(only="measured", needs="stages", timeline="stage")
def fig12_measured(bench):
    """[SARATHI §5.3] bubbles for real: Orca and SARATHI on the stages of torchrun's processes, beside the simulator with this machine's costs.
    Lengths and chunk are the paper's, scaled to the longest of --lengths; the batch is the one whose decodes piggyback perfectly
    at P:D = 10. Measured in turns; the median of the runs counts."""
    world, top, n = bench.world, max(bench.lengths), 4 * bench.config.requests
    if world.pp == 1 or world.tp > 1:
        raise ValueError(f"pp = {world.pp}, tp = {world.tp}: fig12_measured needs stages of one process each, at least two: "
                         "torchrun --nproc_per_node 2 bench.py fig12_measured --pp 2")
    C, cost, runs = top // 16, stage_cost(bench), {"measured": defaultdict(list), "simulated": defaultdict(list)}
    policies, B = {"Orca": orca_best(top, top), "SARATHI": Sarathi(chunk=C)}, 1 + cdiv(C, 10)
    for i in tqdm(range(bench.runs), "fig12_measured"):
        for name, scheduler in policies.items():
            options = dict(scheduler=scheduler, max_batch=B, n_page=bench.with_tiles(B * top, B))
            line = Pipeline(bench.model, record=bench.tape(name) if i == 0 else None, **options)
            work = [Request(bench.prompts(1, len(r.prompt), k)[0], r.max_new_tokens) for k, r in enumerate(zipf_requests(n, top // 4, top))]
            ended = list(feed(bench, line, work))
            line.gather(ended)
            runs["measured"][name].append(outcome(line, ended))
            line = Pipeline(cost, world.pp, **options)
            runs["simulated"][name].append(outcome(line, feed(bench, line, zipf_requests(n, top // 4, top))))
    bench.notes.append(f"{n} requests of {top // 4} to {top} tokens, {world.pp} stages, B = {B} per micro-batch, C = {C}; a message of N tokens "
                       f"takes {cost.link[0] * 1e6:.0f} + {cost.link[1] * 1e6:.2f} N us; {bench.runs} runs")
    return list(beside_the_simulator(runs))


def beside_the_simulator(runs):
    """{source: {policy: [outcome]}} -> rows: Orca over SARATHI, what each was, and how far off the simulator is."""
    seen = lambda source, name, key: median(o[key] for o in runs[source][name])
    keys = {"median bubble time per request": ("bubble", 6.29), "completion": ("took", 1.91), "idle share of the stages": ("idle", None)}
    for what, (key, paper) in keys.items():
        for source in runs:
            yield row(f"{what}, Orca over SARATHI", paper, seen(source, "Orca", key) / seen(source, "SARATHI", key), source=source)
    for name in runs["measured"]:
        for what, (key, _) in keys.items():
            real, ours = (seen(source, name, key) for source in runs)
            for source, value in zip(runs, (real, ours)):
                yield row(f"{name}: {what}" + " (s)" * (key != "idle"), None, value, source=source)
            yield row(f"{name}: {what}: the simulator's error (%)", None, abs(ours / real - 1) * 100, measured=real, simulated=ours)


def stage_cost(bench):
    """The CostModel of all stages together: that of one, profiled on all ranks at the same time (they share a memory), times their
    number; and what their messages take."""
    world = bench.model.world
    stage = another(bench, n_layer=cdiv(bench.model.config.n_layer, world.pp), stage=(0, 1))
    cost = world.agree(CostModel.profile(stage, repeats=bench.runs))
    cost.coefficients = [world.pp * c for c in cost.coefficients]
    cost.link = tuple(x / world.pp for x in message_cost(bench.model, partial(round_trip, world), (1, 64, 512)))
    return cost


def round_trip(world, x):
    """States (N, C) on from stage to stage, and the last one's word to all."""
    if world.stage:
        x = world.receive(x.shape, x.dtype)()
        x[0, 0].item()  # a GPU's message is there when it can be read
    sent = None if world.is_last else world.send(x, "profile")
    world.spread(torch.zeros(8), world.last)()
    if sent:
        sent()


def message_cost(model, send, sizes, repeats=20):
    """What send(x) takes for the vectors x of N tokens, (seconds, seconds per token): a line through medians."""
    took = []
    for N in sizes:
        x = torch.zeros(N, model.config.n_embd, dtype=model.dtype, device=model.device)
        for _ in range(repeats):
            start = time.perf_counter()
            send(x)
            took.append(time.perf_counter() - start)
    took = np.median(np.reshape(took, (len(sizes), -1)), 1)
    line = least_squares(np.stack([np.ones(len(sizes)), sizes], 1) / took[:, None], np.ones(len(sizes)))
    return model.world.agree(tuple(line.tolist()))


def gpt3(nodes=1, **more):
    """GPT-3 on nodes of 8 A100-80."""
    return CostModel.roofline(preset("gpt3-175b"), "a100", tp=8, nodes=nodes, **more)


@experiment(only="simulated", timeline="stage")
def bubbles(bench):
    """[SARATHI §3.2, §5.3] where a pipeline of four stages idles, with Orca and with SARATHI: GPT-3 on 32 A100.
    Always simulated; the lengths are fig12's."""
    for name, r in pipelines(bench, 4, min(bench.config.scale, 300)).items():
        yield row(f"{name}: completion of {r['n']} requests (s)", None, r["took"])
        for kind, share in r["shares"].items():
            yield row(f"{name}: idle in {kind}, share of the stages", None, share)


@experiment(only="simulated")
def scaling(bench):
    """how long the simulator itself takes for 1K, 10K (and with --full 100K) requests, and the memory it needs.
    GPT-3 on 16 A100, SARATHI, B = 27, lengths as in [SARATHI §5.3]; wall time on this machine."""
    for n in [1000, 10000] + [100000] * bench.config.full:
        engine, clock = Simulator(gpt3(nodes=2), scheduler="sarathi", max_batch=27, n_page=27 * 4096), WallClock()
        ended = sum(1 for r in feed(bench, engine, zipf_requests(n)))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        yield row(f"{ended} requests: wall time (s)", None, clock.now(), source="measured", iterations=engine.n_steps)
        yield row(f"{ended} requests: peak memory of the process (MB)", None, peak, source="measured")
        ended, took, steps = overload(bench, n)
        yield row(f"{ended} requests of two clients at twice what is served: wall time (s)", None, took, source="measured", iterations=steps)


def overload(bench, n):
    """n requests for a LLaMA-7B on an A100 that serves half as many per second -> those served, wall seconds, iterations."""
    engine, clock = Simulator(CostModel.roofline(preset("llama-7b"), "a100"), scheduler="sarathi", max_batch=100, alloc="grow", fair=2.0), WallClock()
    jobs = gamma_jobs(40, n / 40, prompt=uniform(8, 512), output=uniform(8, 256))
    requests = (Request(np.broadcast_to(0, job.prompt), job.output, arrival=job.arrival, client="ab"[i % 2]) for i, job in enumerate(jobs))
    return sum(1 for _ in feed(bench, engine, requests, math.inf)), clock.now(), engine.n_steps


# ---------------------------------------------------------------- online serving: what comes, and how it went

class Job(NamedTuple):
    """A request that will come."""
    arrival: float  # seconds
    prompt: int  # tokens
    output: int
    adapter: int | str | None = None  # which of the workload's
    client: str | None = None


class Arrivals(NamedTuple):
    """What --arrivals says."""
    rate: float = 0.0  # requests per second
    relative: bool = False  # or as a share of what can be served
    cv: float = 1.0  # of the gaps
    clients: float = math.inf  # closed loop: so many users, each of whom sends a request when the last one ended
    jobs: tuple = ()  # all of a trace


def arrivals_of(text):
    """A text of the grammar ARRIVALS -> Arrivals; a trace is read. ValueError, with the line's number, for what is none."""
    kind, *parts = text.split(":")
    if text.endswith(".csv"):
        return Arrivals(jobs=tuple(read_jobs(text)))
    try:
        if kind == "closed":
            (n,) = parts
            return Arrivals(clients=checked("N", int(n), int, 1))
        rate, cv = *parts, *["1"] * (kind == "poisson")
        if kind not in ("poisson", "gamma"):
            raise ValueError
        return Arrivals(checked("RATE", float(rate.removesuffix("x")), float, 1e-9), rate.endswith("x"), checked("CV", float(cv), float, 1e-3))
    except ValueError:
        raise ValueError(f"arrivals = {text!r}: must be {ARRIVALS}") from None


def lengths_of(name, text):
    """A text of the grammar LENGTHS -> a function (rng, n) that draws n lengths. ValueError, naming what it is for, for another."""
    kind, *parts = re.split(r":|\.\.", text)
    try:
        if re.fullmatch(r"\d+(\.\.\d+)?", text):
            low = checked(name, int(kind), int, 1, LONGEST)
            return uniform(low, checked(name, int(parts[-1]) if parts else low, int, low, LONGEST) + 1)
        kinds = dict(zipf=(zipf, float, int, int), lognormal=(lognormal, float, float))
        make, *types = kinds[kind]
        return make(*(checked(name, convert(x), convert, convert is int, LONGEST) for convert, x in zip(types, parts, strict=True)))
    except (ValueError, KeyError):
        raise ValueError(f"{name} = {text!r}: must be {LENGTHS}, in tokens") from None


def uniform(low, high):
    """Lengths from low to high - 1, each as often as the other."""
    return lambda rng, n: rng.randint(low, high, n)


def zipf(theta, low, high):
    """Lengths from low to high, the k-th shortest with a probability in proportion to k^-theta [SARATHI §5.3]."""
    k = np.arange(1, checked("high", high, int, low) - low + 2)
    return lambda rng, n: rng.choice(k + low - 1, n, p=k**-theta / (k**-theta).sum())


def lognormal(median, sigma):
    """Lengths whose logarithm is normal, as those of people's prompts are; 1 .. LONGEST."""
    mu = math.log(checked("median", median, float, 1))
    return lambda rng, n: np.rint(rng.lognormal(mu, sigma, n)).clip(1, LONGEST).astype(int)


def read_jobs(path):
    """The Jobs of a CSV file with the columns arrival (seconds), prompt, output (tokens) and, where there are any, adapter and client
    (names, or nothing). ValueError with the number of the line for one that is none."""
    def cell(line, name, kind, low):
        try:
            value = kind(line[name])
        except (TypeError, ValueError):
            value = line[name]
        return checked(name, value, kind, low)
    jobs = []
    if not os.path.isfile(path):
        raise FileNotFoundError(f"arrivals = {path!r}: there is no such file")
    with open(path, newline="", encoding="utf-8-sig", errors="replace") as f:
        rows = csv.DictReader(f)
        try:
            if not {"arrival", "prompt", "output"} <= {*(rows.fieldnames or ())} <= {*Job._fields}:
                raise ValueError(f"columns {','.join(rows.fieldnames or ())[:60]!r}: must be arrival,prompt,output and perhaps adapter,client")
            for line in rows:
                n = sum(isinstance(text, str) for text in line.values()) + len(line.get(None, ()))
                if n != len(rows.fieldnames):
                    raise ValueError(f"{n} cells: must be {len(rows.fieldnames)}, {','.join(rows.fieldnames)}")
                names = {name: (line.get(name) or "").strip() or None for name in ("adapter", "client")}
                jobs.append(Job(cell(line, "arrival", float, 0), cell(line, "prompt", int, 1), cell(line, "output", int, 1), **names))
        except (ValueError, csv.Error) as e:
            raise ValueError(f"{path}, line {max(1, rows.line_num)}: {e}") from None
    if not jobs:
        raise ValueError(f"{path}, line 2: no request under the names of the columns")
    return jobs


def gamma_jobs(rate, duration, cv=1.0, n_adapter=0, alpha=1.0, prompt=uniform(8, 512), output=uniform(8, 512), seed=42):
    """rate * duration Jobs whose gaps are Gamma(1 / cv^2, cv^2 / rate), Poisson arrivals for cv = 1; of n_adapter adapters the
    popularity is a power law, all alike for alpha = 1 [S-LoRA §7.2]. Drawn as the paper's code does: its seed, its workload."""
    rng, n = np.random.RandomState(seed), max(1, int(rate * duration))
    adapters = (rng.power(alpha, n) * n_adapter).astype(int).tolist() if n_adapter else [None] * n
    lengths = prompt(rng, n).tolist(), output(rng, n).tolist()
    return list(map(Job, np.cumsum(rng.gamma(1 / cv**2, cv**2 / rate, n)).tolist(), *lengths, adapters))


def requests_of(bench, engine, jobs):
    """Jobs as Requests that come from now on, adapter i as the engine's "i"."""
    start, seed = engine.clock.now(), bench.options.seed
    return [Request(bench.prompts(1, job.prompt, seed + i)[0], max_new_tokens=job.output, arrival=start + job.arrival, client=job.client,
                    adapter=None if job.adapter is None else str(job.adapter)) for i, job in enumerate(jobs)]


def served(bench, engine, requests, clients=math.inf):
    """The same requests, when all have ended."""
    for _ in tqdm(feed(bench, engine, requests, clients), bench.label, len(requests), delay=5, leave=False):
        pass
    if isinstance(engine.record, (Tape, Meter)):
        engine.record.arrivals.update((r.id, r.arrival) for r in requests)
    return requests


def abreast(bench, engines, jobs):
    """Serve the same jobs with every engine; engines: {key: a function that makes it} -> {key: its requests, when all have ended}. Measured:
    an iteration of each in turns, none started ahead of its turn, on TurnClocks, so that a machine that drifts hits all alike."""
    if bench.simulated or bench.world.size > 1:
        return {key: served(bench, engine, requests_of(bench, engine, jobs)) for key, make in engines.items() for engine in (make(),)}
    engines, requests = {key: make() for key, make in engines.items()}, {}
    for key, engine in engines.items():
        engine.clock = TurnClock()
        requests[key] = requests_of(bench, engine, jobs)
        for r in requests[key]:
            engine.add(r)
    with tqdm(total=len(jobs) * len(engines), desc=bench.label, delay=5, leave=False) as bar:
        for turn in count():
            going = [engine for engine in engines.values() if engine.requests]
            for engine in shuffled(going, turn):
                bench.heed()
                with engine.clock:
                    events = engine.step() + engine.land()
                bar.update(sum(bool(event.finished) for event in events))
            if not going:
                return requests


def serve(bench, engine, jobs, slo=6.0):
    """Serve jobs as they come -> metrics."""
    start = engine.clock.now()
    return metrics(served(bench, engine, requests_of(bench, engine, jobs)), start, slo)


def metrics(requests, start=0.0, slo=6.0):
    """How requests that all ended fared [S-LoRA §7.1]: those finished and their new tokens per second from start to the last
    token, their mean latency and time to the first token; of all requests, given up or refused too, the share whose first token came
    within slo seconds (attainment) and the mean of 1 - (t / slo)^2, or 0 (satisfaction)."""
    done = [r for r in requests if r.state in ("length", "stop")]
    took = max((r.times[-1] for r in done), default=math.inf) - start
    soon = [r.ttft for r in done if r.ttft < slo]
    average = lambda xs: fmean(xs) if xs else math.nan
    return {"requests/s": len(done) / took, "tokens/s": sum(len(r.times) for r in done) / took,
            "latency": average([r.times[-1] - r.arrival for r in done]), "first token": average([r.ttft for r in done]),
            "attainment": len(soon) / len(requests), "satisfaction": sum(1 - (t / slo)**2 for t in soon) / len(requests),
            "aborted": len(requests) - len(done)}


def most_served(bench, engine, jobs):
    """Requests per second when all jobs are there at once: of two runs the better one, since the first pays for its kernels."""
    return max(serve(bench, engine, at_rate(jobs, math.inf))["requests/s"] for _ in range(1 if bench.simulated else 2))


def primed(model):
    """The model, once every number of tokens that a batch of decodes and drafts usually has was run on it: the first time that
    oneDNN meets a number of rows it makes kernels for it, which may take longer than the iteration."""
    if model.device.type == "cpu":
        engine = Engine(model, max_batch=64, n_page=64 * with_room(8, model.config))
        for n in tqdm(range(1, 65), "warming up", delay=5, leave=False):
            seconds_of(engine, rehearse(engine, [(7, 1, True)] * n))
    return model


class Meter:
    """What the Spans of a run tell, without keeping them all: seconds that iterations took, tokens fed, when each request was first."""

    def __init__(self, tape):
        self.tape, self.busy, self.fed, self.first = tape, 0.0, 0, {}
        self.arrivals = {} if tape is None else tape.arrivals

    def append(self, span):
        self.busy += span.end - span.start
        for id, past, n in span.entries:
            self.fed += n
            self.first.setdefault(id, span.start)
        if self.tape is not None:
            self.tape.append(span)


class Online:
    """Jobs, who sends them and room to serve them."""

    def __init__(self, bench, jobs, clients=math.inf, B=0):
        """clients: as in feed; B: how many run at once, 0: --max-batch, or four times the usual batch, if they fit."""
        self.bench, self.jobs, self.clients, self.L = bench, jobs, clients, max(job.prompt + job.output for job in jobs)
        names = sorted({str(job.adapter) for job in jobs if job.adapter is not None})
        self.adapters = {name: adapter_of("S2", i) for i, name in enumerate(names)}
        if self.L > bench.model.config.block_size:
            i, job = max(enumerate(jobs, 1), key=lambda job: job[1].prompt + job[1].output)
            raise ValueError(f"request {i} of {len(jobs)}, {job.prompt} + {job.output} tokens: the model's context ends at "
                             f"{bench.model.config.block_size}")
        self.for_adapters = 4 * max((make(bench.model.config).n_page for make in self.adapters.values()), default=0)
        fits = room_of(bench.model) // self.L if bench.simulated else 64
        self.B = max(1, min(B or bench.options.max_batch or 4 * bench.B, fits))

    @classmethod
    def of(cls, bench):
        """What --arrivals, --prompt and --output say: forty times --requests where it is simulated, twice where it is measured."""
        coming = bench.config.coming
        work = cls(bench, list(coming.jobs) or drawn(bench, bench.grid(2, 40) * bench.config.requests), coming.clients)
        if coming.rate:
            work.jobs = at_rate(work.jobs, coming.rate * (work.capacity if coming.relative else 1.0))
        return work

    @cached_property
    def capacity(self):
        """Requests per second that --scheduler serves of (up to 200 of) these jobs when none is given up."""
        engine = self.engine(self.bench.options.scheduler, slo=0.0, max_waiting=0)
        if engine.record is not None:
            engine.record.name += ", all at once"
        return most_served(self.bench, engine, self.jobs[:200])

    def engine(self, scheduler, **options):
        engine = self.bench.engine(scheduler, self.B * self.L + self.for_adapters, self.B, **options)
        for name, source in self.adapters.items():
            engine.add_adapter(name, source)
        return engine

    def run(self, scheduler, *, in_part=False, **options):
        """Serve all jobs -> Outcome; in_part: Ctrl-C only ends it with what has ended by then."""
        bench, engine = self.bench, self.engine(scheduler, **options)
        engine.record = Meter(engine.record)
        start, requests = engine.clock.now(), requests_of(bench, engine, self.jobs)
        try:
            served(bench, engine, requests, self.clients)
        except KeyboardInterrupt:
            if not in_part:
                raise
        ended = [r for r in requests if r.done]
        times = waits(ended, engine.record.first)
        return Outcome(ended, times, fared(bench, ended, engine.record, times, start) if times[CURVES[0]] else {})


class Outcome(NamedTuple):
    """How a run of Online went."""
    requests: list  # those that ended
    waits: dict  # what their users waited for
    rates: dict  # what `fared` says; nothing, if there was no token


def drawn(bench, n, seed=0):
    """n Jobs as --prompt and --output say, one per second in the mean; they end where the model's context does."""
    config, top, most = bench.config, max(bench.lengths), bench.model.config.block_size
    prompt = config.prompt_lengths or uniform(min(8, top // 2), top // 2 + 1)
    output = config.output_lengths or uniform(min(4, top // 16), top // 16 + 1)
    jobs = gamma_jobs(1.0, n, config.coming.cv, prompt=prompt, output=output, seed=bench.options.seed + seed)
    cut = [job._replace(prompt=min(job.prompt, most - 1), output=max(1, min(job.output, most - job.prompt))) for job in jobs]
    if cut != jobs:
        bench.notes.append(f"{sum(a != b for a, b in zip(cut, jobs))} of {n} requests were cut where the model's context ends, at {most} tokens")
    return cut


def at_rate(jobs, rate):
    """Jobs of one per second, so many times as fast; math.inf: all at once."""
    return [job._replace(arrival=job.arrival / rate) for job in jobs]


PERCENTILES = dict(p50=50, p90=90, p99=99, longest=100)
CURVES = "time to first token", "time per token", "between two tokens"
THROUGHPUT = "throughput (tokens/s, prompts too)"


def waits(requests, first):
    """What users wait for, in seconds -> {name: [one per request or per token]}; first: request id -> when it was first scheduled."""
    shown = [r for r in requests if r.times]
    each = ([r.ttft for r in shown], [r.tpot for r in shown if len(r.times) > 1], [gap for r in shown for gap in np.diff(r.times).tolist()])
    return dict(zip(CURVES, each)) | {"queueing": [first[r.id] - r.arrival for r in shown]}


def fared(bench, requests, meter, times, start):
    """How requests that ended, with these `waits`, fared -> {what (unit): value}. Good is one within --targets that has all its tokens."""
    config, seen = bench.config, metrics(requests, start)
    good = sum(r.state in ("length", "stop") and r.ttft <= config.ttft and r.tpot <= config.tpot for r in requests)
    took = max(r.times[-1] for r in requests if r.times) - start
    rates = {"throughput (requests/s)": seen["requests/s"], "throughput (new tokens/s)": seen["tokens/s"],
             THROUGHPUT: sum(len(r.prompt) + len(r.times) for r in requests if r.times) / took,
             f"goodput (requests/s within {config.ttft:g} s, {config.tpot:g} s per token)": good / took,
             "SLO attainment (share)": good / len(requests), "refused or given up (requests)": seen["aborted"],
             "utilization (share of time)": meter.busy / took}
    if hasattr(bench.model, "flops"):
        rates["utilization (share of peak FLOP/s)"] = 2 * bench.model.config.n_layer * bench.model.n_weights * meter.fed / bench.model.flops / took
    for name, values in times.items():
        rates |= {f"{name}, {what} (s)": float(np.percentile(values, q)) if values else None for what, q in PERCENTILES.items()}
    return rates


def distribution(values):
    """[(value, share of them up to it)], for a curve."""
    shares = np.linspace(0, 1, 51)
    return list(zip(np.quantile(values, shares).tolist(), shares.tolist())) if values else []


@experiment(("seconds to the first token", "share of requests"), ("seconds per token behind it", "share of requests"),
            ("seconds between two tokens", "share of gaps"))
def online(bench):
    """online serving, schedulers side by side: first token, time per token, stalls, goodput.
    See --arrivals, --prompt, --output; `ours` is --scheduler. On Ctrl-C the table holds what ended until then."""
    ours, seen, work = bench.options.scheduler, {}, Online.of(bench)
    for name in dict.fromkeys([ours, *bench.config.schedulers.split(",")]):
        outcome = work.run(name, in_part=True)
        seen |= {name: outcome} if outcome.rates else {}
        if bench.interrupt.seen:
            break
    most = f"; {work.capacity:.3g} requests/s are served when all come at once" if "capacity" in vars(work) else ""
    bench.notes.append(f"{len(work.jobs)} requests, {work.B} at once; ours: {ours}{most}")
    for what, value in seen[ours].rates.items() if ours in seen else ():
        name = what.removesuffix(", p50 (s)")
        also = [(name, s, None, distribution(seen[s].waits[name]), "") for s in sorted(seen, key=ours.__eq__) if name in CURVES]
        yield row(what, None, value, **{s: outcome.rates[what] for s, outcome in seen.items() if s != ours}, also=also)
    bench.heed()


# ---------------------------------------------------------------- [TNG]

@experiment(timeline="request")
def timeline(bench):
    """[TNG] the three timelines: the same requests with static batching, prefill first and chunked prefills.
    Three requests at once, three later: what each scheduler does to those that are decoding by then."""
    L = max(bench.lengths)
    (unit,) = bench.seconds(bench.iteration(0, 0, L))  # arrivals are in units of a prefill of L tokens
    jobs = [Job(arrival * unit, P, D) for P, D, arrival in (
        (L // 8, 24, 0), (L // 4, 12, 0), (L // 8, 36, 0), (L * 3 // 4, 16, 0.6), (L // 2, 10, 1.5), (L // 4, 12, 2.2))]
    for s in dict.fromkeys(("static", "prefill_first", "sarathi", bench.options.scheduler)):
        engine = bench.engine(s, 4 * (L + 16), 4)
        engine.clock = VirtualClock() if bench.simulated else make_clock(bench.world)  # each begins at zero
        requests = served(bench, engine, requests_of(bench, engine, jobs))
        yield row(f"{s}: TTFT, mean (s)", None, fmean(r.ttft for r in requests))
        yield row(f"{s}: TPOT, mean (ms)", None, fmean(r.tpot for r in requests) * 1e3)
        yield row(f"{s}: longest wait between two tokens (s)", None, max(b - a for r in requests for a, b in zip(r.times, r.times[1:])))
        yield row(f"{s}: until the last token (s)", None, max(r.times[-1] for r in requests))


def policies(*chunks):
    """{name: scheduler} as compared in [TNG], chunked prefills with several sizes."""
    return {"static": "static", "prefill_first": "prefill_first"} | {f"C = {C}": Sarathi(chunk=C) for C in chunks}


@experiment(("concurrent requests", "tokens/s, prompts too"), ("concurrent requests", "seconds to the first token, p50"),
            ("concurrent requests", "seconds per token, p50"))
def tng_concurrency(bench):
    """[TNG] time to first token, time per token and throughput over the number of concurrent requests.
    n clients, each sends its next request when its last ended; lengths are those of --prompt and --output."""
    jobs = drawn(bench, bench.grid(2, 6) * 64)
    Online(bench, jobs[:8], B=8).capacity  # serves them, to warm up
    for n in bench.grid([1, 4, 12], [1, 2, 4, 8, 16, 32, 64]):
        work = Online(bench, jobs[:bench.grid(2, 6) * max(n, 3)], clients=n, B=n)
        for name, scheduler in policies(*bench.grid([64, 256], [128, 256, 512])).items():
            rates = work.run(scheduler).rates
            tokens, first, each = (rates[what] for what in (THROUGHPUT, "time to first token, p50 (s)", "time per token, p50 (s)"))
            yield row(f"{n} at once: {name} (tokens/s, prompts too)", None, tokens, **{"TTFT, p50 (s)": first, "TPOT, p50 (s)": each},
                      at=("throughput", name, n), also=[("first token", name, n, first, ""), ("each token", name, n, each, "")])


@experiment(("seconds to the first token, p50", "seconds per token, p50"), ("seconds to the first token, p50", "seconds between two tokens, p99"))
def tng_chunk(bench):
    """[TNG] the chunk size as the knob between time to first token and time per token.
    See --arrivals, --prompt, --output. Sarathi's, and beside it the two policies without chunks."""
    work = Online.of(bench)
    for name, scheduler in policies(*bench.grid([32, 64, 128, 256], [64, 128, 256, 512, 1024, 2048])).items():
        rates = work.run(scheduler).rates
        series, beside = (name, "") if name == scheduler else ("sarathi", name.removeprefix("C = "))  # beside: what stands at its point
        first, each, gap = (rates[f"{what} (s)"] for what in ("time to first token, p50", "time per token, p50", "between two tokens, p99"))
        yield row(f"{name}: TTFT, p50 (s)", None, first, **{"TPOT, p50 (s)": each, "stall, p99 (s)": gap},
                  also=[("time per token", series, first, each, beside), ("stalls", series, first, gap, beside)])


TNG = 1.5  # "+50 %" of vLLM on H100


@experiment(("P:D ratio", "throughput over prefill first (times)"), beside="h100")
def tng_throughput(bench):
    """[TNG] total token throughput with chunked prefills over prefill-first, requests of equal size.
    As vLLM runs them: closed-loop clients, a budget of tokens per iteration; simulated: on its host. The text says neither which model
    nor which lengths nor how many at once, so all of a grid are tried; its number stands beside the largest gain."""
    if bench.simulated:
        bench = bench.other(CostModel.roofline(bench.model.config, bench.config.hardware, bench.config.tp, system="vllm"))
    seen = []
    for n, pd in product(bench.grid([12], [8, 32, 128]), bench.grid([8], [4, 16, 64])):
        work = Online(bench, [Job(0.0, *halves(bench.lengths[0], pd))] * (bench.grid(2, 6) * n), clients=n, B=n)
        base = work.run("prefill_first").rates[THROUGHPUT]
        for C in bench.grid([64, 256], [512, 2048]):
            rate = work.run(SarathiServe(chunk=C)).rates[THROUGHPUT]
            seen.append(rate / base)
            yield row(f"{n} at once, P:D = {pd}, C = {C}: gain", None, seen[-1], **{"tokens/s": rate}, at=(f"{n} at once", f"C = {C}", pd))
    yield row("chunked over prefill first: largest gain", TNG, max(seen), **{"tokens/s": None})


# ---------------------------------------------------------------- fairness

@experiment(("client", "seconds to the first token, mean"))
def fairness(bench):
    """[VTC] two clients, one sends twice what can be served: first tokens of both, first come first served and fair.
    The other sends a tenth of what can be served; arrivals are Poisson, lengths those of --prompt and --output."""
    n = bench.grid(4, 40) * bench.config.requests
    rate = Online(bench, drawn(bench, n)).capacity
    jobs = [job._replace(client="flood") for job in at_rate(drawn(bench, n), 2 * rate)]
    jobs += [job._replace(client="light") for job in at_rate(drawn(bench, max(2, n // 20), seed=1), 0.1 * rate)]
    work = Online(bench, sorted(jobs))
    for order, fair in (("fcfs", 0.0), ("fair", bench.options.fair or 2.0)):
        ended = work.run(bench.options.scheduler, fair=fair).requests
        for client in ("light", "flood"):
            first = [r.ttft for r in ended if r.client == client and r.times]
            p50, p99 = np.percentile(first, (50, 99)).tolist()
            yield row(f"{order}, {client}: TTFT, mean (s)", None, fmean(first), **{"p50 (s)": p50, "p99 (s)": p99, "requests": len(first)},
                      at=("", order, client))


# ---------------------------------------------------------------- S-LoRA's tables and figures

class Lightllm(Scheduler, named=False):
    """What S-LoRA is built on: whole prompts at once and alone, but the queue is asked only every ten iterations, and for no
    more than will fit at its peak, since lengths are known."""

    since = 0

    def start(self, engine):
        unified, known = engine.adapters.pool is engine.pool, engine.adapters.known
        self.n_page = engine.pool.n_page
        self.pages = lambda adapter: known[adapter].n_page if unified and adapter is not None else 0  # that an adapter takes of it

    def plan(self, running, waiting):
        new = self.fitting(running, waiting) if not running or self.since >= 10 else []
        self.since = 0 if new else self.since + 1
        return [(r, r.n_todo) for r in new or running]

    def fitting(self, running, waiting):
        """The waiting requests, in their order, up to the first with which the batch would outgrow the pool some day."""
        batch, new, total = [(r.max_len - r.n_tokens, r.n_tokens) for r in running], [], 0
        adapters = {r.adapter for r in running}
        for r in islice(waiting, max(0, self.max_batch - len(running))):
            batch, total = [*batch, (r.max_new_tokens, len(r.prompt))], total + len(r.prompt)
            left, now = np.array(sorted(batch, reverse=True)).T  # when the i-th to end ends, the i before it are still there
            peak = (left * np.arange(1, len(left) + 1) + np.cumsum(now)).max() + sum(map(self.pages, adapters | {r.adapter}))
            if peak > self.n_page or new and total > self.n_page / 6:  # of new prompts, no more than a sixth at once
                break
            new.append(r)
            adapters.add(r.adapter)
        return new


def lightllm(cost, n_page, split=0, **options):
    """The authors' server, simulated; split: so many of its pages are for adapters alone."""
    return Simulator(cost, scheduler=Lightllm(), max_batch=1000, n_page=n_page, adapter_pages=split, alloc="grow", **options)


class PeftServer(Scheduler, named=False):
    """S-LoRA's server on top of PEFT: takes all who have come, adapter by adapter, in static batches, then all who came meanwhile."""
    batches = ()

    def plan(self, running, waiting):
        if not running and waiting and not self.batches:
            groups = defaultdict(list)
            for r in waiting:
                groups[r.adapter].append(r)
            self.batches = [g[i:i + self.max_batch] for g in groups.values() for i in range(0, len(g), self.max_batch)]
        return [(r, r.n_todo) for r in running or (self.batches.pop(0) if waiting else ())]


SETTINGS = {"S1": ("llama-7b", (8,)), "S2": ("llama-7b", (64, 32, 16, 8)), "S4": ("llama-13b", (64, 32, 16)), "S5": ("llama-33b", (32,)),
            "S6": ("llama-70b", (64,))}  # [S-LoRA Table 1]: model, ranks dealt in turns
DEFAULT = {"a100": ("S4", 400, 6), "a10g": ("S2", 200, 2), "a100-40": ("S2", 200, 2)}  # [S-LoRA Table 2]: setting, adapters, requests/s
# tokens that the authors' servers had room for, adapters included: what their fragments and copies left, where there is no unified pool
POOLS = {("llama-7b", "a100"): 125000, ("llama-13b", "a100"): 65000, ("llama-7b", "a10g"): 14500, ("llama-7b", "a100-40"): 14500}
SPLIT = {("a100", "no-unify"): {100: 40000, 200: 40000, 400: 35000}, ("a100", "bmm"): {100: 35000, 200: 35000, 400: 35000},
         ("a10g", "no-unify"): {20: 10000, 50: 9000, 100: 9000, 200: 9000}, ("a10g", "bmm"): {20: 8000, 50: 8000, 100: 8000, 200: 8000}}
SECONDS = {("a100", "bmm"): 30}  # of arrivals; elsewhere 300
PEFT_BATCH = {"llama-7b": 50, "llama-13b": 35}  # as in the authors' code


def adapter_of(setting, i):
    """The i-th adapter of a setting."""
    ranks = SETTINGS[setting][1]
    return random_adapter(ranks[i % len(ranks)], seed=i)


class Scene:
    """A setting of [S-LoRA Table 1]. Simulated: the authors' systems on --hardware. Measured: this engine and model with the
    setting's ranks; lengths, seconds and the number of requests shrink, so that the paper's rates load it as they did the A10G."""

    def __init__(self, bench, setting=""):
        """setting '': what [S-LoRA Table 2] has for --hardware, with its adapters n and requests/s rate; measured: for the A10G."""
        usual, self.n, self.rate = DEFAULT.get(bench.config.hardware, DEFAULT["a10g"])
        setting = setting or usual
        self.bench, self.setting, (self.model, self.ranks), self.hardware = bench, setting, SETTINGS[setting], bench.config.hardware
        self.unit, self.lengths = 1.0, uniform(8, 512)  # seconds here for one of the paper's
        if not bench.simulated:
            self.lengths = uniform(4, max(5, max(bench.lengths) // 12))
            served = lambda: self.run(20, 1000, duration=2 * bench.config.requests / 1000)["requests/s"]
            self.unit = bench.shared(self.ranks, lambda: 1.58 / served())  # [S-LoRA Fig. 5] what the A10G served
            bench.notes.append(f"{setting}: one second of the paper's workload (its rates and SLO) is {self.unit:.3g} s here; results are in real seconds")

    def run(self, n, rate, variant="S-LoRA", duration=300, cv=1.0, alpha=1.0, **options):
        """Serve so many of the paper's seconds of its workload with n adapters -> metrics. options: the engine's, slo in its seconds."""
        bench, unit = self.bench, self.unit
        duration = bench.grid(min(duration, 2 * bench.config.requests / rate), duration)
        jobs = gamma_jobs(rate / unit, duration * unit, cv, n, alpha, self.lengths, self.lengths)
        if variant in ("bmm", "merge"):
            options["lora"] = variant
        if "slo" in options:
            options["slo"] *= unit
        engine = self.simulator(n, variant, options) if bench.simulated else self.engine(variant, options)
        for i in {job.adapter for job in jobs} - {None}:  # of the others only the name would be known
            engine.add_adapter(str(i), adapter_of(self.setting, i))
        return serve(bench, engine, jobs, slo=6.0 * unit)

    def simulator(self, n, variant, options):
        """The paper's own system, or its server on top of PEFT."""
        server, gpu = variant == "PEFT", self.hardware
        cost = CostModel.roofline(preset(self.model), gpu, self.bench.config.tp, system="transformers" if server else "lightllm")
        n_page = POOLS.get((self.model, gpu)) or room_of(cost)
        options["record"] = self.bench.tape(variant)
        if server:
            return Simulator(cost, scheduler=PeftServer(), max_batch=PEFT_BATCH.get(self.model, 16), n_page=n_page, alloc="grow", **options)
        n_page = SPLIT.get((gpu, variant), {}).get(n, n_page)
        return lightllm(cost, n_page, n_page // 4 if variant in ("no-unify", "bmm") else 0, **options)

    def engine(self, variant, options):
        """This engine, with room for the longest requests of a batch and for four of the largest adapters."""
        bench = self.bench
        for_adapters = 4 * random_adapter(max(self.ranks))(bench.model.config).n_page
        if variant == "PEFT":
            options["lora"] = "merge"
        scheduler = "static" if variant == "PEFT" else bench.options.scheduler
        split = for_adapters if variant in ("no-unify", "bmm") else 0
        return bench.engine(scheduler, bench.B * max(bench.lengths) + for_adapters, bench.B, adapter_pages=split, alloc="grow", **options)


TABLE3 = {  # [S-LoRA Table 3] A100-80, 10 requests/s (PEFT on S4: 6) for 2 minutes: setting -> adapters -> requests/s of S-LoRA, of PEFT
    "S1": {5: (8.05, 0.88), 100: (7.99, 0.25), 1000: (7.64,), 2000: (7.61,)},
    "S2": {5: (7.48, 0.74), 100: (7.29, 0.24), 1000: (6.69,), 2000: (6.71,)},
    "S4": {2: (4.49, 0.54), 100: (4.28, 0.13), 1000: (3.96,)}}
FIG5 = {  # [S-LoRA Fig. 5] numbers of the authors' logs: hardware -> adapters -> requests/s of S-LoRA, no-unify and bmm
    "a100": {1: (4.43, None, None), 100: (4.30, 3.35, 0.174), 200: (4.17, 2.97, 0.179), 400: (4.06, 2.64, 0.173)},
    "a10g": {1: (1.744, None, None), 20: (1.680, 1.452, 0.257), 50: (1.606, 1.198, 0.259), 100: (1.593, 1.199, 0.255), 200: (1.576, 1.194, 0.253)}}
FIG6 = {  # [S-LoRA Fig. 6] A100-80: requests/s that come -> that are served, mean latency, first token (s), attainment
    1: (0.942, 15.32, 0.364, 1.0), 2: (1.838, 17.18, 0.499, 1.0), 4: (3.539, 23.03, 0.740, 1.0), 6: (4.012, 86.26, 60.02, 0.102),
    8: (4.017, 163.2, 136.5, 0.059)}
FIG9 = {(1, 1.0): (1.587, 1.412), (2, 1.0): (1.150, 1.442), (5, 1.0): (0.733, 1.421), (5, 0.1): (0.949, 1.409)}  # [S-LoRA Fig. 9] A10G, one
# minute: adapters, alpha -> requests/s merged, on the fly
FIG10 = {1: (0.72, 0.70, 0.10), 2: (0.72, 0.70, 0.10), 4: (0.69, 0.59, 0.10), 6: (0.66, 0.57, 0.28), 8: (0.56, 0.45, 0.14)}  # [S-LoRA Fig. 10]
# A100-80, S4: cv -> attainment with early abort, last come first, first come first served
CLUSTERS = {1: (1.733, 0.846), 2: (1.693, 0.838), 4: (1.677, 0.792), 8: (1.710, 0.850), 32: (1.635, 0.679)}  # [S-LoRA App. A] A100-40, 32
# adapters, 2 minutes: d -> requests/s, attainment
EXTENT = ("latency", "first token", "attainment")  # what rows of throughput tell besides


def throughput(what, paper, seen, at):
    """A row for what Scene.run saw."""
    return row(f"{what} (requests/s)", paper, seen["requests/s"], **{name: seen[name] for name in EXTENT}, at=at)


@experiment(beside="a100")
def slora_table3(bench):
    """[S-LoRA Table 3] requests per second with few and with thousands of adapters, S-LoRA and a server on top of PEFT."""
    for setting, cells in bench.grid({"S2": {5: (1, 1), 100: (1, 1)}}, TABLE3).items():
        scene = Scene(bench, setting)
        for n, papers in cells.items():
            for variant, paper in zip(("S-LoRA", "PEFT"), papers):
                seen = scene.run(n, 6 if (setting, variant) == ("S4", "PEFT") else 10, variant, duration=120)
                yield throughput(f"{setting}, n = {n}: {variant}", paper, seen, (setting, variant, n))


@experiment(("adapters", "requests/s"))
def slora_fig5(bench):
    """[S-LoRA Fig. 5] throughput over the number of adapters: S-LoRA, without a unified pool, with a batched GEMM.
    The paper's numbers beside --hardware a100 and a10g; up to 2,000 adapters for S-LoRA alone."""
    scene = Scene(bench)
    for n in bench.grid([1, 20, scene.n], sorted({*FIG5.get(bench.config.hardware, FIG5["a10g"]), 1000, 2000})):
        yield from ablation(scene, n, 3 if 1 < n <= scene.n else 1)


@experiment()
def slora_ablation(bench):
    """[S-LoRA §7.2] what the unified pool and the kernels are worth: S-LoRA, no-unify and bmm on the same workload.
    The paper's numbers, those of its Fig. 5, beside --hardware a100 and a10g."""
    scene = Scene(bench)
    yield from ablation(scene, scene.n)


def ablation(scene, n, most=3):
    """Rows for n adapters and the first of the three systems."""
    gpu = scene.hardware
    for variant, paper in list(zip(("S-LoRA", "no-unify", "bmm"), FIG5.get(gpu, {}).get(n, (None,) * 3)))[:most]:
        seen = scene.run(n, scene.rate, variant, duration=SECONDS.get((gpu, variant), 300))
        yield throughput(f"{scene.setting}, n = {n}: {variant}", paper, seen, (scene.setting, variant, n))


@experiment(("requests/s that come", "requests/s"), ("requests/s that come", "seconds"), ("requests/s that come", "seconds"),
            ("requests/s that come", "share within the SLO"), beside="a100")
def slora_fig6(bench):
    """[S-LoRA Fig. 6] throughput, first token and SLO attainment over the rate of requests."""
    scene = Scene(bench)
    for rate in bench.grid([scene.rate / 2, scene.rate], FIG6 if scene.hardware == "a100" else [scene.rate * x / 4 for x in (1, 2, 3, 4, 5)]):
        seen = scene.run(scene.n, rate)
        for name, unit, paper in zip(("requests/s", *EXTENT), ("requests/s", "s", "s", "share"), FIG6.get(rate, (None,) * 4)):
            yield row(f"{scene.setting}, R = {rate:g}: {name if name != 'requests/s' else 'throughput'} ({unit})", paper, seen[name],
                      at=(name, "S-LoRA", rate))


@experiment(("adapters", "requests/s"), beside="a10g")
def slora_fig9(bench):
    """[S-LoRA Fig. 9] merging the adapter into the weights beside computing it on the fly, over the number of adapters."""
    scene = Scene(bench, "S2")
    for (n, alpha), papers in bench.grid({k: FIG9[k] for k in ((1, 1.0), (5, 1.0))}, FIG9).items():
        for variant, paper in zip(("merge", "S-LoRA"), papers):
            seen = scene.run(n, 2, variant, duration=60, alpha=alpha)
            yield throughput(f"n = {n}, alpha = {alpha:g}: {variant}", paper, seen, (f"alpha = {alpha:g}", variant, n))


@experiment(("coefficient of variation of the gaps", "share within the SLO"), beside="a100")
def slora_fig10(bench):
    """[S-LoRA Fig. 10] SLO attainment over burstiness: early abort, last come first served, first come first served."""
    scene = Scene(bench)
    for cv, papers in bench.grid({k: FIG10[k] for k in (1, 4)}, FIG10).items():
        for name, options, paper in zip(("early abort", "last come first", "first come first"), (dict(slo=6.0), dict(order="lcfs"), {}), papers):
            seen = scene.run(scene.n, scene.rate, cv=cv, **options)
            yield row(f"{scene.setting}, cv = {cv}: attainment, {name}", paper, seen["attainment"], satisfaction=seen["satisfaction"],
                      aborted=seen["aborted"], at=("attainment", name, cv))


@experiment(beside="a100-40")
def slora_clustering(bench):
    """[S-LoRA App. A] adapter clustering: throughput and attainment when a batch keeps to d adapters while it can."""
    scene = Scene(bench, "S2")
    for d, papers in bench.grid({k: CLUSTERS[k] for k in (1, 32)}, CLUSTERS).items():
        seen = scene.run(32, 2, duration=120, cluster=d)
        for name, unit, paper in zip(("requests/s", "attainment"), ("throughput (requests/s)", "attainment"), papers):
            yield row(f"d = {d}: {unit}", paper, seen[name], at=(name, "S-LoRA", d))


PARALLEL = (("S5", "a100-40", 100), ("S6", "a100", 10))  # [S-LoRA §7.4]: setting, GPU, adapters
PARTS = ("S-LoRA", "without its messages", "base model alone")


@experiment(("GPUs", "requests/s"))
def fig8_slora(bench):
    """[S-LoRA Fig. 8] tensor parallelism: throughput with adapters, with adapters that send nothing, and of the base model alone.
    Simulated: 2 and 4 GPUs; without the host's time, which would hide the messages'. Measured: on the processes that torchrun
    started (or one), and what each of them holds and sends."""
    yield from (simulated_fig8 if bench.simulated else measured_fig8)(bench)


def simulated_fig8(bench):
    """Overloaded, so that what is served is what the GPUs can. The paper gives no numbers, but says that twice the GPUs serve more than
    twice the requests: there is room for larger batches."""
    for setting, gpu, n in PARALLEL:
        model, seen = SETTINGS[setting][0], {}
        for tp, part in product((2, 4), PARTS):
            cost, jobs = CostModel.roofline(preset(model), gpu, tp), gamma_jobs(12, 60, n_adapter=n, seed=bench.options.seed)
            cost.exchanges = part == PARTS[0]
            engine = lightllm(cost, room_of(cost))
            for i in range(n):
                engine.add_adapter(str(i), adapter_of(setting, i))
            seen[tp, part] = serve(bench, engine, jobs if part != PARTS[2] else [job._replace(adapter=None) for job in jobs])
            yield throughput(f"{setting}, {tp} x {gpu}: {part}", None, seen[tp, part], (setting, part, tp))
        gain = [seen[4, part]["requests/s"] / seen[2, part]["requests/s"] for part in PARTS]
        bench.notes.append(f"{setting}: 4 GPUs over 2: {gain[0]:.1f} times the requests, the base model alone {gain[2]:.1f}; the paper: more than 2")


def measured_fig8(bench, n=20):
    """All requests are there at once; ranks as in S2."""
    model, world, top, adapters = bench.model, bench.model.world, max(bench.lengths) // 4, [adapter_of("S2", i) for i in range(n)]
    for_adapters = n * max(make(model.config).n_page for make in adapters[:4])
    fns, tokens = at_once(bench, 2, top, for_adapters, adapters, [({}, n), ({}, n), ({}, 0)])
    before = world.sent.copy()
    fns[0]()
    sent = world.sent - before
    fns[1] = silenced(model, fns[1])
    for part, took in zip(PARTS, bench.rounds(*fns, repeats=bench.runs, patience=PATIENCE)):
        yield row(f"tp = {world.tp}: {part} (tokens/s)", None, tokens / median(took), at=("", part, world.tp))
    yield row("weights of a rank (MB)", None, model.n_bytes / 1e6)
    yield row("cache of a rank, per 1000 tokens (MB)", None, model.config.page_bytes(model.dtype.itemsize) / 1e3)
    for what, size in sorted(sent.items()):
        yield row(f"sent by a rank for {what}, per token (bytes)", None, size / tokens, source="counted")
    if world.tp > 1:
        yield from messages(bench)


def at_once(bench, share, top, for_adapters, adapters, ways):
    """share * --requests jobs of up to top + top tokens, there at once, in ways [(the engine's options, how many of the adapters)] -> [a
    function that serves them], their tokens."""
    lengths, fns = uniform(8, top), []
    jobs = gamma_jobs(1, share * bench.config.requests, n_adapter=len(adapters), prompt=lengths, output=lengths, seed=bench.options.seed)
    for options, n in ways:
        engine = bench.engine(bench.options.scheduler, bench.B * 2 * top + for_adapters, bench.B, alloc="grow", **options)
        for i, source in enumerate(adapters[:n]):
            engine.add_adapter(str(i), source)
        fns.append(partial(serve, bench, engine, [job._replace(arrival=0.0, adapter=job.adapter % n if n else None) for job in jobs]))
    return fns, sum(job.prompt + job.output for job in jobs)


def silenced(model, fn):
    """fn without the adapters' messages between devices: its time is what is wanted, its tokens are wrong."""
    def quiet(self, xa):
        return xa[None] if self.reduced else xa.expand(model.world.tp, -1)

    def run():
        speaking, Linear.exchange = Linear.exchange, quiet
        try:
            return fn()
        finally:
            Linear.exchange = speaking
    return run


def messages(bench):
    """What an all-reduce takes, and whether a simulator that adds it to the profile of a share gets the whole: on iterations that
    no fit has seen."""
    model, world, config = bench.model, bench.model.world, bench.model.config
    share = another(bench, part=(0, 1), vocab_size=config.n_vocab)
    cost = world.agree(CostModel.profile(share, repeats=bench.runs))  # on all ranks at the same time: they may share a memory
    cost.ring = message_cost(model, partial(all_reduced, world), (1, 16, 64, 256))
    yield row("an all-reduce: before it begins (us)", None, cost.ring[0] * 1e6)
    yield row("an all-reduce: per token of the batch (us)", None, cost.ring[1] * 1e6)
    batches = random_batches(min(config.block_size, 1024) - 2, 12)
    real = np.array(world.agree(time_batches(model, batches, bench.runs, lambda: None).tolist()))
    ours = np.array([cost.time_of(entries) for entries in batches])
    yield row("iterations, measured over simulated: median", None, float(np.median(real / ours)), source="both")
    yield row("iterations: median error of the simulator (%)", None, float(np.median(np.abs(ours / real - 1))) * 100, source="both")


def all_reduced(world, x):
    """x summed over ranks, and done: a GPU is, where one number of it is read."""
    world.all_reduce(x, "profile")
    x[0, 0].item()


@experiment()
def slora_ways(bench):
    """what adapters cost here: the same requests with none, and with 200 of mixed ranks computed in every way, in turns.
    All requests are there at once, lengths as in [S-LoRA Table 2] but shorter, every adapter equally popular; the paper's column
    is from its Fig. 5 (A10G) and Table 3 (S2, n = 100), over S-LoRA. --full: also 100 and 2,000 adapters, all of them in memory."""
    n, top = bench.grid(200, 2000), max(bench.lengths) // 2
    adapters = [adapter_of("S2", i)(bench.model.config, None if bench.simulated else bench.model.dtype)
                for i in tqdm(range(n), "random adapters", leave=False, disable=bench.simulated)]
    for_adapters = 4 * max(adapter.n_page for adapter in adapters)
    ways = {"no adapter": ({}, 0, None), "S-LoRA": ({}, 200, 1.0), "no-unify": (dict(adapter_pages=for_adapters), 200, 1.194 / 1.576),
            "bmm": (dict(lora="bmm"), 200, 0.253 / 1.576), "merge and swap": (dict(lora="merge"), 200, 0.24 / 7.29)}
    ways |= {f"S-LoRA, n = {m}": ({}, m, None) for m in bench.grid([], [100, 2000])}
    sources = [lambda *_, adapter=adapter, **__: adapter for adapter in adapters]  # loaded once for all engines
    fns, tokens = at_once(bench, 4, top, for_adapters, sources, [way[:2] for way in ways.values()])
    took = bench.rounds(*fns, repeats=bench.runs)  # however long it takes: a first run pays for a kernel per number of tokens
    for (name, (*_, paper)), seconds in zip(ways.items(), took):
        over = lambda others: median(b / a for a, b in zip(seconds, others))
        yield row(f"{name}: x S-LoRA", paper, over(took[1]), **{"x no adapter": over(took[0]), "tokens/s": tokens / median(seconds)},
                  at=("", "throughput", name))


# ---------------------------------------------------------------- SmartSpec's figures

CHOICES = ("off", 1, 3, 5, "goodput")  # [SmartSpec §7]
LOSES = {3: 16, 5: 12}  # [SmartSpec Fig. 1] k -> requests/s beyond which so many drafts are no gain


class Pair:
    """A target and what drafts for it. Simulated: the bench's model in the authors' system, with Llama-160M, prompt lookup or heads
    that take no time, and alpha of the drafts accepted. Measured: this engine; a random model's draft is as much smaller as theirs and
    alpha is forced, but the tiny model has the draft and the heads that were trained with it, whose drafts are verified; --alpha overrules."""

    def __init__(self, bench, draft="model", alpha=0.7, ratio=1):
        """draft: model, ngram or heads; ratio: tokens of prompt for each new one."""
        self.bench = bench
        self.D = 128 if bench.simulated else min(max(1, min(bench.lengths) // 8), 4 * bench.config.requests)
        self.P, self.alpha, self.unit = ratio * self.D, bench.options.alpha or (0.0 if bench.trained else alpha), 1.0
        self.options = dict(scheduler=bench.options.scheduler, B=4 * bench.B)
        if bench.simulated:
            price = lambda config, tp: CostModel.roofline(config, bench.config.hardware, tp, system="vllm")
            self.bench = bench.other(price(bench.model.config, bench.config.tp))
            fits = int(0.9 * room_of(bench.model)) // (self.P + self.D)  # what is left is for the draft
            self.options = dict(scheduler="prefill_first", B=min(256, fits), alloc="grow")
            self.draft = dict(model=lambda: price(preset("llama-160m"), 1), ngram=lambda: "ngram", heads=Medusa)[draft]()
        else:
            self.draft = bench.shared(draft, partial(drafter, bench, draft))
            for model in (bench.model, self.draft):
                if isinstance(model, GPT):
                    bench.shared(("primed", model), partial(primed, model))

    @property
    def prices(self):
        """Of the target's iterations and, None for a lookup, of the draft's."""
        return self.bench.price(self.bench.model), self.bench.price(self.draft) if isinstance(self.draft, (GPT, CostModel)) else None

    @cached_property
    def cost(self):
        """The prices that policies get. Measured: a server is up for longer than a run, what one teaches of them the next may know."""
        return self.prices if self.bench.simulated else tuple(price and Learned(price) for price in self.prices)

    def engine(self, spec, L=0, **more):
        """With room for requests of L tokens, 0: of prompt and output."""
        drafts = dict(draft=self.draft, spec=spec, cost=self.cost if isinstance(spec, str) else None, alpha=self.alpha) if spec != "off" else {}
        options = self.options | drafts | more
        return self.bench.engine(n_page=options["B"] * (L or self.P + self.D), **options)

    def jobs(self, rate):
        """A minute of Poisson arrivals. Measured: 16 requests/s of the paper's are what this machine serves with no drafts when all
        are there at once."""
        if self.unit == 1.0 and not self.bench.simulated:
            work = [Job(0.0, self.P, self.D)] * 4 * self.bench.B
            self.unit = self.bench.shared((self.P, self.D), lambda: 16 / most_served(self.bench, self.engine("off"), work))
            self.bench.notes.append(f"one second of the paper's workload (its rates) is {self.unit:.3g} s here; results are in real seconds")
        duration = self.unit * self.bench.grid(2 * self.bench.config.requests / rate, 60)
        return gamma_jobs(rate / self.unit, duration, prompt=uniform(self.P, self.P + 1), output=uniform(self.D, self.D + 1))

    def latencies(self, rate, choices=CHOICES):
        """A rate of the paper's -> {choice: mean seconds of a request, in every round}, {choice: times faster than with no drafts}"""
        took, jobs, first = {spec: [] for spec in choices}, self.jobs(rate), int(not self.bench.simulated)
        for i in self.bench.each("round", range(first + self.bench.runs)):  # each with other luck for the drafts, the same for all
            engines = {spec: partial(self.engine, spec, seed=self.bench.options.seed + i) for spec in choices}
            for spec, ended in abreast(self.bench, engines, jobs).items():
                if i >= first:  # measured, a round before them teaches the prices and makes the kernels
                    took[spec].append(metrics(ended)["latency"])
        return took, {spec: median(off / mean for off, mean in zip(took["off"], means)) for spec, means in took.items()}

    def row(self, *what, **more):
        """A row that says how many drafts are accepted."""
        return row(*what, **more, alpha=self.alpha)


def drafter(bench, kind):
    """Where drafts for a measured model come from: a lookup, or a model or heads, those that were trained with it or random ones."""
    model = bench.model
    if bench.trained or kind == "ngram":
        return load_draft("draft" if kind == "model" else kind, model)
    return Heads(3, model.config.n_embd).to(model.device, model.dtype) if kind == "heads" else small_draft(model)


def small_draft(model):
    """A random draft for a random target, with one layer of one head: a fortieth of it, as Llama-160M is of Vicuna-7B."""
    c = model.config
    shape = replace(c, n_layer=1, n_head=1, n_kv_head=1, n_embd=c.head_dim, n_inner=4 * c.head_dim)
    return GPT.from_preset(shape, dtype=model.dtype, device=str(model.device), seed=1)


def called(spec):
    """How a choice of --spec is named in tables."""
    return spec if isinstance(spec, str) else f"k = {spec}"


def crossing(curve):
    """Where [(x, y)] last falls below 1, between two points in proportion; its end if it does not, its begin if it is always below."""
    falls = [a + (b - a) * (y - 1) / (y - z) for (a, y), (b, z) in zip(curve, curve[1:]) if y >= 1 > z]
    return falls[-1] if falls else curve[-1][0] if curve[-1][1] >= 1 else curve[0][0]


@experiment(("requests/s that come", "latency off over latency (times)"), beside="a100")
def spec_fig1(bench):
    """[SmartSpec Fig. 1] latency with k = 1, 3, 5 drafts and with goodput's choice, over the rate of requests; acceptance 0.7.
    In = out = 128 tokens where it is simulated. The paper's numbers beside --hardware a100 --model llama-7b."""
    pair, curve = Pair(bench), {}
    for rate in bench.grid([4, 20], [1, 4, 8, 10, 12, 14, 16, 18, 20]):
        took, curve[rate] = pair.latencies(rate)
        for spec in CHOICES[1:]:
            yield pair.row(f"rate {rate}: {called(spec)} (times faster than off)", 1.0 if LOSES.get(spec) == rate else None, curve[rate][spec],
                           latency=median(took[spec]), derived=True, at=("", called(spec), rate))
    for k, rate in LOSES.items():
        yield pair.row(f"k = {k}: no gain beyond rate", rate, crossing([(rate, times[k]) for rate, times in curve.items()]), latency=None)
    yield pair.row("rate 4: best k", 3, max((1, 3, 5), key=curve[4].get), latency=None, bound="at least")


@experiment(("batch size, B", "drafts per request"), beside="a100")
def spec_fig5(bench):
    """[SmartSpec Fig. 5] the number of drafts with the most goodput, over the batch size, at one acceptance for all.
    By Eq. 3 to 9 with the engine's prices, at 192 tokens of context where it is simulated."""
    pair, k, best, source = Pair(bench), np.arange(9), {}, None if bench.simulated else "computed"
    target, draft = pair.prices
    for B in bench.grid([1, 8, 64, 512], [2**i for i in range(10)]):
        work = lambda n: Work(N=B * n, M=B * n, decodes=B, context=B * (pair.P + pair.D // 2))
        seconds = [target.seconds(work(1 + n)) + n * draft.seconds(work(1)) for n in k.tolist()]
        goodput = B * expected_tokens(pair.alpha or 0.7, k) / seconds
        best[B] = int(goodput.argmax())
        yield row(f"B = {B}: best k", None, best[B], source, **{"times k = 0": goodput.max() / goodput[0]}, at=("", "best k", B))
    yield row("tokens to feed per request, B = 1: 1 + best k", 5, 1 + best[1], source, bound="at least", **{"times k = 0": None})
    yield row("tokens to feed per request, B = 512: 1 + best k", 1, 1 + best[512], source, **{"times k = 0": None})


def serving(pair, rates):
    """Rows of [SmartSpec Fig. 11, 12]: latencies over rates, and what the paper claims of all its settings."""
    gains, worst = [], (math.inf, None)
    for rate in pair.bench.each("rate", rates):
        took, times = pair.latencies(rate)
        for spec, means in took.items():
            yield pair.row(f"rate {rate:g}: {called(spec)} (s)", None, median(means), **{"times off": times[spec], "±": None},
                           at=("", called(spec), rate))
        over = [best / ours for best, ours in zip(best_elsewhere([took[spec] for spec in CHOICES[:-1]]), took["goodput"])]
        gains, worst = [*gains, times["goodput"]], min(worst, (median(over), deviation(over)))
        yield pair.row(f"rate {rate:g}: goodput over the best fixed choice (times faster)", None, median(over), **{"times off": None, "±": deviation(over)})
    for what, paper, ours, bound in (
            ("lowest rate: times faster than off", 1.2, gains[0], "at least"), ("any rate: most times faster", 3.2, max(gains), "at most"),
            ("any rate: least times faster", 1.0, min(gains), "at least")):
        yield pair.row(f"goodput, {what}", paper, ours, **{"times off": ours, "±": None}, bound=bound)
    yield pair.row("goodput over the best fixed choice, at its worst rate", None, worst[0], **{"times off": None, "±": worst[1]})


@experiment(("requests/s that come", "mean latency (s)"), beside="a100")
def spec_fig11(bench):
    """[SmartSpec Fig. 11] latency over the rate of requests with a draft model: off, k = 1, 3, 5, goodput.
    Vicuna's shapes are --model llama-7b, and llama-33b with --tp 4; up to the rates at which k = 5 loses much."""
    big = bench.simulated and bench.model.config.n_params > 2e10
    yield from serving(Pair(bench), bench.grid([4, 12, 20], [1, 2, 4, 6, 8, 10, 12] if big else [1, 4, 8, 12, 16, 20, 24]))


@experiment(("requests/s that come", "mean latency (s)"), beside="a100")
def spec_fig12(bench):
    """[SmartSpec Fig. 12] latency over the rate of requests with prompt lookup: off, k = 1, 3, 5, goodput; acceptance 0.35.
    Prompts four times as long as what they ask for, as in its summaries and answers. A simulated lookup always finds something."""
    yield from serving(Pair(bench, "ngram", alpha=0.35, ratio=4), bench.grid([1, 12], [1, 2, 4, 6, 8, 10, 12]))


@experiment(("decodes in the batch, B", "iteration (ms)"))
def spec_fig7(bench):
    """[SmartSpec Fig. 7] the time model of Eq. 7, T = alpha N_context + gamma N_batched + delta, fitted to the iterations of a run.
    In = out, no drafts, and rates that go through all batch sizes."""
    pair, spans = Pair(bench), []
    for rate in bench.grid([4, 20], [4, 12, 20]):
        serve(pair.bench, pair.engine("off", record=spans), pair.jobs(rate))
    spans = [s for s in spans if s.end > s.start]
    A = np.array([(sum(past + n for _, past, n in s.entries), sum(n for *_, n in s.entries), 1) for s in spans])
    T = np.array([s.end - s.start for s in spans])
    x = least_squares(A / T[:, None], np.ones(len(T)))
    decodes = np.array([max(n for *_, n in s.entries) == 1 for s in spans])
    for what, chosen in (("all iterations", decodes | True), ("decodes only", decodes)):
        yield row(f"{what}: median error of Eq. 7 (%)", None, float(np.median(np.abs(A @ x / T - 1)[chosen])) * 100, iterations=int(chosen.sum()))
    sizes = np.unique(A[decodes, 1])
    for B in sizes[::cdiv(len(sizes), 12)].tolist():
        mine = decodes & (A[:, 1] == B)
        for name, times in (("as run", T), ("Eq. 7", A @ x)):
            yield row(f"B = {B:.0f}: {name} (ms)", None, float(np.median(times[mine])) * 1e3, iterations=int(mine.sum()), at=("", name, B))


@experiment(only="measured")
def spec_fig13(bench):
    """[SmartSpec Fig. 13] the simulator beside this machine with drafts: mean latency of requests, over their rate.
    The same jobs measured and simulated, prices by CostModel.profile, which the engine goes on learning; acceptance is forced, so that
    both have the same."""
    pair = Pair(bench)
    pair.alpha = pair.alpha or 0.7
    (target, draft), twin = pair.prices, copy.copy(pair)  # before anyone asks for its cost: of that each has its own
    twin.bench, twin.draft = bench.other(target), draft
    twin.bench.clock = VirtualClock()
    for rate in bench.grid([4, 12], [2, 4, 8, 12, 16]):
        jobs = pair.jobs(rate)
        for spec in ("off", 3, "goodput"):
            real, ours = (serve(p.bench, p.engine(spec), jobs)["latency"] for p in (pair, twin))
            yield row(f"rate {rate}: {called(spec)}: latency, error (%)", 10, abs(ours / real - 1) * 100, measured=real, simulated=ours,
                      bound="at most", at=("", called(spec), rate))


@experiment(("requests/s that come", "latency off over latency (times)"))
def spec_fig14(bench):
    """[SmartSpec Fig. 14] what is left to gain: goodput beside an oracle that knows how many drafts will be accepted.
    Acceptance is forced: only then is it known beforehand."""
    pair = Pair(bench)
    pair.alpha = pair.alpha or 0.7
    for rate in bench.grid([4, 12], [4, 8, 12, 16]):
        _, times = pair.latencies(rate, (*CHOICES, "goodput_request", "oracle"))
        for spec in list(times)[1:]:
            yield pair.row(f"rate {rate}: {called(spec)} (times faster than off)", None, times[spec], at=("", called(spec), rate))


@experiment(("requests/s that come", "mean latency (s)"), beside="a100")
def spec_fig16(bench):
    """[SmartSpec Fig. 16] latency over the rate of requests with heads: off, one candidate each, two fixed trees, goodput.
    Half of the candidates are accepted, whatever their rank, where acceptance is forced."""
    pair = Pair(bench, "heads", alpha=0.5)
    for rate in bench.grid([4, 20], [1, 4, 8, 12, 16, 20]):
        took, times = pair.latencies(rate, ("off", "1,1,1", "2,2,1", "3,2,2", "goodput"))
        for spec, means in took.items():
            yield pair.row(f"rate {rate}: {spec} (s)", None, median(means), **{"times off": times[spec]}, at=("", spec, rate))
    yield pair.row("highest rate: goodput over one candidate each, times faster", 1.0, times["goodput"] / times["1,1,1"],
                   **{"times off": times["goodput"]}, bound="at least")
    yield pair.row("tokens that 3,2,2 adds to a decode", 21, Tree.of((3, 2, 2)).n, "computed", **{"times off": None}, derived=True)


@experiment(("batch size, B", "tokens/s"))
def spec_here(bench):
    """what drafts are worth here: off, k = 1, 3, 5 and goodput in turns, for one request and for batches.
    All requests are there at once. Measured: also prompt lookup in a prompt that repeats itself, verified whatever the model."""
    pair, cases = Pair(bench), []
    if not bench.simulated:
        lookup = copy.copy(pair)
        lookup.draft, lookup.alpha = "ngram", 0.0
        cases.append(("B = 1, prompt lookup in a repetitive prompt", lookup, [bench.prompts(1, 16, bench.options.seed)[0] * 4]))
    for B in bench.grid(sorted({1, bench.B, 3 * bench.B, 9 * bench.B}), [2**i for i in range(9) if 2**i <= pair.options["B"]]):
        cases.append((f"B = {B}", pair, bench.prompts(B, pair.P, bench.options.seed)))
    for name, way, prompts in cases:
        B, D = len(prompts), max(way.D, 16 * bench.config.requests // len(prompts))
        engines = [way.engine(spec, len(prompts[0]) + D, B=B, scheduler="prefill_first") for spec in CHOICES]  # soon all decode
        took = way.bench.rounds(*(partial(e.generate, prompts, max_new_tokens=D) for e in engines))  # each with other luck, the same for all
        over = lambda a, b: median(y / x for x, y in zip(took[a], took[b]))
        for i, spec in enumerate(CHOICES):
            yield row(f"{name}: {called(spec)} (tokens/s)", None, B * D / median(took[i]), **{"x off": over(i, 0)}, alpha=way.alpha,
                      **({"at": ("", called(spec), B)} if way.alpha or way.draft != "ngram" else {}))
        best = min(range(4), key=lambda i: median(took[i]))
        ratio = median(theirs / ours for theirs, ours in zip(best_elsewhere(took[:4]), took[4]))
        yield row(f"{name}: goodput over the best of the others, {called(CHOICES[best])}", None, ratio, **{"x off": over(4, 0)}, alpha=way.alpha)
    for spec in () if bench.simulated else ("goodput", "goodput_request"):
        yield row(f"B = 64: {spec}: choosing k, share of an iteration", None, choosing(pair, spec), **{"x off": None}, alpha=pair.alpha)


def best_elsewhere(took):
    """took: for each way its time in every round -> for every round the time of the way that is best in all others: the least of noisy
    times is too good to be compared with. A round that is alone has only itself."""
    n = len(took[0])
    return [min(took, key=lambda times: median(t for j, t in enumerate(times) if j != i or n == 1))[i] for i in range(n)]


def deviation(values):
    """The standard error of their median, by their quartiles; None if there is but one."""
    return 0.93 * float(np.subtract(*np.quantile(values, (0.75, 0.25)))) / math.sqrt(len(values)) if len(values) > 1 else None


def decoding(engine, prompts, new):
    """Step until all of these are running and decode."""
    for prompt in prompts:
        engine.add(Request(prompt, max_new_tokens=new))
    while len(engine.running) < len(prompts) or any(r.n_todo > 1 for r in engine.running):
        engine.step()


def choosing(pair, spec, B=64):
    """What it takes to look at B decodes and choose their drafts, over what an iteration takes all in all."""
    bench, D = pair.bench, (2 + pair.bench.config.repeats) * (1 + N_SPEC)  # that none ends while it is timed
    engine = pair.engine(spec, pair.P + D, B=B, scheduler="prefill_first", max_waiting=0, slo=0.0)  # all B are to be served
    decoding(engine, bench.prompts(B, pair.P, bench.options.seed), D)
    s, plan = engine.speculator, [(r, 1) for r in engine.running]
    chooses, steps = bench.rounds(lambda: s.policy.lengths(s._decodes_of(plan, engine.running)), engine.step)
    return fmean(chooses) / median(steps)  # to choose again what was best just now takes less: on average


# ---------------------------------------------------------------- autopilot

PILOT = [  # prompt, output (each give or take a half), load, acceptance of drafts, adapters, TPOT target over a lone decode's (0: none)
    (256, 256, 0.2, 0.8, 0, 0), (256, 256, 0.8, 0.3, 8, 2), (256, 256, 1.2, 0.8, 0, 0), (512, 100, 0.5, 0.3, 0, 0),
    (1024, 128, 0.2, 0.3, 8, 2), (1024, 128, 0.8, 0.8, 0, 2), (1024, 128, 1.2, 0.3, 0, 0), (1300, 40, 0.8, 0.8, 8, 0),
    (1300, 26, 0.5, 0.8, 8, 2), (1300, 26, 1.0, 0.3, 0, 1.5), (1300, 13, 1.2, 0.8, 0, 0), (1300, 7, 0.2, 0.3, 0, 0),
    (1300, 7, 0.8, 0.8, 8, 2), (1300, 7, 1.2, 0.3, 0, 2)]
CHUNKS, DRAFTS = (64, 128, 256, 512, 1024, 2048), ("off", 1, 3, 5, 7)


class Trial(NamedTuple):
    """How a setting did on a workload of PILOT."""
    latency: float  # seconds, mean
    tpot: float  # that nine of ten requests keep to


def pilot_of(work, alpha, draft, cost, setting, target, seed):
    """The engine of a (chunk, drafts), or of "autopilot" with its target. Acceptance is forced, so that it is what the workload says."""
    auto = setting == "autopilot"
    scheduler, spec = (setting, setting) if auto else (SarathiServe(chunk=setting[0]), setting[1])
    drafts = dict(draft=draft, spec=spec, alpha=alpha) if spec != "off" else {}
    alloc = "grow" if work.bench.simulated else work.bench.options.alloc
    return work.engine(scheduler, cost=cost, alloc=alloc, seed=seed, **drafts, tpot=target if auto else 0.0)


def trials(bench, case, draft, cost):
    """A workload -> (its target or 0, {(chunk, drafts), or "autopilot": [Trial of each round]}). Measured: a round of all settings, which
    chooses two, and with a target the steadiest, then more of these and autopilot, each with other luck for the drafts."""
    P, D, load, alpha, n_adapter, slow = case
    scale = 1.0 if bench.simulated else max(bench.lengths) / 4 / 1300
    around = lambda n: uniform(max(2, int(n * scale / 2)), max(3, int(n * scale * 1.5)) + 1)
    jobs = gamma_jobs(1.0, bench.grid(2, 6) * bench.config.requests, n_adapter=n_adapter, prompt=around(P), output=around(D), seed=bench.options.seed)
    work = Online(bench, jobs, B=bench.options.max_batch or (64 if bench.simulated else bench.B))
    work.B = max(1, int(0.8 * work.B))  # a draft has weights and cache, too
    alone = getattr(cost[0], "base", cost[0])  # a target does not depend on what was learned before
    work.jobs, target = at_rate(jobs, load * work.capacity), slow * alone.time(1, int((P + D / 2) * scale))
    grid = [*product(bench.grid((CHUNKS[0] // 2, *CHUNKS[:3]), CHUNKS), bench.grid((DRAFTS[0], DRAFTS[2]), DRAFTS))]
    seen = {setting: [] for setting in (*grid, "autopilot")}
    for i in range(1 if bench.simulated else bench.config.repeats):
        engines = {setting: partial(pilot_of, work, alpha, draft, cost, setting, target, bench.options.seed + i) for setting in (*grid, "autopilot")}
        for setting, ended in abreast(bench, engines, work.jobs).items():
            seen[setting].append(Trial(fmean(r.times[-1] - r.arrival for r in ended), float(np.quantile([r.tpot for r in ended], 0.9))))
        steadiest = min(best_first(seen, 0, [0]), key=lambda setting: seen[setting][0].tpot)
        grid = [*dict.fromkeys((*best_first(seen, target, [0])[:2], *([steadiest] if target else [])))]
    return target, seen


def best_first(seen, target, rounds):
    """The fixed settings that ran in all of these rounds and met the target there (all that ran, if none did), the fastest first."""
    typical = lambda setting, of: median(getattr(seen[setting][i], of) for i in rounds)
    fixed = [setting for setting in seen if setting != "autopilot" and len(seen[setting]) > max(rounds)]
    good = [setting for setting in fixed if not target or typical(setting, "tpot") <= target]
    return sorted(good or fixed, key=lambda setting: typical(setting, "latency"))


def at_best(seen, target):
    """The best setting's latency in every round, where the other rounds say which it is: the least of noisy times is too good to be
    compared with. For the first, which chose who stays, the median of the others stands in."""
    n = len(seen["autopilot"])
    best = lambda i, *others: seen[best_first(seen, target, others)[0]][i].latency
    later = [best(i, *({*range(1, n)} - {i} or {0})) for i in range(1, n)]
    return [median(later) if later else best(0, 0), *later]


@experiment(("prompt + output, load", "latency over the best setting's (times)"))
def autopilot(bench):
    """autopilot beside every (chunk, drafts) of a grid: mean latency over workloads that differ in P:D, load, acceptance, adapters.
    Settings of sarathi_serve that miss a workload's TPOT target do not count as its best. Poisson arrivals; load 1 is what --scheduler
    serves without drafts when all come at once. Measured: ratios are medians of those within a round, where which setting is best is
    told from other rounds; ±: their standard error."""
    if bench.simulated:
        bench = bench.other(another(bench, block_size=4096))
        draft = CostModel.roofline(replace(preset("llama-160m"), block_size=4096), bench.config.hardware)
        cost = bench.model, draft
    else:  # what a run teaches of the prices, the next may know
        draft = primed(small_draft(bench.model))
        bench.shared(("primed", bench.model), partial(primed, bench.model))
        cost = tuple(Learned(bench.price(m)) for m in (bench.model, draft))
    ratios, missed = defaultdict(list), Counter()
    for i, case in enumerate(tqdm(bench.grid([PILOT[i] for i in (1, 2, 3, 7)], PILOT), bench.doing)):
        target, seen = trials(bench, case, draft, cost)
        best, *_ = best_first(seen, target, range(len(seen["autopilot"])))
        took, faster = at_best(seen, target), {}
        typical = {setting: Trial(*map(median, zip(*rounds))) for setting, rounds in seen.items()}
        met = sum(bool(target) and typical[setting].tpot <= target for setting in best_first(seen, 0, range(len(seen["autopilot"]))))
        for setting, rounds in seen.items():
            times = [trial.latency / seconds for trial, seconds in zip(rounds, took)]
            faster[setting] = times[1:] or times
            ratios[setting].append(median(faster[setting]))
            missed[setting] += bool(met) and typical[setting].tpot > target
        P, D, load, alpha, n_adapter, slow = case
        what, x = f"{P} + {D}, load {load}, acceptance {alpha}{', adapters' * bool(n_adapter)}", f"{P} + {D}, load {load}"
        more = {"latency (s)": typical["autopilot"].latency, "best (s)": typical[best].latency, "best": setting_name(best), "±": deviation(faster["autopilot"]),
                "TPOT (ms)": typical["autopilot"].tpot * 1e3, "target (ms)": target * 1e3 or None, "met by": met if target else None}
        yield row(f"{what}: latency over the best's", None, ratios["autopilot"][-1], **more, at=("latency over the best setting's", "autopilot", x))
    overall, fixed = (lambda setting: fmean(ratios[setting])), seen.keys() - {"autopilot"}
    alone, keeps = min(fixed, key=overall), min(fixed, key=lambda setting: (missed[setting], overall(setting)))
    for what, setting in (("", "autopilot"), ("best alone, ", alone), ("best alone that keeps targets, ", keeps)):
        yield row(f"{what}{setting_name(setting)}: mean of all; targets missed: {missed[setting]}", None, overall(setting), **dict.fromkeys(more))


def setting_name(setting):
    """How a setting of the grid is called in tables."""
    return setting if isinstance(setting, str) else f"C = {setting[0]}, {called(setting[1])}"


@experiment(("tokens of the prompt that are cached", "iteration (ms)"))
def long_context(bench):
    """[SARATHI §6] a long prompt beside decodes: autopilot's chunk shrinks as attention grows, a fixed one's iterations grow.
    The stall that autopilot may cause is what the fixed chunk's first iteration takes."""
    C, B = bench.options.chunk, 4
    for L in bench.grid([8192], [8192, 32768, 131072]):
        length = 256 + L // 16  # of a decode: it is to last as long as the prompt
        pages = L + 8 + B * length
        if bench.simulated and pages > room_of(bench.model):
            bench.notes.append(f"{L} tokens: their cache does not fit {bench.model.name}; take a model with fewer kv heads, or --tp")
            continue
        own = bench.other(another(bench, block_size=L + 8 + length))
        cost = own.price(own.model)
        level = cost.time_of([(300, 1, 1)] * B + [(0, C - B, 0)])
        for name, options in ((f"C = {C}", dict(scheduler="sarathi")), ("autopilot", dict(scheduler="autopilot", stall=level, cost=cost))):
            chunks, ttft = beside_decodes(own, name, L, B, length, n_page=pages, **options)
            for share in (0, 0.25, 0.5, 0.75, 0.95):
                past, tokens, took = min(chunks, key=lambda chunk: abs(chunk[0] - share * L))
                yield row(f"{L} tokens, {share:.0%} of them cached: {name}: iteration (ms)", None, took * 1e3,
                          **{"chunk": tokens, "level (ms)": level * 1e3}, at=(f"{L} tokens", name, int(share * L)))
            yield row(f"{L} tokens: {name}: first token (s)", None, ttft, **{"chunk": None, "level (ms)": None})


def beside_decodes(bench, name, L, B, length, scheduler, n_page, **options):
    """A prompt of L tokens comes when B requests of that length, 256 tokens of it a prompt, decode -> [(its tokens cached, its tokens in
    this iteration, seconds)], seconds to its first token."""
    spans = []
    engine = bench.engine(scheduler, n_page, B + 1, alloc="grow", record=spans, **options)
    decoding(engine, bench.prompts(B, 256, bench.options.seed), length - 256)
    long = Request(bench.prompts(1, L, bench.options.seed)[0], max_new_tokens=1, arrival=engine.clock.now())
    engine.add(long)
    with tqdm(total=L, desc=f"{bench.doing}: {L} tokens, {name}", delay=5) as bar:
        while not long.times and not bench.interrupt.seen:
            engine.step()
            bar.update(long.n_past - bar.n)
    bench.heed()
    return [(past, n, s.end - s.start) for s in spans for id, past, n in s.entries if id == long.id and n], long.ttft


# ---------------------------------------------------------------- how far the simulator can be believed

@experiment(only="measured")
def fidelity(bench):
    """[SmartSpec Fig. 13] the simulator beside this machine: every iteration's time, and throughput, on work the profile did not see.
    One cost model, fitted by CostModel.profile; then the same requests run measured and simulated under each scheduler."""
    rng = random.Random(bench.options.seed)
    top = min(384, bench.model.config.block_size * 2 // 3)
    work = [(rng.randint(8, top), rng.randint(4, top // 8)) for _ in range(4 * bench.B)]
    options = vars(bench.options) | dict(n_page=bench.with_tiles(bench.B * (top + top // 8), bench.B), max_batch=bench.B)
    engines = {s: Engine(bench.model, **options | dict(scheduler=s)) for s in ("static", "orca", "prefill_first", "sarathi")}
    took, bar = {s: [] for s in engines}, tqdm(total=(1 + bench.config.repeats) * len(engines), desc="fidelity")

    def run_all():
        for s, engine in engines.items():
            took[s].append(step_times(bench, engine, work))
            bar.update()
    cost = CostModel.profile(bench.model, repeats=bench.config.repeats, between=run_all)  # in turns: the machine drifts
    bar.close()
    bench.notes.append(f"The profile's own error on single batches that it did not see: {cost.error:.1%} (median).")
    for s in engines:
        real = np.median(took[s][1:], 0)  # the first run warms up
        ours = np.array(step_times(bench, Simulator(cost, **options | dict(scheduler=s)), work))
        yield row(f"{s}: iteration time, median error (%)", 10, float(np.median(np.abs(ours / real - 1))) * 100, iterations=len(real))
        yield row(f"{s}: throughput, error (%)", 10, abs(real.sum() / ours.sum() - 1) * 100, iterations=len(real))


def simulators_error():
    """One sentence for every simulated table: what `fidelity` found when its rows were kept in assets."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "assets", "fidelity_cpu_fp32.json")
    if not os.path.exists(path):
        return "Simulated; how far off that is on this machine, `python bench.py fidelity` says."
    with open(path) as f:
        kept = json.load(f)
    errors = lambda what: sorted(r["ours"] for r in kept["rows"] if what in r["what"])
    (low, *_, high), (low2, *_, high2) = errors("iteration time"), errors("throughput")
    return (f"Simulated: a GPU is its data sheet and a few constants fitted to the papers' tables. Where costs were profiled instead, beside a "
            f"measured run ({kept['model']}, {kept['machine']['name']}, {kept['date']}), iterations were off by {low:.1f} to {high:.1f} % in the "
            f"median, throughput by {low2:.1f} to {high2:.1f} %: that tests the simulator, not the GPU's figures.")


def step_times(bench, engine, work):
    """Seconds of each iteration on the engine's clock for requests of (prompt, output) lengths that are all there at once."""
    for i, (P, D) in enumerate(work):
        engine.add(Request(bench.prompts(1, P, i)[0], max_new_tokens=D, arrival=engine.clock.now()))
    took = []
    while engine.requests:
        bench.heed()
        start, n = engine.clock.now(), engine.n_steps
        while engine.requests and engine.n_steps == n:  # where iterations overlap the first step only starts one
            engine.step()
        took.append(engine.clock.now() - start)
    return took


# ---------------------------------------------------------------- the scoreboard

# rows, or whole experiments, on which the constants of CostModel.roofline and SYSTEMS were chosen: no predictions
CHOSEN_ON = ("table2", "fig7", "largest batch", "share of others",
             "k = 5: no gain", "S1, n = 5:", "S1, n = 100: PEFT", "S4, n = 100:", "S2, n = 1000", "n = 400: no-unify", "n = 400: bmm",
             "R = 1: latency")
CLAIMED = {"table2": "Table 2", "fig3": "Fig. 3", "fig4": "Fig. 4", "fig7": "Fig. 7", "fig8": "Fig. 8", "table4": "Table 4", "fig9": "Fig. 9",
           "fig10": "Fig. 10", "fig11": "Fig. 11", "fig12": "Fig. 12", "fig13": "Fig. 13"}
SLORA = {"slora_table3": ("Table 3", "a100"), "slora_ablation": ("Fig. 5", "a100", "a10g"), "slora_fig6": ("Fig. 6", "a100"),
         "slora_fig9": ("Fig. 9", "a10g"), "slora_fig10": ("Fig. 10", "a100"), "slora_clustering": ("App. A", "a100-40")}  # where, on which GPUs
SMARTSPEC = (("spec_fig1", "Fig. 1", "llama-7b", 1), ("spec_fig5", "Fig. 5", "llama-7b", 1), ("spec_fig11", "Fig. 11", "llama-7b", 1),
             ("spec_fig11", "Fig. 11", "llama-33b", 4), ("spec_fig12", "Fig. 12", "llama-7b", 1),
             ("spec_fig16", "Fig. 16", "llama-7b", 1))  # where, which target on how many A100
FRONT = "0.12 to 0.25 s less than the paper's, perhaps what the authors' HTTP server and tokenizer take"
MISSES = {  # beginnings of rows -> why they are outside, as far as we can tell
    "table2: decode-maximal: per decode": "by the paper's attn column 3 decodes cost 15.2 - 10.0 = 5.2 ms, 1.7 each; its 1.2 rests on linear "
                                          "operators that took 1.6 ms less for the same 1024 tokens",
    "table4: LLaMA-33B": "the paper's decodes on the A100 read their cache at 0.5 to 0.6 of its bandwidth, on the A6000 at 0.8; we have one constant",
    "fig10: ffn": "all linear operators gain alike in a roofline; the paper's projections gain less and its FFN more",
    "fig13: (b) prefill at C = 64": "5 times would be 73 ms for 64 tokens, and the paper's own 128 tokens take 55 ms",
    "fig12: median bubble": "SARATHI's pipeline has next to no bubbles here (see the idle shares in fig12); the paper does not say where its are",
    "fig12: completion": "our iterations are shorter than the paper's, so that Orca's bubbles weigh more: see the last rows of fig12",
    "slora_fig6: S4, R = 1: first": FRONT, "slora_fig6: S4, R = 2: first": FRONT, "slora_fig6: S4, R = 4: first": FRONT,
    "slora_ablation: S2, n = 200: bmm": "the A10G's host gathers a request's adapter in 0.4 ms per layer, the A100's in 0.5; we have one constant",
    "tng_throughput": "over a grid of models and lengths ours gains at most 10 %; the rest must be in what our cost model does not have, the host's "
                      "time per iteration in vLLM's server at that time, or in a workload that the text does not tell",
    "slora_fig10": "a few bursts decide, and how long the queue is when each comes: 3 % more throughput is many more first tokens in time",
    "slora_clustering": "240 requests, and a queue that at its worst makes them wait about 6 s: a little faster, and most are inside",
}


@experiment(only="simulated")
def scoreboard(bench):
    """every number of the papers beside ours, simulated with one set of constants: SARATHI's within 15 %, the others' within 20 %.
    The rows of all their experiments that have a published number. A "fit" row is one that the constants were chosen on."""
    claims = [(name, where, "a6000", "llama-13b", 1, 0.15) for name, where in CLAIMED.items()]
    claims += [(name, f"S-LoRA {where}, {gpu}", gpu, "llama-7b", 1, 0.20) for name, (where, *gpus) in SLORA.items() for gpu in gpus]
    claims += [(name, f"SmartSpec {where}, {model.removeprefix('llama-')}", "a100", model, tp, 0.20) for name, where, model, tp in SMARTSPEC]
    claims.append(("tng_throughput", "TNG, 7b on an H100", "h100", "llama-7b", 1, 0.20))
    boards = {0.15: [], 0.20: []}
    for name, where, gpu, model, tp, margin in tqdm(claims, "scoreboard"):
        config = replace(bench.config, hardware=gpu, tp=tp, lengths="", pd=0.0, full=True, trace="")
        own = Bench(CostModel.roofline(preset(model), gpu, tp), config, EngineConfig())
        own.interrupt = bench.interrupt
        for r in EXPERIMENTS[name].rows(own):
            if r["paper"] is not None and not r.get("derived"):
                boards[margin].append(judged(name, where, r, margin))
    rows = sum(boards.values(), [])
    bench.notes = [f"outside: {r['what']}: {r['why']}" for r in rows if r["inside"] == "no"]
    for margin, part in boards.items():
        inside, tested = [[r["inside"] == "yes" for r in some] for some in (part, [r for r in part if r["role"] == "prediction"])]
        bounds = sum(r["what"].endswith(("(at most)", "(at least)")) for r in part)
        bench.notes.append(f"{sum(inside)} of {len(inside)} inside {100 * margin:.0f} % ({sum(inside) / max(1, len(inside)):.0%}); "
                           f"of the {len(tested)} predictions {sum(tested)}; {bounds} of all are bounds, of which one side is inside")
    return rows


def judged(name, where, r, margin):
    """A row with its ratio, whether it is inside the margin (or its bound), and whether the constants were fitted on it."""
    ratio = r["ours"] / r["paper"]
    inside = {"at most": ratio <= 1, "at least": ratio >= 1}.get(r.get("bound"), abs(ratio - 1) <= margin)
    fit = name in CHOSEN_ON or any(word in r["what"] for word in CHOSEN_ON)
    why = next((why for start, why in MISSES.items() if f"{name}: {r['what']}".startswith(start)), "not explained")
    what = f"{where}: {r['what']}" + (f" ({r['bound']})" if "bound" in r else "")
    return row(what, r["paper"], r["ours"], r["source"], ratio=ratio, inside="yes" if inside else "no",
               role="fit" if fit else "prediction", **({} if inside else dict(why=why)))


# ---------------------------------------------------------------- this machine: its ceilings, its peers

def shapes(bench):
    """{name: arguments of Bench.iteration}: chunks, decodes and both. A GPU is kept busy by larger ones than a CPU."""
    large = bench.config.full or bench.model.device.type == "cuda"
    chunks = [128 << i for i in range(6)] if large else [512]
    decodes = [*((1 << i, 256) for i in range(9)), (16, 1024)] if large else [(1, 256), (8, 256), (16, 256), (16, 1024)]
    return ({f"prefill {n}": (0, 0, n) for n in chunks} | {f"decode, B = {B}, context {L}": (B, L - 1, 0) for B, L in decodes}
            | {f"chunk of {C - 7} + 7 decodes, context 256": (7, 255, C - 7) for C in ([256, 512, 1024] if large else [256])})


def demand(c, decodes, context, chunk, itemsize):
    """The arithmetic of one iteration -> {operator: (FLOPs, bytes of weights or of K and V)}, all layers."""
    N, M = decodes + chunk, decodes + (chunk > 0)  # tokens, rows with logits
    work = {name: (2 * N * a * b * c.n_layer, a * b * c.n_layer * itemsize) for name, (a, b) in c.widths.items()}
    pairs = decodes * (context + 1) + chunk * (chunk + 1) / 2  # of a query with a key it sees
    work["attn"] = 4 * c.head_dim * c.n_head * c.n_layer * pairs, c.page_bytes(itemsize) * (decodes * (context + 1) + chunk)
    work["head"] = 2 * M * c.n_embd * c.vocab_size, c.n_embd * c.vocab_size * itemsize
    return work


@experiment(only="measured")
def roofline(bench):
    """every operator's FLOP/s and bytes/s beside this machine's ceilings, by batch shape, and what the engine adds.
    `ours` is the share of the ceiling: what FLOPs or bytes take at the measured ceilings, whichever is more, over the time
    they took. `all` counts every FLOP and byte of the model once."""
    c, itemsize, device, model = bench.model.config, bench.model.dtype.itemsize, bench.model.device, copy.copy(bench.model)
    if c.llama:  # whose positions are computed, so that its context may be as long as we like
        model.config = replace(c, block_size=2**14)
    own = bench.other(model)
    rest = {"ms": None, "GFLOP/s": None, "GB/s": None, "tokens/s": None}
    for name, (decodes, context, chunk) in tqdm(shapes(bench).items(), "roofline"):
        pages = decodes * with_room(context + 1, c) + with_room(chunk, c)
        if max(context + 1, chunk) >= model.config.block_size or pages * c.page_bytes(itemsize) > 0.9 * free_memory(device)[0]:
            bench.notes.append(f"{name} is left out: more than the model's context or the memory holds.")
            continue
        f = own.iteration(decodes, context, chunk)
        rate, bandwidth, total = measured_peaks(own, f)
        took, _ = own.operators(*[f] * 3, more=["head"])
        work = demand(c, decodes, context, chunk, itemsize)
        work["all"] = tuple(map(sum, zip(*work.values())))
        hooked = took | {"all": 3 * total}
        for op, (fl, by) in work.items():
            t = hooked[op] / 3
            yield row(f"{name}: {op}", None, max(fl / rate, by / bandwidth) / t, **{
                "ms": t * 1e3, "GFLOP/s": fl / t / 1e9, "GB/s": by / t / 1e9, "tokens/s": (decodes + chunk) / t if op == "all" else None})
        del f  # and its cache, before the next one's is made
    inside, outside = overhead(bench)
    yield row("engine at B = 8: share of an iteration outside the model", None, outside / (inside + outside),
              **rest | {"ms": outside * 1e3})
    if on_gpu(device) and bench.options.graph:
        for how, ahead in ("one after the other", 0), ("overlapped", 1):
            share, seconds = python_gap(bench, ahead)
            yield row(f"decode, B = 8, iterations {how}: share of the time that the GPU waits for Python", None, share,
                      **rest | {"ms": share * seconds * 1e3})
    for cell, ours, theirs in beside_transformers(bench):
        yield row(f"{cell}: engine, tokens/s over transformers' generate", None, ours / theirs, **rest | {"tokens/s": ours})


def beside_transformers(bench):
    """(a cell of CELLS, our tokens/s, those of transformers' generate) for two sizes of decodes; none where it is not installed or too much."""
    c = bench.model.config
    fits = 6 * c.n_params < free_memory(torch.device("cpu"))[0]  # new weights are made in float32, and saved in 16 bits
    if not importlib.util.find_spec("transformers") or c.block_size <= 512 or not fits:
        return
    others, seen = in_turns(bench, {cell: CELLS[cell] for cell in ("decode, B = 1, context 256", "decode, B = 8, context 256")})
    for cell, names in others.items():
        if "transformers" in names:
            yield cell, *(median(rate for rate, _ in seen[cell, name]) for name in ("sarathi", "transformers"))


def overhead(bench, B=8, context=256, steps=32):
    """Seconds per decode iteration of the engine (inside the model, outside it: planning, packing, sampling), medians."""
    engine, model, out, took = bench.engine("orca", B * (context + steps), B, graph=False), bench.model, [], []

    def clocked(f):
        def run(*args):
            took.append(bench.once(lambda: out.append(f(*args))))
            return out.pop()
        return run
    engine.model = copy.copy(model)
    engine.model.hidden, engine.model.predict = clocked(model.hidden), clocked(model.predict)
    total = step_times(bench, engine, [(context, steps)] * B)
    inside = [a + b for a, b in zip(took[::2], took[1::2])]
    return median(inside[1:]), median(t - i for t, i in zip(total[1:], inside[1:]))


def python_gap(bench, ahead, B=8, context=256, steps=64):
    """Of recorded decode iterations, ahead of one another or not: the share of the time from the end of one's work on the device to the
    start of the next one's, and the seconds that one takes from start to start."""
    engine, clock, marks = bench.engine("orca", B * (context + steps), B), SharedClock(bench.model.world), []
    engine.ahead = engine.behind = ahead
    step_times(bench, engine, [(context, steps)] * B)  # records what is replayed from here on
    for shape, (batch, replay) in engine.graphs.recorded.items():
        engine.graphs.recorded[shape] = batch, lambda replay=replay: marks.append(clock.mark()) or replay()
    sample = engine._sample
    engine._sample = lambda *args: (sample(*args), marks.append(clock.mark()))[0]
    step_times(bench, engine, [(context, steps)] * B)
    bench.sync()
    times = [when() for when in marks[1 - steps:]]  # of the last iterations: end, start, end, ... start, end
    return sum(start - end for end, start in zip(times[::2], times[1::2])) / (times[-1] - times[0]), 2 * (times[-1] - times[0]) / (steps - 2)


class Ours:
    """This engine as the peers are asked: run(prompts, new) -> for each request, when each new token came, seconds after the call.
    Whoever was started with adapters, PEFT folders, gives the requests one each in turns."""

    def __init__(self, bench, adapters, scheduler):
        self.adapters, self.engine = adapters or [None], bench.engine(scheduler, 16 * 1100, 16)
        for folder in adapters:
            self.engine.add_adapter(folder, folder)

    def run(self, work, new):
        engine, start = self.engine, self.engine.clock.now()
        requests = [Request(p, max_new_tokens=new, adapter=a) for p, a in zip(work, cycle(self.adapters))]
        for r in requests:
            engine.add(r)
        while engine.requests:  # not engine.run(), which would keep a Ctrl-C to itself
            engine.step()
        return [[t - start for t in r.times] for r in requests]


class Transformers:
    """Hugging Face transformers: generate() on one static batch; on a GPU with a static cache, for which it compiles the model; with
    adapters PEFT's mixed batch."""

    def __init__(self, folder, dtype, adapters, device):
        import transformers
        transformers.utils.logging.set_verbosity_error()
        self.clock = transformers.LogitsProcessorList([self.stamp])
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
        self.adapters = [os.path.basename(a) for a in adapters]
        if adapters:
            import peft
            own = dict(autocast_adapter_dtype=False)  # PEFT's default, float32 beside bfloat16, is slower
            self.model = peft.PeftModel.from_pretrained(self.model, adapters[0], self.adapters[0], **own).eval()
            for path, name in zip(adapters[1:], self.adapters[1:]):
                self.model.load_adapter(path, name, **own)

    def stamp(self, ids, scores):
        if scores.is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return scores

    @torch.inference_mode()
    def run(self, work, new):
        ids, self.times, start = torch.tensor(work, device=self.model.device), [], time.perf_counter()
        how = dict(adapter_names=[a for _, a in zip(work, cycle(self.adapters))]) if self.adapters else {}
        if ids.is_cuda and not how:
            how = dict(cache_implementation="static")
        self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
                            pad_token_id=0, eos_token_id=None, logits_processor=self.clock, **how)
        return [[t - start for t in self.times]] * len(work)


class VLLM:
    """vLLM: its own engine in this process, continuous batching with chunked prefill at its default budget."""

    def __init__(self, folder, dtype, adapters):
        os.environ |= dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1",
                           VLLM_CPU_KVCACHE_SPACE="2")
        import vllm
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind
        lora = dict(enable_lora=True, max_loras=len(adapters), max_lora_rank=max(RANKS)) if adapters else {}
        if torch.cuda.is_available():  # it takes its share of the whole GPU, of which we have some
            free, total = torch.cuda.mem_get_info()
            lora["gpu_memory_utilization"] = 0.9 * free / total
        self.adapters = [LoRARequest(path, i, path) for i, path in enumerate(adapters, 1)] or [None]
        self.engine = vllm.LLM(model=folder, skip_tokenizer_init=True, dtype=dtype, max_model_len=2048, max_num_seqs=16,
                               max_num_batched_tokens=2048, enable_prefix_caching=False, seed=0, **lora).llm_engine
        self.sampling = lambda new: vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False,
                                                        output_kind=RequestOutputKind.DELTA)
        self.n_added = 0

    def run(self, work, new):
        times, start = {}, time.perf_counter()
        for p, adapter in zip(work, cycle(self.adapters)):
            self.n_added += 1
            times[str(self.n_added)] = []
            self.engine.add_request(str(self.n_added), dict(prompt_token_ids=p), self.sampling(new), lora_request=adapter)
        while self.engine.has_unfinished_requests():
            done, now = self.engine.step(), time.perf_counter() - start
            for r in done:
                times[r.request_id.split("-")[0]] += [now] * len(r.outputs[0].token_ids)
        return list(times.values())


class LlamaCpp:
    """llama.cpp: its own llama-batched-bench on one static batch, no sampling; the file has the same shapes and random weights."""

    def __init__(self, folder, dtype, model):
        self.tool, self.file = os.path.join(folder, "llama-batched-bench"), tempfile.NamedTemporaryFile(suffix=".gguf")
        if not os.path.exists(self.tool):
            raise FileNotFoundError(f"{self.tool} does not exist")
        write_gguf(model, self.file.name, dtype)

    def run(self, work, new):
        B, P = len(work), len(work[0])
        command = [self.tool, "-m", self.file.name, "-t", str(torch.get_num_threads()), "--output-format", "jsonl", "-c", str(B * (P + new) + 64),
                   "-npp", str(P), "-ntg", str(new), "-npl", ",".join([str(B)] * 3)]  # the last line can be lost, the first is a warm-up
        out = subprocess.run(command, capture_output=True, text=True, check=True, start_new_session=True).stdout  # Ctrl-C is for us
        r = [json.loads(line) for line in out.splitlines() if line.startswith("{")][1]
        return [[r["t_pp"] + r["t_tg"] * i / new for i in range(1, new + 1)]] * B

    def close(self):
        self.file.close()


def write_gguf(model, path, dtype):
    """A model of the llama family as a GGUF file, for timing only: llama.cpp pairs rotary elements otherwise."""
    import gguf
    c, out = model.config, gguf.GGUFWriter(path, "llama")
    for name, value in dict(context_length=c.block_size, embedding_length=c.n_embd, block_count=c.n_layer, feed_forward_length=c.n_inner,
                            head_count=c.n_head, head_count_kv=c.n_kv_head, rope_dimension_count=c.head_dim, rope_freq_base=c.rope_theta,
                            layer_norm_rms_eps=c.norm_eps, vocab_size=c.vocab_size, tokenizer_model="no_vocab").items():
        getattr(out, f"add_{name}")(value)
    sizes = dict(attn_norm=(c.n_embd,), ffn_norm=(c.n_embd,), attn_q=(c.n_head * c.head_dim, c.n_embd), attn_k=(c.n_kv_head * c.head_dim, c.n_embd),
                 attn_v=(c.n_kv_head * c.head_dim, c.n_embd), attn_output=(c.n_embd, c.n_head * c.head_dim), ffn_gate=(c.n_inner, c.n_embd),
                 ffn_up=(c.n_inner, c.n_embd), ffn_down=(c.n_embd, c.n_inner))
    names = {"token_embd": (c.vocab_size, c.n_embd), "output_norm": (c.n_embd,)} | ({} if c.tied else {"output": (c.vocab_size, c.n_embd)})
    names |= {f"blk.{i}.{name}": size for i in range(c.n_layer) for name, size in sizes.items()}
    for name, size in names.items():
        t = torch.ones(size) if len(size) == 1 else torch.randn(size) * 0.02
        if dtype == "bfloat16" and t.dim() == 2:
            out.add_tensor(name + ".weight", t.bfloat16().view(torch.uint16).numpy(), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            out.add_tensor(name + ".weight", t.numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


class Worker:
    """A peer in a Python of its own, which runs this file as `bench.py peer NAME FOLDER DTYPE DEVICE [ADAPTER ...]` and answers line by
    line."""

    def __init__(self, python, name, folder, dtype, device, adapters):
        lib, env = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(python))), "lib", "libiomp5.so"), dict(os.environ)
        if name == "vllm":  # as its manual asks
            env["LD_PRELOAD"] = ":".join(p for p in ("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", lib) if os.path.exists(p))
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([python, __file__, "peer", name, folder, dtype, device, *adapters], env=env, text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=self.log, start_new_session=True)  # Ctrl-C is for us
        self.answer()

    def run(self, work, new):
        self.process.stdin.write(json.dumps([work, new]) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self):
        for line in self.process.stdout:
            if line.startswith("@"):  # the rest is the peer's own chatter
                return json.loads(line[1:])
        self.log.seek(0)
        raise RuntimeError((self.log.read().strip() or "it ended without a word").splitlines()[-1])

    def close(self):
        self.process.kill()
        self.process.wait()


def peer(name, folder, dtype, device, *adapters):
    """The other end of Worker. vLLM runs where it was built for."""
    engine = dict(transformers=partial(Transformers, device=device), vllm=VLLM)[name](folder, dtype, adapters)
    print("@null", flush=True)
    for line in sys.stdin:
        print("@" + json.dumps(engine.run(*json.loads(line))), flush=True)


def start_peers(bench, folder, adapters=()):
    """The peers that --peers names and that start -> {name: something with run}. What does not start becomes a note."""
    here = dict(transformers=sys.executable) if importlib.util.find_spec("transformers") else {}
    dtype, engines = str(bench.model.dtype).removeprefix("torch."), {}
    for name, path in (bench.config.paths or here).items():
        try:
            if name != "llama.cpp":
                engines[name] = Worker(path, name, folder, dtype, str(bench.model.device), adapters)
            elif not adapters:  # it has none per request
                engines[name] = LlamaCpp(path, dtype, bench.model)
        except (OSError, RuntimeError, ImportError) as e:
            bench.notes.append(f"{name} is not measured{' with adapters' if adapters else ''}: {e}")
    return engines


PREFILL, DECODE = 1, 72  # new tokens of the cells that are of one kind
CELLS = {"prefill 512": (1, 512, PREFILL)} | {f"decode, B = {B}, context {ctx}": (B, ctx, DECODE) for B, ctx in (
    (1, 256), (4, 256), (8, 256), (16, 256), (1, 1024), (16, 1024))} | {
    "16 x (480 in + 32 out)": (16, 480, 32), "16 x (256 in + 64 out)": (16, 256, 64), "16 x (256 in + 32 out)": (16, 256, 32),
    "16 x (256 in + 32 out), 16 adapters": (16, 256, 32)}
RANKS = 8, 16, 32, 64  # of those 16 in turns; on q, k, v and o
OURS = "sarathi", "whole prompts"  # as --scheduler says, and with all prompts at once and whole, as those who serve one batch compute them


def start_engines(bench, folder, cells):
    """{cell: {name: engine}}, ours first; who is left out of one cell is out of those like it. Where adapters are used every engine is
    another, as one that could use some may be slower without."""
    GPT(bench.model.config).to(bench.model.dtype).save_pretrained(folder)  # other weights of the same shapes
    found, adapters = {}, [os.path.join(folder, f"adapter{i}") for i in range(16)]
    for side in ([], adapters):
        mine = [cell for cell in cells if cell.endswith("adapters") == bool(side)]
        if mine:
            for i, path in enumerate(side):
                random_adapter(RANKS[i % len(RANKS)], seed=i)(bench.model.config, bench.model.dtype).save_pretrained(path)
            ours = {name: Ours(bench, side, how) for name, how in zip(OURS, (bench.options.scheduler, "prefill_first"))}
            others = start_peers(bench, folder, side)
            for cell in mine:
                one_kind = CELLS[cell][2] in (PREFILL, DECODE)
                found[cell] = ChainMap(others, dict(sarathi=ours[OURS[1]]) if one_kind else ours)
    return found


def rate_of(times, B, P, new):
    """Tokens per second of a cell: of the prompt, of 32 decode steps with all B in flight, or of the whole run; and, of whole
    runs, the 99th percentile of the gaps between a request's tokens."""
    if new == PREFILL:
        return B * P / times[0][0], None
    if new != DECODE:
        gaps = sorted(b - a for ts in times for a, b in zip(ts, ts[1:]))
        return B * (P + new) / max(ts[-1] for ts in times), gaps[int(0.99 * len(gaps))]
    start = max(ts[0] for ts in times)
    after = [[t for t in ts if t > start][:32] for ts in times]
    return sum(map(len, after)) / (max(ts[-1] for ts in after) - start), None


@experiment(only="measured", needs="one process")
def peers(bench):
    """tokens per second beside transformers, llama.cpp and vLLM, the same work in rounds; --peers says where they are.
    Every cell in every engine in turns, so that the machine's drift hits all alike. Rows are medians over the rounds, `x best`
    is the median over rounds of ours over the best peer's."""
    cells = {name: cell for name, cell in CELLS.items() if cell[1] + cell[2] <= bench.model.config.block_size and bench.config.cells in name}
    yield from cell_rows(*in_turns(bench, cells))
    bench.heed()


def in_turns(bench, cells):
    """Cells in every engine, round by round -> {cell: its peers' names}, {(cell, name): what rate_of says of every round}"""
    seen = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        engines = start_engines(bench, folder, cells)
        try:
            rounds = [(n, *cell) for n in range(1 + bench.config.repeats) for cell in cells.items()]
            for n, cell, (B, P, new) in tqdm(rounds, "peers"):
                if bench.interrupt.seen:
                    break
                for name, figures in run_cell(bench, cell, engines[cell], n, bench.prompts(B, P, bench.options.seed), new).items():
                    seen[cell, name] += [figures] * (n > 0)  # the first round is the warm-up
        finally:
            for engine in {e for others in engines.values() for e in others.values() if not isinstance(e, Ours)}:
                engine.close()
    return {cell: [name for name in names if name not in OURS] for cell, names in engines.items() if seen[cell, "sarathi"]}, seen


def cell_rows(cells, seen):
    """The rows of cells, as in_turns says."""
    middle = lambda xs: median(xs) if xs else None
    names = dict.fromkeys(name for others in cells.values() for name in others)
    for cell, others in cells.items():
        for i, (what, unit, best) in enumerate((("tokens/s", 1, max), ("inter-token p99, ms", 1e3, min))):
            of = {name: [figures[i] and figures[i] * unit for figures in seen[cell, name]] for name in (*OURS, *others)}
            if None not in of["sarathi"]:
                over = [middle([a / best(b) for a, *b in zip(of[own], *map(of.get, others))] if others else None) for own in OURS]
                beside = {name: middle(of.get(name)) for name in (OURS[1], *names)}
                yield row(f"{cell}: {what}", None, middle(of["sarathi"]), **beside, **{"x best": over[0], "whole x best": over[1]})


def run_cell(bench, cell, engines, n, work, new):
    """One cell in every engine, in the order of round n -> {name: rate_of}. A peer that fails is dropped, with a note."""
    results = {}
    for name in shuffled(engines, n):
        time.sleep(0.3)  # the last one's threads stop spinning
        try:
            results[name] = rate_of(engines[name].run(work, new), len(work), len(work[0]), new)
        except (OSError, RuntimeError, subprocess.SubprocessError) as e:
            if name in OURS:
                raise
            engines.pop(name).close()
            bench.notes.append(f"{name} is left out, it failed at {cell!r}: {e}")
    return results


# ---------------------------------------------------------------- pictures and traces

INK = {  # the same thing has the same colour in every picture
    "static": "#7f7f7f", "over static": "#7f7f7f", "Orca, worst case": "#f5b78a", "orca": "#e07b2a", "over orca": "#e07b2a",
    "Orca, best case": "#e07b2a", "prefill_first": "#8c564b", "sarathi": "#2a78c2", "sarathi_serve": "#17a0a8", "as simulated": "#2a78c2",
    "off": "#7f7f7f", "k = 1": "#93c4ea", "k = 3": "#2a78c2", "k = 5": "#123a73", "goodput": "#e07b2a", "oracle": "#1b9e87",
    "1,1,1": "#93c4ea", "2,2,1": "#2a78c2", "3,2,2": "#123a73",
    "C = 64": "#1b9e87", "C = 128": "#93c4ea", "C = 256": "#2a78c2", "C = 512": "#123a73",
    "L = 1024": "#c77fd0", "L = 2048": "#9340a8", "L = 3072": "#571b6e",
    "preproj": "#b5cf6b", "attn": "#d6477e", "postproj": "#7fa136", "ffn": "#55701f", "linear": "#7fa136", "total": "#3b3b3b",
    "prefill": "#1b9e87", "chunk": "#1b9e87", "decode": "#f2c14e", "waiting": "#e4e4e4", "stall": "#e8583f",
    "bubble": "#e8583f"}
LINES = {"simulated": "-", "computed": "-", "measured": "--"}


class Tapes(list):
    """The Tapes of a run. Those of one experiment together hold at most `left` entries of Spans: each its first ones, up to a quarter of what
    those before it have left."""
    left, full = math.inf, False

    def new(self, name):
        self.append(Tape(name, self))
        return self[-1]


class Tape(list):
    """The Spans of one engine, and when its requests arrived if somebody says so."""

    def __init__(self, name, tapes):
        self.name, self.tapes, self.arrivals, self.left = name, tapes, {}, tapes.left / 4
        tapes.left *= 3 / 4

    def append(self, span):
        if self.left > 0:
            self.left -= len(span.entries)
            super().append(span)
        else:
            self.tapes.full = True


def pieces(tape):
    """A tape as what is drawn and traced -> (row, kind, start, end, entries) in order; a row is a request, or a stage where there
    are several. kind: chunk, or decode (so are up to FEW_ROWS tokens of a prompt, as for the kernels), and what lies between two of
    them while others run: stall (before the first: waiting), in a stage bubble."""
    staged, last, n = any(s.stage for s in tape), {}, 0  # last: row -> (iteration, its end)
    for s in tape:
        n += s.end > s.start
        for at, entries in [(s.stage, s.entries)] if staged else [(e[0], [e]) for e in s.entries]:
            if s.end > s.start:
                before, end = last.get(at, (-1, tape.arrivals.get(at, s.start)))
                if s.start > end + 1e-9 and (staged or n > before + 1):
                    yield at, "bubble" if staged else "waiting" if before < 0 else "stall", end, s.start, []
                last[at] = n, s.end
            kind = "preempted" if s.end == s.start else "chunk" if any(m > FEW_ROWS for _, _, m in entries) else "decode"
            yield at, kind, s.start, s.end, entries


def trace_events(tapes):
    """Chrome's trace events of the tapes: a process for each, a thread for each of its rows; times in microseconds."""
    for pid, tape in enumerate(t for t in tapes if t):
        word = "stage" if any(s.stage for s in tape) else "request"
        yield dict(ph="M", name="process_name", pid=pid, args=dict(name=tape.name))
        for tid in sorted({at for at, *_ in pieces(tape)}):
            yield dict(ph="M", name="thread_name", pid=pid, tid=tid, args=dict(name=f"{word} {tid}"))
        for tid, kind, start, end, entries in pieces(tape):
            a, b = round(start * 1e9), round(end * 1e9)  # nanoseconds: neighbours touch
            what = dict(ph="i", s="t") if kind == "preempted" else dict(ph="X", dur=(b - a) / 1e3)
            yield dict(name=label(kind, entries), cat=kind, pid=pid, tid=tid, ts=a / 1e3, **what, args={"[request, tokens before, tokens fed]": entries})


def label(kind, entries):
    """What a piece holds, in words: "chunk of request 7, 253 tokens + 3 decodes"."""
    chunks = [f"chunk of request {id}, {n} tokens" for id, past, n in entries if n > FEW_ROWS]
    few = [(id, n) for id, past, n in entries if 0 < n <= FEW_ROWS]
    alone = [f"decode of request {id}" if n == 1 else f"{n} tokens of request {id}" for id, n in few]  # drafts, or the end of a prompt
    return " + ".join(chunks + (alone if len(few) < 2 else [f"{len(few)} decodes"])) or " ".join([kind, *(f"request {id}" for id, past, n in entries)])


def write_trace(path, tapes):
    """All tapes as one file that ui.perfetto.dev and chrome://tracing open."""
    with open(path, "w") as f:
        json.dump(dict(traceEvents=list(trace_events(tapes)), displayTimeUnit="ms"), f)
    left_out = ", of long runs only the first ones" if tapes.full else ""
    print(f"wrote {path}: {sum(map(len, tapes))} iterations of {sum(map(bool, tapes))} engines{left_out}\n")


def check_writable(config):
    """Say before the work starts that --plot or --trace could not be kept at its end."""
    for name, path in (("plot", config.plot), ("trace", config.trace)):
        try:
            if name == "plot" and path:
                os.makedirs(path, exist_ok=True)
                tempfile.TemporaryFile(dir=path).close()
            elif path:
                open(path, "a").close()
        except OSError as e:
            raise OSError(f"{name} = {path!r}: cannot be written ({e.strerror})") from None
    if config.plot and not importlib.util.find_spec("matplotlib"):
        raise ValueError(f"plot = {config.plot!r}: matplotlib is missing, pip install matplotlib")


def plot(bench, name, rows):
    """Draw an experiment's rows, or its tapes, into the folder --plot; one that has no picture is none."""
    what, tapes = EXPERIMENTS[name], [t for t in bench.tapes if t and t.name.startswith(name + ": ")]
    if what.axes and shown(rows):
        figure = draw(what.axes, rows)
    elif what.timeline and tapes:
        figure = draw_tapes(what.timeline, tapes)
    else:
        return
    where = "" if what.only == "simulated" else f" — {os.path.basename(bench.name)}, {machine(bench.model)['name']}"
    figure.suptitle(textwrap.fill(what.about + where, int(15 * figure.get_figwidth())), fontsize=9)
    figure.savefig(place_of(bench, name, "png"), dpi=110)


def draw(axes, rows):
    """The rows that say at=(panel, series, x) as a Figure, a panel beside the other; axes as in Experiment."""
    from matplotlib.figure import Figure
    rows = shown(rows)
    panels = list(dict.fromkeys(r["at"][0] for r in rows if r["at"][0] is not None))
    figure = Figure((max(6, 3.6 * len(panels)), 3.6), layout="constrained")
    for i, (panel, ax) in enumerate(zip(panels, figure.subplots(1, len(panels), squeeze=False)[0])):
        draw_panel(ax, [r for r in rows if r["at"][0] in (panel, None)])
        x, y = axes[min(i, len(axes) - 1)]
        ax.set(title=panel, xlabel=x, ylabel=y)
    return finished(figure)


def shown(rows):
    """The rows that say where they are drawn, and one more for each further place in also=[(panel, series, x, y, what is written beside
    it)]; without an x, y is a curve."""
    more = [row(r["what"], None, None, r["source"], at=(panel, series, x), tag=tag) | {"curve" if x is None else "ours": y}
            for r in rows for panel, series, x, y, tag in r.get("also", ())]
    return [r for r in rows if "at" in r] + more


def draw_panel(ax, rows):
    """A series is a line over its x (or its curve), or bars where x is a name; the paper's figures are hollow marks. x = None: the
    paper does not say where, a dotted line; series = None: it does not say for which."""
    series = list(dict.fromkeys(r["at"][1] for r in rows if r["at"][1] and (r["at"][2] is not None or "curve" in r)))
    names = list(dict.fromkeys(r["at"][2] for r in rows if isinstance(r["at"][2], str)))
    width, points = 0.8 / max(1, len(series)), []
    for i, s in enumerate([*series, None]):
        mine = [r for r in rows if r["at"][1] == s]
        place = lambda x: names.index(x) + (i - (len(series) - 1) / 2) * width if names else x
        ours = sorted((place(x), y) for r in mine for x, y in r.get("curve", [(r["at"][2], r["ours"])]) if None not in (x, y))
        paper = [(place(r["at"][2]), r["paper"]) for r in mine if None not in (r["at"][2], r["paper"])]
        look = dict(color=INK.get(s, f"C{i}") if s else "black", label=s)
        if s and ours and names:
            ax.bar(*zip(*ours), width, fill=mine[0]["source"] != "measured", ls=LINES[mine[0]["source"]], edgecolor=look["color"], **look)
        elif s and ours:
            ax.plot(*zip(*ours), LINES[mine[0]["source"]], marker="." if len(ours) < 30 else "", **look)
        ax.plot(*zip(*paper or [((), ())]), "o", mfc="white", mec="black" if names else look["color"], mew=1.6, ms=7, zorder=3)
        for r in (r for r in mine if r.get("tag")):
            ax.annotate(r["tag"], (r["at"][2], r["ours"]), (3, 3), textcoords="offset points", fontsize=7)
        points += ours * bool(s) + paper
        for y in [r["paper"] for r in mine if r["at"][2] is None and r["paper"] is not None]:
            ax.axhline(y, ls=":", lw=1.3, color=look["color"])
    if names:
        ax.set_xticks(range(len(names)), [textwrap.fill(n, 14 if len(names) < 6 else 99) for n in names], fontsize=8, rotation=90 * (len(names) > 5))
    scale(ax, [[] if names else [x for x, y in points], [y for x, y in points]], bool(names))


def scale(ax, values, bars):
    """Plain numbers on both axes, a tick for each x where they are few and apart; logarithmic where they differ by more than fifteen times
    (bars: a hundred)."""
    from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator, StrMethodFormatter
    for axis, set_scale, v in zip((ax.xaxis, ax.yaxis), (ax.set_xscale, ax.set_yscale), values):
        if v and min(v) > 0 and max(v) > (100 if bars else 15) * min(v):
            set_scale("log")
            axis.set(major_locator=LogLocator(subs=(1, 2, 5) if max(v) < 100 * min(v) else (1,)), minor_locator=NullLocator())
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        elif axis is ax.xaxis and not bars:
            axis.set_major_locator(MaxNLocator(5))  # more would run into one another
        ticks = sorted(set(v)) if axis is ax.xaxis else []
        places = np.log(ticks) if axis.get_scale() == "log" else np.array(ticks)
        if 0 < len(ticks) <= 10 and (np.diff(places) > 0.07 * np.ptp(places)).all():
            axis.set(major_locator=FixedLocator(ticks), minor_locator=NullLocator(), major_formatter=lambda x, _: number(x))
    ax.grid(alpha=0.25)
    ax.set_axisbelow(True)


def finished(figure):
    """The figure with one legend under all its panels: every label once, and what the marks of the paper are."""
    from matplotlib.lines import Line2D
    named = {text: handle for ax in figure.axes for handle, text in zip(*ax.get_legend_handles_labels())}
    lines = [line for ax in figure.axes for line in ax.lines]
    if any(line.get_marker() == "o" and len(line.get_xdata()) for line in lines):
        named["paper, on its GPU"] = Line2D([], [], ls="", marker="o", mfc="white", mec="black", mew=1.6, ms=7)
    if any(line.get_linestyle() == ":" for line in lines):
        named["paper, place not given"] = Line2D([], [], ls=":", color="black")
    columns = min(int(figure.get_figwidth() / 1.2), len(named))
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    return figure


def draw_tapes(word, tapes):
    """Tapes one below the other on the same time axis, a row for each word; of a pipeline's stages only a stretch from the middle, as
    long as 50 iterations."""
    from matplotlib.figure import Figure
    figure = Figure((10, 0.7 + 1.7 * len(tapes)), layout="constrained")
    staged = word == "stage"
    begin = [t[-1].end / 2 * staged for t in tapes]
    width = 50 * median(s.end - s.start for s in tapes[0]) if staged else max(t[-1].end for t in tapes)
    for tape, t0, ax in zip(tapes, begin, figure.subplots(len(tapes), 1, sharex=True, squeeze=False)[:, 0]):
        drawn = defaultdict(list)
        for at, kind, start, end, _ in pieces(tape):
            if end > t0 and start < t0 + width:
                drawn[kind, at].append((max(start, t0) - t0, min(end, t0 + width) - max(start, t0)))
        for (kind, at), bars in drawn.items():
            if kind == "preempted":
                ax.plot([x for x, _ in bars], [at] * len(bars), "kx", label=kind)
            else:
                ax.broken_barh(bars, (at - 0.4, 0.8), facecolor=INK[kind], edgecolor="white", lw=0.4, label=kind)
        rows = sorted({at for _, at in drawn})
        ax.set(title=tape.name.partition(": ")[2], ylabel=word, yticks=rows, xlim=(0, 1.005 * width), ylim=(max(rows) + 0.6, min(rows) - 0.6))
    ax.set_xlabel("time (s)")
    return finished(figure)


# ---------------------------------------------------------------- running and printing

def run(bench, names):
    """Run experiments in order and print each one's table as it ends -> all rows. Ctrl-C ends it with what was measured so far."""
    rows = []
    with bench.interrupt:
        for name in names:
            what, part = EXPERIMENTS[name], []
            bench.parts.clear()
            bench.doing, bench.tapes.left = name, math.inf if what.timeline else 50000
            try:
                for r in what.rows(bench):
                    part.append(dict(experiment=name, **r))
            except KeyboardInterrupt:
                bench.interrupted = True
            if part:
                print(f"\n### {name}: {what.about}\n\n{table(part)}\n", flush=True)
            if any(r["source"] == "simulated" for r in part):
                print(simulators_error() + "\n", flush=True)
            if part and bench.config.plot and bench.world.rank == 0:
                plot(bench, name, part)
                with open(place_of(bench, name, "json"), "w") as f:
                    print(report(bench, name, part), file=f)
            bench.notes += busy(bench)
            while bench.notes:
                print(bench.notes.pop(0) + "\n", flush=True)
            rows += part
            if bench.interrupted:
                print("interrupted: the tables hold what was measured so far", file=sys.stderr)
                break
    return rows


def busy(bench, most=2.0):
    """[a warning, if what an experiment timed more than once differed by more than `most` times in the median]"""
    spread, bench.spread[:] = median(bench.spread or [1.0]), []
    return [f"Timings of the same work differed by {spread:.1f} times (the median of all): this machine is busy, and its figures are worth little. "
            "Beside another process let OMP_NUM_THREADS say how many cores are free."] * (spread > most)


def report(bench, names, rows):
    """All that is known of a run, as JSON; but for where its files are."""
    settings = {f.name: getattr(bench.config, f.name) for f in fields(BenchConfig) if f.name not in ("plot", "trace", "peers")}
    return json.dumps(dict(experiment=names, rows=rows, machine=machine(bench.model), model=bench.name, seed=bench.options.seed,
                           options=vars(bench.options), settings=settings, date=time.strftime("%Y-%m-%d")))


def place_of(bench, name, kind):
    """Where --plot keeps an experiment's figure or rows: NAME_a6000 where it is simulated, NAME_cpu_bf16 where it is measured; NAME where
    nothing else is."""
    dtype = str(bench.model.dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
    where = bench.config.hardware or f"{bench.model.device.type}_{dtype}"
    path = os.path.join(bench.config.plot, name + f"_{where}" * (EXPERIMENTS[name].only != "simulated") + f".{kind}")
    bench.notes.append(f"wrote {path}")
    return path


def table(rows):
    """Rows as a Markdown table whose columns line up: what, paper, ours, source, and every other plain value that all rows have."""
    more = [k for k in rows[0] if k not in ("experiment", "what", "paper", "ours", "source")
            and all(k in r and isinstance(r[k], (int, float, str, type(None))) for r in rows)]
    columns = ["what", "paper", "ours", *more, "source"]
    left = [any(isinstance(r[k], str) for r in rows) for k in columns]
    cells = [["", *columns[1:]], *([r[k] if isinstance(r[k], str) else number(r[k]) for k in columns] for r in rows)]
    width = [max(map(len, column)) for column in zip(*cells)]
    lines = ["| " + " | ".join(c.ljust(w) if l else c.rjust(w) for c, w, l in zip(line, width, left)) + " |" for line in cells]
    rule = "|" + "|".join("-" * (w + 1) + ("-" if l else ":") for w, l in zip(width, left)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def number(x):
    """Three significant digits, whole numbers from a thousand on; a dash for nothing."""
    return "-" if x is None else f"{x:.0f}" if abs(x) >= 1000 else f"{x:.3g}"


def machine(model):
    """What the numbers were measured on, or are simulated for."""
    dtype = str(model.dtype).removeprefix("torch.")
    if isinstance(model, CostModel):
        return dict(name=f"{model.name} (simulated)", dtype=dtype)
    if model.device.type == "cuda":
        name = torch.cuda.get_device_name()
    else:
        known = open("/proc/cpuinfo") if os.path.exists("/proc/cpuinfo") else [f"model name: {platform.processor()}"]
        name = next((line.split(":")[1].strip() for line in known if line.startswith("model name")), "")
        name = f"{name or platform.machine()}, {torch.get_num_threads()} threads"
    return dict(name=name, torch=torch.__version__, dtype=dtype)


def explain(bench, rows):
    """The result on this machine in one sentence."""
    of = lambda name, end: [r["ours"] for r in rows if r["experiment"] == name and r["what"].endswith(end) and r["ours"] is not None
                            and not r["what"].startswith("LLaMA-33B")]  # Table 4's other model
    knee, speedups, gains = of("ceilings", "pays for"), of("table4", "decode speedup"), of("table4", "over static")
    if knee and speedups and gains:
        print(f"One weight read pays for {knee[0]:.0f} tokens on this machine and a batch of {bench.B} decodes uses {bench.B} of them, so a decode "
              f"that rides along with a chunk can be at most about {knee[0]:.0f} / {bench.B} = {knee[0] / bench.B:.1f} times cheaper. {bench.source}: "
              f"{min(speedups):.1f} to {max(speedups):.1f} times, for attention and the output head get no cheaper; end to end that is worth "
              f"{min(gains):.2f} to {max(gains):.2f} times the throughput of request-level batching.\n")


def biggest_llama(device):
    """The largest LLaMA preset whose 16-bit weights leave a third of the GPU's memory free; on a CPU one of GPT-2's size, or a quarter of
    it where float32 is what it is fast in, at a fifth of the rate."""
    if device == "cpu":
        return "llama-124m" if default_dtype() == torch.bfloat16 else "llama-30m"
    free = torch.cuda.mem_get_info()[0]
    fits = [name for name in PRESETS if name.startswith("llama") and 2 * preset(name).n_params < 0.66 * free]
    return max(fits, key=lambda name: preset(name).n_params)


def chosen(args):
    """The names of the experiments that were asked for; ValueError where one is unknown or cannot run as asked. What can only be
    simulated needs no --hardware."""
    names = args.experiments or ["ceilings", "table2", "table4"]
    if names == ["all"]:
        names = [name for name, what in EXPERIMENTS.items() if what.needs != "stages" and not (args.hardware and what.only == "measured")
                 and (args.peers or name != "peers")]  # who has no peers has nothing to set beside ours
    for name in names:
        if name not in EXPERIMENTS:
            known = f"one of {', '.join(EXPERIMENTS)}; or, by itself, all or list"
            raise ValueError(f"{name} stands by itself, not in {' '.join(names)}" if name in ("all", "list") else f"unknown experiment {name!r}: {known}")
    only, needs = ([getattr(EXPERIMENTS[name], key) for name in names] for key in ("only", "needs"))
    if {*only} == {"simulated"} and not args.hardware:
        args.hardware = "a6000"
    if args.hardware and "measured" in only:
        measured = sorted(name for name, kind in zip(names, only) if kind == "measured")
        raise ValueError(f"hardware = {args.hardware!r}: {' and '.join(measured)} can only be measured, on this machine")
    for knob in ("slo", "max_waiting"):
        if getattr(args, knob) and names != ["online"]:
            raise ValueError(f"{knob} = {getattr(args, knob):g}: experiments compare whole runs; only online, by itself, counts who is refused")
    if args.pp > 1 and ({*needs} != {"stages"} or args.chunk == "auto"):
        staged = ", ".join(name for name, what in EXPERIMENTS.items() if what.needs == "stages")
        raise ValueError(f"pp = {args.pp}: only {staged} runs on stages; fig12 and bubbles simulate eight and four of them")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and (args.hardware or "one process" in needs):
        raise ValueError(f"{' '.join(names)}{' on ' if args.hardware else ''}{args.hardware}: needs one process, start it without torchrun")
    return names


def int_or_auto(text):
    """--chunk"""
    if text != "auto" and not text.isdigit():
        raise ArgumentTypeError(f"{text!r}: must be a whole number or auto")
    return text if text == "auto" else int(text)


def main():
    """python bench.py [experiment ...] [flags]"""
    parser = Parser(description="Reproduce the papers' tables and figures on this machine.",
                    epilog="Examples: python bench.py --chunk 256 | python bench.py table4 fig9 --hardware a6000 --model llama-13b | python bench.py online "
                           "--arrivals gamma:0.9x:3 --schedulers sarathi,orca")
    parser.add_argument("experiments", nargs="*", help="names from `bench.py list`, or all (peers only with --peers); if none is given: ceilings table2 table4")
    add_model_flags(parser, None)
    parser.add_fields(BenchConfig, "the experiment")
    parser.add_fields(EngineConfig, "the engine", chunk=dict(type=int_or_auto, metavar="CHUNK|auto"), n_page=dict(help=SUPPRESS),
                      memory_gb=dict(help=SUPPRESS))  # which every experiment chooses
    args = parser.parse_args()
    if args.experiments[:1] == ["peer"] and len(args.experiments) >= 5:  # another engine's Python, started by Worker
        return peer(*args.experiments[1:])
    if args.experiments == ["list"]:
        for name, what in EXPERIMENTS.items():
            print(f"{name:{max(map(len, EXPERIMENTS))}} {what.about}")
        return
    names = chosen(args)
    if args.chunk == "auto":
        args.chunk, names = 256, ["profile", *(n for n in names if n != "profile")]
    config, options = BenchConfig(tp=args.tp, **parser.values(BenchConfig, args)), EngineConfig(**parser.values(EngineConfig, args))
    make_scheduler(options.scheduler)
    check_writable(config)
    if config.hardware:
        name = args.model or "llama-13b"
        model = CostModel.roofline(preset(name), config.hardware, config.tp)
    else:
        world = join_world(args)
        name = args.model or ("llama-30m" if names == ["fig12_measured"] else biggest_llama(args.device))  # many processes share the machine
        model, _ = load_model(name, args.dtype or default_dtype(args.device), args.device, options.seed, world)
    bench, where = Bench(model, config, options, name), machine(model)
    print(f"{name} ({model.config.whole.n_params / 1e6:.0f}M parameters, {where['dtype']}) on {where['name']}; "
          "the column `paper` holds the papers' numbers: LLaMA-13B on an A6000, unless a row says otherwise")
    rows = run(bench, names)
    if config.trace and bench.world.rank == 0:
        write_trace(config.trace, bench.tapes)
    explain(bench, rows)
    print(report(bench, " ".join(names), rows))
    if bench.interrupted:
        raise KeyboardInterrupt


if __name__ == "__main__":
    run_cli(main)
