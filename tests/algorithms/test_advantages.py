from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given

from verl.algorithms.advantages import AdvantageInputs, AdvantageOptions, get_advantage, list_advantages
from verl.algorithms.segments import expand, place_scores

from . import reference
from .batches import advantage_inputs, generator, insert_masked, pick, seeds, steady, token_index

NAMES = list_advantages()
GROUP_BASED = [
    "gdpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "opo",
    "optimal_token_baseline",
    "reinforce_plus_plus_baseline",
    "rloo",
]
OPTIONS = AdvantageOptions(gamma=0.9, lam=0.8)


def outcome(scores: list[float], groups: list[int], lengths: list[int] | None = None, **columns) -> AdvantageInputs:
    """Samples of one token, or of these lengths, without tool tokens."""
    sizes = torch.tensor(lengths or [1] * len(scores))
    mask = torch.ones(int(sizes.sum()), dtype=torch.bool)
    rewards = place_scores(torch.tensor(scores, dtype=torch.float64), mask, sizes)
    return AdvantageInputs(rewards, mask, sizes, torch.tensor(groups), **columns)


def run(name: str, inputs: AdvantageInputs, options: AdvantageOptions = OPTIONS) -> list[float]:
    return get_advantage(name)(inputs, options)[0].tolist()


# Right values by hand -------------------------------------------------------------------------------------------------


def test_grpo_by_hand():
    inputs = outcome([1, 0, 0, 1], [3, 3, 3, 3])
    std = math.sqrt(1 / 3)  # squares sum to 1, n - 1 = 3
    expected = [0.5 / (std + 1e-6), -0.5 / (std + 1e-6)]
    assert run("grpo", inputs) == pytest.approx([expected[0], expected[1], expected[1], expected[0]], abs=1e-12)
    assert run("grpo", inputs, AdvantageOptions(norm_by_std=False)) == [0.5, -0.5, -0.5, 0.5]


def test_rloo_by_hand():
    assert run("rloo", outcome([3, 0, 0], [0, 0, 0])) == pytest.approx([3, -1.5, -1.5])


def test_grpo_passk_by_hand():
    plain = AdvantageOptions(norm_by_std=False)
    assert run("grpo_passk", outcome([1, 5, 3], [0, 0, 0]), plain) == [0, 2, 0]
    assert run("grpo_passk", outcome([5, 5, 3], [0, 0, 0]), plain) == [0, 0, 0]
    assert run("grpo_passk", outcome([1, 5, 3], [0, 0, 0])) == pytest.approx([0, 2 / (2 + 1e-6), 0])


def test_opo_by_hand():
    assert run("opo", outcome([1, 0], [0, 0], [1, 3])) == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_gpg_by_hand():
    assert run("gpg", outcome([1, 0, 1, 1], [0, 0, 1, 1])) == pytest.approx([1, -1, 0, 0])


def test_gdpo_by_hand():
    parts = {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([0.0, 2.0])}
    inputs = outcome([0, 3], [0, 0], reward_components=parts)
    assert run("gdpo", inputs) == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-5)
    # With b turned round and twice as heavy, a's difference is outweighed and the sign flips.
    turned = {"a": parts["a"], "b": torch.tensor([2.0, 0.0])}
    options = AdvantageOptions(extra={"gdpo_reward_weights": {"b": 2.0}})
    assert run("gdpo", replace(inputs, reward_components=turned), options)[0] == pytest.approx(0.70710, abs=1e-4)


def test_gae_by_hand():
    inputs = AdvantageInputs(
        token_rewards=torch.tensor([0.0, 9.0, 1.0]),
        mask=torch.tensor([True, False, True]),
        lengths=torch.tensor([3]),
        groups=torch.tensor([0]),
        values=torch.tensor([0.5, 9.0, 0.25]),
    )
    advantages, returns = get_advantage("gae")(inputs, AdvantageOptions(gamma=1.0, lam=0.5))
    # delta = 0 + 0.25 - 0.5, 1 - 0.25; A = -0.25 + 0.5 * 0.75, 0.75; two numbers whiten to -+0.7071.
    assert returns.tolist() == pytest.approx([0.625, 0, 1.0])
    assert advantages.tolist() == pytest.approx([-0.70711, 0, 0.70711], abs=1e-5)


def test_reinforce_plus_plus_by_hand():
    assert run("reinforce_plus_plus", outcome([1, 0], [0, 1])) == pytest.approx([0.70711, -0.70711], abs=1e-5)
    returns = get_advantage("reinforce_plus_plus")(outcome([1], [0], [3]), AdvantageOptions(gamma=0.5))[1]
    assert returns.tolist() == [0.25, 0.5, 1.0]


def test_reinforce_plus_plus_baseline_by_hand():
    # Centred 1, -1 and 3, -3: mean 0, variance 20 / 3.
    std = math.sqrt(20 / 3)
    expected = [1 / std, -1 / std, 3 / std, -3 / std]
    assert run("reinforce_plus_plus_baseline", outcome([3, 1, 6, 0], [0, 0, 1, 1])) == pytest.approx(expected)


def test_remax_by_hand():
    inputs = outcome([1, 0], [0, 1], [2, 1], baseline_scores=torch.tensor([0.25, 1.0]))
    assert run("remax", inputs, AdvantageOptions(gamma=1.0)) == pytest.approx([0.75, 0.75, -1.0])


def test_optimal_token_baseline_by_hand():
    # pi = 0.5 with squares summing to 1 and 3: w = 1 - 1 + 1 = 1, and 3.
    half = torch.full((2,), math.log(0.5))
    inputs = outcome([1, 0], [0, 0], old_log_probs=half, sum_pi_squared=torch.tensor([1.0, 3.0]))
    assert run("optimal_token_baseline", inputs) == pytest.approx([0.75, -0.25])


def test_optimal_token_baseline_keeps_the_last_shared_baseline_in_the_tail():
    logs = torch.log(torch.tensor([0.5, 0.5, 0.5, 0.5]))
    # Energy 1 - 1 + 0.25 a token: at place 0 the baseline is 0.5, and the longer sample's other two tokens keep it.
    inputs = outcome([1, 0], [0, 0], [1, 3], old_log_probs=logs, sum_pi_squared=torch.full((4,), 0.25))
    assert run("optimal_token_baseline", inputs) == pytest.approx([0.5, -0.5, -0.5, -0.5])


# Properties of all ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@given(seed=seeds)
@steady
def test_equals_the_slow_reference(name, seed):
    inputs = advantage_inputs(seed)
    options = AdvantageOptions(gamma=0.9, lam=0.8, norm_by_std=seed % 5 > 0)
    assert run(name, inputs, options) == pytest.approx(reference.advantages(name, inputs, options), abs=1e-7)


@pytest.mark.parametrize("name", NAMES)
@given(seed=seeds)
@steady
def test_order_of_samples_and_group_labels_do_not_matter(name, seed):
    inputs = advantage_inputs(seed)
    order = torch.randperm(inputs.lengths.numel(), generator=generator(seed))
    shuffled = replace(pick(inputs, order), groups=1000 - 3 * inputs.groups[order])
    plain = get_advantage(name)(inputs, OPTIONS)
    moved = get_advantage(name)(shuffled, OPTIONS)
    index = token_index(inputs.lengths, order)
    for before, after in zip(plain, moved, strict=True):
        torch.testing.assert_close(after, before[index], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
@given(seed=seeds)
@steady
def test_masked_tokens_change_nothing(name, seed):
    inputs = advantage_inputs(seed)
    longer, kept = insert_masked(inputs, seed)
    plain = get_advantage(name)(inputs, OPTIONS)
    padded = get_advantage(name)(longer, OPTIONS)
    for before, after in zip(plain, padded, strict=True):
        torch.testing.assert_close(after[kept], before, rtol=1e-9, atol=1e-9)
        assert not after[~longer.mask].any()
        assert after.isfinite().all()


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "rloo", "opo", "gpg", "gdpo"])
def test_sample_order_does_not_change_a_single_bit(name):
    scores = torch.rand(64, generator=generator(1), dtype=torch.float64)
    parts = {"a": scores, "b": scores.flip(0).sqrt()}
    inputs = outcome(scores.tolist(), (torch.arange(64) % 5).tolist(), reward_components=parts)
    order = torch.randperm(64, generator=generator(2))
    assert torch.equal(
        get_advantage(name)(pick(inputs, order), OPTIONS)[0], get_advantage(name)(inputs, OPTIONS)[0][order]
    )


@pytest.mark.parametrize("name", GROUP_BASED)
def test_group_of_one_and_equal_scores_give_exactly_zero(name):
    logs = -torch.rand(14, generator=generator(3), dtype=torch.float64)
    parts = {"a": torch.tensor([0.1, 0.1, 0.1, 7.0])}
    policy = {"old_log_probs": logs, "sum_pi_squared": logs.exp()}
    inputs = outcome([0.1, 0.1, 0.1, 7.0], [0, 0, 0, 1], [2, 3, 4, 5], **policy, reward_components=parts)
    assert not torch.tensor(run(name, inputs)).any()


@pytest.mark.parametrize("name", NAMES)
def test_one_token_and_no_tokens_are_finite(name):
    one_number = torch.ones(1)
    policy = {"old_log_probs": -one_number, "sum_pi_squared": one_number}
    one = outcome([1.0], [0], values=one_number, **policy, baseline_scores=one_number, reward_components={})
    assert torch.tensor(run(name, one)).isfinite().all()
    assert run(name, replace(one, mask=torch.tensor([False]))) == [0.0]
    empty = AdvantageInputs(
        *(torch.empty(0), torch.empty(0, dtype=torch.bool)),
        *(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)),
        values=torch.empty(0),
        old_log_probs=torch.empty(0),
        sum_pi_squared=torch.empty(0),
        baseline_scores=torch.zeros(1),
        reward_components={"a": torch.zeros(1)},
    )
    assert run(name, empty) == []


def test_a_sample_without_policy_tokens_does_not_count_in_its_group():
    inputs = outcome([1, 0, 1], [0, 0, 0], [1, 1, 1])
    without = replace(inputs, mask=torch.tensor([True, True, False]))
    assert run("grpo", without, AdvantageOptions(norm_by_std=False)) == [0.5, -0.5, 0.0]


@pytest.mark.parametrize("name", NAMES)
def test_result_has_the_dtype_of_the_rewards(name):
    inputs = advantage_inputs(4)
    inputs = replace(inputs, token_rewards=inputs.token_rewards.float())
    assert all(result.dtype == torch.float32 for result in get_advantage(name)(inputs, OPTIONS))


@pytest.mark.parametrize("name", NAMES)
def test_declares_exactly_the_options_that_it_reads(name):
    entry = get_advantage(name)
    seen: set[str] = set()

    class Recorder:
        def __getattr__(self, key):
            seen.add(key)
            return entry.extra if key == "extra" else getattr(AdvantageOptions(), key)

    entry.function(advantage_inputs(4), Recorder())
    assert seen - {"extra"} == set(entry.reads)
    assert ("extra" in seen) == bool(entry.extra)


@pytest.mark.parametrize("name", NAMES)
def test_declares_the_columns_that_it_needs(name):
    required = {
        "values": "critic",
        "baseline_scores": "baseline_rollout",
        "old_log_probs": "old_log_probs",
        "rollout_log_probs": "rollout_log_probs",
        "sum_pi_squared": "sum_pi_squared",
        "reward_components": "reward_components",
    }
    entry, inputs = get_advantage(name), advantage_inputs(4)
    needed = [column for column, need in required.items() if getattr(entry.needs, need)]
    unneeded = {f.name: None for f in fields(inputs) if f.name in required and f.name not in needed}
    entry(replace(inputs, **unneeded), OPTIONS)
    for column in needed:
        with pytest.raises(ValueError, match=f"'{name}' needs {column}"):
            entry(replace(inputs, **{column: None}), OPTIONS)


def test_returns_of_outcome_estimators_are_the_scores():
    inputs = outcome([1, 0, 4], [0, 0, 0], [2, 1, 3])
    for name in ("grpo", "rloo", "opo", "gpg", "grpo_passk"):
        returns = get_advantage(name)(inputs, OPTIONS)[1]
        assert torch.equal(returns, expand(torch.tensor([1.0, 0, 4], dtype=torch.float64), inputs.lengths))


def test_wrong_columns_say_which():
    inputs = outcome([1, 0], [0, 0])
    with pytest.raises(ValueError, match="mask has 2 tokens, but lengths sum to 3"):
        get_advantage("rloo")(replace(inputs, token_rewards=torch.zeros(3), lengths=torch.tensor([2, 1])), OPTIONS)
    options = AdvantageOptions(extra={"gdpo_reward_weights": {"rigth": 1.0}})
    with pytest.raises(ValueError, match="Did you mean 'right'"):
        get_advantage("gdpo")(advantage_inputs(4), options)
