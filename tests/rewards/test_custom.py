"""Files as users write them, and the mistakes they make."""

from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from tests.tutorial_reward import TUTORIAL

from verl.errors import RewardError
from verl.rewards.custom import CustomFunction

CALL = {"data_source": "d", "solution_str": "#### 42", "ground_truth": "42", "extra_info": {}}


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="custom_reward.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write_file


def test_the_tutorials_function_runs_word_for_word(write):
    function = CustomFunction(write(TUTORIAL), "compute_reward").load()
    assert function(**CALL) == 1.0
    assert function(**{**CALL, "solution_str": "#### 1,234"}) == 0.0
    assert function(**{**CALL, "solution_str": "#### 1,234", "ground_truth": "1234"}) == 1.0
    assert function(**{**CALL, "solution_str": "42"}) == 0.0


def test_a_wrong_name_suggests_the_function_that_fits(write):
    with pytest.raises(RewardError, match=r"compute_score does not exist in .*Did you mean compute_reward\?"):
        CustomFunction(write(TUTORIAL), "compute_score").load()


def test_a_name_that_is_no_function(write):
    with pytest.raises(RewardError, match="compute_score is not a function"):
        CustomFunction(write("compute_score = 3"), "compute_score").load()


def test_missing_file_names_the_nearest(write, tmp_path):
    write(TUTORIAL)
    with pytest.raises(RewardError, match=r"there is no such file. Did you mean .*custom_reward.py\?"):
        CustomFunction(str(tmp_path / "custom_rewards.py"), "f").load()
    with pytest.raises(RewardError, match=r"Its folder .*nowhere does not exist"):
        CustomFunction(str(tmp_path / "nowhere" / "x.py"), "f").load()


@pytest.mark.parametrize(
    ("signature", "kwargs", "said"),
    [
        ("data_source, solution_str, ground_truth", {}, "does not take extra_info"),
        ("solution, truth", {}, "does not take data_source, solution_str, ground_truth, extra_info"),
        ("data_source, solution_str, ground_truth, extra_info, weight", {}, "needs weight"),
        ("data_source, solution_str, ground_truth, extra_info", {"weight": 1}, "does not take weight"),
        ("solution_str, /, **kwargs", {}, "takes solution_str by position only"),
        ("**kwargs", {"solution_str": 1}, "reward_kwargs sets solution_str"),
    ],
)
def test_wrong_signatures_are_found_before_the_first_call(write, signature, kwargs, said):
    path = write(f"def f({signature}): return 1.0")
    with pytest.raises(RewardError, match=said):
        CustomFunction(path, "f", kwargs).load()


@pytest.mark.parametrize(
    ("signature", "kwargs"),
    [
        ("**kwargs", {}),
        ("solution_str, **kwargs", {"weight": 2}),
        ("data_source, solution_str, ground_truth, extra_info=None", {}),
        ("data_source, solution_str, ground_truth, extra_info, weight=1", {}),
        ("*, data_source, solution_str, ground_truth, extra_info, weight", {"weight": 2}),
    ],
)
def test_right_signatures(write, signature, kwargs):
    assert CustomFunction(write(f"def f({signature}): return 1.0"), "f", kwargs).load()(**CALL) == 1.0


def test_reward_kwargs_reach_the_function(write):
    path = write("def f(weight, **kwargs): return weight * 2")
    assert CustomFunction(path, "f", {"weight": 1.5}).load()(**CALL) == 3.0


def test_imports_beside_the_file(write):
    write("VALUE = 0.25", "own_helper_of_the_test.py")
    absolute = write("from own_helper_of_the_test import VALUE\ndef f(**k): return VALUE", "a.py")
    relative = write("from .own_helper_of_the_test import VALUE\ndef f(**k): return VALUE", "b.py")
    write("VALUE = 0.25", "another_helper_of_the_test.py")
    late = write("def f(**k):\n    from another_helper_of_the_test import VALUE\n    return VALUE", "my-late.file.py")
    assert [CustomFunction(path, "f").load()(**CALL) for path in (absolute, relative, late)] == [0.25] * 3


def test_imports_across_a_package(write):
    write("", "pack/__init__.py")
    write("", "pack/rewards/__init__.py")
    write("VALUE = 0.5", "pack/shared.py")
    path = write("from ..shared import VALUE\ndef f(**k): return VALUE", "pack/rewards/mine.py")
    assert CustomFunction(path, "f").load()(**CALL) == 0.5


def test_a_neighbour_does_not_hide_a_library(write):
    write("BROKEN = True", "fractions.py")
    CustomFunction(write("def f(**k): return 1"), "f").load()
    # Looked for, not loaded again: that would leave every Fraction of this process without its class.
    assert "BROKEN" not in Path(PathFinder.find_spec("fractions").origin).read_text()


def test_a_file_that_cannot_be_imported_shows_its_line(write):
    with pytest.raises(RewardError, match=r"(?s)cannot be imported: ModuleNotFoundError.*import no_such_module_here"):
        CustomFunction(write("import no_such_module_here\ndef f(**k): return 1"), "f").load()


def test_dataclasses_and_classes_with_call_work(write):
    path = write(
        "from dataclasses import dataclass\n@dataclass\nclass Scorer:\n    value: float = 0.5\n"
        "    def __call__(self, data_source, solution_str, ground_truth, extra_info): return self.value\nf = Scorer()"
    )
    assert CustomFunction(path, "f").load()(**CALL) == 0.5
