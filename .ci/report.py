"""Writes assets/results.md, with all that the JSON files in assets/ hold, and README's pictures.

    python .ci/report.py
"""
import json
import math
import re
import sys
from collections import defaultdict
from importlib import import_module
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from bench import (ASSETS, CLAIMS, EXPERIMENTS, count_runs, draw, misses, parse_arguments,
                   save_figure, save_picture, simulate, tables, title_of)
from sarathi import run_command_line, table

PROGRAMS = "autopilot", "peers", "roofline"  # experiments with a file of their own in .ci/
for program in PROGRAMS:
    import_module(program)

SECTIONS = ("What users feel", "SARATHI", "S-LoRA", "SmartSpec", "TNG", "On a CPU", "On an H200",
            "Research", "Peers")
SECTION_OF = {"users": "What users feel", "peers": "Peers"}
ABOUT_RESULTS = """# Results

Written by `python .ci/report.py` from the JSON files in this folder. ± is the spread of rounds, or
of seeds if simulated; (noise): it is more than a quarter of the value. (off): a value is more than
15 % from the paper's, a gain more than 30 % of what it gains, or a bound does not hold. Below the
table stands why, as far as we know.
"""

def main():
    args = parse_arguments(["--plot", str(ASSETS)])
    place = simulate(args, EXPERIMENTS["timeline"].on)
    place.rows = [*EXPERIMENTS["timeline"].rows(place)]
    save_picture(place, "timeline", ASSETS / "timeline.png")

    results = read_results()
    sections = {section: defaultdict(list) for section in SECTIONS}  # -> heading -> paragraphs
    # experiments without claims, those with claims, tables that are of no experiment
    order = {name: i for i, name in enumerate([*EXPERIMENTS, *CLAIMS])}
    for name, machine, date in sorted(results, key=lambda at: order.get(at[0], math.inf)):
        section, heading = heading_of(name, machine)
        texts = sections[section][heading]
        if not texts and name in EXPERIMENTS:
            program = f".ci/{name}.py" if name in PROGRAMS else f"bench.py {name}"
            texts.append(f"`{program}`: {EXPERIMENTS[name].about}")
        texts += texts_of(name, machine, *results[name, machine, date])
    contents = []
    page = []
    for section, headings in sections.items():
        page.append(f"## {section}")
        links = []
        for heading, texts in headings.items():
            page += [f"### {section}: {heading}", *texts]
            anchor = re.sub(r"[^\w -]", "", f"{section} {heading}".lower()).replace(" ", "-")
            links.append(f"[{heading}](#{anchor})")
        contents.append(f"- {section}: {', '.join(links)}")
    claimed = [row for *_, rows in results.values() for row in rows
               if "inside" in row and row["source"] == "simulated"]
    page = [ABOUT_RESULTS, *contents, "\nThe papers' numbers that hold, simulated:\n",
            *count_runs(claimed), "", "\n\n".join(page), ""]
    (ASSETS / "results.md").write_text("\n".join(page), encoding="utf8")

def read_results():
    """{(experiment or name of a table, machine, date): (path, facts, rows)} of the JSON files in
    assets/. If a file has the name of a simulated experiment, its rows replace those of others."""
    results = {}
    for path in sorted(ASSETS.glob("*.json"), key=lambda path: (path.stem in EXPERIMENTS, path)):
        parts = json.loads(path.read_text("utf8"))
        for part in parts if isinstance(parts, list) else [parts]:
            facts = f"{part['date']}, commit {part['commit']}"
            found = {}
            for row in part["rows"]:
                own = part | row
                date = "" if "simulated" in own["machine"] else facts
                at = own["experiment"], own["machine"], date
                found.setdefault(at, (path, facts, []))[-1].append(row)
            results |= found
    return results

def heading_of(name, machine):
    """(section, heading) in results.md"""
    if "h200" in machine.lower():
        return "On an H200", name
    if name in SECTION_OF:
        return SECTION_OF[name], name
    if "simulated" not in machine:
        return "On a CPU", name
    cited = re.match(r"\[([\w-]+) ?(.*?)\]", EXPERIMENTS[name].about)
    return (cited[1], cited[2] or name) if cited else ("Research", name)

def texts_of(name, machine, path, facts, rows):
    """Paragraphs of Markdown. Of many points the paper's are shown, and the curves folded. With a
    picture, if the file has the experiment's name."""
    yield f"**{machine}** ([JSON]({path.name}), {facts})"
    if name not in EXPERIMENTS:
        yield table([*rows[0]], [row.values() for row in rows])
        return
    what = EXPERIMENTS[name]
    if path.stem == name:
        save_figure(draw(rows, what), f"{title_of(name)} {machine}", path.with_suffix(".png"))
        yield f"![{name}]({name}.png)"
    claimed = [row for row in rows if row["paper"] is not None]
    is_long = 0 < 3 * len(claimed) < len(rows)
    yield tables(what, claimed if is_long else rows)
    yield from misses(rows)
    if is_long:
        curves = [row for row in rows if row["at"][2] != ""]
        yield f"<details><summary>Points</summary>\n\n{tables(what, curves)}\n\n</details>"

if __name__ == "__main__":
    run_command_line(main)
