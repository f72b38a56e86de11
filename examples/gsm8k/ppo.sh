#!/usr/bin/env bash
# PPO with a critic on GSM8K, as in docs/benchmarks.md; arguments and variables are those of grpo.sh beside this file.
set -euo pipefail
model="${MODEL:-Qwen/Qwen2.5-Coder-0.5B-Instruct}"
exec bash "$(dirname "${BASH_SOURCE[0]}")/grpo.sh" \
    algorithm.adv_estimator=gae \
    data.train_batch_size=256 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.clip_ratio_high=0.2 \
    actor_rollout_ref.rollout.n=4 \
    critic.model.path="$model" \
    critic.optim.lr=1e-5 \
    critic.ppo_mini_batch_size=64 \
    critic.ppo_max_token_len_per_gpu=65536 \
    trainer.critic_warmup=3 \
    trainer.experiment_name=ppo \
    trainer.test_freq=8 \
    "$@"
