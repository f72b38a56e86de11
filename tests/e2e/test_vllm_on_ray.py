"""vLLM as the rollout engine of several CPU workers; run with `make test-vllm`."""

import importlib.util

import pytest
from tests.e2e.runs import curve, overrides, sevens_reward, train

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.vllm,
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vLLM is not installed"),
]

ROLLOUT = "actor_rollout_ref__rollout"
LAYOUTS = {
    "an engine on each device": {"trainer__n_gpus_per_node": 2},
    "one engine over two devices": {"trainer__n_gpus_per_node": 2, f"{ROLLOUT}__tensor_model_parallel_size": 2},
    "a device of its own": {f"{ROLLOUT}__nnodes": 1, f"{ROLLOUT}__n_gpus_per_node": 1},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vllm_generates_with_the_trainers_weights(layout, cluster, tiny_data, tmp_path):
    from examples.tiny import make_model

    tokenizer = make_model.character_tokenizer()
    make_model.tiny_qwen2(tokenizer, hidden=128, layers=2).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    common = {
        "data__val_files": "null",
        "actor_rollout_ref__actor__optim__lr": 1e-3,
        f"{ROLLOUT}__gpu_memory_utilization": 0.1,
        **sevens_reward(tmp_path),
    }
    many = {**common, **LAYOUTS[layout], f"{ROLLOUT}__name": "vllm"}
    assert train(overrides(tmp_path / "model", tiny_data, tmp_path / "many", **many)) == 0
    probs_diff = curve(tmp_path / "many", "training/rollout_probs_diff_max")
    assert len(probs_diff) == 2
    assert max(probs_diff) < 1e-5  # also after an update
    assert max(curve(tmp_path / "many", "actor/grad_norm")) > 0.01
