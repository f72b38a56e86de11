"""Which roles a run has, on which devices, and whether the machine or the cluster has them. Imports no torch and no Ray."""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl.config.derived import all_devices
from verl.config.schema import PPOConfig
from verl.errors import ConfigError

# Of a CPU process that stands for a device. Two may share a core: they wait for each other most of the time anyway.
CPUS_OF_CPU_WORKER = 0.5
CPUS_OF_GPU_WORKER = 1.0
_ROUNDING = 1e-6


class Role(enum.Enum):
    """What a group of workers does. The first two hold one policy that trains and generates on the same devices."""

    ActorRolloutRef = "actor, rollout, ref"
    ActorRollout = "actor, rollout"
    ActorRef = "actor, ref"
    Actor = "actor"
    Rollout = "rollout"
    Ref = "ref"
    Critic = "critic"
    RewardModel = "reward model"

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of its model engines in a worker, by which a `GroupModelEngine` calls them."""
        return {
            Role.ActorRolloutRef: ("actor", "ref"),
            Role.ActorRollout: ("actor",),
            Role.ActorRef: ("actor", "ref"),
            Role.Actor: ("actor",),
            Role.Ref: ("ref",),
            Role.Critic: ("critic",),
        }.get(self, ())

    @property
    def generates(self) -> bool:
        return self in (Role.ActorRolloutRef, Role.ActorRollout, Role.Rollout)


@dataclass(frozen=True)
class ResourcePool:
    """Devices, and the roles that share them.

    One worker process on each device holds all of the pool's roles. keys: the config keys that set its size. per_worker:
    what a worker takes of Ray's resources. Below one GPU it may run beside a worker of another pool; a pool of several
    devices takes more than half of each, so that two of its ranks are never on one GPU, which NCCL refuses.
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
    def engines(self) -> tuple[str, ...]:
        """Names of all model engines in each worker."""
        return tuple(name for role in self.roles for name in role.engines)

    @property
    def generates(self) -> bool:
        return any(role.generates for role in self.roles)

    @property
    def words(self) -> str:
        return ", ".join(dict.fromkeys(role.value for role in self.roles))


def is_distributed(config: PPOConfig) -> bool:
    """Whether the run takes more than one device, and so runs on Ray."""
    return all_devices(config) > 1


def check_roles_asked(config: PPOConfig, with_critic: bool, with_reference: bool) -> None:
    """Raise ConfigError if devices are set apart for a role that the algorithm does not need."""
    critic, ref = config.critic, config.actor_rollout_ref.ref
    if critic.nnodes and not with_critic:
        raise ConfigError(
            f"critic.nnodes={critic.nnodes} sets devices apart for a critic, which algorithm.adv_estimator="
            f"{config.algorithm.adv_estimator} does not need. Leave critic.nnodes out, or take an estimator with a critic (gae)."
        )
    if ref.nnodes and not with_reference:
        raise ConfigError(
            f"actor_rollout_ref.ref.nnodes={ref.nnodes} sets devices apart for a reference, and nothing in this run needs one. "
            "Leave ref.nnodes out, or ask for a KL term (actor_rollout_ref.actor.use_kl_loss=True)."
        )


def plan_pools(config: PPOConfig, with_critic: bool, with_reference: bool, device_type: str) -> list[ResourcePool]:
    """The pools of a run, the trainer's first. device_type: cuda or cpu."""
    root = config.actor_rollout_ref
    trainer, rollout, ref, critic = config.trainer, root.rollout, root.ref, config.critic
    role = {
        (True, True): Role.ActorRolloutRef,
        (True, False): Role.ActorRollout,
        (False, True): Role.ActorRef,
        (False, False): Role.Actor,
    }[rollout.nnodes == 0 and rollout.name != "server", with_reference and ref.nnodes == 0]
    roles = (role, Role.Critic) if with_critic and critic.nnodes == 0 else (role,)

    def pool(name: str, section: str, part: Any, roles: tuple[Role, ...], share: float) -> ResourcePool:
        keys = f"{section}.nnodes={part.nnodes} x {section}.n_gpus_per_node={part.n_gpus_per_node}"
        keys += f" x {section}.gpu_share={share:g}" if share < 1 else ""
        return ResourcePool(name, part.nnodes, part.n_gpus_per_node, roles, keys, _per_worker(device_type, share))

    pools = [pool("trainer", "trainer", trainer, roles, trainer.gpu_share)]
    if rollout.nnodes:
        # Never on a part of a GPU: the weights come by NCCL, which refuses two ranks on one.
        pools.append(pool("rollout", "actor_rollout_ref.rollout", rollout, (Role.Rollout,), 1.0))
    if with_critic and critic.nnodes:
        pools.append(pool("critic", "critic", critic, (Role.Critic,), critic.gpu_share))
    if with_reference and ref.nnodes:
        pools.append(pool("ref", "actor_rollout_ref.ref", ref, (Role.Ref,), ref.gpu_share))
    return pools


def reward_pool(config: PPOConfig, device_type: str) -> list[ResourcePool]:
    """The device of the reward model, or its part of one beside the others; [] where there is none."""
    if not config.reward_model.enable:
        return []
    share = config.reward_model.gpu_share
    keys = "reward_model.enable=True" + (f", reward_model.gpu_share={share:g}" if share < 1 else "")
    return [ResourcePool("reward model", 1, 1, (Role.RewardModel,), keys, _per_worker(device_type, share))]


def _per_worker(device_type: str, gpu_share: float) -> dict[str, float]:
    if device_type == "cpu":
        return {"CPU": CPUS_OF_CPU_WORKER}
    return {"GPU": gpu_share, "CPU": CPUS_OF_GPU_WORKER}


@dataclass(frozen=True)
class Node:
    """A machine and what it has free."""

    name: str
    free: dict[str, float]


def place(pools: Sequence[ResourcePool], nodes: Sequence[Node]) -> bool:
    """Whether the nodes can hold the pools, each pool's `per_node` workers side by side on one node.

    A part of a GPU is a part of one: two halves that are left on two GPUs hold no worker that needs a whole one.
    """
    left = [_Room(node.free.get("CPU", 0.0), _gpus(node.free.get("GPU", 0.0))) for node in nodes]
    for pool in sorted(pools, key=lambda p: (-p.per_node, -p.per_worker.get("GPU", 0.0))):
        for _ in range(pool.nodes):
            fits = [(after, i) for i, room in enumerate(left) if (after := room.without(pool)) is not None]
            if not fits:
                return False
            after, i = min(fits, key=lambda fit: (sum(fit[0].gpus), fit[0].cpus))
            left[i] = after
    return True


@dataclass(frozen=True)
class _Room:
    """What a machine has left. gpus: the free part of each."""

    cpus: float
    gpus: tuple[float, ...]

    def without(self, pool: ResourcePool) -> _Room | None:
        """What is left when one node of the pool is here, each worker on the fullest GPU that has room; None: no room."""
        cpus = self.cpus - pool.per_worker.get("CPU", 0.0) * pool.per_node
        if cpus < -_ROUNDING:
            return None
        gpus, share = list(self.gpus), pool.per_worker.get("GPU", 0.0)
        for _ in range(pool.per_node if share else 0):
            fits = [free for free in gpus if free + _ROUNDING >= share]
            if not fits:
                return None
            gpus[gpus.index(min(fits))] -= share
        return _Room(cpus, tuple(gpus))


def _gpus(free: float) -> tuple[float, ...]:
    """Ray tells the sum alone: whole GPUs, and a part of one more."""
    whole = int(free + _ROUNDING)
    rest = free - whole
    return (1.0,) * whole + ((rest,) if rest > _ROUNDING else ())


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
