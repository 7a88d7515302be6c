"""GPT-2, LLaMA, Mistral and Qwen over a flat batch of tokens. This file knows weights, checkpoints
and text, but no requests. `python model.py` trains "tiny" and its draft model.

    GPTConfig       the shape of a model
    GPT             forward(batch, kv): one iteration; forward_ref: the reference
    Adapter         its weights, laid out as pages of the cache [S-LoRA §5.1]

    appendix        the tensors of a checkpoint; how devices share a model [S-LoRA §6]; checks of
                    what users give; checkpoints; text; models by name; training
"""

import argparse
import atexit
import json
import math
import os
import re
import sys
from collections import defaultdict, namedtuple
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from numbers import Integral, Real
from pathlib import Path

# kernels before torch, because it sets how torch's threads wait
from kernels import (CACHE, activate, activate_ref, add_norm, add_norm_ref, attention, cdiv,
                     describe, heads_ref, least_limit, linear, linear_ref, lora, pack, power_of_two,
                     rotate_write, to_device)

import tiktoken
import torch
import torch.distributed as dist
import torch.nn.functional as F
from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file
from tqdm import tqdm

# -----------------------------------------------------------------------------
# the shape of a model

# the matrix products of a layer. In GPT-2 gate_up_proj has no gate
OPERATORS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
# columns: {module of a checkpoint, such as self_attn.q_proj: (its first output, how many)}
Operator = namedtuple("Operator", "n_in n_out columns")

@dataclass
class GPTConfig:
    """The shape of a model. Family "gpt2" has learned positions, LayerNorm and GELU, all others
    have RoPE, RMSNorm and SwiGLU. Only "qwen3" has norms of q and k."""
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_inner: int | None = None  # None: 4 * n_embd
    n_kv_head: int | None = None  # None: n_head; fewer: grouped-query attention
    head_dim: int | None = None  # None: n_embd / n_head
    vocab_size: int = 50257
    block_size: int = 1024  # the longest context
    family: str = "llama"
    tied: bool = False  # the output head is the token embedding
    norm_eps: float = 1e-5
    rope_theta: float | int = 10000.0
    rope_scaling: dict | None = None  # as in a Hugging Face config
    attention_bias: bool = False  # of q, k, v and o. "gpt2" always has all biases, "qwen2" of qkv
    mlp_bias: bool = False
    shard: tuple = (0, 1)  # (i, n): device i of n; n_head, n_kv_head, n_inner are its share

    # ---- the rest

    def __post_init__(self):
        for name, kind in GPTConfig.__annotations__.items():
            check_field(name, getattr(self, name), kind)
        self.is_llama = self.family != "gpt2"
        self.layers = "model.layers" if self.is_llama else "transformer.h"  # in transformers
        self.n_inner = self.n_inner or 4 * self.n_embd
        self.n_kv_head = self.n_kv_head or self.n_head
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head = {self.n_kv_head}: must divide n_head = {self.n_head}")
        if self.is_llama and self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim}: must be even, positions rotate pairs")

    @cached_property
    def modules(self):
        """{module of a checkpoint: (operator, n_out, n_in)}, in a layer of the whole model"""
        return {module: (op, *shape) for op, module, _, *shape in list_layer(self)
                if op in OPERATORS}

    @cached_property
    def operators(self):
        """{name: Operator}, in a layer of this device's share"""
        i, n = self.shard
        operators = {}
        for module, (op, n_out, n_in) in self.modules.items():
            own = n_out // n
            if op in ROW_PARALLEL:  # all columns, which devices sum; an adapter adds to some
                operators[op] = Operator(n_in // n, n_out, {module: (i * own, own)})
            else:
                _, first, columns = operators.get(op, (n_in, 0, {}))
                operators[op] = Operator(n_in, first + own, columns | {module: (first, own)})
        return operators

    def shard_of(self, rank, n):
        """The share of device `rank` of n. ValueError if n does not divide heads and widths."""
        for name in ("n_head", "n_kv_head", "n_inner", "n_embd"):
            if getattr(self, name) % n:
                raise ValueError(f"tp = {n} does not divide {name} = {getattr(self, name)}")
        return replace(self, n_head=self.n_head // n, n_kv_head=self.n_kv_head // n,
                       n_inner=self.n_inner // n, shard=(rank, n))

    @cached_property
    def n_params(self):
        """Parameters of the whole model, embeddings included"""
        parts = sum(list_tensors(self).values(), [])
        return sum(math.prod(shape) for _, shape, _ in parts)

    def page_bytes(self, itemsize):
        """Bytes of K and V of one token in all layers: m_kv in [SARATHI §4.3]"""
        return 2 * self.n_layer * self.n_kv_head * self.head_dim * itemsize

# -----------------------------------------------------------------------------
# a model

class GPT:
    """A model, made by from_preset() or from_pretrained()."""

    def forward_ref(self, tokens):
        """The reference, without a cache: tokens (B, T) -> logits (B, T, V) in float32"""
        c = self.config
        x, rope = self.embed(tokens, torch.arange(tokens.size(1), device=self.device))
        x = x.float()  # (B, T, C)
        delta = None  # output of o_proj or down_proj; the next add_norm first adds it to x
        for i in range(c.n_layer):
            x, h = add_norm_ref(x, delta, *self.affine(f"{i}.norm1"), c.norm_eps)
            qkv = linear_ref(h, *self.affine(f"{i}.qkv_proj"))
            qk_norm = self.weights.get(f"{i}.qk_norm.weight")
            heads = heads_ref(qkv, *rope, c.n_head, c.n_kv_head, qk_norm, c.norm_eps)
            q, k, v = (part.transpose(1, 2) for part in heads)  # (B, heads, T, D)
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            delta = linear_ref(h.transpose(1, 2).flatten(2), *self.affine(f"{i}.o_proj"))
            x, h = add_norm_ref(x, delta, *self.affine(f"{i}.norm2"), c.norm_eps)
            h = activate_ref(linear_ref(h, *self.affine(f"{i}.gate_up_proj")), c.is_llama)
            delta = linear_ref(h, *self.affine(f"{i}.down_proj"))
        _, h = add_norm_ref(x, delta, *self.affine("norm"), c.norm_eps)
        return linear_ref(h, self.weights["head.weight"])

    @torch.inference_mode()
    def forward(self, batch, kv, mark=lambda part: None):
        """One iteration. All tokens pass a layer together, so that each weight is read once for all
        [SARATHI §4.3]. batch: a kernels.Batch of N rows, M of them need logits; kv (L, 2, n_page,
        Hk, D) -> logits (M, V). batch.hidden (M, C) becomes the hidden states that gave them.
        mark(part) is for bench.py, which times the parts."""
        c = self.config
        x, rope = self.embed(batch.tokens, batch.positions)
        delta = None  # as in forward_ref
        for i, layer_kv in enumerate(kv):
            x, h = add_norm(x, delta, *self.affine(f"{i}.norm1"), c.norm_eps)
            mark("others")
            qkv = self.project("qkv_proj", i, h, batch, layer_kv, mark)
            qk_norm = self.weights.get(f"{i}.qk_norm.weight")
            q = rotate_write(qkv, *rope, layer_kv, batch.slot_mapping, c.n_head, c.n_kv_head,
                             qk_norm, c.norm_eps)
            h = attention(q, layer_kv, batch).flatten(1)  # (N, H * D)
            mark("attn")
            delta = self.project("o_proj", i, h, batch, layer_kv, mark)
            x, h = add_norm(x, delta, *self.affine(f"{i}.norm2"), c.norm_eps)
            mark("others")
            h = self.project("gate_up_proj", i, h, batch, layer_kv, mark)
            h = activate(h, c.is_llama)
            mark("others")
            delta = self.project("down_proj", i, h, batch, layer_kv, mark)
        rows = batch.logit_rows
        _, batch.hidden = add_norm(x[rows], delta[rows], *self.affine("norm"), c.norm_eps)
        logits = linear(batch.hidden, self.weights["head.weight"])
        mark("others")
        return logits

    def project(self, op, i, x, batch, kv, mark):
        """x W of all rows, plus x A B of those with adapters [S-LoRA §4.1]"""
        def product():  # a function, because lora() computes x A at the same time on a GPU
            y = linear(x, *self.affine(f"{i}.{op}"))
            mark(op)
            return y
        if op not in batch.adapters:
            return product()
        y = lora(product, x, kv, batch.adapters[op])
        mark("lora")
        return y

    def embed(self, tokens, positions):
        """tokens (..., N), positions (N,) -> x (..., N, C), and (cos, sin), each (N, D / 2)"""
        x = F.embedding(tokens, self.weights["embedding.weight"])
        if not self.config.is_llama:
            return x + F.embedding(positions, self.weights["positions.weight"]), (None, None)
        angles = positions[:, None] * self.frequencies
        return x, (angles.cos(), angles.sin())

    # ---- the rest

    def __init__(self, config: GPTConfig, get_tensor, dtype: torch.dtype, world: "World"):
        """get_tensor(name, shape) -> a tensor of the model"""
        self.config = config.shard_of(world.rank, world.size)
        # {"embedding.weight": ..., "0.norm1.weight": ..., "0.qkv_proj.weight": ...}. Matrices are
        # packed for the product of a CPU, see kernels.pack
        self.weights = take_weights(self.config, get_tensor, dtype, world.device)
        self.world = world
        self.dtype = dtype
        self.device = self.weights["embedding.weight"].device
        self.frequencies = rotary_frequencies(self.config).to(self.device)
        self.merged = None  # the adapter in the weights, see merge()
        self.profile = None  # a CostModel, measured when it is first needed
        self.stop = []  # tokens that end a text, from the settings of its folder

    def affine(self, name):
        """(weight, bias or None) of a norm or an operator such as 3.qkv_proj"""
        return self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")

    @torch.inference_mode()
    def logits(self, tokens):
        """forward_ref of one text: tokens (T,) -> logits (T, V) in float32"""
        assert self.world.size == 1, "the reference has no tensor parallelism"
        return self.forward_ref(torch.as_tensor(tokens, device=self.device)[None])[0]

    @classmethod
    def from_preset(cls, name: str | GPTConfig, dtype: torch.dtype | str | None = None,
                    device: str = "cpu", seed: int = 0, world: "World | None" = None) -> "GPT":
        """Random weights. A seed gives the same ones on any number of devices."""
        config = name if isinstance(name, GPTConfig) else preset(name)
        world = world or World(device)
        dtype = pick_dtype(dtype, world.device)
        rng = torch.Generator(world.device).manual_seed(seed)
        def get_tensor(name, shape):
            if len(shape) == 1:
                return torch.full(shape, float(name.endswith("weight")))  # norms 1, biases 0
            return torch.normal(0, 0.02, shape, generator=rng, dtype=dtype, device=world.device)
        return model_class(world)(config, get_tensor, dtype, world)

    @classmethod
    def from_pretrained(cls, name: str | Path, dtype: torch.dtype | str | None = None,
                        device: str = "cpu", world: "World | None" = None) -> "GPT":
        """A Hugging Face folder, or the name of one on the Hub (owner/name), of a family in
        FAMILIES. FileNotFoundError for what is missing, ValueError for contents that do not fit."""
        folder = find_folder(name) or Path(name)
        config, stored = read_config(folder)
        checkpoint = Checkpoint(folder, "model", full_name)
        check_range(f"{folder}: layers", config.n_layer, 1, len(checkpoint))  # a layer has tensors
        head = checkpoint.get("lm_head.weight")
        if config.tied and head is not None:  # in transformers one may be missing, or they differ
            place = "model.embed_tokens" if config.is_llama else "transformer.wte"
            embedding = checkpoint.setdefault(f"{place}.weight", head)
            is_tied = embedding.dtype == head.dtype and torch.equal(embedding, head)
            config = replace(config, tied=is_tied)
        world = world or World(device)
        dtype = pick_dtype(dtype, world.device, stored)
        model = model_class(world)(config, checkpoint.get_tensor, dtype, world)
        model.stop = stop_of(folder)
        surplus = [name for name in checkpoint if not re.fullmatch(NOT_NEEDED, name)]
        if surplus:
            raise ValueError(f"{folder}: {len(surplus)} surplus tensors, as {surplus[0]!r}")
        return model

    def save_pretrained(self, folder):
        """Write a Hugging Face folder. ValueError if a config.json cannot express this shape."""
        c = self.config
        keys = {KEYS.get(key, key): key for key in FAMILIES[c.family]}
        settings = {keys[name]: value for name, value in vars(c).items() if name in keys}
        settings |= {"architectures": [ARCHITECTURES[c.family]], "model_type": c.family,
                     "dtype": str(self.dtype).removeprefix("torch."), "sliding_window": None,
                     "eos_token_id": self.stop or None}
        read, _ = parse_config(folder, settings)
        for name, value in vars(c).items():
            if value != getattr(read, name, None):
                raise ValueError(f"{name} = {value}: is not in a config.json of {c.family!r}")
        tensors = {}
        for name, parts in list_tensors(c).items():
            weight = self.weights[name].to_dense().detach()
            for part, shape, _ in parts:
                tensor, weight = weight.tensor_split([shape[0]])
                tensors[part] = tensor.T if part.endswith(TRANSPOSED) else tensor
        write_folder(folder, "model", tensors, "config.json", settings)

    def iteration_bytes(self, n_token, n_logits):
        """Bytes of an iteration's activations, and of its logits while they are sampled"""
        c = self.config
        numbers = 5 * c.n_embd + 3 * c.n_inner + 2 * c.n_head * c.head_dim
        return n_token * numbers * self.dtype.itemsize + n_logits * c.vocab_size * 24

    def free_memory(self, others=()):
        """Bytes for a cache: 90 % of a GPU's free memory, or 25 % of the computer's, or of its
        container's if that is less. Weights of all models are in the memory by now."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # of engines that have ended
            return 0.9 * torch.cuda.mem_get_info(self.device)[0]
        n_byte = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return 0.25 * min(n_byte, least_limit("memory.max", "memory.limit_in_bytes"))

    def new_cache(self, n_page):
        """A cache (L, 2, n_page, Hk, D). On a CPU a page takes no memory until it is written."""
        c = self.config
        kv = torch.empty(c.n_layer, 2, n_page, c.n_kv_head, c.head_dim, dtype=self.dtype,
                         device=self.device)
        kv[:, :, 0] = 0  # page 0 is read by padding rows of graphs before it is written
        return kv

    @torch.inference_mode()
    def merge(self, adapter):
        """The merge-and-swap baseline [S-LoRA §4.1]: a model with W + A B in place of W"""
        model = copy(self)
        model.merged = adapter
        model.weights = dict(self.weights)
        for op, modules in adapter.modules.items():
            for i in range(self.config.n_layer):
                weight = self.weights[f"{i}.{op}.weight"].to_dense().clone()
                for module, (column, n_column, *_) in modules.items():
                    a, b = (t[i].to(self.device).float() for t in adapter.factors(module))
                    weight[column:column + n_column] += b.T @ a
                model.weights[f"{i}.{op}.weight"] = pack(weight)
        return model

    def make_trainable(self):
        """Replace all weights by trainable ones, which are not packed. Returns them."""
        for name, weight in self.weights.items():
            self.weights[name] = weight.to_dense().detach().requires_grad_()
        if self.config.tied:
            self.weights["head.weight"] = self.weights["embedding.weight"]
        return list(dict.fromkeys(self.weights.values()))

# -----------------------------------------------------------------------------
# adapters

class Adapter:
    """LoRA weights in host memory, laid out as pages of the cache [S-LoRA §5.1]. Columns of A lie
    there as rows; B contains alpha / r. With rank 2, an input of two pages and an output of one:

        K plane   A[0] begin   A[0] end   A[1] begin   A[1] end
        V plane   B[0]         B[1]       -            -         """

    @torch.inference_mode()
    def write(self, kv, pages):
        """Copy planes (L, 2, n, Hk * D) to n pages of kv (L, 2, n_page, Hk, D), layer by layer: a
        GPU may not have the memory for a second copy of all."""
        pages = to_device(torch.tensor(pages), kv.device)
        for layer_kv, planes in zip(kv, self.planes):
            own = planes.to(kv, non_blocking=True)
            layer_kv[:, pages] = own.unflatten(-1, kv.shape[3:])  # (2, n, Hk, D)

    # ---- the rest

    def __init__(self, config, ranks, dtype=None):
        """ranks: {module: rank}, or one for q, k, v, o [S-LoRA §4.1]. No dtype: no weights."""
        if isinstance(ranks, int):
            ranks = {module: ranks for module in config.modules if "attn" in module}
        self.config = config
        self.ranks = ranks
        self.n_page = 0
        self.n_params = 0  # of this device
        # operator -> {module: (first column, columns, rank of A, rank of B, number of the module in
        # its operator, first page)}: the numbers of kernels.Segments, except the rows
        self.modules = defaultdict(dict)
        self.max_rank = {}  # operator -> its largest rank, as a power of two from 16 on
        width = config.n_kv_head * config.head_dim  # of a page
        for module, (op, *_) in config.modules.items():  # of the whole model
            if module not in ranks:
                continue
            n_in, _, columns = config.operators[op]
            column, n_column = columns[module]
            rank = ranks[module]
            # in row-parallel operators devices sum x A; in the others each has every n-th row of A,
            # and x A is gathered
            rank_a = rank if op in ROW_PARALLEL else cdiv(rank, config.shard[1])
            number = [*columns].index(module)
            self.modules[op][module] = column, n_column, rank_a, rank, number, self.n_page
            self.max_rank[op] = max(self.max_rank.get(op, 16), power_of_two(rank_a))
            self.n_page += max(rank_a * cdiv(n_in, width), rank * cdiv(n_column, width))
            self.n_params += config.n_layer * (rank_a * n_in + rank * n_column)
        self.planes = None
        if dtype is not None:
            self.planes = torch.zeros(config.n_layer, 2, self.n_page, width, dtype=dtype,
                                      pin_memory=torch.cuda.is_available())

    def factors(self, module):
        """Views of A (L, rank of A, n_in) and B (L, rank of B, columns), of this device"""
        op, *_ = self.config.modules[module]
        n_in, *_ = self.config.operators[op]
        _, n_column, rank_a, rank_b, _, first = self.modules[op][module]
        views = []
        for plane, rank, n in zip(self.planes.unbind(1), (rank_a, rank_b), (n_in, n_column)):
            pages = plane[:, first:first + rank * cdiv(n, plane.size(-1))]  # (L, pages, W)
            views.append(pages.view(len(pages), rank, -1)[..., :n])
        return views

    @classmethod
    def random(cls, config, ranks, seed=0, dtype=torch.float32):
        """An adapter with random A and B. No dtype: no weights."""
        adapter = cls(config, ranks, dtype)
        rng = torch.Generator().manual_seed(seed)
        for module, rank in adapter.ranks.items() if dtype else ():
            _, n_out, n_in = config.modules[module]
            a = torch.randn(config.n_layer, rank, n_in, generator=rng) * n_in ** -0.5
            b = torch.randn(config.n_layer, rank, n_out, generator=rng) * 0.02
            adapter.fill(module, slice(None), a, b)
        return adapter

    @classmethod
    def from_pretrained(cls, folder, config, dtype=torch.float32, base=None):
        """Read a PEFT folder. base: weights of its model. Errors as GPT.from_pretrained's."""
        factors = read_factors(Path(folder), config, base or {})
        ranks = {}
        for (module, _), (a, _) in factors.items():
            ranks[module] = max(ranks.get(module, 0), len(a))
        adapter = cls(config, ranks, dtype)
        for place, (a, b) in factors.items():
            adapter.fill(*place, a, b)
        return adapter

    def save_pretrained(self, folder):
        """Write a PEFT folder. alpha is the rank, so the scaling is 1."""
        tensors = {}
        for module in self.ranks:
            for layer, (a, b) in enumerate(zip(*self.factors(module))):
                path = f"base_model.model.{self.config.layers}.{layer}.{module}"
                tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b.T}
        settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 1, "lora_alpha": 1,
                    "rank_pattern": self.ranks, "alpha_pattern": self.ranks,
                    "target_modules": list(self.ranks), "fan_in_fan_out": not self.config.is_llama}
        write_folder(folder, "adapter_model", tensors, "adapter_config.json", settings)

    def fill(self, module, layers, a, b):
        """Store this device's share of A (.., rank, n_in) and B (.., rank, n_out): its columns of B
        and every n-th row of A, in row-parallel operators its columns of both [S-LoRA §6]. If the
        rank is smaller than the module's, the rest stays 0."""
        i, n = self.config.shard
        op, *_ = self.config.modules[module]
        if op in ROW_PARALLEL:
            a = take_shard(a, -1, (i, n), module)
        else:
            a = a[..., i::n, :]
        b = take_shard(b, -1, (i, n), module)
        for own, factor in zip(self.factors(module), (a, b)):
            own[layers, ..., :factor.size(-2), :] = factor

# =============================================================================
# appendix: checkpoints, text, devices, training
# =============================================================================

# ---- the tensors of a model

RANK_0 = ("o_proj.bias", "down_proj.bias")  # only rank 0 has them, since outputs are summed

def list_layer(config):
    """[(our name, name in a checkpoint, has a bias, *shape)] of a layer of the whole model. Tensors
    with the same name of ours are joined to one matrix, in this order."""
    c = config
    C = c.n_embd
    _, n = c.shard
    I = n * c.n_inner
    Q = n * c.n_head * c.head_dim
    K = n * c.n_kv_head * c.head_dim
    if not c.is_llama:
        return [
            ("norm1", "ln_1", True, C),
            ("qkv_proj", "attn.c_attn", True, Q + 2 * K, C),
            ("o_proj", "attn.c_proj", True, C, Q),
            ("norm2", "ln_2", True, C),
            ("gate_up_proj", "mlp.c_fc", True, I, C),
            ("down_proj", "mlp.c_proj", True, C, I)]
    qkv_bias = c.attention_bias or c.family == "qwen2"
    layer = [
        ("norm1", "input_layernorm", False, C),
        ("qkv_proj", "self_attn.q_proj", qkv_bias, Q, C),
        ("qkv_proj", "self_attn.k_proj", qkv_bias, K, C),
        ("qkv_proj", "self_attn.v_proj", qkv_bias, K, C),
        ("o_proj", "self_attn.o_proj", c.attention_bias, C, Q),
        ("norm2", "post_attention_layernorm", False, C),
        ("gate_up_proj", "mlp.gate_proj", c.mlp_bias, I, C),
        ("gate_up_proj", "mlp.up_proj", c.mlp_bias, I, C),
        ("down_proj", "mlp.down_proj", c.mlp_bias, C, I)]
    if c.family == "qwen3":
        layer += [
            ("qk_norm", "self_attn.q_norm", False, c.head_dim),
            ("qk_norm", "self_attn.k_norm", False, c.head_dim)]
    return layer

def list_outside(config):
    """The same for the tensors outside the layers"""
    c = config
    V = c.vocab_size
    C = c.n_embd
    if c.is_llama:
        outside = [
            ("embedding", "model.embed_tokens", False, V, C),
            ("norm", "model.norm", False, C)]
    else:
        outside = [
            ("embedding", "transformer.wte", False, V, C),
            ("positions", "transformer.wpe", False, c.block_size, C),
            ("norm", "transformer.ln_f", True, C)]
    return outside if c.tied else [*outside, ("head", "lm_head", False, V, C)]

def list_tensors(config):
    """{our name: [(name in a checkpoint, shape, dim along which devices share it)]}. For llama-7b
    "3.qkv_proj.weight": [("model.layers.3.self_attn.q_proj.weight", (4096, 4096), 0), and the same
    for k_proj and v_proj]"""
    rows = list_outside(config)
    for ours, theirs, *rest in list_layer(config):
        rows += [(f"{i}.{ours}", f"{config.layers}.{i}.{theirs}", *rest)
                 for i in range(config.n_layer)]
    tensors = defaultdict(list)
    for ours, theirs, has_bias, *shape in rows:
        shape = tuple(shape)
        dim = SHARDED_DIM.get(ours.split(".")[-1])
        tensors[f"{ours}.weight"].append((f"{theirs}.weight", shape, dim))
        if has_bias:
            tensors[f"{ours}.bias"].append((f"{theirs}.bias", shape[:1], dim))
    return tensors

def take_weights(config, get_tensor, dtype, device):
    """{our name: this device's share of the tensors of get_tensor}, matrices packed"""
    weights = {}
    i = config.shard[0]
    for name, parts in list_tensors(config).items():
        shares = [take_shard(get_tensor(part, shape).to(dtype), dim, config.shard, part)
                  for part, shape, dim in parts]
        if i > 0 and name.endswith(RANK_0):
            continue
        weight = torch.cat(shares).to(device, dtype)
        is_table = name.startswith(("embedding", "positions"))
        weights[name] = weight if is_table or weight.dim() == 1 else pack(weight)
    if config.tied:
        weights["head.weight"] = pack(weights["embedding.weight"])
    return weights

def rotary_frequencies(config):
    """Radians per position (D / 2,), scaled as config.rope_scaling says, or ValueError"""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = config.rope_theta ** -exponent
    scaling = config.rope_scaling or {}
    kind = scaling.get("rope_type") or scaling.get("type", "default")
    def number(key, least=1e-30):
        return check_range(f"rope_type = {kind!r}: {key}", scaling.get(key), least, 1e12)
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / number("factor")
    if kind != "llama3":
        raise ValueError(f"rope_type = {kind!r}: must be default, linear or llama3")
    # low frequencies are divided by the factor, high ones are kept, with a ramp in between
    low = number("low_freq_factor")
    n_trained = scaling.get("original_max_position_embeddings") or config.block_size
    turns = n_trained * frequencies / (2 * math.pi)
    high = number("high_freq_factor", math.nextafter(low, math.inf))
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / number("factor"))

# ---- how devices share a model [S-LoRA §6]

# operator -> the dim of its weight (n_out, n_in) along which devices share it
SHARDED_DIM = dict(qkv_proj=0, o_proj=1, gate_up_proj=0, down_proj=1)
ROW_PARALLEL = ("o_proj", "down_proj")  # devices share their inputs

class ShardedGPT(GPT):
    """One device's share of a model: of every tensor, and of the operators' work"""

    def project(self, op, i, x, batch, kv, mark):
        """In row-parallel operators each device adds x A B to its own columns, then y is summed
        over the devices. Rank 0 alone has a bias."""
        y = super().project(op, i, x, batch, kv, mark)
        return self.world.all_reduce(y) if op in ROW_PARALLEL else y

def model_class(world):
    return ShardedGPT if world.size > 1 else GPT

class World:
    """The processes that share every layer of one model. World() is a process on its own."""

    def __init__(self, device="cpu", rank=0, size=1):
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        if self.device.index is not None:
            torch.cuda.set_device(self.device)  # Triton launches kernels there

    @classmethod
    def start(cls, size, device="cpu"):
        """Join the `size` processes that torchrun started. ValueError if it started others."""
        n = int(os.environ.get("WORLD_SIZE", 1))
        if n != size:
            most = max(n, size)
            raise ValueError(f"tp = {size} needs {size} processes, there are {n}: torchrun "
                             f"--nproc_per_node {most} sarathi.py --tp {most} ...")
        if size == 1:
            return cls(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        atexit.register(dist.destroy_process_group)
        if device == "cuda":
            device = f"cuda:{os.environ['LOCAL_RANK']}"
        return cls(device, dist.get_rank(), size)

    def all_reduce(self, x):
        """The sum of every rank's x, in place. Each rank sends 2 (n - 1) / n of x [S-LoRA §6]."""
        dist.all_reduce(x)
        return x

    def all_gather(self, x):
        """x (N, C) -> (N, n * C): column 0 of each rank, column 1, ... A rank sends (n - 1) x."""
        out = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(out), x)
        return out.movedim(0, -1).flatten(1)

    def broadcast(self, value):
        """The value of rank 0 on every rank"""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values)
        return values[0]

def take_shard(tensor, dim, shard, module):
    """Share i of n along dim, if the tensor has it: of GPT-2's c_attn that of q, of k and of v"""
    i, n = shard
    if dim is None or dim == tensor.dim() or n == 1:
        return tensor
    pieces = tensor.chunk(3 if "c_attn" in module else 1, dim)
    return torch.cat([piece.chunk(n, dim)[i] for piece in pieces], dim)

# ---- checks of what users give, here and in sarathi.py

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
        valid = f"at least {low}" if high == math.inf else f"in {low} .. {high}"
        raise ValueError(f"{name} = {short(value)}: must be {valid} ({kind.__name__})")
    return kind(value)

def check_type(name, value, kind, valid):
    """Returns value. ValueError if it is not of this class, or of one of these."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} = {short(value)}: must be {valid}")
    return value

def check_field(name, value, kind):
    """Returns value. ValueError if it is not of this type, or is a number that is not above 0."""
    is_number = isinstance(value, Real) and kind is not bool
    good = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
    if not good or is_number and not 0 < value <= 1e12:
        raise ValueError(f"{name} = {short(value)}: must be {kind}, numbers above 0")
    return value

def short(value):
    return " ".join(repr(value).split())[:60]

def check_settings(settings, supported, others=None):
    """ValueError for a value that is not supported: {setting: valid values, or None: any}. others:
    the valid values of all other settings, or None"""
    for key, value in settings.items():
        valid = supported.get(key, others)
        if valid is not None and value not in valid:
            raise ValueError(f"{key} = {short(value)} is not supported, only "
                             f"{' or '.join(map(repr, valid))}")

@contextmanager
def reading(name):
    """Whatever is raised in here becomes a ValueError of one line that begins with this name, and
    so does a panic of a library in Rust, which is no Exception."""
    try:
        yield
    except (FileNotFoundError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"{name}: {' '.join(str(error).split())}") from error

# ---- Hugging Face folders: settings and tensors

TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # stored as (n_in, n_out)
# buffers, a head that equals the embedding, and heads that a training used
NOT_NEEDED = r".*(\.attn\.(masked_)?bias|rotary_emb\.inv_freq|lm_head\.weight)|(v_head|score)\..*"
KEYS = dict(  # key of config.json -> field of GPTConfig, if their names differ
    num_hidden_layers="n_layer", num_attention_heads="n_head", num_key_value_heads="n_kv_head",
    hidden_size="n_embd", intermediate_size="n_inner", rms_norm_eps="norm_eps",
    layer_norm_epsilon="norm_eps", max_position_embeddings="block_size", n_positions="block_size",
    tie_word_embeddings="tied")
GPT2 = dict(vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12, n_inner=None,
            layer_norm_epsilon=1e-5, tie_word_embeddings=True, eos_token_id=50256)
LLAMA = dict(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
             num_attention_heads=32, num_key_value_heads=None, head_dim=None, rms_norm_eps=1e-6,
             max_position_embeddings=2048, rope_theta=10000.0, tie_word_embeddings=False,
             eos_token_id=2, rope_scaling=None)
MISTRAL = dict(intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072,
               sliding_window=4096)
QWEN2 = dict(vocab_size=151936, intermediate_size=22016, num_key_value_heads=32, eos_token_id=None,
             max_position_embeddings=32768, sliding_window=4096, use_sliding_window=False,
             max_window_layers=28, layer_types=None)
FAMILIES = {  # family -> the keys of its config.json, with transformers' defaults
    "gpt2": GPT2, "llama": LLAMA | dict(attention_bias=False, mlp_bias=False),
    "mistral": LLAMA | MISTRAL, "qwen2": LLAMA | QWEN2,
    "qwen3": LLAMA | QWEN2 | dict(head_dim=128, attention_bias=False)}
ARCHITECTURES = dict(gpt2="GPT2LMHeadModel", llama="LlamaForCausalLM", qwen2="Qwen2ForCausalLM",
                     qwen3="Qwen3ForCausalLM", mistral="MistralForCausalLM")
DTYPES = torch.float32, torch.bfloat16, torch.float16  # of models
MODEL_SETTINGS = {  # keys of config.json that change the mathematics -> the values they may have
    "model_type": [*FAMILIES], "hidden_act": ["silu", "swish"], "quantization_config": [None],
    "partial_rotary_factor": [1, None], "full_attention": [None], "add_cross_attention": [False],
    "activation_function": ["gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate"],
    "scale_attn_weights": [True], "scale_attn_by_inverse_layer_idx": [False], "is_causal": [True]}

def read_json(path):
    """The settings in a file"""
    with reading(path):
        if path.exists() and not path.is_file():
            raise ValueError("is no file")  # a pipe may have no end
        return {**json.loads(path.read_text("utf-8"))}

def read_config(folder):
    """folder/config.json -> (GPTConfig, the stored dtype)"""
    path = folder / "config.json"
    settings = read_json(path)
    with reading(path):
        return parse_config(path, settings)

def parse_config(path, settings):
    """The settings of a config.json -> (GPTConfig, the stored dtype)"""
    # 1. the family, or that of the architecture; first, so that another one is refused by its name
    settings = {"model_type": None} | settings
    names = settings.get("architectures") or ()
    for family, architecture in ARCHITECTURES.items():
        if settings["model_type"] is None and architecture in names:
            settings["model_type"] = family
    # 2. settings of RoPE, among the others. transformers 5 writes rope_parameters
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    trained = "original_max_position_embeddings"
    if settings.get(trained):  # transformers takes this one first
        rope = rope | {trained: settings[trained]}
    settings |= rope | {"rope_scaling": rope or None}
    check_settings(settings, MODEL_SETTINGS)
    # 3. the file's settings, else transformers' defaults
    family = settings["model_type"]
    known = {key: settings.get(key, default) for key, default in FAMILIES[family].items()}
    # 4. those of a GPTConfig, by our names
    found = {"family": family}
    for key, value in known.items():
        name = KEYS.get(key, key)
        if name in GPTConfig.__annotations__:
            found[name] = value
    found["block_size"] = context_of(path, known, found["block_size"])
    rotary_frequencies(replace(GPTConfig(**found), head_dim=2))  # ValueError for an unknown scaling
    return GPTConfig(**found), stored_dtype(settings)

def stored_dtype(settings):
    """The torch dtype that config.json names; float32 if it is not among DTYPES"""
    name = settings.get("dtype") or settings.get("torch_dtype")
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    return dtype if dtype in DTYPES else torch.float32

def context_of(path, settings, trained):
    """The longest context: that of the training, or the sliding window that some layers have"""
    window = settings.get("sliding_window")
    if window is None or not settings.get("use_sliding_window", True):
        return trained
    check_range("sliding_window", window, 1)
    first = check_range("max_window_layers", settings.get("max_window_layers", 0), 0)
    is_windowed = settings["num_hidden_layers"] > first
    if settings.get("layer_types"):
        is_windowed = "sliding_attention" in settings["layer_types"]
    if not is_windowed or window >= trained:
        return trained
    print(f"{path}: sliding_window = {window} limits the context to {window} tokens",
          file=sys.stderr)
    return window

def write_folder(folder, stem, tensors, settings_name, settings):
    """Write {name: tensor} to folder/stem.safetensors, and the settings next to it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / f"{stem}.safetensors", metadata={"format": "pt"})
    (folder / settings_name).write_text(json.dumps(settings, indent=1))

def index_of(folder, stem):
    """{tensor: its file} from the index of stem.safetensors. {}: there is one file for all."""
    path = folder / f"{stem}.safetensors.index.json"
    if (folder / f"{stem}.safetensors").is_file() or not path.is_file():
        return {}
    with reading(path):
        files = read_json(path)["weight_map"]
        for file in files.values():
            if {"/", ".."}.intersection(Path(file).parts):
                raise ValueError(f"{file!r} must be in this folder")
    return files

def full_name(name):
    """A tensor's name in a model with a head. AutoModel saves it without the first part."""
    name = re.sub(r"^(?=(embed_tokens|layers|norm)\.)", "model.", name)
    return re.sub(r"^(?=(wte|wpe|h|ln_f)\.)", "transformer.", name)

class Checkpoint(dict):
    """{name: tensor} of a folder. Tensors are read from their files when they are used."""

    def __init__(self, folder, stem, rename=str):
        self.folder = folder
        index = index_of(folder, stem)
        for file in sorted(set(index.values())) or [f"{stem}.safetensors"]:
            path = folder / file
            if not path.is_file():
                raise FileNotFoundError(f"{path} does not exist (.bin files are not read: load one "
                                        "with transformers or PEFT, save_pretrained() writes this)")
            with reading(path):
                tensors = load_file(path)
            self |= {rename(name): tensor for name, tensor in tensors.items()
                     if not index or index.get(name) == file}

    def get_tensor(self, name, shape):
        """Remove a tensor and return it, as (n_out, n_in). ValueError if it does not fit."""
        if name not in self:
            raise ValueError(f"{self.folder}: tensor {name!r} is missing")
        tensor = self.pop(name)
        tensor = tensor.T if name.endswith(TRANSPOSED) else tensor
        if tensor.shape != shape or not tensor.is_floating_point():
            raise ValueError(f"{self.folder}: tensor {name!r} is {tuple(tensor.shape)} "
                             f"{tensor.dtype}, must be {shape} and floating point")
        if not tensor.sum(dtype=torch.float64).isfinite():
            raise ValueError(f"{self.folder}: tensor {name!r} holds NaN or infinity")
        return tensor

def is_fast(dtype, device):
    """Whether this machine is at least about as fast in a dtype as in float32"""
    if torch.device(device).type == "cuda":
        return dtype != torch.bfloat16 or torch.cuda.get_device_capability(device) >= (8, 0)
    weight = torch.empty(2, 2, dtype=dtype)  # pack returns it as it is if no product is fast
    return dtype == torch.float32 or pack(weight) is not weight

def pick_dtype(dtype, device, stored=torch.bfloat16):
    """A torch dtype. None: the stored one if this machine is fast in it, else float16 on a GPU and
    float32 on a CPU."""
    if dtype is None:
        other = torch.float16 if torch.device(device).type == "cuda" else torch.float32
        return stored if is_fast(stored, device) else other
    name = str(dtype).removeprefix("torch.")
    if getattr(torch, name, None) not in DTYPES:
        raise ValueError(f"dtype = {name!r}: must be one of float32, bfloat16, float16")
    return getattr(torch, name)

# ---- PEFT folders: settings and tensors

OFF = [None, False, "", []]  # {} is not off: PEFT then takes a part's defaults
# fields of PEFT's LoraConfig that are used below, or have no effect after the training, because the
# tensors say which modules have changed
LORA_FREE = """r lora_alpha use_rslora rank_pattern alpha_pattern task_type auto_mapping
    peft_version base_model_name_or_path revision inference_mode lora_dropout fan_in_fan_out
    target_modules exclude_modules layers_to_transform layers_pattern loftq_config eva_config
    corda_config lora_ga_config megatron_core qalora_group_size runtime_config ensure_weight_tying
    merge_weights lora_dtype lorap_lr_ratio lorap_emb_lr""".split()
# these mean other mathematics, or tensors in addition to A and B; so may settings of a later PEFT
LORA_VARIANTS = """use_dora lora_bias modules_to_save trainable_token_indices use_qalora
    alora_invocation_tokens layer_replication target_parameters megatron_config use_bdlora
    arrow_config kasa_config velora_config monteclora_config""".split()
LORA_SETTINGS = dict.fromkeys(LORA_FREE) | dict.fromkeys(LORA_VARIANTS, OFF) | {  # None: any value
    "peft_type": ["LORA"], "bias": ["none"],
    # all other ways change the weights of the base model
    "init_lora_weights": [True, False, None, "gaussian", "orthogonal", "eva", "mica"]}
LORA_NUMBERS = dict(r=8, lora_alpha=8, rank_pattern={}, alpha_pattern={})  # PEFT's defaults
# a tensor's name, with or without the prefixes of PEFT and of wrappers, and the adapter's name. The
# second group is the module's name in the model that was trained
LORA_TENSOR = (r"((?:(?:module|_orig_mod|base_model\.model)\.)*"
               r"((?:(?:module|_orig_mod|base_model|model|transformer)\.)*"
               r"(?:layers|h)\.(\d+)\.(.+))\.lora_)[AB]((?:\.[^.]+)?\.weight)")
EMBEDDING = r"\b(embed_tokens|wte|lm_head)\."

def setting_of(module, settings, key, patterns, least):
    """A setting for a module: that of the first pattern it matches as in PEFT, else of the key"""
    for pattern, value in settings[patterns].items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return check_range(f"{patterns} of {pattern!r}", value, least, 10**6)
    return check_range(key, settings[key], least, 10**6)

def drop_embeddings(checkpoint, base):
    """Remove the embeddings, which PEFT saves too if the vocabulary was resized. ValueError if they
    differ from those of the base model."""
    for name in [name for name in checkpoint if re.search(EMBEDDING, name)]:
        theirs = checkpoint.pop(name)
        # ranks above 0 have no head
        ours = base.get("head.weight" if "lm_head" in name else "embedding.weight", theirs)
        ours = ours.to_dense()  # if it is packed
        if not base or not torch.equal(ours, theirs.to(ours)):
            raise ValueError(f"{checkpoint.folder}: {name!r}: embeddings in an adapter are not "
                             "supported, except those of its base model: merge it with PEFT")

def read_factors(folder, config, base):
    """A PEFT folder -> {(module, layer): (A (rank, n_in), B (rank, n_out) times its scaling)}.
    base: {our name: weight} of the base model, on this device"""
    path = folder / "adapter_config.json"
    if not path.is_file():
        raise FileNotFoundError(f"adapter '{folder}': must be a PEFT folder, has no {path.name}")
    settings = LORA_NUMBERS | read_json(path)
    with reading(path):
        check_settings(settings, LORA_SETTINGS, OFF)
    checkpoint = Checkpoint(folder, "adapter_model")
    drop_embeddings(checkpoint, base)
    factors = {}
    while checkpoint:
        name = next(iter(checkpoint))
        match = re.fullmatch(LORA_TENSOR, name)
        if match is None or match[4] not in config.modules or int(match[3]) >= config.n_layer:
            raise ValueError(f"{folder}: {name!r} does not fit: layers 0 to {config.n_layer - 1}, "
                             f"modules {', '.join(config.modules)}")
        start, target, layer, module, end = match.groups()
        place = module, int(layer)
        if place in factors:
            raise ValueError(f"{folder}: {name!r} is of a second adapter, only one is read")
        with reading(path):
            rank = setting_of(target, settings, "r", "rank_pattern", 1)
            alpha = setting_of(target, settings, "lora_alpha", "alpha_pattern", -1e6)
        scaling = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        _, n_out, n_in = config.modules[module]
        a = checkpoint.get_tensor(f"{start}A{end}", (rank, n_in))
        b = checkpoint.get_tensor(f"{start}B{end}", (n_out, rank))
        factors[place] = a, b.T.float() * scaling
    if not factors:
        raise ValueError(f"{folder}: holds no tensors of LoRA")
    return factors

# ---- text: engines see tokens alone
# The functions of a Tokenizer. encode(text) -> tokens; decode(tokens) -> text, without special
# tokens; stop: the tokens that end a text; stream(tokens of a prompt) -> a function, tokens -> text
# that continues it; it keeps text that later tokens may change, until [] says that there are none;
# chat(messages or the text of a user) -> tokens in the folder's chat template, or None if there is
# none. A text that begins with a special token is already in a template: its tokens are returned

Tokenizer = namedtuple("Tokenizer", "encode decode stop stream chat",
                       defaults=[lambda messages, **arguments: None])

def tiktoken_tokenizer(encoding):
    """The Tokenizer of a tiktoken.Encoding. No text: the last token, which ends a text, and tokens
    that only the model has."""
    def decode(tokens):
        return encoding.decode([token for token in tokens if token < encoding.eot_token])

    encode = partial(encoding.encode, allowed_special="all")
    return Tokenizer(encode, decode, [encoding.eot_token], partial(stream_text, decode, []))

def byte_tokenizer():
    """The Tokenizer of "tiny": token b is byte b, and token 256 ends a text."""
    ranks = {bytes([b]): b for b in range(256)}
    return tiktoken_tokenizer(tiktoken.Encoding(
        "bytes", pat_str=r"(?s:.)", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256}))

TEXT_FILES = ["config.json", "generation_config.json", "tokenizer_config.json",
              "special_tokens_map.json"]

def stop_of(folder):
    """The tokens that end a text, of generation_config.json, config.json or the family"""
    settings = {}
    for name in TEXT_FILES[:2]:
        for path in folder.glob(name):
            settings |= read_json(path)
    family = FAMILIES.get(str(settings.get("model_type")), {})
    stop = (family | settings).get("eos_token_id")
    return [token for token in (stop if isinstance(stop, list) else [stop]) if token is not None]

def read_tokenizer(folder):
    """The Tokenizer of a tokenizer.json and the settings next to it, as transformers reads them.
    Their eos_token ends texts, too."""
    from transformers import PreTrainedTokenizerFast, logging  # here, because it takes a second
    logging.set_verbosity_error()  # no warning that settings name another class
    with reading(f"{folder}: its tokenizer is not read by transformers"):
        library = PreTrainedTokenizerFast.from_pretrained(folder)
    stop = stop_of(folder)
    stop += {library.eos_token_id} - {None, *stop}
    special = {id for id, token in library.added_tokens_decoder.items() if token.special}

    def chat(messages, /, **arguments):
        if not library.chat_template:
            return None
        if isinstance(messages, str):
            tokens = library.encode(messages, add_special_tokens=False)
            if not special.isdisjoint(tokens[:1]):
                return tokens
            messages = [dict(role="user", content=messages)]
        with reading(f"{folder}: the chat template fails, --raw feeds the prompt as it is"):
            return library.apply_chat_template(
                messages, return_dict=False, **dict(add_generation_prompt=True) | arguments)

    # if bytes are tokens: one that is part of no character, and spoils those right before it
    wrong = [id for text, id in library.get_vocab().items() if text == "<0xFF>"]
    decode = partial(library.decode, skip_special_tokens=True)
    return Tokenizer(library.encode, decode, stop, partial(stream_text, decode, wrong), chat)

def stream_text(decode, wrong, prompt=()):
    """-> a function, tokens -> text that continues the prompt's. Its texts, joined, are the text of
    all tokens together. wrong: [a token after which no character is complete], or []"""
    old = [*prompt]  # tokens whose text was returned: spaces after them depend on it
    new = []

    def continue_text(tokens):
        nonlocal old, new
        new += tokens
        text = decode(old + new)
        before = os.path.commonprefix([decode(old), text])
        is_final = decode(old + new + wrong).startswith(text) and not text.endswith("\ufffd")
        # some tokenizers remove a space once a comma, n't and the like come after it
        is_final &= re.search(r" ('[vr]?|n'?)?$|'$", text) is None
        if text == before or tokens and not is_final:
            return ""
        old = new
        new = []
        return text.removeprefix(before)
    return continue_text

# ---- models by name (folders, presets, the Hub), and a tiny one to train

VOCABULARIES = ["vocab.*", "*.model"]  # files of tokenizers that have no tokenizer.json
HUB_FILES = [*TEXT_FILES, "tokenizer.json", "chat_template.jinja", *VOCABULARIES,
             "model.safetensors", "model.safetensors.index.json"]

gpt2 = partial(GPTConfig, family="gpt2", tied=True)
llama = partial(GPTConfig, vocab_size=32000, block_size=2048)
PRESETS = {  # n_layer, n_head, n_embd, n_inner
    "tiny": GPTConfig(4, 4, 256, 704, vocab_size=257, tied=True),
    "gpt2": gpt2(12, 12, 768),
    "gpt2-xl": gpt2(48, 25, 1600),
    "gpt3-175b": gpt2(96, 96, 12288, block_size=4096),
    "llama-30m": llama(8, 8, 512, 1408, vocab_size=8192, tied=True),
    "llama-124m": llama(12, 12, 768, 2048, vocab_size=50304, tied=True),  # as large as GPT-2
    "llama-160m": llama(12, 12, 768, 3072),
    "tinyllama-1.1b": llama(22, 32, 2048, 5632, n_kv_head=4),
    "llama-7b": llama(32, 32, 4096, 11008, block_size=4096),
    "llama-13b": llama(40, 40, 5120, 13824, block_size=4096),
    "llama-33b": llama(60, 52, 6656, 17920, block_size=4096),
    "llama-70b": llama(80, 64, 8192, 28672, n_kv_head=8, block_size=4096)}

def preset(name):
    """The GPTConfig of a preset. KeyError that lists the presets for any other name."""
    return PRESETS[check_choice("preset", name, PRESETS)]

def find_folder(name):
    """The folder of a model: itself, that of the trained "tiny" or "draft", or of owner/name in the
    Hub's cache. None for a preset, which has random weights. FileNotFoundError for others."""
    for folder in (Path(name), CACHE / name):
        if folder.is_dir():
            return folder
    if name in ("tiny", "draft"):
        raise FileNotFoundError(f"model {name!r}: is not trained yet, run `python model.py`")
    if name in PRESETS:
        return None
    if Path(name).exists() or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(name)):
        raise FileNotFoundError(f"model '{name}': must be a folder, owner/name on the Hub, or one "
                                f"of {', '.join(PRESETS)}")
    return download(str(name))

@cache
def download(name):
    """The folder of owner/name in the Hub's cache. Only files that it lacks are downloaded."""
    try:
        folder = Path(snapshot_download(name, allow_patterns=HUB_FILES))
        snapshot_download(name, allow_patterns=[*index_of(folder, "model").values()])
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise FileNotFoundError(f"model {name!r}: is no folder, and the Hub or its cache does not "
                                f"have it: {reason}") from None
    return folder

def load_model(name, dtype=None, device="cpu", seed=0, world=None):
    """The GPT of a folder, a name on the Hub, a preset (random weights), "tiny" or "draft"."""
    folder = find_folder(name)
    if folder is None:
        model = GPT.from_preset(name, dtype, device, seed, world)
    else:
        if name in PRESETS and folder == Path(name):
            print(f"model {name!r}: the folder of this name, not the preset", file=sys.stderr)
        model = GPT.from_pretrained(folder, dtype, device, world)
    if model.world.rank == 0:
        print(what_runs(name, model), file=sys.stderr)
    return model

def what_runs(name, model):
    """One line, such as: llama-30m, bfloat16, C++ (AVX2), 2 threads"""
    dtype = str(model.dtype).removeprefix("torch.")
    return f"{name}, {dtype}, {describe(model.weights['embedding.weight'])}"

def load_tokenizer(name):
    """The Tokenizer of a model by its name, as in load_model. FileNotFoundError if it has none."""
    folder = find_folder(name)
    if folder is None:
        is_gpt2 = PRESETS[name].family == "gpt2"
    elif folder.parent == CACHE:
        return byte_tokenizer()
    elif (folder / "tokenizer.json").is_file():
        return read_tokenizer(folder)
    else:
        family = read_json(folder / "config.json").get("model_type")
        is_gpt2 = family == "gpt2" and not any([*folder.glob(name)] for name in VOCABULARIES)
    problem = f"model '{name}' has no tokenizer.json"
    if is_gpt2:
        try:
            return tiktoken_tokenizer(tiktoken.get_encoding("gpt2"))
        except OSError as error:
            problem += f", and tiktoken's gpt2 is not here ({error})"
    raise FileNotFoundError(f"{problem}: use --tokens 1,2,3, or write it with transformers: "
                            f"AutoTokenizer.from_pretrained('{name}').save_pretrained('{name}')")

def stdlib_tokens():
    """The sources of Python's standard library as bytes (T,), each file ended by token 256"""
    tokens = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        tokens += [*path.read_bytes(), 256]
    return torch.tensor(tokens)

def train_tiny(steps=1100, B=4, T=256):
    """Train the preset "tiny" and, in half as many steps, a draft model of one layer."""
    data = stdlib_tokens()
    tiny = preset("tiny")
    draft = replace(tiny, n_layer=1)
    for name, config, n in (("draft", draft, steps // 2), ("tiny", tiny, steps)):
        torch.manual_seed(0)
        model = GPT.from_preset(config, torch.float32)
        model.stop = [256]
        parameters = model.make_trainable()
        optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.99), weight_decay=0.1)
        bar = tqdm(range(n), f"training {name}", disable=None)  # none in a log
        for step in bar:
            # the rate rises for 50 steps, then falls by half a cosine to a tenth
            decay = 0.55 + 0.45 * math.cos(math.pi * step / n)
            optimizer.param_groups[0]["lr"] = 2e-3 * min((step + 1) / 50, decay)
            start = torch.randint(len(data) - T, (B, 1))
            tokens = data[start + torch.arange(T + 1)]  # (B, T + 1)
            with torch.autocast("cpu", enabled=torch.cpu._is_avx512_bf16_supported()):
                logits = model.forward_ref(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            bar.set_postfix(loss=f"{loss.item():.2f} nats per byte")
        model.save_pretrained(CACHE / name)
        print(f"saved in {CACHE / name}, {loss.item():.2f} nats per byte at the end")

if __name__ == "__main__":
    argparse.ArgumentParser(description=train_tiny.__doc__).parse_args()
    try:
        train_tiny()
    except KeyboardInterrupt:
        sys.exit(130)
