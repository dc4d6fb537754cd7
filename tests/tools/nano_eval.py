"""Greedy answers of a flint-nano checkpoint to held-out questions, in transformers' BF16."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import torch
from transformers import AutoTokenizer, FlintForCausalLM

from tests.tools.nano_data import Sample, chat_template, is_correct, render_prompt

MAX_NEW_TOKENS = 128


@torch.no_grad()
def answers(directory: Path, samples: list[Sample], batch_size: int = 64) -> list[str]:
    """Greedy continuations of the prompts of `samples`, special tokens included, cut after the first EOS."""
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model = FlintForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    eos = set(model.config.eos_token_id)
    render = chat_template()
    prompts = [render_prompt(render, drawn) for drawn in samples]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    result = [""] * len(prompts)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        inputs = tokenizer([prompts[i] for i in chosen], return_tensors="pt", padding=True, add_special_tokens=False)
        output = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        for i, row in zip(chosen, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            end = next((n + 1 for n, token in enumerate(row) if token in eos), len(row))
            result[i] = str(tokenizer.decode(row[:end], skip_special_tokens=False))
    return result


def evaluate(label: str, directory: Path, samples: list[Sample], failures_shown: int = 12) -> float:
    """Print accuracy by kind, and the first failures; return the overall accuracy."""
    scores: dict[str, list[bool]] = defaultdict(list)
    shown = 0
    for drawn, answer in zip(samples, answers(directory, samples), strict=True):
        good = is_correct(drawn, answer)
        scores[f"{drawn.kind}{'' if drawn.thinking else ' (no thinking)'}"].append(good)
        if not good and shown < failures_shown:
            shown += 1
            question = [m["content"] for m in drawn.messages[:-1] if m["role"] in ("user", "tool")][-3:]
            print(f"{label} failure: {drawn.kind} {question} -> {answer!r}")
    for kind in sorted(scores):
        print(f"{label} {kind}: {sum(scores[kind])}/{len(scores[kind])}")
    right, total = sum(map(sum, scores.values())), sum(map(len, scores.values()))
    print(f"{label} all: {right}/{total} = {right / total:.4f}", flush=True)
    return right / total
