import math

import pytest
import torch

from verl.core.rollout_engine import sampling
from verl.core.rollout_engine.api import SamplingParams
from verl.core.rollout_engine.sampling import SamplingRule, mass_threshold, sample, stream_key, uniforms


def draws(logits: torch.Tensor, count: int, **params: object) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` draws from one row of logits, each with its own position: (frequency of each token, log-prob of each)."""
    rule = SamplingRule.of(SamplingParams(max_tokens=1, **params))
    keys = torch.full((count,), stream_key(11, 0, 0))
    tokens, log_probs = sample(logits.repeat(count, 1), keys, torch.arange(count), rule)
    found = torch.full_like(logits, torch.nan)
    found[tokens] = log_probs
    return torch.bincount(tokens, minlength=len(logits)) / count, found


def test_frequencies_and_log_probs_are_the_softmax_s():
    logits = torch.randn(9, generator=torch.Generator().manual_seed(0)) * 2
    frequency, log_probs = draws(logits, 40_000)
    expected = logits.softmax(-1)
    assert torch.allclose(frequency, expected, atol=4 * 0.5 / math.sqrt(40_000))
    seen = frequency > 0
    assert torch.allclose(log_probs[seen], logits.log_softmax(-1)[seen], atol=1e-5)


def test_several_blocks_of_the_vocabulary(monkeypatch):
    monkeypatch.setattr(sampling, "BLOCK", 4)
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -torch.inf, 0.3, 1.5, -0.5, 0.1])  # blocks of 4, 4 and 2
    frequency, log_probs = draws(logits, 40_000)
    assert torch.allclose(frequency, logits.softmax(-1), atol=0.01)
    assert frequency[5] == 0
    assert log_probs[8] == pytest.approx(logits.log_softmax(-1)[8].item(), abs=1e-5)


def test_temperature():
    logits = torch.tensor([0.0, 1.0, 3.0])
    frequency, log_probs = draws(logits.clone(), 40_000, temperature=2.0)
    assert torch.allclose(frequency, (logits / 2).softmax(-1), atol=0.01)
    assert torch.allclose(log_probs, (logits / 2).log_softmax(-1), atol=1e-5)


def test_temperature_zero_takes_the_likeliest_with_log_probs_at_one():
    logits = torch.tensor([0.0, 1.0, 3.0])
    frequency, log_probs = draws(logits, 10, temperature=0.0, top_k=2, top_p=0.5)
    assert frequency.tolist() == [0, 0, 1]
    assert log_probs[2] == pytest.approx(logits.log_softmax(-1)[2].item())


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, [3, 1]),
        ({"top_k": 1}, [3]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.4}, [3]),
        ({"top_p": 0.41}, [3, 1]),
        ({"top_p": 0.71}, [3, 1, 0]),
        ({"top_k": 3, "top_p": 0.77}, [3, 1]),  # of the 0.9 that top_k leaves, 0.7 are 0.778
        ({"top_k": 3, "top_p": 0.79}, [3, 1, 0]),
    ],
)
def test_top_k_and_top_p_cut_but_keep_whole_log_probs(params, kept):
    probs = torch.tensor([0.2, 0.3, 0.1, 0.4])
    frequency, log_probs = draws(probs.log(), 20_000, **params)
    expected = torch.zeros(4)
    expected[kept] = probs[kept] / probs[kept].sum()
    assert torch.allclose(frequency, expected, atol=0.015)
    assert (frequency > 0).nonzero().flatten().tolist() == sorted(kept)
    assert torch.allclose(log_probs[kept], probs[kept].log(), atol=1e-5)


def test_equal_masses_at_the_threshold_are_all_kept():
    mass = torch.tensor([[0.2, 0.4, 0.2, 0.2]])
    assert mass_threshold(mass, 2, 1.0).item() == pytest.approx(0.2)
    assert mass_threshold(mass, -1, 0.5).item() == pytest.approx(0.2)
    assert mass_threshold(mass, -1, 0.4).item() == pytest.approx(0.4)


def test_unlikely_tokens_come_as_rarely_as_they_should():
    """Probabilities far below the 2**-24 of one uniform number: the rare half of the mass is spread over 200,000 tokens."""
    logits = torch.cat([torch.tensor([0.0]), torch.full((200_000,), -math.log(200_000.0))])
    rule = SamplingRule.of(SamplingParams(max_tokens=1))
    tokens, log_probs = sample(logits.repeat(400, 1), torch.arange(400), torch.zeros(400, dtype=torch.int64), rule)
    rare = tokens > 0
    assert 0.4 < rare.float().mean() < 0.6
    assert len(tokens[rare].unique()) > 0.95 * int(rare.sum())
    assert torch.allclose(log_probs[rare], torch.tensor(-math.log(400_000.0)), atol=1e-4)


def test_uniforms_are_uniform_and_independent():
    keys = torch.tensor([stream_key(0, s, i) for s in range(50) for i in range(4)])
    first, second = uniforms(keys.repeat_interleave(200), torch.arange(200).repeat(200))
    for u in (first, second):
        assert u.min() >= 0
        assert u.max() < 1
        assert u.mean().item() == pytest.approx(0.5, abs=0.006)
        counts = torch.histc(u, bins=20, min=0, max=1)
        assert ((counts - 2000) ** 2 / 2000).sum() < 45  # chi-squared with 19 degrees of freedom, 99.9 %
    pairs = torch.stack((first[:-1], first[1:], second[:-1]))
    off_diagonal = torch.corrcoef(pairs) - torch.eye(3)
    assert off_diagonal.abs().max() < 0.02


def test_uniforms_follow_splitmix64():
    """The generator's published first outputs for the state 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    first, second = uniforms(torch.tensor([1234567] * 3), torch.arange(3))
    assert first.tolist() == [(x >> 40) / 2**24 for x in published]
    assert second.tolist() == [((x >> 16) & 0xFFFFFF) / 2**24 for x in published]


def test_stream_keys_differ_in_each_of_their_parts():
    keys = {stream_key(a, b, c) for a in range(8) for b in range(8) for c in range(8)}
    assert len(keys) == 512
    assert stream_key(2**63 + 5, 1, 0) != stream_key(5, 1, 0)
    assert all(-(2**63) <= k < 2**63 for k in keys)


def test_rule_is_what_rows_of_a_step_share():
    base = SamplingParams(8, stop_token_ids=(3, 1, 3))
    assert SamplingRule.of(base) == SamplingRule.of(SamplingParams(9, n=4, seed=5, stop_token_ids=(1, 3)))
    assert SamplingRule.of(SamplingParams(8, stop_token_ids=(3,), ignore_eos=True)).stop_token_ids == ()
    assert SamplingRule.of(base) != SamplingRule.of(SamplingParams(8, temperature=0.5, stop_token_ids=(1, 3)))


def test_logits_that_are_not_numbers_give_a_token_of_the_vocabulary_and_no_log_prob():
    logits = torch.full((2, 5000), float("nan"))  # 5000: the last block is padded
    tokens, log_probs = sample(logits, torch.tensor([1, 2]), torch.tensor([3, 4]), SamplingRule(1.0, -1, 1.0, ()))
    assert log_probs.isnan().all()
    assert ((tokens >= 0) & (tokens < 5000)).all()
