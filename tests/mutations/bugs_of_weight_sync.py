# SPDX-License-Identifier: Apache-2.0
"""Bugs in how weights get from their sender to the rollouts: bytes, versions, and who waits for whom."""

from bug import Bug

_SYNC = "engine/weight_sync"
_BASE, _BUCKETS = f"{_SYNC}/base.py", f"{_SYNC}/buckets.py"
_DISK, _PULL, _SERVED = f"{_SYNC}/disk.py", f"{_SYNC}/pull.py", f"{_SYNC}/weight_server.py"

_CONTRACT = "../contract/weight_sync"
_CUT = tuple(f"{_CONTRACT}/test_{name}.py" for name in ("disk_transport", "transports"))

TESTS = {
    _BASE: ("engine/test_weights.py", *_CUT),
    _BUCKETS: ("engine/test_weights.py", *_CUT),
    _DISK: _CUT,
    _PULL: (*_CUT, f"{_CONTRACT}/test_pull.py"),
    _SERVED: (*_CUT, f"{_CONTRACT}/test_pull.py"),
}

BUGS = {
    "a source that has gone on is sent as the offered version": Bug(
        _BASE, "if source.version != ticket.version:", "if source.version < ticket.version:"
    ),
    "a rank that fails leaves the others in the gathering": Bug(
        _BASE, "            deque(pieces, maxlen=0)\n", "            pass\n"
    ),
    "the table of another source is offered": Bug(
        _BASE, "if self._table is None or self._source() is not source:", "if self._table is None:"
    ),
    "a table that no longer fits is offered again": Bug(
        _BASE, "                self._table = None\n                names", "                names"
    ),
    "tensors with other bytes are taken": Bug(_BASE, "if received != sent]:", "if False]:"),
    "weights of another version are taken": Bug(
        _BASE, "if snapshot.stamp != seal.stamp:", "if snapshot.stamp.fingerprint != seal.stamp.fingerprint:"
    ),
    "an address that fails is an error of one rank": Bug(
        _BASE,
        "except (OSError, DLRoverRLError) as error:  # the other ranks",
        "except ZeroDivisionError as error:  # the other ranks",
    ),
    "integers are cast to the dtype of the weights": Bug(
        _BASE, "tensor.to(dtype) if tensor.is_floating_point() else tensor)", "tensor.to(dtype))"
    ),
    "memory that is in use is written again": Bug(
        _BUCKETS, "if view() is None and len(block) == nbytes]", "if len(block) == nbytes]"
    ),
    "a file that is cut is read": Bug(_BUCKETS, "        if nbytes != self._size:\n", "        if False:\n"),
    "the last bucket has no end": Bug(_BUCKETS, "min(start + size, end)) for", "start + size) for"),
    "weights are whole before their seal": Bug(
        _BUCKETS,
        "        self._map[seal_offset(self.table) :] = packed_seal\n        self.publish(self._nbytes + 1)\n",
        "        self.publish(self._nbytes + 1)\n",
    ),
    "a receiver does not lock what it reads": Bug(
        _BUCKETS,
        "        if try_lock(descriptor, lock):\n",
        "        if lock == fcntl.LOCK_SH or try_lock(descriptor, lock):\n",
    ),
    "the fingerprint of a tensor in two buckets is the one of its end": Bug(
        _BUCKETS, "crc32_combine(self.crcs[tensor], crc, len(part))", "crc"
    ),
    "a version on disk may be lost with the power": Bug(_DISK, "                os.fsync(file)\n", ""),
    "the last version on disk goes before the next is whole": Bug(
        _DISK, "if path != last or last.stem == part.stem:", "if True:"
    ),
    "two senders write at the same time": Bug(_DISK, "while not try_lock(descriptor, fcntl.LOCK_EX):", "while False:"),
    "versions of living runs are removed": Bug(_DISK, "st_mtime > _ABANDONED_S", "st_mtime < _ABANDONED_S"),
    "a version on disk that is kept gets old": Bug(
        _DISK, "                os.utime(path)\n", "                os.stat(path)\n"
    ),
    "a full disk is another error": Bug(
        _DISK, "            if is_disk_full(error):\n                raise\n            message", "            message"
    ),
    "a sender that has ended is waited for": Bug(_DISK, "if ticket_id == ticket.id and", "if False and"),
    "a file that is cut while it is read is taken": Bug(
        _DISK,
        "        if not count:\n            raise WeightSyncError",
        "        if not count:\n            return\n            raise WeightSyncError",
    ),
    "a closed receiver removes the sender's files": Bug(_DISK, "        if self._last:\n", "        if True:\n"),
    "a sender that ended is waited for until the time is over": Bug(
        _PULL, "if _has_ended(connection) and weights.progress() <= offset:", "if False:"
    ),
    "receivers wait for a version that failed": Bug(
        _SERVED, "        finally:\n            self._versions.stop_waiting()\n", "        finally:\n            pass\n"
    ),
    "a sender that is gone is a fault of the network": Bug(
        _PULL,
        'raise WeightsLost(f"{ticket} cannot be fetched: {error}")',
        'raise WeightSyncError(f"{ticket} cannot be fetched: {error}")',
    ),
    "a version that failed is given to receivers": Bug(
        _SERVED,
        "                self._spare = self._files.pop(ticket.id, None)\n            raise",
        "                pass\n            raise",
    ),
    "the last version goes when the next one begins": Bug(
        _SERVED, "if ticket_id != ticket.id][:-1], ticket.id]", "if ticket_id != ticket.id], ticket.id]"
    ),
    "a file that receivers use is written again": Bug(_SERVED, " and not each.is_open()), None)", "), None)"),
}
