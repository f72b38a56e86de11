import copy
import threading

import pytest
import torch
from tests.core.model_engine.conftest import make_batch, make_config, make_pair, reference_log_probs
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from verl.algorithms.inputs import PolicyLossOptions
from verl.algorithms.registry import get_policy_loss
from verl.config.schema import CheckpointConfig, FSDPConfig, OptimConfig
from verl.core.checkpoint_engine import background
from verl.core.model_engine import attention
from verl.core.model_engine.api import MicroBatching
from verl.core.model_engine.fsdp_engine import FSDPEngine
from verl.core.model_engine.models import PolicyModel, ValueModel
from verl.core.model_engine.offload import StateOffload
from verl.errors import CheckpointError
from verl.trainer.losses import ActorLoss, CriticLoss, with_loss_weights

CPU = torch.device("cpu")


def make_engine(limit=MicroBatching(10_000), model=None, **options):
    packed = model or make_pair()[0]
    wrapped = PolicyModel(packed) if not hasattr(packed, "score") else ValueModel(packed)
    settings = {
        "optim": OptimConfig(lr=1e-2),
        "total_updates": 10,
        "fsdp": FSDPConfig(),
        "dtype": torch.float32,
    } | options
    return FSDPEngine(wrapped, device=CPU, train_limit=limit, infer_limit=limit, **settings)


def training_batch(mode="token-mean"):
    batch = make_batch(prompts=(3, 5, 1, 4, 2, 2), responses=(2, 6, 3, 1, 4, 5))
    response = batch["response_ids"]
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(response.values.shape, generator=generator) > 0.2
    column = lambda: response.with_values(torch.randn(response.values.shape, generator=generator))  # noqa: E731
    batch = batch.with_columns(
        response_mask=response.with_values(mask),
        advantages=column(),
        ref_log_probs=column(),
        values=column(),
        returns=column(),
        rollout_log_probs=response.with_values(torch.full(response.values.shape, -3.0)),
    )
    return with_loss_weights(batch, mode, 16.0)


def actor_loss(name="vanilla"):
    return ActorLoss(get_policy_loss(name), PolicyLossOptions(), 1.0, entropy_coeff=0.01, kl_coef=0.1)


def weights_of(engine):
    return {name: tensor.clone() for name, tensor in engine.export_weights()}


@pytest.mark.parametrize(
    "limit", [MicroBatching(10_000), MicroBatching(12), MicroBatching(0, max_samples=1), MicroBatching(0, 4)]
)
def test_log_probs_do_not_depend_on_micro_batches(limit):
    packed, plain = make_pair()
    batch = make_batch()
    log_probs, entropy = make_engine(limit, packed).log_probs(batch, 0.7, with_entropy=True)
    want, want_entropy = reference_log_probs(plain, batch, 0.7)
    torch.testing.assert_close(log_probs.values, torch.cat(want), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.values, torch.cat(want_entropy), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("limit", [MicroBatching(10_000), MicroBatching(0, max_samples=1)])
def test_statistics_of_one_forward(limit):
    packed, plain = make_pair()
    batch = make_batch()
    found = make_engine(limit, packed).statistics(batch, 0.7)
    log_probs, entropies = reference_log_probs(plain, batch, 0.7)
    torch.testing.assert_close(found["log_probs"].values, torch.cat(log_probs), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found["entropy"].values, torch.cat(entropies), atol=1e-5, rtol=1e-5)
    squares = []
    for prompt, response in zip(batch["prompt_ids"].rows(), batch["response_ids"].rows()):
        logits = plain(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / 0.7
        squares.append(torch.softmax(logits, -1).square().sum(-1))
    torch.testing.assert_close(found["sum_pi_squared"].values, torch.cat(squares), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("loss_name", ["vanilla", "gspo"])
def test_an_update_does_not_depend_on_micro_batches(mode, loss_name):
    results = []
    for limit in (MicroBatching(10_000), MicroBatching(14), MicroBatching(0, max_samples=1)):
        engine = make_engine(limit)
        metrics = engine.train_batch(training_batch(mode), actor_loss(loss_name))
        results.append((metrics, weights_of(engine)))
    for metrics, weights in results[1:]:
        assert metrics.keys() == results[0][0].keys()
        for name, value in metrics.items():
            assert value == pytest.approx(results[0][0][name], rel=1e-4, abs=1e-6), name
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, results[0][1][name], atol=3e-5, rtol=1e-3)


def test_gradient_checkpointing_changes_nothing():
    updates = [
        make_engine(gradient_checkpointing=on).train_batch(training_batch(), actor_loss()) for on in (False, True)
    ]
    assert updates[0]["grad_norm"] == pytest.approx(updates[1]["grad_norm"], rel=1e-6)


def test_repeated_updates_raise_the_log_probs_of_good_samples():
    engine = make_engine()
    batch = training_batch()
    response = batch["response_ids"]
    batch = batch.with_columns(advantages=response.with_values(torch.ones(response.values.shape)))
    before = engine.log_probs(batch, 1.0)[0].values.mean()
    for _ in range(5):
        engine.train_batch(batch, ActorLoss(get_policy_loss("vanilla"), PolicyLossOptions(), 1.0))
    assert engine.log_probs(batch, 1.0)[0].values.mean() > before + 0.05


def test_a_gradient_that_is_not_finite_is_left_out():
    engine = make_engine()
    before = weights_of(engine)
    batch = training_batch()
    broken = batch["advantages"].values.clone()
    broken[batch["response_mask"].values.nonzero()[0]] = float("inf")
    metrics = engine.train_batch(batch.with_columns(advantages=batch["advantages"].with_values(broken)), actor_loss())
    assert metrics["skipped_updates"] == 1
    for name, tensor in engine.export_weights():
        assert torch.equal(tensor, before[name])


def test_values_start_at_the_models_and_move_towards_the_returns():
    config = make_config()
    config.num_labels, config.classifier_dropout, config.hidden_dropout = 1, 0.0, 0.0
    torch.manual_seed(0)
    value_model = AutoModelForTokenClassification.from_config(copy.deepcopy(config), attn_implementation=attention.NAME)
    engine = make_engine(MicroBatching(14), value_model)
    batch = training_batch()
    batch = batch.with_columns(values=engine.values(batch))
    first = engine.train_batch(batch, CriticLoss(clip_range=100.0))["vf_loss"]
    for _ in range(30):
        last = engine.train_batch(batch, CriticLoss(clip_range=100.0))["vf_loss"]
    assert last < 0.7 * first


def test_exported_weights_are_the_parameters_themselves_named_as_in_the_checkpoint():
    packed, plain = make_pair(tied=True)
    engine = make_engine(model=packed)
    exported = dict(engine.export_weights())
    assert set(exported) == {n for n, _ in plain.named_parameters()}
    engine.train_batch(training_batch(), actor_loss())
    again = dict(engine.export_weights())
    assert all(exported[n].data_ptr() == again[n].data_ptr() for n in exported)


def test_a_checkpoint_brings_back_weights_moments_and_schedule(tmp_path):
    batch, optim = training_batch(), OptimConfig(lr=1e-2, lr_scheduler_type="cosine")
    unbroken = make_engine(optim=optim)
    for _ in range(2):
        unbroken.train_batch(batch, actor_loss())
    unbroken.save(tmp_path)
    want = unbroken.train_batch(batch, actor_loss())
    resumed = make_engine(optim=optim, model=make_pair(seed=9)[0])
    resumed.load(tmp_path)
    assert resumed.train_batch(batch, actor_loss()) == want
    for name, tensor in resumed.export_weights():
        assert torch.equal(tensor, dict(unbroken.export_weights())[name])


def test_moments_on_the_host_train_save_and_resume_as_those_on_the_device(tmp_path):
    """Also with a checkpoint that is read before the first update."""
    batch, engines = training_batch(), [make_engine(), make_engine()]
    engines[1].state_offload = StateOffload(engines[1].optimizer, CPU, chunk_bytes=4096)
    on_device, on_host = ([engine.train_batch(batch, actor_loss()) for _ in range(2)] for engine in engines)
    assert on_host == on_device
    engines[1].save(tmp_path)
    resumed = make_engine(model=make_pair(seed=9)[0])
    resumed.state_offload = StateOffload(resumed.optimizer, CPU, chunk_bytes=4096)
    resumed.load(tmp_path)
    want = engines[0].train_batch(batch, actor_loss())
    assert resumed.train_batch(batch, actor_loss()) == want
    for name, tensor in resumed.export_weights():
        assert torch.equal(tensor, dict(engines[0].export_weights())[name])


def test_a_forward_without_an_update_leaves_weights_and_checkpoint_as_they_are(tmp_path):
    batch = training_batch()
    unbroken = make_engine(dtype=torch.bfloat16)
    unbroken.train_batch(batch, actor_loss())
    before = dict(unbroken.export_weights())
    unbroken.log_probs(batch, 1.0)
    after = dict(unbroken.export_weights())
    assert all(after[n].dtype == torch.float32 and after[n].data_ptr() == before[n].data_ptr() for n in before)
    unbroken.save(tmp_path)
    resumed = make_engine(model=make_pair(seed=9)[0], dtype=torch.bfloat16)
    resumed.load(tmp_path)
    assert resumed.train_batch(batch, actor_loss()) == unbroken.train_batch(batch, actor_loss())
    for name, tensor in resumed.export_weights():
        assert torch.equal(tensor, dict(unbroken.export_weights())[name])


def test_a_checkpoint_without_a_part_is_refused_and_the_key_that_leaves_it_out_works(tmp_path):
    engine = make_engine(checkpoint=CheckpointConfig(save_contents=["model"]))
    engine.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"without optimizer, extra .*checkpoint\.load_contents=\[model\]"):
        engine.load(tmp_path)
    resumed = make_engine(model=make_pair(seed=9)[0], checkpoint=CheckpointConfig(load_contents=["model"]))
    resumed.load(tmp_path)
    assert all(torch.equal(t, dict(engine.export_weights())[n]) for n, t in resumed.export_weights())


def test_a_checkpoint_of_the_schedule_alone(tmp_path):
    engine = make_engine(checkpoint=CheckpointConfig(save_contents=["extra"]))
    engine.train_batch(training_batch(), actor_loss())
    engine.save(tmp_path / "actor")
    assert torch.load(tmp_path / "actor/extra.pt") == {"updates": 1}
    assert not (tmp_path / "actor/model").exists()


def test_a_thread_writes_what_the_weights_were_when_it_began(tmp_path, monkeypatch):
    go_on = threading.Event()
    write = background.save_sharded

    def held(*arguments):
        assert go_on.wait(60)
        write(*arguments)

    monkeypatch.setattr(background, "save_sharded", held)
    contents = ["model", "optimizer", "extra", "hf_model"]
    engine = make_engine(checkpoint=CheckpointConfig(async_save=True, save_contents=contents))
    batch = training_batch()
    engine.train_batch(batch, actor_loss())
    before = weights_of(engine)
    engine.save(tmp_path)
    assert not engine.saved()
    after = engine.train_batch(batch, actor_loss())
    assert any(not torch.equal(before[name], tensor) for name, tensor in engine.export_weights())
    with pytest.raises(RuntimeError, match="still being written"):
        engine.save(tmp_path)
    go_on.set()
    assert engine.saved(wait=True)
    assert engine.saved()
    resumed = make_engine(model=make_pair(seed=9)[0])
    resumed.load(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface")
    for name, tensor in resumed.export_weights():
        assert torch.equal(tensor, before[name])
        assert torch.equal(loaded.get_parameter(name), before[name])
    assert resumed.train_batch(batch, actor_loss()) == after


def test_what_goes_wrong_in_the_thread_is_raised_once(tmp_path):
    engine = make_engine(checkpoint=CheckpointConfig(async_save=True))
    (tmp_path / "model").write_text("in the way")
    engine.save(tmp_path)
    with pytest.raises(FileExistsError):
        engine.saved(wait=True)
    (tmp_path / "model").unlink()
    engine.save(tmp_path)
    assert engine.saved(wait=True)


def test_a_damaged_part_is_named(tmp_path):
    engine = make_engine()
    engine.save(tmp_path)
    extra = tmp_path / "extra.pt"
    extra.write_bytes(b"\0" * extra.stat().st_size)
    with pytest.raises(CheckpointError, match=r"extra\.pt is damaged.*trainer\.resume_from_path"):
        engine.load(tmp_path)


def test_whole_weights_are_written_in_the_precision_of_the_original(tmp_path):
    model = make_pair()[0]
    model.config.dtype = torch.bfloat16
    engine = make_engine(model=model, checkpoint=CheckpointConfig(save_contents=["model", "hf_model"]))
    engine.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    for name, tensor in engine.export_weights():
        assert torch.equal(loaded.get_parameter(name), tensor.bfloat16())


def test_a_frozen_engine_does_not_train():
    with pytest.raises(RuntimeError, match="without an optimizer"):
        make_engine(optim=None).train_batch(training_batch(), actor_loss())
