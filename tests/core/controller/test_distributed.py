"""What the roles of a run on several devices ask of the workers, in which order."""

from types import SimpleNamespace

import pytest

from verl.core.checkpoint_engine.sync import SyncReport
from verl.core.controller.distributed import RayRoles


class Trainers:
    """Two workers, the first of which has one part of the weights."""

    size = 2

    def __init__(self, calls):
        self.calls = calls

    def call(self, method):
        self.calls.append(method)

    def stream(self, method, arguments, ranks, ahead):
        self.calls.append(method)
        yield 0, b"part"
        yield 0, SyncReport(2.0, 0, 7)
        yield 1, SyncReport(1.0, 5, 3)


@pytest.mark.parametrize("shares", [True, False])
def test_trainers_give_memory_back_before_servers_on_their_devices_wake(shares):
    calls = []
    servers = SimpleNamespace(
        config=SimpleNamespace(server=SimpleNamespace(shares_devices=shares)),
        part_bytes=8,
        wake=lambda: calls.append("wake"),
        load_parts=lambda parts, version: calls.extend([*parts, version]),
    )
    roles = RayRoles(None, SimpleNamespace(version=0), trainers=Trainers(calls), servers=servers)
    report = roles.sync_weights(3)
    assert calls == [*(["give_back_unused"] if shares else []), "wake", "export_parts", b"part", 3]
    assert (report.seconds, report.received_bytes, report.peak_extra_bytes, roles.rollout.version) == (2.0, 5, 7, 3)
