import pytest
import torch
from tests.core.model_engine.conftest import make_batch, make_pair, reference_log_probs

from verl.core.model_engine import attention
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


def test_length_groups_change_nothing(monkeypatch):
    """Lengths so uneven that sequences are padded in several groups, against one group of all."""
    torch.manual_seed(0)
    lengths = torch.tensor([3, 400, 5, 390, 2, 30, 700])
    layout = PackedLayout.make(lengths, "cpu")
    q = torch.randn(1, 4, int(lengths.sum()), 8)
    k, v = (torch.randn(1, 2, int(lengths.sum()), 8) for _ in range(2))
    assert len(attention._length_groups(lengths)) > 1
    grouped, _ = attention.packed_attention(None, q, k, v, None, packing=layout)
    monkeypatch.setattr(attention, "_length_groups", lambda n: [torch.arange(len(n))])
    whole, _ = attention.packed_attention(None, q, k, v, None, packing=layout)
    torch.testing.assert_close(grouped, whole, atol=1e-6, rtol=1e-6)


def test_length_groups_hold_every_sequence_once():
    lengths = torch.randint(1, 2000, (200,), generator=torch.Generator().manual_seed(0))
    groups = attention._length_groups(lengths)
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
