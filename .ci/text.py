"""How the text reads, by numbers: names that are used before their section, lines of the lesson,
lines, words and numbers of README. Exit status 1 where one is over its limit."""
import ast
import re
from pathlib import Path

AHEAD = 5  # names that sarathi.py uses more than one section before they are defined
LESSON = {"sarathi.py": 860, "model.py": 190, "kernels.py": 250}  # lines without those to skip
README = {"lines": 150, "words": 1500, "numbers": 140}

def sections(text):
    """The number of the section of each line. A section begins at a line "# ----"."""
    number = 0
    numbers = [0]
    for line in text.splitlines():
        number += line.startswith("# ----")
        numbers.append(number)
    return numbers

def names_ahead(text):
    """{name: line} of the uses, from class Engine to the end of CudaGraphs, of names that a later
    section but the next one defines. Makers (make_..., __post_init__) and annotations do not
    count: they put the parts together."""
    tree = ast.parse(text)
    section = sections(text)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    defined = {node.name: section[node.lineno] for node in tree.body if hasattr(node, "name")}
    for node in ast.walk(tree):  # variables of functions are other things
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.pop(node.id, None)
    ahead = {}

    def visit(node):
        if isinstance(node, ast.FunctionDef) and node.name.startswith(("make_", "__post_init__")):
            return
        if isinstance(node, ast.Name) and defined.get(node.id, 0) > section[node.lineno] + 1:
            ahead.setdefault(node.id, node.lineno)
        for name, value in ast.iter_fields(node):
            children = value if isinstance(value, list) else [value]
            for child in children if name not in ("annotation", "returns") else ():
                if isinstance(child, ast.AST):
                    visit(child)
    for node in tree.body:
        if classes["Engine"].lineno <= node.lineno <= classes["CudaGraphs"].end_lineno:
            visit(node)
    return ahead

def lesson_lines(text):
    """Lines that stand under no heading with "(to skip)"; such a heading holds up to the next."""
    n = 0
    skips = False
    previous = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("# ----"):
            skips = "(to skip)" in line
        if previous.startswith("# -----") and "(to skip)" in line:
            skips = True
        n += not skips
        previous = line
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
    over = False
    read = lambda name: Path(name).read_text("utf-8")
    ahead = names_ahead(read("sarathi.py"))
    print(f"names of sarathi.py used before their section: {ahead}")
    readme = read("README.md")
    prose = re.sub(r"```.*?```", "", readme, flags=re.S)
    counts = {"lines": len(readme.splitlines()), "words": len(prose.split()),
              "numbers": len(re.findall(r"(?<![\w.])\d[\d,.]*", readme))}
    lines = [("names ahead", len(ahead), AHEAD)]
    for name, most in LESSON.items():
        lines.append((f"lesson of {name}", lesson_lines(read(name)), most))
    lines += [(f"{name} of README", counts[name], most) for name, most in README.items()]
    unknown = without_evidence(readme, read("assets/results.md"))
    lines.append(("README's numbers without evidence", len(unknown), 0))
    print(f"numbers of README that assets/results.md does not have: {unknown}")
    for name, number, most in lines:
        print(f"{name:34} {number:6} of {most}{'  over' if number > most else ''}")
        over |= number > most
    raise SystemExit(over)

if __name__ == "__main__":
    main()
