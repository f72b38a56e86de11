import pytest


@pytest.fixture(scope="module")
def cluster():
    """One cluster for all runs of a file: a run that finds Ray connected neither starts nor stops it."""
    from verl.config.compose import compose
    from verl.core.controller.cluster import Cluster

    started = Cluster(compose(["data.train_files=t", "ray_kwargs.ray_init.num_cpus=2"]))
    yield
    started.close()
