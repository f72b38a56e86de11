"""Combinations of fine-tuning's options: errors and notices."""

import pytest

from verl.config.compose import compose
from verl.config.schema import SFTConfig
from verl.config.validate_sft import validate_sft
from verl.errors import ConfigError


def make(*words):
    return compose(list(words), SFTConfig, notify=lambda text: None)


def test_defaults_are_fine():
    assert validate_sft(make()) == []


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("data.train_files=null", "data.train_files names no file"),
        ("data.val_files={a:1}", "data.val_files={'a': 1}: takes one file or a list of files"),
        ("data.train_max_samples=0", "leaves no conversation"),
        ("data.train_max_samples=9", "data.train_batch_size=256 is more than data.train_max_samples=9"),
        ("data.val_max_samples=0", "data.val_files=null"),
        ("trainer.logger=wandbb", "Did you mean wandb?"),
        ("trainer.resume_mode=resume_path", "needs trainer.resume_from_path"),
        ("trainer.resume_from_path=x/global_step_3", "only read with trainer.resume_mode=resume_path"),
        ("optim.lr=inf", "optim.lr=inf"),
        ("optim.betas=[0.9]", "optim.betas=[0.9]: takes two numbers"),
        ("checkpoint.save_contents=[model,optimiser]", "Did you mean optimizer?"),
        ("checkpoint.load_contents=[optimizer]", "checkpoint.load_contents=[model]"),
    ],
)
def test_errors(word, part):
    with pytest.raises(ConfigError) as caught:
        validate_sft(make(word))
    assert part in str(caught.value)


def test_all_problems_are_listed():
    with pytest.raises(ConfigError, match="2 problems in the configuration"):
        validate_sft(make("optim.lr=inf", "trainer.logger=x"))


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("trainer.test_freq=5", "trainer.test_freq=5 has no effect without data.val_files"),
        ("data.val_max_samples=5", "data.val_max_samples=5 has no effect without data.val_files"),
        ("checkpoint.save_contents=[model]", "checkpoint.save_contents is without optimizer, extra"),
    ],
)
def test_notices(word, part):
    [notice] = validate_sft(make(word))
    assert part in notice
