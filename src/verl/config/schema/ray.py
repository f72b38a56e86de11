"""Options of Ray, which runs everything on more than one device."""

from dataclasses import dataclass
from typing import Any

from verl.config.schema.options import opt


@dataclass
class RayInitConfig:
    address: str | None = opt(
        None,
        "an existing cluster: auto, or HOST:PORT; null: the one that RAY_ADDRESS names, else one is started on this machine",
    )
    num_cpus: int | None = opt(None, "CPUs that a cluster started here offers; null: those of this machine", min=1)
    runtime_env: dict[str, Any] = opt(
        {}, "Ray's runtime environment of the workers, such as py_executable, env_vars, working_dir"
    )


@dataclass
class RayConfig:
    ray_init: RayInitConfig = opt(RayInitConfig, "how Ray is reached")
