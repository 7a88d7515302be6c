"""Autopilot against 30 fixed settings, simulated.

    python .ci/autopilot.py    with the flags of bench.py
"""
import sys
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median

sys.path.append(str(Path(__file__).parents[1]))

import bench
from bench import Hardware, Row, at_rate, experiment, small_model
from sarathi import Autopilot, SarathiServe, run_command_line

import numpy as np

# prompt, output (give or take a half), load, acceptance, TPOT target over a decode's time
WORKLOADS = """
256 256 0.2 0.8 0, 256 256 0.8 0.3 2, 256 256 1.2 0.8 0, 512 100 0.5 0.3 0, 1024 128 0.2 0.3 2,
1024 128 0.8 0.8 2, 1024 128 1.2 0.3 0, 1300 40 0.8 0.8 0, 1300 26 0.5 0.8 2, 1300 26 1.0 0.3 1.5,
1300 13 1.2 0.8 0, 1300 7 0.2 0.3 0, 1300 7 0.8 0.8 2, 1300 7 1.2 0.3 2
""".split(",")

@experiment("", "latency over the best setting's", Hardware("llama-13b", "a100"), "simulated",
            points="")
def autopilot(place):
    """Autopilot against 30 fixed settings of chunk size and drafts: its mean latency over that of
    the best one that meets the TPOT target. A workload is prompt, output, load, acceptance and
    target."""
    draft = small_model(place)
    workloads = WORKLOADS
    chunks = (64, 128, 256, 512, 1024, 2048)
    settings = list(product(chunks, ("off", 1, 3, 5, 7)))
    n = 160
    if not place.full:
        workloads = workloads[1:4:2]
        settings = settings[5::12]
        n = 20
    ratios = []
    missed = 0
    for workload in workloads:
        P, D, load, alpha, slow = map(float, workload.split())
        prompt = (P // 2, P * 3 // 2)
        jobs = place.jobs(1, n, prompt=prompt, output=(D // 2, D * 3 // 2))
        capacity = place.serve(at_rate(jobs), 48, alloc="grow").requests_per_second
        jobs = at_rate(jobs, load * capacity)
        run = partial(place.serve, jobs, 48, alloc="grow", draft=draft, alpha=alpha)
        target = slow * place.model.time(1, P + D / 2)
        ours = run(scheduler=Autopilot(target), spec="goodput")
        others = [run(scheduler=SarathiServe(chunk), spec=spec) for chunk, spec in settings]
        fixed = [fmean(other.latencies) for other in others if meets(other, target)]
        if fixed:
            ratios.append(fmean(ours.latencies) / min(fixed))
            yield Row("latency over the best", ratios[-1], workload.strip())
            missed += not meets(ours, target)
    yield Row("all workloads", fmean(ratios), "mean")
    yield Row("all workloads", median(ratios), "median")
    yield Row("all workloads", max(ratios), "worst")
    yield Row("all workloads", missed, "targets missed")

def meets(run, target):
    """Whether nine of ten requests had this TPOT, if there is a target."""
    return not target or np.quantile(run.tpots, 0.9) <= target

if __name__ == "__main__":
    run_command_line(partial(bench.main, ["autopilot", *sys.argv[1:]]))
