"""Console lines: plain, one a step, with every value readable."""

import io
import sys

import pytest

from verl.tracking.console import Console, format_line, format_value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (21.47, "21.470"),
        (0.0, "0.000"),
        (-0.0, "0.000"),
        (3, "3.000"),
        (0.0123, "0.012"),
        (0.001, "0.001"),
        (1e-6, "1.000e-06"),
        (-0.00042, "-4.200e-04"),
        (123456.7, "123456.700"),
        (3.12e12, "3.120e+12"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_values(value, text):
    assert format_value(value) == text


def test_line_is_the_documented_one():
    metrics = {"timing/gen": 21.47, "actor/reward_kl_penalty": 0.0, "response_length/mean": 239.1328}
    assert (
        format_line(metrics, 0)
        == "step:0 - timing/gen:21.470 - actor/reward_kl_penalty:0.000 - response_length/mean:239.133"
    )


def test_the_numbers_that_matter_come_first_and_the_rest_keeps_its_order():
    names = ["timing/reward", "timing/gen", "critic/rewards/mean", "actor/lr", "actor/entropy", "critic/score/mean", "val/test_score/x"]  # fmt: skip
    shown = [word.partition(":")[0] for word in format_line(dict.fromkeys(names, 1.0), 3).split(" - ")]
    first = ["step", "timing/gen", "val/test_score/x", "critic/score/mean", "actor/entropy"]
    assert shown == [*first, "timing/reward", "critic/rewards/mean", "actor/lr"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_pipe_gets_lines_and_nothing_else(capsys):
    console = Console(total_steps=10)
    console.print("step:1 - a:[red]1.000")
    console.progress({"critic/score/mean": 0.5}, 1)
    console.close()
    assert capsys.readouterr().out == "step:1 - a:[red]1.000\n"


def test_a_terminal_gets_a_bar_and_unbroken_lines(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    console = Console(total_steps=10, done_steps=3)
    console.progress({"critic/score/mean": 0.25}, 4)
    long = "step:4 - " + " - ".join(f"name{i}:[b]{i}.000" for i in range(40))
    console.print(long)
    console.close()
    text = terminal.getvalue()
    assert long in text, "not wrapped at the width, no markup read"
    assert "4/10" in text.replace(" ", "")
    assert "reward 0.250" in text
    console.print("after")
    assert terminal.getvalue().endswith("after\n")
