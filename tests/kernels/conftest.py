"""On a machine without CUDA the kernels of this room run in Triton's interpreter.

Triton reads the variable when it is first imported, so it is set here, before any test file of
the folder is.
"""

import os
import sys

import torch

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")
