"""What the texts say is so: README's numbers and names, and the exercises of bench.py, which can be
solved. pytest runs it in .ci/run, not beside the proofs: whoever changes a sentence breaks none."""
import re
import shutil
from itertools import accumulate
from operator import mul
from pathlib import Path

import bench
import kernels
import model as model_py
import sarathi
from bench import ASSETS, EXPERIMENTS
from model import GPT
from sarathi import SCHEDULERS, Engine, Request
from test_sarathi import (PAGE, README, command, commands_of_readme, each, edit, explained,
                          lines_of, logits_by, prompt, transformers_model)

import numpy as np
from torch import float32

def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]

def test_readmes_table_is_what_its_command_prints(monkeypatch, capsys, tmp_path):
    """Of its own scheduler"""
    monkeypatch.chdir(tmp_path)
    words, _ = commands_of_readme(tmp_path)
    _, first, _ = command(monkeypatch, capsys, words)
    heads, *rows = [cells(line) for line in first.splitlines() if line.startswith("|")]
    printed = {row[0]: dict(zip(heads, row)) for row in rows}
    start = README.index("|", README.index("six of the columns"))
    heads, _, *rows = map(cells, README[start:README.index("\n\n", start)].splitlines())
    assert len(rows) == 4 and len(heads) == 7
    for row in rows:
        assert dict(zip(heads, row)).items() <= printed[row[0]].items()
    ours, other, sarathi = ([float(printed[name][head]) for head in ("TTFT p50", "stall p99")]
                            for name in ("Shortest", "prefill_first", "sarathi_serve"))
    assert ours[0] < sarathi[0] and ours[1] <= sarathi[1] < other[1] / 10

def test_readme_shows_an_iteration_of_explain():
    texts, *_ = explained("sarathi")
    shown = next(block for block in README.split("```\n") if block.startswith("iteration"))
    assert shown.rstrip() in texts

ROOT = Path(bench.__file__).parent

def test_readme_names_what_exists():
    """Functions, classes, tests, experiments, files and lines of code"""
    modules = sarathi, model_py, kernels, bench
    source = "".join((ROOT / f"{name}.py").read_text(encoding="utf8")
                     for name in ("sarathi", "model", "kernels", "bench", "test_sarathi"))
    cited = re.findall(r"^\|.*\|.*`.*\|$", README, re.M)
    names = set(re.findall(r"`(?:\w+\.)?(\w+)`", "".join(cited)))
    assert len(names) > 15
    assert [name for name in names if not re.search(rf"\b{name}\b", source)] == []
    methods = set(re.findall(r"\b([A-Z]\w+)\.([a-z]\w+)", PAGE)) - {("README", "md")}
    assert len(methods) > 8
    assert [names for names in methods if not any(
        hasattr(getattr(module, names[0], None), names[1]) for module in modules)] == []
    ideas = PAGE[PAGE.index("## The three ideas"):PAGE.index("## One iteration")]
    lines = [code for code in ideas.split("`")[1::2] if "(" in code]
    assert len(lines) == 3 and all(line in source for line in lines)
    words = set(re.findall(r"`(?:python )?bench.py ([a-z]\w+)", PAGE))
    words |= set(re.findall(r", (\w+) \|$", README, re.M)) - names
    assert words <= {*EXPERIMENTS, "gpu", "list", "scoreboard", "report"}
    assert all(f"`{name}`" in PAGE for name in SCHEDULERS)
    assert all(f"`{name}`" in PAGE for name in sarathi.ORDERS)

def test_links_lead_somewhere():
    """To files, and to headings of results.md, as GitHub names them"""
    results = (ASSETS / "results.md").read_text(encoding="utf8")
    heads = re.findall(r"^#+ (.+)", results, re.M)
    anchors = ["-".join(re.sub(r"[^\w\s-]", "", head).lower().split(" ")) for head in heads]
    assert len(anchors) == len(set(anchors))
    in_order = ("What users feel", "SARATHI: Fig. 3", "SARATHI: Table 4", "S-LoRA: Table 3, Fig. 5",
                "SmartSpec: Fig. 1, 11, 14", "On an H200: users", "Research", "Peers")
    assert sorted(in_order, key=heads.index) == [*in_order]
    for text, folder in (README, ROOT), (results, ASSETS):
        links = [link for link in re.findall(r"\]\(([^)]*)\)", text) if "://" not in link]
        assert len(links) > 3
        for link in links:
            file, _, anchor = link.partition("#")
            assert (folder / (file or "results.md")).is_file() and anchor in ["", *anchors], link

def test_results_are_not_edited(monkeypatch, capsys, tmp_path):
    """`bench.py report` writes the page as it is."""
    for path in ASSETS.glob("*.json"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(bench, "ASSETS", tmp_path)
    assert command(monkeypatch, capsys, "report")[0] == 0
    assert (tmp_path / "results.md").read_bytes() == (ASSETS / "results.md").read_bytes()

SOLUTIONS = ["""
from sarathi import Sarathi, decodes_and_prompts, prefill_chunks

class Mine(Sarathi):
    def admit(self, running, waiting):
        short = sorted(self.engine.waiting, key=lambda request: request.n_todo)
        return super().admit(running, short[:len(waiting)])

    def plan(self, requests):
        decodes, prompts = decodes_and_prompts(requests)
        prompts.sort(key=lambda request: request.n_todo)
        return decodes + prefill_chunks(prompts[:1], self.budget(decodes))
""", """
def mine(waiting, running, now):
    def key(request):
        is_late = now > request.arrival + 1.0
        return is_late, len(request.prompt)
    return sorted(waiting, key=key)
""", """
from sarathi import Policy

class Mine(Policy):
    def n_drafts(self, requests, limits, acceptance, price):
        k = 7 if len(requests) <= 4 else 5
        return [min(k, limit) for limit in limits]
""", """
from sarathi import Proposer

class Mine(Proposer):
    table = {}  # tokens -> the one behind them, of all requests

    def draft(self, request, k):
        known = request.tokens(0, request.n_tokens)
        for n, i in product(range(1, 7), range(request.notes.get("seen", 0), len(known))):
            if i >= n:
                self.table[tuple(known[i - n:i])] = known[i]
        request.notes["seen"] = len(known)
        for _ in range(k):
            keys = [tuple(known[-n:]) for n in (6, 5, 4, 3, 2, 1)]
            known.append(next((self.table[key] for key in keys if key in self.table), 0))
        return known[-k:]
""".replace("class", "from itertools import product\n\nclass"), """
import json
from sarathi import GPUS
a100 = GPUS["a100"]
print(json.dumps(a100._replace(bandwidth=2 * a100.bandwidth)._asdict()))
""", """
import torch
import torch.nn.functional as F

def attention(q, kv, batch, window=8):
    out = torch.zeros_like(q)
    for start, n, n_past, first in batch.spans.tolist():
        pages = batch.table[first:first + n_past + n].long()
        k, v = kv[:, pages].transpose(1, 2)
        rows = q[start:start + n].transpose(0, 1)
        seen = torch.ones(n, len(pages)).tril(n_past).triu(n_past - window + 1).bool()
        own = F.scaled_dot_product_attention(rows, k, v, seen, enable_gqa=True)
        out[start:start + n] = own.transpose(0, 1)
    return out
"""]

@each("number, column, own, target, other, value", [
    (1, "TTFT p50", "Mine", 225, "sarathi", 241),
    (2, "good", "sarathi, mine", 0.86, "sarathi, edf", 0.859),
    (3, "TPOT p50", "Mine", 8, "goodput", 7.58),
    (5, "requests/s", "sarathi_serve", 3, "", 2.12),
])
def test_exercises_can_be_solved(number, column, own, target, other, value, monkeypatch, capsys,
                                 tmp_path):
    """In at most 15 lines, by the command and with the numbers that bench.py's first lines name"""
    text = re.search(rf"^{number}\. (.*?)(?=^\d\. |\Z)", bench.__doc__, re.M | re.S)[1]
    assert f" {target} " in text and f"{value}" in text
    solution = SOLUTIONS[number - 1]
    assert all(len(re.findall(r"^.+$", text, re.M)) <= 15 for text in SOLUTIONS)
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(solution)
    if number == 5:
        exec(solution, {})
        Path("my.json").write_text(capsys.readouterr().out)
    _, out, _ = command(monkeypatch, capsys, text.strip().splitlines()[-1].strip())
    heads = next(line for line in out.splitlines() if line.startswith("| ")).split("|")
    at = [head.strip() for head in heads[2:]].index(column)
    figures = {name: float(line[at]) for name, line in lines_of(out).items()}
    better = figures[own] - target
    assert better < 0 if column.endswith("p50") else better > 0
    assert figures.get(other, value) == value

def test_a_proposer_may_beat_prompt_lookup():
    """Exercise 4, on real text instead of a trained model's"""
    names = {}
    exec(SOLUTIONS[3], names)
    data = (ASSETS / "claims.csv").read_bytes()
    shares = []
    for proposer in (names["Mine"](), sarathi.Ngram()):
        right = []
        for start in range(0, 14000, 1000):
            text = list(data[start:start + 256])
            request = Request([])
            for n in range(64, 250, 2):
                request.prompt = text[:n]
                drafts = proposer.draft(request, 3)
                equal = [draft == token for draft, token in zip(drafts, text[n:])]
                right += accumulate(equal, mul)
        shares.append(np.mean(right))
    assert shares[0] > 1.1 * shares[1] > 0.1

def test_a_window_may_be_added_to_attention(monkeypatch, tmp_path):
    """Exercise 6, against transformers"""
    theirs = transformers_model(tmp_path, "mistral", sliding_window=8)
    edit(tmp_path, sliding_window=None)
    names = {}
    exec(SOLUTIONS[5], names)
    for attention, limit in ((names["attention"], 1e-4), (kernels.attention, 0.01)):
        monkeypatch.setattr(model_py, "attention", attention)
        model = GPT.from_pretrained(str(tmp_path), dtype=float32)
        engine = Engine(model, n_page=80, chunk=16)
        forward = engine.runner.forward
        computed = {}  # position -> logits behind it

        def recorded(feeds):
            (feed,), logits = forward(feeds)
            if feed.n_logits:
                computed[feed.n_past + feed.n - 1] = logits[0].clone()
            return [feed], logits
        engine.runner.forward = recorded
        tokens = prompt(40)
        tokens += engine.generate([tokens], 20)[0]
        assert len(computed) == 20
        expected = logits_by(theirs)(tokens)
        error = max(abs(logits - expected[at]).max() for at, logits in computed.items())
        assert (error < limit) == (limit == 1e-4)
