"""A peer without a model, run as a script: speaks through peer_vllm.py's loop, prints, fails and dawdles on demand."""

import importlib.util
import sys
import time
from pathlib import Path

spec = importlib.util.spec_from_file_location("peer_vllm", Path(__file__).parents[2] / "batchgen/bench/peer_vllm.py")
peer_vllm = importlib.util.module_from_spec(spec)
spec.loader.exec_module(peer_vllm)


class FakeSystem:
    def __init__(self, model):
        print("loading", model)
        if model == "absent":
            raise ValueError("no such model")
        self.runs = 0

    def calibrate(self, prompts, max_tokens, num_tokens):
        return f"room for {num_tokens} tokens"

    def run(self, prompts, max_tokens, num_tokens):
        print("running")
        if max_tokens == 13:
            raise RuntimeError("unlucky")
        if max_tokens == 60:
            time.sleep(60)
        self.runs += 1
        tokens = [[sum(p)] * max_tokens for p in prompts]
        return {"seconds": 1.0, "tokens": tokens, "num_prefill": sum(map(len, prompts)), "facts": {"runs": self.runs}}


if __name__ == "__main__":
    assert "batchgen" not in sys.modules
    peer_vllm.serve(FakeSystem)
