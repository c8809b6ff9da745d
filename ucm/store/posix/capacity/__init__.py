# SPDX-License-Identifier: MIT
"""Keep a storage root below its capacity: what is evicted, when, and by whom.

Every process tells in small files which blocks it wrote and used (`uses`). One of them at a time runs an
evictor, a process of its own (`service` starts it, `process` is its program): it knows all blocks of the
root by the minute of their last use (`index`) and removes the oldest minutes (`evictor`).
"""
