"""The page of --explain in a browser. pytest runs it in .ci/run; skipped without a browser."""
import json
import re
import shutil
import subprocess
from collections import Counter
from html import unescape

import sarathi
from test_sarathi import each, explained

import pytest

STEPS = """<script>
const seen = []
document.body.style.maxWidth = "WIDTHpx"  // headless windows are not as narrow as a phone
for (let i = 0; i < 20; i++) {
  const rows = [...$("batch").rows].map(row => [...row.cells].map(cell => cell.textContent.trim()))
  const textsIn = node => [...node.childNodes].map(child => child.textContent)
  seen.push([$("text").textContent, rows.filter(row => row[0]), document.body.scrollWidth,
    [...$("pool").children].map(textsIn), textsIn($("owners"))])
  dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}))
}
document.body.innerHTML = `<pre>${JSON.stringify(seen)}</pre>`
</script>"""
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")

class Keeps(sarathi.Memory):
    """Pages stay as they are when their request ends, until others need them."""
    def release(self, request):
        for page in self.pool.tables.pop(request):
            self.pool.tables[page] = [page]
            self.idle[page] = True
        self.unpin(request.lora_weights)

@each("width, memory", [(400, None), (1280, Keeps)])
def test_page_of_explain(width, memory, tmp_path):
    """Without a network, stepped to its end by keys: it shows the texts and rows of --explain, and
    the engine's pages, 1 to 32"""
    texts, page, steps = explained("sarathi", memory)
    assert not re.search(r"http|src=|url\(|import|fetch", page)
    if not BROWSER:
        pytest.skip("no browser is installed")
    path = tmp_path / "page.html"
    path.write_text(page + STEPS.replace("WIDTH", f"{width}"), encoding="utf8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    dump = subprocess.run([BROWSER, *flags, "--dump-dom", path.as_uri()], capture_output=True,
                          check=True, timeout=120).stdout.decode()
    seen = json.loads(unescape(re.search("<pre>(.*)</pre>", dump)[1]))
    assert [text for text, *_ in seen] == texts + texts[-1:] * (20 - len(texts))
    kept = 0
    for (_, _, used, grid, legend), step in zip(seen, steps):
        assert used <= width
        names = dict.fromkeys(range(1, 33), "–") | dict.fromkeys(step["free"], "·")
        for owner, pages in step["pages"].items():
            names |= dict.fromkeys(pages, owner.split()[1])
        assert grid == [[f"{number}", name] for number, name in names.items()]
        shown = Counter(names.values())
        n_kept = shown.pop("–", 0)
        kept += n_kept
        others = f"· free {shown.pop('·', 0)}" + f", – idle {n_kept}" * (n_kept > 0)
        assert legend[0] == others and {*legend[1:]} == {f"{name} {n}" for name, n in shown.items()}
    assert (kept > 0) == (memory is not None)
    for text, rows, *_ in seen:
        fed = []
        for tokens, drafts, positions, pages in re.findall(
                r"tokens \[(.*)\], drafts \[(.*)\]\n +positions \[(.*)\] on pages \[(.*)\]", text):
            columns = positions, f"{tokens} {drafts}", pages
            fed += zip(*[re.findall(r"\d+", column) for column in columns])
        assert fed and [tuple(row[3:6]) for row in rows] == fed
