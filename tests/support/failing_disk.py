"""A disk that fails: a FUSE file system that passes everything to a folder, until it is told to answer EIO.

`python failing_disk.py MOUNT FOLDER ORDERS` mounts it (as root) and serves it; ORDERS is a file with the
operations that fail from now on ("read write"). Ending the process makes the file system vanish as an unplugged disk
does: every access then fails with ENOTCONN.

The protocol is that of linux/fuse.h, version 7.31, spoken to /dev/fuse without a library.
"""

import ctypes
import errno
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MAX_WRITE = 1 << 17
PR_SET_PDEATHSIG, MNT_DETACH = 1, 2  # linux/prctl.h, linux/fs.h
ATTR = struct.Struct("<6Q10I")
SETATTR = struct.Struct("<IIQQQQQQIIIIIIII")
ROOT_NODE = 1
SIZE, ATIME, MTIME, MODE = 8, 16, 32, 1
CACHED_S = 1
"""How long the kernel may remember names and sizes, without which every access asks several times."""
NOW = {ATIME: 128, MTIME: 256}


class FailingDisk:
    """Answers the kernel's requests."""

    def __init__(self, folder: Path, orders: Path) -> None:
        self.folder, self.orders = folder, orders
        self.paths: dict[int, Path] = {ROOT_NODE: folder}
        self.operations: dict[int, Callable[[int, bytes], bytes]] = {
            1: self.lookup, 3: self.getattr, 4: self.setattr, 5: self.readlink, 6: self.symlink, 9: self.mkdir,
            10: self.unlink, 11: self.rmdir, 12: self.rename, 13: self.link, 14: self.open, 15: self.read,
            16: self.write, 17: self.statfs, 18: self.release, 20: self.fsync, 25: self.nothing, 26: self.init,
            27: self.nothing_opened, 28: self.readdir, 29: self.nothing, 30: self.nothing, 34: self.nothing,
            35: self.create, 45: self.rename2,
        }  # fmt: skip

    def serve(self, device: int) -> None:
        """Answer until the file system is unmounted."""
        while True:
            try:
                request = os.read(device, MAX_WRITE + 4096)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                continue  # interrupted
            _, operation, unique, node = struct.unpack_from("<IIQQ", request)
            if operation in (2, 36, 38, 42):  # forget, interrupt, destroy: no answer
                continue
            try:
                code, answer = 0, self._answer(operation, node, request[40:])
            except OSError as error:
                code, answer = -(error.errno or errno.EIO), b""
            with suppress(OSError):
                os.write(device, struct.pack("<IiQ", 16 + len(answer), code, unique) + answer)

    def _answer(self, operation: int, node: int, data: bytes) -> bytes:
        handler = self.operations.get(operation)
        if handler is None:
            raise OSError(errno.ENOSYS, "")
        if handler.__name__ in self.orders.read_text().split():
            raise OSError(errno.EIO, "")
        return handler(node, data)

    def init(self, _node: int, data: bytes) -> bytes:
        readahead = struct.unpack_from("<III", data)[2]
        return struct.pack("<IIIIHHIIHHI28x", 7, 31, readahead, 0, 0, 0, MAX_WRITE, 1, 0, 0, 0)

    def nothing(self, _node: int, _data: bytes) -> bytes:
        return b""

    def nothing_opened(self, _node: int, _data: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0)

    def lookup(self, node: int, data: bytes) -> bytes:
        return self._entry(self._child(node, data))

    def getattr(self, node: int, _data: bytes) -> bytes:
        return struct.pack("<QII", CACHED_S, 0, 0) + self._attr(self.paths[node])

    def setattr(self, node: int, data: bytes) -> bytes:
        valid, _, _, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, *_ = SETATTR.unpack_from(data)
        path = self.paths[node]
        if valid & SIZE:
            os.truncate(path, size)
        if valid & MODE:
            path.chmod(mode & 0o7777)
        if valid & (ATIME | MTIME):
            stat, now = path.stat(), time.time_ns()
            times = []
            for bit, given, before in (
                (ATIME, atime * 10**9 + atime_ns, stat.st_atime_ns),
                (MTIME, mtime * 10**9 + mtime_ns, stat.st_mtime_ns),
            ):
                times.append(now if valid & NOW[bit] else given if valid & bit else before)
            os.utime(path, ns=(times[0], times[1]))
        return self.getattr(node, b"")

    def readlink(self, node: int, _data: bytes) -> bytes:
        return os.fsencode(self.paths[node].readlink())

    def symlink(self, node: int, data: bytes) -> bytes:
        name, target = data.split(b"\0")[:2]
        path = self._child(node, name)
        path.symlink_to(os.fsdecode(target))
        return self._entry(path)

    def mkdir(self, node: int, data: bytes) -> bytes:
        path = self._child(node, data[8:])
        path.mkdir()
        return self._entry(path)

    def unlink(self, node: int, data: bytes) -> bytes:
        self._child(node, data).unlink()
        return b""

    def rmdir(self, node: int, data: bytes) -> bytes:
        self._child(node, data).rmdir()
        return b""

    def rename(self, node: int, data: bytes) -> bytes:
        old, new = data[8:].split(b"\0")[:2]
        source, target = self._child(node, old), self._child(struct.unpack_from("<Q", data)[0], new)
        source.rename(target)
        for number, path in self.paths.items():
            if path == source or source in path.parents:
                self.paths[number] = target / path.relative_to(source)
        return b""

    def rename2(self, node: int, data: bytes) -> bytes:
        return self.rename(node, data[:8] + data[16:])

    def link(self, node: int, data: bytes) -> bytes:
        path = self._child(node, data[8:])
        os.link(self.paths[struct.unpack_from("<Q", data)[0]], path)
        return self._entry(path)

    def open(self, node: int, data: bytes) -> bytes:
        flags = struct.unpack_from("<I", data)[0] & ~(os.O_CREAT | os.O_EXCL | os.O_APPEND)
        return struct.pack("<QII", os.open(self.paths[node], flags), 0, 0)

    def create(self, node: int, data: bytes) -> bytes:
        flags, mode = struct.unpack_from("<II", data)
        path = self._child(node, data[16:])
        handle = os.open(path, (flags | os.O_CREAT) & ~os.O_APPEND, mode)
        return self._entry(path) + struct.pack("<QII", handle, 0, 0)

    def read(self, _node: int, data: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", data)
        return os.pread(handle, size, offset)

    def write(self, _node: int, data: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", data)
        return struct.pack("<II", os.pwrite(handle, data[40 : 40 + size], offset), 0)

    def fsync(self, _node: int, data: bytes) -> bytes:
        os.fsync(struct.unpack_from("<Q", data)[0])
        return b""

    def release(self, _node: int, data: bytes) -> bytes:
        os.close(struct.unpack_from("<Q", data)[0])
        return b""

    def readdir(self, node: int, data: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", data)
        names = [".", "..", *sorted(os.listdir(self.paths[node]))]  # noqa: PTH208 - names, not paths
        found = b""
        for number, name in enumerate(names[offset:], offset + 1):
            encoded = os.fsencode(name)
            entry = struct.pack("<QQII", number, number, len(encoded), 0) + encoded
            entry += bytes(-len(entry) % 8)
            if len(found) + len(entry) > size:
                break
            found += entry
        return found

    def statfs(self, _node: int, _data: bytes) -> bytes:
        stat = os.statvfs(self.folder)
        values = (stat.f_blocks, stat.f_bfree, stat.f_bavail, stat.f_files, stat.f_ffree)
        return struct.pack("<5Q4I24x", *values, stat.f_bsize, stat.f_namemax, stat.f_frsize, 0)

    def _child(self, node: int, name: bytes) -> Path:
        return self.paths[node] / os.fsdecode(name.partition(b"\0")[0])

    def _entry(self, path: Path) -> bytes:
        attr = self._attr(path)
        node = next((number for number, known in self.paths.items() if known == path), max(self.paths) + 1)
        self.paths[node] = path
        return struct.pack("<QQQQII", node, 0, CACHED_S, CACHED_S, 0, 0) + attr

    def _attr(self, path: Path) -> bytes:
        stat = path.lstat()
        seconds = [each // 10**9 for each in (stat.st_atime_ns, stat.st_mtime_ns, stat.st_ctime_ns)]
        rest = [each % 10**9 for each in (stat.st_atime_ns, stat.st_mtime_ns, stat.st_ctime_ns)]
        owner = (stat.st_mode, stat.st_nlink, stat.st_uid, stat.st_gid, 0, stat.st_blksize, 0)
        return ATTR.pack(stat.st_ino, stat.st_size, stat.st_blocks, *seconds, *rest, *owner)


def main(mount: Path, folder: Path, orders: Path) -> None:
    """Mount and serve."""
    libc = ctypes.CDLL(None, use_errno=True)

    def end(_number: int, _frame: object) -> None:
        libc.umount2(os.fsencode(mount), MNT_DETACH)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))  # a killed test leaves nothing mounted
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other,default_permissions"
    if libc.mount(b"failing", os.fsencode(mount), b"fuse", 2 | 4, options.encode()) != 0:
        sys.exit(f"cannot mount: {os.strerror(ctypes.get_errno())}")
    sys.stdout.write("mounted\n")
    sys.stdout.flush()
    FailingDisk(folder, orders).serve(device)


class Mounted:
    """A mounted failing disk.

    Attributes:
        path: where it is mounted.
        works: whether the machine allows it.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self._backing, self._orders = folder / "disk", folder / "backing", folder / "orders"
        self.path.mkdir()
        self._backing.mkdir()
        self.fail()
        self._serve()

    def fail(self, *operations: str) -> None:
        """Answer EIO to these operations from now on; none heals it."""
        self._orders.write_text(" ".join(operations))

    def vanish(self) -> None:
        """Go away as an unplugged disk does."""
        self._server.kill()
        self._server.wait()

    def come_back(self) -> None:
        """Be plugged in again."""
        self.unmount()
        self._serve()

    def unmount(self) -> None:
        """End."""
        ctypes.CDLL(None).umount2(os.fsencode(self.path), MNT_DETACH)
        self.vanish()

    def _serve(self) -> None:
        command = [sys.executable, "-I", "-S", __file__, self.path, self._backing, self._orders]
        self._server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
        assert self._server.stdout is not None
        with self._server.stdout as said:
            self.works = said.readline() == "mounted\n"


@contextmanager
def failing_disk(folder: Path) -> Iterator[Mounted | None]:
    """Mount a failing disk below a folder; yields None where the machine does not allow it."""
    disk = Mounted(folder)
    try:
        yield disk if disk.works else None
    finally:
        disk.unmount()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
