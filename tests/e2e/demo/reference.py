"""Greedy tokens by transformers' DynamicCache and sdpa, fp32, one thread: what "exact" is compared with."""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch

from tests.engine.smollm2 import load_smollm2


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new-tokens", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    prompts = json.loads(sys.stdin.readline())["prompts"]
    model, tokenizer = load_smollm2()
    rows = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        step, cache, tokens = ids, None, []
        while len(tokens) < options.new_tokens:
            out = model(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            tokens.append(int(out.logits[0, -1].argmax()))
            step = torch.tensor([[tokens[-1]]])
        rows.append(tokens)
    print(json.dumps({"event": "reference", "tokens": rows, "t": time.time()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
