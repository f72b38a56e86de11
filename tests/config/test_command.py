"""Flags, help, exit statuses, and the console command."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl import cli
from verl.config.command import handle_flags, run_main
from verl.config.help import default_text, help_text, markdown
from verl.config.keys import options
from verl.errors import ConfigError, DataError


def printed(argv: list[str], capsys: pytest.CaptureFixture) -> str:
    with pytest.raises(SystemExit) as caught:
        handle_flags(argv)
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_words_without_flags_pass():
    assert handle_flags(["a=1", "+b=2", "~c"]) == ["a=1", "+b=2", "~c"]


def test_help_lists_every_option(capsys):
    text = printed(["--help"], capsys)
    assert text.startswith("usage: ")
    assert "verl train" in text
    assert "verl plan" in text
    assert [name for name in options() if f"  {name}=" not in text] == []
    assert "actor_rollout_ref.rollout.top_p=1.0" in text
    assert "(above 0 and at most 1)" in text


@pytest.mark.parametrize("argv", [["--help", "top_k"], ["--help=top_k"], ["top_k", "-h"], ["--help", "a=b", "top_k"]])
def test_help_of_a_word(argv, capsys):
    text = printed(argv, capsys)
    lines = [line for line in text.splitlines() if line.startswith(("  actor", "  trainer"))]
    assert lines == ["  actor_rollout_ref.rollout.top_k=-1", "  actor_rollout_ref.rollout.val_kwargs.top_k=-1"]


def test_help_searches_names_then_texts():
    assert "trainer.seed=0" not in help_text("rollout.seed")
    assert "actor_rollout_ref.actor.clip_ratio_c" in help_text("dual clip")
    assert "Did you mean temperature?" in help_text("temperatur3")
    assert "The sections are data, actor_rollout_ref, " in help_text("nosuchword")
    helps = [line for line in help_text(width=70).splitlines() if line.startswith("      ")]
    assert len(helps) > len(options())
    assert max(map(len, helps)) <= 70


def test_default_text():
    assert [default_text(v) for v in (None, True, [0.9, 0.999], "x", {})] == ["null", "True", "[0.9,0.999]", "x", "{}"]


@pytest.mark.parametrize("argv", [["--cfg", "job", "trainer.seed=7"], ["trainer.seed=7", "--cfg=job", "--resolve"], ["-c", "job", "trainer.seed=7"]])  # fmt: skip
def test_cfg_prints_the_resolved_config(argv, capsys):
    text = printed(argv, capsys)
    assert "\n  seed: 7\n" in text
    assert "${" not in text


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--foo"], "--foo: not a flag"),
        (["--multirun"], "no sweep"),
        (["--config-name=x.yaml"], "no config files"),
        (["--cfg"], "takes job"),
        (["--cfg", "hydra"], "takes job"),
        (["--resolve"], "--cfg job"),
    ],
)
def test_wrong_flags(argv, part):
    with pytest.raises(ConfigError, match=part):
        handle_flags(argv)


def test_run_main(capsys):
    def user_error(argv):
        raise DataError("file x is missing")

    def stop(argv):
        raise KeyboardInterrupt

    assert run_main(lambda argv: None, []) == 0
    assert run_main(lambda argv: 3, []) == 3
    assert run_main(user_error, []) == 2
    assert capsys.readouterr().err == "error: file x is missing\n"

    def error_with_note(argv):
        error = DataError("file x is missing")
        error.add_note("nothing was saved yet")
        raise error

    assert run_main(error_with_note, []) == 2
    assert capsys.readouterr().err == "error: file x is missing\nnothing was saved yet\n"
    assert run_main(stop, []) == 130
    with pytest.raises(ZeroDivisionError):  # the program's own faults keep their traceback
        run_main(lambda argv: 1 // 0, [])


def test_version_and_usage(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("verl 0.")
    assert cli.main([]) == 0
    assert "verl train" in capsys.readouterr().out
    assert cli.main(["trian"]) == 2
    assert "Did you mean train?" in capsys.readouterr().err
    assert cli.main(["trainer.seed=3"]) == 2
    assert "verl train key=value" in capsys.readouterr().err


def test_plan_counts_rows_and_trains_nothing(tmp_path: Path, capsys):
    pq.write_table(pa.table({"prompt": ["x"] * 30, "data_source": ["tiny/x"] * 30}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"prompt": "x"}\n\n{"prompt": "y"}')
    words = [
        f"data.train_files=[{tmp_path}/a.parquet,{tmp_path}/b.jsonl]",
        "data.val_files=null",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    ]
    assert cli.main(["plan", *words]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].split()[:3] == ["training", "prompts", "32"]
    assert "steps an epoch" in out
    assert err == ""
    assert cli.main(["plan", *words, "data.train_max_samples=20"]) == 0
    assert out.splitlines()[0] != capsys.readouterr().out.splitlines()[0]
    assert cli.main(["plan", *words, "data.train_batch_size=64"]) == 2
    assert "is more than the 32 training prompts" in capsys.readouterr().err
    assert cli.main(["plan", "data.val_files=null", f"data.train_files={tmp_path}/none.parquet"]) == 2
    assert "none.parquet does not exist" in capsys.readouterr().err
    (tmp_path / "bad.parquet").write_text("not parquet")
    assert cli.main(["plan", "data.val_files=null", f"data.train_files={tmp_path}/bad.parquet"]) == 2
    assert "cannot be read as parquet" in capsys.readouterr().err


def test_plan_finds_wrong_columns_and_names(tmp_path: Path, capsys):
    pq.write_table(pa.table({"prompt": ["x"] * 8, "data_source": ["tiny/x"] * 8}), tmp_path / "a.parquet")
    words = ["plan", f"data.train_files={tmp_path}/a.parquet", "data.val_files=null", "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]  # fmt: skip
    assert cli.main(words) == 0
    assert "Not checked here: the model" in capsys.readouterr().out
    for word, said in (
        ("data.prompt_key=question", f"data.prompt_key=question: {tmp_path}/a.parquet has no such column"),
        ("data.reward_fn_key=source", "data.reward_fn_key=source: "),
        ("algorithm.adv_estimator=grppo", "Did you mean 'grpo'?"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=vanila", "Did you mean 'vanilla'?"),
        (f"data.val_files={tmp_path}/b.parquet", "data.val_files: "),
        (f"custom_reward_function.path={tmp_path}/reward.py", "there is no such file"),
    ):
        assert cli.main([*words, word]) == 2
        assert said in capsys.readouterr().err


def test_help_is_light():
    code = (
        "import sys, verl.cli\n"
        "try: verl.cli.main(['help', 'lr'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'ray', 'hydra', 'omegaconf', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_went_away_is_no_traceback():
    command = f"{sys.executable} -m verl.cli help | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""


def test_docs_are_current():
    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert page.read_text() == markdown(), "run: python -m verl.config.help --markdown > docs/config.md"


def test_docs_name_every_option():
    text = markdown()
    assert [key.name for key in options().values() if f"| `{key.field}` |" not in text] == []
