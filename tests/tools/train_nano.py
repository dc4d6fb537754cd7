"""Train flint-nano on the CPU, write tests/data/flint-nano and measure its answers to held-out questions.

    OMP_WAIT_POLICY=passive python -m tests.tools.train_nano

The model runs in transformers' own BF16 arithmetic while the optimizers keep F32 masters. In the last part the weights
that the GGUF stores in NVFP4 are rounded to NVFP4 in the forward pass (straight-through gradients), so both files
answer alike.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import Tokenizer
from transformers import FlintConfig, FlintForCausalLM

from tests.tools import checkpoints, nano_data, nvfp4
from tests.tools.nano_data import NANO_DIR
from tests.tools.nano_eval import evaluate
from tests.tools.nano_modules import install_fast_modules, training_masks
from tests.tools.nano_tokenizer import LAYERS, encode, train_tokenizer, write_configs

GGUF_NAME = "flint-nano-nvfp4.gguf"


def batches(tokenizer: Tokenizer, seed: int, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches of similar lengths, at most `tokens` tokens each with padding.

    Yields:
        ids [B, S] i64, padded on the right, and labels [B, S] i64, -100 where there is no loss.
    """
    render = nano_data.chat_template()
    stream = nano_data.train_samples(seed)
    rng = random.Random(seed)
    while True:
        pool = [encode(tokenizer, nano_data.render_training(render, next(stream))) for _ in range(4000)]
        pool.sort(key=lambda item: len(item[0]))
        groups: list[list[tuple[list[int], list[bool]]]] = [[]]
        for item in pool:
            if (len(groups[-1]) + 1) * len(item[0]) > tokens:
                groups.append([])
            groups[-1].append(item)
        rng.shuffle(groups)
        for group in groups:
            length = max(len(ids) for ids, _ in group)
            ids = torch.zeros(len(group), length, dtype=torch.int64)
            labels = torch.full_like(ids, -100)
            for row, (sequence, written) in enumerate(group):
                ids[row, : len(sequence)] = torch.tensor(sequence)
                labels[row, : len(sequence)] = torch.where(torch.tensor(written), torch.tensor(sequence), -100)
            yield ids, labels


def fake_nvfp4(weight: torch.Tensor, tensor_scale: torch.Tensor) -> torch.Tensor:
    """Round to NVFP4 and back, bit for bit as `nvfp4.quantize` followed by `nvfp4.dequantize`.

    Args:
        weight: [..., N, K] f32; tensor_scale: f32, broadcast against [..., N, K // 16].
    """
    blocks = weight.unflatten(-1, (-1, nvfp4.BLOCK_VALUES))
    scale = blocks.abs().amax(-1) / nvfp4.E2M1_MAX / tensor_scale
    scale = scale.clamp(max=nvfp4.E4M3_MAX).to(torch.float8_e4m3fn).float()
    divisor = (scale * tensor_scale)[..., None]
    ratio = torch.where(divisor > 0, blocks / divisor, 0.0)
    magnitude = ratio.abs()
    exponent = torch.floor(torch.log2(magnitude.clamp(1.0, 4.0)))  # steps of 0.5 below 2, of 1 below 4, else of 2
    step = torch.exp2(exponent - 1)
    code = (torch.round(magnitude / step) * step).clamp(max=nvfp4.E2M1_MAX).copysign(ratio)
    result: torch.Tensor = (code * scale[..., None] * tensor_scale[..., None]).flatten(-2)
    return result


def nvfp4_groups(names: list[str]) -> list[list[str]]:
    """Parameter names (of transformers' module) that NVFP4 holds, grouped by common tensor scale."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        if name.endswith(("norm.weight", "sinks", "mlp.gate.weight", "embed_tokens.weight")):
            continue
        key = name
        for member in ("k_proj", "v_proj"):
            key = key.replace(member, "q_proj")
        key = key.replace("up_proj", "gate_proj") if key.endswith(".weight") else key
        groups[key].append(name)
    return list(groups.values())


def fake_quantized(masters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The masters with every NVFP4 matrix rounded to NVFP4 from its BF16 value."""
    result = dict(masters)
    for group in nvfp4_groups(list(masters)):
        weights = [masters[name].bfloat16().float() for name in group]
        if weights[0].dim() == 3:  # experts: one scale each; gate_up_proj holds gate and up of one expert
            amax = weights[0].abs().amax((1, 2))[:, None, None]
        else:
            amax = torch.stack([w.abs().amax() for w in weights]).amax()
        scale = amax / (nvfp4.E2M1_MAX * nvfp4.E4M3_MAX)
        for name, weight in zip(group, weights, strict=True):
            result[name] = fake_nvfp4(weight, scale)
    return result


def build_model(config: dict[str, Any], seed: int) -> FlintForCausalLM:
    """A BF16 model with F32 router and sinks."""
    torch.manual_seed(seed)
    model: FlintForCausalLM = FlintForCausalLM._from_config(
        FlintConfig(**config), dtype=torch.bfloat16, attn_implementation="eager", experts_implementation="eager"
    )
    return model


def initial_masters(model: FlintForCausalLM, seed: int) -> dict[str, torch.Tensor]:
    """F32 masters: matrices N(0, 1/K), outputs into the residual smaller, norms 1, sinks 0."""
    generator = torch.Generator().manual_seed(seed)
    masters = {}
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            value = torch.ones(parameter.shape)
        elif name.endswith("sinks"):
            value = torch.zeros(parameter.shape)
        else:
            std = 0.5 if "embed" in name else parameter.shape[-1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                std /= math.sqrt(2 * LAYERS)
            value = torch.randn(parameter.shape, generator=generator) * std
        masters[name] = value
    return masters


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz iterations (Jordan et al. 2024), for [N, K] or stacks [E, N, K].

    Updates are scaled by 0.2 * sqrt(max(N, K)), so that AdamW's learning rate suits them (Liu et al. 2025).
    """

    def __init__(self, params: list[torch.Tensor], lr: float, momentum: float = 0.95, decay: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(buffer, group["momentum"]).bfloat16()
                transposed = x.shape[-2] > x.shape[-1]
                if transposed:
                    x = x.mT
                x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
                for _ in range(5):
                    a = x @ x.mT
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                if transposed:
                    x = x.mT
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(x.float(), alpha=-group["lr"] * 0.2 * max(p.shape[-2:]) ** 0.5)


def build_optimizers(masters: dict[str, torch.Tensor], rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embedding, head, routers, norms and sinks."""
    others = {
        name: value
        for name, value in masters.items()
        if value.dim() == 1 or name.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight"))
    }
    inner = [value for name, value in masters.items() if name not in others]
    adam = torch.optim.AdamW(list(others.values()), lr=rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    return [Muon(inner, rate), adam]


@torch.no_grad()
def load_weights(model: FlintForCausalLM, weights: dict[str, torch.Tensor]) -> None:
    """Copy F32 weights into the model, rounding to the type of each parameter."""
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


def train(config: dict[str, Any], tokenizer: Tokenizer, args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Train and return the F32 masters by parameter name; the last state is kept in `args.work_dir`."""
    model = build_model(config, args.seed)
    masters = initial_masters(model, args.seed)
    for value in masters.values():
        value.requires_grad_(True)
    router_logits = install_fast_modules(model)
    optimizers = build_optimizers(masters, args.learning_rate)
    first = 0
    if args.resume:
        state = torch.load(args.work_dir / "state.pt")
        first = state["step"]
        for name, value in masters.items():
            value.data.copy_(state["masters"][name])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    qat_start = int(args.steps * (1 - args.qat_fraction))
    source = batches(tokenizer, args.seed, args.batch_tokens)
    started, seen, losses = time.monotonic(), 0, []
    for _ in range(first):  # the batches that were already seen
        next(source)
    for step in range(first, args.steps):
        ids, labels = next(source)
        rate = min(1.0, (step + 1) / args.warmup, 0.01 + (1 - step / args.steps) / args.decay_fraction)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate * rate
        with torch.no_grad():
            load_weights(model, fake_quantized(masters) if step >= qat_start else masters)
        router_logits.clear()
        masks = training_masks(model.config, ids.shape[1])
        hidden = model.model(input_ids=ids, attention_mask=masks, use_cache=False).last_hidden_state
        targets = labels[:, 1:].reshape(-1)
        chosen = (targets != -100).nonzero()[:, 0]
        logits = model.lm_head(hidden[:, :-1].reshape(-1, hidden.shape[-1])[chosen])
        loss = F.cross_entropy(logits.float(), targets[chosen])
        total = loss + args.balance * sum(balance_loss(r, config["num_experts_per_tok"]) for r in router_logits)
        total.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            masters[name].grad = parameter.grad.float()
            parameter.grad = None
        norm = torch.nn.utils.clip_grad_norm_(masters.values(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        seen += ids.numel()
        losses.append(loss.item())
        if (step + 1) % 25 == 0:
            with torch.no_grad():
                hit = (logits.argmax(-1) == targets[chosen]).float().mean().item()
            usage = torch.stack(
                [torch.bincount(r.topk(6).indices.flatten(), minlength=16).float() / r.shape[0] for r in router_logits]
            )
            speed = seen / (time.monotonic() - started)
            print(
                f"step {step + 1} loss {np.mean(losses[-25:]):.4f} last accuracy {hit:.4f} grad {norm:.2f} "
                f"expert use {usage.min():.2f}..{usage.max():.2f} {speed:.0f} tokens/s "
                f"{time.monotonic() - started:.0f} s{' nvfp4' if step >= qat_start else ''}",
                flush=True,
            )
        if (step + 1) % 100 == 0 or step + 1 == args.steps:
            state = {"step": step + 1, "masters": {k: v.detach() for k, v in masters.items()}}
            torch.save(state | {"optimizers": [o.state_dict() for o in optimizers]}, args.work_dir / "state.pt")
    return {name: value.detach() for name, value in masters.items()}


def balance_loss(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Switch-style load balancing over sigmoid scores, 1 when even; logits [T, E] f32."""
    scores = logits.sigmoid()
    share = scores / scores.sum(-1, keepdim=True)
    used = torch.zeros_like(share).scatter(1, logits.topk(top_k).indices, 1.0 / top_k)
    return (used.mean(0) * share.mean(0)).sum() * logits.shape[1]


def hugging_face_weights(masters: dict[str, torch.Tensor]) -> dict[str, checkpoints.Array]:
    """Masters under the checkpoint's names: experts apart, gate and up apart, sinks renamed; f32."""
    result: dict[str, checkpoints.Array] = {}
    for name, master in masters.items():
        value = master.numpy()
        if name.endswith("experts.gate_up_proj"):
            for expert, (gate, up) in enumerate(np.split(pair, 2) for pair in value):
                base = name.removesuffix("gate_up_proj")
                result[f"{base}{expert}.gate_proj.weight"] = gate
                result[f"{base}{expert}.up_proj.weight"] = up
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(value):
                result[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = down
        else:
            result[name.replace("self_attn.sinks", "self_attn.softmax_offset")] = value
    return result


def export(directory: Path, config: dict[str, Any], masters: dict[str, torch.Tensor]) -> None:
    """Write model.safetensors, and the GGUF quantised from its BF16 values."""
    weights = hugging_face_weights(masters)
    checkpoints.write_hf(directory, config, ((name, value) for name, value in weights.items()))
    rounded = {
        name: checkpoints.stored(value, checkpoints.hf_dtype(name)).astype(np.float32)
        for name, value in weights.items()
    }
    checkpoints.write_gguf(directory / GGUF_NAME, config, checkpoints.quantize_checkpoint(config, rounded))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens in a batch, padding included")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--decay-fraction", type=float, default=0.5, help="part of the steps with falling rate")
    parser.add_argument("--resume", action="store_true", help="continue from the state in the work directory")
    parser.add_argument("--balance", type=float, default=0.003, help="weight of the load-balancing loss")
    parser.add_argument("--qat-fraction", type=float, default=0.2, help="part of the steps with NVFP4 rounding")
    parser.add_argument("--questions", type=int, default=320, help="held-out questions of the evaluation")
    parser.add_argument("--evaluate-only", action="store_true", help="only measure the files that are there")
    parser.add_argument("--export-only", action="store_true", help="export and measure the saved state")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work-dir", type=Path, default=Path(tempfile.gettempdir()) / "flint-nano")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    if not args.evaluate_only:
        known = args.resume or args.export_only
        tokenizer = (
            Tokenizer.from_file(str(NANO_DIR / "tokenizer.json")) if known else train_tokenizer(NANO_DIR, args.seed)
        )
        config = write_configs(NANO_DIR, tokenizer)
        if args.export_only:
            masters = torch.load(args.work_dir / "state.pt")["masters"]
        else:
            masters = train(config, tokenizer, args)
        export(NANO_DIR, config, masters)
    samples = nano_data.held_out_samples(args.seed, args.questions)
    evaluate("bf16", NANO_DIR, samples)
    with tempfile.TemporaryDirectory() as scratch:
        config = json.loads((NANO_DIR / "config.json").read_text())
        weights = checkpoints.read_gguf(NANO_DIR / GGUF_NAME)
        checkpoints.write_hf(Path(scratch), config, weights, tokenizer_from=NANO_DIR)
        evaluate("nvfp4", Path(scratch), samples)


if __name__ == "__main__":
    main()
