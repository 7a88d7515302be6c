"""GPT-2 and LLaMA over a flat batch of tokens. This file knows weights, checkpoints and text. It
has never heard of a request. In reading order:

    GPTConfig, PRESETS    the shape of a model and its tensors [SARATHI Table 1]
    World                 the processes of a tensor-parallel group [S-LoRA §6]
    GPT                   forward(batch, kv): one iteration; logits(tokens): the oracle
    Checkpoint            the tensors of a Hugging Face or PEFT folder
    Adapter               LoRA weights, laid out as the pages of the cache [S-LoRA §5.1]
    Tokenizer             byte-level BPE through tiktoken
    python model.py       train the tiny model and its draft model, about three minutes
"""
import atexit
import codecs
import json
import math
import os
import re
import zlib
from collections import namedtuple
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import tiktoken
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from kernels import (activate, activate_ref, add_norm, add_norm_ref, attention, cdiv, linear,
                     linear_ref, lora, pack, rotate_ref, rotate_write)

OPERATORS = ("preproj", "postproj", "ffn_ln1", "ffn_ln2")  # of one layer [SARATHI Table 1]
ROW_PARALLEL = ("postproj", "ffn_ln2")  # tensor parallelism cuts their input, not their output
RANK_0 = ("head.weight", "postproj.bias", "ffn_ln2.bias")  # weights that only rank 0 has
TENSORS = {  # family -> our name, name in a checkpoint, shape (see GPTConfig.tensors); * is a layer
    "llama": """embedding    model.embed_tokens                        V C
                norm         model.norm                                C
                head         lm_head                                   V C
                *.norm1      model.layers.*.input_layernorm            C
                *.preproj    model.layers.*.self_attn.q_proj           Q C
                *.preproj    model.layers.*.self_attn.k_proj           K C
                *.preproj    model.layers.*.self_attn.v_proj           K C
                *.postproj   model.layers.*.self_attn.o_proj           C Q
                *.norm2      model.layers.*.post_attention_layernorm   C
                *.ffn_ln1    model.layers.*.mlp.gate_proj              I C
                *.ffn_ln1    model.layers.*.mlp.up_proj                I C
                *.ffn_ln2    model.layers.*.mlp.down_proj              C I""",
    "gpt2": """embedding    wte              V C
               positions    wpe              T C
               norm         ln_f             C
               head         lm_head          V C
               *.norm1      h.*.ln_1         C
               *.preproj    h.*.attn.c_attn  QKV C
               *.postproj   h.*.attn.c_proj  C Q
               *.norm2      h.*.ln_2         C
               *.ffn_ln1    h.*.mlp.c_fc     I C
               *.ffn_ln2    h.*.mlp.c_proj   C I"""}
ROPE_SCALINGS = {"default": [], "linear": ["factor"], "llama3": [  # the numbers each one needs
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]}
# one or several modules, side by side in one matrix. modules: {name: (first column, columns)}
Operator = namedtuple("Operator", "n_in n_out modules")

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
            if f.type in (int, float) and (value or f.default):
                check_number(f.name, value, f.type)
        self.is_llama = self.family == "llama"
        self.n_inner = self.n_inner or 4 * self.n_embd
        self.n_kv_head = self.n_kv_head or self.n_head
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head = {self.n_head}: no multiple of n_kv_head {self.n_kv_head}")
        if self.head_dim == 0 or self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim}: must be even and positive")
        self.rope = self.rope_scaling.get("rope_type") or self.rope_scaling.get("type", "default")
        if self.rope not in ROPE_SCALINGS:
            raise ValueError(f"rope_type = {self.rope!r}: must be one of {[*ROPE_SCALINGS]}")
        for key in ROPE_SCALINGS[self.rope]:
            check_number(f"rope_scaling: {key}", self.rope_scaling.get(key), float)

    def shard_of(self, rank, n):
        """The share of device `rank` of n. ValueError if n does not divide heads and widths."""
        for name in ("n_head", "n_kv_head", "n_inner", "n_embd"):
            if getattr(self, name) % n:
                raise ValueError(f"tp = {n} does not divide {name} = {getattr(self, name)}")
        return replace(self, n_head=self.n_head // n, n_kv_head=self.n_kv_head // n,
                       n_inner=self.n_inner // n, shard=(rank, n))

    @cached_property
    def tensors(self):
        """{our name: [(name in a checkpoint, shape, dim)]} of the whole model, for example
        {"3.preproj.weight": [q, k, v]}. Tensor parallelism cuts dim, if it is not None."""
        n = self.shard[1]
        Q = self.n_head * n * self.head_dim
        K = self.n_kv_head * n * self.head_dim
        sizes = dict(V=self.vocab_size, T=self.block_size, C=self.n_embd, I=self.n_inner * n,
                     Q=Q, K=K, QKV=Q + 2 * K)
        tensors = {}
        for line in TENSORS[self.family].splitlines():
            ours, theirs, *letters = line.split()
            shape = tuple(sizes[letter] for letter in letters)
            dim = next((dim for dim, size in enumerate(letters) if size not in "VTC"), None)
            kinds = [("weight", shape, dim)]
            if not self.is_llama and letters[0] not in "V T":
                kinds.append(("bias", shape[:1], 0 if dim == 0 else None))
            for i in range(self.n_layer if "*" in ours else 1):
                for kind, shape, dim in kinds:
                    parts = tensors.setdefault(f"{ours}.{kind}".replace("*", str(i)), [])
                    parts.append((f"{theirs}.{kind}".replace("*", str(i)), shape, dim))
        if self.tied:
            del tensors["head.weight"]
        return tensors

    @cached_property
    def modules(self):
        """{module of a checkpoint: (operator, n_out, n_in)} of one layer of the whole model"""
        modules = {}
        for op in OPERATORS:
            for name, shape, _ in self.tensors[f"0.{op}.weight"]:
                modules[name.split(".0.")[1].removesuffix(".weight")] = (op, *shape)
        return modules

    @cached_property
    def operators(self):
        """{name: Operator} of one layer of this share"""
        n = self.shard[1]
        operators = {name: Operator(0, 0, {}) for name in OPERATORS}
        for module, (name, n_out, n_in) in self.modules.items():
            n_in //= n if name in ROW_PARALLEL else 1
            n_out //= 1 if name in ROW_PARALLEL else n
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
        parts = sum(self.tensors.values(), [])
        n = self.shard[1]
        return sum(math.prod(shape) // (1 if dim is None else n) for _, shape, dim in parts)

    def page_bytes(self, itemsize):
        """Bytes of K and V of one token in all layers: m_kv in [SARATHI §4.3]"""
        return 2 * self.n_layer * self.n_kv_head * self.head_dim * itemsize

def check_number(name, value, kind):
    """ValueError unless value is a positive number, for kind int a whole one."""
    if not isinstance(value, (int, kind)) or not 0 < value < math.inf:
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
    "llama-70b": GPTConfig(80, 64, 8192, 28672, 8, 0, 32000, 4096)}

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
    """A torch dtype. None: the stored one if this machine is fast in it, else float32."""
    name = str(dtype or stored).removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype = {name!r}: must be one of float32, bfloat16, float16")
    if dtype is None and not is_fast(getattr(torch, name), device):
        name = "float32"
    return getattr(torch, name)

class World:
    """The processes that share every layer of one model. World() is a process on its own."""

    def __init__(self, device="cpu", rank=0, size=1):
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self.n_bytes = 0  # sent by this rank
        if self.device.index is not None:
            torch.cuda.set_device(self.device)  # Triton launches kernels there

    @classmethod
    def start(cls, size, device="cpu"):
        """Join the `size` processes that torchrun started. ValueError if it started others."""
        n = int(os.environ.get("WORLD_SIZE", 1))
        if n != size:
            raise ValueError(f"tp = {size} needs {size} processes, there are {n}: torchrun "
                             f"--nproc_per_node {size} sarathi.py --tp {size} ...")
        if size == 1:
            return cls(device)
        backend = "gloo"
        if device == "cuda":
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend)
        atexit.register(dist.destroy_process_group)
        return cls(device, dist.get_rank(), size)

    def all_reduce(self, x):
        """The sum of every rank's x, in place. Each rank sends 2 (n - 1) / n of x [S-LoRA §6]."""
        dist.all_reduce(x)
        self.n_bytes += 2 * (self.size - 1) * x.nbytes // self.size
        return x

    def all_gather(self, x):
        """x (N, C) -> (N, C * n), columns of n ranks in turn. Each sends n - 1 times x."""
        out = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(out), x)
        self.n_bytes += (self.size - 1) * x.nbytes
        return out.movedim(0, -1).flatten(1)

    def broadcast(self, value):
        """The value of rank 0 on every rank"""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values)
        return values[0]

def cut(tensor, dim, shard, module):
    """Share i of n along dim, all if dim is None. GPT-2's c_attn is q, k and v: each one is cut."""
    if dim is None:
        return tensor
    n_piece = 3 if "c_attn" in module else 1
    tensor = tensor.unflatten(dim, (n_piece, shard[1], -1))  # (.., n_piece, n, width, ..)
    return tensor.select(dim + 1, shard[0]).flatten(dim, dim + 1)

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

    def __init__(self, config, take, dtype, world):
        """Keep this rank's share of each tensor that take(name, shape) returns."""
        self.config = config = config.shard_of(world.rank, world.size)
        self.world = world
        self.dtype = dtype
        self.weights = {}  # as in config.tensors, matrices packed for this machine
        self.originals = {}  # weights without the adapter that is merged into them
        for name, parts in config.tensors.items():
            if world.rank > 0 and name.endswith(RANK_0):
                continue
            shares = [cut(take(part, shape), dim, config.shard, part) for part, shape, dim in parts]
            weight = torch.cat(shares).to(world.device, dtype)
            is_table = name.startswith(("embedding", "positions"))
            self.weights[name] = weight if is_table or weight.dim() == 1 else pack(weight)
        if config.tied and world.rank == 0:
            self.weights["head.weight"] = pack(self.weights["embedding.weight"])
        self.device = self.weights["embedding.weight"].device
        self.frequencies = rotary_frequencies(config).to(self.device)
        self.exchange = dict.fromkeys(OPERATORS)  # how devices exchange x A
        for op in OPERATORS if world.size > 1 else []:
            self.exchange[op] = world.all_reduce if op in ROW_PARALLEL else world.all_gather

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
        """x W of all rows, x A B of their adapters [S-LoRA §4.1], summed over devices [§6]"""
        y = linear(x, *self.affine(f"{i}.{op}"))
        mark(op)
        if op in batch.adapters:
            lora(y, x, kv, batch.adapters[op], self.exchange[op])
            mark("lora")
        if self.world.size > 1 and op in ROW_PARALLEL:
            self.world.all_reduce(y)
            mark(op)
        return y

    def hidden(self, tokens):
        """tokens (B, T) -> normed states (B, T, C) in float32, by the operators' definitions"""
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
        """The merge-and-swap baseline [S-LoRA §4.1]: W becomes W + A B, or W again for None."""
        assert adapter is None or self.world.size == 1, "merging has no tensor parallelism"
        self.weights |= self.originals
        self.originals = {}
        for op, operator in self.config.operators.items() if adapter else []:
            merged = operator.modules.keys() & adapter.ranks
            for i in range(self.config.n_layer if merged else 0):
                self.originals[f"{i}.{op}.weight"] = self.weights[f"{i}.{op}.weight"]
                weight = self.weights[f"{i}.{op}.weight"].to_dense().clone()
                for module in merged:
                    first, columns = operator.modules[module]
                    a, b = (t.to(self.device).float() for t in adapter.factors(i, module))
                    weight[first:first + columns] += b.T @ a
                self.weights[f"{i}.{op}.weight"] = pack(weight)

    @classmethod
    def from_preset(cls, name, dtype=None, device="cpu", seed=0, world=None):
        """Random weights, for one seed the same on any number of devices. name: or a GPTConfig"""
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

        return cls(config, take, dtype, world)

    @classmethod
    def from_pretrained(cls, folder, dtype=None, device="cpu", world=None):
        """A Hugging Face folder: gpt2, llama, or mistral without sliding window. FileNotFoundError
        for files that are missing, ValueError for contents that do not fit."""
        config, stored = read_config(Path(folder))
        checkpoint = Checkpoint(Path(folder), "model")
        world = world or World(device)
        model = cls(config, checkpoint.take, pick_dtype(dtype, world.device, stored), world)
        surplus = [name for name in checkpoint if not name.endswith(NOT_NEEDED)]
        if surplus and world.rank == 0:
            raise ValueError(f"{folder}: {len(surplus)} surplus tensors, as {surplus[0]!r}")
        return model

    def save_pretrained(self, folder):
        """Write a Hugging Face folder."""
        c = self.config
        tensors = {}
        for name, parts in c.tensors.items():
            weight = self.weights[name].to_dense().detach()
            for part, shape, _ in parts:
                tensor, weight = weight.tensor_split([shape[0]])
                tensors[part] = tensor.T if part.endswith(TRANSPOSED) else tensor
        architecture = "LlamaForCausalLM" if c.is_llama else "GPT2LMHeadModel"
        settings = {key: getattr(c, name) for name, key in zip(FIELDS, KEYS[c.family])}
        settings |= {"architectures": [architecture], "model_type": c.family,
                     "dtype": str(self.dtype)[6:], "rope_scaling": c.rope_scaling or None}
        write_folder(folder, "model", tensors, "config.json", settings)

# -----------------------------------------------------------------------------
# Hugging Face folders
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # stored as (n_in, n_out)
NOT_NEEDED = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq", "lm_head.weight")
FIELDS = """n_layer n_head n_embd n_inner vocab_size block_size norm_eps tied
            n_kv_head head_dim rope_theta""".split()
KEYS = {  # family -> the keys of these fields in config.json
    "llama": """num_hidden_layers num_attention_heads hidden_size intermediate_size vocab_size
                max_position_embeddings rms_norm_eps tie_word_embeddings
                num_key_value_heads head_dim rope_theta""".split(),
    "gpt2": """n_layer n_head n_embd n_inner vocab_size n_positions layer_norm_epsilon
               tie_word_embeddings""".split()}
OPTIONAL = {  # the defaults of transformers
    "llama": dict(n_kv_head=0, head_dim=0, norm_eps=1e-6, tied=False, rope_theta=10000.0),
    "gpt2": dict(n_inner=0, norm_eps=1e-5, tied=True)}
SUPPORTED = {  # what config.json or adapter_config.json may say; the first value is the default
    "model_type": ["llama", "mistral", "gpt2"], "hidden_act": ["silu"], "attention_bias": [False],
    "mlp_bias": [False], "sliding_window": [None], "scale_attn_by_inverse_layer_idx": [False],
    "activation_function": ["gelu_new", "gelu_pytorch_tanh"], "scale_attn_weights": [True],
    "peft_type": ["LORA"], "bias": ["none"], "use_dora": [False], "layer_replication": [None],
    "init_lora_weights": [True, False, None, "gaussian", "orthogonal", "eva"]}

def read_json(path):
    """The settings in a file. ValueError for settings that this file does not support."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        settings = dict(json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} does not hold settings in JSON: {error}") from None
    for key, values in SUPPORTED.items():
        if settings.get(key, values[0]) not in values:
            valid = " or ".join(map(repr, values))
            raise ValueError(f"{path}: {key} = {settings[key]!r} is not supported, only {valid}")
    return settings

def read_config(folder):
    """folder/config.json -> (GPTConfig, name of the stored dtype)"""
    c = read_json(folder / "config.json")
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}  # transformers 5, or older
    c = {**rope, **c}
    family = "gpt2" if c.get("model_type") == "gpt2" else "llama"
    found = {"family": family, "rope_scaling": rope, **OPTIONAL[family]}
    for name, key in zip(FIELDS, KEYS[family]):
        if c.get(key) is not None:
            found[name] = c[key]
        elif name not in found:
            raise ValueError(f"{folder}/config.json lacks the setting {key!r}")
    return GPTConfig(**found), c.get("dtype") or c.get("torch_dtype") or "float32"

def write_folder(folder, stem, tensors, settings_name, settings):
    """Write {name: tensor} to folder/stem.safetensors, and settings beside it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / f"{stem}.safetensors", metadata={"format": "pt"})
    (folder / settings_name).write_text(json.dumps(settings, indent=1))

class Checkpoint(dict):
    """{name: tensor} of a folder, from stem.safetensors or its shards, matrices as (n_out, n_in).
    The tensors stay in the files until they are used."""

    def __init__(self, folder, stem):
        self.folder = folder
        paths = sorted(folder.glob(f"{stem}*.safetensors"))
        if not paths:
            raise FileNotFoundError(f"{folder}/{stem}.safetensors does not exist")
        for path in paths:
            try:
                found = load_file(path)
            except SafetensorError as error:
                raise ValueError(f"{path} is damaged: {error}") from None
            for name, tensor in found.items():
                tensor = tensor.T if name.endswith(TRANSPOSED) else tensor
                self[name.removeprefix("transformer.")] = tensor

    def take(self, name, shape):
        """Remove a tensor and return it. ValueError if it is missing or does not fit."""
        if name not in self:
            raise ValueError(f"{self.folder}: tensor {name!r} is missing")
        tensor = self.pop(name)
        if tensor.shape != shape or not tensor.is_floating_point():
            raise ValueError(f"{self.folder}: tensor {name!r} is {tuple(tensor.shape)} "
                             f"{tensor.dtype}, must be {shape} and floating point")
        return tensor

class Adapter:
    """LoRA weights in host memory, laid out as pages of the cache [S-LoRA §5.1]: row i of A in the
    K plane, row i of B in the V plane. A row that is wider than a page takes several pages:

        page       0   1   2   3   4   5   6   7
        K plane  | A of q_proj   | A of v_proj   |     rank 4 on two modules
        V plane  | B of q_proj   | B of v_proj   |     B is multiplied by its scaling
    """

    def __init__(self, config, ranks, dtype=None):
        """ranks: {module: rank}, or one rank for q, k, v, o [S-LoRA §4.1]. dtype None: no weights.
        A device has its columns of B and every n-th row of A, in row-parallel operators its columns
        of both [S-LoRA §6]."""
        if isinstance(ranks, int):
            attention = ("preproj", "postproj")
            ranks = {m: ranks for m, (op, _, _) in config.modules.items() if op in attention}
        self.config = config
        self.ranks = ranks
        self.width = config.n_kv_head * config.head_dim
        self.n_page = 0
        self.n_params = 0  # of this device
        self.sites = {}  # operator -> (n_site, 8) int32, see kernels.Sites
        self.places = {}  # module -> (first page, shape of A, shape of B)
        i, n = config.shard
        for op, (n_in, _, modules) in config.operators.items():
            sites = []
            for number, (module, (column, columns)) in enumerate(modules.items()):
                if module not in ranks:
                    continue
                rank = rank_a = ranks[module]
                if op in ROW_PARALLEL:
                    columns //= n
                    column = i * columns
                else:
                    rank_a = cdiv(rank, n)
                sites.append([0, 0, column, columns, rank_a, rank, number, self.n_page])
                shapes = (rank_a, n_in), (rank, columns)
                self.places[module] = self.n_page, *shapes
                self.n_page += max(rows * cdiv(width, self.width) for rows, width in shapes)
                self.n_params += config.n_layer * sum(map(math.prod, shapes))
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
        """A PEFT folder. Errors as in GPT.from_pretrained."""
        settings = read_json(Path(folder) / "adapter_config.json")
        alphas = {**(settings.get("alpha_pattern") or {}), ".*": settings.get("lora_alpha")}
        checkpoint = Checkpoint(Path(folder), "adapter_model")
        factors = {}  # (layer, module) -> A (rank, n_in), B (rank, n_out)
        ranks = {}
        while checkpoint:
            name = next(iter(checkpoint))
            match = re.fullmatch(r"(.*\.(?:layers|h)\.(\d+)\.(.+))\.lora_[AB]\.weight", name)
            if match is None or match[3] not in config.modules or int(match[2]) >= config.n_layer:
                raise ValueError(f"{folder}: {name!r} does not fit: layers 0 to "
                                 f"{config.n_layer - 1}, modules {', '.join(config.modules)}")
            path, layer, module = match.groups()
            _, n_out, n_in = config.modules[module]
            rank = len(checkpoint.get(f"{path}.lora_A.weight", ()))
            a = checkpoint.take(f"{path}.lora_A.weight", (rank, n_in))
            b = checkpoint.take(f"{path}.lora_B.weight", (n_out, rank))
            alpha = next(alphas[p] for p in alphas if re.fullmatch(rf"(.*\.)?({p})", path))
            check_number(f"{folder}: lora_alpha", alpha, float)
            scaling = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
            factors[int(layer), module] = a, b.T.float() * scaling
            ranks[module] = max(ranks.get(module, 0), rank)
        adapter = cls(config, ranks, dtype)
        for place, (a, b) in factors.items():
            adapter.fill(*place, a, b)
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
        first, *shapes = self.places[module]
        views = []
        for plane, (rank, width) in zip(self.planes[layer], shapes):
            pages = plane[first:first + rank * cdiv(width, self.width)]
            views.append(pages.view(rank, -1)[:, :width])
        return views

    def fill(self, layer, module, a, b):
        """Keep this device's part of A (rank, n_in) and B (rank, n_out), below them zeros."""
        shard = self.config.shard
        row_parallel = self.config.modules[module][0] in ROW_PARALLEL
        a = cut(a, 1, shard, module) if row_parallel else a[shard[0]::shard[1]]
        own_a, own_b = self.factors(layer, module)
        own_a[:len(a)] = a
        own_b[:len(b)] = cut(b, 1, shard, module)

    @torch.inference_mode()
    def write(self, kv, pages):
        """Copy the weights of all layers to these pages (n_page,) of kv (L, 2, n_page, Hk, D)."""
        pages = torch.as_tensor(pages, dtype=torch.long, device=kv.device)
        planes = self.planes.to(kv.device, non_blocking=True)
        kv.index_copy_(2, pages, planes.unflatten(-1, kv.shape[3:]))

# -----------------------------------------------------------------------------
# text
GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS_SPLIT = (r"\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})"
                r"|\s+(?!\S)|\s+")  # every digit is a word

class Tokenizer:
    """Byte-level BPE through tiktoken."""

    def __init__(self, ranks, special, split, prefix, stop):
        """ranks {bytes: token}, special {text: token}, split: a pattern of a word, prefix: tokens
        in front of every prompt, stop: tokens that end a text"""
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
            parts = [self.bytes_of.get(token, "\ufffd".encode()) for token in tokens]
            return decoder.decode(b"".join(parts), final)

        return text_of

def byte_tokenizer():
    """Token b is byte b, and token 256 ends a text."""
    ranks = {bytes([b]): b for b in range(256)}
    return Tokenizer(ranks, {"<|endoftext|>": 256}, r"(?s:.)", [], [256])

def load_tokenizer(folder):
    """The byte-level BPE in folder/tokenizer.json, None for a folder without one."""
    stop = []
    for path in (Path(folder) / "config.json", Path(folder) / "generation_config.json"):
        if path.is_file():
            stop = read_json(path).get("eos_token_id") or stop
    stop = stop if isinstance(stop, list) else [stop]
    try:
        return Tokenizer(*parse_tokenizer(read_json(Path(folder) / "tokenizer.json")), stop)
    except (FileNotFoundError, KeyError, TypeError, AttributeError, ValueError):
        return None  # none, or one of another kind

def parse_tokenizer(settings):
    """A tokenizer.json -> (ranks, special, split, prefix), KeyError and others if that fails"""
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
    # a template may put tokens in front of a text
    post = settings.get("post_processor") or {}
    template = [item for step in post.get("processors", [post]) for item in step.get("single", [])]
    prefix = []
    while template and "SpecialToken" in template[0]:
        prefix.append(special[template.pop(0)["SpecialToken"]["id"]])
    return ranks, special, split, prefix

# -----------------------------------------------------------------------------
# models by name, and the tiny model
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sarathi"

def load_model(name, dtype=None, device="cpu", seed=0, world=None):
    """A preset (random weights), a folder, or "tiny" or "draft" -> (GPT, Tokenizer or None)"""
    if name in PRESETS and name != "tiny":
        return GPT.from_preset(name, dtype, device, seed, world), None
    trained = name in ("tiny", "draft")
    folder = CACHE / name if trained else Path(name)
    if not folder.is_dir():
        valid = f"must be a folder or one of {', '.join(PRESETS)}"
        hint = "is not trained yet, run `python model.py`" if trained else valid
        raise FileNotFoundError(f"model {name!r}: {hint}")
    tokenizer = byte_tokenizer() if trained else load_tokenizer(folder)
    return GPT.from_pretrained(folder, dtype, device, world), tokenizer

def stdlib_tokens():
    """The sources of Python's standard library as bytes (T,), each file ended by token 256"""
    tokens = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        tokens += [*path.read_bytes(), 256]
    return torch.tensor(tokens)

def train_tiny(steps=1100, B=4, T=256):
    """Train the preset "tiny" and, in half as many steps, a draft model of one layer."""
    data = stdlib_tokens()
    for name, config, n in (("draft", replace(preset("tiny"), n_layer=1), steps // 2),
                            ("tiny", preset("tiny"), steps)):
        rng = torch.Generator().manual_seed(0)
        model = GPT.from_preset(config, torch.float32)
        parameters = model.parameters()
        optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.99), weight_decay=0.1)
        bar = tqdm(range(n), f"training {name}")
        for step in bar:
            # 50 steps of warming up, then half a cosine down to a tenth
            decay = 0.55 + 0.45 * math.cos(math.pi * step / n)
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
            bar.set_postfix(loss=f"{loss.item():.2f} nats per byte")
        model.save_pretrained(CACHE / name)
        print(f"saved in {CACHE / name}")

if __name__ == "__main__":
    train_tiny()
