"""Options of the pipelines in which generation and training overlap."""

from dataclasses import dataclass

from verl.config.schema.options import opt


@dataclass
class AsyncTrainingConfig:
    staleness_threshold: float = opt(
        1.0,
        "fully_async: how far generation may run ahead, in batches of train_batch_size x trigger_parameter_sync_step prompts "
        "beyond the policy's own; 0: synchronous to the bit",
        min=0,
    )
    trigger_parameter_sync_step: int = opt(
        1, "fully_async: training steps between two updates of the rollout engine's weights", min=1
    )
    partial_rollout: bool = opt(
        True,
        "fully_async: at an update of the weights stop what is in generation and go on with it under the new ones; False: "
        "wait until it is finished",
    )
    require_batches: int | None = opt(
        None,
        "fully_async: mini-batches (of ppo_mini_batch_size prompts) with which the trainer begins while the rest of the step is "
        "still generated; null: all of the step's",
        min=1,
    )
    watchdog_seconds: float = opt(300.0, "say who waits for whom when no sample has come or gone for so long", above=0)
