"""What k of n samples of a prompt are worth: the best, the worst, the one that most agree on. Pure Python."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Sequence

# Up to so many subsets of samples are gone through one by one; of more, so many are drawn.
SUBSETS = 2000


def best_at_k(scores: Sequence[float], k: int) -> float:
    """Expected best score of k samples out of these n, drawn without replacement: exact, and unbiased for fresh samples.

    With scores of 0 and 1 this is pass@k, 1 - C(n - c, k) / C(n, k) for c right ones (Chen et al. 2021, arXiv
    2107.03374).

    >>> best_at_k([0, 0, 1, 0], 1), best_at_k([0, 0, 1, 0], 2), best_at_k([1, 2, 4], 2)
    (0.25, 0.5, 3.3333333333333335)
    """
    if not 1 <= k <= len(scores):
        raise ValueError(f"best_at_k: k={k} of {len(scores)} samples")
    # The i-th smallest is the best of C(i, k - 1) subsets: those that take the others from below it.
    ordered = sorted(scores)
    return sum(score * math.comb(i, k - 1) for i, score in enumerate(ordered)) / math.comb(len(ordered), k)


def worst_at_k(scores: Sequence[float], k: int) -> float:
    """Expected worst score of k samples, as `best_at_k`.

    >>> worst_at_k([1, 2, 4], 2)
    1.3333333333333333
    """
    return -best_at_k([-score for score in scores], k)


def majority_at_k(answers: Sequence[str | None], scores: Sequence[float], k: int) -> float:
    """Expected score of the answer that most of k samples give, over subsets of k out of n.

    answers: None where a sample gives none; it has no vote. The score of an answer is the mean of those who gave it; of
    several that are equally frequent, their mean; 0 where nobody has a vote. Exact up to 2,000 subsets, else the mean over 2,000 that
    are drawn, always the same.

    >>> majority_at_k(["7", "7", "8"], [1, 1, 0], 3), majority_at_k(["7", None, "8"], [1, 0, 0], 2)
    (1.0, 0.5)
    """
    n = len(answers)
    if not 1 <= k <= n:
        raise ValueError(f"majority_at_k: k={k} of {n} samples")
    if math.comb(n, k) <= SUBSETS:
        subsets = list(itertools.combinations(range(n), k))
    else:
        rng = random.Random(0)
        subsets = [tuple(rng.sample(range(n), k)) for _ in range(SUBSETS)]
    return sum(_majority([(answers[i], scores[i]) for i in subset]) for subset in subsets) / len(subsets)


def _majority(votes: list[tuple[str | None, float]]) -> float:
    by_answer: dict[str, list[float]] = defaultdict(list)
    for answer, score in votes:
        if answer is not None:
            by_answer[answer].append(score)
    most = max(map(len, by_answer.values()), default=0)
    winners = [sum(s) / len(s) for s in by_answer.values() if len(s) == most]
    return sum(winners) / len(winners) if winners else 0.0


def sizes(n: int) -> list[int]:
    """The k that are reported for n samples: powers of two below n, and n.

    >>> sizes(1), sizes(2), sizes(6), sizes(8)
    ([], [2], [2, 4, 6], [2, 4, 8])
    """
    return [2**i for i in range(1, n.bit_length()) if 2**i < n] + ([n] if n > 1 else [])


def summary(
    scores: Sequence[Sequence[float]], answers: Sequence[Sequence[str | None]] | None = None
) -> dict[str, float]:
    """Means over prompts of best@k, worst@k and (with answers) maj@k, for the k of `sizes`.

    scores, answers: of each prompt's samples. Prompts with fewer than k samples are left out of that k.

    >>> summary([[0, 1], [0, 0]], [["7", "8"], ["9", "9"]])
    {'best@2/mean': 0.5, 'worst@2/mean': 0.0, 'maj@2/mean': 0.25}
    """
    out: dict[str, float] = {}
    for k in sizes(max(map(len, scores), default=0)):
        groups = [i for i, group in enumerate(scores) if len(group) >= k]
        values = {
            "best": [best_at_k(scores[i], k) for i in groups],
            "worst": [worst_at_k(scores[i], k) for i in groups],
            "maj": [majority_at_k(answers[i], scores[i], k) for i in groups] if answers is not None else [],
        }
        out |= {f"{name}@{k}/mean": sum(column) / len(column) for name, column in values.items() if column}
    return out
