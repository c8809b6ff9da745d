# SPDX-License-Identifier: MIT
"""A file system in memory that fails and hangs on demand: the process behind a `FaultyMount`.

Speaks the kernel's FUSE protocol, as far as a store of files needs it. Nothing is cached by
the kernel, so that every system call arrives here. Uses the standard library only; run as
`python fuse_server.py DESCRIPTOR`, with faults as JSON lines on standard input.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import signal
import stat
import struct
import sys
import time
from dataclasses import dataclass, field

_IN_HEADER = struct.Struct("<IIQQIIIHH")
_OUT_HEADER = struct.Struct("<IiQ")
_ATTRIBUTES = struct.Struct("<6Q10I")
_REQUEST_BYTES = 1 << 18
_MAX_WRITE = 1 << 17
_BIG_WRITES, _DIRECT_IO = 1 << 5, 1 << 0
_SET_MODE, _SET_SIZE, _SET_MTIME, _SET_MTIME_NOW = 1 << 0, 1 << 3, 1 << 5, 1 << 8
_CAPACITY_BLOCKS = 1 << 20
_SET_DEATH_SIGNAL = 1

_NO_ANSWER = frozenset({"forget", "batch_forget", "interrupt", "destroy"})
_OPERATIONS = {
    1: "lookup", 2: "forget", 3: "getattr", 4: "setattr", 9: "mkdir", 10: "unlink", 11: "rmdir",
    12: "rename", 14: "open", 15: "read", 16: "write", 17: "statfs", 18: "release", 20: "fsync",
    25: "flush", 26: "init", 27: "opendir", 28: "readdir", 29: "releasedir", 30: "fsyncdir",
    34: "access", 35: "create", 36: "interrupt", 38: "destroy", 42: "batch_forget", 45: "rename2",
}  # fmt: skip


@dataclass(eq=False)
class _Node:
    number: int
    mode: int
    path: str
    data: bytearray = field(default_factory=bytearray)
    children: dict[str, _Node] = field(default_factory=dict)
    mtime: float = field(default_factory=time.time)


class _Server:
    """The file system and the requests it has not answered yet."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._nodes = {1: _Node(1, stat.S_IFDIR | 0o755, "")}
        self._next = 2
        self._faults: list[dict[str, object]] = []
        self._hung: list[bytes] = []

    def serve(self) -> None:
        """Answer until the file system is unmounted or the parent has gone."""
        while True:
            ready, _, _ = select.select([self._descriptor, sys.stdin], [], [])
            if sys.stdin in ready:
                line = sys.stdin.readline()
                if not line:
                    return
                self._faults = json.loads(line)
                hung, self._hung = self._hung, []
                for request in hung:
                    self._handle(request)
                print("ready", flush=True)  # noqa: T201 -- the parent waits for it.
            if self._descriptor in ready:
                try:
                    self._handle(os.read(self._descriptor, _REQUEST_BYTES))
                except OSError as exc:
                    if exc.errno == errno.ENODEV:
                        return
                    if exc.errno not in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                        raise

    def _handle(self, request: bytes) -> None:
        length, opcode, unique, number, *_ = _IN_HEADER.unpack_from(request)
        operation, body = _OPERATIONS.get(opcode, ""), request[_IN_HEADER.size : length]
        if operation in _NO_ANSWER:
            return
        error, answer = -errno.ENOSYS, b""
        node = self._nodes.get(number or 1)  # The first request is about no file.
        if operation and node is not None:
            fault = self._fault(operation, node, body)
            if fault == "hang":
                self._hung.append(request)
                return
            try:
                if fault is not None:
                    raise OSError(int(str(fault)), "")
                error, answer = 0, getattr(self, f"_{operation}")(node, body)
            except OSError as exc:
                error = -(exc.errno or errno.EIO)
        whole = _OUT_HEADER.pack(_OUT_HEADER.size + len(answer), error, unique) + answer
        try:
            os.write(self._descriptor, whole)
        except OSError as exc:
            if exc.errno != errno.ENOENT:  # Whoever asked has gone.
                raise

    def _fault(self, operation: str, node: _Node, body: bytes) -> object:
        path = node.path
        if operation in ("lookup", "unlink", "rmdir"):
            path += "/" + _names(body)[0]
        elif operation in ("create", "mkdir", "rename", "rename2"):
            path += "/" + _names(body[{"create": 16, "rename2": 16}.get(operation, 8) :])[0]
        for fault in self._faults:
            if fault["operation"] in ("*", operation) and str(fault["file"]) in path:
                return fault["error"]
        return None

    def _init(self, _node: _Node, _body: bytes) -> bytes:
        answer = struct.pack("<IIIIHHIIHHII", 7, 31, 0, _BIG_WRITES, 64, 48, _MAX_WRITE, 1, 0, 0, 0, 0)
        return answer.ljust(64, b"\0")

    def _lookup(self, node: _Node, body: bytes) -> bytes:
        return self._entry(self._child(node, _names(body)[0]))

    def _getattr(self, node: _Node, _body: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self._attributes(node)

    def _setattr(self, node: _Node, body: bytes) -> bytes:
        valid, _, _, size, _, _, mtime, _, _, _, _, mode, *_ = struct.unpack_from("<IIQQQQQQIIIIIIII", body)
        if valid & _SET_MODE:
            node.mode = stat.S_IFMT(node.mode) | stat.S_IMODE(mode)
        if valid & _SET_SIZE:
            node.data = node.data[:size].ljust(size, b"\0")
        if valid & _SET_MTIME:
            node.mtime = time.time() if valid & _SET_MTIME_NOW else mtime
        return self._getattr(node, b"")

    def _mkdir(self, node: _Node, body: bytes) -> bytes:
        (mode,) = struct.unpack_from("<I", body)
        return self._entry(self._make(node, _names(body[8:])[0], stat.S_IFDIR | stat.S_IMODE(mode)))

    def _unlink(self, node: _Node, body: bytes) -> bytes:
        self._child(node, _names(body)[0])
        del node.children[_names(body)[0]]
        node.mtime = time.time()
        return b""

    _rmdir = _unlink

    def _rename(self, node: _Node, body: bytes, skipped: int = 8) -> bytes:
        (target,) = struct.unpack_from("<Q", body)
        old, new = _names(body[skipped:])[:2]
        moved = self._child(node, old)
        directory = self._nodes[target]
        directory.children[new] = node.children.pop(old)
        moved.path = f"{directory.path}/{new}"
        return b""

    def _rename2(self, node: _Node, body: bytes) -> bytes:
        return self._rename(node, body, 16)

    def _open(self, _node: _Node, _body: bytes) -> bytes:
        return struct.pack("<QIi", 0, _DIRECT_IO, 0)

    def _opendir(self, _node: _Node, _body: bytes) -> bytes:
        return struct.pack("<QIi", 0, 0, 0)

    def _create(self, node: _Node, body: bytes) -> bytes:
        _, mode = struct.unpack_from("<II", body)
        made = self._make(node, _names(body[16:])[0], stat.S_IFREG | stat.S_IMODE(mode))
        return self._entry(made) + self._open(made, b"")

    def _read(self, node: _Node, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        return bytes(node.data[offset : offset + size])

    def _write(self, node: _Node, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        if len(node.data) < offset:
            node.data.extend(bytes(offset - len(node.data)))
        node.data[offset : offset + size] = body[40 : 40 + size]
        node.mtime = time.time()
        return struct.pack("<II", size, 0)

    def _statfs(self, _node: _Node, _body: bytes) -> bytes:
        free = _CAPACITY_BLOCKS
        return struct.pack("<5Q10I", free, free, free, free, free, 4096, 255, 4096, *[0] * 7)

    def _readdir(self, node: _Node, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        answer = b""
        for place, (name, child) in enumerate(list(node.children.items())[offset:], offset + 1):
            encoded = name.encode()
            entry = struct.pack("<QQII", child.number, place, len(encoded), child.mode >> 12) + encoded
            entry = entry.ljust((len(entry) + 7) // 8 * 8, b"\0")
            if len(answer) + len(entry) > size:
                break
            answer += entry
        return answer

    def _nothing(self, _node: _Node, _body: bytes) -> bytes:
        return b""

    _release = _fsync = _flush = _releasedir = _fsyncdir = _access = _nothing

    def _child(self, node: _Node, name: str) -> _Node:
        if name not in node.children:
            raise FileNotFoundError(errno.ENOENT, name)
        return node.children[name]

    def _make(self, node: _Node, name: str, mode: int) -> _Node:
        if name in node.children:
            raise FileExistsError(errno.EEXIST, name)
        made = _Node(self._next, mode, f"{node.path}/{name}")
        self._next += 1
        node.children[name] = self._nodes[made.number] = made
        node.mtime = made.mtime
        return made

    def _entry(self, node: _Node) -> bytes:
        return struct.pack("<QQQQII", node.number, 0, 0, 0, 0, 0) + self._attributes(node)

    def _attributes(self, node: _Node) -> bytes:
        size, seconds = len(node.data), int(node.mtime)
        owner = (os.getuid(), os.getgid())
        return _ATTRIBUTES.pack(
            node.number, size, (size + 511) // 512, *[seconds] * 3, *[0] * 3, node.mode, 1, *owner, 0, 4096, 0
        )


def _names(body: bytes) -> list[str]:
    return [name.decode() for name in body.split(b"\0")]


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)  # Stopped, it would outlive its parent.
    _Server(int(sys.argv[1])).serve()
