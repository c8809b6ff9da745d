# SPDX-License-Identifier: MIT
"""Identity records: what the blocks of one pool and model are, kept beside them.

A record is a small JSON file under `<root>/.ucm/identity/`. Whoever comes first
writes it; everyone else must agree with it, because blocks of equal size but
another dtype or layout would otherwise load as wrong numbers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.store.errors import StoreConfigError, StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

logger = logging.getLogger(__name__)

IDENTITY_DIRECTORY = Path(".ucm", "identity")
_READABLE_NAME_CHARS = 80


def record_path(root: str, record_name: str) -> Path:
    """Return where `record_name`, any text, is kept below a storage root."""
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "_", record_name)[:_READABLE_NAME_CHARS].lstrip(".")
    digest = hashlib.sha256(record_name.encode()).hexdigest()[:16]
    return Path(root) / IDENTITY_DIRECTORY / f"{readable}-{digest}.json"


def check_or_write_identity(roots: Sequence[str], record_name: str, record: Mapping[str, object]) -> None:
    """Leave `record` under every root, or compare it with the one that is there.

    Safe against any number of processes doing the same at once.

    Raises:
        StoreConfigError: A different record exists; names its path, the field and both values.
        StoreUnavailableError: A root cannot be read or written.
    """
    # One round through JSON, so that a tuple equals the list it was stored as.
    wanted: dict[str, object] = json.loads(json.dumps(dict(record)))
    document = json.dumps({"name": record_name, "record": wanted}, indent=2, sort_keys=True) + "\n"
    for root in roots:
        path = record_path(root, record_name)
        try:
            stored = _read_record(path)
            if stored is None:
                _publish(path, document)
                stored = _read_record(path)
        except OSError as exc:
            raise StoreUnavailableError(
                f"cannot keep the identity record {path}: {exc.strerror}; make the storage root writable"
            ) from exc
        if stored is not None:
            _compare(path, stored, wanted)


def _read_record(path: Path) -> dict[str, object] | None:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        record = json.loads(text)["record"]
        return dict(record)
    except (ValueError, KeyError, TypeError):
        # A crash of the machine can leave it empty. The identity in every block's footer still
        # guards the data, so writing the record anew is safe, and refusing would need an operator.
        logger.warning("identity record %s is damaged, writing it anew", path)
        path.unlink(missing_ok=True)
        return None


def _publish(path: Path, document: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with temp.open("x", encoding="utf-8") as file:
            file.write(document)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temp, path)  # Unlike rename, fails if another writer came first.
        except FileExistsError:
            return
        except OSError:
            # No hard links here (FUSE, exFAT): the last of several first writers wins, and each
            # compares itself with the file afterwards.
            temp.replace(path)
    finally:
        temp.unlink(missing_ok=True)


def _compare(path: Path, stored: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    for field in sorted(stored.keys() | wanted.keys()):
        if stored.get(field) != wanted.get(field):
            raise StoreConfigError(
                f"{path}: blocks here were stored with {field} = {stored.get(field)!r}, this server has "
                f"{wanted.get(field)!r}; use another storage directory, or remove that file and its blocks"
            )
