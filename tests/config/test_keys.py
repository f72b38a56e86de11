"""The schema as a list of keys."""

from verl.config.keys import holder, options, schema_keys
from verl.config.suggest import did_you_mean, nearest_keys, nearest_words


def test_every_field_has_help_and_known_types():
    for name, key in schema_keys().items():
        assert key.help, name
        assert key.is_section or "<class" not in key.type_words, name


def test_default_values_are_within_their_limits():
    from verl.config.limits import limit_problem

    literal = [key for key in options().values() if not (isinstance(key.default, str) and "${" in key.default)]
    assert [limit_problem(key, key.default) for key in literal if limit_problem(key, key.default)] == []


def test_words():
    keys = options()
    assert keys["trainer.total_training_steps"].type_words == "a whole number or null"
    assert keys["actor_rollout_ref.actor.optim.betas"].type_words == "a list of numbers"
    assert keys["actor_rollout_ref.rollout.top_p"].limit_words == "above 0 and at most 1"
    assert keys["critic.optim.lr"].default == 1e-5
    assert "critic.optim" not in keys


def test_holder():
    assert holder("data.apply_chat_template_kwargs.a.b").name == "data.apply_chat_template_kwargs"
    assert holder("data.seed.a") is None
    assert holder("data.seed") is None


def test_suggestions():
    assert nearest_words("autoo", ("auto", "disable")) == ["auto"]
    assert nearest_words("zzz", ("auto", "disable")) == []
    assert nearest_keys("critic.lr", options())[0] == "critic.optim.lr"
    assert did_you_mean([]) == ""
    assert did_you_mean(["a", "b", "c"]) == " Did you mean a, b or c?"
