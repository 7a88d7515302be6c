"""transformers' generate(), and PEFT's mixed batches, next to this engine, on this machine.

    python .ci/peers.py --model llama-124m    with the flags of bench.py
"""
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import bench
from bench import Row, experiment, timed
from kernels import torch_dtype
from model import Adapter
from sarathi import Engine, run_command_line

import numpy as np
import torch

@experiment("", "tokens/s of prompts of 256 and outputs of 32, all counted", only="measured",
            points="series")
def peers(place):
    """transformers' generate(), and PEFT's mixed batch of adapters, next to this engine. All feed
    the prompts together."""
    import peft
    import transformers
    transformers.utils.logging.set_verbosity_error()
    model = place.model
    P = 256
    D = 32
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        dtype = torch_dtype(model.weights["embedding.weight"])
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        theirs = theirs.to(model.device).eval()
        for B, adapters in ((1, None), (8, None), (8, 4 * ["a", "b"])):
            engine = Engine(model, "prefill_first", max_batch=B, n_page=B * (P + D) + 1000)
            prompts = torch.zeros(B, P, dtype=torch.int64, device=model.device)
            options = dict(attention_mask=torch.ones_like(prompts), max_new_tokens=D,
                           min_new_tokens=D, do_sample=False, pad_token_id=0)
            peer = "transformers"
            if adapters:
                peer = "PEFT"
                for name in ("a", "b"):
                    adapter = Adapter.random(model.config, 16, ord(name), model.dtype)
                    adapter.save_pretrained(f"{folder}/{name}")
                    engine.add_adapter(name, adapter)
                theirs = peft.PeftModel.from_pretrained(theirs, f"{folder}/a", "a")
                theirs.load_adapter(f"{folder}/b", "b")
                theirs.to(dtype).eval()
                options["adapter_names"] = adapters
            engine.warm()
            ours = timed(engine.generate, prompts.tolist(), D, adapters)
            other = timed(theirs.generate, input_ids=prompts, **options)
            for name, seconds in zip(("sarathi", "the other"), place.rounds(ours, other)):
                yield Row(f"{peer}, B = {B}", B * (P + D) / np.array(seconds), name)

if __name__ == "__main__":
    run_command_line(partial(bench.main, ["peers", *sys.argv[1:]]))
