import time

from verl.trainer.steplog import StepLog


def test_a_prefix_goes_before_every_name():
    log = StepLog()
    log.add({"pg_loss": 1.0}, "actor/")
    log.add({"reward/failures": 0})
    assert log.metrics == {"actor/pg_loss": 1.0, "reward/failures": 0}


def test_seconds_of_a_phase_add_up_even_when_it_raises():
    log = StepLog()
    with log.time("gen"):
        time.sleep(0.02)
    first = log.seconds("gen")
    assert 0.02 <= first < 5
    try:
        with log.time("gen"):
            time.sleep(0.01)
            raise ValueError
    except ValueError:
        pass
    assert log.seconds("gen") >= first + 0.01
    assert log.metrics == {"timing/gen": log.seconds("gen")}
    assert log.seconds("reward") == 0.0
    assert log.elapsed() >= log.seconds("gen")
