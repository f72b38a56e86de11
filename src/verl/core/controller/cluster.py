"""The Ray cluster of a run: reached or started, checked against what the run asks for, and divided into pools."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from verl.algorithms.registry import PLUGIN_PREFIX
from verl.config.schema import PPOConfig, RayInitConfig
from verl.core.controller.resources import THIS_MACHINE, Node, ResourcePool, check, cluster_address, cpu_count, table
from verl.errors import ConfigError

# Ray may say that what was just given back is still taken.
SECONDS_FOR_PLACEMENT = 60


class Cluster:
    """A connection to Ray. started: whether this run started the cluster, and so takes it down."""

    def __init__(self, config: PPOConfig):
        """Connect to the cluster that the config or RAY_ADDRESS names, or start one on this machine.

        Raises:
            ConfigError: there is no cluster at that address.
        """
        address = cluster_address(config)
        self.started = address is None and not ray.is_initialized()
        if not ray.is_initialized():
            _connect(config.ray_kwargs.ray_init, address)
        self.where = THIS_MACHINE if address is None else f"the Ray cluster at {address}"
        self._groups: list[PlacementGroup] = []

    def nodes(self) -> list[Node]:
        """The machines that are up, with what no one has taken."""
        free = ray._private.state.available_resources_per_node()
        alive = [n for n in ray.nodes() if n["Alive"]]
        return [
            Node(f"{n['NodeManagerAddress']}", {k: free.get(n["NodeID"], {}).get(k, 0.0) for k in ("CPU", "GPU")})
            for n in sorted(alive, key=lambda n: (n["NodeManagerAddress"], n["NodeID"]))
        ]

    def others_reserved(self) -> dict[str, str]:
        """Addresses by Ray's id of the machines on which this run has devices, this one left out."""
        nodes = {node for group in self._groups for node in placement_group_table(group)["bundles_to_node_id"].values()}
        return {node: address for node, address in self.others_with("CPU").items() if node in nodes}

    def others_with(self, resource: str) -> dict[str, str]:
        """Addresses by Ray's id of the machines that have a CPU or GPU, this one left out."""
        here = ray.get_runtime_context().get_node_id()
        there = [n for n in ray.nodes() if n["Alive"] and n["Resources"].get(resource, 0) > 0]
        return {n["NodeID"]: n["NodeManagerAddress"] for n in there if n["NodeID"] != here}

    def has_gpus(self) -> bool:
        return ray.cluster_resources().get("GPU", 0) > 0

    def reserve(self, pools: Sequence[ResourcePool]) -> list[list[PlacementGroup]]:
        """For each pool one placement group a node, each with `per_node` bundles side by side on one machine.

        Raises:
            ConfigError: the cluster has less than that, with a table.
        """
        check(pools, self.nodes(), self.where)
        reserved = []
        for pool in pools:
            bundles = [dict(pool.per_worker) for _ in range(pool.per_node)]
            groups = [placement_group(bundles, strategy="STRICT_PACK") for _ in range(pool.nodes)]
            self._groups += groups
            reserved.append(groups)
        waiting = [group.ready() for group in self._groups]
        _, missing = ray.wait(waiting, num_returns=len(waiting), timeout=SECONDS_FOR_PLACEMENT)
        if missing:
            shown = table(pools, self.nodes())
            self.give_back()
            raise ConfigError(
                f"{self.where} did not give the devices within {SECONDS_FOR_PLACEMENT} s: {len(missing)} of {len(waiting)} "
                f"groups found no place. Another run may hold them.\n{shown}"
            )
        return reserved

    def give_back(self) -> None:
        """Free the devices."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups = []

    def close(self) -> None:
        """Free the devices, and stop the cluster if this run started it."""
        if not ray.is_initialized():
            return
        self.give_back()
        if self.started:
            ray.shutdown()


def _connect(options: RayInitConfig, address: str | None) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray would hide all GPUs from this process's own children; no worker of this project relies on it.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    arguments: dict[str, Any] = {"address": address or "local", "log_to_driver": False, "logging_level": logging.ERROR}
    if environment := {k: v for k, v in options.runtime_env.items() if v is not None}:
        arguments["runtime_env"] = environment
    if address is None:
        _let_workers_import_what_this_process_does()
        arguments |= {"include_dashboard": False, "num_cpus": options.num_cpus or cpu_count()}
    elif options.num_cpus is not None:
        raise ConfigError(
            f"ray_kwargs.ray_init.num_cpus={options.num_cpus} is for a cluster that this run starts, but it joins the one at "
            f"{address}. Leave it out."
        )
    try:
        if address is not None:
            _knock(address)
        ray.init(**arguments)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"There is no Ray cluster at {address}: {str(error).splitlines()[0]}. Start one with ray start --head (and ray "
            "start --address=... on the other machines), or correct ray_kwargs.ray_init.address."
        ) from error


def _let_workers_import_what_this_process_does() -> None:
    """Workers of a cluster that is started here begin in another folder: a PYTHONPATH such as "src" has to be absolute."""
    import verl

    given = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    paths = [str(Path(verl.__file__).parents[1]), *(str(Path(p).absolute()) for p in given)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


def _knock(address: str) -> None:
    """OSError if nothing listens at HOST:PORT: Ray itself would go on trying for many minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address:
        raise ValueError("an address of Ray's client; this process has to run on a machine of the cluster itself")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


def share_plugins() -> None:
    """Send what the user's own files define by value: the workers need not have the files."""
    from ray import cloudpickle

    for name, module in list(sys.modules.items()):
        if name.startswith(PLUGIN_PREFIX):
            cloudpickle.register_pickle_by_value(module)
