"""The proofs. Greedy tokens must equal the naive loop's, whatever the scheduler, chunk, allocation or neighbour; logits must
equal transformers'; pages are never lost; bad input is one clear sentence and harms nobody else. Nothing here is timed."""
import argparse
import ast
import base64
import contextlib
import copy
import dataclasses
import gc
import hashlib
import importlib.util
import io
import json
import os
import pickle
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unicodedata
import weakref
from collections import Counter, defaultdict, deque
from dataclasses import fields
from functools import lru_cache, partial
from itertools import combinations, takewhile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from _pytest.runner import runtestprotocol
from safetensors.torch import load_file, save_file

import bench
import kernels
import model as model_py
import sarathi
from kernels import World, attention, attention_ref, triton
from model import GPT, PRESETS, Adapter, GPTConfig, load_tokenizer, preset, random_adapter
from sarathi import (SCHEDULERS, Cluster, CostModel, Engine, EngineConfig, LastCome, OneAdapter, Order, PagePool, Pipeline, Request,
                     Scheduler, Simulator, make_engine, make_scheduler)

HERE = Path(__file__).parent
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes inherit that it is ignored
torch.set_num_threads(1)  # models this small gain nothing from a second one, and other processes have work for another core
TILE = 16
NAMES = ["static", "orca", "prefill_first", "sarathi", "sarathi_serve"]
SMALL = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=64, n_inner=160, vocab_size=199, block_size=512)
LEAST = SMALL | dict(n_layer=1, n_head=2, n_kv_head=1, n_embd=32, n_inner=80)


@lru_cache
def small(family="llama", dtype=torch.float32):
    """A random two-layer model with grouped heads (llama) or biases and learned positions (gpt2)."""
    return GPT.from_preset(GPTConfig(family=family, **SMALL | ({"n_kv_head": 4} if family == "gpt2" else {})), dtype=dtype, seed=1)


@lru_cache
def least():
    """A quarter of small(), for many iterations, and whole runs in Triton's interpreter."""
    return GPT.from_preset(GPTConfig(**LEAST), seed=1)


class TwoEnds:
    """Two processes share the tests: one takes them from the first on, another from the last on, until they meet. A test, with all its
    cases, is whose folder for it is made first. The other process leaves its reports there; this one passes them on when it comes by."""

    def __init__(self, folder, other=None):
        self.folder, self.other, self.mine = Path(folder), other, set()  # other: None in that one

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        place, test = self.folder / item.originalname, item.originalname
        with contextlib.suppress(FileExistsError):
            place.mkdir()
            self.mine.add(test)
        reports = place / hashlib.sha1(item.name.encode()).hexdigest()
        if self.other:
            return None if test in self.mine else self.passed_on(item, reports)
        if test in self.mine:
            part = reports.with_suffix(".part")
            part.write_bytes(pickle.dumps(runtestprotocol(item, log=False, nextitem=nextitem)))
            part.rename(reports)
        return True

    def passed_on(self, item, reports):
        """Report a case of the other's, once it has ended -> None if its process ended before: then it is run here."""
        while not reports.exists():
            if self.other.poll() is not None and not reports.exists():
                return None
            time.sleep(0.02)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in pickle.loads(reports.read_bytes()):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True


@pytest.fixture(scope="session", autouse=True)
def two_ends(request):
    """Where many tests were asked for another core takes its share of them; not of a GPU, nor where somebody watches what they print."""
    config, items, folder = request.config, request.session.items, os.environ.pop("OTHER_END", None)
    if folder:
        items[1:] = items[:0:-1]
        config.pluginmanager.register(TwoEnds(folder))
        yield
    elif len(items) < 100 or GPU or kernels.INTERPRET or config.option.usepdb or config.option.capture == "no":
        yield
    else:
        with tempfile.TemporaryDirectory() as folder:
            other = subprocess.Popen([sys.executable, "-m", "pytest", *config.invocation_params.args], cwd=config.invocation_params.dir,
                                     env=os.environ | {"OTHER_END": folder}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            config.pluginmanager.register(TwoEnds(folder, other))
            yield
            other.kill()
            other.wait()


@pytest.fixture(autouse=True)
def same_numbers():
    """What a test draws without a seed of its own is the same in every run, and in any order of the tests."""
    torch.manual_seed(0)


def prompt(length, seed=0):
    return np.random.default_rng([seed, length]).integers(0, SMALL["vocab_size"], length).tolist()


def greedy(m, tokens, n):
    """The definition of greedy generation: the whole sequence again for every token, no cache, no batch -> the n new ones."""
    tokens = list(tokens)
    for _ in range(n):
        tokens.append(int(m.logits(tokens)[-1].argmax()))
    return tokens[len(tokens) - n:]


@lru_cache(maxsize=None)
def _grown(length, seed, family, adapter):
    return prompt(length, seed)


def naive(length, n, seed=0, family="llama", adapter=None):
    """The same of a prompt and a small model, each token computed once. adapter: one of the matrix."""
    tokens = _grown(length, seed, family, adapter)
    tokens += greedy(small(family) if adapter is None else merged(adapter), tokens, length + n - len(tokens))
    return tokens[length:length + n]


def add(engine, requests):
    """Hand all of them in -> the requests."""
    for r in requests:
        engine.add(r)
    return requests


def steps(engine, limit=5000):
    """Step until nothing is left: the events of each step, once the pools were checked. At the end only idle adapters are in them."""
    lanes = getattr(engine, "lanes", [engine])
    pools = {id(pool): pool for lane in lanes for pool in (lane.pool, lane.adapters.pool)}.values()
    while engine.requests:
        events = engine.step()
        for pool in pools:
            pool.check()
        yield events
        limit -= 1
        assert limit, "the engine does not come to an end"
    assert all(lane.pool.tables.keys() <= lane.adapters.resident.keys() for lane in lanes)


def finish(engine):
    """All steps to the end."""
    for _ in steps(engine):
        pass


def serve(engine, requests):
    """Requests from their coming to their end -> the requests."""
    add(engine, requests)
    finish(engine)
    return requests


def serve_beside_a_victim(engine, lengths, n_new):
    """Prompts of these lengths to their end, one more request among them that is aborted on the way; each of the others must give the
    naive loop's n_new tokens -> the requests."""
    requests, victim = [Request(prompt(n), n_new) for n in lengths], Request(prompt(5, seed=7), 20)
    add(engine, [*requests[:2], victim, *requests[2:]])
    for _ in range(4):
        engine.step()
        engine.pool.check()
    engine.abort(victim.id)
    finish(engine)
    for r, n in zip(requests, lengths):
        assert r.output == naive(n, n_new), f"prompt of {n}, {engine.config}"
        assert r.state == "length" and len(r.times) == n_new and r.times == sorted(r.times)
    assert victim.state == "abort"
    return requests


def watch(owner, name, note):
    """Before every owner.name(...), note(...)."""
    work = getattr(owner, name)
    setattr(owner, name, lambda *args: (note(*args), work(*args))[1])


def sampled_from(engine):
    """{a request's id: the logits of each of its tokens}, which fills as the engine runs."""
    seen = defaultdict(list)
    watch(engine, "_sample", lambda ready, logits: [seen[r.id].append(row.float()) for (r, _), row in zip(ready, logits)])
    return seen


# ---------------------------------------------------------------- 1. token identity

@pytest.mark.parametrize("alloc", ["reserve", "grow"])
@pytest.mark.parametrize("scheduler, chunk", [(name, chunk) for name in NAMES for chunk in ((1, 3, 16, 64, 512) if "sarathi" in name else (64,))])
def test_tokens_equal_the_naive_loop(scheduler, chunk, alloc):
    """Prompts of 1, tile - 1, tile, tile + 1 and 300 tokens (130 where a chunk is up to 3), a pool too small for all, a neighbour that is aborted."""
    lengths, n_new = [300 if chunk > 3 else 130, 15, 1, 16, 17, 33], 20
    engine = Engine(small(), scheduler=scheduler, chunk=chunk, max_batch=4, tile=TILE, alloc=alloc, n_page=lengths[0] + 33)
    requests = serve_beside_a_victim(engine, lengths, n_new)
    if alloc == "grow" and (scheduler, chunk) != ("sarathi_serve", 1):  # whose budget of 1 lets decodes end before a prompt goes on
        assert sum(r.n_preempted for r in requests) > 0, "the pool was meant to run out"


@pytest.mark.parametrize("scheduler", NAMES)
def test_tokens_equal_the_naive_loop_gpt2(scheduler):
    engine = Engine(small("gpt2"), scheduler=scheduler, chunk=32, max_batch=3, tile=TILE, n_page=900)
    lengths = [5, 40, 16, 90]
    assert engine.generate([prompt(n) for n in lengths], max_new_tokens=6) == [naive(n, 6, family="gpt2") for n in lengths]


def test_bfloat16_tokens_are_the_oracles_or_within_rounding_of_it():
    """In bfloat16 a token may differ from the float32 oracle's only where the oracle itself sees the two within 3 % of the spread."""
    m, prompts = small(dtype=torch.bfloat16), [prompt(70), prompt(30)]
    engine = Engine(m, chunk=32, tile=TILE, max_batch=4, n_page=400)
    for tokens, out in zip(prompts, engine.generate(prompts, max_new_tokens=8)):
        for t in out:
            row = m.logits(tokens)[-1]
            assert row.max() - row[t] < 0.03 * (row.max() - row.min())
            tokens.append(t)


@pytest.mark.parametrize("alloc", ["reserve", "grow"])
@pytest.mark.parametrize("scheduler, chunk", [("static", 16), ("sarathi", 16), ("sarathi", 64), ("sarathi_serve", 48)])
def test_bfloat16_logits_are_those_of_the_bfloat16_oracle(scheduler, chunk, alloc):
    """However a prompt is cut and whoever shares the batch: within 2 % of a row's spread, the rounding of a few bfloat16 sums."""
    m = small(dtype=torch.bfloat16)
    engine = Engine(m, scheduler=scheduler, chunk=chunk, tile=TILE, max_batch=3, n_page=600, alloc=alloc)
    seen = sampled_from(engine)
    lengths = [150, 9, 64, 33]
    for i, out in enumerate(engine.generate([prompt(n) for n in lengths], max_new_tokens=8)):
        with torch.inference_mode():
            oracle = m.whole(torch.tensor([prompt(lengths[i]) + out]), dtype=torch.bfloat16)[0, lengths[i] - 1:-1].float()
        ours = torch.stack(seen[i])
        assert (ours - oracle).abs().max() < 0.02 * (oracle.max() - oracle.min())


@pytest.mark.parametrize("alloc", ["reserve", "grow"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_an_earlier_owner_left_in_a_page_harms_nobody(dtype, alloc):
    """Attention reads, masked, beyond a request's own tokens: what lies there must not matter, not even if it is no number."""
    m, outputs = small(dtype=dtype), []
    for left in (0.0, float("nan")):
        engine = Engine(m, chunk=64, tile=TILE, max_batch=3, n_page=300, alloc=alloc)
        engine.kv.fill_(left)
        outputs.append(engine.generate([prompt(70), prompt(9), prompt(45), prompt(30)], max_new_tokens=20))
    assert outputs[0] == outputs[1] and len({t for out in outputs[0] for t in out}) > 1


def test_preempted_requests_keep_their_order_and_their_tokens():
    engine = Engine(small(), scheduler="orca", max_batch=4, alloc="grow", n_page=70)
    requests = add(engine, [Request(prompt(20, seed=i), 25) for i in range(5)])
    ended = [e.request.id for events in steps(engine) for e in events if e.finished]
    assert ended == sorted(ended), "first come, first served, also after preemption"
    assert sum(r.n_preempted for r in requests) > 0 and requests[0].n_preempted == 0
    for i, r in enumerate(requests):
        assert r.output == naive(20, 25, seed=i)


def test_no_newcomer_takes_the_pages_of_one_that_gave_way_in_the_same_iteration():
    engine = Engine(small(), scheduler="orca", max_batch=3, alloc="grow", n_page=51)
    requests = add(engine, [Request(prompt(20), 25), Request(prompt(20, seed=1), 25), Request(prompt(15), 3)])
    ended = [e.request for events in steps(engine) for e in events if e.finished]
    assert ended[0] is requests[0] and [r.n_preempted for r in requests] == [0, 1, 0], "the third would have fitted where the second was"


def test_last_come_first_served_goes_on_with_those_that_gave_way():
    """While new requests keep coming: otherwise what was begun would never end."""
    def ends(r, n):
        return next(i for i in range(n) if (engine.add(Request([2], 2)), engine.step(), r.done)[2])
    engine = Simulator(SimpleCost(), scheduler="orca", max_batch=2, alloc="grow", n_page=60, order="lcfs")
    begun = add(engine, [Request([1] * 20, 25), Request([1] * 20, 25)])
    engine.step()
    assert max(ends(r, 200) for r in begun) < 60 and sum(r.n_preempted for r in begun) > 0


def test_a_request_that_fills_the_pool_and_the_context_runs():
    engine = Engine(small(), scheduler="sarathi", chunk=64, tile=TILE, n_page=512, max_batch=4, alloc="grow")
    assert engine.generate([prompt(505), prompt(3)], max_new_tokens=7) == [naive(505, 7), naive(3, 7)]


# ---------------------------------------------------------------- 2. parity with the outside

def hf_folder(tmp_path, family="llama", shard="5GB", spelling=None, **settings):
    """A random checkpoint written by transformers -> (its model, the folder)."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(3)
    if family == "gpt2":
        config = transformers.GPT2Config(vocab_size=131, n_positions=96, n_embd=48, n_layer=2, n_head=4, initializer_range=0.2, **settings)
        theirs = transformers.GPT2LMHeadModel(config)
    else:
        kind = dict(llama=(transformers.LlamaConfig, transformers.LlamaForCausalLM),
                    mistral=(transformers.MistralConfig, transformers.MistralForCausalLM))[family]
        config = kind[0](**dict(vocab_size=131, hidden_size=48, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4,
                                max_position_embeddings=96, initializer_range=0.2) | settings)
        theirs = kind[1](config)
    theirs.eval().save_pretrained(tmp_path, max_shard_size=shard)
    if spelling:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(spelling(json.loads(path.read_text()))))
    return theirs, tmp_path


def old_spelling(c):
    """transformers 5 writes rope_parameters; older files have rope_theta and rope_scaling."""
    rope = c.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    return c | dict(rope_theta=theta, rope_scaling=None if rope.get("rope_type") == "default" else rope, torch_dtype=c.pop("dtype", None))


LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32, rope_theta=5e5)
CHECKPOINTS = {
    "gpt2": dict(family="gpt2"), "gpt2 sharded": dict(family="gpt2", shard="20KB"), "llama": dict(),
    "grouped heads": dict(num_key_value_heads=2), "one kv head": dict(num_key_value_heads=1), "tied": dict(tie_word_embeddings=True),
    "sharded": dict(shard="30KB", num_key_value_heads=2), "llama3 rope": dict(rope_parameters=LLAMA3),
    "llama3 rope, old spelling": dict(rope_parameters=LLAMA3, spelling=old_spelling), "old spelling": dict(spelling=old_spelling),
    "linear rope": dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4)), "wide heads": dict(head_dim=32),
    "mistral": dict(family="mistral", sliding_window=None, num_key_value_heads=2)}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_and_tokens_equal_transformers(name, tmp_path):
    theirs, folder = hf_folder(tmp_path, **CHECKPOINTS[name])
    ours = GPT.from_pretrained(folder)
    ids = torch.randint(0, 131, (1, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(ids).logits[0]
    assert torch.allclose(ours.logits(ids[0]), expected, atol=1e-4, rtol=0)
    if "sharded" in name:
        assert len(list(folder.glob("*.safetensors"))) > 1
    with torch.no_grad():
        greedy = theirs.generate(ids[:, :20], max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 20:].tolist()
    engine = Engine(ours, scheduler="sarathi", chunk=8, tile=8, max_batch=3, n_page=200)
    assert engine.generate([ids[0, :20].tolist(), ids[0, 5:9].tolist()], max_new_tokens=12)[0] == greedy


def test_loading_converts_to_the_asked_type_and_keeps_the_folders_own(tmp_path):
    _, folder = hf_folder(tmp_path)
    assert GPT.from_pretrained(folder).dtype == torch.float32
    half = GPT.from_pretrained(folder, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16 and half.blocks[0].preproj.weight.dtype == torch.bfloat16


def test_saved_models_load_here_and_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    ours = GPT(GPTConfig(**SMALL | {"tied": True}))
    ours.save_pretrained(tmp_path)
    model_py.write_byte_tokenizer(tmp_path)
    ids = torch.randint(0, 199, (40,))
    again, theirs = GPT.from_pretrained(tmp_path), transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.allclose(again.logits(ids), ours.whole(ids[None])[0], atol=1e-5)
        assert torch.allclose(again.logits(ids), theirs(ids[None]).logits[0], atol=1e-4)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)("héllo")["input_ids"] == list("héllo".encode())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_loaded_can_be_saved_again(dtype, tied, tmp_path):
    """Its weights are packed by then, and no parameters any more."""
    first = GPT.from_preset(GPTConfig(**SMALL | {"tied": tied}), dtype)
    first.save_pretrained(tmp_path)
    again = GPT.from_pretrained(tmp_path)
    assert again.dtype == dtype and torch.equal(again.logits([5, 6, 7]), first.logits([5, 6, 7]))


@pytest.mark.parametrize("name", [n for n in PRESETS if preset(n).n_params < 2e9])
def test_n_params_counts_what_the_network_has(name):
    with torch.device("meta"):
        assert preset(name).n_params == sum(p.numel() for p in GPT(preset(name)).parameters())


@pytest.mark.parametrize("name, billions", [("llama-7b", 6.74), ("llama-13b", 13.0), ("llama-33b", 32.5), ("llama-70b", 69.0), ("gpt3-175b", 175)])
def test_presets_have_the_published_size(name, billions):
    assert preset(name).n_params == pytest.approx(billions * 1e9, rel=0.01)


# ---------------------------------------------------------------- 3. tokenizers

TEXTS = ["def f(x):\n    return x + 1\n", "naïve café, 東京 12345 3.14159  two  spaces\t\n\n end ", "it's WE'LL 100% ok\r\n", " leading", "",
         "cafe\u0301"]


def bpe_folder(tmp_path, kind):
    """A small byte-level BPE trained and written by the tokenizers library, in the manner of GPT-2, Llama-3, SmolLM2 or Qwen."""
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    t = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind not in ("llama3", "qwen"))
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(model_py.LLAMA3_SPLIT), "isolated"), byte_level])
    t.pre_tokenizer = {"gpt2": byte_level, "llama3": split, "qwen": split,
                       "smollm2": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])}[kind]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<s>", "</s>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    t.train_from_iterator([Path(model_py.__file__).read_text(), *TEXTS], trainer)
    if kind == "qwen":
        t.normalizer = normalizers.NFC()
    if kind == "llama3":
        t.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    t.save(str(tmp_path / "tokenizer.json"))
    return t, tmp_path


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "smollm2", "qwen"])
def test_a_folders_tokenizer_becomes_the_same_tiktoken_encoding(kind, tmp_path):
    theirs, folder = bpe_folder(tmp_path, kind)
    (folder / "config.json").write_text('{"eos_token_id": 1}')
    ours = load_tokenizer(folder)
    assert ours.stop == [1]
    for text in [*TEXTS, Path(__file__).read_text()]:
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text)[len(ours.prefix):]) == (unicodedata.normalize("NFC", text) if kind == "qwen" else text)


def test_llama3_tokenizer_model_and_what_is_not_byte_level(tmp_path):
    lines = [base64.b64encode(bytes([b])) + b" %d" % b for b in range(256)] + [base64.b64encode(b"ab") + b" 256"]
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join(lines))
    ours = load_tokenizer(tmp_path)
    assert ours.encode("abc") == [257, 256, ord("c")]
    assert ours.decode([97, 265, 99_999, 98]) == "a<|eom_id|>\ufffdb", "a model may have more tokens than its tokenizer names"
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    with pytest.raises(ValueError, match="SentencePiece.*token ids"):
        load_tokenizer(tmp_path)
    uncut = dict(pre_tokenizer=dict(type="ByteLevel", use_regex=False), model=dict(type="BPE", vocab={}, merges=[]))
    split, digits = dict(type="Split", pattern=dict(Regex=r"\s"), behavior="Isolated"), dict(type="Digits", individual_digits=True)
    steps = [[split, split], [digits, split], [digits | dict(individual_digits=False)]]  # what one pattern cannot say
    cut = [uncut | dict(pre_tokenizer=dict(type="Sequence", pretokenizers=[*some, dict(type="ByteLevel", use_regex=False)])) for some in steps]
    for another in ({"model": {"type": "Unigram", "vocab": []}}, {"model": None}, uncut, *cut):
        (tmp_path / "tokenizer.json").write_text(json.dumps(another))
        with pytest.raises(ValueError, match="byte-level BPE.*token ids"):
            load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match="token ids"):
        load_tokenizer(tmp_path / "nowhere")


def test_streamed_text_never_shows_half_a_character(tmp_path):
    model_py.write_byte_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    say, pieces = tokenizer.stream(), []
    for t in tokenizer.encode("é東x"):
        pieces.append(say([t]))
    assert "".join(pieces) == "é東x" and "\ufffd" not in "".join(pieces) and pieces[0] == ""


# ---------------------------------------------------------------- 4. plans: what each scheduler does, without a model

def waiting(n_tokens):
    r = Request([0] * n_tokens, 8)
    r.n_tokens, r.state = n_tokens, "waiting"
    return r


def decoding(n_past):
    r = waiting(n_past + 1)
    r.n_past, r.state = n_past, "running"
    return r


def plan_of(name, running, queue, **options):
    s = make_scheduler(name, **dict(chunk=256, max_batch=8, tile=128) | options)
    return s.plan(running, deque(queue))


def test_static_runs_a_batch_until_every_request_ends():
    queue = [waiting(n) for n in (100, 7, 300)]
    assert plan_of("static", [], queue, max_batch=2) == [(queue[0], 100), (queue[1], 7)]
    running = [decoding(10)]
    assert plan_of("static", running, queue) == [(running[0], 1)], "no new request while one runs"


def test_orca_mixes_whole_prompts_with_decodes_without_a_limit_on_prefills():
    running, queue = [decoding(10), decoding(20)], [waiting(n) for n in (100, 7, 300)]
    assert plan_of("orca", running, queue, max_batch=4) == [(running[0], 1), (running[1], 1), (queue[0], 100), (queue[1], 7)]


def test_prefill_first_stalls_decodes_while_prompts_run():
    running, queue = [decoding(10), decoding(20)], [waiting(n) for n in (100, 7)]
    assert plan_of("prefill_first", running, queue) == [(queue[0], 100), (queue[1], 7)]
    assert plan_of("prefill_first", running, []) == [(r, 1) for r in running]


@pytest.mark.parametrize("chunk, tile, n_decodes, expected", [
    (256, 128, 0, 256), (256, 128, 1, 255), (256, 128, 17, 239), (512, 128, 5, 507), (300, 128, 3, 253),  # 256 - (B - 1) [SARATHI §4.4]
    (64, 128, 3, 61), (1, 128, 3, 1), (16, 16, 16, 16), (3, 16, 4, 2)])
def test_sarathi_shrinks_the_chunk_so_that_it_and_the_decodes_fill_tiles(chunk, tile, n_decodes, expected):
    running, queue = [decoding(10 + i) for i in range(n_decodes)], [waiting(1000), waiting(1000)]
    plan = plan_of("sarathi", running, queue, chunk=chunk, tile=tile, max_batch=n_decodes + 2)
    assert plan == [*((r, 1) for r in running), (queue[0], expected)], "every decode and one chunk"
    assert sum(n for r, n in plan) % min(chunk, tile) == 0


def test_sarathi_piggybacks_at_most_b_minus_1_decodes_and_finishes_one_prompt_before_the_next():
    running = [decoding(10) for _ in range(8)]
    assert plan_of("sarathi", running, [waiting(9)]) == [(r, 1) for r in running], "no slot, no chunk"
    half = waiting(1000)
    half.n_past, half.state = 300, "running"
    assert plan_of("sarathi", [running[0], half], [waiting(50)]) == [(running[0], 1), (half, 255)]
    assert plan_of("sarathi", [running[0]], [waiting(50), waiting(60)])[1][1] == 50, "one chunk, even if short"


def test_sarathi_serve_fills_its_budget_with_decodes_first_then_many_chunks():
    running, queue = [decoding(10), decoding(20)], [waiting(100), waiting(100), waiting(100)]
    assert [n for r, n in plan_of("sarathi_serve", running, queue)] == [1, 1, 100, 100, 54]
    assert [n for r, n in plan_of("sarathi_serve", running, queue, chunk=2)] == [1, 1]


def test_every_iteration_of_sarathi_on_a_real_run():
    """At most one chunk in any iteration, and whole tiles as long as the prompt under way goes on."""
    engine = Engine(small(), scheduler="sarathi", chunk=32, tile=TILE, max_batch=4, n_page=2000)
    add(engine, [Request(prompt(50 + 30 * i), 12) for i in range(9)])
    seen, mixed = [], 0
    watch(engine, "_pack", lambda plan: seen.append([(r, n, r.n_todo) for r, n in plan]))
    finish(engine)
    for plan in seen:
        chunks = [(n, todo) for r, n, todo in plan if todo > 1]
        assert len(chunks) <= 1
        if chunks and chunks[0][0] < chunks[0][1]:
            assert sum(n for r, n, todo in plan) % TILE == 0
            mixed += len(plan) > 1
    assert mixed > 5


def test_a_scheduler_of_ones_own_runs_by_name_and_as_an_object():
    class ShortestFirst(Scheduler):
        def plan(self, running, waiting):
            new = sorted(waiting, key=lambda r: r.n_todo)[:self.max_batch - len(running)]
            return [(r, r.n_todo) for r in [*running, *new]]
    expected = [naive(n, 5) for n in (40, 3, 20)]
    for scheduler in ("shortest_first", ShortestFirst()):
        engine = Engine(small(), scheduler=scheduler, max_batch=1, n_page=100)
        requests = add(engine, [Request(prompt(n), 5) for n in (40, 3, 20)])
        ended = engine.run()
        assert [r.output for r in requests] == expected and [r.id for r in ended] == [1, 2, 0]
    mine = ShortestFirst()
    assert [Engine(small(), scheduler=mine, max_batch=n, n_page=100).scheduler.max_batch for n in (1, 4)] == [1, 4], "one object, two engines"
    del SCHEDULERS["shortest_first"]


def test_a_scheduler_need_not_call_our_init():
    class Bare(sarathi.Orca, named=False):
        def __init__(self):
            pass
    assert Engine(small(), scheduler=Bare(), max_batch=2, n_page=100).generate([prompt(9)] * 3, 5) == [naive(9, 5)] * 3


def test_autopilot_has_no_plan_for_nobody():
    engine = Simulator(a6000(), scheduler="autopilot", max_batch=2)
    assert engine.scheduler.plan([], ()) == []


def test_no_step_looks_at_the_whole_queue():
    class Counting(sarathi.Queue):
        seen = 0

        def __iter__(self):
            for r in super().__iter__():
                Counting.seen += 1
                yield r
    for name in NAMES:
        engine = Engine(small(), scheduler=name, max_batch=4, chunk=16, tile=TILE, n_page=300)
        add(engine, [Request(prompt(5), 3) for i in range(3000)])
        engine._arrive()
        engine.waiting, Counting.seen = Counting(engine.waiting), 0
        for _ in range(20):
            engine.step()
        assert 0 < Counting.seen < 20 * 3 * 4, name


def test_a_scheduler_that_plans_nothing_is_an_error_not_a_hang():
    class Lazy(Scheduler, named=False):
        def plan(self, running, waiting):
            return []
    engine = Engine(small(), scheduler=Lazy(), n_page=100, max_batch=2)
    engine.add(Request([1], 1))
    with pytest.raises(RuntimeError, match="Lazy planned nothing"):
        engine.step()


@pytest.mark.parametrize("call, error", [
    (lambda: CostModel.roofline("llama-13b", "a100"), "config = 'llama-13b': must be a GPTConfig"),
    (lambda: CostModel.roofline(preset("llama-13b"), "a100", tp=3), "tp = 3 devices cannot share n_head = 40"),
    (lambda: Engine(small(), n_page=100, draft=sarathi.Ngram, spec=3), "draft = <class .*Ngram'>: one of .* or a Proposer object"),
    (lambda: EngineConfig(order=LastCome), "order = <class .*LastCome'>: one of 'fcfs', 'lcfs', or an Order object"),
    (lambda: sarathi.Proposer().propose([], []), "Proposer has no propose")])
def test_what_is_no_object_of_the_kind_is_named(call, error):
    with pytest.raises((ValueError, NotImplementedError), match=error):
        call()


@pytest.mark.parametrize("offered, error", [(None, "Mine.offer gave None: must give the waiting requests"), ([7], "Mine.offer gave 7: must give"),
                                            ([], "0 running requests .* 1 waiting ones, offered by Mine")])
def test_an_order_that_offers_no_requests_is_named(offered, error):
    class Mine(Order):
        def offer(self, running, queue):
            return offered
    engine = Simulator(A100, order=Mine(), max_batch=2)
    engine.add(Request([1], 1))
    with pytest.raises((ValueError, RuntimeError), match=error):
        engine.step()


@pytest.mark.parametrize("plan, message", [(lambda r: [(r, 1), (r, 1)], "may name a request once"), (lambda r: [(r, 0)], "may feed 1 .. 5 .* not 0"),
                                           (lambda r: [(r, r.n_todo + 1)], "may feed 1 .. 5 tokens of request 0, not 6"),
                                           (lambda r: [(r, 1.0)], "may feed 1 .. 5 tokens of request 0, not 1.0"),
                                           (lambda r: None, "must be a list of tuples .request, n., not None"), (lambda r: [r], "must be a list of tuples"),
                                           (lambda r: [(3, 1)], "must be a list of tuples .request, n., not .+3, 1"),
                                           (lambda r: [(Request([1]), 1)] * 2, "may name requests that run here or wait, request -1 is 'new'")])
def test_a_plan_that_cannot_be_is_said_to_whose_it_is(plan, message):
    class Wrong(sarathi.Scheduler, named=False):
        def plan(self, running, waiting):
            return plan(next(iter([*running, *waiting])))
    with pytest.raises(ValueError, match="Wrong: a plan " + message):
        Engine(small(), scheduler=Wrong(), n_page=100).generate([prompt(5)], 3)


def test_a_plan_whose_adapters_cannot_all_be_merged_is_said_to_whose_it_is():
    class Both(sarathi.Scheduler, named=False):
        """Looks past the queue that it is offered."""

        def start(self, engine):
            self.engine = engine

        def plan(self, running, waiting):
            return [(r, r.n_todo) for r in [*running, *self.engine.waiting]]
    engine = Engine(small(), scheduler=Both(), lora="merge", n_page=100)
    learn(engine, adapters_for(small(), [4, 4]))
    with pytest.raises(ValueError, match="Both: with lora = 'merge' a plan has one adapter, not 2"):
        engine.generate([prompt(5), prompt(6)], 3, adapter=["a0", "a1"])


# ---------------------------------------------------------------- 5. the pool

@pytest.mark.parametrize("alloc", ["reserve", "grow"])
def test_pool_is_conserved_under_a_random_workload(alloc):
    """500 requests of random lengths with random aborts; check() runs after every step (finish) and every abort."""
    rng = random.Random(0)
    engine = Engine(least(), scheduler="sarathi_serve", chunk=64, max_batch=16, tile=TILE, alloc=alloc, n_page=260)
    requests = []
    for i in range(500):
        requests.append(Request(prompt(rng.choice([1, 3, 10, 40, 90]), seed=i), rng.randint(1, 30)))
        engine.add(requests[-1])
        if i % 3 == 0:
            engine.step()
            engine.pool.check()
        if rng.random() < 0.1 and engine.requests:
            engine.abort(rng.choice(list(engine.requests)))
            engine.pool.check()
    finish(engine)
    states = [r.state for r in requests]
    assert states.count("length") + states.count("abort") == 500 and states.count("abort") > 10
    assert (sum(r.n_preempted for r in requests) > 10) == (alloc == "grow")
    for r in rng.sample([r for r in requests if r.state == "length"], 10):
        assert r.output == greedy(least(), r.prompt, r.max_new_tokens)


def test_pool_policies_hand_out_what_they_promise():
    pool = PagePool(100, 2, "reserve")
    assert pool.hold("a", 5, 30) and pool.hold("b", 1, 30) and pool.hold("c", 30, 30)
    assert pool.tables["b"].rows[0] == 30 * 2 and pool.tables["b"].stride == 30
    pool.free("b")
    assert not pool.hold("d", 1, 31) and pool.n_free == 40 and "d" not in pool.tables, "40 free, but not 31 together"
    pool.free("b")
    pool.check()
    assert pool.unused.spans == [(30, 60), (90, 100)] and pool.hold_any("e", 20, 20) and pool.unused.spans == [(30, 50)], "the last ones, in two parts"
    for owner in "aec":
        pool.free(owner)
    assert pool.unused.spans == [(0, 100)], "neighbours are one again"
    pool = PagePool(10, 2, "grow")
    assert pool.hold("a", 3, 9) and pool.hold("b", 3, 9) and pool.hold("a", 6, 9)
    assert pool.tables["a"].rows.tolist() == [0, 2, 4, 12, 14, 16] and pool.tables["a"].stride == 1
    assert not pool.hold("b", 5, 9) and pool.n_free == 1 and len(pool.tables["b"].rows) == 3
    pool.free("a")
    assert pool.n_free == 7 and pool.pages("b").tolist() == [3, 4, 5]
    pool.check()


def test_check_notices_a_lost_page_and_a_page_owned_twice():
    for alloc, damage in (("reserve", lambda p: p.unused.spans.clear()), ("grow", lambda p: p.tables.update(c=p.tables["a"])),
                          ("grow", lambda p: p.unused.take(1))):
        pool = PagePool(10, 1, alloc)
        pool.hold("a", 4, 9)
        damage(pool)
        with pytest.raises(AssertionError, match="lost or owned twice"):
            pool.check()


def test_default_batch_is_what_the_memory_holds():
    """B = floor((M_G - M_S) / (L * m_kv)) [SARATHI §4.3.1]"""
    m_kv = 2 * 2 * 2 * 16 * 4  # K and V, layers, kv heads, head_dim, float32
    assert small().config.page_bytes(4) == m_kv
    engine = Engine(small(), memory_gb=5.5 * 512 * m_kv / 1e9)
    assert engine.max_batch == 5 and engine.pool.n_page == int(5.5 * 512)
    assert Engine(small(), max_batch=3).pool.n_page == 3 * 512


# ---------------------------------------------------------------- 6. kernels against their definitions

def untiled(engine):
    """The cache with all K as V lies."""
    kv, Hk, D = engine.kv.clone(), engine.pool.n_kv_head, engine.kv.size(-1)
    for t in engine.pool.tables.values():
        rows, tile = t.rows[:, None] + t.stride * np.arange(Hk), t.key_tile(engine.key_tile)
        i = np.arange(len(rows))
        elsewhere = (rows - i[:, None] % tile)[..., None] * D + np.arange(D) * tile + i[:, None, None] % tile  # the formula, once more
        kv[:, 0, rows] = engine.kv[:, 0].flatten(1)[:, elsewhere]
    return kv


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("layout", ["together", "untiled", "scattered"])
@pytest.mark.parametrize("n_head, n_kv_head", [(4, 4), (8, 2), (6, 1)])
def test_attention_equals_its_definition(layout, n_head, n_kv_head, dtype, tolerance, monkeypatch):
    """One chunk of several blocks, single rows, and decodes of unequal contexts side by side, through the engine's own packing."""
    config = GPTConfig(n_layer=1, n_head=n_head, n_kv_head=n_kv_head, n_embd=16 * n_head, vocab_size=50, block_size=1024)
    engine = Engine(GPT.from_preset(config, dtype=dtype), n_page=464 * 11, max_batch=11, alloc="grow" if layout == "scattered" else "reserve")
    generator = torch.Generator().manual_seed(0)
    engine.kv.normal_(generator=generator)
    shapes = [(10, 1), (12, 1), (17, 1), (0, 1), (300, 1), (40, 300), (0, 256), (5, 257), (3, 4), (7, 2), (90, 2)]  # (n_past, n)
    plan = []
    for n_past, n in shapes:
        r = Request([1] * (n_past + n), 20)
        engine.add(r)
        n_max = 450 if layout == "untiled" and n_past % 4 == 0 else 464  # some requests' pages are no whole tiles: they share no call with others
        assert engine.pool.hold(r.id, n_past + n, n_max)
        if layout == "scattered":
            np.random.default_rng(n).shuffle(engine.pool.tables[r.id].rows)
        r.n_past = n_past
        plan.append((r, n))
    batch = engine._pack(plan)
    assert sum(s.R * s.n for s in batch.segments) == sum(n for _, n in shapes)
    expected = [2, 1, 2] if layout == "untiled" else [4, 1]
    assert [s.R for s in batch.segments if s.start < 5] == expected, "contexts of 1, 11, 13 and 18 tokens share a call, one of 301 has its own"
    tables = [(torch.from_numpy(t.rows[:r.n_past + n, None] + t.stride * np.arange(n_kv_head)), n)
              for r, n in plan for t in [engine.pool.tables[r.id]]]
    q = torch.randn(len(batch.tokens), n_head, 16, generator=generator).to(dtype)
    ours, expected = attention(q, engine.kv[0], batch.segments, n_kv_head), attention_ref(q, untiled(engine)[0], tables)
    assert torch.allclose(ours.float(), expected.float(), atol=tolerance, rtol=tolerance)
    monkeypatch.setattr(kernels, "PART", 2**11)  # as long contexts: a few heads at a time
    assert any(len(list(kernels._contexts(engine.kv[0, 0], s.index[0], s.ctx))) > 1 for s in batch.segments)
    assert torch.allclose(attention(q, engine.kv[0], batch.segments, n_kv_head), ours, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("machine, has, dtype", [("x86_64", True, torch.bfloat16), ("AMD64", False, torch.float32), ("aarch64", True, torch.bfloat16)])
def test_bfloat16_is_the_default_only_where_the_processor_multiplies_it(machine, has, dtype, monkeypatch):
    """On x86 oneDNN takes bfloat16 with AVX-512 alone, at a fifth of float32's speed: that is not support."""
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has and machine == "x86_64")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5) if device == "cuda:1" else (9, 0))
    assert [model_py.default_dtype(device) for device in ("cpu", "cuda", "cuda:1")] == [dtype, torch.bfloat16, torch.float16]
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.delattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported")
    monkeypatch.setattr(torch.ops, "mkldnn", object())  # Apple's processors: torch has no oneDNN there
    assert model_py.default_dtype() == torch.float32


def test_packed_weights_multiply_as_plain_ones():
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        x, w, b = torch.randn(7, 96, dtype=dtype), torch.randn(50, 96, dtype=dtype), torch.randn(50, dtype=dtype)
        expected = kernels.linear_ref(x.float(), w, b)
        assert torch.allclose(kernels.linear(x, kernels.pack(w), b).float(), expected, atol=tolerance * 10, rtol=tolerance)
        assert torch.allclose(kernels.linear(x.float(), kernels.pack(w), b), expected, atol=1e-4), "the float32 oracle over any weights"


def test_target_probs_by_hand():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    ask = lambda t, k, p: kernels.target_probs(logits, torch.tensor([t]), torch.tensor([k]), torch.tensor([p]))[0].tolist()
    assert ask(1.0, 0, 1.0) == pytest.approx([0.5, 0.3, 0.15, 0.05])
    assert ask(1.0, 2, 1.0) == pytest.approx([0.625, 0.375, 0, 0])
    assert ask(1.0, 0, 0.6) == pytest.approx([0.625, 0.375, 0, 0]), "the fewest tokens that reach 0.6"
    assert ask(1.0, 0, 0.5) == pytest.approx([1, 0, 0, 0])
    assert ask(0.5, 0, 1.0) == pytest.approx([x * x / 0.365 for x in (0.5, 0.3, 0.15, 0.05)])
    assert ask(1e-45, 0, 1.0) == ask(1e-300, 0, 1.0) == [1, 0, 0, 0], "also where float32 ends"


def test_samples_follow_the_distribution():
    """Chi-square of 20,000 draws over 12 tokens: 11 degrees of freedom, 31.3 is exceeded with probability 0.001."""
    p = torch.rand(12, generator=torch.Generator().manual_seed(1))
    p[3] = 0.0
    p, n = p / p.sum(), 20000
    u = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    count = kernels.sample(p.expand(n, -1), u).bincount(minlength=12)
    assert count[3] == 0
    keep = p > 0
    assert (((count - n * p) ** 2) / (n * p))[keep].sum() < 31.3
    assert kernels.sample(p[None], torch.tensor([1.0 - 1e-16], dtype=torch.float64)).item() == 11


def test_sampled_tokens_depend_on_the_request_alone():
    """The same seed gives the same tokens under every scheduler, chunk, neighbour and preemption; another seed gives others."""
    sampling = dict(temperature=1.3, top_k=50, top_p=0.95, seed=5)
    runs = []
    for name in NAMES:
        engine = Engine(small(), scheduler=name, chunk=16, tile=TILE, max_batch=3, alloc="grow", n_page=75)
        runs.append(engine.generate([prompt(20), prompt(33), prompt(2)], max_new_tokens=20, **sampling))
    assert all(r == runs[0] for r in runs)
    other = Engine(small(), n_page=200, max_batch=3).generate([prompt(20)], max_new_tokens=20, **sampling | {"seed": 6})
    assert other[0] != runs[0][0]
    assert Engine(small(), n_page=200).generate([prompt(33)], max_new_tokens=20, **sampling | {"seed": 6}) == [runs[0][1]], "prompt i draws with seed + i"
    unseeded = [Engine(small(), n_page=200, max_batch=3, seed=s).generate([prompt(9)], max_new_tokens=20, temperature=1.0) for s in (0, 0, 1)]
    assert unseeded[0] == unseeded[1] != unseeded[2]


def test_greedy_and_sampled_requests_share_a_batch():
    engine = Engine(small(), n_page=300, max_batch=4)
    greedy, drawn = Request(prompt(20), 8), Request(prompt(20), 8, temperature=1.0, top_k=1)
    add(engine, (greedy, drawn, Request(prompt(8), 8, temperature=2.0)))
    finish(engine)
    assert greedy.output == drawn.output == naive(20, 8), "top_k = 1 is greedy"


# ---------------------------------------------------------------- 7. the life of a request

def test_events_stream_every_token_once_and_in_order():
    engine, got = Engine(small(), n_page=300, max_batch=3), {}
    a, b = Request(prompt(10), 6), Request(prompt(30), 3)
    engine.add(a), engine.add(b)
    ended = engine.run(lambda e: got.setdefault(e.request.id, []).extend(e.tokens))
    assert got == {a.id: naive(10, 6), b.id: naive(30, 3)} and ended == [b, a]
    assert engine.step() == [] and 0 < a.ttft < 60 and 0 < a.tpot < 60


def test_stop_tokens_end_a_request_and_are_part_of_its_output():
    tokens = naive(20, 12)
    out = Engine(small(), n_page=100, max_batch=2).generate([prompt(20)], max_new_tokens=12, stop=[tokens[4]])[0]
    assert out == tokens[:tokens.index(tokens[4]) + 1]


def test_requests_arrive_when_they_say():
    class Clock:
        t = 0.0

        def now(self):
            Clock.t += 0.01
            return Clock.t

        def wait_until(self, t):
            Clock.t = max(Clock.t, t)
    engine = Engine(small(), n_page=300, max_batch=3, clock=Clock())
    late, early, never = Request(prompt(5), 2, arrival=9.0), Request(prompt(6), 2, arrival=0.5), Request(prompt(7), 2, arrival=1e6)
    add(engine, (late, early, never))
    engine.abort(never.id)
    assert engine.run() == [early, late]
    assert 0.5 < early.times[0] < 1 and late.times[0] > 9.0 and late.ttft < 1 and Clock.t < 10, "idle time is skipped, aborted arrivals too"


def test_abort_in_every_state_returns_every_page():
    engine = Engine(small(), n_page=60, max_batch=1)
    running, queued, pending = Request(prompt(20), 9), Request(prompt(20), 9), Request(prompt(5), 9, arrival=1e9)
    add(engine, (running, queued, pending))
    engine.step()
    assert [r.state for r in (running, queued, pending)] == ["running", "waiting", "pending"]
    for r in (queued, running, pending):
        engine.abort(r.id)
        engine.pool.check()
        for what in (r.id, r, [r.id], str(r.id)):
            with pytest.raises(KeyError, match="no request .{,60} in the engine: must be what add returned"):
                engine.abort(what)
    assert engine.pool.n_free == 60 and not engine.requests and engine.step() == []


def test_a_prompt_that_its_owner_changes_later_is_served_as_it_was_added():
    engine, mine = Engine(small(), n_page=100, max_batch=2), prompt(10)
    r, neighbour = Request(mine, 6), Request(prompt(20), 6)
    engine.add(r), engine.add(neighbour)
    engine.step()
    mine.extend([1, 2, 3])
    finish(engine)
    assert r.output == naive(10, 6) and neighbour.output == naive(20, 6)


def test_ctrl_c_ends_a_run_after_the_iteration_and_it_can_go_on():
    engine = Engine(small(), n_page=100, max_batch=2)
    r = Request(prompt(10), 12)
    engine.add(r)
    assert engine.run(lambda e: os.kill(os.getpid(), signal.SIGINT) if len(r.output) == 4 else None) == []
    assert len(r.output) == 4 and engine.run() == [r] and r.output == naive(10, 12)


def test_ctrl_c_ends_a_run_that_waits_for_somebody_to_come():
    class Clock(sarathi.WallClock):
        def wait_until(self, t):
            os.kill(os.getpid(), signal.SIGINT)
            super().wait_until(t)
    engine = Engine(small(), n_page=100, clock=Clock())
    engine.add(Request(prompt(10), 4, arrival=10**6))
    assert engine.run() == [] and len(engine.requests) == 1


def test_an_iteration_that_a_second_ctrl_c_kept_from_landing_lands_later(monkeypatch):
    engine, cut = Engine(small(), n_page=200, chunk=16, tile=TILE), []
    r, run = add(engine, [Request(prompt(20), 8)])[0], engine._run

    def wait(flight):
        if not cut and len(r.times) == 3:
            cut.append(True)
            raise KeyboardInterrupt
        return flight.wait()
    monkeypatch.setattr(engine, "_run", lambda plan: (lambda flight: flight._replace(wait=partial(wait, flight)))(run(plan)))
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert engine.run() == [r] and r.output == naive(20, 8)


@pytest.mark.parametrize("kind", [None, "self"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_iteration_that_fails_leaves_the_engine_whole(kind, error):
    """Also between drafts and their verification: who was there goes on, those of a call to generate end with it."""
    engine = Engine(small(), n_page=200, draft=draft(kind) if kind else None, spec=3 if kind else "off")
    r, forward, n_calls = Request(prompt(10), 12), engine._forward, 0
    engine.add(r)

    def failing(plan):
        nonlocal n_calls
        n_calls += 1
        if n_calls == 3:
            raise error
        return forward(plan)
    engine._forward = failing
    with pytest.raises(error):
        engine.generate([prompt(5), prompt(20)], 12)
    assert list(engine.requests) == [r.id] and set(engine.pool.tables) <= {r.id}
    finish(engine)
    assert r.output == naive(10, 12)


def test_ctrl_c_in_generate_waits_for_the_iteration_and_ends_its_requests():
    engine = Engine(small(), n_page=200)
    forward = engine._forward
    engine._forward = lambda plan: os.kill(os.getpid(), signal.SIGINT) or forward(plan)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([prompt(5)], 12)
    assert engine.n_steps == 1 and not engine.requests and not engine.pool.tables


# ---------------------------------------------------------------- 8. bad input

BAD_REQUESTS = {
    "empty prompt": dict(prompt=[]), "token 199 in the prompt: must be in 0 .. 198": dict(prompt=[3, 199]), "token -1 in": dict(prompt=[-1]),
    "must be a flat list of token ids in 0 .. 198": dict(prompt=[1.5]), "prompt \\[1180591620717411303424\\]: must be": dict(prompt=[2**70]), "prompt 'hello': is text": dict(prompt="hello"), "prompt \\[\\[1": dict(prompt=[[1, 2]]),
    "client = 5: must be a name": dict(client=5), "max_new_tokens = 0": dict(max_new_tokens=0), "max_new_tokens = 2.5": dict(max_new_tokens=2.5),
    "context ends at 512": dict(prompt=[1] * 510), "pool's pages end at 100": dict(prompt=[1] * 98), "temperature = -1": dict(temperature=-1),
    "temperature = nan": dict(temperature=float("nan")), "top_p = 0": dict(top_p=0), "top_p = 1.5": dict(top_p=1.5), "top_k = -1": dict(top_k=-1),
    "top_k = 9223372036854775808: .* at least 0 and below 2\\^63": dict(top_k=2**63, temperature=1.0),
    "seed = -5": dict(seed=-5), "arrival = -1": dict(arrival=-1), "stop token = 500: .* in 0 .. 198": dict(stop=[500]), "stop = 5": dict(stop=5),
    "unknown adapter 'x'": dict(adapter="x"), "unknown adapter \\['x'\\]": dict(adapter=["x"]), "temperature = 'hot'": dict(temperature="hot"), "temperature = inf": dict(temperature=float("inf")),
    "prompt \\[\\[1\\], \\[2, 3\\]\\]": dict(prompt=[[1], [2, 3]]), "prompt tensor": dict(prompt=torch.empty(3, dtype=torch.long, device="meta")), "prompt 5": dict(prompt=5), "max_new_tokens = True": dict(max_new_tokens=True)}


@pytest.mark.parametrize("message", BAD_REQUESTS)
def test_a_bad_request_is_refused_and_its_neighbours_go_on(message):
    engine = Engine(small(), n_page=100, max_batch=3)
    good = Request(prompt(20), 6)
    engine.add(good)
    engine.step()
    fields = dict(prompt=[1, 2, 3], max_new_tokens=4) | BAD_REQUESTS[message]
    with pytest.raises((ValueError, KeyError), match=message):
        engine.add(Request(**fields))
    sampling = {k: v for k, v in fields.items() if k not in ("prompt", "arrival")}
    if "arrival" not in fields:
        with pytest.raises((ValueError, KeyError)):
            engine.generate([[1, 2], fields["prompt"]], **sampling)
    assert list(engine.requests) == [good.id], "nothing of a refused call stays behind"
    finish(engine)
    assert good.output == naive(20, 6)


def test_bad_calls_of_generate_and_add():
    engine = Engine(small(), n_page=100, max_batch=3)
    with pytest.raises(ValueError, match="2 adapters for 1 prompts"):
        engine.generate([[1]], adapter=[None, None])
    with pytest.raises(ValueError, match="seed = 'a'"):
        engine.generate([[1]], seed="a")
    for prompts in ("text", [1, 2], 5):
        with pytest.raises(ValueError, match="must be a list of prompts"):
            engine.generate(prompts)
    with pytest.raises(ValueError, match="\\[1, 2\\]: must be a Request"):
        engine.add([1, 2])
    r = Request([1], 1)
    engine.add(r)
    with pytest.raises(ValueError, match="added before"):
        engine.add(r)


@pytest.mark.parametrize("options, message", [
    (dict(scheduler="fifo"), "unknown scheduler 'fifo': one of static, orca"), (dict(chunks=3), "unknown option 'chunks': one of scheduler, chunk"),
    (dict(chunk=0), "chunk = 0"), (dict(chunk="big"), "chunk = 'big'"), (dict(max_batch=-1), "max_batch = -1"), (dict(tile=0), "tile = 0"),
    (dict(alloc="lazy"), "alloc = 'lazy': one of 'reserve', 'grow'"), (dict(n_page=-3), "n_page = -3"), (dict(memory_gb=-1), "memory_gb = -1"),
    (dict(memory_gb=1e300), "memory_gb = 1e.300: .* below 2.63"), (dict(max_batch=10**20), "max_batch = 1000.* below 2.63"), (dict(max_waiting=-1), "max_waiting = -1"),
    (dict(scheduler=5), "scheduler = 5: must be a Scheduler object, like Sarathi\\(\\), or one of static"),
    (dict(scheduler=sarathi.Orca), "must be a Scheduler object"), (dict(memory_gb=1e-9), "pool of 0 pages"),
    (dict(n_page=10**13), "n_page = 10000000000000.*must have 1 .. "), (dict(spec="goodput"), "spec = .goodput. without a draft"),
    (dict(draft="ngram", spec="fast"), "spec = .fast.: one of off, goodput"), (dict(draft="ngram", spec=0), "spec = 0: .*at least 1"),
    (dict(draft="word", spec=3), "draft = .word.: one of ngram, or a GPT, Heads or"), (dict(draft=7, spec=3), "draft = 7: one of ngram"),
    (dict(draft="ngram", spec="goodput", cost=1), "cost = 1: must be a CostModel"), (dict(alpha=1.5), "alpha = 1.5"),
    (dict(draft="ngram", spec="goodput", cost=(None,)), "cost: 1 cost models, must be one, or two of them"),
    (dict(draft="ngram", spec="oracle", cost=None), "spec = .oracle.: .* alpha"), (dict(lora="merge", adapter_pages=9), "adapter_pages = 9 with lora = .merge."),
    (dict(lora="merge", cluster=2), "cluster = 2 with lora = .merge."), (dict(model="tiny"), "model = .tiny.: must be a GPT"),
    (dict(draft="ngram", spec="confidence", cost=None), "Confidence asks how probable each draft was, Ngram cannot say")])
def test_bad_engine_options(options, message, monkeypatch):
    monkeypatch.setattr(CostModel, "profile", staticmethod(lambda *_: pytest.fail("half a minute before it is said")))
    options = dict(model=small(), cost=Linear()) | options
    with pytest.raises((ValueError, KeyError), match=message):
        Engine(**options)


def test_bad_options_of_a_simulator():
    for options, message in ((dict(model=small()), "must be a CostModel"), (dict(draft=small()), "draft = .GPT.: one of ngram, or a CostModel"),
                             (dict(draft=model_py.Heads(2, 64)), "no states that Heads could guess from")):
        with pytest.raises(ValueError, match=message):
            Simulator(**dict(model=SimpleCost(), spec=2 if "draft" in options else "off", alpha=0.5) | options)


def test_unknown_preset_lists_the_known():
    with pytest.raises(KeyError, match="unknown preset 'llama-8b': one of tiny, gpt2"):
        GPT.from_preset("llama-8b")


def edit(folder, tensors=None, **settings):
    """Change the tensors of a model's or an adapter's folder by tensors({name: tensor}), and settings; of those None is no setting."""
    config, weights = next(folder.glob("*config.json")), next(folder.glob("*model.safetensors"))
    known = json.loads(config.read_text()) | settings
    config.write_text(json.dumps({k: v for k, v in known.items() if v is not None}))
    if tensors:
        tensors(found := load_file(weights))
        save_file({k: v.clone() for k, v in found.items()}, weights)


DAMAGED = {  # either of them
    "does not exist": lambda f: next(f.glob("*config.json")).unlink(), "not valid JSON": lambda f: next(f.glob("*config.json")).write_text("{"),
    "holds no \\*.safetensors": lambda f: next(f.glob("*.safetensors")).unlink(),
    "damaged or half written": lambda f: os.truncate(path := next(f.glob("*.safetensors")), path.stat().st_size - 100)}
Q = "model.layers.1.self_attn.q_proj.weight"
BAD_FOLDERS = DAMAGED | {
    "model_type 'bert'": partial(edit, model_type="bert"), "lacks the setting 'hidden_size'": partial(edit, hidden_size=None),
    "sliding_window = 8": partial(edit, sliding_window=8), "rope_type = 'yarn'": partial(edit, rope_parameters={"rope_type": "yarn"}),
    "config.json: n_layer = 'two'": partial(edit, num_hidden_layers="two"), "n_head = 0: must be a whole number": partial(edit, num_attention_heads=0),
    "block_size = -1": partial(edit, max_position_embeddings=-1), "rope_theta = 'x'": partial(edit, rope_theta="x"),
    "rope_scaling: factor = None": partial(edit, rope_scaling={"type": "linear"}), "rope_scaling = 7: must be": partial(edit, rope_scaling=7),
    "must hold settings, not": lambda f: (f / "config.json").write_text("[1]"),
    "weight_map = \\[\\]: must say": lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": []}'),
    f"'{Q}' is missing": partial(edit, tensors=lambda t: t.pop(Q)),
    f"'{Q}' is \\(3, 48\\).*expected \\(48, 48\\)": partial(edit, tensors=lambda t: t.update({Q: torch.ones(3, 48)})),
    f"'{Q}' is .*int32": partial(edit, tensors=lambda t: t.update({Q: torch.ones(48, 48, dtype=torch.int32)})),
    "'blocks.1.preproj.weight' .* holds NaN": partial(edit, tensors=lambda t: t[Q].fill_(float("nan"))),
    "surplus tensors.*'extra'": partial(edit, tensors=lambda t: t.update(extra=torch.ones(1))),
    "named in model.safetensors.index.json": lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')}


@pytest.mark.parametrize("message", BAD_FOLDERS)
def test_a_bad_folder_is_one_clear_sentence(message, tmp_path):
    config = GPTConfig(n_layer=2, n_head=4, n_embd=48, n_inner=112, vocab_size=131, block_size=96)
    GPT(config).save_pretrained(tmp_path)
    GPT.from_pretrained(tmp_path)
    BAD_FOLDERS[message](tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        GPT.from_pretrained(tmp_path)


def test_no_folder_at_all(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        GPT.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize("dtype", ["int8", torch.int8, "float", 32])
def test_a_dtype_by_its_name_and_no_other(dtype, untrained):
    for load in (partial(GPT.from_preset, GPTConfig(**SMALL)), partial(GPT.from_pretrained, untrained)):
        assert load(dtype="bfloat16").dtype == load(dtype=torch.bfloat16).dtype == torch.bfloat16
        with pytest.raises(ValueError, match=re.escape(f"dtype = {dtype!r}: one of float32, bfloat16, float16")):
            load(dtype=dtype)


def test_what_no_model_is_needed_for_is_said_before_one_is_trained(cli, monkeypatch):
    monkeypatch.setattr(sarathi, "load_model", lambda *_, **__: pytest.fail("minutes before it is said"))
    for flags, said in ((["--prompt", ""], "empty prompt"), (["--prompt", "x", "--adapter", "none"], "adapter folder none does not exist"),
                        (["--prompt", "x", "--draft", "ngran"], "draft = 'ngran': one of ngram, heads, draft"), (["--tokens", "1,x"], "--tokens '1,x'"),
                        (["--prompt", "x", "--draft", ""], "draft = ''"), (["--prompt", "x", "--top-p", "2"], "top_p = 2.0: must be a number")):
        end = cli("sarathi.py", *flags)
        assert end.status == 2 and said in end.err and end.err.count("\n") == 1


def test_ctrl_c_while_text_comes_is_seen_by_a_script(cli, monkeypatch):
    step = Engine.step

    def pressed(engine):
        if engine.n_steps == 2:
            signal.raise_signal(signal.SIGINT)
        return step(engine)
    monkeypatch.setattr(Engine, "step", pressed)
    end = cli("sarathi.py", "--tokens", "1,2,3", "--max-new-tokens", "50")
    assert end.status == 130 and re.search(r"^3 \+ \d tokens, .*\ninterrupted\n$", end.err)


@pytest.mark.parametrize("command, status", [("bench.py list", 141), ("sarathi.py --tokens 1,2 --model {}", 141),
                                             ("sarathi.py --help", 0)])  # argparse lets it pass
def test_who_reads_our_output_may_stop(command, status, untrained):
    read, write = os.pipe()
    os.close(read)
    run = subprocess.run([sys.executable, *command.format(untrained).split()], cwd=HERE, stdout=write, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(write)
    assert run.returncode == status and not re.search("Broken|Traceback|ignored", run.stderr), run.stderr


def test_a_disk_that_is_full_is_said_once():
    with open("/dev/full", "w") as full:
        run = subprocess.run([sys.executable, "bench.py", "list"], cwd=HERE, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert run.returncode == 2 and run.stderr.splitlines()[-1].startswith("bench.py: [Errno 28]") and "ignored" not in run.stderr


@pytest.mark.parametrize("error, status, said", [(KeyboardInterrupt(), 130, ""), (torch.OutOfMemoryError("no room"), 2, "bench.py: no room\n")])
def test_how_a_command_line_ends(error, status, said, cli, monkeypatch):
    def fail():
        raise error
    monkeypatch.setattr(bench, "main", fail)
    end = cli("bench.py")
    assert (end.status, end.out, end.err) == (status, "", said)


# ---- what users' own code and numbers must not break

def test_a_proposer_that_fails_to_forget_harms_nobody():
    class Careless(sarathi.Proposer, named=False):
        def __init__(self):
            self.seen = {}

        def propose(self, requests, lengths):
            self.seen.update(dict.fromkeys(requests))
            return [[] for _ in requests]

        def forget(self, r):
            del self.seen[r]
    engine = Engine(small(), draft=Careless(), spec=2, n_page=300, max_batch=4, scheduler="orca")
    a, b = add(engine, [Request(prompt(9), 1), Request(prompt(20), 8)])
    with pytest.raises(KeyError):
        engine.step()
    assert {r for events in steps(engine) for r in [e.request for e in events if e.finished]} == {a, b}, "and what was new is told"
    assert a.state == "length" and b.output == naive(20, 8)
    engine = Engine(small(), draft=Careless(), spec=2, n_page=300, max_batch=1, max_waiting=1)
    rs, told = add(engine, [Request(prompt(9), 3) for _ in range(4)]), []
    while engine.requests:
        try:
            told += engine.step()
        except KeyError:  # of those that were refused: nothing was ever drafted for them
            pass
    assert {event.request for event in told + engine.land() if event.finished} == {*rs}, "every end is in an Event"
    with pytest.raises(KeyError):
        engine.generate([prompt(9)] * 3, 4, stop=[naive(9, 1)[0]])
    assert not engine.requests and not engine.running, "the others were ended, too"


@pytest.mark.parametrize("alloc", ["reserve", "grow"])
def test_a_policy_that_asks_too_much_gets_what_there_is(alloc):
    class Three(sarathi.Policy, named=False):
        def lengths(self, d):
            return [3] * len(d.most)
    engine = Engine(small(), draft="ngram", spec=Three(), n_page=300, max_batch=4, alloc=alloc)
    assert serve(engine, [Request(prompt(17), 15)])[0].output == naive(17, 15)


def test_a_copy_that_fails_leaves_its_request_without_pages():
    engine = Engine(small(), order="lcfs", alloc="grow", n_page=100, max_batch=2)
    engine.add_adapter("a", random_adapter(1))
    copy, engine.adapters.copy = engine.adapters.copy, None  # not to be called: TypeError
    (a,) = add(engine, [Request(prompt(50), 5, "a")])
    with pytest.raises(TypeError):
        engine.step()
    assert a.id not in engine.pool.tables
    engine.adapters.copy = copy
    (b,) = serve(engine, [Request(prompt(60), 20)])
    assert b.output == naive(60, 20) and a.state == "length"


def test_a_wait_for_a_copy_that_is_cut_counts_nobody():
    engine, cut = Engine(small(), n_page=300, max_batch=2, scheduler="orca"), []
    engine.add_adapter("a", random_adapter(1))
    copy = engine.adapters.copy

    def copying(pages, adapter):
        ready = copy(pages, adapter)
        return lambda: (cut.append(1), ready() if len(cut) > 1 else signal.raise_signal(signal.SIGINT))[1]
    engine.adapters.copy = copying
    add(engine, [Request(prompt(9), 3, "a"), Request(prompt(5), 3, "a")])
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    finish(engine)
    assert engine.adapters.resident["a"].n_users == 0 and engine.adapters.evict()


def test_who_fails_takes_no_news_with_it():
    """A scheduler in the middle of a turn, and a listener between two events."""
    failing = []

    class Flaky(sarathi.Orca, named=False):
        def plan(self, running, waiting):
            if failing:
                raise failing.pop()
            return super().plan(running, waiting)
    line = Pipeline(SlowStages(), 2, max_batch=2, n_page=300, scheduler=Flaky())
    r, s = add(line, [Request([1], 1), Request([1], 4)])
    line.step()
    failing.append(OSError())
    with pytest.raises(OSError):
        line.step()
    assert set(line.run()) == {r, s}
    engine = Engine(small(), n_page=300, max_batch=3, scheduler="orca")
    add(engine, [Request(prompt(5), 1) for _ in range(3)])
    with pytest.raises(BrokenPipeError):
        engine.run(lambda event: (_ for _ in ()).throw(BrokenPipeError()))
    assert len(engine.land()) == 2


def test_generate_that_is_cut_keeps_its_neighbours_news(monkeypatch):
    engine, cut = Engine(small(), n_page=200, scheduler="orca", max_batch=3), []
    (r,), run = add(engine, [Request(prompt(20), 1)]), engine._run

    def wait(flight):
        if not cut:
            cut.append(1)
            raise KeyboardInterrupt
        return flight.wait()
    monkeypatch.setattr(engine, "_run", lambda plan: (lambda flight: flight._replace(wait=lambda: wait(flight)))(run(plan)))
    with pytest.raises(KeyboardInterrupt):
        engine.generate([prompt(5)], 4)
    assert r.state == "length" and [event.request for event in engine.land()] == [r]


def test_generate_tells_nobody_elses_news():
    engine = Engine(small(), n_page=200, scheduler="orca", max_batch=3)
    (r,) = add(engine, [Request(prompt(20), 6)])
    assert engine.generate([prompt(5)] * 2, 4) == [naive(5, 4)] * 2
    told = [event for events in ([engine.land()], steps(engine)) for some in events for event in some]
    assert {event.request for event in told} == {r} and [t for event in told for t in event.tokens] == r.output == naive(20, 6)
    assert engine.generate([prompt(5)] * 2, 2, temperature=1.0, seed=np.uint8(255)), "the second draws with seed 256"


def test_who_comes_without_a_time_comes_now():
    engine = Simulator(a6000(), slo=2.0, max_batch=2)
    engine.clock.wait_until(1000.0)
    (r,) = serve(engine, [Request([0] * 50, 20)])
    assert r.state == "length" and r.arrival == 1000.0 and 0 < r.ttft < 2.0


def test_slots_are_those_that_the_scheduler_fills():
    engine = Engine(small(), scheduler=sarathi.Sarathi(max_batch=2), max_waiting=3, n_page=2000)
    serve(engine, [Request(prompt(9), 4) for _ in range(10)])
    assert engine.n_ended == {"length": 5, "refused": 5}


def test_an_order_may_give_up_everybody():
    class Strict(Order):
        def offer(self, running, queue):
            for r in [*queue]:
                engine.give_up(r)
            return iter(())
    engine = Engine(small(), order=Strict(), n_page=200)
    rs = add(engine, [Request(prompt(9), 4) for _ in range(3)])
    assert [(event.request, event.finished) for events in steps(engine) for event in events] == [(r, "abort") for r in rs]


def test_a_policy_must_choose_among_its_trees():
    class Strange(sarathi.Policy, named=False):
        shapes = [(2, 1)]

        def shape(self, d, alpha, shapes):
            return (1, 1, 1)
    engine = Engine(small(), draft=model_py.Heads(3, 64), spec=Strange(), n_page=200)
    (r,) = add(engine, [Request(prompt(9), 6)])
    with pytest.raises(ValueError, match=r"Strange: \(1, 1, 1\): must be one of the trees"):
        for _ in range(9):
            engine.step()
    engine.abort(r.id)
    engine.pool.check()


def test_a_scheduler_may_do_with_its_lists_what_it_likes():
    class Greedy(Scheduler, named=False):
        def plan(self, running, waiting):
            running += self.new(running, waiting)
            return [(r, r.n_todo) for r in running]
    engine = Engine(small(), scheduler=Greedy(), max_batch=2, n_page=200)
    assert engine.generate([prompt(9)] * 3, 5) == [naive(9, 5)] * 3 and not engine.running


def test_numbers_of_any_type_and_lists_that_their_owner_changes():
    ends = [serve(Simulator(a6000(), max_batch=2), [Request([0] * 50, 20, arrival=t)])[0].times for t in (20000.0, np.float32(20000.0))]
    assert ends[0] == ends[1]
    engine, stop = Engine(small(), n_page=400, max_batch=2), []
    long, r = add(engine, [Request(prompt(100), np.uint8(200)), Request(prompt(20), 6, stop=stop)])
    stop.append(naive(20, 6)[1])
    finish(engine)
    assert len(long.output) == 200 and r.output == naive(20, 6)


@pytest.mark.parametrize("scheduler", [sarathi.Sarathi(chunk=0), sarathi.Sarathi(tile=0), sarathi.SarathiServe(max_batch=-1)])
def test_numbers_of_a_scheduler_object_are_checked(scheduler):
    with pytest.raises(ValueError, match="at least 1"):
        Engine(small(), scheduler=scheduler, n_page=100)


# ---------------------------------------------------------------- 9. command lines, the trainer and the benchmark

@pytest.fixture(scope="session")
def untrained(tmp_path_factory):
    """A cache folder with an untrained tiny model and heads in it, so that no test trains one -> the model's."""
    folder = tmp_path_factory.mktemp("cache") / "sarathi" / "tiny"
    torch.manual_seed(0)
    GPT(preset("tiny")).save_pretrained(folder)
    model_py.write_byte_tokenizer(folder)
    model_py.Heads(2, preset("tiny").n_embd).save_pretrained(folder.parent / "heads")
    return folder


@pytest.fixture
def cli(untrained, monkeypatch, capfd):
    """cli(script, *flags) -> what this command line would end with and say, as of `process`, but run here: no new process, which has to
    import torch first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(untrained.parent.parent))

    def run(script, *flags):
        monkeypatch.setattr(sys, "argv", [script, *flags])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            sys.exit(sarathi.run_cli({"sarathi.py": sarathi, "bench.py": bench}[script].main))
        said = capfd.readouterr()
        return SimpleNamespace(status=end.value.code or 0, out=said.out, err=said.err)
    return run


def process(*command, **env):
    """python *command, in a process of its own and with these variables -> its exit status and what it said on stdout and stderr."""
    run = subprocess.run([sys.executable, *command], cwd=HERE, env=os.environ | env, capture_output=True, text=True, timeout=900)
    return SimpleNamespace(status=run.returncode, out=run.stdout, err=run.stderr)


def test_both_scripts_are_programs(untrained):
    good = process("sarathi.py", "--tokens", "1,2,3", "--model", str(untrained), "--max-new-tokens", "4")
    assert good.status == 0 and good.out.endswith("\n") and good.err.startswith("3 + 4 tokens, "), good.err
    bad = process("bench.py", "table9")
    assert bad.status == 2 and bad.err.startswith("bench.py: unknown experiment 'table9': one of ceilings") and bad.err.count("\n") == 1 and not bad.out


def test_no_process_waits_for_torchs_compiler_to_be_imported(monkeypatch):
    """It takes two seconds, and is what random numbers on the meta device ask for."""
    monkeypatch.setattr(torch.nn.Embedding, "reset_parameters", lambda self: pytest.fail("drawn"))
    assert Engine(GPT.from_preset("tiny"), n_page=50).generate([[1, 2]], 3)


def test_sarathi_streams_text_and_says_how_fast(cli):
    said = cli("sarathi.py", "--prompt", "def ", "--max-new-tokens", "5", "--temperature", "0")
    assert said.status == 0 and said.out.startswith("def "), said.err
    assert re.search(r"5 tokens, \d+ tokens/s, TTFT [\d.]+ ms, TPOT [\d.]+ ms", said.err.replace("4 + ", ""))
    late = cli("sarathi.py", "--tokens", "1,2,3", "--slo", "1e-9")
    assert late.status == 0 and late.err == "no token: the user ended it, or it would be too late (slo)\n"


BAD_LINES = {
    "sarathi.py --prompt x --chunk 0": "chunk = 0: must be a whole number, at least 1",
    "sarathi.py --prompt x --chunk many": "invalid int value: 'many'", "sarathi.py --prompt x --speed 9": "unrecognized arguments: --speed 9: flags are --help, --prompt",
    "sarathi.py --prompt x --scheduler fifo": "unknown scheduler 'fifo': one of static",
    "sarathi.py --prompt x --alloc lazy": "invalid choice: 'lazy'",
    "sarathi.py --prompt x --model llama-8b": "neither a folder nor a preset (tiny",
    "sarathi.py --prompt x --temperature -1": "temperature = -1.0", "sarathi.py --prompt ''": "empty prompt",
    "sarathi.py --prompt x --adapter none": "adapter folder none does not exist", "sarathi.py --prompt x --lora fast": "invalid choice: 'fast'",
    "sarathi.py --tokens 1,x": "--tokens '1,x'",
    "sarathi.py --tokens 1 --tp 2": "tp = 2, pp = 1: needs 2 processes, there is 1: torchrun --nproc_per_node 2 sarathi.py --tp 2 --pp 1",
    "sarathi.py --tokens 1 --tp 0": "tp = 0: must be a whole number, at least 1",
    "sarathi.py": "one of the arguments --prompt --tokens is required", "bench.py peer": "unknown experiment 'peer'",
    "bench.py table9": "unknown experiment 'table9': one of ceilings", "bench.py --chunk x": "'x': must be a whole number or auto",
    "bench.py table4 --slo 1": "slo = 1: experiments compare whole runs",
    "bench.py --lengths 5,a": "lengths = '5,a'", "bench.py roofline --hardware h100": "roofline can only be measured, on this machine",
    "bench.py peers --peers ollama=x": "names among transformers, vllm, llama.cpp",
    "bench.py peers --peers vllm=/no/python": "peers: vllm=/no/python: there is no such Python",
    "bench.py peers --peers llama.cpp=/no/folder": "peers: llama.cpp=/no/folder: there is no such folder",
    "bench.py all table4": "all stands by itself, not in all table4",
    "bench.py peers --cells 'x 16'": "cells = 'x 16': must be part of a name among prefill 512",
    "bench.py online --arrivals nowhere.csv": "arrivals = 'nowhere.csv': there is no such file",
    "bench.py online --arrivals poisson": "arrivals = 'poisson': must be poisson:RATE, gamma:RATE:CV",
    "bench.py online --prompt 9..3": "prompt = '9..3': must be 256 (all alike), 8..512",
    "bench.py online --schedulers orca,fifo": "unknown scheduler 'fifo'",
    "bench.py online --targets 3": "targets = '3': must be two numbers above 0", "bench.py table4 --pp 2": "pp = 2: only ",
    "sarathi.py --tokens 1 --spec 3": "--spec 3 without --draft: give ngram", "sarathi.py --prompt x --model llama-30m": "has no tokenizer: give --tokens",
    "bench.py online --fair -1": "fair = -1.0: must be a number, at least 0",
    "sarathi.py --tokens 1 --tpot -1": "tpot = -1.0: must be a number, at least 0",
    "sarathi.py --tokens 1 --draft ngram --spec 99999999999999999999": "spec = 99999999999999999999: must be a whole number, at least 1 and below 2^63",
    "sarathi.py --tokens 1 --stall nan": "stall = nan: must be a number, at least 0",
    "sarathi.py --tokens 1 --model llama-30m --draft ngran": "draft = 'ngran': one of ngram, heads, draft, a preset (tiny, ",
    "sarathi.py --tokens 1 --model llama-30m --draft heads": "draft = 'heads': those are for tiny's states of 256 numbers, this model's have 512",
    "sarathi.py --tokens 1 --model llama-30m --draft draft": "draft = 'draft': that is for tiny's vocabulary of 257, this model's is 8192",
    "sarathi.py --tokens 1 --tpot 0.1": "tpot = 0.1 with scheduler = 'sarathi': only autopilot keeps to it",
    "sarathi.py --tokens 1 --spec autopilot --draft ngram": "spec = 'autopilot' needs scheduler = 'autopilot'",
    "bench.py --repeats 0": "repeats = 0", "bench.py --scheduler fifo": "unknown scheduler 'fifo'",
    "bench.py ceilings --model tiny --lengths 4096": "context ends at 1024",
    "bench.py table2 --hardware a100 --n-page 5": "n_page = 5: experiments choose their pools, give --max-batch or --lengths",
    "bench.py table2 --hardware b200": "unknown hardware 'b200': one of a10g, a6000",
    "bench.py table2 --hardware a10g": "26.0 GB of weights do not fit a10g",
    "bench.py table2 --hardware a100 --model llama-8b": "unknown preset 'llama-8b': one of tiny",
    "bench.py table2 --hardware a100 --tp 0": "tp = 0", "bench.py fig12 --scale 0": "scale = 0"}
if not torch.cuda.is_available():
    BAD_LINES |= {f"{script} --model llama-30m --device cuda": "device = 'cuda': this torch" for script in ("sarathi.py --tokens 1", "bench.py table2")}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_command_line_is_one_line_and_exit_2(line, cli):
    said = cli(*shlex.split(line))
    assert said.status == 2 and BAD_LINES[line] in said.err and said.err.count("\n") == 1 and "Traceback" not in said.err, said.err


def test_help_teaches(cli):
    for script in ("sarathi.py", "bench.py"):
        text = cli(script, "--help").out
        assert "--chunk" in text and "[SARATHI §4.4]" in text and "Example" in text
        assert all(re.search(rf"\b{name}\b", text) for name in NAMES), "whoever writes --scheduler should not have to guess"


def test_an_empty_cache_trains_a_tiny_model_first_and_only_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    full = model_py.train_tiny
    monkeypatch.setattr(model_py, "train_tiny", lambda: full(steps=4))
    m, tokenizer = model_py.load_model("tiny")
    said = capsys.readouterr().err
    assert "trained here, once" in said and "training tiny" in said and re.search(r"tiny: loss \d\.\d+ nats per byte", said)
    assert 2e6 < m.config.n_params < 5e6 and GPT.from_pretrained(tmp_path / "sarathi" / "draft").config.n_layer == 1
    assert tokenizer.encode("é") == [0xc3, 0xa9] and tokenizer.stop == [256]
    assert len(re.findall(r"head \d: loss \d\.\d+, \d+% of its first guesses right", said)) == 3 and len(model_py.load_heads("heads").blocks) == 3
    monkeypatch.setattr(model_py, "train_tiny", lambda: pytest.fail("trained twice"))
    model_py.load_model("tiny")


def test_a_cache_that_cannot_be_written_is_said_before_the_training(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(model_py, "train", lambda *a: pytest.fail("trained for nothing"))
    with pytest.raises(OSError, match="file"):
        model_py.load_model("tiny")


def test_training_learns():
    data = torch.tensor(list(b"the cat sat on the mat. " * 200))
    _, loss = model_py.train(GPTConfig(**SMALL | {"vocab_size": 257}), data, 200, "cat", T=32)
    assert loss < 1.0 < np.log(257)


def bench_of(hardware="", engine=(), **settings):
    """A Bench of the small model, or of simulated hardware, whose experiments are short."""
    config = bench.BenchConfig(**dict(lengths="300", repeats=1, requests=2, hardware=hardware) | settings)
    return bench.Bench(a6000() if hardware else small(), config, EngineConfig(**dict(max_batch=3, chunk=128, tile=64) | dict(engine)))


def test_bench_prints_tables_that_line_up_and_json_last(cli):
    said = cli("bench.py", "ceilings", "table2", "table4", "--model", "tiny", "--lengths", "32,48,64", "--repeats", "2", "--chunk", "32",
               "--tile", "16", "--requests", "4", "--max-batch", "3")
    assert said.status == 0, said.err
    *text, last = said.out.strip().split("\n")
    result = json.loads(last)
    assert result["experiment"] == "ceilings table2 table4" and result["seed"] == 0 and result["machine"]["dtype"]
    names = [r["what"] for r in result["rows"]]
    assert len([n for n in names if n.startswith("decode-maximal")]) == 4 and sum("over static" in n for n in names) == 3
    drowned = [r for r in result["rows"] if r["ours"] is None]  # a tiny model's marginal time can be lost in noise
    assert all(r["decode_ms"] <= 0 if r["what"].endswith("decode speedup") else r["what"] == "decode-maximal: per decode token (ms)" for r in drowned)
    assert all(r["source"] == "measured" and np.isfinite(r["ours"]) for r in result["rows"] if r not in drowned)
    blocks = [b for b in "\n".join(text).split("\n\n") if b.startswith("|")]
    assert len(blocks) == 3 and all(len({len(line) for line in b.split("\n")}) == 1 for b in blocks)
    assert sum("decode_ms" in r for r in drowned) == 3 or "One weight read pays for" in "\n".join(text)
    table2 = {r["what"]: r["ours"] for r in result["rows"]}
    assert table2["prefill-only: linear (ms)"] + table2["prefill-only: attn (ms)"] == pytest.approx(table2["prefill-only: total (ms)"])


def test_bench_chooses_a_chunk_and_shows_the_curve(cli):
    said = cli("bench.py", "profile", "--chunk", "auto", "--model", "tiny", "--lengths", "150", "--repeats", "1")
    assert said.status == 0, said.err
    rows = json.loads(said.out.strip().split("\n")[-1])
    assert re.search(r"chosen: chunk \d+, tile \d+", said.out) and len(rows["rows"]) == 12
    assert rows["options"]["chunk"] in (32, 64, 96, 128)


def test_bench_lists_its_experiments(cli):
    listed = cli("bench.py", "list").out.split("\n")
    assert [line.split()[0] for line in listed if line] == list(bench.EXPERIMENTS)


def test_ctrl_c_in_a_benchmark_keeps_the_rows_measured_so_far(monkeypatch, capsys):
    def long(b):
        """two rows."""
        yield bench.row("first", 1.0, b.once(lambda: None))
        b.interrupt._interrupt()  # as the signal would
        yield bench.row("second", 1.0, b.once(lambda: None))
    monkeypatch.setitem(bench.EXPERIMENTS, "long", bench.Experiment(long))
    b = bench_of(lengths="32")
    rows = bench.run(b, ["long", "long"])
    assert [r["what"] for r in rows] == ["first"] and "| first |" in capsys.readouterr().out


def test_operators_are_timed_by_hooks_that_leave_no_trace():
    b = bench_of(lengths="32")
    f = b.iteration(2, 20, 12)
    before = f().clone()
    took, _ = b.operators(f)
    assert set(took) == set(bench.OPERATORS) and all(v > 0 for v in took.values())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in small().modules()) and torch.equal(f(), before)


def test_decodes_are_timed_at_every_phase_of_a_key_tile(monkeypatch):
    """Who begins one clears it: all of them at once would cost more than they ever do in a server."""
    asked, b = [], bench_of(lengths="64")
    monkeypatch.setattr(bench, "rehearse", lambda engine, entries: asked.append([past for past, *_ in entries]) or sarathi.rehearse(engine, entries))
    for n, context in ((4, 64), (3, 5), (1, 64), (2, 10**6)):
        b.iteration(n, context, 0)
    D, top = small().config.head_dim, small().config.block_size - 3
    assert len({*asked[0]}) == 4 and max(asked[0]) - min(asked[0]) == D * 3 // 4 and sum(asked[0]) == 4 * 64 and min(asked[1]) > 0
    assert asked[2:] == [[64], [top, top]]


def test_roofline_counts_every_operator_and_the_engines_own_share():
    b = bench_of(lengths="32")
    rows = {r["what"]: r for r in bench.run(b, ["roofline"])}
    assert b.model.config.block_size == 512, "which a prompt of 512 and a token would not fit"
    for shape in ("decode, B = 8, context 256", "chunk of 249 + 7 decodes, context 256", "prefill 512"):
        parts = [rows[f"{shape}: {op}"] for op in (*bench.OPERATORS, "head")]
        assert all(r["ms"] > 0 and r["ours"] > 0 for r in parts)
        total = rows[f"{shape}: all"]
        flops = sum(r["GFLOP/s"] * r["ms"] for r in parts)
        assert flops == pytest.approx(total["GFLOP/s"] * total["ms"])
    assert rows["decode, B = 8, context 256: all"]["tokens/s"] == pytest.approx(8e3 / rows["decode, B = 8, context 256: all"]["ms"])
    assert 0 < rows["engine at B = 8: share of an iteration outside the model"]["ours"] < 1


def test_the_best_of_noisy_times_is_told_from_other_rounds():
    """One lucky round must not make a way the best that others are compared with."""
    assert bench.best_elsewhere([[1, 9, 9, 9], [5, 5, 5, 5]]) == [5, 5, 5, 5]
    assert bench.best_elsewhere([[3, 3, 9], [5, 5, 5]]) == [5, 5, 9] and bench.best_elsewhere([[2], [3]]) == [2]
    trials = lambda *latencies, tpot=0.1: [bench.Trial(x, tpot) for x in latencies]
    seen = {"autopilot": trials(1, 1, 1), (1, "off"): trials(1, 9, 9), (2, "off"): trials(2, 5, 6), (4, "off"): trials(4)}
    assert bench.at_best(seen, 0) == [5.5, 5, 6] and bench.best_first(seen, 0, [0])[:2] == [(1, "off"), (2, "off")]
    seen[2, "off"] = trials(2, 5, 6, tpot=0.3)
    assert bench.at_best(seen, 0.2) == [9, 9, 9], "who misses the target does not count"
    assert bench.at_best({setting: rounds[:1] for setting, rounds in seen.items()}, 0) == [1]
    assert bench.at_best({setting: rounds[:2] for setting, rounds in seen.items()}, 0) == [9, 9]


def test_what_choosing_costs_is_measured_on_requests_that_all_run():
    """It waited for ever for those that the options refused or gave up."""
    pair = bench.Pair(bench_of(lengths="32", engine=dict(max_waiting=5, slo=0.001)), "ngram")
    assert 0 < bench.choosing(pair, 3, B=16)


def test_roofline_leaves_out_what_learned_positions_do_not_reach(monkeypatch):
    monkeypatch.setattr(bench, "measured_peaks", lambda b, *fns: (1e11, 1e10, *b.seconds(*fns)))
    b = bench.Bench(GPT.from_preset(GPTConfig(**SMALL | dict(family="gpt2", n_kv_head=4)), seed=1), bench.BenchConfig(lengths="32"), EngineConfig())
    rows = bench.run(b, ["roofline"])
    assert not any("1024" in r["what"] or "512" in r["what"] for r in rows) and any("B = 8, context 256" in r["what"] for r in rows)
    b.config.full = True
    sizes = {n for decodes, _, n in bench.shapes(b).values() if not decodes}, {decodes for decodes, _, n in bench.shapes(b).values() if not n}
    assert (min(sizes[0]), max(sizes[0])) == (128, 4096) and (min(sizes[1]), max(sizes[1])) == (1, 256)


def test_the_arithmetic_of_an_iteration():
    c = GPTConfig(**SMALL)
    work = bench.demand(c, 3, 20, 10, 4)
    assert sum(by for name, (_, by) in work.items() if name != "attn") == 4 * (c.n_params - c.vocab_size * c.n_embd - 5 * c.n_embd)  # no norms
    assert work["attn"] == (4 * 16 * 4 * 2 * (3 * 21 + 55), (3 * 21 + 10) * c.page_bytes(4))
    assert work["head"][0] == 2 * 4 * c.n_embd * c.vocab_size and work["ffn_ln2"][0] == 2 * 13 * c.n_inner * c.n_embd * 2


@pytest.fixture
def cells(monkeypatch):
    """Let the experiment have these cells only, and no pauses between them."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return partial(monkeypatch.setattr, bench, "CELLS")


def test_peers_are_measured_beside_ours(capsys, cells):
    cells({"prefill 512": (1, 32, 1), "decode": (2, 8, 72), "16 x": (3, 20, 4), "16 x, 16 adapters": (17, 20, 4)})
    has_hf, has_peft = (bool(importlib.util.find_spec(name)) for name in ("transformers", "peft"))
    rows = bench.run(bench_of(peers=f"transformers={sys.executable}" * has_hf), ["peers"])
    assert [r["what"] for r in rows] == ["prefill 512: tokens/s", "decode: tokens/s"] + [
        f"16 x{more}: {what}" for more in ("", ", 16 adapters") for what in ("tokens/s", "inter-token p99, ms")]
    assert all(r["ours"] > 0 for r in rows)
    if has_hf:
        assert ("No module named 'peft'" in capsys.readouterr().out) != has_peft
        assert all(r["x best"] == pytest.approx(r["ours"] / r["transformers"]) for r in rows[:6 if has_peft else 4])
        assert all(r["whole x best"] == pytest.approx(r["whole prompts"] / r["transformers"]) for r in rows[2:6 if has_peft else 4])
        assert rows[0]["whole prompts"] is rows[0]["whole x best"] is None, "of one kind they are all whole"
        assert has_peft or rows[4]["transformers"] is rows[4]["x best"] is None, "PEFT's cell alone is left out"


def test_peers_that_are_missing_are_named(tmp_path):
    b = bench_of(peers=f"llama.cpp={tmp_path},vllm={sys.executable}")
    assert bench.start_peers(b, str(tmp_path)) == {}
    (llama_cpp, vllm), missing = b.notes, "vllm is not measured: ModuleNotFoundError: No module named 'vllm'"
    assert llama_cpp.startswith("llama.cpp is not measured") and vllm == missing


def test_cells_picks_cells_of_peers_by_name(cells, monkeypatch):
    cells({"prefill 512": (1, 16, 1), "16 x": (2, 20, 4), "16 x, 16 adapters": (2, 20, 4)})
    asked = []
    monkeypatch.setattr(bench, "start_peers", lambda bench, folder, adapters=(): asked.append(list(map(os.path.basename, adapters))) or {})
    for part, n_row, sides in (("16 x", 4, [[], [f"adapter{i}" for i in range(16)]]), ("prefill", 1, [[]])):
        rows = bench.run(bench_of(cells=part), ["peers"])
        assert len(rows) == n_row and all(part in r["what"] and r["x best"] is None for r in rows) and asked == sides
        asked.clear()


def test_a_peer_that_dies_is_left_out_and_ctrl_c_keeps_the_cells_measured(capsys, cells, monkeypatch):
    class Peer:
        calls = closed = 0

        def run(self, work, new):
            self.calls += 1
            if self.calls == limit:
                if limit == 5:
                    raise RuntimeError("out of breath")
                b.interrupt._interrupt()  # as Ctrl-C in the middle of a cell would
            return [[0.1 * i for i in range(1, new + 1)]] * len(work)

        def close(self):
            self.closed = 1
    cells({"prefill 512": (1, 16, 1), "16 x": (2, 20, 4)})
    for limit, n_cell in ((5, 3), (3, 1)):
        b, peer = bench_of(repeats=2), Peer()
        monkeypatch.setattr(bench, "start_peers", lambda *_: {"other": peer})
        rows, said = bench.run(b, ["peers"]), capsys.readouterr()
        assert len(rows) == n_cell and all(r["ours"] > 0 for r in rows) and peer.closed
        assert ("other is left out, it failed at 'prefill 512': out of breath" in said.out) == (limit == 5) == ("other" not in rows[0])
        assert ("interrupted" in said.err) == (limit == 3)


def test_rates_of_a_cell_by_hand():
    assert bench.rate_of([[0.5]], 1, 100, 1) == (200, None)
    steps = [[0.1 * i for i in range(1, 73)], [0.55 + 0.1 * i for i in range(1, 73)]]
    rate, gap = bench.rate_of(steps, 2, 10, 72)  # both in flight from 0.65 s on: 20 tokens a second
    assert rate == pytest.approx(20, rel=0.03) and gap is None
    rate, gap = bench.rate_of([[1.0, 2.0], [1.0, 4.0]], 2, 8, 2)
    assert rate == 2 * 10 / 4 and gap == 3.0


def test_progress_bars_say_which_of_how_many():
    b = bench_of()
    b.doing = "fig"
    seen = [b.label for rate in b.each("rate", [4, 12]) for _ in b.each("round", range(2))]
    assert seen == [f"fig, rate {rate} of 2, round {i} of 2" for rate in (1, 2) for i in (1, 2)] and b.other(a6000()).label == b.label == "fig"


@pytest.mark.parametrize("patience, n", [(100, 3), (10, 1), (11, 2)])
def test_no_round_is_begun_when_patience_is_spent(patience, n, monkeypatch):
    """Every round takes 11 seconds, and is never cut."""
    b = bench_of()
    monkeypatch.setattr(b, "once", lambda f: f())
    for warm in (False, True):
        seen = []
        once = lambda seconds: seen.append(seconds) or seconds
        assert b.rounds(partial(once, 6.0), partial(once, 5.0), repeats=3, warm=warm, patience=patience) == [[6.0] * n, [5.0] * n]
        assert len(seen) == 2 * (n + warm), "a warm-up counts for nothing"


def test_a_capacity_is_not_that_of_a_first_run(monkeypatch):
    rates = iter([2.0, 5.0, 3.0])
    monkeypatch.setattr(bench, "serve", lambda b, engine, jobs: {"requests/s": next(rates)} if all(job.arrival == 0 for job in jobs) else None)
    assert bench.most_served(bench_of(), None, [bench.Job(1.0, 2, 3)] * 2) == 5.0
    assert bench.most_served(bench_of("a6000"), None, [bench.Job(1.0, 2, 3)] * 2) == 3.0, "what is simulated is always the same"


def test_a_primed_model_has_run_every_small_number_of_tokens(monkeypatch):
    sizes, run = [], Engine._run
    monkeypatch.setattr(Engine, "_run", lambda engine, plan: (sizes.append(sum(n for r, n in plan)), run(engine, plan))[1])
    assert bench.primed(small()) is small() and sizes == [*range(1, 65)]
    sizes.clear()
    b = bench_of()
    bench.Pair(b, "ngram"), bench.Pair(b, "ngram", alpha=0.35)
    assert sizes == [*range(1, 65)], "once per model"


# ---------------------------------------------------------------- 10. pictures and traces

def served(make, model, **options):
    """An engine that has served a mixed workload which its pool cannot hold at once, with its tape."""
    tape = bench.Tapes().new("test: engine")
    engine = make(model, chunk=32, tile=TILE, max_batch=4, n_page=333, record=tape, **options)
    serve(engine, [Request(prompt(n), 20) for n in (300, 15, 1, 16, 17, 33, 90)])
    return engine, tape


def apart(intervals):
    """Whether no two (start, end) overlap."""
    ordered = sorted(intervals)
    return all(a <= b for (_, a), (b, _) in zip(ordered, ordered[1:]))


@pytest.mark.parametrize("alloc", ["reserve", "grow"])
@pytest.mark.parametrize("scheduler", ["static", "prefill_first", "sarathi"])
@pytest.mark.parametrize("kind", ["measured", "simulated"])
def test_a_tape_holds_every_token_once_and_adds_up_to_the_clock(kind, scheduler, alloc):
    """Also what was computed again after a preemption; iterations follow each other, a request is in one piece at a time."""
    make, model = (Engine, small()) if kind == "measured" else (Simulator, CostModel.roofline(small().config, "a6000"))
    engine, tape = served(make, model, scheduler=scheduler, alloc=alloc)
    assert apart(s[:2] for s in tape) and tape[-1].end <= engine.clock.now()
    if kind == "simulated":
        assert sum(s.end - s.start for s in tape) == pytest.approx(engine.clock.now()), "no time passes in between"
    rows, fed, n_preempted = {}, {}, 0
    for at, what, start, end, entries in bench.pieces(tape):
        rows.setdefault(at, []).extend([(start, end)] * (what != "preempted"))
        for id, past, n in entries:
            n_preempted += what == "preempted"
            assert id == at and fed.get(id, 0) == past, "every token is fed after the one before it, and once"
            fed[id] = past + n if n else 0
        if what in ("stall", "waiting"):
            during = [s for s in tape if s.start < end and s.end > start]
            assert during and not any(id == at and n for s in during for id, past, n in s.entries), "it waits for others"
    assert all(map(apart, rows.values())) and fed == {i: n + 19 for i, n in enumerate((300, 15, 1, 16, 17, 33, 90))}
    assert (n_preempted > 0) == (alloc == "grow"), "the pool was meant to run out"


def gpt3_line(**options):
    """[SARATHI §5.3]: four stages of eight A100s each."""
    return Pipeline(CostModel.roofline(preset("gpt3-175b"), "a100", tp=8, nodes=4), 4, **options)


@lru_cache
def pipeline_tape():
    """-> the line, its requests when all have ended, and the tape of what it did."""
    tape = bench.Tapes().new("test: line")
    line = gpt3_line(scheduler="orca", max_batch=3, n_page=3 * 4096, record=tape)
    return line, serve(line, [*bench.zipf_requests(20)]), tape


def test_a_pipelines_pieces_are_its_work_and_its_bubbles():
    line, _, tape = pipeline_tape()
    pieces = list(bench.pieces(tape))
    assert sum(end - start for _, what, start, end, _ in pieces if what == "bubble") == pytest.approx(sum(line.bubbles.values()))
    for stage in range(4):
        mine = sorted(p[2:4] for p in pieces if p[0] == stage)
        assert all(b[0] - a[1] == pytest.approx(0, abs=1e-8) for a, b in zip(mine, mine[1:])), "work and bubbles leave no gap and never overlap"
        assert mine[-1][1] == max(s.end for s in tape if s.stage == stage)


def test_a_trace_is_what_perfetto_reads(tmp_path, capsys):
    _, small_tape = served(Simulator, CostModel.roofline(small().config, "a6000"), scheduler="sarathi", alloc="grow")
    line, _, line_tape = pipeline_tape()
    tapes = bench.Tapes()
    tapes += [small_tape, bench.Tape("empty", tapes), line_tape]
    bench.write_trace(tmp_path / "t.json", tapes)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["test: engine", "test: line"], "an empty tape is no process"
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == [*(f"request {i}" for i in range(7)), *(f"stage {i}" for i in range(4))]
    shown = [e for e in events if e["ph"] == "X"]
    for key in {(e["pid"], e["tid"]) for e in shown}:
        assert apart((round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3)) for e in shown if (e["pid"], e["tid"]) == key)
    assert {e["cat"] for e in events if e["ph"] == "i"} == {"preempted"}
    names = [e["name"] for e in shown]
    assert {"decode of request 2", "stall", "bubble"} <= set(names)
    assert any(re.fullmatch(r"chunk of request \d+, \d+ tokens \+ 2 decodes", n) for n in names), "a stage's micro-batch"
    assert any(re.fullmatch(r"chunk of request 0, \d+ tokens", n) for n in names)
    last = max(e["ts"] + e["dur"] for e in shown if e["pid"] == 1)
    assert last == pytest.approx(line.clock.now() * 1e6) and "wrote" in capsys.readouterr().out


def test_a_long_run_keeps_the_first_iterations_of_a_trace():
    tapes = bench.Tapes()
    tapes.left = 20
    for name in "xy":
        tape = tapes.new(name)
        for i in range(9):
            tape.append(sarathi.Span(i, i + 1, 0, 0, [(0, i, 1), (1, i, 1)]))
    assert list(map(len, tapes)) == [3, 2] and tapes.full, "a quarter of 20 entries, and of 15"


def marks(ax):
    """{(x, y) of the paper's marks}, [the y of its dotted lines], {series: [(x, y)]} of a drawn panel."""
    hollow, dotted, series = set(), [], {}
    for line in ax.lines:
        points = list(zip(np.asarray(line.get_xdata(), float).tolist(), np.asarray(line.get_ydata(), float).tolist()))
        if line.get_marker() == "o":
            hollow |= set(points)
        elif line.get_linestyle() == ":":
            dotted.append(points[0][1])
        else:
            series[line.get_label()] = points
    for bars in ax.containers:
        series[bars.get_label()] = [(b.get_x() + b.get_width() / 2, b.get_height()) for b in bars]
    return hollow, dotted, series


def test_a_figure_shows_the_rows_as_they_are():
    line = lambda x, ours, paper=None, s="C = 256", panel="left", **more: bench.row("", paper, ours, "measured", at=(panel, s, x), **more)
    rows = [line(4, 2.0), line(2, 1.0, 1.5), line(8, None), line(None, 9.0, 3.0, curve=[(1, 5.0), (2, 9.0)], s="C = 512"),
            line(6, 9.0, 7.0, s=None), line("a", 1.0, 2.0, panel="right"), line("b", 3.0, panel="right"), line("b", 4.0, panel="right", s="new"),
            line(None, 5.0, 6.0, s=None, panel=None), bench.row("not drawn", 1, 2)]
    figure = bench.draw(bench.EXPERIMENTS["fig9"].axes, rows)
    left, right = figure.axes
    assert marks(left) == ({(2, 1.5), (6, 7.0)}, [3.0, 6.0], {"C = 256": [(2, 1.0), (4, 2.0)], "C = 512": [(1, 5.0), (2, 9.0)]})
    hollow, dotted, series = marks(right)
    assert dotted == [6.0] and {s: [y for _, y in points] for s, points in series.items()} == {"C = 256": [1.0, 3.0], "new": [4.0]}
    assert list(hollow) == [pytest.approx((-0.2, 2.0))] and [t.get_text() for t in right.get_xticklabels()] == ["a", "b"]
    assert [ax.get_title() for ax in figure.axes] == ["left", "right"] and {ax.get_ylabel() for ax in figure.axes} == {"throughput over static (times)"}
    assert left.lines[0].get_linestyle() == "--" and left.lines[0].get_color() == bench.INK["C = 256"]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["C = 256", "C = 512", "new", "paper, on its GPU", "paper, place not given"]


MEASURED = {}  # profiles and what else experiments share, as where several are named on one command line


def at_the_least(patch, sizes=True):
    """Workloads of 40 requests, and of each of an experiment's sizes the least."""
    jobs, zipf = bench.gamma_jobs, bench.zipf_requests
    patch.setattr(bench, "gamma_jobs", lambda rate, seconds, *args, **more: jobs(rate, min(seconds, 20 / rate), *args, **more))
    patch.setattr(bench, "zipf_requests", lambda n, *lengths: zipf(min(n, 20), *lengths))
    if sizes:
        patch.setattr(bench.Bench, "grid", lambda self, small, full: small)


@lru_cache(maxsize=None)
def smallest(kind, name):
    """Run an experiment at_the_least -> its rows and what it printed. Of fig8 figures show all lengths."""
    lengths = {("simulated", "fig8"): "", ("measured", "slora_ways"): "150"}.get((kind, name), "300")
    b = bench_of("a6000" if kind == "simulated" else "", lengths=lengths, scale=40)
    if kind == "measured":
        b.found = MEASURED
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        at_the_least(patch, sizes=bool(lengths))
        return bench.run(b, [name]), said.getvalue()


@pytest.mark.parametrize("name", [name for name, what in bench.EXPERIMENTS.items() if what.axes])
def test_every_figure_has_labels_and_every_point_of_its_rows(name):
    rows, _ = smallest("simulated", name)
    figure = bench.draw(bench.EXPERIMENTS[name].axes, rows)
    assert all(ax.get_xlabel() and ax.get_ylabel() for ax in figure.axes)
    drawn = [r for r in bench.shown(rows) if r["at"][1] and (r["ours"] is not None and r["at"][2] is not None or "curve" in r)]
    shown = [y for ax in figure.axes for points in marks(ax)[2].values() for _, y in points]
    assert drawn and sorted(shown) == pytest.approx(sorted(y for r in drawn for _, y in r.get("curve", [(0, r["ours"])])))
    if name == "fig8":
        assert list(marks(figure.axes[0])[2]) == ["L = 1024", "L = 2048", "L = 3072"] and marks(figure.axes[0])[1] == [10.0, 2.8]


@pytest.mark.parametrize("x, whole", [((4, 12, 20), True), ((1, 2, 4, 6, 8, 10, 12), True), ((1, 6, 18, 54), True),
                                      ((0.08, 0.09, 0.11, 0.145, 0.493, 0.617), False), ((1, 100, 105), False)])
def test_ticks_stand_where_the_points_do_unless_they_would_run_into_one_another(x, whole):
    figure = bench.draw([("x", "y")], [bench.row("", None, 1.0, "measured", at=("", "a", n)) for n in x])
    ticks = figure.axes[0].get_xticks()
    assert (ticks.tolist() == [*x]) == whole and len(ticks) >= 2


@pytest.mark.parametrize("kind", ["simulated", "measured"])
def test_the_timelines_show_each_request_from_its_arrival_to_its_last_token(kind, tmp_path, capsys):
    b = bench_of("a6000" if kind == "simulated" else "", dict(max_batch=0, chunk=64), requests=10, scale=40, plot=str(tmp_path))
    rows = {r["what"]: r["ours"] for r in bench.run(b, ["timeline", "bubbles", "ceilings"])}
    where = "a6000" if kind == "simulated" else "cpu_fp32"
    assert {p.name for p in tmp_path.iterdir()} == {"bubbles.json", "bubbles.png", *(f"{name}_{where}.{end}" for name, end in (
        ("ceilings", "json"), ("timeline", "json"), ("timeline", "png")))}
    assert capsys.readouterr().out.count("wrote") == 5 and all(p.read_bytes().startswith(b"\x89PNG") for p in tmp_path.glob("*.png"))
    assert [t.name for t in b.tapes if t] == ["timeline: static", "timeline: prefill_first", "timeline: sarathi", "bubbles: Orca", "bubbles: SARATHI"]
    static, first, chunked = b.tapes[-5:-2]
    assert 0 <= rows["sarathi: until the last token (s)"] - chunked[-1].end < 0.1
    kinds = lambda tape: {what for _, what, *_ in bench.pieces(tape)}
    assert "stall" in kinds(first) and "stall" not in kinds(chunked) and "stall" not in kinds(static)
    figure = bench.draw_tapes("request", [static, first, chunked])
    assert [ax.get_title() for ax in figure.axes] == ["static", "prefill_first", "sarathi"] and figure.axes[-1].get_xlabel() == "time (s)"
    for tape, ax in zip((static, first, chunked), figure.axes):
        boxes = [path.get_extents() for bars in ax.collections for path in bars.get_paths()]
        assert len(boxes) == len(list(bench.pieces(tape))) and [int(t) for t in ax.get_yticks()] == list(range(6))
        for at in range(6):
            mine = sorted((b.x0, b.x1) for b in boxes if b.y0 < at < b.y1)
            assert mine[0][0] == pytest.approx(tape.arrivals[at], abs=1e-9) and all(a[1] <= b[0] + 1e-9 for a, b in zip(mine, mine[1:]))


def test_a_trace_of_online_shows_every_scheduler_and_who_waited(tmp_path, cli):
    """However long the first one ran."""
    said = cli("bench.py", "online", "--hardware", "a6000", "--model", "llama-7b", "--arrivals", "poisson:0.9x", "--requests", "5", "--trace", str(tmp_path / "t.json"))
    assert said.status == 0, said.err
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == sorted(["online: sarathi, all at once", *(f"online: {name}" for name in NAMES)])
    kinds = {names[e["pid"]]: set() for e in events}
    for e in events:
        kinds[names[e["pid"]]].add(e.get("cat"))
    assert all("waiting" in kinds[f"online: {name}"] for name in NAMES) and "stall" in kinds["online: prefill_first"]


@pytest.mark.parametrize("flag", ["--plot", "--trace"])
def test_what_cannot_be_written_is_said_before_the_work(flag, cli):
    said = cli("bench.py", "fig7", "--hardware", "a6000", flag, "/dev/null/there")
    assert said.status == 2 and said.out == "" and said.err == f"bench.py: {flag[2:]} = '/dev/null/there': cannot be written (Not a directory)\n"


def test_plot_and_trace_on_the_command_line(tmp_path, cli):
    said = cli("bench.py", "fig7", "timeline", "--hardware", "a6000", "--model", "llama-13b", "--plot", str(tmp_path / "a/b"), "--trace", str(tmp_path / "t.json"))
    assert said.status == 0, said.err
    assert sorted(p.name for p in (tmp_path / "a/b").iterdir()) == ["fig7_a6000.json", "fig7_a6000.png", "timeline_a6000.json", "timeline_a6000.png"]
    names = {e["args"]["name"] for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["name"] == "process_name"}
    assert names == {"timeline: static", "timeline: prefill_first", "timeline: sarathi"}
    whole = json.loads(said.out.strip().split("\n")[-1])
    kept = [json.loads((tmp_path / "a/b" / f"{name}_a6000.json").read_text()) for name in ("fig7", "timeline")]
    assert whole["experiment"] == "fig7 timeline", "the last line is still the JSON"
    assert [r["experiment"] for r in kept] == ["fig7", "timeline"] and sum((r["rows"] for r in kept), []) == whole["rows"], "each table's rows in a file"
    assert all(r[key] == whole[key] for r in kept for key in whole.keys() - {"experiment", "rows"})


# ---------------------------------------------------------------- 11. the README keeps its word

README = (HERE / "README.md").read_text()
FILES = {name: (HERE / f"{name}.py").read_text() for name in ("kernels", "model", "sarathi", "bench")}
PAPERS = "SARATHI|S-LoRA|SmartSpec|TNG|VTC|Megatron-LM"


def section(heading):
    """The README's text below a heading, to the next one of its level."""
    level = heading.split()[0]
    found = re.search(rf"^{re.escape(heading)}$(.*?)(?=^{level} |\Z)", README, re.M | re.S)
    assert found, heading
    return found[1]


def blocks(text):
    return re.findall(r"```python\n(.*?)```", text, re.S)


def run_block(block):
    """Run it as a reader would -> its names. What it registers goes again."""
    registries, names = (SCHEDULERS, sarathi.PROPOSERS, sarathi.POLICIES), {}
    before = [dict(r) for r in registries]
    try:
        exec(compile(block, "README.md", "exec"), names)
    finally:
        for registry, entries in zip(registries, before):
            registry.clear()
            registry.update(entries)
    return names


def citations(text):
    """{"SARATHI §4.2", "SmartSpec Eq. 8", ...} of every [PAPER §x, Fig. y] in a text. A paper holds until the next is named, a kind for
    the numbers behind it; 3-5 is 3, 4 and 5."""
    found, paper = set(), None
    for inside in re.findall(r"\[([^][]*)\]", text):
        for name, kind, numbers in re.findall(rf"({PAPERS})|(§|(?:Fig|Eq|Alg|App)\. |Table )((?:[A-Z]|\d[\d.]*)(?:-\d+)?(?:, \d+)*)", inside):
            paper = name or paper
            for part in numbers.split(", ") if numbers else ():
                first, _, last = part.rstrip(".").partition("-")
                found |= {f"{paper} {kind}{n}" for n in (range(int(first), int(last) + 1) if last else [first])}
    return found


def test_citations_are_read_in_every_form():
    assert citations("x [SARATHI §4.2, §4.4] y[0] [Fig. 7] [SmartSpec Alg. 1, Eq. 3-5] [§2; arXiv 2211.17192] [S-LoRA Fig. 11, 12, App. B]") == {
        "SARATHI §4.2", "SARATHI §4.4", "SARATHI Fig. 7", "SmartSpec Alg. 1", "SmartSpec Eq. 3", "SmartSpec Eq. 4", "SmartSpec Eq. 5", "SmartSpec §2",
        "S-LoRA Fig. 11", "S-LoRA Fig. 12", "S-LoRA App. B"}
    assert citations("[SARATHI §6: which chunk] [SmartSpec Eq. 7, SARATHI Table 2] [TNG] [2211.17192]") == {"SARATHI §6", "SmartSpec Eq. 7", "SARATHI Table 2"}


def test_the_index_holds_every_citation_of_the_code():
    rows = re.findall(r"^\| ([^|`]+) \|", section("## From the papers to the code"), re.M)
    listed = set().union(*(citations(f"[{row}]") for row in rows))
    for name, text in FILES.items():
        assert not citations(text) - listed, f"{name}.py cites what the README's index does not list"


def test_the_index_names_code_that_exists(cli):
    text, modules = section("## From the papers to the code"), dict(kernels=kernels, model=model_py, sarathi=sarathi, bench=bench)
    for file, names in re.findall(r"`(\w+)\.py: ([^`]+)`", text):
        for name in names.split(", "):
            found = modules[file]
            for part in name.split("."):
                found = getattr(found, part)  # AttributeError: the README names what is not there
    experiments = " ".join(re.findall(r"`bench\.py ([\w ]+)`", text)).split()
    assert len(experiments) > 30 and not set(experiments) - bench.EXPERIMENTS.keys()
    papers = re.findall(rf"^(\w+) +\[(?:{PAPERS})", cli("bench.py", "list").out, re.M)
    assert len(papers) > 30 and not set(papers) - set(experiments), "an experiment that reproduces a paper is not in the index"


def test_every_departure_from_a_paper_is_in_the_readme():
    departures = [c for text in FILES.values() for part in text.split("# differs from ")[1:] for c in citations(part.partition("]")[0] + "]")]
    listed = citations(section("## Where we depart from the papers"))
    assert departures and not set(departures) - listed


def test_the_readmes_python_runs_as_it_stands(capsys):
    own = blocks(section("## Write your own"))
    rest = [block for block in blocks(README) if block not in own]
    assert len(own) == len(rest) == 3
    for block in own:
        names = run_block(block)
        assert block.count("\n") < 20 and names["tokens"] == Engine(names["model"]).generate(names["prompts"], max_new_tokens=len(names["tokens"][0]))
    assert len(set(map(tuple, names["tokens"]))) > 1
    capsys.readouterr()
    for block in rest:
        run_block(block)
    said = capsys.readouterr().out.split("\n")
    assert len(set(map(tuple, json.loads(said[0])))) == 3, "each with its own adapter, or none"
    assert said[1].endswith(f"18 requests in {said[1].split()[-2]} s"), "simulated"
    assert len(said) == 11 and said[2].startswith("2 [") and said[-2].endswith("length"), "eight events of the one added"


def test_the_readmes_commands_are_ours(cli):
    """Every flag and experiment in a shell block is one of the program's; what they do is tested where they stand."""
    flags = {script: set(re.findall(r"--[\w-]+", cli(script, "--help").out)) for script in ("sarathi.py", "bench.py")}
    commands = [line.partition("#")[0] for block in re.findall(r"```bash\n(.*?)```", README, re.S) for line in block.split("\n")]
    commands += re.findall(r"`((?:python|torchrun) [^`]*)`", README)
    called = [(file, args.split()) for line in commands for file, args in re.findall(r"(sarathi\.py|bench\.py)(.*)", line)]
    assert len(called) > 20
    for file, args in called:
        assert not {arg for arg in args if arg.startswith("--")} - flags[file] - {"--help"}, args
        if file == "bench.py":
            assert not {name for name in takewhile(lambda arg: not arg.startswith("--"), args)} - bench.EXPERIMENTS.keys() - {"all", "list"}, args


def test_the_readmes_numbers_are_those_of_its_files():
    """Between two marks, every number in a table below a link to a file is one of that file's."""
    n = 0
    for name, text in re.findall(r"^<!-- (\w+) -->$(.*?)^<!-- /\1 -->$", README, re.M | re.S):
        _, *parts = re.split(r"\]\((assets/\w+\.json)\)", text)
        for path, below in zip(parts[::2], parts[1::2]):
            measured = json.loads((HERE / path).read_text())
            values = [v for r in (measured["rows"] if isinstance(measured, dict) else measured) for v in r.values() if isinstance(v, (int, float))]
            known = {form(v) for v in values for form in (bench.number, "{:.3f}".format, "{:.2f}".format)}
            cells = [cell.strip() for row in re.findall(r"^\|(.*)\|$", below, re.M) for cell in row.split("|")[1:] if re.fullmatch(r" *\d[\d.]* *", cell)]
            assert not set(cells) - known, f"{name}: {set(cells) - known} not in {path}"
            n += len(cells)
    assert n > 100


def test_the_readme_names_what_exists():
    assert set(re.findall(r"^\| `(\w+)` \|", section("## One iteration"), re.M)) == {name for name, made in SCHEDULERS.items() if made.__module__ == "sarathi"}
    anchors = {"#" + re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^## (.*)", README, re.M)}
    for path in re.findall(r"\]\((?!http)([^)]+)\)", README) + re.findall(r"^(\w+\.py) ", README, re.M):
        assert path in anchors if path[0] == "#" else (HERE / path).exists(), path


def test_the_files_are_as_long_as_the_readme_says():
    said = dict(re.findall(r"^(\w+\.py) +about ([\d,]+) lines", README, re.M))
    assert said.keys() == {f"{name}.py" for name in FILES} | {"test_sarathi.py"}
    for name, n in said.items():
        assert abs((HERE / name).read_text().count("\n") - int(n.replace(",", ""))) <= 100, name
    assert abs(sum(text.count("\n") for text in FILES.values()) - int(re.search(r"about ([\d,]+) in four files", README)[1].replace(",", ""))) <= 200


def test_no_function_is_longer_than_a_screen():
    for name, text in FILES.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{name}.py: {node.name} has {node.end_lineno - node.lineno + 1} lines"


# ---------------------------------------------------------------- 12. cost model, simulator, pipeline, figures

def a6000(**change):
    return CostModel.roofline(GPTConfig(**PRESETS["llama-13b"] | change), "a6000")


def test_a_roofline_grows_with_every_argument_and_steps_at_the_tile():
    cost = a6000()
    times = [cost.time(n, 3000) for n in range(1, 600)]
    assert all(a <= b for a, b in zip(times, times[1:])) and cost.time(260, 3072) < cost.time(260, 6144)
    assert cost.time(257) > 1.25 * cost.time(256) and cost.time(256) < 1.01 * cost.time(200), "one token more is a whole tile more"
    assert cost.time_of([(0, 256, True)]) < cost.time_of([(512, 256, True)]), "a chunk reads what came before it"
    for n, context in ((1, 1024), (1024, 0), (260, 3072)):
        parts = cost.operators(n, context)
        assert list(parts) == ["preproj", "attn", "postproj", "ffn_ln1", "ffn_ln2", "others"] and min(parts.values()) >= 0
        assert sum(parts.values()) == pytest.approx(cost.time(n, context)) and parts["others"] < 0.05 * cost.time(n, context)
    every = [CostModel.roofline(preset("llama-7b"), gpu).time(256, 4096) for gpu in ("a10g", "a40", "a6000", "a100-40", "a100", "h100", "h200")]
    assert every == sorted(every, reverse=True), "a better data sheet is never slower"


def test_tensor_parallelism_shares_the_work_and_pays_for_it():
    one, two, eight = (CostModel.roofline(preset("llama-70b"), "h100", tp=tp) for tp in (1, 2, 8))
    assert one.time(512, 9999) > two.time(512, 9999) > eight.time(512, 9999) > one.time(512, 9999) / 8
    assert two.operators(8, 100)["postproj"] - two.all_reduce(8) == pytest.approx(one.operators(8, 100)["postproj"] / 2)
    assert Simulator(eight).max_batch > Simulator(two).max_batch
    with pytest.raises(ValueError, match="138.* GB of weights do not fit h100"):
        Simulator(one)
    with pytest.raises(KeyError, match="unknown hardware 'b200': one of a10g, a6000"):
        CostModel.roofline(preset("tiny"), "b200")


class Mine(Scheduler, named=False):
    """As a reader would write one: the shortest prompt alone, then everybody decodes."""

    def plan(self, running, waiting):
        new = min(list(waiting)[:max(0, self.max_batch - len(running))], key=lambda r: r.n_todo, default=None)
        return [(new, new.n_todo)] if new else [(r, r.n_todo) for r in running]


@pytest.mark.parametrize("alloc", ["reserve", "grow"])
@pytest.mark.parametrize("scheduler", [*NAMES, Mine])
def test_a_simulated_run_makes_the_plans_of_the_real_one(scheduler, alloc):
    """Iteration for iteration the same requests and token counts, preemptions included; pages conserved after each."""
    seen = []
    for make, model in ((Engine, small()), (Simulator, CostModel.roofline(small().config, "a6000"))):
        engine = make(model, scheduler=scheduler if scheduler in NAMES else scheduler(), chunk=32, tile=TILE, max_batch=4, alloc=alloc, n_page=333)
        plans = []
        watch(engine, "_run", lambda plan: plans.append(sorted((r.id, n) for r, n in plan)))
        requests = serve(engine, [Request(prompt(n), 20) for n in (300, 15, 1, 16, 17, 33, 90)])
        assert all(r.state == "length" and len(r.output) == 20 and r.times == sorted(r.times) for r in requests)
        seen.append(plans)
    assert seen[0] == seen[1] and len(seen[0]) > 40


def test_a_simulated_clock_is_the_sum_of_its_iterations_and_waits_for_arrivals():
    cost, record = a6000(), []
    engine = Simulator(cost, scheduler="sarathi", max_batch=4, record=record)
    requests = add(engine, [Request([0] * 700, 9), Request([0] * 100, 5), Request([0] * 50, 3, arrival=100.0)])
    engine.run()
    assert all(a.end <= b.start for a, b in zip(record, record[1:])) and record[-1].end == engine.clock.now()
    assert requests[2].ttft == pytest.approx(cost.time_of([(0, 50, True)])) and record[-3].start == 100.0
    assert sum(s.end - s.start for s in record) == pytest.approx(record[-4].end + record[-1].end - 100.0), "no time passes in between"
    assert sum(n for s in record for _, _, n in s.entries) == 700 + 100 + 50 + 8 + 4 + 2
    assert engine.kv is None and requests[0].tokens.strides == (0,), "no tensor, and no memory per token"


def test_bubbles_are_the_idle_time_and_no_stage_does_two_things_at_once():
    line, requests, record = pipeline_tape()
    idle = 0
    for stage in range(4):
        spans = sorted(s[:2] for s in record if s.stage == stage)
        gaps = [b[0] - a[1] for a, b in zip(spans, spans[1:])]
        assert min(gaps) >= -1e-9 and len(spans) == sum(lane.n_steps for lane in line.lanes)
        idle += sum(gaps)
    assert sum(line.bubbles.values()) == pytest.approx(idle) and min(line.bubbles.values()) > 0
    assert all(r.state == "length" and r.bubble >= 0 for r in requests) and max(s.end for s in record) == line.clock.now()
    for lane in line.lanes:  # a lane's next iteration starts when its last one has left the last stage
        left = [s.end for s in record if s.lane == lane.number and s.stage == 3]
        began = [s.start for s in record if s.lane == lane.number and s.stage == 0]
        assert all(a <= b for a, b in zip(left, began[1:]))


def test_a_lane_that_had_nothing_to_do_starts_nothing_before_it_came():
    """Arrivals while some lanes run and others wait, and one request that is aborted while its iteration is in flight."""
    record = []
    line = gpt3_line(scheduler="orca", max_batch=2, n_page=2000, record=record)
    requests, victim = [Request([0] * 300, 40, arrival=t) for t in (0.0, 0.0, 1.0, 1.5, 1.51, 60.0, 60.0)], Request([0] * 300, 900)
    add(line, [*requests, victim])
    for _ in range(11):
        line.step()
    owner = next(lane for lane in line.lanes if victim in lane.running)
    assert owner.flights and len(victim.output) > 0
    line.abort(victim.id)
    assert {r.id for r in line.run()} == {r.id for r in requests} and victim.state == "abort"
    for r in requests:
        assert min(s.start for s in record if r.id in [id for id, _, _ in s.entries]) >= r.arrival and r.ttft > 0
    assert all(apart(s[:2] for s in record if s.stage == stage) for stage in range(4))
    assert all(lane.pool.n_free == lane.pool.n_page and not lane.flights for lane in line.lanes) and line.clock.now() < 80


def test_what_an_aborted_request_has_in_flight_lands_with_the_last_of_the_others():
    line = Pipeline(SlowStages(), 2, max_batch=1, n_page=500, scheduler="orca")
    victim, other = Request([1], 9, arrival=0.2), Request([1], 2)
    add(line, [other, victim])
    while not (victim.state == "running" and line.turns[-1] is line.lanes[1]):
        line.step()
    line.abort(victim.id)
    assert line.run() == [other] and not any(lane.flights for lane in line.lanes)


def test_proposers_forget_requests_that_are_aborted_while_their_last_token_is_on_its_way():
    line = Pipeline(SlowStages(), 2, draft="ngram", spec=2, alpha=0.5, max_batch=2, n_page=400, scheduler="orca")
    requests, cut = add(line, [Request([1] * 5, 12) for _ in range(12)]), 0
    while line.requests:
        line.step()
        for r in requests:
            if r.state == "landing":
                line.abort(r.id)
                cut += 1
    assert cut > 3 and not any(lane.speculator.proposer.seen for lane in line.lanes)


def test_equal_micro_batches_leave_no_bubbles():
    line = gpt3_line(scheduler="static", max_batch=1, n_page=2000)
    serve(line, [Request([0] * 500, 50) for _ in range(4)])
    assert line.bubbles["PB2"] < 1e-2 and sum(line.bubbles.values()) < 0.02 * 4 * line.clock.now()


@pytest.mark.parametrize("sizes, said", [(dict(n_head=4, n_embd=12), "head_dim = 3"), (dict(n_head=8, n_embd=6), "head_dim = 0")])
def test_heads_that_cannot_be_are_named(sizes, said):
    with pytest.raises(ValueError, match=said):
        GPTConfig(**SMALL | dict(n_kv_head=0) | sizes)


@pytest.mark.parametrize("n_stage", [1, 2, 3])
def test_a_simulated_stage_sends_to_the_next_one_if_there_is_one(n_stage, monkeypatch):
    monkeypatch.setattr(SlowStages, "send", lambda self, N: 10.0)
    line = Pipeline(SlowStages(), n_stage, max_batch=1, n_page=100)
    line.generate([[1, 2, 3]], max_new_tokens=1)
    assert line.clock.now() == pytest.approx(1.0 + 10.0 * (n_stage - 1))


def test_simulated_stages_share_their_memory():
    cost = CostModel.roofline(preset("llama-7b"), "a100")
    assert Pipeline(cost, 4).lanes[3].pool.n_page == pytest.approx(Simulator(cost).pool.n_page / 4, rel=0.01)


def test_prices_are_profiled_before_the_pool_takes_the_memory(monkeypatch):
    order, cache = [], Engine._new_cache
    monkeypatch.setattr(CostModel, "profile", lambda model: (order.append("profile"), CostModel.roofline(model.config, "a100"))[1])
    monkeypatch.setattr(Engine, "_new_cache", lambda engine, n_page: (order.append("pool"), cache(engine, n_page))[1])
    Engine(small(), draft="ngram", spec="goodput", n_page=200)
    assert order == ["profile", "pool"]


def test_a_profile_has_the_same_face_and_says_how_far_off_it_is():
    cost = CostModel.profile(small(), repeats=1)
    assert 0 <= cost.error < np.inf and cost.time(200, 500) > 0 and min(cost.coefficients) >= 0
    learned = sarathi.Learned(cost)
    for _ in range(40):
        learned.learn(sarathi.Work(40, 1, decodes=1, context=100), 3 * cost.time(40, 100))
    assert learned.time(40, 100) > 1.5 * cost.time(40, 100)
    for c in (cost, learned):
        assert sum(c.operators(40, 100).values()) == pytest.approx(c.time(40, 100))
    engine = Simulator(cost, scheduler="sarathi", chunk=32, max_batch=4, n_page=400)
    assert engine.generate([[1] * 60, [2] * 5], max_new_tokens=4) == [[0] * 4] * 2 and engine.clock.now() > 0


@pytest.mark.parametrize("times, said", [((9, 1, 3, 1), 1), ((9, 1, 1.2, 1), 0)])
def test_figures_of_a_busy_machine_are_said_to_be_so(times, said):
    """By timings that differ, the warm-up's left aside; once."""
    b, clock = bench_of(repeats=3), iter(times)
    b.once = lambda f: next(clock)
    b.rounds(None)
    assert len(bench.busy(b)) == said and not bench.busy(b)


def test_an_iteration_ends_where_the_context_does():
    """--lengths may be as long as it: what is rehearsed has a token still to come."""
    top = SMALL["block_size"]
    for last in (True, False):
        b = bench_of(lengths=f"{top},{top},{top}")
        assert b.once(b.iteration(2, top, 0, last=last)) > 0 and b.once(b.iteration(1, top - 1, top, last=last)) > 0


def test_a_pool_too_small_for_a_rehearsal_says_so():
    with pytest.raises(ValueError, match="a pool of 20 pages is too small"):
        sarathi.rehearse(Engine(small(), n_page=20), [(17, 1, 1)])


def test_a_profile_tells_what_adapters_cost(monkeypatch):
    def seconds(entries):
        w = sarathi.Work.of(entries, 1)
        return 5e-3 + 1e-4 * w.N + 1e-3 * (w.adapted > 0) + 2e-4 * w.adapted + 3e-8 * w.lora_read + 2e-9 * w.lora_pairs
    monkeypatch.setattr(sarathi, "time_batches", lambda model, batches, *_: np.array([*map(seconds, batches)]))
    model = small()
    cost, weights = CostModel.profile(model), [random_adapter(rank)(model.config).n_params for rank in (8, 64, 16)]
    for entries in ([(9, 1, True, w) for w in weights], [(0, 40, True, weights[2])], [(9, 1, True), (4, 1, True, weights[1])], [(9, 1, True)],
                    [(9, 6, 6, w) for w in weights]):
        assert cost.time_of(entries) == pytest.approx(seconds(entries), rel=1e-3), entries
    w, cost.coefficients = sarathi.Work.of([(9, 4, 4, weights[0]), (3, 40, True, weights[1])], 1), [*range(1, 17)]
    assert cost.lora(w, "merge") == 0
    for lora in ("batched", "merge"):
        assert cost.seconds(w, lora) == pytest.approx(cost.linear(w.N) + cost.attention(w) + cost.others(w) + cost.lora(w, lora)), "all at once"


def test_a_profile_tells_what_drafts_read_again(monkeypatch):
    """And so do those who ask for the price of drafts that nobody has made yet."""
    def seconds(entries):
        w = sarathi.Work.of(entries, 1)
        return 5e-3 + 1e-4 * w.N + 1e-6 * w.context + 2e-6 * w.again
    monkeypatch.setattr(sarathi, "time_batches", lambda model, batches, *_: np.array([*map(seconds, batches)]))
    cost, expected = CostModel.profile(small()), pytest.approx(5e-3 + 12e-4 + 309e-6 + 2 * 927e-6, rel=1e-3)
    assert cost.time_of([(99, 1, 1)] * 3) == pytest.approx(seconds([(99, 1, 1)] * 3), rel=1e-3)
    assert cost.time_of([(99, 4, 4)] * 3) == expected and cost.seconds(sarathi.Loop(3, 3, 50, 50, context=99).work(0, 3, 3, 1)) == expected
    engine = Engine(small(), draft="ngram", spec="goodput", cost=cost, max_batch=3, n_page=500)
    plan = sarathi.rehearse(engine, [(99, 1, 1)] * 3)
    assert engine.speculator._prices(plan, [r for r, n in plan], 9)[0](9) == expected


def test_prices_of_drafts_are_kept_until_what_they_are_of_has_changed():
    engine = Engine(small(), draft="ngram", spec="goodput", cost=Linear(alpha=0.1), max_batch=3, n_page=500)
    plan = sarathi.rehearse(engine, [(99, 1, 1)] * 3)
    requests = [r for r, n in plan]
    priced = lambda requests=requests: engine.speculator._prices(plan, requests, 9)[0]
    first = priced()
    assert priced(requests[:2]) is not first and priced() is first, "another batch"
    grown = [priced()]
    for _ in range(60):
        for r in requests:
            r.n_past += 1
        grown.append(priced())
    assert len({*grown}) == 4 and grown[-1](9) > 1.2 * first(9), "contexts a fifth longer, three times"
    for _ in range(engine.cost.ROUND):
        engine.cost.learn(sarathi.Work(N=3, M=3, decodes=3, context=400), 2.0)
    assert priced() is not grown[-1], "news"


def test_the_adapters_of_a_profile_are_computed_and_let_go():
    engine = Engine(small(), max_batch=4, n_page=400)
    engine.add_adapter("a", random_adapter(8))
    entries = [(9, 1, 1, engine.adapters.known["a"].n_params), (9, 1, 1, 0), (0, 20, 1, 0)]
    plan = sarathi.rehearse(engine, entries)
    assert engine._entries(plan) == entries, "priced as it was asked for"
    assert [n for _, n, _ in engine._loras(plan)["preproj"].spans] == [1]
    engine._run(plan).wait()
    for r, n in plan:
        engine.abort(r.id)
    engine.pool.check()
    assert engine.adapters.evict(), "nobody uses it"


@pytest.mark.parametrize("L", [3, 6, 14, 30])
def test_the_batches_of_a_profile_fit_a_short_context(L):
    for entries in sarathi.designed_batches(L, (100, 800)) + sarathi.random_batches(L, 50, (100, 800)):
        assert entries and all(n >= 1 and past + n <= L for past, n, *_ in entries)


def test_least_squares_finds_costs_and_never_a_negative_one():
    A = np.random.default_rng(0).random((40, 3))
    assert np.allclose(sarathi.least_squares(A, A @ [1.0, 0.0, 3.0]), [1, 0, 3], atol=1e-9)
    x = sarathi.least_squares(A, A @ [1.0, -2.0, 3.0])
    assert x[1] == 0 and min(x) >= 0


def test_requests_of_the_papers_shapes():
    assert bench.halves(1024, 50, 256, 6) == (4 * 251, 20) and bench.halves(2048, 63, 256, 5) == (8 * 252, 32), "whole chunks, as in Table 4"
    assert bench.halves(1024, 1) == (512, 512) and bench.halves(100, 1000) == (99, 1)
    assert bench.halves(1024, 0, 256, 6) == (4 * 251, 20) and bench.halves(100, 0, 20, 1) == (95, 5), "0: chunk / (B - 1), also for a batch of one"
    requests = list(bench.zipf_requests(2000))
    lengths = [r.max_len for r in requests]
    assert min(lengths) >= 1024 and max(lengths) <= 4096 and np.mean(lengths) < (1024 + 4096) / 2
    assert all(abs(len(r.prompt) / r.max_new_tokens - 10) < 0.1 for r in requests)


def test_the_papers_workload():
    """Rates, burstiness, popularity and lengths are what they are called; the same seed is the same workload."""
    jobs = bench.gamma_jobs(10, 300, cv=1, n_adapter=200)
    arrivals = np.array([j.arrival for j in jobs])
    assert len(jobs) == 3000 and arrivals[-1] == pytest.approx(300, rel=0.1) and jobs == bench.gamma_jobs(10, 300, n_adapter=200)
    for cv in (1, 4):
        gaps = np.diff([j.arrival for j in bench.gamma_jobs(10, 3000, cv=cv)])
        assert gaps.mean() == pytest.approx(0.1, rel=0.1) and gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)
    for lengths in ([j.prompt for j in jobs], [j.output for j in jobs]):
        assert min(lengths) >= 8 and max(lengths) < 512 and np.mean(lengths) == pytest.approx(260, rel=0.03)
    share = lambda alpha: np.bincount([j.adapter for j in bench.gamma_jobs(10, 300, n_adapter=10, alpha=alpha)], minlength=10).max() / 3000
    assert share(1) < 0.12 and share(0.1) > 0.7, "alpha = 1 is uniform, 0.1 the most skewed"
    assert {j.adapter for j in bench.gamma_jobs(2, 5)} == {None}


def test_metrics_by_hand():
    def ended(arrival, times, state="length"):
        r = Request([1], arrival=arrival)
        r.times, r.state = times, state
        return r
    seen = bench.metrics([ended(0, [3.0, 4.0]), ended(1, [9.0, 10.0, 11.0]), ended(2, [], "abort"), ended(1, [1.0])], start=1.0, slo=6.0)
    assert seen == pytest.approx({"requests/s": 0.3, "tokens/s": 0.6, "latency": 14 / 3, "first token": 11 / 3, "attainment": 0.5,
                                  "satisfaction": (0.75 + 1) / 4, "aborted": 1})
    assert bench.metrics([ended(0, [], "abort")])["requests/s"] == 0


# ---- online workloads

@pytest.mark.parametrize("text, low, high, mean", [("7", 7, 7, 7), ("8..16", 8, 16, 12), ("5..5", 5, 5, 5), ("zipf:0.4:10:40", 10, 40, 21.9),
                                                   ("zipf:0:10:40", 10, 40, 25), ("lognormal:100:0.5", 1, 10**4, 113.3), ("lognormal:1:0", 1, 1, 1),
                                                   ("lognormal:1:1000", 1, 10**7, 4.95e6)])
def test_lengths_are_distributed_as_their_text_says(text, low, high, mean):
    drawn = bench.lengths_of("prompt", text)(np.random.RandomState(0), 20000)
    assert drawn.dtype.kind == "i" and drawn.min() >= low and drawn.max() <= high and drawn.mean() == pytest.approx(mean, rel=0.02)
    assert text.startswith("log") or {drawn.min(), drawn.max()} == {low, high}, "both ends belong to it"


@pytest.mark.parametrize("text", ["", "0", "-3", "8..", "9..8", "0..4", "1.5", "zipf", "zipf:1:5", "zipf:1:9:8", "zipf:-1:5:9", "zipf:x:5:9", "zipf:nan:5:9",
                                  "lognormal:0:1", "lognormal:5:-1", "lognormal:5:inf", "lognormal:5:1:2", "normal:5:1", "8..9..10", "8:9", "1e3",
                                  "1..99999999999", "zipf:1:1:99999999999"])
def test_a_bad_length_names_itself_and_teaches_the_grammar(text):
    with pytest.raises(ValueError, match=re.escape(f"output = {text!r}: must be {bench.LENGTHS}, in tokens") + "$"):
        bench.lengths_of("output", text)


def test_arrivals_are_what_their_text_says():
    of = bench.arrivals_of
    assert of("poisson:4") == bench.Arrivals(rate=4.0) and of("poisson:0.7x") == bench.Arrivals(rate=0.7, relative=True)
    assert of("gamma:2.5:3") == bench.Arrivals(rate=2.5, cv=3.0) and of("closed:8") == bench.Arrivals(clients=8)
    for text in ("", "poisson", "poisson:0", "poisson:-1", "poisson:inf", "poisson:x", "poisson:1:2", "gamma:1", "gamma:1:0", "closed:0", "closed:1.5", "closed:2x", "burst:3"):
        with pytest.raises(ValueError, match=re.escape(f"arrivals = {text!r}: must be {bench.ARRIVALS}")):
            of(text)


def trace_file(tmp_path, text):
    (tmp_path / "t.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(tmp_path / "t.csv")


def test_a_trace_is_read_row_by_row(tmp_path):
    jobs = bench.arrivals_of(trace_file(tmp_path, "\ufeffarrival,prompt,output,adapter,client\n0,10,3,,\n1.5,20,4,chat, ann \n\n1.5,7,1,,bob\n")).jobs
    assert jobs == (bench.Job(0.0, 10, 3), bench.Job(1.5, 20, 4, "chat", "ann"), bench.Job(1.5, 7, 1, None, "bob"))
    assert bench.read_jobs(trace_file(tmp_path, "output,arrival,prompt\n3,0,10")) == [bench.Job(0.0, 10, 3)], "any order, and only what is needed"


@pytest.mark.parametrize("text, message", [
    ("", "line 1: columns '': must be arrival,prompt,output and perhaps adapter,client"), ("0,10,3\n", "line 1: columns '0,10,3': must be"),
    ("arrival,prompt\n1,2\n", "line 1: columns 'arrival,prompt': must be"), ("arrival,prompt,output,colour\n", "colour': must be"),
    ("arrival,prompt,output\n", "line 2: no request under the names"), ("arrival,prompt,output\n0,8,2\n1,x,3\n", "line 3: prompt = 'x': must be a whole number, at least 1"),
    ("arrival,prompt,output\n0,8,2\n\n1,8,2.5\n", "line 4: output = '2.5': must be a whole number"), ("arrival,prompt,output\n-1,8,2\n", "line 2: arrival = -1.0: must be a number, at least 0"),
    ("arrival,prompt,output\nnan,8,2\n", "line 2: arrival = nan"), ("arrival,prompt,output\ninf,8,2\n", "line 2: arrival = inf"),
    ("arrival,prompt,output\n0,0,2\n", "line 2: prompt = 0: must be a whole number, at least 1"), ("arrival,prompt,output\n0,8\n", "line 2: 2 cells: must be 3, arrival,prompt,output"),
    ("arrival,prompt,output\n0,8,2,9\n", "line 2: 4 cells: must be 3"), ("arrival,prompt,output\n,8,2\n", "line 2: arrival = ''"),
    (b"\xff\xfe\x00\x01", "line 1: "), (b"arrival,prompt,output\n0,\xff,1\n", "line 2: prompt = ")])
def test_a_bad_trace_names_file_line_and_value(text, message, tmp_path):
    path = trace_file(tmp_path, text)
    with pytest.raises(ValueError, match=re.escape(f"{path}, ") + ".*" + re.escape(message.removeprefix("line 1: ").removeprefix("line 2: "))) as e:
        bench.arrivals_of(path)
    assert re.search(r", line \d+: ", str(e.value)) and (not message.startswith("line") or message[:7] in str(e.value)) and "\n" not in str(e.value)


def test_a_trace_is_served_with_its_adapters_and_clients(tmp_path, monkeypatch):
    text = "arrival,prompt,output,adapter,client\n0,30,5,x,ann\n0.5,40,6,,bob\n700,50,7,y,ann\n"
    work = bench.Online.of(bench_of("a6000", arrivals=trace_file(tmp_path, text)))
    requests, times, rates = work.run("orca")
    assert [(r.adapter, r.client, len(r.prompt), len(r.times)) for r in requests] == [("x", "ann", 30, 5), (None, "bob", 40, 6), ("y", "ann", 50, 7)]
    assert requests[2].times[0] > 700 > requests[1].times[-1] and rates["utilization (share of time)"] < 0.1 and rates["throughput (new tokens/s)"] < 18 / 700
    assert set(work.adapters) == {"x", "y"}
    with pytest.raises(ValueError, match=r"request \d+ of \d+, .* tokens: the model's context ends at"):
        bench.Online.of(bench_of("a6000", arrivals=trace_file(tmp_path, "arrival,prompt,output\n0,4000,1000\n")))


def test_a_closed_loop_never_has_more_requests_than_clients_and_never_fewer():
    b = bench_of("a6000", arrivals="closed:3", prompt="20..200", output="5..30")
    requests, *_ = bench.Online.of(b).run("sarathi")
    starts, ends = sorted(r.arrival for r in requests), sorted(r.times[-1] for r in requests)
    assert starts[:3] == [0, 0, 0] and starts[3:] == ends[:-3], "the next is sent when one ended"


@pytest.mark.parametrize("arrivals", ["poisson:0.8x", "gamma:0.8x:3", "poisson:0.05"])
def test_an_open_loop_sends_at_its_rate_whatever_becomes_of_the_requests(arrivals):
    b = bench_of("a6000", arrivals=arrivals, prompt="100", output="20", requests=10)
    work = bench.Online.of(b)
    rate = float(arrivals.split(":")[1].removesuffix("x")) * (work.capacity if "x" in arrivals else 1.0)
    sent = [[job.arrival for job in work.jobs], *([r.arrival for r in work.run(s).requests] for s in ("static", "orca"))]
    gaps = np.diff(sent[0])
    assert len(sent[0]) == 400 and 400 / sent[0][-1] == pytest.approx(rate, rel=0.3) and (gaps.std() / gaps.mean() > 2) == ("gamma" in arrivals)
    for times in sent[1:]:
        assert np.diff(times) == pytest.approx(gaps), "every scheduler gets the same"
    hasty = bench.Online.of(bench_of("a6000", dict(slo=1e-3, max_waiting=1), arrivals=arrivals, prompt="100", output="20", requests=10))
    assert hasty.capacity == pytest.approx(work.capacity), "what can be served does not hang on who is given up"


def test_how_a_run_fared_by_hand():
    def ended(id, arrival, times, state="length"):
        r = Request([1] * 10, arrival=arrival)
        r.id, r.times, r.state = id, times, state
        return r
    requests = [ended(0, 1.0, [2.0, 2.5, 4.5]), ended(1, 1.0, [6.0, 6.1]), ended(2, 2.0, [], "abort"), ended(3, 5.0, [8.0])]
    meter = bench.Meter(None)
    for start, end, entries in ((1.5, 2.0, [(0, 0, 10)]), (2.0, 2.5, [(0, 10, 1), (1, 0, 4)]), (3.0, 3.0, [(1, 4, 0)]), (4.0, 6.0, [(1, 0, 10), (3, 0, 1)])):
        meter.append(sarathi.Span(start, end, 0, 0, entries))
    assert meter.busy == 3.0 and meter.fed == 26 and meter.first == {0: 1.5, 1: 2.0, 3: 4.0}
    b = bench_of("", targets="3,0.5")
    times = bench.waits(requests, meter.first)
    assert times == {"time to first token": [1.0, 5.0, 3.0], "time per token": [1.25, pytest.approx(0.1)], "between two tokens": [0.5, 2.0, pytest.approx(0.1)],
                     "queueing": [0.5, 1.0, -1.0]}
    rates = bench.fared(b, requests, meter, times, start=1.0)
    assert rates["throughput (requests/s)"] == 3 / 7 and rates["throughput (new tokens/s)"] == 6 / 7 and rates["throughput (tokens/s, prompts too)"] == 36 / 7
    assert rates["goodput (requests/s within 3 s, 0.5 s per token)"] == pytest.approx(1 / 7) and rates["SLO attainment (share)"] == 1 / 4, "only the last is good"
    assert rates["utilization (share of time)"] == pytest.approx(3 / 7) and rates["refused or given up (requests)"] == 1 and "utilization (share of peak FLOP/s)" not in rates
    assert rates["time to first token, p50 (s)"] == 3.0 and rates["between two tokens, longest (s)"] == 2.0
    assert bench.distribution([3.0, 1.0, 2.0])[::25] == [(1.0, 0.0), (2.0, 0.5), (3.0, 1.0)] and bench.distribution([]) == []


def test_the_share_of_peak_flops_is_that_of_the_linear_operators():
    b = bench_of("a6000", arrivals="poisson:1", prompt="100", output="2")
    requests, _, rates = bench.Online.of(b).run("orca")
    took, c = max(r.times[-1] for r in requests), b.model.config
    flops = 2 * c.n_layer * b.model.n_weights * 101 * len(requests)
    assert rates["utilization (share of peak FLOP/s)"] == pytest.approx(flops / took / b.model.flops) and 0 < rates["utilization (share of time)"] <= 1


@pytest.mark.parametrize("hardware", ["a6000", ""])
def test_ctrl_c_in_online_prints_what_was_served(hardware, monkeypatch, capsys):
    b = bench_of(hardware, arrivals="closed:2", prompt="20", output="4", schedulers="orca,static")
    step, ended = Engine.step, []

    def stopping(engine):
        events = step(engine)
        ended.extend(e for e in events if e.finished)
        if len(ended) >= 3 and engine.scheduler.__class__.__name__ == "Orca":
            b.interrupt._interrupt()
        return events
    if hardware:
        monkeypatch.setattr(bench.Bench, "grid", lambda self, small, full: small)
    monkeypatch.setattr(Engine, "step", stopping)
    b.options.scheduler = "orca"
    rows = bench.run(b, ["online", "ceilings"])
    said = capsys.readouterr()
    assert {r["experiment"] for r in rows} == {"online"} and len(rows) > 15 and "static" not in rows[0] and "interrupted" in said.err
    assert b.interrupted
    assert rows[0]["ours"] > 0 and "time to first token" in said.out


def test_what_is_longer_than_the_context_is_cut_and_said():
    b = bench_of("a6000", prompt="lognormal:2000:2", output="lognormal:500:1", requests=5)
    jobs, most = bench.drawn(b, 200), b.model.config.block_size
    assert max(job.prompt + job.output for job in jobs) == most and min(job.output for job in jobs) >= 1
    assert re.fullmatch(rf"\d+ of 200 requests were cut where the model's context ends, at {most} tokens", b.notes[0])


def test_a_row_may_stand_in_several_panels():
    rows = [bench.row("a", None, 1.0, "simulated", at=("left", "s", 2), also=[("right", "s", 3, 4.0, "tag"), ("curves", "s", None, [(1, 0.5), (2, 1.0)], "")])]
    figure = bench.draw(bench.EXPERIMENTS["tng_concurrency"].axes, rows)
    assert [ax.get_title() for ax in figure.axes] == ["left", "right", "curves"]
    assert [marks(ax)[2]["s"] for ax in figure.axes] == [[(2, 1.0)], [(3, 4.0)], [(1, 0.5), (2, 1.0)]] and [t.get_text() for t in figure.axes[1].texts] == ["tag"]


def test_two_clients_side_by_side(capsys):
    rows = {r["what"]: r["ours"] for r in bench.run(bench_of("a6000", requests=3), ["fairness"])}
    assert rows["fair, light: TTFT, mean (s)"] < 0.5 * rows["fcfs, light: TTFT, mean (s)"]


def test_where_drafts_stop_to_help():
    assert bench.crossing([(4, 2.0), (8, 1.5), (12, 0.5), (16, 0.4)]) == 10 and bench.crossing([(4, 0.9), (8, 1.5), (12, 0.5)]) == 10
    assert bench.crossing([(4, 2.0), (8, 1.0)]) == 8 and bench.crossing([(4, 0.9), (8, 0.8)]) == 4
    assert bench.uniform(7, 8)(np.random.RandomState(0), 3).tolist() == [7, 7, 7]


def test_a_system_without_a_kernel_for_verification_reads_the_context_for_every_draft():
    cost, vllm = (CostModel.roofline(preset("llama-7b"), "a100", system=system) for system in ("sarathi", "vllm"))
    entries, expanded = [(1000, 4, 4)] * 8, [(1003, 1, 1)] * 32
    assert vllm.time_of(entries) == pytest.approx(vllm.time_of(expanded)) and vllm.time_of(expanded) > cost.time_of(expanded) > cost.time_of(entries)
    assert vllm.time_of([(0, 500, 1)]) - cost.time_of([(0, 500, 1)]) == pytest.approx(vllm.system.token), "a prompt is sampled from once"
    decodes, chunk = [(1000, 1, 1)] * 4, [(0, 256, 0)]
    assert vllm.time_of(decodes + chunk) - cost.time_of(decodes + chunk) == pytest.approx(4 * vllm.system.token), "a chunk takes no context away"


def test_drafts_beside_a_chunk_are_priced_with_the_adapters_of_their_requests():
    engine = Simulator(CostModel.roofline(preset("llama-7b"), "a10g"), draft="ngram", spec="goodput", alpha=0.7, max_batch=8, n_page=9000)
    engine.add_adapter("a", random_adapter(64))
    plans = [sarathi.rehearse(engine, [(300, 1, 1, engine.adapters.known["a"].n_params)] * 3 + chunk) for chunk in ([], [(0, 256, 0)])]
    alone, beside = (engine.speculator._prices(plan, [r for r, n in plan[:3]], 9)[0](0) for plan in plans)
    assert beside == pytest.approx(alone)
    plan = sarathi.rehearse(engine, [(300, 4, 4, engine.adapters.known["a"].n_params)] * 3)  # the drafts' rows have adapters, too
    assert engine.speculator._prices(plans[0], [r for r, n in plans[0]], 9)[0](9) == pytest.approx(engine._price(plan))


def test_a_difference_that_drowns_in_noise_is_a_dash(monkeypatch):
    monkeypatch.setattr(bench.Bench, "marginal", lambda *_: -1e-3)
    rows = {r["what"]: r["ours"] for r in bench.EXPERIMENTS["table2"].rows(bench_of(lengths="32"))}
    assert rows["decode-maximal: per decode token (ms)"] is None and rows["decode-only: per decode token (ms)"] > 0


def test_ctrl_c_while_peers_times_our_own_engine_is_heard(monkeypatch):
    """The cell ends whole, and the bench knows."""
    b, ours = bench_of(), object.__new__(bench.Ours)
    ours.adapters, ours.engine = [None], Engine(small(), n_page=200, max_batch=2)
    step = ours.engine.step
    monkeypatch.setattr(ours.engine, "step", lambda: (ours.engine.n_steps == 1 and signal.raise_signal(signal.SIGINT), step())[1])
    with b.interrupt:
        times = ours.run([prompt(5), prompt(9)], 4)
        assert b.interrupt.seen and [len(ts) for ts in times] == [4, 4]


def test_a_kernel_without_huge_pages_has_a_cache_all_the_same(monkeypatch):
    class Memory(model_py.mmap.mmap):
        def madvise(self, option):
            raise OSError(22, "Invalid argument")
    monkeypatch.setattr(model_py.mmap, "mmap", Memory)
    assert Engine(small(), n_page=100).generate([prompt(5)], 3) == [naive(5, 3)]


def test_all_is_what_one_process_can_run_there(cli, monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "run", lambda b, names: asked.append(set(names)) or [])
    for flags in (["--model", "tiny"], ["--model", "tiny", "--peers", f"vllm={sys.executable}"], ["--hardware", "a6000"]):
        assert cli("bench.py", "all", *flags).status == 0
    here, beside, simulated = asked
    assert beside - here == {"peers"} and "fig12_measured" not in here and {"table4", "roofline", "fig12"} <= here
    assert simulated == {name for name in here if bench.EXPERIMENTS[name].only != "measured"}


def test_the_papers_numbers_stand_beside_their_own_lengths():
    b = bench.Bench(a6000(), bench.BenchConfig(hardware="a6000", lengths="3072"), EngineConfig())
    speedup, gain, orca = bench.EXPERIMENTS["table4"].rows(b)
    assert (speedup["paper"], gain["paper"]) == (2.51, 1.22) and not b.notes
    b.lengths = [2048, 512]
    assert [r["paper"] for r in bench.EXPERIMENTS["table4"].rows(b)][::3] == [3.26, 3.26]
    assert b.notes == ["Whose figures stand where: beside L = 512 the paper's L = 2048."]


def test_the_closing_sentence_is_of_the_main_jobs_own_rows(capsys):
    rows = [dict(experiment=name, what=what, ours=x) for name, what, x in (
        ("ceilings", "knee: tokens that one weight read pays for", 30), ("table4", "L = 8: decode speedup", 2.0), ("table4", "L = 8: over static", 1.1),
        ("fig8", "largest decode speedup", 99), ("table4", "LLaMA-33B, A100, L = 8: decode speedup", 77))]
    bench.explain(SimpleNamespace(B=5, source="measured"), rows)
    said = capsys.readouterr().out
    assert "30 / 5 = 6.0" in said and "2.0 to 2.0" in said and "1.10 to 1.10" in said
    bench.explain(SimpleNamespace(B=5, source="measured"), rows[3:])
    assert not capsys.readouterr().out


def test_lightllm_admits_what_fits_at_its_peak_and_asks_every_ten_iterations():
    class Fixed:
        def __init__(self, P, D, made=0, adapter=None):
            self.prompt, self.max_new_tokens, self.n_tokens, self.max_len, self.adapter, self.n_todo = [0] * P, D, P + made, P + D, adapter, 1
    scheduler = bench.Lightllm(max_batch=9)
    scheduler.n_page, scheduler.pages = 600, lambda adapter: 0
    assert len(scheduler.fitting([], [Fixed(10, 290), Fixed(10, 290), Fixed(10, 290)])) == 2, "each ends at 300"
    assert len(scheduler.fitting([Fixed(10, 290, 288)], [Fixed(10, 289), Fixed(9, 289)])) == 2, "the first has left when the others peak"
    assert len(scheduler.fitting([], [Fixed(60, 2), Fixed(60, 2), Fixed(60, 2)])) == 1, "a sixth of the pool in new prompts at once"
    scheduler.pages = lambda adapter: 0 if adapter is None else 400
    assert len(scheduler.fitting([], [Fixed(5, 5, adapter="a"), Fixed(5, 5, adapter="a"), Fixed(5, 5, adapter="b")])) == 2, "one adapter, two users"
    running, asked = [Fixed(5, 90)], []
    scheduler.fitting = lambda running, waiting: asked.append(1) or []
    for _ in range(25):
        scheduler.plan(running, [])
    assert 10 <= len(asked) <= 16


def test_adapters_cost_what_they_should():
    cost, slow = (CostModel.roofline(preset("llama-7b"), "a100", system=system) for system in ("sarathi", "lightllm"))
    plain, small, large = ([(500, 1, True, n)] * 32 for n in (0, 10**7, 10**8))
    took = [cost.time_of(entries) for entries in (plain, small, large)]
    assert took == sorted(took) and cost.time_of([(500, 1, True)] * 32) == took[0], "who has no adapter pays nothing"
    assert cost.time_of(large, "merge") == took[0] < took[2] < cost.time_of(large, "bmm")
    assert sum(cost.operators_of(large).values()) == pytest.approx(took[2]) and "lora" in cost.operators_of(large)
    assert slow.time_of(plain[:1]) > 32 * slow.system.layer > 2 * cost.time_of(plain[:1]), "a small batch waits for its host"
    assert slow.load(10**7)[0] > 0 == cost.load(10**7)[0] and cost.load(10**7)[1] > 0
    with pytest.raises(KeyError, match="unknown system 'tgi': one of sarathi"):
        CostModel.roofline(preset("tiny"), "a100", system="tgi")


def test_a_simulated_copy_overlaps_with_iterations_and_who_is_early_waits():
    engine = Simulator(CostModel.roofline(preset("llama-7b"), "a100"), n_page=4000, max_batch=8, alloc="grow")
    for name, rank in (("a", 8), ("b", 64)):
        engine.add_adapter(name, random_adapter(rank))
    engine.add(Request([1] * 100, max_new_tokens=4, adapter="a"))
    engine.step()
    first, (_, link) = engine.clock.now(), engine.model.load(engine.adapters.known["a"].n_params)
    assert first >= link > 0, "nothing ran beside the first copy"
    engine.adapters.prefetch([Request([1], adapter="b")])
    arrived = engine.clock.now() + engine.model.load(engine.adapters.known["b"].n_params)[1]
    engine.adapters.use("b", 1)
    assert engine.clock.now() == pytest.approx(arrived)
    engine.adapters.use("b", -1)
    engine.run()
    engine.pool.check()
    assert set(engine.pool.tables) == {"a", "b"}, "idle adapters stay while nobody needs their pages"


@pytest.mark.parametrize("kind, name", [(kind, n) for kind in ("simulated", "measured") for n, what in bench.EXPERIMENTS.items()
                                        if n not in ("scoreboard", "peers") and what.needs != "stages" and what.only in ("", kind)])
def test_every_experiment_at_its_smallest(kind, name):
    (rows, said), only = smallest(kind, name), bench.EXPERIMENTS[name].only
    assert rows and all(r["ours"] is None or np.isfinite(r["ours"]) for r in rows) and said.count("|") > 10
    allowed = {kind, "computed"} if only != "simulated" else {"simulated", "measured"}
    assert {r["source"] for r in rows} <= allowed, "measured and simulated are never mixed"


def test_the_scoreboard_is_well_formed(monkeypatch, capsys):
    at_the_least(monkeypatch)
    b = bench.Bench(a6000(), bench.BenchConfig(hardware="a6000", scale=60), EngineConfig())
    rows = bench.run(b, ["scoreboard"])
    assert len({r["what"] for r in rows}) == len(rows) > 45 and {r["experiment"] for r in rows} == {"scoreboard"}
    for r in rows:
        assert r["ratio"] == pytest.approx(r["ours"] / r["paper"]) and r["inside"] in ("yes", "no") and r["role"] in ("fit", "prediction")
        assert ("why" in r) == (r["inside"] == "no")
    said = capsys.readouterr().out
    for margin in (15, 20):
        part = [r for r in rows if r["what"].startswith(("S-LoRA", "SmartSpec", "TNG")) == (margin == 20)]
        assert f"{sum(r['inside'] == 'yes' for r in part)} of {len(part)} inside {margin} %" in said and re.search(r"\| +ratio \| inside \| role", said)
    claims = {r["what"]: r for r in rows}
    assert claims["Table 2: decode-only: total (ms)"]["role"] == "fit" and claims["Fig. 3: B = 2: decode over prefill, per token"]["role"] == "prediction"
    assert [claims[f"SmartSpec Fig. 1, 7b: k = {k}: no gain beyond rate"]["role"] for k in (5, 3)] == ["fit", "prediction"]


def test_hardware_on_the_command_line_needs_no_model_and_no_cache(cli, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    monkeypatch.setattr(bench, "load_model", lambda *_: pytest.fail("loaded"))
    said = cli("bench.py", "table2", "--hardware", "a100", "--model", "llama-33b")
    assert said.status == 0, said.err
    result = json.loads(said.out.strip().split("\n")[-1])
    assert result["machine"]["name"] == "a100 (simulated)" and {r["source"] for r in result["rows"]} == {"simulated"}


# ---------------------------------------------------------------- 13. adapters

def peft_folder(tmp_path, model, seed, **settings):
    """A PEFT folder for a transformers model, both factors random -> the folder."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(seed)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**settings))
    with torch.no_grad():
        for name, p in wrapped.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.3)
    folder = tmp_path / f"adapter{seed}"
    wrapped.save_pretrained(folder)
    wrapped.unload()
    return folder


LORAS = [dict(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]),
         dict(r=16, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], use_rslora=True),
         dict(r=32, lora_alpha=32, target_modules=["gate_proj", "up_proj", "down_proj"]),
         dict(r=64, lora_alpha=20, target_modules="all-linear"),
         dict(r=8, lora_alpha=8, target_modules=["k_proj", "down_proj", "o_proj"], alpha_pattern={"down_proj": 2},
              rank_pattern={"o_proj": 3, "layers.1.mlp.down_proj": 5}),
         dict(r=4, lora_alpha=4, target_modules=["q_proj", "v_proj"], rank_pattern={"^model.layers.1.self_attn.q_proj": 6},
              alpha_pattern={"model.layers.0.self_attn.v_proj": 12})]


@lru_cache
def peft_models(kind):
    """-> our model, the folders of its adapters, and per adapter (None first) PEFT's logits and greedy tokens for a few prompts."""
    peft, tmp = pytest.importorskip("peft", reason="peft is not installed"), Path(tempfile.mkdtemp())
    family, settings = dict(gpt2=("gpt2", {}), llama=("llama", dict(num_key_value_heads=2)), wide=("llama", dict(head_dim=20)))[kind]
    theirs, folder = hf_folder(tmp / "base", family, **settings)
    loras = [dict(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True), dict(r=9, lora_alpha=6, target_modules="all-linear",
                                                                                     fan_in_fan_out=True)] if family == "gpt2" else LORAS
    folders, answers = [peft_folder(tmp, theirs, i, **lora) for i, lora in enumerate(loras)], []
    prompts = [torch.randint(0, 131, (n,), generator=torch.Generator().manual_seed(n)) for n in (40, 7)]
    for adapter in (None, *folders):
        m = peft.PeftModel.from_pretrained(theirs, adapter) if adapter else theirs
        with torch.no_grad():
            logits = m(prompts[0][None]).logits[0]
            tokens = [m.generate(input_ids=p[None], attention_mask=torch.ones_like(p[None]), max_new_tokens=10, do_sample=False,
                                 eos_token_id=None, pad_token_id=0)[0, len(p):].tolist() for p in prompts]
        answers.append((logits, tokens))
        if adapter:
            m.unload()
    return GPT.from_pretrained(folder), folders, prompts, answers


@pytest.mark.parametrize("kind", ["llama", "wide", "gpt2"])
def test_merged_weights_give_pefts_logits(kind):
    ours, folders, prompts, answers = peft_models(kind)
    for folder, (logits, _) in zip(folders, answers[1:]):
        merged = ours.merged(Adapter.from_pretrained(folder, ours.config))
        assert torch.allclose(merged.logits(prompts[0]), logits, atol=1e-4, rtol=0)
        assert (merged.logits(prompts[0]) - answers[0][0]).abs().max() > 0.1
    assert torch.allclose(ours.logits(prompts[0]), answers[0][0], atol=1e-4, rtol=0), "the base is untouched"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_of_a_tied_model_merges_its_own_layers(rank):
    """The last one has a head, and no embedding that it is tied to."""
    stage = GPT.from_preset(GPTConfig(**SMALL | dict(tied=True)), world=kernels.World(pp=2, rank=rank))
    adapter = random_adapter(4)(stage.config, torch.float32)
    merged = stage.merged(adapter)
    for i in stage.config.layers:
        old, new = (m.blocks[i].preproj.weight.to_dense() for m in (stage, merged))
        a, b = adapter.factors(i, "preproj", "self_attn.q_proj")
        assert torch.allclose(new[:len(b.T)], old[:len(b.T)] + b.T @ a, atol=1e-5) and not torch.equal(new, old)
        assert merged.blocks[i].ffn_ln1.weight is stage.blocks[i].ffn_ln1.weight


@pytest.mark.parametrize("lora", ["batched", "bmm", "merge"])
@pytest.mark.parametrize("kind, scheduler, alloc", [*(("llama", name, alloc) for name, alloc in zip(NAMES, ["reserve", "grow"] * 3)),
                                                    ("wide", "sarathi", "grow"), ("gpt2", "sarathi", "reserve")])
def test_a_batch_of_mixed_adapters_gives_pefts_tokens_and_logits(kind, scheduler, alloc, lora):
    """Two prompts for no adapter and for each of many ranks and modules, all at once, chunks beside decodes."""
    ours, folders, prompts, answers = peft_models(kind)
    engine = Engine(ours, scheduler=scheduler, chunk=16, tile=8, max_batch=5, n_page=1500, alloc=alloc, lora=lora)
    for i, folder in enumerate(folders):
        engine.add_adapter(f"a{i}", folder)
    names = [None, *(f"a{i}" for i in range(len(folders)))]
    seen = sampled_from(engine)
    got = engine.generate([p.tolist() for _ in names for p in prompts], 10, [name for name in names for _ in prompts])
    assert got == [tokens for _, both in answers for tokens in both]
    for i, (logits, _) in enumerate(answers):
        assert torch.allclose(seen[i * len(prompts)][0], logits[-1], atol=1e-4, rtol=0)
    engine.pool.check()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_saved_adapter_gives_the_same_logits_here_and_in_peft(family, tmp_path):
    """Other ranks on other modules; the factors come back as they were, bit by bit."""
    theirs, folder = hf_folder(tmp_path / "base", family, **dict(llama=dict(num_key_value_heads=2), gpt2={})[family])
    ours, tokens = GPT.from_pretrained(folder), torch.arange(40)
    ranks = {m: 3 + i for i, m in enumerate(m for op in ours.config.operators.values() for m in op.modules)}
    adapter = Adapter(ours.config, ranks, torch.float32)
    for op, sites in adapter.sites.items():
        for f in (f for layer in range(2) for module in sites for f in adapter.factors(layer, op, module)):
            f.normal_(0, 0.3)
    adapter.save_pretrained(tmp_path / "saved")
    assert torch.equal(Adapter.from_pretrained(tmp_path / "saved", ours.config).planes, adapter.planes)
    peft, before = pytest.importorskip("peft", reason="peft is not installed"), ours.logits(tokens)
    with torch.no_grad():
        logits = peft.PeftModel.from_pretrained(theirs, tmp_path / "saved")(tokens[None]).logits[0]
    assert torch.allclose(ours.merged(adapter).logits(tokens), logits, atol=1e-4, rtol=0) and (logits - before).abs().max() > 0.1


def strong(rank, seed, modules=None):
    """A source of adapters, as random_adapter, that change most tokens."""
    def make(config, *more, **options):
        adapter = random_adapter(rank, seed, modules)(config, *more, **options)
        adapter.planes[:, 1] *= 10
        return adapter
    return make


def adapters_for(m, ranks):
    """{name: Adapter} of these ranks on changing modules."""
    modules = [None, ["q_proj", "v_proj"], ["o_proj", "down_proj", "k_proj"], ["gate_proj", "up_proj"]]
    return {f"a{i}": strong(rank, i, modules[i % 4])(m.config, m.dtype) for i, rank in enumerate(ranks)}


def learn(engine, adapters):
    """Let requests ask for these, {name: Adapter}."""
    for name, adapter in adapters.items():
        engine.add_adapter(name, lambda config, adapter=adapter, **_: adapter)


def test_an_order_of_ones_own_is_rearranged_by_the_options_and_counts_in_every_lane():
    class Backwards(sarathi.Order):
        def __init__(self):  # nobody needs to call ours
            pass

        def offer(self, running, queue):
            return [*queue][::-1]
    adapters = adapters_for(small(), [4, 4])
    engine = Engine(small(), order=Backwards(), lora="merge", max_batch=2, n_page=200)
    learn(engine, adapters)
    requests = serve(engine, [Request(prompt(12, seed=i), 5, f"a{i % 2}") for i in range(6)])
    assert all(r.output == greedy(small().merged(adapters[r.adapter]), r.prompt, 5) for r in requests), "two adapters in one batch"
    assert [r.id for r in sorted(requests, key=lambda r: r.times[0])] == [5, 3, 1, 4, 2, 0], "backwards, but one adapter after the other"
    line = Pipeline(a6000(), 2, order=Backwards(), max_batch=1, n_page=500)
    started = sorted(serve(line, [Request([1] * 20, 5) for _ in range(6)]), key=lambda r: r.times[0])
    assert [r.id for r in started] == [5, 4, 3, 2, 1, 0]
    with pytest.raises(ValueError, match="order = 'lifo': one of 'fcfs', 'lcfs'"):
        Engine(small(), order="lifo")


def test_adapters_and_requests_compete_for_a_small_pool_and_nobody_loses():
    """1000 requests for 300 adapters on a pool that holds a few of them: every page is accounted for after every step, no adapter is
    evicted in use, everybody ends, in order, with the tokens of the merged model."""
    rng, m = random.Random(0), GPT.from_preset(GPTConfig(**SMALL | {"n_layer": 1, "n_embd": 32, "n_inner": 48}), seed=1)
    adapters = adapters_for(m, [rng.choice([1, 2, 4, 8]) for _ in range(300)])
    engine = Engine(m, scheduler="sarathi_serve", chunk=64, max_batch=12, tile=TILE, alloc="grow", n_page=300)
    learn(engine, adapters)
    evict, names, evicted = engine.adapters.evict, [None, *adapters], []

    def watched():
        before = dict(engine.adapters.resident)
        done = evict()
        gone = set(before) - set(engine.adapters.resident)
        assert not gone & {r.adapter for r in engine.running}, "evicted in use"
        evicted.extend(gone)
        return done
    engine.adapters.evict = watched
    requests = [Request(prompt(rng.choice([1, 3, 10, 40]), seed=i), rng.randint(1, 12), rng.choice(names)) for i in range(1000)]
    for i, r in enumerate(requests):
        engine.add(r)
        if i % 3 == 0:
            engine.step()
            engine.pool.check()
    finish(engine)
    assert all(r.state == "length" for r in requests) and len(evicted) > 100 and sum(r.n_preempted for r in requests) > 10
    starts = [r.times[0] for r in requests]
    assert sum(a > b for a, b in zip(starts, starts[1:])) < 300, "nobody waits for long behind those who came later"
    while evict():
        pass
    assert engine.pool.n_free == 300, "nobody uses an adapter any more"
    for r in rng.sample(requests, 25):
        assert r.output == greedy(m if r.adapter is None else m.merged(adapters[r.adapter]), r.prompt, r.max_new_tokens)


@pytest.mark.parametrize("alloc", ["reserve", "grow"])
def test_two_pools_of_a_fixed_split_and_what_finds_no_page(alloc):
    adapters = adapters_for(small(), [8, 4, 8, 2, 8, 8])
    engine = Engine(small(), alloc=alloc, n_page=400, adapter_pages=150, max_batch=3, chunk=32, tile=TILE)
    learn(engine, adapters)
    requests = serve(engine, [Request(prompt(30, seed=i), 8, f"a{i % 6}") for i in range(12)])
    assert engine.pool.n_free == 250 and engine.adapters.pool.n_free < 150, "adapters stay, in their own part"
    for r in requests[:6]:
        assert r.output == Engine(small().merged(adapters[r.adapter]), n_page=100).generate([prompt(30, seed=r.id)], 8)[0]


@pytest.mark.parametrize("order, first", [("fcfs", "01234"), ("lcfs", "76543")])
def test_adapters_of_the_queue_are_copied_in_ahead_and_only_into_free_pages(order, first):
    """Those that are next in the order of the queue, whatever that is."""
    for n_page, expected in ((3000, 1 + sarathi.PREFETCH), (64 + 60, 1)):  # a rank of 8 takes 64 pages here
        engine = Engine(small(), n_page=n_page, max_batch=1, alloc="grow", order=order)
        for i in range(8):
            engine.add_adapter(f"a{i}", random_adapter(8, i))
            engine.add(Request(prompt(20), 4, f"a{i}"))
        engine.step()
        assert list(engine.adapters.resident) == [f"a{i}" for i in first[:expected]]
        finish(engine)


@pytest.mark.parametrize("model", [lambda: small(dtype=torch.float64), lambda: GPT(small().config).eval()], ids=["float64", "trainable"])
def test_adapters_in_a_model_whose_weights_are_not_packed(model):
    m = model()
    engine = Engine(m, n_page=100)
    engine.add_adapter("x", random_adapter(4))
    merged = m.merged(engine.adapters.known["x"])
    assert engine.generate([prompt(12)], 6, adapter="x") == Engine(merged, n_page=100).generate([prompt(12)], 6)


def test_a_batch_without_adapters_pays_nothing(monkeypatch):
    monkeypatch.setattr(kernels, "lora", lambda *_: pytest.fail("called"))
    monkeypatch.setattr(model_py, "lora", lambda *_: pytest.fail("called"))
    engine = Engine(small(), n_page=200, max_batch=2)
    engine.add_adapter("a", random_adapter(8))
    assert engine.generate([prompt(9)], 4) == [naive(9, 4)] and not engine.adapters.resident


# ---- orders

def order_of(order, adapters, running=()):
    """The ids of a queue of requests with these adapters, in the order that they would be started in."""
    def make(i, a):
        r = Request([1], 1, a, arrival=float(i))
        r.id = i
        return r
    engine = SimpleNamespace(running=[make(-1, a) for a in running], waiting=deque(make(i, a) for i, a in enumerate(adapters)))
    return [r.id for r in order.queue(engine)]


def test_orders_of_the_queue():
    fcfs = Order()
    assert order_of(fcfs, "abc") == [0, 1, 2] and order_of(LastCome(), "abc") == [2, 1, 0]
    assert order_of(Cluster(fcfs, 2), "abcabc") == [0, 1, 3, 4, 2, 5], "two adapters, then who else uses them, then the rest"
    assert order_of(Cluster(fcfs, 2), "abcabc", running="cb") == [1, 2, 4, 5, 0, 3]
    assert order_of(Cluster(LastCome(), 1), "abab") == [3, 1, 2, 0]
    bare, *queue = (Request([1], 1, name) for name in (None, "a", "b", None, "a"))
    order = Cluster(fcfs, 1).queue(SimpleNamespace(running=[bare], waiting=queue))
    assert [id(r) for r in order] == [id(queue[i]) for i in (0, 2, 3, 1)], "who needs no adapter is not counted as one"
    one = OneAdapter(fcfs)
    assert order_of(one, "abab") == [0, 2] and order_of(one, "abab", running="b") == [1, 3]
    assert order_of(one, "ababbb", running="b") == [1, 3, 4, 5], "newcomers join the batch"
    assert order_of(one, "a" * 30 + "b", running="b") == [30] and order_of(one, "a" * 31 + "b", running="b") == [], "until too many others wait"


def test_early_abort_gives_up_what_is_late_and_serves_the_newest_under_overload():
    """One request runs at a time and takes 1 s, two come each second: first come first served is soon always late."""
    def serve(**options):
        engine = Simulator(SimpleCost(), max_batch=1, n_page=500, **options)
        requests = add(engine, [Request([1], 1, arrival=0.5 * i) for i in range(100)])
        assert {(r, r.state) for r in engine.run()} == {(r, r.state) for r in requests} and all(r.done for r in requests), "all ends are told"
        return [r for r in requests if r.times and r.ttft <= 6], [r for r in requests if r.state == "abort"]
    good, aborted = {}, {}
    for name, options in dict(fcfs={}, lcfs=dict(order="lcfs"), abort=dict(slo=6.0)).items():
        good[name], aborted[name] = map(len, serve(**options))
    assert good["fcfs"] < 20 < good["lcfs"] <= good["abort"] and not aborted["fcfs"] and not aborted["lcfs"]
    assert good["abort"] + aborted["abort"] == 100, "what is served is served in time"
    r, engine = Request([1], 1), Simulator(SimpleCost(), max_batch=1, n_page=500, slo=0.1)
    engine.add(r)
    assert engine.run() == [r] and r.state == "length", "who has not waited at all is not late, however short the time"


# ---- fairness

def got(requests, client, weight=2.0):
    """What a client was given: prompts that were started, and new tokens, by a ledger of our own."""
    return sum((len(r.prompt) if r.state == "running" or r.n_past or r.times else 0) + weight * len(r.times) for r in requests if r.client == client)


def flooded(clients, **options):
    """A simulated engine with 300 requests of client a, then some of the others: clients {name: (how many, prompt, new tokens)}."""
    engine = Simulator(SimpleCost(), max_batch=4, n_page=2000, chunk=64, tile=TILE, **options)
    requests = add(engine, [Request([1] * P, D, client=c) for c, (n, P, D) in clients.items() for _ in range(n)])
    return engine, requests


@pytest.mark.parametrize("more", [{}, dict(order="lcfs"), dict(cluster=1), dict(slo=1e6), dict(alloc="grow")])
@pytest.mark.parametrize("scheduler", NAMES)
def test_a_flood_of_one_client_does_not_starve_the_others(scheduler, more):
    """[VTC Theorem 4.4] While two clients wait, what they got differs by at most 2 max(prompt, weight * tokens of a batch)."""
    clients, bound = dict(a=(300, 20, 10), b=(30, 60, 30), c=(60, 5, 20)), 2 * max(60, 2 * 4 * 30)
    worst = {}
    for fair in (0.0, 2.0):
        (engine, requests), worst[fair] = flooded(clients, scheduler=scheduler, fair=fair, **more), 0.0
        engine._arrive()
        while len(engine.waiting.by_client) == 3 and (fair or worst[fair] <= bound):
            engine.step()
            each = [got(requests, c) for c in clients]
            worst[fair] = max(worst[fair], max(each) - min(each))
    assert worst[2.0] <= bound < worst[0.0]
    finish(engine)
    assert all(r.state == "length" for r in requests)


def test_a_newcomer_is_served_at_once_and_whoever_was_away_has_no_credit():
    engine, requests = flooded(dict(a=(300, 20, 10)), fair=2.0, scheduler="orca")
    late = [Request([1] * 20, 10, client="b", arrival=200.0) for _ in range(50)]
    add(engine, late)
    while not late[0].done:
        engine.step()
    assert sum(not r.done for r in requests) > 200 and late[0].ttft < 15, "before some two hundred that came earlier"
    before = got(requests, "a")
    while "b" in engine.waiting.by_client:
        engine.step()
    assert got(late, "b") - (got(requests, "a") - before) < 480, "its share from now on, and no more"


def test_clients_are_remembered_as_long_as_it_makes_a_difference_and_then_forgotten():
    engine, requests = flooded(dict(a=(100, 20, 10), b=(100, 20, 10)), fair=2.0, scheduler="orca")
    add(engine, [Request([1] * 20, 10, client=f"c{i}", arrival=5.0 * i) for i in range(300)])
    order, most = engine.order, 0
    for _ in steps(engine):
        most = max(most, len(order.counter) - len(engine.waiting.by_client))
    assert most < 20, "clients that neither wait nor run"
    for name in ("x", "y", "z"):
        engine.add(Request([1] * 20, 10, client=name, arrival=engine.clock.now()))
        engine.run()
    assert len(order.counter) + len(order.charged) + len(order.known) < 20


def test_the_counters_are_what_was_given_through_preemptions_and_aborts():
    engine = Engine(small(), scheduler="sarathi_serve", chunk=32, max_batch=5, tile=TILE, alloc="grow", n_page=80, fair=2.0)
    requests = add(engine, [Request(prompt(20 + i), 12, client="ab"[i % 2]) for i in range(20)])
    cut_short = 0
    for _ in steps(engine):
        if engine.n_steps % 5 == 0:
            victim = min(engine.running, key=lambda r: len(r.times), default=None)
            cut_short += victim is not None and 0 < victim.n_past < len(victim.prompt)
            if victim:
                engine.abort(victim.id)
        engine.order._charge()
        for client in engine.order.counter:  # not forgotten
            mine = [r for r in requests if r.client == client and (r.times or r.n_past or r.n_preempted or r.state == "running")]
            prompts = sum(r.n_past if r.state == "abort" and not r.times else len(r.prompt) for r in mine)
            assert engine.order.counter[client] == prompts + 2 * sum(len(r.times) for r in mine)
    assert sum(r.n_preempted for r in requests) > 3 and cut_short and not engine.order.charged
    for i, r in enumerate(requests):
        assert r.output == naive(20 + i, 12)[:len(r.output)]


def test_fair_turns_by_hand():
    order = sarathi.Fair(Order(), 2.0)
    queue = sarathi.Queue(Request([1] * n, client=c) for c, n in [("a", 10), ("a", 10), ("b", 30), ("a", 10), ("b", 5), ("a", 1)])
    for r in queue:
        r.state = "waiting"
    engine = SimpleNamespace(running=[], waiting=queue)
    turns = lambda: [(r.client, len(r.prompt)) for r in order.queue(engine)]
    assert turns() == [("a", 10), ("b", 30), ("a", 10), ("a", 10), ("a", 1), ("b", 5)] == turns(), "as if each was started; asking changes nothing"
    reverse = sarathi.Fair(LastCome(), 2.0)
    assert [len(r.prompt) for r in reverse.queue(engine)] == [1, 5, 10, 30, 10, 10], "of each client the last to come"
    a, b = list(queue)[0], list(queue)[2]
    for r in (a, b):
        queue.remove(r)
        r.state = "running"
    b.times = [0.0, 0.0]
    assert turns() == [("a", 10), ("a", 10), ("a", 1), ("b", 5)] and order.counter == {"a": 10, "b": 34}


def test_who_had_much_and_left_has_not_forgotten_it_when_he_returns():
    engine, requests = flooded(dict(a=(1, 400, 1), b=(100, 10, 5)), fair=2.0, scheduler="orca")
    add(engine, [Request([1] * 10, 5, client=client, arrival=arrival) for client, arrival in (("c", 10.0), ("a", 20.0))])
    *_, other, again = engine.requests.values()
    while not again.done:
        engine.step()
    assert other.ttft < 10 and got(requests, "b") >= 400, "b had the turns until it had as much as a"


@pytest.mark.parametrize("options", [dict(scheduler=name) for name in NAMES] + [dict(lora="merge"), dict(cluster=1, order="lcfs"), dict(slo=1e6)])
def test_fairness_changes_who_goes_first_and_no_token(options):
    engine = Engine(small(), **dict(chunk=32, max_batch=3, tile=TILE, alloc="grow", n_page=140, fair=1.0) | options)
    requests = serve(engine, [Request(prompt(10 + i), 8, client=c) for i, c in enumerate(["flood"] * 8 + ["light", None])])
    assert [r.output for r in requests] == [naive(10 + i, 8) for i in range(10)]
    assert max(requests[8].times[0], requests[9].times[0]) < max(r.times[0] for r in requests[:8]), "the last to come were not the last to start"


def test_a_pipeline_gives_up_by_the_clock_of_the_lane_whose_turn_it_is_and_says_so():
    """A second per iteration of a lane. Lane 0 is always one ahead: by its clock who has just come would be late."""
    line = Pipeline(SlowStages(), 2, max_batch=1, n_page=500, slo=0.9, scheduler="orca")
    long, late = Request([1], 9), Request([1], 3, arrival=2.9)
    add(line, [long, late])
    assert set(line.run()) == {long, late} and late.state == "length", "lane 1 had a slot for it after 0.1 s"
    line = Pipeline(SlowStages(), 2, max_batch=1, n_page=500, slo=0.2, scheduler="orca")
    requests = add(line, [Request([1], 1), Request([1], 2), Request([1], 1, arrival=1.6)])
    told = []
    assert set(line.run(told.append)) == set(requests), "lane 1 gave up the last of all"
    assert [(e.request, e.finished) for e in told if not e.tokens] == [(requests[2], "abort")] and line.n_ended == dict(length=2, abort=1)


def test_a_pipelines_lanes_share_one_account():
    line = Pipeline(a6000(), 3, scheduler="sarathi", max_batch=2, n_page=1000, fair=2.0)
    requests = add(line, [Request([1] * 40, 10, client=c) for c in ["a"] * 60 + ["b"] * 20])
    line.step()
    order, worst = line.lanes[0].order, 0
    while len(line.lanes[0].waiting.by_client) == 2:
        line.step()
        order._charge()
        assert order.counter == {c: got(requests, c) for c in "ab"}
        worst = max(worst, abs(got(requests, "a") - got(requests, "b")))
    assert worst <= 2 * 2 * 6 * 10


class SimpleCost(CostModel):
    """One second per iteration, whatever is in it."""

    def __init__(self):
        super().__init__(GPTConfig(**SMALL), torch.float32, (1e9, 0.5), "a clock")

    def time_of(self, entries, lora="batched"):
        return 1.0


class SlowStages(SimpleCost):
    """The same for a pipeline, whose messages take no time."""

    def send(self, N):
        return 0.0


# ---- what is wrong with an adapter

def write_adapter(folder, config, rank=4, modules=("self_attn.q_proj", "self_attn.v_proj")):
    """A PEFT folder as PEFT writes it, without PEFT."""
    tensors, sizes = {}, {m: (op.n_in, n) for op in config.operators.values() for m, (_, n, _) in op.modules.items()}
    for i in range(config.n_layer):
        for m in modules:
            path = f"base_model.model.model.layers.{i}.{m}"
            tensors[path + ".lora_A.weight"], tensors[path + ".lora_B.weight"] = torch.randn(rank, sizes[m][0]), torch.randn(sizes[m][1], rank)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(dict(peft_type="LORA", r=rank, lora_alpha=8)))
    return folder


A0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
BAD_ADAPTERS = DAMAGED | {
    f"'{A0}' is \\(4, 48\\).*expected \\(4, 64\\)": partial(edit, tensors=lambda t: t.update({A0: torch.ones(4, 48)})),
    f"'{A0}' is \\(4, 64\\).*expected \\(8, 64\\)": partial(edit, r=8), "lora_B.weight' is missing": partial(
        edit, tensors=lambda t: t.pop(A0.replace("lora_A", "lora_B"))),
    "layers.0.self_attn.q_proj': lora_A \\(4, 64\\) holds NaN": partial(edit, tensors=lambda t: t[A0].__setitem__((0, 0), float("nan"))),
    "conv.lora_A.weight' is no LoRA factor.*q_proj": partial(edit, tensors=lambda t: t.update({A0.replace("q_proj", "conv"): t[A0]})),
    "layers.7.*is no LoRA factor.*layers 0 .. 1": partial(edit, tensors=lambda t: t.update({A0.replace("layers.0", "layers.7"): t[A0]})),
    "lora_magnitude_vector.*is no LoRA factor": partial(edit, tensors=lambda t: t.update({A0.replace("lora_A.weight", "lora_magnitude_vector"): t[A0]})),
    "holds no LoRA factors": partial(edit, tensors=lambda t: t.clear()), "peft_type = 'IA3'": partial(edit, peft_type="IA3"),
    "init_lora_weights = 'pissa'": partial(edit, init_lora_weights="pissa"),
    "alora_invocation_tokens = \\[1\\]": partial(edit, alora_invocation_tokens=[1]),
    "use_dora = True": partial(edit, use_dora=True), "bias = 'all'": partial(edit, bias="all"),
    "r = 0": partial(edit, r=0), "r = 4.0: must be a positive whole": partial(edit, r=4.0),
    "must hold settings, not": lambda f: (f / "adapter_config.json").write_text("[1]"), "rank_pattern = .*by module": partial(
        edit, rank_pattern=["q_proj"]), "rank_pattern of 'q_proj' = 0": partial(edit, rank_pattern={"q_proj": 0}),
    "alpha_pattern of 'q_proj' = None": partial(edit, alpha_pattern={"q_proj": None}),
    "which is no pattern": partial(edit, rank_pattern={"(q_proj": 4}), "lora_alpha = None": partial(edit, lora_alpha=None)}


@pytest.mark.parametrize("message", BAD_ADAPTERS)
def test_a_bad_adapter_is_one_clear_sentence_and_its_neighbours_go_on(message, tmp_path):
    engine = Engine(small(), n_page=300, max_batch=2)
    engine.add_adapter("good", write_adapter(tmp_path / "good", small().config))
    request = Request(prompt(20), 6, "good")
    engine.add(request)
    engine.step()
    folder = write_adapter(tmp_path / "bad", small().config)
    BAD_ADAPTERS[message](folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        engine.add_adapter("bad", folder)
    with pytest.raises(KeyError, match="unknown adapter 'bad': one of good"):
        engine.add(Request([1], 1, "bad"))
    finish(engine)
    merged = small().merged(Adapter.from_pretrained(tmp_path / "good", small().config))
    assert request.output == Engine(merged, n_page=100).generate([prompt(20)], 6)[0]


def test_adapters_that_find_no_place_and_names_that_are_taken(tmp_path):
    engine = Engine(small(), n_page=200, max_batch=2)
    with pytest.raises(ValueError, match="adapter 'wide' takes 256 pages: there are 200"):
        engine.add_adapter("wide", random_adapter(32, modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    engine.add_adapter("a", random_adapter(20))
    with pytest.raises(ValueError, match="need 90 pages and adapter 'a' 160: the pool has 200"):
        engine.add(Request(prompt(80), 10, "a"))
    with pytest.raises(ValueError, match="adapter 'a': must be a new name"):
        engine.add_adapter("a", random_adapter(4))
    with pytest.raises(ValueError, match="unknown module 'x_proj': one of self_attn.q_proj"):
        engine.add_adapter("b", random_adapter(4, modules=["x_proj"]))
    with pytest.raises(ValueError, match="rank = 0"):
        random_adapter(0)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        engine.add_adapter("b", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="adapter 5: must be a PEFT folder or random_adapter"):
        engine.add_adapter("b", 5)
    assert list(engine.adapters.known) == ["a"]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("n_kv_head, n_inner", [(4, 192), (2, 160), (1, 70)])
def test_adapters_add_what_the_definition_says(n_kv_head, n_inner, dtype, tolerance, padded):
    """Decodes, verifications and chunks, with and without adapters, of ranks 1 to 128, in scattered pages."""
    config, rng = GPTConfig(**SMALL | dict(n_kv_head=n_kv_head, n_inner=n_inner)), np.random.default_rng(0)
    adapters = [random_adapter(rank, modules=m)(config) for rank, m in ((1, None), (8, ["down_proj", "q_proj"]), (16, None), (128, ["gate_proj"]),
                                                                       (64, ["k_proj", "up_proj", "o_proj"]), (32, None))]
    n_page, width = 6000, n_kv_head * 16
    kv, placed, g = torch.randn(2, n_page * n_kv_head, 16).to(dtype), [], torch.Generator().manual_seed(0)
    for adapter in adapters:
        placed.append(adapter.at(rng.choice(n_page, adapter.n_page, replace=False)))
    sizes = [(1, 0), (1, None), (1, 1), (3, 2), (1, 4), (8, 5), (40, 3), (70, None), (150, 5)]
    starts = np.cumsum([0, *(n for n, _ in sizes)])
    for name, op in config.operators.items():
        spans = [(start, n, placed[i][name]) for start, (n, i) in zip(starts.tolist(), sizes) if i is not None and name in placed[i]]
        l = kernels.Lora.of(spans, sum(n for n, _ in sizes if n <= kernels.FEW_ROWS), op.n_in, list(op.modules.values()), width, padded)
        x = (torch.randn(starts[-1], op.n_in, generator=g) / op.n_in ** 0.5).to(dtype)
        y = torch.randn(starts[-1], sum(n for _, n, _ in op.modules.values()), generator=g).to(dtype)
        expected = kernels.lora_ref(y.clone().float(), x.float(), kv.float(), l)
        error = (kernels.lora(y.clone(), x, kv, l).float() - expected).abs().max() / expected.abs().max()
        assert error < tolerance, (name, error)
        assert (expected - y.float()).abs().max() > 0.1


def test_the_adapter_used_longest_ago_gives_way_and_none_in_vain():
    engine = Engine(small(), n_page=400, adapter_pages=130, max_batch=1)  # room for two of 64 pages
    for name in "abc":
        engine.add_adapter(name, random_adapter(8))
    for name in "abac":
        engine.generate([prompt(5)], 1, adapter=name)
    assert list(engine.adapters.resident) == ["a", "c"]
    engine = Engine(small(), scheduler="orca", alloc="grow", n_page=200, max_batch=2)
    engine.add_adapter("a", random_adapter(8))
    engine.generate([prompt(5)], 1, adapter="a")
    first, _ = add(engine, [Request(prompt(90), 5), Request(prompt(115), 5)])
    engine.step()
    assert engine.running == [first] and "a" in engine.adapters.resident, "46 free pages and its 64 are too few for 115"


def test_a_twelfth_of_the_slo_is_kept_and_nobody_who_has_begun_is_given_up():
    for n, state in ((5, "length"), (6, "abort")):  # waits 4.75 or 5.75 seconds
        engine = Simulator(SimpleCost(), max_batch=1, n_page=500, slo=6.0)
        assert serve(engine, [Request([1], n), Request([1], 1, arrival=0.25)])[1].state == state
    engine = Simulator(SimpleCost(), scheduler="orca", max_batch=2, alloc="grow", n_page=60, slo=3.0)
    begun = serve(engine, [Request([1] * 20, 25), Request([1] * 20, 25)])
    assert sum(r.n_preempted for r in begun) > 0 and {r.state for r in begun} == {"length"}


def test_a_folder_and_its_adapter_on_the_command_line(cli, tmp_path):
    small().save_pretrained(tmp_path / "model")
    adapter = write_adapter(tmp_path / "adapter", small().config)
    said = cli("sarathi.py", "--model", str(tmp_path / "model"), "--tokens", "1,2,3", "--adapter", str(adapter), "--dtype", "float32",
               "--temperature", "0", "--max-new-tokens", "8", "--max-batch", "1")
    m = small().merged(Adapter.from_pretrained(adapter, small().config))
    assert said.status == 0 and [*map(int, said.out.split())] == greedy(m, [1, 2, 3], 8) != greedy(small(), [1, 2, 3], 8), said.err


def test_adapters_of_a_share_of_the_columns():
    """Of what is shared out by its input, a rank has B for some columns of y: not the first ones, though a page is as wide as y."""
    kv, x, y = torch.randn(2, 8, 64), torch.randn(1, 64), torch.randn(1, 64)
    f = kernels.Factors([kernels.Site(32, 32, 0, np.arange(4)[:, None], np.arange(4, 8)[:, None])], 1)
    l = kernels.Lora.of([(0, 1, f)], 1, 64, [(32, 32, 0)], 64)
    assert torch.allclose(kernels.lora(y.clone(), x, kv, l), kernels.lora_ref(y.clone(), x, kv, l), atol=1e-4)


# ---------------------------------------------------------------- 14. kernels in Triton

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU and not kernels.INTERPRET else "cpu")
TYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2) if DEVICE.type == "cuda" else (torch.float16, 4e-3)]  # type, tolerance
# the interpreter multiplies no bfloat16


KERNEL_TESTS = []


def kernel_test(f):
    """A test that launches kernels: on a GPU, or in the process that test_every_kernel_in_tritons_interpreter starts."""
    f.__test__ = GPU or kernels.INTERPRET
    KERNEL_TESTS.append(f"{Path(__file__).name}::{f.__name__}")
    return f


def pages_of(shapes, group, n_kv_head, scattered, generator, dtype=torch.float32):
    """Requests (n_past, n), few tokens first, laid out in a cache -> Pages as they are packed, attention_ref's tables, the rows of the cache. Where
    `scattered`, every second request's pages lie alone and in no order, between those of requests that lie together. Where n is a
    tree's shape, its nodes are the tokens."""
    trees = [sarathi.Tree.of(n).parents if isinstance(n, tuple) else None for _, n in shapes]
    shapes = [(n_past, len(tree) if tree else n) for (n_past, n), tree in zip(shapes, trees)]
    shapes, trees = zip(*sorted(zip(shapes, trees), key=lambda request: request[0][1]))
    tables, strides, start = [], [], 0
    for i, (n_past, n) in enumerate(shapes):
        alone, room = scattered and i % 2 == 0, n_past + n + 3
        rows = start + (generator.permutation(room) * n_kv_head if alone else np.arange(room))
        tables.append(rows)
        strides.append(1 if alone else room)
        start += room * n_kv_head
    past, n = zip(*shapes)
    pages = kernels.Pages.of(tables, strides, past, n, group, dtype, trees)
    expected = [(torch.from_numpy(t[:a + b, None] + s * np.arange(n_kv_head)), b, *([tree] if tree else []))
                for t, s, a, b, tree in zip(tables, strides, past, n, trees)]
    return pages, expected, start


def placed(pages):
    """Pages, or LoraPages, where the kernels read them."""
    return kernels.upload([pages], DEVICE)[1][0]


TREES = [(70, (3, 2, 2)), (63, (2, 2)), (5, (3, 2, 2)), (0, (1, 3)), (130, (4, 4, 3)), (64, (2, 1)), (9, 1), (40, 3), (3, 40)]  # among others
RAGGED = [(0, 1), (1, 1), (63, 1), (64, 1), (65, 1), (200, 1), (31, 2), (62, 3), (0, 8), (120, 8), (0, 9), (7, 64), (64, 65), (130, 31)]


@kernel_test
@pytest.mark.parametrize("H, Hk, D, scattered, dtype, tolerance, n_split", [(*heads, *TYPES[i % 2], 4 - 3 * (i // 2 % 2)) for i, heads in enumerate([
    (6, 2, 16, None), (2, 2, 64, True), (8, 1, 96, True), (8, 2, 16, True), (3, 3, 32, False), (6, 1, 80, False), (4, 2, 128, True), (72, 1, 16, False),
    (2, 2, 64, None), (6, 2, 16, True)])])
def test_triton_attention_over_pages(H, Hk, D, scattered, dtype, tolerance, n_split):
    """Decodes, verifications and chunks of ragged sizes; contexts that end before, on and behind a block's and a split's border; trees.
    What no request has written is NaN."""
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    shapes = [(5, 1), (70, 3), (20, 9)] if H == 72 else RAGGED[::3] if D >= 80 else TREES if scattered is None else RAGGED
    pages, tables, n_row = pages_of(shapes, H // Hk, Hk, scattered is not False, rng, dtype)
    N, owned = sum(n for _, n, *_ in tables), torch.cat([rows.flatten() for rows, *_ in tables])
    kv = torch.full((2, n_row, D), torch.nan, dtype=dtype)
    kv[:, owned] = torch.randn(2, len(owned), D, generator=generator).to(dtype)
    q = torch.randn(N, H, D, generator=generator).to(dtype)
    ours = kernels.attention_pages(q.to(DEVICE), kv.to(DEVICE), placed(pages), Hk, n_split).cpu()
    assert torch.allclose(ours.float(), attention_ref(q, kv, tables).float(), atol=tolerance, rtol=tolerance)


@kernel_test
@pytest.mark.parametrize("n_split, chunk", [(1, 40), (2, 40), (2, (4, 3, 2))])
def test_triton_attention_of_a_padded_batch(n_split, chunk):
    """Rows, tiles and requests of nobody change nothing, and their keys and values go to the page behind all others."""
    pages, tables, n_row = pages_of([(70, 1), (3, 2), (10, chunk)], 2, 2, True, np.random.default_rng(1))
    assert len(pages.trees) == len(pages.padded(64, 4, True, n_row).trees) == 0 or chunk != 40, "a launch that knows of no tree"
    pages = placed(pages.padded(64, 4, True, n_row))
    qkv, kv = torch.randn(64, 8 * 16, device=DEVICE), torch.randn(2, n_row + 2, 16, device=DEVICE)
    before, written = kv.clone(), torch.cat([rows[-n:].flatten() for rows, n, *_ in tables])
    q = kernels.rotate_write(qkv, None, kv, pages, 4, 2)
    assert set((kv != before).any(-1).any(0).nonzero()[:, 0].tolist()) == {*written.tolist(), n_row, n_row + 1}
    ours, N = kernels.attention_pages(q, kv, pages, 2, n_split).cpu(), sum(n for _, n, *_ in tables)
    assert torch.allclose(ours[:N], attention_ref(q[:N].cpu(), kv.cpu(), tables), atol=1e-5)


@kernel_test
@pytest.mark.parametrize("dtype, tolerance", TYPES)
@pytest.mark.parametrize("H, Hk, D, rotary", [(4, 4, 64, True), (8, 2, 80, True), (71, 1, 16, True), (5, 5, 96, False), (1, 1, 128, True)])
def test_triton_rotate_and_write(H, Hk, D, rotary, dtype, tolerance):
    pages, tables, n_row = pages_of([(4, 1), (0, 3), (9, 20)], H // Hk, Hk, True, np.random.default_rng(2))
    qkv = torch.randn(24, (H + 2 * Hk) * D).to(dtype)
    rope = kernels.rope_angles(torch.randint(0, 500, (24,)), 0.9 ** torch.arange(D // 2), dtype) if rotary else None
    ours, theirs = torch.full((2, 2, n_row, D), 7.0, dtype=dtype)
    q_ref = kernels.rotate_write_ref(qkv, rope, theirs, kernels.upload([pages], torch.device("cpu"))[1][0], H, Hk)
    ours, rope = ours.to(DEVICE), rope and tuple(x.to(DEVICE) for x in rope)
    q = kernels.rotate_write(qkv.to(DEVICE), rope, ours, placed(pages), H, Hk)
    assert torch.allclose(q.cpu().float(), q_ref.float(), atol=tolerance, rtol=tolerance)
    assert torch.allclose(ours.cpu().float(), theirs.float(), atol=tolerance, rtol=tolerance)
    assert (theirs != 7).any(-1).sum() == 2 * 24 * Hk, "each new token's rows, and no other"


@kernel_test
@pytest.mark.parametrize("dtype, tolerance", TYPES)
@pytest.mark.parametrize("C", [1, 63, 64, 65, 1600])
def test_triton_norms_and_activations(C, dtype, tolerance):
    x, y, h = (torch.randn(5, n).to(dtype).to(DEVICE) for n in (C, C, 2 * C))
    weight, bias = torch.randn(C, device=DEVICE).to(dtype), torch.randn(C, device=DEVICE).to(dtype)
    close = lambda a, b: torch.allclose(a.float(), b.float(), atol=4 * tolerance, rtol=2 * tolerance)
    for b in (None, bias):
        for other in (None, y):
            for ours, theirs in zip(kernels.add_norm(x, other, weight, b, 1e-5), kernels.add_norm_ref(x, other, weight, b, 1e-5)):
                assert close(ours, theirs)
    assert close(kernels.activate(h, True), kernels.activate_ref(h, True))
    assert close(kernels.activate(h, False), kernels.activate_ref(h, False))


def adapters_of(shapes, n_in, n_outs, width, generator):
    """Requests of n rows with these ranks of an operator's modules (0: that module has no adapter; None: none has), their A and B
    scattered -> spans, columns as Lora has them; kv (2, pages, width) with what no adapter has written NaN; the last request's
    adapter is the first one's, if they have the same ranks."""
    pages = -(-np.array([n_in, *n_outs]) // width)
    columns = [(sum(n_outs[:i]), n, sum(pages[1:i + 1])) for i, n in enumerate(n_outs)]
    n_page = 3 + sum(max(sum(ranks) * pages[0], np.dot(ranks, pages[1:])) for n, ranks in shapes if ranks)
    free, kv = [list(generator.permutation(n_page)) for plane in range(2)], torch.full((2, n_page, width), torch.nan)
    take = lambda plane, rank, m: np.array([free[plane].pop() for i in range(rank * m)]).reshape(rank, m)
    spans, start = [], 0
    for n, ranks in shapes:
        if ranks:
            sites = [kernels.Site(*column, take(0, r, pages[0]), take(1, r, m)) for r, m, column in zip(ranks, pages[1:], columns) if r]
            for s in sites:
                for plane, rows, length in ((0, s.a, n_in), (1, s.b, s.n_out)):
                    full = generator.normal(size=(len(rows), length)) / (length if plane == 0 else len(rows)) ** 0.5
                    full = np.pad(full, ((0, 0), (0, rows.shape[1] * width - length)))
                    kv[plane, rows] = torch.from_numpy(full).float().view(*rows.shape, width)
            spans.append((start, n, kernels.Factors(sites, sum(pages[1:]))))
        start += n
    if shapes[0][1] == shapes[-1][1]:
        spans[-1] = (*spans[-1][:2], spans[0][2])
    return spans, columns, kv


def rows_of(shapes, n_in, n_outs, dtype):
    """y and x for adapters_of."""
    return (torch.randn(sum(n for n, _ in shapes), m).to(dtype) for m in (sum(n_outs), n_in))


@kernel_test
@pytest.mark.parametrize("n_in, n_outs, width, dtype, tolerance, n_split", [
    (64, (64, 64, 64), 64, *TYPES[0], 2), (240, (240, 80, 80), 80, *TYPES[1], 0), (100, (170, 170), 48, *TYPES[0], 0), (200, (72,), 72, *TYPES[1], 2)])
def test_triton_adapters_of_any_rank_and_size(n_in, n_outs, width, dtype, tolerance, n_split):
    """Decodes, verifications and chunks, with an adapter or none, of all modules or some, their ranks alike or not: heads alone and
    grouped, rows that end inside a page. The padded baseline as well."""
    sizes = [(1, 8), (1, 0), (1, 1), (1, 128), (1, 16), (2, 16), (8, 32), (9, 64), (16, 0), (20, 32), (65, 1), (70, 128), (130, 8)]
    has = [(1, 1, 1), (1, 0, 1), (0, 1, 1), (0, 0, 1)]
    ranks = lambda i, r: tuple(h * rank for h, rank in zip(has[i % 4], (r, 1 + r // 2, r)))[-len(n_outs):]
    shapes = [(n, ranks(i, r) if r else None) for i, (n, r) in enumerate(sizes)]
    spans, columns, kv = adapters_of(shapes, n_in, n_outs, width, np.random.default_rng(0))
    (y, x), kv = rows_of(shapes, n_in, n_outs, dtype), kv.to(dtype)
    padded = kernels.Lora.of(spans, 16, n_in, columns, width, bmm=True)
    expected = kernels.lora_ref(y.to(torch.float32, copy=True), x.float(), kv.float(), padded)
    pages = placed(kernels.LoraPages.of(spans, columns, width, dtype))
    assert len(pages.table) == sum(f.listed[0].size for _, _, f in spans[:-1]), "an adapter that two requests use is listed once"
    ours = kernels.lora_pages(y.to(DEVICE, copy=True), x.to(DEVICE), kv.to(DEVICE), pages, n_split)
    theirs = kernels.lora(y.to(DEVICE, copy=True), x.to(DEVICE), kv.to(DEVICE), padded)
    for result in (ours, theirs):
        assert torch.allclose(result.cpu().float(), expected, atol=tolerance, rtol=tolerance)


@kernel_test
def test_triton_adapters_of_a_padded_batch():
    """Tiles of requests that a captured graph carries along without an adapter change nothing, and rows of no request stay."""
    shapes = [(1, (8, 0)), (3, (1, 16)), (70, (16, 16))]
    spans, columns, kv = adapters_of(shapes, 40, (40, 16), 16, np.random.default_rng(1))
    y, x = rows_of([*shapes, (5, None)], 40, (40, 16), torch.float32)
    expected = kernels.lora_ref(y.clone(), x, kv, kernels.Lora.of(spans, 4, 40, columns, 16))
    pages = placed(kernels.LoraPages.of(spans, columns, 16, torch.float32).padded(len(y), 8, True))
    assert torch.allclose(kernels.lora(y.to(DEVICE), x.to(DEVICE), kv.to(DEVICE), pages).cpu(), expected, atol=1e-5)


@kernel_test
@pytest.mark.parametrize("dtype, tolerance", TYPES)
def test_triton_adapters_that_devices_share_out(dtype, tolerance):
    """Two devices, each with half of A's rows, odd ranks filled up, gather x A; or each with half of x, and they add it up. Both ways
    every row of x A B is the definition's [S-LoRA §6]."""
    shapes = [(1, (8, 1, 3)), (1, None), (3, (1, 0, 16)), (20, (16, 16, 33)), (9, (0, 65, 7))]
    n_in, n_outs, width = 100, (64, 32, 32), 16
    spans, columns, kv = adapters_of(shapes, n_in, n_outs, width, np.random.default_rng(2))
    (y, x), kv = rows_of(shapes, n_in, n_outs, dtype), kv.to(dtype)
    expected = kernels.lora_ref(y.to(torch.float32, copy=True), x.float(), kv.float(), kernels.Lora.of(spans, len(shapes), n_in, columns, width))

    def half(site, i):
        k = -(-len(site.a) // 2)
        return site._replace(a=np.resize(site.a[i * k:(i + 1) * k] if i * k < len(site.a) else site.a, (k, site.a.shape[1])))
    halves = [[(start, n, kernels.Factors([half(s, i) for s in f.sites], len(f.n_bag))) for start, n, f in spans] for i in range(2)]
    sides = [x * (torch.arange(n_in) % 2 == i) for i in range(2)]
    for shares, xs, join in ((halves, [x, x], torch.stack), ([spans] * 2, sides, lambda parts: sum(parts)[None])):
        said = []
        for exchange in (lambda xa: (said.append(xa), join([xa, xa]))[1], lambda xa: join(said)):  # first all speak, then all hear
            ours = [kernels.lora(y.to(DEVICE, copy=True), x_i.to(DEVICE), kv.to(DEVICE),
                                 placed(kernels.LoraPages.of(own, columns, width, dtype)), exchange).cpu().float() for own, x_i in zip(shares, xs)]
        for result in ours:
            assert torch.allclose(result, expected, atol=2 * tolerance, rtol=2 * tolerance)


def to_device(model):
    """The same weights where the kernels run. They are plain tensors, some packed for a CPU, and Module.to sees none of them."""
    for m in model.modules():
        for name, t in list(vars(m).items()):
            if isinstance(t, torch.Tensor) and DEVICE.type == "cuda":
                setattr(m, name, (t.to_dense() if t.is_mkldnn else t).to(DEVICE))
    return model


def on_device(shape=LEAST, seed=1):
    """A random model where the kernels run; of SMALL it has the weights of small()."""
    return to_device(GPT.from_preset(GPTConfig(**shape), seed=seed))


@kernel_test
@pytest.mark.parametrize("family, alloc", [("llama", "grow"), ("llama", "reserve"), ("gpt2", "grow")])
def test_triton_model_equals_the_cpus(alloc, family, monkeypatch):
    """Chunks and decodes in one iteration: the same logits and the same cache as without the kernels."""
    config = GPTConfig(family=family, **SMALL | ({"n_kv_head": 4, "n_layer": 1} if family == "gpt2" else {}))
    caches, logits = [], []
    for interpret in (kernels.INTERPRET, False):
        monkeypatch.setattr(kernels, "INTERPRET", interpret)
        model = GPT.from_preset(config, seed=1)
        engine = Engine(model if caches else to_device(model), max_batch=4, n_page=400, alloc=alloc)
        for plan in ([(60, 50)], [(60, 10), (33, 30), (5, 5)], [(60, 1), (33, 3), (5, 1)]):  # (its prompt, n)
            known = {len(r.prompt): r for r in engine.requests.values()}
            for length, n in plan:
                if length not in known:
                    known[length] = Request(prompt(length), 30)
                    engine.add(known[length])
            entries = [(known[length], n) for length, n in plan]
            for r, n in entries:
                assert engine.pool.hold(r.id, r.n_past + n, kernels.round_up(r.max_len, 16))  # key tiles on a CPU, none in the kernels
                r.n_tokens = r.n_past + n
            logits.append(engine.model(engine._pack(entries), engine.kv).float().cpu())
            for r, n in entries:
                r.n_past += n
        tables = [engine.pool.tables[r.id] for r in known.values()]
        caches.append([untiled(engine)[:, :, t.rows[:30, None] + t.stride * np.arange(engine.pool.n_kv_head)].cpu() for t in tables])
    for ours, theirs in zip(logits[:3], logits[3:]):
        assert torch.allclose(ours, theirs, atol=1e-4)
    for ours, theirs in zip(*caches):
        assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("past, n", [(0, 1), (0, 16), (5, 3), (5, 11), (5, 12), (16, 9), (31, 40), (3, 61), (0, 64)])
def test_a_chunks_k_and_v_go_where_those_of_single_tokens_go(past, n):
    """Three copies, into tiles of 16, beside an address for each number; what a tile's tokens leave of it unfilled is cleared."""
    (Hk, D, stride, first), generator = (3, 16, 80, 5), torch.Generator().manual_seed(0)
    k, v = torch.randn(2, n, Hk, D, generator=generator)
    ours, expected = torch.full((2, 2, 250, D), float("nan"))
    t = past + np.arange(n)
    rows = first + t[:, None] + stride * np.arange(Hk)
    kernels.write(ours, k, v, kernels.Rows(torch.empty(0, Hk, dtype=int), torch.empty(0, Hk, dtype=int), [kernels.Chunk(0, n, past, first, stride, D)]))
    kernels.write(expected, k, v, kernels.Rows(torch.from_numpy(rows), torch.from_numpy(kernels.key_cells(rows, t, D, D))))
    assert torch.equal(ours.nan_to_num(9.0), expected.nan_to_num(9.0)) and int(ours.isnan().sum()) == 2 * (250 - n * Hk) * D
    assert torch.equal(ours[1, rows], v) and torch.equal(ours[0].flatten()[(rows - t[:, None] % D)[..., None] * D + np.arange(D) * D + t[:, None, None] % D], k)


def test_whole_key_tiles_are_given_where_they_keep_nobody_waiting():
    """The same tokens, whoever has which."""
    strides = {}
    for n_page in (150, 120, 47):
        engine = Engine(small(), scheduler="orca", max_batch=3, n_page=n_page)
        requests = add(engine, [Request(prompt(30, seed=i), 10) for i in range(3)])
        engine.step()
        strides[n_page] = [engine.pool.tables[r.id].stride for r in engine.running]
        engine.run()
        assert [r.output for r in requests] == [naive(30, 10, seed=i) for i in range(3)]
    assert strides == {150: [48, 48, 48], 120: [40, 40, 40], 47: [40]} and engine.key_tile == 16
    assert Simulator(SimpleCost(), n_page=100).key_tile == Engine(small(), alloc="grow", n_page=100).key_tile == 1


def test_a_segments_lists_are_where_its_index_is():
    """A GPU without Triton attends in torch."""
    s = kernels.Segment(0, 1, 1, 32, 16, torch.zeros(2, 64, dtype=torch.int32, device="meta"), torch.zeros(1, 1, 1, 32))
    assert {x.device.type for x in (s.bags, s.columns, kernels._starts(64, 32, s.bags.device))} == {"meta"}


def test_without_triton_everything_runs_in_torch(monkeypatch):
    """Our modules are imported once more, where there is none to be found."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("kernels", "model", "sarathi"):
        monkeypatch.delitem(sys.modules, name)
    bare = importlib.import_module("sarathi")
    engine = bare.Engine(bare.GPT.from_preset("tiny"), n_page=64)
    assert bare is not sarathi and not sys.modules["kernels"].HAS_TRITON and len(engine.generate([[1, 2, 3]], max_new_tokens=4)[0]) == 4


@kernel_test
def test_triton_recordings_have_an_end():
    engine = Engine(on_device(SMALL), max_batch=2, n_page=300, tile=TILE)
    n = len(engine.graphs.recorded)
    engine.graphs.MOST = n
    assert engine.generate([prompt(9)], 3) == [naive(9, 3)] and len(engine.graphs.recorded) == n


@kernel_test
def test_triton_more_new_tokens_than_a_recording_has_room_for():
    engine = Engine(on_device(SMALL), max_batch=5, n_page=300, scheduler="orca", tile=TILE)
    engine.graphs.n_most, engine.graphs.newest = 2, engine.graphs.newest[:2].clone()
    engine.graphs.recorded.clear()  # they read from where it was
    assert serve(engine, [Request(prompt(5), 4) for _ in range(4)] + [Request(prompt(9), 8)])[-1].output == naive(9, 8)


def test_heads_too_wide_for_a_gpus_tiles_are_refused(monkeypatch):
    monkeypatch.setattr(sarathi, "on_gpu", lambda device: True)
    with pytest.raises(ValueError, match="head_dim = 160: .* at most 128"):
        Engine(GPT.from_preset(GPTConfig(**SMALL | dict(head_dim=160))), n_page=50)


@kernel_test
def test_triton_engine_generates_the_naive_loops_tokens():
    model = on_device(SMALL)
    engine = Engine(model, chunk=32, tile=TILE, max_batch=3, n_page=120, alloc="grow")
    assert engine.generate([prompt(40), prompt(1), prompt(17)], max_new_tokens=3) == [naive(n, 3) for n in (40, 1, 17)]


@kernel_test
@pytest.mark.parametrize("options", [dict(chunk=16, alloc="grow"), dict(chunk=24, scheduler="sarathi_serve", draft="ngram", spec=3),
                                     dict(chunk=64, scheduler="orca", tile=16, temperature=0.9), dict(chunk=8, scheduler="sarathi_serve")])
def test_triton_recorded_iterations_generate_the_same_tokens(options, monkeypatch):
    """Every batch padded to the shape of a recording, chunks, decodes and verifications, or as it is: the same tokens. Few recordings
    serve many iterations, and what is larger than all of them runs without."""
    padded, real = [], model_py.Batch.padded
    monkeypatch.setattr(model_py.Batch, "padded", lambda batch, *shape: (padded.append((len(batch.tokens), shape[0])), real(batch, *shape))[1])
    said, sampling = [], dict(temperature=options.pop("temperature", 0.0), seed=7)
    for graph in (True, False):
        engine = Engine(on_device(), graph=graph, max_batch=5, n_page=200, **dict(tile=TILE) | options)
        n_ahead = len(padded)  # recorded before there was anybody, on a GPU
        said.append(engine.generate([prompt(40), prompt(1), [1, 2, 3, 4, 1, 2, 3, 4, 1, 2], prompt(17), prompt(5)], max_new_tokens=4, **sampling))
        assert (engine.graphs is not None) == graph and engine.ahead == engine.behind == (graph and not engine.speculator)
        if graph:
            assert any(n < N for n, N in padded) and len(engine.graphs.recorded) < len(padded) <= engine.n_steps + n_ahead
            n_padded = len(padded)
    assert said[0] == said[1] and len(padded) == n_padded


@kernel_test
@pytest.mark.parametrize("graph", [True, False])
def test_triton_trees_never_change_a_greedy_token(graph):
    """Their mask is the kernel's there; accepted paths are moved, beside decodes and a chunk."""
    engine = Engine(on_device(SMALL), draft=Guesser(lambda r: naive(len(r.prompt), 12)), spec="3,2,2", graph=graph,
                    chunk=96, tile=TILE, max_batch=3, n_page=300, scheduler="orca")
    requests = serve(engine, [Request(prompt(n), 6) for n in (20, 1, 40)])
    assert [r.output for r in requests] == [naive(n, 6) for n in (20, 1, 40)] and sum(r.n_accepted for r in requests) >= 3


@kernel_test
def test_triton_nobody_learns_what_a_recording_takes():
    engine = Engine(on_device(), draft="ngram", spec="goodput", cost=A100, max_batch=2, n_page=200, tile=TILE)
    ahead = len(engine.graphs.recorded)
    engine.generate([prompt(40), prompt(1)], max_new_tokens=8)
    assert 0 < engine.cost.n_learned == engine.n_steps - (len(engine.graphs.recorded) - ahead)


@kernel_test
def test_triton_recordings_made_ahead_are_those_that_are_replayed():
    """What is recorded with nobody in it leaves the pool's pages alone, and serves decodes with and without a full chunk."""
    engine = Engine(on_device(), chunk=2 * TILE, tile=TILE, max_batch=4, n_page=200)
    engine.kv.fill_(3.0)
    engine.graphs.prepare(2 * TILE, 4)
    ahead = set(engine.graphs.recorded)
    assert (engine.kv[:, :, :200 * engine.pool.n_kv_head] == 3).all()
    add(engine, [Request(prompt(n), 8) for n in (2 * TILE, 6 * TILE)])
    engine.run()
    new = set(engine.graphs.recorded) - ahead
    assert len(ahead) == 7 and len(new) <= 1, "but for the chunk that ends a prompt"
    whole = Engine(engine.model, chunk=10**9, tile=TILE, max_batch=4, n_page=200)
    assert whole.graphs.n_most < engine.model.config.block_size + 4 * kernels.FEW_ROWS + TILE, "no prompt is longer"


@kernel_test
def test_triton_recordings_with_drafts_and_adapters_together():
    """A draft model has the recordings that its target's options say, and adapters ride along: the same tokens with and without."""
    said = []
    for graph in (True, False):
        draft = on_device(seed=5)
        engine = Engine(on_device(), draft=draft, spec=2, graph=graph, chunk=24, tile=TILE, max_batch=3, n_page=200)
        engine.add_adapter("a", model_py.random_adapter(5, 1))
        inner = engine.speculator.proposer.engine
        assert (inner.graphs is not None) == (engine.graphs is not None) == graph and inner.max_batch == engine.max_batch
        said.append(engine.generate([prompt(30), prompt(4)], max_new_tokens=4, adapter=["a", None]))
    assert said[0] == said[1]


# ---- the next iteration is started while one runs: nothing of it is a GPU's but that it pays there, so it is proven on any device

def overlapped(engine):
    engine.ahead = engine.behind = 1
    return engine


def told_by(engine, requests):
    """Serve them -> the tokens and preemptions of each, every iteration's entries, and how many steps brought no news at first."""
    engine.record, late = [], 0
    learn(engine, matrix_adapters())
    add(engine, requests)
    for events in steps(engine):
        late += not engine.record and not events
        assert len(engine.flights) == engine.ahead * bool(engine.requests)
        assert all(e.request.output[-len(e.tokens):] == e.tokens for e in events)
    return [(r.output, r.n_preempted) for r in requests], [span.entries for span in engine.record if span.entries[0][2]], late


@pytest.mark.parametrize("alloc", ["reserve", "grow"])
@pytest.mark.parametrize("scheduler", NAMES)
def test_overlapped_iterations_are_those_of_one_after_the_other(scheduler, alloc, monkeypatch):
    """Planned before the tokens of the one before are known, each feeds whom and what it would have fed: chunks, decodes, requests with
    adapters and sampled ones, those that are preempted and computed again."""
    said, unknown, real = [], [], model_py.Batch.known.fget
    monkeypatch.setattr(model_py.Batch, "known", property(lambda batch: (unknown.append(int((batch.tokens < 0).sum())), real(batch))[1]))
    for ahead in (0, 1):
        engine = Engine(small(), scheduler=scheduler, chunk=24, tile=8, max_batch=4, alloc=alloc, n_page=96)
        engine.ahead = engine.behind = ahead
        drawn = [dict(temperature=0.9), dict(temperature=1.2, top_k=20, top_p=0.9)]
        requests = [Request(prompt(n), 14, a, **more) for n, a, more in ((40, None, {}), (9, "a1", {}), (17, None, drawn[0]), (1, "a2", drawn[1]), (25, None, {}))]
        said.append(told_by(engine, requests))
        assert [r.output for r in requests if not r.temperature] == [naive(n, 14, adapter=a) for n, a in ((40, None), (9, "a1"), (25, None))]
        assert said[-1][2] == ahead and (sum(unknown) > 40) == ahead, "decodes are fed before anybody knows their tokens"
    assert said[0][:2] == said[1][:2]
    assert alloc == "reserve" or sum(n for _, n in said[0][0]) > 0, "the pool was meant to run out"


def test_an_iteration_is_started_before_anybody_asks_what_the_one_before_said(monkeypatch):
    """So a GPU goes from one to the next without Python; nor does choosing a token, drawn or not, wait for the device."""
    happened, engine = [], overlapped(Engine(small(), n_page=200, max_batch=2))
    monkeypatch.setattr(sarathi, "fetch", lambda x: lambda: (happened.append("ask"), x.tolist())[1])
    watch(engine, "_forward", lambda plan: happened.append("start"))

    class Watched(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            happened.extend([str(op)] * any(name in str(op) for name in ("local_scalar", "nonzero", "masked_select")))
            return op(*args, **kwargs or {})
    sample = engine._sample

    def watched(*args):
        with Watched():
            return sample(*args)
    engine._sample = watched
    serve(engine, [Request(prompt(5), 4, temperature=0.9, top_p=0.8), Request(prompt(7), 4)])
    assert happened == ["start", *["start", "ask"] * engine.n_steps][:-2] + ["ask"], "the last has nobody behind it"


@pytest.mark.parametrize("seed", range(8))
def test_overlapped_iterations_with_everything(seed):
    """Stop tokens whose requests are a row too long in the batch, aborts, orders, small pools; in every second case steps that fail."""
    rng = random.Random(seed)
    case = complete(dict(draft=None, spec="off", aborts=True, lora=["batched", "merge"][seed // 2 % 2]), {}, rng)
    prove(case, rng.choices((1, 2, 8, 16, 17, 40), k=6), spoil=partial(spoil, rng=rng) if seed % 2 else None, ahead=1)


def test_what_ends_while_its_next_iteration_is_in_flight():
    """By a stop token, by abort in any state, the last of all: its row was in vain, and nobody hears of it."""
    tokens = naive(20, 12)
    engine = overlapped(Engine(small(), n_page=100, max_batch=3, record=[]))
    stops, goes_on = add(engine, [Request(prompt(20), 12, stop=[tokens[4]]), Request(prompt(10), 9)])
    finish(engine)
    assert stops.output == tokens[:tokens.index(tokens[4]) + 1] and stops.state == "stop" and goes_on.output == naive(10, 9)
    assert sum(id == stops.id for span in engine.record for id, *_ in span.entries) == len(stops.output) + 1
    for n_steps in range(1, 7):  # 6 tokens: from its prompt in flight to its last token in flight
        victim, r = add(engine, [Request(prompt(5), 6), Request(prompt(10), 9)])
        for _ in range(n_steps):
            engine.step()
        assert victim.state == ("running" if n_steps < 6 else "landing") and len(engine.flights) == 1
        engine.abort(victim.id)
        engine.pool.check()
        assert victim.output == naive(5, 6)[:n_steps - 1] and victim.state == "abort"
        finish(engine)
        assert r.output == naive(10, 9) and victim.output == naive(5, 6)[:n_steps - 1] and engine.pool.n_free == 100
    alone, = add(engine, [Request(prompt(5), 6)])
    engine.step()
    engine.abort(alone.id)
    assert not engine.flights and not engine.requests and engine.pool.n_free == 100


def test_a_run_that_is_ended_leaves_nothing_in_flight():
    """Ctrl-C and until: what was in flight lands and is told; what is unfinished goes on with the next run."""
    engine, told = overlapped(Engine(small(), n_page=100, max_batch=2)), []
    r, = add(engine, [Request(prompt(10), 12)])

    def interrupt(event):
        told.extend(event.tokens)
        if len(told) == 4:
            os.kill(os.getpid(), signal.SIGINT)
    assert engine.run(interrupt) == [] and not engine.flights and r.output == told == naive(10, 12)[:5]
    engine.run(until=lambda: len(r.output) > 6)
    assert not engine.flights and r.output == naive(10, 12)[:8] and engine.run() == [r] and r.output == naive(10, 12)
    assert engine.generate([prompt(10), prompt(3)], 4) == [naive(10, 4), naive(3, 4)] and not engine.flights


def test_what_is_in_flight_lands_before_an_idle_engine_waits():
    class Clock(sarathi.VirtualClock):
        def wait_until(self, t):
            assert not engine.flights
            super().wait_until(t)
    engine = overlapped(Engine(small(), n_page=100, max_batch=2, clock=Clock()))
    early, late = add(engine, [Request(prompt(5), 3), Request(prompt(6), 3, arrival=100.0)])
    assert engine.run() == [early, late] and early.times[-1] == 0 and late.times[0] == 100


def test_the_time_of_overlapped_iterations_is_counted_once():
    """One starts when the one before has ended: what is learned and recorded adds up to the clock."""
    class Clock(sarathi.VirtualClock):
        def now(self):
            self.t += 0.01
            return self.t
    learned, record = [], []
    engine = overlapped(Engine(small(), n_page=100, max_batch=2, chunk=8, clock=Clock(), record=record))
    engine.cost = SimpleNamespace(tile=1, wants=lambda: True, learn=lambda w, seconds, lora: learned.append((w.context, seconds)))
    serve(engine, [Request(prompt(20), 4), Request(prompt(3), 3)])
    assert learned == [(sum(past + n for _, past, n in s.entries), s.end - s.start) for s in record], "cached tokens as they were at the start"
    assert len(record) == 6 and all(a.end == b.start for a, b in zip(record, record[1:]))


@kernel_test
def test_triton_overlapped_iterations_generate_the_same_tokens():
    """As recordings, which find the tokens of the one before in their own memory: greedy, sampled and with an adapter, preempted and stopped."""
    said, source, m = [], strong(5, 1, ["q_proj", "o_proj"]), on_device()
    whole = greedy(m, prompt(17), 2)
    for ahead in (0, 1):
        engine = Engine(m, chunk=16, tile=TILE, max_batch=4, n_page=52, alloc="grow")
        assert engine.ahead == engine.behind == 1
        engine.ahead = engine.behind = ahead
        engine.add_adapter("a", source)
        requests = [Request(prompt(5), 6, temperature=0.9), Request(prompt(4), 6, "a"), Request(prompt(17), 6, stop=whole[1:]), Request(prompt(20), 4)]
        serve(engine, requests)
        said.append([r.output for r in requests])
    assert said[0] == said[1] and said[1][2] == whole and said[1][3] == greedy(m, prompt(20), 4)
    assert sum(r.n_preempted for r in requests) > 0, "the pool was meant to run out"
    assert said[1][1] == greedy(m.merged(source(m.config, m.dtype)), prompt(4), 6)


@kernel_test
def test_triton_the_gap_between_two_iterations_is_measured_where_they_are_replayed(monkeypatch):
    """As in the roofline, with and without overlap, on a device that works for 7 seconds and waits for 3."""
    monkeypatch.setitem(globals(), "small", on_device)
    for ahead in (0, 1):
        times = (t for start in range(0, 1000, 10) for t in (start, start + 7))
        monkeypatch.setattr(bench, "SharedClock", lambda world: SimpleNamespace(mark=lambda: partial(float, next(times))))
        assert bench.python_gap(bench_of(), ahead, B=2, context=8, steps=6) == pytest.approx((0.3, 10))


@kernel_test
def test_triton_a_timed_iteration_is_replayed_and_can_be_taken_apart(monkeypatch):
    monkeypatch.setitem(globals(), "small", on_device)
    b, replayed, hidden = bench_of(), [], bench.Graphs.hidden
    monkeypatch.setattr(bench.Graphs, "hidden", lambda self, batch: replayed.append(batch) or hidden(self, batch))
    f = b.iteration(2, 8, 20)
    assert torch.allclose(f(), f.by_operator(), atol=1e-4) and len(replayed) == 1
    took, _ = b.operators(f)
    assert len(replayed) == 1 and all(took.values()), "a replay has no operators to be timed"
    b.options.graph = False
    assert not hasattr(b.iteration(2, 8, 20), "by_operator")


@kernel_test
@pytest.mark.parametrize("lora", ["batched", "bmm"])
def test_triton_engine_with_adapters_generates_the_naive_loops_tokens(lora):
    """Chunks, decodes, no adapter and two of different ranks and modules in the same iterations."""
    sources = {"a": strong(5, 1, ["q_proj", "o_proj", "down_proj"]), "b": strong(9, 2, ["v_proj", "gate_proj", "up_proj"])}
    engine = Engine(on_device(SMALL), chunk=16, tile=TILE, max_batch=4, n_page=300, lora=lora)
    expected = [naive(5, 2)]
    for (name, source), length in zip(sources.items(), (4, 22)):
        engine.add_adapter(name, source)
        expected.append(greedy(small().merged(source(small().config, torch.float32)), prompt(length), 2))
        assert expected[-1] != naive(length, 2)
    assert engine.generate([prompt(5), prompt(4), prompt(22)], max_new_tokens=2, adapter=[None, "a", "b"]) == expected


SHARED = {80: 166912, 86: 101376, 90: 232448}  # bytes of shared memory a program may have on each architecture


def compiled(arch, kernel, args, constants):
    """Compile a launch for a GPU that is not there -> per thread its registers and the bytes on its stack, where spilled ones go;
    the program's shared memory. None without cuobjdump."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    options = {k: constants[k] for k in ("num_warps", "num_stages") if k in constants}
    args = dict(zip(kernel.arg_names, args)) | {k: v for k, v in constants.items() if k not in options}
    kind = lambda x: ("*" + {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32"}[x.dtype]
                      if isinstance(x, torch.Tensor) else "fp32" if isinstance(x, float) else "i32")
    fixed = {k: v for k, v in args.items() if k in constants or v is None}
    signature = {k: "constexpr" if k in fixed else kind(args[k]) for k in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, k in enumerate(kernel.arg_names)
               if k not in fixed and (signature[k][0] == "*" or signature[k] == "i32" and args[k] % 16 == 0)}
    made = triton.compile(ASTSource(kernel, signature, fixed, aligned), target=GPUTarget("cuda", arch, 32), options=options)
    assert made.metadata.shared <= SHARED[arch], f"{made.metadata.shared} bytes of shared memory on sm_{arch}"
    tool = getattr(triton.knobs.nvidia, "cuobjdump", None)
    if tool is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(made.asm["cubin"])
        f.flush()
        text = subprocess.run([tool.path, "-res-usage", f.name], capture_output=True, text=True).stdout
    return int(re.search(r"REG:(\d+)", text)[1]), int(re.search(r"STACK:(\d+)", text)[1]), made.metadata.shared


@pytest.mark.parametrize("arch, D, H, Hk, dtype", [(arch, *shape) for shape in (
    (64, 12, 12, torch.bfloat16), (80, 16, 16, torch.bfloat16), (96, 8, 2, torch.bfloat16), (128, 32, 32, torch.bfloat16), (128, 64, 8, torch.bfloat16),
    (128, 8, 8, torch.float32), (8, 4, 2, torch.float16)) for arch in SHARED if arch == 86 or shape[0] in (64, 128)])  # sm_86 has the least memory
def test_every_launch_compiles_for_gpus_that_are_not_here(arch, D, H, Hk, dtype, monkeypatch):
    """One layer's launches of a mixed batch, by their real arguments. They fit the shared memory, and no register spills."""
    pytest.importorskip("triton")
    if kernels.INTERPRET:
        pytest.skip("interpreted kernels are not compiled")
    launches, shapes = [], [(5, 1), (300, 8), (9, 40), (0, 300)] + [(9, (3, 2, 2))] * (H in (8, 64))
    monkeypatch.setattr(kernels, "on_gpu", lambda device: True)
    monkeypatch.setattr(kernels, "launch", lambda kernel, grid, *args, **constants: launches.append((kernel, args, constants)))
    pages, _, n_row = pages_of(shapes, H // Hk, Hk, True, np.random.default_rng(0), dtype)
    pages = kernels.upload([pages], torch.device("cpu"))[1][0]
    N, C, fresh = len(pages.rows), H * D, lambda *shape: torch.empty(shape, dtype=dtype)
    kv = fresh(2, n_row, D)
    for rope in (None, (fresh(N, 1, D), fresh(N, 1, D))):
        q = kernels.rotate_write(fresh(N, (H + 2 * Hk) * D), rope, kv, pages, H, Hk)
    for n_split in (1, 16) if D == 128 else (16,):
        kernels.attention_pages(q, kv, pages, Hk, n_split)
    if D in (80, 128):
        for bias in (None, fresh(C)):
            kernels.add_norm(fresh(N, C), fresh(N, C), fresh(C), bias, 1e-5)
            kernels.activate(fresh(N, 2 * C), bias is None)
    for kernel, args, constants in launches:
        usage = compiled(arch, kernel, args, constants)
        print(f"sm_{arch} {kernel.__name__:22} D={D} {str(dtype)[6:]:9} (registers, stack, shared) = {usage}")
        assert usage is None or usage[1] == 0, f"{kernel.__name__} spills {usage[1]} bytes"


@pytest.mark.parametrize("n_in, n_outs, width, dtype", [(4096, (4096, 4096, 4096), 4096, torch.bfloat16), (5632, (2048,), 256, torch.float16),
                                                        (1280, (5120,), 1280, torch.float32)])
@pytest.mark.parametrize("arch", SHARED)
def test_every_adapter_launch_compiles_for_gpus_that_are_not_here(arch, n_in, n_outs, width, dtype, monkeypatch):
    """One operator's launches for decodes and a chunk, by their real arguments: heads alone, an FFN over grouped heads, float32."""
    pytest.importorskip("triton")
    if kernels.INTERPRET:
        pytest.skip("interpreted kernels are not compiled")
    launches, shapes = [], [(1, (8,) * len(n_outs)), (300, (64,) * len(n_outs))]
    monkeypatch.setattr(kernels, "launch", lambda kernel, grid, *args, **constants: launches.append((kernel, args, constants)))
    spans, columns, kv = adapters_of(shapes, n_in, n_outs, width, np.random.default_rng(0))
    y, x = rows_of(shapes, n_in, n_outs, dtype)
    pages = placed(kernels.LoraPages.of(spans, columns, width, dtype))
    kernels.lora_pages(y, x, kv.to(dtype), pages, n_split=4)
    kernels.lora_pages(y, x, kv.to(dtype), pages, exchange=lambda xa: torch.stack([xa, xa]))  # as one of two devices
    for kernel, args, constants in launches:
        usage = compiled(arch, kernel, args, constants)
        print(f"sm_{arch} {kernel.__name__:15} BLOCK_M={constants['BLOCK_M']} {str(dtype)[6:]:9} (registers, stack, shared) = {usage}")
        assert usage is None or usage[1] == 0, f"{kernel.__name__} spills {usage[1]} bytes"


# ---------------------------------------------------------------- 15. speculation

class Moody(sarathi.Learned):
    """A cost model whose mind changes with every question, so that a goodput policy picks every k there is."""
    version = property(lambda self: self.rng.random())  # nobody keeps its prices

    def __init__(self):
        super().__init__(Linear())
        self.rng = random.Random(3)

    def seconds(self, w, lora="batched"):
        return 1.0 + self.rng.choice((0.0, 0.02, 0.3)) * w.N

    def learn(self, w, seconds, lora="batched"):
        pass


class Linear(CostModel):
    """T = alpha N_context + gamma N + delta [SmartSpec Eq. 7] as it stands."""

    def __init__(self, alpha=0.0, gamma=0.1, delta=1.0):
        super().__init__(small().config, torch.float32, (1e9, 0.5), "linear")
        self.terms = alpha, gamma, delta

    def seconds(self, w, lora="batched"):
        alpha, gamma, delta = self.terms
        return alpha * w.context + gamma * w.N + delta


class Wrong(sarathi.Proposer, named=False):
    """As many drafts as it is asked for, and never the token that greedy decoding gives."""

    def propose(self, requests, lengths):
        right = [naive(len(r.prompt), 40)[len(r.output):] for r in requests]
        return [[(t + 1) % SMALL["vocab_size"] for t in tokens[:k]] for tokens, k in zip(right, lengths)]


@lru_cache
def draft(kind):
    """None of them knows what the target knows but the target itself; one has other kv heads, a short context and a small vocabulary,
    one a vocabulary that the target's is a part of."""
    other = dict(small=dict(n_layer=1, n_kv_head=4, vocab_size=61, block_size=60), large=dict(n_layer=1, n_head=2, n_kv_head=1, vocab_size=500))
    return small() if kind == "self" else GPT.from_preset(GPTConfig(**SMALL | other[kind]), seed=5) if kind in other else Wrong() if kind == "wrong" else kind


def speculating(kind, spec, model=None, **options):
    return Engine(model or small(), draft=draft(kind), spec=spec, cost=(Moody(), Linear(0, 0, 0.02)), **options)


SPECS = ["off", 1, 3, 9, "goodput", "goodput_global", "goodput_request", "confidence"]


@pytest.mark.parametrize("kind, spec", [(kind, spec) for kind in ("ngram", "self", "small", "large", "wrong") for spec in SPECS
                                        if (spec != "confidence" or kind not in ("ngram", "wrong")) and (spec != "off" or kind == "self")])
def test_speculation_never_changes_a_greedy_token(kind, spec):
    """Every proposer and policy, under two schedulers each and both allocations (all meet), preemption, a neighbour that is aborted."""
    lengths, n_new, turn = [90, 15, 1, 16, 17, 33], 20, SPECS.index(spec) + ["ngram", "self", "small", "large", "wrong"].index(kind)
    for scheduler, alloc in ((NAMES[turn % 5], "grow"), (NAMES[(turn + 3) % 5], "reserve")):
        engine = speculating(kind, spec, scheduler=scheduler, chunk=24, max_batch=4, tile=8, alloc=alloc, n_page=123)
        requests = serve_beside_a_victim(engine, lengths, n_new)
        if alloc == "grow":
            assert sum(r.n_preempted for r in requests) > 0, "the pool was meant to run out"
        drafted, accepted = (sum(getattr(r, name) for r in requests) for name in ("n_drafted", "n_accepted"))
        assert (drafted > 0) == (spec != "off"), "these requests were meant to speculate"
        assert kind not in ("self", "wrong") or accepted == (drafted if kind == "self" else 0), "also after rollback and preemption"


def adapted(alloc, **options):
    """Requests of five adapters and none, in a pool that they and drafts compete for -> the engine, the requests when all have ended."""
    engine = Engine(small(), scheduler="sarathi_serve", chunk=96, max_batch=5, tile=8, alloc=alloc, n_page=220, **options)
    learn(engine, adapters := adapters_for(small(), [1, 2, 4, 8, 3]))
    return engine, serve(engine, [Request(prompt(10 + i, seed=i), 24, name) for i, name in enumerate([None, *adapters] * 2)])


@lru_cache
def plainly_adapted():
    """Their tokens without drafts, which are PEFT's (section 13)."""
    return [r.output for r in adapted("grow")[1]]


@pytest.mark.parametrize("alloc", ["reserve", "grow"])
@pytest.mark.parametrize("kind, spec", [("ngram", 7), ("self", 3), ("large", "goodput_request"), ("small", "confidence"), ("guesser", "3,2,2")])
def test_speculation_never_changes_an_adapters_token(kind, spec, alloc):
    proposer = draft(kind) if kind != "guesser" else Guesser(lambda r: plainly_adapted()[r.id] + [0] * 4)
    engine, requests = adapted(alloc, draft=proposer, spec=spec, cost=(Moody(), Linear(0, 0, 0.02)))
    assert [r.output for r in requests] == plainly_adapted() and engine.speculator.n_drafted > 0
    assert kind != "guesser" or engine.speculator.n_accepted > 50


def test_a_draft_that_is_the_target_gives_k_plus_one_tokens_per_iteration_until_the_end():
    for k in (1, 3, 9):
        engine, r = speculating("self", k, n_page=200), Request(prompt(40), 26)
        engine.add(r)
        gained = [len(e.tokens) for _ in range(100) for e in engine.step()]
        full, rest = divmod(25, k + 1)
        assert gained == [1] + [k + 1] * full + [rest] * (rest > 0) and r.output == naive(40, 26)


@pytest.mark.parametrize("kind", ["small", "large"])
def test_a_draft_model_proposes_what_it_would_say_itself(kind):
    """Its cache is right after catching up, rollback, preemption and steps without a draft: drafts equal its own greedy text."""
    m, seen, (V, L) = draft(kind), 0, dict(small=(61, 60), large=(500, 512))[kind]
    engine = Engine(small(), draft=m, spec="goodput", cost=(Moody(), Linear(0, 0, 0.02)), scheduler="orca", alloc="grow", max_batch=4, n_page=100)
    propose = engine.speculator.proposer.propose

    def watched(requests, lengths):
        nonlocal seen
        before = [r.tokens[:r.n_tokens].tolist() for r in requests]
        drafts = propose(requests, lengths)
        for text, k, tokens in zip(before, lengths, drafts):
            text = [min(t, V - 1) for t in text]
            assert len(tokens) == k and (not k or len(text) + k - 1 <= L), "it stops where its context ends"
            for t in tokens:
                assert t == int(m.logits(text)[-1, :199].argmax())
                text, seen = text + [t], seen + 1
        return drafts
    engine.speculator.proposer.propose = watched
    requests = serve(engine, [Request(prompt(n), 25) for n in (30, 5, 12, 40, 20)])
    assert seen > 40 and sum(r.n_preempted for r in requests) > 0


def test_ngram_continues_what_the_newest_tokens_were_followed_by_last():
    engine = speculating("ngram", 5, n_page=100)
    ngram, ask = engine.speculator.proposer, lambda tokens, k: ngram.propose([made(tokens)], [k])[0]

    def made(tokens):
        r = Request(tokens, 40)
        engine.add(r)
        return r
    assert ask([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], 3) == [4, 9, 2], "three tokens that agree come before two that stood later"
    assert ask([7, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], 3) == [5, 1, 2] and ask([1, 2, 3], 3) == [] and ask([4], 3) == []
    assert ask([8, 5, 6, 5, 6], 5) == [5, 6, 5, 6, 5], "a match that reaches the end repeats"
    r, rng, rest = made([0]), random.Random(0), []
    for _ in range(39):  # as the text grows, tokens at a time: the same as from the whole text
        rest.append(rng.randrange(3))
        if rng.random() < 0.5:
            r.tokens[r.n_tokens:r.n_tokens + len(rest)] = rest
            r.n_tokens, rest = r.n_tokens + len(rest), []
            text = r.tokens[:r.n_tokens].tolist()
            places = [i for size in (3, 2) for i in range(r.n_tokens - 1, size - 1, -1) if r.n_tokens > size and text[i - size:i] == text[-size:]]
            assert ngram.propose([r], [1])[0] == ([text[places[0]]] if places else [])


def test_a_stop_token_in_an_accepted_run_ends_it_there():
    expected = naive(40, 20)
    stop = next(t for i, t in enumerate(expected) if i > 3 and t not in expected[:i])
    engine = speculating("self", 9, n_page=200)
    assert engine.generate([prompt(40)], max_new_tokens=20, stop=[stop]) == [expected[:expected.index(stop) + 1]]
    assert engine.pool.n_free == engine.pool.n_page


@pytest.mark.parametrize("alloc", ["reserve", "grow"])
@pytest.mark.parametrize("kind, spec", [("ngram", 7), ("large", 3), ("self", "goodput_request")])
def test_pool_is_conserved_with_speculation_and_no_draft_costs_anybody_a_page(kind, spec, alloc):
    rng, arrivals = random.Random(1), []
    engine = speculating(kind, spec, scheduler="sarathi_serve", chunk=24, max_batch=5, alloc=alloc, n_page=150)
    widen = engine.speculator.widen

    def watched(plan):
        free, n = engine.pool.n_free, len(engine.running)
        assert (plan := widen(plan)) is not None and engine.pool.n_free >= min(free, n), "a page for everyone's next token is left"
        return plan
    engine.speculator.widen = watched
    for _ in range(25):
        tokens = [rng.randrange(4) for _ in range(rng.randint(1, 60))]  # few words: it repeats itself
        arrivals.append(Request(tokens, rng.randint(1, 40), temperature=rng.choice((0.0, 0.8)), arrival=engine.clock.now()))
        engine.add(arrivals[-1])
        for _ in range(rng.randint(0, 8)):
            engine.step()
            engine.pool.check()
        if engine.requests and rng.random() < 0.2:
            engine.abort(rng.choice(list(engine.requests)))
    finish(engine)
    assert all(r.done and r.n_tokens <= r.max_len for r in arrivals) and sum(r.n_drafted for r in arrivals) > 20
    proposer = engine.speculator.proposer
    assert not (proposer.seen if kind == "ngram" else proposer.engine.pool.tables), "nothing is kept of what ended"


def test_two_engines_may_share_an_index_of_ngrams():
    """Their requests have the same ids."""
    ngram, requests = sarathi.Ngram(), [Request(text, 4) for text in ([1, 2, 3, 4, 1, 2, 3], [5, 6, 7, 8, 5, 6, 7])]
    for r in requests:
        Engine(small(), draft=ngram, spec=3, n_page=100).add(r)
    assert [ngram.propose([r], [1]) for r in requests] == [[[4]], [[8]]] and len({r.id for r in requests}) == 1


# ------------------------------------------------ sampled: the same distribution

def chi_square(counts, p):
    """counts (n,), p (n,) expected shares -> (statistic over its threshold, cells used). False alarms: one in a million, by the
    cube-root law of Wilson and Hilferty (z = 4.75). Cells that expect fewer than five are taken together."""
    counts, p = np.asarray(counts, float), np.asarray(p, float)
    assert counts[p == 0].sum() == 0, "a token that has no probability"
    expected = p * counts.sum()
    few = expected < 5
    counts, expected = np.append(counts[~few], counts[few].sum()), np.append(expected[~few], expected[few].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    df = len(counts) - 1
    return ((counts - expected) ** 2 / expected).sum() / (df * (1 - 2 / (9 * df) + 4.75 * (2 / (9 * df)) ** 0.5) ** 3), len(counts)


SAMPLING = {"T = 1": dict(temperature=1.0), "T = 0.7": dict(temperature=0.7), "top-k": dict(temperature=1.0, top_k=3),
            "top-p": dict(temperature=1.3, top_p=0.8), "all": dict(temperature=0.7, top_k=4, top_p=0.9)}


def table(seed, V=6):
    """(V, V) logits of the next token after each token: a language that can be enumerated."""
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 1.2, (V, V))).float()


def shares(logits, first, **sampling):
    """(V ** 3,) the exact probability of the three tokens that follow `first` in the language of a table, or of any
    function text -> logits."""
    rule = lambda text: kernels.target_probs((logits(text) if callable(logits) else logits[text[-1]])[None], torch.tensor([sampling["temperature"]]),
                                             torch.tensor([sampling.get("top_k", 0)]), torch.tensor([sampling.get("top_p", 1.0)]))[0].double()
    V, start = len(rule([*first])), [*first]
    p1 = rule(start)
    return torch.stack([torch.stack([p1[a] * rule(start + [a])[b] * rule(start + [a, b]) for b in range(V)]) for a in range(V)]).flatten().numpy()


def verified(kind, sampling, n=20000, V=6, k=3):
    """The first three tokens of n requests whose k = 3 drafts are verified in one call, as the engine does: drafts drawn from another
    language (or fixed, as an n-gram's; or every other), rows of the target's. Where a run ends early the rest is drawn plainly."""
    p, guess, rng, first = table(0, V), table(1, V), np.random.default_rng(7), 2
    engine = Engine(GPT.from_preset(GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=V, block_size=16)), n_page=16)
    q, texts, ready = kernels.target_probs(guess, *engine._sampling([Request([0], **sampling)] * V)), [np.full(n, first)], []
    is_drawn = np.arange(n) % 2 < dict(ngram=0, mixed=1, draft=2)[kind]
    for _ in range(k):
        drawn = kernels.sample(q[texts[-1]], torch.from_numpy(rng.random(n))).numpy()
        texts.append(np.where(is_drawn, drawn, (2 * texts[-1] + 1) % V))
    texts = np.stack(texts, 1)  # (n, k + 1)
    for i, text in enumerate(texts):
        r = Request([first], k + 1, **sampling)
        r.tokens, r.n_tokens, r.rng = text, 1, rng
        r.q = q[text[:-1]] if is_drawn[i] else None
        ready.append((r, text[1:].tolist()))
    counts = np.zeros(V ** 3)
    plain = kernels.target_probs(p, *engine._sampling([Request([0], **sampling)] * V)).double().numpy()
    plain /= plain.sum(1, keepdims=True)
    for new in engine._sample(ready, p[texts.ravel()])[0]():
        while len(new) < 3:
            new.append(int(rng.choice(V, p=plain[new[-1]])))
        counts[new[0] * V * V + new[1] * V + new[2]] += 1
    return chi_square(counts, shares(p, [first], **sampling))


@pytest.mark.parametrize("kind", ["draft", "ngram", "mixed"])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_verified_drafts_leave_the_distribution_as_it_is(sampling, kind):
    """20,000 draws of three tokens against their exact probabilities; a sound rule fails once in a million seeds, and this seed is fixed."""
    excess, cells = verified(kind, SAMPLING[sampling])
    assert excess < 1 and cells > 10


BROKEN = {"accepts twice as often": ("accept", lambda p, q, draft, u: kernels.accept(p, q, draft, u / 2)),
          "accepts whatever is possible": ("accept", lambda p, q, draft, u: kernels.accept(p, q, draft, u * 1e-6)),
          "takes the draft to be certain": ("accept", lambda p, q, draft, u: kernels.accept(p, None, draft, u)),
          "draws again from p": ("residual", lambda p, q, draft: p)}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_noticed(rule, monkeypatch):
    name, broken = BROKEN[rule]
    monkeypatch.setattr(sarathi, name, broken)
    assert verified("draft", SAMPLING["T = 1"])[0] > 1


@lru_cache
def toy(seed):
    """A model of six tokens with opinions."""
    m = GPT.from_preset(GPTConfig(n_layer=1, n_head=1, n_embd=16, vocab_size=6, block_size=64), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for owner in (m.wte, m.head):
        owner.weight = torch.randn(6, 16, generator=generator) * 0.3
    return m


@pytest.mark.parametrize("kind", ["draft", "ngram"])
def test_sampled_requests_are_distributed_as_without_speculation(kind):
    """The whole engine: 10,000 requests (5,000 of n-gram), the joint distribution of their first three tokens (false alarm: one in a million)."""
    sampling, n = dict(temperature=0.9, top_k=5, top_p=0.95), 10000 if kind == "draft" else 5000
    text = [3, 1] if kind == "draft" else [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 0, 2, 4, 0, 3, 5, 1, 3, 0, 4, 1, 5, 2, 0, 5, 3, 1, 0]  # most pairs
    engine = Engine(toy(1), draft=toy(2) if kind == "draft" else "ngram", spec=2, scheduler="orca", max_batch=1000, n_page=34000)
    out = engine.generate([text] * n, max_new_tokens=4, **sampling)
    counts = np.bincount([a * 36 + b * 6 + c for a, b, c, _ in out], minlength=216)
    assert chi_square(counts, shares(lambda t: toy(1).logits(t)[-1], text, **sampling))[0] < 1
    assert 0.05 < engine.speculator.n_accepted / engine.speculator.n_drafted < 0.95 and engine.speculator.n_drafted > n


# ------------------------------------------------ how many: policies against brute force

def decodes(alpha, most, target, step=0.0):
    """What a policy sees: target(n) and step are seconds."""
    edges = range(0)
    return sarathi.Decodes([Request([0]) for _ in most], np.array(most), np.array(alpha, float), target, lambda steps: step * steps, edges)


def test_goodput_decides_again_when_prices_room_or_acceptance_have_changed():
    policy, dear, cheap = sarathi.Goodput(), lambda n: 1.0 + n, lambda n: 1.0 + 0.01 * n
    asked, decide = [], lambda most, alpha, target: policy.lengths(sarathi.Decodes([None] * 3, np.array(most), np.full(3, alpha), target, sarathi.MADE)).tolist()
    watch(policy, "tokens", lambda d, k: asked.append(1))
    assert decide([5, 5, 2], 0.7, cheap) == decide([5, 5, 2], 0.69, cheap) == [5, 5, 2] and decide([2, 5, 5], 0.7, cheap) == [2, 5, 5] and len(asked) == 1
    assert decide([5, 5, 2], 0.7, dear) == [0, 0, 0] and len(asked) == 2
    assert decide([5, 0, 2], 0.7, cheap) == [5, 0, 2] and len(asked) == 3
    assert decide([5, 5, 2], 0.01, cheap) == [0, 0, 0] and len(asked) == 4


def test_expected_tokens_by_counting_outcomes():
    """Eq. 8: the first j of k drafts are accepted and the next is not with probability alpha^j (1 - alpha), j = 0 .. k."""
    for alpha in (0.0, 0.3, 0.7, 0.999, 1.0):
        for k in range(8):
            outcomes = [alpha ** j * (1 - alpha) for j in range(k)] + [alpha ** k]
            mean = pytest.approx(sum(c * (j + 1) for j, c in enumerate(outcomes)))
            assert sum(outcomes) == pytest.approx(1) and sarathi.expected_tokens(alpha, k) == mean
            pilot = Simulator(A100, scheduler="autopilot", draft="ngram", spec="autopilot", alpha=0.5)
            pilot.speculator.tally[:] = 1e9 * alpha, 1e9
            pilot.add(Request([1], 2))
            pilot.step()
            assert pilot.scheduler.worth[k] == mean, "a sum is Eq. 8, too"


@pytest.mark.parametrize("seed", range(30))
def test_goodput_is_the_best_of_all_choices(seed):
    """Against every k for all (step), and every k of every request (request); T with and without tiles, a draft that costs and one that does not."""
    rng = np.random.default_rng(seed)
    most, alpha = rng.integers(0, 5, 4), rng.uniform(0, 1, 4)
    gamma, delta, tile, step = rng.uniform(0.01, 0.5), rng.uniform(0, 2), int(rng.choice([1, 4])), rng.choice([0.0, 0.1])
    target = lambda n: delta + gamma * -(-(4 + n) // tile) * tile
    d = decodes(alpha, most, target, step)
    goodput = lambda k: sarathi.expected_tokens(alpha, k).sum() / (target(sum(k)) + step * max(k))
    every = list(np.ndindex(*(most + 1)))
    assert goodput(sarathi.GoodputRequest().lengths(d)) == pytest.approx(max(map(goodput, every)))
    assert goodput(sarathi.Goodput().lengths(d)) == pytest.approx(max(goodput(np.minimum(k, most)) for k in range(6)))
    luck = rng.integers(0, 4, 4)
    for r, n in zip(d.requests, luck):
        r.luck = int(n)
    k, worth = sarathi.Oracle().lengths(d), lambda k: (k + 1).sum() / (target(k.sum()) + step * k.max())
    assert (k <= np.minimum(luck, most)).all() and worth(k) == pytest.approx(max(worth(np.minimum(j, np.minimum(luck, most))) for j in range(5)))


@pytest.mark.parametrize("seed", range(20))
def test_confidence_verifies_a_drawn_draft_whatever_its_value(seed):
    """How many drafts a request has is known by their values; whether its j-th is verified must be the same for all lengths from j on."""
    rng = np.random.default_rng(seed)
    most, alpha, V = rng.integers(0, 6, 3), rng.uniform(0.5, 1, 3), 6
    steps = np.cumsum(rng.choice([0.01, 0.1, 1.0], 3 * V + 1))  # dear tokens here and there, as at the end of a tile
    for i in range(3):
        verified = []
        for made in range(V):
            d = decodes(alpha, np.where(np.arange(3) == i, made, most), lambda n: 1 + steps[n])
            for r in d.requests:
                r.temperature = 1.0
            verified.append(sarathi.Confidence().lengths(d)[i])
            assert all((n >= j) == (verified[-1] >= j) for j in range(made + 1) for n in verified[j:])
    d = decodes(alpha, [5] * 3, lambda n: 1 + 1e-3 * n)
    for r in d.requests:
        r.temperature = 1.0
    assert (sarathi.Confidence().lengths(d) == 5).all(), "drafts that cost next to nothing are verified"


def test_goodput_proposes_less_the_fuller_the_batch_and_the_worse_the_draft():
    """[SmartSpec Fig. 5]: more than four drafts for small batches, none for very large ones."""
    cost = CostModel.roofline(preset("llama-7b"), "a100")
    best = lambda B, alpha: [sarathi.Goodput().lengths(decodes([alpha] * B, [7] * B, lambda n: cost.time(B + n, 256 * B), 0.0005))[0] for B in B]
    chosen = {alpha: best([1, 4, 256, 1024], alpha) for alpha in (0.3, 0.5, 0.7, 0.9)}
    assert min(chosen[0.7][:2]) > 4 and chosen[0.3][-1] == 0
    assert all(k[0] > k[-1] and sorted(k, reverse=True) == k for k in chosen.values()) and list(chosen.values()) == sorted(chosen.values())


def test_global_granularity_settles_on_one_k():
    policy, picked = sarathi.GoodputGlobal(), []
    for i in range(60):
        picked.append(policy.lengths(decodes([0.7] * 4, [7] * 4, lambda n: 1 + 0.1 * n * (1 + i % 2)))[0])
    assert len(set(picked[10:])) == 1


def test_a_policy_that_stopped_proposing_tries_again():
    """Evidence of bad drafts fades, or nobody would notice that they have become good."""
    engine = Engine(small(), draft=Wrong(), spec="goodput", cost=Linear(gamma=0.3), n_page=100)
    s, r = engine.speculator, Request(prompt(5), 40)
    for _ in range(20):
        s.observe([(r, 3, 0)] * 4)
    assert s.alpha < 0.1
    for _ in range(400):
        s.observe([])
    assert s.alpha > 0.6
    for _ in range(200):
        s.observe([(r, 3, 2), (r, 1, 1), (r, 3, 3)])
    assert s.alpha == pytest.approx(6 / 7, abs=0.02), "tried were seven: behind a rejected draft nothing is"


def test_draft_prefill_is_spared_where_nothing_is_proposed():
    """[SmartSpec §5]: once more than 0.7 of the iterations propose nothing, new requests never speculate; older ones may."""
    engine = Engine(small(), draft=draft("large"), spec="goodput", cost=(Linear(gamma=9.0), Linear(0, 0, 0.02)), scheduler="orca", max_batch=4, n_page=400)
    early = Request(prompt(8), 120)
    engine.add(early)
    for _ in range(80):
        engine.step()
    late = Request(prompt(9), 20)
    engine.add(late)
    for _ in range(5):
        engine.step()
    assert early.speculates and late.speculates is False and early.n_draft_past == late.n_draft_past == 0
    engine.cost = Linear(gamma=0.0)
    finish(engine)
    assert early.n_drafted > 0 and late.n_drafted == 0
    fresh = Request(prompt(10), 20)
    engine.speculator.idle = 0.5
    engine.add(fresh)
    finish(engine)
    assert fresh.speculates and fresh.n_drafted > 0 and fresh.output == naive(10, 20)


@pytest.mark.parametrize("name, plan, room", [("orca", [1, 1, 300], 10 ** 9), ("sarathi", [1] * 6, 250), ("sarathi", [1] * 6 + [250], 0),
                                              ("sarathi", [1] * 6 + [40], 210), ("sarathi", [1] * 300, 84), ("sarathi_serve", [1] * 6 + [200], 50),
                                              ("sarathi_serve", [1] * 300, -44)])
def test_drafts_stay_within_the_schedulers_budget(name, plan, room):
    scheduler = make_scheduler(name, chunk=256, max_batch=8, tile=128)
    assert min(scheduler.room([(None, n) for n in plan]), 10 ** 9) == room


@pytest.mark.parametrize("kind, spec", [(kind, spec) for kind in ("ngram", "model") for spec in [*SPECS[1:], "oracle"] if (kind, spec) != ("ngram", "confidence")])
def test_the_simulator_speculates_with_the_same_policies(spec, kind):
    """Forced acceptance: its share is alpha, requests end exactly, and the clock has paid for drafts and target."""
    target, cheap = (CostModel.roofline(preset(name), "a100") for name in ("llama-7b", "llama-160m"))
    take = {}
    for name in ("off", spec):
        engine = Simulator(target, draft="ngram" if kind == "ngram" else cheap, spec=name, alpha=0.7, scheduler="orca", max_batch=8, n_page=8192)
        requests = serve(engine, [Request([0] * 128, 128) for _ in range(24)])
        take[name], s = engine.clock.now(), engine.speculator
        assert all(len(r.output) == 128 and r.state == "length" for r in requests)
    assert s.n_drafted > 0
    if not isinstance(spec, int):
        assert take[spec] < take["off"] / 1.2, "[SmartSpec Fig. 1]: at a small batch drafts pay"
    if spec == 1:
        assert s.n_accepted / s.n_drafted == pytest.approx(0.7, abs=0.05)
    if spec == "oracle":
        assert s.n_accepted == s.n_drafted


def test_forced_acceptance_on_a_model_with_random_weights():
    engine = Engine(small(), draft=draft("large"), spec=1, alpha=0.6, scheduler="orca", max_batch=8, n_page=2000)
    outputs = engine.generate([prompt(n) for n in range(3, 19)], max_new_tokens=60)
    assert all(len(out) == 60 for out in outputs)
    assert engine.speculator.n_accepted / engine.speculator.n_drafted == pytest.approx(0.6, abs=0.06) and engine.speculator.n_drafted > 400


def test_a_draft_models_cache_counts_as_memory():
    sizes = [Engine(small(), draft=d, spec=s, memory_gb=0.01).pool.n_page for d, s in ((None, "off"), (draft("self"), "off"), (draft("self"), 3))]
    assert sizes[0] == sizes[1] and sizes[2] == sizes[0] // 2
    with pytest.raises(ValueError, match="alpha = 0: a simulator"):
        Simulator(CostModel.roofline(preset("llama-7b"), "a100"), draft="ngram", spec=3)


def test_a_proposer_and_a_policy_of_ones_own():
    class Twice(sarathi.Proposer):
        """The newest token again."""
        def propose(self, requests, lengths):
            return [[int(r.tokens[r.n_tokens - 1])] * min(k, 2) for r, k in zip(requests, lengths)]

    class EveryOther(sarathi.Policy):
        """Two drafts for each second request."""
        def lengths(self, d):
            return np.minimum(d.most, [2 * (r.id % 2) for r in d.requests])
    try:
        engine = Engine(small(), draft="twice", spec="every_other", n_page=300, max_batch=4)
        assert engine.generate([prompt(n) for n in (20, 9, 33)], max_new_tokens=15) == [naive(n, 15) for n in (20, 9, 33)]
        assert engine.speculator.n_drafted > 0
    finally:
        sarathi.PROPOSERS.pop("twice"), sarathi.POLICIES.pop("every_other")


def test_speculation_on_the_command_line(cli):
    run = ["sarathi.py", "--tokens", "1,2,3,4,1,2,3,4,1,2", "--max-new-tokens", "30", "--temperature", "0", "--spec", "2"]
    ngram, same, heads = (cli(*run, "--draft", draft) for draft in ("ngram", "tiny", "heads"))
    for said in (ngram, same, heads):
        assert re.search(r"\d+ drafts, \d+% accepted, [\d.]+ tokens per iteration, goodput \d+ tokens/s", said.err), said.err
    assert ngram.out == same.out == heads.out and "100% accepted" in same.err
    trees, drafted = cli(*run[:-1], "3,2", "--draft", "heads"), lambda said: int(said.err.split(" drafts")[0].split()[-1])
    assert trees.out == heads.out and drafted(trees) > drafted(heads), "more than one draft for a place"


def test_a_bench_profiles_once_for_all_its_engines(monkeypatch):
    profiles = []
    monkeypatch.setattr(CostModel, "profile", staticmethod(lambda *_: profiles.append(SimpleCost()) or profiles[-1]))
    b = bench_of(lengths="32")
    own = SimpleCost()
    costs = [b.engine(scheduler, 32, 1, **more).cost for scheduler, more in (("autopilot", {}), ("autopilot", {}), ("orca", {}), ("autopilot", dict(cost=own)))]
    assert [c and c.base for c in costs] == [profiles[0], profiles[0], None, own] and len(profiles) == 1


def test_what_a_run_teaches_of_prices_the_next_knows(monkeypatch):
    monkeypatch.setattr(CostModel, "profile", staticmethod(lambda *_: Linear()))
    pair = bench.Pair(bench_of(lengths="32"))
    first, second = pair.engine("goodput"), pair.engine("goodput")
    assert first.cost is second.cost and first.speculator.proposer.cost is second.speculator.proposer.cost is not first.cost
    first.cost.learn(sarathi.Work(N=4, M=4, decodes=4, context=40), 1.0)
    assert second.cost.n_learned == 1 and first.cost.base is pair.prices[0], "what was profiled stays as it was"
    pair = bench.Pair(bench_of(hardware="a100"))
    assert pair.cost == pair.prices, "simulated ones know theirs"


def ahead(ran, way):
    """What ran right before it, each time."""
    return {a for a, b in zip(ran, ran[1:]) if b == way}


def test_no_way_always_runs_behind_the_same(monkeypatch):
    ran, b = [], bench_of(repeats=9)
    monkeypatch.setattr(b, "once", lambda f: ran.append(f) or 1.0)
    assert b.rounds(*"xyz") == [[1.0] * 9] * 3 and ahead(ran, "z") >= {"x", "y"}


def test_a_turn_clock_runs_in_its_turn_alone_and_waits_for_nobody(monkeypatch):
    t = [3.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: t[0])
    clock = bench.TurnClock()
    for begins, at in ((5.0, 0.0), (100.0, 10.0)):
        t[0] = begins
        with clock:
            assert clock.now() == at
            t[0] += 2
            assert clock.now() == at + 2
            clock.wait_until(at + 10)
            clock.wait_until(at + 1)
            assert clock.now() == at + 10 and t[0] == begins + 2


@pytest.mark.parametrize("overlap", [False, True])
def test_engines_abreast_have_their_turns_and_time_of_their_own(overlap):
    """Their tokens are those of one after the other; a job that comes in two hours is not waited for. What was started ahead ends in its turn."""
    b, jobs, ran, began = bench_of(), [bench.Job(0.0, 9, 7), bench.Job(0.001, 20, 5), bench.Job(7200.0, 12, 6)], [], time.perf_counter()

    def make(name):
        engine = b.engine("sarathi", 200, 3)
        step = (overlapped(engine) if overlap else engine).step
        engine.step = lambda: ran.append(name) or step()
        return engine
    ended = bench.abreast(b, {name: partial(make, name) for name in "xyz"}, jobs)
    assert [*ended] == [*"xyz"] and all([r.state for r in requests] == ["length"] * 3 for requests in ended.values())
    alone = bench.served(b, b.engine("sarathi", 200, 3), bench.requests_of(b, b.engine("sarathi", 200, 3), [job._replace(arrival=0.0) for job in jobs]))
    assert all([r.tokens[:r.n_tokens].tolist() for r in requests] == [r.tokens[:r.n_tokens].tolist() for r in alone] for requests in ended.values())
    assert all(7200 < requests[2].times[0] < 7300 and requests[2].ttft < 60 for requests in ended.values()) and time.perf_counter() - began < 600
    assert all({*ran[i:i + 3]} == {*"xyz"} for i in range(0, 15, 3)) and ahead(ran[:15], "x") >= {"y", "z"}, "one turn each, in changing order"


def test_a_sweep_serves_its_choices_abreast_with_the_same_luck(monkeypatch):
    ways, ran = ["off", 1, 3, "goodput"], []
    pair = bench.Pair(bench_of(lengths="32", repeats=4), "ngram")
    monkeypatch.setattr(pair, "engine", lambda spec, seed: (spec, seed))
    monkeypatch.setattr(pair, "jobs", lambda rate: [])
    monkeypatch.setattr(bench, "abreast", lambda b, engines, jobs: ran.append([make() for make in engines.values()]) or dict.fromkeys(engines, ()))
    monkeypatch.setattr(bench, "metrics", lambda ended: {"latency": 1.0 + len(ran)})
    took, times = pair.latencies(1, ways)
    assert took == {spec: [3.0, 4.0] for spec in ways} and times == dict.fromkeys(ways, 1.0), "the first round only teaches"
    assert ran == [[(spec, seed) for spec in ways] for seed in (0, 1, 2)]


def test_autopilot_runs_in_every_round_beside_those_that_the_first_chose(monkeypatch):
    ran, b = [], bench_of(repeats=6)
    ended = [SimpleNamespace(times=[1.0], arrival=0.0, tpot=0.5)]
    monkeypatch.setattr(bench, "pilot_of", lambda work, alpha, draft, cost, setting, target, seed: ran.append((setting, seed)))
    monkeypatch.setattr(bench, "abreast", lambda b, engines, jobs: {setting: make() or ended for setting, make in engines.items()})
    _, seen = bench.trials(b, bench.PILOT[0], None, [b.price(b.model)])
    assert {*map(len, seen.values())} == {1, 6} and [*seen][-1] == "autopilot" and seen["autopilot"] == [bench.Trial(1.0, 0.5)] * 6
    assert [*{seed: 0 for _, seed in ran}] == [b.options.seed + i for i in range(6)]


def test_a_cpu_that_imitates_bfloat16_gets_a_smaller_model(monkeypatch):
    for dtype, name in ((torch.bfloat16, "llama-124m"), (torch.float32, "llama-30m")):
        monkeypatch.setattr(bench, "default_dtype", lambda dtype=dtype: dtype)
        assert bench.biggest_llama("cpu") == name


def test_the_standard_error_of_a_median_is_that_of_normal_values():
    values = np.random.default_rng(0).normal(5.0, 2.0, (4000, 25))
    assert np.std(np.median(values, 1)) == pytest.approx(np.mean([bench.deviation(row) for row in values]), rel=0.1) and bench.deviation([1.0]) is None


def test_a_bench_keeps_its_lengths_with_another_model():
    b = bench.Bench(GPT.from_preset(dataclasses.replace(small().config, block_size=1000)), bench.BenchConfig(), EngineConfig())
    assert b.other(CostModel.roofline(b.model.config, "a100")).lengths == b.lengths == [256, 512, 768], "a profile of a small model, too"


def test_a_corrected_cost_model_is_its_base_in_all_that_is_not_a_price():
    base = CostModel.roofline(preset("llama-13b"), "a100", tp=8, system="vllm")
    learned = sarathi.Learned(base)
    assert learned.operators(100, 1000) == base.operators(100, 1000), "all-reduces included"
    assert learned.system == base.system and learned.load(1000, resize=True) == base.load(1000, resize=True) and learned.time(9, 9) == base.time(9, 9)
    assert copy.deepcopy(learned).time(9, 9) == base.time(9, 9), "it may be copied, and sent to other ranks"


def test_autopilot_as_scheduler_is_the_drafts_policy_too_unless_another_was_asked_for(tmp_path):
    asked = lambda scheduler, draft, spec=None: sarathi.draft_spec(argparse.Namespace(scheduler=scheduler, draft=draft, spec=spec))
    model_py.Heads(2, 64).save_pretrained(tmp_path)
    assert asked("autopilot", "ngram") == "autopilot" and asked("sarathi", "ngram") == asked("autopilot", "ngram", "goodput") == "goodput"
    assert asked("autopilot", None) == "off" and asked("autopilot", "heads") == asked("autopilot", str(tmp_path)) == "goodput", "it knows no trees"
    with pytest.raises(ValueError, match="spec = 'autopilot' needs scheduler = 'autopilot'"):
        asked("sarathi", "ngram", "autopilot")


# ---------------------------------------------------------------- trees of drafts

class Guesser(sarathi.Medusa, named=False):
    """Heads that know the right token of each level seven times out of ten, and put it anywhere among their guesses."""

    def __init__(self, right, seed=0):
        super().__init__()
        self.right, self.rng = right, np.random.default_rng(seed)

    def propose(self, requests, trees):
        return [self.guess(tree, self.right(r)[len(r.output):]) for r, tree in zip(requests, trees)]

    def guess(self, tree, right):
        drafts, on_path = self.rng.integers(0, SMALL["vocab_size"], tree.n), {0}
        for h, k in enumerate(tree.shape):
            children = [row for row in range(1, tree.n + 1) if tree.parents[row] in on_path]
            for row in children:
                drafts[row - 1] = (right[h] + 1 + row % k) % SMALL["vocab_size"]  # no two alike, none right
            lucky = children[self.rng.integers(k)]
            if h < len(right) and self.rng.random() < 0.7:
                drafts[lucky - 1] = right[h]
            on_path = {lucky}
        return drafts.tolist()


def test_a_tree_of_3_2_2_is_21_drafts_level_by_level():
    tree = sarathi.Tree.of((3, 2, 2))
    assert tree.n == 3 + 6 + 12 and tree.parents[:10] == (-1, 0, 0, 0, 1, 1, 2, 2, 3, 3) and tree.level.tolist() == [0] + [1] * 3 + [2] * 6 + [3] * 12
    assert sarathi.Tree.of(()).n == 0 and not sarathi.Tree.of((1, 1)).branches and sarathi.Tree.of((1, 2)).branches
    assert [sarathi.fitting((3, 2, 2), n) for n in (0, 2, 3, 8, 9, 20, 21)] == [(), (), (3,), (3,), (3, 2), (3, 2), (3, 2, 2)]
    assert sarathi.fitting((3, 2, 2), 21, chain=True) == (1, 1, 1)
    sees = kernels.lineage(tree.parents)
    for row in range(22):  # by definition: up the parents to the root
        line, at = set(), row
        while at >= 0:
            line, at = line | {at}, tree.parents[at]
        assert set(sees[row].nonzero().flatten().tolist()) == line and len(line) == tree.level[row] + 1


@pytest.mark.parametrize("shape", [(3, 2, 2), (2, 1, 1), (2, 3)])
@pytest.mark.parametrize("alloc", ["reserve", "grow"])
@pytest.mark.parametrize("family, dtype, tolerance", [("llama", torch.float32, 1e-4), ("gpt2", torch.float32, 1e-4), ("llama", torch.bfloat16, 0.02)])
def test_every_path_of_a_tree_gives_the_logits_of_that_path_fed_alone(shape, alloc, family, dtype, tolerance):
    """Three neighbours verify a tree each, two with equal shapes in one call, beside a chunk of a fourth's prompt."""
    m = small(family, dtype)
    engine = Engine(m, draft=sarathi.Medusa(), spec=",".join(map(str, shape)), n_page=300, max_batch=4, alloc=alloc)
    tree, rng, plan = sarathi.Tree.of(shape), np.random.default_rng(0), []
    add(engine, [Request(prompt(n), 30) for n in (20, 9, 24, 70)])
    engine._arrive()
    for r in list(engine.waiting):
        engine._hold(r, r.max_len)
        engine._start(r)
        engine._forward([(r, r.n_tokens - 1)])
        r.n_past = r.n_tokens - 1 if r.n_tokens < 70 else 0
        if r.n_past:
            r.tree = tree
            r.tokens[r.n_tokens:r.n_tokens + tree.n] = rng.integers(0, 199, tree.n)
        plan.append((r, 1 + tree.n if r.n_past else 40))
    rows, seen = engine._forward(plan).float(), 0
    for r, n in plan:
        for leaf in range(1, 1 + tree.n) if r.tree else ():
            path = [leaf]
            while tree.parents[path[0]] > 0:
                path.insert(0, tree.parents[path[0]])
            alone = m.whole(torch.tensor([[*r.prompt, *r.tokens[r.n_tokens + np.array(path) - 1]]]), dtype)[0, -1 - len(path):].float()
            both = rows[[seen + row for row in (0, *path)]]
            assert (both - alone).abs().max() < tolerance * (alone.max() - alone.min()), (r.id, path)
        seen += r.n_wanted(n)


@pytest.mark.parametrize("spec", ["3,2,2", "2,1", 2, "goodput"])
@pytest.mark.parametrize("scheduler, alloc", [("orca", "grow"), ("sarathi", "reserve"), ("sarathi_serve", "grow"), ("static", "reserve")])
def test_trees_never_change_a_greedy_token(spec, scheduler, alloc):
    """Nor one of a request that draws from its likeliest token alone, whose drafts stay a chain; and trees are accepted, and moved."""
    lengths, n_new = [90, 15, 1, 16, 17, 33], 40
    engine = Engine(small(), draft=Guesser(lambda r: naive(len(r.prompt), 44)), spec=spec, cost=(Moody(), None), scheduler=scheduler,
                    chunk=96, max_batch=4, tile=8, alloc=alloc, n_page=200)
    requests = serve(engine, [Request(prompt(n), n_new, temperature=float(n == 17), top_k=int(n == 17)) for n in lengths])
    for r, n in zip(requests, lengths):
        assert r.output == naive(n, 44)[:n_new] and r.n_accepted > 0, f"prompt of {n}"
    rate = [len(r.times) / len(set(r.times)) for r in requests if not r.temperature]
    assert min(rate) > 1.2 and (alloc == "reserve" or scheduler == "sarathi_serve" or sum(r.n_preempted for r in requests) > 0)


def test_a_tree_whose_verification_failed_is_forgotten():
    """Its request may be preempted next: then its prompt is fed again, and no level of a tree says where."""
    engine, r = Engine(small(), draft=Guesser(lambda r: naive(20, 24)), spec="3,2,2", n_page=100), Request(prompt(20), 20)
    engine.add(r)
    engine.step(), engine.step()
    forward, engine._forward = engine._forward, None
    with pytest.raises(TypeError):
        engine.step()
    engine._forward = forward
    engine._preempt(r)
    finish(engine)
    assert r.output == naive(20, 20)


def test_heads_guess_from_the_last_state_and_trees_are_what_they_rank_highest(tmp_path):
    """Trained on text that repeats itself, heads know what comes; saved and read they are the same."""
    period, m = [5, 9, 30, 7, 61, 12, 40, 3], GPT.from_preset(GPTConfig(**SMALL | {"n_layer": 1}))
    data = torch.tensor(period * 200)
    heads, loss, right = model_py.train_heads(m, data, 60, n=2, T=32, lr=0.02)
    assert right.min() > 0.95 and loss.max() < 1.0
    heads.save_pretrained(tmp_path)
    again = model_py.load_heads(tmp_path)
    engine = Engine(m, draft=again, spec="2,2", n_page=100, max_batch=1)
    r = Request((period * 3)[:20], 12)
    engine.add(r)
    engine.step()
    plan = engine.speculator.widen([(r, 1)])
    state = m.hidden_whole(torch.tensor([r.prompt]))[0, -1]
    (a, b), (c, d) = heads(state, m.head).topk(2).indices.tolist()
    assert plan == [(r, 7)] and r.tokens[21:27].tolist() == [a, b, c, d, c, d] and [a, c] == [period[21 % 8], period[22 % 8]]
    (tmp_path / "heads.json").write_text('{"n_head": 3, "n_embd": 64}')
    with pytest.raises(ValueError, match="'blocks.2.weight' is missing"):
        model_py.load_heads(tmp_path)


@pytest.mark.parametrize("drafts", [[199], [-1], [1] * 4, [1.5], ["a"], None, np.array([1])])
def test_drafts_that_cannot_be_are_one_clear_sentence(drafts):
    """From a proposer of somebody's own: outside the vocabulary, more than were asked for, or no list of tokens; or not for all."""
    class Wrong(sarathi.Proposer, named=False):
        def propose(self, requests, lengths):
            return [drafts for r in requests]
    engine = Engine(small(), draft=Wrong(), spec=3, n_page=100)
    with pytest.raises(ValueError, match=re.escape(f"Wrong: {drafts!r} for request 0: must be a list of up to 3 drafts in 0 .. 198")):
        engine.generate([prompt(5)], 9)
    for lists in (None, []):
        engine.speculator.proposer.propose = lambda *_: lists
        with pytest.raises(ValueError, match=re.escape(f"Wrong: {lists}: must be a list with a list of drafts for each request, here 1")):
            engine.generate([prompt(5)], 9)
    assert not engine.requests and engine.pool.n_free == 100


def test_goodput_knows_what_heads_take():
    """They guess, their time is booked, and once they take too long nobody asks them."""
    engine, r = Engine(small(), draft=model_py.Heads(3, 64), spec="goodput", cost=(Linear(), None), n_page=100), Request(prompt(9), 30)
    heads = engine.speculator.proposer
    engine.add(r)
    engine.step(), engine.step()
    assert r.n_drafted > 0 and 0 < heads.took == heads.seconds(1, 9, 1) == heads.seconds(8, 900, 3)
    heads.took, drafted = 1e9, r.n_drafted
    engine.run()
    assert r.n_drafted == drafted and r.output == naive(9, 30) and heads.took < 0.9e9, "but not for ever"


@pytest.mark.parametrize("options, message", [
    (dict(draft="ngram", spec="3,2,2"), "spec = 3,2,2: a tree of drafts needs Heads"), (dict(spec="2,0"), "spec = 0: must be"),
    (dict(spec="9,9,9"), "a tree of 819 drafts, at most 127"), (dict(spec="2,1,1"), "has no tree for 2 heads"), (dict(spec=3), "has no tree for 2 heads"),
    (dict(spec="confidence", cost=(None, None)), "Confidence has no tree"), (dict(draft=model_py.Heads(2, 32), spec=2), "the model's have 64")])
def test_trees_that_cannot_be_are_one_clear_sentence(options, message):
    if options.get("cost"):
        options["cost"] = Linear()
    with pytest.raises(ValueError, match=re.escape(message)):
        Engine(small(), **dict(draft=model_py.Heads(2, 64), n_page=100) | options)


def test_the_length_model_of_a_tree_counts_every_outcome():
    """[SmartSpec Eq. 10] against all outcomes of all candidates; with one candidate each it is Eq. 8, and as printed where the two agree."""
    rng = np.random.default_rng(0)
    for shape in [(), (1,), (3,), (2, 1, 1), (2, 3), (3, 2, 2)]:
        alpha, total = rng.random(3), 0.0
        for outcome in np.ndindex(*[2] * sum(shape)):  # each head's candidates: right or not
            flags, tokens = np.split(np.array(outcome, int), np.cumsum(shape)[:-1]) if shape else [], 1
            chance = np.prod([np.where(f, a, 1 - a).prod() for f, a in zip(flags, alpha)])
            for f in flags:
                if not f.any():
                    break
                tokens += 1
            total += chance * tokens
        assert sarathi.tree_tokens(alpha, shape) == pytest.approx(total)
        a, h = [*alpha[:len(shape)], 0], len(shape)
        printed = sum((i + 1) * (1 - a[i]) * np.prod([1 - (1 - a[j]) ** shape[j] for j in range(i)]) for i in range(1, h + 1))
        if shape in ((1,), (2, 1, 1), (3,)):
            assert printed + (1 - a[0]) ** shape[0] == pytest.approx(total)
    assert sarathi.tree_tokens([0.6] * 4, (1,) * 4) == pytest.approx(float(sarathi.expected_tokens(0.6, 4)))


def test_goodput_falls_back_from_trees_to_chains_to_nothing_under_load():
    """[SmartSpec Fig. 16]: the fuller the batch, the fewer drafts; fixed 3,2,2 verifies 22 rows for each request whatever it costs."""
    cost, chosen, take = CostModel.roofline(preset("llama-7b"), "a100"), {}, {}
    for B in (1, 8, 64, 256):
        for spec in ("off", "3,2,2", "goodput"):
            engine, sizes = Simulator(cost, draft=sarathi.Medusa(), spec=spec, alpha=0.6, scheduler="orca", max_batch=B, n_page=256 * B, record=[]), []
            serve(engine, [Request([0] * 64, 60) for _ in range(B)])
            sizes = [n for span in engine.record[1:] for _, _, n in span.entries]
            chosen[spec, B], take[spec, B] = max(sizes), engine.clock.now()
    assert [chosen["3,2,2", B] for B in (1, 256)] == [22, 22] and chosen["goodput", 1] > 4
    assert chosen["goodput", 1] >= chosen["goodput", 64] >= chosen["goodput", 256] <= 2
    assert take["3,2,2", 256] > 1.5 * take["off", 256] > take["off", 1]
    for B in (1, 8, 64, 256):
        assert take["goodput", B] < 1.03 * min(take["off", B], take["3,2,2", B]), B


def test_acceptance_is_counted_by_head_and_candidate():
    cost, tree = CostModel.roofline(preset("llama-7b"), "a100"), sarathi.Tree.of((3, 2))
    assert tree.tally([2, 6]).tolist() == [[1, 1], [2, 1]] and tree.tally([3]).tolist() == [[1, 0], [3, 2]] and tree.tally([]).tolist() == [[0, 0], [3, 0]]
    engine, total = Simulator(cost, draft=sarathi.Medusa(), spec="3,2,2", alpha=0.4, scheduler="orca", max_batch=16, n_page=16 * 1024), np.zeros((2, 3))
    add(engine, [Request([0] * 64, 400) for _ in range(16)])
    before = engine.speculator.by_head
    for _ in steps(engine):
        total += engine.speculator.by_head - sarathi.FADE * before
        before = engine.speculator.by_head
    assert np.allclose(total[0] / total[1], 0.4, atol=0.05)
    assert engine.speculator.n_accepted > 1000


# ---------------------------------------------------------------- 16. overload

def items(x, seen):
    """How many items there are in the containers that can be reached from x through the engine's own objects."""
    if id(x) in seen:
        return 0
    seen.add(id(x))
    if isinstance(x, (dict, list, tuple, set, deque)):
        return len(x) + sum(items(y, seen) for y in (x.values() if isinstance(x, dict) else x))
    return sum(items(y, seen) for y in vars(x).values()) if type(x).__module__ in ("sarathi", __name__) and hasattr(x, "__dict__") else 0


def storm(engine, rng, n_step=80):
    """Ten times more requests than can be served, every step for a while, of all kinds; some are aborted, some before they arrive ->
    (most items that the engine held in the first and in the second half, the requests, the Events with an end)."""
    requests, peaks, ends = [], [0, 0], []
    for step in range(n_step):
        for i in range(8):
            requests.append(Request([rng.randrange(9) for _ in range(rng.randint(1, 30))], rng.randint(1, 16), rng.choice([None, *engine.adapters.known]),
                                    rng.choice((0.0, 1.0)), client=f"user {step + i}", arrival=engine.clock.now() + 1e6 * (i == 7)))
            engine.add(requests[-1])
        engine.abort(requests[-1].id)  # the one that is not here yet
        if step % 5 == 0:
            engine.abort(rng.choice(list(engine.requests)))
        ends += [e for e in engine.step() if e.finished]
        engine.clock.t += 1.0
        engine.pool.check()
        peaks[step >= n_step // 2] = max(peaks[step >= n_step // 2], items(engine, set()) - len(engine.pending))
    for events in steps(engine):
        ends += [e for e in events if e.finished]
        engine.clock.t += 1.0
    return peaks, requests, ends


LIMITS = [dict(max_waiting=9), dict(slo=12.0), dict(max_waiting=9, slo=12.0, order="lcfs", cluster=2, fair=2.0)]


@pytest.mark.parametrize("limit", range(3))
@pytest.mark.parametrize("i, draft, alloc", [(0, None, "grow"), (1, "ngram", "reserve"), (2, "model", "grow"), (3, "heads", "grow")])
def test_an_overload_is_survived(i, draft, alloc, limit):
    """What the engine holds stops to grow, who is not served is told and counted, and afterwards nothing is left, but what is known of
    clients. Limits meet all drafts, and both of them the engine and the simulator."""
    make, limits = [Engine, Simulator][(i + limit) % 2], LIMITS[limit]
    model, drafter = (least(), GPT.from_preset(GPTConfig(**LEAST), seed=5)) if make is Engine else (SimpleCost(), Linear())
    draft = dict(model=drafter, heads=sarathi.Medusa() if make is Simulator else model_py.Heads(2, LEAST["n_embd"])).get(draft, draft)
    engine = make(model, clock=sarathi.VirtualClock(), max_batch=4, chunk=32, tile=8, n_page=150, alloc=alloc, draft=draft, alpha=0.5 * (make is Simulator),
                  spec=2 if draft else "off", **limits)
    for i in range(6):
        engine.add_adapter(f"a{i}", random_adapter(1 + i % 2, i))
    rng, empty = random.Random(0), []
    for _ in range(2):
        peaks, requests, ends = storm(engine, rng)
        assert peaks[1] < 1.5 * peaks[0], "it holds more and more"
        states = [r.state for r in requests]
        told = {e.request: e.finished for e in ends}
        assert len(told) == len(ends) and all(told.get(r, "abort") == r.state for r in requests)
        assert engine.n_ended["refused"] - sum(n["refused"] for n, _ in empty) == states.count("refused")
        assert 30 < 7 * states.count("length") < states.count("refused") + states.count("abort")
        assert states.count("refused") > 100 or "max_waiting" not in limits
        assert not (engine.requests or engine.pending or engine.waiting or engine.running or engine.news) and engine.step() == []
        known = weakref.WeakSet(requests)
        del requests, told, ends
        gc.collect()
        assert not known, "somebody still knows a request"
        while engine.adapters.evict():
            pass
        assert engine.pool.n_free == engine.pool.n_page and not engine.pool.tables
        empty.append((engine.n_ended.copy(), items(engine, {id(engine.order)})))  # which may remember clients
    assert empty[0][1] == empty[1][1] and empty[1][0].total() == engine.n_added


def test_max_waiting_is_of_those_who_find_no_slot():
    """Of ten that come at once to a batch of three, three run, two wait, five are refused in the order of their coming."""
    engine = Engine(small(), max_batch=3, max_waiting=2, n_page=300, scheduler="orca")
    requests = add(engine, [Request(prompt(5, seed=i), 3) for i in range(10)])
    events = engine.step()
    assert [(e.request, e.finished) for e in events if not e.tokens] == [(r, "refused") for r in requests[5:]] and all(r.done for r in requests[5:])
    finish(engine)
    assert [r.output for r in requests] == [naive(5, 3, seed=i) for i in range(5)] + [[]] * 5 and engine.n_ended == dict(length=5, refused=5)
    assert Engine(small(), max_batch=1, max_waiting=1, n_page=300).generate([[1], [2], [3]], 2)[2] == []
    line = Pipeline(SlowStages(), 3, max_batch=2, max_waiting=2, n_page=300, scheduler="orca")
    assert [bool(out) for out in line.generate([[1]] * 10, 3)] == [True] * 8 + [False] * 2, "of a pipeline the slots of all lanes"


# ---------------------------------------------------------------- 17. everything with everything: the product of the features

FACTORS = dict(
    scheduler=[name for name, made in SCHEDULERS.items() if made.__module__ == "sarathi"], alloc=["reserve", "grow"], chunk=[7, 24, 96], tile=[8, 32], max_batch=[1, 6], pool=["small", "large"],
    adapters=["none", "one", "mixed"], lora=["batched", "bmm", "merge"], adapter_pages=[0, 64],
    order=list(next(f for f in fields(EngineConfig) if f.name == "order").metadata["choices"]), cluster=[0, 2], fair=[0, 2],
    draft=[None, *sarathi.PROPOSERS, "self", "large", "guesser", "heads"], spec=[*(name for name in sarathi.POLICIES if name != "oracle"), 3, "2,2"],
    sampling=["greedy", "mixed"], aborts=[False, True])  # oracle wants a forced acceptance, so no token is the model's
PLAIN = dict(scheduler="sarathi", alloc="reserve", chunk=24, tile=8, max_batch=4, pool="large", adapters="none", lora="batched", adapter_pages=0,
             order="fcfs", cluster=0, fair=0, draft=None, spec="off", sampling="greedy", aborts=False)
EXCLUSIVE = [("draft", [None], "spec", [spec for spec in FACTORS["spec"] if spec != "off"]), ("draft", ["ngram"], "spec", ["confidence"]),
             ("draft", ["ngram", "self", "large"], "spec", ["2,2"]), ("draft", ["guesser", "heads"], "spec", [name for name, made in sarathi.POLICIES.items() if not made.shapes and name != "off"]),
             *(("spec", [name], "scheduler", [other for other in FACTORS["scheduler"] if other != name]) for name in SCHEDULERS if name in sarathi.POLICIES),
             ("lora", ["merge"], "adapter_pages", [64]), ("lora", ["merge"], "cluster", [2])]
EXCLUSIVE = {frozenset([(f, v), (g, w)]) for f, vs, g, ws in EXCLUSIVE for v in vs for w in ws}


def pairs(factors):
    """Every two values, one each of two factors, that go together: {(factor, value), (factor, value)}; of a case, its own."""
    values = lambda f: factors[f] if isinstance(factors[f], list) else [factors[f]]
    every = (frozenset([(f, v), (g, w)]) for f, g in combinations(factors, 2) for v in values(f) for w in values(g))
    return dict.fromkeys(pair for pair in every if pair not in EXCLUSIVE)  # in a fixed order


def complete(case, missing, rng):
    """The case with a value for every other factor too, that goes with those it has: the one with the most of the missing pairs."""
    for f in rng.sample(list(FACTORS), len(FACTORS)):
        if f not in case:
            new = {v: [frozenset([(f, v), other]) for other in case.items()] for v in FACTORS[f]}
            fit = [v for v in FACTORS[f] if not EXCLUSIVE.intersection(new[v])]
            case[f] = max(fit, key=lambda v: (sum(pair in missing for pair in new[v]), rng.random()))
    return {f: case[f] for f in FACTORS}


def covering(n, seed=0):
    """At least n cases that together have every pair, each begun with one that is missing."""
    missing, cases, rng = pairs(FACTORS), [], random.Random(seed)
    while missing or len(cases) < n:
        cases.append(complete(dict(next(iter(missing), ())), missing, rng))
        missing = {pair: None for pair in missing if not pair <= cases[-1].items()}
    return cases


MATRIX = covering(60)


def test_the_matrix_has_every_pair_of_values():
    held = {frozenset(pair) for case in MATRIX for pair in combinations(case.items(), 2)}
    assert len(MATRIX) >= 60 and all(set(case) == set(FACTORS) for case in MATRIX)
    assert held == set(pairs(FACTORS)), "no pair is left out, and no excluded one is in"


@pytest.mark.parametrize("pair", sorted(EXCLUSIVE, key=lambda pair: sorted(map(str, pair))), ids=lambda pair: " ".join(f"{f}={v}" for f, v in sorted(pair)))
def test_what_is_not_in_the_matrix_is_refused_in_one_line_at_the_start(pair):
    spec = dict(pair).get("spec")
    case = PLAIN | (dict(draft="self") if spec else {}) | (dict(scheduler=spec) if spec in SCHEDULERS else {}) | dict(pair)
    with pytest.raises(ValueError) as error:
        engine_of(case)
    assert "\n" not in str(error.value)


@lru_cache
def matrix_adapters():
    return adapters_for(small(), [2, 1, 3, 2])


@lru_cache
def merged(name):
    return small().merged(matrix_adapters()[name])


@lru_cache(maxsize=None)
def alone(length, n, seed, adapter, sampling):
    """The request by itself on the plainest engine."""
    return Engine(small() if adapter is None else merged(adapter), n_page=200).generate([prompt(length, seed)], n, **dict(sampling))[0]


def engine_of(case):
    drafts = dict(guesser=Guesser(lambda r: naive(len(r.prompt), r.max_new_tokens + 4, adapter=r.adapter)), heads=model_py.Heads(3, 64))
    kind, options = case["draft"], {name: case[name] for name in case if name not in ("draft", "pool", "adapters", "sampling", "aborts")}
    return Engine(small(), draft=drafts.get(kind) or draft(kind), cost=(Moody(), Linear(0, 0, 0.02)), 
                  n_page=(88 if case["pool"] == "small" else 900) + case["adapter_pages"], **options)


def requests_of(case, lengths, n_new):
    """-> [(request, its tokens: None, where chance decides)], and those that will be aborted; one request has a stop token."""
    names = dict(none=[None], one=["a2", None], mixed=[None, *matrix_adapters()])[case["adapters"]]
    speculates, found = case["draft"] and case["spec"] != "off", []
    for i, length in enumerate(lengths):
        adapter, sampling = names[i % len(names)], {}
        if case["sampling"] == "mixed" and i % 3 == 1:
            sampling = [dict(temperature=0.9, seed=i), dict(temperature=1.2, top_k=20, top_p=0.9, seed=i)][i % 2]
        tokens = naive(length, n_new, adapter=adapter) if not sampling else None if speculates else alone(length, n_new, 0, adapter, tuple(sampling.items()))
        stop = [tokens[n_new // 2]] if i == 3 and tokens else []
        found.append((Request(prompt(length), n_new, adapter, stop=stop, client="abb"[i % 3], **sampling), tokens[:tokens.index(stop[0]) + 1] if stop else tokens))
    return found, [Request(prompt(5 + i, seed=7), n_new, names[-1], arrival=1e6 * (i == 2)) for i in range(3 * case["aborts"])]


HAPPENED = Counter()


def prove(case, lengths=(40, 9, 1, 16, 17, 25), n_new=16, spoil=None, ahead=0):
    """Serve the case's requests, checking the pool after every step: each has the tokens of the naive loop, told one after the other.
    spoil(engine): lets some of its parts fail now and then; the steps after that go on. ahead: iterations overlap."""
    engine = engine_of(case)
    engine.ahead = engine.behind = ahead
    learn(engine, matrix_adapters() if case["adapters"] != "none" else {})
    (expected, victims), told, step = requests_of(case, lengths, n_new), {}, 0
    add(engine, [*(r for r, _ in expected[:2]), *victims, *(r for r, _ in expected[2:])])
    if spoil:
        spoil(engine)
    while engine.requests:
        try:
            for event in engine.step():
                told.setdefault(event.request, []).extend(event.tokens)
        except MemoryError:
            HAPPENED["failures"] += 1
        engine.pool.check()
        engine.adapters.pool.check()
        step += 1
        assert step < 3000, "the engine does not come to an end"
        if step in (2, 4, 6) and victims:  # waiting, in its prompt or generating, as it happens; the last is not here yet
            victim = victims.pop()
            HAPPENED["abort while " + victim.state] += not victim.done
            if not victim.done:
                engine.abort(victim.id)
                engine.pool.check()
    for r, tokens in expected:
        tokens = r.output if tokens is None or spoil and r.temperature else tokens  # an iteration that failed may have drawn numbers
        assert r.output == tokens and told[r] == r.output and len(r.times) == len(r.output)
        assert r.state == "length" and len(r.output) == n_new or r.state == "stop" and r.output[-1] in r.stop
    for what in ("n_preempted", "n_drafted", "n_accepted"):
        HAPPENED[what] += sum(getattr(r, what) for r, _ in expected)
    assert engine.step() == [] and not (engine.running or engine.waiting or engine.pending or engine.pool.tables.keys() - engine.adapters.resident)
    while engine.adapters.evict():
        pass
    assert engine.pool.n_free == engine.pool.n_page and engine.adapters.pool.n_free == engine.adapters.pool.n_page


@pytest.mark.parametrize("case", MATRIX, ids=lambda case: "-".join(str(v) for v in case.values()))
def test_everything_with_everything(case):
    prove(case)
    HAPPENED["cases"] += 1
    if HAPPENED["cases"] == len(MATRIX):  # all ran, so much has happened
        assert HAPPENED["n_preempted"] > 5 and HAPPENED["n_drafted"] > HAPPENED["n_accepted"] > 500, HAPPENED
        assert min(HAPPENED["abort while " + state] for state in ("pending", "waiting", "running")) > 3, HAPPENED


def test_a_case_of_the_day():
    """Another one in every run; MATRIX_SEED=... brings one back."""
    seed = int(os.environ.get("MATRIX_SEED") or random.SystemRandom().randrange(10 ** 6))
    rng = random.Random(seed)
    case, lengths = complete({}, {}, rng), [rng.choice((1, 2, 8, 15, 16, 17, 40)) for _ in range(rng.randint(4, 8))]
    print(f"MATRIX_SEED={seed}", case, lengths)
    prove(case, lengths, rng.randint(1, 20))


def spoil(engine, rng):
    """Here and there the model, the sampling, a proposer or a copy raises, before or after its work."""
    def failing(owner, name, before, after):
        work = getattr(owner, name)

        def wrapped(*args):
            luck = rng.random()
            done = None if luck < before else work(*args)
            if not before <= luck <= 1 - after:
                raise MemoryError
            return done
        setattr(owner, name, wrapped)
    failing(engine, "_forward", 0.1, 0.1), failing(engine, "_sample", 0.05, 0.05), failing(engine.adapters, "copy", 0.2, 0)
    if engine.speculator:
        failing(engine.speculator.proposer, "propose", 0.05, 0.05)


@pytest.mark.parametrize("seed", range(16))
def test_steps_that_fail_at_any_place_harm_nobody(seed):
    rng, before = random.Random(seed), HAPPENED["failures"]
    case = complete(dict(pool="small", **(dict(alloc="grow", max_batch=6) if seed % 2 else {})), {}, rng)
    prove(case, spoil=lambda engine: spoil(engine, rng))
    assert HAPPENED["failures"] > before


# ---------------------------------------------------------------- 18. autopilot: chunks and drafts by one price

A100 = CostModel.roofline(preset("llama-13b"), "a100")
DRAFT = CostModel.roofline(preset("llama-160m"), "a100")


def flown(scheduler, shape, gap, spec="off", cost=None, alpha=0.7, n=30, **options):
    """Requests of (prompt, new tokens), give or take a half, one in `gap` seconds -> the engine when all have ended, the requests."""
    rng, drafts = np.random.RandomState(1), dict(draft=DRAFT, alpha=alpha) if spec != "off" else {}
    engine = Simulator(A100, scheduler=scheduler, spec=spec, cost=cost, max_batch=16, alloc="grow", **drafts, **options)
    requests = [Request(np.zeros(p, int), d, arrival=gap * i) for i, (p, d) in enumerate(rng.randint(*(np.array(shape) * x // 2 for x in (1, 3)), (n, 2)))]
    add(engine, requests)
    engine.run()
    return engine, requests


def latency(requests):
    return np.mean([r.times[-1] - r.arrival for r in requests])


@pytest.mark.parametrize("shape, gap", [((200, 200), 0.5), ((900, 90), 0.4), ((1200, 12), 0.25), ((1200, 6), 0.1)])
@pytest.mark.parametrize("drafts", [False, True])
def test_autopilot_is_as_good_as_the_best_setting_of_a_grid(shape, gap, drafts):
    grid = [latency(flown(sarathi.SarathiServe(chunk=C), shape, gap, k)[1]) for C in (128, 256, 512, 1024, 2048) for k in (("off", 2, 5, 7) if drafts else ("off",))]
    ours = latency(flown("autopilot", shape, gap, "autopilot" if drafts else "off")[1])
    assert ours <= 1.02 * min(grid)
    assert max(grid) > (1.1 if drafts or shape[0] > 900 else 1.0) * min(grid), "the settings were meant to differ"


def test_forced_luck_belongs_to_the_place_whatever_k():
    """So that fixed numbers of drafts and those that a policy chooses meet the same text, and differ by their choice alone."""
    passes = []
    for k in (1, 3, 7):
        engine = Simulator(A100, draft="ngram", spec=k, alpha=0.7, seed=5)
        r, = add(engine, [Request(np.zeros(50, int), 200)])
        engine.run()
        n, times = len(r.prompt) + 1, 1  # the first token is the prefill's
        while n < r.max_len:
            n, times = n + 1 + next(j for j in range(k + 1) if j == min(k, r.max_len - n - 1) or not r.passes[n + j]), times + 1
        assert len(set(r.times)) == times
        passes.append(r.passes[51:250])
    assert (passes[0] == passes[1]).all() and (passes[0] == passes[2]).all() and 0.6 < passes[0].mean() < 0.8


@pytest.mark.parametrize("alpha", [0.3, 0.8])
def test_autopilot_keeps_its_targets(alpha):
    """A budget that prefills whole prompts breaks both; the last drafts of a request may have no luck, of one in twenty."""
    lone = A100.time(1, 1000)
    for spec in ("off", "autopilot"):
        run = lambda **target: flown("autopilot", (1200, 24), 0.2, spec, alpha=alpha, n=60, record=[], **target)
        free, kept, steady = run(), run(tpot=1.5 * lone), run(stall=2.5 * lone)
        each = [np.quantile([r.tpot for r in requests], 0.9) for engine, requests in (free, kept)]
        assert each[1] <= 1.5 * lone and (each[0] > 1.5 * lone or alpha == 0.8 and spec != "off"), "with lucky drafts it is kept anyway"
        longest = [max(np.diff(r.times).max() for r in requests if len(r.times) > 1) for engine, requests in (free, steady)]
        assert longest[1] <= 1.1 * 2.5 * lone < longest[0], "several prompts in one chunk are priced as one"


@pytest.mark.parametrize("late, fed", [(0, True), (0.97, False), (2, True)])
def test_autopilot_lets_prompts_wait_for_who_can_still_be_in_time(late, fed):
    """A decode has lost no time, nearly all that it had to spare, or more: then nothing helps it, and it holds up nobody."""
    lone = A100.time(1, 300)
    engine = Simulator(A100, scheduler="autopilot", max_batch=4, alloc="grow", tpot=1.2 * lone)
    decode = Request(np.zeros(100, int), 401)
    add(engine, [decode])
    engine.step()
    decode.times[0] -= late * 400 * 0.2 * lone
    new = Request(np.zeros(2000, int), 10, arrival=engine.clock.now())
    add(engine, [new])
    engine.step()
    assert (new.n_past > 0) == fed and len(decode.times) == 2


def test_autopilot_takes_prices_without_a_fixed_part():
    """A fit may find none; then an iteration that feeds nothing costs nothing."""
    class Linear(type(A100)):
        def seconds(self, w, lora="batched"):
            return 1e-4 * w.N
    engine = Simulator(Linear(preset("llama-13b"), "a100"), scheduler="autopilot", max_batch=4, alloc="grow", tpot=0.01)
    requests = add(engine, [Request(np.zeros(300, int), 5, arrival=0.1 * i) for i in range(5)])
    engine.run()
    assert all(r.state == "length" for r in requests)


def test_autopilots_chunk_shrinks_as_attention_grows():
    """Beside four decodes, the iterations of a long prompt stay level; with a fixed chunk they grow."""
    cost, took = CostModel.roofline(dataclasses.replace(preset("llama-7b"), block_size=40000), "a100"), {}
    for name, options in (("fixed", dict(scheduler="sarathi", chunk=512)), ("autopilot", dict(scheduler="autopilot", stall=0.06))):
        engine = Simulator(cost, max_batch=5, alloc="grow", record=[], **options)
        add(engine, [Request(np.zeros(n, int), 2000 if n == 100 else 1, arrival=arrival) for n, arrival in [(100, 0.0)] * 4 + [(32000, 1.0)]])
        engine.run()
        took[name] = [(n, s.end - s.start) for s in engine.record for id, past, n in s.entries if id == 4][:-1]
    chunks, seconds = zip(*took["autopilot"])
    assert max(seconds) <= 0.0615 and chunks[0] > 1.9 * chunks[-1]
    assert took["fixed"][-1][1] > 3 * took["fixed"][0][1] > 0.06


def test_a_wrong_price_list_is_corrected_by_what_is_measured():
    """An A100's prices on a machine that takes twice as long for chunks and half as long for decodes: within some hundred iterations
    they are right where it works, and the choices too."""
    class Machine(type(A100)):
        def seconds(self, w, lora="batched"):
            return super().seconds(w, lora) * (2.0 if w.chunks else 0.5)
    machine = Machine(preset("llama-13b"), "a100")
    engine = Simulator(machine, scheduler="autopilot", cost=A100, max_batch=8, alloc="grow")
    add(engine, [Request(np.zeros(600, int), 60, arrival=0.2 * i) for i in range(60)])
    errors = []
    watch(engine.cost, "learn", lambda w, seconds, lora: errors.append(abs(engine.cost.seconds(w) / seconds - 1)))
    engine.run()
    assert np.median(errors[:5]) > 0.4 and np.median(errors[-200:]) < 0.05
    assert Simulator(machine, scheduler="autopilot").cost is machine, "a simulator knows its own prices"


def test_a_slower_machine_does_not_make_what_runs_look_worse_than_what_does_not():
    """Learned: early news are of iterations like this one, late ones of the machine, whose neighbours come and go."""
    learned, decode, wide = sarathi.Learned(A100), *(sarathi.Work(N=4 * n, M=4 * n, decodes=4, context=400) for n in (1, 4))
    over = lambda: learned.seconds(wide) / A100.seconds(wide) / (learned.seconds(decode) / A100.seconds(decode))
    for _ in range(200):
        learned.learn(decode, A100.seconds(decode))
        learned.learn(wide, 2 * A100.seconds(wide))
    assert over() == pytest.approx(2, rel=0.05), "kinds are told apart"
    for _ in range(100):
        learned.learn(wide, 3 * A100.seconds(wide))
    assert learned.seconds(wide) == pytest.approx(3 * A100.seconds(wide), rel=0.02) and over() < 2.25, "drift is everybody's"


def test_what_looked_dear_once_and_is_not_tried_any_more_gets_another_chance():
    """Prices that policies avoid would else stay as wrong as one slow iteration made them."""
    learned, usual, odd = sarathi.Learned(A100), *(sarathi.Work(N=N, M=N, decodes=1, context=400) for N in (2, 6))
    over = lambda: learned.seconds(odd) / A100.seconds(odd)
    for w, times, n in ((usual, 1, 20), (odd, 2, 1)):
        for _ in range(n):
            learned.learn(w, times * A100.seconds(w))
    assert over() > 1.1
    for _ in range(80 * learned.ROUND):
        learned.learn(usual, A100.seconds(usual))
    assert over() == pytest.approx(1, abs=0.02)


def test_prices_of_what_is_rare_are_learned_nearly_as_well():
    learned, decode, chunk = sarathi.Learned(A100), sarathi.Work(N=4, M=4, decodes=4, context=400), sarathi.Work(N=260, M=5, decodes=4, context=400, chunks=1)
    for _ in range(100):
        for w, times, n in ((decode, 1, 19), (chunk, 1.5, 1)):
            for _ in range(n):
                learned.learn(w, times * A100.seconds(w))
    assert 1.35 < learned.seconds(chunk) / learned.seconds(decode) / (A100.seconds(chunk) / A100.seconds(decode)) < 1.6


def test_what_was_never_tried_is_corrected_by_what_is_like_it():
    """Else a price that is too high would stay so: nobody takes what looks dear."""
    works = lambda N, chunks=0: sarathi.Work(N=N, M=4, decodes=4, context=400, chunks=chunks)
    learned, over = sarathi.Learned(A100), lambda w: learned.seconds(w) / A100.seconds(w)
    for _ in range(100):
        for w, times in ((works(4), 0.8), (works(6), 0.8), (works(260, 1), 1.6)):
            learned.learn(w, times * A100.seconds(w))
    assert all(over(works(N)) == pytest.approx(0.8, rel=0.03) for N in (3, 4, 6, 8, 16, 32)), "of its kind, whatever its size"
    assert over(works(260, 1)) == pytest.approx(1.6, rel=0.03) and over(works(400, 1)) == pytest.approx(1.6, rel=0.05)
    for _ in range(100):
        learned.learn(works(6), A100.seconds(works(6)))
        learned.learn(works(4), 0.8 * A100.seconds(works(4)))
    assert over(works(8)) / over(works(4)) > 1.1, "from a size to the next"


def test_prices_are_learned_of_each_iteration_at_first_and_of_some_later():
    learned, base, heard = sarathi.Learned(Linear()), Linear(), []
    watch(learned, "learn", lambda w, seconds, lora: heard.append(w.N))
    assert not base.wants() and not A100.wants(), "what knows its prices has nothing to learn"
    engine = Engine(small(), draft="ngram", spec="goodput", cost=learned, n_page=2000, max_batch=1)
    engine.generate([[1, 2, 3]], max_new_tokens=40)
    assert len(heard) == engine.n_steps > 9
    learned.n_asked = learned.FIRST
    heard.clear()
    before = engine.n_steps
    engine.generate([[1, 2, 3]], max_new_tokens=40)
    assert len(heard) == (engine.n_steps - before) // learned.EVERY > 2


@pytest.mark.parametrize("lora", ["merge", "batched"])
def test_prices_are_learned_of_what_ran(lora):
    """With merged weights an adapter costs nothing in an iteration: its price without it was right already."""
    learned, w = sarathi.Learned(A100), sarathi.Work(N=2, M=2, decodes=2, context=9, adapted=2, lora_read=10**9)
    for _ in range(50):
        learned.learn(w, A100.seconds(w, "merge"), lora)
    assert (learned.seconds(w, "merge") == pytest.approx(A100.seconds(w, "merge"))) == (lora == "merge")


def test_a_draft_models_work_on_a_prompt_is_no_price_of_a_draft():
    engine, learned = Engine(small(), draft=draft("large"), spec="goodput", cost=(Linear(gamma=0.0), Linear(0, 0, 0.02)), n_page=200), []
    watch(engine.speculator.proposer.cost, "learn", lambda w, seconds: learned.append(w.N))
    r = Request(prompt(30), 20)
    engine.add(r)
    engine.step()
    engine.step()
    assert r.n_drafted > 0 and not learned, "before the first draft it fed 31 tokens"
    engine.step()
    assert learned == [1]


def test_who_is_given_the_same_learned_prices_shares_them_on_every_rank(monkeypatch):
    """Rank 0's prices arrive as a copy: what one lane learns from then on, the other must know here as it does there."""
    for copied in (lambda value: value, copy.deepcopy):  # as rank 0 has it, and the others
        mine = sarathi.Learned(A100)
        monkeypatch.setattr(kernels.World, "agree", lambda world, value, source=0: copied(value))
        lanes = [Engine(small(), scheduler="autopilot", cost=mine, n_page=100) for _ in range(2)]
        lanes[0].cost.learn(sarathi.Work(N=4, M=4, decodes=4, context=40), 1.0)
        assert lanes[0].cost is lanes[1].cost is mine and mine.n_learned == 1


def test_autopilot_is_scheduler_and_policy_or_scheduler_alone():
    with pytest.raises(ValueError, match="needs scheduler = 'autopilot'"):
        Simulator(A100, scheduler="sarathi", draft="ngram", spec="autopilot", alpha=0.5)
    engine, requests = flown("autopilot", (200, 60), 0.2, 3)
    assert {r.n_drafted > 0 for r in requests} == {True}, "a fixed number of drafts rides along"
    for name in ("tpot", "stall"):
        with pytest.raises(ValueError, match=f"{name} = -1"):
            EngineConfig(**{name: -1})


def test_the_best_drafts_go_first():
    d = sarathi.Decodes([None] * 3, np.array([3, 0, 2]), np.array([0.5, 0.9, 0.8]), None, None, None)
    order, worth = sarathi.best_drafts(d)
    assert [(i // 3, i % 3 + 1) for i in order.tolist()] == [(2, 1), (2, 2), (0, 1), (0, 2), (0, 3)] and worth.tolist() == pytest.approx([0.8, 0.64, 0.5, 0.25, 0.125])
    pilot, proposer = sarathi.Autopilot(), sarathi.Ngram()
    pilot.k, pilot.engine = 1, SimpleNamespace(speculator=SimpleNamespace(proposer=proposer))
    assert pilot.lengths(d).tolist() == [1, 0, 2], "three in all"
    proposer.free = False
    assert pilot.lengths(d).tolist() == [1, 0, 1], "but no more steps than were priced"


# ---------------------------------------------------------------- 19. more than one device: processes, on this one's cores

def free_port():
    """One below those that the system hands out to connections."""
    for port in random.SystemRandom().sample(range(20000, 30000), 100):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return str(port)


def _rank(rank, worlds, folder):
    """One of the processes: it is a rank of each of the worlds (tp, pp, port) in turn, and writes down what everything found there."""
    torch.set_num_threads(1)
    for tp, pp, port in worlds:
        os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(tp * pp))
        world = World.start(tp, pp)
        Path(folder, f"{tp} {pp} {rank}").write_text(json.dumps(everything(folder, world)))
        world.close()


@lru_cache
def spread(n):
    """{(tp, pp): what each rank found} of all worlds of n processes. All that tests ask of them is asked at once, since starting one
    takes longer than any question."""
    worlds = {2: [(2, 1), (1, 2)], 4: [(4, 1), (2, 2)]}[n]
    with tempfile.TemporaryDirectory() as folder:
        checkpoints(Path(folder, "checkpoints"))
        torch.multiprocessing.spawn(_rank, ([(*world, free_port()) for world in worlds], folder), nprocs=n, daemon=True)
        return {(tp, pp): [json.loads(Path(folder, f"{tp} {pp} {rank}").read_text()) for rank in range(n)] for tp, pp in worlds}


def together(tp, pp):
    """What each rank of a world found."""
    return spread(tp * pp)[tp, pp]


SPREAD = SMALL | dict(n_head=8, n_kv_head=4)  # so that four devices can share it


def shared(world, family="llama", **change):
    """As small(), for a world of up to four."""
    return GPT.from_preset(GPTConfig(family=family, **SPREAD | (dict(n_kv_head=8) if family == "gpt2" else {}) | change), seed=1, world=world)


def serve_mixed(engine, adapters=(None,), n_new=8, **sampling):
    """Prompts of many lengths with adapters in turns, one more that is aborted on the way -> what the others said."""
    requests = [Request(prompt(n), n_new, adapter, **sampling) for n, adapter in zip((40, 1, 7, 16, 33, 12, 5), [*adapters] * 7)]
    victim = Request(prompt(9, seed=7), 30)
    add(engine, [*requests[:2], victim, *requests[2:]])
    lanes = getattr(engine, "lanes", [engine])
    for i, _ in enumerate(steps(engine), 1):
        if i == 4 * len(lanes):  # where there are several, another iteration is in flight by now
            engine.abort(victim.id)
    assert victim.state == "abort" and not any(lane.flights or lane.pool.tables.keys() - lane.adapters.known for lane in lanes)
    return [r.output for r in requests]


WITH_TWO = ("draft on each rank", "confident draft", "drawn drafts")  # four ranks do there what two do, on half as many cores
NOT_STAGED = ("shared draft", "heads")  # a draft is on the ranks of every stage; and only the last stage has states that heads can read


def served_by(world):
    """{case: the tokens that a world serves}: what no number of devices may change."""
    options, said = dict(chunk=16, tile=8, max_batch=4, n_page=400), {}
    llama, gpt2 = shared(world), shared(world, "gpt2")
    for name, model in dict(llama=llama, gpt2=gpt2).items():
        said[name] = serve_mixed(make_engine(model, alloc="grow", **options))
        said[name + " sampled"] = serve_mixed(make_engine(model, scheduler="orca", **options), temperature=1.0, top_p=0.9)
    crowded = make_engine(llama, scheduler="sarathi_serve", alloc="grow", record=[], **options | dict(n_page=66))
    said["preempted"] = serve_mixed(crowded, n_new=20)
    assert any(n == 0 for span in crowded.record for _, _, n in span.entries), "the pool was too large"
    mixed = {"a8": strong(8, 1), "a3": strong(3, 2), "a1": strong(1, 3, ["q_proj", "down_proj"]),
             "all": strong(16, 4, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])}
    for lora, alloc in (("batched", "reserve"), ("batched", "grow"), ("merge", "reserve")):
        engine = make_engine(llama, scheduler="orca", lora=lora, alloc=alloc, **options | dict(n_page=700))
        for name, source in mixed.items():
            engine.add_adapter(name, source)
        said[f"{lora} {alloc}"] = serve_mixed(engine, [None, *mixed], n_new=3 if lora == "merge" else 8)
    engine = make_engine(gpt2, **options)
    engine.add_adapter("c", strong(4, 1, ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]))
    said["gpt2 adapter"] = serve_mixed(engine, ["c", None])
    price = Moody if world.pp == 1 else Linear  # one mood for each lane on one rank, for both on another, would not do
    small_draft = GPT.from_preset(GPTConfig(**SPREAD | dict(n_layer=1)), seed=1)
    heads = model_py.Heads(2, SPREAD["n_embd"])
    for name, draft, more in (("ngram", "ngram", {}), ("draft on each rank", small_draft, {}), ("shared draft", world.pp == 1 and shared(world, n_layer=1), {}),
                              ("confident draft", small_draft, dict(spec="confidence", cost=(price(), price()))),
                              ("autopilot", "ngram", dict(scheduler="autopilot", spec="autopilot", cost=price(), tpot=0.02, stall=0.05)),
                              ("heads", heads, dict(spec="2,1")), ("drawn drafts", small_draft, dict(temperature=0.7))):
        if world.pp > 1 and name in NOT_STAGED or world.tp > 2 and name in WITH_TWO:
            continue
        more = dict(spec=3, temperature=0.0) | more
        sampling = dict(temperature=more.pop("temperature"))
        said[name] = serve_mixed(make_engine(llama, draft=draft, alloc="grow", **options, **more), **sampling)
    return said


@lru_cache
def by_itself():
    return served_by(World())


def everything(folder, world):
    found = dict(said=agreements(world), held=bytes_held(world), loaded=loaded(Path(folder, "checkpoints"), world), served=served_by(world))
    if world.pp == 1:
        return found | dict(sent=bytes_sent(world), refused=refused_shares(world))
    return found | dict(refused=refused_stages(world), bubbles=bubbles_of(world))


def checkpoints(folder):
    """Folders for all to read: models of both families, whose vocabulary does not come out even, and an adapter."""
    folder.mkdir()
    m = GPT(GPTConfig(**SPREAD)).requires_grad_(False)
    for p in m.parameters():
        p.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(p)))
    m.save_pretrained(folder / "llama")
    strong(3, 5)(m.config, dtype=torch.float32).save_pretrained(folder / "adapter")
    if importlib.util.find_spec("transformers"):
        (folder / "gpt2").mkdir()
        theirs, path = hf_folder(folder / "gpt2", "gpt2", n_inner=60)
        with torch.no_grad():  # transformers makes all biases zero, and so nobody would see one that is added twice
            for p in (p for name, p in theirs.named_parameters() if name.endswith("bias")):
                p.normal_(0, 0.1)
        theirs.save_pretrained(path)


def loaded(folder, world):
    """What models and an adapter from folders say."""
    said, tokens = {}, np.array(prompt(20)) % 131
    for path in sorted(folder.glob("*")):
        if path.name != "adapter":
            model = GPT.from_pretrained(path, world=world)
            said[path.name] = make_engine(model, n_page=200).generate([tokens.tolist()], 12)
            if world.pp == 1:
                said[path.name + " logits"] = model.logits(tokens)[-1].tolist()
    engine = make_engine(GPT.from_pretrained(folder / "llama", world=world), n_page=200)
    engine.add_adapter("a", folder / "adapter")
    return said | dict(tokens=engine.generate([prompt(12)], 12, "a"))


def bytes_sent(world, rank=8, n=20):
    """{purpose: bytes} that rank 0 sends for n requests of one token, each with an adapter of this rank, in one iteration."""
    engine = Engine(shared(world), scheduler="orca", max_batch=n, n_page=600)
    engine.add_adapter("a", random_adapter(rank))
    requests = add(engine, [Request(prompt(5, seed=i), 3, "a") for i in range(n)])
    engine.step()
    before = world.sent.copy()
    engine.step()
    assert all(r.n_past == 6 for r in requests)
    return world.sent - before


def bytes_held(world):
    """Bytes of a rank's weights by what they are, and of its pool's page."""
    model = shared(world)
    held = Counter()
    for name, module in model.named_modules():
        if getattr(module, "weight", None) is not None:
            held["norms" if "norm" in name else "matrices"] += module.weight.numel() * model.dtype.itemsize
    return dict(held, pool=model.new_cache(10).numel() * model.dtype.itemsize)


def refusals(*asks):
    """What is said to those who ask for what cannot be done."""
    said = []
    for ask in asks:
        try:
            ask()
        except ValueError as e:
            said.append(str(e))
    return said


def refused_shares(world):
    return refusals(lambda: shared(world, n_kv_head=1), lambda: shared(world, n_inner=161),
                    lambda: Engine(shared(world), lora="bmm", n_page=100), lambda: World.start(3, 1))


def refused_stages(world):
    model, heads = shared(world), model_py.Heads(2, SPREAD["n_embd"])
    return refusals(lambda: shared(world, n_layer=1), lambda: Engine(model, n_page=100), lambda: make_engine(model, draft=heads, spec="2,1", n_page=100),
                    lambda: make_engine(model, draft="ngram", spec="goodput", n_page=100), lambda: make_engine(model, scheduler="autopilot", n_page=100))


def bubbles_of(world):
    """A run of an uneven pipeline -> its spans, its bubbles by kind and by request, and how many messages nobody waited for."""
    line = make_engine(shared(world, n_layer=3), scheduler="orca", max_batch=2, n_page=300, record=[])
    requests = add(line, [Request(prompt(n), 4) for n in (60, 3, 100, 9, 30, 80, 1)])
    line.run()
    line.gather(requests)
    return dict(spans=line.record, kinds=line.bubbles, requests=[r.bubble for r in requests], posted=len(world.posted),
                n_layer=[len(lane.kv) for lane in line.lanes])


def agreements(world):
    """What the primitives of a World give, and when requests that came late were served, by its clock."""
    x = torch.arange(4.0) + world.rank
    engine, late = make_engine(shared(world), max_batch=2, n_page=100), [Request(prompt(5), 3, arrival=i / 100) for i in range(4)]
    add(engine, late)
    engine.run()
    return dict(times=[[r.arrival, *r.times] for r in late], agree=world.agree([world.rank, "x" * 3000]), each=world.each(world.rank),
                last=world.agree(world.rank, world.size - 1), sum=world.all_reduce(x.clone(), "sum").tolist(),
                gather=world.all_gather(x, "gather").tolist(), sent=[world.sent["sum"], world.sent["gather"]])


@pytest.mark.parametrize("tp", [2, 4])
def test_tokens_do_not_depend_on_how_many_devices_share_the_layers(tp):
    for rank, found in enumerate(together(tp, 1)):
        assert by_itself().keys() - found["served"].keys() == ({*WITH_TWO} if tp > 2 else set())
        for case, tokens in found["served"].items():
            assert by_itself()[case] == tokens, f"{case}, rank {rank} of {tp}"


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_agree(tp):
    for found in together(tp, 1):
        said = found["said"]
        assert said["times"] == together(tp, 1)[0]["said"]["times"] and all(times == sorted(times) for times in said["times"])
        assert said["agree"] == [0, "x" * 3000] and said["last"] == tp - 1 and said["each"] == [*range(tp)]
        assert said["sum"] == [sum(range(i, i + tp)) for i in range(4)] and said["gather"] == [[*range(i, i + 4)] for i in range(tp)]
        assert said["sent"] == [2 * (tp - 1) * 16 // tp, 16 * (tp - 1)]


@pytest.mark.parametrize("tp", [2, 4])
def test_the_bytes_sent_are_those_of_the_paper(tp):
    """Per layer 2 (N-1) B h / N numbers for each of the base model's all-reduces, and 5 (N-1) B r / N for adapters on q, k, v and o."""
    B, r, h, L, V = 20, 8, SPREAD["n_embd"], SPREAD["n_layer"], -(-SPREAD["vocab_size"] // tp)
    for found in together(tp, 1):
        reduced = 2 * (tp - 1) * B * h // tp * 4
        assert found["sent"] == dict(embed=reduced, postproj=L * reduced, ffn_ln2=L * reduced, lora=L * 5 * (tp - 1) * B * r // tp * 4,
                                     head=(tp - 1) * B * V * 4)


@pytest.mark.parametrize("tp", [2, 4])
def test_each_rank_holds_its_share_of_weights_and_pages(tp):
    """All but the norms; and of the vocabulary's rows, the last share is filled up."""
    whole, filled = bytes_held(World()), 2 * 4 * SPREAD["n_embd"] * (-SPREAD["vocab_size"] % tp)
    for found in together(tp, 1):
        assert found["held"] == dict(norms=whole["norms"], matrices=(whole["matrices"] + filled) // tp, pool=whole["pool"] // tp)


@pytest.mark.parametrize("tp", [2, 4])
def test_every_rank_refuses_what_cannot_be_shared(tp):
    for found in together(tp, 1):
        kv, inner, bmm, processes = found["refused"]
        assert kv == f"tp = {tp} devices cannot share n_kv_head = 1: it must be a multiple of tp" and "n_inner = 161" in inner
        assert "lora = 'bmm' is for one device" in bmm
        assert processes.startswith(f"tp = 3, pp = 1: needs 3 processes, there are {tp}: torchrun --nproc_per_node 3 ")


@pytest.mark.parametrize("tp", [2, 4])
def test_a_rank_reads_its_share_of_folders(tp):
    with tempfile.TemporaryDirectory() as folder:
        checkpoints(Path(folder, "checkpoints"))
        wanted = loaded(Path(folder, "checkpoints"), World())
    for found in together(tp, 1):
        for name, said in found["loaded"].items():
            assert np.allclose(wanted[name], said, atol=1e-4) if "logits" in name else wanted[name] == said, name


@pytest.mark.parametrize("tp", [1, 2])
def test_tokens_do_not_depend_on_how_many_stages_there_are(tp):
    """How many drafts a sampled request has, and so which random numbers it takes, depends on who else is in its micro-batch: there
    ranks agree with each other, and with one process only in distribution."""
    wanted = by_itself() | {"drawn drafts": together(tp, 2)[0]["served"]["drawn drafts"]}
    for rank, found in enumerate(together(tp, 2)):
        assert wanted.keys() - found["served"].keys() == {*NOT_STAGED}
        for case, tokens in found["served"].items():
            assert tokens == wanted[case], f"{case}, rank {rank} of {tp} x 2"
        assert found["said"]["agree"] == [0, "x" * 3000] and found["said"]["each"] == [*range(2 * tp)]
        times = found["said"]["times"]
        assert times == together(tp, 2)[0]["said"]["times"] and all(t == sorted(t) for t in times), "the same clock, and nobody served before it came"


@pytest.mark.parametrize("tp", [1, 2])
def test_each_stage_holds_its_own_layers(tp):
    """Together they hold one model and its pages; a stage has the embedding or the head, and in the middle neither."""
    whole, filled = bytes_held(World()), 2 * 4 * SPREAD["n_embd"] * (-SPREAD["vocab_size"] % tp)
    first, last = (found["held"] for found in together(tp, 2)[::tp])
    assert first["norms"] + last["norms"] == whole["norms"] and last["norms"] - first["norms"] == 4 * SPREAD["n_embd"]
    assert first["matrices"] == last["matrices"] == (whole["matrices"] + filled) // tp // 2
    assert first["pool"] == last["pool"] == whole["pool"] // tp // 2
    assert [found["bubbles"]["n_layer"] for found in together(tp, 2)[::tp]] == [[2, 2], [1, 1]], "three layers in two stages"


def test_tied_stages_hold_the_embedding_twice():
    tied = GPTConfig(**SPREAD | dict(tied=True))
    first, last = (GPT.from_preset(tied, seed=1, world=World(1, 2, rank)) for rank in range(2))
    whole = GPT.from_preset(tied, seed=1)
    assert torch.equal(first.wte.weight, whole.wte.weight) and first.head is None and last.wte is None
    assert torch.equal(kernels.linear(torch.eye(64), last.head.weight), kernels.linear(torch.eye(64), whole.head.weight))
    assert first.config.n_params + last.config.n_params == whole.config.n_params + tied.vocab_size * tied.n_embd


@pytest.mark.parametrize("tp", [1, 2])
def test_a_stages_bubbles_are_the_gaps_between_its_micro_batches(tp):
    for found in together(tp, 2):
        assert found["bubbles"] == together(tp, 2)[0]["bubbles"] | dict(n_layer=found["bubbles"]["n_layer"], posted=found["bubbles"]["posted"])
        spans, kinds, idle = found["bubbles"]["spans"], dict(PB1=0.0, PB2=0.0, PB3=0.0), [0.0] * 7
        assert found["bubbles"]["posted"] < 10
        by_stage = [[s for s in spans if s[2] == stage] for stage in range(2)]
        assert [s[3:] for s in by_stage[0]] == [s[3:] for s in by_stage[1]], "both did the same"
        for mine in by_stage:
            for before, span in zip(mine, mine[1:]):
                gap, chunks = span[0] - before[1], [sum(n for _, _, n in s[4] if n > kernels.FEW_ROWS) for s in (before, span)]
                assert gap >= 0 and before[0] <= before[1]
                kinds["PB3" if chunks[0] == chunks[1] else "PB1" if all(chunks) else "PB2"] += gap
                for id, _, _ in span[4]:
                    idle[id] += gap
        assert found["bubbles"]["kinds"] == pytest.approx(kinds) and found["bubbles"]["requests"] == pytest.approx(idle)
        assert min(kinds.values()) > 0


@pytest.mark.parametrize("tp", [1, 2])
def test_every_stage_refuses_what_a_pipeline_cannot_do(tp):
    for found in together(tp, 2):
        layers, engine, heads, goodput, autopilot = found["refused"]
        assert layers == "pp = 2 stages: there are only 1 layers" and "give it to a Pipeline" in engine
        assert heads.startswith("draft = Heads: heads read the last stage's states") and goodput.startswith("spec = 'goodput': a stage of pp = 2 cannot")
        assert autopilot == "scheduler = 'autopilot': a stage of pp = 2 cannot be profiled, give cost"


ENDLESS = """
import itertools
import os
from kernels import World
from model import GPT
from sarathi import make_engine, run_cli

def main():
    world = World.start({world})
    engine = make_engine(GPT.from_preset("tiny", world=world), n_page=1000)
    for i in itertools.count():
        engine.generate([[1, 2, 3]], 4)
        if world.rank == 1 and i > 5:
            print("the end is near", flush=True)
            {end}

run_cli(main)
"""


@pytest.mark.parametrize("world, how, end", [("2, 1", "torchrun", "os.kill(os.getpid(), 9)"), ("2, 1", "by hand", "os.kill(os.getpid(), 9)"),
                                              ("2, 1", "by hand", "raise KeyError('mine')"), ("1, 2", "by hand", "os.kill(os.getpid(), 9)")])
def test_a_rank_that_dies_ends_the_run_and_is_named(world, how, end, tmp_path):
    """Under torchrun, which ends the others, and without it, when they notice by themselves."""
    (tmp_path / "endless.py").write_text(ENDLESS.replace("{end}", end).replace("{world}", world))
    env, start = os.environ | dict(PYTHONPATH=str(HERE), OMP_NUM_THREADS="1"), dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if how == "torchrun":
        commands = [([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port()], {})]
    else:
        port = free_port()
        commands = [([sys.executable], dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)) for rank in "01"]
    runs = [subprocess.Popen([*command, str(tmp_path / "endless.py")], env=env | more, **start) for command, more in commands]
    try:
        assert runs[-1].stdout.readline() == "the end is near\n", "a loaded machine may take its time to get there"
        said = [run.communicate(timeout=30) for run in reversed(runs)]  # within 30 seconds of the end of one
    finally:
        for run in runs:
            run.terminate()
    assert all(run.returncode for run in runs)
    if how == "torchrun":
        assert "exitcode  : -9" in said[0][1] and "(local_rank: 1)" in said[0][1]
    else:
        assert said[1][1].startswith("endless.py: rank 0 of 2 cannot go on: rank 1 died or hangs (") and said[1][1].count("\n") == 1, said[1][1]
        assert "mine" not in end or said[0][1] == "endless.py: mine\n"


# ---------------------------------------------------------------- 20. the kernels on a CPU

@pytest.mark.skipif(GPU or kernels.INTERPRET, reason="the kernels' tests run right here")
@pytest.mark.parametrize("part", range(2))
def test_every_kernel_in_tritons_interpreter(part):
    """What @kernel_test marks (section 14): the interpreter must be chosen before Triton is imported, hence another process."""
    pytest.importorskip("triton")
    run = process("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *KERNEL_TESTS[part::2], TRITON_INTERPRET="1")
    assert run.status == 0 and int(re.search(r"(\d+) passed", run.out)[1]) > 25, run.out[-4000:] + run.err
