"""Best, worst and majority of k of n samples, against going through all subsets."""

import itertools
import math
import random
import statistics

import pytest

from verl.rewards.at_k import SUBSETS, best_at_k, majority_at_k, sizes, summary, worst_at_k


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_best_and_worst_are_means_over_all_subsets(k):
    scores = [0.5, 0.0, 2.0, 2.0, -1.0]
    subsets = list(itertools.combinations(scores, k))
    assert best_at_k(scores, k) == pytest.approx(statistics.mean(map(max, subsets)))
    assert worst_at_k(scores, k) == pytest.approx(statistics.mean(map(min, subsets)))


@pytest.mark.parametrize(("right", "k"), [(0, 4), (3, 1), (3, 4), (10, 2)])
def test_with_zeros_and_ones_it_is_pass_at_k(right, k):
    scores = [1] * right + [0] * (10 - right)
    random.Random(0).shuffle(scores)
    assert best_at_k(scores, k) == pytest.approx(1 - math.comb(10 - right, k) / math.comb(10, k))


def test_pass_at_k_has_no_bias():
    # 4 samples with chance 0.3 each: pass@2 of fresh samples is 1 - 0.7^2, whatever n it is estimated from.
    rng, chance = random.Random(1), 0.3
    estimates = [best_at_k([float(rng.random() < chance) for _ in range(4)], 2) for _ in range(20000)]
    assert statistics.mean(estimates) == pytest.approx(1 - 0.7**2, abs=0.01)


def test_majority_over_subsets_by_hand():
    answers, scores = ["a", "a", "b"], [1.0, 1.0, 0.0]
    # {a, a}: 1; {a, b} twice: a tie, half.
    assert majority_at_k(answers, scores, 2) == pytest.approx(2 / 3)
    assert majority_at_k(answers, scores, 3) == 1
    assert majority_at_k([None, "b", None], [0.0, 1.0, 0.0], 3) == 1  # one vote is the majority
    assert majority_at_k([None, None], [1.0, 1.0], 2) == 0
    assert majority_at_k(["a", "a"], [1.0, 0.0], 2) == 0.5  # an answer is worth the mean of those who gave it


def test_many_subsets_are_drawn_and_repeat():
    answers = ["a"] * 12 + ["b"] * 8
    scores = [1.0] * 12 + [0.0] * 8
    assert math.comb(20, 5) > SUBSETS
    exact = sum(math.comb(12, i) * math.comb(8, 5 - i) for i in (3, 4, 5)) / math.comb(20, 5)
    assert majority_at_k(answers, scores, 5) == pytest.approx(exact, abs=0.03)
    assert majority_at_k(answers, scores, 5) == majority_at_k(answers, scores, 5)


@pytest.mark.parametrize("k", [0, 3])
def test_more_than_there_are_is_an_error(k):
    for call in (best_at_k, worst_at_k, lambda scores, k: majority_at_k(["a"] * 2, scores, k)):
        with pytest.raises(ValueError, match=f"k={k} of 2 samples"):
            call([1, 0], k)


def test_summary_leaves_short_groups_out():
    assert sizes(5) == [2, 4, 5]
    out = summary([[1.0, 0.0, 0.0], [1.0, 1.0]])
    assert out == {
        "best@2/mean": pytest.approx((2 / 3 + 1) / 2),
        "worst@2/mean": pytest.approx((0 + 1) / 2),
        "best@3/mean": 1.0,
        "worst@3/mean": 0.0,
    }
    assert summary([[1.0]]) == {}
