"""How near this machine's iterations come to its ceilings.

    python .ci/roofline.py --model llama-7b    with the flags of bench.py
"""
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parents[1]))

import bench
from bench import Row, experiment, made_up_feeds, measure_ceilings, wait_for_gpu
from sarathi import run_command_line

import numpy as np

@experiment("tokens or requests, n", only="measured")
def roofline(place):
    """How near iterations come to this machine's ceilings: the seconds that the FLOPs of linear
    operators, or the bytes of weights and cache, would take there, over the measured ones. And the
    host's time for an iteration. First see this on a new GPU, then users and table4."""
    model = place.model
    L = place.lengths[0]
    ceilings = measure_ceilings(place)
    for n in (32, 128, 512, 2048):
        if n < min(model.config.block_size, place.room):
            reached = share_of_ceiling(place, ceilings, chunk=n)
            yield Row("share of the ceiling", reached, "prefill", n)
    for n in (1, 4, 16, 32):
        if n * L >= place.room:
            continue
        reached = share_of_ceiling(place, ceilings, decodes=n, context=L - 1)
        yield Row("share of the ceiling", reached, "decode", n)
        feeds, engine = made_up_feeds(model, decodes=n, context=L - 1)
        seconds = []
        for _ in range(9):
            wait_for_gpu()
            start = time.perf_counter()
            engine.runner.forward(feeds)
            seconds.append(time.perf_counter() - start)
        yield Row("host (ms)", 1e3 * median(seconds), "decode", n)

def share_of_ceiling(place, ceilings, decodes=0, context=0, chunk=0):
    """The share of these ceilings (FLOP/s, bytes/s) that an iteration reaches."""
    flops, bandwidth = ceilings
    c = place.model.config
    itemsize = place.model.dtype.itemsize
    sizes = [op.n_in * op.n_out for op in c.operators.values()]
    layers = c.n_layer * sum(sizes)
    head = c.vocab_size * c.n_embd
    n_tokens = decodes + chunk
    computing = 2 * (n_tokens * layers + max(decodes, 1) * head) / flops
    weights = (layers + head) * itemsize
    cache = (decodes * context + chunk) * c.page_bytes(itemsize)
    reading = (weights + cache) / bandwidth
    seconds = place.seconds(dict(decodes=decodes, context=context, chunk=chunk))
    return max(computing, reading) / np.median(seconds)

if __name__ == "__main__":
    run_command_line(partial(bench.main, ["roofline", *sys.argv[1:]]))
