"""What the doctor looks at: software, driver, processor and store, none of which needs TensorFlow; then TensorFlow itself.

Nothing here raises: what is missing or broken is part of the answer.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import runpy
import sqlite3
import sys
import urllib.error
import urllib.request
from contextlib import closing
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mp_hydra import hardware
from mp_hydra.doctor.driver import Driver, ask_driver

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PACKAGES = ("mp_hydra", "tensorflow", "keras", "numpy", "hydra-core", "mlflow", "nvidia-ml-py")
_SECONDS_FOR_A_SERVER = 3.0


@dataclass(frozen=True)
class Software:
    """Installed software, from the packages' records and without importing any of it.

    Attributes:
        python: version of the interpreter.
        versions: by package; None where it is not installed.
        cuda_packages: NVIDIA's CUDA libraries that pip installed, by package.
        build: what TensorFlow was built for, as `tf.sysconfig.get_build_info`; None where that is not known.
        unmet: requirements of the packages that what is installed does not meet, one line each.
        keras: the settings in keras.json and KERAS_BACKEND.
    """

    python: str
    versions: Mapping[str, str | None]
    cuda_packages: Mapping[str, str] = field(default_factory=dict)
    build: Mapping[str, Any] | None = None
    unmet: tuple[str, ...] = ()
    keras: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cpu:
    """The processor: `flags` are those of `mp_hydra.hardware.CPU_FLAGS` that every core has."""

    model: str | None
    usable_cores: int | None
    memory_bytes: int | None
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Store:
    """The MLflow store that a run would use: its address, whether a run could be recorded there, and what was seen."""

    uri: str | None
    reachable: bool
    said: str


@dataclass(frozen=True)
class TensorFlow:
    """TensorFlow, imported.

    Attributes:
        problem: why it could not be imported; None where it was.
        gpus: its GPUs, each with `name` and `compute_capability` ([major, minor]); None for what it does not tell.
        tf32_allowed: the TF32 switch as TensorFlow starts; the option `precision` sets it for a run.
        auto_jit: XLA's automatic clustering, "off" or a setting.
        onednn: whether oneDNN kernels are used on the CPU; None where it does not tell.
        loaded: versions of CUDA libraries in this process, by name.
        said: what it wrote to stderr meanwhile.
    """

    problem: str | None = None
    gpus: tuple[Mapping[str, Any], ...] = ()
    tf32_allowed: bool | None = None
    auto_jit: str | None = None
    onednn: bool | None = None
    loaded: Mapping[str, str] = field(default_factory=dict)
    said: str = ""


@dataclass(frozen=True)
class Facts:
    """Everything; `tensorflow` is None as long as it has not been imported."""

    software: Software
    cpu: Cpu
    driver: Driver
    store: Store
    environ: Mapping[str, str] = field(default_factory=dict)
    tensorflow: TensorFlow | None = None


def gather(*, uri: str | None = None) -> Facts:
    """What can be known without importing TensorFlow.

    Args:
        uri: the MLflow store; None for that of a run.
    """
    cpu = hardware.cpu()
    return Facts(
        software=software(),
        cpu=Cpu(
            cpu["model"], cpu["usable_cores"] or cpu["logical_cores"], hardware.physical_memory(), tuple(cpu["flags"])
        ),
        driver=ask_driver(),
        store=store(uri),
        environ=hardware.relevant_variables(os.environ),
    )


def software() -> Software:
    """The installed packages."""
    versions = {name: _version(name) for name in PACKAGES}
    if versions["tensorflow"] is None:  # it comes under other names, too
        versions["tensorflow"] = next(filter(None, map(_version, ("tensorflow-cpu", "tf-nightly"))), None)
    return Software(
        python=platform.python_version(),
        versions=versions,
        cuda_packages=_cuda_packages(),
        build=build_info(),
        unmet=tuple(unmet()),
        keras=keras_settings(),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cuda_packages() -> dict[str, str]:
    found = {}
    for distribution in metadata.distributions():
        name = str(distribution.metadata["Name"] or "").lower()
        if re.fullmatch(r"nvidia-(cudnn|cuda-runtime|cublas|cufft|cusolver|cusparse|nccl|cuda-nvcc)(-cu\d+)?", name):
            found[name] = distribution.version
    return dict(sorted(found.items()))


def build_info() -> dict[str, Any] | None:
    """What TensorFlow was built for, read from its file: importing TensorFlow takes seconds, and may fail."""
    try:
        spec = util.find_spec("tensorflow")
        folder = next(iter(spec.submodule_search_locations or ())) if spec is not None else None
        if folder is None:
            return None
        found = runpy.run_path(str(Path(folder) / "python" / "platform" / "build_info.py"))
        return dict(found["build_info"])
    except Exception:  # noqa: BLE001 - a file of another package, in whatever state it is
        return None


def unmet() -> list[str]:
    """Requirements of mp_hydra, TensorFlow and Keras that the installed versions do not meet."""
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:
        return []
    lines = []
    for package in ("mp_hydra", "tensorflow", "keras"):
        for text in _requirements(package):
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                continue
            cuda = requirement.name.startswith("nvidia-")
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": "and-cuda" if cuda else ""})
            installed = _version(requirement.name)
            if not applies or (installed is None and cuda):
                continue
            if installed is None:
                lines.append(f"{package} requires {requirement.name}, which is not installed")
            elif not requirement.specifier.contains(installed, prereleases=True):
                lines.append(
                    f"{package} requires {requirement.name} {requirement.specifier}, and {installed} is installed"
                )
    return lines


def _requirements(package: str) -> Iterable[str]:
    try:
        return metadata.requires(package) or ()
    except metadata.PackageNotFoundError:
        return ()


def keras_settings() -> dict[str, Any]:
    """What keras.json and the environment make Keras start with."""
    folder = os.environ.get("KERAS_HOME")
    path = Path(folder) / "keras.json" if folder else Path.home() / ".keras" / "keras.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = {}
    settings = found if isinstance(found, dict) else {}
    backend = os.environ.get("KERAS_BACKEND") or settings.get("backend", "tensorflow")
    return {**settings, "backend": backend}


def store(uri: str | None) -> Store:
    """Whether a run could be recorded; nothing is created."""
    from mp_hydra.errors import ConfigError
    from mp_hydra.tracking import Settings, store_uri
    from mp_hydra.tracking.store import public, sqlite_path

    try:
        address = store_uri(Settings(uri=uri))
        database = sqlite_path(address)
    except (ConfigError, ImportError, RuntimeError) as error:  # RuntimeError: there is no home directory
        return Store(uri, reachable=False, said=str(error))
    return _server(public(address), address) if database is None else _file(address, database)


def _file(uri: str, database: Path) -> Store:
    if not database.exists():
        folder = next((parent for parent in database.parents if parent.exists()), Path("/"))
        if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
            return Store(uri, reachable=True, said="not there yet; the first run creates it")
        return Store(uri, reachable=False, said=f"not there, and it cannot be created: {folder} is not writable")
    said = "it is there"
    try:
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True, timeout=1)) as connection:
            connection.execute("SELECT count(*) FROM experiments").fetchone()
    except sqlite3.Error as error:
        if "no such table" not in str(error):
            return Store(uri, reachable=False, said=f"it cannot be read: {error}")
        said = "a database without MLflow's tables; the first run creates them"
    if not os.access(database, os.W_OK):
        return Store(uri, reachable=False, said="it is there, but may not be written to")
    return Store(uri, reachable=True, said=said)


def _server(shown: str, uri: str) -> Store:
    request = urllib.request.Request(f"{uri}/health")  # noqa: S310 - http(s) alone gets here
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS_FOR_A_SERVER) as answer:  # noqa: S310
            return Store(shown, reachable=True, said=f"it answers with {answer.status}")
    except urllib.error.HTTPError as error:
        needs_login = error.code in (401, 403)
        said = f"it answers with {error.code}" + (", so it wants a user and a password" if needs_login else "")
        return Store(shown, reachable=needs_login, said=said)
    except (OSError, ValueError) as error:
        return Store(shown, reachable=False, said=f"it does not answer: {getattr(error, 'reason', error)}")


def ask_tensorflow() -> TensorFlow:
    """Import TensorFlow and ask for its GPUs, without initialising them."""
    from mp_hydra.heavy_imports import heavy_imports
    from mp_hydra.startup import _stderr_kept

    try:
        with _stderr_kept() as kept:
            if "tensorflow" not in sys.modules:
                with heavy_imports():
                    import tensorflow as tf
            import tensorflow as tf

            gpus = tuple(_described(gpu) for gpu in tf.config.get_visible_devices("GPU"))
            found = TensorFlow(
                gpus=gpus,
                tf32_allowed=bool(tf.config.experimental.tensor_float_32_execution_enabled()),
                auto_jit=str(tf.config.optimizer.get_jit() or "off"),
                onednn=hardware.onednn(),
                loaded=loaded_libraries(),
            )
    except Exception as error:  # noqa: BLE001 - an installation in whatever state it is
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return TensorFlow(problem=f"{type(error).__name__}: {said}")
    return TensorFlow(**{**vars(found), "said": kept.text})


def _described(gpu: Any) -> dict[str, Any]:
    import tensorflow as tf

    try:
        details = tf.config.experimental.get_device_details(gpu)
    except Exception:  # noqa: BLE001 - a plug-in device may not implement it
        details = {}
    capability = details.get("compute_capability")
    return {
        "name": details.get("device_name"),
        "compute_capability": None if capability is None else [int(part) for part in capability],
    }


def loaded_libraries() -> dict[str, str]:
    """Versions of the CUDA libraries that this process has loaded."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    found = {}
    for name, path in library_paths(maps).items():
        version = _ask_library(name, path)
        if version is not None:
            found[name] = version
    return found


def library_paths(maps: str) -> dict[str, str]:
    r"""Where cuDNN and the CUDA runtime were loaded from, from /proc/<pid>/maps.

    >>> library_paths("7f00-7f01 r-xp 0 00:00 1   /usr/lib/libcudnn.so.9\n7f02-7f03 r--p 0 00:00 2   /usr/lib/libc.so.6\n")
    {'cudnn': '/usr/lib/libcudnn.so.9'}
    """
    found = re.findall(r"(/\S*/lib(cudnn|cudart)\.so\S*)", maps)
    return {name: path for path, name in found}


def _ask_library(name: str, path: str) -> str | None:
    try:
        library = ctypes.CDLL(path)
        if name == "cudnn":
            library.cudnnGetVersion.restype = ctypes.c_size_t
            return cudnn_version(library.cudnnGetVersion())
        number = ctypes.c_int()
        library.cudaRuntimeGetVersion(ctypes.byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"
    except (OSError, AttributeError):
        return None


def cudnn_version(number: int) -> str:
    """CUDNN_VERSION as text: from 9 on there are two digits more for the major version.

    >>> cudnn_version(8907), cudnn_version(90300)
    ('8.9.7', '9.3.0')
    """
    base = 10000 if number >= 90000 else 1000  # noqa: PLR2004 - CUDNN_VERSION of 9.0.0
    return f"{number // base}.{number % base // 100}.{number % 100}"
