"""The proofs of model.py: forward against the oracle, the oracle against transformers and PEFT, two
devices against one, tokenizers against their libraries, and one line for what users get wrong."""
import json
import os
import socket
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import model as model_py
from kernels import FEW_ROWS, Batch, Sites, cdiv
from model import GPT, Adapter, GPTConfig, World, load_model, load_tokenizer, preset

torch.set_num_threads(1)  # the models are tiny
LLAMA = GPTConfig(2, 4, 64, 96, n_kv_head=2, vocab_size=131, block_size=96)
GPT2 = GPTConfig(2, 4, 64, vocab_size=131, block_size=96, family="gpt2", tied=True)

def random_model(config, folder, dtype=torch.float32):
    """A folder with weights so large that logits differ -> the model"""
    model = GPT.from_preset(config, dtype, seed=1)
    rng = torch.Generator().manual_seed(2)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=rng)
        weight.data += 0.15 * noise.to(dtype)
    model.save_pretrained(folder)
    return GPT.from_pretrained(folder, dtype)

def prompt(n, seed=0):
    return torch.randint(0, 131, (n,), generator=torch.Generator().manual_seed(seed))

def int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32)

def make_batch(spans, config):
    """spans: [(tokens, n_past, page table, Adapter or None, its pages)], few rows first. All logits
    are wanted."""
    tokens, positions, pages, rows, table = [], [], [], [], []
    for span, n_past, own, _, _ in spans:
        rows.append([len(tokens), len(span), n_past, len(table)])
        tokens += span
        positions += range(n_past, n_past + len(span))
        pages += own[n_past:n_past + len(span)]
        table += own[:n_past + len(span)]
    lengths = [row[1] for row in rows]
    n_few = sum(n <= FEW_ROWS for n in lengths)
    most = max(lengths[:n_few], default=0), max(lengths[n_few:], default=0)
    adapters = {}
    for op, operator in config.operators.items():
        sites, site_table = [], []
        for (_, _, _, adapter, own), (first, n, _, _) in zip(spans, rows):
            for site in adapter.sites[op].tolist() if adapter else []:
                sites.append([first, n, *site[2:7], site[7] + len(site_table)])
            site_table += own
        if sites:
            n_few_sites = sum(site[1] <= FEW_ROWS for site in sites)
            max_rank = cdiv(max(site[4] for site in sites), 16) * 16
            adapters[op] = Sites(int32(sites), int32(site_table), n_few_sites, *most,
                                 len(operator.modules), max_rank)
    return Batch(torch.tensor(tokens), torch.tensor(positions), int32(pages), int32(rows),
                 int32(table), torch.arange(len(tokens)), n_few, *most, max(positions) + 1,
                 adapters)

def serve(model, prompts, lengths, adapters):
    """Run prompts together, in iterations of the given lengths -> logits of each one's tokens"""
    n_page = sum(map(len, prompts)) + sum(adapter.n_page for adapter in adapters if adapter)
    free = torch.randperm(n_page, generator=torch.Generator().manual_seed(0)).tolist()
    kv = model.new_cache(n_page)
    tables = [[free.pop() for _ in tokens] for tokens in prompts]
    homes = [[free.pop() for _ in range(a.n_page if a else 0)] for a in adapters]
    for adapter, home in zip(adapters, homes):
        if adapter:
            adapter.write(kv, home)
    n_past = [0] * len(prompts)
    logits = [[torch.zeros(0, 131)] for _ in prompts]
    for i in range(max(map(len, lengths))):
        fed = sorted((own[i], r) for r, own in enumerate(lengths) if i < len(own) and own[i])
        spans = []
        for n, r in fed:
            span = prompts[r][n_past[r]:n_past[r] + n].tolist()
            spans.append((span, n_past[r], tables[r], adapters[r], homes[r]))
            n_past[r] += n
        out = model.forward(make_batch(spans, model.config), kv)
        for (n, r), rows in zip(fed, [] if out is None else out.split([n for n, _ in fed])):
            logits[r].append(rows.float())
    return [torch.cat(rows) for rows in logits]

def close(a, b, atol=1e-4):
    assert b.std() > 0.1
    return torch.allclose(a, b, atol=atol, rtol=0)

LENGTHS = {  # for three requests, the tokens of each iteration
    "whole": [(40,), (25,), (9,)],
    "chunks": [(16, 16, 8), (9, 9, 7), (1, 8, 0)],
    "decodes": [(30, 1, 1, 1), (0, 20, 1, 4), (1, 1, 17, 1)],
}

@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("config, dtype, atol", [
    (LLAMA, torch.float32, 1e-4), (GPT2, torch.float32, 1e-4), (LLAMA, torch.bfloat16, 0.3)])
def test_forward_equals_the_oracle(config, dtype, atol, lengths, tmp_path):
    model = random_model(config, tmp_path, dtype)
    prompts = [prompt(sum(own), seed=i) for i, own in enumerate(LENGTHS[lengths])]
    for tokens, logits in zip(prompts, serve(model, prompts, LENGTHS[lengths], [None] * 3)):
        assert close(logits, model.logits(tokens), atol)

def test_marks_name_each_operator_when_it_is_done():
    model = GPT.from_preset(LLAMA, torch.float32)
    marks = []
    adapter = Adapter.random(LLAMA, {"mlp.down_proj": 2})
    batch = make_batch([([1, 2], 0, [30, 31], adapter, [*range(adapter.n_page)])], LLAMA)
    model.forward(batch, model.new_cache(32), marks.append)
    layer = "others preproj attn postproj others ffn_ln1 others ffn_ln2 lora".split()
    assert marks == [*layer, *layer, "others"]

def hf_folder(folder, family="llama", shard="5GB", **settings):
    """A random checkpoint, written by transformers -> its model"""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    kind = transformers.GPT2LMHeadModel
    sizes = dict(n_positions=96, n_embd=64, n_layer=2, n_head=4)
    if family != "gpt2":
        kind = getattr(transformers, f"{family.title()}ForCausalLM")
        sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=96)
    sizes |= dict(vocab_size=131, bos_token_id=1, eos_token_id=2, initializer_range=0.2)
    theirs = kind(kind.config_class(**sizes | settings)).eval()
    for parameter in theirs.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter) * (parameter.dim() == 1)
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
    "mha": dict(num_key_value_heads=4), "gqa": {}, "mqa": dict(num_key_value_heads=1),
    "tied": dict(tie_word_embeddings=True), "shards": dict(shard="30KB"),
    "llama3 rope": dict(rope_parameters=LLAMA3), "wide heads": dict(head_dim=32),
    "linear rope": dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4)),
    "mistral": dict(family="mistral", sliding_window=None),
}

@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_equal_transformers(name, tmp_path):
    theirs = hf_folder(tmp_path, **CHECKPOINTS[name])
    assert (len([*tmp_path.glob("*.safetensors")]) > 1) == ("shards" in name)
    if name == "llama3 rope":  # as transformers 4 wrote it
        settings = json.loads((tmp_path / "config.json").read_text())
        rope = settings.pop("rope_parameters")
        settings |= dict(rope_theta=rope.pop("rope_theta"), rope_scaling=rope)
        (tmp_path / "config.json").write_text(json.dumps(settings))
    ours = GPT.from_pretrained(tmp_path)
    tokens = prompt(60)
    expected = logits_of(theirs, tokens)
    assert close(ours.logits(tokens), expected)
    assert close(serve(ours, [tokens], [(50, 10)], [None])[0], expected)
    assert ours.config.n_params == sum(p.numel() for p in theirs.parameters())
    ours.save_pretrained(tmp_path / "saved")
    assert torch.equal(GPT.from_pretrained(tmp_path / "saved").logits(tokens), ours.logits(tokens))
    auto = pytest.importorskip("transformers").AutoModelForCausalLM
    assert close(logits_of(auto.from_pretrained(tmp_path / "saved"), tokens), expected)

def edit(tensors=None, **settings):
    """A function that changes a folder: its tensors, None removes one, and its settings alike"""
    def change(folder):
        config = next(folder.glob("*config.json"))
        known = json.loads(config.read_text()) | settings
        config.write_text(json.dumps({k: v for k, v in known.items() if v is not None}))
        path = next(folder.glob("*.safetensors"))
        known = load_file(path) | (tensors or {})
        save_file({k: v for k, v in known.items() if v is not None}, path)
    return change

Q = "model.layers.1.self_attn.q_proj.weight"
A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
BAD_MODELS = {
    "config.json does not exist": lambda f: (f / "config.json").unlink(),
    "config.json does not hold settings": lambda f: (f / "config.json").write_text("[1"),
    "model.safetensors does not exist": lambda f: (f / "model.safetensors").unlink(),
    "model.safetensors is damaged": lambda f: os.truncate(f / "model.safetensors", 50_000),
    "model_type = 'bert' is not supported, only 'llama' or": edit(model_type="bert"),
    "embed_tokens.weight' is .*must be \\(131, 768\\)": edit(hidden_size=None),
    "sliding_window = 8 is not": edit(model_type="mistral", sliding_window=8),
    "rope_type = 'yarn'": edit(rope_scaling={"rope_type": "yarn"}),
    "invalid literal for int.*'two'": edit(num_hidden_layers="two"),
    "k_proj.weight' is .*must be \\(48, 64\\)": edit(num_key_value_heads=3),
    "q_proj.weight' is .*must be \\(36, 64\\)": edit(head_dim=9),
    "factor": edit(rope_scaling={"type": "linear"}), f"'{Q}' is missing": edit({Q: None}),
    f"'{Q}' is \\(3, 64\\).*must be \\(64, 64\\)": edit({Q: torch.ones(3, 64)}),
    f"'{Q}' is .*int32": edit({Q: int32([[0] * 64] * 64)}),
    "1 surplus tensors, as 'extra'": edit({"extra": torch.ones(1)}),
}
BAD_ADAPTERS = {
    "use_dora = True is not supported": edit(use_dora=True),
    "bias = 'all' is not supported, only 'none'": edit(bias="all"),
    "peft_type = 'IA3'": edit(peft_type="IA3"),
    f"'{A}' is missing": edit({A: None}),
    f"'{A}' is \\(8, 32\\).*must be \\(8, 64\\)": edit({A: torch.ones(8, 32)}),
    "layers.7.*does not fit: layers 0 to 1": edit({A.replace("1", "7"): torch.ones(8, 64)}),
    "z_proj.*does not fit.*q_proj": edit({A.replace("q_", "z_"): torch.ones(8, 64)}),
    "adapter_model.* does not exist": lambda f: (f / "adapter_model.safetensors").unlink(),
}

@pytest.mark.parametrize("message", [*BAD_MODELS, *BAD_ADAPTERS])
def test_a_bad_folder_is_one_clear_line(message, tmp_path):
    if message in BAD_MODELS:
        GPT.from_preset(LLAMA).save_pretrained(tmp_path)
    else:
        Adapter.random(LLAMA, 8).save_pretrained(tmp_path)
        edit(rank_pattern=None, alpha_pattern=None, r=8, lora_alpha=8)(tmp_path)
    (BAD_MODELS | BAD_ADAPTERS)[message](tmp_path)
    with pytest.raises((ValueError, KeyError, FileNotFoundError), match=message) as raised:
        if message in BAD_MODELS:
            GPT.from_pretrained(tmp_path)
        else:
            Adapter.from_pretrained(tmp_path, LLAMA)
    assert "\n" not in str(raised.value)

LORAS = {
    "llama": [
        dict(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]),
        dict(r=16, lora_alpha=8, target_modules=["q_proj", "o_proj"], use_rslora=True),
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

@pytest.mark.parametrize("family", LORAS)
def test_adapters_equal_peft(family, tmp_path):
    """Merged, and in a batch with requests of all adapters and one without."""
    peft = pytest.importorskip("peft")
    theirs = hf_folder(tmp_path, family)
    ours = GPT.from_pretrained(tmp_path)
    tokens = prompt(40)
    adapters, expected = [None], [logits_of(theirs, tokens)]
    for i, lora in enumerate(LORAS[family]):
        wrapped = peft.get_peft_model(theirs, peft.LoraConfig(task_type="CAUSAL_LM", **lora)).eval()
        for name, parameter in wrapped.named_parameters():
            parameter.data += 0.3 * torch.randn_like(parameter) * ("lora_B" in name)
        wrapped.save_pretrained(tmp_path / str(i))
        expected.append(logits_of(wrapped, tokens))
        wrapped.unload()
        adapters.append(Adapter.from_pretrained(tmp_path / str(i), ours.config))
        ours.merge(adapters[-1])
        assert close(ours.logits(tokens), expected[-1])
        assert not close(expected[-1], expected[0], 0.1)
    ours.merge(None)
    assert torch.equal(ours.logits(tokens), GPT.from_pretrained(tmp_path).logits(tokens))
    lengths = [(40,), (30, 9, 1), (8, 8, 24), (32, 1, 7), (1, 39), (9, 9, 22)][:len(adapters)]
    for logits, wanted in zip(serve(ours, [tokens] * len(adapters), lengths, adapters), expected):
        assert close(logits, wanted)

    # another rank for every module, saved here and loaded here and there
    ranks = {module: 3 + i for i, module in enumerate(ours.config.modules)}
    adapter = Adapter.random(ours.config, ranks, seed=1)
    adapter.planes *= 4
    adapter.save_pretrained(tmp_path / "saved")
    again = Adapter.from_pretrained(tmp_path / "saved", ours.config)
    assert torch.equal(again.planes, adapter.planes) and again.ranks == ranks
    ours.merge(again)
    half = GPT.from_pretrained(tmp_path, torch.float16)  # not packed
    before = half.logits(tokens)
    half.merge(again)
    assert close(half.logits(tokens), ours.logits(tokens), 0.1)
    half.merge(None)
    assert torch.equal(half.logits(tokens), before)
    saved = peft.PeftModel.from_pretrained(theirs, tmp_path / "saved")
    assert close(ours.logits(tokens), logits_of(saved, tokens))

def serve_share(folder, config, world):
    """Four requests with adapters of whole and odd ranks, on this device's share -> logits"""
    model = GPT.from_pretrained(folder, world=world)
    odd = {module: 3 + 5 * i for i, module in enumerate(config.modules)}
    adapters = [None, *(Adapter.random(model.config, ranks, seed=2) for ranks in (32, odd, 1))]
    for adapter in adapters[1:]:
        adapter.planes *= 4
    prompts = [prompt(30, seed=i) for i in range(4)]
    return serve(model, prompts, [(20, 9, 1), (30,), (1, 29), (7, 7, 16)], adapters)

def run_rank(rank, port, folders, out):
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ |= dict(RANK=str(rank), WORLD_SIZE="2")
    world = World.start(2)
    assert world.broadcast([rank]) == [0]
    results = [serve_share(folder, config, world) for folder, config in folders]
    model = GPT.from_preset(LLAMA, torch.float32, seed=4, world=world)
    results.append(serve(model, [prompt(24)], [(24,)], [Adapter.random(model.config, 32)])[0])
    if rank == 0:
        torch.save(results, out)

def test_two_devices_give_the_logits_of_one(tmp_path):
    folders = [(tmp_path / config.family, config) for config in (LLAMA, GPT2)]
    for folder, config in folders:
        random_model(config, folder)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(run_rank, (port, folders, tmp_path / "results"), nprocs=2)
    *served, found = torch.load(tmp_path / "results")
    model = GPT.from_preset(LLAMA, torch.float32, seed=4)
    model.merge(Adapter.random(LLAMA, 32))
    assert torch.allclose(found, model.logits(prompt(24)), atol=1e-5, rtol=0)
    for (folder, config), found in zip(folders, served):
        for logits, expected in zip(found, serve_share(folder, config, World())):
            assert close(logits, expected)

LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
TEXTS = ["def f(x):\n    return x + 1\n", "naïve café, 東京 12345  6 two  spaces\t\n\n end ",
         "it's WE'LL 100% ok\r\n", " leading", "", "<s>special</s>", Path(__file__).read_text()]

@pytest.mark.parametrize("kind", ["gpt2", "llama3", "digits"])
def test_a_folders_tokenizer_is_the_same_through_tiktoken(kind, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    pre = tokenizers.pre_tokenizers
    split = pre.Split(tokenizers.Regex(LLAMA3_SPLIT), "isolated")
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE())
    theirs.pre_tokenizer = {
        "gpt2": pre.ByteLevel(False),
        "digits": pre.Sequence([pre.Digits(True), pre.ByteLevel(False)]),
        "llama3": pre.Sequence([split, pre.ByteLevel(False, use_regex=False)])}[kind]
    theirs.train_from_iterator(TEXTS, tokenizers.trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=pre.ByteLevel.alphabet()))
    if kind == "llama3":
        theirs.post_processor = tokenizers.processors.TemplateProcessing(
            "<s> $A", special_tokens=[("<s>", 0)])
    theirs.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    ours = load_tokenizer(tmp_path)
    assert ours.stop == [1] and ours.prefix == ([0] if kind == "llama3" else [])
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text)[len(ours.prefix):]) == text

def test_a_folder_without_a_byte_level_bpe_has_no_tokenizer(tmp_path):
    bpe = dict(added_tokens=[], model=dict(type="BPE", vocab={"a": 0}))
    steps = [dict(type="Metaspace"), dict(type="ByteLevel", use_regex=True)]
    for settings in (None, bpe, bpe | dict(model=dict(type="BPE", vocab={"\u2581a": 0})),
                     bpe | dict(pre_tokenizer=dict(type="Sequence", pretokenizers=steps))):
        if settings:
            (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
        assert load_tokenizer(tmp_path) is None
    steps.pop(0)
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    assert load_tokenizer(tmp_path).decode([0, 999]) == "a\ufffd"

def test_streamed_text_holds_back_half_a_character():
    tokenizer = model_py.byte_tokenizer()
    text_of = tokenizer.stream()
    tokens = tokenizer.encode("é東<|endoftext|>")
    assert [text_of([token]) for token in tokens] == ["", "é", "", "", "東", "<|endoftext|>"]
    assert text_of(tokens[:1]) == "" and text_of([], final=True) == "\ufffd"

SIZES = {"gpt2-xl": 1.56, "llama-7b": 6.74, "llama-13b": 13.0, "llama-33b": 32.5, "llama-70b": 69.0,
         "gpt3-175b": 175, "tinyllama-1.1b": 1.1, "llama-124m": 0.124}  # billions of parameters
WRONG = {
    "unknown preset 'llama-8b': must be one of tiny, gpt2": lambda: GPT.from_preset("llama-8b"),
    "'tiny': is not trained yet, run `python model.py`": lambda: load_model("tiny"),
    "'nowhere': must be a folder or one of tiny": lambda: load_model("nowhere"),
    "dtype = 'int8': must be one of float32": lambda: GPT.from_preset(LLAMA, torch.int8),
    "tp = 3 needs 3 processes, there are 1: torchrun": lambda: World.start(3),
    "tp = 4 does not divide n_kv_head = 2": lambda: LLAMA.shard_of(0, 4),
}

def test_sizes_of_presets_shares_and_adapters():
    for name, billions in SIZES.items():
        assert preset(name).n_params == pytest.approx(billions * 1e9, rel=0.01)
    shard = LLAMA.shard_of(1, 2)
    assert shard.widths["preproj"] == (64, 64) and shard.widths["ffn_ln2"] == (48, 64)
    assert shard.page_bytes(2) * 2 == LLAMA.page_bytes(2) == 2 * 2 * 32 * 2
    adapter = Adapter(LLAMA, 8)
    assert adapter.ranks == {f"self_attn.{name}_proj": 8 for name in "qkvo"}
    assert adapter.n_params == 2 * 8 * (64 + 64 + 2 * (64 + 32) + 64 + 64)
    assert adapter.n_page == 8 * 2 * 4 and adapter.planes is None  # rows of 64 on pages of 32

@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_argument_is_one_clear_line(message, tmp_path, monkeypatch):
    monkeypatch.setattr(model_py, "CACHE", tmp_path)
    with pytest.raises((ValueError, FileNotFoundError, KeyError), match=message):
        WRONG[message]()

def test_dtype_none_is_the_folders_if_the_machine_is_fast(tmp_path, monkeypatch):
    GPT.from_preset(LLAMA, torch.bfloat16).save_pretrained(tmp_path)
    for fast, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(model_py, "is_fast", lambda *_: fast)
        model = GPT.from_pretrained(tmp_path)
        assert model.dtype == dtype and model.n_bytes == dtype.itemsize * LLAMA.n_params
        assert GPT.from_pretrained(tmp_path, "bfloat16").dtype == torch.bfloat16

def test_training_lowers_the_loss_and_the_models_are_found(tmp_path, monkeypatch):
    tiny = GPTConfig(2, 2, 64, 128, vocab_size=257, tied=True)
    monkeypatch.setattr(model_py, "CACHE", tmp_path)
    monkeypatch.setattr(model_py, "PRESETS", {"tiny": tiny})
    monkeypatch.setattr(model_py, "stdlib_tokens", lambda: torch.arange(4000) % 7)
    model_py.train_tiny(steps=100)
    tokens = torch.arange(30) % 7
    for name, n_layer in (("tiny", 2), ("draft", 1)):
        model, tokenizer = load_model(name)
        assert model.config.n_layer == n_layer and tokenizer.encode("a") == [97]
        assert F.cross_entropy(model.logits(tokens)[:-1], tokens[1:]) < 3  # at first log(257) = 5.5
