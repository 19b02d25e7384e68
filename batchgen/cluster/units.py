"""The units of a job that several workers share: what is claimed together. Cut once from the plan, read by every worker.

    plan/units.arrow    a line a unit: `entries` list<int64>, of the token store, increasing; `cost` float64, in tokens

Units are neighbours in prefix order, so that a shared prefix is computed by one worker, or by few.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from batchgen.data.durable import write_atomically
from batchgen.errors import CorruptRunError, RunFolderError


@dataclass(frozen=True, eq=False)
class Units:
    entries: pa.LargeListArray
    costs: np.ndarray  # [num_units] float64
    num_tasks: int  # for which they were cut
    job: str  # the job file and its --set, as given to `prepare`

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, unit: int) -> np.ndarray:
        """[k] int64, increasing."""
        return self.entries[unit].values.to_numpy()


def write_units(folder: Path, units: Units) -> None:
    """Durable on return. Raises BatchgenError if the disk refuses."""
    about = {"num_tasks": str(units.num_tasks), "job": units.job}
    table = pa.table({"entries": units.entries, "cost": units.costs}).replace_schema_metadata(
        {"batchgen": json.dumps(about)}
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    path = folder / "plan" / "units.arrow"
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, lambda file: file.write(sink.getvalue()))


def read_units(folder: Path) -> Units | None:
    """None if `folder` is not prepared. Raises CorruptRunError."""
    path = folder / "plan" / "units.arrow"
    try:
        with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
            table = reader.read_all().combine_chunks()
            about = json.loads(table.schema.metadata[b"batchgen"])
    except FileNotFoundError:
        return None
    except (OSError, pa.ArrowInvalid, KeyError, TypeError, ValueError) as error:
        raise CorruptRunError(f"{path}: cannot be read: {error}; delete it and run `batchgen prepare` again") from None
    entries = table["entries"].chunk(0) if table.num_rows else pa.array([], pa.large_list(pa.int64()))
    return Units(entries, table["cost"].to_numpy(), int(about["num_tasks"]), about["job"])


def require_units(folder: Path) -> Units:
    """Raises RunFolderError if `folder` is not prepared."""
    units = read_units(folder)
    if units is None:
        raise RunFolderError(
            f"{folder}: not prepared for several tasks; run `batchgen prepare JOB --tasks N` first, once, and then the tasks"
        )
    return units
