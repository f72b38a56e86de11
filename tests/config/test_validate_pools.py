"""Devices of each role: errors and notices from the config alone."""

import pytest

from verl.config.compose import compose
from verl.config.validate import validate
from verl.errors import ConfigError

REF = "actor_rollout_ref.ref"
GAE = "algorithm.adv_estimator=gae"


def notices_of(*words):
    return validate(compose(list(words), notify=lambda text: None))


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            [GAE, "critic.nnodes=1", "critic.n_gpus_per_node=3", "critic.fsdp_config.fsdp_size=2"],
            ["critic.fsdp_config.fsdp_size=2", "the 3 critic devices", "critic.nnodes=1 x critic.n_gpus_per_node=3"],
        ),
        (
            [f"{REF}.nnodes=1", "trainer.n_gpus_per_node=2", f"{REF}.n_gpus_per_node=3"]
            + [f"{REF}.fsdp_config.ulysses_sequence_parallel_size=2"],
            [f"{REF}.fsdp_config.ulysses_sequence_parallel_size=2", "the 3 reference devices", f"{REF}.nnodes=1"],
        ),
        ([f"{REF}.nnodes=1", "actor_rollout_ref.model.lora_rank=8"], [f"{REF}.nnodes=1", "lora_rank=8", "Leave"]),
        (
            ["trainer.n_gpus_per_node=2", "trainer.gpu_share=0.5"],
            ["trainer.gpu_share=0.5 on 2 devices", "NCCL refuses two ranks", "above 0.5"],
        ),
        (
            [GAE, "critic.nnodes=2", "critic.gpu_share=0.4"],
            ["critic.gpu_share=0.4 on 2 devices", "critic.nnodes=2 x critic.n_gpus_per_node=1"],
        ),
        (["reward_model.gpu_share=0"], ["reward_model.gpu_share=0"]),
    ],
)
def test_what_cannot_be(words, parts):
    with pytest.raises(ConfigError) as caught:
        notices_of(*words)
    for part in parts:
        assert part in str(caught.value)


def test_what_can_be():
    assert notices_of(GAE, "critic.nnodes=1", "critic.gpu_share=0.4", "trainer.gpu_share=0.6") == []
    two = "trainer.n_gpus_per_node=2", "trainer.gpu_share=0.51"
    assert notices_of(*two) == []
    # The trainer's two devices and the critic's three are groups of their own.
    words = GAE, *two, "critic.nnodes=1", "critic.n_gpus_per_node=3", "critic.fsdp_config.fsdp_size=3"
    assert notices_of(*words) == []


def test_what_has_no_effect():
    [notice] = notices_of(GAE, "critic.gpu_share=0.5")
    assert notice == "critic.gpu_share=0.5 has no effect without critic.nnodes."
    [notice] = notices_of("trainer.gpu_share=0.5")
    assert notice == "trainer.gpu_share=0.5 has no effect on one device, which all roles share."
