"""vLLM under the asynchronous pipelines; run with `make test-vllm`."""

import pytest
from tests.e2e.runs import curve, metrics, overrides, sevens_reward, train

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]
ROLLOUT = "actor_rollout_ref__rollout"


@pytest.mark.parametrize("apart", [False, True], ids=["in this process", "on a device of its own"])
def test_vllm_generates_while_the_trainer_trains(apart, tiny_data, tmp_path):
    pytest.importorskip("vllm")
    from examples.tiny import make_model

    tokenizer = make_model.character_tokenizer()
    make_model.tiny_qwen2(tokenizer, hidden=128, layers=2).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    changes = {
        "trainer__pipeline": "fully_async",
        "trainer__total_training_steps": 4,
        "data__val_files": "null",
        "data__max_response_length": 48,
        "actor_rollout_ref__actor__optim__lr": 1e-3,
        f"{ROLLOUT}__name": "vllm",
        f"{ROLLOUT}__gpu_memory_utilization": 0.1,
        **({f"{ROLLOUT}__nnodes": 1, f"{ROLLOUT}__n_gpus_per_node": 1} if apart else {}),
        **sevens_reward(tmp_path),
    }
    assert train(overrides(tmp_path / "model", tiny_data, tmp_path / "run", **changes)) == 0
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4]
    ages = curve(tmp_path / "run", "training/staleness_max")
    assert ages[0] == 0
    assert max(ages) >= 1
    # The first batch is the policy's own: what vLLM says of its tokens is what the trainer computes.
    assert curve(tmp_path / "run", "training/rollout_probs_diff_max")[0] < 1e-5
