#!/usr/bin/env bash
# PPO with a critic on the tiny arithmetic task; arguments and variables are those of grpo.sh beside this file.
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/grpo.sh" \
    algorithm.adv_estimator=gae \
    critic.optim.lr=1e-3 \
    critic.model.enable_gradient_checkpointing=False \
    trainer.experiment_name=ppo \
    "$@"
