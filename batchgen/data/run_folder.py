"""One job's folder on disk: who may write in it, and for which job it was made. Knows the files' places, not their content.

LOCK           flock of the process that works here, with its pid and host
job.json       the job as resolved, the fingerprint of all that changes answers, and a small state
parts/         committed answers, in the order in which they were made
commit.log     which parts count
results/       the merged output, in input order
summary.json   the figures of the last run that answered something
products.json  which matrix products a CPU run uses, so that whoever goes on computes the same bits
dtype          what the first worker computes in, where `prepare` could not know

Of a job that several workers share, see cluster/, also

plan/          units.arrow, what is claimed together
leases/        who has claimed which unit, and which are done
beats/         which workers live
workers/       one folder a worker: its parts/ and commit.log, and worker.json
submit/ logs/  what was submitted to Slurm, and what it wrote
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchgen import __version__
from batchgen.data.durable import TMP_SUFFIX, explain_os_errors, fsync_folder, write_atomically, write_once
from batchgen.data.part_store import PartStore
from batchgen.errors import CorruptRunError, RunFolderError

FORMAT = "batchgen run folder"
FORMAT_VERSION = 2  # 2: parts say whose answers they hold, by row key and prompt hash
INPUT_FILE = "input file "  # begins the fingerprint's keys of the input's files
_KINDS = {"version": int, "batchgen": str, "job": dict, "fingerprint": dict, "state": dict, "history": list}
DTYPE = "engine.dtype"  # "auto" in the fingerprint: made where nothing is computed, and open until someone computes
_ABSENT = object()
_LOCK_PATIENCE = 1.0  # seconds; `status` holds the lock for an instant to see whether it is free


class RunFolder(PartStore):
    """`with RunFolder(path) as folder:` makes or opens the folder and holds its lock.

    Raises RunFolderError if another process holds it or if the folder holds something else than a run.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(path)
        self.results = self.path / "results"
        self.job_file = self.path / "job.json"
        self.summary = self.path / "summary.json"
        self.lock_file = self.path / "LOCK"
        self.input_has_changed = False  # told by `begin`
        self._lock: int | None = None

    def __enter__(self) -> RunFolder:
        self.refuse_foreign_folder()
        with explain_os_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = self._acquire()
            for left in self.path.glob("*" + TMP_SUFFIX):  # of writes that a crash broke off; results.tmp is the merge's
                if left.is_file():
                    left.unlink()
            self.parts.mkdir(exist_ok=True)
            fsync_folder(self.path)
            fsync_folder(self.path.parent)
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)  # the lock goes with it, as it does when the process dies
            self._lock = None

    def begin(self, job: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> bool:
        """Record the job in a new folder, or check that it may go on in this one. True if it goes on.

        `job` is the resolved job (JSON values). Of an old job only what the fingerprint leaves out may differ, and files of
        the input: any of them with input.id_column, else new ones. Then the prompts are tokenized again. The new values are
        recorded. Raises RunFolderError that lists each other key whose value differs, with both values.
        """
        resumed = self.job_file.exists()
        if resumed:
            record = self.read()
            self._refuse_old_format(record)
            old, fingerprint = self._settle_dtype(record["fingerprint"], fingerprint)
            changed = _differences(old, fingerprint)
            refused = {key: values for key, values in changed.items() if not _may_change(key, values, fingerprint)}
            if refused:
                by_position = any(key.startswith(INPUT_FILE) for key in refused)
                raise RunFolderError(
                    f"{self.path}: this folder holds answers of another job:\n{_listed(refused)}"
                    + ("(without input.id_column files may be added, but not change)\n" if by_position else "")
                    + "set these back to go on with it; or give another output.path, or --restart, to start anew"
                )
            self.input_has_changed = bool(changed)
            if changed:
                self._forget_tokens()
                record["state"]["finished"] = False
        else:
            if (log := self.commit_log).exists() and log.stat().st_size:
                raise CorruptRunError(
                    f"{self.path}: there are committed answers but no job.json; put it back, or start elsewhere"
                )
            record = {"format": FORMAT, "version": FORMAT_VERSION, "created_at": time.time(), "state": {}}
        record |= {"batchgen": __version__, "job": dict(job), "fingerprint": dict(fingerprint)}
        self._write(record)
        return resumed

    def check_rerun(self, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
        """What a re-run of some rows has that differs from the job: key -> its value. Nothing is recorded.

        Raises RunFolderError if there is no job here, or if more differs than sampling (but not n) and engine.
        """
        record = self.read()
        self._refuse_old_format(record)
        changed = _differences(*self._settle_dtype(record["fingerprint"], fingerprint))
        refused = {
            key: values
            for key, values in changed.items()
            if not key.startswith(("sampling.", "engine.")) or key == "sampling.n"
        }
        if refused:
            raise RunFolderError(
                f"{self.path}: a re-run of some rows may change sampling (but not n) and engine; more has changed:\n"
                f"{_listed(refused)}set these back; or run without --only first if the input has changed"
            )
        return {key: None if new is _ABSENT else new for key, (_, new) in changed.items()}

    def begin_rerun(self, only: str, settings: Mapping[str, Any], last_part: int) -> int:
        """Record that a re-run begins after the part of number `last_part`; returns the number after which it began, which
        is an earlier one if the same re-run was broken off."""
        record = self.read()
        history = record.setdefault("history", [])
        latest = history[-1] if history else {"finished": True}
        if latest["finished"] or (latest["only"], latest["settings"]) != (only, dict(settings)):
            latest = {"only": only, "settings": dict(settings), "after_part": last_part, "finished": False}
            history.append(latest | {"began_at": time.time()})
            self._write(record)
        return latest["after_part"]

    def end_rerun(self) -> None:
        record = self.read()
        record["history"][-1]["finished"] = True
        self._write(record)

    def check_input(self, files: Mapping[str, str]) -> None:
        """For a merge alone. Raises RunFolderError if the input's files (their part of the fingerprint) have changed."""
        record = self.read()
        self._refuse_old_format(record)
        old = {key: value for key, value in record["fingerprint"].items() if key.startswith(INPUT_FILE)}
        if changed := _differences(old, files):
            raise RunFolderError(
                f"{self.path}: the input has changed since it was answered:\n{_listed(changed)}"
                "run the job again, which computes what is new"
            )

    def _refuse_old_format(self, record: Mapping[str, Any]) -> None:
        if record["version"] < FORMAT_VERSION:
            raise RunFolderError(
                f"{self.path}: made by batchgen {record['batchgen']}, whose parts do not say which prompt they answer; "
                "go on with that version, or begin anew with --restart"
            )

    def check_prepared(self, fingerprint: Mapping[str, Any]) -> None:
        """For a worker, who changes nothing here. Raises RunFolderError if the folder was prepared for another job."""
        record = self.read()
        self._refuse_old_format(record)
        if changed := _differences(*self._settle_dtype(record["fingerprint"], fingerprint)):
            raise RunFolderError(
                f"{self.path}: this folder was prepared for another job:\n{_listed(changed)}"
                "set these back; or run `batchgen prepare` again, which says what of it may change"
            )

    def choose_dtype(self, fingerprint: Mapping[str, Any], own: Path) -> None:
        """Where it is open, make the dtype of this `fingerprint` that of the folder. own: a folder in which only this
        process writes. Raises RunFolderError if a process that was quicker has another one."""
        if self.read()["fingerprint"].get(DTYPE) == "auto":
            write_once(self.path / "dtype", str(fingerprint[DTYPE]).encode(), own)
            self.check_prepared(fingerprint)

    def _settle_dtype(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Both fingerprints with the dtype that is known, where one leaves it open."""
        path = self.path / "dtype"
        if old.get(DTYPE) == "auto" and path.exists():
            old = {**old, DTYPE: path.read_text()}
        if new.get(DTYPE) == "auto":
            return old, {**new, DTYPE: old.get(DTYPE)}
        return ({**old, DTYPE: new.get(DTYPE)} if old.get(DTYPE) == "auto" else old), new

    def products(self) -> dict[str, str]:
        """Which product the layers of each shape run on, as the first process here chose; empty if none has."""
        path = self.path / "products.json"
        return dict(json.loads(path.read_bytes())) if path.exists() else {}

    def choose_products(self, chosen: Mapping[str, str], own: Path) -> dict[str, str]:
        """These, or those of a process that was quicker. own: a folder in which only this process writes."""
        return dict(json.loads(write_once(self.path / "products.json", json.dumps(dict(chosen)).encode(), own)))

    def _forget_tokens(self) -> None:
        """Before the new fingerprint is recorded: a token store and a plan that are there are those of the fingerprint."""
        with explain_os_errors(self.path):
            for path in [self.path / "plan", self.path / "leases", *self.path.glob("tokens*")]:
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.exists():
                    path.unlink()
            fsync_folder(self.path)

    def read(self) -> dict[str, Any]:
        """The content of job.json. Raises RunFolderError if it is not there, CorruptRunError if it cannot be read."""
        return read_job_file(self.path)

    @property
    def state(self) -> dict[str, Any]:
        return self.read()["state"]

    def update_state(self, values: Mapping[str, Any]) -> None:
        """Merge `values` into the state in job.json, atomically. `status` reads num_rows, num_samples and finished."""
        record = self.read()
        record["state"] |= values
        self._write(record)

    def _write(self, record: Mapping[str, Any]) -> None:
        text = json.dumps(record, indent=2, ensure_ascii=True)
        write_atomically(self.job_file, lambda file: file.write(text.encode()))

    def refuse_foreign_folder(self) -> None:
        """Raises RunFolderError if the folder holds something else than a run; an empty one, or none, is fine."""
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise RunFolderError(f"{self.path}: output.path is a file; give the name of a folder")
        if self.job_file.exists():
            return
        # a crash before job.json leaves the first of these, `submit` makes the last
        ours = {"LOCK", "parts", "job.json.tmp", "commit.log", "submit", "logs"}
        foreign = sorted(name for name in os.listdir(self.path) if name not in ours)
        if foreign:
            raise RunFolderError(
                f"{self.path}: not empty and not a batchgen run (it holds {', '.join(foreign[:3])}"
                f"{', ...' if len(foreign) > 3 else ''}); give another output.path"
            )

    def _acquire(self) -> int:
        handle = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        give_up = time.monotonic() + _LOCK_PATIENCE
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    os.close(handle)
                    holder = read_holder(self.lock_file)
                    raise RunFolderError(
                        f"{self.path}: in use by {holder}; wait for it or stop it, or give another output.path"
                    ) from None
                time.sleep(0.05)
        if not self.lock_file.exists() or not os.path.samestat(os.fstat(handle), os.stat(self.lock_file)):
            os.close(handle)  # the lock of a folder that has another name now
            raise RunFolderError(f"{self.path}: another process has moved it aside just now; run the same command again")
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}).encode(), 0)
        return handle


def set_aside(path: str | os.PathLike[str]) -> Path | None:
    """Rename the run folder `path` to PATH.1, or the next number that is free; its new path, or None if there is no run.

    Raises RunFolderError if it is in use or something else than a run folder, BatchgenError if the system refuses.
    """
    folder = Path(os.path.abspath(path))
    if not folder.exists():
        return None
    with RunFolder(folder) as run:
        if not run.job_file.exists():
            return None
        number = 1
        while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        with explain_os_errors(aside):
            os.rename(folder, aside)
            fsync_folder(folder.parent)
    return aside


def read_job_file(path: Path) -> dict[str, Any]:
    """The content of job.json of the run folder `path`, lock or no lock. Raises as RunFolder.read does."""
    job_file = path / "job.json"
    try:
        record = json.loads(job_file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise RunFolderError(f"{path}: not a run folder: there is no job.json in it") from None
    except (OSError, ValueError) as error:
        raise CorruptRunError(f"{job_file}: cannot be read: {error}") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise RunFolderError(f"{path}: not a run folder: its job.json is not batchgen's")
    for key, kind in _KINDS.items():
        if not isinstance(record.get(key, [] if key == "history" else None), kind):
            raise CorruptRunError(f"{job_file}: damaged: what it has as {key} is no {kind.__name__}; put back a copy of it")
    if record["version"] > FORMAT_VERSION:
        raise RunFolderError(f"{path}: made by batchgen {record['batchgen']}, whose format is newer; use that version")
    return record


def read_holder(lock_file: Path) -> str:
    """Who wrote the lock file, such as "process 4711 on node3"."""
    try:
        holder = json.loads(lock_file.read_bytes())
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Key -> (old value, new value) of all that differ, sorted; _ABSENT where there is none."""
    new = json.loads(json.dumps(dict(new)))
    pairs = {key: (old.get(key, _ABSENT), new.get(key, _ABSENT)) for key in sorted(old.keys() | new.keys())}
    return {key: (one, other) for key, (one, other) in pairs.items() if one != other}


def _may_change(key: str, values: tuple[Any, Any], fingerprint: Mapping[str, Any]) -> bool:
    """Rows that an id names are found wherever they are; others only where they were, so their files must stay."""
    return key.startswith(INPUT_FILE) and (fingerprint.get("input.id_column") is not None or values[0] is _ABSENT)


def _listed(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return "".join(f"  {key}: was {_shown(old)}, is now {_shown(new)}\n" for key, (old, new) in changed.items())


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
