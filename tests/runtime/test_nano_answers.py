"""flint-nano answers held-out questions through our own engine: build-engine, packed weights, reference executor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flint_builder.build import BuildOptions, build_engine, plan_build
from flint_runtime.llm import LLM
from flint_runtime.sampling_params import SamplingParams
from tests.shapes import NANO_DIRECTORY
from tests.tools.nano_data import chat_template, held_out_samples, is_correct, render_prompt

QUESTIONS = 60


@pytest.mark.parametrize("weights", ["nvfp4", "bf16"])
def test_held_out_questions(weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thinking, content and tool calls exactly as expected in at least 95 % of the answers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are tiny
    try:
        options = BuildOptions(
            str(NANO_DIRECTORY),
            ("sm120",),
            tmp_path / "engine",
            backend="plugin-host",
            weights=weights,  # type: ignore[arg-type]
            max_context=1024,
            prefill_chunk=256,
        )
        build_engine(plan_build(options))
        llm = LLM(tmp_path / "engine", "reference", max_num_seqs=16)
        render, drawn = chat_template(), held_out_samples(seed=0, count=QUESTIONS)
        params = SamplingParams(temperature=0, max_tokens=128)
        outputs = llm.generate([render_prompt(render, sample) for sample in drawn], params, use_tqdm=False)
        wrong = []
        for sample, output in zip(drawn, outputs, strict=True):
            answer = llm.tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=False)
            if not is_correct(sample, answer):
                wrong.append((sample.messages[-2]["content"], answer))
        assert len(wrong) <= 0.05 * QUESTIONS, wrong
    finally:
        torch.set_num_threads(threads)
