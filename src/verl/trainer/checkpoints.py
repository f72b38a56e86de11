"""A run's whole state to disk and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from verl.config.compose import to_yaml
from verl.core.checkpoint_engine.disk import damage_named, load_file
from verl.core.checkpoint_engine.store import step_of, verify
from verl.data.batch import Ragged, SampleBatch
from verl.errors import CheckpointError
from verl.trainer.run import Run

STATE, SURPLUS, AHEAD = "trainer.json", "surplus.pt", "ahead.pt"


def save(run: Run, metrics: dict[str, float]) -> Path:
    """Write global_step_N for the steps done so far; it is whole or not there at all.

    With checkpoint.async_save it is there when `settle` has found it written.

    metrics: of step N. A run that is killed after this and before they are logged has them when it is resumed.
    """
    engines = {"actor": run.roles.actor} | ({} if run.roles.critic is None else {"critic": run.roles.critic})
    settle(run, wait=True)
    with run.saver.writing(run.step, list(engines.values())) as folder:
        for name, engine in engines.items():
            engine.save(folder / name)
        state = {
            "step": run.step,
            "sampler": run.sampler.state_dict(),
            "kl_control": run.kl_control.state_dict() if run.kl_control else None,
            "metrics": metrics,
            "owes_validation": run.owes_validation,
        }
        (folder / STATE).write_text(json.dumps(state, indent=1))
        (folder / "config.yaml").write_text(to_yaml(run.config))
        torch.save(random_state(), folder / "random.pt")
        if run.surplus is not None:
            torch.save(_plain(run.surplus), folder / SURPLUS)
        if run.ahead is not None:
            torch.save(run.ahead.state_dict(), folder / AHEAD)
    settle(run)
    return run.store.folder / f"global_step_{run.step}"


def settle(run: Run, wait: bool = False) -> None:
    """Name a checkpoint that the engines' threads have written meanwhile (checkpoint.async_save); with `wait`, when they have."""
    run.last_checkpoint = run.saver.settle(wait) or run.last_checkpoint


def save_if_new(run: Run, metrics: dict[str, float]) -> None:
    """Write the checkpoint of the steps done so far, unless there are none or it is there already."""
    settle(run, wait=True)
    if run.step > 0 and not (run.store.folder / f"global_step_{run.step}").is_dir():
        save(run, metrics)


def resume(run: Run, folder: Path) -> None:
    """Take over the state in `folder` (a global_step_N).

    Raises:
        CheckpointError: a part is missing, damaged, or does not fit this run.
    """
    path = folder / STATE
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: {folder} was not written by this trainer, or not wholly.")
    verify(folder)
    with damage_named(path):
        state = json.loads(path.read_text())
        if missing := [name for name in ("step", "sampler", "kl_control", "metrics") if name not in state]:
            raise ValueError(f"without {', '.join(missing)}")
    run.roles.actor.load(folder / "actor")
    if run.roles.critic is not None:
        if not (folder / "critic").is_dir():
            raise CheckpointError(
                f"{folder} has no critic, which algorithm.adv_estimator={run.estimator.name} needs: it was written by a run "
                "without one. Use the estimator of that run, or start anew with trainer.resume_mode=disable."
            )
        run.roles.critic.load(folder / "critic")
    run.step, run.last_checkpoint = state["step"], folder
    run.owes_validation = state.get("owes_validation", False)
    for notice in run.sampler.load_state_dict(state["sampler"]):
        run.tracker.notice(notice)
    if (folder / AHEAD).is_file():
        _resume_ahead(run, load_file(folder / AHEAD), state["sampler"])
    if run.kl_control is not None and state["kl_control"] is not None:
        run.kl_control.load_state_dict(state["kl_control"])
    if (folder / SURPLUS).is_file():
        run.surplus = _samples(load_file(folder / SURPLUS))
    with damage_named(folder / "random.pt"):
        restore_random_state(load_file(folder / "random.pt"))
    if folder.absolute().parent == run.store.folder.absolute():
        run.tracker.restore(state["metrics"], run.step)
    run.tracker.notice(f"resumed from {folder}: {step_of(folder)} steps are done.")


def _resume_ahead(run: Run, ahead: dict[str, Any], sampler: dict[str, Any]) -> None:
    """Take over what was generated ahead, which names prompts by their place in the data."""
    if (sampler["size"], sampler["fingerprint"]) != (len(run.prompts), run.prompts.fingerprint):
        run.tracker.notice("what had been generated ahead is left out, since it belongs to other training data.")
    elif {g["size"] for g in ahead["queue"]["books"]["groups"]} - {run.config.actor_rollout_ref.rollout.n}:
        run.tracker.notice(
            "what had been generated ahead is left out, since it has another number of samples a prompt."
        )
    elif run.config.trainer.pipeline == "sync":
        drawn = {g["uid"] for g in ahead["queue"]["books"]["groups"]} | {prompt[0] for prompt in ahead["prompts"]}
        if drawn:
            run.tracker.notice(
                f"{len(drawn)} prompts had been drawn ahead by an asynchronous pipeline and are left out: trainer.pipeline=sync "
                "goes on with those behind them. Resume with that pipeline to train on them."
            )
    else:
        run.left_ahead = ahead


def _plain(batch: SampleBatch) -> dict[str, Any]:
    """Columns as tensors and lists alone, which load without running code."""
    return {k: [c.values, c.lengths] if isinstance(c, Ragged) else {"column": c} for k, c in batch.columns.items()}


def _samples(columns: dict[str, Any]) -> SampleBatch:
    return SampleBatch({k: Ragged(*c) if isinstance(c, list) else c["column"] for k, c in columns.items()})


def random_state() -> dict[str, torch.Tensor]:
    """Torch's generators on this process."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # not so where workers do the computing
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
