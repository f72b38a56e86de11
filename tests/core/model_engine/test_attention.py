import pytest
import torch
from tests.core.model_engine.conftest import make_batch, make_pair, reference_log_probs

from verl.core.model_engine import attention, packing
from verl.core.model_engine.models import PolicyModel
from verl.core.model_engine.packing import PackedInputs, PackedLayout


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
@pytest.mark.parametrize("tied", [True, False])
def test_packed_log_probs_equal_those_of_each_sample_alone(family, tied):
    packed, plain = make_pair(family, tied)
    batch = make_batch()
    log_probs, entropy = PolicyModel(packed)(PackedInputs.make(batch, "cpu"), 0.7, True)
    want, want_entropy = reference_log_probs(plain, batch, 0.7)
    torch.testing.assert_close(log_probs, torch.cat(want), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, torch.cat(want_entropy), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
@pytest.mark.parametrize("short", [True, False])
def test_shared_prompts_change_neither_log_probs_nor_gradients(family, short, monkeypatch):
    """Against each sample alone, on a batch whose first prompt has three samples and whose order mixes them."""
    monkeypatch.setattr(attention, "SHORT", 64 if short else 0)
    packed, plain = make_pair(family)
    batch = make_batch(prompts=(3, 5, 1), responses=(2, 6, 3)).select([0, 1, 0, 2, 0, 1])
    batch = batch.with_columns(response_ids=make_batch(prompts=(1,) * 6, responses=(2, 6, 4, 1, 7, 3))["response_ids"])
    inputs = PackedInputs.make(batch, "cpu", share_prompts=True)
    assert len(inputs.input_ids) == 3 + 5 + 1 + (1 + 5 + 3 + 0 + 6 + 2)

    log_probs, entropy = PolicyModel(packed)(inputs, 0.7, True)
    want, want_entropy = (torch.cat(x) for x in reference_log_probs(plain, batch, 0.7))
    torch.testing.assert_close(log_probs, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, want_entropy, atol=1e-5, rtol=1e-5)

    weights = torch.linspace(-1, 1, len(want))
    (weights * log_probs + 0.1 * entropy).sum().backward()
    (weights * want + 0.1 * want_entropy).sum().backward()
    for (name, got), expected in zip(packed.named_parameters(), plain.parameters()):
        torch.testing.assert_close(got.grad, expected.grad, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("window", [None, 3])
def test_short_attention_equals_that_of_long_rows(window):
    torch.manual_seed(0)
    q = torch.randn(3, 7, 6, 8)
    k, v = (torch.randn(3, 7, 2, 8) for _ in range(2))
    for scale in (None, 0.3):
        short = attention._short_causal(q, k, v, scale=scale, window=window)
        long = attention._padded_causal(q, k, v, scale=scale, window=window)
        torch.testing.assert_close(short, long, atol=1e-6, rtol=1e-5)


def test_length_groups_change_nothing(monkeypatch):
    """Lengths so uneven that sequences are padded in several groups, against one group of all."""
    torch.manual_seed(0)
    lengths = torch.tensor([3, 400, 5, 390, 2, 30, 700])
    q = torch.randn(1, 4, int(lengths.sum()), 8)
    k, v = (torch.randn(1, 2, int(lengths.sum()), 8) for _ in range(2))
    assert len(packing.length_groups(lengths)) > 1
    grouped, _ = attention.packed_attention(None, q, k, v, None, packing=PackedLayout.make(lengths, "cpu"))
    monkeypatch.setattr(packing, "length_groups", lambda n: [torch.arange(len(n))])
    whole, _ = attention.packed_attention(None, q, k, v, None, packing=PackedLayout.make(lengths, "cpu"))
    torch.testing.assert_close(grouped, whole, atol=1e-6, rtol=1e-6)


def test_length_groups_hold_every_sequence_once():
    lengths = torch.randint(1, 2000, (200,), generator=torch.Generator().manual_seed(0))
    groups = packing.length_groups(lengths)
    assert sorted(torch.cat(groups).tolist()) == list(range(200))
    padded = sum(len(g) * int(lengths[g].max()) for g in groups)
    assert padded < 1.4 * int(lengths.sum())


def test_sliding_window_sees_the_last_tokens_only():
    lengths = torch.tensor([6])
    layout = PackedLayout.make(lengths, "cpu")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    out, _ = attention.packed_attention(None, q, k, v, None, sliding_window=2, packing=layout)
    scores = (q[0] @ k[0].transpose(1, 2)) / 2.0
    far = torch.arange(6)[:, None] - torch.arange(6)[None, :]
    scores = scores.masked_fill((far < 0) | (far >= 2), float("-inf"))
    want = (scores.softmax(-1) @ v[0]).transpose(0, 1)
    torch.testing.assert_close(out[0], want, atol=1e-6, rtol=1e-5)


def test_a_model_with_other_attention_is_refused():
    _, plain = make_pair()
    with pytest.raises(ValueError, match="attn_implementation='packed'"):
        PolicyModel(plain)
