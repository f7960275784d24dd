# SPDX-License-Identifier: Apache-2.0
"""``dlrover-rl init``: a folder with a job that runs as it is, and the files of the cluster it is meant for."""

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal, get_args

from dlrover.python.rl.common.errors import ConfigError, InvalidJob
from dlrover.python.rl.common.names import check_job_name

Cluster = Literal["local", "ray", "kuberay", "slurm"]
CLUSTERS: tuple[Cluster, ...] = get_args(Cluster)

_PLACEHOLDER = "my-job"
_PROGRAMS = (".sh", ".sbatch")
_NO_MODULE = ".template"


def write_skeleton(name: str, cluster: Cluster) -> Path:
    """Write the folder ``name``. Raises InvalidJob if that is no name of a job, or exists already."""
    try:
        check_job_name(name)
    except ValueError as error:
        raise InvalidJob([ConfigError("NAME", str(error))]) from error
    folder = Path(name)
    if folder.exists():
        raise InvalidJob([ConfigError("NAME", f"{folder} exists already")])
    skeleton = files(__package__) / "skeleton"
    job = folder / "base" / "files" if cluster == "kuberay" else folder
    _copy(skeleton / "common", job, name)
    _copy(skeleton / cluster, folder, name)
    return folder


def _copy(source: Traversable, target: Path, name: str) -> None:
    if source.is_dir():
        for entry in source.iterdir():
            _copy(entry, target / entry.name.removesuffix(_NO_MODULE), name)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(source.read_text(encoding="utf-8").replace(_PLACEHOLDER, name), encoding="utf-8")
    if target.suffix in _PROGRAMS:
        target.chmod(0o755)
