"""CUTLASS's vocabulary. Imported here and nowhere else: the package reads the program's command line when it is imported, so that
a user's ``train.py --help`` would print its options and end."""

from __future__ import annotations

import sys

_argv, sys.argv = sys.argv, sys.argv[:1]
try:
    import cutlass_library
    from cutlass_library import DataType, DataTypeSize, DataTypeTag, KernelScheduleType, MathOperation, SharedMemPerCC
finally:
    sys.argv = _argv

__all__ = [
    "DataType",
    "DataTypeSize",
    "DataTypeTag",
    "KernelScheduleType",
    "MathOperation",
    "SharedMemPerCC",
    "cutlass_library",
]
