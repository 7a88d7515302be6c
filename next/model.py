"""GPT-2 and LLaMA over a flat batch of tokens. This file knows weights, checkpoints and text. It
has never heard of a request. In reading order:

    GPTConfig, PRESETS    the shape of a model and its operators [SARATHI Table 1]
    World                 the processes of a tensor-parallel group [S-LoRA §6]
    GPT                   forward(batch, kv): one iteration; logits(tokens): the oracle
    Checkpoint            the tensors of a Hugging Face or PEFT folder
    Adapter               LoRA weights, laid out as the pages of the cache [S-LoRA §5.1]
    Tokenizer             byte-level BPE through tiktoken
    python model.py       train the tiny model and its draft model, about three minutes
"""
import atexit
import base64
import codecs
import json
import math
import os
import re
import sys
import sysconfig
import zlib
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from kernels import (activate, activate_ref, add_norm, add_norm_ref, attention, cdiv, linear,
                     linear_ref, lora, pack, rotate_ref, rotate_write)

# -----------------------------------------------------------------------------
# the shape of a model

OPERATORS = ("preproj", "postproj", "ffn_ln1", "ffn_ln2")  # of one layer [SARATHI Table 1]
ROW_PARALLEL = ("postproj", "ffn_ln2")  # tensor parallelism cuts their input, not their output
RANK_0 = ("head.weight", "postproj.bias", "ffn_ln2.bias")  # weights that only rank 0 has
ROPE_SCALINGS = {  # kind -> the numbers that it needs
    "default": [],
    "linear": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
}
DTYPES = ("float32", "bfloat16", "float16")

class Operator(NamedTuple):
    """One or several modules of a checkpoint, side by side in one matrix."""
    n_in: int
    n_out: int
    modules: dict  # name of the module in the checkpoint -> (first column, columns)

@dataclass
class GPTConfig:
    """The shape of a model. Family "llama" has RoPE, RMSNorm and SwiGLU; "gpt2" has learned
    positions, LayerNorm, GELU and biases. ValueError for numbers that make no model."""
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_inner: int = 0  # 0: 4 * n_embd
    n_kv_head: int = 0  # 0: n_head; fewer: grouped-query attention
    head_dim: int = 0  # 0: n_embd / n_head
    vocab_size: int = 50257
    block_size: int = 1024  # the longest context
    family: str = "llama"
    tied: bool = False  # the output head is the token embedding
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict = field(default_factory=dict)  # as in a Hugging Face config
    shard: tuple = (0, 1)  # (i, n): n_head, n_kv_head and n_inner are those of share i of n

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type in (int, float) and (value != 0 or f.default != 0):
                check_number(f.name, value, f.type)
        self.n_inner = self.n_inner or 4 * self.n_embd
        self.n_kv_head = self.n_kv_head or self.n_head
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        self.is_llama = self.family == "llama"
        if self.family not in ("llama", "gpt2"):
            raise ValueError(f"family = {self.family!r}: must be 'llama' or 'gpt2'")
        self.rope = self.rope_scaling.get("rope_type") or self.rope_scaling.get("type", "default")
        if self.rope not in ROPE_SCALINGS:
            raise ValueError(f"rope_type = {self.rope!r}: must be one of {[*ROPE_SCALINGS]}")
        for key in ROPE_SCALINGS[self.rope]:
            check_number(f"rope_scaling: {key}", self.rope_scaling.get(key), float)
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head = {self.n_head}: no multiple of n_kv_head {self.n_kv_head}")
        if self.head_dim == 0 or self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim}: must be even and positive")

    def shard_of(self, rank, n):
        """The share of device `rank` of n. ValueError if n does not divide heads or widths."""
        for name in ("n_head", "n_kv_head", "n_inner", "n_embd"):
            if getattr(self, name) % n:
                raise ValueError(f"tp = {n} does not divide {name} = {getattr(self, name)}")
        return replace(self, n_head=self.n_head // n, n_kv_head=self.n_kv_head // n,
                       n_inner=self.n_inner // n, shard=(rank, n))

    @cached_property
    def modules(self):
        """{module of a checkpoint: (operator, n_out, n_in)} of one layer of the whole model"""
        n = self.shard[1]
        C = self.n_embd
        I = self.n_inner * n
        Q = self.n_head * n * self.head_dim
        K = self.n_kv_head * n * self.head_dim
        if self.is_llama:
            return {
                "self_attn.q_proj": ("preproj", Q, C),
                "self_attn.k_proj": ("preproj", K, C),
                "self_attn.v_proj": ("preproj", K, C),
                "self_attn.o_proj": ("postproj", C, Q),
                "mlp.gate_proj": ("ffn_ln1", I, C),
                "mlp.up_proj": ("ffn_ln1", I, C),
                "mlp.down_proj": ("ffn_ln2", C, I),
            }
        return {
            "attn.c_attn": ("preproj", Q + 2 * K, C),
            "attn.c_proj": ("postproj", C, Q),
            "mlp.c_fc": ("ffn_ln1", I, C),
            "mlp.c_proj": ("ffn_ln2", C, I),
        }

    @cached_property
    def operators(self):
        """{name: Operator} of one layer of this share"""
        n = self.shard[1]
        operators = {name: Operator(0, 0, {}) for name in OPERATORS}
        for module, (name, n_out, n_in) in self.modules.items():
            if name in ROW_PARALLEL:
                n_in //= n
            else:
                n_out //= n
            _, first, modules = operators[name]
            operators[name] = Operator(n_in, first + n_out, {**modules, module: (first, n_out)})
        return operators

    @property
    def widths(self):
        """{operator: (n_in, n_out)} of one layer of this share"""
        return {name: (op.n_in, op.n_out) for name, op in self.operators.items()}

    @cached_property
    def n_params(self):
        """Parameters of this share, embeddings included"""
        parts = sum(checkpoint_parts(self).values(), [])
        n = self.shard[1]
        return sum(math.prod(shape) // (1 if dim is None else n) for _, shape, dim in parts)

    def page_bytes(self, itemsize):
        """Bytes of K and V of one token in all layers: m_kv in [SARATHI §4.3]"""
        return 2 * self.n_layer * self.n_kv_head * self.head_dim * itemsize

def check_number(name, value, kind):
    """ValueError unless value is a positive number, for kind int a whole one."""
    kinds = int if kind is int else (int, float)
    if not isinstance(value, kinds) or not 0 < value < math.inf:
        noun = "whole number" if kind is int else "number"
        raise ValueError(f"{name} = {value!r}: must be a positive {noun}")

PRESETS = {  # layers, heads, embd, inner, kv heads, head dim, vocabulary, context, family, tied
    "tiny": GPTConfig(4, 4, 256, 704, 0, 0, 257, 1024, "llama", True),  # see train_tiny
    "gpt2": GPTConfig(12, 12, 768, 0, 0, 0, 50257, 1024, "gpt2", True),
    "gpt2-xl": GPTConfig(48, 25, 1600, 0, 0, 0, 50257, 1024, "gpt2", True),
    "gpt3-175b": GPTConfig(96, 96, 12288, 0, 0, 0, 50257, 4096, "gpt2", True),  # [SARATHI §5.3]
    "llama-30m": GPTConfig(8, 8, 512, 1408, 0, 0, 8192, 2048, "llama", True),
    "llama-124m": GPTConfig(12, 12, 768, 2048, 0, 0, 50304, 2048, "llama", True),  # as GPT-2
    "llama-160m": GPTConfig(12, 12, 768, 3072, 0, 0, 32000, 2048),
    "tinyllama-1.1b": GPTConfig(22, 32, 2048, 5632, 4, 0, 32000, 2048),
    "llama-7b": GPTConfig(32, 32, 4096, 11008, 0, 0, 32000, 4096),
    "llama-13b": GPTConfig(40, 40, 5120, 13824, 0, 0, 32000, 4096),
    "llama-33b": GPTConfig(60, 52, 6656, 17920, 0, 0, 32000, 4096),
    "llama-70b": GPTConfig(80, 64, 8192, 28672, 8, 0, 32000, 4096),
}

def preset(name):
    """The GPTConfig of a preset. KeyError that lists the presets for any other name."""
    if name not in PRESETS:
        raise KeyError(f"unknown preset {name!r}: must be one of {', '.join(PRESETS)}")
    return PRESETS[name]

def is_fast(dtype, device):
    """Whether the hardware multiplies this dtype. CPUs emulate bfloat16 five times as slowly."""
    if torch.device(device).type == "cuda":
        return dtype != torch.bfloat16 or torch.cuda.get_device_capability(device) >= (8, 0)
    has_bfloat16 = torch.cpu._is_avx512_bf16_supported()
    return dtype == torch.float32 or (dtype == torch.bfloat16 and has_bfloat16)

def pick_dtype(dtype, device, stored="bfloat16"):
    """A torch dtype, also by its name. None: the stored one if this machine is fast in it, else
    float32. ValueError for any other dtype."""
    name = str(dtype or stored).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype = {name!r}: must be one of {', '.join(DTYPES)}")
    if dtype is None and not is_fast(getattr(torch, name), device):
        return torch.float32
    return getattr(torch, name)

# -----------------------------------------------------------------------------
# tensor parallelism

class World:
    """The processes that share every layer of one model. World() is a process on its own."""
    TIMEOUT = timedelta(seconds=300)  # until a rank without an answer raises

    def __init__(self, device="cpu"):
        self.rank = 0
        self.size = 1
        self.device = torch.device(device)
        self.n_bytes = 0  # sent by this rank
        if self.device.index is not None:
            torch.cuda.set_device(self.device)  # Triton launches kernels there

    @classmethod
    def start(cls, size, device="cpu"):
        """Join the `size` processes that torchrun started. ValueError if it started others."""
        n = int(os.environ.get("WORLD_SIZE", 1))
        if n != size:
            command = f"torchrun --nproc_per_node {size} {Path(sys.argv[0]).name} --tp {size}"
            raise ValueError(f"tp = {size} needs {size} processes, there are {n}: {command} ...")
        backend = "gloo"
        if size > 1 and device == "cuda":
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            backend = "cpu:gloo,cuda:nccl"
        world = cls(device)
        if size > 1:
            dist.init_process_group(backend, timeout=cls.TIMEOUT)
            atexit.register(dist.destroy_process_group)
            world.rank = dist.get_rank()
            world.size = size
        return world

    def all_reduce(self, x):
        """The sum of every rank's x, in place. Each rank sends 2 (n - 1) / n of x [S-LoRA §6]."""
        if self.size > 1:
            dist.all_reduce(x)
            self.n_bytes += 2 * (self.size - 1) * x.nbytes // self.size
        return x

    def all_gather(self, x):
        """x of every rank -> (n, *x.shape). Each rank sends n - 1 times x [S-LoRA §6]."""
        if self.size == 1:
            return x[None]
        out = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(out), x)
        self.n_bytes += (self.size - 1) * x.nbytes
        return out

    def broadcast(self, value):
        """The value of rank 0, anything that can be pickled, on every rank."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

def cut(tensor, dim, shard, module):
    """Share i of n of a whole tensor along dim. GPT-2's c_attn is q, k and v: each one is cut."""
    i, n = shard
    n_piece = 3 if "c_attn" in module else 1
    tensor = tensor.unflatten(dim, (n_piece, n, -1))  # (.., n_piece, n, width, ..)
    return tensor.select(dim + 1, i).flatten(dim, dim + 1)

# -----------------------------------------------------------------------------
# the model

def rotary_frequencies(config):
    """Radians per position (D / 2,), stretched as config.rope_scaling says."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = config.rope_theta ** -exponent
    scaling = config.rope_scaling
    kept = float(config.rope == "default")  # which part of a frequency is not stretched
    if config.rope == "llama3":  # all of the high ones, none of the low ones, a ramp in between
        low = scaling["low_freq_factor"]
        high = scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.get("factor", 1))

class GPT:
    """A model, or one device's share of it. Made by from_preset() or from_pretrained()."""

    def __init__(self, config, weights, world):
        """weights: {name: tensor} as in checkpoint_parts(), matrices packed for this machine"""
        self.config = config
        self.weights = weights
        self.world = world
        self.dtype = weights["embedding.weight"].dtype
        self.device = weights["embedding.weight"].device
        self.originals = {}  # weights without the adapter that is merged into them
        self.frequencies = rotary_frequencies(config).to(self.device)
        self.exchange = dict.fromkeys(OPERATORS)  # how devices exchange x A
        for op in OPERATORS if world.size > 1 else []:
            self.exchange[op] = world.all_reduce if op in ROW_PARALLEL else self.gather

    def affine(self, name):
        """(weight, bias or None) of a norm or an operator such as 3.preproj"""
        return self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")

    @property
    def n_bytes(self):
        """Bytes of all weights on this device"""
        distinct = dict.fromkeys(self.weights.values())
        return sum(weight.numel() * weight.dtype.itemsize for weight in distinct)

    def new_cache(self, n_page):
        """A zeroed cache (L, 2, n_page, Hk, D)"""
        c = self.config
        shape = (c.n_layer, 2, n_page, c.n_kv_head, c.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def forward(self, batch, kv, mark=None):
        """One iteration: all tokens pass a layer together, so each weight is read once
        [SARATHI §4.3]. kv (L, 2, n_page, Hk, D) -> logits (M, V), on ranks above 0 None.
        mark(operator) is called when an operator is done."""
        c = self.config
        mark = mark or (lambda operator: None)
        x = F.embedding(batch.tokens, self.weights["embedding.weight"])  # (N, C)
        rope = (None, None)
        if c.is_llama:
            angles = batch.positions[:, None] * self.frequencies  # (N, D / 2)
            rope = (angles.cos(), angles.sin())
        else:
            x = x + F.embedding(batch.positions, self.weights["positions.weight"])
        delta = None  # output of the operator before; the next norm adds it to x

        for i, layer_kv in enumerate(kv):
            x, h = add_norm(x, delta, *self.affine(f"{i}.norm1"), c.norm_eps)
            mark("others")
            qkv = self.linear("preproj", i, h, batch, layer_kv, mark)
            q = rotate_write(qkv, *rope, layer_kv, batch.pages, c.n_head, c.n_kv_head)
            h = attention(q, layer_kv, batch).flatten(1)  # (N, H * D)
            mark("attn")
            delta = self.linear("postproj", i, h, batch, layer_kv, mark)
            x, h = add_norm(x, delta, *self.affine(f"{i}.norm2"), c.norm_eps)
            mark("others")
            h = self.linear("ffn_ln1", i, h, batch, layer_kv, mark)
            h = activate(h, c.is_llama)
            mark("others")
            delta = self.linear("ffn_ln2", i, h, batch, layer_kv, mark)

        if self.world.rank > 0:
            return None
        rows = batch.logit_rows
        _, h = add_norm(x[rows], delta[rows], *self.affine("norm"), c.norm_eps)
        logits = linear(h, self.weights["head.weight"])
        mark("others")
        return logits

    def linear(self, op, i, x, batch, kv, mark):
        """x W of all rows, x A B of each row's adapter [S-LoRA §4.1], the sum over devices [§6]."""
        y = linear(x, *self.affine(f"{i}.{op}"))
        mark(op)
        if op in batch.adapters:
            lora(y, x, kv, batch.adapters[op], self.exchange[op])
            mark("lora")
        if self.world.size > 1 and op in ROW_PARALLEL:
            self.world.all_reduce(y)
            mark(op)
        return y

    def gather(self, xa):
        """xa (N, n_module * max_rank) of n devices -> (N, n_module * max_rank * n). Device d has
        rows d, d + n, ... of each A, so the columns of the devices alternate."""
        return self.world.all_gather(xa).movedim(0, -1).flatten(1)

    def hidden(self, tokens):
        """tokens (B, T) -> normed states (B, T, C) in float32, by the definitions of the operators,
        without a cache: for the oracle and the trainer."""
        c = self.config
        positions = torch.arange(tokens.size(1), device=self.device)
        angles = positions[:, None] * self.frequencies  # (T, D / 2)
        x = self.weights["embedding.weight"][tokens].float()
        if not c.is_llama:
            x = x + self.weights["positions.weight"][positions].float()
        delta = None
        for i in range(c.n_layer):
            x, h = add_norm_ref(x, delta, *self.affine(f"{i}.norm1"), c.norm_eps)
            qkv = linear_ref(h, *self.affine(f"{i}.preproj")).unflatten(-1, (-1, c.head_dim))
            qk, v = qkv.split([c.n_head + c.n_kv_head, c.n_kv_head], 2)  # (B, T, heads, D)
            if c.is_llama:
                qk = rotate_ref(qk, angles.cos(), angles.sin())
            q, k = qk.transpose(1, 2).split([c.n_head, c.n_kv_head], 1)  # (B, heads, T, D)
            v = v.transpose(1, 2)
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            delta = linear_ref(h.transpose(1, 2).flatten(2), *self.affine(f"{i}.postproj"))
            x, h = add_norm_ref(x, delta, *self.affine(f"{i}.norm2"), c.norm_eps)
            h = activate_ref(linear_ref(h, *self.affine(f"{i}.ffn_ln1")), c.is_llama)
            delta = linear_ref(h, *self.affine(f"{i}.ffn_ln2"))
        return add_norm_ref(x, delta, *self.affine("norm"), c.norm_eps)[1]

    @torch.inference_mode()
    def logits(self, tokens):
        """The oracle: tokens (T,) -> logits (T, V) in float32"""
        assert self.world.size == 1, "the oracle has no tensor parallelism"
        hidden = self.hidden(torch.as_tensor(tokens, device=self.device)[None])[0]
        return linear_ref(hidden, self.weights["head.weight"])

    def parameters(self):
        """Make all weights trainable. Returns them."""
        for name, weight in self.weights.items():
            self.weights[name] = weight.to_dense().detach().requires_grad_()
        if self.config.tied:
            self.weights["head.weight"] = self.weights["embedding.weight"]
        return list(dict.fromkeys(self.weights.values()))

    @torch.inference_mode()
    def merge(self, adapter):
        """The merge-and-swap baseline [S-LoRA §4.1]: each weight W becomes W + A B of this
        adapter, or W again if it is None."""
        assert self.world.size == 1, "merging has no tensor parallelism"
        while self.originals:
            self.set_weight(*self.originals.popitem())
        for op, operator in self.config.operators.items():
            merged = [m for m in operator.modules if adapter and m in adapter.ranks]
            for i in range(self.config.n_layer if merged else 0):
                weight = self.weights[f"{i}.{op}.weight"].to_dense().clone()
                self.originals[f"{i}.{op}.weight"] = weight.clone()
                for module in merged:
                    first, columns = operator.modules[module]
                    a, b = (t.to(self.device).float() for t in adapter.factors(i, module))
                    weight[first:first + columns] += b.T @ a
                self.set_weight(f"{i}.{op}.weight", weight)

    def set_weight(self, name, weight):
        """Plain weights are overwritten in place: CUDA graphs know their addresses."""
        if self.weights[name].is_mkldnn:
            self.weights[name] = pack(weight)
        else:
            self.weights[name].copy_(weight)

    @classmethod
    def from_preset(cls, name, dtype=None, device="cpu", seed=0, world=None):
        """Random weights for a preset or a GPTConfig. With one seed, a share of a model has the
        weights that the whole model has."""
        config = name if isinstance(name, GPTConfig) else preset(name)
        world = world or World(device)
        dtype = pick_dtype(dtype, world.device)

        def take(name, shape):
            if len(shape) == 1:
                return torch.full(shape, float(name.endswith("weight")))  # norms 1, biases 0
            rng = torch.Generator(world.device)
            rng.manual_seed((seed << 32) + zlib.crc32(name.encode()))
            weight = torch.empty(shape, dtype=dtype, device=world.device)
            return weight.normal_(0, 0.02, generator=rng)

        return cls.load(config, take, dtype, world)

    @classmethod
    def from_pretrained(cls, folder, dtype=None, device="cpu", world=None):
        """A Hugging Face folder: gpt2, llama, or mistral without sliding window. dtype None: the
        folder's if this machine is fast in it, else float32. FileNotFoundError for files that are
        missing, ValueError for contents that do not fit."""
        config, stored = read_config(Path(folder))
        world = world or World(device)
        checkpoint = Checkpoint(Path(folder), "model")
        dtype = pick_dtype(dtype, world.device, stored)
        model = cls.load(config, checkpoint.take, dtype, world)
        surplus = [name for name in checkpoint.files if not name.endswith(OLD)]
        if surplus and world.rank == 0:
            raise ValueError(f"{folder}: {len(surplus)} surplus tensors, as {surplus[0]!r}")
        return model

    @classmethod
    def load(cls, config, take, dtype, world):
        """take(name, shape) -> a whole tensor of the checkpoint, of which this rank keeps its
        share. Only one weight is in memory twice at a time."""
        config = config.shard_of(world.rank, world.size)
        weights = {}
        for name, parts in checkpoint_parts(config).items():
            if world.rank > 0 and name.endswith(RANK_0):
                continue
            shares = []
            for part, shape, dim in parts:
                tensor = take(part, shape)
                if dim is not None:
                    tensor = cut(tensor, dim, config.shard, part)
                shares.append(tensor.to(world.device, dtype))
            weight = torch.cat(shares)
            is_table = name.startswith(("embedding", "positions"))
            weights[name] = weight if is_table or weight.dim() == 1 else pack(weight)
        if config.tied and world.rank == 0:
            weights["head.weight"] = pack(weights["embedding.weight"])
        return cls(config, weights, world)

    def save_pretrained(self, folder):
        """Write a Hugging Face folder."""
        tensors = {}
        for name, parts in checkpoint_parts(self.config).items():
            weight = self.weights[name].to_dense().detach()
            sizes = [shape[0] for _, shape, _ in parts]
            for (part, _, _), tensor in zip(parts, weight.split(sizes)):
                tensors[part] = tensor.T if part.endswith(TRANSPOSED) else tensor
        architecture = "LlamaForCausalLM" if self.config.is_llama else "GPT2LMHeadModel"
        settings = {"architectures": [architecture], "model_type": self.config.family}
        for name, key in zip(FIELDS, KEYS[self.config.family]):
            settings[key] = getattr(self.config, name)
        settings["dtype"] = str(self.dtype).removeprefix("torch.")
        settings["rope_scaling"] = self.config.rope_scaling or None
        write_folder(folder, "model", tensors, "config.json", settings)

# -----------------------------------------------------------------------------
# Hugging Face folders

NAMES = {  # family -> our names and those of its checkpoints
    "llama": {"embedding": "model.embed_tokens", "norm": "model.norm", "layer": "model.layers",
              "norm1": "input_layernorm", "norm2": "post_attention_layernorm"},
    "gpt2": {"embedding": "wte", "norm": "ln_f", "layer": "h", "norm1": "ln_1", "norm2": "ln_2"},
}
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # stored as (n_in, n_out)
OLD = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq", "lm_head.weight")  # not needed
FIELDS = """n_layer n_head n_embd n_inner vocab_size block_size norm_eps tied
            n_kv_head head_dim rope_theta""".split()
KEYS = {  # family -> the keys of these fields in config.json
    "llama": """num_hidden_layers num_attention_heads hidden_size intermediate_size vocab_size
                max_position_embeddings rms_norm_eps tie_word_embeddings
                num_key_value_heads head_dim rope_theta""".split(),
    "gpt2": """n_layer n_head n_embd n_inner vocab_size n_positions layer_norm_epsilon
               tie_word_embeddings""".split(),
}
OPTIONAL = {  # the defaults of transformers
    "llama": {"n_kv_head": 0, "head_dim": 0, "norm_eps": 1e-6, "tied": False, "rope_theta": 1e4},
    "gpt2": {"n_inner": 0, "norm_eps": 1e-5, "tied": True},
}
SUPPORTED = {  # model_type -> what its config.json may say; the first value is the default
    "llama": {"hidden_act": ["silu"], "attention_bias": [False], "mlp_bias": [False],
              "partial_rotary_factor": [1.0]},
    "mistral": {"hidden_act": ["silu"], "sliding_window": [None]},
    "gpt2": {"activation_function": ["gelu_new", "gelu_pytorch_tanh"],
             "scale_attn_weights": [True], "scale_attn_by_inverse_layer_idx": [False]},
}

def checkpoint_parts(config):
    """{our name: [(name in the checkpoint, its shape, dim)]}, for example {"3.preproj.weight":
    [q, k, v]}. dim: where tensor parallelism cuts the tensor, None if it does not [S-LoRA §6]."""
    c = config
    names = NAMES[c.family]
    vocabulary = (c.vocab_size, c.n_embd)
    parts = {"embedding.weight": [(f"{names['embedding']}.weight", vocabulary, None)]}
    if not c.is_llama:
        parts["positions.weight"] = [("wpe.weight", (c.block_size, c.n_embd), None)]
    if not c.tied:
        parts["head.weight"] = [("lm_head.weight", vocabulary, None)]

    def add(name, stored, shape, dim=None):
        parts.setdefault(f"{name}.weight", []).append((f"{stored}.weight", shape, dim))
        if not c.is_llama:
            dim = 0 if dim == 0 else None
            parts.setdefault(f"{name}.bias", []).append((f"{stored}.bias", shape[:1], dim))

    add("norm", names["norm"], (c.n_embd,))
    for i in range(c.n_layer):
        prefix = f"{names['layer']}.{i}"
        add(f"{i}.norm1", f"{prefix}.{names['norm1']}", (c.n_embd,))
        add(f"{i}.norm2", f"{prefix}.{names['norm2']}", (c.n_embd,))
        for module, (op, n_out, n_in) in c.modules.items():
            add(f"{i}.{op}", f"{prefix}.{module}", (n_out, n_in), int(op in ROW_PARALLEL))
    return parts

def read_json(path):
    """The settings in a file. FileNotFoundError or ValueError that names the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} does not hold settings in JSON: {error}") from None

def check_settings(path, settings, supported):
    """ValueError for a setting with which this file would compute something else."""
    for key, values in supported.items():
        if settings.get(key, values[0]) not in values:
            valid = " or ".join(map(repr, values))
            raise ValueError(f"{path}: {key} = {settings[key]!r} is not supported, only {valid}")

def read_config(folder):
    """folder/config.json -> (GPTConfig, name of the stored dtype)"""
    path = folder / "config.json"
    c = read_json(path)
    kind = c.get("model_type")
    check_settings(path, {"model_type": kind}, {"model_type": [*SUPPORTED]})
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}  # transformers 5, or older
    c = {**rope, **c}
    check_settings(path, c, SUPPORTED[kind])
    family = "gpt2" if kind == "gpt2" else "llama"
    found = {"family": family, **OPTIONAL[family]}
    for name, key in zip(FIELDS, KEYS[family]):
        if c.get(key) is not None:
            found[name] = c[key]
        elif name not in found:
            raise ValueError(f"{path} lacks the setting {key!r}")
    try:
        config = GPTConfig(**found, rope_scaling=rope)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return config, c.get("dtype") or c.get("torch_dtype") or "float32"

def write_folder(folder, stem, tensors, settings_name, settings):
    """Write {name: tensor} to folder/stem.safetensors, and settings beside it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / f"{stem}.safetensors", metadata={"format": "pt"})
    (folder / settings_name).write_text(json.dumps(settings, indent=1))

class Checkpoint:
    """The tensors of a folder, in stem.safetensors or in shards; each is read when it is taken."""

    def __init__(self, folder, stem):
        self.folder = folder
        self.files = {}  # name -> (file, name in the file)
        index = folder / f"{stem}.safetensors.index.json"
        files = [f"{stem}.safetensors"]
        if index.is_file():
            files = sorted(set(read_json(index)["weight_map"].values()))
        for path in [folder / file for file in files]:
            if not path.is_file():
                raise FileNotFoundError(f"{path} does not exist")
            try:
                with safe_open(path, "pt") as file:
                    for name in file.keys():
                        self.files[name.removeprefix("transformer.")] = path, name
            except SafetensorError as error:
                raise ValueError(f"{path} is damaged: {error}") from None

    def take(self, name, shape):
        """The tensor `name`, (n_out, n_in) if it is a matrix. ValueError if it does not fit."""
        if name not in self.files:
            raise ValueError(f"{self.folder}: tensor {name!r} is missing")
        path, stored_name = self.files.pop(name)
        with safe_open(path, "pt") as file:  # an open file would keep in memory all it has read
            tensor = file.get_tensor(stored_name)
        tensor = tensor.T if name.endswith(TRANSPOSED) else tensor
        if tensor.shape != shape or not tensor.is_floating_point():
            raise ValueError(f"{self.folder}: tensor {name!r} is {tuple(tensor.shape)} "
                             f"{tensor.dtype}, must be {shape} and floating point")
        return tensor

# -----------------------------------------------------------------------------
# adapters

PLAIN_LORA = {  # what an adapter_config.json may say; the first value is the default
    "peft_type": ["LORA"], "bias": ["none"], "use_dora": [False], "layer_replication": [None],
    "init_lora_weights": [True, False, None, "gaussian", "orthogonal", "eva"],
}

class Adapter:
    """LoRA weights in host memory, laid out as pages of the cache [S-LoRA §5.1]: row i of A in the
    K plane, row i of B in the V plane. A row that is wider than a page takes several pages:

        page       0   1   2   3   4   5   6   7
        K plane  | A of q_proj   | A of v_proj   |     rank 4 on two modules
        V plane  | B of q_proj   | B of v_proj   |     B is multiplied by its scaling
    """

    def __init__(self, config, ranks, dtype=None):
        """ranks: {module: rank}, or one rank for q, k, v, o [S-LoRA §4.1]. dtype None: no weights.
        A device has every n-th row of A and its columns of B; of row-parallel operators its columns
        of both [S-LoRA §6]. ValueError for unknown modules."""
        if isinstance(ranks, int):
            attention = ("preproj", "postproj")
            ranks = {m: ranks for m, (op, _, _) in config.modules.items() if op in attention}
        for name in ranks:
            if name not in config.modules:
                raise ValueError(f"module {name!r}: must be one of {', '.join(config.modules)}")
        self.config = config
        self.ranks = ranks
        self.width = config.n_kv_head * config.head_dim
        self.n_page = 0
        self.n_params = 0  # of this device
        self.sites = {}  # operator -> (n_site, 8) int32, see kernels.Sites
        self.places = {}  # module -> (first page, rank of A, n_in, rank of B, columns)
        i, n = config.shard
        for op, (n_in, _, modules) in config.operators.items():
            sites = []
            for number, module in enumerate(modules):
                if module not in ranks:
                    continue
                column, columns = modules[module]
                rank = ranks[module]
                rank_a = rank if op in ROW_PARALLEL else cdiv(rank, n)
                if op in ROW_PARALLEL:
                    columns //= n
                    column = i * columns
                sites.append([0, 0, column, columns, rank_a, rank, number, self.n_page])
                self.places[module] = self.n_page, rank_a, n_in, rank, columns
                self.n_page += max(rank_a * cdiv(n_in, self.width),
                                   rank * cdiv(columns, self.width))
                self.n_params += config.n_layer * (rank_a * n_in + rank * columns)
            self.sites[op] = np.array(sites, dtype=np.int32).reshape(-1, 8)
        self.planes = None
        if dtype is not None:
            shape = (config.n_layer, 2, self.n_page, self.width)
            self.planes = torch.zeros(shape, dtype=dtype, pin_memory=torch.cuda.is_available())

    @classmethod
    def shape_only(cls, config, ranks):
        """An adapter without weights, for the simulator"""
        return cls(config, ranks)

    @classmethod
    def random(cls, config, ranks, seed=0, dtype=torch.float32):
        """Random A and B"""
        adapter = cls(config, ranks, dtype)
        rng = torch.Generator().manual_seed(seed)
        for layer in range(config.n_layer):
            for module, rank in adapter.ranks.items():
                _, n_out, n_in = config.modules[module]
                a = torch.randn(rank, n_in, generator=rng) * n_in ** -0.5
                b = torch.randn(rank, n_out, generator=rng) * 0.02
                adapter.fill(layer, module, a, b)
        return adapter

    @classmethod
    def from_pretrained(cls, folder, config, dtype=torch.float32):
        """A PEFT folder. FileNotFoundError for files that are missing, ValueError for contents
        that are no LoRA of this model."""
        rank_and_scaling = read_lora_settings(Path(folder) / "adapter_config.json")
        checkpoint = Checkpoint(Path(folder), "adapter_model")
        found = {}  # path in front of .lora_A.weight -> (layer, module)
        ranks = {}
        for name in checkpoint.files:
            match = re.fullmatch(r"(.*\.(?:layers|h)\.(\d+)\.(.+))\.lora_[AB]\.weight", name)
            if match is None or match[3] not in config.modules or int(match[2]) >= config.n_layer:
                raise ValueError(f"{folder}: {name!r} does not fit: layers 0 to "
                                 f"{config.n_layer - 1}, modules {', '.join(config.modules)}")
            path, layer, module = match.groups()
            found[path] = int(layer), module
            ranks[module] = max(ranks.get(module, 0), rank_and_scaling(path)[0])
        adapter = cls(config, ranks, dtype)
        for path, (layer, module) in found.items():
            _, n_out, n_in = config.modules[module]
            rank, scaling = rank_and_scaling(path)
            a = checkpoint.take(f"{path}.lora_A.weight", (rank, n_in))
            b = checkpoint.take(f"{path}.lora_B.weight", (n_out, rank))
            adapter.fill(layer, module, a, b.T.float() * scaling)
        return adapter

    def save_pretrained(self, folder):
        """Write a PEFT folder. alpha is the rank, so the scaling is 1."""
        prefix = "model.layers" if self.config.is_llama else "transformer.h"
        tensors = {}
        for layer in range(self.config.n_layer):
            for module in self.ranks:
                path = f"base_model.model.{prefix}.{layer}.{module}"
                a, b = self.factors(layer, module)
                tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b.T}
        settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 1, "lora_alpha": 1,
                    "rank_pattern": self.ranks, "alpha_pattern": self.ranks,
                    "target_modules": list(self.ranks), "fan_in_fan_out": not self.config.is_llama}
        write_folder(folder, "adapter_model", tensors, "adapter_config.json", settings)

    def factors(self, layer, module):
        """Views of A (rank of A, n_in) and B (rank of B, columns) on this device"""
        first, rank_a, n_in, rank_b, columns = self.places[module]
        a = self.planes[layer, 0, first:]
        b = self.planes[layer, 1, first:]
        row_a = cdiv(n_in, self.width) * self.width
        row_b = cdiv(columns, self.width) * self.width
        return a.as_strided((rank_a, n_in), (row_a, 1)), b.as_strided((rank_b, columns), (row_b, 1))

    def fill(self, layer, module, a, b):
        """Keep this device's part of A (rank, n_in) and B (rank, n_out). If the rank is smaller
        than that of the site, or not a multiple of the devices, the last rows stay zero."""
        shard = self.config.shard
        if self.config.modules[module][0] in ROW_PARALLEL:
            a = cut(a, 1, shard, module)
        else:
            a = a[shard[0]::shard[1]]
        own_a, own_b = self.factors(layer, module)
        own_a[:len(a)] = a
        own_b[:len(b)] = cut(b, 1, shard, module)

    @torch.inference_mode()
    def write(self, kv, pages):
        """Copy the weights of all layers to these pages (n_page,) of kv (L, 2, n_page, Hk, D)."""
        pages = torch.as_tensor(pages, dtype=torch.long, device=kv.device)
        planes = self.planes.to(kv.device, non_blocking=True)
        kv.index_copy_(2, pages, planes.unflatten(-1, kv.shape[3:]))

def read_lora_settings(path):
    """An adapter_config.json -> a function (path of a module) -> (rank, scaling)"""
    c = read_json(path)
    check_settings(path, c, PLAIN_LORA)
    ranks = {**(c.get("rank_pattern") or {}), ".*": c.get("r")}  # the first match counts
    alphas = {**(c.get("alpha_pattern") or {}), ".*": c.get("lora_alpha")}
    for patterns, kind in ((ranks, int), (alphas, float)):
        for value in patterns.values():
            check_number(f"{path}: rank or alpha", value, kind)

    def rank_and_scaling(module):
        module = module.removeprefix("base_model.model.")
        found = []
        for patterns in (ranks, alphas):
            matches = [p for p in patterns if re.fullmatch(rf"(.*\.)?({p})", module)]
            found.append(patterns[matches[0]])
        rank, alpha = found
        return rank, alpha / (math.sqrt(rank) if c.get("use_rslora") else rank)

    return rank_and_scaling

# -----------------------------------------------------------------------------
# text

GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS_SPLIT = (r"\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})"
                r"|\s+(?!\S)|\s+")  # every digit is a word
LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

class Tokenizer:
    """Byte-level BPE through tiktoken."""

    def __init__(self, ranks, special, split, prefix, stop):
        """ranks {bytes: token}, special {text: token}, split: a pattern that cuts a text into
        words, prefix: tokens in front of every prompt, stop: tokens that end a text"""
        self.encoding = tiktoken.Encoding("sarathi", pat_str=split, mergeable_ranks=ranks,
                                          special_tokens=special)
        self.bytes_of = {token: part for part, token in ranks.items()}
        self.bytes_of |= {token: text.encode() for text, token in special.items()}
        self.prefix = prefix
        self.stop = stop

    def encode(self, text):
        return self.prefix + self.encoding.encode(text, allowed_special="all")

    def decode(self, tokens):
        return self.stream()(tokens, final=True)

    def stream(self):
        """A function tokens -> text. The bytes of an incomplete character are held back."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

        def text_of(tokens, final=False):
            # models may have more tokens than their tokenizer
            parts = [self.bytes_of.get(token, "\ufffd".encode()) for token in tokens]
            return decoder.decode(b"".join(parts), final)

        return text_of

def byte_tokenizer():
    """Token b is byte b, and token 256 ends a text."""
    ranks = {bytes([b]): b for b in range(256)}
    return Tokenizer(ranks, {"<|endoftext|>": 256}, r"(?s:.)", [], [256])

def load_tokenizer(folder):
    """The byte-level BPE of a folder: tokenizer.json, or tokenizer.model in tiktoken's format.
    ValueError for tokenizers of another kind, FileNotFoundError if there is none."""
    folder = Path(folder)
    stop = []
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            stop = read_json(folder / name).get("eos_token_id") or stop
    parsers = {"tokenizer.json": parse_tokenizer, "tokenizer.model": parse_tiktoken}
    found = [name for name in parsers if (folder / name).is_file()]
    if not found:
        raise FileNotFoundError(f"{folder} has no tokenizer: use token ids, not text")
    path = folder / found[0]
    try:
        return Tokenizer(*parsers[path.name](path), stop if isinstance(stop, list) else [stop])
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ValueError(f"{path} is not a byte-level BPE: use token ids, not text") from None

def parse_tokenizer(path):
    """A tokenizer.json -> (ranks, special, split, prefix). KeyError and others if it is not BPE
    over bytes."""
    settings = read_json(path)
    special = {token["content"]: token["id"] for token in settings["added_tokens"]}

    # a vocabulary spells bytes as printable characters
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    byte_of = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    ranks = {}
    for word, rank in settings["model"]["vocab"].items():
        if word not in special:
            ranks[bytes(byte_of[character] for character in word)] = rank

    splitter = settings["pre_tokenizer"]
    steps = {step["type"]: step for step in splitter.get("pretokenizers", [splitter])}
    byte_level = steps.pop("ByteLevel")
    split = DIGITS_SPLIT if steps.pop("Digits", None) else GPT2_SPLIT
    if not byte_level.get("use_regex", True):
        split = steps.pop("Split")["pattern"]["Regex"]
    if steps or byte_level.get("add_prefix_space") or settings.get("normalizer"):
        raise KeyError("steps that one pattern cannot express")

    # the template may put tokens in front of a text
    post = settings.get("post_processor") or {}
    template = [item for step in post.get("processors", [post]) for item in step.get("single", [])]
    prefix = []
    while template and "SpecialToken" in template[0]:
        prefix.append(special[template.pop(0)["SpecialToken"]["id"]])
    return ranks, special, split, prefix

def parse_tiktoken(path):
    """Lines "token in base64, rank" -> (ranks, special, split, prefix), as in Llama 3"""
    ranks = {}
    for line in path.read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token, validate=True)] = int(rank)
    special = {"<|begin_of_text|>": len(ranks), "<|end_of_text|>": len(ranks) + 1}
    return ranks, special, LLAMA3_SPLIT, [len(ranks)]

# -----------------------------------------------------------------------------
# models by name, and the tiny model

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sarathi"

def load_model(name, dtype=None, device="cpu", seed=0, world=None):
    """name: a preset (random weights), a Hugging Face folder, or "tiny" and its "draft" once they
    are trained. -> (GPT, Tokenizer or None)"""
    if name in PRESETS and name != "tiny":
        return GPT.from_preset(name, dtype, device, seed, world), None
    trained = name in ("tiny", "draft")
    folder = CACHE / name if trained else Path(name)
    if not folder.is_dir():
        valid = f"must be a folder or one of {', '.join(PRESETS)}"
        hint = "is not trained yet, run `python model.py`" if trained else valid
        raise FileNotFoundError(f"model {name!r}: {hint}")
    model = GPT.from_pretrained(folder, dtype, device, world)
    try:
        tokenizer = byte_tokenizer() if trained else load_tokenizer(folder)
    except (FileNotFoundError, ValueError):
        tokenizer = None
    return model, tokenizer

def stdlib_tokens():
    """The sources of Python's standard library as bytes (T,), each file ended by token 256"""
    tokens = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        tokens += [*path.read_bytes(), 256]
    return torch.tensor(tokens)

def train(config, data, steps, name, B=4, T=256):
    """Train a model on tokens (n,). -> (GPT, mean loss of the last 50 steps in nats per token)"""
    rng = torch.Generator().manual_seed(0)
    model = GPT.from_preset(config, torch.float32)
    parameters = model.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.99), weight_decay=0.1)
    losses = []
    bar = tqdm(range(steps), f"training {name}")
    for step in bar:
        # 50 steps of warming up, then half a cosine down to a tenth
        decay = 0.55 + 0.45 * math.cos(math.pi * step / steps)
        optimizer.param_groups[0]["lr"] = 2e-3 * min((step + 1) / 50, decay)
        start = torch.randint(len(data) - T, (B, 1), generator=rng)
        tokens = data[start + torch.arange(T + 1)]  # (B, T + 1)
        with torch.autocast("cpu", enabled=is_fast(torch.bfloat16, "cpu")):
            logits = linear_ref(model.hidden(tokens[:, :-1]), model.weights["head.weight"])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    return model, float(np.mean(losses[-50:]))

def train_tiny(steps=1100):
    """Train the preset "tiny" and, in half as many steps, a draft model of one layer."""
    data = stdlib_tokens()
    config = preset("tiny")
    for name, n_layer, n in (("draft", 1, steps // 2), ("tiny", config.n_layer, steps)):
        model, loss = train(replace(config, n_layer=n_layer), data, n, name)
        model.save_pretrained(CACHE / name)
        print(f"{name}: loss {loss:.2f} nats per byte, saved in {CACHE / name}")

if __name__ == "__main__":
    train_tiny()
