"""Actor and critic losses: values worked out by hand, and independence of how a mini-batch is split."""

import math

import pytest
import torch
from tests.trainer.fakes import batch_of

from verl.algorithms.inputs import PolicyLossOptions
from verl.algorithms.registry import PolicyLoss, get_policy_loss
from verl.core.model_engine.api import TokenOutputs
from verl.trainer.losses import ActorLoss, CriticLoss, mismatch_of_update, select_tokens, with_loss_weights

MASK = [[1, 1, 0], [1]]
ADVANTAGES = [[1.0, -2.0, 5.0], [3.0]]
LOG_PROBS = torch.tensor([-1.0, -2.0, -0.5, -0.25])
ENTROPY = torch.tensor([0.3, 0.6, 9.0, 0.9])


def actor_loss(**changes):
    return ActorLoss(get_policy_loss("vanilla"), PolicyLossOptions(), temperature=1.0, **changes)


def samples(mode="token-mean", **columns):
    return with_loss_weights(batch_of(MASK, advantages=ADVANTAGES, **columns), mode, scale=4.0)


def evaluate(loss, batch, log_probs=LOG_PROBS, entropy=ENTROPY):
    """(loss, gradient of the log-probs, metrics)."""
    log_probs = log_probs.clone().requires_grad_()
    value, metrics = loss(TokenOutputs(log_probs=log_probs, entropy=entropy), batch)
    value.backward()
    return value.item(), log_probs.grad, {k: m.value.item() for k, m in metrics.items()}


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        ("token-mean", [1 / 3, 1 / 3, 0, 1 / 3]),
        ("seq-mean-token-sum", [1 / 2, 1 / 2, 0, 1 / 2]),
        ("seq-mean-token-mean", [1 / 4, 1 / 4, 0, 1 / 2]),
        ("seq-mean-token-sum-norm", [1 / 8, 1 / 8, 0, 1 / 8]),
    ],
)
def test_loss_weights_of_a_mini_batch(mode, weights):
    column = samples(mode)["loss_weights"]
    assert column.lengths.tolist() == [3, 1]
    torch.testing.assert_close(column.values, torch.tensor(weights))


def test_first_update_weighs_the_advantages():
    # The ratio is 1, so the loss is -(1 - 2 + 3) / 3 and each gradient is minus the advantage over 3.
    value, gradient, metrics = evaluate(actor_loss(), samples(old_log_probs=LOG_PROBS.split([3, 1])))
    assert value == pytest.approx(-2 / 3)
    torch.testing.assert_close(gradient, torch.tensor([-1 / 3, 2 / 3, 0.0, -1.0]))
    assert metrics["pg_loss"] == metrics["loss"] == pytest.approx(-2 / 3)
    assert metrics["entropy_loss"] == pytest.approx(0.6)


def test_ratio_is_clipped_against_the_old_log_probs():
    # exp(new - old) = 1.5 at every token. Advantages above 0: clipped to 1.2, no gradient. Below: 1.5, free.
    old = (LOG_PROBS - math.log(1.5)).split([3, 1])
    value, gradient, _ = evaluate(actor_loss(), samples(old_log_probs=old))
    assert value == pytest.approx(-(1.2 * 1 - 1.5 * 2 + 1.2 * 3) / 3)
    torch.testing.assert_close(gradient, torch.tensor([0.0, 1.0, 0.0, 0.0]))


def test_without_old_log_probs_is_with_the_same_ones():
    changes = {"entropy_coeff": 0.1, "kl_coef": 0.5}
    reference = {"ref_log_probs": (LOG_PROBS - 0.3).split([3, 1])}
    with_old = evaluate(actor_loss(**changes), samples(old_log_probs=LOG_PROBS.split([3, 1]), **reference))
    without = evaluate(actor_loss(**changes), samples(**reference))
    assert without[0] == with_old[0]
    assert torch.equal(without[1], with_old[1])
    assert without[2] == with_old[2]


def test_entropy_bonus_is_subtracted():
    value, _, _ = evaluate(actor_loss(entropy_coeff=0.1), samples())
    assert value == pytest.approx(-2 / 3 - 0.1 * (0.3 + 0.6 + 0.9) / 3)


@pytest.mark.parametrize(("kind", "at_each_token"), [("kl", 0.5), ("k2", 0.125), ("low_var_kl", math.exp(-0.5) - 0.5)])
def test_kl_loss_is_added(kind, at_each_token):
    batch = samples(ref_log_probs=(LOG_PROBS - 0.5).split([3, 1]))
    value, _, metrics = evaluate(actor_loss(kl_coef=0.2, kl_kind=kind), batch)
    assert metrics["kl_loss"] == pytest.approx(at_each_token)
    assert value == pytest.approx(-2 / 3 + 0.2 * at_each_token)


def test_rollout_correction_multiplies_the_token_losses():
    value, _, _ = evaluate(actor_loss(), samples(rollout_is_weights=[[0.5, 1.0, 1.0], [2.0]]))
    assert value == pytest.approx(-(0.5 * 1 - 2 + 2 * 3) / 3)


def test_mismatch_with_the_rollout_counts_policy_tokens_alone():
    rollout = LOG_PROBS.exp() + torch.tensor([0.03, 0.0, 0.3, -0.06])
    loss = actor_loss(measure_mismatch=True)
    _, _, metrics = evaluate(loss, samples(rollout_log_probs=rollout.log().split([3, 1])))
    assert metrics["rollout_probs_diff_max"] == pytest.approx(0.06, rel=1e-4)
    assert metrics["rollout_probs_diff_mean"] == pytest.approx(0.09, rel=1e-4)  # a sum, to be divided by three tokens
    probabilities = LOG_PROBS.exp()
    ratios = [float(probabilities[i] / rollout[i]) for i in (0, 1, 3)]  # the third token is not the policy's
    effective = mismatch_of_update(metrics)["rollout_corr/eff_sample_size"]
    assert effective == pytest.approx(sum(ratios) ** 2 / (3 * sum(w * w for w in ratios)), rel=1e-4)
    assert not [name for name in evaluate(actor_loss(), samples())[2] if name.startswith("rollout_probs")]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_micro_batches_add_up(mode):
    columns = {"old_log_probs": (LOG_PROBS + 0.1).split([3, 1]), "ref_log_probs": (LOG_PROBS - 0.2).split([3, 1])}
    loss, batch = actor_loss(entropy_coeff=0.1, kl_coef=0.2), samples(mode, **columns)
    whole, gradient, _ = evaluate(loss, batch)
    parts = [
        evaluate(loss, batch.select([0]), LOG_PROBS[:3], ENTROPY[:3]),
        evaluate(loss, batch.select([1]), LOG_PROBS[3:], ENTROPY[3:]),
    ]
    assert sum(part[0] for part in parts) == pytest.approx(whole)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradient)


def test_tokens_are_selected_over_the_mini_batch():
    picky = PolicyLoss(
        "picky",
        lambda inputs, options: (inputs.selection * inputs.advantages, {}),
        prepare=lambda inputs, options: inputs.advantages == inputs.advantages[inputs.mask].max(),
    )
    batch = samples(old_log_probs=LOG_PROBS.split([3, 1]))
    chosen = select_tokens(batch, picky, PolicyLossOptions())
    assert chosen["selection"].values.tolist() == [False, False, False, True]
    # In the first micro-batch alone the largest advantage would be another token: the column keeps it out.
    loss = ActorLoss(picky, PolicyLossOptions(), 1.0)
    value, _ = loss(TokenOutputs(log_probs=LOG_PROBS[:3], entropy=ENTROPY[:3]), chosen.select([0]))
    assert value.item() == 0
    assert "selection" not in select_tokens(batch, get_policy_loss("vanilla"), PolicyLossOptions())


def test_critic_takes_the_larger_of_free_and_clipped_error():
    batch = samples(values=[[0.0, 1.0, 0.0], [2.0]], returns=[[2.0, 1.0, 7.0], [2.0]])
    values = torch.tensor([1.0, 1.2, 5.0, 2.0], requires_grad=True)
    loss, metrics = CriticLoss(clip_range=0.5)(TokenOutputs(values=values), batch)
    # 1.0 is clipped to 0.5: (0.5 - 2)^2 / 2 = 1.125. 1.2 stays: 0.2^2 / 2 = 0.02. The last is right.
    assert loss.item() == pytest.approx((1.125 + 0.02) / 3)
    loss.backward()
    torch.testing.assert_close(values.grad, torch.tensor([0.0, 0.2 / 3, 0.0, 0.0]))
    assert metrics["vf_loss"].value.item() == pytest.approx(loss.item())
    assert (metrics["vf_clipfrac"].value.item(), metrics["vf_clipfrac"].count.item()) == (1, 3)


def test_outputs_of_the_wrong_model_are_refused():
    with pytest.raises(ValueError, match="log-probs and entropy"):
        actor_loss()(TokenOutputs(values=LOG_PROBS), samples())
    with pytest.raises(ValueError, match="values"):
        CriticLoss(0.5)(TokenOutputs(log_probs=LOG_PROBS, entropy=ENTROPY), samples())
