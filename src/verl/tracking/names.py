"""Which metrics the pictures show, by name.

REWARD and ENTROPY are names for one thing: the first that was logged is taken. Of the others, all are shown.
"""

from __future__ import annotations

from collections.abc import Collection

REWARD = ("critic/score/mean", "reward/mean", "critic/rewards/mean")
ENTROPY = ("actor/entropy", "actor/entropy_loss")
KL = ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl")
GRAD_NORM = ("actor/grad_norm", "critic/grad_norm")
LOSS = ("actor/pg_loss", "critic/vf_loss")
RESPONSE_LENGTH = ("response_length/mean", "response_length/max")
CLIPPED = ("response_length/clip_ratio", "actor/pg_clipfrac")
MISMATCH = ("training/rollout_probs_diff_mean", "training/rollout_probs_diff_max")
THROUGHPUT = ("perf/throughput",)
VALIDATION = "val/test_score/"
TIMING = "timing/"
STEP_SECONDS = "timing/step"
WAIT_SECONDS = "timing/wait"  # logged where generation goes on beside the step's phases
BESIDE = "timing/gen"
STALENESS = ("training/staleness_mean", "training/staleness_max")
IDLE = ("perf/idle_share_generator", "perf/idle_share_trainer")
# A console line begins with the metrics whose names begin so, in this order.
LINE_BEGINS_WITH = ("timing/gen", VALIDATION, "critic/score/mean", "actor/entropy")


def first(candidates: Collection[str], logged: Collection[str]) -> str | None:
    """The first candidate that was logged."""
    return next((name for name in candidates if name in logged), None)
