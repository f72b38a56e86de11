"""Checks of the devices of each role, from the config alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl.config.derived import all_devices, critic_devices, needs_critic, num_devices, reference_devices
from verl.config.schema import PPOConfig

if TYPE_CHECKING:
    from verl.config.validate import Findings

_REF = "actor_rollout_ref.ref"


def check_pools(config: PPOConfig, found: Findings) -> None:
    """Sizes of groups that divide the devices of their pool, and pools that can be."""
    _check_sharding(config, found)
    root = config.actor_rollout_ref
    found.problem(
        root.ref.nnodes > 0 and root.model.lora_rank > 0,
        f"{_REF}.nnodes={root.ref.nnodes}: with adapters (actor_rollout_ref.model.lora_rank={root.model.lora_rank}) the reference "
        f"is the actor's own model without them, so it has no devices of its own. Leave {_REF}.nnodes out.",
    )
    apart = {"critic": config.critic, _REF: root.ref}
    for section, part in apart.items():
        found.notice(
            part.nnodes == 0 and part.gpu_share < 1,
            f"{section}.gpu_share={part.gpu_share:g} has no effect without {section}.nnodes.",
        )
    for section, part in {"trainer": config.trainer, **apart}.items():
        _check_share(section, part, found)
    alone = all_devices(config) == 1
    for key, share in (("trainer", config.trainer.gpu_share), ("reward_model", config.reward_model.gpu_share)):
        found.notice(
            alone and share < 1, f"{key}.gpu_share={share:g} has no effect on one device, which all roles share."
        )


def _check_share(section: str, part: Any, found: Findings) -> None:
    """Two workers of a pool on one GPU would be two ranks of one process group there."""
    devices = part.nnodes * part.n_gpus_per_node
    found.problem(
        devices > 1 and part.gpu_share <= 0.5,
        f"{section}.gpu_share={part.gpu_share:g} on {devices} devices ({section}.nnodes={part.nnodes} x {section}.n_gpus_per_node="
        f"{part.n_gpus_per_node}): two of them could be parts of one GPU, where NCCL refuses two ranks. Set {section}.gpu_share "
        "above 0.5, or one device.",
    )


def _check_sharding(config: PPOConfig, found: Findings) -> None:
    root = config.actor_rollout_ref
    trainer = (num_devices(config.trainer), "training", "trainer", config.trainer)
    ref = (reference_devices(config), "reference", _REF, root.ref) if root.ref.nnodes else trainer
    critic = (critic_devices(config), "critic", "critic", config.critic) if config.critic.nnodes else trainer
    places = [("actor_rollout_ref.actor", root.actor.fsdp_config, trainer), (_REF, root.ref.fsdp_config, ref)]
    if needs_critic(config):
        places.append(("critic", config.critic.fsdp_config, critic))
    for section, fsdp, (devices, kind, pool, part) in places:
        where = f"({pool}.nnodes={part.nnodes} x {pool}.n_gpus_per_node={part.n_gpus_per_node})"
        size = fsdp.fsdp_size
        found.problem(
            size != -1 and (size < 1 or devices % size != 0),
            f"{section}.fsdp_config.fsdp_size={size} does not divide the {devices} {kind} devices {where}; -1 shards over all.",
        )
        size = fsdp.ulysses_sequence_parallel_size
        found.problem(
            devices % size != 0,
            f"{section}.fsdp_config.ulysses_sequence_parallel_size={size} does not divide the {devices} {kind} devices {where}.",
        )
