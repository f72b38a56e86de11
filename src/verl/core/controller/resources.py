"""Which roles a run has, on which devices, and whether the machine or the cluster has them. Imports no torch and no Ray."""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from dataclasses import dataclass

from verl.config.derived import all_devices
from verl.config.schema import PPOConfig
from verl.errors import ConfigError

# Of a CPU process that stands for a device. Two may share a core: they wait for each other most of the time anyway.
CPUS_OF_CPU_WORKER = 0.5
CPUS_OF_GPU_WORKER = 1.0


class Role(enum.Enum):
    """What a group of workers does. The first two hold one policy that trains and generates on the same devices."""

    ActorRolloutRef = "actor, rollout, ref"
    ActorRollout = "actor, rollout"
    ActorRef = "actor, ref"
    Actor = "actor"
    Rollout = "rollout"
    Critic = "critic"
    RewardModel = "reward model"

    @property
    def trains(self) -> bool:
        return self not in (Role.Rollout, Role.RewardModel)

    @property
    def generates(self) -> bool:
        return self in (Role.ActorRolloutRef, Role.ActorRollout, Role.Rollout)


@dataclass(frozen=True)
class ResourcePool:
    """Devices, and the roles that share them.

    One worker process on each device holds all of the pool's roles. keys: the config keys that set its size. per_worker:
    what a worker takes of Ray's resources.
    """

    name: str
    nodes: int
    per_node: int
    roles: tuple[Role, ...]
    keys: str
    per_worker: dict[str, float]

    @property
    def size(self) -> int:
        return self.nodes * self.per_node

    @property
    def words(self) -> str:
        return ", ".join(dict.fromkeys(role.value for role in self.roles))


def is_distributed(config: PPOConfig) -> bool:
    """Whether the run takes more than one device, and so runs on Ray."""
    return all_devices(config) > 1


def plan_pools(config: PPOConfig, with_critic: bool, with_reference: bool, device_type: str) -> list[ResourcePool]:
    """The pools of a run, the trainer's first. device_type: cuda or cpu."""
    per_worker = {"GPU": 1.0, "CPU": CPUS_OF_GPU_WORKER} if device_type == "cuda" else {"CPU": CPUS_OF_CPU_WORKER}
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    shared = rollout.nnodes == 0
    role = {
        (True, True): Role.ActorRolloutRef,
        (True, False): Role.ActorRollout,
        (False, True): Role.ActorRef,
        (False, False): Role.Actor,
    }[shared, with_reference]
    roles = (role, Role.Critic) if with_critic else (role,)
    keys = f"trainer.nnodes={trainer.nnodes} x trainer.n_gpus_per_node={trainer.n_gpus_per_node}"
    pools = [ResourcePool("trainer", trainer.nnodes, trainer.n_gpus_per_node, roles, keys, per_worker)]
    if not shared:
        section = "actor_rollout_ref.rollout"
        keys = f"{section}.nnodes={rollout.nnodes} x {section}.n_gpus_per_node={rollout.n_gpus_per_node}"
        pools.append(
            ResourcePool("rollout", rollout.nnodes, rollout.n_gpus_per_node, (Role.Rollout,), keys, per_worker)
        )
    return pools


def reward_pool(config: PPOConfig, device_type: str) -> list[ResourcePool]:
    """The device of the reward model, which is beside the others'; [] where there is none."""
    if not config.reward_model.enable:
        return []
    per_worker = {"GPU": 1.0, "CPU": CPUS_OF_GPU_WORKER} if device_type == "cuda" else {"CPU": CPUS_OF_CPU_WORKER}
    keys = "reward_model.enable=True"
    return [ResourcePool("reward model", 1, 1, (Role.RewardModel,), keys, per_worker)]


@dataclass(frozen=True)
class Node:
    """A machine and what it has free."""

    name: str
    free: dict[str, float]


def place(pools: Sequence[ResourcePool], nodes: Sequence[Node]) -> bool:
    """Whether the nodes can hold the pools, each pool's `per_node` workers side by side on one node."""
    left = [dict(node.free) for node in nodes]
    for pool in sorted(pools, key=lambda p: -p.per_node):
        for _ in range(pool.nodes):
            need = {name: amount * pool.per_node for name, amount in pool.per_worker.items()}
            fits = [free for free in left if all(free.get(k, 0.0) + 1e-9 >= v for k, v in need.items())]
            if not fits:
                return False
            chosen = min(fits, key=lambda free: [free.get(k, 0.0) for k in need])
            for name, amount in need.items():
                chosen[name] = chosen.get(name, 0.0) - amount
    return True


def check(pools: Sequence[ResourcePool], nodes: Sequence[Node], where: str) -> None:
    """Raise ConfigError, with a table of what is asked and what is there, if the pools do not fit.

    where: "this machine", or the cluster in words.
    """
    if place(pools, nodes):
        return
    mend = "Lower the numbers, or run on more devices"
    if where == THIS_MACHINE:
        mend += ": start a Ray cluster (ray start --head, then ray start --address=... on the others) and set "
        mend += "ray_kwargs.ray_init.address=auto"
    raise ConfigError(f"{where} has less than this run asks for.\n{table(pools, nodes)}\n{mend}.")


THIS_MACHINE = "this machine"


def table(pools: Sequence[ResourcePool], nodes: Sequence[Node]) -> str:
    """What is asked, and what each machine has, as aligned text."""
    kinds = sorted({kind for pool in pools for kind in pool.per_worker}, reverse=True)
    rows = [("", *kinds, "")]
    for pool in pools:
        amounts = [_number(pool.per_worker.get(kind, 0.0) * pool.size) for kind in kinds]
        rows.append((f"asked: {pool.name} ({pool.words})", *amounts, pool.keys))
    for node in nodes:
        rows.append((f"free:  {node.name}", *(_number(node.free.get(kind, 0.0)) for kind in kinds), ""))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        numbers = "  ".join(f"{cell:>{width}}" for cell, width in zip(row[1:-1], widths[1:-1]))
        lines.append(f"  {row[0]:<{widths[0]}}  {numbers}  {row[-1]}".rstrip())
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:g}"


def cluster_address(config: PPOConfig) -> str | None:
    """Of the cluster to join; None: the run starts one on this machine."""
    return config.ray_kwargs.ray_init.address or os.environ.get("RAY_ADDRESS") or None


def check_this_machine(config: PPOConfig, with_critic: bool, with_reference: bool, gpus: int) -> None:
    """The same check for a cluster that this run would start itself, before Ray or anything else is loaded.

    gpus: usable here; 0 takes CPU processes.
    """
    device_type = "cuda" if gpus else "cpu"
    pools = [*plan_pools(config, with_critic, with_reference, device_type), *reward_pool(config, device_type)]
    cpus = config.ray_kwargs.ray_init.num_cpus or cpu_count()
    check(pools, [Node(THIS_MACHINE, {"CPU": float(cpus), **({"GPU": float(gpus)} if gpus else {})})], THIS_MACHINE)


def without_nvidia_driver() -> bool:
    """Whether this machine surely has no usable NVIDIA GPU, as far as one can tell without torch."""
    return not any(os.path.exists(path) for path in ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg"))


def cpu_count() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
