"""Which runs to compare: a sweep by its parent run or directory, an experiment, some runs, or the latest sweep.

selection = find("multirun/2026-11-30/10-00-00", Store.open(uri), cwd=Path.cwd())
selection.runs, selection.notes
"""

from __future__ import annotations

import difflib
import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mp_hydra.compare.store import Store, has_id, has_tag, like_tag
from mp_hydra.errors import TrackingError, UserError
from mp_hydra.tracking import Settings
from mp_hydra.tracking.family import KIND_TAG, PARENT_TAG, SWEEP_KIND
from mp_hydra.tracking.store import public

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SWEEP_FILE = "sweep.json"
SWEEP_TAG = "mp_hydra.sweep"
_RUN_ID = re.compile("[0-9a-f]{32}")
_SHOWN = 3  # names in a message
_IDS_PER_CALL = 100


@dataclass(frozen=True)
class Selection:
    """The runs that are meant.

    Attributes:
        title: what they are, for people: "sweep <name>", "experiment <name>", "3 runs".
        parent_run_id: the run that stands for the sweep and is no run to compare; None if there is none.
        runs: `mlflow.entities.Run`, the oldest first, at least one; none of them is deleted.
        store: where they are; another than the given one if the sweep's directory says so.
        notes: what a reader must know of the choice, one line each: deleted runs, another store.
    """

    title: str
    parent_run_id: str | None
    runs: tuple[Any, ...]
    store: Store
    notes: tuple[str, ...] = ()


def find(target: str | Sequence[str] | None, store: Store, *, cwd: Path, experiment: str | None = None) -> Selection:
    """Find the runs that a user means.

    Args:
        target: the id of a parent run; the directory of a sweep, or of one of its jobs; the name of an experiment; ids
            of runs, where that of a parent stands for its children; None: the latest sweep.
        store: where to look; a sweep's directory may name another one.
        cwd: where a relative directory starts.
        experiment: where the latest sweep is looked for if `target` is None, and whose runs are meant if it has no sweep;
            None: the whole store, and the experiment that runs go to by default.

    Raises:
        UserError: one line, if nothing fits or more than one thing does.
        TrackingError: the store cannot be read.
    """
    if target is None:
        return _latest(store, experiment)
    names = [target] if isinstance(target, str) else list(target)
    if len(names) == 1:
        return _named(names[0], store, cwd)
    return _listed(names, store)


def _latest(store: Store, experiment: str | None) -> Selection:
    ids = None
    if experiment is not None:
        ids = [one.experiment_id for one in store.experiments() if one.name == experiment]
        if not ids:
            raise UserError(f"there is no experiment {experiment} in {store.name}; {_what_there_is(store, experiment)}")
    for parent in store.newest(has_tag(KIND_TAG, SWEEP_KIND), experiment_ids=ids):
        return _sweep(parent, store)
    for run in store.newest(like_tag(SWEEP_TAG), experiment_ids=ids):
        directory = run.data.tags[SWEEP_TAG]
        return _active(f"sweep {directory}", None, _with_tag(directory, store), store)
    name = Settings.experiment if experiment is None else experiment
    if found := _experiment(name, store):
        return found
    raise UserError(f"there is no sweep in {store.name}, and no experiment {name}; {_what_there_is(store)}")


def _named(name: str, store: Store, cwd: Path) -> Selection:
    if _RUN_ID.fullmatch(name) and (run := store.run(name)):
        return _run(run, store)
    found = _directory(name, store, cwd)
    if found is None:
        found = _experiment(name, store)
    elif any(experiment.name == name and experiment.lifecycle_stage == "active" for experiment in store.experiments()):
        raise UserError(
            f"{name} is an experiment in {store.name} and a directory of {found.title}; for the sweep give "
            f"{found.parent_run_id or 'its full path'}, for the experiment type the command in another directory"
        )
    if found is None:
        raise UserError(_not_found(name, store, cwd))
    return found


def _run(run: Any, store: Store) -> Selection:
    """A run that was named by its id: the parent of a sweep, or one run to look at."""
    children = _children(run, store)
    if children or run.data.tags.get(KIND_TAG) == SWEEP_KIND:
        return _sweep(run, store, children)
    selection = _active(f"run {run.info.run_name}", None, [run], store)
    if parent := run.data.tags.get(PARENT_TAG):
        note = f"run {run.info.run_id} is one of a sweep; for all of it give its parent run {parent}"
        selection = replace(selection, notes=(*selection.notes, note))
    return selection


def _sweep(parent: Any, store: Store, children: Sequence[Any] | None = None) -> Selection:
    title = f"sweep {parent.info.run_name}"
    children = _children(parent, store) if children is None else children
    if not children:
        raise UserError(f"{title} (run {parent.info.run_id} in {store.name}) has no runs; {_what_there_is(store)}")
    return _active(title, parent.info.run_id, children, store)


def _children(parent: Any, store: Store) -> list[Any]:
    return store.runs(has_tag(PARENT_TAG, parent.info.run_id))  # in any experiment: a sweep may go over several


def _with_tag(directory: str, store: Store) -> list[Any]:
    runs = store.runs(like_tag(SWEEP_TAG, directory))
    return [run for run in runs if run.data.tags[SWEEP_TAG] == directory]


def _experiment(name: str, store: Store) -> Selection | None:
    for experiment in store.experiments():
        if experiment.name == name:
            break
    else:
        return None
    if experiment.lifecycle_stage != "active":
        raise UserError(
            f"the experiment {name} has been deleted from {store.name}; bring it back with "
            f"mlflow experiments restore --experiment-id {experiment.experiment_id}"
        )
    runs = store.runs(experiment_ids=[experiment.experiment_id])
    if not runs:
        raise UserError(f"the experiment {name} in {store.name} has no runs; {_what_there_is(store)}")
    return _active(f"experiment {name}", None, _without_parents(runs), store)


def _listed(names: Sequence[str], store: Store) -> Selection:
    unknown = [name for name in names if not _RUN_ID.fullmatch(name)]
    if unknown:
        raise UserError(f"{unknown[0]} is no id of a run; with more than one name, each must be one (32 hex digits)")
    found = _by_id(names, store)
    missing = [name for name in names if name not in found]
    if missing:
        raise UserError(f"there is no run {_some(missing)} in {store.name}; {_what_there_is(store)}")
    runs: dict[str, Any] = {}
    for run_id, run in found.items():
        members = _children(run, store) if run.data.tags.get(KIND_TAG) == SWEEP_KIND else [run]
        runs |= {member.info.run_id: member for member in members} or {run_id: run}
    return _active(f"{len(names)} runs", None, _without_parents(runs.values()), store)


def _by_id(names: Sequence[str], store: Store) -> dict[str, Any]:
    """Runs by id, in the order of the names; one call for many, since they mostly are of one experiment."""
    found: dict[str, Any] = {}
    left = list(dict.fromkeys(names))
    while left:
        first = store.run(left.pop(0))
        if first is None:
            continue
        runs = [first]
        for start in range(0, len(left), _IDS_PER_CALL):
            some = left[start : start + _IDS_PER_CALL]
            runs += store.runs(has_id(some), experiment_ids=[first.info.experiment_id])
        found |= {run.info.run_id: run for run in runs}
        left = [name for name in left if name not in found]
    return {name: found[name] for name in names if name in found}


def _directory(name: str, store: Store, cwd: Path) -> Selection | None:
    """The sweep of a directory: as its sweep.json says, or the runs that carry its name."""
    path = Path(os.path.abspath(cwd / name))  # noqa: PTH100 - without following links: the tag has the path as typed
    exists = os.path.exists(path)  # noqa: PTH110 - False where Path.exists raises: a name may be too long for a file
    if exists:
        for directory in (path, *path.parents):
            if (directory / SWEEP_FILE).is_file():
                return _stated(directory, store)
    for directory in (path, path.parent) if exists else (path,):
        for spelling in dict.fromkeys([str(directory), os.path.realpath(directory), os.path.relpath(directory, cwd)]):
            runs = _with_tag(spelling, store)
            if runs:
                return _tagged(directory, runs, store)
    return None


def _stated(directory: Path, store: Store) -> Selection:
    file = directory / SWEEP_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        parent_run_id, uri = str(content["parent_run_id"]), str(content["uri"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{file} cannot be read ({type(error).__name__}: {error}); give the id of a run") from error
    parent = store.run(parent_run_id)
    notes: tuple[str, ...] = ()
    # The given store may hold it under another address: with a password, or moved to another place.
    if parent is None and public(uri) != store.name:
        try:
            store = Store.open(uri)
        except TrackingError as error:
            raise UserError(
                f"the parent run {parent_run_id} of {file} is not in {store.name}, and not where that file says: {error}"
            ) from error
        parent, notes = store.run(parent_run_id), (f"the runs are in {store.name}, as {file} says",)
    if parent is None:
        raise UserError(
            f"{file} names the parent run {parent_run_id}, and there is no such run in {store.name}; "
            f"{_what_there_is(store)}"
        )
    selection = _sweep(parent, store)
    return replace(selection, notes=(*notes, *selection.notes))


def _tagged(directory: Path, runs: Sequence[Any], store: Store) -> Selection:
    parents = [run for run in runs if run.data.tags.get(KIND_TAG) == SWEEP_KIND]
    if parents:  # a directory may be used again: the newest is meant
        return _sweep(max(parents, key=lambda run: (run.info.lifecycle_stage == "active", run.info.start_time)), store)
    return _active(f"sweep {directory.name}", None, runs, store)


def _without_parents(runs: Iterable[Any]) -> list[Any]:
    runs = list(runs)
    parents = {run.data.tags.get(PARENT_TAG) for run in runs}
    return [run for run in runs if run.info.run_id not in parents and run.data.tags.get(KIND_TAG) != SWEEP_KIND]


def _active(title: str, parent_run_id: str | None, runs: Sequence[Any], store: Store) -> Selection:
    kept = [run for run in runs if run.info.lifecycle_stage == "active"]
    deleted = [run for run in runs if run.info.lifecycle_stage != "active"]
    if not kept:
        problem = f"all of its runs have been deleted ({_some_runs(deleted)})" if deleted else "there are no runs in it"
        restore = "; bring them back with mlflow runs restore --run-id <id>" if deleted else ""
        raise UserError(f"{title} in {store.name}: {problem}{restore}")
    notes: tuple[str, ...] = ()
    if deleted:
        count = "1 run was" if len(deleted) == 1 else f"{len(deleted)} runs were"
        notes = (f"{count} deleted in MLflow and left out: {_some_runs(deleted)}",)
    return Selection(title, parent_run_id, tuple(kept), store, notes)


def _not_found(name: str, store: Store, cwd: Path) -> str:
    what_there_is = _what_there_is(store, like=name)
    if _RUN_ID.fullmatch(name):
        return f"there is no run {name} in {store.name}; {what_there_is}"
    path = cwd / name
    if os.path.isdir(path):  # noqa: PTH112 - False where Path.is_dir raises
        return (
            f"{name} is no experiment in {store.name}, and as a directory it belongs to no sweep: it has no {SWEEP_FILE}, "
            f"and no run there has the tag {SWEEP_TAG}={path}; {what_there_is}"
        )
    return f"{name} is no run, no experiment and no directory of a sweep in {store.name}; {what_there_is}"


def _what_there_is(store: Store, like: str = "") -> str:
    """What could have been meant: the latest sweeps, and experiments, the most similar names first."""
    sweeps = store.newest(has_tag(KIND_TAG, SWEEP_KIND), _SHOWN)
    names = [experiment.name for experiment in store.experiments() if experiment.lifecycle_stage == "active"]
    close = difflib.get_close_matches(like, names, n=_SHOWN, cutoff=0.5)
    names = list(dict.fromkeys([*close, *names]))
    latest = f"its latest sweeps are {_some_runs(sweeps)}" if sweeps else "it has no sweeps"
    return f"{latest}; its experiments are {_some(names)}" if names else f"{latest} and no experiments"


def _some_runs(runs: Sequence[Any]) -> str:
    return _some([f"{run.info.run_id} ({run.info.run_name})" for run in runs])


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
