"""How the text reads, by numbers: lines and tokens of the files, lines of the lesson, names that it
uses before their section, lines, words and numbers of README. Exit status 1 where one is over its
limit. A file's lesson ends at a line "# appendix", in a class at "# ---- the rest"."""
import ast
import io
import re
import tokenize
from pathlib import Path

FILES = {  # file -> most lines, code tokens, code tokens in a line of code
    "kernels.py": (1645, 9520, 13), "model.py": (1150, 8900, 10.5),
    "sarathi.py": (2800, 20600, 10.5), "bench.py": (2350, 19950, 11.2),
    "test_sarathi.py": (3120, 33010, 13)}
LESSON = ("sarathi.py", "model.py", "kernels.py"), 1250  # files, and most lines of all
AHEAD = 0  # names that sarathi.py uses more than one section before they are defined
README = {"lines": 150, "words": 1500, "numbers": 160}

def measure(source):
    """(lines, code tokens, code tokens in a line of code): names, operators, numbers and strings,
    no comments and no docstrings"""
    layout = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines = []  # of each token
    previous = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            continue
        is_docstring = token.type == tokenize.STRING and previous in layout
        if token.type not in layout and not is_docstring:
            lines.append(token.start[0])
        previous = token.type
    return len(source.splitlines()), len(lines), len(lines) / max(1, len({*lines}))

def end_of_lesson(lines):
    """Number of the first line of the appendix; none: after the last one"""
    ends = (i for i, line in enumerate(lines, 1) if re.match(r"# (=+ )?appendix", line, re.I))
    return next(ends, len(lines) + 1)

def in_the_rest(lines):
    """Numbers of the lines after "# ---- the rest" of a class"""
    rest = set()
    inside = False
    for i, line in enumerate(lines, 1):
        if re.match(" +# ---- the rest", line):
            inside = True
        elif line and not line.startswith((" ", ")")):
            inside = False
        if inside:
            rest.add(i)
    return rest

def definitions(tree):
    """{name of the module: its line}"""
    defined = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] = node.lineno
        elif isinstance(node, ast.Assign):
            names = [name for target in node.targets for name in ast.walk(target)]
            defined |= {name.id: node.lineno for name in names if isinstance(name, ast.Name)}
    return defined

def names_ahead(source):
    """{name: line} of the uses in the lesson, from class Engine on, of names that a later section
    but the next one defines. Makers (make_..., __post_init__), the rest of a class, annotations and
    names of the appendix do not count: they put the parts together."""
    tree = ast.parse(source)
    lines = source.splitlines()
    heads = [i for i, line in enumerate(lines, 1) if re.match(r"# (----|====)", line)]
    end = end_of_lesson(lines)
    rest = in_the_rest(lines)
    defined = definitions(tree)
    ahead = {}

    def section(line):
        return sum(head <= line for head in heads)

    def visit(node, own):
        children = ast.iter_child_nodes(node)
        if isinstance(node, ast.FunctionDef):
            if node.name.startswith(("make_", "__post_init__")) or node.lineno in rest:
                return
            inner = [*ast.walk(node)]
            own = own | {x.arg for x in ast.walk(node.args) if isinstance(x, ast.arg)}
            own |= {x.id for x in inner
                    if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
            children = node.body
        elif isinstance(node, ast.AnnAssign):
            children = [node.value] if node.value else []
        elif isinstance(node, ast.Name) and node.id not in own:
            first = defined.get(node.id, 0)
            in_lesson = defined["Engine"] <= node.lineno < end > first
            if in_lesson and section(first) > section(node.lineno) + 1:
                ahead.setdefault(node.id, node.lineno)
        for child in children:
            visit(child, own)
    visit(tree, set())
    return ahead

def lesson_lines(source):
    """Lines above the appendix, without the rest of classes, and without headings "(to skip)\""""
    lines = source.splitlines()
    skips = {"section": False, "part": False, "class": False}
    n = 0
    for i, line in enumerate(lines[:end_of_lesson(lines) - 1]):
        if re.match("# -{20,}", line):
            skips = {"section": "(to skip)" in lines[i + 1], "part": False, "class": False}
        elif line.startswith("# ---- "):
            skips |= {"part": "(to skip)" in line, "class": False}
        elif re.match(" +# ---- ", line):
            skips["class"] = "(to skip)" in line or "the rest" in line
        elif line and not line.startswith(" "):
            skips["class"] = False
        n += not any(skips.values())
    return n

def without_evidence(readme, results):
    """Numbers of README's sentences with a decimal point that stand nowhere in results.md"""
    sentences = re.sub(r"```.*?```|^\|.*\|$", "", readme, flags=re.S | re.M)
    numbers = re.findall(r"(?<![\w.])\d+\.\d+(?=[\s,;:).])", sentences)
    known = set(re.findall(r"(?<![\w.])\d+\.\d+", results))
    known |= {"3.10", "3.13"}  # versions
    known |= {"0.53", "0.7", "2.1", "2.7", "0.3", "0.44"}  # capacity.json: test_texts.py
    return [number for number in numbers if number not in known]

def main():
    read = lambda name: Path(name).read_text("utf-8")
    rows = []  # what is counted, its number, its limit
    for name, limits in FILES.items():
        kinds = "lines", "tokens", "tokens a line"
        rows += [(f"{kind} of {name}", number, most)
                 for kind, number, most in zip(kinds, measure(read(name)), limits)]
    files, most = LESSON
    rows.append(("lines of the lesson", sum(lesson_lines(read(name)) for name in files), most))
    ahead = names_ahead(read("sarathi.py"))
    print(f"names of sarathi.py used before their section: {ahead}")
    rows.append(("names ahead", len(ahead), AHEAD))
    readme = read("README.md")
    prose = re.sub(r"```.*?```", "", readme, flags=re.S)
    counts = {"lines": len(readme.splitlines()), "words": len(prose.split()),
              "numbers": len(re.findall(r"(?<![\w.])\d[\d,.]*", readme))}
    rows += [(f"{name} of README", counts[name], most) for name, most in README.items()]
    unknown = without_evidence(readme, read("assets/results.md"))
    print(f"numbers of README that assets/results.md does not have: {unknown}")
    rows.append(("README's numbers without evidence", len(unknown), 0))
    over = False
    for name, number, most in rows:
        is_over = number > most + 0.05 * isinstance(number, float)
        print(f"{name:34} {number:8.5g} of {most:g}{'  over' if is_over else ''}")
        over |= is_over
    raise SystemExit(over)

if __name__ == "__main__":
    main()
