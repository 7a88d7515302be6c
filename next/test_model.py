"""The proofs for model.py: forward against the oracle, the oracle against transformers and PEFT,
tensor parallelism against one process, and one line for every broken folder."""
import json
import os
import re
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import model as model_py
from kernels import FEW_ROWS, Batch, Sites
from model import GPT, Adapter, GPTConfig, World, load_model, load_tokenizer, preset, train

LLAMA = GPTConfig(n_layer=2, n_head=4, n_embd=64, n_inner=96, n_kv_head=2, vocab_size=131,
                  block_size=96)
GPT2 = GPTConfig(n_layer=2, n_head=4, n_embd=64, vocab_size=131, block_size=96, family="gpt2",
                 tied=True)
SPANS = {  # request -> how many of its tokens each iteration has
    "whole": [(40,), (25,), (9,)],
    "chunks": [(16, 16, 8), (9, 9, 7), (1, 8, 0)],
    "decodes": [(30, 1, 1, 1), (0, 20, 1, 4), (1, 1, 17, 1)],
}


def random_model(config, dtype=torch.float32):
    """Weights large enough that logits differ."""
    model = GPT.from_preset(config, dtype, seed=1)
    for name, weight in model.weights.items():
        if weight.dim() == 1:
            weight.add_(torch.linspace(-0.5, 0.5, len(weight)).to(dtype))
        else:
            model.weights[name] = model_py.pack((weight.to_dense() * 8))
    for name in ("embedding.weight", "positions.weight"):
        if name in model.weights:
            model.weights[name] = model.weights[name].to_dense()
    model.find_layers()
    return model


def prompt(n, seed=0):
    return torch.randint(0, 131, (n,), generator=torch.Generator().manual_seed(seed))


def make_batch(spans, adapters=(), config=None):
    """spans: (tokens of the span, n_past, page table of the request). adapters: for each of them
    (Adapter, its pages) or None. Logits of all rows are wanted."""
    order = sorted(range(len(spans)), key=lambda r: len(spans[r][0]))
    tokens, positions, pages, rows, table = [], [], [], [], []
    for r in order:
        span, n_past, own = spans[r]
        rows.append([len(tokens), len(span), n_past, len(table)])
        tokens += span
        positions += range(n_past, n_past + len(span))
        pages += own[n_past:n_past + len(span)]
        table += own[:n_past + len(span)]
    few = [n for _, n, _, _ in rows if n <= FEW_ROWS]
    chunks = [n for _, n, _, _ in rows if n > FEW_ROWS]
    int32 = lambda x: torch.tensor(x, dtype=torch.int32)
    counts = dict(n_few=len(few), max_few=max(few, default=0), max_chunk=max(chunks, default=0))
    batch = Batch(torch.tensor(tokens), torch.tensor(positions), int32(pages), int32(rows),
                  int32(table), torch.arange(len(tokens)), **counts,
                  max_context=max(n + n_past for _, n, n_past, _ in rows))
    for op, operator in config.operators.items() if any(adapters) else []:
        sites, table = [], []
        for r, (first_row, n, _, _) in zip(order, rows):
            if adapters[r] and op in adapters[r][0].sites:
                own = adapters[r][0].sites[op].copy()
                own[:, :2] = first_row, n
                own[:, 7] += len(table)
                sites.append(own)
                table += adapters[r][1]
        if sites:
            sites = np.concatenate(sites)
            max_rank = -(-int(sites[:, 4].max()) // 16) * 16
            n_few = int((sites[:, 1] <= FEW_ROWS).sum())
            batch.adapters[op] = Sites(torch.from_numpy(sites), int32(table), n_few,
                                       counts["max_few"], counts["max_chunk"],
                                       len(operator.modules), max_rank)
    return batch, order


def serve(model, prompts, lengths, adapters=()):
    """Run prompts in iterations of the given lengths -> the logits of every token"""
    n_page = sum(map(len, prompts)) + sum(a.n_page for a in adapters if a)
    free = torch.randperm(n_page, generator=torch.Generator().manual_seed(0)).tolist()
    take = lambda n: [free.pop() for _ in range(n)]
    kv = model.new_cache(n_page)
    loaded = []
    for adapter in adapters:
        loaded.append(adapter and (adapter, take(adapter.n_page)))
        if adapter:
            adapter.write(kv, loaded[-1][1])
    tables = [take(len(tokens)) for tokens in prompts]
    n_past = [0] * len(prompts)
    logits = [[] for _ in prompts]
    for i in range(max(map(len, lengths))):
        fed = [r for r in range(len(prompts)) if i < len(lengths[r]) and lengths[r][i]]
        spans = []
        for r in fed:
            end = n_past[r] + lengths[r][i]
            spans.append((prompts[r][n_past[r]:end].tolist(), n_past[r], tables[r]))
        batch, order = make_batch(spans, [loaded[r] if loaded else None for r in fed], model.config)
        out = model.forward(batch, kv)
        for j in order:
            n = len(spans[j][0])
            n_past[fed[j]] += n
            if out is not None:
                logits[fed[j]].append(out[:n])
                out = out[n:]
    return [torch.cat(rows) if rows else None for rows in logits]


@pytest.mark.parametrize("lengths", SPANS)
@pytest.mark.parametrize("config, dtype, atol", [
    (LLAMA, torch.float32, 1e-3), (GPT2, torch.float32, 1e-3), (LLAMA, torch.bfloat16, 1.0)])
def test_forward_equals_the_oracle(config, dtype, atol, lengths):
    model = random_model(config, dtype)
    prompts = [prompt(sum(spans), seed=i) for i, spans in enumerate(SPANS[lengths])]
    for tokens, logits in zip(prompts, serve(model, prompts, SPANS[lengths])):
        expected = model.logits(tokens)
        assert expected.std() > 1
        assert torch.allclose(logits.float(), expected, atol=atol, rtol=0)


# -----------------------------------------------------------------------------
# Hugging Face folders


def hf_folder(folder, family="llama", shard="5GB", **settings):
    """A random checkpoint, written by transformers. -> its model"""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    if family == "gpt2":
        sizes = dict(n_positions=96, n_embd=64, n_layer=2, n_head=4)
        kind = transformers.GPT2LMHeadModel
    else:
        sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                     num_attention_heads=4, max_position_embeddings=96, pad_token_id=None)
        kind = getattr(transformers, f"{family.title()}ForCausalLM")
    settings = dict(vocab_size=131, bos_token_id=1, eos_token_id=2, initializer_range=0.2) | settings
    theirs = kind(kind.config_class(**sizes | settings)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.save_pretrained(folder, max_shard_size=shard)
    return theirs


@torch.no_grad()
def logits_of(theirs, tokens):
    return theirs(tokens[None]).logits[0]


LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32, rope_theta=5e5)
CHECKPOINTS = {
    "gpt2": dict(family="gpt2"), "gpt2 shards": dict(family="gpt2", shard="20KB"),
    "gpt2 inner": dict(family="gpt2", n_inner=80, tie_word_embeddings=False),
    "mha": {}, "gqa": dict(num_key_value_heads=2), "mqa": dict(num_key_value_heads=1),
    "tied": dict(tie_word_embeddings=True), "shards": dict(shard="30KB", num_key_value_heads=2),
    "llama3 rope": dict(rope_parameters=LLAMA3), "wide heads": dict(head_dim=32),
    "linear rope": dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4)),
    "mistral": dict(family="mistral", sliding_window=None, num_key_value_heads=2),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_equal_transformers(name, tmp_path):
    theirs = hf_folder(tmp_path, **CHECKPOINTS[name])
    assert len([*tmp_path.glob("*.safetensors")]) == 1 or "shards" in name
    if name in ("llama3 rope", "linear rope"):  # as transformers 4 wrote it
        settings = json.loads((tmp_path / "config.json").read_text())
        rope = settings.pop("rope_parameters")
        settings |= dict(rope_theta=rope.pop("rope_theta"), rope_scaling=rope)
        (tmp_path / "config.json").write_text(json.dumps(settings))
    ours = GPT.from_pretrained(tmp_path)
    tokens = prompt(60)
    expected = logits_of(theirs, tokens)
    assert expected.std() > 0.5
    assert torch.allclose(ours.logits(tokens), expected, atol=1e-4, rtol=0)
    assert torch.allclose(serve(ours, [tokens], [(50, 10)])[0], expected, atol=1e-4, rtol=0)
    assert ours.config.n_params == sum(p.numel() for p in theirs.parameters())

    # saved here, loaded here and there
    ours.save_pretrained(tmp_path / "saved")
    again = GPT.from_pretrained(tmp_path / "saved")
    assert torch.equal(again.logits(tokens), ours.logits(tokens))
    theirs = type(theirs) if "mistral" not in name else pytest.importorskip("transformers").LlamaForCausalLM
    assert torch.allclose(logits_of(theirs.from_pretrained(tmp_path / "saved"), tokens), expected, atol=1e-4, rtol=0)


def edit(tensors=None, **settings):
    """A function that changes the tensors of a folder by tensors({name: tensor}), and settings;
    None removes a setting."""
    def change(folder):
        config = next(folder.glob("*config.json"))
        known = json.loads(config.read_text()) | settings
        config.write_text(json.dumps({k: v for k, v in known.items() if v is not None}))
        if tensors:
            path = next(folder.glob("*.safetensors"))
            found = load_file(path)
            tensors(found)
            save_file(found, path)
    return change


def truncate(folder):
    path = next(folder.glob("*.safetensors"))
    os.truncate(path, path.stat().st_size - 100)


Q = "model.layers.1.self_attn.q_proj.weight"
BAD_FOLDERS = {
    "config.json does not exist": lambda f: next(f.glob("*config.json")).unlink(),
    "does not hold settings": lambda f: next(f.glob("*config.json")).write_text("[1"),
    "model.safetensors does not exist": lambda f: next(f.glob("*.safetensors")).unlink(),
    "model.safetensors is damaged": truncate,
    "model_type = 'bert' is not supported, only 'llama' or": edit(model_type="bert"),
    "lacks the setting 'hidden_size'": edit(hidden_size=None),
    "sliding_window = 8 is not": edit(model_type="mistral", sliding_window=8),
    "rope_type = 'yarn'": edit(rope_scaling={"rope_type": "yarn"}),
    "rope_scaling: factor = None": edit(rope_scaling={"type": "linear"}),
    "n_layer = 'two': must be a positive whole number": edit(num_hidden_layers="two"),
    "n_head = 4: no multiple of n_kv_head 3": edit(num_key_value_heads=3),
    "head_dim = 0": edit(head_dim=None, num_attention_heads=80, num_key_value_heads=80),
    f"'{Q}' is missing": edit(lambda t: t.pop(Q)),
    f"'{Q}' is \\(3, 64\\) .*must be \\(64, 64\\)": edit(lambda t: t.update({Q: torch.ones(3, 64)})),
    f"'{Q}' is .*int32": edit(lambda t: t.update({Q: torch.ones(64, 64, dtype=torch.int32)})),
    "1 surplus tensors, as 'extra'": edit(lambda t: t.update(extra=torch.ones(1))),
}


@pytest.mark.parametrize("message", BAD_FOLDERS)
def test_a_bad_folder_is_one_clear_line(message, tmp_path):
    random_model(LLAMA).save_pretrained(tmp_path)
    BAD_FOLDERS[message](tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as raised:
        GPT.from_pretrained(tmp_path)
    assert "\n" not in str(raised.value)


# -----------------------------------------------------------------------------
# adapters


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LORAS = {
    "llama": [
        dict(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]),
        dict(r=16, lora_alpha=8, target_modules=ATTENTION, use_rslora=True),
        dict(r=20, lora_alpha=20, target_modules="all-linear"),
        dict(r=8, lora_alpha=8, target_modules=["k_proj", "down_proj", "o_proj"],
             alpha_pattern={"down_proj": 2},
             rank_pattern={"o_proj": 3, "layers.1.mlp.down_proj": 5}),
        dict(r=4, lora_alpha=4, target_modules=["q_proj"],
             rank_pattern={"^model.layers.1.self_attn.q_proj": 6},
             alpha_pattern={"model.layers.0.self_attn.q_proj": 12}),
    ],
    "gpt2": [
        dict(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True),
        dict(r=9, lora_alpha=6, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True),
    ],
}


def peft_folder(theirs, folder, **settings):
    """Write a random adapter for a transformers model -> that model's logits with it"""
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    wrapped = peft.get_peft_model(theirs, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    wrapped.save_pretrained(folder)
    logits = logits_of(wrapped.eval(), prompt(40))
    wrapped.unload()
    return logits


@pytest.mark.parametrize("family", LORAS)
def test_adapters_equal_peft(family, tmp_path):
    """Merged, and applied to a batch that has requests of all adapters and one without."""
    settings = dict(num_key_value_heads=2) if family == "llama" else {}
    theirs = hf_folder(tmp_path, family, **settings)
    ours = GPT.from_pretrained(tmp_path)
    tokens = prompt(40)
    base = logits_of(theirs, tokens)
    adapters, expected = [None], [base]
    for i, lora in enumerate(LORAS[family]):
        expected.append(peft_folder(theirs, tmp_path / str(i), **lora))
        adapters.append(Adapter.from_pretrained(tmp_path / str(i), ours.config))
        ours.merge(adapters[-1])
        assert torch.allclose(ours.logits(tokens), expected[-1], atol=1e-4, rtol=0)
        assert (expected[-1] - base).abs().max() > 0.1
    ours.merge(None)
    assert torch.equal(ours.logits(tokens), GPT.from_pretrained(tmp_path).logits(tokens))
    lengths = [(40,), (30, 9, 1), (8, 8, 24), (32, 1, 7), (1, 39), (9, 9, 22)][:len(adapters)]
    for logits, wanted in zip(serve(ours, [tokens] * len(adapters), lengths, adapters), expected):
        assert torch.allclose(logits, wanted, atol=1e-4, rtol=0)

    # every module with a rank of its own, saved here and loaded there
    ranks = {module: 3 + i for i, module in enumerate(ours.config.modules)}
    adapter = Adapter.random(ours.config, ranks, seed=1)
    adapter.planes *= 4
    adapter.save_pretrained(tmp_path / "saved")
    again = Adapter.from_pretrained(tmp_path / "saved", ours.config)
    assert torch.equal(again.planes, adapter.planes) and again.ranks == ranks
    saved = pytest.importorskip("peft").PeftModel.from_pretrained(theirs, tmp_path / "saved")
    ours.merge(adapter)
    assert torch.allclose(ours.logits(tokens), logits_of(saved, tokens), atol=1e-4, rtol=0)


A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
BAD_ADAPTERS = {
    "use_dora = True is not supported": edit(use_dora=True),
    "bias = 'all' is not supported, only 'none'": edit(bias="all"),
    "peft_type = 'IA3'": edit(peft_type="IA3"),
    f"'{A}' is missing": edit(lambda t: t.pop(A)),
    f"'{A}' is \\(8, 32\\).*must be \\(8, 64\\)": edit(lambda t: t.update({A: torch.ones(8, 32)})),
    "layers.7.*does not fit.*in layers 0 to 1": edit(
        lambda t: t.update({A.replace(".1.", ".7."): torch.ones(8, 64)})),
    "router.*does not fit.*self_attn.q_proj": edit(
        lambda t: t.update({A.replace("q_proj", "router"): torch.ones(8, 64)})),
    "adapter_model.safetensors does not exist": lambda f: next(f.glob("*.safetensors")).unlink(),
    "rank or alpha = .x.: must be a positive number": edit(r="x"),
}


@pytest.mark.parametrize("message", BAD_ADAPTERS)
def test_a_bad_adapter_is_one_clear_line(message, tmp_path):
    Adapter.random(LLAMA, 8).save_pretrained(tmp_path)
    edit(rank_pattern={}, alpha_pattern={}, r=8, lora_alpha=8)(tmp_path)
    BAD_ADAPTERS[message](tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Adapter.from_pretrained(tmp_path, LLAMA)


def test_shapes_of_adapters():
    shape = Adapter.shape_only(LLAMA, 8)
    assert shape.ranks == dict.fromkeys([f"self_attn.{name}" for name in ATTENTION], 8)
    assert shape.n_params == 2 * 8 * (64 + 64 + 2 * (64 + 32) + 64 + 64)
    assert shape.n_page == 8 * 2 * 4 and shape.planes is None  # rows of 64 on pages of 32
    with pytest.raises(ValueError, match="module 'x_proj': must be one of self_attn.q_proj"):
        Adapter.random(LLAMA, {"x_proj": 4})


# -----------------------------------------------------------------------------
# text

TEXTS = ["def f(x):\n    return x + 1\n", "naïve café, 東京 12345  two  spaces\t\n\n end ",
         "it's WE'LL 100% ok\r\n", " leading", "", "<s>special</s>"]


def bpe_folder(folder, kind):
    """A small byte-level BPE, trained and written by the tokenizers library -> its tokenizer"""
    tokenizers = pytest.importorskip("tokenizers")
    pre = tokenizers.pre_tokenizers
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE())
    theirs.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    if kind == "llama3":
        split = pre.Split(tokenizers.Regex(model_py.LLAMA3_SPLIT), "isolated")
        byte_level = pre.ByteLevel(add_prefix_space=False, use_regex=False)
        theirs.pre_tokenizer = pre.Sequence([split, byte_level])
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=500, special_tokens=["<s>", "</s>"],
                                             show_progress=False,
                                             initial_alphabet=pre.ByteLevel.alphabet())
    theirs.train_from_iterator([Path(model_py.__file__).read_text(), *TEXTS], trainer)
    if kind == "llama3":
        theirs.post_processor = tokenizers.processors.TemplateProcessing(
            "<s> $A", special_tokens=[("<s>", 0)])
    theirs.save(str(folder / "tokenizer.json"))
    return theirs


@pytest.mark.parametrize("kind", ["gpt2", "llama3"])
def test_a_folders_tokenizer_is_the_same_through_tiktoken(kind, tmp_path):
    theirs = bpe_folder(tmp_path, kind)
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    ours = load_tokenizer(tmp_path)
    assert ours.stop == [1] and ours.prefix == ([0] if kind == "llama3" else [])
    for text in [*TEXTS, Path(__file__).read_text()]:
        tokens = ours.encode(text)
        assert tokens == theirs.encode(text).ids
        assert ours.decode(tokens[len(ours.prefix):]) == text


def test_tiktokens_format_and_other_tokenizers(tmp_path):
    from base64 import b64encode
    lines = [b64encode(bytes([b])) + b" %d\n" % b for b in range(256)] + [b64encode(b"ab") + b" 256"]
    (tmp_path / "tokenizer.model").write_bytes(b"".join(lines))
    ours = load_tokenizer(tmp_path)
    assert ours.encode("abc") == [257, 256, ord("c")]
    assert ours.decode([256, 99999, 98]) == "ab\ufffdb"
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00")
    with pytest.raises(ValueError, match="not a byte-level BPE: use token ids"):
        load_tokenizer(tmp_path)
    metaspace = dict(added_tokens=[], model=dict(type="BPE", vocab={"\u2581a": 0}))
    unigram = dict(added_tokens=[], model=dict(type="Unigram", vocab=[["a", 0.0]]))
    digits = dict(added_tokens=[], model=dict(type="BPE", vocab={}), pre_tokenizer=dict(
        type="Sequence", pretokenizers=[dict(type="Digits"), dict(type="ByteLevel", use_regex=True)]))
    for settings in (metaspace, unigram, digits):
        (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
        with pytest.raises(ValueError, match="not a byte-level BPE: use token ids"):
            load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match="no tokenizer: use token ids"):
        load_tokenizer(tmp_path / "nowhere")


def test_streamed_text_holds_back_half_a_character():
    tokenizer = model_py.byte_tokenizer()
    text_of = tokenizer.stream()
    tokens = tokenizer.encode("é東<|endoftext|>")
    assert tokens[-1] == 256 and len(tokens) == 6
    assert [text_of([token]) for token in tokens] == ["", "é", "", "", "東", "<|endoftext|>"]
    assert text_of(tokens[:1]) == "" and text_of([], final=True) == "\ufffd"


# -----------------------------------------------------------------------------
# tensor parallelism

PROMPTS = [prompt(30, seed=i) for i in range(4)]
LENGTHS = [(20, 9, 1), (30,), (1, 29), (7, 7, 16)]


def shards_of(folder, config, world):
    """Serve prompts with adapters by this process's share -> logits and bytes sent"""
    model = GPT.from_pretrained(folder, world=world)
    kinds = [None, 32, {"q_proj": 5, "down_proj": 3, "up_proj": 7, "o_proj": 2, "c_attn": 3},
             {"gate_proj": 4, "v_proj": 33, "c_fc": 4, "mlp.c_proj": 9}]
    adapters = []
    for kind in kinds:
        if isinstance(kind, dict):
            known = " ".join(config.modules)
            kind = {name: rank for name, rank in kind.items() if name in known}
        adapters.append(kind and Adapter.random(model.config, kind, seed=2))
        if kind:
            adapters[-1].planes *= 4
    return serve(model, PROMPTS, LENGTHS, adapters)


def run_rank(rank, port, folders, out):
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank),
                       WORLD_SIZE="2", LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    world = World.start(2)
    assert world.broadcast([rank]) == [0]
    results = [shards_of(folder, config, world) for folder, config in folders]

    # bytes of one layer: 24 tokens, one adapter of rank 32 on q, k, v, o [S-LoRA §6]
    model = GPT.from_preset(LLAMA, torch.float32, seed=4, world=world)
    for adapters in [(), (Adapter.random(model.config, 32),)]:
        world.n_bytes = 0
        results.append(serve(model, [PROMPTS[0][:24]], [(24,)], adapters))
        results.append(world.n_bytes)
    if rank == 0:
        torch.save(results, out)
        with pytest.raises(RuntimeError):  # the other rank is gone
            for _ in range(3):
                world.all_reduce(torch.ones(4))
        Path(out).with_suffix(".raised").touch()


def test_two_devices_give_the_logits_of_one(tmp_path):
    folders = []
    for config in (LLAMA, GPT2):
        folders.append((tmp_path / config.family, config))
        random_model(config).save_pretrained(folders[-1][0])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    out = tmp_path / "results.pt"
    torch.multiprocessing.spawn(run_rank, (port, folders, out), nprocs=2)
    llama, gpt2, base, base_bytes, lora, lora_bytes = torch.load(out)
    for (folder, config), found in zip(folders, (llama, gpt2)):
        for logits, expected in zip(found, shards_of(folder, config, World())):
            assert expected.std() > 1
            assert torch.allclose(logits, expected, atol=1e-3, rtol=0)
    model = GPT.from_preset(LLAMA, torch.float32, seed=4)
    assert torch.allclose(base[0], model.logits(PROMPTS[0][:24]), atol=1e-4)
    model.merge(Adapter.random(LLAMA, 32))
    assert torch.allclose(lora[0], model.logits(PROMPTS[0][:24]), atol=1e-4)
    n, B, h, r, n_layer = 2, 24, 64, 32, 2
    assert base_bytes == n_layer * 2 * (2 * (n - 1) * B * h // n) * 4
    assert lora_bytes - base_bytes == n_layer * (5 * (n - 1) * B * r // n) * 4
    assert (tmp_path / "results.raised").exists()


def test_bad_worlds_and_shards():
    with pytest.raises(ValueError, match="tp = 3 needs 3 processes, there are 1: torchrun"):
        World.start(3)
    with pytest.raises(ValueError, match="tp = 4 does not divide n_kv_head = 2"):
        LLAMA.shard_of(0, 4)
    shard = LLAMA.shard_of(1, 2)
    assert shard.widths["preproj"] == (64, 64) and shard.widths["ffn_ln2"] == (48, 64)
    assert shard.page_bytes(2) * 2 == LLAMA.page_bytes(2) == 2 * 2 * 32 * 2


# -----------------------------------------------------------------------------
# models by name, and the trainer


@pytest.mark.parametrize("name, billions", [
    ("gpt2-xl", 1.56), ("llama-7b", 6.74), ("llama-13b", 13.0), ("llama-33b", 32.5),
    ("llama-70b", 69.0), ("gpt3-175b", 175), ("tinyllama-1.1b", 1.1)])
def test_presets_have_the_published_size(name, billions):
    assert preset(name).n_params == pytest.approx(billions * 1e9, rel=0.01)


def test_names_that_are_no_model(tmp_path, monkeypatch):
    monkeypatch.setattr(model_py, "CACHE", tmp_path)
    with pytest.raises(KeyError, match="unknown preset 'llama-8b': must be one of tiny, gpt2"):
        GPT.from_preset("llama-8b")
    with pytest.raises(FileNotFoundError, match="'tiny' is not trained yet: run `python model.py`"):
        load_model("tiny")
    with pytest.raises(FileNotFoundError, match="'nowhere': must be a folder or one of tiny"):
        load_model("nowhere")
    with pytest.raises(ValueError, match="dtype = 'int8': must be one of float32"):
        GPT.from_preset(LLAMA, dtype=torch.int8)


def test_dtype_none_is_the_folders_if_the_machine_is_fast(tmp_path, monkeypatch):
    GPT.from_preset(LLAMA, torch.bfloat16).save_pretrained(tmp_path)
    for fast, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(model_py, "is_fast", lambda *_: fast)
        assert GPT.from_pretrained(tmp_path).dtype == dtype
    assert GPT.from_pretrained(tmp_path, "bfloat16").dtype == torch.bfloat16
    n = GPT.from_preset(LLAMA, torch.float32)
    assert n.n_bytes == 4 * LLAMA.n_params


def test_training_lowers_the_loss_and_the_model_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(model_py, "CACHE", tmp_path)
    monkeypatch.setattr(model_py, "PRESETS", {"tiny": GPTConfig(2, 2, 64, 128, vocab_size=257, tied=True)})
    monkeypatch.setattr(model_py, "stdlib_tokens", lambda: torch.arange(4000) % 7)
    model_py.train_tiny(steps=100)
    model, tokenizer = load_model("tiny")
    draft, _ = load_model("draft")
    assert (model.config.n_layer, draft.config.n_layer) == (2, 1)
    assert tokenizer.encode("a") == [97]
    tokens = torch.arange(30) % 7
    for m in (model, draft):
        loss = torch.nn.functional.cross_entropy(m.logits(tokens)[:-1], tokens[1:])
        assert loss < 2.5  # log(257) = 5.5 at the start
