import pytest
import torch
from tests.core.model_engine.conftest import make_batch, make_pair

from verl.core.model_engine.models import PolicyModel
from verl.core.model_engine.packing import PackedInputs
from verl.core.model_engine.prompt_sharing import SharedPrompts


def two_groups() -> SharedPrompts:
    """Packed [a b | c][d][e | f][ ]: prompt [a, b] with responses [c], [d] and one of a single token; prompt [e] with [f]."""
    queries, keys = torch.tensor([3, 1, 2, 0]), torch.tensor([3, 3, 2, 2])
    return SharedPrompts.make(queries, keys, torch.tensor([0, 1, 2, 0, 1, 3, 4, 5, 0, 1]), "cpu")


def test_a_sample_without_queries_has_no_keys_either():
    shared = two_groups()
    assert shared.cu_queries.tolist() == [0, 3, 4, 6]
    assert shared.cu_keys.tolist() == [0, 3, 6, 8]
    assert (shared.max_queries, shared.max_keys) == (3, 3)
    assert shared.index.tolist() == [0, 1, 2, 0, 1, 3, 4, 5]
    assert shared.rows.tolist() == [0, 1]
    assert shared.uses.tolist() == [[0, 3], [1, 4]]
    assert shared.first.tolist() == [0, 1, 2, 5, 6, 7]
    assert shared.counts is None


def test_uses_of_groups_of_unlike_size_are_filled_up_and_masked():
    """Prompt token 0 is a key of three sequences, 4 of two; 1, 2, 3 and 5, 6 are responses."""
    index = torch.tensor([0, 1, 0, 2, 0, 3, 4, 5, 4, 6])
    shared = SharedPrompts.make(torch.tensor([2, 1, 1, 2, 1]), torch.tensor([2] * 5), index, "cpu")
    assert shared.rows.tolist() == [0, 4]
    assert shared.uses.tolist() == [[0, 2, 4], [6, 8, 8]]
    assert shared.counts.tolist() == [[True, True, True], [True, True, False]]
    gradient = torch.arange(1.0, 11.0)
    packed = torch.zeros(7, requires_grad=True)
    shared.keys_of(packed).backward(gradient)
    assert packed.grad.tolist() == [1 + 3 + 5, 2, 4, 6, 7 + 9, 8, 10]


def test_keys_and_their_gradient_are_those_of_a_plain_gather():
    shared = two_groups()
    packed, plain = (torch.arange(12.0).view(6, 1, 2).requires_grad_() for _ in range(2))
    weights = torch.linspace(-1, 1, 16).view(8, 1, 2)
    keys, want = shared.keys_of(packed), plain.index_select(0, shared.index)
    assert torch.equal(keys, want)
    (keys * weights).sum().backward()
    (want * weights).sum().backward()
    torch.testing.assert_close(packed.grad, plain.grad)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_the_kernel_gives_shared_prompts_the_same_log_probs_and_gradients(family):
    """bfloat16: tolerances are those of its rounding."""
    model = PolicyModel(make_pair(family)[0]).to("cuda", torch.bfloat16)
    batch = make_batch(prompts=(30, 5, 1), responses=(2, 6, 3)).select([0, 1, 0, 2, 0, 1])
    batch = batch.with_columns(response_ids=make_batch(prompts=(1,) * 6, responses=(2, 6, 40, 1, 7, 1))["response_ids"])
    results = []
    for share in (False, True):
        model.zero_grad()
        log_probs, _ = model(PackedInputs.make(batch, "cuda", share_prompts=share), 1.0, False)
        (log_probs * torch.linspace(-1, 1, len(log_probs), device="cuda")).sum().backward()
        results.append((log_probs.detach(), [p.grad.clone() for p in model.parameters()]))
    torch.testing.assert_close(results[0][0], results[1][0], atol=2e-2, rtol=2e-2)
    for got, want in zip(results[1][1], results[0][1]):
        assert (got - want).float().norm() <= 0.03 * want.float().norm() + 1e-3
