"""A run on more than one device: pools of workers on Ray, and the way of the weights between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.config.batch_plan import BatchPlan
from verl.config.schema import PPOConfig
from verl.core.checkpoint_engine.sync import SyncReport, check
from verl.core.controller.cluster import Cluster, share_plugins
from verl.core.controller.proxies import GroupModelEngine, GroupRolloutEngine
from verl.core.controller.ray_group import RayGroup, collect
from verl.core.controller.resources import ResourcePool, Role, plan_pools, reward_pool
from verl.core.controller.resources import check as check_room
from verl.core.controller.roles import Roles, build_rollout, same_numerics, sequence_ranks
from verl.core.controller.shared_paths import (
    CRITIC,
    POLICY,
    REWARD_MODEL,
    check_seen,
    local_paths,
    with_absolute_paths,
)
from verl.core.controller.worker import Facts, Job
from verl.errors import ConfigError

if TYPE_CHECKING:
    from verl.core.rollout_engine.service.client import ServerRolloutEngine

# Parts of weights for rollout servers that are made before the servers' client takes them.
PARTS_AHEAD = 2


@dataclass
class RayRoles(Roles):
    """Engines whose work Ray's workers do.

    generators: the workers of a pool of their own for generation; None where the trainer's workers or servers generate.
    servers: the rollout engine, where servers generate.
    """

    cluster: Cluster | None = None
    trainers: RayGroup | None = None
    generators: RayGroup | None = None
    servers: ServerRolloutEngine | None = None
    rollout_dtype: torch.dtype | None = None
    groups: list[RayGroup] = field(default_factory=list)

    def sync_weights(self, version: int) -> SyncReport:
        """Bring the actor's weights into every rollout engine; the slowest rank's figures are in `sync_metrics`."""
        if self.servers is not None:
            reports = self._to_servers(self.servers, version)
        elif self.generators is None:
            self.rollout.wake()
            reports = self.trainers.scatter("update_shared", [(version, self.rollout_dtype)] * self.trainers.size)
        else:
            sending = self.trainers.submit("send_weights", [(self.rollout_dtype,)] * self.trainers.size)
            receiving = self.generators.submit("receive_weights", [(version,)] * self.generators.size)
            reports = collect([*sending, *receiving])
            if self.verify:
                for rank, report in enumerate(reports[len(sending) :]):
                    check(reports[0].sums, report.sums, f"rollout worker {rank}")
        self.rollout.version = version
        total = SyncReport(
            seconds=max(r.seconds for r in reports),
            received_bytes=max(r.received_bytes for r in reports),
            peak_extra_bytes=max(r.peak_extra_bytes for r in reports),
            device_bytes=(max(r.device_bytes[0] for r in reports), max(r.device_bytes[1] for r in reports)),
        )
        self.sync_metrics = _metrics(total)
        return total

    def _to_servers(self, servers: ServerRolloutEngine, version: int) -> list[SyncReport]:
        """Each trainer's report. The first one's parts come through this process, from where all servers get them."""
        reports: list[SyncReport] = []

        def parts() -> Iterator[bytes]:
            arguments = [(self.rollout_dtype, servers.part_bytes)] * self.trainers.size
            ranks = range(self.trainers.size)
            for _, item in self.trainers.stream("export_parts", arguments, ranks, ahead=PARTS_AHEAD):
                if isinstance(item, SyncReport):
                    reports.append(item)
                else:
                    yield item

        if servers.config.server.shares_devices:
            self.trainers.call("give_back_unused")
        servers.wake()
        servers.load_parts(parts(), version)
        return reports

    def close(self) -> None:
        """End the workers and free their devices; a cluster that this run started goes too. Servers go on."""
        if self.servers is not None:
            self.servers.close()
        for group in self.groups:
            group.close()
        if self.cluster is not None:
            self.cluster.close()


def _metrics(report: SyncReport) -> dict[str, float]:
    metrics = {
        "perf/weights_received_gb": report.received_bytes / 2**30,
        "perf/weights_peak_extra_gb": report.peak_extra_bytes / 2**30,
    }
    allocated, reserved = report.device_bytes
    if allocated:
        metrics["perf/max_memory_allocated_gb"] = allocated / 2**30
        metrics["perf/max_memory_reserved_gb"] = reserved / 2**30
    return metrics


def build_on_ray(
    config: PPOConfig, plan: BatchPlan, model_path: str, tokenizer: Any, with_critic: bool, with_reference: bool
) -> RayRoles:
    """Check what Ray has, start a worker on each device, and let them build their engines.

    Raises:
        ConfigError: the devices are not there; a machine lacks a path that all need; or a model cannot be loaded.
    """
    cluster = Cluster(config)
    groups: list[RayGroup] = []
    try:
        device_type = _device_type(config, cluster)
        pools = plan_pools(config, with_critic, with_reference, device_type)
        # The reward model's worker comes last, when everything is loaded: is there room for it?
        check_room([*pools, *reward_pool(config, device_type)], cluster.nodes(), cluster.where)
        span = config.actor_rollout_ref.rollout.tensor_model_parallel_size
        timeout = config.actor_rollout_ref.nccl_timeout
        places = cluster.reserve(pools)
        _check_paths(config, model_path, cluster, with_critic, device_type)
        for pool, reserved in zip(pools, places):
            feeds = config.trainer.pipeline != "sync" and pool.roles == (Role.Rollout,)
            groups.append(RayGroup(pool, reserved, span, timeout, beside=feeds))
        share_plugins()
        facts = _build(with_absolute_paths(config), plan, model_path, groups)
        generators = _generators(groups)
        if generators is None:
            generation = _servers(config, torch.device(device_type), model_path, tokenizer)
        else:
            generation = _workers(generators, facts[groups.index(generators)], shared=generators is groups[0])
        return _roles(config, cluster, groups, facts, generation)
    except BaseException:
        for group in groups:
            group.close()
        cluster.close()
        raise


def _device_type(config: PPOConfig, cluster: Cluster) -> str:
    if config.trainer.device == "cuda" and not cluster.has_gpus():
        raise ConfigError(
            f"trainer.device=cuda: {cluster.where} has no GPU. Leave trainer.device out to run on CPU processes."
        )
    return "cuda" if config.trainer.device != "cpu" and cluster.has_gpus() else "cpu"


def _build(config: PPOConfig, plan: BatchPlan, model_path: str, groups: list[RayGroup]) -> list[list[Facts]]:
    """Let all pools build at once, and open the way of the weights if generation has a pool of its own; facts by group."""
    path = str(Path(model_path).absolute()) if Path(model_path).is_dir() else model_path
    building = []
    for group in groups:
        job = Job(config, plan, path, group.pool.engines, group.pool.generates)
        building += group.submit("build", [(job,)] * group.size)
    built = iter(collect(building))
    facts = [list(itertools.islice(built, group.size)) for group in groups]
    trainer, generator = groups[0], _generators(groups)
    if generator is not None and generator is not trainer:
        meeting = (generator.size + 1, trainer.address, trainer.port, config.actor_rollout_ref.nccl_timeout)
        calls = trainer.submit("open_channel", [(0, *meeting)], [0])
        calls += generator.submit("open_channel", [(rank + 1, *meeting) for rank in range(generator.size)])
        collect(calls)
    return facts


def _group_with(groups: list[RayGroup], engine: str) -> RayGroup | None:
    return next((group for group in groups if engine in group.pool.engines), None)


def _generators(groups: list[RayGroup]) -> RayGroup | None:
    """None: servers generate."""
    return next((group for group in groups if group.pool.generates), None)


@dataclass(frozen=True)
class _Generation:
    """The rollout engine, and what `RayRoles` has to know of it."""

    rollout: GroupRolloutEngine | ServerRolloutEngine
    same_numerics: bool
    notice: str | None
    generators: RayGroup | None = None
    servers: ServerRolloutEngine | None = None


def _workers(generators: RayGroup, facts: list[Facts], shared: bool) -> _Generation:
    """shared: whether they train too."""
    first = next(f for f in facts if f.generates)
    ranks = [rank for rank, f in enumerate(facts) if f.generates]
    rollout = GroupRolloutEngine(generators, ranks, first.rollout_dtype, shared=shared)
    return _Generation(rollout, first.same_numerics, first.notice, generators=None if shared else generators)


def _servers(config: PPOConfig, device: torch.device, model_path: str, tokenizer: Any) -> _Generation:
    """device: of the trainers, by kind."""
    servers, notice = build_rollout(config, device, model_path, tokenizer, None)
    return _Generation(servers, same_numerics(config, servers, device), notice, servers=servers)


def _roles(
    config: PPOConfig, cluster: Cluster, groups: list[RayGroup], facts: list[list[Facts]], generation: _Generation
) -> RayRoles:
    trainers, ranks_of = groups[0], sequence_ranks(config)
    others = {name: group for name in ("ref", "critic") if (group := _group_with(groups, name)) is not None}
    engines = {name: GroupModelEngine(group, name, ranks_of[name]) for name, group in others.items()}
    return RayRoles(
        actor=GroupModelEngine(trainers, "actor", ranks_of["actor"], facts[0][0].generation_config),
        rollout=generation.rollout,
        ref=engines.get("ref"),
        critic=engines.get("critic"),
        critic_apart=others.get("critic", trainers) is not trainers,
        same_numerics=generation.same_numerics,
        notices=_notices([group.pool for group in groups], cluster, generation.notice),
        verify=config.actor_rollout_ref.rollout.checkpoint_engine.verify,
        cluster=cluster,
        trainers=trainers,
        generators=generation.generators,
        servers=generation.servers,
        rollout_dtype=generation.rollout.dtype,
        groups=groups,
    )


def _notices(pools: list[ResourcePool], cluster: Cluster, of_rollout: str | None) -> list[str]:
    on_gpu = "GPU" in pools[0].per_worker
    where = "a Ray cluster started on this machine" if cluster.started else cluster.where
    one, more = ("GPU", "GPUs") if on_gpu else ("CPU process", "CPU processes")
    words = "; ".join(f"{pool.size} {one if pool.size == 1 else more} for {pool.words}" for pool in pools)
    notices = [f"{where}: {words}."]
    if not on_gpu:
        notices.append("no GPU is used: each device is a CPU process.")
    return notices + ([of_rollout] if of_rollout else [])


def _check_paths(config: PPOConfig, model_path: str, cluster: Cluster, with_critic: bool, device_type: str) -> None:
    """What workers read or write has to be on their machines. The reward model's may be any that has such a device."""
    here = Path(config.trainer.default_local_dir).expanduser().absolute()
    here.mkdir(parents=True, exist_ok=True)
    paths = {"trainer.default_local_dir": here} | local_paths(config, POLICY + (CRITIC if with_critic else ()))
    if Path(model_path).is_dir():  # it may be a download
        paths["actor_rollout_ref.model.path"] = Path(model_path).absolute()
    check_seen(paths, cluster.others_reserved())
    if config.reward_model.enable:
        check_seen(local_paths(config, REWARD_MODEL), cluster.others_with("GPU" if device_type == "cuda" else "CPU"))
