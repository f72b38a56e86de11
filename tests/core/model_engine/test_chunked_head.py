import pytest
import torch

from verl.core.model_engine import chunked_head
from verl.core.model_engine.chunked_head import linear_log_probs


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
