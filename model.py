"""GPT-2 and LLaMA over a flat batch of tokens. This file knows weights, operators and checkpoints; it has never heard of a request.

    GPT.from_preset("llama-160m")        random weights, any size
    GPT.from_pretrained("folder")        Hugging Face folders: config.json and *.safetensors, gpt2 and llama families
    Adapter.from_pretrained("folder", config), random_adapter(rank)    LoRA weights, packed as the pool's pages hold them
    model(batch, kv)                     one iteration of the engine: N flat tokens in, M rows of logits out
    model.logits(tokens)                 the oracle: whole sequences, no cache, float32
    python model.py                      train the tiny model, its one-layer draft and its heads on this Python's own sources (3 to 5 minutes)
"""
import codecs
import contextlib
import json
import math
import mmap
import os
import platform
import re
import sys
import sysconfig
import unicodedata
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import (FEW_ROWS, MOST_CHUNKS, Factors, Lora, LoraPages, Pages, Rows, Segment, Site, World, activate, add_norm, attention, cdiv,
                     filled, linear, lora, pack, pow2, rope_angles, rotate_write, round_up, split_heads, upload)


def checked(name, value, kind, low, high=math.inf):
    """value, if it is a number (kind float) or a whole one (kind int) in low .. high, and below 2^63; else a ValueError that says so."""
    is_number = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if is_number and low <= value <= high and value < 2**63:
        return value
    span = f"in {low:g} .. {high:g}" if high < math.inf else f"at least {low:g}" + " and below 2^63" * (is_number and value >= 2**63)
    raise ValueError(f"{name} = {value!r}: must be a {'whole ' if kind is int else ''}number, {span}")


DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}  # of weights and cache


def dtype_of(dtype):
    """One of DTYPES, given as it is or by its name; ValueError for any other."""
    known = (DTYPES | {"float64": torch.float64}).get(str(dtype).removeprefix("torch."))  # which tests compare with
    if known is None:
        raise ValueError(f"dtype = {dtype!r}: one of {', '.join(DTYPES)}")
    return known


def default_dtype(device="cpu"):
    """bfloat16 where the hardware multiplies it; else float16 on a GPU (before Ampere: a T4), float32 on a CPU. One that only imitates
    it (AVX-512 without BF16: Ice Lake, Tiger Lake) takes five times as long in bfloat16 as in float32."""
    if device != "cpu":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    fast = torch.cpu._is_avx512_bf16_supported if x86 else lambda: torch.ops.mkldnn._is_mkldnn_bf16_supported()  # Apple's torch lacks it
    return torch.bfloat16 if torch.backends.mkldnn.is_available() and fast() else torch.float32


ROPE = {"default": (), "linear": ("factor",),  # rotary scaling -> the numbers that it needs
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}


@dataclass
class GPTConfig:
    """The shape of a model. `family` decides the rest: "llama" has RoPE, RMSNorm and SwiGLU, "gpt2" has learned positions,
    LayerNorm, GELU and biases."""
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_inner: int = 0  # 0: 4 * n_embd
    n_kv_head: int = 0  # 0: as many as n_head; fewer is grouped-query attention
    head_dim: int = 0  # 0: n_embd / n_head
    vocab_size: int = 50257
    block_size: int = 1024  # the longest context
    family: str = "llama"
    tied: bool = False  # the output head is the token embedding
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict = field(default_factory=dict)  # {} or Hugging Face's settings of one of ROPE
    part: tuple = (0, 1)  # (i, n): this is share i of n of every layer; n_head, n_kv_head and n_inner are the share's
    stage: tuple = (0, 1)  # (i, n): of the layers, cut into n stages, those of stage i are here

    def __post_init__(self):
        for f in fields(self):
            if f.type in (int, float):
                low = 1 if f.type is int and f.default else 0  # a size without a "0: as usual"
                checked(f.name, getattr(self, f.name), f.type, low)
        if self.rope_type not in ROPE:
            raise ValueError(f"rope_type = {self.rope_type!r} is not supported, only {' or '.join(map(repr, ROPE))}")
        for name in ROPE[self.rope_type]:
            checked(f"rope_scaling: {name}", self.rope_scaling.get(name), float, 1e-9)
        self.n_inner = self.n_inner or 4 * self.n_embd
        self.n_kv_head = self.n_kv_head or self.n_head
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        if self.family not in ("llama", "gpt2"):
            raise ValueError(f"family {self.family!r}: one of 'llama', 'gpt2'")
        if self.head_dim < 1 or self.llama and self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} (n_embd {self.n_embd} of n_head {self.n_head}): must be at least 1, and even in llama")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head {self.n_head} is not a multiple of n_kv_head {self.n_kv_head}")

    @property
    def llama(self):
        return self.family == "llama"

    @property
    def rope_type(self):
        """How positions beyond those of the training are reached."""
        return str(self.rope_scaling.get("rope_type") or self.rope_scaling.get("type") or "default")

    def share(self, world):
        """What this rank has: its part of every layer of its stage, so many heads and so much of the FFN [Megatron-LM, arXiv 1909.08053
        §3]. ValueError for what does not come out even. n_kv_head too: keys and values are on one device each, never copied."""
        n, stage = world.tp, (world.stage, world.pp)
        for name in ("n_head", "n_kv_head", "n_inner", "n_embd"):
            if getattr(self, name) % n:
                raise ValueError(f"tp = {n} devices cannot share {name} = {getattr(self, name)}: it must be a multiple of tp")
        if stage[1] > self.n_layer:
            raise ValueError(f"pp = {stage[1]} stages: there are only {self.n_layer} layers")
        return replace(self, n_head=self.n_head // n, n_kv_head=self.n_kv_head // n, n_inner=self.n_inner // n, part=(world.part, n), stage=stage)

    @property
    def whole(self):
        """The model that this is a share of."""
        n = self.part[1]
        return replace(self, n_head=self.n_head * n, n_kv_head=self.n_kv_head * n, n_inner=self.n_inner * n, part=(0, 1), stage=(0, 1))

    @property
    def layers(self):
        """The numbers of the layers that are here; what does not come out even makes the first stages longer."""
        i, n = self.stage
        return range(*(cdiv(j * self.n_layer, n) for j in (i, i + 1)))

    @property
    def is_first(self):
        """Whether tokens come in here, and not another stage's states."""
        return self.stage[0] == 0

    @property
    def is_last(self):
        """Whether logits come out here."""
        return self.stage[0] == self.stage[1] - 1

    @property
    def n_vocab(self):
        """Rows of the embedding and of the output head here; the last share's are filled up with zeros."""
        return cdiv(self.vocab_size, self.part[1])

    @property
    def widths(self):
        """{linear operator: (numbers in, numbers out) of a token}, one layer [SARATHI Table 1]; q, k, v in one, and gate and up."""
        shared = {op: sum(sizes) for op, sizes in pieces(self).items()}
        return {op: (n, self.n_embd) if op in REDUCED else (self.n_embd, n) for op, n in shared.items()}

    @property
    def n_params(self):
        """Parameters in all, embeddings included."""
        C, I, V, layer = self.n_embd, self.n_inner, self.n_vocab, sum(a * b for a, b in self.widths.values())
        n, first, last = len(self.layers), self.is_first, self.is_last
        norms = (2 * n + last) * C * (1 if self.llama else 2)
        biases = 0 if self.llama else n * (5 * C + I) + self.block_size * C * first  # and the learned positions
        return n * layer + norms + biases + V * C * (1 if self.tied and first else first + last)

    @cached_property
    def operators(self):
        """The linear operators of one layer [SARATHI Table 1]: {name: Operator}."""
        found, names, width = {}, hf_names(self), self.n_kv_head * self.head_dim
        for op, (n_in, n_out) in self.widths.items():
            sizes, first, page, modules = part_sizes(self, f"{op}.weight", n_out), 0, 0, {}
            if op in REDUCED:  # each share adds other columns of x A B to its partial sum of x W [S-LoRA §6]
                sizes, first = [n_out // self.part[1]], n_out // self.part[1] * self.part[0]
            for name, n in zip(names[f"blocks.0.{op}.weight"], sizes):
                modules[name.split(".0.")[1].removesuffix(".weight")] = first, n, page
                first, page = first + n, page + cdiv(n, width)
            found[op] = Operator(n_in, page, modules)
        return found

    @property
    def modules(self):
        """{checkpoint module that an adapter may change: the operator it is in}"""
        return {module: op for op, operator in self.operators.items() for module in operator.modules}

    def page_bytes(self, itemsize):
        """Bytes of one page: a token's K and V vectors in every layer (of the longest stage), m_kv in [SARATHI §4.3]."""
        return 2 * cdiv(self.n_layer, self.stage[1]) * self.n_kv_head * self.head_dim * itemsize


REDUCED = ("postproj", "ffn_ln2")  # where it is the input that is shared out: outputs are partial sums, to be added up


class Operator(NamedTuple):
    """One or several modules of a checkpoint, side by side in one matrix."""
    n_in: int
    n_page: int  # how many pages of one plane hold a row of the output, each module's part beginning a new one
    modules: dict  # checkpoint module -> (first column in the output, columns, first page)


PRESETS = {  # name -> GPTConfig fields; gpt3 and the two llamas of [SARATHI §4.5] by the paper, widths of the FFN by the models
    "tiny": dict(n_layer=4, n_head=4, n_embd=256, n_inner=704, vocab_size=257, block_size=1024, tied=True),
    "gpt2": dict(family="gpt2", n_layer=12, n_head=12, n_embd=768, tied=True),
    "gpt2-xl": dict(family="gpt2", n_layer=48, n_head=25, n_embd=1600, tied=True),
    "gpt3-175b": dict(family="gpt2", n_layer=96, n_head=96, n_embd=12288, block_size=4096, tied=True),  # 4K as in [SARATHI §5.3]
    "llama-30m": dict(n_layer=8, n_head=8, n_embd=512, n_inner=1408, vocab_size=8192, block_size=2048, tied=True),  # for a core
    "llama-124m": dict(n_layer=12, n_head=12, n_embd=768, n_inner=2048, vocab_size=50304, block_size=2048, tied=True),  # GPT-2's size
    "llama-160m": dict(n_layer=12, n_head=12, n_embd=768, n_inner=3072, vocab_size=32000, block_size=2048),
    "tinyllama-1.1b": dict(n_layer=22, n_head=32, n_kv_head=4, n_embd=2048, n_inner=5632, vocab_size=32000, block_size=2048),
    "llama-7b": dict(n_layer=32, n_head=32, n_embd=4096, n_inner=11008, vocab_size=32000, block_size=4096),
    "llama-13b": dict(n_layer=40, n_head=40, n_embd=5120, n_inner=13824, vocab_size=32000, block_size=4096),
    "llama-33b": dict(n_layer=60, n_head=52, n_embd=6656, n_inner=17920, vocab_size=32000, block_size=4096),
    "llama-70b": dict(n_layer=80, n_head=64, n_kv_head=8, n_embd=8192, n_inner=28672, vocab_size=32000, block_size=4096),
}


def preset(name):
    """The GPTConfig of a preset; an unknown name is a KeyError that lists the known ones."""
    if name not in PRESETS:
        raise KeyError(f"unknown preset {name!r}: one of {', '.join(PRESETS)}")
    return GPTConfig(**PRESETS[name])


@dataclass
class Batch:
    """One iteration, packed: N flat tokens of any number of requests, each request's rows side by side."""
    tokens: torch.Tensor  # (N,)
    positions: torch.Tensor  # (N,) in their own sequence
    rows: Rows | None  # where in kv the keys and values go
    logit_rows: torch.Tensor  # (M,) the rows whose next token is wanted
    segments: list[Segment] | Pages  # who attends to what; on a GPU Pages, and rows are theirs
    loras: dict[str, Lora | LoraPages] = field(default_factory=dict)  # operator -> the adapters that rows of this batch have there
    flat: torch.Tensor | None = None  # on a GPU: what all of these are views of
    newest: torch.Tensor | None = None  # (B,) the tokens that the iteration before, still running, samples: ~i in tokens stands for newest[i]

    @property
    def known(self):
        """tokens (N,), those from newest filled in: on the device, as the CPU does not know them yet."""
        if self.newest is None:
            return self.tokens
        row = ~self.tokens.clamp(max=-1)  # ~i: newest[i]; who is known looks at row 0, in vain
        return torch.where(self.tokens < 0, self.newest[row], self.tokens)

    def parts(self):
        return [self, self.segments, *self.loras.values()]

    def on(self, device, into=None):
        """Itself, or where it was packed for Triton's kernels, as numpy arrays: a copy on the device, as kernels.upload says."""
        if not isinstance(self.tokens, np.ndarray):
            return self
        flat, (own, pages, *loras) = upload(self.parts(), device, into)
        return replace(own, segments=pages, loras=dict(zip(self.loras, loras)), flat=flat)

    def padded(self, N, n_few, has_chunks, scratch):
        """The same with rows of nobody behind it, N in all, as Pages.padded says."""
        return replace(self, **{name: filled(getattr(self, name), N, 0) for name in ("tokens", "positions", "logit_rows")},
                       segments=self.segments.padded(N, n_few, has_chunks, scratch),
                       loras={name: l.padded(N, n_few, has_chunks) for name, l in self.loras.items()})

    def shape(self):
        """All that launches depend on: the shapes of arrays, the numbers that are none, the operators with adapters."""
        values = [getattr(part, f.name) for part in self.parts() for f in fields(part)]
        return (*self.loras, *(v.shape if isinstance(v, np.ndarray) else v for v in values if isinstance(v, (np.ndarray, int))))


# ---------------------------------------------------------------- the network: one class tree, named as in [SARATHI Table 1]

class Linear(nn.Linear):
    """y = x Wᵀ + b through kernels.linear: W may have been packed for this machine. Then each row's own adapter [S-LoRA §4.1]:
    its A and B lie in the pages of kv, and adapters says where. reduced: the operator's name where each rank has a partial sum of y:
    they are added up, and what is sent is counted under that name; only one rank has the bias then."""

    def __init__(self, n_in, n_out, bias, world=World(), reduced=None):
        super().__init__(n_in, n_out, bias)
        self.world, self.reduced = world, reduced

    def forward(self, x, adapters=None, kv=None):
        y = linear(x, self.weight, self.bias)
        if adapters is not None:
            y = lora(y, x, kv, adapters, self.exchange if self.world.tp > 1 else None)
        return self.world.all_reduce(y, self.reduced) if self.reduced else y

    def exchange(self, xa):
        """What all ranks have of x A [S-LoRA §6], flat -> (ranks, numbers), or (1, numbers) where each had a partial sum."""
        return self.world.all_reduce(xa, "lora")[None] if self.reduced else self.world.all_gather(xa, "lora")


class Head(Linear):
    """The output head: every rank has some of the vocabulary, and gets all logits."""

    def __init__(self, config, world):
        super().__init__(config.n_embd, config.n_vocab, False, world)
        self.vocab_size = config.vocab_size

    def forward(self, x):
        y = self.world.all_gather(linear(x, self.weight), "head")  # (ranks, ..., V / ranks)
        return y.movedim(0, -2).flatten(-2)[..., :self.vocab_size]


class Norm(nn.Module):
    """RMSNorm (llama) or LayerNorm (gpt2) of the residual stream x, to which y is added first. -> the new x, its norm"""

    def __init__(self, config):
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.n_embd))
        self.bias = None if config.llama else nn.Parameter(torch.zeros(config.n_embd))

    def forward(self, x, y=None):
        return add_norm(x, y, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    """From the fused q, k, v to the heads' outputs: rotate, write K and V into their pages, attend."""

    def __init__(self, config):
        super().__init__()
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head

    def forward(self, qkv, rope, batch=None, kv=None):
        H, Hk = self.n_head, self.n_kv_head
        if kv is None:  # no cache: (B, T) whole sequences
            q, k, v = (t.transpose(1, 2) for t in split_heads(qkv, rope, H, Hk))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        q = rotate_write(qkv, rope, kv, batch.rows or batch.segments, H, Hk)
        return attention(q, kv, batch.segments, Hk).flatten(1)


class Block(nn.Module):
    """One layer. Its five timed operators carry the paper's names. x is the residual stream, delta what the operator before has yet to
    add to it: the next norm does, in the same pass over memory."""

    def __init__(self, config, world):
        super().__init__()
        self.llama, bias, widths = config.llama, not config.llama, config.widths
        self.norm1 = Norm(config)
        self.preproj = Linear(*widths["preproj"], bias, world)
        self.attn = Attention(config)
        self.postproj = Linear(*widths["postproj"], bias, world, "postproj")
        self.norm2 = Norm(config)
        self.ffn_ln1 = Linear(*widths["ffn_ln1"], bias, world)
        self.ffn_ln2 = Linear(*widths["ffn_ln2"], bias, world, "ffn_ln2")

    def forward(self, x, delta, rope, batch=None, kv=None):
        plus = lambda name: (batch.loras.get(name), kv) if batch is not None else ()
        x, h = self.norm1(x, delta)  # x + delta, and the norm of that
        h = self.attn(self.preproj(h, *plus("preproj")), rope, batch, kv)
        x, h = self.norm2(x, self.postproj(h, *plus("postproj")))
        h = activate(self.ffn_ln1(h, *plus("ffn_ln1")), self.llama)
        return x, self.ffn_ln2(h, *plus("ffn_ln2"))


class Embedding(nn.Embedding):
    """torch's, but drawn only where there is memory for it."""

    def reset_parameters(self):
        if not self.weight.is_meta:  # for random numbers that nobody sees torch would import its compiler there, two seconds
            super().reset_parameters()


def inv_freq(config, device):
    """Rotary frequencies (D/2,), stretched as config.rope_scaling says: {} | linear | llama3."""
    D, scaling = config.head_dim, config.rope_scaling
    freq = config.rope_theta ** -(torch.arange(0, D, 2, dtype=torch.float32, device=device) / D)
    if config.rope_type == "linear":
        return freq / scaling["factor"]
    if config.rope_type == "llama3":  # low frequencies are divided by factor, high ones kept, between them a ramp
        low, high, span = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["original_max_position_embeddings"]
        ramp = ((span * freq / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return freq * (ramp + (1 - ramp) / scaling["factor"])
    return freq


class GPT(nn.Module):
    """The model. GPT(config) has fresh trainable weights; from_preset and from_pretrained give packed ones for the engine."""

    def __init__(self, config, world=World()):
        """world: the processes that share the model; config says what of it this one has."""
        super().__init__()
        self.config, self.world = config, world
        first, last = config.is_first, config.is_last
        self.wte = Embedding(config.n_vocab, config.n_embd) if first or last and config.tied else None
        self.wpe = Embedding(config.block_size, config.n_embd) if first and not config.llama else None
        self.blocks = nn.ModuleList(Block(config, world) if i in config.layers else nn.Identity() for i in range(config.n_layer))
        self.norm, self.head = (Norm(config), Head(config, world)) if last else (None, None)
        if last and config.tied:
            self.head.weight = self.wte.weight
        self.inv_freq = inv_freq(config, world.device) if config.llama else None

    @property
    def dtype(self):
        return self.blocks[self.config.layers[0]].norm1.weight.dtype

    @property
    def device(self):
        return self.blocks[self.config.layers[0]].norm1.weight.device

    @property
    def n_bytes(self):
        """Bytes that its weights take on this device."""
        weights = [getattr(m, leaf, None) for m in self.modules() for leaf in ("weight", "bias")]
        return sum(w.numel() * w.dtype.itemsize for w in {id(w): w for w in weights if w is not None}.values())

    def new_cache(self, n_page):
        """kv (layers here, 2, n_page * Hk, D), zeroed: what is masked is multiplied by zero, so it must at least be finite."""
        c = self.config
        shape = (len(c.layers), 2, n_page * c.n_kv_head, c.head_dim)
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        # zeros that cost nothing until they are touched, and then little: in pieces of 2 MB where the system has them
        memory = mmap.mmap(-1, math.prod(shape) * self.dtype.itemsize, access=mmap.ACCESS_COPY)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel that was built without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=self.dtype).view(shape)

    def _embed(self, tokens, positions, dtype):
        """-> x (..., C)"""
        (i, n), V = self.config.part, self.config.n_vocab
        if n == 1:
            x = self.wte(tokens)
        else:  # every rank has the embeddings of some tokens
            here = (tokens >= i * V) & (tokens < (i + 1) * V)
            x = self.world.all_reduce(self.wte(torch.where(here, tokens - i * V, 0)) * here[..., None], "embed")
        return x.to(dtype) if self.wpe is None else x.to(dtype) + self.wpe(positions).to(dtype)

    def _rope(self, positions, dtype):
        """The rotary (cos, sin) or None, shared by all layers."""
        return rope_angles(positions, self.inv_freq.to(positions.device), dtype) if self.config.llama else None

    def forward(self, batch, kv):
        """One iteration of N tokens through every layer at once, so that each weight is read once [SARATHI §4.3].
        kv as new_cache made it -> logits (M, V) of batch.logit_rows."""
        return self.predict(self.hidden(batch, kv))

    @torch.inference_mode()
    def predict(self, hidden):
        """hidden (M, C) -> logits (M, V); None where the head is in another stage"""
        return self.head(hidden) if self.head is not None else None

    @torch.inference_mode()
    def hidden(self, batch, kv, x=None):
        """All of `forward` but the output head -> the normed states (M, C) of batch.logit_rows. Of a stage that is not the last: the
        states (N, C) that the next wants as x."""
        batch = batch.on(self.device)
        return self.chosen(*self.stream(batch, kv, x), batch.logit_rows)

    @torch.inference_mode()
    def stream(self, batch, kv, x=None):
        """All layers -> the residual stream (N, C) behind them, and what has yet to be added to it."""
        rope, y = self._rope(batch.positions, self.dtype), None
        x = self._embed(batch.known, batch.positions, self.dtype) if x is None else x
        for i, layer_kv in zip(self.config.layers, kv):
            x, y = self.blocks[i](x, y, rope, batch, layer_kv)
        return x, y

    @torch.inference_mode()
    def chosen(self, x, y, rows):
        """The normed states of these rows, or, where another stage goes on, all states as they are."""
        return x + y if self.norm is None else self.norm(x[rows], y[rows])[1]

    def whole(self, tokens, dtype=torch.float32):
        """tokens (B, T) -> logits (B, T, V) of whole sequences, without a cache; differentiable."""
        return self.head(self.hidden_whole(tokens, dtype))

    def hidden_whole(self, tokens, dtype=torch.float32):
        """tokens (B, T) -> the normed states (B, T, C) that the output head reads"""
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x, y, rope = self._embed(tokens, positions, dtype), None, self._rope(positions, dtype)
        for block in self.blocks:
            x, y = block(x, y, rope)
        return self.norm(x, y)[1]

    @torch.inference_mode()
    def logits(self, tokens):
        """The oracle: tokens (T,) -> (T, V), all in float32, nothing cached, none of the engine's attention."""
        tokens = torch.as_tensor(tokens, dtype=torch.long, device=self.device)
        return self.whole(tokens[None])[0].float()

    def merged(self, adapter):
        """A model with W + A B in place of W wherever the adapter has factors; all other weights are this one's own."""
        with torch.device("meta"):
            model = type(self)(self.config, self.world)
        for name, old in self.named_modules():  # a last stage lacks the embedding that its head was made of
            new = model.get_submodule(name)
            for leaf in ("weight", "bias"):
                if getattr(old, leaf, None) is not None:
                    new._parameters.pop(leaf, None)
                    setattr(new, leaf, getattr(old, leaf))
            sites = adapter.sites.get(name.rpartition(".")[2], {})
            if sites:
                w = (old.weight.to_dense() if old.weight.is_mkldnn else old.weight.detach()).clone()
                for module, s in sites.items():
                    a, b = (t.to(w.device).float() for t in adapter.factors(int(name.split(".")[1]), name.rpartition(".")[2], module))
                    if new.reduced:  # W has all rows here, but some of the columns
                        b, rows = self.world.all_gather(b, "merge").movedim(0, 1).flatten(1), slice(None)
                    else:
                        a, rows = self.world.all_gather(a, "merge").flatten(0, 1)[:len(b)], slice(s.first, s.first + s.n_out)
                    w[rows] += (b.T @ a).to(w)
                new._parameters.pop("weight", None)  # one in training is a parameter, this is none
                new.weight = pack(w)
        return model.eval()

    # ------------------------------------------------------------ weights: made at random or read from a folder

    @classmethod
    def _filled(cls, config, dtype, world, source):
        """This rank's share of a model of this config, each weight in its final type and packed at once: at no time are there two
        copies of more than one matrix. source(name, shape in the whole model) -> a function (dim, start, length) -> that part of it"""
        device, config = torch.device(world.device), config.share(world)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # Triton launches on the current one
        with torch.device("meta"):
            model, whole = cls(config, world), cls(config.whole)
        mine = dict(model.named_parameters())
        for name, p in whole.named_parameters():
            part, (dim, spans), at = source(name, p.shape), shares(config, name, p.shape), 0
            if name not in mine:
                continue  # another stage's, but random numbers come in the same order everywhere
            owner, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            t = torch.zeros(mine[name].shape, dtype=dtype, device=device)
            for start, length in spans:
                t.narrow(dim, at, length).copy_(part(dim, start, length))
                at += length
            if not t.sum(dtype=torch.float32).isfinite():  # no copy, as isfinite().all() would make
                raise ValueError(f"weight {name!r} {tuple(p.shape)} holds NaN or infinity in {dtype}")
            delattr(owner, leaf)  # plain tensors from here on: these weights are not for training
            setattr(owner, leaf, pack(t) if isinstance(owner, Linear) and leaf == "weight" else t)
        if config.tied and config.is_last:
            model.head._parameters.clear()
            model.head.weight, model.head.bias = pack(model.wte.weight), None
            model.wte = model.wte if config.is_first else None
        return model.eval()

    @classmethod
    def from_preset(cls, name, dtype=torch.float32, device="cpu", seed=0, world=None):
        """Random weights for a preset's shape (or a GPTConfig), the same for the same seed and device. world: this rank's share of
        them, on its device."""
        world, dtype = world or World(device=device), dtype_of(dtype)
        config = name if isinstance(name, GPTConfig) else preset(name)
        rng = torch.Generator(world.device).manual_seed(seed)

        def source(name, shape):
            whole = torch.empty(shape, dtype=dtype, device=world.device)
            if name.endswith("bias") or "norm" in name:
                whole.fill_(float(name.endswith("weight")))
            else:
                whole.normal_(0.0, 0.02, generator=rng)
            return whole.narrow
        return cls._filled(config, dtype, world, source)

    @classmethod
    def from_pretrained(cls, folder, dtype=None, device="cpu", world=None):
        """Load a Hugging Face folder (gpt2, llama, mistral; one file or shards) straight into `dtype` (None: the folder's own).
        world: read this rank's share of it only, onto its device.

        FileNotFoundError for what is missing, ValueError for what does not fit: the message names the file or the tensor."""
        world = world or World(device=device)
        folder = Path(folder)
        config, own_dtype = read_config(folder)
        checkpoint, names = Checkpoint(folder), hf_names(config)

        def source(name, shape):
            sizes = part_sizes(config, name, shape[0])
            tensors = [checkpoint.take(part, (size, *shape[1:])) for part, size in zip(names[name], sizes)]

            def part(dim, start, length):  # never of two tensors
                for w, size in zip(tensors, sizes):
                    if dim == 1 or start < size or length == 0:
                        return w.narrow(dim, start, length)
                    start -= size
            return part
        model = cls._filled(config, own_dtype if dtype is None else dtype_of(dtype), world, source)
        checkpoint.expect_all_taken()
        return model

    def save_pretrained(self, folder):
        """Write a llama-family model as a Hugging Face folder (config.json, model.safetensors)."""
        c, tensors = self.config, {}
        if not c.llama:
            raise ValueError(f"save_pretrained writes the llama family only, this model is {c.family!r}")
        for name, parts in hf_names(c).items():
            owner, leaf = name.rsplit(".", 1)
            w = getattr(self.get_submodule(owner), leaf)  # a parameter in training, else plain or packed
            if name != "head.weight" or not c.tied:
                w = w.to_dense() if w.is_mkldnn else w
                tensors |= zip(parts, w.split(part_sizes(c, name, len(w))))
        write_folder(folder, "model.safetensors", tensors, "config.json", dict(
            architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=c.n_embd, num_hidden_layers=c.n_layer,
            num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head, head_dim=c.head_dim, intermediate_size=c.n_inner,
            vocab_size=c.vocab_size, max_position_embeddings=c.block_size, rms_norm_eps=c.norm_eps, rope_theta=c.rope_theta,
            rope_scaling=c.rope_scaling or None, tie_word_embeddings=c.tied, hidden_act="silu",
            dtype=str(self.dtype).removeprefix("torch.")))


class Heads(nn.Module):
    """Medusa heads (arXiv 2401.10774), n of them: from the normed state that gives the next token, head h = 1 .. n guesses the one
    h places behind that. Each is a residual block in front of the model's own output head."""

    def __init__(self, n, n_embd):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(n_embd, n_embd) for _ in range(n))
        for block in self.blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)

    @property
    def n_embd(self):
        return self.blocks[0].in_features

    def forward(self, hidden, head):
        """hidden (..., C), head: the model's -> logits (..., n, V)"""
        return head(torch.stack([hidden + F.silu(block(hidden)) for block in self.blocks], -2))

    @classmethod
    def from_pretrained(cls, folder, dtype=torch.float32, device="cpu"):
        """Read what save_pretrained wrote; FileNotFoundError or ValueError that names the file for anything else."""
        folder, c = Path(folder), read_json(Path(folder) / "heads.json")
        heads = cls(*(checked(f"{folder / 'heads.json'}: {key}", c.get(key), int, 1) for key in ("n_head", "n_embd")))
        checkpoint = Checkpoint(folder)
        for name, p in heads.named_parameters():
            p.data = checkpoint.take(name, p.shape).to(device, dtype_of(dtype))
        checkpoint.expect_all_taken()
        return heads.requires_grad_(False).eval()

    def save_pretrained(self, folder):
        """Write heads.json and model.safetensors."""
        write_folder(folder, "model.safetensors", dict(self.named_parameters()), "heads.json", dict(n_head=len(self.blocks), n_embd=self.n_embd))


# ---------------------------------------------------------------- whole iterations, recorded

class Graphs:
    """Whole iterations as CUDA graphs, recorded once for each shape and replayed: Python uploads the batch's arrays and launches nothing
    itself. Few recordings serve all iterations, because SARATHI's are uniform by construction (chunk and decodes fill a multiple of the
    tile) and a batch is padded to the next size with rows of nobody, who write to a page of their own (`scratch`). In Triton's
    interpreter a shape is run where a GPU would replay it."""
    MOST = 256  # recordings: each keeps memory of its own

    def __init__(self, model, kv, tile, n_most):
        """kv: the model's cache, with one page behind the pool's that nobody owns; iterations of more than n_most tokens are not recorded."""
        self.model, self.kv, self.n_most = model, kv, n_most
        self.tile = tile if tile > 1 else 32  # not one recording for each number of tokens
        self.scratch = kv.size(2) - model.config.n_kv_head
        self.recorded = {}  # shape -> (the flat memory of its batch, a function that runs it)
        self.newest = torch.zeros(n_most, dtype=torch.long, device=kv.device)  # where all of them look for Batch.newest
        self.memory = torch.cuda.graph_pool_handle() if kv.is_cuda else None  # one for all: only one of them runs at a time

    def hidden(self, batch):
        """As GPT.hidden, of a Batch of numpy arrays."""
        pages, N, M = batch.segments, self.size(len(batch.tokens)), len(batch.logit_rows)
        n_few = min(N, pow2(pages.n_few)) if pages.n_few else 0
        n_newest = 0 if batch.newest is None else len(batch.newest)
        if max(N, n_newest) > self.n_most or len(pages.few) > n_few or (pages.spans[:, 1] > FEW_ROWS).sum() > MOST_CHUNKS:
            return self.model.hidden(batch, self.kv)
        padded = batch.padded(N, n_few, len(pages.many) > 0, self.scratch)
        if len(self.recorded) >= self.MOST and padded.shape() not in self.recorded:
            return self.model.hidden(batch, self.kv)
        x, y, rows = self._run(padded)
        return self.model.chosen(x, y, rows[:M])

    def size(self, n):
        """n tokens, rounded up: to a power of two below the tile, then to a multiple of it."""
        return min(pow2(n), self.tile) if n < self.tile else round_up(n, self.tile)

    def prepare(self, chunk, max_batch):
        """Record what is to come, with nobody in it: decodes alone, and beside a chunk. What else comes is recorded when it does."""
        config, few = self.model.config, [1 << i for i in range(pow2(max_batch).bit_length())]
        shapes = [(self.size(n), n, False) for n in few] + [(self.size(chunk), n, True) for n in (0, *few) if n < chunk]
        nobody = np.empty(0, np.int32)
        pages = Pages.of([], nobody, nobody, nobody, config.n_head // config.n_kv_head, self.model.dtype)
        from tqdm import tqdm
        for shape in tqdm([shape for shape in shapes[::-1] if shape[0] <= self.n_most], "recording iterations", delay=1, leave=False):
            self._run(Batch(nobody, nobody, None, nobody, pages).padded(*shape, self.scratch))

    @torch.inference_mode()
    def _run(self, batch):
        """A padded batch -> the residual stream (N, C), what has yet to be added to it, and logit_rows (N,)"""
        shape = batch.shape()
        if batch.newest is not None:
            self.newest[:len(batch.newest)] = batch.newest
        if shape not in self.recorded:
            placed = replace(batch.on(self.model.device), newest=self.newest)
            self.recorded[shape] = placed, self._record(lambda: self.model.stream(placed, self.kv))
        placed, run = self.recorded[shape]
        batch.on(self.model.device, placed.flat)
        return *run(), placed.logit_rows

    def _record(self, run):
        """-> what does the same as run, with the same memory"""
        if self.memory is None:
            return run
        run()  # compiles kernels, and sets up what libraries set up once
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self.memory, capture_error_mode="thread_local"):
            result = run()

        def replay():
            graph.replay()
            return result
        return replay


# ---------------------------------------------------------------- Hugging Face folders

def read_json(path):
    """The settings in a file; FileNotFoundError or ValueError that names it."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{path} is not valid JSON: {e}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: must hold settings, not {str(settings)[:60]}")
    return settings


def write_folder(folder, weights, tensors, config, settings):
    """folder/weights with {name: tensor} and folder/config with the settings, as Hugging Face lays them out."""
    from safetensors.torch import save_file
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.detach().contiguous() for name, t in tensors.items()}, folder / weights, metadata={"format": "pt"})
    (folder / config).write_text(json.dumps(settings, indent=1))


def read_config(folder):
    """folder/config.json -> (GPTConfig, torch dtype); ValueError for an architecture or a setting that is not built."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise FileNotFoundError(f"model folder {folder} does not exist (or is no folder)")
    if not path.is_file() and (folder / "adapter_config.json").is_file():
        raise ValueError(f"{folder} holds an adapter, not a model: load its base, and give this to add_adapter (--adapter)")
    c = read_json(path)
    read = {"gpt2": _read_gpt2, "llama": _read_llama, "mistral": _read_llama}.get(str(c.get("model_type")))
    if read is None:
        raise ValueError(f"{path}: model_type {c.get('model_type')!r} is not one of 'gpt2', 'llama', 'mistral'")
    try:
        settings = read(c, path)
    except KeyError as e:
        raise ValueError(f"{path} lacks the setting {e}") from None
    try:
        config = GPTConfig(**settings)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None
    return config, DTYPES.get(str(c.get("dtype") or c.get("torch_dtype")).removeprefix("torch."), torch.float32)


def _demand(path, c, **wanted):
    """Refuse a config whose settings would compute something else; an absent setting has its usual value."""
    for key, values in wanted.items():
        if c.get(key, values[0]) not in values:
            raise ValueError(f"{path}: {key} = {c[key]!r} is not supported, only {' or '.join(map(repr, values))}")


def _read_gpt2(c, path):
    _demand(path, c, activation_function=("gelu_new", "gelu_pytorch_tanh"), scale_attn_weights=(True,),
            scale_attn_by_inverse_layer_idx=(False,), add_cross_attention=(False,))
    return dict(family="gpt2", n_layer=c["n_layer"], n_head=c["n_head"], n_embd=c["n_embd"], n_inner=c.get("n_inner") or 0,
                vocab_size=c["vocab_size"], block_size=c.get("n_positions") or c["n_ctx"],
                norm_eps=c.get("layer_norm_epsilon", 1e-5), tied=c.get("tie_word_embeddings", True))


def _read_llama(c, path):
    _demand(path, c, hidden_act=("silu",), attention_bias=(False,), mlp_bias=(False,), sliding_window=(None,))
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}  # transformers 5 | 4
    if not isinstance(rope, dict):
        raise ValueError(f"{path}: rope_scaling = {rope!r}: must be settings")
    _demand(path, rope, partial_rotary_factor=(1.0,))
    return dict(n_layer=c["num_hidden_layers"], n_head=c["num_attention_heads"], n_embd=c["hidden_size"],
                n_inner=c["intermediate_size"], n_kv_head=c.get("num_key_value_heads") or 0, head_dim=c.get("head_dim") or 0,
                vocab_size=c["vocab_size"], block_size=c["max_position_embeddings"], norm_eps=c.get("rms_norm_eps", 1e-6),
                tied=c.get("tie_word_embeddings", False), rope_scaling=rope,
                rope_theta=rope.get("rope_theta") or c.get("rope_theta") or 10000.0)


def hf_names(config):
    """Our weight -> the checkpoint tensors it is made of, stacked along the output dimension."""
    if config.llama:
        names = {"wte.weight": ["model.embed_tokens.weight"], "norm.weight": ["model.norm.weight"], "head.weight": ["lm_head.weight"]}
        prefix, layer = "model.layers", {
            "norm1.weight": ["input_layernorm.weight"], "norm2.weight": ["post_attention_layernorm.weight"],
            "preproj.weight": [f"self_attn.{x}_proj.weight" for x in "qkv"], "postproj.weight": ["self_attn.o_proj.weight"],
            "ffn_ln1.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"], "ffn_ln2.weight": ["mlp.down_proj.weight"]}
    else:
        names = {"wte.weight": ["wte.weight"], "wpe.weight": ["wpe.weight"], "head.weight": ["lm_head.weight"],
                 "norm.weight": ["ln_f.weight"], "norm.bias": ["ln_f.bias"]}
        modules = {"norm1": "ln_1", "norm2": "ln_2", "preproj": "attn.c_attn", "postproj": "attn.c_proj",
                   "ffn_ln1": "mlp.c_fc", "ffn_ln2": "mlp.c_proj"}
        prefix, layer = "h", {f"{ours}.{p}": [f"{theirs}.{p}"] for ours, theirs in modules.items() for p in ("weight", "bias")}
    for i in range(config.n_layer):
        names |= {f"blocks.{i}.{ours}": [f"{prefix}.{i}.{part}" for part in parts] for ours, parts in layer.items()}
    return names


def pieces(config):
    """{operator: the sizes of what lies side by side in the dimension that devices share out: its outputs, or REDUCED ones' inputs}"""
    q, kv, n_inner = config.n_head * config.head_dim, config.n_kv_head * config.head_dim, config.n_inner
    return dict(preproj=[q, kv, kv], postproj=[q], ffn_ln1=[n_inner] * (2 if config.llama else 1), ffn_ln2=[n_inner])


def part_sizes(config, name, n_out):
    """How many output rows of our weight `name` come from each of its checkpoint tensors."""
    op = name.split(".")[-2]
    return pieces(config)[op] if config.llama and op in ("preproj", "ffn_ln1") else [n_out]


def shares(config, name, shape):
    """The part of weight `name`, of this shape in the whole model, that config's share holds: a dimension and the slices of it, [(start,
    length)], one behind the other; what they leave of the share is zero."""
    (i, n), (op, leaf) = config.part, name.split(".")[-2:]
    sizes = pieces(config).get(op)  # of the share
    if op in REDUCED and leaf == "bias":
        return 0, [(0, shape[0] if i == 0 else 0)]  # added once
    if op in ("wte", "head"):
        start = min(i * config.n_vocab, config.vocab_size)
        return 0, [(start, min(config.n_vocab, config.vocab_size - start))]
    if sizes is None:  # norms, and learned positions
        return 0, [(0, shape[0])]
    starts = np.cumsum([0, *sizes[:-1]]) * n
    return int(op in REDUCED), [(int(start) + i * size, size) for start, size in zip(starts, sizes)]


class Checkpoint:
    """The tensors of a folder's safetensors files, each read when taken. A file is opened again for each: what an open one has
    read stays mapped, and would count as memory beside the weights."""

    def __init__(self, folder):
        from safetensors import SafetensorError, safe_open
        self.open = lambda f: safe_open(f, framework="pt")
        index = folder / "model.safetensors.index.json"
        where = read_json(index).get("weight_map") if index.is_file() else {}
        if not isinstance(where, dict) or not all(isinstance(f, str) for f in where.values()):
            raise ValueError(f"{index}: weight_map = {str(where)[:60]}: must say which file each tensor is in")
        files = sorted({folder / f for f in where.values()} if index.is_file() else folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{folder} holds no *.safetensors file" + (
                " (pytorch_model.bin must be converted first)" if (folder / "pytorch_model.bin").is_file() else ""))
        self.folder, self.where = folder, {}
        for f in files:
            if not f.is_file():
                raise FileNotFoundError(f"{f}, named in {index.name}, does not exist")
            try:
                with self.open(f) as file:
                    self.where |= {key.removeprefix("transformer."): (f, key) for key in file.keys()}
            except SafetensorError as e:
                raise ValueError(f"{f} is damaged or half written: {e}") from None

    def take(self, name, shape):
        """The tensor `name`, which must have this shape; GPT-2 stores its matrices the other way round. It is a view of the file: only
        what is read of it is loaded."""
        if name not in self.where:
            raise ValueError(f"{self.folder}: tensor {name!r} is missing")
        f, key = self.where.pop(name)
        with self.open(f) as file:
            w = file.get_tensor(key)
        if name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            w = w.T
        if tuple(w.shape) != tuple(shape) or w.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"{self.folder}: tensor {name!r} is {tuple(w.shape)} {w.dtype}, expected {tuple(shape)} in float32, float16 or bfloat16")
        return w

    def expect_all_taken(self):
        """Every tensor must have had its place; constants and the tied head that old files carry along may stay."""
        surplus = [k for k in self.where if not k.endswith((".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq", "lm_head.weight"))]
        if surplus:
            raise ValueError(f"{self.folder}: {len(surplus)} surplus tensors, the first is {surplus[0]!r}")


# ---------------------------------------------------------------- adapters: LoRA weights in the layout of the pool's pages

class Adapter:
    """LoRA factors for one model's shape. A page is `width` numbers wide in each plane of each layer; a row of A (n_in) or of
    B (n_out) that is wider takes several. A's rows fill the K planes one after another, B's the V planes [S-LoRA §5.1]:

        page      0   1   2   3   4   5   6   7  ...
        K plane   A of q_proj   | A of v_proj   |                 rank 4 on two modules, each row one page wide
        V plane   B of q_proj   | B of v_proj   |                 B is kept multiplied by its scaling, and transposed
    """

    def __init__(self, config, ranks, dtype=None, pin=False):
        """ranks: {checkpoint module: rank}. dtype None: only the shape, as the simulator needs it; pin: for copies to a GPU."""
        self.ranks, self.width, self.sites = ranks, config.n_kv_head * config.head_dim, {}
        self.operators, self.prefix = config.operators, "model.layers" if config.llama else "transformer.h"
        self.n_params = n_a = n_b = 0  # weights; pages used so far in each plane
        self.part, self.layers = config.part, config.layers
        for op, (n_in, _, modules) in self.operators.items():
            for module, (first, n_out, page) in modules.items():
                if module in ranks:
                    rank = ranks[module] if op in REDUCED else cdiv(ranks[module], config.part[1])
                    a, b = (np.arange(r * cdiv(m, self.width)).reshape(r, -1) for r, m in ((rank, n_in), (ranks[module], n_out)))
                    self.sites.setdefault(op, {})[module] = Site(first, n_out, page, n_a + a, n_b + b)
                    n_a, n_b = n_a + a.size, n_b + b.size
                    self.n_params += len(config.layers) * (a.shape[0] * n_in + b.shape[0] * n_out)
        self.n_page = max(n_a, n_b)
        self.planes = None  # (layers here, 2, n_page, width): what the pages are to hold
        if dtype is not None:
            self.planes = torch.zeros(len(config.layers), 2, self.n_page, self.width, dtype=dtype, pin_memory=pin)

    def at(self, pages):
        """Where it lies when its own page i is the pool's page pages[i]: {operator: Factors}."""
        return {op: Factors([s._replace(a=pages[s.a], b=pages[s.b]) for s in sites.values()], self.operators[op].n_page)
                for op, sites in self.sites.items()}

    def factors(self, layer, op, module):
        """Views of one module's A (rank, n_in) and B (rank, n_out) in self.planes."""
        s = self.sites[op][module]
        rows = lambda plane, pages, n: self.planes[layer - self.layers[0], plane, pages[0, 0]:pages[-1, -1] + 1].view(len(pages), -1)[:, :n]
        return rows(0, s.a, self.operators[op].n_in), rows(1, s.b, s.n_out)

    def keep(self, layer, op, module, whole_a, whole_b):
        """Of one module's A (rank, n_in) and B (rank, n_out) in the whole model this share's [S-LoRA §6]. Where x A is gathered, rows
        of A (its last share ends in zeros, if the rank does not come out even) and the columns of B that follow from W's; where it is
        added up, columns of both. A rank below the module's largest leaves zeros too."""
        (i, n), (a, b) = self.part, self.factors(layer, op, module)
        if op in REDUCED:
            whole_a, whole_b = whole_a[:, i * a.size(1):(i + 1) * a.size(1)], whole_b[:, i * b.size(1):(i + 1) * b.size(1)]
        else:
            blocks = 3 if module == "attn.c_attn" else 1  # q, k and v, each shared out
            whole_a, whole_b = whole_a[i * len(a):(i + 1) * len(a)], whole_b.unflatten(1, (blocks, n, -1))[:, :, i].flatten(1)
        a[:len(whole_a)], b[:len(whole_b)] = whole_a, whole_b

    @classmethod
    def from_pretrained(cls, folder, config, dtype=torch.float32, pin=False):
        """A PEFT folder: adapter_config.json, adapter_model.safetensors; any ranks, alphas and patterns of them, rslora.
        FileNotFoundError for what is missing, ValueError for what does not fit the model, naming the module and its shape."""
        folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(f"adapter folder {folder} does not exist (or is no folder)")
        settings = read_adapter_config(folder / "adapter_config.json")
        checkpoint = Checkpoint(folder)
        found = adapter_modules(checkpoint, config)
        ranks = {}
        for (layer, op, module), path in found.items():
            ranks[module] = max(ranks.get(module, 0), settings(path)[0])
        adapter, operators = cls(config, ranks, dtype, pin), config.whole.operators
        for (layer, op, module), path in found.items():
            rank, scaling = settings(path)
            a = checkpoint.take(path + ".lora_A.weight", (rank, operators[op].n_in)).to(dtype)
            b = (checkpoint.take(path + ".lora_B.weight", (operators[op].modules[module][1], rank)).T.float() * scaling).to(dtype)
            for name, w in ("A", a), ("B", b):
                if not w.isfinite().all():
                    raise ValueError(f"{folder}: module {path!r}: lora_{name} {tuple(w.shape)} holds NaN or infinity in {dtype}")
            if layer in config.layers:
                adapter.keep(layer, op, module, a, b)
        checkpoint.expect_all_taken()
        return adapter

    def save_pretrained(self, folder):
        """Write it as a PEFT folder; alpha is the rank everywhere: B has its scaling already."""
        tensors = {}
        for layer in self.layers:
            for op, sites in self.sites.items():
                for module in sites:
                    path, (a, b) = f"base_model.model.{self.prefix}.{layer}.{module}", self.factors(layer, op, module)
                    tensors |= {path + ".lora_A.weight": a, path + ".lora_B.weight": b.T}
        rank = max(self.ranks.values())
        write_folder(folder, "adapter_model.safetensors", tensors, "adapter_config.json", dict(
            peft_type="LORA", task_type="CAUSAL_LM", r=rank, lora_alpha=rank, rank_pattern=self.ranks, alpha_pattern=self.ranks,
            target_modules=list(self.ranks), bias="none", inference_mode=True))


def read_adapter_config(path):
    """A PEFT configuration -> a function (a module's path) -> (rank, scaling). ValueError for what is no plain LoRA."""
    c = read_json(path)
    _demand(path, c, peft_type=("LORA",), bias=("none",), use_dora=(False,), lora_bias=(False,), modules_to_save=(None, []),
            target_parameters=(None, []), trainable_token_indices=(None, []), layer_replication=(None, []), alora_invocation_tokens=(None, []),
            init_lora_weights=(True, False, None, "gaussian", "orthogonal", "eva", "mica"))  # others (PiSSA, OLoRA) left another base behind
    patterns = {}
    for key, name, kind in (("r", "rank_pattern", int), ("lora_alpha", "alpha_pattern", (int, float))):
        patterns[name] = c.get(name) or {}
        if not isinstance(patterns[name], dict):
            raise ValueError(f"{path}: {name} = {str(c[name])[:60]}: must be values by module")
        for what, value in {key: c.get(key), **{f"{name} of {module!r}": v for module, v in patterns[name].items()}}.items():
            if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < math.inf:
                raise ValueError(f"{path}: {what} = {value!r}: must be a positive {'whole ' if kind is int else ''}number")
        try:
            patterns[name] = [(re.compile(rf"(.*\.)?({module})$"), value) for module, value in patterns[name].items()]
        except re.error as e:
            raise ValueError(f"{path}: {name} holds {e.pattern!r}, which is no pattern: {e}") from None

    def settings(module):
        module = module.removeprefix("base_model.model.")  # as PEFT does: the model's own name of it, matched in whole or from its end
        of = lambda name, default: next((value for pattern, value in patterns[name] if pattern.match(module)), default)
        rank, alpha = of("rank_pattern", c["r"]), of("alpha_pattern", c["lora_alpha"])
        return rank, alpha / (math.sqrt(rank) if c.get("use_rslora") else rank)
    return settings


def adapter_modules(checkpoint, config):
    """What a PEFT file changes: {(layer, operator, module): the path in front of .lora_A.weight}."""
    known, found = config.modules, {}
    for name in checkpoint.where:
        path, _, factor = name.partition(".lora_")
        m = re.match(r"(?:.*\.)?(?:layers|h)\.(\d+)\.(.+)$", path)
        if factor not in ("A.weight", "B.weight") or m is None or m[2] not in known or int(m[1]) >= config.n_layer:
            raise ValueError(f"{checkpoint.folder}: {name!r} is no LoRA factor of this model: layers 0 .. {config.n_layer - 1}, "
                             f"modules {', '.join(known)}")
        found[int(m[1]), known[m[2]], m[2]] = path
    if not found:
        raise ValueError(f"{checkpoint.folder} holds no LoRA factors")
    return found


def random_adapter(rank, seed=0, modules=None):
    """A source for Engine.add_adapter: random A and B of this rank. modules: names as in a PEFT config's target_modules ("q_proj",
    "mlp.c_proj"); None: all that attention has, as in [S-LoRA §4.1]."""
    checked("rank", rank, int, 1)

    def make(config, dtype=None, pin=False):
        known = config.modules
        wanted = modules or [module for module, op in known.items() if op in ("preproj", "postproj")]
        ranks = {module: rank for module in known if any(("." + module).endswith("." + w) for w in wanted)}
        for w in wanted:
            if not any(("." + module).endswith("." + w) for module in known):
                raise ValueError(f"unknown module {w!r}: one of {', '.join(known)}")
        adapter = Adapter(config, ranks, dtype, pin)
        if adapter.planes is not None:
            whole, rng = adapter if config == config.whole else Adapter(config.whole, ranks, dtype), torch.Generator().manual_seed(seed)
            whole.planes[:, 0].normal_(0.0, config.n_embd ** -0.5, generator=rng)
            whole.planes[:, 1].normal_(0.0, 0.02, generator=rng)
            if whole is not adapter:
                for layer in config.layers:
                    for module in ranks:
                        adapter.keep(layer, known[module], module, *whole.factors(layer, known[module], module))
        return adapter
    return make


# ---------------------------------------------------------------- text: tiktoken, from bytes or from a folder

GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS_SPLIT = r"\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"  # each digit alone, then as GPT-2
LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
                r"|\s+(?!\S)|\s+")


@dataclass
class Tokenizer:
    """A tiktoken Encoding, what its folder puts in front of every prompt, and the tokens that end a text."""
    encoding: object
    prefix: list
    stop: list
    composed: bool = False  # letter and accent are one character to it (NFC), as in Qwen's

    def encode(self, text):
        text = unicodedata.normalize("NFC", text) if self.composed else text
        return self.prefix + self.encoding.encode(text, allowed_special="all")

    def decode(self, tokens):
        return self.stream()(tokens)

    def stream(self):
        """A function tokens -> the text they complete, holding back the bytes of an unfinished character."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda tokens: decoder.decode(b"".join(map(self._bytes_of, tokens)))

    def _bytes_of(self, token):
        try:
            return self.encoding.decode_single_token_bytes(token)
        except KeyError:  # a model may have more tokens than its tokenizer names
            return "\ufffd".encode()


def load_tokenizer(folder):
    """The byte-level BPE of a folder's tokenizer.json (GPT-2, Llama-3, SmolLM2, Qwen) or tokenizer.model (Llama-3) as a Tokenizer.
    Another kind is a ValueError, a folder without one a FileNotFoundError; both say that token ids can be given instead."""
    import tiktoken
    folder = Path(folder)
    if (folder / "tokenizer.json").is_file():
        ranks, special, split, prefix, composed = _read_tokenizer_json(folder / "tokenizer.json")
    elif (folder / "tokenizer.model").is_file():
        ranks, special, split, prefix, composed = _read_tiktoken_model(folder / "tokenizer.model")
    else:
        raise FileNotFoundError(f"{folder} holds no tokenizer.json or tokenizer.model; give token ids instead of text")
    top = max([*ranks.values(), *special.values()]) + 1
    unknown = [bytes([b]) for b in range(256) if bytes([b]) not in ranks]  # a byte the model never saw: an id that it will refuse
    ranks |= {b: top + i for i, b in enumerate(unknown)}
    settings = [read_json(folder / f) for f in ("generation_config.json", "config.json") if (folder / f).is_file()]
    stop = next((s["eos_token_id"] for s in settings if s.get("eos_token_id") is not None), [])
    encoding = tiktoken.Encoding(folder.name, pat_str=split, mergeable_ranks=ranks, special_tokens=special)
    return Tokenizer(encoding, prefix, stop if isinstance(stop, list) else [stop], composed)


def byte_letters():
    """GPT-2's printable letter for each byte, as tokenizer.json spells them: {letter: byte}."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


def _read_tokenizer_json(path):
    t = read_json(path)
    try:
        return _read_byte_level(t, path)
    except (KeyError, TypeError, AttributeError):  # what it says is not there, or something else
        raise ValueError(f"{path}: only byte-level BPE tokenizers can be read, this one is of another kind; give token ids instead of text") from None


def _read_byte_level(t, path):
    """t: what a tokenizer.json holds; KeyError, TypeError or AttributeError for one of another kind."""
    letters, model, normalizer = byte_letters(), t["model"], t.get("normalizer")
    if model["type"] != "BPE" or normalizer and normalizer["type"] != "NFC":
        raise KeyError("type")
    special = {a["content"]: a["id"] for a in t.get("added_tokens", [])}
    ranks = {bytes(letters[c] for c in word): i for word, i in model["vocab"].items() if word not in special}
    merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    order = [model["vocab"][a + b] for a, b in merges]
    if order != sorted(order) or len({*ranks.values()}) < len(ranks):
        raise ValueError(f"{path}: merges and token ids disagree in order, which tiktoken cannot express; give token ids instead of text")
    pre = t.get("pre_tokenizer") or {}
    listed = [p for p in pre.get("pretokenizers", [pre]) if p]
    steps = {p["type"]: p for p in listed}
    if len(steps) < len(listed) or "Digits" in steps and ("Split" in steps or not steps["Digits"].get("individual_digits")):
        raise KeyError("pre_tokenizer")  # one pattern cannot say it
    byte_level = steps.get("ByteLevel", {})
    whole = not byte_level.get("use_regex", True) and "Split" not in steps  # it cuts a text nowhere
    if byte_level.get("add_prefix_space") or set(steps) - {"ByteLevel", "Split", "Digits"} or not byte_level or whole:
        raise KeyError("pre_tokenizer")
    if "Split" in steps:
        split = steps["Split"]["pattern"]["Regex"]
    else:
        split = DIGITS_SPLIT if "Digits" in steps else GPT2_SPLIT
    post = t.get("post_processor") or {}
    template = next((p for p in post.get("processors", [post]) if p.get("type") == "TemplateProcessing"), {"single": []})
    prefix = [special[x["SpecialToken"]["id"]] for x in template["single"][:1] if "SpecialToken" in x]
    return ranks, special, split, prefix, bool(normalizer)


def _read_tiktoken_model(path):
    import base64
    try:
        pairs = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError:
        raise ValueError(f"{path} is a SentencePiece model, not byte-level BPE; give token ids instead of text") from None
    n = len(ranks)
    special = {"<|begin_of_text|>": n, "<|end_of_text|>": n + 1, "<|start_header_id|>": n + 6, "<|end_header_id|>": n + 7, "<|eom_id|>": n + 8,
               "<|eot_id|>": n + 9, "<|python_tag|>": n + 10}
    return ranks, special, LLAMA3_SPLIT, [n], False


def write_byte_tokenizer(folder):
    """A tokenizer.json whose tokens are the 256 bytes and <|endoftext|> (256), which ends a text; transformers reads it too."""
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    (Path(folder) / "generation_config.json").write_text(json.dumps(dict(eos_token_id=256)))
    (Path(folder) / "tokenizer.json").write_text(json.dumps(dict(
        version="1.0", truncation=None, padding=None, normalizer=None, post_processor=None, decoder=byte_level,
        added_tokens=[dict(id=256, content="<|endoftext|>", single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)],
        pre_tokenizer=byte_level,
        model=dict(type="BPE", vocab=byte_letters(), merges=[]))))


# ---------------------------------------------------------------- models by name

def cache_folder():
    """Where the trained tiny model lives: $XDG_CACHE_HOME/sarathi or ~/.cache/sarathi."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sarathi"


def load_model(name, dtype=None, device="cpu", seed=0, world=None):
    """name: "tiny" or its "draft" (trained here on first use), a preset (random weights) or a Hugging Face folder -> (GPT, Tokenizer or
    None). world: load this rank's share, on its device."""
    if name in PRESETS and name != "tiny":
        return GPT.from_preset(name, dtype or torch.float32, device, seed, world), None
    own = name in ("tiny", "draft")
    folder = cache_folder() / name if own else Path(name)
    if own and not (folder / "tokenizer.json").is_file():
        _alone(f"model {name!r}")
        print("The default model is a tiny byte-level LLaMA that is trained here, once, on the Python standard library's sources: "
              f"three to five minutes on two cores, then kept in {cache_folder()}.", file=sys.stderr)
        train_tiny()
    if not folder.is_dir():
        raise FileNotFoundError(f"model {name!r} is neither a folder nor a preset ({', '.join(PRESETS)})")
    model = GPT.from_pretrained(folder, dtype, device, world)
    try:
        return model, load_tokenizer(folder)
    except (FileNotFoundError, ValueError):
        return model, None  # who wants text asks load_tokenizer why


def load_heads(name, dtype=torch.float32, device="cpu"):
    """name: "heads", those of the tiny model (trained here on first use), or a folder -> Heads"""
    folder = cache_folder() / name if name == "heads" else Path(name)
    if name == "heads" and not (folder / "heads.json").is_file():
        load_model("tiny")
    if name == "heads" and not (folder / "heads.json").is_file():  # a cache that an older version filled
        _alone(f"draft {name!r}")
        train_tiny_heads(stdlib_tokens())
    return Heads.from_pretrained(folder, dtype, device)


def _alone(what):
    """ValueError in one of several processes, all of which would train it."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(f"{what} is trained on first use, by one process: run python model.py before torchrun")


# ---------------------------------------------------------------- python model.py: a tiny model, trained where it stands

def stdlib_tokens():
    """The standard library's own modules as one byte stream (T,), each file ended by token 256."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    stream = b"".join(f.read_bytes() + b"\xff" for f in files)  # 0xff never occurs in UTF-8
    tokens = torch.frombuffer(bytearray(stream), dtype=torch.uint8).long()
    return torch.where(tokens == 0xff, 256, tokens)


def descend(module, loss_of_batch, steps, what, lr, warmup, weight_decay, clip=math.inf):
    """Train a module's parameters for `steps` calls of loss_of_batch(), with AdamW; a bar on stderr says the loss."""
    from tqdm import tqdm
    optimizer = torch.optim.AdamW(module.parameters(), betas=(0.9, 0.99), weight_decay=weight_decay)
    bar = tqdm(range(steps), f"training {what} (Ctrl-C keeps nothing)", file=sys.stderr)
    for step in bar:
        for group in optimizer.param_groups:  # warm up, then a cosine down to a tenth
            group["lr"] = lr * min((step + 1) / warmup, 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        loss = loss_of_batch()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        if step % 10 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")


def train(config, data, steps, name, B=4, T=256, seed=0):
    """Train GPT(config) on data (T,) for `steps` batches of B sequences of T tokens -> (model, loss on the last 5 %, in nats)."""
    torch.manual_seed(seed)
    model, n_train = GPT(config), int(0.95 * len(data))
    for p in model.parameters():
        if p.dim() == 2:
            nn.init.normal_(p, std=0.02)

    def loss_on(first, last):
        i = torch.randint(first, last - T - 1, (B, 1)) + torch.arange(T + 1)
        x = data[i]  # (B, T + 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=default_dtype() == torch.bfloat16):
            logits = model.whole(x[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), x[:, 1:].flatten())

    what = f"{name}, {config.n_params / 1e6:.1f}M parameters"
    descend(model, lambda: loss_on(0, n_train), steps, what, lr=2e-3, warmup=50, weight_decay=0.1, clip=1.0)
    with torch.no_grad():
        return model, sum(loss_on(n_train, len(data)).item() for _ in range(20)) / 20


def train_heads(model, data, steps, n=3, B=4, T=256, lr=4e-3, seed=0):
    """Train n Heads on the states of a model, which stays as it is, over data (T,) as `train` does -> (Heads, loss (n,) in nats and
    share of right first guesses (n,), of each head on the last 5 %)."""
    torch.manual_seed(seed)
    heads, n_train = Heads(n, model.config.n_embd), int(0.95 * len(data))
    weight = model.head.weight.to_dense() if model.head.weight.is_mkldnn else model.head.weight.detach()  # packed ones have no gradient

    def score(first, last):
        x = data[torch.randint(first, last - T - n, (B, 1)) + torch.arange(T + n + 1)]  # (B, T + n + 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=default_dtype() == torch.bfloat16):
            with torch.no_grad():
                hidden = model.hidden_whole(x[:, :T])  # (B, T, C)
            logits = heads(hidden, lambda h: F.linear(h, weight))  # (B, T, n, V)
        ahead = x[:, 2:].unfold(1, n, 1)  # (B, T, n): head h at position t guesses token t + 1 + h
        loss = F.cross_entropy(logits.flatten(0, 2).float(), ahead.flatten(), reduction="none").view(-1, n).mean(0)
        return loss, (logits.argmax(-1) == ahead).flatten(0, 1).float().mean(0)

    descend(heads, lambda: score(0, n_train)[0].sum(), steps, f"{n} heads", lr, warmup=20, weight_decay=0.0)
    with torch.no_grad():
        return heads.eval(), *torch.stack([torch.stack(score(n_train, len(data))) for _ in range(20)]).mean(0)


def train_tiny(steps=1100):
    """Train the tiny target, its one-layer draft and its Medusa heads into cache_folder()/tiny, /draft and /heads; says the losses on
    stderr."""
    data, config = stdlib_tokens(), preset("tiny")
    cache_folder().mkdir(parents=True, exist_ok=True)  # a disk that cannot be written says so before minutes of work
    for name, n_layer, share in (("draft", 1, 2), ("tiny", config.n_layer, 1)):
        model, loss = train(replace(config, n_layer=n_layer), data, steps // share, name)
        model.save_pretrained(cache_folder() / name)
        write_byte_tokenizer(cache_folder() / name)
        print(f"{name}: loss {loss:.3f} nats per byte on unseen text, saved in {cache_folder() / name}", file=sys.stderr)
    train_tiny_heads(data, steps // 4)


def train_tiny_heads(data, steps=275):
    """Train the Medusa heads of the tiny model in the cache into cache_folder()/heads; says how good each is on stderr."""
    heads, losses, right = train_heads(GPT.from_pretrained(cache_folder() / "tiny"), data, steps)
    heads.save_pretrained(cache_folder() / "heads")
    for h, (loss, share) in enumerate(zip(losses, right), 1):
        print(f"head {h}: loss {loss:.3f}, {share:.0%} of its first guesses right, {h + 1} bytes ahead", file=sys.stderr)


if __name__ == "__main__":
    train_tiny()
