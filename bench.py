"""The papers' tables and figures, measured on this machine with the engine of sarathi.py. One registered function per table.

    python bench.py --chunk 256          ceilings, Table 2 and Table 4 beside the paper's numbers (about a minute on 2 cores)
    python bench.py --chunk auto         first the one-time profile that picks the chunk for this model on this machine
    python bench.py table4 --model tinyllama-1.1b --max-batch 4
    python bench.py list

Every experiment prints a Markdown table (paper | ours | source); the last line of stdout is one JSON object with all rows.
"""
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from tqdm import tqdm

from kernels import linear, pack
from model import GPT, PRESETS, Linear, default_dtype, load_model, preset
from sarathi import (Engine, EngineConfig, Interruptible, Parser, Request, add_model_flags, checked, make_scheduler, option,
                     run_cli)

EXPERIMENTS = {}  # name -> (function, one line on what it reproduces)
OPERATORS = ("preproj", "attn", "postproj", "ffn_ln1", "ffn_ln2")  # [SARATHI Table 1]
BASELINES = ("static", "orca")
PEERS = ("transformers", "vllm", "llama.cpp")


def experiment(about):
    """Register a function bench -> rows (a list or a generator) under its own name; `about` says what it reproduces."""
    def register(f):
        EXPERIMENTS[f.__name__] = (f, about)
        return f
    return register


@dataclass
class BenchConfig:
    """What to run an experiment on, beyond the engine's own options."""
    lengths: str = option("", "prompt + output tokens per request, three lengths with commas; '': 256,512,768 on a CPU, 1024,2048,3072 on a GPU")
    pd: float = option(0.0, "prefill tokens per decode token, P:D; 0: chunk / (B - 1), where decodes piggyback perfectly [SARATHI §4.4]")
    requests: int = option(10, "requests in each end-to-end run")
    repeats: int = option(5, "timings of which the median counts, taken in turns after a warm-up; end-to-end runs: half as many")

    peers: str = option("", "engines that `peers` measures beside ours: name=path with commas between them; transformers=, vllm=: a Python that "
                        "has it; llama.cpp=: the folder of llama-batched-bench; '': transformers, if this Python has it")

    def __post_init__(self):
        for name, _, path in (part.partition("=") for part in self.peers.split(",") if part):
            if name not in PEERS or not path:
                raise ValueError(f"peers = {self.peers!r}: must be name=path with commas between them, names among {', '.join(PEERS)}")
        checked("requests", self.requests, int, 1)
        checked("repeats", self.repeats, int, 1)
        checked("pd", self.pd, float, 0)
        try:
            lengths = [int(x) for x in self.lengths.split(",") if self.lengths]
        except ValueError:
            lengths = [0]
        if any(x < 8 for x in lengths):
            raise ValueError(f"lengths = {self.lengths!r}: must be whole numbers of at least 8 with commas between them")
        self.lengths = lengths


# ---------------------------------------------------------------- measuring

class Bench:
    """What an experiment gets: the model, the options, and the means to time things."""

    def __init__(self, model, config, engine):
        self.model, self.config, self.options = model, config, engine
        self.B = engine.max_batch or 6  # as in [SARATHI Table 4]
        self.lengths = config.lengths or ([1024, 2048, 3072] if model.device.type == "cuda" else [256, 512, 768])
        if max(self.lengths) > model.config.block_size:
            raise ValueError(f"lengths {self.lengths}: the model's context ends at {model.config.block_size}")
        self.notes = []  # sentences printed under the tables
        self.interrupt = Interruptible()

    def engine(self, scheduler, L, n_page=None, max_batch=None):
        """A fresh engine with room for B requests of L tokens."""
        options = vars(self.options) | dict(scheduler=scheduler, max_batch=max_batch or self.B, n_page=n_page or self.B * L)
        return Engine(self.model, **options)

    def rounds(self, *fns, repeats=None):
        """The times of each fn(), taken in turns after a warm-up, so that a machine that drifts hits all alike -> a list per fn."""
        for f in fns:
            f()
        took = [[] for _ in fns]
        for _ in range(repeats or self.config.repeats):
            for f, ts in zip(fns, took):
                ts.append(self.once(f))
        return took

    def seconds(self, *fns, repeats=None):
        """The median time of each fn()."""
        return [statistics.median(ts) for ts in self.rounds(*fns, repeats=repeats)]

    def marginal(self, more, less):
        """What more() costs beyond less(): the median difference within a round, over twice the usual rounds."""
        return statistics.median(a - b for a, b in zip(*self.rounds(more, less, repeats=2 * self.config.repeats)))

    def once(self, f):
        """Seconds of one f(); after a Ctrl-C the next call ends the run."""
        if self.interrupt.seen:
            raise KeyboardInterrupt
        self.sync()
        start = time.perf_counter()
        f()
        self.sync()
        return time.perf_counter() - start

    def sync(self):
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()

    def iteration(self, decodes, context, chunk, past=0):
        """A function that runs one iteration: `decodes` requests that feed one token each after `context` cached ones, and one
        request that feeds `chunk` tokens after `past`. Tokens and cache are random: equal ones would run cooler, and so faster."""
        engine = self.engine("orca", 0, n_page=decodes * (context + 1) + chunk + past + 1)
        engine.kv.normal_()
        plan = []
        for n_past, n in [(context, 1)] * decodes + [(past, chunk)] * (chunk > 0):
            r = Request(prompts(1, n_past + n, self.model.config.vocab_size, engine.n_added)[0], max_new_tokens=1)
            engine.add(r)
            engine.pool.hold(r.id, n_past + n, n_past + n)
            r.n_past = n_past
            plan.append((r, n))
        batch = engine._pack(plan)
        return lambda: self.model(batch, engine.kv)

    @contextmanager
    def operators(self, *more):
        """Time each operator of every layer (and the modules named in more) while the block runs -> {operator: seconds}, by hooks
        on the modules' names."""
        took, started, hooks = dict.fromkeys(OPERATORS + more, 0.0), {}, []

        def before(name):
            def hook(*_):
                self.sync()
                started[name] = time.perf_counter()
            return hook

        def after(name):
            def hook(*_):
                self.sync()
                took[name] += time.perf_counter() - started[name]
            return hook

        for path, module in self.model.named_modules():
            name = path.rpartition(".")[2]
            if name in took:
                hooks += [module.register_forward_pre_hook(before(name)), module.register_forward_hook(after(name))]
        try:
            yield took
        finally:
            for h in hooks:
                h.remove()


def row(what, paper, ours, source="measured", **more):
    """One line of a table; what is its name and unit, paper the published figure or None."""
    return dict(what=what, paper=paper, ours=ours, source=source, **more)


def prompts(n, length, vocab_size, seed):
    """n prompts of `length` random token ids."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (n, length), generator=rng).tolist()


# ---------------------------------------------------------------- experiments

def ceiling_work(bench):
    """What the ceilings are timed on: more weights than any cache holds, streamed past one row, and one matrix times many rows
    -> (stream, its bytes), (gemm, its FLOPs)"""
    c, dtype, device = bench.model.config, bench.model.dtype, bench.model.device
    C = max(c.n_embd, 512)
    w = [pack(torch.randn(4 * C, C, dtype=dtype, device=device)) for _ in range(1 + int(5e8) // (4 * C * C * dtype.itemsize))]
    one, many = torch.randn(1, C, dtype=dtype, device=device), torch.randn(512, C, dtype=dtype, device=device)

    def stream():
        for x in w:
            linear(one, x)

    def gemm():
        for _ in range(8):
            linear(many, w[0])
    return (stream, len(w) * 4 * C * C * dtype.itemsize), (gemm, 8 * 2 * 512 * 4 * C * C)


@experiment("the machine's GEMM rate and bandwidth, and how many tokens one weight read pays for")
def ceilings(bench):
    """The knee: 2 N FLOP per weight take as long as reading it."""
    (stream, size), (gemm, flops) = ceiling_work(bench)
    read, multiply = bench.seconds(stream, gemm)
    bandwidth, rate = size / read, flops / multiply
    bench.knee = rate * bench.model.dtype.itemsize / 2 / bandwidth
    return [row("GEMM rate (GFLOP/s)", 154800, rate / 1e9), row("bandwidth, weights streamed (GB/s)", 768, bandwidth / 1e9),
            row("knee: tokens that one weight read pays for", 154800 / 768, bench.knee)]


TABLE2 = {  # [SARATHI Table 2], ms, LLaMA-13B on an A6000: linear, attn, total, per token of the named phase
    "prefill-only": (224.8, 10.0, 234.8, 0.229), "decode-only": (44.28, 5.68, 49.96, 12.49), "decode-maximal": (223.2, 15.2, 238.4, 1.2)}


@experiment("[SARATHI Table 2] the time of a prefill-only, a decode-only and a decode-maximal batch, by operator")
def table2(bench):
    """Totals are timed without the operators' hooks; the hooked run only says how a total splits."""
    L, d = min(1024, bench.model.config.block_size - 1, max(bench.lengths)), 3
    context = L - 1
    batches = {"prefill-only": (bench.iteration(0, 0, L), L), "decode-only": (bench.iteration(d + 1, context, 0), d + 1),
               "decode-maximal": (bench.iteration(d, context, L - d), d)}
    piggybacked = bench.marginal(batches["decode-maximal"][0], bench.iteration(0, 0, L - d)) / d
    totals = bench.seconds(*(f for f, n in batches.values()))
    rows = []
    for (name, (f, n)), total, paper in zip(batches.items(), totals, TABLE2.values()):
        with bench.operators() as took:
            for _ in range(3):
                f()
        share = sum(took.values())
        linear_s, attn_s = (total * x / share for x in (share - took["attn"], took["attn"]))
        rows += [row(f"{name}: linear (ms)", paper[0], linear_s * 1e3), row(f"{name}: attn (ms)", paper[1], attn_s * 1e3),
                 row(f"{name}: total (ms)", paper[2], total * 1e3, operators_ms={k: v / 3 * 1e3 for k, v in took.items()})]
        each = piggybacked if name == "decode-maximal" else total / n
        rows.append(row(f"{name}: per {'prefill' if name == 'prefill-only' else 'decode'} token (ms)", paper[3], each * 1e3))
    return rows


TABLE4 = [(5.45, 1.33), (3.26, 1.26), (2.51, 1.22)]  # [SARATHI Table 4] LLaMA-13B, A6000, L = 1K, 2K, 3K: decode speedup, gain
ORCA = [1.11, None, None]  # [SARATHI Fig. 11] best case at 1K, over static


@experiment("[SARATHI Table 4] decode speedup and end-to-end gain over request-level batching and Orca, for three lengths")
def table4(bench):
    """At P:D = C / (B - 1) unless --pd says otherwise; whole runs of every scheduler in turns."""
    B, C, name = bench.B, bench.options.chunk, bench.options.scheduler
    pd = bench.config.pd or C / max(1, B - 1)
    schedulers = [*BASELINES, *([name] if name not in BASELINES else [])]
    bar = tqdm(total=len(bench.lengths) * (len(schedulers) * max(1, bench.config.repeats // 2) + 1), desc="table4", file=sys.stderr)
    for i, L in enumerate(bench.lengths):
        speedup, piggybacked = decode_speedup(bench, L)
        bar.update()
        D = max(1, round(L / (1 + pd)))
        took = end_to_end(bench, schedulers, L - D, D, bar)
        paper = TABLE4[i] if i < len(TABLE4) else (None, None)
        note = f"L = {L}, B = {B}, P:D = {(L - D) / D:.0f}"
        gain = {s: statistics.median(a / b for a, b in zip(took[s], took[name])) for s in BASELINES}  # within a round: drift cancels
        yield row(f"{note}: decode speedup", paper[0], speedup, decode_ms=piggybacked * 1e3)
        yield row(f"{note}: {name} over static", paper[1], gain["static"], seconds=took)
        yield row(f"{note}: {name} over orca", None if ORCA[i:i + 1] in ([], [None]) else paper[1] / ORCA[i], gain["orca"])
    bar.close()


def decode_speedup(bench, L):
    """How much cheaper a decode is that rides along with a chunk: (T_decode(B) / B) over its marginal time
    (T(p + d) - T(p)) / d [SARATHI §5.1] -> (speedup, marginal seconds); the speedup is None where none rides along (B = 1) or
    the difference drowns in noise."""
    B, d = bench.B, bench.B - 1
    p = max(1, min(bench.options.chunk, L) - d)
    (decodes,) = bench.seconds(bench.iteration(B, L - 1, 0))
    marginal = bench.marginal(bench.iteration(d, L - 1, p), bench.iteration(0, 0, p)) / max(1, d)
    return decodes / B / marginal if d and marginal > 0 else None, marginal


def end_to_end(bench, schedulers, P, D, bar=None):
    """The seconds each scheduler takes for the same requests of P prompt and D new tokens, run in turns -> {scheduler: [seconds]}"""
    work = prompts(bench.config.requests, P, bench.model.config.vocab_size, bench.options.seed)
    engines = {s: bench.engine(s, P + D) for s in schedulers}
    took = {s: [] for s in schedulers}
    for _ in range(max(1, bench.config.repeats // 2)):
        for s, engine in engines.items():
            took[s].append(bench.once(lambda: engine.generate(work, max_new_tokens=D)))
            if bar:
                bar.update()
    return took


@experiment("[SARATHI §4.2, §4.4] the one-time profile that picks chunk and tile for this model on this machine")
def profile(bench):
    """Sets the chunk and the tile of the experiments that follow."""
    B, L = bench.B, max(bench.lengths)
    pd = bench.config.pd or 50.0
    sizes = [n for n in (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024) if n < L]
    fns = [bench.iteration(0, 0, n) for n in sizes for n in (n, n + 1)]
    (t_decode,) = bench.seconds(bench.iteration(B, L // 2, 0))
    times = bench.seconds(*tqdm(fns, "profile", file=sys.stderr))
    T, jump = dict(zip(sizes, times[::2])), {n: b / a for n, a, b in zip(sizes, times[::2], times[1::2])}
    steps = [t for t in (32, 64, 128) if t in jump and jump[t] > 1.08]  # one more token, a whole tile more time [Fig. 7]
    tile = max(steps, default=1)

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


# ---------------------------------------------------------------- this machine: its ceilings, its peers

SHAPES = {"prefill 512": (0, 0, 512), "decode, B = 1, context 256": (1, 255, 0), "decode, B = 8, context 256": (8, 255, 0),
          "decode, B = 16, context 256": (16, 255, 0), "decode, B = 16, context 1024": (16, 1023, 0),
          "chunk of 249 + 7 decodes, context 256": (7, 255, 249)}  # arguments of Bench.iteration


def demand(c, decodes, context, chunk, itemsize):
    """The arithmetic of one iteration -> {operator: (FLOPs, bytes of weights or of K and V)}, all layers."""
    N, M, H, Hk, D = decodes + chunk, decodes + (chunk > 0), c.n_head, c.n_kv_head, c.head_dim  # tokens, rows with logits
    weights = dict(preproj=c.n_embd * (H + 2 * Hk) * D, postproj=H * D * c.n_embd,
                   ffn_ln1=c.n_embd * c.n_inner * (2 if c.llama else 1), ffn_ln2=c.n_inner * c.n_embd)
    work = {name: (2 * N * w * c.n_layer, w * c.n_layer * itemsize) for name, w in weights.items()}
    pairs = decodes * (context + 1) + chunk * (chunk + 1) / 2  # of a query with a key it sees
    work["attn"] = 4 * D * H * c.n_layer * pairs, c.page_bytes(itemsize) * (decodes * (context + 1) + chunk)
    work["head"] = 2 * M * c.n_embd * c.vocab_size, c.n_embd * c.vocab_size * itemsize
    return work


@experiment("every operator's FLOP/s and bytes/s beside this machine's ceilings, by batch shape, and what the engine adds")
def roofline(bench):
    """`ours` is the share of the ceiling: what FLOPs or bytes take at the measured ceilings, whichever is more, over the time
    they took. `all` counts every FLOP and byte of the model once."""
    c, itemsize = bench.model.config, bench.model.dtype.itemsize
    shapes = {name: s for name, s in SHAPES.items() if max(s[1] + 1, s[2]) < c.block_size}
    (stream, size), (gemm, flops) = ceiling_work(bench)
    runs = [bench.iteration(*s) for s in shapes.values()]
    read, multiply, *totals = bench.seconds(stream, gemm, *tqdm(runs, "roofline", file=sys.stderr))
    rate, bandwidth = flops / multiply, size / read
    for (name, s), f, total in zip(shapes.items(), runs, totals):
        with bench.operators("head") as took:
            for _ in range(3):
                f()
        work = demand(c, *s, itemsize)
        work["all"] = tuple(map(sum, zip(*work.values())))
        hooked = took | {"all": 3 * total}
        for op, (fl, by) in work.items():
            t = hooked[op] / 3
            yield row(f"{name}: {op}", None, max(fl / rate, by / bandwidth) / t, **{"ms": t * 1e3, "GFLOP/s": fl / t / 1e9, "GB/s": by / t / 1e9})
    inside, outside = overhead(bench)
    yield row("engine at B = 8: share of an iteration outside the model", None, outside / (inside + outside),
              **{"ms": outside * 1e3, "GFLOP/s": None, "GB/s": None})


def overhead(bench, B=8, context=256, steps=32):
    """Seconds per decode iteration of the engine (inside the model, outside it: planning, packing, sampling), medians."""
    engine, model, inside = bench.engine("orca", 0, n_page=B * (context + steps), max_batch=B), bench.model, []
    for p in prompts(B, context, model.config.vocab_size, bench.options.seed):
        engine.add(Request(p, max_new_tokens=steps))
    engine.model = lambda batch, kv: inside.append(bench.once(lambda: out.append(model(batch, kv)))) or out.pop()
    engine.model.config, engine.model.dtype, engine.model.device = model.config, model.dtype, model.device
    out, total = [], []
    while engine.requests:
        total.append(bench.once(engine.step))
    return statistics.median(inside[1:]), statistics.median(t - i for t, i in zip(total[1:], inside[1:]))


class Ours:
    """This engine as the peers are asked: run(prompts, new) -> for each request, when each new token came, seconds after the call."""

    def __init__(self, bench, scheduler):
        self.engine = bench.engine(scheduler, 0, n_page=16 * 1100, max_batch=16)

    def run(self, work, new):
        start, requests = self.engine.clock.now(), [Request(p, max_new_tokens=new) for p in work]
        for r in requests:
            self.engine.add(r)
        self.engine.run()
        return [[t - start for t in r.times] for r in requests]


class Transformers:
    """Hugging Face transformers: generate() on one static batch."""

    def __init__(self, folder, dtype):
        import transformers
        transformers.utils.logging.set_verbosity_error()
        self.clock = transformers.LogitsProcessorList([self.stamp])
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def stamp(self, ids, scores):
        self.times.append(time.perf_counter())
        return scores

    @torch.inference_mode()
    def run(self, work, new):
        ids, self.times, start = torch.tensor(work), [], time.perf_counter()
        self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0,
                            eos_token_id=None, logits_processor=self.clock)
        return [[t - start for t in self.times]] * len(work)


class VLLM:
    """vLLM: its own engine in this process, continuous batching with chunked prefill at its default budget."""

    def __init__(self, folder, dtype):
        os.environ |= dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1",
                           VLLM_CPU_KVCACHE_SPACE="2")
        import vllm
        from vllm.sampling_params import RequestOutputKind
        self.engine = vllm.LLM(model=folder, skip_tokenizer_init=True, dtype=dtype, max_model_len=2048, max_num_seqs=16,
                               max_num_batched_tokens=2048, enable_prefix_caching=False, seed=0).llm_engine
        self.sampling = lambda new: vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False,
                                                        output_kind=RequestOutputKind.DELTA)
        self.n_added = 0

    def run(self, work, new):
        times, start = {}, time.perf_counter()
        for p in work:
            self.n_added += 1
            times[str(self.n_added)] = []
            self.engine.add_request(str(self.n_added), dict(prompt_token_ids=p), self.sampling(new))
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
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        r = [json.loads(line) for line in out.splitlines() if line.startswith("{")][1]
        return [[r["t_pp"] + r["t_tg"] * i / new for i in range(1, new + 1)]] * B


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
    """A peer in a Python of its own, which runs this file as `bench.py peer NAME FOLDER DTYPE` and answers line by line."""

    def __init__(self, python, name, folder, dtype):
        lib, env = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(python))), "lib", "libiomp5.so"), dict(os.environ)
        preload = [p for p in ("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", lib) if name == "vllm" and os.path.exists(p)]
        env["LD_PRELOAD"] = ":".join(preload)  # as vLLM's manual asks
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([python, __file__, "peer", name, folder, dtype], env=env, text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=self.log)
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


def peer(name, folder, dtype):
    """The other end of Worker."""
    engine = dict(transformers=Transformers, vllm=VLLM)[name](folder, dtype)
    print("@null", flush=True)
    for line in sys.stdin:
        print("@" + json.dumps(engine.run(*json.loads(line))), flush=True)


def start_peers(bench, folder):
    """The peers that --peers names and that start -> {name: something with run}. What does not start becomes a note."""
    dtype, asked = str(bench.model.dtype).removeprefix("torch."), bench.config.peers
    if not asked and importlib.util.find_spec("transformers"):
        asked = f"transformers={sys.executable}"
    engines = {}
    for name, _, path in (part.partition("=") for part in asked.split(",") if part):
        try:
            engines[name] = LlamaCpp(path, dtype, bench.model) if name == "llama.cpp" else Worker(path, name, folder, dtype)
        except (OSError, RuntimeError, ImportError) as e:
            bench.notes.append(f"{name} is not measured: {e}")
    return engines


CELLS = {"prefill 512": (1, 512, 1)} | {f"decode, B = {B}, context {ctx}": (B, ctx, 72) for B, ctx in (
    (1, 256), (4, 256), (8, 256), (16, 256), (1, 1024), (16, 1024))} | {"16 x (480 in + 32 out)": (16, 480, 32), "16 x (256 in + 64 out)": (16, 256, 64)}


def rate_of(times, B, P, new):
    """Tokens per second of a cell: of the prompt, of 32 decode steps with all B in flight, or of the whole run; and, of whole
    runs, the 99th percentile of the gaps between a request's tokens."""
    if new == 1:
        return B * P / times[0][0], None
    if new != 72:
        gaps = sorted(b - a for ts in times for a, b in zip(ts, ts[1:]))
        return B * (P + new) / max(ts[-1] for ts in times), gaps[int(0.99 * len(gaps))]
    start = max(ts[0] for ts in times)
    after = [[t for t in ts if t > start][:32] for ts in times]
    return sum(map(len, after)) / (max(ts[-1] for ts in after) - start), None


@experiment("tokens per second beside transformers, llama.cpp and vLLM, the same work in rounds; --peers says where they are")
def peers(bench):
    """Every cell in every engine in turns, so that the machine's drift hits all alike. Rows are medians over the rounds, `x best`
    is the median over rounds of ours over the best peer's."""
    c = bench.model.config
    cells = {name: cell for name, cell in CELLS.items() if cell[1] + cell[2] <= c.block_size}
    with tempfile.TemporaryDirectory() as folder:
        GPT(c).to(bench.model.dtype).save_pretrained(folder)  # other weights of the same shapes
        engines = start_peers(bench, folder)
        ours = Ours(bench, "prefill_first"), Ours(bench, bench.options.scheduler)
        rates, p99 = {}, {}
        for i in tqdm(range((1 + bench.config.repeats) * len(cells)), "peers", file=sys.stderr):
            (cell, (B, P, new)), n = list(cells.items())[i % len(cells)], i // len(cells)
            work = prompts(B, P, c.vocab_size, bench.options.seed)
            for name, engine in rotated([("sarathi", ours[cell.startswith("16 x")]), *engines.items()], n):
                time.sleep(0.3)  # the last one's threads stop spinning
                rate, gap = rate_of(engine.run(work, new), B, P, new)
                if n:  # the first round is the warm-up
                    rates.setdefault((cell, name), []).append(rate)
                    p99.setdefault((cell, name), []).append(gap)
        for engine in engines.values():
            if isinstance(engine, Worker):
                engine.process.kill()
    middle = lambda xs: statistics.median(xs) if xs and None not in xs else None
    for cell in cells:
        for what, of, best in (("tokens/s", rates, max), ("inter-token p99, ms", {k: [g and g * 1e3 for g in v] for k, v in p99.items()}, min)):
            mine = of[cell, "sarathi"]
            if None not in mine:
                ratios = [a / best(b) for a, *b in zip(mine, *(of[cell, name] for name in engines))] if engines else None
                yield row(f"{cell}: {what}", None, middle(mine), **{name: middle(of[cell, name]) for name in engines}, **{"x best": middle(ratios)})


def rotated(items, n):
    """items, begun at the n-th."""
    n %= len(items)
    return items[n:] + items[:n]


# ---------------------------------------------------------------- running and printing

def run(bench, names):
    """Run experiments in order and print each one's table as it ends -> all rows. Ctrl-C ends it with what was measured so far."""
    rows = []
    with bench.interrupt:
        for name in names:
            part = []
            try:
                for r in EXPERIMENTS[name][0](bench):
                    part.append(dict(experiment=name, **r))
            except KeyboardInterrupt:
                names = []
            if part:
                print(f"\n### {name}: {EXPERIMENTS[name][1]}\n\n{table(part)}\n", flush=True)
            while bench.notes:
                print(bench.notes.pop(0) + "\n", flush=True)
            rows += part
            if not names:
                print("interrupted: the tables hold what was measured so far", file=sys.stderr)
                break
    return rows


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
    """What the numbers were measured on."""
    if model.device.type == "cuda":
        name = torch.cuda.get_device_name()
    else:
        name = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "") \
            if os.path.exists("/proc/cpuinfo") else platform.processor()
        name = f"{name or platform.machine()}, {torch.get_num_threads()} threads"
    return dict(name=name, torch=torch.__version__, dtype=str(model.dtype).removeprefix("torch."))


def explain(bench, rows):
    """The result on this machine in one sentence."""
    speedups = [r["ours"] for r in rows if r["what"].endswith("decode speedup") and r["ours"] is not None]
    gains = [r["ours"] for r in rows if r["what"].endswith("over static")]
    if speedups and gains and hasattr(bench, "knee"):
        bound = bench.knee / bench.B
        print(f"One weight read pays for {bench.knee:.0f} tokens on this machine and a batch of {bench.B} decodes uses {bench.B} of them, so a "
              f"decode that rides along with a chunk can be at most about {bench.knee:.0f} / {bench.B} = {bound:.1f} times cheaper (measured: "
              f"{min(speedups):.1f} to {max(speedups):.1f}: attention and the output head ride at full price); end to end that is worth "
              f"{min(gains):.2f} to {max(gains):.2f} times the throughput of request-level batching.\n")


def biggest_llama(device):
    """The largest LLaMA preset whose 16-bit weights leave a third of the GPU's memory free; llama-160m on a CPU."""
    if device == "cpu":
        return "llama-160m"
    free = torch.cuda.mem_get_info()[0]
    fits = [name for name in PRESETS if name.startswith("llama") and 2 * preset(name).n_params < 0.66 * free]
    return max(fits, key=lambda name: preset(name).n_params)


def main():
    """python bench.py [experiment ...] [flags]"""
    parser = Parser(description="Reproduce the papers' tables and figures on this machine.",
                    epilog="Examples: python bench.py --chunk 256 | python bench.py --chunk auto | python bench.py table4 --scheduler sarathi_serve")
    parser.add_argument("experiments", nargs="*", help="names from `bench.py list`, or all; none: ceilings table2 table4")
    add_model_flags(parser, None)
    parser.add_fields(BenchConfig)
    parser.add_fields(EngineConfig, chunk=dict(type=lambda x: x if x == "auto" else int(x), metavar="CHUNK|auto"))
    args = parser.parse_args()
    if args.experiments[:1] == ["peer"]:
        return peer(*args.experiments[1:])
    if args.experiments == ["list"]:
        for name, (_, about) in EXPERIMENTS.items():
            print(f"{name:12} {about}")
        return
    names = list(EXPERIMENTS) if args.experiments == ["all"] else args.experiments or ["ceilings", "table2", "table4"]
    for name in names:
        if name not in EXPERIMENTS:
            raise ValueError(f"unknown experiment {name!r}: one of {', '.join(EXPERIMENTS)}, all, list")
    if args.chunk == "auto":
        args.chunk, names = 256, ["profile", *(n for n in names if n != "profile")]
    config, options = BenchConfig(**parser.values(BenchConfig, args)), EngineConfig(**parser.values(EngineConfig, args))
    make_scheduler(options.scheduler)
    dtype = getattr(torch, args.dtype) if args.dtype else default_dtype(args.device)
    name = args.model or biggest_llama(args.device)
    model, _ = load_model(name, dtype, args.device, options.seed)
    bench = Bench(model, config, options)
    where = machine(model)
    print(f"{name} ({model.config.n_params / 1e6:.0f}M parameters, {where['dtype']}) on {where['name']}; paper: LLaMA-13B on an A6000")
    rows = run(bench, names)
    explain(bench, rows)
    print(json.dumps(dict(experiment=" ".join(names), rows=rows, machine=where, model=name, seed=options.seed,
                          options=vars(options), date=time.strftime("%Y-%m-%d"))))


if __name__ == "__main__":
    run_cli(main)
