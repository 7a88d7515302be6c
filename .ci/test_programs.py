"""The maintainers' experiments run, at their smallest."""
import math

import autopilot
import peers
import roofline
from bench import EXPERIMENTS
from test_sarathi import each, simulated, tiny_place

import pytest

@each("program", [peers, roofline])
def test_experiment_measures(program):
    if program is peers:
        pytest.importorskip("peft")
    rows = list(EXPERIMENTS[program.__name__].rows(tiny_place()))
    assert rows and all(math.isfinite(row["ours"]) for row in rows)
    assert {row["source"] for row in rows} == {"measured"}

def test_autopilot_is_near_the_best_setting():
    place = simulated("autopilot")
    rows = list(autopilot.autopilot(place))
    ratios = [row.ours for row in rows if row.panel == "latency over the best"]
    assert len(ratios) == 2 and all(0.5 < ratio < 1.1 for ratio in ratios)
