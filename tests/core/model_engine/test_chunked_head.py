import pytest
import torch

from verl.core.model_engine import chunked_head
from verl.core.model_engine.chunked_head import linear_log_probs, linear_statistics


def naive(hidden, weight, labels, temperature):
    log_p = torch.log_softmax((hidden @ weight.t()).float() / temperature, -1)
    return log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_the_whole_softmax(chunk, temperature, monkeypatch):
    monkeypatch.setattr(chunked_head, "_chunk_size", lambda weight: chunk)
    torch.manual_seed(0)
    labels = torch.randint(0, 13, (20,))
    upstream = torch.randn(2, 20)
    results = []
    for function in (naive, lambda h, w, y, t: linear_log_probs(h, w, y, t, with_entropy=True)):
        torch.manual_seed(1)
        hidden, weight = torch.randn(20, 6, requires_grad=True), torch.randn(13, 6, requires_grad=True)
        log_probs, entropy = function(hidden, weight, labels, temperature)
        (log_probs * upstream[0] + entropy * upstream[1]).sum().backward()
        results.append((log_probs, entropy, hidden.grad, weight.grad))
    for ours, want in zip(results[1], results[0]):
        torch.testing.assert_close(ours, want, atol=1e-5, rtol=1e-4)


def test_without_entropy_the_second_result_is_zero_and_has_no_gradient():
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    log_probs, entropy = linear_log_probs(hidden, weight, torch.tensor([0, 1, 4]))
    assert entropy.tolist() == [0, 0, 0]
    log_probs.sum().backward()
    assert hidden.grad is not None


def test_no_tokens():
    log_probs, entropy = linear_log_probs(torch.randn(0, 4), torch.randn(5, 4), torch.empty(0, dtype=torch.int64))
    assert log_probs.shape == entropy.shape == (0,)


def test_no_logits_of_all_tokens_are_kept(monkeypatch):
    """What autograd saves is linear in tokens + vocabulary."""
    monkeypatch.setattr(chunked_head, "_chunk_size", lambda weight: 10)
    saved = []
    hidden, weight = torch.randn(400, 4, requires_grad=True), torch.randn(300, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        linear_log_probs(hidden, weight, torch.zeros(400, dtype=torch.int64), with_entropy=True)
    assert sum(saved) < 400 * 300 / 10


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_statistics_are_those_of_the_whole_softmax(chunk, monkeypatch):
    monkeypatch.setattr(chunked_head, "_chunk_size", lambda weight: chunk)
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(20, 6), torch.randn(13, 6), torch.randint(0, 13, (20,))
    log_probs, entropy, squared = linear_statistics(hidden, weight, labels, 0.6)
    expected = naive(hidden, weight, labels, 0.6)
    torch.testing.assert_close((log_probs, entropy), expected)
    torch.testing.assert_close(squared, torch.softmax(hidden @ weight.t() / 0.6, -1).square().sum(-1))
    assert [x.shape for x in linear_statistics(hidden[:0], weight, labels[:0])] == [(0,)] * 3


def test_the_squares_are_the_gradients_norm():
    """|d log p_y / dz|^2 = 1 - 2 p_y + sum_v p_v^2, by which the optimal token baseline weighs."""
    torch.manual_seed(0)
    logits = torch.randn(1, 9, dtype=torch.float64, requires_grad=True)
    torch.log_softmax(logits, -1)[0, 4].backward()
    log_probs, _, squared = linear_statistics(logits.detach().float(), torch.eye(9), torch.tensor([4]))
    norm = float(logits.grad.square().sum())
    assert 1 - 2 * float(log_probs.exp()) + float(squared) == pytest.approx(norm, rel=1e-5)
