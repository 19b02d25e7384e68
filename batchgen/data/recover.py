"""What is committed and whole, when a run folder is opened. What is damaged is kept aside, told, and owed again.

A part counts if the log names it and its bytes have the checksum that the log states; every part is read once for that. Each
record of the log has its own checksum too, so one that is damaged costs the rows of its own part only.
"""

from __future__ import annotations

import re
from pathlib import Path

import xxhash

from batchgen.data.commit_log import CommitLog
from batchgen.data.durable import explain_os_errors, fsync_folder
from batchgen.data.part_store import PartStore
from batchgen.records import Part

_PART_NAME = re.compile(r"part-(\d+)\.parquet")


def recover(store: PartStore) -> tuple[list[Part], list[str]]:
    """(committed parts that are whole, oldest first; a sentence for each damage found). For the only process that
    writes here.

    Damaged parts become parts/damaged-part-..., the log is written anew without them, and what no record names is deleted.
    It may be broken off anywhere and repeated. Raises BatchgenError if the disk refuses.
    """
    log = CommitLog(store.commit_log)
    content = log.inspect()
    whole: list[Part] = []
    told: list[str] = []
    with explain_os_errors(store.parts):
        for part in content.parts:
            path = store.parts / part.name
            damage = damage_of(path, part)
            if damage is None:
                whole.append(part)
                continue
            kept = f"; it is kept as {keep_aside(path).name}" if path.exists() else ""
            told.append(f"{path}: {damage}{kept}; its {part.num_rows} answers are computed again")
        if content.num_damaged:
            told.append(
                f"{log.path}: {content.num_damaged} of its records are damaged; the answers of their parts are computed "
                "again, those of the other records stand"
            )
        named = {part.name for part in whole}
        strays = [path for path in store.parts.iterdir() if path.is_file() and path.name not in named]
        for path in strays:
            if _PART_NAME.fullmatch(path.name) and content.num_damaged:
                keep_aside(path)  # perhaps the one whose record is damaged
        if told:
            fsync_folder(store.parts)  # parts go before their records: the other way round they would be strays
            log.rewrite(whole)
        for path in strays:
            if not path.name.startswith("damaged-"):
                path.unlink(missing_ok=True)
    return whole, told


def part_name(number: int) -> str:
    return f"part-{number:06d}.parquet"


def next_number(store: PartStore) -> int:
    """Above that of every part there is or was, damaged ones included: no name is used twice."""
    found = (_PART_NAME.search(path.name) for path in store.parts.iterdir())
    return 1 + max((int(match[1]) for match in found if match), default=0)


def damage_of(path: Path, part: Part) -> str | None:
    try:
        image = path.read_bytes()
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if len(image) != part.num_bytes:
        return f"{len(image)} bytes long instead of {part.num_bytes}"
    if xxhash.xxh3_128_hexdigest(image) != part.checksum:
        return "changed since it was committed (its checksum differs)"
    return None


def keep_aside(path: Path) -> Path:
    return path.rename(path.with_name(f"damaged-{path.name}"))
