"""Who computes which unit of the plan, on a shared file system whose locks cannot be trusted.

    leases/000012.0      unit 12 was claimed first by the worker named in the file
    leases/000012.1      ... and taken over by this one, after the first one's beat stood still
    leases/000012.done   every row of unit 12 is committed
    beats/NAME           a number that worker NAME writes anew every few seconds

A claim is link(2) of a file with the worker's name onto the unit's next name: of all that try, one succeeds, on local
disks, NFS and Lustre alike. No clock is compared with another machine's: a worker is taken for dead when its beat did not
change for `patience` seconds of the observer's own clock. If it lives on after all, two workers answer the same rows, and
the merge keeps one answer of each: a lease saves work, it is not what makes answers exactly once.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from batchgen.data.durable import explain_os_errors, write_atomically
from batchgen.errors import BatchgenError

PATIENCE = 60.0  # seconds without a beat after which a worker is taken for dead
BEAT_SECONDS = 5.0
_LEASE = re.compile(r"(\d{6})\.(\d+|done)")


class Leases:
    """The leases of one run, as worker `name` sees them. Raises BatchgenError if the disk refuses.

    name: unique to this process, TASK.ATTEMPT; units of earlier attempts of the same task are taken over at once, as a task
    that runs again has ended before.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        num_units: int,
        patience: float = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder, self.beats, self.name, self.num_units = folder / "leases", folder / "beats", name, num_units
        self.patience, self.clock = patience, clock
        self._beat = 0
        self._seen: dict[str, tuple[str, float]] = {}  # worker -> its beat, and since when by our clock
        self._beat_seconds = min(BEAT_SECONDS, patience / 12)
        self._last_beat = -BEAT_SECONDS
        with explain_os_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.beats.mkdir(exist_ok=True)
        self._claim_file = self.folder / f".{name}"
        write_atomically(self._claim_file, lambda file: file.write(name.encode()))
        self.beat()

    # ---- what others see ----------------------------------------------------------------------------------------

    def beat(self) -> None:
        """Say that this worker lives, if it is time to."""
        if (now := self.clock()) - self._last_beat >= self._beat_seconds:
            self._last_beat, self._beat = now, self._beat + 1
            write_atomically(self.beats / self.name, lambda file: file.write(str(self._beat).encode()))

    @contextlib.contextmanager
    def beating(self, check: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Beat in a thread, as a model may take longer to load than others are patient. check: called at every beat."""
        ended = threading.Event()

        def run() -> None:
            while not ended.wait(self._beat_seconds / 2):
                check()
                with contextlib.suppress(BatchgenError):  # a full disk; whoever writes answers tells of it
                    self.beat()

        thread = threading.Thread(target=run, name="beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def finish(self, unit: int) -> None:
        """All rows of `unit` are committed."""
        path = self.folder / f"{unit:06d}.done"
        if not path.exists():
            write_atomically(path, lambda file: file.write(self.name.encode()))

    # ---- claims -------------------------------------------------------------------------------------------------

    def next_unit(self, own: range) -> int | None:
        """Claim a unit that is not done: of `own` from the front, else one of another's from the back of the longest run of
        units that nobody holds or whose holder is dead. None if there is none."""
        holders = self.read()
        free = [u for u in range(self.num_units) if u in holders and self._is_free(holders[u])]
        mine = [u for u in free if u in own]
        for unit in mine or reversed(_longest_run(free)):
            if self._claim(unit, holders[unit][0]):
                return unit
        return self.next_unit(own) if free else None  # others were quicker with all of them

    def wait_for_unit(self, own: range) -> int | None:
        """The same, but None only if all units are done, or if for as long as it takes to find the dead all other holders
        have shown that they live."""
        give_up = self.clock() + self.patience + 2 * self._beat_seconds
        while (unit := self.next_unit(own)) is None:
            if self.all_done or self.clock() > give_up:
                return None
            time.sleep(min(1.0, self.patience / 20))
        return unit

    @property
    def all_done(self) -> bool:
        return not self.read()

    def read(self) -> dict[int, tuple[int, str]]:
        """Unit that is not done -> (how often it was claimed, who holds it or "")."""
        with explain_os_errors(self.folder):
            names = os.listdir(self.folder)
        claims = dict.fromkeys(range(self.num_units), 0)
        for name in names:
            if match := _LEASE.fullmatch(name):
                unit = int(match[1])
                if match[2] == "done":
                    claims[unit] = -1
                elif claims.get(unit, -1) >= 0:
                    claims[unit] = max(claims[unit], int(match[2]) + 1)
        return {u: (n, self._holder(u, n - 1) if n else "") for u, n in claims.items() if n >= 0}

    @staticmethod
    def holders(folder: Path) -> dict[int, str]:
        """Unit -> the worker that claimed it last, of those that were claimed. For a reader that is no worker."""
        names = sorted(path.name for path in (folder / "leases").glob("[0-9]*"))
        claims = sorted((int(m[1]), int(m[2])) for name in names if (m := _LEASE.fullmatch(name)) and m[2] != "done")
        return {unit: (folder / "leases" / f"{unit:06d}.{epoch}").read_text() for unit, epoch in dict(claims).items()}

    def _holder(self, unit: int, epoch: int) -> str:
        with explain_os_errors(self.folder):
            return (self.folder / f"{unit:06d}.{epoch}").read_text()

    def _claim(self, unit: int, epoch: int) -> bool:
        """epoch: how often the unit had been claimed when it was seen to be free; whoever came meanwhile has that number."""
        target = self.folder / f"{unit:06d}.{epoch}"
        try:
            os.link(self._claim_file, target)
        except FileExistsError:
            return False
        except OSError as error:
            # over NFS an answer may be lost although the link was made: the file says who has it
            if not target.exists():
                with explain_os_errors(target):
                    raise error
        return target.read_text() == self.name

    def _is_free(self, held: tuple[int, str]) -> bool:
        num_claims, holder = held
        if num_claims == 0:
            return True
        if holder == self.name:
            return False
        return _task(holder) == _task(self.name) or self._is_dead(holder)

    def _is_dead(self, worker: str) -> bool:
        try:
            beat = (self.beats / worker).read_text()
        except FileNotFoundError:
            beat = ""
        now = self.clock()
        if self._seen.get(worker, ("-", 0.0))[0] != beat:
            self._seen[worker] = (beat, now)
        return now - self._seen[worker][1] > self.patience


def _task(worker: str) -> str:
    return worker.rpartition(".")[0]


def _longest_run(units: list[int]) -> list[int]:
    """The longest stretch of neighbours: neighbours share prefixes, and its owner is the farthest behind."""
    runs: list[list[int]] = []
    for unit in units:
        if runs and runs[-1][-1] == unit - 1:
            runs[-1].append(unit)
        else:
            runs.append([unit])
    return max(runs, key=len, default=[])
