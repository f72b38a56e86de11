import subprocess
import sys

import pytest

from verl.config.compose import compose
from verl.core.controller.resources import (
    Node,
    Role,
    check,
    check_roles_asked,
    check_this_machine,
    is_distributed,
    place,
    plan_pools,
    reward_pool,
    table,
)
from verl.errors import ConfigError

REF, ROLLOUT = "actor_rollout_ref.ref", "actor_rollout_ref.rollout"


def config_of(*words):
    return compose(["data.train_files=t.parquet", *words], notify=lambda text: None)


def pools_of(*words, with_critic=False, with_reference=False, device="cuda"):
    return plan_pools(config_of(*words), with_critic, with_reference, device)


def test_one_device_is_not_distributed():
    assert not is_distributed(config_of())
    assert is_distributed(config_of("trainer.n_gpus_per_node=2"))
    assert is_distributed(config_of("trainer.nnodes=2"))
    assert is_distributed(config_of(f"{ROLLOUT}.nnodes=1"))


def test_roles_share_one_pool():
    (pool,) = pools_of("trainer.nnodes=2", "trainer.n_gpus_per_node=4", with_critic=True)
    assert (pool.size, pool.roles) == (8, (Role.ActorRollout, Role.Critic))
    assert pool.per_worker == {"GPU": 1.0, "CPU": 1.0}


def test_generation_on_devices_of_its_own():
    words = "trainer.n_gpus_per_node=6", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=2"
    trainer, rollout = pools_of(*words, with_reference=True)
    assert (trainer.roles, trainer.size) == ((Role.ActorRef,), 6)
    assert (rollout.roles, rollout.size) == ((Role.Rollout,), 2)
    assert (trainer.engines, rollout.engines) == (("actor", "ref"), ())
    assert not trainer.roles[0].generates


def test_servers_generate_on_devices_that_the_run_does_not_have():
    (trainer,) = pools_of("trainer.n_gpus_per_node=2", f"{ROLLOUT}.name=server", with_reference=True, with_critic=True)
    assert (trainer.roles, trainer.size) == ((Role.ActorRef, Role.Critic), 2)
    assert not trainer.generates


def test_critic_and_reference_on_devices_of_their_own():
    words = "trainer.n_gpus_per_node=4", "critic.nnodes=2", "critic.n_gpus_per_node=3", f"{REF}.nnodes=1"
    trainer, critic, ref = pools_of(*words, with_critic=True, with_reference=True)
    assert [(p.name, p.size, p.per_node, p.engines) for p in (trainer, critic, ref)] == [
        ("trainer", 4, 4, ("actor",)),
        ("critic", 6, 3, ("critic",)),
        ("ref", 4, 4, ("ref",)),  # as many a machine as the trainer
    ]
    assert [p.generates for p in (trainer, critic, ref)] == [True, False, False]
    assert critic.keys == "critic.nnodes=2 x critic.n_gpus_per_node=3"
    (trainer,) = pools_of("trainer.n_gpus_per_node=4", with_critic=True, with_reference=True)
    assert trainer.engines == ("actor", "ref", "critic")
    assert is_distributed(config_of("critic.nnodes=1"))
    assert is_distributed(config_of(f"{REF}.nnodes=1"))


def test_devices_for_a_role_that_there_is_not():
    check_roles_asked(config_of("critic.nnodes=1", f"{REF}.nnodes=1"), True, True)
    with pytest.raises(ConfigError, match=r"critic\.nnodes=1 .*algorithm\.adv_estimator=grpo does not need.*Leave"):
        check_roles_asked(config_of("critic.nnodes=1", "algorithm.adv_estimator=grpo"), False, True)
    with pytest.raises(ConfigError, match=r"ref\.nnodes=2 .*nothing in this run needs one.*use_kl_loss=True"):
        check_roles_asked(config_of(f"{REF}.nnodes=2"), True, False)


def test_parts_of_gpus_are_parts_of_one():
    """Two workers with 0.6 of a GPU each leave 0.4 on each of two GPUs: room for two of 0.4, and for none of 0.8."""
    words = (
        "trainer.n_gpus_per_node=2",
        "trainer.gpu_share=0.6",
        "reward_model.enable=True",
        "reward_model.model.path=m",
    )

    def all_pools(*more):
        config = config_of(*words, *more)
        return [*plan_pools(config, False, True, "cuda"), *reward_pool(config, "cuda")]

    small = f"{REF}.nnodes=1", f"{REF}.n_gpus_per_node=1", f"{REF}.gpu_share=0.4"
    two = [node("a", GPU=2, CPU=8)]
    assert [p.per_worker.get("GPU") for p in all_pools(*small, "reward_model.gpu_share=0.4")] == [0.6, 0.4, 0.4]
    assert place(all_pools(*small, "reward_model.gpu_share=0.4"), two)
    assert not place(all_pools(*small, "reward_model.gpu_share=0.5"), two)
    assert not place(all_pools("reward_model.gpu_share=0.8", *small[:2], f"{REF}.gpu_share=0.01"), two)
    assert not place(all_pools(*small), two)  # the reward model asks for a whole one
    assert place(all_pools(*small), [node("a", GPU=3, CPU=8)])
    assert not place(all_pools("reward_model.gpu_share=0.4"), [node("a", GPU=1.5, CPU=8)])
    asked = " ".join(table(all_pools(), two).splitlines()[1].split())
    keys = "trainer.nnodes=1 x trainer.n_gpus_per_node=2 x trainer.gpu_share=0.6"
    assert asked == f"asked: trainer (actor, rollout, ref) 1.2 2 {keys}"


def test_the_table_names_the_pool_that_finds_no_place(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    words = "trainer.n_gpus_per_node=2", "critic.nnodes=1", "critic.n_gpus_per_node=3", "ray_kwargs.ray_init.num_cpus=2"
    with pytest.raises(
        ConfigError, match=r"asked: critic \(critic\) +1\.5 +critic\.nnodes=1 x critic\.n_gpus_per_node=3"
    ):
        check_this_machine(config_of(*words), True, False, gpus=0)


def test_rollout_nodes_have_as_many_devices_as_the_trainers_unless_said():
    _, rollout = pools_of("trainer.n_gpus_per_node=4", "rollout.nnodes=2")
    assert (rollout.nodes, rollout.per_node) == (2, 4)


def node(name, **free):
    return Node(name, {k: float(v) for k, v in free.items()})


def test_a_pools_devices_of_one_node_are_on_one_machine():
    pools = pools_of("trainer.n_gpus_per_node=4")
    assert place(pools, [node("a", GPU=4, CPU=8)])
    assert not place(pools, [node("a", GPU=3, CPU=8), node("b", GPU=3, CPU=8)])
    assert not place(pools, [node("a", GPU=4, CPU=3)])


def test_the_tightest_machine_that_fits_is_taken():
    pools = pools_of("trainer.n_gpus_per_node=4", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=2")
    nodes = [node("a", GPU=4, CPU=8), node("b", GPU=2, CPU=8)]
    assert place(pools, nodes)
    assert place(pools, nodes[::-1])
    assert not place(pools, [node("a", GPU=5, CPU=8)])


def test_what_is_missing_is_shown_in_a_table():
    pools = pools_of("trainer.nnodes=2", "trainer.n_gpus_per_node=8", f"{ROLLOUT}.nnodes=1")
    nodes = [node("10.0.0.1", GPU=8, CPU=64), node("10.0.0.2", GPU=4, CPU=64)]
    with pytest.raises(ConfigError) as caught:
        check(pools, nodes, "the Ray cluster at auto")
    assert str(caught.value).startswith("the Ray cluster at auto has less than this run asks for.\n")
    lines = [" ".join(line.split()) for line in table(pools, nodes).splitlines()]
    assert lines == [
        "GPU CPU",
        "asked: trainer (actor) 16 16 trainer.nnodes=2 x trainer.n_gpus_per_node=8",
        f"asked: rollout (rollout) 8 8 {ROLLOUT}.nnodes=1 x {ROLLOUT}.n_gpus_per_node=8",
        "free: 10.0.0.1 8 64",
        "free: 10.0.0.2 4 64",
    ]
    assert table(pools, nodes) in str(caught.value)


def test_two_cpu_processes_share_a_core_and_more_do_not(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    two = config_of("trainer.n_gpus_per_node=4", "ray_kwargs.ray_init.num_cpus=2")
    check_this_machine(two, False, False, gpus=0)
    five = config_of("trainer.n_gpus_per_node=5", "ray_kwargs.ray_init.num_cpus=2")
    with pytest.raises(ConfigError, match=r"asked: trainer \(actor, rollout\) +2\.5 +trainer\.nnodes=1"):
        check_this_machine(five, False, False, gpus=0)


def test_a_reward_model_takes_one_device_more(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    words = ["reward_model.enable=True", "reward_model.model.path=m", "ray_kwargs.ray_init.num_cpus=2"]
    three, four = (config_of(*words, f"trainer.n_gpus_per_node={n}") for n in (3, 4))
    check_this_machine(three, False, False, gpus=0)
    with pytest.raises(ConfigError, match=r"asked: reward model \(reward model\) +0\.5 +reward_model\.enable=True"):
        check_this_machine(four, False, False, gpus=0)
    (pool,) = reward_pool(three, "cuda")
    assert (pool.size, pool.per_worker) == (1, {"GPU": 1.0, "CPU": 1.0})
    assert pool.engines == ()
    assert not pool.roles[0].generates
    assert reward_pool(config_of(), "cuda") == []


def test_a_second_machine_needs_a_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r"ray start --head.*ray_kwargs\.ray_init\.address=auto"):
        check_this_machine(config_of("trainer.nnodes=2", "trainer.n_gpus_per_node=8"), False, False, gpus=8)


def test_one_device_never_imports_ray():
    code = "import sys, verl.trainer.main_ppo, verl.trainer.run, verl.trainer.pipelines; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
