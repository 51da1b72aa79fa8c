"""The state of training, and its checkpoints: folders that are either whole or not there.

    checkpoints/ckpt-<epoch>-<update>/
        manifest.json           schema, epoch, update, and every other file's size and sha256
        <group>.safetensors     one per group of tensors: model, optimizer, and others if any
        state.json              whatever else its owner needs to go on

A folder is written beside its place, flushed to disk and then renamed, so a crash leaves a hidden
folder that nobody reads and that the next `prune` removes. Reading trusts nothing: a folder whose
files do not match its manifest is passed over, as is one with a number that is not finite. One
thread at a time writes and prunes a folder of checkpoints.
"""

import contextlib
import ctypes
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from impala_async.errors import CheckpointError, plain
from impala_async.files import MOST_BYTES, PRIVATE, PUBLIC, find_object, open_regular, sync
from impala_async.metrics.host import find_memory
from impala_async.policy import AnyPolicy, split_off
from impala_async.user_code import one_line
from impala_async.weights import NO_VERSION, Version

logger = logging.getLogger(__name__)

Entry = TypeVar("Entry")
Tensors = Mapping[str, Mapping[str, Tensor]]
"""Groups of named tensors; a group is a file."""

SCHEMA = 1
MANIFEST = "manifest.json"
STATE = "state.json"
TENSORS_SUFFIX = ".safetensors"

# No longer numbers than a message to an actor can hold.
_NAME = re.compile(r"ckpt-(0|[1-9]\d{0,8})-(0|[1-9]\d{0,17})")
_HIDDEN = ".partial-"
# Both are arguments of the Linux call renameat2, which os.rename does not offer.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@dataclass(frozen=True)
class TrainingState:
    """The state of an update step, with which it shares no memory. Tensors are on the CPU."""

    tensors: Tensors
    """The groups model, optimizer, target where the algorithm has a target network, and intrinsic
    where there is an intrinsic reward."""
    state: Mapping[str, Any]
    """The entries optimizer and algorithm of `state.json`, maybe among others."""
    path: Path = Path()
    """The checkpoint that it was read from, if it was, and the version of that one."""
    version: Version = NO_VERSION

    def load_into(self, policy: AnyPolicy, member: str | None = None) -> None:
        """Give a policy the weights, or those of a member of the team; CheckpointError for what
        does not fit."""
        self.check_fits(policy.named_tensors(), member)
        policy.load_tensors(self._weights_of(member))

    def check_fits(self, wanted: Mapping[str, Tensor], member: str | None = None) -> None:
        """CheckpointError unless the weights have these names, shapes and dtypes."""
        try:
            check_alike(self._weights_of(member), wanted)
        except CheckpointError as error:
            fits = (
                "does not fit the model and the spaces of its run: did the environment change, or "
                "the release?"
            )
            raise CheckpointError(f"{self.path} {fits} {error}") from None

    def _weights_of(self, member: str | None) -> dict[str, Tensor]:
        tensors = self.tensors.get("model", {})
        return dict(tensors) if member is None else split_off(tensors, member)


def entry(saved: Mapping[str, Any], key: str, kind: type[Entry]) -> Entry:
    """Return what is saved under a key; raises CheckpointError for nothing, or another kind."""
    if key not in saved:
        raise CheckpointError(f"it has no {key!r}")
    # JSON knows one kind of numbers.
    if not isinstance(saved[key], int | float if kind is float else kind):
        found = type(saved[key]).__name__
        raise CheckpointError(f"its {key!r} is a {found}, not a {kind.__name__}")
    return cast(Entry, saved[key])


def count_in(saved: Mapping[str, Any], key: str) -> int:
    """The number of something that is saved under a key; CheckpointError for what is no count."""
    found = entry(saved, key, float)
    if not isinstance(found, int) or found < 0:
        raise CheckpointError(f"its {key!r} is {found}, not a whole number from 0 up")
    return found


def check_alike(saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError for other names, shapes or dtypes, which torch itself would round."""
    for name in [*wanted, *saved]:
        if name not in saved:
            raise CheckpointError(f"it has no {name!r}")
        if name not in wanted:
            raise CheckpointError(f"it has {name!r}, and this run has not")
        is_, wants = (f"{t.dtype} of shape {list(t.shape)}" for t in (saved[name], wanted[name]))
        if is_ != wants:
            raise CheckpointError(f"{name} is {is_}, not {wants}")


def copies_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the host, contiguous, for a safetensors file knows no other order."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


def save_checkpoint(
    directory: Path, version: Version, tensors: Tensors, state: Mapping[str, Any]
) -> Path:
    """Write a checkpoint whole and through to the disk, in place of any of its version."""
    final = _path_of(directory, version)
    for group, members in tensors.items():
        _check_finite(final / group, members)
    if len(state_json := _to_json(state)) > MOST_BYTES:
        long = f"{STATE} is longer than can be read again, {len(state_json):,} bytes"
        raise CheckpointError(f"cannot write checkpoint {final}: {long}")
    partial = directory / f"{_HIDDEN}{final.name}"
    try:
        # Not what it lies in: a run folder that was removed does not come back as half of one.
        directory.mkdir(exist_ok=True)
        _remove(partial)
        partial.mkdir()
        files = {}
        for group, members in tensors.items():
            name = f"{group}{TENSORS_SUFFIX}"
            files[name] = _write(partial / name, save(dict(members)))
        files[STATE] = _write(partial / STATE, state_json, PRIVATE)
        manifest = {"schema": SCHEMA, **version._asdict(), "files": files}
        _write(partial / MANIFEST, _to_json(manifest))
        sync(partial)
        if os.path.lexists(final):
            _exchange(partial, final)
        else:
            partial.rename(final)
    except OSError as error:
        raise CheckpointError(f"cannot write checkpoint {final}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            _remove(partial)
    try:
        sync(directory)
    except OSError as error:
        what = "is written, but may not be there after a crash of this machine"
        raise CheckpointError(f"checkpoint {final} {what}: {error}") from error
    return final


def tell_of_skipped(error: CheckpointError) -> None:
    """A checkpoint is damaged, and another one is looked for. Its words may be somebody else's."""
    logger.warning("skipping a damaged checkpoint: %s", plain(str(error)))


def whole_checkpoints(directory: Path) -> Iterator[TrainingState]:
    """Those whose files match their manifest, newest first."""
    tried: set[Path] = set()
    left = _found(directory)
    while left:
        version, path = left.pop(0)
        tried.add(path)
        try:
            checkpoint = _verified(path, version)
        except CheckpointError as error:
            if os.path.lexists(path):
                tell_of_skipped(error)
            else:  # a learner that runs removes old ones while they are read, and adds new ones
                left = [found for found in _found(directory) if found[1] not in tried]
        else:
            yield checkpoint


def last_good(directory: Path) -> Path | None:
    """The newest that is whole, as far as the sizes of its files tell, and can be read at all."""
    with contextlib.suppress(CheckpointError):
        return next((path for _, path in _whole_by_size(directory)), None)
    return None


def highest_epoch(directory: Path) -> int:
    """Damaged ones count, as their epochs were given out."""
    return max((version.epoch for version, _ in _found(directory)), default=0)


def open_checkpoint(path: Path) -> TrainingState:
    """The checkpoint in this folder; raises CheckpointError if it is none, or damaged."""
    name = _NAME.fullmatch(path.resolve().name)
    if name is None:
        raise CheckpointError(f"{path} is not a checkpoint; those are called ckpt-<epoch>-<update>")
    return _verified(path, Version(int(name[1]), int(name[2])))


def open_newest_or(named: Path | None, directory: Path) -> TrainingState:
    """The checkpoint that is named, or else the newest whole one in the folder."""
    found = open_checkpoint(named) if named else next(whole_checkpoints(directory), None)
    if found is None:
        raise CheckpointError(f"{directory} holds no whole checkpoint yet")
    return found


def read_digests(directory: Path, version: Version) -> dict[str, str]:
    """SHA-256 of the tensor files of a checkpoint, by name; empty if it is not there."""
    with contextlib.suppress(CheckpointError):
        files = _sized_files(_path_of(directory, version), version)
        return {name: sha256 for name, sha256 in files.items() if name != STATE}
    return {}


def prune(directory: Path, keep: int, *spared: Version | None) -> None:
    """Remove all but the newest `keep` and those that are spared, and what crashes left behind.

    A damaged one does not count and stays. CheckpointError names the first that cannot be removed.
    """
    old = [path for version, path in _whole_by_size(directory)[keep:] if version not in spared]
    faults = []
    for path in [*directory.glob(f"{_HIDDEN}*"), *old]:
        try:
            if path in old:
                path = _hide(path)
            _remove(path)
        except OSError as error:
            faults.append(f"{path}: {error.strerror or error}: remove it by hand")
    if faults:
        more = f" ({len(faults) - 1} more like it)" if faults[1:] else ""
        raise CheckpointError(f"cannot remove old checkpoints: {faults[0]}{more}")


def _path_of(directory: Path, version: Version) -> Path:
    return directory / f"ckpt-{version.epoch}-{version.update}"


def _write(path: Path, data: bytes, mode: int = PUBLIC) -> dict[str, Any]:
    """Write through to the disk; return what the manifest says of it."""
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _to_json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode()


def _exchange(path: Path, other: Path) -> None:
    """Let two folders trade their names at once, so that there is no moment without either."""
    libc = ctypes.CDLL(None, use_errno=True)
    here = _AT_FDCWD, os.fsencode(path)
    if libc.renameat2(*here, _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return
    if ctypes.get_errno() not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    # Some network file systems cannot.
    hidden = _hide(other)
    path.rename(other)
    hidden.rename(path)


def _hide(path: Path) -> Path:
    """Take a checkpoint away whole, so that a crash leaves no half of one under its name."""
    hidden = path.with_name(f"{_HIDDEN}old-{path.name}")
    _remove(hidden)
    return path.rename(hidden)


def _remove(path: Path) -> None:
    """Remove whatever lies there, if anything does. A link is removed and not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _found(directory: Path) -> list[tuple[Version, Path]]:
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read: {error.strerror}") from None
    matches = filter(None, map(_NAME.fullmatch, names))
    named = [(Version(int(match[1]), int(match[2])), directory / match[0]) for match in matches]
    return sorted(named, reverse=True)


def _whole_by_size(directory: Path) -> list[tuple[Version, Path]]:
    """Those whose files have their sizes, newest first, without reading gigabytes."""
    whole = []
    for version, path in _found(directory):
        with contextlib.suppress(CheckpointError):
            _sized_files(path, version)
            whole.append((version, path))
    return whole


def _verified(path: Path, version: Version) -> TrainingState:
    tensors = {}
    for name, sha256 in _sized_files(path, version).items():
        group = name.removesuffix(TENSORS_SUFFIX)
        try:
            if (size := (path / name).stat().st_size) > find_memory().total:
                told = f"{path / name} ({size} bytes) is larger than the memory here"
                raise CheckpointError(told)
            with open(path / name, "rb", opener=open_regular) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                    raise CheckpointError(f"{path / name} is not what its manifest says")
                if name != STATE:
                    file.seek(0)
                    tensors[group] = load(file.read())
                    _check_finite(path / group, tensors[group])
        except (OSError, ValueError, KeyError, RuntimeError, TypeError, SafetensorError) as error:
            raise CheckpointError(f"{path / name} cannot be read: {error}") from None
    state = find_object(path / STATE, is_strict=True) or {}
    return TrainingState(tensors, state, path, version)


def _check_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise CheckpointError(f"{path}: {name} is not finite")


def _sized_files(path: Path, version: Version) -> dict[str, str]:
    try:
        manifest = find_object(path / MANIFEST, is_strict=True)
        if manifest is None:
            raise CheckpointError(f"{path} is gone, or has no {MANIFEST}")
        said = manifest["schema"], manifest["epoch"], manifest["update"]
        listed = {name: (each["size"], each["sha256"]) for name, each in manifest["files"].items()}
        found = {name: (path / name).stat() for name in listed}
    except (KeyError, TypeError, AttributeError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not as its manifest says: {one_line(error)}") from None
    if said != (SCHEMA, *version) or STATE not in listed:
        raise CheckpointError(
            f"{path} has the manifest of something else: of schema, epoch and update {said}, and "
            f"of {sorted(listed)}"
        )
    for name, (size, _) in listed.items():
        if Path(name).name != name or not (name == STATE or name.endswith(TENSORS_SUFFIX)):
            raise CheckpointError(f"{path} lists {name!r}, which is no file of a checkpoint")
        if not stat.S_ISREG(found[name].st_mode) or found[name].st_size != size:
            raise CheckpointError(f"{path / name} is no file of {size} bytes, as its manifest says")
    return {name: sha256 for name, (_, sha256) in listed.items()}
