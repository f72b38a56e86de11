"""What config and files alone tell of a run, found in a fraction of a second: torch is not imported here."""

from __future__ import annotations

from verl.config.batch_plan import BatchPlan
from verl.config.derived import needs_critic, needs_reference, num_devices
from verl.config.schema import PPOConfig
from verl.core.controller.resources import (
    check_this_machine,
    cluster_address,
    is_distributed,
    without_nvidia_driver,
)
from verl.data.reading import check_parquet_columns, count_rows, list_files
from verl.rewards.custom import find_file


def precheck(config: PPOConfig, with_critic: bool | None = None) -> BatchPlan:
    """The batch plan by the number of rows; a run that drops overlong prompts may have fewer.

    with_critic: whether there is a value model; None goes by the built-in estimators' names.

    Raises:
        UserError: the run asks for more CPU processes than this machine has room for; a file is missing or lacks a column;
            or the sizes do not fit each other.
    """
    _check_devices(config, with_critic)
    data, custom = config.data, config.custom_reward_function.path
    if custom is not None:
        find_file(custom)
    required = {"data.prompt_key": data.prompt_key}
    model_alone = config.reward_model.enable and config.reward_model.combine == "replace"
    # Each of these may score prompts without a data source.
    if custom is None and not config.trainer.plugins and not model_alone:
        required["data.reward_fn_key"] = data.reward_fn_key
    train = list_files(data.train_files, "data.train_files")
    val = list_files(data.val_files, "data.val_files") if data.val_files else []
    for file in [*train, *val]:
        check_parquet_columns(file, required)
    rows = sum(count_rows(file) for file in train)
    limit = data.train_max_samples
    rows = min(rows, limit) if limit > 0 else rows
    return BatchPlan.make(config, rows, num_devices(config.trainer), with_critic=with_critic)


def _check_devices(config: PPOConfig, with_critic: bool | None) -> None:
    """Where there is no GPU to ask torch about, and this run would start its own cluster."""
    no_gpu = config.trainer.device == "cpu" or (config.trainer.device is None and without_nvidia_driver())
    if is_distributed(config) and cluster_address(config) is None and no_gpu:
        with_critic = needs_critic(config) if with_critic is None else with_critic
        check_this_machine(config, with_critic, needs_reference(config), gpus=0)
