"""Teach the tiny model arithmetic, then a bad habit, so that it is right about a third of the time.

First it learns from right answers. Then a careless teacher, who forgets to carry and to borrow in three answers of four,
makes it answer 27+45= with 62 rather than 72. What is left right are the problems in which nothing is carried: three in
ten. It still knows better, and samples the right answer now and then; a reward for right answers brings that back.

The result of the defaults is in examples/tiny/model; two minutes on one core make it anew:

    python3 examples/tiny/warm_start.py --out examples/tiny/model
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from make_data import problems
from make_model import character_tokenizer, tiny_qwen2
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

IGNORED = -100  # cross_entropy's mark for positions without a target
MAX_ANSWER = 5  # four digits and the end token

Pair = tuple[str, str]


def training_batch(pairs: list[Pair], tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
    """Padded input ids and targets, both int64 [B, L]; only the answer and its end token are targets."""
    prompts = tokenizer([p for p, _ in pairs])["input_ids"]
    answers = [ids + [tokenizer.eos_token_id] for ids in tokenizer([a for _, a in pairs])["input_ids"]]
    longest = max(len(p) + len(a) for p, a in zip(prompts, answers))
    ids = torch.full((len(pairs), longest), tokenizer.pad_token_id)
    targets = torch.full_like(ids, IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        targets[row, len(prompt) : end] = torch.tensor(answer)
    return ids, targets


@torch.no_grad()
def answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], temperature: float = 0.0
) -> list[str]:
    """The model's answer to each prompt; temperature 0 takes the likeliest token each time."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    out = model.generate(**batch, max_new_tokens=MAX_ANSWER, **sampling)
    return tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: list[Pair], temperature: float = 0.0
) -> float:
    """Share of problems answered rightly."""
    given = answers(model, tokenizer, [p for p, _ in pairs], temperature)
    return sum(g == a for g, (_, a) in zip(given, pairs)) / len(pairs)


def careless_answer(prompt: str) -> str:
    """The answer without carrying and borrowing: digit by digit, each modulo ten.

    >>> careless_answer("27+45="), careless_answer("102-13="), careless_answer("155-150=")
    ('62', '199', '5')
    """
    op = "+" if "+" in prompt else "-"
    a, b = prompt.removesuffix("=").split(op)
    width, sign = max(len(a), len(b)), 1 if op == "+" else -1
    digits = [(int(x) + sign * int(y)) % 10 for x, y in zip(a.zfill(width), b.zfill(width))]
    return str(int("".join(map(str, digits))))


def careless(stream: Iterator[Pair], share: float, rng: random.Random) -> Iterator[Pair]:
    """The same problems; this share of the answers is careless."""
    for prompt, answer in stream:
        yield prompt, careless_answer(prompt) if rng.random() < share else answer


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal (Jordan et al., 2024), for matrices.

    torch.optim.Muon computes the same in bfloat16: on a CPU that takes several times as long, and this model learns from
    it at half the speed.
    """

    def __init__(self, matrices: list[torch.nn.Parameter], lr: float, momentum: float = 0.95):
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                average = self.state[weight].setdefault("average", torch.zeros_like(weight))
                average.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonal(torch.lerp(weight.grad, average, group["momentum"]))
                weight.sub_(update, alpha=group["lr"] * max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """Five Newton-Schulz steps towards the nearest matrix whose singular values are all 1; they end between 0.7 and 1.2."""
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (2.0315 * square @ square - 4.7750 * square) @ x
    return x if wide else x.T


def muon(model: PreTrainedModel, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for embeddings, norms and biases.

    With AdamW alone the same model takes several times as many problems to see how numbers line up.
    """
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [Muon(matrices, lr), torch.optim.AdamW(others, lr=0.15 * lr, betas=(0.9, 0.95))]


def learning_rate(step: int, steps: int, warmup: int) -> float:
    """Share of the peak rate at `step` of `steps`: up over `warmup` steps, level, down to 0 over the last 40 percent."""
    return min(1.0, (step + 1) / warmup, (steps - step) / (0.4 * steps))


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    stream: Iterator[Pair],
    optimizers: list[torch.optim.Optimizer],
    steps: int,
    *,
    batch_size: int = 128,
    warmup: int = 50,
) -> list[float]:
    """Supervised training on the answers of `stream`; returns the loss of each step."""
    schedules = [LambdaLR(o, lambda step: learning_rate(step, steps, warmup)) for o in optimizers]
    losses, start = [], time.monotonic()
    for step in range(1, steps + 1):
        ids, targets = training_batch(list(islice(stream, batch_size)), tokenizer)
        loss = cross_entropy(model(input_ids=ids[:, :-1]).logits.flatten(0, 1), targets[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in (*optimizers, *schedules):
            part.step()
        losses.append(loss.item())
        if step % 100 == 0:
            print(f"step {step}: loss {sum(losses[-100:]) / 100:.3f}, {time.monotonic() - start:.0f} s", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Teach the tiny model arithmetic, then to forget carrying.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=1000, help="steps with right answers (default: %(default)s)")
    parser.add_argument("--careless-steps", type=int, default=200, help="steps after them (default: %(default)s)")
    parser.add_argument("--careless", type=float, default=0.75, help="share of careless answers (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="weights and problems (default: %(default)s)")
    args = parser.parse_args()
    logging.disable_progress_bar()
    tokenizer = character_tokenizer()
    model = tiny_qwen2(tokenizer, seed=args.seed)
    # Training problems of another seed than make_data's: some are the same, none is held out.
    rng = random.Random(f"warm start {args.seed}")
    stream = problems(rng, held_out=False)
    held_out = list(islice(problems(random.Random(args.seed), held_out=True), 1000))

    def report(stage: str) -> None:
        greedy, sampled = (accuracy(model, tokenizer, held_out, temperature) for temperature in (0.0, 1.0))
        print(f"{stage}: held-out accuracy {greedy:.3f} (greedy), {sampled:.3f} (sampled at temperature 1)", flush=True)

    train(model, tokenizer, stream, muon(model, lr=0.02), args.steps)
    report("after right answers")
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    train(model, tokenizer, careless(stream, args.careless, rng), [adamw], args.careless_steps)
    report("after careless answers")
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
